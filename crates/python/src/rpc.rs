//! Calls by name over pipes. What is called is Python code, on threads of the library; `tensorwire.rpc` makes tensors of what comes.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorwire::pipe::Message;
use tensorwire::pipe::rpc::{self, Service, Wanted};
use tensorwire::{Deadline, Error};

use crate::callbacks;
use crate::error::exception;
use crate::interrupt::blocking;
use crate::member::Member;
use crate::pipe::{self, Coming, Incoming, Inside, Pipe, Receiving, Shape, deadline};
use crate::tensor::Input;
use crate::timeout::Timeout;
use crate::torch::in_flight;

/// One end of a pipe that calls and is called.
#[pyclass(frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct Rpc {
    /// None once it is closed.
    open: RwLock<Option<rpc::Rpc>>,
    peer: tensorwire::Member,
}

/// What Python sends: tensors with their shapes and strides, what made each, metadata and payloads.
type Outgoing<'py> = (Vec<Input>, Vec<Option<Shape>>, Vec<u8>, Bound<'py, PyBytes>, Vec<Bound<'py, PyBytes>>);

#[pymethods]
impl Rpc {
    /// Makes an end of a pipe one that calls, and of which these names can be called. `answer(call)` gives the answer as `call` takes it.
    #[new]
    fn new(
        py: Python<'_>,
        pipe: &Pipe,
        names: Vec<String>,
        answer: Py<PyAny>,
        threads: usize,
    ) -> PyResult<Self> {
        let answer = Arc::new(answer);
        let service = names.into_iter().fold(Service::new().threads(threads), |service, name| {
            let answer = answer.clone();
            service.with(name, move |call| answered(&answer, call))
        });
        let pipe = pipe.take(py)?;
        let peer = pipe.peer().clone();
        let rpc = py.detach(|| rpc::Rpc::over(pipe, service)).map_err(|error| exception(py, &error))?;
        Ok(Self { open: RwLock::new(Some(rpc)), peer })
    }

    /// Calls, and waits for the description of the answer.
    fn call(
        &self,
        py: Python<'_>,
        name: &str,
        outgoing: Outgoing<'_>,
        timeout: Option<Timeout>,
    ) -> PyResult<Incoming> {
        let (rpc, deadline) = (self.rpc(py)?, deadline(py, timeout.as_ref())?);
        let (tensors, shapes, makers, metadata, payloads) = outgoing;
        let message = pipe::message(py, &tensors, &shapes, &makers, metadata.as_bytes(), &payloads)?;
        let call = || deadline.into_iter().fold(rpc.call(name, &message), rpc::Calling::deadline).describe();
        blocking(py, call).map(|incoming| Incoming::new(Inside::Message(incoming)))
    }

    /// Starts a call.
    fn start(
        &self,
        py: Python<'_>,
        name: &str,
        outgoing: Outgoing<'_>,
        timeout: Option<Timeout>,
    ) -> PyResult<Receiving> {
        let (rpc, deadline) = (self.rpc(py)?, deadline(py, timeout.as_ref())?);
        let (tensors, shapes, makers, metadata, payloads) = outgoing;
        let message = pipe::message(py, &tensors, &shapes, &makers, metadata.as_bytes(), &payloads)?;
        let hold = in_flight::hold(py, &tensors)?;
        let call = || deadline.into_iter().fold(rpc.call(name, &message), rpc::Calling::deadline).start();
        let coming = Coming::Answer(py.detach(call).map_err(|error| exception(py, &error))?);
        if let Some(hold) = hold {
            hold.until(coming.work());
        }
        Ok(Receiving::new(coming))
    }

    /// Waits until the other end has closed.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Timeout>) -> PyResult<()> {
        let (rpc, deadline) = (self.rpc(py)?, deadline(py, timeout.as_ref())?);
        blocking(py, || rpc.wait(deadline.unwrap_or_else(|| Deadline::after(Duration::MAX))))
    }

    /// Closes the pipe.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let rpc = self.open.write().unwrap_or_else(PoisonError::into_inner).take();
        blocking(py, || rpc.map_or(Ok(()), rpc::Rpc::close))
    }

    /// The process at the other end.
    #[getter]
    fn peer(&self) -> Member {
        Member::of(&self.peer)
    }

    /// Which channel tensors take, and why.
    fn explain(&self, py: Python<'_>) -> PyResult<String> {
        let rpc = self.rpc(py)?;
        Ok(py.detach(|| rpc.explain()))
    }
}

impl Rpc {
    fn rpc(&self, py: Python<'_>) -> PyResult<rpc::Rpc> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.clone().ok_or_else(|| exception(py, &Error::misuse("this end was closed")))
    }
}

/// A call that Python answers.
#[pyclass(frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct Call {
    name: String,
    wanted: Arc<Wanted>,
    incoming: Py<Incoming>,
}

#[pymethods]
impl Call {
    /// What was called.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Its message, of which the description is here.
    #[getter]
    fn incoming(&self, py: Python<'_>) -> Py<Incoming> {
        self.incoming.clone_ref(py)
    }

    /// Whether somebody waits for the answer.
    #[getter]
    fn wanted(&self) -> bool {
        self.wanted.is_so()
    }

    /// Seconds until nobody waits for the answer any more.
    #[getter]
    fn left(&self) -> f64 {
        self.wanted.deadline().remaining().unwrap_or_default().as_secs_f64()
    }
}

/// Has Python answer a call.
fn answered(
    answer: &Py<PyAny>,
    call: rpc::Call,
) -> Result<Message, Box<dyn std::error::Error + Send + Sync>> {
    let (name, wanted) = (call.name().to_owned(), call.wanted());
    let run = |py: Python<'_>| -> PyResult<Message> {
        let incoming = Py::new(py, Incoming::new(Inside::Call(Some(call))))?;
        let call = Call { name, wanted, incoming: incoming.clone_ref(py) };
        let outgoing = answer.call1(py, (call,)).and_then(|outgoing| {
            let (tensors, shapes, makers, metadata, payloads) = outgoing.extract::<Outgoing<'_>>(py)?;
            pipe::message(py, &tensors, &shapes, &makers, metadata.as_bytes(), &payloads)
        });
        // The handler may have kept it.
        py.detach(|| incoming.get().end_call());
        outgoing
    };
    match callbacks::attached(|py| run(py).map_err(|error| text(py, &error))) {
        Some(answer) => answer.map_err(Into::into),
        None => Err("its process ends".into()),
    }
}

/// What an exception says.
fn text(py: Python<'_>, error: &PyErr) -> String {
    let kind = error.get_type(py).qualname();
    let kind = kind.map_or_else(|_| "an exception".into(), |name| name.to_string());
    match error.value(py).str() {
        Ok(said) if !said.to_string().is_empty() => format!("{kind}: {said}"),
        _ => kind,
    }
}
