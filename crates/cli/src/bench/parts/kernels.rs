//! The reduce kernels beside a copy, on one rank while the others sleep.

use std::sync::Arc;
use std::time::Instant;

use tensorwire::device::{Abort, Caching, Queue, Region};
use tensorwire::{Deadline, DeviceId, Dtype, Error, ReduceOp, Result, Span};

use super::rank::{Bench, PATIENCE};
use super::report::Row;
use crate::latency::Latency;

/// For the host, and for a GPU.
const SIZES: [[usize; 3]; 2] = [[16 << 10, 256 << 10, 16 << 20], [64 << 10, 1 << 20, 64 << 20]];
/// Calls that are queued on a GPU at once: one alone is shorter than to hear that it is done.
const BATCH: u32 = 50;
/// Each with 1, 2 and their sum, little-endian.
const TYPES: [(Dtype, &str, [&[u8]; 3]); 2] = [
    (Dtype::F32, "f32 sum of two", [&[0, 0, 0x80, 0x3f], &[0, 0, 0, 0x40], &[0, 0, 0x40, 0x40]]),
    (Dtype::Bf16, "bf16 sum of two", [&[0x80, 0x3f], &[0, 0x40], &[0x40, 0x40]]),
];

pub(super) const MEASUREMENTS: usize = SIZES[0].len() * (1 + TYPES.len());

pub(super) fn measure(bench: &Bench) -> Result<()> {
    let device = &bench.device;
    let mut queue = device.queue()?;
    let (sizes, batch) = match device.id() {
        DeviceId::Host => (SIZES[0], 1),
        _ => (SIZES[1], BATCH),
    };
    for size in sizes {
        let alloc = || -> Result<Span> { Ok(Span::whole(device.alloc(size)? as Arc<dyn Region>)) };
        let (left, right, out) = (alloc()?, alloc()?, alloc()?);
        let mut timed = |call: &dyn Fn(&mut dyn Queue) -> Result<()>| -> Result<Latency> {
            let mut latency = Latency::default();
            bench.repeat(|| {
                let start = Instant::now();
                (0..batch).try_for_each(|_| call(&mut *queue))?;
                queue.finish(&Abort::local(), Deadline::after(PATIENCE))?;
                latency.add(start.elapsed() / batch);
                Ok(())
            })?;
            Ok(latency)
        };
        let latency = timed(&|queue| Ok(queue.copy(out.view(), left.view(), Caching::Keep)?))?;
        let memcpy = Row::new("kernels", "memcpy", 1, latency).moving(size, 2 * size);
        bench.print(&memcpy)?;
        for (dtype, name, [one, two, three]) in TYPES {
            left.write(0, &one.repeat(size / one.len()))?;
            right.write(0, &two.repeat(size / two.len()))?;
            let latency = timed(&|queue| sum(queue, dtype, &left, &right, &out))?;
            if out.to_vec()? != three.repeat(size / three.len()) {
                return Err(Error::device(format!("the {name} values of {size} bytes is wrong")));
            }
            bench.print(&Row::new("kernels", name, 1, latency).moving(size, 3 * size).beside(&memcpy))?;
        }
    }
    Ok(())
}

fn sum(queue: &mut dyn Queue, dtype: Dtype, left: &Span, right: &Span, out: &Span) -> Result<()> {
    Ok(queue.reduce(ReduceOp::Sum, dtype, &[left.view(), right.view()], &[out.view()], Caching::Keep)?)
}
