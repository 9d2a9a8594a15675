//! The thread that brings messages of GPUs to their tensors, and says when copies are made. It starts with the first of them.
//!
//! From the moment in which its copy is queued, a receive counts as received: it cannot be withdrawn any more.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tensorwire_device::{Deadline, Mark};

use super::engine::Engine;
use super::freight::{Course, Freight, Moving, Unload};
use super::operation::Arrival;
use crate::collective::work::Completion;
use crate::error::{Error, Result};

/// How often copies are looked at that are not made.
const LOOK: Duration = Duration::from_micros(100);
/// How long the end of the thread waits for them in a group that has failed. In others they end by their own deadlines.
const LEAVE: Duration = Duration::from_secs(1);

/// What there is to do.
#[derive(Debug)]
pub(super) enum Job {
    /// A message is here, for a receive that was started.
    Unload(Completion, Arrival, Instant),
    /// The copy to a tensor is queued.
    Watch(Completion, Moving, Box<Unload>, Instant),
    /// A message was sent, and its copy is queued.
    Sent(Completion, Mark, (Instant, Deadline)),
    /// Nobody wants a message.
    Discard(Vec<u8>),
}

/// A copy that is not made yet.
#[derive(Debug)]
enum Copy {
    In(Moving, Box<Unload>),
    Out(Mark, Deadline),
}

#[derive(Debug)]
pub(super) struct Porter {
    pub(super) freight: Freight,
    /// Where messages go back that a started receive could not wait for.
    pub(super) home: OnceLock<Weak<Engine>>,
    state: Mutex<State>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    started: bool,
    closing: bool,
}

impl Porter {
    pub(super) fn new(freight: Freight) -> Arc<Self> {
        let (state, thread) = (Mutex::default(), Mutex::default());
        Arc::new(Self { freight, home: OnceLock::new(), state, changed: Condvar::new(), thread })
    }

    /// Takes something to do.
    pub(super) fn push(self: &Arc<Self>, job: Job) {
        let mut state = self.lock();
        if state.closing {
            drop(state);
            return self.give_up(job);
        }
        state.jobs.push_back(job);
        if !state.started {
            let porter = self.clone();
            let thread = std::thread::Builder::new().name("tensorwire-porter".into());
            let serve = move || {
                tensorwire_device::gpu::background();
                porter.serve();
            };
            match thread.spawn(serve) {
                Ok(thread) => {
                    state.started = true;
                    *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
                }
                Err(error) => {
                    let jobs = std::mem::take(&mut state.jobs);
                    drop(state);
                    tracing::error!("starting the thread that brings messages of GPUs: {error}");
                    jobs.into_iter().for_each(|job| self.give_up(job));
                    return;
                }
            }
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Ends the thread, when the copies that are queued are made.
    pub(super) fn close(&self) {
        self.lock().closing = true;
        self.changed.notify_one();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A callback of that thread may be who closes the group.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id())
            && thread.join().is_err()
        {
            tracing::warn!("the thread that brings messages of GPUs has failed");
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_up(&self, job: Job) {
        match job {
            // Who throws a completion away says that the group is being closed.
            Job::Unload(_, arrival, _) => self.drop_message(&arrival),
            Job::Discard(token) => self.freight.throw_away(&token),
            Job::Watch(..) | Job::Sent(..) => {}
        }
    }

    /// The sender of a message need not keep it.
    pub(super) fn drop_message(&self, arrival: &Arrival) {
        if arrival.header.lent > 0
            && let Ok(token) = arrival.payload.to_vec()
        {
            self.freight.throw_away(&token);
        }
    }

    /// The life of the thread.
    fn serve(&self) {
        let mut copies: Vec<(Completion, Copy, Instant)> = Vec::new();
        let mut end = None;
        loop {
            let mut state = self.lock();
            while state.jobs.is_empty() && copies.is_empty() && !state.closing {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.jobs.is_empty() && !state.closing {
                state = self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
            }
            let closing = state.closing;
            let job = state.jobs.pop_front();
            drop(state);
            match job {
                // Messages that have come are given up; what is on a queue is waited for.
                Some(job @ (Job::Unload(..) | Job::Discard(_))) if closing => self.give_up(job),
                Some(job) => copies.extend(self.begin(job)),
                None if closing => std::thread::sleep(LOOK),
                None => {}
            }
            let over: Vec<_> = copies.extract_if(.., |(_, copy, _)| self.is_over(copy)).collect();
            over.into_iter().for_each(|copy| self.finish(copy));
            if closing {
                let end = *end.get_or_insert_with(|| Instant::now() + LEAVE);
                let given_up = Instant::now() > end && self.freight.has_failed();
                if self.lock().jobs.is_empty() && (copies.is_empty() || given_up) {
                    return;
                }
            }
        }
    }

    fn begin(&self, job: Job) -> Option<(Completion, Copy, Instant)> {
        match job {
            Job::Unload(completion, mut arrival, since) => {
                let unload = arrival.unload.take()?;
                match self.freight.unload(&arrival, &unload, Course::Own(None)) {
                    Ok(moving) => {
                        // That of a tensor of the host is no result yet.
                        if unload.apart.as_ref().is_some_and(|apart| apart.gpu.is_some()) {
                            completion.on_queue(&moving.mark);
                        }
                        Some((completion, Copy::In(moving, unload), since))
                    }
                    Err(error) => {
                        match self.home.get().and_then(Weak::upgrade).filter(|_| error.is_timeout()) {
                            // The next receive gets it.
                            Some(engine) => engine.put_back(&arrival),
                            None => self.drop_message(&arrival),
                        }
                        drop(unload);
                        completion.finish(Err(error), Some(since.elapsed()));
                        None
                    }
                }
            }
            Job::Watch(completion, moving, unload, since) => {
                Some((completion, Copy::In(moving, unload), since))
            }
            Job::Sent(completion, mark, (since, deadline)) => {
                Some((completion, Copy::Out(mark, deadline), since))
            }
            Job::Discard(token) => {
                self.freight.throw_away(&token);
                None
            }
        }
    }

    fn is_over(&self, copy: &Copy) -> bool {
        match copy {
            Copy::In(moving, _) => self.freight.look(moving).is_some(),
            // A device that cannot be asked any more runs nothing.
            Copy::Out(mark, deadline) => deadline.passed() || mark.is_passed().unwrap_or(true),
        }
    }

    fn finish(&self, (completion, copy, since): (Completion, Copy, Instant)) {
        let result: Result<()> = match copy {
            Copy::In(moving, unload) => self.freight.bring_on(moving, &unload),
            Copy::Out(mark, _) => match mark.is_passed() {
                Ok(true) => Ok(()),
                Ok(false) => {
                    let missing = "the queue that the tensor is on has not come so far";
                    Err(Error::timed_out("copying a message of a GPU", since.elapsed(), missing))
                }
                Err(error) => Err(error.into()),
            },
        };
        completion.finish(result, Some(since.elapsed()));
    }
}
