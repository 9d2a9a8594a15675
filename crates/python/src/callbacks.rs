//! Threads for the callbacks of works.
//!
//! A callback may wait for other works, whose callbacks must then run meanwhile: when all threads are busy, there is one
//! more. A thread with nothing to do ends after a while.
//!
//! A thread that wants to run Python code while the interpreter is being taken down is ended by it in the middle of
//! whatever it does. So the pool is closed before: see [`_close_callbacks`].

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use tensorwire::device::fork::PerProcess;
use tensorwire::device::gpu::background;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Pool {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Threads that were started and have not come to their first job: on a busy machine that takes long.
    starting: usize,
    /// Threads that wait for a job.
    idle: usize,
    /// Threads that run one.
    busy: usize,
    closed: bool,
}

/// Threads do not survive a fork.
static POOL: PerProcess<Pool> = PerProcess::new(Pool::default);

/// How long a thread waits for the next callback.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the end of the interpreter waits for callbacks that run.
const GRACE: Duration = Duration::from_secs(2);

/// Called when the interpreter is about to end: no callback begins any more, and those that run are waited for, for a
/// moment.
#[pyfunction]
pub(crate) fn _close_callbacks(py: Python<'_>) {
    py.detach(|| {
        let start = Instant::now();
        let mut state = lock();
        state.closed = true;
        while state.busy > 0 && start.elapsed() < GRACE {
            drop(state);
            std::thread::sleep(Duration::from_millis(1));
            state = lock();
        }
    });
}

/// Runs a callback soon, on a thread of its own if need be.
pub(crate) fn run(job: Job) {
    let mut state = lock();
    if state.closed {
        // It refers to objects of an interpreter that is about to end, which takes them down itself.
        std::mem::forget(job);
        return;
    }
    state.jobs.push_back(job);
    if state.jobs.len() <= state.idle + state.starting {
        drop(state);
        POOL.get().more.notify_one();
        return;
    }
    state.starting += 1;
    drop(state);
    if let Err(error) = std::thread::Builder::new().name("tensorwire-done".into()).spawn(work) {
        lock().starting -= 1;
        tracing::error!("no thread for the callback of a work: {error}; another one will run it");
    }
}

/// Runs Python code on a thread of the library's. Nothing if the interpreter is about to end; it waits for the code then, for a
/// moment.
pub(crate) fn attached<T>(body: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    struct Busy;
    impl Drop for Busy {
        fn drop(&mut self) {
            lock().busy -= 1;
        }
    }
    let mut state = lock();
    if state.closed {
        return None;
    }
    state.busy += 1;
    drop(state);
    let _busy = Busy;
    Python::try_attach(body)
}

fn work() {
    background();
    lock().starting -= 1;
    while let Some(job) = next() {
        job();
        lock().busy -= 1;
    }
}

fn lock() -> MutexGuard<'static, State> {
    POOL.get().state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn next() -> Option<Job> {
    let mut state = lock();
    loop {
        if state.closed {
            return None;
        }
        if let Some(job) = state.jobs.pop_front() {
            state.busy += 1;
            return Some(job);
        }
        state.idle += 1;
        let (woken, waited) =
            POOL.get().more.wait_timeout(state, PATIENCE).unwrap_or_else(PoisonError::into_inner);
        state = woken;
        state.idle = state.idle.saturating_sub(1);
        if waited.timed_out() && state.jobs.is_empty() {
            return None;
        }
    }
}
