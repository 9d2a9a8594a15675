//! A part of a region. The only way to reach shared memory from outside this crate: copying reads and writes,
//! bounds-checked, never a slice over memory that another process writes.

use std::ops::Range;
use std::sync::Arc;

use crate::device::{DeviceId, Region, check_inside};
use crate::error::{Error, Result};

/// `len` bytes of a region from `offset`. Cloning it keeps the region alive.
///
/// # Reading and writing at once
///
/// Threads and processes may read and write the same bytes of a span at the same time. Nothing breaks, but nothing orders
/// them either: a read that meets a write gives some bytes from before it and some from after it, in any mixture, and two
/// writes that meet leave such a mixture behind. There is no size that is read or written as a whole. Threads and
/// processes that need an order make one with a [`Flag`](crate::Flag): what was written before a signal is seen after the wait
/// for it.
///
/// What a [`Queue`](crate::Queue) works on is another matter, see there.
#[derive(Debug, Clone)]
pub struct Span {
    region: Arc<dyn Region>,
    offset: usize,
    len: usize,
}

impl Span {
    /// All of a region.
    #[inline]
    pub fn whole(region: Arc<dyn Region>) -> Self {
        let len = region.len();
        Self { region, offset: 0, len }
    }

    /// A part of a region.
    #[inline]
    pub fn new(region: Arc<dyn Region>, range: Range<usize>) -> Result<Self> {
        Self::whole(region).slice(range)
    }

    /// A part of this span, counted from its start.
    #[inline]
    pub fn slice(&self, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.len {
            return Err(Error::misuse(format!(
                "bytes {range:?} are outside of a span of {} bytes",
                self.len
            )));
        }
        Ok(Self {
            region: self.region.clone(),
            offset: self.offset + range.start,
            len: range.end - range.start,
        })
    }

    /// Bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The region it is a part of.
    #[inline]
    pub fn region(&self) -> &Arc<dyn Region> {
        &self.region
    }

    /// Where it begins in its region.
    #[inline]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The device it lives on.
    #[inline]
    pub fn device(&self) -> DeviceId {
        self.region.device()
    }

    /// Copies bytes out, from `offset` of this span on.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        check_inside(self.len, offset, into.len())?;
        self.region.read(self.offset + offset, into)
    }

    /// Copies bytes in, from `offset` of this span on.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        check_inside(self.len, offset, from.len())?;
        self.region.write(self.offset + offset, from)
    }

    /// All bytes, as a copy.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.len];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// All of it, borrowed.
    #[inline]
    pub fn view(&self) -> View<'_> {
        View { region: &self.region, offset: self.offset, len: self.len }
    }

    /// Takes in a span that begins where this one ends; gives whether it does.
    pub fn absorb(&mut self, next: &Self) -> bool {
        let follows = Arc::ptr_eq(&self.region, &next.region) && self.offset + self.len == next.offset;
        if follows {
            self.len += next.len;
        }
        follows
    }

    /// Whether any byte of the two is the same memory, as far as this process can see.
    #[inline]
    pub fn touches(&self, other: &Self) -> bool {
        self.view().touches(other.view())
    }

    /// How many bytes behind this one another span begins.
    pub fn distance(&self, other: &Self) -> isize {
        (other.addr() as isize).wrapping_sub(self.addr() as isize)
    }

    /// Its address on its device; used by queues only.
    #[inline]
    pub(crate) fn addr(&self) -> usize {
        self.region.addr() + self.offset
    }
}

/// A borrowed part of a region: what queues work on. It is as cheap to make and to copy as a slice.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    region: &'a Arc<dyn Region>,
    offset: usize,
    len: usize,
}

impl<'a> View<'a> {
    /// A part of a region.
    #[inline]
    pub fn new(region: &'a Arc<dyn Region>, range: Range<usize>) -> Result<Self> {
        Self { region, offset: 0, len: region.len() }.slice(range)
    }

    /// A part of this view, counted from its start.
    #[inline]
    pub fn slice(self, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.len {
            return Err(Error::misuse(format!(
                "bytes {range:?} are outside of a view of {} bytes",
                self.len
            )));
        }
        Ok(Self { offset: self.offset + range.start, len: range.end - range.start, ..self })
    }

    /// Bytes.
    #[inline]
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The device it lives on.
    #[inline]
    pub fn device(self) -> DeviceId {
        self.region.device()
    }

    /// Whether it is the very same memory.
    #[inline]
    pub fn is_same(self, other: Self) -> bool {
        self.addr() == other.addr() && self.len == other.len && self.device() == other.device()
    }

    /// Whether any byte of the two is the same memory, as far as this process can see.
    #[inline]
    pub(crate) fn touches(self, other: Self) -> bool {
        let near = self.addr() < other.addr() + other.len && other.addr() < self.addr() + self.len;
        near && !self.is_empty() && !other.is_empty() && self.device() == other.device()
    }

    /// Refuses a copy between two views that touch each other.
    #[inline]
    #[cfg(not(loom))]
    pub(crate) fn check_apart(self, other: Self) -> Result<()> {
        if self.touches(other) {
            return Err(Error::misuse("copying between spans that overlap"));
        }
        Ok(())
    }

    /// Refuses a copy of another length, or of what this view touches.
    #[inline]
    #[cfg(not(loom))]
    pub(crate) fn check_copy(self, src: Self) -> Result<()> {
        if self.len != src.len {
            return Err(Error::misuse(format!("copying {} bytes into {}", src.len, self.len)));
        }
        self.check_apart(src)
    }

    /// The same part as a span of its own, which keeps the region alive.
    #[inline]
    pub fn to_span(self) -> Span {
        Span { region: self.region.clone(), offset: self.offset, len: self.len }
    }

    /// The region it is a part of.
    #[cfg(not(loom))]
    pub(crate) fn region(self) -> &'a Arc<dyn Region> {
        self.region
    }

    /// Its address on its device; used by queues only.
    #[inline]
    pub(crate) fn addr(self) -> usize {
        self.region.addr() + self.offset
    }

    /// Its address if it is memory of this host; used by queues only.
    #[inline]
    pub(crate) fn host_addr(self) -> Option<usize> {
        self.region.host_addr().map(|start| start + self.offset)
    }
}

impl<'a> From<&'a Span> for View<'a> {
    fn from(span: &'a Span) -> Self {
        span.view()
    }
}

/// Whether two spans of as many bytes at these addresses have some in common.
#[inline]
pub(crate) fn overlap(a: usize, b: usize, len: usize) -> bool {
    // By how much more than `1 - len` the one lies behind the other.
    len != 0 && a.wrapping_sub(b).wrapping_add(len - 1) < 2 * len - 1
}
