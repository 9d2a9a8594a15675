//! A way for tests to stop, delay or kill a process before a numbered command of a stream.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, RwLock};

use crate::sync::unpoisoned;

/// What a command does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// One copy, or several in one call.
    Copy,
    /// A copy between two layouts.
    CopyStrided,
    /// A reduction.
    Reduce,
    /// A signal.
    Signal,
    /// A wait for one flag, or for several in one call.
    Wait,
    /// A mark.
    Mark,
    /// A wait for a mark.
    Follow,
}

/// A command that is about to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Step {
    /// The GPU, by its number.
    pub gpu: usize,
    /// The stream: the first queue of the GPU in this process is 0, the next 1.
    pub stream: u64,
    /// What the command does.
    pub kind: Kind,
    /// Its number among all commands of the GPU in this process, from 0 on, in the order in which they begin.
    pub number: u64,
}

type Hook = Arc<dyn Fn(Step) + Send + Sync>;

static HOOK: RwLock<Option<Hook>> = RwLock::new(None);

/// Calls `hook` before each command of every GPU of this process, on the thread of its hardware queue. As long as the call
/// lasts, all streams of that hardware queue are held.
pub fn set(hook: impl Fn(Step) + Send + Sync + 'static) {
    *unpoisoned(HOOK.write()) = Some(Arc::new(hook));
}

/// Calls nothing any more.
pub fn clear() {
    *unpoisoned(HOOK.write()) = None;
}

pub(super) fn at(step: Step) {
    let hook = unpoisoned(HOOK.read()).clone();
    if let Some(hook) = hook {
        // A hook that panics has failed its own test; the hardware queue goes on.
        let called = std::panic::catch_unwind(AssertUnwindSafe(|| hook(step)));
        if called.is_err() {
            tracing::error!("the hook of a test panicked at {step:?}");
        }
    }
}
