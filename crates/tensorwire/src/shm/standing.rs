//! How operations stand that are queued, read from the records of all ranks and from the board. It trusts nothing in
//! there, and says less where something is not known.

use std::collections::HashMap;

use tensorwire_device::flag::reached;

use super::control::{Board, Map, VERDICTS};
use super::kind::Kind;
use super::record::{Record, State};
use super::view::{RankReport, UntrustedMemory, word};

/// An operation whose ranks have met, whose steps are put on a device's queue or are there, and which is not over for its rank.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueuedOperation {
    /// What the rank has recorded of it.
    pub record: Record,
    /// How it stands.
    pub standing: Standing,
}

/// How a queued operation stands. The numbers are ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Standing {
    /// The queues of these ranks have not come to it. None where that cannot be told.
    Queued(Vec<usize>),
    /// All queues have come to it. Those of these ranks work for all, and have not said that they are done.
    Running(Vec<usize>),
    /// All queues are done with it, and the host of its rank has not seen that yet.
    Done,
}

impl Standing {
    /// In a word.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Queued(_) => "queued",
            Self::Running(_) => "running",
            Self::Done => "done",
        }
    }
}

/// Finds the operations of each rank that are queued. The ranks are all of the region, by their place.
pub(crate) fn fill(memory: &dyn UntrustedMemory, map: Map, ranks: &mut [RankReport]) {
    let queued: Vec<Vec<Record>> = ranks.iter().map(queued_of).collect();
    let Some(newest) = queued.iter().flatten().map(|record| record.number).max() else { return };
    // Words of the board are used again.
    let has_words = |number: u64| newest - number < VERDICTS as u64;
    let mut known: HashMap<u64, Seen> =
        queued.iter().flatten().map(|record| (record.number, Seen::new(record.kind))).collect();
    known.retain(|number, _| has_words(*number));
    for (place, rank) in ranks.iter().enumerate() {
        let asked = |record: &&Record| !record.is_message() && known.contains_key(&record.number);
        let records = rank.records.iter().filter(asked);
        let records: HashMap<u64, &Record> = records.map(|record| (record.number, record)).collect();
        for (&number, seen) in &mut known {
            let at = map.board(place, number as u32);
            let set = |which: usize| reached(word(memory, at + which), number as u32);
            seen.look(rank.rank.unwrap_or(place), records.get(&number).copied(), set);
        }
    }
    for (rank, records) in ranks.iter_mut().zip(queued) {
        let number = rank.rank;
        let standing = |record: &Record| {
            let standing = known.get(&record.number).map_or(Standing::Queued(Vec::new()), Seen::standing);
            let silent = record.says.is_some_and(|says| !says.arrived && !says.done);
            match standing {
                // Its queue says nothing to anybody.
                Standing::Done if silent => Standing::Running(number.into_iter().collect()),
                other => other,
            }
        };
        let all = records.into_iter().map(|record| QueuedOperation { standing: standing(&record), record });
        rank.queued = all.collect();
    }
}

/// What a rank has queued or is about to, the oldest first. It cannot be more than there are words.
fn queued_of(rank: &RankReport) -> Vec<Record> {
    let is_met = |record: &&Record| matches!(record.state, State::Met | State::Queued);
    let queued = rank.records.iter().rev().filter(is_met);
    let mut queued: Vec<Record> = queued.take(VERDICTS).cloned().collect();
    queued.reverse();
    queued
}

/// What all ranks say of one operation.
struct Seen {
    kind: Kind,
    /// Whose queues have not come to it.
    absent: Vec<usize>,
    /// Whose queues have not done their part.
    busy: Vec<usize>,
    /// Whether a queue has.
    done: bool,
    /// Whether it is not known of a rank what its queue will say.
    unsure: bool,
}

impl Seen {
    fn new(kind: Kind) -> Self {
        Self { kind, absent: Vec::new(), busy: Vec::new(), done: false, unsure: false }
    }

    /// One rank's record of it, and its words on the board.
    fn look(&mut self, rank: usize, record: Option<&Record>, set: impl Fn(usize) -> bool) {
        // In these, some ranks need not do anything.
        let partial = matches!(self.kind, Kind::Broadcast | Kind::Scatter | Kind::Gather);
        match record.map(|record| (record.says, record.state)) {
            Some((Some(says), _)) => {
                if says.arrived && !set(Board::ARRIVED) {
                    self.absent.push(rank);
                }
                match says.done && !set(Board::DONE) {
                    true => self.busy.push(rank),
                    false => self.done |= says.done,
                }
            }
            // It has come, and its host has queued nothing yet.
            Some((None, State::Running)) if !partial => self.absent.push(rank),
            _ => self.unsure = true,
        }
    }

    fn standing(&self) -> Standing {
        if !self.absent.is_empty() || self.unsure {
            Standing::Queued(self.absent.clone())
        } else if self.busy.is_empty() && (self.done || self.kind == Kind::Barrier) {
            Standing::Done
        } else {
            Standing::Running(self.busy.clone())
        }
    }
}
