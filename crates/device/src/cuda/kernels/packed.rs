//! How built kernels are stored: their code repeats itself, and takes a sixth of the room without that.
//!
//! A sequence of: a number, as many bytes, a number, a distance. The bytes are taken as they are; then as many as the second
//! number are repeated from that distance back. Numbers have seven bits in a byte, the lowest first, and the upper bit where
//! more follow. `scripts/kernels` writes it.

use crate::error::{Error, Result};

/// More than any of them has: a wrong number must not take all memory.
const MOST: usize = 64 << 20;

pub(super) fn unpacked(mut packed: &[u8]) -> Result<Vec<u8>> {
    let mut whole = Vec::with_capacity(packed.len().saturating_mul(8).min(MOST));
    while !packed.is_empty() {
        let plain = number(&mut packed)?;
        let (bytes, rest) = packed.split_at_checked(plain).ok_or_else(broken)?;
        whole.extend_from_slice(bytes);
        packed = rest;
        let (repeated, distance) = (number(&mut packed)?, number(&mut packed)?);
        if repeated > MOST - whole.len().min(MOST)
            || distance > whole.len()
            || (distance == 0 && repeated > 0)
        {
            return Err(broken());
        }
        // What is repeated may run into what it becomes.
        let mut left = repeated;
        while left > 0 {
            let from = whole.len() - distance;
            let part = left.min(distance);
            whole.extend_from_within(from..from + part);
            left -= part;
        }
    }
    Ok(whole)
}

fn number(packed: &mut &[u8]) -> Result<usize> {
    let mut number = 0;
    for shift in (0..usize::BITS - 7).step_by(7) {
        let (&byte, rest) = packed.split_first().ok_or_else(broken)?;
        *packed = rest;
        number |= usize::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(number);
        }
    }
    Err(broken())
}

fn broken() -> Error {
    Error::bug("the kernels in this program are broken; build it anew")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_repeats_is_written_once() {
        assert_eq!(unpacked(&[]).unwrap(), b"");
        assert_eq!(unpacked(&[3, b'a', b'b', b'c', 0, 0]).unwrap(), b"abc");
        assert_eq!(unpacked(&[2, b'a', b'b', 5, 2, 1, b'c', 3, 1]).unwrap(), b"abababacccc");
        assert_eq!(unpacked(&[1, b'a', 0x80, 1, 1]).unwrap(), [b'a'; 129]);
    }

    #[test]
    fn nonsense_is_an_error() {
        let nonsense: [&[u8]; 6] =
            [&[3, 1], &[1, b'a'], &[1, b'a', 1], &[1, b'a', 1, 2], &[1, b'a', 1, 0], &[0xff; 12]];
        for packed in nonsense {
            assert!(unpacked(packed).is_err(), "{packed:?}");
        }
        // Far too much.
        assert!(unpacked(&[1, b'a', 0xff, 0xff, 0xff, 0xff, 0xff, 1, 1]).is_err());
    }
}
