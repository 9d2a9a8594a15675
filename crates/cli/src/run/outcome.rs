//! How a rank ended, in words and as an exit code.

use std::fmt;

use rustix::process::WaitStatus;
use signal_hook::low_level;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Exited(u8),
    Killed(i32),
}

impl Outcome {
    /// `None` for a process that has not ended.
    pub(crate) fn of(status: WaitStatus) -> Option<Self> {
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Some(Self::Exited(code as u8)),
            (None, Some(signal)) => Some(Self::Killed(signal)),
            (None, None) => None,
        }
    }

    pub(crate) fn succeeded(self) -> bool {
        self == Self::Exited(0)
    }

    /// The exit code that a shell would give it.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Exited(code) => code,
            Self::Killed(signal) => code_of_signal(signal),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit code {code}"),
            Self::Killed(signal) => write!(f, "killed by {}", signal_name(*signal)),
        }
    }
}

pub(crate) fn code_of_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

pub(crate) fn signal_name(signal: i32) -> String {
    low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}

/// Ranks in words: "rank 3", "ranks 0-2 and 5".
pub(crate) fn ranks(ranks: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == rank => *end = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let runs: Vec<String> = runs
        .iter()
        .map(|(start, end)| match end - start {
            0 => start.to_string(),
            1 => format!("{start}, {end}"),
            _ => format!("{start}-{end}"),
        })
        .collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, runs.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_how_it_ended() {
        assert_eq!(Outcome::Exited(3).to_string(), "exit code 3");
        assert_eq!(Outcome::Killed(11).to_string(), "killed by SIGSEGV");
        assert_eq!(Outcome::Killed(11).code(), 139);
    }

    #[test]
    fn names_ranks_briefly() {
        assert_eq!(ranks(&[3]), "rank 3");
        assert_eq!(ranks(&[0, 1, 3]), "ranks 0, 1, 3");
        assert_eq!(ranks(&[0, 1, 2, 5, 7, 8, 9]), "ranks 0-2, 5, 7-9");
    }
}
