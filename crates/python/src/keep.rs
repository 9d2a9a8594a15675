//! Objects of Python that keep memory which others use, and where they are let go.

use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use tensorwire::device::fork::PerProcess;

use crate::callbacks;

/// An object of Python that keeps memory. It may be dropped by any thread, at any time.
#[derive(Debug)]
pub(crate) struct Keep(Option<Py<PyAny>>);

impl Keep {
    pub(crate) fn new(object: Py<PyAny>) -> Self {
        Self(Some(object))
    }
}

thread_local! {
    /// Objects that were let go by a call from Python, which drops them when it is over.
    static PILE: RefCell<Option<Vec<Py<PyAny>>>> = const { RefCell::new(None) };
}

impl Drop for Keep {
    fn drop(&mut self) {
        let Some(object) = self.0.take() else { return };
        let left = PILE.with(|pile| match &mut *pile.borrow_mut() {
            Some(pile) => {
                pile.push(object);
                None
            }
            None => Some(object),
        });
        if let Some(object) = left {
            throw_away(object);
        }
    }
}

/// Objects that were let go by other threads, for one thread that drops them.
static THROWN_AWAY: PerProcess<Mutex<Vec<Py<PyAny>>>> = PerProcess::new(Mutex::default);

/// Has an object dropped soon: the thread that serves leases must not wait for the interpreter, which may be at its end.
fn throw_away(object: Py<PyAny>) {
    let lock = || THROWN_AWAY.get().lock().unwrap_or_else(PoisonError::into_inner);
    let mut objects = lock();
    objects.push(object);
    // Who let go of a thousand tensors does not need a thousand threads.
    if objects.len() == 1 {
        drop(objects);
        callbacks::run(Box::new(move || {
            Python::try_attach(|_| {
                let objects = std::mem::take(&mut *lock());
                drop(objects);
            });
        }));
    }
}

/// Runs `body` detached from the interpreter, and drops the objects that it lets go afterwards, on this thread.
pub(crate) fn gathering<T: Send>(py: Python<'_>, body: impl FnOnce() -> T + Send) -> T {
    piling(|| py.detach(body))
}

/// Runs `body`, and drops the objects that it lets go afterwards.
pub(crate) fn piling<T>(body: impl FnOnce() -> T) -> T {
    let outer = PILE.with(|pile| pile.replace(Some(Vec::new())));
    let result = body();
    let pile = PILE.with(|pile| pile.replace(outer));
    drop(pile);
    result
}
