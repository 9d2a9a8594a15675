//! A driver that is a script: one device, whose memory is addresses only, and whose streams do what they are told.

pub(crate) mod graphs;
mod streams;

use std::cell::{Cell, RefCell};
use std::ffi::{c_ulonglong, c_void};
use std::os::fd::{IntoRawFd, RawFd};
use std::sync::Mutex;

use super::*;
pub(crate) use streams::{Ran, ScriptStream};

/// What was called, and which call fails after how many that work, with which code.
type Script = (Vec<&'static str>, Option<(&'static str, usize, Code)>);

/// CUDA_ERROR_OUT_OF_MEMORY and CUDA_ERROR_INVALID_HANDLE.
pub(crate) const NO_MEMORY: Code = 2;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const ILLEGAL_ADDRESS: Code = 700;

thread_local! {
    static SCRIPT: RefCell<Script> = const { RefCell::new((Vec::new(), None)) };
    /// The handles that were released.
    static RELEASED: RefCell<Vec<Physical>> = const { RefCell::new(Vec::new()) };
    /// The stream that this thread has made last.
    static LAST: Cell<Option<&'static ScriptStream>> = const { Cell::new(None) };
}

/// The stream that this thread has made last.
pub(crate) fn last_stream() -> &'static ScriptStream {
    LAST.get().unwrap()
}

/// Notes a call; gives its code.
pub(super) fn called(name: &'static str) -> Code {
    SCRIPT.with_borrow_mut(|(calls, fails)| {
        calls.push(name);
        match fails {
            Some((which, 0, code)) if *which == name => *code,
            Some((which, left, _)) if *which == name => {
                *left -= 1;
                0
            }
            _ => 0,
        }
    })
}

/// The calls of this thread since the last question.
pub(crate) fn calls() -> Vec<&'static str> {
    SCRIPT.with_borrow_mut(|(calls, _)| std::mem::take(calls))
}

/// The handles that this thread has released since the last question.
pub(crate) fn released() -> Vec<Physical> {
    RELEASED.take()
}

/// From now on the call fails after so many that work.
pub(crate) fn fail(which: &'static str, after: usize) {
    fail_with(which, after, NO_MEMORY);
}

/// The same, with this code.
pub(crate) fn fail_with(which: &'static str, after: usize, code: Code) {
    SCRIPT.with_borrow_mut(|script| *script = (Vec::new(), Some((which, after, code))));
}

/// What cuMemCreate, cuMulticastCreate and cuMemRetainAllocationHandle give.
pub(crate) const CREATED: Physical = 7;
pub(crate) const OBJECT: Physical = 9;
pub(crate) const RETAINED: Physical = 5;

/// Memory of the old way: the last address, and those that are allocated.
static PLAIN: Mutex<(Address, Vec<Address>)> = Mutex::new((0x1000_0000, Vec::new()));

/// Whether memory of the old way is allocated.
pub(crate) fn is_allocated(address: Address) -> bool {
    PLAIN.lock().unwrap().1.contains(&address)
}

/// The driver, without one of its calls.
pub(crate) fn driver_without_batches() -> &'static Driver {
    let table = Table { cuStreamBatchMemOp_v2: None, ..driver().table.clone() };
    Box::leak(Box::new(Driver::scripted(table)))
}

/// The driver of a GPU without multicast: its attribute says no, or, an old one, it does not have the calls.
pub(crate) fn driver_without_multicast(old: bool) -> &'static Driver {
    unsafe extern "C" fn attribute(value: *mut c_int, attribute: Attribute, _: c_int) -> Code {
        let no = attribute == Attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED;
        // SAFETY: as the true call does.
        unsafe { *value = if no { 0 } else { 9 } };
        called("cuDeviceGetAttribute")
    }
    let table = driver().table.clone();
    let table = match old {
        true => Table { cuMulticastGetGranularity: None, cuMulticastCreate: None, ..table },
        false => Table { cuDeviceGetAttribute: Some(attribute), ..table },
    };
    Box::leak(Box::new(Driver::scripted(table)))
}

/// The driver.
pub(crate) fn driver() -> &'static Driver {
    unsafe extern "C" fn create(
        memory: *mut Physical,
        _: usize,
        _: *const sys::CUmemAllocationProp,
        _: c_ulonglong,
    ) -> Code {
        // SAFETY: as the true call does.
        unsafe { *memory = CREATED };
        called("cuMemCreate")
    }
    unsafe extern "C" fn reserve(
        address: *mut Address,
        _: usize,
        _: usize,
        _: Address,
        _: c_ulonglong,
    ) -> Code {
        // SAFETY: as the true call does.
        unsafe { *address = 0x7000_0000 };
        called("cuMemAddressReserve")
    }
    unsafe extern "C" fn attribute(value: *mut c_int, attribute: Attribute, _: c_int) -> Code {
        let shared = attribute == Attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED;
        // SAFETY: as the true call does.
        unsafe { *value = if shared { 0 } else { 9 } };
        called("cuDeviceGetAttribute")
    }
    unsafe extern "C" fn granularity(
        bytes: *mut usize,
        _: *const sys::CUmemAllocationProp,
        _: sys::CUmemAllocationGranularity_flags,
    ) -> Code {
        // SAFETY: as the true call does.
        unsafe { *bytes = 2 << 20 };
        called("cuMemGetAllocationGranularity")
    }
    unsafe extern "C" fn release(memory: Physical) -> Code {
        RELEASED.with_borrow_mut(|released| released.push(memory));
        called("cuMemRelease")
    }
    unsafe extern "C" fn retain(memory: *mut Physical, _: *mut c_void) -> Code {
        // SAFETY: as the true call does.
        unsafe { *memory = RETAINED };
        called("cuMemRetainAllocationHandle")
    }
    unsafe extern "C" fn multicast(object: *mut Physical, _: *const sys::CUmulticastObjectProp) -> Code {
        // SAFETY: as the true call does.
        unsafe { *object = OBJECT };
        called("cuMulticastCreate")
    }
    unsafe extern "C" fn multicast_granularity(
        bytes: *mut usize,
        _: *const sys::CUmulticastObjectProp,
        _: sys::CUmulticastGranularity_flags,
    ) -> Code {
        // SAFETY: as the true call does.
        unsafe { *bytes = 2 << 20 };
        called("cuMulticastGetGranularity")
    }
    /// A descriptor that programs inherit, as the true call gives it.
    unsafe extern "C" fn export(
        handle: *mut c_void,
        _: Physical,
        kind: sys::CUmemAllocationHandleType,
        _: c_ulonglong,
    ) -> Code {
        let code = called("cuMemExportToShareableHandle");
        if code == 0
            && kind == Export::Fd.kind()
            && let Ok(fd) = rustix::fs::memfd_create("exported", rustix::fs::MemfdFlags::empty())
        {
            // SAFETY: as the true call does.
            unsafe { *handle.cast::<RawFd>() = fd.into_raw_fd() };
        }
        code
    }
    unsafe extern "C" fn name(code: Code, name: *mut *const c_char) -> Code {
        let text = match code {
            NO_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
            INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
            ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            _ => c"CUDA_ERROR_UNKNOWN",
        };
        // SAFETY: as the true call does.
        unsafe { *name = text.as_ptr() };
        0
    }
    /// Every address once.
    unsafe extern "C" fn allocate(address: *mut Address, _: usize) -> Code {
        let mut plain = PLAIN.lock().unwrap();
        plain.0 += 4096;
        let new = plain.0;
        plain.1.push(new);
        // SAFETY: as the true call does.
        unsafe { *address = new };
        called("cuMemAlloc_v2")
    }
    unsafe extern "C" fn free(address: Address) -> Code {
        PLAIN.lock().unwrap().1.retain(|there| *there != address);
        called("cuMemFree_v2")
    }
    let table = Table {
        cuMemAlloc_v2: Some(allocate),
        cuMemFree_v2: Some(free),
        cuMemCreate: Some(create),
        cuMemAddressReserve: Some(reserve),
        cuDeviceGetAttribute: Some(attribute),
        cuMemGetAllocationGranularity: Some(granularity),
        cuMemExportToShareableHandle: Some(export),
        cuMemRelease: Some(release),
        cuMemRetainAllocationHandle: Some(retain),
        cuMulticastCreate: Some(multicast),
        cuMulticastGetGranularity: Some(multicast_granularity),
        cuGetErrorName: Some(name),
        ..Table::noted().with_streams().with_graphs()
    };
    Box::leak(Box::new(Driver::scripted(table)))
}
