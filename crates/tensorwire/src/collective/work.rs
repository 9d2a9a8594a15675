//! An operation in flight.
//!
//! loom runs this file and the state of a started receive in all interleavings (`crates/device/tests/loom_work.rs`), so what
//! threads share here is of `tensorwire_device::sync`.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, OnceLock, PoisonError};
use std::task::{self, Poll, Waker};
use std::time::{Duration, Instant};

use tensorwire_device::latch::Latch;
use tensorwire_device::sync::{self, AtomicBool, Mutex, MutexGuard, Ordering};
use tensorwire_device::{Abort, Deadline, Mark, Queue};

use super::flight::Flights;

use crate::error::{Error, Result};
use crate::interrupt::Pace;
use crate::shm::control::Why;

/// An operation in flight. Clones stand for the same operation. It is a [`Future`] of the result: any runtime may await it.
///
/// **Dropping it.** A collective or a send goes on when all its handles are dropped. A receive does not: it is
/// *withdrawn*. It takes no message and does not touch its tensor any more. Nothing is lost: a message that has begun to
/// arrive goes, whole, to the next receive that asks for it. That is so even if all of it has arrived, as long as nobody
/// was told. Receives that were posted already are asked first, in their order: the first that the message fits gets it. A
/// receive that was posted behind one that was given up may have the later message already. A program is told by [`wait`](Self::wait), by [`is_done`](Self::is_done) or [`error`](Self::error) after the
/// end, and by a callback of [`on_done`](Self::on_done). [`detach`](Self::detach) lets a receive go on without a handle.
#[derive(Clone)]
#[must_use = "whether an operation has failed is told by the work that stands for it; a receive without one is withdrawn"]
pub struct Work {
    shared: sync::Arc<Shared>,
    /// Of a receive.
    handle: Option<sync::Arc<Handle>>,
    task: Task,
}

/// Who awaits a work, once somebody has. Each clone may be awaited by a task of its own.
#[derive(Default)]
struct Task(Option<sync::Arc<Mutex<Waker>>>);

impl Clone for Task {
    fn clone(&self) -> Self {
        Self::default()
    }
}

/// The other end of a [`Work`]: whoever runs the operation says here how it ended.
pub(crate) struct Completion(Option<sync::Arc<Shared>>);

/// What waits until a receive is settled. It is called without a lock.
pub(crate) type Callback = Box<dyn FnOnce() + Send>;

/// Calls all of them. One that panics does not keep the others, and the thread that calls them has more to do.
pub(crate) fn call_all(callbacks: Vec<Callback>) {
    callbacks.into_iter().for_each(|callback| guarded("a receive", callback));
}

fn guarded(what: &str, callback: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(callback)).is_err() {
        tracing::error!("a callback of {what} panicked");
    }
}

/// A started receive, as its work knows it. It can be withdrawn until somebody is told that it went well.
pub(crate) trait Withdraw: Send + Sync {
    /// Somebody is about to be told that it went well. Gives false if it was withdrawn before.
    fn claim(&self) -> bool;

    /// Withdraws it; gives whether that was possible.
    fn withdraw(&self) -> bool;

    /// Nobody has a handle any more: withdraws it. If that is not possible, nobody can be told any more either.
    fn abandon(&self);

    /// It has failed: there is nothing to claim.
    fn fail(&self);

    /// Whether it was claimed or withdrawn, or has failed.
    fn is_settled(&self) -> bool;

    /// Keeps `callback` until then; gives it back if it is settled already.
    fn on_settled(&self, callback: Callback) -> Option<Callback>;
}

struct Shared {
    what: String,
    /// Whose time-out it is, where that is not said already.
    late: OnceLock<Why>,
    outcome: Latch<Outcome>,
    receive: Option<Arc<dyn Withdraw>>,
    /// Of an operation whose steps are put on a queue.
    queue: Option<QueueSide>,
}

/// What the work of a queued operation has besides.
struct QueueSide {
    /// Behind its steps, once they are queued; nothing if they never were.
    mark: Latch<Option<Mark>>,
    /// Its number in the group, once it has one.
    number: OnceLock<u32>,
    flights: Arc<Flights>,
    /// Whether somebody was told how it ended.
    told: AtomicBool,
    /// Whether the next call tells its error if nobody has asked, though there are handles.
    unattended: AtomicBool,
    /// The number of its error among those that nobody was told. A thread that changes it holds the lock.
    noted: Mutex<Option<u64>>,
}

impl QueueSide {
    fn new(flights: &Arc<Flights>) -> Self {
        Self {
            mark: Latch::new(),
            number: OnceLock::new(),
            flights: flights.clone(),
            told: AtomicBool::new(false),
            unattended: AtomicBool::new(false),
            noted: Mutex::new(None),
        }
    }

    /// Its steps are queued, or never will be.
    fn set(&self, mark: &Option<Mark>) {
        for callback in self.mark.set(mark.clone()) {
            guarded("a queued operation", || callback(mark));
        }
    }

    fn noted(&self) -> MutexGuard<'_, Option<u64>> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody is told how it ended.
    fn tell(&self) {
        let mut noted = self.noted();
        self.told.store(true, Ordering::Release);
        if let Some(number) = noted.take() {
            self.flights.heard(number);
        }
    }
}

/// All clones of the work of a receive hold it: it goes with the last.
struct Handle(Arc<dyn Withdraw>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.abandon();
    }
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
        Self::new(what, None, None)
    }

    /// The same for an operation whose steps are put on a queue.
    pub(crate) fn queued(what: impl Into<String>, flights: &Arc<Flights>) -> (Self, Completion) {
        Self::new(what, None, Some(flights))
    }

    /// A work that is over, and went well.
    pub(crate) fn done(what: impl Into<String>) -> Self {
        let (work, completion) = Self::pending(what);
        completion.finish(Ok(()), None);
        work
    }

    /// The work of a receive, which is withdrawn when the last clone is dropped.
    pub(crate) fn receive(what: impl Into<String>, receive: Arc<dyn Withdraw>) -> (Self, Completion) {
        Self::new(what, Some(receive), None)
    }

    /// The work of a message of a GPU; of a receive, which is withdrawn when the last clone is dropped.
    pub(crate) fn message(
        what: impl Into<String>,
        receive: Option<Arc<dyn Withdraw>>,
        flights: &Arc<Flights>,
    ) -> (Self, Completion) {
        Self::new(what, receive, Some(flights))
    }

    fn new(
        what: impl Into<String>,
        receive: Option<Arc<dyn Withdraw>>,
        flights: Option<&Arc<Flights>>,
    ) -> (Self, Completion) {
        let handle = receive.clone().map(|receive| sync::Arc::new(Handle(receive)));
        let shared = sync::Arc::new(Shared {
            what: what.into(),
            late: OnceLock::new(),
            outcome: Latch::new(),
            receive,
            queue: flights.map(QueueSide::new),
        });
        (Self { shared: shared.clone(), handle, task: Task::default() }, Completion(Some(shared)))
    }

    /// Says whose time-out it is, for an error that does not say so.
    pub(crate) fn with_time_of(self, late: Why) -> Self {
        let _ = self.shared.late.set(late);
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
        if let Some(result) = self.result() {
            return result;
        }
        let start = Instant::now();
        let mut pace = Pace::since(start);
        loop {
            if let Some(outcome) = self.shared.wait(pace.until(deadline), start) {
                return self.shared.tell(outcome.result);
            }
            let now = Instant::now();
            if deadline.instant() <= now {
                let (what, text) = (&self.shared.what, "it is still in flight");
                return Err(Error::timed_out(format!("waiting for {what}"), start.elapsed(), text));
            }
            pace.look(now)?;
        }
    }

    /// Has what is queued on `queue` from now on wait for the operation. Returns when the operation's own steps are queued,
    /// which is soon after all ranks have called it. An operation on host memory is waited for here.
    ///
    /// This does not say how the operation ends. If it fails, tensors may be stale: ask the work.
    pub fn wait_on(&self, queue: &mut dyn Queue) -> Result<()> {
        let Some(side) = &self.shared.queue else { return self.wait() };
        let mut pace = Pace::since(Instant::now());
        let mark = loop {
            if let Some(mark) = side.mark.wait(pace.until(Deadline::after(Duration::MAX))) {
                break mark;
            }
            pace.look(Instant::now())?;
        };
        match mark {
            Some(mark) => Ok(queue.follow(&mark, &Abort::local(), Deadline::after(Duration::MAX))?),
            // Nothing was queued, so it has failed.
            None => self.wait(),
        }
    }

    /// Calls `callback` once [`wait_on`](Self::wait_on) does not hold its caller any more: the steps of an operation on tensors
    /// of a GPU are queued, or another operation is over. The thread that sees to it calls it, or this one at once. Does not
    /// tell how the operation ends.
    pub fn on_queued(&self, callback: impl FnOnce() + Send + 'static) {
        let Some(side) = &self.shared.queue else { return self.on_over(callback) };
        if let Some((callback, mark)) = side.mark.on_set(Box::new(move |_| callback())) {
            callback(&mark);
        }
    }

    /// Says that nobody may ask how a queued operation ends, though handles stay, in a record for example. If it fails and
    /// nobody has asked by then, the group's next call gives the error, as it does when all handles are dropped.
    pub fn leave_unattended(&self) {
        if let Some(side) = &self.shared.queue {
            side.unattended.store(true, Ordering::Release);
            self.shared.note_unasked();
        }
    }

    /// Its caller has been told that it was not begun.
    pub(crate) fn set_told(&self) {
        if let Some(side) = &self.shared.queue {
            side.tell();
        }
    }

    /// The number of a queued operation in its group, once it has met.
    pub(crate) fn number(&self) -> Option<u32> {
        self.shared.queue.as_ref()?.number.get().copied()
    }

    /// Whether it is over, well or not. What a receive has got is yours then, see above. [`is_over`](Self::is_over) only
    /// looks.
    pub fn is_done(&self) -> bool {
        // This does not tell how another operation ended.
        if self.shared.receive.is_some() { self.result().is_some() } else { self.is_over() }
    }

    /// Whether it is over and has failed. Nobody is told how, so this is no look at the result, like
    /// [`is_over`](Self::is_over).
    pub fn has_failed(&self) -> bool {
        self.shared.outcome.get().is_some_and(|outcome| outcome.result.is_err())
    }

    /// How long the operation took, once it is over. The time begins when it was executed, not when it was put in
    /// line. Gives nothing if the operation was given up before it began.
    pub fn duration(&self) -> Option<Duration> {
        self.shared.outcome.get()?.duration
    }

    /// What it does: "all_reduce".
    pub fn what(&self) -> &str {
        // Messages may say more.
        self.shared.what.split(' ').next().unwrap_or_default()
    }

    /// How it failed, if it has.
    pub fn error(&self) -> Option<Error> {
        self.result()?.err()
    }

    /// Calls `callback` with the result once the operation is over. The thread that ends the operation calls it, or
    /// this thread at once if the operation is over already. The callback must not wait for other work of the same
    /// group. A callback does not keep a receive: if all handles are dropped, it is called with an error.
    pub fn on_done(&self, callback: impl FnOnce(&Result<()>) + Send + 'static) {
        // The end takes the callbacks out, so this is no circle for ever.
        let shared = self.shared.clone();
        let callback = Box::new(move |outcome: &Outcome| callback(&shared.tell(outcome.result.clone())));
        if let Some((callback, outcome)) = self.shared.outcome.on_set(callback) {
            callback(&outcome);
        }
    }

    /// Calls `callback` once the operation is over, like [`on_done`](Self::on_done), but does not tell how it ended. A
    /// receive can still be withdrawn then, until somebody asks for its result.
    pub fn on_over(&self, callback: impl FnOnce() + Send + 'static) {
        if let Some((callback, outcome)) = self.shared.outcome.on_set(Box::new(move |_| callback())) {
            callback(&outcome);
        }
    }

    /// Whether it is over, well or not. Unlike [`is_done`](Self::is_done), this is no look at the result: a receive can
    /// still be withdrawn, as [`on_over`](Self::on_over) says.
    pub fn is_over(&self) -> bool {
        self.shared.outcome.get().is_some()
    }

    /// Calls `callback` once the operation has no more use for its tensors: it is over and, if it is a receive, it cannot
    /// be withdrawn any more.
    pub fn on_settled(&self, callback: impl FnOnce() + Send + 'static) {
        match &self.shared.receive {
            None => self.on_over(callback),
            Some(receive) => {
                if let Some(callback) = receive.on_settled(Box::new(callback)) {
                    callback();
                }
            }
        }
    }

    /// Whether the operation has no more use for its tensors, see [`on_settled`](Self::on_settled).
    pub fn is_settled(&self) -> bool {
        match &self.shared.receive {
            None => self.is_over(),
            Some(receive) => receive.is_settled(),
        }
    }

    /// Withdraws a receive: it takes no message, and this work ends with an error. A message that has begun to arrive, or
    /// has arrived while nobody was told, goes to the next receive that asks for it. Gives false where nothing was
    /// withdrawn: the receive is over and somebody was told, or the operation is none.
    pub fn withdraw(&self) -> bool {
        self.shared.receive.as_ref().is_some_and(|receive| receive.withdraw())
    }

    /// Lets a receive go on without a handle. It ends at its own deadline at the latest.
    pub fn detach(self) {
        if self.handle.is_some() {
            let own = self.clone();
            match self.shared.queue {
                None => self.on_done(move |_| drop(own)),
                // What has come cannot be withdrawn any more, and how it has failed is to be told.
                Some(_) => self.on_over(move || drop(own)),
            }
        }
    }

    /// How it ended, if it has. Somebody is told.
    pub(crate) fn result(&self) -> Option<Result<()>> {
        self.shared.outcome.get().map(|outcome| self.shared.tell(outcome.result))
    }
}

impl Future for Work {
    type Output = Result<()>;

    /// The thread that ends the operation wakes the task. Dropping the future drops a handle; see above.
    fn poll(mut self: Pin<&mut Self>, context: &mut task::Context<'_>) -> Poll<Result<()>> {
        if let Some(result) = self.result() {
            return Poll::Ready(result);
        }
        let now = context.waker();
        match &self.task.0 {
            Some(task) => task.lock().unwrap_or_else(PoisonError::into_inner).clone_from(now),
            None => {
                let task = sync::Arc::new(Mutex::new(now.clone()));
                self.task.0 = Some(task.clone());
                self.on_over(move || {
                    let waker = task.lock().unwrap_or_else(PoisonError::into_inner).clone();
                    waker.wake();
                });
            }
        }
        // It may have ended before it knew whom to wake.
        self.result().map_or(Poll::Pending, Poll::Ready)
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.shared.outcome.get() {
            None => "in flight",
            Some(Outcome { result: Ok(()), .. }) => "done",
            Some(_) => "failed",
        };
        write!(f, "Work({}, {state})", self.shared.what)
    }
}

impl Completion {
    /// The steps of the operation with this number are queued, before a mark.
    pub(crate) fn queued(&self, mark: &Option<Mark>, number: u32) {
        if let Some(side) = self.0.as_ref().and_then(|shared| shared.queue.as_ref()) {
            let _ = side.number.set(number);
            side.set(mark);
        }
    }

    /// The steps of a message are queued, before a mark.
    pub(crate) fn on_queue(&self, mark: &Mark) {
        if let Some(side) = self.0.as_ref().and_then(|shared| shared.queue.as_ref()) {
            side.set(&Some(mark.clone()));
        }
    }

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
        if let (Some(receive), Err(_)) = (&self.receive, &outcome.result) {
            receive.fail();
        }
        if let (Err(error), Some(late)) = (&outcome.result, self.late.get()) {
            outcome.result = Err(late.tell(error.clone()));
        }
        if let Some(side) = &self.queue {
            side.set(&None);
        }
        for callback in self.outcome.set(outcome.clone()) {
            // The thread that ends operations has others to end.
            guarded(&self.what, || callback(&outcome));
        }
        self.note_unasked();
    }

    /// Has the next call tell an error that nobody has asked for, if that was wished.
    fn note_unasked(&self) {
        let Some(side) = self.queue.as_ref().filter(|side| side.unattended.load(Ordering::Acquire)) else {
            return;
        };
        let Some(Outcome { result: Err(error), .. }) = self.outcome.get() else { return };
        if self.is_given_up(&error) {
            return;
        }
        let mut noted = side.noted();
        if noted.is_none() && !side.told.load(Ordering::Acquire) {
            *noted = Some(side.flights.unasked(&self.what, error));
        }
    }

    /// Whether it is a receive that was withdrawn: who did that knows.
    fn is_given_up(&self, error: &Error) -> bool {
        self.receive.is_some() && matches!(error, Error::Aborted(_))
    }

    /// Waits for the end. That of a queued operation is looked for: nobody is woken by it.
    fn wait(&self, deadline: Deadline, since: Instant) -> Option<Outcome> {
        let Some(side) = &self.queue else { return self.outcome.wait(deadline) };
        loop {
            side.flights.look();
            if let Some(outcome) = self.outcome.get() {
                return Some(outcome);
            }
            if deadline.passed() {
                return None;
            }
            if since.elapsed() > SPIN {
                std::thread::sleep(REST);
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// What somebody is told who asks how it ended.
    fn tell(&self, result: Result<()>) -> Result<()> {
        if let Some(side) = &self.queue {
            side.tell();
        }
        match &self.receive {
            Some(receive) if result.is_ok() && !receive.claim() => Err(withdrawn(&self.what)),
            _ => result,
        }
    }
}

impl Drop for Shared {
    /// An error of a queued operation that nobody has asked for must be heard all the same: tensors may be stale.
    fn drop(&mut self) {
        let Some(side) = self.queue.as_ref().filter(|side| !side.told.load(Ordering::Acquire)) else {
            return;
        };
        if let Some(Outcome { result: Err(error), .. }) = self.outcome.get() {
            if self.is_given_up(&error) {
                return;
            }
            let number = *side.noted();
            side.flights.unheard(&self.what, error, number);
        }
    }
}

/// How long a wait for a queued operation looks without rest, and how long it rests then.
const SPIN: Duration = Duration::from_millis(1);
const REST: Duration = Duration::from_micros(20);

/// How a receive ends that was withdrawn.
pub(crate) fn withdrawn(what: &str) -> Error {
    Error::Aborted(format!("{what} was withdrawn; its message goes to the next receive that asks for it"))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use tensorwire_device::sync::{AtomicUsize, Ordering};

    use super::*;
    use crate::interrupt::SLICE;

    /// A runtime of one task: counts how often it was woken.
    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn poll(work: &mut Work, woken: &Arc<Woken>) -> Poll<Result<()>> {
        Pin::new(work).poll(&mut task::Context::from_waker(&woken.clone().into()))
    }

    #[test]
    fn the_end_wakes_the_task_that_polled_last_and_those_of_clones() {
        let (mut work, completion) = Work::pending("a test");
        let (first, last, other) = <(Arc<Woken>, Arc<Woken>, Arc<Woken>)>::default();
        let mut clone = work.clone();
        assert!(poll(&mut work, &first).is_pending());
        for _ in 0..1000 {
            assert!(poll(&mut work, &last).is_pending());
        }
        assert!(poll(&mut clone, &other).is_pending());
        // Nobody who has gone is in the way.
        let mut gone = work.clone();
        assert!(poll(&mut gone, &first).is_pending());
        drop(gone);
        completion.finish(Ok(()), None);
        let count = |woken: &Woken| woken.0.load(Ordering::Relaxed);
        assert_eq!((count(&last), count(&other)), (1, 1));
        for (work, task) in [(&mut work, &last), (&mut clone, &other)] {
            assert!(matches!(poll(work, task), Poll::Ready(Ok(()))));
        }
        drop((work, clone));
        // Nothing of the work is kept by what would have woken the tasks.
        assert_eq!(Arc::strong_count(&last), 1);
    }

    #[test]
    fn what_is_awaited_may_fail() {
        let (mut work, completion) = Work::pending("a test");
        assert!(poll(&mut work, &Arc::default()).is_pending());
        drop(completion);
        assert!(matches!(poll(&mut work, &Arc::default()), Poll::Ready(Err(Error::Aborted(_)))));
    }

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
