//! Memory of a GPU of threads: host memory that is said to be on the GPU.
//!
//! An allocation is a memfd, in whole pages. A region lies in one of them, or in several that are mapped one behind the other.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use rustix::mm::{MapFlags, ProtFlags};

use super::device::{Call, Inner, uuid};
use crate::device::{Device, DeviceId, Region, RegionPlace, check_inside, check_memory};
use crate::error::{Error, Result};
use crate::handle::{Chunk, GpuHandle, Handle, Means};
use crate::host::Host;
use crate::sync::unpoisoned;

/// What sizes of allocations are multiples of: a page.
const UNIT: usize = 4096;

/// What is mapped in this process.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// The number of the next allocation.
    pub(super) next: u64,
    /// The numbers of allocations, by what the system calls them, and how many mappings each has.
    ids: BTreeMap<File, (u64, usize)>,
    /// Mappings by where they begin.
    mapped: BTreeMap<usize, Weak<Mapping>>,
    bytes: usize,
    /// Bytes that were allocated here.
    allocated: usize,
}

/// The numbers of a file.
type File = (u64, u64);

impl Table {
    pub(super) fn new() -> Self {
        Self { next: 1, ..Self::default() }
    }

    /// Mapped allocations, their bytes, and the bytes that were allocated here.
    pub(super) fn sum(&self) -> (usize, usize, usize) {
        (self.ids.values().map(|(_, mappings)| mappings).sum(), self.bytes, self.allocated)
    }

    /// The number of an allocation that is mapped once more.
    fn id(&mut self, file: File) -> u64 {
        let next = &mut self.next;
        let (id, mappings) = self.ids.entry(file).or_insert_with(|| {
            let id = *next;
            *next = id.wrapping_add(1);
            (id, 0)
        });
        *mappings += 1;
        *id
    }

    fn forget(&mut self, piece: &Piece) {
        if let Some((_, mappings)) = self.ids.get_mut(&piece.file) {
            *mappings -= 1;
            if *mappings == 0 {
                self.ids.remove(&piece.file);
            }
        }
        self.bytes -= piece.size;
        if piece.own {
            self.allocated -= piece.size;
        }
    }
}

/// An allocation, mapped.
#[derive(Debug)]
struct Piece {
    id: u64,
    size: usize,
    file: File,
    memory: Arc<dyn Region>,
    /// Whether it was allocated here.
    own: bool,
}

/// Allocations, mapped one behind the other.
struct Mapping {
    gpu: Arc<Inner>,
    base: usize,
    pieces: Vec<Piece>,
    /// Where they are one behind the other, if there are several.
    _joined: Option<Joined>,
}

impl Mapping {
    /// Maps allocations that are host memory up to now.
    fn new(gpu: &Arc<Inner>, memories: Vec<Arc<dyn Region>>, own: bool) -> Result<Arc<Self>> {
        let files = memories.iter().map(file).collect::<Result<Vec<_>>>()?;
        let joined = if memories.len() > 1 { Some(Joined::new(&memories)?) } else { None };
        let base = match (&joined, memories.first()) {
            (Some(joined), _) => joined.addr.as_ptr() as usize,
            (None, Some(only)) => only.addr(),
            (None, None) => 0,
        };
        let mut table = unpoisoned(gpu.table.lock());
        let pieces: Vec<Piece> = memories
            .into_iter()
            .zip(files)
            .map(|(memory, file)| Piece { id: table.id(file), size: memory.len(), file, memory, own })
            .collect();
        let size = pieces.iter().map(|piece| piece.size).sum::<usize>();
        table.bytes += size;
        if own {
            table.allocated += size;
        }
        let mapping = Arc::new(Self { gpu: gpu.clone(), base, pieces, _joined: joined });
        if size != 0 {
            table.mapped.insert(base, Arc::downgrade(&mapping));
        }
        Ok(mapping)
    }

    fn size(&self) -> usize {
        self.pieces.iter().map(|piece| piece.size).sum()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // In a forked child the lock may be held for ever.
        if !self.gpu.is_ours() {
            return;
        }
        let mut table = unpoisoned(self.gpu.table.lock());
        if !self.pieces.is_empty() {
            table.mapped.remove(&self.base);
        }
        self.pieces.iter().for_each(|piece| table.forget(piece));
    }
}

/// What the system calls an allocation.
fn file(memory: &Arc<dyn Region>) -> Result<File> {
    match memory.place()?.as_ref().map(|place| place.ids.as_slice()) {
        Some(&[device, number]) => Ok((device, number)),
        _ => Err(Error::misuse("memory of a GPU of threads is a memfd")),
    }
}

/// A region of such memory.
pub(super) struct ThreadMemory {
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
    /// Whether it was allocated here, to be shared.
    own: bool,
    /// What keeps memory of somebody else alive.
    _keep: Option<Box<dyn Any + Send + Sync>>,
}

impl ThreadMemory {
    /// New memory, zeroed.
    pub(super) fn own(gpu: &Arc<Inner>, len: usize) -> Result<Self> {
        Ok(Self { own: true, ..Self::alloc(gpu, if len == 0 { &[] } else { std::slice::from_ref(&len) })? })
    }

    /// The same in several allocations. All but the last are longer by what whole pages take.
    pub(super) fn alloc(gpu: &Arc<Inner>, lens: &[usize]) -> Result<Self> {
        gpu.may(Call::Alloc)?;
        let (mut sizes, mut len, mut whole) = (Vec::with_capacity(lens.len()), 0, 0_usize);
        for &asked in lens {
            let size = asked.checked_next_multiple_of(UNIT).filter(|size| isize::try_from(*size).is_ok());
            let end =
                size.and_then(|size| whole.checked_add(size)).filter(|end| isize::try_from(*end).is_ok());
            let (Some(size), Some(end)) = (size, end) else {
                return Err(Error::misuse(format!(
                    "an allocation of {asked} bytes is larger than any memory"
                )));
            };
            sizes.push(size);
            len = whole + asked;
            whole = end;
        }
        let free = gpu.settings.memory.saturating_sub(unpoisoned(gpu.table.lock()).allocated);
        if whole > free {
            return Err(Error::Unsupported {
                what: format!("an allocation of {len} bytes on {gpu:?}"),
                need: format!("{len} bytes of free memory"),
                have: free.to_string(),
            });
        }
        let memories = sizes.into_iter().map(|size| Host.alloc(size)).collect::<Result<_>>()?;
        Ok(Self { mapping: Mapping::new(gpu, memories, true)?, offset: 0, len, own: false, _keep: None })
    }

    /// Writes one byte everywhere.
    pub(super) fn fill(&self, byte: u8) -> Result<()> {
        let block = [byte; UNIT];
        self.mapping.pieces.iter().try_for_each(|piece| {
            (0..piece.size).step_by(UNIT).try_for_each(|at| piece.memory.write(at, &block))
        })
    }

    /// Where `len` bytes at `offset` lie: the allocations, from where on in each, and which of the bytes.
    fn pieces(
        &self,
        offset: usize,
        len: usize,
    ) -> Result<impl Iterator<Item = (&Piece, usize, Range<usize>)>> {
        self.gpu().check()?;
        check_inside(self.len, offset, len)?;
        let (mut at, mut done) = (self.offset + offset, 0);
        let parts = self.mapping.pieces.iter().map(move |piece| {
            let count = piece.size.saturating_sub(at).min(len - done);
            let place = (piece, at, done..done + count);
            at = at.saturating_sub(piece.size);
            done += count;
            place
        });
        Ok(parts.filter(|(_, _, part)| !part.is_empty()))
    }

    fn gpu(&self) -> &Arc<Inner> {
        &self.mapping.gpu
    }
}

// SAFETY: the mapping is there as long as the region, at a place and in a length that do not change. To be memory of this
// GPU is to be memory of this host.
unsafe impl Region for ThreadMemory {
    fn device(&self) -> DeviceId {
        self.gpu().id()
    }

    fn len(&self) -> usize {
        self.len
    }

    fn addr(&self) -> usize {
        self.mapping.base + self.offset
    }

    fn export(&self) -> Result<Handle> {
        self.gpu().may(Call::Export)?;
        let chunk = |piece: &Piece| match piece.memory.export()? {
            Handle::Memfd { fd, .. } => Ok(Chunk { id: piece.id, size: piece.size, means: Means::Fd(fd) }),
            other => Err(Error::misuse(format!("memory of a GPU of threads as {other:?}"))),
        };
        let chunks = self.mapping.pieces.iter().map(chunk).collect::<Result<_>>()?;
        Ok(Handle::Gpu(GpuHandle {
            device: uuid(self.gpu().number),
            offset: self.offset,
            len: self.len,
            chunks,
        }))
    }

    fn place(&self) -> Result<Option<RegionPlace>> {
        self.gpu().check()?;
        // A GPU asks the driver there whether such memory can be shared at all.
        if !self.own {
            self.gpu().may(Call::Place)?;
        }
        let ids = self.mapping.pieces.iter().map(|piece| piece.id).collect();
        Ok(Some(RegionPlace { ids, offset: self.offset, whole: self.mapping.size() }))
    }

    fn shareable(&self) -> bool {
        self.own
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        for (piece, at, part) in self.pieces(offset, into.len())? {
            piece.memory.read(at, &mut into[part])?;
        }
        Ok(())
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        for (piece, at, part) in self.pieces(offset, from.len())? {
            piece.memory.write(at, &from[part])?;
        }
        Ok(())
    }
}

impl fmt::Debug for ThreadMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThreadMemory({} bytes at {:#x} on {:?})", self.len, self.addr(), self.gpu())
    }
}

/// Maps what another process exported.
pub(super) fn import(gpu: &Arc<Inner>, handle: GpuHandle) -> Result<ThreadMemory> {
    gpu.may(Call::Import)?;
    if handle.device != uuid(gpu.number) {
        let theirs = DeviceId::Gpu(handle.device);
        return Err(Error::misuse(format!(
            "memory of {theirs} is mapped by that GPU's device, not by {}",
            gpu.id()
        )));
    }
    let whole = handle.chunks.iter().try_fold(0_usize, |sum, chunk| sum.checked_add(chunk.size));
    let whole = whole.filter(|whole| isize::try_from(*whole).is_ok());
    let (Some(whole), Some(end)) = (whole, handle.offset.checked_add(handle.len)) else {
        return Err(Error::refused("a handle whose sizes are larger than any memory"));
    };
    let (offset, len) = (handle.offset, handle.len);
    if end > whole {
        return Err(Error::refused(format!("{len} bytes were promised at {offset} of {whole}")));
    }
    let memory = |chunk: Chunk| {
        let size = chunk.size;
        if size == 0 || !size.is_multiple_of(UNIT) {
            return Err(Error::refused(format!(
                "an allocation of {size} bytes, which is no multiple of {UNIT}"
            )));
        }
        let Means::Fd(fd) = chunk.means else {
            return Err(Error::refused("memory of a GPU of threads that came without a descriptor"));
        };
        Host.import(Handle::Memfd { fd, len: size })
    };
    let memories = handle.chunks.into_iter().map(memory).collect::<Result<_>>()?;
    Ok(ThreadMemory { mapping: Mapping::new(gpu, memories, false)?, offset, len, own: false, _keep: None })
}

/// Memory by its address. All of it must lie in memory of this GPU.
pub(super) fn adopt(
    gpu: &Arc<Inner>,
    addr: usize,
    len: usize,
    keep: Box<dyn Any + Send + Sync>,
) -> Result<ThreadMemory> {
    check_memory(addr, len)?;
    gpu.check()?;
    if len == 0 {
        let mapping = Mapping::new(gpu, Vec::new(), false)?;
        return Ok(ThreadMemory { mapping, offset: 0, len, own: false, _keep: Some(keep) });
    }
    let mapping = mapping_at(gpu, addr, len)
        .ok_or_else(|| Error::misuse(format!("{len} bytes at {addr:#x} are not memory of {gpu:?}")))?;
    let offset = addr - mapping.base;
    Ok(ThreadMemory { mapping, offset, len, own: false, _keep: Some(keep) })
}

/// All of the memory that a region lies in.
pub(super) fn around(gpu: &Arc<Inner>, region: &Arc<dyn Region>) -> Result<ThreadMemory> {
    gpu.check()?;
    let mapping = mapping_at(gpu, region.addr(), region.len())
        .ok_or_else(|| Error::misuse(format!("{region:?} is no memory of {gpu:?}")))?;
    let len = mapping.size();
    Ok(ThreadMemory { mapping, offset: 0, len, own: false, _keep: Some(Box::new(region.clone())) })
}

/// The numbers of the allocations at an address, if all of these bytes lie in memory of this GPU.
pub(super) fn ids_at(gpu: &Inner, addr: usize, len: usize) -> Option<Vec<u64>> {
    let mapping = mapping_at(gpu, addr, len)?;
    let (mut at, mut ids) = (mapping.base, Vec::new());
    for piece in &mapping.pieces {
        if at < addr + len && addr < at + piece.size {
            ids.push(piece.id);
        }
        at += piece.size;
    }
    Some(ids)
}

/// Nobody finds what is mapped from this address on any more.
pub(super) fn lose(gpu: &Inner, base: usize) {
    unpoisoned(gpu.table.lock()).mapped.remove(&base);
}

/// The mapping that all of these bytes lie in.
fn mapping_at(gpu: &Inner, addr: usize, len: usize) -> Option<Arc<Mapping>> {
    let below =
        unpoisoned(gpu.table.lock()).mapped.range(..=addr).next_back().map(|(_, below)| below.clone());
    // Out of the lock, which the last user of a mapping needs.
    below?.upgrade().filter(|mapping| addr + len <= mapping.base + mapping.size())
}

/// Several memfds, mapped one behind the other.
struct Joined {
    addr: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread; all access goes through raw copies.
unsafe impl Send for Joined {}
// SAFETY: as above.
unsafe impl Sync for Joined {}

impl Joined {
    /// The lengths are multiples of a page.
    fn new(memories: &[Arc<dyn Region>]) -> Result<Self> {
        let len = memories.iter().map(|memory| memory.len()).sum();
        let failed = |e| Error::io(format!("mapping {len} bytes of several allocations"), e);
        // SAFETY: new addresses that the kernel chooses disturb nothing.
        let addr = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE)
        }
        .map_err(failed)?;
        let addr = NonNull::new(addr.cast()).ok_or_else(|| Error::bug("the kernel mapped address zero"))?;
        let joined = Self { addr, len };
        let mut at = 0;
        for memory in memories {
            let Handle::Memfd { fd, len } = memory.export()? else {
                return Err(Error::misuse("memory of a GPU of threads is a memfd"));
            };
            // SAFETY: `len` bytes inside of the addresses that were just taken, which nobody else knows; the file has as many
            // and is sealed against shrinking (`Host` made or checked it).
            unsafe {
                rustix::mm::mmap(
                    joined.addr.as_ptr().add(at).cast(),
                    len,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED | MapFlags::FIXED,
                    &fd,
                    0,
                )
            }
            .map_err(failed)?;
            at += len;
        }
        Ok(joined)
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        // SAFETY: these addresses are ours, and whoever could still use them holds the region alive.
        let unmapped = unsafe { rustix::mm::munmap(self.addr.as_ptr().cast(), self.len) };
        if let Err(error) = unmapped {
            tracing::warn!("unmapping {} bytes: {error}", self.len);
        }
    }
}
