//! The atomics that shared-memory protocols use: the real ones, or loom's under `cfg(loom)`.
//!
//! Nothing else in the crates' sources names `std::sync::atomic` (tests/rules.rs sees to it), so that loom checks the code
//! that runs.

#[cfg(not(loom))]
mod imp {
    pub use std::hint::spin_loop;
    pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
}

#[cfg(loom)]
mod imp {
    pub use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

    /// Nothing: loom takes the hint to mean that another thread must run first, and would leave out every schedule
    /// in which the spinning thread goes straight on to sleep. Our spins are bounded.
    pub fn spin_loop() {}
}

pub use imp::*;
