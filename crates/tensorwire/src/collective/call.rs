//! An operation before it begins.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use tensorwire_device::{Deadline, Dtype, Mark, Queue};

use super::Collectives;
use super::cancel::driver_failed;
use super::operation::Operation;
use super::work::Work;
use crate::error::Result;
use crate::shm::control::Why;
use crate::shm::kind::{Kind, Path};

/// An operation that has not begun. [`wait`](Self::wait) runs it now, [`start`](Self::start) runs it in the
/// background.
#[must_use = "a call does nothing until it is waited for or started"]
pub struct Call<'a> {
    group: &'a Arc<Collectives>,
    operation: Result<Operation>,
    until: Until,
    /// What was queued before the operation begins.
    after: Vec<Mark>,
}

impl<'a> Call<'a> {
    pub(crate) fn new(group: &'a Arc<Collectives>, make: impl FnOnce() -> Result<Operation>) -> Self {
        let ranks = &group.ranks;
        let operation = make().and_then(|operation| {
            operation.check(ranks.world())?;
            operation.check_overlap(ranks.rank, ranks.world())?;
            Ok(operation)
        });
        Self { group, operation, until: Until::Group, after: Vec::new() }
    }

    /// A barrier, which carries nothing.
    pub(crate) fn barrier(group: &'a Arc<Collectives>) -> Self {
        let operation = Ok(Operation::new(Kind::Barrier, Dtype::U8));
        Self { group, operation, until: Until::Group, after: Vec::new() }
    }

    /// Sets when the operation must be over at the latest. Otherwise the group's time-out counts.
    pub fn deadline(self, deadline: Deadline) -> Self {
        Self { until: Until::Call(deadline), ..self }
    }

    /// The same for a wrapper that keeps the time-out of the group itself: errors say that it was the group's.
    #[doc(hidden)]
    pub fn deadline_of_group(self, deadline: Deadline) -> Self {
        Self { until: Until::GroupAt(deadline), ..self }
    }

    /// Takes this path instead of the one that fits the size. All ranks must ask for the same path. Groups on several hosts
    /// refuse the call.
    pub fn via(mut self, path: Path) -> Self {
        self.operation = self.operation.and_then(|mut operation| {
            operation.path = Some(path);
            operation.check(self.group.ranks.world())?;
            Ok(operation)
        });
        self
    }

    /// Its memory is the library's own choice: strict mode does not blame the caller for it.
    pub(crate) fn on_memory_made_here(mut self) -> Self {
        if let Ok(operation) = &mut self.operation {
            operation.made_here = true;
        }
        self
    }

    /// Runs the operation on this thread, behind operations that were started before.
    pub fn wait(mut self) -> Result<()> {
        let now = Instant::now();
        let deadline = self.by(now);
        match &mut self.operation {
            // It stays where it is: it is large, and small operations take less time than moving it about.
            Ok(operation) => {
                operation.late = self.until.whose();
                self.group.wait(operation, (now, deadline), self.after)
            }
            Err(error) => Err(error.clone()),
        }
    }

    /// Starts the operation and returns at once. Operations of a group run in the order in which they are started.
    ///
    /// Tensors of a GPU are worked on by a queue of the group, behind what [`after`](Self::after) named.
    /// [`Work::wait_on`] orders another queue behind the operation.
    pub fn start(self) -> Result<Work> {
        let deadline = self.by(Instant::now());
        let mut operation = self.operation?;
        operation.late = self.until.whose();
        self.group.start(operation, deadline, self.after)
    }

    /// Has the operation begin behind everything that is on `queue` now, and behind what other queues had when this was called
    /// with them. For [`start`](Self::start), and for [`wait`](Self::wait) where no tensor is a GPU's. The deadline counts from
    /// now on: a queue that has not come so far by then lets the operation time out, for all ranks.
    pub fn after(mut self, queue: &mut dyn Queue) -> Result<Self> {
        let gpu = self.operation.as_ref().ok().and_then(Operation::gpu);
        let failed = |error: tensorwire_device::Error| driver_failed(&self.group.ranks, gpu, error.into());
        let mark = queue.mark().map_err(failed)?;
        self.after.push(mark);
        Ok(self)
    }

    /// Puts the operation on a queue of the device that its tensors live on, behind what is there. Returns when all ranks
    /// have called and its steps are queued; what is queued from now on finds the result. An error that comes later is in
    /// the work.
    ///
    /// Tensors in host memory are worked on by this thread, as soon as the queue has come so far.
    pub fn on(mut self, queue: &mut dyn Queue) -> Result<Work> {
        let now = Instant::now();
        let deadline = self.by(now);
        let mut operation = self.operation.clone()?;
        operation.late = self.until.whose();
        if operation.gpu().is_some() {
            return self.group.queue(operation, (now, deadline), queue);
        }
        let what = operation.kind.name();
        self.until = self.until.at(deadline);
        self.after(queue)?.wait().map(|()| Work::done(what))
    }

    fn by(&self, now: Instant) -> Deadline {
        self.until.deadline().unwrap_or_else(|| Deadline::after_moment(now, self.group.ranks.timeout))
    }
}

/// When a call must be over.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) enum Until {
    /// As the group says.
    #[default]
    Group,
    /// Then, as the group's user has said.
    GroupAt(Deadline),
    /// Then, as the caller has said.
    Call(Deadline),
}

impl Until {
    /// Whose time-out it is.
    pub(crate) fn whose(self) -> Why {
        match self {
            Self::Group | Self::GroupAt(_) => Why::GroupTimedOut,
            Self::Call(_) => Why::CallTimedOut,
        }
    }

    /// The end, if somebody has said when it is.
    pub(crate) fn deadline(self) -> Option<Deadline> {
        match self {
            Self::Group => None,
            Self::GroupAt(deadline) | Self::Call(deadline) => Some(deadline),
        }
    }

    /// The same with an end, which is kept from now on.
    fn at(self, deadline: Deadline) -> Self {
        match self {
            Self::Group | Self::GroupAt(_) => Self::GroupAt(deadline),
            Self::Call(_) => Self::Call(deadline),
        }
    }

    pub(crate) fn of(self, call: Call<'_>) -> Call<'_> {
        match self {
            Self::Group => call,
            Self::GroupAt(deadline) => call.deadline_of_group(deadline),
            Self::Call(deadline) => call.deadline(deadline),
        }
    }
}

impl fmt::Debug for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.operation {
            Ok(operation) => write!(f, "Call({})", operation.header(0)),
            Err(error) => write!(f, "Call({error})"),
        }
    }
}
