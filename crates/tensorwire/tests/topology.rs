//! The rules of the topology, on whole machines that are files.
#![allow(clippy::unwrap_used)]

use tensorwire::topology::{Affinity, Link, Machine, nearest};
use tensorwire::{Error, device::gpu::Access};

const MACHINES: [&str; 5] = ["nvswitch-8-gpus", "pcie-4-gpus-2-sockets", "laptop", "vm-1-gpu", "vm-no-gpu"];

fn machine(name: &str) -> Machine {
    let path = format!("{}/tests/machines/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let mut file: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let machine: Machine = serde_json::from_value(file["machine"].take()).unwrap();
    machine.check().unwrap();
    machine
}

/// The names of the NICs of its GPUs.
fn chosen(machine: &Machine) -> Vec<&str> {
    let affinities = nearest(machine, &[]).unwrap();
    affinities.iter().map(|affinity| machine.nics[affinity.nic].name.as_str()).collect()
}

fn links(machine: &Machine) -> Vec<String> {
    let row =
        |one| machine.gpus.iter().map(|two| machine.link(one, two).to_string()).collect::<Vec<_>>().join(" ");
    machine.gpus.iter().map(row).collect()
}

#[test]
fn machines_survive_being_saved() {
    for name in MACHINES {
        let machine = machine(name);
        let saved = serde_json::to_string(&machine).unwrap();
        assert_eq!(serde_json::from_str::<Machine>(&saved).unwrap(), machine, "{name}");
        let affinities = nearest(&machine, &[]).unwrap();
        assert_eq!(affinities.len(), machine.gpus.len(), "{name}");
    }
}

#[test]
fn behind_switches_every_gpu_reaches_every_other_and_has_a_nic_of_its_own() {
    let machine = machine("nvswitch-8-gpus");
    for (index, row) in links(&machine).iter().enumerate() {
        let mut expected = ["NV18"; 8];
        expected[index] = "X";
        assert_eq!(row, &expected.join(" "));
    }
    assert_eq!(chosen(&machine), (0..8).map(|index| format!("mlx5_{index}")).collect::<Vec<_>>());
    for affinity in nearest(&machine, &[]).unwrap() {
        assert_eq!((affinity.link, affinity.passed.len()), (Link::Pix, 0));
    }
    // Inside a node, and across.
    assert_eq!(machine.link_to_nic(&machine.gpus[0], &machine.nics[1]), Link::Node);
    assert_eq!(machine.link_to_nic(&machine.gpus[0], &machine.nics[7]), Link::Sys);
}

#[test]
fn links_that_are_down_do_not_count_and_hide_no_others() {
    let mut machine = machine("nvswitch-8-gpus");
    machine.gpus[3].links[0].active = false;
    machine.gpus[3].links[7].active = false;
    assert_eq!(machine.link(&machine.gpus[0], &machine.gpus[3]), Link::NvLink(16));
    assert_eq!(machine.link(&machine.gpus[3], &machine.gpus[5]), Link::NvLink(16));
    assert_eq!(machine.link(&machine.gpus[0], &machine.gpus[5]), Link::NvLink(18));
    machine.gpus[3].links.iter_mut().for_each(|link| link.active = false);
    assert_eq!(machine.link(&machine.gpus[0], &machine.gpus[3]), Link::Node);
}

#[test]
fn on_two_sockets_the_words_of_the_legend_are_met() {
    let machine = machine("pcie-4-gpus-2-sockets");
    assert_eq!(links(&machine), ["X NV3 SYS SYS", "NV3 X SYS SYS", "SYS SYS X NODE", "SYS SYS NODE X"]);
    assert!(machine.peers[0][1].is_yes());
    assert!(machine.peers[0][2].reason().unwrap().contains("interconnect"));
}

#[test]
fn a_nic_that_is_down_is_passed_over_and_named() {
    let mut machine = machine("pcie-4-gpus-2-sockets");
    let affinities = nearest(&machine, &[]).unwrap();
    let (first, last) = (&affinities[0], &affinities[3]);
    assert_eq!((first.nic, first.link, first.passed.as_slice()), (0, Link::Node, &[][..]));
    assert_eq!((last.nic, last.link, last.passed.as_slice()), (0, Link::Sys, &[1][..]));
    // Up again, it is the nearest.
    machine.nics[1].up = Access::Yes;
    assert_eq!(chosen(&machine), ["mlx5_0", "mlx5_0", "mlx5_1", "mlx5_1"]);
    // With none up the nearest is told all the same.
    machine.nics.iter_mut().for_each(|nic| nic.up = Access::no("pulled"));
    assert_eq!(chosen(&machine), ["mlx5_0", "mlx5_0", "mlx5_1", "mlx5_1"]);
}

#[test]
fn prefix_comes_before_node_before_speed() {
    let mut machine = machine("pcie-4-gpus-2-sockets");
    machine.nics[1].up = Access::Yes;
    machine.nics[1].speed = Some(25_000);
    // Slower, but of the same node.
    assert_eq!(chosen(&machine)[2], "mlx5_1");
    // Slower and of another node, as its firmware says, but below the same bridge.
    machine.nics[1].numa = None;
    machine.nics[1].pci = tensorwire::topology::PciPath::parse("pci0000:85/0000:85:02.0/0000:88:00.0");
    assert_eq!(chosen(&machine)[2], "mlx5_1");
    // Neither: then the faster one, wherever it is.
    machine.nics[1].pci = tensorwire::topology::PciPath::parse("pci0000:d7/0000:d7:00.0/0000:d8:00.0");
    machine.nics[0].numa = None;
    assert_eq!(chosen(&machine)[2], "mlx5_0");
}

#[test]
fn equal_nics_are_spread() {
    let mut machine = machine("nvswitch-8-gpus");
    // All at one place that is far from everyone.
    for nic in &mut machine.nics {
        nic.pci = tensorwire::topology::PciPath::parse("pci0000:f0/0000:f0:00.0");
        nic.numa = None;
    }
    let mut names = chosen(&machine);
    names.sort_unstable();
    assert_eq!(names, (0..8).map(|index| format!("mlx5_{index}")).collect::<Vec<_>>());
    // Two for eight: four each.
    machine.nics.truncate(2);
    let names = chosen(&machine);
    assert_eq!(names.iter().filter(|name| **name == "mlx5_0").count(), 4, "{names:?}");
}

#[test]
fn a_configured_list_overrides() {
    let machine = machine("nvswitch-8-gpus");
    let list = ["mlx5_7", "ib3", "eno1"].map(str::to_owned);
    let affinities = nearest(&machine, &list).unwrap();
    let names: Vec<&str> = affinities.iter().map(|one| machine.nics[one.nic].name.as_str()).collect();
    assert_eq!(names, ["mlx5_7", "mlx5_3", "eno1", "mlx5_7", "mlx5_3", "eno1", "mlx5_7", "mlx5_3"]);
    assert!(affinities.iter().all(|affinity: &Affinity| affinity.configured));
    let error = nearest(&machine, &["mlx5_9".to_owned()]).unwrap_err();
    assert!(
        matches!(&error, Error::Misuse(text) if text.contains("mlx5_9") && text.contains("mlx5_0")),
        "{error}"
    );
    // A list for a machine without GPUs asks for nothing.
    assert_eq!(nearest(&self::machine("vm-no-gpu"), &list).unwrap(), []);
}

#[test]
fn small_machines_have_what_there_is() {
    let laptop = machine("laptop");
    assert_eq!(chosen(&laptop), ["wlp3s0"]);
    assert!(nearest(&laptop, &[]).unwrap()[0].passed.is_empty(), "the other one is no nearer");
    let vm = machine("vm-1-gpu");
    assert_eq!(nearest(&vm, &[]).unwrap()[0].link, Link::Phb);
    assert_eq!(
        vm.gpus[0].fabric_access.reason(),
        Some("the device attribute says yes, but cuMemCreate failed: CUDA_ERROR_NOT_PERMITTED")
    );
    let none = machine("vm-no-gpu");
    assert_eq!((none.gpus.len(), none.notes.len()), (0, 1));
    let mut alone = vm;
    alone.nics.clear();
    assert_eq!(nearest(&alone, &[]).unwrap(), []);
    assert!(nearest(&alone, &["eth0".to_owned()]).unwrap_err().to_string().contains("has: none"));
}

#[test]
fn a_file_that_is_no_machine_is_refused() {
    let mut machine = machine("pcie-4-gpus-2-sockets");
    machine.peers[2].pop();
    assert!(machine.check().unwrap_err().to_string().contains("4 rows of 4 answers"));
    machine.peers.clear();
    assert!(machine.check().is_err());
    machine.gpus.clear();
    machine.check().unwrap();
    machine.nics = vec![machine.nics[0].clone(); 2000];
    assert!(machine.check().unwrap_err().to_string().contains("more than 1024"));
}
