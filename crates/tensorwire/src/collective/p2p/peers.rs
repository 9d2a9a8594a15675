//! Who the other ranks are, for messages.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, PeerFaultKind};
use crate::shm::control::Control;
use crate::shm::member::Member;
use crate::shm::sentence;

/// The ranks of this host by their places, and what can be said about them.
#[derive(Debug)]
pub(super) struct Peers {
    pub(super) control: Arc<Control>,
    members: Vec<Member>,
}

impl Peers {
    pub(super) fn new(control: &Arc<Control>, members: &[Member]) -> Self {
        Self { control: control.clone(), members: members.to_vec() }
    }

    /// How many ranks this host has.
    pub(super) fn len(&self) -> usize {
        self.control.ranks().len()
    }

    pub(super) fn me(&self) -> usize {
        self.control.me()
    }

    pub(super) fn rank(&self, place: usize) -> usize {
        self.control.ranks().get(place).copied().unwrap_or(place)
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
        let text = "its ring of messages is not as agreed; none go between it and this rank any more";
        self.fault(PeerFaultKind::Misbehaved, place, text)
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
            Some(place) => {
                let described = sentence::missing(&self.control, &self.members, &[place]);
                missing.replacen(&self.name(place), &format!("{described},"), 1)
            }
            None => missing,
        };
        Error::timed_out(format!("{verb} {whom} with tag {tag}"), after, missing).about(ranks)
    }
}
