//! Plans that go straight between the ranks' own memory. All ranks come, each does its part, and each waits until
//! all are done.

use std::iter::once;
use std::ops::Range;

use super::{Part, PartPlace, Plan, Shape, Who, chunk};
use crate::shm::kind::Kind;

/// Bytes between two looks at whether the operation still makes sense. Few in tests, so that they see several.
const PIECE: usize = if cfg!(test) { 128 } else { 8 << 20 };

pub(super) fn plan(plan: &mut Plan, shape: &Shape) {
    plan.signal(1);
    plan.wait(Who::All, 0);
    plan.wait(Who::All, 1);
    let me = shape.me;
    let input = |rank: usize| if rank == me { PartPlace::Input } else { PartPlace::PeerInput(rank) };
    let output = |rank: usize| if rank == me { PartPlace::Output } else { PartPlace::PeerOutput(rank) };
    let all = || 0..shape.world;
    match shape.kind {
        Kind::AllReduce | Kind::Reduce => {
            let bytes = shape.whole();
            for piece in pieces(chunk(&(0..bytes), me, shape.world)) {
                let tensor = |rank: usize, index: usize| {
                    let start = index * bytes;
                    Part::new(input(rank), start + piece.start..start + piece.end)
                };
                let inputs = all().flat_map(|rank| (0..shape.tensors).map(move |index| (rank, index)));
                let inputs = inputs.map(|(rank, index)| tensor(rank, index));
                let gets = |rank: &usize| shape.kind == Kind::AllReduce || *rank == shape.root;
                let outputs = all().filter(gets).map(|rank| Part::new(output(rank), piece.clone()));
                plan.reduce(inputs, outputs, shape.caching());
            }
        }
        Kind::ReduceScatter => {
            let given = shape.given(me, me);
            for piece in pieces(given.clone()) {
                let inputs = all().map(|rank| Part::new(input(rank), piece.clone()));
                let into = Part::new(PartPlace::Output, piece.start - given.start..piece.end - given.start);
                plan.reduce(inputs, once(into), shape.caching());
            }
        }
        _ => {
            let gives = |rank: &usize| match shape.kind {
                Kind::Broadcast => *rank == shape.root && me != shape.root,
                Kind::Scatter => *rank == shape.root,
                Kind::Gather => me == shape.root,
                _ => true,
            };
            for rank in once(me).chain(shape.others()).filter(gives) {
                let (from, into) = (shape.given(rank, me), shape.taken(rank, me));
                for piece in pieces(from.clone()) {
                    let start = into.start + piece.start - from.start;
                    let into = Part::new(PartPlace::Output, start..start + piece.len());
                    plan.copy(into, Part::new(input(rank), piece), shape.caching());
                }
            }
        }
    }
    plan.signal(2);
    plan.wait(Who::All, 2);
}

fn pieces(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(PIECE).map(move |start| start..(start + PIECE).min(range.end))
}
