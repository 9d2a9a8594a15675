//! Strided copies: from the dimensions of two tensors to those that the kernel walks.

use super::arguments::{Gate, MOST_DIMS, StridedArguments, StridedDim};
use super::{Call, grid};
use crate::layout::Dim;

/// What a thread takes at once, the widest first.
const UNITS: [(usize, &str); 5] = [
    (16, "copy_strided_16"),
    (8, "copy_strided_8"),
    (4, "copy_strided_4"),
    (2, "copy_strided_2"),
    (1, "copy_strided_1"),
];

/// Copies elements of `item` bytes between tensors with these dimensions, whose first elements lie at `to` and `from`.
///
/// The order of the dimensions and the direction of each do not matter to the result. They are put in the order of the
/// destination's memory, so that neighbours are written together, and what is one run on both sides is moved in units as
/// wide as alignment allows.
pub(in crate::cuda) fn strided(
    dims: &[Dim],
    item: usize,
    mut to: u64,
    mut from: u64,
    processors: u32,
) -> Call<StridedArguments> {
    // The bytes of an element are the innermost dimension.
    let mut walked = vec![Dim { size: item, into: 1, from: 1 }];
    walked.extend(dims.iter().filter(|dim| dim.size != 1).map(|dim| {
        if dim.into >= 0 {
            return Dim { ..*dim };
        }
        let last = dim.size.saturating_sub(1) as isize;
        to = to.wrapping_add_signed(last.wrapping_mul(dim.into) as i64);
        from = from.wrapping_add_signed(last.wrapping_mul(dim.from) as i64);
        Dim { size: dim.size, into: dim.into.wrapping_neg(), from: dim.from.wrapping_neg() }
    }));
    walked[1..].sort_by_key(|dim| (dim.into, dim.from.unsigned_abs()));
    join(&mut walked);

    let fits = |unit: usize| {
        let divides = |stride: isize| stride.unsigned_abs().is_multiple_of(unit);
        let together = walked[1..].iter().all(|dim| divides(dim.into) && divides(dim.from));
        together && walked[0].size.is_multiple_of(unit) && (to | from).is_multiple_of(unit as u64)
    };
    let (unit, entry) = UNITS.into_iter().find(|(unit, _)| fits(*unit)).unwrap_or(UNITS[4]);
    let run = Dim { size: walked[0].size / unit, into: unit as isize, from: unit as isize };
    walked[0] = run;
    walked.retain(|dim| dim.size != 1);

    let mut dim = [StridedDim::default(); MOST_DIMS];
    for (place, dim) in dim.iter_mut().zip(&walked) {
        *place = StridedDim::new(dim.size as u64, dim.into as i64, dim.from as i64);
    }
    let count: usize = walked.iter().map(|dim| dim.size).product();
    let dims = walked.len().min(MOST_DIMS) as u32;
    let arguments =
        StridedArguments { gate: Gate::OPEN, to, from, count: count as u64, dims, unused: 0, dim };
    // A thread has four units on their way.
    Call { entry, grid: grid(count.saturating_mul(8), processors), arguments }
}

/// Makes one of neighbours that are one run on both sides.
fn join(dims: &mut Vec<Dim>) {
    dims.dedup_by(|outer, inner| {
        let continues = |step: isize, next: isize| step.checked_mul(inner.size as isize) == Some(next);
        let joins = continues(inner.into, outer.into) && continues(inner.from, outer.from);
        if joins {
            inner.size *= outer.size;
        }
        joins
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(dims: &[(usize, isize, isize)], item: usize, to: u64, from: u64) -> (&'static str, u64, u32) {
        let dims: Vec<_> = dims.iter().map(|&(size, into, from)| Dim { size, into, from }).collect();
        let call = strided(&dims, item, to, from, 132);
        (call.entry, call.arguments.count, call.arguments.dims)
    }

    #[test]
    fn runs_are_moved_in_the_widest_units() {
        // Rows of 64 bytes, packed.
        assert_eq!(chosen(&[(10, 64, 256), (16, 4, 4)], 4, 0, 0), ("copy_strided_16", 40, 2));
        assert_eq!(chosen(&[(10, 64, 256), (16, 4, 4)], 4, 0, 8), ("copy_strided_8", 80, 2));
        assert_eq!(chosen(&[(10, 60, 256), (15, 4, 4)], 4, 0, 0), ("copy_strided_4", 150, 2));
        // The same in any order and direction.
        assert_eq!(chosen(&[(16, 4, 4), (10, 64, 256)], 4, 0, 0), ("copy_strided_16", 40, 2));
        assert_eq!(chosen(&[(10, -64, -64), (16, -4, -4)], 4, 4096, 4096).2, 1);
        // One side has gaps between elements.
        assert_eq!(chosen(&[(16, 4, 8)], 4, 0, 0), ("copy_strided_4", 16, 1));
        // Elements that are not aligned.
        assert_eq!(chosen(&[(16, 8, 16)], 8, 2, 4), ("copy_strided_2", 64, 2));
        assert_eq!(chosen(&[(16, 8, 16)], 8, 1, 4), ("copy_strided_1", 128, 2));
        // One element, and a broadcast.
        assert_eq!(chosen(&[], 16, 0, 0), ("copy_strided_16", 1, 0));
        assert_eq!(chosen(&[(5, 16, 0)], 16, 0, 0), ("copy_strided_16", 5, 1));
    }
}
