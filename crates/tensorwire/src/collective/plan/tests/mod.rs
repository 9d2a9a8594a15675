//! The plans of all ranks, run against each other: results, order, races, deadlocks.

mod costs;
mod memory;
mod mutants;
mod ops;
mod queued;
mod sim;

use proptest::prelude::*;

use self::ops::Case;
use self::sim::{Fault, Order, Sim};
use super::{Plan, Step, Who};

/// The plans of all ranks, by operation and rank.
fn plans(case: &Case) -> Vec<Vec<Plan>> {
    case.ops.iter().map(|op| (0..case.world).map(|me| op.plan(me, case)).collect()).collect()
}

/// What can be seen of plans without running them.
fn look(case: &Case, plans: &[Vec<Plan>]) -> Result<(), Fault> {
    let wrong = |text: String| Err(Fault::Ticks(text));
    for (index, plans) in plans.iter().enumerate() {
        if case.ops[index].is_queued() {
            continue;
        }
        for (me, plan) in plans.iter().enumerate() {
            let mut tick = 0;
            for step in &plan.steps {
                match step {
                    Step::Signal(next) if *next != tick + 1 => {
                        return wrong(format!("rank {me}, operation {index}: tick {next} after {tick}"));
                    }
                    Step::Signal(next) => tick = *next,
                    Step::Wait(_, target) if *target > plan.ticks => {
                        return wrong(format!("rank {me}, operation {index} waits for tick {target}"));
                    }
                    _ => {}
                }
            }
            let first = plans[0].ticks.saturating_add_signed(case.ops[index].ahead(me, 0));
            if tick != plan.ticks || tick != first {
                return wrong(format!("rank {me}, operation {index}: {tick} ticks, not {}", plans[0].ticks));
            }
            if case.world > 1 && !plan.steps.contains(&Step::Wait(Who::All, 0)) {
                return wrong(format!("rank {me}, operation {index} does not wait for the previous one"));
            }
        }
    }
    Ok(())
}

fn run(case: &Case, plans: &[Vec<Plan>], seed: u64) -> Result<(), Fault> {
    [Order::Random, Order::Runs, Order::Ranked]
        .into_iter()
        .try_for_each(|order| Sim::new(case, plans).run(order, seed | 1))
}

fn check(case: &Case, seed: u64) -> Result<(), Fault> {
    let plans = plans(case);
    look(case, &plans)?;
    queued::look(case, &plans)?;
    run(case, &plans, seed)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(CASES) })]

    #[test]
    fn any_operations_in_any_order(case in ops::case(9), seed: u64) {
        prop_assert_eq!(check(&case, seed), Ok(()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(CASES / 8) })]

    #[test]
    fn many_ranks(case in ops::case(17), seed: u64) {
        prop_assert_eq!(check(&case, seed), Ok(()));
    }
}

const CASES: u32 = 256;
