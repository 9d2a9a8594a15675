//! Collectives on memory of other allocators, such as torch's: it comes and goes without a word, and is known by the numbers of
//! its allocations alone. The GPUs are threads (`tensorwire::device::threads`). Each body as threads and as processes.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod ranks;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tensorwire::device::threads::{self, Call, Settings, hook, install};
use tensorwire::device::{Layout, Region};
use tensorwire::{Dtype, Group, ReduceOp, Span, Tensor};

const SUM: ReduceOp = ReduceOp::Sum;

/// The GPU that all ranks share.
fn gpu() -> threads::Gpu {
    // Thread ranks share the process, and whoever is first has installed them.
    let _ = install(Settings::default());
    threads::gpu(0).unwrap()
}

/// Memory as another allocator has it, in allocations of so many bytes.
fn foreign(lens: &[usize]) -> Arc<dyn Region> {
    gpu().joined(lens).unwrap()
}

/// A tensor in such memory, from a byte on, as somebody sees it who knows its address only.
fn at(memory: &Arc<dyn Region>, start: usize, values: &[i32]) -> Tensor {
    let region = gpu().adopt_part(memory, start..start + size_of_val(values)).unwrap();
    let tensor = Tensor::flat(Span::whole(region), Dtype::I32).unwrap();
    tensor.write(values).unwrap();
    tensor
}

fn values(tensor: &Tensor) -> Vec<i32> {
    tensor.to_vec().unwrap()
}

/// What all ranks give together, if each gives its rank and `more`.
fn sum(group: &Group, more: i32) -> i32 {
    (0..group.world() as i32).map(|rank| rank + more).sum()
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Where allocations begin and end.
const LENS: [&[usize]; 2] = [&[40_000], &[8192, 4096, 65_536]];

/// Tensors without gaps, anywhere in the memory.
fn without_gaps(group: &Group, memory: &Arc<dyn Region>) {
    let me = group.rank() as i32;
    for (start, count) in [(0, 1), (4, 7), (100, 9000), (8000, 500)] {
        let tensor = at(memory, start, &vec![me + 3; count]);
        group.all_reduce(&tensor, SUM).wait().unwrap();
        assert_eq!(values(&tensor), vec![sum(group, 3); count], "{count} at {start}");
        let tensor = at(memory, start, &vec![me; count]);
        group.broadcast(&tensor, group.world() - 1).wait().unwrap();
        assert_eq!(values(&tensor), vec![group.world() as i32 - 1; count], "{count} at {start}");
    }
    // Two tensors of one call in the same allocation.
    let (from, into) = (at(memory, 20_000, &[me; 100]), at(memory, 4000, &vec![0; 100 * group.world()]));
    group.all_gather_into(&into, &from).wait().unwrap();
    let expected: Vec<i32> = (0..group.world() as i32).flat_map(|rank| [rank; 100]).collect();
    assert_eq!(values(&into), expected);
}

/// Every way that a tensor can lie in such memory.
fn every_layout(group: &Group) {
    let me = group.rank() as i32;
    for lens in LENS {
        let memory = foreign(lens);
        without_gaps(group, &memory);
        // With gaps, and in several places.
        let wide = at(&memory, 0, &vec![me + 1; 1000]);
        let layout = Layout::with_origin(&[500], &[2], 4, 0).unwrap();
        let even = Tensor::new(wide.span().clone(), Dtype::I32, layout).unwrap();
        group.all_reduce(&even, ReduceOp::Max).wait().unwrap();
        let expected: Vec<i32> =
            (0..1000).map(|i| if i % 2 == 0 { group.world() as i32 } else { me + 1 }).collect();
        assert_eq!(values(&wide), expected);
        let parts: Vec<Tensor> =
            (0..group.world()).map(|rank| at(&memory, 12_000 + 1000 * rank, &[0; 100])).collect();
        let input = at(&memory, 30_000, &[me; 100]);
        group.all_gather(&parts, &input).wait().unwrap();
        for (rank, part) in parts.iter().enumerate() {
            assert_eq!(values(part), [rank as i32; 100]);
        }
        group.barrier().wait().unwrap();
    }
}

on_ranks!(layouts_of_two, 2, every_layout);
on_ranks!(layouts_of_three, 3, every_layout);

/// Memory is freed and allocated again in a loop. New memory at an old address has a new number, and is mapped anew.
fn an_old_address(group: &Group) {
    let me = group.rank() as i32;
    let mut addresses = Vec::new();
    for round in 0..60 {
        let memory = foreign(&[64 << 10]);
        addresses.push(memory.addr());
        let tensor = at(&memory, 0, &vec![me + round; 5000]);
        group.all_reduce(&tensor, SUM).wait().unwrap();
        assert_eq!(values(&tensor), vec![sum(group, round); 5000], "round {round}");
    }
    let rounds = addresses.len();
    addresses.sort_unstable();
    addresses.dedup();
    println!("{} addresses in {rounds} rounds", addresses.len());
    assert!(addresses.len() < rounds, "no address came again");
    group.barrier().wait().unwrap();
}

on_ranks!(new_memory_at_an_old_address, 2, an_old_address);

/// What an owner has freed is not kept by those who have mapped it, also if nobody calls anything.
fn memory_comes_back(group: &Group) {
    let me = group.rank() as i32;
    let before = group.context().mapped();
    let mapped = || {
        let (count, bytes) = group.context().mapped();
        (count - before.0, bytes - before.1)
    };
    group.barrier().wait().unwrap();
    let memories: Vec<_> = (0..10).map(|_| foreign(&[1 << 20])).collect();
    for (round, memory) in (0..).zip(&memories) {
        let tensor = at(memory, 0, &vec![me + round; 5000]);
        group.all_reduce(&tensor, SUM).wait().unwrap();
        assert_eq!(values(&tensor), vec![sum(group, round); 5000]);
    }
    group.barrier().wait().unwrap();
    // The lowest rank works for all, and has mapped what the others gave, if they are other processes.
    let others = group.members().iter().filter(|member| member.pid != std::process::id()).count();
    let expected = if me == 0 { 10 * others } else { 0 };
    assert_eq!(mapped(), (expected, expected << 20));
    // It is used again: nothing is mapped anew.
    for memory in &memories {
        let tensor = at(memory, 4096, &vec![me; 5000]);
        group.all_reduce(&tensor, SUM).wait().unwrap();
    }
    group.barrier().wait().unwrap();
    assert_eq!(mapped().0, expected);
    group.barrier().wait().unwrap();
    drop(memories);
    until("all are gone", || mapped() == (0, 0));
    group.barrier().wait().unwrap();
}

on_ranks!(freed_memory_is_unmapped, 3, memory_comes_back);

/// Ranks that are threads use each other's memory where it is. (A process cannot open its own memory of cudaMalloc.)
fn without_imports(group: &Group) {
    let refused = tensorwire::device::Error::misuse("imports are refused here");
    gpu().fail(Call::Import, usize::MAX, refused);
    group.barrier().wait().unwrap();
    LENS.into_iter().for_each(|lens| without_gaps(group, &foreign(lens)));
    memory_comes_back(group);
}

#[test]
fn threads_need_no_mapping() {
    // In a process of its own: its GPU refuses imports.
    ranks::as_processes("threads_need_no_mapping", 1, |_| ranks::as_threads(3, without_imports));
}

/// A worker keeps its mappings, but not where memory is short and nobody has used them for a while: their owner may free that
/// memory and want it back at once, as torch does when it runs out.
fn memory_is_short(group: &Group) {
    let before = group.context().mapped().0;
    let memory = foreign(&[8192]);
    let tensor = at(&memory, 0, &[1; 1000]);
    group.all_reduce(&tensor, SUM).wait().unwrap();
    if group.rank() == 0 {
        assert_eq!(group.context().mapped().0 - before, group.world() - 1);
        let short = tensorwire::device::threads::out_of_memory();
        gpu().fail(Call::Alloc, usize::MAX, short);
        until("idle mappings are given up", || group.context().mapped().0 == before);
        gpu().heal(Call::Alloc);
    }
    group.barrier().wait().unwrap();
    tensor.write(&[1; 1000]).unwrap();
    group.all_reduce(&tensor, SUM).wait().unwrap();
    assert_eq!(values(&tensor), [group.world() as i32; 1000]);
    group.barrier().wait().unwrap();
}

#[test]
fn idle_mappings_go_where_memory_is_short() {
    ranks::as_processes("idle_mappings_go_where_memory_is_short", 3, memory_is_short);
}

/// A list takes one launch before the operation and one behind it, however long it is.
#[test]
fn lists_are_packed_at_once() {
    ranks::as_processes("lists_are_packed_at_once", 3, |group| {
        let memories: Vec<_> = (0..40).map(|_| foreign(&[8192])).collect();
        let tensors: Vec<_> = memories.iter().map(|memory| at(memory, 0, &[1; 100])).collect();
        let copies = Arc::new(AtomicUsize::new(0));
        let counted = copies.clone();
        hook::set(move |step| {
            if matches!(step.kind, hook::Kind::Copy | hook::Kind::CopyStrided) {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        group.all_reduce_coalesced(&tensors, SUM).wait().unwrap();
        hook::clear();
        assert_eq!(copies.load(Ordering::Relaxed), 2);
        assert!(tensors.iter().all(|tensor| values(tensor) == [3; 100]));
        group.barrier().wait().unwrap();
    });
}

/// Memory that cannot be exported goes through memory of the host, and straight again when it can.
fn unshareable(group: &Group) {
    let me = group.rank();
    let memory = foreign(&[8192]);
    let tensor = at(&memory, 0, &[1; 1000]);
    if me == 1 {
        let error = tensorwire::device::Error::Unsupported {
            what: "sharing memory of a test".into(),
            need: "memory that can be exported".into(),
            have: "memory of a pool".into(),
        };
        gpu().fail(Call::Export, usize::MAX, error);
    }
    group.all_reduce(&tensor, SUM).wait().unwrap();
    assert_eq!(values(&tensor), [group.world() as i32; 1000]);
    let (text, sum) = (group.explain(), "all_reduce #1 (4000 bytes) went one-shot, not direct: ");
    assert!(text.contains(sum), "{text}");
    gpu().heal(Call::Export);
    group.barrier().wait().unwrap();
    // It is not tried for a while.
    until("it goes straight", || {
        tensor.write(&[1; 1000]).unwrap();
        group.all_reduce(&tensor, SUM).wait().unwrap();
        assert_eq!(values(&tensor), [group.world() as i32; 1000]);
        let direct = i32::from(group.explain().contains("on a queue"));
        let all = group.tensor(&[direct]).unwrap();
        group.all_reduce(&all, ReduceOp::Min).wait().unwrap();
        values(&all) == [1]
    });
    group.barrier().wait().unwrap();
}

/// Another allocator frees memory while an operation on it waits for the rank that is to map it: that rank cannot have it, all
/// ranks hear whose it was, and the group works on.
fn freed_under_way(group: &Group) {
    let (me, others) = (group.rank() as i32, group.world() - 1);
    let before = group.context().mapped().0;
    for round in 0..10 {
        let memory = foreign(&[8192]);
        let tensor = at(&memory, 0, &[me; 1000]);
        group.all_reduce(&tensor, SUM).wait().unwrap();
        tensor.write(&[me; 1000]).unwrap();
        group.barrier().wait().unwrap();
        let end = if me == 1 {
            let begun = group.all_reduce(&tensor, SUM).start().unwrap();
            // It should have offered its memory by then. If it has not, all try again.
            std::thread::sleep(Duration::from_millis(20 << round));
            gpu().lose(&memory);
            begun.wait()
        } else {
            // The lowest rank works for all. It lets go of that memory when it hears that it is gone.
            let gone = format!("gone {round}");
            if me == 0 {
                until("the memory is gone", || group.context().mapped().0 - before == others - 1);
                group.store().set(&gone, b"1").unwrap();
            }
            group.store().get(&gone).unwrap();
            group.all_reduce(&tensor, SUM).wait()
        };
        let text = end.unwrap_err().to_string();
        println!("rank {me}: {text}");
        assert_eq!(values(&tensor), [me; 1000], "nothing is written");
        drop((tensor, memory));
        if me == 0 {
            until("all memory is gone", || group.context().mapped().0 == before);
        }
        group.barrier().wait().unwrap();
        if text.contains("was freed while it was still in use") {
            assert!(text.contains("rank 1 (host "), "{text}");
            let memory = foreign(&[8192]);
            let tensor = at(&memory, 0, &[me; 1000]);
            group.all_reduce(&tensor, SUM).wait().unwrap();
            assert_eq!(values(&tensor), [sum(group, 0); 1000]);
            return group.barrier().wait().unwrap();
        }
    }
    unreachable!("it had never offered its memory in time");
}

#[test]
fn memory_that_is_freed_under_way() {
    ranks::as_processes("memory_that_is_freed_under_way", 3, freed_under_way);
}

/// As processes alone: threads share the GPU, and the failure of one would be that of another.
#[test]
fn memory_that_cannot_be_exported() {
    ranks::as_processes("memory_that_cannot_be_exported", 2, unshareable);
}
