//! The store in a file.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use tensorwire::store;

use crate::interrupt::interruptible;
use crate::store::Store;

/// A store in a file, shared by all processes that open it.
#[pyclass(extends = Store, frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct FileStore;

#[pymethods]
impl FileStore {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<PyClassInitializer<Self>> {
        let file = interruptible(py, move || store::FileStore::open(path), drop)?;
        Ok(PyClassInitializer::from(Store::over(Arc::new(file))).add_subclass(Self))
    }
}
