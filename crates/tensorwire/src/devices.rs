//! Which devices this process has: the host, and GPUs, which are opened when they are first asked for.

use std::sync::{Arc, OnceLock};

use tensorwire_device::gpu::{Answers, Probe};
use tensorwire_device::host::Host;
use tensorwire_device::{self as device, Device, DeviceId};

use crate::error::{Error, Result};

/// See the module.
#[derive(Debug)]
pub(crate) struct Devices {
    host: Arc<dyn Device>,
    gpus: OnceLock<device::Result<Gpus>>,
}

/// Whoever opens GPUs, and what was asked about them.
#[derive(Debug)]
struct Gpus {
    driver: Arc<dyn Probe>,
    answers: Answers,
}

impl Devices {
    /// Opens nothing yet.
    pub(crate) fn new() -> Self {
        Self { host: Arc::new(Host), gpus: OnceLock::new() }
    }

    /// The host's memory.
    pub(crate) fn host(&self) -> &Arc<dyn Device> {
        &self.host
    }

    /// One device.
    pub(crate) fn open(&self, id: &DeviceId) -> Result<Arc<dyn Device>> {
        match id {
            DeviceId::Host => Ok(self.host.clone()),
            gpu => {
                let gpus = self.gpus().map_err(|error| match error {
                    Error::Unsupported { what, need, have } => {
                        Error::Unsupported { what: format!("{gpu} ({what})"), need, have }
                    }
                    other => other,
                })?;
                Ok(gpus.driver.open(gpu)?)
            }
        }
    }

    /// All of them; the host is the first. GPUs that cannot be opened are left out.
    pub(crate) fn all(&self) -> Vec<Arc<dyn Device>> {
        let ids = self.gpus().and_then(|gpus| Ok(gpus.answers.gpus()?));
        let ids = ids.unwrap_or_default().iter().map(|gpu| gpu.id.clone());
        let gpus = ids.filter_map(|id| match self.open(&id) {
            Ok(device) => Some(device),
            Err(error) => {
                tracing::warn!("{id} cannot be opened: {error}");
                None
            }
        });
        std::iter::once(self.host.clone()).chain(gpus).collect()
    }

    /// The GPUs, if that is known without starting a driver.
    pub(crate) fn known_gpus(&self) -> Option<Vec<DeviceId>> {
        let ids = |gpus: &Gpus| Some(gpus.answers.gpus().ok()?.iter().map(|gpu| gpu.id.clone()).collect());
        match self.gpus.get() {
            Some(gpus) => gpus.as_ref().map_or_else(|_| Some(Vec::new()), ids),
            None if device::gpu::may_be_there() => None,
            None => Some(Vec::new()),
        }
    }

    /// What there is to know about the GPUs: who reaches whom, fabric, multicast. Asked once, lazily.
    pub(crate) fn access(&self) -> Result<&Answers> {
        Ok(&self.gpus()?.answers)
    }

    fn gpus(&self) -> Result<&Gpus> {
        let gpus = self.gpus.get_or_init(|| {
            let driver = device::gpu::driver()?;
            Ok(Gpus { answers: Answers::new(driver.clone()), driver })
        });
        Ok(gpus.as_ref().map_err(Clone::clone)?)
    }
}
