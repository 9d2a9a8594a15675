//! Libraries of MPI: one C program that is compiled for the run, its ranks started by the library's own launcher.

mod installed;

use std::process::{Command, Stdio};

use super::folder::Folder;
use super::{PATIENCE, PEER, wrapped};
use crate::bench::crew::{Crew, Pipes};
use crate::bench::spawn::Processes;
use crate::this_program;
use installed::Installed;

const WORKER: &str = include_str!("worker.c");

/// A library of MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::bench) enum Mpi {
    Open,
    Intel,
    Mpich,
}

impl Mpi {
    /// All of them, those that are usually the fastest first.
    pub(in crate::bench) const ALL: [Self; 3] = [Self::Intel, Self::Mpich, Self::Open];

    /// As `--against` and JSON lines call it.
    pub(in crate::bench) fn name(self) -> &'static str {
        match self {
            Self::Open => "mpi",
            Self::Intel => "impi",
            Self::Mpich => "mpich",
        }
    }

    /// For people.
    fn title(self) -> &'static str {
        match self {
            Self::Open => "Open MPI",
            Self::Intel => "Intel MPI",
            Self::Mpich => "MPICH",
        }
    }

    /// The program that starts its ranks. Intel's and MPICH's are both called mpirun, too, as everybody's is.
    fn launcher(self) -> &'static str {
        match self {
            Self::Open => "mpirun",
            Self::Intel | Self::Mpich => "mpiexec.hydra",
        }
    }

    /// What its launcher says of its version, and no other's does.
    fn signature(self) -> &'static str {
        match self {
            Self::Open => "Open MPI",
            Self::Intel => "Intel(R) MPI",
            Self::Mpich => "HYDRA build details",
        }
    }

    /// How to get it.
    fn remedy(self) -> &'static str {
        match self {
            Self::Open => "the package openmpi-bin has it",
            Self::Intel | Self::Mpich => "scripts/peers installs it",
        }
    }

    /// What the launcher is asked for: ranks of this machine, that nobody but we bind to cores.
    fn arguments(self, ranks: u32) -> Vec<String> {
        let mut arguments = Vec::new();
        match self {
            Self::Open => {
                if rustix::process::geteuid().is_root() {
                    arguments.push("--allow-run-as-root".to_owned());
                }
                arguments.extend(["--oversubscribe", "--bind-to", "none"].map(str::to_owned));
            }
            // Inside a job of Slurm it would ask that for ranks.
            Self::Intel | Self::Mpich => arguments.extend(["-launcher", "fork"].map(str::to_owned)),
        }
        arguments.extend(["-n".to_owned(), ranks.to_string()]);
        arguments
    }

    /// Settings that make it as fast as it can be on one machine, unless the caller has chosen others.
    fn settings(self) -> &'static [(&'static str, &'static str)] {
        match self {
            // Its own binding would differ from ours. Shared memory alone needs no other library.
            Self::Intel => &[("I_MPI_PIN", "0"), ("I_MPI_FABRICS", "shm")],
            Self::Open | Self::Mpich => &[],
        }
    }

    pub(super) fn start(self, ranks: u32, cpus: &[usize]) -> Result<Crew, String> {
        let installed = Installed::find(self)?;
        // Only until all ranks are up: then it goes, and a bench that is killed leaves nothing behind.
        let folder = Folder::new(self.name())?;
        let source = folder.write("worker.c", WORKER)?;
        let program = folder.path().join("worker");
        installed.compile(&source, &program)?;
        let mut pipes = Vec::new();
        for rank in 0..ranks {
            let orders = folder.pipe(&format!("orders-{rank}"))?;
            let answers = folder.pipe(&format!("answers-{rank}"))?;
            pipes.push(Pipes { orders, answers });
        }
        let mut command = wrapped(&[], &installed.launcher);
        command.args(self.arguments(ranks));
        let this = this_program::words().map_err(|error| format!("this program: {error}"))?;
        let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
        command.args(this).args([PEER, "0", &format!("--cpus={}", cpus.join(",")), "--"]);
        command.arg(&program).arg(folder.path()).stdin(Stdio::null()).stdout(Stdio::null());
        installed.set_variables(&mut command);
        let mut processes = Processes::default();
        processes
            .start(self.launcher().into(), &mut command)
            .map_err(|failure| failure.text().unwrap_or_default().to_owned())?;
        let mut crew = Crew::gather(self.name(), processes, pipes, PATIENCE)?;
        crew.bound = !cpus.is_empty();
        Ok(crew)
    }
}

/// Runs a compiler.
fn compile(compiler: &str, command: &mut Command) -> Result<(), String> {
    let compiled = command.stdin(Stdio::null()).output();
    let compiled = compiled.map_err(|error| format!("{compiler} cannot be started: {error}"))?;
    if compiled.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&compiled.stderr);
    let first = said.lines().next().unwrap_or("it says nothing");
    Err(format!("{compiler} could not compile its program: {first}"))
}
