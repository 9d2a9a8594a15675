//! Plans that go straight between the ranks' own memory: what a worker does, and how ranks that each work for
//! themselves wait for each other.

use std::iter::once;
use std::ops::Range;

use super::{LINE, Part, PartPlace, Plan, Shape, Who, Workers, chunk, whole_lines};
use crate::shm::kind::Kind;

/// Bytes between two looks at whether the operation still makes sense. Few in tests, so that they see several.
const PIECE: usize = if cfg!(test) { 128 } else { 8 << 20 };

/// All ranks come, each does its part, and each waits until all are done.
pub(super) fn plan(plan: &mut Plan, shape: &Shape) {
    plan.signal(1);
    plan.wait(Who::All, 0);
    plan.wait(Who::All, 1);
    work(plan, shape);
    plan.signal(2);
    plan.wait(Who::All, 2);
}

/// What this rank does if it is a worker. No two of these steps touch the same bytes, except to read them.
pub(super) fn work(plan: &mut Plan, shape: &Shape) {
    let me = shape.me;
    let input = |rank: usize| if rank == me { PartPlace::Input } else { PartPlace::PeerInput(rank) };
    let output = |rank: usize| if rank == me { PartPlace::Output } else { PartPlace::PeerOutput(rank) };
    let all = || 0..shape.world;
    let served = || all().filter(|&rank| shape.workers.of(rank) == me);
    match shape.kind {
        Kind::AllReduce | Kind::Reduce => {
            let workers = shape.workers.each(shape.world);
            let Some(index) = workers.iter().position(|&worker| worker == me) else { return };
            let bytes = shape.whole();
            let gets = |rank: &usize| shape.kind == Kind::AllReduce || *rank == shape.root;
            let caching =
                if shape.others().any(|rank| gets(&rank)) { shape.giving() } else { shape.caching() };
            let parts = shape.world * shape.tensors + all().filter(gets).count();
            for piece in pieces(shape, chunk(&(0..bytes), index, workers.len()), parts) {
                let tensor = |rank: usize, index: usize| {
                    let start = index * bytes;
                    Part::new(input(rank), start + piece.start..start + piece.end)
                };
                let inputs = all().flat_map(|rank| (0..shape.tensors).map(move |index| (rank, index)));
                let inputs = inputs.map(|(rank, index)| tensor(rank, index));
                // The own one last.
                let ranks = shape.others().chain(once(me)).filter(gets);
                let outputs = ranks.map(|rank| Part::new(output(rank), piece.clone()));
                plan.reduce(inputs, outputs, caching);
            }
        }
        Kind::ReduceScatter => {
            for to in served() {
                let given = shape.given(to, to);
                for piece in pieces(shape, given.clone(), shape.world + 1) {
                    let inputs = all().map(|rank| Part::new(input(rank), piece.clone()));
                    let into = Part::new(output(to), piece.start - given.start..piece.end - given.start);
                    plan.reduce(inputs, once(into), shape.caching());
                }
            }
        }
        _ => {
            let gives = |from: usize, to: usize| match shape.kind {
                Kind::Broadcast => from == shape.root && to != shape.root,
                Kind::Scatter => from == shape.root,
                Kind::Gather => to == shape.root,
                _ => true,
            };
            // From its own part on, so that not all read from the same.
            let sources = |to: usize| all().map(move |step| (to + step) % shape.world);
            let pairs = served().flat_map(|to| sources(to).map(move |from| (from, to)));
            for (from, to) in pairs.filter(|&(from, to)| gives(from, to)) {
                let (given, taken) = (shape.given(from, to), shape.taken(from, to));
                for piece in pieces(shape, given.clone(), 2) {
                    let start = taken.start + piece.start - given.start;
                    let into = Part::new(output(to), start..start + piece.len());
                    plan.copy(into, Part::new(input(from), piece), shape.caching());
                }
            }
        }
    }
}

/// Cuts a range so that a step does not last long: it touches so many parts of a piece's length.
fn pieces(shape: &Shape, range: Range<usize>, parts: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let most = match shape.workers {
        Workers::All => PIECE,
        Workers::Some(_) => whole_lines(shape.launch / parts.max(1)).max(LINE),
    };
    range.clone().step_by(most).map(move |start| start..(start + most).min(range.end))
}
