//! Large work that several threads do together: the same bytes as by one, whatever the threads do to each other.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::thread::sleep;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tensorwire_device::host::{Host, private};
use tensorwire_device::{Caching, Device, Dtype, Queue, ReduceOp, Span};

const TYPES: [Dtype; 6] = [Dtype::U8, Dtype::F32, Dtype::Bf16, Dtype::F64, Dtype::I16, Dtype::Complex64];

/// Bytes that differ everywhere; small enough as floats that no sum becomes infinite.
fn span(len: usize, seed: u64) -> Span {
    let mut word = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let bytes: Vec<u8> = (0..len)
        .map(|_| {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            (word >> 32) as u8 & 0x3f
        })
        .collect();
    let span = Span::new(private(len.max(1)).unwrap(), 0..len).unwrap();
    span.write(0, &bytes).unwrap();
    span
}

/// One piece of work, by a queue: what all memory holds afterwards.
fn work(queue: &mut dyn Queue, job: &Job) -> Vec<Vec<u8>> {
    let Job { len, inputs, outputs, at, in_place, dtype, caching, .. } = *job;
    let all: Vec<Span> = (0..inputs + outputs).map(|index| span(len + at, job.seed + index as u64)).collect();
    let views: Vec<_> = all.iter().map(|span| span.view().slice(at..at + len).unwrap()).collect();
    let (from, mut into) = (&views[..inputs], views[inputs..].to_vec());
    if in_place {
        into[0] = from[inputs / 2];
    }
    queue.reduce(ReduceOp::Sum, dtype, from, &into, caching).unwrap();
    if !in_place {
        queue.copy(into[0], from[0], caching).unwrap();
    }
    all.iter().map(|span| span.to_vec().unwrap()).collect()
}

const CACHINGS: [Caching; 3] = [Caching::Keep, Caching::Bypass, Caching::Give];

#[derive(Debug, Clone)]
struct Job {
    len: usize,
    /// Where the bytes begin in their memory.
    at: usize,
    inputs: usize,
    outputs: usize,
    in_place: bool,
    dtype: Dtype,
    caching: Caching,
    threads: usize,
    /// Long enough for the helpers to fall asleep, or not.
    pause: bool,
    seed: u64,
}

fn any_job() -> impl Strategy<Value = Job> {
    let sizes = (prop_oneof![0..200_000usize, 0..6000usize], 0..70usize);
    let counts = (1..10usize, 1..4usize, any::<bool>());
    let rest = (0..TYPES.len(), 0..CACHINGS.len(), 1..6usize, prop::bool::weighted(0.2), 0..1000u64);
    (sizes, counts, rest).prop_map(|((len, at), (inputs, outputs, in_place), rest)| {
        let (dtype, caching, threads) = (TYPES[rest.0], CACHINGS[rest.1], rest.2);
        let (pause, seed) = (rest.3, rest.4);
        let len = len / dtype.size() * dtype.size();
        Job { len, at, inputs, outputs, in_place, dtype, caching, threads, pause, seed }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    #[test]
    fn the_bytes_are_those_of_one_thread(jobs in prop::collection::vec(any_job(), 1..12)) {
        let (mut alone, mut together) = (Host.queue().unwrap(), Host.queue().unwrap());
        for job in &jobs {
            together.share(job.threads);
            if job.pause {
                sleep(Duration::from_millis(1));
            }
            prop_assert!(work(&mut *together, job) == work(&mut *alone, job), "{job:?}");
        }
    }
}

/// Small tasks that follow each other at once: a helper may come too early, too late, or in between.
#[test]
fn no_task_is_lost_or_done_twice() {
    let mut queue = Host.queue().unwrap();
    queue.share(2);
    let (sum, one) = (span(64 << 10, 1), span(64 << 10, 2));
    sum.write(0, &vec![0; 64 << 10]).unwrap();
    one.write(0, &vec![1; 64 << 10]).unwrap();
    for round in 1..=3000u32 {
        queue
            .reduce(ReduceOp::Sum, Dtype::U8, &[sum.view(), one.view()], &[sum.view()], Caching::Keep)
            .unwrap();
        if round % 500 == 0 {
            assert!(sum.to_vec().unwrap().iter().all(|&byte| byte == round as u8), "{round}");
            sleep(Duration::from_micros(200));
        }
    }
}

fn helpers() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == "tensorwire-help").count()
}

/// Waits until there are so many: a thread names itself when it first runs, and ends when it last does.
fn await_helpers(count: usize) {
    let begin = Instant::now();
    while helpers() != count {
        assert!(begin.elapsed() < Duration::from_secs(30), "{} helpers, not {count}", helpers());
        sleep(Duration::from_millis(1));
    }
}

#[test]
fn helpers_come_when_needed_and_go_with_their_queue() {
    // Other tests of this file have helpers, too.
    if std::env::args().any(|arg| arg == "--exact") {
        let (one, two) = (span(1 << 20, 1), span(1 << 20, 2));
        let mut queue = Host.queue().unwrap();
        queue.share(3);
        let small = |span: &Span| span.slice(0..4096).unwrap();
        queue.copy(small(&one).view(), small(&two).view(), Caching::Keep).unwrap();
        assert_eq!(helpers(), 0);
        queue.copy(one.view(), two.view(), Caching::Keep).unwrap();
        await_helpers(2);
        queue.share(1);
        queue.copy(two.view(), one.view(), Caching::Keep).unwrap();
        drop(queue);
        await_helpers(0);
        return;
    }
    let mut test = std::process::Command::new(std::env::current_exe().unwrap());
    test.args(["helpers_come_when_needed_and_go_with_their_queue", "--exact"]);
    assert!(test.status().unwrap().success());
}
