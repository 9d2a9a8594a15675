//! Ranks of torch.distributed, one Python process each. The backend is Gloo, or tensorwire as users of torch call
//! it. Both run the same program.

use std::net::Ipv4Addr;

use tensorwire::store::TcpServer;

use super::OURS;
use super::crew::{Crew, Pipes};
use super::device::BenchDevice;
use super::peers::{Folder, PATIENCE, wrapped};
use super::placement::Hosts;
use super::spawn::Processes;
use crate::python::python;
use crate::run::variables;

const WORKER: &str = include_str!("worker.py");
const STEP: &str = include_str!("step.py");
const SPARSE: &str = include_str!("sparse.py");

/// Who carries the bytes for torch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Backend {
    Gloo,
    Tensorwire,
}

impl Backend {
    /// As torch calls it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gloo => "gloo",
            Self::Tensorwire => OURS,
        }
    }
}

/// Starts the ranks of a backend, each on its core; without cores nothing is bound. Or why it cannot be.
pub(super) fn start(
    backend: Backend,
    hosts: Hosts,
    cpus: &[usize],
    device: BenchDevice,
) -> Result<Crew, String> {
    let python = python();
    let store = TcpServer::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| error.to_string())?;
    let run = variables::Run { world: hosts.ranks, port: store.local_addr().port(), id: "bench".into() };
    // Only until all are up: then it goes, and a bench that is killed leaves nothing behind.
    let folder = Folder::new("torch")?;
    let script = folder.write("worker.py", WORKER)?;
    folder.write("step.py", STEP)?;
    folder.write("sparse.py", SPARSE)?;
    let owner = if backend == Backend::Gloo { "gloo's " } else { "" };
    let mut processes = Processes::default();
    let mut pipes = Vec::new();
    for rank in 0..hosts.ranks {
        let mut command = wrapped(cpus, &python);
        command.arg(&script).arg(backend.name()).arg(device.to_string());
        command.arg(hosts.turn(rank).to_string()).arg(if hosts.are_many() { "far" } else { "near" });
        command.envs(hosts.variable(rank));
        // Modules beside the script are read once: what Python would keep of them cannot be of use again.
        command.envs(variables::of_rank(&run, rank)).env("OMP_NUM_THREADS", "1");
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        pipes.push(Pipes::of(&mut processes, format!("{owner}rank {rank}"), command)?);
    }
    let mut crew = Crew::gather(backend.name(), processes, pipes, PATIENCE)
        .map_err(|why| format!("{why} (python is {}; PYTHON names another one)", python.display()))?;
    crew.keep(store);
    crew.through_torch(!cpus.is_empty());
    Ok(crew)
}
