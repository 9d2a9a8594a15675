//! Memory of torch's tensors that started operations use.
//!
//! A tensor of torch's may get another storage at any time (`tensor.data = ...`), so a started operation holds the
//! storage, and not only the tensor. And a storage may get other memory (`storage.resize_()`, `share_memory_()`), which
//! frees what it had: nothing can hold that. So `tensorwire.torch.storages`, in Python, has those methods of torch ask here
//! first, and refuse. Operations that run on the calling thread need neither: the caller is in them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tensorwire::device::fork::PerProcess;

use crate::tensor::Foreign;

/// Started operations. A forked child has none.
static FLIGHTS: PerProcess<Mutex<Flights>> = PerProcess::new(Mutex::default);

#[derive(Default)]
struct Flights {
    list: Vec<Flight>,
    /// The number of the last one.
    last: u64,
}

struct Flight {
    number: u64,
    /// An address in each storage.
    addresses: Vec<usize>,
    /// None while it is being started.
    work: Option<tensorwire::Work>,
    /// Only held.
    storages: Vec<Py<PyAny>>,
}

/// Holds the storages of an operation that is about to start.
pub(crate) struct Hold {
    number: u64,
    started: bool,
}

/// Holds the storages of those that are torch's. Nothing where none is.
pub(crate) fn hold<'a>(
    py: Python<'_>,
    tensors: impl IntoIterator<Item = &'a Foreign>,
) -> PyResult<Option<Hold>> {
    static GUARDED: PyOnceLock<()> = PyOnceLock::new();
    let mut flight = Flight { number: 0, addresses: Vec::new(), work: None, storages: Vec::new() };
    for lies in tensors.into_iter().filter_map(|tensor| tensor.torch.as_ref()) {
        // What only looks like a tensor of torch's has none.
        let Ok(storage) = lies.tensor.getattr(py, intern!(py, "untyped_storage")) else { continue };
        flight.storages.push(storage.call0(py)?);
        flight.addresses.push(lies.address);
    }
    if flight.addresses.is_empty() {
        return Ok(None);
    }
    GUARDED
        .get_or_try_init(py, || py.import("tensorwire.torch.storages")?.call_method0("guard").map(drop))?;
    let mut flights = lock();
    flights.last += 1;
    flight.number = flights.last;
    flights.list.push(flight);
    Ok(Some(Hold { number: flights.last, started: false }))
}

impl Hold {
    /// Holds them until the operation has no more use for them.
    pub(crate) fn until(mut self, work: &tensorwire::Work) {
        self.started = true;
        let number = self.number;
        if let Some(flight) = lock().list.iter_mut().find(|flight| flight.number == number) {
            flight.work = Some(work.clone());
        }
        work.on_settled(move || remove(number));
    }
}

impl Drop for Hold {
    /// It could not be started.
    fn drop(&mut self) {
        if !self.started {
            remove(self.number);
        }
    }
}

/// The started operation that uses memory between these addresses, if there is one.
#[pyfunction]
pub(crate) fn operation_on(address: usize, nbytes: usize) -> Option<String> {
    let flights = lock();
    let using = flights.list.iter().find(|flight| {
        flight.addresses.iter().any(|used| (address..address.saturating_add(nbytes)).contains(used))
            // Whoever has waited for it may go on before it is taken out here.
            && !flight.work.as_ref().is_some_and(tensorwire::Work::is_settled)
    })?;
    Some(using.work.as_ref().map_or("an operation", tensorwire::Work::what).to_owned())
}

fn remove(number: u64) {
    let mut flights = lock();
    let at = flights.list.iter().position(|flight| flight.number == number);
    let over = at.map(|at| flights.list.swap_remove(at));
    // Not under the lock: what is dropped may run code of Python.
    drop(flights);
    drop(over);
}

fn lock() -> MutexGuard<'static, Flights> {
    FLIGHTS.get().lock().unwrap_or_else(PoisonError::into_inner)
}
