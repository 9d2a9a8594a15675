//! One GPU: its context, which the whole process shares, its kernels, and what its regions and queues work with.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::context::OpenContext;
use super::driver::{Address, Attribute, Context, Driver, Event, Export, Function, Stream};
use super::ending::{self, Inside};
use super::gates::Gates;
use super::multicast::CudaMulticast;
use super::probe::fabric_cycle;
use super::queue::CudaQueue;
use super::reaper::Reaper;
use super::region::{Mapped, Mappings};
use super::registered::HostMemory;
use super::waits::Waits;
use super::{kernels, region};
use crate::deadline::Deadline;
use crate::device::{Device, DeviceId, Queue, Region};
use crate::error::{Error, Result};
use crate::fork::Birth;
use crate::gpu;
use crate::handle::Handle;
use crate::multicast::{Multicast, MulticastHandle};
use crate::sync::{AtomicU64, Ordering};

/// How many GPUs this process may see.
pub fn count() -> Result<usize> {
    Driver::get()?.count()
}

/// The CUDA version of the driver: (13, 0).
pub fn driver_version() -> Result<(u32, u32)> {
    let version = Driver::get()?.version()?.unsigned_abs();
    Ok((version / 1000, version % 1000 / 10))
}

/// CU_STREAM_PER_THREAD.
const PER_THREAD: usize = 2;
/// Memory is short where less than this part of it is free.
const LITTLE: usize = 16;

/// What is known of a GPU without opening it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Facts {
    /// Its place among those that this process may see.
    pub ordinal: usize,
    /// Its name that is the same in every process.
    pub uuid: [u8; 16],
    /// What people call it.
    pub name: String,
    /// Where it is on the PCI bus: "0000:1b:00.0".
    pub pci: String,
    /// Bytes of its memory.
    pub memory: usize,
    /// Its compute capability.
    pub compute: (i32, i32),
    /// Its multiprocessors.
    pub processors: u32,
}

/// What is known of the GPU with this ordinal.
pub fn facts(ordinal: usize) -> Result<Facts> {
    let driver = Driver::get()?;
    let count = driver.count()?;
    if ordinal >= count {
        return Err(Error::misuse(format!("GPU {ordinal}: this process sees {count}, counted from 0")));
    }
    Facts::of(driver, ordinal)
}

impl Facts {
    fn of(driver: &Driver, ordinal: usize) -> Result<Self> {
        let device = driver.device(ordinal)?;
        let attribute = |attribute| driver.attribute(device, attribute);
        let compute = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        Ok(Self {
            ordinal,
            uuid: driver.uuid(device)?,
            name: driver.name(device)?,
            pci: driver.pci(device)?,
            memory: driver.memory(device)?,
            compute,
            processors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs(),
        })
    }
}

/// What a process holds of a GPU through us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Own and imported allocations that are mapped.
    pub allocations: usize,
    /// Their bytes.
    pub mapped: usize,
    /// Bytes of host memory that the GPU reaches.
    pub registered: usize,
    /// Waits that streams were given, so far.
    pub stream_waits: u64,
    /// Waits that the calling threads did instead, so far: as many streams waited as may, or streams do not wait here.
    pub caller_waits: u64,
    /// Reductions that streams were given so far, or recorded graphs, whose kernels wait for those of other ranks.
    pub meetings: u64,
}

/// A GPU that memory can be taken from and work be given to.
#[derive(Debug, Clone)]
pub struct Gpu(Arc<Inner>);

/// What regions and queues of a GPU share.
pub(super) struct Inner {
    pub(super) driver: &'static Driver,
    /// The driver's name of the GPU.
    pub(super) device: c_int,
    /// Whether MPS serves it.
    shared: bool,
    pub(super) facts: Facts,
    /// How its memory leaves the process: as a fabric handle where that works.
    pub(super) export: Export,
    /// What sizes of shareable memory are multiples of.
    pub(super) granularity: usize,
    pub(super) mappings: Mappings,
    pub(super) hosts: Arc<HostMemory>,
    pub(super) waits: Arc<Waits>,
    pub(super) reaper: Arc<Reaper>,
    pub(super) gates: Gates,
    /// See [`Usage`].
    pub(super) meetings: AtomicU64,
    pub(super) birth: Birth,
    /// GPUs whose memory this one may reach.
    friends: Mutex<Vec<[u8; 16]>>,
    /// Nothing in a forked child, where it is the parent's.
    opened: ManuallyDrop<OpenContext>,
}

/// The GPUs that are open, by their ordinals: hardware queues belong to the process, and so do the waits that they hold.
/// Each has its own lock, so that one that takes long to open holds up only those who want it.
static OPEN: Mutex<BTreeMap<usize, Arc<Mutex<Weak<Inner>>>>> = Mutex::new(BTreeMap::new());

/// A GPU's context, which everybody in the process shares, and nothing of ours in it. It stays as long as this does.
#[doc(hidden)]
#[derive(Debug)]
pub struct Primary {
    driver: &'static Driver,
    device: c_int,
    pub(super) context: Context,
}

impl Primary {
    /// That of the GPU with this ordinal.
    pub fn retain(ordinal: usize) -> Result<Self> {
        let driver = Driver::get()?;
        Self::of(driver, driver.device(ordinal)?)
    }

    pub(super) fn of(driver: &'static Driver, device: c_int) -> Result<Self> {
        Ok(Self { driver, device, context: driver.retain_primary(device)? })
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: retained once, by `of`, and used no more.
        let _ = unsafe { self.driver.release_primary(self.device) };
    }
}

impl Gpu {
    /// Opens the GPU with this ordinal: makes its context this process's, and loads and launches the kernels once. One that
    /// is open already is the same.
    pub fn open(ordinal: usize) -> Result<Self> {
        let facts = facts(ordinal)?;
        let place = OPEN.lock().unwrap_or_else(PoisonError::into_inner).entry(ordinal).or_default().clone();
        let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(inner) = place.upgrade().filter(|inner| inner.birth.is_ours()) {
            return Ok(Self(inner));
        }
        let gpu = Self::with(Driver::get()?, facts)?;
        *place = Arc::downgrade(&gpu.0);
        Ok(gpu)
    }

    /// Opens the GPU with this UUID.
    pub fn open_uuid(uuid: [u8; 16]) -> Result<Self> {
        let driver = Driver::get()?;
        for ordinal in 0..driver.count()? {
            if driver.uuid(driver.device(ordinal)?)? == uuid {
                return Self::open(ordinal);
            }
        }
        Err(Error::Unsupported {
            what: DeviceId::Gpu(uuid).to_string(),
            need: "this GPU among those that the process may see (CUDA_VISIBLE_DEVICES)".into(),
            have: "others".into(),
        })
    }

    pub(super) fn with(driver: &'static Driver, facts: Facts) -> Result<Self> {
        let device = driver.device(facts.ordinal)?;
        for (attribute, need) in [
            (
                Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
                "virtual memory management",
            ),
            (
                Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                "memory that can be exported as a descriptor",
            ),
            (Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, "one address space with the host"),
        ] {
            if driver.attribute(device, attribute)? == 0 {
                return Err(Error::Unsupported {
                    what: format!("the GPU {} ({})", facts.ordinal, facts.name),
                    need: need.into(),
                    have: "a GPU or driver without it".into(),
                });
            }
        }
        if facts.compute < kernels::OLDEST_COMPUTE {
            let (major, minor) = kernels::OLDEST_COMPUTE;
            return Err(Error::Unsupported {
                what: format!("the GPU {} ({})", facts.ordinal, facts.name),
                need: format!("compute capability {major}.{minor}, for our kernels"),
                have: format!("{}.{}", facts.compute.0, facts.compute.1),
            });
        }
        let opened = OpenContext::new(driver, device, facts.compute)?;
        ending::prepare();
        let entered = opened.enter()?;
        let fabric = driver.attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)?;
        // The attribute may say yes where it is not permitted: only trying tells.
        let export = match fabric != 0 && fabric_cycle(driver, device).is_ok() {
            true => Export::Both,
            false => Export::Fd,
        };
        let granularity = driver.granularity(device, export)?;
        drop(entered);
        let shared = driver
            .attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED)
            .is_ok_and(|shared| shared != 0);
        let (waits, hosts) = (Arc::new(Waits::new(shared)), Arc::new(HostMemory::default()));
        let inner = Inner {
            driver,
            device,
            shared,
            facts,
            export,
            granularity,
            mappings: Mappings::default(),
            reaper: Arc::new(Reaper::new(driver, opened.context(), waits.clone(), hosts.clone())),
            hosts,
            waits,
            gates: Gates::default(),
            meetings: AtomicU64::new(0),
            birth: Birth::now(),
            friends: Mutex::default(),
            opened: ManuallyDrop::new(opened),
        };
        Ok(Self(Arc::new(inner)))
    }

    /// What is known of it.
    pub fn facts(&self) -> &Facts {
        &self.0.facts
    }

    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }

    /// A queue on a stream of somebody else, by its number: work is queued behind what its owner has queued.
    ///
    /// The number that means each thread's own default stream is refused: a queue may go to another thread.
    ///
    /// # Safety
    /// It is a stream of this GPU's primary context that lives as long as the queue.
    pub unsafe fn queue_on(&self, stream: usize) -> Result<Box<dyn Queue>> {
        // SAFETY: the caller's promise.
        Ok(Box::new(unsafe { self.guest(stream) }?))
    }

    /// Adds what `work` queues to the graph that the owner of a stream records. The graph keeps the memory that this works on,
    /// and `also`: until it, its copies, and all that was made of them to be run, have gone. A thread of ours drops them then.
    ///
    /// `work` may queue copies, reductions and meetings, but no signals, waits or marks.
    ///
    /// # Safety
    /// It is a stream of this GPU's primary context that exists as long as the call lasts.
    pub unsafe fn record_on<E: From<Error>>(
        &self,
        stream: usize,
        also: Box<dyn Any + Send>,
        work: impl FnOnce(&mut dyn Queue) -> Result<(), E>,
    ) -> Result<(), E> {
        // SAFETY: the caller's promise.
        unsafe { self.guest(stream) }?.record_more(also, work)
    }

    /// # Safety
    /// As for [`queue_on`](Self::queue_on).
    unsafe fn guest(&self, stream: usize) -> Result<CudaQueue> {
        if stream == PER_THREAD {
            return Err(Error::misuse(
                "a queue on the default stream of each thread: name a stream that is one and the same",
            ));
        }
        let stream = Stream::from_number(stream);
        let _entered = self.0.enter()?;
        // SAFETY: the caller's promise.
        let context = unsafe { self.0.driver.context_of(stream) }?;
        if context != self.0.opened.context() {
            return Err(Error::misuse(format!("the stream belongs to another context than {}", self.id())));
        }
        Ok(CudaQueue::on(self.0.clone(), stream))
    }

    /// A stream of the primary context that nobody else has, by its number. It stays as long as the process.
    pub fn own_stream(&self) -> Result<usize> {
        let _entered = self.0.enter()?;
        Ok(self.0.driver.stream(false)?.number())
    }

    /// Whether what is queued on a stream of somebody else goes into a graph.
    ///
    /// # Safety
    /// It is a stream of this GPU's primary context that exists as long as the call lasts.
    pub unsafe fn is_capturing(&self, stream: usize) -> Result<bool> {
        let _entered = self.0.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.0.driver.is_capturing(Stream::from_number(stream)) }
    }

    /// Does something on a queue of its own, between events of somebody else: what is queued waits for `after`, and `then`
    /// is recorded behind it.
    ///
    /// # Safety
    /// Both are events of this GPU's primary context by their numbers, and exist as long as the call lasts.
    pub unsafe fn between<T, E: From<Error>>(
        &self,
        after: Option<usize>,
        then: Option<usize>,
        work: impl FnOnce(&mut dyn Queue) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut queue = CudaQueue::new(self.0.clone())?;
        if let Some(event) = after {
            // SAFETY: the caller's promise.
            unsafe { queue.follow_event(Event::from_number(event)) }?;
        }
        let done = work(&mut queue)?;
        if let Some(event) = then {
            // SAFETY: the caller's promise.
            unsafe { queue.precede(Event::from_number(event)) }?;
        }
        Ok(done)
    }

    /// Memory in the old way (as cudaMalloc gives it), with whatever is in it: what other allocators hand out, for
    /// measuring and testing.
    pub fn plain(&self, len: usize) -> Result<Arc<dyn Region>> {
        region::plain(&self.0, len)
    }

    /// Exchanges signals with another process by two lines of this GPU's memory, which are zero before, to measure them: gives
    /// how long a round took, lot by lot. The other process does the same on the other side, 0 or 1. No other stream of
    /// this process may wait meanwhile.
    #[doc(hidden)]
    pub fn exchange(
        &self,
        words: &Arc<dyn Region>,
        side: usize,
        lots: u32,
        deadline: Deadline,
    ) -> Result<Vec<Duration>> {
        let queue = CudaQueue::new(self.0.clone())?;
        let mut exchanged = Err(Error::bug("an exchange while a stream waits"));
        self.0.waits.while_none(|| exchanged = queue.exchange(words, side, lots, deadline));
        exchanged
    }

    /// What it holds now.
    pub fn usage(&self) -> Usage {
        let ((allocations, mapped), (_, registered)) = (self.0.mappings.sum(), self.0.hosts.sum());
        let (stream_waits, caller_waits) = self.0.waits.sum();
        let meetings = self.0.meetings.load(Ordering::Relaxed);
        Usage { allocations, mapped, registered, stream_waits, caller_waits, meetings }
    }

    /// Free bytes and all bytes of its memory.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        let _entered = self.0.enter()?;
        self.0.driver.memory_info()
    }
}

impl Device for Gpu {
    fn id(&self) -> DeviceId {
        DeviceId::Gpu(self.0.facts.uuid)
    }

    fn is_served(&self) -> bool {
        self.0.shared
    }

    fn is_short(&self) -> bool {
        self.memory_info().is_ok_and(|(free, total)| free < total / LITTLE)
    }

    fn blocks(&self) -> usize {
        (self.0.facts.processors * kernels::BLOCKS_PER_PROCESSOR) as usize
    }

    fn alloc(&self, len: usize) -> Result<Arc<dyn Region>> {
        let region = Mapped::alloc(&self.0, len)?;
        let _entered = self.0.enter()?;
        // SAFETY: memory that was just mapped, and that nobody else knows.
        unsafe { self.0.opened.clear(region.addr() as Address, region.len()) }?;
        Ok(Arc::new(region))
    }

    fn take(&self, len: usize) -> Result<Arc<dyn Region>> {
        Ok(Arc::new(Mapped::alloc(&self.0, len)?))
    }

    fn import(&self, handle: Handle) -> Result<Arc<dyn Region>> {
        region::import(&self.0, handle.of_gpu()?)
    }

    unsafe fn adopt(
        &self,
        addr: usize,
        len: usize,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<Arc<dyn Region>> {
        // SAFETY: the caller's promise is handed on.
        unsafe { region::adopt(&self.0, addr, len, keep) }
    }

    fn around(&self, region: &Arc<dyn Region>) -> Result<Arc<dyn Region>> {
        region::around(&self.0, region)
    }

    fn ids_at(&self, addr: usize, len: usize) -> Result<Option<Vec<u64>>> {
        region::ids_at(&self.0, addr, len)
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(CudaQueue::new(self.0.clone())?))
    }

    fn multicast(&self, devices: usize, bytes: usize) -> Result<Box<dyn Multicast>> {
        Ok(Box::new(CudaMulticast::create(&self.0, devices, bytes)?))
    }

    fn join_multicast(&self, handle: MulticastHandle) -> Result<Box<dyn Multicast>> {
        Ok(Box::new(CudaMulticast::join(&self.0, &handle)?))
    }
}

impl Inner {
    /// Makes the GPU's context the thread's for as long as the result lives.
    pub(super) fn enter(&self) -> Result<Entered> {
        self.birth.check("the GPU's context")?;
        self.opened.enter()
    }

    /// The context, which lives as long as this.
    pub(super) fn context(&self) -> Context {
        self.opened.context()
    }

    /// Notes that memory of another GPU may be reached.
    pub(super) fn befriend(&self, uuid: [u8; 16]) {
        let mut friends = self.friends.lock().unwrap_or_else(PoisonError::into_inner);
        if !friends.contains(&uuid) {
            friends.push(uuid);
        }
    }

    /// Whether memory of another GPU may be reached.
    pub(super) fn is_friend(&self, uuid: &[u8; 16]) -> bool {
        self.friends.lock().unwrap_or_else(PoisonError::into_inner).contains(uuid)
    }

    /// A kernel by its name.
    pub(super) fn function(&self, name: &str) -> Result<Function> {
        self.opened.function(name)
    }

    /// What is to be added to the GPU's time (`%globaltimer`), to make it nanoseconds of CLOCK_MONOTONIC. Nothing if the two were
    /// never compared: the GPU was busy. The thread is in the context.
    pub(super) fn clock_offset(&self) -> Option<u64> {
        self.opened.clock_offset()
    }

    /// An event that nobody uses. The thread is in the context.
    pub(super) fn take_event(&self) -> Result<Event> {
        self.opened.take_event()
    }

    /// Gives one back.
    pub(super) fn give_event(&self, event: Event) {
        self.opened.give_event(event);
    }

    /// Whether memory must not be given back now, because a copy that was given up may still use it.
    pub(super) fn is_late(&self) -> bool {
        self.opened.is_late()
    }

    /// Copies memory out.
    ///
    /// # Safety
    /// `from..from + into.len()` is memory of the GPU.
    pub(super) unsafe fn read(&self, from: Address, into: &mut [u8]) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.opened.read(from, into) }
    }

    /// Copies memory in.
    ///
    /// # Safety
    /// `to..to + from.len()` is memory of the GPU.
    pub(super) unsafe fn write(&self, to: Address, from: &[u8]) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.opened.write(to, from) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // In a forked child the driver is the parent's.
        if !self.birth.is_ours() {
            return;
        }
        if let Ok(_entered) = self.opened.enter() {
            self.reaper.close();
            // SAFETY: who has work holds this, so nothing of ours is queued.
            unsafe { self.hosts.let_go(self.driver) };
        }
        // SAFETY: here, once, at the end.
        unsafe { ManuallyDrop::drop(&mut self.opened) };
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu {} ({}, {})", self.facts.ordinal, self.facts.name, DeviceId::Gpu(self.facts.uuid))
    }
}

/// The thread's context is the GPU's as long as this lives.
pub(super) struct Entered {
    /// The driver that has to leave it again.
    pushed: Option<&'static Driver>,
    _inside: Inside,
}

impl Entered {
    pub(super) fn into(driver: &'static Driver, context: Context) -> Result<Self> {
        let inside = Inside::come()?;
        if gpu::is_new_in_background() {
            driver.relax_capture();
        }
        if driver.current()? == context {
            return Ok(Self { pushed: None, _inside: inside });
        }
        driver.push(context)?;
        Ok(Self { pushed: Some(driver), _inside: inside })
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(driver) = self.pushed {
            // Fails only if somebody else took it away, who then has put another one there.
            let _ = driver.pop();
        }
    }
}
