//! Graphs: what is queued while a stream records, and who keeps what it needs.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use super::{CudaQueue, Kept};
use crate::cuda::driver::Executable;
use crate::device::Queue;
use crate::error::{Error, Result};

impl CudaQueue {
    /// Records what `work` queues instead of running it.
    pub(in crate::cuda) fn record<E: From<Error>>(
        &mut self,
        work: impl FnOnce(&mut dyn Queue) -> Result<(), E>,
    ) -> Result<Executable, E> {
        let gpu = self.gpu().clone();
        let _entered = gpu.enter()?;
        // SAFETY: a stream of ours.
        unsafe { gpu.driver.begin_capture(self.stream()) }?;
        self.recording.set(true);
        let worked = work(self);
        self.recording.set(false);
        // SAFETY: the stream is recorded since then.
        let recorded = unsafe { gpu.driver.end_capture(self.stream()) };
        let destroy = |graph: Executable| {
            // SAFETY: just made, and nobody has it.
            let _ = unsafe { gpu.driver.destroy_graph(graph) };
        };
        match (worked, recorded) {
            (Ok(()), recorded) => Ok(recorded?),
            (Err(error), recorded) => {
                recorded.into_iter().for_each(destroy);
                Err(error)
            }
        }
    }

    /// Adds what `work` queues to the graph that the owner of the stream records. The graph keeps what it needs, and `also`.
    pub(in crate::cuda) fn record_more<E: From<Error>>(
        &mut self,
        also: Box<dyn Any + Send>,
        work: impl FnOnce(&mut dyn Queue) -> Result<(), E>,
    ) -> Result<(), E> {
        let gpu = self.gpu().clone();
        let _entered = gpu.enter()?;
        let _relaxed = gpu.driver.relaxed();
        // The graph owns it before anything is recorded: what is recorded cannot be taken back.
        let kept = Arc::new(Mutex::new(Vec::<Kept>::new()));
        let owned = (kept.clone(), also, gpu.clone());
        let release = move || {
            let reaper = owned.2.reaper.clone();
            reaper.drop_later(Box::new(owned));
        };
        // SAFETY: the stream lives as long as the queue.
        unsafe { gpu.driver.own_by_graph(self.stream(), Box::new(release)) }?;
        self.recording.set(true);
        let worked = work(self);
        self.recording.set(false);
        kept.lock().unwrap_or_else(PoisonError::into_inner).append(&mut self.recorded.borrow_mut());
        worked
    }

    /// Runs what was recorded.
    pub(in crate::cuda) fn run(&mut self, graph: Executable) -> Result<()> {
        let gpu = self.gpu().clone();
        let _entered = gpu.enter()?;
        // Until this run is done, also if the queue goes before.
        let kept = self.recorded.borrow().clone();
        // SAFETY: the graph exists, by whoever recorded it here; what it works on is kept.
        self.submit(kept.into_iter().chain([Kept::Order]), |stream| unsafe {
            gpu.driver.launch_graph(graph, stream)
        })
    }
}
