//! How two processes of different hosts meet: one connects, and both prove that they know a secret.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use tensorwire_device::Deadline;
use tensorwire_device::handshake::{Asked, Caller, MAX_FRAME};
use tensorwire_device::secret::{Id, Secret};

use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::Pace;

/// How long a stranger may take to prove that it belongs here.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a process says that has let another one in.
pub(crate) const IN: u8 = b'+';

/// What two processes have in common, such as a group: its name and its secret, and the identity of this process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Domain {
    pub(crate) id: Id,
    pub(crate) identity: Id,
    pub(crate) secret: Secret,
}

/// Connects to a process at an address. Both prove that they know the secret.
pub(crate) fn reach(
    domain: &Domain,
    address: &SocketAddr,
    whom: Id,
    deadline: Deadline,
) -> Result<TcpStream> {
    // An address that swallows packets must not eat the whole deadline: there are others to try.
    let patience = deadline.min(Deadline::after(Duration::from_secs(3)));
    let socket = crate::store::connect_by(address, patience)?.map_err(|e| Error::io("connecting", e))?;
    socket.set_nonblocking(true).map_err(|e| Error::io("connecting", e))?;
    let caller = Caller::new(domain.id, domain.identity)?;
    send_whole(&socket, &caller.hello(), patience)?;
    let answer = loop {
        if let Some(bytes) = take_whole(&socket)? {
            break bytes;
        }
        await_readable(&socket, patience)?;
    };
    let (claim, proof) = caller.prove(&domain.secret, &answer)?;
    if claim.identity != whom {
        return Err(Error::peer(PeerFaultKind::Misbehaved, address.to_string(), None, "is another process"));
    }
    send_whole(&socket, &proof, patience)?;
    Ok(socket)
}

/// Waits until the process at the other end has let this one in.
pub(crate) fn await_in(socket: TcpStream, deadline: Deadline) -> Result<TcpStream> {
    let mut answer = [0];
    let read = loop {
        await_ready(&socket, PollFlags::IN, deadline)?;
        match std::io::Read::read(&mut &socket, &mut answer) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            read => break read,
        }
    };
    match read {
        Ok(1) if answer == [IN] => Ok(socket),
        _ => Err(Error::peer(PeerFaultKind::Refused, "the other host", None, "did not let this process in")),
    }
}

/// A connection from another host that has not proved anything yet.
#[derive(Debug)]
pub(crate) struct Stranger {
    socket: TcpStream,
    asked: Option<Asked>,
    since: Instant,
}

impl Stranger {
    /// One that has just connected.
    pub(crate) fn new(socket: TcpStream) -> Option<Self> {
        socket.set_nonblocking(true).ok()?;
        Some(Self { socket, asked: None, since: Instant::now() })
    }

    pub(crate) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// The socket, of one that has proved who it is.
    pub(crate) fn into_socket(self) -> TcpStream {
        self.socket
    }

    /// Whether it has had time enough.
    pub(crate) fn is_late(&self) -> bool {
        self.since.elapsed() > PATIENCE
    }

    /// Goes on with what has arrived; gives what it belongs to and who it is at the end. Frames of the handshake have fixed lengths and
    /// fit one segment, but may arrive in pieces: each is taken only when it is whole.
    pub(crate) fn step(
        &mut self,
        identity: Id,
        secret_of: &dyn Fn(Id) -> Option<Secret>,
    ) -> Result<Option<(Id, Id)>> {
        let Some(bytes) = take_whole(&self.socket)? else { return Ok(None) };
        match self.asked.take() {
            None => {
                let (asked, answer) = Asked::answer(identity, secret_of, &bytes)?;
                send_whole(&self.socket, &answer, Deadline::after(Duration::from_secs(1)))?;
                self.asked = Some(asked);
                Ok(None)
            }
            Some(asked) => Ok(Some(asked.accept(&bytes).map(|(domain, claim)| (domain, claim.identity))?)),
        }
    }
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

fn await_readable(socket: &TcpStream, deadline: Deadline) -> Result<()> {
    await_ready(socket, PollFlags::IN, deadline)?;
    // A frame that has arrived in part stays readable: do not spin.
    std::thread::sleep(Duration::from_micros(200));
    Ok(())
}

fn await_ready(socket: &TcpStream, flags: PollFlags, deadline: Deadline) -> Result<()> {
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
