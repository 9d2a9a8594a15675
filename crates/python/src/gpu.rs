//! GPUs and streams as Python knows them: by their numbers in this process.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use tensorwire::Result;
use tensorwire::device::cuda::Gpu;

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

/// GPUs that were opened, and the process that did. They stay open: torch uses them anyway.
static OPEN: Mutex<(u32, Vec<Gpu>)> = Mutex::new((0, Vec::new()));

/// The GPU with this number.
pub(crate) fn open(ordinal: usize) -> Result<Gpu> {
    opened(|gpu| gpu.facts().ordinal == ordinal, || Ok(Gpu::open(ordinal)?))
}

/// The GPU with this name.
pub(crate) fn open_uuid(uuid: [u8; 16]) -> Result<Gpu> {
    opened(|gpu| gpu.facts().uuid == uuid, || Ok(Gpu::open_uuid(uuid)?))
}

fn opened(is: impl Fn(&Gpu) -> bool, open: impl FnOnce() -> Result<Gpu>) -> Result<Gpu> {
    let mut known = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if known.0 != std::process::id() {
        // In a forked child they are the parent's.
        std::mem::forget(std::mem::take(&mut known.1));
        known.0 = std::process::id();
    }
    if let Some(gpu) = known.1.iter().find(|gpu| is(gpu)) {
        return Ok(gpu.clone());
    }
    let gpu = open()?;
    known.1.push(gpu.clone());
    Ok(gpu)
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
