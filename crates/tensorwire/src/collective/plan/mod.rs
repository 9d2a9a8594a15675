//! Collectives as pure data: which rank copies, reduces, signals and waits, in which order.
//!
//! A plan is made from numbers (kind, rank, world, bytes). It knows no memory, clock or device. The runner
//! (`runner.rs`) runs its steps on a queue. The tests run the plans of all ranks against each other in every order.
//!
//! # Ticks
//!
//! Each rank has one counter for an operation. The step `Signal(t)` advances it, and the step `Wait(who, t)` waits
//! for it. Tick 1 says that the rank has come, and what it came for. `Wait(who, 0)` waits for the last tick of the
//! *previous* operation.
//!
//! # Slots
//!
//! Each rank has a slot of two halves. Only this rank writes it, and all ranks may read it. Round `g` of operation
//! `k` uses half `k + g` modulo 2. Every plan has an odd number of ticks for rounds, with an empty round at the end
//! where it needs one. So an operation ends in one half and the next operation begins in the other. Five rules hold
//! in every plan. They make it safe to write a half again:
//!
//! 1. A rank signals the last tick of a plan only when it has read all rounds but the last.
//! 2. A rank that writes round 0 has waited for tick 0 of all. They have finished the operation before the previous
//!    one. Of the previous one they have finished all rounds but the last, which lies in the other half.
//! 3. A rank that writes round 1 has waited for tick 1 of all. They have finished the previous operation.
//! 4. A rank that writes round `g` > 1 has waited until all readers of its round `g - 2` are done with that round.
//! 5. Every plan waits for tick 0 of all somewhere. So no rank is ever more than two operations ahead of another.
//!    This is why four progress lines for each rank are enough.
//!
//! # Queued plans
//!
//! A direct plan with [`Workers::Some`] is queued. Its ranks have met on their lines: each has signalled tick 1 and has waited
//! for tick 1 of all. That is the only tick of the operation ([`Plan::ticks`]), and it stands for the wait of rule 5. The
//! signals and waits of the plan are about two words that each rank has for the operation, [`ARRIVED`] and [`DONE`], and not
//! about ticks. A queued plan uses no slot and no line.
//!
//! The copies and reductions of a queued plan are apart from each other: what one writes, no other reads or writes. They may
//! run in any order, or at once. [`Plan::together`] says which steps are worth one call.

mod direct;
mod exchange;
mod queued;
mod reduce;
mod shape;
#[cfg(test)]
mod tests;
mod workers;

use std::fmt;
use std::ops::Range;

use tensorwire_device::Caching;

use crate::shm::kind::{Kind, Path};
pub(crate) use queued::{ARRIVED, DONE};
pub(crate) use shape::{Counts, PAYLOAD, Shape};
pub(crate) use workers::Workers;

/// Where bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum PartPlace {
    /// What this rank gives.
    Input,
    /// What this rank gets.
    Output,
    /// One half of a rank's slot: 0 for even rounds, 1 for odd ones.
    Slot(usize, u8),
    /// The payload of a rank's progress line.
    Line(usize),
    /// What another rank gives, where it lies.
    PeerInput(usize),
    /// Where another rank gets it.
    PeerOutput(usize),
}

/// Bytes of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) place: PartPlace,
    pub(crate) at: usize,
    pub(crate) len: usize,
}

/// For whom a rank waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    /// All other ranks.
    All,
    /// One.
    One(usize),
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Copies between two parts of the same length.
    Copy { into: Part, from: Part, caching: Caching },
    /// Combines parts in their order into one or more; ranges of [`Plan::parts`].
    Reduce { inputs: Range<usize>, outputs: Range<usize>, caching: Caching },
    /// This rank's counter is set.
    Signal(u32),
    /// Nothing goes on before the counter of others is there.
    Wait(Who, u32),
}

/// What one rank does in one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) path: Path,
    pub(crate) steps: Vec<Step>,
    /// The last tick that every rank signals on its line.
    pub(crate) ticks: u32,
    parts: Vec<Part>,
    /// Bytes that a call on a queue may read and write, where the plan is queued.
    launch: usize,
}

impl Plan {
    /// The plan of rank `shape.me`.
    pub(crate) fn new(shape: &Shape, path: Path) -> Self {
        let mut plan = Self { path, steps: Vec::new(), ticks: 0, parts: Vec::new(), launch: 0 };
        match (path, shape.kind) {
            (Path::Direct, _) if shape.workers != Workers::All => queued::plan(&mut plan, shape),
            (_, Kind::Barrier) => {
                plan.signal(1);
                plan.wait(Who::All, 0);
                plan.wait(Who::All, 1);
            }
            (Path::Direct, _) => direct::plan(&mut plan, shape),
            (Path::Staged, Kind::AllReduce | Kind::Reduce) => reduce::two_phase(&mut plan, shape),
            (_, Kind::AllReduce | Kind::Reduce) => reduce::one_shot(&mut plan, shape),
            _ => exchange::plan(&mut plan, shape),
        }
        plan
    }

    /// The parts of a range.
    pub(crate) fn parts(&self, range: &Range<usize>) -> &[Part] {
        self.parts.get(range.clone()).unwrap_or(&[])
    }

    /// The steps from `at` on that one call on a queue does: waits that follow each other, or copies that follow each other,
    /// are written the same way and are not too much for one call. Else one step.
    #[allow(dead_code)]
    pub(crate) fn together(&self, at: usize) -> Range<usize> {
        let rest = self.steps.get(at..).unwrap_or(&[]);
        let mut bytes = 0;
        let joins = |step: &&Step| match (&rest[0], step) {
            (Step::Wait(..), Step::Wait(..)) => true,
            (Step::Copy { caching: first, .. }, Step::Copy { into, caching, .. }) => {
                bytes += 2 * into.len;
                first == caching && bytes <= self.launch
            }
            _ => false,
        };
        at..at + rest.iter().take_while(joins).count().max(rest.len().min(1))
    }

    fn copy(&mut self, into: Part, from: Part, caching: Caching) {
        debug_assert_eq!(into.len, from.len);
        if into.len > 0 {
            self.steps.push(Step::Copy { into, from, caching });
        }
    }

    fn reduce(
        &mut self,
        inputs: impl Iterator<Item = Part>,
        outputs: impl Iterator<Item = Part>,
        to: Caching,
    ) {
        let start = self.parts.len();
        self.parts.extend(inputs);
        let middle = self.parts.len();
        self.parts.extend(outputs);
        let end = self.parts.len();
        if self.parts[start..].iter().all(|part| part.len == 0) {
            self.parts.truncate(start);
        } else {
            self.steps.push(Step::Reduce { inputs: start..middle, outputs: middle..end, caching: to });
        }
    }

    fn signal(&mut self, tick: u32) {
        self.ticks = tick;
        self.steps.push(Step::Signal(tick));
    }

    fn wait(&mut self, who: Who, tick: u32) {
        self.steps.push(Step::Wait(who, tick));
    }
}

impl Part {
    pub(crate) fn new(place: PartPlace, range: Range<usize>) -> Self {
        Self { place, at: range.start, len: range.end.saturating_sub(range.start) }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}[{}..{}]", self.place, self.at, self.at + self.len)
    }
}

/// The largest multiple of a cache line in `bytes`.
fn whole_lines(bytes: usize) -> usize {
    bytes / LINE * LINE
}

/// Chunk `index` of `n` nearly equal ones of `range`, cut at cache lines.
fn chunk(range: &Range<usize>, index: usize, n: usize) -> Range<usize> {
    let each = (range.end - range.start).div_ceil(n).next_multiple_of(LINE);
    let start = (range.start + index * each).min(range.end);
    start..(start + each).min(range.end)
}

/// Windows of `width` bytes that cover `len`; at least one.
fn windows(len: usize, width: usize) -> usize {
    len.div_ceil(width.max(1)).max(1)
}

const LINE: usize = tensorwire_device::flag::LINE;
