//! Elements in the wider type in which they are reduced, and back. For parts of reductions that travel: the kernels themselves
//! widen and round in registers.

use super::reduce::One;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::span::View;

/// The type in which elements are combined: f32 of smaller floats, complex64 of complex32, otherwise the type itself.
pub fn wide(dtype: Dtype) -> Dtype {
    match (One::of(dtype), dtype) {
        (None, _) => dtype,
        (Some(_), Dtype::Complex32) => Dtype::Complex64,
        (Some(_), _) => Dtype::F32,
    }
}

/// Elements that are converted at a time.
const BATCH: usize = 1024;

/// Writes elements in their wide type. Exact.
pub fn widen(dtype: Dtype, from: View<'_>, into: View<'_>) -> Result<()> {
    let (one, size, count) = look(dtype, from, into)?;
    let (from, into) = (from.to_span(), into.to_span());
    let (mut small, mut wide) = ([0; 2 * BATCH], [[0; 4]; BATCH]);
    for start in (0..count).step_by(BATCH) {
        let len = BATCH.min(count - start);
        let (small, wide) = (&mut small[..len * size], &mut wide[..len]);
        from.read(start * size, small)?;
        for (code, word) in small.chunks_exact(size).zip(&mut *wide) {
            let code = u16::from(code[0]) | code.get(1).map_or(0, |&upper| u16::from(upper) << 8);
            *word = one.widen(code).to_le_bytes();
        }
        into.write(start * 4, wide.as_flattened())?;
    }
    Ok(())
}

/// The other way, rounded as reductions are.
pub fn narrow(dtype: Dtype, from: View<'_>, into: View<'_>) -> Result<()> {
    let (one, size, count) = look(dtype, into, from)?;
    let (from, into) = (from.to_span(), into.to_span());
    let (mut small, mut wide) = ([0; 2 * BATCH], [[0; 4]; BATCH]);
    for start in (0..count).step_by(BATCH) {
        let len = BATCH.min(count - start);
        let (small, wide) = (&mut small[..len * size], &mut wide[..len]);
        from.read(start * 4, wide.as_flattened_mut())?;
        for (code, word) in small.chunks_exact_mut(size).zip(&*wide) {
            let bytes = one.narrow(f32::from_le_bytes(*word)).to_le_bytes();
            code.copy_from_slice(&bytes[..size]);
        }
        into.write(start * size, small)?;
    }
    Ok(())
}

/// How the elements of a type are converted, their bytes, or those of their parts, and how many there are.
fn look(dtype: Dtype, small: View<'_>, wide: View<'_>) -> Result<(One, usize, usize)> {
    let Some(one) = One::of(dtype) else {
        return Err(Error::misuse(format!("{dtype} is reduced in its own type")));
    };
    let size = if dtype == Dtype::Complex32 { 2 } else { dtype.size() };
    let count = small.len() / size;
    if !small.len().is_multiple_of(size) || wide.len() != count * 4 {
        return Err(Error::misuse(format!(
            "{} bytes of {dtype} and {} of {} are not as many elements",
            small.len(),
            wide.len(),
            self::wide(dtype)
        )));
    }
    Ok((one, size, count))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::device::{Caching, Device};
    use crate::host::{Host, private};
    use crate::op::ReduceOp;
    use crate::span::Span;

    fn span(bytes: &[u8]) -> Span {
        let span = Span::whole(private(bytes.len()).unwrap()).slice(0..bytes.len()).unwrap();
        span.write(0, bytes).unwrap();
        span
    }

    /// A sum by way of wide parts has the bits that the kernel gives, for every pair of codes of each type.
    #[test]
    fn wide_sums_round_as_the_kernels_do() {
        for dtype in Dtype::ALL.into_iter().filter(|dtype| wide(*dtype) != *dtype) {
            let size = dtype.size();
            // All codes of one byte beside some; of two bytes, every code beside one of the others.
            let codes = 1 << 16;
            let one: Vec<u8> = (0..codes)
                .flat_map(|code: u32| {
                    let code = if size == 1 { code & 0xff } else { code };
                    (code * 0x1_0001).to_le_bytes()[..size].to_vec()
                })
                .collect();
            let other: Vec<u8> = (0..codes)
                .flat_map(|code: u32| {
                    let code = if size == 1 { code >> 8 } else { code.wrapping_mul(0x9e37) & 0xffff };
                    (code * 0x1_0001).to_le_bytes()[..size].to_vec()
                })
                .collect();
            let (one, other, sum) = (span(&one), span(&other), span(&vec![0; codes as usize * size]));
            let mut queue = Host.queue().unwrap();
            let op = ReduceOp::Sum;
            queue.reduce(op, dtype, &[one.view(), other.view()], &[sum.view()], Caching::Keep).unwrap();
            let expected = sum.to_vec().unwrap();

            let room = || span(&vec![0; codes as usize * wide(dtype).size()]);
            let (wide_one, wide_other, wide_sum) = (room(), room(), room());
            widen(dtype, one.view(), wide_one.view()).unwrap();
            widen(dtype, other.view(), wide_other.view()).unwrap();
            let inputs = [wide_one.view(), wide_other.view()];
            queue.reduce(op, wide(dtype), &inputs, &[wide_sum.view()], Caching::Keep).unwrap();
            narrow(dtype, wide_sum.view(), sum.view()).unwrap();
            let found = sum.to_vec().unwrap();
            let part = if dtype == Dtype::Complex32 { 2 } else { size };
            for (at, (found, expected)) in found.chunks(part).zip(expected.chunks(part)).enumerate() {
                let value = |bytes: &[u8]| {
                    let code = u16::from(bytes[0]) | bytes.get(1).map_or(0, |&upper| u16::from(upper) << 8);
                    One::of(dtype).unwrap().widen(code)
                };
                let none = value(found).is_nan() && value(expected).is_nan();
                assert!(none || found == expected, "{dtype} {at}: {found:?}, not {expected:?}");
            }
        }
    }

    #[test]
    fn misfits_are_refused() {
        let (small, large) = (span(&[0; 4]), span(&[0; 16]));
        assert!(widen(Dtype::F32, small.view(), large.view()).is_err());
        assert!(widen(Dtype::F16, small.view(), large.view()).is_err());
        assert!(narrow(Dtype::Bf16, small.view(), large.view()).is_err());
        assert!(narrow(Dtype::F8E5M2, large.view(), small.view()).is_ok());
    }
}
