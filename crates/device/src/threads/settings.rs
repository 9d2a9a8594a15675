//! How many GPUs there are, and how they behave. As text, settings travel to the processes of a test in a variable.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The variable that gives a process these GPUs: what [`Settings`] writes, such as "2:1,mps". It does not begin as the
/// library's variables do, because the library refuses those that it does not know.
pub const VARIABLE: &str = "THREAD_GPUS";

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// How many GPUs there are.
    pub gpus: usize,
    /// How many hardware queues a process has on each of them: 1 to 32.
    pub queues: usize,
    /// Whether streams wait. Under MPS they do not: the calling thread does.
    pub mps: bool,
    /// Whether the GPUs reach each other's memory.
    pub peers: bool,
    /// Whether a stream without work is signalled by the host at once, as real GPUs are.
    pub prompt: bool,
    /// Bytes of each GPU's memory. Each process counts for itself.
    pub memory: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { gpus: 1, queues: 8, mps: false, peers: true, prompt: false, memory: MEMORY }
    }
}

const MEMORY: usize = 16 << 30;

impl Settings {
    /// How many streams of a process may wait on one GPU at the same time.
    pub(super) fn most_waiting(&self) -> usize {
        if self.mps { 0 } else { self.queues / 2 }
    }

    pub(super) fn check(self) -> Result<Self> {
        if !(1..=32).contains(&self.queues) || self.gpus > 64 {
            return Err(Error::misuse(format!(
                "{} GPUs with {} hardware queues: there are at most 64 with 1 to 32",
                self.gpus, self.queues
            )));
        }
        Ok(self)
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.gpus, self.queues)?;
        if self.mps {
            f.write_str(",mps")?;
        }
        if !self.peers {
            f.write_str(",apart")?;
        }
        if self.prompt {
            f.write_str(",prompt")?;
        }
        if self.memory != MEMORY {
            write!(f, ",memory={}", self.memory)?;
        }
        Ok(())
    }
}

impl FromStr for Settings {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::misuse(format!(
                "{VARIABLE}={text:?}: write GPUS[:QUEUES][,mps][,apart][,prompt][,memory=BYTES], such as \"2:1,mps\""
            ))
        };
        let number = |text: &str| text.parse::<usize>().map_err(|_| wrong());
        let mut parts = text.trim().split(',');
        let (gpus, queues) = parts.next().map_or(("", None), |first| match first.split_once(':') {
            Some((gpus, queues)) => (gpus, Some(queues)),
            None => (first, None),
        });
        let mut settings = Self { gpus: number(gpus)?, ..Self::default() };
        if let Some(queues) = queues {
            settings.queues = number(queues)?;
        }
        for part in parts {
            match part.split_once('=') {
                None if part == "mps" => settings.mps = true,
                None if part == "apart" => settings.peers = false,
                None if part == "prompt" => settings.prompt = true,
                Some(("memory", bytes)) => settings.memory = number(bytes)?,
                _ => return Err(wrong()),
            }
        }
        settings.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let odd = Settings { gpus: 3, queues: 1, mps: true, peers: false, prompt: true, memory: 1 << 20 };
        for settings in [odd, Settings::default()] {
            assert_eq!(settings.to_string().parse::<Settings>().unwrap(), settings);
        }
        assert_eq!("2".parse::<Settings>().unwrap(), Settings { gpus: 2, ..Settings::default() });
        for wrong in ["", "x", "1:", "1:0", "1:33", "1,", "1,fast", "1,memory=", "-1", "65"] {
            assert!(wrong.parse::<Settings>().is_err(), "{wrong:?}");
        }
    }
}
