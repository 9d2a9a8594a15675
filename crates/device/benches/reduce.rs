//! How fast the reduce kernels are beside memcpy: `cargo bench -p tensorwire-device --bench reduce -- --help`.
//!
//! One thread. Bytes are counted as they are read and written: a copy of n bytes moves 2n, a sum of two inputs
//! 3n, of eight 9n. The works take turns in the same process; medians are shown.
//!
//! An accumulation is in place: its output is its first input, so two inputs are two buffers, as many as a copy has.
//! Out of place there is one buffer more, which may not fit in the cache that the copy stays in: three times 16 KiB
//! fill a first-level cache of 48 KiB to the last line and overflow one of 32 KiB, so that row measures the next
//! cache. Hence the second reference, a copy that moves as many bytes as the sum does.
//!
//! All buffers begin at a page, which suits a loop that goes up: it loads at no offset in a page at which it has just
//! stored. `--skew` moves them apart; where the output lies a little above an input in its page, a processor may take
//! a load for one that needs the store before it, and wait.
#![allow(clippy::print_stdout, missing_docs, unreachable_pub)]

mod queue;

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::json;
use tensorwire_device::host::reduce::Instructions;
use tensorwire_device::{Caching, Dtype, ReduceOp};

const HELP: &str = "Reduce kernels beside memcpy, one thread.

Usage: reduce [--json] [--all] [--queue] [--skew BYTES] [--dtype NAME]...

  --json        one JSON object a line in place of the table
  --all         every instruction set that is here, not only the best one
  --queue       calls of the host's queue in place of the kernels: 4 and 8 inputs, to one output and to all, and copies,
                kept in the caches and past them
  --skew BYTES  the output lies so much further in its page than the inputs do (0 to 4095); default: 0
  --dtype NAME  this element type (may be repeated); default: float32, bfloat16, float16, float8_e4m3fn";

const SIZES: [usize; 3] = [16 << 10, 256 << 10, 16 << 20];
const ROUNDS: usize = 51;
/// How long one measurement takes at least: long for the clock, short for the scheduler.
const BATCH: Duration = Duration::from_micros(300);
const MOST_INPUTS: usize = 8;
const PAGE: usize = 4096;
/// A copy moves as many bytes as the largest sum.
const MOST_BYTES: usize = SIZES[SIZES.len() - 1] * (MOST_INPUTS + 1) / 2;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (mut json, mut all, mut calls, mut skew, mut dtypes) = (false, false, false, 0, Vec::new());
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--json" => json = true,
            "--all" => all = true,
            "--queue" => calls = true,
            "--skew" => {
                skew = args.next().and_then(|bytes| bytes.parse().ok()).ok_or("--skew needs a number")?;
                if skew >= PAGE {
                    return Err("--skew is less than a page".into());
                }
            }
            "--dtype" => dtypes.push(args.next().ok_or("--dtype needs a name")?.parse()?),
            // cargo bench adds it.
            "--bench" => {}
            _ => {
                println!("{HELP}");
                return Ok(());
            }
        }
    }
    if dtypes.is_empty() {
        dtypes = vec![Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F8E4M3Fn];
    }
    let cpu = cpu();
    if calls {
        return queue_calls(&dtypes, json, &cpu);
    }
    if !json {
        println!("{cpu}\n");
        println!(
            "{:<13} {:<8} {:>8} {:>6} {:>6} {:>7} {:>15} {:>18}",
            "", "", "bytes a", "", "in", "reduce", "memcpy", "memcpy, same bytes"
        );
        println!(
            "{:<13} {:<8} {:>8} {:>6} {:>6} {:>7} {:>7} {:>7} {:>10} {:>7}",
            "SUM of", "with", "buffer", "inputs", "place", "GB/s", "GB/s", "reduce", "GB/s", "reduce"
        );
    }
    let buffers: Vec<_> = (0..=MOST_INPUTS).map(|_| Buffer::new(MOST_BYTES + PAGE)).collect();
    // The clock rises only under load.
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(1) {
        buffers[0].fill();
    }
    for dtype in dtypes {
        for instructions in Instructions::available().take(if all { usize::MAX } else { 1 }) {
            for bytes in SIZES {
                for (inputs, in_place) in [(2, true), (2, false), (MOST_INPUTS, false)] {
                    let case = Case { instructions, dtype, bytes, inputs, in_place, skew };
                    let [copy, same, reduce] = case.measure(&buffers);
                    if json {
                        let line = json!({
                            "bench": "reduce",
                            "op": "SUM",
                            "dtype": dtype.name(),
                            "instructions": instructions.to_string(),
                            "bytes": bytes,
                            "inputs": inputs,
                            "in_place": in_place,
                            "skew": skew,
                            "reduce_gb_s": round(reduce),
                            "memcpy_gb_s": round(copy),
                            "of_memcpy": round(reduce / copy),
                            "memcpy_same_bytes_gb_s": round(same),
                            "of_memcpy_same_bytes": round(reduce / same),
                            "cpu": cpu,
                            "unix_time": SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
                            "command": "cargo bench -p tensorwire-device --bench reduce -- --json",
                        });
                        println!("{line}");
                    } else {
                        let part = |of: f64| format!("{:.0}%", 100.0 * reduce / of);
                        println!(
                            "{dtype:<13} {instructions:<8} {bytes:>8} {inputs:>6} {:>6} {reduce:>7.1} {copy:>7.1} \
                             {:>7} {same:>10.1} {:>7}",
                            if in_place { "yes" } else { "no" },
                            part(copy),
                            part(same)
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

/// The calls of the queue, as a table or as JSON lines.
fn queue_calls(dtypes: &[Dtype], json: bool, cpu: &str) -> Result<(), Box<dyn Error>> {
    if !json {
        println!("{cpu}\n");
        println!(
            "{:<13} {:<13} {:>3} {:>3} {:>5} {:>9} {:<7} {:>11} {:>7} {:>11} {:>7}",
            "", "", "in", "out", "place", "bytes", "caching", "ns", "GB/s", "read: ns", "GB/s"
        );
    }
    let unix_time = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    queue::run(dtypes, |line| {
        if json {
            let mut line = line.clone();
            line["cpu"] = cpu.into();
            line["unix_time"] = unix_time.into();
            line["command"] = "cargo bench -p tensorwire-device --bench reduce -- --queue --json".into();
            println!("{line}");
            return;
        }
        let text = |key: &str| line[key].as_str().unwrap_or_default();
        let number = |key: &str| line[key].as_f64().map_or(String::new(), |number| format!("{number:.1}"));
        println!(
            "{:<13} {:<13} {:>3} {:>3} {:>5} {:>9} {:<7} {:>11} {:>7} {:>11} {:>7}",
            text("bench"),
            text("dtype"),
            line["inputs"].to_string(),
            line["outputs"].to_string(),
            if line["in_place"] == true { "yes" } else { "no" },
            line["bytes"].to_string(),
            text("caching"),
            number("ns"),
            number("gb_s"),
            number("read_ns"),
            number("read_gb_s"),
        );
    })
}

/// What is measured.
struct Case {
    instructions: Instructions,
    dtype: Dtype,
    bytes: usize,
    inputs: usize,
    in_place: bool,
    skew: usize,
}

impl Case {
    /// GB/s of a memcpy of one buffer, of one that moves as many bytes as the kernel, and of the kernel.
    fn measure(&self, buffers: &[Buffer]) -> [f64; 3] {
        let &Self { instructions, dtype, bytes, inputs, in_place, skew } = self;
        // SAFETY: every buffer is a page longer than what is used of it.
        let to = [unsafe { buffers[0].start.add(skew) }];
        let mut from: Vec<_> = buffers[1..=inputs].iter().map(|buffer| buffer.start.cast_const()).collect();
        let source = from[0];
        if in_place {
            from[0] = to[0];
        }
        let copy = |bytes: usize| {
            // SAFETY: two buffers, each of at least so many bytes.
            unsafe { black_box(to[0]).copy_from_nonoverlapping(black_box(source), bytes) };
        };
        let reduce = || {
            let (from, to, count) = (black_box(&from), black_box(&to), bytes / dtype.size());
            // SAFETY: the buffers have so many bytes, and the output is the first input or apart from all.
            let done = unsafe { instructions.reduce(ReduceOp::Sum, dtype, from, to, count, Caching::Keep) };
            assert!(done.is_ok());
        };
        let moved = (inputs + 1) * bytes;
        let seconds =
            medians([&mut || copy(bytes), &mut || copy(moved / 2), &mut || reduce()] as [Work<'_>; 3]);
        let bytes = [2 * bytes, moved, moved];
        std::array::from_fn(|i| bytes[i] as f64 / seconds[i] / 1e9)
    }
}

type Work<'a> = &'a mut dyn FnMut();

/// Seconds of one call of each; they take turns.
fn medians<const N: usize>(mut works: [Work<'_>; N]) -> [f64; N] {
    let calls = works.each_mut().map(|work| calls(work));
    let mut times = [const { Vec::new() }; N];
    for _ in 0..ROUNDS {
        for ((times, work), calls) in times.iter_mut().zip(&mut works).zip(calls) {
            times.push(seconds(work, calls));
        }
    }
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    })
}

/// How many calls fill a batch.
fn calls(work: &mut dyn FnMut()) -> u32 {
    work();
    let (begin, mut calls) = (Instant::now(), 0);
    while begin.elapsed() < BATCH {
        work();
        calls += 1;
    }
    calls
}

/// Of one call.
fn seconds(work: &mut dyn FnMut(), calls: u32) -> f64 {
    // The other work left its buffers in the cache, not ours.
    work();
    let begin = Instant::now();
    (0..calls).for_each(|_| work());
    begin.elapsed().as_secs_f64() / f64::from(calls)
}

fn round(x: f64) -> f64 {
    (x * 1000.0).round() / 1000.0
}

fn cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        info.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split(": ").nth(1));
    model.unwrap_or("unknown processor").to_owned()
}

/// Memory that begins at a page, as regions do.
struct Buffer {
    start: *mut u8,
    layout: Layout,
}

impl Buffer {
    fn new(len: usize) -> Self {
        let layout =
            Layout::array::<u8>(len).and_then(|layout| layout.align_to(PAGE)).unwrap_or(Layout::new::<u8>());
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        let buffer = Self { start, layout };
        // Touched, so that no page fault is measured.
        buffer.fill();
        buffer
    }

    /// A byte of 60 is a small number in every type.
    fn fill(&self) {
        // SAFETY: so many bytes were allocated.
        unsafe { self.start.write_bytes(60, self.layout.size()) };
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start, self.layout) };
    }
}
