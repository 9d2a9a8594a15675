//! The instruction sets that kernels are compiled for.

use super::combine::Combine;
use super::element::{Element, HALF};
use super::kernel::{self, Kernel};

/// Bytes of a cache line: what is written past the caches is written as whole lines.
pub(super) const LINE: usize = 64;

/// A set of instructions: what the compiler may use, and the conversions it cannot find by itself.
pub(super) trait Isa: 'static {
    fn kernel<E: Element, O: Combine<E> + Combine<E::Plain>, const L: usize, const S: usize>() -> Kernel;

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

    /// To nearest, ties to even: the first half of the wide ones become the lower of two neighbours, the others the
    /// upper ones. No NaN needs care: it comes from an input or is the processor's own, so what is dropped is zero.
    ///
    /// # Safety
    /// The processor has these instructions.
    #[inline(always)]
    unsafe fn narrow_bf16<const L: usize>(wide: &[f32; L]) -> [u16; L] {
        let (kept, dropped) = halves(wide);
        // Up from more than one half, and from one half where that makes it even: less one where it is even
        // already, the upper bit tells.
        let mut raw = [0; L];
        for i in 0..L {
            let up = dropped[i].saturating_sub(!kept[i] & 1) >> 15;
            raw[i] = kept[i].wrapping_add(up);
        }
        raw
    }

    /// Writes past the caches where the processor can; [`Isa::fence`] orders it before what comes after.
    ///
    /// # Safety
    /// `L` elements, whole cache lines, are valid for writes and begin at a line. The processor has these
    /// instructions.
    #[inline(always)]
    unsafe fn stream<R: Copy, const L: usize>(to: *mut R, from: &[R; L]) {
        #[cfg(target_arch = "x86_64")]
        for i in 0..size_of_val(from) / 16 {
            use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
            // SAFETY: sixteen bytes from there on are inside of both, and aligned in `to`; every processor of the
            // target has SSE2.
            unsafe {
                let part = _mm_loadu_si128(from.as_ptr().cast::<[u8; 16]>().add(i).cast());
                _mm_stream_si128(to.cast::<[u8; 16]>().add(i).cast(), part);
            }
        }
        // SAFETY: the caller vouches for `L` elements.
        #[cfg(not(target_arch = "x86_64"))]
        unsafe {
            to.cast::<[R; L]>().write_unaligned(*from)
        };
    }

    /// Lets no later store be seen before the streamed ones.
    #[inline(always)]
    fn fence() {
        // SAFETY: every processor of the target has SSE.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

/// The upper halves and the lower ones. The first half of the wide ones become the lower of two neighbours, the others
/// the upper ones.
#[inline(always)]
pub(super) fn halves<const L: usize>(wide: &[f32; L]) -> ([u16; L], [u16; L]) {
    let (mut kept, mut dropped) = ([0u16; L], [0u16; L]);
    for i in 0..L / 2 {
        let (lower, upper) = (wide[i].to_bits(), wide[L / 2 + i].to_bits());
        let (above, below) = (lower >> 16 | upper & 0xffff_0000, lower & 0xffff | upper << 16);
        // SAFETY: `L / 2` words are as long as `L` elements.
        unsafe {
            kept.as_mut_ptr().cast::<u32>().add(i).write_unaligned(above.to_le());
            dropped.as_mut_ptr().cast::<u32>().add(i).write_unaligned(below.to_le());
        }
    }
    (kept, dropped)
}

/// What every processor of the target has: SSE2, NEON.
pub(super) struct Baseline;

impl Isa for Baseline {
    fn kernel<E: Element, O: Combine<E> + Combine<E::Plain>, const L: usize, const S: usize>() -> Kernel {
        kernel::run::<Self, E, O, L, S>
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::*;

    use super::*;
    use crate::host::reduce::kernel::Job;

    /// AVX2 with F16C. Used only inside of kernels that `kernel` returns.
    pub(in super::super) struct Avx2;

    impl Isa for Avx2 {
        fn kernel<E: Element, O: Combine<E> + Combine<E::Plain>, const L: usize, const S: usize>() -> Kernel {
            /// # Safety
            /// See [`kernel::run`].
            #[target_feature(enable = "avx2,f16c")]
            unsafe fn run<E: Element, O: Combine<E> + Combine<E::Plain>, const L: usize, const S: usize>(
                job: &Job<'_>,
            ) {
                // SAFETY: the caller vouches for the job and for the instructions.
                unsafe { kernel::run::<Avx2, E, O, L, S>(job) }
            }
            run::<E, O, L, S>
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

        #[inline(always)]
        unsafe fn stream<R: Copy, const L: usize>(to: *mut R, from: &[R; L]) {
            for i in 0..size_of_val(from) / 32 {
                // SAFETY: thirty-two bytes from there on are inside of both, and aligned in `to`; the kernel runs only
                // where AVX2 was found.
                unsafe {
                    let part = _mm256_loadu_si256(from.as_ptr().cast::<[u8; 32]>().add(i).cast());
                    _mm256_stream_si256(to.cast::<[u8; 32]>().add(i).cast(), part);
                }
            }
        }
    }

    /// AVX-512: foundation, byte and word, double and quad word, short vectors.
    pub(in super::super) struct Avx512;

    impl Isa for Avx512 {
        fn kernel<E: Element, O: Combine<E> + Combine<E::Plain>, const L: usize, const S: usize>() -> Kernel {
            /// # Safety
            /// See [`kernel::run`].
            #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn run<E: Element, O: Combine<E> + Combine<E::Plain>, const L: usize, const S: usize>(
                job: &Job<'_>,
            ) {
                // SAFETY: the caller vouches for the job and for the instructions.
                unsafe { kernel::run::<Avx512, E, O, L, S>(job) }
            }
            run::<E, O, L, S>
        }

        #[inline(always)]
        unsafe fn widen_f16<const L: usize>(from: *const u16) -> [f32; L] {
            // The shortest step fills half a register.
            if L < 16 {
                // SAFETY: the caller's promises are the same; AVX-512 is AVX2 and more.
                return unsafe { Avx2::widen_f16(from) };
            }
            const { assert!(L < 16 || L.is_multiple_of(16)) };
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
            if L < 16 {
                // SAFETY: as above.
                return unsafe { Avx2::narrow_f16(wide) };
            }
            const { assert!(L < 16 || L.is_multiple_of(16)) };
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

        // The compiler would take both halves by permutations of two registers, of three steps each. A byte shuffle
        // under a mask is one, and so are comparing into a mask and adding under it.
        #[inline(always)]
        unsafe fn narrow_bf16<const L: usize>(wide: &[f32; L]) -> [u16; L] {
            /// The first, and the second where the third is set.
            const OR_AND: i32 = 0xf8;
            // Hidden from the compiler, or it would put the permutations together again. Not in the loop: the
            // same comes of the same, so it is taken out.
            let (mut lower_bytes, mut flip) = (0x3333_3333_3333_3333_u64, 0x0202_0202);
            // SAFETY: this is a comment.
            unsafe {
                asm!("/* {0} {1:e} */", inout(reg) lower_bytes, inout(reg) flip,
                    options(pure, nomem, nostack, preserves_flags));
            }
            let mut raw = [0; L];
            for i in (0..L / 2).step_by(16) {
                // The step of the rest fills half a register.
                let lanes = if L < 32 { (1 << (L / 2)) - 1 } else { !0 };
                // SAFETY: so many elements from `i` on are inside of both halves, and as many words in `raw`; the
                // kernel runs only where AVX-512 was found.
                unsafe {
                    let lower = _mm512_castps_si512(_mm512_maskz_loadu_ps(lanes, wide.as_ptr().add(i)));
                    let upper =
                        _mm512_castps_si512(_mm512_maskz_loadu_ps(lanes, wide.as_ptr().add(L / 2 + i)));
                    let order = _mm512_set4_epi32(0x0f0e_0d0c, 0x0b0a_0908, 0x0706_0504, 0x0302_0100);
                    let swap = _mm512_xor_si512(order, _mm512_set1_epi32(flip));
                    let kept = _mm512_mask_shuffle_epi8(upper, lower_bytes, lower, swap);
                    let dropped = _mm512_mask_shuffle_epi8(lower, !lower_bytes, upper, swap);
                    let one = _mm512_set1_epi16(1);
                    let odd = _mm512_ternarylogic_epi32::<OR_AND>(dropped, kept, one);
                    let up = _mm512_cmpgt_epu16_mask(odd, _mm512_set1_epi16(i16::MIN));
                    let rounded = _mm512_mask_adds_epu16(kept, up, kept, one);
                    _mm512_mask_storeu_epi32(raw.as_mut_ptr().add(2 * i).cast(), lanes, rounded);
                }
            }
            raw
        }

        #[inline(always)]
        unsafe fn stream<R: Copy, const L: usize>(to: *mut R, from: &[R; L]) {
            for i in 0..size_of_val(from) / 64 {
                // SAFETY: sixty-four bytes from there on are inside of both, and aligned in `to`; the kernel runs only
                // where AVX-512 was found.
                unsafe {
                    let part = _mm512_loadu_si512(from.as_ptr().cast::<[u8; 64]>().add(i).cast());
                    _mm512_stream_si512(to.cast::<[u8; 64]>().add(i).cast(), part);
                }
            }
        }
    }
}
