//! A GPU passes the conformance suite; and what only a GPU can be asked. Without one, the tests say so and pass; with
//! TEST_GPU=1 they fail.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod conformance;
mod golden_cases;
mod process;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tensorwire_device::cuda::{self, CudaProbe, Gpu};
use tensorwire_device::flag::{LINE, Writer};
use tensorwire_device::gpu::{Access, Probe};
use tensorwire_device::host::Host;
use tensorwire_device::{
    Abort, Caching, Deadline, Device, Dtype, Error, Flag, Handle, ReduceOp, Region, Span,
};

use crate::process::soon;

conformance::tests!(gpu().map(|gpu| Subject { device: Box::new(gpu) }));

/// The first GPU, opened once.
fn gpu() -> Option<Gpu> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    GPU.get_or_init(|| match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            assert!(std::env::var_os("TEST_GPU").is_none(), "{error}");
            process::skip(error);
            None
        }
    })
    .clone()
}

#[test]
fn child() {
    if let (Some(role), Some(subject)) = (process::role(), subject()) {
        match role.as_str() {
            "forks" => a_forked_child_is_told(&gpu().unwrap()),
            "operations" => operations_are_queued_behind_each_other(&gpu().unwrap()),
            "signals" => {
                let home = process::call_home().unwrap();
                let (bytes, fds) = home.recv(soon()).unwrap();
                let region = Host.import(Handle::decode(&bytes, fds).unwrap()).unwrap();
                let mut queue = gpu().unwrap().queue().unwrap();
                for turn in 1..=TURNS {
                    // Some by the host, some by a queue.
                    for index in 0..7 {
                        let line = Span::new(region.clone(), index * LINE..(index + 1) * LINE).unwrap();
                        let flag = Flag::new(&line, Writer::Device).unwrap();
                        match (index + turn as usize).is_multiple_of(3) {
                            true => flag.signal(turn),
                            false => queue.signal(&flag, turn).unwrap(),
                        }
                    }
                    let line = Span::new(region.clone(), 8 * LINE..9 * LINE).unwrap();
                    let done = Flag::new(&line, Writer::Device).unwrap();
                    done.wait(turn, &Abort::local(), soon()).unwrap();
                }
                queue.finish(&Abort::local(), soon()).unwrap();
            }
            "waits" => everything_ends_while_streams_wait(&gpu().unwrap()),
            "opens" => {
                let home = process::call_home().unwrap();
                let (bytes, fds) = home.recv(soon()).unwrap();
                let region = subject.device.import(Handle::decode(&bytes, fds).unwrap()).unwrap();
                let span = Span::whole(region);
                assert!(span.to_vec().unwrap() == vec![1; 5000]);
                span.write(0, &[2; 5000]).unwrap();
                // It came by a legacy handle, which can be handed on: a third process opens what its maker made.
                let again = span.region().export().unwrap();
                assert_eq!((again.len(), again.encode()), (span.len(), bytes));
                home.send(b"done", &[], soon()).unwrap();
                assert_eq!(home.recv(soon()).unwrap().0, b"over");
            }
            role => conformance::processes::child(role, &subject),
        }
    }
}

/// Turns of the flags that another process signals.
const TURNS: u32 = 200;

/// Flags and an abort word in host memory.
fn lines(count: usize) -> Vec<Span> {
    let span = Span::whole(Host.alloc(count * LINE).unwrap());
    (0..count).map(|index| span.slice(index * LINE..(index + 1) * LINE).unwrap()).collect()
}

#[test]
fn without_a_driver_the_reason_is_said() {
    if cuda::count().is_ok() {
        return;
    }
    for error in [cuda::count().unwrap_err(), Gpu::open(0).unwrap_err(), CudaProbe::new().unwrap_err()] {
        assert!(matches!(&error, Error::Unsupported { what, .. } if what == "CUDA"), "{error:?}");
        assert!(error.to_string().contains("libcuda"), "{error}");
    }
}

#[test]
fn a_gpu_that_is_not_there_is_wrong_usage() {
    let Some(_) = gpu() else { return };
    let error = Gpu::open(99).unwrap_err();
    assert!(matches!(&error, Error::Misuse(text) if text.contains("GPU 99")), "{error:?}");
    assert!(matches!(Gpu::open_uuid([1; 16]), Err(Error::Unsupported { .. })));
}

#[test]
fn kernels_give_the_golden_bits() {
    let Some(gpu) = gpu() else { return };
    for (line, case) in golden_cases::cases().enumerate() {
        let size = case.dtype.size();
        // Alone, and long enough for packs, a head and a rest, at odd places.
        let places = [
            (case.output.len() / size, 0),
            (4096 + 37 + line % 11, line % 3 * size),
            (2048 + 5, 1 + line % 3),
        ];
        places.into_iter().for_each(|(count, offset)| golden(&gpu, line, &case, count, offset));
    }
}

/// Every kernel once: short enough for a sanitizer.
#[test]
fn short_golden_bits() {
    let Some(gpu) = gpu() else { return };
    let mut seen = Vec::new();
    for (line, case) in golden_cases::cases().enumerate() {
        let pair = (case.op.name(), case.dtype);
        if !seen.contains(&pair) {
            seen.push(pair);
            golden(&gpu, line, &case, 1000 + line, line % 2 * case.dtype.size());
        }
    }
}

/// One case with so many elements at a place, to an output apart and in place of an input.
fn golden(gpu: &Gpu, line: usize, case: &golden_cases::Case, count: usize, offset: usize) {
    let mut queue = gpu.queue().unwrap();
    let abort = Abort::new(&lines(1)[0]).unwrap();
    let len = count * case.dtype.size();
    let cycle = |bytes: &[u8]| bytes.iter().copied().cycle().take(len).collect::<Vec<_>>();
    let lay = |bytes: &[u8]| {
        let all = gpu.take(len + offset + 64).unwrap();
        all.write(0, &[&vec![0xa5; offset][..], bytes, &[0xa5; 64]].concat()).unwrap();
        (Span::new(all.clone(), offset..offset + len).unwrap(), Span::whole(all))
    };
    let inputs: Vec<_> = case.inputs.iter().map(|input| lay(&cycle(input))).collect();
    let apart = lay(&vec![0; len]);
    let outputs = [&apart, &inputs[line % inputs.len()]];
    let from: Vec<_> = inputs.iter().map(|(part, _)| part.view()).collect();
    let into: Vec<_> = outputs.iter().map(|(part, _)| part.view()).collect();
    queue.reduce(case.op, case.dtype, &from, &into, Caching::Keep).unwrap();
    queue.finish(&abort, soon()).unwrap();
    for (_, all) in outputs {
        let all = all.to_vec().unwrap();
        case.compare(&all[offset..offset + len], &cycle(&case.output), &format!("line {}", line + 1));
        let untouched = |bytes: &[u8]| bytes.iter().all(|&byte| byte == 0xa5);
        assert!(untouched(&all[..offset]) && untouched(&all[offset + len..]), "line {}", line + 1);
    }
}

#[test]
fn host_memory_is_copied_from_and_to() {
    let Some(gpu) = gpu() else { return };
    let mut queue = gpu.queue().unwrap();
    let abort = Abort::new(&lines(1)[0]).unwrap();
    let bytes: Vec<u8> = (0..3_000_001_u32).map(|index| ((index * 7) >> 3) as u8).collect();
    for host in [Host.alloc(bytes.len()).unwrap(), tensorwire_device::host::private(bytes.len()).unwrap()] {
        let (host, there, back) = (
            Span::whole(host),
            Span::whole(gpu.alloc(bytes.len()).unwrap()),
            Span::whole(Host.alloc(bytes.len()).unwrap()),
        );
        host.write(0, &bytes).unwrap();
        queue.copy(there.view(), host.view(), Caching::Keep).unwrap();
        queue.copy(back.view(), there.view(), Caching::Keep).unwrap();
        queue.finish(&abort, soon()).unwrap();
        assert!(back.to_vec().unwrap() == bytes && there.to_vec().unwrap() == bytes);
    }
}

/// How many streams may wait at once: none under MPS.
fn most_waiting() -> usize {
    if std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").is_some() {
        return 0;
    }
    std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok().map_or(8, |text| text.parse::<usize>().unwrap()) / 2
}

/// Streams of somebody else: the default ones, which every program has.
#[test]
fn work_is_queued_on_the_callers_stream() {
    let Some(gpu) = gpu() else { return };
    let abort = Abort::new(&lines(1)[0]).unwrap();
    // Each thread has its own of that number.
    // SAFETY: it is refused.
    assert!(matches!(unsafe { gpu.queue_on(2) }, Err(Error::Misuse(_))));
    for stream in [0, 1] {
        // SAFETY: the default stream, by its two names, always lives.
        let mut queue = unsafe { gpu.queue_on(stream) }.unwrap();
        let (from, into) = (gpu.alloc(5000).unwrap(), gpu.alloc(5000).unwrap());
        from.write(0, &[8; 5000]).unwrap();
        queue.copy(Span::whole(into.clone()).view(), Span::whole(from).view(), Caching::Keep).unwrap();
        queue.finish(&abort, soon()).unwrap();
        assert!(Span::whole(into).to_vec().unwrap() == [8; 5000]);
    }
}

/// Blocks of a pool of host memory are registered with their segments: they may share pages.
#[test]
fn blocks_of_host_memory_are_reached() {
    let Some(gpu) = gpu() else { return };
    let pool = tensorwire_device::pool::Pool::new(Arc::new(Host));
    let abort = Abort::new(&lines(1)[0]).unwrap();
    let mut queue = gpu.queue().unwrap();
    let there = Span::whole(gpu.alloc(2000).unwrap());
    let registered = gpu.usage().registered;
    for round in 0..50_u8 {
        let (from, into) = (pool.alloc(2000).unwrap(), pool.alloc(2000).unwrap());
        from.write(0, &[round; 2000]).unwrap();
        queue.copy(there.view(), Span::whole(from).view(), Caching::Keep).unwrap();
        queue.copy(Span::whole(into.clone()).view(), there.view(), Caching::Keep).unwrap();
        queue.finish(&abort, soon()).unwrap();
        assert!(Span::whole(into).to_vec().unwrap() == [round; 2000]);
    }
    // One segment. Other tests register at the same time, but not so much.
    assert!(gpu.usage().registered < registered + (64 << 20), "{:?}", gpu.usage());
}

/// Memory of cudaMalloc, from the middle of its allocation.
#[test]
fn legacy_memory_crosses_processes() {
    let Some(gpu) = gpu() else { return };
    let owner = gpu.plain(3 << 20).unwrap();
    // SAFETY: memory that `owner` holds; nobody refers to it.
    let region = unsafe { gpu.adopt(owner.addr() + (1 << 20), 5000, Box::new(owner.clone())) }.unwrap();
    region.write(0, &[1; 5000]).unwrap();
    let handle = region.export().unwrap();
    assert!(handle.fd().is_none(), "{handle:?}");
    let home = process::Home::open();
    let mut child = process::Child::start(home.invite(&mut process::command("opens")));
    let connection = home.answer().unwrap();
    connection.send(&handle.encode(), &[], soon()).unwrap();
    assert_eq!(connection.recv(soon()).unwrap().0, b"done");
    assert!(Span::whole(region).to_vec().unwrap() == vec![2; 5000]);
    connection.send(b"over", &[], soon()).unwrap();
    child.succeed();
}

/// Virtual memory that is made of several allocations, as torch's expandable segments are.
#[test]
fn several_allocations_are_one_region() {
    let Some(gpu) = gpu() else { return };
    let (first, second) = (gpu.alloc(2 << 20).unwrap(), gpu.alloc(4 << 20).unwrap());
    let (Handle::Gpu(mut all), Handle::Gpu(more)) = (first.export().unwrap(), second.export().unwrap())
    else {
        panic!("another handle")
    };
    all.chunks.extend(more.chunks);
    all.len = 6 << 20;
    let both = gpu.import(Handle::Gpu(all)).unwrap();
    both.write((2 << 20) - 50, &[7; 100]).unwrap();
    assert!(Span::new(first, (2 << 20) - 50..2 << 20).unwrap().to_vec().unwrap() == [7; 50]);
    assert!(Span::new(second, 0..50).unwrap().to_vec().unwrap() == [7; 50]);
    // Memory of another allocator that crosses from one to the other: both are found by their addresses.
    // SAFETY: memory that `both` holds; nobody refers to it.
    let foreign = unsafe { gpu.adopt(both.addr() + (2 << 20) - 50, 100, Box::new(both.clone())) }.unwrap();
    match foreign.export() {
        Ok(handle) => {
            let Handle::Gpu(found) = &handle else { panic!("another handle") };
            assert_eq!((found.chunks.len(), found.offset), (2, (2 << 20) - 50));
            assert!(Span::whole(gpu.import(handle).unwrap()).to_vec().unwrap() == [7; 100]);
        }
        // The driver does not export what was imported.
        Err(error) => assert!(
            matches!(&error, Error::Unsupported { have, .. } if have.contains("without a way")),
            "{error:?}"
        ),
    }
}

#[test]
fn nothing_hangs_while_streams_wait() {
    if gpu().is_some() {
        process::Child::start(&mut process::command("waits")).succeed();
    }
}

/// While streams wait, all other calls of ours end. In a process of its own, where no other stream waits.
fn everything_ends_while_streams_wait(gpu: &Gpu) {
    let lines = lines(4);
    let (never, abort) = (Flag::new(&lines[0], Writer::Host).unwrap(), Abort::new(&lines[1]).unwrap());
    let forever = Deadline::after(Duration::from_secs(600));
    // Not more than may wait: one more would wait on this thread.
    let most = most_waiting();
    let mut waiting: Vec<_> = (0..most).map(|_| gpu.queue().unwrap()).collect();
    for queue in &mut waiting {
        queue.wait(&never, 1, &abort, forever).unwrap();
    }
    let late = Deadline::after(Duration::from_millis(20));
    let one_more = gpu.queue().unwrap().wait(&never, 1, &Abort::new(&lines[3]).unwrap(), late);
    assert!(matches!(one_more, Err(Error::TimedOut)), "{one_more:?}");
    let usage = gpu.usage();
    assert_eq!((usage.stream_waits, usage.caller_waits), (most as u64, 1));
    let begin = Instant::now();
    let took = |what: &str| eprintln!("{what}: {:?} with {most} waiting", begin.elapsed());
    let region = gpu.alloc(1 << 20).unwrap();
    took("alloc");
    region.write(0, &[7; 1 << 20]).unwrap();
    let mut bytes = vec![0; 1 << 20];
    region.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 7));
    took("write and read");
    let again = gpu.import(region.export().unwrap()).unwrap();
    took("export and import");
    let other = Span::whole(Host.alloc(1 << 20).unwrap());
    let quiet = Abort::new(&lines[2]).unwrap();
    let mut queue = gpu.queue().unwrap();
    queue.copy(other.view(), Span::whole(region.clone()).view(), Caching::Keep).unwrap();
    let (a, b) = (Span::whole(region.clone()), Span::whole(gpu.alloc(1 << 20).unwrap()));
    queue.reduce(ReduceOp::Sum, Dtype::U8, &[a.view(), b.view()], &[b.view()], Caching::Keep).unwrap();
    // It may share a hardware queue with one that waits: then it ends by its deadline, and does not hang.
    let ended = queue.finish(&quiet, Deadline::after(Duration::from_secs(5)));
    took(&format!("copy, reduce and finish ({ended:?})"));
    drop((queue, again, region, a, b, other));
    took("drop");
    assert!(begin.elapsed() < Duration::from_secs(60));
    abort.set(5);
    for queue in &mut waiting {
        assert!(matches!(queue.finish(&abort, soon()), Err(Error::Aborted)));
    }
    took("abort");
}

/// Behind a wait that an abort has ended, nothing is written.
#[test]
fn a_released_wait_is_no_success() {
    let Some(gpu) = gpu() else { return };
    let lines = lines(3);
    let (flag, abort) = (Flag::new(&lines[0], Writer::Host).unwrap(), Abort::new(&lines[1]).unwrap());
    let (src, dst, sum) = (gpu.alloc(4096).unwrap(), gpu.alloc(4096).unwrap(), gpu.alloc(4096).unwrap());
    src.write(0, &[9; 4096]).unwrap();
    let view = |region: &std::sync::Arc<dyn Region>| Span::whole(region.clone());
    let mut queue = gpu.queue().unwrap();
    // Where too many streams wait already, the wait is the caller's, and nothing is queued behind it.
    match queue.wait(&flag, 1, &abort, Deadline::after(Duration::from_millis(50))) {
        Err(Error::TimedOut) => return process::skip("too many streams wait"),
        queued => queued.unwrap(),
    }
    queue.copy(view(&dst).view(), view(&src).view(), Caching::Keep).unwrap();
    queue
        .reduce(ReduceOp::Sum, Dtype::I32, &[view(&src).view()], &[view(&sum).view()], Caching::Keep)
        .unwrap();
    assert!(matches!(queue.finish(&abort, soon()), Err(Error::TimedOut)));
    assert_eq!(abort.code(), Some(Abort::LATE));
    for region in [dst, sum] {
        assert_eq!(view(&region).to_vec().unwrap(), [0; 4096]);
    }
}

#[test]
fn many_operations_wait_behind_each_other() {
    if gpu().is_none() {
        return;
    }
    if most_waiting() == 0 {
        return process::skip("streams do not wait here");
    }
    process::Child::start(&mut process::command("operations")).succeed();
}

/// A hundred operations with verdicts of their own, all queued while the first one waits. Some are given up before they begin.
/// In a process of its own, where no other stream waits.
fn operations_are_queued_behind_each_other(gpu: &Gpu) {
    const OPERATIONS: usize = 100;
    const LEN: usize = 100_000;
    let lines = lines(2 * OPERATIONS + 1);
    let flags: Vec<_> =
        lines[..OPERATIONS].iter().map(|line| Flag::new(line, Writer::Host).unwrap()).collect();
    let words: Vec<_> = lines[OPERATIONS..].iter().map(|line| Abort::new(line).unwrap()).collect();
    let group = &words[OPERATIONS];
    let one = Span::whole(gpu.alloc(LEN).unwrap());
    one.write(0, &[1; LEN]).unwrap();
    let results: Vec<_> = (0..OPERATIONS).map(|_| Span::whole(gpu.alloc(LEN).unwrap())).collect();
    let mut queue = gpu.queue().unwrap();
    for i in 0..OPERATIONS {
        queue.begin(None).unwrap();
        queue.wait_all(&[(&flags[i], 1)], &words[i].or(group), soon()).unwrap();
        // By each kind of kernel.
        let (from, into) = (one.view(), results[i].view());
        match i % 3 {
            0 => queue.reduce(ReduceOp::Sum, Dtype::U8, &[from], &[into], Caching::Keep).unwrap(),
            1 => queue.copy(into, from, Caching::Keep).unwrap(),
            _ => {
                let half =
                    |span: &Span, part: usize| span.slice(part * LEN / 2..(part + 1) * LEN / 2).unwrap();
                let (to, of) = ([half(&results[i], 0), half(&results[i], 1)], [half(&one, 0), half(&one, 1)]);
                let copies = [(to[0].view(), of[0].view()), (to[1].view(), of[1].view())];
                queue.copy_all(&copies, Caching::Keep).unwrap();
            }
        }
    }
    assert_eq!(gpu.usage().caller_waits, 0);
    assert!(!queue.mark().unwrap().is_passed().unwrap());
    let given_up = |i: usize| i % 7 == 3;
    (0..OPERATIONS).filter(|i| given_up(*i)).for_each(|i| {
        words[i].set(5);
    });
    flags.iter().for_each(|flag| flag.signal(1));
    // One of them was given up: that is said at the end.
    let ended = queue.finish(group, soon());
    assert!(matches!(ended, Ok(()) | Err(Error::Aborted)), "{ended:?}");
    for (i, result) in results.iter().enumerate() {
        let expected = if given_up(i) { 0 } else { 1 };
        assert!(result.to_vec().unwrap() == [expected; LEN], "operation {i}");
    }
    assert!(!group.is_set());
}

/// Its verdict says so, and the word that others share is left alone.
#[test]
fn a_late_operation_ends_alone() {
    let Some(gpu) = gpu() else { return };
    let lines = lines(3);
    let flag = Flag::new(&lines[0], Writer::Host).unwrap();
    let [verdict, group] = [&lines[1], &lines[2]].map(|line| Abort::new(line).unwrap());
    let (src, dst) = (Span::whole(gpu.alloc(4096).unwrap()), Span::whole(gpu.alloc(4096).unwrap()));
    src.write(0, &[9; 4096]).unwrap();
    let mut queue = gpu.queue().unwrap();
    match queue.wait(&flag, 1, &verdict.or(&group), Deadline::after(Duration::from_millis(50))) {
        Err(Error::TimedOut) => return process::skip("too many streams wait"),
        queued => queued.unwrap(),
    }
    queue.copy(dst.view(), src.view(), Caching::Keep).unwrap();
    assert!(matches!(queue.finish(&group, soon()), Err(Error::TimedOut)));
    assert_eq!((verdict.code(), group.code()), (Some(Abort::LATE), None));
    assert!(dst.to_vec().unwrap() == [0; 4096]);
    // The queue goes on.
    queue.begin(None).unwrap();
    queue.copy(dst.view(), src.view(), Caching::Keep).unwrap();
    queue.finish(&group, soon()).unwrap();
    assert!(dst.to_vec().unwrap() == [9; 4096]);
}

/// Two streams take turns, each behind the other's mark, and the host does not wait in between.
#[test]
fn streams_follow_each_other() {
    let Some(gpu) = gpu() else { return };
    let abort = Abort::new(&lines(1)[0]).unwrap();
    let mut queues = [gpu.queue().unwrap(), gpu.queue().unwrap()];
    let spans: Vec<_> = (0..2).map(|_| Span::whole(gpu.alloc(4 << 20).unwrap())).collect();
    let one = Span::whole(gpu.alloc(4 << 20).unwrap());
    one.write(0, &vec![1; 4 << 20]).unwrap();
    let mut mark = tensorwire_device::Mark::passed();
    for turn in 0..200 {
        let (queue, from, into) = (&mut queues[turn % 2], &spans[turn % 2], &spans[1 - turn % 2]);
        queue.begin(None).unwrap();
        queue.follow(&mark, &abort, soon()).unwrap();
        let inputs = [from.view(), one.view()];
        queue.reduce(ReduceOp::Sum, Dtype::U8, &inputs, &[into.view()], Caching::Keep).unwrap();
        mark = queue.mark().unwrap();
    }
    mark.wait(&abort, soon()).unwrap();
    assert!(spans[0].to_vec().unwrap() == vec![200; 4 << 20]);
    queues.iter_mut().for_each(|queue| queue.finish(&abort, soon()).unwrap());
}

#[test]
fn seven_flags_of_another_process_end_one_wait() {
    let Some(gpu) = gpu() else { return };
    let home = process::Home::open();
    let mut child = process::Child::start(home.invite(&mut process::command("signals")));
    let connection = home.answer().unwrap();
    let region = Host.alloc(9 * LINE).unwrap();
    let handle = region.export().unwrap();
    let fds: Vec<_> = handle.fds().collect();
    connection.send(&handle.encode(), &fds, soon()).unwrap();
    let line = |index: usize| Span::new(region.clone(), index * LINE..(index + 1) * LINE).unwrap();
    let flags: Vec<_> = (0..7).map(|index| Flag::new(&line(index), Writer::Device).unwrap()).collect();
    let (abort, done) = (Abort::new(&line(7)).unwrap(), Flag::new(&line(8), Writer::Device).unwrap());
    let mut queue = gpu.queue().unwrap();
    for turn in 1..=TURNS {
        queue.begin(None).unwrap();
        let all: Vec<_> = flags.iter().map(|flag| (flag, turn)).collect();
        queue.wait_all(&all, &abort, soon()).unwrap();
        queue.signal(&done, turn).unwrap();
        done.wait(turn, &abort, soon()).unwrap();
        assert!(flags.iter().all(|flag| flag.reached(turn)), "turn {turn}");
    }
    queue.finish(&abort, soon()).unwrap();
    child.succeed();
}

/// Launches with all blocks that the GPU has room for, on several streams at once, all of which look at abort words. None of
/// them may wait for a block that has no room.
#[test]
fn large_launches_look_at_abort_words_at_the_same_time() {
    let Some(gpu) = gpu() else { return };
    const LEN: usize = 32 << 20;
    let lines = lines(3);
    let flag = Flag::new(&lines[0], Writer::Host).unwrap();
    let [verdict, group] = [&lines[1], &lines[2]].map(|line| Abort::new(line).unwrap());
    let mut before = gpu.queue().unwrap();
    let spans: Vec<_> = (0..4).map(|_| [0; 2].map(|_| Span::whole(gpu.alloc(LEN).unwrap()))).collect();
    for [from, _] in &spans {
        from.write(0, &vec![3; LEN]).unwrap();
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            flag.signal(1);
        });
        before.wait(&flag, 1, &verdict.or(&group), soon()).unwrap();
        let mark = before.mark().unwrap();
        let mut queues: Vec<_> = spans.iter().map(|_| gpu.queue().unwrap()).collect();
        for _ in 0..50 {
            for (queue, [from, into]) in queues.iter_mut().zip(&spans) {
                queue.follow(&mark, &verdict.or(&group), soon()).unwrap();
                let (from, into) = (from.view(), into.view());
                queue.reduce(ReduceOp::Sum, Dtype::U8, &[from, into], &[into], Caching::Keep).unwrap();
            }
        }
        queues.iter_mut().for_each(|queue| queue.finish(&group, soon()).unwrap());
    });
    for [_, into] in &spans {
        assert!(into.to_vec().unwrap() == vec![150; LEN]);
    }
}

#[test]
fn regions_go_when_nobody_calls_the_queue() {
    let Some(gpu) = gpu() else { return };
    let mut queue = gpu.queue().unwrap();
    let (src, dst) = (gpu.alloc(4096).unwrap(), Span::whole(gpu.alloc(4096).unwrap()));
    queue.copy(dst.view(), Span::whole(src.clone()).view(), Caching::Keep).unwrap();
    let kept = Arc::downgrade(&src);
    drop(src);
    let until = Instant::now() + Duration::from_secs(30);
    while kept.strong_count() > 0 {
        assert!(Instant::now() < until, "the region is still kept");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn regions_stay_until_the_work_is_done() {
    let Some(gpu) = gpu() else { return };
    let lines = lines(2);
    let (gate, abort) = (Flag::new(&lines[0], Writer::Host).unwrap(), Abort::new(&lines[1]).unwrap());
    let dst = Span::whole(gpu.alloc(1 << 20).unwrap());
    let mut queue = gpu.queue().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            gate.signal(1);
        });
        queue.wait(&gate, 1, &abort, soon()).unwrap();
        let src = Span::whole(gpu.alloc(1 << 20).unwrap());
        src.write(0, &[3; 1 << 20]).unwrap();
        queue.copy(dst.view(), src.view(), Caching::Keep).unwrap();
        drop(src);
        // The address might be given out again.
        let _others: Vec<_> = (0..8).map(|_| gpu.alloc(1 << 20).unwrap()).collect();
        // A queue that is dropped goes on by itself.
        drop(queue);
        let until = Instant::now() + Duration::from_secs(30);
        while dst.to_vec().unwrap() != vec![3; 1 << 20] {
            assert!(Instant::now() < until, "the copy was not done");
        }
    });
}

#[test]
fn memory_is_given_back() {
    let Some(gpu) = gpu() else { return };
    let cycle = || {
        let region = gpu.alloc(64 << 20).unwrap();
        let again = gpu.import(region.export().unwrap()).unwrap();
        let third = gpu.import(again.export().unwrap()).unwrap();
        drop(region);
        assert_eq!(third.len(), 64 << 20);
    };
    cycle();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (before, fds) = (gpu.memory_info().unwrap().0, descriptors());
    (0..100).for_each(|_| cycle());
    // Other tests allocate at the same time, but not gigabytes.
    let after = gpu.memory_info().unwrap().0;
    assert!(before.abs_diff(after) < 4 << 30, "{before} bytes were free, {after} are");
    assert!(descriptors() < fds + 50, "{} descriptors, {fds} before", descriptors());
}

#[test]
fn too_much_memory_is_refused_with_sizes() {
    let Some(gpu) = gpu() else { return };
    let error = gpu.alloc(1 << 45).unwrap_err();
    assert!(error.to_string().contains(&(1_usize << 45).to_string()), "{error}");
}

#[test]
fn odd_handles_are_refused() {
    let Some(gpu) = gpu() else { return };
    let region = gpu.alloc(1000).unwrap();
    let Handle::Gpu(mut handle) = region.export().unwrap() else { panic!("another handle") };
    // More than there is.
    handle.chunks[0].size *= 2;
    handle.len = handle.chunks[0].size;
    let error = gpu.import(Handle::Gpu(handle)).unwrap_err();
    assert!(matches!(&error, Error::Refused(_)), "{error:?}");
    // Another GPU's.
    let Handle::Gpu(mut handle) = region.export().unwrap() else { panic!("another handle") };
    handle.device = [9; 16];
    assert!(matches!(gpu.import(Handle::Gpu(handle)), Err(Error::Misuse(_))));
    // No memory at all.
    let Handle::Gpu(mut handle) = region.export().unwrap() else { panic!("another handle") };
    let Handle::Memfd { fd, .. } = Host.alloc(4096).unwrap().export().unwrap() else {
        panic!("another handle")
    };
    handle.chunks[0].means = tensorwire_device::handle::Means::Fd(fd);
    let error = gpu.import(Handle::Gpu(handle)).unwrap_err();
    assert!(matches!(&error, Error::Refused(_)), "{error:?}");
    assert!(Host.import(region.export().unwrap()).is_err());
}

#[test]
fn the_driver_is_asked_and_tried() {
    let Some(gpu) = gpu() else { return };
    let probe = CudaProbe::new().unwrap();
    let gpus = probe.gpus().unwrap();
    assert_eq!(gpus[0].id, gpu.id());
    eprintln!("{gpus:?}");
    assert_eq!(probe.peer(&gpu.id(), &gpu.id()), Access::Yes);
    assert_eq!(probe.check_peer(&gpu.id(), &gpu.id(), soon()), Access::Yes);
    for (what, access) in [("fabric", probe.fabric(&gpu.id())), ("multicast", probe.multicast(&gpu.id()))] {
        eprintln!("{what}: {access:?}");
        assert!(access != Access::Unknown);
    }
    assert!(matches!(probe.fabric(&tensorwire_device::DeviceId::Gpu([1; 16])), Access::No(_)));
}

#[test]
fn a_forked_child_cannot_use_the_gpu() {
    if gpu().is_some() {
        process::Child::start(&mut process::command("forks")).succeed();
    }
}

/// In a process of its own, because it forks.
fn a_forked_child_is_told(gpu: &Gpu) {
    let region = gpu.alloc(100).unwrap();
    let queue = gpu.queue().unwrap();
    // SAFETY: the child uses no lock that another thread may have held.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let told = matches!(region.read(0, &mut [0]), Err(Error::Forked(_)))
            && matches!(gpu.alloc(1), Err(Error::Forked(_)));
        drop(queue);
        drop(region);
        // SAFETY: ends the process without running what belongs to the parent.
        unsafe { libc::_exit(if told { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: our own child.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(status, 0);
    region.write(0, &[1; 100]).unwrap();
}
