//! Graphs: work that is recorded from a stream and run again.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::{Driver, Stream};
use crate::error::{Error, Result};

/// CU_STREAM_CAPTURE_MODE_RELAXED.
const RELAXED: u32 = 2;

/// CU_STREAM_CAPTURE_STATUS_ACTIVE.
const ACTIVE: u32 = 1;

/// CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, and CU_GRAPH_USER_OBJECT_MOVE: the graph takes the reference of whoever made the object.
const NO_SYNC: u32 = 1;
const MOVE: u32 = 1;

/// What is called when nothing needs an object of a graph any more. The driver calls it, and it must not call the driver.
pub(in crate::cuda) type Release = Box<dyn FnOnce() + Send>;

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

    /// Has the graph that a stream records own something: `release` is called when the graph, its copies, and all that was made
    /// of them to be run, have gone.
    ///
    /// # Safety
    /// The stream exists.
    pub(in crate::cuda) unsafe fn own_by_graph(&self, stream: Stream, release: Release) -> Result<()> {
        let (mut status, mut id, mut count) = (0, 0, 0);
        let (mut graph, mut dependencies) = (std::ptr::null_mut(), std::ptr::null());
        // SAFETY: the caller's promise; writes two numbers, a handle, and a list that is not looked at.
        unsafe {
            self.cuStreamGetCaptureInfo_v2(
                stream.0,
                &raw mut status,
                &raw mut id,
                &raw mut graph,
                &raw mut dependencies,
                &raw mut count,
            )
        }?;
        if status != ACTIVE || graph.is_null() {
            return Err(Error::misuse("the stream records no graph, or its recording has failed"));
        }
        let mut object = std::ptr::null_mut();
        let data = Box::into_raw(Box::new(release)).cast::<c_void>();
        // SAFETY: writes one handle; the data is what `released` takes, and nobody else has it.
        let made = unsafe { self.cuUserObjectCreate(&raw mut object, data, Some(released), 1, NO_SYNC) };
        if let Err(error) = made {
            // SAFETY: as it was made above; the driver has not taken it.
            drop(unsafe { Box::from_raw(data.cast::<Release>()) });
            return Err(error);
        }
        // SAFETY: the graph is being recorded; the object was just made, and its one reference goes to the graph.
        let taken = unsafe { self.cuGraphRetainUserObject(graph, object, 1, MOVE) };
        if taken.is_err() {
            // SAFETY: the one reference, which the graph has not taken.
            let _ = unsafe { self.cuUserObjectRelease(object, 1) };
        }
        taken
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

/// Called by the driver, once.
///
/// # Safety
/// The data is a `Box<Release>` that was given away.
unsafe extern "C" fn released(data: *mut c_void) {
    // SAFETY: the caller's promise.
    let release = unsafe { Box::from_raw(data.cast::<Release>()) };
    release();
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        // SAFETY: exchanges one number.
        let _ = unsafe { self.driver.cuThreadExchangeStreamCaptureMode(&raw mut self.before) };
    }
}
