//! Regions of host memory: memfds of our own or of another process, and memory that somebody else allocated.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::copy::copy;
use crate::device::{DeviceId, Region, RegionPlace, check_inside};
use crate::error::{Error, Result};
use crate::fd::Fd;
use crate::flag::FlagLine;
use crate::fork::Birth;
use crate::handle::Handle;

/// The file system of memfds that are made of ordinary pages.
const TMPFS: u64 = 0x0102_1994;

/// Seals that keep a mapping valid whatever the other process does: nobody can shrink or grow the file, and
/// nobody can add a seal that takes writing away.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// What windows begin at multiples of.
const PAGE: usize = 4096;

/// Allocations from this size on are held against the free memory; asking costs as much as allocating 1 MiB.
const LARGE: usize = 16 << 20;

/// A mapped memfd.
pub(super) struct Memfd {
    fd: Fd,
    map: Map,
    /// Whether it was allocated here, all of it.
    own: bool,
}

impl Memfd {
    /// New memory, allocated now (so that a later touch cannot fail) and sealed against resizing.
    pub(super) fn alloc(len: usize) -> Result<Self> {
        let doing = |what: &str| format!("{what} {len} bytes of shareable host memory");
        // The kernel's sizes are signed.
        if isize::try_from(len).is_err() {
            return Err(Error::misuse(format!("an allocation of {len} bytes is larger than any memory")));
        }
        let short = |have: String| Error::Unsupported {
            what: format!("an allocation of {len} bytes"),
            need: format!("{len} bytes of free memory"),
            have,
        };
        // The kernel would look for pages until it has killed us, or a neighbour.
        if len >= LARGE
            && let Some(free) = free_memory().filter(|&free| len as u64 > free)
        {
            return Err(short(format!("{free}")));
        }
        let fd = create().map_err(|e| Error::io(doing("creating"), e))?;
        allocate(&fd, 0..len as u64).map_err(|e| match e {
            Errno::NOSPC | Errno::NOMEM => short(format!("less ({e})")),
            e => Error::io(doing("allocating"), e),
        })?;
        Ok(Self { own: true, ..Self::sealed(fd, len)? })
    }

    /// Space without memory: pages come with `commit`.
    pub(super) fn reserve(len: usize) -> Result<Self> {
        let doing = || format!("reserving {len} bytes of shareable host memory");
        let fd = create().map_err(|e| Error::io(doing(), e))?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(|e| Error::io(doing(), e))?;
        Self::sealed(fd, len)
    }

    fn sealed(fd: Fd, len: usize) -> Result<Self> {
        rustix::fs::fcntl_add_seals(&fd, SEALS)
            .map_err(|e| Error::io(format!("sealing {len} bytes of shareable host memory"), e))?;
        let map = Map::new(&fd, len)?;
        Ok(Self { fd, map, own: false })
    }

    /// Memory of another process. The descriptor must be a memfd of exactly the promised length that nobody can
    /// resize any more, and of ordinary pages: a touch of a huge page that the system has not got is a SIGBUS, seals or
    /// not.
    ///
    /// No seal that leaves memory writable forbids to punch holes into it (fallocate). See [`Device::import`] for what
    /// that means.
    ///
    /// [`Device::import`]: crate::Device::import
    pub(super) fn import(fd: Fd, len: usize) -> Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&fd)
            .map_err(|e| Error::refused(format!("the descriptor is not a memfd ({e})")))?;
        if !seals.contains(SEALS) {
            return Err(Error::refused(format!("the memfd has seals {seals:?}; {SEALS:?} are needed")));
        }
        if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
            return Err(Error::refused(format!("the memfd has seals {seals:?}, so nobody can write to it")));
        }
        let system = rustix::fs::fstatfs(&fd).map_err(|e| Error::io("looking at an imported memfd", e))?;
        if system.f_type as u64 != TMPFS {
            return Err(Error::refused(format!(
                "the memfd is of another file system ({:#x}) than ordinary memory; huge pages (MFD_HUGETLB) cannot be shared",
                system.f_type
            )));
        }
        let stat = rustix::fs::fstat(&fd).map_err(|e| Error::io("looking at an imported memfd", e))?;
        if u64::try_from(stat.st_size) != Ok(len as u64) {
            return Err(Error::refused(format!("the memfd has {} bytes; {len} were promised", stat.st_size)));
        }
        let map = Map::new(&fd, len)?;
        Ok(Self { fd, map, own: false })
    }
}

impl fmt::Debug for Memfd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memfd({} bytes)", self.map.len)
    }
}

// SAFETY: the mapping is made with exactly this length, is unmapped only when the region is dropped, and the seals
// keep the file behind it from shrinking.
unsafe impl Region for Memfd {
    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn len(&self) -> usize {
        self.map.len
    }

    fn addr(&self) -> usize {
        self.map.addr.as_ptr() as usize
    }

    fn export(&self) -> Result<Handle> {
        self.fd.check("a region of shareable memory")?;
        Ok(Handle::Memfd { fd: self.fd.try_clone()?, len: self.map.len })
    }

    fn place(&self) -> Result<Option<RegionPlace>> {
        self.fd.check("a region of shareable memory")?;
        let stat = rustix::fs::fstat(&self.fd).map_err(|e| Error::io("looking at a memfd", e))?;
        Ok(Some(RegionPlace { ids: vec![stat.st_dev, stat.st_ino], offset: 0, whole: self.map.len }))
    }

    fn cacheable(&self) -> bool {
        true
    }

    fn shareable(&self) -> bool {
        self.own
    }

    fn window(&self, range: Range<usize>) -> Result<Arc<dyn Region>> {
        self.fd.check("a region of shareable memory")?;
        if range.start > range.end || range.end > self.map.len || !range.start.is_multiple_of(PAGE) {
            let len = self.map.len;
            return Err(Error::misuse(format!(
                "a window of bytes {range:?} of {len}; it begins with a page"
            )));
        }
        Ok(Arc::new(Unshared::window(&self.fd, range)?))
    }

    fn commit(&self, range: Range<usize>) -> Result<()> {
        self.fd.check("a region of shareable memory")?;
        if range.start > range.end || range.end > self.map.len {
            return Err(Error::misuse(format!("bytes {range:?} are outside of {} bytes", self.map.len)));
        }
        let len = range.end - range.start;
        allocate(&self.fd, range.start as u64..range.end as u64).map_err(|e| match e {
            Errno::NOSPC | Errno::NOMEM => Error::Unsupported {
                what: format!("an allocation of {len} bytes"),
                need: format!("{len} bytes of free memory"),
                have: format!("less ({e})"),
            },
            e => Error::io(format!("taking {len} bytes of reserved host memory"), e),
        })
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        read(self, offset, into)
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        write(self, offset, from)
    }
}

/// Pages that cannot be shared by themselves.
pub(super) struct Unshared {
    map: Map,
    pages: Pages,
}

#[derive(Debug)]
enum Pages {
    /// Ordinary memory of this process.
    Private,
    /// A second mapping of some pages of a memfd, which has nothing to do with the first one.
    Window,
}

impl Unshared {
    /// Zeroed memory of this process; the kernel takes pages on first touch, as for everything that a program allocates.
    pub(super) fn private(len: usize) -> Result<Self> {
        Ok(Self { map: Map::private(len)?, pages: Pages::Private })
    }

    /// A part of a memfd that begins with a page.
    fn window(fd: &Fd, range: Range<usize>) -> Result<Self> {
        Ok(Self { map: Map::part(fd, range.start, range.end - range.start)?, pages: Pages::Window })
    }
}

impl fmt::Debug for Unshared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({} bytes)", self.pages, self.map.len)
    }
}

// SAFETY: the mapping is made with exactly this length and is unmapped only when the region is dropped. The pages behind a
// window stay as well: the seals hold for the file, whoever maps it.
unsafe impl Region for Unshared {
    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn len(&self) -> usize {
        self.map.len
    }

    fn addr(&self) -> usize {
        self.map.addr.as_ptr() as usize
    }

    fn export(&self) -> Result<Handle> {
        Err(match self.pages {
            Pages::Private => unshareable(self.map.len),
            Pages::Window => Error::misuse("a window cannot be shared: share the region that it looks into"),
        })
    }

    fn cacheable(&self) -> bool {
        matches!(self.pages, Pages::Window)
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        read(self, offset, into)
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        write(self, offset, from)
    }
}

/// Memory that somebody else allocated, with what keeps it alive.
pub(super) struct Adopted {
    addr: usize,
    len: usize,
    /// What it is mapped from, if others may map that too.
    file: Option<File>,
    _keep: Box<dyn Any + Send + Sync>,
}

/// Somebody else's open file, as long as they keep it open.
pub(super) struct File {
    fd: RawFd,
    /// Its numbers: of the file system, and of the file there.
    ids: [u64; 2],
    birth: Birth,
}

impl File {
    /// Refuses one that is shorter than promised.
    pub(super) fn of(fd: BorrowedFd<'_>, len: usize) -> Result<Self> {
        let stat = rustix::fs::fstat(fd).map_err(|e| Error::io("looking at a file that is shared", e))?;
        if u64::try_from(stat.st_size).is_ok_and(|size| size < len as u64) {
            return Err(Error::misuse(format!("{len} bytes of a file of {} bytes", stat.st_size)));
        }
        Ok(Self { fd: fd.as_raw_fd(), ids: [stat.st_dev, stat.st_ino], birth: Birth::now() })
    }
}

impl Adopted {
    /// # Safety
    /// `addr..addr + len` is valid for reads and writes until `keep` is dropped, and so long the file is open.
    pub(super) unsafe fn new(
        addr: usize,
        len: usize,
        file: Option<File>,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self { addr, len, file, _keep: keep }
    }
}

impl fmt::Debug for Adopted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Adopted({} bytes)", self.len)
    }
}

// SAFETY: whoever called `new` promised it, until `_keep` is dropped, which is when the region is.
unsafe impl Region for Adopted {
    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn len(&self) -> usize {
        self.len
    }

    fn addr(&self) -> usize {
        self.addr
    }

    fn export(&self) -> Result<Handle> {
        let Some(file) = &self.file else { return Err(unshareable(self.len)) };
        file.birth.check("a file that is shared")?;
        // SAFETY: whoever called `new` keeps it open until `_keep` is dropped.
        let fd = unsafe { BorrowedFd::borrow_raw(file.fd) };
        Ok(Handle::File { fd: crate::fd::dup(fd)?, len: self.len })
    }

    fn place(&self) -> Result<Option<RegionPlace>> {
        Ok(self.file.as_ref().map(|file| RegionPlace { ids: file.ids.to_vec(), offset: 0, whole: self.len }))
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        read(self, offset, into)
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        write(self, offset, from)
    }
}

fn unshareable(len: usize) -> Error {
    Error::Unsupported {
        what: "sharing this memory with another process".into(),
        need: "memory that tensorwire allocated".into(),
        have: format!("{len} bytes of private memory"),
    }
}

fn check(region: &dyn Region, offset: usize, len: usize) -> Result<*mut u8> {
    check_inside(region.len(), offset, len)?;
    Ok((region.addr() + offset) as *mut u8)
}

fn read(region: &dyn Region, offset: usize, into: &mut [u8]) -> Result<()> {
    let from = check(region, offset, into.len())?;
    // SAFETY: `check` saw that the bytes lie inside the region, which is valid for its whole length. `into` is
    // ours alone.
    unsafe { copy(into.as_mut_ptr(), from, into.len()) };
    Ok(())
}

fn write(region: &dyn Region, offset: usize, from: &[u8]) -> Result<()> {
    let into = check(region, offset, from.len())?;
    // SAFETY: as in `read`, the other way round.
    unsafe { copy(into, from.as_ptr(), from.len()) };
    Ok(())
}

/// A mapping: shared, of a whole file, or private, of nothing. What is private and small is of the heap: the kernel takes microseconds to
/// map a page, to zero it at its first use, and to take it from all threads again.
struct Map {
    addr: NonNull<u8>,
    len: usize,
    /// How it was allocated on the heap, if so.
    heap: Option<Layout>,
}

/// Up to here private memory is of the heap.
const ON_HEAP: usize = 16 << 10;

// SAFETY: the mapping belongs to the process, not to a thread; all access goes through raw copies.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    fn new(fd: &Fd, len: usize) -> Result<Self> {
        Self::part(fd, 0, len)
    }

    /// Of a part that begins with a page.
    fn part(fd: &Fd, start: usize, len: usize) -> Result<Self> {
        if len == 0 {
            return Ok(Self::empty());
        }
        // SAFETY: a new mapping at an address that the kernel chooses disturbs nothing.
        let addr = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                start as u64,
            )
        }
        .map_err(|e| Error::io(format!("mapping {len} bytes of shareable host memory{}", limit(e)), e))?;
        Self::at(addr.cast(), len)
    }

    fn private(len: usize) -> Result<Self> {
        if len == 0 {
            return Ok(Self::empty());
        }
        if let Some(layout) =
            Layout::from_size_align(len, align_of::<FlagLine>()).ok().filter(|_| len <= ON_HEAP)
        {
            // SAFETY: the size is not zero.
            let addr = NonNull::new(unsafe { alloc_zeroed(layout) });
            let none = || Error::io(format!("allocating {len} bytes of private memory"), Errno::NOMEM);
            return Ok(Self { addr: addr.ok_or_else(none)?, len, heap: Some(layout) });
        }
        // SAFETY: a new mapping at an address that the kernel chooses disturbs nothing.
        let addr = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|e| Error::io(format!("allocating {len} bytes of private memory{}", limit(e)), e))?;
        Self::at(addr.cast(), len)
    }

    fn at(addr: *mut u8, len: usize) -> Result<Self> {
        let addr = NonNull::new(addr).ok_or_else(|| Error::bug("the kernel mapped address zero"))?;
        Ok(Self { addr, len, heap: None })
    }

    /// Nothing can be mapped; a well-aligned address that is never touched.
    fn empty() -> Self {
        Self { addr: NonNull::<FlagLine>::dangling().cast(), len: 0, heap: None }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if let Some(layout) = self.heap {
            // SAFETY: allocated with this layout, and whoever could still use it holds the region alive.
            unsafe { dealloc(self.addr.as_ptr(), layout) };
        } else if self.len > 0 {
            // SAFETY: this mapping is ours, and whoever could still use it holds the region alive.
            let unmapped = unsafe { rustix::mm::munmap(self.addr.as_ptr().cast(), self.len) };
            if let Err(error) = unmapped {
                tracing::warn!("unmapping {} bytes: {error}", self.len);
            }
        }
    }
}

/// What a mapping that the kernel has no room for has met.
fn limit(error: Errno) -> &'static str {
    match error {
        Errno::NOMEM => " (no address space or mapping is left, see ulimit -v and vm.max_map_count)",
        _ => "",
    }
}

fn create() -> rustix::io::Result<Fd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Data is never code; kernels before 6.3 do not know the flag.
    match rustix::fs::memfd_create("tensorwire", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => rustix::fs::memfd_create("tensorwire", flags),
        other => other,
    }
    .map(Fd::new)
}

/// Memory that the kernel could give without killing anybody; unknown without /proc.
fn free_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = |name: &str| -> Option<u64> {
        let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
        rest.split_whitespace().next()?.parse().ok()
    };
    Some((kib("MemAvailable:")? + kib("SwapFree:").unwrap_or(0)) << 10)
}

/// Takes the pages now. Otherwise the kernel would look for one on first touch, and kill us if there is none.
fn allocate(fd: &Fd, range: Range<u64>) -> rustix::io::Result<()> {
    let (mut done, mut step) = (range.start, range.end - range.start);
    while done < range.end {
        let next = step.min(range.end - done);
        match rustix::fs::fallocate(fd, FallocateFlags::empty(), done, next) {
            Ok(()) => done += next,
            // Some kernels give back on any signal what they have taken so far; with a profiler's timer a large
            // step would never come to its end.
            Err(Errno::INTR) => step = (step / 2).max(64 << 10),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
