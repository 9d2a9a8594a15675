//! What goes wrong when CUDA memory is shared, one test for each trap that one GPU can show. Needs a GPU; each test is a
//! process of its own, because several of the traps are about what a process has done before.
//!
//! What else the traps are about is tested where what it needs is at hand:
//!
//! | trap | test |
//! |---|---|
//! | 8: who reaches whose memory | needs two GPUs |
//! | 10: virtual memory of other allocators | `adopted_memory_is_shared_or_the_reason_is_given` in crates/device/tests/cuda.rs |
//! | 12: other users, other network namespaces | `another_user_is_refused`, `across_network_namespaces` in lease_trouble.rs |
//! | 13: a kill at every step, very often | `somebody_dies_at_every_step..` in lease_death.rs |
//! | 8, 11, 14 with torch | `check_names_of_gpus` and others in tests/python/test_lease_cuda.py |
//! | 15: WSL2, where no legacy handle can be opened | `a_refused_handle_says_what_to_do` in crates/device/src/cuda/tests.rs, with a driver that is a script |
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

#[path = "lease_peer/mod.rs"]
mod lease_peer;
#[path = "../../device/tests/process/mod.rs"]
mod process;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lease_peer::{MemoryKind, Peer, begins_with, byte, context, memory, namespaces, settles, soon};
use process::{command, command_under, skip};
use rustix::process::Signal;
use tensorwire::device::cuda::{self, Gpu};
use tensorwire::device::gpu::{Probe, show_uuid};
use tensorwire::device::handle::{GpuHandle, Means};
use tensorwire::device::nvml::Nvml;
use tensorwire::device::{Abort, Caching, Device, DeviceId, Handle, Queue, Region};
use tensorwire::lease::hooks::STEPS;
use tensorwire::{Lease, Span, Terms};

const MIB: usize = 1 << 20;

#[test]
fn child() {
    match process::role().as_deref() {
        Some("gotcha 1") => no_context_without_a_need(),
        Some("gotcha 2") => pointers_of_threads_without_a_context(),
        Some("gotcha 3") => nothing_waits_for_the_device(),
        Some("gotcha 4") => thousands_of_points_and_no_event(),
        Some("gotcha 5") => memory_that_its_owner_freed(),
        Some("gotcha 6") => the_same_memory_twice(),
        Some("gotcha 7") => parts_of_an_allocation(),
        Some("gotcha 8") => hidden_gpus(),
        Some("gotcha 9") => names_of_gpus(),
        Some("gotcha 10") => handles_by_kind_of_memory(),
        Some("gotcha 11") => ranges_of_several_chunks(),
        Some("gotcha 12") => gpu_memory_across_pid_namespaces(),
        Some("gotcha 13") => kills_on_either_side(),
        Some("gotcha 14") => drops_while_the_device_is_busy(),
        Some(role) => lease_peer::run(role),
        None => {}
    }
}

fn as_a_process(role: &str) {
    let wanted = std::env::var_os("TEST_GPU").is_some();
    match cuda::count() {
        Ok(count) if count > 0 => process::Child::start(&mut command(role)).succeed(),
        other => {
            assert!(!wanted, "{other:?}");
            skip("there is no GPU");
        }
    }
}

/// Another process, which opens the GPU when it redeems something there.
fn peer() -> Peer {
    Peer::start(MemoryKind::Host)
}

/// Whether this process is a client of MPS.
fn mps() -> bool {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap_or_else(|| "/tmp/nvidia-mps".into());
    std::path::Path::new(&folder).join("control").exists()
}

/// Memory that begins with a byte, lent once.
fn lend(us: &tensorwire::Context, region: Arc<dyn Region>, first: u8) -> Lease {
    us.grant(&begins_with(Span::whole(region), first), &Terms::default()).unwrap()
}

/// Work that takes long: a second or so.
fn keep_busy(gpu: &Gpu, queue: &mut dyn Queue) {
    let (a, b) = (Span::whole(gpu.take(1 << 30).unwrap()), Span::whole(gpu.take(1 << 30).unwrap()));
    (0..2000).for_each(|_| queue.copy(a.view(), b.view(), Caching::Keep).unwrap());
}

#[test]
fn gotcha_1_calls_without_a_device_make_a_context_on_the_first() {
    as_a_process("gotcha 1");
}

/// Leases of host memory, and what is asked without opening a GPU, leave the GPU alone.
fn no_context_without_a_need() {
    let (us, them) = (context(), peer());
    let lease = us.grant(&memory(&us, 100, 1), &Terms::default()).unwrap();
    assert_eq!(them.redeem(lease.token()), Ok(1));
    let opened = |pid: &str| {
        let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        fds.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to.starts_with("/dev/nvidia"))).count()
    };
    assert_eq!((opened("self"), opened(&them.child.pid().to_string())), (0, 0));
    // With a need, one: opening it again makes no other.
    let gpu = Gpu::open(0).unwrap();
    let free = gpu.memory_info().unwrap().0;
    let again = Gpu::open(0).unwrap();
    assert!(again.memory_info().unwrap().0 + 64 * MIB > free);
}

#[test]
fn gotcha_2_a_pointer_is_asked_about_where_no_context_is_current() {
    as_a_process("gotcha 2");
}

fn pointers_of_threads_without_a_context() {
    let gpu = Gpu::open(0).unwrap();
    let us = context();
    let span = Span::whole(gpu.plain(MIB).unwrap());
    span.write(0, &[5]).unwrap();
    // On threads of their own, which have never called the driver.
    let apart = |work: &(dyn Fn() + Sync)| std::thread::scope(|scope| scope.spawn(work).join().unwrap());
    let lease = std::sync::OnceLock::new();
    apart(&|| lease.set(us.grant(&span, &Terms::default()).unwrap()).unwrap());
    let token = lease.get().unwrap().token().clone();
    apart(&|| assert_eq!(byte(us.redeem(&token, soon()).unwrap().span()), 5));
    drop(lease);
    assert!(us.redeem(&token, soon()).is_err(), "used and dropped");
}

#[test]
fn gotcha_3_frees_and_closes_wait_for_the_device() {
    as_a_process("gotcha 3");
}

/// Grants, loans and releases go on while the device is busy for long.
fn nothing_waits_for_the_device() {
    let gpu = Gpu::open(0).unwrap();
    let (us, them) = (context(), peer());
    let spans: Vec<Span> = (0..4)
        .map(|index| {
            Span::whole(if index % 2 == 0 { gpu.alloc(MIB).unwrap() } else { gpu.plain(MIB).unwrap() })
        })
        .collect();
    let round = || {
        for span in &spans {
            let lease = us.grant(span, &Terms::default()).unwrap();
            them.redeem(lease.token()).unwrap();
            them.release_last().unwrap();
            lease.wait(soon()).unwrap();
            drop(us.redeem(lease.token(), soon()).unwrap());
        }
    };
    round();
    let mut queue = gpu.queue().unwrap();
    keep_busy(&gpu, &mut *queue);
    let begin = Instant::now();
    round();
    let went_on = begin.elapsed();
    queue.finish(&Abort::local(), soon()).unwrap();
    let all = begin.elapsed();
    eprintln!("a round in {went_on:?}, the device was busy for {all:?}");
    // Had anything waited for the device, there would have been nothing left to wait for.
    assert!(2 * went_on < all, "{went_on:?} of {all:?}");
}

#[test]
fn gotcha_4_interprocess_events_come_to_an_end() {
    as_a_process("gotcha 4");
}

/// More grants on queues than a process may have events for, and more than there are lines.
fn thousands_of_points_and_no_event() {
    let gpu = Gpu::open(0).unwrap();
    let (us, them) = (context(), peer());
    let mut queue = gpu.queue().unwrap();
    let span = Span::whole(gpu.alloc(MIB).unwrap());
    let leases: Vec<Lease> =
        (0..25_000).map(|_| us.grant_after(&span, &Terms::default(), &mut *queue).unwrap()).collect();
    for lease in leases.iter().step_by(5000) {
        them.redeem(lease.token()).unwrap();
        them.release_last().unwrap();
        lease.wait(soon()).unwrap();
    }
    drop(leases);
    us.collect().unwrap();
    assert_eq!(us.lease_stats().unwrap().holders, 1);
}

#[test]
fn gotcha_5_memory_that_its_owner_freed_is_charged_to_nobody() {
    as_a_process("gotcha 5");
}

fn memory_that_its_owner_freed() {
    let gpu = Gpu::open(0).unwrap();
    let us = context();
    let mut them = peer();
    let lend = |first| lend(&us, gpu.alloc(1 << 30).unwrap(), first).token().clone();
    assert_eq!(them.redeem(&lend(1)), Ok(1));
    them.release_last().unwrap();
    settles(|| us.lease_stats().unwrap().granted, (0, 0));
    std::thread::sleep(Duration::from_secs(3));
    let before = gpu.memory_info().unwrap().0;
    assert_eq!(them.redeem(&lend(2)), Ok(2));
    assert_eq!(us.lease_stats().unwrap().waiting, (1, 1 << 30));
    assert!(gpu.memory_info().unwrap().0 + 512 * MIB < before, "it is held");
    them.child.kill();
    settles(|| us.lease_stats().unwrap().granted, (0, 0));
    settles(|| gpu.memory_info().unwrap().0 + 256 * MIB > before, true);
}

#[test]
fn gotcha_6_the_same_handle_is_opened_twice() {
    as_a_process("gotcha 6");
}

fn the_same_memory_twice() {
    let gpu = Gpu::open(0).unwrap();
    let (us, them) = (context(), peer());
    for region in [gpu.alloc(4 * MIB).unwrap(), gpu.plain(4 * MIB).unwrap()] {
        // Different parts of one allocation, granted again and again, held at once.
        let parts: Vec<Span> =
            (0..4).map(|index| Span::new(region.clone(), index * MIB..(index + 1) * MIB).unwrap()).collect();
        let leases: Vec<Lease> =
            parts.iter().map(|part| us.grant(part, &Terms::default()).unwrap()).collect();
        for (index, (part, lease)) in parts.iter().zip(&leases).enumerate() {
            part.write(0, &[index as u8]).unwrap();
            assert_eq!(them.redeem(lease.token()), Ok(index as u8));
        }
        leases.iter().for_each(|_| them.release_last().unwrap());
        leases.iter().for_each(|lease| lease.wait(soon()).unwrap());
    }
    // Here it is one mapping: the address is the same.
    let owner = Peer::start(MemoryKind::Gpu);
    let tokens = [(); 2].map(|()| owner.grants(5000, 77).unwrap());
    let loans = tokens.each_ref().map(|token| us.redeem(token, soon()).unwrap());
    let again = us.redeem(&tokens[0], soon()).unwrap();
    assert_eq!(again.span().distance(loans[0].span()), 0);
    assert_ne!(loans[0].span().distance(loans[1].span()), 0);
    assert_eq!(us.mapped().0, 2 + 3, "two allocations; the book, the row and the lines of their owner");
}

#[test]
fn gotcha_7_a_handle_is_for_the_whole_allocation() {
    as_a_process("gotcha 7");
}

fn parts_of_an_allocation() {
    let gpu = Gpu::open(0).unwrap();
    let (us, them) = (context(), peer());
    for region in [gpu.alloc(4 * MIB).unwrap(), gpu.plain(4 * MIB).unwrap()] {
        for offset in [0, 1, 511, 4096, 2 * MIB - 1, 2 * MIB, 4 * MIB - 100] {
            let part = Span::new(region.clone(), offset..offset + 100).unwrap();
            part.write(0, &[offset as u8 ^ 0x5a]).unwrap();
            let lease = us.grant(&part, &Terms::default()).unwrap();
            assert_eq!((lease.token().offset(), lease.token().len()), (offset, 100));
            assert_eq!(them.redeem(lease.token()), Ok(offset as u8 ^ 0x5a));
            them.release_last().unwrap();
        }
    }
}

#[test]
fn gotcha_8_a_gpu_is_hidden_or_has_another_number() {
    as_a_process("gotcha 8");
}

/// Of the GPU that this process sees, others see nothing, or know it by its UUID.
fn hidden_gpus() {
    let gpu = Gpu::open(0).unwrap();
    let us = context();
    let start = |visible: &str| {
        Peer::start_with(command(&MemoryKind::Host.role()).env("CUDA_VISIBLE_DEVICES", visible), None)
    };
    let leases = [lend(&us, gpu.alloc(MIB).unwrap(), 5), lend(&us, gpu.plain(MIB).unwrap(), 5)];
    let blind = start("");
    for lease in &leases {
        let is_refused = || {
            let error = blind.redeem(lease.token()).unwrap_err().text();
            assert!(
                error.contains(&gpu.id().to_string()) && error.contains("CUDA_VISIBLE_DEVICES"),
                "{error}"
            );
        };
        // The first attempt has loaded the driver, and has met us.
        is_refused();
        let before = blind.has();
        is_refused();
        assert_eq!(blind.has(), before, "nothing is mapped");
        assert!(lease.holders().is_empty());
    }
    let host = us.grant(&memory(&us, 100, 6), &Terms::default()).unwrap();
    assert_eq!(blind.redeem(host.token()), Ok(6));
    assert_eq!(blind.bytes(), Ok(vec![6]));
    // The attempts have used nothing up.
    let named = start(&show_uuid(&gpu.facts().uuid));
    for lease in &leases {
        assert_eq!(named.redeem(lease.token()), Ok(5));
        named.release_last().unwrap();
        lease.wait(soon()).unwrap();
    }
}

#[test]
fn gotcha_9_mps_gives_gpus_other_names() {
    as_a_process("gotcha 9");
}

/// With MPS and without, a GPU has one name, in all processes.
fn names_of_gpus() {
    let gpu = Gpu::open(0).unwrap();
    eprintln!("MPS is {}", if mps() { "on" } else { "off" });
    let count = cuda::count().unwrap();
    let uuids: BTreeSet<_> = (0..count).map(|ordinal| cuda::facts(ordinal).unwrap().uuid).collect();
    assert_eq!(uuids.len(), count);
    let listed = Nvml::open().unwrap().gpus().unwrap();
    assert!(listed.iter().any(|listed| listed.id == gpu.id()), "{listed:?}");

    let (us, them) = (context(), Peer::start(MemoryKind::Gpu));
    let lease = lend(&us, gpu.alloc(MIB).unwrap(), 3);
    assert_eq!(*lease.token().device(), gpu.id());
    assert_eq!(them.redeem(lease.token()), Ok(3));
    // What it lends names the same GPU, its own memory and what it has received.
    let tokens = [them.lends_last_onward().unwrap(), them.grants(5000, 4).unwrap()];
    for (token, first) in tokens.iter().zip([3, 4]) {
        assert_eq!(*token.device(), gpu.id());
        let loan = us.redeem(token, soon()).unwrap();
        assert_eq!((loan.span().device(), byte(loan.span())), (gpu.id(), first));
    }
}

#[test]
fn gotcha_10_virtual_memory_has_no_legacy_handle() {
    as_a_process("gotcha 10");
}

/// Memory is asked what it is, and lent in the way that there is for it.
fn handles_by_kind_of_memory() {
    let gpu = Gpu::open(0).unwrap();
    let (us, them) = (context(), peer());
    let means = |region: &Arc<dyn Region>| {
        let Ok(Handle::Gpu(mut handle)) = region.export() else { panic!("no handle of a GPU") };
        handle.chunks.pop().unwrap().means
    };
    let (own, plain) = (gpu.alloc(MIB).unwrap(), gpu.plain(MIB).unwrap());
    // Where an NVLink fabric works, our own crosses by that.
    assert!(matches!(means(&own), Means::Fd(_) | Means::Fabric(_)), "{:?}", means(&own));
    assert!(matches!(means(&plain), Means::Legacy(_)), "{:?}", means(&plain));
    for (region, first) in [own, plain].into_iter().zip(1..) {
        let lease = lend(&us, region, first);
        assert_eq!(them.redeem(lease.token()), Ok(first));
        them.release_last().unwrap();
        lease.wait(soon()).unwrap();
    }
    // What came by a descriptor needs its maker no more; it can even be handed on.
    let mut maker = Peer::start(MemoryKind::Gpu);
    let loan = us.redeem(&maker.grants(5000, 77).unwrap(), soon()).unwrap();
    maker.child.kill();
    assert_eq!(byte(loan.span()), 77);
    let onward = us.grant(&begins_with(loan.span().clone(), 78), &Terms::default()).unwrap();
    assert_eq!(them.redeem(onward.token()), Ok(78));
}

#[test]
fn gotcha_11_a_range_lies_in_several_chunks() {
    as_a_process("gotcha 11");
}

/// Allocations that lie one behind the other are lent as one, and so is a part that crosses from one to the next.
fn ranges_of_several_chunks() {
    let gpu = Gpu::open(0).unwrap();
    let (us, them) = (context(), peer());
    let mut all = GpuHandle::new(gpu.facts().uuid, 0, 0, Vec::new());
    let (mut regions, mut borders) = (Vec::new(), Vec::new());
    for size in [2, 4, 2] {
        let region = gpu.alloc(size * MIB).unwrap();
        let Ok(Handle::Gpu(handle)) = region.export() else { panic!("no handle of a GPU") };
        regions.push(region);
        all.chunks.extend(handle.chunks);
        all.len = all.chunks.iter().map(|chunk| chunk.size).sum();
        borders.push(all.len);
    }
    // The last is the end.
    borders.pop();
    let whole = Span::whole(gpu.import(Handle::Gpu(all)).unwrap());
    let pattern = |border: usize| (0..100).map(|index| index ^ (border / MIB) as u8).collect::<Vec<u8>>();
    for (border, sides) in borders.iter().zip(regions.windows(2)) {
        whole.write(border - 50, &pattern(*border)).unwrap();
        let before = Span::new(sides[0].clone(), sides[0].len() - 50..sides[0].len()).unwrap();
        let behind = Span::new(sides[1].clone(), 0..50).unwrap();
        assert_eq!([before.to_vec().unwrap(), behind.to_vec().unwrap()].concat(), pattern(*border));
    }
    let lease = us.grant(&whole, &Terms::default()).unwrap();
    them.redeem(lease.token()).unwrap();
    for border in &borders {
        assert_eq!(them.look(border - 50, 100), Ok(pattern(*border)));
    }
    them.release_last().unwrap();
    lease.wait(soon()).unwrap();
    for border in borders {
        let part = us.grant(&whole.slice(border - 50..border + 50).unwrap(), &Terms::default()).unwrap();
        them.redeem(part.token()).unwrap();
        assert_eq!(them.look(0, 100), Ok(pattern(border)));
    }
}

#[test]
fn gotcha_12_the_peer_is_in_another_pid_namespace() {
    as_a_process("gotcha 12");
}

/// As `across_pid_namespaces` in lease_trouble.rs, with memory of the GPU.
fn gpu_memory_across_pid_namespaces() {
    if mps() {
        return skip("not tried under MPS, whose server knows its clients by their pids");
    }
    let Some(wrapper) = namespaces(&["--pid", "--fork", "--kill-child", "--mount-proc"]) else { return };
    let gpu = Gpu::open(0).unwrap();
    let us = context();
    let mut them = Peer::start_with(&mut command_under(&wrapper, &MemoryKind::Gpu.role()), None);
    let lease = lend(&us, gpu.alloc(MIB).unwrap(), 4);
    assert_eq!(them.redeem(lease.token()), Ok(4));
    let loan = us.redeem(&them.grants(5000, 5).unwrap(), soon()).unwrap();
    assert_eq!(byte(loan.span()), 5);
    // A legacy handle may be of no use there; then it is said.
    let legacy = lend(&us, gpu.plain(MIB).unwrap(), 6);
    match them.redeem(legacy.token()) {
        Ok(first) => assert_eq!(first, 6),
        Err(trouble) => {
            let text = trouble.text();
            eprintln!("{text}");
            assert!(text.contains("legacy handle"), "{text}");
        }
    }
    them.child.kill();
    lease.wait(soon()).unwrap();
    assert_eq!(byte(loan.span()), 5);
    settles(|| us.lease_stats().unwrap().holders, 0);
}

#[test]
fn gotcha_13_somebody_is_killed() {
    as_a_process("gotcha 13");
}

/// This process opens no GPU: that would take memory of it.
fn kills_on_either_side() {
    if mps() {
        return skip("whoever is killed under MPS may end others, too");
    }
    const BYTES: u32 = 256 << 20;
    let (gpu, nvml) = (DeviceId::Gpu(cuda::facts(0).unwrap().uuid), Nvml::open().unwrap());
    let free = || nvml.free_memory(&gpu).unwrap();
    let before = free();
    let mapped = STEPS.iter().position(|step| *step == "redeem: mapped").unwrap();
    for round in 1..4 {
        // The holder, while its owner has it.
        let (mut owner, mut holder) = (Peer::start(MemoryKind::Gpu), Peer::start(MemoryKind::Gpu));
        assert_eq!(holder.redeem(&owner.grants(BYTES, round).unwrap()), Ok(round));
        holder.child.kill();
        settles(|| owner.stats(), Ok((1, 0, 0)));
        // The owner, while a holder maps it and reads it.
        let mut holder = Peer::start(MemoryKind::Gpu);
        holder.stops_at(mapped).unwrap();
        holder.say(b'r', &owner.grants_again().unwrap().to_bytes()).unwrap();
        settles(|| holder.is_stopped(), true);
        owner.child.kill();
        holder.signal(Signal::CONT);
        assert_eq!(holder.hear(), Ok(vec![round]));
        assert_eq!(holder.bytes(), Ok(vec![round]));
        // Both.
        let mut owner = Peer::start(MemoryKind::Gpu);
        assert_eq!(holder.redeem(&owner.grants(BYTES, 9).unwrap()), Ok(9));
        owner.child.kill();
        holder.child.kill();
    }
    // The driver keeps 64 KiB from the first process on; what was lent is 256 MiB.
    settles(|| before.saturating_sub(free()) < MIB as u64, true);
}

#[test]
fn gotcha_14_a_destructor_waits_for_the_device() {
    as_a_process("gotcha 14");
}

fn drops_while_the_device_is_busy() {
    let gpu = Gpu::open(0).unwrap();
    let us = context();
    let mut queue = gpu.queue().unwrap();
    for place in [MemoryKind::Gpu, MemoryKind::Plain] {
        let owner = Peer::start(place);
        let loans = [(); 2].map(|()| us.redeem(&owner.grants(MIB as u32, 7).unwrap(), soon()).unwrap());
        owner.drop_leases().unwrap();
        let into = Span::whole(gpu.alloc(MIB).unwrap());
        // The queue works on the first of them.
        keep_busy(&gpu, &mut *queue);
        queue.copy(into.view(), loans[0].span().view(), Caching::Keep).unwrap();
        let begin = Instant::now();
        drop(loans);
        let dropped = begin.elapsed();
        // The other one has been released, also as its owner sees it.
        settles(|| owner.stats().unwrap().0, 1);
        let heard = begin.elapsed();
        queue.finish(&Abort::local(), soon()).unwrap();
        let all = begin.elapsed();
        eprintln!(
            "{place:?}: dropped in {dropped:?}, heard after {heard:?}, the device was busy for {all:?}"
        );
        assert!(2 * heard < all, "{heard:?} of {all:?}");
        assert_eq!(byte(&into), 7);
        settles(|| owner.stats().unwrap().0, 0);
    }
}
