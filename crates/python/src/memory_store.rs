//! The store of one process.

use std::sync::Arc;

use pyo3::prelude::*;
use tensorwire::store;

use crate::store::Store;

/// A store in this process's memory, for threads and tests.
#[pyclass(extends = Store, frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct MemoryStore;

#[pymethods]
impl MemoryStore {
    #[new]
    fn new() -> PyClassInitializer<Self> {
        PyClassInitializer::from(Store::over(Arc::new(store::MemoryStore::new()))).add_subclass(Self)
    }
}
