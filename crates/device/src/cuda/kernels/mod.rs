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
    Copied, CopyArguments, Gate, Gated, MOST_COPIES, MOST_GATES, MeetingArguments, ReduceArguments,
    RowsArguments, TogetherArguments,
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
pub(super) const COPY: &str = "copy";

/// Meets the kernels of other ranks and does nothing else: [`MeetingArguments`].
const MEET: &str = "meet";

/// The kernels of reductions by name, and all others. Signed integers have the sums and products of unsigned ones, complex numbers
/// most operations of real ones, and `raw` is bits of any type.
macro_rules! entries {
    ($($other:expr),*; $($name:literal)*) => {
        /// How many reductions there are.
        const REDUCTIONS: usize = [$($name),*].len();

        /// Every kernel, by name. Those that reduce come first, and then, in the same order, those that do so together with other
        /// ranks, and those that do so by rows.
        pub(super) const ENTRIES: [&str; 3 * REDUCTIONS + [$($other),*].len()] =
            [$(concat!("reduce_", $name)),*, $(concat!("together_", $name)),*, $(concat!("rows_", $name)),*,
             $($other),*];
    };
}

#[rustfmt::skip]
entries! {
    COPY, MEET, "copy_strided_1", "copy_strided_2", "copy_strided_4", "copy_strided_8", "copy_strided_16";
    "sum_u8" "product_u8" "min_u8" "max_u8" "min_i8" "max_i8" "sum_u16" "product_u16" "min_u16" "max_u16" "min_i16"
    "max_i16" "sum_u32" "product_u32" "min_u32" "max_u32" "min_i32" "max_i32" "sum_u64" "product_u64" "min_u64" "max_u64"
    "min_i64" "max_i64" "and_raw" "or_raw" "xor_raw" "and_bool" "or_bool" "xor_bool" "sum_f16" "product_f16" "min_f16"
    "max_f16" "avg_f16" "premul_sum_f16" "sum_bf16" "product_bf16" "min_bf16" "max_bf16" "avg_bf16" "premul_sum_bf16"
    "sum_f32" "product_f32" "min_f32" "max_f32" "avg_f32" "premul_sum_f32" "sum_f64" "product_f64" "min_f64" "max_f64"
    "avg_f64" "premul_sum_f64" "sum_f8e4m3fn" "product_f8e4m3fn" "min_f8e4m3fn" "max_f8e4m3fn" "avg_f8e4m3fn"
    "premul_sum_f8e4m3fn" "sum_f8e5m2" "product_f8e5m2" "min_f8e5m2" "max_f8e5m2" "avg_f8e5m2" "premul_sum_f8e5m2"
    "sum_f8e4m3fnuz" "product_f8e4m3fnuz" "min_f8e4m3fnuz" "max_f8e4m3fnuz" "avg_f8e4m3fnuz" "premul_sum_f8e4m3fnuz"
    "sum_f8e5m2fnuz" "product_f8e5m2fnuz" "min_f8e5m2fnuz" "max_f8e5m2fnuz" "avg_f8e5m2fnuz" "premul_sum_f8e5m2fnuz"
    "sum_f8e8m0fnu" "product_f8e8m0fnu" "min_f8e8m0fnu" "max_f8e8m0fnu" "avg_f8e8m0fnu" "premul_sum_f8e8m0fnu"
    "product_complex32" "product_complex64" "product_complex128"
}

/// Arguments with which every kernel does nothing, to launch each of them once: the first launch of a kernel may load it,
/// and that must not happen behind a wait. As long as the longest, of which a launch takes what the kernel needs.
pub(super) const NOTHING: [u64; size_of::<TogetherArguments>() / 8] = [0; size_of::<TogetherArguments>() / 8];

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

/// The same by kernels that meet those of other ranks.
#[derive(Debug)]
pub(super) enum Together {
    /// Each block of one kernel waits for its own at the others.
    Fused(Call<TogetherArguments>),
    /// A kernel reduces between two that only meet. It has as many blocks as the GPU takes, and none of them waits: so it needs
    /// no room beside the kernels of other ranks, and ranks that wait take none from those that compute.
    Between { meet: Call<MeetingArguments>, reduce: Call<ReduceArguments> },
}

/// What one block of a fused kernel is given to do, of every span: more than that is worth three launches.
const FUSED_BYTES: usize = 32 << 10;

/// Reduces together with other ranks, each its part. `blocks` of a kernel may wait, and no rank has more than `largest` bytes:
/// all ranks must come to the same grid.
pub(super) fn together(
    reduce: Call<ReduceArguments>,
    meeting: MeetingArguments,
    (blocks, largest): (usize, usize),
) -> Result<Together> {
    if largest > FUSED_BYTES.saturating_mul(blocks) {
        return Ok(Together::Between { meet: meet(meeting), reduce });
    }
    let entry = sibling(reduce.entry, TOGETHER)?;
    let most = u32::try_from(blocks).unwrap_or(1);
    let (wanted, threads) = grid(largest, most);
    let arguments = TogetherArguments { reduce: reduce.arguments, meeting };
    Ok(Together::Fused(Call { entry, grid: (wanted.min(most), threads), arguments }))
}

/// Meets the kernels of other ranks, by one block.
pub(super) fn meet(arguments: MeetingArguments) -> Call<MeetingArguments> {
    Call { entry: MEET, grid: (1, FEWEST_THREADS), arguments }
}

/// The kernels for one reduction, by their place among [`ENTRIES`].
const TOGETHER: usize = 1;
const ROWS: usize = 2;

/// What does the same reduction in another way.
fn sibling(reduce: &str, way: usize) -> Result<&'static str> {
    let place = ENTRIES.iter().take(REDUCTIONS).position(|entry| *entry == reduce);
    let entry = place.and_then(|place| ENTRIES.get(place + way * REDUCTIONS));
    entry.copied().ok_or_else(|| Error::bug(format!("{reduce} in way {way}")))
}

/// Where the GPU finds a plan of rows.
pub(super) struct PlacedRows {
    /// The address of [`RowPlan::ends`](crate::RowPlan::ends).
    pub(super) ends: u64,
    /// The address of the addresses of the sources.
    pub(super) sources: u64,
    /// All bits that are set in one of these.
    pub(super) lowest: u64,
}

/// Makes rows of `row` bytes, which are whole elements. An average is divided by `of`.
pub(super) fn reduce_rows(
    (op, dtype, of): (ReduceOp, Dtype, usize),
    plan: &PlacedRows,
    output: u64,
    (rows, row): (usize, usize),
    processors: u32,
) -> Result<Call<RowsArguments>> {
    let Some((entry, size)) = reduce_entry(op, dtype) else {
        return Err(Error::misuse(format!("{op} of {dtype} has no meaning")));
    };
    let factor = if let ReduceOp::PremulSum(factor) = op { factor } else { 1.0 };
    let placed = (plan.ends, plan.sources, plan.lowest);
    let arguments = RowsArguments::new(output, placed, (rows, row), size, (of, factor));
    Ok(Call { entry: sibling(entry, ROWS)?, grid: grid(rows.saturating_mul(row), processors), arguments })
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
pub(super) const BLOCKS_PER_PROCESSOR: u32 = 3;
const FEWEST_THREADS: u32 = 64;

/// What most kernels give a thread to do in one go, of every span.
const THREAD_BYTES: usize = 32;
