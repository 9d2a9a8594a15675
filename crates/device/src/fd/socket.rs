//! Sockets between processes of one host: whole messages with descriptors beside them, and who is at the other
//! end.

use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::Fd;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::secret::Id;

/// The longest message.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// The most descriptors beside one message; Linux allows 253.
pub const MAX_FDS: usize = 250;

/// How the names of our sockets begin.
const NAME: &str = "tensorwire-";

/// The same for one that is not ready yet.
const UNREADY: &str = "tensorwire.";

/// How long a socket may be unready before it counts as left behind.
const UNREADY_FOR: Duration = Duration::from_secs(60);

/// Where a process listens for its neighbours.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// A name that vanishes with its process; seen in one network namespace only.
    Abstract(String),
    /// A file, where a socket directory is configured.
    Path(PathBuf),
}

impl Address {
    fn to_socket(&self) -> Result<SocketAddrUnix> {
        match self {
            Self::Abstract(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()),
            Self::Path(path) => SocketAddrUnix::new(path.as_path()),
        }
        .map_err(|e| Error::io(format!("using {self} as a socket's address"), e))
    }

    /// As bytes for a frame.
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Abstract(name) => [b"@", name.as_bytes()].concat(),
            Self::Path(path) => path.as_os_str().as_bytes().to_vec(),
        }
    }

    /// From a frame.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        match bytes.split_first() {
            Some((b'@', name)) => {
                let name =
                    std::str::from_utf8(name).map_err(|_| Error::refused("a socket's name is not text"))?;
                Ok(Self::Abstract(name.into()))
            }
            Some((b'/', _)) => Ok(Self::Path(std::ffi::OsString::from_vec(bytes.to_vec()).into())),
            _ => Err(Error::refused("a socket's address is neither a name nor a path")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Abstract(name) => write!(f, "@{name}"),
            Self::Path(path) => write!(f, "{}", path.display()),
        }
    }
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::from_bytes(text.as_bytes())
    }
}

/// A socket that neighbours connect to.
#[derive(Debug)]
pub struct Listener {
    socket: Fd,
    address: Address,
}

impl Listener {
    /// Listens under a random abstract name, or in `dir` under a random file name.
    pub fn bind(dir: Option<&Path>) -> Result<Self> {
        let id = Id::random()?;
        let Some(dir) = dir else { return Self::listen(Address::Abstract(format!("{NAME}{id}"))) };
        // A path for others, whose working directory is another one.
        let dir = std::path::absolute(dir)
            .map_err(|e| Error::io(format!("using the socket directory {}", dir.display()), e))?;
        sweep(&dir);
        // A file that is just being bound looks like one whose process was killed; it gets the name that others
        // sweep only when it is ready.
        let mut listener = Self::listen(Address::Path(dir.join(format!("{UNREADY}{id}"))))?;
        let path = dir.join(format!("{NAME}{id}"));
        std::fs::rename(dir.join(format!("{UNREADY}{id}")), &path)
            .map_err(|e| Error::io(format!("naming the private socket {}", path.display()), e))?;
        listener.address = Address::Path(path);
        Ok(listener)
    }

    fn listen(address: Address) -> Result<Self> {
        let socket = unix_socket()?;
        let place = address.to_socket()?;
        rustix::net::bind(&socket, &place)
            .map_err(|e| Error::io(format!("binding the private socket {address}"), e))?;
        // From here on its drop removes the file.
        let listener = Self { socket, address };
        rustix::net::listen(&listener.socket, 1024)
            .map_err(|e| Error::io(format!("listening on the private socket {}", listener.address), e))?;
        Ok(listener)
    }

    /// Where others connect to.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The next connection, or nothing if none is there now.
    pub(super) fn accept(&self) -> Result<Option<Fd>> {
        self.socket.check("a private socket")?;
        loop {
            match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => return Ok(Some(Fd::new(socket))),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => return Err(Error::io(format!("accepting on {}", self.address), error)),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Address::Path(path) = &self.address
            && self.socket.is_ours()
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Connects to a listener.
pub(super) fn connect_socket(address: &Address, deadline: Deadline) -> Result<Fd> {
    let socket = unix_socket()?;
    let place = address.to_socket()?;
    loop {
        match rustix::net::connect(&socket, &place) {
            Ok(()) => return Ok(socket),
            Err(Errno::INTR) => {}
            // The listener's backlog is full; a Unix socket cannot be polled for room in it.
            Err(Errno::AGAIN) if !deadline.passed() => std::thread::sleep(Duration::from_millis(1)),
            Err(Errno::AGAIN) => return Err(Error::TimedOut),
            Err(error @ (Errno::CONNREFUSED | Errno::NOENT)) => {
                let hint = match address {
                    Address::Abstract(_) => {
                        "its process has ended, or is in another network namespace: then set TENSORWIRE_SOCKET_DIR to a directory that both see"
                    }
                    Address::Path(_) => "its process has ended, or does not share this directory",
                };
                return Err(Error::io(format!("connecting to the private socket {address} ({hint})"), error));
            }
            Err(error) => {
                return Err(Error::io(format!("connecting to the private socket {address}"), error));
            }
        }
    }
}

/// Sends one message; waits for room until the deadline.
pub(super) fn send(socket: &Fd, bytes: &[u8], fds: &[BorrowedFd<'_>], deadline: Deadline) -> Result<()> {
    if bytes.is_empty() || bytes.len() > MAX_MESSAGE || fds.len() > MAX_FDS {
        return Err(Error::misuse(format!(
            "a message of {} bytes and {} descriptors",
            bytes.len(),
            fds.len()
        )));
    }
    socket.check("a private connection")?;
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    loop {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Error::misuse(format!("{} descriptors do not fit beside one message", fds.len())));
        }
        match rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => await_ready(socket, PollFlags::OUT, deadline)?,
            Err(error) => return Err(Error::io("sending to a local process", error)),
        }
    }
}

/// Receives one message, or `None` if none is there now. An empty message means that the other side closed.
pub(super) fn try_recv(socket: &Fd) -> Result<Option<(Vec<u8>, Vec<Fd>)>> {
    socket.check("a private connection")?;
    let mut bytes = vec![0; MAX_MESSAGE];
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = loop {
        let mut into = [IoSliceMut::new(&mut bytes)];
        match rustix::net::recvmsg(socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(message) => break message,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            // A peer that died with our bytes unread; for us that is the same as closing.
            Err(Errno::CONNRESET) => return Ok(Some((Vec::new(), Vec::new()))),
            Err(error) => return Err(Error::io("receiving from a local process", error)),
        }
    };
    let fds: Vec<Fd> = control
        .drain()
        .flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.map(Fd::new).collect(),
            _ => Vec::new(),
        })
        .collect();
    if message.flags.contains(ReturnFlags::TRUNC) {
        return Err(Error::refused("a message from a local process is longer than agreed"));
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(match fds.len() {
            MAX_FDS => Error::refused("a message from a local process has more descriptors than agreed"),
            _ => Error::io("receiving descriptors from a local process", Errno::MFILE),
        });
    }
    bytes.truncate(message.bytes);
    Ok(Some((bytes, fds)))
}

/// Receives one message; waits until the deadline.
pub(super) fn recv(socket: &Fd, deadline: Deadline) -> Result<(Vec<u8>, Vec<Fd>)> {
    loop {
        if let Some(message) = try_recv(socket)? {
            return Ok(message);
        }
        await_ready(socket, PollFlags::IN, deadline)?;
    }
}

/// Refuses a peer of another user, or of one that cannot be told from others.
///
/// In a user namespace every user without a mapping reads as the overflow uid, so equality says nothing there.
pub(super) fn check_user(socket: &Fd) -> Result<u32> {
    let peer =
        peer_uid(socket).map_err(|e| Error::io("asking who is at the other end of a private socket", e))?;
    let ours = rustix::process::geteuid().as_raw();
    if peer != ours {
        return Err(Error::refused(format!(
            "the process at the other end runs as uid {peer}, this one as uid {ours}; they must be the same user"
        )));
    }
    if peer == overflow_uid() {
        return Err(Error::refused(format!(
            "uid {peer} stands for every user without a mapping in this user namespace; map the user"
        )));
    }
    Ok(peer)
}

/// The uid of the process at the other end.
fn peer_uid(socket: &Fd) -> std::io::Result<u32> {
    Ok(peer(socket)?.uid)
}

/// The pid of the process at the other end, as this one sees it; 0 where that cannot be told.
pub(super) fn peer_pid(socket: &Fd) -> u32 {
    peer(socket).map_or(0, |peer| peer.pid.try_into().unwrap_or(0))
}

/// Who is at the other end. rustix has this call too, but it fails where the peer is in another PID namespace and its
/// pid reads 0.
fn peer(socket: &Fd) -> std::io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `peer`, which is made of integers, and then the count to `len`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    match result {
        0 if len as usize == size_of::<libc::ucred>() => Ok(peer),
        0 => Err(std::io::ErrorKind::InvalidData.into()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// The uid that stands for users without a mapping.
pub(super) fn overflow_uid() -> u32 {
    let text = std::fs::read_to_string("/proc/sys/kernel/overflowuid");
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(65534)
}

fn unix_socket() -> Result<Fd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map(Fd::new)
        .map_err(|e| Error::io("making a Unix socket", e))
}

fn await_ready(socket: &Fd, flags: PollFlags, deadline: Deadline) -> Result<()> {
    let left = deadline.remaining().ok_or(Error::TimedOut)?;
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    match poll(&mut [PollFd::new(socket, flags)], Some(&left)) {
        Ok(0) => Err(Error::TimedOut),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(Error::io("waiting for a private socket", error)),
    }
}

/// One of our listeners in a line of /proc/net/unix: address, count, protocol, flags, type, state, inode, path.
/// Listeners have the flag 10000; connections that they accepted bear the same name.
pub(super) fn listed(line: &str) -> Option<Address> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let name = fields.get(7)?.strip_prefix('@').filter(|name| name.starts_with(NAME))?;
    let listens = u32::from_str_radix(fields.get(3)?, 16).is_ok_and(|flags| flags & 0x10000 != 0);
    listens.then(|| Address::Abstract(name.into()))
}

/// The socket of one of our listeners among the files of a folder.
pub(super) fn found_in_dir(path: PathBuf) -> Option<Address> {
    let ours = path.file_name()?.as_bytes().starts_with(NAME.as_bytes());
    let is_socket = std::fs::symlink_metadata(&path).is_ok_and(|data| data.file_type().is_socket());
    (ours && is_socket).then_some(Address::Path(path))
}

/// Removes socket files in `dir` that belong to no socket any more: their processes were killed. Touches nothing
/// else: a plain file refuses a connection, too.
fn sweep(dir: &Path) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let unready = name.as_bytes().starts_with(UNREADY.as_bytes());
        let ours = unready || name.as_bytes().starts_with(NAME.as_bytes());
        if !ours || !entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            continue;
        }
        let age = entry.metadata().and_then(|data| data.modified()).map(|then| then.elapsed());
        if unready && !matches!(age, Ok(Ok(age)) if age > UNREADY_FOR) {
            continue;
        }
        // A live listener refuses a socket of another type (EPROTOTYPE) and does not even notice.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None) else {
            return;
        };
        let Ok(place) = Address::Path(entry.path()).to_socket() else { continue };
        if rustix::net::connect(&socket, &place) == Err(Errno::CONNREFUSED) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_told_from_connections_and_others() {
        let listens = "0000000000000000: 00000002 00000000 00010000 0005 01 5403 @tensorwire-00ff";
        assert_eq!(listed(listens), Some(Address::Abstract("tensorwire-00ff".into())));
        for line in [
            "Num       RefCount Protocol Flags    Type St Inode Path",
            "0000000000000000: 00000003 00000000 00000000 0005 03 5404 @tensorwire-00ff",
            "0000000000000000: 00000002 00000000 00010000 0005 01 5405 /run/tensorwire-00ff",
            "0000000000000000: 00000002 00000000 00010000 0001 01 5406 @/tmp/.X11-unix/X0",
            "0000000000000000: 00000002 00000000 0001000g 0005 01 5407 @tensorwire-00ff",
            "0000000000000000: 00000003 00000000 00000000 0001 03 5408",
            "",
        ] {
            assert_eq!(listed(line), None, "{line}");
        }
    }
}
