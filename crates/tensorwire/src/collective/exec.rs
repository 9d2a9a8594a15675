//! Runs plans: one rank's part of the operations of a group, one after the other.
//!
//! Each rank has four progress lines (see `shm::control`), used in turn: the counter of operation `k` is the value of line
//! `k` modulo 4, `k << 20 | tick`, and the rest of the line says what the rank came for. A wait for the counter therefore
//! brings the other rank's header into this core's cache, and comparing it costs nothing more.
//!
//! # Time-outs
//!
//! Operation `k` has one verdict word. Whoever cannot go on sets it, once, to who and why; everybody inside or coming
//! later gets the same error; who had finished keeps its result. A rank that leaves a cancelled operation moves its counter
//! to [`END`], so that nobody waits for it, and who sees that value looks at the verdict before it believes it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use tensorwire_device::flag::{LINE, reached};
use tensorwire_device::sync::{Ordering, fence};
use tensorwire_device::{Abort, Caching, Deadline, Dtype, Flag, Queue, Span, View};

use super::buffer::Buffer;
use super::header::HEADER;
use super::operation::Operation;
use super::plan::{Counts, Part, Place, Plan, Shape, Step, Who};
use super::tuning::Tuning;
use crate::error::{Error, Result};
use crate::interrupt::{self, Pace, is_interrupt};
use crate::ranks::Ranks;
use crate::shm::control::{Control, Desk, HALF, SLOT, VERDICTS};
use crate::shm::cores::{Room, Thread};
use crate::shm::kind::{Kind, Path};
use crate::shm::record::{Begun, Recorder, State};

/// The tick of a rank that has left a cancelled operation, or the group.
pub(super) const END: u32 = (1 << TICK_BITS) - 1;
const TICK_BITS: u32 = 20;

/// Where the header begins in a progress line, and where the payload does.
const HEADER_AT: usize = 8;
const PAYLOAD_AT: usize = 32;

/// What one rank needs to run operations.
#[derive(Debug)]
pub(crate) struct Executor {
    pub(super) control: Arc<Control>,
    pub(super) me: usize,
    pub(super) world: usize,
    /// By place, and by number modulo 4.
    pub(super) progress: Vec<[Flag; Desk::STEPS]>,
    pub(super) inside: Vec<Flag>,
    /// Of each operation, by number: its word, and with the group's word beside it.
    pub(super) verdicts: Vec<Abort>,
    stops: Vec<Abort>,
    queue: Box<dyn Queue>,
    /// How many operations this rank has begun.
    pub(super) number: u32,
    /// The last tick of the previous operation; nothing if it was cancelled.
    pub(super) last: Option<u32>,
    /// Whether nobody looks any more at what was in the lines that this operation uses.
    pub(super) joined: bool,
    /// Whether the others have not been told that this rank has left the previous operation.
    pub(super) unsaid: bool,
    /// The highest counter seen of each rank.
    seen: Vec<u32>,
    /// The last operation of each rank whose header has been compared.
    checked: Vec<u32>,
    /// The headers of the last two operations.
    headers: [[u8; HEADER]; 2],
    plans: Plans,
    /// Where the sizes of uneven parts are exchanged.
    sizes: Option<Span>,
    recorder: Arc<Recorder>,
    /// Whether this rank's slot is there.
    committed: bool,
    /// How long waits look before they sleep: on their caller's thread and on ours; and as the flags have it.
    spins: [Duration; 2],
    spin: Option<Duration>,
    /// How many threads operations of so many bytes and more have, and how many the queue has now.
    threads: usize,
    share: usize,
    sharing: usize,
    /// When the caller is asked whether to go on.
    pub(super) pace: Pace,
    /// Why the next operation is not begun: the same as for the one before.
    interrupted: Option<Error>,
}

/// Why an operation does not go on.
#[derive(Debug)]
pub(super) enum Stop {
    /// These ranks (by place) have not come as far as needed.
    TimedOut(Vec<usize>),
    /// The group has failed, or the operation was cancelled.
    Aborted,
    /// This rank (by place) came for something else, in the operation of that number.
    Mismatch(usize, u32),
    /// This rank (by place) has closed the group.
    Left(usize),
    /// This rank (by place) is so many operations behind that nobody could tell it how they ended.
    Behind(usize),
    /// Something of this rank's own.
    Own(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        match error {
            Error::Aborted(_) => Self::Aborted,
            error => Self::Own(error),
        }
    }
}

impl From<tensorwire_device::Error> for Stop {
    fn from(error: tensorwire_device::Error) -> Self {
        match error {
            tensorwire_device::Error::Aborted => Self::Aborted,
            error => Self::Own(error.into()),
        }
    }
}

impl Executor {
    pub(crate) fn new(
        control: &Arc<Control>,
        recorder: &Arc<Recorder>,
        queue: Box<dyn Queue>,
    ) -> Result<Self> {
        let (map, world) = (control.map(), control.ranks().len());
        let flag = |at: usize| control.flag(at);
        let mut progress = Vec::with_capacity(world);
        for place in 0..world {
            let line = |index: usize| flag(map.desk(place) + Desk::PROGRESS + index * LINE);
            progress.push([line(0)?, line(1)?, line(2)?, line(3)?]);
        }
        let verdict = |index: usize| Ok(Abort::new(&control.line(map.verdict(index as u32))?)?);
        let verdicts: Vec<Abort> = (0..VERDICTS).map(verdict).collect::<Result<_>>()?;
        Ok(Self {
            me: control.me(),
            world,
            progress,
            inside: (0..world).map(|place| flag(map.desk(place) + Desk::WHERE)).collect::<Result<_>>()?,
            stops: verdicts.iter().map(|verdict| verdict.or(&control.abort)).collect(),
            verdicts,
            queue,
            number: 0,
            last: Some(0),
            joined: true,
            unsaid: false,
            seen: vec![0; world],
            checked: vec![0; world],
            headers: [[0; HEADER]; 2],
            plans: Plans::default(),
            sizes: None,
            recorder: recorder.clone(),
            committed: false,
            spins: [Duration::ZERO; 2],
            spin: None,
            threads: 1,
            share: 0,
            sharing: 1,
            pace: Pace::since(Instant::now()),
            interrupted: None,
            control: control.clone(),
        })
    }

    /// Runs an operation, with all that comes before and after it.
    pub(crate) fn run(
        &mut self,
        group: &Ranks,
        operation: &mut Operation,
        time: (Instant, Deadline),
        thread: Thread,
    ) -> Result<()> {
        if let Some(error) = group.failure() {
            return Err(error);
        }
        if !self.committed {
            let slot = self.control.map().slot(self.me);
            self.control.region().commit(slot..slot + SLOT)?;
            let room = Room::new(&self.control);
            self.spins = [Thread::Caller, Thread::Worker].map(|thread| room.spin(thread));
            let tuning = Tuning::new(self.world);
            (self.threads, self.share) = (room.threads(tuning.threads), tuning.share);
            #[cfg(feature = "hooks")]
            super::hooks::threads().inspect(|threads| (self.threads, self.share) = (*threads, 0));
            self.committed = true;
        }
        let spin = self.spins[thread as usize];
        if self.spin != Some(spin) {
            self.progress.iter_mut().flatten().for_each(|flag| flag.set_spin(spin));
            self.spin = Some(spin);
        }
        group.memory.sweep();
        if operation.extra.is_none() {
            return self.next(group, operation, time);
        }
        operation.pack(&mut *self.queue)?;
        if operation.has_sizes_to_exchange() {
            let agreed = self.agree_on_sizes(group, operation, time);
            if let Err(error) = agreed {
                // The others may believe that it goes on: then they must hear that it does not.
                if group.failure().is_none() {
                    self.interrupted = Some(error.clone()).filter(is_interrupt);
                    let _ = self.next(group, operation, (time.0, Deadline::at(time.0)));
                }
                return Err(error);
            }
        }
        self.next(group, operation, time)?;
        operation.unpack(&mut *self.queue)
    }

    /// The sizes of all parts, which each rank knows only of its own.
    fn agree_on_sizes(
        &mut self,
        group: &Ranks,
        operation: &mut Operation,
        time: (Instant, Deadline),
    ) -> Result<()> {
        let Some(uneven) = operation.uneven() else { return Ok(()) };
        let row = uneven.given.len() * 8;
        if self.sizes.is_none() {
            let region = tensorwire_device::host::private(row + row * self.world)?;
            self.sizes = Some(Span::whole(region));
        }
        let Some(sizes) = self.sizes.clone() else { return Ok(()) };
        let bytes: Vec<u8> = uneven.given.iter().flat_map(|&bytes| (bytes as u64).to_le_bytes()).collect();
        sizes.write(0, &bytes)?;
        let mut exchange = Operation::new(Kind::Sizes, Dtype::I64);
        exchange.counts = Counts::Even(row);
        exchange.input = Buffer::of([sizes.slice(0..row)?]);
        exchange.output = Buffer::of([sizes.slice(row..sizes.len())?]);
        self.next(group, &exchange, time)?;
        let mut all = vec![0; row * self.world];
        sizes.read(row, &mut all)?;
        let words = all.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        operation.counts =
            Counts::Matrix(words.map(|word| usize::try_from(word).unwrap_or(usize::MAX)).collect());
        // All ranks know all sizes now: all refuse a path that is too small for them, or none.
        operation.check(self.world)
    }

    /// The next operation of the group.
    fn next(
        &mut self,
        group: &Ranks,
        operation: &Operation,
        (start, deadline): (Instant, Deadline),
    ) -> Result<()> {
        let number = self.number.wrapping_add(1);
        self.number = number;
        // Nobody can be so far behind, or so far ahead, as to use this word.
        let old = &self.verdicts[number.wrapping_add(VERDICTS as u32 / 2) as usize % VERDICTS];
        if old.code().is_some() {
            old.reset();
        }
        let header = operation.header(number);
        self.headers[number as usize % 2] = header.to_bytes();
        self.inside[self.me].store(number.wrapping_mul(2).wrapping_add(1));
        let (shape, path) = operation.shape(self.me, self.world);
        let entry = operation.entry(&header, path, self.recorder.nanos(start));
        let mut record = self.recorder.begin(entry);
        self.pace = Pace::since(start);
        // Whoever waited for an operation whose time is over has gone.
        self.joined = self.last.is_some();
        let performed = match deadline.instant() <= start {
            true => match self.interrupted.take().map_or_else(interrupt::check, Err) {
                Err(error) => Err(Stop::Own(error)),
                Ok(()) => Err(Stop::TimedOut(Vec::new())),
            },
            false => self.perform(group, operation, (shape, path), deadline, &mut record),
        };
        let (result, state) = match performed {
            Ok(ticks) => {
                self.inside[self.me].store(number.wrapping_mul(2).wrapping_add(2));
                self.last = Some(ticks);
                (Ok(()), State::Done)
            }
            Err(stop) => {
                let state = match &stop {
                    Stop::TimedOut(_) => State::TimedOut,
                    Stop::Aborted if group.control.failure().is_none() => State::Cancelled,
                    _ => State::Failed,
                };
                (Err(self.stopped(group, &header, stop, start)), state)
            }
        };
        self.recorder.end(record, state, self.recorder.nanos(Instant::now()));
        result
    }

    fn perform(
        &mut self,
        group: &Ranks,
        operation: &Operation,
        (shape, mut path): (Shape, Path),
        deadline: Deadline,
        record: &mut Begun,
    ) -> Result<u32, Stop> {
        let number = self.number;
        let line = self.line(self.me, number);
        self.point(operation.kind, 0);
        if !self.joined {
            self.await_late(deadline)?;
            self.joined = true;
            self.say_left();
        }
        self.say_header(number)?;
        operation.check_sizes(group, self.me, self.world)?;
        let mut peers = Vec::new();
        let mut begin = 0;
        if shape.announced {
            let offer = operation.offer(group, self.me);
            self.control.region().write(line + PAYLOAD_AT, &offer.to_bytes())?;
            if offer.accepts {
                self.signal(1)?;
                self.wait_all(1, deadline)?;
                if let Some(reached) = self.accept(group, &shape, deadline)? {
                    (path, peers) = (Path::Direct, reached);
                    self.recorder.via(record, path);
                }
                // Both plans begin with the signal that has been given.
                begin = 1;
            }
            if operation.path == Some(Path::Direct) && path != Path::Direct {
                let text = "the direct path needs tensors in memory that alloc() of a group or context gave, on every rank";
                return Err(Error::misuse(text).into());
            }
        }
        self.share(operation);
        let plan = self.plans.get(shape, path);
        let job = Job { number, operation, peers: &peers };
        for (index, step) in plan.steps.iter().enumerate().skip(begin) {
            self.point(operation.kind, index + 1);
            match step {
                Step::Copy { into, from, caching } => self.copy(&job, into, from, *caching)?,
                Step::Reduce { inputs, outputs, caching } => {
                    self.reduce(&job, plan.parts(inputs), plan.parts(outputs), *caching)?;
                }
                Step::Signal(tick) => self.signal(*tick)?,
                Step::Wait(Who::All, tick) => self.wait_all(*tick, deadline)?,
                Step::Wait(Who::One(place), tick) => self.wait_for(*place, *tick, deadline)?,
            }
        }
        self.point(operation.kind, plan.steps.len() + 1);
        // What was read may have been overwritten by a rank that left a cancelled operation: then the word is set.
        fence(Ordering::Acquire);
        if self.verdict().is_set() {
            return Err(Stop::Aborted);
        }
        Ok(plan.ticks)
    }

    /// Has the queue take as many threads as the operation is worth. The other ranks need not do the same.
    fn share(&mut self, operation: &Operation) {
        if self.threads == 1 {
            return;
        }
        let bytes = operation.input.len().max(operation.output.len());
        let threads = if bytes < self.share { 1 } else { self.threads };
        if self.sharing != threads {
            self.sharing = threads;
            self.queue.share(threads);
        }
    }

    /// Says in this rank's line what it came for.
    pub(super) fn say_header(&self, number: u32) -> Result<()> {
        let line = self.line(self.me, number);
        Ok(self.control.region().write(line + HEADER_AT, &self.headers[number as usize % 2])?)
    }

    /// A place where tests may interfere.
    #[inline(always)]
    fn point(&self, _kind: Kind, _step: usize) {
        #[cfg(feature = "hooks")]
        super::hooks::at(super::hooks::Point {
            place: self.me,
            kind: _kind,
            number: self.number,
            step: _step,
        });
    }

    fn copy(&mut self, job: &Job<'_>, into: &Part, from: &Part, caching: Caching) -> Result<(), Stop> {
        self.look(job)?;
        let mut done = 0;
        while done < into.len {
            let (dst, src) = (job.view(&self.control, into, done)?, job.view(&self.control, from, done)?);
            let len = dst.len().min(src.len());
            let (dst, src) = (dst.slice(0..len)?, src.slice(0..len)?);
            if !dst.is_same(src) {
                self.queue.copy(dst, src, caching)?;
            }
            done += len.max(1);
        }
        self.look(job)
    }

    fn reduce(&mut self, job: &Job<'_>, inputs: &[Part], outputs: &[Part], to: Caching) -> Result<(), Stop> {
        self.look(job)?;
        let len = inputs.first().map_or(0, |part| part.len);
        let (mut from, mut into) = (Views::new(), Views::new());
        let mut done = 0;
        while done < len {
            let mut run = len - done;
            for (views, parts) in [(&mut from, inputs), (&mut into, outputs)] {
                views.clear();
                for part in parts {
                    let view = job.view(&self.control, part, done)?;
                    run = run.min(view.len());
                    views.push(view);
                }
            }
            for view in from.iter_mut().chain(&mut into).filter(|view| view.len() != run) {
                *view = view.slice(0..run)?;
            }
            self.queue.reduce(job.operation.op, job.operation.dtype, &from, &into, to)?;
            done += run.max(1);
        }
        self.look(job)
    }

    /// In other ranks' memory: nobody touches it for long after a cancellation.
    fn look(&self, job: &Job<'_>) -> Result<(), Stop> {
        if !job.peers.is_empty() && self.stop().is_set() { Err(Stop::Aborted) } else { Ok(()) }
    }

    fn signal(&mut self, tick: u32) -> Result<(), Stop> {
        let flag = &self.progress[self.me][self.number as usize % Desk::STEPS];
        self.queue.signal(flag, value(self.number, tick))?;
        // This rank has said that it is inside; who cancels now waits for it, and who cancelled before is seen here.
        if tick == 1 && self.verdict().is_set() {
            return Err(Stop::Aborted);
        }
        Ok(())
    }

    fn wait_all(&mut self, tick: u32, deadline: Deadline) -> Result<(), Stop> {
        // A look at all of them first: the cache lines come from other cores at the same time.
        if tick > 0 && self.world > 2 {
            let line = self.number as usize % Desk::STEPS;
            for place in (0..self.world).filter(|&place| place != self.me) {
                let now = self.progress[place][line].load();
                if reached(now, self.seen[place]) && now & END != END {
                    self.seen[place] = now;
                }
            }
        }
        for step in 1..self.world {
            let place = (self.me + step) % self.world;
            match self.wait_for(place, tick, deadline) {
                Err(Stop::TimedOut(_)) => return Err(Stop::TimedOut(self.absent(tick))),
                other => other?,
            }
        }
        Ok(())
    }

    /// Waits for another rank's tick, and sees to it that it came for the same.
    fn wait_for(&mut self, place: usize, tick: u32, deadline: Deadline) -> Result<(), Stop> {
        let of = if tick == 0 { self.number.wrapping_sub(1) } else { self.number };
        let Some(last) = self.last.or((tick > 0).then_some(0)) else {
            // The previous operation was cancelled: all have left it, or will not touch anything in it, and all have left
            // the one before (`await_late`).
            return Ok(());
        };
        if self.checked[place] == of
            && reached(self.seen[place], value(of, if tick == 0 { last } else { tick }))
        {
            return Ok(());
        }
        // What it came for first: one that came for something else may never signal the tick.
        if self.checked[place] != of {
            if of != 0 {
                self.wait_value(place, of, 1, deadline)?;
                self.compare(place, of)?;
            }
            self.checked[place] = of;
        }
        self.wait_value(place, of, if tick == 0 { last } else { tick }, deadline)
    }

    fn wait_value(&mut self, place: usize, of: u32, tick: u32, deadline: Deadline) -> Result<(), Stop> {
        let target = value(of, tick);
        if reached(self.seen[place], target) {
            return Ok(());
        }
        let flag = &self.progress[place][of as usize % Desk::STEPS];
        let stop = &self.stops[self.number as usize % VERDICTS];
        loop {
            let slice = self.pace.until(deadline);
            match self.queue.wait(flag, target, stop, slice) {
                Err(tensorwire_device::Error::TimedOut) if slice < deadline => {
                    self.pace.look(Instant::now()).map_err(Stop::Own)?;
                }
                Err(tensorwire_device::Error::TimedOut) => return Err(Stop::TimedOut(vec![place])),
                other => break other?,
            }
        }
        let now = flag.load();
        if now & END == END {
            return self.jumped(place, of);
        }
        self.seen[place] = now;
        Ok(())
    }

    /// A counter at its end: the rank has left the operation, or the group.
    fn jumped(&self, place: usize, of: u32) -> Result<(), Stop> {
        if self.stop().is_set() {
            return Err(Stop::Aborted);
        }
        if self.control.has_closed(place) {
            return Err(Stop::Left(place));
        }
        // The previous operation was cancelled after this rank had finished it.
        if of == self.number { Err(Stop::Aborted) } else { Ok(()) }
    }

    fn compare(&self, place: usize, of: u32) -> Result<(), Stop> {
        let mut theirs = [0; HEADER];
        self.control.region().read(self.line(place, of) + HEADER_AT, &mut theirs)?;
        if theirs == self.headers[of as usize % 2] { Ok(()) } else { Err(Stop::Mismatch(place, of)) }
    }

    /// Who has not come as far as a tick.
    fn absent(&self, tick: u32) -> Vec<usize> {
        let (of, tick) = match (tick, self.last) {
            (0, Some(last)) => (self.number.wrapping_sub(1), last),
            (0, None) => return Vec::new(),
            (tick, _) => (self.number, tick),
        };
        let late = |place: &usize| {
            *place != self.me && !self.progress[*place][of as usize % Desk::STEPS].reached(value(of, tick))
        };
        (0..self.world).filter(late).collect()
    }

    /// Set if the operation was cancelled.
    pub(super) fn verdict(&self) -> &Abort {
        &self.verdicts[self.number as usize % VERDICTS]
    }

    /// Set if the operation was cancelled or the group has failed.
    pub(super) fn stop(&self) -> &Abort {
        &self.stops[self.number as usize % VERDICTS]
    }

    /// Where a rank's progress line for an operation is.
    fn line(&self, place: usize, number: u32) -> usize {
        self.control.map().desk(place) + Desk::PROGRESS + (number as usize % Desk::STEPS) * LINE
    }

    /// Where a rank's payload for this operation is.
    pub(super) fn payload_at(&self, place: usize) -> usize {
        self.line(place, self.number) + PAYLOAD_AT
    }

    pub(super) fn header_at(&self, place: usize, number: u32) -> usize {
        self.line(place, number) + HEADER_AT
    }

    /// Says to who still waits that this rank has closed the group.
    pub(crate) fn leave(&self) {
        let next = self.number.wrapping_add(1);
        self.progress[self.me][next as usize % Desk::STEPS].signal(value(next, END));
    }
}

/// What one operation works on.
struct Job<'a> {
    number: u32,
    operation: &'a Operation,
    /// The input and output of each rank, where they are reached directly.
    peers: &'a [Reach],
}

/// Another rank's memory.
#[derive(Debug, Default)]
pub(super) struct Reach {
    pub(super) input: Buffer,
    pub(super) output: Buffer,
}

type Views<'a> = SmallVec<[View<'a>; 16]>;

impl Job<'_> {
    /// The bytes of a part behind the first `done`, as far as they lie together.
    fn view<'a>(&'a self, control: &'a Control, part: &Part, done: usize) -> Result<View<'a>> {
        let (at, most) = (part.at + done, part.len - done);
        let fixed = |start: usize| Ok(View::new(control.region(), start + at..start + at + most)?);
        let map = control.map();
        let peer = |place: usize| {
            self.peers.get(place).ok_or_else(|| Error::misuse("a peer's memory is not mapped"))
        };
        match part.place {
            Place::Input => self.operation.input.run(at, most),
            Place::Output => self.operation.output.run(at, most),
            Place::Slot(place, half) => {
                let half = (self.number as usize + usize::from(half)) % 2;
                fixed(map.slot(place) + half * HALF)
            }
            Place::Line(place) => {
                let line = self.number as usize % Desk::STEPS * LINE;
                fixed(map.desk(place) + Desk::PROGRESS + line + PAYLOAD_AT)
            }
            Place::PeerInput(place) => peer(place)?.input.run(at, most),
            Place::PeerOutput(place) => peer(place)?.output.run(at, most),
        }
    }
}

/// The counter of an operation at a tick.
pub(super) fn value(number: u32, tick: u32) -> u32 {
    number << TICK_BITS | tick
}

/// Plans that were used last.
#[derive(Debug, Default)]
struct Plans(Vec<(Shape, Path, Arc<Plan>)>);

impl Plans {
    /// How many are kept.
    const MOST: usize = 32;
    /// Plans with more steps are not kept: making them costs little beside running them.
    const LONGEST: usize = 1000;

    fn get(&mut self, shape: Shape, path: Path) -> Arc<Plan> {
        let same = |(other, by, _): &(Shape, Path, Arc<Plan>)| *by == path && *other == shape;
        if let Some(at) = self.0.iter().position(same) {
            if at > 0 {
                self.0[..=at].rotate_right(1);
            }
            return self.0[0].2.clone();
        }
        let plan = Arc::new(Plan::new(&shape, path));
        if plan.steps.len() <= Self::LONGEST {
            self.0.truncate(Self::MOST - 1);
            self.0.insert(0, (shape, path, plan.clone()));
        }
        plan
    }
}
