//! GPUs and streams as Python knows them: by their numbers in this process.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use tensorwire::Result;
use tensorwire::device::Queue;
use tensorwire::device::cuda::Gpu;
use tensorwire::device::fork::PerProcess;

/// A stream of a GPU.
#[derive(Debug, Clone)]
pub(crate) struct Stream {
    pub(crate) gpu: Gpu,
    /// As the driver numbers it: its address, or 0 for the default stream.
    pub(crate) number: usize,
}

impl Stream {
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
    let asked = || -> PyResult<usize> {
        let ask = match ASK.get(py) {
            Some(ask) => ask,
            None => {
                let modules = py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?;
                // Whoever has not imported torch has no stream of it.
                let Some(torch) = modules.get_item("torch")?.filter(|torch| !torch.is_none()) else {
                    return Ok(0);
                };
                let ask = torch.getattr("_C")?.getattr("_cuda_getCurrentRawStream")?.unbind();
                ASK.get_or_init(py, || ask)
            }
        };
        ask.bind(py).call1((ordinal,))?.extract()
    };
    asked().unwrap_or(0)
}
