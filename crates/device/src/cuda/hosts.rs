//! Host memory that the GPU reaches: flags, and what is copied from and to. Registered once, when it is first used.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::driver::{Address, Driver};
use super::gpu::Inner;
use super::reaper::Waste;
use crate::device::Region;
use crate::error::{Error, Result};

/// What memory is registered in multiples of.
const PAGE: usize = 4096;

/// Registered memory by its address.
#[derive(Default)]
pub(super) struct Hosts(Mutex<BTreeMap<usize, Registered>>);

struct Registered {
    len: usize,
    on_device: Address,
    /// Keeps the memory where it is. Once nobody else has it, it is given back.
    region: Arc<dyn Region>,
}

impl Hosts {
    /// Where the GPU sees `addr`, which lies in a region of host memory. The thread is in the GPU's context.
    pub(super) fn reach(&self, gpu: &Inner, region: &Arc<dyn Region>, addr: usize) -> Result<Address> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((start, there)) = known.range(..=addr).next_back()
            && addr < start + there.len
        {
            return Ok(there.on_device + (addr - start) as Address);
        }
        // What nobody uses but this table goes before new memory comes, so that the table does not grow for ever.
        let unused: Vec<usize> = known
            .iter()
            .filter(|(_, there)| Arc::strong_count(&there.region) == 1)
            .map(|(at, _)| *at)
            .collect();
        for at in unused {
            if let Some(there) = known.remove(&at) {
                gpu.reaper.take(Waste::Registered { at, _region: there.region });
            }
        }
        let mut region = region;
        while let Some(whole) = region.whole() {
            region = whole;
        }
        let start = region.addr() & !(PAGE - 1);
        let len = (region.addr() + region.len()).next_multiple_of(PAGE) - start;
        // SAFETY: pages of a region that is kept alive in the table until they are taken back.
        match unsafe { gpu.driver.register(start, len) } {
            Ok(()) => {}
            // By somebody else, who has pages with us in common, or before: what counts is that it can be reached.
            Err(Error::Device { name, .. }) if name == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" => {
                return gpu.driver.seen_at(addr);
            }
            Err(error) => {
                return Err(Error::Unsupported {
                    what: format!("access of a GPU to {len} bytes of host memory"),
                    need: "memory that the driver can register".into(),
                    have: error.to_string(),
                });
            }
        }
        let on_device = gpu.driver.seen_at(start)?;
        known.insert(start, Registered { len, on_device, region: region.clone() });
        Ok(on_device + (addr - start) as Address)
    }

    /// How much is registered: places and bytes.
    pub(super) fn sum(&self) -> (usize, usize) {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (known.len(), known.values().map(|there| there.len).sum())
    }

    /// Gives everything back.
    ///
    /// # Safety
    /// No queue uses any of it, and the thread is in the context.
    pub(super) unsafe fn let_go(&self, driver: &Driver) {
        for (start, _) in std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner)) {
            // SAFETY: registered by `reach`, and not used, as the caller promised.
            let _ = unsafe { driver.unregister(start) };
        }
    }
}

impl fmt::Debug for Hosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (places, bytes) = self.sum();
        write!(f, "Hosts({places} places, {bytes} bytes)")
    }
}
