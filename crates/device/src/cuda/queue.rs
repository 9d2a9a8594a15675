//! The queue of a GPU: a stream.
//!
//! Views may lie on the GPU itself, on the host, or on a GPU whose memory this one may reach. What is queued keeps its
//! regions alive until it is done. Behind a wait that is not over yet, copies are kernels: they look at the abort words
//! and write nothing if the wait was not ended by a signal.

mod exchange;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::driver::{Address, Event, Stream};
use super::gpu::Inner;
use super::kernels;
use super::reaper::{Remains, Waste};
use super::registered::Registered;
use super::waits::Failure;
use crate::deadline::Deadline;
use crate::device::{Caching, DeviceId, Queue, Region};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::flag::{Abort, Flag};
use crate::layout::{self, Layout};
use crate::op::ReduceOp;
use crate::span::View;

/// After so many regions a mark is put behind them, so that they can be let go.
const MARK: usize = 64;
/// How long a finish looks without rest, and how long it rests after that.
const RESTS: (Duration, Duration) = (Duration::from_micros(200), Duration::from_micros(20));
/// How long an ended wait may take to let its stream go, and what is queued behind it.
const DRAIN: Duration = Duration::from_secs(10);

/// What work needs until it is done.
pub(super) enum Kept {
    /// A region.
    Region { _region: Arc<dyn Region> },
    /// Host memory that the GPU reaches.
    Host(Arc<Registered>),
}

/// Marks, and what the work before each needs.
pub(super) type Marks = VecDeque<(Event, Vec<Kept>)>;

/// Work in order on a GPU.
pub(super) struct CudaQueue {
    gpu: Arc<Inner>,
    stream: Stream,
    /// Whether the stream is ours to destroy.
    own: bool,
    /// What the work since the last mark needs.
    kept: Vec<Kept>,
    /// Marks, and the regions of the work before each.
    marks: Marks,
    /// Events to be used again.
    spare: Vec<Event>,
    /// The abort words of waits that may not be over.
    stops: Vec<Stop>,
    /// How a wait ended that did not end well.
    failure: Failure,
}

/// An abort word that work behind a wait looks at.
struct Stop {
    abort: Abort,
    /// Where the GPU sees it.
    word: Address,
    held: Option<Arc<Registered>>,
}

impl CudaQueue {
    /// On a stream of its own.
    pub(super) fn new(gpu: Arc<Inner>) -> Result<Self> {
        let entered = gpu.enter()?;
        let stream = gpu.driver.stream(false)?;
        drop(entered);
        let mut queue = Self::on(gpu, stream)?;
        queue.own = true;
        Ok(queue)
    }

    /// On somebody else's stream.
    pub(super) fn on(gpu: Arc<Inner>, stream: Stream) -> Result<Self> {
        Ok(Self {
            gpu,
            stream,
            own: false,
            kept: Vec::new(),
            marks: VecDeque::new(),
            spare: Vec::new(),
            stops: Vec::new(),
            failure: Failure::default(),
        })
    }

    /// Waits for an event of somebody else.
    ///
    /// # Safety
    /// The event exists.
    pub(super) unsafe fn follow(&mut self, event: Event) -> Result<()> {
        let _entered = self.gpu.enter()?;
        // SAFETY: the stream lives; the caller's promise.
        unsafe { self.gpu.driver.wait_event(self.stream, event) }
    }

    /// Records an event of somebody else behind all that is queued.
    ///
    /// # Safety
    /// The event exists.
    pub(super) unsafe fn precede(&mut self, event: Event) -> Result<()> {
        let _entered = self.gpu.enter()?;
        // SAFETY: the stream lives; the caller's promise.
        unsafe { self.gpu.driver.record(event, self.stream) }
    }

    fn device(&self) -> DeviceId {
        DeviceId::Gpu(self.gpu.facts.uuid)
    }

    /// What tells the GPU's queues apart.
    fn number(&self) -> usize {
        self.stream.0 as usize
    }

    /// Where the GPU sees a view, and what it needs until the work is done.
    fn reach(&self, view: View<'_>, by: By) -> Result<(Address, Kept)> {
        let region = view.region();
        let at = view.addr();
        let plain = || (at as Address, Kept::Region { _region: region.clone() });
        match view.device() {
            DeviceId::Host if view.is_empty() => Ok(plain()),
            // The driver stages it: such memory may go at any time, and is not worth registering. Kernels do not reach it.
            DeviceId::Host if by == By::Copy && !region.cacheable() => Ok(plain()),
            DeviceId::Host => {
                let (address, held) = self.gpu.hosts.reach(self.gpu.driver, region, at, view.len())?;
                Ok((address, held.map_or_else(|| plain().1, Kept::Host)))
            }
            DeviceId::Gpu(uuid) if uuid == self.gpu.facts.uuid || self.gpu.is_friend(&uuid) => Ok(plain()),
            DeviceId::Gpu(_) => Err(Error::misuse(format!(
                "the queue of {:?} cannot reach memory of {}: it was not let in there",
                self.gpu,
                view.device()
            ))),
        }
    }

    /// The same for a word of host memory.
    fn reach_word(&self, memory: Option<(&Arc<dyn Region>, usize)>, what: &str) -> Result<(Address, Kept)> {
        let (region, addr) = memory.ok_or_else(|| local(what))?;
        let (address, held) = self.gpu.hosts.reach(self.gpu.driver, region, addr, 4)?;
        Ok((address, held.map_or_else(|| Kept::Region { _region: region.clone() }, Kept::Host)))
    }

    /// Keeps what work needs until it is done. A mark comes first, so that none stands between it and the work.
    fn keep(&mut self, kept: impl IntoIterator<Item = Kept>) -> Result<()> {
        if self.kept.len() >= MARK {
            self.mark()?;
        }
        self.kept.extend(kept);
        Ok(())
    }

    /// Puts a mark behind all that is queued, lets go what is behind done marks, and gives the mark.
    fn mark(&mut self) -> Result<Event> {
        let driver = self.gpu.driver;
        while let Some((event, _)) = self.marks.front() {
            // SAFETY: events of marks are ours and live as long as the queue.
            if !unsafe { driver.is_done(*event) }? {
                break;
            }
            if let Some((event, _)) = self.marks.pop_front() {
                self.spare.push(event);
            }
        }
        let event = match self.spare.pop() {
            Some(event) => event,
            None => driver.event()?,
        };
        // SAFETY: stream and event live.
        let recorded = unsafe { driver.record(event, self.stream) };
        if let Err(error) = recorded {
            self.spare.push(event);
            return Err(error);
        }
        // What comes later looks at the abort words too.
        let words = self.stops.iter().filter_map(|stop| stop.held.clone().map(Kept::Host)).collect();
        self.marks.push_back((event, std::mem::replace(&mut self.kept, words)));
        Ok(event)
    }

    /// The addresses of abort words that work behind a wait has to look at.
    fn stops(&self) -> Result<[Address; 2]> {
        match *self.stops.as_slice() {
            [] => Ok([0, 0]),
            [ref one] => Ok([one.word, 0]),
            [ref one, ref other] => Ok([one.word, other.word]),
            // More than a kernel looks at: nothing may be queued behind all of them at once.
            _ => {
                Err(Error::misuse("waits with more than two abort words in one queue; finish it in between"))
            }
        }
    }

    /// Notes the abort words of a wait.
    fn stop_by(&mut self, abort: &Abort) -> Result<()> {
        for memory in abort.memories() {
            let (word, kept) = self.reach_word(memory, "an abort word")?;
            if !self.stops.iter().any(|stop| stop.word == word) {
                let held = if let Kept::Host(held) = &kept { Some(held.clone()) } else { None };
                self.stops.push(Stop { abort: abort.clone(), word, held });
            }
            self.keep([kept])?;
        }
        Ok(())
    }

    /// Whether anything was queued that is not known to be done.
    fn is_busy(&self) -> bool {
        !self.kept.is_empty() || !self.marks.is_empty()
    }

    /// Looks until the event is done, or until `end` says otherwise.
    fn await_event(&self, event: Event, mut end: impl FnMut() -> Option<Error>) -> Result<()> {
        let begin = std::time::Instant::now();
        loop {
            for _ in 0..16 {
                // SAFETY: an event of the queue's.
                if unsafe { self.gpu.driver.is_done(event) }? {
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
        let event = self.mark()?;
        self.await_event(event, end)?;
        let mut foreign = false;
        for (event, kept) in self.marks.drain(..) {
            self.spare.push(event);
            foreign |= kept.iter().any(|kept| matches!(kept, Kept::Host(held) if held.is_foreign()));
        }
        self.stops.clear();
        self.kept.clear();
        if foreign {
            self.gpu.reaper.look();
        }
        Ok(())
    }
}

/// Who reaches memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Copy,
    Kernel,
}

impl Queue for CudaQueue {
    fn copy(&mut self, dst: View<'_>, src: View<'_>, _caching: Caching) -> Result<()> {
        let len = src.len();
        if dst.len() != len {
            return Err(Error::misuse(format!("copying {len} bytes into {}", dst.len())));
        }
        if dst.touches(src) {
            return Err(Error::misuse("copying between spans that overlap"));
        }
        if len == 0 {
            return Ok(());
        }
        let gpu = self.gpu.clone();
        let _entered = gpu.enter()?;
        let by = if self.stops.is_empty() { By::Copy } else { By::Kernel };
        let ((to, into), (from, of)) = (self.reach(dst, by)?, self.reach(src, by)?);
        self.keep([into, of])?;
        if by == By::Copy {
            // SAFETY: both lie in regions that are kept until the work is done; they are apart from each other.
            return unsafe { gpu.driver.copy(to, from, len, self.stream) };
        }
        let arguments = kernels::CopyArguments { abort: self.stops()?, to, from, bytes: len as u64 };
        let grid = kernels::grid(len, gpu.facts.processors);
        // SAFETY: as above; the kernel takes these arguments.
        unsafe { gpu.driver.launch(gpu.function(kernels::COPY)?, grid, &arguments, self.stream) }
    }

    fn copy_strided(&mut self, dst: (View<'_>, &Layout), src: (View<'_>, &Layout)) -> Result<()> {
        let ((dst, to), (src, of)) = (dst, src);
        layout::check_copy((to, dst.len()), (of, src.len()))?;
        if dst.touches(src) {
            return Err(Error::misuse("copying between spans that overlap"));
        }
        if to.count() == 0 {
            return Ok(());
        }
        let gpu = self.gpu.clone();
        let _entered = gpu.enter()?;
        let ((into, kept), (from, also)) = (self.reach(dst, By::Kernel)?, self.reach(src, By::Kernel)?);
        let (into, from) = (into + to.origin() as Address, from + of.origin() as Address);
        let dims = layout::joined(to, of);
        let call = kernels::strided(&dims, to.item(), into, from, self.stops()?, gpu.facts.processors);
        self.keep([kept, also])?;
        // SAFETY: every index of either layout stays inside its view (`check_copy`), which lies in a region that is kept
        // until the work is done; the kernel takes these arguments.
        unsafe { gpu.driver.launch(gpu.function(call.entry)?, call.grid, &call.arguments, self.stream) }
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
        let gpu = self.gpu.clone();
        let _entered = gpu.enter()?;
        let reach = |views: &[View<'_>]| -> Result<(Vec<Address>, Vec<Kept>)> {
            let reached =
                views.iter().map(|&view| self.reach(view, By::Kernel)).collect::<Result<Vec<_>>>()?;
            Ok(reached.into_iter().unzip())
        };
        let ((from, kept), (into, also)) = (reach(inputs)?, reach(outputs)?);
        // One address space for all memory that the GPU reaches.
        op.check_apart(&from, &into, len, |input| input as usize, |output| output as usize)?;
        let call = kernels::reduce(op, dtype, &from, &into, len, self.stops()?, gpu.facts.processors)?;
        self.keep(kept.into_iter().chain(also))?;
        // SAFETY: all views have `len` bytes in regions that are kept until the work is done; outputs are apart from
        // each other and are exactly an input or apart from it; the kernel takes these arguments.
        unsafe { gpu.driver.launch(gpu.function(call.entry)?, call.grid, &call.arguments, self.stream) }
    }

    fn signal(&mut self, flag: &Flag, value: u32) -> Result<()> {
        let gpu = self.gpu.clone();
        let _entered = gpu.enter()?;
        let (address, kept) = self.reach_word(flag.memory(), "a flag")?;
        self.keep([kept])?;
        // SAFETY: a word of a region that is kept until the work is done.
        unsafe { gpu.driver.write_value(self.stream, address, value) }
    }

    fn wait(&mut self, flag: &Flag, value: u32, abort: &Abort, deadline: Deadline) -> Result<()> {
        // In this order: a flag may have been advanced in its writer's place, after the abort word was set.
        let reached = flag.reached(value);
        if abort.is_set() {
            return Err(Error::Aborted);
        }
        if reached {
            return Ok(());
        }
        if deadline.passed() {
            return Err(Error::TimedOut);
        }
        let gpu = self.gpu.clone();
        let _entered = gpu.enter()?;
        let (address, kept) = self.reach_word(flag.memory(), "a flag")?;
        self.stop_by(abort)?;
        self.keep([kept])?;
        let stream = self.stream;
        let queued =
            gpu.waits.queue(self.number(), (flag, value), (abort, deadline), &self.failure, || {
                // SAFETY: a word of a region that is kept until the work is done.
                unsafe { gpu.driver.wait_value(stream, address, value) }
            })?;
        if queued {
            return Ok(());
        }
        // Too many streams wait already. What is queued runs on meanwhile.
        flag.clone().polled().wait(value, abort, deadline)?;
        if abort.is_set() { Err(Error::Aborted) } else { Ok(()) }
    }

    fn finish(&mut self, abort: &Abort, deadline: Deadline) -> Result<()> {
        let failure = self.failure.clone();
        let failed = || failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        if !self.is_busy() {
            self.stops.clear();
            return failed().map_or(Ok(()), Err);
        }
        let gpu = self.gpu.clone();
        let _entered = gpu.enter()?;
        let stops: Vec<Abort> = self.stops.iter().map(|stop| stop.abort.clone()).collect();
        let ended = self.drain(|| {
            if abort.is_set() {
                Some(Error::Aborted)
            } else if deadline.passed() {
                Some(Error::TimedOut)
            } else {
                None
            }
        });
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
                if drained.is_err() {
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
        // In a forked child the driver is the parent's.
        let gpu = self.gpu.clone();
        let Ok(_entered) = gpu.enter() else {
            std::mem::take(&mut self.kept).into_iter().for_each(std::mem::forget);
            self.marks.drain(..).for_each(std::mem::forget);
            return;
        };
        // What is queued runs on, and its waits end by their deadlines at the latest: nobody has to stay for that.
        if self.is_busy() && self.mark().is_err() {
            // Better lost than given to somebody else while the GPU writes to it.
            std::mem::take(&mut self.kept).into_iter().for_each(std::mem::forget);
        }
        let marks = std::mem::take(&mut self.marks);
        let spare = std::mem::take(&mut self.spare);
        gpu.reaper.take(Waste::Work(Remains {
            marks,
            spare,
            stream: self.own.then_some(self.stream),
            gpu: gpu.clone(),
        }));
    }
}

impl fmt::Debug for CudaQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaQueue({:#x} on {:?}, {} marks)", self.number(), self.gpu, self.marks.len())
    }
}

fn local(what: &str) -> Error {
    Error::misuse(format!(
        "{what} that lives in this process only: a GPU needs one in a region of host memory"
    ))
}
