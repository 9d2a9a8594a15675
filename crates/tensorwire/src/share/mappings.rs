//! Memory of other processes that is mapped here: once, however often and by whomever it arrives.
//!
//! What was fetched is known by its lender and the lender's number of it. What makes two handles the same memory is another
//! question, and only what this process sees for itself answers it ([`Identity`]): a lender's word is taken for its own
//! memory only.
//!
//! Mappings of host memory go with their last user. Those of a GPU take long to make, so a few are kept behind it: the ones
//! that were used last, up to a number of bytes, because a mapping keeps the memory from its owner's GPU even when its
//! owner has freed it. What was lent is kept for a while, so that the next loan is quick.
//!
//! What is given up is handed to the caller ([`Unused`]), who drops it without the lock: unmapping may take long.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tensorwire_device::handle::{GpuHandle, Means};
use tensorwire_device::secret::Id;
use tensorwire_device::{Handle, Region};

use super::LenderId;
use crate::error::Result;

/// How long memory that was lent stays mapped behind its last use.
const LINGER: Duration = Duration::from_secs(2);

/// What makes two handles the same memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Identity {
    /// A file of this host, by the kernel's numbers.
    File(u64, u64),
    /// Memory of a GPU whose handles say which it is, by whichever way they came: the maker's numbers and the handles.
    Opaque([u8; 16], Vec<(u64, [u8; 64])>),
    /// Memory of a GPU that came as descriptors, which say nothing: by the process that exported it and where that was reached, the
    /// GPU, and that process's numbers. An address may come to mean other memory, a number does not.
    Theirs(LenderId, [u8; 16], Vec<u64>),
}

impl Identity {
    /// That of a handle from a process; nothing if it cannot be told.
    pub(super) fn of(exporter: LenderId, handle: &Handle) -> Result<Option<Self>> {
        let Handle::Gpu(GpuHandle { device, chunks, .. }) = handle else {
            return Ok(handle.key()?.map(|(file, number)| Self::File(file, number)));
        };
        let opaque = chunks.iter().map(|chunk| match &chunk.means {
            Means::Legacy(handle) | Means::Fabric(handle) => Some((chunk.id, *handle)),
            // Descriptors, and what newer versions may bring.
            _ => None,
        });
        Ok(Some(match opaque.collect::<Option<Vec<_>>>() {
            Some(handles) => Self::Opaque(*device, handles),
            None => Self::Theirs(exporter, *device, chunks.iter().map(|chunk| chunk.id).collect()),
        }))
    }
}

/// What was given up. The caller drops it when it holds no lock.
pub(super) type Unused = Vec<Arc<dyn Region>>;

/// What becomes of a mapping when nobody uses it any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    /// It goes.
    Not,
    /// It stays as long as there is room.
    Room,
    /// It stays for a while.
    Linger,
}

/// The mappings of a process.
#[derive(Debug)]
pub(super) struct Mappings {
    known: HashMap<Identity, Weak<dyn Region>>,
    /// What was fetched, by its lender and the lender's number of it.
    fetched: HashMap<(LenderId, u64), Weak<dyn Region>>,
    /// Those that are kept as long as there is room, the last used at the end.
    roomed: Vec<Kept>,
    /// The most bytes of them.
    most: usize,
    /// Those that linger, by where their region is.
    lingering: HashMap<usize, Kept>,
}

#[derive(Debug)]
struct Kept {
    /// From where it came last.
    lender: Id,
    region: Arc<dyn Region>,
    used: Instant,
}

/// From how many on names of what is gone are looked for.
const MANY: usize = 256;

impl Mappings {
    pub(super) fn new(most: usize) -> Self {
        Self {
            known: HashMap::new(),
            fetched: HashMap::new(),
            roomed: Vec::new(),
            most,
            lingering: HashMap::new(),
        }
    }

    /// The mapping of `len` bytes that is there, or a new one; and what had to go for it.
    pub(super) fn get(
        &mut self,
        identity: Identity,
        len: usize,
        (lender, keep): (Id, Keep),
        map: impl FnOnce() -> Result<Arc<dyn Region>>,
    ) -> Result<(Arc<dyn Region>, Unused)> {
        // The promise of this handle is checked like that of the first.
        let known = self.known.get(&identity).and_then(Weak::upgrade).filter(|region| region.len() == len);
        let region = match known {
            Some(region) => region,
            None => {
                self.known.retain(|_, region| region.strong_count() > 0);
                let region = map()?;
                self.known.insert(identity, Arc::downgrade(&region));
                region
            }
        };
        let gone = self.keep(lender, &region, keep);
        Ok((region, gone))
    }

    /// Notes that a mapping is what a lender calls by a number.
    pub(super) fn note(&mut self, lender: LenderId, number: u64, region: &Arc<dyn Region>) {
        if self.fetched.len() >= MANY && self.fetched.len().is_power_of_two() {
            self.fetched.retain(|_, region| region.strong_count() > 0);
        }
        self.fetched.insert((lender, number), Arc::downgrade(region));
    }

    /// What a lender calls by a number, if it is mapped. It is used now.
    pub(super) fn find(&mut self, lender: LenderId, number: u64) -> Option<Arc<dyn Region>> {
        let region = self.fetched.get(&(lender, number))?.upgrade()?;
        if let Some(kept) = self.lingering.get_mut(&address(&region)) {
            (kept.used, kept.lender) = (Instant::now(), lender.identity);
        }
        Some(region)
    }

    /// Gives up what is kept of a process that is gone, or that takes its memory back.
    #[must_use]
    pub(super) fn forget(&mut self, exporter: Id) -> Unused {
        let gone = self.roomed.extract_if(.., |kept| kept.lender == exporter);
        gone.map(|kept| kept.region).collect()
    }

    /// Gives up what lingers and has not been used for a while, and that of processes that are gone or need their memory.
    #[must_use]
    pub(super) fn give_up(&mut self, now: Instant, let_go: impl Fn(Id) -> bool) -> Unused {
        // What is in use is looked at again later.
        let due = |kept: &Kept| kept.used + LINGER <= now;
        let in_use = self.lingering.values_mut().filter(|kept| due(kept) && !kept.is_idle());
        in_use.for_each(|kept| kept.used = now);
        self.take(|kept| kept.is_idle() && (due(kept) || let_go(kept.lender)))
    }

    /// Gives up all that lingers of a process and that nobody uses.
    #[must_use]
    pub(super) fn give_up_of(&mut self, lender: Id) -> Unused {
        self.take(|kept| kept.lender == lender && kept.is_idle())
    }

    /// Gives up all that lingers.
    #[must_use]
    pub(super) fn give_up_all(&mut self) -> Unused {
        self.take(|_| true)
    }

    /// Whether a region is one that lingers behind its last use: one that is in use always is.
    pub(super) fn lingers(&self, region: &Arc<dyn Region>) -> bool {
        self.lingering.contains_key(&address(region))
    }

    /// When the next mapping may be given up.
    pub(super) fn next(&self) -> Option<Instant> {
        self.lingering.values().map(|kept| kept.used + LINGER).min()
    }

    /// How many are in use or kept, and their bytes.
    pub(super) fn sum(&self) -> (usize, usize) {
        let live = self.known.values().filter_map(Weak::upgrade);
        live.fold((0, 0), |(count, bytes), region| (count + 1, bytes + region.len()))
    }

    /// Keeps a mapping; gives those that are too much.
    fn keep(&mut self, lender: Id, region: &Arc<dyn Region>, keep: Keep) -> Unused {
        let kept = Kept { lender, region: region.clone(), used: Instant::now() };
        match keep {
            Keep::Not => Vec::new(),
            Keep::Linger => {
                // Which may have been kept by another lender.
                self.lingering.insert(address(region), kept).map(|kept| kept.region).into_iter().collect()
            }
            Keep::Room => {
                self.roomed.retain(|kept| !Arc::ptr_eq(&kept.region, region));
                if region.len() > self.most {
                    return Vec::new();
                }
                self.roomed.push(kept);
                let mut bytes: usize = self.roomed.iter().map(|kept| kept.region.len()).sum();
                let first = self.roomed.iter().take_while(|kept| {
                    let goes = bytes > self.most;
                    bytes -= kept.region.len();
                    goes
                });
                let first = first.count();
                self.roomed.drain(..first).map(|kept| kept.region).collect()
            }
        }
    }

    fn take(&mut self, which: impl Fn(&Kept) -> bool) -> Unused {
        self.lingering.extract_if(|_, kept| which(kept)).map(|(_, kept)| kept.region).collect()
    }
}

impl Kept {
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.region) == 1
    }
}

fn address(region: &Arc<dyn Region>) -> usize {
    Arc::as_ptr(region).cast::<()>() as usize
}

#[cfg(test)]
mod tests {
    use tensorwire_device::{Device, host::Host};

    use super::*;

    fn lender(identity: u8, address: u8) -> LenderId {
        LenderId { identity: Id([identity; 16]), address: Id([address; 16]) }
    }

    fn gpu(process: u8, number: u64) -> Identity {
        Identity::Theirs(lender(process, 0), [9; 16], vec![number])
    }

    /// Gives whether it had to be mapped.
    fn get(mappings: &mut Mappings, identity: Identity, len: usize) -> (bool, Arc<dyn Region>) {
        let mut mapped = false;
        let keep = match identity {
            Identity::Theirs(process, ..) => (process.identity, Keep::Room),
            _ => (Id([0; 16]), Keep::Not),
        };
        let region = mappings.get(identity, len, keep, || {
            mapped = true;
            Ok(Host.alloc(len)?)
        });
        (mapped, region.unwrap().0)
    }

    #[test]
    fn what_is_in_use_is_mapped_once() {
        let mut mappings = Mappings::new(0);
        for identity in [Identity::File(1, 2), gpu(1, 1)] {
            let (first, region) = get(&mut mappings, identity.clone(), 100);
            let (second, again) = get(&mut mappings, identity.clone(), 100);
            assert!(first && !second && Arc::ptr_eq(&region, &again));
            // Of another length it is other memory, or a lie.
            assert!(get(&mut mappings, identity.clone(), 50).0);
            drop((region, again));
            assert!(get(&mut mappings, identity, 100).0, "nothing is kept with room for no bytes");
        }
    }

    #[test]
    fn the_last_used_of_a_gpu_are_kept() {
        let mut mappings = Mappings::new(250);
        for number in [1, 2, 1, 3] {
            get(&mut mappings, gpu(7, number), 100);
        }
        // 1 was used after 2, which had to go.
        assert_eq!(mappings.sum(), (2, 200));
        assert!(!get(&mut mappings, gpu(7, 1), 100).0 && !get(&mut mappings, gpu(7, 3), 100).0);
        assert!(get(&mut mappings, gpu(7, 2), 100).0);
        // One that is larger than all room is not kept, and host memory goes with its last user.
        get(&mut mappings, gpu(7, 4), 300);
        get(&mut mappings, Identity::File(1, 1), 10);
        assert_eq!(mappings.sum(), (2, 200));
    }

    #[test]
    fn a_process_is_forgotten() {
        let mut mappings = Mappings::new(1000);
        get(&mut mappings, gpu(1, 1), 100);
        get(&mut mappings, gpu(2, 1), 100);
        let (_, used) = get(&mut mappings, gpu(1, 2), 100);
        drop(mappings.forget(Id([1; 16])));
        assert_eq!(mappings.sum(), (2, 200));
        drop(used);
        assert_eq!(mappings.sum(), (1, 100));
    }

    #[test]
    fn what_cannot_be_mapped_is_not_remembered() {
        let mut mappings = Mappings::new(1000);
        let keep = (Id([1; 16]), Keep::Room);
        assert!(mappings.get(gpu(1, 1), 10, keep, || Err(crate::Error::misuse("no"))).is_err());
        assert_eq!(mappings.sum(), (0, 0));
        assert!(get(&mut mappings, gpu(1, 1), 10).0);
    }

    /// A number means something with its lender only.
    #[test]
    fn a_lender_cannot_name_the_memory_of_another() {
        let mut mappings = Mappings::new(0);
        let (_, region) = get(&mut mappings, Identity::File(1, 2), 100);
        mappings.note(lender(1, 1), 7, &region);
        assert!(mappings.find(lender(1, 1), 7).is_some());
        for other in [lender(2, 1), lender(1, 2), lender(2, 2)] {
            assert!(mappings.find(other, 7).is_none());
        }
        // Nor by numbers of a GPU, whatever identity it claims.
        let theirs = |address| Identity::Theirs(lender(1, address), [9; 16], vec![3]);
        let (_, first) = get(&mut mappings, theirs(1), 100);
        let (mapped, second) = get(&mut mappings, theirs(2), 100);
        assert!(mapped && !Arc::ptr_eq(&first, &second));
    }

    #[test]
    fn what_was_lent_lingers() {
        let mut mappings = Mappings::new(0);
        let (one, two) = (Id([1; 16]), Id([2; 16]));
        let mut map = |number, lender| {
            let new = || Ok(Host.alloc(10)?);
            mappings.get(Identity::File(1, number), 10, (lender, Keep::Linger), new).unwrap().0
        };
        let used = map(1, one);
        drop((map(2, one), map(3, two), map(4, two)));
        let now = Instant::now();
        assert_eq!(mappings.give_up(now, |_| false).len(), 0);
        assert_eq!(mappings.give_up(now, |lender| lender == one).len(), 1, "the other one is in use");
        assert_eq!(mappings.give_up_of(two).len(), 2);
        assert!(mappings.next().is_some_and(|next| next > now));
        drop(used);
        // It was looked at when it was in use.
        assert_eq!(mappings.give_up(now + 2 * LINGER, |_| false).len(), 1);
        assert_eq!((mappings.next(), mappings.sum()), (None, (0, 0)));
    }
}
