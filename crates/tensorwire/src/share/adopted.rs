//! Memory of other allocators of this process that was offered in groups.
//!
//! No region lives as long as such memory does: each operation adopts what it needs by its address, and lets go of it. So it is
//! known by the numbers that the driver gave its allocations, and the driver is asked for them in every operation: what
//! was freed and allocated again may have the same address, but never the same numbers.
//!
//! Peers keep it mapped from one operation to the next. A mapping keeps memory from being free, even if its owner has freed it.
//! So the owner looks whether the numbers are still there: at one allocation in every operation, at all that lie where new
//! memory has come, and at all of them once a second ([`super::Share::look_after`]).

use std::collections::{BTreeMap, HashMap};
use std::ops::{Bound, Range};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use smallvec::SmallVec;
use tensorwire_device::secret::Id;
use tensorwire_device::sync::{AtomicUsize, Ordering};
use tensorwire_device::{DeviceId, Region};

use super::exports::Gone;

/// How many allocations are known at most. The ones that were first offered go first; peers then map them again.
const MOST: usize = 4096;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Adopted {
    table: Mutex<Table>,
    /// How many there are; looked at without the lock.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct Table {
    /// By number: in the order in which they were first offered.
    known: BTreeMap<u64, Known>,
    /// The one that was looked at last.
    hand: u64,
}

#[derive(Debug)]
struct Known {
    place: AdoptedPlace,
    /// As which it was adopted, by operations that may not be over. A peer may ask late, for an early one: whichever is there
    /// will do.
    regions: SmallVec<[Weak<dyn Region>; 2]>,
    /// In which domains peers may ask for it.
    domains: SmallVec<[Id; 2]>,
}

/// Where allocations lie, and their numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AdoptedPlace {
    pub(super) device: DeviceId,
    pub(super) addresses: Range<usize>,
    pub(super) ids: Vec<u64>,
}

impl AdoptedPlace {
    fn touches(&self, other: &Self) -> bool {
        self.device == other.device
            && self.addresses.start < other.addresses.end
            && other.addresses.start < self.addresses.end
    }
}

/// Which ones are looked at.
#[derive(Debug, Clone, Copy)]
pub(super) enum Looks<'a> {
    /// The next one.
    One,
    /// Those that lie where this one does.
    At(&'a AdoptedPlace),
    All,
}

impl Adopted {
    /// Peers of a domain may ask for the memory with this number from now on. Gives whether it is new.
    pub(super) fn offer(
        &self,
        number: u64,
        place: &AdoptedPlace,
        region: &Arc<dyn Region>,
        domain: Id,
    ) -> bool {
        let mut table = self.lock();
        if let Some(known) = table.known.get_mut(&number) {
            known.regions.retain(|region| region.strong_count() > 0);
            known.regions.push(Arc::downgrade(region));
            if !known.domains.contains(&domain) {
                known.domains.push(domain);
            }
            return false;
        }
        let known = Known {
            place: place.clone(),
            regions: SmallVec::from_iter([Arc::downgrade(region)]),
            domains: SmallVec::from_slice(&[domain]),
        };
        table.known.insert(number, known);
        self.count.store(table.known.len(), Ordering::Relaxed);
        true
    }

    /// A region of the memory with this number, if one is still there.
    pub(super) fn offered(&self, number: u64, domain: Id) -> Option<Arc<dyn Region>> {
        let table = self.lock();
        let known = table.known.get(&number).filter(|known| known.domains.contains(&domain))?;
        known.regions.iter().find_map(Weak::upgrade)
    }

    /// Nobody asks in this domain any more; gives the numbers that nobody asks for in any.
    pub(super) fn withdraw(&self, domain: Id) -> Vec<u64> {
        let mut table = self.lock();
        table.known.values_mut().for_each(|known| known.domains.retain(|other| *other != domain));
        let unasked = table.known.iter().filter(|(_, known)| known.domains.is_empty());
        let gone: Vec<u64> = unasked.map(|(number, _)| *number).collect();
        table.known.retain(|_, known| !known.domains.is_empty());
        self.count.store(table.known.len(), Ordering::Relaxed);
        gone
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Looks at some, and gives those that are gone. `ids_at` asks for the numbers of what lies somewhere; nothing if that
    /// cannot be told. It is called without the lock.
    pub(super) fn look(
        &self,
        looks: Looks<'_>,
        ids_at: impl Fn(&DeviceId, &Range<usize>) -> Option<Vec<u64>>,
    ) -> Vec<Gone> {
        if self.is_empty() {
            return Vec::new();
        }
        let chosen = self.lock().choose(looks);
        // Many lie in the same few allocations.
        let mut asked = HashMap::new();
        let gone = chosen.into_iter().filter(|(_, place)| {
            let there = asked
                .entry((place.device.clone(), place.addresses.clone()))
                .or_insert_with(|| ids_at(&place.device, &place.addresses));
            there.as_ref().is_some_and(|ids| *ids != place.ids)
        });
        let gone: Vec<u64> = gone.map(|(number, _)| number).collect();
        let mut table = self.lock();
        let mut gone: Vec<Gone> = gone.into_iter().filter_map(|number| table.remove(number)).collect();
        while table.known.len() > MOST
            && let Some(first) = table.known.keys().next().copied()
        {
            gone.extend(table.remove(first));
        }
        self.count.store(table.known.len(), Ordering::Relaxed);
        gone
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn choose(&mut self, looks: Looks<'_>) -> Vec<(u64, AdoptedPlace)> {
        let copy = |(number, known): (&u64, &Known)| (*number, known.place.clone());
        match looks {
            Looks::All => self.known.iter().map(copy).collect(),
            Looks::At(place) => self
                .known
                .iter()
                .filter(|(_, known)| known.place.touches(place) && known.place.ids != place.ids)
                .map(copy)
                .collect(),
            Looks::One => {
                let mut behind = self.known.range((Bound::Excluded(self.hand), Bound::Unbounded));
                let next = behind.next().or_else(|| self.known.iter().next()).map(copy);
                self.hand = next.as_ref().map_or(0, |(number, _)| *number);
                next.into_iter().collect()
            }
        }
    }

    fn remove(&mut self, number: u64) -> Option<Gone> {
        self.known.remove(&number).map(|known| (number, known.domains))
    }
}

#[cfg(test)]
mod tests {
    use tensorwire_device::Device;
    use tensorwire_device::host::Host;

    use super::*;

    const HERE: Id = Id([1; 16]);
    const THERE: Id = Id([2; 16]);

    fn place(start: usize, ids: &[u64]) -> AdoptedPlace {
        AdoptedPlace { device: DeviceId::Gpu([7; 16]), addresses: start..start + 100, ids: ids.to_vec() }
    }

    fn numbers(gone: &[Gone]) -> Vec<u64> {
        gone.iter().map(|(number, _)| *number).collect()
    }

    #[test]
    fn what_has_other_numbers_is_gone() {
        let adopted = Adopted::default();
        let region = Host.alloc(100).unwrap();
        assert!(adopted.offer(1, &place(1000, &[5]), &region, HERE));
        assert!(!adopted.offer(1, &place(1000, &[5]), &region, THERE));
        assert!(adopted.offer(2, &place(2000, &[6, 7]), &region, HERE));
        assert!(adopted.offered(1, THERE).is_some() && adopted.offered(2, THERE).is_none());
        let same =
            |_: &DeviceId, at: &Range<usize>| Some(if at.start == 1000 { vec![5] } else { vec![6, 7] });
        assert!(adopted.look(Looks::All, same).is_empty());
        // One that cannot be asked is left alone.
        assert!(adopted.look(Looks::All, |_, _| None).is_empty());
        // Other memory at the same address, or none, of which one look sees one.
        assert_eq!(numbers(&adopted.look(Looks::One, |_, _| Some(vec![9]))), [1]);
        assert_eq!(numbers(&adopted.look(Looks::One, |_, _| Some(Vec::new()))), [2]);
        assert!(adopted.is_empty());
    }

    #[test]
    fn new_memory_has_what_was_there_looked_at() {
        let adopted = Adopted::default();
        let region = Host.alloc(100).unwrap();
        for (number, start) in [(1, 1000), (2, 1050), (3, 1200)] {
            adopted.offer(number, &place(start, &[number]), &region, HERE);
        }
        let new = place(1040, &[9]);
        assert_eq!(numbers(&adopted.look(Looks::At(&new), |_, _| Some(Vec::new()))), [1, 2]);
        assert!(adopted.offered(3, HERE).is_some());
    }

    #[test]
    fn nobody_asks_in_a_group_that_is_closed() {
        let adopted = Adopted::default();
        let region = Host.alloc(100).unwrap();
        adopted.offer(1, &place(1000, &[5]), &region, HERE);
        adopted.offer(2, &place(2000, &[6]), &region, HERE);
        adopted.offer(2, &place(2000, &[6]), &region, THERE);
        assert_eq!(adopted.withdraw(HERE), [1]);
        assert!(adopted.offered(2, THERE).is_some() && adopted.offered(2, HERE).is_none());
        drop(region);
        assert!(adopted.offered(2, THERE).is_none(), "what was let go cannot be asked for");
        assert_eq!(adopted.withdraw(THERE), [2]);
    }

    /// A worker of a large group asks late for memory that a smaller group, which is over, has used meanwhile.
    #[test]
    fn who_asks_late_gets_what_is_still_in_use() {
        let adopted = Adopted::default();
        let regions = [0; 3].map(|_| Host.alloc(100).unwrap());
        for region in &regions {
            adopted.offer(1, &place(1000, &[5]), region, HERE);
        }
        let [first, second, third] = regions;
        drop((second, third));
        assert!(Arc::ptr_eq(&adopted.offered(1, HERE).unwrap(), &first));
        // What is over is not remembered for ever.
        let again = Host.alloc(100).unwrap();
        adopted.offer(1, &place(1000, &[5]), &again, HERE);
        assert_eq!(adopted.lock().known[&1].regions.len(), 2);
        drop(first);
        assert!(Arc::ptr_eq(&adopted.offered(1, HERE).unwrap(), &again));
    }

    #[test]
    fn the_first_ones_go_where_there_are_too_many() {
        let adopted = Adopted::default();
        let region = Host.alloc(100).unwrap();
        for number in 1..=MOST as u64 + 2 {
            adopted.offer(number, &place(number as usize * 100, &[number]), &region, HERE);
        }
        assert_eq!(numbers(&adopted.look(Looks::One, |_, _| None)), [1, 2]);
    }
}
