//! Queues that are made once and used again.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tensorwire_device::{Abort, Deadline, DeviceId, Mark, Queue};

use super::Context;
use crate::error::Result;

/// Queues that nobody uses just now, by device, and whether they send: a send is never behind a receive that waits.
#[derive(Debug, Default)]
pub(crate) struct IdleQueues(Mutex<Idle>);

type Idle = HashMap<(DeviceId, bool), Vec<Box<dyn Queue>>>;

impl IdleQueues {
    /// One for new work behind these marks. It looks at no abort words.
    pub(crate) fn take(
        &self,
        context: &Context,
        (device, sends): (&DeviceId, bool),
        after: &[Mark],
    ) -> Result<Box<dyn Queue>> {
        let idle = self.lock().get_mut(&(device.clone(), sends)).and_then(Vec::pop);
        let mut queue = match idle {
            Some(queue) => queue,
            None => context.device(device)?.queue()?,
        };
        for mark in after {
            queue.begin(None)?;
            queue.follow(mark, &Abort::local(), Deadline::after(Duration::MAX))?;
        }
        Ok(queue)
    }

    /// Keeps one for others, unless it does not work any more.
    pub(crate) fn give_back(&self, (device, sends): (&DeviceId, bool), mut queue: Box<dyn Queue>) {
        if queue.begin(None).is_ok() {
            self.lock().entry((device.clone(), sends)).or_default().push(queue);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Idle> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
