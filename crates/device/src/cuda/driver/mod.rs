//! The CUDA driver: a `Result` layer over the calls we use. The only folder that names cudarc and its library.
//!
//! cudarc gives the types. Its own loader panics where the library or a symbol is missing, and its results are Rust
//! enums that a newer driver's codes would not fit: so the functions are looked up here, once, each for itself, and
//! results are numbers. A call that this driver lacks is `Unsupported` when it is made.
//!
//! What a call does to memory is the caller's promise: calls that write through an address, or end the life of one, are
//! `unsafe`.
//!
//! - `table.rs`: the functions of the library
//! - `devices.rs`: devices and contexts
//! - `streams.rs`: streams, events, copies
//! - `physical.rs`: memory that can be mapped and exported
//! - `multicast.rs`: one store to several devices
//! - `legacy.rs`: what is known of an address; memory of the old way
//! - `host_memory.rs`: host memory that devices reach
//! - `modules.rs`: kernels
//! - `script.rs`: for tests, a driver that notes what it is asked

mod devices;
mod graphs;
mod host_memory;
mod legacy;
mod modules;
mod multicast;
mod physical;
#[cfg(test)]
pub(super) mod script;
mod streams;
mod table;

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use cudarc::driver::sys;
use libloading::Library;

use crate::error::{Error, Result};

pub(super) use cudarc::driver::sys::CUdevice_attribute as Attribute;
pub(super) use cudarc::driver::sys::CUpointer_attribute as PointerAttribute;
pub(super) use graphs::Executable;
pub(super) use physical::Export;
pub(super) use streams::BATCH;
use table::Table;

/// An address in the memory of a device.
pub(super) type Address = u64;
/// Physical memory that cuMemCreate or an import gave.
pub(super) type Physical = u64;
/// What a fabric handle or a legacy handle is made of.
pub(super) type Opaque = [u8; 64];

/// A handle of the driver's: a pointer that only the driver looks into.
macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident($type:ty);)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) struct $name(pub(super) $type);

        // SAFETY: the driver's handles may be used from any thread; nothing here follows the pointer.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}

handles! {
    /// A context.
    Context(sys::CUcontext);
    /// A stream.
    Stream(sys::CUstream);
    /// An event.
    Event(sys::CUevent);
    /// A loaded module.
    Module(sys::CUmodule);
    /// A kernel of a module.
    Function(sys::CUfunction);
}

impl Stream {
    /// A stream of somebody else, by the number that frameworks show.
    pub(super) fn from_number(number: usize) -> Self {
        Self(number as sys::CUstream)
    }

    /// The number that frameworks know it by.
    pub(super) fn number(self) -> usize {
        self.0 as usize
    }
}

impl Event {
    /// The same for an event.
    pub(super) fn from_number(number: usize) -> Self {
        Self(number as sys::CUevent)
    }
}

/// What the driver answers: 0, or an error's number.
type Code = c_int;

/// CUDA_ERROR_NOT_READY.
const NOT_READY: Code = 600;

/// The driver of this process.
#[derive(Debug)]
pub(super) struct Driver {
    table: Table,
    /// Keeps the functions where they are.
    _library: Option<Library>,
}

/// The files that may be the driver: what every driver since 2012 is called, and what is there with a toolkit.
const FILES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

impl Driver {
    /// The driver of this process, loaded and started at the first call.
    pub(super) fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        DRIVER.get_or_init(|| Self::load(&FILES)).as_ref().map_err(Clone::clone)
    }

    fn load(files: &[&str]) -> Result<Self> {
        let mut reason = String::new();
        for file in files {
            // SAFETY: the driver's library runs no code at its loading that could harm us; whoever puts another
            // library of that name on the search path owns this process already.
            match unsafe { Library::new(*file) } {
                Ok(library) => {
                    return Self { table: Table::load(&library), _library: Some(library) }.started();
                }
                // What it says itself is only that it failed.
                Err(error) if reason.is_empty() => {
                    reason = std::error::Error::source(&error)
                        .map_or_else(|| error.to_string(), ToString::to_string);
                }
                Err(_) => {}
            }
        }
        Err(off(reason))
    }

    /// A driver that is made of other functions.
    #[cfg(test)]
    pub(super) fn scripted(table: Table) -> Self {
        Self { table, _library: None }
    }

    fn started(self) -> Result<Self> {
        // SAFETY: has no preconditions.
        match unsafe { self.cuInit(0) } {
            Ok(()) => Ok(self),
            Err(error) => Err(off(error.to_string())),
        }
    }

    /// A number for the version: 13000 is CUDA 13.0.
    pub(super) fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: writes one number.
        unsafe { self.cuDriverGetVersion(&raw mut version) }.map(|()| version)
    }

    /// Whether a question that is asked again and again was answered with yes.
    #[inline]
    fn poll(&self, call: &'static str, code: Option<Code>) -> Result<bool> {
        match code {
            Some(0) => Ok(true),
            Some(NOT_READY) => Ok(false),
            Some(code) => Err(self.failed(call, code)),
            None => Err(self.missing(call)),
        }
    }

    #[cold]
    fn missing(&self, call: &'static str) -> Error {
        // Not through the common way, which would come back here where that call is missing too.
        let mut version = 0;
        // SAFETY: writes one number.
        let known = self.table.cuDriverGetVersion.is_some_and(|call| unsafe { call(&raw mut version) } == 0);
        let have = match known {
            true => format!("one for CUDA {}.{}, without it", version / 1000, version % 1000 / 10),
            false => "one without it".into(),
        };
        Error::Unsupported { what: call.into(), need: "an NVIDIA driver that has this call".into(), have }
    }

    #[cold]
    fn failed(&self, call: &'static str, code: Code) -> Error {
        let mut name: *const c_char = std::ptr::null();
        // Not through the common way, which would ask for the name of this call's own failure.
        // SAFETY: gives a string that lives as long as the driver.
        let named = self.table.cuGetErrorName.is_some_and(|call| unsafe { call(code, &raw mut name) } == 0);
        let name = if named && !name.is_null() {
            // SAFETY: the driver's strings end with a zero and never change.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            format!("error {code}")
        };
        Error::Device { call, code: Some(code), name }
    }
}

/// Why there is no CUDA.
fn off(have: String) -> Error {
    Error::Unsupported {
        what: "CUDA".into(),
        need: "an NVIDIA driver (libcuda.so.1) and a GPU that the process may see (CUDA_VISIBLE_DEVICES)"
            .into(),
        have,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_a_reason() {
        let error = Driver::load(&["libno-such-driver.so.1", "libneither.so"]).unwrap_err();
        assert!(matches!(&error, Error::Unsupported { what, .. } if what == "CUDA"), "{error:?}");
        assert!(error.to_string().contains("libno-such-driver.so.1"), "{error}");
        // A library that is none of the driver's: what is missing is said when it is asked for.
        let error = Driver::load(&["libc.so.6"]).unwrap_err();
        assert!(error.to_string().contains("cuInit"), "{error}");
    }

    #[test]
    fn a_missing_call_is_a_reason() {
        let driver = Driver::scripted(Table::default());
        let error = driver.create(0, 1, Export::Fabric).unwrap_err();
        assert!(matches!(&error, Error::Unsupported { what, .. } if what == "cuMemCreate"), "{error:?}");
    }

    #[test]
    fn a_descriptor_that_does_not_come_is_an_error() {
        let error = Driver::scripted(Table::noted()).export_fd(7).unwrap_err();
        assert!(error.to_string().contains("no descriptor came"), "{error}");
    }

    #[test]
    fn errors_have_the_names_of_call_and_error() {
        extern "C" fn denied(_: *mut c_int) -> Code {
            800
        }
        extern "C" fn named(code: Code, name: *mut *const c_char) -> Code {
            if code != 800 {
                return 1;
            }
            // SAFETY: the driver's pointer, as in the true call.
            unsafe { *name = c"CUDA_ERROR_NOT_PERMITTED".as_ptr() };
            0
        }
        let table = Table { cuDeviceGetCount: Some(denied), ..Table::default() };
        assert_eq!(
            Driver::scripted(table.clone()).count().unwrap_err().to_string(),
            "cuDeviceGetCount failed: error 800"
        );
        let driver = Driver::scripted(Table { cuGetErrorName: Some(named), ..table });
        let error = driver.count().unwrap_err();
        assert_eq!(error.to_string(), "cuDeviceGetCount failed: CUDA_ERROR_NOT_PERMITTED");
        assert!(matches!(error, Error::Device { code: Some(800), .. }), "{error:?}");
    }
}
