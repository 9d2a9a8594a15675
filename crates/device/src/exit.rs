//! What a process does last, when it ends in an orderly way: its main function has returned, or somebody has called `exit`.

use std::panic::catch_unwind;
use std::sync::{Mutex, PoisonError};

static CALLS: Mutex<Vec<fn()>> = Mutex::new(Vec::new());

/// Has `call` called when the process ends, before what was registered before it, by us or by others (a driver, say). A
/// process that is killed or that aborts calls nothing.
pub fn at_exit(call: fn()) {
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    calls.push(call);
    // SAFETY: the function takes nothing, gives nothing and does not unwind. Where it lies in a library that is unloaded, the
    // C library calls it before that. If there is no room for it, it is never called.
    unsafe { libc::atexit(last) };
}

/// Calls the last one that was registered and not called.
extern "C" fn last() {
    let call = CALLS.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let _ = catch_unwind(|| call.into_iter().for_each(|call| call()));
}
