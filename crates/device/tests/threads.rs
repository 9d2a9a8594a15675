//! GPUs of threads pass the conformance suite; and what is special about them, which is what is special about real ones.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod conformance;
mod process;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tensorwire_device::fd::Connection;
use tensorwire_device::flag::{LINE, Writer};
use tensorwire_device::gpu::{self, Access, Probe};
use tensorwire_device::handle::Means;
use tensorwire_device::host::Host;
use tensorwire_device::threads::hook::{self, Kind, Step};
use tensorwire_device::threads::{self, Call, Driver, Gpu, Settings};
use tensorwire_device::{
    Abort, Caching, Deadline, Device, Dtype, Error, Flag, Handle, Mark, Point, Queue, ReduceOp, Region,
    Result, Span,
};

use crate::process::soon;

/// The settings of this run of the suite.
fn settings() -> Settings {
    std::env::var(threads::VARIABLE).map_or_else(|_| Settings::default(), |text| text.parse().unwrap())
}

fn with(settings: Settings) -> Gpu {
    Driver::new(settings).unwrap().gpu(0).unwrap()
}

/// One with so many hardware queues, apart from all others.
fn queues(queues: usize) -> Gpu {
    with(Settings { queues, ..Settings::default() })
}

mod suite {
    crate::conformance::tests!(Some(Subject { device: Box::new(crate::with(crate::settings())) }));
}

/// The suite again in another process with other settings, which its own children inherit.
fn suite_with(settings: &Settings) {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["suite::", "--test-threads=2"]).env(threads::VARIABLE, settings.to_string());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "with {settings}:\n{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains(" passed; 0 failed") && !text.contains(" 0 passed"), "{text}");
}

#[test]
fn the_suite_passes_with_one_hardware_queue() {
    suite_with(&Settings { queues: 1, ..Settings::default() });
}

#[test]
fn the_suite_passes_with_two_hardware_queues() {
    suite_with(&Settings { queues: 2, ..Settings::default() });
}

#[test]
fn the_suite_passes_where_streams_do_not_wait() {
    suite_with(&Settings { mps: true, ..Settings::default() });
}

#[test]
fn child() {
    let Some(role) = process::role() else { return };
    match role.as_str() {
        "asks" => the_variable_gives_the_gpus(),
        "asks wrongly" => a_wrong_variable_is_said(),
        "installs" => gpus_are_installed_once(),
        "counts" => commands_are_numbered(),
        "dies" => dies_before_a_command(),
        "forks" => a_forked_child_is_told(&queues(8)),
        role => {
            let subject = conformance::Subject { device: Box::new(with(settings())) };
            conformance::processes::child(role, &subject);
        }
    }
}

fn run(role: &str) {
    process::Child::start(&mut process::command(role)).succeed();
}

/// Lines of host memory, one for each flag or abort word.
fn lines<const N: usize>() -> [Span; N] {
    let span = Span::whole(Host.alloc(N * LINE).unwrap());
    std::array::from_fn(|index| span.slice(index * LINE..(index + 1) * LINE).unwrap())
}

fn flags<const N: usize>() -> [Flag; N] {
    lines::<N>().map(|line| Flag::new(&line, Writer::Device).unwrap())
}

fn aborts<const N: usize>() -> [Abort; N] {
    lines::<N>().map(|line| Abort::new(&line).unwrap())
}

fn filled(gpu: &Gpu, byte: u8) -> Span {
    let span = Span::whole(gpu.alloc(LEN).unwrap());
    span.write(0, &[byte; LEN]).unwrap();
    span
}

fn is_all(span: &Span, byte: u8) -> bool {
    span.to_vec().unwrap().iter().all(|&there| there == byte)
}

/// Queues a wait that ends by its deadline. On a slow machine a short one may have passed before the call looks.
fn wait_in_vain(queue: &mut dyn Queue, flag: &Flag, abort: &Abort) {
    let queued = [10, 100, 1000, 10_000].into_iter().any(|milliseconds| {
        match queue.wait(flag, 1, abort, Deadline::after(Duration::from_millis(milliseconds))) {
            Err(Error::TimedOut) => false,
            queued => queued.is_ok(),
        }
    });
    assert!(queued);
}

/// Looks until it is so.
fn until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = soon();
    while !is_so() {
        assert!(!deadline.passed(), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

const LEN: usize = 5000;

// --- hardware queues --------------------------------------------------------------------------------------------------

#[test]
fn a_wait_holds_every_stream_of_its_hardware_queue() {
    let gpu = queues(2);
    let ([gate], [abort]) = (flags(), aborts());
    let (src, dst) = (filled(&gpu, 7), [filled(&gpu, 0), filled(&gpu, 0)]);
    let [mut first, mut other, mut same] = std::array::from_fn(|_| gpu.queue().unwrap());
    first.wait(&gate, 1, &abort, soon()).unwrap();
    same.copy(dst[0].view(), src.view(), Caching::Keep).unwrap();
    let held = same.mark().unwrap();
    other.copy(dst[1].view(), src.view(), Caching::Keep).unwrap();
    other.finish(&abort, soon()).unwrap();
    assert!(is_all(&dst[1], 7) && is_all(&dst[0], 0) && !held.is_passed().unwrap());
    gate.signal(1);
    same.finish(&abort, soon()).unwrap();
    assert!(is_all(&dst[0], 7) && held.is_passed().unwrap());
    first.finish(&abort, soon()).unwrap();
}

/// What must run to end a wait must not stand behind it.
#[test]
fn a_signal_behind_its_own_wait_never_comes() {
    let gpu = queues(2);
    let ([flag], [abort]) = (flags(), aborts());
    let [mut first, _other, mut same] = std::array::from_fn(|_| gpu.queue().unwrap());
    wait_in_vain(&mut *first, &flag, &abort);
    same.signal(&flag, 2).unwrap();
    assert!(matches!(first.finish(&Abort::local(), soon()), Err(Error::TimedOut)));
    assert_eq!(abort.code(), Some(Abort::LATE));
    same.finish(&abort, soon()).unwrap_or_else(|error| assert!(matches!(error, Error::Aborted)));
    until("the signal is given all the same", || flag.load() == 2);
}

#[test]
fn half_of_the_hardware_queues_may_wait() {
    let never = |gpu: &Gpu, count: usize| {
        let ([flag], [abort, late]) = (flags(), aborts());
        let mut waiting: Vec<_> = (0..count).map(|_| gpu.queue().unwrap()).collect();
        // Several waits of one stream hold one hardware queue.
        for queue in waiting.iter_mut() {
            queue.wait(&flag, 1, &abort, soon()).unwrap();
            queue.wait(&flag, 2, &abort, soon()).unwrap();
        }
        // One more is the caller's.
        std::thread::scope(|scope| {
            let one_more = scope.spawn(|| gpu.queue().unwrap().wait(&flag, 1, &late, soon()));
            until("the caller waits", || gpu.usage().caller_waits == 1);
            late.set(3);
            assert!(matches!(one_more.join().unwrap(), Err(Error::Aborted)));
        });
        let usage = gpu.usage();
        assert_eq!((usage.stream_waits, usage.caller_waits), (2 * count as u64, 1));
        abort.set(5);
        for queue in &mut waiting {
            assert!(matches!(queue.finish(&Abort::local(), soon()), Err(Error::Aborted)));
        }
    };
    for count in [1, 2, 3, 8] {
        never(&queues(count), count / 2);
    }
    never(&with(Settings { mps: true, ..Settings::default() }), 0);
}

#[test]
fn threads_end_with_the_last_queue_and_work_before_them() {
    let gpu = queues(4);
    let ([gate, done], [abort]) = (flags(), aborts());
    let (dst, src) = (filled(&gpu, 0), filled(&gpu, 3));
    let mut queue = gpu.queue().unwrap();
    let idle = gpu.queue().unwrap();
    queue.wait(&gate, 1, &abort, soon()).unwrap();
    queue.copy(dst.view(), src.view(), Caching::Keep).unwrap();
    queue.signal(&done, 1).unwrap();
    let (memory, mapped) = (Arc::downgrade(src.region()), gpu.usage().allocations);
    drop(src);
    assert!(memory.upgrade().is_some(), "a queue keeps what it works on");
    // A queue that is dropped goes on by itself.
    drop(queue);
    assert_eq!((gpu.usage().threads, gpu.usage().allocations), (1, mapped));
    gate.signal(1);
    done.wait(1, &abort, soon()).unwrap();
    assert!(is_all(&dst, 3));
    until("the memory is given back", || memory.upgrade().is_none() && gpu.usage().allocations == mapped - 1);
    drop(idle);
    until("the thread ends", || gpu.usage().threads == 0);
    // And it comes again.
    gpu.queue().unwrap().signal(&done, 2).unwrap();
    done.wait(2, &abort, soon()).unwrap();
}

// --- how waits end ----------------------------------------------------------------------------------------------------

#[test]
fn a_deadline_sets_the_first_word_and_nothing_is_written_until_the_next_begin() {
    let gpu = queues(8);
    let ([flag, done], [own, group]) = (flags(), aborts());
    let src = filled(&gpu, 9);
    let [copied, strided, summed, later] = std::array::from_fn(|_| filled(&gpu, 0));
    let mut queue = gpu.queue().unwrap();
    wait_in_vain(&mut *queue, &flag, &own.or(&group));
    queue.copy(copied.view(), src.view(), Caching::Keep).unwrap();
    let layout = tensorwire_device::Layout::contiguous(&[LEN], 1).unwrap();
    queue.copy_strided((strided.view(), &layout), (src.view(), &layout)).unwrap();
    queue.reduce(ReduceOp::Sum, Dtype::U8, &[src.view()], &[summed.view()], Caching::Keep).unwrap();
    queue.signal(&done, 1).unwrap();
    queue.begin(None).unwrap();
    queue.copy(later.view(), src.view(), Caching::Keep).unwrap();
    assert!(matches!(queue.finish(&group, soon()), Err(Error::TimedOut)));
    assert_eq!((own.code(), group.code()), (Some(Abort::LATE), None));
    assert!([copied, strided, summed].iter().all(|span| is_all(span, 0)) && is_all(&later, 9));
    assert!(done.reached(1), "signals are given all the same");
    queue.finish(&group, soon()).unwrap();
}

#[test]
fn the_second_word_ends_a_wait_and_the_first_stays() {
    let gpu = queues(8);
    let ([flag], [own, group]) = (flags(), aborts());
    let (src, dst) = (filled(&gpu, 9), filled(&gpu, 0));
    let mut queue = gpu.queue().unwrap();
    queue.wait(&flag, 1, &own.or(&group), soon()).unwrap();
    queue.copy(dst.view(), src.view(), Caching::Keep).unwrap();
    group.set(4);
    assert!(matches!(queue.finish(&Abort::local(), soon()), Err(Error::Aborted)));
    assert_eq!((own.code(), group.code()), (None, Some(4)));
    assert!(is_all(&dst, 0));
}

/// Its deadline ends a wait also while another one holds the hardware queue.
#[test]
fn a_wait_that_is_not_at_the_head_ends_in_time() {
    let gpu = queues(8);
    let ([gate, flag], [abort, late]) = (flags(), aborts());
    let mut queue = gpu.queue().unwrap();
    queue.wait(&gate, 1, &abort, soon()).unwrap();
    wait_in_vain(&mut *queue, &flag, &late);
    assert_eq!(late.wait(soon()).unwrap(), Abort::LATE);
    assert!(!gate.reached(1) && !abort.is_set());
    gate.signal(1);
    assert!(matches!(queue.finish(&Abort::local(), soon()), Err(Error::TimedOut)));
}

#[test]
fn finish_ends_the_waits_of_its_own_queue() {
    let gpu = queues(8);
    let ([flag, other], [own, others]) = (flags(), aborts());
    let [mut first, mut second] = std::array::from_fn(|_| gpu.queue().unwrap());
    first.wait(&flag, 1, &own, soon()).unwrap();
    second.wait(&other, 1, &others, soon()).unwrap();
    let stop = Abort::local();
    stop.set(1);
    assert!(matches!(first.finish(&stop, soon()), Err(Error::Aborted)));
    assert_eq!((own.code(), others.code()), (Some(Abort::LATE), None));
    other.signal(1);
    second.finish(&others, soon()).unwrap();
}

#[test]
fn several_flags_are_one_command() {
    let gpu = queues(8);
    let ([one, two, done], [abort]) = (flags(), aborts());
    let mut queue = gpu.queue().unwrap();
    queue.wait_all(&[(&one, 1), (&two, 5)], &abort, soon()).unwrap();
    queue.signal(&done, 1).unwrap();
    let (src, dst) = (filled(&gpu, 1), [filled(&gpu, 0), filled(&gpu, 0)]);
    let copies = [&dst[0], &dst[1]].map(|into| (into.view(), src.view()));
    queue.copy_all(&copies, Caching::Keep).unwrap();
    one.signal(1);
    assert!(!done.reached(1));
    two.signal(5);
    queue.finish(&abort, soon()).unwrap();
    assert!(dst.iter().all(|span| is_all(span, 1)));
    assert_eq!((gpu.usage().stream_waits, gpu.usage().commands), (1, 3));
    // What is there already needs no command.
    queue.wait_all(&[(&one, 1), (&two, 4)], &abort, soon()).unwrap();
    queue.wait_all(&[], &abort, soon()).unwrap();
    assert_eq!(gpu.usage().commands, 3);
}

#[test]
fn flags_that_a_gpu_cannot_reach_are_refused() {
    let mut queue = queues(8).queue().unwrap();
    let ([flag], [abort]) = (flags(), aborts());
    let refused = [
        queue.signal(&Flag::local(), 1),
        queue.wait(&Flag::local(), 1, &abort, soon()),
        queue.wait(&flag, 1, &Abort::local(), soon()),
        queue.wait(&flag, 1, &abort.or(&Abort::local()), soon()),
    ];
    assert!(refused.iter().all(|refused| matches!(refused, Err(Error::Misuse(_)))), "{refused:?}");
}

// --- marks ------------------------------------------------------------------------------------------------------------

#[test]
fn a_queue_follows_a_mark_of_another() {
    let driver = Driver::new(Settings { gpus: 2, ..Settings::default() }).unwrap();
    let [gpu, other] = [0, 1].map(|number| driver.gpu(number).unwrap());
    let ([gate], dones, [abort]) = (flags(), flags::<2>(), aborts());
    let (src, between) = (filled(&gpu, 8), filled(&gpu, 0));
    let results = [&gpu, &other].map(|gpu| filled(gpu, 0));
    assert!(driver.open_peer(&other.id(), &gpu.id()).is_yes());
    let mut first = gpu.queue().unwrap();
    assert!(first.mark().unwrap().is_passed().unwrap(), "nothing is queued");
    first.wait(&gate, 1, &abort, soon()).unwrap();
    first.copy(between.view(), src.view(), Caching::Keep).unwrap();
    let mark = first.mark().unwrap();
    // Its own order is enough for the queue itself.
    first.follow(&mark, &abort, soon()).unwrap();
    for ((done, device), result) in dones.iter().zip([&gpu, &other]).zip(&results) {
        let mut second = device.queue().unwrap();
        let begun = device.usage().commands;
        second.follow(&mark, &abort, soon()).unwrap();
        second.copy(result.view(), between.view(), Caching::Keep).unwrap();
        until("the queue follows", || device.usage().commands > begun);
        second.signal(done, 1).unwrap();
        assert!(!mark.is_passed().unwrap() && !done.reached(1));
    }
    gate.signal(1);
    mark.wait(&abort, soon()).unwrap();
    dones.iter().for_each(|done| done.wait(1, &abort, soon()).unwrap());
    assert!(results.iter().all(|result| is_all(result, 8)));
    let mut last = gpu.queue().unwrap();
    last.follow(&mark, &abort, soon()).unwrap();
    last.finish(&abort, soon()).unwrap();
    assert_eq!(gpu.usage().stream_waits, 1, "a mark is no wait for a flag");
}

#[derive(Debug)]
struct Elsewhere;

impl Point for Elsewhere {
    fn is_passed(&self) -> Result<bool> {
        Ok(true)
    }
}

#[test]
fn a_mark_of_another_kind_of_device_is_refused() {
    let mut queue = queues(8).queue().unwrap();
    let refused = queue.follow(&Mark::at(Arc::new(Elsewhere)), &Abort::local(), soon());
    assert!(matches!(refused, Err(Error::Misuse(_))), "{refused:?}");
    queue.follow(&Mark::passed(), &Abort::local(), soon()).unwrap();
}

// --- memory -----------------------------------------------------------------------------------------------------------

#[test]
fn calls_fail_as_often_as_told() {
    let gpu = queues(8);
    let region = gpu.alloc(LEN).unwrap();
    gpu.fail(Call::Export, 2, Error::refused("no"));
    gpu.fail(Call::Import, 1, Error::TimedOut);
    gpu.fail(Call::Alloc, 1, threads::out_of_memory());
    assert!((0..2).all(|_| matches!(region.export(), Err(Error::Refused(_)))));
    let handle = region.export().unwrap();
    assert!(matches!(gpu.import(handle), Err(Error::TimedOut)));
    let again = gpu.import(region.export().unwrap()).unwrap();
    gpu.fail(Call::Export, 1, Error::refused("no"));
    assert!(again.export().is_err() && again.export().is_ok());
    assert!(matches!(gpu.take(1), Err(Error::Device { code: Some(2), .. })));
    gpu.take(1).unwrap();
}

#[test]
fn memory_runs_out() {
    let gpu = with(Settings { memory: 8192, ..Settings::default() });
    let half = gpu.alloc(1).unwrap();
    let error = gpu.alloc(LEN).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { have, .. } if have == "4096"), "{error:?}");
    // What is imported is somebody else's.
    let again = gpu.import(half.export().unwrap()).unwrap();
    assert_eq!((gpu.usage().allocated, gpu.usage().mapped), (4096, 8192));
    drop((half, again));
    assert_eq!((gpu.usage().allocated, gpu.usage().mapped, gpu.usage().allocations), (0, 0, 0));
    gpu.alloc(8192).unwrap();
}

#[test]
fn the_same_allocation_has_the_same_number() {
    let gpu = queues(8);
    let ids = |region: &Arc<dyn Region>| region.place().unwrap().unwrap().ids;
    let (first, second) = (gpu.alloc(LEN).unwrap(), gpu.alloc(LEN).unwrap());
    let again = gpu.import(first.export().unwrap()).unwrap();
    assert!(ids(&first) != ids(&second) && ids(&first) == ids(&again) && first.addr() != again.addr());
    let place = first.place().unwrap().unwrap();
    assert_eq!((place.offset, place.whole), (0, 8192));
    // SAFETY: memory that `first` holds; nobody refers to it.
    let part = unsafe { gpu.adopt(first.addr() + 100, 10, Box::new(first.clone())) }.unwrap();
    assert_eq!((ids(&part), part.place().unwrap().unwrap().offset), (ids(&first), 100));
    assert!(first.shareable() && !again.shareable() && !part.shareable());
    gpu.set_next_id(77);
    let (third, fourth) = (gpu.alloc(1).unwrap(), gpu.alloc(1).unwrap());
    assert_eq!([ids(&third), ids(&fourth)], [[77], [78]]);
    let Handle::Gpu(handle) = third.export().unwrap() else { panic!("another handle") };
    assert_eq!((handle.chunks[0].id, handle.chunks.len(), handle.device), (77, 1, threads::uuid(0)));
}

/// Virtual memory that is made of several allocations, as torch's expandable segments are.
#[test]
fn several_allocations_are_one_region() {
    let gpu = queues(8);
    let both = gpu.joined(&[8192, 4096, 100]).unwrap();
    assert_eq!((both.len(), both.place().unwrap().unwrap().ids.len()), (12_388, 3));
    let bytes: Vec<u8> = (0..both.len()).map(|index| (index / 7) as u8).collect();
    both.write(0, &bytes).unwrap();
    let again = gpu.import(both.export().unwrap()).unwrap();
    assert!(Span::whole(again.clone()).to_vec().unwrap() == bytes);
    again.write(8190, &[0xee; 4]).unwrap();
    let mut seen = [0; 6];
    both.read(8189, &mut seen).unwrap();
    assert_eq!(seen, [bytes[8189], 0xee, 0xee, 0xee, 0xee, bytes[8194]]);
    // Queues see it without gaps.
    let dst = Span::whole(gpu.alloc(both.len()).unwrap());
    let mut queue = gpu.queue().unwrap();
    queue.copy(dst.view(), Span::whole(again.clone()).view(), Caching::Keep).unwrap();
    queue.finish(&Abort::local(), soon()).unwrap();
    assert!(dst.to_vec().unwrap() == Span::whole(again).to_vec().unwrap());
    // SAFETY: memory that `both` holds; nobody refers to it.
    let part = unsafe { gpu.adopt(both.addr() + 8000, 500, Box::new(both.clone())) }.unwrap();
    let part = gpu.import(part.export().unwrap()).unwrap();
    assert!(Span::whole(part).to_vec().unwrap() == Span::new(both, 8000..8500).unwrap().to_vec().unwrap());
}

#[test]
fn odd_handles_are_refused() {
    let gpu = queues(8);
    let region = gpu.alloc(1000).unwrap();
    let handle = || match region.export().unwrap() {
        Handle::Gpu(handle) => handle,
        other => panic!("{other:?}"),
    };
    let refused = |handle| {
        let error = gpu.import(Handle::Gpu(handle)).unwrap_err();
        assert!(matches!(error, Error::Refused(_)), "{error:?}");
        error.to_string()
    };
    let mut larger = handle();
    (larger.chunks[0].size, larger.len) = (8192, 8192);
    assert!(refused(larger).contains("8192 were promised"));
    let mut odd = handle();
    odd.chunks[0].size = 4095;
    assert!(refused(odd).contains("no multiple"));
    let mut outside = handle();
    outside.offset = 4000;
    assert!(refused(outside).contains("1000 bytes were promised at 4000 of 4096"));
    let mut overflow = handle();
    overflow.offset = usize::MAX;
    refused(overflow);
    let mut legacy = handle();
    legacy.chunks[0].means = Means::Legacy([0; 64]);
    refused(legacy);
    let mut unsealed = handle();
    let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 4096).unwrap();
    unsealed.chunks[0].means = Means::Fd(tensorwire_device::Fd::new(fd));
    assert!(refused(unsealed).contains("seals"));
    let mut elsewhere = handle();
    elsewhere.device = threads::uuid(1);
    assert!(matches!(gpu.import(Handle::Gpu(elsewhere)), Err(Error::Misuse(_))));
    assert!(gpu.import(Host.alloc(4096).unwrap().export().unwrap()).is_err());
    assert!(Host.import(region.export().unwrap()).is_err());
}

#[test]
fn host_memory_is_copied_from_and_to() {
    let gpu = queues(8);
    let mut queue = gpu.queue().unwrap();
    for host in [Host.alloc(LEN).unwrap(), tensorwire_device::host::private(LEN).unwrap()] {
        let (host, there, back) = (Span::whole(host), filled(&gpu, 0), Span::whole(Host.alloc(LEN).unwrap()));
        host.write(0, &[5; LEN]).unwrap();
        queue.copy(there.view(), host.view(), Caching::Keep).unwrap();
        queue.copy(back.view(), there.view(), Caching::Keep).unwrap();
        queue.finish(&Abort::local(), soon()).unwrap();
        assert!(is_all(&there, 5) && is_all(&back, 5));
    }
    // The host does not reach memory of the GPU.
    let there = filled(&gpu, 0);
    assert_eq!(there.region().host_addr(), None);
    let host = Span::whole(Host.alloc(LEN).unwrap());
    assert!(Host.queue().unwrap().copy(there.view(), host.view(), Caching::Keep).is_err());
}

#[test]
fn taken_memory_is_not_zero() {
    let span = Span::whole(queues(8).take(LEN).unwrap());
    assert!(is_all(&span, 0xa5));
}

// --- the driver -------------------------------------------------------------------------------------------------------

#[test]
fn memory_of_another_gpu_is_reached_by_friends() {
    for peers in [true, false] {
        let driver = Driver::new(Settings { gpus: 2, peers, ..Settings::default() }).unwrap();
        let [from, to] = [0, 1].map(|number| driver.gpu(number).unwrap());
        let (src, dst) = (filled(&from, 4), filled(&to, 0));
        let copy = || {
            let mut queue = from.queue()?;
            queue.copy(dst.view(), src.view(), Caching::Keep)?;
            queue.finish(&Abort::local(), soon())
        };
        assert!(matches!(copy(), Err(Error::Misuse(_))), "nobody has let it in");
        let probe: &dyn Probe = &driver;
        assert_eq!(probe.peer(&from.id(), &from.id()), Access::Yes);
        assert_eq!(probe.open_peer(&from.id(), &to.id()).is_yes(), peers);
        assert_eq!(probe.check_peer(&from.id(), &to.id(), soon()).is_yes(), peers);
        assert_eq!((copy().is_ok(), is_all(&dst, 4)), (peers, peers));
    }
}

#[test]
fn the_driver_knows_its_gpus() {
    let driver = Driver::new(Settings { gpus: 3, ..Settings::default() }).unwrap();
    let gpus = driver.gpus().unwrap();
    assert_eq!(gpus.iter().map(|gpu| gpu.ordinal).collect::<Vec<_>>(), [Some(0), Some(1), Some(2)]);
    for (number, gpu) in gpus.iter().enumerate() {
        assert_eq!(gpu.id, tensorwire_device::DeviceId::Gpu(threads::uuid(number)));
        assert_eq!(driver.open(&gpu.id).unwrap().id(), gpu.id);
    }
    assert!(matches!(driver.gpu(3), Err(Error::Misuse(_))));
    let unknown = tensorwire_device::DeviceId::Gpu([1; 16]);
    assert!(driver.open(&unknown).is_err() && !driver.peer(&unknown, &gpus[0].id).is_yes());
    assert!(!driver.fabric(&gpus[0].id).is_yes() && !driver.multicast(&gpus[0].id).is_yes());
    assert!(Driver::new(Settings { queues: 0, ..Settings::default() }).is_err());
}

#[test]
fn a_process_has_the_gpus_of_its_variable() {
    let command = |role, value| {
        let mut command = process::command(role);
        command.env(threads::VARIABLE, value);
        process::Child::start(&mut command).succeed();
    };
    command("asks", "2:1,apart");
    command("asks wrongly", "two");
    run("installs");
}

fn the_variable_gives_the_gpus() {
    let driver = gpu::driver().unwrap();
    let gpus = driver.gpus().unwrap();
    assert_eq!(gpus.len(), 2);
    assert!(!driver.peer(&gpus[0].id, &gpus[1].id).is_yes());
    // What the library opens is what the test can ask.
    let (opened, known) = (driver.open(&gpus[1].id).unwrap(), threads::gpu(1).unwrap());
    let region = opened.alloc(LEN).unwrap();
    assert_eq!((known.usage().allocations, region.device()), (1, known.id()));
    known.fail(Call::Export, 1, Error::refused("no"));
    assert!(region.export().is_err());
    assert!(threads::install(Settings::default()).is_err(), "too late");
}

fn a_wrong_variable_is_said() {
    let error = gpu::driver().unwrap_err();
    assert!(error.to_string().contains("THREAD_GPUS=\"two\""), "{error}");
}

fn gpus_are_installed_once() {
    assert!(matches!(threads::gpu(0), Err(Error::Unsupported { .. })));
    threads::install(Settings { gpus: 4, ..Settings::default() }).unwrap();
    assert_eq!(gpu::driver().unwrap().gpus().unwrap().len(), 4);
    assert!(threads::install(Settings::default()).is_err());
    threads::gpu(3).unwrap();
}

// --- numbered commands ------------------------------------------------------------------------------------------------

#[test]
fn a_hook_sees_every_command() {
    run("counts");
}

/// In a process of its own, because the hook is the process's.
fn commands_are_numbered() {
    let gpu = queues(8);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let into = seen.clone();
    hook::set(move |step| {
        into.lock().unwrap().push(step);
        if step.number == 1 {
            // Without a word about it. The hardware queue goes on.
            std::panic::resume_unwind(Box::new(()));
        }
    });
    let ([flag, gate], [abort]) = (flags(), aborts());
    let (src, dst) = (filled(&gpu, 1), filled(&gpu, 0));
    let _other = gpu.queue().unwrap();
    let mut queue = gpu.queue().unwrap();
    queue.copy(dst.view(), src.view(), Caching::Keep).unwrap();
    queue.wait(&gate, 1, &abort, soon()).unwrap();
    queue.signal(&flag, 1).unwrap();
    queue.mark().unwrap();
    gate.signal(1);
    queue.finish(&abort, soon()).unwrap();
    hook::clear();
    queue.signal(&flag, 2).unwrap();
    queue.finish(&abort, soon()).unwrap();
    let step = |(number, kind)| Step { gpu: 0, stream: 1, kind, number };
    let expected = (0..).zip([Kind::Copy, Kind::Wait, Kind::Signal, Kind::Mark]).map(step);
    assert_eq!(*seen.lock().unwrap(), expected.collect::<Vec<_>>());
    assert_eq!(gpu.usage().commands, 5);
}

/// A process is killed before one of its commands: those before it are done, it is not.
#[test]
fn a_process_is_killed_at_a_numbered_command() {
    let home = process::Home::open();
    let mut child = process::Child::start(home.invite(&mut process::command("dies")));
    let connection = home.answer().unwrap();
    let memory = queues(8).alloc(LEN).unwrap();
    let words = Host.alloc(2 * LINE).unwrap();
    for region in [&memory, &words] {
        let handle = region.export().unwrap();
        connection.send(&handle.encode(), &handle.fds().collect::<Vec<_>>(), soon()).unwrap();
    }
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&child.wait()), Some(9));
    let flag = |index: usize| {
        let line = Span::new(words.clone(), index * LINE..(index + 1) * LINE).unwrap();
        Flag::new(&line, Writer::Device).unwrap().load()
    };
    assert_eq!((flag(0), flag(1)), (1, 0));
    assert!(is_all(&Span::whole(memory), 6));
}

fn dies_before_a_command() {
    fn receive(device: &dyn Device, home: &Connection) -> Arc<dyn Region> {
        let (bytes, fds) = home.recv(soon()).unwrap();
        device.import(Handle::decode(&bytes, fds).unwrap()).unwrap()
    }
    let home = process::call_home().unwrap();
    let gpu = queues(8);
    let (memory, words) = (Span::whole(receive(&gpu, &home)), receive(&Host, &home));
    let flag = |index: usize| {
        let line = Span::new(words.clone(), index * LINE..(index + 1) * LINE).unwrap();
        Flag::new(&line, Writer::Device).unwrap()
    };
    hook::set(|step| {
        if step.number == 2 {
            let me = rustix::process::getpid();
            rustix::process::kill_process(me, rustix::process::Signal::KILL).unwrap();
        }
    });
    let src = filled(&gpu, 6);
    let mut queue = gpu.queue().unwrap();
    queue.copy(memory.view(), src.view(), Caching::Keep).unwrap();
    queue.signal(&flag(0), 1).unwrap();
    queue.signal(&flag(1), 1).unwrap();
    process::sleep_until_killed();
}

// --- fork -------------------------------------------------------------------------------------------------------------

#[test]
fn a_forked_child_cannot_use_the_gpu() {
    run("forks");
}

/// In a process of its own, because it forks.
fn a_forked_child_is_told(gpu: &Gpu) {
    let region = gpu.alloc(100).unwrap();
    let mut queue: Box<dyn Queue> = gpu.queue().unwrap();
    let [flag] = flags();
    queue.signal(&flag, 1).unwrap();
    // SAFETY: the child uses no lock that another thread may have held.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let told = matches!(region.read(0, &mut [0]), Err(Error::Forked(_)))
            && matches!(gpu.alloc(1), Err(Error::Forked(_)))
            && matches!(queue.signal(&flag, 2), Err(Error::Forked(_)));
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
