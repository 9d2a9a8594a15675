//! The functions of the driver's library that we call: their names, their signatures, and how they are looked up.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys;
use libloading::Library;

use super::{Address, Attribute, Code, Driver, Physical, PointerAttribute};
use crate::error::Result;

/// Declares the functions: their places in the table, how they are looked up, and how they are called.
macro_rules! table {
    ($($name:ident($($argument:ident: $type:ty),* $(,)?);)*) => {
        /// The functions of the driver. One that is missing is `None`.
        ///
        /// Tests of order and failure fill a table with functions of their own.
        #[derive(Debug, Default, Clone)]
        #[allow(non_snake_case)]
        pub(in crate::cuda) struct Table {
            $(pub(super) $name: Option<unsafe extern "C" fn($($type),*) -> Code>,)*
        }

        impl Table {
            pub(super) fn load(library: &Library) -> Self {
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
            pub(in crate::cuda) fn noted() -> Self {
                Self {$(
                    $name: Some({
                        unsafe extern "C" fn noted($($argument: $type),*) -> Code {
                            $(let _ = $argument;)*
                            super::script::called(stringify!($name))
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
                pub(super) unsafe fn $name(&self, $($argument: $type),*) -> Result<()> {
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
    cuStreamBatchMemOp_v2(stream: sys::CUstream, count: c_uint, operations: *mut sys::CUstreamBatchMemOpParams, flags: c_uint);
    cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
    cuStreamQuery(stream: sys::CUstream);
    cuStreamIsCapturing(stream: sys::CUstream, status: *mut c_uint);
    cuStreamGetCtx(stream: sys::CUstream, context: *mut sys::CUcontext);
    cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
    cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
    cuEventQuery(event: sys::CUevent);
    cuEventDestroy_v2(event: sys::CUevent);
    cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
    cuStreamBeginCapture_v2(stream: sys::CUstream, mode: sys::CUstreamCaptureMode);
    cuStreamEndCapture(stream: sys::CUstream, graph: *mut sys::CUgraph);
    cuGraphInstantiateWithFlags(executable: *mut sys::CUgraphExec, graph: sys::CUgraph, flags: c_ulonglong);
    cuGraphUpload(executable: sys::CUgraphExec, stream: sys::CUstream);
    cuGraphLaunch(executable: sys::CUgraphExec, stream: sys::CUstream);
    cuGraphExecDestroy(executable: sys::CUgraphExec);
    cuGraphDestroy(graph: sys::CUgraph);
    cuStreamGetCaptureInfo_v2(
        stream: sys::CUstream, status: *mut c_uint, id: *mut c_ulonglong, graph: *mut sys::CUgraph,
        dependencies: *mut *const sys::CUgraphNode, count: *mut usize,
    );
    cuUserObjectCreate(object: *mut sys::CUuserObject, data: *mut c_void, destroy: sys::CUhostFn, count: c_uint, flags: c_uint);
    cuUserObjectRelease(object: sys::CUuserObject, count: c_uint);
    cuGraphRetainUserObject(graph: sys::CUgraph, object: sys::CUuserObject, count: c_uint, flags: c_uint);
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
    cuMulticastAddDevice(object: Physical, device: c_int);
    cuMulticastBindMem(object: Physical, offset: usize, memory: Physical, memory_offset: usize, len: usize, flags: c_ulonglong);
    cuMulticastUnbind(object: Physical, device: c_int, offset: usize, len: usize);
    cuMulticastGetGranularity(bytes: *mut usize, properties: *const sys::CUmulticastObjectProp, which: sys::CUmulticastGranularity_flags);
    cuGetErrorName(code: c_int, name: *mut *const c_char);
}
