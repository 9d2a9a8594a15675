//! Other libraries that do the same on the same machine, measured by the same protocol.

mod become_peer;
mod folder;
mod mpi;

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::process::Command;
use std::time::Duration;

pub(crate) use become_peer::{Args as PeerArgs, execute as become_peer};
pub(super) use folder::Folder;

use super::crew::Crew;
use super::device::BenchDevice;
use super::placement::Hosts;
use super::start;
use super::torch::{self, Backend};
use crate::this_program;

/// What a process that becomes a peer is started as.
pub(crate) const PEER: &str = "__bench-peer";

/// How long a peer may take to come up, and to carry out one order.
pub(super) const PATIENCE: Duration = Duration::from_secs(300);

/// A library to compare with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Peer {
    /// Gloo, through torch.distributed of $PYTHON or python3
    Gloo,
    /// Open MPI, through mpicc and mpirun
    Mpi,
    /// A bare loop over one TCP connection between two processes
    Socket,
    /// Tensorwire itself with a key, so that all that goes to other hosts is sealed
    Sealed,
}

impl Peer {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gloo => "gloo",
            Self::Mpi => "mpi",
            Self::Socket => "socket",
            Self::Sealed => "sealed",
        }
    }

    /// Whether its ranks are Python programs that call it through torch.
    pub(super) fn is_called_through_torch(self) -> bool {
        self == Self::Gloo
    }

    /// Starts its ranks, each on the core that ours have too (without cores: on any); or why it cannot be.
    pub(super) fn start(self, hosts: Hosts, cpus: &[usize], device: BenchDevice) -> Result<Crew, String> {
        match self {
            Self::Gloo => torch::start(Backend::Gloo, hosts, cpus, device),
            Self::Mpi => mpi::start(hosts.ranks, cpus),
            Self::Socket => start::of_this_program(self.name(), hosts, cpus, &["--socket"], None, PATIENCE),
            Self::Sealed => {
                let mut key = [0; 32];
                let random = File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut key));
                random.map_err(|error| format!("no key could be made: {error}"))?;
                let key: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
                let key = ("TENSORWIRE_KEY", key);
                start::of_this_program(self.name(), hosts, cpus, &[], Some(key), PATIENCE)
            }
        }
    }
}

/// A command that binds itself to the core of its rank, dies with this process, and becomes the program. Without
/// cores it binds nothing.
pub(super) fn wrapped(cpus: &[usize], program: impl AsRef<OsStr>) -> Command {
    let mut command = this_program::command();
    let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
    command.arg(PEER).arg(std::process::id().to_string()).arg(format!("--cpus={}", cpus.join(",")));
    command.arg("--").arg(program);
    command
}
