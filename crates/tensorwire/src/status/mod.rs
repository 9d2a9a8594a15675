//! How the groups of a process stand, seen from outside: who is in which operation, and who waits for whom.
//!
//! All ranks of a host write into the control region of their group what they do. So the region of one process
//! shows all of them, even while that process is stopped or stuck. It is opened through /proc. Where that is not
//! allowed, the ranks are asked over their private sockets.

mod leases;
mod process;
mod region;
mod sources;
mod waits;

use std::path::PathBuf;
use std::time::Duration;

pub use crate::shm::record::{Record, State};
pub use leases::LeaseReport;
pub use process::Process;

use crate::error::Result;
use process::Machine;
use sources::{Found, Key};

/// What is looked at, and how.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Options {
    /// Also look at the other groups of the ranks that share a group with the process, and so on.
    pub job: bool,
    /// Ask private sockets even where /proc shows everything.
    pub sockets_only: bool,
    /// Where private sockets are files; see `Config::socket_dir`.
    pub socket_dir: Option<PathBuf>,
}

/// What was found.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Report {
    /// The groups, by name.
    pub groups: Vec<GroupReport>,
    /// What the process lends, and of whom it holds memory; only where /proc shows it.
    pub leases: Vec<LeaseReport>,
    /// Why there are none, or why some may be missing.
    pub remarks: Vec<String>,
}

/// One group, as its ranks of this host know it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupReport {
    /// Its name in its store.
    pub name: String,
    /// How many ranks it has on all hosts.
    pub world: usize,
    /// Its ranks of this host.
    pub ranks: Vec<RankReport>,
    /// Why it has failed, if it has.
    pub failure: Option<String>,
    /// Sentences: who waits for whom.
    pub summary: Vec<String>,
}

/// One rank of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankReport {
    /// Its number in the group; none while it is still joining.
    pub rank: Option<usize>,
    /// The name of its host.
    pub host: String,
    /// Its pid as it sees itself.
    pub pid: u32,
    /// Its process.
    pub process: Process,
    /// What it does.
    pub doing: Doing,
    /// Whom it waits for, by rank.
    pub waits_for: Vec<usize>,
    /// Its last operations, the newest at the end.
    pub records: Vec<Record>,
    /// How far it is in the group's sequence: 2 k + 1 inside operation k, 2 k + 2 after it, counting around.
    position: u32,
}

/// What a rank does.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Doing {
    /// It has not joined yet.
    Joining,
    /// It is in these operations; the oldest is the first.
    In(Vec<Record>),
    /// It has come to a barrier that is not over; its number, or none while the group forms.
    Barrier(Option<u32>),
    /// It is in none.
    Idle,
    /// It has closed the group.
    Left,
}

impl RankReport {
    /// "rank 3 (host a, pid 812)".
    pub fn who(&self) -> String {
        match self.rank {
            Some(rank) => format!("rank {rank} (host {}, pid {})", self.host, self.pid),
            None => "a rank that is still joining".into(),
        }
    }

    /// The operation that it is in, or was in last.
    pub fn operation(&self) -> Option<&Record> {
        match &self.doing {
            Doing::In(records) => records.first(),
            _ => self.records.last(),
        }
    }
}

/// The time that records count in: nanoseconds of CLOCK_MONOTONIC.
pub fn now() -> u64 {
    crate::shm::record::now()
}

/// A time for people: "12 s", "3 min 20 s".
pub fn span(time: Duration) -> String {
    waits::span(time)
}

/// Looks at the groups of process `pid`.
pub fn of(pid: u32, options: &Options) -> Result<Report> {
    let mut found = Found::default();
    let mut remarks = Vec::new();
    let mut machine = Machine::new(pid);
    let mut wanted: Vec<Key> = Vec::new();
    if !options.sockets_only {
        match found.open(pid) {
            Ok(keys) => wanted = keys,
            Err(remark) => remarks.push(remark),
        }
    }
    if wanted.is_empty() && (options.sockets_only || !remarks.is_empty()) {
        let asked = found.ask(pid, options.socket_dir.as_deref());
        wanted = found.keys_of(pid);
        if wanted.is_empty() {
            remarks.push(asked);
        }
    }
    let leases = if options.sockets_only { Vec::new() } else { leases::of(pid) };
    if wanted.is_empty() {
        if remarks.is_empty() {
            let name = process::name(pid);
            remarks.push(format!("process {pid}{name} is in no group: it has formed none, or closed them"));
        }
        return Ok(Report { groups: Vec::new(), leases, remarks });
    }
    let mut groups: Vec<(Key, GroupReport)> = Vec::new();
    while let Some(key) = wanted.pop() {
        if groups.iter().any(|(other, _)| *other == key) {
            continue;
        }
        let Some(memory) = found.memory(key) else { continue };
        let Some(group) = region::read(memory.as_ref(), &mut |pid| machine.process(pid, key)) else {
            continue;
        };
        if options.job {
            for rank in &group.ranks {
                let pid = machine.seen_as(rank.pid, key).unwrap_or(rank.pid);
                if !options.sockets_only
                    && let Ok(keys) = found.open(pid)
                {
                    wanted.extend(keys);
                }
                wanted.extend(found.keys_of(rank.pid));
            }
        }
        groups.push((key, group));
    }
    groups.sort_by(|(a, one), (b, other)| (&one.name, a).cmp(&(&other.name, b)));
    let groups = groups.into_iter().map(|(_, group)| group).collect();
    Ok(Report { groups, leases, remarks: Vec::new() })
}

/// Any bytes as a control region, as a ring of records, and as the answer of another process.
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub fn fuzz(data: &[u8]) {
    for record in crate::shm::record::parse(data) {
        let _ = (record.title(), record.ended(), record.is_message());
    }
    if let Some(group) = region::read(&region::Bytes(data), &mut |_| Process::Unknown) {
        assert!(!group.ranks.is_empty());
    }
    let mut heard = crate::watch::inquiry::Heard::default();
    let mut rest = data;
    while let Some((&len, more)) = rest.split_first() {
        let (frame, more) = more.split_at(more.len().min(usize::from(len)));
        let _ = heard.hear(frame);
        rest = more;
    }
    let answer = sources::Answered::new(heard);
    for index in 0..answer.keys().len().min(4) {
        region::read(answer.memory(index).as_ref(), &mut |_| Process::Unknown);
    }
}

#[cfg(test)]
mod tests;
