//! The queue of a GPU of threads: a stream, whose commands its hardware queue runs later.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::channel::{self, Stream, until};
use super::clock::ThreadClock;
use super::device::Inner;
use super::hook::Kind;
use super::waits::Wait;
use crate::awaited::Awaited;
use crate::deadline::Deadline;
use crate::device::{Caching, DeviceId, Mark, Point, Queue, Region};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::flag::{Abort, Flag};
use crate::gpu::MOST_REDUCED;
use crate::handle::Handle;
use crate::layout::{self, Layout};
use crate::meeting::Meeting;
use crate::meeting::here::MeetingHere;
use crate::op::ReduceOp;
use crate::rows::RowPlan;
use crate::span::{Span, View};
use crate::sync::{AtomicBool, Ordering};
use crate::words::Words;

/// How long an ended wait may take to let its stream go, and what is queued behind it.
const DRAIN: Duration = Duration::from_secs(10);
/// As many abort words does a kernel of a real GPU look at.
const MOST_STOPS: usize = 2;

/// Work in order on a GPU of threads.
pub(super) struct ThreadQueue {
    gpu: Arc<Inner>,
    stream: Arc<Stream>,
    /// The abort words of waits that may not be over, since the last `begin`.
    stops: Vec<Stop>,
    /// Where work writes when it ended.
    stamp: Option<Words>,
}

/// An abort word, and the waits that it ends.
struct Stop {
    abort: Abort,
    waits: Awaited,
}

impl Stop {
    /// The addresses of its words.
    fn words(&self) -> Vec<usize> {
        self.abort.memories().flatten().map(|(_, addr)| addr).collect()
    }
}

/// What a hardware queue does, and all that it needs for that.
#[derive(Debug)]
pub(super) enum Command {
    Copy {
        pairs: Vec<(Span, Span)>,
        caching: Caching,
        stops: Vec<Abort>,
    },
    CopyStrided {
        dst: (Span, Layout),
        src: (Span, Layout),
        stops: Vec<Abort>,
    },
    Reduce {
        op: ReduceOp,
        dtype: Dtype,
        inputs: Vec<Span>,
        outputs: Vec<Span>,
        caching: Caching,
        stops: Vec<Abort>,
    },
    Rows {
        what: (ReduceOp, Dtype, usize),
        inputs: Vec<Span>,
        plan: RowPlan,
        output: Span,
        stops: Vec<Abort>,
    },
    Together {
        op: ReduceOp,
        dtype: Dtype,
        inputs: Vec<Span>,
        outputs: Vec<Span>,
        meeting: MeetingHere,
    },
    Meet(MeetingHere),
    Signal {
        flag: Flag,
        value: u32,
    },
    Wait(Arc<Wait>),
    Mark(Arc<ThreadPoint>),
    Follow(Mark),
    Keep {
        _region: Arc<dyn Region>,
    },
    /// One that writes when it ended.
    Stamped(Box<Self>, Words, ThreadClock),
}

impl Command {
    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Copy { .. } => Kind::Copy,
            Self::CopyStrided { .. } => Kind::CopyStrided,
            Self::Reduce { .. } | Self::Rows { .. } | Self::Together { .. } | Self::Meet(_) => Kind::Reduce,
            Self::Signal { .. } => Kind::Signal,
            Self::Wait(_) => Kind::Wait,
            // As a real GPU keeps memory: until a mark behind it is passed.
            Self::Mark(_) | Self::Keep { .. } => Kind::Mark,
            Self::Follow(_) => Kind::Follow,
            Self::Stamped(command, ..) => command.kind(),
        }
    }

    /// Does it, on the thread of the hardware queue. What writes memory looks at the abort words first, as kernels do.
    pub(super) fn run(&self, host: &mut dyn Queue) -> Result<()> {
        match self {
            Self::Copy { stops, .. }
            | Self::CopyStrided { stops, .. }
            | Self::Reduce { stops, .. }
            | Self::Rows { stops, .. }
                if stops.iter().any(Abort::is_set) =>
            {
                Ok(())
            }
            Self::Copy { pairs, caching, .. } => {
                pairs.iter().try_for_each(|(dst, src)| host.copy(dst.view(), src.view(), *caching))
            }
            Self::CopyStrided { dst: (dst, to), src: (src, of), .. } => {
                host.copy_strided((dst.view(), to), (src.view(), of))
            }
            Self::Reduce { op, dtype, inputs, outputs, caching, .. } => {
                let inputs: Vec<_> = inputs.iter().map(Span::view).collect();
                let outputs: Vec<_> = outputs.iter().map(Span::view).collect();
                host.reduce(*op, *dtype, &inputs, &outputs, *caching)
            }
            Self::Rows { what: (op, dtype, of), inputs, plan, output, .. } => {
                let inputs: Vec<_> = inputs.iter().map(Span::view).collect();
                host.reduce_rows(*op, *dtype, *of, &inputs, plan, output.view())
            }
            Self::Together { op, dtype, inputs, outputs, meeting } => {
                let inputs: Vec<_> = inputs.iter().map(Span::view).collect();
                let outputs: Vec<_> = outputs.iter().map(Span::view).collect();
                meeting.hold(&|| true, || host.reduce(*op, *dtype, &inputs, &outputs, Caching::Keep))
            }
            Self::Meet(meeting) => meeting.once(&|| true),
            Self::Signal { flag, value } => {
                flag.store(*value);
                Ok(())
            }
            Self::Wait(wait) => {
                wait.run();
                Ok(())
            }
            Self::Mark(point) => {
                point.passed.store(true, Ordering::Release);
                Ok(())
            }
            Self::Follow(mark) => {
                until(|| mark.is_passed().unwrap_or(true));
                Ok(())
            }
            Self::Keep { .. } => Ok(()),
            Self::Stamped(command, at, clock) => {
                let ran = command.run(host);
                at.store(0, clock.stamp());
                ran
            }
        }
    }
}

/// A mark of a stream.
#[derive(Debug)]
pub(super) struct ThreadPoint {
    passed: AtomicBool,
    stream: Arc<Stream>,
}

impl Point for ThreadPoint {
    fn is_passed(&self) -> Result<bool> {
        Ok(self.passed.load(Ordering::Acquire))
    }
}

impl ThreadQueue {
    pub(super) fn new(gpu: Arc<Inner>) -> Self {
        let stream = gpu.channels.open();
        Self { gpu, stream, stops: Vec::new(), stamp: None }
    }

    fn submit(&self, command: Command) -> Result<()> {
        channel::submit(&self.gpu, &self.stream, command)
    }

    /// Submits what a kernel does on a real GPU.
    fn launch(&self, command: Command) -> Result<()> {
        match &self.stamp {
            Some(at) => self.submit(Command::Stamped(Box::new(command), at.clone(), self.gpu.clock)),
            None => self.submit(command),
        }
    }

    /// The view as host memory, which the host's kernels work on, if this GPU reaches it.
    fn reach(&self, view: View<'_>) -> Result<Span> {
        let span = view.to_span();
        match view.device() {
            DeviceId::Host => Ok(span),
            DeviceId::Gpu(there) if self.gpu.reaches(&there) => {
                let (start, end) = (span.offset(), span.offset() + span.len());
                Span::new(Arc::new(OnHost(span.region().clone())), start..end)
            }
            other => Err(Error::misuse(format!(
                "the queue of {:?} cannot reach memory of {other}: it was not let in there",
                self.gpu
            ))),
        }
    }

    fn reach_all(&self, views: &[View<'_>]) -> Result<Vec<Span>> {
        views.iter().map(|&view| self.reach(view)).collect()
    }

    /// The abort words that work behind a wait has to look at.
    fn stops(&self) -> Result<Vec<Abort>> {
        if self.words() > MOST_STOPS {
            return Err(Error::misuse(
                "waits with more than two abort words in one queue; finish it in between",
            ));
        }
        Ok(self.stops.iter().map(|stop| stop.abort.clone()).collect())
    }

    /// How many abort words it has to look at.
    fn words(&self) -> usize {
        let mut words: Vec<usize> = self.stops.iter().flat_map(Stop::words).collect();
        words.sort_unstable();
        words.dedup();
        words.len()
    }

    /// Notes the abort words of waits, or of all of the work.
    fn stop_by(&mut self, abort: &Abort, waits: Awaited) -> Result<()> {
        if abort.memories().any(|memory| memory.is_none()) {
            return Err(local("an abort word"));
        }
        let stop = Stop { abort: abort.clone(), waits };
        match self.stops.iter_mut().find(|known| known.words() == stop.words()) {
            Some(known) => known.waits.join(stop.waits),
            None => self.stops.push(stop),
        }
        Ok(())
    }
}

impl Queue for ThreadQueue {
    fn copy(&mut self, dst: View<'_>, src: View<'_>, caching: Caching) -> Result<()> {
        self.copy_all(&[(dst, src)], caching)
    }

    fn copy_all(&mut self, copies: &[(View<'_>, View<'_>)], caching: Caching) -> Result<()> {
        self.gpu.check()?;
        let mut pairs = Vec::with_capacity(copies.len());
        for &(dst, src) in copies {
            dst.check_copy(src)?;
            if !src.is_empty() {
                pairs.push((self.reach(dst)?, self.reach(src)?));
            }
        }
        if pairs.is_empty() {
            return Ok(());
        }
        self.launch(Command::Copy { pairs, caching, stops: self.stops()? })
    }

    fn copy_strided(&mut self, dst: (View<'_>, &Layout), src: (View<'_>, &Layout)) -> Result<()> {
        self.gpu.check()?;
        if !layout::check_views(dst, src)? {
            return Ok(());
        }
        let ((dst, to), (src, of)) = (dst, src);
        let (dst, src) = ((self.reach(dst)?, to.clone()), (self.reach(src)?, of.clone()));
        self.launch(Command::CopyStrided { dst, src, stops: self.stops()? })
    }

    fn reduce(
        &mut self,
        op: ReduceOp,
        dtype: Dtype,
        inputs: &[View<'_>],
        outputs: &[View<'_>],
        caching: Caching,
    ) -> Result<()> {
        self.gpu.check()?;
        let len = op.check_views(dtype, inputs, outputs)?;
        if inputs.len() > MOST_REDUCED || outputs.len() > MOST_REDUCED {
            return Err(Error::misuse(format!(
                "{} inputs and {} outputs; a GPU takes {MOST_REDUCED} of each",
                inputs.len(),
                outputs.len()
            )));
        }
        // One address space for all memory that the GPU reaches.
        op.check_apart(inputs, outputs, len, |input| input.addr(), |output| output.addr())?;
        if len == 0 || outputs.is_empty() {
            return Ok(());
        }
        let (inputs, outputs) = (self.reach_all(inputs)?, self.reach_all(outputs)?);
        self.launch(Command::Reduce { op, dtype, inputs, outputs, caching, stops: self.stops()? })
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
        self.gpu.check()?;
        let what = (op, dtype, of);
        if plan.row(what, inputs, output)?.is_none() {
            return Ok(());
        }
        let (inputs, output) = (self.reach_all(inputs)?, self.reach(output)?);
        self.launch(Command::Rows { what, inputs, plan: plan.clone(), output, stops: self.stops()? })
    }

    fn reduce_together(
        &mut self,
        op: ReduceOp,
        dtype: Dtype,
        inputs: &[View<'_>],
        outputs: &[View<'_>],
        meeting: &Meeting<'_>,
    ) -> Result<()> {
        self.gpu.check()?;
        let len = op.check_views(dtype, inputs, outputs)?;
        op.check_apart(inputs, outputs, len, |input| input.addr(), |output| output.addr())?;
        shared(meeting.failure)?;
        let (inputs, outputs) = (self.reach_all(inputs)?, self.reach_all(outputs)?);
        let work = MeetingHere::new(meeting, |view| self.reach(view))?;
        self.stop_by(meeting.abort, Awaited::default())?;
        self.submit(Command::Together { op, dtype, inputs, outputs, meeting: work })
    }

    fn meet(&mut self, meeting: &Meeting<'_>) -> Result<()> {
        self.gpu.check()?;
        shared(meeting.failure)?;
        let work = MeetingHere::new(meeting, |view| self.reach(view))?;
        self.stop_by(meeting.abort, Awaited::default())?;
        self.submit(Command::Meet(work))
    }

    fn signal(&mut self, flag: &Flag, value: u32) -> Result<()> {
        self.gpu.check()?;
        shared(flag)?;
        if self.gpu.settings.prompt && self.stream.is_idle() {
            flag.store(value);
            return Ok(());
        }
        self.submit(Command::Signal { flag: flag.clone(), value })
    }

    fn wait(&mut self, flag: &Flag, value: u32, abort: &Abort, deadline: Deadline) -> Result<()> {
        self.wait_all(&[(flag, value)], abort, deadline)
    }

    fn wait_all(&mut self, flags: &[(&Flag, u32)], abort: &Abort, deadline: Deadline) -> Result<()> {
        if self.try_wait_all(flags, abort, deadline)? {
            return Ok(());
        }
        // Too many streams wait already. What is queued runs on meanwhile.
        for (flag, value) in flags {
            (*flag).clone().polled().wait(*value, abort, deadline)?;
        }
        if abort.is_set() { Err(Error::Aborted) } else { Ok(()) }
    }

    fn try_wait_all(&mut self, flags: &[(&Flag, u32)], abort: &Abort, deadline: Deadline) -> Result<bool> {
        self.gpu.check()?;
        // In this order: a flag may have been advanced in its writer's place, after the abort word was set.
        let reached = flags.iter().all(|(flag, value)| flag.reached(*value));
        if abort.is_set() {
            return Err(Error::Aborted);
        }
        if reached {
            return Ok(true);
        }
        if deadline.passed() {
            return Err(Error::TimedOut);
        }
        flags.iter().try_for_each(|(flag, _)| shared(flag))?;
        let flags: Vec<(Flag, u32)> = flags.iter().map(|(flag, value)| ((*flag).clone(), *value)).collect();
        self.stop_by(abort, Awaited::new(flags.clone()))?;
        let wait = Arc::new(Wait {
            stream: self.stream.clone(),
            flags,
            abort: abort.clone(),
            deadline,
            ended: AtomicBool::new(false),
        });
        self.gpu.waits.queue(&wait, || self.submit(Command::Wait(wait.clone())))
    }

    fn heeds_another(&mut self) -> bool {
        self.stops.retain(|stop| !stop.waits.are_over(&stop.abort));
        self.words() < MOST_STOPS
    }

    fn begin(&mut self, abort: Option<&Abort>) -> Result<()> {
        self.stops.clear();
        self.stamp = None;
        abort.map_or(Ok(()), |abort| self.stop_by(abort, Awaited::default()))
    }

    fn stamp(&mut self, at: &Span) -> Result<()> {
        if at.len() != 8 {
            return Err(Error::misuse("a time is eight bytes of host memory, at a multiple of eight"));
        }
        self.stamp = Some(Words::new(at)?);
        Ok(())
    }

    fn mark(&mut self) -> Result<Mark> {
        self.gpu.check()?;
        if self.stream.is_idle() {
            return Ok(Mark::passed());
        }
        let point = Arc::new(ThreadPoint { passed: AtomicBool::new(false), stream: self.stream.clone() });
        self.submit(Command::Mark(point.clone()))?;
        Ok(Mark::at(point))
    }

    fn keep(&mut self, region: Arc<dyn Region>) -> Result<()> {
        if self.stream.is_idle() {
            return Ok(());
        }
        self.submit(Command::Keep { _region: region })
    }

    fn follow(&mut self, mark: &Mark, _abort: &Abort, _deadline: Deadline) -> Result<()> {
        self.gpu.check()?;
        let Some(point) = mark.point::<ThreadPoint>()? else { return Ok(()) };
        if Arc::ptr_eq(&point.stream, &self.stream) || point.is_passed()? {
            return Ok(());
        }
        self.submit(Command::Follow(mark.clone()))
    }

    fn finish(&mut self, abort: &Abort, deadline: Deadline) -> Result<()> {
        self.gpu.check()?;
        let drained = self.stream.drain(Some(abort), deadline);
        let stops = std::mem::take(&mut self.stops);
        match drained {
            Ok(()) => match self.stream.failure() {
                Some(error) => Err(error),
                // Somebody else's release looks like a signal; the abort word does not.
                None if stops.iter().any(|stop| stop.abort.is_set()) => Err(Error::Aborted),
                None => Ok(()),
            },
            Err(why) => {
                // Only what waits is ended; what computes ends by itself, and must be over before memory goes back.
                self.gpu.waits.release(&self.stream, &why);
                if self.stream.drain(None, Deadline::after(DRAIN)).is_err() {
                    tracing::warn!("{:?}: work is not done {DRAIN:?} after its waits were ended", self.gpu);
                }
                Err(self.stream.failure().unwrap_or(why))
            }
        }
    }
}

impl Drop for ThreadQueue {
    fn drop(&mut self) {
        // In a forked child there are no threads, and a lock may be held for ever.
        if self.gpu.is_ours() {
            self.gpu.channels.close();
        }
    }
}

impl fmt::Debug for ThreadQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThreadQueue({} on {:?})", self.stream.number, self.gpu)
    }
}

/// Memory of a GPU of threads as what it is.
#[derive(Debug)]
struct OnHost(Arc<dyn Region>);

// SAFETY: `ThreadQueue::reach` makes it of memory whose device is a GPU of threads. That is host memory, valid as long as the
// region, which is kept here.
unsafe impl Region for OnHost {
    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn addr(&self) -> usize {
        self.0.addr()
    }

    fn export(&self) -> Result<Handle> {
        self.0.export()
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.0.read(offset, into)
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.0.write(offset, from)
    }
}

/// Refuses a flag that a real GPU could not reach.
fn shared(flag: &Flag) -> Result<()> {
    flag.memory().map(|_| ()).ok_or_else(|| local("a flag"))
}

fn local(what: &str) -> Error {
    Error::misuse(format!(
        "{what} that lives in this process only: a GPU needs one in a region of host memory"
    ))
}
