//! Messages between two ranks of a group, as users call them.

use std::sync::{Arc, OnceLock};

use tensorwire_device::Deadline;

use super::Group;
use crate::collective::{RecvAny, Tensor, Work};
use crate::error::{Error, Result};

impl Group {
    /// Sends a tensor to a rank. When it is over, the tensor may be changed; a large one needs the receiver for that.
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

    /// Receives the next message of a rank. It has the tensor's type and size.
    pub fn recv<'a>(&'a self, tensor: &'a Tensor, from: usize) -> Message<'a> {
        Message { call: MessageCall::new(self, tensor), way: Way::From(from) }
    }

    /// Receives the next message of any rank. Ranks take turns.
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

/// A message to or from one rank that has not begun: it is waited for, or started.
#[derive(Debug)]
#[must_use = "a message goes nowhere until it is waited for or started"]
pub struct Message<'a> {
    call: MessageCall<'a>,
    way: Way,
}

impl Message<'_> {
    /// Its tag, instead of 0: messages with the same tag stay in order, those with others may overtake them.
    pub fn tag(mut self, tag: u64) -> Self {
        self.call.tag = tag;
        self
    }

    /// By when it has to be over, instead of within the group's time-out.
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

    /// Starts it. Until the work is done, a tensor that is sent must not be changed, and one that is received into not be
    /// touched.
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

/// A message from any rank that has not begun to be received: it is waited for, or started.
#[derive(Debug)]
#[must_use = "nothing is received until it is waited for or started"]
pub struct MessageFromAny<'a> {
    call: MessageCall<'a>,
}

impl MessageFromAny<'_> {
    /// Its tag, instead of 0.
    pub fn tag(mut self, tag: u64) -> Self {
        self.call.tag = tag;
        self
    }

    /// By when it has to be over, instead of within the group's time-out.
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

    /// Starts to receive it. The tensor must not be touched until that is done.
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
