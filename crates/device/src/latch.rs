//! A value that is set once and waited for.

use std::fmt;

use crate::deadline::Deadline;
use crate::sync::{Condvar, Mutex, MutexGuard, unpoisoned};

/// A value that is set once, by whoever finishes something, and that any number of threads wait for.
///
/// A waiter looks for the value under the lock, immediately before it sleeps. A value that is set at any other moment is
/// therefore never slept through; loom checks that.
pub struct Latch<T> {
    state: Mutex<State<T>>,
    set: Condvar,
}

type Callback<T> = Box<dyn FnOnce(&T) + Send>;

struct State<T> {
    value: Option<T>,
    callbacks: Vec<Callback<T>>,
}

impl<T: Clone> Latch<T> {
    /// Not set.
    pub fn new() -> Self {
        Self { state: Mutex::new(State { value: None, callbacks: Vec::new() }), set: Condvar::new() }
    }

    /// Sets the value and gives what wanted to be called then, for the caller to call without a lock. The first value
    /// stays: a second one changes nothing.
    #[must_use = "callbacks are called by whoever sets the value"]
    pub fn set(&self, value: T) -> Vec<Callback<T>> {
        let mut state = self.lock();
        if state.value.is_some() {
            return Vec::new();
        }
        state.value = Some(value);
        let callbacks = std::mem::take(&mut state.callbacks);
        drop(state);
        self.set.notify_all();
        callbacks
    }

    /// The value, if it is there.
    pub fn get(&self) -> Option<T> {
        self.lock().value.clone()
    }

    /// The value, as soon as it is there; nothing if the deadline passes first.
    pub fn wait(&self, deadline: Deadline) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(value) = &state.value {
                return Some(value.clone());
            }
            let left = deadline.remaining()?;
            state = match self.set.wait_timeout(state, left) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// Keeps `callback` for whoever sets the value; gives it back with the value if that is there already.
    pub fn on_set(&self, callback: Callback<T>) -> Option<(Callback<T>, T)> {
        let mut state = self.lock();
        match state.value.clone() {
            Some(value) => Some((callback, value)),
            None => {
                state.callbacks.push(callback);
                None
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        unpoisoned(self.state.lock())
    }
}

impl<T: Clone> Default for Latch<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Clone> fmt::Debug for Latch<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.get().is_some() { "Latch(set)" } else { "Latch(not set)" })
    }
}
