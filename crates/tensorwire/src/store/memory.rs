//! A store that threads of one process share.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tensorwire_device::Deadline;

use super::engine::{Answer, Engine, Token};
use super::{DEFAULT_TIMEOUT, Limits, Patience, Reply, Request, Store};
use crate::error::{Error, Result};

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

/// Each waiter has its own condition: whoever is woken has its answer.
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

    /// Waits for the answer to a parked request.
    fn wait(
        &self,
        mut shared: MutexGuard<'_, Shared>,
        token: Token,
        deadline: Deadline,
        request: &Request,
    ) -> Result<Reply> {
        let started = Instant::now();
        let wake = Arc::new(Condvar::new());
        shared.waiting.insert(token, Waiter { answer: None, wake: wake.clone() });
        loop {
            if let Some(answer) = shared.waiting.get_mut(&token).and_then(|waiter| waiter.answer.take()) {
                shared.waiting.remove(&token);
                return answer.map_err(Error::Misuse);
            }
            let Some(left) = deadline.remaining() else {
                let missing = shared.engine.lacks(request);
                shared.engine.cancel(token);
                shared.waiting.remove(&token);
                return Err(Error::timed_out(super::purpose(request), started.elapsed(), missing));
            };
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
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
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
            (None, None) => Err(Error::misuse("a request that does not wait was parked")),
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
