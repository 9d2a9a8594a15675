//! What a plan is made from.

use std::ops::Range;
use std::sync::Arc;

use tensorwire_device::Caching;

use super::{LINE, PartPlace, Workers, whole_lines};
use crate::shm::kind::Kind;

/// The numbers of an operation, as one rank sees it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) kind: Kind,
    pub(crate) me: usize,
    pub(crate) world: usize,
    pub(crate) root: usize,
    pub(crate) counts: Counts,
    /// How many tensors each rank gives to one reduction; their bytes follow each other in the input.
    pub(crate) tensors: usize,
    /// Bytes that go through a slot in one round.
    pub(crate) window: usize,
    /// Bytes of half a slot.
    pub(crate) half: usize,
    /// Whether the payload fits into the lines and goes there.
    pub(crate) inline: bool,
    /// Whether the result is too large for caches.
    pub(crate) bypass: bool,
    /// Whether tick 1 is a signal of its own, before anything moves.
    pub(crate) announced: bool,
    /// How many ticks more the meeting took: those who work have said that they do not reach all memory.
    pub(crate) told: u32,
    /// Who works, where the path is direct.
    pub(crate) workers: Workers,
    /// Bytes that one call on a queue reads and writes at most, where the plan is queued.
    pub(crate) launch: usize,
}

/// How many bytes each rank gives or gets.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Counts {
    /// As many for each.
    Even(usize),
    /// So many for each rank.
    PerRank(Arc<[usize]>),
    /// So many from each rank (row) to each (column).
    Matrix(Arc<[usize]>),
}

impl Counts {
    /// The most that goes from any rank to any other.
    pub(crate) fn largest(&self) -> usize {
        match self {
            Self::Even(bytes) => *bytes,
            Self::PerRank(all) | Self::Matrix(all) => all.iter().copied().max().unwrap_or(0),
        }
    }

    /// Bytes from rank `from` for rank `to`, of `world`.
    pub(crate) fn of(&self, kind: Kind, from: usize, to: usize, world: usize) -> usize {
        match self {
            Self::Even(bytes) => *bytes,
            Self::PerRank(bytes) => {
                let whose = if matches!(kind, Kind::AllGather | Kind::Gather) { from } else { to };
                bytes.get(whose).copied().unwrap_or(0)
            }
            Self::Matrix(bytes) => bytes.get(from * world + to).copied().unwrap_or(0),
        }
    }
}

impl Shape {
    /// Bytes from one rank for another.
    pub(super) fn bytes(&self, from: usize, to: usize) -> usize {
        self.counts.of(self.kind, from, to, self.world)
    }

    /// Where rank `from` has what is for `to`, in its input.
    pub(crate) fn given(&self, from: usize, to: usize) -> Range<usize> {
        let start = match self.kind {
            Kind::Scatter | Kind::ReduceScatter | Kind::AllToAll => {
                (0..to).map(|j| self.bytes(from, j)).sum()
            }
            _ => 0,
        };
        start..start + self.bytes(from, to)
    }

    /// Bytes of a rank's whole input.
    pub(crate) fn all_given(&self, rank: usize) -> usize {
        match self.kind {
            Kind::Scatter | Kind::ReduceScatter | Kind::AllToAll => {
                (0..self.world).map(|to| self.bytes(rank, to)).sum()
            }
            _ => self.bytes(rank, rank) * self.tensors,
        }
    }

    /// Bytes of a rank's whole output, where it has one.
    pub(crate) fn all_taken(&self, rank: usize) -> usize {
        match self.takes_of_each() {
            true => (0..self.world).map(|from| self.bytes(from, rank)).sum(),
            false => self.bytes(rank, rank),
        }
    }

    /// Where rank `to` puts what comes from `from`, in its output.
    pub(crate) fn taken(&self, from: usize, to: usize) -> Range<usize> {
        let start = match self.takes_of_each() {
            true => (0..from).map(|i| self.bytes(i, to)).sum(),
            false => 0,
        };
        start..start + self.bytes(from, to)
    }

    /// Whether a result has a part of each rank.
    fn takes_of_each(&self) -> bool {
        matches!(self.kind, Kind::AllGather | Kind::Gather | Kind::AllToAll) || self.kind.tells_numbers()
    }

    /// The bytes of the whole tensor, where it is one.
    pub(crate) fn whole(&self) -> usize {
        self.bytes(self.root, self.me)
    }

    /// All other ranks, beginning behind this one, so that not all read from the same.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, world) = (self.me, self.world);
        (1..world).map(move |step| (me + step) % world)
    }

    /// The tick of round 0.
    pub(super) fn first(&self) -> u32 {
        if self.announced { 2 + self.told } else { 1 }
    }

    /// How results are written.
    pub(super) fn caching(&self) -> Caching {
        if self.bypass { Caching::Bypass } else { Caching::Keep }
    }

    /// How results are written that others read.
    pub(super) fn giving(&self) -> Caching {
        if self.bypass { Caching::Bypass } else { Caching::Give }
    }

    /// Where a rank publishes in a round.
    pub(super) fn published(&self, rank: usize, round: usize) -> PartPlace {
        if self.inline { PartPlace::Line(rank) } else { PartPlace::Slot(rank, (round % 2) as u8) }
    }

    /// Bytes that a round can hold for each of `lanes` ranks.
    pub(super) fn width(&self, lanes: usize) -> usize {
        if self.inline {
            return PAYLOAD / lanes;
        }
        whole_lines(self.window.min(self.half / lanes)).max(LINE)
    }
}

/// Bytes that a progress line has room for.
pub(crate) const PAYLOAD: usize = 32;
