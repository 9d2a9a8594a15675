//! The operation of one rank in one group, first come, first served.
//!
//! A call that is waited for runs on the caller's thread when nothing is before it; others go to a worker thread that is
//! started when it is needed for the first time.

use std::collections::VecDeque;
use std::fmt;
use std::rc::Rc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use tensorwire_device::sync::{AtomicUsize, Ordering};
use tensorwire_device::{Deadline, Queue};

use super::exec::Executor;
use super::operation::Operation;
use super::work::{Completion, Work};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::group::control::Control;
use crate::group::cores::Thread;
use crate::interrupt::{self, is_interrupt};
use crate::watch::record::Recorder;

/// How often a worker looks whether something is in line, whatever it hears. No wait is without an end: on Linux 6.18, under a
/// heavy load of disk writes, workers were found asleep here while others waited for their rank. Why is not known.
pub(crate) const LOOK: Duration = Duration::from_millis(500);

/// See the module.
pub(crate) struct Lane {
    executor: Mutex<Executor>,
    line: Arc<Line>,
}

/// Who waits for its turn.
#[derive(Default)]
struct Line {
    state: Mutex<State>,
    turn: Condvar,
    /// How many are in line.
    pending: AtomicUsize,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Queued>,
    /// How many have been in line.
    tickets: u64,
    worker: bool,
    closed: bool,
}

/// An operation that waits for its turn. It keeps its group alive.
struct Queued {
    ticket: u64,
    group: Group,
    operation: Operation,
    deadline: Deadline,
    completion: Completion,
    /// Where who waits for it, if anyone does, says that it was interrupted.
    interrupted: Option<Arc<OnceLock<Error>>>,
}

impl Lane {
    pub(crate) fn new(
        control: &Arc<Control>,
        recorder: &Arc<Recorder>,
        queue: Box<dyn Queue>,
    ) -> Result<Self> {
        let executor = Mutex::new(Executor::new(control, recorder, queue)?);
        Ok(Self { executor, line: Arc::default() })
    }

    /// Runs an operation and gives how it ended.
    pub(crate) fn wait(
        &self,
        group: &Group,
        mut operation: Operation,
        time: (Instant, Deadline),
    ) -> Result<()> {
        if self.line.pending.load(Ordering::Acquire) == 0
            && let Some(mut executor) = self.free()
        {
            return executor.run(&group.0, &mut operation, time, Thread::Caller);
        }
        self.wait_in_line(group, operation, time.1)
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
    fn wait_in_line(&self, group: &Group, operation: Operation, deadline: Deadline) -> Result<()> {
        let interrupted = Arc::new(OnceLock::new());
        let (work, ticket) = self.enqueue(group, operation, deadline, Some(&interrupted))?;
        let waited = match work.wait_by(deadline) {
            Err(error) if error.is_timeout() && self.line.is_waiting(ticket) => return Err(error),
            // The operation itself runs on a thread that has no hook.
            Err(error) if is_interrupt(&error) => Err(error),
            _ => work.wait(),
        };
        // The wait behind its deadline may have been interrupted just as well.
        let Err(error) = waited else { return Ok(()) };
        if is_interrupt(&error) {
            let _ = interrupted.set(error.clone());
            if !self.line.is_waiting(ticket) {
                // The worker sees it soon; until then the operation works on the caller's memory.
                let _ = interrupt::without(|| work.wait());
            }
        }
        Err(error)
    }

    /// Puts an operation in line.
    pub(crate) fn start(&self, group: &Group, operation: Operation, deadline: Deadline) -> Result<Work> {
        Ok(self.enqueue(group, operation, deadline, None)?.0)
    }

    fn enqueue(
        &self,
        group: &Group,
        operation: Operation,
        deadline: Deadline,
        interrupted: Option<&Arc<OnceLock<Error>>>,
    ) -> Result<(Work, u64)> {
        let (work, completion) = Work::pending(operation.kind.name());
        let mut state = self.line.lock();
        if !state.worker {
            let line = self.line.clone();
            std::thread::Builder::new()
                .name("tensorwire-work".into())
                .spawn(move || line.work())
                .map_err(|error| Error::io("starting the worker thread of a group", error))?;
            state.worker = true;
        }
        self.line.pending.fetch_add(1, Ordering::AcqRel);
        state.tickets += 1;
        let ticket = state.tickets;
        let (group, interrupted) = (group.clone(), interrupted.cloned());
        state.waiting.push_back(Queued { ticket, group, operation, deadline, completion, interrupted });
        drop(state);
        self.line.turn.notify_one();
        Ok((work, ticket))
    }

    /// This rank has closed the group: whoever waits for it shall know.
    pub(crate) fn leave(&self) {
        self.line.lock().closed = true;
        self.line.turn.notify_all();
        self.executor.lock().unwrap_or_else(PoisonError::into_inner).leave();
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lane")
    }
}

impl Line {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_waiting(&self, ticket: u64) -> bool {
        self.lock().waiting.iter().any(|queued| queued.ticket == ticket)
    }

    /// The worker thread.
    fn work(&self) {
        while let Some(group) = self.next_group() {
            let Ok(lane) = group.0.lane() else { return };
            let mut executor = lane.executor.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(queued) = self.lock().waiting.pop_front() else { continue };
            // From here on nobody can overtake it: the executor is taken.
            self.pending.fetch_sub(1, Ordering::Release);
            let Queued { group: own, mut operation, deadline, completion, interrupted, .. } = queued;
            let start = Instant::now();
            let result = match interrupted {
                None => executor.run(&own.0, &mut operation, (start, deadline), Thread::Worker),
                Some(interrupted) => {
                    // Who was interrupted in line has gone.
                    let deadline = if interrupted.get().is_some() { Deadline::at(start) } else { deadline };
                    let look = Rc::new(move || interrupted.get().cloned().map_or(Ok(()), Err));
                    interrupt::looking(look, || {
                        executor.run(&own.0, &mut operation, (start, deadline), Thread::Worker)
                    })
                }
            };
            let duration = start.elapsed();
            drop(executor);
            // The last handle on the group may be one of these: after it, there is nothing to wait for.
            drop((operation, own, group));
            completion.finish(result, Some(duration));
        }
    }

    /// Waits until an operation is in line and gives its group; nothing when the group is closed.
    fn next_group(&self) -> Option<Group> {
        let mut state = self.lock();
        loop {
            if let Some(next) = state.waiting.front() {
                return Some(next.group.clone());
            }
            if state.closed {
                return None;
            }
            state = self.turn.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
