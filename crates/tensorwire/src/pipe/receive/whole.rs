//! Receiving a message as it comes: its description, and then all of it in new memory.

use std::sync::Arc;

use tensorwire_device::{Deadline, Queue};

use super::describe::{Described, Next, describe};
use super::read::{Built, Order, Reading, follow, read};
use crate::error::Result;
use crate::interrupt::is_interrupt;
use crate::pipe::pending::{How, Outcome, Pending, now};
use crate::pipe::{End, HEADS, Message};

/// A receive of a whole message that has not begun.
#[derive(Debug)]
#[must_use = "nothing is received until it is waited for or started"]
pub struct Recv<'a>(Next<'a>);

impl<'a> Recv<'a> {
    pub(in crate::pipe) fn new(end: &'a Arc<End>) -> Self {
        Self(Next::new(end))
    }

    /// Sets when it must be there at the latest. Otherwise the time-out of the configuration counts.
    pub fn deadline(self, deadline: Deadline) -> Self {
        Self(self.0.deadline(deadline))
    }

    /// Waits for it. Gives nothing if the other end sends no more, or has closed the pipe. A message that has not come whole in
    /// time is there for the next receive.
    pub fn wait(self) -> Result<Option<Message>> {
        let Next { end, deadline } = self.0;
        now(whole(end.clone(), end.by(deadline), How::Wait, Order::default()))?.tell()
    }

    /// The same, but does not wait for copies to GPUs: `queue` does. What is queued on it from now on finds the tensors.
    pub fn on(self, queue: &mut dyn Queue) -> Result<Option<Message>> {
        let Next { end, deadline } = self.0;
        let (order, copied) = Order::of(queue)?;
        let message = now(whole(end.clone(), end.by(deadline), How::Wait, order))?.tell()?;
        follow(queue, &copied).map(|()| message)
    }

    /// Starts it and returns at once. Receives get their messages in the order in which they were started, however they are waited for.
    pub fn start(self) -> Result<Pending<Option<Message>>> {
        let Next { end, deadline } = self.0;
        Pending::start("recv", whole(end.clone(), end.by(deadline), How::Start, Order::default()))
    }
}

/// A message that is here. Until it is told, it goes to the next receive when this is dropped: the reading first, so that what has come
/// is parked.
struct Whole {
    reading: Reading,
    built: Built,
    described: Described,
}

impl Outcome for Option<Whole> {
    type Told = Option<Message>;
    const GOES_ON: bool = false;

    fn tell(self) -> Result<Option<Message>> {
        let Some(Whole { reading, built, described }) = self else { return Ok(None) };
        described.keep()?;
        reading.hand_over(built).map(Some)
    }
}

/// The next message, with its tensors in new memory.
async fn whole(end: Arc<End>, by: Deadline, how: How, order: Order) -> Result<Option<Whole>> {
    let Some(described) = describe(end, HEADS, by, how).await? else { return Ok(None) };
    match read(described.open.clone(), by, how, order).await {
        Ok((reading, built)) => Ok(Some(Whole { reading, built, described })),
        // The next receive goes on with it.
        Err(error) if error.is_timeout() || is_interrupt(&error) => Err(error),
        Err(error) => {
            drop(described.keep());
            Err(error)
        }
    }
}
