//! Which core a rank runs on: the cores that this process may use, in turn.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::exit::Failure;

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
