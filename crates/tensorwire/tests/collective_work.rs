//! Works: callbacks, patience, handles that go early, and who runs first.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod model;
mod ranks;
mod trouble;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ranks::{LONG, describe};
use tensorwire::collective::hooks;
use tensorwire::{Deadline, Work};
use trouble::{Gate, SUM, numbers, soon, sums, tensor, turn, values, with_group, works};

/// What callbacks have said, when so many have: they come a moment after those who wait are told.
fn called_in_order<T: Clone>(order: &Mutex<Vec<T>>, count: usize) -> Vec<T> {
    let end = Instant::now() + LONG;
    while order.lock().unwrap().len() < count && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    order.lock().unwrap().clone()
}

#[test]
fn callbacks_and_patience() {
    let _turn = turn();
    let gate = Gate::new(1);
    gate.hold_at(1, 1, 0);
    with_group(2, |group| {
        let order = Arc::new(Mutex::new(Vec::new()));
        if group.rank() == 1 {
            let data = tensor(&numbers(1, 10));
            group.all_reduce(&data, SUM).wait().unwrap();
            group.barrier().wait().unwrap();
            return;
        }
        let data = tensor(&numbers(0, 10));
        let work = group.all_reduce(&data, SUM).start().unwrap();
        for index in 0..3 {
            let order = order.clone();
            work.on_done(move |result| order.lock().unwrap().push((index, result.is_ok())));
        }
        gate.wait_until_held();
        // Patience ends; the operation does not.
        let since = Instant::now();
        let error = work.wait_by(soon(30)).unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("all_reduce"), "{error}");
        assert!(since.elapsed() >= Duration::from_millis(30));
        assert!(!work.is_done() && work.error().is_none() && order.lock().unwrap().is_empty());
        let clone = work.clone();
        gate.open();
        clone.wait().unwrap();
        assert_eq!(values(&data), sums(2, 10));
        assert!(work.is_done() && work.error().is_none());
        work.wait_by(soon(0)).unwrap();
        group.barrier().wait().unwrap();
        assert_eq!(called_in_order(&order, 3), [(0, true), (1, true), (2, true)]);
        // After the end, a callback is called at once, here.
        let called = Arc::new(AtomicBool::new(false));
        let seen = called.clone();
        work.on_done(move |_| seen.store(true, Ordering::SeqCst));
        assert!(called.load(Ordering::SeqCst));
    });
}

/// A callback that panics is the caller's mistake, and harms nobody else's work.
#[test]
fn a_callback_that_panics() {
    let _turn = turn();
    with_group(2, |group| {
        let first = group.all_reduce(&tensor(&[1]), SUM).start().unwrap();
        first.on_done(|_| panic!("a test wants this panic"));
        let works: Vec<Work> =
            (0..5).map(|_| group.all_reduce(&tensor(&[1]), SUM).start().unwrap()).collect();
        for work in works {
            work.wait_by(Deadline::after(LONG)).unwrap();
        }
        group.barrier().deadline(Deadline::after(LONG)).wait().unwrap();
    });
}

/// All handles may go while operations are in flight: those are finished, and then the group is closed.
#[test]
fn handles_that_are_dropped() {
    let _turn = turn();
    let done = Arc::new(AtomicUsize::new(0));
    let tensors = Mutex::new(Vec::new());
    with_group(3, |group| {
        for step in 0..20 {
            let data = tensor(&numbers(group.rank(), 1000 * (step % 3) + 1));
            let work = group.all_reduce(&data, SUM).start().unwrap();
            let done = done.clone();
            work.on_done(move |result| {
                if result.is_ok() {
                    done.fetch_add(1, Ordering::SeqCst);
                }
            });
            tensors.lock().unwrap().push(data);
        }
    });
    let end = Instant::now() + LONG;
    while done.load(Ordering::SeqCst) < 60 {
        assert!(Instant::now() < end, "only {} of 60 ended well", done.load(Ordering::SeqCst));
        std::thread::sleep(Duration::from_millis(2));
    }
    for data in tensors.lock().unwrap().iter() {
        assert!(values(data) == sums(3, data.len()));
    }
}

/// What is started first runs first, whichever thread waits for it; a call that is waited for comes behind.
#[test]
fn first_come_first_served() {
    let _turn = turn();
    let orders = with_group(2, |group| {
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut works = Vec::new();
        for index in 0..30 {
            let data = tensor(&[index; 50]);
            let work = group.broadcast(&data, index as usize % 2).start().unwrap();
            let order = order.clone();
            work.on_done(move |_| order.lock().unwrap().push(index));
            works.push((work, data, index));
        }
        let last = tensor(&[1]);
        group.all_reduce(&last, SUM).wait().unwrap();
        assert_eq!(values(&last), [2]);
        std::thread::scope(|scope| {
            for (work, data, index) in works.into_iter().rev() {
                scope.spawn(move || {
                    work.wait().unwrap();
                    assert_eq!(values(&data), [index; 50]);
                });
            }
        });
        group.barrier().wait().unwrap();
        called_in_order(&order, 30)
    });
    for order in orders {
        assert_eq!(order, (0..30).collect::<Vec<_>>());
    }
}

/// A call with little time behind one with much does not wait longer than its own time, and never touches memory.
#[test]
fn a_short_deadline_behind_a_long_one() {
    let _turn = turn();
    let gate = Gate::new(1);
    gate.hold_at(1, 1, 0);
    with_group(2, |group| {
        let (first, second) = (tensor(&numbers(group.rank(), 10)), tensor(&numbers(group.rank(), 10)));
        if group.rank() == 0 {
            let work = group.all_reduce(&first, SUM).start().unwrap();
            gate.wait_until_held();
            let error = group.broadcast(&second, 1).deadline(soon(50)).wait().unwrap_err();
            assert!(error.is_timeout(), "{error}");
            assert!(!work.is_done(), "it should not have waited for the first");
            gate.open();
            work.wait().unwrap();
        } else {
            group.all_reduce(&first, SUM).wait().unwrap();
            // It has its own time, but the other side gave up. One that could finish alone may have done so.
            match group.broadcast(&second, 1).wait() {
                Ok(()) => {}
                Err(error) => assert!(error.is_timeout(), "{error}"),
            }
        }
        assert_eq!(values(&first), sums(2, 10));
        works(group);
        assert_eq!(values(&second), numbers(group.rank(), 10));
    });
}

/// A panic inside an operation is our fault, and nobody waits for ever because of it: it ends as an error, so do the works
/// behind it and those that come later, and the other ranks hear why the group has failed.
#[test]
fn a_panic_ends_the_group_and_hangs_nobody() {
    let _turn = turn();
    hooks::set(|point| {
        if (point.place, point.number, point.step) == (1, 2, 1) {
            panic!("as a test wants it");
        }
    });
    let ends = with_group(2, |group| {
        group.barrier().wait().unwrap();
        let works: Vec<Work> =
            (0..4).map(|_| group.all_reduce(&tensor(&[1; 50]), SUM).start().unwrap()).collect();
        let mut ends: Vec<String> = works.iter().map(|work| describe(&work.wait().unwrap_err())).collect();
        ends.push(describe(
            &group.all_reduce(&tensor(&[1]), SUM).start().and_then(|work| work.wait()).unwrap_err(),
        ));
        ends.push(describe(&group.barrier().wait().unwrap_err()));
        ends
    });
    assert!(ends[1][0].contains("all_reduce panicked: as a test wants it"), "{ends:?}");
    assert!(ends[1][0].contains("a fault of tensorwire"), "{ends:?}");
    for end in ends.iter().flatten() {
        assert!(end.contains("as a test wants it"), "{ends:?}");
    }
}
