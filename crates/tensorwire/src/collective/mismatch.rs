//! Ranks that came for different things. A rank that finds this gathers what all ranks came for, so that the error can
//! say who is alone with what.
//!
//! Most waits of an operation compare headers, but not all ranks wait for all others. The root of a broadcast with one
//! round waits for nobody, for example. What was not compared in an operation is compared in the next one, or when the
//! rank leaves the group.

use std::time::{Duration, Instant};

use tensorwire_device::Deadline;

use super::lines::{Lines, Stop, value};
use crate::error::{Error, Result};
use crate::interrupt::Pace;
use crate::ranks::Ranks;
use crate::shm::control::{Cause, Desk};
use crate::shm::header::Header;
use crate::shm::mismatch::{Seen, note};

/// How long a rank that has found a mismatch waits for ranks that have not come, so that the error can name all.
const GATHER: Duration = Duration::from_secs(5);
/// How long a rank that leaves the group waits for ranks that have not come to its last operation. They compare what it
/// came for when they come.
pub(super) const LEAVE: Duration = Duration::from_secs(1);

impl Lines {
    /// Fails the group: not all ranks came for the same in an operation.
    pub(super) fn differ(&self, group: &Ranks, number: u32, deadline: Deadline) -> Error {
        let waited = self.await_headers(number, Deadline::after(GATHER).min(deadline), |_| true);
        let seen = |place| Seen {
            rank: self.rank_at(place),
            call: self.call(place, number),
            before: self.call(place, number.wrapping_sub(1)),
            after: self.call(place, number.wrapping_add(1)),
            left: self.control.has_closed(place),
        };
        let seen: Vec<Seen> = (0..self.world).map(seen).collect();
        let error = self.fail(group, Cause::Mismatch, self.me, &note(number, &seen));
        // The others hear of it also where this rank's caller wanted to go.
        waited.map_or_else(|interrupt| interrupt, |()| error)
    }

    /// Before this rank leaves the group: compares what the others came for in its last operation, where no wait has done
    /// so. Ranks that have left before they came to it are no mismatch, and ranks that are late are not waited for long.
    pub(super) fn compare_last(&mut self, group: &Ranks, patience: Duration) -> Result<()> {
        let number = self.number;
        // Everybody hears of an operation that was cancelled, and of the failure of a group.
        if number == 0 || self.last.is_none() || self.control.abort.is_set() {
            return Ok(());
        }
        let deadline = Deadline::after(patience.min(group.timeout));
        let unchecked = |place: &usize| *place != self.me && self.checked[*place] != number;
        let waited = self.await_headers(number, deadline, |place| unchecked(&place));
        for place in (0..self.world).filter(unchecked) {
            // The line of a rank that has left may say so instead.
            let came = self.call(place, number).is_some();
            if came && matches!(self.compare(place, number), Err(Stop::Mismatch(_))) {
                self.differ(group, number, deadline);
                break;
            }
        }
        waited
    }

    /// Waits until ranks have come to an operation, or have left the group, as long as the group has not failed. It also ends
    /// where another rank cancels the operation that this one is in: that rank waits only a moment for this one to leave
    /// it. A deadline that passes only ends the wait.
    fn await_headers(&self, number: u32, deadline: Deadline, of: impl Fn(usize) -> bool) -> Result<()> {
        let mut pace = Pace::since(Instant::now());
        // A rank that closes the group does not come any more.
        let is_awaited =
            |&place: &usize| of(place) && !self.control.has_closed(place) && !self.has_come(place, number);
        while (0..self.world).any(|place| is_awaited(&place)) && !self.stop().is_set() {
            let now = Instant::now();
            if deadline.instant() <= now {
                break;
            }
            pace.look(now)?;
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// What a rank came for, if it has come.
    fn call(&self, place: usize, number: u32) -> Option<Header> {
        // It is written before the counter is moved.
        let come = self.has_come(place, number);
        self.control.header(place, number).filter(|_| come)
    }

    fn has_come(&self, place: usize, number: u32) -> bool {
        self.progress[place][number as usize % Desk::STEPS].reached(value(number, 1))
    }
}
