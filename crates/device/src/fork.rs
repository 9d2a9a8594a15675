//! What a forked child must not do.
//!
//! A child of fork (a DataLoader worker, say) inherits our descriptors. If it kept them, a connection of ours
//! would stay open after our death, and the child's destructors would close numbers that are no longer ours.
//! So a handler that runs in every forked child closes the descriptors that were registered here and counts the
//! fork; what was made before it knows by its [`Birth`] that it belongs to the parent, and does nothing. What the
//! child makes afterwards is its own.
//!
//! This is the one piece of state that belongs to the process and not to a `Context`: fork copies the process.
//! It is a bitmap by descriptor number, because the handler may neither lock nor allocate.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Once;

use crate::error::{Error, Result};
use crate::fork::process_wide::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Whether this process is a forked child of one that used tensorwire.
pub fn in_child() -> bool {
    FORKS.load(Ordering::Relaxed) != 0
}

/// Which process made a thing: a copy of it in a forked child is not the child's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Birth(u32);

impl Birth {
    /// For a thing that is made now.
    pub fn now() -> Self {
        install();
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this process made it.
    pub fn is_ours(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    /// Refuses to use in a forked child what its parent made.
    pub fn check(self, what: &'static str) -> Result<()> {
        if self.is_ours() { Ok(()) } else { Err(Error::Forked(what)) }
    }
}

/// A static that each process has for itself. A forked child begins anew: what it inherits is its parent's, and may be
/// locked by a thread that the child does not have.
pub struct PerProcess<T: 'static> {
    at: AtomicPtr<(Birth, T)>,
    make: fn() -> T,
}

impl<T: Send + Sync> PerProcess<T> {
    /// Made by `make` when it is first needed.
    pub const fn new(make: fn() -> T) -> Self {
        Self { at: AtomicPtr::new(std::ptr::null_mut()), make }
    }

    /// This process's own.
    pub fn get(&'static self) -> &'static T {
        loop {
            let at = self.at.load(Ordering::Acquire);
            // SAFETY: null, or a box that was put there below and is never freed.
            if let Some((birth, made)) = unsafe { at.as_ref() }
                && birth.is_ours()
            {
                return made;
            }
            let new = Box::into_raw(Box::new((Birth::now(), (self.make)())));
            // The parent's stays as it is: somebody may have been at work on it.
            if self.at.compare_exchange(at, new, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: just made, and nobody else has seen it.
                drop(unsafe { Box::from_raw(new) });
            }
        }
    }
}

impl<T> fmt::Debug for PerProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PerProcess")
    }
}

/// Has forks counted from now on.
fn install() {
    INSTALL.call_once(|| {
        // SAFETY: `child` is a plain function without captures, and does only what is allowed between fork and
        // exec in a process with threads: it reads and writes lock-free atomics and calls close.
        let refused = unsafe { libc::pthread_atfork(None, None, Some(child)) };
        if refused != 0 {
            tracing::warn!(
                "pthread_atfork failed with {refused}: forked workers will keep our descriptors open"
            );
        }
    });
}

/// Has the descriptor closed in forked children.
pub(crate) fn register(fd: &impl AsFd) {
    install();
    if let Some((word, bit)) = place(fd.as_fd().as_raw_fd()) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// Takes it back; call it before the descriptor is closed.
pub(crate) fn unregister(fd: &impl AsFd) {
    if let Some((word, bit)) = place(fd.as_fd().as_raw_fd()) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Descriptors above this number stay open in forked children; numbers are dense, so that takes a million
/// open files.
const MOST: usize = 1 << 20;

static INSTALL: Once = Once::new();
/// How many forks lie between this process and the first one that used tensorwire.
static FORKS: AtomicU32 = AtomicU32::new(0);
static OURS: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];

fn place(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let number = usize::try_from(fd).ok()?;
    Some((OURS.get(number / 64)?, 1 << (number % 64)))
}

extern "C" fn child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    for (index, word) in OURS.iter().enumerate() {
        // Most words are zero; a write would copy their page into the child.
        if word.load(Ordering::Relaxed) == 0 {
            continue;
        }
        let mut bits = word.swap(0, Ordering::Relaxed);
        while bits != 0 {
            let fd = index * 64 + bits.trailing_zeros() as usize;
            // SAFETY: the bit says that the parent owned this number when it forked, and its owner in this
            // child (an `Fd`) sees by its `Birth` that it is not the child's and will neither use nor close it.
            unsafe { libc::close(fd as libc::c_int) };
            bits &= bits - 1;
        }
    }
}

/// Statics need atomics with a const constructor, which loom's are not; loom does not model fork anyway.
mod process_wide {
    pub(super) use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
}
