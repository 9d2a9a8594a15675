//! The card that each process hands in when a group forms, and the roster that comes back.

use std::fmt;

use tensorwire_device::secret::{Id, Secret};

use crate::error::{Error, PeerFaultKind, Result};
use crate::group::report;
use crate::shm::member::Member;
use crate::wire::{PROTOCOL, Reader, Writer};

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

#[cfg(test)]
mod tests;
