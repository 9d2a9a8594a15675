//! The instruction sets that kernels are compiled for.

use super::combine::Combine;
use super::element::{Element, HALF};
use super::kernel::{self, Kernel};

/// A set of instructions: what the compiler may use, and the conversions it cannot find by itself.
pub(super) trait Isa: 'static {
    fn kernel<E: Element, O: Combine<E>, const L: usize>() -> Kernel;

    /// # Safety
    /// `L` elements are valid for reads, aligned or not. The processor has these instructions.
    #[inline(always)]
    unsafe fn widen_f16<const L: usize>(from: *const u16) -> [f32; L] {
        let mut wide = [0.0; L];
        for i in 0..L {
            // SAFETY: the caller vouches for `L` elements.
            wide[i] = HALF.widen(u32::from(unsafe { from.add(i).read_unaligned() }));
        }
        wide
    }

    /// # Safety
    /// The processor has these instructions.
    #[inline(always)]
    unsafe fn narrow_f16<const L: usize>(wide: &[f32; L]) -> [u16; L] {
        let mut raw = [0; L];
        for i in 0..L {
            raw[i] = HALF.narrow(wide[i]) as u16;
        }
        raw
    }
}

/// What every processor of the target has: SSE2, NEON.
pub(super) struct Baseline;

impl Isa for Baseline {
    fn kernel<E: Element, O: Combine<E>, const L: usize>() -> Kernel {
        kernel::run::<Self, E, O, L>
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::*;
    use crate::host::reduce::kernel::Job;

    /// AVX2 with F16C. Used only inside of kernels that `kernel` returns.
    pub(in super::super) struct Avx2;

    impl Isa for Avx2 {
        fn kernel<E: Element, O: Combine<E>, const L: usize>() -> Kernel {
            /// # Safety
            /// See [`kernel::run`].
            #[target_feature(enable = "avx2,f16c")]
            unsafe fn run<E: Element, O: Combine<E>, const L: usize>(job: &Job<'_>) {
                // SAFETY: the caller vouches for the job and for the instructions.
                unsafe { kernel::run::<Avx2, E, O, L>(job) }
            }
            run::<E, O, L>
        }

        #[inline(always)]
        unsafe fn widen_f16<const L: usize>(from: *const u16) -> [f32; L] {
            const { assert!(L.is_multiple_of(8)) };
            let mut wide = [0.0; L];
            for i in (0..L).step_by(8) {
                // SAFETY: eight elements from `i` on are inside of both arrays; the kernel runs only where
                // F16C was found.
                unsafe {
                    let eight = _mm256_cvtph_ps(_mm_loadu_si128(from.add(i).cast()));
                    _mm256_storeu_ps(wide.as_mut_ptr().add(i), eight);
                }
            }
            wide
        }

        #[inline(always)]
        unsafe fn narrow_f16<const L: usize>(wide: &[f32; L]) -> [u16; L] {
            const { assert!(L.is_multiple_of(8)) };
            let mut raw = [0; L];
            for i in (0..L).step_by(8) {
                // SAFETY: as above.
                unsafe {
                    let eight =
                        _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(wide.as_ptr().add(i)));
                    _mm_storeu_si128(raw.as_mut_ptr().add(i).cast(), eight);
                }
            }
            raw
        }
    }

    /// AVX-512: foundation, byte and word, double and quad word, short vectors.
    pub(in super::super) struct Avx512;

    impl Isa for Avx512 {
        fn kernel<E: Element, O: Combine<E>, const L: usize>() -> Kernel {
            /// # Safety
            /// See [`kernel::run`].
            #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn run<E: Element, O: Combine<E>, const L: usize>(job: &Job<'_>) {
                // SAFETY: the caller vouches for the job and for the instructions.
                unsafe { kernel::run::<Avx512, E, O, L>(job) }
            }
            run::<E, O, L>
        }

        #[inline(always)]
        unsafe fn widen_f16<const L: usize>(from: *const u16) -> [f32; L] {
            const { assert!(L.is_multiple_of(16)) };
            let mut wide = [0.0; L];
            for i in (0..L).step_by(16) {
                // SAFETY: sixteen elements from `i` on are inside of both arrays; the kernel runs only where
                // AVX-512 was found.
                unsafe {
                    let sixteen = _mm512_cvtph_ps(_mm256_loadu_si256(from.add(i).cast()));
                    _mm512_storeu_ps(wide.as_mut_ptr().add(i), sixteen);
                }
            }
            wide
        }

        #[inline(always)]
        unsafe fn narrow_f16<const L: usize>(wide: &[f32; L]) -> [u16; L] {
            const { assert!(L.is_multiple_of(16)) };
            let mut raw = [0; L];
            for i in (0..L).step_by(16) {
                // SAFETY: as above.
                unsafe {
                    let sixteen =
                        _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(wide.as_ptr().add(i)));
                    _mm256_storeu_si256(raw.as_mut_ptr().add(i).cast(), sixteen);
                }
            }
            raw
        }
    }
}
