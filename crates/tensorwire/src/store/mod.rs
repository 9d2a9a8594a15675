//! The rendezvous key-value service: one operation type, one small trait, four kinds.
//!
//! A [`Request`] is an operation as data. Every kind of store executes requests; every method that users call
//! is provided on top. The rules are those of torch's stores (values are bytes, counters decimal ASCII) without
//! their faults: operations on several keys are atomic, a barrier can be used again, `pop` takes its value
//! while it waits.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tensorwire_device::Deadline;

use crate::error::{Error, Result};

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

/// A store. `call` is the whole of it; the rest is convenience.
pub trait Store: Send + Sync + fmt::Debug {
    /// Executes a request; one that waits does so until the deadline.
    fn call(&self, request: Request, deadline: Deadline) -> Result<Reply>;

    /// What calls without a deadline are given.
    fn timeout(&self) -> Duration;

    /// Changes it.
    fn set_timeout(&self, timeout: Duration);

    /// Another client of the same store whose waits do not block this one's.
    fn clone_store(&self) -> Result<Arc<dyn Store>>;
}
