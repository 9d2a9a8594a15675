//! Words of 64 bits in shared memory, for tables that several processes read and write.

use std::fmt;
use std::sync::Arc;

#[cfg(not(loom))]
use crate::device::{DeviceId, Region};
#[cfg(not(loom))]
use crate::error::{Error, Result};
#[cfg(not(loom))]
use crate::span::Span;
use crate::sync::{AtomicU64, Ordering, fence};

/// A table of words. What lies outside of it reads as zero and takes nothing.
#[derive(Clone)]
pub struct Words {
    place: WordsPlace,
    len: usize,
}

impl Words {
    /// A table of zeros that lives only in this process.
    pub fn local(len: usize) -> Self {
        Self { place: WordsPlace::Local((0..len).map(|_| AtomicU64::new(0)).collect()), len }
    }

    /// The words of host memory that begins at a multiple of 8.
    #[cfg(not(loom))]
    pub fn new(span: &Span) -> Result<Self> {
        if span.device() != DeviceId::Host || !span.addr().is_multiple_of(8) {
            return Err(Error::misuse(format!(
                "words need host memory at a multiple of 8, not byte {} on {}",
                span.offset(),
                span.device()
            )));
        }
        let first = std::ptr::NonNull::new(span.addr() as *mut AtomicU64)
            .ok_or_else(|| Error::misuse("words cannot live at address zero"))?;
        Ok(Self { place: WordsPlace::Shared { first, region: span.region().clone() }, len: span.len() / 8 })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A word now. What was written before it was stored is visible.
    #[inline]
    pub fn load(&self, index: usize) -> u64 {
        self.word(index).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Stores a word.
    #[inline]
    pub fn store(&self, index: usize, value: u64) {
        if let Some(word) = self.word(index) {
            word.store(value, Ordering::Release);
        }
    }

    /// Stores a word and gives what was there.
    #[inline]
    pub fn swap(&self, index: usize, value: u64) -> u64 {
        self.word(index).map_or(0, |word| word.swap(value, Ordering::AcqRel))
    }

    /// Sets bits of a word and gives what was there.
    #[inline]
    pub fn set(&self, index: usize, bits: u64) -> u64 {
        self.word(index).map_or(0, |word| word.fetch_or(bits, Ordering::AcqRel))
    }

    /// Adds to a word, which may wrap, and gives what was there.
    #[inline]
    pub fn add(&self, index: usize, value: u64) -> u64 {
        self.word(index).map_or(0, |word| word.fetch_add(value, Ordering::AcqRel))
    }

    /// Changes a word as `change` says, if it does, and gives what was there; `Err` if it did not.
    pub fn update(
        &self,
        index: usize,
        mut change: impl FnMut(u64) -> Option<u64>,
    ) -> std::result::Result<u64, u64> {
        let Some(word) = self.word(index) else { return Err(0) };
        let mut now = word.load(Ordering::Acquire);
        while let Some(next) = change(now) {
            match word.compare_exchange(now, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(was) => return Ok(was),
                Err(other) => now = other,
            }
        }
        Err(now)
    }

    /// Of two who store, call this and then load what the other has stored, at least one sees it.
    #[inline]
    pub fn meet() {
        fence(Ordering::SeqCst);
    }

    #[inline]
    fn word(&self, index: usize) -> Option<&AtomicU64> {
        match &self.place {
            WordsPlace::Local(words) => words.get(index),
            #[cfg(not(loom))]
            WordsPlace::Shared { first, .. } if index < self.len => {
                // SAFETY: `new` checked device and alignment; the index is inside the span, whose region is alive beside
                // the pointer; any bytes are a valid word, and all access to it is atomic, here and in other processes.
                Some(unsafe { first.add(index).as_ref() })
            }
            #[cfg(not(loom))]
            WordsPlace::Shared { .. } => None,
        }
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Words({})", self.len)
    }
}

/// Where a table lives, and what keeps it there.
#[derive(Clone)]
enum WordsPlace {
    Local(Arc<[AtomicU64]>),
    #[cfg(not(loom))]
    Shared {
        first: std::ptr::NonNull<AtomicU64>,
        #[allow(dead_code)]
        region: Arc<dyn Region>,
    },
}

// SAFETY: words are atomics only; the pointer is valid for as long as the region beside it lives, and regions may be sent
// and shared.
#[cfg(not(loom))]
unsafe impl Send for WordsPlace {}
// SAFETY: as above.
#[cfg(not(loom))]
unsafe impl Sync for WordsPlace {}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::host::Host;

    #[test]
    fn both_kinds_are_the_same() {
        let region = Host.alloc(64).unwrap();
        let shared = Words::new(&Span::whole(region.clone())).unwrap();
        for words in [shared, Words::local(8)] {
            assert_eq!(words.len(), 8);
            words.store(7, 5);
            assert_eq!((words.swap(7, 6), words.set(7, 9), words.add(7, 1), words.load(7)), (5, 6, 15, 16));
            assert_eq!(words.update(7, |word| Some(word * 2)), Ok(16));
            assert_eq!(words.update(7, |_| None), Err(32));
            // Outside there is nothing.
            words.store(8, 1);
            assert_eq!((words.load(8), words.swap(8, 1), words.add(8, 1)), (0, 0, 0));
            assert_eq!(words.update(8, Some), Err(0));
        }
        let odd = Span::new(region, 4..64).unwrap();
        assert!(Words::new(&odd).is_err());
    }
}
