//! Messages between two ranks of a group, as users call them.

use std::sync::Arc;

use tensorwire_device::{Deadline, DeviceId, Mark, Queue};

use super::Group;
use super::fds::FDS;
use crate::collective::call::Until;
use crate::collective::p2p::{Course, Engine, Revocable, Taken};
use crate::collective::{RecvAny, Tensor, Work};
use crate::error::{Error, Result};

impl Group {
    /// Sends a tensor to a rank. You may change the tensor when the send is over. The send of a small message does
    /// not wait for the receiver. The send of a large one does. That of a tensor on a GPU never does, on one host: a copy is sent, which
    /// takes memory of the GPU until it is received.
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
    pub fn send<'a>(&'a self, tensor: &'a Tensor, to: usize) -> Message<'a, OneRank> {
        Message::new(self, tensor, OneRank(Way::To(to)))
    }

    /// Receives the next message of a rank. It has the tensor's type and size. A receive that times out or is interrupted
    /// is withdrawn: the next receive gets the message, also if a part of it has come. One into a tensor of a GPU, or of what
    /// was sent from one, cannot be withdrawn any more when its copy is queued.
    pub fn recv<'a>(&'a self, tensor: &'a Tensor, from: usize) -> Message<'a, OneRank> {
        Message::new(self, tensor, OneRank(Way::From(from)))
    }

    /// Receives the next message of any rank. Ranks take turns.
    pub fn recv_any<'a>(&'a self, tensor: &'a Tensor) -> Message<'a, AnyRank> {
        Message::new(self, tensor, AnyRank(()))
    }

    /// The place on this host of a rank.
    pub(super) fn near(&self, rank: usize) -> Result<usize> {
        match self.ranks().place_of(rank) {
            Some(place) => Ok(place),
            None if rank < self.world() => Err(Error::Unsupported {
                what: format!("a descriptor to or from rank {rank}"),
                need: "ranks of one host".into(),
                have: "a rank on another host".into(),
            }),
            None => Err(self.nobody(rank)),
        }
    }

    /// The place of a rank, as messages know it.
    fn place(&self, engine: &Engine, rank: usize) -> Result<usize> {
        engine.place_of(rank).ok_or_else(|| self.nobody(rank))
    }

    fn nobody(&self, rank: usize) -> Error {
        Error::misuse(format!("there is no rank {rank} in a world of {}", self.world()))
    }
}

/// A message that has not begun: it is waited for, or started. `W` says between whom it goes.
#[derive(Debug)]
#[must_use = "a message goes nowhere until it is waited for or started"]
pub struct Message<'a, W> {
    group: &'a Group,
    tensor: &'a Tensor,
    way: W,
    tag: u64,
    until: Until,
    /// What was queued before it begins.
    after: Option<Mark>,
}

/// Of a [`Message`] to or from one rank.
#[derive(Debug, Clone, Copy)]
pub struct OneRank(Way);

/// Of a [`Message`] from any rank.
#[derive(Debug, Clone, Copy)]
pub struct AnyRank(());

#[derive(Debug, Clone, Copy)]
enum Way {
    To(usize),
    From(usize),
}

impl<'a, W> Message<'a, W> {
    fn new(group: &'a Group, tensor: &'a Tensor, way: W) -> Self {
        Self { group, tensor, way, tag: 0, until: Until::Group, after: None }
    }

    /// Its tag, instead of 0: messages with the same tag stay in order, those with others may overtake them.
    pub fn tag(mut self, tag: u64) -> Self {
        self.tag = tag;
        self
    }

    /// Sets when it must be over at the latest. Otherwise the group's time-out counts.
    pub fn deadline(self, deadline: Deadline) -> Self {
        Self { until: Until::Call(deadline), ..self }
    }

    /// The same for a wrapper that keeps the time-out of the group itself: errors say that it was the group's.
    #[doc(hidden)]
    pub fn deadline_of_group(self, deadline: Deadline) -> Self {
        Self { until: Until::GroupAt(deadline), ..self }
    }

    /// Has it begin behind everything that is on `queue` now. For `start`.
    pub fn after(mut self, queue: &mut dyn Queue) -> Result<Self> {
        self.after = Some(queue.mark()?);
        Ok(self)
    }

    /// What was queued before a message that begins now. That of a tensor of the host begins when it is done.
    fn begins_after(&self) -> Result<Option<Mark>> {
        match &self.after {
            Some(mark) if self.is_on_host() => self.wait_for(mark).map(|()| None),
            other => Ok(other.clone()),
        }
    }

    fn is_on_host(&self) -> bool {
        self.tensor.span().device() == DeviceId::Host
    }

    fn wait_for(&self, mark: &Mark) -> Result<()> {
        Ok(mark.wait(&self.group.ranks().control.abort, self.by())?)
    }

    /// In strict mode a call gives its own error.
    fn strictly(&self, work: &Work) -> Result<()> {
        if self.group.context().config().strict { work.wait() } else { Ok(()) }
    }

    /// The end of a wait for it: says whose time-out it was.
    fn ended<T>(&self, end: Result<T>) -> Result<T> {
        end.map_err(|error| self.until.whose().tell(error))
    }

    fn by(&self) -> Deadline {
        self.until.deadline().unwrap_or_else(|| Deadline::after(self.group.timeout()))
    }

    /// What carries it, if the group is well.
    fn engine(&self) -> Result<&'a Arc<Engine>> {
        self.group.check()?;
        if self.tag == FDS {
            return Err(Error::misuse(format!("the tag {FDS} is for descriptors")));
        }
        self.group.0.collectives.engine()
    }
}

impl Message<'_, OneRank> {
    /// Sends or receives it now.
    pub fn wait(self) -> Result<()> {
        let (engine, by) = (self.engine()?, self.by());
        self.ended(match self.way.0 {
            Way::To(rank) => engine.send(self.tensor, self.group.place(engine, rank)?, self.tag, by),
            Way::From(rank) => {
                engine.recv(self.tensor, Some(self.group.place(engine, rank)?), self.tag, by).map(|_| ())
            }
        })
    }

    /// Starts it and returns at once. Until the work is done, do not change a tensor that is sent, and do not touch
    /// a tensor that receives. A send goes on if you drop its [`Work`]. A receive is withdrawn then, and loses no message.
    pub fn start(self) -> Result<Work> {
        let (engine, by) = (self.engine()?, self.by());
        match self.way.0 {
            Way::To(rank) => {
                let place = self.group.place(engine, rank)?;
                engine.start_send(self.tensor, place, self.tag, Course::Own(self.begins_after()?), by)
            }
            Way::From(rank) => {
                let place = self.group.place(engine, rank)?;
                engine.start_recv(self.tensor, place, self.tag, self.begins_after()?, by)
            }
        }
        .map(|work| work.with_time_of(self.until.whose()))
    }

    /// Receives it now, and keeps what it takes to give it back. For tensors of the host.
    pub(crate) fn wait_kept(self) -> Result<Taken> {
        let (engine, by) = (self.engine()?, self.by());
        match self.way.0 {
            Way::From(rank) => {
                self.ended(engine.recv_kept(self.tensor, self.group.place(engine, rank)?, self.tag, by))
            }
            Way::To(_) => Err(Error::bug("a send that is to be given back")),
        }
    }

    /// Starts to send it, so that it can be withdrawn. For tensors of the host.
    pub(crate) fn start_revocable(self) -> Result<Revocable> {
        let (engine, by) = (self.engine()?, self.by());
        match self.way.0 {
            Way::To(rank) => {
                engine.start_revocable(self.tensor, self.group.place(engine, rank)?, self.tag, by)
            }
            Way::From(_) => Err(Error::bug("a receive that is sent")),
        }
    }

    /// Has the next message be dropped as it comes, whatever its size. Nobody waits for that.
    pub(crate) fn discard(self) -> Result<()> {
        let engine = self.engine()?;
        match self.way.0 {
            Way::From(rank) => engine.discard(self.group.place(engine, rank)?, self.tag),
            Way::To(_) => Err(Error::bug("a send that is dropped")),
        }
    }

    /// Puts it on a queue of the device that its tensor lives on, behind what is there. What is queued from now on may change a
    /// tensor that is sent, and finds what was received. A send does not wait for its receiver. A receive returns when
    /// the message has been sent. An error that comes later is in the work.
    ///
    /// A tensor in host memory is sent or received by this thread, as soon as the queue has come so far.
    pub fn on(self, queue: &mut dyn Queue) -> Result<Work> {
        if self.is_on_host() {
            self.wait_for(&queue.mark()?)?;
            let what = if matches!(self.way.0, Way::To(_)) { "send" } else { "recv" };
            return self.wait().map(|()| Work::done(what));
        }
        let (engine, by) = (self.engine()?, self.by());
        let work = match self.way.0 {
            Way::To(rank) => {
                let place = self.group.place(engine, rank)?;
                engine.start_send(self.tensor, place, self.tag, Course::On(queue), by)
            }
            Way::From(rank) => {
                let place = self.group.place(engine, rank)?;
                let received = engine.recv_on(self.tensor, Some(place), self.tag, queue, by);
                self.ended(received).map(|any| any.work().clone())
            }
        };
        let work = work?.with_time_of(self.until.whose());
        self.strictly(&work).map(|()| work)
    }
}

impl Message<'_, AnyRank> {
    /// Receives it now, and gives the rank that it came from.
    pub fn wait(self) -> Result<usize> {
        let engine = self.engine()?;
        let place = self.ended(engine.recv(self.tensor, None, self.tag, self.by()))?;
        Ok(engine.rank(place))
    }

    /// Starts the receive and returns at once. Do not touch the tensor until the receive is done. It is withdrawn if you
    /// drop the [`RecvAny`], and loses no message.
    pub fn start(self) -> Result<RecvAny> {
        let engine = self.engine()?;
        let any = engine.start_recv_any(self.tensor, self.tag, self.begins_after()?, self.by())?;
        Ok(any.with_time_of(self.until.whose()))
    }

    /// Receives on a queue of the GPU that its tensor lives on, behind what is there: returns when a message has been sent.
    /// What is queued from now on finds it. An error that comes later is in the work.
    pub fn on(self, queue: &mut dyn Queue) -> Result<RecvAny> {
        if self.is_on_host() {
            self.wait_for(&queue.mark()?)?;
        }
        let engine = self.engine()?;
        let received = self.ended(engine.recv_on(self.tensor, None, self.tag, queue, self.by()))?;
        let any = received.with_time_of(self.until.whose());
        self.strictly(any.work()).map(|()| any)
    }
}
