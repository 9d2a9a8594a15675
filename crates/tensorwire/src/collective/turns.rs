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
use std::time::Instant;

use tensorwire_device::sync::{AtomicUsize, Ordering};
use tensorwire_device::{Deadline, Queue};

use super::Collectives;
use super::exec::Executor;
use super::operation::Operation;
use super::work::{Completion, Work};
use crate::error::{Error, Result};
use crate::interrupt::{self, is_interrupt};
use crate::ranks::{Ranks, closed};
use crate::shm::control::{Cause, Control};
use crate::shm::cores::Thread;
use crate::shm::record::Recorder;

/// See the module.
pub(crate) struct Turns {
    executor: Mutex<Executor>,
    waiting: Arc<Waiting>,
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
    worker: bool,
    /// The rank leaves when the line is empty, and nothing comes behind.
    closing: Option<Arc<Collectives>>,
    closed: bool,
}

/// An operation that waits for its turn. It keeps its group alive.
struct Queued {
    ticket: u64,
    group: Arc<Collectives>,
    operation: Operation,
    deadline: Deadline,
    completion: Completion,
    /// Here a thread that waits for the operation says that it was interrupted.
    interrupted: Option<Arc<OnceLock<Error>>>,
}

/// What the worker has to do.
enum Task {
    /// The first operation in line.
    Operation,
    /// To leave the group, which was closed.
    Leave,
}

impl Turns {
    pub(crate) fn new(
        control: &Arc<Control>,
        recorder: &Arc<Recorder>,
        queue: Box<dyn Queue>,
    ) -> Result<Self> {
        let executor = Mutex::new(Executor::new(control, recorder, queue)?);
        Ok(Self { executor, waiting: Arc::default() })
    }

    /// Runs an operation and gives how it ended. Nothing is left of the operation then.
    pub(crate) fn wait(
        &self,
        group: &Arc<Collectives>,
        operation: &mut Operation,
        time: (Instant, Deadline),
    ) -> Result<()> {
        if self.waiting.pending.load(Ordering::Acquire) == 0
            && let Some(mut executor) = self.free()
        {
            return run(&mut executor, &group.ranks, operation, time, Thread::Caller);
        }
        let empty = Operation::new(operation.kind, operation.dtype);
        self.wait_in_line(group, std::mem::replace(operation, empty), time.1)
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
    fn wait_in_line(&self, group: &Arc<Collectives>, operation: Operation, deadline: Deadline) -> Result<()> {
        let interrupted = Arc::new(OnceLock::new());
        let (work, ticket) = self.enqueue(group, operation, deadline, Some(&interrupted))?;
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
    ) -> Result<Work> {
        Ok(self.enqueue(group, operation, deadline, None)?.0)
    }

    fn enqueue(
        &self,
        group: &Arc<Collectives>,
        operation: Operation,
        deadline: Deadline,
        interrupted: Option<&Arc<OnceLock<Error>>>,
    ) -> Result<(Work, u64)> {
        let (work, completion) = Work::pending(operation.kind.name());
        let mut state = self.waiting.lock();
        if state.closed {
            return Err(closed());
        }
        self.need_worker(&mut state)?;
        self.waiting.pending.fetch_add(1, Ordering::AcqRel);
        state.tickets += 1;
        let ticket = state.tickets;
        let (group, interrupted) = (group.clone(), interrupted.cloned());
        state.line.push_back(Queued { ticket, group, operation, deadline, completion, interrupted });
        drop(state);
        self.waiting.turn.notify_one();
        Ok((work, ticket))
    }

    fn need_worker(&self, state: &mut State) -> Result<()> {
        if !state.worker {
            let waiting = self.waiting.clone();
            std::thread::Builder::new()
                .name("tensorwire-work".into())
                .spawn(move || waiting.work())
                .map_err(|error| Error::io("starting the worker thread of a group", error))?;
            state.worker = true;
        }
        Ok(())
    }

    /// Takes no more operations. The rank leaves behind those that are there: at once, or on the worker's thread, which
    /// can only log a mismatch that it finds then.
    pub(crate) fn close(&self, group: &Arc<Collectives>) -> Result<()> {
        let mut state = self.waiting.lock();
        if state.closed {
            return Ok(());
        }
        state.closed = true;
        // No operation overtakes the end: one that comes later looks at the line and is refused there.
        self.waiting.pending.fetch_add(1, Ordering::AcqRel);
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
        left
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

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has(&self, ticket: u64) -> bool {
        self.lock().line.iter().any(|queued| queued.ticket == ticket)
    }

    /// The worker thread.
    fn work(&self) {
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
        let Some(queued) = self.lock().line.pop_front() else { return };
        // From here on nobody can overtake it: the executor is taken.
        self.pending.fetch_sub(1, Ordering::Release);
        let Queued { group: own, mut operation, deadline, completion, interrupted, .. } = queued;
        let start = Instant::now();
        let ranks = &own.ranks;
        let result = match interrupted {
            None => run(&mut executor, ranks, &mut operation, (start, deadline), Thread::Worker),
            Some(interrupted) => {
                // A caller that was interrupted in line has gone.
                let deadline = if interrupted.get().is_some() { Deadline::at(start) } else { deadline };
                let look = Rc::new(move || interrupted.get().cloned().map_or(Ok(()), Err));
                interrupt::with_interrupt(look, || {
                    run(&mut executor, ranks, &mut operation, (start, deadline), Thread::Worker)
                })
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

/// Runs an operation. A panic in it is our fault, and this rank does not know how far it came: the group fails, on all
/// ranks, and so does everything that waits in line.
fn run(
    executor: &mut Executor,
    ranks: &Ranks,
    operation: &mut Operation,
    time: (Instant, Deadline),
    thread: Thread,
) -> Result<()> {
    let mut failed = None;
    // The error goes round what catches a panic: that would move its bytes twice, also where there is none.
    let caught = catch_unwind(AssertUnwindSafe(|| {
        if let Err(error) = executor.run(ranks, operation, time, thread) {
            failed = Some(error);
        }
    }));
    match (caught, failed) {
        (Ok(()), None) => Ok(()),
        (Ok(()), Some(error)) => Err(error),
        (Err(panic), _) => Err(panicked(executor, ranks, operation, &*panic)),
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
