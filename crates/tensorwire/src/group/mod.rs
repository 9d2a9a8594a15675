//! Groups: ranks that talk.
//!
//! A [`Group`] is what users see of the modules below it: the ranks and their memory (`ranks`), the operations
//! (`collective`), and the process they live in (`context`). Two groups in one process never disturb each other.
//! This folder forms groups and has what users call:
//!
//! | file | what |
//! |---|---|
//! | `builder`, `launch` | from which variables, address or store a group is made |
//! | `form`, `rendezvous`, `card`, `report`, `notes` | the ranks find each other through the store |
//! | `same_host`, `hub` | they find out by doing which of them share a host, and how hosts are joined |
//! | `collectives`, `messages`, `fds` | the operations as users call them |
//! | `split`, `shrink` | groups that are made from this one |

mod builder;
mod card;
mod collectives;
mod fds;
mod form;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod hub;
mod launch;
mod messages;
mod notes;
#[cfg(feature = "hooks")]
#[doc(hidden)]
pub mod rehearsal;
mod rendezvous;
mod report;
mod same_host;
mod shrink;
mod split;

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tensorwire_device::{Deadline, Span};

use crate::collective::{Collectives, Detour};
use crate::config::{Key, Seal};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::link::key::Proofs;
use crate::ranks::Ranks;
use crate::shm::control::Cause;
use crate::store::{DEFAULT_TIMEOUT, Reply, Request, Store, StoreExchange, TcpServer};
use crate::symmetric::{Books, SymmetricCall};

pub use crate::shm::member::Member;
pub use builder::GroupBuilder;
pub use fds::{FdMessage, FromRank, ToRank};
pub use messages::{AnyRank, Message, OneRank};
pub(crate) use report::telling;

/// Ranks that talk to each other. A clone is another handle on the same group. The group is closed when the last
/// handle is dropped, or by [`close`](Self::close).
///
/// ```no_run
/// # fn main() -> tensorwire::Result<()> {
/// let group = tensorwire::Group::from_env()?;
/// println!("rank {} of {}", group.rank(), group.world());
/// group.barrier().wait()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Group(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) collectives: Arc<Collectives>,
    origin: Origin,
    /// Why ranks that could share a host with this one do not.
    reasons: Vec<String>,
    /// Where splits exchange colours, in the group's part of the store, with a connection of its own.
    splits: StoreExchange,
    /// What proves the values that this group writes into its store, where the job has a key.
    proofs: Option<Proofs>,
    /// What is sealed between hosts.
    seal: Option<Seal>,
    /// Held while this rank is in `shrink`.
    shrinks: Mutex<shrink::Shrinks>,
    /// Where signals of symmetric memory travel through.
    books: Arc<Books>,
    /// How many sub-groups of each kind this rank has made, so that all ranks give them the same names.
    made: Mutex<HashMap<String, u64>>,
}

/// What a group was made from; sub-groups are made from the same.
#[derive(Clone)]
struct Origin {
    store: Arc<dyn Store>,
    /// The store's server, where this process has it.
    server: Option<Arc<TcpServer>>,
    /// Whether it waits, if the group cannot be formed, until the others have heard why.
    lingers: bool,
    /// Whether the store is for forming this group alone: nothing of it is kept.
    once: bool,
    /// The store's file, where it was named for this group; kept for what its end does.
    _file: Option<Arc<launch::FileUse>>,
    /// The address of this machine on the way to the store.
    route: Option<IpAddr>,
    /// The key, where it is not that of the configuration.
    key: Option<Key>,
}

impl Origin {
    /// What proves who may be in the group.
    fn key<'a>(&'a self, context: &'a Context) -> Option<&'a Key> {
        self.key.as_ref().or(context.config().key.as_ref())
    }

    /// What a group that is formed keeps of it.
    fn kept(&self) -> Self {
        let store = if self.once { Arc::new(Gone) } else { self.store.clone() };
        Self { store, ..self.clone() }
    }
}

/// In the place of a store that a group has let go of.
#[derive(Debug)]
struct Gone;

impl Store for Gone {
    fn call(&self, _: Request, _: Deadline) -> Result<Reply> {
        Err(Error::misuse("the group was formed once and for all: it has let go of its store"))
    }

    fn timeout(&self) -> Duration {
        DEFAULT_TIMEOUT
    }

    fn set_timeout(&self, _: Duration) {}

    fn clone_store(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(Self))
    }
}

impl Group {
    /// The group of this process's launcher; see [`GroupBuilder::from_env`].
    pub fn from_env() -> Result<Self> {
        Self::builder().from_env()
    }

    /// A builder.
    pub fn builder() -> GroupBuilder {
        GroupBuilder::default()
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.ranks().rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.ranks().world()
    }

    /// All ranks, in order.
    pub fn members(&self) -> &[Member] {
        &self.ranks().members
    }

    /// The ranks of each host: those that share memory.
    pub fn hosts(&self) -> &[Vec<usize>] {
        &self.ranks().hosts
    }

    /// The name of the group in its store.
    pub fn name(&self) -> &str {
        &self.ranks().name
    }

    /// The context that the group lives in.
    pub fn context(&self) -> &Arc<Context> {
        &self.ranks().context
    }

    /// The store that the group was made from.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.0.origin.store
    }

    /// How long an operation may take.
    pub fn timeout(&self) -> Duration {
        self.ranks().timeout
    }

    /// Fails if the group has failed: a rank died, a rank left while it was needed, or a rank called
    /// [`abort`](Self::abort).
    pub fn check(&self) -> Result<()> {
        self.ranks().check()
    }

    /// Ends every pending and later wait of this group, on all ranks, with an error that carries the reason.
    pub fn abort(&self, reason: &str) {
        // In a forked child the group is the parent's, and a rank that has closed it has no say in it.
        if self.ranks().check_open().is_ok() {
            self.ranks().fail(Cause::Aborted, self.rank(), reason);
        }
    }

    /// Says why this rank is about to leave, as a clause such as "raised ValueError: ...". The other ranks read it once
    /// they miss this one. What was said first counts.
    pub fn last_words(&self, clause: &str) {
        if self.ranks().check_open().is_ok() {
            self.ranks().control.say(clause);
        }
    }

    /// Allocates memory that the other ranks of this host can map. They map it when an operation needs it. No other
    /// rank takes part in this call. The memory is freed when the last clone of the span is gone. Other ranks let
    /// go of it with their next operation. Other groups may use the memory, too.
    pub fn alloc(&self, bytes: usize) -> Result<Span> {
        self.ranks().check_open()?;
        self.ranks().memory.alloc(bytes)
    }

    /// Has all ranks reach each other's memory: each brings as many bytes, on the host or on a GPU, and gets a handle on the
    /// memory of all. See [`symmetric`](crate::symmetric).
    ///
    /// The memory comes from [`alloc`](Self::alloc), [`Context::alloc`] or [`Context::pool`]. Several groups may use the same
    /// memory, and a part of it as well as all of it. Parts of one allocation are mapped once.
    pub fn symmetric(&self, memory: &Span) -> SymmetricCall<'_> {
        SymmetricCall::new(&self.0.collectives, &self.0.books, memory)
    }

    /// Says how this rank reaches every other rank, and why not in a better way. It also says which large
    /// operations did not take the direct path, and why. Of operations on GPU tensors it says which rank works for whom,
    /// and where the calling thread waits in place of its queue.
    pub fn explain(&self) -> String {
        let inner = self.ranks();
        let near = inner.control.ranks();
        let mut text = format!("rank {} of {} in group {:?}\n", inner.rank, self.world(), inner.name);
        for member in &inner.members {
            let path = match member.rank {
                rank if rank == inner.rank => "this process",
                rank if near.contains(&rank) => "shared memory",
                _ if member.place.boot != inner.members[inner.rank].place.boot => "network: another machine",
                _ if member.place.label != inner.members[inner.rank].place.label => {
                    "network: another host label (TENSORWIRE_HOST)"
                }
                _ => "network: no private connection could be made",
            };
            let far = member.rank != inner.rank && !near.contains(&member.rank);
            let taken = || inner.branch.as_ref()?.way_to(member.identity);
            let carrier = inner.branch.as_ref().and_then(|branch| branch.carrier().ok()).unwrap_or("TCP");
            let known = || {
                let address = inner.control.address(member.rank);
                if address.is_empty() { address } else { format!("{carrier} to {address}") }
            };
            let address = if far { taken().unwrap_or_else(known) } else { String::new() };
            let sealed = match self.0.seal {
                Some(Seal::All) => "sealed",
                Some(Seal::Control) => "not sealed (TENSORWIRE_SEAL=control)",
                None => "not sealed: the job has no key (TENSORWIRE_KEY)",
            };
            let by = match address.is_empty() {
                true => String::new(),
                false => format!("; messages by {address}, {sealed}"),
            };
            text.push_str(&format!("  {member}: {path}{by}\n"));
        }
        if let Some(Err(why)) = inner.branch.as_ref().map(|branch| branch.carrier()) {
            text.push_str(&format!("  messages to other hosts go by TCP and not by UCX: {why}\n"));
        }
        if let [_, _, ..] = self.hosts() {
            let leaders: Vec<String> =
                self.hosts().iter().filter_map(|ranks| ranks.first()).map(ToString::to_string).collect();
            let leaders = leaders.join(", ");
            text.push_str(&format!(
                "  collectives go through one rank of each host, by TCP: ranks {leaders}\n"
            ));
        }
        for reason in &self.0.reasons {
            text.push_str(&format!("  not shared with {reason}\n"));
        }
        // The newest of each kind: which large operations do not go straight between tensors, and why.
        let mut told = Vec::new();
        for record in inner.recorder.last(usize::MAX).iter().rev() {
            if let Some(why) = record.detour.filter(|why| !told.contains(why)) {
                told.push(why);
                let (title, path) = (record.title(), record.path.map_or("", |path| path.name()));
                let bytes = record.bytes;
                let way = match why {
                    Detour::Dense => "dense".to_owned(),
                    _ => format!("{path}, not direct"),
                };
                text.push_str(&format!("  {title} ({bytes} bytes) went {way}: {}\n", why.reason()));
            }
        }
        text + &self.0.collectives.flights.explain(inner.rank) + &self.0.collectives.explain_messages()
    }

    /// Closes the group on this rank, even while other handles live. Pending messages end with an error.
    /// Collectives that have begun or were started are finished. Then the rank leaves, and ranks that still need it
    /// get an error that says so. Every later call fails. Dropping the last handle closes the group, too.
    ///
    /// All ranks must call the same collectives in the same order. A rank finds a mismatch in the collective itself if it
    /// needs data of the other ranks there, or else in its next one. The root of a small broadcast needs nobody, for
    /// example. `close` compares what is still unchecked. It gives the mismatch as an error
    /// ([`PeerFaultKind::Mismatch`](crate::PeerFaultKind::Mismatch)) if no operation of this rank has given it. The group is
    /// closed all the same. For this, `close` waits until the other ranks have come to the last collective, for one second
    /// or the group's time-out at most, and not for ranks that have died or left. Ranks that come later find the mismatch
    /// themselves. Where operations are still in line, and where the last handle is dropped, a mismatch is only logged.
    pub fn close(self) -> Result<()> {
        self.0.collectives.close()
    }

    pub(crate) fn ranks(&self) -> &Ranks {
        &self.0.collectives.ranks
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group({:?})", self.ranks())
    }
}

/// What operations do with memory, step by step: for tests.
#[doc(hidden)]
impl Group {
    pub fn memory_number(&self, span: &Span) -> Option<(u64, usize)> {
        self.ranks().memory.find(span).ok().flatten()
    }

    pub fn memory_of_peer(&self, place: usize, number: u64, deadline: Deadline) -> Result<Span> {
        let ranks = self.ranks();
        let region = ranks.memory.peer(place, number, &ranks.control.abort, deadline);
        let why = |error: Error| match error {
            Error::Aborted(_) => ranks.failure().unwrap_or(error),
            other => other,
        };
        region.map(Span::whole).map_err(why)
    }

    pub fn sweep_memory(&self) {
        self.context().share().settle();
        self.ranks().memory.sweep_now();
    }
}
