//! The progress lines of the ranks of one host, as one rank uses them. The rank says in its line what it came for
//! and how far it is. It waits for the lines of the others.
//!
//! Each rank has four progress lines (see `shm::control`) and uses them in turn. Operation `k` uses line `k` modulo
//! 4. Its counter is `k << 20 | tick`. The rest of the line says what the rank came for. So a wait for the counter
//! also brings the other rank's header into this core's cache, and comparing it costs nothing more.
//!
//! # Time-outs
//!
//! Operation `k` has one verdict word. The first rank that cannot go on sets it to its place and the reason. Ranks that are
//! inside and ranks that come later get the same error. Ranks that had finished keep their result. A rank that
//! leaves a cancelled operation moves its counter to [`END`], so that no rank waits for it. A rank that sees this
//! value looks at the verdict before it believes the counter (`cancel`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorwire_device::flag::{LINE, reached};
use tensorwire_device::{Abort, Deadline, Flag, Queue};

use crate::error::{Error, Result};
use crate::interrupt::Pace;
use crate::shm::control::{Control, Desk, Note, VERDICTS, Verdict, Why};
use crate::shm::decided::Refusal;
use crate::shm::header::{HEADER, Header};
use crate::shm::kind::Kind;

/// The tick of a rank that has left a cancelled operation, or the group.
pub(super) const END: u32 = (1 << TICK_BITS) - 1;
const TICK_BITS: u32 = 20;

/// Where the payload begins in a progress line.
pub(super) const PAYLOAD_AT: usize = 32;

/// See the module.
#[derive(Debug)]
pub(super) struct Lines {
    pub(super) control: Arc<Control>,
    pub(super) me: usize,
    pub(super) world: usize,
    /// By place, and by number modulo 4.
    pub(super) progress: Vec<[Flag; Desk::STEPS]>,
    /// Where each rank is: 2 k + 1 inside operation k, 2 k + 2 after it.
    pub(super) inside: Vec<Flag>,
    /// Of each operation, by number: its word, with the group's word beside it.
    stops: Vec<Abort>,
    /// How many operations this rank has begun.
    pub(super) number: u32,
    /// The last tick of the previous operation; nothing if it was cancelled.
    pub(super) last: Option<u32>,
    /// Whether nobody looks any more at what was in the lines that this operation uses.
    pub(super) joined: bool,
    /// Whether the others have not been told that this rank has left the previous operation.
    pub(super) unsaid: bool,
    /// The highest counter seen of each rank.
    seen: Vec<u32>,
    /// The last operation of each rank whose header has been compared.
    pub(super) checked: Vec<u32>,
    /// Of each rank, whether its tensors lie on another kind of device than this rank's, in the operation that was checked last.
    odd: Vec<bool>,
    /// The headers of the last two operations, and how many ticks more than this rank those have who are odd.
    headers: [[u8; HEADER]; 2],
    ahead: [i32; 2],
    /// Whether numbers have begun anew: there is an operation before number 1.
    wrapped: bool,
    /// How long waits look before they sleep, as the flags have it.
    spin: Option<Duration>,
    /// When the caller is asked whether to go on.
    pub(super) pace: Pace,
}

/// So many verdicts are made as new at once, long before they are used again.
const RENEWED: u32 = 16;
const _: () = assert!((VERDICTS / 2).is_multiple_of(RENEWED as usize));

/// Why an operation does not go on.
#[derive(Debug)]
pub(super) enum Stop {
    /// These ranks (by place) have not come as far as needed.
    TimedOut(Vec<usize>),
    /// Queues have not come as far as needed: whose, and how far.
    QueuesLate(Note),
    /// The group has failed, or the operation was cancelled.
    Aborted,
    /// Another rank came for something else, in the operation of that number.
    Mismatch(u32),
    /// This rank (by place) has closed the group.
    Left(usize),
    /// This rank (by place) is so many operations behind that nobody could tell it how they ended.
    Behind(usize),
    /// Something of this rank's own.
    Own(Error),
    /// An operation before it has failed on this rank, and nobody was told.
    Untold(Error),
    /// It belongs to another one, which has failed before it.
    Before(Error),
    /// Another host cannot go on, or this one waits for it.
    Far(Refusal),
    /// Ranks of another host came for something else.
    Elsewhere,
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        match error {
            Error::Aborted(_) => Self::Aborted,
            error => Self::Own(error),
        }
    }
}

impl From<tensorwire_device::Error> for Stop {
    fn from(error: tensorwire_device::Error) -> Self {
        match error {
            tensorwire_device::Error::Aborted => Self::Aborted,
            error => Self::Own(error.into()),
        }
    }
}

impl Lines {
    pub(super) fn new(control: &Arc<Control>) -> Result<Self> {
        let (map, world) = (control.map(), control.ranks().len());
        let flag = |at: usize| control.flag(at);
        let mut progress = Vec::with_capacity(world);
        for place in 0..world {
            let line = |index: usize| flag(map.desk(place) + Desk::PROGRESS + index * LINE);
            progress.push([line(0)?, line(1)?, line(2)?, line(3)?]);
        }
        Ok(Self {
            me: control.me(),
            world,
            progress,
            inside: (0..world).map(|place| flag(map.desk(place) + Desk::WHERE)).collect::<Result<_>>()?,
            stops: (0..VERDICTS as u32).map(|index| control.verdict(index)).collect::<Result<_>>()?,
            number: 0,
            last: Some(0),
            joined: true,
            unsaid: false,
            seen: vec![0; world],
            checked: vec![0; world],
            odd: vec![false; world],
            headers: [[0; HEADER]; 2],
            ahead: [0; 2],
            wrapped: false,
            spin: None,
            pace: Pace::since(Instant::now()),
            control: control.clone(),
        })
    }

    /// How long waits look before they sleep.
    pub(super) fn set_spin(&mut self, spin: Duration) {
        if self.spin != Some(spin) {
            self.progress.iter_mut().flatten().for_each(|flag| flag.set_spin(spin));
            self.spin = Some(spin);
        }
    }

    /// The same for a wait that is none of the lines'.
    pub(super) fn spin(&self) -> Option<Duration> {
        self.spin
    }

    /// Goes to the next operation, and gives its number.
    #[inline(always)]
    pub(super) fn turn_page(&mut self) -> u32 {
        let number = self.number.wrapping_add(1);
        self.number = number;
        if number.is_multiple_of(RENEWED) {
            self.wrapped |= number == 0;
            // Nobody can be so far behind, or so far ahead, as to use these words.
            let first = number.wrapping_add(VERDICTS as u32 / 2) as usize % VERDICTS;
            let old = self.stops[first..first + RENEWED as usize].iter();
            old.filter(|old| old.code().is_some()).for_each(Abort::reset);
        }
        number
    }

    /// This rank is inside the operation from now on, and has come for this. `ahead`: how many ticks more those have whose tensors
    /// lie on another kind of device.
    #[inline(always)]
    pub(super) fn enter(&mut self, header: [u8; HEADER], ahead: i32, start: Instant) {
        self.headers[self.number as usize % 2] = header;
        self.ahead[self.number as usize % 2] = ahead;
        self.inside[self.me].store(self.number.wrapping_mul(2).wrapping_add(1));
        self.pace = Pace::since(start);
        self.joined = self.last.is_some();
    }

    /// It has done its part, of so many ticks.
    pub(super) fn finish(&mut self, ticks: u32) {
        self.inside[self.me].store(self.number.wrapping_mul(2).wrapping_add(2));
        self.last = Some(ticks);
    }

    /// After an operation that was cancelled: waits until nobody reads what is in these lines, and then says what was not
    /// said before.
    #[inline(always)]
    pub(super) fn join(&mut self, deadline: Deadline) -> Result<(), Stop> {
        if !self.joined {
            self.await_late(deadline)?;
            self.joined = true;
            self.say_left();
        }
        Ok(())
    }

    /// Says in this rank's line what it came for.
    #[inline(always)]
    pub(super) fn say_header(&self, number: u32) -> Result<()> {
        let at = self.control.header_at(self.me, number);
        Ok(self.control.region().write(at, &self.headers[number as usize % 2])?)
    }

    #[inline(always)]
    pub(super) fn signal(&mut self, queue: &mut dyn Queue, tick: u32) -> Result<(), Stop> {
        let flag = &self.progress[self.me][self.number as usize % Desk::STEPS];
        queue.signal(flag, value(self.number, tick))?;
        // This rank has said that it is inside. A rank that cancels from now on waits for it. A rank that has cancelled before
        // is seen here.
        if tick == 1 && self.is_cancelled() {
            return Err(Stop::Aborted);
        }
        Ok(())
    }

    #[inline(always)]
    pub(super) fn wait_all(
        &mut self,
        queue: &mut dyn Queue,
        tick: u32,
        deadline: Deadline,
    ) -> Result<(), Stop> {
        // A look at all of them first: the cache lines come from other cores at the same time.
        if tick > 0 && self.world > 2 {
            let line = self.number as usize % Desk::STEPS;
            for place in (0..self.world).filter(|&place| place != self.me) {
                let now = self.progress[place][line].load();
                if reached(now, self.seen[place]) && now & END != END {
                    self.seen[place] = now;
                }
            }
        }
        for step in 1..self.world {
            let place = (self.me + step) % self.world;
            match self.wait_for(queue, place, tick, deadline) {
                Err(Stop::TimedOut(_)) => return Err(Stop::TimedOut(self.absent(tick))),
                other => other?,
            }
        }
        Ok(())
    }

    /// Waits for another rank's tick, and sees to it that it came for the same.
    pub(super) fn wait_for(
        &mut self,
        queue: &mut dyn Queue,
        place: usize,
        tick: u32,
        deadline: Deadline,
    ) -> Result<(), Stop> {
        let of = if tick == 0 { self.number.wrapping_sub(1) } else { self.number };
        let Some(last) = self.last.or((tick > 0).then_some(0)) else {
            // The previous operation was cancelled: all have left it, or will not touch anything in it, and all have left
            // the one before (`await_late`).
            return Ok(());
        };
        let tick = if tick == 0 { last } else { tick };
        if self.checked[place] == of && reached(self.seen[place], value(of, self.goal(place, of, tick))) {
            return Ok(());
        }
        // First compare what it came for: a rank that came for something else may never signal the tick.
        if self.checked[place] != of {
            if of != 0 || self.wrapped {
                self.wait_value(queue, place, (of, 1), deadline)?;
                self.odd[place] = self.compare(place, of)?;
            }
            self.checked[place] = of;
        }
        self.wait_value(queue, place, (of, self.goal(place, of, tick)), deadline)
    }

    /// The tick at which a rank whose header was compared is as far as this one is at `tick`. A rank that announces itself has one
    /// tick more in front, and ranks with tensors on GPUs do so at every size.
    #[inline(always)]
    fn goal(&self, place: usize, of: u32, tick: u32) -> u32 {
        if self.odd[place] { tick.saturating_add_signed(self.ahead[of as usize % 2]).max(1) } else { tick }
    }

    /// Once all ranks have come: one whose tensors lie on another kind of device than this rank's.
    pub(super) fn odd_one(&self) -> Option<usize> {
        (0..self.world).find(|&place| place != self.me && self.odd[place])
    }

    #[inline(always)]
    fn wait_value(
        &mut self,
        queue: &mut dyn Queue,
        place: usize,
        (of, tick): (u32, u32),
        deadline: Deadline,
    ) -> Result<(), Stop> {
        let target = value(of, tick);
        if reached(self.seen[place], target) {
            return Ok(());
        }
        let flag = &self.progress[place][of as usize % Desk::STEPS];
        let stop = &self.stops[self.number as usize % VERDICTS];
        loop {
            let slice = self.pace.until(deadline);
            match queue.wait(flag, target, stop, slice) {
                Err(tensorwire_device::Error::TimedOut) if slice < deadline => {
                    self.pace.look(Instant::now()).map_err(Stop::Own)?;
                }
                Err(tensorwire_device::Error::TimedOut) => return Err(Stop::TimedOut(vec![place])),
                other => break other?,
            }
        }
        let now = flag.load();
        if now & END == END {
            return self.jumped(place, of);
        }
        self.seen[place] = now;
        Ok(())
    }

    /// A counter at its end: the rank has left the operation, or the group.
    fn jumped(&self, place: usize, of: u32) -> Result<(), Stop> {
        if self.stop().is_set() {
            return Err(Stop::Aborted);
        }
        if self.control.has_closed(place) {
            return Err(Stop::Left(place));
        }
        // The previous operation was cancelled after this rank had finished it.
        if of == self.number { Err(Stop::Aborted) } else { Ok(()) }
    }

    /// Sees to it that a rank came for the same; gives whether its tensors lie on another kind of device.
    #[inline(always)]
    pub(super) fn compare(&self, place: usize, of: u32) -> Result<bool, Stop> {
        let mut theirs = [0; HEADER];
        self.control.region().read(self.control.header_at(place, of), &mut theirs)?;
        let mine = self.headers[of as usize % 2];
        if theirs == mine { Ok(false) } else { Self::odd(theirs, mine, of) }
    }

    #[cold]
    fn odd(theirs: [u8; HEADER], mine: [u8; HEADER], of: u32) -> Result<bool, Stop> {
        if Header::differ_in_place(theirs, mine) { Ok(true) } else { Err(Stop::Mismatch(of)) }
    }

    /// The ranks that have not reached a tick.
    fn absent(&self, tick: u32) -> Vec<usize> {
        let (of, tick) = match (tick, self.last) {
            (0, Some(last)) => (self.number.wrapping_sub(1), last),
            (0, None) => return Vec::new(),
            (tick, _) => (self.number, tick),
        };
        let line = of as usize % Desk::STEPS;
        let late = |&place: &usize, tick: u32| {
            let tick = if self.checked[place] == of { self.goal(place, of, tick) } else { tick };
            place != self.me && !self.progress[place][line].reached(value(of, tick))
        };
        // A rank that has come may wait for one that has not, as this one does.
        let come = |&place: &usize| self.progress[place][line].reached(value(of, 1));
        let missing: Vec<usize> = (0..self.world).filter(|place| *place != self.me && !come(place)).collect();
        if !missing.is_empty() {
            return missing;
        }
        (0..self.world).filter(|place| late(place, tick)).collect()
    }

    /// Why this operation was cancelled, if it was.
    pub(super) fn why(&self) -> Option<Why> {
        self.stop().code().and_then(Verdict::from_code).map(|verdict| verdict.why)
    }

    /// Who has cancelled this operation, by place, if somebody has.
    pub(super) fn ended_by(&self) -> Option<usize> {
        self.stop().code().and_then(Verdict::from_code).map(|verdict| verdict.place)
    }

    /// A place where tests may interfere.
    #[inline(always)]
    pub(super) fn point(&self, _kind: Kind, _step: usize) {
        #[cfg(feature = "hooks")]
        super::hooks::at(super::hooks::Point {
            place: self.me,
            kind: _kind,
            number: self.number,
            step: _step,
        });
    }

    /// Whether the operation was cancelled.
    #[inline]
    pub(super) fn is_cancelled(&self) -> bool {
        self.stop().code().is_some()
    }

    /// Set if the operation was cancelled or the group has failed. Its code is that of the operation, the verdict.
    #[inline]
    pub(super) fn stop(&self) -> &Abort {
        &self.stops[self.number as usize % VERDICTS]
    }

    /// The same of the next operation, which this rank has not begun.
    pub(super) fn next_stop(&self) -> &Abort {
        &self.stops[self.number.wrapping_add(1) as usize % VERDICTS]
    }

    /// Where a rank that works for others says whether it reaches their memory.
    pub(super) fn told_at(&self, place: usize) -> usize {
        self.control.map().desk(place) + Desk::TOLD
    }

    /// Where a rank's payload for this operation is.
    pub(super) fn payload_at(&self, place: usize) -> usize {
        self.control.progress_at(place, self.number) + PAYLOAD_AT
    }

    /// Tells ranks that still wait that this rank has closed the group.
    pub(super) fn leave(&self) {
        let next = self.number.wrapping_add(1);
        self.progress[self.me][next as usize % Desk::STEPS].signal(value(next, END));
    }
}

/// The counter of an operation at a tick.
pub(super) fn value(number: u32, tick: u32) -> u32 {
    number << TICK_BITS | tick
}
