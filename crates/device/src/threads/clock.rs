//! The clock of a GPU of threads. Its zero is another one than that of the host's clock, as with a real GPU.

use crate::clock::monotonic;

/// See the module.
#[derive(Debug, Clone, Copy)]
pub(super) struct ThreadClock {
    /// How far it is ahead of the host's.
    ahead: u64,
    /// What is to be added to its time, as it was found out by comparing the two.
    offset: u64,
}

impl ThreadClock {
    /// That of the GPU with this number.
    pub(super) fn new(number: usize) -> Self {
        let mut clock = Self { ahead: (number as u64 + 1) << 40, offset: 0 };
        let (before, time, after) = (monotonic(), clock.time(), monotonic());
        clock.offset = before.wrapping_add(after.wrapping_sub(before) / 2).wrapping_sub(time);
        clock
    }

    fn time(self) -> u64 {
        monotonic().wrapping_add(self.ahead)
    }

    /// What a command writes at its end.
    pub(super) fn stamp(self) -> u64 {
        self.time().wrapping_add(self.offset)
    }
}
