//! A bell: one cache line on which a process sleeps while it waits for several counters of several writers.
//!
//! *Ring* (anyone, after storing what the owner looks at): a sequentially consistent fence, load `sleepers`; if it is
//! not zero, add one to `value` and wake all who sleep on it.
//!
//! *Sleep* (the owner's threads): load `value`, add one to `sleepers`, the same fence, look at everything; if there is
//! nothing, sleep as long as `value` is what was loaded and the abort word is zero. At the end, subtract one from
//! `sleepers`.
//!
//! Nothing is lost: if the ringer's fence comes first, the look sees what was stored before it; if the sleeper's does,
//! the ringer sees the sleeper counted and changes `value`, so that the kernel does not let the sleeper sleep, or wakes
//! it. A sleeper that loads a `value` changed by a ring sees what was stored before that ring.
//!
//! A look by another thread of the owner counts too, if it comes after the sleeper's fence (by way of a lock, say): what
//! it does not see is stored by a ringer that sees the sleeper.

use std::fmt;
use std::sync::Arc;

use crate::deadline::Deadline;
#[cfg(not(loom))]
use crate::error::Result;
#[cfg(not(loom))]
use crate::span::Span;

use super::{Abort, LinePlace};

/// What a process sleeps on while it waits for many things at once. Whoever does one of them rings it.
#[derive(Clone)]
pub struct Bell(LinePlace);

impl Bell {
    /// A bell that lives only in this process.
    pub fn local() -> Self {
        Self(LinePlace::Local(Arc::default()))
    }

    /// The bell in one cache line of host memory: 64 bytes at a multiple of 64.
    #[cfg(not(loom))]
    pub fn new(span: &Span) -> Result<Self> {
        Ok(Self(LinePlace::shared(span)?))
    }

    /// Wakes who sleeps here, if anyone does; call it after storing what they look at.
    pub fn ring(&self) {
        self.0.line().ring();
    }

    /// Sleeps until it is rung, `abort` is set, or the deadline that `look` gives has passed; it may return early. `look`
    /// is called once, when whoever comes later would ring: it gives nothing if there is something to do already.
    pub fn sleep(&self, abort: &Abort, look: impl FnOnce() -> Option<Deadline>) {
        self.0.line().sleep_unless(look, abort.lines());
    }
}

impl fmt::Debug for Bell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bell({})", self.0.line().load())
    }
}
