//! Sparse tensors, as the operations of a group take them.

use std::io::ErrorKind;
use std::sync::Arc;

use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use tensorwire::collective::SparseCall;
use tensorwire::{Error, Result, Sparse, Tensor};

use crate::error::exception;
use crate::tensor::{Foreign, Output};

/// Who gives memory for the rows of a result, by their number.
pub(super) struct RowMemory {
    pub(super) memory: Py<PyAny>,
    /// Dimensions of a row.
    pub(super) dims: Vec<usize>,
}

impl RowMemory {
    fn rows(&self, count: usize) -> Result<Tensor> {
        let asked = Python::try_attach(|py| {
            let rows: Output = self.memory.bind(py).call1((count,))?.extract()?;
            let all: Vec<usize> = [count].into_iter().chain(self.dims.iter().copied()).collect();
            Ok(Tensor::contiguous(rows.tensor.span().clone(), rows.tensor.dtype(), &all))
        });
        let failed = |error: PyErr| {
            let text = format!("memory for {count} rows of a sparse result: {error}");
            let is_short = Python::try_attach(|py| {
                let name = error.get_type(py).name().map(|name| name.to_string()).unwrap_or_default();
                error.is_instance_of::<PyMemoryError>(py) || name.contains("OutOfMemory")
            });
            refusal(text, is_short == Some(true))
        };
        asked.ok_or_else(|| Error::misuse("Python is shutting down"))?.map_err(failed)?
    }
}

/// Why this rank cannot go on.
pub(super) fn refusal(text: String, is_short: bool) -> Error {
    if is_short { Error::io(text, ErrorKind::OutOfMemory) } else { Error::misuse(text) }
}

/// Has the rows of the result lie in memory of the caller's, where it gives some.
pub(super) fn in_memory(call: SparseCall<'_>, memory: Option<Arc<RowMemory>>) -> SparseCall<'_> {
    match memory {
        Some(memory) => call.rows_in(move |count| memory.rows(count)),
        None => call,
    }
}

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
