//! A rank of a group as the others know it, and where its process runs.

use std::fmt;

use tensorwire_device::fd::Address;
use tensorwire_device::secret::{Id, digest};

use crate::config::Config;
use crate::error::{Error, PeerFaultKind, Result};
use crate::shm::process::{self, Process, Stat};
use crate::wire::{Reader, Writer};

/// One rank of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Member {
    /// Its rank.
    pub rank: usize,
    /// Its process.
    pub identity: Id,
    /// The name of its host, for people.
    pub host: String,
    /// Its pid as it sees itself, for people.
    pub pid: u32,
    pub(crate) place: Whereabouts,
    pub(crate) address: Address,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (host {}, pid {})", self.rank, self.host, self.pid)
    }
}

/// Where a process runs. Equal kernel and label make sharing memory worth a try.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Whereabouts {
    /// The kernel's boot id, or something random where it cannot be read.
    pub(crate) boot: String,
    /// The configured label.
    pub(crate) label: String,
    /// The PID namespace (0 if /proc does not show it), and when the process started: enough to see that it is gone,
    /// where pids mean the same.
    pub(crate) pid_namespace: u64,
    pub(crate) started: u64,
}

impl Whereabouts {
    /// Whether two processes may be able to share memory.
    pub(crate) fn near(&self, other: &Self) -> bool {
        self.boot == other.boot && self.label == other.label
    }

    /// Whether pids mean the same to both.
    pub(crate) fn sees(&self, other: &Self) -> bool {
        self.pid_namespace != 0 && self.pid_namespace == other.pid_namespace && self.boot == other.boot
    }

    /// Names the processes that can see each other's pids; nothing where pids tell nothing.
    pub(crate) fn sight(&self) -> Option<Id> {
        let seen = self.pid_namespace != 0 && self.started != 0;
        seen.then(|| digest(format!("{} {}", self.pid_namespace, self.boot).as_bytes()))
    }

    fn of_this_process(config: &Config) -> Result<Self> {
        let boot = match std::fs::read_to_string("/proc/sys/kernel/random/boot_id") {
            Ok(text) => text.trim().to_owned(),
            Err(error) => {
                tracing::warn!("the boot id cannot be read ({error}): this rank shares memory with no other");
                Id::random()?.to_string()
            }
        };
        let label = config.host.clone().unwrap_or_default();
        let pid_namespace = std::fs::metadata("/proc/self/ns/pid").map(|m| inode(&m)).unwrap_or(0);
        // Where /proc shows another PID namespace, pids found in it are those of other processes.
        let own_proc = std::fs::read_link("/proc/self")
            .is_ok_and(|name| name.as_os_str() == std::process::id().to_string().as_str());
        let pid_namespace = if own_proc { pid_namespace } else { 0 };
        Ok(Self { boot, label, pid_namespace, started: started("self").unwrap_or(0) })
    }
}

impl Member {
    /// This process as `rank`.
    pub(crate) fn this_process(
        rank: usize,
        identity: Id,
        address: &Address,
        config: &Config,
    ) -> Result<Self> {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let host = config.host.clone().unwrap_or(host);
        let place = Whereabouts::of_this_process(config)?;
        Ok(Self { rank, identity, host, pid: std::process::id(), place, address: address.clone() })
    }

    /// Whether its process is known to have ended, as far as this one can see: same kernel, same PID namespace,
    /// and no process of that pid that started when it did.
    pub(crate) fn is_gone(&self, seen_from: &Self) -> bool {
        let (here, there) = (&seen_from.place, &self.place);
        let comparable = here.boot == there.boot && here.pid_namespace == there.pid_namespace;
        comparable
            && there.pid_namespace != 0
            && there.started != 0
            && started(&self.pid.to_string()).is_some_and(|started| started != there.started)
    }

    /// How its process is, as far as this one can see.
    pub(crate) fn process(&self, seen_from: &Self) -> Process {
        let (here, there) = (&seen_from.place, &self.place);
        let comparable = here.boot == there.boot && here.pid_namespace == there.pid_namespace;
        if self.is_gone(seen_from) {
            Process::Gone
        } else if comparable && there.pid_namespace != 0 {
            process::glance(self.pid).map_or(Process::Unknown, |stat| stat.process)
        } else {
            Process::Unknown
        }
    }

    /// The error that its death means.
    pub(crate) fn died(&self, detail: &str) -> Error {
        Error::peer(PeerFaultKind::Died, self.to_string(), Some(self.rank), detail)
    }

    pub(crate) fn write(&self, to: Writer) -> Writer {
        to.u64(self.rank as u64)
            .fixed(&self.identity.0)
            .bytes(self.host.as_bytes())
            .u32(self.pid)
            .bytes(self.place.boot.as_bytes())
            .bytes(self.place.label.as_bytes())
            .u64(self.place.pid_namespace)
            .u64(self.place.started)
            .bytes(&self.address.to_bytes())
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            rank: usize::try_from(from.u64()?).unwrap_or(usize::MAX),
            identity: Id(from.array()?),
            host: from.text()?,
            pid: from.u32()?,
            place: Whereabouts {
                boot: from.text()?,
                label: from.text()?,
                pid_namespace: from.u64()?,
                started: from.u64()?,
            },
            address: Address::from_bytes(from.bytes()?)?,
        })
    }
}

/// When a process started, in clock ticks since boot; 0 if it has ended; nothing if that cannot be told.
fn started(pid: &str) -> Option<u64> {
    match Stat::read(pid) {
        Ok(Stat { process: Process::Gone, .. }) => Some(0),
        Ok(stat) => Some(stat.started),
        // Other users' processes may be hidden in /proc; the kernel still knows them.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let pid = rustix::process::Pid::from_raw(pid.parse().ok()?)?;
            let absent = rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH);
            absent.then_some(0)
        }
        Err(_) => None,
    }
}

fn inode(metadata: &std::fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(metadata)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_gone_when_its_pid_is_free_or_reused() {
        let config = Config::default();
        let address = Address::Abstract("nobody".into());
        let me = Member::this_process(0, Id([0; 16]), &address, &config).unwrap();
        assert!(!me.is_gone(&me));
        let reused =
            Member { place: Whereabouts { started: me.place.started + 1, ..me.place.clone() }, ..me.clone() };
        assert!(reused.is_gone(&me));
        let unknown = Member { place: Whereabouts { started: 0, ..me.place.clone() }, ..me.clone() };
        assert!(!unknown.is_gone(&me));
        let elsewhere =
            Member { place: Whereabouts { boot: "other".into(), ..reused.place.clone() }, ..reused.clone() };
        assert!(!elsewhere.is_gone(&me));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let of_child =
            Member { pid: child.id(), place: Whereabouts { started: 1, ..me.place.clone() }, ..me.clone() };
        child.wait().unwrap();
        assert!(of_child.is_gone(&me));
    }
}
