//! What can go wrong below the library, sorted by whose fault it is.

use std::io;
use std::sync::Arc;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a device, region, queue, flag or private connection.
///
/// It can be cloned, because one failure is often told to several waiters.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller asked for something that has no meaning; the text says what and how to ask instead.
    #[error("{0}")]
    Misuse(String),
    /// tensorwire itself is wrong. Neither the caller nor a peer can do anything about it.
    #[error("this is a fault of tensorwire, please report it: {0}")]
    Bug(String),
    /// This machine, kernel or driver does not offer it.
    #[error("{what} is not available here: needs {need}, has {have}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What would have to be there.
        need: String,
        /// What is there instead.
        have: String,
    },
    /// A peer sent something that is not as promised, or is not who it must be.
    #[error("refused: {0}")]
    Refused(String),
    /// A device's driver failed; the call, and its error's number and name.
    #[error("{call} failed: {name}")]
    Device {
        /// The driver call: its first letters, `cu` or `nvml`, say whose number it is.
        call: &'static str,
        /// The number of the error, such as 2 of `CUDA_ERROR_OUT_OF_MEMORY`. None where the call succeeded and gave what
        /// cannot be.
        code: Option<i32>,
        /// The driver's name of the error, or what it gave.
        name: String,
    },
    /// The operating system failed while we were doing something.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// The system's error.
        source: Arc<io::Error>,
    },
    /// The deadline passed.
    #[error("timed out")]
    TimedOut,
    /// The abort word was set while waiting; the holder of the word knows why.
    #[error("aborted")]
    Aborted,
    /// This process was forked from the one that owns the object.
    #[error("{0} belongs to the parent process; a forked child must make its own")]
    Forked(&'static str),
}

impl Error {
    /// Wraps a system error with what was being done, and names the limit that was met.
    pub fn io(doing: impl Into<String>, source: impl Into<io::Error>) -> Self {
        let (mut doing, source) = (doing.into(), source.into());
        match source.raw_os_error() {
            Some(libc::EMFILE) => {
                doing += " (this process has all descriptors that it may have, see ulimit -n)"
            }
            Some(libc::ENFILE) => doing += " (this machine has all files open that it may, see fs.file-max)",
            _ => {}
        }
        Self::Io { doing, source: Arc::new(source) }
    }

    /// A driver's answer that cannot be.
    pub(crate) fn nonsense(call: &'static str, what: impl Into<String>) -> Self {
        Self::Device { call, code: None, name: what.into() }
    }

    /// A caller's mistake.
    pub fn misuse(text: impl Into<String>) -> Self {
        Self::Misuse(text.into())
    }

    /// A mistake of our own.
    pub fn bug(text: impl Into<String>) -> Self {
        Self::Bug(text.into())
    }

    /// A peer's mistake.
    pub fn refused(text: impl Into<String>) -> Self {
        Self::Refused(text.into())
    }
}
