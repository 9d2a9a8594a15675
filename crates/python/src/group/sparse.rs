//! Sparse tensors, as the operations of a group take them.

use std::io::ErrorKind;
use std::sync::{Arc, OnceLock};

use pyo3::exceptions::{PyException, PyMemoryError};
use pyo3::prelude::*;
use tensorwire::collective::SparseCall;
use tensorwire::{Error, Result, Sparse, Tensor};

use crate::error::exception;
use crate::memory::Memory;
use crate::tensor::{Foreign, Output};
use crate::{callbacks, interrupt};

/// What an operation asks of Python, on the thread that runs it.
pub(super) struct Asked {
    /// Gives memory for the rows of the result, by their number.
    pub(super) memory: Option<Py<PyAny>>,
    /// Readies what the result becomes.
    pub(super) make: Option<Py<PyAny>>,
    /// Dimensions of a row.
    pub(super) dims: Vec<usize>,
    /// What the result has become.
    pub(super) made: Arc<OnceLock<Py<PyAny>>>,
}

impl Asked {
    /// Has a call ask. `by_caller` says that it runs on the thread of its caller.
    pub(super) fn by<'a>(self: &Arc<Self>, call: SparseCall<'a>, by_caller: bool) -> SparseCall<'a> {
        let mut call = call;
        if self.memory.is_some() {
            let asked = self.clone();
            call = call.rows_in(move |count| asked.rows(count, by_caller));
        }
        if self.make.is_some() {
            let asked = self.clone();
            call = call.prepared(move |result| asked.ready(result, by_caller));
        }
        call
    }

    fn rows(&self, count: usize, by_caller: bool) -> Result<Tensor> {
        let given = attached(by_caller, |py| {
            let Some(memory) = &self.memory else { return Err(PyMemoryError::new_err(())) };
            let rows: Output = memory.bind(py).call1((count,))?.extract()?;
            let all: Vec<usize> = [count].into_iter().chain(self.dims.iter().copied()).collect();
            Ok(Tensor::contiguous(rows.tensor.span().clone(), rows.tensor.dtype(), &all))
        });
        given.map_err(|error| failed(&format!("memory for {count} rows of a sparse result"), error))?
    }

    /// Readies what a result becomes, and gives what finishes it.
    fn ready(&self, result: &Sparse, by_caller: bool) -> Result<Box<dyn FnOnce() -> Result<()>>> {
        let what = "making a sparse tensor of the result";
        let readied = attached(by_caller, |py| {
            let Some(make) = &self.make else { return Err(PyMemoryError::new_err(())) };
            let memory = |tensor: &Tensor| Bound::new(py, Memory::ours(tensor.span().clone()));
            let made = make.bind(py).call1((memory(result.keys())?, memory(result.rows())?))?;
            made.extract::<(Py<PyAny>, Option<Py<PyAny>>)>()
        });
        let (made, finish) = readied.map_err(|error| failed(what, error))?;
        let there = self.made.clone();
        Ok(Box::new(move || {
            if let Some(finish) = finish {
                attached(by_caller, |py| finish.bind(py).call0().map(|_| drop(finish)))
                    .map_err(|error| failed(what, error))?;
            }
            let _ = there.set(made);
            Ok(())
        }))
    }
}

/// Runs Python code. On a thread of ours it is refused when the interpreter is about to end.
fn attached<T>(
    by_caller: bool,
    body: impl FnOnce(Python<'_>) -> PyResult<T>,
) -> std::result::Result<T, Option<PyErr>> {
    let ran = if by_caller { Python::try_attach(body) } else { callbacks::attached(body) };
    ran.ok_or(None)?.map_err(Some)
}

/// The error of an operation that Python code could not do its part of.
fn failed(what: &str, error: Option<PyErr>) -> Error {
    let Some(error) = error else { return Error::misuse(format!("{what}: Python is shutting down")) };
    let told = Python::try_attach(|py| {
        // A signal handler has raised it in a thread that waits.
        if !error.is_instance_of::<PyException>(py) {
            return interrupt::keep(error.clone_ref(py));
        }
        let text = format!("{what}: {error}");
        let name = error.get_type(py).name().map(|name| name.to_string()).unwrap_or_default();
        let says = |words| text.contains(words);
        let is_short = error.is_instance_of::<PyMemoryError>(py)
            || name.contains("OutOfMemory")
            || says("allocate memory")
            || says("out of memory");
        refusal(text, is_short)
    });
    told.unwrap_or_else(|| Error::misuse(format!("{what}: Python is shutting down")))
}

/// Why this rank cannot go on.
pub(super) fn refusal(text: String, is_short: bool) -> Error {
    if is_short { Error::io(text, ErrorKind::OutOfMemory) } else { Error::misuse(text) }
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
