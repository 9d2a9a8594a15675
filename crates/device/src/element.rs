//! Rust's own numbers as elements of tensors.

use crate::dtype::Dtype;

/// A number of Rust that is an element of some [`Dtype`]. Any bytes are a valid value.
pub trait Element: Copy + Default + Send + Sync + sealed::Sealed + 'static {
    /// The type of such elements.
    const DTYPE: Dtype;

    /// The bytes of a slice.
    fn bytes(values: &[Self]) -> &[u8] {
        // SAFETY: the implementors below are numbers without padding; the bytes are those of the slice, for as long as
        // it is borrowed.
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
    }

    /// The bytes of a slice, to be written.
    fn bytes_mut(values: &mut [Self]) -> &mut [u8] {
        // SAFETY: as above, and any bytes are valid values of the implementors below.
        unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
    }
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($number:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $number {}
        impl Element for $number {
            const DTYPE: Dtype = Dtype::$dtype;
        }
    )*};
}

elements!(i8 => I8, i16 => I16, i32 => I32, i64 => I64, u8 => U8, u16 => U16, u32 => U32, u64 => U64, f32 => F32, f64 => F64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_there_and_back() {
        let values = [1.5f32, -2.0];
        let mut copy = [0f32; 2];
        f32::bytes_mut(&mut copy).copy_from_slice(f32::bytes(&values));
        assert_eq!((copy, f32::bytes(&values).len()), (values, 2 * f32::DTYPE.size()));
        assert!(u64::bytes(&[]).is_empty());
    }
}
