//! How two processes of different hosts meet: one connects, and both prove that they know a secret. Where they agreed to seal
//! what they say, they exchange greetings then (see [`super::seal`]).

use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use tensorwire_device::Deadline;
use tensorwire_device::fd::{Received, Stream};
use tensorwire_device::handshake::{Asked, Caller, MAX_FRAME};
use tensorwire_device::secret::{Id, Secret, digest};

use super::Fault;
use super::line::TcpLine;
use super::seal::{Greeting, Seal};
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::Pace;

/// How long a stranger may take to prove that it belongs here.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a process says that has let another one in.
pub(crate) const IN: u8 = b'+';
/// The same, of one that takes bytes by UCX, too. What it offers follows.
pub(crate) const IN_WITH_UCX: u8 = b'u';

/// What two processes have in common, such as a group: its name and its secret, and the identity of this process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Domain {
    pub(crate) id: Id,
    pub(crate) identity: Id,
    pub(crate) secret: Secret,
    /// Whether what they say is sealed.
    pub(crate) sealed: bool,
}

/// Connects to a process at an address. Both prove that they know the secret.
pub(crate) fn reach(domain: &Domain, address: &SocketAddr, whom: Id, deadline: Deadline) -> Result<TcpLine> {
    // An address that swallows packets must not eat the whole deadline: there are others to try.
    let patience = deadline.min(Deadline::after(Duration::from_secs(3)));
    let socket = crate::store::connect_by(address, patience)?.map_err(|e| Error::io("connecting", e))?;
    socket.set_nonblocking(true).map_err(|e| Error::io("connecting", e))?;
    let caller = Caller::new(domain.id, domain.identity)?;
    let hello = caller.hello();
    send_whole(&socket, &hello, patience)?;
    let answer = await_whole(&socket, patience)?;
    let (claim, proof) = caller.prove(&domain.secret, &answer)?;
    if claim.identity != whom {
        return Err(Error::peer(PeerFaultKind::Misbehaved, address.to_string(), None, "is another process"));
    }
    send_whole(&socket, &proof, patience)?;
    let seal = match domain.sealed {
        false => None,
        true => {
            let (greeting, call) = Greeting::call(&domain.secret, &[&hello, &answer])?;
            send_whole(&socket, &call, patience)?;
            Some(greeting.finish(&await_whole(&socket, patience)?)?)
        }
    };
    Ok(TcpLine::new(Stream::new(socket)?, seal, session_of(&hello, &answer)))
}

/// A name for what two sides say from now on. Both have thrown a number into what they said first.
fn session_of(hello: &[u8], answer: &[u8]) -> Id {
    digest(&[hello, answer].concat())
}

/// Waits until the process at the other end has let this one in. Gives what it offers of UCX, too.
pub(crate) fn await_in(mut line: TcpLine, deadline: Deadline) -> Result<(TcpLine, Option<Vec<u8>>)> {
    let [answer] = await_bytes(&mut line, deadline)?;
    match answer {
        IN => return Ok((line, None)),
        IN_WITH_UCX => {}
        _ => return Err(not_let_in()),
    }
    let len = usize::from(u16::from_le_bytes(await_bytes(&mut line, deadline)?));
    let mut offer = vec![0; len];
    await_all(&mut line, &mut offer, deadline)?;
    Ok((line, Some(offer)))
}

fn not_let_in() -> Error {
    Error::peer(PeerFaultKind::Refused, "the other host", None, "did not let this process in")
}

fn await_bytes<const N: usize>(line: &mut TcpLine, deadline: Deadline) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    await_all(line, &mut bytes, deadline)?;
    Ok(bytes)
}

/// Waits until all of these bytes have come.
fn await_all(line: &mut TcpLine, mut bytes: &mut [u8], deadline: Deadline) -> Result<()> {
    while !bytes.is_empty() {
        match line.recv_bytes(bytes) {
            Ok(Received::Bytes(count)) => bytes = &mut bytes[count..],
            Ok(Received::Nothing) => await_ready(&**line.stream(), PollFlags::IN, deadline)?,
            Err(Fault::Ours(error)) => return Err(error),
            _ => return Err(not_let_in()),
        }
    }
    Ok(())
}

/// A connection from another host that has not proved anything yet.
#[derive(Debug)]
pub(crate) struct Stranger {
    socket: TcpStream,
    progress: Progress,
    since: Instant,
}

/// How far a stranger has come.
#[derive(Debug)]
enum Progress {
    Connected,
    /// It has been answered. What both have said.
    Asked(Asked, [Vec<u8>; 2]),
    /// It belongs here, and is to greet: domain, identity, and what both have said.
    Proved(Id, Id, [Vec<u8>; 2]),
    Met(Option<Seal>, Id),
}

impl Stranger {
    /// One that has just connected.
    pub(crate) fn new(socket: TcpStream) -> Option<Self> {
        socket.set_nonblocking(true).ok()?;
        Some(Self { socket, progress: Progress::Connected, since: Instant::now() })
    }

    pub(crate) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// The connection, of one that has proved who it is.
    pub(crate) fn into_line(self) -> Result<TcpLine> {
        let (seal, session) = match self.progress {
            Progress::Met(seal, session) => (seal, session),
            _ => return Err(Error::Bug("a stranger was let in".into())),
        };
        Ok(TcpLine::new(Stream::new(self.socket)?, seal, session))
    }

    /// Whether it has had time enough.
    pub(crate) fn is_late(&self) -> bool {
        self.since.elapsed() > PATIENCE
    }

    /// Goes on with all that has arrived; gives what it belongs to and who it is at the end. `terms_of` gives the secret of a
    /// domain, and whether what is said there is sealed. Frames of the handshake have fixed lengths and fit one segment, but may
    /// arrive in pieces: each is taken only when it is whole.
    pub(crate) fn step(
        &mut self,
        identity: Id,
        terms_of: &dyn Fn(Id) -> Option<(Secret, bool)>,
    ) -> Result<Option<(Id, Id)>> {
        while let Some(bytes) = take_whole(&self.socket)? {
            let soon = Deadline::after(Duration::from_secs(1));
            match std::mem::replace(&mut self.progress, Progress::Connected) {
                Progress::Connected => {
                    let secret_of = |domain| terms_of(domain).map(|(secret, _)| secret);
                    let (asked, answer) = Asked::answer(identity, &secret_of, &bytes)?;
                    send_whole(&self.socket, &answer, soon)?;
                    self.progress = Progress::Asked(asked, [bytes, answer]);
                }
                Progress::Asked(asked, said) => {
                    let (domain, claim) = asked.accept(&bytes)?;
                    if !terms_of(domain).ok_or_else(closed)?.1 {
                        self.progress = Progress::Met(None, session_of(&said[0], &said[1]));
                        return Ok(Some((domain, claim.identity)));
                    }
                    self.progress = Progress::Proved(domain, claim.identity, said);
                }
                Progress::Proved(domain, who, [hello, answer]) => {
                    let (secret, _) = terms_of(domain).ok_or_else(closed)?;
                    let (seal, greeting) = Greeting::answer(&secret, &[&hello, &answer], &bytes)?;
                    send_whole(&self.socket, &greeting, soon)?;
                    self.progress = Progress::Met(Some(seal), session_of(&hello, &answer));
                    return Ok(Some((domain, who)));
                }
                Progress::Met(..) => return Err(Error::Bug("a stranger is asked who it is again".into())),
            }
        }
        Ok(None)
    }
}

fn closed() -> Error {
    Error::Aborted("the group was closed on this rank".into())
}

/// A whole frame of the handshake with its length before it, or nothing yet.
fn take_whole(socket: &TcpStream) -> Result<Option<Vec<u8>>> {
    let closed = || Error::peer(PeerFaultKind::Refused, "the other host", None, "closed the connection");
    let mut head = [0; 2];
    let peeked = match socket.peek(&mut head) {
        Ok(0) => return Err(closed()),
        Ok(count) => count,
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(None),
        Err(error) => return Err(Error::io("receiving from another host", error)),
    };
    let len = usize::from(u16::from_le_bytes(head));
    if peeked == 2 && (len == 0 || len > MAX_FRAME) {
        return Err(Error::peer(PeerFaultKind::Misbehaved, "the other host", None, "sent a wrong length"));
    }
    let mut bytes = vec![0; 2 + len];
    match socket.peek(&mut bytes) {
        Ok(count) if peeked == 2 && count == 2 + len => {
            std::io::Read::read_exact(&mut &*socket, &mut bytes).map_err(|e| Error::io("receiving", e))?;
            Ok(Some(bytes.split_off(2)))
        }
        _ => Ok(None),
    }
}

fn send_whole(socket: &TcpStream, bytes: &[u8], deadline: Deadline) -> Result<()> {
    let mut rest = &[&(bytes.len() as u16).to_le_bytes(), bytes].concat()[..];
    while !rest.is_empty() {
        match rustix::net::send(socket, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(count) => rest = &rest[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => await_ready(socket, PollFlags::OUT, deadline)?,
            Err(error) => return Err(Error::io("sending to another host", error)),
        }
    }
    Ok(())
}

/// Waits for a whole frame.
fn await_whole(socket: &TcpStream, deadline: Deadline) -> Result<Vec<u8>> {
    loop {
        if let Some(bytes) = take_whole(socket)? {
            return Ok(bytes);
        }
        await_ready(socket, PollFlags::IN, deadline)?;
        // A frame that has arrived in part stays readable: do not spin.
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn await_ready(socket: &impl AsFd, flags: PollFlags, deadline: Deadline) -> Result<()> {
    let started = Instant::now();
    let timed_out = || Error::timed_out("talking to another host", started.elapsed(), "it does not answer");
    let mut pace = Pace::new();
    loop {
        deadline.remaining().ok_or_else(timed_out)?;
        let left = pace.until(deadline).remaining().unwrap_or_default();
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(socket, flags)], Some(&left)) {
            Ok(0) => pace.look(Instant::now())?,
            Ok(_) | Err(Errno::INTR) => return Ok(()),
            Err(error) => return Err(Error::io("waiting for another host", error)),
        }
    }
}
