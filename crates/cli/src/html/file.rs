//! The file of a page.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::exit::Failure;

/// The file of a page: there before anything is measured, so that a wrong name costs no time.
#[derive(Debug)]
pub(crate) struct PageFile {
    path: PathBuf,
    file: File,
    /// Whether it is removed again if nothing comes.
    fresh: bool,
}

impl PageFile {
    pub(crate) fn reserve(path: &Path) -> Result<Self, Failure> {
        let fresh = !path.exists();
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file =
            file.map_err(|error| Failure::failed(format!("{} cannot be written: {error}", path.display())))?;
        Ok(Self { path: path.to_owned(), file, fresh })
    }

    pub(crate) fn write(mut self, text: &str) -> Result<(), Failure> {
        let written = self.file.set_len(0).and_then(|()| self.file.write_all(text.as_bytes()));
        written.map_err(|error| {
            Failure::failed(format!("{} cannot be written: {error}", self.path.display()))
        })?;
        self.fresh = false;
        Ok(())
    }
}

impl Drop for PageFile {
    fn drop(&mut self) {
        if self.fresh {
            // An empty page would only puzzle.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
