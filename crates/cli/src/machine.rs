//! The machine in words.

use rustix::system::uname;
use serde::{Deserialize, Serialize};

use crate::doctor::processor;

/// The machine, and what runs on it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Machine {
    pub(crate) host: String,
    pub(crate) processor: String,
    /// Cores that the command may use.
    pub(crate) cores: usize,
    pub(crate) memory_gib: Option<u64>,
    pub(crate) kernel: String,
}

impl Machine {
    pub(crate) fn here(cores: usize) -> Self {
        let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib: Option<u64> = total.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        let system = uname();
        let kernel = system.release().to_string_lossy().into_owned();
        let host = system.nodename().to_string_lossy().into_owned();
        let memory_gib = kib.map(|kib| (kib + (1 << 19)) >> 20);
        Self { host, processor: processor(), cores, memory_gib, kernel }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {} cores", self.processor, self.cores)?;
        if let Some(gib) = self.memory_gib {
            write!(f, ", {gib} GiB")?;
        }
        write!(f, ", Linux {}", self.kernel)
    }
}
