//! What is said of collectives on queues: by a time-out, and by `Group::explain`. The GPUs are threads.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod ranks;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ranks::{LONG, Rank, Ranks, as_threads, await_parent, say};
use tensorwire::collective::Kind;
use tensorwire::device::clock::monotonic;
use tensorwire::device::threads::{Settings, hook, install, uuid};
use tensorwire::device::{Deadline, Queue};
use tensorwire::{DeviceId, Dtype, Group, ReduceOp, Span, Tensor};

fn on_gpu(group: &Group) -> (Tensor, Box<dyn Queue>) {
    let gpu = DeviceId::Gpu(uuid(0));
    let region = group.context().pool(&gpu).unwrap().alloc(4096).unwrap();
    let tensor = Tensor::flat(Span::whole(region).slice(0..4096).unwrap(), Dtype::F32).unwrap();
    tensor.write(&[1.0f32; 1024]).unwrap();
    (tensor, group.context().device(&gpu).unwrap().queue().unwrap())
}

/// The stream of rank 1 is held before an operation.
fn held_body(rank: &Rank) {
    install(Settings::default()).unwrap();
    let group = rank.group();
    let (tensor, mut queue) = on_gpu(&group);
    group.all_reduce(&tensor, ReduceOp::Sum).on(&mut *queue).unwrap().wait().unwrap();
    let held = Arc::new(AtomicBool::new(rank.rank == 1));
    let holds = held.clone();
    hook::set(move |_| {
        while holds.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    // Enough for both to come.
    let deadline = if rank.rank == 1 { LONG } else { Duration::from_secs(5) };
    let call = group.all_reduce(&tensor, ReduceOp::Sum).deadline(Deadline::after(deadline));
    let work = call.on(&mut *queue).unwrap();
    if rank.rank == 0 {
        let error = work.wait().unwrap_err();
        say(&format!("{:?} {error}", error.ranks()));
        await_parent();
    } else {
        await_parent();
        held.store(false, Ordering::Release);
        let _ = work.wait();
    }
    // It may be broken: the held rank took long.
    drop(group);
}

#[test]
fn a_queue_that_does_not_come_is_named_with_what_its_host_does() {
    if let Some(rank) = Rank::of_this_process() {
        return held_body(&rank);
    }
    let Ranks { mut ranks, server: _server } =
        Ranks::start("a_queue_that_does_not_come_is_named_with_what_its_host_does", 2);
    let (pid, text) = (ranks[1].pid(), ranks[0].hear());
    println!("{text}");
    ranks.iter_mut().for_each(|rank| rank.let_go());
    ranks.into_iter().for_each(|rank| rank.expect_success());
    assert!(text.starts_with("[1] "), "{text}");
    assert!(text.contains("all_reduce #2 of group \"world\""), "{text}");
    assert!(text.contains("it waited for the queue of rank 1 (host "), "{text}");
    assert!(text.contains(&format!(", pid {pid}), which ")), "{text}");
    assert!(text.contains(" outside of tensorwire after all_reduce #2, queued "), "{text}");
    assert!(text.contains(" ago; other work is before it on that queue; the time-out"), "{text}");
}

fn explained(group: &Group) -> String {
    let (tensor, mut queue) = on_gpu(group);
    group.all_reduce(&tensor, ReduceOp::Sum).on(&mut *queue).unwrap().wait().unwrap();
    group.explain()
}

const WAITED: &str = "the calling thread waited in place of its queue in ";

/// Under MPS and with one hardware queue a thread waits, unless what it waits for is there already: once is enough.
#[test]
fn explain_says_who_works_and_who_waits() {
    if let Some(rank) = Rank::of_this_process() {
        let settings: Settings = std::env::var("SETTINGS").unwrap().parse().unwrap();
        let waits = settings != Settings::default();
        install(settings).unwrap();
        let group = rank.group();
        let text = loop {
            let text = explained(&group);
            let seen = Tensor::private(&[i32::from(text.contains(WAITED) == waits)]).unwrap();
            group.all_reduce(&seen, ReduceOp::Min).wait().unwrap();
            if seen.to_vec::<i32>().unwrap() == [1] {
                break text;
            }
        };
        assert!(text.contains("went direct, on a queue: rank 0 works for ranks 0, 1 on gpu-"), "{text}");
        let why = "operations: the device cannot hold so many waits (it has few hardware queues, or MPS serves it)\n";
        assert!(text.contains(why) == waits, "{text}");
        return println!("{text}");
    }
    let here = Settings::default;
    for settings in [here(), Settings { mps: true, ..here() }, Settings { queues: 1, ..here() }] {
        let with = |_: usize, mut command: std::process::Command| {
            command.env("SETTINGS", settings.to_string());
            command
        };
        let all = Ranks::start_with("explain_says_who_works_and_who_waits", 2, with);
        all.ranks.into_iter().for_each(|rank| rank.expect_success());
    }
}

#[test]
fn explain_says_that_ranks_are_threads() {
    as_threads(2, |group| {
        let _ = install(Settings::default());
        let text = explained(group);
        let gpu = DeviceId::Gpu(uuid(0));
        let way = "  all_reduce #1 (4096 bytes) went direct, on a queue: rank 0 works for ranks 0, 1 on ";
        assert!(text.contains(&format!("{way}{gpu}\n")), "{text}");
        assert!(
            text.contains(&format!("{WAITED}1 of 1 queued operations: ranks are threads of one process\n")),
            "{text}"
        );
    });
}

/// The worker's host sees the end late, because the queue is held behind the kernel. The records say when that ended.
#[test]
fn the_record_has_the_end_of_the_workers_last_kernel() {
    if let Some(rank) = Rank::of_this_process() {
        install(Settings::default()).unwrap();
        let group = rank.group();
        let (tensor, mut queue) = on_gpu(&group);
        group.all_reduce(&tensor, ReduceOp::Sum).on(&mut *queue).unwrap().wait().unwrap();
        let ended = Arc::new(AtomicU64::new(0));
        let ends = ended.clone();
        hook::set(move |step| match step.kind {
            hook::Kind::Reduce => ends.store(1, Ordering::Release),
            _ if ends.load(Ordering::Acquire) == 1 => {
                ends.store(monotonic(), Ordering::Release);
                std::thread::sleep(Duration::from_millis(200));
            }
            _ => {}
        });
        group.all_reduce(&tensor, ReduceOp::Sum).on(&mut *queue).unwrap().wait().unwrap();
        hook::clear();
        say(&ended.load(Ordering::Acquire).to_string());
        return await_parent();
    }
    let Ranks { mut ranks, server: _server } =
        Ranks::start("the_record_has_the_end_of_the_workers_last_kernel", 2);
    let ends: Vec<u64> = ranks.iter_mut().map(|rank| rank.hear().parse().unwrap()).collect();
    let report = tensorwire::status::of(ranks[0].pid(), &Default::default()).unwrap();
    ranks.iter_mut().for_each(|rank| rank.let_go());
    let worked = ends.iter().copied().max().unwrap();
    let groups: Vec<_> = report.groups().collect();
    let [group] = &groups[..] else { panic!("{report:?}") };
    for rank in &group.ranks {
        let record = rank.records.iter().rfind(|record| record.kind == Kind::AllReduce).unwrap();
        let ended = record.ended().unwrap();
        assert!(worked > 1 && record.begun < ended && ended < worked, "{record:?}, and not before {worked}");
    }
}
