//! Queues of GPUs, as one message uses them.
//!
//! What is put on them waits for nobody but the caller's own queues: a reader looks whether the sender's data is ready before it queues a
//! copy of it. So every copy that is queued is made, and a queue has no errors of others to tell.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorwire_device::{Abort, Deadline, DeviceId, Mark, Queue};

use crate::context::{Context, IdleQueues};
use crate::error::{Error, Result};
use crate::interrupt::Pace;

/// A queue for each GPU that the message is on. They are given back when this is dropped; their work goes on.
pub(super) struct Lanes {
    context: Arc<Context>,
    idle: Arc<IdleQueues>,
    sends: bool,
    after: Vec<Mark>,
    open: Vec<(DeviceId, Box<dyn Queue>)>,
}

impl Lanes {
    /// Opens none yet. What is put on them is done behind these marks.
    pub(super) fn new(context: &Arc<Context>, idle: &Arc<IdleQueues>, sends: bool, after: &[Mark]) -> Self {
        Self { context: context.clone(), idle: idle.clone(), sends, after: after.to_vec(), open: Vec::new() }
    }

    /// The queue of a GPU.
    pub(super) fn of(&mut self, gpu: &DeviceId) -> Result<&mut dyn Queue> {
        let at = match self.open.iter().position(|(open, _)| open == gpu) {
            Some(at) => at,
            None => {
                let queue = self.idle.take(&self.context, (gpu, self.sends), &self.after)?;
                self.open.push((gpu.clone(), queue));
                self.open.len() - 1
            }
        };
        Ok(&mut *self.open[at].1)
    }

    /// What is put on them from now on is done behind these marks, too: points of queues of this process, so that nothing waits for others.
    pub(super) fn begin_behind(&mut self, marks: &[Mark]) -> Result<()> {
        for queue in self.all() {
            follow(queue, marks)?;
        }
        self.after.extend_from_slice(marks);
        Ok(())
    }

    /// All that are in use.
    pub(super) fn all(&mut self) -> impl Iterator<Item = &mut (dyn Queue + 'static)> {
        self.open.iter_mut().map(|(_, queue)| &mut **queue)
    }

    /// Whether memory of a GPU is ready only behind something.
    pub(super) fn is_behind(&self, gpu: &DeviceId) -> bool {
        !self.after.is_empty() || self.open.iter().any(|(open, _)| open == gpu)
    }

    /// Behind all that is on them.
    pub(super) fn marks(&mut self) -> Result<Vec<Mark>> {
        self.all().map(|queue| Ok(queue.mark()?)).collect()
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        for (gpu, queue) in self.open.drain(..) {
            self.idle.give_back((&gpu, self.sends), queue);
        }
    }
}

fn follow(queue: &mut dyn Queue, marks: &[Mark]) -> Result<()> {
    for mark in marks {
        queue.begin(None)?;
        queue.follow(mark, &Abort::local(), Deadline::after(Duration::MAX))?;
    }
    Ok(())
}

/// Waits until all marks are passed.
pub(super) fn pass(marks: &[Mark], doing: &str, by: Deadline) -> Result<()> {
    let (begin, mut pace) = (Instant::now(), Pace::new());
    for mark in marks {
        loop {
            match mark.wait(&Abort::local(), pace.until(by)) {
                Ok(()) => break,
                Err(tensorwire_device::Error::TimedOut) if by.passed() => {
                    let missing = "a queue of this process has not come so far";
                    return Err(Error::timed_out(doing, begin.elapsed(), missing));
                }
                Err(tensorwire_device::Error::TimedOut) => pace.look(Instant::now())?,
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}
