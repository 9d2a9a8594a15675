//! What the process has once: the context of all its groups.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use pyo3::prelude::*;
use tensorwire::device::fork::PerProcess;
use tensorwire::{Context, Result};

use crate::error::exception;

/// The context, and the lock of the thread that makes it.
#[derive(Default)]
struct Slot {
    context: OnceLock<Arc<Context>>,
    making: Mutex<()>,
}

static SLOT: PerProcess<Slot> = PerProcess::new(Slot::default);

/// The context of this process. A forked child gets one of its own.
pub(crate) fn ours() -> Result<Arc<Context>> {
    let slot = SLOT.get();
    let _alone = slot.making.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(context) = slot.context.get() {
        return Ok(context.clone());
    }
    let context = Context::from_env()?;
    Ok(slot.context.get_or_init(|| context).clone())
}

/// The same, unless there is none yet. Takes no lock: it is asked for every tensor of every call.
pub(crate) fn ours_if_any() -> Option<&'static Arc<Context>> {
    SLOT.get().context.get()
}

/// Whether a fallback to a slower path is an error.
#[pyfunction]
pub(crate) fn is_strict(py: Python<'_>) -> PyResult<bool> {
    py.detach(ours).map(|context| context.config().strict).map_err(|error| exception(py, &error))
}

/// Has libucp looked for where the PyPI packages libucx-cu12 and libucx-cu13 put it in this environment, if they are there.
pub(crate) fn find_ucx(py: Python<'_>) -> PyResult<()> {
    let spec = py.import("importlib.util")?.call_method1("find_spec", ("libucx",))?;
    if !spec.is_none() {
        let folders: Option<Vec<PathBuf>> = spec.getattr("submodule_search_locations")?.extract()?;
        folders.iter().flatten().for_each(|folder| tensorwire::look_for_ucx_in(&folder.join("lib")));
    }
    Ok(())
}
