//! What two processes of different hosts have once, for all groups whose leaders they are: a connection for short words. It
//! carries no tensors. No call waits.
//!
//! A frame is a length (4 bytes, and the same inverted), a check of what follows (4), a kind (1), the id of a group (16), and a body:
//!
//! | kind | body | meaning |
//! |---|---|---|
//! | BEAT | | the sender is alive; of no group |
//! | JOIN | proof | the sender wants to talk in the group, and knows its secret |
//! | JOINED | proof | the sender does, too: from now on both talk in it |
//! | REFUSED | | the sender does not know the group, or not any more |
//! | SAY | bytes | what the group's leaders say to each other |
//! | PART | | the sender says nothing more in the group |
//!
//! The first group makes the connection, and its secret seals it. Each further one is joined with a proof of its own secret, over
//! the words with which this connection began: what was proved on another one is worth nothing here.
//!
//! A side that talks in no group any more sends nothing more, and closes the connection when the other side has done so, too. A
//! group that wants to talk then makes a new one.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::Shutdown;
use tensorwire_device::fd::{Received, Stream};
use tensorwire_device::secret::{Id, Secret};

use super::Fault;
use super::frame::{self, PIECE_HEAD};
use super::line::TcpLine;

const BEAT: u8 = 1;
const JOIN: u8 = 2;
const JOINED: u8 = 3;
const REFUSED: u8 = 4;
const SAY: u8 = 5;
const PART: u8 = 6;

/// Bytes of a frame before its body, behind its length.
const HEAD: usize = 4 + 1 + 16;
/// The longest body.
pub(crate) const MOST: usize = 4096;
/// A process that does not read for so long that this much is waiting is as good as silent.
const MAX_WAITING: usize = 16 << 20;
/// How long a connection may be there in which nobody talks.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two beats, at least; at most half a second, because the process looks after its trunks five times a second.
const BEATS: Duration = Duration::from_millis(300);

/// The trunk of a process to one other. Numbers are not used again.
pub(crate) type Number = u64;

/// All trunks of a process.
#[derive(Debug)]
pub(crate) struct Trunks {
    identity: Id,
    all: BTreeMap<Number, Trunk>,
    next: Number,
}

#[derive(Debug)]
struct Trunk {
    line: TcpLine,
    peer: Id,
    /// The groups in which this side talks, and whether the other side has joined.
    groups: HashMap<Id, bool>,
    input: Vec<u8>,
    output: VecDeque<u8>,
    /// When it was made, or when this side has said its last word.
    since: Instant,
    /// Whether anybody has talked on it.
    used: bool,
    /// Whether this side sends nothing more.
    closing: bool,
    /// When the last bytes came. Nothing while the other side has said nothing: it may be busy with others.
    heard: Option<Instant>,
    beaten: Option<Instant>,
}

/// Why a trunk is no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The other side has closed the connection, or it is broken.
    Lost,
    /// The other side says nothing any more.
    Silent,
    /// The other side sends what no process of ours sends.
    Nonsense,
}

/// What has come.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// The other side wants to talk in a group, with a proof: see [`Trunks::proves`].
    Asked(Id, [u8; 32]),
    /// It has joined a group, with a proof.
    Joined(Id, [u8; 32]),
    Refused(Id),
    Said(Id, Vec<u8>),
    Parted(Id),
    /// The trunk is gone. In these groups somebody talked on it.
    Ended(End, Vec<Id>),
}

/// Who has joined and who answers, so that neither can send the other's proof back.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Role {
    Asks,
    Answers,
}

impl Trunks {
    pub(crate) fn new(identity: Id) -> Self {
        Self { identity, all: BTreeMap::new(), next: 0 }
    }

    /// Takes charge of a connection with a process.
    pub(crate) fn add(&mut self, peer: Id, line: TcpLine, now: Instant) -> Number {
        self.next += 1;
        let (input, output) = (Vec::new(), VecDeque::new());
        let (groups, used, closing) = (HashMap::new(), false, false);
        let trunk =
            Trunk { line, peer, groups, input, output, since: now, used, closing, heard: None, beaten: None };
        self.all.insert(self.next, trunk);
        self.next
    }

    /// A trunk to a process on which groups can talk.
    pub(crate) fn to(&self, peer: Id) -> Option<Number> {
        let usable = |(_, trunk): &(&Number, &Trunk)| trunk.peer == peer && !trunk.closing;
        self.all.iter().find(usable).map(|(number, _)| *number)
    }

    pub(crate) fn peer(&self, number: Number) -> Option<Id> {
        self.all.get(&number).map(|trunk| trunk.peer)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// What is to be watched.
    pub(crate) fn streams(&self) -> impl Iterator<Item = (Number, Arc<Stream>)> {
        self.all.iter().map(|(number, trunk)| (*number, trunk.line.stream().clone()))
    }

    /// Wants to talk in a group. Gives false if the trunk is gone.
    pub(crate) fn ask(&mut self, number: Number, group: Id, secret: &Secret) -> bool {
        let proof = self.proof(number, group, secret, Role::Asks);
        let Some((trunk, proof)) = self.all.get_mut(&number).zip(proof) else { return false };
        trunk.talk(group, false);
        trunk.send(JOIN, group, &proof);
        true
    }

    /// Talks in a group with a process that has asked for it.
    pub(crate) fn admit(&mut self, number: Number, group: Id, secret: &Secret) {
        let proof = self.proof(number, group, secret, Role::Answers);
        if let Some((trunk, proof)) = self.all.get_mut(&number).zip(proof) {
            trunk.talk(group, true);
            trunk.send(JOINED, group, &proof);
        }
    }

    /// The other side has joined a group that this one has asked for: what it says is heard.
    pub(crate) fn joined(&mut self, number: Number, group: Id) {
        if let Some(joined) = self.all.get_mut(&number).and_then(|trunk| trunk.groups.get_mut(&group)) {
            *joined = true;
        }
    }

    /// Does not talk in a group.
    pub(crate) fn refuse(&mut self, number: Number, group: Id) {
        if let Some(trunk) = self.all.get_mut(&number) {
            trunk.groups.remove(&group);
            trunk.send(REFUSED, group, &[]);
        }
    }

    pub(crate) fn say(&mut self, number: Number, group: Id, bytes: &[u8]) {
        if let Some(trunk) = self.all.get_mut(&number) {
            trunk.send(SAY, group, bytes);
        }
    }

    /// Says nothing more in a group, on any trunk.
    pub(crate) fn part(&mut self, group: Id) {
        for trunk in self.all.values_mut() {
            if trunk.groups.remove(&group).is_some() {
                trunk.send(PART, group, &[]);
            }
        }
    }

    /// Whether a proof that came is right.
    pub(crate) fn proves(
        &self,
        number: Number,
        group: Id,
        secret: &Secret,
        role: Role,
        proof: &[u8; 32],
    ) -> bool {
        let Some(trunk) = self.all.get(&number) else { return false };
        let session = trunk.line.session();
        secret.proves(role.purpose(), &[&session.0, &group.0, &trunk.peer.0, &self.identity.0], proof)
    }

    fn proof(&self, number: Number, group: Id, secret: &Secret, role: Role) -> Option<[u8; 32]> {
        let trunk = self.all.get(&number)?;
        let session = trunk.line.session();
        let parts: [&[u8]; 4] = [&session.0, &group.0, &self.identity.0, &trunk.peer.0];
        Some(secret.prove(role.purpose(), &parts))
    }

    pub(crate) fn numbers(&self) -> Vec<Number> {
        self.all.keys().copied().collect()
    }

    /// The next thing that has come on a trunk.
    pub(crate) fn hear(&mut self, number: Number, now: Instant) -> Option<What> {
        let trunk = self.all.get_mut(&number)?;
        loop {
            match trunk.next_frame(now) {
                Ok(None) => return None,
                Ok(Some((BEAT, ..))) => {}
                Ok(Some((kind, group, body))) => match trunk.understand(kind, group, body) {
                    Ok(None) => {}
                    Ok(Some(what)) => return Some(what),
                    Err(()) => return self.end(number, End::Nonsense),
                },
                Err(end) => return self.end(number, end),
            }
        }
    }

    /// Sends what waits, beats, and notices silence. Gives the next trunk that has ended, if any.
    pub(crate) fn look_after(&mut self, patience: Duration, now: Instant) -> Option<(Number, What)> {
        let mut ended = None;
        for (&number, trunk) in &mut self.all {
            if !trunk.closing && trunk.beaten.is_none_or(|last| now.saturating_duration_since(last) >= BEATS)
            {
                trunk.beaten = Some(now);
                trunk.send(BEAT, Id([0; 16]), &[]);
            }
            let waited = now.saturating_duration_since(trunk.since);
            let idle = trunk.groups.is_empty() && !trunk.closing && (trunk.used || waited > PATIENCE);
            if trunk.flush() && idle {
                (trunk.closing, trunk.since) = (true, now);
                let _ = rustix::net::shutdown(trunk.line.as_fd(), Shutdown::Write);
            }
            let silent = trunk.heard.is_some_and(|heard| now.saturating_duration_since(heard) > patience);
            // A side that has closed it sends no beats.
            let late = trunk.closing && now.saturating_duration_since(trunk.since) > PATIENCE;
            if late || !trunk.closing && (silent || trunk.output.len() > MAX_WAITING) {
                ended = Some(number);
                break;
            }
        }
        ended.and_then(|number| Some((number, self.end(number, End::Silent)?)))
    }

    /// Sends what waits.
    pub(crate) fn flush(&mut self) {
        for trunk in self.all.values_mut() {
            trunk.flush();
        }
    }

    /// Says nothing more to anybody, and closes all connections.
    pub(crate) fn close(&mut self, now: Instant) {
        for trunk in self.all.values_mut() {
            trunk.flush();
            let _ = rustix::net::shutdown(trunk.line.as_fd(), Shutdown::Write);
            // Closing with unread bytes resets the connection, and the last words might be lost with it.
            while matches!(trunk.next_frame(now), Ok(Some(_))) {}
        }
        self.all.clear();
    }

    fn end(&mut self, number: Number, end: End) -> Option<What> {
        let trunk = self.all.remove(&number)?;
        if end == End::Nonsense {
            tracing::error!("process {} of another host sent nonsense; its connection is closed", trunk.peer);
        }
        Some(What::Ended(end, trunk.groups.into_keys().collect()))
    }
}

impl Role {
    fn purpose(self) -> &'static str {
        match self {
            Self::Asks => "talk in a group: asks",
            Self::Answers => "talk in a group: answers",
        }
    }
}

impl Trunk {
    fn talk(&mut self, group: Id, joined: bool) {
        self.used = true;
        self.groups.insert(group, joined);
    }

    fn send(&mut self, kind: u8, group: Id, body: &[u8]) {
        if !self.closing {
            self.output.extend(frame_of(kind, group, body));
        }
    }

    /// Gives whether nothing is left.
    fn flush(&mut self) -> bool {
        while !self.output.is_empty() {
            let (head, _) = self.output.as_slices();
            match self.line.send(head, None, &[]) {
                Ok(count @ 1..) => drop(self.output.drain(..count)),
                // The next look tries again; the read side notices an end.
                _ => return false,
            }
        }
        self.line.flush().unwrap_or(false)
    }

    /// What a frame says. Nothing, if it is of a group in which this side does not talk any more.
    fn understand(&mut self, kind: u8, group: Id, body: Vec<u8>) -> Result<Option<What>, ()> {
        let proof = || <[u8; 32]>::try_from(&body[..]).map_err(drop);
        let talks = self.groups.get(&group).copied();
        Ok(match (kind, talks) {
            // It hears the end instead of an answer, and asks again on a new connection.
            (JOIN, _) if self.closing => None,
            (JOIN, _) => Some(What::Asked(group, proof()?)),
            (JOINED, Some(false)) => Some(What::Joined(group, proof()?)),
            (REFUSED, Some(false)) => {
                self.groups.remove(&group);
                Some(What::Refused(group))
            }
            (SAY, Some(true)) => Some(What::Said(group, body)),
            (PART, Some(true)) => Some(What::Parted(group)),
            (JOINED..=PART, _) => None,
            _ => return Err(()),
        })
    }

    /// The next whole frame that has arrived.
    fn next_frame(&mut self, now: Instant) -> Result<Option<(u8, Id, Vec<u8>)>, End> {
        loop {
            if let Some(frame) = take_frame(&mut self.input)? {
                return Ok(Some(frame));
            }
            let mut bytes = [0; 4096];
            match self.line.recv_bytes(&mut bytes) {
                Ok(Received::Bytes(count)) => {
                    self.heard = Some(now);
                    self.input.extend(&bytes[..count]);
                }
                Ok(Received::Nothing) => return Ok(None),
                Err(Fault::Unsealed) => return Err(End::Nonsense),
                Ok(Received::End) | Err(_) => return Err(End::Lost),
            }
        }
    }
}

fn frame_of(kind: u8, group: Id, body: &[u8]) -> Vec<u8> {
    let rest = [&[kind], &group.0[..], body].concat();
    [&frame::piece(HEAD + body.len())[..], &frame::check_of(&rest), &rest].concat()
}

/// Takes a whole frame, if there is one.
fn take_frame(input: &mut Vec<u8>) -> Result<Option<(u8, Id, Vec<u8>)>, End> {
    let Some(len) = input.first_chunk::<PIECE_HEAD>() else { return Ok(None) };
    let agreed = |len: &usize| (HEAD..=HEAD + MOST).contains(len);
    let len = frame::len_of(len).filter(agreed).ok_or(End::Nonsense)?;
    let Some(whole) = input.get(PIECE_HEAD..PIECE_HEAD + len) else { return Ok(None) };
    let (check, rest) = whole.split_at(4);
    if check != frame::check_of(rest) {
        return Err(End::Nonsense);
    }
    let group = Id(std::array::from_fn(|at| rest[1 + at]));
    let taken = (rest[0], group, whole[HEAD..].to_vec());
    input.drain(..PIECE_HEAD + len);
    Ok(Some(taken))
}

/// Every frame moves on and is no longer than agreed.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz(data: &[u8]) {
    let mut input = data.to_vec();
    let mut taken = 0;
    while let Ok(Some((kind, group, body))) = take_frame(&mut input) {
        let frame = frame_of(kind, group, &body);
        assert!(body.len() <= MOST && data[taken..].starts_with(&frame));
        taken += frame.len();
    }
}

#[cfg(test)]
pub(crate) mod tests;
