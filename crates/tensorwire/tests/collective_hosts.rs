//! Collectives of groups on several hosts. Hosts are labels here: ranks of different hosts share no memory and talk over
//! loopback.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod model;
mod ranks;

use std::sync::Arc;
use std::time::Duration;

use model::op::{Op, any_op};
use model::{Model, private};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use ranks::{LONG, Process, Rank, Ranks, await_parent, context_on, on_threads, outcome, say};
use tensorwire::collective::Path;
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Deadline, Dtype, Error, Group, PeerFaultKind, ReduceOp, Tensor};

/// A group of threads with a host for each rank.
fn on(hosts: &[usize], timeout: Duration) -> Vec<Group> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    on_threads(hosts.len(), |rank| {
        let builder = Group::builder().context(&context_on(&format!("host{}", hosts[rank]))).timeout(timeout);
        builder.from_store(store.clone(), rank, hosts.len()).unwrap()
    })
}

/// The paths of one host cannot be asked for.
fn any_path(op: &Op) -> Op {
    Op { via: None, ..op.clone() }
}

fn sequence(group: &Group, model: &Model, ops: &[Op]) -> Result<(), String> {
    let mut running = Vec::new();
    for op in ops.iter().map(any_path) {
        let now = op.begin(group, model)?;
        if op.start {
            running.push(now);
        } else {
            now.finish().map(drop)?;
        }
    }
    running.into_iter().try_for_each(|running| running.finish().map(drop))
}

/// Hosts of ranks: two or more.
fn placement() -> impl Strategy<Value = Vec<usize>> {
    vec(0..4usize, 2..7usize).prop_map(|mut hosts| {
        if hosts.iter().all(|host| *host == hosts[0]) {
            hosts[0] = 4;
        }
        hosts
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        max_shrink_iters: 30,
        ..ProptestConfig::with_cases(cases())
    })]

    #[test]
    fn any_operations(hosts in placement(), ops in vec(any_op(), 1..10)) {
        let groups = on(&hosts, LONG);
        let model = Model::default();
        let results = on_threads(hosts.len(), |rank| sequence(&groups[rank], &model, &ops));
        let wrong = |result: &&Result<(), String>| result.as_ref().is_err_and(|text| !text.contains("left"));
        if let Some(Err(text)) = results.iter().find(wrong) {
            return Err(TestCaseError::fail(format!("{hosts:?}: {text}")));
        }
        prop_assert!(results.iter().all(Result::is_ok), "{results:?}");
    }
}

fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(24)
}

/// The same as threads and as processes, on one host, each on its own, in pairs, and sealed. All draw the same numbers.
fn many(group: &Group) {
    let mut runner = TestRunner::deterministic();
    for _ in 0..12 {
        let ops = vec(any_op(), 1..4).new_tree(&mut runner).unwrap().current();
        sequence(group, &Model::default(), &ops).unwrap();
    }
}

on_hosts!(operations, 4, many);

/// Law 7: bits are a matter of the placement alone. Any part of a tensor has those that it has in the whole, in every kind.
#[test]
fn bits_depend_on_the_placement_alone() {
    for hosts in [&[0, 1][..], &[0, 0, 1, 1], &[0, 1, 0, 1], &[0, 1, 1, 1, 0], &[0, 1, 2]] {
        let groups = on(hosts, LONG);
        let world = hosts.len();
        let count = 60_000 / world * world;
        for dtype in [Dtype::F32, Dtype::F64, Dtype::Bf16, Dtype::F16, Dtype::F8E5M2] {
            let size = dtype.size();
            let all: Vec<Arc<Vec<u8>>> =
                (0..world).map(|rank| Arc::new(model::wild(dtype, count, rank as u64))).collect();
            for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::PremulSum(0.3)] {
                let wanted = model::reduce_on(groups[0].hosts(), dtype, op, &all);
                on_threads(world, |rank| {
                    let group = &groups[rank];
                    for (from, to) in [(0, count), (0, 1), (7, 10), (500, 9_001), (3, 40_004)] {
                        let tensor =
                            Tensor::flat(private(&all[rank][from * size..to * size]), dtype).unwrap();
                        group.all_reduce(&tensor, op).wait().unwrap();
                        let found = tensor.span().to_vec().unwrap();
                        assert!(
                            found == wanted[from * size..to * size],
                            "{op} of {dtype}, {hosts:?}: {from}..{to}"
                        );
                    }
                    let input = Tensor::flat(private(&all[rank]), dtype).unwrap();
                    let own = rank * (count / world) * size..(rank + 1) * (count / world) * size;
                    let output = Tensor::flat(private(&vec![0; own.len()]), dtype).unwrap();
                    group.reduce_scatter_from(&output, &input, op).wait().unwrap();
                    assert!(output.span().to_vec().unwrap() == wanted[own], "{op} of {dtype}, {hosts:?}");
                    group.reduce(&input, op, world - 1).wait().unwrap();
                    let result = if rank == world - 1 { &wanted } else { &*all[rank] };
                    assert!(input.span().to_vec().unwrap() == **result, "{op} of {dtype}, {hosts:?}");
                });
            }
        }
    }
}

/// An all_reduce of one number, which every rank has as 1: gives how it ended.
fn count_ranks(group: &Group, deadline: Option<Deadline>) -> Result<(), Error> {
    let tensor = Tensor::private(&[1_u32]).unwrap();
    let call = group.all_reduce(&tensor, ReduceOp::Sum);
    match deadline {
        Some(deadline) => call.deadline(deadline).wait()?,
        None => call.wait()?,
    }
    assert_eq!(tensor.to_vec::<u32>().unwrap(), [group.world() as u32]);
    Ok(())
}

const PLACEMENTS: [&[usize]; 4] = [&[0, 1], &[0, 0, 1, 1], &[0, 1, 0, 1, 1], &[0, 1, 2]];

/// A rank that does not come is named on all hosts, and the next operation works.
#[test]
fn who_does_not_come_is_named_everywhere() {
    for hosts in PLACEMENTS {
        let groups = on(hosts, LONG);
        for absent in 0..hosts.len() {
            let ends = on_threads(hosts.len(), |rank| {
                let soon = Deadline::after(Duration::from_millis(300));
                (rank != absent).then(|| count_ranks(&groups[rank], Some(soon)).unwrap_err())
            });
            for (rank, error) in ends.iter().enumerate() {
                let Some(error) = error else { continue };
                println!("{hosts:?}, {absent} is absent, rank {rank}: {error}");
                assert!(error.is_timeout(), "{error}");
                assert_eq!(error.ranks(), [absent], "{hosts:?}, rank {rank}: {error}");
            }
            // It hears of it when it comes. Then all go on.
            let late = count_ranks(&groups[absent], None).unwrap_err();
            println!("{hosts:?}, {absent} comes late: {late}");
            assert!(late.is_timeout(), "{late}");
            on_threads(hosts.len(), |rank| count_ranks(&groups[rank], None).unwrap());
        }
    }
}

/// Hosts that give up at once, each for another reason: all ranks get the same error, whichever rank does not come.
#[test]
fn one_reason_holds_for_all_hosts() {
    for hosts in [&[0, 0, 1, 1][..], &[0, 1, 0, 1, 1], &[0, 0, 1, 1, 2]] {
        let groups = on(hosts, LONG);
        let of = |host: usize| (0..hosts.len()).filter(move |rank| hosts[*rank] == host);
        for (one, two) in of(0).flat_map(|one| of(1).map(move |two| (one, two))) {
            let ends = on_threads(hosts.len(), |rank| {
                let soon = Deadline::after(Duration::from_millis(200));
                let absent = rank == one || rank == two;
                (!absent).then(|| count_ranks(&groups[rank], Some(soon)).unwrap_err())
            });
            let ends: Vec<&Error> = ends.iter().flatten().collect();
            ends.iter().for_each(|error| println!("{hosts:?}, {one} and {two} are absent: {error}"));
            assert!(
                ends.iter().all(|error| error.is_timeout() && error.ranks() == ends[0].ranks()),
                "{ends:?}"
            );
            assert_eq!(ends[0].ranks(), [one.min(two), one.max(two)], "{ends:?}");
            // Those who come late hear one of them, too.
            for late in [one, two] {
                assert!(count_ranks(&groups[late], None).unwrap_err().is_timeout());
            }
            on_threads(hosts.len(), |rank| count_ranks(&groups[rank], None).unwrap());
        }
    }
}

/// A rank that waits for one of its own host hears at once that another host has given up, though its own time is not over.
#[test]
fn a_host_that_is_not_complete_hears_others() {
    for (hosts, absent) in
        [(&[0, 0, 1, 1][..], 3), (&[0, 0, 1, 1], 2), (&[0, 0, 1, 1], 0), (&[0, 0, 1, 2, 2], 1)]
    {
        let groups = on(hosts, LONG);
        let ends = on_threads(hosts.len(), |rank| {
            let soon = Deadline::after(Duration::from_millis(200));
            let near = hosts[rank] == hosts[absent];
            (rank != absent).then(|| count_ranks(&groups[rank], (!near).then_some(soon)).unwrap_err())
        });
        let ends: Vec<&Error> = ends.iter().flatten().collect();
        for error in &ends {
            println!("{hosts:?}, {absent} is absent: {error}");
            assert!(error.is_timeout() && error.ranks() == [absent], "{ends:?}");
            assert!(error.to_string().contains("the time-out was given with the call"), "{error}");
        }
        assert!(count_ranks(&groups[absent], None).unwrap_err().is_timeout());
        on_threads(hosts.len(), |rank| count_ranks(&groups[rank], None).unwrap());
    }
}

/// Large tensors, with some bytes on their way when the operation is given up.
#[test]
fn bytes_of_a_cancelled_operation_are_dropped() {
    for hosts in PLACEMENTS {
        let groups = on(hosts, LONG);
        let world = hosts.len();
        for round in 0..4 {
            let over = std::sync::Barrier::new(world);
            on_threads(world, |rank| {
                let group = &groups[rank];
                let tensor = Tensor::private(&vec![rank as u32; 3 << 20]).unwrap();
                if rank != round % world {
                    let call = group.broadcast(&tensor, (round + 1) % world);
                    let soon = Deadline::after(Duration::from_millis(100));
                    assert!(call.deadline(soon).wait().unwrap_err().is_timeout());
                    // What it reads into may be written again at once.
                    tensor.write(&vec![7_u32; 3 << 20]).unwrap();
                    over.wait();
                } else {
                    over.wait();
                    assert!(group.broadcast(&tensor, (round + 1) % world).wait().unwrap_err().is_timeout());
                }
            });
            on_threads(world, |rank| {
                let group = &groups[rank];
                count_ranks(group, None).unwrap();
                let tensor = Tensor::private(&vec![rank as u32; 1 << 20]).unwrap();
                group.broadcast(&tensor, round % world).wait().unwrap();
                assert!(tensor.to_vec::<u32>().unwrap().iter().all(|&value| value as usize == round % world));
            });
        }
    }
}

/// Ranks that call different things are named on all hosts, whichever host they are on.
#[test]
fn mismatches_are_named_everywhere() {
    for hosts in [&[0, 1][..], &[0, 0, 1], &[0, 1, 0, 1, 1], &[0, 1, 2]] {
        for other in 0..hosts.len() {
            for what in 0..4 {
                let groups = on(hosts, LONG);
                let ends = on_threads(hosts.len(), |rank| {
                    let group = &groups[rank];
                    let tensor = Tensor::private(&[1.0_f32; 100]).unwrap();
                    let odd = rank == other;
                    let ended = match what {
                        0 if odd => group.barrier().wait(),
                        1 if odd => group.all_reduce(&tensor.part(0, 99).unwrap(), ReduceOp::Sum).wait(),
                        2 if odd => group.all_reduce(&tensor, ReduceOp::Max).wait(),
                        3 if odd => group.broadcast(&tensor, 1).wait(),
                        3 => group.broadcast(&tensor, 0).wait(),
                        _ => group.all_reduce(&tensor, ReduceOp::Sum).wait(),
                    };
                    ended.and_then(|()| group.barrier().wait()).unwrap_err()
                });
                for error in &ends {
                    println!("{hosts:?}, rank {other} has called {what}: {error}");
                    let Error::Peer(fault) = error else { panic!("{error}") };
                    assert_eq!(fault.kind, PeerFaultKind::Mismatch, "{error}");
                    // Whoever is alone is named, where all have come and his own host did not find it before.
                    assert!(
                        fault
                            .ranks
                            .iter()
                            .all(|&rank| hosts.len() == 2 || rank == other || hosts[rank] == hosts[other]),
                        "{error}"
                    );
                }
            }
        }
    }
}

/// What only one host can do is refused at once, and nothing else happens.
#[test]
fn what_needs_one_host_is_refused() {
    let groups = on(&[0, 0, 1], LONG);
    on_threads(3, |rank| {
        let group = &groups[rank];
        let refused = |ended: Result<(), Error>| {
            assert!(matches!(ended, Err(Error::Unsupported { .. })), "{ended:?}");
        };
        let tensor = Tensor::private(&[1.0_f32; 100]).unwrap();
        for path in [Path::Inline, Path::OneShot, Path::Staged, Path::Direct] {
            let call = group.all_reduce(&tensor.part(0, 2).unwrap(), ReduceOp::Sum);
            refused(call.via(path).wait());
        }
        let keys = Tensor::private(&[1_i64]).unwrap();
        let sparse = tensorwire::Sparse::new(keys, tensor.part(0, 1).unwrap(), &[9]).unwrap();
        refused(group.all_reduce_sparse(&sparse, ReduceOp::Sum).wait().map(drop));
        let file = std::fs::File::open("/dev/null").unwrap();
        refused(group.all_gather_fds(&file).wait().map(drop));
        refused(group.symmetric(&group.alloc(64).unwrap()).wait().map(drop));
        count_ranks(group, None).unwrap();
        let text = group.explain();
        assert!(
            text.contains("collectives go through one rank of each host, by TCP: ranks 0, 2\n"),
            "{text}"
        );
    });
}

/// Operations that are started run in their order; threads and groups do not disturb each other.
fn at_once(group: &Group) {
    let all: Vec<usize> = (0..group.world()).collect();
    let others = [group.subgroup(&all).unwrap(), group.subgroup(&all).unwrap()];
    std::thread::scope(|scope| {
        for group in others.iter().chain([group]) {
            scope.spawn(move || {
                let tensors: Vec<_> =
                    (0..20).map(|step| Tensor::private(&vec![1_u64; step * step * 90]).unwrap()).collect();
                let works: Vec<_> = tensors
                    .iter()
                    .map(|tensor| group.all_reduce(tensor, ReduceOp::Sum).start().unwrap())
                    .chain([group.barrier().start().unwrap()])
                    .collect();
                works.iter().for_each(|work| work.wait().unwrap());
                let world = group.world() as u64;
                for tensor in &tensors {
                    assert!(tensor.to_vec::<u64>().unwrap().iter().all(|&sum| sum == world));
                }
            });
        }
    });
}

on_hosts!(works, 4, at_once);

/// A rank that is killed in the middle of operations is named by all ranks of all hosts.
fn dies(rank: &Rank, victim: usize) {
    let group = rank.group();
    let tensor = Tensor::private(&vec![1.0_f32; 1 << 18]).unwrap();
    for step in 0.. {
        if step == 3 {
            say("under way");
        }
        if let Err(error) = group.all_reduce(&tensor, ReduceOp::Max).wait() {
            assert_ne!(rank.rank, victim);
            say(&outcome(&Err::<(), _>(error)));
            say(&outcome(&count_ranks(&group, None)));
            break;
        }
    }
    await_parent();
}

fn end_of(test: &str, labels: &[&str], victim: usize) {
    let Ranks { mut ranks, server: _server } = Ranks::start_with(test, labels.len(), |rank, mut command| {
        command.env("TENSORWIRE_HOST", labels[rank]).env("TENSORWIRE_HEARTBEAT", "30");
        command
    });
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "under way");
    }
    let mut dying = ranks.remove(victim);
    dying.kill();
    for rank in &mut ranks {
        for _ in 0..2 {
            let heard = rank.hear();
            println!("{test}, rank {}: {heard}", rank.rank);
            assert!(heard.starts_with(&format!("Died {victim} | ")), "{heard}");
        }
    }
    ranks.into_iter().for_each(Process::expect_success);
}

macro_rules! death {
    ($($name:ident: $labels:expr, $victim:expr;)*) => {$(
        #[test]
        fn $name() {
            match Rank::of_this_process() {
                Some(rank) => dies(&rank, $victim),
                None => end_of(stringify!($name), &$labels, $victim),
            }
        }
    )*};
}
death! {
    death_of_the_hub: ["a", "a", "b", "b"], 0;
    death_of_another_rank: ["a", "a", "b", "b"], 1;
    death_of_a_leader_elsewhere: ["a", "a", "b", "b"], 2;
    death_of_a_rank_elsewhere: ["a", "b", "a", "b"], 3;
    death_of_a_host: ["a", "b", "c"], 2;
}

/// A rank that closes the group is named on all hosts.
#[test]
fn who_leaves_is_named_everywhere() {
    for hosts in PLACEMENTS {
        for leaver in 0..hosts.len() {
            let groups: Vec<_> =
                on(hosts, LONG).into_iter().map(|group| std::sync::Mutex::new(Some(group))).collect();
            // The failure of a group may overtake an operation that others have finished.
            let out = std::sync::Barrier::new(hosts.len());
            let ends = on_threads(hosts.len(), |rank| {
                let group = groups[rank].lock().unwrap().take().unwrap();
                count_ranks(&group, None).unwrap();
                out.wait();
                if rank == leaver {
                    group.close().unwrap();
                    return None;
                }
                Some(count_ranks(&group, None).unwrap_err())
            });
            for error in ends.into_iter().flatten() {
                let Error::Peer(fault) = &error else { panic!("{error}") };
                assert_eq!(
                    (fault.kind, fault.rank),
                    (PeerFaultKind::Left, Some(leaver)),
                    "{hosts:?}: {error}"
                );
            }
        }
    }
}

/// A rank whose caller does not want to wait any more ends the operation on all hosts, and the next one works.
#[test]
fn an_interrupt_ends_the_operation_everywhere() {
    for hosts in PLACEMENTS {
        let world = hosts.len();
        let groups = on(hosts, LONG);
        for (by, absent) in (0..world).flat_map(|by| (0..world).map(move |absent| (by, absent))) {
            if by == absent {
                continue;
            }
            let ends = on_threads(world, |rank| {
                let wait = || count_ranks(&groups[rank], None);
                match rank {
                    _ if rank == by => {
                        let end = std::time::Instant::now() + Duration::from_millis(100);
                        let look = move || match std::time::Instant::now() >= end {
                            true => Err(Error::Interrupted("somebody pressed a key".into())),
                            false => Ok(()),
                        };
                        Some(tensorwire::interrupt::with_interrupt(std::rc::Rc::new(look), wait))
                    }
                    _ if rank == absent => None,
                    _ => Some(wait()),
                }
            });
            for (rank, ended) in ends.iter().enumerate() {
                match ended {
                    None => {}
                    Some(Err(Error::Interrupted(_))) if rank == by => {}
                    Some(Err(Error::Peer(fault))) if rank != by => {
                        assert_eq!(fault.kind, PeerFaultKind::Failed, "{fault:?}");
                        let text = fault.to_string();
                        assert!(text.contains("somebody pressed a key"), "{hosts:?}, rank {rank}: {text}");
                    }
                    other => {
                        panic!("{hosts:?}, {by} is interrupted, {absent} absent, rank {rank}: {other:?}")
                    }
                }
            }
            assert!(count_ranks(&groups[absent], None).is_err());
            on_threads(world, |rank| count_ranks(&groups[rank], None).unwrap());
        }
    }
}
