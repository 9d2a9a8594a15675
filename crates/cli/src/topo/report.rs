//! What is shown and saved: the machine, and what follows from it.

use serde::{Deserialize, Serialize};
use tensorwire::topology::{self, Link, Machine};

use super::measure::Measured;
use crate::exit::Failure;

/// A machine with all that is said about it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Report {
    /// The version that asked.
    #[serde(default)]
    pub(super) tensorwire: String,
    /// When.
    #[serde(default)]
    pub(super) date: String,
    /// The processors, their memory and what runs on them; nothing in older files.
    #[serde(default)]
    pub(super) system: crate::machine::Machine,
    pub(super) machine: Machine,
    /// The NICs that were configured for the GPUs.
    #[serde(default)]
    configured: Vec<String>,
    /// The way between any two GPUs and NICs. What is saved of this and the next is not read again.
    #[serde(default, skip_deserializing)]
    pub(super) ways: Ways,
    /// The NIC of each GPU.
    #[serde(default, skip_deserializing)]
    pub(super) affinity: Vec<Choice>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) measured: Option<Measured>,
}

/// The matrix.
#[derive(Debug, Default, Serialize)]
pub(super) struct Ways {
    /// GPUs, then NICs.
    pub(super) names: Vec<String>,
    pub(super) links: Vec<Vec<String>>,
}

/// The NIC of a GPU.
#[derive(Debug, Serialize)]
pub(super) struct Choice {
    pub(super) gpu: usize,
    pub(super) nic: usize,
    pub(super) link: String,
    pub(super) configured: bool,
    /// Nearer ones that are down.
    pub(super) passed: Vec<usize>,
}

impl Report {
    pub(super) fn new(
        machine: Machine,
        configured: Vec<String>,
        measured: Option<Measured>,
    ) -> Result<Self, Failure> {
        let tensorwire = env!("CARGO_PKG_VERSION").into();
        let (ways, affinity) = (Ways::default(), Vec::new());
        let cores = rustix::thread::sched_getaffinity(None).map_or(0, |set| set.count() as usize);
        let (date, system) = (crate::html::now(), crate::machine::Machine::here(cores));
        Self { tensorwire, date, system, machine, configured, ways, affinity, measured }.checked()
    }

    /// With all that follows from the machine, if it is one.
    pub(super) fn checked(mut self) -> Result<Self, Failure> {
        self.machine.check()?;
        if let Some(measured) = &self.measured {
            measured.check().map_err(Failure::failed)?;
        }
        let choice = |affinity: topology::Affinity| Choice {
            gpu: affinity.gpu,
            nic: affinity.nic,
            link: affinity.link.to_string(),
            configured: affinity.configured,
            passed: affinity.passed,
        };
        self.affinity = topology::nearest(&self.machine, &self.configured)?.into_iter().map(choice).collect();
        self.ways = Ways::of(&self.machine);
        Ok(self)
    }
}

impl Ways {
    fn of(machine: &Machine) -> Self {
        let gpus = (0..machine.gpus.len()).map(gpu_name);
        let names = gpus.chain((0..machine.nics.len()).map(nic_name)).collect();
        let show = |link: Link| link.to_string();
        let of_gpu = machine.gpus.iter().map(|one| {
            let gpus = machine.gpus.iter().map(|two| show(machine.link(one, two)));
            gpus.chain(machine.nics.iter().map(|nic| show(machine.link_to_nic(one, nic)))).collect()
        });
        let of_nic = machine.nics.iter().map(|one| {
            let gpus = machine.gpus.iter().map(|gpu| show(machine.link_to_nic(gpu, one)));
            gpus.chain(machine.nics.iter().map(|two| show(machine.link_of_nics(one, two)))).collect()
        });
        Self { names, links: of_gpu.chain(of_nic).collect() }
    }
}

pub(super) fn gpu_name(index: usize) -> String {
    format!("GPU{index}")
}

pub(super) fn nic_name(index: usize) -> String {
    format!("NIC{index}")
}
