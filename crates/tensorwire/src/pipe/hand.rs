//! What started calls do that takes time: lenders are asked for memory, and bytes are copied. The thread that carries the messages
//! of a pipe must not wait for that, so each pipe has a thread for it, while there is something to do. An end that answers calls
//! has several for these.

use std::collections::VecDeque;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::ThreadId;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::interrupt;

/// How long the thread waits for more to do before it ends.
const IDLE: Duration = Duration::from_secs(1);

pub(super) struct Hand {
    state: Mutex<State>,
    more: Condvar,
    /// The most threads.
    most: usize,
}

#[derive(Default)]
struct State {
    errands: VecDeque<Job>,
    threads: usize,
    /// Threads that wait for an errand.
    idle: usize,
}

type Job = Box<dyn FnOnce() + Send>;

impl Default for Hand {
    fn default() -> Self {
        Self::new(1)
    }
}

impl Hand {
    /// One with so many threads at most, which come and go.
    pub(super) fn new(most: usize) -> Self {
        Self { state: Mutex::default(), more: Condvar::new(), most }
    }

    /// Does something on a thread. If the errand is dropped before its end, what has not begun is not done; what has begun is
    /// interrupted, and its end is waited for.
    pub(super) fn run<R: Send + 'static>(
        self: &Arc<Self>,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> Result<Errand<R>> {
        let stage = Stage::Waiting(Box::new(job));
        let order =
            Arc::new(Order { place: Mutex::new(Progress { stage, waker: None }), over: Condvar::new() });
        let own = order.clone();
        self.post(Box::new(move || own.run()))?;
        Ok(Errand(order))
    }

    /// Does something on a thread; nobody waits for it. It must not panic.
    pub(super) fn post(self: &Arc<Self>, job: Job) -> Result<()> {
        let mut state = self.lock();
        state.errands.push_back(job);
        if state.errands.len() <= state.idle {
            self.more.notify_one();
        } else if state.threads < self.most {
            let hand = self.clone();
            let thread = std::thread::Builder::new().name("tensorwire-pipe".into());
            match thread.spawn(move || hand.serve()) {
                Ok(_) => state.threads += 1,
                // Another one comes to it.
                Err(error) if state.threads > 0 => {
                    tracing::debug!(%error, "no other thread for a pipe");
                }
                Err(error) => {
                    let job = state.errands.pop_back();
                    drop(state);
                    drop(job);
                    return Err(Error::io("starting a thread for a pipe", error));
                }
            }
        }
        Ok(())
    }

    fn serve(&self) {
        tensorwire_device::gpu::background();
        let mut state = self.lock();
        loop {
            if let Some(job) = state.errands.pop_front() {
                drop(state);
                job();
                state = self.lock();
                continue;
            }
            state.idle += 1;
            let (next, waited) = self.more.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = next;
            state.idle -= 1;
            if waited.timed_out() && state.errands.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Something that is done on the thread: a step of a call.
pub(super) struct Errand<R: Send + 'static>(Arc<Order<R>>);

struct Order<R> {
    place: Mutex<Progress<R>>,
    over: Condvar,
}

struct Progress<R> {
    stage: Stage<R>,
    waker: Option<Waker>,
}

enum Stage<R> {
    Waiting(Box<dyn FnOnce() -> R + Send>),
    /// On this thread, and whether it is to end soon.
    Running(ThreadId, bool),
    /// Nothing if it has panicked.
    Over(Option<R>),
    Gone,
}

impl<R> Order<R> {
    fn lock(&self) -> MutexGuard<'_, Progress<R>> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_unwanted(&self) -> bool {
        matches!(self.lock().stage, Stage::Running(_, true))
    }
}

impl<R: Send + 'static> Order<R> {
    fn run(self: Arc<Self>) {
        let job = {
            let mut place = self.lock();
            let running = Stage::Running(std::thread::current().id(), false);
            match std::mem::replace(&mut place.stage, running) {
                Stage::Waiting(job) => job,
                other => {
                    place.stage = other;
                    return;
                }
            }
        };
        let order = self.clone();
        let look = move || match order.is_unwanted() {
            true => Err(Error::Interrupted("nobody wants it any more".into())),
            false => Ok(()),
        };
        let done = catch_unwind(AssertUnwindSafe(|| interrupt::with_another(look, job))).ok();
        let mut place = self.lock();
        place.stage = Stage::Over(done);
        let waker = place.waker.take();
        drop(place);
        self.over.notify_all();
        waker.into_iter().for_each(Waker::wake);
    }
}

impl<R: Send + 'static> Future for Errand<R> {
    type Output = Result<R>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<R>> {
        let mut place = self.0.lock();
        match std::mem::replace(&mut place.stage, Stage::Gone) {
            Stage::Over(done) => {
                Poll::Ready(done.ok_or_else(|| Error::bug("a step of a call of a pipe panicked")))
            }
            other => {
                place.stage = other;
                place.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl<R: Send + 'static> Drop for Errand<R> {
    fn drop(&mut self) {
        let mut place = self.0.lock();
        place.waker = None;
        let me = std::thread::current().id();
        while let Stage::Running(thread, unwanted) = &mut place.stage {
            if *thread == me {
                return;
            }
            *unwanted = true;
            place = self.0.over.wait(place).unwrap_or_else(PoisonError::into_inner);
        }
        let left = std::mem::replace(&mut place.stage, Stage::Gone);
        drop(place);
        // What it has brought goes back.
        drop(left);
    }
}
