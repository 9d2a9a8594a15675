//! Stores: the key-value service through which ranks meet. There are one type of operation, one small trait, and
//! four kinds of stores.
//!
//! A [`Request`] is an operation as data. Every kind of store executes requests. The methods that users call are
//! provided on top. The rules are those of torch's stores: values are bytes, and counters are decimal ASCII. But
//! their faults are not here: operations on several keys are atomic, a barrier can be used again, and `pop` takes
//! its value while it waits.
//!
//! | kind | who shares it |
//! |---|---|
//! | [`MemoryStore`] | threads of this process |
//! | [`FileStore`] | processes that see one file |
//! | [`TcpStore`] | whoever reaches a [`TcpServer`], or a TCPStore server of torch |
//! | [`PrefixStore`] | as the store below it; its keys are kept apart by a prefix |
//!
//! A [`StoreExchange`] is made of the requests of any store: all ranks of a group give each other values, or wait for
//! each other.
//!
//! Values and queues have separate names: `set("a")` and `push("a")` do not disturb each other. `check` and `wait`
//! look at both. A queue exists while it holds something. `num_keys`, `list_keys` and `delete` see values only, as
//! in torch.

mod barrier;
mod engine;
mod exchange;
mod file;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod limits;
mod memory;
mod prefix;
mod server;
mod tcp;
#[doc(hidden)]
pub mod wire;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tensorwire_device::Deadline;
use tensorwire_device::sync::{AtomicU64, Ordering};

use crate::error::{Error, PeerFaultKind, Result};

pub use barrier::by_counters as barrier_by_counters;
pub use exchange::StoreExchange;
pub use file::FileStore;
pub use limits::Limits;
pub use memory::MemoryStore;
pub use prefix::PrefixStore;
pub use server::TcpServer;
pub use tcp::{Dialect, TcpStore};
pub(crate) use tcp::{connect_by, resolve};

/// What calls are given where nobody said otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// One operation on a store.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Request {
    /// Sets a key.
    Set(String, Vec<u8>),
    /// Sets `key` to `desired` if it is `expected`, or if it is missing and `expected` is empty. Gives the
    /// value that is there afterwards; for a missing key and an expectation, the empty value.
    CompareSet {
        /// The key.
        key: String,
        /// What must be there.
        expected: Vec<u8>,
        /// What shall be there.
        desired: Vec<u8>,
    },
    /// Waits for a key and gives its value.
    Get(String),
    /// Adds to a counter and gives the sum; a missing key counts as 0.
    Add(String, i64),
    /// Whether all keys exist now.
    Check(Vec<String>),
    /// Waits until all keys exist.
    Wait(Vec<String>),
    /// How many keys there are.
    NumKeys,
    /// Removes a key; gives whether it was there.
    Delete(String),
    /// Appends to a value.
    Append(String, Vec<u8>),
    /// Waits for all keys and gives their values as of one moment.
    MultiGet(Vec<String>),
    /// Sets all keys in one moment.
    MultiSet(Vec<(String, Vec<u8>)>),
    /// Appends a value to a queue.
    Push(String, Vec<u8>),
    /// Takes the oldest value of a queue; waits for one if `wait`.
    Pop {
        /// The queue.
        key: String,
        /// Whether to wait for a value.
        wait: bool,
    },
    /// How many values a queue holds.
    QueueLen(String),
    /// All keys.
    ListKeys,
    /// Waits until `world` callers are inside, then lets all of them go; it can be used again at once.
    Barrier {
        /// The barrier's name.
        key: String,
        /// How many callers.
        world: u64,
    },
}

impl Request {
    /// Whether it may have to wait for another caller.
    pub fn waits(&self) -> bool {
        matches!(
            self,
            Self::Get(_)
                | Self::Wait(_)
                | Self::MultiGet(_)
                | Self::Pop { wait: true, .. }
                | Self::Barrier { .. }
        )
    }

    /// The same request with every key renamed.
    #[must_use]
    pub fn map_keys(self, rename: impl Fn(String) -> String) -> Self {
        let all = |keys: Vec<String>| keys.into_iter().map(&rename).collect();
        match self {
            Self::Set(key, value) => Self::Set(rename(key), value),
            Self::CompareSet { key, expected, desired } => {
                Self::CompareSet { key: rename(key), expected, desired }
            }
            Self::Get(key) => Self::Get(rename(key)),
            Self::Add(key, delta) => Self::Add(rename(key), delta),
            Self::Check(keys) => Self::Check(all(keys)),
            Self::Wait(keys) => Self::Wait(all(keys)),
            Self::NumKeys => Self::NumKeys,
            Self::Delete(key) => Self::Delete(rename(key)),
            Self::Append(key, value) => Self::Append(rename(key), value),
            Self::MultiGet(keys) => Self::MultiGet(all(keys)),
            Self::MultiSet(pairs) => {
                Self::MultiSet(pairs.into_iter().map(|(key, value)| (rename(key), value)).collect())
            }
            Self::Push(key, value) => Self::Push(rename(key), value),
            Self::Pop { key, wait } => Self::Pop { key: rename(key), wait },
            Self::QueueLen(key) => Self::QueueLen(rename(key)),
            Self::ListKeys => Self::ListKeys,
            Self::Barrier { key, world } => Self::Barrier { key: rename(key), world },
        }
    }
}

/// What a request gives.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reply {
    /// It is done.
    Done,
    /// A value.
    Value(Vec<u8>),
    /// No value: a queue was empty.
    Nothing,
    /// A number.
    Number(i64),
    /// Yes or no.
    Truth(bool),
    /// Values in the order of the keys.
    Values(Vec<Vec<u8>>),
    /// Keys.
    Keys(Vec<String>),
}

/// A store. An implementation needs only the first four methods. The others are made from them.
///
/// Methods that wait do so for [`timeout`](Store::timeout), or until the deadline where they take one. Their
/// time-out error names the keys that are missing. They also ask [`interrupt::check`](crate::interrupt::check) now and then: a
/// wait of a group ends by it when the group has failed. A wait whose condition holds already succeeds whatever the
/// deadline.
pub trait Store: Send + Sync + fmt::Debug {
    /// Executes a request. A request that waits does so until the deadline.
    fn call(&self, request: Request, deadline: Deadline) -> Result<Reply>;

    /// The time-out of calls that have no deadline of their own.
    fn timeout(&self) -> Duration;

    /// Changes the time-out, for this client only.
    fn set_timeout(&self, timeout: Duration);

    /// Another client of the same store, with its own time-out. Its waits do not block those of this client.
    fn clone_store(&self) -> Result<Arc<dyn Store>>;

    /// Sets a key.
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        done(self.call(Request::Set(key.into(), value.into()), soon(self))?)
    }

    /// Waits for a key and gives its value.
    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.get_by(key, soon(self))
    }

    /// The same until a deadline.
    fn get_by(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        value(self.call(Request::Get(key.into()), deadline)?)
    }

    /// Adds to a counter and gives the sum; a missing key counts as 0.
    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        number(self.call(Request::Add(key.into(), delta), soon(self))?)
    }

    /// Sets `key` to `desired` if it is `expected`, or if it is missing and `expected` is empty. Gives the value
    /// that is there afterwards; for a missing key and an expectation, the empty value.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let request =
            Request::CompareSet { key: key.into(), expected: expected.into(), desired: desired.into() };
        value(self.call(request, soon(self))?)
    }

    /// Removes a key; gives whether it was there.
    fn delete(&self, key: &str) -> Result<bool> {
        truth(self.call(Request::Delete(key.into()), soon(self))?)
    }

    /// Whether all keys exist now.
    fn check(&self, keys: &[&str]) -> Result<bool> {
        truth(self.call(Request::Check(owned(keys)), soon(self))?)
    }

    /// Waits until all keys exist.
    fn wait(&self, keys: &[&str]) -> Result<()> {
        self.wait_by(keys, soon(self))
    }

    /// The same until a deadline.
    fn wait_by(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        done(self.call(Request::Wait(owned(keys)), deadline)?)
    }

    /// Appends to a value; a missing key counts as empty.
    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        done(self.call(Request::Append(key.into(), value.into()), soon(self))?)
    }

    /// Waits for all keys and gives their values as of one moment.
    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.multi_get_by(keys, soon(self))
    }

    /// The same until a deadline.
    fn multi_get_by(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        match self.call(Request::MultiGet(owned(keys)), deadline)? {
            Reply::Values(values) => Ok(values),
            other => Err(odd(&other)),
        }
    }

    /// Sets all keys in one moment.
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), value.to_vec())).collect();
        done(self.call(Request::MultiSet(pairs), soon(self))?)
    }

    /// Appends a value to a queue.
    fn push(&self, key: &str, value: &[u8]) -> Result<()> {
        done(self.call(Request::Push(key.into(), value.into()), soon(self))?)
    }

    /// Waits for a queue to hold something and takes its oldest value.
    fn pop(&self, key: &str) -> Result<Vec<u8>> {
        self.pop_by(key, soon(self))
    }

    /// The same until a deadline.
    fn pop_by(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        value(self.call(Request::Pop { key: key.into(), wait: true }, deadline)?)
    }

    /// Takes the oldest value of a queue if there is one.
    fn try_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        match self.call(Request::Pop { key: key.into(), wait: false }, soon(self))? {
            Reply::Value(value) => Ok(Some(value)),
            Reply::Nothing => Ok(None),
            other => Err(odd(&other)),
        }
    }

    /// How many values a queue holds.
    fn queue_len(&self, key: &str) -> Result<u64> {
        number(self.call(Request::QueueLen(key.into()), soon(self))?).map(|n| n.try_into().unwrap_or(0))
    }

    /// How many keys there are.
    fn num_keys(&self) -> Result<u64> {
        number(self.call(Request::NumKeys, soon(self))?).map(|n| n.try_into().unwrap_or(0))
    }

    /// All keys, sorted.
    fn list_keys(&self) -> Result<Vec<String>> {
        match self.call(Request::ListKeys, soon(self))? {
            Reply::Keys(mut keys) => {
                keys.sort_unstable();
                Ok(keys)
            }
            other => Err(odd(&other)),
        }
    }

    /// Waits until `world` callers are inside, then lets all of them go; it can be used again at once. A caller
    /// whose time is up is no longer inside.
    fn barrier(&self, key: &str, world: u64) -> Result<()> {
        self.barrier_by(key, world, soon(self))
    }

    /// The same until a deadline.
    fn barrier_by(&self, key: &str, world: u64, deadline: Deadline) -> Result<()> {
        done(self.call(Request::Barrier { key: key.into(), world }, deadline)?)
    }
}

/// The time-out of one client.
#[derive(Debug)]
struct Patience(AtomicU64);

impl Patience {
    fn new(timeout: Duration) -> Self {
        Self(AtomicU64::new(nanos(timeout)))
    }

    fn get(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }

    fn set(&self, timeout: Duration) {
        self.0.store(nanos(timeout), Ordering::Relaxed);
    }
}

fn nanos(timeout: Duration) -> u64 {
    timeout.as_nanos().try_into().unwrap_or(u64::MAX)
}

fn soon<S: Store + ?Sized>(store: &S) -> Deadline {
    Deadline::after(store.timeout())
}

fn owned(keys: &[&str]) -> Vec<String> {
    keys.iter().map(|key| (*key).to_owned()).collect()
}

fn done(reply: Reply) -> Result<()> {
    if reply == Reply::Done { Ok(()) } else { Err(odd(&reply)) }
}

fn value(reply: Reply) -> Result<Vec<u8>> {
    if let Reply::Value(value) = reply { Ok(value) } else { Err(odd(&reply)) }
}

fn number(reply: Reply) -> Result<i64> {
    if let Reply::Number(number) = reply { Ok(number) } else { Err(odd(&reply)) }
}

fn truth(reply: Reply) -> Result<bool> {
    if let Reply::Truth(truth) = reply { Ok(truth) } else { Err(odd(&reply)) }
}

fn odd(reply: &Reply) -> Error {
    Error::peer(
        PeerFaultKind::Misbehaved,
        "the store",
        None,
        format!("it gave {reply:?} to another question"),
    )
}

/// What a request waits for, as time-out errors say it.
fn purpose(request: &Request) -> String {
    match request {
        Request::Pop { key, .. } => format!("waiting for something in the store's queue {key:?}"),
        Request::Barrier { key, world } => {
            format!("waiting in the store's barrier {key:?} for {world} callers")
        }
        Request::Get(_) | Request::Wait(_) | Request::MultiGet(_) => "waiting for keys of the store".into(),
        _ => "asking the store".into(),
    }
}

/// "missing a, b and 3 more".
fn name_missing(keys: &[String]) -> String {
    const NAMED: usize = 8;
    if keys.is_empty() {
        return String::new();
    }
    let named = keys.iter().take(NAMED).map(|key| format!("{key:?}")).collect::<Vec<_>>().join(", ");
    match keys.len().saturating_sub(NAMED) {
        0 => format!("missing {named}"),
        more => format!("missing {named} and {more} more"),
    }
}
