//! Symmetric memory: each rank brings as much memory as the others, and reaches theirs.
//!
//! The ranks *rendezvous* ([`Group::symmetric`](crate::Group::symmetric)). Each gets a handle ([`Symmetric`]): the memory of every
//! rank, a pad beside it for kernels that users write, and signals between the ranks. Collectives on such memory go
//! straight between the ranks, as they do on all memory that others can map.
//!
//! ```no_run
//! # use std::time::Duration;
//! # use tensorwire::{Deadline, Group};
//! # fn main() -> tensorwire::Result<()> {
//! let group = Group::from_env()?;
//! let memory = group.alloc(4096)?;
//! let handle = group.symmetric(&memory).wait()?;
//! let soon = Deadline::after(Duration::from_secs(10));
//! // Each rank writes to the next one, and says so.
//! let next = (group.rank() + 1) % group.world();
//! handle.buffer(next)?.write(0, b"hello")?;
//! handle.put_signal(next, 0, soon)?;
//! let before = (group.rank() + group.world() - 1) % group.world();
//! handle.wait_signal(before, 0, soon)?;
//! assert_eq!(&memory.to_vec()?[..5], b"hello");
//! # Ok(())
//! # }
//! ```
//!
//! | file | what |
//! |---|---|
//! | `rendezvous` | how the ranks get each other's memory |
//! | `record` | what they tell each other |
//! | `signals` | signals and barriers, on the host and on queues |
//! | `together` | work that waits for that of the other ranks |
//! | `on_queue` | operations that queues do so |
//! | `book` | the memory that signals travel through |

mod book;
mod on_queue;
mod record;
mod rendezvous;
mod signals;
mod together;

use std::fmt;
use std::sync::{Arc, OnceLock};

use tensorwire_device::gpu::Access;
use tensorwire_device::{Deadline, DeviceId, Queue, Span};

use crate::collective::Collectives;
use crate::collective::untold;
use crate::error::{Error, Result};
use crate::ranks::Ranks;
use crate::shm::member::Member;
use crate::shm::process::Process;
use signals::Signals;
use together::Together;

pub(crate) use book::Books;
pub use book::CHANNELS;
pub use on_queue::Mover;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub use record::fuzz;
pub use rendezvous::SymmetricCall;

/// What is left of a handle: signals that queues still have, and memory that other ranks may write to. It lingers until they
/// have dropped their handles, also if the group has gone by then.
#[derive(Debug)]
struct Gone {
    me: usize,
    members: Vec<Member>,
    signals: Signals,
    words: Option<Span>,
    /// The pad, and the memory if others may write to it late.
    _own: Vec<Span>,
    /// Whether the others know that this rank has no handle.
    said: bool,
}

impl Gone {
    fn linger(ranks: &Ranks, signals: Signals, words: Option<Span>, own: Vec<Span>) {
        let (me, members) = (ranks.rank, ranks.members.clone());
        let mut gone = Self { me, members, signals, words, _own: own, said: false };
        ranks.context.share().linger(Box::new(move || gone.is_over()));
    }

    fn is_over(&mut self) -> bool {
        // Queues keep the words while their work uses them.
        let quiet = self.words.as_ref().is_none_or(|words| Arc::strong_count(words.region()) == 1);
        self.said = self.said || (quiet && self.signals.leave(self.me));
        // A process that has ended writes nothing any more.
        let ended = |rank: usize| self.members[rank].process(&self.members[self.me]) == Process::Gone;
        self.said && self.signals.all_left(ended)
    }
}

/// Memory that every rank of a group has as much of, and that all reach. A clone is the same handle.
///
/// A rank that drops its handle must know that the others do not use its memory any more: [`barrier`](Self::barrier) first. The
/// handle keeps its own memory, and the group.
#[derive(Clone)]
pub struct Symmetric(Arc<Inner>);

struct Inner {
    group: Arc<Collectives>,
    len: usize,
    own: Span,
    /// All ranks, this one too.
    peers: Vec<Peer>,
    /// Taken when the handle is dropped.
    signals: Option<Signals>,
    together: Together,
    /// Arrays of addresses, once somebody has asked.
    buffers: OnceLock<Span>,
    pads: OnceLock<Span>,
}

/// What a rank has of another.
#[derive(Debug)]
struct Peer {
    device: DeviceId,
    access: Access,
    /// Where its memory begins in the allocation that it is a part of, in bytes.
    offset: u64,
    /// Its memory and its pad, where they are reached.
    buffer: Option<Span>,
    pad: Option<Span>,
}

impl Symmetric {
    /// Bytes that each rank brought.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether that is nothing.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.ranks().rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.ranks().world()
    }

    /// The memory of a rank. What others write there is seen after a signal of theirs.
    pub fn buffer(&self, rank: usize) -> Result<Span> {
        self.reached(rank, |peer| peer.buffer.as_ref())
    }

    /// Memory beside that of a rank, for words through which kernels that users write signal each other. Nothing else uses it.
    /// It is zero at first, lies on the device of the rank's memory, and has room for four bytes for each rank and channel.
    pub fn pad(&self, rank: usize) -> Result<Span> {
        self.reached(rank, |peer| peer.pad.as_ref())
    }

    /// Where the memory of a rank begins in the allocation that it is a part of, in bytes. It may be another place on each rank.
    pub fn offset(&self, rank: usize) -> Result<u64> {
        Ok(self.peer(rank)?.offset)
    }

    /// Where the memory of a rank lives.
    pub fn device(&self, rank: usize) -> Result<&DeviceId> {
        Ok(&self.peer(rank)?.device)
    }

    /// Whether this rank reaches the memory of another, and why not.
    pub fn access(&self, rank: usize) -> Result<&Access> {
        Ok(&self.peer(rank)?.access)
    }

    /// The addresses of the memory of all ranks, as this rank's device sees them: eight bytes each, in memory of that device.
    /// Zero where it does not reach a rank's memory.
    pub fn buffer_addresses(&self) -> Result<Span> {
        self.addresses(&self.0.buffers, |peer| peer.buffer.as_ref())
    }

    /// The same for the pads.
    pub fn pad_addresses(&self) -> Result<Span> {
        self.addresses(&self.0.pads, |peer| peer.pad.as_ref())
    }

    /// Sends a signal to a rank on a channel. What this thread wrote before is seen by the rank that waits for it.
    ///
    /// Signals are counted: each [`wait_signal`](Self::wait_signal) takes one, and none is lost. If a queue still has a signal
    /// of the same channel to the same rank, this waits for it first.
    pub fn put_signal(&self, to: usize, channel: usize, deadline: Deadline) -> Result<()> {
        self.signals()?.put(self.ranks(), (to, channel), None, deadline)
    }

    /// The same on a queue, behind all that it has. If another queue has a signal of the same channel to the same rank, this
    /// one goes on behind that.
    pub fn put_signal_on(
        &self,
        queue: &mut dyn Queue,
        to: usize,
        channel: usize,
        deadline: Deadline,
    ) -> Result<()> {
        self.signals()?.put(self.ranks(), (to, channel), Some(queue), deadline)
    }

    /// Waits for a signal of a rank on a channel. A wait that ends with an error has taken none.
    pub fn wait_signal(&self, from: usize, channel: usize, deadline: Deadline) -> Result<()> {
        self.signals()?.wait(self.ranks(), (&[from], channel), None, deadline)
    }

    /// The same on a queue: nothing that is queued from now on runs before the signal. Where the queue cannot hold one more
    /// wait, this thread waits.
    ///
    /// Nobody is there to hear it if a queue waits in vain. What queues of any rank have behind a wait then writes nothing, and
    /// from then on every call of this handle gives the error, on all ranks: they make a new one.
    pub fn wait_signal_on(
        &self,
        queue: &mut dyn Queue,
        from: usize,
        channel: usize,
        deadline: Deadline,
    ) -> Result<()> {
        self.signals()?.wait(self.ranks(), (&[from], channel), Some(queue), deadline)
    }

    /// Waits until all ranks have come here. It sends a signal to every other rank on the channel and waits for one of each. So
    /// a channel is for barriers or for other signals, not for both. A barrier that timed out may be called again.
    pub fn barrier(&self, channel: usize, deadline: Deadline) -> Result<()> {
        self.signals()?.meet(self.ranks(), channel, None, deadline)
    }

    /// The same for queues: what a queue has behind it runs after all that the queues of the other ranks had before it.
    pub fn barrier_on(&self, queue: &mut dyn Queue, channel: usize, deadline: Deadline) -> Result<()> {
        self.signals()?.meet(self.ranks(), channel, Some(queue), deadline)
    }

    /// Gives the error of what queues had to do with this handle, if something went wrong. Every other call gives it, too.
    pub fn check(&self) -> Result<()> {
        self.signals()?.check_usable(self.ranks())
    }

    /// Says where the memory of each rank is and how this rank reaches it, or why not; and whether queues can work together.
    pub fn explain(&self) -> String {
        let ranks = self.ranks();
        let mut text = format!("symmetric memory of {} bytes in group {:?}\n", self.0.len, ranks.name);
        for (rank, peer) in self.0.peers.iter().enumerate() {
            let how = match peer.access.reason() {
                _ if rank == ranks.rank => "this rank".into(),
                Some(reason) => format!("not reached: {reason}"),
                None => "reached".to_owned(),
            };
            text.push_str(&format!("  {}: on {}, {how}\n", ranks.who(rank), peer.device));
        }
        text.push_str(&format!("  {}\n", self.0.together.explain(ranks)));
        text
    }

    fn addresses(&self, known: &OnceLock<Span>, of: impl Fn(&Peer) -> Option<&Span>) -> Result<Span> {
        if let Some(span) = known.get() {
            return Ok(span.clone());
        }
        self.ranks().check()?;
        let home = self.0.own.device();
        let address = |peer: &Peer| match of(peer) {
            // A GPU knows no address of the host's memory, unless it was told of it.
            Some(span) if home == DeviceId::Host || span.device() != DeviceId::Host => {
                (span.region().addr() + span.offset()) as u64
            }
            _ => 0,
        };
        let bytes: Vec<u8> = self.0.peers.iter().flat_map(|peer| address(peer).to_le_bytes()).collect();
        let block = self.ranks().context.pool(&home)?.alloc(bytes.len())?;
        let span = Span::whole(block).slice(0..bytes.len())?;
        span.write(0, &bytes)?;
        Ok(known.get_or_init(|| span).clone())
    }

    fn reached(&self, rank: usize, of: impl Fn(&Peer) -> Option<&Span>) -> Result<Span> {
        let peer = self.peer(rank)?;
        of(peer).cloned().ok_or_else(|| Error::Unsupported {
            what: format!("the memory of {}", self.ranks().who(rank)),
            need: format!("a device that reaches memory of {}", peer.device),
            have: peer.access.reason().unwrap_or("none").to_owned(),
        })
    }

    fn peer(&self, rank: usize) -> Result<&Peer> {
        self.0.peers.get(rank).ok_or_else(|| {
            Error::misuse(format!("there is no rank {rank} in a group of {}", self.0.peers.len()))
        })
    }

    fn signals(&self) -> Result<&Signals> {
        self.0.signals.as_ref().ok_or_else(|| Error::bug("a handle without signals"))
    }

    fn ranks(&self) -> &Ranks {
        &self.0.group.ranks
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let ranks = &self.group.ranks;
        // In a forked child all of it is the parent's.
        if !ranks.context.birth().is_ours() {
            return;
        }
        let Some(signals) = self.signals.take() else { return };
        let failed = signals.failure(ranks);
        // What others write late must not fall on somebody else's bytes.
        let mut own = Vec::new();
        if failed.is_some() {
            own.push(self.own.clone());
        }
        match self.peers.get(ranks.rank).and_then(|peer| peer.pad.clone()) {
            // The pad is for kernels that nobody here knows of. In a group that has failed they may write there at any time: nobody
            // gets it again, and it goes with the context.
            Some(pad) if ranks.failure().is_some() => ranks.context.lose(pad),
            pad => own.extend(pad),
        }
        if let Some(error) = failed.filter(|_| !signals.is_told()) {
            let text =
                format!("a handle of symmetric memory was dropped, and nobody had heard this: {error}");
            tracing::error!("{text}");
            untold::note(text);
        }
        let words = self.together.take(ranks.rank);
        Gone::linger(ranks, signals, words, own);
    }
}

impl fmt::Debug for Symmetric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Symmetric({} bytes, {:?})", self.0.len, self.ranks())
    }
}
