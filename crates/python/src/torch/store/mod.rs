//! Stores of torch, or of a user, as stores of ours.
//!
//! A TCPStore is reached again by a client of ours under the same prefix, so that its waits need no interpreter. Every
//! other store is served by its own Python methods, which are only ever asked what they can answer at once: waits ask
//! again and again, because torch's end by the store's time-out and not by ours.

mod methods;
mod native;
mod own_thread;
mod shape;

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use tensorwire::device::sync::{AtomicU64, Ordering};
use tensorwire::store::{DEFAULT_TIMEOUT, Reply, Request, Store};
use tensorwire::{Deadline, Error, Result};

use self::methods::Methods;
use self::own_thread::on_own_thread;
use self::shape::Shape;
use crate::error::exception;

/// How long after its deadline a call may still be heard.
const GRACE: Duration = Duration::from_millis(100);
/// What a call is given at least: a question can be asked whatever the deadline.
const LEAST: Duration = Duration::from_millis(500);

/// The store that `object` is: a store of ours, or anything with the methods of torch's.
pub(crate) fn adapt(py: Python<'_>, object: &Bound<'_, PyAny>) -> PyResult<Arc<dyn Store>> {
    if let Ok(store) = object.cast::<crate::store::Store>() {
        return Ok(store.get().kind());
    }
    let shape = Shape::of(object)?;
    for method in ["set", "get", "add"] {
        if !object.hasattr(method)? {
            let text = format!(
                "an object of class {} is no store: one of tensorwire is needed, or one with the methods of torch's; it \
                 has no {method}",
                object.get_type().name()?
            );
            return Err(exception(py, &Error::misuse(text)));
        }
    }
    let timeout = object.getattr("timeout").and_then(|timeout| timeout.extract()).unwrap_or(DEFAULT_TIMEOUT);
    let methods = Methods::new(object.clone().unbind(), shape);
    native::reach(methods, timeout).map_err(|error| crate::interrupt::raised(py, &error))
}

/// A store that its Python methods serve.
#[derive(Debug)]
struct TorchStore {
    methods: Methods,
    /// Nanoseconds.
    timeout: AtomicU64,
}

impl TorchStore {
    fn new(methods: Methods, timeout: Duration) -> Self {
        Self { methods, timeout: AtomicU64::new(nanos(timeout)) }
    }
}

impl Store for TorchStore {
    fn call(&self, request: Request, deadline: Deadline) -> Result<Reply> {
        if let Request::Barrier { key, world } = request {
            return tensorwire::store::barrier_by_counters(self, &key, world, deadline).map(|()| Reply::Done);
        }
        let left = deadline.remaining().unwrap_or_default();
        let limit = Deadline::after(LEAST.max(left.saturating_add(GRACE)));
        let who = self.methods.shape().name().to_owned();
        let methods = self.methods.clone();
        on_own_thread(self.methods.crowd(), &who, limit, move |stop| methods.execute(request, deadline, stop))
    }

    fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout.load(Ordering::Relaxed))
    }

    fn set_timeout(&self, timeout: Duration) {
        self.timeout.store(nanos(timeout), Ordering::Relaxed);
    }

    /// The same object: no call of ours blocks in it.
    fn clone_store(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(Self::new(self.methods.clone(), self.timeout())))
    }
}

fn nanos(timeout: Duration) -> u64 {
    timeout.as_nanos().try_into().unwrap_or(u64::MAX)
}
