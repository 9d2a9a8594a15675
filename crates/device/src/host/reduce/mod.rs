//! Reduce kernels: n inputs combined in their order, element by element, and written to m outputs in one pass.
//!
//! What the result is, bit by bit, is told at [`ReduceOp`] and by the vectors in `tests/golden/reduce.jsonl`,
//! which hold on every device. There is one loop (`kernel.rs`), generic over the element type (`element.rs`, `float8.rs`),
//! the operation (`combine.rs`) and the instruction set (`isa.rs`).

// Loops over an index, as they are written, become vector code; chains of iterators do not always.
#![allow(clippy::needless_range_loop)]

mod arithmetic;
mod combine;
mod element;
mod float8;
mod isa;
mod kernel;
mod one;
#[cfg(test)]
mod tests;

pub(super) use self::one::One;
use std::fmt;

use smallvec::SmallVec;

use self::arithmetic::Arithmetic;
use self::combine::{And, Avg, Float, Max, Min, Number, Or, Ordered, PremulSum, Product, Sum, Xor};
use self::element::{Bf16, Bool, ComplexHalf, Element, F16};
use self::float8::{F8E4M3Fn, F8E4M3Fnuz, F8E5M2, F8E5M2Fnuz, F8E8M0Fnu, Quick, Tiny};
use self::isa::{Baseline, Isa, LINE};
use self::kernel::{Job, Kernel};
use crate::device::Caching;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::host::copy::copy;
use crate::op::ReduceOp;
use crate::rows::RowPlan;

/// The pointers of one call, on the stack unless there are very many: a call that moves a few bytes must not allocate.
pub(super) type Pointers<T> = SmallVec<[T; 64]>;

/// A set of instructions that this processor has. All of them give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instructions(Set);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Instructions {
    /// All that are here, the best one first.
    pub fn available() -> impl Iterator<Item = Self> {
        let sets = [
            #[cfg(target_arch = "x86_64")]
            (Set::Avx512, has_avx512()),
            #[cfg(target_arch = "x86_64")]
            (Set::Avx2, has_avx2()),
            (Set::Baseline, true),
        ];
        sets.into_iter().filter(|(_, here)| *here).map(|(set, _)| Self(set))
    }

    /// The best that are here for a few elements: the widest registers take time to wake up.
    pub fn narrow() -> Self {
        #[cfg(target_arch = "x86_64")]
        if has_avx2() {
            return Self(Set::Avx2);
        }
        Self(Set::Baseline)
    }

    /// The best that are here.
    pub fn best() -> Self {
        Self::available().next().unwrap_or(Self(Set::Baseline))
    }

    /// Combines the inputs and writes the result to every output.
    ///
    /// One input is copied, with all that the operation does to it. Nothing is written when an error is returned.
    ///
    /// Past the caches goes what fills whole cache lines, in outputs that are no inputs and lie in their lines in the same
    /// way. It is in order with what the caller stores afterwards.
    ///
    /// # Safety
    /// Every input is valid for reads and every output for writes of `count` elements; they need not be aligned. An
    /// output is exactly one of the inputs or overlaps none, and overlaps no other output.
    pub unsafe fn reduce(
        self,
        op: ReduceOp,
        dtype: Dtype,
        inputs: &[*const u8],
        outputs: &[*mut u8],
        count: usize,
        caching: Caching,
    ) -> Result<()> {
        if inputs.is_empty() {
            op.check(dtype)?;
            return Err(Error::misuse(format!("{op} of {dtype} needs at least one input")));
        }
        let (kernel, size) = self.kernel(op, dtype)?;
        let factor = op.factor(inputs.len());
        let count = count * (dtype.size() / size);
        let mut parted = Pointers::new();
        let (streamed, outputs) = match caching {
            Caching::Keep => (&[][..], outputs),
            Caching::Bypass => part(inputs, (outputs, &[]), size, &mut parted),
            Caching::Give => part(inputs, given(outputs), size, &mut parted),
        };
        let job = Job { inputs, outputs, streamed, count, factor };
        let _as_usual = Arithmetic::as_usual();
        // SAFETY: the memory is as the caller promised, and a value of this type exists only where the
        // processor has the instructions.
        unsafe { kernel(&job) };
        Ok(())
    }

    /// The kernel for a pair, and the bytes of the element it works on.
    #[inline]
    fn kernel(self, op: ReduceOp, dtype: Dtype) -> Result<(Kernel, usize)> {
        op.check(dtype)?;
        let chosen = match self.0 {
            Set::Baseline => choose::<Baseline>(op, dtype),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => choose::<isa::Avx2>(op, dtype),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => choose::<isa::Avx512>(op, dtype),
        };
        chosen.ok_or_else(|| Error::misuse(format!("{op} of {dtype} has no kernel")))
    }

    /// Combines rows of `count` elements: each row of the output is made of the rows that `plan` lists for it. An average is
    /// divided by `of`.
    ///
    /// # Safety
    /// Every input is valid for reads of as many rows as the plan says, the output for writes of as many as the plan
    /// makes, and the output is apart from all inputs. They need not be aligned.
    pub(in crate::host) unsafe fn reduce_rows(
        self,
        (op, dtype, of): (ReduceOp, Dtype, usize),
        inputs: &[*const u8],
        plan: &RowPlan,
        output: *mut u8,
        count: usize,
    ) -> Result<()> {
        let (kernel, size) = self.kernel(op, dtype)?;
        let (bytes, factor) = (count * dtype.size(), op.factor(of));
        let count = bytes / size;
        let _as_usual = Arithmetic::as_usual();
        let (mut into, mut run) = (output, Run::default());
        let mut from = Pointers::new();
        for rows in plan.rows() {
            from.clear();
            // SAFETY: the plan names rows that the inputs have.
            from.extend(rows.iter().map(|&(input, row)| unsafe {
                inputs.get_unchecked(input as usize).add(row as usize * bytes)
            }));
            match *from {
                // One row alone stays as it is: neighbours are copied together.
                [from] if op.keeps_one() => {
                    if from != run.from.wrapping_add(run.len) {
                        // SAFETY: as below.
                        unsafe { run.copy() };
                        run = Run { into, from, len: 0 };
                    }
                    run.len += bytes;
                }
                _ => {
                    // SAFETY: the rows of a run are such as the caller vouches for, and so are those of the job; a value of
                    // this type exists only where the processor has the instructions.
                    unsafe {
                        run.copy();
                        kernel(&Job { inputs: &from, outputs: &[into], streamed: &[], count, factor });
                    }
                    run = Run::default();
                }
            }
            into = into.wrapping_add(bytes);
        }
        // SAFETY: as above.
        unsafe { run.copy() };
        Ok(())
    }

    /// Copies bytes past the caches, as far as they lie in whole cache lines; in order with what the caller stores
    /// afterwards.
    ///
    /// # Safety
    /// `len` bytes of `from` are valid for reads and of `to` for writes, and apart.
    pub(in crate::host) unsafe fn copy_past_caches(self, to: *mut u8, from: *const u8, len: usize) {
        // Or of one input.
        let kernel = match self.0 {
            Set::Baseline => Baseline::kernel::<u8, Or, 256, 16>(),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => isa::Avx2::kernel::<u8, Or, 256, 16>(),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => isa::Avx512::kernel::<u8, Or, 256, 16>(),
        };
        let job = Job { inputs: &[from], outputs: &[], streamed: &[to], count: len, factor: 1.0 };
        // SAFETY: as in `reduce`.
        unsafe { kernel(&job) };
    }
}

/// Rows that are copied together: they lie behind each other on both sides.
struct Run {
    into: *mut u8,
    from: *const u8,
    len: usize,
}

impl Default for Run {
    fn default() -> Self {
        Self { into: std::ptr::null_mut(), from: std::ptr::null(), len: 0 }
    }
}

impl Run {
    /// # Safety
    /// So many bytes are valid for reads and for writes, and apart.
    #[inline]
    unsafe fn copy(&self) {
        if self.len > 0 {
            // SAFETY: the caller's promise.
            unsafe { copy(self.into, self.from, self.len) };
        }
    }
}

impl fmt::Display for Instructions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self.0 {
            Set::Baseline => "baseline",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512",
        })
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// The outputs that others read, and the caller's own.
fn given(outputs: &[*mut u8]) -> (&[*mut u8], &[*mut u8]) {
    outputs.split_at(if outputs.len() > 1 { outputs.len() - 1 } else { outputs.len() })
}

/// The outputs to be written past the caches, and the others. What was just read is in the caches already, so an output
/// in place is not streamed: that takes several times as long as to keep it.
fn part<'a>(
    inputs: &[*const u8],
    (outputs, others): (&[*mut u8], &[*mut u8]),
    size: usize,
    parted: &'a mut Pointers<*mut u8>,
) -> (&'a [*mut u8], &'a [*mut u8]) {
    let before = |output: *mut u8| output.addr().wrapping_neg() % LINE;
    let apart = |output: *mut u8| !inputs.contains(&output.cast_const());
    let first = outputs.iter().find(|&&output| apart(output) && before(output).is_multiple_of(size));
    let streams = |output| first.is_some_and(|&first| before(first) == before(output)) && apart(output);
    let streamed = outputs.iter().filter(|&&output| streams(output)).count();
    let kept = outputs.iter().copied().filter(|&output| !streams(output));
    let all = outputs.iter().copied().filter(|&output| streams(output)).chain(kept);
    parted.extend(all.chain(others.iter().copied()));
    parted.split_at(streamed)
}

/// The kernel for a pair, and the bytes of the element it works on: a complex sum is one of twice as many real
/// numbers, and bits have no type.
fn choose<I: Isa>(op: ReduceOp, dtype: Dtype) -> Option<(Kernel, usize)> {
    let (kernel, size) = match dtype {
        Dtype::Bool => (boolean::<I>(op)?, 1),
        Dtype::I8 => integer::<I, u8, i8, 256, 16>(op)?,
        Dtype::I16 => integer::<I, u16, i16, 128, 8>(op)?,
        Dtype::I32 => integer::<I, u32, i32, 64, 4>(op)?,
        Dtype::I64 => integer::<I, u64, i64, 32, 2>(op)?,
        Dtype::U8 => integer::<I, u8, u8, 256, 16>(op)?,
        Dtype::U16 => integer::<I, u16, u16, 128, 8>(op)?,
        Dtype::U32 => integer::<I, u32, u32, 64, 4>(op)?,
        Dtype::U64 => integer::<I, u64, u64, 32, 2>(op)?,
        Dtype::F16 => (float::<I, F16, 64, 8>(op)?, 2),
        Dtype::Bf16 => (float::<I, Bf16, 64, 8>(op)?, 2),
        Dtype::F32 => (float::<I, f32, 64, 4>(op)?, 4),
        Dtype::F64 => (float::<I, f64, 32, 2>(op)?, 8),
        Dtype::F8E4M3Fn => (float8::<I, F8E4M3Fn>(op)?, 1),
        Dtype::F8E5M2 => (float8::<I, F8E5M2>(op)?, 1),
        Dtype::F8E4M3Fnuz => (float8::<I, F8E4M3Fnuz>(op)?, 1),
        Dtype::F8E5M2Fnuz => (float8::<I, F8E5M2Fnuz>(op)?, 1),
        Dtype::F8E8M0Fnu => (float::<I, F8E8M0Fnu, 64, 16>(op)?, 1),
        Dtype::Complex32 if op == ReduceOp::Product => (I::kernel::<ComplexHalf, Product, 32, 4>(), 4),
        Dtype::Complex32 => (float::<I, F16, 64, 8>(op)?, 2),
        Dtype::Complex64 if op == ReduceOp::Product => (I::kernel::<[f32; 2], Product, 32, 2>(), 8),
        Dtype::Complex64 => (float::<I, f32, 64, 4>(op)?, 4),
        Dtype::Complex128 if op == ReduceOp::Product => (I::kernel::<[f64; 2], Product, 16, 1>(), 16),
        Dtype::Complex128 => (float::<I, f64, 32, 2>(op)?, 8),
    };
    Some((kernel, size))
}

fn boolean<I: Isa>(op: ReduceOp) -> Option<Kernel> {
    Some(match op {
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => I::kernel::<Bool, Or, 256, 16>(),
        ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => I::kernel::<Bool, And, 256, 16>(),
        ReduceOp::Bxor => I::kernel::<Bool, Xor, 256, 16>(),
        ReduceOp::Avg | ReduceOp::PremulSum(_) => return None,
    })
}

/// `T` is the type, `U` the unsigned one of its size, which has the same sum and product.
fn integer<I: Isa, U, T, const L: usize, const S: usize>(op: ReduceOp) -> Option<(Kernel, usize)>
where
    U: Element<Wide: Number, Plain = U>,
    T: Element<Wide: Ordered, Plain = T>,
{
    let kernel = match op {
        ReduceOp::Sum => I::kernel::<U, Sum, L, S>(),
        ReduceOp::Product => I::kernel::<U, Product, L, S>(),
        ReduceOp::Min => I::kernel::<T, Min, L, S>(),
        ReduceOp::Max => I::kernel::<T, Max, L, S>(),
        ReduceOp::Band => return Some((I::kernel::<u8, And, 256, 16>(), 1)),
        ReduceOp::Bor => return Some((I::kernel::<u8, Or, 256, 16>(), 1)),
        ReduceOp::Bxor => return Some((I::kernel::<u8, Xor, 256, 16>(), 1)),
        ReduceOp::Avg | ReduceOp::PremulSum(_) => return None,
    };
    Some((kernel, size_of::<T>()))
}

fn float<I: Isa, E, const L: usize, const S: usize>(op: ReduceOp) -> Option<Kernel>
where
    E: Element<Wide: Float, Plain = E>,
{
    Some(match op {
        ReduceOp::Sum => I::kernel::<E, Sum, L, S>(),
        ReduceOp::Product => I::kernel::<E, Product, L, S>(),
        ReduceOp::Min => I::kernel::<E, Min, L, S>(),
        ReduceOp::Max => I::kernel::<E, Max, L, S>(),
        ReduceOp::Avg => I::kernel::<E, Avg, L, S>(),
        ReduceOp::PremulSum(_) => I::kernel::<E, PremulSum, L, S>(),
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => return None,
    })
}

/// What adds and compares can do without the true values.
fn float8<I: Isa, E: Tiny<Plain = E>>(op: ReduceOp) -> Option<Kernel> {
    match op {
        ReduceOp::Sum => Some(I::kernel::<Quick<E>, Sum, 64, 16>()),
        ReduceOp::Min => Some(I::kernel::<Quick<E>, Min, 64, 16>()),
        ReduceOp::Max => Some(I::kernel::<Quick<E>, Max, 64, 16>()),
        _ => float::<I, E, 64, 16>(op),
    }
}
