//! The CUDA driver: a `Result` layer over the calls we use. The only file that names cudarc.
//!
//! cudarc gives the types. Its own loader panics where the library or a symbol is missing, and its results are Rust
//! enums that a newer driver's codes would not fit: so the functions are looked up here, once, each for itself, and
//! results are numbers. A call that this driver lacks is `Unsupported` when it is made.
//!
//! What a call does to memory is the caller's promise: calls that write through an address, or end the life of one, are
//! `unsafe`.

#[cfg(test)]
pub(super) mod script;

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use cudarc::driver::sys;
use libloading::Library;

use crate::error::{Error, Result};

pub(super) use cudarc::driver::sys::CUdevice_attribute as Attribute;
pub(super) use cudarc::driver::sys::CUpointer_attribute as PointerAttribute;

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
}

impl Event {
    /// The same for an event.
    pub(super) fn from_number(number: usize) -> Self {
        Self(number as sys::CUevent)
    }
}

/// How physical memory may leave its process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Export {
    /// As a file descriptor.
    Fd,
    /// As a fabric handle.
    Fabric,
    /// As either.
    Both,
}

impl Export {
    fn kind(self) -> sys::CUmemAllocationHandleType {
        match self {
            Self::Fd => sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            Self::Fabric => sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC,
            Self::Both => Self::Fd.kind() | Self::Fabric.kind(),
        }
    }
}

/// What the driver answers: 0, or an error's number.
type Code = c_int;

/// Errors after which a context runs nothing any more.
const FATAL: [&str; 12] = [
    "ILLEGAL_ADDRESS",
    "LAUNCH_FAILED",
    "LAUNCH_TIMEOUT",
    "ERROR_ASSERT",
    "HARDWARE_STACK_ERROR",
    "ILLEGAL_INSTRUCTION",
    "MISALIGNED_ADDRESS",
    "INVALID_ADDRESS_SPACE",
    "INVALID_PC",
    "UNCORRECTABLE",
    "CONTEXT_IS_DESTROYED",
    "DEINITIALIZED",
];

/// CUDA_ERROR_NOT_READY.
const NOT_READY: Code = 600;

/// Declares the functions: their places in the table, how they are looked up, and how they are called.
macro_rules! table {
    ($($name:ident($($argument:ident: $type:ty),* $(,)?);)*) => {
        /// The functions of the driver. One that is missing is `None`.
        ///
        /// Tests of order and failure fill a table with functions of their own.
        #[derive(Debug, Default, Clone)]
        #[allow(non_snake_case)]
        pub(super) struct Table {
            $(pub(super) $name: Option<unsafe extern "C" fn($($type),*) -> Code>,)*
        }

        impl Table {
            fn load(library: &Library) -> Self {
                Self {$(
                    // SAFETY: the symbol, if it is there, is the driver's function of that name, which has this
                    // signature since the version in its name.
                    $name: unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                        .ok()
                        .map(|symbol| *symbol),
                )*}
            }
        }

        #[cfg(test)]
        impl Table {
            /// Functions that do nothing but be noted in the script.
            pub(super) fn noted() -> Self {
                Self {$(
                    $name: Some({
                        unsafe extern "C" fn noted($($argument: $type),*) -> Code {
                            $(let _ = $argument;)*
                            script::called(stringify!($name))
                        }
                        noted
                    }),
                )*}
            }
        }

        impl Driver {
            $(
                #[allow(non_snake_case, clippy::too_many_arguments, dead_code)]
                #[inline]
                unsafe fn $name(&self, $($argument: $type),*) -> Result<()> {
                    let Some(function) = self.table.$name else {
                        return Err(self.missing(stringify!($name)));
                    };
                    // SAFETY: the arguments are as the caller promised.
                    let code = unsafe { function($($argument),*) };
                    if code == 0 { Ok(()) } else { Err(self.failed(stringify!($name), code)) }
                }
            )*
        }
    };
}

table! {
    cuInit(flags: c_uint);
    cuDriverGetVersion(version: *mut c_int);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut c_int, ordinal: c_int);
    cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int);
    cuDeviceGetUuid_v2(uuid: *mut sys::CUuuid, device: c_int);
    cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
    cuDeviceGetAttribute(value: *mut c_int, attribute: Attribute, device: c_int);
    cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
    cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: c_int);
    cuDevicePrimaryCtxRelease_v2(device: c_int);
    cuCtxGetCurrent(context: *mut sys::CUcontext);
    cuCtxPushCurrent_v2(context: sys::CUcontext);
    cuCtxPopCurrent_v2(context: *mut sys::CUcontext);
    cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
    cuCtxEnablePeerAccess(peer: sys::CUcontext, flags: c_uint);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuStreamCreateWithPriority(stream: *mut sys::CUstream, flags: c_uint, priority: c_int);
    cuStreamDestroy_v2(stream: sys::CUstream);
    cuStreamWriteValue32_v2(stream: sys::CUstream, address: Address, value: u32, flags: c_uint);
    cuStreamWaitValue32_v2(stream: sys::CUstream, address: Address, value: u32, flags: c_uint);
    cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
    cuStreamGetCtx(stream: sys::CUstream, context: *mut sys::CUcontext);
    cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
    cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
    cuEventQuery(event: sys::CUevent);
    cuEventDestroy_v2(event: sys::CUevent);
    cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
    cuMemcpyAsync(to: Address, from: Address, len: usize, stream: sys::CUstream);
    cuMemsetD8Async(to: Address, value: u8, len: usize, stream: sys::CUstream);
    cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const sys::CUmemAllocationProp, which: sys::CUmemAllocationGranularity_flags);
    cuMemCreate(memory: *mut Physical, len: usize, properties: *const sys::CUmemAllocationProp, flags: c_ulonglong);
    cuMemRelease(memory: Physical);
    cuMemRetainAllocationHandle(memory: *mut Physical, address: *mut c_void);
    cuMemAddressReserve(address: *mut Address, len: usize, alignment: usize, wish: Address, flags: c_ulonglong);
    cuMemAddressFree(address: Address, len: usize);
    cuMemMap(address: Address, len: usize, offset: usize, memory: Physical, flags: c_ulonglong);
    cuMemUnmap(address: Address, len: usize);
    cuMemSetAccess(address: Address, len: usize, access: *const sys::CUmemAccessDesc, count: usize);
    cuMemExportToShareableHandle(handle: *mut c_void, memory: Physical, kind: sys::CUmemAllocationHandleType, flags: c_ulonglong);
    cuMemImportFromShareableHandle(memory: *mut Physical, handle: *mut c_void, kind: sys::CUmemAllocationHandleType);
    cuMemGetAddressRange_v2(base: *mut Address, len: *mut usize, address: Address);
    cuPointerGetAttribute(value: *mut c_void, attribute: PointerAttribute, address: Address);
    cuIpcGetMemHandle(handle: *mut sys::CUipcMemHandle, address: Address);
    cuIpcOpenMemHandle_v2(address: *mut Address, handle: sys::CUipcMemHandle, flags: c_uint);
    cuIpcCloseMemHandle(address: Address);
    cuMemAlloc_v2(address: *mut Address, len: usize);
    cuMemFree_v2(address: Address);
    cuMemHostAlloc(address: *mut *mut c_void, len: usize, flags: c_uint);
    cuMemFreeHost(address: *mut c_void);
    cuMemHostRegister_v2(address: *mut c_void, len: usize, flags: c_uint);
    cuMemHostUnregister(address: *mut c_void);
    cuMemHostGetDevicePointer_v2(on_device: *mut Address, address: *mut c_void, flags: c_uint);
    cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void);
    cuModuleUnload(module: sys::CUmodule);
    cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
    cuLaunchKernel(
        function: sys::CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: sys::CUstream, arguments: *mut *mut c_void, extra: *mut *mut c_void,
    );
    cuMulticastCreate(memory: *mut Physical, properties: *const sys::CUmulticastObjectProp);
    cuMulticastGetGranularity(bytes: *mut usize, properties: *const sys::CUmulticastObjectProp, which: sys::CUmulticastGranularity_flags);
    cuGetErrorName(code: c_int, name: *mut *const c_char);
}

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
        Error::Device { call, name }
    }

    // --- devices ---------------------------------------------------------------------------------------------------

    /// How many devices this process may see.
    pub(super) fn count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: writes one number.
        unsafe { self.cuDeviceGetCount(&raw mut count) }?;
        Ok(count.max(0) as usize)
    }

    /// The driver's name of the device with this ordinal.
    pub(super) fn device(&self, ordinal: usize) -> Result<c_int> {
        let mut device = 0;
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: writes one number.
        unsafe { self.cuDeviceGet(&raw mut device, ordinal) }.map(|()| device)
    }

    /// What people call it.
    pub(super) fn name(&self, device: c_int) -> Result<String> {
        self.text(256, |text, len| {
            // SAFETY: writes at most `len` bytes, a zero at the end.
            unsafe { self.cuDeviceGetName(text, len, device) }
        })
    }

    /// Where it is on the PCI bus: "0000:1b:00.0".
    pub(super) fn pci(&self, device: c_int) -> Result<String> {
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
    pub(super) fn uuid(&self, device: c_int) -> Result<[u8; 16]> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: writes 16 bytes.
        unsafe { self.cuDeviceGetUuid_v2(&raw mut uuid, device) }?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// Bytes of its memory.
    pub(super) fn memory(&self, device: c_int) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: writes one number.
        unsafe { self.cuDeviceTotalMem_v2(&raw mut bytes, device) }.map(|()| bytes)
    }

    /// One of its attributes.
    pub(super) fn attribute(&self, device: c_int, attribute: Attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: writes one number.
        unsafe { self.cuDeviceGetAttribute(&raw mut value, attribute, device) }.map(|()| value)
    }

    /// Whether the driver says that one device can reach the memory of another.
    pub(super) fn can_access_peer(&self, device: c_int, peer: c_int) -> Result<bool> {
        let mut can = 0;
        // SAFETY: writes one number.
        unsafe { self.cuDeviceCanAccessPeer(&raw mut can, device, peer) }.map(|()| can != 0)
    }

    // --- contexts --------------------------------------------------------------------------------------------------

    /// The context that everybody in the process shares; to be released as often.
    pub(super) fn retain_primary(&self, device: c_int) -> Result<Context> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { self.cuDevicePrimaryCtxRetain(&raw mut context, device) }.map(|()| Context(context))
    }

    /// # Safety
    /// Who retained it uses it no more.
    pub(super) unsafe fn release_primary(&self, device: c_int) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuDevicePrimaryCtxRelease_v2(device) }
    }

    /// The thread's context.
    pub(super) fn current(&self) -> Result<Context> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { self.cuCtxGetCurrent(&raw mut context) }.map(|()| Context(context))
    }

    /// Makes a context the thread's until `pop`.
    pub(super) fn push(&self, context: Context) -> Result<()> {
        // SAFETY: a context of the driver's, retained by who has it.
        unsafe { self.cuCtxPushCurrent_v2(context.0) }
    }

    /// Gives the thread back the context it had before.
    pub(super) fn pop(&self) -> Result<()> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { self.cuCtxPopCurrent_v2(&raw mut context) }
    }

    /// Lets the thread's context reach memory of another one that was allocated in the old way.
    pub(super) fn enable_peer(&self, peer: Context) -> Result<()> {
        // SAFETY: a context of the driver's, retained by who has it.
        unsafe { self.cuCtxEnablePeerAccess(peer.0, 0) }
    }

    /// Free bytes and all bytes of the thread's device.
    pub(super) fn memory_info(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        unsafe { self.cuMemGetInfo_v2(&raw mut free, &raw mut total) }.map(|()| (free, total))
    }

    // --- streams and events ----------------------------------------------------------------------------------------

    /// A new stream that does not wait for the default stream; `urgent` ones come first.
    pub(super) fn stream(&self, urgent: bool) -> Result<Stream> {
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: writes two numbers.
        unsafe { self.cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) }?;
        let mut stream = std::ptr::null_mut();
        let non_blocking = 1;
        // SAFETY: writes one handle.
        unsafe {
            self.cuStreamCreateWithPriority(
                &raw mut stream,
                non_blocking,
                if urgent { greatest } else { least },
            )
        }?;
        Ok(Stream(stream))
    }

    /// # Safety
    /// The stream is the caller's own and is used no more. (What is queued on it still runs.)
    pub(super) unsafe fn destroy_stream(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuStreamDestroy_v2(stream.0) }
    }

    /// The context that a stream belongs to.
    ///
    /// # Safety
    /// The stream exists.
    pub(super) unsafe fn context_of(&self, stream: Stream) -> Result<Context> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the caller's promise; writes one handle.
        unsafe { self.cuStreamGetCtx(stream.0, &raw mut context) }.map(|()| Context(context))
    }

    /// Sets 32 bits in memory that the device reaches, after all that was queued before, which is visible then.
    ///
    /// # Safety
    /// The stream exists; `address` is 4 bytes that the device may write, aligned, until the work is done.
    pub(super) unsafe fn write_value(&self, stream: Stream, address: Address, value: u32) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuStreamWriteValue32_v2(stream.0, address, value, 0) }
    }

    /// Holds the stream until 32 bits have reached `value`, counted around.
    ///
    /// # Safety
    /// The stream exists; `address` is 4 bytes that the device may read, aligned, until the work is done.
    pub(super) unsafe fn wait_value(&self, stream: Stream, address: Address, value: u32) -> Result<()> {
        // SAFETY: the caller's promise. 0: greater or equal, by the sign of the difference.
        unsafe { self.cuStreamWaitValue32_v2(stream.0, address, value, 0) }
    }

    /// A new event.
    pub(super) fn event(&self) -> Result<Event> {
        let mut event = std::ptr::null_mut();
        // SAFETY: writes one handle. 2: without a time, which is quicker.
        unsafe { self.cuEventCreate(&raw mut event, 2) }.map(|()| Event(event))
    }

    /// # Safety
    /// Stream and event exist.
    pub(super) unsafe fn record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuEventRecord(event.0, stream.0) }
    }

    /// Has a stream wait for what was queued before the event was recorded last.
    ///
    /// # Safety
    /// Stream and event exist.
    pub(super) unsafe fn wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuStreamWaitEvent(stream.0, event.0, 0) }
    }

    /// Whether everything that was queued before the event is done.
    ///
    /// # Safety
    /// The event exists.
    #[inline]
    pub(super) unsafe fn is_done(&self, event: Event) -> Result<bool> {
        // SAFETY: the caller's promise.
        self.poll("cuEventQuery", self.table.cuEventQuery.map(|call| unsafe { call(event.0) }))
    }

    /// The same for who only wants to let go of memory: what cannot be asked now is not done, except after errors behind
    /// which nothing runs any more.
    ///
    /// # Safety
    /// The event exists.
    pub(super) unsafe fn is_over(&self, event: Event) -> bool {
        // SAFETY: the caller's promise.
        match unsafe { self.is_done(event) } {
            Ok(done) => done,
            Err(Error::Device { name, .. }) => FATAL.iter().any(|fatal| name.contains(fatal)),
            Err(_) => false,
        }
    }

    /// Lets this thread ask the driver while another one captures a graph.
    pub(super) fn relax_capture(&self) {
        // CU_STREAM_CAPTURE_MODE_RELAXED.
        let mut mode = 2;
        // SAFETY: exchanges one number. A driver without it captures nothing that could be disturbed.
        let _ = unsafe { self.cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    }

    /// # Safety
    /// The event is the caller's own and is used no more.
    pub(super) unsafe fn destroy_event(&self, event: Event) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuEventDestroy_v2(event.0) }
    }

    /// Copies between any two places that the device and the host know.
    ///
    /// # Safety
    /// The stream exists; `len` bytes are there on both sides until the work is done, and nobody counts on them.
    pub(super) unsafe fn copy(&self, to: Address, from: Address, len: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemcpyAsync(to, from, len, stream.0) }
    }

    /// Sets bytes.
    ///
    /// # Safety
    /// As for `copy`.
    pub(super) unsafe fn fill(&self, to: Address, value: u8, len: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemsetD8Async(to, value, len, stream.0) }
    }

    // --- memory that can be shared ---------------------------------------------------------------------------------

    /// What sizes and addresses of physical memory are multiples of.
    pub(super) fn granularity(&self, device: c_int, export: Export) -> Result<usize> {
        let properties = properties(device, export);
        let recommended = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut bytes = 0;
        // SAFETY: reads one struct, writes one number.
        unsafe { self.cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, recommended) }?;
        Ok(bytes.max(1))
    }

    /// Physical memory of a device; `len` is a multiple of the granularity.
    pub(super) fn create(&self, device: c_int, len: usize, export: Export) -> Result<Physical> {
        let properties = properties(device, export);
        let mut memory = 0;
        // SAFETY: reads one struct, writes one handle.
        unsafe { self.cuMemCreate(&raw mut memory, len, &raw const properties, 0) }.map(|()| memory)
    }

    /// # Safety
    /// The caller's own reference, used no more. (Mappings stay.)
    pub(super) unsafe fn release(&self, memory: Physical) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemRelease(memory) }
    }

    /// A reference to the physical memory behind a mapped address.
    pub(super) fn retain(&self, address: Address) -> Result<Physical> {
        let mut memory = 0;
        // SAFETY: the driver looks the address up and refuses what it does not know.
        unsafe { self.cuMemRetainAllocationHandle(&raw mut memory, address as *mut c_void) }.map(|()| memory)
    }

    /// Addresses without memory.
    pub(super) fn reserve(&self, len: usize) -> Result<Address> {
        let mut address = 0;
        // SAFETY: writes one number.
        unsafe { self.cuMemAddressReserve(&raw mut address, len, 0, 0, 0) }.map(|()| address)
    }

    /// # Safety
    /// The caller's own reservation of this length, without mappings, used no more.
    pub(super) unsafe fn free_addresses(&self, address: Address, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemAddressFree(address, len) }
    }

    /// # Safety
    /// `address..address + len` is reserved by the caller and has no mapping.
    pub(super) unsafe fn map(&self, address: Address, len: usize, memory: Physical) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemMap(address, len, 0, memory, 0) }
    }

    /// # Safety
    /// `address..address + len` was mapped by the caller as a whole, and no queue uses it any more.
    pub(super) unsafe fn unmap(&self, address: Address, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemUnmap(address, len) }
    }

    /// Lets a device read and write mapped memory.
    ///
    /// # Safety
    /// `address..address + len` is mapped by the caller.
    pub(super) unsafe fn allow(&self, address: Address, len: usize, device: c_int) -> Result<()> {
        let access = sys::CUmemAccessDesc {
            location: location(device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the caller's promise; reads one struct.
        unsafe { self.cuMemSetAccess(address, len, &raw const access, 1) }
    }

    /// Physical memory as a descriptor.
    pub(super) fn export_fd(&self, memory: Physical) -> Result<OwnedFd> {
        let mut fd: RawFd = -1;
        // SAFETY: writes one descriptor; a handle that was not made for it is refused.
        unsafe { self.cuMemExportToShareableHandle((&raw mut fd).cast(), memory, Export::Fd.kind(), 0) }?;
        if fd < 0 {
            return Err(Error::Device {
                call: "cuMemExportToShareableHandle",
                name: "no descriptor came".into(),
            });
        }
        // SAFETY: the driver opened it for us, and nobody else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Physical memory as a fabric handle.
    pub(super) fn export_fabric(&self, memory: Physical) -> Result<Opaque> {
        let mut handle: Opaque = [0; 64];
        // SAFETY: writes 64 bytes; a handle that was not made for it is refused.
        unsafe {
            self.cuMemExportToShareableHandle((&raw mut handle).cast(), memory, Export::Fabric.kind(), 0)
        }?;
        Ok(handle)
    }

    /// A reference to memory that came as a descriptor.
    pub(super) fn import_fd(&self, fd: BorrowedFd<'_>) -> Result<Physical> {
        let mut memory = 0;
        // The descriptor itself in place of a pointer: that is how this call takes it.
        let handle = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: an open descriptor; what is no memory of the driver's is refused.
        unsafe { self.cuMemImportFromShareableHandle(&raw mut memory, handle, Export::Fd.kind()) }?;
        Ok(memory)
    }

    /// A reference to memory that came as a fabric handle.
    pub(super) fn import_fabric(&self, handle: &Opaque) -> Result<Physical> {
        let (mut memory, mut handle) = (0, *handle);
        // SAFETY: reads 64 bytes; what is no handle is refused.
        unsafe {
            self.cuMemImportFromShareableHandle(
                &raw mut memory,
                (&raw mut handle).cast(),
                Export::Fabric.kind(),
            )
        }?;
        Ok(memory)
    }

    // --- memory of others ------------------------------------------------------------------------------------------

    /// Start and length of the allocation, or the mapping, that an address lies in.
    pub(super) fn range_of(&self, address: Address) -> Result<(Address, usize)> {
        let (mut base, mut len) = (0, 0);
        // SAFETY: writes two numbers; an unknown address is refused.
        unsafe { self.cuMemGetAddressRange_v2(&raw mut base, &raw mut len, address) }.map(|()| (base, len))
    }

    /// One attribute of an address, as a number. Only attributes of at most 8 bytes may be asked for.
    pub(super) fn pointer(&self, address: Address, attribute: PointerAttribute) -> Result<u64> {
        let mut value = 0_u64;
        // SAFETY: writes at most 8 bytes, as all the attributes asked for here have; an unknown address is refused.
        unsafe { self.cuPointerGetAttribute((&raw mut value).cast(), attribute, address) }.map(|()| value)
    }

    /// The legacy handle of the allocation that an address lies in.
    pub(super) fn legacy_handle(&self, address: Address) -> Result<Opaque> {
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: writes 64 bytes; an unknown address is refused.
        unsafe { self.cuIpcGetMemHandle(&raw mut handle, address) }?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    /// Maps the allocation behind a legacy handle.
    pub(super) fn open_legacy(&self, handle: &Opaque) -> Result<Address> {
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as c_char) };
        let mut address = 0;
        // SAFETY: writes one address; what is no handle is refused. 1: with access for peers, which it always needs.
        unsafe { self.cuIpcOpenMemHandle_v2(&raw mut address, handle, 1) }.map(|()| address)
    }

    /// # Safety
    /// `open_legacy` gave it, as often as this is called, and no queue uses it any more.
    pub(super) unsafe fn close_legacy(&self, address: Address) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuIpcCloseMemHandle(address) }
    }

    /// Memory in the old way, which cannot be exported as a descriptor.
    pub(super) fn alloc_legacy(&self, len: usize) -> Result<Address> {
        let mut address = 0;
        // SAFETY: writes one address.
        unsafe { self.cuMemAlloc_v2(&raw mut address, len) }.map(|()| address)
    }

    /// # Safety
    /// `alloc_legacy` gave it, and nobody uses it any more.
    pub(super) unsafe fn free_legacy(&self, address: Address) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemFree_v2(address) }
    }

    // --- host memory -----------------------------------------------------------------------------------------------

    /// Lets all devices reach host memory.
    ///
    /// # Safety
    /// `address..address + len` is mapped memory of this process, and stays so until it is taken back.
    pub(super) unsafe fn register(&self, address: usize, len: usize) -> Result<()> {
        // SAFETY: the caller's promise. 1 | 2: for all contexts, mapped.
        unsafe { self.cuMemHostRegister_v2(address as *mut c_void, len, 1 | 2) }
    }

    /// # Safety
    /// `register` was called with this address, and no queue uses it any more.
    pub(super) unsafe fn unregister(&self, address: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemHostUnregister(address as *mut c_void) }
    }

    /// Where a device sees registered memory.
    pub(super) fn seen_at(&self, address: usize) -> Result<Address> {
        let mut on_device = 0;
        // SAFETY: writes one number; what is not registered is refused.
        unsafe { self.cuMemHostGetDevicePointer_v2(&raw mut on_device, address as *mut c_void, 0) }?;
        Ok(on_device)
    }

    /// Host memory that all devices reach.
    pub(super) fn alloc_pinned(&self, len: usize) -> Result<usize> {
        let mut address = std::ptr::null_mut();
        // SAFETY: writes one address. 1 | 2: for all contexts, mapped.
        unsafe { self.cuMemHostAlloc(&raw mut address, len, 1 | 2) }.map(|()| address as usize)
    }

    /// # Safety
    /// `alloc_pinned` gave it, and nobody uses it any more.
    pub(super) unsafe fn free_pinned(&self, address: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemFreeHost(address as *mut c_void) }
    }

    // --- kernels ---------------------------------------------------------------------------------------------------

    /// Loads kernels into the thread's context. PTX must end with a zero.
    ///
    /// # Safety
    /// The image is a whole cubin, or PTX that ends with a zero.
    pub(super) unsafe fn load_module(&self, image: &[u8]) -> Result<Module> {
        let mut module = std::ptr::null_mut();
        // SAFETY: the caller's promise.
        unsafe { self.cuModuleLoadData(&raw mut module, image.as_ptr().cast()) }.map(|()| Module(module))
    }

    /// # Safety
    /// The caller's own module, none of whose kernels runs or will be launched.
    pub(super) unsafe fn unload_module(&self, module: Module) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuModuleUnload(module.0) }
    }

    /// A kernel by its name.
    ///
    /// # Safety
    /// The module is loaded.
    pub(super) unsafe fn function(&self, module: Module, name: &CStr) -> Result<Function> {
        let mut function = std::ptr::null_mut();
        // SAFETY: the caller's promise; the name ends with a zero.
        unsafe { self.cuModuleGetFunction(&raw mut function, module.0, name.as_ptr()) }?;
        Ok(Function(function))
    }

    /// Queues a kernel that takes one argument.
    ///
    /// # Safety
    /// The kernel takes exactly a `T`; all memory that it names is there until the work is done.
    pub(super) unsafe fn launch<T>(
        &self,
        function: Function,
        (blocks, threads): (u32, u32),
        argument: &T,
        stream: Stream,
    ) -> Result<()> {
        let mut arguments = [std::ptr::from_ref(argument).cast_mut().cast::<c_void>()];
        // SAFETY: the caller's promise; the argument is copied before the call returns.
        unsafe {
            self.cuLaunchKernel(
                function.0,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.0,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
    }

    // --- multicast -------------------------------------------------------------------------------------------------

    /// An object through which one store reaches several devices; to be released.
    pub(super) fn multicast(&self, devices: u32, len: usize, export: Export) -> Result<Physical> {
        let mut properties = multicast_properties(devices, len, export);
        let mut granularity = 0;
        let least = sys::CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_MINIMUM;
        // SAFETY: reads one struct, writes one number.
        unsafe { self.cuMulticastGetGranularity(&raw mut granularity, &raw const properties, least) }?;
        properties.size = len.next_multiple_of(granularity.max(1));
        let mut memory = 0;
        // SAFETY: reads one struct, writes one handle.
        unsafe { self.cuMulticastCreate(&raw mut memory, &raw const properties) }.map(|()| memory)
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

fn location(device: c_int) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

fn properties(device: c_int, export: Export) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: export.kind(),
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn multicast_properties(devices: u32, len: usize, export: Export) -> sys::CUmulticastObjectProp {
    let kind = match export {
        Export::Fd => 1,
        Export::Fabric => 8,
        Export::Both => 1 | 8,
    };
    sys::CUmulticastObjectProp { numDevices: devices, size: len, handleTypes: kind, flags: 0 }
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
    }
}
