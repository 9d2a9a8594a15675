//! The reduce kernels beside memcpy, on one rank while the others sleep.

use std::sync::Arc;

use tensorwire::device::{Caching, Queue, Region};
use tensorwire::{Dtype, Error, ReduceOp, Result, Span};

use super::rank::Bench;
use super::report::Row;

const SIZES: [usize; 3] = [16 << 10, 256 << 10, 16 << 20];
/// Each with 1, 2 and their sum, little-endian.
const TYPES: [(Dtype, &str, [&[u8]; 3]); 2] = [
    (Dtype::F32, "f32 sum of two", [&[0, 0, 0x80, 0x3f], &[0, 0, 0, 0x40], &[0, 0, 0x40, 0x40]]),
    (Dtype::Bf16, "bf16 sum of two", [&[0x80, 0x3f], &[0, 0x40], &[0x40, 0x40]]),
];

pub(super) const MEASUREMENTS: usize = SIZES.len() * (1 + TYPES.len());

pub(super) fn measure(bench: &Bench) -> Result<()> {
    let host = bench.group.context().host();
    let mut queue = host.queue()?;
    for size in SIZES {
        let alloc = || -> Result<Span> { Ok(Span::whole(host.alloc(size)? as Arc<dyn Region>)) };
        let (left, right, out) = (alloc()?, alloc()?, alloc()?);
        let latency = bench.repeat(|| Ok(queue.copy(out.view(), left.view(), Caching::Keep)?))?;
        let memcpy = Row::new("kernels", "memcpy", 1, latency).moving(size, 2 * size);
        bench.print(&memcpy)?;
        for (dtype, name, [one, two, three]) in TYPES {
            left.write(0, &one.repeat(size / one.len()))?;
            right.write(0, &two.repeat(size / two.len()))?;
            let latency = bench.repeat(|| sum(&mut *queue, dtype, &left, &right, &out))?;
            if out.to_vec()? != three.repeat(size / three.len()) {
                return Err(Error::Device(format!("the {name} values of {size} bytes is wrong")));
            }
            bench.print(&Row::new("kernels", name, 1, latency).moving(size, 3 * size).beside(&memcpy))?;
        }
    }
    Ok(())
}

fn sum(queue: &mut dyn Queue, dtype: Dtype, left: &Span, right: &Span, out: &Span) -> Result<()> {
    Ok(queue.reduce(ReduceOp::Sum, dtype, &[left.view(), right.view()], &[out.view()], Caching::Keep)?)
}
