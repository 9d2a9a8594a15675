//! A machine as data.

use serde::{Deserialize, Serialize};

use super::link::Link;
use super::pci::PciPath;
use crate::device::gpu::{Access, Fabric, NvLink, Remote};
use crate::error::{Error, Result};

/// A machine. It can be saved, and read on another one.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Machine {
    /// Its name, or what it is.
    pub name: String,
    /// NUMA nodes, by number.
    #[serde(default)]
    pub nodes: Vec<Node>,
    /// GPUs, by PCI address.
    #[serde(default)]
    pub gpus: Vec<Gpu>,
    /// Network devices, by PCI address. Virtual ones are left out.
    #[serde(default)]
    pub nics: Vec<Nic>,
    /// Whether the GPU of a row reaches memory of the GPU of a column.
    #[serde(default)]
    pub peers: Vec<Vec<Access>>,
    /// What could not be asked, and why.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Node {
    /// Its number.
    pub number: u32,
    /// Its processors, as the kernel lists them: `0-15,32-47`. Empty for a node of memory alone.
    pub cpus: String,
    /// Bytes of memory.
    pub memory: u64,
    /// How far each node is, as firmware says: 10 is itself.
    #[serde(default)]
    pub distances: Vec<u32>,
}

impl Node {
    /// A node with these cores, of which nothing else is known.
    pub fn new(number: u32, cpus: String) -> Self {
        Self { number, cpus, memory: 0, distances: Vec::new() }
    }
}

/// A GPU and its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Gpu {
    /// Its model.
    pub name: String,
    /// Its UUID as the driver writes it; nothing where no driver answers for it.
    #[serde(default)]
    pub uuid: Option<String>,
    /// Its number in the process that asked, if it was visible there.
    #[serde(default)]
    pub ordinal: Option<u32>,
    /// Where it sits.
    pub pci: PciPath,
    /// Its NUMA node.
    #[serde(default)]
    pub numa: Option<u32>,
    /// Bytes of memory.
    #[serde(default)]
    pub memory: u64,
    /// Its compute capability.
    #[serde(default)]
    pub capability: Option<(u32, u32)>,
    /// Its NVLinks, inactive ones too.
    #[serde(default)]
    pub links: Vec<NvLink>,
    /// How it stands in an NVLink fabric.
    #[serde(default)]
    pub fabric: Option<Fabric>,
    /// Whether its memory can leave a process as a fabric handle.
    #[serde(default)]
    pub fabric_access: Access,
    /// Whether it takes part in multicast.
    #[serde(default)]
    pub multicast: Access,
}

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Nic {
    /// Its RDMA device, or else its interface.
    pub name: String,
    /// Its network interfaces.
    #[serde(default)]
    pub interfaces: Vec<String>,
    /// Where it sits.
    #[serde(default)]
    pub pci: PciPath,
    /// Its NUMA node.
    #[serde(default)]
    pub numa: Option<u32>,
    /// Whether its link is up.
    #[serde(default)]
    pub up: Access,
    /// Megabits in a second, while it is up.
    #[serde(default)]
    pub speed: Option<u32>,
    /// What RDMA needs to know.
    #[serde(default)]
    pub rdma: Option<Rdma>,
}

/// The best port of an RDMA device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Rdma {
    /// The device.
    pub device: String,
    /// Its port.
    pub port: u32,
    /// InfiniBand or Ethernet.
    pub layer: String,
    /// The address to use, if there is one.
    pub gid: Option<Gid>,
}

/// An address of an RDMA port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Gid {
    /// Its number in the port's table.
    pub index: u32,
    /// `IB/RoCE v1` or `RoCE v2`.
    pub kind: String,
    /// The address.
    pub address: String,
}

/// More GPUs or NICs than any machine has: a file with more is no machine.
const MANY: usize = 1024;

impl Machine {
    /// Whether what was read from somewhere is a machine: every GPU has its answers about every other.
    pub fn check(&self) -> Result<()> {
        let count = self.gpus.len();
        if count > MANY || self.nics.len() > MANY || self.nodes.len() > MANY {
            return Err(Error::misuse(format!("more than {MANY} GPUs, NICs or NUMA nodes")));
        }
        if self.peers.len() != count || self.peers.iter().any(|row| row.len() != count) {
            return Err(Error::misuse(format!(
                "`peers` must have {count} rows of {count} answers, one for each pair of its {count} GPUs"
            )));
        }
        Ok(())
    }

    /// The way between two GPUs.
    pub fn link(&self, one: &Gpu, two: &Gpu) -> Link {
        // Two parts of one GPU sit at the same place.
        if std::ptr::eq(one, two) || (one.uuid.is_some() && one.uuid == two.uuid) {
            return Link::Same;
        }
        match nvlinks(one, two).max(nvlinks(two, one)) {
            0 => self.by_pci((&one.pci, one.numa), (&two.pci, two.numa)),
            count => Link::NvLink(count),
        }
    }

    /// The way between a GPU and a NIC.
    pub fn link_to_nic(&self, gpu: &Gpu, nic: &Nic) -> Link {
        self.by_pci((&gpu.pci, gpu.numa), (&nic.pci, nic.numa))
    }

    /// The way between two NICs.
    pub fn link_of_nics(&self, one: &Nic, two: &Nic) -> Link {
        if std::ptr::eq(one, two) {
            Link::Same
        } else {
            self.by_pci((&one.pci, one.numa), (&two.pci, two.numa))
        }
    }

    fn by_pci(&self, one: (&PciPath, Option<u32>), two: (&PciPath, Option<u32>)) -> Link {
        Link::by_pci(one, two, self.nodes.len() <= 1)
    }
}

/// Active NVLinks from one GPU to another: those that end there, and those through switches, which reach every GPU
/// that has links to switches.
fn nvlinks(one: &Gpu, two: &Gpu) -> u32 {
    let to = |gpu: &Gpu, wanted: &dyn Fn(&Remote) -> bool| {
        gpu.links.iter().filter(|link| link.active && wanted(&link.remote)).count() as u32
    };
    let address = two.pci.address();
    let direct = to(one, &|remote| matches!(remote, Remote::Gpu(pci) if Some(pci.as_str()) == address));
    let switched = |gpu| to(gpu, &|remote| *remote == Remote::Switch);
    direct + switched(one).min(switched(two))
}
