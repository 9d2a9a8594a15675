//! Time-outs as Python gives them: a `timedelta` like torch's, or a number of seconds.

use std::time::Duration;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use tensorwire::Error;

use crate::error::exception;

/// A time-out argument.
#[derive(Debug)]
pub(crate) enum Timeout {
    Delta(Duration),
    Seconds(f64),
}

impl<'py> FromPyObject<'_, 'py> for Timeout {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(delta) = value.extract() {
            return Ok(Self::Delta(delta));
        }
        value.extract().map(Self::Seconds).or_else(|_| {
            let text =
                format!("timeout={}: a timedelta or a number of seconds from 0 on is needed", value.str()?);
            Err(PyTypeError::new_err(text))
        })
    }
}

impl Timeout {
    pub(crate) fn duration(&self, py: Python<'_>) -> PyResult<Duration> {
        match *self {
            Self::Delta(duration) => Ok(duration),
            Self::Seconds(seconds) => Duration::try_from_secs_f64(seconds).map_err(|_| {
                exception(
                    py,
                    &Error::misuse(format!("timeout={seconds}: a number of seconds from 0 on is needed")),
                )
            }),
        }
    }
}
