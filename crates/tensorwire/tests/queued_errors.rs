//! Operations on tensors of GPUs that cannot go well: memory that nobody can reach, wrong calls, errors that nobody asks
//! for, too many operations, and callers who do not want to wait. The GPUs are threads.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod gpus;
mod model;
mod ranks;

use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpus::{SUM, gpu, hold, nothing_is_left, queue, settings, tensor, usage, works};
use ranks::{LONG, Rank, describe, outcome};
use tensorwire::collective::{Path, hooks};
use tensorwire::device::threads::{self, Call, Settings, hook, out_of_memory};
use tensorwire::device::{Layout, Queue};
use tensorwire::{Deadline, Dtype, Error, Group, ReduceOp, Result, Span, Tensor, Work, interrupt};

/// More than fits into a segment with others: it has an allocation of its own.
const LARGE: usize = 6 << 18;

/// Runs a body as processes, in worlds of two, four and eight.
fn everywhere(test: &str, all: &[Settings], body: fn(&Rank, Group)) {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        return body(&rank, group);
    }
    for settings in all {
        for world in [2, 4, 8] {
            gpus::run(test, world, settings, &[]);
        }
    }
}

/// The worker has no descriptor left to take a peer's memory, and none for memory of the host that would stand for its own.
fn descriptors_run_out(_: &Rank, group: Group) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let before = usage();
    let ones = tensor(&group, &gpu(0), &vec![1i32; LARGE]);
    group.barrier().wait().unwrap();
    let limit = getrlimit(Resource::Nofile);
    let mut taken = Vec::new();
    if group.rank() == 0 {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        setrlimit(Resource::Nofile, Rlimit { current: Some(open + 1), maximum: limit.maximum }).unwrap();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            taken.push(file);
        }
    }
    let end = group.all_reduce(&ones, SUM).wait();
    drop(taken);
    setrlimit(Resource::Nofile, limit).unwrap();
    println!("no descriptors, rank {}: {}", group.rank(), outcome(&end));
    let text = describe(&end.unwrap_err());
    assert!(text.contains("oo many open files"), "{text}");
    assert!(group.rank() == 0 || text.starts_with("Failed 0 | rank 0 (host "), "{text}");
    drop(ones);
    goes_on(&group, before);
}

#[test]
fn no_descriptors() {
    everywhere("no_descriptors", &settings()[..1], descriptors_run_out);
}

fn refused() -> tensorwire::device::Error {
    tensorwire::device::Error::Device { call: "cuMemExport", code: Some(801), name: "NOT_SUPPORTED".into() }
}

/// Ones were summed, through memory of the host. The record says why; that of the rank whose memory it is says more.
fn went_through_the_host(group: &Group, ones: &Tensor, whose: Option<usize>) {
    assert!(ones.to_vec::<i32>().unwrap().iter().all(|&sum| sum == group.world() as i32));
    let text = group.explain();
    let others = "the tensor of another rank cannot be reached";
    let own = "its tensor is in memory of a GPU that other ranks cannot reach";
    match whose {
        Some(rank) if rank == group.rank() => assert!(text.contains(own), "{text}"),
        Some(_) => assert!(text.contains(others), "{text}"),
        None => assert!(text.contains(own) || text.contains(others), "{text}"),
    }
}

/// The group works, and nothing is left.
fn goes_on(group: &Group, before: [(usize, usize); 2]) {
    works(group, &gpu(0));
    nothing_is_left(group, before);
    group.barrier().wait().unwrap();
}

/// The last rank cannot export, then the worker cannot import: tensors go through memory of the host, by whatever way they are
/// called. Who asks for the direct path hears why there is none.
fn no_way(_: &Rank, group: Group) {
    let last = group.world() - 1;
    let before = usage();
    let ones = || tensor(&group, &gpu(0), &vec![1i32; LARGE]);
    let mut own = queue(&group, &gpu(0));
    for way in 0..2 {
        let run = |own: &mut dyn Queue, whose| {
            let tensor = ones();
            let call = group.all_reduce(&tensor, SUM);
            if way == 0 {
                call.wait().unwrap()
            } else {
                call.on(own).unwrap().wait().unwrap()
            }
            went_through_the_host(&group, &tensor, whose);
            // It rests for a while: nobody tries to reach it.
            tensor.write(&vec![1i32; LARGE]).unwrap();
            let text = describe(&group.all_reduce(&tensor, SUM).via(Path::Direct).wait().unwrap_err());
            assert!(text.contains("the direct path for all_reduce (it was asked for)"), "{text}");
            assert_eq!(tensor.to_vec::<i32>().unwrap(), vec![1; LARGE]);
            group.barrier().wait().unwrap();
        };
        if group.rank() == last {
            threads::gpu(0).unwrap().fail(Call::Export, usize::MAX, refused());
        }
        run(&mut *own, Some(last));
        if group.rank() == last {
            threads::gpu(0).unwrap().heal(Call::Export);
        }
        goes_on(&group, before);

        if group.rank() == 0 {
            threads::gpu(0).unwrap().fail(Call::Import, 1, out_of_memory());
        }
        run(&mut *own, None);
        goes_on(&group, before);
    }
}

#[test]
fn memory_that_cannot_be_reached() {
    everywhere("memory_that_cannot_be_reached", &settings(), no_way);
}

/// No memory for what packs a tensor: that rank hears it before anything begins, and may try again.
fn no_room(_: &Rank, group: Group) {
    let before = usage();
    // So large that nothing has room for more.
    let wide = tensor(&group, &gpu(0), &vec![1i32; 6 * LARGE]);
    let layout = Layout::with_origin(&[LARGE], &[2], 4, 4).unwrap();
    let columns = Tensor::new(wide.span().clone(), Dtype::I32, layout).unwrap();
    if group.rank() == 1 {
        let full = gpus::fill(&group, &gpu(0));
        let text = describe(&group.all_reduce(&columns, SUM).wait().unwrap_err());
        assert!(text.contains("OUT_OF_MEMORY") || text.contains("bytes of free memory"), "{text}");
        drop(full);
    }
    // The others need memory, too.
    group.barrier().wait().unwrap();
    group.all_reduce(&columns, SUM).wait().unwrap();
    let world = group.world() as i32;
    let all = wide.to_vec::<i32>().unwrap();
    assert!(all[..2 * LARGE].chunks(2).all(|pair| pair == [1, world]));
    drop((wide, columns));
    works(&group, &gpu(0));
    nothing_is_left(&group, before);
    group.barrier().wait().unwrap();
}

#[test]
fn no_memory_to_pack_a_tensor() {
    everywhere("no_memory_to_pack_a_tensor", &settings()[..1], no_room);
}

/// GPUs that do not reach each other.
fn far_apart(_: &Rank, group: Group) {
    let before = usage();
    let mut own = queue(&group, &gpu(group.rank() % 2));
    for count in [2, 100, 5000, 300_000] {
        let ones = tensor(&group, &gpu(group.rank() % 2), &vec![1i32; count]);
        group.all_reduce(&ones, SUM).on(&mut *own).unwrap().wait().unwrap();
        went_through_the_host(&group, &ones, None);
        drop(ones);
        works(&group, &gpu(0));
    }
    goes_on(&group, before);
}

#[test]
fn gpus_that_do_not_reach_each_other() {
    let apart = settings().map(|settings| Settings { peers: false, ..settings });
    everywhere("gpus_that_do_not_reach_each_other", &apart, far_apart);
}

/// One rank has its tensor on the host: the others go through memory of the host, and say so. Who asks for the direct path hears
/// why there is none.
fn here_and_there(_: &Rank, group: Group) {
    let before = usage();
    let last = group.world() - 1;
    for count in [2, 100, 5000, 300_000] {
        let host = group.tensor(&vec![1i32; count]).unwrap();
        let ones = tensor(&group, &gpu(0), &vec![1i32; count]);
        let mine = if group.rank() == last { &host } else { &ones };
        let text = describe(&group.all_reduce(mine, SUM).via(Path::Direct).wait().unwrap_err());
        assert!(text.contains("on GPUs, and others on the host"), "{text}");
        assert_eq!(mine.to_vec::<i32>().unwrap(), vec![1; count]);
        group.all_reduce(mine, SUM).wait().unwrap();
        assert_eq!(mine.to_vec::<i32>().unwrap(), vec![group.world() as i32; count]);
        if group.rank() != last {
            let text = group.explain();
            assert!(text.contains("some ranks have their tensors on GPUs, and others on the host"), "{text}");
            assert!(
                text.contains("through memory of the host (") && text.contains(" us: copies from the GPU "),
                "{text}"
            );
        }
        works(&group, &gpu(0));
    }
    nothing_is_left(&group, before);
    group.barrier().wait().unwrap();
}

#[test]
fn a_tensor_on_the_host_of_one_rank() {
    everywhere("a_tensor_on_the_host_of_one_rank", &settings()[..1], here_and_there);
}

/// Tensors of GPUs take any way that is asked for.
fn other_ways(_: &Rank, group: Group) {
    let before = usage();
    let device = gpu(0);
    let mut own = queue(&group, &device);
    for path in [Path::Inline, Path::OneShot, Path::Staged, Path::Direct] {
        for (how, count) in [4, 8, 8, 8].into_iter().enumerate() {
            let ones = tensor(&group, &device, &vec![1i32; count]);
            let call = group.all_reduce(&ones, SUM).via(path);
            match how {
                0 | 1 => call.wait().unwrap(),
                2 => call.on(&mut *own).unwrap().wait().unwrap(),
                _ => call.start().unwrap().wait().unwrap(),
            }
            assert_eq!(ones.to_vec::<i32>().unwrap(), vec![group.world() as i32; count], "{path}");
        }
    }
    works(&group, &device);
    nothing_is_left(&group, before);
    group.barrier().wait().unwrap();
}

#[test]
fn all_ways() {
    everywhere("all_ways", &settings()[..1], other_ways);
}

/// Tensors of two GPUs in one call; memory of several allocations, as other allocators have it.
fn odd_memory(_: &Rank, group: Group) {
    let before = usage();
    let world = group.world();
    let parts: Vec<Tensor> = (0..world).map(|at| tensor(&group, &gpu(at % 2), &[1i32; 10])).collect();
    let input = tensor(&group, &gpu(0), &[1i32; 10]);
    let end = group.all_gather(&parts, &input).wait();
    let text = describe(&end.unwrap_err());
    assert!(text.starts_with("Misuse | ") && text.contains("one device"), "{text}");
    drop(parts);
    works(&group, &gpu(0));
    let region = threads::gpu(0).unwrap().joined(&[4096, 4096]).unwrap();
    let joined = Tensor::flat(Span::whole(region), Dtype::I32).unwrap();
    joined.write(&[1i32; 2048]).unwrap();
    let end = group.all_reduce(&joined, SUM).wait();
    println!("rank {}: joined memory: {}", group.rank(), outcome(&end));
    match end {
        Ok(()) => assert_eq!(joined.to_vec::<i32>().unwrap(), [world as i32; 2048]),
        Err(error) => {
            assert!(describe(&error).contains("rank "), "{error}");
            assert_eq!(joined.to_vec::<i32>().unwrap(), [1; 2048]);
        }
    }
    drop((joined, input));
    works(&group, &gpu(0));
    nothing_is_left(&group, before);
    group.barrier().wait().unwrap();
}

#[test]
fn tensors_in_odd_places() {
    everywhere("tensors_in_odd_places", &settings()[..1], odd_memory);
}

/// Ranks whose tensors differ in type or size, or that call different things: all of them hear who, and what both have called.
fn differing(_: &Rank, group: Group) {
    let (before, last) = (usage(), group.world() - 1);
    let all: Vec<usize> = (0..group.world()).collect();
    let device = gpu(0);
    type Run = fn(&Group, &Tensor) -> Result<()>;
    let all_reduce: Run = |group, tensor| group.all_reduce(tensor, SUM).wait();
    let most: Run = |group, tensor| group.all_reduce(tensor, ReduceOp::Max).wait();
    let broadcast: Run = |group, tensor| group.broadcast(tensor, 0).wait();
    let on_queue: Run = |group, tensor| {
        group.all_reduce(tensor, SUM).on(&mut *queue(group, &gpu(0))).and_then(|work| work.wait())
    };
    let ints = |count: usize| tensor(&group, &device, &vec![1i32; count]);
    let floats = tensor(&group, &device, &[1.0f32; 100]);
    let cases: [(Tensor, Run, [&str; 2]); 5] = [
        (floats, all_reduce, ["100 int32", "100 float32"]),
        (ints(70), all_reduce, ["100 int32", "70 int32"]),
        (ints(70), on_queue, ["100 int32", "70 int32"]),
        (ints(100), most, ["SUM", "MAX"]),
        (ints(100), broadcast, ["all_reduce", "broadcast"]),
    ];
    for (odd, run, called) in cases {
        let whole = &group;
        let group = whole.subgroup(&all).unwrap();
        let is_odd = group.rank() == last;
        let mine = if is_odd { odd } else { ints(100) };
        let bytes = mine.span().to_vec().unwrap();
        let end = if is_odd { run(&group, &mine) } else { all_reduce(&group, &mine) };
        let text = describe(&end.unwrap_err());
        // Of two ranks nobody knows which one is wrong.
        let whose = if group.world() == 2 { "?".into() } else { last.to_string() };
        assert!(text.starts_with(&format!("Mismatch {whose} | ")), "{text}");
        assert!(text.contains(&format!("rank {last} (host ")), "{text}");
        assert!(called.iter().all(|called| text.contains(called)), "both are named: {text}");
        assert_eq!(mine.span().to_vec().unwrap(), bytes, "nothing is written");
        // Nobody leaves before all have heard.
        whole.barrier().wait().unwrap();
    }
    works(&group, &device);
    nothing_is_left(&group, before);
    group.barrier().wait().unwrap();
}

#[test]
fn tensors_that_differ_between_ranks() {
    everywhere("tensors_that_differ_between_ranks", &settings(), differing);
}

fn soon(millis: u64) -> Deadline {
    Deadline::after(Duration::from_millis(millis))
}

/// Waits for a key of the store.
fn await_key(rank: &Rank, key: &str) {
    rank.store.get_by(key, Deadline::after(LONG)).unwrap();
}

/// Nobody asks how an operation ended. Returns when it is over.
fn over_unasked(work: Work) {
    let over = Arc::new(AtomicBool::new(false));
    let told = over.clone();
    work.on_over(move || {
        told.store(true, Ordering::SeqCst);
        // Whoever closes the group or calls the next operation now comes before it is known that nobody asks.
        std::thread::sleep(Duration::from_millis(100));
    });
    drop(work);
    let end = Instant::now() + LONG;
    while !over.load(Ordering::SeqCst) {
        assert!(Instant::now() < end, "it is not over");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The same of one that is kept. To look whether it is over is not to ask.
fn over_and_kept(work: &Work) {
    work.leave_unattended();
    let end = Instant::now() + LONG;
    while !work.is_done() {
        assert!(Instant::now() < end, "it is not over");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(work.has_failed());
}

/// An operation fails behind its call, and nobody has its work, or nobody asks it. The last rank's queue does not come to it.
/// The first one hears of it in its next call; or, in another group, when it closes the group.
fn nobody_asks(rank: &Rank, group: Group) {
    let last = group.world() - 1;
    let all: Vec<usize> = (0..group.world()).collect();
    let mut kept = Vec::new();
    for round in 0..5 {
        let (by_close, keeps) = (round % 2 == 1, matches!(round, 2 | 3));
        // The group may break where a machine is so busy that the last rank's queue is not free within a second.
        let group = group.subgroup(&all).unwrap();
        let mut own = queue(&group, &gpu(0));
        let ones = tensor(&group, &gpu(0), &[1i32; 100]);
        let said = format!("heard {round}");
        if group.rank() == last {
            let held = hold(&group, &mut *own);
            let work = group.all_reduce(&ones, SUM).deadline(Deadline::after(LONG)).on(&mut *own).unwrap();
            await_key(rank, &said);
            held.signal(1);
            let text = describe(&work.wait().unwrap_err());
            assert!(text.contains(&format!("queue of rank {last}")) || text.starts_with("Stuck"), "{text}");
        } else if round == 4 {
            // It is started, and perhaps not on its queue when the group is closed.
            drop(group.all_reduce(&ones, SUM).deadline(soon(1000)).start().unwrap());
            let text = describe(&group.clone().close().unwrap_err());
            assert!(text.contains(&format!("rank {last}")), "{text}");
            if group.rank() == 0 {
                rank.store.set(&said, b"1").unwrap();
            }
        } else {
            let work = group.all_reduce(&ones, SUM).deadline(soon(1000)).on(&mut *own).unwrap();
            if keeps {
                over_and_kept(&work);
                kept.push(work);
            } else {
                over_unasked(work);
            }
            if group.rank() == 0 {
                rank.store.set(&said, b"1").unwrap();
            }
        }
        if round == 4 {
            continue;
        }
        if by_close {
            let is_last = group.rank() == last;
            let closed = group.close();
            match is_last {
                true => drop(closed),
                false => {
                    let text = describe(&closed.unwrap_err());
                    assert!(text.contains(&format!("rank {last}")), "{text}");
                }
            }
            continue;
        }
        let next = group.all_reduce(&ones, SUM).deadline(Deadline::after(LONG)).on(&mut *own);
        let text = describe(&next.and_then(|work| work.wait()).unwrap_err());
        println!("rank {}: the next call: {text}", group.rank());
        match group.rank() == last {
            // Others are told that a rank cannot take part, and why.
            true => assert!(text.starts_with("Failed ") || text.starts_with("Stuck"), "{text}"),
            false => {
                assert!(text.contains(&format!("rank {last}")), "{text}");
                assert!(!text.starts_with("TimedOut") || text.contains("nobody had asked"), "{text}");
            }
        }
        if group.check().is_ok() {
            // Each of the others tells its own once; then all is well.
            let mut tries = 0;
            while let Err(error) = group.barrier().wait() {
                tries += 1;
                assert!(tries <= 2 * group.world(), "{error}");
            }
        }
    }
}

#[test]
fn an_error_that_nobody_asks_for() {
    everywhere("an_error_that_nobody_asks_for", &settings()[..1], nobody_asks);
}

/// Of two operations that fail, one is asked for before the next call, which tells the other one; then both are.
fn somebody_asks(rank: &Rank, group: Group) {
    let last = group.world() - 1;
    let all: Vec<usize> = (0..group.world()).collect();
    for asked in [1, 2] {
        let group = group.subgroup(&all).unwrap();
        let mut own = queue(&group, &gpu(0));
        let ones = tensor(&group, &gpu(0), &[1i32; 100]);
        let over = |rank: usize| format!("over {asked} {rank}");
        let is_last = group.rank() == last;
        let held = is_last.then(|| hold(&group, &mut *own));
        let time = if is_last { Deadline::after(LONG) } else { soon(1000) };
        let mut call = || group.all_reduce(&ones, SUM).deadline(time).on(&mut *own).unwrap();
        let works = [call(), call()];
        match held {
            Some(held) => {
                (0..last).for_each(|other| await_key(rank, &over(other)));
                held.signal(1);
                works.iter().for_each(|work| drop(work.wait().unwrap_err()));
            }
            None => {
                works.iter().for_each(over_and_kept);
                works[..asked].iter().for_each(|work| drop(work.error().unwrap()));
                rank.store.set(&over(group.rank()), b"1").unwrap();
            }
        }
        let next = group.all_reduce(&ones, SUM).deadline(Deadline::after(LONG)).on(&mut *own);
        let next = next.and_then(|work| work.wait());
        println!("rank {}, {asked} asked for: {}", group.rank(), outcome(&next));
        // A machine so busy that the held queue is not free within a second breaks the group.
        match group.check() {
            Ok(()) if asked == 2 => next.unwrap(),
            Ok(()) if group.world() == 2 && !is_last => {
                assert!(next.unwrap_err().to_string().contains("nobody had asked"));
            }
            _ => drop(next),
        }
    }
}

#[test]
fn an_error_that_somebody_asks_for_is_told_once() {
    everywhere("an_error_that_somebody_asks_for_is_told_once", &settings()[..1], somebody_asks);
}

/// Keeps what is logged.
struct Log;

static LOGGED: Mutex<String> = Mutex::new(String::new());

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::ERROR
    }

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut |_: &tracing::field::Field, value: &dyn std::fmt::Debug| {
            LOGGED.lock().unwrap().push_str(&format!("{value:?}"));
        });
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// The same in processes that end without another call: the error is logged at once, and it is their last line.
fn says_it_at_the_end(rank: &Rank, group: Group) {
    tracing::subscriber::set_global_default(Log).unwrap();
    let last = group.world() - 1;
    let mut own = queue(&group, &gpu(0));
    let ones = tensor(&group, &gpu(0), &[1i32; 100]);
    if group.rank() == last {
        let held = hold(&group, &mut *own);
        let work = group.all_reduce(&ones, SUM).deadline(Deadline::after(LONG)).on(&mut *own).unwrap();
        await_key(rank, "heard");
        held.signal(1);
        // This one is told.
        work.wait().unwrap_err();
        return;
    }
    let work = group.all_reduce(&ones, SUM).deadline(soon(1000)).on(&mut *own).unwrap();
    over_unasked(work);
    let (end, logged) = (Instant::now() + LONG, || LOGGED.lock().unwrap().clone());
    while !logged().contains("all_reduce failed after it was queued, and nobody asked how it ended") {
        assert!(Instant::now() < end, "logged: {:?}", logged());
        std::thread::sleep(Duration::from_millis(1));
    }
    rank.store.set("heard", b"1").unwrap();
}

#[test]
fn a_process_that_ends_says_what_nobody_asked_for() {
    let name = "a_process_that_ends_says_what_nobody_asked_for";
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        return says_it_at_the_end(&rank, group);
    }
    let ranks::Ranks { ranks, server: _server } = gpus::start(name, 2, &settings()[0], &[]);
    for mut rank in ranks {
        let number = rank.rank;
        let status = rank.finish();
        let text = rank.take_errors();
        assert!(status.success(), "{text}");
        let said = text.lines().last().unwrap_or_default();
        let wanted = "tensorwire: all_reduce failed after it was queued";
        match number {
            0 => assert!(said.contains(wanted) && said.contains("#1 of group \"world\""), "{text}"),
            _ => assert!(!text.contains("tensorwire: all_reduce"), "{text}"),
        }
    }
}

/// The same where the error comes while the next call waits for the operation to be over: that call tells it.
fn nobody_asks_in_time(rank: &Rank, group: Group) {
    let last = group.world() - 1;
    let mut own = queue(&group, &gpu(0));
    let ones = tensor(&group, &gpu(0), &[1i32; 100]);
    let is_last = group.rank() == last;
    let held = is_last.then(|| hold(&group, &mut *own));
    let time = if is_last { Deadline::after(LONG) } else { soon(1000) };
    let work = group.all_reduce(&ones, SUM).deadline(time).on(&mut *own).unwrap();
    if is_last {
        drop(work);
        await_key(rank, "heard");
    } else {
        assert!(work.wait().unwrap_err().is_timeout());
        rank.store.set("heard", b"1").unwrap();
    }
    std::thread::scope(|scope| {
        if let Some(held) = held {
            scope.spawn(move || {
                // Whether the next call waits by now or not: it tells the error.
                std::thread::sleep(Duration::from_millis(100));
                held.signal(1);
            });
        }
        let end = group.all_reduce(&ones, SUM).deadline(Deadline::after(LONG)).wait();
        let text = describe(&end.unwrap_err());
        println!("rank {}: {text}", group.rank());
        match is_last {
            true => assert!(text.starts_with("TimedOut ") || text.starts_with("Stuck "), "{text}"),
            false => {
                assert!(text.starts_with(&format!("Failed {last} ")) || text.starts_with("Stuck "), "{text}")
            }
        }
    });
}

#[test]
fn an_error_that_comes_while_the_next_call_waits() {
    everywhere("an_error_that_comes_while_the_next_call_waits", &settings()[..1], nobody_asks_in_time);
}

/// The thread that looks for deadlines is held up, by a callback that takes long. The queue must not end its wait in its
/// place: it does not know whom it waited for.
fn held_up(rank: &Rank, group: Group) {
    let last = group.world() - 1;
    let mut own = queue(&group, &gpu(0));
    let ones = tensor(&group, &gpu(0), &[1i32; 100]);
    if group.rank() == last {
        group.all_reduce(&ones, SUM).on(&mut *own).unwrap().wait().unwrap();
        let held = hold(&group, &mut *own);
        let work = group.all_reduce(&ones, SUM).deadline(Deadline::after(LONG)).on(&mut *own).unwrap();
        await_key(rank, "heard");
        held.signal(1);
        let end = work.wait();
        rank.store.set("told", b"1").unwrap();
        // The other thread was held up before it came, and came in time after that.
        if rank.store.get_by("heard", Deadline::after(LONG)).unwrap() == b"before" {
            return;
        }
        let text = describe(&end.unwrap_err());
        assert!(text.contains(&format!("queue of rank {last} ")) || text.starts_with("Stuck "), "{text}");
        return;
    }
    let first = group.all_reduce(&ones, SUM).on(&mut *own).unwrap();
    let deadline = soon(1500);
    let held = Arc::new(AtomicBool::new(false));
    let holds = held.clone();
    // If it is over already, this thread is held up instead.
    first.on_over(move || {
        holds.store(true, Ordering::SeqCst);
        while !deadline.passed() {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(100));
    });
    if deadline.passed() {
        rank.store.set("heard", b"before").unwrap();
        let _ = group.all_reduce(&ones, SUM).deadline(soon(100)).on(&mut *own);
        await_key(rank, "told");
        return;
    }
    let work = group.all_reduce(&ones, SUM).deadline(deadline).on(&mut *own).unwrap();
    let end = Instant::now() + LONG;
    while !work.is_over() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    let text = describe(&work.wait().unwrap_err());
    rank.store.set("heard", b"1").unwrap();
    println!("rank {}: held {}: {text}", group.rank(), held.load(Ordering::SeqCst));
    // That this one ends would be news, too.
    await_key(rank, "told");
    assert!(text.starts_with("TimedOut ") && text.contains(&format!("queue of rank {last} ")), "{text}");
}

#[test]
fn hosts_end_operations_and_not_queues() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        return held_up(&rank, group);
    }
    gpus::run("hosts_end_operations_and_not_queues", 2, &settings()[0], &[]);
}

/// In strict mode a call gives the error itself.
#[test]
fn strict_mode_waits_for_the_end() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let last = group.world() - 1;
        let mut own = queue(&group, &gpu(0));
        let ones = tensor(&group, &gpu(0), &[1i32; 100]);
        let work = group.all_reduce(&ones, SUM).on(&mut *own).unwrap();
        assert!(work.is_over());
        if group.rank() == last {
            let held = hold(&group, &mut *own);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    await_key(&rank, "heard");
                    held.signal(1);
                });
                let end = group.all_reduce(&ones, SUM).deadline(Deadline::after(LONG)).on(&mut *own);
                assert!(end.is_err());
            });
        } else {
            let end = group.all_reduce(&ones, SUM).deadline(soon(1000)).on(&mut *own);
            let text = describe(&end.unwrap_err());
            assert!(
                text.starts_with("TimedOut | ") && text.contains(&format!("queue of rank {last}")),
                "{text}"
            );
            rank.store.set("heard", b"1").unwrap();
        }
        return;
    }
    let variables = [("TENSORWIRE_STRICT", "1".to_owned())];
    gpus::run("strict_mode_waits_for_the_end", 2, &settings()[0], &variables);
}

/// A hundred operations without a wait, while a queue is held: 32 are under way, and the next one waits.
fn many(_: &Rank, group: Group) {
    let (last, world) = (group.world() - 1, group.world() as i32);
    let mut own = queue(&group, &gpu(0));
    let called = Arc::new(AtomicUsize::new(0));
    let tensors: Vec<Tensor> = (0..100).map(|at| tensor(&group, &gpu(0), &[at; 50])).collect();
    let mut works = Vec::new();
    std::thread::scope(|scope| {
        let held = (group.rank() == last).then(|| hold(&group, &mut *own));
        let count = called.clone();
        if let Some(held) = held {
            scope.spawn(move || {
                let end = Instant::now() + LONG;
                while count.load(Ordering::SeqCst) < 32 && Instant::now() < end {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // Time for a 33rd that does not wait to show itself.
                std::thread::sleep(Duration::from_millis(50));
                assert_eq!(count.load(Ordering::SeqCst), 32);
                held.signal(1);
            });
        }
        for tensor in &tensors {
            works.push(group.all_reduce(tensor, SUM).on(&mut *own).unwrap());
            called.fetch_add(1, Ordering::SeqCst);
        }
    });
    for (work, (at, tensor)) in works.iter().zip(tensors.iter().enumerate()) {
        work.wait().unwrap();
        assert_eq!(tensor.to_vec::<i32>().unwrap(), [at as i32 * world; 50]);
    }

    // Many on the host, behind one that is held.
    let called = Arc::new(AtomicUsize::new(0));
    let one = tensor(&group, &gpu(0), &[1i32; 50]);
    let mut work = None;
    std::thread::scope(|scope| {
        if group.rank() == last {
            let (held, count) = (hold(&group, &mut *own), called.clone());
            scope.spawn(move || {
                let end = Instant::now() + LONG;
                while count.load(Ordering::SeqCst) < 31 && Instant::now() < end {
                    std::thread::sleep(Duration::from_millis(1));
                }
                std::thread::sleep(Duration::from_millis(50));
                assert!(count.load(Ordering::SeqCst) <= 32);
                held.signal(1);
            });
        }
        work = Some(group.all_reduce(&one, SUM).on(&mut *own).unwrap());
        for at in 0..200 {
            let host = Tensor::private(&vec![at; 1 + at as usize * 10]).unwrap();
            group.all_reduce(&host, SUM).wait().unwrap();
            assert!(host.to_vec::<i32>().unwrap().iter().all(|&value| value == at * world));
            called.fetch_add(1, Ordering::SeqCst);
        }
    });
    work.unwrap().wait().unwrap();
    assert_eq!(one.to_vec::<i32>().unwrap(), [world; 50]);
    group.barrier().wait().unwrap();
}

#[test]
fn too_many_operations_wait() {
    everywhere("too_many_operations_wait", &settings()[..1], many);
}

fn interrupted<T>(when: impl Fn() -> bool + 'static, body: impl FnOnce() -> T) -> T {
    let look = move || match when() {
        true => Err(Error::Interrupted("somebody pressed a key".into())),
        false => Ok(()),
    };
    interrupt::with_interrupt(Rc::new(look), body)
}

/// The first rank does not want to wait any more: where another rank has not come, and where its queue has not.
fn no_more(rank: &Rank, group: Group) {
    let last = group.world() - 1;
    let all: Vec<usize> = (0..group.world()).collect();
    let mut own = queue(&group, &gpu(0));
    let ones = tensor(&group, &gpu(0), &[1i32; 100]);
    let is_ours = |end: &Result<()>| {
        assert!(matches!(end, Err(Error::Interrupted(_))), "{}", outcome(end));
    };
    let names = |text: &str| {
        assert!(text.starts_with("Failed 0 | rank 0 (host ") && text.contains("pressed a key"), "{text}");
    };
    // The last one has not called.
    for way in 0..2 {
        let key = format!("gone {way}");
        if group.rank() == 0 {
            let call = group.all_reduce(&ones, SUM);
            let end = interrupted(
                || true,
                || match way {
                    0 => call.wait(),
                    _ => call.on(&mut *own).map(drop),
                },
            );
            is_ours(&end);
            rank.store.set(&key, b"1").unwrap();
        } else {
            if group.rank() == last {
                await_key(rank, &key);
            }
            let call = group.all_reduce(&ones, SUM);
            let end = if way == 0 { call.wait() } else { call.on(&mut *own).and_then(|work| work.wait()) };
            names(&describe(&end.unwrap_err()));
        }
        works(&group, &gpu(0));
    }
    // Its queue is held. On a busy machine that may be for more than a second, which breaks the group.
    for round in 0..5 {
        let group = group.subgroup(&all).unwrap();
        let (key, stuck) = (format!("interrupted {round}"), format!("stuck {round}"));
        let call = || group.all_reduce(&ones, SUM).wait();
        let heard = |text: &str| {
            text.starts_with("Stuck ") || {
                names(text);
                false
            }
        };
        if group.rank() == last {
            let held = hold(&group, &mut *own);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    await_key(rank, &key);
                    held.signal(1);
                });
                let end = group.all_reduce(&ones, SUM).on(&mut *own).and_then(|work| work.wait());
                let text = describe(&end.unwrap_err());
                println!("round {round}: {text}");
                rank.store.set(&stuck, if heard(&text) { b"1" } else { b"0" }).unwrap();
            });
        } else if group.rank() == 0 {
            // When its steps are queued: then nobody waits on the host.
            let queued = Arc::new(AtomicBool::new(false));
            let seen = queued.clone();
            hooks::set(move |point| {
                if point.step > 2 {
                    seen.store(true, Ordering::SeqCst);
                }
            });
            let end = interrupted(move || queued.load(Ordering::SeqCst), call);
            hooks::clear();
            is_ours(&end);
            rank.store.set(&key, b"1").unwrap();
        } else {
            heard(&describe(&call().unwrap_err()));
        }
        if rank.store.get_by(&stuck, Deadline::after(LONG)).unwrap() == b"0" {
            works(&group, &gpu(0));
            return;
        }
    }
    panic!("the queue was held for more than a second, five times");
}

#[test]
fn callers_who_do_not_wait_any_more() {
    everywhere("callers_who_do_not_wait_any_more", &settings()[..1], no_more);
}

/// Two queues and two groups at once, with delays before commands.
fn at_random(rank: &Rank, group: Group) {
    let seed: u64 = gpus::variable("SEED").parse().unwrap();
    let mut dice = model::Dice::new(seed ^ (rank.rank as u64) << 32);
    let numbers: Vec<u64> = (0..4096).map(|_| dice.next()).collect();
    hook::set(move |step| match numbers[step.number as usize % numbers.len()] % 16 {
        0 => std::thread::sleep(Duration::from_millis(2)),
        1..4 => std::thread::sleep(Duration::from_micros(200)),
        4..8 => std::thread::yield_now(),
        _ => {}
    });
    let rounds: i64 = std::env::var("TEST_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(200);
    let world = group.world() as i64;
    let backwards: Vec<usize> = (0..group.world()).rev().collect();
    let other = group.subgroup(&backwards).unwrap();
    let device = gpu(rank.rank % 2);
    let groups = [group, other];
    std::thread::scope(|scope| {
        for (index, group) in groups.iter().enumerate() {
            let device = &device;
            scope.spawn(move || {
                let mut queues = [0, 1].map(|_| queue(group, device));
                let mut open = std::collections::VecDeque::new();
                for round in 0..rounds {
                    let which = (round % 2) as usize;
                    let mine = group.rank() as i64 + round + index as i64;
                    let one = tensor(group, device, &vec![mine; 300 + round as usize]);
                    let work = group.all_reduce(&one, SUM).on(&mut *queues[which]).unwrap();
                    work.wait_on(&mut *queues[1 - which]).unwrap();
                    // The other queue takes what this one gave.
                    let again = group.all_reduce(&one, SUM).on(&mut *queues[1 - which]).unwrap();
                    again.wait_on(&mut *queues[which]).unwrap();
                    open.push_back((round, one, [work, again]));
                    while open.len() > if round + 1 == rounds { 0 } else { 5 } {
                        let (round, one, works) = open.pop_front().unwrap();
                        works.iter().for_each(|work| work.wait().unwrap());
                        let sum: i64 = (0..world).map(|rank| rank + round + index as i64).sum();
                        let all = one.to_vec::<i64>().unwrap();
                        assert!(all.iter().all(|&value| value == sum * world), "seed {seed}, round {round}");
                    }
                }
            });
        }
    });
    hook::clear();
}

#[test]
fn two_queues_and_two_groups_with_delays() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        return at_random(&rank, group);
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let seed: u64 = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(now);
    println!("SEED={seed}");
    for (settings, world) in gpus::all_settings().iter().zip([4, 2, 3]) {
        gpus::run("two_queues_and_two_groups_with_delays", world, settings, &[("SEED", seed.to_string())]);
    }
}

/// An operation in line, behind one for which a rank has not come, ends by its own deadline and by its caller's hook.
fn in_line(rank: &Rank, group: Group) {
    let last = group.world() - 1;
    let mut own = queue(&group, &gpu(0));
    let ones = tensor(&group, &gpu(0), &[1i32; 100]);
    for way in 0..4 {
        let key = format!("gone {way}");
        let host = Tensor::private(&[1i32; 100]).unwrap();
        if group.rank() == last {
            await_key(rank, &key);
        }
        let before = group.all_reduce(&host, SUM).start().unwrap();
        let mut call = group.all_reduce(&ones, SUM);
        if group.rank() == 0 && way < 2 {
            call = call.deadline(soon(300));
        }
        let run = || match way % 2 {
            0 => call.wait(),
            _ => call.on(&mut *own).and_then(|work| work.wait()),
        };
        let end = if group.rank() == 0 && way >= 2 { interrupted(|| true, run) } else { run() };
        if group.rank() == 0 {
            rank.store.set(&key, b"1").unwrap();
        }
        let text = describe(&end.unwrap_err());
        println!("rank {}, way {way}: {text}", group.rank());
        match (group.rank(), way) {
            (0, 0 | 1) => assert!(text.starts_with("TimedOut | "), "{text}"),
            (0, _) => assert!(text.contains("pressed a key"), "{text}"),
            _ => assert!(text.contains("rank 0 (host "), "{text}"),
        }
        before.wait().unwrap();
        assert_eq!(host.to_vec::<i32>().unwrap(), [group.world() as i32; 100]);
        assert_eq!(ones.to_vec::<i32>().unwrap(), [1; 100]);
        works(&group, &gpu(0));
    }
    group.close().unwrap();
}

#[test]
fn a_call_in_line_ends_by_its_deadline() {
    everywhere("a_call_in_line_ends_by_its_deadline", &settings()[..1], in_line);
}
