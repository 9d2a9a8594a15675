//! The exchanges of an all-reduce of sparse tensors.

use std::ops::Range;
use std::slice;

use tensorwire_device::{DeviceId, Dtype, Element, ReduceOp, RowPlan, Span, View};

use super::super::buffer::Buffer;
use super::super::cancel::driver_failed;
use super::super::chain::{Chain, Chained};
use super::super::operation::Operation;
use super::super::plan::Counts;
use super::super::tensor::Tensor;
use super::super::turns::come;
use super::{Finish, Sparse, SparseJob, merge, ranges, with_room_for};
use crate::error::{Error, Result};
use crate::shm::kind::{Detour, Kind};

/// Bytes of a key, and of other numbers that travel.
const WORD: usize = 8;
/// Keys that one list of rows is made for where a tensor is dense. A list has 12 bytes for each.
const LIST: usize = 1 << 20;

impl Chained for SparseJob {
    fn run(&self, chain: &mut Chain<'_>, operation: &Operation) -> Result<()> {
        if let Some(why) = &self.refused {
            return Err(why.clone());
        }
        if let Some(mark) = &self.after {
            let deadline = chain.stop().1;
            let failed = |error| driver_failed(chain.ranks, self.gpu.as_ref(), error);
            come(slice::from_ref(mark), chain.ranks, deadline).map_err(failed)?;
        }
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

    fn gpu(&self) -> Option<&DeviceId> {
        self.gpu.as_ref()
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
        (Some(true), Some(identity)) => by_dense(chain, operation, job, &keys, &identity),
        (None, Some(identity)) if cheaper() => by_dense(chain, operation, job, &keys, &identity),
        _ => by_key(chain, operation, job, &keys, &cards),
    }
}

/// Each rank merges the keys of its range.
fn by_key(
    chain: &mut Chain<'_>,
    operation: &Operation,
    job: &SparseJob,
    keys: &[i64],
    cards: &[Card],
) -> Result<Sparse> {
    chain.expect(6);
    let tensor = &job.tensor;
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

    let arrived = room(chain, None, bytes(all, WORD)?)?;
    let source = match tensor.keys.span().region().host_addr() {
        Some(_) => tensor.keys.span().slice(0..tensor.keys.byte_len())?,
        None => with_numbers(chain, keys)?,
    };
    let exchange = moved(Kind::AllToAll, Dtype::I64, matrix_of(&matrix, WORD)?, (&source, &arrived), None);
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
    let (all_keys, rows) = (room(chain, None, bytes(total, WORD)?)?, job.rows(chain, total)?);
    let result_keys = job.result_keys(chain, &all_keys)?;
    let (start, end) = (places[me], places[me] + parts[me]);
    all_keys.write(start * WORD, i64::bytes(&merged))?;

    let into = rows.span().slice(start * row..end * row)?;
    merge_rows(chain, operation, job, (&matrix, &taken, &plan), &into)?;
    drop(theirs);

    let gather = |span: &Span, dtype, item, gpu| {
        let each: Vec<usize> = parts.iter().map(|&count| bytes(count, item)).collect::<Result<_>>()?;
        let own = span.slice(start * item..end * item)?;
        Ok::<_, Error>(moved(Kind::AllGather, dtype, Counts::PerRank(each.into()), (&own, span), gpu))
    };
    let all_rows = rows.span().slice(0..rows.byte_len())?;
    chain.exchange(gather(&all_keys, Dtype::I64, WORD, None)?)?;
    let result = job.made(&all_keys, result_keys, rows)?;
    let finish = job.prepared(&result)?;
    chain.exchange(gather(&all_rows, operation.dtype, row, job.gpu.as_ref())?)?;
    finish()?;
    Ok(result)
}

/// The rows of this rank's range come, and are merged straight into the result.
fn merge_rows(
    chain: &mut Chain<'_>,
    operation: &Operation,
    job: &SparseJob,
    (matrix, taken, plan): (&[usize], &[usize], &RowPlan),
    result: &Span,
) -> Result<()> {
    let (world, row, gpu) = (chain.executor.lines.world, job.tensor.row(), job.gpu.as_ref());
    let (starts, all) = starts(taken);
    let arrived = room(chain, gpu, bytes(all, row)?)?;
    let source = job.all_rows()?;
    let matrix = matrix_of(matrix, row)?;
    let exchange = moved(Kind::AllToAll, operation.dtype, matrix, (&source, &arrived), gpu);
    chain.exchange(exchange)?;
    let part =
        |(&start, &count): (&usize, &usize)| Ok(arrived.view().slice(start * row..(start + count) * row)?);
    let inputs: Vec<View<'_>> = starts.iter().zip(taken).map(part).collect::<Result<_>>()?;
    let (op, dtype) = (operation.op, operation.dtype);
    chain.work(gpu, |queue| queue.reduce_rows(op, dtype, world, &inputs, plan, result.view()))
}

/// A dense tensor of all keys is reduced. Elements that a rank does not have are such as change no other one; the keys that
/// some rank has are one bit each. The last exchange says that every rank has its result.
fn by_dense(
    chain: &mut Chain<'_>,
    operation: &Operation,
    job: &SparseJob,
    keys: &[i64],
    identity: &[u8],
) -> Result<Sparse> {
    chain.expect(3);
    chain.executor.went(Detour::Dense);
    let (tensor, row, gpu) = (&job.tensor, job.tensor.row(), job.gpu.as_ref());
    let size = usize::try_from(tensor.size().unwrap_or(0)).map_err(|_| too_large())?;
    let (values, bits) = (room(chain, gpu, bytes(size, row)?)?, room(chain, None, size.div_ceil(8))?);
    let mut known = with_room_for(bits.len())?;
    known.resize(bits.len(), 0u8);
    for &key in keys {
        known[key as usize / 8] |= 1 << (key % 8);
    }
    bits.write(0, &known)?;
    spread(chain, job, keys, identity, &values)?;

    let mut union = moved(Kind::AllReduce, Dtype::U8, Counts::Even(bits.len()), (&bits, &bits), None);
    union.op = ReduceOp::Bor;
    let even = Counts::Even(values.len());
    let mut sum = moved(Kind::AllReduce, operation.dtype, even, (&values, &values), gpu);
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
    let (all_keys, rows) = (with_numbers(chain, &union)?, job.rows(chain, union.len())?);
    // The rows that some rank has, one behind the other.
    let mut done = 0;
    for window in windows(size) {
        let here = within(&union[done..], &window);
        let mut plan = RowPlan::new(&[window.len()])?;
        for &key in here {
            plan.push([(0, key as usize - window.start)])?;
        }
        let from = values.view().slice(window.start * row..window.end * row)?;
        let into = rows.span().slice(done * row..(done + here.len()) * row)?;
        picked(chain, gpu, &[from], &plan, &into)?;
        done += here.len();
    }
    let result_keys = job.result_keys(chain, &all_keys)?;
    let result = job.made(&all_keys, result_keys, rows)?;
    let finish = job.prepared(&result)?;
    chain.gather_numbers(Operation::new(Kind::Sizes, Dtype::I64), &[union.len() as u64])?;
    finish()?;
    Ok(result)
}

/// The keys of a dense tensor, so many at once as a list of rows is made for.
fn windows(size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..size).step_by(LIST).map(move |start| start..size.min(start.saturating_add(LIST)))
}

/// Of sorted keys, those at the front that lie in a window.
fn within<'a>(keys: &'a [i64], window: &Range<usize>) -> &'a [i64] {
    &keys[..keys.partition_point(|&key| (key as usize) < window.end)]
}

/// Has `values` be the dense tensor: the rows that this rank has, and others that change no other ones.
fn spread(
    chain: &mut Chain<'_>,
    job: &SparseJob,
    keys: &[i64],
    identity: &[u8],
    values: &Span,
) -> Result<()> {
    let (row, gpu) = (job.tensor.row(), job.gpu.as_ref());
    let size = usize::try_from(job.tensor.size().unwrap_or(0)).map_err(|_| too_large())?;
    let absent = room(chain, gpu, row)?;
    absent.write(0, &identity.repeat(job.tensor.width()))?;
    let rows = job.all_rows()?;
    let mut done = 0;
    for window in windows(size) {
        let here = within(&keys[done..], &window);
        let mut plan = RowPlan::new(&[here.len(), 1])?;
        plan.reserve(window.len())?;
        let mut own = here.iter().enumerate().peekable();
        for key in window.clone() {
            let from = own.next_if(|(_, own)| **own as usize == key).map_or((1, 0), |(at, _)| (0, at));
            plan.push([from])?;
        }
        let from = rows.view().slice(done * row..(done + here.len()) * row)?;
        let into = values.slice(window.start * row..window.end * row)?;
        picked(chain, gpu, &[from, absent.view()], &plan, &into)?;
        done += here.len();
    }
    Ok(())
}

/// Copies rows, each from where a plan says.
fn picked(
    chain: &mut Chain<'_>,
    gpu: Option<&DeviceId>,
    from: &[View<'_>],
    plan: &RowPlan,
    into: &Span,
) -> Result<()> {
    // Of one row, bits that are joined are the bits themselves.
    chain.work(gpu, |queue| queue.reduce_rows(ReduceOp::Bor, Dtype::U8, 1, from, plan, into.view()))
}

impl SparseJob {
    /// The memory of the rows.
    fn all_rows(&self) -> Result<Span> {
        let rows = &self.tensor.rows;
        Ok(rows.span().slice(0..rows.byte_len())?)
    }

    /// Memory for so many rows of a result.
    fn rows(&self, chain: &Chain<'_>, count: usize) -> Result<Tensor> {
        let like = &self.tensor.rows;
        let mut shape = like.layout().shape().to_vec();
        shape[0] = count;
        let Some(rows) = &self.rows else {
            let room = room(chain, self.gpu.as_ref(), bytes(count, self.tensor.row())?)?;
            return Tensor::contiguous(room, like.dtype(), &shape);
        };
        let rows = rows(count)?;
        let fits = rows.dtype() == like.dtype() && rows.layout().shape() == shape;
        let gpu = Sparse { rows: rows.clone(), ..self.tensor.clone() }.gpu()?;
        if !fits || !rows.layout().is_contiguous() || gpu != self.gpu {
            return Err(Error::misuse(format!(
                "memory for {count} rows of a sparse result, of shape {:?}, {}, with gaps or on another device",
                rows.layout().shape(),
                rows.dtype()
            )));
        }
        Ok(rows)
    }

    /// Memory for the keys of the result, where they do not stay on the host: they lie where those of the tensor do.
    fn result_keys(&self, chain: &Chain<'_>, keys: &Span) -> Result<Option<Span>> {
        match (self.tensor.keys.span().region().host_addr(), &self.gpu) {
            (None, Some(gpu)) => room(chain, Some(gpu), keys.len()).map(Some),
            _ => Ok(None),
        }
    }

    /// What the caller makes of the result is readied, while all ranks can still hear that it cannot be. Gives what finishes it.
    fn prepared(&self, result: &Sparse) -> Result<Finish> {
        match &self.prepare {
            Some(prepare) => prepare(result),
            None => Ok(Box::new(|| Ok(()))),
        }
    }

    /// The result.
    fn made(&self, keys: &Span, there: Option<Span>, rows: Tensor) -> Result<Sparse> {
        if let Some(there) = &there {
            there.write(0, &keys.to_vec()?)?;
        }
        Sparse::new(
            Tensor::flat(there.unwrap_or_else(|| keys.clone()), Dtype::I64)?,
            rows,
            &self.tensor.shape,
        )
    }
}

/// An exchange between spans that are the library's own choice.
fn moved(
    kind: Kind,
    dtype: Dtype,
    counts: Counts,
    (input, output): (&Span, &Span),
    gpu: Option<&DeviceId>,
) -> Operation {
    let mut operation = Operation::new(kind, dtype);
    operation.counts = counts;
    operation.device = gpu.cloned();
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
fn room(chain: &Chain<'_>, gpu: Option<&DeviceId>, len: usize) -> Result<Span> {
    let pool = chain.ranks.context.pool(gpu.unwrap_or(&DeviceId::Host))?;
    Ok(Span::whole(pool.alloc(len)?).slice(0..len)?)
}

/// Such memory of the host, with these numbers.
fn with_numbers(chain: &Chain<'_>, numbers: &[i64]) -> Result<Span> {
    let room = room(chain, None, bytes(numbers.len(), WORD)?)?;
    room.write(0, i64::bytes(numbers))?;
    Ok(room)
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
