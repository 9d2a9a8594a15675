//! Shared memory as Python sees it: of the host, a buffer, which every group of this process recognises by its address;
//! of a GPU, an array of bytes that torch and others can view.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, PoisonError, RwLock, Weak};

use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorwire::device::fork::PerProcess;
use tensorwire::device::sync::{AtomicUsize, Ordering};
use tensorwire::device::{Device, Region};
use tensorwire::{DeviceId, Loan, Span};

use crate::context;
use crate::error::exception;
use crate::gpu::{self, Stream};

/// What Python has of our shared memory. One address space holds that of the host and of all GPUs. What a forked child has
/// inherited is ordinary memory there: it cannot hand it to others.
static SHARED: PerProcess<Shared> =
    PerProcess::new(|| Shared { known: RwLock::new(Known::new()), count: AtomicUsize::new(0) });

struct Shared {
    known: RwLock<Known>,
    /// How many there are; looked at without the lock.
    count: AtomicUsize,
}

/// From how many on those that are gone are looked for.
const MANY: usize = 64;

struct Known {
    /// By address; memory that was lent may lie in other memory, and the same may be there several times.
    regions: BTreeMap<(usize, u64), Entry>,
    /// The next number.
    next: u64,
    /// No region is longer.
    longest: usize,
    /// When there are so many, those that are gone are taken out.
    tidy: usize,
}

struct Entry {
    len: usize,
    region: Weak<dyn Region>,
}

impl Known {
    fn new() -> Self {
        Self { regions: BTreeMap::new(), next: 0, longest: 0, tidy: MANY }
    }

    fn add(&mut self, region: &Arc<dyn Region>) {
        if self.regions.len() >= self.tidy {
            self.regions.retain(|_, entry| entry.region.strong_count() > 0);
            self.longest = self.regions.values().map(|entry| entry.len).max().unwrap_or(0);
            self.tidy = MANY.max(self.regions.len() * 2);
        }
        let entry = Entry { len: region.len(), region: Arc::downgrade(region) };
        self.regions.insert((region.addr(), self.next), entry);
        self.next += 1;
        self.longest = self.longest.max(region.len());
    }

    /// The memory at an address.
    fn find(&self, address: usize, len: usize) -> Option<Span> {
        let end = address.checked_add(len)?;
        for ((start, _), Entry { len: long, region }) in self.regions.range(..=(address, u64::MAX)).rev() {
            if start.saturating_add(self.longest) < end {
                return None;
            }
            if start + long >= end
                && let Some(region) = region.upgrade()
            {
                return Span::new(region, address - start..end - start).ok();
            }
        }
        None
    }
}

/// Has memory found by its address.
fn note(span: &Span) {
    if !span.is_empty() {
        let shared = SHARED.get();
        let mut known = shared.known.write().unwrap_or_else(PoisonError::into_inner);
        known.add(span.region());
        shared.count.store(known.regions.len(), Ordering::Release);
    }
}

/// The shared memory of this process that lies at an address, if all of these bytes are one piece of it.
pub(crate) fn find(address: usize, len: usize) -> Option<Span> {
    let shared = SHARED.get();
    if shared.count.load(Ordering::Acquire) == 0 {
        return None;
    }
    shared.known.read().unwrap_or_else(PoisonError::into_inner).find(address, len)
}

/// Shared memory. On the host it is a writable buffer; collectives on it, or on any part of it, copy each byte only once.
/// On a GPU it has `__cuda_array_interface__`.
///
/// It is given back when nothing refers to it any more.
#[pyclass(frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct Memory {
    span: Span,
    /// What another process, or this one, has lent.
    loan: Option<Loan>,
    /// On a GPU: the stream on which its data is ready.
    stream: Option<Stream>,
}

/// Allocates zeroed shared memory: of the host, or of the GPU with this number.
#[pyfunction]
#[pyo3(signature = (nbytes, gpu = None))]
pub(crate) fn alloc(py: Python<'_>, nbytes: usize, gpu: Option<usize>) -> PyResult<Memory> {
    let Some(ordinal) = gpu else {
        let span = py.detach(|| context::ours()?.alloc(nbytes)).map_err(|error| exception(py, &error))?;
        note(&span);
        return Ok(Memory { span, loan: None, stream: None });
    };
    let (stream, region) = py
        .detach(|| {
            let gpu = gpu::open(ordinal)?;
            let region = gpu.alloc(nbytes)?;
            Ok((Stream { gpu, number: 0 }, region))
        })
        .map_err(|error| exception(py, &error))?;
    let span = Span::whole(region);
    note(&span);
    Ok(Memory { span, loan: None, stream: Some(stream) })
}

impl Memory {
    /// Memory that was lent to this process.
    pub(crate) fn lent(loan: Loan, stream: Option<Stream>) -> Self {
        let span = loan.span().clone();
        note(&span);
        Self { span, loan: Some(loan), stream }
    }
}

impl Drop for Memory {
    /// What was lent is released: on a GPU, after what the current stream has to do.
    fn drop(&mut self) {
        let (Some(loan), Some(stream)) = (&self.loan, &self.stream) else { return };
        Python::try_attach(|py| {
            // It may be dropped while an exception is on its way.
            let raised = PyErr::take(py);
            let number = gpu::current_stream(py, stream.ordinal());
            if let Some(raised) = raised {
                raised.restore(py);
            }
            let current = gpu::Stream { gpu: stream.gpu.clone(), number };
            // Detached: where all points are taken, a queue is waited for.
            // SAFETY: torch's current stream, which lives as long as torch, or the default stream.
            let done = py.detach(|| unsafe { current.queue(|queue| loan.used_by(queue)) });
            if let Err(error) = done {
                tracing::warn!(
                    "memory of a GPU is released, whatever its stream still does with it: {error}"
                );
            }
        });
    }
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
        let place = match self.span.device() {
            DeviceId::Host => String::new(),
            device => format!(" on {device}"),
        };
        format!("<tensorwire.Memory of {} bytes{place}>", self.span.len())
    }

    /// The number of its GPU in this process; None on the host.
    #[getter]
    fn gpu(&self) -> Option<usize> {
        self.stream.as_ref().map(Stream::ordinal)
    }

    /// How others view memory of a GPU. Memory of the host has none.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let Some(stream) = &self.stream else {
            return Err(PyAttributeError::new_err("memory of the host has no __cuda_array_interface__"));
        };
        let interface = PyDict::new(py);
        interface.set_item("shape", (self.span.len(),))?;
        interface.set_item("typestr", "|u1")?;
        let address = self.span.region().addr() + self.span.offset();
        interface.set_item("data", (if self.span.is_empty() { 0 } else { address }, false))?;
        interface.set_item("strides", py.None())?;
        // 0 has no meaning there; 1 is the default stream.
        interface.set_item("stream", stream.number.max(1))?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }

    /// # Safety
    /// The interpreter calls it with a view to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = slf.get();
        let Some(address) = memory.span.region().host_addr() else {
            return Err(PyBufferError::new_err("memory of a GPU is no buffer; see __cuda_array_interface__"));
        };
        let address = address + memory.span.offset();
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
