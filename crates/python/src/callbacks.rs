//! Threads for the callbacks of works.
//!
//! A callback may wait for other works, whose callbacks must then run meanwhile: when all threads are busy, there is one
//! more. A thread with nothing to do ends after a while.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

type Job = Box<dyn FnOnce() + Send>;

struct Pool {
    state: Mutex<State>,
    more: Condvar,
}

struct State {
    jobs: VecDeque<Job>,
    /// Threads that wait for a job.
    idle: usize,
    /// The process that they belong to.
    process: u32,
}

static POOL: Pool = Pool {
    state: Mutex::new(State { jobs: VecDeque::new(), idle: 0, process: 0 }),
    more: Condvar::new(),
};

/// How long a thread waits for the next callback.
const PATIENCE: Duration = Duration::from_secs(10);

/// Runs a callback soon, on a thread of its own if need be.
pub(crate) fn run(job: Job) {
    let mut state = POOL.state.lock().unwrap_or_else(PoisonError::into_inner);
    // Threads do not survive a fork.
    if state.process != std::process::id() {
        *state = State { jobs: VecDeque::new(), idle: 0, process: std::process::id() };
    }
    state.jobs.push_back(job);
    if state.jobs.len() <= state.idle {
        drop(state);
        POOL.more.notify_one();
        return;
    }
    drop(state);
    if let Err(error) = std::thread::Builder::new().name("tensorwire-done".into()).spawn(work) {
        tracing::error!("no thread for the callback of a work: {error}; another one will run it");
    }
}

fn work() {
    while let Some(job) = next() {
        job();
    }
}

fn next() -> Option<Job> {
    let mut state = POOL.state.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if let Some(job) = state.jobs.pop_front() {
            return Some(job);
        }
        state.idle += 1;
        let (woken, waited) = POOL.more.wait_timeout(state, PATIENCE).unwrap_or_else(PoisonError::into_inner);
        state = woken;
        state.idle = state.idle.saturating_sub(1);
        if waited.timed_out() && state.jobs.is_empty() {
            return None;
        }
    }
}
