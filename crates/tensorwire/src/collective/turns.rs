//! The operations of one rank in one group run one at a time, first come, first served.
//!
//! A call that is waited for runs on the caller's thread if no other operation is in line. All other operations go
//! to a worker thread. The first operation that needs the worker starts it.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use tensorwire_device::gpu::background;
use tensorwire_device::latch::Latch;
use tensorwire_device::sync::{AtomicUsize, Ordering};
use tensorwire_device::{Deadline, Dtype, Mark, Queue};

use super::Collectives;
use super::exec::{Executor, On};
use super::flight::{Flights, both};
use super::operation::Operation;
use super::work::{Completion, Work};
use crate::error::{Error, Result};
use crate::interrupt::{self, Pace, is_interrupt};
use crate::ranks::{Ranks, closed};
use crate::shm::control::Cause;
use crate::shm::cores::Thread;

/// See the module.
pub(crate) struct Turns {
    executor: Mutex<Executor>,
    waiting: Arc<Waiting>,
    flights: Arc<Flights>,
}

/// The operations that wait for their turn.
#[derive(Default)]
struct Waiting {
    state: Mutex<State>,
    turn: Condvar,
    /// How many are in line; a group that is closed has one more, for good.
    pending: AtomicUsize,
}

#[derive(Default)]
struct State {
    line: VecDeque<Queued>,
    /// How many have been in line.
    tickets: u64,
    worker: Option<ThreadId>,
    /// Operations that were started and are to go onto queues of devices, and are not there yet.
    unqueued: usize,
    /// The rank leaves when the line is empty, and nothing comes behind.
    closing: Option<Arc<Collectives>>,
    closed: bool,
}

/// An operation that waits for its turn. It keeps its group alive.
struct Queued {
    ticket: u64,
    group: Arc<Collectives>,
    what: What,
}

// Nearly all are operations: a box would cost each of them an allocation.
#[allow(clippy::large_enum_variant)]
enum What {
    /// The worker runs it.
    Operation {
        operation: Operation,
        deadline: Deadline,
        completion: Completion,
        /// Here a thread that waits for the operation says that it was interrupted.
        interrupted: Option<Arc<OnceLock<Error>>>,
        /// What it comes behind on queues of devices.
        after: Vec<Mark>,
    },
    /// A thread runs it that has a queue of its own. The worker says when its turn has come, and waits until it is over.
    Turn(Arc<Turn>),
}

#[derive(Default)]
struct Turn {
    come: Latch<()>,
    over: Latch<()>,
}

impl Turn {
    /// Waits until it has come.
    fn await_by(&self, deadline: Deadline) -> Result<()> {
        let start = Instant::now();
        let mut pace = Pace::since(start);
        while self.come.wait(pace.until(deadline)).is_none() {
            let now = Instant::now();
            if deadline.instant() <= now {
                let text = "an operation that was begun before is not over";
                return Err(Error::timed_out("waiting for its turn", start.elapsed(), text));
            }
            pace.look(now)?;
        }
        Ok(())
    }

    /// Of a latch that nobody has a callback on.
    fn set(latch: &Latch<()>) {
        let _ = latch.set(());
    }
}

/// The turn of a thread, until it is dropped.
struct Taken(Arc<Turn>);

impl Drop for Taken {
    fn drop(&mut self) {
        Turn::set(&self.0.over);
    }
}

/// What the worker has to do.
enum Task {
    /// The first operation in line.
    Operation,
    /// To leave the group, which was closed.
    Leave,
}

impl Turns {
    pub(crate) fn new(executor: Executor, flights: &Arc<Flights>) -> Self {
        Self { executor: Mutex::new(executor), waiting: Arc::default(), flights: flights.clone() }
    }

    /// Runs an operation and gives how it ended. Nothing is left of the operation then.
    pub(crate) fn wait(
        &self,
        group: &Arc<Collectives>,
        operation: &mut Operation,
        time: (Instant, Deadline),
        after: Vec<Mark>,
    ) -> Result<()> {
        if operation.gpu().is_some() {
            return self.wait_for_queue(group, operation, time);
        }
        if after.is_empty()
            && self.waiting.pending.load(Ordering::Acquire) == 0
            && let Some(mut executor) = self.free()
        {
            return run(&mut executor, group, operation, time, Thread::Caller);
        }
        let empty = Operation::new(operation.kind, operation.dtype);
        self.wait_in_line(group, std::mem::replace(operation, empty), time.1, after)
    }

    /// Queues an operation on the group's own queue and waits for its end.
    #[cold]
    fn wait_for_queue(
        &self,
        group: &Arc<Collectives>,
        operation: &mut Operation,
        time: (Instant, Deadline),
    ) -> Result<()> {
        let operation = std::mem::replace(operation, Operation::new(operation.kind, operation.dtype));
        let (work, completion) = Work::queued(operation.kind.name(), &self.flights);
        let queued = self
            .queue_in_turn(group, operation, time, On::Own(&[]), completion)
            .inspect_err(|_| work.set_told())?;
        self.flights.wait_for(&work, queued)
    }

    /// Queues an operation on the caller's queue. Returns when its steps are there.
    pub(crate) fn queue(
        &self,
        group: &Arc<Collectives>,
        operation: Operation,
        time: (Instant, Deadline),
        on: &mut dyn Queue,
    ) -> Result<Work> {
        let (work, completion) = Work::queued(operation.kind.name(), &self.flights);
        let queued = self
            .queue_in_turn(group, operation, time, On::Queue(on), completion)
            .inspect_err(|_| work.set_told())?;
        if let Err(error) = queued {
            // Others may still work on the caller's memory, but not for long.
            both(Err(error), interrupt::without(|| work.wait()))?;
        }
        if group.ranks.context.config().strict {
            work.wait()?;
        }
        Ok(work)
    }

    /// Queues an operation on this thread, behind all that is in line. One whose turn has not come by its deadline, or before
    /// its caller was interrupted, is not begun: when its turn comes, it is cancelled.
    fn queue_in_turn(
        &self,
        group: &Arc<Collectives>,
        operation: Operation,
        time: (Instant, Deadline),
        on: On<'_>,
        completion: Completion,
    ) -> Result<Result<()>> {
        if self.waiting.pending.load(Ordering::Acquire) == 0
            && let Some(mut executor) = self.free()
        {
            return Ok(queue(&mut executor, group, operation, time, on, completion));
        }
        let turn = Arc::new(Turn::default());
        let ticket = self.enqueue(group, What::Turn(turn.clone()))?;
        let _taken = Taken(turn.clone());
        let mut both = Some((operation, completion));
        if let Err(error) = turn.await_by(time.1) {
            let gone = || {
                let (operation, completion) = both.take()?;
                let interrupted = Arc::new(OnceLock::new());
                if is_interrupt(&error) {
                    let _ = interrupted.set(error.clone());
                }
                let (deadline, interrupted) = (Deadline::at(time.0), Some(interrupted));
                Some(What::Operation { operation, deadline, completion, interrupted, after: Vec::new() })
            };
            if self.waiting.replace(ticket, gone) {
                return Err(error);
            }
        }
        let Some((operation, completion)) = both else { return Err(closed()) };
        let mut executor = self.executor.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(queue(&mut executor, group, operation, time, on, completion))
    }

    /// The executor, if nobody has it.
    fn free(&self) -> Option<MutexGuard<'_, Executor>> {
        match self.executor.try_lock() {
            Ok(executor) => Some(executor),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Waits for the turn of an operation and for its end. One whose turn has not come by its deadline, or before its
    /// caller was interrupted, never touches memory: when its turn comes, it is cancelled.
    fn wait_in_line(
        &self,
        group: &Arc<Collectives>,
        operation: Operation,
        deadline: Deadline,
        after: Vec<Mark>,
    ) -> Result<()> {
        let interrupted = Arc::new(OnceLock::new());
        let (work, completion) = Work::pending(operation.kind.name());
        let what = What::Operation {
            operation,
            deadline,
            completion,
            interrupted: Some(interrupted.clone()),
            after,
        };
        let ticket = self.enqueue(group, what)?;
        let waited = match work.wait_by(deadline) {
            Err(error) if error.is_timeout() && self.waiting.has(ticket) => return Err(error),
            // The operation itself runs on a thread that has no hook.
            Err(error) if is_interrupt(&error) => Err(error),
            _ => work.wait(),
        };
        // The wait behind its deadline may have been interrupted just as well.
        let Err(error) = waited else { return Ok(()) };
        if is_interrupt(&error) {
            let _ = interrupted.set(error.clone());
            if !self.waiting.has(ticket) {
                // The worker sees it soon; until then the operation works on the caller's memory.
                let _ = interrupt::without(|| work.wait());
            }
        }
        Err(error)
    }

    /// Puts an operation in line.
    pub(crate) fn start(
        &self,
        group: &Arc<Collectives>,
        operation: Operation,
        deadline: Deadline,
        after: Vec<Mark>,
    ) -> Result<Work> {
        let what = operation.kind.name();
        let (work, completion) = match operation.gpu() {
            Some(_) => Work::queued(what, &self.flights),
            None => Work::pending(what),
        };
        self.enqueue(group, What::Operation { operation, deadline, completion, interrupted: None, after })?;
        Ok(work)
    }

    /// Waits until all that was started is on the queues of devices, where its errors can be told. The worker itself waits for
    /// nothing.
    fn await_queued<'a>(&self, mut state: MutexGuard<'a, State>) -> (MutexGuard<'a, State>, Result<()>) {
        let mut pace = Pace::new();
        while state.unqueued > 0 && state.worker != Some(std::thread::current().id()) {
            let slice =
                pace.until(Deadline::after(Duration::from_secs(3600))).remaining().unwrap_or_default();
            state = self.waiting.turn.wait_timeout(state, slice).unwrap_or_else(PoisonError::into_inner).0;
            if let Err(error) = pace.look(Instant::now()) {
                return (state, Err(error));
            }
        }
        (state, Ok(()))
    }

    /// Gives the ticket.
    fn enqueue(&self, group: &Arc<Collectives>, what: What) -> Result<u64> {
        let mut state = self.waiting.lock();
        if state.closed {
            return Err(closed());
        }
        self.need_worker(&mut state)?;
        self.waiting.pending.fetch_add(1, Ordering::AcqRel);
        state.tickets += 1;
        let ticket = state.tickets;
        state.unqueued += usize::from(what.goes_onto_queue());
        state.line.push_back(Queued { ticket, group: group.clone(), what });
        drop(state);
        self.waiting.turn.notify_all();
        Ok(ticket)
    }

    fn need_worker(&self, state: &mut State) -> Result<()> {
        if state.worker.is_none() {
            let waiting = self.waiting.clone();
            let worker = std::thread::Builder::new()
                .name("tensorwire-work".into())
                .spawn(move || waiting.work())
                .map_err(|error| Error::io("starting the worker thread of a group", error))?;
            state.worker = Some(worker.thread().id());
        }
        Ok(())
    }

    /// Takes no more operations. The rank leaves behind those that are there: at once, or on the worker's thread, which
    /// can only log a mismatch that it finds then. Operations on GPUs that were started are waited for, to tell how they end.
    pub(crate) fn close(&self, group: &Arc<Collectives>) -> Result<()> {
        let mut state = self.waiting.lock();
        if state.closed {
            return Ok(());
        }
        state.closed = true;
        // No operation overtakes the end: one that comes later looks at the line and is refused there.
        self.waiting.pending.fetch_add(1, Ordering::AcqRel);
        let (mut state, queued) = self.await_queued(state);
        let idle = if state.line.is_empty() { self.free() } else { None };
        let left = if let Some(executor) = idle {
            drop(state);
            // Nothing runs, and nothing can begin: the executor is taken.
            group.leave(Some(executor))
        } else {
            match self.need_worker(&mut state) {
                Ok(()) => state.closing = Some(group.clone()),
                Err(error) => tracing::warn!("{error}: the rank leaves with the last handle on its group"),
            }
            drop(state);
            Ok(())
        };
        self.waiting.turn.notify_all();
        queued.and(left)
    }

    /// The executor, when nothing of this rank runs any more; nothing begins behind it.
    pub(super) fn take(&self) -> MutexGuard<'_, Executor> {
        self.waiting.lock().closed = true;
        self.waiting.turn.notify_all();
        self.executor.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Turns")
    }
}

impl What {
    /// Whether the worker puts it onto the queue of a device.
    fn goes_onto_queue(&self) -> bool {
        matches!(self, Self::Operation { operation, .. } if operation.gpu().is_some())
    }
}

/// One that was started, until it is on its queue or has failed before: also if what it holds panics.
struct Unqueued<'a>(&'a Waiting);

impl Drop for Unqueued<'_> {
    fn drop(&mut self) {
        self.0.lock().unqueued -= 1;
        self.0.turn.notify_all();
    }
}

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts something else in the place of what is still in line.
    fn replace(&self, ticket: u64, by: impl FnOnce() -> Option<What>) -> bool {
        let mut state = self.lock();
        let Some(queued) = state.line.iter_mut().find(|queued| queued.ticket == ticket) else { return false };
        let Some(what) = by() else { return false };
        debug_assert!(!queued.what.goes_onto_queue(), "only a turn is replaced");
        let more = usize::from(what.goes_onto_queue());
        queued.what = what;
        state.unqueued += more;
        true
    }

    fn has(&self, ticket: u64) -> bool {
        self.lock().line.iter().any(|queued| queued.ticket == ticket)
    }

    /// The worker thread.
    fn work(&self) {
        background();
        while let Some((group, task)) = self.next() {
            // What is dropped here may be the caller's, and panic. This thread has to go on: others wait in line.
            let done = catch_unwind(AssertUnwindSafe(|| match task {
                Task::Operation => self.work_for(group),
                Task::Leave => group.leave_unheard(),
            }));
            if done.is_err() {
                tracing::error!("something that an operation held has panicked when it was dropped");
            }
        }
    }

    /// Runs the first operation in line, which is of this group.
    fn work_for(&self, group: Arc<Collectives>) {
        let Ok(turns) = group.turns() else {
            // In a forked child, which has no such thread.
            self.lock().line.clear();
            return;
        };
        let mut executor = turns.executor.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Queued { group: own, what, .. }) = self.lock().line.pop_front() else { return };
        let (mut operation, deadline, completion, interrupted, after) = match what {
            What::Turn(turn) => {
                // Nobody overtakes it: it counts as waiting until it is over.
                drop(executor);
                Turn::set(&turn.come);
                while turn.over.wait(Deadline::after(Duration::from_secs(3600))).is_none() {}
                self.pending.fetch_sub(1, Ordering::Release);
                return;
            }
            What::Operation { operation, deadline, completion, interrupted, after } => {
                (operation, deadline, completion, interrupted, after)
            }
        };
        // From here on nobody can overtake it: the executor is taken.
        self.pending.fetch_sub(1, Ordering::Release);
        if operation.gpu().is_some() {
            let unqueued = Unqueued(self);
            let time = (Instant::now(), deadline);
            let on = On::Own(&after);
            let look = Rc::new(move || {
                interrupted.as_ref().and_then(|interrupted| interrupted.get().cloned()).map_or(Ok(()), Err)
            });
            // The work tells how it ends.
            let _ = interrupt::with_interrupt(look, || {
                queue(&mut executor, &own, operation, time, on, completion)
            });
            // Whoever closes the group takes the executor then.
            drop(executor);
            drop(unqueued);
            return;
        }
        let mut perform = || {
            let late = come(&after, &own.ranks, deadline);
            let start = Instant::now();
            // All ranks are told of an operation that does not begin in time. A caller that was interrupted in line has gone.
            let is_gone = interrupted.as_ref().is_some_and(|interrupted| interrupted.get().is_some());
            let deadline = if late.is_err() || is_gone { Deadline::at(start) } else { deadline };
            let result = run(&mut executor, &own, &mut operation, (start, deadline), Thread::Worker);
            (start, late.and(result))
        };
        let (start, result) = match interrupted.clone() {
            None => perform(),
            Some(interrupted) => {
                let look = Rc::new(move || interrupted.get().cloned().map_or(Ok(()), Err));
                interrupt::with_interrupt(look, perform)
            }
        };
        let duration = start.elapsed();
        drop(executor);
        // The last handle on the group may be one of these: after it, there is nothing to wait for.
        // What the caller put into the operation may panic; the result counts all the same.
        let dropped = catch_unwind(AssertUnwindSafe(|| drop((operation, own, group))));
        completion.finish(result, Some(duration));
        if let Err(panic) = dropped {
            resume_unwind(panic);
        }
    }

    /// Waits until there is something to do for a group; nothing when it is closed, which ends the wait.
    fn next(&self) -> Option<(Arc<Collectives>, Task)> {
        let mut state = self.lock();
        loop {
            if let Some(next) = state.line.front() {
                return Some((next.group.clone(), Task::Operation));
            }
            if let Some(group) = state.closing.take() {
                return Some((group, Task::Leave));
            }
            if state.closed {
                return None;
            }
            state = self.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Waits on this thread until queues have come so far. Whoever gives up hears from the operation why it is not begun.
pub(super) fn come(marks: &[Mark], ranks: &Ranks, deadline: Deadline) -> Result<()> {
    for mark in marks {
        let start = Instant::now();
        match interrupt::in_slices(deadline, |slice| mark.wait(&ranks.control.abort, slice))? {
            Err(tensorwire_device::Error::TimedOut) => {
                let text = "the queue of this rank that it comes behind has not come so far";
                return Err(Error::timed_out("waiting for a queue of a device", start.elapsed(), text));
            }
            // The operation finds out why.
            Err(tensorwire_device::Error::Aborted) => return Ok(()),
            other => other?,
        }
    }
    Ok(())
}

/// Runs an operation. A panic in it is our fault, and this rank does not know how far it came: the group fails, on all
/// ranks, and so does everything that waits in line.
fn run(
    executor: &mut Executor,
    group: &Arc<Collectives>,
    operation: &mut Operation,
    time: (Instant, Deadline),
    thread: Thread,
) -> Result<()> {
    let mut failed = None;
    // The error goes round what catches a panic: that would move its bytes twice, also where there is none.
    let caught = catch_unwind(AssertUnwindSafe(|| {
        if let Err(error) = executor.run(group, operation, time, thread) {
            failed = Some(error);
        }
    }));
    match (caught, failed) {
        (Ok(()), None) => Ok(()),
        (Ok(()), Some(error)) => Err(error),
        (Err(panic), _) => Err(panicked(executor, &group.ranks, operation, &*panic)),
    }
}

/// Queues an operation; the same for a panic.
fn queue(
    executor: &mut Executor,
    group: &Arc<Collectives>,
    operation: Operation,
    time: (Instant, Deadline),
    on: On<'_>,
    completion: Completion,
) -> Result<()> {
    let kind = operation.kind;
    let caught = catch_unwind(AssertUnwindSafe(|| {
        executor.queue(group, operation, time, Thread::Caller, on, completion)
    }));
    match caught {
        Ok(queued) => queued,
        Err(panic) => {
            let operation = Operation::new(kind, Dtype::U8);
            Err(panicked(executor, &group.ranks, &operation, &*panic))
        }
    }
}

#[cold]
fn panicked(
    executor: &mut Executor,
    ranks: &Ranks,
    operation: &Operation,
    panic: &(dyn Any + Send),
) -> Error {
    let said = panic.downcast_ref::<&str>().map(ToString::to_string);
    let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    let bug = Error::bug(format!("{} panicked: {said}", operation.kind));
    executor.give_up();
    ranks.fail(Cause::Aborted, ranks.rank, &bug.to_string());
    bug
}
