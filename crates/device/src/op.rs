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

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
