//! A meeting that a thread of the host takes part in, with words in its memory: what `kernels/meeting.cuh` does on a GPU. The
//! work is one block.

use std::time::{Duration, Instant};

use super::{Failure, Meeting, channel_start, row};
use crate::error::{Error, Result};
use crate::flag::{Abort, Flag};
use crate::span::{Span, View};
use crate::words::Words;

/// The first words of a rank.
const STOP: usize = 0;
const TOLD: usize = 1;

/// A meeting with all that it needs.
#[derive(Debug)]
pub(crate) struct MeetingHere {
    /// Of all ranks.
    words: Vec<Words>,
    /// The first word of the row.
    row: usize,
    rank: usize,
    channel: usize,
    abort: Abort,
    failure: Flag,
    timeout: Duration,
}

impl MeetingHere {
    /// `reach` gives the words of a rank as memory of the host.
    pub(crate) fn new(meeting: &Meeting<'_>, reach: impl Fn(View<'_>) -> Result<Span>) -> Result<Self> {
        meeting.check()?;
        let words =
            meeting.words.iter().map(|&words| Words::new(&reach(words)?)).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            row: channel_start(words.len(), meeting.channel) / 8,
            words,
            rank: meeting.rank,
            channel: meeting.channel,
            abort: meeting.abort.clone(),
            failure: meeting.failure.clone(),
            timeout: meeting.timeout,
        })
    }

    /// Does the work when all ranks have come, and comes back when all have done theirs.
    pub(crate) fn hold(&self, goes_on: &dyn Fn() -> bool, work: impl FnOnce() -> Result<()>) -> Result<()> {
        self.once(goes_on)?;
        work()?;
        self.once(goes_on)
    }

    /// Comes back when all ranks have come. It asks now and then whether to go on.
    pub(crate) fn once(&self, goes_on: &dyn Fn() -> bool) -> Result<()> {
        debug_assert!(self.row + row(self.words.len()) / 8 <= self.own().len());
        let turn = self.own().load(self.row) + 1;
        self.meet(turn, goes_on)?;
        self.own().store(self.row, turn);
        Ok(())
    }

    fn own(&self) -> &Words {
        &self.words[self.rank]
    }

    fn others(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.words.len()).filter(|&rank| rank != self.rank)
    }

    fn meet(&self, turn: u64, goes_on: &dyn Fn() -> bool) -> Result<()> {
        self.look()?;
        for rank in self.others() {
            self.words[rank].store(self.row + 1 + self.rank, turn);
        }
        let begin = Instant::now();
        let mut asked = Duration::ZERO;
        for rank in self.others() {
            while self.own().load(self.row + 1 + rank) < turn {
                self.look()?;
                let failure = |late| Failure { late, channel: self.channel, by: self.rank, awaited: rank };
                if self.abort.is_set() {
                    return Err(self.give_up(failure(false).code()));
                }
                let waited = begin.elapsed();
                if waited > self.timeout {
                    return Err(self.give_up(failure(true).code()));
                }
                if waited > asked + ASK {
                    asked = waited;
                    if !goes_on() {
                        return Err(self.give_up(failure(false).code()));
                    }
                }
                // There may be more ranks than cores.
                match waited {
                    short if short < YIELD => std::thread::yield_now(),
                    _ => std::thread::sleep(NAP),
                }
            }
        }
        Ok(())
    }

    /// Whether anybody has given up.
    fn look(&self) -> Result<()> {
        match self.own().load(STOP) as u32 {
            0 => Ok(()),
            why => Err(self.give_up(why)),
        }
    }

    /// The first reason counts. The other ranks hear of it, and then the host.
    fn give_up(&self, why: u32) -> Error {
        let first = |words: &Words, index, value| words.update(index, |now| (now == 0).then_some(value));
        let reason = first(self.own(), STOP, why.into()).map_or_else(|before| before as u32, |_| why);
        let late = Failure::of(reason).is_some_and(|failure| failure.late);
        if first(self.own(), TOLD, 1).is_ok() {
            self.others().for_each(|rank| self.words[rank].store(STOP, reason.into()));
            self.failure.store(reason);
            if late {
                self.abort.set(Abort::LATE);
            }
        }
        if late { Error::TimedOut } else { Error::Aborted }
    }
}

/// How long a wait goes on before it asks.
const ASK: Duration = Duration::from_millis(25);

/// How long a wait only yields, and how long it sleeps from then on.
const YIELD: Duration = Duration::from_micros(500);
const NAP: Duration = Duration::from_micros(50);
