//! Memory by its address: what the driver knows of it, and allocations of the old way with their handles.

use std::ffi::c_char;

use cudarc::driver::sys;

use super::{Address, Driver, Opaque, PointerAttribute};
use crate::error::Result;

impl Driver {
    /// Start and length of the allocation, or the mapping, that an address lies in.
    pub(in crate::cuda) fn range_of(&self, address: Address) -> Result<(Address, usize)> {
        let (mut base, mut len) = (0, 0);
        // SAFETY: writes two numbers; an unknown address is refused.
        unsafe { self.cuMemGetAddressRange_v2(&raw mut base, &raw mut len, address) }.map(|()| (base, len))
    }

    /// One attribute of an address, as a number. Only attributes of at most 8 bytes may be asked for.
    pub(in crate::cuda) fn pointer(&self, address: Address, attribute: PointerAttribute) -> Result<u64> {
        let mut value = 0_u64;
        // SAFETY: writes at most 8 bytes, as all the attributes asked for here have; an unknown address is refused.
        unsafe { self.cuPointerGetAttribute((&raw mut value).cast(), attribute, address) }.map(|()| value)
    }

    /// The legacy handle of the allocation that an address lies in.
    pub(in crate::cuda) fn legacy_handle(&self, address: Address) -> Result<Opaque> {
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: writes 64 bytes; an unknown address is refused.
        unsafe { self.cuIpcGetMemHandle(&raw mut handle, address) }?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    /// Maps the allocation behind a legacy handle.
    pub(in crate::cuda) fn open_legacy(&self, handle: &Opaque) -> Result<Address> {
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as c_char) };
        let mut address = 0;
        // SAFETY: writes one address; what is no handle is refused. 1: with access for peers, which it always needs.
        unsafe { self.cuIpcOpenMemHandle_v2(&raw mut address, handle, 1) }.map(|()| address)
    }

    /// # Safety
    /// `open_legacy` gave it, as often as this is called, and no queue uses it any more.
    pub(in crate::cuda) unsafe fn close_legacy(&self, address: Address) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuIpcCloseMemHandle(address) }
    }

    /// Memory in the old way, which cannot be exported as a descriptor.
    pub(in crate::cuda) fn alloc_legacy(&self, len: usize) -> Result<Address> {
        let mut address = 0;
        // SAFETY: writes one address.
        unsafe { self.cuMemAlloc_v2(&raw mut address, len) }.map(|()| address)
    }

    /// # Safety
    /// `alloc_legacy` gave it, and nobody uses it any more.
    pub(in crate::cuda) unsafe fn free_legacy(&self, address: Address) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemFree_v2(address) }
    }
}
