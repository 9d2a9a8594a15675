//! What the process has once: the context of all its groups.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use tensorwire::device::fork::PerProcess;
use tensorwire::{Context, Result};

use crate::error::exception;

static CONTEXT: PerProcess<Mutex<Option<Arc<Context>>>> = PerProcess::new(Mutex::default);

/// The context of this process. A forked child gets one of its own.
pub(crate) fn ours() -> Result<Arc<Context>> {
    let mut slot = CONTEXT.get().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(context) = &*slot {
        return Ok(context.clone());
    }
    Ok(slot.insert(Context::from_env()?).clone())
}

/// The same, unless there is none yet.
pub(crate) fn ours_if_any() -> Option<Arc<Context>> {
    CONTEXT.get().lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Whether a fallback to a slower path is an error.
#[pyfunction]
pub(crate) fn is_strict(py: Python<'_>) -> PyResult<bool> {
    py.detach(ours).map(|context| context.config().strict).map_err(|error| exception(py, &error))
}
