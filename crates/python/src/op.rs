//! Reduction operations as Python names them.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyString;
use tensorwire::{Error, ReduceOp};

use crate::error::exception;
use crate::tensor::Foreign;

/// The argument `op`: a name, or `("premul_sum", factor)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Op(pub(crate) ReduceOp);

impl Default for Op {
    fn default() -> Self {
        Self(ReduceOp::Sum)
    }
}

impl Op {
    /// Refuses tensors whose elements can only be moved.
    pub(crate) fn check<'a>(
        self,
        py: Python<'_>,
        tensors: impl IntoIterator<Item = &'a Foreign>,
    ) -> PyResult<()> {
        tensors.into_iter().try_for_each(|tensor| tensor.check(py, self.0))
    }
}

/// The name, or with a factor `("premul_sum", factor)`.
impl<'py> IntoPyObject<'py> for Op {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        match self.0 {
            ReduceOp::PremulSum(factor) => Ok(("premul_sum", factor).into_pyobject(py)?.into_any()),
            op => Ok(PyString::intern(py, name(op)).into_any()),
        }
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

/// All without a factor, by their names.
const NAMES: [(&str, ReduceOp); 8] = [
    ("sum", ReduceOp::Sum),
    ("product", ReduceOp::Product),
    ("min", ReduceOp::Min),
    ("max", ReduceOp::Max),
    ("avg", ReduceOp::Avg),
    ("band", ReduceOp::Band),
    ("bor", ReduceOp::Bor),
    ("bxor", ReduceOp::Bxor),
];

fn named(py: Python<'_>, name: &str) -> PyResult<ReduceOp> {
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, op)| *op).ok_or_else(|| {
        let known = NAMES.map(|(name, _)| name).join(", ");
        let text = format!("there is no op {name:?}; there are {known} and (\"premul_sum\", factor)");
        exception(py, &Error::misuse(text))
    })
}

fn name(op: ReduceOp) -> &'static str {
    NAMES.iter().find(|(_, known)| *known == op).map_or("premul_sum", |(name, _)| name)
}
