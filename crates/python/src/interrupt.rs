//! Waiting without holding up the interpreter: other Python threads run, and Ctrl-C is answered.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tensorwire::device::gpu::background;
use tensorwire::{Error, Result, interrupt};

use crate::error::exception;

/// How often a wait looks for signals: a Ctrl-C shall be felt at once.
const LOOK: Duration = Duration::from_millis(50);

/// Runs `work` on a thread of its own and waits for it, detached from the interpreter between looks for signals.
///
/// When a signal handler raises, its exception is returned and `work` is left to its own deadline; what it gives after
/// that goes to `late`, on its thread.
///
/// A thread, and not a wait in slices: a wait that is given up and begun anew every 50 ms would never succeed with a
/// peer that needs longer than that to answer.
pub(crate) fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
    late: impl FnOnce(T) + Send + 'static,
) -> PyResult<T> {
    let (sender, receiver) = mpsc::sync_channel(0);
    thread::Builder::new()
        .name("tensorwire-call".into())
        .spawn(move || {
            background();
            // A channel without room: the send fails exactly when the caller has gone and nobody will look.
            if let Err(mpsc::SendError(Ok(value))) = sender.send(work()) {
                late(value);
            }
        })
        .map_err(|error| exception(py, &Error::io("starting a thread for a call", error)))?;
    // A lock only because the receiver of a channel may not be shared between threads, which detach() asks for.
    let receiver = Mutex::new(receiver);
    loop {
        match py.detach(|| receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(LOOK)) {
            Ok(result) => return result.map_err(|error| exception(py, &error)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err(
                    "tensorwire: a call ended by a panic; please report this",
                ));
            }
        }
    }
}

thread_local! {
    /// What a signal handler raised while this thread waited.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// Looks for signals, for the waits of the library.
    static LOOKING: Rc<dyn Fn() -> Result<()>> = Rc::new(look);
}

/// Runs `body` on this thread, detached from the interpreter; its waits look for signals now and then, and end with the
/// exception that a signal handler raises.
pub(crate) fn blocking<T: Send>(py: Python<'_>, body: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    let result = py.detach(|| interrupt::with_interrupt(LOOKING.with(Rc::clone), body));
    // Also where the wait ended well in the same moment: nobody else would raise it.
    if let Some(raised) = RAISED.with(RefCell::take) {
        return Err(raised);
    }
    result.map_err(|error| {
        // A Ctrl-C goes to all ranks: the failure of another one may be here first.
        py.check_signals().err().unwrap_or_else(|| exception(py, &error))
    })
}

/// The exception for an error of a wait on this thread: what a signal handler raised meanwhile, or the error's own.
pub(crate) fn raised(py: Python<'_>, error: &Error) -> PyErr {
    RAISED.with(RefCell::take).unwrap_or_else(|| exception(py, error))
}

/// Looks for signals; what a handler raises is kept for [`raised`].
pub(crate) fn look() -> Result<()> {
    let Some(Err(raised)) = Python::try_attach(|py| py.check_signals()) else { return Ok(()) };
    Err(keep(raised))
}

/// Keeps what a signal handler has raised in Python code that a wait of this thread has called, for [`raised`].
pub(crate) fn keep(raised: PyErr) -> Error {
    RAISED.with(|slot| slot.replace(Some(raised)));
    Error::Interrupted("a signal handler raised an exception".into())
}
