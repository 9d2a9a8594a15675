//! The operations, on widened elements.

use super::element::Element;
use super::isa::Isa;
use super::kernel::Job;

/// What happens to an element on its way in, between two of them, and on the way out.
pub(super) trait Combine<E: Element>: 'static {
    /// What the operation needs to know beside the elements.
    type Factor: Copy;

    fn factor(job: &Job<'_>) -> Self::Factor;

    /// # Safety
    /// As of [`Element::widen`].
    #[inline(always)]
    unsafe fn enter<I: Isa, const L: usize>(from: *const E::Raw, _: Self::Factor) -> [E::Wide; L] {
        // SAFETY: the caller's promises are the same.
        unsafe { E::widen::<I, L>(from) }
    }

    fn combine(acc: E::Wide, x: E::Wide) -> E::Wide;

    #[inline(always)]
    fn leave(acc: E::Wide, _: Self::Factor) -> E::Wide {
        acc
    }
}

/// What a widened element can do. Integers wrap.
pub(super) trait Number: Copy + 'static {
    fn add(self, x: Self) -> Self;
    fn mul(self, x: Self) -> Self;
}

/// A number that has an order. Of equal values the first is kept; NaN wins.
pub(super) trait Ordered: Number {
    fn min(self, x: Self) -> Self;
    fn max(self, x: Self) -> Self;
}

/// A number that can be divided.
pub(super) trait Float: Ordered {
    fn div(self, x: Self) -> Self;
    fn from_f64(x: f64) -> Self;
}

macro_rules! integer {
    ($($type:ty)*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn add(self, x: Self) -> Self {
                self.wrapping_add(x)
            }

            #[inline(always)]
            fn mul(self, x: Self) -> Self {
                self.wrapping_mul(x)
            }
        }

        impl Ordered for $type {
            #[inline(always)]
            fn min(self, x: Self) -> Self {
                if x < self { x } else { self }
            }

            #[inline(always)]
            fn max(self, x: Self) -> Self {
                if x > self { x } else { self }
            }
        }
    )*};
}
integer!(i8 i16 i32 i64 u8 u16 u32 u64);

macro_rules! float {
    ($($type:ty)*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn add(self, x: Self) -> Self {
                self + x
            }

            #[inline(always)]
            fn mul(self, x: Self) -> Self {
                self * x
            }
        }

        impl Ordered for $type {
            #[inline(always)]
            fn min(self, x: Self) -> Self {
                if (x < self) | x.is_nan() { x } else { self }
            }

            #[inline(always)]
            fn max(self, x: Self) -> Self {
                if (x > self) | x.is_nan() { x } else { self }
            }
        }

        impl Float for $type {
            #[inline(always)]
            fn div(self, x: Self) -> Self {
                self / x
            }

            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                // Any NaN becomes the one without a payload; bfloat16 relies on it.
                if x.is_nan() { Self::NAN } else { x as Self }
            }
        }

        // Complex: real and imaginary part. Sums are taken by parts, as of twice as many real numbers.
        impl Number for [$type; 2] {
            #[inline(always)]
            fn add(self, x: Self) -> Self {
                [self[0] + x[0], self[1] + x[1]]
            }

            #[inline(always)]
            fn mul(self, x: Self) -> Self {
                [self[0] * x[0] - self[1] * x[1], self[0] * x[1] + self[1] * x[0]]
            }
        }
    )*};
}
float!(f32 f64);

macro_rules! plain {
    ($(#[$doc:meta] $op:ident: $bound:path = |$acc:ident, $x:ident| $result:expr;)*) => {$(
        #[$doc]
        pub(super) struct $op;

        impl<E: Element<Wide: $bound>> Combine<E> for $op {
            type Factor = ();

            #[inline(always)]
            fn factor(_: &Job<'_>) {}

            #[inline(always)]
            fn combine($acc: E::Wide, $x: E::Wide) -> E::Wide {
                $result
            }
        }
    )*};
}
plain! {
    /// a + b.
    Sum: Number = |acc, x| acc.add(x);
    /// a * b.
    Product: Number = |acc, x| acc.mul(x);
    /// The smaller.
    Min: Ordered = |acc, x| acc.min(x);
    /// The larger.
    Max: Ordered = |acc, x| acc.max(x);
    /// Bits in both.
    And: std::ops::BitAnd<Output = E::Wide> = |acc, x| acc & x;
    /// Bits in either.
    Or: std::ops::BitOr<Output = E::Wide> = |acc, x| acc | x;
    /// Bits in one of them.
    Xor: std::ops::BitXor<Output = E::Wide> = |acc, x| acc ^ x;
}

/// The sum, divided at the end by the factor: the number of inputs, unless the caller has another one.
pub(super) struct Avg;

impl<E: Element<Wide: Float>> Combine<E> for Avg {
    type Factor = E::Wide;

    #[inline(always)]
    fn factor(job: &Job<'_>) -> E::Wide {
        E::Wide::from_f64(job.factor)
    }

    #[inline(always)]
    fn combine(acc: E::Wide, x: E::Wide) -> E::Wide {
        acc.add(x)
    }

    #[inline(always)]
    fn leave(acc: E::Wide, inputs: E::Wide) -> E::Wide {
        acc.div(inputs)
    }
}

/// The sum of products that were each rounded to the element type.
pub(super) struct PremulSum;

impl<E: Element<Wide: Float>> Combine<E> for PremulSum {
    type Factor = E::Wide;

    #[inline(always)]
    fn factor(job: &Job<'_>) -> E::Wide {
        E::Wide::from_f64(job.factor)
    }

    #[inline(always)]
    unsafe fn enter<I: Isa, const L: usize>(from: *const E::Raw, factor: E::Wide) -> [E::Wide; L] {
        // SAFETY: the caller's promises are the same.
        let mut products = unsafe { E::widen::<I, L>(from) };
        for x in &mut products {
            *x = x.mul(factor);
        }
        // SAFETY: the caller vouches for the instructions.
        let rounded = unsafe { E::narrow::<I, L>(&products) };
        // SAFETY: `L` elements are there, and as above.
        unsafe { E::widen::<I, L>(rounded.as_ptr()) }
    }

    #[inline(always)]
    fn combine(acc: E::Wide, x: E::Wide) -> E::Wide {
        acc.add(x)
    }
}
