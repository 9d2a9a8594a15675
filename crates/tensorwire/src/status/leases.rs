//! What a process lends, seen from outside: the head of its book (see `crate::lease`).

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::process;
use crate::lease::{HEAD_BYTES, Shown};

/// What one process lends, or holds of another.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseReport {
    /// The owner's pid as it sees itself.
    pub owner: u32,
    /// Whether the owner has closed its context.
    pub closed: bool,
    /// Grants that are not over, and their bytes.
    pub granted: (u64, u64),
    /// Grants that their owner has dropped, but that still have holders or can still be redeemed.
    pub waiting: (u64, u64),
    /// Grants that expired before they were redeemed, since the start.
    pub expired: (u64, u64),
    /// How many processes redeem them.
    pub holders: u64,
    /// The pids of the first of those, as they see themselves.
    pub pids: Vec<u32>,
}

/// The books that some processes have open: those of the first one come first.
pub(super) fn of(pids: &[u32]) -> Vec<LeaseReport> {
    let folders = pids.iter().filter_map(|pid| std::fs::read_dir(format!("/proc/{pid}/fd")).ok());
    let mut keys = Vec::new();
    let mut found = Vec::new();
    for path in folders.flatten().flatten().map(|entry| entry.path()).filter(|path| process::is_ours(path)) {
        let Ok(file) = File::open(&path) else { continue };
        let Some(key) = file.metadata().ok().and_then(|data| process::key(&data)) else { continue };
        let mut head = [0; HEAD_BYTES];
        if keys.contains(&key) || file.read_exact_at(&mut head, 0).is_err() {
            continue;
        }
        if let Some(shown) = Shown::of(&head) {
            keys.push(key);
            found.push(report(shown));
        }
    }
    found.sort_by_key(|report| (Some(&report.owner) != pids.first(), report.owner));
    found
}

fn report(shown: Shown) -> LeaseReport {
    let Shown { owner, closed, granted, waiting, expired, holders, pids } = shown;
    LeaseReport { owner, closed, granted, waiting, expired, holders, pids }
}
