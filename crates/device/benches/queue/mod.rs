//! The host queue's calls, checks and all, on memory as collectives have it: many inputs, one or as many outputs, results
//! that are kept in the caches and results that go past them.
//!
//! Beside each stands what merely reading its inputs takes, one after the other: no reduction is faster. A result past
//! the caches has its use where it is larger than they are; the smaller sizes show what it costs there.

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;

use serde_json::{Value, json};
use tensorwire_device::host::Host;
use tensorwire_device::host::reduce::Instructions;
use tensorwire_device::{Caching, Device, Dtype, Queue, ReduceOp, Region, View};

use crate::medians;

const RANKS: usize = 8;
const LARGE: usize = 4 << 20;
const COPY: usize = 64 << 20;

/// What is measured.
#[derive(Clone, Copy)]
struct Case {
    dtype: Dtype,
    inputs: usize,
    outputs: usize,
    bytes: usize,
    caching: Caching,
    /// Outputs are the first inputs.
    in_place: bool,
}

/// Runs all cases; `show` gets one JSON object for each.
pub fn run(dtypes: &[Dtype], mut show: impl FnMut(&Value)) -> Result<(), Box<dyn Error>> {
    let alloc =
        |count: usize, bytes: usize| (0..count).map(|_| Host.alloc(bytes)).collect::<Result<Vec<_>, _>>();
    let (from, into) = (alloc(RANKS, LARGE)?, alloc(RANKS, LARGE)?);
    for (rank, region) in from.iter().enumerate() {
        region.write(0, &vec![60 + rank as u8 % 2; LARGE])?;
    }
    let mut queue = Host.queue()?;
    for &dtype in dtypes {
        for case in reductions(dtype) {
            let [reduce, read] = case.measure(&mut *queue, &from, &into)?;
            let moved = case.bytes * case.inputs;
            show(&case.line(reduce, moved + case.bytes * case.outputs, Some((read, moved))));
        }
    }
    let ends = alloc(2, COPY)?;
    ends[0].write(0, &vec![60; COPY])?;
    for bytes in [64 << 10, 1 << 20, COPY] {
        for caching in [Caching::Keep, Caching::Bypass] {
            let case = Case { dtype: Dtype::U8, inputs: 1, outputs: 1, bytes, caching, in_place: false };
            let (dst, src) = (View::new(&ends[1], 0..bytes)?, View::new(&ends[0], 0..bytes)?);
            let mut copy = || assert!(queue.copy(black_box(dst), black_box(src), caching).is_ok());
            let [seconds] = medians([&mut copy]);
            show(&case.line(seconds, 2 * bytes, None));
        }
    }
    Ok(())
}

fn reductions(dtype: Dtype) -> impl Iterator<Item = Case> {
    let keep = move |inputs, outputs, bytes| Case {
        dtype,
        inputs,
        outputs,
        bytes,
        caching: Caching::Keep,
        in_place: false,
    };
    // A few bytes show what the call itself costs.
    let tiny = [keep(2, 1, 16), keep(RANKS, 1, 16), keep(RANKS, RANKS, 16), keep(RANKS, 1, 240)];
    let to_one = [4, RANKS]
        .into_iter()
        .flat_map(move |inputs| [1 << 10, 8 << 10, 64 << 10].map(|bytes| keep(inputs, 1, bytes)));
    let to_all = [64 << 10, LARGE].into_iter().flat_map(move |bytes| {
        let case = keep(RANKS, RANKS, bytes);
        [false, true].into_iter().flat_map(move |in_place| {
            [Caching::Keep, Caching::Bypass].map(|caching| Case { caching, in_place, ..case })
        })
    });
    tiny.into_iter().chain(to_one).chain(to_all)
}

impl Case {
    /// Seconds of one call, and of reading the inputs.
    fn measure(
        &self,
        queue: &mut dyn Queue,
        from: &[Arc<dyn Region>],
        into: &[Arc<dyn Region>],
    ) -> Result<[f64; 2], Box<dyn Error>> {
        let &Self { dtype, inputs, outputs, bytes, caching, in_place } = self;
        let ins = from[..inputs].iter().map(|r| View::new(r, 0..bytes)).collect::<Result<Vec<_>, _>>()?;
        let outs = if in_place { from } else { into };
        let outs = outs[..outputs].iter().map(|r| View::new(r, 0..bytes)).collect::<Result<Vec<_>, _>>()?;
        let mut reduce = || {
            let done = queue.reduce(ReduceOp::Sum, dtype, black_box(&ins), black_box(&outs), caching);
            assert!(done.is_ok());
        };
        let mut read = || from[..inputs].iter().for_each(|region| read(region.addr() as *const u8, bytes));
        let measured = medians([&mut reduce, &mut read]);
        for (rank, region) in from[..outputs].iter().enumerate().filter(|_| in_place) {
            region.write(0, &vec![60 + rank as u8 % 2; bytes])?;
        }
        Ok(measured)
    }

    fn line(&self, seconds: f64, moved: usize, read: Option<(f64, usize)>) -> Value {
        let rate = |bytes: usize, seconds: f64| crate::round(bytes as f64 / seconds / 1e9);
        let mut line = json!({
            "bench": if read.is_some() { "queue.reduce" } else { "queue.copy" },
            "dtype": self.dtype.name(),
            "instructions": Instructions::best().to_string(),
            "inputs": self.inputs,
            "outputs": self.outputs,
            "in_place": self.in_place,
            "bytes": self.bytes,
            "caching": format!("{:?}", self.caching).to_lowercase(),
            "ns": crate::round(seconds * 1e9),
            "gb_s": rate(moved, seconds),
        });
        if let Some((seconds, bytes)) = read {
            line["read_ns"] = crate::round(seconds * 1e9).into();
            line["read_gb_s"] = rate(bytes, seconds).into();
        }
        line
    }
}

/// Reads all bytes and forgets them.
fn read(from: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has it; the rest as below.
        return unsafe { read_avx2(from, bytes) };
    }
    for i in (0..bytes).step_by(8) {
        // SAFETY: regions have at least so many bytes, and whole pages.
        black_box(unsafe { from.add(i).cast::<u64>().read() });
    }
}

/// # Safety
/// `bytes`, rounded up to 256, are valid for reads, from a multiple of 32 on.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn read_avx2(from: *const u8, bytes: usize) {
    use std::arch::x86_64::{__m256i, _mm256_load_si256, _mm256_or_si256, _mm256_setzero_si256};
    let mut all = [_mm256_setzero_si256(); 8];
    for step in (0..bytes).step_by(256) {
        for (i, x) in all.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            let next = unsafe { _mm256_load_si256(from.add(step).cast::<__m256i>().add(i)) };
            *x = _mm256_or_si256(*x, next);
        }
    }
    black_box(all);
}
