//! How the operations of a group run: on the calling thread, or started.

use std::time::{Duration, Instant};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorwire::collective::{Call, SparseCall};
use tensorwire::device::Queue;
use tensorwire::device::cuda::Gpu;
use tensorwire::device::sync::Ordering;
use tensorwire::group::Message;
use tensorwire::symmetric::SymmetricCall;
use tensorwire::{Deadline, Error, Result, Span, Symmetric};

use super::Group;
use crate::error::exception;
use crate::gpu::{self, Stream};
use crate::interrupt::blocking;
use crate::keep::piling;
use crate::tensor::Foreign;
use crate::timeout::Timeout;
use crate::torch::in_flight;
use crate::work::{Gave, Started, Work};

/// The keywords that every operation has.
#[derive(Debug, Default)]
pub(crate) struct How {
    pub(crate) timeout: Option<Timeout>,
    pub(crate) async_op: bool,
}

impl<'py> FromPyObject<'_, 'py> for How {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let mut how = Self::default();
        for (name, value) in value.cast::<PyDict>()?.iter() {
            match name.extract::<&str>()? {
                "timeout" => how.timeout = value.extract()?,
                "async_op" => how.async_op = value.extract()?,
                other => {
                    let text = format!("got an unexpected keyword argument '{other}'");
                    return Err(PyTypeError::new_err(text));
                }
            }
        }
        Ok(how)
    }
}

/// When an operation must be over, and whether that was given with the call.
#[derive(Debug, Clone, Copy)]
pub(super) struct By {
    deadline: Deadline,
    given: bool,
}

impl By {
    fn of_call(self, call: Call<'_>) -> Call<'_> {
        if self.given { call.deadline(self.deadline) } else { call.deadline_of_group(self.deadline) }
    }

    pub(super) fn of_sparse(self, call: SparseCall<'_>, dense: Option<bool>) -> SparseCall<'_> {
        let call = match dense {
            Some(dense) => call.dense(dense),
            None => call,
        };
        if self.given { call.deadline(self.deadline) } else { call.deadline_of_group(self.deadline) }
    }

    fn of_symmetric(self, call: SymmetricCall<'_>) -> SymmetricCall<'_> {
        if self.given { call.deadline(self.deadline) } else { call.deadline_of_group(self.deadline) }
    }

    pub(super) fn of_message<W>(self, message: Message<'_, W>) -> Message<'_, W> {
        if self.given { message.deadline(self.deadline) } else { message.deadline_of_group(self.deadline) }
    }
}

impl Group {
    /// Runs a collective on these tensors.
    pub(super) fn collective<'a>(
        &self,
        py: Python<'_>,
        name: &'static str,
        tensors: impl IntoIterator<Item = &'a Foreign, IntoIter: Clone>,
        how: Option<How>,
        call: impl for<'g> Fn(&'g tensorwire::Group) -> Call<'g> + Send + Sync,
    ) -> PyResult<Work> {
        let tensors = tensors.into_iter();
        if let Some(gpu) = tensors.clone().find_map(|tensor| tensor.gpu.as_ref()) {
            return self.queue(py, gpu, how, call);
        }
        self.run(
            py,
            name,
            tensors,
            how,
            |group, by| by.of_call(call(group)).start().map(Started::One),
            |group, by| by.of_call(call(group)).wait().map(|()| Gave::Nothing),
        )
    }

    /// Queues a collective on tensors of a GPU: on torch's current stream, or with `async_op` behind what that has to do now.
    fn queue(
        &self,
        py: Python<'_>,
        gpu: &Gpu,
        how: Option<How>,
        call: impl for<'g> Fn(&'g tensorwire::Group) -> Call<'g> + Send + Sync,
    ) -> PyResult<Work> {
        self.on_stream(py, gpu, how, |group, by, queue, async_op| {
            let call = by.of_call(call(group));
            let work = if async_op { call.after(queue)?.start() } else { call.on(queue) };
            work.map(Started::One)
        })
    }

    /// The same for any operation: `put` puts it on the queue, or starts it behind that.
    pub(super) fn on_stream(
        &self,
        py: Python<'_>,
        gpu: &Gpu,
        how: Option<How>,
        put: impl FnOnce(&tensorwire::Group, By, &mut dyn Queue, bool) -> Result<Started> + Send,
    ) -> PyResult<Work> {
        let How { timeout, async_op } = how.unwrap_or_default();
        let group = self.group(py)?;
        let by = self.deadline(py, timeout.as_ref())?;
        let stream = Stream::current(py, gpu.clone())?;
        self.sequence.fetch_add(1, Ordering::Relaxed);
        let put = |queue: &mut dyn Queue| put(&group, by, queue, async_op);
        // SAFETY: torch's current stream, which lives as long as torch, or the default stream.
        let work = piling(|| blocking(py, || unsafe { stream.queue(put) }))?;
        Ok(Work::queued(work, stream.gpu))
    }

    /// A barrier behind what torch's current streams of these GPUs have to do now. The time-out counts from here on.
    pub(super) fn barrier_behind(&self, py: Python<'_>, gpus: &[usize], how: Option<How>) -> PyResult<Work> {
        let mut streams = Vec::with_capacity(gpus.len());
        for &ordinal in gpus {
            let gpu = gpu::open(ordinal).map_err(|error| exception(py, &error))?;
            streams.push(Stream::current(py, gpu)?);
        }
        self.run(
            py,
            "barrier",
            [],
            how,
            |group, by| behind(by.of_call(group.barrier()), &streams)?.start().map(Started::One),
            |group, by| behind(by.of_call(group.barrier()), &streams)?.wait().map(|()| Gave::Nothing),
        )
    }

    /// Has the ranks reach each other's memory.
    pub(crate) fn rendezvous(
        &self,
        py: Python<'_>,
        memory: &Span,
        timeout: Option<&Timeout>,
    ) -> PyResult<Symmetric> {
        let (group, by) = (self.group(py)?, self.deadline(py, timeout)?);
        self.sequence.fetch_add(1, Ordering::Relaxed);
        blocking(py, || by.of_symmetric(group.symmetric(memory)).wait())
    }

    /// When something that begins now must be over.
    pub(crate) fn deadline_of(&self, py: Python<'_>, timeout: Option<&Timeout>) -> PyResult<Deadline> {
        Ok(self.deadline(py, timeout)?.deadline)
    }

    /// Runs an operation on these tensors: `start` starts it; `wait` runs it on this thread.
    pub(super) fn run<'a>(
        &self,
        py: Python<'_>,
        name: &'static str,
        tensors: impl IntoIterator<Item = &'a Foreign, IntoIter: Clone>,
        how: Option<How>,
        start: impl FnOnce(&tensorwire::Group, By) -> Result<Started> + Send,
        wait: impl FnOnce(&tensorwire::Group, By) -> Result<Gave> + Send,
    ) -> PyResult<Work> {
        let tensors = tensors.into_iter();
        if tensors.clone().any(|tensor| tensor.gpu.is_some()) {
            let error = Error::Unsupported {
                what: format!("{name} of a tensor on a GPU"),
                need: "a tensor on the CPU".into(),
                have: "memory of a GPU".into(),
            };
            return Err(exception(py, &error));
        }
        let How { timeout, async_op } = how.unwrap_or_default();
        let group = self.group(py)?;
        let by = self.deadline(py, timeout.as_ref())?;
        self.sequence.fetch_add(1, Ordering::Relaxed);
        if async_op {
            let hold = in_flight::hold(py, tensors)?;
            let work = py.detach(|| start(&group, by)).map_err(|error| exception(py, &error))?;
            if let Some(hold) = hold {
                hold.until(work.inner());
            }
            return Ok(Work::started(work));
        }
        let begin = Instant::now();
        let gave = blocking(py, || wait(&group, by))?;
        Ok(Work::over(name, begin.elapsed(), gave))
    }

    fn deadline(&self, py: Python<'_>, timeout: Option<&Timeout>) -> PyResult<By> {
        let own = || Duration::from_nanos(self.timeout.load(Ordering::Relaxed));
        let timeout = timeout.map(|timeout| timeout.duration(py)).transpose()?;
        Ok(By { given: timeout.is_some(), deadline: Deadline::after(timeout.unwrap_or_else(own)) })
    }
}

/// The call, behind what these streams have to do now. They are torch's current ones, or default streams.
fn behind<'a>(call: Call<'a>, streams: &[Stream]) -> Result<Call<'a>> {
    streams.iter().try_fold(call, |call, stream| {
        // SAFETY: torch's streams live as long as torch.
        unsafe { stream.queue(|queue| call.after(queue)) }
    })
}
