//! Plans with one mistake each: proof that the checks would see it.

use super::ops::{Case, Op};
use super::sim::{Fault, Order, Sim};
use super::{look, plans};
use crate::collective::plan::{Counts, LINE, Plan, Step, Who, Workers};
use crate::shm::kind::{Kind, Path};

/// Every kind, path and number of rounds up to four.
fn all(world: usize) -> Vec<Op> {
    let mut ops = Vec::new();
    for &kind in Kind::ALL.iter().filter(|kind| !matches!(kind, Kind::Send | Kind::Recv)) {
        for &path in Path::ALL {
            let rounds = if path == Path::Staged { 4 } else { 1 };
            for rounds in 1..=rounds {
                let reduces = matches!(kind, Kind::AllReduce | Kind::Reduce);
                // The last round is not full, but every rank has a chunk in it.
                let window = if reduces { world * LINE } else { LINE };
                let bytes = match path {
                    _ if kind == Kind::Barrier => 0,
                    Path::Inline => 32 / world,
                    _ => rounds * window - 8,
                };
                let announced = (rounds + world).is_multiple_of(2) || path == Path::Direct;
                let counts = Counts::Even(bytes);
                ops.push(Op { root: 1, window, announced, ..Op::new(kind, path, counts) });
            }
        }
    }
    ops
}

/// The operation several times, between others that leave ranks as far apart as they may be and fill slots.
fn among_others(world: usize, op: &Op) -> Vec<Case> {
    let half = 2 * world * LINE;
    let gather = |rounds: usize, window: usize| Op {
        kind: Kind::AllGather,
        path: Path::Staged,
        counts: Counts::Even(rounds * window),
        window,
        announced: false,
        ..op.clone()
    };
    let sequence = |other: Op| {
        let (one, other) = (|| op.clone(), || other.clone());
        let ops = vec![other(), one(), other(), one(), one(), one(), one(), other()];
        Case { world, half, first: 1, ops }
    };
    let devices: Vec<_> = (0..world).map(|rank| rank % 2).collect();
    let queued = Op {
        workers: Workers::by_device(&devices),
        streams: 1,
        ..Op::new(Kind::AllReduce, Path::Direct, Counts::Even(2 * LINE))
    };
    vec![sequence(gather(2, half)), sequence(gather(3, LINE)), sequence(queued)]
}

/// How the checks take to a change of one rank's plan, wherever it occurs; nothing if they see nothing.
fn verdict(op: &Op, world: usize, me: usize, mutant: &Plan) -> Option<Fault> {
    for case in among_others(world, op) {
        let mut plans = plans(&case);
        let original = op.plan(me, &case);
        plans.iter_mut().filter(|plans| plans[me] == original).for_each(|plans| plans[me] = mutant.clone());
        let orders = [Order::Ranked, Order::Runs, Order::Random].into_iter().cycle();
        for (seed, order) in (1..=6).zip(orders) {
            if let Err(fault) = Sim::new(&case, &plans).run(order, 0x9e37_79b9 * seed) {
                return Some(fault);
            }
        }
        if let Err(fault) = look(&case, &plans) {
            return Some(fault);
        }
    }
    None
}

/// Ranks whose tensors lie on GPUs have a tick more than the others. Who does not heed that reads too early, or waits for ever.
#[test]
fn ticks_of_ranks_apart_are_heeded() {
    for world in [2, 3] {
        for op in all(world) {
            let op = Op { apart: 1, announced: false, ..op };
            if !op.is_apart(0) || op.kind == Kind::Broadcast && op.root == 0 {
                continue;
            }
            let mut seen = false;
            for case in among_others(world, &op) {
                let plans = plans(&case);
                for seed in 1..=6 {
                    let order = [Order::Ranked, Order::Runs, Order::Random][seed as usize % 3];
                    assert_eq!(Sim::new(&case, &plans).run(order, 0x9e37_79b9 * seed), Ok(()), "{op:?}");
                    seen |= Sim::new(&case, &plans).level().run(order, 0x9e37_79b9 * seed).is_err();
                }
            }
            assert!(seen, "{op:?}");
        }
    }
}

/// Makes a mutant of each step of the plans of two ranks that `change` can change, and hands on what the checks say.
fn each_mutant(
    change: impl Fn(&mut Plan, usize, &Op, usize) -> bool,
    mut seen: impl FnMut(Option<Fault>, String, &Step),
) {
    let mut count = 0;
    for world in [2, 3] {
        for op in all(world) {
            for me in 0..2 {
                let plan = op.plan(me, &among_others(world, &op)[0]);
                for at in 0..plan.steps.len() {
                    let mut mutant = plan.clone();
                    if change(&mut mutant, at, &op, me) {
                        let step = &plan.steps[at];
                        let text = format!("{step:?}, step {at} of rank {me} of {world} in {op:?}");
                        seen(verdict(&op, world, me, &mutant), text, step);
                        count += 1;
                    }
                }
            }
        }
    }
    assert!(count > 50, "only {count} mutants");
}

#[test]
fn without_mistakes() {
    for world in [2, 3] {
        for op in all(world) {
            for case in among_others(world, &op) {
                let plans = plans(&case);
                let result = look(&case, &plans).and_then(|()| Sim::new(&case, &plans).run(Order::Random, 7));
                assert_eq!(result, Ok(()), "{op:?}");
            }
        }
    }
}

#[test]
fn a_wait_less() {
    let change = |plan: &mut Plan, at: usize, op: &Op, _: usize| {
        let Step::Wait(who, tick) = plan.steps[at] else { return false };
        let repeats = plan.steps[..at].iter().any(|step| match *step {
            Step::Wait(before, earlier) => (before == Who::All || before == who) && earlier >= tick,
            _ => false,
        });
        // Where bytes go one way, only the reader and the giver wait for each other; the direct path lets all
        // wait for all.
        let one_way = matches!(op.kind, Kind::Broadcast | Kind::Gather | Kind::Scatter);
        plan.steps.remove(at);
        !(repeats || op.path == Path::Direct && one_way && tick > 0)
    };
    each_mutant(change, |fault, text, step| match fault {
        // A look at the steps shows that there is no wait for tick 0; others must show in what happens.
        Some(Fault::Ticks(_)) => assert!(matches!(step, Step::Wait(_, 0)), "{text}"),
        Some(_) => {}
        None => panic!("not seen: {text}"),
    });
}

#[test]
fn a_signal_too_early() {
    let change = |plan: &mut Plan, at: usize, op: &Op, me: usize| {
        let Step::Signal(tick) = plan.steps[at] else { return false };
        let moved = at > 0 && matches!(plan.steps[at - 1], Step::Copy { .. } | Step::Reduce { .. });
        if !moved {
            return false;
        }
        plan.steps.swap(at - 1, at);
        let root = me == op.root;
        let harmless = match (op.kind, op.path) {
            // What the root reduces is for itself, and its next tick (or operation) says that it has read the inputs.
            (Kind::Reduce, Path::Staged) => root && matches!(plan.steps[at], Step::Reduce { .. }),
            // What a rank gives to itself.
            (Kind::Scatter, Path::Direct) => root,
            // Before the empty round: its tick comes after this one and says the same.
            (Kind::Broadcast | Kind::Scatter, Path::Staged) => {
                !root && tick + 1 == plan.ticks && ends_empty(plan)
            }
            (Kind::Gather, Path::Staged) => root && tick + 1 == plan.ticks && ends_empty(plan),
            _ => false,
        };
        !harmless
    };
    each_mutant(change, |fault, text, _| assert!(fault.is_some(), "not seen: {text}"));
}

/// Whether the last step is the signal of an empty round.
fn ends_empty(plan: &Plan) -> bool {
    matches!(plan.steps.last(), Some(Step::Signal(_)))
}

#[test]
fn inputs_in_another_order() {
    let change = |plan: &mut Plan, at: usize, _: &Op, _: usize| {
        let Step::Reduce { inputs, .. } = plan.steps[at].clone() else { return false };
        plan.parts.swap(inputs.start, inputs.start + 1);
        true
    };
    each_mutant(change, |fault, text, _| {
        assert!(matches!(fault, Some(Fault::Wrong(_))), "{fault:?}: {text}")
    });
}
