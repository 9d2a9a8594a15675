//! Symmetric memory: rendezvous, reach, signals. Each body runs on the host, on one GPU and on two, as threads and as
//! processes. The GPUs are threads (`tensorwire::device::threads`); with TEST_GPU=1 all ranks share the first real GPU.

#![allow(clippy::unwrap_used, clippy::panic)]

mod ranks;

use std::time::Duration;

use ranks::LONG;
use tensorwire::device::threads::{Settings, install, uuid};
use tensorwire::device::{Abort, Caching, Queue};
use tensorwire::symmetric::CHANNELS;
use tensorwire::{Deadline, DeviceId, Dtype, Error, Group, PeerFaultKind, ReduceOp, Span, Symmetric, Tensor};

/// Where the ranks have their memory.
#[derive(Clone, Copy, PartialEq)]
enum On {
    Host,
    OneGpu,
    /// Dealt in turn.
    TwoGpus,
    /// The first rank on the host, the others on a GPU.
    Both,
}

impl On {
    fn of(self, group: &Group) -> DeviceId {
        if self == Self::Host {
            return DeviceId::Host;
        }
        let real = std::env::var_os("TEST_GPU").is_some();
        if !real {
            // Thread ranks share the process, and whoever is first has installed them.
            let _ = install(Settings { gpus: 2, ..Settings::default() });
        }
        if self == Self::Both && group.rank() == 0 {
            return DeviceId::Host;
        }
        if real {
            return group.context().access().unwrap().gpus().unwrap()[0].id.clone();
        }
        DeviceId::Gpu(uuid(if self == Self::TwoGpus { group.rank() % 2 } else { 0 }))
    }
}

fn soon() -> Deadline {
    Deadline::after(LONG)
}

fn memory(group: &Group, device: &DeviceId, bytes: usize) -> Span {
    let span = Span::new(group.context().pool(device).unwrap().alloc(bytes).unwrap(), 0..bytes).unwrap();
    span.write(0, &vec![0; bytes]).unwrap();
    span
}

fn queue(group: &Group, device: &DeviceId) -> Box<dyn Queue> {
    group.context().device(device).unwrap().queue().unwrap()
}

fn finish(queue: &mut dyn Queue) {
    queue.finish(&Abort::local(), soon()).unwrap();
}

/// All ranks write to all, and read what all wrote.
fn reach(group: &Group, on: On) {
    let device = on.of(group);
    let (me, world) = (group.rank(), group.world());
    let own = memory(group, &device, 8 * world);
    let handle = group.symmetric(&own).wait().unwrap();
    assert_eq!((handle.rank(), handle.world(), handle.len()), (me, world, 8 * world));
    for rank in 0..world {
        assert!(handle.access(rank).unwrap().is_yes(), "{}", handle.explain());
        let value = (me * 100 + rank) as u64;
        handle.buffer(rank).unwrap().write(8 * me, &value.to_le_bytes()).unwrap();
        let pad = handle.pad(rank).unwrap();
        assert_eq!((pad.len(), handle.device(rank).unwrap()), (4 * CHANNELS * world, &pad.device()));
    }
    assert_eq!(handle.device(me).unwrap(), &device);
    // Each rank says for itself where in an allocation its part is.
    let block = memory(group, &device, 512);
    let part_at = |start: usize| group.symmetric(&block.slice(start..start + 64).unwrap()).wait().unwrap();
    let (first, shifted) = (part_at(0), part_at(64 * me));
    for rank in 0..world {
        let offset = |handle: &Symmetric| handle.offset(rank).unwrap();
        assert_eq!(offset(&shifted) - offset(&first), 64 * rank as u64);
    }
    shifted.barrier(0, soon()).unwrap();
    drop((first, shifted));
    handle.barrier(0, soon()).unwrap();
    let words = |span: &Span| -> Vec<u64> {
        span.to_vec()
            .unwrap()
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().unwrap()))
            .collect()
    };
    assert_eq!(words(&own), (0..world).map(|from| (from * 100 + me) as u64).collect::<Vec<_>>());
    // Pads are zero at first, and nothing else uses them.
    assert!(handle.pad(me).unwrap().to_vec().unwrap().iter().all(|&byte| byte == 0));
    handle.barrier(0, soon()).unwrap();
    handle.pad((me + 1) % world).unwrap().write(4 * me, &[me as u8 + 1; 4]).unwrap();
    handle.barrier(0, soon()).unwrap();
    let before = (me + world - 1) % world;
    assert_eq!(handle.pad(me).unwrap().to_vec().unwrap()[4 * before..][..4], [before as u8 + 1; 4]);
    // The arrays have the addresses that this process knows.
    for (array, of) in [
        (handle.buffer_addresses().unwrap(), Symmetric::buffer as fn(&Symmetric, usize) -> _),
        (handle.pad_addresses().unwrap(), Symmetric::pad),
    ] {
        assert_eq!(array.device(), device);
        let address = |rank: usize| {
            let span: Span = of(&handle, rank).unwrap();
            let known = device == DeviceId::Host || span.device() != DeviceId::Host;
            if known { (span.region().addr() + span.offset()) as u64 } else { 0 }
        };
        assert_eq!(words(&array), (0..world).map(address).collect::<Vec<_>>());
    }
    // And whether queues can work together.
    assert_eq!(handle.explain().lines().count(), world + 2, "{}", handle.explain());
    handle.barrier(CHANNELS - 1, soon()).unwrap();
}

/// Each rank passes numbers on to the next one, by copies on a queue between signals of queues.
fn ring(group: &Group, on: On) {
    let device = on.of(group);
    let (me, world) = (group.rank(), group.world());
    let (next, before) = ((me + 1) % world, (me + world - 1) % world);
    let own = memory(group, &device, 4096);
    let source = memory(group, &device, 4096);
    let handle = group.symmetric(&own).wait().unwrap();
    let mut queue = queue(group, &device);
    for round in 0..30u8 {
        source.write(0, &[round.wrapping_mul(7) + me as u8; 4096]).unwrap();
        // On the host in between: queues and threads share the counters.
        let by_queue = round % 3 != 2;
        let into = handle.buffer(next).unwrap();
        if by_queue && into.device() == device {
            queue.copy(into.view(), source.view(), Caching::Keep).unwrap();
            handle.put_signal_on(&mut *queue, next, 1, soon()).unwrap();
        } else {
            finish(&mut *queue);
            into.write(0, &source.to_vec().unwrap()).unwrap();
            handle.put_signal(next, 1, soon()).unwrap();
        }
        if by_queue {
            handle.wait_signal_on(&mut *queue, before, 1, soon()).unwrap();
            finish(&mut *queue);
        } else {
            handle.wait_signal(before, 1, soon()).unwrap();
        }
        assert_eq!(own.to_vec().unwrap(), [round.wrapping_mul(7) + before as u8; 4096], "round {round}");
        if by_queue {
            handle.barrier_on(&mut *queue, 2, soon()).unwrap();
            finish(&mut *queue);
        } else {
            handle.barrier(2, soon()).unwrap();
        }
    }
}

/// Signals are counted: many may come before they are waited for, in any order of channels.
fn counted(group: &Group, on: On) {
    let device = on.of(group);
    let handle = group.symmetric(&memory(group, &device, 64)).wait().unwrap();
    let (me, world) = (group.rank(), group.world());
    let (mut first, mut second) = (queue(group, &device), queue(group, &device));
    for to in (0..world).filter(|&to| to != me) {
        for count in 0..50 {
            match count % 3 {
                0 => handle.put_signal_on(&mut *first, to, 5, soon()).unwrap(),
                1 => handle.put_signal_on(&mut *second, to, 5, soon()).unwrap(),
                _ => handle.put_signal(to, 5, soon()).unwrap(),
            }
            handle.put_signal(to, 6, soon()).unwrap();
        }
    }
    for from in (0..world).filter(|&from| from != me) {
        for count in 0..50 {
            handle.wait_signal(from, 6, soon()).unwrap();
            if count % 2 == 0 {
                handle.wait_signal(from, 5, soon()).unwrap();
            } else {
                handle.wait_signal_on(&mut *second, from, 5, soon()).unwrap();
            }
        }
        // There was not one more than that.
        let late = handle.wait_signal(from, 6, Deadline::after(Duration::from_millis(1))).unwrap_err();
        assert!(late.is_timeout() && late.ranks() == [from], "{late}");
    }
    finish(&mut *second);
    handle.barrier(0, soon()).unwrap();
}

/// Collectives on such memory go straight between the ranks.
fn collectives(group: &Group, on: On) {
    let device = on.of(group);
    let count = 5000;
    let own = memory(group, &device, 4 * count);
    let handle = group.symmetric(&own).wait().unwrap();
    let tensor = Tensor::flat(own, Dtype::I32).unwrap();
    for round in 0..3 {
        tensor.write(&vec![group.rank() as i32 + round; count]).unwrap();
        group.all_reduce(&tensor, ReduceOp::Sum).wait().unwrap();
        let sum: i32 = (0..group.world() as i32).map(|rank| rank + round).sum();
        assert_eq!(tensor.to_vec::<i32>().unwrap(), vec![sum; count]);
        // The result is in everybody's memory.
        handle.barrier(0, soon()).unwrap();
        let there = handle.buffer((group.rank() + 1) % group.world()).unwrap();
        assert_eq!(there.to_vec().unwrap()[..4], sum.to_le_bytes());
        handle.barrier(0, soon()).unwrap();
    }
}

/// Two groups over the same memory, sub-groups in different orders, parts of one allocation: pads and signals never meet.
fn groups(group: &Group, on: On) {
    let device = on.of(group);
    let (me, world) = (group.rank(), group.world());
    let own = memory(group, &device, 1024);
    let whole = group.symmetric(&own).wait().unwrap();
    let half = group.symmetric(&own.slice(512..1024).unwrap()).wait().unwrap();
    let pair = group.split(Some((me / 2) as u64), me as i64).unwrap().unwrap();
    let other = pair.symmetric(&own).wait().unwrap();
    let handles = [&whole, &half, &other];
    for round in 0..20 {
        // Each in an order of its own: nobody waits here.
        for at in 0..3 {
            let handle = handles[(at + me + round) % 3];
            let next = (handle.rank() + 1) % handle.world();
            handle.put_signal(next, 0, soon()).unwrap();
        }
        for handle in handles {
            let before = (handle.rank() + handle.world() - 1) % handle.world();
            handle.wait_signal(before, 0, soon()).unwrap();
        }
        half.buffer((me + 1) % world).unwrap().write(0, &[me as u8; 16]).unwrap();
        whole.barrier(3, soon()).unwrap();
        let before = ((me + world - 1) % world) as u8;
        assert_eq!(own.to_vec().unwrap()[512..528], [before; 16]);
        other.barrier(3, soon()).unwrap();
        whole.barrier(4, soon()).unwrap();
    }
}

/// Wrong calls and different sizes are errors for everybody, and the next try goes well.
fn refused(group: &Group, on: On) {
    let device = on.of(group);
    let (me, world) = (group.rank(), group.world());
    let right = memory(group, &device, 256);
    let wrong = memory(group, &device, 128);
    let last = world - 1;
    if world > 1 {
        let own = if me == last { &wrong } else { &right };
        let error = group.symmetric(own).wait().unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("rank 0: 256 bytes") && text.contains(&format!("rank {last}: 128 bytes")),
            "{text}"
        );
        let Error::Peer(fault) = &error else { panic!("{error:?}") };
        // Of two there is no minority.
        let blamed = if world > 2 { Some(last) } else { None };
        assert_eq!((fault.kind, fault.rank), (PeerFaultKind::Mismatch, blamed), "{text}");
        // Memory that others cannot map.
        let private = Span::whole(tensorwire::device::host::private(256).unwrap());
        let own = if me == last { &private } else { &right };
        let text = group.symmetric(own).wait().unwrap_err().to_string();
        assert!(text.contains("cannot map this memory"), "{text}");
        assert!(me == last || text.contains(&format!("rank {last}")), "{text}");
    }
    let handle = group.symmetric(&right).wait().unwrap();
    for (to, channel, words) in
        [(world, 0, "no rank"), (0, CHANNELS, "no channel"), (0, usize::MAX, "no channel")]
    {
        let error = handle.put_signal(to, channel, soon()).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        let error = handle.wait_signal(to, channel, soon()).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    assert!(handle.buffer(world).unwrap_err().to_string().contains("no rank"));
    handle.barrier(0, soon()).unwrap();
}

/// A queue that waits in vain: the handle says so on all ranks, nothing behind the wait is written, and a new one works.
fn in_vain(group: &Group, on: On) {
    let device = on.of(group);
    let (me, world) = (group.rank(), group.world());
    let own = memory(group, &device, 64);
    let handle = group.symmetric(&own).wait().unwrap();
    let broken = Tensor::private(&[0i32]).unwrap();
    if me == 0 && world > 1 {
        let (mut queue, from) = (queue(group, &device), memory(group, &device, 64));
        from.write(0, &[1; 64]).unwrap();
        let waited = handle.wait_signal_on(&mut *queue, 1, 0, Deadline::after(Duration::from_millis(30)));
        let error = match waited {
            // The calling thread waited: nothing is lost, and the handle is as it was.
            Err(error) => error,
            Ok(()) => {
                queue.copy(own.view(), from.view(), Caching::Keep).unwrap();
                let _ = queue.finish(&Abort::local(), soon());
                assert_eq!(own.to_vec().unwrap(), [0; 64]);
                broken.write(&[1i32]).unwrap();
                handle.put_signal(1, 0, soon()).unwrap_err()
            }
        };
        assert!(error.is_timeout() && error.ranks() == [1], "{error}");
        assert!(error.to_string().contains("rank 1"), "{error}");
    }
    group.broadcast(&broken, 0).wait().unwrap();
    match broken.to_vec::<i32>().unwrap()[0] {
        0 => handle.barrier(1, soon()).unwrap(),
        _ => {
            let error = handle.barrier(1, soon()).unwrap_err();
            assert!(error.is_timeout() && error.to_string().contains("make a new one"), "{error}");
            assert!(me == 0 || error.to_string().contains("another rank"), "{error}");
        }
    }
    let again = group.symmetric(&own).wait().unwrap();
    again.barrier(0, soon()).unwrap();
    drop(handle);
    again.barrier(0, soon()).unwrap();
}

/// A barrier that was not in time may be called again, and then all ranks are in step.
fn barrier_again(group: &Group, on: On) {
    let device = on.of(group);
    let (me, world) = (group.rank(), group.world());
    let own = memory(group, &device, 64);
    let handle = group.symmetric(&own).wait().unwrap();
    for round in 0..10u8 {
        if me != 0 {
            let late = handle.barrier(3, Deadline::after(Duration::from_millis(2)));
            assert!(late.is_err_and(|error| error.is_timeout() && error.ranks() == [0]));
        }
        group.barrier().wait().unwrap();
        handle.barrier(3, soon()).unwrap();
        // Nobody is ahead: what is written now is seen behind the next one.
        handle.buffer((me + 1) % world).unwrap().write(0, &[round + me as u8; 8]).unwrap();
        handle.barrier(3, soon()).unwrap();
        let before = (me + world - 1) % world;
        assert_eq!(own.to_vec().unwrap()[..8], [round + before as u8; 8]);
        handle.barrier(4, soon()).unwrap();
    }
}

/// Handles come and go, and need no more descriptors and mappings for that.
fn come_and_go(group: &Group, on: On) {
    let device = on.of(group);
    let own = memory(group, &device, 64);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut before = None;
    for round in 0..60 {
        let handle = group.symmetric(&own).wait().unwrap();
        let mut queue = queue(group, &device);
        handle.barrier_on(&mut *queue, round % CHANNELS, soon()).unwrap();
        finish(&mut *queue);
        drop(handle);
        drop(queue);
        group.barrier().wait().unwrap();
        if round == 20 {
            before = Some((descriptors(), group.context().mapped().0));
        }
    }
    // Ranks that are threads share the descriptors of one process with other tests, which come and go there.
    let alone = std::env::var_os("TEST_OF_RANKS_RANK").is_some();
    if let Some((fds, mappings)) = before.filter(|_| alone) {
        assert!(descriptors() <= fds, "{fds} descriptors before, {} now", descriptors());
        assert!(group.context().mapped().0 <= mappings);
    }
}

/// A rank on the host whose process can open no GPU: it says why it does not reach the others, and signals work all the same.
fn no_driver(group: &Group, on: On) {
    let (me, world) = (group.rank(), group.world());
    let device = if me == 0 { DeviceId::Host } else { on.of(group) };
    let own = memory(group, &device, 64);
    let handle = group.symmetric(&own).wait().unwrap();
    for rank in 0..world {
        let hidden = me == 0 && rank != 0;
        assert_eq!(handle.access(rank).unwrap().is_yes(), !hidden, "{}", handle.explain());
        let buffer = handle.buffer(rank).map(drop);
        assert_eq!(buffer.is_err(), hidden);
        if let Err(error) = buffer {
            assert!(error.to_string().contains("driver"), "{error}");
            assert!(handle.explain().contains("not reached"), "{}", handle.explain());
        }
    }
    handle.barrier(0, soon()).unwrap();
    let mut queue = queue(group, &device);
    handle.barrier_on(&mut *queue, 1, soon()).unwrap();
    finish(&mut *queue);
    handle.barrier(2, soon()).unwrap();
}

#[test]
fn without_a_driver() {
    // With a real GPU every process has a driver.
    if std::env::var_os("TEST_GPU").is_none() {
        ranks::as_processes("without_a_driver", 3, |group| no_driver(group, On::OneGpu));
    }
}

macro_rules! everywhere {
    ($($body:ident)*) => {
        $(mod $body {
            use super::*;
            ranks_of!($body host_1 1 On::Host);
            ranks_of!($body host_2 2 On::Host);
            ranks_of!($body host_4 4 On::Host);
            ranks_of!($body one_gpu_2 2 On::OneGpu);
            ranks_of!($body one_gpu_4 4 On::OneGpu);
            ranks_of!($body two_gpus_4 4 On::TwoGpus);
            ranks_of!($body both_4 4 On::Both);
        })*
    };
}

macro_rules! ranks_of {
    ($body:ident $name:ident $world:literal $on:expr) => {
        mod $name {
            use super::*;

            #[test]
            fn threads() {
                ranks::as_threads($world, |group| super::super::$body(group, $on));
            }

            #[test]
            fn processes() {
                let test = concat!(stringify!($body), "::", stringify!($name), "::processes");
                ranks::as_processes(test, $world, |group| super::super::$body(group, $on));
            }
        }
    };
}

everywhere!(reach ring counted groups refused in_vain barrier_again come_and_go);

mod collectives {
    use super::*;
    ranks_of!(collectives host_4 4 On::Host);
    ranks_of!(collectives one_gpu_4 4 On::OneGpu);
    ranks_of!(collectives two_gpus_4 4 On::TwoGpus);
}
