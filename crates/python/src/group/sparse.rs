//! Sparse tensors, as the operations of a group take them.

use pyo3::prelude::*;
use tensorwire::{Error, Result, Sparse, Tensor};

use crate::error::exception;
use crate::tensor::Foreign;

/// The sparse tensor of these keys and rows. `shape` are its sparse dimensions, `dims` those of a row: what comes from
/// Python has lost its own.
pub(super) fn tensor(
    py: Python<'_>,
    keys: &Foreign,
    rows: &Foreign,
    shape: &[u64],
    dims: &[usize],
) -> PyResult<Sparse> {
    made(&keys.tensor, &rows.tensor, shape, dims).map_err(|error| exception(py, &error))
}

fn made(keys: &Tensor, rows: &Tensor, shape: &[u64], dims: &[usize]) -> Result<Sparse> {
    if !rows.layout().is_contiguous() {
        return Err(Error::misuse("rows of a sparse tensor lie in memory without gaps"));
    }
    let all: Vec<usize> = [keys.len()].into_iter().chain(dims.iter().copied()).collect();
    if all.iter().try_fold(1usize, |count, &size| count.checked_mul(size)) != Some(rows.len()) {
        return Err(Error::misuse(format!("{} elements are no rows of shape {all:?}", rows.len())));
    }
    let rows = Tensor::contiguous(rows.span().clone(), rows.dtype(), &all)?;
    Sparse::new(keys.clone(), rows, shape)
}
