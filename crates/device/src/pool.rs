//! A caching allocator: blocks of large segments that are kept for the next one.
//!
//! A block is a region: it can be exported as a part of its segment, and a queue keeps it until its work is done. So
//! a block comes back when its last user on the host and on the device has finished with it, whatever the stream was,
//! and may be given out again at once.
//!
//! When a device is short of memory, hooks are asked first to give some back ([`Pool::on_pressure`]), then segments
//! without blocks are freed, and then the error says who has how much.

mod arena;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::arena::{Arena, ArenaPlace};
use crate::device::{self, Device, DeviceId, Region};
use crate::error::{Error, Result};
use crate::handle::Handle;
use crate::subregion::part;

/// What blocks begin at multiples of: enough for every vector access and for a flag.
const ALIGN: usize = 512;
/// Segments for small blocks, and from which size on a block counts as large.
const SMALL: usize = 2 << 20;
/// Segments for larger blocks; what is larger still has a segment of its own.
const LARGE: usize = 16 << 20;

/// Frees what it can of so many bytes, and gives how many it has freed.
pub type Pressure = Box<dyn Fn(usize) -> usize + Send + Sync>;

/// A caching allocator for one device.
#[derive(Clone)]
pub struct Pool(Arc<Inner>);

struct Inner {
    device: Arc<dyn Device>,
    state: Mutex<State>,
    hooks: Mutex<Vec<Arc<Pressure>>>,
}

#[derive(Default)]
struct State {
    arena: Arena,
    /// The segments by their numbers in the arena; freed ones are gone.
    segments: Vec<Option<Arc<dyn Region>>>,
    most: usize,
    hits: u64,
    misses: u64,
}

/// What a pool has and has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Bytes in blocks that are in use.
    pub used: usize,
    /// Blocks that are in use.
    pub blocks: usize,
    /// Bytes in segments: in use and kept.
    pub held: usize,
    /// Segments.
    pub segments: usize,
    /// The most bytes that were in use at a time.
    pub most: usize,
    /// Blocks that were found in a segment.
    pub hits: u64,
    /// Blocks for which a segment was made.
    pub misses: u64,
}

impl Pool {
    /// An empty pool on a device.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self(Arc::new(Inner { device, state: Mutex::default(), hooks: Mutex::default() }))
    }

    /// The device.
    pub fn device(&self) -> &dyn Device {
        &*self.0.device
    }

    /// Memory of `len` bytes, with whatever is in it.
    pub fn alloc(&self, len: usize) -> Result<Arc<dyn Region>> {
        let large = || Error::misuse(format!("an allocation of {len} bytes is larger than any memory"));
        isize::try_from(len).map_err(|_| large())?;
        let size = len.max(1).checked_next_multiple_of(ALIGN).ok_or_else(large)?;
        let small = size <= SMALL / 2;
        if let Some(block) = self.find(size, len, small) {
            return block;
        }
        let segment_len = match size {
            _ if small => SMALL,
            _ if size <= LARGE / 2 => LARGE,
            _ => size.checked_next_multiple_of(SMALL).ok_or_else(large)?,
        };
        let segment = match self.0.device.take(segment_len) {
            Err(error) if is_short(&error) => self.squeeze(segment_len, size, error)?,
            other => other?,
        };
        let mut state = self.lock();
        state.misses += 1;
        let number = state.arena.add(segment.len(), small);
        match state.segments.get_mut(number) {
            Some(gone) => *gone = Some(segment),
            None => state.segments.push(Some(segment)),
        }
        let place = state.arena.take(size, small).ok_or_else(|| Error::bug("a new segment without room"))?;
        self.block(&mut state, place, len)
    }

    /// Asks to be told when memory is short: before anything else is done about it.
    pub fn on_pressure(&self, hook: Pressure) {
        self.0.hooks.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(hook));
    }

    /// Frees all segments without blocks; gives their bytes.
    pub fn trim(&self) -> usize {
        let mut state = self.lock();
        let freed = state.arena.drain();
        let bytes = freed.iter().map(|(_, len)| len).sum();
        // Given back to the device after the lock: that may take a while.
        let segments: Vec<_> =
            freed.iter().filter_map(|(number, _)| state.segments[*number].take()).collect();
        drop(state);
        drop(segments);
        bytes
    }

    /// What it has and has done.
    pub fn stats(&self) -> Stats {
        let state = self.lock();
        let (used, blocks) = state.arena.used();
        let (held, segments) = state.arena.held();
        Stats { used, blocks, held, segments, most: state.most, hits: state.hits, misses: state.misses }
    }

    fn find(&self, size: usize, len: usize, small: bool) -> Option<Result<Arc<dyn Region>>> {
        let mut state = self.lock();
        let place = state.arena.take(size, small)?;
        state.hits += 1;
        Some(self.block(&mut state, place, len))
    }

    fn block(&self, state: &mut State, place: ArenaPlace, len: usize) -> Result<Arc<dyn Region>> {
        state.most = state.most.max(state.arena.used().0);
        let segment = state.segments.get(place.segment).cloned().flatten();
        let part = segment
            .ok_or_else(|| Error::bug("a block without a segment"))
            .and_then(|segment| part(segment, place.start..place.start + len));
        match part {
            Ok(part) => Ok(Arc::new(Block { pool: self.0.clone(), part, place })),
            Err(error) => {
                state.arena.give(place);
                Err(error)
            }
        }
    }

    /// Memory for a segment although the device is short of it: as large as it should be, or else as it must be.
    fn squeeze(&self, segment_len: usize, size: usize, error: Error) -> Result<Arc<dyn Region>> {
        // Without the lock: a hook may use the pool.
        let hooks = self.0.hooks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let freed: usize = hooks.iter().map(|hook| hook(segment_len)).sum();
        if freed > 0 {
            tracing::debug!(freed, "memory was short, and hooks gave some back");
            if let Ok(segment) = self.0.device.take(segment_len) {
                return Ok(segment);
            }
        }
        let trimmed = self.trim();
        tracing::debug!(trimmed, "memory was short, and unused segments were freed");
        for len in [segment_len, size] {
            if let Ok(segment) = self.0.device.take(len) {
                return Ok(segment);
            }
        }
        let Stats { used, blocks, held, .. } = self.stats();
        let Error::Unsupported { what, need, have } = error else { return Err(error) };
        let have = format!(
            "{have}, after {freed} bytes were given back by hooks and {trimmed} by the pool, which holds {held} bytes, {used} of \
             them in {blocks} blocks in use"
        );
        Err(Error::Unsupported { what, need, have })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({}, {:?})", self.0.device.id(), self.stats())
    }
}

fn is_short(error: &Error) -> bool {
    matches!(error, Error::Unsupported { need, .. } if need.contains("free memory"))
}

/// A part of a segment that goes back to the pool.
struct Block {
    pool: Arc<Inner>,
    part: Arc<dyn Region>,
    place: ArenaPlace,
}

// SAFETY: a region that it keeps alive, at a place that is nobody else's until the block is dropped.
unsafe impl Region for Block {
    fn device(&self) -> DeviceId {
        self.part.device()
    }

    fn len(&self) -> usize {
        self.part.len()
    }

    fn addr(&self) -> usize {
        self.part.addr()
    }

    fn export(&self) -> Result<Handle> {
        self.part.export()
    }

    fn place(&self) -> Result<Option<device::RegionPlace>> {
        self.part.place()
    }

    fn shareable(&self) -> bool {
        self.part.shareable()
    }

    fn whole(&self) -> Option<&Arc<dyn Region>> {
        Some(self.part.whole().unwrap_or(&self.part))
    }

    fn cacheable(&self) -> bool {
        self.part.cacheable()
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.part.read(offset, into)
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.part.write(offset, from)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.pool.state.lock().unwrap_or_else(PoisonError::into_inner).arena.give(self.place);
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({:?})", self.part)
    }
}
