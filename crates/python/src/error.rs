//! Rust errors as the Python exceptions of `tensorwire.errors`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use tensorwire::{Error, PeerFaultKind};

static TENSORWIRE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static TIMEOUT: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static PEER: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static MISUSE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static UNSUPPORTED: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// The exception for an error. The classes are written in Python, where two base classes are no trouble.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::TimedOut { .. } => raise(py, &TIMEOUT, "TimeoutError", text),
        Error::Misuse(_) => raise(py, &MISUSE, "MisuseError", text),
        Error::Unsupported { .. } => raise(py, &UNSUPPORTED, "UnsupportedError", text),
        Error::Peer(fault) => raise(py, &PEER, "PeerError", (text, kind(fault.kind), fault.rank)),
        _ => raise(py, &TENSORWIRE, "TensorwireError", text),
    }
}

fn raise<A>(py: Python<'_>, class: &'static PyOnceLock<Py<PyType>>, name: &str, args: A) -> PyErr
where
    A: pyo3::PyErrArguments + Send + Sync + 'static,
{
    match class.import(py, "tensorwire.errors", name) {
        Ok(class) => PyErr::from_type(class.clone(), args),
        Err(error) => error,
    }
}

fn kind(kind: PeerFaultKind) -> &'static str {
    match kind {
        PeerFaultKind::Died => "died",
        PeerFaultKind::Left => "left",
        PeerFaultKind::Incompatible => "incompatible",
        PeerFaultKind::Refused => "refused",
        _ => "misbehaved",
    }
}
