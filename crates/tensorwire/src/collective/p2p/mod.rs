//! Messages between two ranks: send, receive, and receive from any rank, with tags.
//!
//! Between each two ranks there is a way for each direction: a ring in shared memory, or a connection between two hosts
//! ([`crate::link`]). A message flows through it while the receiver drains it. A small message fits whole, so its send does
//! not wait for the receiver.
//!
//! Messages from one rank to another with the same tag are received in the order in which they were sent. Messages
//! with different tags may be received in any order. A message that comes before a receive asks for it is kept in
//! private memory. While this rank receives nothing from a peer, it does not drain what that peer sends.
//!
//! A tensor on a GPU is sent as the token of a copy, which the receiver's queue pulls ([`freight`]). So its send never waits for
//! the receiver. What follows is the same for all.
//!
//! A message may not fit its receive: it has other bytes or another type. Then the receive fails and the message is
//! dropped. A receive that times out, is interrupted or is dropped is withdrawn ([`started`]). What has come of its message
//! is kept, the rest follows, and the next receive that asks for it gets it whole. Of the receives that are posted already,
//! the first that the message fits gets it; the others wait for their own messages. A receive that was posted behind one
//! that was given up may have the later message already: then the order of the two is lost.
//!
//! A send that times out or is interrupted is withdrawn, too, also if a part of it is on its way. For the receiver it was never
//! sent: a receive that has got a part of it waits for the next message.

mod engine;
mod freight;
mod incoming;
mod operation;
mod outgoing;
mod peers;
mod porter;
mod started;
mod state;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use tensorwire_device::Deadline;

use super::work::Work;
use crate::error::{Error, Result};
use crate::shm::control::Why;
use started::Started;

pub(crate) use engine::{Engine, Revocable, Taken};
pub(crate) use freight::Course;
pub(crate) use peers::Peers;

/// A receive from any rank, in flight. When the last clone is dropped, and the last clone of its [`Work`], it is
/// withdrawn like any receive.
#[derive(Clone)]
#[must_use = "whether a receive has failed, and from whom it came, is told by this"]
pub struct RecvAny {
    work: Work,
    started: Arc<Started>,
    ranks: Vec<usize>,
}

impl RecvAny {
    /// Says whose time-out it is, for an error that does not say so.
    pub(crate) fn with_time_of(mut self, late: Why) -> Self {
        self.work = self.work.with_time_of(late);
        self
    }

    /// Waits until the message is there and gives the rank that it came from.
    pub fn wait(&self) -> Result<usize> {
        self.work.wait().and_then(|()| self.found())
    }

    /// Waits until the message is there, or until the deadline has passed. The receive itself goes on after that.
    pub fn wait_by(&self, deadline: Deadline) -> Result<usize> {
        self.work.wait_by(deadline).and_then(|()| self.found())
    }

    /// The rank that the message came from, once it is done. With a tensor of a GPU it is known as soon as the copy is queued.
    pub fn source(&self) -> Option<usize> {
        match self.work.result() {
            Some(result) => result.ok().and_then(|()| self.rank()),
            None => self.rank().filter(|_| self.started.is_taken()),
        }
    }

    /// The receive as a work like any other.
    pub fn work(&self) -> &Work {
        &self.work
    }

    fn rank(&self) -> Option<usize> {
        self.ranks.get(self.started.source()?).copied()
    }

    fn found(&self) -> Result<usize> {
        self.rank().ok_or_else(|| Error::Aborted("a receive ended without a sender".into()))
    }
}

impl fmt::Debug for RecvAny {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RecvAny({:?}, {:?})", self.work, self.rank())
    }
}
