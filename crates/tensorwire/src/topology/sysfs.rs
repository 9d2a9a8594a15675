//! What the kernel says about the machine. The root is a parameter, so that a folder can stand in for a machine.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::model::{Gid, Nic, Node, Rdma};
use super::pci::PciPath;
use crate::device::gpu::Access;

/// NVIDIA's number of a vendor.
const NVIDIA: &str = "0x10de";
/// Addresses of an RDMA port that are looked at.
const GIDS: u32 = 256;

/// sysfs, or a folder that looks like it.
#[derive(Debug, Clone)]
pub struct Sysfs {
    root: PathBuf,
}

/// A device on a PCI bus.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PciPlace {
    /// Where it sits.
    pub pci: PciPath,
    /// Its NUMA node.
    pub numa: Option<u32>,
}

/// Where a NIC is put together from its parts.
#[derive(Debug, Default)]
struct Parts {
    pci: PciPath,
    numa: Option<u32>,
    interfaces: Vec<(String, Access, Option<u32>)>,
    rdma: Option<(Rdma, Access, Option<u32>)>,
}

impl Sysfs {
    /// `/sys`, or another root.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// NUMA nodes; a kernel without them has one.
    pub fn nodes(&self) -> Vec<Node> {
        let folder = self.root.join("devices/system/node");
        let number = |name: &String| name.strip_prefix("node")?.parse().ok();
        let mut numbers: Vec<u32> = names(&folder).iter().filter_map(number).collect();
        numbers.sort_unstable();
        let node = |number: u32| {
            let folder = folder.join(format!("node{number}"));
            let distances = text(folder.join("distance")).unwrap_or_default();
            Node {
                number,
                cpus: text(folder.join("cpulist")).unwrap_or_default(),
                memory: memory(&text(folder.join("meminfo")).unwrap_or_default()),
                distances: distances.split_whitespace().filter_map(|one| one.parse().ok()).collect(),
            }
        };
        if numbers.is_empty() {
            let cpus = text(self.root.join("devices/system/cpu/online")).unwrap_or_default();
            return vec![Node { number: 0, cpus, memory: 0, distances: Vec::new() }];
        }
        numbers.into_iter().map(node).collect()
    }

    /// NVIDIA's display controllers and accelerators, by address, with a driver or without.
    pub fn gpus(&self) -> Vec<PciPlace> {
        let folder = self.root.join("bus/pci/devices");
        let place = |name: &String| {
            let device = folder.join(name);
            let is_gpu = text(device.join("vendor")).is_some_and(|vendor| vendor == NVIDIA)
                && text(device.join("class")).is_some_and(|class| class.starts_with("0x03"));
            is_gpu.then(|| self.place(&device))
        };
        names(&folder).iter().filter_map(place).collect()
    }

    /// NICs by address. Those that are no device, such as bridges and tunnels, are left out, and so are virtual
    /// functions of NICs that are here themselves.
    pub fn nics(&self) -> Vec<Nic> {
        let mut all: BTreeMap<(PciPath, String), Parts> = BTreeMap::new();
        for name in names(self.root.join("class/net")) {
            if let Some((key, place)) = self.device("net", &name) {
                let folder = self.root.join("class/net").join(&name);
                let (up, speed) = (interface_state(&folder), interface_speed(&folder));
                all.entry(key).or_insert_with(|| Parts::at(place)).interfaces.push((name, up, speed));
            }
        }
        for name in names(self.root.join("class/infiniband")) {
            if let Some((key, place)) = self.device("infiniband", &name) {
                let port = best_port(&self.root.join("class/infiniband").join(&name), &name);
                all.entry(key).or_insert_with(|| Parts::at(place)).rdma = port;
            }
        }
        all.into_values().filter_map(Parts::nic).collect()
    }

    /// The device behind a name of a class, and what tells it from others: those that are not on PCI have only names.
    fn device(&self, class: &str, name: &str) -> Option<((PciPath, String), PciPlace)> {
        let device = self.root.join("class").join(class).join(name).join("device");
        if !device.exists() || device.join("physfn").exists() {
            return None;
        }
        let place = self.place(&device);
        let label = if place.pci == PciPath::default() { name.to_owned() } else { String::new() };
        Some(((place.pci.clone(), label), place))
    }

    fn place(&self, device: &Path) -> PciPlace {
        let path = fs::canonicalize(device).unwrap_or_default();
        let pci = PciPath::parse(&path.to_string_lossy());
        // A device below the PCI device, such as virtio's, does not know its node itself.
        let numa = match pci.address() {
            Some(address) => text(self.root.join("bus/pci/devices").join(address).join("numa_node")),
            None => text(device.join("numa_node")),
        };
        // -1 where the firmware does not say.
        PciPlace { pci, numa: numa.and_then(|number| number.parse().ok()) }
    }
}

impl Parts {
    fn at(place: PciPlace) -> Self {
        Self { pci: place.pci, numa: place.numa, ..Self::default() }
    }

    /// RDMA's word counts where there is one: an interface may be down while its port carries InfiniBand.
    fn nic(self) -> Option<Nic> {
        let (name, up, speed) = match (&self.rdma, self.interfaces.first()) {
            (Some((rdma, up, speed)), _) => (rdma.device.clone(), up.clone(), *speed),
            (None, Some((name, up, speed))) => (name.clone(), up.clone(), *speed),
            (None, None) => return None,
        };
        Some(Nic {
            name,
            interfaces: self.interfaces.into_iter().map(|(name, ..)| name).collect(),
            pci: self.pci,
            numa: self.numa,
            speed: speed.filter(|_| up.reason().is_none()),
            up,
            rdma: self.rdma.map(|(rdma, ..)| rdma),
        })
    }
}

fn interface_state(folder: &Path) -> Access {
    // Not readable while the interface is switched off.
    let carrier = text(folder.join("carrier"));
    match (text(folder.join("operstate")).as_deref(), carrier.as_deref()) {
        (Some("up"), _) | (Some("unknown"), Some("1")) => Access::Yes,
        (Some("unknown") | None, _) => Access::Unknown,
        (Some(state), Some("0")) => Access::No(format!("the link is {state}: nothing at the other end")),
        (Some(state), None) => Access::No(format!("the interface is {state}: it is switched off")),
        (Some(state), Some(_)) => Access::No(format!("the interface is {state}")),
    }
}

fn interface_speed(folder: &Path) -> Option<u32> {
    text(folder.join("speed"))?.parse().ok()
}

/// The port that is active, then fast, then first.
fn best_port(folder: &Path, device: &str) -> Option<(Rdma, Access, Option<u32>)> {
    let ports = folder.join("ports");
    let mut numbers: Vec<u32> = names(&ports).iter().filter_map(|name| name.parse().ok()).collect();
    numbers.sort_unstable();
    let port = |port: u32| {
        let folder = ports.join(port.to_string());
        let field = |name: &str| text(folder.join(name)).unwrap_or_default();
        let layer = field("link_layer");
        let up = match field("state").rsplit(": ").next() {
            Some("ACTIVE") => Access::Yes,
            None | Some("") => Access::Unknown,
            Some(state) => {
                let physical = field("phys_state");
                let physical = physical.rsplit(": ").next().filter(|text| !text.is_empty());
                let physical = physical.map(|text| format!(" ({text})")).unwrap_or_default();
                Access::No(format!("port {port} is {state}{physical}"))
            }
        };
        let speed = rate(&field("rate"));
        let gid = usable_gid(&layer, gids(&folder));
        (Rdma { device: device.to_owned(), port, layer, gid }, up, speed)
    };
    numbers
        .into_iter()
        .map(port)
        .max_by_key(|(rdma, up, speed)| (up.is_yes(), speed.unwrap_or(0), std::cmp::Reverse(rdma.port)))
}

/// `400 Gb/sec (4X NDR)` in megabits.
fn rate(text: &str) -> Option<u32> {
    let number: f64 = text.split_whitespace().next()?.parse().ok()?;
    let megabits = number * 1000.0;
    (0.0..=1e9).contains(&megabits).then_some(megabits as u32)
}

fn gids(port: &Path) -> Vec<Gid> {
    let mut all = Vec::new();
    for index in 0..GIDS {
        let Some(address) = text(port.join("gids").join(index.to_string())) else { break };
        // An empty place has no kind: reading it fails.
        let kind = text(port.join("gid_attrs/types").join(index.to_string())).unwrap_or_default();
        all.push(Gid { index, kind, address });
    }
    all
}

/// InfiniBand: the first that is set. Ethernet: one that crosses routers (RoCE v2), and of these one of an IPv4 address,
/// then one of a global IPv6 address, then a local one.
fn usable_gid(layer: &str, gids: Vec<Gid>) -> Option<Gid> {
    // The last half is the port's own; zeros mean that nothing was set.
    let is_set = |gid: &Gid| gid.address.split(':').skip(4).any(|part| part.bytes().any(|byte| byte != b'0'));
    let mut set = gids.into_iter().filter(is_set);
    if layer != "Ethernet" {
        return set.next();
    }
    let rank = |gid: &Gid| {
        let scope = match gid.address.as_str() {
            address if address.starts_with("0000:0000:0000:0000:0000:ffff:") => 2,
            address if address.starts_with("fe80:") => 0,
            _ => 1,
        };
        (gid.kind == "RoCE v2", scope, std::cmp::Reverse(gid.index))
    };
    set.max_by_key(rank)
}

/// Bytes behind MemTotal, as a node's meminfo says it.
fn memory(info: &str) -> u64 {
    let line = info.lines().find_map(|line| line.split_once("MemTotal:"));
    let kib = line.and_then(|(_, rest)| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// The trimmed text of a small file of the kernel's. `tensorwire doctor` reads such files, too.
#[doc(hidden)]
pub fn text(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The names in a folder, sorted; none where there is no such folder.
#[doc(hidden)]
pub fn names(folder: impl AsRef<Path>) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u32, kind: &str, address: &str) -> Gid {
        Gid { index, kind: kind.into(), address: address.into() }
    }

    #[test]
    fn the_usable_gid_of_ethernet_is_routable() {
        let none = "0000:0000:0000:0000:0000:0000:0000:0000";
        let local = "fe80:0000:0000:0000:0a00:27ff:fe00:0001";
        let mapped = "0000:0000:0000:0000:0000:ffff:0a00:0005";
        let table = vec![
            gid(0, "IB/RoCE v1", local),
            gid(1, "RoCE v2", local),
            gid(2, "IB/RoCE v1", mapped),
            gid(3, "RoCE v2", mapped),
            gid(4, "", none),
        ];
        assert_eq!(usable_gid("Ethernet", table.clone()).unwrap().index, 3);
        assert_eq!(usable_gid("Ethernet", table[..2].to_vec()).unwrap().index, 1);
        assert_eq!(usable_gid("Ethernet", table[..1].to_vec()).unwrap().index, 0);
        assert_eq!(usable_gid("Ethernet", table[4..].to_vec()), None);
        assert_eq!(usable_gid("InfiniBand", table).unwrap().index, 0);
        // A prefix alone is no address.
        assert_eq!(
            usable_gid("InfiniBand", vec![gid(0, "", "fe80:0000:0000:0000:0000:0000:0000:0000")]),
            None
        );
    }

    #[test]
    fn rates_are_numbers() {
        assert_eq!(rate("400 Gb/sec (4X NDR)"), Some(400_000));
        assert_eq!(rate("2.5 Gb/sec (1X SDR)"), Some(2_500));
        for wrong in ["", "fast", "-1 Gb/sec", "1e300 Gb/sec", "NaN Gb/sec"] {
            assert_eq!(rate(wrong), None, "{wrong}");
        }
    }
}
