//! Descriptors between ranks of one host, as users call them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use tensorwire_device::Deadline;
use tensorwire_device::fd::{Fd, dup};

use super::Group;
use crate::collective::{FdsCall, Kind, Tensor};
use crate::error::{Error, Result};
use crate::shm::control::Why;

/// The tag of messages that tell of descriptors.
pub(super) const FDS: u64 = u64::MAX;

impl Group {
    /// Sends a descriptor to a rank of this host. The send does not wait for the receiver. A second descriptor of the same file
    /// stays open here until the receiver has taken it. If this rank closes the group before, the receiver gets an error.
    ///
    /// ```no_run
    /// # use tensorwire::Group;
    /// # fn exchange(group: &Group) -> Result<(), Box<dyn std::error::Error>> {
    /// match group.rank() {
    ///     0 => group.send_fd(std::fs::File::open("/etc/hostname")?, 1).wait()?,
    ///     _ => drop(std::fs::File::from(group.recv_fd(0).wait()?)),
    /// }
    /// group.barrier().wait()?; // rank 0 does not leave before
    /// # Ok(())
    /// # }
    /// ```
    pub fn send_fd(&self, fd: impl AsFd, to: usize) -> FdMessage<'_, ToRank> {
        FdMessage::new(self, ToRank(dup(fd.as_fd()).map_err(Error::from), to))
    }

    /// Receives the next descriptor of a rank of this host, in the order in which that rank sent them. It is closed by `exec`.
    /// A receive that times out, is interrupted or finds no room for a descriptor in this process loses nothing: the next
    /// receive gets it.
    pub fn recv_fd(&self, from: usize) -> FdMessage<'_, FromRank> {
        FdMessage::new(self, FromRank(from))
    }

    /// Every rank gives one descriptor and gets one of each rank, in the order of the ranks; its own one is a second one of the
    /// same file. All ranks must be on one host. Either all ranks have all descriptors, or all get an error.
    pub fn all_gather_fds(&self, fd: impl AsFd) -> FdsCall<'_> {
        let own = dup(fd.as_fd()).map(|fd| vec![fd]).map_err(Error::from);
        FdsCall::new(&self.0.collectives, Kind::AllGatherFds, Ok(0), own)
    }

    /// Every rank gets second descriptors of those that rank `root` gives, at most 250, in their order; `root` too. What other
    /// ranks give does not count. All ranks must be on one host. Either all ranks have all descriptors, or all get an error.
    pub fn broadcast_fds(&self, fds: &[BorrowedFd<'_>], root: usize) -> FdsCall<'_> {
        let given = if root == self.rank() { fds } else { &[] };
        let own: tensorwire_device::Result<Vec<Fd>> = given.iter().map(|fd| dup(*fd)).collect();
        FdsCall::new(&self.0.collectives, Kind::BroadcastFds, self.near(root), own.map_err(Error::from))
    }
}

/// A descriptor's way between two ranks, before it begins. `W` says which way it goes.
#[derive(Debug)]
#[must_use = "a descriptor goes nowhere until it is waited for"]
pub struct FdMessage<'a, W> {
    group: &'a Group,
    way: W,
    deadline: Option<Deadline>,
}

/// Of a [`FdMessage`] that is sent.
#[derive(Debug)]
pub struct ToRank(Result<Fd>, usize);

/// Of a [`FdMessage`] that is received.
#[derive(Debug, Clone, Copy)]
pub struct FromRank(usize);

impl<'a, W> FdMessage<'a, W> {
    fn new(group: &'a Group, way: W) -> Self {
        Self { group, way, deadline: None }
    }

    /// Sets when it must be over at the latest. Otherwise the group's time-out counts.
    pub fn deadline(mut self, deadline: Deadline) -> Self {
        self.deadline = Some(deadline);
        self
    }

    fn by(&self) -> (Deadline, Why) {
        match self.deadline {
            Some(deadline) => (deadline, Why::CallTimedOut),
            None => (Deadline::after(self.group.timeout()), Why::GroupTimedOut),
        }
    }
}

impl FdMessage<'_, ToRank> {
    /// Sends it now.
    pub fn wait(self) -> Result<()> {
        let ((by, late), ToRank(fd, to)) = (self.by(), self.way);
        self.group.check()?;
        let (place, ranks) = (self.group.near(to)?, self.group.ranks());
        let engine = self.group.0.collectives.engine()?;
        let descriptors = ranks.memory.descriptors();
        let number = descriptors.offer(vec![Arc::new(fd?)], Some(ranks.members[to].identity));
        let sent = Tensor::private(&[number]).and_then(|told| engine.send(&told, place, FDS, by));
        sent.map_err(|error| {
            descriptors.withdraw(number);
            about_fds(error, &format!("send_fd to {}", ranks.members[to]), late)
        })
    }
}

impl FdMessage<'_, FromRank> {
    /// Receives it now.
    pub fn wait(self) -> Result<OwnedFd> {
        let ((by, late), FromRank(from)) = (self.by(), self.way);
        self.group.check()?;
        let (place, ranks) = (self.group.near(from)?, self.group.ranks());
        let doing = format!("recv_fd from {}", ranks.members[from]);
        let number = match ranks.memory.descriptors().told(place) {
            Some(number) => number,
            None => {
                let told = Tensor::private(&[0u64])?;
                let engine = self.group.0.collectives.engine()?;
                engine.recv(&told, Some(place), FDS, by).map_err(|error| about_fds(error, &doing, late))?;
                told.to_vec::<u64>()?.first().copied().unwrap_or(0)
            }
        };
        let taken = ranks.memory.take_fds(place, number, 1, by);
        let mut fds = taken.map_err(|error| {
            if matches!(error, Error::TimedOut { .. } | Error::Interrupted(_) | Error::Io { .. }) {
                ranks.memory.descriptors().tell_again(place, number);
            }
            about_fds(error, &doing, late)
        })?;
        ranks.memory.say_taken(place, number, by);
        let fd = fds.pop().ok_or_else(|| Error::bug("descriptors without one"))?;
        Ok(fd.into_owned()?)
    }
}

/// An error of what carries descriptors, in words of the call.
fn about_fds(mut error: Error, call: &str, late: Why) -> Error {
    if let Error::TimedOut { doing, .. } = &mut error {
        *doing = call.to_owned();
    }
    late.tell(error)
}
