//! Which NIC a GPU should use.

use std::cmp::Reverse;

use super::link::Link;
use super::model::{Gpu, Machine, Nic};
use crate::error::{Error, Result};

/// The NIC of a GPU. NICs and GPUs are numbered as in their machine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Affinity {
    /// The GPU.
    pub gpu: usize,
    /// Its NIC.
    pub nic: usize,
    /// The way between them.
    pub link: Link,
    /// Whether it was configured, and not chosen.
    pub configured: bool,
    /// NICs that are nearer, but whose link is down.
    pub passed: Vec<usize>,
}

/// The NIC for each GPU; none at all where the machine has no NIC.
///
/// The nearest is the one with the most parts of its PCI path in common with the GPU's, then one of the same NUMA node,
/// then one whose link is up, then the fastest. Only NICs with RDMA count where there are any. One that is down is
/// passed over while another is up, and named. GPUs with several that are equal get different ones.
///
/// `configured` overrides all this: its first name is for the first GPU, and so on, starting again at its end.
pub fn nearest(machine: &Machine, configured: &[String]) -> Result<Vec<Affinity>> {
    if machine.nics.is_empty() && configured.is_empty() {
        return Ok(Vec::new());
    }
    let mut used = vec![0_usize; machine.nics.len()];
    let mut all = Vec::with_capacity(machine.gpus.len());
    for (index, gpu) in machine.gpus.iter().enumerate() {
        let (nic, passed) = match configured.get(index % configured.len().max(1)) {
            Some(name) => (named(machine, name)?, Vec::new()),
            None => choose(machine, gpu, &used),
        };
        used[nic] += 1;
        let link = machine.link_to_nic(gpu, &machine.nics[nic]);
        all.push(Affinity { gpu: index, nic, link, configured: !configured.is_empty(), passed });
    }
    Ok(all)
}

/// The best NIC, and those that would have been better were they up.
fn choose(machine: &Machine, gpu: &Gpu, used: &[usize]) -> (usize, Vec<usize>) {
    let rank = |nic: &Nic| {
        let near = gpu.pci.common(&nic.pci);
        let same_node = gpu.numa.is_some() && gpu.numa == nic.numa;
        Reverse((near, same_node, is_up(nic), nic.speed.unwrap_or(0)))
    };
    let rdma = machine.nics.iter().any(|nic| nic.rdma.is_some());
    let mut order: Vec<usize> =
        (0..machine.nics.len()).filter(|index| machine.nics[*index].rdma.is_some() == rdma).collect();
    // The sort is stable: equal ones stay in the order of how often they are used, and then of their addresses.
    order.sort_by_key(|index| (rank(&machine.nics[*index]), used[*index]));
    let first_up = order.iter().position(|index| is_up(&machine.nics[*index])).unwrap_or(0);
    (order[first_up], order[..first_up].to_vec())
}

/// What nobody could ask counts as up.
fn is_up(nic: &Nic) -> bool {
    nic.up.reason().is_none()
}

fn named(machine: &Machine, name: &str) -> Result<usize> {
    let is_it = |nic: &Nic| nic.name == name || nic.interfaces.iter().any(|interface| interface == name);
    machine.nics.iter().position(is_it).ok_or_else(|| {
        let known: Vec<&str> = machine.nics.iter().map(|nic| nic.name.as_str()).collect();
        let known = if known.is_empty() { "none".into() } else { known.join(", ") };
        Error::misuse(format!("no NIC is named {name}; this machine has: {known}"))
    })
}
