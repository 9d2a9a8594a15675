//! Multicast: one store reaches memory of several devices at once (NVLS).
//!
//! An object stands for the same number of bytes on several devices. Each process has a handle on it, and puts memory of its own
//! device behind it. The processes take these steps together. Behind each step they tell each other whether it worked, and if one
//! step fails on one of them, all drop what they have:
//!
//! 1. all: [`Answers::multicast`](crate::gpu::Answers::multicast) of their device. All go on, or nobody does.
//! 2. one: [`Device::multicast`], and [`Multicast::export`]; the handle goes to all others.
//! 3. the others: [`Device::join_multicast`].
//! 4. all: [`Multicast::add`]. **Nobody goes on before all have.**
//! 5. all: [`Multicast::bind`]. Nobody maps before all have.
//! 6. all: [`Multicast::map`].
//!
//! A step in another order is an error. What a step has done is undone when the object is dropped, in the opposite order; the
//! memory comes last.

use std::fmt;
use std::sync::Arc;

use crate::device::{Device, Region};
use crate::error::{Error, Result};
use crate::fd::Fd;

/// One process's part of a multicast object; see the module.
pub trait Multicast: Send + Sync + fmt::Debug {
    /// Bytes on each device: what was asked for, or a little more. Memory that is bound has at least as many.
    fn bytes(&self) -> usize;

    /// What another process needs to join. Only the process that made the object can give it.
    fn export(&self) -> Result<MulticastHandle>;

    /// Puts this process's device behind it.
    fn add(&mut self) -> Result<()>;

    /// Puts memory of this device behind it, once all devices are there. The object keeps the memory.
    fn bind(&mut self, memory: &Arc<dyn Region>) -> Result<()>;

    /// Gives the device an address of it, once all have bound their memory. Only kernels that are made for it may use
    /// the address.
    fn map(&mut self) -> Result<usize>;
}

/// What travels to a process that joins.
#[derive(Debug)]
#[non_exhaustive]
pub struct MulticastHandle {
    /// The object.
    pub fd: Fd,
    /// How many devices it is for.
    pub devices: usize,
    /// Its bytes on each of them.
    pub bytes: usize,
}

/// What a device without multicast says.
pub(crate) fn none(device: &(impl Device + ?Sized)) -> Error {
    Error::Unsupported {
        what: format!("multicast on {}", device.id()),
        need: "GPUs that are joined by NVLink switches".into(),
        have: "a device without multicast".into(),
    }
}
