//! placeholder
/// A store in a file.
#[derive(Debug)]
pub struct FileStore;
