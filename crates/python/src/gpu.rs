//! GPUs and streams as Python knows them: by their numbers in this process.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use tensorwire::device::Queue;
use tensorwire::device::cuda::Gpu;
use tensorwire::device::fork::PerProcess;
use tensorwire::{Error, Result, Span};

use crate::error::exception;

/// A stream of a GPU.
#[derive(Debug, Clone)]
pub(crate) struct Stream {
    pub(crate) gpu: Gpu,
    /// As the driver numbers it: its address, or 0 for the default stream.
    pub(crate) number: usize,
}

impl Stream {
    /// torch's current stream of a GPU. Refused while that records a graph: `what` and `why` say what a replay cannot do.
    pub(crate) fn current_for(py: Python<'_>, gpu: Gpu, what: &str, why: &str) -> PyResult<Self> {
        let number = current_stream(py, gpu.facts().ordinal);
        let stream = Self { gpu, number };
        if stream.is_captured().map_err(|error| exception(py, &error))? {
            let error = Error::Unsupported {
                what: format!("{what} in a graph of CUDA"),
                need: format!("a stream that records no graph: {why}"),
                have: "torch's current stream, which is being captured".into(),
            };
            return Err(exception(py, &error));
        }
        Ok(stream)
    }

    /// The same for operations of groups.
    pub(crate) fn current(py: Python<'_>, gpu: Gpu) -> PyResult<Self> {
        let why = "ranks meet on the host, which a replay does not repeat";
        Self::current_for(py, gpu, "an operation of a group", why)
    }

    /// Whether it records a graph.
    pub(crate) fn is_captured(&self) -> Result<bool> {
        // SAFETY: one of torch's streams, which live as long as torch, or the default stream.
        Ok(unsafe { self.gpu.is_capturing(self.number) }?)
    }

    pub(crate) fn ordinal(&self) -> usize {
        self.gpu.facts().ordinal
    }
}

/// GPUs that were opened. They stay open: torch uses them anyway.
static OPEN: PerProcess<Mutex<Vec<Gpu>>> = PerProcess::new(Mutex::default);

/// The GPU with this number.
pub(crate) fn open(ordinal: usize) -> Result<Gpu> {
    opened(|gpu| gpu.facts().ordinal == ordinal, || Ok(Gpu::open(ordinal)?))
}

/// The GPU with this name.
pub(crate) fn open_uuid(uuid: [u8; 16]) -> Result<Gpu> {
    opened(|gpu| gpu.facts().uuid == uuid, || Ok(Gpu::open_uuid(uuid)?))
}

/// A stream of a GPU that only the package uses, by its number; always the same.
#[pyfunction]
pub(crate) fn _own_stream(py: Python<'_>, ordinal: usize) -> PyResult<usize> {
    static OWN: PerProcess<Mutex<Vec<(usize, usize)>>> = PerProcess::new(Mutex::default);
    let mut own = OWN.get().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, number)) = own.iter().find(|(known, _)| *known == ordinal) {
        return Ok(*number);
    }
    let made = open(ordinal).and_then(|gpu| Ok(gpu.own_stream()?));
    let number = made.map_err(|error| exception(py, &error))?;
    own.push((ordinal, number));
    Ok(number)
}

fn opened(is: impl Fn(&Gpu) -> bool, open: impl FnOnce() -> Result<Gpu>) -> Result<Gpu> {
    let mut known = OPEN.get().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(gpu) = known.iter().find(|gpu| is(gpu)) {
        return Ok(gpu.clone());
    }
    let gpu = open()?;
    known.push(gpu.clone());
    Ok(gpu)
}

/// Queues on streams. They stay, as torch's streams do: a queue that goes has its last work looked after by a thread.
static QUEUES: PerProcess<Mutex<Vec<Kept>>> = PerProcess::new(Mutex::default);

/// The most queues that stay.
const MOST: usize = 256;

/// A queue by ordinal and number of its stream.
type Kept = ((usize, usize), Arc<Mutex<Box<dyn Queue>>>);

impl Stream {
    /// Does something on the queue of the stream.
    ///
    /// # Safety
    /// It is a stream of the GPU that is there now, and nobody destroys it while the call lasts.
    pub(crate) unsafe fn queue<T>(&self, work: impl FnOnce(&mut dyn Queue) -> Result<T>) -> Result<T> {
        if let Some(kept) = self.kept() {
            // One that is taken, by a thread that waits for another process, keeps nobody waiting.
            if let Ok(mut queue) = kept.try_lock() {
                return work(&mut **queue);
            }
        }
        // SAFETY: the caller's promise.
        let mut queue = unsafe { self.gpu.queue_on(self.number) }?;
        work(&mut *queue)
    }

    /// Keeps memory that is not needed here any more until the stream has come so far. If nobody can tell when that is, the
    /// memory is lost: better than given to somebody else while the stream works on it.
    ///
    /// # Safety
    /// As for [`queue`](Self::queue).
    pub(crate) unsafe fn keep(&self, span: Span) -> Result<()> {
        if self.is_captured().unwrap_or(true) {
            // SAFETY: the caller's promise.
            unsafe { self.graph_keeps(span) };
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let kept = unsafe { self.queue(|queue| Ok(queue.keep(span.region().clone())?)) };
        if kept.is_err() {
            std::mem::forget(span);
        }
        kept
    }

    /// Keeps something as long as the graph that the stream records: each replay may use it. If the graph cannot, it stays until
    /// the process ends.
    ///
    /// # Safety
    /// As for [`queue`](Self::queue).
    pub(crate) unsafe fn graph_keeps<T: Send + Sync + 'static>(&self, kept: T) {
        let kept = Arc::new(kept);
        let owned = Box::new(kept.clone());
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.gpu.record_on::<Error>(self.number, owned, |_| Ok(())) } {
            tracing::debug!(%error, "memory that was let go of while a stream records a graph stays until the process ends");
            std::mem::forget(kept);
        }
    }

    /// Adds work to the graph that the stream records, which keeps what that needs, and `also`; or, where it records none, does it
    /// on the queue of the stream.
    ///
    /// # Safety
    /// As for [`queue`](Self::queue).
    pub(crate) unsafe fn recorded(
        &self,
        also: impl Send + 'static,
        work: impl FnOnce(&mut dyn Queue) -> Result<()>,
    ) -> Result<()> {
        if self.is_captured()? {
            // SAFETY: the caller's promise.
            return unsafe { self.gpu.record_on(self.number, Box::new(also), work) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.queue(work) }
    }

    fn kept(&self) -> Option<Arc<Mutex<Box<dyn Queue>>>> {
        let key = (self.ordinal(), self.number);
        let mut queues = QUEUES.get().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, queue)) = queues.iter().find(|(known, _)| *known == key) {
            return Some(queue.clone());
        }
        if queues.len() >= MOST {
            return None;
        }
        // SAFETY: it is used only by calls that name a stream of this number that is there, and never dropped.
        let queue = Arc::new(Mutex::new(unsafe { self.gpu.queue_on(self.number) }.ok()?));
        queues.push((key, queue.clone()));
        Some(queue)
    }
}

/// torch's current stream of a GPU; the default stream where torch is not used, or cannot say.
pub(crate) fn current_stream(py: Python<'_>, ordinal: usize) -> usize {
    static ASK: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let asked =
        || torch_function(py, &ASK, "_cuda_getCurrentRawStream")?.call1((ordinal,)).ok()?.extract().ok();
    asked().unwrap_or(0)
}

/// A function of torch's that is written in C; nothing where torch was not imported, or is built without CUDA.
fn torch_function<'py>(
    py: Python<'py>,
    known: &'static PyOnceLock<Py<PyAny>>,
    name: &str,
) -> Option<Bound<'py, PyAny>> {
    if let Some(function) = known.get(py) {
        return Some(function.bind(py).clone());
    }
    let modules = py.import("sys").ok()?.getattr("modules").ok()?.cast_into::<PyDict>().ok()?;
    let torch = modules.get_item("torch").ok()?.filter(|torch| !torch.is_none())?;
    let function = torch.getattr("_C").ok()?.getattr(name).ok()?.unbind();
    Some(known.get_or_init(py, || function).bind(py).clone())
}
