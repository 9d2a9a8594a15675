//! How fast the reduce kernels are beside memcpy: `cargo bench -p tensorwire-device --bench reduce -- --help`.
//!
//! One thread. Bytes are counted as they are read and written: a copy of n bytes moves 2n, a sum of two inputs
//! 3n, of eight 9n. So a sum touches more memory than a copy of one of its buffers, and may leave a cache that the
//! copy stays in; hence the second reference, a copy that moves as many bytes as the sum does. The three take turns
//! in the same process; medians are shown.
#![allow(clippy::print_stdout, missing_docs)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::json;
use tensorwire_device::host::reduce::Instructions;
use tensorwire_device::{Dtype, ReduceOp};

const HELP: &str = "Reduce kernels beside memcpy, one thread.

Usage: reduce [--json] [--all] [--dtype NAME]...

  --json        one JSON object a line in place of the table
  --all         every instruction set that is here, not only the best one
  --dtype NAME  this element type (may be repeated); default: float32, bfloat16, float16, float8_e4m3fn";

const SIZES: [usize; 3] = [16 << 10, 256 << 10, 16 << 20];
const ROUNDS: usize = 51;
/// How long one measurement takes at least: long for the clock, short for the scheduler.
const BATCH: Duration = Duration::from_micros(300);
const MOST_INPUTS: usize = 8;
/// A copy moves as many bytes as the largest sum.
const MOST_BYTES: usize = SIZES[SIZES.len() - 1] * (MOST_INPUTS + 1) / 2;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (mut json, mut all, mut dtypes) = (false, false, Vec::new());
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--json" => json = true,
            "--all" => all = true,
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
    if !json {
        println!("{cpu}\n");
        println!(
            "{:<13} {:<9} {:>9} {:>6} {:>7} {:>16} {:>21}",
            "", "", "bytes a", "", "reduce", "memcpy", "memcpy, same bytes"
        );
        println!(
            "{:<13} {:<9} {:>9} {:>6} {:>7} {:>7} {:>8} {:>12} {:>8}",
            "SUM of", "with", "buffer", "inputs", "GB/s", "GB/s", "reduce", "GB/s", "reduce"
        );
    }
    let buffers: Vec<_> = (0..=MOST_INPUTS).map(|_| Buffer::new(MOST_BYTES)).collect();
    for dtype in dtypes {
        for instructions in Instructions::available().take(if all { usize::MAX } else { 1 }) {
            for bytes in SIZES {
                for inputs in [2, MOST_INPUTS] {
                    let [copy, same, reduce] = measure(&buffers, instructions, dtype, bytes, inputs);
                    if json {
                        let line = json!({
                            "bench": "reduce",
                            "op": "SUM",
                            "dtype": dtype.name(),
                            "instructions": instructions.to_string(),
                            "bytes": bytes,
                            "inputs": inputs,
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
                            "{dtype:<13} {instructions:<9} {bytes:>9} {inputs:>6} {reduce:>7.1} {copy:>7.1} {:>8} \
                             {same:>12.1} {:>8}",
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

/// GB/s of a memcpy of one buffer, of one that moves as many bytes as the kernel, and of the kernel.
fn measure(buffers: &[Buffer], with: Instructions, dtype: Dtype, bytes: usize, inputs: usize) -> [f64; 3] {
    let from: Vec<_> = buffers[1..=inputs].iter().map(|buffer| buffer.start.cast_const()).collect();
    let to = [buffers[0].start];
    let copy = |bytes: usize| {
        // SAFETY: two buffers, each of at least so many bytes.
        unsafe { black_box(to[0]).copy_from_nonoverlapping(black_box(from[0]), bytes) };
    };
    let reduce = || {
        let count = bytes / dtype.size();
        // SAFETY: the buffers are apart and have so many bytes.
        let done = unsafe { with.reduce(ReduceOp::Sum, dtype, black_box(&from), black_box(&to), count) };
        assert!(done.is_ok());
    };
    let moved = (inputs + 1) * bytes;
    let works: [(&dyn Fn(), usize); 3] =
        [(&|| copy(bytes), 2 * bytes), (&|| copy(moved / 2), moved), (&reduce, moved)];
    let calls = works.map(|(work, _)| calls(work));
    let mut times: [Vec<f64>; 3] = Default::default();
    for _ in 0..ROUNDS {
        for ((times, (work, _)), calls) in times.iter_mut().zip(works).zip(calls) {
            times.push(seconds(work, calls));
        }
    }
    let medians = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    std::array::from_fn(|i| works[i].1 as f64 / medians[i] / 1e9)
}

/// How many calls fill a batch.
fn calls(work: &dyn Fn()) -> u32 {
    work();
    let (begin, mut calls) = (Instant::now(), 0);
    while begin.elapsed() < BATCH {
        work();
        calls += 1;
    }
    calls
}

/// Of one call.
fn seconds(work: &dyn Fn(), calls: u32) -> f64 {
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
            Layout::array::<u8>(len).and_then(|layout| layout.align_to(4096)).unwrap_or(Layout::new::<u8>());
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: just allocated; touched so that no page fault is measured. A byte of 60 is a small number in
        // every type.
        unsafe { start.write_bytes(60, layout.size()) };
        Self { start, layout }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start, self.layout) };
    }
}
