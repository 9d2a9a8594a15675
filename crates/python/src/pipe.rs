//! Pipes: messages between two processes. Tensors are made of what comes by `tensorwire.pipe`, in Python.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use tensorwire::device::cuda::Gpu;
use tensorwire::device::fork::Birth;
use tensorwire::device::host::Host;
use tensorwire::device::{Abort, Device, Layout};
use tensorwire::pipe::Message;
use tensorwire::{Deadline, DeviceId, Error, Span, Tensor, pipe};

use crate::context;
use crate::error::exception;
use crate::gpu::{self, Stream};
use crate::interrupt::blocking;
use crate::member::Member;
use crate::memory::{self, Memory};
use crate::tensor::{Input, Output};
use crate::timeout::Timeout;
use crate::torch::in_flight;
use crate::work::{Gave, Started, Work, call_soon};

/// Where pipes of this process begin.
#[pyclass(frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct Listener {
    /// None once it is closed.
    open: RwLock<Option<Arc<pipe::Listener>>>,
    address: String,
}

#[pymethods]
impl Listener {
    /// One at an address, or for processes of this machine alone.
    #[new]
    #[pyo3(signature = (address = None))]
    fn new(py: Python<'_>, address: Option<&str>) -> PyResult<Self> {
        let listener = blocking(py, || {
            let context = context::ours()?;
            match address {
                Some(address) => pipe::Listener::at(&context, address),
                None => pipe::Listener::local(&context),
            }
        })?;
        Ok(Self { address: listener.address().to_owned(), open: RwLock::new(Some(Arc::new(listener))) })
    }

    /// What a process needs to connect.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// The next process that connects.
    #[pyo3(signature = (timeout = None))]
    fn accept(&self, py: Python<'_>, timeout: Option<Timeout>) -> PyResult<Pipe> {
        let deadline = deadline(py, timeout.as_ref())?;
        let accepted = blocking(py, || {
            // Not with the lock: it can be closed meanwhile, which is felt at the end of this.
            let open = self.open.read().unwrap_or_else(PoisonError::into_inner).clone();
            match open {
                Some(listener) => listener.accept(deadline.unwrap_or_else(patience)),
                None => Err(Error::misuse("this listener was closed")),
            }
        })?;
        Ok(Pipe::over(accepted))
    }

    /// Takes no connections any more. Pipes stay.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let listener = self.open.write().unwrap_or_else(PoisonError::into_inner).take();
            drop(listener);
        });
    }
}

/// One end of a connection between two processes.
#[pyclass(frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct Pipe {
    /// None once it is closed.
    open: RwLock<Option<pipe::Pipe>>,
    peer: tensorwire::Member,
}

impl Pipe {
    fn over(pipe: pipe::Pipe) -> Self {
        Self { peer: pipe.peer().clone(), open: RwLock::new(Some(pipe)) }
    }

    /// The pipe, for another use of it. Here it is closed from now on.
    pub(crate) fn take(&self, py: Python<'_>) -> PyResult<pipe::Pipe> {
        let pipe = self.open.write().unwrap_or_else(PoisonError::into_inner).take();
        pipe.ok_or_else(|| exception(py, &Error::misuse("this pipe was closed")))
    }

    fn pipe(&self, py: Python<'_>) -> PyResult<pipe::Pipe> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.clone().ok_or_else(|| exception(py, &Error::misuse("this pipe was closed")))
    }
}

#[pymethods]
impl Pipe {
    /// Connects to a listener.
    #[staticmethod]
    #[pyo3(signature = (address, timeout = None))]
    fn connect(py: Python<'_>, address: &str, timeout: Option<Timeout>) -> PyResult<Self> {
        let deadline = deadline(py, timeout.as_ref())?;
        let pipe = blocking(py, || {
            let context = context::ours()?;
            pipe::Pipe::connect(&context, address, deadline.unwrap_or_else(patience))
        })?;
        Ok(Self::over(pipe))
    }

    /// Sends a message. Each tensor has its shape and strides, and a number that says what made it.
    #[pyo3(signature = (tensors, shapes, makers, metadata, payloads, delivered, timeout, async_op))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn send(
        &self,
        py: Python<'_>,
        tensors: Vec<Input>,
        shapes: Vec<Option<Shape>>,
        makers: Vec<u8>,
        metadata: &[u8],
        payloads: Vec<Bound<'_, PyBytes>>,
        delivered: bool,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let (pipe, deadline) = (self.pipe(py)?, deadline(py, timeout.as_ref())?);
        let message = message(py, &tensors, &shapes, &makers, metadata, &payloads)?;
        let send = || {
            let send = pipe.send(&message);
            let send = if delivered { send.delivered() } else { send };
            deadline.into_iter().fold(send, pipe::Send::deadline)
        };
        if async_op {
            let hold = in_flight::hold(py, &tensors)?;
            let sent = py.detach(|| send().start()).map_err(|error| exception(py, &error))?;
            if let Some(hold) = hold {
                hold.until(sent.work());
            }
            return Ok(Work::started(Started::Sent(sent)));
        }
        let begin = std::time::Instant::now();
        blocking(py, || send().wait())?;
        Ok(Work::over("send", begin.elapsed(), Gave::Nothing))
    }

    /// The description of the next message; None if the other end sends no more.
    #[pyo3(signature = (timeout = None))]
    fn next(&self, py: Python<'_>, timeout: Option<Timeout>) -> PyResult<Option<Incoming>> {
        let (pipe, deadline) = (self.pipe(py)?, deadline(py, timeout.as_ref())?);
        let next = blocking(py, || deadline.into_iter().fold(pipe.next(), pipe::Next::deadline).wait())?;
        Ok(next.map(|incoming| Incoming::new(Inside::Message(incoming))))
    }

    /// Starts to receive the next message.
    #[pyo3(signature = (timeout = None))]
    fn recv(&self, py: Python<'_>, timeout: Option<Timeout>) -> PyResult<Receiving> {
        let (pipe, deadline) = (self.pipe(py)?, deadline(py, timeout.as_ref())?);
        let started = py.detach(|| deadline.into_iter().fold(pipe.recv(), pipe::Recv::deadline).start());
        Ok(Receiving::new(Coming::Message(started.map_err(|error| exception(py, &error))?)))
    }

    /// Says that this end sends no more.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let pipe = self.pipe(py)?;
        blocking(py, || pipe.finish())
    }

    /// Closes the pipe.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let pipe = self.open.write().unwrap_or_else(PoisonError::into_inner).take();
        blocking(py, || pipe.map_or(Ok(()), pipe::Pipe::close))
    }

    /// Raises if the pipe has failed.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let pipe = self.pipe(py)?;
        blocking(py, || pipe.check())
    }

    /// The process at the other end.
    #[getter]
    fn peer(&self) -> Member {
        Member::of(&self.peer)
    }

    /// Which channel tensors take, and why.
    fn explain(&self, py: Python<'_>) -> PyResult<String> {
        let pipe = self.pipe(py)?;
        Ok(py.detach(|| pipe.explain()))
    }
}

/// A message whose description is here.
#[pyclass(frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct Incoming {
    inside: Mutex<Inside>,
    /// Where tensors come that have a place.
    gpus: Mutex<Vec<Gpu>>,
}

#[derive(Debug)]
pub(crate) enum Inside {
    Message(pipe::Incoming),
    /// The message is a call. Nothing once that is answered.
    Call(Option<pipe::rpc::Call>),
}

impl Incoming {
    /// Another thread may hold it while it reads: this must not wait for that with the interpreter in its hands.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        body: impl FnOnce(&mut pipe::Incoming) -> tensorwire::Result<T> + Send,
    ) -> PyResult<T> {
        blocking(py, || match &mut *self.lock() {
            Inside::Message(incoming) => body(incoming),
            Inside::Call(Some(call)) => body(call.incoming()),
            Inside::Call(None) => {
                Err(Error::misuse("this call is answered: read its message in its handler"))
            }
        })
    }

    pub(crate) fn new(inside: Inside) -> Self {
        Self { inside: Mutex::new(inside), gpus: Mutex::default() }
    }

    /// The call is answered: what was not read of it is dropped.
    pub(crate) fn end_call(&self) {
        if let Inside::Call(call) = &mut *self.lock() {
            *call = None;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn comes_to(&self, gpu: &Gpu) {
        self.gpus.lock().unwrap_or_else(PoisonError::into_inner).push(gpu.clone());
    }
}

/// Type, shape, channel, and what made it.
type Described<'py> = (String, Bound<'py, PyTuple>, &'static str, u8);

/// Memory of a tensor, its strides in bytes, and where its first element is.
type Place<'py> = (Bound<'py, Memory>, Bound<'py, PyTuple>, usize);

#[pymethods]
impl Incoming {
    /// The bytes that came with the description.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let metadata = self.with(py, |incoming| Ok(incoming.metadata().to_vec()))?;
        Ok(PyBytes::new(py, &metadata))
    }

    /// The sizes of the payloads.
    #[getter]
    fn payloads(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        self.with(py, |incoming| Ok(incoming.payloads().collect()))
    }

    /// Of each tensor: type, shape, channel, and what made it.
    #[getter]
    fn parts<'py>(&self, py: Python<'py>) -> PyResult<Vec<Described<'py>>> {
        let parts = self.with(py, |incoming| Ok(incoming.tensors().to_vec()))?;
        let one = |part: pipe::Part| {
            Ok((part.dtype.to_string(), PyTuple::new(py, part.shape)?, part.channel.name(), part.maker))
        };
        parts.into_iter().map(one).collect()
    }

    /// Has a tensor of the message come into this one, which has this shape and these strides.
    fn place(&self, py: Python<'_>, index: usize, tensor: Output, shape: Option<Shape>) -> PyResult<()> {
        let place = tensor.gpu.clone();
        let tensor = shaped(&tensor.tensor, shape.as_ref()).map_err(|error| exception(py, &error))?;
        self.with(py, |incoming| incoming.place(index, &tensor))?;
        place.into_iter().for_each(|gpu| self.comes_to(&gpu));
        Ok(())
    }

    /// Has a tensor of the message come into new memory: of the GPU with this number, or of the host.
    fn bring_to(&self, py: Python<'_>, index: usize, gpu: Option<usize>) -> PyResult<()> {
        let gpu = py.detach(|| gpu.map(gpu::open).transpose()).map_err(|error| exception(py, &error))?;
        let device = gpu.as_ref().map_or(DeviceId::Host, Device::id);
        self.with(py, |incoming| incoming.bring_to(index, &device))?;
        gpu.iter().for_each(|gpu| self.comes_to(gpu));
        Ok(())
    }

    /// Has a tensor of the message be the sender's memory.
    fn view(&self, py: Python<'_>, index: usize) -> PyResult<()> {
        self.with(py, |incoming| incoming.view(index))
    }

    /// Reads the message: the memory of its payloads, and of its tensors. Those of GPUs are there for what comes on torch's current
    /// streams.
    #[pyo3(signature = (timeout = None))]
    fn read<'py>(&self, py: Python<'py>, timeout: Option<Timeout>) -> PyResult<Memories<'py>> {
        let deadline = deadline(py, timeout.as_ref())?;
        let gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let streams = streams(py, &gpus)?;
        let message = self.with(py, |incoming| {
            let read = deadline.into_iter().fold(incoming.read(), pipe::Read::deadline);
            read_behind(read, &streams)
        })?;
        memories(py, &message)
    }
}

/// torch's current streams of these GPUs, one of each.
fn streams<'a>(py: Python<'_>, gpus: impl IntoIterator<Item = &'a Gpu>) -> PyResult<Vec<Stream>> {
    let mut streams: Vec<Stream> = Vec::new();
    for gpu in gpus {
        if streams.iter().all(|stream| stream.ordinal() != gpu.facts().ordinal) {
            let why = "the two ends meet on the host, which a replay does not repeat";
            streams.push(Stream::current_for(py, gpu.clone(), "a message of a pipe", why)?);
        }
    }
    Ok(streams)
}

/// Reads behind what is on these streams, and has them wait for it. Without one, what has come to GPUs is there on return.
fn read_behind(read: pipe::Read<'_>, streams: &[Stream]) -> tensorwire::Result<Message> {
    let Some((first, others)) = streams.split_first() else { return read.wait() };
    // SAFETY: torch's current streams, which live as long as torch, or default streams. So are those below.
    let read =
        others.iter().try_fold(read, |read, stream| unsafe { stream.queue(|queue| read.after(queue)) })?;
    // SAFETY: as above.
    let (message, copied) = unsafe { first.queue(|queue| Ok((read.on(queue)?, queue.mark()?))) }?;
    let ever = Deadline::after(Duration::MAX);
    for stream in others {
        // SAFETY: as above.
        unsafe { stream.queue(|queue| Ok(queue.follow(&copied, &Abort::local(), ever)?)) }?;
    }
    Ok(message)
}

/// The memory of the payloads and of the tensors of a message.
type Memories<'py> = (Vec<Bound<'py, Memory>>, Vec<Place<'py>>);

fn memories<'py>(py: Python<'py>, message: &Message) -> PyResult<Memories<'py>> {
    let memory = |tensor: &Tensor| {
        let span = tensor.span().clone();
        let DeviceId::Gpu(uuid) = span.device() else {
            return Bound::new(py, Memory::mapped(span, None));
        };
        let gpu = gpu::open_uuid(uuid).map_err(|error| exception(py, &error))?;
        let number = gpu::current_stream(py, gpu.facts().ordinal);
        Bound::new(py, Memory::mapped(span, Some(Stream { gpu, number })))
    };
    let payloads = message.payloads().iter().map(memory).collect::<PyResult<_>>()?;
    let place = |tensor: &Tensor| {
        let layout = tensor.layout();
        let steps = layout.strides().iter().map(|&stride| stride * layout.item() as isize);
        Ok((memory(tensor)?, PyTuple::new(py, steps.collect::<Vec<_>>())?, layout.origin()))
    };
    let tensors = message.tensors().iter().map(place).collect::<PyResult<_>>()?;
    Ok((payloads, tensors))
}

/// A message that is to come: one that is received, or the answer of a call.
#[derive(Debug)]
pub(crate) enum Coming {
    Message(pipe::Pending<Option<Message>>),
    Answer(pipe::Pending<Message>),
}

impl Coming {
    pub(crate) fn work(&self) -> &tensorwire::Work {
        match self {
            Self::Message(pending) => pending.work(),
            Self::Answer(pending) => pending.work(),
        }
    }

    fn cancel(&self) -> bool {
        match self {
            Self::Message(pending) => pending.cancel(),
            Self::Answer(pending) => pending.cancel(),
        }
    }

    fn wait(&self, by: Option<Deadline>) -> tensorwire::Result<Option<Message>> {
        match (self, by) {
            (Self::Message(pending), Some(by)) => pending.wait_by(by),
            (Self::Message(pending), None) => pending.wait(),
            (Self::Answer(pending), Some(by)) => pending.wait_by(by).map(Some),
            (Self::Answer(pending), None) => pending.wait().map(Some),
        }
    }
}

/// The same, as Python sees it. If Python lets go of it, it is withdrawn.
#[pyclass(frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct Receiving {
    /// None while it is dropped.
    coming: Option<Coming>,
    birth: Birth,
}

impl Receiving {
    pub(crate) fn new(coming: Coming) -> Self {
        Self { coming: Some(coming), birth: Birth::now() }
    }

    /// In a forked child it is the parent's.
    fn coming(&self, py: Python<'_>) -> PyResult<&Coming> {
        self.birth.check("the receive").map_err(|error| exception(py, &error.into()))?;
        self.coming
            .as_ref()
            .ok_or_else(|| exception(py, &Error::bug("a receive that is used while it is dropped")))
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        let coming = self.coming.take();
        match self.birth.is_ours() {
            // To withdraw it may wait for a thread that waits for the interpreter.
            true => Python::attach(|py| py.detach(|| drop(coming))),
            false => std::mem::forget(coming),
        }
    }
}

/// A message: metadata, what its tensors are, and the memory of payloads and tensors.
type Came<'py> = (Bound<'py, PyBytes>, Vec<Described<'py>>, Vec<Bound<'py, Memory>>, Vec<Place<'py>>);

#[pymethods]
impl Receiving {
    /// Waits for it and gives it, once; None if the other end sends no more. With a time-out that passes first, it goes on.
    #[pyo3(signature = (timeout = None))]
    fn wait<'py>(&self, py: Python<'py>, timeout: Option<Timeout>) -> PyResult<Option<Came<'py>>> {
        let (coming, deadline) = (self.coming(py)?, deadline(py, timeout.as_ref())?);
        let Some(message) = blocking(py, || coming.wait(deadline))? else { return Ok(None) };
        let described = message.tensors().iter().zip(message.makers()).map(|(tensor, &maker)| {
            let shape = PyTuple::new(py, tensor.layout().shape())?;
            Ok((tensor.dtype().to_string(), shape, "", maker))
        });
        let described = described.collect::<PyResult<_>>()?;
        let (payloads, tensors) = memories(py, &message)?;
        Ok(Some((PyBytes::new(py, message.metadata()), described, payloads, tensors)))
    }

    /// Whether it is over, well or not. It can still be withdrawn then.
    fn done(&self) -> bool {
        self.coming.as_ref().is_none_or(|coming| coming.work().is_over())
    }

    /// Withdraws it: the next receive gets the message, or whoever answers the call hears it. False if somebody was told.
    fn withdraw(&self, py: Python<'_>) -> PyResult<bool> {
        let coming = self.coming(py)?;
        Ok(py.detach(|| coming.cancel()))
    }

    /// Calls `callback(self)` once it is over.
    fn _on_over(slf: Bound<'_, Self>, callback: Py<PyAny>) -> PyResult<()> {
        let own = slf.clone().unbind();
        let coming = slf.get().coming(slf.py())?;
        slf.py().detach(|| coming.work().on_over(move || call_soon(callback, own)));
        Ok(())
    }
}

/// The message that a program of Python sends. Its tensors of GPUs are read behind what is on torch's current streams.
pub(crate) fn message(
    py: Python<'_>,
    tensors: &[Input],
    shapes: &[Option<Shape>],
    makers: &[u8],
    metadata: &[u8],
    payloads: &[Bound<'_, PyBytes>],
) -> PyResult<Message> {
    let mut message = Message::new().with_metadata(metadata);
    for payload in payloads {
        message = message.with_payload(payload.as_bytes()).map_err(|error| exception(py, &error))?;
    }
    let joined = joined(tensors).map_err(|error| exception(py, &error))?;
    for ((tensor, shape), &maker) in joined.iter().zip(shapes).zip(makers) {
        let tensor = shaped(tensor, shape.as_ref()).map_err(|error| exception(py, &error))?;
        message = message.with_tensor_of(&tensor, maker);
    }
    let streams = streams(py, tensors.iter().filter_map(|tensor| tensor.gpu.as_ref()))?;
    let behind = |message: Message, stream: &Stream| {
        // SAFETY: torch's current streams, which live as long as torch, or default streams.
        unsafe { stream.queue(|queue| message.after(queue)) }
    };
    let message = py.detach(|| streams.iter().try_fold(message, behind));
    message.map_err(|error| exception(py, &error))
}

/// A shape, and strides in elements.
pub(crate) type Shape = (Vec<usize>, Vec<isize>);

/// A tensor with its own shape: those of others have as few dimensions as possible.
fn shaped(tensor: &Tensor, shape: Option<&Shape>) -> tensorwire::Result<Tensor> {
    let Some((shape, strides)) = shape else { return Ok(tensor.clone()) };
    let (span, layout) = (tensor.span().clone(), tensor.layout());
    let layout = Layout::with_origin(shape, strides, layout.item(), layout.origin())?;
    Tensor::new(span, tensor.dtype(), layout)
}

/// The tensors, of which those that overlap in memory of others are in one piece of it: so each byte is sent once. Every tensor of Python's
/// comes with a piece of its own.
fn joined(tensors: &[Input]) -> tensorwire::Result<Vec<Tensor>> {
    let mut all: Vec<Tensor> = tensors.iter().map(|tensor| tensor.tensor.clone()).collect();
    let begin = |tensor: &Tensor| memory::address(tensor.span());
    let gpu = |index: usize| tensors[index].gpu.as_ref().map(|gpu| gpu.facts().ordinal);
    let mut order: Vec<usize> =
        (0..all.len()).filter(|&index| !tensors[index].is_shared && !all[index].span().is_empty()).collect();
    order.sort_by_key(|&index| (gpu(index), begin(&all[index])));
    let mut rest = &order[..];
    while let Some(&first) = rest.first() {
        let (start, mut end) = (begin(&all[first]), begin(&all[first]));
        let overlaps = |&&index: &&usize| {
            let goes_on = index == first || gpu(index) == gpu(first) && begin(&all[index]) < end;
            if goes_on {
                end = end.max(begin(&all[index]) + all[index].span().len());
            }
            goes_on
        };
        let count = rest.iter().take_while(overlaps).count();
        let (these, others) = rest.split_at(count);
        rest = others;
        if count > 1 {
            let keep: Vec<Span> = these.iter().map(|&index| all[index].span().clone()).collect();
            let device: &dyn Device = match &tensors[first].gpu {
                Some(gpu) => gpu,
                None => &Host,
            };
            // SAFETY: the pieces overlap, so that all of it is memory of this process and device, which they keep until it is dropped.
            let region = unsafe { device.adopt(start, end - start, Box::new(keep)) }?;
            for &index in these {
                let (at, len) = (begin(&all[index]) - start, all[index].span().len());
                let span = Span::new(region.clone(), at..at + len)?;
                all[index] = Tensor::new(span, all[index].dtype(), all[index].layout().clone())?;
            }
        }
    }
    Ok(all)
}

pub(crate) fn deadline(py: Python<'_>, timeout: Option<&Timeout>) -> PyResult<Option<Deadline>> {
    let timeout = timeout.map(|timeout| timeout.duration(py)).transpose()?;
    Ok(timeout.map(Deadline::after))
}

/// When connecting ends at the latest, unless told otherwise.
fn patience() -> Deadline {
    let timeout = context::ours_if_any().map(|context| context.config().timeout);
    Deadline::after(timeout.unwrap_or_default())
}
