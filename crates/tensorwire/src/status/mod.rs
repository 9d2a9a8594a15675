//! How the groups of a process stand, seen from outside: who is in which operation, and who waits for whom.
//!
//! All ranks of a host write into the control region of their group what they do. So the region of one process
//! shows all of them, even while that process is stopped or stuck. It is opened through /proc. Where that is not
//! allowed, the ranks are asked over their private sockets.

mod jobs;
mod leases;
mod process;
mod region;
mod sources;
mod waits;

use std::path::PathBuf;
use std::time::Duration;

pub use crate::shm::process::Process;
pub use crate::shm::record::{Record, State};
pub use crate::shm::standing::{QueuedOperation, Standing};
pub use crate::shm::traffic::PipeEnd;
pub use crate::shm::view::{Doing, RankReport};
pub use jobs::JobReport;
pub use leases::LeaseReport;

use crate::error::Result;
use crate::shm::process::state;
use process::Tree;
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
    /// The jobs, by the process that started them.
    pub jobs: Vec<JobReport>,
    /// What the processes lend, and of whom they hold memory; only where /proc shows it.
    pub leases: Vec<LeaseReport>,
    /// Why there are none, or why some may be missing.
    pub remarks: Vec<String>,
}

impl Report {
    /// The groups of all jobs.
    pub fn groups(&self) -> impl DoubleEndedIterator<Item = &GroupReport> {
        self.jobs.iter().flat_map(|job| &job.groups)
    }
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

impl GroupReport {
    /// Whether it is a pipe: a group of two processes of which each says what goes through it ([`RankReport::pipe`]).
    pub fn is_pipe(&self) -> bool {
        self.ranks.iter().any(|rank| rank.pipe.is_some())
    }
}

/// The time that records count in: nanoseconds of CLOCK_MONOTONIC.
pub fn now() -> u64 {
    crate::shm::record::now()
}

/// A time for people: "12 s", "3 min 20 s".
pub fn span(time: Duration) -> String {
    crate::shm::sentence::span(time)
}

/// Looks at the groups of process `pid`. If it is in none, at those of all processes below it: so the pid of a launcher
/// shows what it has started.
pub fn of(pid: u32, options: &Options) -> Result<Report> {
    let mut found = Found::default();
    let mut remarks = Vec::new();
    let tree = Tree::now();
    let below = tree.below(pid);
    let mut members: Vec<(u32, Vec<Key>)> = Vec::new();
    let mut hidden = options.sockets_only;
    if !options.sockets_only {
        match found.open(pid) {
            Ok(keys) => members.push((pid, keys)),
            Err(remark) => remarks.push(remark),
        }
        members.retain(|(_, keys)| !keys.is_empty());
        let is_member = !members.is_empty();
        for &other in below.iter().filter(|_| !is_member) {
            match found.open(other) {
                Ok(keys) => members.push((other, found.as_rank(other, keys))),
                Err(_) => hidden |= lives(other),
            }
        }
        members.retain(|(_, keys)| !keys.is_empty());
    }
    if members.is_empty() && (hidden || !remarks.is_empty()) {
        let all: Vec<u32> = std::iter::once(pid).chain(below.iter().copied()).collect();
        let asked = found.ask(&all, options.socket_dir.as_deref());
        let told = found.keys_of(pid);
        let told = if told.is_empty() {
            below.iter().map(|&other| (other, found.keys_of(other))).collect()
        } else {
            vec![(pid, told)]
        };
        members.extend(told.into_iter().filter(|(_, keys): &(u32, Vec<Key>)| !keys.is_empty()));
        if members.is_empty() {
            remarks.push(asked);
        }
    }
    let is_member = members.iter().any(|(member, _)| *member == pid);
    let lenders: Vec<u32> =
        std::iter::once(pid).chain(below.iter().copied().filter(|_| !is_member)).collect();
    let leases = if options.sockets_only { Vec::new() } else { leases::of(&lenders) };
    let jobs = jobs::read(&mut found, &tree, members, options);
    if !jobs.is_empty() {
        remarks.clear();
    } else if remarks.is_empty() {
        remarks.push(in_none(pid, below.len()));
    }
    Ok(Report { jobs, leases, remarks })
}

/// Looks at the groups of all processes of this user.
pub fn of_this_user(options: &Options) -> Result<Report> {
    let mut found = Found::default();
    let user = rustix::process::geteuid().as_raw();
    let pids: Vec<u32> = process::pids().filter(|&pid| process::is_of(pid, user)).collect();
    let mut members: Vec<(u32, Vec<Key>)> = Vec::new();
    let mut hidden = 0;
    for &pid in pids.iter().filter(|_| !options.sockets_only) {
        match found.open(pid) {
            Ok(keys) => members.push((pid, found.as_rank(pid, keys))),
            Err(_) => hidden += usize::from(lives(pid)),
        }
    }
    members.retain(|(_, keys)| !keys.is_empty());
    let mut remark = format!("no process of this user ({user}) is in a group: {} were looked at", pids.len());
    if options.sockets_only || hidden > 0 {
        let asked = found.ask(&[], options.socket_dir.as_deref());
        members.extend(found.told().filter(|(_, keys)| !keys.is_empty()));
        remark = format!("{remark}, of which {hidden} do not let us look into them; {asked}");
    }
    let jobs = jobs::read(&mut found, &Tree::now(), members, options);
    let remarks = if jobs.is_empty() { vec![remark] } else { Vec::new() };
    Ok(Report { jobs, leases: Vec::new(), remarks })
}

fn lives(pid: u32) -> bool {
    state(pid).is_some_and(|process| process != Process::Gone)
}

/// What there is to say of a process that has nothing to show.
fn in_none(pid: u32, below: usize) -> String {
    let name = process::name(pid);
    match below {
        0 => format!(
            "process {pid}{name} is in no group, and no process runs below it: it has formed none, or closed them"
        ),
        1 => format!(
            "process {pid}{name} and the one below it are in no group: they have formed none, or closed them"
        ),
        _ => format!(
            "process {pid}{name} and the {below} below it are in no group: they have formed none, or closed them"
        ),
    }
}

/// Any bytes as a control region, as a ring of records, and as the answer of another process.
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub fn fuzz(data: &[u8]) {
    for record in crate::shm::record::parse(data) {
        let _ = (record.title(), record.ended(), record.is_message());
    }
    if let Some(mut group) = region::read(&crate::shm::view::Bytes(data), &mut |_| Process::Unknown) {
        assert!(!group.ranks.is_empty());
        waits::settle(&mut group, now());
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
        if let Some(mut group) = region::read(answer.memory(index).as_ref(), &mut |_| Process::Sleeping) {
            waits::settle(&mut group, now());
        }
    }
}

#[cfg(test)]
mod tests;
