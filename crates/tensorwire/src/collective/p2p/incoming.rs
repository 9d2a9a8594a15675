//! Messages to this rank: receives that wait for a message, messages that wait for a receive, and messages on their
//! way.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use tensorwire_device::{Caching, Queue};

use super::operation::{Ended, Hearer, Receiving};
use super::outgoing::LARGE;
use super::peers::Peers;
use super::ring::{Consumer, Fault, Header};
use crate::error::{Error, PeerFaultKind, Result};

/// Tags whose empty queues are kept for the next receive.
const SPARE: usize = 64;
/// What is taken from one sender before the others have their turn.
const TURN: usize = 1 << 20;

/// What comes from one rank.
#[derive(Debug, Default)]
struct Source {
    ring: Option<Consumer>,
    /// The message that is on its way.
    current: Option<Current>,
    /// How many receives want a message of this rank and no other.
    wanted: usize,
    /// Why no message can come any more.
    broken: Option<Error>,
}

#[derive(Debug)]
struct Current {
    header: Header,
    got: usize,
    target: Target,
}

impl Current {
    fn rest(&self) -> usize {
        // A header is not longer than memory can be.
        self.header.bytes as usize - self.got
    }
}

/// Where a message goes. There is one for each rank, so its size does not matter.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)]
enum Target {
    Receive(Receiving),
    /// Nobody wants it yet.
    Keep(Result<Vec<u8>>),
    Drop,
}

/// A message that came before anyone wanted it.
#[derive(Debug)]
struct Kept {
    from: usize,
    header: Header,
    /// Or why it could not be kept.
    payload: Result<Vec<u8>>,
}

#[derive(Debug)]
pub(super) struct Incoming {
    sources: Vec<Source>,
    /// Receives by tag, in the order in which they were posted.
    posted: BTreeMap<u64, VecDeque<Receiving>>,
    /// How many of them want a message of any rank.
    any: usize,
    /// Whole messages by tag. Those of one rank are in the order in which it sent them.
    kept: BTreeMap<u64, VecDeque<Kept>>,
    /// The rank that is asked first.
    first: usize,
}

impl Incoming {
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            sources: (0..ranks).map(|_| Source::default()).collect(),
            posted: BTreeMap::new(),
            any: 0,
            kept: BTreeMap::new(),
            first: 0,
        }
    }

    /// Whether nobody wants anything and nothing is on its way.
    pub(super) fn is_idle(&self) -> bool {
        self.any == 0 && self.sources.iter().all(|source| source.wanted == 0 && source.current.is_none())
    }

    /// Whether a message is on its way that nobody waits for.
    pub(super) fn has_leftovers(&self) -> bool {
        self.sources.iter().any(|source| {
            source.current.as_ref().is_some_and(|current| !matches!(current.target, Target::Receive(_)))
        })
    }

    /// How many messages nobody has wanted yet, and their bytes.
    pub(super) fn kept(&self) -> (usize, usize) {
        let whole = self.kept.values().flatten().map(|kept| &kept.payload);
        let coming = self.sources.iter().filter_map(|source| match &source.current.as_ref()?.target {
            Target::Keep(payload) => Some(payload),
            _ => None,
        });
        whole
            .chain(coming)
            .fold((0, 0), |(count, bytes), payload| (count + 1, bytes + payload.as_ref().map_or(0, Vec::len)))
    }

    /// Takes a receive: gives it what has come already, or posts it.
    pub(super) fn post(
        &mut self,
        receive: Receiving,
        peers: &Peers,
        queue: &mut dyn Queue,
        ended: &mut Vec<Ended>,
    ) {
        if let Some(kept) = self.take_kept(&receive) {
            ended.push(deliver(receive, kept.from, kept.header, kept.payload, peers, queue));
            return;
        }
        if let Some(place) = self.find_coming(&receive) {
            self.attach(place, receive, peers, ended);
            return;
        }
        match receive.from {
            None => self.any += 1,
            Some(place) => {
                let source = &mut self.sources[place];
                if let Some(error) = source.broken.clone() {
                    ended.push(receive.fail(error));
                    return;
                }
                source.wanted += 1;
            }
        }
        self.posted.entry(receive.tag).or_default().push_back(receive);
    }

    /// Takes a whole message: one that this rank sends to itself, or one that was received and is put back (`again`). That
    /// one was for a receive that was given up: it fails no other.
    pub(super) fn bring(
        &mut self,
        (from, header, again): (usize, Header, bool),
        payload: Result<Vec<u8>>,
        peers: &Peers,
        queue: &mut dyn Queue,
        ended: &mut Vec<Ended>,
    ) {
        match self.take_posted(from, header.tag, |receive| !again || receive.fits(&header)) {
            Some(receive) => ended.push(deliver(receive, from, header, payload, peers, queue)),
            None => {
                // Before those that its rank sent later.
                let queue = self.kept.entry(header.tag).or_default();
                let earlier = |kept: &Kept| kept.from == from && kept.header.number < header.number;
                let at = queue.iter().rposition(earlier).map_or(0, |last| last + 1);
                queue.insert(at, Kept { from, header, payload });
            }
        }
    }

    /// Takes a receive out; gives it if there was one. Its message is for the next one.
    pub(super) fn withdraw(
        &mut self,
        which: impl Fn(&Hearer) -> bool,
        peers: &Peers,
        ended: &mut Vec<Ended>,
    ) -> Option<Receiving> {
        if let Some(receive) = self.remove(|receive| which(&receive.ticket.to)).pop() {
            return Some(receive);
        }
        let is_its = |source: &Source| match &source.current {
            Some(Current { target: Target::Receive(receive), .. }) => which(&receive.ticket.to),
            _ => false,
        };
        let place = self.sources.iter().position(is_its)?;
        self.hand_on(place, peers, ended)
    }

    /// Takes the receive of a message on its way out. The first posted one that the message is for and that it fits gets it;
    /// without one it is kept.
    fn hand_on(&mut self, place: usize, peers: &Peers, ended: &mut Vec<Ended>) -> Option<Receiving> {
        let current = self.sources[place].current.as_mut()?;
        let (header, got) = (current.header, current.got);
        let receive = match std::mem::replace(&mut current.target, Target::Drop) {
            Target::Receive(receive) => receive,
            other => {
                current.target = other;
                return None;
            }
        };
        current.target = Target::Keep(receive.begun(got));
        if let Some(next) = self.take_posted(place, header.tag, |receive| receive.fits(&header)) {
            self.attach(place, next, peers, ended);
        }
        Some(receive)
    }

    /// Takes what has come and is wanted; gives whether anything moved.
    pub(super) fn progress(&mut self, peers: &Peers, queue: &mut dyn Queue, ended: &mut Vec<Ended>) -> bool {
        let (mut moved, count) = (false, self.sources.len());
        for step in 0..count {
            let place = (self.first + step) % count;
            if place != peers.me() && self.listens(place) {
                moved |= self.listen(place, peers, queue, ended);
            }
        }
        if self.any > 0 {
            self.check_anyone(peers, ended);
        }
        moved
    }

    fn listens(&self, place: usize) -> bool {
        let source = &self.sources[place];
        (self.any > 0 || source.wanted > 0 || source.current.is_some()) && source.broken.is_none()
    }

    /// Takes what has come from one rank.
    fn listen(&mut self, place: usize, peers: &Peers, queue: &mut dyn Queue, ended: &mut Vec<Ended>) -> bool {
        // Looked at before the ring: what was put before the end is seen after it.
        let over = peers.control.is_gone(place);
        let broken = self.sources[place].ring.as_ref().is_some_and(Consumer::is_broken);
        let moved = match self.pull(place, peers, queue, ended) {
            Ok((moved, false)) => return moved,
            Ok((moved, true)) => moved,
            Err(fault) => {
                let error = match fault {
                    Fault::Nonsense => peers.misbehaved(place),
                    Fault::Ours(error) => error,
                };
                self.break_off(place, &error, ended);
                return true;
            }
        };
        // The ring is empty.
        if broken {
            let on_its_way = self.sources[place].current.as_ref().map_or_else(String::new, |current| {
                let (header, got) = (current.header, current.got);
                format!(" a message of {} bytes with tag {} after {got} bytes", header.bytes, header.tag)
            });
            let who = peers.name(place);
            let text = format!(
                "{who} gave up sending{on_its_way}, because its deadline passed or it was interrupted; no message can come from it in this group any more"
            );
            self.break_off(place, &Error::Aborted(text), ended);
        } else if over {
            let error = peers.left(place, "and a message from it has not come");
            self.break_off(place, &error, ended);
        }
        moved
    }

    /// Takes what is in a ring; gives whether anything moved, and whether nothing is left there.
    fn pull(
        &mut self,
        place: usize,
        peers: &Peers,
        queue: &mut dyn Queue,
        ended: &mut Vec<Ended>,
    ) -> Result<(bool, bool), Fault> {
        let (mut moved, mut left) = (false, TURN);
        while left > 0 {
            if self.sources[place].current.is_none() {
                if !self.listens(place) {
                    return Ok((moved, false));
                }
                let ring = match &mut self.sources[place].ring {
                    Some(ring) => ring,
                    none => none.insert(Consumer::open(&peers.control, place)?),
                };
                let Some(header) = ring.begin()? else { return Ok((moved, true)) };
                moved = true;
                let target = self.target(place, &header, peers, ended);
                self.sources[place].current = Some(Current { header, got: 0, target });
            }
            // It stays where it is until it is whole: this is called again and again while nothing has come.
            let Source { ring: Some(ring), current: Some(current), .. } = &mut self.sources[place] else {
                return Ok((moved, true));
            };
            let got = take(ring, current, left.min(current.rest()), queue)?;
            moved |= got > 0;
            left -= got;
            if current.rest() > 0 {
                // Either the ring was empty, or others have their turn.
                return Ok((moved, left > 0));
            }
            ring.end();
            moved = true;
            if let Some(whole) = self.sources[place].current.take() {
                self.finish(place, whole, queue, ended);
            }
        }
        Ok((moved, false))
    }

    /// Where a message goes.
    fn target(&mut self, place: usize, header: &Header, peers: &Peers, ended: &mut Vec<Ended>) -> Target {
        match self.take_posted(place, header.tag, |_| true) {
            None => Target::Keep(Ok(Vec::new())),
            Some(receive) => match receive.misfit(header) {
                None => Target::Receive(receive),
                Some(text) => {
                    let error = peers.fault(PeerFaultKind::Mismatch, place, text);
                    ended.push(receive.fail(error));
                    Target::Drop
                }
            },
        }
    }

    /// A message is whole.
    fn finish(&mut self, place: usize, current: Current, queue: &mut dyn Queue, ended: &mut Vec<Ended>) {
        match current.target {
            Target::Receive(receive) => {
                ended.push(receive.finish(place, current.header, queue));
            }
            Target::Keep(payload) => {
                let kept = Kept { from: place, header: current.header, payload };
                self.kept.entry(kept.header.tag).or_default().push_back(kept);
            }
            Target::Drop => {}
        }
    }

    /// The first posted receive that a message is for, of those that may get it.
    fn take_posted(&mut self, place: usize, tag: u64, may: impl Fn(&Receiving) -> bool) -> Option<Receiving> {
        let queue = self.posted.get_mut(&tag)?;
        let index = queue.iter().position(|receive| receive.takes(place) && may(receive))?;
        let receive = queue.remove(index)?;
        if queue.is_empty() && self.posted.len() > SPARE {
            self.posted.remove(&tag);
        }
        self.forget(&receive, place);
        Some(receive)
    }

    /// A receive is no longer posted.
    fn forget(&mut self, receive: &Receiving, place: usize) {
        match receive.from {
            None => {
                self.any -= 1;
                // The next one asks another rank first.
                self.first = (place + 1) % self.sources.len().max(1);
            }
            Some(from) => self.sources[from].wanted -= 1,
        }
    }

    /// The message that a receive gets, of those that nobody wanted: the first of its rank; of any rank, that of the
    /// rank whose turn it is.
    fn take_kept(&mut self, receive: &Receiving) -> Option<Kept> {
        let count = self.sources.len().max(1);
        let queue = self.kept.get_mut(&receive.tag)?;
        let index = match receive.from {
            Some(from) => queue.iter().position(|kept| kept.from == from)?,
            None => {
                let turn = |place: usize| (place + count - self.first) % count;
                let (index, kept) = queue.iter().enumerate().min_by_key(|(_, kept)| turn(kept.from))?;
                self.first = (kept.from + 1) % count;
                index
            }
        };
        let kept = queue.remove(index);
        if queue.is_empty() {
            self.kept.remove(&receive.tag);
        }
        kept
    }

    /// A rank whose message is on its way, wanted by nobody so far, and just what this receive is for.
    fn find_coming(&self, receive: &Receiving) -> Option<usize> {
        let count = self.sources.len();
        (0..count).map(|step| (self.first + step) % count).find(|&place| {
            let current = self.sources[place].current.as_ref();
            receive.takes(place)
                && current.is_some_and(|current| {
                    current.header.tag == receive.tag && matches!(current.target, Target::Keep(_))
                })
        })
    }

    /// Gives a message on its way to a receive.
    fn attach(&mut self, place: usize, receive: Receiving, peers: &Peers, ended: &mut Vec<Ended>) {
        let Some(current) = &mut self.sources[place].current else { return };
        let Target::Keep(payload) = std::mem::replace(&mut current.target, Target::Drop) else { return };
        let written = match receive.misfit(&current.header) {
            Some(text) => Err(peers.fault(PeerFaultKind::Mismatch, place, text)),
            None => payload.and_then(|bytes| Ok(receive.into.write(0, &bytes)?)),
        };
        if receive.from.is_none() {
            self.first = (place + 1) % self.sources.len().max(1);
        }
        match written {
            Ok(()) => {
                if let Some(current) = &mut self.sources[place].current {
                    current.target = Target::Receive(receive);
                }
            }
            Err(error) => ended.push(receive.fail(error)),
        }
    }

    /// Ends receives of any rank when no other rank is left.
    fn check_anyone(&mut self, peers: &Peers, ended: &mut Vec<Ended>) {
        let alive = |place: usize| self.sources[place].broken.is_none();
        let mut others = (0..self.sources.len()).filter(|&place| place != peers.me());
        if self.sources.len() < 2 || others.any(alive) {
            return;
        }
        let last = (0..self.sources.len()).rev().find_map(|place| self.sources[place].broken.clone());
        let Some(error) = last else { return };
        let receives = self.remove(|receive| receive.from.is_none());
        ended.extend(receives.into_iter().map(|receive| receive.fail(error.clone())));
    }

    /// No message comes from a rank any more.
    fn break_off(&mut self, place: usize, error: &Error, ended: &mut Vec<Ended>) {
        let receives = self.remove(|receive| receive.from == Some(place));
        let source = &mut self.sources[place];
        source.broken = Some(error.clone());
        let current = source.current.take().and_then(|current| match current.target {
            Target::Receive(receive) => Some(receive),
            _ => None,
        });
        let receives = current.into_iter().chain(receives);
        ended.extend(receives.map(|receive| receive.fail(error.clone())));
    }

    /// Takes posted receives out, in their order.
    fn remove(&mut self, which: impl Fn(&Receiving) -> bool) -> Vec<Receiving> {
        let mut removed = Vec::new();
        for queue in self.posted.values_mut() {
            let mut index = 0;
            while let Some(receive) = queue.get(index) {
                if which(receive) {
                    removed.extend(queue.remove(index));
                } else {
                    index += 1;
                }
            }
        }
        if !removed.is_empty() && self.posted.len() > SPARE {
            self.posted.retain(|_, queue| !queue.is_empty());
        }
        for receive in &removed {
            match receive.from {
                None => self.any -= 1,
                Some(from) => self.sources[from].wanted -= 1,
            }
        }
        removed
    }

    /// Ends receives whose deadline has passed.
    pub(super) fn expire(&mut self, now: Instant, peers: &Peers, ended: &mut Vec<Ended>) {
        let after = |receive: &Receiving| now.saturating_duration_since(receive.ticket.since);
        for receive in self.remove(|receive| receive.ticket.deadline.instant() <= now) {
            let missing = self.missing(&receive, peers);
            let error = peers.timed_out("recv from", receive.from, receive.tag, after(&receive), missing);
            ended.push(receive.fail(error));
        }
        for place in 0..self.sources.len() {
            let late = |receive: &Receiving| receive.ticket.deadline.instant() <= now;
            let (got, bytes) = match &self.sources[place].current {
                Some(Current { target: Target::Receive(receive), got, header }) if late(receive) => {
                    (*got, header.bytes)
                }
                _ => continue,
            };
            if let Some(receive) = self.hand_on(place, peers, ended) {
                let who = peers.name(place);
                let missing = format!(
                    "{who} has sent only {got} of {bytes} bytes of it; the next receive gets the message"
                );
                let error = peers.timed_out("recv from", Some(place), receive.tag, after(&receive), missing);
                ended.push(receive.fail(error));
            }
        }
    }

    /// What a receive waits for, and what is there instead.
    fn missing(&self, receive: &Receiving, peers: &Peers) -> String {
        let who = receive.from.map_or_else(|| "no rank".into(), |place| peers.name(place));
        let not = if receive.from.is_some() { " not" } else { "" };
        let kept = self.kept.values().flatten().map(|kept| (kept.from, kept.header.tag));
        let coming = self.sources.iter().enumerate();
        let coming = coming.filter_map(|(place, source)| Some((place, source.current.as_ref()?.header.tag)));
        let waiting = kept.chain(coming).filter(|&(place, _)| receive.takes(place));
        // Those with its own tag were given back, and do not fit it.
        let (misfits, others): (Vec<_>, Vec<_>) = waiting.partition(|&(_, tag)| tag == receive.tag);
        let others = match others.len() {
            0 => String::new(),
            1 => "; 1 message with another tag waits".into(),
            count => format!("; {count} messages with other tags wait"),
        };
        let that = match misfits.len() {
            0 => "",
            _ => " that fits; one of another size or type waits, because its receive was given up",
        };
        format!("{who} has{not} sent a message with tag {}{that}{others}", receive.tag)
    }

    /// The earliest deadline of those that wait.
    pub(super) fn soonest(&self) -> Option<Instant> {
        let posted = self.posted.values().flatten();
        let coming = self.sources.iter().filter_map(|source| match &source.current.as_ref()?.target {
            Target::Receive(receive) => Some(receive),
            _ => None,
        });
        posted.chain(coming).map(|receive| receive.ticket.deadline.instant()).min()
    }

    /// Ends all receives.
    pub(super) fn fail(&mut self, error: &Error, ended: &mut Vec<Ended>) {
        let mut receives = self.remove(|_| true);
        for source in &mut self.sources {
            if let Some(Current { target: Target::Receive(receive), .. }) = source.current.take() {
                receives.push(receive);
            }
        }
        ended.extend(receives.into_iter().map(|receive| receive.fail(error.clone())));
    }
}

/// Moves what has come of a message, at most `most` bytes, to where it goes; gives how much.
fn take(
    ring: &mut Consumer,
    current: &mut Current,
    most: usize,
    queue: &mut dyn Queue,
) -> Result<usize, Fault> {
    let mut done = 0;
    while done < most {
        let piece = ring.peek(most - done)?;
        let len = piece.len();
        if len == 0 {
            break;
        }
        match &mut current.target {
            Target::Receive(receive) => {
                let caching = if receive.into.len() >= LARGE { Caching::Bypass } else { Caching::Keep };
                queue.copy(receive.into.view().slice(current.got..current.got + len)?, piece, caching)?;
            }
            Target::Keep(payload) => {
                // It grows with what has really come, whatever the header promises.
                let grown = payload.as_mut().ok().map(|bytes| {
                    bytes
                        .try_reserve(len)
                        .map_err(|error| Error::device(format!("keeping a message: {error}")))?;
                    let start = bytes.len();
                    bytes.resize(start + len, 0);
                    Ok(piece.to_span().read(0, &mut bytes[start..])?)
                });
                if let Some(Err(error)) = grown {
                    *payload = Err(error);
                }
            }
            Target::Drop => {}
        }
        ring.take(len);
        current.got += len;
        done += len;
    }
    Ok(done)
}

/// Gives a message that is here to the receive that it is for.
fn deliver(
    receive: Receiving,
    from: usize,
    header: Header,
    payload: Result<Vec<u8>>,
    peers: &Peers,
    queue: &mut dyn Queue,
) -> Ended {
    let written = match receive.misfit(&header) {
        Some(text) => Err(peers.fault(PeerFaultKind::Mismatch, from, text)),
        None => payload.and_then(|bytes| Ok(receive.into.write(0, &bytes)?)),
    };
    match written {
        Ok(()) => receive.finish(from, header, queue),
        Err(error) => receive.fail(error),
    }
}
