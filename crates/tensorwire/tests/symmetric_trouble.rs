//! Symmetric memory when something goes wrong: ranks that are late at each step, memory that cannot be reached, ranks that die or
//! are stopped while others wait for their signals. The GPUs are threads; what has `real` in its name also runs with TEST_GPU=1.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod gpus;
mod model;
mod ranks;
mod trouble;

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use gpus::{gpu, nothing_is_left, queue, settings, span, usage};
use ranks::{LONG, Rank, context, describe, on_threads, outcome, random::Random};
use rustix::process::{Signal, getpid, kill_process};
use tensorwire::device::threads::{self, Call, Settings, out_of_memory};
use tensorwire::device::{Abort, Caching, Dtype, ReduceOp};
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Deadline, DeviceId, Group, Span, Symmetric};
use trouble::{late_at_every_step, turn};

const WORLD: usize = 3;

fn soon() -> Deadline {
    Deadline::after(LONG)
}

/// The handle does what it should.
fn works(handle: &Symmetric) {
    let (me, world) = (handle.rank(), handle.world());
    for rank in 0..world {
        handle.buffer(rank).unwrap().write(me, &[me as u8 + 1]).unwrap();
    }
    handle.barrier(0, soon()).unwrap();
    let expected: Vec<u8> = (1..=world as u8).collect();
    assert_eq!(handle.buffer(me).unwrap().to_vec().unwrap()[..world], expected);
    handle.barrier(1, soon()).unwrap();
}

/// Whoever gives up, and whoever gets a handle: the next rendezvous goes well.
#[test]
fn late() {
    let _turn = turn();
    let attempt = |group: &Group, deadline: Option<Deadline>| {
        let memory = group.alloc(64)?;
        let call = group.symmetric(&memory);
        deadline.into_iter().fold(call, |call, deadline| call.deadline(deadline)).wait()
    };
    let steps = late_at_every_step(WORLD, "late", attempt, works);
    assert!(steps > 10, "{steps}");
}

/// Runs a body as processes of each setting.
fn everywhere(test: &str, all: &[Settings], body: fn(Group)) {
    match Rank::of_this_process() {
        Some(rank) => body(rank.group()),
        None => all.iter().for_each(|settings| gpus::run(test, WORLD, settings, &[])),
    }
}

/// All ranks hear of the trouble of one. The next try goes well, and nothing is left of either.
fn hear(
    group: Group,
    before: [(usize, usize); 2],
    whose: usize,
    result: tensorwire::Result<Symmetric>,
    wanted: &str,
) {
    println!("rank {}: {}", group.rank(), outcome(&result));
    let text = describe(&result.unwrap_err());
    assert!(text.contains(wanted), "{text}");
    assert!(group.rank() == whose || text.contains(&format!("rank {whose}")), "{text}");
    let memory = span(&group, &gpu(0), 64);
    let handle = group.symmetric(&memory).wait().unwrap();
    works(&handle);
    group.barrier().wait().unwrap();
    drop((handle, memory));
    group.barrier().wait().unwrap();
    nothing_is_left(&group, before);
    group.barrier().wait().unwrap();
}

/// Larger than what shares an allocation with others.
const LARGE: usize = 40 << 20;

/// The last rank cannot export its memory, or rank 0 cannot map that of the others.
fn unreachable(group: Group) {
    let before = usage();
    let last = group.world() - 1;
    let refused = tensorwire::device::Error::Device {
        call: "cuMemExport",
        code: Some(801),
        name: "NOT_SUPPORTED".into(),
    };
    for whose in [last, 0] {
        let memory = span(&group, &gpu(0), LARGE);
        let (call, error) = match whose {
            0 => (Call::Import, out_of_memory()),
            _ => (Call::Export, refused.clone()),
        };
        let wanted = if whose == 0 { "OUT_OF_MEMORY" } else { "NOT_SUPPORTED" };
        if group.rank() == whose {
            threads::gpu(0).unwrap().fail(call, usize::MAX, error);
        }
        let end = group.symmetric(&memory).wait();
        if group.rank() == whose {
            threads::gpu(0).unwrap().heal(call);
        }
        drop(memory);
        hear(group.clone(), before, whose, end, wanted);
    }
}

#[test]
fn memory_that_cannot_be_reached() {
    everywhere("memory_that_cannot_be_reached", &settings()[..1], unreachable);
}

/// Rank 1 has no descriptor left to take the others' memory.
fn descriptors_run_out(group: Group) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let before = usage();
    let memory = span(&group, &gpu(0), LARGE);
    group.barrier().wait().unwrap();
    let limit = getrlimit(Resource::Nofile);
    let mut taken = Vec::new();
    if group.rank() == 1 {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        setrlimit(Resource::Nofile, Rlimit { current: Some(open + 1), maximum: limit.maximum }).unwrap();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            taken.push(file);
        }
    }
    let end = group.symmetric(&memory).wait();
    drop(taken);
    setrlimit(Resource::Nofile, limit).unwrap();
    drop(memory);
    hear(group, before, 1, end, "oo many open files");
}

#[test]
fn no_descriptors() {
    everywhere("no_descriptors", &settings()[..1], descriptors_run_out);
}

/// Rank 0 dies while the others' queues wait for its signal: they hear of it, and their queues are free.
fn dies(group: Group) {
    let memory = span(&group, &gpu(0), 64);
    memory.write(0, &[0; 64]).unwrap();
    group.barrier().wait().unwrap();
    let handle = group.symmetric(&memory).wait().unwrap();
    works(&handle);
    if group.rank() == 0 {
        // When both others wait.
        (1..group.world()).for_each(|rank| handle.wait_signal(rank, 7, soon()).unwrap());
        kill_process(getpid(), Signal::KILL).unwrap();
        std::thread::sleep(LONG);
    }
    let mut own = queue(&group, &gpu(0));
    let from = span(&group, &gpu(0), 64);
    from.write(0, &[9; 64]).unwrap();
    handle.put_signal(0, 7, soon()).unwrap();
    let waited = handle.wait_signal_on(&mut *own, 0, 0, soon());
    // Where the thread waited, it knows already.
    if waited.is_ok() {
        own.copy(memory.view(), from.view(), Caching::Keep).unwrap();
    }
    let _ = own.finish(&Abort::local(), soon());
    let error = waited.and_then(|()| handle.barrier(0, soon())).unwrap_err();
    println!("rank {}: {}", group.rank(), describe(&error));
    assert_eq!(error.ranks(), [0], "{error}");
    assert!(
        memory.to_vec().unwrap()[3..].iter().all(|&byte| byte == 0),
        "what is behind the wait writes nothing"
    );
    gpus::copies(&group, &gpu(0), &mut *own);
    drop(handle);
    let next = group.shrink().unwrap();
    let handle = next.symmetric(&memory).wait().unwrap();
    works(&handle);
}

#[test]
fn a_rank_dies_real() {
    match Rank::of_this_process() {
        Some(rank) => dies(rank.group()),
        None => {
            for settings in settings() {
                let ranks::Ranks { mut ranks, server: _server } =
                    gpus::start("a_rank_dies_real", WORLD, &settings, &[]);
                // Who is dropped is killed, and rank 0 does that itself.
                let _first = ranks.remove(0);
                ranks.into_iter().for_each(|rank| rank.expect_success());
            }
        }
    }
}

/// Two queues, two handles of two groups on the same memory, with delays at random. Every number arrives.
fn two_of_each(group: Group) {
    let rounds: usize = std::env::var("TEST_ROUNDS").map_or(60, |text| text.parse().unwrap());
    let gpu = gpu(0);
    let other = group.split(Some(0), -(group.rank() as i64)).unwrap().unwrap();
    let groups = [&group, &other];
    let memory = groups.map(|group| span(group, &gpu, 4096));
    let source = groups.map(|group| span(group, &gpu, 4096));
    let handles = [0, 1].map(|at| groups[at].symmetric(&memory[at]).wait().unwrap());
    let mut queues = [queue(&group, &gpu), queue(&group, &gpu)];
    let mut random = Random(group.rank() as u64 + 7);
    for round in 0..rounds {
        for (at, handle) in handles.iter().enumerate() {
            let queue = &mut *queues[at];
            let (me, world) = (handle.rank(), handle.world());
            let (next, before) = ((me + 1) % world, (me + world - 1) % world);
            if random.below(20) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(2000) as u64));
            }
            let value = |rank: usize| (round * 5 + rank * 3 + at) as u8;
            source[at].write(0, &[value(me); 4096]).unwrap();
            queue.copy(handle.buffer(next).unwrap().view(), source[at].view(), Caching::Keep).unwrap();
            handle.put_signal_on(queue, next, 1, soon()).unwrap();
            handle.wait_signal_on(queue, before, 1, soon()).unwrap();
            queue.finish(&Abort::local(), soon()).unwrap();
            assert_eq!(memory[at].to_vec().unwrap(), [value(before); 4096], "round {round}, {at}");
            handle.barrier_on(queue, 2 + round % 8, soon()).unwrap();
        }
    }
    queues.iter_mut().for_each(|queue| queue.finish(&Abort::local(), soon()).unwrap());
    handles.iter().for_each(|handle| handle.barrier(0, soon()).unwrap());
}

#[test]
fn two_queues_and_two_groups_real() {
    everywhere("two_queues_and_two_groups_real", &settings(), two_of_each);
}

/// A rank closes the group instead of sending a signal: who waits hears that at once.
#[test]
fn a_rank_leaves() {
    let _turn = turn();
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    on_threads(2, |rank| {
        let builder = Group::builder().context(&context()).timeout(LONG).name("leaves");
        let group = builder.from_store(store.clone(), rank, 2).unwrap();
        let handle = group.symmetric(&group.alloc(64).unwrap()).wait().unwrap();
        if rank == 1 {
            handle.put_signal(0, 0, soon()).unwrap();
            return group.close().unwrap();
        }
        // What was sent before counts.
        handle.wait_signal(1, 0, soon()).unwrap();
        let text = describe(&handle.wait_signal(1, 0, soon()).unwrap_err());
        assert!(text.starts_with("Left 1 | rank 1 (host ") && text.contains("channel 0"), "{text}");
    });
}

/// The pad of a handle is for kernels that nobody here knows of: after an abort of the group, nobody gets it again.
#[test]
fn pads_of_an_aborted_group_are_never_used_again() {
    let _turn = turn();
    let contexts = [context(), context()];
    let stores: Vec<Arc<dyn Store>> =
        (0..8).map(|_| Arc::new(MemoryStore::new()) as Arc<dyn Store>).collect();
    on_threads(2, |rank| {
        let form = |name: usize| {
            let builder = Group::builder().context(&contexts[rank]).timeout(LONG).name("pads");
            builder.from_store(stores[name].clone(), rank, 2).unwrap()
        };
        let pad = |group: &Group| {
            let handle = group.symmetric(&group.alloc(64).unwrap()).wait().unwrap();
            let pad = handle.pad(rank).unwrap();
            let start = pad.region().addr() + pad.offset();
            (handle, start..start + pad.len())
        };
        let group = form(0);
        let (handle, lost) = pad(&group);
        handle.barrier(0, soon()).unwrap();
        if rank == 0 {
            group.abort("to see what becomes of the pads");
        }
        while group.check().is_ok() {
            std::thread::yield_now();
        }
        drop(handle);
        drop(group);
        for name in 1..8 {
            let group = form(name);
            let (handle, new) = pad(&group);
            assert!(
                new.end <= lost.start || lost.end <= new.start,
                "{new:?} was that of an aborted group: {lost:?}"
            );
            handle.barrier(0, soon()).unwrap();
        }
    });
}

/// A rank drops its handle, and its group, while the other one still has a handle and may write: nobody gets that memory
/// before. Work that would need the rank is refused at once.
#[test]
fn a_rank_drops_its_handle_first() {
    let _turn = turn();
    let contexts = [context(), context()];
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let dropped = Barrier::new(2);
    on_threads(2, |rank| {
        let host = contexts[rank].pool(&DeviceId::Host).unwrap();
        let builder = Group::builder().context(&contexts[rank]).timeout(LONG).name("first");
        let group = builder.from_store(store.clone(), rank, 2).unwrap();
        let handle = group.symmetric(&group.alloc(64).unwrap()).wait().unwrap();
        handle.barrier(0, soon()).unwrap();
        let pad = handle.pad(1).unwrap();
        if rank == 1 {
            drop((pad, handle, group));
            dropped.wait();
            dropped.wait();
            // As much as there was before, and all that is free now.
            for _ in 0..64 {
                let span = Span::whole(host.alloc(256).unwrap());
                assert!(!span.to_vec().unwrap().starts_with(&[0xee; 64]), "it was written to after that");
                std::mem::forget(span);
            }
            dropped.wait();
            return;
        }
        dropped.wait();
        pad.write(0, &[0xee; 64]).unwrap();
        let mut queue = contexts[0].host().queue().unwrap();
        let error =
            handle.all_reduce_on(&mut *queue, ReduceOp::Sum, Dtype::U8, 0..64, 0, soon()).unwrap_err();
        assert!(describe(&error).starts_with("Left 1 | rank 1 (host "), "{error}");
        dropped.wait();
        dropped.wait();
    });
}

/// A rank is stopped before it signals: the others' waits end by their deadline and say that it is stopped.
fn stopped(group: Group) {
    let memory = span(&group, &gpu(0), 64);
    // One for each rank that waits: a queue that waits in vain breaks the handle for all.
    let handles = [0, 1].map(|_| group.symmetric(&memory).wait().unwrap());
    handles.iter().for_each(works);
    let handle = &handles[group.rank() % 2];
    let mut own = queue(&group, &gpu(0));
    if group.rank() == 2 {
        ranks::say("stopping");
        kill_process(getpid(), Signal::STOP).unwrap();
        std::thread::sleep(LONG);
    }
    let (stat, end) = (format!("/proc/{}/stat", group.members()[2].pid), Instant::now() + LONG);
    while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
        assert!(Instant::now() < end, "it does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
    let short = || Deadline::after(Duration::from_millis(300));
    let waited = match group.rank() {
        0 => handle.wait_signal(2, 0, short()),
        _ => handle.wait_signal_on(&mut *own, 2, 0, short()).and_then(|()| {
            let _ = own.finish(&Abort::local(), soon());
            handle.put_signal(0, 0, soon())
        }),
    };
    let error = waited.unwrap_err();
    ranks::say(&describe(&error));
    assert!(error.is_timeout() && error.ranks() == [2], "{error}");
    gpus::copies(&group, &gpu(0), &mut *own);
    ranks::say("done");
    ranks::await_parent();
}

#[test]
fn a_rank_is_stopped_real() {
    if let Some(rank) = Rank::of_this_process() {
        return stopped(rank.group());
    }
    for settings in settings() {
        let ranks::Ranks { mut ranks, server: _server } =
            gpus::start("a_rank_is_stopped_real", WORLD, &settings, &[]);
        for rank in &mut ranks[..2] {
            let said = rank.hear();
            assert!(said.starts_with("TimedOut") && said.contains("rank 2"), "{said}");
            assert!(said.contains("stopped") || said.contains("SIGSTOP"), "{said}");
            assert_eq!(rank.hear(), "done");
        }
        ranks[2].child.kill().unwrap();
        ranks.into_iter().take(2).for_each(|rank| rank.expect_success());
    }
}
