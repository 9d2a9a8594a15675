//! Sparse tensors, as the operations of a group take them.

use pyo3::prelude::*;
use tensorwire::{Result, Sparse, Tensor};

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
    // What has gaps is refused below.
    let rows = if rows.layout().is_contiguous() {
        let all: Vec<usize> = [keys.len()].into_iter().chain(dims.iter().copied()).collect();
        &Tensor::contiguous(rows.span().clone(), rows.dtype(), &all)?
    } else {
        rows
    };
    Sparse::new(keys.clone(), rows.clone(), shape)
}
