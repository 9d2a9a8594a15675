//! What carries messages from one process to another, in one direction, as a stream of frames.
//!
//! | kind | between | the stream is |
//! |---|---|---|
//! | [`ring`] | two ranks of one host | shared memory |
//! | [`stream`] | two hosts | bytes: a connection by TCP, or [`ucx`] beside one |
//!
//! The sender has an [`Outlet`], the receiver an [`Inlet`]. Neither ever waits. Whoever wants to sleep until there is something to
//! do calls `arm`, and sleeps on its bell. Messages above know nothing of rings and sockets.
//!
//! What the leaders of hosts say to each other goes over a [`trunk`]: a connection that all groups of two processes share.
//!
//! [`Office`] is what a context has once for all its connections with other hosts: it listens for them, makes them, and hears
//! for sleeping threads that bytes or room have come.

pub(crate) mod address;
pub(crate) mod frame;
pub(crate) mod key;
pub(crate) mod line;
pub(crate) mod meet;
mod office;
pub(crate) mod ring;
pub(crate) mod seal;
mod stream;
pub(crate) mod trunk;
pub(crate) mod ucx;

use std::fmt;

use tensorwire_device::{Caching, Dtype, Queue, View};

use crate::error::Error;

pub(crate) use office::{Branch, Dial, Gate, Office, Sink};

/// What stands before each payload, or before what is sent in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) tag: u64,
    /// Bytes of the payload.
    pub(crate) bytes: u64,
    /// How many messages went before it on this way.
    pub(crate) number: u64,
    pub(crate) dtype: Dtype,
    /// Bytes of the token that goes in the payload's place, because that is lent; 0 if the payload goes itself.
    pub(crate) lent: u32,
}

/// The longest token that a message carries.
const MOST_LENT: u64 = 4096;

impl Header {
    /// The four words of a header, wherever they stand.
    fn words(self) -> [u64; 4] {
        [self.tag, self.bytes, self.number, self.dtype as u64 | u64::from(self.lent) << 32]
    }

    /// Nothing, if no sender of ours wrote them.
    fn from_words([tag, bytes, number, dtype]: [u64; 4]) -> Option<Self> {
        let lent = dtype >> 32;
        let dtype = *Dtype::ALL.get(dtype as u32 as usize)?;
        let whole = bytes.is_multiple_of(dtype.size() as u64) && bytes <= isize::MAX as u64;
        (whole && lent <= MOST_LENT).then_some(Self { tag, bytes, number, dtype, lent: lent as u32 })
    }

    /// Bytes that follow it.
    pub(crate) fn follow(&self) -> u64 {
        if self.lent > 0 { self.lent.into() } else { self.bytes }
    }
}

/// Why a way cannot be used any more.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The other side did what only a broken or malicious process does.
    Nonsense,
    /// What has come is not what the other side has sealed.
    Unsealed,
    /// The other side is set up in another way, and how.
    Unfit(String),
    /// The connection is gone, and why.
    Lost(String),
    /// Something failed here.
    Ours(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Ours(error)
    }
}

impl From<tensorwire_device::Error> for Fault {
    fn from(error: tensorwire_device::Error) -> Self {
        Self::Ours(error.into())
    }
}

pub(crate) type Linked<T> = std::result::Result<T, Fault>;

/// The sender's end.
pub(crate) trait Outlet: fmt::Debug + Send {
    /// Begins a message, if there is room for all of it, or for a good part of a large one.
    fn begin(&mut self, header: Header) -> Linked<bool>;

    /// Puts as much of the rest of the payload as there is room for, or of a part of the rest. Gives how much. The message is over
    /// when all was put and it is settled.
    fn put(&mut self, queue: &mut dyn Queue, rest: View<'_>, caching: Caching) -> Linked<usize>;

    /// Puts what is left of messages that are over. Gives whether nothing is left.
    fn settle(&mut self) -> Linked<bool>;

    /// The message that was begun, and is not over, will not be ended. The receiver forgets it, and the next one can go. Gives
    /// false if it is too late for that: the receiver gets it.
    fn give_up(&mut self) -> Linked<bool>;

    /// Has the sender's bell rung when there is room again.
    fn arm(&self);

    /// Says that nothing more comes.
    fn close(&mut self);
}

/// Where bytes of a payload go.
#[derive(Debug)]
pub(crate) enum Landing<'a> {
    Place(View<'a>, Caching),
    /// They are appended. It has room for them.
    Keep(&'a mut Vec<u8>),
    Drop,
}

/// How a way stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// More may come.
    Open,
    /// The message has come whole.
    Whole,
    /// The sender has given the message up. The next one may come.
    GivenUp,
    /// The sender has closed it.
    Closed,
}

/// The receiver's end.
pub(crate) trait Inlet: fmt::Debug + Send {
    /// The next message's header, if it is there.
    fn begin(&mut self) -> Linked<Option<Header>>;

    /// Takes what has come of the payload, at most `most` bytes. Gives how many. Behind the last one it may take another call
    /// until the message stands as whole.
    fn take(&mut self, queue: &mut dyn Queue, into: Landing<'_>, most: usize) -> Linked<usize>;

    /// Ends a message.
    fn end(&mut self);

    /// How it stands, behind a begin or a take.
    fn standing(&self) -> Standing;

    /// Has the receiver's bell rung when something has come.
    fn arm(&self);
}

#[cfg(test)]
mod tests;
