//! Groups: ranks that talk.
//!
//! A [`Group`] owns all its state; two groups in one process never meet. Its ranks find each other through a
//! store (`rendezvous`), find out by doing which of them share a host (`host`), and watch each other from then
//! on: the death of one fails every wait of the others with an error that names it.

pub(crate) mod control;
pub(crate) mod cores;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod host;
mod hub;
mod launch;
mod member;
pub(crate) mod memory;
mod rendezvous;
mod report;
mod shrink;

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tensorwire_device::secret::{Id, digest};
use tensorwire_device::{Deadline, Flag, Span};

use crate::collective::lane::Lane;
use crate::collective::p2p::Engine;
use crate::config::Config;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::interrupt::{self, Pace, is_interrupt};
use crate::store::{PrefixStore, Store, TcpServer};
use crate::watch::record::Recorder;
use crate::wire::{Reader, Writer};
use control::{Cause, Control, Failure, error_of};
use host::Finder;
use memory::Memory;
use rendezvous::Rendezvous;

pub use member::Member;

/// Ranks that talk. Cloning it gives another handle; the group is closed when the last one is dropped.
///
/// ```no_run
/// # fn main() -> tensorwire::Result<()> {
/// let group = tensorwire::Group::from_env()?;
/// println!("rank {} of {}", group.rank(), group.world());
/// group.barrier()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Group(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) context: Arc<Context>,
    /// The group's part of the store, with a connection of its own.
    store: Arc<dyn Store>,
    origin: Origin,
    pub(crate) name: String,
    id: Id,
    pub(crate) rank: usize,
    pub(crate) members: Vec<Member>,
    pub(crate) hosts: Vec<Vec<usize>>,
    reasons: Vec<String>,
    pub(crate) control: Arc<Control>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) timeout: Duration,
    barriers: Mutex<Barriers>,
    /// Signalled when a thread comes out of a barrier.
    turn: Condvar,
    /// Held while a split exchanges colours, so that threads do not mix theirs.
    splitting: Mutex<()>,
    /// The records of this rank's operations.
    recorder: Arc<Recorder>,
    /// The collectives; nothing where ranks are on several hosts.
    lane: Option<Lane>,
    /// Held while this rank is in `shrink`.
    shrinks: Mutex<shrink::Shrinks>,
    /// How many sub-groups of each kind this rank has made, so that all ranks give them the same names.
    made: Mutex<HashMap<String, u64>>,
    /// Messages between ranks of this host, once there are some.
    engine: OnceLock<Arc<Engine>>,
}

/// The barriers of one rank; its threads take turns.
#[derive(Default)]
struct Barriers {
    /// How many are over.
    over: u32,
    /// Whether a thread is in one.
    busy: bool,
}

/// What a group was made from; sub-groups are made from the same.
#[derive(Clone)]
struct Origin {
    store: Arc<dyn Store>,
    /// The store's server, where this process has it.
    server: Option<Arc<TcpServer>>,
    /// Whether it waits, if the group cannot be formed, until the others have heard why.
    lingers: bool,
    /// The store's file, where it was named for this group; kept for what its end does.
    _file: Option<Arc<launch::FileUse>>,
    /// The address of this machine on the way to the store.
    route: Option<IpAddr>,
}

/// How a group is made, where the defaults are not enough.
#[derive(Debug, Default)]
pub struct GroupBuilder {
    context: Option<Arc<Context>>,
    timeout: Option<Duration>,
    name: Option<String>,
}

impl GroupBuilder {
    /// The context of the group; otherwise it gets one of its own, from the environment.
    #[must_use]
    pub fn context(mut self, context: &Arc<Context>) -> Self {
        self.context = Some(context.clone());
        self
    }

    /// How long forming the group and each of its operations may take.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// The name of the group in its store; groups that share a store need names of their own.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// From the variables of torchrun and `tensorwire run`, Slurm, Open MPI or PMI.
    pub fn from_env(self) -> Result<Group> {
        launch::from_env(self)
    }

    /// From `tcp://host:port` (rank 0 serves the store there) or `file:///path`, with `rank` and `world_size` given
    /// here or in the address: `tcp://host:port?rank=0&world_size=2`.
    pub fn from_url(self, url: &str, rank: Option<usize>, world: Option<usize>) -> Result<Group> {
        launch::from_url(self, url, rank, world)
    }

    /// From a store that every rank can reach.
    pub fn from_store(self, store: Arc<dyn Store>, rank: usize, world: usize) -> Result<Group> {
        let builder = self.with_context()?;
        let deadline = Deadline::after(builder.patience());
        builder.form(
            Origin { store, server: None, lingers: false, _file: None, route: None },
            rank,
            world,
            deadline,
        )
    }

    /// Has a context from now on.
    fn with_context(self) -> Result<Self> {
        match self.context {
            Some(_) => Ok(self),
            None => Ok(self.context(&Context::from_env()?)),
        }
    }

    fn title(&self) -> &str {
        self.name.as_deref().unwrap_or("world")
    }

    fn patience(&self) -> Duration {
        let configured = self.context.as_ref().map(|context| context.config().timeout);
        self.timeout.or(configured).unwrap_or(Config::default().timeout)
    }

    /// Forms the group by the deadline; the way to the store may have taken a part of the time.
    fn form(self, origin: Origin, rank: usize, world: usize, deadline: Deadline) -> Result<Group> {
        let (timeout, name) = (self.patience(), self.title().to_owned());
        let context = self.context.map_or_else(Context::from_env, Ok)?;
        form(&context, origin, name, (rank, world), (timeout, deadline), &|| Ok(()))
    }
}

impl Group {
    /// The group of this process's launcher; see [`GroupBuilder::from_env`].
    pub fn from_env() -> Result<Self> {
        Self::builder().from_env()
    }

    /// A builder.
    pub fn builder() -> GroupBuilder {
        GroupBuilder::default()
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.0.members.len()
    }

    /// All ranks, in order.
    pub fn members(&self) -> &[Member] {
        &self.0.members
    }

    /// The ranks of each host: those that share memory.
    pub fn hosts(&self) -> &[Vec<usize>] {
        &self.0.hosts
    }

    /// The name of the group in its store.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The context that the group lives in.
    pub fn context(&self) -> &Arc<Context> {
        &self.0.context
    }

    /// The store that the group was made from.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.0.origin.store
    }

    /// How long an operation may take.
    pub fn timeout(&self) -> Duration {
        self.0.timeout
    }

    /// Fails if the group has failed: a rank died, left while it was needed, or somebody aborted.
    pub fn check(&self) -> Result<()> {
        self.0.context.birth().check("the group")?;
        match self.0.failure() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Waits until every rank has come here.
    pub fn barrier(&self) -> Result<()> {
        match self.0.lane {
            Some(_) => self.barrier_call().wait(),
            None => self.barrier_by(Deadline::after(self.0.timeout)),
        }
    }

    /// The same until a deadline. On one host a barrier is an operation like any other: one that timed out is cancelled
    /// for all ranks. Across hosts it can be called again: this rank has still come.
    pub fn barrier_by(&self, deadline: Deadline) -> Result<()> {
        self.check()?;
        match self.0.lane {
            Some(_) => self.barrier_call().wait_by(deadline),
            None => self.0.barrier(deadline),
        }
    }

    /// Ends every pending and later wait of this group, on all ranks, with an error that carries the reason.
    pub fn abort(&self, reason: &str) {
        // The group is the parent's.
        if !self.0.context.birth().is_ours() {
            return;
        }
        self.0.control.fail(Failure { cause: Cause::Aborted, rank: self.0.rank }, reason);
        self.0.context.watcher().ring();
    }

    /// New memory of this rank that the other ranks of its host can map, which they do when an operation needs it. No
    /// other rank takes part in the call. The memory is free again when the last clone of the span is gone, here and
    /// (with their next operation) at the other ranks. Other groups may use it just as well.
    pub fn alloc(&self, bytes: usize) -> Result<Span> {
        self.0.memory.alloc(bytes)
    }

    /// A group of some of these ranks, in the given order. Those ranks call it, with the same list; others need not.
    /// Sub-groups may overlap and may be made in any order.
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Self> {
        self.check()?;
        let inner = &self.0;
        let mut seen = vec![false; self.world()];
        for &rank in ranks {
            match seen.get_mut(rank) {
                Some(seen) if !*seen => *seen = true,
                Some(_) => return Err(Error::misuse(format!("rank {rank} is twice in the list {ranks:?}"))),
                None => {
                    let world = self.world();
                    return Err(Error::misuse(format!("there is no rank {rank} in a world of {world}")));
                }
            }
        }
        let Some(place) = ranks.iter().position(|&rank| rank == inner.rank) else {
            return Err(Error::misuse(format!("rank {} is not in the list {ranks:?}", inner.rank)));
        };
        let list: Vec<u8> = ranks.iter().flat_map(|&rank| (rank as u64).to_le_bytes()).collect();
        let kind = format!("ranks {}", digest(&list));
        self.make(&kind, place, ranks)
    }

    /// Splits the group by colour. All ranks call it, in the same order as other splits; each gets the group of the
    /// ranks with its colour, ordered by `key` and then by rank, or nothing if its colour is `None`.
    pub fn split(&self, colour: Option<u64>, key: i64) -> Result<Option<Self>> {
        self.check()?;
        let inner = &self.0;
        let deadline = Deadline::after(inner.timeout);
        let turn = inner.splitting.lock().unwrap_or_else(PoisonError::into_inner);
        let number = inner.count("split");
        let entry = |number: u64, rank: usize| format!("split/{number}/{rank}");
        let mine =
            Writer::new().u8(colour.is_some().into()).u64(colour.unwrap_or(0)).u64(key as u64).finish();
        inner.store.set(&entry(number, inner.rank), &mine)?;
        let mut same = Vec::new();
        for rank in 0..self.world() {
            let missing = || format!("{} has not called split()", inner.members[rank]);
            let read = inner.await_key(&entry(number, rank), deadline, missing);
            // Others may have read what this rank wants, and wait for it in the new group.
            let bytes = read.inspect_err(|error| {
                if let (true, Some(colour)) = (is_interrupt(error), colour) {
                    let name = format!("{}/{} #0", inner.name, split_of(number, colour));
                    rendezvous::give_up(&inner.origin.store, &name, error, &inner.members[inner.rank]);
                }
            })?;
            let mut reader = Reader::new(&bytes);
            let theirs = (reader.u8()? != 0).then_some(reader.u64()?);
            let order = reader.u64()? as i64;
            if theirs.is_some() && theirs == colour {
                same.push((order, rank));
            }
        }
        // Everyone is in this split, so nobody reads the entries of the last one any more.
        if let Some(last) = number.checked_sub(1) {
            inner.store.delete(&entry(last, inner.rank))?;
        }
        drop(turn);
        let Some(colour) = colour else { return Ok(None) };
        same.sort_unstable();
        let ranks: Vec<usize> = same.into_iter().map(|(_, rank)| rank).collect();
        let place = ranks.iter().position(|&rank| rank == inner.rank).unwrap_or(0);
        self.make(&split_of(number, colour), place, &ranks).map(Some)
    }

    /// How this rank reaches every other one, and why not better.
    pub fn explain(&self) -> String {
        let inner = &self.0;
        let near = inner.control.ranks();
        let mut text = format!("rank {} of {} in group {:?}\n", inner.rank, self.world(), inner.name);
        for member in &inner.members {
            let path = match member.rank {
                rank if rank == inner.rank => "this process",
                rank if near.contains(&rank) => "shared memory",
                _ if member.place.boot != inner.members[inner.rank].place.boot => "network: another machine",
                _ if member.place.label != inner.members[inner.rank].place.label => {
                    "network: another host label (TENSORWIRE_HOST)"
                }
                _ => "network: no private connection could be made",
            };
            text.push_str(&format!("  {member}: {path}\n"));
        }
        for reason in &inner.reasons {
            text.push_str(&format!("  not shared with {reason}\n"));
        }
        text
    }

    /// Closes the group on this rank. Messages that are pending end with an error, also where another thread waits for
    /// them with a handle of its own, and there can be no more of them. A collective that runs on another thread goes on.
    /// This rank leaves when its last handle is gone: others that still need it then get an error that says so. Dropping
    /// the last handle does the same.
    pub fn close(self) {
        if let Some(engine) = self.0.engine.get()
            && self.0.context.birth().is_ours()
        {
            engine.close();
        }
    }

    /// What carries messages between the ranks of this host.
    pub(crate) fn engine(&self) -> Result<&Arc<Engine>> {
        let inner = &self.0;
        if let Some(engine) = inner.engine.get() {
            return Ok(engine);
        }
        let engine =
            Engine::new(&inner.control, &inner.members, inner.context.device(&crate::DeviceId::Host)?)?;
        let engine = engine.recorded_by(&inner.recorder);
        Ok(inner.engine.get_or_init(|| Arc::new(engine)))
    }

    /// The place of a rank among those of this host, if it is one of them.
    pub(crate) fn place_of(&self, rank: usize) -> Option<usize> {
        let near = self.0.control.ranks();
        if near.get(rank) == Some(&rank) { Some(rank) } else { near.iter().position(|&other| other == rank) }
    }

    /// The rank at a place of this host.
    pub(crate) fn rank_at(&self, place: usize) -> usize {
        self.0.control.ranks()[place]
    }

    fn make(&self, kind: &str, place: usize, ranks: &[usize]) -> Result<Self> {
        let inner = &self.0;
        let name = format!("{}/{kind} #{}", inner.name, inner.count(kind));
        // The death of a rank that belongs to the new group ends the wait for it.
        let sensible = || match inner.control.failure() {
            Some(Failure { cause: Cause::Died | Cause::Silent, rank }) if !ranks.contains(&rank) => Ok(()),
            Some(_) => self.check(),
            None => Ok(()),
        };
        let time = (inner.timeout, Deadline::after(inner.timeout));
        form(&inner.context, inner.origin.clone(), name, (place, ranks.len()), time, &sensible)
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group({:?}, rank {} of {})", self.0.name, self.0.rank, self.0.members.len())
    }
}

impl Inner {
    /// The collectives of this rank.
    pub(crate) fn lane(&self) -> Result<&Lane> {
        self.context.birth().check("the group")?;
        self.lane.as_ref().ok_or_else(|| Error::Unsupported {
            what: format!("a collective of group {:?}", self.name),
            need: "all ranks on one host".into(),
            have: format!("{} hosts", self.hosts.len()),
        })
    }

    /// The rank at a place of this host, for people.
    pub(crate) fn who(&self, place: usize) -> String {
        let rank = self.control.ranks().get(place).copied().unwrap_or(place);
        self.members.get(rank).map_or_else(|| format!("rank {rank}"), ToString::to_string)
    }

    pub(crate) fn failure(&self) -> Option<Error> {
        let failure = self.control.failure()?;
        Some(error_of(failure, &self.control.note(failure), &self.members, self.rank))
    }

    /// How often something has been asked for before.
    fn count(&self, kind: &str) -> u64 {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let count = made.entry(kind.to_owned()).or_insert(0);
        *count += 1;
        *count - 1
    }

    fn barrier(&self, deadline: Deadline) -> Result<()> {
        let start = Instant::now();
        let next = self.enter(deadline)?.wrapping_add(1);
        let result = self.come_to(next, deadline, start);
        let mut barriers = self.barriers();
        barriers.busy = false;
        if result.is_ok() {
            barriers.over = next;
        }
        self.turn.notify_one();
        result
    }

    /// Waits for this rank's other threads; gives how many barriers are over.
    fn enter(&self, deadline: Deadline) -> Result<u32> {
        let start = Instant::now();
        let mut pace = Pace::since(start);
        let mut barriers = self.barriers();
        while barriers.busy {
            drop(barriers);
            pace.look(Instant::now())?;
            barriers = self.barriers();
            if !barriers.busy {
                break;
            }
            let Some(_) = deadline.remaining() else {
                let doing = format!("barrier of group {:?}", self.name);
                let text = "another thread of this rank is in a barrier of the same group";
                return Err(Error::timed_out(doing, start.elapsed(), text));
            };
            let left = pace.until(deadline).remaining().unwrap_or_default();
            barriers = self.turn.wait_timeout(barriers, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        barriers.busy = true;
        Ok(barriers.over)
    }

    fn barriers(&self) -> MutexGuard<'_, Barriers> {
        self.barriers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn come_to(&self, next: u32, deadline: Deadline, start: Instant) -> Result<()> {
        let mut pace = Pace::since(start);
        let mut wait = |flag: &Flag| self.await_flag(flag, next, deadline, (start, &mut pace));
        self.control.come(next);
        if self.control.leads() {
            for flag in self.control.arrive() {
                wait(flag)?;
            }
            self.check_left()?;
            if !self.context.watcher().arrive(self.id, next)? {
                self.control.release().signal(next);
            }
        }
        wait(self.control.release())?;
        if !self.control.is_over(next) {
            self.check_left()?;
        }
        Ok(())
    }

    fn await_flag(
        &self,
        flag: &Flag,
        next: u32,
        deadline: Deadline,
        (start, pace): (Instant, &mut Pace),
    ) -> Result<()> {
        loop {
            let slice = pace.until(deadline);
            match flag.wait(next, &self.control.abort, slice) {
                Err(tensorwire_device::Error::TimedOut) if slice < deadline => pace.look(Instant::now())?,
                other => return other.map_err(|error| self.ended(error, next, start.elapsed())),
            }
        }
    }

    /// A rank that left makes the barrier impossible for everyone.
    fn check_left(&self) -> Result<()> {
        let Some(rank) = self.control.who_left() else { return Ok(()) };
        self.control.fail(Failure { cause: Cause::Left, rank }, "");
        self.context.watcher().ring();
        self.failure().map_or(Ok(()), Err)
    }

    /// What the end of a wait means.
    fn ended(&self, error: tensorwire_device::Error, count: u32, after: Duration) -> Error {
        match error {
            tensorwire_device::Error::Aborted => {
                self.failure().unwrap_or_else(|| Error::Aborted("the group has failed".into()))
            }
            tensorwire_device::Error::TimedOut => {
                let here = self.control.ranks().iter().zip(self.control.arrive());
                let absent = here.filter(|(_, flag)| !flag.reached(count)).map(|(rank, _)| *rank);
                let absent: Vec<usize> = absent.chain(self.context.watcher().absent(self.id)).collect();
                let missing = if absent.is_empty() {
                    self.nobody_absent()
                } else {
                    let names: Vec<String> =
                        absent.iter().take(8).map(|&rank| self.members[rank].to_string()).collect();
                    format!(
                        "{} not come",
                        names.join(", ") + if absent.len() == 1 { " has" } else { " have" }
                    )
                };
                // The first one is a part of forming the group.
                let doing = match count.wrapping_sub(1) {
                    0 => format!("forming the group {:?}", self.name),
                    count => format!("barrier #{count} of group {:?}", self.name),
                };
                Error::timed_out(doing, after, missing)
            }
            other => other.into(),
        }
    }

    /// Why a barrier is not over though all ranks that this one can see have come: they wait for other hosts, or their
    /// leader, which ends it, has given up before the last one came.
    fn nobody_absent(&self) -> String {
        let leader = self.control.ranks().first().map_or(self.rank, |&rank| rank);
        let gave_up =
            format!("{} no longer waits for it; it must call barrier() again", self.members[leader]);
        match (self.control.leads(), self.hosts.len()) {
            (true, _) => "all ranks of this host are here; other hosts are not".into(),
            (false, 1) => format!("all ranks have come, but {gave_up}"),
            (false, _) => format!("all ranks of this host are here; other hosts are not, or {gave_up}"),
        }
    }

    /// Waits for a key of another rank, as long as the group is alive.
    fn await_key(&self, key: &str, deadline: Deadline, missing: impl Fn() -> String) -> Result<Vec<u8>> {
        loop {
            let slice = Deadline::after(Duration::from_millis(100));
            match self.store.get_by(key, deadline.min(slice)) {
                Err(error) if error.is_timeout() => {}
                other => return other,
            }
            self.failure().map_or(Ok(()), Err)?;
            interrupt::check()?;
            if deadline.passed() {
                return Err(Error::timed_out("splitting a group", self.timeout, missing()));
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.context.birth().is_ours() {
            if let Some(engine) = self.engine.get() {
                engine.close();
            }
            self.control.leave();
            if let Some(lane) = &self.lane {
                lane.leave();
            }
            self.context.watcher().close(self.id);
            self.members.iter().for_each(|member| self.context.forget(member.identity));
        }
    }
}

/// Forms a group: rendezvous, hosts, the star between hosts, and a first barrier, after which nobody needs the
/// store any more.
fn form(
    context: &Arc<Context>,
    origin: Origin,
    name: String,
    (rank, world): (usize, usize),
    (timeout, deadline): (Duration, Deadline),
    sensible: &dyn Fn() -> Result<()>,
) -> Result<Group> {
    context.birth().check("the context")?;
    if world > MAX_WORLD {
        return Err(Error::misuse(format!("a world of {world}; 1 to {MAX_WORLD} ranks are possible")));
    }
    let store: Arc<dyn Store> = Arc::new(PrefixStore::new(place_of(&name), origin.store.clone_store()?));
    // Requests that do not wait for another rank are answered at once, or the store is stuck. torch's server can be for
    // 10 seconds: it looks up the names of its clients, and answers nobody while a name server does not answer.
    store.set_timeout(timeout.min(Duration::from_secs(30)));
    let me = Member::this_process(rank, context.identity(), context.watcher().address(), context.config())?;
    let meeting = Rendezvous { store: &store, me: &me, world, timeout, deadline, sensible };
    let give_up = |error: &Error| {
        if origin.lingers {
            rendezvous::linger(&store, world, error);
        }
    };
    let roster = meeting.meet().inspect_err(give_up)?;

    let mailbox = context.watcher().open(roster.id, roster.secret)?;
    let finder = Finder {
        context,
        store: &store,
        roster: &roster,
        rank,
        mailbox: &mailbox,
        timeout,
        deadline,
        grace: Deadline::after(deadline.remaining().unwrap_or_default() + Duration::from_millis(500)),
        sensible,
    };
    let formed = finder.find().and_then(|hosts| {
        let star = hub::connect(&finder, &hosts, origin.route)?;
        let ranks = hosts.map.iter().find(|ranks| ranks.contains(&rank)).cloned().unwrap_or_default();
        let control = Arc::new(Control::open(hosts.region.clone(), ranks, rank)?);
        control.introduce(&me, world, &name)?;
        let memory = Arc::new(Memory::new(context, &control, &roster, rank)?);
        context.looks_after(&memory);
        Ok((hosts, star, control, memory))
    });
    let failed = |error: &Error| {
        finder.report(error);
        rendezvous::hear(&store);
        give_up(error);
    };
    let formed = formed.map_err(|error| finder.first_of(error));
    let (hosts, star, control, memory) = formed.inspect_err(|error| {
        context.watcher().close(roster.id);
        failed(error);
    })?;
    let recorder = Arc::new(Recorder::new(&control)?);
    let lane = match hosts.map.len() {
        1 => Some(Lane::new(&control, &recorder, context.host().queue()?)?),
        _ => None,
    };
    let identity_of = |rank: usize| roster.members.get(rank).map(|member| member.identity);
    let pidfds = hosts.pidfds.into_iter().filter_map(|(rank, pidfd)| Some((rank, identity_of(rank)?, pidfd)));
    let exports = memory.exports().clone();
    context.watcher().watch(roster.id, control.clone(), exports, pidfds.collect(), star)?;
    let group = Group(Arc::new(Inner {
        context: context.clone(),
        store: store.clone(),
        origin: origin.clone(),
        name,
        id: roster.id,
        rank,
        members: roster.members.clone(),
        hosts: hosts.map,
        reasons: hosts.reasons,
        control,
        memory,
        timeout,
        barriers: Mutex::default(),
        turn: Condvar::new(),
        splitting: Mutex::default(),
        recorder,
        lane,
        shrinks: Mutex::default(),
        made: Mutex::default(),
        engine: OnceLock::new(),
    }));
    first_barrier(&group, &finder).inspect_err(failed)?;
    if rank == 0
        && let Err(error) = rendezvous::tidy(&store, &roster, &group.0.hosts)
    {
        tracing::warn!("keys of the group {:?} stay in its store: {error}", group.0.name);
    }
    Ok(group)
}

/// Waits for all ranks, and meanwhile for one that tells by way of the store that it could not come so far.
fn first_barrier(group: &Group, finder: &Finder<'_>) -> Result<()> {
    let deadline = if group.0.control.leads() { finder.deadline } else { finder.grace };
    loop {
        let slice = Deadline::after(Duration::from_millis(250));
        let Err(error) = group.0.barrier(deadline.min(slice)) else { return Ok(()) };
        if is_interrupt(&error) {
            return Err(error);
        }
        if let Some(told) = finder.told() {
            return Err(told);
        }
        if !error.is_timeout() || deadline.passed() {
            return Err(error);
        }
    }
}

/// What the groups of a split are called.
fn split_of(number: u64, colour: u64) -> String {
    format!("split {number} colour {colour}")
}

/// Where a group has its keys in its store.
fn place_of(name: &str) -> String {
    format!("tensorwire/{name}")
}

/// More ranks than an abort word can name.
const MAX_WORLD: usize = 1 << 20;
