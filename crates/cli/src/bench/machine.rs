//! The machine in words.

use rustix::system::uname;

use crate::doctor::processor;

/// The machine, and what runs on it.
#[derive(Debug, Clone)]
pub(super) struct Machine {
    pub(super) processor: String,
    pub(super) cores: usize,
    pub(super) memory_gib: Option<u64>,
    pub(super) kernel: String,
}

impl Machine {
    pub(super) fn here(cores: usize) -> Self {
        let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib: Option<u64> = total.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        let kernel = uname().release().to_string_lossy().into_owned();
        let memory_gib = kib.map(|kib| (kib + (1 << 19)) >> 20);
        Self { processor: processor(), cores, memory_gib, kernel }
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
