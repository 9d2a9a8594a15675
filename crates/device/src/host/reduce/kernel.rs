//! The one loop that all kernels are made of.

use super::combine::Combine;
use super::element::Element;
use super::isa::Isa;

/// What a kernel works on.
pub(super) struct Job<'a> {
    pub(super) inputs: &'a [*const u8],
    pub(super) outputs: &'a [*mut u8],
    /// Elements of the kernel's type in each of them.
    pub(super) count: usize,
    /// Of `ReduceOp::PremulSum`.
    pub(super) factor: f64,
}

/// A kernel for one operation, element type and instruction set.
///
/// # Safety
/// See [`run`]; the processor has the instruction set.
pub(super) type Kernel = unsafe fn(&Job<'_>);

/// Elements that the rest is taken in.
const REST: usize = 16;

/// Takes `L` elements at a time through all inputs and to all outputs, and the rest in smaller steps.
///
/// # Safety
/// Every input is valid for reads and every output for writes of `count` elements, aligned or not; an output
/// is exactly an input or apart from it. The processor has `I`'s instructions.
#[inline(always)]
pub(super) unsafe fn run<I: Isa, E: Element, O: Combine<E>, const L: usize>(job: &Job<'_>) {
    if job.outputs.is_empty() {
        return;
    }
    let whole = job.count - job.count % L;
    if let (&[a, b], &[output]) = (job.inputs, job.outputs) {
        // The most usual case: with their number known the pointers stay in registers.
        let job = Job { inputs: &[a, b], outputs: &[output], ..*job };
        // SAFETY: `whole` is at most `count`; for the rest the caller vouches.
        unsafe { steps::<I, E, O, L>(&job, whole) };
    } else {
        // SAFETY: as above.
        unsafe { steps::<I, E, O, L>(job, whole) };
    }
    // Zeros fill the last step up.
    let mut padded = [E::Raw::default(); REST];
    for start in (whole..job.count).step_by(REST) {
        let bytes = (job.count - start).min(REST) * size_of::<E::Raw>();
        // SAFETY: so many bytes are left, and `padded` has as many or more.
        unsafe {
            step::<I, E, O, REST>(
                job,
                |input| {
                    input.add(start).cast::<u8>().copy_to_nonoverlapping(padded.as_mut_ptr().cast(), bytes);
                    padded.as_ptr()
                },
                |output, result| {
                    output.add(start).cast::<u8>().copy_from_nonoverlapping(result.as_ptr().cast(), bytes);
                },
            );
        }
    }
}

/// # Safety
/// As of [`run`], for `whole` elements, a multiple of `L`.
#[inline(always)]
unsafe fn steps<I: Isa, E: Element, O: Combine<E>, const L: usize>(job: &Job<'_>, whole: usize) {
    for start in (0..whole).step_by(L) {
        // SAFETY: `L` elements are left; for the rest the caller vouches.
        unsafe {
            step::<I, E, O, L>(
                job,
                |input| input.add(start),
                |output, result| output.add(start).cast::<[E::Raw; L]>().write_unaligned(*result),
            );
        }
    }
}

/// One step: the accumulator stays in registers and is never rounded in between. All inputs are read before an
/// output is written, so an output may be an input. Memory that others may write at the same time is only ever
/// copied from and to, never borrowed.
///
/// # Safety
/// `from` gives for every input a pointer to `L` elements, and `to` may be called with every output. The
/// processor has `I`'s instructions.
#[inline(always)]
unsafe fn step<I: Isa, E: Element, O: Combine<E>, const L: usize>(
    job: &Job<'_>,
    mut from: impl FnMut(*const E::Raw) -> *const E::Raw,
    to: impl Fn(*mut E::Raw, &[E::Raw; L]),
) {
    let Some((&first, others)) = job.inputs.split_first() else { return };
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
    let result = unsafe { E::narrow::<I, L>(&acc) };
    for &output in job.outputs {
        to(output.cast(), &result);
    }
}
