//! Direct plans that are queued: some ranks work, for all. The ranks have met before, so no tick is left to wait for.
//!
//! Each rank has two words for an operation, [`ARRIVED`] and [`DONE`]. One rule makes all signals and waits: a worker
//! begins when all whose memory it touches have arrived, and a rank is done when all who touch its memory are done.

use super::{Plan, Shape, Who, direct};
use crate::shm::kind::Kind;

/// What was queued before the operation is done: the rank's tensors may be touched.
pub(crate) const ARRIVED: u32 = 1;
/// A worker has done its part.
pub(crate) const DONE: u32 = 2;

/// The tick of the meeting, which is all that the lines see of such an operation.
const MET: u32 = 1;

pub(super) fn plan(plan: &mut Plan, shape: &Shape) {
    plan.launch = shape.launch;
    steps(plan, shape);
    plan.ticks = MET;
}

fn steps(plan: &mut Plan, shape: &Shape) {
    let me = shape.me;
    if shape.kind == Kind::Barrier {
        // Nobody touches anything: all wait for all.
        if shape.world > 1 {
            plan.signal(ARRIVED);
            plan.wait(Who::All, ARRIVED);
        }
        return;
    }
    let workers = shape.workers.each(shape.world);
    let works = workers.contains(&me);
    let others = || (0..shape.world).filter(|&rank| rank != me);
    let touched: Vec<_> = others().filter(|&rank| works && touches(shape, me, rank)).collect();
    let touching: Vec<_> =
        workers.iter().copied().filter(|&worker| worker != me && touches(shape, worker, me)).collect();
    if !touching.is_empty() {
        plan.signal(ARRIVED);
    }
    wait(plan, shape, &touched, ARRIVED);
    direct::work(plan, shape);
    if !touched.is_empty() {
        plan.signal(DONE);
    }
    wait(plan, shape, &touching, DONE);
}

impl Shape {
    /// Whether the queue of a rank says that it has arrived: others work on its memory.
    pub(crate) fn arrives(&self, rank: usize) -> bool {
        let workers = self.workers.each(self.world);
        workers.into_iter().any(|worker| worker != rank && touches(self, worker, rank))
    }
}

/// Whether a worker reads or writes a rank's memory, if there are bytes at all.
fn touches(shape: &Shape, worker: usize, rank: usize) -> bool {
    let serves = |rank: usize| shape.workers.of(rank) == worker;
    let root = shape.root;
    match shape.kind {
        Kind::Gather => serves(root),
        Kind::Broadcast => {
            serves(rank) && rank != root
                || rank == root && (0..shape.world).any(|rank| serves(rank) && rank != root)
        }
        Kind::Scatter => serves(rank) || rank == root,
        _ => true,
    }
}

fn wait(plan: &mut Plan, shape: &Shape, ranks: &[usize], word: u32) {
    if !ranks.is_empty() && ranks.len() + 1 == shape.world {
        plan.wait(Who::All, word);
    } else {
        ranks.iter().for_each(|&rank| plan.wait(Who::One(rank), word));
    }
}
