//! What the work of a queue needs until it is done, and who lets it go.
//!
//! Whatever work needs is kept until a mark behind it is passed. Marks are put by the queue's calls. Where there are none, the
//! reaper puts one behind what lies on a stream of ours. It looks every few milliseconds and lets go what is done, so that
//! nobody has to call the queue again.
//!
//! A mark must not come between keeping something and queueing the work that needs it. So the lock is held over both. The
//! reaper never waits for it, because a call of the driver may block while a stream waits.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::cuda::driver::{Address, Stream};
use crate::cuda::gates::GatePlace;
use crate::cuda::gpu::Inner;
use crate::cuda::kernels::Gate;
use crate::cuda::point::CudaPoint;
use crate::cuda::registered::Registered;
use crate::device::Region;
use crate::error::Result;

/// After so many regions a mark is put behind them, so that they can be let go.
const MARK: usize = 64;

/// What work needs until it is done.
#[derive(Clone)]
pub(in crate::cuda) enum Kept {
    /// A region.
    Region { _region: Arc<dyn Region> },
    /// Host memory that the GPU reaches.
    Host(Arc<Registered>),
    /// Nothing: the stream only follows another one.
    Order,
}

/// A stream, and what its work needs.
pub(in crate::cuda) struct Holds {
    /// Keeps kernels and context until the work is done.
    pub(in crate::cuda) gpu: Arc<Inner>,
    pub(in crate::cuda) stream: Stream,
    /// Whether the stream is ours to destroy.
    own: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What the work since the last mark needs.
    kept: Vec<Kept>,
    /// Whether the reaper has seen it.
    seen: bool,
    /// Marks, and what the work before each needs.
    marks: VecDeque<(Arc<CudaPoint>, Vec<Kept>)>,
    /// Where its kernels pass on what they read of the abort words; from the first one on that reads them.
    place: Option<GatePlace>,
    /// Whether the reaper looks after it.
    noted: bool,
    /// Whether the queue is gone.
    left: bool,
}

/// The same, locked. What is let go meanwhile is dropped behind the lock: it may be somebody's object, whose end wants locks
/// of its own.
pub(super) struct Held<'a> {
    holds: &'a Arc<Holds>,
    state: MutexGuard<'a, State>,
    gone: Vec<Kept>,
}

impl Holds {
    pub(super) fn new(gpu: Arc<Inner>, stream: Stream, own: bool) -> Arc<Self> {
        Arc::new(Self { gpu, stream, own, state: Mutex::default() })
    }

    /// Whether nobody else queues work on the stream.
    pub(super) fn is_own(&self) -> bool {
        self.own
    }

    /// For the queue's calls. The thread is in the GPU's context.
    pub(super) fn lock(self: &Arc<Self>) -> Held<'_> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Held { holds: self, state, gone: Vec::new() }
    }

    /// The reaper's look, in the GPU's context: lets go what is done. Gives whether there is more to come.
    pub(in crate::cuda) fn look(self: &Arc<Self>) -> bool {
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Somebody queues something.
            Err(TryLockError::WouldBlock) => return true,
        };
        let mut held = Held { holds: self, state, gone: Vec::new() };
        held.let_go();
        // A stream of somebody else may be gone, or record what is queued on it.
        if held.state.seen
            && !held.state.kept.is_empty()
            && let Err(error) = held.mark()
        {
            tracing::debug!(%error, "a mark behind what lies on a stream");
        }
        held.state.seen = self.own && !held.state.kept.is_empty();
        let more = held.state.seen || !held.state.marks.is_empty();
        held.state.noted = more;
        if !more && held.state.left {
            held.state.place.take().into_iter().for_each(|place| self.gpu.gates.give(place));
            if self.own {
                // SAFETY: a stream of ours, whose queue is gone and whose work is done.
                let _ = unsafe { self.gpu.driver.destroy_stream(self.stream) };
            }
        }
        more
    }

    /// The queue goes. What is queued runs on, and its waits end by their deadlines at the latest: nobody has to stay for
    /// that. The thread is in the GPU's context.
    pub(super) fn leave(self: &Arc<Self>) {
        let mut held = self.lock();
        if !held.state.kept.is_empty() && held.mark().is_err() {
            // Better lost than given to somebody else while the GPU writes to it.
            std::mem::take(&mut held.state.kept).into_iter().for_each(std::mem::forget);
        }
        held.state.left = true;
        held.note();
    }
}

impl Held<'_> {
    /// Keeps what the work needs that is queued next, before the lock is released. `words` are what all work needs at
    /// present: abort words.
    pub(super) fn keep<'k>(
        &mut self,
        words: impl Iterator<Item = &'k Kept>,
        kept: impl IntoIterator<Item = Kept>,
    ) -> Result<()> {
        // A mark comes first, so that none stands between this and the work.
        if self.state.kept.len() >= MARK {
            self.mark()?;
        }
        if self.state.kept.is_empty() {
            self.state.kept.extend(words.cloned());
        }
        self.state.kept.extend(kept);
        self.note();
        Ok(())
    }

    /// What a kernel that is queued next looks at before it writes.
    pub(super) fn gate(&mut self, abort: [Address; 2]) -> Gate {
        if abort == [0, 0] {
            return Gate::OPEN;
        }
        self.state.place.get_or_insert_with(|| self.holds.gpu.gates.take()).gate(abort)
    }

    /// Puts a mark behind all that is queued.
    pub(super) fn mark(&mut self) -> Result<Arc<CudaPoint>> {
        self.let_go();
        // SAFETY: a stream of ours, or one that lives as long as the queue: this is the queue's call, or the stream is ours.
        let point = unsafe { CudaPoint::behind(&self.holds.gpu, self.holds.stream) }?;
        let kept = std::mem::take(&mut self.state.kept);
        self.state.marks.push_back((point.clone(), kept));
        self.state.seen = false;
        self.note();
        Ok(point)
    }

    /// Lets go what is behind passed marks.
    fn let_go(&mut self) {
        while self.state.marks.front().is_some_and(|(point, _)| point.is_left()) {
            self.gone.extend(self.state.marks.pop_front().into_iter().flat_map(|(_, kept)| kept));
        }
    }

    /// Lets go of everything, when all is done. Gives whether host memory is among it that is not ours.
    pub(super) fn clear(&mut self) -> bool {
        let marks = std::mem::take(&mut self.state.marks);
        self.gone.extend(marks.into_iter().flat_map(|(_, kept)| kept));
        self.gone.append(&mut self.state.kept);
        self.gone.iter().any(|kept| matches!(kept, Kept::Host(held) if held.is_foreign()))
    }

    /// Whether anything was queued that is not known to be done.
    pub(super) fn is_busy(&self) -> bool {
        !self.state.kept.is_empty() || !self.state.marks.is_empty()
    }

    fn note(&mut self) {
        if !self.state.noted {
            self.state.noted = true;
            self.holds.gpu.reaper.note(self.holds.clone());
        }
    }
}

impl fmt::Debug for Holds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} on {:?}", self.stream.0 as usize, self.gpu)
    }
}
