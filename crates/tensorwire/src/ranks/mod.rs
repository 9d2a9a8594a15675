//! The ranks of a group that has formed, as one rank knows the others: who they are, their control region, and the
//! memory that they share. Operations use only this. They know nothing of how the group was formed.

mod barrier;
pub(crate) mod descriptors;
pub(crate) mod memory;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tensorwire_device::secret::Id;
use tensorwire_device::sync::{AtomicBool, Ordering};

use crate::context::Context;
use crate::error::{Error, Result};
use crate::link::Branch;
use crate::shm::control::{Cause, Control, Failure, error_of};
use crate::shm::member::Member;
use crate::shm::mismatch;
use crate::shm::process::Process;
use crate::shm::record::Recorder;
use crate::shm::sentence;
use memory::RankMemory;

pub(crate) use barrier::Barriers;
pub(crate) use memory::{MEND, SHORT_MEND};

/// See the module.
pub(crate) struct Ranks {
    pub(crate) context: Arc<Context>,
    pub(crate) id: Id,
    pub(crate) name: String,
    /// The rank of this process.
    pub(crate) rank: usize,
    pub(crate) members: Vec<Member>,
    /// The ranks of each host.
    pub(crate) hosts: Vec<Vec<usize>>,
    pub(crate) control: Arc<Control>,
    pub(crate) memory: Arc<RankMemory>,
    /// The way to ranks of other hosts, if there are some.
    pub(crate) branch: Option<Arc<Branch>>,
    /// The records of this rank's operations.
    pub(crate) recorder: Arc<Recorder>,
    /// How long an operation may take.
    pub(crate) timeout: Duration,
    pub(crate) barriers: Barriers,
    /// Whether this rank has closed the group: it calls nothing any more.
    pub(crate) closed: AtomicBool,
    /// The number of this rank's last operation that failed, and what its header has only as a mixed number.
    pub(crate) failing: Mutex<Option<(u32, String)>>,
}

impl Ranks {
    /// How many there are.
    pub(crate) fn world(&self) -> usize {
        self.members.len()
    }

    /// Fails if the group was closed on this rank, or has failed: a rank died, left while it was needed, or somebody aborted.
    pub(crate) fn check(&self) -> Result<()> {
        self.check_open()?;
        self.failure().map_or(Ok(()), Err)
    }

    /// Fails if the group was closed on this rank.
    pub(crate) fn check_open(&self) -> Result<()> {
        self.context.birth().check("the group")?;
        if self.closed.load(Ordering::Acquire) { Err(closed()) } else { Ok(()) }
    }

    /// Why the group has failed, if it has.
    pub(crate) fn failure(&self) -> Option<Error> {
        let mut error = self.control.error(&self.members, self.rank)?;
        if let Error::Peer(fault) = &mut error
            && let Some(failure @ Failure { cause: Cause::Mismatch, .. }) = self.control.failure()
        {
            let failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
            let own = mismatch::own_call(&self.control, &self.control.note(failure), failing.as_ref());
            fault.detail += &format!("; this rank, {} of group {:?}, {own}", self.rank, self.name);
        }
        Some(error)
    }

    /// Fails the group for good, and tells other hosts.
    pub(crate) fn fail(&self, cause: Cause, rank: usize, note: &str) -> Error {
        self.control.fail(Failure { cause, rank }, note);
        self.context.watcher().ring();
        self.failure().unwrap_or_else(|| Error::Aborted(note.to_owned()))
    }

    /// The rank at a place of this host, for people.
    pub(crate) fn who(&self, place: usize) -> String {
        let rank = self.control.ranks().get(place).copied().unwrap_or(place);
        self.members.get(rank).map_or_else(|| format!("rank {rank}"), ToString::to_string)
    }

    /// Whether the process of the rank at a place of this host has ended.
    pub(crate) fn is_gone(&self, place: usize) -> bool {
        let Some(there) = self.control.ranks().get(place).and_then(|&rank| self.members.get(rank)) else {
            return false;
        };
        let died = Failure { cause: Cause::Died, rank: there.rank };
        self.control.failure() == Some(died) || there.process(&self.members[self.rank]) == Process::Gone
    }

    /// Whether another rank is a thread of this process.
    pub(crate) fn shares_process(&self) -> bool {
        let me = &self.members[self.rank];
        let same = |there: &&Member| there.rank != me.rank && there.pid == me.pid && there.place == me.place;
        self.members.iter().any(|there| same(&there))
    }

    /// The error that the end of a rank's process means.
    pub(crate) fn died(&self, rank: usize) -> Error {
        let failure = Failure { cause: Cause::Died, rank };
        error_of(failure, "", self.control.words_of(rank).as_ref(), &self.members, self.rank)
    }

    /// Some ranks (by place) that did not come, and what they do instead.
    pub(crate) fn described(&self, places: &[usize]) -> String {
        sentence::missing(&self.control, &self.members, places)
    }

    /// Some ranks (by place) whose queues did not come, and what the ranks do.
    pub(crate) fn described_queues(&self, places: &[usize]) -> String {
        sentence::missing_queues(&self.control, &self.members, places)
    }

    /// The place of a rank among those of this host, if it is one of them.
    pub(crate) fn place_of(&self, rank: usize) -> Option<usize> {
        let near = self.control.ranks();
        if near.get(rank) == Some(&rank) { Some(rank) } else { near.iter().position(|&other| other == rank) }
    }
}

/// What a call gets in a group that was closed.
pub(crate) fn closed() -> Error {
    Error::misuse("the group was closed on this rank; make a new one")
}

impl fmt::Debug for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, rank {} of {}", self.name, self.rank, self.members.len())
    }
}
