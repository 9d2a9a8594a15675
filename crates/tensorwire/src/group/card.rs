//! The card that each process hands in when a group forms, and the roster that comes back.

use std::collections::HashMap;
use std::fmt;

use tensorwire_device::fd::Address;
use tensorwire_device::secret::{Id, Secret};

use crate::config::Seal;
use crate::error::{Error, PeerFaultKind, Result};
use crate::group::report;
use crate::shm::member::{Member, Whereabouts};
use crate::wire::{PROTOCOL, Reader, Writer, bad};

/// What a process hands in: who it is and what it was told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Card {
    /// Its protocol and release, readable by every version.
    pub(crate) version: Version,
    /// The world size it was told.
    pub(crate) world: usize,
    /// What it seals between hosts, if its job has a key.
    pub(crate) seal: Option<Seal>,
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
        let seal = self.seal.map_or(0, |seal| if seal == Seal::All { 1 } else { 2 });
        let head = header(CARD, &self.version).u64(self.world as u64).u8(seal);
        self.member.write(head).finish()
    }

    /// A card of another protocol gives its version only.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Result<Self, Version>> {
        let (version, mut rest) = open(CARD, bytes)?;
        if version.protocol != PROTOCOL {
            return Ok(Err(version));
        }
        let world = usize::try_from(rest.u64()?).unwrap_or(usize::MAX);
        let seal = match rest.u8()? {
            0 => None,
            1 => Some(Seal::All),
            2 => Some(Seal::Control),
            _ => return Err(bad("an unknown way to seal")),
        };
        let member = Member::read(&mut rest)?;
        rest.end()?;
        Ok(Ok(Self { version, world, seal, member }))
    }
}

/// What becomes of a group: its roster, or why there is none. Made once, read by every rank.
#[derive(Debug, Clone)]
pub(crate) enum Verdict {
    /// Without a secret where the job has a key: each rank derives it.
    Formed {
        id: Id,
        secret: Option<Secret>,
        members: Vec<Member>,
    },
    Failed(Error),
}

/// The first byte of a verdict that is a roster; other numbers are failures.
const WITH_SECRET: u8 = 0;
const WITHOUT_SECRET: u8 = 16;

impl Verdict {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let head = header(VERDICT, &Version::ours());
        match self {
            Self::Failed(error) => report::write(error, head).finish(),
            Self::Formed { id, secret, members } => {
                let body = match secret {
                    Some(secret) => head.u8(WITH_SECRET).fixed(&id.0).fixed(&secret.to_bytes()),
                    None => head.u8(WITHOUT_SECRET).fixed(&id.0),
                };
                write_members(members, body).finish()
            }
        }
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let (version, mut rest) = open(VERDICT, bytes)?;
        let mut body = rest;
        let kind = rest.u8()?;
        if kind != WITH_SECRET && kind != WITHOUT_SECRET {
            return report::read(&mut body).map(Self::Failed);
        }
        if version.protocol != PROTOCOL {
            let text = format!("it is of {version}, this process of {}", Version::ours());
            let error = Error::peer(PeerFaultKind::Incompatible, "the group", None, text);
            return Ok(Self::Failed(error));
        }
        let id = Id(rest.array()?);
        let secret = match kind {
            WITH_SECRET => Some(Secret::from_bytes(rest.array()?)),
            _ => None,
        };
        let members = read_members(&mut rest)?;
        rest.end()?;
        Ok(Self::Formed { id, secret, members })
    }
}

/// All members of a group in the order of their ranks, and what they share.
#[derive(Debug, Clone)]
pub(crate) struct Roster {
    pub(crate) id: Id,
    pub(crate) secret: Secret,
    pub(crate) members: Vec<Member>,
}

/// Every rank reads this, so it is short: what ranks of one host have in common is there once. Members are in the order of
/// their ranks.
fn write_members(members: &[Member], to: Writer) -> Writer {
    let home = |member: &Member| {
        let place = &member.place;
        let head = Writer::new().bytes(member.host.as_bytes()).bytes(place.boot.as_bytes());
        head.bytes(place.label.as_bytes()).u64(place.pid_namespace).finish()
    };
    let (mut homes, mut numbers) = (Vec::new(), HashMap::new());
    let mut places = Vec::new();
    for member in members {
        let home = home(member);
        let next = homes.len() as u32;
        places.push(*numbers.entry(home.clone()).or_insert_with(|| {
            homes.push(home);
            next
        }));
    }
    let to = to.u32(homes.len() as u32);
    let to = homes.iter().fold(to, |to, home| to.fixed(home)).u32(members.len() as u32);
    members.iter().zip(places).fold(to, |to, (member, home)| {
        let to = to.fixed(&member.identity.0).u32(home).u32(member.pid).u64(member.place.started);
        to.bytes(&member.address.to_bytes())
    })
}

fn read_members(from: &mut Reader<'_>) -> Result<Vec<Member>> {
    let homes = from.count(4 + 4 + 4 + 8)?;
    let mut home = || Ok((from.text()?, from.text()?, from.text()?, from.u64()?));
    let homes = (0..homes).map(|_| home()).collect::<Result<Vec<_>>>()?;
    let members = from.count(16 + 4 + 4 + 8 + 4)?;
    let mut member = |rank| {
        let identity = Id(from.array()?);
        let (host, boot, label, pid_namespace) =
            homes.get(from.u32()? as usize).cloned().ok_or_else(|| bad("a rank on no host"))?;
        let (pid, started) = (from.u32()?, from.u64()?);
        let place = Whereabouts { boot, label, pid_namespace, started };
        Ok(Member { rank, identity, host, pid, place, address: Address::from_bytes(from.bytes()?)? })
    };
    (0..members).map(&mut member).collect()
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

#[cfg(test)]
mod tests;
