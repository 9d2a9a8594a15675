//! The one loop that all kernels are made of.

use super::combine::Combine;
use super::element::Element;
use super::isa::{Isa, LINE};

/// What a kernel works on.
pub(super) struct Job<'a> {
    pub(super) inputs: &'a [*const u8],
    /// Outputs that are written as usual.
    pub(super) outputs: &'a [*mut u8],
    /// Outputs that are written past the caches. All come to the start of a cache line after the same number of
    /// elements.
    pub(super) streamed: &'a [*mut u8],
    /// Elements of the kernel's type in each of them.
    pub(super) count: usize,
    /// Of `ReduceOp::PremulSum`; what `ReduceOp::Avg` divides by.
    pub(super) factor: f64,
}

/// A kernel for one operation, element type and instruction set.
///
/// # Safety
/// See [`run`]; the processor has the instruction set.
pub(super) type Kernel = unsafe fn(&Job<'_>);

/// Elements of a step between the long and the short ones.
const MIDDLE: usize = 16;

/// Bytes of a short step, whatever the element.
const SHORT: usize = 16;

/// Takes `L` elements at a time through all inputs and to all outputs, and what is left at either end in smaller
/// steps, the smallest of `S` elements.
///
/// # Safety
/// Every input is valid for reads and every output for writes of `count` elements, aligned or not; an output
/// is exactly an input or apart from it. The processor has `I`'s instructions.
#[inline(always)]
pub(super) unsafe fn run<I: Isa, E: Element, O, const L: usize, const S: usize>(job: &Job<'_>)
where
    O: Combine<E> + Combine<E::Plain>,
{
    const { assert!(S * size_of::<E::Raw>() == SHORT && MIDDLE.is_multiple_of(S)) };
    let head = match job.streamed.first() {
        Some(output) => (output.addr().wrapping_neg() % LINE / size_of::<E::Raw>()).min(job.count),
        None if job.outputs.is_empty() => return,
        None => 0,
    };
    let tail = job.count - (job.count - head) % L;
    for (start, end) in [(0, head), (tail, job.count)] {
        // SAFETY: the part ends at `count` or before; for the rest the caller vouches.
        unsafe { part::<I, E, O, S>(job, start, end) };
    }
    if E::BLOCK == 0 {
        // SAFETY: as above.
        unsafe { long_steps::<I, E, O, L>(job, head, tail) };
    } else {
        // SAFETY: as above.
        unsafe { blocks::<I, E, O, L>(job, head, tail) };
    }
    if !job.streamed.is_empty() {
        I::fence();
    }
}

/// Chooses the form of the elements for each block of them.
///
/// # Safety
/// As of [`long_steps`].
#[inline(always)]
unsafe fn blocks<I: Isa, E: Element, O, const L: usize>(job: &Job<'_>, start: usize, end: usize)
where
    O: Combine<E> + Combine<E::Plain>,
{
    for start in (start..end).step_by(E::BLOCK) {
        let end = end.min(start + E::BLOCK);
        // SAFETY: the block lies between the two; for the rest the caller vouches.
        unsafe {
            let plain = |&input: &*const u8| E::all_plain(input.cast::<E::Raw>().add(start), end - start);
            if job.inputs.iter().all(plain) {
                long_steps::<I, E::Plain, O, L>(job, start, end);
            } else {
                long_steps::<I, E, O, L>(job, start, end);
            }
        }
    }
}

/// # Safety
/// As of [`steps`], which write streamed outputs past the caches.
#[inline(always)]
unsafe fn long_steps<I: Isa, E: Element, O: Combine<E>, const L: usize>(
    job: &Job<'_>,
    start: usize,
    end: usize,
) {
    if let (&[a, b], &[output], &[]) = (job.inputs, job.outputs, job.streamed) {
        // The most usual case: with their number known the pointers stay in registers.
        let job = Job { inputs: &[a, b], outputs: &[output], streamed: &[], ..*job };
        // SAFETY: the caller's promises are the same.
        unsafe { steps::<I, E, O, L, true>(&job, start, end) };
    } else {
        // SAFETY: as above.
        unsafe { steps::<I, E, O, L, true>(job, start, end) };
    }
}

/// The elements from `start` to `end`, in steps that need not be long.
///
/// # Safety
/// As of [`run`], for these elements.
#[inline(always)]
unsafe fn part<I: Isa, E: Element, O: Combine<E>, const S: usize>(job: &Job<'_>, start: usize, end: usize) {
    let middle = end - (end - start) % MIDDLE;
    // SAFETY: the caller's promises are the same.
    unsafe { steps::<I, E, O, MIDDLE, false>(job, start, middle) };
    let short = end - (end - middle) % S;
    if S < MIDDLE {
        // SAFETY: as above.
        unsafe { steps::<I, E, O, S, false>(job, middle, short) };
    }
    if short < end {
        let bytes = (end - short) * size_of::<E::Raw>();
        let mut padded = [E::Raw::default(); S];
        // SAFETY: so many bytes are left, fewer than a short step has, and `padded` has as many as one.
        unsafe {
            let result: [E::Raw; S] = combined::<I, E, O, S>(job, |input| {
                let bits = load(input.add(short).cast(), bytes);
                padded.as_mut_ptr().cast::<[u64; 2]>().write_unaligned(bits.map(u64::to_le));
                padded.as_ptr()
            });
            let bits = result.as_ptr().cast::<[u64; 2]>().read_unaligned().map(u64::from_le);
            for &output in job.outputs.iter().chain(job.streamed) {
                store(output.cast::<E::Raw>().add(short).cast(), bytes, bits);
            }
        }
    }
}

/// # Safety
/// As of [`run`], for the elements from `start` to `end`, a multiple of `L`. To `STREAM`, every streamed output is at
/// the start of a cache line there.
#[inline(always)]
unsafe fn steps<I: Isa, E: Element, O: Combine<E>, const L: usize, const STREAM: bool>(
    job: &Job<'_>,
    start: usize,
    end: usize,
) {
    const { assert!(!STREAM || (L * size_of::<E::Raw>()).is_multiple_of(LINE)) };
    for start in (start..end).step_by(L) {
        // SAFETY: `L` elements are left; for the rest the caller vouches.
        unsafe {
            let result: [E::Raw; L] = combined::<I, E, O, L>(job, |input| input.add(start));
            for &output in job.outputs {
                output.cast::<E::Raw>().add(start).cast::<[E::Raw; L]>().write_unaligned(result);
            }
            for &output in job.streamed {
                let output = output.cast::<E::Raw>().add(start);
                if STREAM {
                    I::stream(output, &result);
                } else {
                    output.cast::<[E::Raw; L]>().write_unaligned(result);
                }
            }
        }
    }
}

/// What a step gives: the accumulator stays in registers and is never rounded in between. All inputs are read before
/// an output is written, so an output may be an input. Memory that others may write at the same time is only ever
/// copied from and to, never borrowed.
///
/// # Safety
/// `from` gives for every input a pointer to `L` elements. The processor has `I`'s instructions.
#[inline(always)]
unsafe fn combined<I: Isa, E: Element, O: Combine<E>, const L: usize>(
    job: &Job<'_>,
    mut from: impl FnMut(*const E::Raw) -> *const E::Raw,
) -> [E::Raw; L] {
    let Some((&first, others)) = job.inputs.split_first() else { return [E::Raw::default(); L] };
    let factor = O::factor(job);
    // SAFETY: the caller vouches for `from` and for the instructions.
    let mut load = |input: *const u8| unsafe { O::enter::<I, L>(from(input.cast()), factor) };
    let mut acc = load(first);
    for &input in others {
        let x = load(input);
        for i in 0..L {
            acc[i] = O::combine(acc[i], x[i]);
        }
    }
    for x in &mut acc {
        *x = O::leave(*x, factor);
    }
    // SAFETY: the caller vouches for the instructions.
    unsafe { E::narrow::<I, L>(&acc) }
}

/// 1 to 15 bytes as the lower ones of two words. They are put together in registers: bytes that were just stored one
/// by one cannot be loaded as a vector before they have reached the cache.
///
/// # Safety
/// So many bytes are valid for reads.
#[inline(always)]
unsafe fn load(from: *const u8, bytes: usize) -> [u64; 2] {
    // SAFETY: each word begins and ends inside of the bytes; two of them cover all.
    unsafe {
        let last = from.add(bytes);
        if bytes >= 8 {
            let upper = u64::from_le(last.sub(8).cast::<u64>().read_unaligned());
            [u64::from_le(from.cast::<u64>().read_unaligned()), upper >> (8 * (15 - bytes)) >> 8]
        } else if bytes >= 4 {
            let upper = u32::from_le(last.sub(4).cast::<u32>().read_unaligned());
            let lower = u32::from_le(from.cast::<u32>().read_unaligned());
            [u64::from(lower) | u64::from(upper) << (8 * (bytes - 4)), 0]
        } else if bytes >= 2 {
            let upper = u16::from_le(last.sub(2).cast::<u16>().read_unaligned());
            let lower = u16::from_le(from.cast::<u16>().read_unaligned());
            [u64::from(lower) | u64::from(upper) << (8 * (bytes - 2)), 0]
        } else {
            [u64::from(from.read()), 0]
        }
    }
}

/// The other way.
///
/// # Safety
/// So many bytes are valid for writes.
#[inline(always)]
unsafe fn store(to: *mut u8, bytes: usize, [lower, upper]: [u64; 2]) {
    // SAFETY: as in `load`.
    unsafe {
        let last = to.add(bytes);
        if bytes >= 8 {
            to.cast::<u64>().write_unaligned(lower.to_le());
            let end = (u128::from(upper) << 64 | u128::from(lower)) >> (8 * (bytes - 8));
            last.sub(8).cast::<u64>().write_unaligned((end as u64).to_le());
        } else if bytes >= 4 {
            to.cast::<u32>().write_unaligned((lower as u32).to_le());
            last.sub(4).cast::<u32>().write_unaligned(((lower >> (8 * (bytes - 4))) as u32).to_le());
        } else if bytes >= 2 {
            to.cast::<u16>().write_unaligned((lower as u16).to_le());
            last.sub(2).cast::<u16>().write_unaligned(((lower >> (8 * (bytes - 2))) as u16).to_le());
        } else {
            to.write(lower as u8);
        }
    }
}
