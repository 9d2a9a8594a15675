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
use mpi::Mpi;

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
    /// Open MPI
    Mpi,
    /// Intel MPI
    Impi,
    /// MPICH
    Mpich,
    /// The fastest of Intel MPI, MPICH and Open MPI, those that are there, in each row
    Best,
    /// A bare loop over one TCP connection between two processes
    Socket,
    /// A bare loop of active messages by UCX between two processes, where libucp is found
    Ucx,
    /// Tensorwire itself with a key, so that all that goes to other hosts is sealed
    Sealed,
}

impl Peer {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gloo => "gloo",
            Self::Mpi => Mpi::Open.name(),
            Self::Impi => Mpi::Intel.name(),
            Self::Mpich => Mpi::Mpich.name(),
            Self::Best => "best",
            Self::Socket => "socket",
            Self::Ucx => "ucx",
            Self::Sealed => "sealed",
        }
    }

    /// Whether it is a library of MPI, or some of them.
    pub(super) fn is_mpi(self) -> bool {
        matches!(self, Self::Mpi | Self::Impi | Self::Mpich | Self::Best)
    }

    /// Whether this is the name of a library of MPI.
    pub(super) fn is_name_of_mpi(name: &str) -> bool {
        Mpi::ALL.iter().any(|mpi| mpi.name() == name)
    }

    /// The peers that are started for it.
    pub(super) fn all(self) -> &'static [Self] {
        match self {
            Self::Gloo => &[Self::Gloo],
            Self::Mpi => &[Self::Mpi],
            Self::Impi => &[Self::Impi],
            Self::Mpich => &[Self::Mpich],
            Self::Best => &[Self::Impi, Self::Mpich, Self::Mpi],
            Self::Socket => &[Self::Socket],
            Self::Ucx => &[Self::Ucx],
            Self::Sealed => &[Self::Sealed],
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
            Self::Mpi => Mpi::Open.start(hosts.ranks, cpus),
            Self::Impi => Mpi::Intel.start(hosts.ranks, cpus),
            Self::Mpich => Mpi::Mpich.start(hosts.ranks, cpus),
            // It stands for others.
            Self::Best => Err("it is none of its own".into()),
            Self::Socket => start::of_this_program(self.name(), hosts, cpus, &["--socket"], None, PATIENCE),
            Self::Ucx => {
                tensorwire::ucx_library().map_err(|error| error.to_string())?;
                start::of_this_program(self.name(), hosts, cpus, &["--ucx"], None, PATIENCE)
            }
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
