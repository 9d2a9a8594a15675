//! A private connection between two local processes: the same user, the group's secret (see
//! [`crate::handshake`]), and a pidfd of each side, by which its death is judged.
//!
//! The pidfd travels beside the first frame of each side. It is one that the process opened on itself: it works
//! in any PID namespace. Where the kernel names the peer, the pidfd must be of that process.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Fd;
use super::socket::{self, Address, Listener};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::handshake::{Asked, Caller};
use crate::secret::{Id, Secret};

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

    /// The same, as long as that is sensible: once it is not, the deadline counts as passed.
    pub fn recv_while(&self, deadline: Deadline, sensible: &dyn Fn() -> bool) -> Result<(Vec<u8>, Vec<Fd>)> {
        recv_while(&self.socket, deadline, sensible)
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
    connect_while(address, group, identity, secret, deadline, &|| true)
}

/// The same, as long as that is sensible: once it is not, the deadline counts as passed.
pub fn connect_while(
    address: &Address,
    group: Id,
    identity: Id,
    secret: &Secret,
    deadline: Deadline,
    sensible: &dyn Fn() -> bool,
) -> Result<Connection> {
    let socket = loop {
        match socket::connect_socket(address, deadline.min(Deadline::after(SLICE))) {
            Err(Error::TimedOut) if !deadline.passed() && sensible() => {}
            other => break other?,
        }
    };
    socket::check_user(&socket)?;
    let caller = Caller::new(group, identity)?;
    let me = own_pidfd()?;
    socket::send(&socket, &caller.hello(), &[me.as_fd()], deadline)?;
    let (bytes, fds) = recv_while(&socket, deadline, sensible)?;
    let (peer, proof) = caller.prove(secret, &bytes)?;
    let peer = Peer { identity: peer.identity, pid: peer.pid, pidfd: one_pidfd(fds, &socket)? };
    socket::send(&socket, &proof, &[], deadline)?;
    Ok(Connection { socket, peer })
}

/// How often a wait asks whether it is still sensible.
const SLICE: Duration = Duration::from_millis(50);

fn recv_while(socket: &Fd, deadline: Deadline, sensible: &dyn Fn() -> bool) -> Result<(Vec<u8>, Vec<Fd>)> {
    loop {
        match socket::recv(socket, deadline.min(Deadline::after(SLICE))) {
            Err(Error::TimedOut) if !deadline.passed() && sensible() => {}
            other => return other,
        }
    }
}

/// A connection that somebody opened to us and that is not trusted yet. Call [`Handshake::step`] whenever it is
/// readable; it never blocks.
#[derive(Debug)]
pub struct Handshake {
    socket: Fd,
    asked: Option<(Asked, Fd)>,
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
    /// The next connection to `listener`, or nothing if none is there now. Other users do not come so far: anybody
    /// can connect to an abstract socket, and must not be able to keep a place that a neighbour needs.
    pub fn accept(listener: &Listener) -> Result<Option<Self>> {
        while let Some(socket) = listener.accept()? {
            match socket::check_user(&socket) {
                Ok(_) => return Ok(Some(Self { socket, asked: None })),
                Err(error) => tracing::warn!("a process tried to connect to {}: {error}", listener.address()),
            }
        }
        Ok(None)
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
                let pidfd = one_pidfd(fds, socket)?;
                let (asked, welcome) = Asked::answer(identity, secret_of, &bytes)?;
                let me = own_pidfd()?;
                // The socket's buffer is empty, so this does not wait.
                let now = Deadline::after(Duration::ZERO);
                socket::send(socket, &welcome, &[me.as_fd()], now)?;
                self.asked = Some((asked, pidfd));
                Ok(HandshakeStep::More(self))
            }
            Some((asked, pidfd)) => {
                let (group, peer) = asked.accept(&bytes)?;
                let peer = Peer { identity: peer.identity, pid: peer.pid, pidfd };
                Ok(HandshakeStep::Done(group, Connection { socket: self.socket, peer }))
            }
        }
    }
}

impl Handshake {
    pub(super) fn socket(&self) -> &Fd {
        &self.socket
    }

    pub(super) fn into_socket(self) -> Fd {
        self.socket
    }
}

impl AsFd for Handshake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Whether the process behind a pidfd has ended.
pub fn has_ended(pidfd: &Fd) -> bool {
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

fn one_pidfd(mut fds: Vec<Fd>, socket: &Fd) -> Result<Fd> {
    match (fds.pop(), fds.is_empty()) {
        (Some(fd), true) => {
            check_pidfd(&fd, socket::peer_pid(socket))?;
            Ok(fd)
        }
        _ => Err(Error::refused("a handshake must carry exactly one descriptor, a pidfd")),
    }
}

/// Refuses a descriptor that is not a pidfd, because it would never tell of a death; and a pidfd of another process than
/// `pid`, because it would tell of a death that is not the peer's. A `pid` of 0 is not known.
///
/// What cannot be told is accepted: without /proc, where /proc counts processes as another PID namespace does, and where
/// the process has no number here or has ended.
pub fn check_pidfd(fd: &Fd, pid: u32) -> Result<()> {
    let Ok(info) = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd())) else {
        return Ok(());
    };
    let Some(of) = info.lines().find_map(|line| line.strip_prefix("Pid:")) else {
        return Err(Error::refused("a descriptor that must be a pidfd is something else"));
    };
    // 0 in another namespace, -1 after its end.
    let of = of.trim().parse().unwrap_or(0);
    if pid == 0 || of <= 0 || of == i64::from(pid) || !proc_counts_as_we_do() {
        return Ok(());
    }
    Err(Error::refused(format!("process {pid} sent a pidfd of process {of}; it must be one of itself")))
}

/// Whether the numbers in /proc are those that this process sees.
fn proc_counts_as_we_do() -> bool {
    let me = std::process::id().to_string();
    std::fs::read_link("/proc/self").is_ok_and(|link| link.as_os_str() == me.as_str())
}
