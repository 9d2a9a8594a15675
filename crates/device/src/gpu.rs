//! GPUs as facts, and who can reach whose memory. Nothing here knows how a vendor's driver is asked.

use std::cell::Cell;
use std::fmt;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use crate::deadline::Deadline;
use crate::device::{Device, DeviceId};
use crate::error::{Error, Result};

/// So many tensors, of all ranks together, go into one reduction on a GPU, and so many results come out of it. More would need
/// several kernels, which would round in between.
pub const MOST_REDUCED: usize = 128;

thread_local! {
    /// Whether this thread is one of a library's own, and whether a driver knows that.
    static BACKGROUND: Cell<(bool, bool)> = const { Cell::new((false, false)) };
}

/// This thread is one of a library's own from now on: what it asks devices disturbs no graph that another thread records.
pub fn background() {
    BACKGROUND.with(|known| known.set((true, known.get().1)));
}

/// Whether a driver must be told so now. Once for each thread.
pub(crate) fn is_new_in_background() -> bool {
    BACKGROUND.with(|known| known.replace((known.get().0, known.get().0)) == (true, false))
}

/// Whether something can be reached or done.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Access {
    /// Nobody could say.
    #[default]
    Unknown,
    /// It can.
    Yes,
    /// It cannot, and why.
    No(String),
}

impl Access {
    /// A no with its reason.
    pub fn no(reason: impl Into<String>) -> Self {
        Self::No(reason.into())
    }

    /// Whether it is a yes.
    pub fn is_yes(&self) -> bool {
        *self == Self::Yes
    }

    /// Why not, if it is a no.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::No(reason) => Some(reason),
            _ => None,
        }
    }

    /// This answer, or another's where this one is unknown.
    pub fn or_ask(self, other: impl FnOnce() -> Self) -> Self {
        if self == Self::Unknown { other() } else { self }
    }
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gpu {
    /// Its name for us.
    pub id: DeviceId,
    /// Its number in this process, if it is visible here.
    pub ordinal: Option<u32>,
    /// Its model.
    pub name: String,
    /// Where it sits, as sysfs writes it: "0000:1b:00.0".
    pub pci: String,
    /// Bytes.
    pub memory: u64,
    /// Major and minor number of its compute capability.
    pub capability: Option<(u32, u32)>,
    /// Its NVLinks, inactive ones too. Empty where it has none, or where they were not asked for.
    pub links: Vec<NvLink>,
    /// How it stands in an NVLink fabric, where that was asked.
    pub fabric: Option<Fabric>,
}

impl Gpu {
    /// A GPU of which nothing else is known.
    pub fn new(id: DeviceId, name: impl Into<String>, pci: impl Into<String>) -> Self {
        Self {
            id,
            ordinal: None,
            name: name.into(),
            pci: pci.into(),
            memory: 0,
            capability: None,
            links: Vec::new(),
            fabric: None,
        }
    }
}

/// One NVLink of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NvLink {
    /// Its number on the GPU.
    pub number: u32,
    /// Whether it is trained and carries data.
    pub active: bool,
    /// What is at its other end.
    pub remote: Remote,
}

impl NvLink {
    /// The link with this number.
    pub fn new(number: u32, active: bool, remote: Remote) -> Self {
        Self { number, active, remote }
    }
}

/// The other end of an NVLink.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Remote {
    /// A GPU, by its PCI address.
    Gpu(String),
    /// An NVSwitch.
    Switch,
    /// A processor.
    Cpu,
    /// It was not told.
    Unknown,
}

/// How a GPU stands in an NVLink fabric.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Fabric {
    /// How far its registration is.
    pub state: FabricState,
    /// What came of the registration, or of asking for it: nothing if all is well, else the name of the error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// GPUs of one clique reach each other.
    pub clique: u32,
    /// The cluster, as 32 digits; zeros where there is none.
    pub cluster: String,
}

/// How far the registration of a GPU with its fabric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum FabricState {
    /// The GPU or the driver has no fabric.
    NotSupported,
    /// Nobody has registered it yet.
    NotStarted,
    /// It is being registered.
    InProgress,
    /// It is registered, or the attempt has failed.
    Completed,
}

impl Fabric {
    /// What this says about fabric handles. A registered GPU may still refuse them: only trying tells.
    pub fn access(&self) -> Access {
        let with = |text: &str| match &self.trouble {
            Some(trouble) => Access::No(format!("{text} ({trouble})")),
            None => Access::no(text),
        };
        match (self.state, &self.trouble) {
            (FabricState::NotSupported, _) => with("the GPU is in no NVLink fabric"),
            (FabricState::NotStarted, _) => {
                with("the GPU is not registered with its fabric; is the fabric manager running?")
            }
            (FabricState::InProgress, _) => with("the GPU is being registered with its fabric; ask again"),
            (FabricState::Completed, Some(_)) => with("registering the GPU with its fabric failed"),
            (FabricState::Completed, None) => Access::Unknown,
        }
    }
}

impl fmt::Display for FabricState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::NotSupported => "not supported",
            Self::NotStarted => "not started",
            Self::InProgress => "in progress",
            Self::Completed => "completed",
        })
    }
}

/// A PCI address as sysfs writes it; GPUs are function 0.
pub(crate) fn pci_address(domain: u32, bus: u32, device: u32) -> String {
    format!("{domain:04x}:{bus:02x}:{device:02x}.0")
}

/// A UUID as the driver writes it, with the word before it ("GPU-", "MIG-"), as bytes.
pub(crate) fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u32> =
        text.get(4..)?.chars().filter(|c| *c != '-').map(|c| c.to_digit(16)).collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect();
    bytes.try_into().ok().filter(|_| digits.len() == 32)
}

/// The UUID of a GPU as the driver and its tools write it.
pub fn show_uuid(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Somebody who can be asked about GPUs: a driver, or its management library.
///
/// Answers may take milliseconds; [`Answers`] asks each question once.
pub trait Probe: Send + Sync + fmt::Debug {
    /// The GPUs it knows.
    fn gpus(&self) -> Result<Vec<Gpu>>;

    /// Whether work on `from` can reach memory of `to`.
    fn peer(&self, from: &DeviceId, to: &DeviceId) -> Access;

    /// Makes memory of `to` reachable from `from`, where the driver wants to be told. It being so already is a yes;
    /// too many peers is a no that says so, and copies are then staged.
    fn open_peer(&self, from: &DeviceId, to: &DeviceId) -> Access {
        self.peer(from, to)
    }

    /// Copies a pattern from `from` to `to` and back and compares: settings of IOMMU and ACS can make a driver's
    /// yes untrue. Unknown where it cannot be tried.
    fn check_peer(&self, from: &DeviceId, to: &DeviceId, deadline: Deadline) -> Access;

    /// Whether memory of this GPU can leave the process as a fabric handle.
    fn fabric(&self, of: &DeviceId) -> Access;

    /// Whether this GPU takes part in multicast.
    fn multicast(&self, of: &DeviceId) -> Access;

    /// The GPU as a device, opened once. A probe that can only be asked about GPUs refuses.
    fn open(&self, id: &DeviceId) -> Result<Arc<dyn Device>> {
        Err(Error::Unsupported {
            what: format!("work on {id}"),
            need: "the GPU's driver".into(),
            have: "somebody who can only be asked about it".into(),
        })
    }
}

/// The driver of this machine's GPUs, or why there is none.
#[cfg(not(loom))]
pub fn driver() -> Result<Arc<dyn Probe>> {
    #[cfg(feature = "thread-gpus")]
    if let Some(driver) = crate::threads::driver()? {
        return Ok(driver);
    }
    Ok(Arc::new(crate::cuda::CudaProbe::new()?))
}

/// Whether [`driver`] is worth asking: false where this process surely has no GPU. Costs next to nothing and starts no driver, which would
/// take its time, and which forked children could not use.
#[cfg(not(loom))]
pub fn may_be_there() -> bool {
    #[cfg(feature = "thread-gpus")]
    if crate::threads::driver().is_ok_and(|driver| driver.is_some()) {
        return true;
    }
    // Of NVIDIA's driver, and of Windows's below Linux.
    ["/dev/nvidiactl", "/dev/dxg"].iter().any(|path| std::path::Path::new(path).exists())
}

/// The answers of a probe, each asked for once, by whichever thread needs it first. A known answer takes no lock.
///
/// GPUs are numbered as in [`gpus`](Self::gpus).
#[derive(Debug)]
pub struct Answers {
    probe: Arc<dyn Probe>,
    table: OnceLock<Result<Table>>,
}

#[derive(Debug)]
struct Table {
    gpus: Vec<Gpu>,
    /// Row by row: from the first to all, from the second to all, ...
    pairs: Vec<Pair>,
    fabric: Vec<OnceLock<Access>>,
    multicast: Vec<OnceLock<Access>>,
}

#[derive(Debug, Default)]
struct Pair {
    told: OnceLock<Access>,
    opened: OnceLock<Access>,
    checked: OnceLock<Access>,
}

impl Answers {
    /// Asks nothing yet.
    pub fn new(probe: Arc<dyn Probe>) -> Self {
        Self { probe, table: OnceLock::new() }
    }

    /// All GPUs.
    pub fn gpus(&self) -> Result<&[Gpu]> {
        Ok(&self.table()?.gpus)
    }

    /// The number of a GPU.
    pub fn index(&self, id: &DeviceId) -> Result<usize> {
        let gpus = self.gpus()?;
        gpus.iter()
            .position(|gpu| gpu.id == *id)
            .ok_or_else(|| Error::misuse(format!("{id} is none of the {} GPUs of this process", gpus.len())))
    }

    /// Whether work on one GPU reaches memory of another. A GPU reaches its own. Where a check has failed, the answer
    /// is no from then on, whatever the driver said.
    pub fn peer(&self, from: usize, to: usize) -> Result<&Access> {
        let (table, pair) = self.pair(from, to)?;
        if let Some(no @ Access::No(_)) = pair.checked.get() {
            return Ok(no);
        }
        Ok(pair.told.get_or_init(|| match from == to {
            true => Access::Yes,
            false => self.probe.peer(&table.gpus[from].id, &table.gpus[to].id),
        }))
    }

    /// The same after making it so, which is done once.
    pub fn open_peer(&self, from: usize, to: usize) -> Result<&Access> {
        let told = self.peer(from, to)?;
        let (table, pair) = self.pair(from, to)?;
        if from == to || !told.is_yes() {
            return Ok(told);
        }
        Ok(pair.opened.get_or_init(|| self.probe.open_peer(&table.gpus[from].id, &table.gpus[to].id)))
    }

    /// Tries whether bytes really arrive. A yes or a no is kept; what could not be tried can be tried again.
    pub fn check_peer(&self, from: usize, to: usize, deadline: Deadline) -> Result<Access> {
        let told = self.peer(from, to)?.clone();
        let (table, pair) = self.pair(from, to)?;
        if from == to || told.reason().is_some() {
            return Ok(told);
        }
        if let Some(known) = pair.checked.get() {
            return Ok(known.clone());
        }
        let seen = self.probe.check_peer(&table.gpus[from].id, &table.gpus[to].id, deadline);
        if seen == Access::Unknown {
            return Ok(seen);
        }
        Ok(pair.checked.get_or_init(|| seen).clone())
    }

    /// Whether memory of a GPU can leave the process as a fabric handle.
    pub fn fabric(&self, of: usize) -> Result<&Access> {
        let table = self.table()?;
        let (gpu, answer) = (table.gpu(of)?, &table.fabric[of]);
        Ok(answer.get_or_init(|| self.probe.fabric(&gpu.id)))
    }

    /// Whether a GPU takes part in multicast.
    pub fn multicast(&self, of: usize) -> Result<&Access> {
        let table = self.table()?;
        let (gpu, answer) = (table.gpu(of)?, &table.multicast[of]);
        Ok(answer.get_or_init(|| self.probe.multicast(&gpu.id)))
    }

    fn pair(&self, from: usize, to: usize) -> Result<(&Table, &Pair)> {
        let table = self.table()?;
        table.gpu(from)?;
        table.gpu(to)?;
        Ok((table, &table.pairs[from * table.gpus.len() + to]))
    }

    fn table(&self) -> Result<&Table> {
        let table = self.table.get_or_init(|| {
            let gpus = self.probe.gpus()?;
            let count = gpus.len();
            let unasked = || (0..count).map(|_| OnceLock::new()).collect();
            let pairs = (0..count * count).map(|_| Pair::default()).collect();
            Ok(Table { gpus, pairs, fabric: unasked(), multicast: unasked() })
        });
        table.as_ref().map_err(Clone::clone)
    }
}

impl Table {
    fn gpu(&self, index: usize) -> Result<&Gpu> {
        self.gpus.get(index).ok_or_else(|| match self.gpus.len() {
            0 => Error::misuse(format!("there is no GPU {index}: this process has none")),
            count => Error::misuse(format!("there is no GPU {index}: this process has 0 to {}", count - 1)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_read_and_written() {
        let text = "GPU-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9";
        let bytes = parse_uuid(text).unwrap();
        assert_eq!((bytes[0], bytes[15]), (0x0a, 0xf9));
        assert_eq!(show_uuid(&bytes), text);
        for wrong in
            ["", "GPU-", "GPU-12", "GPU-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f", "GPU-ä", "äöü", "0a1b2c3dxx"]
        {
            assert_eq!(parse_uuid(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_fabric_says_why_not() {
        let with = |state, trouble: Option<&str>| {
            let trouble = trouble.map(str::to_owned);
            Fabric { state, trouble, clique: 0, cluster: String::new() }.access()
        };
        assert_eq!(with(FabricState::Completed, None), Access::Unknown);
        for (state, trouble, words) in [
            (FabricState::NotSupported, None, "in no NVLink fabric"),
            (FabricState::NotStarted, None, "fabric manager"),
            (FabricState::InProgress, None, "ask again"),
            (FabricState::Completed, Some("NVML_ERROR_UNKNOWN"), "failed (NVML_ERROR_UNKNOWN)"),
        ] {
            let access = with(state, trouble);
            assert!(access.reason().is_some_and(|reason| reason.contains(words)), "{access:?}");
        }
    }
}
