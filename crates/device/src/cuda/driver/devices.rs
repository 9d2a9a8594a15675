//! Devices, and the contexts that threads work in.

use std::ffi::{c_char, c_int};

use cudarc::driver::sys;

use super::{Attribute, Context, Driver};
use crate::error::Result;

impl Driver {
    /// How many devices this process may see.
    pub(in crate::cuda) fn count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: writes one number.
        unsafe { self.cuDeviceGetCount(&raw mut count) }?;
        Ok(count.max(0) as usize)
    }

    /// The driver's name of the device with this ordinal.
    pub(in crate::cuda) fn device(&self, ordinal: usize) -> Result<c_int> {
        let mut device = 0;
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: writes one number.
        unsafe { self.cuDeviceGet(&raw mut device, ordinal) }.map(|()| device)
    }

    /// What people call it.
    pub(in crate::cuda) fn name(&self, device: c_int) -> Result<String> {
        self.text(256, |text, len| {
            // SAFETY: writes at most `len` bytes, a zero at the end.
            unsafe { self.cuDeviceGetName(text, len, device) }
        })
    }

    /// Where it is on the PCI bus: "0000:1b:00.0".
    pub(in crate::cuda) fn pci(&self, device: c_int) -> Result<String> {
        self.text(32, |text, len| {
            // SAFETY: writes at most `len` bytes, a zero at the end.
            unsafe { self.cuDeviceGetPCIBusId(text, len, device) }
        })
        .map(|id| id.to_lowercase())
    }

    fn text(&self, len: usize, call: impl FnOnce(*mut c_char, c_int) -> Result<()>) -> Result<String> {
        let mut text = vec![0_u8; len];
        call(text.as_mut_ptr().cast(), len as c_int)?;
        let end = text.iter().position(|&byte| byte == 0).unwrap_or(len);
        Ok(String::from_utf8_lossy(&text[..end]).into_owned())
    }

    /// Its name that is the same in every process.
    pub(in crate::cuda) fn uuid(&self, device: c_int) -> Result<[u8; 16]> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: writes 16 bytes.
        unsafe { self.cuDeviceGetUuid_v2(&raw mut uuid, device) }?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// Bytes of its memory.
    pub(in crate::cuda) fn memory(&self, device: c_int) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: writes one number.
        unsafe { self.cuDeviceTotalMem_v2(&raw mut bytes, device) }.map(|()| bytes)
    }

    /// One of its attributes.
    pub(in crate::cuda) fn attribute(&self, device: c_int, attribute: Attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: writes one number.
        unsafe { self.cuDeviceGetAttribute(&raw mut value, attribute, device) }.map(|()| value)
    }

    /// Whether the driver says that one device can reach the memory of another.
    pub(in crate::cuda) fn can_access_peer(&self, device: c_int, peer: c_int) -> Result<bool> {
        let mut can = 0;
        // SAFETY: writes one number.
        unsafe { self.cuDeviceCanAccessPeer(&raw mut can, device, peer) }.map(|()| can != 0)
    }

    /// The context that everybody in the process shares; to be released as often.
    pub(in crate::cuda) fn retain_primary(&self, device: c_int) -> Result<Context> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { self.cuDevicePrimaryCtxRetain(&raw mut context, device) }.map(|()| Context(context))
    }

    /// # Safety
    /// The caller has retained it and uses it no more.
    pub(in crate::cuda) unsafe fn release_primary(&self, device: c_int) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuDevicePrimaryCtxRelease_v2(device) }
    }

    /// The thread's context.
    pub(in crate::cuda) fn current(&self) -> Result<Context> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { self.cuCtxGetCurrent(&raw mut context) }.map(|()| Context(context))
    }

    /// Makes a context the thread's until `pop`.
    pub(in crate::cuda) fn push(&self, context: Context) -> Result<()> {
        // SAFETY: a context of the driver's, retained by its user.
        unsafe { self.cuCtxPushCurrent_v2(context.0) }
    }

    /// Gives the thread back the context it had before.
    pub(in crate::cuda) fn pop(&self) -> Result<()> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { self.cuCtxPopCurrent_v2(&raw mut context) }
    }

    /// Lets the thread's context reach memory of another one that was allocated in the old way.
    pub(in crate::cuda) fn enable_peer(&self, peer: Context) -> Result<()> {
        // SAFETY: a context of the driver's, retained by its user.
        unsafe { self.cuCtxEnablePeerAccess(peer.0, 0) }
    }

    /// Free bytes and all bytes of the thread's device.
    pub(in crate::cuda) fn memory_info(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        unsafe { self.cuMemGetInfo_v2(&raw mut free, &raw mut total) }.map(|()| (free, total))
    }
}
