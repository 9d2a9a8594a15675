//! What started calls do that takes time: lenders are asked for memory, and bytes are copied. The thread that carries the messages
//! of a pipe must not wait for that, so each pipe has a thread for it, while there is something to do.

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

#[derive(Default)]
pub(super) struct Hand {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Default)]
struct State {
    errands: VecDeque<Arc<dyn Run>>,
    /// Whether there is a thread.
    there: bool,
}

trait Run: Send + Sync {
    fn run(self: Arc<Self>);
}

impl Hand {
    /// Does something on the thread. If the errand is dropped before its end, what has not begun is not done; what has begun is
    /// interrupted, and its end is waited for.
    pub(super) fn run<R: Send + 'static>(
        self: &Arc<Self>,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> Result<Errand<R>> {
        let stage = Stage::Waiting(Box::new(job));
        let order =
            Arc::new(Order { place: Mutex::new(Progress { stage, waker: None }), over: Condvar::new() });
        let mut state = self.lock();
        state.errands.push_back(order.clone());
        if state.there {
            self.more.notify_one();
        } else {
            let hand = self.clone();
            let thread = std::thread::Builder::new().name("tensorwire-pipe".into());
            match thread.spawn(move || hand.serve()) {
                Ok(_) => state.there = true,
                Err(error) => {
                    state.errands.pop_back();
                    return Err(Error::io("starting a thread that brings what is lent", error));
                }
            }
        }
        Ok(Errand(order))
    }

    fn serve(&self) {
        tensorwire_device::gpu::background();
        let mut state = self.lock();
        loop {
            if let Some(errand) = state.errands.pop_front() {
                drop(state);
                errand.run();
                state = self.lock();
                continue;
            }
            let (next, waited) = self.more.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = next;
            if waited.timed_out() && state.errands.is_empty() {
                state.there = false;
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

impl<R: Send + 'static> Run for Order<R> {
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
