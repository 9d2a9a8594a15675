//! Which stores put bytes where other cores read them: ordinary ones, or those that go past the caches.
//!
//! A store to a line that another core has read takes the line away from that core first. On one machine this takes 7 ns a
//! line where the two cores share a cache, and 28 ns where they do not. To write the line past the caches takes 2 ns on
//! both, because such a store asks nobody; then the reader finds the bytes in no cache, which costs it about as much again. A
//! virtual machine may move its cores at any time, and other processors have other figures. So it is measured, now and then: some
//! bytes are put in the one way, and as many in the other way.

use std::time::{Duration, Instant};

use crate::device::Caching;
use crate::flag::LINE;
use crate::sync::{Ordering, fence};

/// Fewer bytes are put by ordinary stores: to wait until what went past the caches has arrived costs more.
const LEAST: usize = 4096;

/// What was found so far.
#[derive(Debug)]
pub(super) struct Giving {
    small: Trials,
    large: Trials,
}

impl Giving {
    pub(super) fn new() -> Self {
        Self { small: Trials::new(16 << 10, 64), large: Trials::new(64 << 10, 256) }
    }

    /// How to put so many bytes.
    #[inline]
    pub(super) fn way(&mut self, len: usize) -> Way {
        match len {
            ..LEAST => Way::Known(Caching::Keep),
            _ => self.of(len).way(len),
        }
    }

    /// What was found for so many bytes.
    #[inline]
    pub(super) fn of(&mut self, len: usize) -> &mut Trials {
        if len < LARGE { &mut self.small } else { &mut self.large }
    }
}

/// How bytes are to be put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// All of them so.
    Known(Caching),
    /// So many for a trial, so; then the others as is known by then.
    Trial(usize, Caching),
}

/// From here on the lines of one put do not fit into the nearest cache of a core, and it takes longer to take them away.
const LARGE: usize = 32 << 10;

/// Stores past the caches are taken where ordinary ones take more than so many halves of their time, and this much longer for
/// each line: the reader pays for a line that it finds in no cache, about 2 ns on one machine and more on others.
const HALVES: u32 = 5;
const LONGER: Duration = Duration::from_nanos(10);

/// What was found so far for some lengths.
#[derive(Debug)]
pub(super) struct Trials {
    /// Bytes that are put in one way for a trial, at most.
    piece: usize,
    /// How many puts there are from one trial to the next.
    puts: u32,
    past: bool,
    /// Whether the last trial said that the other way is better. Another thread may have had the core in it: once is not
    /// enough.
    doubt: bool,
    /// How many puts follow before the next trial.
    left: u32,
    /// The trial whose second half is to come: how many bytes, and what they took by ordinary stores.
    half: Option<(usize, Duration)>,
}

impl Trials {
    fn new(piece: usize, puts: u32) -> Self {
        Self { piece, puts, past: false, doubt: false, left: 0, half: None }
    }

    /// What was found to be faster.
    #[inline]
    pub(super) fn known(&self) -> Caching {
        if self.past { Caching::Give } else { Caching::Keep }
    }

    #[inline]
    fn way(&mut self, len: usize) -> Way {
        if self.left > 0 {
            self.left -= 1;
            return Way::Known(self.known());
        }
        match self.half {
            Some((piece, _)) if len >= piece => Way::Trial(piece, Caching::Give),
            // Fewer than were put in the one way are not compared with them: then anew.
            _ => Way::Trial(len.min(self.piece) / LINE * LINE, Caching::Keep),
        }
    }

    /// Puts the bytes of a trial, and learns from it. What was stored has left this core behind it.
    #[cold]
    pub(super) fn watch<T>(&mut self, (piece, way): (usize, Caching), put: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let done = put();
        fence(Ordering::SeqCst);
        let took = start.elapsed();
        match (way, self.half.take()) {
            (Caching::Give, Some((_, kept))) => self.learn(piece / LINE, kept, took),
            _ => self.half = Some((piece, took)),
        }
        done
    }

    fn learn(&mut self, lines: usize, kept: Duration, past: Duration) {
        let better = kept * 2 > past * HALVES && kept > past + LONGER * lines as u32;
        let agrees = better == self.past;
        if !agrees && self.doubt {
            self.past = better;
        }
        self.doubt = !agrees && !self.doubt;
        self.left = if self.doubt { 0 } else { self.puts };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LINES: usize = 1000;
    const LONG: Duration = Duration::from_micros(30);
    const SHORT: Duration = Duration::from_micros(2);

    #[test]
    fn two_trials_in_a_row_change_the_way() {
        let mut trials = Trials::new(128, 5);
        trials.learn(LINES, LONG, SHORT);
        assert_eq!((trials.known(), trials.left), (Caching::Keep, 0), "the next put is a trial, too");
        trials.learn(LINES, LONG, SHORT);
        assert_eq!((trials.known(), trials.left), (Caching::Give, 5));
        trials.learn(LINES, SHORT, SHORT);
        assert_eq!(trials.known(), Caching::Give);
        trials.learn(LINES, SHORT, SHORT);
        assert_eq!(trials.known(), Caching::Keep);
    }

    /// Three times as long, and yet less than what the reader pays.
    #[test]
    fn what_is_gained_must_be_more_than_readers_pay() {
        let mut trials = Trials::new(128, 5);
        for _ in 0..4 {
            trials.learn(LINES, 3 * SHORT, SHORT);
            assert_eq!((trials.known(), trials.left), (Caching::Keep, 5));
        }
    }

    #[test]
    fn one_trial_that_was_disturbed_changes_nothing() {
        let mut trials = Trials::new(128, 5);
        for _ in 0..10 {
            trials.learn(LINES, LONG, SHORT);
            trials.learn(LINES, SHORT, SHORT);
            assert_eq!((trials.known(), trials.left), (Caching::Keep, 5));
        }
    }

    #[test]
    fn a_trial_puts_as_many_bytes_in_both_ways() {
        let mut trials = Trials::new(128, 2);
        for (len, piece, way) in [
            (300, 128, Caching::Keep),
            // Too few to compare.
            (127, 64, Caching::Keep),
            (300, 64, Caching::Give),
        ] {
            assert_eq!(trials.way(len), Way::Trial(piece, way));
            trials.watch((piece, way), || ());
        }
        assert!(trials.half.is_none());
        (trials.left, trials.past) = (2, true);
        let ways = [Way::Known(Caching::Give), Way::Known(Caching::Give), Way::Trial(64, Caching::Keep)];
        assert_eq!([1, 2, 3].map(|_| trials.way(100)), ways);
    }

    #[test]
    fn a_few_bytes_are_put_by_ordinary_stores() {
        let mut giving = Giving::new();
        (giving.small.past, giving.large.past) = (true, true);
        for len in [0, 1, LEAST - 1] {
            assert_eq!(giving.way(len), Way::Known(Caching::Keep));
        }
        assert_eq!([LEAST, LARGE - 1, LARGE].map(|len| giving.of(len).puts), [64, 64, 256]);
        assert_eq!(giving.way(LEAST), Way::Trial(LEAST, Caching::Keep));
    }
}
