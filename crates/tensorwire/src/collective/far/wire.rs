//! What the leaders of hosts send each other in a collective.
//!
//! Between each two leaders there is a connection for each direction, apart from those of messages. On it, every operation
//! says first what the ranks of the host came for ([`HELLO`]), then come its bytes. A few bytes come in the same message. All of
//! it carries the number of the operation. So what comes late, of an operation that was cancelled, is known and dropped; and
//! what comes early waits on the connection. That a host cannot go on is not said here, where the connection may be full of bytes
//! that nobody takes: see [`crate::shm::decided`].
//!
//! Nobody reads here but the leader's thread that is in the operation. It reads straight into the memory where the bytes belong.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorwire_device::host::private;
use tensorwire_device::sync::spin_loop;
use tensorwire_device::{Abort, Bell, Caching, Deadline, Dtype, Queue, Span};

use super::parts::Wanted;
use crate::collective::buffer::Buffer;
use crate::collective::lines::Stop;
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::Pace;
use crate::link::{Branch, Dial, Fault, Header, Inlet, Landing, Linked, Outlet, Standing, address};
use crate::ranks::Ranks;
use crate::shm::control::{Cause, Note};
use crate::shm::header::HEADER;
use crate::shm::sentence::{DESCRIBED, all_of};

/// What the ranks of a host came for: the header of the operation.
const HELLO: u8 = 0;
/// Bytes of the operation: what is given at once, and of results.
const BYTES: u8 = 1;
const MADE: u8 = 2;

/// Up to so many bytes ride with what the ranks came for: one message, one call of the system.
pub(super) const RIDES: usize = 3 << 10;

/// How often a thread that sleeps here looks for what rings no bell.
const LOOK: Duration = Duration::from_millis(25);
/// How long after the end of a connection the group may still hear why.
const HEARSAY: Duration = Duration::from_secs(1);
/// How many ways are kept beside one on which nothing has come.
const SPARES: usize = 8;
/// What is taken from one host before others have their turn.
const TURN: usize = 4 << 20;

/// Bytes on their way out.
struct Parcel {
    tag: u64,
    bytes: Buffer,
    put: usize,
    begun: bool,
}

/// The way to a leader.
enum To {
    None,
    Dialing(Arc<Dial>),
    Open(Box<dyn Outlet>),
}

/// A message that is to come.
struct Due {
    what: u8,
    bytes: Buffer,
    /// How many pieces of the result must have been made before: until then the memory is not free.
    after: usize,
}

/// Where bytes go that come.
enum Into {
    /// They are of an operation that this host has not come to.
    Wait,
    /// Nobody wants them any more.
    Drop,
    Keep(Vec<u8>),
    Place(Buffer),
}

struct Coming {
    header: Header,
    got: usize,
    into: Into,
}

/// A connection for each direction.
struct Lane {
    to: To,
    waiting: VecDeque<Parcel>,
    /// How many messages were begun.
    begun: u64,
    from: Option<Box<dyn Inlet>>,
    /// Whether anything has come on it, and other ways that were made before that.
    heard: bool,
    spares: Vec<Box<dyn Inlet>>,
    coming: Option<Coming>,
}

/// One other host.
struct Peer {
    /// The leader there.
    rank: usize,
    lane: Lane,
    /// What its ranks came for, once they have come to this operation.
    hello: Option<[u8; HEADER]>,
    /// What is to come in this operation, in its order.
    due: VecDeque<Due>,
    /// How many messages of what is given at once have come.
    arrived: usize,
    /// Since when it is known that it has closed the group.
    closed: Option<Instant>,
    /// Since when the connection is gone, and why.
    lost: Option<(Instant, String)>,
    /// Nothing goes between the two any more.
    broken: Option<Error>,
}

/// See the module.
pub(in crate::collective) struct Wire {
    branch: Branch,
    bell: Bell,
    /// By host. That of this host is not used.
    peers: Vec<Peer>,
    own: usize,
    queue: Box<dyn Queue>,
    number: u32,
    /// What the ranks of this host came for; nothing between operations.
    hello: Option<[u8; HEADER]>,
    /// How many pieces of its result were made.
    made: usize,
    /// What the ranks of this host came for, and the bytes that ride with it, for each host.
    hellos: Span,
}

/// What ends waiting.
pub(super) struct Until<'a> {
    pub(super) stop: &'a Abort,
    pub(super) deadline: Deadline,
    /// How long it looks before it sleeps.
    pub(super) spin: Duration,
    pub(super) pace: Pace,
}

/// Bytes of a hello with what rides along.
const LONGEST_HELLO: usize = HEADER + RIDES;

impl Wire {
    pub(super) fn open(ranks: &Ranks) -> Result<Self> {
        let Some(branch) = &ranks.branch else {
            return Err(Error::bug("a group on several hosts has no way between them"));
        };
        let bell = Bell::local();
        let peer = |host: &Vec<usize>| Peer {
            rank: host.first().copied().unwrap_or(0),
            lane: Lane::default(),
            hello: None,
            due: VecDeque::new(),
            arrived: 0,
            closed: None,
            lost: None,
            broken: None,
        };
        Ok(Self {
            branch: branch.another("collectives", &bell)?,
            bell,
            peers: ranks.hosts.iter().map(peer).collect(),
            own: ranks.hosts.iter().position(|host| host.contains(&ranks.rank)).unwrap_or(0),
            queue: ranks.context.host().queue()?,
            number: 0,
            hello: None,
            made: 0,
            hellos: Span::whole(private(ranks.hosts.len() * LONGEST_HELLO)?),
        })
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.own;
        (0..self.peers.len()).filter(move |&host| host != own)
    }

    /// Begins an operation: tells all hosts what the ranks of this one came for, and gives them what they get at once. That stays
    /// as it is until the operation is over, or a piece of the result takes its place.
    pub(super) fn begin(
        &mut self,
        number: u32,
        hello: [u8; HEADER],
        given: Vec<(usize, Buffer)>,
    ) -> Result<()> {
        self.forget(number);
        self.hello = Some(hello);
        let given: Vec<(usize, Buffer)> = given.into_iter().filter(|(_, bytes)| bytes.len() > 0).collect();
        let mut rides: Vec<Option<&Buffer>> = vec![None; self.peers.len()];
        given.iter().for_each(|(host, bytes)| _ = rides[*host].get_or_insert(bytes));
        for host in self.others() {
            rides[host] = rides[host].filter(|bytes| bytes.len() <= RIDES);
            let mut text = hello.to_vec();
            for span in rides[host].iter().flat_map(|bytes| bytes.spans()) {
                text.extend(span.to_vec()?);
            }
            let place = self.hellos.slice(host * LONGEST_HELLO..host * LONGEST_HELLO + text.len())?;
            place.write(0, &text)?;
            self.send(host, HELLO, Buffer::one(place));
        }
        let mut rode: Vec<bool> = rides.iter().map(Option::is_some).collect();
        for (host, bytes) in given {
            if !std::mem::take(&mut rode[host]) {
                self.send(host, BYTES, bytes);
            }
        }
        Ok(())
    }

    /// What was known of the operation before.
    fn forget(&mut self, number: u32) {
        (self.number, self.made) = (number, 0);
        for host in self.others() {
            let peer = &mut self.peers[host];
            (peer.hello, peer.arrived) = (None, 0);
            peer.due.clear();
        }
    }

    /// Whether all that was given is on its way.
    pub(super) fn has_sent(&self) -> bool {
        self.others().all(|host| self.peers[host].has_sent())
    }

    /// An operation does not go on here: what belongs to it is dropped, also what comes later.
    pub(super) fn give_up(&mut self, number: u32) {
        if self.number != number {
            self.forget(number);
        }
        self.hello = None;
        for host in self.others() {
            let peer = &mut self.peers[host];
            peer.due.clear();
            // Memory of the operation is the caller's again.
            if let Some(coming) = &mut peer.lane.coming
                && number_of(&coming.header) == number
            {
                coming.into = Into::Drop;
            }
            let waiting = std::mem::take(&mut peer.lane.waiting);
            if let (To::Open(outlet), Some(parcel)) = (&mut peer.lane.to, waiting.front())
                && parcel.begun
                && let Err(fault) = outlet.give_up()
            {
                peer.fault(fault);
            }
        }
    }

    fn send(&mut self, host: usize, what: u8, bytes: Buffer) {
        let tag = u64::from(self.number) << 8 | u64::from(what);
        self.peers[host].lane.waiting.push_back(Parcel { tag, bytes, put: 0, begun: false });
    }

    /// Sends bytes of a result to a host. They stay as they are until the operation is over.
    pub(super) fn give_made(&mut self, host: usize, bytes: Buffer) {
        self.send(host, MADE, bytes);
    }

    /// Bytes are to come from a host.
    pub(super) fn want(&mut self, Wanted { host, made, bytes, after }: Wanted) {
        if bytes.len() > 0 {
            self.peers[host].due.push_back(Due { what: if made { MADE } else { BYTES }, bytes, after });
        }
    }

    /// Whether a piece of what is given at once has come from all hosts.
    pub(super) fn has_piece(&self, index: usize) -> bool {
        self.others().all(|host| self.peers[host].arrived > index)
    }

    /// So many pieces of the result were made: what they were made of is not needed any more.
    pub(super) fn made(&mut self, pieces: usize) {
        self.made = pieces;
    }

    /// Whether all hosts have come, and all bytes.
    pub(super) fn is_over(&self) -> bool {
        self.others().all(|host| {
            let peer = &self.peers[host];
            peer.hello.is_some() && peer.due.is_empty() && peer.has_sent() && !peer.places()
        })
    }

    /// Moves bytes until `done` says so. `until` says what ends it before.
    pub(super) fn run(
        &mut self,
        group: &Ranks,
        Until { stop, deadline, spin, pace }: &mut Until<'_>,
        done: impl Fn(&Self) -> bool,
    ) -> Result<(), Stop> {
        let mut moved_at = Instant::now();
        loop {
            self.welcome(group)?;
            let moved = self.progress();
            self.look(group)?;
            if done(self) {
                return Ok(());
            }
            if stop.is_set() {
                return Err(Stop::Aborted);
            }
            let now = Instant::now();
            if deadline.instant() <= now {
                return Err(Stop::QueuesLate(self.missing(group)));
            }
            pace.look(now).map_err(Stop::Own)?;
            if moved {
                moved_at = now;
                continue;
            }
            if now.saturating_duration_since(moved_at) < *spin {
                spin_loop();
                continue;
            }
            let until = Deadline::at(now + LOOK).min(pace.until(*deadline));
            let bell = self.bell.clone();
            bell.sleep(stop, || {
                let moved = self.progress() || self.branch.has_arrived();
                (!moved).then(|| {
                    self.arm();
                    until
                })
            });
        }
    }

    fn arm(&self) {
        for host in self.others() {
            let peer = &self.peers[host];
            if let (To::Open(outlet), false) = (&peer.lane.to, peer.lane.waiting.is_empty()) {
                outlet.arm();
            }
            let awaited = peer.is_awaited() && !peer.waits_for_room(self.made);
            if let (Some(inlet), true) = (&peer.lane.from, awaited) {
                inlet.arm();
            }
        }
    }

    /// Takes connections that others have made, and sees who is gone.
    fn welcome(&mut self, group: &Ranks) -> Result<(), Stop> {
        // Behind the news that a rank has left, nothing of it can arrive any more: it is looked at first.
        let gone: Vec<usize> =
            self.others().filter(|&host| group.control.is_far_gone(self.peers[host].rank)).collect();
        for (identity, inlet) in self.branch.arrived() {
            let is =
                |peer: &Peer| group.members.get(peer.rank).is_some_and(|there| there.identity == identity);
            let Some(peer) = self.peers.iter_mut().find(|peer| is(peer)) else { continue };
            match inlet {
                Ok(inlet) => peer.lane.open(inlet),
                Err(error) => peer.broken = Some(error),
            }
        }
        let absent = |host: &&usize| {
            let peer = &self.peers[**host];
            peer.lane.from.is_none() && peer.is_awaited()
        };
        if let (Some(&host), true) = (gone.iter().find(absent), self.hello.is_some()) {
            return Err(self.left(group, host));
        }
        for host in self.others() {
            let peer = &mut self.peers[host];
            let Some(there) = group.members.get(peer.rank) else { continue };
            let lane = &mut peer.lane;
            if let (To::None, false) = (&lane.to, lane.waiting.is_empty()) {
                let same = group.members.get(group.rank).is_some_and(|me| me.place.boot == there.place.boot);
                let addresses = address::from_text(&group.control.address(peer.rank));
                let dial = self.branch.dial(there.identity, address::worth_a_try(addresses, same));
                lane.to = To::Dialing(dial.map_err(Stop::Own)?);
            }
            let To::Dialing(dial) = &lane.to else { continue };
            match dial.take() {
                None => {}
                Some(Ok(outlet)) => lane.to = To::Open(outlet),
                Some(Err(why)) => {
                    // The next operation tries again.
                    lane.to = To::None;
                    let text = format!(
                        "it could not be reached ({why}); set TENSORWIRE_ADDRESS there to an address that this host reaches"
                    );
                    return Err(Stop::Own(fault(group, peer.rank, PeerFaultKind::Failed, text)));
                }
            }
        }
        Ok(())
    }

    /// A rank that this operation needs has closed the group.
    fn left(&self, group: &Ranks, host: usize) -> Stop {
        group.fail(Cause::Left, self.peers[host].rank, "");
        Stop::Aborted
    }

    /// What has come that ends the operation.
    fn look(&mut self, group: &Ranks) -> Result<(), Stop> {
        if self.differs() {
            return Err(Stop::Elsewhere);
        }
        for host in self.others() {
            let peer = &self.peers[host];
            if !peer.is_awaited() && peer.has_sent() {
                continue;
            }
            if let Some(error) = &peer.broken {
                return Err(Stop::Own(error.clone()));
            }
            let closed = |inlet: &dyn Inlet| inlet.standing() == Standing::Closed;
            if peer.is_awaited() && peer.lane.from.as_deref().is_some_and(closed) {
                // Why it has left comes by way of the leaders, before the news that it has.
                let (rank, since) = (peer.rank, *self.peers[host].closed.get_or_insert_with(Instant::now));
                if group.control.is_far_gone(rank) || since.elapsed() >= HEARSAY {
                    return Err(self.left(group, host));
                }
                continue;
            }
            if let Some((since, why)) = &peer.lost
                && since.elapsed() >= HEARSAY
            {
                let text =
                    format!("the connection with it is lost ({why}); collectives cannot go on in this group");
                let error = fault(group, peer.rank, PeerFaultKind::Failed, text);
                self.peers[host].broken = Some(error.clone());
                return Err(Stop::Own(error));
            }
        }
        Ok(())
    }

    /// Whether ranks of another host came for something else.
    fn differs(&self) -> bool {
        let Some(mine) = self.hello else { return false };
        self.others().any(|host| self.peers[host].hello.is_some_and(|theirs| theirs != mine))
    }

    /// What the ranks of all hosts came for, by host; nothing of those that do not come soon.
    pub(super) fn calls(&mut self, group: &Ranks, deadline: Deadline) -> Vec<Option<[u8; HEADER]>> {
        let known = |wire: &Self| wire.others().all(|host| wire.peers[host].hello.is_some());
        while !known(self) && !deadline.passed() && group.failure().is_none() && self.welcome(group).is_ok() {
            if !self.progress() {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        let of = |(host, peer): (usize, &Peer)| if host == self.own { self.hello } else { peer.hello };
        self.peers.iter().enumerate().map(of).collect()
    }

    /// Whom it waits for.
    fn missing(&self, group: &Ranks) -> Note {
        let absent = |host: &usize| self.peers[*host].hello.is_none();
        let slow = |host: &usize| {
            let peer = &self.peers[*host];
            peer.is_awaited() || !peer.has_sent()
        };
        let mut hosts: Vec<usize> = self.others().filter(absent).collect();
        let come = hosts.is_empty();
        if come {
            hosts = self.others().filter(slow).collect();
        }
        let ranks: Vec<usize> =
            hosts.iter().filter_map(|&host| group.hosts.get(host)).flatten().copied().collect();
        let name = |&rank: &usize| {
            group.members.get(rank).map_or_else(|| format!("rank {rank}"), ToString::to_string)
        };
        let names: Vec<String> = ranks.iter().take(DESCRIBED).map(name).collect();
        let did = if come { "which has come, but not all of its bytes" } else { "which has not come" };
        let text = match &names[..] {
            [one] => format!("it waited for {one} of another host, {did}"),
            [] => "its time was over".into(),
            _ => format!("it waited for ranks of other hosts: for {}", all_of(&names, ranks.len())),
        };
        Note { ranks, text }
    }

    /// Moves what can be moved now; gives whether anything was.
    fn progress(&mut self) -> bool {
        let of = (self.number, self.hello, self.made);
        let mut moved = false;
        for host in self.others() {
            let peer = &mut self.peers[host];
            if peer.is_cut() {
                continue;
            }
            match peer.lane.put(&mut *self.queue) {
                Ok(some) => moved |= some,
                Err(fault) => peer.fault(fault),
            }
            if peer.is_cut() {
                continue;
            }
            match peer.take(&mut *self.queue, of) {
                Ok(some) => moved |= some,
                Err(fault) => peer.fault(fault),
            }
        }
        moved
    }

    /// Tells the others that this rank has closed the group.
    pub(super) fn close(&mut self) {
        for lane in self.peers.iter_mut().map(|peer| &mut peer.lane) {
            if let To::Open(outlet) = &mut lane.to {
                outlet.close();
            }
            (lane.to, lane.from) = (To::None, None);
        }
        self.branch.close();
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wire(host {} of {}, operation {})", self.own, self.peers.len(), self.number)
    }
}

impl Peer {
    /// Whether something of this operation is to come from there.
    fn is_awaited(&self) -> bool {
        self.hello.is_none() || !self.due.is_empty() || self.places()
    }

    /// Whether all bytes for it are on their way.
    fn has_sent(&self) -> bool {
        self.lane.waiting.is_empty()
    }

    /// Whether nothing goes between the two any more.
    fn is_cut(&self) -> bool {
        self.broken.is_some() || self.lost.is_some()
    }

    /// Whether bytes are on their way into memory of the operation.
    fn places(&self) -> bool {
        self.lane.coming.as_ref().is_some_and(|coming| matches!(coming.into, Into::Place(_)))
    }

    /// Whether what comes next cannot be placed before more pieces are made.
    fn waits_for_room(&self, made: usize) -> bool {
        let waits = |coming: &Coming| matches!(coming.into, Into::Wait);
        self.lane.coming.as_ref().is_some_and(waits) && self.due.front().is_some_and(|due| due.after > made)
    }

    /// Takes what has come; gives whether anything moved. It stops behind what the ranks there came for.
    fn take(
        &mut self,
        queue: &mut dyn Queue,
        (number, hello, made): (u32, Option<[u8; HEADER]>, usize),
    ) -> Linked<bool> {
        let (mut moved, mut left) = (false, TURN);
        let of = &mut self.lane;
        let Some(inlet) = &mut of.from else { return Ok(false) };
        while left > 0 {
            let coming = match &mut of.coming {
                Some(coming) => coming,
                none => {
                    let header = match inlet.begin() {
                        Err(Fault::Lost(_)) if !of.heard => {
                            of.from = of.spares.pop();
                            return Ok(of.from.is_some());
                        }
                        begun => begun?,
                    };
                    let Some(header) = header else { return Ok(moved) };
                    of.heard = true;
                    moved = true;
                    none.insert(Coming { header, got: 0, into: Into::Wait })
                }
            };
            if matches!(coming.into, Into::Wait) {
                let what = coming.header.tag as u8;
                let age = number_of(&coming.header).wrapping_sub(number) as i32;
                coming.into = match (age, what) {
                    (1.., _) => return Ok(moved),
                    (0, HELLO) if coming.header.bytes as usize > LONGEST_HELLO => {
                        return Err(Fault::Nonsense);
                    }
                    (0, HELLO) => Into::Keep(Vec::new()),
                    (0, what) if hello.is_some() => {
                        let fits =
                            |due: &Due| due.what == what && due.bytes.len() as u64 == coming.header.bytes;
                        match self.due.front() {
                            Some(due) if fits(due) && due.after > made => return Ok(moved),
                            Some(due) if fits(due) => {}
                            _ => return Err(Fault::Nonsense),
                        }
                        self.due.pop_front().map_or(Into::Drop, |due| Into::Place(due.bytes))
                    }
                    _ => Into::Drop,
                };
            }
            let rest = (coming.header.follow() as usize).saturating_sub(coming.got);
            let most = rest.min(left);
            let got = match &mut coming.into {
                Into::Place(buffer) if rest > 0 => {
                    let view = buffer.run(coming.got, most)?;
                    inlet.take(queue, Landing::Place(view, Caching::Keep), view.len())?
                }
                Into::Keep(bytes) => inlet.take(queue, Landing::Keep(bytes), most)?,
                _ => inlet.take(queue, Landing::Drop, most)?,
            };
            coming.got += got;
            left = left.saturating_sub(got);
            moved |= got > 0;
            match inlet.standing() {
                // More of it may be there, where it goes to several places.
                Standing::Open if got > 0 => continue,
                Standing::Open | Standing::Closed => return Ok(moved),
                Standing::Whole | Standing::GivenUp => {}
            }
            let whole = inlet.standing() == Standing::Whole;
            inlet.end();
            moved = true;
            let Some(Coming { header, into, .. }) = of.coming.take() else { continue };
            match into {
                Into::Place(_) if whole && header.tag as u8 == BYTES => self.arrived += 1,
                Into::Keep(bytes) if whole => {
                    let Some((theirs, rides)) = bytes.split_first_chunk() else {
                        return Err(Fault::Nonsense);
                    };
                    self.hello = Some(*theirs);
                    // Of those that came for something else nothing is taken.
                    if hello == Some(*theirs) && !rides.is_empty() {
                        self.place(rides)?;
                    }
                    return Ok(true);
                }
                _ => {}
            }
        }
        Ok(moved)
    }

    /// Takes bytes that rode with what the ranks there came for.
    fn place(&mut self, bytes: &[u8]) -> Linked<()> {
        let fits = |due: &Due| due.what == BYTES && due.bytes.len() == bytes.len() && due.after == 0;
        if !self.due.front().is_some_and(fits) {
            return Err(Fault::Nonsense);
        }
        let Some(due) = self.due.pop_front() else { return Ok(()) };
        let mut rest = bytes;
        for span in due.bytes.spans() {
            let (head, tail) = rest.split_at(span.len());
            span.write(0, head)?;
            rest = tail;
        }
        self.arrived += 1;
        Ok(())
    }

    fn fault(&mut self, fault: Fault) {
        let text = match fault {
            Fault::Lost(why) => {
                self.lost.get_or_insert((Instant::now(), why));
                return;
            }
            Fault::Ours(error) => {
                self.broken.get_or_insert(error);
                return;
            }
            Fault::Nonsense => {
                "what it sends is not as agreed; no collectives go between it and this rank any more".to_owned()
            }
            Fault::Unsealed => {
                "the seal of what came from it is broken: something on the way has changed, left out or added bytes"
                    .to_owned()
            }
            Fault::Unfit(how) => how,
        };
        let who = format!("rank {} of another host", self.rank);
        let error = Error::peer(PeerFaultKind::Misbehaved, who, Some(self.rank), text);
        self.broken.get_or_insert(error);
    }
}

impl Default for Lane {
    fn default() -> Self {
        Self {
            to: To::None,
            waiting: VecDeque::new(),
            begun: 0,
            from: None,
            heard: false,
            spares: Vec::new(),
            coming: None,
        }
    }
}

impl Lane {
    /// The leader there has made a way to this one.
    fn open(&mut self, way: Box<dyn Inlet>) {
        match &self.from {
            None => self.from = Some(way),
            // It tries again where it did not hear that the first one was made. That one ends without a message.
            Some(_) if !self.heard && self.spares.len() < SPARES => self.spares.push(way),
            Some(_) => {}
        }
    }

    /// Puts what there is room for; gives whether anything moved.
    fn put(&mut self, queue: &mut dyn Queue) -> Linked<bool> {
        let To::Open(outlet) = &mut self.to else { return Ok(false) };
        let mut moved = false;
        while let Some(parcel) = self.waiting.front_mut() {
            let len = parcel.bytes.len();
            if !parcel.begun {
                let header = Header {
                    tag: parcel.tag,
                    bytes: len as u64,
                    number: self.begun,
                    dtype: Dtype::U8,
                    lent: 0,
                };
                if !outlet.begin(header)? {
                    return Ok(moved);
                }
                self.begun += 1;
                (parcel.begun, moved) = (true, true);
            }
            while parcel.put < len {
                let rest = parcel.bytes.run(parcel.put, len - parcel.put)?;
                let put = outlet.put(queue, rest, Caching::Keep)?;
                if put == 0 {
                    return Ok(moved);
                }
                (parcel.put, moved) = (parcel.put + put, true);
            }
            if !outlet.settle()? {
                return Ok(moved);
            }
            self.waiting.pop_front();
            moved = true;
        }
        Ok(moved)
    }
}

/// The operation that a message belongs to.
fn number_of(header: &Header) -> u32 {
    (header.tag >> 8) as u32
}

fn fault(group: &Ranks, rank: usize, kind: PeerFaultKind, text: String) -> Error {
    let who = group.members.get(rank).map_or_else(|| format!("rank {rank}"), ToString::to_string);
    Error::peer(kind, who, Some(rank), text)
}
