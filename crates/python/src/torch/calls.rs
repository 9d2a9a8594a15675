//! How the backend for torch calls the operations of a group: the part of each call that is the same for all of them.
//!
//! It was written in Python first. But between two calls the program and torch empty the processor's caches, so that a
//! line of Python costs a tenth of a microsecond and more, and small operations take few microseconds in all.

use std::cell::RefCell;
use std::time::{SystemTime, UNIX_EPOCH};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyTuple};
use tensorwire::device::sync::{AtomicU64, Ordering};

use crate::group::Group;
use crate::op::Op;
use crate::tensor::Foreign;
use crate::torch::tensor::plain;

/// The base of the class that has the operations of torch.distributed.
#[pyclass(frozen, subclass, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct Calls {
    /// Which one of this process.
    id: u64,
    issued: AtomicU64,
}

thread_local! {
    /// What this thread has started since it began to coalesce, and on which `Calls`. It goes with the thread.
    static COALESCED: RefCell<Vec<(u64, Py<PyList>)>> = const { RefCell::new(Vec::new()) };
}

impl Calls {
    /// The number of the next operation.
    fn number(&self) -> u64 {
        self.issued.fetch_add(1, Ordering::Relaxed) + 1
    }
}

#[pymethods]
impl Calls {
    /// Subclasses have arguments of their own.
    #[new]
    #[pyo3(signature = (*_args, **_named))]
    fn new(_args: &Bound<'_, PyTuple>, _named: Option<&Bound<'_, PyDict>>) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self { id: LAST.fetch_add(1, Ordering::Relaxed), issued: AtomicU64::new(0) }
    }

    /// How many operations were called: the number of the last one.
    #[getter]
    fn issued(&self) -> u64 {
        self.issued.load(Ordering::Relaxed)
    }

    /// From here on this thread's operations only start, whatever their options say.
    fn start_coalescing(&self, py: Python<'_>) {
        // Of a start without an end.
        let _before = self.take_coalesced();
        let begun = (self.id, PyList::empty(py).unbind());
        COALESCED.with_borrow_mut(|lists| lists.push(begun));
    }

    /// The flights of this thread since then; None outside of it.
    fn coalesced(&self, py: Python<'_>) -> Option<Py<PyList>> {
        COALESCED.with_borrow(|lists| {
            lists.iter().find(|(id, _)| *id == self.id).map(|(_, flights)| flights.clone_ref(py))
        })
    }

    /// The same, and the end of it.
    fn take_coalesced(&self) -> Option<Py<PyList>> {
        COALESCED.with_borrow_mut(|lists| {
            let at = lists.iter().position(|(id, _)| *id == self.id)?;
            Some(lists.swap_remove(at).1)
        })
    }

    /// Calls a method of the group as torch's options say.
    #[pyo3(
        signature = (title, method, call, inputs, outputs, opts, source=-1),
        text_signature = "($self, title, method, call, inputs, outputs, opts, source=-1)"
    )]
    #[expect(clippy::too_many_arguments, reason = "each is one; a tuple of them would be one more object")]
    fn _run<'py>(
        slf: &Bound<'py, Self>,
        title: &Bound<'py, PyAny>,
        method: &Bound<'py, PyAny>,
        call: &Bound<'py, PyTuple>,
        inputs: &Bound<'py, PyAny>,
        outputs: &Bound<'py, PyAny>,
        opts: &Bound<'py, PyAny>,
        source: i64,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = slf.py();
        if profiled(py)? {
            let arguments = (title, method, call, inputs, outputs, opts, source, slf.get().number());
            let work = slf.call_method1(intern!(py, "_run_profiled"), arguments)?;
            return Ok(Some(work).filter(|work| !work.is_none()));
        }
        issue(slf, outputs, opts, source, |timeout, async_op| {
            if timeout.is_none() && !async_op {
                return method.call1(call);
            }
            let how = PyDict::new(py);
            how.set_item(intern!(py, "timeout"), timeout)?;
            how.set_item(intern!(py, "async_op"), async_op)?;
            method.call(call, Some(&how))
        })
    }

    /// The operation that programs call most with little data, without any Python on its way: one dense tensor, and none of
    /// the reductions with a factor. All others go to `_allreduce`.
    fn allreduce<'py>(
        slf: &Bound<'py, Self>,
        tensors: &Bound<'py, PyAny>,
        opts: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = slf.py();
        if !profiled(py)?
            && let Some(tensor) = single(tensors)?
            && let Some(op) = reduction(opts)?
            && let Ok(group) = slf.getattr(intern!(py, "group"))?.cast_into::<Group>()
        {
            return issue(slf, tensors, opts, -1, |timeout, async_op| {
                let timeout = timeout.map(|timeout| timeout.extract()).transpose()?;
                let work = group.get().reduce_all(py, &tensor, op, timeout, async_op)?;
                Ok(Bound::new(py, work)?.into_any())
            });
        }
        let work = slf.call_method1(intern!(py, "_allreduce"), (tensors, opts))?;
        Ok(Some(work).filter(|work| !work.is_none()))
    }
}

/// Starts an operation as torch's options say: `call` gets its time-out, and whether it is only started.
///
/// Without asyncOp it runs on this thread and is over on return. torch expects no work then, and making one and waiting
/// for it would take longer than all the rest of this.
fn issue<'py>(
    calls: &Bound<'py, Calls>,
    outputs: &Bound<'py, PyAny>,
    opts: &Bound<'py, PyAny>,
    source: i64,
    call: impl FnOnce(Option<Bound<'py, PyAny>>, bool) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    static WORK: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = calls.py();
    let number = calls.get().number();
    let recent = calls.getattr(intern!(py, "recent"))?;
    let now = if recent.is_none() { 0 } else { nanos() };
    let coalesced = calls.get().coalesced(py);
    let async_op = coalesced.is_some() || opts.getattr(intern!(py, "asyncOp"))?.is_truthy()?;
    let timeout = opts.getattr(intern!(py, "timeout"))?;
    // Without one torch says -1 ms.
    let unset = timeout.getattr(intern!(py, "days"))?.extract::<i32>()? < 0;
    let flight = call((!unset).then_some(timeout), async_op)?;
    if !recent.is_none() {
        recent.call_method1(intern!(py, "append"), ((now, &flight),))?;
    }
    if !async_op {
        return Ok(None);
    }
    if let Some(coalesced) = coalesced {
        coalesced.bind(py).append(&flight)?;
    }
    let work = WORK.import(py, "tensorwire.torch.work", "Work")?;
    work.call1((flight, outputs, number, source)).map(Some)
}

/// The tensor, if it is the only one, and dense.
fn single(tensors: &Bound<'_, PyAny>) -> PyResult<Option<Foreign>> {
    let Ok(list) = tensors.cast::<PyList>() else { return Ok(None) };
    if list.len() != 1 {
        return Ok(None);
    }
    plain(&list.get_item(0)?)
}

/// The reduction that torch's options name; nothing for those that have a factor.
fn reduction(opts: &Bound<'_, PyAny>) -> PyResult<Option<Op>> {
    static NAMES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    let py = opts.py();
    let number = opts.getattr(intern!(py, "reduceOp"))?.hash()?;
    let names = NAMES.import(py, "tensorwire.torch.operations", "REDUCTIONS")?;
    names.get_item(number)?.map(|name| name.extract()).transpose()
}

/// Whether a profiler of torch's runs on this thread.
fn profiled(py: Python<'_>) -> PyResult<bool> {
    static ENABLED: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    ENABLED.import(py, "tensorwire.torch.profile", "enabled")?.call0()?.is_truthy()
}

/// Since 1970, the clock of torch's flight recorder.
fn nanos() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
