//! An operation in flight.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tensorwire_device::Deadline;
use tensorwire_device::latch::Latch;

use crate::error::{Error, Result};
use crate::interrupt::Pace;
use crate::shm::control::Why;

/// An operation in flight. Dropping it does not stop the operation.
#[derive(Clone)]
#[must_use = "whether an operation has failed is told by the work that stands for it"]
pub struct Work(Arc<Shared>);

/// The other end of a [`Work`]: whoever runs the operation says here how it ended.
pub(crate) struct Completion(Option<Arc<Shared>>);

struct Shared {
    what: String,
    /// Whose time-out it is, where that is not said already.
    late: OnceLock<Why>,
    outcome: Latch<Outcome>,
}

/// How an operation ended, and how long it took.
#[derive(Clone)]
struct Outcome {
    result: Result<()>,
    duration: Option<Duration>,
}

impl Work {
    /// A work that is not done, named for messages, and its other end.
    pub(crate) fn pending(what: impl Into<String>) -> (Self, Completion) {
        let shared = Arc::new(Shared { what: what.into(), late: OnceLock::new(), outcome: Latch::new() });
        (Self(shared.clone()), Completion(Some(shared)))
    }

    /// Says whose time-out it is, for an error that does not say so.
    pub(crate) fn with_time_of(self, late: Why) -> Self {
        let _ = self.0.late.set(late);
        self
    }

    /// Waits until the operation is over and gives its result. The operation ends at its own deadline at the
    /// latest.
    pub fn wait(&self) -> Result<()> {
        // As far away as a deadline can be.
        self.wait_by(Deadline::after(Duration::MAX))
    }

    /// Waits until the operation is over or the deadline has passed. A deadline that passes ends only the wait; the
    /// operation goes on. So does a caller's hook that ends the wait (see [`crate::interrupt`]).
    pub fn wait_by(&self, deadline: Deadline) -> Result<()> {
        if let Some(outcome) = self.0.outcome.get() {
            return outcome.result;
        }
        let start = Instant::now();
        let mut pace = Pace::since(start);
        loop {
            if let Some(outcome) = self.0.outcome.wait(pace.until(deadline)) {
                return outcome.result;
            }
            let now = Instant::now();
            if deadline.instant() <= now {
                let text = "it is still in flight";
                return Err(Error::timed_out(format!("waiting for {}", self.0.what), start.elapsed(), text));
            }
            pace.look(now)?;
        }
    }

    /// Whether it is over, well or not.
    pub fn is_done(&self) -> bool {
        self.0.outcome.get().is_some()
    }

    /// How long the operation took, once it is over. The time begins when it was executed, not when it was put in
    /// line. Gives nothing if the operation was given up before it began.
    pub fn duration(&self) -> Option<Duration> {
        self.0.outcome.get()?.duration
    }

    /// What it does: "all_reduce".
    pub fn what(&self) -> &str {
        // Messages may say more.
        self.0.what.split(' ').next().unwrap_or_default()
    }

    /// How it failed, if it has.
    pub fn error(&self) -> Option<Error> {
        self.0.outcome.get()?.result.err()
    }

    /// Calls `callback` with the result once the operation is over. The thread that ends the operation calls it, or
    /// this thread at once if the operation is over already. The callback must not wait for other work of the same
    /// group.
    pub fn on_done(&self, callback: impl FnOnce(&Result<()>) + Send + 'static) {
        let callback = Box::new(move |outcome: &Outcome| callback(&outcome.result));
        if let Some((callback, outcome)) = self.0.outcome.on_set(callback) {
            callback(&outcome);
        }
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.0.outcome.get() {
            None => "in flight",
            Some(Outcome { result: Ok(()), .. }) => "done",
            Some(_) => "failed",
        };
        write!(f, "Work({}, {state})", self.0.what)
    }
}

impl Completion {
    /// The operation is over, so long after the begin of its execution.
    pub(crate) fn finish(mut self, result: Result<()>, duration: Option<Duration>) {
        if let Some(shared) = self.0.take() {
            shared.finish(Outcome { result, duration });
        }
    }
}

impl Drop for Completion {
    /// Nobody waits for ever for work that was thrown away.
    fn drop(&mut self) {
        if let Some(shared) = self.0.take() {
            let text = format!("{} was given up: its group is being closed", shared.what);
            shared.finish(Outcome { result: Err(Error::Aborted(text)), duration: None });
        }
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Completion")
    }
}

impl Shared {
    fn finish(&self, mut outcome: Outcome) {
        if let (Err(error), Some(late)) = (&outcome.result, self.late.get()) {
            outcome.result = Err(error.clone().adding(&format!("the time-out {}", late.whose())));
        }
        for callback in self.outcome.set(outcome.clone()) {
            // The thread that ends operations has others to end.
            let called = catch_unwind(AssertUnwindSafe(|| callback(&outcome)));
            if called.is_err() {
                tracing::error!("a callback of {} panicked", self.what);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interrupt::SLICE;

    /// A wait lets go of the lock when its first slice of time is over. A work that ended in that moment was slept through,
    /// until the deadline.
    #[test]
    fn a_work_that_ends_with_the_first_slice_of_a_wait_is_seen() {
        for round in 0..40 {
            let (work, completion) = Work::pending("a test");
            let begin = Instant::now();
            std::thread::scope(|scope| {
                let waiters: Vec<_> = (0..24)
                    .map(|_| scope.spawn(|| work.wait_by(Deadline::after(Duration::from_secs(20)))))
                    .collect();
                let moment = SLICE + Duration::from_micros(10 * round);
                while begin.elapsed() < moment {
                    std::thread::yield_now();
                }
                completion.finish(Ok(()), None);
                for waiter in waiters {
                    waiter.join().unwrap().unwrap();
                }
            });
        }
    }
}
