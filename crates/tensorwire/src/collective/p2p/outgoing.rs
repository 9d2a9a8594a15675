//! Messages from this rank to one other, in the order in which they were sent.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tensorwire_device::{Caching, Deadline, Queue};

use super::operation::{Ended, Sending};
use super::peers::{Peers, Way};
use crate::error::{Error, PeerFaultKind, Result};
use crate::link::{Fault, Outlet};

/// How long after the end of a connection the group is given to hear why.
pub(super) const HEARSAY: Duration = Duration::from_secs(1);

/// Payloads from this size on do not stay in the caches on their way.
pub(super) const LARGE: usize = 4 << 20;

#[derive(Debug)]
pub(super) struct Outgoing {
    to: usize,
    way: Option<Way>,
    waiting: VecDeque<Sending>,
    /// How many messages were begun.
    number: u64,
    /// Why no message can go any more.
    broken: Option<Error>,
    /// Since when the connection is lost, and why. The group may hear why in a moment.
    lost: Option<(Instant, String)>,
    /// Whether something may be left to be put of a message that was given up.
    unsettled: bool,
}

impl Outgoing {
    pub(super) fn new(to: usize) -> Self {
        Self {
            to,
            way: None,
            waiting: VecDeque::new(),
            number: 0,
            broken: None,
            lost: None,
            unsettled: false,
        }
    }

    /// Whether there is nothing to do.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.is_settled()
    }

    /// Whether nothing is left to be put of messages that are over.
    pub(super) fn is_settled(&self) -> bool {
        !self.unsettled || self.broken.is_some() || self.lost.is_some()
    }

    /// Has the bell rung when there is something to do.
    pub(super) fn arm(&self) {
        if let Some(Way::Open(way)) = &self.way
            && !self.is_idle()
        {
            way.arm();
        }
    }

    /// Nothing more is sent. The receiver hears it if this is polite.
    pub(super) fn close(&mut self, polite: bool) {
        if let Some(Way::Open(way)) = &mut self.way
            && polite
        {
            way.close();
        }
        self.way = None;
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
        if !self.waiting.is_empty() && peers.is_gone(self.to) {
            if matches!(self.way, Some(Way::Dialing(_))) {
                self.way = None;
            }
            return self.fail(&peers.left(self.to, "and receives nothing any more"), ended);
        }
        if self.lost.is_some() {
            return self.check_lost(peers, ended);
        }
        if self.waiting.is_empty() {
            // What is left of one that was given up.
            let Some(Way::Open(way)) = &mut self.way else { return false };
            match way.settle() {
                Ok(settled) => self.unsettled = !settled,
                Err(fault) => self.fault(fault, peers),
            }
            return !self.unsettled;
        }
        match self.open(peers) {
            Ok(true) => {}
            Ok(false) => return false,
            Err(error) => return self.fail(&error, ended),
        }
        // It stays where it is until it is over: this is called again and again while there is no room.
        while let (Some(message), Some(Way::Open(way))) = (self.waiting.front_mut(), &mut self.way) {
            let before = (message.begun, message.put);
            let advanced = advance((&mut **way, &mut self.number), message, queue);
            let after = (message.begun, message.put);
            match advanced {
                Ok(true) => {
                    moved = true;
                    ended.extend(self.waiting.pop_front().map(|message| message.end(Ok(()))));
                }
                Ok(false) => return moved | (before != after),
                Err(Fault::Ours(error)) => {
                    // Before the first byte nothing has happened that the receiver would see.
                    let gone = after.0 && !self.give_up(peers);
                    let end = if gone { Ok(()) } else { Err(error) };
                    ended.extend(self.waiting.pop_front().map(|message| message.end(end)));
                    moved = true;
                }
                Err(fault) => {
                    self.fault(fault, peers);
                    return self.check_lost(peers, ended) | moved;
                }
            }
        }
        moved
    }

    /// Whether the way is there. It is made when the first message wants to go.
    fn open(&mut self, peers: &Peers) -> Result<bool> {
        loop {
            match &self.way {
                None => self.way = Some(peers.way_to(self.to)?),
                Some(Way::Open(_)) => return Ok(true),
                Some(Way::Dialing(dial)) => match dial.take() {
                    None => return Ok(false),
                    Some(Ok(way)) => self.way = Some(Way::Open(way)),
                    Some(Err(why)) => {
                        self.way = None;
                        return Err(peers.unreachable(self.to, &why));
                    }
                },
            }
        }
    }

    /// The way has failed.
    fn fault(&mut self, fault: Fault, peers: &Peers) {
        match fault {
            Fault::Nonsense => self.broken = Some(peers.misbehaved(self.to)),
            Fault::Unsealed => self.broken = Some(peers.unsealed(self.to)),
            Fault::Unfit(how) => self.broken = Some(peers.fault(PeerFaultKind::Mismatch, self.to, how)),
            Fault::Ours(error) => self.broken = Some(error),
            Fault::Lost(why) => self.lost = Some((Instant::now(), why)),
        }
    }

    /// Ends messages of a connection that is lost, if the group has not heard why for a while.
    fn check_lost(&mut self, peers: &Peers, ended: &mut Vec<Ended>) -> bool {
        if let Some((since, why)) = &self.lost
            && since.elapsed() >= HEARSAY
        {
            self.broken = Some(peers.lost(self.to, why));
        }
        match self.broken.clone() {
            Some(error) => self.fail(&error, ended),
            None => false,
        }
    }

    /// The message that was begun is given up. Gives whether the receiver never sees it: it may be all gone already.
    fn give_up(&mut self, peers: &Peers) -> bool {
        self.unsettled = true;
        let Some(Way::Open(way)) = &mut self.way else { return true };
        way.give_up().unwrap_or_else(|fault| {
            self.fault(fault, peers);
            true
        })
    }

    /// Has the message that a thread waits for end now.
    pub(super) fn hasten(&mut self, number: u64, now: Instant) {
        let own = self.waiting.iter_mut().filter(|message| message.ticket.to.is_waiter(number));
        own.for_each(|message| message.ticket.deadline = message.ticket.deadline.min(Deadline::at(now)));
    }

    /// Has the message of this number end now.
    pub(super) fn hasten_numbered(&mut self, number: u64, now: Instant) {
        let own = self.waiting.iter_mut().filter(|message| message.ticket.number == number);
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
                true => {
                    format!("{who} has taken no more than {put} of {bytes} bytes; the message is withdrawn")
                }
            };
            let missing = match &self.way {
                Some(Way::Dialing(_)) => format!("{who} has not answered yet; the message is withdrawn"),
                _ => missing,
            };
            let after = now.saturating_duration_since(message.ticket.since);
            let error = peers.timed_out("send to", Some(to), message.tag, after, missing);
            let gone = message.begun && !self.give_up(peers);
            ended.push(message.end(if gone { Ok(()) } else { Err(error) }));
        }
        self.check_lost(peers, ended);
    }

    /// The earliest deadline of those that wait.
    pub(super) fn soonest(&self) -> Option<Instant> {
        self.waiting.iter().map(|message| message.ticket.deadline.instant()).chain(self.lost_until()).min()
    }

    /// When a lost connection is to be looked at again.
    pub(super) fn lost_until(&self) -> Option<Instant> {
        let (since, _) = self.lost.as_ref().filter(|_| !self.waiting.is_empty())?;
        Some(*since + HEARSAY)
    }

    /// Ends all that wait; gives whether there were any.
    pub(super) fn fail(&mut self, error: &Error, ended: &mut Vec<Ended>) -> bool {
        if let (Some(message), Some(Way::Open(way))) = (self.waiting.front(), &mut self.way)
            && message.begun
        {
            self.unsettled = true;
            match way.give_up() {
                Ok(true) => {}
                Ok(false) => ended.extend(self.waiting.pop_front().map(|message| message.end(Ok(())))),
                Err(_) => self.broken = Some(error.clone()),
            }
        }
        let any = !self.waiting.is_empty();
        ended.extend(self.waiting.drain(..).map(|message| message.end(Err(error.clone()))));
        any
    }
}

/// Puts what there is room for of one message; gives whether all of it is on its way.
fn advance(
    (way, number): (&mut dyn Outlet, &mut u64),
    message: &mut Sending,
    queue: &mut dyn Queue,
) -> Result<bool, Fault> {
    let bytes = message.payload.len();
    if !message.begun {
        if !way.begin(message.header(*number))? {
            return Ok(false);
        }
        *number += 1;
        message.begun = true;
    }
    // The receiver reads it at once, whatever the size.
    let rest = message.payload.view().slice(message.put..bytes)?;
    message.put += way.put(queue, rest, Caching::Give)?;
    Ok(message.put == bytes && way.settle()?)
}
