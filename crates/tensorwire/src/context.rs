//! What a process has once: devices, the cache of mappings, the watcher thread, the configuration.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tensorwire_device::fork::Birth;
use tensorwire_device::host::Host;
use tensorwire_device::secret::Id;
use tensorwire_device::{Device, DeviceId, Handle, Region, Span};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::group::memory::Memory;
use crate::watch::Watcher;

/// The state of a process that its groups share. Groups hold an `Arc` of one; two contexts never meet.
#[derive(Debug)]
pub struct Context {
    config: Config,
    birth: Birth,
    identity: Id,
    devices: Vec<Arc<dyn Device>>,
    mappings: Mutex<HashMap<MappingKey, Weak<dyn Region>>>,
    watcher: Watcher,
    /// The memory of each of its groups.
    memories: Mutex<Vec<Weak<Memory>>>,
}

/// How many regions of each group an allocation looks at.
const LOOKS: usize = 64;

/// What makes two handles the same memory.
type MappingKey = (u64, u64);

impl Context {
    /// A context with the configuration of the environment.
    pub fn from_env() -> Result<Arc<Self>> {
        Self::new(Config::from_env()?)
    }

    /// A context with a given configuration. Starts the watcher thread.
    pub fn new(config: Config) -> Result<Arc<Self>> {
        let identity = Id::random()?;
        let watcher = Watcher::start(identity, &config)?;
        let devices: Vec<Arc<dyn Device>> = vec![Arc::new(Host)];
        Ok(Arc::new(Self {
            config,
            birth: Birth::now(),
            identity,
            devices,
            mappings: Mutex::default(),
            watcher,
            memories: Mutex::default(),
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

    /// All devices of this process; the host is the first.
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    /// One device.
    pub fn device(&self, id: &DeviceId) -> Result<&Arc<dyn Device>> {
        self.devices.iter().find(|device| device.id() == *id).ok_or_else(|| {
            let known: Vec<String> = self.devices.iter().map(|device| device.id().to_string()).collect();
            Error::Unsupported { what: format!("device {id}"), need: id.to_string(), have: known.join(", ") }
        })
    }

    /// The host's memory.
    pub fn host(&self) -> &dyn Device {
        &*self.devices[0]
    }

    /// Maps memory of another process, or gives the mapping that is there already: memory that arrives twice is
    /// mapped once.
    pub fn import(&self, handle: Handle) -> Result<Arc<dyn Region>> {
        self.birth.check("the context")?;
        let Some(key) = handle.key()? else { return Ok(self.host().import(handle)?) };
        let mut mappings = self.mappings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(region) = mappings.get(&key).and_then(Weak::upgrade) {
            // The promise of this handle is checked like that of the first.
            if region.len() == handle.len() {
                return Ok(region);
            }
        }
        mappings.retain(|_, region| region.strong_count() > 0);
        let region = self.host().import(handle)?;
        mappings.insert(key, Arc::downgrade(&region));
        Ok(region)
    }

    /// How many mappings of other processes' memory are in use, and their bytes.
    pub fn mapped(&self) -> (usize, usize) {
        let mappings = self.mappings.lock().unwrap_or_else(PoisonError::into_inner);
        let live = mappings.values().filter_map(Weak::upgrade);
        live.fold((0, 0), |(count, bytes), region| (count + 1, bytes + region.len()))
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
