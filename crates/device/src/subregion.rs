//! A part of a region that is a region itself: for what was mapped as a whole and is used in parts.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::device::{DeviceId, Region, RegionPlace, check_inside};
use crate::error::{Error, Result};
use crate::handle::Handle;

/// The part, or the region itself if it is all of it.
pub fn part(region: Arc<dyn Region>, range: Range<usize>) -> Result<Arc<dyn Region>> {
    if range == (0..region.len()) {
        return Ok(region);
    }
    keeping(region, range, Box::new(()))
}

/// The part, which has `keep` dropped when its last user is gone, queues among them.
pub fn keeping(
    region: Arc<dyn Region>,
    range: Range<usize>,
    keep: Box<dyn Any + Send + Sync>,
) -> Result<Arc<dyn Region>> {
    if range.start > range.end || range.end > region.len() {
        let len = region.len();
        return Err(Error::misuse(format!("bytes {range:?} are outside of a region of {len} bytes")));
    }
    Ok(Arc::new(Part {
        addr: region.addr() + range.start,
        start: range.start,
        len: range.end - range.start,
        region,
        _keep: keep,
    }))
}

struct Part {
    region: Arc<dyn Region>,
    addr: usize,
    start: usize,
    len: usize,
    _keep: Box<dyn Any + Send + Sync>,
}

impl Part {
    fn check(&self, offset: usize, count: usize) -> Result<usize> {
        check_inside(self.len, offset, count)?;
        Ok(self.start + offset)
    }
}

// SAFETY: a part of a region that it keeps alive.
unsafe impl Region for Part {
    fn device(&self) -> DeviceId {
        self.region.device()
    }

    fn len(&self) -> usize {
        self.len
    }

    fn addr(&self) -> usize {
        self.addr
    }

    fn export(&self) -> Result<Handle> {
        self.region.export()?.part(self.start, self.len)
    }

    fn place(&self) -> Result<Option<RegionPlace>> {
        let place = self.region.place()?;
        Ok(place.map(|place| RegionPlace { offset: place.offset + self.start, ..place }))
    }

    fn shareable(&self) -> bool {
        self.region.shareable()
    }

    fn whole(&self) -> Option<&Arc<dyn Region>> {
        Some(&self.region)
    }

    fn cacheable(&self) -> bool {
        self.region.cacheable()
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.region.read(self.check(offset, into.len())?, into)
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.region.write(self.check(offset, from.len())?, from)
    }

    fn commit(&self, range: Range<usize>) -> Result<()> {
        let end = range.end.checked_sub(range.start);
        let start = self.check(range.start, end.unwrap_or(usize::MAX))?;
        self.region.commit(start..start + (range.end - range.start))
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Part({} bytes at {} of {:?})", self.len, self.start, self.region)
    }
}
