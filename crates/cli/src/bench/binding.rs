//! Which core a rank runs on: the cores that this process may use, in turn.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::exit::Failure;

/// Whose ranks are bound to cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Bind {
    /// Every rank of every library has a core, the same in all of them
    All,
    /// Only ours: peers may use all cores
    Ours,
    /// No rank: all may use all cores
    None,
}

impl Bind {
    /// The cores for the ranks of a library: none where it is not to be bound.
    pub(super) fn cores(self, is_ours: bool, cpus: &[usize]) -> &[usize] {
        match self {
            Self::All => cpus,
            Self::Ours if is_ours => cpus,
            Self::Ours | Self::None => &[],
        }
    }
}

/// The cores that this process may use.
pub(super) fn allowed() -> Result<Vec<usize>, Failure> {
    let set = sched_getaffinity(None)
        .map_err(|errno| Failure::failed(format!("asking which cores may be used: {errno}")))?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// Binds this process, with all threads that it will start, to the core of a rank.
pub(super) fn bind(cpus: &[usize], rank: usize) -> Result<(), Failure> {
    let Some(&cpu) = cpus.get(rank % cpus.len().max(1)) else { return Ok(()) };
    let mut set = CpuSet::new();
    if cpu < CpuSet::MAX_CPU {
        set.set(cpu);
    }
    sched_setaffinity(None, &set)
        .map_err(|errno| Failure::failed(format!("binding rank {rank} to core {cpu}: {errno}")))
}
