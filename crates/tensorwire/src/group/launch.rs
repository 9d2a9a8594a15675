//! How a process learns its rank, its world and its store: launchers' variables and addresses.
//!
//! This is the only place that reads variables that are not ours.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tensorwire_device::Deadline;
use tensorwire_device::fork::Birth;

use crate::error::{Error, Result};
use crate::group::notes::Notes;
use crate::group::{Group, GroupBuilder, Origin, rendezvous};
use crate::store::{FileStore, Store, TcpServer, TcpStore};

/// What a launcher has told this process.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Launch {
    launcher: &'static str,
    rank: usize,
    world: usize,
    host: String,
    port: u16,
    /// Whether the launcher serves the store.
    served: bool,
    /// Tells restarts of a job apart, where they share a store.
    attempt: String,
}

pub(super) fn from_env(builder: GroupBuilder) -> Result<Group> {
    let launch = Launch::read(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))?;
    let builder = match launch.attempt.as_str() {
        "" => builder,
        attempt => {
            let name = format!("{}@{attempt}", builder.title());
            builder.name(name)
        }
    };
    let builder = builder.with_context()?;
    let deadline = Deadline::after(builder.patience());
    let origin = tcp(&builder, &launch.host, launch.port, launch.rank == 0 && !launch.served, deadline)
        .map_err(|error| range_first(launch.rank, launch.world, error))?;
    builder.form(origin, launch.rank, launch.world, deadline)
}

pub(super) fn from_url(
    builder: GroupBuilder,
    url: &str,
    rank: Option<usize>,
    world: Option<usize>,
) -> Result<Group> {
    let url = Url::parse(url)?;
    let rank = agree("rank", rank, url.number("rank")?)?;
    let world = agree("world_size", world, url.number("world_size")?)?;
    let builder = builder.with_context()?;
    let deadline = Deadline::after(builder.patience());
    let origin = match &url.place {
        StorePlace::Tcp(host, port) => tcp(&builder, host, *port, rank == 0, deadline)
            .map_err(|error| range_first(rank, world, error))?,
        StorePlace::File(path) => {
            let store = FileStore::open(path)?;
            store.set_timeout(builder.patience());
            in_file(store, path.into(), world)?
        }
    };
    builder.form(origin, rank, world, deadline)
}

/// The store in a file, whose use by one group of this process is counted.
pub(super) fn in_file(store: FileStore, path: PathBuf, world: usize) -> Result<Origin> {
    let store: Arc<dyn Store> = Arc::new(store);
    let file = Some(Arc::new(FileUse::new(&store, path, world)?));
    Ok(Origin { store, server: None, lingers: false, once: false, _file: file, route: None, key: None })
}

/// One group's use of a file in one process. The process that closes it last removes it, once all ranks
/// have used it, so that the next run can have the name again. A process that was killed leaves it there.
#[derive(Debug)]
pub(super) struct FileUse {
    store: Arc<dyn Store>,
    path: PathBuf,
    world: usize,
    birth: Birth,
}

const OPENED: &str = "tensorwire/opened";
const CLOSED: &str = "tensorwire/closed";

impl FileUse {
    fn new(store: &Arc<dyn Store>, path: PathBuf, world: usize) -> Result<Self> {
        store.add(OPENED, 1)?;
        Ok(Self { store: store.clone(), path, world, birth: Birth::now() })
    }

    fn is_last(&self) -> Result<bool> {
        let closed = self.store.add(CLOSED, 1)?;
        Ok(closed == self.store.add(OPENED, 0)? && usize::try_from(closed).is_ok_and(|n| n >= self.world))
    }
}

impl Drop for FileUse {
    fn drop(&mut self) {
        if !self.birth.is_ours() {
            return;
        }
        let removed = match self.is_last() {
            Ok(true) => match std::fs::remove_file(&self.path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.to_string()),
                _ => Ok(()),
            },
            Ok(false) => Ok(()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = removed {
            tracing::warn!("the file {} of a closed group stays: {error}", self.path.display());
        }
    }
}

/// The store at `host:port`, which this process serves if it is to.
fn tcp(builder: &GroupBuilder, host: &str, port: u16, serve: bool, deadline: Deadline) -> Result<Origin> {
    let server = match serve {
        true => Some(Arc::new(serve_at(port).inspect_err(|error| tell_others(builder, host, port, error))?)),
        false => None,
    };
    let store = TcpStore::connect(host, port, deadline.remaining().unwrap_or_default())?;
    let lingers = server.is_some();
    Ok(Origin {
        store: Arc::new(store),
        server,
        lingers,
        once: false,
        _file: None,
        route: route(host, port)?,
        key: None,
    })
}

/// A rank outside of its world goes to the store to tell the others; where it cannot, that is still the first thing to
/// mend.
fn range_first(rank: usize, world: usize, error: Error) -> Error {
    match rank < world {
        true => error,
        false => {
            Error::misuse(format!("rank {rank} of a world of {world}; ranks count from 0. Moreover: {error}"))
        }
    }
}

fn serve_at(port: u16) -> Result<TcpServer> {
    TcpServer::bind_all(port).map_err(|error| match error {
        Error::Io { source, .. } => {
            let doing =
                format!("serving the store at port {port}, as rank 0 does; is it taken? use another port");
            Error::Io { doing, source }
        }
        other => other,
    })
}

/// Where the port is taken by a store (of a second rank 0, or of another job), the other ranks are waiting there: they
/// are told.
fn tell_others(builder: &GroupBuilder, host: &str, port: u16, error: &Error) {
    let Ok(store) = TcpStore::connect(host, port, Duration::from_secs(2)) else { return };
    let here = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let text = format!(
        "process {} on {here} is rank 0 too and could not serve the store ({error}); give each process a rank of its \
         own, and each job a port",
        std::process::id()
    );
    let notes = Notes::new(Arc::new(store), builder.title(), builder.key());
    rendezvous::refuse(&notes, text);
}

/// The address of this machine on the way to another; asked of the routing table, no packet is sent.
pub(super) fn route(host: &str, port: u16) -> Result<Option<IpAddr>> {
    let found = crate::link::address::resolve(host, port)?;
    let asked = |there: &SocketAddr| {
        let any = if there.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(there).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    Ok(found.first().and_then(asked))
}

type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Launch {
    fn read(var: Lookup<'_>) -> Result<Self> {
        if var("RANK").is_some() || var("WORLD_SIZE").is_some() {
            return Self::torch(var);
        }
        let families = [
            ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
            ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            ("PMI", "PMI_RANK", "PMI_SIZE"),
        ];
        for (launcher, rank, world) in families {
            if var(rank).is_some() {
                return Self::scheduler(launcher, rank, world, var);
            }
        }
        Err(Error::misuse(
            "no launcher has told this process its rank: none of RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK and PMI_RANK \
             is set; start it with `tensorwire run -n 2 -- PROGRAM`, torchrun, srun or mpirun",
        ))
    }

    fn torch(var: Lookup<'_>) -> Result<Self> {
        let launch = Self {
            launcher: "torchrun",
            rank: number(var, "RANK")?,
            world: number(var, "WORLD_SIZE")?,
            host: needed(var, "MASTER_ADDR")?,
            port: port(var)?.ok_or_else(|| unset("MASTER_PORT"))?,
            served: var("TORCHELASTIC_USE_AGENT_STORE")
                .is_some_and(|value| value.eq_ignore_ascii_case("true")),
            attempt: match (var("TORCHELASTIC_RUN_ID"), var("TORCHELASTIC_RESTART_COUNT")) {
                (None, None) => String::new(),
                (run, count) => format!("{}.{}", run.unwrap_or_default(), count.unwrap_or_default()),
            },
        };
        launch.checked(var, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }

    fn scheduler(launcher: &'static str, rank: &str, world: &str, var: Lookup<'_>) -> Result<Self> {
        let job: Vec<String> = JOB.iter().filter_map(|name| var(name)).collect();
        let launch = Self {
            launcher,
            rank: number(var, rank)?,
            world: number(var, world)?,
            host: match var("MASTER_ADDR") {
                Some(host) => host,
                None => first_host(var)?,
            },
            port: port(var)?.unwrap_or_else(|| port_of_job(&job.join("."))),
            served: false,
            attempt: String::new(),
        };
        let (local, size) = match launcher {
            "Open MPI" => ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
            "PMI" => ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
            _ => ("SLURM_LOCALID", "SLURM_NTASKS"),
        };
        launch.checked(var, local, size)
    }

    /// Refuses numbers that contradict each other. A rank outside of its world is left to the rendezvous, which tells
    /// the other ranks too.
    fn checked(self, var: Lookup<'_>, local_rank: &str, local_world: &str) -> Result<Self> {
        if let (Some(_), Some(_)) = (var(local_rank), var(local_world)) {
            let (rank, world) = (number(var, local_rank)?, number(var, local_world)?);
            if rank >= world || world > self.world {
                return Err(Error::misuse(format!(
                    "{}'s variables contradict each other: {local_rank}={rank}, {local_world}={world}, world {}",
                    self.launcher, self.world
                )));
            }
        }
        Ok(self)
    }
}

/// Variables that name a job, of whichever launcher.
const JOB: [&str; 5] =
    ["SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"];

/// A port that all ranks of a job derive alike: below the range that kernels give out.
fn port_of_job(job: &str) -> u16 {
    let digest = tensorwire_device::secret::digest(job.as_bytes());
    20_000 + u16::from_le_bytes([digest.0[0], digest.0[1]]) % 12_000
}

/// The host of rank 0, as the scheduler names it.
fn first_host(var: Lookup<'_>) -> Result<String> {
    if let Some(list) = var("SLURM_STEP_NODELIST").or_else(|| var("SLURM_JOB_NODELIST")) {
        return Ok(first_of_nodelist(&list));
    }
    let local = ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"].iter().find_map(|name| var(name));
    let world = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].iter().find_map(|name| var(name));
    if local.is_some() && local == world {
        return Ok("127.0.0.1".into());
    }
    Err(Error::misuse(
        "the job spans hosts: set MASTER_ADDR to the host of rank 0 (mpirun -x MASTER_ADDR=HOST)",
    ))
}

/// The first name of a list such as `gpu[03-05,9],login1`.
fn first_of_nodelist(list: &str) -> String {
    let Some((prefix, rest)) = list.split_once('[').filter(|(prefix, _)| !prefix.contains(',')) else {
        return list.split(',').next().unwrap_or(list).to_owned();
    };
    let (inside, after) = rest.split_once(']').unwrap_or((rest, ""));
    let number = inside.split([',', '-']).next().unwrap_or(inside);
    let suffix = after.split(',').next().unwrap_or("");
    format!("{prefix}{number}{suffix}")
}

fn number(var: Lookup<'_>, name: &str) -> Result<usize> {
    let text = needed(var, name)?;
    text.trim().parse().map_err(|_| Error::misuse(format!("{name}={text}: a number from 0 is needed")))
}

fn port(var: Lookup<'_>) -> Result<Option<u16>> {
    let parse = |text: String| {
        let port = text.trim().parse().ok().filter(|&port: &u16| port != 0);
        port.ok_or_else(|| Error::misuse(format!("MASTER_PORT={text}: a port from 1 to 65535 is needed")))
    };
    var("MASTER_PORT").map(parse).transpose()
}

fn needed(var: Lookup<'_>, name: &str) -> Result<String> {
    var(name).ok_or_else(|| unset(name))
}

fn unset(name: &str) -> Error {
    Error::misuse(format!("{name} is not set, though other variables of its launcher are"))
}

/// Two sources for one number must not contradict each other.
fn agree(name: &str, given: Option<usize>, in_url: Option<usize>) -> Result<usize> {
    match (given, in_url) {
        (Some(a), Some(b)) if a != b => {
            Err(Error::misuse(format!("{name} is {a} in the call and {b} in the address")))
        }
        (Some(value), _) | (_, Some(value)) => Ok(value),
        (None, None) => Err(Error::misuse(format!("{name} is given neither in the call nor in the address"))),
    }
}

#[derive(Debug, PartialEq)]
struct Url {
    place: StorePlace,
    query: BTreeMap<String, String>,
}

#[derive(Debug, PartialEq)]
enum StorePlace {
    Tcp(String, u16),
    File(String),
}

impl Url {
    fn parse(text: &str) -> Result<Self> {
        let bad = |why: &str| {
            Error::misuse(format!("{text:?} is not an address: {why}; use tcp://HOST:PORT or file:///PATH"))
        };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| bad("it has no scheme"))?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let place = match scheme {
            "tcp" => {
                let (host, port) = place.rsplit_once(':').ok_or_else(|| bad("it has no port"))?;
                let host = host.trim_start_matches('[').trim_end_matches(']');
                let port = port
                    .parse()
                    .ok()
                    .filter(|&port: &u16| port != 0)
                    .ok_or_else(|| bad("its port is wrong"))?;
                if host.is_empty() {
                    return Err(bad("it has no host"));
                }
                StorePlace::Tcp(host.into(), port)
            }
            "file" if place.starts_with('/') => StorePlace::File(place.into()),
            "file" => return Err(bad("its path is not absolute")),
            _ => return Err(bad("its scheme is unknown")),
        };
        let mut pairs = BTreeMap::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some((key @ ("rank" | "world_size"), value)) => _ = pairs.insert(key.into(), value.into()),
                _ => return Err(bad("it may have rank= and world_size= and nothing else")),
            }
        }
        Ok(Self { place, query: pairs })
    }

    fn number(&self, key: &str) -> Result<Option<usize>> {
        let parse = |text: &String| {
            text.parse()
                .map_err(|_| Error::misuse(format!("{key}={text} in the address: a number from 0 is needed")))
        };
        self.query.get(key).map(parse).transpose()
    }
}

#[cfg(test)]
mod tests;
