//! A rank is held before each step of an operation in turn: no result is wrong, and the group goes on.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod model;
mod ranks;
mod trouble;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ranks::LONG;
use tensorwire::collective::{Path, hooks};
use tensorwire::{Deadline, Group, Result, Tensor};
use trouble::{Gate, SUM, numbers, shared, soon, sums, tensor, turn, values, with_group, works};

/// A rank is held before each step of an operation in turn, while the others, who may have finished it, go on and time out
/// in the next ones: what it then gets is right, and the group goes on.
fn held_at_every_step(what: &str, make: impl Fn(&Group) -> (Tensor, Vec<i32>, Result<()>) + Sync) {
    let steps = Arc::new(Mutex::new(Vec::new()));
    let seen = steps.clone();
    hooks::set(move |point| {
        if (point.place, point.number) == (2, 2) {
            seen.lock().unwrap().push(point.step);
        }
    });
    with_group(3, |group| {
        group.barrier().wait().unwrap();
        let (result, wanted, end) = make(group);
        end.unwrap();
        assert!(values(&result) == wanted);
    });
    let steps = steps.lock().unwrap().clone();
    println!("{what}: {} steps", steps.len());
    for step in steps {
        let gate = Gate::new(2);
        gate.hold_at(2, 2, step);
        let finished = AtomicUsize::new(0);
        with_group(3, |group| {
            let held = group.rank() == 2;
            group.barrier().wait().unwrap();
            let opener = (group.rank() == 0).then(|| {
                // Who needs the held rank waits for it; then it is let go soon.
                let gate = gate.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(150));
                    gate.open();
                    gate.open();
                })
            });
            let (result, wanted, end) = make(group);
            end.unwrap();
            finished.fetch_add(1, Ordering::SeqCst);
            // Either it is held by now, or there is no such step.
            while !held && !gate.is_held() && finished.load(Ordering::SeqCst) < 3 {
                std::thread::sleep(Duration::from_micros(200));
            }
            // Every line and both halves of the slots are used again.
            for (index, count) in [3, 3000, 3, 300_000, 3, 3000].into_iter().enumerate() {
                let mine = tensor(&vec![-7; count]);
                let deadline = if held { Deadline::after(LONG) } else { soon(15) };
                match group.all_reduce(&mine, SUM).deadline(deadline).wait() {
                    Ok(()) => assert!(values(&mine) == vec![-21; count], "operation {index}"),
                    Err(error) => assert!(error.is_timeout(), "operation {index}: {error}"),
                }
            }
            gate.open();
            assert!(values(&result) == wanted, "rank {} of {what}, held at step {step}", group.rank());
            works(group);
            if let Some(opener) = opener {
                opener.join().unwrap();
            }
        });
        assert!(gate.is_held());
    }
}

#[test]
fn held_in_broadcast() {
    let _turn = turn();
    for (count, path) in [(8, Path::Inline), (500, Path::OneShot), (90_000, Path::Staged)] {
        held_at_every_step("broadcast", |group| {
            let data = tensor(&numbers(group.rank(), count));
            let end = group.broadcast(&data, 0).via(path).wait();
            (data, numbers(0, count), end)
        });
    }
}

#[test]
fn held_in_gather() {
    let _turn = turn();
    for (count, path) in [(2, Path::Inline), (500, Path::OneShot), (90_000, Path::Staged)] {
        held_at_every_step("gather", |group| {
            let root = group.rank() == 2;
            let outputs: Vec<Tensor> =
                if root { (0..3).map(|_| tensor(&vec![0; count])).collect() } else { Vec::new() };
            let input = tensor(&numbers(group.rank(), count));
            let end = group.gather(&outputs, &input, 2).via(path).wait();
            if root {
                (outputs[1].clone(), numbers(1, count), end)
            } else {
                (input, numbers(group.rank(), count), end)
            }
        });
    }
}

#[test]
fn held_in_all_reduce() {
    let _turn = turn();
    for (count, path) in [(8, Path::Inline), (500, Path::OneShot), (150_000, Path::Staged)] {
        held_at_every_step("all_reduce", |group| {
            let data = tensor(&numbers(group.rank(), count));
            let end = group.all_reduce(&data, SUM).via(path).wait();
            (data, sums(3, count), end)
        });
    }
}

#[test]
fn held_in_a_direct_operation() {
    let _turn = turn();
    held_at_every_step("all_reduce", |group| {
        let data = shared(group, &numbers(group.rank(), 5000));
        let end = group.all_reduce(&data, SUM).via(Path::Direct).wait();
        (data, sums(3, 5000), end)
    });
    held_at_every_step("broadcast", |group| {
        let data = shared(group, &numbers(group.rank(), 5000));
        let end = group.broadcast(&data, 0).via(Path::Direct).wait();
        (data, numbers(0, 5000), end)
    });
}
