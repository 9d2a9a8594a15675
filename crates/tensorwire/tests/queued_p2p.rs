//! Messages of tensors on GPUs: from GPU to GPU, and between GPUs and the host. The GPUs are threads
//! (`tensorwire::device::threads`); with TEST_GPU=1 all ranks share the first real GPU. Each body as threads and as processes.

#![allow(clippy::unwrap_used)]

mod gpus;
mod ranks;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gpus::{all_settings, copies, hold, is_real, nothing_is_left, queue, tensor, usage};
use ranks::{LONG, Rank, Ranks, describe};
use rustix::process::{Pid, Signal, getpid, kill_process};
use tensorwire::device::threads::{Settings, VARIABLE, hook, install, uuid};
use tensorwire::device::{Abort, Layout, Queue};
use tensorwire::store::TcpServer;
use tensorwire::{Deadline, DeviceId, Dtype, Error, Group, Tensor, Work};

/// The GPU of a rank: they are dealt in turn.
fn gpu_of(group: &Group, rank: usize) -> DeviceId {
    // Thread ranks share the process, and whoever is first has installed them.
    if !is_real() {
        let _ = install(Settings { gpus: 2, ..Settings::default() });
    }
    gpus::gpu(if group.world() > 3 { rank % 2 } else { 0 })
}

fn mine(group: &Group) -> DeviceId {
    gpu_of(group, group.rank())
}

/// The elements of a message.
fn values(from: usize, to: usize, salt: usize, count: usize) -> Vec<i32> {
    (0..count).map(|at| (from * 1_000_003 + to * 10_007 + salt * 101 + at) as i32).collect()
}

fn blank(group: &Group, device: &DeviceId, count: usize) -> Tensor {
    tensor(group, device, &vec![-1i32; count])
}

fn others(group: &Group) -> impl Iterator<Item = usize> + use<> {
    let (me, world) = (group.rank(), group.world());
    (1..world).map(move |step| (me + step) % world)
}

fn finish(queue: &mut dyn Queue) {
    queue.finish(&Abort::local(), Deadline::after(LONG)).unwrap();
}

const SIZES: [usize; 5] = [1, 0, 7, 1000, 300_000];

/// All ranks send first, and nobody waits for the receiver. A tensor that was sent may change at once on its queue.
fn all_send_first(group: &Group) {
    let (device, me) = (mine(group), group.rank());
    let mut own = queue(group, &device);
    for (salt, count) in SIZES.into_iter().enumerate() {
        for to in others(group) {
            let sent = tensor(group, &device, &values(me, to, salt, count));
            match salt % 3 {
                0 => group.send(&sent, to).wait().unwrap(),
                1 => group.send(&sent, to).start().unwrap().wait().unwrap(),
                _ => {
                    let work = group.send(&sent, to).on(&mut *own).unwrap();
                    let zeros = tensor(group, &device, &vec![0i32; count]);
                    own.copy(sent.span().view(), zeros.span().view(), Default::default()).unwrap();
                    work.wait().unwrap();
                }
            }
            sent.write(&vec![-7i32; count]).unwrap();
        }
    }
    for (salt, count) in SIZES.into_iter().enumerate() {
        for from in others(group) {
            let got = blank(group, &device, count);
            match (salt + from) % 3 {
                0 => group.recv(&got, from).wait().unwrap(),
                1 => group.recv(&got, from).start().unwrap().wait().unwrap(),
                _ => {
                    group.recv(&got, from).on(&mut *own).unwrap().wait().unwrap();
                }
            }
            assert!(got.to_vec::<i32>().unwrap() == values(from, me, salt, count), "{count} from {from}");
        }
    }
}

/// Sends and receives that are started together, many of them, and queues that wait for them.
fn batches(group: &Group) {
    let (device, me, world) = (mine(group), group.rank(), group.world());
    let (next, last) = ((me + 1) % world, (me + world - 1) % world);
    let mut own = queue(group, &device);
    for _ in 0..3 {
        let mut works: Vec<Work> = Vec::new();
        let mut got = Vec::new();
        for salt in 0..40 {
            let source = tensor(group, &device, &values(me, next, salt, 500));
            let sent = blank(group, &device, 500);
            // What is on the queue is sent.
            own.copy(sent.span().view(), source.span().view(), Default::default()).unwrap();
            let into = blank(group, &device, 500);
            let send = group.send(&sent, next).tag(salt as u64 % 3).after(&mut *own).unwrap();
            works.push(send.start().unwrap());
            let receive = group.recv(&into, last).tag(salt as u64 % 3).after(&mut *own).unwrap();
            works.push(receive.start().unwrap());
            got.push(into);
        }
        let copied: Vec<Tensor> = got.iter().map(|_| blank(group, &device, 500)).collect();
        for work in &works {
            work.wait_on(&mut *own).unwrap();
        }
        for (into, from) in copied.iter().zip(&got) {
            own.copy(into.span().view(), from.span().view(), Default::default()).unwrap();
        }
        finish(&mut *own);
        for (salt, copied) in copied.iter().enumerate() {
            assert!(copied.to_vec::<i32>().unwrap() == values(last, me, salt, 500), "message {salt}");
        }
        works.iter().for_each(|work| work.wait().unwrap());
    }
}

/// A tensor with gaps on a device, all of it -1, and how it lies in a flat one.
fn columns(group: &Group, device: &DeviceId, count: usize) -> (Tensor, Tensor) {
    let flat = blank(group, device, (count * 2).max(2));
    let layout = Layout::with_origin(&[count], &[2], 4, 4).unwrap();
    (Tensor::new(flat.span().clone(), Dtype::I32, layout).unwrap(), flat)
}

fn fill(flat: &Tensor, values: &[i32]) {
    let wide: Vec<i32> = values.iter().flat_map(|&value| [-5, value]).collect();
    if !values.is_empty() {
        flat.write(&wide).unwrap();
    }
}

fn odd(flat: &Tensor, count: usize) -> Vec<i32> {
    flat.to_vec::<i32>().unwrap().chunks(2).take(count).map(|pair| pair[1]).collect()
}

/// Tensors of the host and of GPUs on either side, with gaps or without, from one rank or from any.
fn mixed(group: &Group) {
    let (me, world) = (group.rank(), group.world());
    let places = [DeviceId::Host, mine(group)];
    let (next, last) = ((me + 1) % world, (me + world - 1) % world);
    let mut salt = 0;
    for count in [3, 0, 5000, 400_000] {
        for case in 0..32 {
            salt += 1;
            let bit = |number: usize| case >> number & 1;
            let (from, to) = (&places[bit(0)], &places[bit(1)]);
            let (gaps_there, gaps_here, starts) = (bit(2) == 1, bit(3) == 1, bit(4) == 1);
            if count == 400_000 && gaps_there != gaps_here {
                continue;
            }
            let (sent, flat) = columns(group, from, count);
            let mine = values(me, next, salt, count);
            let sent = if gaps_there {
                fill(&flat, &mine);
                sent
            } else {
                tensor(group, from, &mine)
            };
            let work = group.send(&sent, next).start().unwrap();
            let (into, wide) = columns(group, to, count);
            let into = if gaps_here { into } else { blank(group, to, count) };
            match (salt % 2 == 0, starts) {
                (true, false) => group.recv(&into, last).wait().unwrap(),
                (true, true) => group.recv(&into, last).start().unwrap().wait().unwrap(),
                (false, false) => assert_eq!(group.recv_any(&into).wait().unwrap(), last),
                (false, true) => assert_eq!(group.recv_any(&into).start().unwrap().wait().unwrap(), last),
            }
            let got = if gaps_here { odd(&wide, count) } else { into.to_vec::<i32>().unwrap() };
            assert!(got == values(last, me, salt, count), "{count} from {from} to {to}, case {case}");
            if gaps_here {
                assert!(wide.to_vec::<i32>().unwrap().iter().step_by(2).all(|&gap| gap == -1));
            }
            work.wait().unwrap();
        }
    }
}

/// To itself, from any rank in turn, and received on a queue.
fn any_rank(group: &Group) {
    let (device, me, world) = (mine(group), group.rank(), group.world());
    let mut own = queue(group, &device);
    let sent = tensor(group, &device, &values(me, me, 0, 100));
    let work = group.send(&sent, me).start().unwrap();
    let got = blank(group, &device, 100);
    group.recv(&got, me).wait().unwrap();
    work.wait().unwrap();
    assert_eq!(got.to_vec::<i32>().unwrap(), values(me, me, 0, 100));
    group.barrier().wait().unwrap();
    if me > 0 {
        for salt in 0..20 {
            let here = if salt % 4 == 0 { DeviceId::Host } else { device.clone() };
            group.send(&tensor(group, &here, &values(me, 0, salt, 300)), 0).tag(9).wait().unwrap();
        }
    } else {
        let mut counts = vec![0; world];
        for step in 0..20 * (world - 1) {
            let here = if step % 3 == 0 { DeviceId::Host } else { device.clone() };
            let got = blank(group, &here, 300);
            let call = group.recv_any(&got).tag(9);
            let from = match step % 2 {
                0 => call.wait().unwrap(),
                _ => {
                    let any = call.on(&mut *own).unwrap();
                    any.wait().unwrap()
                }
            };
            assert_eq!(got.to_vec::<i32>().unwrap(), values(from, 0, counts[from], 300));
            counts[from] += 1;
        }
        assert!(counts[1..].iter().all(|&count| count == 20), "{counts:?}");
    }
}

/// A pipeline with one forward and one backward in turn: each stage adds one to what comes, and subtracts two on the way back.
fn pipeline(group: &Group) {
    const MICRO: usize = 8;
    let (device, me, world) = (mine(group), group.rank(), group.world());
    let mut own = queue(group, &device);
    let step = |own: &mut dyn Queue, into: &Tensor, delta: i32| {
        let delta = tensor(group, &device, &vec![delta; 1000]);
        let (view, other) = (into.span().view(), delta.span().view());
        own.reduce(gpus::SUM, Dtype::I32, &[view, other], &[view], Default::default()).unwrap();
    };
    let mut done: Vec<Tensor> = Vec::new();
    let mut works: Vec<Work> = Vec::new();
    let forward = |own: &mut dyn Queue, micro: usize| {
        let into = tensor(group, &device, &vec![micro as i32 * 100; 1000]);
        if me > 0 {
            group.recv(&into, me - 1).tag(1).on(own).unwrap().leave_unattended();
        }
        step(own, &into, 1);
        if me + 1 < world {
            group.send(&into, me + 1).tag(1).on(own).unwrap().leave_unattended();
        }
        into
    };
    let backward = |own: &mut dyn Queue, from: Tensor, works: &mut Vec<Work>| {
        let into = if me + 1 < world { blank(group, &device, 1000) } else { from };
        if me + 1 < world {
            let work = group.recv(&into, me + 1).tag(2).after(own).unwrap().start().unwrap();
            work.wait_on(own).unwrap();
            works.push(work);
        }
        step(own, &into, -2);
        if me > 0 {
            works.push(group.send(&into, me - 1).tag(2).after(own).unwrap().start().unwrap());
        }
        into
    };
    let warm = (world - 1 - me).min(MICRO);
    let mut waiting: std::collections::VecDeque<Tensor> =
        (0..warm).map(|micro| forward(&mut *own, micro)).collect();
    for micro in warm..MICRO {
        waiting.push_back(forward(&mut *own, micro));
        let from = waiting.pop_front().unwrap();
        done.push(backward(&mut *own, from, &mut works));
    }
    while let Some(from) = waiting.pop_front() {
        done.push(backward(&mut *own, from, &mut works));
    }
    finish(&mut *own);
    works.iter().for_each(|work| work.wait().unwrap());
    for (micro, done) in done.iter().enumerate() {
        let wanted = micro as i32 * 100 + world as i32 - 2 * (world - me) as i32;
        assert_eq!(done.to_vec::<i32>().unwrap(), vec![wanted; 1000], "micro batch {micro}");
    }
}

fn soon(millis: u64) -> Deadline {
    Deadline::after(Duration::from_millis(millis))
}

/// Receives that are withdrawn lose no message; what does not fit is refused, and the sender's memory comes back.
fn given_up(group: &Group) {
    let (device, me, world) = (mine(group), group.rank(), group.world());
    let (next, last) = ((me + 1) % world, (me + world - 1) % world);
    for here in [DeviceId::Host, device.clone()] {
        let got = blank(group, &here, 100);
        let error = group.recv(&got, last).deadline(soon(20)).wait().unwrap_err();
        assert!(error.is_timeout(), "{error}");
        let dropped = group.recv(&got, last).start().unwrap();
        let withdrawn = group.recv(&got, last).start().unwrap();
        assert!(withdrawn.withdraw());
        drop(dropped);
        assert!(withdrawn.wait().unwrap_err().to_string().contains("withdrawn"));
        group.barrier().wait().unwrap();
        let send =
            |salt| group.send(&tensor(group, &device, &values(me, next, salt, 100)), next).wait().unwrap();
        send(1);
        send(2);
        send(3);
        group.barrier().wait().unwrap();
        // The first does not fit.
        let text = describe(&group.recv(&blank(group, &here, 99), last).wait().unwrap_err());
        assert!(text.starts_with(&format!("Mismatch {last}")) && text.contains("100 int32"), "{text}");
        assert!(got.to_vec::<i32>().unwrap() == [-1; 100]);
        group.recv(&got, last).wait().unwrap();
        assert_eq!(got.to_vec::<i32>().unwrap(), values(last, me, 2, 100));
        group.recv(&got, last).start().unwrap().wait().unwrap();
        assert_eq!(got.to_vec::<i32>().unwrap(), values(last, me, 3, 100));
        group.barrier().wait().unwrap();
    }
    // A receive of any rank that nobody answers.
    let error = group.recv_any(&blank(group, &device, 5)).deadline(soon(20)).wait().unwrap_err();
    assert!(error.is_timeout(), "{error}");
    copies(group, &device, &mut *queue(group, &device));
    group.barrier().wait().unwrap();
}

/// The sender's queue comes to its tensor late: nobody's thread waits, and the receiver's queue does.
fn late_queues(group: &Group) {
    let (device, me, world) = (mine(group), group.rank(), group.world());
    let (next, last) = ((me + 1) % world, (me + world - 1) % world);
    let mut own = queue(group, &device);
    let held = hold(group, &mut *own);
    let ready = tensor(group, &device, &values(me, next, 0, 1000));
    let sent = blank(group, &device, 1000);
    own.copy(sent.span().view(), ready.span().view(), Default::default()).unwrap();
    let work = group.send(&sent, next).on(&mut *own).unwrap();
    let mut other = queue(group, &device);
    let got = blank(group, &device, 1000);
    let received = group.recv(&got, last).on(&mut *other).unwrap();
    let here = blank(group, &DeviceId::Host, 1);
    group.send(&blank(group, &device, 1), next).tag(1).wait().unwrap();
    group.recv(&here, last).tag(1).wait().unwrap();
    assert!(!work.is_done() && !received.is_over());
    assert!(got.to_vec::<i32>().unwrap() == [-1; 1000]);
    group.barrier().wait().unwrap();
    held.signal(1);
    received.wait().unwrap();
    work.wait().unwrap();
    finish(&mut *other);
    assert_eq!(got.to_vec::<i32>().unwrap(), values(last, me, 0, 1000));
    group.barrier().wait().unwrap();

    // Too late: the receiver's time is over, its queue goes on, and nothing was written.
    let held = hold(group, &mut *own);
    let work = group.send(&sent, next).on(&mut *own).unwrap();
    let error = group.recv(&got, last).deadline(soon(100)).wait().unwrap_err();
    assert!(error.is_timeout(), "{error}");
    group.barrier().wait().unwrap();
    held.signal(1);
    work.wait().unwrap();
    assert_eq!(got.to_vec::<i32>().unwrap(), values(last, me, 0, 1000));
    group.send(&ready, next).on(&mut *own).unwrap().wait().unwrap();
    group.recv(&got, last).wait().unwrap();
    copies(group, &device, &mut *other);
    group.barrier().wait().unwrap();

    // The same behind the call: the work tells, and later the next call if nobody asks it.
    got.write(&vec![-1i32; 1000]).unwrap();
    for asked in [true, false] {
        let held = hold(group, &mut *own);
        let work = group.send(&sent, next).on(&mut *own).unwrap();
        let received = group.recv(&got, last).deadline(soon(100)).on(&mut *other).unwrap();
        if asked {
            let error = received.wait().unwrap_err();
            assert!(error.is_timeout() && error.ranks() == [last], "{error}");
        } else {
            let end = Instant::now() + LONG;
            while !received.is_over() {
                assert!(Instant::now() < end);
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(received);
            // Whoever ends it has the last reference perhaps, and lets go of it in a moment: no event tells that.
            std::thread::sleep(Duration::from_millis(100));
            let text = group.barrier().wait().unwrap_err().to_string();
            assert!(text.contains("nobody had asked"), "{text}");
        }
        copies(group, &device, &mut *other);
        group.barrier().wait().unwrap();
        held.signal(1);
        work.wait().unwrap();
        assert!(got.to_vec::<i32>().unwrap() == [-1; 1000]);
        group.barrier().wait().unwrap();
    }

    // The group ends while queues wait: they are free at once.
    let held = hold(group, &mut *own);
    let inner = group.subgroup(&(0..world).collect::<Vec<_>>()).unwrap();
    let work = inner.send(&sent, next).on(&mut *own).unwrap();
    let received = inner.recv(&got, last).on(&mut *other).unwrap();
    group.barrier().wait().unwrap();
    if me == 0 {
        inner.abort("enough");
    }
    let text = received.wait().unwrap_err().to_string();
    assert!(text.contains("enough"), "{text}");
    copies(group, &device, &mut *other);
    group.barrier().wait().unwrap();
    held.signal(1);
    let _ = work.wait();
    drop(inner);
    finish(&mut *own);
    group.barrier().wait().unwrap();
}

/// What was sent before its rank has closed the group still comes.
fn sent_and_closed(group: &Group) {
    let (device, me, world) = (mine(group), group.rank(), group.world());
    let all: Vec<usize> = (0..world).collect();
    let inner = group.subgroup(&all).unwrap();
    if me > 0 {
        inner.send(&tensor(group, &device, &values(me, 0, 4, 2000)), 0).wait().unwrap();
        inner.close().unwrap();
    } else {
        std::thread::sleep(Duration::from_millis(100));
        for from in 1..world {
            let got = blank(group, &device, 2000);
            inner.recv(&got, from).wait().unwrap();
            assert_eq!(got.to_vec::<i32>().unwrap(), values(from, 0, 4, 2000));
        }
    }
    group.barrier().wait().unwrap();
    // And what nobody receives is given back.
    let inner = group.subgroup(&all).unwrap();
    if me > 0 {
        inner.send(&tensor(group, &device, &values(me, 0, 4, 2000)), 0).wait().unwrap();
        group.barrier().wait().unwrap();
        inner.close().unwrap();
    } else {
        group.barrier().wait().unwrap();
        inner.close().unwrap();
    }
    group.barrier().wait().unwrap();
}

/// Runs a body, and sees that it leaves nothing behind.
fn cleanly(group: &Group, body: fn(&Group), alone: bool) {
    let _ = mine(group);
    group.barrier().wait().unwrap();
    let before = usage();
    body(group);
    group.barrier().wait().unwrap();
    // Threads share the GPUs' counters.
    if alone {
        nothing_is_left(group, before);
    }
    group.barrier().wait().unwrap();
}

/// Nothing grows, however much is sent.
fn again_and_again(group: &Group) {
    let (device, me, world) = (mine(group), group.rank(), group.world());
    let (next, last) = ((me + 1) % world, (me + world - 1) % world);
    let sent = Tensor::flat(gpus::span(group, &device, 40_000), Dtype::I32).unwrap();
    let got = blank(group, &device, 10_000);
    for round in 0..300 {
        sent.write(&values(me, next, round, 10_000)).unwrap();
        group.send(&sent, next).wait().unwrap();
        group.recv(&got, last).wait().unwrap();
        assert!(got.to_vec::<i32>().unwrap() == values(last, me, round, 10_000), "round {round}");
    }
    let stats = group.context().pool(&device).unwrap().stats();
    assert!(stats.most < 16 << 20, "{stats:?}");
    assert_eq!(group.context().lease_stats().unwrap().expired.0, 0);
}

/// A body as threads of one process, on one GPU and on two, and as processes with all kinds of GPUs.
macro_rules! each_way {
    ($($body:ident: $threads:ident $two:ident $processes:ident)*) => {$(
        #[test]
        fn $threads() {
            ranks::as_threads(3, |group| cleanly(group, $body, false));
        }

        #[test]
        fn $two() {
            ranks::as_threads(4, |group| cleanly(group, $body, false));
        }

        #[test]
        fn $processes() {
            if let Some(rank) = Rank::of_this_process() {
                return cleanly(&rank.group(), $body, true);
            }
            for settings in all_settings() {
                gpus::run(stringify!($processes), 2, &settings, &[]);
            }
        }
    )*};
}

each_way! {
    all_send_first: all_send_first_threads all_send_first_on_two_gpus all_send_first_processes
    batches: batches_threads batches_on_two_gpus batches_processes
    mixed: mixed_threads mixed_on_two_gpus mixed_processes
    any_rank: any_rank_threads any_rank_on_two_gpus any_rank_processes
    pipeline: pipeline_threads pipeline_on_two_gpus pipeline_processes
    given_up: given_up_threads given_up_on_two_gpus given_up_processes
    sent_and_closed: sent_and_closed_threads sent_and_closed_on_two_gpus sent_and_closed_processes
    again_and_again: again_and_again_threads again_and_again_on_two_gpus again_and_again_processes
}

/// Between hosts the bytes go through memory of the host.
#[test]
fn mixed_apart() {
    ranks::as_threads_on(ranks::Placement::Apart, 3, |group| cleanly(group, mixed, false));
}

#[test]
fn mixed_in_pairs() {
    ranks::as_threads_on(ranks::Placement::Pairs, 4, |group| cleanly(group, mixed, false));
}

#[test]
fn any_rank_in_pairs() {
    ranks::as_threads_on(ranks::Placement::Pairs, 4, |group| cleanly(group, any_rank, false));
}

/// A process that cannot open the GPU of its sender says so and names both, whatever it receives into; and the sender gets its
/// memory back.
#[test]
fn a_gpu_that_the_receiver_does_not_see() {
    let name = "a_gpu_that_the_receiver_does_not_see";
    let Some(rank) = Rank::of_this_process() else {
        if is_real() {
            return;
        }
        let server = TcpServer::bind("127.0.0.1:0").unwrap();
        let start = |rank: usize| {
            let settings = Settings { gpus: 2 - rank, ..Settings::default() };
            ranks::Process::start(name, rank, 2, &server, |_, mut command| {
                command.env(VARIABLE, settings.to_string());
                command
            })
        };
        return [0, 1].map(start).into_iter().for_each(ranks::Process::expect_success);
    };
    let group = rank.group();
    if rank.rank == 0 {
        let used = || group.context().pool(&gpus::gpu(1)).unwrap().stats().used;
        let before = used();
        for _ in 0..4 {
            group.send(&tensor(&group, &gpus::gpu(1), &[3i32; 1000]), 1).wait().unwrap();
        }
        group.send(&tensor(&group, &gpus::gpu(0), &[4i32; 1000]), 1).wait().unwrap();
        group.barrier().wait().unwrap();
        let end = Instant::now() + LONG;
        while used() > before {
            assert!(Instant::now() < end, "{} bytes are in use", used());
            std::thread::sleep(Duration::from_millis(5));
        }
    } else {
        for here in [DeviceId::Host, gpus::gpu(0)] {
            let got = blank(&group, &here, 1000);
            let waited = group.recv(&got, 0).wait();
            let started = group.recv(&got, 0).start().unwrap().wait();
            for end in [waited, started] {
                let text = describe(&end.unwrap_err());
                assert!(
                    text.starts_with("Unsupported | ") && text.contains("have its process see it"),
                    "{text}"
                );
                assert!(text.contains("rank 0 (") && text.contains("rank 1 ("), "{text}");
                assert!(text.contains(&DeviceId::Gpu(uuid(1)).to_string()), "{text}");
            }
            assert_eq!(got.to_vec::<i32>().unwrap(), [-1; 1000]);
        }
        let got = blank(&group, &DeviceId::Host, 1000);
        group.recv(&got, 0).wait().unwrap();
        assert_eq!(got.to_vec::<i32>().unwrap(), [4; 1000]);
        group.barrier().wait().unwrap();
    }
    group.barrier().wait().unwrap();
}

/// A rank that closes the group while its queue has yet to come to what it has sent.
#[test]
fn closed_with_a_late_queue() {
    let Some(rank) = Rank::of_this_process() else {
        return gpus::run("closed_with_a_late_queue", 2, &all_settings()[0], &[]);
    };
    let group = rank.group();
    let (device, inner) = (mine(&group), group.subgroup(&[0, 1]).unwrap());
    if rank.rank == 0 {
        let mut own = queue(&group, &device);
        let held = hold(&group, &mut *own);
        let sent = tensor(&group, &device, &[8i32; 1000]);
        let work = inner.send(&sent, 1).on(&mut *own).unwrap();
        let opener = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(1500));
            held.signal(1);
        });
        inner.close().unwrap();
        work.wait().unwrap();
        opener.join().unwrap();
    } else {
        let got = blank(&group, &device, 1000);
        inner.recv(&got, 0).wait().unwrap();
        assert_eq!(got.to_vec::<i32>().unwrap(), [8; 1000]);
    }
    group.barrier().wait().unwrap();
}

/// GPUs that do not reach each other go through the host, which is told, and refused in strict mode.
#[test]
fn gpus_apart() {
    let name = "gpus_apart";
    let Some(rank) = Rank::of_this_process() else {
        if !is_real() {
            let settings = Settings { gpus: 2, peers: false, ..Settings::default() };
            gpus::run(name, 2, &settings, &[]);
            gpus::run(name, 2, &settings, &[("TENSORWIRE_STRICT", "1".into())]);
        }
        return;
    };
    let group = rank.group();
    let (me, other) = (rank.rank, 1 - rank.rank);
    for count in [5, 50_000] {
        group.send(&tensor(&group, &gpus::gpu(me), &values(me, other, 1, count)), other).wait().unwrap();
        let (into, wide) = columns(&group, &gpus::gpu(me), count);
        let end = group.recv(&into, other).wait();
        if !group.context().config().strict {
            end.unwrap();
            assert!(odd(&wide, count) == values(other, me, 1, count), "{count}");
            continue;
        }
        let text = describe(&end.unwrap_err());
        assert!(text.starts_with("Unsupported | ") && text.contains("strict mode"), "{text}");
    }
    let told = group.explain();
    let around = told.contains("messages of GPUs through memory of the host: 2 (");
    assert_eq!(around, !group.context().config().strict, "{told}");
    group.barrier().wait().unwrap();
}

/// A sender that is stopped cannot hand its memory over: the receive ends at its deadline, and a later one gets the message.
#[test]
fn a_sender_that_is_stopped() {
    let Some(rank) = Rank::of_this_process() else {
        return gpus::run("a_sender_that_is_stopped", 2, &all_settings()[0], &[]);
    };
    let group = rank.group();
    let device = mine(&group);
    if rank.rank == 0 {
        group.send(&tensor(&group, &device, &[5i32; 1000]), 1).wait().unwrap();
        kill_process(getpid(), Signal::STOP).unwrap();
    } else {
        let pid = group.members()[0].pid;
        let stopped = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") T ");
        while !stopped() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let got = blank(&group, &device, 1000);
        // Waited for, and started.
        for started in [false, true] {
            let call = group.recv(&got, 0).deadline(soon(200));
            let error = if started { call.start().unwrap().wait() } else { call.wait() }.unwrap_err();
            assert!(error.is_timeout(), "{error}");
            assert!(error.to_string().contains(&format!("process {pid}")), "{error}");
        }
        kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::CONT).unwrap();
        group.recv(&got, 0).wait().unwrap();
        assert_eq!(got.to_vec::<i32>().unwrap(), [5; 1000]);
    }
    group.barrier().wait().unwrap();
}

/// A GPU without memory for the copy: the send says so, and nothing is sent.
#[test]
fn no_memory_for_the_copy() {
    let Some(rank) = Rank::of_this_process() else {
        return gpus::run("no_memory_for_the_copy", 2, &all_settings()[0], &[]);
    };
    let group = rank.group();
    let device = mine(&group);
    let to = 1 - rank.rank;
    let sent = tensor(&group, &device, &[6i32; 20 << 20]);
    group.barrier().wait().unwrap();
    if rank.rank == 0 {
        let full = gpus::fill(&group, &device);
        let text = group.send(&sent, to).start().unwrap_err().to_string();
        println!("{text}");
        assert!(text.to_lowercase().contains("memory"), "{text}");
        drop(full);
    }
    group.barrier().wait().unwrap();
    group.send(&sent, to).wait().unwrap();
    let got = blank(&group, &device, 20 << 20);
    group.recv(&got, to).wait().unwrap();
    assert!(got.to_vec::<i32>().unwrap() == vec![6; 20 << 20]);
    group.barrier().wait().unwrap();
}

fn die() {
    kill_process(getpid(), Signal::KILL).unwrap();
    std::thread::sleep(LONG);
}

/// Messages of all kinds between all ranks, until the first error.
fn burst(group: &Group, queues: &mut [Box<dyn Queue>; 2], salt: usize) -> Result<(), Error> {
    let (device, me) = (mine(group), group.rank());
    let mut works = Vec::new();
    for to in others(group) {
        let count = 10 + 3000 * (salt % 2);
        let sent = tensor(group, &device, &values(me, to, salt, count));
        let [own, other] = queues;
        works.push(match salt % 3 {
            0 => group.send(&sent, to).on(&mut **own)?,
            1 => group.send(&sent, to).after(&mut **other)?.start()?,
            _ => group.send(&blank(group, &DeviceId::Host, count), to).start()?,
        });
    }
    let mut received = Vec::new();
    for from in others(group) {
        let count = 10 + 3000 * (salt % 2);
        let here = if salt % 4 == 3 { DeviceId::Host } else { device.clone() };
        let got = blank(group, &here, count);
        let [own, other] = queues;
        match salt % 3 {
            1 => {
                let work = group.recv(&got, from).start()?;
                work.wait_on(&mut **other)?;
                received.push((work, from, got));
            }
            _ => received.push((group.recv(&got, from).on(&mut **own)?, from, got)),
        }
    }
    // What counts as received is right, whatever happens to others.
    for (work, from, got) in received {
        work.wait()?;
        let wanted = if salt % 3 == 2 { vec![-1; got.len()] } else { values(from, me, salt, got.len()) };
        assert!(got.to_vec::<i32>().unwrap() == wanted, "message {salt} from {from}");
    }
    works.iter().try_for_each(Work::wait)
}

/// A rank dies before a command of one of its queues, or after so many microseconds. The others hear who it was, their queues are
/// free, a smaller group works, and nothing is left.
fn survive(rank: &Rank) {
    let (mut group, kill) = (rank.group(), gpus::variable("KILL"));
    let numbers: Vec<usize> = kill.split(' ').map(|word| word.parse().unwrap()).collect();
    let (victim, timed, at) = (numbers[0], numbers[1] == 1, numbers[2]);
    let device = mine(&group);
    let before = usage();
    let mut queues = [0, 1].map(|_| queue(&group, &device));
    burst(&group, &mut queues, 0).unwrap();
    group.barrier().wait().unwrap();
    if group.rank() == victim {
        let passed = AtomicUsize::new(0);
        if timed {
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_micros(at as u64));
                die();
            });
        } else {
            hook::set(move |_| {
                if passed.fetch_add(1, Ordering::SeqCst) == at {
                    die();
                }
            });
        }
    }
    let error = (1..).find_map(|salt| burst(&group, &mut queues, salt).err()).unwrap();
    let text = describe(&error);
    assert!(text.starts_with(&format!("Died {victim} | rank {victim} (host ")), "{kill}: {text}");
    queues.iter_mut().for_each(|queue| copies(&group, &device, &mut **queue));
    let next = group.shrink().unwrap();
    drop(std::mem::replace(&mut group, next));
    burst(&group, &mut queues, 0).unwrap();
    gpus::works(&group, &device);
    group.barrier().wait().unwrap();
    nothing_is_left(&group, before);
    group.barrier().wait().unwrap();
}

#[test]
fn killed() {
    if let Some(rank) = Rank::of_this_process() {
        return survive(&rank);
    }
    let mut random = ranks::random::Random(std::process::id().into());
    for number in 0..10 {
        let timed = is_real() || number % 2 == 0;
        let at = random.below(if timed { 4000 } else { 40 });
        let (victim, settings) = (random.below(3), all_settings()[number % all_settings().len()].clone());
        let kill = format!("{victim} {} {at}", u8::from(timed));
        println!("kill {kill} with {settings}");
        let Ranks { ranks, server: _server } = gpus::start("killed", 3, &settings, &[("KILL", kill)]);
        for mut rank in ranks {
            if rank.rank != victim {
                rank.expect_success();
                continue;
            }
            let signal = std::os::unix::process::ExitStatusExt::signal(&rank.finish());
            assert_eq!(signal, Some(9), "{}", rank.take_errors());
        }
    }
}

/// Only streams that wait can be held, and ranks that are threads share those of a GPU.
#[test]
fn late_queues_processes() {
    if let Some(rank) = Rank::of_this_process() {
        return late_queues(&rank.group());
    }
    gpus::run("late_queues_processes", 3, &all_settings()[0], &[]);
}
