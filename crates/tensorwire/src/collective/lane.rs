//! The operation of one rank in one group, first come, first served.
//!
//! A call that is waited for runs on the caller's thread when nothing is before it; others go to a worker thread that is
//! started when it is needed for the first time.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tensorwire_device::{Deadline, Queue};

use super::exec::Executor;
use super::operation::Operation;
use super::work::{Completion, Work};
use crate::error::{Error, Result};
use crate::group::control::Control;
use crate::group::{Group, Inner};
use crate::watch::record::Recorder;

/// See the module.
pub(crate) struct Lane {
    executor: Mutex<Executor>,
    line: Arc<Line>,
}

/// Who waits, and whether somebody is at it.
#[derive(Default)]
struct Line {
    state: Mutex<State>,
    turn: Condvar,
}

#[derive(Default)]
struct State {
    busy: bool,
    waiting: VecDeque<Queued>,
    worker: bool,
    closed: bool,
}

/// An operation that waits for its turn. It keeps its group alive.
struct Queued {
    group: Group,
    operation: Operation,
    deadline: Deadline,
    completion: Completion,
}

impl Lane {
    pub(crate) fn new(
        control: &Arc<Control>,
        recorder: &Arc<Recorder>,
        queue: Box<dyn Queue>,
        spin: Duration,
    ) -> Result<Self> {
        let executor = Mutex::new(Executor::new(control, recorder, queue, spin)?);
        Ok(Self { executor, line: Arc::default() })
    }

    /// Runs an operation and gives how it ended.
    pub(crate) fn wait(&self, group: &Group, operation: Operation, deadline: Deadline) -> Result<()> {
        let mut state = self.line.lock();
        if state.busy || !state.waiting.is_empty() {
            drop(state);
            return self.start(group, operation, deadline)?.wait();
        }
        state.busy = true;
        drop(state);
        let mut operation = operation;
        let result = self.run(&group.0, &mut operation, deadline);
        self.line.release();
        result
    }

    /// Puts an operation in line.
    pub(crate) fn start(&self, group: &Group, operation: Operation, deadline: Deadline) -> Result<Work> {
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
        state.waiting.push_back(Queued { group: group.clone(), operation, deadline, completion });
        drop(state);
        self.line.turn.notify_one();
        Ok(work)
    }

    fn run(&self, group: &Inner, operation: &mut Operation, deadline: Deadline) -> Result<()> {
        let mut executor = self.executor.lock().unwrap_or_else(PoisonError::into_inner);
        executor.run(group, operation, deadline)
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

    fn release(&self) {
        let mut state = self.lock();
        state.busy = false;
        let more = !state.waiting.is_empty();
        drop(state);
        if more {
            self.turn.notify_one();
        }
    }

    /// The worker thread.
    fn work(&self) {
        while let Some(next) = self.next() {
            let Queued { group, mut operation, deadline, completion } = next;
            let result = group.0.lane().and_then(|lane| lane.run(&group.0, &mut operation, deadline));
            self.release();
            // The last handle on the group may be this one: after it, there is nothing to wait for.
            drop(operation);
            drop(group);
            completion.finish(result);
        }
    }

    /// Waits for an operation whose turn it is; nothing when the group is closed.
    fn next(&self) -> Option<Queued> {
        let mut state = self.lock();
        loop {
            if !state.busy
                && let Some(next) = state.waiting.pop_front()
            {
                state.busy = true;
                return Some(next);
            }
            if state.closed {
                return None;
            }
            state = self.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
