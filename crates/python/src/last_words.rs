//! What this rank says before it is gone: the exception that ends it.
//!
//! Nothing of Python's is replaced for that. The interpreter keeps an exception that nobody caught in `sys`, and at its exit
//! we look there. A process of `multiprocessing` ends otherwise. But it calls its finalizers while the exception goes
//! through, and we have one among them.

use pyo3::exceptions::PySystemExit;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorwire::Context;
use tensorwire::device::fork::PerProcess;
use tensorwire::device::sync::{AtomicBool, Ordering};

use crate::context::ours_if_any;

/// Says to the other ranks of all groups that this process ends, and the exception that ends it, if it is one.
#[pyfunction]
pub(crate) fn last_words(py: Python<'_>) -> PyResult<()> {
    let Some(context) = ours_if_any() else { return Ok(()) };
    let sys = py.import("sys")?;
    let mut raised = going_through(py)?;
    for name in ["last_exc", "last_value"] {
        if raised.is_none() {
            raised = sys.getattr_opt(name)?.and_then(|error| clause(&error));
        }
    }
    py.detach(|| {
        if let Some(raised) = raised {
            context.last_words(&raised);
        }
        // What closes the groups now is the end of the interpreter, and only the process's status says why it comes.
        context.about_to_end();
    });
    Ok(())
}

/// The exception that is being handled on this thread, as a clause.
pub(crate) fn going_through(py: Python<'_>) -> PyResult<Option<String>> {
    let error = py.import("sys")?.call_method0("exception")?;
    Ok(clause(&error))
}

/// A group that a function of the program had goes when `sys.exit(3)` has gone through that function. Python has forgotten the
/// exit by then, and calls what wants to be called at the end only later. But its main thread runs no code any more.
pub(crate) fn if_program_is_over(py: Python<'_>, context: &Context) {
    let is_over = || -> PyResult<bool> {
        let sys = py.import("sys")?;
        if sys.call_method0("_getframe").is_ok() {
            return Ok(false);
        }
        // A program without this module has one thread.
        let Ok(threading) = sys.getattr("modules")?.get_item("threading") else { return Ok(true) };
        let main = threading.call_method0("main_thread")?.getattr("ident")?;
        threading.call_method0("get_ident")?.eq(main)
    };
    if is_over().unwrap_or(false) {
        context.about_to_end();
    }
}

/// "raised ValueError: its first line"; nothing for None and for an exit, which has a status.
fn clause(error: &Bound<'_, PyAny>) -> Option<String> {
    if error.is_none() {
        return None;
    }
    if error.is_instance_of::<PySystemExit>() {
        // torch.multiprocessing ends a process so that has caught an exception.
        let code = error.getattr("code").ok()?;
        return if code.is_truthy().ok()? { clause(&error.getattr("__context__").ok()?) } else { None };
    }
    let name = error.get_type().name().ok()?;
    let text = error.str().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default().trim().to_owned();
    Some(if line.is_empty() { format!("raised {name}") } else { format!("raised {name}: {line}") })
}

/// Has a process of multiprocessing call us at its end. Called when a group is formed: a forked child forgets finalizers.
pub(crate) fn prepare(py: Python<'_>) -> PyResult<()> {
    static PREPARED: PerProcess<AtomicBool> = PerProcess::new(AtomicBool::default);
    let modules = py.import("sys")?.getattr("modules")?;
    let Ok(util) = modules.get_item("multiprocessing.util") else { return Ok(()) };
    if !PREPARED.get().swap(true, Ordering::Relaxed) {
        let how = PyDict::new(py);
        how.set_item("exitpriority", 100)?;
        let function = py.import("tensorwire._native")?.getattr("last_words")?;
        util.getattr("Finalize")?.call((py.None(), function), Some(&how))?;
    }
    Ok(())
}
