//! Descriptors.
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
/// A descriptor of ours.
#[derive(Debug)]
pub struct Fd(OwnedFd);
impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
