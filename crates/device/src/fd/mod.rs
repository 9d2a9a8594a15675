//! Descriptors: owned ones that forked children do not keep, and private connections that carry them.

mod connection;
mod socket;

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub use connection::{Connection, Handshake, HandshakeStep, Peer, connect};
pub use socket::{Address, Listener, MAX_FDS, MAX_MESSAGE};

use crate::error::{Error, Result};
use crate::fork;

/// A descriptor of ours: closed when dropped, and closed in every forked child (see [`crate::fork`]).
///
/// `T` may be any owner of a descriptor, such as a `TcpStream`.
pub struct Fd<T: AsFd = OwnedFd>(ManuallyDrop<T>);

impl<T: AsFd> Fd<T> {
    /// Takes charge of a descriptor.
    pub fn new(owner: T) -> Self {
        fork::register(&owner);
        Self(ManuallyDrop::new(owner))
    }
}

impl Fd {
    /// A second descriptor of the same file.
    pub fn try_clone(&self) -> Result<Self> {
        dup(self.as_fd())
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
        &self.0
    }
}

impl<T: AsFd> AsFd for Fd<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl<T: AsFd> fmt::Debug for Fd<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0.as_fd(), f)
    }
}

impl<T: AsFd> Drop for Fd<T> {
    fn drop(&mut self) {
        // In a forked child the number is closed already and may belong to somebody else.
        if !fork::in_child() {
            fork::unregister(&*self.0);
            // SAFETY: the value is not touched again; this is its only drop.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}
