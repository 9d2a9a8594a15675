//! all_reduce and reduce through slots.

use std::iter::once;
use std::ops::Range;

use tensorwire_device::Caching;

use super::{LINE, Part, PartPlace, Plan, Shape, Who, chunk, whole_lines, windows};
use crate::shm::kind::Kind;

/// Small sizes: every rank publishes its whole input. The ranks that need the result reduce all of it.
pub(super) fn one_shot(plan: &mut Plan, shape: &Shape) {
    let (me, bytes) = (shape.me, shape.whole());
    let result = shape.kind == Kind::AllReduce || me == shape.root;
    let publishes = shape.world > 1 && (shape.kind == Kind::AllReduce || me != shape.root);
    let first = shape.first();
    if shape.announced {
        plan.signal(1);
    }
    // A line may be written at once, a slot when all have read what was in it.
    if publishes && !shape.inline {
        plan.wait(Who::All, 0);
    }
    if publishes {
        let into = Part::new(shape.published(me, 0), 0..bytes * shape.tensors);
        plan.copy(into, Part::new(PartPlace::Input, 0..bytes * shape.tensors), Caching::Give);
    }
    plan.signal(first);
    if !publishes || shape.inline {
        plan.wait(Who::All, 0);
    }
    if result {
        if shape.world > 1 {
            plan.wait(Who::All, first);
        }
        let input = |rank: usize| if rank == me { PartPlace::Input } else { shape.published(rank, 0) };
        let tensor = |index: usize| index * bytes..(index + 1) * bytes;
        let inputs = (0..shape.world).flat_map(|rank| (0..shape.tensors).map(move |index| (rank, index)));
        let inputs = inputs.map(|(rank, index)| Part::new(input(rank), tensor(index)));
        plan.reduce(inputs, once(Part::new(PartPlace::Output, 0..bytes)), shape.caching());
    }
}

/// Large: in rounds, each rank publishes its input, reduces one chunk of everybody's, publishes the result, and takes the
/// other chunks of it. While others reduce, it publishes the next round.
pub(super) fn two_phase(plan: &mut Plan, shape: &Shape) {
    let rounds = Rounds::new(shape);
    let first = shape.first();
    if shape.announced {
        plan.signal(1);
    }
    plan.wait(Who::All, 0);
    rounds.publish(plan, 0);
    plan.signal(first);
    for round in 0..rounds.count {
        let tick = first + 2 * round as u32;
        plan.wait(Who::All, tick);
        rounds.reduce(plan, round);
        plan.signal(tick + 1);
        if round + 1 < rounds.count {
            rounds.publish(plan, round + 1);
            plan.signal(tick + 2);
        }
        rounds.take(plan, round, tick + 1);
    }
    if rounds.count.is_multiple_of(2) {
        plan.signal(first + 2 * rounds.count as u32);
    }
}

struct Rounds<'a> {
    shape: &'a Shape,
    /// Bytes of each tensor that go in a round.
    width: usize,
    /// Where the result of a chunk lies in a half.
    result: usize,
    count: usize,
}

impl<'a> Rounds<'a> {
    fn new(shape: &'a Shape) -> Self {
        // The inputs of all tensors, and one chunk of the result.
        let room = shape.half / (shape.tensors + 1);
        let width = whole_lines(shape.window.min(room)).max(LINE);
        Self { shape, width, result: shape.tensors * width, count: windows(shape.whole(), width) }
    }

    /// The bytes of the tensor that a round is about.
    fn range(&self, round: usize) -> Range<usize> {
        let bytes = self.shape.whole();
        (round * self.width).min(bytes)..((round + 1) * self.width).min(bytes)
    }

    /// Everything but this rank's own chunk, which nobody else needs.
    fn publish(&self, plan: &mut Plan, round: usize) {
        let shape = self.shape;
        let (range, slot) = (self.range(round), shape.published(shape.me, round));
        let own = chunk(&range, shape.me, shape.world);
        for index in 0..shape.tensors {
            for part in [range.start..own.start, own.end..range.end] {
                let from = index * shape.whole();
                let into = index * self.width + part.start - range.start;
                let into = Part::new(slot, into..into + part.len());
                let from = Part::new(PartPlace::Input, from + part.start..from + part.end);
                plan.copy(into, from, Caching::Give);
            }
        }
    }

    fn reduce(&self, plan: &mut Plan, round: usize) {
        let shape = self.shape;
        let (range, me) = (self.range(round), shape.me);
        let own = chunk(&range, me, shape.world);
        let input = |(rank, index): (usize, usize)| {
            if rank == me {
                let start = index * shape.whole();
                return Part::new(PartPlace::Input, start + own.start..start + own.end);
            }
            let start = index * self.width + own.start - range.start;
            Part::new(shape.published(rank, round), start..start + own.len())
        };
        let inputs = (0..shape.world).flat_map(|rank| (0..shape.tensors).map(move |index| (rank, index)));
        let result = self.result(me, round, own.len());
        // A result that bypasses the caches does so when it is taken; others read it from the slot.
        let output = Part::new(PartPlace::Output, own.clone());
        match shape.kind {
            Kind::Reduce if me == shape.root => plan.reduce(inputs.map(input), once(output), Caching::Keep),
            Kind::AllReduce if !shape.bypass => {
                plan.reduce(inputs.map(input), [result, output].into_iter(), Caching::Give);
            }
            _ => plan.reduce(inputs.map(input), once(result), Caching::Give),
        }
    }

    /// Takes the chunks of the result that others have reduced.
    fn take(&self, plan: &mut Plan, round: usize, tick: u32) {
        let shape = self.shape;
        if shape.kind == Kind::Reduce && shape.me != shape.root {
            return;
        }
        let range = self.range(round);
        let own = chunk(&range, shape.me, shape.world);
        if shape.kind == Kind::AllReduce && shape.bypass {
            let from = self.result(shape.me, round, own.len());
            plan.copy(Part::new(PartPlace::Output, own), from, Caching::Bypass);
        }
        for rank in shape.others() {
            let chunk = chunk(&range, rank, shape.world);
            plan.wait(Who::One(rank), tick);
            plan.copy(
                Part::new(PartPlace::Output, chunk.clone()),
                self.result(rank, round, chunk.len()),
                shape.caching(),
            );
        }
    }

    fn result(&self, rank: usize, round: usize, len: usize) -> Part {
        Part::new(self.shape.published(rank, round), self.result..self.result + len)
    }
}
