//! What can go wrong, sorted by whose fault it is.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tensorwire_device as device;

/// The result of every fallible call of the library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of tensorwire.
///
/// It can be cloned: a group that failed tells every later caller the same thing. `Display` gives a sentence for people, and
/// `Debug` the parts.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another process: it died, left, sent nonsense, or does not fit to us.
    #[error("{0}")]
    Peer(PeerFault),
    /// The deadline passed.
    #[error("timed out{}: {doing}{}", given(.after), detail(.missing))]
    #[non_exhaustive]
    TimedOut {
        /// What was being done.
        doing: String,
        /// How long it took; zero where that is not known.
        after: Duration,
        /// Who or what was missing, or nothing.
        missing: String,
        /// The ranks that were missing, where it is known.
        ranks: Vec<usize>,
    },
    /// Somebody called `abort()`.
    #[error("aborted: {0}")]
    Aborted(String),
    /// The caller's own hook ended a wait, see the module `interrupt`.
    #[error("interrupted: {0}")]
    Interrupted(String),
    /// The caller asked for something wrong; the text says what and what to do.
    #[error("{0}")]
    Misuse(String),
    /// tensorwire itself is wrong. Neither the caller nor a peer can do anything about it.
    #[error("this is a fault of tensorwire, please report it: {0}")]
    Bug(String),
    /// This machine does not offer it.
    #[error("{what} is not available here: needs {need}, has {have}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What would have to be there.
        need: String,
        /// What is there instead.
        have: String,
    },
    /// A device failed.
    #[error("{text}")]
    #[non_exhaustive]
    Device {
        /// What failed, for people.
        text: String,
        /// The driver's number of the error, where it gave one.
        code: Option<i32>,
        /// The driver's name of the error.
        name: Option<String>,
    },
    /// The operating system failed while something was being done.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// The system's error.
        source: Arc<io::Error>,
    },
}

/// What another process did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerFault {
    /// What kind of fault.
    pub kind: PeerFaultKind,
    /// Who: "rank 3 (host a, pid 812)", or an address where no rank is known.
    pub who: String,
    /// Its rank, where it is known; the lowest, where there are several. Nothing where a mismatch has no minority.
    pub rank: Option<usize>,
    /// All ranks that it is about: of a mismatch, those that came for something else than most ranks.
    pub ranks: Vec<usize>,
    /// How it ended, as a clause: "was killed by SIGKILL". Empty where the kind says all that is known.
    pub did: String,
    /// What it did and, where there is something, what to do.
    pub detail: String,
}

/// The kinds of [`PeerFault`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerFaultKind {
    /// Its process ended.
    Died,
    /// It closed the group or the connection.
    Left,
    /// It sent bytes that are not as agreed.
    Misbehaved,
    /// It does not fit: other version, world size, rank twice.
    Incompatible,
    /// It may not talk to us: other user, wrong secret.
    Refused,
    /// It called another operation than we did, or with other sizes.
    Mismatch,
    /// It is alive, but does not leave an operation that was cancelled.
    Stuck,
    /// It could not do its part of an operation.
    Failed,
}

impl fmt::Display for PeerFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.kind {
            PeerFaultKind::Died => "died",
            PeerFaultKind::Left => "left",
            PeerFaultKind::Misbehaved => "misbehaved",
            PeerFaultKind::Incompatible => "does not fit",
            PeerFaultKind::Refused => "was refused",
            PeerFaultKind::Mismatch if self.rank.is_none() => "called different things",
            PeerFaultKind::Mismatch => "called something else",
            PeerFaultKind::Stuck => "is stuck",
            PeerFaultKind::Failed => "failed",
        };
        let verb = if self.did.is_empty() { verb } else { &self.did };
        write!(f, "{} {verb}", self.who)?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, ": {}", self.detail) }
    }
}

impl Error {
    /// Wraps a system error with what was being done.
    pub fn io(doing: impl Into<String>, source: impl Into<io::Error>) -> Self {
        device::Error::io(doing, source).into()
    }

    /// A caller's mistake.
    pub fn misuse(text: impl Into<String>) -> Self {
        Self::Misuse(text.into())
    }

    /// A mistake of our own.
    pub fn bug(text: impl Into<String>) -> Self {
        Self::Bug(text.into())
    }

    /// A deadline that passed.
    pub fn timed_out(doing: impl Into<String>, after: Duration, missing: impl Into<String>) -> Self {
        Self::TimedOut { doing: doing.into(), after, missing: missing.into(), ranks: Vec::new() }
    }

    /// A fault of another process.
    pub fn peer(
        kind: PeerFaultKind,
        who: impl Into<String>,
        rank: Option<usize>,
        detail: impl Into<String>,
    ) -> Self {
        let ranks = rank.into_iter().collect();
        let did = String::new();
        Self::Peer(PeerFault { kind, who: who.into(), rank, ranks, did, detail: detail.into() })
    }

    /// A failure of a device, without a code of its driver.
    pub fn device(text: impl Into<String>) -> Self {
        Self::Device { text: text.into(), code: None, name: None }
    }

    /// The same error, which is about these ranks.
    #[must_use]
    pub(crate) fn about(mut self, about: impl IntoIterator<Item = usize>) -> Self {
        if let Self::TimedOut { ranks, .. } | Self::Peer(PeerFault { ranks, .. }) = &mut self {
            *ranks = about.into_iter().collect();
        }
        self
    }

    /// The same error, with one more clause where it is a deadline that passed.
    #[must_use]
    pub(crate) fn adding(mut self, clause: &str) -> Self {
        if let Self::TimedOut { missing, .. } = &mut self {
            missing.push_str(if missing.is_empty() { "" } else { "; " });
            missing.push_str(clause);
        }
        self
    }

    /// Adds to what it says of a fault or a time-out.
    pub(crate) fn say_also(&mut self, text: &str) {
        match self {
            Self::TimedOut { missing, .. } => missing.push_str(text),
            Self::Peer(fault) if fault.detail.is_empty() => {
                fault.detail.push_str(text.trim_start_matches("; "));
            }
            Self::Peer(fault) => fault.detail.push_str(text),
            _ => {}
        }
    }

    /// The same fault, of a process that is known to have ended so.
    #[must_use]
    pub(crate) fn having(mut self, clause: impl Into<String>) -> Self {
        if let Self::Peer(PeerFault { did, .. }) = &mut self {
            *did = clause.into();
        }
        self
    }

    /// The ranks that it is about: who was missing, who died, who came for something else.
    pub fn ranks(&self) -> &[usize] {
        match self {
            Self::TimedOut { ranks, .. } | Self::Peer(PeerFault { ranks, .. }) => ranks,
            _ => &[],
        }
    }

    /// Whether it is a deadline that passed.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::TimedOut { .. })
    }
}

impl From<device::Error> for Error {
    fn from(error: device::Error) -> Self {
        match error {
            device::Error::Misuse(text) => Self::Misuse(text),
            device::Error::Bug(text) => Self::Bug(text),
            device::Error::Forked(_) => Self::Misuse(error.to_string()),
            device::Error::Unsupported { what, need, have } => Self::Unsupported { what, need, have },
            device::Error::Io { doing, source } => Self::Io { doing, source },
            device::Error::Refused(text) => Self::peer(PeerFaultKind::Refused, "a local process", None, text),
            device::Error::TimedOut => Self::timed_out("waiting for a device", Duration::ZERO, ""),
            device::Error::Aborted => Self::Aborted("while waiting for a device".into()),
            device::Error::Device { code, ref name, .. } => {
                Self::Device { text: error.to_string(), code, name: Some(name.clone()) }
            }
            other => Self::device(other.to_string()),
        }
    }
}

fn given(duration: &Duration) -> String {
    let secs = duration.as_secs_f64();
    match duration.subsec_nanos() {
        _ if duration.is_zero() => String::new(),
        0 => format!(" after {secs:.0}s"),
        _ => format!(" after {secs:.3}s"),
    }
}

fn detail(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {text}") }
}
