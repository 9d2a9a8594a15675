//! Exit codes, and why a subcommand ended without doing its job.

use std::fmt::Display;
use std::io;

/// How the command ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    /// 0.
    Success,
    /// 1.
    Failure,
    /// 2.
    Usage,
    /// What a program that was started ended with; 128 and the signal's number if one killed it.
    Program(u8),
}

impl Status {
    /// What the shell sees.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Failure => 1,
            Self::Usage => 2,
            Self::Program(code) => code,
        }
    }
}

/// Why a subcommand failed. It is printed once, by the command's entry.
#[derive(Debug)]
pub(crate) struct Failure {
    status: Status,
    text: Option<String>,
}

impl Failure {
    /// It was asked for wrongly.
    pub(crate) fn usage(text: impl Display) -> Self {
        Self::with(Status::Usage, text)
    }

    /// It did not work.
    pub(crate) fn failed(text: impl Display) -> Self {
        Self::with(Status::Failure, text)
    }

    /// A store cannot be served at a place.
    pub(crate) fn serving(place: impl Display, error: &tensorwire::Error) -> Self {
        Self::failed(match error {
            tensorwire::Error::Io { source, .. } if source.kind() == io::ErrorKind::AddrInUse => {
                format!(
                    "cannot serve a store at {place}: the port is taken; use another one, or 0 for a free one"
                )
            }
            tensorwire::Error::Io { source, .. } => format!("cannot serve a store at {place}: {source}"),
            other => format!("cannot serve a store at {place}: {other}"),
        })
    }

    /// It did not work, and an exit code of its own says so.
    pub(crate) fn with(status: Status, text: impl Display) -> Self {
        Self { status, text: Some(text.to_string()) }
    }

    pub(crate) fn status(&self) -> Status {
        self.status
    }

    pub(crate) fn text(&self) -> Option<&str> {
        self.text.as_deref()
    }
}

impl From<tensorwire::Error> for Failure {
    fn from(error: tensorwire::Error) -> Self {
        match error {
            tensorwire::Error::Misuse(text) => Self::usage(text),
            error => Self::failed(error),
        }
    }
}

/// Only the printer returns bare system errors: a reader that left early has seen what it wanted.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self { status: Status::Success, text: None },
            _ => Self::failed(format!("writing output: {error}")),
        }
    }
}
