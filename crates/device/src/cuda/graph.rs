//! Work that is recorded once and run again and again: a CUDA graph with a stream of its own.

use std::fmt;

use super::driver::Executable;
use super::gpu::{Gpu, Inner};
use super::queue::CudaQueue;
use crate::deadline::Deadline;
use crate::device::Queue;
use crate::error::{Error, Result};
use crate::flag::Abort;

/// Recorded work of a GPU. It keeps the memory that it works on.
pub struct Graph {
    queue: CudaQueue,
    executable: Executable,
}

impl Gpu {
    /// Records what `work` queues, without running it. `work` may queue copies and reductions, but no signals, waits or marks.
    pub fn record<E: From<Error>>(
        &self,
        work: impl FnOnce(&mut dyn Queue) -> Result<(), E>,
    ) -> Result<Graph, E> {
        let mut queue = CudaQueue::new(self.inner().clone())?;
        let executable = queue.record(work)?;
        Ok(Graph { queue, executable })
    }
}

impl Graph {
    /// Queues one run of it.
    pub fn launch(&mut self) -> Result<()> {
        self.queue.run(self.executable)
    }

    /// Blocks until all runs so far are done.
    pub fn finish(&mut self, deadline: Deadline) -> Result<()> {
        self.queue.finish(&Abort::local(), deadline)
    }

    fn gpu(&self) -> &Inner {
        self.queue.gpu()
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu().enter() {
            // SAFETY: made by `record`, and launched no more.
            let _ = unsafe { self.gpu().driver.destroy_graph(self.executable) };
        }
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({:?})", self.queue)
    }
}
