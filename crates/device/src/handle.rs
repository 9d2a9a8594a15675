//! What crosses to another process so that it can map a region.

use std::os::fd::{AsFd, BorrowedFd};

use crate::error::{Error, Result};
use crate::fd::Fd;

/// A region on its way to another process: a promise of how large it is, and the means to map it.
///
/// The bytes (kind and length) travel in a frame; the descriptor, if there is one, beside them as SCM_RIGHTS.
#[derive(Debug)]
#[non_exhaustive]
pub enum Handle {
    /// A sealed memfd with host memory.
    Memfd {
        /// The descriptor.
        fd: Fd,
        /// The length that was promised; an import checks it.
        len: usize,
    },
}

impl Handle {
    /// The promised length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Memfd { len, .. } => *len,
        }
    }

    /// Whether the region is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The descriptor that travels beside the frame.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Memfd { fd, .. } => Some(fd.as_fd()),
        }
    }

    /// What makes two handles the same memory in this process, where that can be told.
    pub fn key(&self) -> Result<Option<(u64, u64)>> {
        match self {
            Self::Memfd { fd, .. } => {
                let stat = rustix::fs::fstat(fd).map_err(|e| Error::io("looking at an imported memfd", e))?;
                Ok(Some((stat.st_dev, stat.st_ino)))
            }
        }
    }
}
