//! Collectives: operations that all ranks of a group call together, and messages between two.
//!
//! Every rank calls the same operations in the same order. A call does nothing until it is waited for or started:
//!
//! ```no_run
//! # use tensorwire::{Dtype, Group, ReduceOp, Tensor};
//! # fn main() -> tensorwire::Result<()> {
//! let group = Group::from_env()?;
//! let tensor = Tensor::flat(group.alloc(4096)?, Dtype::F32)?;
//! group.all_reduce(&tensor, ReduceOp::Sum).wait()?;
//! let work = group.broadcast(&tensor, 0).start()?;
//! work.wait()?;
//! # Ok(())
//! # }
//! ```
//!
//! How an operation goes through the files of this folder:
//!
//! | file | what it does |
//! |---|---|
//! | `call`, `work` | an operation before it begins, and in flight |
//! | `operation` | what one rank asks for |
//! | `turns` | operations of a rank run one after the other |
//! | `tuning` | chooses the path by the number of bytes |
//! | `plan` | makes the steps, as pure data |
//! | `exec` | has the ranks meet and the steps run |
//! | `meeting` | lets the ranks meet (`lines`, `offer`, `reached`) |
//! | `runner` | runs the steps on the caller's thread |
//! | `queued` | puts the steps on a device's queue (`board`) |
//! | `flight` | knows what is queued and not over |
//! | `cancel` | ends an operation that cannot go on |
//! | `far` | operations of groups on several hosts |
//! | `mismatch` | finds out who called what, where that is not the same |
//! | `chain` | runs several exchanges as one operation |
//! | `sparse` | all-reduce of sparse tensors: a chain |
//! | `staged` | tensors of GPUs through memory of the host, where they cannot be reached |
//! | `fds` | exchanges of descriptors: a chain |
//! | `p2p` | messages between two ranks |

mod board;
mod buffer;
pub(crate) mod call;
mod cancel;
pub(crate) mod chain;
mod exec;
mod explain;
mod far;
pub(crate) mod fds;
pub(crate) mod flight;
#[cfg(feature = "hooks")]
pub mod hooks;
mod lines;
mod meeting;
mod mismatch;
mod offer;
pub(crate) mod operation;
pub(crate) mod p2p;
pub(crate) mod plan;
mod queued;
mod reached;
mod runner;
pub(crate) mod sparse;
mod staged;
mod tensor;
mod tuning;
pub(crate) mod turns;
pub(crate) mod untold;
pub(crate) mod work;

use std::sync::{Arc, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use tensorwire_device::sync::{AtomicBool, Ordering};
use tensorwire_device::{Deadline, Mark, Queue};

use crate::error::Result;
use crate::interrupt;
use crate::ranks::Ranks;
use exec::Executor;
use flight::Flights;
use operation::Operation;
use p2p::{Engine, Peers};
use turns::Turns;

#[cfg(any(test, fuzzing))]
pub(crate) use crate::shm::decided::fuzz as fuzz_far;
pub use crate::shm::kind::{Detour, Kind, Path};
pub use call::Call;
pub use explain::{PathRange, PathRanges, explain, path_ranges};
pub use far::{ExchangeCost, HostsPlan, NearCost, hosts_plan};
pub use fds::FdsCall;
pub use p2p::RecvAny;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub use sparse::fuzz as fuzz_sparse;
pub use sparse::{Sparse, SparseCall, SparseWork};
pub use tensor::Tensor;
pub(crate) use work::Completion;
pub use work::Work;

/// The operations of one rank in one group. When the group is closed, or the last user is gone (a handle on the group, or an
/// operation that was started), the rank leaves the group.
#[derive(Debug)]
pub(crate) struct Collectives {
    pub(crate) ranks: Ranks,
    turns: Turns,
    /// Messages between ranks, once there are some.
    engine: OnceLock<Arc<Engine>>,
    /// Whether this rank has left.
    left: AtomicBool,
    /// What is queued and not over.
    pub(crate) flights: Arc<Flights>,
}

impl Collectives {
    pub(crate) fn new(ranks: Ranks) -> Result<Arc<Self>> {
        let flights = Arc::new(Flights::default());
        let executor = Executor::new(&ranks, &flights)?;
        let turns = Turns::new(executor, &flights);
        Ok(Arc::new(Self { ranks, turns, engine: OnceLock::new(), left: AtomicBool::new(false), flights }))
    }

    /// Runs an operation on this thread; one on memory of the host behind marks on the worker's.
    pub(crate) fn wait(
        self: &Arc<Self>,
        operation: &mut Operation,
        time: (Instant, Deadline),
        after: Vec<Mark>,
    ) -> Result<()> {
        self.turns_of(operation)?.wait(self, operation, time, after)
    }

    /// Puts an operation in line. It begins when the marks are passed.
    pub(crate) fn start(
        self: &Arc<Self>,
        operation: Operation,
        deadline: Deadline,
        after: Vec<Mark>,
    ) -> Result<Work> {
        self.turns_of(&operation)?.start(self, operation, deadline, after)
    }

    /// Queues an operation on tensors of a GPU.
    pub(crate) fn queue(
        self: &Arc<Self>,
        operation: Operation,
        time: (Instant, Deadline),
        queue: &mut dyn Queue,
    ) -> Result<Work> {
        self.turns_of(&operation)?.queue(self, operation, time, queue)
    }

    /// The collectives of this rank.
    pub(crate) fn turns(&self) -> Result<&Turns> {
        self.ranks.context.birth().check("the group")?;
        Ok(&self.turns)
    }

    /// The same for an operation that these ranks can do.
    fn turns_of(&self, operation: &Operation) -> Result<&Turns> {
        if self.ranks.hosts.len() > 1 {
            far::check(&self.ranks, operation)?;
        }
        self.turns()
    }

    /// What carries messages between ranks.
    pub(crate) fn engine(&self) -> Result<&Arc<Engine>> {
        if let Some(engine) = self.engine.get() {
            return Ok(engine);
        }
        let ranks = &self.ranks;
        ranks.check_open()?;
        let peers = Peers::new(&ranks.control, &ranks.members, ranks.branch.clone());
        let engine =
            Engine::new(peers, &ranks.context, (&self.flights, ranks.timeout))?.recorded_by(&ranks.recorder);
        let engine = self.engine.get_or_init(|| Arc::new(engine));
        // Whoever has closed the group meanwhile has not seen it.
        ranks.check_open().inspect_err(|_| engine.close())?;
        Ok(engine)
    }

    /// How messages of GPUs have gone, as a few lines.
    pub(crate) fn explain_messages(&self) -> String {
        self.engine.get().map(|engine| engine.explain()).unwrap_or_default()
    }

    /// Closes the group on this rank: messages that are pending end, operations that were begun or started are finished, and
    /// then the rank leaves. Nothing more can be called, by whatever handle. The rank has left also where this gives an error:
    /// a mismatch that nothing has told yet.
    pub(crate) fn close(self: &Arc<Self>) -> Result<()> {
        if !self.ranks.context.birth().is_ours() {
            return Ok(());
        }
        self.ranks.closed.store(true, Ordering::Release);
        if let Some(engine) = self.engine.get() {
            engine.close();
        }
        self.turns.close(self)
    }

    /// This rank leaves the group. Ranks that wait for it hear of that, and not before what it has begun is over: the
    /// executor is taken first, unless the caller has it.
    fn leave(&self, executor: Option<MutexGuard<'_, Executor>>) -> Result<()> {
        self.leave_within(executor, Some(mismatch::LEAVE))
    }

    /// The same. Ranks that have not come to the last operation are waited for so long, to compare what they came for. Without
    /// a time, nobody hears how it ends, and nobody is waited for.
    fn leave_within(
        &self,
        executor: Option<MutexGuard<'_, Executor>>,
        patience: Option<Duration>,
    ) -> Result<()> {
        if self.left.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let ranks = &self.ranks;
        if std::thread::panicking() {
            ranks.control.say("panicked");
        }
        let mut executor = executor.unwrap_or_else(|| self.turns.take());
        self.flights.drain();
        let untold = patience.and_then(|_| self.flights.untold());
        let settled = executor.settle(ranks, patience.unwrap_or_default());
        let settled = settled.and(untold.map_or(Ok(()), Err));
        ranks.control.leave();
        executor.leave();
        drop(executor);
        if let Some(engine) = self.engine.get() {
            engine.linger();
        }
        ranks.memory.close();
        if let Some(branch) = &ranks.branch {
            branch.close();
        }
        ranks.context.watcher().close(ranks.id);
        ranks.members.iter().for_each(|member| ranks.context.forget(member.identity));
        settled
    }

    /// The same where nobody can be told. So nobody is waited for.
    fn leave_unheard(&self) {
        if let Err(error) = interrupt::without(|| self.leave_within(None, None)) {
            tracing::error!("closing group {:?}: {error}", self.ranks.name);
        }
    }
}

impl Drop for Collectives {
    fn drop(&mut self) {
        if !self.ranks.context.birth().is_ours() {
            return;
        }
        if let Some(engine) = self.engine.get() {
            engine.close();
        }
        self.leave_unheard();
    }
}
