//! Ranks that come at random times or are slow at random steps: whatever works is right, everything else is a time-out.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod model;
mod ranks;
mod trouble;

use std::sync::Mutex;
use std::time::Duration;

use model::op::{Op, What, any_op};
use model::{Dice, Model};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use tensorwire::collective::hooks;
use trouble::{turn, with_group, works};

/// Ranks come at random times and have little patience: whatever works is right, everything else is a time-out.
#[test]
fn impatience() {
    let _turn = turn();
    for (seed, world) in [(1, 2), (2, 3), (3, 4), (4, 3)] {
        let (model, mut runner) = (Model::default(), TestRunner::deterministic());
        let small = any_op().prop_filter("small", |op| op.bytes < 100_000 && op.what != What::Barrier);
        let mut ops = Vec::new();
        for _ in 0..50 {
            ops.push(Op {
                seed: ops.len() as u64 * 1000 + seed,
                ..small.new_tree(&mut runner).unwrap().current()
            });
        }
        let ends = with_group(world, |group| {
            let mut dice = Dice::new(seed * 100 + group.rank() as u64);
            let (mut good, mut late, mut running) = (0, 0, Vec::new());
            for op in &ops {
                if dice.below(4) == 0 {
                    std::thread::sleep(Duration::from_millis(dice.below(30) as u64));
                }
                let patience = Some(Duration::from_millis(1 + dice.below(40) as u64));
                running.push(Op { patience, ..op.clone() }.begin(group, &model).unwrap());
                if !op.start {
                    for running in running.drain(..) {
                        match running.finish().unwrap() {
                            true => good += 1,
                            false => late += 1,
                        }
                    }
                }
            }
            for running in running {
                let _ = running.finish().unwrap();
            }
            works(group);
            (good, late)
        });
        println!("world {world}: good and late by rank: {ends:?}");
    }
}

/// Every step of every rank may be late for a moment.
#[test]
fn delays_at_any_step() {
    let _turn = turn();
    let dice = Mutex::new(Dice::new(99));
    hooks::set(move |_| {
        let late = dice.lock().unwrap().below(30) == 0;
        if late {
            std::thread::sleep(Duration::from_micros(1500));
        }
    });
    let mut runner = TestRunner::deterministic();
    let medium = any_op().prop_filter("medium", |op| op.bytes < 600_000);
    for world in [2, 3, 5] {
        let ops: Vec<Op> = (0..40).map(|_| medium.new_tree(&mut runner).unwrap().current()).collect();
        let model = Model::default();
        with_group(world, |group| {
            let mut running = Vec::new();
            for op in &ops {
                let now = op.begin(group, &model).unwrap();
                if op.start { running.push(now) } else { assert!(now.finish().unwrap()) }
            }
            running.into_iter().for_each(|running| assert!(running.finish().unwrap()));
        });
    }
}
