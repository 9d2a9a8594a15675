//! Messages between two ranks: send, receive, and receive from any rank, with tags.
//!
//! Between each two ranks of a host there is a [`ring`] in shared memory for each direction. A message flows through it
//! while the receiver drains it; a small one fits whole, so that its send does not wait for the receiver. Messages of one
//! rank to another with the same tag are received in the order in which they were sent; with different tags in any order:
//! what comes before it is wanted is kept in private memory. A ring that nobody receives from is not drained.
//!
//! A message that does not fit its receive (other bytes or another type) is an error there and is dropped. A send that
//! times out is withdrawn if nothing of it is in the ring; otherwise no more messages can go from this rank to the other,
//! and both hear of it.

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

use super::tensor::Tensor;
use super::work::Work;
use crate::error::{Error, Result};
use crate::group::Group;

pub(crate) use engine::Engine;

impl Group {
    /// Sends a tensor to a rank. Returns once the tensor may be changed; a large one needs the receiver for that.
    pub fn send(&self, tensor: &Tensor, to: usize, tag: u64) -> Result<()> {
        self.send_by(tensor, to, tag, Deadline::after(self.timeout()))
    }

    /// The same until a deadline.
    pub fn send_by(&self, tensor: &Tensor, to: usize, tag: u64, deadline: Deadline) -> Result<()> {
        self.check()?;
        self.engine()?.send(tensor, self.near(to)?, tag, deadline)
    }

    /// Starts to send a tensor, which must not be changed until the work is done.
    pub fn start_send(&self, tensor: &Tensor, to: usize, tag: u64) -> Result<Work> {
        self.start_send_by(tensor, to, tag, Deadline::after(self.timeout()))
    }

    /// The same until a deadline.
    pub fn start_send_by(&self, tensor: &Tensor, to: usize, tag: u64, deadline: Deadline) -> Result<Work> {
        self.check()?;
        self.engine()?.start_send(tensor, self.near(to)?, tag, deadline)
    }

    /// Receives the next message of a rank that has this tag. It has the tensor's type and size.
    pub fn recv(&self, tensor: &Tensor, from: usize, tag: u64) -> Result<()> {
        self.recv_by(tensor, from, tag, Deadline::after(self.timeout()))
    }

    /// The same until a deadline.
    pub fn recv_by(&self, tensor: &Tensor, from: usize, tag: u64, deadline: Deadline) -> Result<()> {
        self.check()?;
        self.engine()?.recv(tensor, Some(self.near(from)?), tag, deadline).map(|_| ())
    }

    /// Starts to receive into a tensor, which must not be touched until the work is done.
    pub fn start_recv(&self, tensor: &Tensor, from: usize, tag: u64) -> Result<Work> {
        self.start_recv_by(tensor, from, tag, Deadline::after(self.timeout()))
    }

    /// The same until a deadline.
    pub fn start_recv_by(&self, tensor: &Tensor, from: usize, tag: u64, deadline: Deadline) -> Result<Work> {
        self.check()?;
        self.engine()?.start_recv(tensor, Some(self.near(from)?), tag, deadline, None)
    }

    /// Receives the next message of any rank that has this tag, and gives the rank that it came from. Ranks take turns.
    pub fn recv_any(&self, tensor: &Tensor, tag: u64) -> Result<usize> {
        self.recv_any_by(tensor, tag, Deadline::after(self.timeout()))
    }

    /// The same until a deadline.
    pub fn recv_any_by(&self, tensor: &Tensor, tag: u64, deadline: Deadline) -> Result<usize> {
        self.check()?;
        self.all_near()?;
        Ok(self.rank_at(self.engine()?.recv(tensor, None, tag, deadline)?))
    }

    /// Starts to receive from any rank into a tensor, which must not be touched until the work is done.
    pub fn start_recv_any(&self, tensor: &Tensor, tag: u64) -> Result<RecvAny> {
        self.start_recv_any_by(tensor, tag, Deadline::after(self.timeout()))
    }

    /// The same until a deadline.
    pub fn start_recv_any_by(&self, tensor: &Tensor, tag: u64, deadline: Deadline) -> Result<RecvAny> {
        self.check()?;
        self.all_near()?;
        let place = Arc::new(OnceLock::new());
        let work = self.engine()?.start_recv(tensor, None, tag, deadline, Some(place.clone()))?;
        let ranks = self.hosts().iter().find(|ranks| ranks.contains(&self.rank()));
        Ok(RecvAny { work, place, ranks: ranks.cloned().unwrap_or_default() })
    }

    /// The place on this host of a rank.
    fn near(&self, rank: usize) -> Result<usize> {
        match self.place_of(rank) {
            Some(place) => Ok(place),
            None if rank < self.world() => Err(far(&format!("a message to or from rank {rank}"))),
            None => {
                let world = self.world();
                Err(Error::misuse(format!("there is no rank {rank} in a world of {world}")))
            }
        }
    }

    fn all_near(&self) -> Result<()> {
        if self.hosts().len() > 1 { Err(far("a receive from any rank")) } else { Ok(()) }
    }
}

fn far(what: &str) -> Error {
    Error::Unsupported {
        what: what.into(),
        need: "ranks of one host".into(),
        have: "a rank on another host".into(),
    }
}

/// A receive from any rank, in flight.
#[derive(Clone)]
pub struct RecvAny {
    work: Work,
    place: Arc<OnceLock<usize>>,
    ranks: Vec<usize>,
}

impl RecvAny {
    /// Waits until it is done and gives the rank that the message came from.
    pub fn wait(&self) -> Result<usize> {
        self.work.wait().and_then(|()| self.found())
    }

    /// Waits until it is done, or until the deadline has passed; the receive itself goes on then.
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
