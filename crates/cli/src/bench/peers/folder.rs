//! A folder for what a peer needs while it starts.

use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, mknodat};

/// A folder that only this user can read; it is removed with this value.
#[derive(Debug)]
pub(in crate::bench) struct Folder(PathBuf);

impl Folder {
    pub(in crate::bench) fn new(peer: &str) -> Result<Self, String> {
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(|errno| format!("random bytes: {errno}"))?;
        let name = format!("tensorwire-bench-{peer}-{:016x}", u64::from_ne_bytes(random));
        let path = std::env::temp_dir().join(name);
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.map_err(|error| format!("{} cannot be made: {error}", path.display()))?;
        Ok(Self(path))
    }

    pub(in crate::bench) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file.
    pub(in crate::bench) fn write(&self, name: &str, text: &str) -> Result<PathBuf, String> {
        let path = self.0.join(name);
        std::fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(path)
    }

    /// A named pipe, both ends of which are held here: opening it waits for nobody.
    pub(in crate::bench) fn pipe(&self, name: &str) -> Result<File, String> {
        let path = self.0.join(name);
        let made = mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0);
        made.map_err(|errno| format!("{} cannot be made: {errno}", path.display()))?;
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        opened.map_err(|error| format!("{}: {error}", path.display()))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!("{} could not be removed: {error}", self.0.display());
        }
    }
}
