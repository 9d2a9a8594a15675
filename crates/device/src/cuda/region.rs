//! Memory of a GPU: our own and imported allocations, which are mapped, and memory of other allocators, which is looked
//! at when it is to be shared.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::driver::{Address, Export, Opaque, Physical, PointerAttribute};
use super::gpu::Inner;
use super::reaper::Waste;
use crate::deadline::Deadline;
use crate::device::{DeviceId, Region, RegionPlace, check_inside, check_memory};
use crate::error::{Error, Result};
use crate::fd::Fd;
use crate::handle::{Chunk, GpuHandle, Handle, Means};

/// Everything that is mapped, so that a peer can be let in: by address, bytes.
#[derive(Debug, Default)]
pub(super) struct Mappings(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    mapped: BTreeMap<Address, usize>,
    /// The GPUs, by their names in the driver, that reach all of it.
    peers: Vec<i32>,
}

impl Mappings {
    /// Notes new memory and lets the peers in.
    fn add(&self, gpu: &Inner, address: Address, len: usize) -> Result<()> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for peer in &table.peers {
            // SAFETY: called for what was just mapped.
            unsafe { gpu.driver.allow(address, len, *peer) }?;
        }
        table.mapped.insert(address, len);
        Ok(())
    }

    fn remove(&self, address: Address) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).mapped.remove(&address);
    }

    /// Lets a peer in: to all that is mapped, and all that will be.
    pub(super) fn grant(&self, gpu: &Inner, peer: i32) -> Result<()> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if table.peers.contains(&peer) {
            return Ok(());
        }
        for (address, len) in &table.mapped {
            // SAFETY: it is in the table, so it is mapped; who unmaps it takes it out first.
            unsafe { gpu.driver.allow(*address, *len, peer) }?;
        }
        table.peers.push(peer);
        Ok(())
    }

    /// How much is mapped: allocations and bytes.
    pub(super) fn sum(&self) -> (usize, usize) {
        let table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (table.mapped.len(), table.mapped.values().sum())
    }
}

/// One or several allocations, mapped one behind the other.
pub(super) struct Mapped {
    gpu: Arc<Inner>,
    base: Address,
    chunks: Vec<Piece>,
    offset: usize,
    len: usize,
    /// Whether it was allocated here.
    own: bool,
}

/// An allocation: the driver's handle of it, its bytes, and how it came if it is of another process: the driver does not
/// export what it has imported.
struct Piece {
    memory: Physical,
    size: usize,
    came: Option<Means>,
}

impl Piece {
    fn export(&self, gpu: &Inner) -> Result<Means> {
        match &self.came {
            None if gpu.export == Export::Both => gpu.driver.export_fabric(self.memory).map(Means::Fabric),
            None => Ok(Means::Fd(Fd::new(gpu.driver.export_fd(self.memory)?))),
            Some(Means::Fd(fd)) => fd.try_clone().map(Means::Fd),
            Some(Means::Fabric(handle)) => Ok(Means::Fabric(*handle)),
            Some(Means::Legacy(handle)) => Ok(Means::Legacy(*handle)),
        }
    }
}

impl Mapped {
    /// New memory, whose content is whatever was there.
    pub(super) fn alloc(gpu: &Arc<Inner>, len: usize) -> Result<Self> {
        let size = (isize::try_from(len).is_ok())
            .then(|| len.checked_next_multiple_of(gpu.granularity))
            .flatten()
            .ok_or_else(|| {
                Error::misuse(format!("an allocation of {len} bytes is larger than any memory"))
            })?;
        let _entered = gpu.enter()?;
        let chunks = if len == 0 {
            Vec::new()
        } else {
            let memory = gpu.driver.create(gpu.device, size, gpu.export).map_err(|e| short(gpu, len, e))?;
            vec![Piece { memory, size, came: None }]
        };
        let mut region = Self::unmapped(gpu, chunks, 0..len);
        region.own = true;
        region.mapped()
    }

    fn unmapped(gpu: &Arc<Inner>, chunks: Vec<Piece>, part: Range<usize>) -> Self {
        Self { gpu: gpu.clone(), base: 0, chunks, offset: part.start, len: part.end - part.start, own: false }
    }

    /// Gives the allocations addresses. What fails half-way is undone by the drop.
    fn mapped(mut self) -> Result<Self> {
        let size = self.size();
        if size == 0 {
            return Ok(self);
        }
        let driver = self.gpu.driver;
        let base = driver.reserve(size)?;
        let mut at = base;
        let done = self.chunks.iter().try_for_each(|piece| {
            // SAFETY: the addresses were just reserved; each piece has its own part of them.
            unsafe { driver.map(at, piece.size, piece.memory) }?;
            at += piece.size as Address;
            Ok(())
        });
        // SAFETY: everything up to `at` is mapped, by us.
        let done = done.and_then(|()| unsafe { driver.allow(base, size, self.gpu.device) });
        let done = done.and_then(|()| self.gpu.mappings.add(&self.gpu, base, size));
        if let Err(error) = done {
            // SAFETY: nobody knows the addresses.
            unsafe { self.unmap(base, at) };
            return Err(error);
        }
        self.base = base;
        Ok(self)
    }

    fn size(&self) -> usize {
        self.chunks.iter().map(|piece| piece.size).sum()
    }

    /// Gives the addresses back, of which those before `end` are mapped.
    ///
    /// # Safety
    /// Nobody uses them any more.
    unsafe fn unmap(&self, base: Address, end: Address) {
        let driver = self.gpu.driver;
        let mut at = base;
        for piece in &self.chunks {
            if at >= end {
                break;
            }
            // SAFETY: mapped as this piece; the rest is the caller's promise.
            let unmapped = unsafe { driver.unmap(at, piece.size) };
            if let Err(error) = unmapped {
                tracing::debug!(%error, "unmapping memory of a GPU");
            }
            at += piece.size as Address;
        }
        // SAFETY: reserved by us in this length, and nothing is mapped any more.
        let _ = unsafe { driver.free_addresses(base, self.size()) };
    }
}

// SAFETY: the memory is mapped for as long as the region lives, at a place and in a length that do not change.
unsafe impl Region for Mapped {
    fn device(&self) -> DeviceId {
        DeviceId::Gpu(self.gpu.facts.uuid)
    }

    fn len(&self) -> usize {
        self.len
    }

    fn addr(&self) -> usize {
        self.base as usize + self.offset
    }

    fn place(&self) -> Result<Option<RegionPlace>> {
        let _entered = self.gpu.enter()?;
        let starts = self.chunks.iter().scan(self.base, |at, piece| {
            let start = *at;
            *at += piece.size as Address;
            Some(start)
        });
        let number = |at| self.gpu.driver.pointer(at, PointerAttribute::CU_POINTER_ATTRIBUTE_BUFFER_ID);
        let ids = starts.map(number).collect::<Result<_>>()?;
        Ok(Some(RegionPlace { ids, offset: self.offset, whole: self.size() }))
    }

    fn export(&self) -> Result<Handle> {
        let _entered = self.gpu.enter()?;
        let mut at = self.base;
        let mut chunks = Vec::with_capacity(self.chunks.len());
        for piece in &self.chunks {
            let id = self.gpu.driver.pointer(at, PointerAttribute::CU_POINTER_ATTRIBUTE_BUFFER_ID)?;
            chunks.push(Chunk { id, size: piece.size, means: piece.export(&self.gpu)? });
            at += piece.size as Address;
        }
        Ok(Handle::Gpu(GpuHandle { device: self.gpu.facts.uuid, offset: self.offset, len: self.len, chunks }))
    }

    fn shareable(&self) -> bool {
        self.own
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        check_inside(self.len, offset, into.len())?;
        // SAFETY: inside the region, whose memory is there as long as it lives.
        unsafe { self.gpu.read((self.addr() + offset) as Address, into) }
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        check_inside(self.len, offset, from.len())?;
        // SAFETY: as above.
        unsafe { self.gpu.write((self.addr() + offset) as Address, from) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // In a forked child the driver is the parent's.
        let Ok(_entered) = self.gpu.enter() else { return };
        if self.gpu.is_late() {
            // Better lost than given to somebody else while the GPU writes to it.
            tracing::warn!(
                "{:?}: {} bytes are lost, because a copy was given up that is not done",
                self.gpu,
                self.len
            );
            return;
        }
        if self.base != 0 {
            self.gpu.mappings.remove(self.base);
            // SAFETY: queues keep the regions that they work on, so nobody uses it any more.
            unsafe { self.unmap(self.base, self.base + self.size() as Address) };
        }
        for piece in &self.chunks {
            // SAFETY: our own reference, used no more.
            let _ = unsafe { self.gpu.driver.release(piece.memory) };
        }
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapped({} bytes at {:#x} on {:?})", self.len, self.addr(), self.gpu)
    }
}

/// Maps what another process exported.
pub(super) fn import(gpu: &Arc<Inner>, handle: GpuHandle) -> Result<Arc<dyn Region>> {
    if handle.device != gpu.facts.uuid {
        let (theirs, ours) = (DeviceId::Gpu(handle.device), DeviceId::Gpu(gpu.facts.uuid));
        return Err(Error::misuse(format!(
            "memory of {theirs} is mapped by that GPU's device, not by {ours}"
        )));
    }
    let whole = handle.chunks.iter().try_fold(0_usize, |sum, chunk| sum.checked_add(chunk.size));
    let end = handle.offset.checked_add(handle.len);
    let (Some(whole), Some(end)) = (whole, end) else {
        return Err(Error::refused("a handle whose sizes are larger than any memory"));
    };
    if end > whole {
        return Err(Error::refused(format!(
            "{} bytes were promised at {} of {whole}",
            handle.len, handle.offset
        )));
    }
    let _entered = gpu.enter()?;
    if let [Chunk { means: Means::Legacy(opaque), size, id }] = handle.chunks.as_slice() {
        return open_legacy(gpu, (opaque, *size, *id), handle.offset..end);
    }
    let mut chunks = Vec::with_capacity(handle.chunks.len());
    let taken = handle.chunks.into_iter().try_for_each(|chunk| {
        if chunk.size == 0 || !chunk.size.is_multiple_of(gpu.granularity) {
            let (size, unit) = (chunk.size, gpu.granularity);
            return Err(Error::refused(format!(
                "an allocation of {size} bytes, which is no multiple of {unit}"
            )));
        }
        let memory = match &chunk.means {
            Means::Fd(fd) => gpu.driver.import_fd(fd.as_fd()),
            Means::Fabric(opaque) => gpu.driver.import_fabric(opaque),
            Means::Legacy(_) => return Err(Error::refused("a legacy handle among several allocations")),
        };
        let memory =
            memory.map_err(|e| Error::refused(format!("the descriptor is no memory of this GPU ({e})")))?;
        chunks.push(Piece { memory, size: chunk.size, came: Some(chunk.means) });
        Ok(())
    });
    // Before the error is looked at: the drop gives back what came.
    let region = Mapped::unmapped(gpu, chunks, handle.offset..end);
    taken?;
    let region = region.mapped().map_err(|e| match e {
        Error::Device { call: "cuMemMap", .. } => {
            Error::refused(format!("{whole} bytes were promised, but the memory is not as large ({e})"))
        }
        other => other,
    })?;
    Ok(Arc::new(region))
}

/// How long a mapping may take to be closed that nobody uses.
const CLOSING: Duration = Duration::from_millis(30);

/// Opens an allocation of another process by its legacy handle.
fn open_legacy(
    gpu: &Arc<Inner>,
    (opaque, size, id): (&Opaque, usize, u64),
    part: Range<usize>,
) -> Result<Arc<dyn Region>> {
    // Memory that was freed, or whose maker has died, may have been at the same place: its mapping is closed soon, if it is
    // not used.
    let until = Deadline::after(CLOSING);
    let opened = loop {
        match gpu.driver.open_legacy(opaque) {
            Err(Error::Device { name, .. }) if name == "CUDA_ERROR_ALREADY_MAPPED" && !until.passed() => {
                std::thread::sleep(Duration::from_millis(1));
            }
            other => break other,
        }
    };
    let base = opened.map_err(|e| {
        let hint = match &e {
            Error::Device { name, .. } if name == "CUDA_ERROR_INVALID_HANDLE" => {
                ". Where the driver opens none at all, as under WSL2, copy the data to host memory and share that"
            }
            _ => "",
        };
        Error::refused(format!(
            "the legacy handle cannot be opened ({e}); its maker must live, and be another process{hint}"
        ))
    })?;
    let keep = Box::new(LegacyMapping { gpu: gpu.clone(), base });
    let (_, there) = gpu.driver.range_of(base)?;
    if there < size {
        return Err(Error::refused(format!("{size} bytes were promised, {there} are there")));
    }
    let (addr, len) = (base as usize + part.start, part.end - part.start);
    let origin = Origin::Process(GpuHandle {
        device: gpu.facts.uuid,
        offset: part.start,
        len,
        chunks: vec![Chunk { id, size, means: Means::Legacy(*opaque) }],
    });
    Ok(Arc::new(Foreign { gpu: gpu.clone(), addr, len, origin, _keep: keep }))
}

/// Closes what was opened by a legacy handle.
struct LegacyMapping {
    gpu: Arc<Inner>,
    base: Address,
}

impl Drop for LegacyMapping {
    fn drop(&mut self) {
        if self.gpu.birth.is_ours() {
            self.gpu.reaper.take(Waste::Legacy(self.base));
        }
    }
}

/// Memory of another allocator, by its address.
///
/// # Safety
/// As for [`crate::Device::adopt`].
pub(super) unsafe fn adopt(
    gpu: &Arc<Inner>,
    addr: usize,
    len: usize,
    keep: Box<dyn Any + Send + Sync>,
) -> Result<Arc<dyn Region>> {
    check_memory(addr, len)?;
    if len != 0 {
        let _entered = gpu.enter()?;
        let ordinal =
            gpu.driver.pointer(addr as Address, PointerAttribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
        let kind = gpu.driver.pointer(addr as Address, PointerAttribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
        // 2: memory of a device.
        if !matches!((&kind, &ordinal), (Ok(2), Ok(there)) if *there as usize == gpu.facts.ordinal) {
            return Err(Error::misuse(format!("{len} bytes at {addr:#x} are not memory of {gpu:?}")));
        }
    }
    Ok(Arc::new(Foreign { gpu: gpu.clone(), addr, len, origin: Origin::Allocator, _keep: keep }))
}

/// All of the allocations that a region lies in.
pub(super) fn around(gpu: &Arc<Inner>, region: &Arc<dyn Region>) -> Result<Arc<dyn Region>> {
    if region.device() != DeviceId::Gpu(gpu.facts.uuid) {
        return Err(Error::misuse(format!("{region:?} is no memory of {gpu:?}")));
    }
    let (offset, found) = {
        let _entered = gpu.enter()?;
        allocations(gpu, region.addr(), region.len())?
    };
    let whole = found.iter().map(|(_, size, _)| size).sum();
    // SAFETY: the driver says that these allocations are here, and each is there or gone as a whole. A part of each is in the
    // region, which keeps it and lives inside the new one.
    unsafe { adopt(gpu, region.addr() - offset, whole, Box::new(region.clone())) }
}

/// The driver's numbers of the allocations at an address, if there are any for all of these bytes.
pub(super) fn ids_at(gpu: &Inner, addr: usize, len: usize) -> Result<Option<Vec<u64>>> {
    let _entered = gpu.enter()?;
    match allocations(gpu, addr, len) {
        Ok((_, found)) => Ok(Some(found.into_iter().map(|(_, _, id)| id).collect())),
        // What the driver says of addresses that were given back.
        Err(Error::Device { name, .. })
            if matches!(name.as_str(), "CUDA_ERROR_INVALID_VALUE" | "CUDA_ERROR_NOT_FOUND") =>
        {
            Ok(None)
        }
        Err(Error::Device { code: None, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Memory in the old way.
pub(super) fn plain(gpu: &Arc<Inner>, len: usize) -> Result<Arc<dyn Region>> {
    let _entered = gpu.enter()?;
    let addr = if len == 0 { 0 } else { gpu.driver.alloc_legacy(len).map_err(|e| short(gpu, len, e))? };
    let keep = Plain { gpu: gpu.clone(), addr };
    // SAFETY: the memory is there until `keep` is dropped.
    unsafe { adopt(gpu, addr as usize, len, Box::new(keep)) }
}

/// Gives memory of the old kind back.
struct Plain {
    gpu: Arc<Inner>,
    addr: Address,
}

impl Drop for Plain {
    fn drop(&mut self) {
        if self.addr != 0 && self.gpu.birth.is_ours() {
            self.gpu.reaper.take(Waste::Plain(self.addr));
        }
    }
}

/// Memory that somebody else allocated: another allocator of this process, or another process.
struct Foreign {
    gpu: Arc<Inner>,
    addr: usize,
    len: usize,
    origin: Origin,
    _keep: Box<dyn Any + Send + Sync>,
}

/// Whose memory it is: another allocator's of this process, or another process's, with what it came by.
enum Origin {
    Allocator,
    Process(GpuHandle),
}

/// An allocation: its address, its bytes, and the driver's number of it.
type Found = (Address, usize, u64);

/// The allocations that some bytes lie in, and where they begin in the first. The thread is in the context.
fn allocations(gpu: &Inner, addr: usize, len: usize) -> Result<(usize, Vec<Found>)> {
    if len == 0 {
        return Ok((0, Vec::new()));
    }
    let driver = gpu.driver;
    let (first, mut size) = driver.range_of(addr as Address)?;
    let offset = addr - first as usize;
    let (mut at, end) = (first, (addr + len) as Address);
    let mut found = Vec::new();
    loop {
        found.push((at, size, driver.pointer(at, PointerAttribute::CU_POINTER_ATTRIBUTE_BUFFER_ID)?));
        at += size as Address;
        if at >= end {
            return Ok((offset, found));
        }
        let (base, next) = driver.range_of(at)?;
        if base != at || next == 0 {
            return Err(Error::nonsense("cuMemGetAddressRange_v2", format!("a gap at {at:#x}")));
        }
        size = next;
    }
}

impl Foreign {
    /// The allocations that it lies in, and where it begins in the first.
    fn find(&self) -> Result<(usize, Vec<Found>)> {
        allocations(&self.gpu, self.addr, self.len)
    }

    /// Whether the allocation at an address can be shared by a legacy handle, or else as a descriptor; or why not at all.
    fn is_legacy(&self, at: Address) -> Result<bool> {
        let is = |attribute| self.gpu.driver.pointer(at, attribute);
        if is(PointerAttribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)? & 1 != 0 {
            return Ok(true);
        }
        let none = |have: &str| Error::Unsupported {
            what: format!("sharing {} bytes of another allocator", self.len),
            need: "memory of cudaMalloc, or virtual memory that can be exported as a descriptor".into(),
            have: have.into(),
        };
        if is(PointerAttribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE).is_ok_and(|pool| pool != 0) {
            return Err(none("memory of a stream-ordered pool (cudaMallocAsync), which was not made for it"));
        }
        // 1: as a descriptor.
        if is(PointerAttribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES)? & 1 == 0 {
            return Err(none("virtual memory that was made without a way to export it"));
        }
        Ok(false)
    }

    /// How the allocation at an address can be shared.
    fn means(&self, at: Address) -> Result<Means> {
        let driver = self.gpu.driver;
        if self.is_legacy(at)? {
            return driver.legacy_handle(at).map(Means::Legacy);
        }
        let memory = driver.retain(at)?;
        let fd = driver.export_fd(memory);
        // SAFETY: the reference that `retain` gave, used no more.
        let _ = unsafe { driver.release(memory) };
        fd.map(|fd| Means::Fd(Fd::new(fd)))
    }
}

// SAFETY: the memory is valid for as long as `_keep` lives: whoever adopted it promised so, or it is open that long.
unsafe impl Region for Foreign {
    fn device(&self) -> DeviceId {
        DeviceId::Gpu(self.gpu.facts.uuid)
    }

    fn len(&self) -> usize {
        self.len
    }

    fn addr(&self) -> usize {
        self.addr
    }

    /// Asked again each time: other memory may have come to its address since, if its owner does not keep to its word.
    fn place(&self) -> Result<Option<RegionPlace>> {
        let _entered = self.gpu.enter()?;
        let (offset, found) = self.find()?;
        if let (Some((first, ..)), Origin::Allocator) = (found.first(), &self.origin) {
            // One allocator made them all.
            self.is_legacy(*first)?;
        }
        let whole = found.iter().map(|(_, size, _)| size).sum();
        Ok(Some(RegionPlace { ids: found.into_iter().map(|(_, _, id)| id).collect(), offset, whole }))
    }

    fn export(&self) -> Result<Handle> {
        if let Origin::Process(GpuHandle { device, offset, len, chunks }) = &self.origin {
            // Whoever gets it opens it as this process did: its maker must live.
            let again = |chunk: &Chunk| match &chunk.means {
                Means::Legacy(opaque) => {
                    Some(Chunk { id: chunk.id, size: chunk.size, means: Means::Legacy(*opaque) })
                }
                Means::Fd(_) | Means::Fabric(_) => None,
            };
            let chunks = chunks.iter().filter_map(again).collect();
            return Ok(Handle::Gpu(GpuHandle { device: *device, offset: *offset, len: *len, chunks }));
        }
        let _entered = self.gpu.enter()?;
        let (offset, found) = self.find()?;
        let chunk = |(at, size, id)| Ok(Chunk { id, size, means: self.means(at)? });
        let chunks = found.into_iter().map(chunk).collect::<Result<_>>()?;
        Ok(Handle::Gpu(GpuHandle { device: self.gpu.facts.uuid, offset, len: self.len, chunks }))
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        check_inside(self.len, offset, into.len())?;
        // SAFETY: inside the region, whose memory is there as long as it lives.
        unsafe { self.gpu.read((self.addr + offset) as Address, into) }
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        check_inside(self.len, offset, from.len())?;
        // SAFETY: as above.
        unsafe { self.gpu.write((self.addr + offset) as Address, from) }
    }
}

impl fmt::Debug for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Foreign({} bytes at {:#x} on {:?})", self.len, self.addr, self.gpu)
    }
}

/// Why memory could not be had, with sizes.
fn short(gpu: &Inner, len: usize, error: Error) -> Error {
    match &error {
        Error::Device { name, .. } if name == "CUDA_ERROR_OUT_OF_MEMORY" => {
            let free = gpu.driver.memory_info().map_or("less".into(), |(free, _)| free.to_string());
            Error::Unsupported {
                what: format!("an allocation of {len} bytes on {gpu:?}"),
                need: format!("{len} bytes of free memory"),
                have: free,
            }
        }
        _ => error,
    }
}
