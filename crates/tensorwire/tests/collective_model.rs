//! Random operations against a plain model: any operation, type, size, layout, memory and path, many in a row.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod model;
mod ranks;

use std::sync::Arc;

use model::op::{Op, any_op};
use model::{Model, private};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use ranks::{LONG, context, on_threads};
use tensorwire::collective::{Call, Path};
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Dtype, Error, Group, ReduceOp, Tensor};

/// Runs operations one after the other on one rank; those that are only started are waited for at the end.
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
    running.into_iter().try_for_each(|running| running.finish().map(drop))
}

/// Runs operations on threads that are the ranks of a group.
fn on_a_group(world: usize, ops: &[Op]) -> Result<(), String> {
    let (model, store) = (Model::default(), Arc::new(MemoryStore::new()) as Arc<dyn Store>);
    let results = on_threads(world, |rank| {
        let builder = Group::builder().context(&context()).timeout(LONG);
        let group = builder.from_store(store.clone(), rank, world).unwrap();
        sequence(&group, &model, ops)
    });
    // The first error is the one that matters: the others have only heard of it.
    let wrong = |result: &&Result<(), String>| result.as_ref().is_err_and(|text| !text.contains("left"));
    match results.iter().find(wrong).or_else(|| results.iter().find(|result| result.is_err())) {
        Some(Err(text)) => Err(text.clone()),
        _ => Ok(()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        max_shrink_iters: 60,
        ..ProptestConfig::with_cases(cases())
    })]

    #[test]
    fn any_operations(world in 1..10usize, ops in vec(any_op(), 1..12)) {
        on_a_group(world, &ops).map_err(TestCaseError::fail)?;
    }
}

/// The same as processes. All draw the same numbers.
fn as_processes(group: &Group) {
    let mut runner = TestRunner::deterministic();
    for _ in 0..40 {
        let ops = vec(any_op(), 1..4).new_tree(&mut runner).unwrap().current();
        sequence(group, &Model::default(), &ops).unwrap();
    }
}

#[test]
fn processes_4() {
    ranks::as_processes("processes_4", 4, as_processes);
}

#[test]
fn processes_9() {
    ranks::as_processes("processes_9", 9, as_processes);
}

/// As many as the variable of proptest says, or few enough for a busy machine.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(40)
}

/// Several threads of each rank in one group, and several groups at once.
fn at_once(group: &Group) {
    let (rank, world) = (group.rank(), group.world());
    let all: Vec<usize> = (0..world).collect();
    let backwards: Vec<usize> = (0..world).rev().collect();
    let groups =
        [group.subgroup(&all).unwrap(), group.subgroup(&backwards).unwrap(), group.subgroup(&all).unwrap()];
    std::thread::scope(|scope| {
        for (index, group) in groups.iter().enumerate() {
            scope.spawn(move || {
                let mut runner = TestRunner::deterministic();
                for round in 0..12 {
                    let ops = vec(any_op(), 1..4).new_tree(&mut runner).unwrap().current();
                    let other = |op: Op| Op { seed: op.seed ^ (index * 100 + round) as u64, ..op };
                    let ops: Vec<Op> = ops.into_iter().map(other).collect();
                    sequence(group, &Model::default(), &ops).unwrap();
                }
            });
        }
        // Nobody knows which thread's call meets which on another rank; so all of them do the same.
        for thread in 0..3 {
            scope.spawn(move || {
                for step in 0..60 {
                    let tensor =
                        Tensor::flat(private(&(rank as u32 + 1).to_le_bytes().repeat(700)), Dtype::U32)
                            .unwrap();
                    let call = group.all_reduce(&tensor, ReduceOp::Sum);
                    if (step + thread) % 3 == 0 { call.start().unwrap().wait() } else { call.wait() }
                        .unwrap();
                    let sum = (world * (world + 1) / 2) as u32;
                    assert!(tensor.span().to_vec().unwrap() == sum.to_le_bytes().repeat(700));
                }
            });
        }
    });
}

on_ranks!(threads_and_groups, 3, at_once);

/// Law 7: the same bits on every rank, whatever the path, the size and the cut, for values of very different magnitude.
fn same_bits(group: &Group) {
    let (me, world) = (group.rank(), group.world());
    let count = 150_001;
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64, Dtype::F8E5M2] {
        let size = dtype.size();
        let all: Vec<Arc<Vec<u8>>> =
            (0..world).map(|rank| Arc::new(model::wild(dtype, count, rank as u64))).collect();
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::PremulSum(0.3)] {
            let wanted = model::reduce(dtype, op, &all);
            // Rank order matters for these values; else this test would show nothing.
            let backwards: Vec<_> = all.iter().rev().cloned().collect();
            assert!(
                world < 3
                    || op != ReduceOp::Sum
                    || dtype.size() < 2
                    || wanted != model::reduce(dtype, op, &backwards)
            );
            let run = |from: usize, to: usize, shared: bool, path: Option<Path>| {
                let (from, to) = (from * size, to * size);
                let span = if shared { group.alloc(to - from).unwrap() } else { private(&wanted[from..to]) };
                span.write(0, &all[me][from..to]).unwrap();
                let tensor = Tensor::flat(span, dtype).unwrap();
                let call = group.all_reduce(&tensor, op);
                match path {
                    Some(path) => call.via(path).wait().unwrap(),
                    None => call.wait().unwrap(),
                }
                let bytes = tensor.span().to_vec().unwrap();
                assert!(bytes == wanted[from..to], "{op} of {dtype}, elements {from}..{to} through {path:?}");
            };
            run(0, count, false, None);
            run(0, count, false, Some(Path::Staged));
            run(0, count, true, None);
            run(0, count, true, Some(Path::Direct));
            run(0, count.min((1 << 20) / size), false, Some(Path::OneShot));
            // Cuts at odd places.
            let mut dice = model::Dice::new(5);
            let paths = [Path::OneShot, Path::Staged, Path::Direct];
            for len in [1, 3, 32 / size, 33, 500, 4096 + 1, 20_000] {
                for path in paths.into_iter().chain((len * size <= 32).then_some(Path::Inline)) {
                    let start = dice.below(count - len);
                    run(start, start + len, path == Path::Direct, Some(path));
                    run(start, start + len, false, None);
                }
            }
            // As parts of other operations.
            let part = count / world;
            let input = Tensor::flat(private(&all[me][..part * world * size]), dtype).unwrap();
            let output = Tensor::flat(private(&vec![0; part * size]), dtype).unwrap();
            group.reduce_scatter_from(&output, &input, op).wait().unwrap();
            assert!(output.span().to_vec().unwrap() == wanted[me * part * size..(me + 1) * part * size]);
            group.reduce(&input, op, world - 1).wait().unwrap();
            let result = if me == world - 1 { &wanted } else { &*all[me] };
            assert!(input.span().to_vec().unwrap() == result[..part * world * size]);
        }
    }
}

on_ranks!(law_7, 3, same_bits);

/// What has no meaning is refused before anything moves, on the rank that asks for it, and nothing else happens.
fn misuse(group: &Group) {
    let (me, world) = (group.rank(), group.world());
    let memory = private(&[7; 4096]);
    let floats =
        |from: usize, to: usize| Tensor::flat(memory.slice(from * 4..to * 4).unwrap(), Dtype::F32).unwrap();
    let ints = Tensor::flat(memory.slice(2048..2064).unwrap(), Dtype::I32).unwrap();
    let strided = |shape: &[usize], strides: &[isize]| {
        Tensor::strided(memory.clone(), Dtype::F32, shape, strides).unwrap()
    };
    let each = |from: usize, count: usize| {
        (0..world).map(|rank| floats(from + rank * count, from + (rank + 1) * count)).collect::<Vec<_>>()
    };
    let (a, b) = (floats(0, 10), floats(10, 20));
    let list = each(100, 10);
    let sum = ReduceOp::Sum;
    let only_me = |list: &[Tensor]| if me == 0 { list.to_vec() } else { Vec::new() };
    let mut calls: Vec<(&str, Call<'_>)> = vec![
        ("root", group.broadcast(&a, world)),
        ("root", group.reduce(&a, sum, usize::MAX)),
        ("root", group.gather(&[], &a, world)),
        ("root", group.scatter(&a, &[], world + 1)),
        ("op", group.all_reduce(&a, ReduceOp::Band)),
        ("op", group.reduce(&ints, ReduceOp::Avg, 0)),
        (
            "op",
            group.reduce_scatter_from(
                &Tensor::flat(memory.slice(0..8).unwrap(), Dtype::Complex64).unwrap(),
                &Tensor::flat(memory.slice(1024..1024 + 8 * world).unwrap(), Dtype::Complex64).unwrap(),
                ReduceOp::Max,
            ),
        ),
        ("types", group.all_reduce_coalesced(&[a.clone(), ints.clone()], sum)),
        ("types", group.all_gather(&list, &Tensor::flat(memory.slice(0..40).unwrap(), Dtype::I32).unwrap())),
        ("types", group.all_gather_into(&floats(100, 100 + 4 * world), &ints)),
        ("types", group.reduce_scatter(&ints, &each(100, 4), sum)),
        ("types", group.all_to_all(&list, &vec![ints.clone(); world])),
        ("no tensors", group.all_reduce_multi(&[], sum)),
        ("sizes", group.all_reduce_multi(&[a.clone(), floats(10, 19)], sum)),
        ("list", group.all_gather(&list[1..], &a)),
        ("list", group.all_gather(&[list.clone(), list.clone()].concat(), &a)),
        ("list", group.reduce_scatter(&a, &list[1..], sum)),
        ("list", group.all_to_all(&list[1..], &list)),
        ("list", group.all_to_all(&list, &[])),
        ("list", group.all_gather_coalesced(&[floats(100, 100 + 10 * world)], &[a.clone(), b.clone()])),
        ("sizes", group.all_gather(&list, &floats(0, 9))),
        ("sizes", group.all_gather_into(&floats(100, 101 + 10 * world), &a)),
        ("sizes", group.all_gather_into(&floats(100, 100 + 9 * world), &a)),
        ("sizes", group.reduce_scatter(&floats(0, 11), &list, sum)),
        ("sizes", group.reduce_scatter_from(&floats(0, 11), &floats(100, 100 + 10 * world), sum)),
        ("sizes", group.all_to_all_into(&floats(0, world), &floats(100, 100 + 2 * world))),
        ("stride 0", group.all_reduce(&strided(&[3, 4], &[0, 1]), sum)),
        ("stride 0", group.broadcast(&strided(&[3, 4], &[1, 1]), (me + 1) % world)),
        ("stride 0", group.all_gather(&vec![strided(&[5, 2], &[0, 1]); world], &a)),
        ("stride 0", group.scatter(&strided(&[10], &[0]), &only_me(&list), 0)),
        ("overlap", group.all_to_all_into(&floats(0, 2 * world), &floats(1, 1 + 2 * world))),
        ("overlap", group.all_to_all_into(&floats(0, 2 * world), &floats(0, 2 * world))),
        ("overlap", group.reduce_scatter_from(&floats(1, 3), &floats(0, 2 * world), sum)),
        ("overlap", group.all_gather_into(&floats(0, 2 * world), &floats(2 * me + 1, 2 * me + 3))),
        ("overlap", group.all_reduce_coalesced(&[a.clone(), floats(5, 15)], sum)),
        ("overlap", group.all_reduce_coalesced(&[a.clone(), a.clone()], sum)),
        ("overlap", group.all_reduce_multi(&[a.clone(), a.clone()], sum)),
        ("overlap", group.all_reduce_multi(&[a.clone(), floats(9, 19)], sum)),
        ("overlap of outputs", group.broadcast_coalesced(&[a.clone(), floats(9, 19)], (me + 1) % world)),
        ("overlap of outputs", group.all_gather(&vec![a.clone(); world], &floats(200, 210))),
        ("overlap of outputs", group.all_to_all(&vec![a.clone(); world], &each(200, 10))),
        (
            "overlap of outputs",
            group.all_gather_coalesced(
                &[floats(0, 2 * world), floats(1, 1 + 2 * world)],
                &[floats(300, 302), floats(302, 304)],
            ),
        ),
        (
            "overlap of outputs",
            group.reduce_scatter_coalesced(
                &[floats(0, 2), floats(1, 3)],
                &[floats(300, 300 + 2 * world), floats(400, 400 + 2 * world)],
                sum,
            ),
        ),
        ("overlap of outputs", group.all_gather(&vec![strided(&[10], &[2]); world], &floats(200, 210))),
        ("path", group.all_reduce(&a, sum).via(Path::Inline)),
        (
            "path",
            group.all_to_all_into(&floats(0, 9 * world), &floats(300, 300 + 9 * world)).via(Path::Inline),
        ),
    ];
    if me == 0 {
        calls.push(("types", group.scatter(&ints, &each(100, 4), 0)));
        calls.push(("list at the root", group.gather(&list[1..], &a, 0)));
        calls.push(("list at the root", group.scatter(&a, &list[1..], 0)));
        calls.push(("sizes at the root", group.gather(&each(100, 11), &a, 0)));
        calls.push(("overlap of outputs", group.gather(&vec![b.clone(); world], &a, 0)));
    } else {
        calls.push(("list elsewhere", group.gather(&list, &a, 0)));
        calls.push(("list elsewhere", group.scatter(&a, &list, 0)));
    }
    let mut wrong = Vec::new();
    for (index, (what, call)) in calls.into_iter().enumerate() {
        let text = format!("{index} ({what}): {call:?}");
        // In a world of one, some of these are whole or apart.
        let result = if index % 2 == 0 { call.wait() } else { call.start().map(|_| ()) };
        match result {
            Err(Error::Misuse(message)) => assert!(message.len() > 10, "{text}: {message}"),
            other => wrong.push(format!("{text}: {other:?}")),
        }
    }
    assert!(wrong.is_empty(), "not refused: {wrong:#?}");
    assert!(memory.to_vec().unwrap() == [7; 4096]);
    // Nothing was counted as an operation on any rank: the next one fits.
    let tensor = Tensor::flat(private(&[1, 0, 0, 0]), Dtype::I32).unwrap();
    group.all_reduce(&tensor, sum).wait().unwrap();
    assert_eq!(tensor.span().to_vec().unwrap()[0] as usize, world);
    // One rank's mistake is its own.
    if me == world - 1 {
        assert!(matches!(group.broadcast(&a, 99).wait(), Err(Error::Misuse(_))));
    }
    group.barrier().wait().unwrap();
}

on_ranks!(misuse_is_refused, 3, misuse);
