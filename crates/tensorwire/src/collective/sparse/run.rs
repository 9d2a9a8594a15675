//! The exchanges of an all-reduce of sparse tensors.

use std::ops::Range;

use tensorwire_device::{Caching, DeviceId, Dtype, Element, ReduceOp, RowPlan, Span, View};

use super::super::buffer::Buffer;
use super::super::chain::{Chain, Chained};
use super::super::operation::Operation;
use super::super::plan::Counts;
use super::super::tensor::Tensor;
use super::{Sparse, SparseJob, merge, ranges, with_room_for};
use crate::error::{Error, Result};
use crate::shm::kind::{Detour, Kind};

/// Bytes of a key, and of other numbers that travel.
const WORD: usize = 8;

impl Chained for SparseJob {
    fn run(&self, chain: &mut Chain<'_>, operation: &Operation) -> Result<()> {
        let result = reduce(chain, operation, self)?;
        let _ = self.result.set(result);
        Ok(())
    }

    /// Those of the dense tensor; the ranks have as many keys as they have.
    fn elements(&self) -> u64 {
        self.tensor.elements()
    }

    fn bytes(&self) -> usize {
        self.tensor.bytes()
    }

    fn agreed(&self) -> Vec<u64> {
        let dims = self.tensor.rows.layout().shape().iter().skip(1).map(|&dim| dim as u64);
        let way = self.dense.map_or(2, u64::from);
        let sparse = self.tensor.shape.len() as u64;
        [way, sparse].into_iter().chain(self.tensor.shape.iter().copied()).chain(dims).collect()
    }

    /// " of shape [10, 4] with 1 sparse dimension"
    fn words(&self) -> String {
        let mut shape = self.tensor.shape.clone();
        let sparse = shape.len();
        shape.extend(self.tensor.rows.layout().shape().iter().skip(1).map(|&dim| dim as u64));
        let plural = if sparse == 1 { "" } else { "s" };
        let way = match self.dense {
            None => "",
            Some(true) => ", dense",
            Some(false) => ", by key",
        };
        format!(" of shape {shape:?} with {sparse} sparse dimension{plural}{way}")
    }
}

/// What a rank tells the others first: how many keys it has, and some of them.
struct Card {
    keys: u64,
    samples: Vec<i64>,
}

fn reduce(chain: &mut Chain<'_>, operation: &Operation, job: &SparseJob) -> Result<Sparse> {
    let (tensor, world) = (&job.tensor, chain.executor.lines.world);
    let size = tensor.size().ok_or_else(|| {
        Error::misuse(format!("a sparse tensor of shape {:?} has more keys than 2^63", tensor.shape))
    })?;
    let keys = numbers(&tensor.keys.span().slice(0..tensor.keys.byte_len())?)?;
    let range = 0..i64::try_from(size).unwrap_or(i64::MAX);
    merge::check(&keys, &range).map_err(|bad| {
        Error::misuse(format!("a sparse tensor of shape {:?}: {}", tensor.shape, bad.text(&range)))
    })?;

    let card: Vec<u64> = std::iter::once(keys.len() as u64)
        .chain(ranges::sample(&keys, ranges::samples(world)).map(|key| key as u64))
        .collect();
    let cards: Vec<Card> = chain
        .gather_numbers(operation.clone(), &card)?
        .chunks_exact(card.len())
        .map(|words| Card { keys: words[0], samples: words[1..].iter().map(|&word| word as i64).collect() })
        .collect();
    if let Some(place) = cards.iter().position(|card| card.keys > size) {
        return Err(chain.misbehaved(
            Kind::Keys,
            place,
            &format!("{} keys of {size} possible ones", cards[place].keys),
        ));
    }

    let all: u64 = cards.iter().fold(0, |all, card| all.saturating_add(card.keys));
    let cheaper = || ranges::dense_is_cheaper(all, world, size, tensor.row());
    let identity = operation.op.identity(operation.dtype);
    match (job.dense, identity) {
        (Some(true), None) => Err(Error::Unsupported {
            what: format!("a dense {} of sparse {}", operation.op, operation.dtype),
            need: "an element that changes no other one".into(),
            have: "none".into(),
        }),
        (Some(true), Some(identity)) => by_dense(chain, operation, tensor, &keys, &identity),
        (None, Some(identity)) if cheaper() => by_dense(chain, operation, tensor, &keys, &identity),
        _ => by_key(chain, operation, tensor, &keys, &cards),
    }
}

/// Each rank merges the keys of its range.
fn by_key(
    chain: &mut Chain<'_>,
    operation: &Operation,
    tensor: &Sparse,
    keys: &[i64],
    cards: &[Card],
) -> Result<Sparse> {
    chain.expect(6);
    let (me, world, row) = (chain.executor.lines.me, chain.executor.lines.world, tensor.row());
    let size = tensor.size().unwrap_or(0);
    let samples: Vec<(u64, Vec<i64>)> = cards.iter().map(|card| (card.keys, card.samples.clone())).collect();
    let cuts = ranges::cut(&samples, size);
    let range = range_of(&cuts, me, size);
    drop(samples);

    // How many keys each rank has for each.
    let given: Vec<u64> = ranges::count(keys, &cuts).into_iter().map(|count| count as u64).collect();
    let matrix = chain.gather_numbers(Operation::new(Kind::Sizes, Dtype::I64), &given)?;
    let matrix = counts(chain, &matrix, cards)?;
    let taken: Vec<usize> = (0..world).map(|from| matrix[from * world + me]).collect();
    let (starts, all) = starts(&taken);

    let arrived = room(chain, bytes(all, WORD)?)?;
    let source = tensor.keys.span().slice(0..tensor.keys.byte_len())?;
    let exchange = moved(Kind::AllToAll, Dtype::I64, matrix_of(&matrix, WORD)?, &source, &arrived);
    chain.exchange(exchange)?;
    let theirs = numbers(&arrived)?;
    drop(arrived);
    let lists: Vec<&[i64]> =
        starts.iter().zip(&taken).map(|(&start, &count)| &theirs[start..start + count]).collect();
    for (place, list) in lists.iter().enumerate() {
        merge::check(list, &range).map_err(|bad| chain.misbehaved(Kind::Keys, place, &bad.text(&range)))?;
    }
    let (merged, plan) = merge::merge(&lists)?;

    // How many keys each range has after that: where it begins in the result.
    let own = [merged.len() as u64];
    let parts = chain.gather_numbers(Operation::new(Kind::Sizes, Dtype::I64), &own)?;
    let parts = parts.into_iter().map(|count| usize::try_from(count).unwrap_or(usize::MAX));
    let parts: Vec<usize> = parts.collect();
    let column = |place: usize| (0..world).map(|from| matrix[from * world + place]).sum::<usize>();
    if let Some(place) = (0..world).find(|&place| parts[place] > column(place)) {
        let (from, into) = (column(place), parts[place]);
        return Err(chain.misbehaved(Kind::Keys, place, &format!("it has merged {from} keys into {into}")));
    }
    let (places, total) = self::starts(&parts);
    let result = empty(chain, tensor, operation.dtype, total)?;
    let (start, end) = (places[me], places[me] + parts[me]);
    result.keys.span().write(start * WORD, i64::bytes(&merged))?;

    merge_rows(
        chain,
        operation,
        tensor,
        (&matrix, &taken, &plan),
        result.rows.span(),
        start * row..end * row,
    )?;
    drop(theirs);

    for (tensor, dtype, item) in [(&result.keys, Dtype::I64, WORD), (&result.rows, operation.dtype, row)] {
        let span = tensor.span();
        let each: Vec<usize> = parts.iter().map(|&count| bytes(count, item)).collect::<Result<_>>()?;
        let own = span.slice(start * item..end * item)?;
        chain.exchange(moved(Kind::AllGather, dtype, Counts::PerRank(each.into()), &own, span))?;
    }
    Ok(result)
}

/// The rows of this rank's range come, and are merged straight into the result.
fn merge_rows(
    chain: &mut Chain<'_>,
    operation: &Operation,
    tensor: &Sparse,
    (matrix, taken, plan): (&[usize], &[usize], &RowPlan),
    result: &Span,
    own: Range<usize>,
) -> Result<()> {
    let (world, row) = (chain.executor.lines.world, tensor.row());
    let (starts, all) = starts(taken);
    let arrived = room(chain, bytes(all, row)?)?;
    let source = tensor.rows.span().slice(0..tensor.rows.byte_len())?;
    let exchange = moved(Kind::AllToAll, operation.dtype, matrix_of(matrix, row)?, &source, &arrived);
    chain.exchange(exchange)?;
    let part =
        |(&start, &count): (&usize, &usize)| Ok(arrived.view().slice(start * row..(start + count) * row)?);
    let inputs: Vec<View<'_>> = starts.iter().zip(taken).map(part).collect::<Result<_>>()?;
    let into = result.view().slice(own)?;
    let queue = chain.executor.runner.queue();
    queue.reduce_rows(operation.op, operation.dtype, world, &inputs, plan, into)?;
    Ok(())
}

/// A dense tensor of all keys is reduced. Elements that a rank does not have are such as change no other one; the keys that
/// some rank has are one bit each.
fn by_dense(
    chain: &mut Chain<'_>,
    operation: &Operation,
    tensor: &Sparse,
    keys: &[i64],
    identity: &[u8],
) -> Result<Sparse> {
    chain.expect(2);
    chain.executor.went(Detour::Dense);
    let row = tensor.row();
    let size = usize::try_from(tensor.size().unwrap_or(0)).map_err(|_| too_large())?;
    let (values, bits) = (room(chain, bytes(size, row)?)?, room(chain, size.div_ceil(8))?);
    fill(&values, identity)?;
    let queue = chain.executor.runner.queue();
    let mut known = with_room_for(bits.len())?;
    known.resize(bits.len(), 0u8);
    let source = tensor.rows.span();
    let mut at = 0;
    for run in keys.chunk_by(|a, b| a + 1 == *b) {
        for &key in run {
            known[key as usize / 8] |= 1 << (key % 8);
        }
        let (start, len) = (run[0] as usize * row, run.len() * row);
        let from = source.view().slice(at..at + len)?;
        queue.copy(values.view().slice(start..start + len)?, from, Caching::Keep)?;
        at += len;
    }
    bits.write(0, &known)?;

    let mut union = moved(Kind::AllReduce, Dtype::U8, Counts::Even(bits.len()), &bits, &bits);
    union.op = ReduceOp::Bor;
    let mut sum = moved(Kind::AllReduce, operation.dtype, Counts::Even(values.len()), &values, &values);
    sum.op = operation.op;
    let reduced = chain.exchange(union).and_then(|()| chain.exchange(sum));
    if reduced.is_err() && !chain.executor.lines.others_are_out(chain.ranks) {
        // A rank that is stopped may go on and write here. Nobody else must get this memory: it stays until the process ends.
        std::mem::forget((values.clone(), bits.clone()));
    }
    reduced?;

    bits.read(0, &mut known)?;
    let known = &known;
    let ones = |(index, &byte): (usize, &u8)| {
        (0..8).filter(move |bit| byte >> bit & 1 != 0).map(move |bit| (index * 8 + bit) as i64)
    };
    let count = known.iter().map(|byte| byte.count_ones() as usize).sum();
    let mut union = with_room_for(count)?;
    union.extend(known.iter().enumerate().flat_map(ones).filter(|&key| (key as usize) < size));
    let result = empty(chain, tensor, operation.dtype, union.len())?;
    result.keys.span().write(0, i64::bytes(&union))?;
    let queue = chain.executor.runner.queue();
    let mut at = 0;
    for run in union.chunk_by(|a, b| a + 1 == *b) {
        let (start, len) = (run[0] as usize * row, run.len() * row);
        let into = result.rows.span().view().slice(at..at + len)?;
        queue.copy(into, values.view().slice(start..start + len)?, Caching::Keep)?;
        at += len;
    }
    Ok(result)
}

/// An exchange between spans that are the library's own choice.
fn moved(kind: Kind, dtype: Dtype, counts: Counts, input: &Span, output: &Span) -> Operation {
    let mut operation = Operation::new(kind, dtype);
    operation.counts = counts;
    operation.input = Buffer::one(input.clone());
    operation.output = Buffer::one(output.clone());
    operation.made_here = true;
    operation
}

/// How many keys go from each rank to each, as all ranks were told. Refuses what does not add up.
fn counts(chain: &Chain<'_>, matrix: &[u64], cards: &[Card]) -> Result<Vec<usize>> {
    for (place, (row, card)) in matrix.chunks_exact(cards.len()).zip(cards).enumerate() {
        let sum = row.iter().try_fold(0u64, |sum, &count| sum.checked_add(count));
        if sum != Some(card.keys) {
            return Err(chain.misbehaved(
                Kind::Keys,
                place,
                &format!("it has {} keys and gives away {row:?}", card.keys),
            ));
        }
    }
    matrix.iter().map(|&count| usize::try_from(count).map_err(|_| too_large())).collect()
}

fn matrix_of(matrix: &[usize], item: usize) -> Result<Counts> {
    let all: Vec<usize> = matrix.iter().map(|&count| bytes(count, item)).collect::<Result<_>>()?;
    Ok(Counts::Matrix(all.into()))
}

/// Where each of several parts begins, and where the last one ends.
fn starts(counts: &[usize]) -> (Vec<usize>, usize) {
    let mut end = 0usize;
    let starts = counts.iter().map(|&count| {
        let start = end;
        end = end.saturating_add(count);
        start
    });
    (starts.collect(), end)
}

/// The keys that a rank owns.
fn range_of(cuts: &[i64], place: usize, size: u64) -> Range<i64> {
    let start = place.checked_sub(1).and_then(|before| cuts.get(before)).copied().unwrap_or(0);
    start..cuts.get(place).copied().unwrap_or(i64::try_from(size).unwrap_or(i64::MAX))
}

/// Memory that other ranks can reach. The pool keeps it for the next call: new pages take longer than the bytes in them.
fn room(chain: &Chain<'_>, len: usize) -> Result<Span> {
    Ok(Span::whole(chain.ranks.context.pool(&DeviceId::Host)?.alloc(len)?).slice(0..len)?)
}

/// A result of so many keys.
fn empty(chain: &Chain<'_>, like: &Sparse, dtype: Dtype, count: usize) -> Result<Sparse> {
    let keys = Tensor::flat(room(chain, bytes(count, WORD)?)?, Dtype::I64)?;
    let mut shape = like.rows.layout().shape().to_vec();
    shape[0] = count;
    let rows = Tensor::contiguous(room(chain, bytes(count, like.row())?)?, dtype, &shape)?;
    Sparse::new(keys, rows, &like.shape)
}

/// Writes an element again and again.
fn fill(span: &Span, element: &[u8]) -> Result<()> {
    let some = element.repeat((1 << 16) / element.len().max(1));
    for at in (0..span.len()).step_by(some.len().max(1)) {
        span.write(at, &some[..some.len().min(span.len() - at)])?;
    }
    Ok(())
}

fn bytes(count: usize, item: usize) -> Result<usize> {
    count.checked_mul(item).filter(|&bytes| isize::try_from(bytes).is_ok()).ok_or_else(too_large)
}

#[cold]
fn too_large() -> Error {
    Error::misuse("a sparse tensor that is larger than any memory")
}

/// The numbers in a span.
fn numbers(span: &Span) -> Result<Vec<i64>> {
    let count = span.len() / WORD;
    let mut numbers = with_room_for(count)?;
    numbers.resize(count, 0i64);
    span.read(0, i64::bytes_mut(&mut numbers))?;
    Ok(numbers)
}
