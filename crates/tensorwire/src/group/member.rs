//! Who is in a group: the card that each process hands in, and the roster that comes back.

use std::fmt;

use tensorwire_device::fd::Address;
use tensorwire_device::secret::{Id, Secret};

use crate::config::Config;
use crate::error::{Error, PeerFaultKind, Result};
use crate::group::report;
use crate::wire::{PROTOCOL, Reader, Writer};

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
    pub(crate) place: Place,
    pub(crate) address: Address,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (host {}, pid {})", self.rank, self.host, self.pid)
    }
}

/// Where a process runs. Equal kernel and label make sharing memory worth a try.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    /// The kernel's boot id, or something random where it cannot be read.
    pub(crate) boot: String,
    /// The configured label.
    pub(crate) label: String,
    /// The PID namespace (0 if /proc does not show it), and when the process started: enough to see that it is gone,
    /// where pids mean the same.
    pub(crate) pid_namespace: u64,
    pub(crate) started: u64,
}

impl Place {
    /// Whether two processes may be able to share memory.
    pub(crate) fn near(&self, other: &Self) -> bool {
        self.boot == other.boot && self.label == other.label
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
        let place = Place::of_this_process(config)?;
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

    /// The error that its death means.
    pub(crate) fn died(&self, detail: &str) -> Error {
        Error::peer(PeerFaultKind::Died, self.to_string(), Some(self.rank), detail)
    }

    fn write(&self, to: Writer) -> Writer {
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

    fn read(from: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            rank: usize::try_from(from.u64()?).unwrap_or(usize::MAX),
            identity: Id(from.array()?),
            host: from.text()?,
            pid: from.u32()?,
            place: Place {
                boot: from.text()?,
                label: from.text()?,
                pid_namespace: from.u64()?,
                started: from.u64()?,
            },
            address: Address::from_bytes(from.bytes()?)?,
        })
    }
}

/// What a process hands in: who it is and what it was told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Card {
    /// Its protocol and release, readable by every version.
    pub(crate) version: Version,
    /// The world size it was told.
    pub(crate) world: usize,
    pub(crate) member: Member,
}

/// The protocol and release of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Version {
    pub(crate) protocol: u32,
    pub(crate) release: String,
}

impl Version {
    pub(crate) fn ours() -> Self {
        Self { protocol: PROTOCOL, release: env!("CARGO_PKG_VERSION").into() }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensorwire {} (protocol {})", self.release, self.protocol)
    }
}

const CARD: [u8; 4] = *b"twcd";
const VERDICT: [u8; 4] = *b"twvd";

impl Card {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let head = header(CARD, &self.version).u64(self.world as u64);
        self.member.write(head).finish()
    }

    /// A card of another protocol gives its version only.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Result<Self, Version>> {
        let (version, mut rest) = open(CARD, bytes)?;
        if version.protocol != PROTOCOL {
            return Ok(Err(version));
        }
        let world = usize::try_from(rest.u64()?).unwrap_or(usize::MAX);
        let member = Member::read(&mut rest)?;
        rest.end()?;
        Ok(Ok(Self { version, world, member }))
    }
}

/// What becomes of a group: its roster, or why there is none. Made once, read by every rank.
#[derive(Debug, Clone)]
pub(crate) enum Verdict {
    Formed(Roster),
    Failed(Error),
}

impl Verdict {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let head = header(VERDICT, &Version::ours());
        match self {
            Self::Failed(error) => report::write(error, head).finish(),
            Self::Formed(roster) => {
                let body = head.u8(0).fixed(&roster.id.0).fixed(&roster.secret.to_bytes());
                let body = body.u32(roster.members.len() as u32);
                roster.members.iter().fold(body, |body, member| member.write(body)).finish()
            }
        }
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let (version, mut rest) = open(VERDICT, bytes)?;
        let mut body = rest;
        if rest.u8()? != 0 {
            return report::read(&mut body).map(Self::Failed);
        }
        if version.protocol != PROTOCOL {
            let text = format!("it is of {version}, this process of {}", Version::ours());
            let error = Error::peer(PeerFaultKind::Incompatible, "the group", None, text);
            return Ok(Self::Failed(error));
        }
        let id = Id(rest.array()?);
        let secret = Secret::from_bytes(rest.array()?);
        let count = rest.count(64)?;
        let members = (0..count).map(|_| Member::read(&mut rest)).collect::<Result<Vec<_>>>()?;
        rest.end()?;
        Ok(Self::Formed(Roster { id, secret, members }))
    }
}

/// All members of a group in the order of their ranks, and what they share.
#[derive(Debug, Clone)]
pub(crate) struct Roster {
    pub(crate) id: Id,
    pub(crate) secret: Secret,
    pub(crate) members: Vec<Member>,
}

/// The part of a card or verdict that every version reads the same way.
fn header(kind: [u8; 4], version: &Version) -> Writer {
    Writer::new().fixed(&kind).u32(version.protocol).bytes(version.release.as_bytes())
}

fn open(kind: [u8; 4], bytes: &[u8]) -> Result<(Version, Reader<'_>)> {
    let mut reader = Reader::new(bytes);
    if reader.array::<4>()? != kind {
        return Err(Error::misuse(
            "the store holds something else under this group's name; give the group a name of its own",
        ));
    }
    let version = Version { protocol: reader.u32()?, release: reader.text()? };
    Ok((version, reader))
}

/// When a process started, in clock ticks since boot; 0 if it has ended; nothing if that cannot be told.
fn started(pid: &str) -> Option<u64> {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        // The command may hold spaces and brackets; fields are counted after its closing one.
        Ok(stat) => {
            let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
            // A zombie has ended, and only its parent has not looked yet; unless it has threads that go on.
            let ended = matches!(*fields.first()?, "Z" | "X") && matches!(*fields.get(17)?, "0" | "1");
            if ended { Some(0) } else { fields.get(19)?.parse().ok() }
        }
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
mod tests;
