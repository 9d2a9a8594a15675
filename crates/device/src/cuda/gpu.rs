//! One GPU: its context, which the whole process shares, its kernels, and what its regions and queues work with.

use std::any::Any;
use std::ffi::{CString, c_int};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::driver::{Address, Attribute, Context, Driver, Event, Export, Function, Module, Stream};
use super::hosts::Hosts;
use super::probe::fabric_cycle;
use super::queue::CudaQueue;
use super::reaper::Reaper;
use super::region::{Mapped, Mappings};
use super::waits::Waits;
use super::{kernels, region};
use crate::deadline::Deadline;
use crate::device::{Device, DeviceId, Queue, Region};
use crate::error::{Error, Result};
use crate::fork::Birth;
use crate::handle::Handle;

/// Bytes through which memory is read and written by the host.
const STAGING: usize = 4 << 20;
/// How long a read or write by the host may take: nothing that other processes do delays it.
const PATIENCE: Duration = Duration::from_secs(60);

/// How many GPUs this process may see.
pub fn count() -> Result<usize> {
    Driver::get()?.count()
}

/// The CUDA version of the driver: (13, 0).
pub fn driver_version() -> Result<(u32, u32)> {
    let version = Driver::get()?.version()?.unsigned_abs();
    Ok((version / 1000, version % 1000 / 10))
}

/// What is known of a GPU without opening it.
#[derive(Debug, Clone, PartialEq, Eq)]
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
pub struct Usage {
    /// Own and imported allocations that are mapped.
    pub allocations: usize,
    /// Their bytes.
    pub mapped: usize,
    /// Bytes of host memory that the GPU reaches.
    pub registered: usize,
}

/// A GPU that memory can be taken from and work be given to.
#[derive(Debug, Clone)]
pub struct Gpu(Arc<Inner>);

/// What regions and queues of a GPU share.
pub(super) struct Inner {
    pub(super) driver: &'static Driver,
    /// The driver's name of the GPU.
    pub(super) device: c_int,
    context: Context,
    pub(super) facts: Facts,
    /// How its memory leaves the process: as a fabric handle where that works.
    pub(super) export: Export,
    /// What sizes of shareable memory are multiples of.
    pub(super) granularity: usize,
    module: Module,
    functions: Vec<Function>,
    desk: Mutex<Desk>,
    pub(super) mappings: Mappings,
    pub(super) hosts: Hosts,
    pub(super) waits: Arc<Waits>,
    pub(super) reaper: Arc<Reaper>,
    pub(super) birth: Birth,
    /// GPUs whose memory this one may reach.
    friends: Mutex<Vec<[u8; 16]>>,
}

/// What reads and writes by the host need; one at a time.
struct Desk {
    stream: Stream,
    event: Event,
    staging: usize,
}

impl Gpu {
    /// Opens the GPU with this ordinal: makes its context this process's, and loads and launches the kernels once.
    pub fn open(ordinal: usize) -> Result<Self> {
        Self::with(Driver::get()?, facts(ordinal)?)
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
        let context = driver.retain_primary(device)?;
        let opened = Entered::into(driver, context).and_then(|_entered| {
            let image = kernels::image(facts.compute)?;
            // SAFETY: an image of our own, whole.
            let module = unsafe { driver.load_module(&image) }?;
            let functions = kernels::ENTRIES.iter().map(|name| {
                let name = CString::new(*name).map_err(|_| Error::misuse("a kernel's name"))?;
                // SAFETY: the module was just loaded.
                unsafe { driver.function(module, &name) }
            });
            let functions = functions.collect::<Result<Vec<_>>>()?;
            let desk = Desk {
                stream: driver.stream(true)?,
                event: driver.event()?,
                staging: driver.alloc_pinned(STAGING)?,
            };
            // The first launch of a kernel may load it, and that must not happen behind a wait.
            for function in &functions {
                // SAFETY: with these arguments every kernel does nothing.
                unsafe { driver.launch(*function, (1, 32), &kernels::NOTHING, desk.stream) }?;
            }
            let fabric =
                driver.attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)?;
            // The attribute may say yes where it is not permitted: only trying tells.
            let export = match fabric != 0 && fabric_cycle(driver, device).is_ok() {
                true => Export::Both,
                false => Export::Fd,
            };
            let granularity = driver.granularity(device, export)?;
            Ok((module, functions, desk, export, granularity))
        });
        let (module, functions, desk, export, granularity) = opened.inspect_err(|_| {
            // SAFETY: nothing of what was opened is used.
            let _ = unsafe { driver.release_primary(device) };
        })?;
        let shared = driver
            .attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED)
            .is_ok_and(|shared| shared != 0);
        let waits = Arc::new(Waits::new(shared));
        let inner = Inner {
            driver,
            device,
            context,
            facts,
            export,
            granularity,
            module,
            functions,
            desk: Mutex::new(desk),
            mappings: Mappings::default(),
            hosts: Hosts::default(),
            reaper: Arc::new(Reaper::new(driver, context, waits.clone())),
            waits,
            birth: Birth::now(),
            friends: Mutex::default(),
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
    /// # Safety
    /// It is a stream of this GPU's primary context that lives as long as the queue.
    pub unsafe fn queue_on(&self, stream: usize) -> Result<Box<dyn Queue>> {
        let stream = Stream::from_number(stream);
        let _entered = self.0.enter()?;
        // SAFETY: the caller's promise.
        let context = unsafe { self.0.driver.context_of(stream) }?;
        if context != self.0.context {
            return Err(Error::misuse(format!("the stream belongs to another context than {}", self.id())));
        }
        Ok(Box::new(CudaQueue::on(self.0.clone(), stream)?))
    }

    /// Memory in the old way (as cudaMalloc gives it), with whatever is in it: what other allocators hand out, for
    /// measuring and testing.
    pub fn plain(&self, len: usize) -> Result<Arc<dyn Region>> {
        region::plain(&self.0, len)
    }

    /// What it holds now.
    pub fn usage(&self) -> Usage {
        let ((allocations, mapped), (_, registered)) = (self.0.mappings.sum(), self.0.hosts.sum());
        Usage { allocations, mapped, registered }
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

    fn alloc(&self, len: usize) -> Result<Arc<dyn Region>> {
        let region = Mapped::alloc(&self.0, len)?;
        self.0.clear(region.addr() as Address, region.len())?;
        Ok(Arc::new(region))
    }

    fn take(&self, len: usize) -> Result<Arc<dyn Region>> {
        Ok(Arc::new(Mapped::alloc(&self.0, len)?))
    }

    fn import(&self, handle: Handle) -> Result<Arc<dyn Region>> {
        match handle {
            Handle::Gpu(handle) => region::import(&self.0, handle),
            Handle::Memfd { .. } => Err(Error::misuse("host memory is mapped by the host, not by a GPU")),
        }
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

    fn queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(CudaQueue::new(self.0.clone())?))
    }
}

impl Inner {
    /// Makes the GPU's context the thread's for as long as the result lives.
    pub(super) fn enter(&self) -> Result<Entered> {
        self.birth.check("the GPU's context")?;
        Entered::into(self.driver, self.context)
    }

    /// The context, which lives as long as this.
    pub(super) fn context(&self) -> Context {
        self.context
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

    /// A kernel by its place in `kernels::ENTRIES`.
    pub(super) fn function(&self, name: &str) -> Result<Function> {
        let place = kernels::ENTRIES.iter().position(|entry| *entry == name);
        place
            .and_then(|place| self.functions.get(place))
            .copied()
            .ok_or_else(|| Error::misuse(format!("there is no kernel {name}")))
    }

    /// Copies memory out, through the staging memory.
    ///
    /// # Safety
    /// `from..from + into.len()` is memory of the GPU.
    pub(super) unsafe fn read(&self, from: Address, into: &mut [u8]) -> Result<()> {
        let _entered = self.enter()?;
        let desk = self.desk.lock().unwrap_or_else(PoisonError::into_inner);
        let mut at = from;
        for part in into.chunks_mut(STAGING) {
            // SAFETY: the caller's promise; the staging memory is ours alone, and large enough for a part.
            unsafe {
                self.driver.copy(desk.staging as Address, at, part.len(), desk.stream)?;
                self.settle(&desk)?;
                part.as_mut_ptr().copy_from_nonoverlapping(desk.staging as *const u8, part.len());
            }
            at += part.len() as Address;
        }
        Ok(())
    }

    /// Copies memory in, through the staging memory.
    ///
    /// # Safety
    /// `to..to + from.len()` is memory of the GPU.
    pub(super) unsafe fn write(&self, to: Address, from: &[u8]) -> Result<()> {
        let _entered = self.enter()?;
        let desk = self.desk.lock().unwrap_or_else(PoisonError::into_inner);
        let mut at = to;
        for part in from.chunks(STAGING) {
            // SAFETY: as in `read`.
            unsafe {
                (desk.staging as *mut u8).copy_from_nonoverlapping(part.as_ptr(), part.len());
                self.driver.copy(at, desk.staging as Address, part.len(), desk.stream)?;
                self.settle(&desk)?;
            }
            at += part.len() as Address;
        }
        Ok(())
    }

    /// Sets memory of our own to zero.
    fn clear(&self, at: Address, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let _entered = self.enter()?;
        let desk = self.desk.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: called for memory that was just mapped, `len` bytes of it, which nobody else knows.
        unsafe { self.driver.fill(at, 0, len, desk.stream) }?;
        self.settle(&desk)
    }

    /// Waits until the host's own copy is done.
    fn settle(&self, desk: &Desk) -> Result<()> {
        // SAFETY: stream and event live as long as we do.
        unsafe { self.driver.record(desk.event, desk.stream) }?;
        let deadline = Deadline::after(PATIENCE);
        let mut looks = 0_u32;
        // SAFETY: as above.
        while !unsafe { self.driver.is_done(desk.event) }? {
            looks += 1;
            if looks.is_multiple_of(64) {
                if deadline.passed() {
                    return Err(Error::TimedOut);
                }
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // In a forked child the driver is the parent's.
        if !self.birth.is_ours() {
            return;
        }
        let desk = self.desk.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Ok(_entered) = Entered::into(self.driver, self.context) else { return };
        // SAFETY: regions and queues hold an `Arc` of this, so none of them is left, and nothing of ours is queued.
        // What fails now fails because the process ends, and then the driver takes everything back.
        unsafe {
            let _ = self.driver.destroy_event(desk.event);
            let _ = self.driver.destroy_stream(desk.stream);
            let _ = self.driver.free_pinned(desk.staging);
            self.hosts.let_go(self.driver);
            let _ = self.driver.unload_module(self.module);
        }
        drop(_entered);
        // SAFETY: retained once, by `with`, and used no more.
        let _ = unsafe { self.driver.release_primary(self.device) };
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu {} ({}, {})", self.facts.ordinal, self.facts.name, DeviceId::Gpu(self.facts.uuid))
    }
}

/// The thread's context is the GPU's as long as this lives.
pub(super) struct Entered(Option<&'static Driver>);

impl Entered {
    pub(super) fn into(driver: &'static Driver, context: Context) -> Result<Self> {
        if driver.current()? == context {
            return Ok(Self(None));
        }
        driver.push(context)?;
        Ok(Self(Some(driver)))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(driver) = self.0 {
            // Fails only if somebody else took it away, who then has put another one there.
            let _ = driver.pop();
        }
    }
}
