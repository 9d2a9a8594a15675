//! The server of TCP stores.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use tensorwire::store;

use crate::error::exception;

/// A server for TcpStore, and for torch's TCPStore. It ends with close(), or when nobody holds it any more.
///
/// Port 0 lets the system choose; an empty host means all addresses of this machine.
#[pyclass(frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct TcpServer {
    server: Mutex<Option<store::TcpServer>>,
    address: SocketAddr,
}

#[pymethods]
impl TcpServer {
    #[new]
    #[pyo3(signature = (host="", port=0))]
    fn new(py: Python<'_>, host: &str, port: u16) -> PyResult<Self> {
        let bind = || {
            if host.is_empty() {
                store::TcpServer::bind_all(port)
            } else {
                store::TcpServer::bind((host, port))
            }
        };
        let server = py.detach(bind).map_err(|error| exception(py, &error))?;
        let address = server.local_addr();
        Ok(Self { server: Mutex::new(Some(server)), address })
    }

    /// The address it listens at.
    #[getter]
    fn host(&self) -> String {
        self.address.ip().to_string()
    }

    /// The port it listens at.
    #[getter]
    fn port(&self) -> u16 {
        self.address.port()
    }

    /// Ends it. Connected clients get an error.
    fn close(&self, py: Python<'_>) {
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(server));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, py: Python<'_>, _type: Py<PyAny>, _value: Py<PyAny>, _traceback: Py<PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("<tensorwire.TcpServer at {}>", self.address)
    }
}
