//! What goes wrong when CUDA memory is shared, one test for each trap that one GPU can show. Needs a GPU; each test is a
//! process of its own, because several of the traps are about what a process has done before.
//!
//! The others are tested where what they need is at hand:
//!
//! | trap | test |
//! |---|---|
//! | 8: a GPU that only others see, by its UUID | `check_names_of_gpus` in tests/python/test_lease_cuda.py; who reaches whom needs two GPUs |
//! | 9: MPS | all tests of GPUs run under it (scripts/gpu-bundle) |
//! | 10: a legacy handle of virtual memory | `adopted_memory_is_shared_or_the_reason_is_given` in crates/device/tests/cuda.rs |
//! | 11: a range of several chunks | `several_allocations_are_one_region` there, and torch's expandable segments |
//! | 12: other namespaces and users | `across_pid_namespaces`, `across_network_namespaces`, `another_user_is_refused` in lease_trouble.rs |
//! | 13: kills on either side | `somebody_dies_at_every_step..` in lease_death.rs |
//! | 14: destructors that wait | `check_dropping_waits_for_nothing` in tests/python/test_lease_cuda.py |
//! | 15: WSL2 | not here |
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "lease_model/mod.rs"]
mod lease_model;
#[path = "../../device/tests/process/mod.rs"]
mod process;

use std::time::{Duration, Instant};

use lease_model::{Other, byte, context, memory, other, settles, soon};
use tensorwire::device::cuda::{self, Gpu};
use tensorwire::device::{Abort, Caching, Device};
use tensorwire::{Lease, Span, Terms};

const MIB: usize = 1 << 20;

#[test]
fn child() {
    match process::role().as_deref() {
        Some("other") => other(&context()),
        Some("gotcha 1") => no_context_without_a_need(),
        Some("gotcha 2") => pointers_of_threads_without_a_context(),
        Some("gotcha 3") => nothing_waits_for_the_device(),
        Some("gotcha 4") => thousands_of_points_and_no_event(),
        Some("gotcha 5") => memory_that_its_owner_freed(),
        Some("gotcha 6") => the_same_memory_twice(),
        Some("gotcha 7") => parts_of_an_allocation(),
        _ => {}
    }
}

fn as_a_process(role: &str) {
    let wanted = std::env::var_os("TEST_GPU").is_some();
    match cuda::count() {
        Ok(count) if count > 0 => process::Child::start(&mut process::command(role)).succeed(),
        other => {
            assert!(!wanted, "{other:?}");
            process::skip("there is no GPU");
        }
    }
}

#[test]
fn gotcha_1_calls_without_a_device_make_a_context_on_the_first() {
    as_a_process("gotcha 1");
}

/// Leases of host memory, and what is asked without opening a GPU, leave the GPU alone.
fn no_context_without_a_need() {
    let (us, them) = (context(), Other::start());
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
    let (us, them) = (context(), Other::start());
    let spans: Vec<Span> = (0..4)
        .map(|index| {
            Span::whole(if index % 2 == 0 { gpu.alloc(MIB).unwrap() } else { gpu.plain(MIB).unwrap() })
        })
        .collect();
    let round = || {
        for span in &spans {
            let lease = us.grant(span, &Terms::default()).unwrap();
            them.redeem(lease.token()).unwrap();
            them.release();
            lease.wait(soon()).unwrap();
            drop(us.redeem(lease.token(), soon()).unwrap());
        }
    };
    round();
    let mut queue = gpu.queue().unwrap();
    let (a, b) = (Span::whole(gpu.take(1 << 30).unwrap()), Span::whole(gpu.take(1 << 30).unwrap()));
    let begin = Instant::now();
    (0..2000).for_each(|_| queue.copy(a.view(), b.view(), Caching::Keep).unwrap());
    round();
    let went_on = begin.elapsed();
    queue.finish(&Abort::local(), soon()).unwrap();
    let all = begin.elapsed();
    println!("a round in {went_on:?}, the device was busy for {all:?}");
    assert!(went_on < all, "{went_on:?} of {all:?}");
}

#[test]
fn gotcha_4_interprocess_events_come_to_an_end() {
    as_a_process("gotcha 4");
}

/// More grants on queues than a process may have events for, and more than there are lines.
fn thousands_of_points_and_no_event() {
    let gpu = Gpu::open(0).unwrap();
    let (us, them) = (context(), Other::start());
    let mut queue = gpu.queue().unwrap();
    let span = Span::whole(gpu.alloc(MIB).unwrap());
    let leases: Vec<Lease> =
        (0..25_000).map(|_| us.grant_after(&span, &Terms::default(), &mut *queue).unwrap()).collect();
    for lease in leases.iter().step_by(5000) {
        them.redeem(lease.token()).unwrap();
        them.release();
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
    let mut them = Other::start();
    let lend = |first: u8| {
        let span = Span::whole(gpu.alloc(1 << 30).unwrap());
        span.write(0, &[first]).unwrap();
        us.grant(&span, &Terms::default()).unwrap().token().clone()
    };
    assert_eq!(them.redeem(&lend(1)), Ok(1));
    them.release();
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
    let (us, them) = (context(), Other::start());
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
        leases.iter().for_each(|_| them.release());
        leases.iter().for_each(|lease| lease.wait(soon()).unwrap());
    }
    // Here it is one mapping: the address is the same.
    let owner = Other::start();
    let tokens = [(); 2].map(|()| tensorwire::Token::from_bytes(&owner.ask(b'G', &[]).unwrap()).unwrap());
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
    let (us, them) = (context(), Other::start());
    for region in [gpu.alloc(4 * MIB).unwrap(), gpu.plain(4 * MIB).unwrap()] {
        for offset in [0, 1, 511, 4096, 2 * MIB - 1, 2 * MIB, 4 * MIB - 100] {
            let part = Span::new(region.clone(), offset..offset + 100).unwrap();
            part.write(0, &[offset as u8 ^ 0x5a]).unwrap();
            let lease = us.grant(&part, &Terms::default()).unwrap();
            assert_eq!((lease.token().offset(), lease.token().len()), (offset, 100));
            assert_eq!(them.redeem(lease.token()), Ok(offset as u8 ^ 0x5a));
            them.release();
        }
    }
}
