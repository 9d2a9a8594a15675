//! Calls of code that is not ours and that may never come back.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::Python;
use tensorwire::device::sync::{AtomicBool, Ordering};
use tensorwire::{Deadline, Error, Result};

use crate::interrupt::look;

/// How often a wait looks for signals.
const LOOK: Duration = Duration::from_millis(50);

/// Tells work that nobody waits for it any more.
#[derive(Debug, Clone, Default)]
pub(super) struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Whether nobody waits any more.
    pub(super) fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Runs `work` on a thread of its own and waits for it until the deadline or Ctrl-C, detached from the interpreter. Work
/// that does not come back is left behind; it should end when it is told to stop.
///
/// A method of Python that blocks could not be left otherwise.
pub(super) fn aside<T: Send + 'static>(
    who: &str,
    deadline: Deadline,
    work: impl FnOnce(&Stop) -> Result<T> + Send + 'static,
) -> Result<T> {
    let stop = Stop::default();
    let (sender, receiver) = mpsc::sync_channel(1);
    let told = stop.clone();
    thread::Builder::new()
        .name("tensorwire-store".into())
        .spawn(move || {
            // Nobody may be waiting any more.
            let _ = sender.send(work(&told));
        })
        .map_err(|error| Error::io("starting a thread for a call of a store", error))?;
    // The thread needs the interpreter: whoever holds it here lets go of it.
    let receiver = Mutex::new(receiver);
    let wait = || wait(who, deadline, &receiver.lock().unwrap_or_else(PoisonError::into_inner));
    let result = Python::try_attach(|py| py.detach(wait)).unwrap_or_else(|| Err(shutting_down(who)));
    stop.0.store(true, Ordering::Relaxed);
    result
}

fn wait<T>(who: &str, deadline: Deadline, receiver: &mpsc::Receiver<Result<T>>) -> Result<T> {
    let started = Instant::now();
    loop {
        let left = deadline.remaining();
        match receiver.recv_timeout(left.unwrap_or_default().min(LOOK)) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) if left.is_none() => {
                let text = "a method of it has not come back; is another thread waiting in it?";
                return Err(Error::timed_out(format!("asking {who}"), started.elapsed(), text));
            }
            Err(RecvTimeoutError::Timeout) => look()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::misuse(format!("{who}: a call ended by a panic; please report this")));
            }
        }
    }
}

/// The interpreter ends.
pub(super) fn shutting_down(who: &str) -> Error {
    Error::misuse(format!("{who} cannot be asked any more: the interpreter is shutting down"))
}
