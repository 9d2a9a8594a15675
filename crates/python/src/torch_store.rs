//! Stub.
use std::sync::Arc;
use pyo3::prelude::*;
pub(crate) fn adapt(_py: Python<'_>, object: &Bound<'_, PyAny>) -> PyResult<Arc<dyn tensorwire::store::Store>> {
    Ok(object.cast::<crate::store::Store>()?.get().kind())
}
