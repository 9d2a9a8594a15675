//! Flags: counters in shared memory that one side advances and others wait for.
//!
//! # The protocol
//!
//! A flag is one cache line of [`LINE`] bytes:
//!
//! | word | who writes | meaning |
//! |---|---|---|
//! | `value` | the flag's one writer | the counter; compared cyclically, so it may wrap |
//! | `sleepers` | every waiter, by atomic add | how many waiters sleep on `value`, or are about to |
//! | the rest | the flag's one writer, before it advances `value` | room for a small payload |
//!
//! *Signal* (the writer only): store `value` (release), a sequentially consistent fence, load `sleepers`; if it is
//! not zero, wake all who sleep on `value`.
//!
//! *Wait* (anyone): load `value` (acquire) for a while; if it is not there, add one to `sleepers`, the same fence,
//! and load `value` again; if it still is not there, sleep as long as `value` is what was just loaded *and* the abort word is
//! zero. The kernel compares both under its own lock. At the end, subtract one from `sleepers`.
//!
//! Nothing is lost: one of the two fences comes first. If it is the writer's, the waiter's load behind its own fence
//! sees the new value, and it does not sleep; if it is the waiter's, the writer's load of `sleepers` sees the
//! waiter counted, and it wakes. If the wake comes between the waiter's load and its sleep, the kernel sees that
//! `value` has changed and does not let it sleep.
//!
//! What was written before a signal is visible after the wait for it: the store of `value` releases, the load
//! acquires. (Code that writes with non-temporal stores must fence them itself; a release does not order them.) A
//! waiter that is killed while it sleeps leaves its count in `sleepers`; that costs the writer a
//! system call for each signal and nothing else.
//!
//! An [`Abort`] word is a line too. It goes from zero to a code once, by compare-and-swap, and then everybody
//! who sleeps on it is woken; every wait sleeps on its flag and on one or two abort words.
//!
//! A [`Bell`] is a line on which a process sleeps while it waits for many flags at once.
//!
//! A flag that a device writes has no one to make the system call: a wait for it polls.

mod bell;
mod futex;
mod line;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::deadline::Deadline;
#[cfg(not(loom))]
use crate::device::{DeviceId, Region};
use crate::error::{Error, Result};
#[cfg(not(loom))]
use crate::span::Span;

pub use bell::Bell;
pub(crate) use line::FlagLine;
pub use line::LINE;

/// Who advances a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Writer {
    /// A process of this host, through [`Flag::signal`].
    Host,
    /// A device, which stores the value and wakes nobody.
    Device,
}

/// A counter that one writer advances and others wait for.
#[derive(Clone)]
pub struct Flag {
    place: LinePlace,
    writer: Writer,
    spin: Duration,
}

impl Flag {
    /// A flag that lives only in this process.
    pub fn local() -> Self {
        Self { place: LinePlace::Local(Arc::default()), writer: Writer::Host, spin: SPIN }
    }

    /// The flag in one cache line of host memory: 64 bytes at a multiple of 64.
    #[cfg(not(loom))]
    pub fn new(span: &Span, writer: Writer) -> Result<Self> {
        Ok(Self { place: LinePlace::shared(span)?, writer, spin: SPIN })
    }

    /// Lets this handle's waits look for so long before they sleep. Short where the writer may need the core that the
    /// waiter spins on.
    pub fn set_spin(&mut self, spin: Duration) {
        self.spin = spin;
    }

    /// The same flag, at which this handle's waits look again and again: a device may write it, which wakes nobody.
    #[cfg(not(loom))]
    pub(crate) fn polled(self) -> Self {
        Self { writer: Writer::Device, ..self }
    }

    /// The counter now. What was written before it was signalled is visible.
    #[inline]
    pub fn load(&self) -> u32 {
        self.place.line().load()
    }

    /// Whether it has reached `target`.
    #[inline]
    pub fn reached(&self, target: u32) -> bool {
        reached(self.load(), target)
    }

    /// Advances the counter and wakes who waits for it. For the flag's one writer only.
    #[inline]
    pub fn signal(&self, value: u32) {
        self.place.line().signal(value);
    }

    /// Advances the counter and wakes nobody: for flags that are only ever looked at.
    #[inline]
    pub fn store(&self, value: u32) {
        self.place.line().store(value);
    }

    /// Advances the counter to `value` in its writer's place, unless it is there. Queues of devices that wait for it
    /// go on. The caller has set the abort word before: it tells these queues that nobody has signalled.
    #[cfg(not(loom))]
    pub(crate) fn force(&self, value: u32) {
        self.place.line().force(value);
    }

    /// The region that the flag lies in, and its address in this process.
    #[cfg(not(loom))]
    pub(crate) fn memory(&self) -> Option<(&Arc<dyn Region>, usize)> {
        self.place.memory()
    }

    /// Waits until the counter has reached `target`.
    #[inline]
    pub fn wait(&self, target: u32, abort: &Abort, deadline: Deadline) -> Result<()> {
        let line = self.place.line();
        let rest = match self.writer {
            Writer::Host => line::Rest::Sleep,
            Writer::Device => line::Rest::Poll,
        };
        line.wait(target, abort.lines(), deadline, line::How { spin: self.spin, rest })
    }
}

impl fmt::Debug for Flag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Flag({}, {:?})", self.load(), self.writer)
    }
}

/// A word that ends every wait that looks at it; or two such words.
#[derive(Clone)]
pub struct Abort {
    place: LinePlace,
    also: Option<LinePlace>,
}

impl Abort {
    /// An abort word that lives only in this process.
    pub fn local() -> Self {
        Self { place: LinePlace::Local(Arc::default()), also: None }
    }

    /// The abort word in one cache line of host memory: 64 bytes at a multiple of 64.
    #[cfg(not(loom))]
    pub fn new(span: &Span) -> Result<Self> {
        Ok(Self { place: LinePlace::shared(span)?, also: None })
    }

    /// The code of a word that a device has set because the deadline of a queued wait has passed.
    pub const LATE: u32 = u32::MAX;

    /// The regions that the words lie in, and their addresses in this process.
    #[cfg(not(loom))]
    pub(crate) fn memories(&self) -> impl Iterator<Item = Option<(&Arc<dyn Region>, usize)>> {
        std::iter::once(&self.place).chain(&self.also).map(LinePlace::memory)
    }

    /// This word, with another one that ends waits just as well.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        Self { place: self.place.clone(), also: Some(other.place.clone()) }
    }

    /// The code it was set to, or nothing; of two words, the first one's.
    #[inline]
    pub fn code(&self) -> Option<u32> {
        Some(self.place.line().load()).filter(|&code| code != 0)
    }

    /// Whether it is set; of two words, either.
    #[inline]
    pub fn is_set(&self) -> bool {
        self.code().is_some() || self.also.as_ref().is_some_and(|also| also.line().load() != 0)
    }

    /// Refuses to go on once it is set, or once the deadline has passed.
    pub(crate) fn check(&self, deadline: Deadline) -> Result<()> {
        if self.is_set() {
            Err(Error::Aborted)
        } else if deadline.passed() {
            Err(Error::TimedOut)
        } else {
            Ok(())
        }
    }

    /// Makes it as new. Its caller knows that nobody waits with it, and that nobody sets it meanwhile.
    pub fn reset(&self) {
        self.place.line().store(0);
    }

    #[inline]
    fn lines(&self) -> line::Stops<'_> {
        line::Stops(self.place.line(), self.also.as_ref().map(LinePlace::line))
    }

    /// Sets it, unless it is set already, and wakes all who wait. Gives the code that is there now. Of two words, the
    /// first one.
    /// A code of zero means nothing and is taken as 1.
    pub fn set(&self, code: u32) -> u32 {
        self.place.line().set_once(code.max(1))
    }

    /// Sleeps until it is set, or the deadline passes.
    #[inline]
    pub fn wait(&self, deadline: Deadline) -> Result<u32> {
        let line = self.place.line();
        loop {
            if let Some(code) = self.code() {
                return Ok(code);
            }
            let left = deadline.remaining().ok_or(Error::TimedOut)?;
            futex::sleep(line.word(), 0, &[], left);
        }
    }
}

impl fmt::Debug for Abort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Abort({:?})", self.code())
    }
}

/// Whether a counter at `value` has reached `target`, counting around: at most 2^31 - 1 ahead.
#[inline]
pub fn reached(value: u32, target: u32) -> bool {
    value.wrapping_sub(target) as i32 >= 0
}

/// How long a wait looks at the value before it sleeps. Longer than a cache line takes between two cores by
/// two orders of magnitude, shorter than a time slice by two.
const SPIN: Duration = Duration::from_micros(30);

/// Where a line lives, and what keeps it there.
#[derive(Clone)]
enum LinePlace {
    Local(Arc<FlagLine>),
    #[cfg(not(loom))]
    Shared {
        line: std::ptr::NonNull<FlagLine>,
        region: Arc<dyn Region>,
    },
}

// SAFETY: a `FlagLine` is made of atomics only; the pointer is valid for as long as the region beside it lives, and
// regions may be sent and shared.
#[cfg(not(loom))]
unsafe impl Send for LinePlace {}
// SAFETY: as above.
#[cfg(not(loom))]
unsafe impl Sync for LinePlace {}

impl LinePlace {
    #[cfg(not(loom))]
    fn shared(span: &Span) -> Result<Self> {
        if span.device() != DeviceId::Host || span.len() < LINE || !span.addr().is_multiple_of(LINE) {
            return Err(Error::misuse(format!(
                "a flag needs {LINE} bytes of host memory at a multiple of {LINE}, not {} at {} on {}",
                span.len(),
                span.offset(),
                span.device()
            )));
        }
        let line = std::ptr::NonNull::new(span.addr() as *mut FlagLine)
            .ok_or_else(|| Error::misuse("a flag cannot live at address zero"))?;
        Ok(Self::Shared { line, region: span.region().clone() })
    }

    #[cfg(not(loom))]
    fn memory(&self) -> Option<(&Arc<dyn Region>, usize)> {
        match self {
            Self::Local(_) => None,
            Self::Shared { line, region } => Some((region, line.as_ptr() as usize)),
        }
    }

    #[inline]
    fn line(&self) -> &FlagLine {
        match self {
            Self::Local(line) => line,
            // SAFETY: `shared` checked size, alignment and device; the region is alive beside the pointer; any
            // bytes are a valid `FlagLine`, and all access to it is atomic, here and in the other processes.
            #[cfg(not(loom))]
            Self::Shared { line, .. } => unsafe { line.as_ref() },
        }
    }
}

#[cfg(all(test, not(loom)))]
mod stress;
#[cfg(all(test, not(loom)))]
mod tests;
