//! Ranks that do their large copies and reductions with several threads, whatever cores there are: the same results in
//! the same order, and the same errors.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod model;
mod ranks;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use model::op::{Op, any_op};
use model::{Model, private};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use ranks::{LONG, Process, Rank, Ranks, await_parent, context, describe, on_threads, say};
use rustix::process::{Signal, getpid, kill_process};
use tensorwire::collective::hooks;
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Deadline, Dtype, Group, ReduceOp, Tensor, Work};

const SUM: ReduceOp = ReduceOp::Sum;

/// Enough for several rounds of every path.
const LARGE: usize = 400_000;

fn words(values: u32, count: usize) -> Tensor {
    Tensor::flat(private(&values.to_le_bytes().repeat(count)), Dtype::U32).unwrap()
}

fn is_all(tensor: &Tensor, value: u32) -> bool {
    tensor.span().to_vec().unwrap() == value.to_le_bytes().repeat(tensor.len())
}

/// Threads as ranks, each with helpers.
fn on_a_group<T: Send>(world: usize, body: impl Fn(&Group) -> T + Sync) -> Vec<T> {
    // All tests of this file want the same.
    hooks::set_threads(Some(3));
    let store = Arc::new(MemoryStore::new()) as Arc<dyn Store>;
    on_threads(world, |rank| {
        let builder = Group::builder().context(&context()).timeout(LONG);
        body(&builder.from_store(store.clone(), rank, world).unwrap())
    })
}

/// Whether a thread of this process helps, or soon will.
fn has_helpers() -> bool {
    let begin = Instant::now();
    loop {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let mut names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        if names.any(|name| name.trim() == "tensorwire-help") {
            return true;
        }
        if begin.elapsed() > LONG {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Most of them large, most of them in flight together.
fn many() -> impl Strategy<Value = Vec<Op>> {
    let size =
        prop_oneof![1 => 0..2000usize, 3 => (64usize << 10)..(1 << 20), 1 => (1usize << 20)..(3 << 20)];
    let op = (any_op(), size, 0..4).prop_map(|(op, bytes, wait)| Op {
        bytes: if op.tensors > 8 { op.bytes } else { bytes / op.tensors },
        via: None,
        start: wait > 0,
        ..op
    });
    vec(op, 2..10)
}

/// Starts them one after the other; those that are only started are waited for at the end, the last one first.
fn sequence(group: &Group, model: &Model, ops: &[Op]) -> Result<(), String> {
    let mut running = Vec::new();
    for op in ops {
        let now = op.begin(group, model)?;
        if op.start {
            running.push(now);
        } else {
            now.finish().map(drop)?;
        }
    }
    running.into_iter().rev().try_for_each(|running| running.finish().map(drop))
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        max_shrink_iters: 20,
        ..ProptestConfig::with_cases(8)
    })]

    #[test]
    fn any_operations(world in 1..5usize, ops in many()) {
        let model = Model::default();
        let results = on_a_group(world, |group| sequence(group, &model, &ops));
        let wrong = results.iter().find(|result| result.as_ref().is_err_and(|text| !text.contains("left")));
        prop_assert!(results.iter().all(Result::is_ok), "{:?}", wrong.or(results.first()));
    }
}

#[test]
fn as_processes() {
    hooks::set_threads(Some(2));
    ranks::as_processes("as_processes", 3, |group| {
        let mut runner = TestRunner::deterministic();
        for _ in 0..6 {
            let ops = many().new_tree(&mut runner).unwrap().current();
            sequence(group, &Model::default(), &ops).unwrap();
        }
    });
}

/// Each needs the result of the one before.
#[test]
fn operations_on_the_same_memory_keep_their_order() {
    on_a_group(3, |group| {
        let tensor = words(group.rank() as u32 + 1, LARGE);
        let small = words(1, 10);
        let mut works: Vec<Work> = Vec::new();
        for _ in 0..6 {
            works.push(group.all_reduce(&tensor, SUM).start().unwrap());
            works.push(group.all_reduce(&small, SUM).start().unwrap());
        }
        works.last().unwrap().wait().unwrap();
        assert!(has_helpers());
        assert!(works.iter().all(Work::is_done), "{works:?}");
        assert!(works.iter().all(|work| work.error().is_none()), "{works:?}");
        assert!(is_all(&tensor, 6 * 3u32.pow(5)));
        assert!(is_all(&small, 3u32.pow(6)));
    });
}

#[test]
fn a_difference_is_found() {
    let errors = on_a_group(3, |group| {
        let count = if group.rank() == 1 { LARGE + 1 } else { LARGE };
        let works: Vec<Work> = [LARGE, count, LARGE]
            .iter()
            .map(|&count| group.all_reduce(&words(1, count), SUM).start().unwrap())
            .collect();
        works[0].wait().unwrap();
        works[2].wait().unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("rank 1 ("), "{error}");
        assert!(error.contains(&format!("{LARGE}")) && error.contains(&format!("{}", LARGE + 1)), "{error}");
    }
}

/// Who gives up has its memory for itself afterwards, and the group goes on.
#[test]
fn a_late_rank_ends_one_operation_only() {
    let gave_up = AtomicUsize::new(0);
    on_a_group(3, |group| {
        group.barrier().wait().unwrap();
        let tensor = words(1, LARGE);
        while group.rank() == 2 && gave_up.load(Ordering::SeqCst) < 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let time = if group.rank() == 2 { LONG } else { Duration::from_millis(100) };
        let end = group.all_reduce(&tensor, SUM).deadline(Deadline::after(time)).wait();
        gave_up.fetch_add(1, Ordering::SeqCst);
        let mark = words(7, LARGE).span().to_vec().unwrap();
        tensor.span().write(0, &mark).unwrap();
        let again = words(1, LARGE);
        group.all_reduce(&again, SUM).wait().unwrap();
        assert!(is_all(&again, 3));
        assert!(tensor.span().to_vec().unwrap() == mark);
        assert!(end.unwrap_err().is_timeout());
    });
}

/// With several large operations in flight, in the middle of one of them.
#[test]
fn a_rank_that_dies() {
    if let Some(rank) = Rank::of_this_process() {
        hooks::set_threads(Some(2));
        let group = rank.group();
        group.barrier().wait().unwrap();
        let point: usize = std::env::var("POINT").unwrap().parse().unwrap();
        if rank.rank == 1 {
            hooks::set(move |at| {
                if at.number >= 3 && at.step == point {
                    kill_process(getpid(), Signal::KILL).unwrap();
                    std::thread::sleep(LONG);
                }
            });
        }
        let tensors: Vec<Tensor> = (0..5).map(|_| words(1, LARGE)).collect();
        let works: Vec<Work> =
            tensors.iter().map(|tensor| group.all_reduce(tensor, SUM).start().unwrap()).collect();
        works[0].wait().unwrap();
        let error = works[4].wait().unwrap_err();
        // From here on nobody but this thread writes there.
        tensors.iter().for_each(|tensor| tensor.span().write(0, &[9; 4096]).unwrap());
        say(&describe(&error));
        await_parent();
        assert!(tensors.iter().all(|tensor| tensor.span().to_vec().unwrap()[..4096] == [9; 4096]));
        return;
    }
    for point in [0, 2, 5, 9] {
        let Ranks { mut ranks, server: _server } =
            Ranks::start_with("a_rank_that_dies", 3, |_, mut command| {
                command.env("POINT", point.to_string());
                command
            });
        for rank in [0, 2] {
            let text = ranks[rank].hear();
            assert!(text.starts_with("Died 1 | "), "killed at {point}: {text}");
        }
        assert!(!ranks.remove(1).finish().success());
        ranks.into_iter().for_each(Process::expect_success);
    }
}
