//! Queued plans: every dealing of the work, between others, and with one mistake each.

use std::collections::HashMap;

use super::ops::{Case, KINDS, LAUNCH, Op};
use super::plans;
use super::sim::{Fault, Order, Sim};
use crate::collective::plan::{ARRIVED, Counts, DONE, LINE, Plan, Step, Who, Workers};
use crate::shm::kind::{Kind, Path};

/// What can be seen of queued plans without running them.
pub(super) fn look(case: &Case, plans: &[Vec<Plan>]) -> Result<(), Fault> {
    let sim = Sim::new(case, plans);
    for (index, plans) in plans.iter().enumerate().filter(|(index, _)| case.ops[*index].is_queued()) {
        for (me, plan) in plans.iter().enumerate() {
            let wrong = |text: &str| Err(Fault::Ticks(format!("rank {me}, operation {index}: {text}")));
            let signals = plan.steps.iter().filter_map(|step| match step {
                Step::Signal(word) => Some(*word),
                _ => None,
            });
            if ![&[][..], &[ARRIVED], &[DONE], &[ARRIVED, DONE]].contains(&&signals.collect::<Vec<_>>()[..]) {
                return wrong("other words than agreed");
            }
            if plan.ticks != 1 {
                return wrong("other ticks than the meeting's");
            }
            // Waits come where nothing is done that others could wait for, or where all is done.
            let word = |step: &Step| match step {
                Step::Signal(ARRIVED) => 0,
                Step::Wait(_, ARRIVED) => 1,
                Step::Copy { .. } | Step::Reduce { .. } => 2,
                Step::Signal(_) => 3,
                Step::Wait(..) => 4,
            };
            if !plan.steps.is_sorted_by_key(word) {
                return wrong("steps in another order than agreed");
            }
            if let Some(text) = calls(plan) {
                return wrong(&text);
            }
            apart(&sim, index, me, plan)?;
        }
    }
    Ok(())
}

/// Says what is wrong with the calls that a plan is made of.
fn calls(plan: &Plan) -> Option<String> {
    let mut at = 0;
    while at < plan.steps.len() {
        let call = plan.together(at);
        let bytes = |step: &Step| match step {
            Step::Copy { into, .. } => 2 * into.len,
            Step::Reduce { inputs, outputs, .. } => {
                [inputs, outputs].into_iter().flat_map(|range| plan.parts(range)).map(|part| part.len).sum()
            }
            _ => 0,
        };
        // A step has at least a cache line of each part.
        let steps = plan.steps.get(call.clone()).unwrap_or(&[]);
        let least = match steps {
            [Step::Reduce { inputs, outputs, .. }] => (inputs.len() + outputs.len()) * LINE,
            _ => 0,
        };
        if call.start != at || steps.is_empty() || steps.iter().map(bytes).sum::<usize>() > LAUNCH.max(least)
        {
            return Some(format!("a call does steps {call:?}, from {at}"));
        }
        at = call.end;
    }
    None
}

/// No two steps touch the same bytes, unless they only read them.
fn apart(sim: &Sim<'_>, index: usize, me: usize, plan: &Plan) -> Result<(), Fault> {
    let mut touched: HashMap<usize, Vec<(usize, usize, usize, bool)>> = HashMap::new();
    for (at, step) in plan.steps.iter().enumerate() {
        let (reads, writes) = match step {
            Step::Copy { into, from, .. } if sim.place(me, index, into)? != sim.place(me, index, from)? => {
                (vec![*from], vec![*into])
            }
            Step::Reduce { inputs, outputs, .. } => {
                (plan.parts(inputs).to_vec(), plan.parts(outputs).to_vec())
            }
            _ => continue,
        };
        let reads = reads.into_iter().map(|part| (part, false));
        for (part, write) in reads.chain(writes.into_iter().map(|part| (part, true))) {
            let (memory, start) = sim.place(me, index, &part)?;
            let end = start + part.len;
            let before = touched.entry(memory).or_default();
            let other = before.iter().find(|&&(other, from, to, written)| {
                other != at && from < end && start < to && (write || written)
            });
            if let Some((other, ..)) = other {
                return Err(Fault::Race(format!("rank {me}, operation {index}: steps {other} and {at}")));
            }
            before.push((at, start, end, write));
        }
    }
    Ok(())
}

/// Ways to deal ranks to up to three devices.
fn dealings(world: usize) -> Vec<Vec<usize>> {
    let deal = |device: &dyn Fn(usize) -> usize| (0..world).map(device).collect::<Vec<_>>();
    let mut all = vec![
        deal(&|_| 0),
        deal(&|rank| rank % 2),
        deal(&|rank| rank % 3),
        deal(&|rank| rank * 2 / world),
        deal(&|rank| rank * 3 / world),
        // One rank alone on a device, the first or the last.
        deal(&|rank| usize::from(rank == 0)),
        deal(&|rank| usize::from(rank + 1 == world)),
        deal(&|rank| [2, 0, 0, 1, 0, 2, 1, 1, 2][rank % 9]),
    ];
    all.sort();
    all.dedup_by_key(|devices| Workers::by_device(devices));
    all
}

/// Equal parts, none at all, and uneven ones, where the kind has them.
fn sizes(kind: Kind, world: usize) -> Vec<Counts> {
    let uneven = |n: usize| (0..n).map(|at| [0, 1, 70, 200, 64, 3][(at * 5 + at / 4) % 6]).collect();
    let even = [0, 4, LINE, 4 * LINE + 12].map(Counts::Even);
    match kind {
        Kind::Barrier => vec![Counts::Even(0)],
        Kind::Sizes => vec![Counts::Even(8 * world)],
        Kind::AllToAll => even.into_iter().chain([Counts::Matrix(uneven(world * world))]).collect(),
        Kind::AllGather | Kind::Gather | Kind::Scatter | Kind::ReduceScatter => {
            even.into_iter().chain([Counts::PerRank(uneven(world))]).collect()
        }
        _ => even.to_vec(),
    }
}

fn rooted(kind: Kind) -> bool {
    matches!(kind, Kind::Reduce | Kind::Broadcast | Kind::Gather | Kind::Scatter)
}

#[test]
fn every_dealing_of_every_kind() {
    let mut seed = 1;
    for world in 1..=9 {
        for (devices, kind) in
            dealings(world).into_iter().flat_map(|devices| KINDS.map(|kind| (devices.clone(), kind)))
        {
            let roots = if rooted(kind) { vec![0, world / 2, world - 1] } else { vec![0] };
            // All sizes after each other, on one stream and then on the other.
            for (root, in_place) in roots.into_iter().flat_map(|root| [(root, false), (root, true)]) {
                let op = |(index, counts): (usize, Counts)| Op {
                    root,
                    in_place,
                    tensors: if kind == Kind::AllReduce { 1 + index % 2 } else { 1 },
                    workers: Workers::by_device(&devices),
                    streams: if index < 2 { 0 } else { 0b1_0110_1011 },
                    ..Op::new(kind, Path::Direct, counts)
                };
                let ops = sizes(kind, world).into_iter().enumerate().map(op).collect();
                let case = Case { world, half: 4 * LINE, first: 1, ops };
                let (plans, order) = (plans(&case), [Order::Random, Order::Runs, Order::Ranked][seed % 3]);
                let result = look(&case, &plans)
                    .and_then(|()| Sim::new(&case, &plans).run(order, 0x9e37_79b9 * seed as u64));
                assert_eq!(result, Ok(()), "{world} ranks on {devices:?}: {case:?}");
                seed += 1;
            }
        }
    }
}

/// Every kind on every dealing, with work for every worker.
fn busy(world: usize) -> impl Iterator<Item = Case> {
    let each = dealings(world).into_iter().flat_map(|devices| KINDS.map(|kind| (devices.clone(), kind)));
    each.flat_map(move |(devices, kind)| {
        let roots = if rooted(kind) { vec![0, world - 1] } else { vec![0] };
        roots.into_iter().map(move |root| {
            let bytes = match kind {
                Kind::Barrier => 0,
                Kind::Sizes => 8 * world,
                _ => 2 * world * LINE - 8,
            };
            let workers = Workers::by_device(&devices);
            let op = Op { root, workers, ..Op::new(kind, Path::Direct, Counts::Even(bytes)) };
            Case { world, half: 4 * LINE, first: 1, ops: vec![op] }
        })
    })
}

/// Runs and looks at plans of which one rank's is changed.
fn verdict(case: &Case, me: usize, steps: Vec<Step>) -> Option<Fault> {
    let mut plans = plans(case);
    plans[0][me].steps = steps;
    let orders = [Order::Ranked, Order::Runs, Order::Random].into_iter().cycle();
    let run = |(seed, order): (u64, Order)| Sim::new(case, &plans).run(order, 0x9e37_79b9 * seed).err();
    (1..=6).zip(orders).find_map(run).or_else(|| look(case, &plans).err())
}

/// Makes a mutant of each step of each rank's plan that `change` can change, and hands on what the run says.
fn each_mutant(
    worlds: std::ops::RangeInclusive<usize>,
    change: impl Fn(&Plan, usize, usize) -> Vec<Vec<Step>>,
    seen: impl Fn(&Option<Fault>) -> bool,
) {
    let mut count = 0;
    for case in worlds.flat_map(busy) {
        for me in 0..case.world {
            let plan = case.ops[0].plan(me, &case);
            for at in 0..plan.steps.len() {
                for mutant in change(&plan, at, me) {
                    let fault = verdict(&case, me, mutant);
                    let step = &plan.steps[at];
                    assert!(seen(&fault), "{fault:?}: {step:?}, step {at} of rank {me} in {case:?}");
                    count += 1;
                }
            }
        }
    }
    assert!(count > 50, "only {count} mutants");
}

/// The steps of a plan with others in place of one.
fn instead(plan: &Plan, at: usize, steps: impl IntoIterator<Item = Step>) -> Vec<Step> {
    plan.steps[..at].iter().cloned().chain(steps).chain(plan.steps[at + 1..].iter().cloned()).collect()
}

#[test]
fn a_rank_less_to_wait_for() {
    for world in 2..=5 {
        let change = |plan: &Plan, at: usize, me: usize| match plan.steps[at] {
            Step::Wait(Who::One(_), _) => vec![instead(plan, at, [])],
            Step::Wait(Who::All, word) => {
                let others = || (0..world).filter(|&other| other != me);
                let without = |less: usize| others().filter(move |&other| other != less);
                let waits = |less: usize| {
                    without(less).map(|other| Step::Wait(Who::One(other), word)).collect::<Vec<_>>()
                };
                others().map(|less| instead(plan, at, waits(less))).collect()
            }
            _ => Vec::new(),
        };
        let seen = |fault: &Option<Fault>| matches!(fault, Some(Fault::Race(_) | Fault::Wrong(_)));
        each_mutant(world..=world, change, seen);
    }
}

#[test]
fn a_signal_less() {
    let change = |plan: &Plan, at: usize, _: usize| match plan.steps[at] {
        Step::Signal(_) => vec![instead(plan, at, [])],
        _ => Vec::new(),
    };
    each_mutant(2..=4, change, |fault| matches!(fault, Some(Fault::Deadlock(_))));
}

#[test]
fn done_too_early() {
    let change = |plan: &Plan, at: usize, _: usize| {
        let mut steps = plan.steps.clone();
        if steps[at] != Step::Signal(DONE) {
            return Vec::new();
        }
        steps.swap(at - 1, at);
        vec![steps]
    };
    each_mutant(2..=5, change, |fault| matches!(fault, Some(Fault::Race(_) | Fault::Wrong(_))));
}

#[test]
fn arrived_too_late() {
    // The user's work is before the plan, so this signal cannot come too early. Behind the waits nobody would ever go on; a
    // barrier would, but law 11 wants signals before waits there too.
    let change = |plan: &Plan, at: usize, _: usize| {
        let mut steps = plan.steps.clone();
        match &steps[at] {
            Step::Signal(ARRIVED) => steps[at..].rotate_left(1),
            _ => return Vec::new(),
        }
        vec![steps]
    };
    each_mutant(2..=4, change, |fault| matches!(fault, Some(Fault::Deadlock(_) | Fault::Ticks(_))));
}

#[test]
fn a_step_less() {
    let change = |plan: &Plan, at: usize, _: usize| match plan.steps[at] {
        Step::Copy { .. } | Step::Reduce { .. } => vec![instead(plan, at, [])],
        _ => Vec::new(),
    };
    each_mutant(2..=3, change, |fault| matches!(fault, Some(Fault::Wrong(_))));
}

#[test]
fn inputs_in_another_order() {
    for case in (2..=4).flat_map(busy) {
        for me in 0..case.world {
            let mut plans = plans(&case);
            let plan = &mut plans[0][me];
            let Some(Step::Reduce { inputs, .. }) =
                plan.steps.iter().find(|step| matches!(step, Step::Reduce { .. })).cloned()
            else {
                continue;
            };
            plan.parts.swap(inputs.start, inputs.start + 1);
            let result = Sim::new(&case, &plans).run(Order::Random, 7);
            assert!(matches!(result, Err(Fault::Wrong(_))), "{result:?}: rank {me} in {case:?}");
        }
    }
}

#[test]
fn a_meeting_that_waits_for_one_less() {
    for world in 2..=4 {
        let workers = Workers::by_device(&vec![0; world]);
        let op = Op { workers, ..Op::new(Kind::AllReduce, Path::Direct, Counts::Even(LINE)) };
        let case = Case { world, half: 4 * LINE, first: 1, ops: vec![op; 6] };
        let plans = plans(&case);
        for me in 0..world {
            let others = || (0..world).filter(move |&other| other != me);
            for less in others() {
                let waits =
                    others().filter(|&other| other != less).map(|other| Step::Wait(Who::One(other), 1));
                let meeting = [Step::Signal(1)].into_iter().chain(waits).collect();
                let result = Sim::new(&case, &plans).meeting(me, meeting).run(Order::Random, 7);
                assert!(
                    matches!(result, Err(Fault::Wrong(_))),
                    "{result:?}: rank {me} of {world}, not {less}"
                );
            }
            assert_eq!(Sim::new(&case, &plans).run(Order::Random, 7), Ok(()));
        }
    }
}

#[test]
fn the_lowest_rank_of_a_device_works() {
    let of = |devices: &[usize]| match Workers::by_device(devices) {
        Workers::Some(list) => list.to_vec(),
        Workers::All => Vec::new(),
    };
    assert_eq!(of(&[7, 7, 7]), [0, 0, 0]);
    assert_eq!(of(&[1, 0, 1, 0, 2]), [0, 1, 0, 1, 4]);
    assert_eq!(Workers::by_device(&[1, 0, 1, 0, 2]).each(5), [0, 1, 4]);
    assert_eq!(Workers::All.each(3), [0, 1, 2]);
}
