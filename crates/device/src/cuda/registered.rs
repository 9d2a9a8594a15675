//! Host memory that the GPU reaches: flags, and what is copied from and to. Registered once, when it is first used.
//!
//! Whoever queues work on such memory holds its [`Registered`] until the work is done. What nobody holds is taken back by
//! the reaper, at a moment when no stream waits: memory of ours once its region is not used either, memory of others at
//! once.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::{Address, Driver};
use crate::device::Region;
use crate::error::{Error, Result};

/// What memory is registered in multiples of.
const PAGE: usize = 4096;

/// Registered memory by its address.
#[derive(Default)]
pub(super) struct HostMemory(Mutex<BTreeMap<usize, Arc<Registered>>>);

/// Memory that the GPU reaches as long as somebody holds this.
pub(super) struct Registered {
    len: usize,
    on_device: Address,
    region: Arc<dyn Region>,
}

impl Registered {
    /// Whether it is not ours, and shall go as soon as nobody uses it.
    pub(super) fn is_foreign(&self) -> bool {
        !self.region.cacheable()
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registered({} bytes of {:?})", self.len, self.region)
    }
}

impl HostMemory {
    /// Where the GPU sees `len` bytes at `addr`, which lie in a region of host memory; and what to hold as long as it
    /// uses them. The thread is in the GPU's context.
    pub(super) fn reach(
        &self,
        driver: &Driver,
        region: &Arc<dyn Region>,
        addr: usize,
        len: usize,
    ) -> Result<(Address, Option<Arc<Registered>>)> {
        let mut known = self.lock();
        if let Some((start, there)) = known.range(..=addr).next_back()
            && addr + len <= start + there.len
        {
            return Ok((there.on_device + (addr - start) as Address, Some(there.clone())));
        }
        // All of what it is a part of: parts may share pages.
        let mut region = region;
        while let Some(whole) = region.whole() {
            region = whole;
        }
        let start = region.addr() & !(PAGE - 1);
        let end = (region.addr() + region.len()).next_multiple_of(PAGE);
        let none = |have: String| Error::Unsupported {
            what: format!("access of a GPU to {len} bytes of host memory"),
            need: "memory that the driver can register, whose pages are nobody else's".into(),
            have,
        };
        let meets = known.range(..end).next_back().is_some_and(|(at, there)| at + there.len > start);
        if meets {
            return Err(none("pages that other memory is registered with".into()));
        }
        // SAFETY: pages of a region that is kept alive in the table until they are taken back.
        match unsafe { driver.register(start, end - start) } {
            Ok(()) => {}
            // By its owner, who keeps it so, as it keeps the memory: what counts is that all of it can be reached.
            Err(Error::Device { name, .. }) if name == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" => {
                let (first, last) = (driver.seen_at(addr), driver.seen_at(addr + len.saturating_sub(1)));
                return match (first, last) {
                    (Ok(first), Ok(last)) if last - first == len.saturating_sub(1) as Address => {
                        Ok((first, None))
                    }
                    _ => Err(none("memory of which a part is registered by others".into())),
                };
            }
            Err(error) => return Err(none(error.to_string())),
        }
        let on_device = driver.seen_at(start).inspect_err(|_| {
            // SAFETY: just registered, and nobody knows of it.
            let _ = unsafe { driver.unregister(start) };
        })?;
        let there = Arc::new(Registered { len: end - start, on_device, region: region.clone() });
        known.insert(start, there.clone());
        Ok((on_device + (addr - start) as Address, Some(there)))
    }

    /// Takes back what nobody uses. Gives what kept it there. The caller drops that when it holds no lock.
    ///
    /// # Safety
    /// The thread is in the GPU's context, and no stream waits.
    pub(super) unsafe fn sweep(&self, driver: &Driver) -> Vec<Arc<Registered>> {
        let mut known = self.lock();
        let starts: Vec<usize> =
            known.iter().filter(|(_, there)| is_unused(there)).map(|(start, _)| *start).collect();
        let gone = starts.into_iter().filter_map(|start| {
            // SAFETY: registered by `reach`; nobody holds it, and nobody can get hold of it while the table is locked.
            let taken = unsafe { driver.unregister(start) };
            if let Err(error) = taken {
                tracing::debug!(%error, "giving host memory back");
            }
            known.remove(&start)
        });
        gone.collect()
    }

    /// Whether anything is registered that nobody uses.
    pub(super) fn is_swept(&self) -> bool {
        !self.lock().values().any(is_unused)
    }

    /// How much is registered: places and bytes.
    pub(super) fn sum(&self) -> (usize, usize) {
        let known = self.lock();
        (known.len(), known.values().map(|there| there.len).sum())
    }

    /// Gives everything back.
    ///
    /// # Safety
    /// No queue uses any of it, and the thread is in the context.
    pub(super) unsafe fn let_go(&self, driver: &Driver) {
        let all = std::mem::take(&mut *self.lock());
        for start in all.keys() {
            // SAFETY: registered by `reach`, and not used, as the caller promised.
            let _ = unsafe { driver.unregister(*start) };
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Arc<Registered>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether nobody uses it: no work, and of memory that is ours nobody at all.
fn is_unused(there: &Arc<Registered>) -> bool {
    Arc::strong_count(there) == 1 && (!there.region.cacheable() || Arc::strong_count(&there.region) == 1)
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (places, bytes) = self.sum();
        write!(f, "HostMemory({places} places, {bytes} bytes)")
    }
}

#[cfg(test)]
mod tests {
    use super::super::driver::script::{calls, driver};
    use super::*;
    use crate::device::Device;
    use crate::host::Host;

    fn registered(calls: &[&str]) -> (usize, usize) {
        let count = |name: &str| calls.iter().filter(|call| **call == name).count();
        (count("cuMemHostRegister_v2"), count("cuMemHostUnregister"))
    }

    #[test]
    fn memory_is_registered_once_and_goes_when_nobody_uses_it() {
        let (driver, hosts) = (driver(), HostMemory::default());
        let region = Host.alloc(3 * PAGE).unwrap();
        calls();
        let (_, first) = hosts.reach(driver, &region, region.addr(), 10).unwrap();
        let (_, second) = hosts.reach(driver, &region, region.addr() + 5000, 100).unwrap();
        assert_eq!(registered(&calls()), (1, 0));
        // SAFETY: the driver is a script.
        let sweep = || unsafe { hosts.sweep(driver) }.len();
        assert_eq!(sweep(), 0, "two have it");
        drop((first, second));
        assert_eq!(sweep(), 0, "the region is in use, and may be used again");
        let weak = Arc::downgrade(&region);
        drop(region);
        // It comes back to life: what is registered stays so.
        let (_, third) =
            hosts.reach(driver, &weak.upgrade().unwrap(), weak.upgrade().unwrap().addr(), 1).unwrap();
        assert_eq!((sweep(), registered(&calls())), (0, (0, 0)));
        drop(third);
        assert_eq!((sweep(), registered(&calls())), (1, (0, 1)));
        assert!(weak.upgrade().is_none() && hosts.sum() == (0, 0));
    }

    #[test]
    fn memory_of_others_goes_at_once_and_shares_no_pages() {
        let (driver, hosts) = (driver(), HostMemory::default());
        let pages = Host.alloc(4 * PAGE).unwrap();
        let part = |start: usize, len: usize| {
            // SAFETY: memory that `pages` holds; nobody refers to it.
            unsafe { Host.adopt(pages.addr() + start, len, Box::new(pages.clone())) }.unwrap()
        };
        let (one, other) = (part(100, PAGE), part(PAGE + 2000, PAGE));
        let (_, held) = hosts.reach(driver, &one, one.addr(), PAGE).unwrap();
        // It begins in a page that is registered, and ends in one that is not.
        let refused = hosts.reach(driver, &other, other.addr(), PAGE).unwrap_err();
        assert!(refused.to_string().contains("other memory is registered with"), "{refused}");
        drop(held);
        assert!(!hosts.is_swept());
        // SAFETY: the driver is a script.
        assert_eq!(unsafe { hosts.sweep(driver) }.len(), 1);
        assert!(hosts.is_swept() && hosts.reach(driver, &other, other.addr(), PAGE).is_ok());
    }

    /// A part is registered with all of what it is a part of.
    #[test]
    fn parts_are_registered_as_a_whole() {
        let (driver, hosts) = (driver(), HostMemory::default());
        let whole = Host.alloc(8 * PAGE).unwrap();
        let part = |start| crate::subregion::part(whole.clone(), start..start + 100).unwrap();
        let (first, second) = (part(0), part(200));
        calls();
        hosts.reach(driver, &first, first.addr(), 100).unwrap();
        hosts.reach(driver, &second, second.addr(), 100).unwrap();
        assert_eq!((registered(&calls()).0, hosts.sum()), (1, (1, 8 * PAGE)));
    }
}
