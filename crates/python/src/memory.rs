//! Shared memory as Python sees it: of the host, a buffer, which every group of this process recognises by its address;
//! of a GPU, an array of bytes that torch and others can view.

use std::ffi::c_int;

use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorwire::device::Device;
use tensorwire::{DeviceId, Loan, Span};

use crate::context;
use crate::error::exception;
use crate::gpu::{self, Stream};

/// The shared memory of this process that lies at an address, if all of these bytes are one piece of it.
pub(crate) fn find(address: usize, len: usize) -> Option<Span> {
    context::ours_if_any()?.noted_at(address, len)
}

/// Where memory begins, in the address space of its device.
pub(crate) fn address(span: &Span) -> usize {
    span.region().addr() + span.offset()
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
        let alloc = || {
            let context = context::ours()?;
            context.alloc(nbytes).inspect(|span| context.note(span))
        };
        let span = py.detach(alloc).map_err(|error| exception(py, &error))?;
        return Ok(Memory { span, loan: None, stream: None });
    };
    let (stream, span) = py
        .detach(|| {
            let gpu = gpu::open(ordinal)?;
            let span = Span::whole(gpu.alloc(nbytes)?);
            context::ours()?.note(&span);
            Ok((Stream { gpu, number: 0 }, span))
        })
        .map_err(|error| exception(py, &error))?;
    Ok(Memory { span, loan: None, stream: Some(stream) })
}

/// Takes memory from the pool that this process has on the host, or on the GPU with this number, with whatever is in it.
/// Small pieces share one allocation of the system. With a name, it is the same memory each time.
#[pyfunction]
#[pyo3(signature = (nbytes, gpu = None, name = None))]
pub(crate) fn pooled(
    py: Python<'_>,
    nbytes: usize,
    gpu: Option<usize>,
    name: Option<String>,
) -> PyResult<Memory> {
    let take = || {
        let gpu = gpu.map(gpu::open).transpose()?;
        let context = context::ours()?;
        let id = gpu.as_ref().map_or(DeviceId::Host, Device::id);
        let span = match name {
            Some(name) => context.named(&name, &id, nbytes)?,
            None => Span::whole(context.pool(&id)?.alloc(nbytes)?),
        };
        context.note(&span);
        Ok((span, gpu.map(|gpu| Stream { gpu, number: 0 })))
    };
    let (span, stream) = py.detach(take).map_err(|error| exception(py, &error))?;
    Ok(Memory { span, loan: None, stream })
}

/// Whether the byte at an address is shared memory of this process.
#[pyfunction]
pub(crate) fn is_shared(address: usize) -> bool {
    find(address, 1).is_some()
}

impl Memory {
    /// Memory of a rank that this process has mapped, and the GPU whose streams use it.
    pub(crate) fn mapped(span: Span, stream: Option<Stream>) -> Self {
        Self { span, loan: None, stream }
    }

    /// Memory of the host that an operation has made.
    pub(crate) fn ours(span: Span) -> Self {
        if let Some(context) = context::ours_if_any() {
            context.note(&span);
        }
        Self { span, loan: None, stream: None }
    }

    /// Memory that was lent to this process.
    pub(crate) fn lent(loan: Loan, stream: Option<Stream>) -> Self {
        let span = loan.span().clone();
        if let Some(context) = context::ours_if_any() {
            context.note(&span);
        }
        Self { span, loan: Some(loan), stream }
    }
}

impl Drop for Memory {
    /// Memory of a GPU is let go after what the current stream has to do. What was lent is released then.
    fn drop(&mut self) {
        let Some(stream) = &self.stream else { return };
        let loan = &mut self.loan;
        Python::try_attach(|py| {
            // It may be dropped while an exception is on its way.
            let raised = PyErr::take(py);
            let number = gpu::current_stream(py, stream.ordinal());
            if let Some(raised) = raised {
                raised.restore(py);
            }
            let current = gpu::Stream { gpu: stream.gpu.clone(), number };
            // Detached: where all points are taken, a queue is waited for.
            let done = py.detach(|| match loan {
                Some(_) if current.is_captured().unwrap_or(true) => {
                    // SAFETY: torch's current stream, which lives as long as torch, or the default stream.
                    unsafe { current.graph_keeps(loan.take()) };
                    Ok(())
                }
                // SAFETY: torch's current stream, which lives as long as torch, or the default stream.
                Some(loan) => unsafe { current.queue(|queue| loan.used_by(queue)) }.map_err(|error| {
                    format!("memory of a GPU is released, whatever its stream still does with it: {error}")
                }),
                // SAFETY: as above.
                None => unsafe { current.keep(self.span.clone()) }
                    .map_err(|error| format!("memory of a GPU is not given back: {error}")),
            });
            if let Err(text) = done {
                tracing::warn!("{text}");
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
        let address = address(&self.span);
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
        if memory.span.region().host_addr().is_none() {
            return Err(PyBufferError::new_err("memory of a GPU is no buffer; see __cuda_array_interface__"));
        }
        let address = address(&memory.span);
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
