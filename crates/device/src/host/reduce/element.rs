//! How each element type is widened before it is combined, and rounded once afterwards.
//!
//! Everything works on arrays of `L` elements without branches, so that the compiler makes vector code of it.

use super::isa::Isa;

/// An element type: its form in memory, and the wider form in which it is combined.
///
/// Both directions work on `L` elements at once. The order of the wide ones is the type's own affair.
pub(super) trait Element: 'static {
    /// As it lies in memory; any bit pattern is valid.
    type Raw: Copy + Default + 'static;
    /// As it is combined.
    type Wide: Copy + Default + 'static;

    /// # Safety
    /// `L` elements are valid for reads, aligned or not. The processor has `I`'s instructions.
    unsafe fn widen<I: Isa, const L: usize>(from: *const Self::Raw) -> [Self::Wide; L];

    /// # Safety
    /// The processor has `I`'s instructions.
    unsafe fn narrow<I: Isa, const L: usize>(wide: &[Self::Wide; L]) -> [Self::Raw; L];
}

/// Element types that are converted one by one.
macro_rules! element {
    ($($(#[$doc:meta])* $name:ty: $raw:ty => $wide:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Element for $name {
            type Raw = $raw;
            type Wide = $wide;

            #[inline(always)]
            unsafe fn widen<I: Isa, const L: usize>(from: *const $raw) -> [$wide; L] {
                let mut wide = [<$wide>::default(); L];
                for i in 0..L {
                    // SAFETY: the caller vouches for `L` elements.
                    wide[i] = $widen(unsafe { from.add(i).read_unaligned() });
                }
                wide
            }

            #[inline(always)]
            unsafe fn narrow<I: Isa, const L: usize>(wide: &[$wide; L]) -> [$raw; L] {
                let mut raw = [<$raw>::default(); L];
                for i in 0..L {
                    raw[i] = $narrow(wide[i]);
                }
                raw
            }
        }
    )*};
}
element! {
    i8: i8 => i8, |x| x, |x| x;
    i16: i16 => i16, |x| x, |x| x;
    i32: i32 => i32, |x| x, |x| x;
    i64: i64 => i64, |x| x, |x| x;
    u8: u8 => u8, |x| x, |x| x;
    u16: u16 => u16, |x| x, |x| x;
    u32: u32 => u32, |x| x, |x| x;
    u64: u64 => u64, |x| x, |x| x;
    f32: f32 => f32, |x| x, |x| x;
    f64: f64 => f64, |x| x, |x| x;
    [f32; 2]: [f32; 2] => [f32; 2], |x| x, |x| x;
    [f64; 2]: [f64; 2] => [f64; 2], |x| x, |x| x;
    Bool: u8 => u8, |byte| u8::from(byte != 0), |x| x;
}

/// One byte that is true unless it is zero, and is stored as 0 or 1.
pub(super) struct Bool;

/// 8-bit float that has NaN (all ones) but no infinity: what is too large becomes the largest number, as in torch
/// 2.15 and in the instructions of GPUs. torch 2.11 gave NaN.
pub(super) struct F8E4M3Fn;

impl Element for F8E4M3Fn {
    type Raw = u8;
    type Wide = f32;

    #[inline(always)]
    unsafe fn widen<I: Isa, const L: usize>(from: *const u8) -> [f32; L] {
        // SAFETY: the caller vouches for `L` elements.
        let mut half = unsafe { apart::<L>(from) };
        for x in &mut half {
            let code = (*x as i16 >> 1) as u16 & 0xbf80;
            // All ones, and nothing else, carry into the bit that makes it the half's NaN.
            *x = code | (code + 0x80) & 0x4000;
        }
        // SAFETY: `L` elements are there; the caller vouches for the instructions.
        let mut wide = unsafe { I::widen_f16::<L>(half.as_ptr()) };
        for x in &mut wide {
            // The exponent's biases differ by 8.
            *x *= 256.0;
        }
        wide
    }

    #[inline(always)]
    unsafe fn narrow<I: Isa, const L: usize>(wide: &[f32; L]) -> [u8; L] {
        let mut scaled = *wide;
        for x in &mut scaled {
            *x *= 1.0 / 256.0;
        }
        // SAFETY: the caller vouches for the instructions.
        let mut half = unsafe { to_odd_f16::<I, L>(&scaled) };
        for x in &mut half {
            let magnitude = (*x & 0x7fff) as i16;
            let rounded = (magnitude + 0x3f + (magnitude >> 7 & 1)).min(0x3f7f);
            let nan = if magnitude > 0x7c00 { 0x3f80 } else { 0 };
            *x = *x & 0x8000 | ((rounded | nan) << 1) as u16;
        }
        together(&half)
    }
}

/// 8-bit float: the upper half of an IEEE half.
pub(super) struct F8E5M2;

impl Element for F8E5M2 {
    type Raw = u8;
    type Wide = f32;

    #[inline(always)]
    unsafe fn widen<I: Isa, const L: usize>(from: *const u8) -> [f32; L] {
        // SAFETY: the caller vouches for `L` elements.
        let half = unsafe { apart::<L>(from) };
        // SAFETY: `L` elements are there; the caller vouches for the instructions.
        unsafe { I::widen_f16::<L>(half.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn narrow<I: Isa, const L: usize>(wide: &[f32; L]) -> [u8; L] {
        // SAFETY: the caller vouches for the instructions.
        let mut half = unsafe { to_odd_f16::<I, L>(wide) };
        for x in &mut half {
            // A carry runs into the exponent, and from the largest number into infinity. No NaN has one: it comes
            // from an input or is the processor's own, so what is dropped is zero.
            *x += 0x7f + (*x >> 8 & 1);
        }
        together(&half)
    }
}

/// Bytes as the upper halves of words. As of bfloat16, two neighbours are taken at a time, and the first half of the
/// words are the lower ones of them.
///
/// # Safety
/// `L` bytes are valid for reads.
#[inline(always)]
unsafe fn apart<const L: usize>(from: *const u8) -> [u16; L] {
    let mut words = [0; L];
    for i in 0..L / 2 {
        // SAFETY: the caller vouches for `L` bytes, that is `L / 2` pairs.
        let pair = u16::from_le(unsafe { from.cast::<u16>().add(i).read_unaligned() });
        words[i] = pair << 8;
        words[L / 2 + i] = pair & 0xff00;
    }
    words
}

/// The other way; the lower halves of the words are dropped.
#[inline(always)]
fn together<const L: usize>(words: &[u16; L]) -> [u8; L] {
    let mut raw = [0; L];
    for i in 0..L / 2 {
        let pair = words[i] >> 8 | words[L / 2 + i] & 0xff00;
        // SAFETY: `L / 2` pairs are as long as `L` bytes.
        unsafe { raw.as_mut_ptr().cast::<u16>().add(i).write_unaligned(pair.to_le()) };
    }
    raw
}

/// Halves that can be rounded again to a float of 8 bits, as if in one step: of their mantissas six bits are left, and
/// the last one is set where any bit after it was.
///
/// What is above half of the smallest 8-bit number keeps all six of them, as halves reach far enough down.
///
/// # Safety
/// The processor has `I`'s instructions.
#[inline(always)]
unsafe fn to_odd_f16<I: Isa, const L: usize>(wide: &[f32; L]) -> [u16; L] {
    const DROPPED: u32 = (1 << 17) - 1;
    let mut odd = [0.0; L];
    for i in 0..L {
        let bits = wide[i].to_bits();
        odd[i] = f32::from_bits((bits | ((bits & DROPPED) + DROPPED)) & !DROPPED);
    }
    // SAFETY: the caller vouches for the instructions.
    unsafe { I::narrow_f16(&odd) }
}

/// IEEE half. Most processors convert it themselves.
pub(super) struct F16;

impl Element for F16 {
    type Raw = u16;
    type Wide = f32;

    #[inline(always)]
    unsafe fn widen<I: Isa, const L: usize>(from: *const u16) -> [f32; L] {
        // SAFETY: the caller's promises are the same.
        unsafe { I::widen_f16(from) }
    }

    #[inline(always)]
    unsafe fn narrow<I: Isa, const L: usize>(wide: &[f32; L]) -> [u16; L] {
        // SAFETY: the caller's promises are the same.
        unsafe { I::narrow_f16(wide) }
    }
}

/// The upper half of an f32.
pub(super) struct Bf16;

/// Two neighbours are taken at a time, as one word: the lower one is widened by a shift and the upper one by a
/// mask, which is cheaper than to spread them. So the first half of the wide ones are the lower neighbours.
impl Element for Bf16 {
    type Raw = u16;
    type Wide = f32;

    #[inline(always)]
    unsafe fn widen<I: Isa, const L: usize>(from: *const u16) -> [f32; L] {
        let mut wide = [0.0; L];
        for i in 0..L / 2 {
            // SAFETY: the caller vouches for `L` elements, that is `L / 2` words.
            let word = u32::from_le(unsafe { from.cast::<u32>().add(i).read_unaligned() });
            wide[i] = f32::from_bits(word << 16);
            wide[L / 2 + i] = f32::from_bits(word & 0xffff_0000);
        }
        wide
    }

    #[inline(always)]
    unsafe fn narrow<I: Isa, const L: usize>(wide: &[f32; L]) -> [u16; L] {
        // SAFETY: the caller's promises are the same.
        unsafe { I::narrow_bf16(wide) }
    }
}

/// A float smaller than f32: sign, exponent, mantissa, with subnormals.
pub(super) struct Small {
    /// Bits of the mantissa.
    mantissa: u32,
    /// All bits but the sign's.
    bits: u32,
    /// The exponent's bias.
    bias: u32,
    /// The first code that is not finite.
    special: u32,
    /// What is too large becomes this: infinity, or the largest number where there is none.
    most: u32,
    /// What makes a NaN of it.
    nan: u32,
}

pub(super) const HALF: Small =
    Small { mantissa: 10, bits: 15, bias: 15, special: 0x7c00, most: 0x7c00, nan: 0x200 };
#[cfg(test)]
pub(super) const E4M3FN: Small = Small { mantissa: 3, bits: 7, bias: 7, special: 0x7f, most: 0x7e, nan: 1 };
#[cfg(test)]
pub(super) const E5M2: Small = Small { mantissa: 2, bits: 7, bias: 15, special: 0x7c, most: 0x7c, nan: 3 };

impl Small {
    /// Rounds to nearest, ties to even.
    #[inline(always)]
    pub(super) fn narrow(&self, x: f32) -> u32 {
        let drop = 23 - self.mantissa;
        let rebias = (127 - self.bias) << 23;
        let sign = x.to_bits() >> 31 << self.bits;
        let nan = if x.is_nan() { self.nan } else { 0 };
        let magnitude = (x.to_bits() & 0x7fff_ffff).min((self.most << drop) + rebias);
        // Normal: half a unit less one is added, and one more where the last bit kept is odd. A carry runs
        // into the exponent, and from the largest number into infinity, as it must.
        let odd = magnitude >> drop & 1;
        let normal =
            magnitude.wrapping_add((1 << (drop - 1)) - 1).wrapping_add(odd).wrapping_sub(rebias) >> drop;
        // Subnormal: the unit of `shift` is the smallest subnormal, so the addition itself rounds.
        let shift = f32::from_bits(rebias + ((1 + drop) << 23));
        let subnormal = (f32::from_bits(magnitude) + shift).to_bits().wrapping_sub(shift.to_bits());
        (if magnitude < rebias + (1 << 23) { subnormal } else { normal }) | nan | sign
    }

    /// The other way; exact.
    #[inline(always)]
    pub(super) fn widen(&self, code: u32) -> f32 {
        let magnitude = code & ((1 << self.bits) - 1);
        let sign = code >> self.bits << 31;
        // The exponents differ by the two biases. A multiplication corrects that for normal and subnormal
        // numbers alike.
        let scale = f32::from_bits((127 - self.bias + 127) << 23);
        let scaled = f32::from_bits(magnitude << (23 - self.mantissa)) * scale;
        // Infinity keeps its zero mantissa and NaN its other one.
        let special = if magnitude >= self.special { 0x7f80_0000 } else { 0 };
        f32::from_bits(scaled.to_bits() | special | sign)
    }
}
