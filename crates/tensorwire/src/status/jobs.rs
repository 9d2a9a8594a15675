//! Which groups belong together, and who started their ranks.

use super::process::{Machine, Tree};
use super::sources::{Found, Key};
use super::{Doing, GroupReport, Options, Process, RankReport, process, region, waits};
use crate::shm::process::{look, stacks};

/// Groups that share processes, and so the groups of one job, as far as they were looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobReport {
    /// The process that has started its ranks: the nearest that all of them descend from.
    pub launcher: Option<u32>,
    /// The command line of its first rank.
    pub command: String,
    /// The processes of its ranks, as this process sees them.
    pub pids: Vec<u32>,
    /// Its groups, by name.
    pub groups: Vec<GroupReport>,
}

/// The jobs of these processes, each of which comes with the regions that it holds.
pub(super) fn read(
    found: &mut Found,
    tree: &Tree,
    mut members: Vec<(u32, Vec<Key>)>,
    options: &Options,
) -> Vec<JobReport> {
    let mut known: Vec<Key> = Vec::new();
    let mut jobs = Vec::new();
    while !members.is_empty() {
        let (first, mut keys) = members.remove(0);
        // Processes that share memory with one of them are of the same job, and so on.
        loop {
            let joins = |(_, theirs): &(u32, Vec<Key>)| theirs.iter().any(|key| keys.contains(key));
            let (same, others): (Vec<_>, Vec<_>) = members.into_iter().partition(joins);
            members = others;
            if same.is_empty() {
                break;
            }
            keys.extend(same.into_iter().flat_map(|(_, theirs)| theirs));
        }
        keys.retain(|key| !known.contains(key));
        let mut groups = read_groups(found, &mut Machine::new(first), keys, options);
        known.extend(groups.iter().map(|group| group.key));
        if !groups.is_empty() {
            find_elsewhere(found, &mut groups, options);
            watch_idle(&mut groups);
            jobs.push(report(tree, groups));
        }
    }
    jobs.sort_by_key(|job| (job.launcher, job.pids.clone()));
    jobs
}

/// A group that was read, and the processes of its ranks as we see them.
struct Group {
    key: Key,
    report: GroupReport,
    pids: Vec<Option<u32>>,
}

fn read_groups(
    found: &mut Found,
    machine: &mut Machine,
    mut wanted: Vec<Key>,
    options: &Options,
) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    while let Some(key) = wanted.pop() {
        if groups.iter().any(|group| group.key == key) {
            continue;
        }
        let Some(memory) = found.memory(key) else { continue };
        let Some(report) = region::read(memory.as_ref(), &mut |pid| machine.process(pid, key)) else {
            continue;
        };
        let pids: Vec<Option<u32>> = report.ranks.iter().map(|rank| machine.place(rank.pid, key)).collect();
        if options.job {
            for (rank, seen) in report.ranks.iter().zip(&pids) {
                if !options.sockets_only
                    && let Ok(keys) = found.open(seen.unwrap_or(rank.pid))
                {
                    wanted.extend(keys);
                }
                wanted.extend(found.keys_of(rank.pid));
            }
        }
        groups.push(Group { key, report, pids });
    }
    groups.sort_by(|one, other| (&one.report.name, one.key).cmp(&(&other.report.name, other.key)));
    groups
}

fn report(tree: &Tree, mut groups: Vec<Group>) -> JobReport {
    let now = super::now();
    groups.iter_mut().for_each(|group| waits::settle(&mut group.report, now));
    let mut pids: Vec<u32> = Vec::new();
    for group in &groups {
        let seen = group.report.ranks.iter().zip(&group.pids);
        pids.extend(seen.map(|(rank, seen)| seen.unwrap_or(rank.pid)).filter(|pid| *pid != 0));
    }
    pids.sort_unstable();
    pids.dedup();
    let alive: Vec<u32> = pids.iter().copied().filter(|&pid| tree.knows(pid)).collect();
    let command = alive.first().map(|&pid| process::command(pid)).unwrap_or_default();
    let groups = groups.into_iter().map(|group| group.report).collect();
    JobReport { launcher: tree.launcher(&alive), command, pids, groups }
}

/// Finds ranks that are in no operation of a group because they are in one of another group, which may not have been
/// asked for.
fn find_elsewhere(found: &mut Found, groups: &mut [Group], options: &Options) {
    let mut inside: Vec<(Key, u32, String)> = Vec::new();
    let mut read: Vec<Key> = groups.iter().map(|group| group.key).collect();
    groups.iter().for_each(|group| inside.extend(operations(group.key, &group.report)));
    for group in groups.iter_mut() {
        for (rank, seen) in
            group.report.ranks.iter_mut().zip(&group.pids).filter(|(rank, _)| rank.doing == Doing::Idle)
        {
            let mut others = found.keys_of(rank.pid);
            if let (Some(pid), false) = (seen, options.sockets_only) {
                others.extend(found.open(*pid).unwrap_or_default());
            }
            others.retain(|key| !read.contains(key));
            for key in others {
                let memory = found.memory(key);
                let other =
                    memory.and_then(|memory| region::read(memory.as_ref(), &mut |_| Process::Unknown));
                inside.extend(other.iter().flat_map(|other| operations(key, other)));
                read.push(key);
            }
            let elsewhere = inside.iter().find(|(key, pid, _)| *key != group.key && *pid == rank.pid);
            rank.elsewhere = elsewhere.map(|(_, _, operation)| operation.clone());
        }
    }
}

/// Who is in which operation of a group, by their pids as they see themselves.
fn operations(key: Key, group: &GroupReport) -> Vec<(Key, u32, String)> {
    let operation = |rank: &RankReport| match &rank.doing {
        Doing::In(records) => records.first().map(|record| record.title()),
        Doing::Barrier(Some(count)) => Some(format!("barrier #{count}")),
        _ => None,
    };
    let said =
        |rank: &RankReport| Some((key, rank.pid, format!("{} of group {:?}", operation(rank)?, group.name)));
    group.ranks.iter().filter_map(said).collect()
}

/// Finds out whether ranks that are in no operation at all compute or sleep, and what would show where.
fn watch_idle(groups: &mut [Group]) {
    let mut idle = Vec::new();
    for (at, group) in groups.iter().enumerate() {
        for (place, (rank, seen)) in group.report.ranks.iter().zip(&group.pids).enumerate() {
            let is_idle = rank.doing == Doing::Idle && rank.elsewhere.is_none();
            let is_idle = is_idle && rank.process.outside(false).is_some();
            idle.extend(seen.filter(|_| is_idle).map(|pid| (at, place, pid)));
        }
    }
    let pids: Vec<u32> = idle.iter().map(|(_, _, pid)| *pid).collect();
    for ((at, place, pid), process) in idle.into_iter().zip(look(&pids)) {
        if let Some(rank) = groups.get_mut(at).and_then(|group| group.report.ranks.get_mut(place)) {
            rank.process = process;
            rank.stacks = process.outside(false).map(|_| stacks(pid));
        }
    }
}
