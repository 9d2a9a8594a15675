//! Leases: memory that is lent, tokens for it, and memory for tokens. What the memory means is for `tensorwire.lease`, in Python.

use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, RawFd};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyType};
use tensorwire::device::Device;
use tensorwire::device::cuda::Gpu;
use tensorwire::device::gpu::show_uuid;
use tensorwire::device::host::Host;
use tensorwire::{Deadline, DeviceId, Error, Result, Span, Terms};

use crate::context;
use crate::error::exception;
use crate::gpu::{self, Stream};
use crate::interrupt::blocking;
use crate::keep::{Keep, gathering};
use crate::memory::{self, Memory};
use crate::timeout::Timeout;

/// How long opening a token takes at most, unless told otherwise.
const PATIENCE: Duration = Duration::from_secs(300);

/// Memory that is lent, in the process that lends it.
///
/// It stands for the lender's interest: when it is gone, the memory is let go as soon as it was opened as often as expected
/// and nobody holds it. Pickled, it is its token.
#[pyclass(frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct Lease {
    /// Taken when it is dropped.
    lease: Option<tensorwire::Lease>,
    token: Token,
    /// Torch's streams are those of this GPU.
    gpu: Option<Gpu>,
}

impl Lease {
    fn new(lease: tensorwire::Lease, gpu: Option<Gpu>) -> Self {
        Self { token: Token(lease.token().clone()), lease: Some(lease), gpu }
    }

    /// The lease. A forked child has a copy, which knows nothing.
    fn ours(&self, py: Python<'_>) -> PyResult<&tensorwire::Lease> {
        let pid = self.token.pid();
        match &self.lease {
            Some(lease) if pid == std::process::id() => Ok(lease),
            _ => {
                let text = format!("only process {pid}, which has lent the memory, can ask who has it");
                Err(exception(py, &Error::misuse(text)))
            }
        }
    }
}

#[pymethods]
impl Lease {
    /// What goes to whoever may open it.
    #[getter]
    fn token(&self) -> Token {
        self.token.clone()
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> (Bound<'py, PyType>, (Bound<'py, PyBytes>,)) {
        (py.get_type::<Token>(), (self.token.to_bytes(py),))
    }

    /// Bytes of its memory.
    #[getter]
    fn nbytes(&self) -> usize {
        self.token.nbytes()
    }

    /// Where the memory is: "cpu", or the GPU by its UUID.
    #[getter]
    fn device(&self) -> String {
        self.token.device()
    }

    /// Who holds it now: a pid for each tensor that was opened.
    fn holders(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        let lease = self.ours(py)?;
        let holders = py.detach(|| lease.holders());
        Ok(holders.iter().flat_map(|holder| vec![holder.pid; holder.loans as usize]).collect())
    }

    /// Waits until it was opened as often as expected (or has expired), and everybody is done with it.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Timeout>) -> PyResult<()> {
        let lease = self.ours(py)?;
        let deadline = deadline(py, timeout)?;
        blocking(py, || lease.wait(deadline))
    }

    /// Takes the memory back, to write to it again: waits until everybody has let go of it. On a GPU torch's current stream
    /// waits for what the holders' streams still do; on the host that is done on return, as with wait().
    #[pyo3(signature = (timeout = None))]
    fn reclaim(&self, py: Python<'_>, timeout: Option<Timeout>) -> PyResult<()> {
        let Some(gpu) = self.gpu.clone() else { return self.wait(py, timeout) };
        let lease = self.ours(py)?;
        let deadline = deadline(py, timeout)?;
        let number = gpu::current_stream(py, gpu.facts().ordinal);
        let stream = Stream { gpu, number };
        // SAFETY: torch's current stream, which lives as long as torch, or the default stream.
        blocking(py, || unsafe { stream.queue(|queue| lease.reclaim(queue, deadline)) })
    }

    /// Gives its token longer: so many seconds from now; None: as long as this process lives.
    #[pyo3(signature = (lifetime))]
    fn renew(&self, py: Python<'_>, lifetime: Option<f64>) -> PyResult<()> {
        let lease = self.ours(py)?;
        let lifetime = seconds(py, lifetime)?;
        py.detach(|| lease.renew(lifetime)).map_err(|error| exception(py, &error))
    }

    fn __repr__(&self) -> String {
        format!("<tensorwire.Lease of {} bytes on {}>", self.nbytes(), self.device())
    }
}

impl Drop for Lease {
    /// Memory that nobody else needs is let go here, while the interpreter is at hand.
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            Python::try_attach(|py| gathering(py, || drop(lease)));
        }
    }
}

/// Memory on its way to another process: whoever of the same user opens it has the same memory, without a copy.
///
/// It can be pickled, and is as secret as the memory.
#[pyclass(frozen, module = "tensorwire")]
#[derive(Debug, Clone)]
pub(crate) struct Token(tensorwire::Token);

#[pymethods]
impl Token {
    /// The token of bytes that `to_bytes` gave.
    #[new]
    fn new(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        tensorwire::Token::from_bytes(data).map(Self).map_err(|error| exception(py, &error))
    }

    /// What travels.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, (Bound<'py, PyBytes>,)) {
        (slf.get_type(), (slf.get().to_bytes(slf.py()),))
    }

    /// Bytes of its memory.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.len()
    }

    /// Where the memory is: "cpu", or the GPU by its UUID.
    #[getter]
    fn device(&self) -> String {
        match self.0.device() {
            DeviceId::Gpu(uuid) => show_uuid(uuid),
            _ => "cpu".into(),
        }
    }

    /// The process that made it, as that sees itself.
    #[getter]
    fn pid(&self) -> u32 {
        self.0.pid()
    }

    /// What its maker put beside the memory.
    #[getter]
    fn note<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.note())
    }

    /// Uses it up without opening it: for one that is not wanted. Its maker does not wait for it any more.
    #[pyo3(signature = (timeout = None))]
    fn discard(&self, py: Python<'_>, timeout: Option<Timeout>) -> PyResult<()> {
        let deadline = deadline(py, timeout)?;
        blocking(py, || context::ours()?.discard(&self.0, deadline))
    }

    fn __repr__(&self) -> String {
        let (bytes, device, pid) = (self.nbytes(), self.device(), self.pid());
        format!("<tensorwire.Token for {bytes} bytes on {device} of process {pid}>")
    }
}

/// Lends the memory at an address; None where that is memory of the host which others cannot map.
///
/// `keep` is kept as long as the memory of a GPU or of a file is needed. The data is ready when `stream` has come so far,
/// or when `event` is reached. With `fd` it is memory that somebody else has mapped from that file, which is for
/// `open_file`.
#[pyfunction]
#[pyo3(signature = (address, nbytes, keep, *, gpu = None, stream = 0, event = None, fd = None, uses = 1, lifetime = None, note = None))]
#[expect(clippy::too_many_arguments, reason = "keywords of Python")]
pub(crate) fn share(
    py: Python<'_>,
    address: usize,
    nbytes: usize,
    keep: Bound<'_, PyAny>,
    gpu: Option<usize>,
    stream: usize,
    event: Option<usize>,
    fd: Option<RawFd>,
    uses: u16,
    lifetime: Option<f64>,
    note: Option<&[u8]>,
) -> PyResult<Option<Lease>> {
    let note = note.unwrap_or_default().to_vec();
    let terms = Terms::default().uses(uses).lifetime(seconds(py, lifetime)?).note(note);
    let known = if nbytes == 0 { None } else { memory::find(address, nbytes) };
    let keep = Keep::new(keep.unbind());
    let lease = gathering(py, || -> Result<Option<(tensorwire::Lease, Option<Gpu>)>> {
        let context = context::ours()?;
        let Some(ordinal) = gpu else {
            let span = match (known, fd) {
                (_, Some(fd)) => {
                    // SAFETY: whoever calls gives an open descriptor, which `keep` keeps open.
                    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
                    // SAFETY: the memory of a tensor, which stays until `keep` is dropped.
                    Span::whole(unsafe { Host.adopt_file(address, nbytes, fd, Box::new(keep)) }?)
                }
                (Some(span), None) => span,
                (None, None) if nbytes == 0 => context.alloc(0)?,
                (None, None) => return Ok(None),
            };
            return Ok(Some((context.grant(&span, &terms)?, None)));
        };
        let gpu = gpu::open(ordinal)?;
        let span = match known {
            Some(span) => span,
            // SAFETY: the memory of a tensor, which stays until `keep` is dropped.
            None => Span::whole(unsafe { gpu.adopt(address, nbytes, Box::new(keep)) }?),
        };
        if event.is_some() {
            // SAFETY: whoever calls gives an event of this GPU, which is there for the call.
            let granted =
                unsafe { gpu.between(event, None, |queue| context.grant_after(&span, &terms, queue)) };
            return Ok(Some((granted?, Some(gpu))));
        }
        let stream = Stream { gpu, number: stream };
        // SAFETY: whoever calls gives a stream of this GPU, which is there for the call; torch's are for ever.
        let granted = unsafe { stream.queue(|queue| context.grant_after(&span, &terms, queue)) };
        Ok(Some((granted?, Some(stream.gpu))))
    });
    let lease = lease.map_err(|error| exception(py, &error))?;
    Ok(lease.map(|(lease, gpu)| Lease::new(lease, gpu)))
}

/// The memory of a token. On a GPU, torch's current stream waits until the data is ready; on the host, this thread does.
#[pyfunction]
#[pyo3(signature = (token, timeout = None))]
pub(crate) fn open(py: Python<'_>, token: &Bound<'_, Token>, timeout: Option<Timeout>) -> PyResult<Memory> {
    let deadline = deadline(py, timeout)?;
    let token = &token.get().0;
    let DeviceId::Gpu(uuid) = token.device() else {
        let loan = blocking(py, || context::ours()?.redeem(token, deadline))?;
        return Ok(Memory::lent(loan, None));
    };
    let gpu = py.detach(|| gpu::open_uuid(*uuid)).map_err(|error| exception(py, &error))?;
    let number = gpu::current_stream(py, gpu.facts().ordinal);
    let stream = Stream { gpu, number };
    let loan = blocking(py, || {
        let context = context::ours()?;
        // SAFETY: torch's current stream, which lives as long as torch, or the default stream.
        unsafe { stream.queue(|queue| context.redeem_on(token, queue, deadline)) }
    })?;
    Ok(Memory::lent(loan, Some(stream)))
}

/// The file of a token that `share` made with `fd`, as a descriptor that the caller closes.
#[pyfunction]
#[pyo3(signature = (token, timeout = None))]
pub(crate) fn open_file(
    py: Python<'_>,
    token: &Bound<'_, Token>,
    timeout: Option<Timeout>,
) -> PyResult<RawFd> {
    let deadline = deadline(py, timeout)?;
    let token = &token.get().0;
    let fd = blocking(py, || {
        let fd = context::ours()?.redeem_file(token, deadline)?;
        // One that forked children keep, as Python's do.
        fd.as_fd().try_clone_to_owned().map_err(|e| Error::io("duplicating a descriptor", e))
    })?;
    Ok(fd.into_raw_fd())
}

/// Has an event of torch stand for the one of a token that `share` made with `event`. `make` gives an event of the GPU with
/// the number that it is called with, as the driver numbers events.
#[pyfunction]
#[pyo3(signature = (token, make, timeout = None))]
pub(crate) fn open_event(
    py: Python<'_>,
    token: &Bound<'_, Token>,
    make: &Bound<'_, PyAny>,
    timeout: Option<Timeout>,
) -> PyResult<()> {
    let deadline = deadline(py, timeout)?;
    let token = &token.get().0;
    let DeviceId::Gpu(uuid) = token.device() else {
        return Err(exception(py, &Error::misuse("the token is not for an event of a GPU")));
    };
    let gpu = py.detach(|| gpu::open_uuid(*uuid)).map_err(|error| exception(py, &error))?;
    let event: usize = make.call1((gpu.facts().ordinal,))?.extract()?;
    let loan = blocking(py, || {
        let context = context::ours()?;
        // SAFETY: `make` gives an event of this GPU, which its caller keeps.
        unsafe { gpu.between(None, Some(event), |queue| context.redeem_on(token, queue, deadline)) }
    })?;
    py.detach(|| drop(loan));
    Ok(())
}

/// Lets go of memory that was shared and that nobody needs any more, and asks others to unmap what they do not use; gives
/// the bytes that were let go here.
#[pyfunction]
pub(crate) fn collect(py: Python<'_>) -> PyResult<usize> {
    gathering(py, || context::ours()?.collect()).map_err(|error| exception(py, &error))
}

/// What this process has shared, in numbers.
#[pyfunction]
pub(crate) fn lease_stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let stats = py.detach(|| context::ours()?.lease_stats()).map_err(|error| exception(py, &error))?;
    let numbers = PyDict::new(py);
    for (name, (count, bytes)) in [
        ("granted", stats.granted),
        ("redeemed", stats.redeemed),
        ("waiting", stats.waiting),
        ("expired", stats.expired),
    ] {
        numbers.set_item(name, count)?;
        numbers.set_item(format!("{name}_bytes"), bytes)?;
    }
    numbers.set_item("holders", stats.holders)?;
    Ok(numbers)
}

/// What is still held or awaited of what this process has shared; None if nothing is.
#[pyfunction]
pub(crate) fn outstanding(py: Python<'_>) -> Option<String> {
    py.detach(|| context::ours_if_any()?.outstanding())
}

fn deadline(py: Python<'_>, timeout: Option<Timeout>) -> PyResult<Deadline> {
    let timeout = timeout.map(|timeout| timeout.duration(py)).transpose()?;
    Ok(Deadline::after(timeout.unwrap_or(PATIENCE)))
}

/// How long a token lives.
fn seconds(py: Python<'_>, seconds: Option<f64>) -> PyResult<Duration> {
    let Some(seconds) = seconds.filter(|seconds| *seconds != f64::INFINITY) else { return Ok(Duration::MAX) };
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        let text = format!("lifetime={seconds}: a number of seconds from 0 on, or None, is needed");
        exception(py, &Error::misuse(text))
    })
}
