//! Where control regions are read from: the files of a process in /proc, or what ranks say when they are asked.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tensorwire_device::Deadline;
use tensorwire_device::fd::{self, Inquiry};

use super::{process, region};
use crate::shm::process::{Process, state};
use crate::shm::view::UntrustedMemory;
use crate::watch::inquiry::Heard;

pub(super) use crate::watch::inquiry::Key;

/// How long ranks may take to answer, all together. A stopped rank does not answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// The same, once a rank that knows of the process has answered.
const ENOUGH: Duration = Duration::from_millis(500);

/// All control regions that were found.
#[derive(Debug, Default)]
pub(super) struct Found {
    files: HashMap<Key, Arc<File>>,
    /// With the pid of the process that gave it, as we see it; 0 where that cannot be told.
    answers: Vec<(u32, Answered)>,
}

impl Found {
    /// Opens what a process holds; gives which regions those are, or why they cannot be seen.
    pub(super) fn open(&mut self, pid: u32) -> Result<Vec<Key>, String> {
        if state(pid) == Some(Process::Gone) {
            return Err(format!("process {pid} has ended"));
        }
        let folder = format!("/proc/{pid}/fd");
        let entries = std::fs::read_dir(&folder).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => format!("there is no process {pid}"),
            _ => format!(
                "process {pid}{} does not let us look into it ({folder}: {error})",
                process::name(pid)
            ),
        })?;
        let mut keys = Vec::new();
        for path in entries.flatten().map(|entry| entry.path()).filter(|path| process::is_ours(path)) {
            let Ok(file) = File::open(&path) else { continue };
            let Some(key) = file.metadata().ok().and_then(|data| process::key(&data)) else { continue };
            if !keys.contains(&key) && region::is_control(&file) {
                keys.push(key);
                self.files.entry(key).or_insert_with(|| Arc::new(file));
            }
        }
        Ok(keys)
    }

    /// Asks every process of this user that can be reached about some processes, or about all. Gives what came of it,
    /// in words.
    pub(super) fn ask(&mut self, pids: &[u32], dir: Option<&Path>) -> String {
        let mut deadline = Deadline::after(PATIENCE);
        let addresses = fd::listeners(dir);
        let mut reasons: Vec<String> = Vec::new();
        let mut open: Vec<(Inquiry, Heard)> = Vec::new();
        for address in &addresses {
            match Inquiry::ask(address, deadline) {
                Ok(inquiry) => open.push((inquiry, Heard::default())),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        let asked = open.len();
        while !open.is_empty() && !deadline.passed() {
            let mut quiet = true;
            for (inquiry, mut heard) in std::mem::take(&mut open) {
                match inquiry.try_recv() {
                    Ok(None) => {
                        open.push((inquiry, heard));
                        continue;
                    }
                    Ok(Some(frame)) if !frame.is_empty() => match heard.hear(&frame) {
                        Ok(()) if heard.busy => reasons.push("a process is asked by too many at once".into()),
                        Ok(()) if !heard.complete => open.push((inquiry, heard)),
                        Ok(()) => {
                            self.answers.push((inquiry.pid(), Answered::new(heard)));
                            if pids.iter().any(|&pid| !self.keys_of(pid).is_empty()) {
                                deadline = deadline.min(Deadline::after(ENOUGH));
                            }
                        }
                        Err(error) => reasons.push(error.to_string()),
                    },
                    Ok(Some(_)) => {
                        reasons.push("a process closed the connection before it had answered".into())
                    }
                    Err(error) => reasons.push(error.to_string()),
                }
                quiet = false;
            }
            if quiet {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let answered = self.answers.len();
        let mut text = match addresses.len() {
            0 => "no private socket of tensorwire can be seen from here".to_owned(),
            _ => format!("{answered} of {asked} processes that were asked over private sockets answered"),
        };
        if answered > 0 {
            text.push_str(", none of them knows of it");
        }
        if let Some(reason) = reasons.first() {
            text.push_str(&format!(" ({reason})"));
        }
        text
    }

    /// The regions of a process that others told of: its own answer, and groups in which somebody calls itself so.
    pub(super) fn keys_of(&self, pid: u32) -> Vec<Key> {
        let mut keys = Vec::new();
        for (seen_as, answer) in &self.answers {
            // A pid in another namespace is what the process says itself.
            let is_it = if *seen_as == 0 { answer.pid() == pid } else { *seen_as == pid };
            for (index, key) in answer.keys().iter().enumerate() {
                if is_it || region::pids(answer.memory(index).as_ref()).contains(&pid) {
                    keys.push(*key);
                }
            }
        }
        keys
    }

    /// Who answered, as we see it, with its regions; only those whose pid can be told.
    pub(super) fn told(&self) -> impl Iterator<Item = (u32, Vec<Key>)> {
        let seen = self.answers.iter().filter(|(pid, _)| *pid != 0);
        seen.map(|(pid, answer)| (*pid, answer.keys().to_vec()))
    }

    /// Those of the regions in which a process is a rank, or has not said yet what it is. Others that hold them are its
    /// children, or look at them as we do.
    pub(super) fn as_rank(&self, pid: u32, mut keys: Vec<Key>) -> Vec<Key> {
        keys.retain(|&key| {
            let ranks = self.memory(key).map(|memory| region::pids(memory.as_ref())).unwrap_or_default();
            ranks.is_empty() || process::inner_pid(pid).is_some_and(|inner| ranks.contains(&inner))
        });
        keys
    }

    /// One region's memory.
    pub(super) fn memory(&self, key: Key) -> Option<Box<dyn UntrustedMemory>> {
        if let Some(file) = self.files.get(&key) {
            return Some(Box::new(file.clone()));
        }
        self.answers.iter().find_map(|(_, answer)| {
            let index = answer.keys().iter().position(|other| *other == key)?;
            Some(answer.memory(index))
        })
    }
}

/// A complete answer.
#[derive(Debug, Clone)]
pub(super) struct Answered(Arc<Heard>);

impl Answered {
    pub(super) fn new(heard: Heard) -> Self {
        Self(Arc::new(heard))
    }

    pub(super) fn keys(&self) -> &[Key] {
        &self.0.keys
    }

    fn pid(&self) -> u32 {
        self.0.pid.unwrap_or(0)
    }

    pub(super) fn memory(&self, index: usize) -> Box<dyn UntrustedMemory> {
        Box::new(Told { heard: self.0.clone(), index })
    }
}

/// A region as another process told of it.
#[derive(Debug)]
struct Told {
    heard: Arc<Heard>,
    index: usize,
}

impl UntrustedMemory for Told {
    fn read(&self, at: usize, into: &mut [u8]) -> bool {
        self.heard.read(self.index, at, into)
    }

    /// What was not told is zero, so the head decides alone.
    fn len(&self) -> usize {
        usize::MAX
    }
}

impl UntrustedMemory for Arc<File> {
    fn read(&self, at: usize, into: &mut [u8]) -> bool {
        self.read_exact_at(into, at as u64).is_ok()
    }

    fn len(&self) -> usize {
        self.metadata().map_or(0, |data| data.len().try_into().unwrap_or(usize::MAX))
    }
}
