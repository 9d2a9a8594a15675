//! The board of a group: where the queues of its ranks say how far they are in an operation that was queued.
//!
//! Each rank has three words for each of the last operations (`shm::control`): its queue has *arrived*, it has *done* its
//! part, and it has *left*. A queue sets a word to the number of the operation. No host is woken by that, so hosts look again and
//! again.

use std::sync::Arc;

use tensorwire_device::flag::Writer;
use tensorwire_device::sync::{AtomicBool, Ordering};
use tensorwire_device::words::Words;
use tensorwire_device::{Flag, Span};

use crate::error::Result;
use crate::shm::control::{self, Control, VERDICTS};

/// How many operations of a rank may be under way: begun, and not over on its queue. Words are used again after
/// [`VERDICTS`] operations, four times as many.
pub(super) const MOST: usize = VERDICTS / 4;

/// See the module.
#[derive(Debug)]
pub(super) struct Board {
    control: Arc<Control>,
    /// Whether its memory is there.
    taken: AtomicBool,
}

impl Board {
    pub(super) fn new(control: &Arc<Control>) -> Self {
        Self { control: control.clone(), taken: AtomicBool::new(false) }
    }

    /// Takes the memory, before its first use.
    pub(super) fn take(&self) -> Result<()> {
        if !self.taken.load(Ordering::Acquire) {
            self.control.region().commit(self.control.map().board_lines())?;
            self.taken.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Before operation `number` begins: the words of this rank are those of the one before it. Without this, a word that was
    /// last used half of all numbers ago would be taken for one that is ahead. Nobody looks at them before the ranks meet.
    pub(super) fn renew(&self, me: usize, number: u32) -> Result<()> {
        for which in [control::Board::ARRIVED, control::Board::DONE, control::Board::LEFT] {
            self.flag(me, number, which)?.store(number.wrapping_sub(1));
        }
        Words::new(&self.stamp(me, number)?)?.store(0, 0);
        Ok(())
    }

    /// Where the kernels of a rank write when they ended, beside the word that says *done*.
    pub(super) fn stamp(&self, place: usize, number: u32) -> Result<Span> {
        let at = self.control.map().board(place, number) + control::Board::DONE;
        Ok(self.control.front_line(at)?.slice(control::Board::STAMP)?)
    }

    /// When the last kernel of a rank ended, in nanoseconds of CLOCK_MONOTONIC; nothing if none has said so.
    pub(super) fn stamped(&self, place: usize, number: u32) -> Option<u64> {
        let time = Words::new(&self.stamp(place, number).ok()?).ok()?.load(0);
        (time != 0).then_some(time)
    }

    /// Set when the queue of a rank has come to an operation.
    pub(super) fn arrived(&self, place: usize, number: u32) -> Result<Flag> {
        self.flag(place, number, control::Board::ARRIVED)
    }

    /// Set when the queue of a rank has done its part of an operation.
    pub(super) fn done(&self, place: usize, number: u32) -> Result<Flag> {
        self.flag(place, number, control::Board::DONE)
    }

    /// Set when the queue of a rank touches no memory of others any more: by the queue, or by its host where the operation was not
    /// queued to its end.
    pub(super) fn left(&self, place: usize, number: u32) -> Result<Flag> {
        self.flag(place, number, control::Board::LEFT)
    }

    fn flag(&self, place: usize, number: u32, which: usize) -> Result<Flag> {
        let at = self.control.map().board(place, number) + which;
        Ok(Flag::new(&self.control.front_line(at)?, Writer::Device)?)
    }
}

#[cfg(test)]
mod tests {
    use tensorwire_device::host::Host;

    use super::*;

    /// Words that were not used for half of all numbers, while operations ran on the host, look as if they were ahead.
    #[test]
    fn words_of_long_ago_say_nothing() {
        let region = Control::alloc(&Host, 1, 1).unwrap();
        let board = Board::new(&Arc::new(Control::open(region, vec![0], (0, 1)).unwrap()));
        board.take().unwrap();
        let all = [Board::arrived, Board::done, Board::left];
        let (old, new) = (7, 7_u32.wrapping_add(1 << 31).wrapping_add(VERDICTS as u32));
        for word in all {
            word(&board, 0, old).unwrap().store(old);
            assert!(word(&board, 0, new).unwrap().reached(new));
        }
        board.renew(0, new).unwrap();
        for word in all {
            let word = word(&board, 0, new).unwrap();
            assert!(!word.reached(new));
            word.store(new);
            assert!(word.reached(new));
        }
    }
}
