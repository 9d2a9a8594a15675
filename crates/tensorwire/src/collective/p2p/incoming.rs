//! Messages to this rank: receives that wait for a message, messages that wait for a receive, and messages on their
//! way.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use tensorwire_device::{Caching, Queue};

use super::freight::spanned;
use super::operation::{Ended, Hearer, Receiving};
use super::outgoing::{HEARSAY, LARGE};
use super::peers::Peers;
use crate::error::{Error, PeerFaultKind, Result};
use crate::link::{Fault, Header, Inlet, Landing, Linked, Standing};

/// How many ways a rank may make to this one before its first message.
const SPARES: usize = 8;
/// Tags whose empty queues are kept for the next receive.
const SPARE: usize = 64;
/// What is taken from one sender before the others have their turn.
const TURN: usize = 1 << 20;
/// How much memory is taken at once for a message that is kept.
const KEPT: usize = 256 << 10;

/// What comes from one rank.
#[derive(Debug, Default)]
struct Source {
    way: Option<Box<dyn Inlet>>,
    /// Whether a message has come on it, and other ways that its rank has made before that.
    begun: bool,
    spares: Vec<Box<dyn Inlet>>,
    /// The message that is on its way.
    current: Option<Current>,
    /// How many receives want a message of this rank and no other.
    wanted: usize,
    /// Why no message can come any more.
    broken: Option<Error>,
    /// Since when the connection is lost, and why. The group may hear why in a moment.
    lost: Option<(Instant, String)>,
}

impl Source {
    /// Whether one of its messages is wanted by its name, or on its way.
    fn is_busy(&self) -> bool {
        self.wanted > 0 || self.current.is_some()
    }
}

#[derive(Debug)]
struct Current {
    header: Header,
    got: usize,
    target: Target,
    /// Whether it was for a receive that was given up: it fails no other.
    again: bool,
}

impl Current {
    fn rest(&self) -> usize {
        // A header is not longer than memory can be.
        self.header.follow() as usize - self.got
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
    /// Where something is wanted or on its way, and perhaps others: most ranks never talk to each other.
    busy: Vec<usize>,
    /// Receives by tag, in the order in which they were posted.
    posted: BTreeMap<u64, VecDeque<Receiving>>,
    /// How many of them want a message of any rank.
    any: usize,
    /// Whole messages by tag. Those of one rank are in the order in which it sent them.
    kept: BTreeMap<u64, VecDeque<Kept>>,
    /// The rank that is asked first.
    first: usize,
    /// How many connections are lost, and the group may hear why.
    lost: usize,
    /// How many receives have been posted.
    posts: u64,
}

impl Incoming {
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            sources: (0..ranks).map(|_| Source::default()).collect(),
            busy: Vec::new(),
            posted: BTreeMap::new(),
            any: 0,
            kept: BTreeMap::new(),
            first: 0,
            lost: 0,
            posts: 0,
        }
    }

    /// Whether nobody wants anything and nothing is on its way.
    pub(super) fn is_idle(&self) -> bool {
        self.any == 0 && !self.busy.iter().any(|&place| self.sources[place].is_busy())
    }

    /// Whether a message is on its way that nobody waits for.
    pub(super) fn has_leftovers(&self) -> bool {
        self.busy.iter().any(|&place| {
            let current = self.sources[place].current.as_ref();
            current.is_some_and(|current| !matches!(current.target, Target::Receive(_)))
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

    /// Takes the ways that ranks of other hosts have made to this one; gives whether there were some.
    pub(super) fn welcome(&mut self, peers: &Peers, ended: &mut Vec<Ended>) -> bool {
        let arrived = peers.arrived();
        let any = !arrived.is_empty();
        for (place, way) in arrived {
            match way {
                Ok(way) => self.open(place, way),
                Err(error) => self.break_off(place, &error, ended),
            }
        }
        any
    }

    /// A rank of another host has made a way to this one.
    fn open(&mut self, place: usize, way: Box<dyn Inlet>) {
        let Some(source) = self.sources.get_mut(place) else { return };
        match &source.way {
            None if source.broken.is_none() => source.way = Some(way),
            // It tries again where it did not hear that the first one was made. That one ends without a message.
            Some(_) if !source.begun && source.spares.len() < SPARES => source.spares.push(way),
            _ => {}
        }
    }

    /// Has the bell rung when something has come that is listened for.
    pub(super) fn arm(&self) {
        let all = if self.any > 0 { 0..self.sources.len() } else { 0..0 };
        let busy = if self.any > 0 { &[][..] } else { &self.busy };
        for place in all.chain(busy.iter().copied()) {
            if let Some(way) = self.sources[place].way.as_ref().filter(|_| self.listens(place)) {
                way.arm();
            }
        }
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
        self.enlist(receive, ended);
    }

    /// Posts a receive, behind those that were posted before it.
    fn enlist(&mut self, mut receive: Receiving, ended: &mut Vec<Ended>) {
        match receive.from {
            None => self.any += 1,
            Some(place) => {
                let source = &mut self.sources[place];
                if let Some(error) = source.broken.clone() {
                    ended.push(receive.fail(error));
                    return;
                }
                source.wanted += 1;
                self.mark_busy(place);
            }
        }
        if receive.order == 0 {
            self.posts += 1;
            receive.order = self.posts;
        }
        let queue = self.posted.entry(receive.tag).or_default();
        let at = queue.iter().rposition(|other| other.order < receive.order).map_or(0, |last| last + 1);
        queue.insert(at, receive);
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
        current.again = true;
        if let Some(next) = self.take_posted(place, header.tag, |receive| receive.fits(&header)) {
            self.attach(place, next, peers, ended);
        }
        Some(receive)
    }

    /// Takes what has come and is wanted; gives whether anything moved.
    pub(super) fn progress(&mut self, peers: &Peers, queue: &mut dyn Queue, ended: &mut Vec<Ended>) -> bool {
        let mut moved = false;
        let (first, all) = (self.first, self.sources.len());
        let count = if self.any > 0 { all } else { self.busy.len() };
        for step in 0..count {
            let place = if count == all { (first + step) % all } else { self.busy[step] };
            if place != peers.me() && self.listens(place) {
                moved |= self.listen(place, peers, queue, ended);
            }
        }
        if !self.busy.is_empty() {
            let sources = &self.sources;
            self.busy.retain(|&place| sources[place].is_busy());
        }
        if self.lost > 0 {
            self.check_lost(peers, ended);
        }
        if self.any > 0 {
            self.check_anyone(peers, ended);
        }
        moved
    }

    fn listens(&self, place: usize) -> bool {
        let source = &self.sources[place];
        (self.any > 0 || source.is_busy()) && source.broken.is_none() && source.lost.is_none()
    }

    fn mark_busy(&mut self, place: usize) {
        if !self.busy.contains(&place) {
            self.busy.push(place);
        }
    }

    /// Takes what has come from one rank.
    fn listen(&mut self, place: usize, peers: &Peers, queue: &mut dyn Queue, ended: &mut Vec<Ended>) -> bool {
        // Looked at before the way: what was put before the end is seen after it.
        let over = peers.is_gone(place);
        if over && self.sources[place].way.is_none() {
            // Its way may have come since this was looked for.
            self.welcome(peers, ended);
        }
        let moved = match self.pull(place, peers, queue, ended) {
            Ok((moved, false)) => return moved,
            Ok((moved, true)) => moved,
            Err(fault) => {
                let error = match fault {
                    Fault::Nonsense => peers.misbehaved(place),
                    Fault::Unsealed => peers.unsealed(place),
                    Fault::Unfit(how) => peers.fault(PeerFaultKind::Mismatch, place, how),
                    Fault::Ours(error) => error,
                    Fault::Lost(_) if !self.sources[place].begun => {
                        // Its rank did not hear that it was made, and makes another one.
                        let source = &mut self.sources[place];
                        source.way = source.spares.pop();
                        return source.way.is_some();
                    }
                    Fault::Lost(why) => {
                        self.sources[place].lost = Some((Instant::now(), why));
                        self.lost += 1;
                        return true;
                    }
                };
                self.break_off(place, &error, ended);
                return true;
            }
        };
        // Nothing is there. A way from another host says itself when it is at its end: the news that its rank has left may
        // overtake what it sent.
        let over = match &self.sources[place].way {
            Some(way) if peers.is_far(place) => {
                let closed = way.standing() == Standing::Closed;
                if closed {
                    peers.heard_farewell(place);
                }
                closed
            }
            _ => over,
        };
        if over {
            let error = peers.left(place, "and a message from it has not come");
            self.break_off(place, &error, ended);
        }
        moved
    }

    /// Ends what a lost connection has to bring, if its rank has left, or if the group has not heard why for a while.
    fn check_lost(&mut self, peers: &Peers, ended: &mut Vec<Ended>) {
        for place in 0..self.sources.len() {
            let Some((since, why)) = &self.sources[place].lost else { continue };
            let error = match peers.is_gone(place) {
                true => peers.left(place, "and a message from it has not come"),
                false if since.elapsed() >= HEARSAY => peers.lost(place, why),
                false => continue,
            };
            self.sources[place].lost = None;
            self.lost -= 1;
            self.break_off(place, &error, ended);
        }
    }

    /// When lost connections are to be looked at again.
    pub(super) fn lost_until(&self) -> Option<Instant> {
        if self.lost == 0 {
            return None;
        }
        self.sources.iter().filter_map(|source| Some(source.lost.as_ref()?.0 + HEARSAY)).min()
    }

    /// Takes what has come; gives whether anything moved, and whether nothing is left there.
    fn pull(
        &mut self,
        place: usize,
        peers: &Peers,
        queue: &mut dyn Queue,
        ended: &mut Vec<Ended>,
    ) -> Linked<(bool, bool)> {
        let (mut moved, mut left) = (false, TURN);
        while left > 0 {
            if self.sources[place].current.is_none() {
                if !self.listens(place) {
                    return Ok((moved, false));
                }
                let way = match &mut self.sources[place].way {
                    Some(way) => way,
                    None if peers.is_far(place) => return Ok((moved, true)),
                    none => none.insert(peers.way_from(place)?),
                };
                let Some(header) = way.begin()? else { return Ok((moved, true)) };
                self.sources[place].begun = true;
                moved = true;
                let target = self.target(place, &header, ended);
                self.mark_busy(place);
                self.sources[place].current = Some(Current { header, got: 0, target, again: false });
            }
            // It stays where it is until it is whole: this is called again and again while nothing has come.
            let Source { way: Some(way), current: Some(current), .. } = &mut self.sources[place] else {
                return Ok((moved, true));
            };
            let got = take(&mut **way, current, left.min(current.rest()), queue)?;
            moved |= got > 0;
            left -= got;
            let standing = way.standing();
            if standing == Standing::Open {
                // Either nothing was there, or others have their turn.
                return Ok((moved, left > 0));
            }
            way.end();
            moved = true;
            if standing == Standing::GivenUp {
                self.unsend(place, peers, queue, ended);
                continue;
            }
            if let Some(whole) = self.sources[place].current.take() {
                self.finish(place, whole, peers, queue, ended);
            }
        }
        Ok((moved, false))
    }

    /// The sender has given up the message on its way. It was never sent: its receive waits for the next one.
    fn unsend(&mut self, place: usize, peers: &Peers, queue: &mut dyn Queue, ended: &mut Vec<Ended>) {
        let current = self.sources[place].current.take();
        let Some(Current { target: Target::Receive(receive), .. }) = current else { return };
        // One that does not fit is for a receive that is posted later.
        let fits = |kept: &Kept| receive.takes(kept.from) && receive.fits(&kept.header);
        let kept = self.kept.get_mut(&receive.tag);
        match kept.and_then(|queue| queue.iter().position(fits).and_then(|index| queue.remove(index))) {
            Some(kept) => ended.push(deliver(receive, kept.from, kept.header, kept.payload, peers, queue)),
            None => self.enlist(receive, ended),
        }
    }

    /// Where a message goes. One that does not fit its receive is kept until it is whole: it may still be given up. So is a
    /// token.
    fn target(&mut self, place: usize, header: &Header, ended: &mut Vec<Ended>) -> Target {
        match self.find_posted(place, header.tag) {
            Some(receive) if header.lent == 0 && receive.fits(header) => {
                let Some(mut receive) = self.take_posted(place, header.tag, |_| true) else {
                    return Target::Keep(Ok(Vec::new()));
                };
                match receive.open() {
                    Ok(()) => return Target::Receive(receive),
                    Err(error) => ended.push(receive.fail(error)),
                }
                Target::Keep(Ok(Vec::new()))
            }
            _ => Target::Keep(Ok(Vec::new())),
        }
    }

    /// A message is whole.
    fn finish(
        &mut self,
        place: usize,
        current: Current,
        peers: &Peers,
        queue: &mut dyn Queue,
        ended: &mut Vec<Ended>,
    ) {
        match current.target {
            Target::Receive(receive) => ended.push(receive.finish(place, current.header, queue)),
            Target::Keep(payload) => {
                self.bring((place, current.header, current.again), payload, peers, queue, ended);
            }
            Target::Drop => {}
        }
    }

    /// The first posted receive that a message is for.
    fn find_posted(&self, place: usize, tag: u64) -> Option<&Receiving> {
        self.posted.get(&tag)?.iter().find(|receive| receive.takes(place))
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
                    // Those that were posted before this one come first, unless they do not count.
                    current.header.tag == receive.tag
                        && current.header.lent == 0
                        && matches!(current.target, Target::Keep(_))
                        && (current.again || self.find_posted(place, receive.tag).is_none())
                })
        })
    }

    /// Gives a message on its way to a receive.
    fn attach(&mut self, place: usize, mut receive: Receiving, peers: &Peers, ended: &mut Vec<Ended>) {
        let Some(current) = &mut self.sources[place].current else { return };
        let Target::Keep(payload) = std::mem::replace(&mut current.target, Target::Drop) else { return };
        let written = match receive.misfit(&current.header) {
            Some(text) => Err(peers.fault(PeerFaultKind::Mismatch, place, text)),
            None => payload.and_then(|bytes| receive.fill(&bytes)),
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
        // Its sender hears of it, too.
        source.way = None;
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
                Some(Current { target: Target::Receive(receive), got, header, .. }) if late(receive) => {
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
        let coming = posted.chain(coming).map(|receive| receive.ticket.deadline.instant());
        coming.chain(self.lost_until()).min()
    }

    /// Takes the tokens of messages that nobody has received.
    pub(super) fn take_tokens(&mut self) -> Vec<Vec<u8>> {
        let kept = std::mem::take(&mut self.kept).into_values().flatten();
        kept.filter(|kept| kept.header.lent > 0).filter_map(|kept| kept.payload.ok()).collect()
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
fn take(way: &mut dyn Inlet, current: &mut Current, most: usize, queue: &mut dyn Queue) -> Linked<usize> {
    let mut done = 0;
    loop {
        let most = most - done;
        let got = match &mut current.target {
            Target::Receive(receive) if receive.drops => way.take(queue, Landing::Drop, most)?,
            Target::Receive(receive) => {
                let caching = if receive.into.len() >= LARGE { Caching::Bypass } else { Caching::Keep };
                let place = receive.into.view().slice(current.got..current.got + most)?;
                way.take(queue, Landing::Place(place, caching), most)?
            }
            Target::Keep(Ok(bytes)) => {
                // It grows with what has really come, whatever the header promises.
                let most = most.min(KEPT);
                if let Err(error) = bytes.try_reserve(most) {
                    current.target = Target::Keep(Err(Error::device(format!("keeping a message: {error}"))));
                    continue;
                }
                way.take(queue, Landing::Keep(bytes), most)?
            }
            Target::Keep(Err(_)) | Target::Drop => way.take(queue, Landing::Drop, most)?,
        };
        current.got += got;
        done += got;
        if got == 0 || got == most {
            return Ok(done);
        }
    }
}

/// Gives a message that is here to the receive that it is for.
fn deliver(
    mut receive: Receiving,
    from: usize,
    header: Header,
    payload: Result<Vec<u8>>,
    peers: &Peers,
    queue: &mut dyn Queue,
) -> Ended {
    let misfit = receive.misfit(&header).map(|text| peers.fault(PeerFaultKind::Mismatch, from, text));
    if header.lent > 0 && receive.drops {
        return receive.refuse(Error::Aborted("a message was dropped".into()), payload.ok());
    }
    if header.lent > 0 {
        let token = match (misfit, payload) {
            (Some(error), payload) => return receive.refuse(error, payload.ok()),
            (None, payload) => payload.and_then(|bytes| spanned(&bytes)),
        };
        return match token {
            Ok(token) => receive.hand_over(from, header, token),
            Err(error) => receive.fail(error),
        };
    }
    let written = match misfit {
        Some(error) => Err(error),
        None => payload.and_then(|bytes| receive.fill(&bytes)),
    };
    match written {
        Ok(()) => receive.finish(from, header, queue),
        Err(error) => receive.fail(error),
    }
}
