//! The builder of a group: from the environment, from an address, or from a store.

use std::sync::Arc;
use std::time::Duration;

use tensorwire_device::Deadline;

use super::{Group, Origin, form, launch};
use crate::config::{Config, Key};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::shm::control::Why;
use crate::store::Store;

/// How a group is made, where the defaults are not enough.
#[derive(Debug, Default)]
pub struct GroupBuilder {
    context: Option<Arc<Context>>,
    timeout: Option<Duration>,
    name: Option<String>,
    /// A group that these ranks are in already, and their ranks there.
    parent: Option<(Group, Vec<usize>)>,
}

impl GroupBuilder {
    /// The context of the group. Without this call the group gets a context of its own, from the environment.
    #[must_use]
    pub fn context(mut self, context: &Arc<Context>) -> Self {
        self.context = Some(context.clone());
        self
    }

    /// How long forming the group and each of its operations may take.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// The name of the group in its store. Groups that share a store need different names.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Says that the new ranks are in a group already, as which ranks of it, in the order of the new ones. If one of
    /// them dies there, the new group is not waited for.
    #[must_use]
    pub fn within(mut self, parent: &Group, ranks: &[usize]) -> Self {
        self.parent = Some((parent.clone(), ranks.to_vec()));
        self
    }

    /// Makes the group from the variables of a launcher: torchrun, `tensorwire run`, Slurm, Open MPI or PMI.
    pub fn from_env(self) -> Result<Group> {
        launch::from_env(self).map_err(timed)
    }

    /// Makes the group from an address: `tcp://host:port` (rank 0 serves the store there) or `file:///path`. Rank
    /// and world are given here or in the address: `tcp://host:port?rank=0&world_size=2`.
    pub fn from_url(self, url: &str, rank: Option<usize>, world: Option<usize>) -> Result<Group> {
        launch::from_url(self, url, rank, world).map_err(timed)
    }

    /// Makes the group from a store that every rank can reach.
    pub fn from_store(self, store: Arc<dyn Store>, rank: usize, world: usize) -> Result<Group> {
        let builder = self.with_context()?;
        let deadline = Deadline::after(builder.patience());
        let origin =
            Origin { store, server: None, lingers: false, once: false, _file: None, route: None, key: None };
        builder.form(origin, rank, world, deadline).map_err(timed)
    }

    /// Has a context from now on.
    pub(super) fn with_context(self) -> Result<Self> {
        match self.context {
            Some(_) => Ok(self),
            None => Ok(self.context(&Context::from_env()?)),
        }
    }

    /// Makes a group of two processes that have met at a store: the two ends of a pipe. `host` and `port` are those of the
    /// store, as this process reaches it. With a key that is theirs alone, or else that of the configuration. The group lets go of
    /// the store once it is formed, so it can be neither split nor shrunk.
    pub(crate) fn of_two(
        self,
        (store, host, port): (Arc<dyn Store>, &str, u16),
        key: Option<Key>,
        rank: usize,
        deadline: Deadline,
    ) -> Result<Group> {
        let route = launch::route(host, port)?;
        let origin = Origin { store, server: None, lingers: false, once: true, _file: None, route, key };
        self.form(origin, rank, 2, deadline)
    }

    pub(super) fn title(&self) -> &str {
        self.name.as_deref().unwrap_or("world")
    }

    pub(super) fn key(&self) -> Option<&Key> {
        self.context.as_ref().and_then(|context| context.config().key.as_ref())
    }

    pub(super) fn patience(&self) -> Duration {
        let configured = self.context.as_ref().map(|context| context.config().timeout);
        self.timeout.or(configured).unwrap_or(Config::default().timeout)
    }

    /// Forms the group by the deadline; the way to the store may have taken a part of the time.
    pub(super) fn form(self, origin: Origin, rank: usize, world: usize, deadline: Deadline) -> Result<Group> {
        let (timeout, name) = (self.patience(), self.title().to_owned());
        let context = self.context.map_or_else(Context::from_env, Ok)?;
        let form = |sensible: &dyn Fn() -> Result<()>| {
            form::form(&context, origin, name, (rank, world), (timeout, deadline), sensible)
        };
        match self.parent {
            Some((parent, ranks)) => parent.form_of(&ranks, form),
            None => form(&|| Ok(())),
        }
    }
}

/// Forming a group takes the time that its operations have.
fn timed(error: Error) -> Error {
    Why::GroupTimedOut.tell(error)
}
