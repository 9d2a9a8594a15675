//! Memory that the ranks of a host reach in each other: allocated here, mapped there when it is first used.
//!
//! A region that [`Memory::alloc`] makes gets a number, which is never used again; so does other shareable memory of
//! this process (of another group, or of the context) when it is first used in the group. A peer that hears of the number (it
//! travels with an operation) connects to the owner's private socket and asks for it; the owner's watcher thread
//! answers with the descriptor (see `watch::clients`), so the owner's own threads may be busy with other things. The
//! mapping is kept until the owner frees the region or the group is closed.
//!
//! The owner says in its desk, in the line [`Desk::RELEASED`], how many of its regions are gone, and which ones went
//! last:
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | how many |
//! | 8..40 | the numbers of the last [`LAST`] of them, the k-th at k modulo [`LAST`] |
//!
//! The number is written before the count. A reader that was away for too long does not know which ones it has
//! missed, and gives up all its mappings of that owner; a mapping that is in use stays until its user is done.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tensorwire_device::fd;
use tensorwire_device::secret::{Id, Secret};
use tensorwire_device::sync::{AtomicUsize, Ordering, fence};
use tensorwire_device::{Abort, Deadline, Flag, Handle, Region, Span};

use crate::context::Context;
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::{self, Asked};
use crate::shm::control::{Control, Desk, error_of};
use crate::shm::member::Member;
use crate::watch::clients;

/// How many released regions the desk names; a power of two, because the count wraps.
const LAST: usize = 4;
/// Where it does so.
const NAMES: usize = 8;
/// How many calls of `sweep` make one sweep.
const CALLS: usize = 16;
/// How many regions one sweep looks at, so that it costs the same however many there are.
const GLANCE: usize = 8;
/// How long a peer that lives may refuse before that is final.
const MEND: Duration = Duration::from_secs(2);

/// The shareable memory of one rank in one group: its own, and what it has mapped of others.
pub(crate) struct Memory {
    context: Arc<Context>,
    control: Arc<Control>,
    group: Id,
    secret: Secret,
    rank: usize,
    /// All ranks of the group.
    members: Vec<Member>,
    exports: Arc<Exports>,
    /// The `RELEASED` lines of the ranks of this host, by place.
    released: Vec<Flag>,
    /// What is mapped of the ranks of this host, by place.
    mapped: Mutex<Vec<Mapped>>,
    /// How many mappings there are; looked at without the lock.
    mappings: AtomicUsize,
    /// Calls of `sweep`, more or less: threads may miss one.
    calls: AtomicUsize,
}

/// What is mapped of one peer.
struct Mapped {
    /// How many of its regions were gone when this rank last looked.
    seen: u32,
    /// The mappings of others, by number.
    regions: Vec<(u64, Arc<dyn Region>)>,
}

impl Memory {
    /// None yet. The watcher answers for `exports` from the moment that it gets them.
    pub(crate) fn new(
        context: &Arc<Context>,
        control: &Arc<Control>,
        (group, secret): (Id, Secret),
        members: &[Member],
        rank: usize,
    ) -> Result<Self> {
        let desk = |place| control.flag(control.map().desk(place) + Desk::RELEASED);
        let released: Vec<Flag> = (0..control.ranks().len()).map(desk).collect::<Result<_>>()?;
        let mapped = released.iter().map(|flag| Mapped { seen: flag.load(), regions: Vec::new() }).collect();
        Ok(Self {
            context: context.clone(),
            control: control.clone(),
            group,
            secret,
            rank,
            members: members.to_vec(),
            exports: Arc::default(),
            released,
            mapped: Mutex::new(mapped),
            mappings: AtomicUsize::new(0),
            calls: AtomicUsize::new(0),
        })
    }

    /// What peers may ask for.
    pub(crate) fn exports(&self) -> &Arc<Exports> {
        &self.exports
    }

    /// New memory that peers of this host can map.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<Span> {
        self.context.birth().check("the group")?;
        self.notice(usize::MAX);
        let region = self.context.host().alloc(bytes)?;
        self.exports.add(&region);
        Ok(Span::whole(region))
    }

    /// Shares what another group of this rank shares, under new numbers.
    pub(crate) fn inherit(&self, from: &Self) {
        let live: Vec<_> = from.exports.lock().regions.iter().filter_map(|it| it.region.upgrade()).collect();
        for region in &live {
            self.exports.add(region);
        }
    }

    /// The number of the region that a span lies in, and where in it; nothing if peers cannot map it. Shareable memory
    /// of this process that came from elsewhere gets its number here.
    pub(crate) fn find(&self, span: &Span) -> Option<(u64, usize)> {
        // Asked first: other memory costs no lock.
        span.region().shareable().then(|| (self.exports.add(span.region()), span.offset()))
    }

    /// Notices memory that is gone: own, so that peers give up their mappings, and that of peers. Meant for every
    /// operation: costs next to nothing, because it does something only once in a while.
    pub(crate) fn sweep(&self) {
        let calls = self.calls.load(Ordering::Relaxed).wrapping_add(1);
        self.calls.store(calls, Ordering::Relaxed);
        if calls.is_multiple_of(CALLS) {
            self.context.sweep(GLANCE);
        }
    }

    /// Does what enough calls of `sweep` do.
    pub(crate) fn sweep_now(&self) {
        (0..CALLS).for_each(|_| self.sweep());
    }

    /// Looks at so many regions of this rank, and at all mappings.
    pub(crate) fn notice(&self, looks: usize) {
        self.release(looks);
        self.give_up_all();
    }

    /// The mapping of a peer's region, by the peer's place on this host. `stop` ends the wait for it.
    pub(crate) fn peer(
        &self,
        place: usize,
        id: u64,
        stop: &Abort,
        deadline: Deadline,
    ) -> Result<Arc<dyn Region>> {
        self.context.birth().check("the group")?;
        if place == self.control.me() {
            return self.exports.get(id).ok_or_else(|| self.no_such(place, id));
        }
        let Some(released) = self.released.get(place) else {
            let here = self.released.len();
            return Err(Error::misuse(format!("there is no place {place} on a host of {here} ranks")));
        };
        let before = {
            let mapped = &mut self.mapped()[place];
            self.give_up(mapped, place);
            let known = mapped.regions.iter().find(|(other, _)| *other == id);
            if let Some((_, region)) = known {
                return Ok(region.clone());
            }
            released.load()
        };
        let region = self.fetch(place, id, stop, deadline)?;
        let mapped = &mut self.mapped()[place];
        self.give_up(mapped, place);
        // If the owner has freed something meanwhile, it may have been this one: then nobody would give it up again.
        if released.load() == before && mapped.regions.iter().all(|(other, _)| *other != id) {
            mapped.regions.push((id, region.clone()));
            self.mappings.fetch_add(1, Ordering::Relaxed);
        }
        Ok(region)
    }

    fn mapped(&self) -> MutexGuard<'_, Vec<Mapped>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives up all mappings of what is gone.
    fn give_up_all(&self) {
        if self.mappings.load(Ordering::Relaxed) != 0 {
            for (place, mapped) in self.mapped().iter_mut().enumerate() {
                self.give_up(mapped, place);
            }
        }
    }

    /// Looks at the next few regions of this rank, and says which of them are gone.
    fn release(&self, looks: usize) {
        // In a forked child the desk is the parent's.
        if self.exports.count.load(Ordering::Relaxed) == 0 || !self.context.birth().is_ours() {
            return;
        }
        let mut own = self.exports.lock();
        for _ in 0..looks.min(own.regions.len()) {
            own.hand = own.hand.checked_sub(1).unwrap_or(own.regions.len().saturating_sub(1));
            let at = own.hand;
            if own.regions.get(at).is_none_or(|entry| entry.region.strong_count() > 0) {
                continue;
            }
            let gone = own.regions.remove(at);
            self.exports.count.store(own.regions.len(), Ordering::Relaxed);
            let count = &self.released[self.control.me()];
            let number = count.load();
            let line = self.control.map().desk(self.control.me()) + Desk::RELEASED;
            let name = line + NAMES + (number as usize % LAST) * 8;
            if let Err(error) = self.control.region().write(name, &gone.id.to_le_bytes()) {
                tracing::warn!("saying that memory is gone: {error}");
            }
            count.store(number.wrapping_add(1));
        }
    }

    /// Gives up the mappings of what a peer has freed since this rank last looked.
    fn give_up(&self, mapped: &mut Mapped, place: usize) {
        let now = self.released[place].load();
        if now == mapped.seen {
            return;
        }
        let before = mapped.regions.len();
        match self.gone_since(place, mapped.seen, now) {
            Some(ids) => mapped.regions.retain(|(id, _)| !ids.contains(id)),
            None => mapped.regions.clear(),
        }
        self.mappings.fetch_sub(before - mapped.regions.len(), Ordering::Relaxed);
        mapped.seen = now;
    }

    /// The numbers of the regions that a peer has freed between two counts, if it still names them all.
    fn gone_since(&self, place: usize, seen: u32, now: u32) -> Option<Vec<u64>> {
        let mut names = [0; LAST * 8];
        let line = self.control.map().desk(place) + Desk::RELEASED;
        self.control.region().read(line + NAMES, &mut names).ok()?;
        fence(Ordering::Acquire);
        // It may have gone on while its line was read; the next name goes to the oldest one's place.
        let later = self.released[place].load();
        if later.wrapping_sub(seen) as usize >= LAST {
            return None;
        }
        let missed = (0..now.wrapping_sub(seen)).map(|step| seen.wrapping_add(step) as usize % LAST);
        missed.map(|at| Some(u64::from_le_bytes(names[at * 8..][..8].try_into().ok()?))).collect()
    }

    /// Asks a peer for its region, until the deadline and as long as there is hope.
    fn fetch(&self, place: usize, id: u64, stop: &Abort, deadline: Deadline) -> Result<Arc<dyn Region>> {
        let start = Instant::now();
        loop {
            let asked = Asked::default();
            let answer = self.ask(place, id, (stop, &asked), deadline);
            asked.end()?;
            let trouble = match answer {
                Ok(Some(handle)) => return self.context.import(handle),
                Ok(None) => return Err(self.no_such(place, id)),
                Err(trouble) => trouble,
            };
            self.hopeless(place, stop)?;
            if deadline.passed() {
                let doing = format!("mapping memory #{id} of {}", self.there(place));
                return Err(Error::timed_out(doing, start.elapsed(), trouble.to_string()));
            }
            match trouble {
                Trouble::Slow => {}
                Trouble::Closed(_) if start.elapsed() < MEND => {
                    interrupt::sleep(Duration::from_millis(2))?;
                }
                Trouble::Closed(reason) => {
                    let text = format!("its memory #{id} cannot be had: {reason}");
                    return Err(self.blame(place, PeerFaultKind::Refused, &text));
                }
                Trouble::Other(error) => return Err(error),
            }
        }
    }

    /// Fails when a peer will not answer any more, or nobody needs the answer.
    fn hopeless(&self, place: usize, stop: &Abort) -> Result<()> {
        let there = self.there(place);
        if let Some(failure) = self.control.failure() {
            let note = self.control.note(failure);
            return Err(error_of(failure, &note, &self.members, self.rank));
        }
        if self.control.has_left(there.rank) {
            let text = "it has closed the group, and its memory is gone with it";
            return Err(Error::peer(PeerFaultKind::Left, there.to_string(), Some(there.rank), text));
        }
        if there.is_gone(&self.members[self.rank]) {
            return Err(there.died("its process has ended"));
        }
        if stop.is_set() {
            return Err(Error::Aborted(format!("while memory of {there} was mapped")));
        }
        Ok(())
    }

    /// One try.
    fn ask(
        &self,
        place: usize,
        id: u64,
        (stop, asked): (&Abort, &Asked),
        deadline: Deadline,
    ) -> Result<Option<Handle>, Trouble> {
        let (there, me) = (self.there(place), self.context.identity());
        let hope = || self.hopeless(place, stop).is_ok() && asked.goes_on();
        let connection = fd::connect_while(&there.address, self.group, me, &self.secret, deadline, &hope)?;
        if connection.peer().identity != there.identity {
            let text = "another process answered at its private socket";
            return Err(Trouble::Other(self.blame(place, PeerFaultKind::Refused, text)));
        }
        connection.send(&clients::request(id), &[], deadline)?;
        let (frame, fds) = connection.recv_while(deadline, &hope)?;
        if frame.is_empty() {
            return Err(Trouble::Closed("it closed the connection without an answer".into()));
        }
        clients::read_answer(&frame, fds).map_err(|error| {
            let text = format!("its answer to a request for memory is wrong ({error})");
            Trouble::Other(self.blame(place, PeerFaultKind::Misbehaved, &text))
        })
    }

    fn there(&self, place: usize) -> &Member {
        &self.members[self.control.ranks()[place]]
    }

    fn no_such(&self, place: usize, id: u64) -> Error {
        let text = format!("it has no memory #{id}: it was freed while it was still in use");
        self.blame(place, PeerFaultKind::Misbehaved, &text)
    }

    fn blame(&self, place: usize, kind: PeerFaultKind, text: &str) -> Error {
        let there = self.there(place);
        Error::peer(kind, there.to_string(), Some(there.rank), text)
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (own, mapped) =
            (self.exports.count.load(Ordering::Relaxed), self.mappings.load(Ordering::Relaxed));
        write!(f, "Memory({own} regions, {mapped} mapped)")
    }
}

/// Why one try to get a peer's memory failed.
enum Trouble {
    /// It has not answered yet.
    Slow,
    /// The connection could not be made or was closed: it is going, or has no descriptors to spare at the moment.
    Closed(String),
    Other(Error),
}

impl From<tensorwire_device::Error> for Trouble {
    fn from(error: tensorwire_device::Error) -> Self {
        match error {
            tensorwire_device::Error::TimedOut => Self::Slow,
            // The socket broke or was closed under our hands; whether the peer lives is asked elsewhere.
            tensorwire_device::Error::Io { .. } | tensorwire_device::Error::Refused(_) => {
                Self::Closed(error.to_string())
            }
            other => Self::Other(other.into()),
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slow => f.write_str("it does not answer at its private socket; is it stopped?"),
            Self::Closed(reason) => f.write_str(reason),
            Self::Other(error) => error.fmt(f),
        }
    }
}

/// The regions that a rank lets its peers map. Shared with the watcher thread, which answers for them.
#[derive(Default)]
pub(crate) struct Exports {
    own: Mutex<Own>,
    /// How many there are; looked at without the lock.
    count: AtomicUsize,
}

#[derive(Default)]
struct Own {
    /// In the order of their addresses.
    regions: Vec<Export>,
    /// The last number given.
    last: u64,
    /// The region that was looked at last.
    hand: usize,
}

struct Export {
    /// What `Arc`s of the region point to. The `Weak` keeps the place from being used again.
    address: usize,
    id: u64,
    region: Weak<dyn Region>,
}

fn address(region: &Arc<dyn Region>) -> usize {
    Arc::as_ptr(region).cast::<()>() as usize
}

impl Own {
    /// Where a region is in the list, or belongs.
    fn at(&self, address: usize) -> Result<usize, usize> {
        self.regions.binary_search_by_key(&address, |entry| entry.address)
    }
}

impl Exports {
    /// A region that peers may map from now on, by its number, which it may have already.
    fn add(&self, region: &Arc<dyn Region>) -> u64 {
        let mut own = self.lock();
        match own.at(address(region)) {
            Ok(at) => own.regions[at].id,
            Err(at) => {
                own.last += 1;
                let id = own.last;
                let (address, region) = (address(region), Arc::downgrade(region));
                own.regions.insert(at, Export { address, id, region });
                self.count.store(own.regions.len(), Ordering::Relaxed);
                id
            }
        }
    }

    /// What a peer needs to map a region, if it is still there.
    pub(crate) fn export(&self, id: u64) -> Result<Option<Handle>> {
        // The region is let go before the peer has its answer: it must not seem to live on when its user drops it.
        Ok(self.get(id).map(|region| region.export()).transpose()?)
    }

    /// A region by its number, if it is still there.
    fn get(&self, id: u64) -> Option<Arc<dyn Region>> {
        self.lock().regions.iter().find(|entry| entry.id == id)?.region.upgrade()
    }

    fn lock(&self) -> MutexGuard<'_, Own> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
