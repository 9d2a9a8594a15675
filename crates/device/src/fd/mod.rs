//! Descriptors: owned ones that forked children do not keep, and private connections that carry them.

mod connection;
mod end;
mod inquiry;
mod socket;
#[cfg(not(loom))]
mod stream;

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub use connection::{
    Connection, Handshake, HandshakeStep, Peer, check_pidfd, connect, connect_while, has_ended,
};
pub use end::{End, end_of};
pub use inquiry::{Inquiry, listeners};
pub use socket::{Address, Listener, MAX_FDS, MAX_MESSAGE};
#[cfg(not(loom))]
pub use stream::{Received, Stream};

use crate::error::{Error, Result};
use crate::fork::{self, Birth};

/// A descriptor of ours: closed when dropped, and closed in every forked child (see [`crate::fork`]).
///
/// `T` may be any owner of a descriptor, such as a `TcpStream`.
pub struct Fd<T: AsFd = OwnedFd> {
    owner: ManuallyDrop<T>,
    birth: Birth,
}

impl<T: AsFd> Fd<T> {
    /// Takes charge of a descriptor.
    pub fn new(owner: T) -> Self {
        fork::register(&owner);
        Self { owner: ManuallyDrop::new(owner), birth: Birth::now() }
    }

    /// Whether this process opened it. In a forked child the number may mean another file.
    pub fn is_ours(&self) -> bool {
        self.birth.is_ours()
    }

    /// Refuses to go on with a descriptor of the parent, naming what it is for.
    pub fn check(&self, what: &'static str) -> Result<()> {
        self.birth.check(what)
    }
}

impl Fd {
    /// A second descriptor of the same file.
    pub fn try_clone(&self) -> Result<Self> {
        self.check("a descriptor")?;
        dup(self.as_fd())
    }

    /// The descriptor as the standard library has it, for a caller that looks after it from now on. It is still closed by
    /// `exec`; a forked child keeps it.
    pub fn into_owned(self) -> Result<OwnedFd> {
        self.check("a descriptor")?;
        fork::unregister(&*self.owner);
        let mut given = ManuallyDrop::new(self);
        // SAFETY: the value is not touched again, because its holder is never dropped.
        Ok(unsafe { ManuallyDrop::take(&mut given.owner) })
    }
}

/// A descriptor of our own for a file that somebody else has open.
pub fn dup(fd: BorrowedFd<'_>) -> Result<Fd> {
    let fd = rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(|e| Error::io("duplicating a descriptor", e))?;
    Ok(Fd::new(fd))
}

impl<T: AsFd> Deref for Fd<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.owner
    }
}

impl<T: AsFd> AsFd for Fd<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.owner.as_fd()
    }
}

impl<T: AsFd> fmt::Debug for Fd<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.owner.as_fd(), f)
    }
}

impl<T: AsFd> Drop for Fd<T> {
    fn drop(&mut self) {
        // In a forked child the number is closed already and may belong to somebody else.
        if self.is_ours() {
            fork::unregister(&*self.owner);
            // SAFETY: the value is not touched again; this is its only drop.
            unsafe { ManuallyDrop::drop(&mut self.owner) };
        }
    }
}
