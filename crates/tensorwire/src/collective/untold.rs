//! Errors of queued operations that nobody has been told. If nobody is until the process ends, they are its last lines: a
//! program that reads a tensor which was never written must not end without a word.

use std::io::Write;
use std::sync::{Mutex, Once, PoisonError};

use tensorwire_device::exit::at_exit;

static UNTOLD: Mutex<Untold> = Mutex::new(Untold { last: 0, errors: Vec::new() });

struct Untold {
    last: u64,
    /// By number, with the process that they are of: a forked child says nothing of its parent's.
    errors: Vec<(u64, u32, String)>,
}

/// Notes an error. Gives its number.
pub(crate) fn note(text: String) -> u64 {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| at_exit(say));
    let mut untold = UNTOLD.lock().unwrap_or_else(PoisonError::into_inner);
    untold.last += 1;
    let number = untold.last;
    untold.errors.push((number, std::process::id(), text));
    number
}

/// Somebody has been told.
pub(super) fn told(number: u64) {
    UNTOLD.lock().unwrap_or_else(PoisonError::into_inner).errors.retain(|(other, ..)| *other != number);
}

fn say() {
    let untold = UNTOLD.lock().unwrap_or_else(PoisonError::into_inner);
    let mut out = std::io::stderr().lock();
    for (_, _, text) in untold.errors.iter().filter(|(_, process, _)| *process == std::process::id()) {
        let _ = writeln!(out, "tensorwire: {text}");
    }
}
