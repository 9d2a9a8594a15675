//! Messages between two ranks of a group.

use std::sync::{Arc, OnceLock};

use tensorwire_device::Deadline;

use super::Group;
use crate::collective::{RecvAny, Tensor, Work};
use crate::error::{Error, Result};

impl Group {
    /// Sends a tensor to a rank. Returns once the tensor may be changed; a large one needs the receiver for that.
    pub fn send(&self, tensor: &Tensor, to: usize, tag: u64) -> Result<()> {
        self.send_by(tensor, to, tag, Deadline::after(self.timeout()))
    }

    /// The same until a deadline.
    pub fn send_by(&self, tensor: &Tensor, to: usize, tag: u64, deadline: Deadline) -> Result<()> {
        self.check()?;
        self.0.collectives.engine()?.send(tensor, self.near(to)?, tag, deadline)
    }

    /// Starts to send a tensor, which must not be changed until the work is done.
    pub fn start_send(&self, tensor: &Tensor, to: usize, tag: u64) -> Result<Work> {
        self.start_send_by(tensor, to, tag, Deadline::after(self.timeout()))
    }

    /// The same until a deadline.
    pub fn start_send_by(&self, tensor: &Tensor, to: usize, tag: u64, deadline: Deadline) -> Result<Work> {
        self.check()?;
        self.0.collectives.engine()?.start_send(tensor, self.near(to)?, tag, deadline)
    }

    /// Receives the next message of a rank that has this tag. It has the tensor's type and size.
    pub fn recv(&self, tensor: &Tensor, from: usize, tag: u64) -> Result<()> {
        self.recv_by(tensor, from, tag, Deadline::after(self.timeout()))
    }

    /// The same until a deadline.
    pub fn recv_by(&self, tensor: &Tensor, from: usize, tag: u64, deadline: Deadline) -> Result<()> {
        self.check()?;
        self.0.collectives.engine()?.recv(tensor, Some(self.near(from)?), tag, deadline).map(|_| ())
    }

    /// Starts to receive into a tensor, which must not be touched until the work is done.
    pub fn start_recv(&self, tensor: &Tensor, from: usize, tag: u64) -> Result<Work> {
        self.start_recv_by(tensor, from, tag, Deadline::after(self.timeout()))
    }

    /// The same until a deadline.
    pub fn start_recv_by(&self, tensor: &Tensor, from: usize, tag: u64, deadline: Deadline) -> Result<Work> {
        self.check()?;
        self.0.collectives.engine()?.start_recv(tensor, Some(self.near(from)?), tag, deadline, None)
    }

    /// Receives the next message of any rank that has this tag, and gives the rank that it came from. Ranks take turns.
    pub fn recv_any(&self, tensor: &Tensor, tag: u64) -> Result<usize> {
        self.recv_any_by(tensor, tag, Deadline::after(self.timeout()))
    }

    /// The same until a deadline.
    pub fn recv_any_by(&self, tensor: &Tensor, tag: u64, deadline: Deadline) -> Result<usize> {
        self.check()?;
        self.all_near()?;
        Ok(self.at(self.0.collectives.engine()?.recv(tensor, None, tag, deadline)?))
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
        let work =
            self.0.collectives.engine()?.start_recv(tensor, None, tag, deadline, Some(place.clone()))?;
        Ok(RecvAny::new(work, place, self.ranks().control.ranks().to_vec()))
    }

    /// The rank at a place of this host.
    fn at(&self, place: usize) -> usize {
        self.ranks().control.ranks()[place]
    }

    /// The place on this host of a rank.
    fn near(&self, rank: usize) -> Result<usize> {
        match self.ranks().place_of(rank) {
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
