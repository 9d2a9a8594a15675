//! What a context has once for all its connections with other hosts: a port where they arrive, and a thread that accepts them
//! and hears for threads that sleep.
//!
//! A connection carries messages in one direction, for one group, from one rank to another. Whoever sends first makes it. Trunks
//! (see [`super::trunk`]) arrive at the same port, while a group forms. The thread never touches a message: it rings the bell
//! of whoever armed an [`Ear`], and that one reads or writes. So a message goes straight between the socket and the tensor, by the
//! thread that waits for it.

use std::collections::HashMap;
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec};
use rustix::io::Errno;
use tensorwire_device::fd::{Fd, Received, Stream};
use tensorwire_device::fork::Birth;
use tensorwire_device::secret::{Id, Secret, digest};
use tensorwire_device::sync::{AtomicBool, Ordering};
use tensorwire_device::{Bell, Deadline, View};

use super::line::TcpLine;
use super::meet::{self, Domain, Stranger};
use super::stream::{Carrier, StreamInlet, StreamOutlet};
use super::ucx::{self, Engine};
use super::{Fault, Inlet, Linked, Outlet};
use crate::config::Config;
use crate::error::{Error, Result};

/// Strangers at one time; more wait in the listener's backlog.
const STRANGERS: usize = 1024;
/// How many are accepted before others have their turn.
const ACCEPTS: usize = 64;
/// How long a connection is tried to be made.
const DIALING: Duration = Duration::from_secs(20);
/// How long one address is tried, so that one which swallows packets does not use up the time of the others.
const ATTEMPT: Duration = Duration::from_secs(3);
/// Between two rounds of attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// Tokens of what is not an ear.
const BELL: u64 = 0;
const LISTENER: u64 = 1;

/// See the module. Dropping it ends the thread.
pub(crate) struct Office {
    shared: Arc<Shared>,
    port: u16,
    birth: Birth,
    thread: Option<JoinHandle<()>>,
    /// UCX, or why messages go by TCP; chosen with the first group that could use it.
    engine: Mutex<Option<Chosen>>,
}

/// UCX, or why messages go by TCP.
pub(super) type Chosen = std::result::Result<Arc<Engine>, String>;

struct Shared {
    identity: Id,
    epoll: Fd,
    /// Wakes the thread.
    bell: Fd,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    doors: HashMap<Id, (Domain, Door)>,
    ears: HashMap<u64, Bell>,
    next: u64,
    stop: bool,
}

/// Who gets the connections of those that know a secret.
#[derive(Clone)]
enum Door {
    Lanes(Arc<Lanes>),
    Sink(Sink),
}

/// Takes a connection of a process with this identity.
pub(crate) type Sink = Arc<dyn Fn(Id, TcpLine) + Send + Sync>;

/// Lets processes in that know a secret, until it is dropped.
#[derive(Debug)]
pub(crate) struct Gate {
    office: Arc<Office>,
    domain: Id,
}

impl Gate {
    pub(crate) fn open(office: &Arc<Office>, domain: Domain, sink: Sink) -> Result<Self> {
        office.enter(domain, Door::Sink(sink))?;
        Ok(Self { office: office.clone(), domain: domain.id })
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.office.leave(self.domain);
    }
}

/// How a rank of a group reaches ranks of other hosts, and is reached by them. Dropping it lets nobody in any more.
#[derive(Debug)]
pub(crate) struct Branch {
    office: Arc<Office>,
    group: Id,
    bell: Bell,
    lanes: Arc<Lanes>,
    taken: Taken,
    chosen: Chosen,
}

/// By what and by which addresses processes were reached, and which were tried before and why they were not taken.
type Taken = Arc<Mutex<HashMap<Id, String>>>;

impl Branch {
    /// Lets processes in that know the secret of a group. `bell` is rung when there is something to do.
    pub(crate) fn open(office: &Arc<Office>, domain: Domain, bell: &Bell, config: &Config) -> Result<Self> {
        Self::with(office, domain, bell, office.choose(config, domain.sealed)?)
    }

    /// The same with what was chosen to carry messages.
    pub(super) fn with(office: &Arc<Office>, domain: Domain, bell: &Bell, chosen: Chosen) -> Result<Self> {
        let lanes = Arc::new(Lanes {
            shared: office.shared.clone(),
            engine: chosen.as_ref().ok().cloned(),
            secret: domain.secret,
            bell: bell.clone(),
            arrived: Mutex::new(Some(Vec::new())),
            some: AtomicBool::new(false),
        });
        office.enter(domain, Door::Lanes(lanes.clone()))?;
        let taken = Taken::default();
        Ok(Self { office: office.clone(), group: domain.id, bell: bell.clone(), lanes, taken, chosen })
    }

    #[cfg(test)]
    pub(super) fn engine(&self) -> Option<&Arc<Engine>> {
        self.chosen.as_ref().ok()
    }

    /// What carries messages to other hosts where they have it too, or why it is TCP.
    pub(crate) fn carrier(&self) -> std::result::Result<&str, &str> {
        self.chosen.as_ref().map(|engine| engine.about()).map_err(String::as_str)
    }

    /// A second one between the same ranks, for something else, by TCP: connections of the two are never mixed up.
    pub(crate) fn another(&self, purpose: &str, bell: &Bell) -> Result<Self> {
        let domain = self.office.domain(self.group)?;
        let id = digest(&[purpose.as_bytes(), &self.group.0].concat());
        Self::with(&self.office, Domain { id, ..domain }, bell, Err("it is for messages".into()))
    }

    /// Begins to make a connection to a process.
    pub(crate) fn dial(&self, whom: Id, addresses: Vec<SocketAddr>) -> Result<Arc<Dial>> {
        let engine = self.chosen.as_ref().ok().cloned();
        self.office.dial(self.group, (whom, addresses), (&self.bell, engine), &self.taken)
    }

    /// By what and by which address a process was reached, once a message went there, and why not by those in front of it.
    pub(crate) fn way_to(&self, whom: Id) -> Option<String> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).get(&whom).cloned()
    }

    /// Whether there may be some that nobody has taken.
    pub(crate) fn has_arrived(&self) -> bool {
        self.lanes.some.load(Ordering::Acquire)
    }

    /// Connections that have come since the last call, and the identities of the processes that made them.
    pub(crate) fn arrived(&self) -> Vec<(Id, Result<Box<dyn Inlet>>)> {
        self.lanes.take()
    }

    /// Lets nobody in any more.
    pub(crate) fn close(&self) {
        self.office.leave(self.group);
        // Connections that nobody took are closed without the lock.
        let left = self.lanes.arrived.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(left);
    }
}

impl Drop for Branch {
    fn drop(&mut self) {
        self.close();
    }
}

/// A connection that a process with this identity has made, or why it is of no use here.
type Arrived = (Id, Result<Box<dyn Carrier>>);

/// Connections of a group that others have made and that its rank has not taken yet.
#[derive(Debug)]
struct Lanes {
    shared: Arc<Shared>,
    engine: Option<Arc<Engine>>,
    /// What the group's ranks know.
    secret: Secret,
    bell: Bell,
    /// Nothing once the group is closed.
    arrived: Mutex<Option<Vec<Arrived>>>,
    /// Whether there may be some.
    some: AtomicBool,
}

impl Lanes {
    /// Those that have come since the last call, and the identities of the processes that made them.
    fn take(&self) -> Vec<(Id, Result<Box<dyn Inlet>>)> {
        if !self.some.load(Ordering::Acquire) {
            return Vec::new();
        }
        let arrived = {
            let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
            self.some.store(false, Ordering::Release);
            arrived.as_mut().map(std::mem::take).unwrap_or_default()
        };
        let inlet = |carrier| Box::new(StreamInlet::new(carrier)) as Box<dyn Inlet>;
        arrived.into_iter().map(|(identity, carrier)| (identity, carrier.map(inlet))).collect()
    }

    /// Takes a connection in, and tells the other side so. What that side sends from then on is never overtaken by the news
    /// that it has left.
    fn put(&self, identity: Id, line: TcpLine) {
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        // A thread that hears that the other side has left looks here, and waits for the lock.
        self.some.store(true, Ordering::Release);
        let Some(waiting) = arrived.as_mut() else { return };
        match self.take_in(line) {
            Err(Fault::Ours(error)) => waiting.push((identity, Err(error))),
            Err(fault) => {
                tracing::warn!("a connection of another host has ended: {fault:?}");
                return;
            }
            Ok(carrier) => waiting.push((identity, Ok(carrier))),
        }
        drop(arrived);
        self.bell.ring();
    }

    /// Says that the other side is in, and offers UCX where it is here.
    fn take_in(&self, mut line: TcpLine) -> Linked<Box<dyn Carrier>> {
        // What is said fits: nothing was sent before but a few frames.
        let Some(engine) = &self.engine else {
            line.send(&[meet::IN], None, &[])?;
            return Ok(Box::new(TcpCarrier::new(&self.shared, line, &self.bell)?));
        };
        let (lane, offer) = match engine.offer(&self.secret, &self.bell) {
            Ok(offered) => offered,
            // The other side hears that nothing comes by UCX, and gives up.
            Err(error) => {
                tracing::warn!("another host cannot send to this process by UCX: {error}");
                line.send(&[meet::IN], None, &[])?;
                return Ok(Box::new(TcpCarrier::new(&self.shared, line, &self.bell)?));
            }
        };
        line.send(&[&[meet::IN_WITH_UCX], &offer[..]].concat(), None, &[])?;
        let control = TcpCarrier::new(&self.shared, line, &self.bell)?;
        Ok(Box::new(engine.take_in(control, lane)?))
    }
}

/// A connection as it is, for threads that may sleep.
#[derive(Debug)]
pub(super) struct TcpCarrier {
    line: TcpLine,
    ear: Ear,
}

impl TcpCarrier {
    fn new(shared: &Arc<Shared>, line: TcpLine, bell: &Bell) -> Result<Self> {
        let ear = Ear::new(shared, line.stream(), bell)?;
        Ok(Self { line, ear })
    }

    pub(super) fn stream(&self) -> &Arc<Stream> {
        self.line.stream()
    }
}

impl Carrier for TcpCarrier {
    fn send(&mut self, head: &[u8], body: Option<View<'_>>, tail: &[u8]) -> Linked<usize> {
        self.line.send(head, body, tail)
    }

    fn flush(&mut self) -> Linked<bool> {
        self.line.flush()
    }

    fn recv(&mut self, into: View<'_>) -> Linked<Received> {
        self.line.recv(into)
    }

    fn recv_bytes(&mut self, into: &mut [u8]) -> Linked<Received> {
        self.line.recv_bytes(into)
    }

    fn arm_for_room(&self) {
        self.ear.arm_for_room(self.line.as_fd());
    }

    fn arm_for_bytes(&self) {
        self.ear.arm_for_bytes(self.line.as_fd());
    }
}

impl Office {
    /// Begins to listen.
    pub(crate) fn open(identity: Id) -> Result<Self> {
        let doing = |e: std::io::Error| Error::io("listening for other hosts", e);
        let listener =
            TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0")).map_err(doing)?;
        listener.set_nonblocking(true).map_err(doing)?;
        let port = listener.local_addr().map_err(doing)?.port();
        let listener = Fd::new(listener);
        let watching = |e: Errno| Error::io("watching connections with other hosts", e);
        let epoll = Fd::new(epoll::create(CreateFlags::CLOEXEC).map_err(watching)?);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bell = Fd::new(rustix::event::eventfd(0, flags).map_err(watching)?);
        epoll::add(&epoll, &bell, EventData::new_u64(BELL), EventFlags::IN).map_err(watching)?;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN).map_err(watching)?;
        let state = Mutex::new(State { next: LISTENER + 1, ..State::default() });
        let shared = Arc::new(Shared { identity, epoll, bell, state });
        let office = shared.clone();
        let builder = std::thread::Builder::new().name("tensorwire-office".into());
        let thread = builder
            .spawn(move || Desk { shared: office, listener, strangers: HashMap::new() }.run())
            .map_err(|e| Error::io("starting the thread that listens for other hosts", e))?;
        Ok(Self { shared, port, birth: Birth::now(), thread: Some(thread), engine: Mutex::default() })
    }

    /// What carries messages to other hosts.
    fn choose(&self, config: &Config, sealed: bool) -> Result<Chosen> {
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        if sealed || engine.is_none() {
            let chosen = ucx::choose(config, sealed)?.map(Arc::new);
            if sealed {
                return Ok(chosen);
            }
            *engine = Some(chosen);
        }
        engine.clone().ok_or_else(|| Error::bug("what carries messages was chosen and is not there"))
    }

    /// Where others connect to.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Lets processes in that know the secret of a domain.
    fn enter(&self, domain: Domain, door: Door) -> Result<()> {
        self.birth.check("the office")?;
        self.shared.lock().doors.insert(domain.id, (domain, door));
        Ok(())
    }

    /// What those have in common that are let in for a group.
    fn domain(&self, group: Id) -> Result<Domain> {
        self.birth.check("the office")?;
        let domain = self.shared.lock().doors.get(&group).map(|(domain, _)| *domain);
        domain.ok_or_else(|| Error::Aborted("the group was closed on this rank".into()))
    }

    /// Lets nobody in for a domain any more.
    fn leave(&self, domain: Id) {
        if self.birth.is_ours() {
            let left = self.shared.lock().doors.remove(&domain);
            drop(left);
        }
    }

    /// Begins to make a connection to a process. `bell` is rung when it is made or cannot be.
    fn dial(
        &self,
        group: Id,
        (whom, addresses): (Id, Vec<SocketAddr>),
        (bell, engine): (&Bell, Option<Arc<Engine>>),
        taken: &Taken,
    ) -> Result<Arc<Dial>> {
        let domain = self.domain(group)?;
        let (shared, bell, taken) = (self.shared.clone(), bell.clone(), taken.clone());
        let dial = Arc::new(Dial { shared, engine, bell, taken, made: Mutex::default() });
        let own = dial.clone();
        let builder = std::thread::Builder::new().name("tensorwire-dial".into());
        let started = builder.spawn(move || own.run(&domain, whom, &addresses));
        started.map_err(|e| Error::io("starting a thread that connects to another host", e))?;
        Ok(dial)
    }
}

impl fmt::Debug for Office {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Office(port {})", self.port)
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Office of {}", self.identity)
    }
}

impl Drop for Office {
    fn drop(&mut self) {
        // In a forked child the thread does not exist, and the lock may be held for ever.
        if !self.birth.is_ours() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.lock().stop = true;
        let _ = rustix::io::write(&self.shared.bell, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection on its way to be made.
#[derive(Debug)]
pub(crate) struct Dial {
    shared: Arc<Shared>,
    engine: Option<Arc<Engine>>,
    bell: Bell,
    taken: Taken,
    made: Mutex<Option<std::result::Result<Box<dyn Carrier>, String>>>,
}

impl Dial {
    /// The connection, or why there is none, once that is known.
    pub(crate) fn take(&self) -> Option<std::result::Result<Box<dyn Outlet>, String>> {
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        Some(made.map(|carrier| Box::new(StreamOutlet::new(carrier)) as Box<dyn Outlet>))
    }

    fn run(self: Arc<Self>, domain: &Domain, whom: Id, addresses: &[SocketAddr]) {
        let made = self.connect(domain, whom, addresses);
        *self.made.lock().unwrap_or_else(PoisonError::into_inner) = Some(made);
        self.bell.ring();
    }

    fn connect(
        self: &Arc<Self>,
        domain: &Domain,
        whom: Id,
        addresses: &[SocketAddr],
    ) -> std::result::Result<Box<dyn Carrier>, String> {
        let end = Instant::now() + DIALING;
        let mut reasons: Vec<String> =
            addresses.iter().map(|address| format!("{address}: not tried")).collect();
        loop {
            for (at, address) in addresses.iter().enumerate() {
                let deadline = Deadline::after(ATTEMPT);
                let made = meet::reach(domain, address, whom, deadline)
                    .and_then(|line| meet::await_in(line, deadline));
                match made {
                    Ok((line, offer)) => {
                        let (carrier, by) = self.carry(line, offer, &domain.secret)?;
                        let way = match reasons.get(..at) {
                            Some(before) if at > 0 => {
                                format!("{address} (not by {})", before.join("; not by "))
                            }
                            _ => address.to_string(),
                        };
                        let way = format!("{by} to {way}");
                        tracing::debug!("{whom} is reached by {way}");
                        self.taken.lock().unwrap_or_else(PoisonError::into_inner).insert(whom, way);
                        return Ok(carrier);
                    }
                    Err(error) => {
                        if let Some(reason) = reasons.get_mut(at) {
                            *reason = format!("{address}: {error}");
                        }
                    }
                }
                // Nobody waits for it any more.
                if Arc::strong_count(self) == 1 {
                    return Err("given up".into());
                }
            }
            if addresses.is_empty() || Instant::now() >= end {
                let reasons = reasons.join("; ");
                return Err(format!(
                    "{reasons}; set TENSORWIRE_ADDRESS there to an address that this host reaches"
                ));
            }
            std::thread::sleep(PAUSE);
        }
    }
}

impl Dial {
    /// What carries the bytes, and its name. The other side offers UCX where it has it.
    fn carry(
        &self,
        mut line: TcpLine,
        offer: Option<Vec<u8>>,
        secret: &Secret,
    ) -> std::result::Result<(Box<dyn Carrier>, String), String> {
        let wrong = |fault: Fault| format!("{fault:?}");
        let Some(engine) = &self.engine else {
            if offer.is_some() {
                line.send(&ucx::DECLINED, None, &[]).map_err(wrong)?;
            }
            let carrier = TcpCarrier::new(&self.shared, line, &self.bell);
            return Ok((Box::new(carrier.map_err(|error| error.to_string())?), "TCP".into()));
        };
        let Some(offer) = offer else {
            return Err("it takes no messages by UCX, and TENSORWIRE_LINK=ucx is set here: all ranks need the same setting; if they have it, its log says how UCX has failed there".into());
        };
        let carrier = TcpCarrier::new(&self.shared, line, &self.bell).map_err(|error| error.to_string())?;
        let output = engine.take_up(carrier, &offer, secret, &self.bell).map_err(wrong)?;
        Ok((Box::new(output), format!("{}, beside TCP", engine.about())))
    }
}

/// Hears for a thread that sleeps that a connection has bytes, or room for some.
#[derive(Debug)]
pub(super) struct Ear {
    shared: Arc<Shared>,
    token: u64,
}

impl Ear {
    fn new(shared: &Arc<Shared>, stream: &Stream, bell: &Bell) -> Result<Self> {
        let token = {
            let mut state = shared.lock();
            state.next += 1;
            let token = state.next;
            state.ears.insert(token, bell.clone());
            token
        };
        let ear = Self { shared: shared.clone(), token };
        epoll::add(&ear.shared.epoll, stream, EventData::new_u64(token), EventFlags::ONESHOT)
            .map_err(|e| Error::io("watching a connection with another host", e))?;
        Ok(ear)
    }

    pub(super) fn arm_for_bytes(&self, stream: BorrowedFd<'_>) {
        self.arm(stream, EventFlags::IN | EventFlags::RDHUP);
    }

    pub(super) fn arm_for_room(&self, stream: BorrowedFd<'_>) {
        self.arm(stream, EventFlags::OUT);
    }

    /// The bell is rung once. If the connection is ready, that is at once.
    fn arm(&self, stream: BorrowedFd<'_>, flags: EventFlags) {
        let flags = flags | EventFlags::ONESHOT;
        if let Err(error) = epoll::modify(&self.shared.epoll, stream, EventData::new_u64(self.token), flags) {
            tracing::error!("a connection with another host cannot be watched: {error}");
        }
    }
}

impl Drop for Ear {
    fn drop(&mut self) {
        if self.shared.epoll.is_ours() {
            self.shared.lock().ears.remove(&self.token);
        }
    }
}

/// What the thread has for itself.
struct Desk {
    shared: Arc<Shared>,
    listener: Fd<TcpListener>,
    strangers: HashMap<u64, Stranger>,
}

impl Desk {
    fn run(mut self) {
        let mut events = Vec::with_capacity(256);
        loop {
            // A stranger that says nothing is let go in time.
            let tick = Timespec { tv_sec: 1, tv_nsec: 0 };
            let tick = (!self.strangers.is_empty()).then_some(&tick);
            match epoll::wait(&self.shared.epoll, spare_capacity(&mut events), tick) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!("connections with other hosts cannot be watched: {error}");
                    return;
                }
            }
            for event in events.drain(..) {
                match event.data.u64() {
                    BELL => {
                        let _ = rustix::io::read(&self.shared.bell, &mut [0; 8]);
                    }
                    LISTENER => self.accept(),
                    token if self.strangers.contains_key(&token) => self.hear(token),
                    token => {
                        let bell = self.shared.lock().ears.get(&token).cloned();
                        if let Some(bell) = bell {
                            bell.ring();
                        }
                    }
                }
            }
            self.strangers.retain(|_, stranger| !stranger.is_late());
            if self.shared.lock().stop {
                return;
            }
        }
    }

    /// Takes some: what else there is to do has its turn, too.
    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            match self.listener.accept() {
                Ok((socket, _)) if self.strangers.len() < STRANGERS => {
                    let Some(stranger) = Stranger::new(socket) else { continue };
                    let token = {
                        let mut state = self.shared.lock();
                        state.next += 1;
                        state.next
                    };
                    let data = EventData::new_u64(token);
                    // Told of new bytes only: a part of a frame stays in the socket until the rest has come.
                    let flags = EventFlags::IN | EventFlags::ET;
                    if epoll::add(&self.shared.epoll, stranger.socket(), data, flags).is_ok() {
                        self.strangers.insert(token, stranger);
                    }
                }
                // Too many: whoever means it comes again.
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    tracing::warn!("a connection of another host could not be accepted: {error}");
                    // Out of descriptors, perhaps: it stays ready.
                    std::thread::sleep(PAUSE);
                    return;
                }
            }
        }
    }

    /// A stranger has said something.
    fn hear(&mut self, token: u64) {
        let Some(mut stranger) = self.strangers.remove(&token) else { return };
        let terms = |(domain, _): &(Domain, _)| (domain.secret, domain.sealed);
        let terms_of = |domain| self.shared.lock().doors.get(&domain).map(terms);
        match stranger.step(self.shared.identity, &terms_of) {
            Ok(None) => {
                self.strangers.insert(token, stranger);
            }
            Ok(Some((domain, who))) => {
                let door = self.shared.lock().doors.get(&domain).map(|(_, door)| door.clone());
                // The ear of whoever takes it comes in the place of this one.
                let _ = epoll::delete(&self.shared.epoll, stranger.socket());
                match (door, stranger.into_line()) {
                    (Some(Door::Lanes(lanes)), Ok(line)) => lanes.put(who, line),
                    (Some(Door::Sink(sink)), Ok(line)) => sink(who, line),
                    (None, _) => {}
                    (_, Err(error)) => tracing::warn!("a connection of another host is of no use: {error}"),
                }
            }
            Err(error) => tracing::warn!("a process of another host tried to connect: {error}"),
        }
    }
}
