//! The device boundary: three small object-safe traits. No algorithm asks which device it runs on.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::flag::{Abort, Flag};
use crate::handle::Handle;
use crate::layout::Layout;
use crate::meeting::Meeting;
use crate::multicast::{self, Multicast, MulticastHandle};
use crate::op::ReduceOp;
use crate::rows::RowPlan;
use crate::span::{Span, View};

/// Where memory lives.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceId {
    /// The memory of this host.
    Host,
    /// One GPU, by its UUID: ordinals differ between processes.
    Gpu([u8; 16]),
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.pad("host"),
            Self::Gpu(uuid) => {
                f.write_str("gpu-")?;
                uuid.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }
    }
}

/// A place that has memory and can work on it.
pub trait Device: Send + Sync + fmt::Debug {
    /// Its name.
    fn id(&self) -> DeviceId;

    /// New zeroed memory of `len` bytes that can be exported. It is really there: a later touch cannot fail.
    fn alloc(&self, len: usize) -> Result<Arc<dyn Region>>;

    /// The same with whatever is in it, where that is quicker.
    fn take(&self, len: usize) -> Result<Arc<dyn Region>> {
        self.alloc(len)
    }

    /// The same, but no byte of it may be touched before [`Region::commit`] has taken it. Costs nothing until then
    /// where the device can do so.
    fn reserve(&self, len: usize) -> Result<Arc<dyn Region>> {
        self.alloc(len)
    }

    /// Maps memory that another process exported. Refuses what is not as the handle promises.
    ///
    /// Whoever has the descriptor of host memory can punch holes into it: the bytes there become zero, for everybody, and
    /// the pages go back to the system. No mapping breaks by that. The next touch takes a new page, though, so that the
    /// promise that memory is really there ends: on a system without a free page, that touch may end the process. Only
    /// processes of the same user that were given the memory can do so, and they could write zeros as well; nothing here
    /// looks for holes.
    fn import(&self, handle: Handle) -> Result<Arc<dyn Region>>;

    /// Uses memory that somebody else allocated, for as long as `keep` lives inside the region.
    ///
    /// # Safety
    /// `addr..addr + len` is memory of this device, valid for reads and writes until `keep` is dropped, and
    /// nobody holds a Rust reference to it while a queue works on it.
    unsafe fn adopt(
        &self,
        addr: usize,
        len: usize,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<Arc<dyn Region>>;

    /// All of the allocations that a region of this device lies in, for as long as the region lives inside the new one. It
    /// is for users in the same process: they have no need to map memory that is there.
    fn around(&self, region: &Arc<dyn Region>) -> Result<Arc<dyn Region>> {
        Err(Error::misuse(format!("{} does not know the allocations of {region:?}", self.id())))
    }

    /// The numbers of the allocations that these bytes lie in at the moment, as [`Region::place`] gives them; nothing where
    /// not all of it is memory of this device. Only asks: nobody needs to hold the memory.
    fn ids_at(&self, _addr: usize, _len: usize) -> Result<Option<Vec<u64>>> {
        Ok(None)
    }

    /// A new queue.
    fn queue(&self) -> Result<Box<dyn Queue>>;

    /// An object by which one store reaches memory of so many devices, with so many bytes on each. See [`crate::multicast`].
    fn multicast(&self, _devices: usize, _bytes: usize) -> Result<Box<dyn Multicast>> {
        Err(multicast::none(self))
    }

    /// The part of this process in such an object of another.
    fn join_multicast(&self, _handle: MulticastHandle) -> Result<Box<dyn Multicast>> {
        Err(multicast::none(self))
    }

    /// Whether a server does the work of several processes on it (MPS). Where one of them dies, it may end the work of all.
    fn is_served(&self) -> bool {
        false
    }

    /// Whether little of its memory is free, for all processes together. Who keeps memory of others that nobody uses gives it up then.
    fn is_short(&self) -> bool {
        false
    }

    /// How many blocks of kernels of this process run on it at the same time, at least. On the host that is the caller's thread.
    fn blocks(&self) -> usize {
        1
    }
}

/// Where a region lies among the allocations of its device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegionPlace {
    /// The allocations by their numbers in this process, or the file: other memory never has the same ones while any of
    /// it is there.
    pub ids: Vec<u64>,
    /// Where the region begins in the first of them.
    pub offset: usize,
    /// Bytes of all of them: what another process maps.
    pub whole: usize,
}

/// Memory on a device.
///
/// # Safety
/// `addr()..addr() + len()` is memory of the device named by `device()`, valid for reads and writes for as
/// long as the region lives, and both answers never change. Queues rely on it.
pub unsafe trait Region: Send + Sync + fmt::Debug {
    /// The device it lives on.
    fn device(&self) -> DeviceId;

    /// Bytes.
    fn len(&self) -> usize;

    /// Where it begins, in the address space of its device.
    fn addr(&self) -> usize;

    /// What another process needs to map it.
    fn export(&self) -> Result<Handle>;

    /// Where it lies: what tells whether two regions are the same memory, whoever made them. Nothing for memory that other
    /// processes cannot map.
    fn place(&self) -> Result<Option<RegionPlace>> {
        Ok(None)
    }

    /// Whether this process allocated it to be exported: all of it is there, and any process may be given it.
    fn shareable(&self) -> bool {
        false
    }

    /// The region that this one is a part of: what is done to pages is done to all of it.
    fn whole(&self) -> Option<&Arc<dyn Region>> {
        None
    }

    /// Whether a cache may keep it for a while after its last user: its memory is nobody else's to count on.
    fn cacheable(&self) -> bool {
        false
    }

    /// Copies bytes out, after all that was finished on its device. Others may write them meanwhile: then some are old and
    /// some are new.
    fn read(&self, offset: usize, into: &mut [u8]) -> Result<()>;

    /// Copies bytes in. Others may read or write them meanwhile: then what they get, or what stays, is a mixture.
    fn write(&self, offset: usize, from: &[u8]) -> Result<()>;

    /// Takes the memory behind a part of reserved space, in any process that has mapped it, once or more often.
    fn commit(&self, _range: Range<usize>) -> Result<()> {
        Ok(())
    }

    /// A second mapping of some of its pages, as a region of its own: what a driver does to all of a region (it makes it
    /// known to a GPU, say) is then done to these pages alone. It has the same bytes.
    fn window(&self, _range: Range<usize>) -> Result<Arc<dyn Region>> {
        Err(Error::misuse("this memory has no windows"))
    }

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its address if it is memory of this host: both questions in one call, for queues that are asked to move a few
    /// bytes.
    fn host_addr(&self) -> Option<usize> {
        (self.device() == DeviceId::Host).then(|| self.addr())
    }
}

/// Refuses bytes that do not lie inside of `whole` bytes.
#[inline]
pub(crate) fn check_inside(whole: usize, offset: usize, len: usize) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= whole => Ok(()),
        _ => Err(outside(whole, offset, len)),
    }
}

#[cold]
fn outside(whole: usize, offset: usize, len: usize) -> Error {
    Error::misuse(format!("{len} bytes at {offset} are outside of {whole} bytes"))
}

/// Refuses what cannot be memory of anybody.
pub(crate) fn check_memory(addr: usize, len: usize) -> Result<()> {
    if len != 0 && (addr == 0 || addr.checked_add(len).is_none() || len > isize::MAX as usize) {
        return Err(Error::misuse(format!("{len} bytes at {addr:#x} are not memory")));
    }
    Ok(())
}

/// What becomes of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Caching {
    /// Somebody reads it soon: it belongs into the caches.
    #[default]
    Keep,
    /// It is too large for them: a device may write it past its caches.
    Bypass,
    /// It is for others, who read it soon, on other cores. Of several outputs the last is the caller's own. A device writes
    /// it in the way that is faster here.
    Give,
}

/// A point in the work of a queue, see [`Queue::mark`].
#[derive(Debug, Clone)]
pub struct Mark(Option<Arc<dyn Point>>);

/// What a device knows of a mark.
pub trait Point: Any + Send + Sync + fmt::Debug {
    /// Whether everything before it is done.
    fn is_passed(&self) -> Result<bool>;

    /// See [`Mark::is_over`].
    fn is_over(&self) -> bool {
        self.is_passed().unwrap_or(false)
    }
}

impl Mark {
    /// Behind work that is done.
    pub fn passed() -> Self {
        Self(None)
    }

    /// At a point of a device.
    pub fn at(point: Arc<dyn Point>) -> Self {
        Self(Some(point))
    }

    /// Whether everything before it is done.
    pub fn is_passed(&self) -> Result<bool> {
        self.0.as_ref().map_or(Ok(true), |point| point.is_passed())
    }

    /// The same for who only wants to let go of memory. What cannot be asked now is not done, except after errors behind which
    /// the device runs nothing any more.
    pub fn is_over(&self) -> bool {
        self.0.as_ref().is_none_or(|point| point.is_over())
    }

    /// Looks until everything before it is done.
    pub fn wait(&self, abort: &Abort, deadline: Deadline) -> Result<()> {
        let begin = Instant::now();
        while !self.is_passed()? {
            abort.check(deadline)?;
            if begin.elapsed() > LOOK {
                std::thread::sleep(REST);
            }
        }
        Ok(())
    }

    /// The point, if it is of this kind; nothing if the mark is passed already. Refuses points of other devices.
    #[cfg(not(loom))]
    pub(crate) fn point<P: Point>(&self) -> Result<Option<&P>> {
        let Some(point) = &self.0 else { return Ok(None) };
        let any: &dyn Any = &**point;
        any.downcast_ref()
            .map(Some)
            .ok_or_else(|| Error::misuse(format!("a queue cannot follow {point:?} of another device")))
    }
}

/// How long a wait for a mark looks without rest, and how long it rests after that.
const LOOK: Duration = Duration::from_micros(200);
const REST: Duration = Duration::from_micros(20);

/// Work in order on a device. The host's runs on the caller's thread; a GPU's is a stream.
///
/// Calls take views and keep what they need alive until the work is done. A view that lives on another device
/// than the queue can reach is refused.
///
/// # Memory that others use meanwhile
///
/// While work runs, nobody else writes what it reads, and nobody else reads or writes what it writes: flags order the
/// queues of all processes, and every collective is such an order. Queues count on it and cannot see to it, as the others
/// may be other processes.
///
/// Where somebody breaks it (a thread that writes to a tensor while a collective works on it, a peer with a fault), the
/// bytes of the results are arbitrary. Nothing else is: on the host, plain copies are made like those of
/// [`Region::read`], and the kernels of reductions and of copies past the caches or with gaps take no address, no length
/// and no number of steps from what they read. By the letter of the language those kernels' accesses are a data
/// race; they are not made atomic, because that would take their vectors from them.
pub trait Queue: Send + fmt::Debug {
    /// Copies `src` to `dst`; both have the same length and do not overlap.
    fn copy(&mut self, dst: View<'_>, src: View<'_>, caching: Caching) -> Result<()>;

    /// Copies between two layouts of the same shape and element size: packs, unpacks, or both.
    fn copy_strided(&mut self, dst: (View<'_>, &Layout), src: (View<'_>, &Layout)) -> Result<()>;

    /// Combines `inputs` in their order, element by element, and writes the result to every one of `outputs`,
    /// in one pass. An output may be exactly one of the inputs; any other overlap is refused.
    fn reduce(
        &mut self,
        op: ReduceOp,
        dtype: Dtype,
        inputs: &[View<'_>],
        outputs: &[View<'_>],
        caching: Caching,
    ) -> Result<()>;

    /// Combines rows: each row of `output` is made of the rows of `inputs` that `plan` lists for it, in that order, as by
    /// [`reduce`](Self::reduce). All rows are equally long, and one of `output` lies behind the other. An average is divided by
    /// `of`, whatever the number of rows that make it. The output is apart from all inputs.
    fn reduce_rows(
        &mut self,
        op: ReduceOp,
        dtype: Dtype,
        _of: usize,
        _inputs: &[View<'_>],
        _plan: &RowPlan,
        _output: View<'_>,
    ) -> Result<()> {
        Err(Error::Unsupported {
            what: format!("{op} of {dtype} by rows on this device"),
            need: "memory of the host".into(),
            have: "a queue that reduces whole tensors only".into(),
        })
    }

    /// Reduces together with the queues of other ranks: like [`reduce`](Self::reduce), but it begins when the work of all ranks
    /// of the [meeting](crate::meeting) has begun, and ends when all of it is done. Each rank reduces a part of its own: it reads
    /// that part from the memory of all, and writes it to the memory of all.
    ///
    /// The work waits inside of itself, so that the work of all ranks must run at the same time. The host's queue returns when
    /// it is over, or with an error. Nobody is there to hear it if a queued one fails: then what is behind it looks at the abort
    /// words of the meeting and writes nothing, as behind a wait.
    ///
    /// Nothing that changes from call to call goes into the work of a GPU, so that it can be captured in a graph. All that it
    /// uses must then live as long as the graph. The queue keeps it as long as the queue itself lives.
    fn reduce_together(
        &mut self,
        op: ReduceOp,
        dtype: Dtype,
        _inputs: &[View<'_>],
        _outputs: &[View<'_>],
        _meeting: &Meeting<'_>,
    ) -> Result<()> {
        Err(Error::Unsupported {
            what: format!("{op} of {dtype} by work that waits for other ranks"),
            need: "a queue whose work runs at the same time as theirs".into(),
            have: "a queue that cannot".into(),
        })
    }

    /// Lets nothing queued after it run before all that the queues of the other ranks had before the same
    /// [meeting](crate::meeting). It waits inside of its own work, as [`reduce_together`](Self::reduce_together) does. If it fails,
    /// what is queued behind it writes nothing, up to the next [`begin`](Self::begin).
    fn meet(&mut self, _meeting: &Meeting<'_>) -> Result<()> {
        Err(Error::Unsupported {
            what: "work that waits for other ranks".into(),
            need: "a queue whose work runs at the same time as theirs".into(),
            have: "a queue that cannot".into(),
        })
    }

    /// Sets the flag to `value` after everything queued before.
    fn signal(&mut self, flag: &Flag, value: u32) -> Result<()>;

    /// Lets nothing queued after it run before the flag has reached `value`. A wait on the host returns when
    /// it is over; `abort` or `deadline` end it with an error.
    ///
    /// A wait that is only queued ends by `abort` or `deadline` as well. Nobody is there to hear of it. So what is queued
    /// behind it looks at the abort words and writes nothing if one is set. If the deadline ended the wait, the first
    /// word of `abort` is set to [`Abort::LATE`]. Signals behind such a wait are given all the same.
    fn wait(&mut self, flag: &Flag, value: u32, abort: &Abort, deadline: Deadline) -> Result<()>;

    /// The same for several flags, each with its value: goes on when all have reached theirs. One call of a driver where
    /// that is possible.
    fn wait_all(&mut self, flags: &[(&Flag, u32)], abort: &Abort, deadline: Deadline) -> Result<()> {
        flags.iter().try_for_each(|(flag, value)| self.wait(flag, *value, abort, deadline))
    }

    /// The same, but gives false and does nothing if the caller's thread would have to wait, because the device cannot hold
    /// one more wait. The caller then waits in its own way.
    fn try_wait_all(&mut self, flags: &[(&Flag, u32)], abort: &Abort, deadline: Deadline) -> Result<bool> {
        self.wait_all(flags, abort, deadline).map(|()| true)
    }

    /// Copies each second view to the first one beside it. They are apart from each other, and may be copied in any order or
    /// at the same time.
    fn copy_all(&mut self, copies: &[(View<'_>, View<'_>)], caching: Caching) -> Result<()> {
        copies.iter().try_for_each(|&(dst, src)| self.copy(dst, src, caching))
    }

    /// Whether work that is queued from now on can look at one more abort word. Those of waits that have ended well do not count.
    fn heeds_another(&mut self) -> bool {
        true
    }

    /// A new piece of work begins. What is queued from now on looks at these abort words, and not at those of waits before. If
    /// one is set when the work comes to its turn, it writes nothing.
    fn begin(&mut self, _abort: Option<&Abort>) -> Result<()> {
        Ok(())
    }

    /// Has the work that is queued from now on, until the next [`begin`](Self::begin), write when it ended: nanoseconds of
    /// CLOCK_MONOTONIC, as eight bytes of host memory at a multiple of eight. What ends last writes last. Work that looks at no
    /// clock writes nothing, such as a copy that the driver makes; nor does a queue whose caller sees the end himself.
    fn stamp(&mut self, _at: &Span) -> Result<()> {
        Ok(())
    }

    /// A point behind all that is queued so far, which other queues of this process can follow.
    fn mark(&mut self) -> Result<Mark>;

    /// Lets nothing queued after it run before the mark is passed. The host's queue returns when it is; `abort` or `deadline`
    /// end that with an error. A mark of another kind of device is refused.
    fn follow(&mut self, mark: &Mark, abort: &Abort, deadline: Deadline) -> Result<()>;

    /// Keeps memory until everything queued so far is done: for who is through with it while the device may not be. Nobody has
    /// to call the queue again for it to go.
    fn keep(&mut self, _region: Arc<dyn Region>) -> Result<()> {
        // What runs on the caller's thread is done.
        Ok(())
    }

    /// From here on large copies and reductions may be done by so many threads together, the caller's among them. The
    /// results are the same. A queue that does not work on the caller's thread ignores it.
    fn share(&mut self, _threads: usize) {}

    /// Blocks until everything queued so far is done.
    fn finish(&mut self, abort: &Abort, deadline: Deadline) -> Result<()>;
}
