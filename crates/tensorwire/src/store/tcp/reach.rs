//! Connects to a server. It tries again and again until a server answers or the deadline has passed.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tensorwire_device::Deadline;

use super::connection::Connection;
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::{self, Pace, is_interrupt};

/// The first pause between attempts, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// The shortest time-out that the system takes.
const LEAST: Duration = Duration::from_millis(1);
/// One attempt, so that an address which swallows packets does not use up the time of the others.
const ATTEMPT: Duration = Duration::from_secs(5);

/// What it means that nobody listens at the server's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It has not started yet.
    NotYet,
    /// It is gone for good.
    Final,
}

/// A connection to a server that has answered.
pub(super) fn connect(host: &str, port: u16, deadline: Deadline, refusal: Refusal) -> Result<Connection> {
    let started = Instant::now();
    let who = format!("the store server at {host}:{port}");
    let mut pause = PAUSES.0;
    let mut reason = None;
    loop {
        match attempt(host, port, &who, deadline) {
            Ok(connection) => return Ok(connection),
            // Somebody answers, but not a store: trying again does not help.
            Err(error @ Error::Peer(_)) if !is_left(&error) => return Err(error),
            Err(error) if is_interrupt(&error) => return Err(error),
            Err(error) if refusal == Refusal::Final && is_refused(&error) => {
                let text = "nobody listens there any more";
                return Err(Error::peer(PeerFaultKind::Left, who, None, text));
            }
            // That it was the deadline which ended this attempt says less than how the one before ended.
            Err(Error::TimedOut { .. }) => {}
            Err(error) if reason.is_none() || !deadline.passed() => reason = Some(error.to_string()),
            Err(_) => {}
        }
        let Some(left) = deadline.remaining() else {
            let reason = reason.unwrap_or_else(|| "it does not answer".into());
            return Err(Error::timed_out(format!("connecting to {who}"), started.elapsed(), reason));
        };
        tracing::debug!(reason, "connecting to the store again");
        interrupt::sleep(jittered(pause).min(left))?;
        pause = (pause * 3 / 2).min(PAUSES.1);
    }
}

fn attempt(host: &str, port: u16, who: &str, deadline: Deadline) -> Result<Connection> {
    let addresses = resolve(host, port, deadline)?
        .map_err(|e| Error::io(format!("looking up the address of {host}"), e))?;
    let mut failure = Error::timed_out("", Duration::ZERO, "");
    for address in addresses {
        let Some(left) = deadline.remaining() else { break };
        match connect_by(&address, Deadline::after(left.min(ATTEMPT)))? {
            Ok(stream) => return Connection::introduce(stream, who.to_owned(), deadline),
            Err(error) => {
                // A name has been looked up; an address is in `who` already.
                let named = who.ends_with(&address.to_string());
                let what = if named { "no connection".into() } else { format!("no connection to {address}") };
                failure = Error::io(what, error);
            }
        }
    }
    Err(failure)
}

/// A connection to an address by a deadline. The outer error is the caller's hook's.
pub(crate) fn connect_by(address: &SocketAddr, deadline: Deadline) -> Result<io::Result<TcpStream>> {
    if !interrupt::is_looked_for() {
        return Ok(TcpStream::connect_timeout(address, deadline.remaining().unwrap_or_default().max(LEAST)));
    }
    let begun = || {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, address) {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
            Err(error) => Err(io::Error::from(error)),
        }
    };
    let socket = match begun() {
        Ok(socket) => socket,
        Err(error) => return Ok(Err(error)),
    };
    let mut pace = Pace::new();
    loop {
        let left = pace.until(deadline).remaining().unwrap_or_default();
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let ready = poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&left)).unwrap_or(0);
        if ready > 0 {
            break;
        }
        if deadline.passed() {
            return Ok(Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time")));
        }
        pace.look(Instant::now())?;
    }
    let made = rustix::net::sockopt::socket_error(&socket).and_then(|made| made);
    let stream = TcpStream::from(socket);
    Ok(made.map_err(io::Error::from).and_then(|()| stream.set_nonblocking(false)).map(|()| stream))
}

/// The addresses of a host. The system's look-up knows no deadline, so a name is looked up by a thread that may be left behind.
/// The outer error is the caller's hook's.
pub(crate) fn resolve(host: &str, port: u16, deadline: Deadline) -> Result<io::Result<Vec<SocketAddr>>> {
    if let Ok(address) = host.trim_matches(['[', ']']).parse() {
        return Ok(Ok(vec![SocketAddr::new(address, port)]));
    }
    let (sender, receiver) = mpsc::channel();
    let name = host.to_owned();
    let started = std::thread::Builder::new().name("tensorwire-lookup".into()).spawn(move || {
        let found = (name.as_str(), port).to_socket_addrs().map(Iterator::collect);
        // Nobody may be waiting any more.
        let _ = sender.send(found);
    });
    if let Err(error) = started {
        return Ok(Err(error));
    }
    let mut pace = Pace::new();
    loop {
        match receiver.recv_timeout(pace.until(deadline).remaining().unwrap_or_default()) {
            Ok(found) => return Ok(found),
            Err(error) if error == RecvTimeoutError::Disconnected || deadline.passed() => {
                return Ok(Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time")));
            }
            Err(_) => pace.look(Instant::now())?,
        }
    }
}

fn is_refused(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.kind() == io::ErrorKind::ConnectionRefused)
}

fn is_left(error: &Error) -> bool {
    matches!(error, Error::Peer(fault) if fault.kind == PeerFaultKind::Left)
}

/// Between half and one and a half of it, so that a thousand clients do not come back at once.
fn jittered(pause: Duration) -> Duration {
    let random = RandomState::new().hash_one(0) % 1024;
    pause / 2 + pause * random as u32 / 1024
}
