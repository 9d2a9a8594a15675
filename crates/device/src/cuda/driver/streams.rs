//! Streams, events, and what is queued without a kernel: copies, fills, values that are written and waited for.

use std::ffi::c_uint;

use cudarc::driver::sys;

use super::{Address, Context, Driver, Event, Stream};
use crate::error::{Error, Result};

/// As many waits are queued in one call: the driver takes 256 operations.
pub(in crate::cuda) const BATCH: usize = 128;

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

impl Driver {
    /// A new stream that does not wait for the default stream; `urgent` ones come first.
    pub(in crate::cuda) fn stream(&self, urgent: bool) -> Result<Stream> {
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
    pub(in crate::cuda) unsafe fn destroy_stream(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuStreamDestroy_v2(stream.0) }
    }

    /// The context that a stream belongs to.
    ///
    /// # Safety
    /// The stream exists.
    pub(in crate::cuda) unsafe fn context_of(&self, stream: Stream) -> Result<Context> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the caller's promise; writes one handle.
        unsafe { self.cuStreamGetCtx(stream.0, &raw mut context) }.map(|()| Context(context))
    }

    /// Whether what is queued on a stream goes into a graph. A driver without the call records nothing.
    ///
    /// # Safety
    /// The stream exists.
    pub(in crate::cuda) unsafe fn is_capturing(&self, stream: Stream) -> Result<bool> {
        if self.table.cuStreamIsCapturing.is_none() {
            return Ok(false);
        }
        // CU_STREAM_CAPTURE_STATUS_NONE.
        let mut status: c_uint = 0;
        // SAFETY: the caller's promise; writes one number.
        match unsafe { self.cuStreamIsCapturing(stream.0, &raw mut status) } {
            Ok(()) => Ok(status != 0),
            // The default stream, whose work would go into a graph that another stream records.
            Err(Error::Device { name, .. }) if name == "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT" => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Whether all that was queued on a stream is done.
    ///
    /// # Safety
    /// The stream exists.
    #[inline]
    pub(in crate::cuda) unsafe fn is_idle(&self, stream: Stream) -> Result<bool> {
        // SAFETY: the caller's promise.
        self.poll("cuStreamQuery", self.table.cuStreamQuery.map(|call| unsafe { call(stream.0) }))
    }

    /// Sets 32 bits in memory that the device reaches, after all that was queued before, which is visible then.
    ///
    /// # Safety
    /// The stream exists; `address` is 4 bytes that the device may write, aligned, until the work is done.
    pub(in crate::cuda) unsafe fn write_value(
        &self,
        stream: Stream,
        address: Address,
        value: u32,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuStreamWriteValue32_v2(stream.0, address, value, 0) }
    }

    /// Holds the stream until 32 bits have reached `value`, counted around.
    ///
    /// # Safety
    /// The stream exists; `address` is 4 bytes that the device may read, aligned, until the work is done.
    pub(in crate::cuda) unsafe fn wait_value(
        &self,
        stream: Stream,
        address: Address,
        value: u32,
    ) -> Result<()> {
        // SAFETY: the caller's promise. 0: greater or equal, by the sign of the difference.
        unsafe { self.cuStreamWaitValue32_v2(stream.0, address, value, 0) }
    }

    /// Whether several waits can be queued in one call.
    pub(in crate::cuda) fn has_batches(&self) -> bool {
        self.table.cuStreamBatchMemOp_v2.is_some()
    }

    /// Holds the stream until each of these 32 bits has reached its value, in one call; at most [`BATCH`] of them.
    ///
    /// # Safety
    /// As for `wait_value`, for each of them.
    pub(in crate::cuda) unsafe fn wait_values(&self, stream: Stream, waits: &[(Address, u32)]) -> Result<()> {
        let wait = |&(address, value): &(Address, u32)| {
            let mut operation = sys::CUstreamBatchMemOpParams { pad: [0; 6] };
            operation.waitValue = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st {
                operation: sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_32,
                address,
                __bindgen_anon_1:
                    sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st__bindgen_ty_1 {
                        value,
                    },
                // Greater or equal, by the sign of the difference.
                flags: 0,
                alias: 0,
            };
            operation
        };
        let mut operations: Vec<_> = waits.iter().map(wait).collect();
        let count = operations.len() as u32;
        // SAFETY: the caller's promise; as many operations as said.
        unsafe { self.cuStreamBatchMemOp_v2(stream.0, count, operations.as_mut_ptr(), 0) }
    }

    /// A new event.
    pub(in crate::cuda) fn event(&self) -> Result<Event> {
        let mut event = std::ptr::null_mut();
        // SAFETY: writes one handle. 2: without a time, which is quicker.
        unsafe { self.cuEventCreate(&raw mut event, 2) }.map(|()| Event(event))
    }

    /// # Safety
    /// Stream and event exist.
    pub(in crate::cuda) unsafe fn record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuEventRecord(event.0, stream.0) }
    }

    /// Has a stream wait for what was queued before the event was recorded last.
    ///
    /// # Safety
    /// Stream and event exist.
    pub(in crate::cuda) unsafe fn wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuStreamWaitEvent(stream.0, event.0, 0) }
    }

    /// Whether everything that was queued before the event is done.
    ///
    /// # Safety
    /// The event exists.
    #[inline]
    pub(in crate::cuda) unsafe fn is_done(&self, event: Event) -> Result<bool> {
        // SAFETY: the caller's promise.
        self.poll("cuEventQuery", self.table.cuEventQuery.map(|call| unsafe { call(event.0) }))
    }

    /// The same for a caller that only wants to let go of memory. What cannot be asked now counts as not done, except after
    /// errors behind which nothing runs any more.
    ///
    /// # Safety
    /// The event exists.
    pub(in crate::cuda) unsafe fn is_over(&self, event: Event) -> bool {
        // SAFETY: the caller's promise.
        match unsafe { self.is_done(event) } {
            Ok(done) => done,
            Err(error) => Self::is_fatal(&error),
        }
    }

    /// Whether nothing runs any more behind this error.
    pub(in crate::cuda) fn is_fatal(error: &Error) -> bool {
        matches!(error, Error::Device { name, .. } if FATAL.iter().any(|fatal| name.contains(fatal)))
    }

    /// Lets this thread ask the driver while another one captures a graph.
    pub(in crate::cuda) fn relax_capture(&self) {
        // For good.
        std::mem::forget(self.relaxed());
    }

    /// # Safety
    /// The event is the caller's own and is used no more.
    pub(in crate::cuda) unsafe fn destroy_event(&self, event: Event) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuEventDestroy_v2(event.0) }
    }

    /// Copies between any two places that the device and the host know.
    ///
    /// # Safety
    /// The stream exists; `len` bytes are there on both sides until the work is done, and nobody counts on them.
    pub(in crate::cuda) unsafe fn copy(
        &self,
        to: Address,
        from: Address,
        len: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemcpyAsync(to, from, len, stream.0) }
    }

    /// Sets bytes.
    ///
    /// # Safety
    /// As for `copy`.
    pub(in crate::cuda) unsafe fn fill(
        &self,
        to: Address,
        value: u8,
        len: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemsetD8Async(to, value, len, stream.0) }
    }
}
