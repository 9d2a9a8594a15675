//! What the driver says about GPUs, and what comes of trying: peer access, fabric handles, multicast.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::driver::{Attribute, Driver, Export, Physical};
use super::gpu::{Entered, Facts, Gpu as Open, Inner, Primary};
use crate::deadline::Deadline;
use crate::device::{Caching, Device, DeviceId};
use crate::error::{Error, Result};
use crate::flag::Abort;
use crate::gpu::{Access, Gpu, Probe};
use crate::host::Host;
use crate::span::Span;

/// Bytes that a check copies.
const CHECKED: usize = 1 << 20;

/// The driver, to be asked about GPUs.
#[derive(Debug, Default)]
pub struct CudaProbe {
    /// GPUs that were opened to try something.
    open: Mutex<HashMap<usize, Open>>,
}

impl CudaProbe {
    /// The driver of this process, if there is one.
    pub fn new() -> Result<Self> {
        Driver::get()?;
        Ok(Self::default())
    }

    /// The GPU, opened once.
    fn gpu(&self, id: &DeviceId) -> Result<Open> {
        let ordinal = find(id)?.ordinal;
        let open = || self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let known = open().get(&ordinal).cloned();
        if let Some(gpu) = known {
            return Ok(gpu);
        }
        // Without the lock: it takes long, and others may ask about other GPUs. Two who open the same one get the same.
        let gpu = Open::open(ordinal)?;
        open().insert(ordinal, gpu.clone());
        Ok(gpu)
    }

    /// Copies a pattern from one GPU to another, back to the first, and compares.
    fn check(&self, from: &DeviceId, to: &DeviceId, deadline: Deadline) -> Result<Access> {
        if let Some(no) = self.reach(from, to)? {
            return Ok(no);
        }
        let (from, to) = (self.gpu(from)?, self.gpu(to)?);
        let pattern: Vec<u8> =
            (0..CHECKED as u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let here = Span::whole(from.alloc(CHECKED)?);
        let there = Span::whole(to.alloc(CHECKED)?);
        let back = Span::whole(from.alloc(CHECKED)?);
        here.write(0, &pattern)?;
        let word = Span::whole(Host.alloc(64)?);
        let abort = Abort::new(&word)?;
        let mut queue = from.queue()?;
        queue.copy(there.view(), here.view(), Caching::Keep)?;
        queue.finish(&abort, deadline)?;
        if there.to_vec()? != pattern {
            return Ok(Access::no(
                "the driver says yes, but what was copied there is not what arrived (IOMMU or ACS?)",
            ));
        }
        queue.copy(back.view(), there.view(), Caching::Keep)?;
        queue.finish(&abort, deadline)?;
        if back.to_vec()? != pattern {
            return Ok(Access::no(
                "the driver says yes, but what was read there is not what is there (IOMMU or ACS?)",
            ));
        }
        Ok(Access::Yes)
    }

    /// Lets one GPU reach memory of another, or says why not.
    fn reach(&self, from: &DeviceId, to: &DeviceId) -> Result<Option<Access>> {
        if from == to {
            return Ok(None);
        }
        if let no @ (Access::No(_) | Access::Unknown) = self.peer(from, to) {
            return Ok(Some(no));
        }
        let (from, to) = (self.gpu(from)?, self.gpu(to)?);
        match from.inner().open_peer(to.inner()) {
            Ok(()) => Ok(None),
            Err(Error::Device { name, .. }) if name == "CUDA_ERROR_TOO_MANY_PEERS" => Ok(Some(Access::no(
                "the driver has no room for another peer (CUDA_ERROR_TOO_MANY_PEERS): copies go through the host",
            ))),
            Err(error) => Err(error),
        }
    }
}

impl Probe for CudaProbe {
    fn gpus(&self) -> Result<Vec<Gpu>> {
        let count = super::count()?;
        (0..count).map(|ordinal| super::facts(ordinal).map(neutral)).collect()
    }

    fn peer(&self, from: &DeviceId, to: &DeviceId) -> Access {
        let ask = || {
            let (driver, from, to) = (Driver::get()?, find(from)?, find(to)?);
            if from.uuid == to.uuid {
                return Ok(true);
            }
            driver.can_access_peer(driver.device(from.ordinal)?, driver.device(to.ordinal)?)
        };
        match ask() {
            Ok(true) => Access::Yes,
            Ok(false) => Access::no("the driver says that they cannot (cuDeviceCanAccessPeer)"),
            Err(error) => Access::No(error.to_string()),
        }
    }

    fn open_peer(&self, from: &DeviceId, to: &DeviceId) -> Access {
        match self.reach(from, to) {
            Ok(None) => Access::Yes,
            Ok(Some(no)) => no,
            Err(error) => Access::No(error.to_string()),
        }
    }

    fn check_peer(&self, from: &DeviceId, to: &DeviceId, deadline: Deadline) -> Access {
        match self.check(from, to, deadline) {
            Ok(access) => access,
            Err(Error::TimedOut) => {
                Access::no("the driver says yes, but a copy did not end in time (IOMMU or ACS?)")
            }
            Err(error) => Access::No(error.to_string()),
        }
    }

    fn fabric(&self, of: &DeviceId) -> Access {
        tried(of, Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, "fabric handles", fabric_cycle)
    }

    fn open(&self, id: &DeviceId) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(self.gpu(id)?))
    }

    fn multicast(&self, of: &DeviceId) -> Access {
        tried(of, Attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, "multicast", |driver, _| {
            let len = driver.multicast_granularity(1, 1, Export::Fd)?;
            let object = driver.multicast(1, len, Export::Fd)?;
            // SAFETY: our own reference, used no more.
            unsafe { driver.release(object) }
        })
    }
}

impl Inner {
    /// Lets this GPU reach memory of another: of the old kind, and all that we have mapped or will map there.
    fn open_peer(&self, to: &Arc<Self>) -> Result<()> {
        let entered = self.enter()?;
        match self.driver.enable_peer(to.context()) {
            Ok(()) => {}
            Err(Error::Device { name, .. }) if name == "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED" => {}
            Err(error) => return Err(error),
        }
        drop(entered);
        let _entered = to.enter()?;
        to.mappings.grant(to, self.device)?;
        self.befriend(to.facts.uuid);
        Ok(())
    }
}

/// Whether the GPU has a feature: by its attribute, and by trying.
fn tried(
    of: &DeviceId,
    attribute: Attribute,
    what: &str,
    attempt: impl FnOnce(&'static Driver, i32) -> Result<()>,
) -> Access {
    let ask = || {
        let driver = Driver::get()?;
        let device = driver.device(find(of)?.ordinal)?;
        if driver.attribute(device, attribute)? == 0 {
            return Ok(Access::No(format!("the device attribute says no to {what}")));
        }
        let primary = Primary::of(driver, device)?;
        let tried = Entered::into(driver, primary.context).and_then(|_entered| attempt(driver, device));
        Ok(match tried {
            Ok(()) => Access::Yes,
            Err(error) => Access::No(format!("the device attribute says yes, but {error}")),
        })
    };
    ask().unwrap_or_else(|error: Error| Access::No(error.to_string()))
}

/// Memory as a fabric handle, from its allocation to its mapping. The thread is in the device's context.
pub(super) fn fabric_cycle(driver: &Driver, device: i32) -> Result<()> {
    let len = driver.granularity(device, Export::Fabric)?;
    let memory = driver.create(device, len, Export::Fabric)?;
    let cycle = driver.export_fabric(memory).and_then(|handle| driver.import_fabric(&handle));
    let mapped = cycle.and_then(|again| {
        let mapped = map_once(driver, device, again, len);
        // SAFETY: our own reference, used no more.
        let _ = unsafe { driver.release(again) };
        mapped
    });
    // SAFETY: as above.
    let _ = unsafe { driver.release(memory) };
    mapped
}

/// Maps memory and gives the addresses back.
fn map_once(driver: &Driver, device: i32, memory: Physical, len: usize) -> Result<()> {
    let address = driver.reserve(len)?;
    // SAFETY: just reserved, and nobody else knows it; unmapped before the addresses go.
    unsafe {
        let mapped = driver.map(address, len, memory).and_then(|()| {
            let allowed = driver.allow(address, len, device);
            driver.unmap(address, len).and(allowed)
        });
        driver.free_addresses(address, len).and(mapped)
    }
}

/// The GPU with this name, if this process may see it.
fn find(id: &DeviceId) -> Result<Facts> {
    let DeviceId::Gpu(uuid) = id else {
        return Err(Error::misuse(format!("{id} is no GPU")));
    };
    let driver = Driver::get()?;
    for ordinal in 0..driver.count()? {
        if driver.uuid(driver.device(ordinal)?)? == *uuid {
            return super::facts(ordinal);
        }
    }
    Err(Error::misuse(format!("{id} is not among the GPUs that this process may see (CUDA_VISIBLE_DEVICES)")))
}

fn neutral(facts: Facts) -> Gpu {
    Gpu {
        id: DeviceId::Gpu(facts.uuid),
        ordinal: u32::try_from(facts.ordinal).ok(),
        name: facts.name,
        pci: facts.pci,
        memory: facts.memory as u64,
        capability: Some((facts.compute.0.unsigned_abs(), facts.compute.1.unsigned_abs())),
        links: Vec::new(),
        fabric: None,
    }
}
