//! Who does the work of a direct plan.

use std::sync::Arc;

/// How the work of a direct plan is dealt.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Workers {
    /// Each rank works for itself, on the host.
    All,
    /// For each rank, the place of the rank that works for it: the plan is queued.
    Some(Arc<[usize]>),
}

impl Workers {
    /// On each device the rank with the lowest place works for all there. `devices` says for each rank on which device it
    /// is: equal numbers are the same device.
    pub(crate) fn by_device(devices: &[usize]) -> Self {
        let lowest = |device: &usize| devices.iter().position(|other| other == device).unwrap_or(0);
        Self::Some(devices.iter().map(lowest).collect())
    }

    /// Who works for a rank.
    pub(crate) fn of(&self, rank: usize) -> usize {
        match self {
            Self::All => rank,
            Self::Some(workers) => workers.get(rank).copied().unwrap_or(rank),
        }
    }

    /// All who work, of `world` ranks, the lowest first.
    pub(crate) fn each(&self, world: usize) -> Vec<usize> {
        let mut workers: Vec<_> = (0..world).map(|rank| self.of(rank)).collect();
        workers.sort_unstable();
        workers.dedup();
        workers
    }
}
