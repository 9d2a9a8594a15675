//! Groups, as Python sees them.

use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use tensorwire::collective::Call;
use tensorwire::device::sync::{AtomicU64, Ordering};
use tensorwire::{Deadline, Error, GroupBuilder};

use crate::context;
use crate::error::exception;
use crate::interrupt::blocking;
use crate::memory::{self, Memory};
use crate::op::Op;
use crate::tensor::{Foreign, bare, input, inputs, output, outputs};
use crate::timeout::Timeout;
use crate::torch::store;
use crate::work::Work;

/// Ranks that talk.
///
/// Operations take tensors of torch, NumPy or whatever speaks DLPack or the buffer protocol, and write their results in
/// place. They are over when the call returns, or with async_op=True when the Work that it returns is done. Operations of
/// a group run in the order in which they are called, which is the same on all ranks.
#[pyclass(frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct Group {
    /// None once it is closed.
    open: RwLock<Option<tensorwire::Group>>,
    name: String,
    rank: usize,
    world: usize,
    /// Nanoseconds.
    timeout: AtomicU64,
    /// How many operations this rank has called.
    sequence: AtomicU64,
}

/// The keywords that every operation has.
struct How {
    timeout: Option<Timeout>,
    async_op: bool,
}

impl Group {
    fn over(group: tensorwire::Group) -> Self {
        Self {
            name: group.name().to_owned(),
            rank: group.rank(),
            world: group.world(),
            timeout: AtomicU64::new(nanos(group.timeout())),
            sequence: AtomicU64::new(0),
            open: RwLock::new(Some(group)),
        }
    }

    fn form(
        py: Python<'_>,
        name: Option<String>,
        timeout: Option<Timeout>,
        form: impl FnOnce(GroupBuilder) -> tensorwire::Result<tensorwire::Group> + Send,
    ) -> PyResult<Self> {
        let timeout = timeout.map(|timeout| timeout.duration(py)).transpose()?;
        blocking(py, || {
            let mut builder = tensorwire::Group::builder().context(&context::ours()?);
            if let Some(timeout) = timeout {
                builder = builder.timeout(timeout);
            }
            if let Some(name) = name {
                builder = builder.name(name);
            }
            form(builder)
        })
        .map(Self::over)
    }

    fn group(&self, py: Python<'_>) -> PyResult<tensorwire::Group> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.clone().ok_or_else(|| {
            exception(py, &Error::misuse(format!("the group {:?} was closed on this rank", self.name)))
        })
    }

    fn deadline(&self, py: Python<'_>, timeout: Option<&Timeout>) -> PyResult<Deadline> {
        let own = || Duration::from_nanos(self.timeout.load(Ordering::Relaxed));
        let timeout = timeout.map(|timeout| timeout.duration(py)).transpose()?;
        Ok(Deadline::after(timeout.unwrap_or_else(own)))
    }

    /// What [`all_reduce`](Self::all_reduce) does, for a tensor that was looked at.
    pub(crate) fn reduce_all(
        &self,
        py: Python<'_>,
        tensor: &Foreign,
        op: Op,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        tensor.check(py, op.0)?;
        self.run(py, "all_reduce", &How { timeout, async_op }, |group| group.all_reduce(&tensor.tensor, op.0))
    }

    fn run(
        &self,
        py: Python<'_>,
        name: &'static str,
        how: &How,
        call: impl for<'g> FnOnce(&'g tensorwire::Group) -> Call<'g> + Send,
    ) -> PyResult<Work> {
        let group = self.group(py)?;
        let deadline = self.deadline(py, how.timeout.as_ref())?;
        self.sequence.fetch_add(1, Ordering::Relaxed);
        if how.async_op {
            let work = py.detach(|| call(&group).start_by(deadline));
            return work.map(Work::started).map_err(|error| exception(py, &error));
        }
        let start = Instant::now();
        blocking(py, || call(&group).wait_by(deadline))?;
        Ok(Work::over(name, start.elapsed(), None))
    }
}

#[pymethods]
impl Group {
    /// The group of this process's launcher: torchrun, tensorwire run, Slurm, Open MPI or PMI.
    #[staticmethod]
    #[pyo3(signature = (*, name=None, timeout=None))]
    fn from_env(py: Python<'_>, name: Option<String>, timeout: Option<Timeout>) -> PyResult<Self> {
        Self::form(py, name, timeout, GroupBuilder::from_env)
    }

    /// A group that meets at tcp://host:port (rank 0 serves the store there) or file:///path.
    #[staticmethod]
    #[pyo3(signature = (url, *, rank=None, world_size=None, name=None, timeout=None))]
    fn from_url(
        py: Python<'_>,
        url: String,
        rank: Option<usize>,
        world_size: Option<usize>,
        name: Option<String>,
        timeout: Option<Timeout>,
    ) -> PyResult<Self> {
        Self::form(py, name, timeout, move |builder| builder.from_url(&url, rank, world_size))
    }

    /// A group that meets in a store: one of ours, or any object with the methods of torch's stores.
    #[staticmethod]
    #[pyo3(signature = (store, rank, world_size, *, name=None, timeout=None))]
    fn from_store(
        py: Python<'_>,
        store: &Bound<'_, PyAny>,
        rank: usize,
        world_size: usize,
        name: Option<String>,
        timeout: Option<Timeout>,
    ) -> PyResult<Self> {
        let store = store::adapt(py, store)?;
        Self::form(py, name, timeout, move |builder| builder.from_store(store, rank, world_size))
    }

    /// This process's rank.
    #[getter]
    fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    #[getter]
    fn world_size(&self) -> usize {
        self.world
    }

    /// The name of the group in its store.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// How long an operation may take that has no time-out of its own.
    #[getter]
    fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout.load(Ordering::Relaxed))
    }

    /// Changes it, for this rank's later operations.
    fn set_timeout(&self, py: Python<'_>, timeout: Timeout) -> PyResult<()> {
        self.timeout.store(nanos(timeout.duration(py)?), Ordering::Relaxed);
        Ok(())
    }

    /// How many operations this rank has called.
    #[getter]
    fn sequence(&self) -> u64 {
        self.sequence.load(Ordering::Relaxed)
    }

    /// All ranks with host and process, in order.
    #[getter]
    fn members(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(self.group(py)?.members().iter().map(ToString::to_string).collect())
    }

    /// The ranks of each host: those that share memory.
    #[getter]
    fn hosts(&self, py: Python<'_>) -> PyResult<Vec<Vec<usize>>> {
        Ok(self.group(py)?.hosts().to_vec())
    }

    /// Raises if the group has failed: a rank died, left while it was needed, or somebody aborted.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.group(py)?.check().map_err(|error| exception(py, &error))
    }

    /// How this rank reaches every other one, and why not better.
    fn explain(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.group(py)?.explain())
    }

    /// Waits until every rank has come here.
    #[pyo3(signature = (*, timeout=None, async_op=false))]
    fn barrier(&self, py: Python<'_>, timeout: Option<Timeout>, async_op: bool) -> PyResult<Work> {
        if async_op {
            return self.run(py, "barrier", &How { timeout, async_op }, |group| group.barrier_call());
        }
        let (group, deadline) = (self.group(py)?, self.deadline(py, timeout.as_ref())?);
        self.sequence.fetch_add(1, Ordering::Relaxed);
        let start = Instant::now();
        blocking(py, || group.barrier_by(deadline))?;
        Ok(Work::over("barrier", start.elapsed(), None))
    }

    /// Reduces a tensor over all ranks; every rank gets the result in its place.
    #[pyo3(
        signature = (tensor, op=Op::default(), *, timeout=None, async_op=false),
        text_signature = "($self, tensor, op='sum', *, timeout=None, async_op=False)"
    )]
    fn all_reduce(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        op: Op,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        self.reduce_all(py, &output(tensor)?, op, timeout, async_op)
    }

    /// Reduces several tensors over all ranks, each for itself, in one operation.
    #[pyo3(
        signature = (tensors, op=Op::default(), *, timeout=None, async_op=false),
        text_signature = "($self, tensors, op='sum', *, timeout=None, async_op=False)"
    )]
    fn all_reduce_coalesced(
        &self,
        py: Python<'_>,
        tensors: Vec<Bound<'_, PyAny>>,
        op: Op,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let tensors = outputs(&tensors)?;
        tensors.iter().try_for_each(|tensor| tensor.check(py, op.0))?;
        let list = bare(&tensors);
        self.run(py, "all_reduce", &How { timeout, async_op }, |group| {
            group.all_reduce_coalesced(&list, op.0)
        })
    }

    /// Reduces several tensors of each rank together, over all ranks; the result goes to every one of them.
    #[pyo3(
        signature = (tensors, op=Op::default(), *, timeout=None, async_op=false),
        text_signature = "($self, tensors, op='sum', *, timeout=None, async_op=False)"
    )]
    fn all_reduce_multi(
        &self,
        py: Python<'_>,
        tensors: Vec<Bound<'_, PyAny>>,
        op: Op,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let tensors = outputs(&tensors)?;
        tensors.iter().try_for_each(|tensor| tensor.check(py, op.0))?;
        let list = bare(&tensors);
        self.run(py, "all_reduce", &How { timeout, async_op }, |group| group.all_reduce_multi(&list, op.0))
    }

    /// Reduces a tensor over all ranks; rank `root` gets the result in its place, all others keep theirs.
    #[pyo3(
        signature = (tensor, root, op=Op::default(), *, timeout=None, async_op=false),
        text_signature = "($self, tensor, root, op='sum', *, timeout=None, async_op=False)"
    )]
    fn reduce(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        root: usize,
        op: Op,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let tensor = if root == self.rank { output(tensor)? } else { input(tensor)? };
        tensor.check(py, op.0)?;
        let how = How { timeout, async_op };
        self.run(py, "reduce", &how, |group| group.reduce(&tensor.tensor, op.0, root))
    }

    /// Every rank gets what rank `root` has in the tensor.
    #[pyo3(signature = (tensor, root, *, timeout=None, async_op=false))]
    fn broadcast(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        root: usize,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let tensor = if root == self.rank { input(tensor)? } else { output(tensor)? };
        let how = How { timeout, async_op };
        self.run(py, "broadcast", &how, |group| group.broadcast(&tensor.tensor, root))
    }

    /// The same for several tensors in one operation.
    #[pyo3(signature = (tensors, root, *, timeout=None, async_op=false))]
    fn broadcast_coalesced(
        &self,
        py: Python<'_>,
        tensors: Vec<Bound<'_, PyAny>>,
        root: usize,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let tensors = if root == self.rank { inputs(&tensors)? } else { outputs(&tensors)? };
        let list = bare(&tensors);
        let how = How { timeout, async_op };
        self.run(py, "broadcast", &how, |group| group.broadcast_coalesced(&list, root))
    }

    /// Every rank gets the input of each: one output for each rank, as large as that rank's input.
    #[pyo3(signature = (outputs, input, *, timeout=None, async_op=false))]
    fn all_gather(
        &self,
        py: Python<'_>,
        outputs: Vec<Bound<'_, PyAny>>,
        input: &Bound<'_, PyAny>,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let (into, from) = (crate::tensor::outputs(&outputs)?, crate::tensor::input(input)?);
        let list = bare(&into);
        let how = How { timeout, async_op };
        self.run(py, "all_gather", &how, |group| group.all_gather(&list, &from.tensor))
    }

    /// Every rank gets the inputs of all, which are equally large, one after the other in one tensor.
    #[pyo3(signature = (output, input, *, timeout=None, async_op=false))]
    fn all_gather_into(
        &self,
        py: Python<'_>,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let (into, from) = (crate::tensor::output(output)?, crate::tensor::input(input)?);
        let how = How { timeout, async_op };
        self.run(py, "all_gather", &how, |group| group.all_gather_into(&into.tensor, &from.tensor))
    }

    /// Several tensors gathered in one operation: `outputs[i]` holds the `inputs[i]` of all ranks, one after the other.
    #[pyo3(signature = (outputs, inputs, *, timeout=None, async_op=false))]
    fn all_gather_coalesced(
        &self,
        py: Python<'_>,
        outputs: Vec<Bound<'_, PyAny>>,
        inputs: Vec<Bound<'_, PyAny>>,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let (into, from) = (crate::tensor::outputs(&outputs)?, crate::tensor::inputs(&inputs)?);
        let (into, from) = (bare(&into), bare(&from));
        let how = How { timeout, async_op };
        self.run(py, "all_gather", &how, |group| group.all_gather_coalesced(&into, &from))
    }

    /// Rank `root` gets the input of each rank, all equally large; `outputs` is empty on the others.
    #[pyo3(signature = (outputs, input, root, *, timeout=None, async_op=false))]
    fn gather(
        &self,
        py: Python<'_>,
        outputs: Vec<Bound<'_, PyAny>>,
        input: &Bound<'_, PyAny>,
        root: usize,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let (into, from) = (crate::tensor::outputs(&outputs)?, crate::tensor::input(input)?);
        let list = bare(&into);
        let how = How { timeout, async_op };
        self.run(py, "gather", &how, |group| group.gather(&list, &from.tensor, root))
    }

    /// Every rank gets its part of what rank `root` has, all equally large; `inputs` is empty on the others.
    #[pyo3(signature = (output, inputs, root, *, timeout=None, async_op=false))]
    fn scatter(
        &self,
        py: Python<'_>,
        output: &Bound<'_, PyAny>,
        inputs: Vec<Bound<'_, PyAny>>,
        root: usize,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let (into, from) = (crate::tensor::output(output)?, crate::tensor::inputs(&inputs)?);
        let list = bare(&from);
        let how = How { timeout, async_op };
        self.run(py, "scatter", &how, |group| group.scatter(&into.tensor, &list, root))
    }

    /// Every rank gets its part of the reduction over all ranks: one input for each rank, as large as that rank's output.
    #[pyo3(
        signature = (output, inputs, op=Op::default(), *, timeout=None, async_op=false),
        text_signature = "($self, output, inputs, op='sum', *, timeout=None, async_op=False)"
    )]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        output: &Bound<'_, PyAny>,
        inputs: Vec<Bound<'_, PyAny>>,
        op: Op,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let (into, from) = (crate::tensor::output(output)?, crate::tensor::inputs(&inputs)?);
        std::iter::once(&into).chain(&from).try_for_each(|tensor| tensor.check(py, op.0))?;
        let list = bare(&from);
        let how = How { timeout, async_op };
        self.run(py, "reduce_scatter", &how, |group| group.reduce_scatter(&into.tensor, &list, op.0))
    }

    /// The same where the parts are equally large and lie one after the other in one tensor.
    #[pyo3(
        signature = (output, input, op=Op::default(), *, timeout=None, async_op=false),
        text_signature = "($self, output, input, op='sum', *, timeout=None, async_op=False)"
    )]
    fn reduce_scatter_from(
        &self,
        py: Python<'_>,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        op: Op,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let (into, from) = (crate::tensor::output(output)?, crate::tensor::input(input)?);
        [&into, &from].into_iter().try_for_each(|tensor| tensor.check(py, op.0))?;
        let how = How { timeout, async_op };
        self.run(py, "reduce_scatter", &how, |group| {
            group.reduce_scatter_from(&into.tensor, &from.tensor, op.0)
        })
    }

    /// Several tensors in one operation: `outputs[i]` is this rank's part of the reduction of `inputs[i]`.
    #[pyo3(
        signature = (outputs, inputs, op=Op::default(), *, timeout=None, async_op=false),
        text_signature = "($self, outputs, inputs, op='sum', *, timeout=None, async_op=False)"
    )]
    fn reduce_scatter_coalesced(
        &self,
        py: Python<'_>,
        outputs: Vec<Bound<'_, PyAny>>,
        inputs: Vec<Bound<'_, PyAny>>,
        op: Op,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let (into, from) = (crate::tensor::outputs(&outputs)?, crate::tensor::inputs(&inputs)?);
        into.iter().chain(&from).try_for_each(|tensor| tensor.check(py, op.0))?;
        let (into, from) = (bare(&into), bare(&from));
        let how = How { timeout, async_op };
        self.run(py, "reduce_scatter", &how, |group| group.reduce_scatter_coalesced(&into, &from, op.0))
    }

    /// Every rank gets from each the part meant for it: `inputs[j]` goes to rank j, `outputs[i]` comes from rank i. Parts may
    /// have any sizes that fit together.
    #[pyo3(signature = (outputs, inputs, *, timeout=None, async_op=false))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        outputs: Vec<Bound<'_, PyAny>>,
        inputs: Vec<Bound<'_, PyAny>>,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let (into, from) = (crate::tensor::outputs(&outputs)?, crate::tensor::inputs(&inputs)?);
        let (into, from) = (bare(&into), bare(&from));
        let how = How { timeout, async_op };
        self.run(py, "all_to_all", &how, |group| group.all_to_all(&into, &from))
    }

    /// The same where all parts are equally large and lie one after the other in one tensor.
    #[pyo3(signature = (output, input, *, timeout=None, async_op=false))]
    fn all_to_all_into(
        &self,
        py: Python<'_>,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let (into, from) = (crate::tensor::output(output)?, crate::tensor::input(input)?);
        let how = How { timeout, async_op };
        self.run(py, "all_to_all", &how, |group| group.all_to_all_into(&into.tensor, &from.tensor))
    }

    /// Sends a tensor to a rank.
    #[pyo3(signature = (tensor, to, tag=0, *, timeout=None, async_op=false))]
    fn send(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        to: usize,
        tag: u64,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let (group, from) = (self.group(py)?, input(tensor)?);
        let deadline = self.deadline(py, timeout.as_ref())?;
        self.sequence.fetch_add(1, Ordering::Relaxed);
        if async_op {
            let work = py.detach(|| group.start_send_by(&from.tensor, to, tag, deadline));
            return work.map(Work::started).map_err(|error| exception(py, &error));
        }
        let start = Instant::now();
        blocking(py, || group.send_by(&from.tensor, to, tag, deadline))?;
        Ok(Work::over("send", start.elapsed(), None))
    }

    /// Receives the next message of a rank that has this tag. It has the tensor's type and size.
    #[pyo3(signature = (tensor, source, tag=0, *, timeout=None, async_op=false))]
    fn recv(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        source: usize,
        tag: u64,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let (group, into) = (self.group(py)?, output(tensor)?);
        let deadline = self.deadline(py, timeout.as_ref())?;
        self.sequence.fetch_add(1, Ordering::Relaxed);
        if async_op {
            let work = py.detach(|| group.start_recv_by(&into.tensor, source, tag, deadline));
            return work.map(Work::started).map_err(|error| exception(py, &error));
        }
        let start = Instant::now();
        blocking(py, || group.recv_by(&into.tensor, source, tag, deadline))?;
        Ok(Work::over("recv", start.elapsed(), Some(source)))
    }

    /// Receives the next message of any rank that has this tag; the work's source says which.
    #[pyo3(signature = (tensor, tag=0, *, timeout=None, async_op=false))]
    fn recv_any(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        tag: u64,
        timeout: Option<Timeout>,
        async_op: bool,
    ) -> PyResult<Work> {
        let (group, into) = (self.group(py)?, output(tensor)?);
        let deadline = self.deadline(py, timeout.as_ref())?;
        self.sequence.fetch_add(1, Ordering::Relaxed);
        if async_op {
            let work = py.detach(|| group.start_recv_any_by(&into.tensor, tag, deadline));
            return work.map(Work::from_any).map_err(|error| exception(py, &error));
        }
        let start = Instant::now();
        let source = blocking(py, || group.recv_any_by(&into.tensor, tag, deadline))?;
        Ok(Work::over("recv_any", start.elapsed(), Some(source)))
    }

    /// A group of some of these ranks, in the given order. Those ranks call it, with the same list.
    fn subgroup(&self, py: Python<'_>, ranks: Vec<usize>) -> PyResult<Self> {
        let group = self.group(py)?;
        blocking(py, || group.subgroup(&ranks)).map(Self::over)
    }

    /// Splits the group by colour: all ranks call it. None for a rank whose colour is None.
    #[pyo3(signature = (colour, key=0))]
    fn split(&self, py: Python<'_>, colour: Option<u64>, key: i64) -> PyResult<Option<Self>> {
        let group = self.group(py)?;
        Ok(blocking(py, || group.split(colour, key))?.map(Self::over))
    }

    /// A group of the ranks that are still there, after others have died or left.
    fn shrink(&self, py: Python<'_>) -> PyResult<Self> {
        let group = self.group(py)?;
        blocking(py, || group.shrink()).map(Self::over)
    }

    /// Ends every pending and later operation of this group, on all ranks, with an error that carries the reason.
    #[pyo3(signature = (reason=""))]
    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let group = self.group(py)?;
        py.detach(|| group.abort(reason));
        Ok(())
    }

    /// Closes the group on this rank. Collectives that were started before go on to their end, messages that are pending
    /// end with an error, here and on other threads; ranks that need this one later get an error that says so.
    fn close(&self, py: Python<'_>) {
        let group = self.open.write().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| group.map(tensorwire::Group::close));
    }

    /// Zeroed shared memory; collectives on it copy each byte only once. The same as tensorwire.alloc.
    fn empty(&self, py: Python<'_>, nbytes: usize) -> PyResult<Memory> {
        memory::alloc(py, nbytes, None)
    }

    fn __repr__(&self) -> String {
        format!("<tensorwire.Group {:?}, rank {} of {}>", self.name, self.rank, self.world)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let group = self.open.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // The end of a group waits for its threads, which may need the interpreter to let go of tensors.
        if group.is_some() {
            Python::try_attach(|py| py.detach(move || drop(group)));
        }
    }
}

fn nanos(timeout: Duration) -> u64 {
    timeout.as_nanos().try_into().unwrap_or(u64::MAX)
}
