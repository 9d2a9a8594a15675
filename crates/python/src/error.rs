//! Rust errors as the Python exceptions of `tensorwire.errors`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use tensorwire::{Error, PeerFaultKind};

/// `tensorwire.errors.raised`: which class stands for which name at the moment.
static RAISED: PyOnceLock<Py<PyDict>> = PyOnceLock::new();

/// The exception for an error. The classes are written in Python, where two base classes are no trouble.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::TimedOut { ranks, .. } => raise(py, "TimeoutError", (text, ranks.clone())),
        Error::Aborted(_) => raise(py, "AbortedError", text),
        Error::Misuse(_) => raise(py, "MisuseError", text),
        Error::Unsupported { .. } => raise(py, "UnsupportedError", text),
        Error::Peer(fault) => {
            let (class, kind) = peer(fault.kind);
            raise(py, class, (text, kind, fault.rank, fault.ranks.clone()))
        }
        _ => raise(py, "TensorwireError", text),
    }
}

/// Looked up each time: `tensorwire.torch` exchanges the classes when it is imported.
fn raise<A>(py: Python<'_>, name: &str, args: A) -> PyErr
where
    A: pyo3::PyErrArguments + Send + Sync + 'static,
{
    match class(py, name) {
        Ok(class) => PyErr::from_type(class, args),
        Err(error) => error,
    }
}

fn class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyType>> {
    let raised = RAISED.get_or_try_init(py, || {
        Ok::<_, PyErr>(py.import("tensorwire.errors")?.getattr("raised")?.cast_into::<PyDict>()?.unbind())
    })?;
    Ok(raised.bind(py).as_any().get_item(name)?.cast_into::<PyType>()?)
}

/// The class for a fault of a peer, and its `kind`.
fn peer(kind: PeerFaultKind) -> (&'static str, &'static str) {
    match kind {
        PeerFaultKind::Died => ("PeerDiedError", "died"),
        PeerFaultKind::Left => ("PeerDiedError", "left"),
        PeerFaultKind::Mismatch => ("MismatchError", "mismatch"),
        PeerFaultKind::Stuck => ("PeerError", "stuck"),
        PeerFaultKind::Failed => ("PeerError", "failed"),
        PeerFaultKind::Incompatible => ("PeerError", "incompatible"),
        PeerFaultKind::Refused => ("PeerError", "refused"),
        // Misbehaved, and what newer versions of the library may add.
        _ => ("PeerError", "misbehaved"),
    }
}
