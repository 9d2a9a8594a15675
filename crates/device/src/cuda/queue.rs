//! The queue of a GPU: a stream.
//!
//! Views may lie on the GPU itself, on the host, or on a GPU whose memory this one may reach. What is queued keeps its
//! regions alive until it is done. Behind a wait that is not over yet, copies are kernels: they look at the abort words
//! and write nothing if the wait was not ended by a signal.

mod exchange;
mod holds;
mod recorded;
mod rows;
mod stamp;
mod together;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

pub(super) use self::holds::Holds;
use self::holds::{Held, Kept};
use self::stamp::Stamp;
use super::driver::{Address, BATCH, Event, Stream};
use super::gpu::Inner;
use super::kernels::{self, Copied, Gate, Gated, MOST_COPIES, MOST_GATES};
use super::point::CudaPoint;
use super::waits::Failure;
use crate::awaited::Awaited;
use crate::deadline::Deadline;
use crate::device::{Caching, DeviceId, Mark, Point, Queue, Region};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::flag::{Abort, Flag};
use crate::layout::{self, Layout};
use crate::meeting::Meeting;
use crate::op::ReduceOp;
use crate::rows::RowPlan;
use crate::span::{Span, View};

/// How long a finish looks without rest, and how long it rests after that.
const RESTS: (Duration, Duration) = (Duration::from_micros(200), Duration::from_micros(20));
/// How long an ended wait may take to let its stream go, and what is queued behind it.
const DRAIN: Duration = Duration::from_secs(10);

/// As many abort words does a kernel look at.
const MOST_STOPS: usize = 2;

/// Work in order on a GPU.
pub(super) struct CudaQueue {
    /// The stream, and what its work needs.
    holds: Arc<Holds>,
    /// The abort words of waits that may not be over.
    stops: Vec<Stop>,
    /// Where kernels write when they ended.
    stamp: Option<Stamp>,
    /// Where a meeting that this piece of work has gone through tells whether it has failed, and what that word needs.
    met: Option<(Address, Kept)>,
    /// How a wait ended that did not end well.
    failure: Failure,
    /// Whether the stream was seen without work in this piece of work, and nothing was queued since.
    idle: Cell<bool>,
    /// Whether a graph is recorded, and what the graphs need that were recorded here: they may run as long as the queue lives.
    recording: Cell<bool>,
    recorded: RefCell<Vec<Kept>>,
}

/// An abort word that work behind a wait looks at.
struct Stop {
    abort: Abort,
    /// Where the GPU sees it.
    word: Address,
    kept: Kept,
    waits: Awaited,
}

impl CudaQueue {
    /// On a stream of its own.
    pub(super) fn new(gpu: Arc<Inner>) -> Result<Self> {
        let entered = gpu.enter()?;
        let stream = gpu.driver.stream(false)?;
        drop(entered);
        Ok(Self::with(Holds::new(gpu, stream, true)))
    }

    /// On somebody else's stream.
    pub(super) fn on(gpu: Arc<Inner>, stream: Stream) -> Self {
        Self::with(Holds::new(gpu, stream, false))
    }

    fn with(holds: Arc<Holds>) -> Self {
        Self {
            holds,
            stops: Vec::new(),
            stamp: None,
            met: None,
            failure: Failure::default(),
            idle: Cell::new(false),
            recording: Cell::new(false),
            recorded: RefCell::default(),
        }
    }

    /// Waits for an event of somebody else.
    ///
    /// # Safety
    /// The event exists.
    pub(super) unsafe fn follow_event(&mut self, event: Event) -> Result<()> {
        let _entered = self.gpu().enter()?;
        // SAFETY: the stream lives; the caller's promise.
        self.submit([Kept::Order], |stream| unsafe { self.gpu().driver.wait_event(stream, event) })
    }

    /// Records an event of somebody else behind all that is queued.
    ///
    /// # Safety
    /// The event exists.
    pub(super) unsafe fn precede(&mut self, event: Event) -> Result<()> {
        let _entered = self.gpu().enter()?;
        // SAFETY: the stream lives; the caller's promise.
        unsafe { self.gpu().driver.record(event, self.stream()) }
    }

    pub(super) fn gpu(&self) -> &Arc<Inner> {
        &self.holds.gpu
    }

    fn stream(&self) -> Stream {
        self.holds.stream
    }

    fn device(&self) -> DeviceId {
        DeviceId::Gpu(self.gpu().facts.uuid)
    }

    /// What tells the GPU's queues apart.
    fn number(&self) -> usize {
        self.stream().0 as usize
    }

    /// Where the GPU sees a view, and what it needs until the work is done.
    fn reach(&self, view: View<'_>, by: By) -> Result<(Address, Kept)> {
        let (gpu, region) = (self.gpu(), view.region());
        let at = view.addr();
        let plain = || (at as Address, Kept::Region { _region: region.clone() });
        match view.device() {
            DeviceId::Host if view.is_empty() => Ok(plain()),
            // The driver stages it: such memory may go at any time, and is not worth registering. Kernels do not reach it.
            DeviceId::Host if by == By::Copy && !region.cacheable() => Ok(plain()),
            DeviceId::Host => {
                let (address, held) = gpu.hosts.reach(gpu.driver, region, at, view.len())?;
                Ok((address, held.map_or_else(|| plain().1, Kept::Host)))
            }
            DeviceId::Gpu(uuid) if uuid == gpu.facts.uuid || gpu.is_friend(&uuid) => Ok(plain()),
            DeviceId::Gpu(_) => Err(Error::misuse(format!(
                "the queue of {gpu:?} cannot reach memory of {}: it was not let in there",
                view.device()
            ))),
        }
    }

    /// The same for views that a kernel works on.
    fn reach_all(&self, views: &[View<'_>]) -> Result<(Vec<Address>, Vec<Kept>)> {
        let reached = views.iter().map(|&view| self.reach(view, By::Kernel)).collect::<Result<Vec<_>>>()?;
        Ok(reached.into_iter().unzip())
    }

    /// The same for a word of host memory.
    fn reach_word(&self, (region, addr): (&Arc<dyn Region>, usize)) -> Result<(Address, Kept)> {
        let (address, held) = self.gpu().hosts.reach(self.gpu().driver, region, addr, 4)?;
        Ok((address, held.map_or_else(|| Kept::Region { _region: region.clone() }, Kept::Host)))
    }

    /// Keeps what work needs and queues it, so that no mark comes between the two. The thread is in the context.
    fn submit<T>(
        &self,
        kept: impl IntoIterator<Item = Kept>,
        queue: impl FnOnce(Stream) -> Result<T>,
    ) -> Result<T> {
        self.idle.set(false);
        let mut held = self.holds.lock();
        self.hold_for_work(&mut held, kept)?;
        queue(self.stream())
    }

    /// Keeps what the work needs that is queued next: until it is done, or, where it is only recorded, as long as the queue
    /// lives. A mark would become a part of the graph, and never be passed.
    fn hold_for_work(&self, held: &mut Held<'_>, kept: impl IntoIterator<Item = Kept>) -> Result<()> {
        if self.recording.get() {
            let mut recorded = self.recorded.borrow_mut();
            recorded.extend(self.stops.iter().map(|stop| stop.kept.clone()));
            recorded.extend(kept);
            return Ok(());
        }
        held.keep(self.stops.iter().map(|stop| &stop.kept), kept)
    }

    /// The same for a kernel. It looks at the abort words.
    ///
    /// # Safety
    /// The kernel takes these arguments. All memory that they name lies in what is kept.
    unsafe fn launch<A: Gated>(
        &self,
        kept: impl IntoIterator<Item = Kept>,
        mut call: kernels::Call<A>,
    ) -> Result<()> {
        let (gpu, stops) = (self.gpu(), self.stops()?);
        let function = gpu.function(call.entry)?;
        self.idle.set(false);
        let mut held = self.holds.lock();
        let stamp = self.stamp.as_ref().filter(|_| !self.recording.get());
        let words = self.met.iter().map(|(_, kept)| kept.clone());
        self.hold_for_work(
            &mut held,
            kept.into_iter().chain(words).chain(stamp.map(|stamp| stamp.kept.clone())),
        )?;
        *call.arguments.gate() = match self.met {
            // One read of the GPU's own memory for each block; and nothing that a replay would not look at again.
            Some((word, _)) => Gate::new([word, 0], (MOST_GATES, 0)),
            None => held.gate(stops),
        };
        stamp.into_iter().for_each(|stamp| call.arguments.gate().stamp(stamp.place));
        // SAFETY: the caller's promise.
        unsafe { gpu.driver.launch(function, call.grid, &call.arguments, self.stream()) }
    }

    /// The addresses of abort words that work behind a wait has to look at.
    fn stops(&self) -> Result<[Address; 2]> {
        match *self.stops.as_slice() {
            [] => Ok([0, 0]),
            [ref one] => Ok([one.word, 0]),
            [ref one, ref other] => Ok([one.word, other.word]),
            // More than a kernel looks at: nothing may be queued behind all of them at once.
            _ => Err(Error::misuse(
                "waits with more than two abort words in one piece of work; begin another one in between",
            )),
        }
    }

    /// The words of an abort that can be reached. `local` says what becomes of one that lives in this process only.
    fn stops_of(&self, abort: &Abort, local: Local) -> Result<Vec<Stop>> {
        let mut stops = Vec::new();
        for memory in abort.memories() {
            match (memory, local) {
                (Some(memory), _) => {
                    let (word, kept) = self.reach_word(memory)?;
                    stops.push(Stop { abort: abort.clone(), word, kept, waits: Awaited::default() });
                }
                (None, Local::Refused) => return Err(refused("an abort word")),
                (None, Local::PassedOver) => {}
            }
        }
        Ok(stops)
    }

    /// What is queued from now on looks at these words, too.
    fn stop_by(&mut self, stops: Vec<Stop>) {
        for stop in stops {
            match self.stops.iter_mut().find(|known| known.word == stop.word) {
                Some(known) => known.waits.join(stop.waits),
                None => self.stops.push(stop),
            }
        }
    }

    /// Holds the stream until all of these flags, which are not there yet, have reached their values; gives whether it may.
    fn hold(&mut self, flags: &[(&Flag, u32)], abort: &Abort, deadline: Deadline) -> Result<bool> {
        let gpu = self.gpu().clone();
        let _entered = gpu.enter()?;
        let mut waits = Vec::with_capacity(flags.len());
        let mut kept = Vec::with_capacity(flags.len() + 2);
        for (flag, value) in flags {
            let (address, of) = self.reach_word(flag.memory().ok_or_else(|| refused("a flag"))?)?;
            waits.push((address, *value));
            kept.push(of);
        }
        let mut stops = self.stops_of(abort, Local::Refused)?;
        kept.extend(stops.iter().map(|stop| stop.kept.clone()));
        let flags: Vec<(Flag, u32)> = flags.iter().map(|&(flag, value)| (flag.clone(), value)).collect();
        stops.iter_mut().for_each(|stop| stop.waits = Awaited::new(flags.clone()));
        let queued = self.submit(kept, |stream| {
            let wait = || match *waits {
                // SAFETY: a word of a region that is kept until the work is done.
                [(address, value)] => unsafe { gpu.driver.wait_value(stream, address, value) },
                // SAFETY: as above.
                _ => unsafe { gpu.driver.wait_values(stream, &waits) },
            };
            gpu.waits.queue(self.number(), flags, (abort, deadline), &self.failure, wait)
        })?;
        if queued {
            self.stop_by(stops);
        }
        Ok(queued)
    }

    /// Whether the stream has no work now. That is remembered of a stream of ours, where nobody else queues anything. A stream
    /// of somebody else may get work between two calls. One that is captured must not be asked. The thread is in the context.
    fn is_idle(&self) -> Result<bool> {
        if self.idle.get() {
            return Ok(true);
        }
        let driver = &self.gpu().driver;
        // SAFETY: the stream lives.
        let idle = unsafe {
            let captured =
                self.recording.get() || !self.holds.is_own() && driver.is_capturing(self.stream())?;
            !captured && driver.is_idle(self.stream())?
        };
        self.idle.set(idle && self.holds.is_own());
        Ok(idle)
    }

    /// Looks until the point is passed, or until `end` says otherwise.
    fn await_point(&self, point: &CudaPoint, mut end: impl FnMut() -> Option<Error>) -> Result<()> {
        let begin = std::time::Instant::now();
        loop {
            for _ in 0..16 {
                if point.is_done()? {
                    return Ok(());
                }
            }
            if let Some(error) = end() {
                return Err(error);
            }
            if begin.elapsed() > RESTS.0 {
                std::thread::sleep(RESTS.1);
            }
        }
    }

    /// Waits until all is done; everything that was kept is let go.
    fn drain(&mut self, end: impl FnMut() -> Option<Error>) -> Result<()> {
        let point = self.holds.lock().mark()?;
        self.await_point(&point, end)?;
        if self.holds.lock().clear() {
            self.gpu().reaper.look();
        }
        Ok(())
    }
}

/// What becomes of an abort word that lives in this process only, which no GPU can look at.
#[derive(Clone, Copy)]
enum Local {
    Refused,
    PassedOver,
}

/// Who reaches memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Copy,
    Kernel,
}

impl Queue for CudaQueue {
    fn copy(&mut self, dst: View<'_>, src: View<'_>, caching: Caching) -> Result<()> {
        self.copy_all(&[(dst, src)], caching)
    }

    fn copy_all(&mut self, copies: &[(View<'_>, View<'_>)], _caching: Caching) -> Result<()> {
        copies.iter().try_for_each(|&(dst, src)| dst.check_copy(src))?;
        let copies = copies.iter().filter(|(_, src)| !src.is_empty()).collect::<Vec<_>>();
        if copies.is_empty() {
            return Ok(());
        }
        let gpu = self.gpu().clone();
        let _entered = gpu.enter()?;
        let (mut list, mut kept) = (Vec::new(), Vec::new());
        for &&(dst, src) in &copies {
            // A kernel looks at the abort words, and makes several copies at once. One that nothing stops is better made by
            // the driver, and so are those from and to the host.
            let on_host = [dst, src].iter().any(|view| view.device() == DeviceId::Host);
            let alone = self.stops.is_empty() && self.met.is_none() && (copies.len() == 1 || on_host);
            let by = if alone { By::Copy } else { By::Kernel };
            let ((to, into), (from, of)) = (self.reach(dst, by)?, self.reach(src, by)?);
            if alone {
                // SAFETY: both lie in regions that are kept until the work is done; they are apart from each other.
                let copy = |stream| unsafe { gpu.driver.copy(to, from, src.len(), stream) };
                self.submit([into, of], copy)?;
            } else {
                list.push(Copied { to, from, bytes: src.len() as u64 });
                kept.push([into, of]);
            }
        }
        for (list, kept) in list.chunks(MOST_COPIES).zip(kept.chunks(MOST_COPIES)) {
            let call = kernels::copy(list, gpu.facts.processors)?;
            // SAFETY: as above; the kernel takes these arguments.
            unsafe { self.launch(kept.iter().flatten().cloned(), call) }?;
        }
        Ok(())
    }

    fn copy_strided(&mut self, dst: (View<'_>, &Layout), src: (View<'_>, &Layout)) -> Result<()> {
        if !layout::check_views(dst, src)? {
            return Ok(());
        }
        let ((dst, to), (src, of)) = (dst, src);
        let gpu = self.gpu();
        let _entered = gpu.enter()?;
        let ((into, kept), (from, also)) = (self.reach(dst, By::Kernel)?, self.reach(src, By::Kernel)?);
        let (into, from) = (into + to.origin() as Address, from + of.origin() as Address);
        let dims = layout::joined(to, of);
        let call = kernels::strided(&dims, to.item(), into, from, gpu.facts.processors);
        // SAFETY: every index of either layout stays inside its view (`check_views`), which lies in a region that is kept
        // until the work is done; the kernel takes these arguments.
        unsafe { self.launch([kept, also], call) }
    }

    fn reduce(
        &mut self,
        op: ReduceOp,
        dtype: Dtype,
        inputs: &[View<'_>],
        outputs: &[View<'_>],
        _caching: Caching,
    ) -> Result<()> {
        let len = op.check_views(dtype, inputs, outputs)?;
        if len == 0 || outputs.is_empty() {
            return Ok(());
        }
        let gpu = self.gpu();
        let _entered = gpu.enter()?;
        let ((from, kept), (into, also)) = (self.reach_all(inputs)?, self.reach_all(outputs)?);
        // One address space for all memory that the GPU reaches.
        op.check_apart(&from, &into, len, |input| input as usize, |output| output as usize)?;
        let call = kernels::reduce(op, dtype, &from, &into, len, gpu.facts.processors)?;
        // SAFETY: all views have `len` bytes in regions that are kept until the work is done; outputs are apart from
        // each other and are exactly an input or apart from it; the kernel takes these arguments.
        unsafe { self.launch(kept.into_iter().chain(also), call) }
    }

    fn reduce_rows(
        &mut self,
        op: ReduceOp,
        dtype: Dtype,
        of: usize,
        inputs: &[View<'_>],
        plan: &RowPlan,
        output: View<'_>,
    ) -> Result<()> {
        self.by_rows((op, dtype, of), inputs, plan, output)
    }

    fn reduce_together(
        &mut self,
        op: ReduceOp,
        dtype: Dtype,
        inputs: &[View<'_>],
        outputs: &[View<'_>],
        meeting: &Meeting<'_>,
    ) -> Result<()> {
        self.together(op, dtype, (inputs, outputs), meeting)
    }

    fn meet(&mut self, meeting: &Meeting<'_>) -> Result<()> {
        self.meet_once(meeting)
    }

    fn signal(&mut self, flag: &Flag, value: u32) -> Result<()> {
        let gpu = self.gpu();
        let _entered = gpu.enter()?;
        let memory = flag.memory().ok_or_else(|| refused("a flag"))?;
        // Behind nothing: the host is quicker, and no other process has to give up the GPU for it.
        if self.is_idle()? {
            flag.store(value);
            return Ok(());
        }
        let (address, kept) = self.reach_word(memory)?;
        // SAFETY: a word of a region that is kept until the work is done.
        self.submit([kept], |stream| unsafe { gpu.driver.write_value(stream, address, value) })
    }

    fn wait(&mut self, flag: &Flag, value: u32, abort: &Abort, deadline: Deadline) -> Result<()> {
        self.wait_all(&[(flag, value)], abort, deadline)
    }

    fn wait_all(&mut self, flags: &[(&Flag, u32)], abort: &Abort, deadline: Deadline) -> Result<()> {
        if self.try_wait_all(flags, abort, deadline)? {
            return Ok(());
        }
        // Too many streams wait already. What is queued runs on meanwhile.
        for &(flag, value) in flags {
            flag.clone().polled().wait(value, abort, deadline)?;
        }
        if abort.is_set() { Err(Error::Aborted) } else { Ok(()) }
    }

    fn try_wait_all(&mut self, flags: &[(&Flag, u32)], abort: &Abort, deadline: Deadline) -> Result<bool> {
        // In this order: a flag may have been advanced in its writer's place, after the abort word was set.
        let missing: Vec<_> = flags.iter().copied().filter(|(flag, value)| !flag.reached(*value)).collect();
        if abort.is_set() {
            return Err(Error::Aborted);
        }
        if missing.is_empty() {
            return Ok(true);
        }
        if deadline.passed() {
            return Err(Error::TimedOut);
        }
        let most = if self.gpu().driver.has_batches() { BATCH } else { 1 };
        for part in missing.chunks(most) {
            if !self.hold(part, abort, deadline)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn heeds_another(&mut self) -> bool {
        self.stops.retain(|stop| !stop.waits.are_over(&stop.abort));
        self.stops.len() < MOST_STOPS
    }

    fn begin(&mut self, abort: Option<&Abort>) -> Result<()> {
        // What is queued keeps its own until it is done.
        self.stops.clear();
        self.stamp = None;
        self.met = None;
        self.idle.set(false);
        let Some(abort) = abort else { return Ok(()) };
        let gpu = self.gpu().clone();
        let _entered = gpu.enter()?;
        self.stops = self.stops_of(abort, Local::Refused)?;
        Ok(())
    }

    fn stamp(&mut self, at: &Span) -> Result<()> {
        self.stamp_at(at)
    }

    fn mark(&mut self) -> Result<Mark> {
        if self.idle.get() {
            return Ok(Mark::passed());
        }
        let _entered = self.gpu().enter()?;
        let point = self.holds.lock().mark()?;
        Ok(Mark::at(point))
    }

    fn keep(&mut self, region: Arc<dyn Region>) -> Result<()> {
        let gpu = self.gpu().clone();
        let _entered = gpu.enter()?;
        let kept = Kept::Region { _region: region };
        if self.recording.get() {
            self.recorded.borrow_mut().push(kept);
            return Ok(());
        }
        if self.is_idle()? {
            return Ok(());
        }
        let mut held = self.holds.lock();
        held.keep([].iter(), [kept])?;
        held.mark().map(drop)
    }

    fn follow(&mut self, mark: &Mark, abort: &Abort, deadline: Deadline) -> Result<()> {
        let Some(point) = mark.point::<CudaPoint>()? else { return Ok(()) };
        if point.is_passed()? {
            return Ok(());
        }
        abort.check(deadline)?;
        let gpu = self.gpu().clone();
        let _entered = gpu.enter()?;
        let stops = self.stops_of(abort, Local::PassedOver)?;
        let kept: Vec<_> = stops.iter().map(|stop| stop.kept.clone()).chain([Kept::Order]).collect();
        // SAFETY: stream and event live, and the event may be of another GPU.
        self.submit(kept, |stream| unsafe { gpu.driver.wait_event(stream, point.event()) })?;
        self.stop_by(stops);
        Ok(())
    }

    fn finish(&mut self, abort: &Abort, deadline: Deadline) -> Result<()> {
        let failure = self.failure.clone();
        let failed = || failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        let gpu = self.gpu().clone();
        let _entered = gpu.enter()?;
        let stops: Vec<Abort> = self.stops.iter().map(|stop| stop.abort.clone()).collect();
        let end = || abort.check(deadline).err();
        // What is done may have been let go already.
        let busy = self.holds.lock().is_busy();
        let ended = if busy { self.drain(end) } else { Ok(()) };
        if ended.is_ok() {
            self.stops.clear();
            self.met = None;
        }
        match ended {
            Ok(()) => match failed() {
                Some(error) => Err(error),
                // Somebody else's release looks like a signal; the abort word does not.
                None if stops.iter().any(Abort::is_set) => Err(Error::Aborted),
                None => Ok(()),
            },
            Err(why @ (Error::Aborted | Error::TimedOut)) => {
                // Only what waits is ended; what computes ends by itself, and must be over before memory goes back.
                gpu.waits.release(&self.failure, &why);
                let until = Deadline::after(DRAIN);
                let drained = self.drain(|| until.passed().then_some(Error::TimedOut));
                if drained.is_ok() {
                    self.stops.clear();
                    self.met = None;
                } else {
                    tracing::warn!("{gpu:?}: work is not done {DRAIN:?} after its waits were ended");
                }
                Err(failed().unwrap_or(why))
            }
            Err(error) => Err(error),
        }
    }
}

impl Drop for CudaQueue {
    fn drop(&mut self) {
        match self.gpu().enter() {
            Ok(_entered) => self.holds.leave(),
            // In a forked child the driver is the parent's, and so is all that its work needs.
            Err(_) => std::mem::forget(self.holds.clone()),
        }
    }
}

impl fmt::Debug for CudaQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaQueue({:?})", self.holds)
    }
}

fn refused(what: &str) -> Error {
    Error::misuse(format!(
        "{what} that lives in this process only: a GPU needs one in a region of host memory"
    ))
}
