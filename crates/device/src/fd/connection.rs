//! A private connection between two local processes.
//!
//! Before anything else travels, both sides check that the other runs as the same user and knows the group's
//! secret. Three messages, each with a version and of fixed size:
//!
//! ```text
//! caller                                              listener
//!   checks the listener's uid                           checks the caller's uid
//!   HELLO  group, identity, pid, nonce  + pidfd  ->
//!                                    <-  WELCOME  identity, pid, nonce, proof  + pidfd
//!   verifies the proof
//!   PROOF  proof                             ->
//!                                                       verifies the proof
//! ```
//!
//! A proof is a keyed hash over both identities and both nonces; the secret itself never travels. The pidfd is
//! one that the process opened on itself: it works in any PID namespace, and its death is judged by it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Fd;
use super::socket::{self, Address, Listener};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::secret::{Id, Secret, Side, random};

/// Who is at the other end.
#[derive(Debug)]
pub struct Peer {
    /// Its identity.
    pub identity: Id,
    /// Its pid as it sees itself; for people, not for decisions.
    pub pid: u32,
    /// Readable once its process has ended.
    pub pidfd: Fd,
}

/// An open private connection: whole messages in order, with descriptors beside them.
#[derive(Debug)]
pub struct Connection {
    socket: Fd,
    peer: Peer,
}

impl Connection {
    /// Who is at the other end.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Sends one message.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>], deadline: Deadline) -> Result<()> {
        socket::send(&self.socket, bytes, fds, deadline)
    }

    /// Receives one message. An empty one means that the other side closed the connection.
    pub fn recv(&self, deadline: Deadline) -> Result<(Vec<u8>, Vec<Fd>)> {
        socket::recv(&self.socket, deadline)
    }

    /// Receives one message if one is there.
    pub fn try_recv(&self) -> Result<Option<(Vec<u8>, Vec<Fd>)>> {
        socket::try_recv(&self.socket)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Connects to the process that listens at `address` and belongs to `group`.
pub fn connect(
    address: &Address,
    group: Id,
    identity: Id,
    secret: &Secret,
    deadline: Deadline,
) -> Result<Connection> {
    let socket = socket::connect_socket(address, deadline)?;
    socket::check_user(&socket)?;
    let hello = Hello { group, identity, pid: std::process::id(), nonce: random()? };
    let me = own_pidfd()?;
    socket::send(&socket, &hello.to_bytes(), &[me.as_fd()], deadline)?;

    let (bytes, fds) = socket::recv(&socket, deadline)?;
    let (welcome, proof) = parse_welcome(&bytes)?;
    if welcome.group != group {
        return Err(Error::refused("the other process answered for another group"));
    }
    let transcript = transcript(&hello, &welcome);
    if !secret.verify(Side::Listener, &transcript, &proof) {
        return Err(Error::refused("the process at the other end does not know the group's secret"));
    }
    let peer = Peer { identity: welcome.identity, pid: welcome.pid, pidfd: one_pidfd(fds)? };
    socket::send(&socket, &frame(PROOF, &[&secret.proof(Side::Caller, &transcript)]), &[], deadline)?;
    Ok(Connection { socket, peer })
}

/// A connection that somebody opened to us and that is not trusted yet. Call [`Handshake::step`] whenever it is
/// readable; it never blocks.
#[derive(Debug)]
pub struct Handshake {
    socket: Fd,
    asked: Option<Asked>,
}

#[derive(Debug)]
struct Asked {
    group: Id,
    secret: Secret,
    transcript: Vec<u8>,
    peer: Peer,
}

/// How far a handshake has come.
#[derive(Debug)]
pub enum HandshakeStep {
    /// More has to arrive.
    More(Handshake),
    /// The peer has proved that it belongs to the group.
    Done(Id, Connection),
}

impl Handshake {
    /// The next connection to `listener`, or nothing if none is there now.
    pub fn accept(listener: &Listener) -> Result<Option<Self>> {
        Ok(listener.accept()?.map(|socket| Self { socket, asked: None }))
    }

    /// Goes on with what has arrived. `secret_of` gives the secret of a group that this process belongs to.
    pub fn step(mut self, identity: Id, secret_of: &dyn Fn(Id) -> Option<Secret>) -> Result<HandshakeStep> {
        let socket = &self.socket;
        let Some((bytes, fds)) = socket::try_recv(socket)? else { return Ok(HandshakeStep::More(self)) };
        if bytes.is_empty() {
            return Err(Error::refused("the other process closed the connection during the handshake"));
        }
        match self.asked.take() {
            None => {
                socket::check_user(socket)?;
                let hello = Hello::parse(HELLO, &bytes)?;
                let secret = secret_of(hello.group)
                    .ok_or_else(|| Error::refused(format!("no group {} is open here", hello.group)))?;
                let peer = Peer { identity: hello.identity, pid: hello.pid, pidfd: one_pidfd(fds)? };
                let welcome =
                    Hello { group: hello.group, identity, pid: std::process::id(), nonce: random()? };
                let transcript = transcript(&hello, &welcome);
                let proof = secret.proof(Side::Listener, &transcript);
                let me = own_pidfd()?;
                // The socket's buffer is empty, so this does not wait.
                let now = Deadline::after(std::time::Duration::ZERO);
                socket::send(socket, &frame(WELCOME, &[&welcome.body(), &proof]), &[me.as_fd()], now)?;
                self.asked = Some(Asked { group: hello.group, secret, transcript, peer });
                Ok(HandshakeStep::More(self))
            }
            Some(asked) => {
                let proof = body::<32>(PROOF, &bytes)?;
                if !asked.secret.verify(Side::Caller, &asked.transcript, &proof) {
                    return Err(Error::refused(format!(
                        "process {} does not know the group's secret",
                        asked.peer.pid
                    )));
                }
                Ok(HandshakeStep::Done(asked.group, Connection { socket: self.socket, peer: asked.peer }))
            }
        }
    }
}

impl AsFd for Handshake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Whether the process behind a pidfd has ended.
pub(crate) fn has_ended(pidfd: &Fd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut polled = [PollFd::new(pidfd, PollFlags::IN)];
    pidfd.is_ours() && poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().contains(PollFlags::IN)
}

impl Peer {
    /// Whether its process has ended.
    pub fn has_ended(&self) -> bool {
        has_ended(&self.pidfd)
    }
}

/// A pidfd of this process.
pub(crate) fn own_pidfd() -> Result<Fd> {
    rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::NONBLOCK)
        .map(Fd::new)
        .map_err(|e| Error::io("opening a pidfd on this process (needs Linux 5.10)", e))
}

const MAGIC: [u8; 4] = *b"twfd";
const VERSION: u8 = 1;
const HELLO: u8 = 1;
const WELCOME: u8 = 2;
const PROOF: u8 = 3;
const HELLO_LEN: usize = 16 + 16 + 4 + 16;

#[derive(Debug)]
struct Hello {
    group: Id,
    identity: Id,
    pid: u32,
    nonce: [u8; 16],
}

impl Hello {
    fn body(&self) -> Vec<u8> {
        [&self.group.0[..], &self.identity.0, &self.pid.to_le_bytes(), &self.nonce].concat()
    }

    fn to_bytes(&self) -> Vec<u8> {
        frame(HELLO, &[&self.body()])
    }

    fn parse(kind: u8, bytes: &[u8]) -> Result<Self> {
        Ok(Self::from_body(&body::<HELLO_LEN>(kind, bytes)?))
    }

    fn from_body(body: &[u8; HELLO_LEN]) -> Self {
        let part = |from: usize| std::array::from_fn(|index| body[from + index]);
        Self {
            group: Id(part(0)),
            identity: Id(part(16)),
            pid: u32::from_le_bytes(std::array::from_fn(|index| body[32 + index])),
            nonce: part(36),
        }
    }
}

fn parse_welcome(bytes: &[u8]) -> Result<(Hello, [u8; 32])> {
    if bytes.is_empty() {
        return Err(Error::refused(
            "the other process closed the connection: it does not know this group, or refused this process",
        ));
    }
    let both = body::<{ HELLO_LEN + 32 }>(WELCOME, bytes)?;
    let hello = std::array::from_fn(|index| both[index]);
    Ok((Hello::from_body(&hello), std::array::from_fn(|index| both[HELLO_LEN + index])))
}

fn transcript(hello: &Hello, welcome: &Hello) -> Vec<u8> {
    [hello.body(), welcome.body()].concat()
}

fn frame(kind: u8, parts: &[&[u8]]) -> Vec<u8> {
    [&MAGIC[..], &[VERSION, kind], &parts.concat()].concat()
}

/// The body of a frame that must be of `kind` and have exactly `N` bytes.
fn body<const N: usize>(kind: u8, bytes: &[u8]) -> Result<[u8; N]> {
    let head = bytes.get(..6).ok_or_else(|| Error::refused("a frame of the handshake is cut short"))?;
    if head[..4] != MAGIC {
        return Err(Error::refused("the other process does not speak tensorwire's protocol"));
    }
    if head[4] != VERSION {
        let theirs = head[4];
        return Err(Error::refused(format!("the other process speaks version {theirs}, this one {VERSION}")));
    }
    match bytes[6..].try_into() {
        Ok(body) if head[5] == kind => Ok(body),
        _ => Err(Error::refused("a frame of the handshake has the wrong kind or length")),
    }
}

fn one_pidfd(mut fds: Vec<Fd>) -> Result<Fd> {
    match (fds.pop(), fds.is_empty()) {
        (Some(fd), true) if is_pidfd(&fd) => Ok(fd),
        _ => Err(Error::refused("a handshake must carry exactly one descriptor, a pidfd")),
    }
}

/// Another kind of descriptor would never tell of a death. Without /proc it cannot be checked.
fn is_pidfd(fd: &Fd) -> bool {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd()));
    info.map_or(true, |info| info.lines().any(|line| line.starts_with("Pid:")))
}
