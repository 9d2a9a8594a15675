//! A way for tests to stop, delay or kill a process at a named step of a pipe. Not in ordinary builds.

use std::sync::{Arc, RwLock};

/// Every step, in the order in which a pipe and then a message meet them; first those of one end, then those of the other.
pub const STEPS: [&str; 15] = [
    "connect: before its word",
    "connect: behind its word",
    "connect: formed",
    "listen: somebody is there",
    "listen: formed",
    "send: before the head",
    "send: behind the head",
    "send: behind the blocks",
    "send: heard",
    "receive: a head",
    "receive: a description",
    "read: before a block",
    "read: behind a block",
    "read: copies are queued",
    "read: before its word",
];

type Hook = Arc<dyn Fn(&'static str) + Send + Sync>;

static HOOK: RwLock<Option<Hook>> = RwLock::new(None);

/// Calls `hook` at every step of every pipe of this process, on the thread that is there.
pub fn set(hook: impl Fn(&'static str) + Send + Sync + 'static) {
    if let Ok(mut slot) = HOOK.write() {
        *slot = Some(Arc::new(hook));
    }
}

pub(super) fn at(step: &'static str) {
    let hook = HOOK.read().ok().and_then(|slot| slot.clone());
    if let Some(hook) = hook {
        hook(step);
    }
}
