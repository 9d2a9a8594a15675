//! The memory of this host: memfd regions, a queue on the caller's thread, reduce kernels.

pub mod convert;
mod copy;
mod give;
mod helper;
mod queue;
#[doc(hidden)]
pub mod reduce;
mod region;

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::device::{Device, DeviceId, Queue, Region, check_memory};
use crate::error::{Error, Result};
use crate::handle::Handle;

/// Ordinary memory of this process: zeroed, aligned to a page, given back with the region. Others cannot map it.
pub fn private(len: usize) -> Result<Arc<dyn Region>> {
    Ok(Arc::new(region::Unshared::private(len)?))
}

/// The host device. It has no state: all hosts of a process are the same.
#[derive(Debug, Clone, Copy, Default)]
pub struct Host;

impl Host {
    /// Uses memory that somebody else has mapped from the beginning of a file without seals, for as long as `keep` lives
    /// inside the region. It is exported as [`Handle::File`].
    ///
    /// # Safety
    /// As for [`Device::adopt`]; and `fd` stays open, and that file's, until `keep` is dropped.
    pub unsafe fn adopt_file(
        &self,
        addr: usize,
        len: usize,
        fd: BorrowedFd<'_>,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<Arc<dyn Region>> {
        check_memory(addr, len)?;
        let file = region::File::of(fd, len)?;
        // SAFETY: what `Region` promises is exactly what the caller promises here.
        Ok(Arc::new(unsafe { region::Adopted::new(addr, len, Some(file), keep) }))
    }
}

impl Device for Host {
    fn id(&self) -> DeviceId {
        DeviceId::Host
    }

    fn alloc(&self, len: usize) -> Result<Arc<dyn Region>> {
        Ok(Arc::new(region::Memfd::alloc(len)?))
    }

    fn reserve(&self, len: usize) -> Result<Arc<dyn Region>> {
        Ok(Arc::new(region::Memfd::reserve(len)?))
    }

    fn import(&self, handle: Handle) -> Result<Arc<dyn Region>> {
        match handle {
            Handle::Memfd { fd, len } => Ok(Arc::new(region::Memfd::import(fd, len)?)),
            Handle::File { len, .. } => Err(Error::refused(format!(
                "{len} bytes in a file without seals, which another process could cut short: only who made the file maps it"
            ))),
            Handle::Gpu(_) => {
                Err(Error::misuse("memory of a GPU is mapped by that GPU's device, not by the host"))
            }
        }
    }

    unsafe fn adopt(
        &self,
        addr: usize,
        len: usize,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<Arc<dyn Region>> {
        check_memory(addr, len)?;
        // SAFETY: what `Region` promises is exactly what the caller promises here.
        Ok(Arc::new(unsafe { region::Adopted::new(addr, len, None, keep) }))
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(queue::HostQueue::new()))
    }
}
