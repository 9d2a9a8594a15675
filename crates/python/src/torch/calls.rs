//! How the backend for torch calls the operations of a group: the part of each call that is the same for all of them.
//!
//! It was written in Python first. But between two calls the program and torch empty the processor's caches, so that a
//! line of Python costs a tenth of a microsecond and more, and small operations take few microseconds in all.

use std::cell::RefCell;
use std::time::{SystemTime, UNIX_EPOCH};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyNotImplemented, PyTuple};
use tensorwire::ReduceOp;
use tensorwire::device::sync::{AtomicBool, AtomicU64, Ordering};

use crate::error::exception;
use crate::group::{Group, How};
use crate::op::Op;
use crate::torch::tensor::plain;
use crate::work::Work;

/// Calls operations of one group as torch's options say.
///
/// What it needs of torch's world it is given: nothing here looks for a module of ours.
#[pyclass(frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct Calls {
    /// Which one of this process.
    id: u64,
    issued: AtomicU64,
    /// Whether works tell how long they took.
    timed: AtomicBool,
    group: Py<Group>,
    /// Makes a work for torch: of a flight, the tensors, the number and the source.
    work: Py<PyAny>,
    /// Whether a profiler runs on this thread, and what makes a span for it: of a title and tensors.
    profiled: Py<PyAny>,
    span: Py<PyAny>,
    /// Takes when each operation was called, and its flight; None where nobody wants to know.
    recent: Option<Py<PyAny>>,
}

/// An operation as torch called it.
struct Called<'a, 'py> {
    title: &'a Bound<'py, PyAny>,
    inputs: &'a Bound<'py, PyAny>,
    outputs: &'a Bound<'py, PyAny>,
    opts: &'a Bound<'py, PyAny>,
    source: i64,
}

thread_local! {
    /// What this thread has started since it began to coalesce, and on which `Calls`. It goes with the thread.
    static COALESCED: RefCell<Vec<(u64, Py<PyList>)>> = const { RefCell::new(Vec::new()) };
}

impl Calls {
    /// Starts or runs an operation: `call` gets its time-out, and whether it is only started.
    ///
    /// Without asyncOp it runs on this thread and is over on return. torch expects no work then, and making one and waiting
    /// for it would take longer than all the rest of this. In a profile it runs on another thread always, as the operations
    /// of torch's own backends do.
    fn issue<'py>(
        &self,
        called: &Called<'_, 'py>,
        call: impl FnOnce(Option<Bound<'py, PyAny>>, bool) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let &Called { title, inputs, outputs, opts, source } = called;
        let py = opts.py();
        let number = self.issued.fetch_add(1, Ordering::Relaxed) + 1;
        let now = if self.recent.is_none() { 0 } else { nanos() };
        let coalesced = self.coalesced(py);
        let wanted = coalesced.is_some() || opts.getattr(intern!(py, "asyncOp"))?.is_truthy()?;
        let timeout = opts.getattr(intern!(py, "timeout"))?;
        // Without one torch says -1 ms.
        let unset = timeout.getattr(intern!(py, "days"))?.extract::<i32>()? < 0;
        let span = match self.profiled.bind(py).call0()?.is_truthy()? {
            true => Some(self.span.bind(py).call1((title, inputs))?),
            false => None,
        };
        let started = wanted || span.is_some();
        let timed = self.timed.load(Ordering::Relaxed);
        let flight = match (call((!unset).then_some(timeout), started), &span) {
            (Err(error), Some(span)) => {
                span.call_method0(intern!(py, "cancel"))?;
                return Err(error);
            }
            (flight, _) => flight?,
        };
        if let Some(span) = &span {
            span.call_method1(intern!(py, "follow"), (&flight,))?;
        }
        if let Ok(own) = flight.cast::<Work>() {
            // torch and the record below may keep it for long.
            own.get().leave_unattended();
        }
        if let Some(recent) = &self.recent {
            recent.bind(py).call_method1(intern!(py, "append"), ((now, &flight),))?;
        }
        if !started {
            return Ok(None);
        }
        if let Some(coalesced) = coalesced {
            coalesced.bind(py).append(&flight)?;
        }
        let work = self.work.bind(py).call1((flight, outputs, number, source))?;
        if timed {
            work.setattr(intern!(py, "timed"), true)?;
        }
        if let Some(span) = span {
            work.setattr(intern!(py, "span"), span)?;
        }
        if wanted {
            return Ok(Some(work));
        }
        work.call_method0(intern!(py, "wait"))?;
        Ok(None)
    }

    /// The flights of this thread since it began to coalesce; nothing outside of it.
    fn coalesced(&self, py: Python<'_>) -> Option<Py<PyList>> {
        COALESCED.with_borrow(|lists| {
            lists.iter().find(|(id, _)| *id == self.id).map(|(_, flights)| flights.clone_ref(py))
        })
    }
}

#[pymethods]
impl Calls {
    #[new]
    #[pyo3(signature = (group, *, work, profiled, span, recent))]
    fn new(
        group: Py<Group>,
        work: Py<PyAny>,
        profiled: Py<PyAny>,
        span: Py<PyAny>,
        recent: Option<Py<PyAny>>,
    ) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let id = LAST.fetch_add(1, Ordering::Relaxed);
        let (issued, timed) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { id, issued, timed, group, work, profiled, span, recent }
    }

    /// How many operations were called: the number of the last one.
    #[getter]
    fn issued(&self) -> u64 {
        self.issued.load(Ordering::Relaxed)
    }

    /// Works of operations that begin from now on tell how long they took.
    fn enable_timing(&self) {
        self.timed.store(true, Ordering::Relaxed);
    }

    /// Whether they do.
    #[getter]
    fn timed(&self) -> bool {
        self.timed.load(Ordering::Relaxed)
    }

    /// From here on this thread's operations only start, whatever their options say.
    fn start_coalescing(&self, py: Python<'_>) {
        // Of a start without an end.
        let _before = self.take_coalesced();
        let begun = (self.id, PyList::empty(py).unbind());
        COALESCED.with_borrow_mut(|lists| lists.push(begun));
    }

    /// The flights of this thread since then, and the end of it; None outside of it.
    fn take_coalesced(&self) -> Option<Py<PyList>> {
        COALESCED.with_borrow_mut(|lists| {
            let at = lists.iter().position(|(id, _)| *id == self.id)?;
            Some(lists.swap_remove(at).1)
        })
    }

    /// Calls a method of the group, or what behaves like one, with `call` and as torch's options say.
    #[pyo3(
        signature = (title, method, call, inputs, outputs, opts, source=-1),
        text_signature = "($self, title, method, call, inputs, outputs, opts, source=-1)"
    )]
    #[expect(clippy::too_many_arguments, reason = "each is one; a tuple of them would be one more object")]
    fn run<'py>(
        &self,
        py: Python<'py>,
        title: &Bound<'py, PyAny>,
        method: &Bound<'py, PyAny>,
        call: &Bound<'py, PyTuple>,
        inputs: &Bound<'py, PyAny>,
        outputs: &Bound<'py, PyAny>,
        opts: &Bound<'py, PyAny>,
        source: i64,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.issue(&Called { title, inputs, outputs, opts, source }, |timeout, async_op| {
            if timeout.is_none() && !async_op {
                return method.call1(call);
            }
            let how = PyDict::new(py);
            how.set_item(intern!(py, "timeout"), timeout)?;
            how.set_item(intern!(py, "async_op"), async_op)?;
            method.call(call, Some(&how))
        })
    }

    /// The operation that programs call most with little data, without any Python on its way. Several tensors of one rank
    /// are reduced together, too. NotImplemented for tensors that are not dense.
    fn all_reduce<'py>(
        &self,
        py: Python<'py>,
        tensors: &Bound<'py, PyAny>,
        opts: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        // torch gives a list; others may call with any sequence.
        let tensors = &match tensors.cast::<PyList>() {
            Ok(list) => list.clone(),
            Err(_) => PyList::new(py, tensors.extract::<Vec<Bound<'py, PyAny>>>()?)?,
        };
        // Asked first: a sparse tensor that is asked for its memory raises, which takes torch milliseconds.
        if !tensors.is_empty() && !is_strided(&tensors.get_item(0)?)? {
            return Ok(Some(PyNotImplemented::get(py).to_owned().into_any()));
        }
        let one = if tensors.len() == 1 { plain(&tensors.get_item(0)?)? } else { None };
        let op = Self::reduction(opts)?;
        let title = intern!(py, "all_reduce").as_any();
        let called = Called { title, inputs: tensors, outputs: tensors, opts, source: -1 };
        self.issue(&called, |timeout, async_op| {
            let timeout = timeout.map(|timeout| timeout.extract()).transpose()?;
            let (group, how) = (self.group.get(), Some(How { timeout, async_op }));
            let work = match one {
                Some(tensor) => group.reduce_all(py, &tensor, op, how)?,
                None if tensors.len() == 1 => {
                    group.all_reduce(py, tensors.get_item(0)?.extract()?, op, how)?
                }
                None => group.all_reduce_multi(py, tensors.extract()?, op, how)?,
            };
            Ok(Bound::new(py, work)?.into_any())
        })
    }

    /// The reduction that torch's options name, as the methods of a group take it.
    #[staticmethod]
    fn reduction(opts: &Bound<'_, PyAny>) -> PyResult<Op> {
        static KNOWN: PyOnceLock<Vec<(isize, Op)>> = PyOnceLock::new();
        let py = opts.py();
        let op = opts.getattr(intern!(py, "reduceOp"))?;
        let number = op.hash()?;
        let known = KNOWN.get_or_try_init(py, || reductions(&op))?;
        match known.iter().find(|(other, _)| *other == number) {
            // It is in the state that would be pickled, and nowhere else.
            Some((_, Op(ReduceOp::PremulSum(_)))) => {
                let (_, factor): (Bound<'_, PyAny>, f64) = op.call_method0("__getstate__")?.extract()?;
                Ok(Op(ReduceOp::PremulSum(factor)))
            }
            Some((_, op)) => Ok(*op),
            None => {
                let text = format!("torch's reduction {} is not known here", op.str()?);
                Err(exception(py, &tensorwire::Error::misuse(text)))
            }
        }
    }
}

/// torch's reductions by their numbers, which are also their hashes.
fn reductions(op: &Bound<'_, PyAny>) -> PyResult<Vec<(isize, Op)>> {
    let names = op.get_type();
    let known = [
        ("SUM", ReduceOp::Sum),
        ("AVG", ReduceOp::Avg),
        ("PRODUCT", ReduceOp::Product),
        ("MIN", ReduceOp::Min),
        ("MAX", ReduceOp::Max),
        ("BAND", ReduceOp::Band),
        ("BOR", ReduceOp::Bor),
        ("BXOR", ReduceOp::Bxor),
        ("PREMUL_SUM", ReduceOp::PremulSum(1.0)),
    ];
    known.into_iter().map(|(name, op)| Ok((names.getattr(name)?.hash()?, Op(op)))).collect()
}

/// Whether the elements of a tensor of torch's lie in memory, one for each.
fn is_strided(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    static STRIDED: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = tensor.py();
    let strided =
        STRIDED.get_or_try_init(py, || py.import("torch")?.getattr("strided").map(Bound::unbind))?;
    Ok(tensor.getattr(intern!(py, "layout"))?.is(strided))
}

/// Since 1970, the clock of torch's flight recorder.
fn nanos() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
