//! A way for tests to stop, delay or kill a process at a named step of a pipe. Not in ordinary builds.

use tensorwire_device::steps::Steps;

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

static HOOK: Steps = Steps::new();

/// Calls `hook` at every step of every pipe of this process, on the thread that is there.
pub fn set(hook: impl Fn(&'static str) + Send + Sync + 'static) {
    HOOK.set(hook);
}

pub(super) fn at(step: &'static str) {
    HOOK.at(step);
}
