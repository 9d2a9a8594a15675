//! Symmetric memory: what a handle can do. Tensors are made of it by `tensorwire.symmetric`, in Python.

use std::ops::Range;
use std::sync::{PoisonError, RwLock};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorwire::device::cuda::Gpu;
use tensorwire::device::host::{self, Host};
use tensorwire::device::{Device, Queue};
use tensorwire::symmetric::Mover;
use tensorwire::{Deadline, DeviceId, Dtype, Error, Result, Span};

use crate::error::exception;
use crate::gpu::{self, Stream};
use crate::group::Group;
use crate::interrupt::blocking;
use crate::memory::{self, Memory};
use crate::op::Op;
use crate::tensor::{Foreign, Input, Output, misuse};
use crate::timeout::Timeout;

/// Memory that every rank of a group has as much of, and that all reach.
#[pyclass(frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct Symmetric {
    /// None once it is closed.
    handle: RwLock<Option<tensorwire::Symmetric>>,
    group: Py<Group>,
    /// Where this rank's memory lives; None on the host.
    gpu: Option<Gpu>,
    rank: usize,
    world: usize,
    nbytes: usize,
}

/// Has the ranks of a group reach each other's memory: that which lies here at an address.
#[pyfunction]
#[pyo3(signature = (group, address, nbytes, timeout = None))]
pub(crate) fn rendezvous(
    py: Python<'_>,
    group: Bound<'_, Group>,
    address: usize,
    nbytes: usize,
    timeout: Option<Timeout>,
) -> PyResult<Symmetric> {
    let found = if nbytes == 0 { None } else { memory::find(address, nbytes) };
    let is_known = found.is_some();
    // Other ranks would wait in vain for one that does not come. So it comes, and is refused for all of them.
    let span = match found {
        Some(span) => span,
        None => Span::whole(host::private(1).map_err(|error| exception(py, &error.into()))?),
    };
    let gpu = gpu_of(py, &span)?;
    if let Some(gpu) = &gpu {
        let why = "ranks meet on the host, which a replay does not repeat";
        Stream::current_for(py, gpu.clone(), "a rendezvous of symmetric memory", why)?;
    }
    let handle = group.get().rendezvous(py, &span, timeout.as_ref());
    let handle = match handle {
        Err(error) if !is_known && error.value(py).to_string().contains("cannot map this memory") => {
            let text = "other ranks cannot map this memory, or it has no bytes: make the tensor with \
                        tensorwire.symmetric.empty(), tensorwire.empty() or tensorwire.torch.empty(), or allocate it in \
                        tensorwire.symmetric.mem_pool()";
            return Err(exception(py, &Error::misuse(text)));
        }
        handle => handle?,
    };
    Ok(Symmetric {
        rank: handle.rank(),
        world: handle.world(),
        nbytes: handle.len(),
        handle: RwLock::new(Some(handle)),
        group: group.unbind(),
        gpu,
    })
}

#[pymethods]
impl Symmetric {
    /// This rank.
    #[getter]
    fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    #[getter]
    fn world(&self) -> usize {
        self.world
    }

    /// Bytes that each rank brought.
    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// The number of the GPU of this rank's memory; None on the host.
    #[getter]
    fn gpu(&self) -> Option<usize> {
        self.gpu.as_ref().map(|gpu| gpu.facts().ordinal)
    }

    /// The memory of a rank, and whether it lives on another GPU than this rank's.
    fn buffer(&self, py: Python<'_>, rank: usize) -> PyResult<(Memory, bool)> {
        let span = self.handle(py)?.buffer(rank).map_err(|error| exception(py, &error))?;
        self.memory(py, span)
    }

    /// The same of its pad.
    fn pad(&self, py: Python<'_>, rank: usize) -> PyResult<(Memory, bool)> {
        let span = self.handle(py)?.pad(rank).map_err(|error| exception(py, &error))?;
        self.memory(py, span)
    }

    /// The addresses of the memory of all ranks, as this process knows them; 0 where it does not reach a rank's memory.
    #[getter]
    fn buffer_ptrs(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        let handle = self.handle(py)?;
        Ok((0..self.world).map(|rank| handle.buffer(rank).map_or(0, |span| memory::address(&span))).collect())
    }

    /// The same of the pads.
    #[getter]
    fn pad_ptrs(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        let handle = self.handle(py)?;
        Ok((0..self.world).map(|rank| handle.pad(rank).map_or(0, |span| memory::address(&span))).collect())
    }

    /// The addresses of the memory of all ranks, eight bytes each, in memory of this rank's device. 0 where that does not
    /// reach a rank's memory.
    fn buffer_addresses(&self, py: Python<'_>) -> PyResult<Memory> {
        let handle = self.handle(py)?;
        let span = py.detach(|| handle.buffer_addresses()).map_err(|error| exception(py, &error))?;
        Ok(self.memory(py, span)?.0)
    }

    /// The same of the pads.
    fn pad_addresses(&self, py: Python<'_>) -> PyResult<Memory> {
        let handle = self.handle(py)?;
        let span = py.detach(|| handle.pad_addresses()).map_err(|error| exception(py, &error))?;
        Ok(self.memory(py, span)?.0)
    }

    /// Where the memory of each rank begins in the allocation that it is a part of, in bytes.
    #[getter]
    fn offsets(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let handle = self.handle(py)?;
        let offset = |rank| handle.offset(rank).map_err(|error| exception(py, &error));
        (0..self.world).map(offset).collect()
    }

    /// Sends a signal to a rank: behind what torch's current stream has to do, or on the host by this thread.
    #[pyo3(signature = (to, channel = 0, timeout = None))]
    fn put_signal(
        &self,
        py: Python<'_>,
        to: usize,
        channel: usize,
        timeout: Option<Timeout>,
    ) -> PyResult<()> {
        self.signal(py, timeout.as_ref(), |handle, queue, deadline| match queue {
            Some(queue) => handle.put_signal_on(queue, to, channel, deadline),
            None => handle.put_signal(to, channel, deadline),
        })
    }

    /// Waits for a signal of a rank: torch's current stream does, or on the host this thread.
    #[pyo3(signature = (source, channel = 0, timeout = None))]
    fn wait_signal(
        &self,
        py: Python<'_>,
        source: usize,
        channel: usize,
        timeout: Option<Timeout>,
    ) -> PyResult<()> {
        self.signal(py, timeout.as_ref(), |handle, queue, deadline| match queue {
            Some(queue) => handle.wait_signal_on(queue, source, channel, deadline),
            None => handle.wait_signal(source, channel, deadline),
        })
    }

    /// Waits until all ranks have come here: their streams, or on the host their threads.
    #[pyo3(signature = (channel = 0, timeout = None))]
    fn barrier(&self, py: Python<'_>, channel: usize, timeout: Option<Timeout>) -> PyResult<()> {
        self.signal(py, timeout.as_ref(), |handle, queue, deadline| match queue {
            Some(queue) => handle.barrier_on(queue, channel, deadline),
            None => handle.barrier(channel, deadline),
        })
    }

    /// Reduces a part of the memory of all ranks in place, by work of all of them that waits for each other.
    #[pyo3(signature = (tensor, op = Op::default(), **how), text_signature = "($self, tensor, op='sum', **how)")]
    fn all_reduce(&self, py: Python<'_>, tensor: Output, op: Op, how: Option<Together>) -> PyResult<()> {
        op.check(py, [&*tensor])?;
        let (handle, bytes) = self.part(py, &tensor)?;
        let (dtype, how) = (tensor.tensor.dtype(), how.unwrap_or_default());
        self.together(py, handle, &how, |handle, queue, deadline| {
            handle.all_reduce_on(queue, op.0, dtype, bytes, how.channel, deadline)
        })
    }

    /// The same, of all of it by each rank, into `output`.
    #[pyo3(
        signature = (output, input, op = Op::default(), **how),
        text_signature = "($self, output, input, op='sum', **how)"
    )]
    fn one_shot(
        &self,
        py: Python<'_>,
        output: Output,
        input: Input,
        op: Op,
        how: Option<Together>,
    ) -> PyResult<()> {
        op.check(py, [&*output, &input])?;
        let (handle, bytes) = self.part(py, &input)?;
        let (into, how) = (whole(py, &output)?, how.unwrap_or_default());
        let what = (op.0, same_type(py, &output, &input)?);
        self.together(py, handle, &how, |handle, queue, deadline| {
            handle.one_shot_on(queue, what, bytes, &into, how.channel, deadline)
        })
    }

    /// This rank's part of the reduction of `input`.
    #[pyo3(
        signature = (output, input, op = Op::default(), **how),
        text_signature = "($self, output, input, op='sum', **how)"
    )]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        output: Output,
        input: Input,
        op: Op,
        how: Option<Together>,
    ) -> PyResult<()> {
        op.check(py, [&*output, &input])?;
        let (handle, bytes) = self.part(py, &input)?;
        let (into, how) = (whole(py, &output)?, how.unwrap_or_default());
        let what = (op.0, same_type(py, &output, &input)?);
        self.together(py, handle, &how, |handle, queue, deadline| {
            handle.reduce_scatter_on(queue, what, (bytes, &into), how.by(), how.channel, deadline)
        })
    }

    /// The inputs of all ranks, one after the other. Without an input, `output` lies in symmetric memory and has this rank's part.
    #[pyo3(signature = (output, input = None, **how))]
    fn all_gather(
        &self,
        py: Python<'_>,
        output: Output,
        input: Option<Input>,
        how: Option<Together>,
    ) -> PyResult<()> {
        let (handle, bytes) = self.part(py, input.as_ref().unwrap_or(&output))?;
        let into = input.is_some().then(|| whole(py, &output)).transpose()?;
        let how = how.unwrap_or_default();
        self.together(py, handle, &how, |handle, queue, deadline| {
            handle.all_gather_on(queue, bytes, into.as_ref(), how.by(), how.channel, deadline)
        })
    }

    /// From each rank the part that is meant for this one.
    #[pyo3(signature = (output, input, **how))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        output: Output,
        input: Input,
        how: Option<Together>,
    ) -> PyResult<()> {
        let (handle, bytes) = self.part(py, &input)?;
        let (into, how) = (whole(py, &output)?, how.unwrap_or_default());
        self.together(py, handle, &how, |handle, queue, deadline| {
            handle.all_to_all_on(queue, bytes, &into, how.by(), how.channel, deadline)
        })
    }

    /// What rank `root` has there.
    #[pyo3(signature = (tensor, root, **how))]
    fn broadcast(&self, py: Python<'_>, tensor: Output, root: usize, how: Option<Together>) -> PyResult<()> {
        let (handle, bytes) = self.part(py, &tensor)?;
        let how = how.unwrap_or_default();
        self.together(py, handle, &how, |handle, queue, deadline| {
            handle.broadcast_on(queue, root, bytes, how.by(), how.channel, deadline)
        })
    }

    /// Raises the error of what streams had to do with this handle, if something went wrong.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.handle(py)?.check().map_err(|error| exception(py, &error))
    }

    /// Why this rank does not reach the memory of another; None if it does.
    fn why_not(&self, py: Python<'_>, rank: usize) -> PyResult<Option<String>> {
        let handle = self.handle(py)?;
        let access = handle.access(rank).map_err(|error| exception(py, &error))?;
        Ok(access.reason().map(str::to_owned))
    }

    /// Where the memory of each rank is and how this rank reaches it, or why not.
    fn explain(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.handle(py)?.explain())
    }

    /// Gives the handle back. Tensors that were made of it stay.
    fn close(&self, py: Python<'_>) {
        let handle = self.handle.write().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(handle));
    }

    fn __repr__(&self) -> String {
        let Self { nbytes, rank, world, .. } = self;
        format!("<tensorwire.Symmetric of {nbytes} bytes, rank {rank} of {world}>")
    }
}

impl Symmetric {
    fn handle(&self, py: Python<'_>) -> PyResult<tensorwire::Symmetric> {
        let handle = self.handle.read().unwrap_or_else(PoisonError::into_inner).clone();
        handle.ok_or_else(|| exception(py, &Error::misuse("the handle on symmetric memory was closed")))
    }

    /// Memory of a rank as streams of this one use it, and whether it lives on another GPU than theirs.
    fn memory(&self, py: Python<'_>, span: Span) -> PyResult<(Memory, bool)> {
        let gpu = match (span.device(), &self.gpu) {
            (DeviceId::Host, _) => return Ok((Memory::mapped(span, None), false)),
            (_, Some(own)) => own.clone(),
            (_, None) => match gpu_of(py, &span)? {
                Some(theirs) => theirs,
                None => return Ok((Memory::mapped(span, None), false)),
            },
        };
        let far = span.device() != DeviceId::Gpu(gpu.facts().uuid);
        Ok((Memory::mapped(span, Some(Stream { gpu, number: 0 })), far))
    }

    /// Runs `body` with a queue on torch's current stream, or without one where this rank's memory is the host's.
    fn signal(
        &self,
        py: Python<'_>,
        timeout: Option<&Timeout>,
        body: impl FnOnce(&tensorwire::Symmetric, Option<&mut dyn Queue>, Deadline) -> Result<()> + Send,
    ) -> PyResult<()> {
        let handle = self.handle(py)?;
        let deadline = self.group.get().deadline_of(py, timeout)?;
        let Some(gpu) = self.gpu.clone() else {
            return blocking(py, || body(&handle, None, deadline));
        };
        let why =
            "it counts the signals of a pair of ranks, and a replay would wait for a number that has come";
        let stream = Stream::current_for(py, gpu, "a signal of symmetric memory", why)?;
        // SAFETY: torch's current stream, which lives as long as torch, or the default stream.
        blocking(py, || unsafe { stream.queue(|queue| body(&handle, Some(queue), deadline)) })
    }
}

impl Symmetric {
    /// The handle, and where in this rank's memory a tensor lies.
    fn part(&self, py: Python<'_>, tensor: &Foreign) -> PyResult<(tensorwire::Symmetric, Range<usize>)> {
        let handle = self.handle(py)?;
        let (own, span) =
            (handle.buffer(self.rank).map_err(|error| exception(py, &error))?, whole(py, tensor)?);
        let start = usize::try_from(own.distance(&span)).ok();
        let bytes = start.map(|start| start..start.saturating_add(span.len()));
        match bytes.filter(|bytes| bytes.end <= own.len() && own.device() == span.device()) {
            Some(bytes) => Ok((handle, bytes)),
            None => Err(misuse(
                py,
                "this tensor does not lie in the memory that this rank has brought to the handle".into(),
            )),
        }
    }

    /// Work on torch's current stream, or a part of the graph that this records; on the host, by this thread.
    fn together(
        &self,
        py: Python<'_>,
        handle: tensorwire::Symmetric,
        how: &Together,
        body: impl FnOnce(&tensorwire::Symmetric, &mut dyn Queue, Deadline) -> Result<()> + Send,
    ) -> PyResult<()> {
        let deadline = self.group.get().deadline_of(py, how.timeout.as_ref())?;
        let Some(gpu) = self.gpu.clone() else {
            return blocking(py, || body(&handle, &mut *Host.queue()?, deadline));
        };
        let stream = Stream { number: gpu::current_stream(py, gpu.facts().ordinal), gpu };
        // SAFETY: torch's current stream, which lives as long as torch, or the default stream.
        blocking(py, || unsafe { stream.recorded(handle.clone(), |queue| body(&handle, queue, deadline)) })
    }
}

/// The keywords of work of all ranks together.
#[derive(Debug, Default)]
struct Together {
    channel: usize,
    engines: bool,
    timeout: Option<Timeout>,
}

impl Together {
    fn by(&self) -> Mover {
        if self.engines { Mover::Engines } else { Mover::Kernels }
    }
}

impl<'py> FromPyObject<'_, 'py> for Together {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let mut how = Self::default();
        for (name, value) in value.cast::<PyDict>()?.iter() {
            match name.extract::<&str>()? {
                "channel" => how.channel = value.extract()?,
                "engines" => how.engines = value.extract()?,
                "timeout" => how.timeout = value.extract()?,
                other => {
                    let text = format!("got an unexpected keyword argument '{other}'");
                    return Err(PyTypeError::new_err(text));
                }
            }
        }
        Ok(how)
    }
}

/// The memory of a tensor without gaps.
fn whole(py: Python<'_>, tensor: &Foreign) -> PyResult<Span> {
    let bytes = tensor.tensor.byte_len();
    let span = tensor.tensor.span();
    if span.len() == bytes {
        return Ok(span.clone());
    }
    Err(misuse(py, "work of all ranks together takes tensors without gaps".into()))
}

fn same_type(py: Python<'_>, output: &Foreign, input: &Foreign) -> PyResult<Dtype> {
    let (one, other) = (output.tensor.dtype(), input.tensor.dtype());
    if one == other {
        return Ok(one);
    }
    Err(misuse(py, format!("the output is of {one}, and the input of {other}")))
}

/// The GPU that memory lives on.
fn gpu_of(py: Python<'_>, span: &Span) -> PyResult<Option<Gpu>> {
    match span.device() {
        DeviceId::Gpu(uuid) => {
            py.detach(|| gpu::open_uuid(uuid)).map(Some).map_err(|error| exception(py, &error))
        }
        _ => Ok(None),
    }
}
