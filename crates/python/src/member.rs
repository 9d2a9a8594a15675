//! The ranks of a group, as Python sees them.

use pyo3::prelude::*;

/// One rank of a group, and where it runs.
#[pyclass(frozen, eq, module = "tensorwire")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Member(tensorwire::Member);

impl Member {
    pub(crate) fn of(member: &tensorwire::Member) -> Self {
        Self(member.clone())
    }
}

#[pymethods]
impl Member {
    /// Its rank.
    #[getter]
    fn rank(&self) -> usize {
        self.0.rank
    }

    /// The name of its host.
    #[getter]
    fn host(&self) -> &str {
        &self.0.host
    }

    /// Its process, as that sees itself.
    #[getter]
    fn pid(&self) -> u32 {
        self.0.pid
    }

    /// The random name of its process, 32 hexadecimal digits: two processes never have the same.
    #[getter]
    fn identity(&self) -> String {
        self.0.identity.to_string()
    }

    /// As errors name it: "rank 1 (host a, pid 812)".
    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<tensorwire.Member {}>", self.0)
    }

    fn __hash__(&self) -> u64 {
        self.0.rank as u64 ^ u64::from(self.0.pid) << 32
    }
}
