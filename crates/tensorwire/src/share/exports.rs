//! What this process exports: a number for each allocation, in which domains peers may ask for it, and when it is gone.
//!
//! An *allocation* is what the kernel or the driver shares as a whole: a memfd, a file, allocations of a GPU. It is told from
//! others by the numbers that they gave it ([`RegionPlace::ids`]). A *root* is a region of this process that lies in one and is a part
//! of no other region. Memory that tensorwire allocated has one root, and is gone with it. Memory of other allocators may have
//! many, one after the other, because each grant of it makes one: its number is remembered when the last of them is gone, so
//! that a process that has mapped it knows it again.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use smallvec::SmallVec;
use tensorwire_device::RegionPlace;
use tensorwire_device::secret::Id;
use tensorwire_device::sync::{AtomicUsize, Ordering};
use tensorwire_device::{DeviceId, Region, Span};

use super::{root, start_in};
use crate::error::{Error, Result};

/// An allocation as other processes hear of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Allocation {
    /// Its number in the process that exports it; no other allocation of that process ever has it.
    pub(crate) number: u64,
    pub(crate) device: DeviceId,
    /// All of its bytes.
    pub(crate) len: usize,
}

/// What tells an allocation from others of this process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) device: DeviceId,
    pub(super) ids: Vec<u64>,
}

/// A number whose memory is gone, and the domains in which it was known.
pub(super) type Gone = (u64, SmallVec<[Id; 2]>);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Exports {
    table: Mutex<Table>,
    /// How many roots there are; looked at without the lock.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct Table {
    /// In the order of their addresses, which is what `Arc`s of them point to.
    roots: Vec<Root>,
    /// Those addresses: every operation looks for one.
    addresses: Vec<usize>,
    allocations: HashMap<Key, Known>,
    keys: HashMap<u64, Key>,
    /// Allocations without a root, the latest at the end.
    idle: VecDeque<(Key, u64)>,
    /// The last number given.
    last: u64,
    /// The root that was looked at last.
    hand: usize,
}

#[derive(Debug)]
struct Root {
    /// It keeps its address from being used again.
    region: Weak<dyn Region>,
    number: u64,
    /// Where it begins in the allocation, and all of the allocation's bytes.
    place: (usize, usize),
    /// Whether tensorwire allocated it: with it, its memory is gone.
    ours: bool,
    /// In which domains peers may ask for it.
    domains: SmallVec<[Id; 2]>,
}

#[derive(Debug)]
struct Known {
    number: u64,
    /// The addresses of its roots.
    roots: Vec<usize>,
    /// How often it has lost its last root.
    lost: u64,
}

/// How many allocations without a root are remembered.
const IDLE: usize = 4096;

/// How many roots a new one has looked at: more than one, so that what is gone does not pile up.
const GLANCE: usize = 2;

fn address(region: &Arc<dyn Region>) -> usize {
    Arc::as_ptr(region).cast::<()>() as usize
}

/// Where a region lies; an error says why nobody else can map it.
pub(super) fn place_of(region: &Arc<dyn Region>) -> Result<RegionPlace> {
    region.place()?.ok_or_else(|| match region.export() {
        Err(error) => error.into(),
        Ok(_) => Error::bug(format!("{region:?} cannot be told from other memory")),
    })
}

impl Exports {
    /// The allocation that a span lies in, and where in it the span begins. It gets its number if it has none. The second
    /// result is what was found to be gone. `is_mapping` tells memory of other processes that was mapped as a whole.
    pub(super) fn name(
        &self,
        span: &Span,
        is_mapping: impl FnOnce(&Arc<dyn Region>) -> bool,
    ) -> Result<((Allocation, usize), Vec<Gone>)> {
        let root = root(span.region());
        let device = root.device();
        if root.shareable()
            && let Some((number, start, len)) = self.lock().known(root)
        {
            return Ok(((Allocation { number, device, len }, start + start_in(root, span)), Vec::new()));
        }
        // Memory of other allocators is asked each time: at the same address there may be other memory by now.
        let RegionPlace { ids, offset, whole, .. } = place_of(span.region())?;
        // A driver may see more than its maker did around memory that it has opened; onward goes what came.
        let came = is_mapping(root).then(|| (start_in(root, span), root.len()));
        let (start, len) = came.unwrap_or((offset + span.offset(), whole));
        let key = Key { device: device.clone(), ids };
        let (number, gone) = self.number(root, key, start.saturating_sub(start_in(root, span)), len, None);
        Ok(((Allocation { number, device, len }, start), gone))
    }

    /// The number of a root, if peers of a domain may ask for it already: the usual case, in every operation.
    #[inline]
    pub(super) fn number_in(&self, root: &Arc<dyn Region>, domain: Id) -> Option<u64> {
        let table = self.lock();
        let root = table.roots.get(table.at(address(root)).ok()?)?;
        root.domains.contains(&domain).then_some(root.number)
    }

    /// The number of a root that tensorwire allocated, which peers of a domain may ask for from now on.
    pub(super) fn offer(&self, root: &Arc<dyn Region>, domain: Id) -> Result<(u64, Vec<Gone>)> {
        let RegionPlace { ids, offset, whole, .. } = place_of(root)?;
        Ok(self.number(root, Key { device: root.device(), ids }, offset, whole, Some(domain)))
    }

    /// The number of an allocation of another allocator. It stays until [`Exports::forget`].
    pub(super) fn number_of(&self, key: Key) -> u64 {
        self.lock().number_of(&key)
    }

    /// Allocations that are gone.
    pub(super) fn forget(&self, numbers: impl IntoIterator<Item = u64>) {
        let mut table = self.lock();
        numbers.into_iter().for_each(|number| table.forget(number));
    }

    fn number(
        &self,
        root: &Arc<dyn Region>,
        key: Key,
        start: usize,
        len: usize,
        domain: Option<Id>,
    ) -> (u64, Vec<Gone>) {
        let mut table = self.lock();
        let number = table.number(root, key, start, len, domain);
        let gone = table.release(GLANCE);
        self.count.store(table.roots.len(), Ordering::Relaxed);
        (number, gone)
    }

    /// A root by its number, if peers of this domain may have it and it is still there.
    pub(super) fn offered(&self, number: u64, domain: Id) -> Option<Arc<dyn Region>> {
        let table = self.lock();
        let roots = &table.allocations.get(table.keys.get(&number)?)?.roots;
        roots.iter().find_map(|address| {
            let root = &table.roots[table.at(*address).ok()?];
            root.domains.contains(&domain).then(|| root.region.upgrade()).flatten()
        })
    }

    /// Offers in one domain what is offered in another.
    pub(super) fn inherit(&self, from: Id, to: Id) {
        for root in self.lock().roots.iter_mut().filter(|root| root.domains.contains(&from)) {
            if !root.domains.contains(&to) {
                root.domains.push(to);
            }
        }
    }

    /// Nobody asks in this domain any more.
    pub(super) fn withdraw(&self, domain: Id) {
        self.lock().roots.iter_mut().for_each(|root| root.domains.retain(|other| *other != domain));
    }

    /// A root that covers these bytes of an allocation, and where it begins there.
    pub(super) fn find(&self, key: &Key, range: &Range<usize>) -> Option<(Arc<dyn Region>, usize)> {
        let table = self.lock();
        table.allocations.get(key)?.roots.iter().rev().find_map(|address| {
            let root = &table.roots[table.at(*address).ok()?];
            let (start, region) = (root.place.0, root.region.upgrade()?);
            let inside = range.start >= start && range.end - start <= region.len();
            inside.then_some((region, start))
        })
    }

    /// Looks at the next few roots, and gives what is gone.
    pub(super) fn release(&self, looks: usize) -> Vec<Gone> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        let mut table = self.lock();
        let gone = table.release(looks);
        self.count.store(table.roots.len(), Ordering::Relaxed);
        gone
    }

    /// How many roots there are.
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Where a root is in the list, or belongs.
    fn at(&self, address: usize) -> Result<usize, usize> {
        self.addresses.binary_search(&address)
    }

    /// The number of a root that is known, where it begins in the allocation, and the bytes of that.
    fn known(&self, region: &Arc<dyn Region>) -> Option<(u64, usize, usize)> {
        let root = &self.roots[self.at(address(region)).ok()?];
        Some((root.number, root.place.0, root.place.1))
    }

    /// The number of an allocation of `len` bytes, in which a root begins at `start`. With a domain, peers may ask for it there.
    fn number(
        &mut self,
        region: &Arc<dyn Region>,
        key: Key,
        start: usize,
        len: usize,
        domain: Option<Id>,
    ) -> u64 {
        let address = address(region);
        let number = self.number_of(&key);
        if let Some(known) = self.allocations.get_mut(&key)
            && !known.roots.contains(&address)
        {
            known.roots.push(address);
        }
        let at = match self.at(address) {
            Ok(at) => at,
            Err(at) => {
                let (region, ours) = (Arc::downgrade(region), region.shareable());
                let root = Root { region, number, place: (start, len), ours, domains: SmallVec::new() };
                self.roots.insert(at, root);
                self.addresses.insert(at, address);
                at
            }
        };
        let root = &mut self.roots[at];
        let before = std::mem::replace(&mut root.number, number);
        root.place = (start, len);
        if let Some(domain) = domain.filter(|domain| !root.domains.contains(domain)) {
            root.domains.push(domain);
        }
        if before != number {
            // Other memory has come to where it was.
            self.forget_root(before, address, false);
        }
        number
    }

    /// The number of an allocation, which gets one if it has none.
    fn number_of(&mut self, key: &Key) -> u64 {
        if let Some(known) = self.allocations.get(key) {
            return known.number;
        }
        self.last += 1;
        self.keys.insert(self.last, key.clone());
        self.allocations.insert(key.clone(), Known { number: self.last, roots: Vec::new(), lost: 0 });
        self.last
    }

    /// An allocation is gone, unless it has a root.
    fn forget(&mut self, number: u64) {
        let Some(key) = self.keys.get(&number) else { return };
        if self.allocations.get(key).is_some_and(|known| known.roots.is_empty()) {
            self.allocations.remove(key);
            self.keys.remove(&number);
        }
    }

    fn release(&mut self, looks: usize) -> Vec<Gone> {
        let mut gone = Vec::new();
        for _ in 0..looks.min(self.roots.len()) {
            self.hand = self.hand.checked_sub(1).unwrap_or(self.roots.len().saturating_sub(1));
            if self.roots.get(self.hand).is_none_or(|root| root.region.strong_count() > 0) {
                continue;
            }
            let Root { number, ours, domains, .. } = self.roots.remove(self.hand);
            let address = self.addresses.remove(self.hand);
            self.forget_root(number, address, ours);
            if !domains.is_empty() {
                gone.push((number, domains));
            }
        }
        gone
    }

    /// An allocation has lost a root, and with `over` all of its memory.
    fn forget_root(&mut self, number: u64, address: usize, over: bool) {
        let Some(key) = self.keys.get(&number) else { return };
        let Some(known) = self.allocations.get_mut(key) else { return };
        known.roots.retain(|other| *other != address);
        if !known.roots.is_empty() {
            return;
        }
        if over {
            self.allocations.remove(key);
            self.keys.remove(&number);
            return;
        }
        known.lost += 1;
        self.idle.push_back((key.clone(), known.lost));
        while self.idle.len() > IDLE
            && let Some((key, lost)) = self.idle.pop_front()
        {
            // One that was used since is in the list again, or has a root.
            if let Some(known) =
                self.allocations.get(&key).filter(|it| it.lost == lost && it.roots.is_empty())
            {
                self.keys.remove(&known.number);
                self.allocations.remove(&key);
            }
        }
    }
}
