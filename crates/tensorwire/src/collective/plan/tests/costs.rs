//! The tables of docs/algorithms.md against the plans: signals, waits and bytes of each rank.

use super::ops::{Case, Op};
use crate::collective::plan::{Counts, LINE, Place, Plan, Step, Who};
use crate::shm::kind::{Kind, Path};

/// What a rank does in one operation.
#[derive(Debug, Default, PartialEq, Eq)]
struct Cost {
    signals: usize,
    /// Waits for all and for one, without those that repeat one.
    waits: (usize, usize),
    /// Bytes copied to the slot (or line), and to the output.
    copied: (usize, usize),
    /// Bytes that reductions read and write.
    reduced: (usize, usize),
}

fn cost(plan: &Plan) -> Cost {
    let mut cost = Cost::default();
    let mut latest = None;
    for step in &plan.steps {
        match step {
            Step::Signal(_) => cost.signals += 1,
            Step::Wait(Who::One(_), _) => cost.waits.1 += 1,
            Step::Wait(Who::All, tick) => {
                cost.waits.0 += usize::from(latest < Some(*tick));
                latest = latest.max(Some(*tick));
            }
            Step::Copy { into, .. } if into.place == Place::Output => cost.copied.1 += into.len,
            Step::Copy { into, .. } => cost.copied.0 += into.len,
            Step::Reduce { inputs, outputs, .. } => {
                cost.reduced.0 += plan.parts(inputs).iter().map(|part| part.len).sum::<usize>();
                cost.reduced.1 += plan.parts(outputs).iter().map(|part| part.len).sum::<usize>();
            }
        }
    }
    cost
}

/// What the tables say, for `b` bytes to or from each rank and `r` rounds.
fn table(kind: Kind, path: Path, n: usize, r: usize, b: usize, root: bool) -> Cost {
    let direct = |copied: usize, reduced| Cost { signals: 2, waits: (3, 0), copied: (0, copied), reduced };
    let rounds = r + usize::from(r.is_multiple_of(2));
    let cost = |signals, waits, copied, reduced| Cost { signals, waits, copied, reduced };
    // Small parts are put together, with the own one.
    let laned = if r == 1 && n * b <= 16 << 10 { n * b } else { n * b - b };
    match (path, kind, root) {
        (_, Kind::Barrier, _) => cost(1, (2, 0), (0, 0), (0, 0)),
        (Path::Direct, Kind::AllReduce, _) => direct(0, (b, b)),
        (Path::Direct, Kind::Reduce, _) => direct(0, (b, b / n)),
        (Path::Direct, Kind::Broadcast, true) | (Path::Direct, Kind::Gather, false) => direct(0, (0, 0)),
        (Path::Direct, Kind::Broadcast | Kind::Scatter, _) => direct(b, (0, 0)),
        (Path::Direct, Kind::ReduceScatter, _) => direct(0, (n * b, b)),
        (Path::Direct, _, _) => direct(n * b, (0, 0)),
        (Path::Staged, Kind::AllReduce | Kind::Reduce, _) => {
            let (signals, part) = (2 * r + usize::from(r.is_multiple_of(2)), b / n);
            match (kind, root) {
                (Kind::AllReduce, _) => {
                    cost(signals, (1 + r, r * (n - 1)), (b - part, b - part), (b, 2 * part))
                }
                (_, true) => cost(signals, (1 + r, r * (n - 1)), (b - part, b - part), (b, part)),
                (_, false) => cost(signals, (1 + r, 0), (b - part, 0), (b, part)),
            }
        }
        (_, Kind::AllReduce, _) => cost(1, (2, 0), (b, 0), (n * b, b)),
        (_, Kind::Reduce, true) => cost(1, (2, 0), (0, 0), (n * b, b)),
        (_, Kind::Reduce, false) => cost(1, (1, 0), (b, 0), (0, 0)),
        (_, Kind::Broadcast, true) => cost(rounds, (r, 0), (b, 0), (0, 0)),
        (_, Kind::Scatter, true) => cost(rounds, (r, 0), (laned, b), (0, 0)),
        (_, Kind::Broadcast | Kind::Scatter, false) => cost(rounds, (1, r), (0, b), (0, 0)),
        (_, Kind::Gather, true) => cost(rounds, (1 + r, 0), (0, n * b), (0, 0)),
        (_, Kind::Gather, false) => cost(rounds, (r.min(2), r.saturating_sub(2)), (b, 0), (0, 0)),
        (_, Kind::ReduceScatter, _) => cost(rounds, (1 + r, 0), (laned, 0), (n * b, b)),
        (_, Kind::AllToAll, _) => cost(rounds, (1 + r, 0), (laned, n * b), (0, 0)),
        _ => cost(rounds, (1 + r, 0), (b, n * b), (0, 0)),
    }
}

#[test]
fn plans_cost_what_is_written() {
    for &kind in Kind::ALL.iter().filter(|kind| !matches!(kind, Kind::Send | Kind::Recv)) {
        for (path, n, rounds) in Path::ALL
            .iter()
            .flat_map(|&path| (2..=5).map(move |n| (path, n)))
            .flat_map(|(path, n)| (1..=if path == Path::Staged { 5 } else { 1 }).map(move |r| (path, n, r)))
        {
            let window = n * LINE;
            let bytes = match path {
                _ if kind == Kind::Barrier => 0,
                Path::Inline => 32 / n,
                // A round of scatter is for all ranks together.
                Path::OneShot | Path::Staged if kind == Kind::Scatter => rounds * window / n,
                _ => rounds * window,
            };
            let (counts, root) = (Counts::Even(bytes), n - 1);
            let (tensors, bypass, announced, in_place) = (1, false, false, false);
            let op = Op { kind, path, root, counts, tensors, window, bypass, announced, in_place };
            let case = Case { world: n, half: 2 * n * window, first: 1, ops: Vec::new() };
            for me in [0, root] {
                let written = table(kind, path, n, rounds, bytes, me == root);
                assert_eq!(cost(&op.plan(me, &case)), written, "rank {me} of {n}, {rounds} rounds: {op:?}");
            }
        }
    }
}
