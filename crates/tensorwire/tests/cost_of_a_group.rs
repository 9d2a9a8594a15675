//! What a group costs: resident memory of each rank, and the time to form it. Memory is judged, time is only printed.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod ranks;

use std::time::{Duration, Instant};

use ranks::{LONG, Rank, Ranks, await_parent, say};
use tensorwire::device::host;
use tensorwire::{Context, Dtype, Group, ReduceOp, Span, Tensor};

const WORLD: usize = 8;
/// Bytes of each rank in a large operation: more than its staging memory.
const PART: usize = 4 << 20;
/// What an idle group may cost each rank, also after an operation.
const MOST_KIB: i64 = 10 << 10;

/// Resident memory of this process, in KiB.
fn resident() -> i64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// How long the threads of this process have run.
fn on_cores() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let nanos = tasks.filter_map(|task| {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(nanos.sum())
}

#[test]
fn a_group_is_small_and_soon_there() {
    if let Some(rank) = Rank::of_this_process() {
        return measure(&rank);
    }
    let ranks = Ranks::start("a_group_is_small_and_soon_there", WORLD);
    let mut ranks = ranks.ranks;
    for rank in &mut ranks {
        let text = rank.hear();
        println!("rank {}: {text}", rank.rank);
        rank.let_go();
    }
    for rank in ranks {
        rank.expect_success();
    }
}

fn measure(rank: &Rank) {
    let context = Context::from_env().unwrap();
    let form = |name: &str| {
        let builder = Group::builder().context(&context).timeout(LONG).name(name);
        builder.from_store(rank.store.clone(), rank.rank, rank.world).unwrap()
    };
    // The first one brings what a process has once.
    let first = form("first");
    let mut values = vec![1f32; 1 << 20];
    first.all_reduce_slice(&mut values, ReduceOp::Sum).unwrap();
    first.barrier().wait().unwrap();
    let before = resident();
    let (start, work) = (Instant::now(), on_cores());
    let group = form("second");
    let (formed, worked) = (start.elapsed(), on_cores() - work);
    let idle = resident() - before;
    group.all_reduce_slice(&mut values[..1000], ReduceOp::Sum).unwrap();
    let small = resident() - before;
    // As much as staging ever needs: every rank reads all of what each of them has.
    let private = |bytes: usize| {
        let span = Span::whole(host::private(bytes).unwrap());
        span.write(0, &vec![1; bytes]).unwrap();
        Tensor::flat(span, Dtype::F32).unwrap()
    };
    let (own, all) = (private(PART), private(PART * rank.world));
    let with_tensors = resident();
    group.all_gather_into(&all, &own).wait().unwrap();
    group.all_reduce(&own, ReduceOp::Sum).wait().unwrap();
    group.barrier().wait().unwrap();
    let large = resident() - with_tensors + small;
    let text = format!(
        "formed in {formed:?} with {worked:?} of work; KiB idle {idle}, after a small one {small}, after large ones {large}"
    );
    say(&text);
    await_parent();
    let worst = idle.max(small).max(large);
    assert!(worst <= MOST_KIB, "rank {}: {text}", rank.rank);
}
