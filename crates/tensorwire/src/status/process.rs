//! The processes of this machine: which of them hold memory of ours, and who started whom.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;

use super::sources::Key;
use crate::shm::process::{self, Process, Stat, state};

/// The processes of this machine, as far as they matter. Ranks tell their pids as they see them themselves; in a PID
/// namespace of their own they have others here, so the memory that they hold decides.
#[derive(Debug)]
pub(super) struct Machine {
    /// Whether pids of the job are likely to mean the same here.
    same_namespace: bool,
    /// Who holds which memory, once all processes have been looked at.
    holders: Option<Vec<Holder>>,
    known: HashMap<(u32, Key), Option<u32>>,
}

#[derive(Debug)]
struct Holder {
    pid: u32,
    /// As it sees itself.
    inner: u32,
    keys: Vec<Key>,
}

impl Machine {
    pub(super) fn new(asked: u32) -> Self {
        let same_namespace = inner_pid(asked).is_none_or(|inner| inner == asked);
        Self { same_namespace, holders: None, known: HashMap::new() }
    }

    /// The state of the rank that calls itself `pid` and holds the memory.
    pub(super) fn process(&mut self, pid: u32, key: Key) -> Process {
        match self.place(pid, key) {
            Some(seen) => state(seen).unwrap_or(Process::Gone),
            None if self.same_namespace => Process::Gone,
            None => Process::Unknown,
        }
    }

    /// Where it is, as this process sees it.
    pub(super) fn place(&mut self, pid: u32, key: Key) -> Option<u32> {
        // A process may exist and not show what it holds.
        let hides = |pid: u32| inner_pid(pid) == Some(pid) && memory(pid).is_none();
        self.seen_as(pid, key).or_else(|| (self.same_namespace && hides(pid)).then_some(pid))
    }

    /// The pid, as this process sees it, of the rank that calls itself `pid` and holds the memory.
    fn seen_as(&mut self, pid: u32, key: Key) -> Option<u32> {
        if let Some(known) = self.known.get(&(pid, key)) {
            return *known;
        }
        let direct = inner_pid(pid) == Some(pid) && memory(pid).is_some_and(|keys| keys.contains(&key));
        let seen = if direct { Some(pid) } else { self.search(pid, key) };
        self.known.insert((pid, key), seen);
        seen
    }

    fn search(&mut self, inner: u32, key: Key) -> Option<u32> {
        let holders = self.holders.get_or_insert_with(|| {
            pids()
                .filter_map(|pid| Some(Holder { pid, inner: inner_pid(pid)?, keys: memory(pid)? }))
                .collect()
        });
        holders
            .iter()
            .find(|holder| holder.inner == inner && holder.keys.contains(&key))
            .map(|holder| holder.pid)
    }
}

/// All processes.
pub(super) fn pids() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The memory of ours that a process has open; none where it does not show that.
pub(super) fn memory(pid: u32) -> Option<Vec<Key>> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let ours = entries.filter(|entry| is_ours(&entry.path()));
    Some(ours.filter_map(|entry| key(&std::fs::metadata(entry.path()).ok()?)).collect())
}

/// Whether an entry of /proc/PID/fd is memory that tensorwire made.
pub(super) fn is_ours(path: &std::path::Path) -> bool {
    std::fs::read_link(path)
        .is_ok_and(|name| name.as_os_str().as_encoded_bytes().starts_with(b"/memfd:tensorwire"))
}

/// What tells memory from other memory.
pub(super) fn key(data: &std::fs::Metadata) -> Option<Key> {
    data.is_file().then(|| (data.dev(), data.ino()))
}

/// The name of a process in brackets, with a space before it, or nothing.
pub(super) fn name(pid: u32) -> String {
    let name = process::name(pid);
    if name.is_empty() { name } else { format!(" ({name})") }
}

/// The command line of a process, or its name where that is hidden.
pub(super) fn command(pid: u32) -> String {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = line.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    let words: Vec<_> = words.map(String::from_utf8_lossy).collect();
    if words.is_empty() {
        return process::name(pid);
    }
    words.join(" ").chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Whether a process runs as a user: its effective one counts, as for whoever may look into it.
pub(super) fn is_of(pid: u32, user: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    line.and_then(|uids| uids.split_whitespace().nth(1)?.parse().ok()) == Some(user)
}

/// Who started whom.
#[derive(Debug)]
pub(super) struct Tree {
    parents: HashMap<u32, u32>,
}

impl Tree {
    pub(super) fn now() -> Self {
        let parents = pids().filter_map(|pid| Some((pid, Stat::read(&pid.to_string()).ok()?.parent)));
        Self { parents: parents.collect() }
    }

    /// All processes below one, its children first.
    pub(super) fn below(&self, pid: u32) -> Vec<u32> {
        let mut found = vec![pid];
        let mut next = 0;
        while let Some(&parent) = found.get(next) {
            let mut children: Vec<u32> =
                self.parents.iter().filter(|(_, of)| **of == parent).map(|(pid, _)| *pid).collect();
            children.retain(|child| !found.contains(child));
            children.sort_unstable();
            found.extend(children);
            next += 1;
        }
        found.split_off(1)
    }

    /// The nearest process that all of these descend from, if it can be taken for the one that started them.
    pub(super) fn launcher(&self, pids: &[u32]) -> Option<u32> {
        let (first, rest) = pids.split_first()?;
        let others: Vec<Vec<u32>> = rest.iter().map(|&pid| self.above(pid)).collect();
        let mut shared =
            self.above(*first).into_iter().filter(|pid| others.iter().all(|line| line.contains(pid)));
        // The keeper of `tensorwire run` is a part of it.
        let found = shared.find(|&pid| process::name(pid) != "rank-keeper")?;
        // The first process takes in orphans, whoever started them. In a container it may be the launcher itself.
        (found > 1 || !INITS.contains(&process::name(found).as_str())).then_some(found)
    }

    /// Whether there is such a process.
    pub(super) fn knows(&self, pid: u32) -> bool {
        self.parents.contains_key(&pid)
    }

    /// The parent of a process, its parent, and so on.
    fn above(&self, pid: u32) -> Vec<u32> {
        let mut line = Vec::new();
        let mut at = pid;
        while let Some(&parent) =
            self.parents.get(&at).filter(|parent| **parent != 0 && !line.contains(*parent))
        {
            line.push(parent);
            at = parent;
        }
        line
    }
}

/// First processes that start nothing but services.
const INITS: [&str; 8] =
    ["systemd", "init", "tini", "docker-init", "dumb-init", "catatonit", "s6-svscan", "runit"];

/// The pid of a process as it sees itself.
pub(super) fn inner_pid(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    // Kernels without namespaces do not have the line.
    line.map_or(Some(pid), |pids| pids.split_whitespace().last()?.parse().ok())
}
