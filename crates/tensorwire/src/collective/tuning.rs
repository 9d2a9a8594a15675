//! Which path an operation takes, by its number of bytes. The numbers were chosen by measurement (see `benches/`).
//! `tensorwire bench --explain` shows them.

use super::plan::PAYLOAD;
use crate::shm::kind::{Kind, Path};

/// Switch-over points, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tuning {
    /// Reductions up to here take one shot, by the number of ranks.
    pub(crate) one_shot: usize,
    /// Bytes of a round of a reduction.
    pub(crate) reduce_window: usize,
    /// Bytes of a round of anything else.
    pub(crate) window: usize,
    /// From here on memory of `Group::alloc` is used in place.
    pub(crate) direct: usize,
    /// From here on (bytes that all ranks of the host write together) results bypass the caches.
    pub(crate) bypass: usize,
    /// From here on (bytes of a rank's tensors) several threads of a rank do its copies and reductions together.
    pub(crate) share: usize,
    /// How many threads, where each has a core; with 1 a rank works alone.
    pub(crate) threads: usize,
    /// Bytes that one call on a queue of a device reads and writes at most, so that none lasts long: about 0.1 ms.
    pub(crate) launch: usize,
}

impl Tuning {
    /// For `world` ranks on a host.
    pub(crate) fn new(world: usize) -> Self {
        Self {
            // What every rank reads grows with the ranks, what it saves against two phases does not.
            one_shot: ((256 << 10) / world.max(1).pow(2)).clamp(1 << 10, 32 << 10),
            reduce_window: 384 << 10,
            window: 256 << 10,
            direct: 8 << 10,
            bypass: 64 << 20,
            share: 1 << 20,
            threads: 3,
            launch: 256 << 20,
        }
    }

    /// The path for memory that is not shared. `bytes` is what each rank gives.
    pub(crate) fn path(&self, kind: Kind, bytes: usize, parts: usize) -> Path {
        match kind {
            _ if bytes * parts <= PAYLOAD => Path::Inline,
            Kind::AllReduce | Kind::Reduce if bytes * parts > self.one_shot => Path::Staged,
            Kind::AllReduce | Kind::Reduce => Path::OneShot,
            Kind::Scatter if bytes.saturating_mul(parts) > self.window => Path::Staged,
            _ if bytes > self.window => Path::Staged,
            _ => Path::OneShot,
        }
    }
}
