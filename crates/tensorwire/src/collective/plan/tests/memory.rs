//! Memory that knows who has touched it, and finds two accesses that nothing orders.

use std::ops::Range;

use super::ops::Value;

/// How far a rank knows of each rank, itself included.
pub(super) type Clock = Vec<u32>;

/// A run of bytes.
#[derive(Debug, Clone, Default)]
pub(super) struct Memory {
    pub(super) values: Vec<Value>,
    touched: Vec<Touch>,
}

/// The last access of a kind that a rank made to a range.
#[derive(Debug, Clone, Copy)]
struct Touch {
    rank: usize,
    at: u32,
    start: usize,
    end: usize,
    write: bool,
}

impl Memory {
    pub(super) fn new(len: usize) -> Self {
        Self { values: vec![Value::Junk; len], touched: Vec::new() }
    }

    /// Rank `rank`, at its time `clock`, reads or writes a range. Gives the rank with whose access it races, if one does.
    pub(super) fn touch(
        &mut self,
        range: Range<usize>,
        rank: usize,
        clock: &Clock,
        write: bool,
    ) -> Option<usize> {
        if range.is_empty() {
            return None;
        }
        let (start, end) = (range.start, range.end);
        let overlaps = |touch: &Touch| touch.start < end && start < touch.end;
        let known = |touch: &Touch| clock[touch.rank] >= touch.at;
        let race = |touch: &&Touch| (write || touch.write) && overlaps(touch) && !known(touch);
        let found = self.touched.iter().find(race).map(|touch| touch.rank);
        // Whoever is ordered after this one is ordered after what this one is ordered after.
        let covered = |touch: &Touch| {
            start <= touch.start
                && touch.end <= end
                && known(touch)
                && (write || (touch.rank == rank && !touch.write))
        };
        self.touched.retain(|touch| !covered(touch));
        self.touched.push(Touch { rank, at: clock[rank], start, end, write });
        found
    }
}

/// Takes over what another clock knows.
pub(super) fn join(mine: &mut Clock, other: &Clock) {
    mine.iter_mut().zip(other).for_each(|(mine, other)| *mine = (*mine).max(*other));
}
