//! Requests, executed by the Python methods of a store.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyNotImplementedError, PyTimeoutError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple};
use tensorwire::store::{Reply, Request};
use tensorwire::{Deadline, Error, PeerFaultKind, Result};

use super::own_thread::{Crowd, Stop, shutting_down};
use super::shape::{Bottom, Shape};

/// The first pause between two looks of a wait, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
/// How many missing keys an error names.
const NAMED: usize = 8;

/// A store's methods. No request waits in one of them, except in stores that have no `check`.
#[derive(Debug, Clone)]
pub(super) struct Methods {
    object: Arc<Py<PyAny>>,
    shape: Arc<Shape>,
    crowd: Crowd,
}

impl Methods {
    pub(super) fn new(object: Py<PyAny>, shape: Shape) -> Self {
        Self { object: Arc::new(object), shape: Arc::new(shape), crowd: Crowd::default() }
    }

    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Who is inside the store's methods.
    pub(super) fn crowd(&self) -> &Crowd {
        &self.crowd
    }

    /// Over another client of the same store, which the store's own `clone` makes.
    pub(super) fn cloned(&self) -> Result<Self> {
        let object = self.ask("clone", |py| Ok(PyTuple::empty(py)), |clone| Ok(clone.clone().unbind()))?;
        Ok(Self { object: Arc::new(object), ..self.clone() })
    }

    /// Executes a request; one that waits does so until the deadline, or until it is told to stop.
    pub(super) fn execute(&self, request: Request, deadline: Deadline, stop: &Stop) -> Result<Reply> {
        let wait = |keys: &[String]| self.wait(keys, deadline, stop);
        match request {
            Request::Set(key, value) => self.set(&key, &value).map(|()| Reply::Done),
            Request::Get(key) => {
                wait(std::slice::from_ref(&key))?;
                self.get(&key).map(Reply::Value)
            }
            Request::Add(key, delta) => {
                self.ask("add", |py| (key, delta).into_pyobject(py), |sum| sum.extract()).map(Reply::Number)
            }
            Request::CompareSet { key, expected, desired } => {
                self.compare_set(&key, &expected, &desired, deadline, stop).map(Reply::Value)
            }
            Request::Check(keys) => self.check(&keys, deadline).map(Reply::Truth),
            Request::Wait(keys) => wait(&keys).map(|()| Reply::Done),
            Request::Delete(key) => self.delete(&key, deadline).map(Reply::Truth),
            Request::Append(key, value) => self
                .ask("append", |py| (key, PyBytes::new(py, &value)).into_pyobject(py), done)
                .map(|()| Reply::Done),
            // One after the other: not every store has them, and not every one in one moment.
            Request::MultiSet(pairs) => {
                pairs.iter().try_for_each(|(key, value)| self.set(key, value)).map(|()| Reply::Done)
            }
            Request::MultiGet(keys) => {
                wait(&keys)?;
                keys.iter().map(|key| self.get(key)).collect::<Result<_>>().map(Reply::Values)
            }
            Request::Push(key, value) => {
                self.has_queues("queue_push")?;
                self.ask("queue_push", |py| (key, PyBytes::new(py, &value)).into_pyobject(py), done)
                    .map(|()| Reply::Done)
            }
            Request::Pop { key, wait } => self.pop(&key, wait.then_some(deadline), stop),
            Request::QueueLen(key) => {
                self.has_queues("queue_len")?;
                self.ask("queue_len", |py| (key,).into_pyobject(py), |len| len.extract()).map(Reply::Number)
            }
            Request::ListKeys => self.list_keys().map(Reply::Keys),
            Request::NumKeys => self.list_keys().map(|keys| Reply::Number(keys.len() as i64)),
            other => Err(self.lacks(&format!("{other:?}"), "a store of tensorwire", "no method for it")),
        }
    }

    /// What a key is called in torch's TCPStore under all prefixes: its complaint about a missing key says it.
    pub(super) fn long_name(&self, key: &str) -> Result<String> {
        let waited = self.ask("wait", |py| (vec![key], Duration::ZERO).into_pyobject(py), done);
        let text = match waited {
            Err(Error::TimedOut { missing, .. }) => missing,
            Err(error) => return Err(error),
            Ok(()) => String::new(),
        };
        let name = text.split_once("keys: /").map(|(_, names)| names.trim().to_owned());
        name.ok_or_else(|| Error::misuse(format!("its prefix was not found: it says {text:?}")))
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask("set", |py| (key, PyBytes::new(py, value)).into_pyobject(py), done)
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.ask("get", |py| (key,).into_pyobject(py), bytes)
    }

    /// Whether all keys exist now. Without a `check`, a short wait tells.
    fn check(&self, keys: &[String], deadline: Deadline) -> Result<bool> {
        if keys.is_empty() {
            return Ok(true);
        }
        let checked = self.ask("check", |py| (keys,).into_pyobject(py), |there| there.is_truthy());
        let Err(Error::Unsupported { .. }) = checked else { return checked };
        // Never 0, which some stores take for "no time-out".
        let slice = deadline.remaining().unwrap_or_default().min(Duration::from_millis(50)).max(PAUSES.0);
        match self.ask("wait", |py| (keys, slice).into_pyobject(py), done) {
            Ok(()) => Ok(true),
            Err(error) if error.is_timeout() => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn wait(&self, keys: &[String], deadline: Deadline, stop: &Stop) -> Result<()> {
        let started = Instant::now();
        if poll(deadline, stop, || self.check(keys, deadline).map(|there| there.then_some(())))?.is_some() {
            return Ok(());
        }
        let soon = Deadline::after(Duration::ZERO);
        let absent = |key: &&String| !self.check(std::slice::from_ref(*key), soon).unwrap_or(false);
        let named: Vec<_> = keys.iter().take(NAMED).filter(absent).map(|key| format!("{key:?}")).collect();
        let missing = format!("missing {}", named.join(", "));
        Err(Error::timed_out(
            format!("waiting for keys of {}", self.shape.name()),
            started.elapsed(),
            missing,
        ))
    }

    /// torch gives `expected` for a missing key, which is no success: a success gives `desired`.
    fn compare_set(
        &self,
        key: &str,
        expected: &[u8],
        desired: &[u8],
        deadline: Deadline,
        stop: &Stop,
    ) -> Result<Vec<u8>> {
        let asked = self.ask(
            "compare_set",
            |py| (key, PyBytes::new(py, expected), PyBytes::new(py, desired)).into_pyobject(py),
            bytes,
        );
        let there = match asked {
            Err(Error::Unsupported { .. }) if expected.is_empty() => {
                return self.set_first(key, desired, deadline, stop);
            }
            other => other?,
        };
        if expected.is_empty() || there != expected {
            return Ok(there);
        }
        let missing = expected != desired || !self.check(&[key.to_owned()], deadline)?;
        Ok(if missing { Vec::new() } else { there })
    }

    /// Sets a missing key where there is no `compare_set`: who adds first to a counter beside it may.
    fn set_first(&self, key: &str, desired: &[u8], deadline: Deadline, stop: &Stop) -> Result<Vec<u8>> {
        let keys = [key.to_owned()];
        let claims = || {
            self.ask("add", |py| (format!("{key}/claims"), 1).into_pyobject(py), |sum| sum.extract::<i64>())
        };
        if !self.check(&keys, deadline)? && claims()? == 1 {
            self.set(key, desired)?;
            return Ok(desired.to_vec());
        }
        self.wait(&keys, deadline, stop)?;
        self.get(key)
    }

    /// torch's FileStore says yes to everything. A user's store has no `delete_key` under a prefix of torch's, which
    /// looks for a method of another name: there the value goes and the key stays, which does for keys that are not used
    /// again, as those of groups.
    fn delete(&self, key: &str, deadline: Deadline) -> Result<bool> {
        let keys = [key.to_owned()];
        let there = *self.shape.bottom() != Bottom::File || self.check(&keys, deadline)?;
        match self.ask("delete_key", |py| (key,).into_pyobject(py), |gone| gone.is_truthy()) {
            Err(error @ Error::Unsupported { .. }) => {
                tracing::debug!(key, "a value is emptied and not removed: {error}");
                let there = self.check(&keys, deadline)?;
                if there {
                    self.set(key, &[])?;
                }
                Ok(there)
            }
            gone => Ok(there && gone?),
        }
    }

    fn pop(&self, key: &str, deadline: Option<Deadline>, stop: &Stop) -> Result<Reply> {
        self.has_queues("queue_pop")?;
        let started = Instant::now();
        let try_pop = || match self.ask("queue_pop", |py| (key, false).into_pyobject(py), bytes) {
            Err(Error::Misuse(text)) if text == EMPTY => Ok(None),
            other => other.map(Some),
        };
        let until = deadline.unwrap_or_else(|| Deadline::after(Duration::ZERO));
        match (poll(until, stop, try_pop)?, deadline) {
            (Some(value), _) => Ok(Reply::Value(value)),
            (None, None) => Ok(Reply::Nothing),
            (None, Some(_)) => {
                let doing = format!("waiting for something in the queue {key:?} of {}", self.shape.name());
                Err(Error::timed_out(doing, started.elapsed(), "nothing came in time"))
            }
        }
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        if self.shape.prefixes() > 0 {
            let have = "a PrefixStore, which shows keys of other prefixes too";
            return Err(self.lacks("list_keys", "a store of torch without prefixes", have));
        }
        let mut keys: Vec<String> =
            self.ask("list_keys", |py| Ok(PyTuple::empty(py)), |keys| keys.extract())?;
        if *self.shape.bottom() == Bottom::File {
            // Its own counters, without their first letters.
            keys.retain(|key| key != "efcount/" && key != "leanup/");
        }
        Ok(keys)
    }

    /// torch's older server ends the connection when it is asked for a queue.
    fn has_queues(&self, method: &str) -> Result<()> {
        match self.shape.bottom() {
            Bottom::Tcp { queues: false, .. } => {
                Err(self.lacks(method, "a TCPStore with use_libuv=True", "one without, which has no queues"))
            }
            _ => Ok(()),
        }
    }

    /// Calls a method.
    fn ask<T>(
        &self,
        method: &str,
        args: impl for<'py> FnOnce(Python<'py>) -> PyResult<Bound<'py, PyTuple>>,
        read: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>,
    ) -> Result<T> {
        let called = Python::try_attach(|py| {
            let Ok(bound) = self.object.bind(py).getattr(method) else {
                return Err(self.lacks(method, "a store with this method", "none"));
            };
            let result = args(py).and_then(|args| bound.call1(args)).and_then(|result| read(&result));
            result.map_err(|raised| self.translate(py, method, &raised))
        });
        called.unwrap_or_else(|| Err(shutting_down(self.shape.name())))
    }

    /// An exception of a method as an error of ours.
    fn translate(&self, py: Python<'_>, method: &str, raised: &PyErr) -> Error {
        let class =
            raised.get_type(py).name().map_or_else(|_| "an exception".into(), |name| name.to_string());
        let text = raised.value(py).str().map(|text| text.to_string()).unwrap_or_default();
        // torch appends where in its sources it was raised.
        let text = text.lines().next().unwrap_or_default().chars().take(400).collect::<String>();
        let name = self.shape.name();
        if raised.is_instance_of::<PyNotImplementedError>(py) || text.contains("pure virtual function") {
            return self.lacks(method, "a store that implements it", &format!("{class}: {text}"));
        }
        let lower = text.to_lowercase();
        if class == "QueueEmptyError" || lower.contains("queue is empty") {
            return Error::misuse(EMPTY);
        }
        let what = format!("its {method} raised {class}: {text}");
        if class == "DistNetworkError" {
            let asks = text.to_lowercase().contains("did the remote server");
            let detail = if asks { what } else { format!("{what}; did the process that serves it end?") };
            return Error::peer(PeerFaultKind::Left, name, None, detail);
        }
        if raised.is_instance_of::<PyTimeoutError>(py)
            || lower.contains("timeout")
            || lower.contains("timed out")
        {
            return Error::timed_out(format!("{method} of {name}"), Duration::ZERO, text);
        }
        Error::peer(PeerFaultKind::Failed, name, None, what)
    }

    fn lacks(&self, method: &str, need: &str, have: &str) -> Error {
        Error::Unsupported {
            what: format!("{method} of {}", self.shape.name()),
            need: need.into(),
            have: have.into(),
        }
    }
}

/// What an empty queue is told apart by.
const EMPTY: &str = "the queue is empty";

/// Asks until there is an answer or the deadline has passed, at least once.
fn poll<T>(deadline: Deadline, stop: &Stop, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<Option<T>> {
    let mut pause = PAUSES.0;
    loop {
        let answer = ask()?;
        let left = deadline.remaining();
        let Some(left) = left.filter(|_| answer.is_none() && !stop.asked()) else { return Ok(answer) };
        thread::sleep(pause.min(left));
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// A value: bytes, or a str as UTF-8, as a user's store may give.
fn bytes(value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    match value.cast::<PyString>() {
        Ok(text) => Ok(text.to_str()?.as_bytes().to_vec()),
        Err(_) => value.extract(),
    }
}

fn done(_: &Bound<'_, PyAny>) -> PyResult<()> {
    Ok(())
}
