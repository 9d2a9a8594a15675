//! Queues on streams that do what they are told: marks, waits, and what is kept until when.

use std::sync::Arc;
use std::time::Instant;

use super::super::driver::script::{
    ILLEGAL_ADDRESS, NO_MEMORY, Ran, ScriptStream, calls, driver, driver_without_batches, fail, fail_with,
    graphs, is_allocated, last_stream,
};
use super::super::reaper::Waste;
use super::*;
use crate::device::{Caching, Mark, Point, Queue, Region};
use crate::dtype::Dtype;
use crate::flag::{Abort, Flag, LINE, Writer};
use crate::meeting::{self, Meeting};
use crate::op::ReduceOp;
use crate::span::Span;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// Lines of host memory.
fn lines(count: usize) -> Vec<Span> {
    let span = Span::whole(Host.alloc(count * LINE).unwrap());
    (0..count).map(|index| span.slice(index * LINE..(index + 1) * LINE).unwrap()).collect()
}

fn flags(count: usize) -> Vec<Flag> {
    lines(count).iter().map(|line| Flag::new(line, Writer::Host).unwrap()).collect()
}

fn aborts(count: usize) -> Vec<Abort> {
    lines(count).iter().map(|line| Abort::new(line).unwrap()).collect()
}

/// A queue, and its stream.
fn queue(gpu: &Gpu) -> (Box<dyn Queue>, &'static ScriptStream) {
    let queue = gpu.queue().unwrap();
    (queue, last_stream())
}

/// How often these calls were made since the last question.
fn times<const N: usize>(names: [&str; N]) -> [usize; N] {
    let calls = calls();
    names.map(|name| calls.iter().filter(|call| **call == name).count())
}

/// Looks until it is so.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn reduce(queue: &mut dyn Queue, memory: &Span) -> crate::error::Result<()> {
    queue.reduce(ReduceOp::Sum, Dtype::U8, &[memory.view()], &[memory.view()], Caching::Keep)
}

/// What cannot be asked now is not done: somebody's memory would go too early. Behind some errors nothing runs any more.
#[test]
fn a_mark_that_cannot_be_asked_is_not_over() {
    let gpu = gpu();
    let (mut queue, stream) = queue(&gpu);
    let mark = queue.mark().unwrap();
    stream.run();
    for (code, over) in [(NO_MEMORY, false), (ILLEGAL_ADDRESS, true)] {
        fail_with("cuEventQuery", 0, code);
        assert!(mark.is_passed().is_err() && mark.is_over() == over, "{code}");
    }
    fail_with("cuCtxGetCurrent", 0, NO_MEMORY);
    assert!(!mark.is_over());
    fail("nothing", 0);
    assert!(mark.is_over() && Mark::passed().is_over());
}

/// Another thread may record a graph meanwhile.
#[test]
fn threads_of_a_library_disturb_no_graph() {
    let gpu = gpu();
    let asks = || {
        calls();
        let mut queue = gpu.queue().unwrap();
        queue.mark().unwrap().is_passed().unwrap();
        times(["cuThreadExchangeStreamCaptureMode"])[0]
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(asks(), 0, "a thread of somebody else");
            crate::gpu::background();
            // Once, for good.
            assert_eq!([asks(), asks()], [1, 0]);
        });
    });
    assert_eq!(asks(), 0);
}

/// A mark would become a part of the graph, and never be passed: what was kept in front of it would stay.
#[test]
fn recording_puts_no_mark() {
    let gpu = gpu();
    let memory = Span::whole(Host.alloc(4096).unwrap());
    let weak = Arc::downgrade(memory.region());
    calls();
    let graph = gpu
        .record(|queue| {
            (0..100).try_for_each(|_| reduce(queue, &memory))?;
            queue.keep(memory.region().clone())
        })
        .unwrap();
    // The reaper has nothing to look at.
    std::thread::sleep(3 * Duration::from_millis(4));
    assert_eq!(times(["cuEventRecord", "cuStreamQuery"]), [0, 0]);
    drop(memory);
    assert!(weak.upgrade().is_some());
    drop(graph);
    until("the graph has gone", || weak.upgrade().is_none());
}

/// What a graph of somebody else works on lives as long as that graph, and goes on a thread of ours. No event of ours gets into it, and
/// the stream is asked nothing.
#[test]
fn a_graph_of_somebody_else_keeps_what_it_works_on() {
    let gpu = gpu();
    let (_owner, stream) = queue(&gpu);
    let stream = std::ptr::from_ref(stream) as usize;
    let of_kernel = Span::whole(Host.alloc(4096).unwrap());
    let of_meeting = [0, 1].map(|_| Span::whole(Host.alloc(meeting::size(2)).unwrap()));
    let (aborts, failure) = (aborts(1), &flags(1)[0]);
    let also = Arc::new(7);
    let weak = [&of_kernel, &of_meeting[0], &of_meeting[1]].map(|span| Arc::downgrade(span.region()));
    graphs::record(true);
    calls();
    let views = of_meeting.each_ref().map(Span::view);
    let meeting = Meeting {
        words: &views,
        rank: 0,
        channel: 0,
        blocks: 1,
        largest: 4096,
        abort: &aborts[0],
        failure,
        timeout: Duration::from_secs(60),
        goes_on: &|| true,
    };
    // SAFETY: a stream of this GPU that is never freed.
    let recorded = unsafe {
        gpu.record_on(stream, Box::new(also.clone()), |queue| {
            queue.begin(Some(&aborts[0]))?;
            queue.meet(&meeting)?;
            (0..100).try_for_each(|_| reduce(queue, &of_kernel))?;
            queue.meet(&meeting)
        })
    };
    recorded.unwrap();
    graphs::record(false);
    let made = calls();
    for refused in ["cuEventRecord", "cuEventQuery", "cuStreamQuery", "cuEventCreate"] {
        assert!(!made.contains(&refused), "{refused}: {made:?}");
    }
    assert_eq!(made.iter().filter(|call| **call == "cuLaunchKernel").count(), 102);
    drop((of_kernel, of_meeting));
    std::thread::sleep(3 * Duration::from_millis(4));
    assert!(weak.iter().all(|weak| weak.upgrade().is_some()) && Arc::strong_count(&also) == 2);
    assert_eq!(graphs::drop_graph(), 1);
    until("all has gone", || {
        weak.iter().all(|weak| weak.upgrade().is_none()) && Arc::strong_count(&also) == 1
    });
}

/// If the graph cannot own it, nothing is recorded.
#[test]
fn a_graph_that_owns_nothing_gets_no_work() {
    for (call, records) in [
        ("none", false),
        ("cuStreamGetCaptureInfo_v2", true),
        ("cuUserObjectCreate", true),
        ("cuGraphRetainUserObject", true),
    ] {
        let gpu = gpu();
        let (_owner, stream) = queue(&gpu);
        let also = Arc::new(7);
        graphs::record(records);
        fail(call, 0);
        // SAFETY: a stream of this GPU that is never freed.
        let recorded = unsafe {
            gpu.record_on::<Error>(std::ptr::from_ref(stream) as usize, Box::new(also.clone()), |_| {
                panic!("nobody keeps what it works on")
            })
        };
        let error = recorded.unwrap_err().to_string();
        assert!(error.contains(if records { call } else { "records no graph" }), "{error}");
        fail("nothing", 0);
        graphs::record(false);
        until("it is let go", || Arc::strong_count(&also) == 1);
        assert_eq!(graphs::drop_graph(), 0);
    }
}

/// Work that waits for that of other ranks is counted.
#[test]
fn meetings_are_counted() {
    let gpu = gpu();
    let (mut queue, stream) = queue(&gpu);
    let (world, memory) = (2, Span::whole(Host.alloc(4096).unwrap()));
    let words: Vec<Span> =
        (0..world).map(|_| Span::whole(Host.alloc(meeting::size(world)).unwrap())).collect();
    let views: Vec<_> = words.iter().map(Span::view).collect();
    let (aborts, failure) = (aborts(1), &flags(1)[0]);
    for done in 1..=2 {
        let meeting = Meeting {
            words: &views,
            rank: 0,
            channel: 0,
            blocks: 1,
            largest: 32,
            abort: &aborts[0],
            failure,
            timeout: Duration::from_secs(60),
            goes_on: &|| true,
        };
        queue.begin(Some(&aborts[0])).unwrap();
        let parts = [memory.slice(0..32).unwrap(), memory.slice(64..96).unwrap()];
        let views: Vec<_> = parts.iter().map(Span::view).collect();
        queue.reduce_together(ReduceOp::Sum, Dtype::F32, &views, &views, &meeting).unwrap();
        assert_eq!(gpu.usage().meetings, done);
    }
    stream.run();
    reduce(&mut *queue, &memory).unwrap();
    assert_eq!(gpu.usage().meetings, 2);
}

#[test]
fn a_mark_is_an_event_that_is_used_again() {
    let gpu = gpu();
    let ((mut first, stream), (mut second, _)) = (queue(&gpu), queue(&gpu));
    let (flags, aborts) = (flags(1), aborts(1));
    let names = ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"];
    calls();
    // Passed at once: who follows it asks for nothing.
    let mark = first.mark().unwrap();
    assert!(mark.is_passed().unwrap());
    second.follow(&mark, &aborts[0], soon()).unwrap();
    second.follow(&Mark::passed(), &aborts[0], soon()).unwrap();
    assert_eq!(times(names), [1, 1, 0]);

    first.wait(&flags[0], 1, &aborts[0], soon()).unwrap();
    let pending = first.mark().unwrap();
    assert!(!pending.is_passed().unwrap() && mark.is_passed().unwrap());
    second.follow(&pending, &aborts[0], soon()).unwrap();
    let behind = second.mark().unwrap();
    assert!(!behind.is_passed().unwrap());
    assert_eq!(times(names), [2, 2, 1]);
    // Its queue may go, and the mark is still what it was.
    drop(first);
    flags[0].signal(1);
    stream.run();
    assert!(pending.is_passed().unwrap() && behind.is_passed().unwrap());
    // Once nobody needs them, they are used again.
    drop((mark, pending, behind));
    calls();
    let made: Vec<_> = (0..100).map(|_| second.mark().unwrap().is_passed().unwrap()).collect();
    assert!(made.into_iter().all(|passed| passed));
    let [created, ..] = times(names);
    assert!(created <= 2, "{created} new events for 100 marks");
}

/// The host signals for a stream of ours that has no work. A stream of somebody else may get work at any time.
#[test]
fn only_streams_of_ours_are_remembered_as_idle() {
    let gpu = gpu();
    let (mut owner, stream) = queue(&gpu);
    // SAFETY: a stream of this GPU that is never freed.
    let mut guest = unsafe { gpu.queue_on(std::ptr::from_ref(stream) as usize) }.unwrap();
    let (flags, aborts) = (flags(4), aborts(1));
    let names = ["cuStreamWriteValue32_v2", "cuEventRecord"];
    calls();
    owner.signal(&flags[0], 1).unwrap();
    assert_eq!(flags[0].load(), 1);
    assert!(owner.mark().unwrap().is_passed().unwrap());
    assert_eq!(times(names), [0, 0], "the host did it");

    // Nothing is before it now.
    guest.signal(&flags[1], 1).unwrap();
    assert_eq!((flags[1].load(), times(names)), (1, [0, 0]));
    // Its owner queues something in between: it counts.
    owner.wait(&flags[2], 1, &aborts[0], soon()).unwrap();
    guest.signal(&flags[1], 2).unwrap();
    assert_eq!((flags[1].load(), times(names)), (1, [1, 0]));
    let mark = guest.mark().unwrap();
    assert!(!mark.is_passed().unwrap(), "work of the stream's owner is before it");
    owner.signal(&flags[3], 1).unwrap();
    assert_eq!((flags[3].load(), times(names)), (0, [1, 1]));
    flags[2].signal(1);
    stream.run();
    assert!(mark.is_passed().unwrap());
    assert_eq!((flags[1].load(), flags[3].load()), (2, 1));
}

#[test]
fn marks_of_other_devices_are_refused_and_what_ends_a_follow() {
    #[derive(Debug)]
    struct Other;
    impl Point for Other {
        fn is_passed(&self) -> crate::error::Result<bool> {
            Ok(false)
        }
    }
    let gpu = gpu();
    let ((mut first, _), (mut second, _)) = (queue(&gpu), queue(&gpu));
    let (flags, aborts) = (flags(1), aborts(2));
    let other = second.follow(&Mark::at(Arc::new(Other)), &aborts[0], soon());
    assert!(matches!(&other, Err(Error::Misuse(text)) if text.contains("another device")), "{other:?}");
    first.wait(&flags[0], 1, &aborts[0], soon()).unwrap();
    let mark = first.mark().unwrap();
    let late = second.follow(&mark, &aborts[1], Deadline::after(Duration::ZERO));
    assert!(matches!(late, Err(Error::TimedOut)));
    aborts[1].set(3);
    assert!(matches!(second.follow(&mark, &aborts[1], soon()), Err(Error::Aborted)));
    assert!(matches!(mark.wait(&aborts[1], soon()), Err(Error::Aborted)));
    // Another GPU's queue follows it as well.
    let far = Gpu::with(driver(), Facts { uuid: [2; 16], ..facts() }).unwrap();
    calls();
    far.queue().unwrap().follow(&mark, &aborts[0], soon()).unwrap();
    assert_eq!(times(["cuStreamWaitEvent"]), [1]);
    flags[0].signal(1);
    drop((first, second, gpu));
    // The mark keeps its GPU open.
    until("the mark is passed", || mark.is_passed().unwrap());
}

/// It has nothing to do itself, and nothing to look at.
#[test]
fn who_only_follows_is_not_done_before() {
    let gpu = gpu();
    let ((mut first, _), (mut second, _)) = (queue(&gpu), queue(&gpu));
    let (flags, aborts) = (flags(1), aborts(1));
    first.wait(&flags[0], 1, &aborts[0], soon()).unwrap();
    let mark = first.mark().unwrap();
    second.follow(&mark, &Abort::local(), soon()).unwrap();
    std::thread::scope(|scope| {
        let finished = scope.spawn(|| {
            second.finish(&Abort::local(), soon()).unwrap();
            mark.is_passed().unwrap()
        });
        // Time enough for a finish that does not wait.
        std::thread::sleep(Duration::from_millis(5));
        flags[0].signal(1);
        assert!(finished.join().unwrap());
    });
}

/// Each with a verdict of its own beside the group's word, behind each other, while the first still waits.
#[test]
fn operations_have_abort_words_of_their_own() {
    let gpu = gpu();
    let (mut queue, stream) = queue(&gpu);
    let memory = Span::whole(gpu.take(4096).unwrap());
    let (flags, shared) = (flags(3), lines(1).remove(0));
    let group = Abort::new(&shared).unwrap();
    // Each word in memory of its own, which only the queue keeps there.
    let verdicts: Vec<Span> = (0..3).map(|_| lines(1).remove(0)).collect();
    let places: Vec<u64> = verdicts.iter().map(|span| span.addr() as u64).collect();
    let kept: Vec<_> = verdicts.iter().map(|span| Arc::downgrade(span.region())).collect();
    for (flag, verdict) in flags.iter().zip(verdicts) {
        queue.begin(None).unwrap();
        let verdict = Abort::new(&verdict).unwrap();
        queue.wait_all(&[(flag, 1)], &verdict.or(&group), soon()).unwrap();
        reduce(&mut *queue, &memory).unwrap();
        // Also where a mark lies between wait and kernel.
        queue.mark().unwrap();
        reduce(&mut *queue, &memory).unwrap();
    }
    assert!(stream.ran().is_empty());
    // A third word in one piece of work is one too many.
    queue.wait(&flags[0], 1, &aborts(1)[0], soon()).unwrap();
    assert!(matches!(reduce(&mut *queue, &memory), Err(Error::Misuse(_))));
    queue.begin(None).unwrap();
    flags[0].signal(1);
    let first = Ran { words: [places[0], shared.addr() as u64], closed: false };
    assert_eq!(stream.ran(), [first; 2]);
    // The second is given up: its kernels write nothing. The third is not concerned.
    let second = kept[1].upgrade().unwrap();
    let word = Abort::new(&Span::new(second, 0..LINE).unwrap()).unwrap();
    word.set(9);
    flags[1].signal(1);
    flags[2].signal(1);
    let ran = stream.ran();
    assert_eq!(ran.iter().map(|ran| ran.closed).collect::<Vec<_>>(), [true, true, false, false]);
    drop(word);
    // Nobody calls the queue: the words go all the same.
    until("the words are let go", || kept.iter().all(|kept| kept.strong_count() == 0));
    let _ = queue.finish(&group, soon());
}

#[test]
fn several_flags_are_waited_for_in_one_call() {
    let names = ["cuStreamBatchMemOp_v2", "cuStreamWaitValue32_v2"];
    for (driver, expected) in [(driver(), [1, 0]), (driver_without_batches(), [0, 3])] {
        let gpu = Gpu::with(driver, facts()).unwrap();
        let (mut queue, stream) = queue(&gpu);
        let (flags, aborts) = (flags(5), aborts(1));
        flags[0].signal(1);
        flags[3].signal(1);
        let all: Vec<_> = flags.iter().map(|flag| (flag, 1)).collect();
        calls();
        queue.wait_all(&all, &aborts[0], soon()).unwrap();
        assert_eq!(times(names), expected);
        reduce(&mut *queue, &Span::whole(gpu.take(100).unwrap())).unwrap();
        for flag in [1, 2, 4] {
            assert!(stream.ran().is_empty(), "flag {flag} is missing");
            flags[flag].signal(1);
        }
        assert_eq!(stream.ran().len(), 1);
        queue.finish(&aborts[0], soon()).unwrap();
        // One alone needs no list, and more than a call takes are several calls.
        queue.wait_all(&[(&flags[0], 2), (&flags[1], 1)], &aborts[0], soon()).unwrap();
        assert_eq!(times(names), [0, 1]);
        let many: Vec<_> = (0..300).map(|i| (&flags[i % 5], 3)).collect();
        queue.wait_all(&many, &aborts[0], soon()).unwrap();
        assert_eq!(times(names), if expected[0] == 1 { [3, 0] } else { [0, 300] });
        flags.iter().for_each(|flag| flag.signal(3));
        queue.finish(&aborts[0], soon()).unwrap();
    }
}

/// One launch for many, also where abort words are looked at; the driver's copies for one alone, and for the host's memory.
#[test]
fn several_copies_are_one_launch() {
    let gpu = gpu();
    let (mut queue, _) = queue(&gpu);
    let (flags, aborts) = (flags(1), aborts(1));
    let host = Host.alloc(4096).unwrap();
    let spans: Vec<_> = (0..260).map(|_| Span::whole(gpu.take(64).unwrap())).collect();
    let host: Vec<_> = (0..4).map(|i| Span::new(host.clone(), i * 64..(i + 1) * 64).unwrap()).collect();
    let pairs = |count: usize| -> Vec<_> { (0..count).map(|i| (spans[i].view(), host[0].view())).collect() };
    let inside = |count: usize| -> Vec<_> {
        // The script's memory is at one address, at which no two copies are apart.
        (0..count).map(|i| (host[1 + i % 2].view(), host[3].view())).collect()
    };
    let names = ["cuMemcpyAsync", "cuLaunchKernel"];
    calls();
    queue.copy_all(&[], Caching::Keep).unwrap();
    queue.copy_all(&pairs(1), Caching::Keep).unwrap();
    assert_eq!(times(names), [1, 0]);
    queue.copy_all(&pairs(3), Caching::Keep).unwrap();
    assert_eq!(times(names), [3, 0]);
    // One that is wrong: none is made.
    let wrong = (host[0].view(), Span::new(host[1].region().clone(), 0..10).unwrap());
    let refused = queue.copy_all(&[pairs(1)[0], (wrong.0, wrong.1.view())], Caching::Keep);
    assert!(matches!(refused, Err(Error::Misuse(_))));
    assert_eq!(times(names), [0, 0]);
    queue.wait(&flags[0], 1, &aborts[0], soon()).unwrap();
    queue.copy_all(&pairs(1), Caching::Keep).unwrap();
    queue.copy_all(&inside(64), Caching::Keep).unwrap();
    queue.copy_all(&pairs(130), Caching::Keep).unwrap();
    assert_eq!(times(names), [0, 1 + 1 + 3]);
    flags[0].signal(1);
    queue.finish(&aborts[0], soon()).unwrap();
}

/// What was not queued is not waited for, and the next one is.
#[test]
fn a_wait_that_cannot_be_queued_is_forgotten() {
    let gpu = gpu();
    let (mut queue, _) = queue(&gpu);
    let (flags, aborts) = (flags(2), aborts(1));
    fail("cuStreamBatchMemOp_v2", 0);
    let all = [(&flags[0], 1), (&flags[1], 1)];
    let failed = queue.wait_all(&all, &aborts[0], soon());
    assert!(matches!(&failed, Err(Error::Device { call: "cuStreamBatchMemOp_v2", .. })), "{failed:?}");
    fail("nothing", 0);
    queue.finish(&aborts[0], soon()).unwrap();
    assert!(gpu.inner().waits.while_none(|| {}));
    queue.wait_all(&all, &aborts[0], soon()).unwrap();
    flags.iter().for_each(|flag| flag.signal(1));
    queue.finish(&aborts[0], soon()).unwrap();
}

/// A late operation is over for itself: its verdict says so, and what shares the group's word goes on.
#[test]
fn a_deadline_ends_one_operation_only() {
    let gpu = gpu();
    let (mut queue, stream) = queue(&gpu);
    let memory = Span::whole(gpu.take(4096).unwrap());
    let (flags, words) = (flags(2), aborts(3));
    let (late, next, group) = (&words[0], &words[1], &words[2]);
    queue.wait(&flags[0], 1, &late.or(group), Deadline::after(Duration::from_millis(3))).unwrap();
    reduce(&mut *queue, &memory).unwrap();
    queue.begin(None).unwrap();
    queue.wait(&flags[1], 1, &next.or(group), soon()).unwrap();
    reduce(&mut *queue, &memory).unwrap();
    until("the deadline ends the wait", || flags[0].reached(1));
    assert_eq!((late.code(), group.code()), (Some(Abort::LATE), None));
    flags[1].signal(1);
    assert_eq!(stream.ran().iter().map(|ran| ran.closed).collect::<Vec<_>>(), [true, false]);
    assert!(matches!(queue.finish(&next.or(group), soon()), Err(Error::TimedOut)));
}

/// Nobody calls the queue again: neither a mark nor a finish.
#[test]
fn regions_go_when_the_work_is_done() {
    let gpu = gpu();
    for marked in [true, false] {
        let (mut queue, _) = queue(&gpu);
        let (flags, aborts) = (flags(1), aborts(1));
        queue.wait(&flags[0], 1, &aborts[0], soon()).unwrap();
        let memory: Arc<dyn Region> = gpu.take(4096).unwrap();
        reduce(&mut *queue, &Span::whole(memory.clone())).unwrap();
        let mark = marked.then(|| queue.mark().unwrap());
        let kept = Arc::downgrade(&memory);
        drop(memory);
        // So long that whoever lets it go too early has done it.
        std::thread::sleep(Duration::from_millis(20));
        assert!(kept.strong_count() > 0, "the work is not done");
        flags[0].signal(1);
        until("the memory is let go", || kept.strong_count() == 0);
        drop((queue, mark));
    }
}

/// The end of what is let go may want any lock: that of the queue, say.
#[test]
fn nothing_is_dropped_with_a_lock_held() {
    /// Asks for the locks that are there.
    struct Asks(Gpu, Arc<std::sync::Mutex<Option<Box<dyn Queue>>>>);
    impl Drop for Asks {
        fn drop(&mut self) {
            let _ = (self.0.usage(), self.1.lock().unwrap().as_mut().map(|queue| queue.mark()));
        }
    }
    let gpu = gpu();
    let (mut queue, _) = queue(&gpu);
    let shared = Arc::new(std::sync::Mutex::new(Some(gpu.queue().unwrap())));
    let pages = Host.alloc(3 * 4096).unwrap();
    let (flags, aborts) = (flags(1), aborts(1));
    queue.wait(&flags[0], 1, &aborts[0], soon()).unwrap();
    let keep = Box::new((pages.clone(), Asks(gpu.clone(), shared.clone())));
    // SAFETY: memory that `pages` holds; nobody refers to it.
    let region = unsafe { Host.adopt(pages.addr(), 100, keep) }.unwrap();
    reduce(&mut *queue, &Span::whole(region.clone())).unwrap();
    let kept = Arc::downgrade(&region);
    drop(region);
    flags[0].signal(1);
    until("the region is let go", || kept.strong_count() == 0);
    shared.lock().unwrap().take();
    queue.finish(&aborts[0], soon()).unwrap();
}

/// Always some stream waits: a new wait begins before the old one is over.
#[test]
fn waste_goes_although_streams_always_wait() {
    let gpu = gpu();
    let (flag, aborts) = (&flags(1)[0], &aborts(1));
    let address = gpu.inner().driver.alloc_legacy(100).unwrap();
    let waits = || {
        let usage = gpu.usage();
        (usage.stream_waits + usage.caller_waits, usage.caller_waits)
    };
    std::thread::scope(|scope| {
        let (begin, turns) = std::sync::mpsc::channel::<u32>();
        let gpu = &gpu;
        scope.spawn(move || {
            let mut queues = [gpu.queue().unwrap(), gpu.queue().unwrap()];
            for turn in turns {
                queues[turn as usize % 2].wait(flag, turn, &aborts[0], soon()).unwrap();
            }
        });
        let next = |turn: u32| {
            begin.send(turn).unwrap();
            until("the next wait begins", || waits().0 == u64::from(turn));
        };
        next(1);
        gpu.inner().reaper.take(Waste::Plain(address));
        let (mut turn, begun) = (1, Instant::now());
        while waits().1 == 0 {
            if begun.elapsed() > Duration::from_secs(60) {
                // Lets the other thread end.
                flag.signal(turn);
                panic!("streams wait for ever, and the memory is never given back");
            }
            assert!(is_allocated(address), "it was freed while a stream waited");
            turn += 1;
            next(turn);
            flag.signal(turn - 1);
        }
        // The last one is left to its caller: no stream waits.
        until("the memory is given back", || !is_allocated(address));
        flag.signal(turn);
        drop(begin);
    });
    // Nothing lies there any more, and streams wait again.
    until("a stream may wait", || gpu.inner().waits.is_open());
    let (mut queue, _) = queue(&gpu);
    let before = gpu.usage().stream_waits;
    queue.wait(flag, flag.load() + 1, &aborts[0], soon()).unwrap();
    assert_eq!(gpu.usage().stream_waits, before + 1);
    flag.signal(flag.load() + 1);
    queue.finish(&aborts[0], soon()).unwrap();
}
