//! An operation in flight.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tensorwire_device::Deadline;

use crate::error::{Error, Result};
use crate::interrupt::Pace;

/// An operation in flight. Dropping it does not stop the operation.
#[derive(Clone)]
pub struct Work(Arc<Shared>);

/// The other end of a [`Work`]: whoever runs the operation says here how it ended.
pub(crate) struct Completion(Option<Arc<Shared>>);

type Callback = Box<dyn FnOnce(&Result<()>) + Send>;

struct Shared {
    what: String,
    state: Mutex<State>,
    done: Condvar,
}

#[derive(Default)]
struct State {
    result: Option<Result<()>>,
    duration: Option<Duration>,
    callbacks: Vec<Callback>,
}

impl Work {
    /// A work that is not done, named for messages, and its other end.
    pub(crate) fn pending(what: impl Into<String>) -> (Self, Completion) {
        let shared = Arc::new(Shared { what: what.into(), state: Mutex::default(), done: Condvar::new() });
        (Self(shared.clone()), Completion(Some(shared)))
    }

    /// Waits until it is done and gives how it ended. The operation's own deadline ends it at the latest.
    pub fn wait(&self) -> Result<()> {
        // As far away as a deadline can be.
        self.wait_by(Deadline::after(Duration::MAX))
    }

    /// Waits until it is done, or until the deadline has passed; the operation itself goes on then, and also if the
    /// caller's hook ends the wait (see [`crate::interrupt`]).
    pub fn wait_by(&self, deadline: Deadline) -> Result<()> {
        let mut state = self.0.lock();
        if let Some(result) = &state.result {
            return result.clone();
        }
        let start = Instant::now();
        let mut pace = Pace::since(start);
        loop {
            let left = pace.until(deadline).remaining().unwrap_or_default();
            state = self.0.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            if let Some(result) = &state.result {
                return result.clone();
            }
            let now = Instant::now();
            if deadline.instant() <= now {
                let text = "it is still in flight";
                return Err(Error::timed_out(format!("waiting for {}", self.0.what), start.elapsed(), text));
            }
            drop(state);
            pace.look(now)?;
            state = self.0.lock();
        }
    }

    /// Whether it is over, well or not.
    pub fn is_done(&self) -> bool {
        self.0.lock().result.is_some()
    }

    /// How long it took, once it is over: from the begin of its execution (not from when it was put in line) to its end.
    /// Nothing if it was given up before it began.
    pub fn duration(&self) -> Option<Duration> {
        self.0.lock().duration
    }

    /// What it does: "all_reduce".
    pub fn what(&self) -> &str {
        // Messages may say more.
        self.0.what.split(' ').next().unwrap_or_default()
    }

    /// How it failed, if it has.
    pub fn error(&self) -> Option<Error> {
        self.0.lock().result.as_ref()?.as_ref().err().cloned()
    }

    /// Calls `callback` with the result once it is over: on the thread that ends it, or here and now if it is over
    /// already. It must not wait for other work of the same group.
    pub fn on_done(&self, callback: impl FnOnce(&Result<()>) + Send + 'static) {
        let mut state = self.0.lock();
        match state.result.clone() {
            None => state.callbacks.push(Box::new(callback)),
            Some(result) => {
                drop(state);
                callback(&result);
            }
        }
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.0.lock().result {
            None => "in flight",
            Some(Ok(())) => "done",
            Some(Err(_)) => "failed",
        };
        write!(f, "Work({}, {state})", self.0.what)
    }
}

impl Completion {
    /// The operation is over, so long after the begin of its execution.
    pub(crate) fn finish(mut self, result: Result<()>, duration: Option<Duration>) {
        if let Some(shared) = self.0.take() {
            shared.finish(result, duration);
        }
    }
}

impl Drop for Completion {
    /// Nobody waits for ever for work that was thrown away.
    fn drop(&mut self) {
        if let Some(shared) = self.0.take() {
            let text = format!("{} was given up: its group is being closed", shared.what);
            shared.finish(Err(Error::Aborted(text)), None);
        }
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Completion")
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finish(&self, result: Result<()>, duration: Option<Duration>) {
        let mut state = self.lock();
        state.duration = duration;
        let callbacks = std::mem::take(&mut state.callbacks);
        state.result = Some(result.clone());
        drop(state);
        self.done.notify_all();
        for callback in callbacks {
            // The thread that ends operations has others to end.
            let called = catch_unwind(AssertUnwindSafe(|| callback(&result)));
            if called.is_err() {
                tracing::error!("a callback of {} panicked", self.what);
            }
        }
    }
}
