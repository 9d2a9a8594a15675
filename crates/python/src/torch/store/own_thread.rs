//! Calls of code that is not ours and that may never come back.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::Python;
use tensorwire::device::sync::{AtomicBool, AtomicUsize, Ordering};
use tensorwire::{Deadline, Error, Result, interrupt};

use crate::interrupt::look;

/// How often a wait looks for signals.
const LOOK: Duration = Duration::from_millis(50);
/// How many calls of a store may be left behind.
const MOST: usize = 16;

/// Tells work that nobody waits for it any more.
#[derive(Debug, Clone, Default)]
pub(super) struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Whether nobody waits any more.
    pub(super) fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The calls of one store that have not come back yet.
#[derive(Debug, Clone, Default)]
pub(super) struct Crowd(Arc<AtomicUsize>);

/// A place among them.
struct ThreadPlace(Arc<AtomicUsize>);

impl Crowd {
    /// A place, if there are not too many already: a store that answers nobody shall not collect threads.
    fn enter(&self) -> Option<ThreadPlace> {
        let place = ThreadPlace(self.0.clone());
        (self.0.fetch_add(1, Ordering::Relaxed) < MOST).then_some(place)
    }
}

impl Drop for ThreadPlace {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs `work` on a thread of its own and waits for it until the deadline, Ctrl-C, or the hook of this thread ends it, detached
/// from the interpreter. Work
/// that does not come back is left behind; it should end when it is told to stop.
///
/// A method of Python that blocks could not be left otherwise.
pub(super) fn on_own_thread<T: Send + 'static>(
    crowd: &Crowd,
    who: &str,
    deadline: Deadline,
    work: impl FnOnce(&Stop) -> Result<T> + Send + 'static,
) -> Result<T> {
    let stop = Stop::default();
    let told = stop.clone();
    let crowd = crowd.clone();
    let run = || {
        let place = enter(&crowd, who, deadline)?;
        let (sender, receiver) = mpsc::sync_channel(1);
        thread::Builder::new()
            .name("tensorwire-store".into())
            .spawn(move || {
                let result = work(&told);
                drop(place);
                // Nobody may be waiting any more.
                let _ = sender.send(result);
            })
            .map_err(|error| Error::io("starting a thread for a call of a store", error))?;
        wait(who, deadline, &receiver)
    };
    // The thread needs the interpreter: whoever holds it here lets go of it.
    let result = Python::try_attach(|py| py.detach(run)).unwrap_or_else(|| Err(shutting_down(who)));
    stop.0.store(true, Ordering::Relaxed);
    result
}

fn enter(crowd: &Crowd, who: &str, deadline: Deadline) -> Result<ThreadPlace> {
    let started = Instant::now();
    loop {
        if let Some(place) = crowd.enter() {
            return Ok(place);
        }
        let left = deadline.remaining().ok_or_else(|| stuck(who, started))?;
        thread::sleep(left.min(LOOK));
        look().and_then(|()| interrupt::check())?;
    }
}

fn wait<T>(who: &str, deadline: Deadline, receiver: &mpsc::Receiver<Result<T>>) -> Result<T> {
    let started = Instant::now();
    loop {
        let left = deadline.remaining();
        match receiver.recv_timeout(left.unwrap_or_default().min(LOOK)) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) if left.is_none() => return Err(stuck(who, started)),
            Err(RecvTimeoutError::Timeout) => look().and_then(|()| interrupt::check())?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::misuse(format!("{who}: a call ended by a panic; please report this")));
            }
        }
    }
}

fn stuck(who: &str, since: Instant) -> Error {
    let text = "a method of it has not come back; is another thread waiting in it?";
    Error::timed_out(format!("asking {who}"), since.elapsed(), text)
}

/// The interpreter ends.
pub(super) fn shutting_down(who: &str) -> Error {
    Error::misuse(format!("{who} cannot be asked any more: the interpreter is shutting down"))
}
