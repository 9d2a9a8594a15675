//! Operations in flight, as Python sees them.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tensorwire::device::cuda::Gpu;
use tensorwire::device::fork::Birth;
use tensorwire::{Deadline, Error, RecvAny, Sparse, SparseWork, Tensor, pipe};

use crate::callbacks;
use crate::error::exception;
use crate::gpu::Stream;
use crate::interrupt::blocking;
use crate::memory::Memory;
use crate::timeout::Timeout;

/// An operation: in flight, or over. Dropping it does not stop the operation. If an await of a receive is cancelled, the
/// receive is withdrawn, and the next one gets the message. A send of a pipe is taken back. Other operations go on.
#[pyclass(frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct Work {
    kind: Kind,
    /// What the result of a sparse tensor has become, or the memory of its keys and rows, once somebody has asked for it.
    made: Arc<OnceLock<Py<PyAny>>>,
    /// The GPU whose streams it is for.
    gpu: Option<Gpu>,
    /// A forked child has a copy that nobody will ever end.
    birth: Birth,
}

#[derive(Debug)]
enum Kind {
    /// It was waited for when it was called, and went well.
    Over {
        name: &'static str,
        duration: Duration,
        gave: Gave,
    },
    Started(Started),
}

/// What an operation has given beside what it wrote.
#[derive(Debug)]
pub(crate) enum Gave {
    Nothing,
    /// The rank that a message came from.
    Source(usize),
    Sparse(Box<Sparse>),
}

/// An operation that was started.
#[derive(Debug)]
pub(crate) enum Started {
    One(tensorwire::Work),
    FromAny(RecvAny),
    Sparse(SparseWork),
    /// A message of a pipe.
    Sent(pipe::Pending<()>),
}

impl Started {
    pub(crate) fn inner(&self) -> &tensorwire::Work {
        match self {
            Self::One(work) => work,
            Self::FromAny(any) => any.work(),
            Self::Sparse(sparse) => sparse.work(),
            Self::Sent(sent) => sent.work(),
        }
    }
}

impl Work {
    pub(crate) fn over(name: &'static str, duration: Duration, gave: Gave) -> Self {
        Self::new(Kind::Over { name, duration, gave })
    }

    pub(crate) fn started(work: Started) -> Self {
        Self::new(Kind::Started(work))
    }

    /// One on tensors of a GPU, which was put on a stream.
    pub(crate) fn queued(work: Started, gpu: Gpu) -> Self {
        let mut queued = Self::started(work);
        queued.gpu = Some(gpu);
        queued
    }

    fn new(kind: Kind) -> Self {
        Self { kind, made: Arc::default(), gpu: None, birth: Birth::now() }
    }

    /// The same, whose result will be there.
    pub(crate) fn making(mut self, made: Arc<OnceLock<Py<PyAny>>>) -> Self {
        self.made = made;
        self
    }

    /// The sparse tensor that it has given, if it is such an operation.
    fn sparse(&self, py: Python<'_>) -> PyResult<Option<Sparse>> {
        match &self.kind {
            Kind::Over { gave: Gave::Sparse(sparse), .. } => Ok(Some((**sparse).clone())),
            Kind::Started(Started::Sparse(work)) => {
                let unready = || {
                    Err(Error::misuse("the result of an operation that is not over yet; wait for it first"))
                };
                let result = work.result().unwrap_or_else(unready);
                result.map(Some).map_err(|error| exception(py, &error))
            }
            _ => Ok(None),
        }
    }

    /// Refuses to wait in a forked child for what its parent started.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.birth.check("the work").map_err(|error| exception(py, &error.into()))
    }

    /// The operation, if it is in flight, which it is not in a forked child.
    fn in_flight<'a>(slf: &'a Bound<'_, Self>) -> PyResult<Option<&'a tensorwire::Work>> {
        match slf.get().inner().filter(|inner| !inner.is_over()) {
            Some(inner) => slf.get().check(slf.py()).map(|()| Some(inner)),
            None => Ok(None),
        }
    }

    /// Has the group's next call raise how an operation on tensors of a GPU has failed, if nobody has asked by then, though
    /// somebody keeps this.
    pub(crate) fn leave_unattended(&self) {
        if let Some(work) = self.inner() {
            work.leave_unattended();
        }
    }

    /// The operation, where it may still be in flight.
    fn inner(&self) -> Option<&tensorwire::Work> {
        match &self.kind {
            Kind::Over { .. } => None,
            Kind::Started(started) => Some(started.inner()),
        }
    }
}

#[pymethods]
impl Work {
    /// Waits until it is over; raises how it failed. With a time-out that passes first, the operation itself goes on.
    ///
    /// An operation on tensors of a GPU: without a time-out, torch's current stream waits for it, and this thread only until
    /// it is queued.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Timeout>) -> PyResult<()> {
        let Some(work) = self.inner() else { return Ok(()) };
        let timeout = timeout.map(|timeout| timeout.duration(py)).transpose()?;
        if !work.is_done() {
            self.check(py)?;
            if let (Some(gpu), None) = (&self.gpu, timeout) {
                let stream = Stream::current(py, gpu.clone())?;
                // SAFETY: torch's current stream, which lives as long as torch, or the default stream.
                return blocking(py, || unsafe { stream.queue(|queue| work.wait_on(queue)) });
            }
        }
        blocking(py, || match timeout {
            Some(timeout) => work.wait_by(Deadline::after(timeout)),
            None => work.wait(),
        })
    }

    /// Whether it is over, well or not.
    fn done(&self) -> bool {
        self.inner().is_none_or(tensorwire::Work::is_done)
    }

    /// How it failed, if it has.
    fn error(&self, py: Python<'_>) -> Option<PyErr> {
        self.inner()?.error().map(|error| exception(py, &error))
    }

    /// Calls `callback(work)` once it is over: now, if it is over already, or else on a thread that may wait for other
    /// works.
    fn on_done(slf: Bound<'_, Self>, callback: Py<PyAny>) -> PyResult<()> {
        let Some(inner) = Self::in_flight(&slf)? else {
            if let Some(inner) = slf.get().inner() {
                // Somebody is told.
                let _ = inner.error();
            }
            return callback.call1(slf.py(), (slf,)).map(drop);
        };
        let own = slf.clone().unbind();
        inner.on_done(move |_| call_soon(callback, own));
        Ok(())
    }

    /// The same, for those that then ask how it ended: until they do, a receive can still be withdrawn.
    fn _on_over(slf: Bound<'_, Self>, callback: Py<PyAny>) -> PyResult<()> {
        let Some(inner) = Self::in_flight(&slf)? else {
            return callback.call1(slf.py(), (slf,)).map(drop);
        };
        let own = slf.clone().unbind();
        inner.on_over(move || call_soon(callback, own));
        Ok(())
    }

    /// Calls `callback(work)` once wait() does not hold its caller any more: when an operation on tensors of a GPU is queued.
    fn _on_queued(slf: Bound<'_, Self>, callback: Py<PyAny>) -> PyResult<()> {
        let Some(inner) = Self::in_flight(&slf)? else {
            return callback.call1(slf.py(), (slf,)).map(drop);
        };
        let own = slf.clone().unbind();
        inner.on_queued(move || call_soon(callback, own));
        Ok(())
    }

    /// Whether it has failed. Nobody is told how.
    fn _has_failed(&self) -> bool {
        self.inner().is_some_and(tensorwire::Work::has_failed)
    }

    /// The number of the GPU whose tensors it is on; None for operations on the host.
    #[getter]
    fn gpu(&self) -> Option<usize> {
        self.gpu.as_ref().map(|gpu| gpu.facts().ordinal)
    }

    /// Withdraws a receive: it takes no message and ends with an error. A message that has begun to arrive goes to the next
    /// receive that asks for it. A send of a pipe is taken back. False where nothing was withdrawn: it is over, or neither of the two.
    fn withdraw(&self, py: Python<'_>) -> bool {
        self.birth.is_ours()
            && py.detach(|| match &self.kind {
                Kind::Started(Started::Sent(sent)) => sent.cancel(),
                _ => self.inner().is_some_and(tensorwire::Work::withdraw),
            })
    }

    /// Seconds from the begin of its execution to its end; None as long as it is not over.
    #[getter]
    fn duration(&self) -> Option<f64> {
        match &self.kind {
            Kind::Over { duration, .. } => Some(duration.as_secs_f64()),
            _ => Some(self.inner()?.duration()?.as_secs_f64()),
        }
    }

    /// The rank that a message came from that was received from any; None for other operations, or as long as it is not
    /// over.
    #[getter]
    fn source(&self) -> Option<usize> {
        match &self.kind {
            Kind::Over { gave: Gave::Source(source), .. } => Some(*source),
            Kind::Started(Started::FromAny(any)) => any.source(),
            _ => None,
        }
    }

    /// What all_reduce_sparse gives; None for other operations, which write their results to tensors. Raises how it
    /// failed, or MisuseError as long as it is not over.
    fn result<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(sparse) = self.sparse(py)? else { return Ok(None) };
        if let Some(made) = self.made.get() {
            return Ok(Some(made.bind(py).clone()));
        }
        let memory = |tensor: &Tensor| Bound::new(py, Memory::ours(tensor.span().clone()));
        let parts = PyTuple::new(py, [memory(sparse.keys())?, memory(sparse.rows())?])?;
        // Of two threads that ask at once, one gets what the other has made.
        Ok(Some(self.made.get_or_init(|| parts.into_any().unbind()).bind(py).clone()))
    }

    /// What it does, like "all_reduce".
    #[getter]
    fn name(&self) -> &str {
        match &self.kind {
            Kind::Over { name, .. } => name,
            Kind::Started(started) => started.inner().what(),
        }
    }

    fn __await__<'py>(slf: Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let args = PyTuple::new(slf.py(), [slf.as_any()])?;
        slf.py().import("tensorwire.aio")?.getattr("wait")?.call1(args)
    }

    fn __repr__(&self) -> String {
        let state = match self.inner() {
            Some(work) if !work.is_over() => "in flight",
            Some(work) if work.has_failed() => "failed",
            _ => "done",
        };
        format!("<tensorwire.Work {} {state}>", self.name())
    }
}

impl Drop for Work {
    /// When Python lets go of an object is no decision of the program: a receive goes on. In a forked child it is none.
    fn drop(&mut self) {
        if let Some(work) = self.inner()
            && self.birth.is_ours()
        {
            work.clone().detach();
        }
    }
}

/// Calls back on a thread that may wait for other works.
pub(crate) fn call_soon<T: pyo3::PyClass>(callback: Py<PyAny>, work: Py<T>) {
    callbacks::run(Box::new(move || {
        // Nobody waits for a callback when the interpreter is gone. It is dropped here, and not behind it: what is
        // dropped detached goes only when somebody calls us again.
        Python::try_attach(move |py| {
            if let Err(error) = callback.call1(py, (work,)) {
                error.write_unraisable(py, Some(callback.bind(py)));
            }
        });
    }));
}
