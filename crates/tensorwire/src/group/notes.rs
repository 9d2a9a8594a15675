//! What ranks write into their store while a group forms, and read there. Where the job has a key, each value carries a proof,
//! and one without a right proof is an error. Counters have none: a store that lies about them can only delay.

use std::sync::Arc;

use tensorwire_device::Deadline;

use crate::config::Key;
use crate::error::{Error, PeerFaultKind, Result};
use crate::link::key::{self, Proofs, Unproved};
use crate::store::{PrefixStore, Request, Store};

/// A group's part of a store.
#[derive(Debug, Clone)]
pub(crate) struct Notes {
    pub(crate) store: Arc<dyn Store>,
    group: String,
    proofs: Option<Proofs>,
}

impl Notes {
    /// The part of the group of a name.
    pub(crate) fn new(store: Arc<dyn Store>, group: &str, key: Option<&Key>) -> Self {
        let store = Arc::new(PrefixStore::new(place_of(group), store));
        let proofs = key.map(|key| Proofs::new(key.secret(), group));
        Self { store, group: group.to_owned(), proofs }
    }

    /// The request that writes values of a group, for a process that does not wait until the store has taken them.
    pub(crate) fn writing(group: &str, key: Option<&Key>, values: &[(&str, &[u8])]) -> Request {
        let proofs = key.map(|key| Proofs::new(key.secret(), group));
        let whole = |(name, value): &(&str, &[u8])| {
            (format!("{}/{name}", place_of(group)), key::seal(proofs.as_ref(), name, value))
        };
        Request::MultiSet(values.iter().map(whole).collect())
    }

    /// The same with other proofs.
    pub(crate) fn with(&self, proofs: Option<Proofs>) -> Self {
        Self { proofs, ..self.clone() }
    }

    pub(crate) fn proofs(&self) -> Option<&Proofs> {
        self.proofs.as_ref()
    }

    pub(crate) fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.store.set(name, &self.seal(name, value))
    }

    /// Waits for a value.
    pub(crate) fn get_by(&self, name: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.open(name, &self.store.get_by(name, deadline)?)
    }

    /// A value that is there.
    pub(crate) fn get(&self, name: &str) -> Result<Vec<u8>> {
        self.open(name, &self.store.get(name)?)
    }

    /// Whether there is a value now.
    pub(crate) fn has(&self, name: &str) -> Result<bool> {
        self.store.check(&[name])
    }

    /// A value as it is written.
    pub(crate) fn seal(&self, name: &str, value: &[u8]) -> Vec<u8> {
        key::seal(self.proofs(), name, value)
    }

    /// A value from what lies in the store.
    pub(crate) fn open(&self, name: &str, bytes: &[u8]) -> Result<Vec<u8>> {
        self.proved(name, bytes).map(<[u8]>::to_vec).map_err(|why| self.refuse(name, "this process", why))
    }

    /// The same for a caller that can say more of the fault.
    pub(crate) fn proved<'a>(&self, name: &str, bytes: &'a [u8]) -> Result<&'a [u8], Unproved> {
        key::open(self.proofs(), name, bytes)
    }

    /// The error of a value that does not count.
    pub(crate) fn refuse(&self, name: &str, reader: &str, why: Unproved) -> Error {
        let who = format!("{name:?} of the group {:?} in its store", self.group);
        Error::peer(kind_of(why), who, None, why.explain("it", reader, self.proofs()))
    }
}

/// Whether somebody has another key, or the store lies.
pub(crate) fn kind_of(why: Unproved) -> PeerFaultKind {
    match why {
        Unproved::Wrong => PeerFaultKind::Misbehaved,
        _ => PeerFaultKind::Incompatible,
    }
}

/// Where a group has its keys in its store.
fn place_of(name: &str) -> String {
    format!("tensorwire/{name}")
}
