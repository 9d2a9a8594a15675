//! What inputs hold and results must be.
//!
//! Element `i` of rank `r` in iteration `k` is element `i + 3 r + 5 k` of an endless sequence. The sequence repeats
//! after a prime number of elements. So a check finds data at a wrong place, from a wrong rank or from an earlier
//! iteration. Inputs are written and results are compared in large pieces, at the speed of memory. The values are
//! 1, 2 and 4, so that sums and products are exact in every type. The programs of peers do the same.

use std::ops::Range;

use tensorwire::device::{Caching, Device};
use tensorwire::{Dtype, ReduceOp, Result, Span};

/// After how many elements the sequence repeats.
const PERIOD: usize = 1021;
/// How many repetitions are written at once.
const REPEATS: usize = 64;

/// The sequence as bytes of a type, long enough to take a large piece at any phase.
#[derive(Debug)]
pub(super) struct Tile {
    element: usize,
    bytes: Vec<u8>,
}

impl Tile {
    /// What a rank's input is cut from.
    pub(super) fn plain(dtype: Dtype) -> Self {
        let period: Vec<u8> = (0..PERIOD).flat_map(|index| encode(dtype, value(index))).collect();
        Self::repeat(dtype, &period)
    }

    /// What the reduction over all ranks is cut from: reduced in rank order by the same kernels that a collective
    /// uses, which round in the same way whatever the path.
    pub(super) fn reduced(dtype: Dtype, op: ReduceOp, ranks: usize, host: &dyn Device) -> Result<Self> {
        let plain = Self::plain(dtype);
        let piece = |phase: usize| -> Result<Span> {
            let span = Span::whole(host.alloc(PERIOD * dtype.size())?);
            span.write(0, plain.from(phase, PERIOD))?;
            Ok(span)
        };
        let inputs: Vec<Span> = (0..ranks).map(|rank| piece(phase(rank, 0))).collect::<Result<_>>()?;
        let output = piece(0)?;
        let views: Vec<_> = inputs.iter().map(Span::view).collect();
        host.queue()?.reduce(op, dtype, &views, &[output.view()], Caching::Keep)?;
        Ok(Self::repeat(dtype, &output.to_vec()?))
    }

    fn repeat(dtype: Dtype, period: &[u8]) -> Self {
        Self { element: dtype.size(), bytes: period.repeat(REPEATS + 1) }
    }

    /// Writes `span`, whose first element is that of the phase.
    pub(super) fn write(&self, span: &Span, phase: usize) -> Result<()> {
        self.pieces(span.len(), phase).try_for_each(|(place, right)| Ok(span.write(place.start, right)?))
    }

    /// How many elements of `span` are not those from the phase on. `room` is for what is read.
    pub(super) fn wrong(&self, span: &Span, phase: usize, room: &mut Vec<u8>) -> Result<u64> {
        let mut wrong = 0;
        for (place, right) in self.pieces(span.len(), phase) {
            room.resize(right.len(), 0);
            span.read(place.start, room)?;
            wrong += self.differences(room, right);
        }
        Ok(wrong)
    }

    /// `len` bytes whose first element is that of the phase, in large pieces with their places.
    pub(super) fn pieces(&self, len: usize, phase: usize) -> impl Iterator<Item = (Range<usize>, &[u8])> {
        (0..len).step_by(self.piece()).map(move |offset| {
            let piece = self.piece().min(len - offset);
            (offset..offset + piece, &self.from(phase, piece / self.element)[..piece])
        })
    }

    /// How many elements of a piece are not as they must be.
    pub(super) fn differences(&self, seen: &[u8], right: &[u8]) -> u64 {
        if seen == right {
            return 0;
        }
        let pairs = seen.chunks(self.element).zip(right.chunks(self.element));
        pairs.filter(|(seen, right)| seen != right).count() as u64
    }

    /// Bytes of a whole number of repetitions.
    fn piece(&self) -> usize {
        PERIOD * REPEATS * self.element
    }

    /// At most a piece, from a phase on.
    fn from(&self, phase: usize, count: usize) -> &[u8] {
        let start = phase % PERIOD * self.element;
        &self.bytes[start..start + count * self.element]
    }
}

/// Where in the sequence the data of a rank begins.
pub(super) fn phase(rank: usize, iteration: usize) -> usize {
    3 * rank + 5 * iteration
}

/// 1, 2 or 4, in no order that sizes or ranks could have.
fn value(index: usize) -> u8 {
    1 << (((index as u32).wrapping_mul(2_654_435_761) >> 16) % 3)
}

/// A value as an element; of bools, whether it is 1.
fn encode(dtype: Dtype, value: u8) -> Vec<u8> {
    let float = f32::from(value).to_le_bytes();
    let exponent = value.trailing_zeros() as u8;
    match dtype {
        Dtype::Bool => vec![value & 1],
        Dtype::F16 => (0x3c00 + (u16::from(exponent) << 10)).to_le_bytes().into(),
        Dtype::Bf16 => float[2..].into(),
        Dtype::F32 => float.into(),
        Dtype::F64 => f64::from(value).to_le_bytes().into(),
        Dtype::F8E4M3Fn => vec![0x38 + (exponent << 3)],
        Dtype::F8E5M2 => vec![0x3c + (exponent << 2)],
        Dtype::F8E4M3Fnuz => vec![0x40 + (exponent << 3)],
        Dtype::F8E5M2Fnuz => vec![0x40 + (exponent << 2)],
        Dtype::F8E8M0Fnu => vec![0x7f + exponent],
        Dtype::Complex32 => (0x3c00 + (u16::from(exponent) << 10)).to_le_bytes().repeat(2),
        Dtype::Complex64 => float.repeat(2),
        Dtype::Complex128 => f64::from(value).to_le_bytes().repeat(2),
        integer => {
            let mut bytes = vec![0; integer.size()];
            bytes[0] = value;
            bytes
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensorwire::device::host::Host;

    fn span(len: usize) -> Span {
        Span::whole(Host.alloc(len).unwrap())
    }

    #[test]
    fn the_sum_of_ones_twos_and_fours_is_right_in_every_type() {
        for dtype in Dtype::ALL {
            let sum = Tile::reduced(dtype, ReduceOp::Sum, 3, &Host).unwrap();
            for index in 0..PERIOD {
                let values = [0, 1, 2].map(|rank| value((index + phase(rank, 0)) % PERIOD));
                let right = match dtype {
                    Dtype::Bool => vec![u8::from(values.contains(&1))],
                    // 3 is the first sum that `encode` does not know; integers and f64 show the rest.
                    Dtype::F64 => f64::from(values.iter().sum::<u8>()).to_le_bytes().into(),
                    dtype if dtype.is_integer() => encode(dtype, values.iter().sum()),
                    _ => continue,
                };
                assert_eq!(sum.from(index, 1), right, "{dtype} {index}");
            }
        }
    }

    #[test]
    fn what_was_written_is_right_and_nothing_else() {
        for dtype in [Dtype::F32, Dtype::U8, Dtype::Complex128] {
            for count in [0, 1, 1000, PERIOD * REPEATS, PERIOD * REPEATS + 1, 200_000] {
                let (tile, span) = (Tile::plain(dtype), span(count * dtype.size()));
                tile.write(&span, phase(3, 7)).unwrap();
                let wrong = |phase| tile.wrong(&span, phase, &mut Vec::new()).unwrap();
                assert_eq!(wrong(phase(3, 7)), 0, "{dtype} {count}");
                assert!(count < 1000 || wrong(phase(4, 7)) as usize > count / 3, "{dtype} {count}");
                assert!(count < 1000 || wrong(phase(3, 8)) as usize > count / 3, "{dtype} {count}");
            }
        }
    }
}
