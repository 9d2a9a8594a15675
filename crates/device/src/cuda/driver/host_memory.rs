//! Host memory that devices reach.

use std::ffi::c_void;

use super::{Address, Driver};
use crate::error::Result;

impl Driver {
    /// Lets all devices reach host memory.
    ///
    /// # Safety
    /// `address..address + len` is mapped memory of this process, and stays so until it is taken back.
    pub(in crate::cuda) unsafe fn register(&self, address: usize, len: usize) -> Result<()> {
        // SAFETY: the caller's promise. 1 | 2: for all contexts, mapped.
        unsafe { self.cuMemHostRegister_v2(address as *mut c_void, len, 1 | 2) }
    }

    /// # Safety
    /// `register` was called with this address, and no queue uses it any more.
    pub(in crate::cuda) unsafe fn unregister(&self, address: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemHostUnregister(address as *mut c_void) }
    }

    /// Where a device sees registered memory.
    pub(in crate::cuda) fn seen_at(&self, address: usize) -> Result<Address> {
        let mut on_device = 0;
        // SAFETY: writes one number; what is not registered is refused.
        unsafe { self.cuMemHostGetDevicePointer_v2(&raw mut on_device, address as *mut c_void, 0) }?;
        Ok(on_device)
    }

    /// Host memory that all devices reach.
    pub(in crate::cuda) fn alloc_pinned(&self, len: usize) -> Result<usize> {
        let mut address = std::ptr::null_mut();
        // SAFETY: writes one address. 1 | 2: for all contexts, mapped.
        unsafe { self.cuMemHostAlloc(&raw mut address, len, 1 | 2) }.map(|()| address as usize)
    }

    /// # Safety
    /// `alloc_pinned` gave it, and nobody uses it any more.
    pub(in crate::cuda) unsafe fn free_pinned(&self, address: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemFreeHost(address as *mut c_void) }
    }
}
