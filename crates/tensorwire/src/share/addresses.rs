//! Shared memory by its address: for callers who have a pointer, and want to know whether peers can map what is there.
//!
//! One address space holds the memory of the host and of all GPUs.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, Weak};

use tensorwire_device::sync::{AtomicUsize, Ordering};
use tensorwire_device::{Region, Span};

/// From how many on those that are gone are looked for.
const MANY: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    noted: RwLock<Noted>,
    /// How many there are; looked at without the lock.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct Noted {
    /// By address; memory that was lent may lie in other memory, and the same may be there several times.
    regions: BTreeMap<(usize, u64), (usize, Weak<dyn Region>)>,
    /// How often something was noted.
    times: u64,
    /// No region is longer.
    longest: usize,
    /// How many there were after those that are gone had been taken out.
    tidied: usize,
}

impl Addresses {
    /// Has a region found.
    pub(super) fn add(&self, region: &Arc<dyn Region>) {
        let mut noted = self.noted.write().unwrap_or_else(PoisonError::into_inner);
        let noted = &mut *noted;
        if noted.regions.len() >= MANY.max(noted.tidied * 2) {
            noted.regions.retain(|_, (_, region)| region.strong_count() > 0);
            noted.longest = noted.regions.values().map(|(len, _)| *len).max().unwrap_or(0);
            noted.tidied = noted.regions.len();
        }
        noted.times += 1;
        noted.regions.insert((region.addr(), noted.times), (region.len(), Arc::downgrade(region)));
        noted.longest = noted.longest.max(region.len());
        self.count.store(noted.regions.len(), Ordering::Release);
    }

    /// The memory at an address.
    pub(super) fn find(&self, address: usize, len: usize) -> Option<Span> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let end = address.checked_add(len)?;
        let noted = self.noted.read().unwrap_or_else(PoisonError::into_inner);
        for ((start, _), (long, region)) in noted.regions.range(..=(address, u64::MAX)).rev() {
            if start.saturating_add(noted.longest) < end {
                return None;
            }
            if start + long >= end
                && let Some(region) = region.upgrade()
            {
                return Span::new(region, address - start..end - start).ok();
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use tensorwire_device::subregion::part;
    use tensorwire_device::{Device, host::Host};

    use super::*;

    #[test]
    fn memory_is_found_by_its_address() {
        let addresses = Addresses::default();
        let region = Host.alloc(4096).unwrap();
        let start = region.addr();
        assert!(addresses.find(start, 1).is_none());
        addresses.add(&region);
        addresses.add(&part(region.clone(), 100..200).unwrap());
        for (at, len) in [(0, 4096), (150, 100), (100, 100), (4095, 1)] {
            let found = addresses.find(start + at, len).unwrap();
            assert_eq!((found.region().addr() + found.offset(), found.len()), (start + at, len));
        }
        assert!(addresses.find(start + 4000, 97).is_none() && addresses.find(start - 1, 2).is_none());
        assert!(addresses.find(usize::MAX, 2).is_none());
        drop(region);
        assert!(addresses.find(start, 1).is_none());
    }

    #[test]
    fn what_is_gone_does_not_pile_up() {
        let addresses = Addresses::default();
        let kept = Host.alloc(64).unwrap();
        addresses.add(&kept);
        (0..1000).for_each(|_| addresses.add(&part(kept.clone(), 1..2).unwrap()));
        assert!(addresses.count.load(Ordering::Relaxed) <= MANY);
        assert!(addresses.find(kept.addr() + 1, 1).is_some());
    }
}
