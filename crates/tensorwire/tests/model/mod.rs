//! The plain model that collectives are compared with: what every rank gives, computed by everybody, and memory with
//! guards around and between its elements, all of whose bytes are compared.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

pub mod op;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tensorwire::device::{Device, Layout, host};
use tensorwire::{Dtype, Group, ReduceOp, Span, Tensor};

/// A small generator of numbers; the same everywhere.
#[derive(Clone)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// Elements that make sense together: floats of different magnitude, never NaN nor infinite, and such that neither a sum
/// nor a product of some thirty of them becomes NaN on the way.
fn element(dtype: Dtype, dice: &mut Dice) -> Vec<u8> {
    let word = match dtype {
        Dtype::Bool => dice.next() & 1,
        Dtype::F16 => float(dice, 5, 10, 3),
        Dtype::Bf16 => float(dice, 8, 7, 3),
        Dtype::F32 => float(dice, 8, 23, 3),
        Dtype::F64 => float(dice, 11, 52, 3),
        Dtype::F8E4M3Fn => float(dice, 4, 3, 2),
        Dtype::F8E5M2 => float(dice, 5, 2, 2),
        Dtype::F8E4M3Fnuz => float(dice, 4, 3, 2),
        Dtype::F8E5M2Fnuz => float(dice, 5, 2, 2),
        Dtype::F8E8M0Fnu => 125 + dice.next() % 5,
        Dtype::Complex32 => float(dice, 5, 10, 2) | float(dice, 5, 10, 2) << 16,
        Dtype::Complex64 => float(dice, 8, 23, 2) | float(dice, 8, 23, 2) << 32,
        Dtype::Complex128 => {
            return [float(dice, 11, 52, 2), float(dice, 11, 52, 2)]
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .collect();
        }
        _ => dice.next(),
    };
    word.to_le_bytes()[..dtype.size()].to_vec()
}

/// The bits of a float with an exponent of at most `reach`, up or down.
fn float(dice: &mut Dice, exponent_bits: u32, mantissa_bits: u32, reach: u64) -> u64 {
    let bias = (1u64 << (exponent_bits - 1)) - 1;
    let exponent = bias - reach + dice.next() % (2 * reach + 1);
    let mantissa = dice.next() & ((1 << mantissa_bits) - 1);
    let sign = dice.next() & 1;
    sign << (exponent_bits + mantissa_bits) | exponent << mantissa_bits | mantissa
}

/// Floats of very different magnitude, so that the order of a sum matters.
pub fn wild(dtype: Dtype, count: usize, seed: u64) -> Vec<u8> {
    let mut dice = Dice::new(seed + 1);
    let mut next = || match dtype {
        Dtype::F16 => float(&mut dice, 5, 10, 12),
        Dtype::Bf16 => float(&mut dice, 8, 7, 20),
        Dtype::F32 => float(&mut dice, 8, 23, 20),
        Dtype::F64 => float(&mut dice, 11, 52, 50),
        _ => float(&mut dice, 5, 2, 10),
    };
    let table: Vec<u8> = (0..TABLE).flat_map(|_| next().to_le_bytes()[..dtype.size()].to_vec()).collect();
    let mut bytes = Vec::new();
    while bytes.len() < count * dtype.size() {
        let start = dice.below(TABLE) * dtype.size();
        bytes.extend_from_slice(&table[start..]);
    }
    bytes.truncate(count * dtype.size());
    bytes
}

/// All pairs of an operation and a type that have a meaning.
pub fn ops_of(dtype: Dtype) -> Vec<ReduceOp> {
    ReduceOp::ALL.into_iter().filter(|op| op.check(dtype).is_ok()).collect()
}

type Memo<K> = Mutex<HashMap<K, Arc<Vec<u8>>>>;

/// What everybody gives and gets. One for a sequence of operations; the threads of a process share it.
#[derive(Default)]
pub struct Model {
    tables: Memo<Dtype>,
    values: Memo<(u64, usize, Dtype)>,
    sums: Memo<(u64, usize, usize)>,
}

impl Model {
    /// The elements of the tensor called `name`.
    pub fn values(&self, name: u64, count: usize, dtype: Dtype) -> Arc<Vec<u8>> {
        let key = (name, count, dtype);
        if let Some(known) = self.values.lock().unwrap().get(&key) {
            return known.clone();
        }
        let size = dtype.size();
        let table = self.table(dtype);
        let mut dice = Dice::new(name);
        let mut bytes = Vec::with_capacity(count * size);
        // Pieces of the table from anywhere: quick to make, and no two places are alike.
        while bytes.len() < count * size {
            let start = dice.below(TABLE);
            let take = (1 + dice.below(500)).min(TABLE - start).min(count - bytes.len() / size);
            bytes.extend_from_slice(&table[start * size..(start + take) * size]);
        }
        let bytes = Arc::new(bytes);
        self.values.lock().unwrap().insert(key, bytes.clone());
        bytes
    }

    fn table(&self, dtype: Dtype) -> Arc<Vec<u8>> {
        let mut tables = self.tables.lock().unwrap();
        let table = tables.entry(dtype).or_insert_with(|| {
            let mut dice = Dice::new(dtype as u64 + 77);
            Arc::new((0..TABLE).flat_map(|_| element(dtype, &mut dice)).collect())
        });
        table.clone()
    }

    /// Inputs reduced in their order, each rounded once: by one call of the device's kernel on private copies.
    pub fn reduced(
        &self,
        key: (u64, usize),
        dtype: Dtype,
        op: ReduceOp,
        inputs: &[Arc<Vec<u8>>],
        hosts: &[Vec<usize>],
    ) -> Arc<Vec<u8>> {
        let key = (key.0, key.1, inputs.len());
        if let Some(known) = self.sums.lock().unwrap().get(&key) {
            return known.clone();
        }
        let result = Arc::new(reduce_on(hosts, dtype, op, inputs));
        self.sums.lock().unwrap().insert(key, result.clone());
        result
    }
}

/// Reduces as ranks on several hosts do, of whose ranks `hosts` are the lists: those of a host in their order, in the wide type,
/// then the hosts in theirs. Rounded once.
pub fn reduce_on(hosts: &[Vec<usize>], dtype: Dtype, op: ReduceOp, inputs: &[Arc<Vec<u8>>]) -> Vec<u8> {
    let world: usize = hosts.iter().map(Vec::len).sum();
    if hosts.len() < 2 || inputs.is_empty() || inputs[0].is_empty() {
        return reduce(dtype, op, inputs);
    }
    let each = inputs.len() / world;
    let wide = host::convert::wide(dtype);
    let widened = |bytes: &Arc<Vec<u8>>| -> Arc<Vec<u8>> {
        let own = match op {
            // Each product is rounded to the type.
            ReduceOp::PremulSum(_) => Arc::new(reduce(dtype, op, std::slice::from_ref(bytes))),
            _ => bytes.clone(),
        };
        if wide == dtype {
            return own;
        }
        let into = private(&vec![0; bytes.len() / dtype.size() * wide.size()]);
        host::convert::widen(dtype, private(&own).view(), into.view()).unwrap();
        Arc::new(into.to_vec().unwrap())
    };
    let plain = match op {
        ReduceOp::PremulSum(_) | ReduceOp::Avg => ReduceOp::Sum,
        op => op,
    };
    let part = |ranks: &Vec<usize>| {
        let all: Vec<_> = ranks
            .iter()
            .flat_map(|rank| rank * each..(rank + 1) * each)
            .map(|at| widened(&inputs[at]))
            .collect();
        Arc::new(reduce(wide, plain, &all))
    };
    let parts: Vec<_> = hosts.iter().map(part).collect();
    let mut result = reduce(wide, plain, &parts);
    if op == ReduceOp::Avg {
        let count = inputs.len();
        if matches!(wide, Dtype::F64 | Dtype::Complex128) {
            for word in result.as_chunks_mut::<8>().0 {
                *word = (f64::from_le_bytes(*word) / count as f64).to_le_bytes();
            }
        } else {
            for word in result.as_chunks_mut::<4>().0 {
                *word = (f32::from_le_bytes(*word) / count as f32).to_le_bytes();
            }
        }
    }
    if wide == dtype {
        return result;
    }
    let into = private(&vec![0; inputs[0].len()]);
    host::convert::narrow(dtype, private(&result).view(), into.view()).unwrap();
    into.to_vec().unwrap()
}

/// Reduces copies of the inputs in their order.
pub fn reduce(dtype: Dtype, op: ReduceOp, inputs: &[Arc<Vec<u8>>]) -> Vec<u8> {
    let len = inputs[0].len();
    if len == 0 {
        return Vec::new();
    }
    let copies: Vec<Span> = inputs.iter().map(|bytes| private(bytes)).collect();
    let output = private(&vec![0; len]);
    let views: Vec<_> = copies.iter().map(Span::view).collect();
    let mut queue = host::Host.queue().unwrap();
    queue.reduce(op, dtype, &views, &[output.view()], Default::default()).unwrap();
    output.to_vec().unwrap()
}

/// Memory of this process alone.
pub fn private(bytes: &[u8]) -> Span {
    let span = Span::new(host::private(bytes.len()).unwrap(), 0..bytes.len()).unwrap();
    span.write(0, bytes).unwrap();
    span
}

/// How the elements of a tensor lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// One after the other, at a multiple of 64 bytes.
    Flat,
    /// The same at any address.
    Crooked,
    Transposed,
    Steps,
    Backwards,
    Gaps,
    /// All rows are the same memory: a source only.
    Repeated,
}

pub const WRITABLE: [Lie; 6] =
    [Lie::Flat, Lie::Crooked, Lie::Transposed, Lie::Steps, Lie::Backwards, Lie::Gaps];
pub const READABLE: [Lie; 7] =
    [Lie::Flat, Lie::Crooked, Lie::Transposed, Lie::Steps, Lie::Backwards, Lie::Gaps, Lie::Repeated];

/// A tensor, with all the memory that it lies in, of which every byte is known.
pub struct Mem {
    pub tensor: Tensor,
    all: Span,
    /// Where each element begins in `all`.
    places: Places,
    expected: Vec<u8>,
}

enum Places {
    Dense(usize),
    Each(Vec<usize>),
}

impl Places {
    fn at(&self, index: usize, size: usize) -> usize {
        match self {
            Self::Dense(start) => start + index * size,
            Self::Each(all) => all[index],
        }
    }
}

impl Mem {
    /// A tensor of `values`. Where rows repeat, the elements are those of the first row.
    pub fn new(group: &Group, shared: bool, dtype: Dtype, lie: Lie, values: &[u8]) -> Self {
        let alloc = |bytes: &[u8]| if shared { group.alloc(bytes.len()).unwrap() } else { private(bytes) };
        Self::within(alloc, dtype, lie, values)
    }

    /// The same in memory that `alloc` gives, for so many bytes.
    pub fn within(alloc: impl Fn(&[u8]) -> Span, dtype: Dtype, lie: Lie, values: &[u8]) -> Self {
        let size = dtype.size();
        let count = values.len() / size;
        let (rows, columns) = rectangle(count);
        let (r, c) = (rows as isize, columns as isize);
        let (shape, strides, origin): (Vec<usize>, Vec<isize>, usize) = match lie {
            Lie::Flat | Lie::Crooked => (vec![count], vec![1], 0),
            Lie::Transposed => (vec![rows, columns], vec![1, r], 0),
            Lie::Steps => (vec![count], vec![3], 2),
            Lie::Backwards => (vec![rows, columns], vec![-c, -1], count.saturating_sub(1)),
            Lie::Gaps => (vec![rows, 1, columns], vec![c + 5, 999, 1], 1),
            Lie::Repeated => (vec![rows, columns], vec![0, 1], 0),
        };
        let guard = match lie {
            Lie::Crooked => 64 + size + 3,
            _ => 64,
        };
        let layout = Layout::with_origin(&shape, &strides, size, origin * size).unwrap();
        let places = match lie {
            Lie::Flat | Lie::Crooked => Places::Dense(guard),
            _ => {
                let mut all = Vec::with_capacity(count);
                let inner = shape.last().copied().unwrap_or(0).max(1);
                for index in 0..count {
                    let (row, column) = match shape.len() {
                        1 => (0, index),
                        _ => (index / inner, index % inner),
                    };
                    let row_stride = if shape.len() == 1 { 0 } else { strides[0] };
                    let at = origin as isize
                        + row as isize * row_stride
                        + column as isize * strides[strides.len() - 1];
                    all.push(guard + at as usize * size);
                }
                Places::Each(all)
            }
        };
        let end = match &places {
            Places::Dense(start) => start + count * size,
            Places::Each(all) => all.iter().max().map_or(guard, |last| last + size),
        };
        let pattern: Vec<u8> = (0..4096).map(|at: usize| (at * 37 + at / 256 + 11) as u8).collect();
        let mut expected = pattern.repeat((end + 64 + size).div_ceil(4096));
        expected.truncate(end + 64 + size);
        fill(&mut expected, &places, size, values);
        let all = alloc(&expected);
        all.write(0, &expected).unwrap();
        let span = all.slice(guard..expected.len()).unwrap();
        let tensor = match lie {
            Lie::Flat | Lie::Crooked => Tensor::flat(span.slice(0..count * size).unwrap(), dtype).unwrap(),
            _ => Tensor::new(span, dtype, layout).unwrap(),
        };
        assert_eq!(tensor.len(), count);
        Self { tensor, all, places, expected }
    }

    /// A part of a tensor without gaps, to be used as a tensor; it is checked with the whole.
    pub fn part(&self, start: usize, count: usize) -> Tensor {
        self.tensor.part(start, count).unwrap()
    }

    /// From now on, these values are expected.
    pub fn expect(&mut self, values: &[u8]) {
        fill(&mut self.expected, &self.places, self.tensor.dtype().size(), values);
    }

    /// The expected values of some elements, for one that stands in for a part of this.
    pub fn expect_part(&mut self, start: usize, values: &[u8]) {
        let size = self.tensor.dtype().size();
        if let Places::Dense(from) = self.places {
            let from = from + start * size;
            self.expected[from..from + values.len()].copy_from_slice(values);
            return;
        }
        for (index, value) in values.chunks_exact(size).enumerate() {
            let at = self.places.at(start + index, size);
            self.expected[at..at + size].copy_from_slice(value);
        }
    }

    /// What the elements are now.
    pub fn values(&self) -> Vec<u8> {
        let (bytes, size) = (self.all.to_vec().unwrap(), self.tensor.dtype().size());
        (0..self.tensor.len())
            .flat_map(|index| {
                let at = self.places.at(index, size);
                bytes[at..at + size].to_vec()
            })
            .collect()
    }

    /// Every byte of the memory is as it should be, those around the elements too.
    pub fn check(&self) -> Result<(), String> {
        let bytes = self.all.to_vec().unwrap();
        if bytes == self.expected {
            return Ok(());
        }
        let at = bytes.iter().zip(&self.expected).position(|(a, b)| a != b).unwrap_or(bytes.len());
        let count = self.tensor.len();
        let size = self.tensor.dtype().size();
        let inside = (0..count)
            .find(|&index| (self.places.at(index, size)..self.places.at(index, size) + size).contains(&at));
        let wrong = bytes.iter().zip(&self.expected).filter(|(a, b)| a != b).count();
        Err(format!(
            "{wrong} of {} bytes are wrong, the first at {at} (element {inside:?} of {count}): {:?} instead of {:?}",
            bytes.len(),
            &bytes[at..(at + 16).min(bytes.len())],
            &self.expected[at..(at + 16).min(bytes.len())]
        ))
    }
}

/// What a repeated source holds: its first row, again and again.
pub fn repeated(values: &[u8], size: usize) -> Vec<u8> {
    let (rows, columns) = rectangle(values.len() / size);
    values[..columns * size].repeat(rows)
}

/// Two numbers whose product is `count`.
fn rectangle(count: usize) -> (usize, usize) {
    let rows = [7, 5, 4, 3, 2, 11, 13].into_iter().find(|rows| count > 0 && count.is_multiple_of(*rows));
    (rows.unwrap_or(1), count / rows.unwrap_or(1))
}

fn fill(bytes: &mut [u8], places: &Places, size: usize, values: &[u8]) {
    match places {
        Places::Dense(start) => bytes[*start..start + values.len()].copy_from_slice(values),
        Places::Each(all) => {
            for (at, value) in all.iter().zip(values.chunks_exact(size)) {
                bytes[*at..at + size].copy_from_slice(value);
            }
        }
    }
}

const TABLE: usize = 4096;
