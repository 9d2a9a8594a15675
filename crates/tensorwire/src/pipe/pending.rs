//! Calls that were started: who waits for them, and what moves them on.
//!
//! A call is one `async fn`, whether it is waited for or started. If a thread waits for it, each of its steps blocks
//! ([`How::Wait`]), and the thread runs it to its end in one go. If it was started, its steps are works of the group, and whoever ends
//! such a work runs the call up to the next step. So there is no thread for a started call, and no runtime. To withdraw a call is
//! to drop it: what it holds of a message goes back.

use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::ThreadId;

use tensorwire_device::Deadline;

use crate::collective::{Completion, Work};
use crate::error::{Error, Result};

/// A call of a pipe that was started: wait for it, await it, or have a callback called.
///
/// **Dropping it.** A send goes on. A receive is withdrawn, and loses no message: what has come goes, whole, to the next receive
/// that asks, unless this one has given it out. A read that is withdrawn can be begun again from its
/// [`Incoming`](super::Incoming); if nobody has that any more, the message is dropped.
///
/// It is a future of any runtime, or of none: the thread that ends the call wakes who waits.
#[must_use = "whether a call has failed is told by this; a receive is withdrawn if it is dropped"]
pub struct Pending<T> {
    work: Work,
    flight: Arc<dyn Flight<T>>,
    waker: Arc<Mutex<Option<Waker>>>,
    /// Whether the end of the call looks for a waker.
    awaited: bool,
}

/// A started call, whatever it has at its end before that is told.
trait Flight<T>: Send + Sync {
    fn take(&self) -> Result<T>;
    fn cancel(&self) -> bool;
    fn abandon(&self);
}

/// What a call has at its end. If it is dropped and not told, the call is undone.
pub(super) trait Outcome: Send + Sized + 'static {
    type Told;
    /// Whether the call goes on when nobody has its [`Pending`], and cannot be undone when it is over.
    const GOES_ON: bool;

    /// Somebody is told.
    fn tell(self) -> Result<Self::Told>;

    /// What is told to whoever asks again, if that is possible.
    fn again() -> Option<Self::Told> {
        None
    }
}

impl<T: 'static> Pending<T> {
    /// Starts a call. One that fails at once is no call.
    pub(super) fn start<V: Outcome<Told = T>>(
        what: &'static str,
        call: impl Future<Output = Result<V>> + Send + 'static,
    ) -> Result<Self> {
        let (work, completion) = Work::pending(what);
        let task = Arc::new(Task {
            what,
            state: Mutex::new(State::Resting(Box::pin(call))),
            rests: Condvar::new(),
            completion: Mutex::new(Some(completion)),
        });
        task.run();
        match work.error() {
            Some(error) => Err(error),
            None => Ok(Self { work, flight: task, waker: Arc::default(), awaited: false }),
        }
    }

    /// Waits until it is over and gives what it has brought, once. The call ends at its own deadline at the latest.
    pub fn wait(&self) -> Result<T> {
        self.work.wait().and_then(|()| self.flight.take())
    }

    /// Waits until it is over or the deadline has passed. A deadline that passes ends only the wait; the call goes on.
    pub fn wait_by(&self, deadline: Deadline) -> Result<T> {
        self.work.wait_by(deadline).and_then(|()| self.flight.take())
    }

    /// Whether it is over, well or not. Nobody is told by this: a receive can still be withdrawn.
    pub fn is_done(&self) -> bool {
        self.work.is_over()
    }

    /// Calls `callback` with the result once it is over. The thread that ends the call does so, or this thread at once if it is over
    /// already. The callback must not wait for other calls of the same pipe.
    pub fn on_done(self, callback: impl FnOnce(Result<T>) + Send + 'static) {
        let work = self.work.clone();
        // The end takes the callbacks out, so this is no circle for ever.
        work.on_over(move || callback(self.wait()));
    }

    /// Calls `callback` once it is over, like [`on_done`](Self::on_done), but tells nobody how. Then [`wait`](Self::wait) does not wait.
    pub fn on_over(&self, callback: impl FnOnce() + Send + 'static) {
        self.work.on_over(callback);
    }

    /// The call as a work: whether it is over, and how it has failed. What it has brought is told by [`wait`](Self::wait) alone.
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// Withdraws it; then it ends with an error. Gives false where it was too late for that: a send is over, or somebody was told
    /// what a receive has brought.
    ///
    /// The reader of a send hears that the message was taken back, unless it has all of it already. What the reader has borrowed by
    /// then it keeps until it lets go. The message of a receive goes to the next one.
    pub fn cancel(&self) -> bool {
        self.flight.cancel()
    }
}

impl Pending<()> {
    /// The call as a work like any other. It goes on if the work is dropped.
    pub fn into_work(self) -> Work {
        self.work.clone()
    }
}

impl<T: 'static> Future for Pending<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        if !self.work.is_over() {
            *self.waker.lock().unwrap_or_else(PoisonError::into_inner) = Some(context.waker().clone());
            if !std::mem::replace(&mut self.awaited, true) {
                let waker = self.waker.clone();
                self.work.on_over(move || {
                    let waker = waker.lock().unwrap_or_else(PoisonError::into_inner).take();
                    waker.into_iter().for_each(Waker::wake);
                });
            }
        }
        // Behind the waker: an end in between has found it.
        match self.work.is_over() {
            true => Poll::Ready(self.wait()),
            false => Poll::Pending,
        }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        self.flight.abandon();
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({:?})", self.work)
    }
}

/// A started call.
struct Task<V> {
    what: &'static str,
    state: Mutex<State<V>>,
    /// No thread runs it.
    rests: Condvar,
    completion: Mutex<Option<Completion>>,
}

type Call<V> = Pin<Box<dyn Future<Output = Result<V>> + Send>>;

enum State<V> {
    /// A step of it is under way.
    Resting(Call<V>),
    /// A thread runs it: whether it is to look again, and whether nobody wants it any more.
    Running {
        by: ThreadId,
        again: bool,
        left: bool,
    },
    /// It is over.
    Over(V),
    /// It has failed, or somebody was told.
    Told,
    Withdrawn,
}

impl<V: Outcome> Task<V> {
    /// Runs it up to its next step.
    fn run(self: &Arc<Self>) {
        let by = std::thread::current().id();
        let mut call = {
            let mut state = self.lock();
            match std::mem::replace(&mut *state, State::Running { by, again: false, left: false }) {
                State::Resting(call) => call,
                State::Running { by, left, .. } => {
                    *state = State::Running { by, again: true, left };
                    return;
                }
                over => {
                    *state = over;
                    return;
                }
            }
        };
        let waker = Waker::from(self.clone());
        loop {
            let poll = || call.as_mut().poll(&mut Context::from_waker(&waker));
            // The end of a tensor may run any code of the caller.
            let polled = catch_unwind(AssertUnwindSafe(poll)).unwrap_or_else(|_| {
                Poll::Ready(Err(Error::bug(format!("{} of a pipe panicked", self.what))))
            });
            if let Poll::Ready(result) = polled {
                drop(call);
                return self.end(result);
            }
            let mut state = self.lock();
            match &mut *state {
                State::Running { left: true, .. } => {
                    drop(state);
                    drop(call);
                    return self.end(Err(withdrawn(self.what)));
                }
                State::Running { again: again @ true, .. } => *again = false,
                _ => {
                    *state = State::Resting(call);
                    drop(state);
                    self.rests.notify_all();
                    return;
                }
            }
        }
    }

    /// It is over.
    fn end(&self, result: Result<V>) {
        let (over, result) = match result {
            Ok(value) => (State::Over(value), Ok(())),
            Err(error) => (State::Told, Err(error)),
        };
        let mut state = self.lock();
        let left = matches!(&*state, State::Running { left: true, .. });
        let dropped = match left {
            true => (std::mem::replace(&mut *state, State::Withdrawn), Some(over)),
            false => (std::mem::replace(&mut *state, over), None),
        };
        drop(state);
        self.rests.notify_all();
        drop(dropped);
        self.finish(result);
    }

    fn finish(&self, result: Result<()>) {
        let completion = self.completion.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(completion) = completion {
            completion.finish(result, None);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<V>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<V: Outcome> Wake for Task<V> {
    fn wake(self: Arc<Self>) {
        self.run();
    }
}

impl<V: Outcome> Flight<V::Told> for Task<V> {
    fn take(&self) -> Result<V::Told> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Told) {
            State::Over(value) => {
                drop(state);
                value.tell()
            }
            State::Told => V::again().ok_or_else(|| {
                Error::misuse(format!("what {} of a pipe has brought was taken before", self.what))
            }),
            other => {
                *state = other;
                Err(withdrawn(self.what))
            }
        }
    }

    fn cancel(&self) -> bool {
        let mut state = self.lock();
        loop {
            match &mut *state {
                State::Running { by, left, .. } if *by == std::thread::current().id() => {
                    // A callback that runs inside a step of this call: the step sees to it.
                    *left = !V::GOES_ON;
                    return *left;
                }
                // No step waits for anything.
                State::Running { .. } => {
                    state = self.rests.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                State::Over(_) if V::GOES_ON => return false,
                State::Told | State::Withdrawn => return false,
                State::Resting(_) | State::Over(_) => break,
            }
        }
        let over = std::mem::replace(&mut *state, State::Withdrawn);
        drop(state);
        // What it holds goes back.
        drop(over);
        self.finish(Err(withdrawn(self.what)));
        true
    }

    fn abandon(&self) {
        if !V::GOES_ON {
            self.cancel();
        }
    }
}

fn withdrawn(what: &str) -> Error {
    Error::Aborted(format!("{what} of a pipe was withdrawn"))
}

/// How the steps of a call are waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// The thread that runs it blocks.
    Wait,
    /// They are started, and the call rests until they are over.
    Start,
}

/// Runs a call whose steps block.
pub(super) fn now<T>(call: impl Future<Output = Result<T>>) -> Result<T> {
    match pin!(call).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => Err(Error::bug("a step of a call that blocks did not")),
    }
}

/// A step: until a work is over. Nobody is told how.
pub(super) async fn over(work: &Work) {
    let mut asked = false;
    poll_fn(|context| {
        if !work.is_over() && !std::mem::replace(&mut asked, true) {
            let waker = context.waker().clone();
            work.on_over(move || waker.wake());
        }
        match work.is_over() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
}
