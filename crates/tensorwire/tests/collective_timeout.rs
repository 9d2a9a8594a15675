//! Ranks that come late: the others time out with an error that names who is where, the late one gets the same errors, and
//! the group goes on where it can.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod model;
mod ranks;
mod trouble;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ranks::{LONG, describe};
use tensorwire::{Deadline, Dtype, Group, Result, Tensor, Work};
use trouble::{Gate, SUM, list, numbers, soon, sums, tensor, turn, values, with_group, works};

#[test]
fn a_time_out_says_who_is_where() {
    let _turn = turn();
    let gate = Gate::new(2);
    gate.hold_at(2, 6, 1);
    let texts = with_group(3, |group| {
        (0..5).for_each(|_| group.barrier().wait().unwrap());
        let data = tensor(&numbers(group.rank(), 8));
        let text = if group.rank() == 2 {
            group.broadcast(&data, 0).wait().unwrap();
            group.all_reduce(&tensor(&numbers(2, 8)), SUM).deadline(soon(60_000)).wait().unwrap_err()
        } else {
            group.broadcast(&data, 0).wait().unwrap();
            gate.wait_until_held();
            let error =
                group.all_reduce(&tensor(&numbers(0, 8)), SUM).deadline(soon(100)).wait().unwrap_err();
            gate.open();
            error
        };
        assert_eq!(values(&data), numbers(0, 8));
        works(group);
        describe(&text)
    });
    for (rank, text) in texts.iter().enumerate() {
        println!("{text}");
        assert!(text.starts_with("TimedOut | timed out after "), "rank {rank}: {text}");
        assert!(text.contains("all_reduce #7"), "rank {rank}: {text}");
        let pid = std::process::id();
        assert!(
            text.contains("rank 2 (host ")
                && text.contains(&format!(", pid {pid}), which is still in broadcast #6")),
            "rank {rank}: {text}"
        );
    }
}

/// The same words as those of `status`: what the missing rank does instead, and whose time-out it was.
#[test]
fn a_time_out_says_what_the_missing_rank_waits_for() {
    let _turn = turn();
    let (receives, over) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let errors: [_; 2] = with_group(2, |group| {
        works(group);
        let data = tensor(&numbers(group.rank(), 8));
        if group.rank() == 1 {
            let work = group.recv(&data, 0).tag(3).start().unwrap();
            receives.store(1, Ordering::SeqCst);
            work.wait().unwrap();
            while over.load(Ordering::SeqCst) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            return [1, 2].map(|_| group.barrier().wait().unwrap_err());
        }
        while receives.load(Ordering::SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let given = group.barrier().deadline(soon(50)).wait().unwrap_err();
        group.send(&data, 1).tag(3).wait().unwrap();
        let of_group = group.barrier().deadline_of_group(soon(50)).wait().unwrap_err();
        over.store(1, Ordering::SeqCst);
        [given, of_group]
    })
    .try_into()
    .unwrap();
    for [given, of_group] in &errors {
        assert_eq!((given.ranks(), of_group.ranks()), (&[1][..], &[1][..]));
    }
    let texts = errors.map(|both| both.map(|error| error.to_string()));
    println!("{texts:#?}");
    let [first, second] = &texts[0];
    assert!(
        first.contains("it waited for rank 1 (host ")
            && first.contains(", which is still in recv #1 from rank 0")
    );
    assert!(first.ends_with("; the time-out was given with the call"), "{first}");
    assert!(second.contains(", which ") && second.contains("recv #1 from rank 0"), "{second}");
    assert!(second.ends_with("is that of the group (its timeout, or TENSORWIRE_TIMEOUT)"), "{second}");
    for (text, end) in texts[1].iter().zip(["given with the call", "(its timeout, or TENSORWIRE_TIMEOUT)"]) {
        assert!(
            text.contains("; rank 0 (host ")
                && text.contains(") was the first to give up, and the time-out ")
        );
        assert!(text.ends_with(end), "{text}");
    }
}

/// Who had finished keeps its result; the others and the late one get the error; then all goes on.
#[test]
fn who_had_finished_keeps_its_result() {
    let _turn = turn();
    let over = AtomicUsize::new(0);
    let ends = with_group(3, |group| {
        group.barrier().wait().unwrap();
        let rank = group.rank();
        let outputs: Vec<Tensor> = if rank == 0 { list(Dtype::I32, &[500; 3]) } else { Vec::new() };
        let input = tensor(&numbers(rank, 500));
        while rank == 2 && over.load(Ordering::SeqCst) < 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let end =
            group.gather(&outputs, &input, 0).deadline(soon(if rank == 0 { 100 } else { 30_000 })).wait();
        over.fetch_add(1, Ordering::SeqCst);
        works(group);
        ranks::outcome(&end)
    });
    assert!(ends[0].starts_with("TimedOut") && ends[0].contains("rank 2 (host "), "{}", ends[0]);
    assert_eq!(ends[1], "ok");
    assert!(ends[2].starts_with("TimedOut") && ends[2].contains("rank 0 (host "), "{}", ends[2]);
}

/// A rank that comes for the first time gets what others have finished without it, though they have given up more since.
#[test]
fn who_has_never_come() {
    let _turn = turn();
    let over = AtomicUsize::new(0);
    with_group(3, |group| {
        let rank = group.rank();
        while rank == 2 && over.load(Ordering::SeqCst) < 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let time = || if rank == 2 { Deadline::after(LONG) } else { soon(20) };
        assert!(group.barrier().deadline(time()).wait().unwrap_err().is_timeout());
        let data = tensor(&numbers(rank, 500));
        group.reduce(&data, SUM, 2).deadline(time()).wait().unwrap();
        // All that follows goes where the data of the reduce lies.
        let mut late = 0;
        for _ in 0..6 {
            let end = group.all_reduce(&tensor(&vec![-7; 500]), SUM).deadline(time()).wait();
            late += usize::from(end.is_err_and(|error| error.is_timeout()));
        }
        over.fetch_add(1, Ordering::SeqCst);
        assert_eq!(late, 6);
        assert!(values(&data) == if rank == 2 { sums(3, 500) } else { numbers(rank, 500) });
        works(group);
    });
}

/// Started operations time out, too, and those behind them run.
#[test]
fn started_operations_time_out() {
    let _turn = turn();
    let over = AtomicUsize::new(0);
    with_group(3, |group| {
        group.barrier().wait().unwrap();
        let rank = group.rank();
        if rank == 2 {
            while over.load(Ordering::SeqCst) < 2 {
                std::thread::sleep(Duration::from_millis(1));
            }
            for _ in 0..4 {
                let error = group.all_reduce(&tensor(&[1]), SUM).wait().unwrap_err();
                assert!(error.is_timeout(), "{error}");
            }
        } else {
            let works: Vec<Work> = (0..4)
                .map(|_| group.all_reduce(&tensor(&[1]), SUM).deadline(soon(60)).start().unwrap())
                .collect();
            for (index, work) in works.iter().enumerate() {
                let error = work.wait().unwrap_err();
                assert!(error.is_timeout(), "{error}");
                assert!(work.is_done() && work.error().is_some_and(|error| error.is_timeout()));
                if index == 0 {
                    assert!(error.to_string().contains("rank 2 (host "), "{error}");
                }
            }
            over.fetch_add(1, Ordering::SeqCst);
        }
        let data = tensor(&numbers(rank, 100));
        group.all_reduce(&data, SUM).start().unwrap().wait().unwrap();
        assert_eq!(values(&data), sums(3, 100));
        works(group);
    });
}

/// One rank sits out many operations in a row, comes, gets the same errors, and is with the others again.
fn far_behind(behind: usize) {
    let _turn = turn();
    let over = AtomicUsize::new(0);
    let kinds = |group: &Group, index: usize| -> Result<()> {
        let time = if group.rank() == 2 { soon(60_000) } else { soon(8) };
        let data = tensor(&numbers(group.rank(), [2, 700, 90_000][index % 3]));
        match index % 5 {
            0 => group.all_reduce(&data, SUM).deadline(time).wait(),
            1 => group.barrier().deadline(time).wait(),
            2 => {
                group.all_gather_into(&tensor(&vec![0; values(&data).len() * 3]), &data).deadline(time).wait()
            }
            3 => group.broadcast(&data, 2).deadline(time).wait(),
            _ => group.reduce(&data, SUM, index % 2).deadline(time).wait(),
        }
    };
    with_group(3, |group| {
        (0..3).for_each(|_| works(group));
        while group.rank() == 2 && over.load(Ordering::SeqCst) < 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        for index in 0..behind {
            match kinds(group, index) {
                Ok(()) if index % 5 == 4 => {}
                Ok(()) => panic!("rank {}: operation {index} of {behind} cannot have worked", group.rank()),
                Err(error) => assert!(
                    error.is_timeout(),
                    "rank {}: operation {index} of {behind}: {error}",
                    group.rank()
                ),
            }
        }
        over.fetch_add(1, Ordering::SeqCst);
        works(group);
    });
}

#[test]
fn one_rank_is_30_operations_behind() {
    (1..=6).chain([29, 30]).for_each(far_behind);
}

/// There is an end to it: what happened in so many operations could not be told to the late one. All hear of that.
#[test]
fn one_rank_is_too_far_behind() {
    let _turn = turn();
    let over = AtomicUsize::new(0);
    let errors = with_group(3, |group| {
        (0..3).for_each(|_| works(group));
        if group.rank() == 2 {
            while over.load(Ordering::SeqCst) < 2 {
                std::thread::sleep(Duration::from_millis(1));
            }
            return describe(&group.barrier().wait().unwrap_err());
        }
        let error = (0..100).find_map(|_| {
            let error = group.all_reduce(&tensor(&[1; 100]), SUM).deadline(soon(3)).wait().unwrap_err();
            (!error.is_timeout()).then_some(error)
        });
        over.fetch_add(1, Ordering::SeqCst);
        describe(&error.unwrap())
    });
    for text in errors {
        assert!(text.starts_with("Stuck 2 | rank 2 (host ") && text.contains("shrink()"), "{text}");
    }
}
