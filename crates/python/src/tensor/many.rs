//! Several tensors, as an argument.

use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::{input, misuse};

/// A list of tensors, or the one tensor that somebody gave instead.
#[derive(Debug)]
pub(crate) enum Many<T> {
    List(Vec<T>),
    /// Its Python type.
    One(String),
}

impl<'py, T> FromPyObject<'_, 'py> for Many<T>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let error = match value.extract::<Vec<T>>() {
            Ok(list) => return Ok(Self::List(list)),
            Err(error) => error,
        };
        let is_list = value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>();
        if is_list || input(&value).is_err() {
            return Err(error);
        }
        Ok(Self::One(value.get_type().fully_qualified_name()?.to_string()))
    }
}

impl<T> Many<T> {
    /// The list; for one tensor an error that names the operation for it.
    pub(crate) fn list(self, py: Python<'_>, operation: &str) -> PyResult<Vec<T>> {
        let kind = match self {
            Self::List(list) => return Ok(list),
            Self::One(kind) => kind,
        };
        let instead = match operation {
            "all_gather" | "all_gather_coalesced" => "all_gather_into takes one tensor for all parts",
            "reduce_scatter" | "reduce_scatter_coalesced" => {
                "reduce_scatter_from takes one tensor with all parts"
            }
            "all_to_all" => "all_to_all_into takes one tensor with all parts",
            "gather" | "scatter" => {
                "split it into equal parts, one for each rank; those of numpy.split(x, group.world) are views of it"
            }
            _ => "all_reduce takes one tensor",
        };
        Err(misuse(py, format!("{operation} needs a list of tensors and got one {kind}; {instead}")))
    }
}
