//! Shared memory as Python sees it: a buffer, which every group of this process recognises by its address.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, PoisonError, RwLock, Weak};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use tensorwire::device::Region;
use tensorwire::device::sync::{AtomicUsize, Ordering};
use tensorwire::{Error, Span};

use crate::context;
use crate::error::exception;

/// What Python has of our shared memory, by address.
static KNOWN: RwLock<BTreeMap<usize, Weak<dyn Region>>> = RwLock::new(BTreeMap::new());
/// How many there are; looked at without the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Shared memory, as a writable buffer. Collectives on it, or on any part of it, copy each byte only once.
///
/// It is given back when nothing refers to it any more.
#[pyclass(frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct Memory {
    span: Span,
}

/// Allocates zeroed shared memory.
#[pyfunction]
pub(crate) fn alloc(py: Python<'_>, nbytes: usize) -> PyResult<Memory> {
    let span = py.detach(|| context::ours()?.alloc(nbytes)).map_err(|error| exception(py, &error))?;
    let Some(address) = span.region().host_addr() else {
        return Err(exception(py, &Error::Device("shared memory without an address".into())));
    };
    if nbytes > 0 {
        let mut known = KNOWN.write().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, region| region.strong_count() > 0);
        known.insert(address, Arc::downgrade(span.region()));
        COUNT.store(known.len(), Ordering::Release);
    }
    Ok(Memory { span })
}

/// The shared memory that lies at an address, if all of these bytes are one piece of it.
pub(crate) fn find(address: usize, len: usize) -> Option<Span> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let known = KNOWN.read().unwrap_or_else(PoisonError::into_inner);
    let (start, region) = known.range(..=address).next_back()?;
    let offset = address - start;
    Span::new(region.upgrade()?, offset..offset.checked_add(len)?).ok()
}

#[pymethods]
impl Memory {
    /// Its size.
    #[getter]
    fn nbytes(&self) -> usize {
        self.span.len()
    }

    fn __len__(&self) -> usize {
        self.span.len()
    }

    fn __repr__(&self) -> String {
        format!("<tensorwire.Memory of {} bytes>", self.span.len())
    }

    /// # Safety
    /// The interpreter calls it with a view to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = slf.get();
        let address = memory.span.region().host_addr().unwrap_or(0);
        let len = ffi::Py_ssize_t::try_from(memory.span.len())
            .map_err(|_| PyBufferError::new_err("it is too large for a buffer"))?;
        // SAFETY: the region stays mapped and writable until the object that the view refers to is gone; the view holds
        // a reference to it.
        let status = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), address as *mut std::ffi::c_void, len, 0, flags)
        };
        if status == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
