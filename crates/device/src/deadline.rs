//! The moment at which a wait must end. Every wait has one.

use std::time::{Duration, Instant};

/// A point in time that a whole operation shares, however many waits it is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Instant);

impl Deadline {
    /// `timeout` from now. A time-out too large for the clock means a hundred years.
    #[inline]
    pub fn after(timeout: Duration) -> Self {
        Self::after_moment(Instant::now(), timeout)
    }

    /// At a moment.
    #[inline]
    pub fn at(moment: Instant) -> Self {
        Self(moment)
    }

    /// `timeout` from a moment. A time-out too large for the clock means a hundred years.
    #[inline]
    pub fn after_moment(moment: Instant, timeout: Duration) -> Self {
        let century = Duration::from_secs(100 * 365 * 24 * 3600);
        Self(moment.checked_add(timeout.min(century)).unwrap_or(moment))
    }

    /// What is left, or `None` once it has passed.
    pub fn remaining(&self) -> Option<Duration> {
        let left = self.0.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// Whether it has passed.
    pub fn passed(&self) -> bool {
        self.remaining().is_none()
    }

    /// The earlier of the two.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        Self(self.0.min(other.0))
    }

    /// The instant itself.
    #[inline]
    pub fn instant(&self) -> Instant {
        self.0
    }
}
