//! The atomics, locks and counted pointers that protocols between threads and processes use: the real ones, or loom's under `cfg(loom)`.
//!
//! Nothing else in the crates' sources names `std::sync::atomic` (tests/rules.rs sees to it), so that loom checks the code
//! that runs.

#[cfg(not(loom))]
mod imp {
    pub use std::hint::spin_loop;
    pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
    pub use std::sync::{Arc, Condvar, Mutex, MutexGuard};
}

#[cfg(loom)]
mod imp {
    pub use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
    pub use loom::sync::{Arc, Condvar, Mutex, MutexGuard};

    /// Nothing: loom takes the hint to mean that another thread must run first, and would leave out every schedule
    /// in which the spinning thread goes straight on to sleep. Our spins are bounded.
    pub fn spin_loop() {}
}

pub use imp::*;

/// What a lock guards, also if somebody panicked while they held it: nothing here is left half changed.
pub fn unpoisoned<T>(locked: std::sync::LockResult<T>) -> T {
    locked.unwrap_or_else(std::sync::PoisonError::into_inner)
}
