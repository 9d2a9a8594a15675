//! Operations on tensors of GPUs that do not go straight between them: the plan of the host runs on copies in memory of the host.
//! Some ranks have their tensors on the host, or a tensor is in memory that cannot be given to other processes.
//!
//! The ranks have met. The queue copies what this rank gives into registered memory of the host, and this thread waits for that.
//! Then it runs the plan, as a rank with tensors on the host does. What this rank gets is copied back by the queue.

use tensorwire_device::{Deadline, DeviceId, Mark, Queue, Span};

use super::buffer::Buffer;
use super::exec::{Executor, Queued};
use super::lines::{Lines, Stop};
use super::operation::Operation;
use super::runner::Met;
use crate::error::Result;
use crate::interrupt;
use crate::ranks::Ranks;
use crate::shm::control::Note;
use crate::shm::sentence::other_work;

/// An operation on memory of the host that stands for one on a GPU.
pub(super) struct Stage {
    operation: Operation,
    /// What is copied before and after it: into, from.
    before: Vec<(Span, Span)>,
    after: Vec<(Span, Span)>,
}

impl Stage {
    pub(super) fn new(group: &Ranks, operation: &Operation, me: usize) -> Result<Self> {
        let (gives, gets) = operation.gives_and_gets(me);
        let mut before: Vec<(Span, Span)> = Vec::new();
        let mut after = Vec::new();
        let room = |len: usize| -> Result<Span> {
            Ok(Span::whole(group.context.pool(&DeviceId::Host)?.alloc(len)?).slice(0..len)?)
        };
        for span in operation.input.spans().filter(|_| gives) {
            before.push((room(span.len())?, span.clone()));
        }
        for span in operation.output.spans().filter(|_| gets) {
            // A tensor that is reduced in place stays one.
            let same = before.iter().find(|(_, from)| from.view().is_same(span.view()));
            let there = same.map_or_else(|| room(span.len()), |(there, _)| Ok(there.clone()))?;
            after.push((span.clone(), there));
        }
        let input = Buffer::of(before.iter().map(|(there, _)| there.clone()));
        let output = Buffer::of(after.iter().map(|(_, there)| there.clone()));
        Ok(Self { operation: operation.on_host(input, output), before, after })
    }
}

impl Executor {
    /// Runs an operation on tensors of a GPU through memory of the host, on a queue that is behind all that it must be behind. The
    /// copies of what this rank gets are queued then, with a mark behind them.
    pub(super) fn put_staged(
        &mut self,
        group: &Ranks,
        met: &Met<'_>,
        stage: &Stage,
        queue: &mut dyn Queue,
        deadline: Deadline,
        queued: &mut Queued,
    ) -> Result<(), Stop> {
        queue.begin(None)?;
        met.operation.pack(queue)?;
        for (into, from) in &stage.before {
            queue.copy(into.view(), from.view(), Default::default())?;
        }
        let here = queue.mark()?;
        settle(&self.lines, group, &here, deadline)?;
        let (shape, path, signalled) = (met.shape.clone(), met.path, met.signalled);
        let met_on_host = Met { operation: &stage.operation, shape, path, peers: Vec::new(), signalled };
        queued.staged = Some(self.runner.run(&mut self.lines, &met_on_host, deadline)?);
        for (into, from) in &stage.after {
            queue.copy(into.view(), from.view(), Default::default())?;
        }
        met.operation.unpack(queue)?;
        queued.mark = Some(queue.mark()?);
        Ok(())
    }
}

/// Waits until this rank's queue has come to a mark.
fn settle(lines: &Lines, group: &Ranks, mark: &Mark, deadline: Deadline) -> Result<(), Stop> {
    match interrupt::in_slices(deadline, |slice| mark.wait(lines.stop(), slice)).map_err(Stop::Own)? {
        Err(tensorwire_device::Error::TimedOut) => Err(Stop::QueuesLate(own_queue(group))),
        other => Ok(other?),
    }
}

/// Only this rank's own queue was awaited.
pub(super) fn own_queue(group: &Ranks) -> Note {
    let text =
        format!("it waited for {}; {}", group.described_queues(&[group.control.me()]), other_work(false));
    Note { ranks: vec![group.rank], text }
}
