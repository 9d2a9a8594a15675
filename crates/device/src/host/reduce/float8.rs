//! Floats of eight bits.

use std::marker::PhantomData;

use super::element::{Bf16, E4M3FNUZ, E5M2FNUZ, Element, element};
use super::isa::{Isa, halves};

/// 8-bit float that has NaN (all ones) but no infinity: what is too large becomes the largest number, as in torch
/// 2.15 and in the instructions of GPUs. torch 2.11 gave NaN.
pub(super) struct F8E4M3Fn;

impl Element for F8E4M3Fn {
    type Raw = u8;
    type Wide = f32;
    type Plain = Self;

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
    type Plain = Self;

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

/// 8-bit float without infinity and without a negative zero: that code is its only NaN, and what is too large becomes it.
pub(super) struct F8E4M3Fnuz;

/// As above, with a bit more of exponent and one less of mantissa.
pub(super) struct F8E5M2Fnuz;

/// A power of two: 2^(code - 127), or NaN for the last code.
pub(super) struct F8E8M0Fnu;

element! {
    F8E4M3Fnuz: u8 => f32, |code: u8| E4M3FNUZ.widen(code.into()), |x| E4M3FNUZ.narrow(x) as u8;
    F8E5M2Fnuz: u8 => f32, |code: u8| E5M2FNUZ.widen(code.into()), |x| E5M2FNUZ.narrow(x) as u8;
    F8E8M0Fnu: u8 => f32, power_of_two, nearest_power_of_two;
}

#[inline(always)]
pub(super) fn power_of_two(code: u8) -> f32 {
    // The first is subnormal as an f32. The last would be infinity without the same bit.
    let bit = if code == 0 || code == 0xff { 1 << 22 } else { 0 };
    f32::from_bits(u32::from(code) << 23 | bit)
}

/// As torch does: up from one half of the mantissa. Of a subnormal number that bit must not stand alone, so that what is
/// larger than the smallest power becomes the next one.
#[inline(always)]
pub(super) fn nearest_power_of_two(x: f32) -> u8 {
    let magnitude = x.to_bits() & 0x7fff_ffff;
    let normal = u32::from(magnitude >= 1 << 23);
    let code = (magnitude + (1 << 22) - 1 + normal) >> 23;
    if x < 0.0 || code > 0xff { 0xff } else { code as u8 }
}

/// A type whose finite codes are the sign and the upper bits of an f32 times a power of two: the exponents begin at the
/// same place, subnormal numbers and all. Whatever is only added and compared may be taken for such an f32.
pub(super) trait Tiny: Element<Raw = u8, Wide = f32> {
    /// Bits of the mantissa.
    const MANTISSA: u32;
    /// The code of what is too large.
    const MOST: u8;
    /// The smallest rank of a code that is not finite.
    const SPECIAL: u8;

    /// Codes that are not finite have the highest ranks.
    fn rank(code: u8) -> u8;
}

macro_rules! tiny {
    ($($name:ident: $mantissa:expr, $most:expr, $special:expr, $rank:expr;)*) => {$(
        impl Tiny for $name {
            const MANTISSA: u32 = $mantissa;
            const MOST: u8 = $most;
            const SPECIAL: u8 = $special;

            #[inline(always)]
            fn rank(code: u8) -> u8 {
                $rank(code)
            }
        }
    )*};
}
tiny! {
    F8E4M3Fn: 3, 0x7e, 0x7f, |code| code & 0x7f;
    F8E5M2: 2, 0x7c, 0x7c, |code| code & 0x7f;
    F8E4M3Fnuz: 3, 0x80, 0xff, |code| code ^ 0x7f;
    F8E5M2Fnuz: 2, 0x80, 0xff, |code| code ^ 0x7f;
}

/// A type whose elements are taken for f32, as [`Tiny`] says, where all of them are finite.
pub(super) struct Quick<E>(PhantomData<E>);

impl<E: Tiny> Element for Quick<E> {
    type Raw = u8;
    type Wide = f32;
    type Plain = Aligned<E>;

    // Of eight inputs so much fits well in the nearest cache.
    const BLOCK: usize = 1024;

    #[inline(always)]
    unsafe fn all_plain(from: *const u8, count: usize) -> bool {
        const STEP: usize = 64;
        let mut highest = [0; STEP];
        for start in (0..count - count % STEP).step_by(STEP) {
            // SAFETY: so many are left; the caller vouches for `count`.
            let codes = unsafe { from.add(start).cast::<[u8; STEP]>().read_unaligned() };
            for i in 0..STEP {
                highest[i] = highest[i].max(E::rank(codes[i]));
            }
        }
        let mut rest = 0;
        for i in count - count % STEP..count {
            // SAFETY: as above.
            rest = rest.max(E::rank(unsafe { from.add(i).read() }));
        }
        highest.iter().fold(rest, |highest, &rank| highest.max(rank)) < E::SPECIAL
    }

    #[inline(always)]
    unsafe fn widen<I: Isa, const L: usize>(from: *const u8) -> [f32; L] {
        // SAFETY: the caller's promises are the same.
        unsafe { E::widen::<I, L>(from) }
    }

    #[inline(always)]
    unsafe fn narrow<I: Isa, const L: usize>(wide: &[f32; L]) -> [u8; L] {
        // SAFETY: the caller's promises are the same.
        unsafe { E::narrow::<I, L>(wide) }
    }
}

/// Elements as such f32. Neither way needs more than shifts and masks, and rounding is an addition of integers.
pub(super) struct Aligned<E>(PhantomData<E>);

impl<E: Tiny> Element for Aligned<E> {
    type Raw = u8;
    type Wide = f32;
    type Plain = Self;

    #[inline(always)]
    unsafe fn widen<I: Isa, const L: usize>(from: *const u8) -> [f32; L] {
        // SAFETY: the caller vouches for `L` elements.
        let mut words = unsafe { apart::<L>(from) };
        for x in &mut words {
            *x = (*x as i16 >> (1 + E::MANTISSA)) as u16 & (0x8000 | 0x7f00 >> (1 + E::MANTISSA));
        }
        // SAFETY: `L` elements are there; the caller vouches for the instructions.
        unsafe { Bf16::widen::<I, L>(words.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn narrow<I: Isa, const L: usize>(wide: &[f32; L]) -> [u8; L] {
        // Bits of the upper half that are dropped, too.
        let drop = 7 - E::MANTISSA;
        let (mut words, dropped) = halves(wide);
        for i in 0..L {
            let odd = words[i] >> drop & 1;
            // To nearest, ties to even; any bit of the lower half tells a tie from more than that.
            let magnitude = words[i] & 0x7fff | dropped[i].min((1 << (drop - 1)) - 1);
            let rounded = (magnitude + (1 << (drop - 1)) - 1 + odd) as i16;
            let most = i16::from(E::MOST) << drop | ((1 << drop) - 1);
            words[i] = words[i] & 0x8000 | (rounded.min(most) << (1 + E::MANTISSA)) as u16;
        }
        together(&words)
    }
}
