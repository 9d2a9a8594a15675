//! A part of a region. The only way to reach shared memory from outside this crate: copying reads and writes,
//! bounds-checked, never a slice over memory that another process writes.

use std::ops::Range;
use std::sync::Arc;

use crate::device::{DeviceId, Region};
use crate::error::{Error, Result};

/// `len` bytes of a region from `offset`. Cloning it keeps the region alive.
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
        self.check(offset, into.len())?;
        self.region.read(self.offset + offset, into)
    }

    /// Copies bytes in, from `offset` of this span on.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.check(offset, from.len())?;
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
        let near = self.addr() < other.addr() + other.len && other.addr() < self.addr() + self.len;
        near && !self.is_empty() && !other.is_empty() && self.device() == other.device()
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

    fn check(&self, offset: usize, len: usize) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(Error::misuse(format!(
                "{len} bytes at {offset} are outside of a span of {} bytes",
                self.len
            ))),
        }
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
        let start = |view: Self| view.region.addr() + view.offset;
        start(self) == start(other) && self.len == other.len && self.device() == other.device()
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

    /// Where it begins in its region.
    #[cfg(not(loom))]
    pub(crate) fn offset(self) -> usize {
        self.offset
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
