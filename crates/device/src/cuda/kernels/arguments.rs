//! What the kernels are called with: twins of the structs in `kernels/arguments.cuh`, which has the same numbers.

use std::mem::offset_of;

use crate::error::{Error, Result};
use crate::meeting::{self, Meeting};

/// As many spans can be inputs of one call, and as many outputs.
pub(super) const MOST_SPANS: usize = crate::gpu::MOST_REDUCED;

/// One more than a tensor has: an element that is not aligned is a dimension too.
pub(super) const MOST_DIMS: usize = 9;

/// As many copies are made by one launch.
pub(in crate::cuda) const MOST_COPIES: usize = 64;

/// As many streams have a place where one block of a launch tells the others what it has read.
pub(in crate::cuda) const MOST_GATES: u32 = 1024;

/// Bytes that are loaded and stored at once.
const PACK: u64 = 16;

/// What every kernel looks at before it writes.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(in crate::cuda) struct Gate {
    /// Addresses of words that tell the kernel to write nothing unless they are zero; or 0.
    abort: [u64; 2],
    /// The number of the launch among those with the same place, from 1 on.
    launch: u64,
    /// Where the first block tells the others; from [`MOST_GATES`] on, every block reads for itself.
    place: u32,
    unused: u32,
    /// Where each block writes when it ends, or 0: nanoseconds of the GPU's clock, and so many more.
    stamp: u64,
    offset: u64,
}

impl Gate {
    /// That nothing closes.
    pub(in crate::cuda) const OPEN: Self =
        Self { abort: [0; 2], launch: 0, place: MOST_GATES, unused: 0, stamp: 0, offset: 0 };

    /// That these words close. Each launch of a place has a number of its own, which is larger than those before; and no two
    /// of them run at the same time.
    pub(in crate::cuda) fn new(abort: [u64; 2], (place, launch): (u32, u64)) -> Self {
        Self { abort, launch, place, ..Self::OPEN }
    }

    /// Has the kernel write when it ended: to this address, by a clock that is so much ahead of the GPU's.
    pub(in crate::cuda) fn stamp(&mut self, (address, offset): (u64, u64)) {
        (self.stamp, self.offset) = (address, offset);
    }
}

/// Arguments of a kernel.
pub(in crate::cuda) trait Gated {
    /// What it looks at before it writes: nothing, unless somebody sets it.
    fn gate(&mut self) -> &mut Gate;
}

macro_rules! gated {
    ($($arguments:ty),*) => {$(
        impl Gated for $arguments {
            fn gate(&mut self) -> &mut Gate {
                &mut self.gate
            }
        }
    )*};
}

gated!(ReduceArguments, RowsArguments, CopyArguments, StridedArguments);

/// Where the blocks of several ranks' kernels wait for each other.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(in crate::cuda) struct MeetingArguments {
    /// Addresses of words that end meetings, or 0. The first one is set if it was too late.
    abort: [u64; 2],
    /// The address of the word that tells how one has failed.
    failure: u64,
    /// Nanoseconds.
    timeout: u64,
    /// Bytes from the words of the channel back to the first ones, and bytes of a row.
    back: u64,
    row: u32,
    channel: u32,
    /// None where nobody meets.
    ranks: u32,
    rank: u32,
    /// Addresses of the words that each rank has for this channel.
    words: [u64; MOST_SPANS],
}

impl MeetingArguments {
    /// With addresses of the abort words, of the word that tells how it failed, and of the words of all ranks.
    pub(in crate::cuda) fn new(
        meeting: &Meeting<'_>,
        abort: [u64; 2],
        failure: u64,
        words: &[u64],
    ) -> Result<Self> {
        meeting.check()?;
        let back = meeting::channel_start(words.len(), meeting.channel) as u64;
        let mut arguments = Self {
            abort,
            failure,
            timeout: u64::try_from(meeting.timeout.as_nanos()).unwrap_or(u64::MAX),
            back,
            row: meeting::row(words.len()) as u32,
            channel: meeting.channel as u32,
            ranks: words.len() as u32,
            rank: meeting.rank as u32,
            words: [0; MOST_SPANS],
        };
        for (place, address) in arguments.words.iter_mut().zip(words) {
            *place = address + back;
        }
        Ok(arguments)
    }

    /// The address of the word that is not zero if a meeting has failed.
    pub(in crate::cuda) fn stop(&self) -> u64 {
        self.words.get(self.rank as usize).map_or(0, |words| words - self.back)
    }
}

/// Of the kernels that reduce.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(in crate::cuda) struct ReduceArguments {
    gate: Gate,
    /// Elements in each span.
    count: u64,
    /// Elements before the first pack, and packs after them; no packs where the spans lie differently.
    head: u64,
    packs: u64,
    /// Of `ReduceOp::PremulSum`.
    factor: f64,
    inputs: u32,
    outputs: u32,
    /// Not zero where elements do not all lie at multiples of their size.
    loose: u32,
    unused: u32,
    input: [u64; MOST_SPANS],
    output: [u64; MOST_SPANS],
}

impl ReduceArguments {
    /// Spans of `count` elements of `size` bytes, at any addresses.
    pub(super) fn new(
        inputs: &[u64],
        outputs: &[u64],
        count: usize,
        size: usize,
        factor: f64,
    ) -> Result<Self> {
        if inputs.is_empty() || inputs.len() > MOST_SPANS || outputs.len() > MOST_SPANS {
            return Err(Error::misuse(format!(
                "{} inputs and {} outputs; a GPU takes 1 to {MOST_SPANS} inputs and up to {MOST_SPANS} outputs at once",
                inputs.len(),
                outputs.len()
            )));
        }
        let (count, size) = (count as u64, size as u64);
        let all = || inputs.iter().chain(outputs);
        let loose = all().any(|address| !address.is_multiple_of(size));
        let together = !loose && all().all(|address| address % PACK == inputs[0] % PACK);
        let head = if together { (inputs[0].wrapping_neg() % PACK / size).min(count) } else { 0 };
        let packs = if together { (count - head) * size / PACK } else { 0 };
        let mut arguments = Self {
            gate: Gate::OPEN,
            count,
            head,
            packs,
            factor,
            inputs: inputs.len() as u32,
            outputs: outputs.len() as u32,
            loose: loose.into(),
            unused: 0,
            input: [0; MOST_SPANS],
            output: [0; MOST_SPANS],
        };
        arguments.input[..inputs.len()].copy_from_slice(inputs);
        arguments.output[..outputs.len()].copy_from_slice(outputs);
        Ok(arguments)
    }
}

/// Of the kernels that reduce together with those of other ranks.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(in crate::cuda) struct TogetherArguments {
    pub(super) reduce: ReduceArguments,
    pub(super) meeting: MeetingArguments,
}

/// Of the kernels that make each row of an output of rows that lie anywhere.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(in crate::cuda) struct RowsArguments {
    gate: Gate,
    output: u64,
    /// Addresses of [`RowPlan::ends`](crate::RowPlan::ends), and of the addresses of the sources.
    ends: u64,
    sources: u64,
    /// Rows of the output, and the packs or elements of one.
    rows: u64,
    items: u64,
    /// Of `ReduceOp::PremulSum`.
    factor: f64,
    /// What an average is divided by.
    inputs: u32,
    /// Whether rows are whole packs, at addresses of packs.
    packed: u32,
    /// Not zero where elements do not all lie at multiples of their size.
    loose: u32,
    unused: u32,
}

impl RowsArguments {
    /// So many rows of `row` bytes, of elements of `size` bytes. `lowest` has every bit that is set in the address of a source.
    pub(super) fn new(
        output: u64,
        (ends, sources, lowest): (u64, u64, u64),
        (rows, row): (usize, usize),
        size: usize,
        (inputs, factor): (usize, f64),
    ) -> Self {
        let (row, size) = (row as u64, size as u64);
        let packed = (lowest | output | row).is_multiple_of(PACK);
        let item = if packed { PACK } else { size };
        Self {
            gate: Gate::OPEN,
            output,
            ends,
            sources,
            rows: rows as u64,
            items: row / item,
            factor,
            inputs: u32::try_from(inputs).unwrap_or(u32::MAX),
            packed: packed.into(),
            loose: (!(lowest | output).is_multiple_of(size)).into(),
            unused: 0,
        }
    }
}

/// One copy of bytes, wherever they lie.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(in crate::cuda) struct Copied {
    pub(in crate::cuda) to: u64,
    pub(in crate::cuda) from: u64,
    pub(in crate::cuda) bytes: u64,
}

/// Of the kernel that makes them.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(in crate::cuda) struct CopyArguments {
    gate: Gate,
    copies: u32,
    unused: u32,
    copy: [Copied; MOST_COPIES],
    /// The blocks of each copy end here; those of the next one begin.
    end: [u32; MOST_COPIES],
}

impl CopyArguments {
    /// At most [`MOST_COPIES`], each with so many blocks. Gives the blocks of all of them, too.
    pub(super) fn new(copies: &[(Copied, u32)]) -> Result<(Self, u32)> {
        if copies.len() > MOST_COPIES {
            return Err(Error::misuse(format!("{} copies; a GPU takes {MOST_COPIES} at once", copies.len())));
        }
        let mut arguments = Self {
            gate: Gate::OPEN,
            copies: copies.len() as u32,
            unused: 0,
            copy: [Copied::default(); MOST_COPIES],
            end: [0; MOST_COPIES],
        };
        let mut blocks = 0;
        for (i, (copy, share)) in copies.iter().enumerate() {
            blocks += share;
            (arguments.copy[i], arguments.end[i]) = (*copy, blocks);
        }
        Ok((arguments, blocks))
    }
}

/// Of the kernels that copy between strided tensors.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(in crate::cuda) struct StridedArguments {
    pub(super) gate: Gate,
    pub(super) to: u64,
    pub(super) from: u64,
    /// Elements.
    pub(super) count: u64,
    pub(super) dims: u32,
    pub(super) unused: u32,
    /// The innermost first.
    pub(super) dim: [StridedDim; MOST_DIMS],
}

/// One dimension. Strides are in bytes.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(in crate::cuda) struct StridedDim {
    size: u64,
    to: i64,
    from: i64,
    multiplier: u32,
    shift: u32,
}

impl StridedDim {
    pub(super) fn new(size: u64, to: i64, from: i64) -> Self {
        let (multiplier, shift) = division(size);
        Self { size, to, from, multiplier, shift }
    }
}

/// x / size is (high word of (x * multiplier) + x) >> shift, for x and size below 2^31.
fn division(size: u64) -> (u32, u32) {
    if size == 0 || size >= 1 << 31 {
        return (0, 0);
    }
    let shift = (size - 1).checked_ilog2().map_or(0, |log| log + 1);
    // Less than 2^32: the power of two is less than twice the size.
    let multiplier = (((1u128 << shift) - u128::from(size)) << 32) / u128::from(size) + 1;
    (multiplier as u32, shift)
}

// The numbers of `kernels/arguments.cuh`.
const _: () = {
    assert!(size_of::<Gate>() == 48);
    assert!(offset_of!(Gate, launch) == 16);
    assert!(offset_of!(Gate, place) == 24);
    assert!(offset_of!(Gate, stamp) == 32);
    assert!(size_of::<MeetingArguments>() == 1080);
    assert!(offset_of!(MeetingArguments, failure) == 16);
    assert!(offset_of!(MeetingArguments, back) == 32);
    assert!(offset_of!(MeetingArguments, row) == 40);
    assert!(offset_of!(MeetingArguments, ranks) == 48);
    assert!(offset_of!(MeetingArguments, words) == 56);
    assert!(size_of::<TogetherArguments>() == 3224);
    assert!(offset_of!(TogetherArguments, meeting) == 2144);
    assert!(size_of::<ReduceArguments>() == 2144);
    assert!(offset_of!(ReduceArguments, count) == 48);
    assert!(offset_of!(ReduceArguments, packs) == 64);
    assert!(offset_of!(ReduceArguments, factor) == 72);
    assert!(offset_of!(ReduceArguments, inputs) == 80);
    assert!(offset_of!(ReduceArguments, loose) == 88);
    assert!(offset_of!(ReduceArguments, input) == 96);
    assert!(offset_of!(ReduceArguments, output) == 1120);
    assert!(size_of::<RowsArguments>() == 112);
    assert!(offset_of!(RowsArguments, output) == 48);
    assert!(offset_of!(RowsArguments, sources) == 64);
    assert!(offset_of!(RowsArguments, items) == 80);
    assert!(offset_of!(RowsArguments, factor) == 88);
    assert!(offset_of!(RowsArguments, inputs) == 96);
    assert!(offset_of!(RowsArguments, loose) == 104);
    assert!(size_of::<Copied>() == 24);
    assert!(size_of::<CopyArguments>() == 1848);
    assert!(offset_of!(CopyArguments, copies) == 48);
    assert!(offset_of!(CopyArguments, copy) == 56);
    assert!(offset_of!(CopyArguments, end) == 1592);
    assert!(size_of::<StridedDim>() == 32);
    assert!(offset_of!(StridedDim, multiplier) == 24);
    assert!(size_of::<StridedArguments>() == 368);
    assert!(offset_of!(StridedArguments, count) == 64);
    assert!(offset_of!(StridedArguments, dims) == 72);
    assert!(offset_of!(StridedArguments, dim) == 80);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn division_is_a_multiplication() {
        let limit = (1u64 << 31) - 1;
        let sizes =
            (1..300).chain((8..31).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 1])).chain([limit]);
        for size in sizes {
            let (multiplier, shift) = division(size);
            let near = (0..3).chain((1..4).map(|i| size * i)).chain([limit / size * size, limit]);
            for x in near.flat_map(|x| [x.saturating_sub(1), x, x + 1]).filter(|x| *x <= limit) {
                let high = (x * u64::from(multiplier)) >> 32;
                assert!(high + x < 1 << 32);
                assert_eq!((high + x) >> shift, x / size, "{x} / {size}");
            }
        }
    }

    #[test]
    fn packs_are_where_all_spans_have_them() {
        let new = |inputs: &[u64], outputs: &[u64], count, size| {
            let arguments = ReduceArguments::new(inputs, outputs, count, size, 1.0).unwrap();
            (arguments.head, arguments.packs, arguments.loose)
        };
        assert_eq!(new(&[0, 32], &[64], 9, 4), (0, 2, 0));
        assert_eq!(new(&[8, 24], &[72], 9, 4), (2, 1, 0));
        assert_eq!(new(&[8, 24], &[64], 9, 4), (0, 0, 0));
        assert_eq!(new(&[2, 18], &[34], 9, 4), (0, 0, 1));
        assert_eq!(new(&[2], &[2], 5, 2), (5, 0, 0));
        assert_eq!(new(&[8, 16], &[], 3, 16), (0, 0, 1));
        let refused = ReduceArguments::new(&[0; 129], &[], 1, 4, 1.0).unwrap_err();
        assert!(refused.to_string().contains("129 inputs"), "{refused}");
        assert!(ReduceArguments::new(&[], &[0], 1, 4, 1.0).is_err());
    }
}
