//! Element types.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// The type of one element of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Dtype {
    /// One byte, 0 or 1.
    Bool = 0,
    /// Signed integers.
    I8 = 1,
    /// 16 bits.
    I16 = 2,
    /// 32 bits.
    I32 = 3,
    /// 64 bits.
    I64 = 4,
    /// Unsigned integers.
    U8 = 5,
    /// 16 bits.
    U16 = 6,
    /// 32 bits.
    U32 = 7,
    /// 64 bits.
    U64 = 8,
    /// IEEE half.
    F16 = 9,
    /// The upper half of an f32.
    Bf16 = 10,
    /// IEEE single.
    F32 = 11,
    /// IEEE double.
    F64 = 12,
    /// 8-bit float: 4 exponent bits, 3 of mantissa, no infinity.
    F8E4M3Fn = 13,
    /// 8-bit float: 5 exponent bits, 2 of mantissa.
    F8E5M2 = 14,
    /// Two f32: real and imaginary part.
    Complex64 = 15,
    /// Two f64.
    Complex128 = 16,
    /// 8-bit float: 4 exponent bits, 3 of mantissa, no infinity, no negative zero.
    F8E4M3Fnuz = 17,
    /// 8-bit float: 5 exponent bits, 2 of mantissa, no infinity, no negative zero.
    F8E5M2Fnuz = 18,
    /// A power of two: 8 exponent bits and nothing else, so no sign, no zero and no infinity.
    F8E8M0Fnu = 19,
    /// Two f16.
    Complex32 = 20,
}

impl Dtype {
    /// Every type, in the order of their numbers.
    pub const ALL: [Self; 21] = [
        Self::Bool,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::U8,
        Self::U16,
        Self::U32,
        Self::U64,
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
        Self::F8E4M3Fn,
        Self::F8E5M2,
        Self::Complex64,
        Self::Complex128,
        Self::F8E4M3Fnuz,
        Self::F8E5M2Fnuz,
        Self::F8E8M0Fnu,
        Self::Complex32,
    ];

    /// Bytes of one element.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            Self::Bool | Self::I8 | Self::U8 => 1,
            Self::F8E4M3Fn | Self::F8E5M2 | Self::F8E4M3Fnuz | Self::F8E5M2Fnuz | Self::F8E8M0Fnu => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 | Self::Complex32 => 4,
            Self::I64 | Self::U64 | Self::F64 | Self::Complex64 => 8,
            Self::Complex128 => 16,
        }
    }

    /// Its name, as torch spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::U8 => "uint8",
            Self::U16 => "uint16",
            Self::U32 => "uint32",
            Self::U64 => "uint64",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::F8E4M3Fn => "float8_e4m3fn",
            Self::F8E5M2 => "float8_e5m2",
            Self::Complex64 => "complex64",
            Self::Complex128 => "complex128",
            Self::F8E4M3Fnuz => "float8_e4m3fnuz",
            Self::F8E5M2Fnuz => "float8_e5m2fnuz",
            Self::F8E8M0Fnu => "float8_e8m0fnu",
            Self::Complex32 => "complex32",
        }
    }

    /// Whether it is a real floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32 | Self::F64) || self.is_float8()
    }

    const fn is_float8(self) -> bool {
        matches!(self, Self::F8E4M3Fn | Self::F8E5M2 | Self::F8E4M3Fnuz | Self::F8E5M2Fnuz | Self::F8E8M0Fnu)
    }

    /// Whether it is complex.
    pub const fn is_complex(self) -> bool {
        matches!(self, Self::Complex32 | Self::Complex64 | Self::Complex128)
    }

    /// Whether it is an integer (bool is not).
    pub const fn is_integer(self) -> bool {
        !matches!(self, Self::Bool) && !self.is_float() && !self.is_complex()
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Dtype {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            Error::misuse(format!("no element type is called {name:?}; the types are {known}"))
        })
    }
}

impl TryFrom<u8> for Dtype {
    type Error = Error;

    fn try_from(number: u8) -> Result<Self, Error> {
        Self::ALL
            .get(usize::from(number))
            .copied()
            .ok_or_else(|| Error::refused(format!("element type {number} is unknown")))
    }
}
