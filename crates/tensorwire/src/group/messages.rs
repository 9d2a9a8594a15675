//! Messages between two ranks of a group, as users call them.

use std::sync::{Arc, OnceLock};

use tensorwire_device::Deadline;

use super::Group;
use crate::collective::{RecvAny, Tensor, Work};
use crate::error::{Error, Result};

impl Group {
    /// Sends a tensor to a rank. You may change the tensor when the send is over. The send of a small message does
    /// not wait for the receiver. The send of a large one does.
    ///
    /// ```no_run
    /// # use tensorwire::{Group, Tensor};
    /// # fn exchange(group: &Group, tensor: &Tensor) -> tensorwire::Result<()> {
    /// match group.rank() {
    ///     0 => group.send(tensor, 1).tag(7).wait(),
    ///     _ => group.recv(tensor, 0).tag(7).wait(),
    /// }
    /// # }
    /// ```
    pub fn send<'a>(&'a self, tensor: &'a Tensor, to: usize) -> Message<'a> {
        Message { call: MessageCall::new(self, tensor), way: Way::To(to) }
    }

    /// Receives the next message of a rank. The message must have the tensor's type and size.
    pub fn recv<'a>(&'a self, tensor: &'a Tensor, from: usize) -> Message<'a> {
        Message { call: MessageCall::new(self, tensor), way: Way::From(from) }
    }

    /// Receives the next message of any rank. Ranks take turns, so that no rank is left out.
    pub fn recv_any<'a>(&'a self, tensor: &'a Tensor) -> MessageFromAny<'a> {
        MessageFromAny { call: MessageCall::new(self, tensor) }
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

/// What all messages are called with.
#[derive(Debug)]
struct MessageCall<'a> {
    group: &'a Group,
    tensor: &'a Tensor,
    tag: u64,
    deadline: Option<Deadline>,
}

impl<'a> MessageCall<'a> {
    fn new(group: &'a Group, tensor: &'a Tensor) -> Self {
        Self { group, tensor, tag: 0, deadline: None }
    }

    fn by(&self) -> Deadline {
        self.deadline.unwrap_or_else(|| Deadline::after(self.group.timeout()))
    }
}

#[derive(Debug, Clone, Copy)]
enum Way {
    To(usize),
    From(usize),
}

/// A message to or from one rank that has not begun. [`wait`](Self::wait) sends or receives it now,
/// [`start`](Self::start) in the background.
#[derive(Debug)]
#[must_use = "a message goes nowhere until it is waited for or started"]
pub struct Message<'a> {
    call: MessageCall<'a>,
    way: Way,
}

impl Message<'_> {
    /// Sets its tag, which is 0 otherwise. Messages with the same tag stay in order. Messages with other tags may
    /// overtake them.
    pub fn tag(mut self, tag: u64) -> Self {
        self.call.tag = tag;
        self
    }

    /// Sets when it must be over at the latest. Otherwise the group's time-out counts.
    pub fn deadline(mut self, deadline: Deadline) -> Self {
        self.call.deadline = Some(deadline);
        self
    }

    /// Sends or receives it now.
    pub fn wait(self) -> Result<()> {
        let MessageCall { group, tensor, tag, .. } = self.call;
        group.check()?;
        let engine = group.0.collectives.engine()?;
        match self.way {
            Way::To(rank) => engine.send(tensor, group.near(rank)?, tag, self.call.by()),
            Way::From(rank) => engine.recv(tensor, Some(group.near(rank)?), tag, self.call.by()).map(|_| ()),
        }
    }

    /// Starts it and returns at once. Until the work is done, do not change a tensor that is sent, and do not touch
    /// a tensor that receives.
    pub fn start(self) -> Result<Work> {
        let MessageCall { group, tensor, tag, .. } = self.call;
        group.check()?;
        let engine = group.0.collectives.engine()?;
        match self.way {
            Way::To(rank) => engine.start_send(tensor, group.near(rank)?, tag, self.call.by()),
            Way::From(rank) => engine.start_recv(tensor, Some(group.near(rank)?), tag, self.call.by(), None),
        }
    }
}

/// A receive from any rank that has not begun. [`wait`](Self::wait) receives now, [`start`](Self::start) in the
/// background.
#[derive(Debug)]
#[must_use = "nothing is received until it is waited for or started"]
pub struct MessageFromAny<'a> {
    call: MessageCall<'a>,
}

impl MessageFromAny<'_> {
    /// Sets its tag, which is 0 otherwise.
    pub fn tag(mut self, tag: u64) -> Self {
        self.call.tag = tag;
        self
    }

    /// Sets when it must be over at the latest. Otherwise the group's time-out counts.
    pub fn deadline(mut self, deadline: Deadline) -> Self {
        self.call.deadline = Some(deadline);
        self
    }

    /// Receives it now, and gives the rank that it came from.
    pub fn wait(self) -> Result<usize> {
        let MessageCall { group, tensor, tag, .. } = self.call;
        group.check()?;
        group.all_near()?;
        let place = group.0.collectives.engine()?.recv(tensor, None, tag, self.call.by())?;
        Ok(group.ranks().control.ranks()[place])
    }

    /// Starts the receive and returns at once. Do not touch the tensor until the receive is done.
    pub fn start(self) -> Result<RecvAny> {
        let MessageCall { group, tensor, tag, .. } = self.call;
        group.check()?;
        group.all_near()?;
        let place = Arc::new(OnceLock::new());
        let engine = group.0.collectives.engine()?;
        let work = engine.start_recv(tensor, None, tag, self.call.by(), Some(place.clone()))?;
        Ok(RecvAny::new(work, place, group.ranks().control.ranks().to_vec()))
    }
}

fn far(what: &str) -> Error {
    Error::Unsupported {
        what: what.into(),
        need: "ranks of one host".into(),
        have: "a rank on another host".into(),
    }
}
