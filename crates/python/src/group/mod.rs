//! Groups, as Python sees them.

mod run;
mod sparse;

use std::iter::once;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorwire::device::sync::{AtomicU64, Ordering};
use tensorwire::{Error, GroupBuilder};

pub(crate) use self::run::How;
use crate::context;
use crate::error::exception;
use crate::interrupt::blocking;
use crate::last_words;
use crate::member::Member;
use crate::op::Op;
use crate::tensor::{self, Input, Many, Output, bare, each};
use crate::timeout::Timeout;
use crate::torch::store;
use crate::work::{Gave, Started, Work};

/// What an operation gives.
type Outcome = PyResult<Work>;
/// Several tensors.
type Inputs = Many<Input>;
type Outputs = Many<Output>;

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
        last_words::prepare(py)?;
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

    /// What [`all_reduce`](Self::all_reduce) does, for a tensor that was looked at.
    pub(crate) fn reduce_all(
        &self,
        py: Python<'_>,
        tensor: &Input,
        op: Op,
        how: Option<How>,
    ) -> PyResult<Work> {
        op.check(py, [tensor])?;
        self.collective(py, "all_reduce", [tensor], how, |group| group.all_reduce(&tensor.tensor, op.0))
    }
}

/// Refuses parameters that a function does not have. One that it had once is told by its new name.
fn refuse_others(function: &str, others: Option<&Bound<'_, PyDict>>) -> PyResult<()> {
    let Some(name) = others.and_then(|others| others.keys().into_iter().next()) else { return Ok(()) };
    let name: String = name.extract()?;
    let hint = if name == "world_size" { ": the number of ranks is called 'world'" } else { "" };
    let text = format!("{function}() got an unexpected keyword argument '{name}'{hint}");
    Err(PyTypeError::new_err(text))
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
    #[pyo3(
        signature = (url, *, rank=None, world=None, name=None, timeout=None, **others),
        text_signature = "(url, *, rank=None, world=None, name=None, timeout=None)"
    )]
    fn from_url(
        py: Python<'_>,
        url: String,
        rank: Option<usize>,
        world: Option<usize>,
        name: Option<String>,
        timeout: Option<Timeout>,
        others: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        refuse_others("Group.from_url", others)?;
        Self::form(py, name, timeout, move |builder| builder.from_url(&url, rank, world))
    }

    /// A group that meets in a store: one of ours, or any object with the methods of torch's stores.
    #[staticmethod]
    ///
    /// `within` is a group that these ranks are in already, and their ranks there: if one of them dies, the new group is not
    /// waited for.
    #[pyo3(
        signature = (store, rank, world=None, *, name=None, timeout=None, within=None, **others),
        text_signature = "(store, rank, world, *, name=None, timeout=None, within=None)"
    )]
    #[allow(clippy::too_many_arguments)]
    fn from_store(
        py: Python<'_>,
        store: &Bound<'_, PyAny>,
        rank: usize,
        world: Option<usize>,
        name: Option<String>,
        timeout: Option<Timeout>,
        within: Option<(Py<Self>, Vec<usize>)>,
        others: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        refuse_others("Group.from_store", others)?;
        let world = world
            .ok_or_else(|| PyTypeError::new_err("Group.from_store() needs 'world', the number of ranks"))?;
        let store = store::adapt(py, store)?;
        // A parent that was closed knows nothing any more.
        let within = within.and_then(|(parent, ranks)| Some((parent.get().group(py).ok()?, ranks)));
        Self::form(py, name, timeout, move |builder| {
            let builder = match &within {
                Some((parent, ranks)) => builder.within(parent, ranks),
                None => builder,
            };
            builder.from_store(store, rank, world)
        })
    }

    /// This process's rank.
    #[getter]
    fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    #[getter]
    fn world(&self) -> usize {
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
    fn members(&self, py: Python<'_>) -> PyResult<Vec<Member>> {
        Ok(self.group(py)?.members().iter().map(Member::of).collect())
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
    #[pyo3(signature = (**how), text_signature = "($self, *, timeout=None, async_op=False)")]
    fn barrier(&self, py: Python, how: Option<How>) -> Outcome {
        self.collective(py, "barrier", [], how, |group| group.barrier())
    }

    /// The same, behind what torch's current streams of these GPUs have to do now.
    #[pyo3(signature = (gpus, **how), text_signature = "($self, gpus, *, timeout=None, async_op=False)")]
    fn _barrier_behind(&self, py: Python, gpus: Vec<usize>, how: Option<How>) -> Outcome {
        self.barrier_behind(py, &gpus, how)
    }

    /// Reduces a tensor over all ranks; every rank gets the result in its place.
    #[pyo3(
        signature = (tensor, op=Op::default(), **how),
        text_signature = "($self, tensor, op='sum', *, timeout=None, async_op=False)"
    )]
    pub(crate) fn all_reduce(&self, py: Python, tensor: Output, op: Op, how: Option<How>) -> Outcome {
        self.reduce_all(py, &tensor, op, how)
    }

    /// Reduces several tensors over all ranks, each for itself, in one operation.
    #[pyo3(
        signature = (tensors, op=Op::default(), **how),
        text_signature = "($self, tensors, op='sum', *, timeout=None, async_op=False)"
    )]
    fn all_reduce_coalesced(&self, py: Python, tensors: Outputs, op: Op, how: Option<How>) -> Outcome {
        let tensors = tensors.list(py, "all_reduce_coalesced")?;
        op.check(py, each(&tensors))?;
        self.collective(py, "all_reduce", each(&tensors), how, |group| {
            group.all_reduce_coalesced(&bare(&tensors), op.0)
        })
    }

    /// Reduces several tensors of each rank together, over all ranks; the result goes to every one of them.
    #[pyo3(
        signature = (tensors, op=Op::default(), **how),
        text_signature = "($self, tensors, op='sum', *, timeout=None, async_op=False)"
    )]
    pub(crate) fn all_reduce_multi(&self, py: Python, tensors: Outputs, op: Op, how: Option<How>) -> Outcome {
        let tensors = tensors.list(py, "all_reduce_multi")?;
        op.check(py, each(&tensors))?;
        self.collective(py, "all_reduce", each(&tensors), how, |group| {
            group.all_reduce_multi(&bare(&tensors), op.0)
        })
    }

    /// Reduces a sparse tensor over all ranks. Gives the result, which is new, or with async_op=True a Work whose result()
    /// gives it.
    ///
    /// The tensor is a COO, CSR or CSC array or matrix of SciPy, such a tensor of torch, or NumPy arrays as
    /// `(keys, rows, shape)`. The result is of the same kind.
    #[pyo3(
        signature = (tensor, op=None, **how),
        text_signature = "($self, tensor, op='sum', *, timeout=None, async_op=False)"
    )]
    fn all_reduce_sparse<'py>(
        slf: &Bound<'py, Self>,
        tensor: &Bound<'py, PyAny>,
        op: Option<&Bound<'py, PyAny>>,
        how: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let op = op.map_or_else(|| intern!(py, "sum").clone().into_any(), Bound::clone);
        slf.py().import("tensorwire.sparse")?.getattr("all_reduce")?.call((slf, tensor, op), how)
    }

    /// What it is made of: sorted int64 keys and a row for each. `shape` are the sparse dimensions, `dims` those of a row.
    /// `make(keys, rows)` makes the work's result of the memory of both; without it, that is the result. It is called before
    /// the last exchange, when the rows are not there yet, on the thread that runs the operation: all memory is taken there,
    /// because an exception ends the operation on all ranks. It gives the result and what finishes it when the rows are there,
    /// or None. `memory(count)` gives the tensor of so many rows that becomes those of the result: rows of a GPU need it.
    /// `refused` ends the operation on all ranks, with this reason; it says whether memory is short.
    #[pyo3(
        signature = (keys, rows, shape, dims, op=Op::default(), make=None, dense=None, memory=None, refused=None, **how),
        text_signature = "($self, keys, rows, shape, dims, op='sum', make=None, dense=None, memory=None, refused=None, *, timeout=None, async_op=False)"
    )]
    #[expect(clippy::too_many_arguments, reason = "what is one sparse tensor elsewhere is four of them here")]
    fn _all_reduce_sparse(
        &self,
        py: Python<'_>,
        keys: Input,
        rows: Input,
        shape: Vec<u64>,
        dims: Vec<usize>,
        op: Op,
        make: Option<Py<PyAny>>,
        dense: Option<bool>,
        memory: Option<Py<PyAny>>,
        refused: Option<(String, bool)>,
        how: Option<How>,
    ) -> Outcome {
        op.check(py, [&rows])?;
        let tensor = sparse::tensor(py, &keys, &rows, &shape, &dims)?;
        // Where the rows lie on a GPU, the caller has waited for its stream, and memory for the result is torch's.
        let on_host = [&keys].into_iter().chain(memory.is_none().then_some(&rows));
        let made = Arc::default();
        let asked = Arc::new(sparse::Asked { memory, make, dims, made: Arc::clone(&made) });
        let refused = refused.map(|(text, is_short)| sparse::refusal(text, is_short));
        let once_more = refused.clone();
        let work = self.run(
            py,
            "all_reduce_sparse",
            on_host,
            how,
            |group, by| {
                let call = by.of_sparse(group.all_reduce_sparse(&tensor, op.0), dense).refused(refused);
                asked.by(call, false).start().map(Started::Sparse)
            },
            |group, by| {
                let call = by.of_sparse(group.all_reduce_sparse(&tensor, op.0), dense).refused(once_more);
                Ok(Gave::Sparse(Box::new(asked.by(call, true).wait()?)))
            },
        )?;
        Ok(work.making(made))
    }

    /// Reduces a tensor over all ranks; rank `root` gets the result in its place, all others keep theirs.
    #[pyo3(
        signature = (tensor, root, op=Op::default(), **how),
        text_signature = "($self, tensor, root, op='sum', *, timeout=None, async_op=False)"
    )]
    fn reduce(
        &self,
        py: Python,
        tensor: &Bound<'_, PyAny>,
        root: usize,
        op: Op,
        how: Option<How>,
    ) -> Outcome {
        let tensor = tensor::written_if(root == self.rank, tensor)?;
        op.check(py, [&tensor])?;
        self.collective(py, "reduce", [&tensor], how, |group| group.reduce(&tensor.tensor, op.0, root))
    }

    /// Every rank gets what rank `root` has in the tensor.
    #[pyo3(
        signature = (tensor, root, **how),
        text_signature = "($self, tensor, root, *, timeout=None, async_op=False)"
    )]
    fn broadcast(&self, py: Python, tensor: &Bound<'_, PyAny>, root: usize, how: Option<How>) -> Outcome {
        let tensor = tensor::written_if(root != self.rank, tensor)?;
        self.collective(py, "broadcast", [&tensor], how, |group| group.broadcast(&tensor.tensor, root))
    }

    /// The same for several tensors in one operation.
    #[pyo3(
        signature = (tensors, root, **how),
        text_signature = "($self, tensors, root, *, timeout=None, async_op=False)"
    )]
    fn broadcast_coalesced(
        &self,
        py: Python,
        tensors: Vec<Bound<'_, PyAny>>,
        root: usize,
        how: Option<How>,
    ) -> Outcome {
        let tensors = tensors.iter().map(|tensor| tensor::written_if(root != self.rank, tensor));
        let tensors = tensors.collect::<PyResult<Vec<_>>>()?;
        self.collective(py, "broadcast", &tensors, how, |group| {
            group.broadcast_coalesced(&bare(&tensors), root)
        })
    }

    /// Every rank gets the input of each: one output for each rank, as large as that rank's input.
    #[pyo3(
        signature = (outputs, input, **how),
        text_signature = "($self, outputs, input, *, timeout=None, async_op=False)"
    )]
    fn all_gather(&self, py: Python, outputs: Outputs, input: Input, how: Option<How>) -> Outcome {
        let outputs = outputs.list(py, "all_gather")?;
        self.collective(py, "all_gather", each(&outputs).chain([&input]), how, |group| {
            group.all_gather(&bare(&outputs), &input.tensor)
        })
    }

    /// Every rank gets the inputs of all, which are equally large, one after the other in one tensor.
    #[pyo3(
        signature = (output, input, **how),
        text_signature = "($self, output, input, *, timeout=None, async_op=False)"
    )]
    fn all_gather_into(&self, py: Python, output: Output, input: Input, how: Option<How>) -> Outcome {
        self.collective(py, "all_gather", once(&*output).chain([&input]), how, |group| {
            group.all_gather_into(&output.tensor, &input.tensor)
        })
    }

    /// Several tensors gathered in one operation: `outputs[i]` holds the `inputs[i]` of all ranks, one after the other.
    #[pyo3(
        signature = (outputs, inputs, **how),
        text_signature = "($self, outputs, inputs, *, timeout=None, async_op=False)"
    )]
    fn all_gather_coalesced(
        &self,
        py: Python,
        outputs: Outputs,
        inputs: Inputs,
        how: Option<How>,
    ) -> Outcome {
        let outputs = outputs.list(py, "all_gather_coalesced")?;
        let inputs = inputs.list(py, "all_gather_coalesced")?;
        self.collective(py, "all_gather", each(&outputs).chain(&inputs), how, |group| {
            group.all_gather_coalesced(&bare(&outputs), &bare(&inputs))
        })
    }

    /// Rank `root` gets the input of each rank, all equally large; `outputs` is None or empty on the others.
    #[pyo3(
        signature = (outputs, input, root, **how),
        text_signature = "($self, outputs, input, root, *, timeout=None, async_op=False)"
    )]
    fn gather(
        &self,
        py: Python,
        outputs: Option<Outputs>,
        input: Input,
        root: usize,
        how: Option<How>,
    ) -> Outcome {
        let outputs = outputs.unwrap_or(Many::List(vec![])).list(py, "gather")?;
        self.collective(py, "gather", each(&outputs).chain([&input]), how, |group| {
            group.gather(&bare(&outputs), &input.tensor, root)
        })
    }

    /// Every rank gets its part of what rank `root` has, all equally large; `inputs` is None or empty on the others.
    #[pyo3(
        signature = (output, inputs, root, **how),
        text_signature = "($self, output, inputs, root, *, timeout=None, async_op=False)"
    )]
    fn scatter(
        &self,
        py: Python,
        output: Output,
        inputs: Option<Inputs>,
        root: usize,
        how: Option<How>,
    ) -> Outcome {
        let inputs = inputs.unwrap_or(Many::List(vec![])).list(py, "scatter")?;
        self.collective(py, "scatter", once(&*output).chain(&inputs), how, |group| {
            group.scatter(&output.tensor, &bare(&inputs), root)
        })
    }

    /// Every rank gets its part of the reduction over all ranks: one input for each rank, as large as that rank's output.
    #[pyo3(
        signature = (output, inputs, op=Op::default(), **how),
        text_signature = "($self, output, inputs, op='sum', *, timeout=None, async_op=False)"
    )]
    fn reduce_scatter(
        &self,
        py: Python,
        output: Output,
        inputs: Inputs,
        op: Op,
        how: Option<How>,
    ) -> Outcome {
        let inputs = inputs.list(py, "reduce_scatter")?;
        let tensors = once(&*output).chain(&inputs);
        op.check(py, tensors.clone())?;
        self.collective(py, "reduce_scatter", tensors, how, |group| {
            group.reduce_scatter(&output.tensor, &bare(&inputs), op.0)
        })
    }

    /// The same where the parts are equally large and lie one after the other in one tensor.
    #[pyo3(
        signature = (output, input, op=Op::default(), **how),
        text_signature = "($self, output, input, op='sum', *, timeout=None, async_op=False)"
    )]
    fn reduce_scatter_from(
        &self,
        py: Python,
        output: Output,
        input: Input,
        op: Op,
        how: Option<How>,
    ) -> Outcome {
        let tensors = once(&*output).chain([&input]);
        op.check(py, tensors.clone())?;
        self.collective(py, "reduce_scatter", tensors, how, |group| {
            group.reduce_scatter_from(&output.tensor, &input.tensor, op.0)
        })
    }

    /// Several tensors in one operation: `outputs[i]` is this rank's part of the reduction of `inputs[i]`.
    #[pyo3(
        signature = (outputs, inputs, op=Op::default(), **how),
        text_signature = "($self, outputs, inputs, op='sum', *, timeout=None, async_op=False)"
    )]
    fn reduce_scatter_coalesced(
        &self,
        py: Python,
        outputs: Outputs,
        inputs: Inputs,
        op: Op,
        how: Option<How>,
    ) -> Outcome {
        let outputs = outputs.list(py, "reduce_scatter_coalesced")?;
        let inputs = inputs.list(py, "reduce_scatter_coalesced")?;
        let tensors = each(&outputs).chain(&inputs);
        op.check(py, tensors.clone())?;
        self.collective(py, "reduce_scatter", tensors, how, |group| {
            group.reduce_scatter_coalesced(&bare(&outputs), &bare(&inputs), op.0)
        })
    }

    /// Every rank gets from each the part meant for it: `inputs[j]` goes to rank j, `outputs[i]` comes from rank i. Parts may
    /// have any sizes that fit together.
    #[pyo3(
        signature = (outputs, inputs, **how),
        text_signature = "($self, outputs, inputs, *, timeout=None, async_op=False)"
    )]
    fn all_to_all(&self, py: Python, outputs: Outputs, inputs: Inputs, how: Option<How>) -> Outcome {
        let outputs = outputs.list(py, "all_to_all")?;
        let inputs = inputs.list(py, "all_to_all")?;
        self.collective(py, "all_to_all", each(&outputs).chain(&inputs), how, |group| {
            group.all_to_all(&bare(&outputs), &bare(&inputs))
        })
    }

    /// The same where all parts are equally large and lie one after the other in one tensor.
    #[pyo3(
        signature = (output, input, **how),
        text_signature = "($self, output, input, *, timeout=None, async_op=False)"
    )]
    fn all_to_all_into(&self, py: Python, output: Output, input: Input, how: Option<How>) -> Outcome {
        self.collective(py, "all_to_all", once(&*output).chain([&input]), how, |group| {
            group.all_to_all_into(&output.tensor, &input.tensor)
        })
    }

    /// Sends a tensor to a rank. One on a GPU is copied behind torch's current stream, and waits for nobody.
    #[pyo3(
        signature = (tensor, to, tag=0, **how),
        text_signature = "($self, tensor, to, tag=0, *, timeout=None, async_op=False)"
    )]
    fn send(&self, py: Python, tensor: Input, to: usize, tag: u64, how: Option<How>) -> Outcome {
        if let Some(gpu) = &tensor.gpu {
            // It waits for no other rank. So what the program does next on the stream may change the tensor, also where it
            // asks for a work and forgets to wait.
            return self.on_stream(py, gpu, how, |group, by, queue, _| {
                by.of_message(group.send(&tensor.tensor, to).tag(tag)).on(queue).map(Started::One)
            });
        }
        self.run(
            py,
            "send",
            [&tensor],
            how,
            |group, by| by.of_message(group.send(&tensor.tensor, to).tag(tag)).start().map(Started::One),
            |group, by| by.of_message(group.send(&tensor.tensor, to).tag(tag)).wait().map(|()| Gave::Nothing),
        )
    }

    /// Receives the next message of a rank that has this tag. It has the tensor's type and size.
    #[pyo3(
        signature = (tensor, source, tag=0, **how),
        text_signature = "($self, tensor, source, tag=0, *, timeout=None, async_op=False)"
    )]
    fn recv(&self, py: Python, tensor: Output, source: usize, tag: u64, how: Option<How>) -> Outcome {
        if let Some(gpu) = &tensor.gpu {
            return self.on_stream(py, gpu, how, |group, by, queue, async_op| {
                let recv = by.of_message(group.recv(&tensor.tensor, source).tag(tag));
                let work = if async_op { recv.after(queue)?.start() } else { recv.on(queue) };
                work.map(Started::One)
            });
        }
        self.run(
            py,
            "recv",
            [&*tensor],
            how,
            |group, by| by.of_message(group.recv(&tensor.tensor, source).tag(tag)).start().map(Started::One),
            |group, by| {
                let message = by.of_message(group.recv(&tensor.tensor, source).tag(tag));
                message.wait().map(|()| Gave::Source(source))
            },
        )
    }

    /// Receives the next message of any rank that has this tag; the work's source says which.
    #[pyo3(
        signature = (tensor, tag=0, **how),
        text_signature = "($self, tensor, tag=0, *, timeout=None, async_op=False)"
    )]
    fn recv_any(&self, py: Python, tensor: Output, tag: u64, how: Option<How>) -> Outcome {
        if let Some(gpu) = &tensor.gpu {
            return self.on_stream(py, gpu, how, |group, by, queue, async_op| {
                let recv = by.of_message(group.recv_any(&tensor.tensor).tag(tag));
                let any = if async_op { recv.after(queue)?.start() } else { recv.on(queue) };
                any.map(Started::FromAny)
            });
        }
        self.run(
            py,
            "recv_any",
            [&*tensor],
            how,
            |group, by| by.of_message(group.recv_any(&tensor.tensor).tag(tag)).start().map(Started::FromAny),
            |group, by| by.of_message(group.recv_any(&tensor.tensor).tag(tag)).wait().map(Gave::Source),
        )
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
    /// end with an error, here and on other threads; ranks that need this one later get an error that says so. If an
    /// exception is being handled, as in a `finally`, that error names it. Raises MismatchError if the ranks did not call
    /// the same as their last collective and no operation has raised that yet; the group is closed all the same.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let group = self.open.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(group) = group else { return Ok(()) };
        if let Some(raised) = last_words::going_through(py)? {
            group.last_words(&raised);
        }
        blocking(py, || group.close())
    }

    fn __repr__(&self) -> String {
        format!("<tensorwire.Group {:?}, rank {} of {}>", self.name, self.rank, self.world)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let group = self.open.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let Some(group) = group else { return };
        Python::try_attach(|py| {
            last_words::if_program_is_over(py, group.context());
            // The end of a group waits for its threads, which may need the interpreter to let go of tensors.
            py.detach(move || drop(group));
        });
    }
}

fn nanos(timeout: Duration) -> u64 {
    timeout.as_nanos().try_into().unwrap_or(u64::MAX)
}
