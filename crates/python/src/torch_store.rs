//! Stub.
use pyo3::prelude::*;
use std::sync::Arc;
pub(crate) fn adapt(
    _py: Python<'_>,
    object: &Bound<'_, PyAny>,
) -> PyResult<Arc<dyn tensorwire::store::Store>> {
    Ok(object.cast::<crate::store::Store>()?.get().kind())
}
