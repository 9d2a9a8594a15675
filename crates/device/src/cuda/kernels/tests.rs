//! What was built is of these sources; and the sources, compiled for the processor (`tests/kernels/machine.cpp`), give the
//! host's bits and touch no byte that is not theirs.

mod machine;

use serde_json::Value;

use self::machine::{Machine, TouchedMemory, machine};
use super::arguments::StridedArguments;
use super::*;
use crate::device::Caching;
use crate::host::reduce::Instructions;
use crate::layout::Dim;

const MANIFEST: &str = include_str!("../../../kernels/built/manifest.txt");

#[test]
fn what_is_built_is_of_these_sources() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let hash = |path| blake3::hash(&std::fs::read(path).unwrap()).to_hex().to_string();
    let mut named: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    named.retain(|path| path.is_file());
    named.sort();
    let found =
        named.iter().map(|path| ("source", path.file_name().unwrap().to_str().unwrap(), hash(path.clone())));
    let found: Vec<_> = found.collect();
    let written = MANIFEST.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let (kind, name, hash) = (words.next()?, words.next()?, words.next()?);
        matches!(kind, "source" | "built").then(|| (kind, name, hash.to_string()))
    });
    let (sources, built): (Vec<_>, Vec<_>) = written.partition(|(kind, ..)| *kind == "source");
    assert_eq!(sources, found, "the kernels changed: run scripts/kernels");
    assert_eq!(built.len(), 1 + CUBINS.len());
    for (_, name, expected) in built {
        assert_eq!(hash(folder.join("built").join(name)), expected, "{name}: run scripts/kernels");
    }
}

#[test]
fn every_kernel_is_there_by_its_name() {
    let ptx = String::from_utf8(image((7, 5)).unwrap()).unwrap();
    let mut there: Vec<_> = ptx.lines().filter_map(|line| line.strip_prefix(".visible .entry ")).collect();
    there = there.iter().map(|name| name.trim_end_matches('(')).collect();
    let mut known = ENTRIES.to_vec();
    there.sort_unstable();
    known.sort_unstable();
    assert_eq!(there, known);
    for op in ReduceOp::ALL {
        for dtype in Dtype::ALL {
            let entry = reduce_entry(op, dtype);
            assert_eq!(entry.is_some(), op.check(dtype).is_ok(), "{op} of {dtype}");
            assert!(entry.is_none_or(|(_, size)| dtype.size() % size == 0));
        }
    }
    assert_eq!(reduce_entry(ReduceOp::Sum, Dtype::I32), Some(("reduce_sum_u32", 4)));
    assert_eq!(reduce_entry(ReduceOp::Avg, Dtype::Complex64), Some(("reduce_avg_f32", 4)));
    assert_eq!(reduce_entry(ReduceOp::Product, Dtype::Complex64), Some(("reduce_product_complex64", 8)));
    assert_eq!(reduce_entry(ReduceOp::Band, Dtype::U64), Some(("reduce_and_raw", 1)));
    assert_eq!(reduce_entry(ReduceOp::Sum, Dtype::Bool), Some(("reduce_or_bool", 1)));
}

/// Nothing rounds in another place than the host does, and subnormal numbers count.
#[test]
fn the_code_neither_contracts_nor_flushes() {
    let ptx = String::from_utf8(image((12, 0)).unwrap()).unwrap();
    assert!(ptx.ends_with("}\n\0"));
    assert!(
        ptx.starts_with(".version 8.0\n.target sm_80\n"),
        "another version: change OLDEST_DRIVER and OLDEST_COMPUTE"
    );
    for line in ptx.lines() {
        assert!(!line.contains("fma.") && !line.contains(".ftz") && !line.contains("approx"), "{line}");
        let exact = ["add.f", "sub.f", "mul.f", "div.f"].iter().all(|loose| !line.starts_with(loose));
        assert!(exact, "{line} may be joined with another");
    }
}

#[test]
fn each_gpu_gets_the_image_of_its_generation() {
    let same = |compute, than| image(compute).unwrap() == image(than).unwrap();
    let is_cubin = |compute| image(compute).unwrap().starts_with(b"\x7fELF");
    for compute in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3)] {
        assert!(is_cubin(compute), "{compute:?}");
        assert!(same(compute, (compute.0, 0)));
    }
    for compute in [(7, 5), (11, 0), (12, 0)] {
        assert!(!is_cubin(compute), "{compute:?}");
    }
    assert!(!same((8, 0), (9, 0)) && !same((9, 0), (10, 0)));
}

#[test]
fn grids_fill_the_gpu_and_no_more() {
    assert_eq!(grid(0, 132), (1, 64));
    assert_eq!(grid(64 << 20, 132), (396, 256));
    assert_eq!(grid(usize::MAX, 132), (396, 256));
    assert_eq!(grid(64 << 10, 132), (32, 64));
    assert_eq!(grid(2048, 0), (1, 64));
    for len in [1 << 10, 1 << 15, 1 << 20, 1 << 25] {
        let (blocks, threads) = grid(len, 132);
        assert!((1..=396).contains(&blocks) && [64, 128, 256].contains(&threads));
    }
}

const VECTORS: &str = include_str!("../../../tests/golden/reduce.jsonl");

#[test]
fn reductions_give_the_golden_bits() {
    let Some(machine) = machine() else { return };
    for (line, text) in VECTORS.lines().enumerate() {
        let case: Value = serde_json::from_str(text).unwrap();
        let name = case["op"].as_str().unwrap();
        let op = match ReduceOp::ALL.into_iter().find(|op| op.name() == name).unwrap() {
            ReduceOp::PremulSum(_) => ReduceOp::PremulSum(case["factor"].as_f64().unwrap()),
            op => op,
        };
        let dtype = case["dtype"].as_str().unwrap().parse().unwrap();
        let inputs: Vec<_> = case["inputs"].as_array().unwrap().iter().map(hex).collect();
        let what = format!("line {}", line + 1);
        check(&machine, op, dtype, &inputs, &hex(&case["output"]), line, &what);
    }
}

fn hex(text: &Value) -> Vec<u8> {
    let digits = text.as_str().unwrap().as_bytes();
    let digit = |c: u8| (c as char).to_digit(16).unwrap() as u8;
    digits.chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

/// Random bits, and values that make trouble, of every type and operation, for few and for very many inputs.
#[test]
fn reductions_give_the_bits_of_the_host() {
    let Some(machine) = machine() else { return };
    let mut random = Random(1);
    for dtype in Dtype::ALL {
        for op in ReduceOp::ALL.into_iter().filter(|op| op.check(dtype).is_ok()) {
            for (round, inputs) in [1, 2, 3, 4, 5, 8, 9, 17, 128].into_iter().enumerate() {
                let count = if inputs > 100 { 40 } else { 700 + round * 13 };
                let op = match op {
                    ReduceOp::PremulSum(_) => ReduceOp::PremulSum(FACTORS[round % FACTORS.len()]),
                    op => op,
                };
                let inputs: Vec<_> = (0..inputs).map(|_| random.elements(dtype, count, round)).collect();
                let expected = host(op, dtype, &inputs);
                check(&machine, op, dtype, &inputs, &expected, round, &format!("round {round}"));
            }
        }
    }
}

const FACTORS: [f64; 8] = [0.5, -1.7, 1e-3, 3.0, 1.0 / 3.0, f64::NAN, 1e-40, f64::INFINITY];

/// Rows at the places of one another, of packs, of elements and of bytes, against reductions of whole spans.
#[test]
fn rows_give_the_bits_of_whole_reductions() {
    let Some(machine) = machine() else { return };
    let mut random = Random(7);
    // The third row has more sources than the others, and none of them twice in the same order.
    let made: [&[usize]; 4] = [&[0], &[2, 1], &[3, 0, 2, 1, 4], &[4, 3]];
    let ends: Vec<u32> = made.iter().scan(0, |end, row| (*end += row.len() as u32, Some(*end)).1).collect();
    for dtype in Dtype::ALL {
        for op in ReduceOp::ALL.into_iter().filter(|op| op.check(dtype).is_ok()) {
            for (round, (width, place)) in [(1, 0), (16, 0), (80, 0), (7, 0), (48, 1)].into_iter().enumerate()
            {
                let row = width * dtype.size();
                let data: Vec<_> = (0..5).map(|_| random.elements(dtype, width, round)).collect();
                let sources: Vec<_> = data.iter().map(|row| TouchedMemory::new(row, place)).collect();
                let addresses: Vec<u64> =
                    made.iter().flat_map(|row| row.iter().map(|&source| sources[source].address())).collect();
                let words = |bytes: Vec<u8>| TouchedMemory::new(&bytes, 0);
                let there = words(addresses.iter().flat_map(|address| address.to_ne_bytes()).collect());
                let counts = words(ends.iter().flat_map(|end| end.to_ne_bytes()).collect());
                let plan = PlacedRows {
                    ends: counts.address(),
                    sources: there.address(),
                    lowest: addresses.iter().fold(0, |all, address| all | address),
                };
                let output = TouchedMemory::new(&vec![GUARD; made.len() * row], place);
                let what = (op, dtype, 5);
                let call = reduce_rows(what, &plan, output.address(), (made.len(), row), 1).unwrap();
                let read: Vec<_> = sources.iter().chain([&there, &counts]).collect();
                let faults = machine.run(call.entry, call.grid, &call.arguments, &read, &[&output]);
                assert_eq!(faults, 0, "{op} of {width} {dtype} at {place}");
                for (index, row_of) in made.iter().enumerate() {
                    // An average is divided by 5.
                    if op != ReduceOp::Avg || row_of.len() == 5 {
                        let inputs: Vec<_> = row_of.iter().map(|&source| data[source].clone()).collect();
                        let got = &output.bytes()[index * row..(index + 1) * row];
                        let what = format!("row {index} of {width} at {place}");
                        compare(op, dtype, got, &host(op, dtype, &inputs), &what);
                    }
                }
            }
        }
    }
}

/// Two inputs of one byte, with all values of both; two bytes, with all values of one.
#[test]
fn reductions_give_the_bits_of_the_host_for_all_small_values() {
    let Some(machine) = machine() else { return };
    for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.size() <= 2) {
        for op in ReduceOp::ALL.into_iter().filter(|op| op.check(dtype).is_ok()) {
            let factors = if let ReduceOp::PremulSum(_) = op { &FACTORS[..] } else { &[1.0] };
            for &factor in factors {
                let op = if let ReduceOp::PremulSum(_) = op { ReduceOp::PremulSum(factor) } else { op };
                let codes = 0..=u16::MAX;
                let inputs: Vec<Vec<u8>> = if dtype.size() == 1 {
                    vec![codes.clone().map(|i| i as u8).collect(), codes.map(|i| (i >> 8) as u8).collect()]
                } else {
                    let far = codes.clone().map(|i| i.wrapping_mul(40503).rotate_left(5));
                    vec![codes.flat_map(u16::to_ne_bytes).collect(), far.flat_map(u16::to_ne_bytes).collect()]
                };
                for inputs in [&inputs[..1], &inputs] {
                    let expected = host(op, dtype, inputs);
                    let (got, faults) = reduced(&machine, op, dtype, inputs, &[0; 3], &[None], Gate::OPEN);
                    assert_eq!(faults, 0);
                    compare(op, dtype, &got, &expected, "all values");
                }
            }
        }
    }
}

#[test]
fn every_kernel_can_do_nothing() {
    let Some(machine) = machine() else { return };
    for entry in ENTRIES {
        // Each takes as many zeros as its arguments have.
        let faults = match entry {
            COPY => machine.run(entry, (2, 64), &[0u64; size_of::<CopyArguments>() / 8], &[], &[]),
            _ if entry.starts_with("copy_") => {
                machine.run(entry, (2, 64), &[0u64; size_of::<StridedArguments>() / 8], &[], &[])
            }
            MEET => machine.run(entry, (2, 64), &[0u64; size_of::<MeetingArguments>() / 8], &[], &[]),
            _ if entry.starts_with("rows_") => {
                machine.run(entry, (2, 64), &[0u64; size_of::<RowsArguments>() / 8], &[], &[])
            }
            _ if entry.starts_with("reduce_") => {
                machine.run(entry, (2, 64), &[0u64; size_of::<ReduceArguments>() / 8], &[], &[])
            }
            _ => machine.run(entry, (2, 64), &NOTHING, &[], &[]),
        };
        assert_eq!(faults, 0, "{entry}");
    }
}

/// Ranks that run at the same time, each in a thread, with blocks of their own.
mod meetings {
    use std::time::Duration;

    use super::*;
    use crate::device::Device;
    use crate::flag::{Abort, Flag, LINE, Writer};
    use crate::host::Host;
    use crate::meeting::{self, Failure, Meeting};
    use crate::span::Span;

    /// What a rank has.
    struct Member {
        words: Span,
        abort: Abort,
        failure: Flag,
        address: [u64; 2],
    }

    fn members(ranks: usize) -> Vec<Member> {
        let span = |bytes| Span::whole(Host.alloc(bytes).unwrap());
        let member = |_| {
            let lines = span(2 * LINE);
            let line = |at: usize| lines.slice(at * LINE..(at + 1) * LINE).unwrap();
            Member {
                words: span(meeting::size(ranks)),
                abort: Abort::new(&line(0)).unwrap(),
                failure: Flag::new(&line(1), Writer::Device).unwrap(),
                address: [line(0).addr() as u64, line(1).addr() as u64],
            }
        };
        (0..ranks).map(member).collect()
    }

    fn arguments(members: &[Member], rank: usize, channel: usize, timeout: Duration) -> MeetingArguments {
        let views: Vec<_> = members.iter().map(|member| member.words.view()).collect();
        let Member { abort, failure, address, .. } = &members[rank];
        let words: Vec<u64> = members.iter().map(|member| member.words.addr() as u64).collect();
        let meeting = Meeting {
            words: &views,
            rank,
            channel,
            blocks: 4,
            largest: 0,
            abort,
            failure,
            timeout,
            goes_on: &|| true,
        };
        MeetingArguments::new(&meeting, [address[0], 0], address[1], &words).unwrap()
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn ranks_reduce_together_round_after_round() {
        let Some(machine) = machine() else { return };
        let (ranks, count) = (3, 40);
        let (members, mut random) = (members(ranks), Random(5));
        for round in 0..20 {
            let inputs: Vec<_> =
                (0..ranks).map(|_| random.elements(Dtype::F32, ranks * count, round)).collect();
            let expected = host(ReduceOp::Sum, Dtype::F32, &inputs);
            let memory: Vec<_> =
                inputs.iter().map(|input| TouchedMemory::new(input, 4 * (round % 4))).collect();
            let (blocks, bytes) = ([1, 3, 2, 4][round % 4], count * 4);
            std::thread::scope(|scope| {
                for rank in 0..ranks {
                    let (machine, members, memory) = (&machine, &members, &memory);
                    let part = |memory: &TouchedMemory| memory.address() + (rank * bytes) as u64;
                    let parts: Vec<u64> = memory.iter().map(part).collect();
                    scope.spawn(move || {
                        let reduce = reduce(ReduceOp::Sum, Dtype::F32, &parts, &parts, bytes, 132).unwrap();
                        let meeting = arguments(members, rank, 1, LONG);
                        let call = together(reduce, meeting, (blocks, bytes)).unwrap();
                        let Together::Fused(call) = call else { panic!("{call:?}") };
                        assert_eq!(call.entry, "together_sum_f32");
                        let touched: Vec<_> = memory.iter().collect();
                        let grid = (blocks as u32, 64);
                        assert_eq!(machine.run(call.entry, grid, &call.arguments, &touched, &touched), 0);
                    });
                }
            });
            for memory in &memory {
                compare(ReduceOp::Sum, Dtype::F32, &memory.bytes(), &expected, &format!("round {round}"));
            }
        }
    }

    #[test]
    fn whoever_waits_in_vain_tells_all_and_writes_nothing() {
        let Some(machine) = machine() else { return };
        let members = members(3);
        // Rank 2 waits for rank 0.
        let run = |rank: usize, timeout| {
            let meet = arguments(&members, rank, 3, timeout);
            assert_eq!(machine.run(MEET, (1, 64), &meet, &[], &[]), 0);
        };
        let told = |rank: usize| Failure::of(members[rank].failure.load());
        run(2, Duration::from_millis(20));
        let late = Failure { late: true, channel: 3, by: 2, awaited: 0 };
        assert_eq!((told(2), members[2].abort.code()), (Some(late), Some(Abort::LATE)));
        assert_eq!(told(0), None);
        // Whoever comes later ends at once, and its host hears why.
        for rank in [0, 1] {
            run(rank, LONG);
            assert_eq!(told(rank), Some(late));
        }
    }

    #[test]
    fn an_abort_word_ends_it() {
        let Some(machine) = machine() else { return };
        let members = members(2);
        members[1].abort.set(7);
        let meet = arguments(&members, 1, 0, LONG);
        assert_eq!(machine.run(MEET, (1, 64), &meet, &[], &[]), 0);
        let ended = Failure { late: false, channel: 0, by: 1, awaited: 0 };
        assert_eq!((Failure::of(members[1].failure.load()), members[1].abort.code()), (Some(ended), Some(7)));
    }
}

/// A gate that these words close, for one more launch: at a place, or without one.
fn gate(abort: [u64; 2], placed: bool) -> Gate {
    static LAUNCHES: std::sync::Mutex<u64> = std::sync::Mutex::new(0);
    let mut launches = LAUNCHES.lock().unwrap();
    *launches += 1;
    Gate::new(abort, (if placed { 3 } else { MOST_GATES }, *launches))
}

/// Nothing is written where a word is set.
#[test]
fn kernels_heed_the_abort_words() {
    let Some(machine) = machine() else { return };
    let words = [0u32, 7];
    let [open, closed] = [0, 1].map(|i| (&raw const words[i]).addr() as u64);
    let cases = [
        ([0, 0], true),
        ([open, 0], true),
        ([closed, 0], false),
        ([0, closed], false),
        ([open, closed], false),
    ];
    for ((abort, written), placed) in cases.into_iter().flat_map(|case| [(case, true), (case, false)]) {
        let inputs = [[1u8; 999], [2; 999]].map(|input| input.to_vec());
        let gates = gate(abort, placed);
        let (got, _) = reduced(&machine, ReduceOp::Sum, Dtype::U8, &inputs, &[0, 0, 0], &[None], gates);
        assert_eq!(got == [3; 999], written);
        assert_eq!(got == [GUARD; 999], !written);

        let (from, mut to) = (TouchedMemory::new(&[5; 3000], 1), TouchedMemory::new(&[0; 3000], 2));
        let mut call = copy(&[copied(&to, &from)], 3).unwrap();
        *call.arguments.gate() = gate(abort, placed);
        machine.run(call.entry, call.grid, &call.arguments, &[&from], &[&to]);
        assert_eq!(to.bytes() == [5; 3000], written);
        assert_eq!(to.bytes() == [0; 3000], !written);

        let dims = [Dim { size: 1000, into: 1, from: 3 }];
        let mut call = strided(&dims, 1, to.address(), from.address(), 1);
        *call.arguments.gate() = gate(abort, placed);
        machine.run(call.entry, (2, 64), &call.arguments, &[&from], &[&to]);
        assert_eq!(to.bytes()[..1000] == [5; 1000], written);
        to.write(&[0; 3000]);
    }
}

/// Each kernel says when it ended, whether it was closed or not; and nothing where nobody asks.
#[test]
fn kernels_say_when_they_ended() {
    let Some(machine) = machine() else { return };
    let word = crate::sync::AtomicU64::new(0);
    let (from, to) = (TouchedMemory::new(&[5; 1 << 16], 0), TouchedMemory::new(&[0; 1 << 16], 0));
    let mut call = copy(&[copied(&to, &from)], 1).unwrap();
    let mut run = |place| {
        call.arguments.gate().stamp((place, 1_000_000_000_000));
        let before = crate::clock::monotonic();
        machine.run(call.entry, call.grid, &call.arguments, &[&from], &[&to]);
        let said = word.swap(0, crate::sync::Ordering::Relaxed);
        (before..=crate::clock::monotonic()).contains(&said.wrapping_sub(1_000_000_000_000))
    };
    assert!(run((&raw const word).addr() as u64));
    assert!(!run(0));
    // As the clocks are compared.
    let mut nothing = copy(&[], 1).unwrap();
    nothing.arguments.gate().stamp(((&raw const word).addr() as u64, 0));
    machine.run(nothing.entry, (1, 32), &nothing.arguments, &[], &[]);
    assert_ne!(word.load(crate::sync::Ordering::Relaxed), 0);
}

/// Whichever block comes first reads the words, and the others take what it has read: all of a launch is done, or nothing.
#[test]
fn one_block_reads_the_words_for_all() {
    let Some(machine) = machine() else { return };
    let word = crate::sync::AtomicU32::new(0);
    let abort = [(&raw const word).addr() as u64, 0];
    let set = |code| word.store(code, crate::sync::Ordering::Relaxed);
    let (from, to) = (TouchedMemory::new(&[5; 1 << 16], 0), TouchedMemory::new(&[0; 1 << 16], 0));
    let mut call = copy(&[copied(&to, &from)], 1).unwrap();
    let (blocks, _) = call.grid;
    assert!(blocks >= 2);
    let written = |to: &TouchedMemory| to.bytes().iter().filter(|byte| **byte == 5).count();
    for (first, then) in [(0, 7), (7, 0)] {
        *call.arguments.gate() = gate(abort, true);
        set(first);
        let run = |block| machine.run_one(COPY, call.grid, block, &call.arguments, &[&from], &[&to]);
        // The last one comes first.
        assert_eq!(run(blocks - 1), 0);
        assert_eq!(written(&to) > 0, first == 0);
        set(then);
        (0..blocks - 1).for_each(|block| assert_eq!(run(block), 0));
        assert_eq!(written(&to), if first == 0 { 1 << 16 } else { 0 });
        to.clear();
    }
}

fn copied(to: &TouchedMemory, from: &TouchedMemory) -> Copied {
    let bytes = from.bytes().len() as u64;
    Copied { to: to.address(), from: from.address(), bytes }
}

#[test]
fn copies_are_right_at_any_address() {
    let Some(machine) = machine() else { return };
    let mut random = Random(2);
    for len in [0, 1, 3, 15, 16, 17, 31, 33, 47, 48, 49, 64, 100, 1000, 20_000] {
        for place in 0..256 {
            // All pairs of places, of long ones some.
            if len > 100 && place % 7 != 0 {
                continue;
            }
            let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
            let from = TouchedMemory::new(&bytes, place % 16);
            let to = TouchedMemory::new(&vec![GUARD; len], place / 16);
            let call = copy(&[copied(&to, &from)], 2).unwrap();
            let faults = machine.run(call.entry, call.grid, &call.arguments, &[&from], &[&to]);
            assert_eq!(faults, 0, "{len} bytes at {place:x}");
            assert_eq!(to.bytes(), bytes, "{len} bytes at {place:x}");
        }
    }
}

/// As many as a launch takes, of very different lengths, at any addresses.
#[test]
fn several_copies_are_made_at_once() {
    let Some(machine) = machine() else { return };
    let mut random = Random(4);
    for round in 0..120 {
        let count = if round % 10 == 0 { MOST_COPIES } else { 1 + random.below(MOST_COPIES) };
        let mut pairs = Vec::new();
        for _ in 0..count {
            let most = [1, 20, 300, 9000][random.below(4)];
            let bytes: Vec<u8> = (0..random.below(most + 1)).map(|_| random.next() as u8).collect();
            let to = TouchedMemory::new(&vec![GUARD; bytes.len()], random.below(16));
            pairs.push((to, TouchedMemory::new(&bytes, random.below(16))));
        }
        let copies: Vec<_> = pairs.iter().map(|(to, from)| copied(to, from)).collect();
        let call = copy(&copies, 1 + random.below(20) as u32).unwrap();
        let (to, from): (Vec<_>, Vec<_>) = pairs.iter().map(|(to, from)| (to, from)).unzip();
        let faults = machine.run(call.entry, call.grid, &call.arguments, &from, &to);
        assert_eq!(faults, 0, "round {round}");
        for (to, from) in &pairs {
            assert_eq!(to.bytes(), from.bytes(), "round {round}");
        }
    }
    let none = Copied::default();
    assert_eq!(copy(&[], 132).unwrap().grid.0, 1);
    assert!(copy(&[none; MOST_COPIES + 1], 132).unwrap_err().to_string().contains("65 copies"));
}

#[test]
fn large_copies_get_most_of_the_blocks() {
    let of = |bytes| Copied { to: 0, from: 0, bytes };
    let blocks = |sizes: &[u64]| {
        let copies: Vec<_> = sizes.iter().map(|bytes| of(*bytes)).collect();
        copy(&copies, 132).unwrap().grid.0
    };
    assert_eq!(blocks(&[64 << 20]), 396);
    assert_eq!(blocks(&[32 << 20, 32 << 20]), 396);
    // Each has one at least.
    assert_eq!(blocks(&[64 << 20, 1, 1]), 395 + 2);
    assert_eq!(blocks(&[1; 64]), 64);
    assert_eq!(blocks(&[u64::MAX, u64::MAX]), 396 * 2);
}

/// Tensors of up to eight dimensions in any order, with gaps, turned around, repeated, at any address.
#[test]
fn strided_copies_are_right() {
    let Some(machine) = machine() else { return };
    let mut random = Random(3);
    for round in 0..1500 {
        let item = [1, 2, 4, 8, 16][random.below(5)];
        let rank = if round % 50 == 0 { 8 } else { random.below(5) };
        let sizes: Vec<_> = (0..rank).map(|_| if rank == 8 { 2 } else { 1 + random.below(9) }).collect();
        let aligned = if random.below(3) == 0 { 1 } else { item };
        let (into, to_len, to_first) = random.strides(&sizes, item, false);
        let (of, from_len, from_first) = random.strides(&sizes, item, true);
        let source: Vec<u8> = (0..from_len).map(|_| random.next() as u8).collect();
        let from = TouchedMemory::new(&source, random.below(16) / aligned * aligned);
        let to = TouchedMemory::new(&vec![GUARD; to_len], random.below(16) / aligned * aligned);
        let mut expected = vec![GUARD; to_len];
        for mut index in 0..sizes.iter().product::<usize>() {
            let (mut a, mut b) = (to_first as isize, from_first as isize);
            for d in 0..rank {
                let i = (index % sizes[d]) as isize;
                index /= sizes[d];
                (a, b) = (a + i * into[d], b + i * of[d]);
            }
            let (a, b) = (a as usize, b as usize);
            expected[a..a + item].copy_from_slice(&source[b..b + item]);
        }
        let dims: Vec<_> = (0..rank).map(|d| Dim { size: sizes[d], into: into[d], from: of[d] }).collect();
        let addresses = (to.address() + to_first as u64, from.address() + from_first as u64);
        let call = strided(&dims, item, addresses.0, addresses.1, 1 + random.below(3) as u32);
        let faults = machine.run(call.entry, call.grid, &call.arguments, &[&from], &[&to]);
        assert_eq!(faults, 0, "{dims:?} of {item} bytes at {addresses:x?}");
        assert_eq!(to.bytes(), expected, "{dims:?} of {item} bytes at {addresses:x?}");
    }
}

/// More elements than a word counts, most of which fall on the same bytes; two blocks of all that there would be.
#[test]
fn indices_of_64_bits_are_right() {
    let Some(machine) = machine() else { return };
    let (from, to) = (TouchedMemory::new(&[1, 2, 3, 4], 0), TouchedMemory::new(&[GUARD; 4], 0));
    let arguments = StridedArguments::as_if_large(to.address(), from.address());
    for (first, expected) in [(1 << 31, [1, 2, GUARD, GUARD]), (6u64 << 30, [1, 2, 3, 4])] {
        let (grid, block) = ((1 << 24, 256), (first / 1024) as u32);
        let faults = machine.run_one("copy_strided_1", grid, block, &arguments, &[&from], &[&to]);
        assert_eq!((faults, &to.bytes()[..]), (0, &expected[..]));
    }
}

/// Reduces with the spans in several places: packs, elements, bytes; apart and in place; to one and to several outputs.
fn check(
    machine: &Machine,
    op: ReduceOp,
    dtype: Dtype,
    inputs: &[Vec<u8>],
    expected: &[u8],
    seed: usize,
    what: &str,
) {
    let size = dtype.size();
    let spans = inputs.len() + 2;
    let places: [Vec<usize>; 4] = [
        vec![0; spans],
        vec![seed % 5 * size % 16; spans],
        (0..spans).map(|i| (i + seed) % 3 * size % 16).collect(),
        (0..spans).map(|i| (i * 5 + seed) % 7).collect(),
    ];
    for (way, offsets) in places.iter().enumerate() {
        let outputs = [None, Some(seed % inputs.len())];
        let outputs = if way % 2 == 0 { &outputs[..1] } else { &outputs };
        let (got, faults) = reduced(machine, op, dtype, inputs, offsets, outputs, Gate::OPEN);
        assert_eq!(faults, 0, "{what}: {op} of {dtype}, way {way}");
        for got in got.chunks(expected.len()) {
            compare(op, dtype, got, expected, &format!("{what}, way {way}"));
        }
    }
}

const GUARD: u8 = 0xa5;

/// What the kernel makes of the inputs at these offsets from aligned addresses, for every output, which is apart or in
/// place of an input; and how many accesses were wrong.
fn reduced(
    machine: &Machine,
    op: ReduceOp,
    dtype: Dtype,
    inputs: &[Vec<u8>],
    offsets: &[usize],
    outputs: &[Option<usize>],
    gate: Gate,
) -> (Vec<u8>, u64) {
    let len = inputs[0].len();
    let ins: Vec<_> =
        inputs.iter().zip(offsets).map(|(input, &offset)| TouchedMemory::new(input, offset)).collect();
    let apart = TouchedMemory::new(&vec![GUARD; len], offsets[inputs.len()]);
    let outs: Vec<_> = outputs.iter().map(|place| place.map_or(&apart, |input| &ins[input])).collect();
    let addresses = |spans: &[&TouchedMemory]| spans.iter().map(|span| span.address()).collect::<Vec<_>>();
    let all: Vec<_> = ins.iter().collect();
    let mut call = reduce(op, dtype, &addresses(&all), &addresses(&outs), len, 1).unwrap();
    *call.arguments.gate() = gate;
    let faults = machine.run(call.entry, call.grid, &call.arguments, &all, &outs);
    (outs.iter().flat_map(|out| out.bytes()).collect(), faults)
}

fn host(op: ReduceOp, dtype: Dtype, inputs: &[Vec<u8>]) -> Vec<u8> {
    let mut output = vec![0; inputs[0].len()];
    let ins: Vec<_> = inputs.iter().map(Vec::as_ptr).collect();
    let count = output.len() / dtype.size();
    // SAFETY: all have `count` elements and are apart.
    unsafe { Instructions::best().reduce(op, dtype, &ins, &[output.as_mut_ptr()], count, Caching::Keep) }
        .unwrap();
    output
}

/// Any NaN is a NaN.
fn compare(op: ReduceOp, dtype: Dtype, got: &[u8], expected: &[u8], what: &str) {
    let size = if dtype.is_complex() { dtype.size() / 2 } else { dtype.size() };
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.chunks(size).zip(expected.chunks(size)).enumerate() {
        let fine = if is_nan(dtype, expected) { is_nan(dtype, got) } else { got == expected };
        assert!(fine, "{what}: {op} of {dtype}, element {i}: {got:02x?} should be {expected:02x?}");
    }
}

/// Of one part.
fn is_nan(dtype: Dtype, bytes: &[u8]) -> bool {
    let mut code = [0; 8];
    code[..bytes.len()].copy_from_slice(bytes);
    let code = u64::from_le_bytes(code);
    match dtype {
        Dtype::F8E4M3Fn => code & 0x7f == 0x7f,
        Dtype::F8E5M2 => code & 0x7f > 0x7c,
        Dtype::F8E4M3Fnuz | Dtype::F8E5M2Fnuz => code == 0x80,
        Dtype::F8E8M0Fnu => code == 0xff,
        Dtype::F16 | Dtype::Complex32 => code & 0x7fff > 0x7c00,
        Dtype::Bf16 => code & 0x7fff > 0x7f80,
        Dtype::F32 | Dtype::Complex64 => f32::from_bits(code as u32).is_nan(),
        Dtype::F64 | Dtype::Complex128 => f64::from_bits(code).is_nan(),
        _ => false,
    }
}

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Random bits; in some rounds of floats numbers near one, or near the ends of what the type holds.
    fn elements(&mut self, dtype: Dtype, count: usize, round: usize) -> Vec<u8> {
        let part = if dtype.is_complex() { dtype.size() / 2 } else { dtype.size() };
        let parts = count * dtype.size() / part;
        let edges = [0, 1, 2, 0x7f80_0000, 0x7f7f_ffff, 0x0080_0000, 0x007f_ffff, 0x3f80_0000, 0x7fc0_0000];
        let mut bytes = Vec::new();
        for _ in 0..parts {
            let random = self.next();
            let number = 0.25 + random as f64 / u64::MAX as f64 * 4.0;
            let number = if random & 1 == 0 { -number } else { number };
            let special = edges[self.below(edges.len())] | (random as u32 & 1) << 31;
            let chosen = if round.is_multiple_of(3) { 0 } else { self.below(8) };
            let code = match (part, chosen) {
                (8, 1..5) if dtype != Dtype::I64 => number.to_bits(),
                (8, 5) if dtype != Dtype::I64 => f64::from(f32::from_bits(special)).to_bits(),
                (4, 1..5) => u64::from((number as f32).to_bits()),
                (4, 5) => u64::from(special),
                (2, 1..5) if dtype == Dtype::Bf16 => u64::from((number as f32).to_bits() >> 16),
                (2, 5) => u64::from(special >> 16),
                (2, 1..5) => u64::from(half::f16::from_f64(number).to_bits()),
                (1, 6) => [0, 1, 0x7f, 0x80, 0xff][self.below(5)],
                _ => random >> 7,
            };
            bytes.extend_from_slice(&code.to_le_bytes()[..part]);
        }
        bytes
    }

    /// Strides in bytes of a tensor with gaps and its dimensions in any order, some backwards and, of a source, some
    /// repeated; how many bytes it spans, and where its first element lies.
    fn strides(&mut self, sizes: &[usize], item: usize, source: bool) -> (Vec<isize>, usize, usize) {
        let mut order: Vec<_> = (0..sizes.len()).rev().collect();
        if self.below(2) == 0 {
            for i in (1..order.len()).rev() {
                order.swap(i, self.below(i + 1));
            }
        }
        let gaps = self.below(3) == 0;
        let (mut strides, mut step, mut first) = (vec![0; sizes.len()], item, 0);
        for d in order {
            let repeated = source && self.below(8) == 0;
            let backwards = self.below(4) == 0;
            if !repeated {
                strides[d] = if backwards { -(step as isize) } else { step as isize };
                first += if backwards { step * (sizes[d] - 1) } else { 0 };
                step *= sizes[d];
            }
            if gaps {
                step += self.below(4) * item;
            }
        }
        (strides, step.max(item), first)
    }
}
