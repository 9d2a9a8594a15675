//! Ranks that are late or short of memory at each step of an all-reduce of sparse tensors. Its exchanges are numbered one by
//! one, so all ranks must leave it behind the same one: the next operation tells.

#![allow(clippy::unwrap_used)]

mod gpus;
mod model;
mod ranks;
mod trouble;

use ranks::as_processes;
use tensorwire::device::threads::{Settings, install};
use tensorwire::{Deadline, Error, Group, PeerFaultKind, ReduceOp, Sparse, Tensor};
use trouble::{late_at_every_step, turn};

const SUM: ReduceOp = ReduceOp::Sum;
const WORLD: usize = 3;

/// Keys that are on all ranks, on some, and on one.
fn sparse(rank: usize, count: usize) -> Sparse {
    let keys: Vec<i64> = (0..count as i64).map(|index| index * (rank as i64 + 1)).collect();
    let rows = Tensor::private(&vec![1i32; count]).unwrap();
    Sparse::new(Tensor::private(&keys).unwrap(), rows, &[(WORLD * count) as u64]).unwrap()
}

fn check(rank: usize, result: &Sparse, count: i64) {
    let has = |rank: i64, key: i64| key % (rank + 1) == 0 && key / (rank + 1) < count;
    let sums: Vec<i32> = (0..WORLD as i64 * count)
        .map(|key| (0..WORLD as i64).filter(|&rank| has(rank, key)).count() as i32)
        .filter(|&sum| sum > 0)
        .collect();
    assert_eq!(result.rows().to_vec::<i32>().unwrap(), sums, "rank {rank}");
}

/// Whoever gives up, and whoever finishes: all of them agree on what comes next.
#[test]
fn late() {
    let _turn = turn();
    for dense in [false, true] {
        let attempt = |group: &Group, deadline: Option<Deadline>| {
            let rank = group.rank();
            let call = group.all_reduce_sparse(&sparse(rank, 40), SUM).dense(dense);
            let result = deadline.into_iter().fold(call, |call, deadline| call.deadline(deadline)).wait()?;
            check(rank, &result, 40);
            Ok(result)
        };
        let steps = late_at_every_step(WORLD, &format!("dense {dense}"), attempt, |_| {});
        // The two operations before the last are passed by, too.
        assert!(steps > if dense { 10 } else { 25 }, "{steps}");
    }
}

/// The same of rows on a GPU.
#[test]
fn late_on_a_gpu() {
    let _turn = turn();
    // Whoever is first has installed it.
    let _ = install(Settings::default());
    for dense in [false, true] {
        let attempt = |group: &Group, deadline: Option<Deadline>| {
            let host = sparse(group.rank(), 40);
            let rows = gpus::tensor(group, &gpus::gpu(0), &[1i32; 40]);
            let tensor = Sparse::new(host.keys().clone(), rows, host.shape()).unwrap();
            let call = group.all_reduce_sparse(&tensor, SUM).dense(dense);
            let result = deadline.into_iter().fold(call, |call, deadline| call.deadline(deadline)).wait();
            assert_eq!(tensor.rows().to_vec::<i32>().unwrap(), [1; 40], "what was given stays as it is");
            let result =
                result.inspect_err(|error| assert!(!error.ranks().is_empty(), "it names nobody: {error}"))?;
            check(group.rank(), &result, 40);
            Ok(result)
        };
        let steps = late_at_every_step(WORLD, &format!("on a GPU, dense {dense}"), attempt, |_| {});
        assert!(steps > if dense { 10 } else { 25 }, "{steps}");
    }
}

/// Rank 1 cannot have memory for its part: all ranks hear that, and the group goes on when there is some.
fn short(group: &Group) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let count = 3_000_000;
    let rank = group.rank();
    let small = group.all_reduce_sparse(&sparse(rank, 40), SUM).wait().unwrap();
    check(rank, &small, 40);
    let limit = getrlimit(Resource::As);
    if rank == 1 {
        // Room for what is there, and not much more.
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
        let current = Some(pages * 4096 + (100 << 20));
        let large = sparse(rank, count);
        setrlimit(Resource::As, Rlimit { current, maximum: limit.maximum }).unwrap();
        let error = group.all_reduce_sparse(&large, SUM).dense(false).wait().unwrap_err();
        setrlimit(Resource::As, limit).unwrap();
        assert!(matches!(error, Error::Io { .. } | Error::Device { .. }), "{error:?}");
    } else {
        let error = group.all_reduce_sparse(&sparse(rank, count), SUM).dense(false).wait().unwrap_err();
        let Error::Peer(fault) = &error else { unreachable!("{error}") };
        assert_eq!((fault.kind, fault.rank), (PeerFaultKind::Failed, Some(1)), "{error}");
        assert!(error.to_string().contains("emory"), "{error}");
    }
    let small = group.all_reduce_sparse(&sparse(rank, 40), SUM).wait().unwrap();
    check(rank, &small, 40);
}

#[test]
fn memory_is_short_on_one_rank() {
    as_processes("memory_is_short_on_one_rank", WORLD, short);
}

/// A rank cannot take part in two operations, one after the other, before the others come. Each of them hears the right reason
/// of each.
fn reasons(group: &Group) {
    let of_key = |key: i64| {
        let (keys, rows) = (Tensor::private(&[key]).unwrap(), Tensor::private(&[1i32]).unwrap());
        group.all_reduce_sparse(&Sparse::new(keys, rows, &[10])?, SUM).wait().map(|_| ())
    };
    of_key(1).unwrap();
    if group.rank() != 1 {
        group.store().get("failed").unwrap();
    }
    for key in [-1, 10, -2] {
        let error = of_key(if group.rank() == 1 { key } else { 1 }).unwrap_err().to_string();
        assert!(error.contains(&format!("key {key} at 0")), "rank {}, {key}: {error}", group.rank());
        if key == 10 && group.rank() == 1 {
            group.store().set("failed", b"").unwrap();
        }
    }
    of_key(1).unwrap();
}

#[test]
fn reasons_are_not_mixed_up() {
    let _turn = turn();
    as_processes("reasons_are_not_mixed_up", WORLD, reasons);
}
