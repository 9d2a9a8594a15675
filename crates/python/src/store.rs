//! The base class of all stores, with the method names of torch's.

use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorwire::store::Store as Kind;
use tensorwire::{Deadline, Error, Result};

use crate::error::exception;
use crate::interrupt::interruptible;
use crate::timeout::Timeout;

/// A key-value service where ranks meet. Values are bytes; a str is stored as UTF-8.
///
/// Waits let other threads run and end by Ctrl-C. A barrier that was left by Ctrl-C counts its caller until the time-out.
#[pyclass(subclass, frozen, module = "tensorwire")]
#[derive(Debug)]
pub(crate) struct Store {
    kind: Arc<dyn Kind>,
}

#[pymethods]
impl Store {
    /// Sets a key.
    fn set(&self, py: Python<'_>, key: String, value: Value) -> PyResult<()> {
        self.call(py, move |store| store.set(&key, value.as_bytes()))
    }

    /// Waits for a key and gives its value.
    fn get<'py>(&self, py: Python<'py>, key: String) -> PyResult<Bound<'py, PyBytes>> {
        let value = self.call(py, move |store| store.get(&key))?;
        Ok(PyBytes::new(py, &value))
    }

    /// Adds to a counter and gives the sum; a missing key counts as 0.
    fn add(&self, py: Python<'_>, key: String, amount: i64) -> PyResult<i64> {
        self.call(py, move |store| store.add(&key, amount))
    }

    /// Sets a key if its value is the expected one, or if it is missing and "" is expected. Gives the value that is
    /// there afterwards; for a missing key and an expectation, the empty value.
    fn compare_set<'py>(
        &self,
        py: Python<'py>,
        key: String,
        expected_value: Value,
        desired_value: Value,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let value = self.call(py, move |store| {
            store.compare_set(&key, expected_value.as_bytes(), desired_value.as_bytes())
        })?;
        Ok(PyBytes::new(py, &value))
    }

    /// Removes a key; gives whether it was there.
    fn delete_key(&self, py: Python<'_>, key: String) -> PyResult<bool> {
        self.call(py, move |store| store.delete(&key))
    }

    /// Whether all keys exist now.
    fn check(&self, py: Python<'_>, keys: Vec<String>) -> PyResult<bool> {
        self.call(py, move |store| store.check(&borrowed(&keys)))
    }

    /// Waits until all keys exist.
    #[pyo3(signature = (keys, timeout=None))]
    fn wait(&self, py: Python<'_>, keys: Vec<String>, timeout: Option<Timeout>) -> PyResult<()> {
        let timeout = duration(py, timeout)?;
        self.call(py, move |store| store.wait_by(&borrowed(&keys), deadline(store, timeout)))
    }

    /// How many keys there are.
    fn num_keys(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, |store| store.num_keys())
    }

    /// All keys, sorted.
    fn list_keys(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.call(py, |store| store.list_keys())
    }

    /// Appends to a value; a missing key counts as empty.
    fn append(&self, py: Python<'_>, key: String, value: Value) -> PyResult<()> {
        self.call(py, move |store| store.append(&key, value.as_bytes()))
    }

    /// Waits for all keys and gives their values as of one moment.
    fn multi_get<'py>(&self, py: Python<'py>, keys: Vec<String>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let values = self.call(py, move |store| store.multi_get(&borrowed(&keys)))?;
        Ok(values.iter().map(|value| PyBytes::new(py, value)).collect())
    }

    /// Sets all keys in one moment.
    fn multi_set(&self, py: Python<'_>, keys: Vec<String>, values: Vec<Value>) -> PyResult<()> {
        if keys.len() != values.len() {
            let text =
                format!("multi_set needs a value for each key: {} keys, {} values", keys.len(), values.len());
            return Err(exception(py, &Error::misuse(text)));
        }
        self.call(py, move |store| {
            let pairs = keys.iter().zip(&values).map(|(key, value)| (key.as_str(), value.as_bytes()));
            store.multi_set(&pairs.collect::<Vec<_>>())
        })
    }

    /// Appends a value to a queue.
    fn queue_push(&self, py: Python<'_>, key: String, value: Value) -> PyResult<()> {
        self.call(py, move |store| store.push(&key, value.as_bytes()))
    }

    /// Takes the oldest value of a queue. An empty queue is waited for; with block=False it is an error.
    #[pyo3(signature = (key, block=true))]
    fn queue_pop<'py>(&self, py: Python<'py>, key: String, block: bool) -> PyResult<Bound<'py, PyBytes>> {
        let (store, queue, kind, name) = (self.kind.clone(), key.clone(), self.kind.clone(), key.clone());
        let take = move || if block { store.pop(&key).map(Some) } else { store.try_pop(&key) };
        // What an interrupted call takes after all goes back to the queue, so that it is not lost.
        let put_back = move |value: Option<Vec<u8>>| {
            if let Some(value) = value {
                let _ = kind.push(&queue, &value);
            }
        };
        match interruptible(py, take, put_back)? {
            Some(value) => Ok(PyBytes::new(py, &value)),
            None => Err(exception(py, &Error::misuse(format!("the queue {name:?} is empty")))),
        }
    }

    /// How many values a queue holds.
    fn queue_len(&self, py: Python<'_>, key: String) -> PyResult<u64> {
        self.call(py, move |store| store.queue_len(&key))
    }

    /// Waits until world_size callers are inside, then lets all of them go; it can be used again at once.
    #[pyo3(signature = (key, world_size, timeout=None))]
    fn barrier(
        &self,
        py: Python<'_>,
        key: String,
        world_size: u64,
        timeout: Option<Timeout>,
    ) -> PyResult<()> {
        let timeout = duration(py, timeout)?;
        self.call(py, move |store| store.barrier_by(&key, world_size, deadline(store, timeout)))
    }

    /// What a call is given that has no time-out of its own.
    #[getter]
    fn timeout(&self) -> Duration {
        self.kind.timeout()
    }

    /// Changes it, for this client only.
    fn set_timeout(&self, py: Python<'_>, timeout: Timeout) -> PyResult<()> {
        self.kind.set_timeout(timeout.duration(py)?);
        Ok(())
    }

    /// Another client of the same store, with its own time-out, whose waits do not block this one's.
    fn clone(&self, py: Python<'_>) -> PyResult<Self> {
        self.call(py, |store| store.clone_store()).map(Self::over)
    }

    /// Whether append, multi_get and multi_set are there, as torch asks: always.
    fn has_extended_api(&self) -> bool {
        true
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        Ok(format!("<tensorwire.{} with a time-out of {:?}>", slf.get_type().name()?, slf.get().timeout()))
    }
}

impl Store {
    /// The Python object over a store.
    pub(crate) fn over(kind: Arc<dyn Kind>) -> Self {
        Self { kind }
    }

    /// The store below.
    pub(crate) fn kind(&self) -> Arc<dyn Kind> {
        self.kind.clone()
    }

    fn call<T: Send + 'static>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&dyn Kind) -> Result<T> + Send + 'static,
    ) -> PyResult<T> {
        let kind = self.kind.clone();
        interruptible(py, move || work(&*kind), drop)
    }
}

/// A value as Python gives it.
#[derive(Debug)]
enum Value {
    Text(String),
    Bytes(Vec<u8>),
}

impl<'py> FromPyObject<'_, 'py> for Value {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(text) = value.extract() {
            return Ok(Self::Text(text));
        }
        value.extract().map(Self::Bytes).or_else(|_| {
            let kind = value.get_type().name()?;
            Err(PyTypeError::new_err(format!("a value is str or bytes, not {kind}")))
        })
    }
}

impl Value {
    fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

fn borrowed(keys: &[String]) -> Vec<&str> {
    keys.iter().map(String::as_str).collect()
}

fn duration(py: Python<'_>, timeout: Option<Timeout>) -> PyResult<Option<Duration>> {
    timeout.map(|timeout| timeout.duration(py)).transpose()
}

fn deadline(store: &dyn Kind, timeout: Option<Duration>) -> Deadline {
    Deadline::after(timeout.unwrap_or_else(|| store.timeout()))
}
