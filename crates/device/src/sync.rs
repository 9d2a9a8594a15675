//! The atomics that shared-memory protocols use: the real ones, or loom's under `cfg(loom)`.
//!
//! Nothing else in this crate names `std::sync::atomic` (tests/rules.rs sees to it), so that loom checks the code that
//! runs.

#[cfg(not(loom))]
#[allow(clippy::disallowed_types)]
mod imp {
    pub use std::hint::spin_loop;
    pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
}

#[cfg(loom)]
mod imp {
    pub use loom::hint::spin_loop;
    pub use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
}

pub use imp::*;
