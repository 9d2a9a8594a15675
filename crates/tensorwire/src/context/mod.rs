//! What a process has once: devices, shared memory, the watcher thread, the configuration.

mod idle;
mod leases;
mod named;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tensorwire_device::fork::Birth;
use tensorwire_device::gpu::Answers;
use tensorwire_device::pool::Pool;
use tensorwire_device::secret::Id;
use tensorwire_device::{Device, DeviceId, Handle, Queue, Region, Span};

pub(crate) use self::idle::IdleQueues;
use crate::config::Config;
use crate::devices::Devices;
use crate::error::{Error, Result};
use crate::lease::Leases;
use crate::link::Office;
use crate::share::{LenderId, Share};
use crate::watch::Watcher;

/// The state of a process that its groups share. Groups hold an `Arc` of one; two contexts never meet.
#[derive(Debug)]
pub struct Context {
    config: Config,
    birth: Birth,
    devices: Arc<Devices>,
    share: Arc<Share>,
    watcher: Watcher,
    /// What it lends and has been lent; starts with the first of either.
    leases: OnceLock<Leases>,
    /// Its connections with other hosts; starts with the first group that has some.
    office: OnceLock<Arc<Office>>,
    /// Held by the thread that starts one of them.
    starting: Mutex<()>,
    /// The allocators that it was asked for.
    pools: Mutex<HashMap<DeviceId, Pool>>,
    /// Memory that stays.
    named: named::Named,
    /// For large copies of the host, with threads that help.
    copier: Mutex<Option<Box<dyn Queue>>>,
}

/// The most threads that share a copy: more bring little, as memory is not faster.
const COPIERS: usize = 3;

/// How many regions an allocation looks at.
const LOOKS: usize = 64;

impl Context {
    /// A context with the configuration of the environment.
    pub fn from_env() -> Result<Arc<Self>> {
        Self::new(Config::from_env()?)
    }

    /// A context with a given configuration. Starts the watcher thread.
    pub fn new(config: Config) -> Result<Arc<Self>> {
        let devices = Arc::new(Devices::new());
        let share = Share::new(Id::random()?, &devices);
        let watcher = Watcher::start(&share, &config)?;
        Ok(Arc::new(Self {
            config,
            birth: Birth::now(),
            devices,
            share,
            watcher,
            leases: OnceLock::new(),
            office: OnceLock::new(),
            starting: Mutex::default(),
            pools: Mutex::default(),
            named: Mutex::default(),
            copier: Mutex::default(),
        }))
    }

    /// Keeps memory as long as the context lives, so that nobody gets it again.
    pub(crate) fn lose(&self, span: Span) {
        self.share.linger(Box::new(move || {
            let _ = &span;
            false
        }));
    }

    /// Copies memory of the host. Several threads share a large copy where this process has cores for them: there is one set
    /// of such threads in a process, and who finds them at work copies alone.
    pub(crate) fn copy<T>(&self, copy: impl FnOnce(&mut dyn Queue) -> Result<T>) -> Result<T> {
        let Ok(mut copier) = self.copier.try_lock() else { return copy(&mut *self.host().queue()?) };
        let queue = match &mut *copier {
            Some(queue) => queue,
            empty => {
                let mut queue = self.host().queue()?;
                queue.share(std::thread::available_parallelism().map_or(1, |cores| cores.get().min(COPIERS)));
                empty.insert(queue)
            }
        };
        copy(&mut **queue)
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The random name of this context.
    pub fn identity(&self) -> Id {
        self.share.identity()
    }

    /// One device; a GPU is opened when it is first asked for.
    pub fn device(&self, id: &DeviceId) -> Result<Arc<dyn Device>> {
        self.birth.check("the context")?;
        self.devices.open(id)
    }

    /// All devices of this process; the host is the first. GPUs that cannot be opened are left out.
    pub fn all_devices(&self) -> Vec<Arc<dyn Device>> {
        if !self.is_ours() {
            return vec![self.devices.host().clone()];
        }
        self.devices.all()
    }

    /// What there is to know about the GPUs of this process: who reaches whom, fabric, multicast. Asked once, lazily.
    pub fn access(&self) -> Result<&Answers> {
        self.devices.access()
    }

    /// The GPUs of this process, if that is known without starting a driver.
    pub(crate) fn known_gpus(&self) -> Option<Vec<DeviceId>> {
        self.devices.known_gpus()
    }

    /// Why a queue of one GPU cannot copy from memory of the other, if so.
    pub(crate) fn why_unreachable(&self, from: &DeviceId, to: &DeviceId) -> Result<Option<String>> {
        if from == to {
            return Ok(None);
        }
        let access = self.access()?;
        let (Ok(here), Ok(there)) = (access.index(from), access.index(to)) else {
            return Ok(Some(format!("this process does not see {to}")));
        };
        Ok(access.open_peer(here, there)?.reason().map(String::from))
    }

    /// The host's memory.
    pub fn host(&self) -> &dyn Device {
        &**self.devices.host()
    }

    /// Maps memory of this host that another process exported, or gives the mapping that is there already: memory that
    /// arrives twice is mapped once. Memory of a GPU needs [`Context::import_from`].
    pub fn import(&self, handle: Handle) -> Result<Arc<dyn Region>> {
        self.share.import(handle)
    }

    /// The same for memory of any device, exported by the process with this identity.
    pub fn import_from(&self, exporter: Id, handle: Handle) -> Result<Arc<dyn Region>> {
        self.share.import_from(LenderId::told(exporter), handle)
    }

    /// Unmaps what is kept of a process that is gone, or that takes its memory back, and that nobody here uses.
    pub fn forget(&self, exporter: Id) {
        self.share.forget(exporter);
    }

    /// How many mappings of other processes' memory are in use or kept, and their bytes.
    pub fn mapped(&self) -> (usize, usize) {
        self.share.mapped()
    }

    /// New memory of this process that the other ranks of its host can map, in every group: operations on it need no
    /// staging copy. It is free again when the last clone of the span is gone.
    pub fn alloc(&self, bytes: usize) -> Result<Span> {
        self.birth.check("the context")?;
        self.share.sweep(LOOKS);
        Ok(Span::whole(self.host().alloc(bytes)?))
    }

    /// Has shared memory found by its address: own, or what was lent to this process. For callers who see memory as pointers.
    pub fn note(&self, span: &Span) {
        self.share.note(span);
    }

    /// The shared memory that was noted and lies at an address, if all of these bytes are one piece of it.
    pub fn noted_at(&self, address: usize, len: usize) -> Option<Span> {
        self.share.at(address, len)
    }

    /// Says why this process ends, as a clause such as "raised ValueError: ...". The other ranks of its groups read it
    /// once they miss this one. What was said first counts.
    pub fn last_words(&self, clause: &str) {
        self.watcher.say(clause);
    }

    /// Says that this process is about to end, before it closes its groups. Ranks that miss it then wait a moment to learn its
    /// exit status.
    pub fn about_to_end(&self) {
        self.watcher.ends();
    }

    /// Whether this process made it; false in a forked child of that process, which must not use it.
    pub fn is_ours(&self) -> bool {
        self.birth.is_ours()
    }

    /// Tells a forked child that this is its parent's.
    pub(crate) fn birth(&self) -> Birth {
        self.birth
    }

    pub(crate) fn share(&self) -> &Arc<Share> {
        &self.share
    }

    pub(crate) fn watcher(&self) -> &Watcher {
        &self.watcher
    }

    /// What connects this process with other hosts.
    pub(crate) fn office(&self) -> Result<&Arc<Office>> {
        self.birth.check("the context")?;
        if let Some(office) = self.office.get() {
            return Ok(office);
        }
        let _starting = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.office.get().is_none() {
            let _ = self.office.set(Arc::new(Office::open(self.identity())?));
        }
        self.office.get().ok_or_else(|| Error::bug("an office was opened and is not there"))
    }
}
