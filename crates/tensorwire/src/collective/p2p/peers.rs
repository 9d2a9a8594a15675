//! Who the other ranks are, for messages, and how each is reached.

use std::sync::Arc;
use std::time::Duration;

use tensorwire_device::secret::Id;

use crate::error::{Error, PeerFaultKind, Result};
use crate::link::ring::{Consumer, Producer, RingMemory};
use crate::link::{Branch, Dial, Inlet, Outlet, address};
use crate::shm::control::Control;
use crate::shm::member::Member;
use crate::shm::sentence;

/// All ranks by their places: first those of this host, by their places there, and then all others in their order.
#[derive(Debug)]
pub(crate) struct Peers {
    pub(super) control: Arc<Control>,
    members: Vec<Member>,
    ranks: Vec<usize>,
    /// The way to ranks of other hosts, if there are some.
    branch: Option<Arc<Branch>>,
}

/// A way to a rank that messages can go, or that is on its way to be made.
#[derive(Debug)]
pub(super) enum Way {
    Open(Box<dyn Outlet>),
    Dialing(Arc<Dial>),
}

impl Peers {
    pub(crate) fn new(control: &Arc<Control>, members: &[Member], branch: Option<Arc<Branch>>) -> Self {
        let mut ranks = control.ranks().to_vec();
        if branch.is_some() {
            ranks.extend((0..members.len()).filter(|rank| !control.has_place(*rank)));
        }
        Self { control: control.clone(), members: members.to_vec(), ranks, branch }
    }

    /// How many ranks there are.
    pub(super) fn len(&self) -> usize {
        self.ranks.len()
    }

    pub(super) fn me(&self) -> usize {
        self.control.me()
    }

    /// All ranks by their places.
    pub(super) fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    pub(super) fn rank(&self, place: usize) -> usize {
        self.ranks.get(place).copied().unwrap_or(place)
    }

    pub(super) fn place_of(&self, rank: usize) -> Option<usize> {
        match self.ranks.get(rank) {
            Some(there) if *there == rank => Some(rank),
            _ => self.ranks.iter().position(|&other| other == rank),
        }
    }

    /// Whether a rank is on another host.
    pub(super) fn is_far(&self, place: usize) -> bool {
        place >= self.control.ranks().len()
    }

    /// Whether a rank has closed the group, as far as this host has heard.
    pub(super) fn is_gone(&self, place: usize) -> bool {
        match self.is_far(place) {
            true => self.control.is_far_gone(self.rank(place)),
            false => self.control.is_gone(place),
        }
    }

    /// A rank of another host has said that it closes the group. The ranks of this host need not wait for the leader to hear it.
    pub(super) fn heard_farewell(&self, place: usize) {
        if let Err(error) = self.control.far_left(self.rank(place)) {
            tracing::warn!("it could not be written down that {} has left: {error}", self.name(place));
        }
    }

    /// The way to a rank. That to another host takes a while.
    pub(super) fn way_to(&self, place: usize) -> Result<Way> {
        if !self.is_far(place) {
            return Ok(Way::Open(Box::new(Producer::open(self.ring(self.me(), place))?)));
        }
        let rank = self.rank(place);
        let (Some(there), Some(branch)) = (self.members.get(rank), &self.branch) else {
            return Err(Error::Bug(format!("there is no way to rank {rank}")));
        };
        let same_machine =
            self.members.get(self.rank(self.me())).is_some_and(|me| me.place.boot == there.place.boot);
        let addresses = address::from_text(&self.control.address(rank));
        let addresses = address::worth_a_try(addresses, same_machine);
        branch.dial(there.identity, addresses).map(Way::Dialing)
    }

    /// The way from a rank of this host.
    pub(super) fn way_from(&self, place: usize) -> Result<Box<dyn Inlet>> {
        Ok(Box::new(Consumer::open(self.ring(place, self.me()))?))
    }

    /// Ways from ranks of other hosts that have been made since the last call.
    pub(super) fn arrived(&self) -> Vec<(usize, Result<Box<dyn Inlet>>)> {
        let Some(branch) = &self.branch else { return Vec::new() };
        let place_of = |identity: Id| {
            let member = self.members.iter().find(|member| member.identity == identity)?;
            self.place_of(member.rank).filter(|place| self.is_far(*place))
        };
        branch.arrived().into_iter().filter_map(|(who, way)| Some((place_of(who)?, way))).collect()
    }

    /// The memory of the ring from one rank of this host to another.
    fn ring(&self, from: usize, to: usize) -> RingMemory {
        let (control, map) = (&self.control, self.control.map());
        let other = if from == control.me() { to } else { from };
        RingMemory {
            region: control.region().clone(),
            at: map.ring(from, to),
            len: map.ring_len(),
            bell: control.bell(other).clone(),
        }
    }

    /// "rank 3 (host a, pid 812)".
    pub(super) fn name(&self, place: usize) -> String {
        let rank = self.rank(place);
        self.members.get(rank).map_or_else(|| format!("rank {rank}"), ToString::to_string)
    }

    /// The error that everyone gets, if the group has failed.
    pub(super) fn failure(&self) -> Option<Error> {
        self.control.error(&self.members, self.rank(self.me()))
    }

    /// It has closed the group.
    pub(super) fn left(&self, place: usize, missing: &str) -> Error {
        let (rank, closed) = (self.rank(place), format!("it has closed the group, {missing}"));
        match self.control.words_of(rank) {
            Some(words) => words.left(self.name(place), rank, self.rank(self.me()), &closed),
            None => self.fault(PeerFaultKind::Left, place, closed),
        }
    }

    /// It did what no rank of ours does.
    pub(super) fn misbehaved(&self, place: usize) -> Error {
        let text = "what it sends is not as agreed; no messages go between it and this rank any more";
        self.fault(PeerFaultKind::Misbehaved, place, text)
    }

    /// What came from it is not what it sent.
    pub(super) fn unsealed(&self, place: usize) -> Error {
        let text = "the seal of what came from it is broken: something on the way has changed, left out or added bytes; no \
                    messages go between it and this rank any more";
        self.fault(PeerFaultKind::Failed, place, text)
    }

    /// The connection with it has ended.
    pub(super) fn lost(&self, place: usize, why: &str) -> Error {
        let text =
            format!("the connection with it is lost ({why}); messages on it cannot go on in this group");
        self.fault(PeerFaultKind::Failed, place, text)
    }

    /// No connection could be made to it.
    pub(super) fn unreachable(&self, place: usize, why: &str) -> Error {
        let text = format!("it could not be reached ({why})");
        self.fault(PeerFaultKind::Failed, place, text)
    }

    pub(super) fn fault(&self, kind: PeerFaultKind, place: usize, text: impl Into<String>) -> Error {
        Error::peer(kind, self.name(place), Some(self.rank(place)), text)
    }

    pub(super) fn timed_out(
        &self,
        verb: &str,
        place: Option<usize>,
        tag: u64,
        after: Duration,
        missing: String,
    ) -> Error {
        let whom = place.map_or_else(|| "any rank".into(), |place| format!("rank {}", self.rank(place)));
        let ranks = place.map(|place| self.rank(place));
        let missing = match place {
            // "rank 0 (host a, pid 7), which is stopped (SIGSTOP), has not sent it"
            Some(place) if !self.is_far(place) => {
                let described = sentence::missing(&self.control, &self.members, &[place]);
                missing.replacen(&self.name(place), &format!("{described},"), 1)
            }
            _ => missing,
        };
        Error::timed_out(format!("{verb} {whom} with tag {tag}"), after, missing).about(ranks)
    }
}
