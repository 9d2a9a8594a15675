//! Putting a machine together: a folder stands in for sysfs, and scripts for those who know GPUs.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tensorwire::device::gpu::{Access, Gpu, NvLink, Probe, Remote};
use tensorwire::device::secret::Id;
use tensorwire::device::{self, Deadline, DeviceId};
use tensorwire::topology::sysfs::Sysfs;
use tensorwire::topology::{Link, Source, gather};

/// A folder that looks like /sys and goes when the test does.
struct Fake(PathBuf);

impl Fake {
    fn new() -> Self {
        let id = Id::random().unwrap();
        let path = std::env::temp_dir().join(format!("tensorwire-sysfs-{id}"));
        fs::create_dir_all(path.join("bus/pci/devices")).unwrap();
        Self(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn link(&self, from: &str, to: impl AsRef<Path>) {
        let from = self.0.join(from);
        fs::create_dir_all(from.parent().unwrap()).unwrap();
        symlink(to, from).unwrap();
    }

    /// A PCI device; gives its folder.
    fn pci(&self, path: &str, files: &[(&str, &str)]) -> PathBuf {
        let folder = format!("devices/{path}");
        for (name, text) in files {
            self.write(&format!("{folder}/{name}"), &format!("{text}\n"));
        }
        let folder = self.0.join(folder);
        fs::create_dir_all(&folder).unwrap();
        let address = path.rsplit('/').next().unwrap();
        self.link(&format!("bus/pci/devices/{address}"), &folder);
        folder
    }

    fn gpu(&self, path: &str, node: &str) {
        self.pci(path, &[("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", node)]);
    }

    fn sysfs(&self) -> Sysfs {
        Sysfs::new(&self.0)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Knows some GPUs by their PCI addresses.
#[derive(Debug)]
struct Scripted {
    gpus: Vec<Gpu>,
    peer: Access,
    fabric: Access,
    checked: Access,
}

fn gpu(number: u8, pci: &str) -> Gpu {
    let mut gpu = Gpu::new(DeviceId::Gpu([number; 16]), format!("model {number}"), pci);
    (gpu.memory, gpu.capability) = (1 << 30, Some((9, 0)));
    gpu
}

impl Probe for Scripted {
    fn gpus(&self) -> device::Result<Vec<Gpu>> {
        Ok(self.gpus.clone())
    }

    fn peer(&self, _: &DeviceId, _: &DeviceId) -> Access {
        self.peer.clone()
    }

    fn check_peer(&self, _: &DeviceId, _: &DeviceId, _: Deadline) -> Access {
        self.checked.clone()
    }

    fn fabric(&self, _: &DeviceId) -> Access {
        self.fabric.clone()
    }

    fn multicast(&self, _: &DeviceId) -> Access {
        Access::Unknown
    }
}

fn source(name: &'static str, gpus: Vec<Gpu>, peer: Access, fabric: Access) -> Source {
    Source { name, probe: Ok(Arc::new(Scripted { gpus, peer, fabric, checked: Access::Unknown })) }
}

const ONE: &str = "pci0000:3a/0000:3a:00.0/0000:3b:00.0";
const TWO: &str = "pci0000:85/0000:85:00.0/0000:86:00.0";

fn two_sockets() -> Fake {
    let fake = Fake::new();
    for node in 0..2 {
        let folder = format!("devices/system/node/node{node}");
        fake.write(&format!("{folder}/cpulist"), &format!("{}-{}\n", node * 8, node * 8 + 7));
        fake.write(
            &format!("{folder}/meminfo"),
            &format!("Node {node} MemTotal:       1024 kB\nNode {node} MemFree: 1 kB\n"),
        );
        fake.write(&format!("{folder}/distance"), "10 21\n");
    }
    fake.gpu(ONE, "0");
    fake.gpu(TWO, "1");
    // Neither a GPU of NVIDIA's nor one at all.
    fake.pci("pci0000:00/0000:00:02.0", &[("vendor", "0x8086"), ("class", "0x030000"), ("numa_node", "0")]);
    fake.pci("pci0000:00/0000:00:03.0", &[("vendor", "0x10de"), ("class", "0x040300"), ("numa_node", "0")]);
    fake
}

fn rdma(fake: &Fake, device: &str, interface: &str, path: &str, state: &str) {
    let folder = fake.pci(path, &[("vendor", "0x15b3"), ("class", "0x020000"), ("numa_node", "1")]);
    fake.link(&format!("class/net/{interface}/device"), &folder);
    fake.write(&format!("class/net/{interface}/operstate"), "down\n");
    fake.link(&format!("class/infiniband/{device}/device"), &folder);
    let port = format!("class/infiniband/{device}/ports/1");
    fake.write(&format!("{port}/state"), &format!("{state}\n"));
    fake.write(&format!("{port}/phys_state"), "3: Disabled\n");
    fake.write(&format!("{port}/rate"), "100 Gb/sec (4X EDR)\n");
    fake.write(&format!("{port}/link_layer"), "Ethernet\n");
    for (index, (kind, address)) in [
        ("RoCE v2", "fe80:0000:0000:0000:0a00:27ff:fe00:0001"),
        ("RoCE v2", "0000:0000:0000:0000:0000:ffff:0a00:0005"),
    ]
    .iter()
    .enumerate()
    {
        fake.write(&format!("{port}/gids/{index}"), &format!("{address}\n"));
        fake.write(&format!("{port}/gid_attrs/types/{index}"), &format!("{kind}\n"));
    }
}

#[test]
fn gpus_are_found_with_their_places() {
    let fake = two_sockets();
    let link = NvLink::new(3, true, Remote::Gpu("0000:86:00.0".into()));
    let mut first = gpu(1, "0000:3b:00.0");
    first.links.push(link);
    let gpus = vec![first, gpu(2, "0000:86:00.0")];
    let machine = gather("a", &fake.sysfs(), &[source("NVML", gpus, Access::Yes, Access::no("none"))], None);
    machine.check().unwrap();
    assert_eq!(machine.notes, [""; 0]);
    let places: Vec<(String, Option<u32>)> =
        machine.gpus.iter().map(|gpu| (gpu.pci.to_string(), gpu.numa)).collect();
    assert_eq!(places, [(ONE.to_owned(), Some(0)), (TWO.to_owned(), Some(1))]);
    assert_eq!(machine.gpus[0].uuid.as_deref(), Some("GPU-01010101-0101-0101-0101-010101010101"));
    // Known from one side only, it is a link of both.
    assert_eq!(machine.link(&machine.gpus[1], &machine.gpus[0]), Link::NvLink(1));
    assert_eq!(machine.peers, vec![vec![Access::Yes; 2]; 2]);
    assert_eq!(machine.gpus[0].fabric_access.reason(), Some("none"));
    let nodes: Vec<(&str, u64)> =
        machine.nodes.iter().map(|node| (node.cpus.as_str(), node.memory)).collect();
    assert_eq!(nodes, [("0-7", 1 << 20), ("8-15", 1 << 20)]);
    assert_eq!(machine.nodes[0].distances, [10, 21]);
}

#[test]
fn the_first_source_that_knows_is_believed() {
    let fake = two_sockets();
    let (one, two) = ("0000:3b:00.0", "0000:86:00.0");
    let mut seen = gpu(1, one);
    (seen.ordinal, seen.memory) = (Some(0), 0);
    // The first sees one GPU only, as a process with a narrow view does.
    let driver = source("driver", vec![seen], Access::Unknown, Access::no("cuMemCreate refused"));
    let nvml = source("NVML", vec![gpu(1, one), gpu(2, two)], Access::no("chipset"), Access::no("no fabric"));
    let machine = gather("a", &fake.sysfs(), &[driver, nvml], None);
    assert_eq!(machine.gpus.len(), 2);
    assert_eq!((machine.gpus[0].ordinal, machine.gpus[1].ordinal), (Some(0), None));
    assert_eq!(machine.gpus[0].memory, 1 << 30, "who does not know is not believed");
    assert_eq!(machine.gpus[0].fabric_access.reason(), Some("cuMemCreate refused"));
    assert_eq!(machine.gpus[1].fabric_access.reason(), Some("no fabric"));
    assert_eq!(machine.peers[0][1].reason(), Some("chipset"));
    assert!(machine.peers[0][0].is_yes());
}

#[test]
fn a_check_is_made_by_who_can_and_said_where_nobody_can() {
    let fake = two_sockets();
    let gpus = || vec![gpu(1, "0000:3b:00.0"), gpu(2, "0000:86:00.0")];
    let patience = Some(Duration::from_secs(20));
    let nvml = || source("NVML", gpus(), Access::Yes, Access::Unknown);
    let machine = gather("a", &fake.sysfs(), &[nvml()], patience);
    assert!(machine.peers[0][1].is_yes() && machine.notes[0].contains("2 pairs of GPUs were not checked"));
    let checked = Access::no("byte 17 is wrong");
    let driver = Scripted { gpus: gpus(), peer: Access::Yes, fabric: Access::Unknown, checked };
    let driver = Source { name: "driver", probe: Ok(Arc::new(driver)) };
    let machine = gather("a", &fake.sysfs(), &[nvml(), driver], patience);
    assert_eq!((machine.peers[0][1].reason(), machine.notes.len()), (Some("byte 17 is wrong"), 0));
    // A no needs no check.
    let machine =
        gather("a", &fake.sysfs(), &[source("NVML", gpus(), Access::no("chipset"), Access::Yes)], patience);
    assert_eq!((machine.peers[1][0].reason(), machine.notes.len()), (Some("chipset"), 0));
}

#[test]
fn parts_of_one_gpu_share_its_place_and_a_gpu_outside_sysfs_is_kept() {
    let fake = two_sockets();
    let one = "0000:3b:00.0";
    let gpus = vec![gpu(1, one), gpu(2, one), gpu(3, "0000:ff:00.0")];
    let machine = gather("a", &fake.sysfs(), &[source("driver", gpus, Access::Yes, Access::Unknown)], None);
    let places: Vec<String> = machine.gpus.iter().map(|gpu| gpu.pci.to_string()).collect();
    assert_eq!(places, [ONE, TWO, ONE, "0000:ff:00.0"]);
    machine.check().unwrap();
    assert_eq!(machine.link(&machine.gpus[0], &machine.gpus[2]), Link::Same, "one chip");
    assert_eq!(machine.link(&machine.gpus[0], &machine.gpus[3]), Link::Sys);
}

#[test]
fn without_a_driver_the_reason_is_noted() {
    let fake = two_sockets();
    let error =
        device::Error::Unsupported { what: "NVML".into(), need: "a library".into(), have: "none".into() };
    let machine = gather("a", &fake.sysfs(), &[Source { name: "NVML", probe: Err(error) }], None);
    assert_eq!(machine.gpus.len(), 2);
    assert_eq!((machine.gpus[0].uuid.as_ref(), machine.peers[0][1].clone()), (None, Access::Unknown));
    assert_eq!(machine.notes.len(), 3);
    assert!(machine.notes[0].contains("needs a library"), "{:?}", machine.notes);
    assert!(
        machine.notes[1].contains("no driver answers for the GPU at 0000:3b:00.0"),
        "{:?}",
        machine.notes
    );
}

#[test]
fn nics_have_their_port_and_address() {
    let fake = two_sockets();
    rdma(&fake, "mlx5_0", "ens1", "pci0000:d7/0000:d7:00.0/0000:d8:00.0", "4: ACTIVE");
    rdma(&fake, "mlx5_1", "ens2", "pci0000:d7/0000:d7:00.0/0000:d8:00.1", "1: DOWN");
    // A virtual function of a NIC that is here itself.
    let part = fake.pci("pci0000:d7/0000:d7:00.0/0000:d8:00.2", &[("numa_node", "1")]);
    fs::create_dir(part.join("physfn")).unwrap();
    fake.link("class/net/ens1v0/device", &part);
    // Below virtio, and on no device at all.
    let virtio = fake.pci("pci0000:00/0000:00:04.0", &[("numa_node", "-1")]).join("virtio0");
    fs::create_dir_all(&virtio).unwrap();
    fake.link("class/net/eth0/device", &virtio);
    fake.write("class/net/eth0/operstate", "up\n");
    fake.write("class/net/eth0/speed", "-1\n");
    fake.write("class/net/lo/operstate", "unknown\n");
    let machine = gather("a", &fake.sysfs(), &[], None);
    let names: Vec<&str> = machine.nics.iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!(names, ["eth0", "mlx5_0", "mlx5_1"]);
    let [eth0, active, down] = machine.nics.as_slice() else { unreachable!() };
    assert_eq!(
        (eth0.pci.to_string().as_str(), eth0.numa, eth0.speed),
        ("pci0000:00/0000:00:04.0", None, None)
    );
    assert!(eth0.up.is_yes() && eth0.rdma.is_none());
    assert_eq!(
        (active.interfaces.as_slice(), active.speed, active.numa),
        (&["ens1".to_owned()][..], Some(100_000), Some(1))
    );
    let port = active.rdma.as_ref().unwrap();
    assert_eq!((port.port, port.layer.as_str(), port.gid.as_ref().unwrap().index), (1, "Ethernet", 1));
    assert_eq!((down.up.reason(), down.speed), (Some("port 1 is DOWN (Disabled)"), None));
    assert_eq!(machine.link_of_nics(active, down), Link::Pix);
    assert_eq!(machine.link_of_nics(active, active), Link::Same);
}

#[test]
fn an_empty_folder_and_this_machine_are_machines() {
    let fake = Fake::new();
    let machine = gather("empty", &fake.sysfs(), &[], None);
    assert_eq!((machine.gpus.len(), machine.nics.len(), machine.nodes.len()), (0, 0, 1));
    let none = gather("none", &Sysfs::new("/no/such/folder"), &[], None);
    assert_eq!((none.gpus.len(), none.nodes.len()), (0, 1));
    let here = gather("here", &Sysfs::new("/sys"), &[], None);
    here.check().unwrap();
    assert!(!here.nodes.is_empty());
}
