//! A point in the work of a queue: an event. It goes back to its GPU when nobody needs the point any more.

use std::fmt;
use std::sync::Arc;

use super::driver::{Driver, Event, Stream};
use super::ending;
use super::gpu::Inner;
use crate::device::Point;
use crate::error::Result;

/// Behind all that was queued on a stream when it was made. It keeps the GPU open.
pub(super) struct CudaPoint {
    gpu: Arc<Inner>,
    event: Event,
}

impl CudaPoint {
    /// Behind all that is queued on the stream now. The thread is in the GPU's context.
    ///
    /// # Safety
    /// The stream exists and is the GPU's.
    pub(super) unsafe fn behind(gpu: &Arc<Inner>, stream: Stream) -> Result<Arc<Self>> {
        let point = Self { gpu: gpu.clone(), event: gpu.take_event()? };
        // SAFETY: the caller's promise; the event is the point's own.
        unsafe { gpu.driver.record(point.event, stream) }?;
        Ok(Arc::new(point))
    }

    /// The event, which lives as long as the point does. A stream that was told to wait for it does not need it any more.
    pub(super) fn event(&self) -> Event {
        self.event
    }

    /// Whether all before it is done. The thread is in the GPU's context.
    #[inline]
    pub(super) fn is_done(&self) -> Result<bool> {
        // SAFETY: the event is the point's own.
        unsafe { self.gpu.driver.is_done(self.event) }
    }

    /// The same for a caller that only wants to let go of memory.
    pub(super) fn is_left(&self) -> bool {
        // SAFETY: as above.
        unsafe { self.gpu.driver.is_over(self.event) }
    }
}

impl Point for CudaPoint {
    fn is_passed(&self) -> Result<bool> {
        let _entered = self.gpu.enter()?;
        self.is_done()
    }

    fn is_over(&self) -> bool {
        match self.gpu.enter() {
            Ok(_entered) => self.is_left(),
            Err(error) => ending::has_begun() || Driver::is_fatal(&error),
        }
    }
}

impl Drop for CudaPoint {
    fn drop(&mut self) {
        // In a forked child it is the parent's. A stream that was told to wait for it waits for what was queued before, also
        // if it is recorded anew.
        if self.gpu.birth.is_ours() {
            self.gpu.give_event(self.event);
        }
    }
}

impl fmt::Debug for CudaPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a mark of {:?}", self.gpu)
    }
}
