//! A part of another store, kept apart by a prefix.

use std::sync::Arc;
use std::time::Duration;

use tensorwire_device::Deadline;

use super::{Patience, Reply, Request, Store};
use crate::error::Result;

/// A store whose key `k` is `prefix/k` in the store below. It counts and lists only its own keys.
#[derive(Debug)]
pub struct PrefixStore {
    prefix: String,
    below: Arc<dyn Store>,
    patience: Patience,
}

impl PrefixStore {
    /// The part of `below` that starts with `prefix/`.
    pub fn new(prefix: impl Into<String>, below: Arc<dyn Store>) -> Self {
        let mut prefix = prefix.into();
        prefix.push('/');
        let patience = Patience::new(below.timeout());
        Self { prefix, below, patience }
    }

    /// The keys of the store below that are ours, without the prefix.
    fn own_keys(&self, deadline: Deadline) -> Result<Vec<String>> {
        match self.below.call(Request::ListKeys, deadline)? {
            Reply::Keys(keys) => {
                Ok(keys.iter().filter_map(|key| key.strip_prefix(&self.prefix)).map(str::to_owned).collect())
            }
            other => Err(super::odd(&other)),
        }
    }
}

impl Store for PrefixStore {
    fn call(&self, request: Request, deadline: Deadline) -> Result<Reply> {
        match request {
            Request::ListKeys => Ok(Reply::Keys(self.own_keys(deadline)?)),
            Request::NumKeys => Ok(Reply::Number(self.own_keys(deadline)?.len() as i64)),
            other => self.below.call(other.map_keys(|key| format!("{}{key}", self.prefix)), deadline),
        }
    }

    fn timeout(&self) -> Duration {
        self.patience.get()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.patience.set(timeout);
    }

    fn clone_store(&self) -> Result<Arc<dyn Store>> {
        let below = self.below.clone_store()?;
        Ok(Arc::new(Self { prefix: self.prefix.clone(), below, patience: Patience::new(self.timeout()) }))
    }
}
