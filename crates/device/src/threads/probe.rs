//! Who is asked about GPUs of threads, and who opens them.

use std::sync::{Arc, OnceLock};

use super::device::Gpu;
use super::settings::{Settings, VARIABLE};
use crate::deadline::Deadline;
use crate::device::{Device, DeviceId};
use crate::error::{Error, Result};
use crate::gpu::{self, Access, Probe};

/// The driver of some GPUs of threads.
#[derive(Debug)]
pub struct Driver {
    gpus: Vec<Gpu>,
    settings: Settings,
}

/// The one of this process, or why there is none. A forked child has its parent's, which refuses it.
static INSTALLED: OnceLock<Arc<Driver>> = OnceLock::new();

/// Gives this process GPUs of threads, once, before anybody asks for GPUs.
pub fn install(settings: Settings) -> Result<()> {
    let driver = Arc::new(Driver::new(settings)?);
    INSTALLED
        .set(driver)
        .map_err(|_| Error::misuse("GPUs of threads are installed once, before their first use"))
}

/// The driver of this process: the installed one, or the one that the variable asks for.
pub fn driver() -> Result<Option<Arc<Driver>>> {
    if let Some(driver) = INSTALLED.get() {
        return Ok(Some(driver.clone()));
    }
    let Some(text) = std::env::var_os(VARIABLE) else { return Ok(None) };
    let settings: Settings = text.to_string_lossy().parse()?;
    let driver = Arc::new(Driver::new(settings)?);
    Ok(Some(INSTALLED.get_or_init(|| driver).clone()))
}

/// The GPU with this number of this process's driver.
pub fn gpu(number: usize) -> Result<Gpu> {
    let driver = driver()?.ok_or_else(|| Error::Unsupported {
        what: format!("the test GPU {number}"),
        need: format!("threads::install, or {VARIABLE}"),
        have: "neither".into(),
    })?;
    driver.gpu(number)
}

impl Driver {
    /// GPUs that are not the process's: [`gpu::driver`] does not give them.
    pub fn new(settings: Settings) -> Result<Self> {
        let settings = settings.check()?;
        Ok(Self { gpus: (0..settings.gpus).map(|number| Gpu::new(number, &settings)).collect(), settings })
    }

    /// The GPU with this number.
    pub fn gpu(&self, number: usize) -> Result<Gpu> {
        self.gpus.get(number).cloned().ok_or_else(|| {
            Error::misuse(format!("GPU {number}: this process sees {}, counted from 0", self.gpus.len()))
        })
    }

    fn find(&self, id: &DeviceId) -> Result<&Gpu> {
        let found = self.gpus.iter().find(|gpu| gpu.id() == *id);
        found.ok_or_else(|| Error::misuse(format!("{id} is not among the GPUs that this process may see")))
    }

    fn facts(&self, gpu: &Gpu) -> gpu::Gpu {
        let number = gpu.number() as u32;
        gpu::Gpu {
            ordinal: Some(number),
            memory: self.settings.memory as u64,
            capability: Some((9, 0)),
            ..gpu::Gpu::new(gpu.id(), "threads", gpu::pci_address(0xfff0, number, 0))
        }
    }

    fn peer(&self, from: &DeviceId, to: &DeviceId) -> Result<Access> {
        let (from, to) = (self.find(from)?, self.find(to)?);
        Ok(match from.number() == to.number() || self.settings.peers {
            true => Access::Yes,
            false => Access::no("the test wants them apart"),
        })
    }
}

impl Probe for Driver {
    fn gpus(&self) -> Result<Vec<gpu::Gpu>> {
        Ok(self.gpus.iter().map(|gpu| self.facts(gpu)).collect())
    }

    fn peer(&self, from: &DeviceId, to: &DeviceId) -> Access {
        Self::peer(self, from, to).unwrap_or_else(|error| Access::No(error.to_string()))
    }

    fn open_peer(&self, from: &DeviceId, to: &DeviceId) -> Access {
        let access = Probe::peer(self, from, to);
        if let (Access::Yes, Ok(from), Ok(to)) = (&access, self.find(from), self.find(to)) {
            from.befriend(to.number());
        }
        access
    }

    fn check_peer(&self, from: &DeviceId, to: &DeviceId, _deadline: Deadline) -> Access {
        Probe::peer(self, from, to)
    }

    fn fabric(&self, _of: &DeviceId) -> Access {
        Access::no("a GPU of threads is in no NVLink fabric")
    }

    fn multicast(&self, _of: &DeviceId) -> Access {
        Access::no("a GPU of threads has no multicast")
    }

    fn open(&self, id: &DeviceId) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(self.find(id)?.clone()))
    }
}
