//! The server that TCP stores connect to: torch's TCPStore protocol, one thread for all clients.

mod session;

use std::io::{self, Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use tensorwire_device::fd::Fd;

use self::session::{Service, Session, slot_of};
use super::Limits;
use super::tcp::keep_alive;
use crate::error::{Error, Result};

/// A TCPStore server. It ends when it is dropped.
#[derive(Debug)]
pub struct TcpServer {
    address: SocketAddr,
    stop: Arc<Fd>,
    thread: Option<JoinHandle<()>>,
}

impl TcpServer {
    /// Serves at an address; port 0 lets the system choose.
    pub fn bind(address: impl ToSocketAddrs) -> Result<Self> {
        let addresses = address.to_socket_addrs();
        let addresses: Vec<_> =
            addresses.map_err(|e| Error::io("looking up the store's address", e))?.collect();
        let listener = TcpListener::bind(&addresses[..]).map_err(|e| {
            let names: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            Error::io(format!("serving a store at {}", names.join(", ")), e)
        })?;
        Self::adopt(listener, Limits::default())
    }

    /// Serves at all addresses of this host: IPv4 and IPv6, or IPv4 alone where there is no IPv6.
    pub fn bind_all(port: u16) -> Result<Self> {
        match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
            Ok(listener) => Self::adopt(listener, Limits::default()),
            Err(error) => {
                tracing::info!(%error, "no dual-stack socket for the store, binding 0.0.0.0 instead of [::]");
                Self::bind(("0.0.0.0", port))
            }
        }
    }

    /// Serves at a socket that listens already.
    pub fn adopt(listener: TcpListener, limits: Limits) -> Result<Self> {
        let doing = |what: &'static str| move |e: io::Error| Error::io(what, e);
        let address = listener.local_addr().map_err(doing("asking for the store's address"))?;
        listener.set_nonblocking(true).map_err(doing("preparing the store's socket"))?;
        // The library's 128 are few when a thousand clients start at once; the system cuts this down to what it allows.
        rustix::net::listen(&listener, i32::MAX).map_err(|e| Error::io("preparing the store's socket", e))?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::io("making the store's stop signal", e))?;
        let stop = Arc::new(Fd::new(stop));
        let server =
            Loop::new(listener, stop.clone(), limits).map_err(doing("preparing the store's event loop"))?;
        let thread = std::thread::Builder::new()
            .name("tensorwire-store".into())
            .spawn(move || server.run())
            .map_err(doing("starting the store's thread"))?;
        Ok(Self { address, stop, thread: Some(thread) })
    }

    /// Where it serves.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        if !self.stop.is_ours() {
            // A forked child has a copy of this, but neither the thread nor the sockets.
            std::mem::forget(self.thread.take());
            return;
        }
        // The loop never blocks but in epoll, so the signal ends it at once.
        if let Err(error) = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes()) {
            tracing::error!(%error, "the store's server could not be told to stop");
            return;
        }
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the store's server had panicked");
        }
    }
}

const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;
/// Bytes read from a client before the others have their turn.
const TURN: usize = 64 << 10;
/// How long accepting pauses when the process has no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long a client may take to say its first words.
const INTRODUCTION: Duration = Duration::from_secs(30);

/// The server's thread.
struct Loop {
    listener: Fd<TcpListener>,
    stop: Arc<Fd>,
    epoll: Fd,
    service: Service,
    clients: Vec<Option<Client>>,
    /// Slots of `clients` that are empty.
    free: Vec<usize>,
    /// Bytes held for all clients.
    held: usize,
    /// When to accept again, while that is paused.
    accept_at: Option<Instant>,
    /// When to look for clients that never introduced themselves.
    sweep_at: Option<Instant>,
    scratch: Vec<u8>,
}

struct Client {
    stream: Fd<TcpStream>,
    address: SocketAddr,
    session: Session,
    interest: EventFlags,
    since: Instant,
    /// How much of `Loop::held` is its.
    held: usize,
}

impl Loop {
    fn new(listener: TcpListener, stop: Arc<Fd>, limits: Limits) -> io::Result<Self> {
        let listener = Fd::new(listener);
        let epoll = Fd::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        epoll::add(&epoll, &*stop, EventData::new_u64(STOP), EventFlags::IN)?;
        Ok(Self {
            listener,
            stop,
            epoll,
            service: Service::new(limits),
            clients: Vec::new(),
            free: Vec::new(),
            held: 0,
            accept_at: None,
            sweep_at: None,
            scratch: vec![0; TURN],
        })
    }

    fn run(mut self) {
        let mut events = Vec::with_capacity(256);
        loop {
            events.clear();
            let timeout = self.next_timer();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the store's server cannot wait for events and ends");
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    STOP => return,
                    LISTENER => self.accept(),
                    slot => self.serve(slot as usize, event.flags),
                }
            }
            self.timers();
        }
    }

    fn next_timer(&self) -> Option<Timespec> {
        let next = [self.accept_at, self.sweep_at].into_iter().flatten().min()?;
        let left = next.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        Some(Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() })
    }

    fn timers(&mut self) {
        if self.accept_at.is_none() && self.sweep_at.is_none() {
            return;
        }
        let now = Instant::now();
        if self.accept_at.is_some_and(|at| at <= now) {
            self.accept_at = None;
            if let Err(error) =
                epoll::add(&self.epoll, &self.listener, EventData::new_u64(LISTENER), EventFlags::IN)
            {
                tracing::warn!(%error, "the store's server cannot accept clients yet");
                self.accept_at = Some(now + ACCEPT_PAUSE);
            }
        }
        if self.sweep_at.is_some_and(|at| at <= now) {
            self.sweep(now);
        }
    }

    /// Closes connections that have said nothing.
    fn sweep(&mut self, now: Instant) {
        self.sweep_at = None;
        for slot in 0..self.clients.len() {
            let Some(client) = &self.clients[slot] else { continue };
            if client.session.is_validated() {
                continue;
            }
            let ends = client.since + INTRODUCTION;
            if ends <= now {
                self.close(slot, Some("it did not introduce itself"));
            } else {
                self.sweep_at = Some(self.sweep_at.map_or(ends, |at| at.min(ends)));
            }
        }
    }

    fn accept(&mut self) {
        // A few at a time, so that a flood of newcomers does not starve those who are in.
        for _ in 0..64 {
            match self.listener.accept() {
                Ok((stream, address)) => self.admit(stream, address),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                        tracing::warn!(%error, "the store's server stops accepting for {ACCEPT_PAUSE:?}");
                        let _ = epoll::delete(&self.epoll, &self.listener);
                        self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
                        return;
                    }
                    // The newcomer went away again.
                    _ => tracing::debug!(%error, "a client of the store was gone before it was accepted"),
                },
            }
        }
    }

    fn admit(&mut self, stream: TcpStream, address: SocketAddr) {
        let connected = self.clients.len() - self.free.len();
        if connected >= self.service.limits.connections {
            tracing::warn!(%address, connected, "the store's server refused a client: no more are taken");
            return;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.clients.push(None);
            self.clients.len() - 1
        });
        let stream = Fd::new(stream);
        let prepared = stream.set_nonblocking(true).and_then(|()| {
            // Without these it is slower, or stays longer when it is dead.
            let _ = stream.set_nodelay(true);
            keep_alive(&stream);
            epoll::add(&self.epoll, &stream, EventData::new_u64(slot as u64), EventFlags::IN)?;
            Ok(())
        });
        if let Err(error) = prepared {
            tracing::warn!(%address, %error, "the store's server could not take a client");
            self.free.push(slot);
            return;
        }
        let since = Instant::now();
        self.sweep_at.get_or_insert(since + INTRODUCTION);
        let session = Session::new(slot as u32);
        self.clients[slot] =
            Some(Client { stream, address, session, interest: EventFlags::IN, since, held: 0 });
    }

    /// Reads what a client sent, if it did, and answers.
    fn serve(&mut self, slot: usize, flags: EventFlags) {
        let Some(client) = self.clients.get_mut(slot).and_then(Option::as_mut) else { return };
        let fed = if client.interest.contains(EventFlags::IN) {
            match (&*client.stream).read(&mut self.scratch) {
                Ok(0) => return self.close(slot, None),
                Ok(len) => client.session.feed(&self.scratch[..len], &mut self.service),
                Err(error) if is_transient(&error) => Ok(()),
                Err(error) => return self.close_by(slot, &error),
            }
        } else if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
            return self.close(slot, None);
        } else {
            Ok(())
        };
        match fed {
            Ok(()) => self.flush(slot),
            Err(why) => self.close(slot, Some(&why)),
        }
        self.deliver();
    }

    /// Hands answers to the sessions whose waits they end. That can make room for requests which end further waits.
    fn deliver(&mut self) {
        while !self.service.released.is_empty() {
            let mut released = std::mem::take(&mut self.service.released);
            for (token, answer) in released.drain(..) {
                let slot = slot_of(token);
                let Some(client) = self.clients.get_mut(slot).and_then(Option::as_mut) else { continue };
                match client.session.release(token, answer) {
                    Ok(()) => self.flush(slot),
                    Err(why) => self.close(slot, Some(&why)),
                }
            }
            if self.service.released.is_empty() {
                // Keeps its memory for the next time.
                self.service.released = released;
            }
        }
    }

    /// Sends what is there to send, and takes up requests that waited for that.
    fn flush(&mut self, slot: usize) {
        let Some(client) = self.clients.get_mut(slot).and_then(Option::as_mut) else { return };
        loop {
            while !client.session.unsent().is_empty() {
                match (&*client.stream).write(client.session.unsent()) {
                    Ok(len) => client.session.sent(len),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return self.close_by(slot, &error),
                }
            }
            if client.session.is_congested() || !client.session.has_backlog() {
                break;
            }
            if let Err(why) = client.session.feed(&[], &mut self.service) {
                return self.close(slot, Some(&why));
            }
        }
        self.settle(slot);
    }

    /// Brings the events a client is watched for, and the sum of held bytes, up to date.
    fn settle(&mut self, slot: usize) {
        let Some(client) = self.clients.get_mut(slot).and_then(Option::as_mut) else { return };
        let held = client.session.held();
        if held != client.held {
            self.held = self.held - client.held + held;
            client.held = held;
            if self.held > self.service.limits.buffered && held > TURN {
                return self.close(
                    slot,
                    Some("the clients together send or leave unread more than is held for them"),
                );
            }
        }
        let mut interest = EventFlags::empty();
        interest.set(EventFlags::OUT, !client.session.unsent().is_empty());
        interest.set(EventFlags::IN, !client.session.is_congested());
        if interest != client.interest {
            client.interest = interest;
            if let Err(error) =
                epoll::modify(&self.epoll, &client.stream, EventData::new_u64(slot as u64), interest)
            {
                self.close_by(slot, &error.into());
            }
        }
    }

    fn close_by(&mut self, slot: usize, error: &io::Error) {
        self.close(slot, Some(&error.to_string()));
    }

    /// Forgets a client; `why` is said when it did not just leave.
    fn close(&mut self, slot: usize, why: Option<&str>) {
        let Some(mut client) = self.clients.get_mut(slot).and_then(Option::take) else { return };
        match why {
            Some(why) => tracing::warn!(client = %client.address, "the store closed a connection: {why}"),
            None => tracing::debug!(client = %client.address, "a client of the store left"),
        }
        client.session.close(&mut self.service);
        self.held -= client.held;
        self.free.push(slot);
    }
}

impl std::fmt::Debug for Loop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loop")
            .field("listener", &self.listener)
            .field("stop", &self.stop)
            .finish_non_exhaustive()
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Feeds bytes to two sessions of one service, in turns, and delivers what they release.
#[cfg(any(test, fuzzing))]
pub(super) fn fuzz_session(data: &[u8]) {
    let limits = Limits { request: 4096, bytes: 1 << 16, keys: 64, ..Limits::default() };
    let mut service = Service::new(limits);
    let mut sessions = [Some(Session::new(0)), Some(Session::new(1))];
    let mut greeting = Vec::new();
    super::wire::encode(&super::wire::Frame::Validate(super::wire::MAGIC), &mut greeting);
    for session in sessions.iter_mut().flatten() {
        assert!(session.feed(&greeting, &mut service).is_ok());
    }
    for (turn, piece) in data.chunks(23).enumerate() {
        let slot = turn % 2;
        let Some(session) = &mut sessions[slot] else { continue };
        if session.feed(piece, &mut service).is_err() {
            session.close(&mut service);
            sessions[slot] = None;
        }
        for (token, answer) in std::mem::take(&mut service.released) {
            if let Some(session) = &mut sessions[slot_of(token)] {
                let _ = session.release(token, answer);
            }
        }
        for session in sessions.iter_mut().flatten() {
            assert!(session.held() <= 4096 + (1 << 20) + (1 << 16) + data.len());
            let unsent = session.unsent().len();
            session.sent(unsent);
        }
    }
}
