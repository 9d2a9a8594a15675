//! The Python module tensorwire._native: one class per file, errors in `error.rs`.

use pyo3::prelude::*;

/// What the package `tensorwire` is made of.
#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
