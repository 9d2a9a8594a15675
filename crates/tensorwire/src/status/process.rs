//! Processes as /proc shows them.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;

use super::sources::Key;

/// How a rank's process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Process {
    /// On a processor, or waiting for one.
    Running,
    /// Waiting for something.
    Sleeping,
    /// Stopped by a signal.
    Stopped,
    /// Stopped by a debugger.
    Traced,
    /// It has ended.
    Gone,
    /// It cannot be seen from here.
    Unknown,
}

impl Process {
    /// In a word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Sleeping => "sleeping",
            Self::Stopped => "stopped",
            Self::Traced => "traced",
            Self::Gone => "gone",
            Self::Unknown => "unknown",
        }
    }

    /// Whether the process is stopped, held by a debugger, or gone.
    pub const fn is_halted(self) -> bool {
        matches!(self, Self::Stopped | Self::Traced | Self::Gone)
    }

    /// From the state of /proc/PID/stat.
    fn from_letter(letter: char) -> Self {
        match letter {
            'R' => Self::Running,
            'T' => Self::Stopped,
            't' => Self::Traced,
            'Z' | 'X' | 'x' => Self::Gone,
            _ => Self::Sleeping,
        }
    }
}

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
        if let Some(seen) = self.seen_as(pid, key) {
            return state(seen).unwrap_or(Process::Gone);
        }
        match (inner_pid(pid), self.same_namespace) {
            // It exists and does not show what it holds.
            (Some(inner), true) if inner == pid && memory(pid).is_none() => {
                state(pid).unwrap_or(Process::Gone)
            }
            (_, true) => Process::Gone,
            (_, false) => Process::Unknown,
        }
    }

    /// The pid, as this process sees it, of the rank that calls itself `pid` and holds the memory.
    pub(super) fn seen_as(&mut self, pid: u32, key: Key) -> Option<u32> {
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
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    if name.trim().is_empty() { String::new() } else { format!(" ({})", name.trim()) }
}

/// Its state; none if there is no such process.
pub(super) fn state(pid: u32) -> Option<Process> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command may hold spaces and brackets.
    let letter = stat.rsplit_once(')')?.1.trim_start().chars().next()?;
    Some(Process::from_letter(letter))
}

/// The pid of a process as it sees itself.
fn inner_pid(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    // Kernels without namespaces do not have the line.
    line.map_or(Some(pid), |pids| pids.split_whitespace().last()?.parse().ok())
}
