//! A way for tests to stop, delay or kill a process at a named step of a lease. Not in ordinary builds.

use tensorwire_device::steps::Steps;

/// Every step, in the order in which a grant meets them.
pub const STEPS: [&str; 10] = [
    "grant: before it is noted",
    "grant: noted",
    "redeem: before it is counted",
    "redeem: counted",
    "redeem: mapped",
    "redeem: ready",
    "release: before it is counted",
    "release: counted",
    "release: before the bell",
    "owner: before memory is let go",
];

static HOOK: Steps = Steps::new();

/// Calls `hook` at every step of every lease of this process, on the thread that is there.
pub fn set(hook: impl Fn(&'static str) + Send + Sync + 'static) {
    HOOK.set(hook);
}

pub(super) fn at(step: &'static str) {
    HOOK.at(step);
}
