//! Messages between two ranks: send, receive, and receive from any rank, with tags.
//!
//! Between each two ranks of a host there is a [`ring`] in shared memory for each direction. A message flows
//! through the ring while the receiver drains it. A small message fits whole, so its send does not wait for the
//! receiver.
//!
//! Messages from one rank to another with the same tag are received in the order in which they were sent. Messages
//! with different tags may be received in any order. A message that comes before a receive asks for it is kept in
//! private memory. While this rank receives nothing from a peer, it does not drain the ring of that peer.
//!
//! A message may not fit its receive: it has other bytes or another type. Then the receive fails and the message is
//! dropped. A send that times out is withdrawn if nothing of it is in the ring. Otherwise no more messages can go
//! from this rank to the other, and both ranks get an error.

mod engine;
mod incoming;
mod operation;
mod outgoing;
mod peers;
mod ring;
mod state;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, OnceLock};

use tensorwire_device::Deadline;

use super::work::Work;
use crate::error::{Error, Result};

pub(crate) use engine::Engine;

/// A receive from any rank, in flight.
#[derive(Clone)]
#[must_use = "whether a receive has failed, and from whom it came, is told by this"]
pub struct RecvAny {
    work: Work,
    place: Arc<OnceLock<usize>>,
    ranks: Vec<usize>,
}

impl RecvAny {
    /// The place of the sender is in `place` when `work` is done.
    pub(crate) fn new(work: Work, place: Arc<OnceLock<usize>>, ranks: Vec<usize>) -> Self {
        Self { work, place, ranks }
    }

    /// Waits until the message is there and gives the rank that it came from.
    pub fn wait(&self) -> Result<usize> {
        self.work.wait().and_then(|()| self.found())
    }

    /// Waits until the message is there, or until the deadline has passed. The receive itself goes on after that.
    pub fn wait_by(&self, deadline: Deadline) -> Result<usize> {
        self.work.wait_by(deadline).and_then(|()| self.found())
    }

    /// The rank that the message came from, once it is done.
    pub fn source(&self) -> Option<usize> {
        if !self.work.is_done() {
            return None;
        }
        self.ranks.get(*self.place.get()?).copied()
    }

    /// The receive as a work like any other.
    pub fn work(&self) -> &Work {
        &self.work
    }

    fn found(&self) -> Result<usize> {
        self.source().ok_or_else(|| Error::Aborted("a receive ended without a sender".into()))
    }
}

impl fmt::Debug for RecvAny {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RecvAny({:?}, {:?})", self.work, self.source())
    }
}
