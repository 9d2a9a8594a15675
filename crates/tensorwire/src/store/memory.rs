//! A store that threads of one process share.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tensorwire_device::Deadline;

use super::engine::{Answer, Engine, Token};
use super::{DEFAULT_TIMEOUT, Limits, Patience, Reply, Request, Store};
use crate::error::{Error, Result};
use crate::interrupt::Pace;

/// A store in this process's memory. Clones share it.
#[derive(Debug)]
pub struct MemoryStore {
    shared: Arc<Mutex<Shared>>,
    patience: Patience,
}

#[derive(Debug)]
struct Shared {
    engine: Engine,
    waiting: HashMap<Token, Waiter>,
    next: Token,
}

/// Each waiter has its own condition. A waiter that is woken has its answer.
#[derive(Debug)]
struct Waiter {
    answer: Option<Answer>,
    wake: Arc<Condvar>,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        let shared = Shared { engine: Engine::new(Limits::none()), waiting: HashMap::new(), next: 0 };
        Self { shared: Arc::new(Mutex::new(shared)), patience: Patience::new(DEFAULT_TIMEOUT) }
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the answer to a parked request.
    fn wait<'a>(
        &'a self,
        mut shared: MutexGuard<'a, Shared>,
        token: Token,
        deadline: Deadline,
        request: &Request,
    ) -> Result<Reply> {
        let started = Instant::now();
        let wake = Arc::new(Condvar::new());
        shared.waiting.insert(token, Waiter { answer: None, wake: wake.clone() });
        let mut pace = Pace::since(started);
        loop {
            if let Some(answer) = shared.waiting.get_mut(&token).and_then(|waiter| waiter.answer.take()) {
                shared.waiting.remove(&token);
                return answer.map_err(Error::Misuse);
            }
            let now = Instant::now();
            if deadline.instant() <= now {
                let missing = shared.engine.lacks(request);
                shared.engine.cancel(token);
                shared.waiting.remove(&token);
                return Err(Error::timed_out(super::purpose(request), started.elapsed(), missing));
            }
            // The hook that is asked may take long.
            drop(shared);
            let looked = pace.look(now);
            shared = self.lock();
            if let Err(error) = looked {
                shared.engine.cancel(token);
                let answer = shared.waiting.remove(&token).and_then(|waiter| waiter.answer);
                drop(shared);
                // A value that came meanwhile is somebody else's, though it has lost its place in the queue.
                if let (Some(Ok(Reply::Value(value))), Request::Pop { key, .. }) = (answer, request) {
                    self.call(Request::Push(key.clone(), value), deadline)?;
                }
                return Err(error);
            }
            if shared.waiting.get(&token).is_some_and(|waiter| waiter.answer.is_some()) {
                continue;
            }
            let left = pace.until(deadline).remaining().unwrap_or_default();
            shared = wake.wait_timeout(shared, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl Store for MemoryStore {
    fn call(&self, request: Request, deadline: Deadline) -> Result<Reply> {
        let mut shared = self.lock();
        let token = shared.next;
        shared.next += 1;
        // Only a request that may have to wait is needed again.
        let waits = request.waits().then(|| request.clone());
        let mut released = Vec::new();
        let answer = shared.engine.apply(token, request, &mut released);
        for (token, answer) in released {
            if let Some(waiter) = shared.waiting.get_mut(&token) {
                waiter.answer = Some(answer);
                waiter.wake.notify_one();
            }
        }
        match (answer, waits) {
            (Some(answer), _) => answer.map_err(Error::Misuse),
            (None, Some(request)) => self.wait(shared, token, deadline, &request),
            (None, None) => Err(Error::bug("a request that does not wait was parked")),
        }
    }

    fn timeout(&self) -> Duration {
        self.patience.get()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.patience.set(timeout);
    }

    fn clone_store(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(Self { shared: self.shared.clone(), patience: Patience::new(self.timeout()) }))
    }
}
