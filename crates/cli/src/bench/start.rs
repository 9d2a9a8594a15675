//! Starts the ranks of a run: ours, and those of the peers.

use std::net::Ipv4Addr;
use std::time::Duration;

use tensorwire::store::TcpServer;

use super::binding::Bind;
use super::crew::{Crew, Pipes};
use super::placement::Hosts;
use super::spawn::Processes;
use super::torch::{self, Backend};
use super::{Chosen, OURS, RANK, Through};
use crate::exit::Failure;
use crate::run::variables;
use crate::this_program;

/// What has to be known to start ranks.
#[derive(Debug)]
pub(super) struct Start<'a> {
    pub(super) chosen: &'a Chosen,
    pub(super) hosts: Hosts,
    pub(super) cpus: &'a [usize],
    /// How long an answer of our ranks may take.
    pub(super) patience: Duration,
}

impl Start<'_> {
    /// All crews, ours first. Each peer is called as it is at home, and we are called as each of them is, unless a
    /// caller was chosen: through torch beside Gloo, from Rust beside Open MPI. `leave_out` hears which peer
    /// cannot take part, and why.
    pub(super) fn crews(
        &self,
        doing: impl Fn(&str),
        leave_out: impl Fn(&str, &str) -> Result<(), Failure>,
    ) -> Result<Vec<Crew>, Failure> {
        let mut peers: Vec<Crew> = Vec::new();
        for peer in self.chosen.against.iter().flat_map(|peer| peer.all()) {
            if peers.iter().any(|crew| crew.peer == peer.name()) {
                continue;
            }
            doing(&format!("starting {}", peer.name()));
            let cores = self.cores(false, peer.is_called_through_torch());
            match peer.start(self.hosts, cores, self.chosen.device) {
                Ok(crew) => peers.push(crew),
                Err(why) => leave_out(peer.name(), &why)?,
            }
        }
        doing("starting ranks");
        let mut ours = Vec::new();
        match self.chosen.through {
            Some(Through::Native) => {}
            Some(Through::Torch) => ours.push(self.through_torch().map_err(Failure::failed)?),
            None if !peers.iter().any(|crew| crew.torch) => {}
            None => match self.through_torch() {
                Ok(crew) => ours.push(crew),
                Err(why) => {
                    let why = format!("{why}; --through native measures it beside calls from Rust");
                    leave_out(Backend::Gloo.name(), &why)?;
                    peers.retain(|crew| !crew.torch);
                }
            },
        }
        let is_at_home = self.chosen.through.is_none() && peers.iter().any(|crew| !crew.torch);
        if ours.is_empty() || is_at_home {
            ours.insert(0, self.native()?);
        }
        ours.extend(peers);
        Ok(ours)
    }

    /// The cores of a crew. Nobody binds the ranks of torch, and threads of Gloo need more than one core: what is
    /// called through torch is bound only where that was asked for.
    fn cores(&self, is_ours: bool, torch: bool) -> &[usize] {
        // On a GPU the driver and the library have threads that must not wait for one that spins.
        let free = torch || self.chosen.device.is_gpu();
        let usual = if free { Bind::None } else { Bind::All };
        self.chosen.bind.unwrap_or(usual).cores(is_ours, self.cpus)
    }

    fn through_torch(&self) -> Result<Crew, String> {
        torch::start(Backend::Tensorwire, self.hosts, self.cores(true, true), self.chosen.device)
    }

    fn native(&self) -> Result<Crew, Failure> {
        let device = format!("--device={}", self.chosen.device);
        let cores = self.cores(true, false);
        let link = self.chosen.link.map(|link| ("TENSORWIRE_LINK", link.name().to_owned()));
        let crew = of_this_program(OURS, self.hosts, cores, &[&device], link, self.patience);
        crew.map_err(Failure::failed)
    }
}

/// Ranks that are this program, each on its core; without cores nothing is bound. Or why they cannot be.
pub(super) fn of_this_program(
    peer: &'static str,
    hosts: Hosts,
    cpus: &[usize],
    args: &[&str],
    variable: Option<(&str, String)>,
    patience: Duration,
) -> Result<Crew, String> {
    let store = TcpServer::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| error.to_string())?;
    let run = variables::Run { world: hosts.ranks, port: store.local_addr().port(), id: "bench".into() };
    let owner = if peer == OURS { String::new() } else { format!("{peer}'s ") };
    let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
    let mut processes = Processes::default();
    let mut pipes = Vec::new();
    for rank in 0..hosts.ranks {
        let mut command = this_program::command();
        command.arg(RANK).arg(std::process::id().to_string());
        if !cpus.is_empty() {
            command.arg(cpus.join(","));
        }
        command
            .arg(format!("--turn={}", hosts.turn(rank)))
            .args(hosts.are_many().then_some("--far"))
            .args(args);
        command.envs(variables::of_rank(&run, rank)).envs(hosts.variable(rank)).envs(variable.clone());
        pipes.push(Pipes::of(&mut processes, format!("{owner}rank {rank}"), command)?);
    }
    let mut crew = Crew::gather(peer, processes, pipes, patience)?;
    crew.keep(store);
    crew.bound = !cpus.is_empty();
    Ok(crew)
}
