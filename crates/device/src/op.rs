//! Reduction operations and the pairs of operation and type that have a meaning.

use std::fmt;

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::span::{View, overlap};

/// How elements of several ranks become one.
///
/// Defined once for every path and device: inputs are widened (f32, f64 for f64, complex by parts), combined
/// in rank order and rounded once, to the nearest, ties to even, without contraction. Integers wrap. A small float that is
/// too large becomes infinity; where its type has none, what torch makes of it: the largest number for float8_e4m3fn, NaN
/// for the others. Which NaN a NaN is, is not promised. Subnormal numbers count, whatever the thread has set.
///
/// float8_e8m0fnu is rounded as torch does: a tie goes up, what is less than the smallest number becomes that, and what
/// lies between the smallest two becomes the larger. Less than zero is NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// a + b; of bools: or.
    Sum,
    /// a * b; of bools: and.
    Product,
    /// The smaller, the first of equal ones; NaN propagates; of bools: and.
    Min,
    /// The larger, the first of equal ones; NaN propagates; of bools: or.
    Max,
    /// The sum, divided by the number of inputs after the last addition.
    Avg,
    /// The sum of inputs each multiplied by a factor (f32, or f64, as the inputs are widened), each product
    /// rounded to the type before the sum.
    PremulSum(f64),
    /// Bitwise and.
    Band,
    /// Bitwise or.
    Bor,
    /// Bitwise exclusive or.
    Bxor,
}

impl ReduceOp {
    /// Every operation, in an order that stays; `PremulSum` has the factor 0.5.
    pub const ALL: [Self; 9] = [
        Self::Sum,
        Self::Product,
        Self::Min,
        Self::Max,
        Self::Avg,
        Self::PremulSum(0.5),
        Self::Band,
        Self::Bor,
        Self::Bxor,
    ];

    /// Its name, as torch spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "SUM",
            Self::Product => "PRODUCT",
            Self::Min => "MIN",
            Self::Max => "MAX",
            Self::Avg => "AVG",
            Self::PremulSum(_) => "PREMUL_SUM",
            Self::Band => "BAND",
            Self::Bor => "BOR",
            Self::Bxor => "BXOR",
        }
    }

    /// Refuses a pair that has no meaning, with both names. Call it before a byte moves.
    pub fn check(self, dtype: Dtype) -> Result<()> {
        let meaning = match self {
            Self::Sum | Self::Product => true,
            Self::Min | Self::Max => !dtype.is_complex(),
            Self::Avg | Self::PremulSum(_) => dtype.is_float() || dtype.is_complex(),
            Self::Band | Self::Bor | Self::Bxor => dtype.is_integer() || dtype == Dtype::Bool,
        };
        if meaning { Ok(()) } else { Err(Error::misuse(format!("{self} of {dtype} has no meaning"))) }
    }

    /// What kernels need beside the elements, with `of` inputs: a factor, or what an average is divided by.
    #[inline]
    pub(crate) fn factor(self, of: usize) -> f64 {
        match self {
            Self::PremulSum(factor) => factor,
            _ => of as f64,
        }
    }

    /// Whether one input alone is the result.
    pub(crate) fn keeps_one(self) -> bool {
        !matches!(self, Self::Avg | Self::PremulSum(_))
    }

    /// The element that changes no other one: what an input may have where it takes no part. Nothing where there is none. It
    /// is in the memory order of this machine.
    pub fn identity(self, dtype: Dtype) -> Option<Vec<u8>> {
        self.check(dtype).ok()?;
        let size = dtype.size();
        let integer = |bits: u64| Some(lowest(&bits.to_ne_bytes(), size));
        let signed = matches!(dtype, Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64);
        let top = if size >= 8 { u64::MAX } else { (1 << (8 * size)) - 1 };
        if dtype.is_integer() || dtype == Dtype::Bool {
            let (most, least) = match (dtype, signed) {
                (Dtype::Bool, _) => (1, 0),
                (_, true) => (top >> 1, (top >> 1) + 1),
                (_, false) => (top, 0),
            };
            return match self {
                Self::Sum | Self::Bor | Self::Bxor => integer(0),
                Self::Product => integer(1),
                Self::Band if dtype == Dtype::Bool => integer(1),
                Self::Band => integer(top),
                Self::Min => integer(most),
                Self::Max => integer(least),
                Self::Avg | Self::PremulSum(_) => None,
            };
        }
        // Minus zero, one, the largest, the smallest: infinite where the type has that.
        let [zero, one, most, least] = match dtype {
            Dtype::F16 | Dtype::Complex32 => [0x8000, 0x3c00, 0x7c00, 0xfc00],
            Dtype::Bf16 => [0x8000, 0x3f80, 0x7f80, 0xff80],
            Dtype::F32 | Dtype::Complex64 => [0x8000_0000, 0x3f80_0000, 0x7f80_0000, 0xff80_0000],
            Dtype::F64 | Dtype::Complex128 => [1 << 63, 0x3ff << 52, 0x7ff << 52, 0xfff << 52],
            Dtype::F8E4M3Fn => [0x80, 0x38, 0x7e, 0xfe],
            Dtype::F8E5M2 => [0x80, 0x3c, 0x7c, 0xfc],
            Dtype::F8E4M3Fnuz | Dtype::F8E5M2Fnuz => [0x00, 0x40, 0x7f, 0xff],
            Dtype::F8E8M0Fnu if matches!(self, Self::Sum | Self::Avg) => return None,
            Dtype::F8E8M0Fnu => [0, 0x7f, 0xfe, 0x00],
            _ => return None,
        };
        let parts = if dtype.is_complex() { 2 } else { 1 };
        let bits: u64 = match self {
            Self::Sum | Self::Avg => zero,
            // Times one, infinity has a part that is none.
            Self::Product if parts == 2 => return None,
            Self::Product => one,
            Self::Min => most,
            Self::Max => least,
            _ => return None,
        };
        Some(lowest(&bits.to_ne_bytes(), size / parts).repeat(parts))
    }

    /// Refuses views that cannot be reduced, whatever the queue: they must be of one length, in whole elements. Gives it.
    #[inline]
    pub(crate) fn check_views(
        self,
        dtype: Dtype,
        inputs: &[View<'_>],
        outputs: &[View<'_>],
    ) -> Result<usize> {
        self.check(dtype)?;
        let len = match inputs.first() {
            Some(first) => first.len(),
            None => return Err(Error::misuse(format!("{self} of no inputs"))),
        };
        if len % dtype.size() != 0 || inputs.iter().chain(outputs).any(|view| view.len() != len) {
            return Err(Error::misuse(format!(
                "{self} of spans that are not all {len} bytes of whole {dtype} elements"
            )));
        }
        Ok(len)
    }

    /// Refuses an output that overlaps another one, or an input that it is not exactly; `len` bytes each, of one address
    /// space. Without a branch for each pair: there may be many.
    #[inline]
    pub(crate) fn check_apart<I: Copy, O: Copy>(
        self,
        inputs: &[I],
        outputs: &[O],
        len: usize,
        of_input: impl Fn(I) -> usize,
        of_output: impl Fn(O) -> usize,
    ) -> Result<()> {
        for (index, &output) in outputs.iter().enumerate() {
            let (output, mut near) = (of_output(output), false);
            for &other in &outputs[..index] {
                near |= overlap(output, of_output(other), len);
            }
            for input in inputs.iter().map(|&input| of_input(input)) {
                near |= overlap(output, input, len) & (input != output);
            }
            if near {
                return Err(Error::misuse(format!("{self} into a span that overlaps another one")));
            }
        }
        Ok(())
    }
}

/// The lowest bytes of a word, in the memory order of this machine.
fn lowest(word: &[u8], bytes: usize) -> Vec<u8> {
    let start = if cfg!(target_endian = "big") { word.len().saturating_sub(bytes) } else { 0 };
    word.iter().skip(start).take(bytes).copied().collect()
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
