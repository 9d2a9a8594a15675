//! The kernels: as they were built, by name, and what they are called with. Pure; no driver is needed here.
//!
//! Their sources are `kernels/*.cu` and `*.cuh` of this crate. `scripts/kernels` builds what lies in `kernels/built`: a cubin
//! for each generation of GPUs that we know, and PTX for the others.
//!
//! Every kernel reads the abort words before it writes, and writes nothing where one of them is set.

mod arguments;
mod packed;
mod strided;
#[cfg(test)]
mod tests;

use std::sync::LazyLock;

pub(super) use self::arguments::{
    Copied, CopyArguments, Gate, Gated, MOST_COPIES, MOST_GATES, ReduceArguments,
};
pub(super) use self::strided::strided;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::op::ReduceOp;

/// A kernel with its arguments.
#[derive(Debug)]
pub(super) struct Call<Arguments> {
    /// One of [`ENTRIES`].
    pub(super) entry: &'static str,
    /// Blocks, and threads in each.
    pub(super) grid: (u32, u32),
    pub(super) arguments: Arguments,
}

/// The oldest compute capability that has our kernels.
pub(crate) const OLDEST_COMPUTE: (i32, i32) = (8, 0);

/// What `cuDriverGetVersion` says where the driver takes our PTX (8.0), and the first release for Linux that says so.
pub const OLDEST_DRIVER: (i32, &str) = (12000, "525.60.13");

/// Copies bytes: [`CopyArguments`].
const COPY: &str = "copy";

/// Every kernel, by name. Those that reduce have the operation and the element type in theirs: signed integers have the sums
/// and products of unsigned ones, complex numbers most operations of real ones, and `raw` is bits of any type.
#[rustfmt::skip]
pub(super) const ENTRIES: [&str; 93] = [
    COPY,
    "copy_strided_1", "copy_strided_2", "copy_strided_4", "copy_strided_8", "copy_strided_16",
    "reduce_sum_u8", "reduce_product_u8", "reduce_min_u8", "reduce_max_u8", "reduce_min_i8", "reduce_max_i8",
    "reduce_sum_u16", "reduce_product_u16", "reduce_min_u16", "reduce_max_u16", "reduce_min_i16", "reduce_max_i16",
    "reduce_sum_u32", "reduce_product_u32", "reduce_min_u32", "reduce_max_u32", "reduce_min_i32", "reduce_max_i32",
    "reduce_sum_u64", "reduce_product_u64", "reduce_min_u64", "reduce_max_u64", "reduce_min_i64", "reduce_max_i64",
    "reduce_and_raw", "reduce_or_raw", "reduce_xor_raw", "reduce_and_bool", "reduce_or_bool", "reduce_xor_bool",
    "reduce_sum_f16", "reduce_product_f16", "reduce_min_f16", "reduce_max_f16", "reduce_avg_f16", "reduce_premul_sum_f16",
    "reduce_sum_bf16", "reduce_product_bf16", "reduce_min_bf16", "reduce_max_bf16", "reduce_avg_bf16", "reduce_premul_sum_bf16",
    "reduce_sum_f32", "reduce_product_f32", "reduce_min_f32", "reduce_max_f32", "reduce_avg_f32", "reduce_premul_sum_f32",
    "reduce_sum_f64", "reduce_product_f64", "reduce_min_f64", "reduce_max_f64", "reduce_avg_f64", "reduce_premul_sum_f64",
    "reduce_sum_f8e4m3fn", "reduce_product_f8e4m3fn", "reduce_min_f8e4m3fn", "reduce_max_f8e4m3fn",
    "reduce_avg_f8e4m3fn", "reduce_premul_sum_f8e4m3fn",
    "reduce_sum_f8e5m2", "reduce_product_f8e5m2", "reduce_min_f8e5m2", "reduce_max_f8e5m2",
    "reduce_avg_f8e5m2", "reduce_premul_sum_f8e5m2",
    "reduce_sum_f8e4m3fnuz", "reduce_product_f8e4m3fnuz", "reduce_min_f8e4m3fnuz", "reduce_max_f8e4m3fnuz",
    "reduce_avg_f8e4m3fnuz", "reduce_premul_sum_f8e4m3fnuz",
    "reduce_sum_f8e5m2fnuz", "reduce_product_f8e5m2fnuz", "reduce_min_f8e5m2fnuz", "reduce_max_f8e5m2fnuz",
    "reduce_avg_f8e5m2fnuz", "reduce_premul_sum_f8e5m2fnuz",
    "reduce_sum_f8e8m0fnu", "reduce_product_f8e8m0fnu", "reduce_min_f8e8m0fnu", "reduce_max_f8e8m0fnu",
    "reduce_avg_f8e8m0fnu", "reduce_premul_sum_f8e8m0fnu",
    "reduce_product_complex32", "reduce_product_complex64", "reduce_product_complex128",
];

/// Arguments with which every kernel does nothing, to launch each of them once: the first launch of a kernel may load it,
/// and that must not happen behind a wait. As long as the longest, of which a launch takes what the kernel needs.
pub(super) const NOTHING: [u64; size_of::<ReduceArguments>() / 8] = [0; size_of::<ReduceArguments>() / 8];

/// What a GPU of this compute capability loads: the cubin of its generation, or PTX with a zero at the end, which the driver
/// compiles. Older ones than [`OLDEST_COMPUTE`] refuse it.
pub(super) fn image((major, minor): (i32, i32)) -> Result<Vec<u8>> {
    // A cubin runs on its own and on later minor numbers of its major one.
    let cubin = CUBINS.iter().find(|((of, from), _)| *of == major && *from <= minor);
    let mut image = packed::unpacked(cubin.map_or(PTX, |(_, cubin)| cubin))?;
    if cubin.is_none() {
        image.push(0);
    }
    Ok(image)
}

const PTX: &[u8] = include_bytes!("../../../kernels/built/compute_80.ptx.packed");
const CUBINS: [((i32, i32), &[u8]); 3] = [
    ((8, 0), include_bytes!("../../../kernels/built/sm_80.cubin.packed")),
    ((9, 0), include_bytes!("../../../kernels/built/sm_90.cubin.packed")),
    ((10, 0), include_bytes!("../../../kernels/built/sm_100.cubin.packed")),
];

/// The kernel for a pair, and the bytes of the element that it counts.
pub(super) fn reduce_entry(op: ReduceOp, dtype: Dtype) -> Option<(&'static str, usize)> {
    static TABLE: LazyLock<Vec<Option<(&str, usize)>>> = LazyLock::new(|| {
        let pairs = ReduceOp::ALL.into_iter().flat_map(|op| Dtype::ALL.map(|dtype| (op, dtype)));
        pairs.map(|(op, dtype)| find(op, dtype)).collect()
    });
    *TABLE.get(number(op) * Dtype::ALL.len() + dtype as usize)?
}

/// Its place in `ReduceOp::ALL`.
const fn number(op: ReduceOp) -> usize {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Product => 1,
        ReduceOp::Min => 2,
        ReduceOp::Max => 3,
        ReduceOp::Avg => 4,
        ReduceOp::PremulSum(_) => 5,
        ReduceOp::Band => 6,
        ReduceOp::Bor => 7,
        ReduceOp::Bxor => 8,
    }
}

fn find(op: ReduceOp, dtype: Dtype) -> Option<(&'static str, usize)> {
    op.check(dtype).ok()?;
    let boolean = dtype == Dtype::Bool;
    let op = match op {
        ReduceOp::Sum | ReduceOp::Max if boolean => "or",
        ReduceOp::Product | ReduceOp::Min if boolean => "and",
        ReduceOp::Sum => "sum",
        ReduceOp::Product => "product",
        ReduceOp::Min => "min",
        ReduceOp::Max => "max",
        ReduceOp::Avg => "avg",
        ReduceOp::PremulSum(_) => "premul_sum",
        ReduceOp::Band => "and",
        ReduceOp::Bor => "or",
        ReduceOp::Bxor => "xor",
    };
    let wraps = matches!(op, "sum" | "product");
    let (element, size) = match dtype {
        Dtype::Bool => ("bool", 1),
        _ if matches!(op, "and" | "or" | "xor") => ("raw", 1),
        Dtype::I8 if !wraps => ("i8", 1),
        Dtype::I16 if !wraps => ("i16", 2),
        Dtype::I32 if !wraps => ("i32", 4),
        Dtype::I64 if !wraps => ("i64", 8),
        Dtype::I8 | Dtype::U8 => ("u8", 1),
        Dtype::I16 | Dtype::U16 => ("u16", 2),
        Dtype::I32 | Dtype::U32 => ("u32", 4),
        Dtype::I64 | Dtype::U64 => ("u64", 8),
        Dtype::Complex32 if op == "product" => ("complex32", 4),
        Dtype::Complex64 if op == "product" => ("complex64", 8),
        Dtype::Complex128 if op == "product" => ("complex128", 16),
        Dtype::F16 | Dtype::Complex32 => ("f16", 2),
        Dtype::Bf16 => ("bf16", 2),
        Dtype::F32 | Dtype::Complex64 => ("f32", 4),
        Dtype::F64 | Dtype::Complex128 => ("f64", 8),
        Dtype::F8E4M3Fn => ("f8e4m3fn", 1),
        Dtype::F8E5M2 => ("f8e5m2", 1),
        Dtype::F8E4M3Fnuz => ("f8e4m3fnuz", 1),
        Dtype::F8E5M2Fnuz => ("f8e5m2fnuz", 1),
        Dtype::F8E8M0Fnu => ("f8e8m0fnu", 1),
    };
    let is_it = |name: &&&str| {
        let rest = name.strip_prefix("reduce_").and_then(|rest| rest.strip_prefix(op));
        rest.and_then(|rest| rest.strip_prefix('_')) == Some(element)
    };
    ENTRIES.iter().find(is_it).map(|name| (*name, size))
}

/// Reduces `inputs` to every one of `outputs`, of `len` bytes each, which are whole elements.
pub(super) fn reduce(
    op: ReduceOp,
    dtype: Dtype,
    inputs: &[u64],
    outputs: &[u64],
    len: usize,
    processors: u32,
) -> Result<Call<ReduceArguments>> {
    let Some((entry, size)) = reduce_entry(op, dtype) else {
        return Err(Error::misuse(format!("{op} of {dtype} has no meaning")));
    };
    let factor = if let ReduceOp::PremulSum(factor) = op { factor } else { 1.0 };
    let arguments = ReduceArguments::new(inputs, outputs, len / size, size, factor)?;
    Ok(Call { entry, grid: grid(len, processors), arguments })
}

/// Makes up to [`MOST_COPIES`] copies at once. Each gets its part of the blocks, by its bytes.
pub(super) fn copy(copies: &[Copied], processors: u32) -> Result<Call<CopyArguments>> {
    let total = copies.iter().fold(0_u64, |sum, copy| sum.saturating_add(copy.bytes)).max(1);
    let (blocks, threads) = grid(usize::try_from(total).unwrap_or(usize::MAX), processors);
    let share = |copy: &Copied| {
        let part = u128::from(blocks) * u128::from(copy.bytes) / u128::from(total);
        (*copy, u32::try_from(part).unwrap_or(blocks).max(1))
    };
    let shares: Vec<_> = copies.iter().map(share).collect();
    let (arguments, blocks) = CopyArguments::new(&shares)?;
    Ok(Call { entry: COPY, grid: (blocks.max(1), threads), arguments })
}

/// Blocks and threads for spans of so many bytes: as many as the GPU runs at once where there is work for all of them, and
/// smaller blocks where there is little, so that every processor gets a part.
pub(super) fn grid(len: usize, processors: u32) -> (u32, u32) {
    let processors = processors.max(1);
    let mut threads = MOST_THREADS;
    while threads > FEWEST_THREADS && len / THREAD_BYTES < (processors * threads) as usize {
        threads /= 2;
    }
    let blocks = len.div_ceil(threads as usize * THREAD_BYTES).max(1);
    let most = processors.saturating_mul(BLOCKS_PER_PROCESSOR);
    (u32::try_from(blocks).map_or(most, |blocks| blocks.min(most)), threads)
}

/// `__launch_bounds__` of the sources.
const MOST_THREADS: u32 = 256;
const BLOCKS_PER_PROCESSOR: u32 = 3;
const FEWEST_THREADS: u32 = 64;

/// What most kernels give a thread to do in one go, of every span.
const THREAD_BYTES: usize = 32;
