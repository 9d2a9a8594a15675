//! Which ranks share a host. The ranks find out by trying.
//!
//! Ranks with the same kernel (boot id) and the same label are candidates. The lowest of them leads. It makes the
//! control region, and the others connect to its private socket. Ranks that receive the control region share the
//! leader's host. The others (they have another network namespace or another user) record why not in the store, and
//! elect a leader among themselves. Rank 0 reads from the leaders which ranks are on their hosts, and publishes one map of
//! all hosts. At the end every rank knows the ranks of all hosts, and has the pidfds of its own host.
//!
//! The number of requests of a rank depends neither on the number of ranks nor on that of hosts. Rank 0 makes one for
//! each host. A rank that waits for its leader does not ask the store: the leader does, and closes the connection if the group
//! has failed.
//!
//! | key | who writes | what |
//! |---|---|---|
//! | `open/L` | leader L | it accepts connections |
//! | `apart/L/R` | candidate R that could not reach leader L | why |
//! | `apart/L` | the same, by adding 1 | that there are such |
//! | `host/L` | leader L | the ranks of its host |
//! | `map` | rank 0 | the ranks of all hosts |
//! | `failed` | the first rank that sees a failure | what happened |

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use tensorwire_device::fd::{self, Connection, Fd, MAX_FDS};
use tensorwire_device::{Deadline, Handle, Region};

use crate::context::Context;
use crate::error::{Error, PeerFaultKind, Result};
use crate::group::card::Roster;
use crate::group::notes::Notes;
use crate::group::rendezvous::{Rendezvous, slice};
use crate::group::report::{self, FAILED};
use crate::interrupt::{self, Asked, Pace};
use crate::link::meet::Domain;
use crate::shm::control::Control;
use crate::shm::member::Member;
use crate::store::{Reply, Request};
use crate::wire::{Reader, Writer};

/// How often a rank that waits looks whether it still makes sense.
const SLICE: Duration = Duration::from_millis(100);
/// By how much those who wait for others are more patient than these.
const GRACE: Duration = Duration::from_millis(500);
/// How many processes of other hosts a rank looks after, if it sees their pids: a look costs some microseconds for each.
const SEEN: usize = 64;

const MAP: &str = "map";

/// What a rank knows of all hosts, and has of its own.
#[derive(Debug)]
pub(crate) struct Hosts {
    /// Ranks of each host; the first of each is its leader; ordered by leader.
    pub(crate) map: Vec<Vec<usize>>,
    /// Why ranks that looked near are on different hosts, as this rank saw it.
    pub(crate) reasons: Vec<String>,
    pub(crate) region: Arc<dyn Region>,
    /// Of the other ranks of this host.
    pub(crate) pidfds: Vec<(usize, Fd)>,
}

/// One rank's part in finding out.
pub(crate) struct Finder<'a> {
    pub(crate) context: &'a Arc<Context>,
    /// What all who would be in the group can read: failures.
    pub(crate) notes: &'a Notes,
    /// What only those who are in it can have written, where the job has a key: all the rest.
    pub(crate) own: &'a Notes,
    pub(crate) roster: &'a Roster,
    pub(crate) rank: usize,
    pub(crate) mailbox: &'a Receiver<Connection>,
    pub(crate) timeout: Duration,
    pub(crate) deadline: Deadline,
    /// A little later: a leader whose time is up says whom it has waited for, and those who wait for it hear that.
    pub(crate) grace: Deadline,
    /// Fails when waiting has no sense any more, for reasons that the store does not know.
    pub(crate) sensible: &'a dyn Fn() -> Result<()>,
    /// Whether what leaders say is sealed.
    pub(crate) sealed: bool,
}

impl<'a> Finder<'a> {
    /// Goes on where a rendezvous has ended. `own` are the notes of those who were there.
    pub(crate) fn after(
        meeting: &Rendezvous<'a>,
        context: &'a Arc<Context>,
        (roster, own): (&'a Roster, &'a Notes),
        mailbox: &'a Receiver<Connection>,
    ) -> Self {
        let &Rendezvous { notes, me, timeout, deadline, sensible, seal, .. } = meeting;
        let grace = Deadline::after(deadline.remaining().unwrap_or_default() + GRACE);
        Self {
            context,
            notes,
            own,
            roster,
            rank: me.rank,
            mailbox,
            timeout,
            deadline,
            grace,
            sensible,
            sealed: seal.is_some(),
        }
    }

    /// What leaders prove to each other, and whether what they say then is sealed.
    pub(crate) fn domain(&self) -> Domain {
        Domain {
            id: self.roster.id,
            identity: self.context.identity(),
            secret: self.roster.secret,
            sealed: self.sealed,
        }
    }

    pub(crate) fn find(&self) -> Result<Hosts> {
        let mine = self.settle()?;
        let map = self.map(&mine.ranks)?;
        Ok(Hosts { map, reasons: mine.reasons, region: mine.region, pidfds: mine.pidfds })
    }

    /// Finds this rank's host among the ranks near it.
    fn settle(&self) -> Result<Mine> {
        let me = &self.members()[self.rank];
        let near = self.members().iter().filter(|member| member.place.near(&me.place));
        let mut open: BTreeSet<usize> = near.map(|member| member.rank).collect();
        let mut reasons = Vec::new();
        while let Some(&leader) = open.first() {
            let found = if leader == self.rank { Ok(self.lead(&open)?) } else { self.join(leader)? };
            match found {
                Ok(mut mine) => {
                    self.check_host(leader, &mine.ranks, &mut open)?;
                    reasons.append(&mut mine.reasons);
                    return Ok(Mine { reasons, ..mine });
                }
                Err(reason) => {
                    reasons.push(format!("{}: {reason}", self.members()[leader]));
                    self.check_host(leader, &self.ranks_of(leader)?, &mut open)?;
                }
            }
        }
        Err(Error::bug("this rank is on no host"))
    }

    /// The ranks of all hosts: rank 0 asks the leaders, and the others hear it from rank 0.
    pub(super) fn map(&self, mine: &[usize]) -> Result<Vec<Vec<usize>>> {
        if self.rank == 0 {
            let map = self.ask_leaders(mine)?;
            self.own.set(MAP, &encode_map(&map))?;
            return Ok(map);
        }
        let map = decode_map(&self.await_map(mine)?)?;
        if !is_map_of(&map, self.members()) || !map.iter().any(|ranks| ranks == mine) {
            return Err(self.blame(0, PeerFaultKind::Misbehaved, "its map has ranks where they cannot be"));
        }
        Ok(map)
    }

    /// What rank 0 does for all: it reads the ranks of every host from its leader.
    fn ask_leaders(&self, mine: &[usize]) -> Result<Vec<Vec<usize>>> {
        let mut quarters: BTreeMap<(&str, &str), BTreeSet<usize>> = BTreeMap::new();
        for member in self.members() {
            let place = (member.place.boot.as_str(), member.place.label.as_str());
            quarters.entry(place).or_default().insert(member.rank);
        }
        let mut map = vec![mine.to_vec()];
        for mut open in quarters.into_values() {
            if open.contains(&self.rank) {
                mine.iter().for_each(|rank| _ = open.remove(rank));
            }
            while let Some(&leader) = open.first() {
                let ranks = self.ranks_of(leader)?;
                self.check_host(leader, &ranks, &mut open)?;
                map.push(ranks);
            }
        }
        map.sort_unstable();
        Ok(map)
    }

    /// Takes the ranks of a host out of those that have none yet. They must have been there.
    fn check_host(&self, leader: usize, ranks: &[usize], open: &mut BTreeSet<usize>) -> Result<()> {
        if ranks.first() != Some(&leader) || ranks.iter().any(|rank| !open.remove(rank)) || !ranks.is_sorted()
        {
            let text = "named ranks of its host that cannot be there";
            return Err(self.blame(leader, PeerFaultKind::Misbehaved, text));
        }
        Ok(())
    }

    /// Waits for the map, and meanwhile looks after the ranks of other hosts whose processes this rank can see.
    fn await_map(&self, mine: &[usize]) -> Result<Vec<u8>> {
        let here = &self.members()[self.rank].place;
        let others = self.members().iter().filter(|other| here.sees(&other.place));
        let others: Vec<usize> =
            others.map(|other| other.rank).filter(|rank| !mine.contains(rank)).take(SEEN).collect();
        // Rank 0 waits for leaders as long as others wait for rank 0, and then it says for which.
        let later = Deadline::at(self.grace.instant() + GRACE);
        loop {
            if let Some(bytes) = self.look_for(MAP, later)? {
                return Ok(bytes);
            }
            self.still_sensible(&[0].into(), &others, &BTreeMap::new(), later)?;
        }
    }

    /// Makes the control region and waits for every candidate: it connects, or says that it cannot.
    fn lead(&self, candidates: &BTreeSet<usize>) -> Result<Mine> {
        let region = Control::alloc(self.context.host(), candidates.len(), self.roster.members.len())?;
        self.say_open()?;
        let mut open: BTreeSet<usize> =
            candidates.iter().copied().filter(|&rank| rank != self.rank).collect();
        let mut joined: BTreeMap<usize, Connection> = BTreeMap::new();
        let mut reasons = Vec::new();
        while !open.is_empty() {
            match self.mail()? {
                Some(connection) => {
                    let identity = connection.peer().identity;
                    let rank = open.iter().copied().find(|&rank| self.members()[rank].identity == identity);
                    if let Some(rank) = rank {
                        open.remove(&rank);
                        joined.insert(rank, connection);
                    }
                    continue;
                }
                None => self.still_sensible(&open, &[], &joined, self.deadline)?,
            }
            if !self.own.has(&aparts_key(self.rank))? {
                continue;
            }
            for rank in open.clone() {
                let key = apart_key(self.rank, rank);
                if self.own.has(&key)? {
                    open.remove(&rank);
                    let reason = self.own.get(&key)?;
                    let reason = String::from_utf8_lossy(&reason[..reason.len().min(1000)]).into_owned();
                    reasons.push(format!("{}, which says: {reason}", self.members()[rank]));
                }
            }
        }
        let ranks: Vec<usize> = std::iter::once(self.rank).chain(joined.keys().copied()).collect();
        for (&rank, connection) in &joined {
            self.hand_round(connection, &ranks, &region, &joined).map_err(|error| {
                if ends_soon(connection) {
                    return self.members()[rank].died("its process ended while the group formed");
                }
                error
            })?;
        }
        self.say_host(&ranks)?;
        let pidfds = joined.into_iter().map(|(rank, connection)| {
            let pidfd = connection.peer().pidfd.try_clone()?;
            Ok((rank, pidfd))
        });
        Ok(Mine { ranks, region, pidfds: pidfds.collect::<Result<_>>()?, reasons })
    }

    /// The next rank that connects, if one does soon.
    fn mail(&self) -> Result<Option<Connection>> {
        let (slice, mut pace) = (Deadline::after(SLICE), Pace::new());
        loop {
            match self.mailbox.recv_timeout(pace.until(slice).remaining().unwrap_or_default()) {
                Ok(connection) => return Ok(Some(connection)),
                Err(_) if slice.passed() => return Ok(None),
                Err(_) => pace.look(Instant::now())?,
            }
        }
    }

    /// Sends one member the control region, the list of ranks, and everyone's pidfd.
    fn hand_round(
        &self,
        to: &Connection,
        ranks: &[usize],
        region: &Arc<dyn Region>,
        joined: &BTreeMap<usize, Connection>,
    ) -> Result<()> {
        let handle = region.export()?;
        let memory: Vec<_> = handle.fd().into_iter().collect();
        let frame = Writer::new().u64(handle.len() as u64).bytes(&encode(ranks)).finish();
        self.send(to, &frame, &memory)?;
        let all: Vec<(&usize, &Connection)> = joined.iter().collect();
        for part in all.chunks(MAX_FDS) {
            let ranks: Vec<usize> = part.iter().map(|(rank, _)| **rank).collect();
            let pidfds: Vec<_> = part.iter().map(|(_, connection)| connection.peer().pidfd.as_fd()).collect();
            self.send(to, &encode(&ranks), &pidfds)?;
        }
        Ok(())
    }

    /// Sends; waits where the user has too many descriptors under way, which ends when the receivers take theirs.
    fn send(&self, to: &Connection, frame: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let too_many = |error: &tensorwire_device::Error| {
            let full = rustix::io::Errno::TOOMANYREFS.raw_os_error();
            matches!(error, tensorwire_device::Error::Io { source, .. } if source.raw_os_error() == Some(full))
        };
        loop {
            match to.send(frame, fds, self.deadline) {
                Err(error) if too_many(&error) && !self.deadline.passed() => {
                    interrupt::sleep(Duration::from_millis(2))?;
                }
                sent => return Ok(sent?),
            }
        }
    }

    /// Connects to the leader; gives why it cannot be, if it cannot.
    fn join(&self, leader: usize) -> Result<Result<Mine, String>> {
        let there = &self.members()[leader];
        self.await_open(leader)?;
        let (id, secret) = (self.roster.id, &self.roster.secret);
        let me = self.context.identity();
        let asked = Asked::default();
        let connected = fd::connect_while(&there.address, id, me, secret, self.deadline, &|| asked.goes_on());
        asked.end()?;
        let connection = match connected {
            Ok(connection) if connection.peer().identity == there.identity => connection,
            Ok(_) => return self.apart(leader, "another process answered at its socket".into()),
            Err(error) if there.is_gone(&self.members()[self.rank]) => {
                return Err(there.died(&error.to_string()));
            }
            Err(tensorwire_device::Error::TimedOut) if self.deadline.passed() => {
                return Err(
                    self.timed_out(format!("{there} does not answer at its private socket"), [leader])
                );
            }
            Err(error) => return self.apart(leader, error.to_string()),
        };
        let bad = |text: &str| self.blame(leader, PeerFaultKind::Misbehaved, text);
        let (frame, mut fds) = self.receive(&connection, leader)?;
        let mut reader = Reader::new(&frame);
        let len = usize::try_from(reader.u64()?).map_err(|_| bad("promised too much memory"))?;
        let ranks = decode(reader.bytes()?)?;
        let memory = fds.pop().filter(|_| fds.is_empty()).ok_or_else(|| bad("sent no memory"))?;
        let region = self.context.import(Handle::Memfd { fd: memory, len })?;
        let mut pidfds = vec![(leader, connection.peer().pidfd.try_clone()?)];
        let mut absent = ranks.len().saturating_sub(1);
        while absent > 0 {
            let (frame, fds) = self.receive(&connection, leader)?;
            let part = decode(&frame)?;
            if part.is_empty() || part.len() != fds.len() || part.len() > absent {
                return Err(bad("sent the wrong number of pidfds"));
            }
            // Whose they are cannot be told: this rank has no connection to the others.
            if fds.iter().any(|fd| fd::check_pidfd(fd, 0).is_err()) {
                return Err(bad("sent a descriptor that is not a pidfd"));
            }
            absent -= part.len();
            pidfds.extend(part.into_iter().zip(fds).filter(|(rank, _)| *rank != self.rank));
        }
        Ok(Ok(Mine { ranks, region, pidfds, reasons: Vec::new() }))
    }

    /// Waits for a message of the leader; its death ends the wait.
    fn receive(&self, connection: &Connection, leader: usize) -> Result<(Vec<u8>, Vec<Fd>)> {
        loop {
            let asked = Asked::default();
            let slice = self.grace.min(Deadline::after(SLICE));
            let received = connection.recv_while(slice, &|| asked.goes_on());
            asked.end()?;
            match received {
                Ok((frame, fds)) if !frame.is_empty() => return Ok((frame, fds)),
                // A process that dies closes its sockets a moment before its end can be seen.
                Ok(_) if !ends_soon(connection) => {
                    self.failed()?;
                    return Err(self.blame(leader, PeerFaultKind::Left, "it closed the connection"));
                }
                Ok(_) => {}
                Err(tensorwire_device::Error::TimedOut) => {}
                Err(error) => return Err(error.into()),
            }
            (self.sensible)()?;
            if connection.peer().has_ended() {
                self.failed()?;
                return Err(self.members()[leader].died("its process ended while the group formed"));
            }
            if self.grace.passed() {
                self.failed()?;
                return Err(self.timed_out(format!("{} is silent", self.members()[leader]), [leader]));
            }
        }
    }

    /// Says that this rank is not on the leader's host.
    fn apart(&self, leader: usize, reason: String) -> Result<Result<Mine, String>> {
        tracing::info!("{} shares no memory with this rank: {reason}", self.members()[leader]);
        self.own.set(&apart_key(leader, self.rank), reason.as_bytes())?;
        self.own.store.add(&aparts_key(leader), 1)?;
        Ok(Err(reason))
    }

    /// Says that this leader accepts connections.
    pub(super) fn say_open(&self) -> Result<()> {
        self.own.set(&open_key(self.rank), b"")
    }

    /// Waits until a leader accepts connections.
    pub(super) fn await_open(&self, leader: usize) -> Result<()> {
        self.await_key(&open_key(leader), leader).map(drop)
    }

    /// Says which ranks are on this leader's host.
    pub(super) fn say_host(&self, ranks: &[usize]) -> Result<()> {
        self.own.set(&host_key(self.rank), &encode(ranks))
    }

    /// The ranks of a host that this rank is not on.
    fn ranks_of(&self, leader: usize) -> Result<Vec<usize>> {
        decode(&self.await_key(&host_key(leader), leader)?)
    }

    /// Waits for something that the leader of a host says in the store.
    pub(crate) fn await_key(&self, key: &str, leader: usize) -> Result<Vec<u8>> {
        loop {
            if let Some(bytes) = self.look_for(key, self.grace)? {
                return Ok(bytes);
            }
            self.still_waits_for(&[leader])?;
        }
    }

    /// Waits a moment for a key. Rank 0, for whom all wait, looks around more often.
    fn look_for(&self, key: &str, deadline: Deadline) -> Result<Option<Vec<u8>>> {
        let crowd = if self.rank == 0 { 1 } else { self.members().len() };
        match self.own.get_by(key, deadline.min(Deadline::after(slice(SLICE, crowd)))) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.is_timeout() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Ends a wait for ranks that cannot end well.
    pub(crate) fn still_waits_for(&self, ranks: &[usize]) -> Result<()> {
        self.still_sensible(&ranks.iter().copied().collect(), &[], &BTreeMap::new(), self.grace)
    }

    /// Fails when a wait for the ranks `open` cannot end well: somebody has told of a failure, the time is up, or one of them
    /// or of the ranks `seen` has died.
    fn still_sensible(
        &self,
        open: &BTreeSet<usize>,
        seen: &[usize],
        joined: &BTreeMap<usize, Connection>,
        deadline: Deadline,
    ) -> Result<()> {
        self.failed()?;
        (self.sensible)()?;
        let me = &self.members()[self.rank];
        let silent = open.iter().chain(seen).copied().filter(|&rank| self.members()[rank].is_gone(me));
        let ended =
            joined.iter().filter(|(_, connection)| connection.peer().has_ended()).map(|(rank, _)| *rank);
        if let Some(rank) = silent.chain(ended).next() {
            return Err(self.members()[rank].died("its process ended while the group formed"));
        }
        if deadline.passed() {
            let names: Vec<String> =
                open.iter().take(8).map(|&rank| self.members()[rank].to_string()).collect();
            return Err(
                self.timed_out(format!("nothing was heard of {}", names.join(", ")), open.iter().copied())
            );
        }
        Ok(())
    }

    /// Fails if another rank has told of a failure.
    pub(crate) fn failed(&self) -> Result<()> {
        if !self.notes.has(FAILED)? {
            return Ok(());
        }
        let told = report::read(&mut Reader::new(&self.notes.get(FAILED)?))?;
        Err(match &told {
            Error::Peer(fault) if fault.rank == Some(self.rank) && is_of_a_connection(fault.kind) => {
                let text = format!(
                    "they have lost the connection with this rank ({told}); does the network between the hosts work?"
                );
                Error::peer(PeerFaultKind::Failed, "other hosts of the group", None, text)
            }
            _ => told,
        })
    }

    /// The same where the store may be gone already, because all went well.
    pub(crate) fn told(&self) -> Option<Error> {
        let soon = Deadline::after(Duration::from_millis(500));
        match self.notes.store.call(Request::Check(vec![FAILED.into()]), soon) {
            Ok(Reply::Truth(true)) => self.failed().err(),
            _ => None,
        }
    }

    /// The failure that counts: what this rank has met may only follow from one that was told of before, as when a
    /// rank has given up and ended.
    pub(crate) fn first_of(&self, error: Error) -> Error {
        match error {
            Error::Peer(_) | Error::TimedOut { .. } => self.told().unwrap_or(error),
            own => own,
        }
    }

    /// Tells the other ranks of a failure, unless one has been told of already.
    pub(crate) fn report(&self, error: &Error) {
        let told = report::as_seen_by_others(error, &self.members()[self.rank]);
        report::tell(self.notes, &told);
    }

    fn timed_out(&self, missing: String, ranks: impl IntoIterator<Item = usize>) -> Error {
        Error::timed_out("forming a group", self.timeout, missing).about(ranks)
    }

    fn blame(&self, rank: usize, kind: PeerFaultKind, text: &str) -> Error {
        Error::peer(kind, self.members()[rank].to_string(), Some(rank), text)
    }

    fn members(&self) -> &[Member] {
        &self.roster.members
    }
}

/// Whether a rank that lives may be told this of itself: all that the others had of it was a connection.
fn is_of_a_connection(kind: PeerFaultKind) -> bool {
    matches!(kind, PeerFaultKind::Died | PeerFaultKind::Misbehaved)
}

/// Whether a map has every rank once, and only ranks near each other on one host, in order.
fn is_map_of(map: &[Vec<usize>], members: &[Member]) -> bool {
    let mut seen = vec![false; members.len()];
    let mut ordered = map.is_sorted_by_key(|ranks| ranks.first());
    for ranks in map {
        let Some(leader) = ranks.first().and_then(|&leader| members.get(leader)) else { return false };
        ordered &= ranks.is_sorted();
        for &rank in ranks {
            let near = members.get(rank).is_some_and(|member| member.place.near(&leader.place));
            if !near || std::mem::replace(&mut seen[rank], true) {
                return false;
            }
        }
    }
    ordered && !seen.contains(&false)
}

/// This rank's own host.
struct Mine {
    ranks: Vec<usize>,
    region: Arc<dyn Region>,
    pidfds: Vec<(usize, Fd)>,
    /// Why near ranks are elsewhere.
    reasons: Vec<String>,
}

/// The keys that finding the hosts may have left in the store.
pub(crate) fn keys(members: &[Member], hosts: &[Vec<usize>]) -> Vec<String> {
    let mut keys = vec![MAP.to_owned()];
    for ranks in hosts {
        let leader = ranks[0];
        let near = |other: &&Member| members[leader].place.near(&other.place) && !ranks.contains(&other.rank);
        keys.extend([open_key(leader), host_key(leader)]);
        let before = keys.len();
        keys.extend(members.iter().filter(near).map(|other| apart_key(leader, other.rank)));
        if keys.len() > before {
            keys.push(aparts_key(leader));
        }
    }
    keys
}

/// Whether the process at the other end has ended, or does within a moment.
fn ends_soon(connection: &Connection) -> bool {
    let until = Deadline::after(Duration::from_secs(1));
    while !connection.peer().has_ended() {
        if until.passed() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

fn open_key(leader: usize) -> String {
    format!("open/{leader}")
}

fn host_key(leader: usize) -> String {
    format!("host/{leader}")
}

fn aparts_key(leader: usize) -> String {
    format!("apart/{leader}")
}

fn apart_key(leader: usize, rank: usize) -> String {
    format!("apart/{leader}/{rank}")
}

pub(super) fn encode(ranks: &[usize]) -> Vec<u8> {
    let head = Writer::new().u32(ranks.len() as u32);
    ranks.iter().fold(head, |frame, &rank| frame.u32(rank as u32)).finish()
}

pub(super) fn decode(bytes: &[u8]) -> Result<Vec<usize>> {
    let mut reader = Reader::new(bytes);
    let ranks = ranks_from(&mut reader)?;
    reader.end()?;
    Ok(ranks)
}

/// The ranks of all hosts, one host after the other.
pub(super) fn encode_map(map: &[Vec<usize>]) -> Vec<u8> {
    let head = Writer::new().u32(map.len() as u32);
    map.iter().fold(head, |frame, ranks| frame.fixed(&encode(ranks))).finish()
}

pub(super) fn decode_map(bytes: &[u8]) -> Result<Vec<Vec<usize>>> {
    let mut reader = Reader::new(bytes);
    let hosts = reader.count(4)?;
    let map = (0..hosts).map(|_| ranks_from(&mut reader)).collect::<Result<Vec<_>>>()?;
    reader.end()?;
    Ok(map)
}

fn ranks_from(reader: &mut Reader<'_>) -> Result<Vec<usize>> {
    let count = reader.count(4)?;
    (0..count).map(|_| Ok(reader.u32()? as usize)).collect()
}
