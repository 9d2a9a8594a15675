//! UCX: messages over RDMA, shared memory or TCP, through libucp, which is found at run time. The only folder that names its
//! functions.
//!
//! Nothing else of the process notices that it is loaded: see `load.rs`. A [`Worker`] is used by one thread at a time. It reads and
//! writes memory only that it owns until it says that it is done with it, so whoever gives something up leaves nothing in danger.

mod load;
mod table;
#[cfg(test)]
mod tests;
mod worker;

use std::ffi::CStr;
use std::path::{Path, PathBuf};

pub use worker::{Body, Event, Worker};

use crate::error::{Error, Result};
use table::{Status, Table};

/// Where the PyPI packages libucx-cu12 and libucx-cu13 put the library in an environment of Python.
pub fn python_folders(environment: &Path) -> Vec<PathBuf> {
    let versions = std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
    let versions = versions.filter(|entry| entry.file_name().to_string_lossy().starts_with("python"));
    versions
        .map(|version| version.path().join("site-packages/libucx/lib"))
        .filter(|folder| folder.is_dir())
        .collect()
}

/// The loaded library.
#[derive(Debug)]
pub struct Ucx {
    table: Table,
    version: [u32; 3],
    place: String,
}

impl Ucx {
    /// Loads libucp, 1.13 or newer: the one that is in this process already, the system's, or one from these folders. It stays
    /// loaded.
    pub fn load(folders: &[PathBuf]) -> Result<&'static Self> {
        load::load(folders)
    }

    /// Its version, such as 1.18.0.
    pub fn version(&self) -> String {
        let [major, minor, release] = self.version;
        format!("{major}.{minor}.{release}")
    }

    /// Where it was found.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// The functions that are called, by name: for tests.
    #[cfg(any(test, feature = "thread-gpus"))]
    pub fn calls() -> &'static [&'static str] {
        Table::NAMES
    }

    /// The same library, one of whose functions fails and does nothing: for tests.
    #[cfg(any(test, feature = "thread-gpus"))]
    pub fn failing(&self, call: &str) -> &'static Self {
        let (table, version, place) = (self.table.failing(call), self.version, self.place.clone());
        Box::leak(Box::new(Self { table, version, place }))
    }

    /// The error of a call.
    fn failed(&self, call: &'static str, status: Status) -> Error {
        Error::Device { call, code: Some(status), name: self.words(status) }
    }

    fn done(&self, call: &'static str, status: Status) -> Result<()> {
        if status == table::OK { Ok(()) } else { Err(self.failed(call, status)) }
    }

    /// The library's words for a status.
    fn words(&self, status: Status) -> String {
        // SAFETY: the function takes any number, and gives a text that is never freed.
        let words = unsafe { (self.table.ucs_status_string)(status) };
        if words.is_null() {
            return format!("status {status}");
        }
        // SAFETY: as above; it ends in zero.
        unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
    }
}
