//! Memory of other processes that is mapped here: once, however often it arrives.
//!
//! Mappings of host memory go with their last user. Those of a GPU take long to make, so a few are kept behind it: the ones
//! that were used last, up to a number of bytes, because a mapping keeps the memory from its owner's GPU even when its
//! owner has freed it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

use tensorwire_device::Region;
use tensorwire_device::secret::Id;

use crate::error::Result;

/// What makes two handles the same memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Key {
    /// A file of this host.
    File(u64, u64),
    /// Allocations of a GPU, by the process that exported them, the GPU, and that process's numbers of them: an address may
    /// come to mean other memory, a number does not.
    Gpu(Id, [u8; 16], Vec<u64>),
    /// An allocation that was lent, by the name that its owner gave it.
    Name(Id),
}

/// The mappings of a process.
#[derive(Debug)]
pub(super) struct Mappings {
    known: HashMap<Key, Weak<dyn Region>>,
    /// Kept ones, the last used at the end.
    kept: VecDeque<(Key, Arc<dyn Region>)>,
    /// The most bytes that are kept.
    most: usize,
}

impl Mappings {
    pub(super) fn new(most: usize) -> Self {
        Self { known: HashMap::new(), kept: VecDeque::new(), most }
    }

    /// The mapping of `len` bytes that is there under a key, or a new one. With `keep` it may stay behind its last user.
    pub(super) fn get(
        &mut self,
        key: Key,
        len: usize,
        keep: bool,
        map: impl FnOnce() -> Result<Arc<dyn Region>>,
    ) -> Result<Arc<dyn Region>> {
        // The promise of this handle is checked like that of the first.
        let known = self.known.get(&key).and_then(Weak::upgrade).filter(|region| region.len() == len);
        let region = match known {
            Some(region) => region,
            None => {
                self.known.retain(|_, region| region.strong_count() > 0);
                let region = map()?;
                self.known.insert(key.clone(), Arc::downgrade(&region));
                region
            }
        };
        if keep {
            self.keep(key, &region);
        }
        Ok(region)
    }

    /// Lets go what is kept of a process that is gone, or that takes its memory back.
    pub(super) fn forget(&mut self, exporter: Id) {
        self.kept.retain(|(key, _)| !matches!(key, Key::Gpu(process, ..) if *process == exporter));
    }

    /// How many are in use or kept, and their bytes.
    pub(super) fn sum(&self) -> (usize, usize) {
        let live = self.known.values().filter_map(Weak::upgrade);
        live.fold((0, 0), |(count, bytes), region| (count + 1, bytes + region.len()))
    }

    /// Puts it behind all others, and lets go of the first ones that are too much.
    fn keep(&mut self, key: Key, region: &Arc<dyn Region>) {
        self.kept.retain(|(known, _)| *known != key);
        if region.len() > self.most {
            return;
        }
        self.kept.push_back((key, region.clone()));
        let mut bytes: usize = self.kept.iter().map(|(_, region)| region.len()).sum();
        while bytes > self.most
            && let Some((_, region)) = self.kept.pop_front()
        {
            bytes -= region.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use tensorwire_device::{Device, host::Host};

    use super::*;

    fn gpu(process: u8, number: u64) -> Key {
        Key::Gpu(Id([process; 16]), [9; 16], vec![number])
    }

    /// Gives whether it had to be mapped.
    fn get(mappings: &mut Mappings, key: Key, len: usize) -> (bool, Arc<dyn Region>) {
        let mut mapped = false;
        let keep = matches!(key, Key::Gpu(..));
        let region = mappings.get(key, len, keep, || {
            mapped = true;
            Ok(Host.alloc(len)?)
        });
        (mapped, region.unwrap())
    }

    #[test]
    fn what_is_in_use_is_mapped_once() {
        let mut mappings = Mappings::new(0);
        for key in [Key::File(1, 2), gpu(1, 1)] {
            let (first, region) = get(&mut mappings, key.clone(), 100);
            let (second, again) = get(&mut mappings, key.clone(), 100);
            assert!(first && !second && Arc::ptr_eq(&region, &again));
            // Of another length it is other memory, or a lie.
            assert!(get(&mut mappings, key.clone(), 50).0);
            drop((region, again));
            assert!(get(&mut mappings, key, 100).0, "nothing is kept with room for no bytes");
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
        get(&mut mappings, Key::File(1, 1), 10);
        assert_eq!(mappings.sum(), (2, 200));
    }

    #[test]
    fn a_process_is_forgotten() {
        let mut mappings = Mappings::new(1000);
        get(&mut mappings, gpu(1, 1), 100);
        get(&mut mappings, gpu(2, 1), 100);
        let (_, used) = get(&mut mappings, gpu(1, 2), 100);
        mappings.forget(Id([1; 16]));
        assert_eq!(mappings.sum(), (2, 200));
        drop(used);
        assert_eq!(mappings.sum(), (1, 100));
    }

    #[test]
    fn what_cannot_be_mapped_is_not_remembered() {
        let mut mappings = Mappings::new(1000);
        let failed = mappings.get(gpu(1, 1), 10, true, || Err(crate::Error::misuse("no")));
        assert!(failed.is_err());
        assert_eq!(mappings.sum(), (0, 0));
        assert!(get(&mut mappings, gpu(1, 1), 10).0);
    }
}
