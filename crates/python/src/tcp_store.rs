//! The client of TCP stores.

use std::sync::Arc;

use pyo3::prelude::*;
use tensorwire::store;

use crate::interrupt::interruptible;
use crate::store::Store;
use crate::timeout::Timeout;

/// A client of a TcpServer, or of torch's TCPStore server. It tries to connect until the time-out.
#[pyclass(extends = Store, frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct TcpStore;

#[pymethods]
impl TcpStore {
    #[new]
    #[pyo3(signature = (host, port, timeout=None))]
    fn new(
        py: Python<'_>,
        host: String,
        port: u16,
        timeout: Option<Timeout>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let timeout =
            timeout.map(|timeout| timeout.duration(py)).transpose()?.unwrap_or(store::DEFAULT_TIMEOUT);
        let client = interruptible(py, move || store::TcpStore::connect(&host, port, timeout), drop)?;
        Ok(PyClassInitializer::from(Store::over(Arc::new(client))).add_subclass(Self))
    }
}
