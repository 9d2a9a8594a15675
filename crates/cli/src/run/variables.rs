//! The variables that ranks find: those of torchrun, so that what runs there runs here.

use std::ffi::OsStr;

/// What all ranks of a run have in common.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) world: u32,
    pub(crate) port: u16,
    pub(crate) id: String,
}

/// The variables of one rank that are set whatever the environment says.
pub(crate) fn of_rank(run: &Run, rank: u32) -> Vec<(&'static str, String)> {
    let (rank, world) = (rank.to_string(), run.world.to_string());
    vec![
        ("RANK", rank.clone()),
        ("LOCAL_RANK", rank.clone()),
        ("ROLE_RANK", rank),
        ("WORLD_SIZE", world.clone()),
        ("LOCAL_WORLD_SIZE", world.clone()),
        ("ROLE_WORLD_SIZE", world),
        ("ROLE_NAME", "default".into()),
        ("GROUP_RANK", "0".into()),
        ("GROUP_WORLD_SIZE", "1".into()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        ("MASTER_PORT", run.port.to_string()),
        ("TORCHELASTIC_RESTART_COUNT", "0".into()),
        ("TORCHELASTIC_MAX_RESTARTS", "0".into()),
        ("TORCHELASTIC_RUN_ID", run.id.clone()),
        // The store at MASTER_PORT is there already: no rank has to serve it.
        ("TORCHELASTIC_USE_AGENT_STORE", "True".into()),
    ]
}

/// The variables that are set where the environment has none.
pub(crate) fn defaults(world: u32) -> Vec<(&'static str, &'static str)> {
    let mut defaults = vec![("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")];
    if world > 1 {
        // Otherwise every rank would start a thread for every core.
        defaults.push(("OMP_NUM_THREADS", "1"));
    }
    defaults.retain(|(name, _)| is_unset(name));
    defaults
}

fn is_unset(name: &str) -> bool {
    std::env::var_os(name).as_deref().unwrap_or(OsStr::new("")).is_empty()
}
