//! Memory that the ranks of a host reach in each other: allocated here, mapped there when it is first used.
//!
//! A group is a domain of [`crate::share`]. Memory that [`RankMemory::alloc`] makes has a number there at once; other shareable
//! memory of this process (of another group, or of the context) gets one, and may be asked for in this group, when it is first used
//! in it. The number travels with an operation. A peer that hears of it asks the owner, and keeps the mapping until the owner
//! has freed the memory or the group is closed.
//!
//! The owner says in its desk, in the line [`Desk::RELEASED`], how many of its allocations are gone, and which ones went
//! last:
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | how many |
//! | 8..40 | the numbers of the last [`LAST`] of them, the k-th at k modulo [`LAST`] |
//!
//! Memory of another allocator of this process has a number as long as its allocations are there (see [`crate::share`]).
//! Peers keep mappings of memory of GPUs up to a number of bytes ([`MOST`]) and as long as they use them ([`IDLE`]). Peers that
//! are threads of the same process do not map it: they use it where it is.
//!
//! The number is written before the count. A reader that was away for too long does not know which ones it has
//! missed, and gives up all its mappings of that owner; a mapping that is in use stays until its user is done.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tensorwire_device::fd::Fd;
use tensorwire_device::secret::{Id, Secret};
use tensorwire_device::sync::{AtomicUsize, Ordering, fence};
use tensorwire_device::{Abort, Deadline, DeviceId, Flag, Handle, Region, Span};

use super::descriptors::{Descriptors, copies};
use crate::context::Context;
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::{self, Asked};
use crate::share::{Domain, LenderId, Patience, PeerConnection, Reason, Share, Trouble, Whom};
use crate::shm::control::{Control, Desk};
use crate::shm::member::Member;

/// How many released regions the desk names; a power of two, because the count wraps.
const LAST: usize = 4;
/// Where it does so.
const NAMES: usize = 8;
/// How many calls of `sweep` make one sweep.
const CALLS: usize = 16;
/// How many regions one sweep looks at, so that it costs the same however many there are.
const GLANCE: usize = 8;
/// How long a peer that lives may refuse before that is final.
pub(crate) const MEND: Duration = Duration::from_secs(2);
/// The same where there is another way.
pub(crate) const SHORT_MEND: Duration = Duration::from_millis(200);
/// The most bytes of peers' GPU memory that stay mapped, all of the group together: more than the tensors of a program are. They
/// cost addresses, and no memory as long as their owner has not freed it.
const MOST: usize = 256 << 30;
/// How long a mapping of GPU memory stays that nobody uses.
const IDLE: Duration = Duration::from_secs(120);
/// The same if little memory of that GPU is free. Its owner may be about to free it, and to want it back at once.
const IDLE_IF_SHORT: Duration = Duration::from_secs(2);
/// How long the watcher may take to hear of a death.
const HEARD: Duration = Duration::from_millis(500);

/// The shareable memory of one rank in one group: its own, and what it has mapped of others.
pub(crate) struct RankMemory {
    context: Arc<Context>,
    control: Arc<Control>,
    group: Id,
    secret: Secret,
    rank: usize,
    /// All ranks of the group.
    members: Vec<Member>,
    /// Held while a thread writes to the own `RELEASED` line.
    telling: Mutex<()>,
    /// The `RELEASED` lines of the ranks of this host, by place.
    released: Vec<Flag>,
    /// What is mapped of the ranks of this host, by place.
    mapped: Mutex<Vec<Mapped>>,
    /// How many mappings there are; looked at without the lock.
    mappings: AtomicUsize,
    /// Those of other ranks that are threads of this process, by place.
    beside: Vec<Option<Weak<Share>>>,
    /// Calls of `sweep`, more or less: threads may miss one.
    calls: AtomicUsize,
    descriptors: Descriptors,
}

/// What a peer is asked for, by its number.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    what: &'static str,
    doing: &'static str,
    number: u64,
    /// Why it may be gone.
    gone: &'static str,
}

/// What is mapped of one peer.
struct Mapped {
    /// How many of its regions were gone when this rank last looked.
    seen: u32,
    /// The mappings of others.
    regions: Vec<Kept>,
    /// The connection to it, once it was asked for something.
    connection: Option<Arc<PeerConnection>>,
}

/// A mapping of a peer's region.
struct Kept {
    /// The peer's number of it.
    id: u64,
    region: Arc<dyn Region>,
    /// Bytes of a GPU; nothing for host memory.
    bytes: usize,
    used: Instant,
}

impl RankMemory {
    /// None yet. Peers may ask from now on.
    pub(crate) fn new(
        context: &Arc<Context>,
        control: &Arc<Control>,
        (group, secret): (Id, Secret),
        members: &[Member],
        rank: usize,
    ) -> Result<Arc<Self>> {
        let desk = |place| control.flag(control.map().desk(place) + Desk::RELEASED);
        let released: Vec<Flag> = (0..control.ranks().len()).map(desk).collect::<Result<_>>()?;
        let mapped = |flag: &Flag| Mapped { seen: flag.load(), regions: Vec::new(), connection: None };
        let mapped = released.iter().map(mapped).collect();
        let beside = |&other: &usize| {
            (other != rank).then(|| Share::in_this_process(members.get(other)?.identity)).flatten()
        };
        let beside = control.ranks().iter().map(beside).collect();
        let memory = Arc::new(Self {
            context: context.clone(),
            control: control.clone(),
            group,
            secret,
            rank,
            members: members.to_vec(),
            telling: Mutex::default(),
            released,
            mapped: Mutex::new(mapped),
            mappings: AtomicUsize::new(0),
            beside,
            calls: AtomicUsize::new(0),
            descriptors: Descriptors::default(),
        });
        let domain: Arc<dyn Domain> = memory.clone();
        context.share().enter(group, secret, Arc::downgrade(&domain));
        Ok(memory)
    }

    /// New memory that peers of this host can map.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<Span> {
        self.context.birth().check("the group")?;
        self.context.share().sweep(usize::MAX);
        let span = Span::whole(self.context.host().alloc(bytes)?);
        self.find(&span)?;
        Ok(span)
    }

    /// Shares what another group of this rank shares.
    pub(crate) fn inherit(&self, from: &Self) {
        self.context.share().inherit(from.group, self.group);
    }

    /// The rank has left the group: nobody asks in it any more, and what was mapped of others goes with its last user.
    pub(crate) fn close(&self) {
        // In a forked child the locks may be held for ever.
        if !self.context.birth().is_ours() {
            return;
        }
        self.context.share().leave(self.group);
        self.descriptors.close();
        let mut mapped = self.mapped();
        let all = mapped.iter_mut().map(|each| (std::mem::take(&mut each.regions), each.connection.take()));
        let all: Vec<_> = all.collect();
        self.mappings.store(0, Ordering::Relaxed);
        drop(mapped);
        drop(all);
    }

    /// The number of the allocation that a span lies in, and where in it; nothing if peers cannot map it. Shareable memory
    /// of this process that came from elsewhere gets its number here. An error says why memory of a GPU cannot be mapped.
    #[inline]
    pub(crate) fn find(&self, span: &Span) -> Result<Option<(u64, usize)>> {
        match self.context.share().offer(span, self.group) {
            None if span.region().host_addr().is_none() => {
                self.context.share().offer_adopted(span, self.group).map(Some)
            }
            found => Ok(found),
        }
    }

    /// Notices memory that is gone: own, so that peers give up their mappings, and that of peers. Meant for every
    /// operation: costs next to nothing, because it does something only once in a while.
    pub(crate) fn sweep(&self) {
        let calls = self.calls.load(Ordering::Relaxed).wrapping_add(1);
        self.calls.store(calls, Ordering::Relaxed);
        if calls.is_multiple_of(CALLS) {
            self.context.share().sweep(GLANCE);
        }
    }

    /// Does what enough calls of `sweep` do.
    pub(crate) fn sweep_now(&self) {
        (0..CALLS).for_each(|_| self.sweep());
    }

    /// The mapping of a peer's region, by the peer's place on this host. `stop` ends the wait for it.
    pub(crate) fn peer(
        &self,
        place: usize,
        id: u64,
        stop: &Abort,
        deadline: Deadline,
    ) -> Result<Arc<dyn Region>> {
        self.peer_within(place, id, stop, deadline, MEND)
    }

    /// The same. A peer that lives may refuse for so long before that is final.
    pub(crate) fn peer_within(
        &self,
        place: usize,
        id: u64,
        stop: &Abort,
        deadline: Deadline,
        mend: Duration,
    ) -> Result<Arc<dyn Region>> {
        self.context.birth().check("the group")?;
        if place == self.control.me() {
            let own = self.context.share().offered(id, self.group);
            return own.ok_or_else(|| self.no_such(place, memory(id)));
        }
        let Some(released) = self.released.get(place) else {
            let here = self.released.len();
            return Err(Error::misuse(format!("there is no place {place} on a host of {here} ranks")));
        };
        let beside = self.beside.get(place).and_then(|share| share.as_ref()?.upgrade());
        if let Some(region) = beside.and_then(|share| share.offered_here(id, self.group)) {
            // It is not kept: it keeps what its owner may want to let go of.
            return region;
        }
        // Declared before the locks, so that what is gone is dropped behind them.
        let (_gone, _gone_later);
        let before = {
            let mapped = &mut self.mapped()[place];
            _gone = self.give_up(mapped, place);
            let known = mapped.regions.iter_mut().find(|kept| kept.id == id);
            if let Some(kept) = known {
                if kept.bytes > 0 {
                    kept.used = Instant::now();
                }
                return Ok(kept.region.clone());
            }
            released.load()
        };
        let region = self.fetch(place, id, stop, (deadline, mend))?;
        let all = &mut *self.mapped();
        let mapped = &mut all[place];
        let mut gone = self.give_up(mapped, place);
        // If the owner has freed something meanwhile, it may have been this one: then nobody would give it up again.
        if released.load() == before && mapped.regions.iter().all(|kept| kept.id != id) {
            let bytes = if region.host_addr().is_some() { 0 } else { region.len() };
            if bytes > 0 {
                gone.extend(self.make_room(all, bytes));
                self.context.share().look_after();
            }
            let kept = Kept { id, region: region.clone(), bytes, used: Instant::now() };
            all[place].regions.push(kept);
            self.mappings.fetch_add(1, Ordering::Relaxed);
        }
        _gone_later = gone;
        Ok(region)
    }

    /// Gives up what was not used for the longest time, until so many bytes more are not too many.
    fn make_room(&self, all: &mut [Mapped], bytes: usize) -> Vec<Kept> {
        let mut gone = Vec::new();
        let sum = |all: &[Mapped]| all.iter().flat_map(|each| &each.regions).map(|kept| kept.bytes).sum();
        let mut have: usize = sum(all);
        while have.saturating_add(bytes) > MOST {
            let oldest =
                |each: &Mapped| each.regions.iter().filter(|kept| kept.bytes > 0).map(|kept| kept.used).min();
            let Some(oldest) = all.iter().filter_map(oldest).min() else { break };
            gone.extend(self.extract(all, |kept| kept.bytes > 0 && kept.used <= oldest));
            have = sum(all);
        }
        gone
    }

    /// Takes mappings out.
    fn extract(&self, all: &mut [Mapped], which: impl Fn(&Kept) -> bool) -> Vec<Kept> {
        let each = all.iter_mut().flat_map(|mapped| mapped.regions.extract_if(.., |kept| which(kept)));
        let gone: Vec<Kept> = each.collect();
        self.mappings.fetch_sub(gone.len(), Ordering::Relaxed);
        gone
    }

    fn mapped(&self) -> MutexGuard<'_, Vec<Mapped>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives up the mappings of what a peer has freed since this rank last looked. The caller drops them when it
    /// holds no lock.
    #[must_use]
    #[inline]
    fn give_up(&self, mapped: &mut Mapped, place: usize) -> Vec<Kept> {
        let now = self.released[place].load();
        if now == mapped.seen { Vec::new() } else { self.give_up_freed(mapped, place, now) }
    }

    fn give_up_freed(&self, mapped: &mut Mapped, place: usize, now: u32) -> Vec<Kept> {
        let gone = match self.gone_since(place, mapped.seen, now) {
            Some(ids) => mapped.regions.extract_if(.., |kept| ids.contains(&kept.id)).collect(),
            None => std::mem::take(&mut mapped.regions),
        };
        self.mappings.fetch_sub(gone.len(), Ordering::Relaxed);
        mapped.seen = now;
        gone
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

    /// Asks a peer for its region.
    fn fetch(
        &self,
        place: usize,
        id: u64,
        stop: &Abort,
        (deadline, mend): (Deadline, Duration),
    ) -> Result<Arc<dyn Region>> {
        let (start, domain) = (Instant::now(), (self.group, &self.secret));
        loop {
            let handle = self.ask(place, memory(id), stop, (deadline, mend), |connection, patience| {
                connection.memory(domain, id, &[], patience)
            })?;
            let Member { identity, address, .. } = self.there(place);
            // A handle without a descriptor names a place in its maker's memory. As long as memory that was freed there is
            // still mapped here, the driver refuses it. A thread unmaps it.
            let again = matches!(handle, Handle::Gpu(_)) && handle.fd().is_none();
            match self.context.share().import_all(LenderId::new(*identity, address), handle) {
                Err(Error::Peer(_)) if again && start.elapsed() < mend.max(MEND) && !deadline.passed() => {
                    interrupt::sleep(Duration::from_millis(2))?;
                }
                mapped => return mapped,
            }
        }
    }

    /// What this rank offers to others, and was told of.
    pub(crate) fn descriptors(&self) -> &Descriptors {
        &self.descriptors
    }

    /// Takes descriptors that the rank at a place of this host offers. There must be so many.
    pub(crate) fn take_fds(
        &self,
        place: usize,
        number: u64,
        count: usize,
        deadline: Deadline,
    ) -> Result<Vec<Fd>> {
        let gone = "it has withdrawn them, or was told that they were taken";
        let wanted = Wanted { what: "descriptors", doing: "taking", number, gone };
        let me = self.members[self.rank].identity;
        if place == self.control.me() {
            let own = self.descriptors.find(number, me);
            return own.ok_or_else(|| self.no_such(place, wanted)).and_then(|own| copies(&own));
        }
        let taken = self.ask(place, wanted, &self.control.abort, (deadline, MEND), |connection, patience| {
            connection.descriptors((self.group, &self.secret), number, count, patience)
        });
        // The group has failed between two looks.
        taken.map_err(|error| match &error {
            Error::Aborted(_) => self.control.error(&self.members, self.rank).unwrap_or(error),
            _ => error,
        })
    }

    /// Says that descriptors were taken which were offered to this rank alone. A rank that does not hear it keeps its own
    /// until it closes the group.
    pub(crate) fn say_taken(&self, place: usize, number: u64, deadline: Deadline) {
        if place == self.control.me() {
            return self.descriptors.taken(number, self.members[self.rank].identity);
        }
        let patience = Patience { deadline, sensible: &|| self.control.failure().is_none() };
        let connection = self.mapped()[place].connection.clone();
        let told =
            connection.map(|connection| connection.taken((self.group, &self.secret), number, patience));
        if let Some(Err(trouble)) = told {
            tracing::debug!(
                "{} was not told that its descriptors were taken: {trouble:?}",
                self.there(place)
            );
        }
    }

    /// Asks a peer for something, until the deadline and as long as there is hope.
    fn ask<T>(
        &self,
        place: usize,
        wanted: Wanted,
        stop: &Abort,
        (deadline, mend): (Deadline, Duration),
        question: impl Fn(&PeerConnection, Patience<'_>) -> Result<T, Trouble>,
    ) -> Result<T> {
        let start = Instant::now();
        let Wanted { what, doing, number, .. } = wanted;
        loop {
            let asked = Asked::default();
            let sensible = || self.hopeless(place, what, stop).is_ok() && asked.goes_on();
            let patience = Patience { deadline, sensible: &sensible };
            let answer = self.reach(place, patience).and_then(|connection| question(&connection, patience));
            asked.end()?;
            let trouble = match answer {
                Ok(answer) => return Ok(answer),
                Err(trouble) => trouble,
            };
            // First, because the rest may only follow from it.
            self.hopeless(place, what, stop)?;
            let reason = match trouble {
                Trouble::Refused(Reason::Gone, _) => return Err(self.no_such(place, wanted)),
                Trouble::Ours(error) => return Err(error),
                Trouble::Lost(error) if start.elapsed() >= mend => return Err(error),
                Trouble::Lost(error) => Some(error.to_string()),
                Trouble::Nonsense(nonsense) => {
                    let broken = self.mapped()[place].connection.take();
                    drop(broken);
                    let text = format!("its answer to a request for {what} is wrong ({nonsense})");
                    return Err(self.blame(place, PeerFaultKind::Misbehaved, &text));
                }
                Trouble::Slow => None,
                // It is going, has not come so far, or has no descriptors to spare at the moment.
                Trouble::Unreachable(error) => Some(error.to_string()),
                Trouble::Closed(None) => Some("it closed the connection without an answer".into()),
                Trouble::Closed(Some(reason)) | Trouble::Refused(_, reason) => Some(reason),
            };
            if deadline.passed() {
                let doing = format!("{doing} {what} #{number} of {}", self.there(place));
                let missing = "it does not answer at its private socket; is it stopped?";
                let missing = reason.unwrap_or_else(|| missing.into());
                return Err(Error::timed_out(doing, start.elapsed(), missing).about([self.there(place).rank]));
            }
            match reason {
                Some(reason) if start.elapsed() >= mend => {
                    let text = format!("its {what} #{number} cannot be had: {reason}");
                    return Err(self.blame(place, PeerFaultKind::Refused, &text));
                }
                Some(_) => interrupt::sleep(Duration::from_millis(2))?,
                None => {}
            }
        }
    }

    /// Fails when a peer will not answer any more, or nobody needs the answer.
    fn hopeless(&self, place: usize, what: &str, stop: &Abort) -> Result<()> {
        let there = self.there(place);
        if let Some(error) = self.control.error(&self.members, self.rank) {
            return Err(error);
        }
        if self.control.has_left(there.rank) {
            let text = format!("it has closed the group, and its {what} went with it");
            return Err(Error::peer(PeerFaultKind::Left, there.to_string(), Some(there.rank), text));
        }
        if there.is_gone(&self.members[self.rank]) {
            return Err(self.ended(there));
        }
        if stop.is_set() {
            return Err(Error::Aborted(format!("while {what} of {there} was asked for")));
        }
        Ok(())
    }

    /// The error of a peer whose process has ended. The watcher hears of it within a moment, too, and knows more.
    fn ended(&self, there: &Member) -> Error {
        let soon = Deadline::after(HEARD);
        while !soon.passed() {
            if let Some(error) = self.control.error(&self.members, self.rank) {
                return error;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        there.died("its process has ended")
    }

    /// The connection to a peer.
    fn reach(&self, place: usize, patience: Patience<'_>) -> Result<Arc<PeerConnection>, Trouble> {
        let there = self.there(place);
        let (identity, address) = (there.identity, &there.address);
        let whom = Whom { identity, address, domain: self.group, secret: &self.secret };
        let connection = self.context.share().reach(&whom, patience)?;
        // The next one finds it, and it goes with the group.
        let before = self.mapped()[place].connection.replace(connection.clone());
        drop(before);
        Ok(connection)
    }

    fn there(&self, place: usize) -> &Member {
        &self.members[self.control.ranks()[place]]
    }

    fn no_such(&self, place: usize, Wanted { what, number, gone, .. }: Wanted) -> Error {
        let text = format!("it has no {what} #{number}: {gone}");
        self.blame(place, PeerFaultKind::Misbehaved, &text)
    }

    fn blame(&self, place: usize, kind: PeerFaultKind, text: &str) -> Error {
        let there = self.there(place);
        Error::peer(kind, there.to_string(), Some(there.rank), text)
    }
}

/// A peer's region.
fn memory(number: u64) -> Wanted {
    Wanted { what: "memory", doing: "mapping", number, gone: "it was freed while it was still in use" }
}

impl Domain for RankMemory {
    fn memory(&self, number: u64, _pass: &[u8]) -> Result<Arc<dyn Region>, (Reason, String)> {
        let found = self.context.share().offered(number, self.group);
        found.ok_or_else(|| (Reason::Gone, format!("there is no memory #{number} in this group")))
    }

    fn descriptors(&self, peer: Id, number: u64) -> Option<Vec<Arc<Fd>>> {
        self.descriptors.find(number, peer)
    }

    fn taken(&self, peer: Id, number: u64) {
        self.descriptors.taken(number, peer);
    }

    fn released(&self, number: u64) {
        let _alone = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        let count = &self.released[self.control.me()];
        let before = count.load();
        let line = self.control.map().desk(self.control.me()) + Desk::RELEASED;
        let name = line + NAMES + (before as usize % LAST) * 8;
        if let Err(error) = self.control.region().write(name, &number.to_le_bytes()) {
            tracing::warn!("saying that memory is gone: {error}");
        }
        count.store(before.wrapping_add(1));
    }

    fn look(&self) {
        if self.mappings.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut mapped = self.mapped();
        let each = mapped.iter_mut().enumerate();
        let gone: Vec<_> = each.flat_map(|(place, mapped)| self.give_up(mapped, place)).collect();
        let now = Instant::now();
        let idle = |kept: &Kept, long: Duration| kept.bytes > 0 && now > kept.used + long;
        let mut short: Vec<DeviceId> = Vec::new();
        for kept in mapped.iter().flat_map(|each| &each.regions).filter(|kept| idle(kept, IDLE_IF_SHORT)) {
            if !short.contains(&kept.region.device()) {
                short.push(kept.region.device());
            }
        }
        drop(mapped);
        // The driver is asked without the lock.
        short.retain(|id| self.context.device(id).is_ok_and(|device| device.is_short()));
        let mut mapped = self.mapped();
        let idle = self.extract(&mut mapped, |kept| {
            idle(kept, IDLE) || idle(kept, IDLE_IF_SHORT) && short.contains(&kept.region.device())
        });
        drop(mapped);
        drop((gone, idle));
    }
}

impl Drop for RankMemory {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for RankMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RankMemory({} mapped)", self.mappings.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests;
