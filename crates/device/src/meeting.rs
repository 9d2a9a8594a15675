//! Meetings: work on the queues of several ranks that waits for each other while it runs.
//!
//! A queue that waits for a flag waits before its work begins, and somebody has to see to it that it may. A meeting is part of
//! the work itself ([`Queue::reduce_together`](crate::Queue::reduce_together)): the work of a rank begins when that of all
//! ranks has begun, and it ends when that of all ranks is done. This needs work that runs at the same time on all ranks.
//!
//! # The words
//!
//! Each rank brings [`size`] bytes of zeros, which all ranks reach. They hold words of eight bytes:
//!
//! | words | who writes | what |
//! |---|---|---|
//! | 1 | any rank | how a meeting has failed; every later one fails at once |
//! | 1 | the rank itself | whether it has told its host so |
//! | [`CHANNELS`] times [`BLOCKS`] rows | | a row for each block of the work, at a multiple of 128 bytes: |
//! | - 1 of each | the rank itself | how often this block has met those of the others |
//! | - n of each | each rank, one word each | how often the same block of that rank has come |
//!
//! To meet, a block takes the next number, writes it to its word in the row of every other rank, and waits until all words in its
//! own row have reached it. A piece of work meets twice: when it begins, and when it is done. Words only grow, and no
//! number comes with the call: so a launch that was recorded can be run again as it is.
//!
//! Whoever waits looks at the clock, at the abort words, and at the first word. Whoever gives up writes the first word of all
//! ranks. So nobody waits longer than the least patient of them, and a rank that comes later writes nothing.

use std::fmt;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::flag::{Abort, Flag};
use crate::gpu::MOST_REDUCED;
use crate::span::View;

#[cfg(not(loom))]
pub(crate) mod here;

/// So many pieces of work of the same ranks can meet at the same time, each on a channel of its own.
pub const CHANNELS: usize = 4;

/// So many blocks of a piece of work can meet.
pub const BLOCKS: usize = 32;

/// Bytes before the first channel.
pub(crate) const HEAD: usize = 128;

/// Bytes of a row.
pub(crate) const fn row(ranks: usize) -> usize {
    (8 * (1 + ranks)).next_multiple_of(128)
}

/// Bytes from the beginning to the words of a channel.
pub(crate) const fn channel_start(ranks: usize, channel: usize) -> usize {
    HEAD + channel * BLOCKS * row(ranks)
}

/// Bytes that each rank brings.
pub const fn size(ranks: usize) -> usize {
    channel_start(ranks, CHANNELS)
}

/// What a piece of work needs to meet that of other ranks. All but `words`, `rank`, `abort`, `failure`, `timeout` and `goes_on`
/// is the same on all ranks.
#[derive(Clone, Copy)]
pub struct Meeting<'a> {
    /// The words of all ranks, in their order.
    pub words: &'a [View<'a>],
    /// This rank.
    pub rank: usize,
    /// What tells it from others that are under way.
    pub channel: usize,
    /// How many blocks may wait for others. Those of all ranks on a device must have room there at the same time, beside
    /// those of other meetings.
    pub blocks: usize,
    /// Bytes of the largest part that a rank reduces.
    pub largest: usize,
    /// Ends it. The first word is set to [`Abort::LATE`] if the time was over.
    pub abort: &'a Abort,
    /// Where is written how it has failed, see [`Failure`]. It lies in host memory.
    pub failure: &'a Flag,
    /// How long a wait for other ranks may take. It counts from when the work has come so far.
    pub timeout: Duration,
    /// Where the caller's own thread waits, it asks this now and then whether to go on.
    pub goes_on: &'a dyn Fn() -> bool,
}

impl fmt::Debug for Meeting<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, channel, blocks, largest, timeout, words, .. } = self;
        let ranks = words.len();
        write!(
            f,
            "Meeting(rank {rank} of {ranks}, channel {channel}, {blocks} blocks, {largest} bytes, {timeout:?})"
        )
    }
}

impl Meeting<'_> {
    /// Refuses what cannot be.
    pub(crate) fn check(&self) -> Result<()> {
        let (ranks, size) = (self.words.len(), size(self.words.len()));
        if ranks > MOST_REDUCED || self.rank >= ranks {
            return Err(Error::misuse(format!(
                "a meeting of rank {} with {ranks} ranks; at most {MOST_REDUCED} meet",
                self.rank
            )));
        }
        if self.channel >= CHANNELS || !(1..=BLOCKS).contains(&self.blocks) {
            return Err(Error::misuse(format!(
                "a meeting of {} blocks on channel {}; there are {CHANNELS} channels for 1 to {BLOCKS} blocks",
                self.blocks, self.channel
            )));
        }
        if self.words.iter().any(|words| words.len() != size || !words.addr().is_multiple_of(8)) {
            return Err(Error::misuse(format!(
                "a meeting needs {size} bytes of each rank, at multiples of 8"
            )));
        }
        Ok(())
    }
}

/// How a meeting has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// Whether the time was over; otherwise an abort word was set.
    pub late: bool,
    /// The channel.
    pub channel: usize,
    /// The rank that gave up first.
    pub by: usize,
    /// The rank that it waited for.
    pub awaited: usize,
}

impl Failure {
    const FAILED: u32 = 1 << 31;
    const LATE: u32 = 1 << 24;
    const ABORTED: u32 = 2 << 24;

    /// What the word of a meeting says.
    pub fn of(code: u32) -> Option<Self> {
        (code & Self::FAILED != 0).then_some(Self {
            late: code & Self::LATE != 0,
            channel: (code >> 16 & 0xff) as usize,
            by: (code >> 8 & 0xff) as usize,
            awaited: (code & 0xff) as usize,
        })
    }

    /// As kernels write it (`kernels/meeting.cuh`).
    pub(crate) fn code(self) -> u32 {
        let how = if self.late { Self::LATE } else { Self::ABORTED };
        Self::FAILED | how | (self.channel << 16 | self.by << 8 | self.awaited) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_a_word() {
        for late in [false, true] {
            let failure = Failure { late, channel: 3, by: 127, awaited: 5 };
            assert_eq!(Failure::of(failure.code()), Some(failure));
        }
        assert_eq!(Failure::of(0), None);
    }

    #[test]
    fn rows_do_not_meet() {
        for ranks in [1, 2, 15, 16, 128] {
            assert!(row(ranks) >= 8 * (1 + ranks) && row(ranks).is_multiple_of(128));
            assert_eq!(channel_start(ranks, 1) - channel_start(ranks, 0), BLOCKS * row(ranks));
        }
        assert_eq!(size(2), 128 + 4 * 32 * 128);
    }
}
