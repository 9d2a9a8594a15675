//! A store within a store.

use std::sync::Arc;

use pyo3::prelude::*;
use tensorwire::store;

use crate::store::Store;

/// A part of another store: its keys are kept apart by a prefix.
#[pyclass(extends = Store, frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct PrefixStore;

#[pymethods]
impl PrefixStore {
    #[new]
    fn new(prefix: &str, store: &Bound<'_, Store>) -> PyClassInitializer<Self> {
        PyClassInitializer::from(Store::over(Arc::new(store::PrefixStore::new(prefix, store.get().kind()))))
            .add_subclass(Self)
    }
}
