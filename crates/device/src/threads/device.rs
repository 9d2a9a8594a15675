//! One GPU of threads, as the process sees it: what its regions and queues share, and what a test can ask of it.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::channel::Channels;
use super::clock::ThreadClock;
use super::memory::{self, Table, ThreadMemory};
use super::queue::ThreadQueue;
use super::settings::Settings;
use super::waits::Waits;
use crate::device::{Device, DeviceId, Queue, Region, check_inside};
use crate::error::{Error, Result};
use crate::fork::Birth;
use crate::handle::Handle;
use crate::sync::{Mutex, unpoisoned};

/// The UUID of the GPU with this number: the same in every process, so that processes share the GPU.
pub fn uuid(number: usize) -> [u8; 16] {
    let mut uuid = *b"test-gpu-threads";
    // At most 64 of them.
    uuid[8] = b'0'.wrapping_add(number as u8);
    uuid
}

/// What the driver says when it has no memory left.
pub fn out_of_memory() -> Error {
    Error::Device { call: "cuMemCreate", code: Some(2), name: "CUDA_ERROR_OUT_OF_MEMORY".into() }
}

/// What a process has used of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Own and imported allocations that are mapped now.
    pub allocations: usize,
    /// Their bytes.
    pub mapped: usize,
    /// Bytes that were allocated here and are not given back.
    pub allocated: usize,
    /// Threads of hardware queues that are there now.
    pub threads: usize,
    /// Commands that have begun, so far.
    pub commands: u64,
    /// Waits that streams were given, so far.
    pub stream_waits: u64,
    /// Waits that the calling threads did instead, so far.
    pub caller_waits: u64,
}

/// What can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// New memory.
    Alloc,
    /// An export of memory.
    Export,
    /// An import of memory.
    Import,
    /// Asking memory of another allocator for its allocations.
    Place,
}

/// A GPU that memory can be taken from and work be given to.
#[derive(Debug, Clone)]
pub struct Gpu(Arc<Inner>);

/// What regions and queues of a GPU share.
pub(super) struct Inner {
    pub(super) number: usize,
    pub(super) settings: Settings,
    pub(super) clock: ThreadClock,
    pub(super) table: Mutex<Table>,
    pub(super) channels: Channels,
    pub(super) waits: Arc<Waits>,
    birth: Birth,
    /// GPUs whose memory this one may reach, by their numbers.
    friends: Mutex<Vec<usize>>,
    /// Calls that are to fail: so often, and with what.
    failing: Mutex<Vec<(Call, usize, Error)>>,
}

impl Gpu {
    pub(super) fn new(number: usize, settings: &Settings) -> Self {
        Self(Arc::new(Inner {
            number,
            settings: settings.clone(),
            clock: ThreadClock::new(number),
            table: Mutex::new(Table::new()),
            channels: Channels::new(settings.queues),
            waits: Arc::new(Waits::new(settings.most_waiting())),
            birth: Birth::now(),
            friends: Mutex::default(),
            failing: Mutex::default(),
        }))
    }

    /// Lets the next calls of a kind fail, so many of them.
    pub fn fail(&self, call: Call, times: usize, error: Error) {
        unpoisoned(self.0.failing.lock()).push((call, times, error));
    }

    /// Lets calls of a kind go well again.
    pub fn heal(&self, call: Call) {
        unpoisoned(self.0.failing.lock()).retain(|(failing, ..)| *failing != call);
    }

    /// Gives the next allocation, own or imported, this number, and those behind it the next ones. Memory that is there
    /// already may have it: the numbers of a broken driver.
    pub fn set_next_id(&self, id: u64) {
        unpoisoned(self.0.table.lock()).next = id;
    }

    /// Memory that is made of several allocations, one behind the other, as other allocators have it.
    pub fn joined(&self, lens: &[usize]) -> Result<Arc<dyn Region>> {
        Ok(Arc::new(ThreadMemory::alloc(&self.0, lens)?))
    }

    /// A part of some memory, as somebody sees it who knows its address only.
    pub fn adopt_part(&self, memory: &Arc<dyn Region>, part: Range<usize>) -> Result<Arc<dyn Region>> {
        check_inside(memory.len(), part.start, part.len())?;
        let keep = Box::new(memory.clone());
        Ok(Arc::new(memory::adopt(&self.0, memory.addr() + part.start, part.len(), keep)?))
    }

    /// Has the owner of this memory have freed it, for whoever asks what lies there. Who holds it here still does.
    pub fn lose(&self, memory: &Arc<dyn Region>) {
        memory::lose(&self.0, memory.addr());
    }

    /// What this process has used of it.
    pub fn usage(&self) -> Usage {
        let (allocations, mapped, allocated) = unpoisoned(self.0.table.lock()).sum();
        let (stream_waits, caller_waits) = self.0.waits.sum();
        let channels = &self.0.channels;
        let (threads, commands) = (channels.threads(), channels.begun());
        Usage { allocations, mapped, allocated, threads, commands, stream_waits, caller_waits }
    }

    /// Lets it reach memory of another one.
    pub(super) fn befriend(&self, number: usize) {
        let mut friends = unpoisoned(self.0.friends.lock());
        if !friends.contains(&number) {
            friends.push(number);
        }
    }

    pub(super) fn number(&self) -> usize {
        self.0.number
    }
}

impl Device for Gpu {
    fn id(&self) -> DeviceId {
        self.0.id()
    }

    fn is_short(&self) -> bool {
        unpoisoned(self.0.failing.lock()).iter().any(|(failing, ..)| *failing == Call::Alloc)
    }

    fn is_served(&self) -> bool {
        self.0.settings.mps
    }

    fn alloc(&self, len: usize) -> Result<Arc<dyn Region>> {
        Ok(Arc::new(ThreadMemory::own(&self.0, len)?))
    }

    fn take(&self, len: usize) -> Result<Arc<dyn Region>> {
        let memory = ThreadMemory::own(&self.0, len)?;
        // Nobody may count on zeros.
        memory.fill(0xa5)?;
        Ok(Arc::new(memory))
    }

    fn import(&self, handle: Handle) -> Result<Arc<dyn Region>> {
        Ok(Arc::new(memory::import(&self.0, handle.of_gpu()?)?))
    }

    unsafe fn adopt(
        &self,
        addr: usize,
        len: usize,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<Arc<dyn Region>> {
        Ok(Arc::new(memory::adopt(&self.0, addr, len, keep)?))
    }

    fn around(&self, region: &Arc<dyn Region>) -> Result<Arc<dyn Region>> {
        Ok(Arc::new(memory::around(&self.0, region)?))
    }

    fn ids_at(&self, addr: usize, len: usize) -> Result<Option<Vec<u64>>> {
        self.0.check()?;
        Ok(memory::ids_at(&self.0, addr, len))
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        self.0.check()?;
        Ok(Box::new(ThreadQueue::new(self.0.clone())))
    }
}

impl Inner {
    pub(super) fn id(&self) -> DeviceId {
        DeviceId::Gpu(uuid(self.number))
    }

    /// Refuses what a forked child asks of its parent's GPU.
    pub(super) fn check(&self) -> Result<()> {
        self.birth.check("the GPU's context")
    }

    pub(super) fn is_ours(&self) -> bool {
        self.birth.is_ours()
    }

    /// Whether its work may reach memory of the GPU with this UUID.
    pub(super) fn reaches(&self, there: &[u8; 16]) -> bool {
        *there == uuid(self.number)
            || unpoisoned(self.friends.lock()).iter().any(|friend| uuid(*friend) == *there)
    }

    /// Lets a call fail that a test wants to fail.
    pub(super) fn may(&self, call: Call) -> Result<()> {
        self.check()?;
        let mut failing = unpoisoned(self.failing.lock());
        failing.retain(|(_, times, _)| *times > 0);
        match failing.iter_mut().find(|(failing, ..)| *failing == call) {
            Some((_, times, error)) => {
                *times -= 1;
                Err(error.clone())
            }
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu {} (threads, {})", self.number, self.id())
    }
}
