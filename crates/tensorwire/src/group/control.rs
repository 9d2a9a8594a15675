//! The control region of a group on one host: one memfd, handed round by the leader, mapped by every rank there.
//!
//! # The layout
//!
//! Lines of 64 bytes; `n` ranks of this host, by their place among them:
//!
//! | lines | what | who writes |
//! |---|---|---|
//! | 0 | magic, protocol, n | the leader, before it hands the region round |
//! | 1 | the abort word | anyone, once, by compare-and-swap |
//! | 2 | `release`: how many barriers are over | the leader's process |
//! | 3 .. 3+n | `arrive`: how many barriers each rank has come to | that rank |
//! | 3+n .. 3+2n | `left`: 1 once the rank has closed the group | that rank |
//! | then 8 lines each, n+1 times | notes: why a rank aborted; the last one is for ranks of other hosts | that rank; the leader for the last |
//!
//! A note is written before the abort word and read after it, so it needs no lock. A rank that closes the group
//! sets `left` and then moves its `arrive` (the leader also `release`) far ahead: who waits for it wakes up,
//! sees `left`, and knows why.

use std::sync::Arc;

use tensorwire_device::flag::{LINE, Writer};
use tensorwire_device::{Abort, Device, Flag, Region, Span};

use crate::error::{Error, PeerFaultKind, Result};
use crate::group::member::Member;
use crate::wire::PROTOCOL;

/// How far ahead of anything a counter jumps when its rank leaves.
const FAR: u32 = 1 << 30;
const MAGIC: [u8; 8] = *b"twcontrl";
const NOTE: usize = 8 * LINE;

/// Why a group has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    Died,
    Aborted,
    Left,
    Silent,
    Misbehaved,
}

/// A cause and the rank it concerns, as an abort word holds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) cause: Cause,
    pub(crate) rank: usize,
}

impl Failure {
    pub(crate) fn to_code(self) -> u32 {
        let cause = match self.cause {
            Cause::Died => 1,
            Cause::Aborted => 2,
            Cause::Left => 3,
            Cause::Silent => 4,
            Cause::Misbehaved => 5,
        };
        cause << 24 | (self.rank as u32 & 0xff_ffff)
    }

    pub(crate) fn from_code(code: u32) -> Self {
        let cause = match code >> 24 {
            1 => Cause::Died,
            3 => Cause::Left,
            4 => Cause::Silent,
            5 => Cause::Misbehaved,
            _ => Cause::Aborted,
        };
        Self { cause, rank: (code & 0xff_ffff) as usize }
    }
}

/// The mapped control region.
#[derive(Debug)]
pub(crate) struct Control {
    region: Arc<dyn Region>,
    /// Ranks of this host in order; the first is the leader.
    ranks: Vec<usize>,
    me: usize,
    pub(crate) abort: Abort,
    release: Flag,
    arrive: Vec<Flag>,
    left: Vec<Flag>,
}

impl Control {
    /// Bytes for `ranks` ranks.
    fn len(ranks: usize) -> usize {
        (3 + 2 * ranks) * LINE + (ranks + 1) * NOTE
    }

    /// New memory for the most ranks that may join; the leader makes it.
    pub(crate) fn alloc(host: &dyn Device, most: usize) -> Result<Arc<dyn Region>> {
        let region = host.alloc(Self::len(most))?;
        let head = [&MAGIC[..], &PROTOCOL.to_le_bytes()].concat();
        region.write(0, &head)?;
        Ok(region)
    }

    /// Looks at the region as rank `rank` of `ranks`. It may have room for more.
    pub(crate) fn open(region: Arc<dyn Region>, ranks: Vec<usize>, rank: usize) -> Result<Self> {
        let misfit = || {
            let text = "handed round a control region that is not as agreed";
            Error::peer(PeerFaultKind::Misbehaved, "the leader of this host", ranks.first().copied(), text)
        };
        let n = ranks.len();
        let mut head = [0; 12];
        if region.len() < Self::len(n) || region.read(0, &mut head).is_err() {
            return Err(misfit());
        }
        if head[..8] != MAGIC || head[8..] != PROTOCOL.to_le_bytes() {
            return Err(misfit());
        }
        let me = ranks.iter().position(|&other| other == rank).ok_or_else(misfit)?;
        let line = |index: usize| Span::new(region.clone(), index * LINE..(index + 1) * LINE);
        let flag = |index| Ok(Flag::new(&line(index)?, Writer::Host)?);
        Ok(Self {
            abort: Abort::new(&line(1)?)?,
            release: flag(2)?,
            arrive: (3..3 + n).map(flag).collect::<Result<_>>()?,
            left: (3 + n..3 + 2 * n).map(flag).collect::<Result<_>>()?,
            region,
            ranks,
            me,
        })
    }

    /// Ranks of this host.
    pub(crate) fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// Whether this rank leads its host.
    pub(crate) fn leads(&self) -> bool {
        self.me == 0
    }

    pub(crate) fn release(&self) -> &Flag {
        &self.release
    }

    /// Whether barrier `count` is over, also if the leader has left since: then the counter is far ahead of the last
    /// barrier that it ended.
    pub(crate) fn is_over(&self, count: u32) -> bool {
        let ahead = self.release.load().wrapping_sub(count) as i32;
        (0..FAR as i32 / 2).contains(&ahead) || ahead >= FAR as i32
    }

    pub(crate) fn arrive(&self) -> &[Flag] {
        &self.arrive
    }

    /// Comes to barrier number `count`.
    pub(crate) fn come(&self, count: u32) {
        self.arrive[self.me].signal(count);
    }

    /// The lowest rank of this host that has closed the group.
    pub(crate) fn who_left(&self) -> Option<usize> {
        let place = self.left.iter().position(|flag| flag.load() != 0)?;
        Some(self.ranks[place])
    }

    /// Says that this rank has closed the group.
    pub(crate) fn leave(&self) {
        self.left[self.me].signal(1);
        let mine = &self.arrive[self.me];
        mine.signal(mine.load().wrapping_add(FAR));
        if self.leads() {
            self.release.signal(self.release.load().wrapping_add(FAR));
        }
    }

    /// Whether a rank of this host has closed the group.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        let place = self.ranks.iter().position(|&other| other == rank);
        place.is_some_and(|place| self.left[place].load() != 0)
    }

    /// Fails the group on this host, unless it has failed already. The note is for `Cause::Aborted`.
    pub(crate) fn fail(&self, failure: Failure, note: &str) {
        if !self.abort.is_set() {
            let slot = self.note_of(failure.rank);
            // Ranks of this host write their own note; the leader writes that of other hosts.
            let mine = slot == self.me || (slot == self.ranks.len() && self.leads());
            if mine && !note.is_empty() {
                self.write_note(slot, note);
            }
            self.abort.set(failure.to_code());
        }
    }

    /// Why the group has failed, if it has.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.abort.code().map(Failure::from_code)
    }

    /// The note that belongs to a failure.
    pub(crate) fn note(&self, failure: Failure) -> String {
        let mut bytes = [0; NOTE];
        if self.region.read(self.note_at(self.note_of(failure.rank)), &mut bytes).is_err() {
            return String::new();
        }
        let len = bytes.iter().position(|&byte| byte == 0).unwrap_or(NOTE);
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    }

    fn note_of(&self, rank: usize) -> usize {
        self.ranks.iter().position(|&other| other == rank).unwrap_or(self.ranks.len())
    }

    fn note_at(&self, slot: usize) -> usize {
        (3 + 2 * self.ranks.len()) * LINE + slot * NOTE
    }

    fn write_note(&self, slot: usize, note: &str) {
        let mut bytes = note.as_bytes().to_vec();
        bytes.truncate(NOTE - 1);
        bytes.push(0);
        if let Err(error) = self.region.write(self.note_at(slot), &bytes) {
            tracing::warn!("writing the reason of an abort: {error}");
        }
    }
}

/// The error that a failure means to a rank of the group.
pub(crate) fn error_of(failure: Failure, note: &str, members: &[Member], me: usize) -> Error {
    let rank = failure.rank;
    let who = members.get(rank).map_or_else(|| format!("rank {rank}"), ToString::to_string);
    match failure.cause {
        Cause::Died => Error::peer(PeerFaultKind::Died, who, Some(rank), "its process has ended"),
        Cause::Silent => {
            let text =
                "nothing has been heard of its host; the host, its network or all of its ranks are gone";
            Error::peer(PeerFaultKind::Died, who, Some(rank), text)
        }
        Cause::Misbehaved => {
            let text = "it sent bytes that are not as agreed";
            Error::peer(PeerFaultKind::Misbehaved, who, Some(rank), text)
        }
        Cause::Left => {
            let text = "it has closed the group, and this operation needs all ranks";
            Error::peer(PeerFaultKind::Left, who, Some(rank), text)
        }
        Cause::Aborted => {
            let by = if rank == me { "this rank".to_owned() } else { who };
            let why = if note.is_empty() { String::new() } else { format!(": {note}") };
            Error::Aborted(format!("{by} called abort(){why}"))
        }
    }
}
