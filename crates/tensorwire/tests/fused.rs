//! Reductions of symmetric memory by work of all ranks' queues that waits for each other (`Symmetric::all_reduce_on`).
//!
//! Each body runs on the host, on GPUs of threads of which each rank has one, and on one that all ranks share under MPS; as
//! threads and as processes. With TEST_GPU=1 the first real GPU stands for the shared one, if MPS is there: a kernel that waits
//! for another process takes a turn of the GPU otherwise, and the library refuses it.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod gpus;
mod ranks;

use std::rc::Rc;
use std::time::Duration;

use gpus::is_real;
use ranks::random::Random;
use ranks::{LONG, Rank, describe};
use rustix::process::{Signal, getpid, kill_process};
use tensorwire::device::meeting::CHANNELS;
use tensorwire::device::threads::{Settings, install, uuid};
use tensorwire::device::{Abort, Caching, Queue};
use tensorwire::symmetric::Mover;
use tensorwire::{Deadline, DeviceId, Dtype, Error, Group, ReduceOp, Span, Symmetric, Tensor};

/// Where the ranks have their memory.
#[derive(Clone, Copy, PartialEq, Debug)]
enum On {
    Host,
    /// A GPU for each.
    Own,
    /// One for all, with a server. Ranks that are threads of one process cannot do so.
    Shared,
}

impl On {
    fn of(self, group: &Group) -> DeviceId {
        match self {
            Self::Host => DeviceId::Host,
            _ if is_real() => gpus::gpu(0),
            Self::Own => DeviceId::Gpu(uuid(group.rank())),
            Self::Shared => DeviceId::Gpu(uuid(0)),
        }
    }

    /// Why there is nothing to test here.
    fn missing(self) -> Option<&'static str> {
        if self == Self::Host || !is_real() {
            return None;
        }
        use tensorwire::device::Device;
        let served = tensorwire::device::cuda::Gpu::open(0).unwrap().is_served();
        match self {
            Self::Own => Some("there is no GPU for each rank"),
            _ if !served => Some("there is no MPS"),
            _ => None,
        }
    }
}

fn settings() -> Settings {
    Settings { gpus: 8, mps: true, prompt: true, ..Settings::default() }
}

fn soon() -> Deadline {
    // A GPU that does not answer is not worth the hour.
    Deadline::after(if is_real() { Duration::from_secs(20) } else { LONG })
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

/// Numbers of any type: neither infinite nor none, whatever is done to a few of them.
fn numbers(random: &mut Random, dtype: Dtype, count: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..count * dtype.size()).map(|_| random.next() as u8).collect();
    let part = if dtype.is_complex() { dtype.size() / 2 } else { dtype.size() };
    for number in bytes.chunks_exact_mut(part) {
        match dtype {
            Dtype::Bool => number[0] &= 1,
            // Without the upper bit of the exponent.
            _ => number[part - 1] &= 0xbf,
        }
    }
    bytes
}

/// Every operation on every type, at odd sizes and places, has the bits of `Group::all_reduce`.
fn bits(group: &Group, on: On) {
    let device = on.of(group);
    let mut random = Random(group.rank() as u64 + 1);
    let own = memory(group, &device, 1 << 20);
    let handle = group.symmetric(&own).wait().unwrap();
    let mut queue = queue(group, &device);
    let mut round = 0;
    for dtype in Dtype::ALL {
        for op in ReduceOp::ALL.into_iter().filter(|op| op.check(dtype).is_ok()) {
            let count = [1, 3, 40, 257, 1000, 5000][round % 6];
            let start = [0, 16, 3 * dtype.size(), 5][round / 6 % 4];
            round += 1;
            let mine = numbers(&mut random, dtype, count);
            let expected =
                Tensor::flat(group.alloc(mine.len()).unwrap().slice(0..mine.len()).unwrap(), dtype).unwrap();
            expected.span().write(0, &mine).unwrap();
            group.all_reduce(&expected, op).wait().unwrap();
            own.write(0, &vec![0x5a; start + mine.len() + 64]).unwrap();
            own.write(start, &mine).unwrap();
            handle
                .all_reduce_on(&mut *queue, op, dtype, start..start + mine.len(), round % CHANNELS, soon())
                .unwrap();
            finish(&mut *queue);
            handle.check().unwrap();
            let all = own.to_vec().unwrap();
            let (before, got) = all.split_at(start);
            assert!(
                got[..mine.len()] == expected.span().to_vec().unwrap(),
                "{op} of {count} {dtype} at {start}"
            );
            assert!(
                before.iter().chain(&got[mine.len()..][..64]).all(|&byte| byte == 0x5a),
                "{op} of {dtype}"
            );
        }
    }
    handle.barrier(0, soon()).unwrap();
}

/// Larger ones, which a GPU does in three launches.
fn large(group: &Group, on: On) {
    let device = on.of(group);
    let count = (9 << 20) / 4 + 7;
    let own = memory(group, &device, 4 * count);
    let handle = group.symmetric(&own).wait().unwrap();
    let mut queue = queue(group, &device);
    let (me, world) = (group.rank() as i32, group.world() as i32);
    for round in 0..4 {
        let mine: Vec<u8> = (0..count as i32).flat_map(|at| (at * (me + 1) + round).to_le_bytes()).collect();
        own.write(0, &mine).unwrap();
        handle.all_reduce_on(&mut *queue, ReduceOp::Sum, Dtype::I32, 0..4 * count, 0, soon()).unwrap();
        finish(&mut *queue);
        let sums: i32 = (1..=world).sum();
        let expected: Vec<u8> =
            (0..count as i32).flat_map(|at| (at.wrapping_mul(sums) + round * world).to_le_bytes()).collect();
        assert!(own.to_vec().unwrap() == expected, "round {round}");
    }
    handle.barrier(0, soon()).unwrap();
}

/// Many rounds that nobody waits for in between: each begins when the last is done on all ranks.
fn rounds(group: &Group, on: On) {
    let device = on.of(group);
    let (me, world) = (group.rank() as i32, group.world() as i32);
    let count = 3000;
    let (own, sum) = (memory(group, &device, 4 * count), memory(group, &device, 4 * count));
    let handle = group.symmetric(&own).wait().unwrap();
    let sources: Vec<Span> = (0..4)
        .map(|number| {
            let source = memory(group, &device, 4 * count);
            let values = (0..count as i32).flat_map(|at| ((at + number) * (me + 3)).to_le_bytes());
            source.write(0, &values.collect::<Vec<u8>>()).unwrap();
            source
        })
        .collect();
    let mut queue = queue(group, &device);
    let mut random = Random(me as u64 + 9);
    for round in 0..200 {
        if random.below(30) == 0 {
            std::thread::sleep(Duration::from_micros(random.below(1500) as u64));
        }
        // The abort words of the last round are those of this one, but a kernel that copies would look at them.
        queue.begin(None).unwrap();
        queue.copy(own.view(), sources[round % 4].view(), Caching::Keep).unwrap();
        // Sizes that have other grids, and the rest as it is.
        let bytes = [4 * count, 400, 4, 8000][round / 4 % 4];
        handle.all_reduce_on(&mut *queue, ReduceOp::Sum, Dtype::I32, 0..bytes, 1, soon()).unwrap();
        queue.begin(None).unwrap();
        let views = [sum.view(), own.view()];
        queue.reduce(ReduceOp::Sum, Dtype::I32, &views, &[sum.view()], Caching::Keep).unwrap();
    }
    finish(&mut *queue);
    handle.check().unwrap();
    let factor: i32 = (0..world).map(|rank| rank + 3).sum();
    let expected = |at: i32| {
        (0..200).fold(0i32, |sum, round| {
            let bytes = [4 * count, 400, 4, 8000][round / 4 % 4];
            let value = at + round as i32 % 4;
            let reduced = 4 * (at as usize) < bytes;
            sum.wrapping_add(value.wrapping_mul(if reduced { factor } else { me + 3 }))
        })
    };
    let expected: Vec<u8> = (0..count as i32).flat_map(|at| expected(at).to_le_bytes()).collect();
    assert!(sum.to_vec().unwrap() == expected);
    handle.barrier(0, soon()).unwrap();
}

/// Two queues of one handle at once, each on a channel and bytes of its own; and a second handle on a third one.
fn channels(group: &Group, on: On) {
    let device = on.of(group);
    let (me, world) = (group.rank() as i32, group.world() as i32);
    let own = memory(group, &device, 64 << 10);
    let handle = group.symmetric(&own).wait().unwrap();
    let other = group.symmetric(&own).wait().unwrap();
    let mut queues = [0, 1, 2].map(|_| queue(group, &device));
    let mut random = Random(me as u64 + 3);
    for round in 0..60 {
        let values = |at: i32| vec![(me + 1) * 10 + at + round; 2000];
        for at in 0..3 {
            let bytes: Vec<u8> = values(at).into_iter().flat_map(i32::to_le_bytes).collect();
            own.write(at as usize * 8000, &bytes).unwrap();
        }
        for (at, queue) in queues.iter_mut().enumerate() {
            if random.below(10) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(500) as u64));
            }
            let (handle, channel) = if at == 2 { (&other, 3) } else { (&handle, 2 + at) };
            let bytes = at * 8000..(at + 1) * 8000;
            handle.all_reduce_on(&mut **queue, ReduceOp::Sum, Dtype::I32, bytes, channel, soon()).unwrap();
        }
        queues.iter_mut().for_each(|queue| finish(&mut **queue));
        let all = own.to_vec().unwrap();
        for at in 0..3 {
            let sum: i32 = (0..world).map(|rank| (rank + 1) * 10 + at + round).sum();
            let got = &all[at as usize * 8000..][..8000];
            assert!(got.chunks_exact(4).all(|word| word == sum.to_le_bytes()), "round {round}, {at}");
        }
    }
    handle.barrier(0, soon()).unwrap();
}

/// Kernels of a third handle would have no room on a GPU: it is refused on all ranks, until one of the others goes.
fn third(group: &Group, on: On) {
    let device = on.of(group);
    let own = memory(group, &device, 4096);
    let mut queue = queue(group, &device);
    let mut reduce = |handle: &tensorwire::Symmetric| {
        let done = handle.all_reduce_on(&mut *queue, ReduceOp::Sum, Dtype::I32, 0..4096, 0, soon());
        finish(&mut *queue);
        handle.barrier(0, soon()).unwrap();
        done
    };
    let first = group.symmetric(&own).wait().unwrap();
    let second = group.symmetric(&own).wait().unwrap();
    let third = group.symmetric(&own).wait().unwrap();
    reduce(&first).unwrap();
    reduce(&second).unwrap();
    if on == On::Host {
        return reduce(&third).unwrap();
    }
    let refused = reduce(&third).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused:?}");
    assert!(refused.to_string().contains("has two handles on that GPU"), "{refused}");
    assert!(third.explain().contains("has two handles on that GPU"), "{}", third.explain());
    drop(first);
    reduce(&third).unwrap_err();
    let again = group.symmetric(&own).wait().unwrap();
    reduce(&again).unwrap();
    reduce(&second).unwrap();
}

/// What the operations are tested with: numbers that tell rank, place and round.
fn pattern(rank: usize, round: usize, count: usize) -> Vec<i32> {
    (0..count).map(|at| (at as i32).wrapping_mul(7) + (1000 * rank + 31 * round) as i32).collect()
}

fn to_bytes(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// All operations but the all-reduce in place, on `count` elements for each rank: the first part of the handle's memory is what each
/// gives, the second one is gathered in place, and the third one is broadcast.
struct Operations {
    count: usize,
    by: Mover,
    one_shot: Span,
    reduced: Span,
    gathered: Span,
    exchanged: Span,
}

impl Operations {
    fn new(group: &Group, device: &DeviceId, count: usize, by: Mover) -> Self {
        let all = 4 * count * group.world();
        Self {
            count,
            by,
            one_shot: memory(group, device, all),
            reduced: memory(group, device, 4 * count),
            gathered: memory(group, device, all),
            exchanged: memory(group, device, all),
        }
    }

    /// Bytes of each of the three parts.
    fn len(&self, world: usize) -> usize {
        4 * self.count * world
    }

    fn fill(&self, own: &Span, (me, world, round): (usize, usize, usize)) {
        let len = self.len(world);
        own.write(0, &to_bytes(&pattern(me, round, self.count * world))).unwrap();
        own.write(len, &vec![0x33; len]).unwrap();
        own.write(len + 4 * self.count * me, &to_bytes(&pattern(me, round + 1, self.count))).unwrap();
        own.write(2 * len, &to_bytes(&pattern(me, round + 2, self.count * world))).unwrap();
    }

    fn queue(
        &self,
        handle: &Symmetric,
        queue: &mut dyn Queue,
        (root, channel): (usize, usize),
    ) -> tensorwire::Result<()> {
        let (sum, by, end) = ((ReduceOp::Sum, Dtype::I32), self.by, soon());
        let len = self.len(handle.world());
        handle.one_shot_on(queue, sum, 0..len, &self.one_shot, channel, end)?;
        handle.reduce_scatter_on(queue, sum, (0..len, &self.reduced), by, channel, end)?;
        handle.all_gather_on(queue, 0..4 * self.count, Some(&self.gathered), by, channel, end)?;
        handle.all_gather_on(queue, len..2 * len, None, by, channel, end)?;
        handle.all_to_all_on(queue, 0..len, &self.exchanged, by, channel, end)?;
        handle.broadcast_on(queue, root, 2 * len..3 * len, by, channel, end)
    }

    fn check(&self, own: &Span, (me, world, round): (usize, usize, usize), root: usize) {
        let (count, len) = (self.count, self.len(world));
        let given: Vec<Vec<i32>> = (0..world).map(|rank| pattern(rank, round, count * world)).collect();
        let sums: Vec<i32> = (0..count * world)
            .map(|at| given.iter().fold(0i32, |sum, values| sum.wrapping_add(values[at])))
            .collect();
        let what = |name: &str| format!("{name} of {count} by {:?}, round {round}", self.by);
        assert!(self.one_shot.to_vec().unwrap() == to_bytes(&sums), "{}", what("one_shot"));
        let mine = &sums[count * me..count * (me + 1)];
        assert!(self.reduced.to_vec().unwrap() == to_bytes(mine), "{}", what("reduce_scatter"));
        let gathered: Vec<i32> = given.iter().flat_map(|values| values[..count].to_vec()).collect();
        assert!(self.gathered.to_vec().unwrap() == to_bytes(&gathered), "{}", what("all_gather"));
        let all = own.to_vec().unwrap();
        let in_place: Vec<i32> = (0..world).flat_map(|rank| pattern(rank, round + 1, count)).collect();
        assert!(all[len..2 * len] == to_bytes(&in_place), "{}", what("all_gather in place"));
        let exchanged: Vec<i32> =
            given.iter().flat_map(|values| values[count * me..count * (me + 1)].to_vec()).collect();
        assert!(self.exchanged.to_vec().unwrap() == to_bytes(&exchanged), "{}", what("all_to_all"));
        let sent = pattern(root, round + 2, count * world);
        assert!(all[2 * len..3 * len] == to_bytes(&sent), "{}", what("broadcast"));
    }
}

/// All operations, by kernels and by engines, of odd and of large sizes.
fn operations(group: &Group, on: On) {
    let device = on.of(group);
    let (me, world) = (group.rank(), group.world());
    let mut queue = queue(group, &device);
    let mut random = Random(me as u64 + 21);
    // What three launches of a real GPU do; the cores of a test machine are few.
    let large = if is_real() { 600_000 } else { 20_000 };
    for (round, count) in [1, 3, 40, 1000, 7001, large].into_iter().enumerate() {
        for by in [Mover::Kernels, Mover::Engines] {
            let work = Operations::new(group, &device, count, by);
            let own = memory(group, &device, 3 * work.len(world));
            let handle = group.symmetric(&own).wait().unwrap();
            for again in 0..2 {
                let round = 10 * round + again;
                let (root, channel) = (round % world, round % CHANNELS);
                work.fill(&own, (me, world, round));
                handle.barrier(0, soon()).unwrap();
                if random.below(4) == 0 {
                    std::thread::sleep(Duration::from_micros(random.below(1500) as u64));
                }
                work.queue(&handle, &mut *queue, (root, channel)).unwrap();
                finish(&mut *queue);
                handle.check().unwrap();
                work.check(&own, (me, world, round), root);
                handle.barrier(1, soon()).unwrap();
            }
        }
    }
    // In place: this rank's part of its own memory.
    let own = memory(group, &device, 400 * world);
    own.write(0, &to_bytes(&pattern(me, 1, 100 * world))).unwrap();
    let handle = group.symmetric(&own).wait().unwrap();
    let part = own.slice(400 * me..400 * (me + 1)).unwrap();
    let what = (ReduceOp::Sum, Dtype::I32);
    handle.reduce_scatter_on(&mut *queue, what, (0..400 * world, &part), Mover::Kernels, 0, soon()).unwrap();
    handle.all_gather_on(&mut *queue, 0..400 * world, None, Mover::Kernels, 0, soon()).unwrap();
    finish(&mut *queue);
    let sum = |at: usize| (0..world).map(|rank| pattern(rank, 1, at + 1)[at]).sum::<i32>();
    let sums: Vec<i32> = (0..100 * world).map(sum).collect();
    assert!(own.to_vec().unwrap() == to_bytes(&sums));
    handle.barrier(0, soon()).unwrap();
}

/// A rank does not come to a gather: nobody's output is written, and all hear of it.
fn nobody_gathers(group: &Group, on: On) {
    let device = on.of(group);
    let (me, world) = (group.rank(), group.world());
    let own = memory(group, &device, 4096);
    own.write(0, &[me as u8 + 1; 4096]).unwrap();
    let output = memory(group, &device, 4096 * world);
    let handle = group.symmetric(&own).wait().unwrap();
    let mut queue = queue(group, &device);
    handle.barrier(0, soon()).unwrap();
    if me + 1 < world {
        let deadline = Deadline::after(Duration::from_secs(2));
        let _ = handle.all_gather_on(&mut *queue, 0..4096, Some(&output), Mover::Kernels, 0, deadline);
        let _ = queue.finish(&Abort::local(), soon());
        let error = handle.check().unwrap_err();
        assert!(error.is_timeout() && error.ranks() == [world - 1], "{}", describe(&error));
    }
    group.barrier().wait().unwrap();
    if me + 1 == world {
        // It comes when the others have given up.
        let _ = handle.all_gather_on(&mut *queue, 0..4096, Some(&output), Mover::Kernels, 0, soon());
        let _ = queue.finish(&Abort::local(), soon());
        handle.check().unwrap_err();
    }
    assert!(output.to_vec().unwrap().iter().all(|&byte| byte == 0), "nothing is written");
    group.barrier().wait().unwrap();
}

/// Memory of the host: the caller of the thread that waits ends its wait. The others hear who gave up, and wait for nobody.
#[test]
fn a_wait_on_the_host_is_interrupted() {
    ranks::as_threads(2, |group| {
        let own = memory(group, &DeviceId::Host, 64);
        let handle = group.symmetric(&own).wait().unwrap();
        let mut queue = queue(group, &DeviceId::Host);
        let mut call =
            || handle.all_reduce_on(&mut *queue, ReduceOp::Sum, Dtype::U8, 0..64, 0, soon()).unwrap_err();
        if group.rank() == 0 {
            let enough = Rc::new(|| Err(Error::Interrupted("enough".into())));
            let error = tensorwire::interrupt::with_interrupt(enough, &mut call);
            assert!(matches!(&error, Error::Interrupted(text) if text == "enough"), "{error:?}");
        }
        group.barrier().wait().unwrap();
        let error = call().to_string();
        assert!(error.contains("rank 0") && error.contains("all ranks make a new one"), "{error}");
        group.barrier().wait().unwrap();
    });
}

/// The last rank does not come: the others end by their deadline, and it ends at once when it does come. Nobody writes
/// anything, and new handles work.
fn never_comes(group: &Group, on: On) {
    let device = on.of(group);
    let (me, world) = (group.rank(), group.world());
    for bytes in [4096, 4 << 20] {
        let own = memory(group, &device, bytes);
        let mine = vec![me as u8 + 1; bytes];
        own.write(0, &mine).unwrap();
        let handle = group.symmetric(&own).wait().unwrap();
        let behind = memory(group, &device, bytes);
        let mut own_queue = queue(group, &device);
        let (op, late) = (ReduceOp::Sum, me + 1 == world);
        // Only the last rank may be missing.
        handle.barrier(0, soon()).unwrap();
        if late {
            // When the others have given up.
            group.barrier().wait().unwrap();
        }
        let deadline = if late { soon() } else { Deadline::after(Duration::from_secs(3)) };
        let called = handle.all_reduce_on(&mut *own_queue, op, Dtype::U8, 0..bytes, 2, deadline);
        if called.is_ok() {
            let _ = own_queue.copy(behind.view(), own.view(), Caching::Keep);
        }
        let _ = own_queue.finish(&Abort::local(), soon());
        if !late {
            let error = handle.check().unwrap_err();
            assert!(error.is_timeout() && error.ranks() == [world - 1], "{}", describe(&error));
            assert!(error.to_string().contains("all ranks make a new one"), "{error}");
            group.barrier().wait().unwrap();
        }
        assert!(own.to_vec().unwrap() == mine, "nothing is written");
        assert!(behind.to_vec().unwrap().iter().all(|&byte| byte == 0) || device == DeviceId::Host);
        if late {
            // The others have said whom they waited for, or that they did.
            let error = handle.check().unwrap_err();
            assert!(
                error.is_timeout() && [&[][..], &[world - 1]].contains(&error.ranks()),
                "{}",
                describe(&error)
            );
        }
        let again = handle.all_reduce_on(&mut *own_queue, op, Dtype::U8, 0..bytes, 0, soon()).unwrap_err();
        assert!(again.is_timeout(), "{}", describe(&again));
        own_queue.begin(None).unwrap();
        let again = group.symmetric(&own).wait().unwrap();
        again.all_reduce_on(&mut *own_queue, op, Dtype::U8, 0..bytes, 0, soon()).unwrap();
        finish(&mut *own_queue);
        let sum: usize = (1..=world).sum();
        assert!(own.to_vec().unwrap().iter().all(|&byte| byte == sum as u8));
        again.barrier(0, soon()).unwrap();
    }
}

/// Wrong calls are refused, and nobody waits for them.
fn refused(group: &Group, on: On) {
    let device = on.of(group);
    let own = memory(group, &device, 1024);
    let handle = group.symmetric(&own).wait().unwrap();
    let mut queue = queue(group, &device);
    let mut call = |op, dtype, bytes, channel, deadline| {
        handle.all_reduce_on(&mut *queue, op, dtype, bytes, channel, deadline).unwrap_err().to_string()
    };
    let (sum, f32s) = (ReduceOp::Sum, Dtype::F32);
    assert!(call(sum, f32s, 0..1028, 0, soon()).contains("outside"));
    assert!(call(sum, f32s, 0..1023, 0, soon()).contains("whole elements"));
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 8..4;
    assert!(call(sum, f32s, backwards, 0, soon()).contains("whole elements"));
    assert!(call(sum, f32s, 0..1024, CHANNELS, soon()).contains("no channel"));
    assert!(call(ReduceOp::Band, f32s, 0..1024, 0, soon()).contains("BAND"));
    assert!(call(sum, f32s, 0..1024, 0, Deadline::after(Duration::ZERO)).contains("deadline"));
    assert!(handle.explain().contains("can work together"), "{}", handle.explain());
    let (by, end) = (Mover::Kernels, soon());
    let queue = &mut *queue;
    let text = |result: tensorwire::Result<()>| result.unwrap_err().to_string();
    let short = own.slice(0..8).unwrap();
    let shifted = own.slice(4..12).unwrap();
    assert!(text(handle.one_shot_on(queue, (sum, f32s), 0..16, &short, 0, end)).contains("16 come"));
    assert!(text(handle.one_shot_on(queue, (sum, f32s), 0..8, &shifted, 0, end)).contains("overlaps"));
    assert!(text(handle.all_to_all_on(queue, 0..8 * group.world(), &own, by, 0, end)).contains("bytes, and"));
    assert!(text(handle.broadcast_on(queue, group.world(), 0..8, by, 0, end)).contains("no rank"));
    assert!(text(handle.broadcast_on(queue, 0, 0..8, by, CHANNELS, end)).contains("no channel"));
    if group.world() > 1 {
        let odd = text(handle.all_gather_on(queue, 0..group.world() + 1, None, by, 0, end));
        assert!(odd.contains("equal parts"), "{odd}");
        let uneven =
            text(handle.reduce_scatter_on(queue, (sum, f32s), (0..group.world(), &short), by, 0, end));
        assert!(uneven.contains("whole elements"), "{uneven}");
    }
    handle.barrier(0, soon()).unwrap();
}

macro_rules! everywhere {
    ($($body:ident)*) => {
        $(mod $body {
            use super::*;
            on_threads!($body host_1_threads 1 On::Host);
            on_threads!($body host_3_threads 3 On::Host);
            on_threads!($body own_2_threads 2 On::Own);
            on_threads!($body own_5_threads 5 On::Own);
            as_processes!($body host_2_processes 2 On::Host);
            as_processes!($body own_3_processes 3 On::Own);
            as_processes!($body shared_1_processes 1 On::Shared);
            as_processes!($body shared_2_processes 2 On::Shared);
            as_processes!($body shared_4_processes 4 On::Shared);
        })*
    };
}

macro_rules! on_threads {
    ($body:ident $name:ident $world:literal $on:expr) => {
        #[test]
        fn $name() {
            if let Some(reason) = $on.missing() {
                return ranks::skip(reason);
            }
            if !is_real() {
                // Whoever is first has installed them for all.
                let _ = install(settings());
            }
            ranks::as_threads($world, |group| super::$body(group, $on));
        }
    };
}

macro_rules! as_processes {
    ($body:ident $name:ident $world:literal $on:expr) => {
        #[test]
        fn $name() {
            if let Some(rank) = Rank::of_this_process() {
                return super::$body(&rank.group(), $on);
            }
            if let Some(reason) = $on.missing() {
                return ranks::skip(reason);
            }
            let test = concat!(stringify!($body), "::", stringify!($name));
            gpus::run(test, $world, &settings(), &[]);
        }
    };
}

everywhere!(bits large rounds channels third operations refused);

mod never_comes {
    use super::*;
    on_threads!(never_comes host_2_threads 2 On::Host);
    on_threads!(never_comes own_3_threads 3 On::Own);
    as_processes!(never_comes host_3_processes 3 On::Host);
    as_processes!(never_comes shared_2_processes 2 On::Shared);
    as_processes!(never_comes shared_4_processes 4 On::Shared);
}

mod nobody_gathers {
    use super::*;
    on_threads!(nobody_gathers host_3_threads 3 On::Host);
    on_threads!(nobody_gathers own_2_threads 2 On::Own);
    as_processes!(nobody_gathers host_2_processes 2 On::Host);
    as_processes!(nobody_gathers shared_2_processes 2 On::Shared);
    as_processes!(nobody_gathers shared_4_processes 4 On::Shared);
}

/// Ranks whose kernels take turns, or whose streams may share a hardware queue: refused with the reason, on all ranks alike.
fn takes_turns(group: Group) {
    let own = memory(&group, &gpus::gpu(0), 64);
    let handle = group.symmetric(&own).wait().unwrap();
    let mut queue = queue(&group, &gpus::gpu(0));
    let error = handle.all_reduce_on(&mut *queue, ReduceOp::Sum, Dtype::F32, 0..64, 0, soon()).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("without MPS") && text.contains("operation of the group") && text.contains("rank 0"),
        "{text}"
    );
    assert!(handle.explain().contains("cannot work together"), "{}", handle.explain());
    // It is not the handle's fault.
    handle.barrier(0, soon()).unwrap();
}

#[test]
fn kernels_that_take_turns() {
    if let Some(rank) = Rank::of_this_process() {
        return takes_turns(rank.group());
    }
    if is_real() && On::Shared.missing().is_none() {
        return ranks::skip("there is MPS");
    }
    gpus::run("kernels_that_take_turns", 2, &Settings { gpus: 1, ..Settings::default() }, &[]);
}

#[test]
fn ranks_of_one_process() {
    if is_real() {
        return ranks::skip("threads are tested with GPUs of threads");
    }
    let _ = install(settings());
    ranks::as_threads(2, |group| {
        let own = memory(group, &DeviceId::Gpu(uuid(0)), 64);
        let handle = group.symmetric(&own).wait().unwrap();
        let mut queue = queue(group, &DeviceId::Gpu(uuid(0)));
        let error =
            handle.all_reduce_on(&mut *queue, ReduceOp::Sum, Dtype::F32, 0..64, 0, soon()).unwrap_err();
        assert!(error.to_string().contains("a thread of a process"), "{error}");
        handle.barrier(0, soon()).unwrap();
    });
    // Memory of both kinds.
    ranks::as_threads(2, |group| {
        let place = if group.rank() == 0 { DeviceId::Host } else { DeviceId::Gpu(uuid(1)) };
        let own = memory(group, &place, 64);
        let handle = group.symmetric(&own).wait().unwrap();
        let mut queue = queue(group, &place);
        let error =
            handle.all_reduce_on(&mut *queue, ReduceOp::Sum, Dtype::F32, 0..64, 0, soon()).unwrap_err();
        assert!(error.to_string().contains("some on GPUs"), "{error}");
        handle.barrier(0, soon()).unwrap();
    });
}

/// Rank 0 is killed while the others wait for it: they hear of it long before their deadline, and go on without it.
fn dies(group: Group) {
    let place = On::Shared.of(&group);
    let own = memory(&group, &place, 4096);
    let handle = group.symmetric(&own).wait().unwrap();
    let mut queue = queue(&group, &place);
    let mut call = |bytes: usize| {
        handle.all_reduce_on(&mut *queue, ReduceOp::Sum, Dtype::U8, 0..bytes, 0, soon())?;
        let done = queue.finish(&Abort::local(), soon());
        done.map_err(Error::from).and_then(|()| handle.check())
    };
    (0..5).for_each(|_| call(4096).unwrap());
    if group.rank() == 0 {
        // When both others know how these went.
        (1..group.world()).for_each(|rank| handle.wait_signal(rank, 7, soon()).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        kill_process(getpid(), Signal::KILL).unwrap();
        std::thread::sleep(LONG);
    }
    handle.put_signal(0, 7, soon()).unwrap();
    call(4096).unwrap_err();
    let error = handle.check().unwrap_err();
    assert_eq!(error.ranks(), [0], "{}", describe(&error));
    assert!(!error.is_timeout(), "{}", describe(&error));
    drop(handle);
    let next = group.shrink().unwrap();
    let handle = next.symmetric(&own).wait().unwrap();
    queue.begin(None).unwrap();
    own.write(0, &[1; 4096]).unwrap();
    handle.all_reduce_on(&mut *queue, ReduceOp::Sum, Dtype::U8, 0..4096, 0, soon()).unwrap();
    finish(&mut *queue);
    assert_eq!(own.to_vec().unwrap(), [next.world() as u8; 4096]);
    handle.barrier(0, soon()).unwrap();
}

#[test]
fn a_rank_dies() {
    if let Some(rank) = Rank::of_this_process() {
        return dies(rank.group());
    }
    if is_real() {
        return ranks::skip("under MPS the death of one process may end the work of all");
    }
    let ranks::Ranks { mut ranks, server: _server } = gpus::start("a_rank_dies", 3, &settings(), &[]);
    // Who is dropped is killed, and rank 0 does that itself.
    let _first = ranks.remove(0);
    ranks.into_iter().for_each(|rank| rank.expect_success());
}

/// Handles come and go with work on their queues, and need no more memory for that.
fn come_and_go(group: &Group, on: On) {
    let device = on.of(group);
    let own = memory(group, &device, 4096);
    let mut queue = queue(group, &device);
    let mut before = 0;
    for round in 0..60 {
        let handle = group.symmetric(&own).wait().unwrap();
        handle
            .all_reduce_on(&mut *queue, ReduceOp::Max, Dtype::F32, 0..4096, round % CHANNELS, soon())
            .unwrap();
        // Dropped while the work may be under way.
        drop(handle);
        queue.begin(None).unwrap();
        if round % 3 == 0 {
            finish(&mut *queue);
        }
        group.barrier().wait().unwrap();
        if round == 20 {
            before = group.context().mapped().0;
        }
    }
    finish(&mut *queue);
    assert!(
        group.context().mapped().0 <= before + 1,
        "{before} mappings before, {} now",
        group.context().mapped().0
    );
    group.barrier().wait().unwrap();
}

mod come_and_go {
    use super::*;
    as_processes!(come_and_go host_2_processes 2 On::Host);
    as_processes!(come_and_go own_2_processes 2 On::Own);
    as_processes!(come_and_go shared_3_processes 3 On::Shared);
}

/// A captured call is replayed 1,000 times with one rank delayed at random, and every result is checked. A rank that does not
/// replay is a failure for all; replays after that write nothing.
fn replays(group: Group) {
    use tensorwire::device::cuda::Gpu;
    let (me, world) = (group.rank(), group.world());
    let place = On::Shared.of(&group);
    for bytes in [64 << 10, 8 << 20] {
        let own = memory(&group, &place, bytes);
        let handle = group.symmetric(&own).wait().unwrap();
        let record = |deadline| {
            let gpu = Gpu::open(0).unwrap();
            gpu.record(|queue| handle.all_reduce_on(queue, ReduceOp::Sum, Dtype::I32, 0..bytes, 1, deadline))
                .unwrap()
        };
        let mut graph = record(soon());
        let mut random = Random(17);
        let rounds = if bytes > 1 << 20 { 200 } else { 1000 };
        for round in 0..rounds {
            // The same numbers on all ranks.
            let (delayed, pause) = (random.below(world), random.below(1500));
            own.write(0, &((me + round) as i32).to_le_bytes().repeat(bytes / 4)).unwrap();
            if delayed == me && round % 3 == 0 {
                std::thread::sleep(Duration::from_micros(pause as u64));
            }
            graph.launch().unwrap();
            graph.finish(soon()).unwrap();
            handle.check().unwrap();
            let sum = (0..world).map(|rank| rank + round).sum::<usize>() as i32;
            assert!(
                own.to_vec().unwrap().chunks_exact(4).all(|word| word == sum.to_le_bytes()),
                "round {round}"
            );
        }
        // Beside calls of the same channel that are not captured.
        let mut queue = queue(&group, &place);
        own.write(0, &1i32.to_le_bytes().repeat(bytes / 4)).unwrap();
        handle.all_reduce_on(&mut *queue, ReduceOp::Sum, Dtype::I32, 0..bytes, 1, soon()).unwrap();
        finish(&mut *queue);
        assert_eq!(own.to_vec().unwrap()[..4], (world as i32).to_le_bytes());
        handle.barrier(0, soon()).unwrap();
        drop(graph);

        let mut graph = record(Deadline::after(Duration::from_millis(300)));
        handle.barrier(0, soon()).unwrap();
        let mine = (me as i32).to_le_bytes().repeat(bytes / 4);
        own.write(0, &mine).unwrap();
        if me + 1 < world {
            graph.launch().unwrap();
            // It may say that the work was ended.
            let _ = graph.finish(soon());
            let error = handle.check().unwrap_err();
            println!("rank {me}: {}", describe(&error));
            assert!(error.is_timeout() && error.ranks() == [world - 1], "{}", describe(&error));
        }
        group.barrier().wait().unwrap();
        for _ in 0..3 {
            graph.launch().unwrap();
            let _ = graph.finish(soon());
            handle.check().unwrap_err();
            assert!(own.to_vec().unwrap() == mine, "a replay after the failure writes nothing");
        }
        group.barrier().wait().unwrap();
    }
}

/// A graph of all operations is replayed, with a rank delayed at random.
fn replays_of_all(group: Group) {
    use tensorwire::device::cuda::Gpu;
    let (me, world) = (group.rank(), group.world());
    let place = On::Shared.of(&group);
    for (count, by) in [(1000, Mover::Kernels), (300_000, Mover::Kernels), (1000, Mover::Engines)] {
        let work = Operations::new(&group, &place, count, by);
        let own = memory(&group, &place, 3 * work.len(world));
        let handle = group.symmetric(&own).wait().unwrap();
        let gpu = Gpu::open(0).unwrap();
        let mut graph = gpu.record(|queue| work.queue(&handle, queue, (1 % world, 0))).unwrap();
        let mut random = Random(5);
        for round in 0..if count > 1000 { 40 } else { 1000 } {
            let (delayed, pause) = (random.below(world), random.below(1500));
            work.fill(&own, (me, world, round));
            handle.barrier(0, soon()).unwrap();
            if delayed == me && round % 3 == 0 {
                std::thread::sleep(Duration::from_micros(pause as u64));
            }
            graph.launch().unwrap();
            graph.finish(soon()).unwrap();
            handle.check().unwrap();
            work.check(&own, (me, world, round), 1 % world);
            handle.barrier(1, soon()).unwrap();
        }
    }
}

#[test]
fn graphs_of_all_operations_are_replayed() {
    if let Some(rank) = Rank::of_this_process() {
        return replays_of_all(rank.group());
    }
    if !is_real() {
        return ranks::skip("graphs need a real GPU");
    }
    if let Some(reason) = On::Shared.missing() {
        return ranks::skip(reason);
    }
    for world in [2, 4] {
        gpus::run("graphs_of_all_operations_are_replayed", world, &settings(), &[]);
    }
}

#[test]
fn graphs_are_replayed() {
    if let Some(rank) = Rank::of_this_process() {
        return replays(rank.group());
    }
    if !is_real() {
        return ranks::skip("graphs need a real GPU");
    }
    if let Some(reason) = On::Shared.missing() {
        return ranks::skip(reason);
    }
    for world in [2, 4] {
        gpus::run("graphs_are_replayed", world, &settings(), &[]);
    }
}
