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
    /// The same elements, converted in a cheaper way that is right as long as all of them are plain; the type itself where
    /// there is no such way.
    type Plain: Element<Raw = Self::Raw>;

    /// How many elements are looked at before the form is chosen for all of them; 0 where there is only one.
    const BLOCK: usize = 0;

    /// Whether the cheaper form is right for all of these elements.
    ///
    /// # Safety
    /// `count` elements are valid for reads, aligned or not.
    #[inline(always)]
    unsafe fn all_plain(_from: *const Self::Raw, _count: usize) -> bool {
        false
    }

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
            type Plain = Self;

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
    ComplexHalf: [u16; 2] => [f32; 2],
        |parts: [u16; 2]| parts.map(|part| HALF.widen(part.into())),
        |parts: [f32; 2]| parts.map(|part| HALF.narrow(part) as u16);
}
pub(super) use element;

/// One byte that is true unless it is zero, and is stored as 0 or 1.
pub(super) struct Bool;

/// Two IEEE halves: real and imaginary part.
pub(super) struct ComplexHalf;

/// IEEE half. Most processors convert it themselves.
pub(super) struct F16;

impl Element for F16 {
    type Raw = u16;
    type Wide = f32;
    type Plain = Self;

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
    type Plain = Self;

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
pub(in crate::host) struct Small {
    /// Bits of the mantissa.
    mantissa: u32,
    /// All bits but the sign's.
    bits: u32,
    /// The exponent's bias.
    bias: u32,
    /// The first code that is not finite.
    special: u32,
    /// What is too large becomes this: infinity, or where there is none the largest number or the NaN.
    most: u32,
    /// What makes a NaN of it.
    nan: u32,
    /// Its only NaN is the code where others have their negative zero.
    fnuz: bool,
}

pub(super) const HALF: Small =
    Small { mantissa: 10, bits: 15, bias: 15, special: 0x7c00, most: 0x7c00, nan: 0x200, fnuz: false };
pub(super) const E4M3FN: Small =
    Small { mantissa: 3, bits: 7, bias: 7, special: 0x7f, most: 0x7e, nan: 1, fnuz: false };
pub(super) const E5M2: Small =
    Small { mantissa: 2, bits: 7, bias: 15, special: 0x7c, most: 0x7c, nan: 3, fnuz: false };
pub(super) const E4M3FNUZ: Small =
    Small { mantissa: 3, bits: 7, bias: 8, special: 0x80, most: 0x80, nan: 0x80, fnuz: true };
pub(super) const E5M2FNUZ: Small =
    Small { mantissa: 2, bits: 7, bias: 16, special: 0x80, most: 0x80, nan: 0x80, fnuz: true };

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
        let code = (if magnitude < rebias + (1 << 23) { subnormal } else { normal }) | nan;
        // Without a negative zero, neither zero nor what is not finite has a sign.
        if self.fnuz && code & (self.special - 1) == 0 {
            code
        } else if self.fnuz && code >= self.special {
            self.special
        } else {
            code | sign
        }
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
        let special = if self.fnuz && code == self.special {
            f32::NAN.to_bits()
        } else if magnitude >= self.special {
            0x7f80_0000
        } else {
            0
        };
        f32::from_bits(scaled.to_bits() | special | sign)
    }
}
