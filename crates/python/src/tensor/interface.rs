//! NumPy arrays of types that NumPy itself does not know (bfloat16, float8): they have no buffer, but an interface.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorwire::Dtype;

use super::{Facts, Foreign, misuse, unknown};
use crate::error::exception;

/// The tensor, if it is such an array.
pub(super) fn tensor(value: &Bound<'_, PyAny>) -> PyResult<Option<Foreign>> {
    let py = value.py();
    let Ok(interface) = value.getattr("__array_interface__") else { return Ok(None) };
    let Ok(interface) = interface.cast_into::<PyDict>() else { return Ok(None) };
    let get = |key: &str| -> PyResult<Bound<'_, PyAny>> {
        let missing = || misuse(py, format!("an array interface without {key:?}"));
        interface.get_item(key)?.ok_or_else(missing)
    };
    let name = value.getattr("dtype")?.str()?.to_string();
    let Ok(dtype) = name.parse::<Dtype>() else { return Err(unknown::refused(value, None)) };
    let (address, readonly): (usize, bool) = get("data")?.extract()?;
    let shape: Vec<usize> = get("shape")?.extract()?;
    let steps: Option<Vec<isize>> = match interface.get_item("strides")? {
        Some(strides) => strides.extract()?,
        None => None,
    };
    let size = dtype.size() as isize;
    if steps.iter().flatten().any(|step| step % size != 0) {
        return Err(misuse(py, format!("strides of {steps:?} bytes are not whole elements of {size} bytes")));
    }
    let strides: Option<Vec<isize>> = steps.map(|steps| steps.iter().map(|step| step / size).collect());
    let facts = Facts { address, dtype, shape: &shape, strides: strides.as_deref(), gpu: None };
    let keep = Box::new((value.clone().unbind(), interface.clone().unbind()));
    // SAFETY: the interface of an array says where its elements lie, for as long as the array lives.
    let found = unsafe { Foreign::new(facts, keep, !readonly) };
    found.map(Some).map_err(|error| exception(py, &error))
}
