//! Small floats one at a time, as the kernels widen and round them.

use super::element::{E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, HALF, Small};
use super::float8::{nearest_power_of_two, power_of_two};
use crate::dtype::Dtype;

/// A float, or a part of a complex number, that is smaller than f32.
pub(in crate::host) enum One {
    Small(&'static Small),
    Bf16,
    Power,
}

impl One {
    /// Nothing of a type that is not widened to f32.
    pub(in crate::host) fn of(dtype: Dtype) -> Option<Self> {
        Some(match dtype {
            Dtype::F16 | Dtype::Complex32 => Self::Small(&HALF),
            Dtype::Bf16 => Self::Bf16,
            Dtype::F8E4M3Fn => Self::Small(&E4M3FN),
            Dtype::F8E5M2 => Self::Small(&E5M2),
            Dtype::F8E4M3Fnuz => Self::Small(&E4M3FNUZ),
            Dtype::F8E5M2Fnuz => Self::Small(&E5M2FNUZ),
            Dtype::F8E8M0Fnu => Self::Power,
            _ => return None,
        })
    }

    #[inline(always)]
    pub(in crate::host) fn widen(&self, code: u16) -> f32 {
        match self {
            Self::Small(small) => small.widen(code.into()),
            Self::Bf16 => f32::from_bits(u32::from(code) << 16),
            Self::Power => power_of_two(code as u8),
        }
    }

    #[inline(always)]
    pub(in crate::host) fn narrow(&self, x: f32) -> u16 {
        match self {
            Self::Small(small) => small.narrow(x) as u16,
            // To nearest, ties to even. What is dropped of a NaN must not leave an infinity behind.
            Self::Bf16 if x.is_nan() => (x.to_bits() >> 16) as u16 | 0x40,
            Self::Bf16 => {
                let odd = x.to_bits() >> 16 & 1;
                (x.to_bits().wrapping_add(0x7fff + odd) >> 16) as u16
            }
            Self::Power => nearest_power_of_two(x).into(),
        }
    }
}
