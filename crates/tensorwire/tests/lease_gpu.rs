//! Leases of GPU memory: every kind of it, in the order of the queues on both sides. Needs a GPU.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "lease_peer/mod.rs"]
mod lease_peer;
#[path = "../../device/tests/process/mod.rs"]
mod process;

use std::sync::Arc;

use lease_peer::{MemoryKind, Peer, begins_with, byte, context, settles, soon};
use tensorwire::device::cuda::Gpu;
use tensorwire::device::{Abort, Caching, Device, Queue};
use tensorwire::{Context, Deadline, DeviceId, Lease, Span, Terms, Token};

const MIB: usize = 1 << 20;

/// The first GPU; where there is none, tests say so and end.
fn gpu() -> Option<Gpu> {
    let wanted = std::env::var_os("TEST_GPU").is_some();
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) if wanted => panic!("{error}"),
        Err(error) => {
            process::skip(error);
            None
        }
    }
}

/// Another process, which opens the GPU when it redeems something there.
fn peer() -> Peer {
    Peer::start(MemoryKind::Host)
}

/// Every kind of memory that can be lent, with its name.
fn kinds(context: &Context, gpu: &Gpu) -> Vec<(&'static str, Span)> {
    let pool = context.pool(&gpu.id()).unwrap();
    let part = Span::new(gpu.alloc(5 * MIB).unwrap(), 3 * MIB + 512..4 * MIB).unwrap();
    vec![
        ("own", Span::whole(gpu.alloc(3 * MIB).unwrap())),
        ("a part", part),
        ("of a pool", Span::whole(pool.alloc(100_000).unwrap())),
        ("legacy", Span::whole(gpu.plain(MIB).unwrap())),
        ("a part of legacy", Span::new(gpu.plain(4 * MIB).unwrap(), MIB..2 * MIB).unwrap()),
    ]
}

/// Work that takes a while: about 50 ms.
fn busy(gpu: &Gpu, queue: &mut dyn Queue) {
    let (a, b) = (Span::whole(gpu.take(1 << 30).unwrap()), Span::whole(gpu.take(1 << 30).unwrap()));
    for _ in 0..100 {
        queue.copy(a.view(), b.view(), Caching::Keep).unwrap();
    }
}

#[test]
fn child() {
    match process::role().as_deref() {
        Some("copies late") => copies_late(&context()),
        Some(role) => lease_peer::run(role),
        None => {}
    }
}

/// Copies what it redeems, behind other work, and answers with the copy's first byte when it is asked.
fn copies_late(context: &Context) {
    let gpu = gpu().unwrap();
    let mut queue = gpu.queue().unwrap();
    let home = process::call_home().unwrap();
    while let Ok((frame, _)) = home.recv(soon()) {
        let Some((_, bytes)) = frame.split_first() else { return };
        let token = Token::from_bytes(bytes).unwrap();
        let loan = context.redeem_on(&token, &mut *queue, soon()).unwrap();
        let copy = Span::whole(gpu.alloc(token.len()).unwrap());
        busy(&gpu, &mut *queue);
        queue.copy(copy.view(), loan.span().view(), Caching::Keep).unwrap();
        loan.release_after(&mut *queue).unwrap();
        // It has been released, and the copy has not taken place yet.
        home.send(b"+released", &[], soon()).unwrap();
        queue.finish(&Abort::local(), soon()).unwrap();
        home.send(&[b'+', byte(&copy)], &[], soon()).unwrap();
    }
}

/// Has such a process copy what is lent, and release it before the copy has taken place.
fn hand_over(late: &Peer, lease: &Lease) {
    assert_eq!(late.ask(b'r', &lease.token().to_bytes()).unwrap(), b"released");
}

#[test]
fn every_kind_of_memory_is_lent() {
    let Some(gpu) = gpu() else { return };
    let (us, them) = (context(), peer());
    for (index, (name, span)) in kinds(&us, &gpu).into_iter().enumerate() {
        let span = begins_with(span, index as u8 + 1);
        let lease = us.grant(&span, &Terms::default()).unwrap();
        assert_eq!(*lease.token().device(), gpu.id());
        assert_eq!(them.redeem(lease.token()), Ok(index as u8 + 1), "{name}");
        span.write(0, &[100]).unwrap();
        assert_eq!(them.bytes(), Ok(vec![100]), "{name}");
        them.release_last().unwrap();
        lease.wait(soon()).unwrap();
    }
    settles(|| us.lease_stats().unwrap().granted, (0, 0));
}

#[test]
fn own_tokens_and_foreign_ones_that_come_back() {
    let Some(gpu) = gpu() else { return };
    let (us, them) = (context(), peer());
    for (name, span) in kinds(&us, &gpu) {
        let span = begins_with(span, 7);
        let lease = us.grant(&span, &Terms::default()).unwrap();
        let loan = us.redeem(lease.token(), soon()).unwrap();
        assert_eq!((byte(loan.span()), loan.span().len()), (7, span.len()), "{name}");
        drop(loan);
        assert_eq!(them.redeem(lease.token()), Ok(7), "{name}");
        let back = us.redeem(&them.lends_last_onward().unwrap(), soon()).unwrap();
        back.span().write(0, &[8]).unwrap();
        assert_eq!(byte(&span), 8, "{name}");
        drop(back);
        them.drop_leases().unwrap();
        them.release_last().unwrap();
        lease.wait(soon()).unwrap();
    }
}

#[test]
fn memory_is_granted_onward_to_a_third_process() {
    let Some(gpu) = gpu() else { return };
    let us = context();
    let (b, c) = (peer(), peer());
    for (name, span) in kinds(&us, &gpu) {
        let span = begins_with(span, 9);
        let lease = us.grant(&span, &Terms::default()).unwrap();
        assert_eq!(b.redeem(lease.token()), Ok(9), "{name}");
        assert_eq!(c.redeem(&b.lends_last_onward().unwrap()), Ok(9), "{name}");
        b.release_last().unwrap();
        b.drop_leases().unwrap();
        span.write(0, &[10]).unwrap();
        assert_eq!(c.bytes(), Ok(vec![10]), "{name}");
        c.release_last().unwrap();
        lease.wait(soon()).unwrap();
    }
}

#[test]
fn views_outlive_their_owner() {
    let Some(_) = gpu() else { return };
    let us = context();
    let mut owner = Peer::start(MemoryKind::Gpu);
    let loan = us.redeem(&owner.grants(5000, 77).unwrap(), soon()).unwrap();
    assert_eq!(byte(loan.span()), 77);
    owner.child.kill();
    loan.span().write(0, &[3]).unwrap();
    assert_eq!(byte(loan.span()), 3);
}

#[test]
fn data_is_ready_when_the_queue_has_come_so_far() {
    let Some(gpu) = gpu() else { return };
    let (us, them) = (context(), peer());
    let late = Peer::start_as("copies late");
    let mut queue = gpu.queue().unwrap();
    let (span, pattern) = (Span::whole(gpu.alloc(MIB).unwrap()), Span::whole(gpu.alloc(MIB).unwrap()));
    for round in 1..4 {
        pattern.write(0, &[round]).unwrap();
        busy(&gpu, &mut *queue);
        queue.copy(span.view(), pattern.view(), Caching::Keep).unwrap();
        // On every send, whether it is mapped there already or not.
        let lease = us.grant_after(&span, &Terms::default().uses(2), &mut *queue).unwrap();
        assert_eq!(them.redeem(lease.token()), Ok(round), "the host waits");
        hand_over(&late, &lease);
        them.release_last().unwrap();
        // Its queue has not come to the copy yet: after the wait, it has.
        lease.wait(soon()).unwrap();
        span.write(0, &[200]).unwrap();
        assert_eq!(late.hear().unwrap(), [round], "the queue waits");
        queue.finish(&Abort::local(), soon()).unwrap();
    }
}

#[test]
fn a_queue_waits_for_the_holders_queue() {
    let Some(gpu) = gpu() else { return };
    let us = context();
    let late = Peer::start_as("copies late");
    let mut queue = gpu.queue().unwrap();
    let (span, other) = (Span::whole(gpu.alloc(MIB).unwrap()), Span::whole(gpu.alloc(MIB).unwrap()));
    for round in 1..4 {
        span.write(0, &[round]).unwrap();
        other.write(0, &[200 + round]).unwrap();
        let lease = us.grant(&span, &Terms::default()).unwrap();
        hand_over(&late, &lease);
        lease.reclaim(&mut *queue, soon()).unwrap();
        queue.copy(span.view(), other.view(), Caching::Keep).unwrap();
        assert_eq!(late.hear().unwrap(), [round]);
        queue.finish(&Abort::local(), soon()).unwrap();
        assert_eq!(byte(&span), 200 + round);
    }
}

#[test]
fn a_holder_that_dies_with_work_on_its_queue_has_released() {
    let Some(gpu) = gpu() else { return };
    let us = context();
    let mut late = Peer::start_as("copies late");
    let span = Span::whole(gpu.alloc(MIB).unwrap());
    let lease = us.grant(&span, &Terms::default()).unwrap();
    hand_over(&late, &lease);
    late.child.kill();
    lease.wait(soon()).unwrap();
    drop(lease);
    settles(|| us.lease_stats().unwrap().granted, (0, 0));
}

#[test]
fn memory_that_was_let_go_comes_back_to_the_gpu() {
    let Some(gpu) = gpu() else { return };
    let us = context();
    let them = peer();
    let mut before = 0;
    for first in 1..5 {
        let span = begins_with(Span::whole(gpu.alloc(512 * MIB).unwrap()), first);
        let token = us.grant(&span, &Terms::default()).unwrap().token().clone();
        drop(span);
        assert_eq!(them.redeem(&token), Ok(first));
        them.release_last().unwrap();
        settles(|| us.lease_stats().unwrap().granted, (0, 0));
        us.collect().unwrap();
        // The first time, its context takes memory of the GPU as well.
        if first == 1 {
            std::thread::sleep(std::time::Duration::from_secs(3));
            before = gpu.memory_info().unwrap().0;
        }
    }
    // Others use the GPU, too: within measure.
    settles(|| gpu.memory_info().unwrap().0 + 256 * MIB > before, true);
}

#[test]
fn another_address_space_is_another_device() {
    let Some(gpu) = gpu() else { return };
    let us = context();
    assert!(us.device(&DeviceId::Gpu([9; 16])).is_err());
    let devices: Vec<Arc<dyn Device>> = us.all_devices();
    assert!(devices.iter().any(|device| device.id() == gpu.id()));
    let lease = us.grant(&Span::whole(gpu.alloc(100).unwrap()), &Terms::default()).unwrap();
    assert!(lease.wait(Deadline::after(std::time::Duration::from_millis(10))).is_err());
}
