//! Memory of several GPUs behind one address: a store to it reaches all of them.
//!
//! It has not run on hardware: see docs/cuda.md.

use std::fmt;
use std::os::fd::AsFd;
use std::sync::Arc;

use super::driver::{Address, Attribute, Physical};
use super::gpu::Inner;
use crate::device::{DeviceId, Region};
use crate::error::{Error, Result};
use crate::fd::Fd;
use crate::multicast::{Multicast, MulticastHandle};

/// This process's part of an object. Its drop undoes what was done, the last step first.
pub(super) struct CudaMulticast {
    gpu: Arc<Inner>,
    object: Physical,
    /// Whether this process made it: the driver does not export what it has imported.
    own: bool,
    devices: usize,
    bytes: usize,
    /// What sizes and offsets are multiples of.
    unit: usize,
    added: bool,
    bound: Option<Bound>,
    /// Where it is mapped.
    address: Option<Address>,
}

/// Memory behind an object: our reference to it, and who keeps it mapped.
struct Bound {
    memory: Physical,
    _region: Arc<dyn Region>,
}

impl CudaMulticast {
    /// A new object.
    pub(super) fn create(gpu: &Arc<Inner>, devices: usize, bytes: usize) -> Result<Self> {
        let (count, unit) = supported(gpu, devices, bytes)?;
        let bytes = bytes.checked_next_multiple_of(unit).filter(|bytes| *bytes > 0);
        let bytes =
            bytes.ok_or_else(|| Error::misuse("multicast of no bytes, or of more than any memory"))?;
        let _entered = gpu.enter()?;
        let object = gpu.driver.multicast(count, bytes, gpu.export)?;
        Ok(Self::new(gpu, object, true, (devices, bytes, unit)))
    }

    /// The part in an object of another process.
    pub(super) fn join(gpu: &Arc<Inner>, handle: &MulticastHandle) -> Result<Self> {
        let MulticastHandle { fd, devices, bytes } = handle;
        let (_, unit) = supported(gpu, *devices, *bytes)?;
        if *bytes == 0 || !bytes.is_multiple_of(unit) {
            let text = format!("a multicast object of {bytes} bytes, which is no multiple of {unit}");
            return Err(Error::refused(text));
        }
        let _entered = gpu.enter()?;
        let object = gpu.driver.import_fd(fd.as_fd());
        let object =
            object.map_err(|e| Error::refused(format!("the descriptor is no multicast object ({e})")))?;
        Ok(Self::new(gpu, object, false, (*devices, *bytes, unit)))
    }

    fn new(
        gpu: &Arc<Inner>,
        object: Physical,
        own: bool,
        (devices, bytes, unit): (usize, usize, usize),
    ) -> Self {
        let gpu = gpu.clone();
        Self { gpu, object, own, devices, bytes, unit, added: false, bound: None, address: None }
    }

    /// Gives the address back.
    ///
    /// # Safety
    /// It was reserved by us in our length, and nobody stores there any more.
    unsafe fn unmap(&self, address: Address, mapped: bool) {
        let driver = self.gpu.driver;
        if mapped {
            // SAFETY: mapped by us as a whole; the rest is the caller's promise.
            note("unmapping", unsafe { driver.unmap(address, self.bytes) });
        }
        // SAFETY: reserved by us in this length, and nothing is mapped any more.
        note("giving addresses back", unsafe { driver.free_addresses(address, self.bytes) });
    }

    fn out_of_order(&self, step: &str, before: &str) -> Error {
        Error::misuse(format!("{step} of multicast on {:?}: {before}", self.gpu))
    }
}

impl Multicast for CudaMulticast {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn export(&self) -> Result<MulticastHandle> {
        if !self.own {
            return Err(self.out_of_order("export", "only the process that made the object exports it"));
        }
        let _entered = self.gpu.enter()?;
        let fd = Fd::new(self.gpu.driver.export_fd(self.object)?);
        Ok(MulticastHandle { fd, devices: self.devices, bytes: self.bytes })
    }

    fn add(&mut self) -> Result<()> {
        if self.added {
            return Err(self.out_of_order("add", "the device is there already"));
        }
        let _entered = self.gpu.enter()?;
        // SAFETY: our own reference.
        unsafe { self.gpu.driver.multicast_add(self.object, self.gpu.device) }?;
        self.added = true;
        Ok(())
    }

    fn bind(&mut self, memory: &Arc<dyn Region>) -> Result<()> {
        if !self.added || self.bound.is_some() {
            return Err(self.out_of_order("bind", "it comes once, behind the add of all devices"));
        }
        let (_entered, driver) = (self.gpu.enter()?, self.gpu.driver);
        let offset = self.place_of(memory)?;
        let physical = driver.retain(memory.addr() as Address)?;
        // SAFETY: our own references, which stay until it is unbound; the device was added.
        let bound = unsafe { driver.multicast_bind(self.object, (physical, offset), self.bytes) };
        if let Err(error) = bound {
            // SAFETY: our own reference, used no more.
            note("releasing memory", unsafe { driver.release(physical) });
            return Err(error);
        }
        self.bound = Some(Bound { memory: physical, _region: memory.clone() });
        Ok(())
    }

    fn map(&mut self) -> Result<usize> {
        if self.bound.is_none() || self.address.is_some() {
            return Err(self.out_of_order("map", "it comes once, behind the bind of all devices"));
        }
        let (_entered, driver) = (self.gpu.enter()?, self.gpu.driver);
        let address = driver.reserve_aligned(self.bytes, self.unit)?;
        // SAFETY: just reserved.
        let mapped = unsafe { driver.map(address, self.bytes, self.object) };
        let was_mapped = mapped.is_ok();
        // SAFETY: just mapped.
        let allowed = mapped.and_then(|()| unsafe { driver.allow(address, self.bytes, self.gpu.device) });
        if let Err(error) = allowed {
            // SAFETY: nobody knows the address.
            unsafe { self.unmap(address, was_mapped) };
            return Err(error);
        }
        self.address = Some(address);
        Ok(address as usize)
    }
}

impl CudaMulticast {
    /// Where memory begins in its allocation, if it can be bound.
    fn place_of(&self, memory: &Arc<dyn Region>) -> Result<usize> {
        let own = DeviceId::Gpu(self.gpu.facts.uuid);
        if memory.device() != own {
            let text = format!("memory of {} behind multicast on {own}", memory.device());
            return Err(Error::misuse(text));
        }
        let place = memory.place()?.filter(|place| place.ids.len() == 1);
        let Some(place) = place else {
            return Err(Error::misuse("multicast takes memory of one shareable allocation"));
        };
        let end = place.offset.checked_add(self.bytes);
        if !place.offset.is_multiple_of(self.unit) || end.is_none_or(|end| end > place.whole) {
            return Err(Error::misuse(format!(
                "multicast of {} bytes in multiples of {}, over {} bytes from {} on",
                self.bytes, self.unit, place.whole, place.offset
            )));
        }
        Ok(place.offset)
    }
}

impl Drop for CudaMulticast {
    fn drop(&mut self) {
        // In a forked child the driver is the parent's.
        let Ok(_entered) = self.gpu.enter() else { return };
        if self.gpu.is_late() {
            // As memory itself: better lost than somebody else's while the GPU may write to it.
            tracing::warn!("{self:?} is lost, because a copy was given up that is not done");
            return;
        }
        let driver = self.gpu.driver;
        if let Some(address) = self.address {
            // SAFETY: mapped by `map`; who works with it keeps this object.
            unsafe { self.unmap(address, true) };
        }
        if self.bound.is_some() {
            // SAFETY: bound by `bind`, and mapped no more.
            let unbound = unsafe { driver.multicast_unbind(self.object, self.gpu.device, self.bytes) };
            note("unbinding memory", unbound);
        }
        // SAFETY: our own reference, used no more.
        note("releasing", unsafe { driver.release(self.object) });
        if let Some(bound) = &self.bound {
            // The object goes before the memory: a driver has been seen to fail otherwise.
            // SAFETY: as above.
            note("releasing memory", unsafe { driver.release(bound.memory) });
        }
    }
}

impl fmt::Debug for CudaMulticast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu, devices, bytes, .. } = self;
        write!(f, "CudaMulticast({bytes} bytes on each of {devices}, here {gpu:?})")
    }
}

/// How many devices that is for the driver, and what sizes are multiples of; an error where the GPU cannot take part.
fn supported(gpu: &Inner, devices: usize, bytes: usize) -> Result<(u32, usize)> {
    let attribute = Attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED;
    if gpu.driver.attribute(gpu.device, attribute)? == 0 {
        return Err(Error::Unsupported {
            what: format!("multicast on {gpu:?}"),
            need: "a GPU that is joined to others by NVLink switches".into(),
            have: "a device attribute that says no".into(),
        });
    }
    let count = u32::try_from(devices).ok().filter(|count| *count > 0);
    let count = count.ok_or_else(|| Error::misuse(format!("multicast to {devices} devices")))?;
    let _entered = gpu.enter()?;
    Ok((count, gpu.driver.multicast_granularity(count, bytes, gpu.export)?))
}

/// What cannot be undone is said; the rest is undone all the same.
fn note(what: &str, done: Result<()>) {
    if let Err(error) = done {
        tracing::warn!("{what} of a multicast object: {error}");
    }
}
