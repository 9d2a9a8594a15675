//! A failure that one rank tells the others while a group forms. So all ranks get the same error.
//!
//! | first byte | then |
//! |---|---|
//! | 1 | a fault of a process: kind, rank (all ones: unknown), who, detail, how it ended, the ranks that it is about |
//! | 2 | a deadline that passed: what was being done, nanoseconds, what was missing, which ranks |
//! | 3 | an abort: the text |

use std::time::Duration;

use crate::config::Key;
use crate::error::{Error, PeerFaultKind, Result};
use crate::group::card::Verdict;
use crate::group::notes::Notes;
use crate::group::rendezvous::VERDICT;
use crate::shm::member::Member;
use crate::store::Request;
use crate::wire::{Reader, Writer};

/// What `error`, met by `me`, is to the other ranks. Trouble of its own is to them a rank that gave up.
pub(crate) fn as_seen_by_others(error: &Error, me: &Member) -> Error {
    match error {
        Error::Peer(_) | Error::TimedOut { .. } | Error::Aborted(_) => error.clone(),
        other => {
            let text = format!("it could not join the group: {other}");
            Error::peer(PeerFaultKind::Left, me.to_string(), Some(me.rank), text)
        }
    }
}

/// The key under which a rank tells the others.
pub(crate) const FAILED: &str = "failed";

/// Tells the other ranks of a failure, unless one has been told of already.
pub(crate) fn tell(notes: &Notes, told: &Error) {
    let bytes = notes.seal(FAILED, &write(told, Writer::new()).finish());
    let _ = notes.store.compare_set(FAILED, &[], &bytes);
    super::rendezvous::spoil(notes, told);
}

/// The same as a request, from a process that has given up and does not wait until the store has taken it.
pub(crate) fn telling(group: &str, key: Option<&Key>, told: &Error) -> Request {
    let failed = write(told, Writer::new()).finish();
    let verdict = Verdict::Failed(told.clone()).to_bytes();
    Notes::writing(group, key, &[(FAILED, &failed), (VERDICT, &verdict)])
}

pub(crate) fn write(error: &Error, to: Writer) -> Writer {
    match error {
        Error::Peer(fault) => to
            .u8(1)
            .u8(code(fault.kind))
            .u64(fault.rank.map_or(u64::MAX, |rank| rank as u64))
            .bytes(fault.who.as_bytes())
            .bytes(fault.detail.as_bytes())
            .bytes(fault.did.as_bytes())
            .numbers(&fault.ranks),
        Error::TimedOut { doing, after, missing, ranks } => to
            .u8(2)
            .bytes(doing.as_bytes())
            .u64(after.as_nanos().try_into().unwrap_or(u64::MAX))
            .bytes(missing.as_bytes())
            .numbers(ranks),
        Error::Aborted(text) => to.u8(3).bytes(text.as_bytes()),
        other => to.u8(3).bytes(other.to_string().as_bytes()),
    }
}

pub(crate) fn read(from: &mut Reader<'_>) -> Result<Error> {
    match from.u8()? {
        1 => {
            let (kind, rank) = (kind(from.u8()?), from.u64()?);
            let rank = usize::try_from(rank).ok().filter(|_| rank != u64::MAX);
            let fault = Error::peer(kind, from.text()?, rank, from.text()?).having(from.text()?);
            Ok(fault.about(from.numbers()?))
        }
        2 => {
            let doing = from.text()?;
            let after = Duration::from_nanos(from.u64()?);
            Ok(Error::timed_out(doing, after, from.text()?).about(from.numbers()?))
        }
        _ => Ok(Error::Aborted(from.text()?)),
    }
}

fn code(kind: PeerFaultKind) -> u8 {
    match kind {
        PeerFaultKind::Died => 1,
        PeerFaultKind::Left => 2,
        PeerFaultKind::Misbehaved => 3,
        PeerFaultKind::Incompatible => 4,
        PeerFaultKind::Refused => 5,
        PeerFaultKind::Mismatch => 6,
        PeerFaultKind::Stuck => 7,
        PeerFaultKind::Failed => 8,
    }
}

fn kind(code: u8) -> PeerFaultKind {
    match code {
        1 => PeerFaultKind::Died,
        2 => PeerFaultKind::Left,
        4 => PeerFaultKind::Incompatible,
        5 => PeerFaultKind::Refused,
        6 => PeerFaultKind::Mismatch,
        7 => PeerFaultKind::Stuck,
        8 => PeerFaultKind::Failed,
        _ => PeerFaultKind::Misbehaved,
    }
}
