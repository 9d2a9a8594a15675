//! An all-reduce of sparse tensors. Which rank has which key can be computed, so every rank can check the result.

use tensorwire::{Group, ReduceOp, Result, Sparse, Tensor};

use crate::bench::keys::{Keys, WIDTH};

/// One operation, ready to be called again and again.
#[derive(Debug)]
pub(super) struct SparseJob {
    keys: Keys,
    rows: u64,
    input: Sparse,
    /// What the last call gave. The call before has its memory back by then, as a program's would.
    output: Option<Sparse>,
}

/// What all elements of a rank are.
fn value(rank: usize, iteration: usize) -> f32 {
    (rank + 1 + iteration % 7) as f32
}

impl SparseJob {
    pub(super) fn new(group: &Group, keys: Keys, bytes: usize) -> Result<Self> {
        let rows = (bytes / (WIDTH * size_of::<f32>())) as u64;
        let own: Vec<i64> = keys.of(group.rank(), rows).collect();
        let values = Tensor::private(&vec![0f32; own.len() * WIDTH])?;
        let values = Tensor::contiguous(values.span().clone(), values.dtype(), &[own.len(), WIDTH])?;
        let input = Sparse::new(Tensor::private(&own)?, values, &[rows])?;
        Ok(Self { keys, rows, input, output: None })
    }

    pub(super) fn prepare(&mut self, rank: usize, iteration: usize) -> Result<()> {
        self.output = None;
        self.input.rows().write(&vec![value(rank, iteration); self.input.rows().len()])
    }

    pub(super) fn call(&mut self, group: &Group) -> Result<()> {
        self.output = Some(group.all_reduce_sparse(&self.input, ReduceOp::Sum).wait()?);
        Ok(())
    }

    /// How many elements are not what they must be; all of a row whose key is missing or wrong.
    pub(super) fn wrong(&self, world: usize, iteration: usize) -> Result<u64> {
        let Some(output) = &self.output else { return Ok(0) };
        let (keys, rows) = (output.keys().to_vec::<i64>()?, output.rows().to_vec::<f32>()?);
        let mut got = keys.iter().zip(rows.chunks_exact(WIDTH));
        let mut wrong = 0;
        for key in 0..self.rows {
            let ranks = (0..world).filter(|&rank| self.keys.has(rank, key, self.rows));
            let (count, sum) =
                ranks.fold((0, 0.0), |(count, sum), rank| (count + 1, sum + value(rank, iteration)));
            if count == 0 {
                continue;
            }
            wrong += match got.next() {
                Some((&at, row)) if at as u64 == key => row.iter().filter(|&&value| value != sum).count(),
                _ => WIDTH,
            } as u64;
        }
        Ok(wrong + (got.count() * WIDTH) as u64)
    }
}
