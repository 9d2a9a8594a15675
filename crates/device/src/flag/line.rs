//! One cache line and the two halves of the protocol that [`super`] describes.

use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::sync::{AtomicU32, Ordering, fence, spin_loop};

use super::{futex, reached};

/// Bytes of a line.
pub const LINE: usize = 64;

/// The memory of a flag or of an abort word.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct FlagLine {
    value: AtomicU32,
    sleepers: AtomicU32,
    payload: [AtomicU32; 14],
}

impl Default for FlagLine {
    fn default() -> Self {
        Self {
            value: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            payload: std::array::from_fn(|_| AtomicU32::new(0)),
        }
    }
}

/// What a wait does when spinning has not helped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    /// Sleep until the writer wakes us.
    Sleep,
    /// Look again and again, with short naps: nobody will wake us.
    Poll,
}

/// How a wait waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct How {
    /// So long by looking.
    pub(super) spin: Duration,
    /// Then so.
    pub(super) rest: Rest,
}

/// The lines that end a wait when they are set.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stops<'a>(pub(super) &'a FlagLine, pub(super) Option<&'a FlagLine>);

impl Stops<'_> {
    #[inline]
    fn any(self) -> bool {
        self.0.load() != 0 || self.1.is_some_and(|other| other.load() != 0)
    }

    /// Sleeps as long as `line` is at `seen` and none of these is set; at most `left`.
    fn sleep(self, line: &FlagLine, seen: u32, left: Duration) {
        match self {
            Self(one, None) => futex::sleep(&line.value, seen, &[&one.value], left),
            Self(one, Some(other)) => futex::sleep(&line.value, seen, &[&one.value, &other.value], left),
        }
    }
}

impl FlagLine {
    #[inline]
    pub(super) fn word(&self) -> &AtomicU32 {
        &self.value
    }

    #[inline]
    pub(super) fn load(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// For those who poll: nobody is woken.
    #[inline]
    pub(super) fn store(&self, value: u32) {
        self.value.store(value, Ordering::Release);
    }

    #[inline]
    pub(super) fn signal(&self, value: u32) {
        self.value.store(value, Ordering::Release);
        // Pairs with the fence in `wait`. A fence and not sequentially consistent accesses, because loom knows
        // only the fence; the two are equally strong here.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            futex::wake_all(&self.value);
        }
    }

    /// Advances the counter to `value` unless it is there already, whoever else writes it, and wakes who sleeps on it.
    #[cfg(not(loom))]
    pub(super) fn force(&self, value: u32) {
        let behind = |now| (!reached(now, value)).then_some(value);
        if self.value.fetch_update(Ordering::AcqRel, Ordering::Acquire, behind).is_ok() {
            futex::wake_all(&self.value);
        }
    }

    /// Advances the counter and wakes who sleeps on it, if anyone does: any number of writers may.
    pub(super) fn ring(&self) {
        // Pairs with the fence in `sleep_unless`.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            self.value.fetch_add(1, Ordering::Release);
            futex::wake_all(&self.value);
        }
    }

    /// Sleeps once, until rung or stopped, unless `look` finds something to do.
    pub(super) fn sleep_unless(&self, look: impl FnOnce() -> Option<Deadline>, stops: Stops<'_>) {
        let seen = self.load();
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let left = look().and_then(|deadline| deadline.remaining());
        if let Some(left) = left.filter(|_| !stops.any()) {
            stops.sleep(self, seen, left);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn set_once(&self, code: u32) -> u32 {
        match self.value.compare_exchange(0, code, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                // Waiters on flags sleep on this word too and are not counted: always wake.
                futex::wake_all(&self.value);
                code
            }
            Err(earlier) => earlier,
        }
    }

    #[inline]
    pub(super) fn wait(&self, target: u32, stops: Stops<'_>, deadline: Deadline, how: How) -> Result<()> {
        if reached(self.load(), target) || self.spin(target, stops, deadline, how.spin) {
            return Ok(());
        }
        match how.rest {
            Rest::Sleep => {
                self.sleepers.fetch_add(1, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                let result = self.sleep(target, stops, deadline);
                self.sleepers.fetch_sub(1, Ordering::Relaxed);
                result
            }
            Rest::Poll => self.poll(target, stops, deadline),
        }
    }

    /// Looks for a short while, first as often as it can; gives whether the target was reached.
    fn spin(&self, target: u32, stops: Stops<'_>, deadline: Deadline, spin: Duration) -> bool {
        for _ in 0..Budget::EAGER {
            if reached(self.load(), target) {
                return true;
            }
        }
        let mut budget = Budget::new(spin, deadline);
        while budget.left() && !stops.any() {
            for _ in 0..Budget::LOOKS {
                if reached(self.load(), target) {
                    return true;
                }
                spin_loop();
            }
        }
        false
    }

    fn sleep(&self, target: u32, stops: Stops<'_>, deadline: Deadline) -> Result<()> {
        loop {
            let seen = self.load();
            // What has arrived counts, even if somebody aborted meanwhile.
            if reached(seen, target) {
                return Ok(());
            }
            if stops.any() {
                return Err(Error::Aborted);
            }
            let left = deadline.remaining().ok_or(Error::TimedOut)?;
            stops.sleep(self, seen, left);
        }
    }

    fn poll(&self, target: u32, stops: Stops<'_>, deadline: Deadline) -> Result<()> {
        loop {
            if reached(self.load(), target) {
                return Ok(());
            }
            if stops.any() {
                return Err(Error::Aborted);
            }
            deadline.remaining().ok_or(Error::TimedOut)?;
            futex::nap();
        }
    }
}

/// How long to spin: by the clock, or a single look under loom, which has none.
struct Budget {
    #[cfg(not(loom))]
    until: std::time::Instant,
    #[cfg(loom)]
    left: bool,
}

#[cfg(not(loom))]
impl Budget {
    const EAGER: u32 = 200;
    const LOOKS: u32 = 16;

    fn new(spin: Duration, deadline: Deadline) -> Self {
        Self { until: deadline.instant().min(std::time::Instant::now() + spin) }
    }

    fn left(&mut self) -> bool {
        std::time::Instant::now() < self.until
    }
}

#[cfg(loom)]
impl Budget {
    const EAGER: u32 = 0;
    const LOOKS: u32 = 1;

    fn new(_spin: Duration, _deadline: Deadline) -> Self {
        Self { left: true }
    }

    fn left(&mut self) -> bool {
        std::mem::take(&mut self.left)
    }
}
