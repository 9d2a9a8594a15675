//! Ranks that are late or short of memory at each step of an all-reduce of sparse tensors. Its exchanges are numbered one by
//! one, so all ranks must leave it behind the same one: the next operation tells.

#![allow(clippy::unwrap_used)]

mod ranks;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ranks::{LONG, as_processes, context, on_threads};
use tensorwire::collective::hooks;
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Deadline, Error, Group, PeerFaultKind, ReduceOp, Sparse, Tensor};

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

/// One rank sleeps at one point for longer than the deadline of some ranks: whoever gives up, and whoever finishes, all of
/// them agree on what comes next.
#[test]
fn late_at_every_step() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    for dense in [false, true] {
        let passed = Arc::new(AtomicUsize::new(0));
        let mut step = 0;
        loop {
            let (count, wanted) = (passed.clone(), step);
            count.store(0, Ordering::SeqCst);
            let victim = step % WORLD;
            let (gone, awaited) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(usize::MAX)));
            let (leaving, waiting) = (gone.clone(), awaited.clone());
            hooks::set(move |point| {
                if point.place == victim && count.fetch_add(1, Ordering::SeqCst) == wanted {
                    // Until somebody has given up, which is soon; nobody does where this rank is not needed any more.
                    let start = Instant::now();
                    waiting.store(leaving.load(Ordering::SeqCst), Ordering::SeqCst);
                    while leaving.load(Ordering::SeqCst) == 0 && start.elapsed() < Duration::from_millis(120)
                    {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            });
            let name = format!("{dense} {step}");
            let ends = on_threads(WORLD, |rank| {
                let builder = Group::builder().context(&context()).timeout(LONG).name(&name);
                let group = builder.from_store(store.clone(), rank, WORLD).unwrap();
                let call = group.all_reduce_sparse(&sparse(rank, 40), SUM).dense(dense);
                // One of the others is in a hurry.
                let hurry = rank == (victim + 1) % WORLD;
                let call = match hurry {
                    true => call.deadline(Deadline::after(Duration::from_millis(60))),
                    false => call,
                };
                let end = call.wait();
                gone.fetch_add(1, Ordering::SeqCst);
                match &end {
                    Ok(result) => check(rank, result, 40),
                    Err(error) => {
                        // It is a time-out for every rank, also for one that had finished what timed out.
                        assert!(error.is_timeout(), "{name}, rank {rank}: {error}");
                    }
                }
                // The same operation goes well now, and others do.
                let result = group.all_reduce_sparse(&sparse(rank, 40), SUM).dense(dense).wait();
                check(rank, &result.unwrap_or_else(|error| unreachable!("{name}, rank {rank}: {error}")), 40);
                let ones = Tensor::private(&[1i64]).unwrap();
                group.all_reduce(&ones, SUM).wait().unwrap();
                assert_eq!(ones.to_vec::<i64>().unwrap(), [WORLD as i64], "{name}");
                group.close().unwrap();
                end.is_ok()
            });
            hooks::clear();
            // Behind the last point nobody slept, and all went well.
            if awaited.load(Ordering::SeqCst) == usize::MAX {
                assert_eq!(ends, [true; WORLD], "{name}");
                break;
            }
            step += 1;
        }
        // The two operations before the last are passed by, too.
        assert!(step > if dense { 10 } else { 25 }, "{step}");
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
