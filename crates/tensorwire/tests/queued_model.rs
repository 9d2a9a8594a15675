//! Random operations on tensors of GPUs against a plain model: any operation, type, size and layout, on two queues of the
//! caller, on queues of the groups and on the host in between, in two groups. The GPUs are threads.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../../device/tests/golden_cases/mod.rs"]
mod golden_cases;
mod gpus;
mod model;
mod ranks;

use gpus::{settings, variable};
use model::op::{Memory, Op, any_op};
use model::{Dice, Mem, Model, WRITABLE, ops_of, private};
use proptest::prelude::Strategy;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use ranks::Rank;
use tensorwire::collective::Path;
use tensorwire::device::gpu::MOST_REDUCED;
use tensorwire::device::threads::Settings;
use tensorwire::{Dtype, Group, ReduceOp, Tensor};

fn runner(seed: u64) -> TestRunner {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    TestRunner::new_with_rng(Config::default(), TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}

/// How many operations of a sequence may be under way before they are looked at.
const OPEN: usize = 10;

/// `mixed`: in many operations some ranks have their tensors on GPUs, and others on the host; or a path of the host is asked for.
fn sequence(group: &Group, gpus: usize, seed: u64, count: usize, mixed: bool) {
    let backwards: Vec<usize> = (0..group.world()).rev().collect();
    let groups = [group.subgroup(&backwards).unwrap(), group.split(Some(0), 0).unwrap().unwrap()];
    let number = group.rank() % gpus;
    let mut queues = [0, 1].map(|_| gpus::queue(group, &gpus::gpu(number)));
    let (model, mut dice, mut runner) = (Model::default(), Dice::new(seed), runner(seed));
    let mut open = Vec::new();
    for at in 0..count {
        let drawn: Op = any_op().new_tree(&mut runner).unwrap().current();
        let (which, how, of) = (dice.below(2), dice.below(8), dice.below(2));
        let on_host = dice.below(6) == 0;
        // Each rank has its own there, but all know that it is so.
        let own = Dice::new(seed ^ (at as u64 + 1) << 8 ^ group.rank() as u64).below(4);
        let apart = mixed && dice.below(3) > 0;
        let memory = match (apart, own) {
            (true, 0) => Memory::Private,
            (true, 1) => Memory::Shared,
            (false, _) if on_host => Memory::Private,
            _ => Memory::Gpu(number),
        };
        let via =
            [None, None, Some(Path::Staged), Some(Path::OneShot)][if mixed { dice.below(4) } else { 0 }];
        let via = via.filter(|path| *path == Path::Staged || drawn.bytes * drawn.tensors < 1000);
        let bytes = drawn.bytes.min(256 << 10);
        // A GPU reduces so many at once.
        let tensors = drawn.tensors.min(MOST_REDUCED / group.world());
        let op = Op { memory, bytes, tensors, via, start: how % 2 == 1, ..drawn };
        let group = &groups[of];
        let begun = op.begin_by(group, &model, |call| match how {
            0 | 1 => op.begin_call(call),
            2..=5 => call.on(&mut *queues[which]).map(Some),
            _ => {
                let work = call.after(&mut *queues[which])?.start()?;
                work.wait_on(&mut *queues[1 - which])?;
                Ok(Some(work))
            }
        });
        open.push((at, begun.unwrap()));
        if open.len() > OPEN || at + 1 == count {
            for (at, running) in open.drain(..) {
                let ended = running.finish();
                assert!(ended.is_ok(), "seed {seed}, operation {at}: {ended:?}");
            }
        }
    }
    group.barrier().wait().unwrap();
}

fn model_on(test: &str, world: usize, settings: &Settings, gpus: usize, count: usize) {
    model_in(test, world, settings, gpus, count, false);
}

fn model_in(test: &str, world: usize, settings: &Settings, gpus: usize, count: usize, mixed: bool) {
    if let Some(rank) = Rank::of_this_process() {
        let seed = variable("SEED").parse().unwrap();
        sequence(&rank.group(), gpus, seed, count, mixed);
        return;
    }
    let base = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(world as u64 * 10);
    for seed in base..base + 2 {
        gpus::run(test, world, settings, &[("SEED", seed.to_string())]);
    }
}

#[test]
fn two_ranks() {
    model_on("two_ranks", 2, &settings()[0], 1, 120);
}

#[test]
fn two_ranks_apart() {
    model_on("two_ranks_apart", 2, &settings()[0], 2, 120);
}

#[test]
fn four_ranks() {
    model_on("four_ranks", 4, &settings()[0], 1, 80);
}

#[test]
fn five_ranks_of_two_gpus() {
    model_on("five_ranks_of_two_gpus", 5, &settings()[0], 2, 60);
}

#[test]
fn nine_ranks() {
    model_on("nine_ranks", 9, &settings()[0], 2, 40);
}

#[test]
fn three_ranks_with_one_hardware_queue() {
    model_on("three_ranks_with_one_hardware_queue", 3, &settings()[1], 1, 80);
}

#[test]
fn four_ranks_of_two_gpus_under_mps() {
    model_on("four_ranks_of_two_gpus_under_mps", 4, &settings()[2], 2, 80);
}

#[test]
fn mixed_two_ranks() {
    model_in("mixed_two_ranks", 2, &settings()[0], 1, 200, true);
}

#[test]
fn mixed_three_ranks_with_one_hardware_queue() {
    model_in("mixed_three_ranks_with_one_hardware_queue", 3, &settings()[1], 1, 150, true);
}

#[test]
fn mixed_five_ranks_of_two_gpus() {
    model_in("mixed_five_ranks_of_two_gpus", 5, &settings()[0], 2, 100, true);
}

#[test]
fn mixed_four_ranks_under_mps() {
    model_in("mixed_four_ranks_under_mps", 4, &settings()[2], 1, 100, true);
}

/// The bits are those of the host, for every type and operation.
fn same_bits(group: &Group) {
    let model = Model::default();
    let (me, world, number) = (group.rank(), group.world(), group.rank() % 2);
    let mut queue = gpus::queue(group, &gpus::gpu(number));
    for dtype in Dtype::ALL {
        for op in ops_of(dtype) {
            for count in [1, 37, 1200] {
                let wild = matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64);
                let values = match wild {
                    true => model::wild(dtype, count * world, me as u64),
                    false => model.values(me as u64, count * world, dtype).to_vec(),
                };
                let on_host = |bytes: &[u8]| Tensor::flat(private(bytes), dtype).unwrap();
                let on_gpu = |bytes: &[u8]| {
                    let span = gpus::span(group, &gpus::gpu(number), bytes.len());
                    span.write(0, bytes).unwrap();
                    Tensor::flat(span, dtype).unwrap()
                };
                let bytes = |tensor: &Tensor| tensor.span().to_vec().unwrap();
                let (host, device) = (on_host(&values), on_gpu(&values));
                group.all_reduce(&host, op).wait().unwrap();
                group.all_reduce(&device, op).on(&mut *queue).unwrap().wait().unwrap();
                assert!(bytes(&host) == bytes(&device), "all_reduce: {op} of {count} {dtype}");
                let (host, device) = (on_host(&values), on_gpu(&values));
                group.reduce(&host, op, world - 1).wait().unwrap();
                group.reduce(&device, op, world - 1).wait().unwrap();
                assert!(bytes(&host) == bytes(&device), "reduce: {op} of {count} {dtype}");
                let part = vec![0; count * dtype.size()];
                let (host_part, device_part) = (on_host(&part), on_gpu(&part));
                group.reduce_scatter_from(&host_part, &on_host(&values), op).wait().unwrap();
                group.reduce_scatter_from(&device_part, &on_gpu(&values), op).wait().unwrap();
                assert!(bytes(&host_part) == bytes(&device_part), "reduce_scatter: {op} of {count} {dtype}");
            }
        }
    }
    let wide: Vec<i32> = (0..4).map(|at| at + me as i32).collect();
    // Too many are refused by all ranks, before anything happens.
    let many: Vec<Tensor> =
        (0..MOST_REDUCED / world + 1).map(|_| gpus::tensor(group, &gpus::gpu(number), &wide)).collect();
    let refused = group.all_reduce_multi(&many, ReduceOp::Max).wait().unwrap_err();
    assert!(matches!(refused, tensorwire::Error::Unsupported { .. }), "{refused}");
    assert!(refused.to_string().contains("at most 128 tensors of all ranks together"), "{refused}");
    let tensors = [0, 1].map(|_| gpus::tensor(group, &gpus::gpu(number), &wide));
    group.all_reduce_multi(&tensors, ReduceOp::Max).wait().unwrap();
    assert!(tensors.iter().all(|tensor| tensor.to_vec::<i32>().unwrap()[0] == world as i32 - 1));
}

#[test]
fn the_bits_of_the_host() {
    if let Some(rank) = Rank::of_this_process() {
        return same_bits(&rank.group());
    }
    for world in [2, 3] {
        gpus::run("the_bits_of_the_host", world, &settings()[0], &[]);
    }
}

/// The golden vectors whose inputs are as many as the ranks, in tensors that lie in every way.
fn golden_bits(group: &Group) {
    let (me, world) = (group.rank(), group.world());
    let device = gpus::gpu(me % 2);
    let mut queue = gpus::queue(group, &device);
    let cases = golden_cases::cases().enumerate().filter(|(_, case)| case.inputs.len() == world);
    for (at, (line, case)) in cases.enumerate() {
        let (dtype, count) = (case.dtype, 60 + line % 97);
        let cycle =
            |bytes: &[u8]| -> Vec<u8> { bytes.iter().copied().cycle().take(count * dtype.size()).collect() };
        let alloc = |bytes: &[u8]| gpus::span(group, &device, bytes.len());
        // Ranks need not agree on how their tensors lie.
        let lie = WRITABLE[(at + me) % WRITABLE.len()];
        let mut mem = Mem::within(alloc, dtype, lie, &cycle(&case.inputs[me]));
        group.all_reduce(&mem.tensor, case.op).on(&mut *queue).unwrap().wait().unwrap();
        let got = mem.values();
        case.compare(&got, &cycle(&case.output), &format!("line {}, {lie:?}", line + 1));
        // Around them nothing is written.
        mem.expect(&got);
        mem.check().unwrap();
    }
}

#[test]
fn the_golden_bits() {
    if let Some(rank) = Rank::of_this_process() {
        return golden_bits(&rank.group());
    }
    for world in [1, 2, 3, 5, 8] {
        gpus::run("the_golden_bits", world, &settings()[0], &[]);
    }
}
