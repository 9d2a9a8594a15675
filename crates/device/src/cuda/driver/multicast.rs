//! Multicast objects: what one store to them reaches on several devices. They are handles like those of physical memory, and are
//! exported, imported, mapped and released like it.

use std::ffi::c_int;

use cudarc::driver::sys;

use super::{Driver, Export, Physical};
use crate::error::Result;

impl Driver {
    /// What sizes and offsets of such an object are multiples of.
    pub(in crate::cuda) fn multicast_granularity(
        &self,
        devices: u32,
        len: usize,
        export: Export,
    ) -> Result<usize> {
        let properties = properties(devices, len, export);
        let least = sys::CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_MINIMUM;
        let mut bytes = 0;
        // SAFETY: reads one struct, writes one number.
        unsafe { self.cuMulticastGetGranularity(&raw mut bytes, &raw const properties, least) }?;
        Ok(bytes.max(1))
    }

    /// An object for so many devices; to be released. `len` is a multiple of the granularity.
    pub(in crate::cuda) fn multicast(&self, devices: u32, len: usize, export: Export) -> Result<Physical> {
        let properties = properties(devices, len, export);
        let mut object = 0;
        // SAFETY: reads one struct, writes one handle.
        unsafe { self.cuMulticastCreate(&raw mut object, &raw const properties) }.map(|()| object)
    }

    /// Puts a device behind an object.
    ///
    /// # Safety
    /// The caller's own reference to an object.
    pub(in crate::cuda) unsafe fn multicast_add(&self, object: Physical, device: c_int) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMulticastAddDevice(object, device) }
    }

    /// Puts `len` bytes of physical memory, from `offset` on, behind the beginning of an object.
    ///
    /// # Safety
    /// The caller's own references, to an object with that device and to memory of it, which stay until the memory is unbound.
    pub(in crate::cuda) unsafe fn multicast_bind(
        &self,
        object: Physical,
        (memory, offset): (Physical, usize),
        len: usize,
    ) -> Result<()> {
        // SAFETY: the caller's promise; what does not fit is refused.
        unsafe { self.cuMulticastBindMem(object, 0, memory, offset, len, 0) }
    }

    /// Takes the memory of a device back.
    ///
    /// # Safety
    /// Bound by the caller in this length, and nobody stores to the object any more.
    pub(in crate::cuda) unsafe fn multicast_unbind(
        &self,
        object: Physical,
        device: c_int,
        len: usize,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMulticastUnbind(object, device, 0, len) }
    }
}

fn properties(devices: u32, len: usize, export: Export) -> sys::CUmulticastObjectProp {
    let kind = match export {
        Export::Fd => 1,
        Export::Fabric => 8,
        Export::Both => 1 | 8,
    };
    sys::CUmulticastObjectProp { numDevices: devices, size: len, handleTypes: kind, flags: 0 }
}
