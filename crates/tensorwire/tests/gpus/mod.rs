//! What the tests of queued operations share: processes whose GPUs are threads, tensors on these GPUs, and queues. With
//! TEST_GPU=1 all ranks share the first real GPU instead. A file that uses it also has `mod ranks`.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorwire::device::flag::{LINE, Writer};
use tensorwire::device::gpu::Probe;
use tensorwire::device::nvml::Nvml;
use tensorwire::device::threads::{self, Call, Settings, VARIABLE, out_of_memory, uuid};
use tensorwire::device::{Abort, Flag, Queue, Region};
use tensorwire::{Deadline, DeviceId, Element, Group, ReduceOp, Span, Tensor};

use crate::ranks::{LONG, Process, Ranks};

pub const SUM: ReduceOp = ReduceOp::Sum;

/// Two GPUs whose streams have eight hardware queues, only one, or do not wait at all. In the last two, hosts signal for
/// streams without work.
pub fn settings() -> [Settings; 3] {
    let two = Settings { gpus: 2, ..Settings::default() };
    let prompt = Settings { prompt: true, ..two.clone() };
    [two, Settings { queues: 1, ..prompt.clone() }, Settings { mps: true, ..prompt }]
}

/// Those that can be had here: a real GPU has its own.
pub fn all_settings() -> Vec<Settings> {
    let mut all = settings().to_vec();
    all.truncate(if is_real() { 1 } else { all.len() });
    all
}

/// Processes that are ranks with these GPUs and variables.
pub fn start(test: &str, world: usize, settings: &Settings, variables: &[(&str, String)]) -> Ranks {
    Ranks::start_with(test, world, |_, mut command| {
        if !is_real() {
            command.env(VARIABLE, settings.to_string());
        }
        command.envs(variables.iter().cloned());
        command
    })
}

/// Runs them all, and wants all of them to end well.
pub fn run(test: &str, world: usize, settings: &Settings, variables: &[(&str, String)]) {
    run_and_hear(test, world, settings, variables);
}

/// The same; gives what each has said.
pub fn run_and_hear(
    test: &str,
    world: usize,
    settings: &Settings,
    variables: &[(&str, String)],
) -> Vec<Vec<String>> {
    let Ranks { ranks, server: _server } = start(test, world, settings, variables);
    // The first that ends badly has often only heard of the trouble: all tell what they know.
    let end = |mut rank: Process| {
        rank.end_well();
        rank.take_lines()
    };
    let ends = ranks.into_iter().map(|rank| catch_unwind(AssertUnwindSafe(|| end(rank))));
    let good: Vec<_> = ends.filter_map(|end| end.ok()).collect();
    let bad = world - good.len();
    assert_eq!(bad, 0, "{bad} of {world} ranks have ended badly, with {settings}");
    good
}

/// A variable of a test.
pub fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

/// With TEST_GPU=1 the first real GPU stands for all.
pub fn is_real() -> bool {
    std::env::var_os("TEST_GPU").is_some()
}

pub fn gpu(number: usize) -> DeviceId {
    match is_real() {
        true => DeviceId::Gpu(tensorwire::device::cuda::facts(0).unwrap().uuid),
        false => DeviceId::Gpu(uuid(number)),
    }
}

/// With TEST_GPU=1, who knows how much of the first GPU's memory is free, whoever has it; and that GPU. Opens no GPU: this
/// would take memory of it.
pub fn nvml() -> Option<(Nvml, DeviceId)> {
    let nvml = is_real().then(|| Nvml::open().unwrap())?;
    let id = nvml.gpus().unwrap()[0].id.clone();
    Some((nvml, id))
}

pub fn span(group: &Group, gpu: &DeviceId, bytes: usize) -> Span {
    Span::new(group.context().pool(gpu).unwrap().alloc(bytes).unwrap(), 0..bytes).unwrap()
}

pub fn tensor<T: Element>(group: &Group, gpu: &DeviceId, values: &[T]) -> Tensor {
    let tensor = Tensor::flat(span(group, gpu, size_of_val(values)), T::DTYPE).unwrap();
    tensor.write(values).unwrap();
    tensor
}

pub fn queue(group: &Group, gpu: &DeviceId) -> Box<dyn Queue> {
    group.context().device(gpu).unwrap().queue().unwrap()
}

/// The group reduces on the GPU, by every way to call it.
pub fn works(group: &Group, gpu: &DeviceId) {
    let (me, world) = (group.rank() as i32, group.world() as i32);
    let mine: Vec<i32> = (0..1000).map(|at| me * 1000 + at).collect();
    let sum: Vec<i32> = (0..1000).map(|at| (0..world).map(|rank| rank * 1000 + at).sum()).collect();
    let mut queue = queue(group, gpu);
    for way in 0..3 {
        let tensor = tensor(group, gpu, &mine);
        let call = group.all_reduce(&tensor, SUM);
        match way {
            0 => call.wait().unwrap(),
            1 => call.on(&mut *queue).unwrap().wait().unwrap(),
            _ => call.start().unwrap().wait().unwrap(),
        }
        assert!(tensor.to_vec::<i32>().unwrap() == sum, "all_reduce by way {way}");
    }
    group.barrier().wait().unwrap();
}

/// The queue is free: a copy on it is made, whatever happened on it before.
pub fn copies(group: &Group, gpu: &DeviceId, queue: &mut dyn Queue) {
    // What went wrong before is told once.
    let _ = queue.finish(&Abort::local(), Deadline::after(LONG));
    let (from, into) = (tensor(group, gpu, &[7i32; 500]), tensor(group, gpu, &[0i32; 500]));
    queue.copy(into.span().view(), from.span().view(), Default::default()).unwrap();
    queue.finish(&Abort::local(), Deadline::after(LONG)).unwrap();
    assert_eq!(into.to_vec::<i32>().unwrap(), [7; 500]);
}

/// Has a queue wait, and all that is queued behind, until the flag is signalled. For GPUs whose streams wait.
pub fn hold(group: &Group, queue: &mut dyn Queue) -> Flag {
    let line = || Span::whole(group.context().host().alloc(LINE).unwrap());
    let held = Flag::new(&line(), Writer::Host).unwrap();
    let (abort, end) = (Abort::new(&line()).unwrap(), Deadline::after(LONG));
    // Where the device can hold no wait just now, the thread would wait here: the one that ends the wait.
    while !queue.try_wait_all(&[(&held, 1)], &abort, end).unwrap() {
        assert!(!end.passed(), "no stream may wait: there is one hardware queue, or MPS");
        std::thread::sleep(Duration::from_millis(1));
    }
    held
}

/// Nothing can be allocated on a GPU until this is dropped.
pub struct Full(Vec<Arc<dyn Region>>);

/// Takes all memory of a real GPU. The others fail.
pub fn fill(group: &Group, gpu: &DeviceId) -> Full {
    let mut taken = Vec::new();
    if !is_real() {
        threads::gpu(0).unwrap().fail(Call::Alloc, usize::MAX, out_of_memory());
        return Full(taken);
    }
    let device = group.context().device(gpu).unwrap();
    for shift in (21..=36).rev() {
        taken.extend(std::iter::from_fn(|| device.alloc(1 << shift).ok()));
    }
    Full(taken)
}

impl Drop for Full {
    fn drop(&mut self) {
        if !is_real() {
            threads::gpu(0).unwrap().heal(Call::Alloc);
        }
    }
}

/// Allocations that are mapped, and bytes that were allocated here, on both GPUs.
pub fn usage() -> [(usize, usize); 2] {
    if is_real() {
        let usage = tensorwire::device::cuda::Gpu::open(0).unwrap().usage();
        return [(usage.allocations, usage.mapped); 2];
    }
    [0, 1].map(|number| {
        let usage = threads::gpu(number).unwrap().usage();
        (usage.allocations, usage.allocated)
    })
}

/// What is in use is no more than before, once everything has calmed down.
pub fn nothing_is_left(group: &Group, before: [(usize, usize); 2]) {
    let end = Instant::now() + LONG;
    loop {
        // Peers give up their mappings of what is swept here.
        (0..2).for_each(|number| {
            group.context().pool(&gpu(number)).unwrap().trim();
        });
        group.sweep_memory();
        // A few mappings are kept behind their last use, so that the next one is quick.
        group.members().iter().for_each(|member| group.context().forget(member.identity));
        let now = usage();
        if now.iter().zip(before).all(|(now, before)| now.0 <= before.0 && now.1 <= before.1) {
            return;
        }
        assert!(Instant::now() < end, "(allocations, bytes) before: {before:?}; now: {now:?}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
