//! The answering side: one thread, which runs as long as somebody asks, and in a process that lends memory always.
//!
//! It is not the watcher, because a driver may take its time to export memory. It waits for nobody: what a client does not take
//! stays in its queue, and until the queue is empty the client is not heard.

use std::collections::{HashMap, VecDeque};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use tensorwire_device::fd::{Connection, Fd, MAX_MESSAGE};
use tensorwire_device::gpu::background;
use tensorwire_device::handle::Means;
use tensorwire_device::secret::{Id, Secret};
use tensorwire_device::sync::{AtomicBool, Ordering};
use tensorwire_device::{Deadline, Handle};

use super::frames::{self, Question, Reason, Request};
use super::{Domain, Welcome, root};
use crate::error::{Error, Result};

/// How long a client may take until it asks for the first time, and to take an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who may ask for what, and those who do. Shared with the thread.
pub(super) struct Server {
    identity: Id,
    state: Mutex<State>,
    /// Whether the thread runs also while nobody asks.
    expects: AtomicBool,
}

#[derive(Default)]
struct State {
    domains: HashMap<Id, (Secret, Weak<dyn Domain>)>,
    /// Clients that the thread has not seen yet.
    new: Vec<Connection>,
    /// Wakes the thread, if it runs.
    bell: Option<Arc<Fd>>,
    stop: bool,
}

/// One who may ask.
struct Client {
    connection: Connection,
    /// What it is known as in domains that it has greeted. Dropping one tells the domain that it is gone.
    guests: Vec<(Id, Box<dyn Send>)>,
    /// What it has not taken yet.
    out: VecDeque<(Vec<u8>, Vec<Arc<Fd>>)>,
    /// Until when it has to do something; no end once it has asked, and has its answer.
    until: Option<Instant>,
}

/// What has happened to a client.
#[derive(Debug, Clone, Copy, Default)]
struct Ready {
    /// There is something to read, or room to write.
    socket: bool,
    /// Its process has ended.
    process: bool,
}

impl Server {
    pub(super) fn new(identity: Id) -> Arc<Self> {
        Arc::new(Self { identity, state: Mutex::default(), expects: AtomicBool::new(false) })
    }

    pub(super) fn enter(&self, domain: Id, secret: Secret, who: Weak<dyn Domain>) {
        self.lock().domains.insert(domain, (secret, who));
    }

    pub(super) fn leave(&self, domain: Id) {
        self.lock().domains.remove(&domain);
    }

    /// A domain, if it is there.
    pub(super) fn domain(&self, id: Id) -> Option<Arc<dyn Domain>> {
        self.lock().domains.get(&id)?.1.upgrade()
    }

    pub(super) fn secret_of(&self, domain: Id) -> Option<Secret> {
        self.lock().domains.get(&domain).map(|(secret, _)| *secret)
    }

    /// Answers a process from now on that has proved to know the secret of a domain.
    pub(super) fn accept(self: &Arc<Self>, connection: Connection) -> Result<()> {
        let mut state = self.lock();
        if state.stop {
            return Ok(());
        }
        if let Some(bell) = &state.bell {
            ring(bell);
            state.new.push(connection);
            return Ok(());
        }
        match self.start() {
            Ok(bell) => {
                state.bell = Some(bell);
                state.new.push(connection);
                Ok(())
            }
            Err(error) => {
                let _ =
                    connection.send(&frames::last(&error.to_string()), &[], Deadline::after(Duration::ZERO));
                Err(error)
            }
        }
    }

    /// Has the thread run from now on: the first process that asks does not wait until it has started.
    pub(super) fn expect(self: &Arc<Self>) {
        if self.expects.load(Ordering::Relaxed) || self.expects.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut state = self.lock();
        if state.bell.is_none() && !state.stop {
            // If it cannot start now, it is tried again when somebody asks.
            state.bell = self.start().ok();
        }
    }

    /// Starts the thread; gives what wakes it.
    fn start(self: &Arc<Self>) -> Result<Arc<Fd>> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = Arc::new(Fd::new(bell.map_err(|e| Error::io("making an eventfd", e))?));
        let (server, rung) = (self.clone(), bell.clone());
        let thread = std::thread::Builder::new().name("tensorwire-share".into());
        let started = thread.spawn(move || {
            background();
            server.run(&rung);
        });
        started.map_err(|e| Error::io("starting the thread that shares memory", e))?;
        Ok(bell)
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stop = true;
        state.new.clear();
        if let Some(bell) = &state.bell {
            ring(bell);
        }
    }

    /// Whether nobody may ask.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.lock().bell.is_none()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The life of the thread.
    fn run(&self, bell: &Fd) {
        let mut clients: Vec<Client> = Vec::new();
        loop {
            {
                let mut state = self.lock();
                let until = Instant::now() + PATIENCE;
                clients.extend(state.new.drain(..).map(|connection| Client::new(connection, until)));
                let idle = clients.is_empty() && !self.expects.load(Ordering::Relaxed);
                if idle || state.stop {
                    state.bell = None;
                    break;
                }
            }
            let mut ready = wait(bell, &clients).into_iter();
            let now = Instant::now();
            clients.retain_mut(|client| {
                let Ready { socket, process } = ready.next().unwrap_or_default();
                !process
                    && (!socket || self.hear(client, now))
                    && client.until.is_none_or(|until| until > now)
            });
        }
    }

    /// Goes on with a client; gives whether it stays.
    fn hear(&self, client: &mut Client, now: Instant) -> bool {
        let heard = if client.out.is_empty() { self.serve(client) } else { Ok(true) };
        let stays = heard.and_then(|stays| {
            let rest = client.flush()?;
            client.until = rest.then(|| now + PATIENCE);
            Ok(stays)
        });
        stays.unwrap_or_else(|error| {
            tracing::warn!("process {} loses its connection: {error}", client.connection.peer().pid);
            let last = frames::last(&error.to_string());
            let _ = client.connection.send(&last, &[], Deadline::after(Duration::ZERO));
            false
        })
    }

    /// Answers one request; gives whether there may be another.
    fn serve(&self, client: &mut Client) -> Result<bool> {
        let Some((frame, fds)) = client.connection.try_recv()? else { return Ok(true) };
        if frame.is_empty() {
            return Ok(false);
        }
        let request = Request::read(&frame)?;
        let (serial, asker) = (request.serial, client.connection.peer().identity);
        let known = self.lock().domains.get(&request.domain).cloned();
        let known = known.filter(|(secret, _)| request.is_proved(secret, asker, self.identity));
        let Some(domain) = known.and_then(|(_, domain)| domain.upgrade()) else {
            client.refuse(serial, Reason::Closed, "it knows of no such group or lease, or not this secret");
            return Ok(true);
        };
        match request.question {
            // One that cannot have this memory may have other memory.
            Question::Memory(number, pass) => match export(&*domain, number, pass) {
                Ok(handle) => client.answer(serial, handle.encode(), shared(fds_of(handle))),
                Err((reason, why)) => client.refuse(serial, reason, &why),
            },
            Question::Descriptors(number) => match domain.descriptors(asker, number) {
                Some(fds) => client.answer(serial, Vec::new(), fds),
                None => client.refuse(serial, Reason::Gone, "there are no such descriptors"),
            },
            Question::Taken(number) => {
                domain.taken(asker, number);
                client.answer(serial, Vec::new(), Vec::new());
            }
            Question::Hello(hello) => {
                // A client that says it again has lost what it got for the first one.
                client.guests.retain(|(known, _)| *known != request.domain);
                match domain.greet(client.connection.peer(), hello, fds) {
                    Ok(Welcome { body, fds, guest }) => {
                        client.guests.push((request.domain, guest));
                        client.answer(serial, body, shared(fds));
                    }
                    Err(error) => client.refuse(serial, Reason::Failed, &error.to_string()),
                }
            }
        }
        Ok(true)
    }
}

/// What a peer needs to map memory that a domain lets it have.
fn export(domain: &dyn Domain, number: u64, pass: &[u8]) -> Result<Handle, (Reason, String)> {
    let region = domain.memory(number, pass)?;
    let handle = root(&region).export();
    // Let go before the peer has its answer: memory must not seem to live on when its user drops it.
    domain.put_back(region, pass);
    handle.map_err(|error| (Reason::Failed, error.to_string()))
}

impl Client {
    fn new(connection: Connection, until: Instant) -> Self {
        Self { connection, guests: Vec::new(), out: VecDeque::new(), until: Some(until) }
    }

    fn answer(&mut self, serial: u64, body: Vec<u8>, fds: Vec<Arc<Fd>>) {
        let frames = frames::answer(serial, &body, fds);
        if frames.iter().any(|(frame, _)| frame.len() > MAX_MESSAGE) {
            let why = format!("its handle has {} bytes, and {MAX_MESSAGE} fit into a message", body.len());
            return self.refuse(serial, Reason::Failed, &why);
        }
        self.out.extend(frames);
    }

    fn refuse(&mut self, serial: u64, reason: Reason, why: &str) {
        self.out.push_back((frames::refusal(serial, reason, why), Vec::new()));
    }

    /// Sends what there is room for; gives whether something is left. An answer that cannot be sent becomes a refusal: the
    /// kernel may have too many descriptors on their way, and a process that loses its connection loses its loans.
    fn flush(&mut self) -> Result<bool> {
        let mut refused = false;
        while let Some((frame, fds)) = self.out.front() {
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).collect();
            let error = match self.connection.send(frame, &fds, Deadline::after(Duration::ZERO)) {
                Ok(()) => {
                    self.out.pop_front();
                    continue;
                }
                Err(tensorwire_device::Error::TimedOut) => return Ok(true),
                Err(error) => error,
            };
            let Some(serial) = frames::serial_of(frame).filter(|_| !refused && !is_closed(&error)) else {
                return Err(error.into());
            };
            self.out.clear();
            self.refuse(serial, Reason::Failed, &format!("its answer cannot be sent: {error}"));
            refused = true;
        }
        Ok(false)
    }
}

/// Whether the other side is gone.
fn is_closed(error: &tensorwire_device::Error) -> bool {
    let tensorwire_device::Error::Io { source, .. } = error else { return false };
    matches!(source.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
}

fn fds_of(handle: Handle) -> Vec<Fd> {
    match handle {
        Handle::Memfd { fd, .. } | Handle::File { fd, .. } => vec![fd],
        Handle::Gpu(gpu) => {
            let fd = |means| if let Means::Fd(fd) = means { Some(fd) } else { None };
            gpu.chunks.into_iter().filter_map(|chunk| fd(chunk.means)).collect()
        }
        _ => Vec::new(),
    }
}

fn shared(fds: Vec<Fd>) -> Vec<Arc<Fd>> {
    fds.into_iter().map(Arc::new).collect()
}

fn ring(bell: &Fd) {
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

/// Sleeps until something is ready or due; gives what has happened to each client.
fn wait(bell: &Fd, clients: &[Client]) -> Vec<Ready> {
    let mut fds = vec![PollFd::new(bell, PollFlags::IN)];
    for client in clients {
        let event = if client.out.is_empty() { PollFlags::IN } else { PollFlags::OUT };
        fds.push(PollFd::from_borrowed_fd(client.connection.as_fd(), event));
        fds.push(PollFd::new(&client.connection.peer().pidfd, PollFlags::IN));
    }
    let due = clients.iter().filter_map(|client| client.until).min();
    let left = due.map(|due| due.saturating_duration_since(Instant::now()));
    let left =
        left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
    match poll(&mut fds, left.as_ref()) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Vec::new(),
        Err(error) => {
            tracing::error!("the thread that shares memory cannot poll: {error}");
            std::thread::sleep(Duration::from_millis(100));
            return Vec::new();
        }
    }
    let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
    if is_ready(&fds[0]) {
        let _ = rustix::io::read(bell, &mut [0; 8]);
    }
    let both = fds[1..].chunks_exact(2);
    both.map(|both| Ready { socket: is_ready(&both[0]), process: is_ready(&both[1]) }).collect()
}

#[cfg(test)]
mod tests {
    use tensorwire_device::fd::{Handshake, HandshakeStep, Listener, connect};

    use super::super::frames::Answer;
    use super::*;

    /// Both ends of a connection.
    fn pair() -> (Connection, Connection) {
        let listener = Listener::bind(None).unwrap();
        let (address, id, secret) = (listener.address().clone(), Id([1; 16]), Secret::random().unwrap());
        let soon = Deadline::after(PATIENCE);
        let other = std::thread::spawn(move || connect(&address, id, id, &secret, soon).unwrap());
        let mut step = loop {
            if let Some(stranger) = Handshake::accept(&listener).unwrap() {
                break stranger;
            }
        };
        loop {
            match step.step(id, &|_| Some(secret)).unwrap() {
                HandshakeStep::More(more) => step = more,
                HandshakeStep::Done(_, connection) => return (connection, other.join().unwrap()),
            }
        }
    }

    /// What cannot be sent is refused, also in the middle of an answer, and the client stays.
    #[test]
    fn an_answer_that_cannot_be_sent_is_a_refusal() {
        let (connection, other) = pair();
        let mut client = Client::new(connection, Instant::now() + PATIENCE);
        let first = frames::answer::<Arc<Fd>>(7, &[0; 100], Vec::new()).remove(0).0;
        let more = |len| [&[b'f'][..], &7u64.to_le_bytes(), &vec![0; len]].concat();
        for sent_before in [false, true] {
            client.out.extend(sent_before.then(|| (first.clone(), Vec::new())));
            // Too long for a message.
            client.out.extend([(more(MAX_MESSAGE), Vec::new()), (more(0), Vec::new())]);
            assert!(!client.flush().unwrap());
            let hear = || other.recv(Deadline::after(PATIENCE)).unwrap();
            if sent_before {
                assert_eq!(hear().0, first);
            }
            let answer = Answer::read(None, &hear().0, Vec::new()).unwrap();
            assert_eq!(answer.serial, 7);
            assert!(matches!(answer.result, Err((Reason::Failed, _))), "{answer:?}");
            assert!(other.try_recv().unwrap().is_none(), "the rest is not sent");
        }
        drop(other);
        client.refuse(8, Reason::Gone, "nobody hears it");
        assert!(client.flush().is_err());
    }
}
