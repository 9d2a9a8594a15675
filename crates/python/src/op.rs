//! Reduction operations as Python names them.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use tensorwire::{Error, ReduceOp};

use crate::error::exception;

/// The argument `op`: a name, or `("premul_sum", factor)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Op(pub(crate) ReduceOp);

impl Default for Op {
    fn default() -> Self {
        Self(ReduceOp::Sum)
    }
}

impl<'py> FromPyObject<'_, 'py> for Op {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(name) = value.extract::<&str>() {
            return Ok(Self(named(value.py(), name)?));
        }
        if let Ok((name, factor)) = value.extract::<(String, f64)>()
            && name == "premul_sum"
        {
            return Ok(Self(ReduceOp::PremulSum(factor)));
        }
        let text = format!("op={}: a name like \"sum\", or (\"premul_sum\", factor)", value.repr()?);
        Err(PyTypeError::new_err(text))
    }
}

fn named(py: Python<'_>, name: &str) -> PyResult<ReduceOp> {
    Ok(match name {
        "sum" => ReduceOp::Sum,
        "product" => ReduceOp::Product,
        "min" => ReduceOp::Min,
        "max" => ReduceOp::Max,
        "avg" => ReduceOp::Avg,
        "band" => ReduceOp::Band,
        "bor" => ReduceOp::Bor,
        "bxor" => ReduceOp::Bxor,
        _ => {
            let known = "sum, product, min, max, avg, band, bor, bxor and (\"premul_sum\", factor)";
            return Err(exception(py, &Error::misuse(format!("there is no op {name:?}; there are {known}"))));
        }
    })
}
