//! The end of the process: the driver takes itself down then, and a thread of ours that is in one of its calls would crash. So
//! before that, nobody is let in any more, and those who are inside are waited for.

use std::sync::Once;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::exit::at_exit;
use crate::sync::{AtomicBool, AtomicUsize, Ordering};

/// How long those who are inside are waited for. A call may be blocked for good.
const PATIENCE: Duration = Duration::from_millis(500);

static INSIDE: AtomicUsize = AtomicUsize::new(0);
static ENDING: AtomicBool = AtomicBool::new(false);

/// A thread that makes calls of the driver.
pub(super) struct Inside(());

impl Inside {
    /// Refused when the process ends.
    pub(super) fn come() -> Result<Self> {
        INSIDE.fetch_add(1, Ordering::SeqCst);
        let inside = Self(());
        match ENDING.load(Ordering::SeqCst) {
            true => Err(Error::misuse("the process ends, and its GPUs are given up")),
            false => Ok(inside),
        }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether the process ends: nobody is told anything by the driver any more, and nobody gets memory again.
pub(super) fn has_begun() -> bool {
    ENDING.load(Ordering::SeqCst)
}

/// Called when a GPU is opened: what the driver registers for the end is registered by then, and comes after this.
pub(super) fn prepare() {
    static PREPARED: Once = Once::new();
    PREPARED.call_once(|| at_exit(end));
}

fn end() {
    ENDING.store(true, Ordering::SeqCst);
    let begin = Instant::now();
    while INSIDE.load(Ordering::SeqCst) > 0 && begin.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
}
