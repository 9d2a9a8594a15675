//! Messages from this rank to one other, in the order in which they were sent.

use std::collections::VecDeque;
use std::time::Instant;

use tensorwire_device::{Caching, Deadline, Queue};

use super::operation::{Ended, Sending};
use super::peers::Peers;
use super::ring::{Fault, Header, Producer};
use crate::error::{Error, Result};

/// Payloads from this size on do not stay in the caches on their way.
pub(super) const LARGE: usize = 4 << 20;

#[derive(Debug)]
pub(super) struct Outgoing {
    to: usize,
    ring: Option<Producer>,
    waiting: VecDeque<Sending>,
    /// How many messages were begun.
    number: u64,
    /// Why no message can go any more.
    broken: Option<Error>,
}

impl Outgoing {
    pub(super) fn new(to: usize) -> Self {
        Self { to, ring: None, waiting: VecDeque::new(), number: 0, broken: None }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Takes a message, behind those that wait.
    pub(super) fn push(&mut self, message: Sending) {
        self.waiting.push_back(message);
    }

    /// Puts what there is room for; gives whether anything moved.
    pub(super) fn progress(&mut self, peers: &Peers, queue: &mut dyn Queue, ended: &mut Vec<Ended>) -> bool {
        let mut moved = false;
        if let Some(error) = self.broken.clone() {
            return self.fail(&error, ended);
        }
        if !self.waiting.is_empty() && peers.control.is_gone(self.to) {
            return self.fail(&peers.left(self.to, "and receives nothing any more"), ended);
        }
        // It stays where it is until it is over: this is called again and again while there is no room.
        while let Some(message) = self.waiting.front_mut() {
            let before = (message.begun, message.put);
            let advanced = advance((&mut self.ring, &mut self.number), self.to, message, peers, queue);
            let after = (message.begun, message.put);
            match advanced {
                Ok(true) => {
                    moved = true;
                    ended.extend(self.waiting.pop_front().map(|message| message.end(Ok(()))));
                }
                Ok(false) => return moved | (before != after),
                Err(fault) => {
                    let error = match fault {
                        Fault::Nonsense => peers.misbehaved(self.to),
                        Fault::Ours(error) => error,
                    };
                    // Before the first byte nothing has happened that the receiver would see.
                    if after.0 {
                        self.break_off(error.clone());
                    }
                    ended.extend(self.waiting.pop_front().map(|message| message.end(Err(error.clone()))));
                    return if self.broken.is_some() { self.fail(&error, ended) } else { true };
                }
            }
        }
        moved
    }

    /// Has the message that a thread waits for end now.
    pub(super) fn hasten(&mut self, number: u64, now: Instant) {
        let own = self.waiting.iter_mut().filter(|message| message.ticket.to.is_waiter(number));
        own.for_each(|message| message.ticket.deadline = message.ticket.deadline.min(Deadline::at(now)));
    }

    /// Ends messages whose deadline has passed.
    pub(super) fn expire(&mut self, now: Instant, peers: &Peers, ended: &mut Vec<Ended>) {
        let to = self.to;
        let mut index = 0;
        while let Some(message) = self.waiting.get(index) {
            if message.ticket.deadline.instant() > now {
                index += 1;
                continue;
            }
            let Some(message) = self.waiting.remove(index) else { break };
            let (put, bytes, who) = (message.put, message.payload.len(), peers.name(to));
            let missing = match message.begun {
                false => format!("{who} has not made room for it; the message is withdrawn"),
                true => format!(
                    "{who} has taken no more than {put} of {bytes} bytes; messages to it are no longer possible in this group"
                ),
            };
            let after = now.saturating_duration_since(message.ticket.since);
            let error = peers.timed_out("send to", Some(to), message.tag, after, missing);
            if message.begun {
                let text = format!(
                    "messages to {who} are no longer possible in this group: one with tag {} was given up after {put} of {bytes} bytes",
                    message.tag
                );
                self.break_off(Error::Aborted(text));
            }
            ended.push(message.end(Err(error)));
        }
        if let Some(error) = self.broken.clone() {
            self.fail(&error, ended);
        }
    }

    /// The earliest deadline of those that wait.
    pub(super) fn soonest(&self) -> Option<Instant> {
        self.waiting.iter().map(|message| message.ticket.deadline.instant()).min()
    }

    /// Ends all that wait; gives whether there were any.
    pub(super) fn fail(&mut self, error: &Error, ended: &mut Vec<Ended>) -> bool {
        if self.waiting.front().is_some_and(|message| message.begun) {
            self.break_off(error.clone());
        }
        let any = !self.waiting.is_empty();
        ended.extend(self.waiting.drain(..).map(|message| message.end(Err(error.clone()))));
        any
    }

    /// The receiver hears that the message it is in will never be whole.
    fn break_off(&mut self, error: Error) {
        if let Some(ring) = &mut self.ring {
            ring.give_up();
        }
        self.broken = Some(error);
    }
}

/// Puts what there is room for of one message; gives whether all of it is in the ring. Opens the ring if it is the first.
fn advance(
    (ring, number): (&mut Option<Producer>, &mut u64),
    to: usize,
    message: &mut Sending,
    peers: &Peers,
    queue: &mut dyn Queue,
) -> Result<bool, Fault> {
    let ring = match ring {
        Some(ring) => ring,
        none => none.insert(Producer::open(&peers.control, to)?),
    };
    let bytes = message.payload.len();
    if !message.begun {
        let header = Header { tag: message.tag, bytes: bytes as u64, number: *number, dtype: message.dtype };
        if !ring.begin(header)? {
            return Ok(false);
        }
        *number += 1;
        message.begun = true;
    }
    // The receiver reads the ring at once, whatever the size.
    let rest = message.payload.view().slice(message.put..bytes)?;
    message.put += ring.put(queue, rest, Caching::Keep)?;
    Ok(message.put == bytes)
}
