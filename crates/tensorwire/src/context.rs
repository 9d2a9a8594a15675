//! What a process has once: devices, the cache of mappings, the watcher thread, the configuration.

mod mappings;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use tensorwire_device::fork::Birth;
use tensorwire_device::gpu::{Answers, Probe};
use tensorwire_device::handle::{GpuHandle, Means};
use tensorwire_device::host::Host;
use tensorwire_device::pool::Pool;
use tensorwire_device::secret::Id;
use tensorwire_device::subregion::part;
use tensorwire_device::{self as device, Device, DeviceId, Handle, Region, Span};

use self::mappings::{Key, Mappings};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::lease::Leases;
use crate::ranks::memory::Memory;
use crate::watch::Watcher;

/// The state of a process that its groups share. Groups hold an `Arc` of one; two contexts never meet.
#[derive(Debug)]
pub struct Context {
    config: Config,
    birth: Birth,
    identity: Id,
    host: Arc<dyn Device>,
    gpus: OnceLock<device::Result<Gpus>>,
    mappings: Mutex<Mappings>,
    watcher: Watcher,
    /// The memory of each of its groups.
    memories: Mutex<Vec<Weak<Memory>>>,
    /// What it lends and has been lent; starts with the first of either.
    leases: OnceLock<Leases>,
    /// Held by who starts them.
    starting: Mutex<()>,
    /// The allocators that it was asked for.
    pools: Mutex<HashMap<DeviceId, Pool>>,
}

/// How many regions of each group an allocation looks at.
const LOOKS: usize = 64;

/// How many bytes of other processes' memory on GPUs stay mapped behind their last use.
const KEPT: usize = 256 << 20;

/// Whoever opens GPUs, and what was asked about them.
#[derive(Debug)]
struct Gpus {
    driver: Arc<dyn Probe>,
    answers: Answers,
}

impl Context {
    /// A context with the configuration of the environment.
    pub fn from_env() -> Result<Arc<Self>> {
        Self::new(Config::from_env()?)
    }

    /// A context with a given configuration. Starts the watcher thread.
    pub fn new(config: Config) -> Result<Arc<Self>> {
        let identity = Id::random()?;
        let watcher = Watcher::start(identity, &config)?;
        Ok(Arc::new(Self {
            config,
            birth: Birth::now(),
            identity,
            host: Arc::new(Host),
            gpus: OnceLock::new(),
            mappings: Mutex::new(Mappings::new(KEPT)),
            watcher,
            memories: Mutex::default(),
            leases: OnceLock::new(),
            starting: Mutex::default(),
            pools: Mutex::default(),
        }))
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The random name of this context.
    pub fn identity(&self) -> Id {
        self.identity
    }

    /// One device; a GPU is opened when it is first asked for.
    pub fn device(&self, id: &DeviceId) -> Result<Arc<dyn Device>> {
        self.birth.check("the context")?;
        match id {
            DeviceId::Host => Ok(self.host.clone()),
            gpu => {
                let gpus = self.gpus().map_err(|error| match error {
                    Error::Unsupported { what, need, have } => {
                        Error::Unsupported { what: format!("{gpu} ({what})"), need, have }
                    }
                    other => other,
                })?;
                Ok(gpus.driver.open(gpu)?)
            }
        }
    }

    /// All devices of this process; the host is the first. GPUs that cannot be opened are left out.
    pub fn all_devices(&self) -> Vec<Arc<dyn Device>> {
        let ids = self.gpus().and_then(|gpus| Ok(gpus.answers.gpus()?));
        let ids = ids.unwrap_or_default().iter().map(|gpu| gpu.id.clone());
        let gpus = ids.filter_map(|id| match self.device(&id) {
            Ok(device) => Some(device),
            Err(error) => {
                tracing::warn!("{id} cannot be opened: {error}");
                None
            }
        });
        std::iter::once(self.host.clone()).chain(gpus).collect()
    }

    /// What there is to know about the GPUs of this process: who reaches whom, fabric, multicast. Asked once, lazily.
    pub fn access(&self) -> Result<&Answers> {
        Ok(&self.gpus()?.answers)
    }

    /// The host's memory.
    pub fn host(&self) -> &dyn Device {
        &*self.host
    }

    fn gpus(&self) -> Result<&Gpus> {
        let gpus = self.gpus.get_or_init(|| {
            let driver = device::gpu::driver()?;
            Ok(Gpus { answers: Answers::new(driver.clone()), driver })
        });
        Ok(gpus.as_ref().map_err(Clone::clone)?)
    }

    /// Maps memory of this host that another process exported, or gives the mapping that is there already: memory that
    /// arrives twice is mapped once.
    pub fn import(&self, handle: Handle) -> Result<Arc<dyn Region>> {
        self.birth.check("the context")?;
        match handle.key()? {
            Some((file, number)) => {
                let len = handle.len();
                let (key, keep) = (Key::File(file, number), false);
                self.mapped_once(key, len, keep, || Ok(self.host.import(handle)?))
            }
            // Of what cannot be told apart, and of what the host refuses.
            None => Ok(self.host.import(handle)?),
        }
    }

    /// The same for memory of any device, exported by the process with this identity.
    pub fn import_from(&self, exporter: Id, handle: Handle) -> Result<Arc<dyn Region>> {
        self.birth.check("the context")?;
        let Handle::Gpu(GpuHandle { device, offset, len, chunks, .. }) = handle else {
            return self.import(handle);
        };
        let whole: usize = chunks.iter().map(|chunk| chunk.size).sum();
        let key = Key::Gpu(exporter, device, chunks.iter().map(|chunk| chunk.id).collect());
        // Memory that came by a legacy handle must be closed before its owner frees it.
        let keep = !chunks.iter().any(|chunk| matches!(chunk.means, Means::Legacy(_)));
        let all = Handle::Gpu(GpuHandle::new(device, 0, whole, chunks));
        let id = DeviceId::Gpu(device);
        let region = self.mapped_once(key, whole, keep, || Ok(self.device(&id)?.import(all)?))?;
        Ok(part(region, offset..offset.saturating_add(len))?)
    }

    /// All of the memory of a handle, by a name that no other memory has. It is mapped as long as it is used.
    pub(crate) fn import_all(&self, name: Id, handle: Handle) -> Result<Arc<dyn Region>> {
        let Handle::Gpu(GpuHandle { device, chunks, .. }) = handle else { return self.import(handle) };
        let len = chunks.iter().map(|chunk| chunk.size).sum();
        let all = Handle::Gpu(GpuHandle::new(device, 0, len, chunks));
        let id = DeviceId::Gpu(device);
        self.mapped_once(Key::Name(name), len, false, || Ok(self.device(&id)?.import(all)?))
    }

    pub(crate) fn leases(&self) -> Result<&Leases> {
        self.birth.check("the context")?;
        if let Some(leases) = self.leases.get() {
            return Ok(leases);
        }
        // What failed is tried again: the process may have been out of descriptors.
        let _alone = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.leases.get().is_none() {
            let _ = self.leases.set(Leases::start(self)?);
        }
        self.leases.get().ok_or_else(|| Error::misuse("leases that have not started"))
    }

    /// The allocator of a device, made at the first call.
    pub(crate) fn pool_of(&self, id: &DeviceId, make: impl FnOnce() -> Pool) -> Pool {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.entry(id.clone()).or_insert_with(make).clone()
    }

    pub(crate) fn leases_if_any(&self) -> Option<&Leases> {
        if !self.is_ours() {
            return None;
        }
        self.leases.get()
    }

    /// The mapping that is there under a key, or a new one.
    fn mapped_once(
        &self,
        key: Key,
        len: usize,
        keep: bool,
        map: impl FnOnce() -> Result<Arc<dyn Region>>,
    ) -> Result<Arc<dyn Region>> {
        self.mappings.lock().unwrap_or_else(PoisonError::into_inner).get(key, len, keep, map)
    }

    /// Unmaps what is kept of a process that is gone, or that takes its memory back, and that nobody here uses.
    pub fn forget(&self, exporter: Id) {
        self.mappings.lock().unwrap_or_else(PoisonError::into_inner).forget(exporter);
    }

    /// How many mappings of other processes' memory are in use or kept, and their bytes.
    pub fn mapped(&self) -> (usize, usize) {
        self.mappings.lock().unwrap_or_else(PoisonError::into_inner).sum()
    }

    /// New memory of this process that the other ranks of its host can map, in every group: operations on it need no
    /// staging copy. It is free again when the last clone of the span is gone.
    pub fn alloc(&self, bytes: usize) -> Result<Span> {
        self.birth.check("the context")?;
        self.sweep(LOOKS);
        Ok(Span::whole(self.host().alloc(bytes)?))
    }

    /// Whether this process made it; false in a forked child of that process, which must not use it.
    pub fn is_ours(&self) -> bool {
        self.birth.is_ours()
    }

    /// Has a group's memory swept with that of all others.
    pub(crate) fn looks_after(&self, memory: &Arc<Memory>) {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(memory));
    }

    /// Notices memory that is gone, in all groups: one that is not used at the moment may have lent it, or mapped it.
    pub(crate) fn sweep(&self, looks: usize) {
        // Who has the list does just this.
        let Ok(mut memories) = self.memories.try_lock() else { return };
        memories.retain(|memory| {
            let memory = memory.upgrade();
            memory.inspect(|memory| memory.notice(looks)).is_some()
        });
    }

    /// Tells a forked child that this is its parent's.
    pub(crate) fn birth(&self) -> Birth {
        self.birth
    }

    pub(crate) fn watcher(&self) -> &Watcher {
        &self.watcher
    }
}
