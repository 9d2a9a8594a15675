//! Graphs: work that is recorded from a stream and run again.

use cudarc::driver::sys;

use super::{Driver, Stream};
use crate::error::Result;

/// CU_STREAM_CAPTURE_MODE_RELAXED.
const RELAXED: u32 = 2;

/// A graph that can be run.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Executable(sys::CUgraphExec);

// SAFETY: a handle, which any thread may use.
unsafe impl Send for Executable {}
// SAFETY: as above.
unsafe impl Sync for Executable {}

/// This thread may ask the driver anything while a graph is recorded, as long as this lives.
pub(in crate::cuda) struct Relaxed<'d> {
    driver: &'d Driver,
    before: u32,
}

impl Driver {
    /// See [`Relaxed`].
    pub(in crate::cuda) fn relaxed(&self) -> Relaxed<'_> {
        let mut mode = RELAXED;
        // SAFETY: exchanges one number. A driver without it captures nothing that could be disturbed.
        let _ = unsafe { self.cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        Relaxed { driver: self, before: mode }
    }

    /// From now on what is queued on the stream is recorded, and does not run.
    ///
    /// # Safety
    /// A stream of the caller's own.
    pub(in crate::cuda) unsafe fn begin_capture(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            self.cuStreamBeginCapture_v2(stream.0, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)
        }
    }

    /// The graph of what was recorded.
    ///
    /// # Safety
    /// A stream of the caller's own, which is recorded.
    pub(in crate::cuda) unsafe fn end_capture(&self, stream: Stream) -> Result<Executable> {
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the caller's promise; writes one handle.
        unsafe { self.cuStreamEndCapture(stream.0, &raw mut graph) }?;
        // SAFETY: the graph was just made, and is used no more after that.
        unsafe {
            let made = self.cuGraphInstantiateWithFlags(&raw mut executable, graph, 0);
            let _ = self.cuGraphDestroy(graph);
            made?;
            let made = Executable(executable);
            self.cuGraphUpload(executable, stream.0).inspect_err(|_| drop(self.destroy_graph(made)))?;
            Ok(made)
        }
    }

    /// Queues a run of the graph.
    ///
    /// # Safety
    /// Both exist; all memory that the graph works on is there until the work is done.
    pub(in crate::cuda) unsafe fn launch_graph(&self, graph: Executable, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuGraphLaunch(graph.0, stream.0) }
    }

    /// # Safety
    /// The caller's own, which is not launched any more. (What was launched still runs.)
    pub(in crate::cuda) unsafe fn destroy_graph(&self, graph: Executable) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuGraphExecDestroy(graph.0) }
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        // SAFETY: exchanges one number.
        let _ = unsafe { self.driver.cuThreadExchangeStreamCaptureMode(&raw mut self.before) };
    }
}
