//! One rank's part of the operations of a group, one after the other.
//!
//! An operation has two halves. The ranks *meet* on their progress lines ([`meeting`]): each says what it came for and what
//! memory it offers, and all agree on the way. Then the steps of the plan are run on the caller's thread ([`runner`]), or
//! put on the queue of a device ([`queued`]), whose end is looked for elsewhere ([`flight`]).
//!
//! [`meeting`]: super::meeting
//! [`runner`]: super::runner
//! [`flight`]: super::flight

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tensorwire_device::{Deadline, DeviceId, Flag, Mark, Queue, Span};

use super::Collectives;
use super::board::Board;
use super::cancel::{driver_failed, on_gpu};
use super::explain::Way;
use super::far::Far;
use super::flight::{self, Ending, Flight, Flights, Left};
use super::lines::{Lines, Stop};
use super::operation::Operation;
use super::plan::{Plan, Shape};
use super::queued::{self, Glances};
use super::reached::Reached;
use super::runner::{Met, Runner};
use super::staged::Stage;
use super::work::{Completion, Work};
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::{self, is_interrupt};
use crate::ranks::{Ranks, closed};
use crate::shm::control::{SLOT, Why};
use crate::shm::cores::{Room, Thread};
use crate::shm::kind::{Detour, Path};
use crate::shm::record::{Begun, Recorder, State};

/// What an operation is queued on.
pub(super) enum On<'a> {
    /// The caller's queue.
    Queue(&'a mut dyn Queue),
    /// The group's own, behind marks.
    Own(&'a [Mark]),
}

/// What has become of an operation that is being queued.
#[derive(Default)]
pub(super) struct Queued {
    /// Its plan, once the ranks have met and it goes straight between tensors.
    plan: Option<Arc<Plan>>,
    /// Whether any of its steps may be on the queue, and behind them.
    pub(super) begun: bool,
    pub(super) mark: Option<Mark>,
    /// Whether this thread waited in place of the queue.
    waited: bool,
    /// Where it goes through memory of the host: the last tick of its plan.
    pub(super) staged: Option<u32>,
}

/// See [`Executor::words`].
struct Words {
    done: Vec<(usize, Flag)>,
    left: Left,
    /// Whether this rank works and says so to nobody.
    alone: bool,
}

/// What one rank needs to run operations.
#[derive(Debug)]
pub(crate) struct Executor {
    pub(super) lines: Lines,
    pub(super) runner: Runner,
    pub(super) recorder: Arc<Recorder>,
    /// Where the sizes of uneven parts are exchanged.
    pub(super) sizes: Option<Span>,
    /// How long waits look before they sleep, on their caller's thread and on ours; nothing until this rank's slot is there.
    spins: Option<[Duration; 2]>,
    /// Why the next operation is not begun.
    refused: Option<Stop>,
    /// The way to other hosts, if there are some.
    pub(super) far: Option<Box<Far>>,
    /// Whether other hosts are told before the operation that runs is given up.
    pub(super) tells: bool,
    /// Whether this rank has left the group.
    left: bool,
    /// Whether an operation of this rank has ended with the failure of the group.
    told: bool,
    /// The record of the operation that runs.
    pub(super) record: Option<Begun>,
    /// The record of the one before, and how it ended.
    ended: Option<(Begun, State, u64)>,
    /// Where queues say how far they are.
    board: Arc<Board>,
    glances: Glances,
    /// The group's own queues, by device.
    queues: HashMap<DeviceId, Box<dyn Queue>>,
    /// A second queue on the device that copied out last.
    pub(super) outward: Option<(DeviceId, Box<dyn Queue>)>,
    /// What is queued and not over.
    pub(super) flights: Arc<Flights>,
    /// Which of this rank's memory on GPUs others have reached.
    pub(super) reached: Reached,
}

impl Executor {
    pub(crate) fn new(ranks: &Ranks, flights: &Arc<Flights>) -> Result<Self> {
        let (control, recorder) = (&ranks.control, &ranks.recorder);
        Ok(Self {
            far: Far::open(ranks)?,
            tells: false,
            board: Arc::new(Board::new(control)),
            glances: Glances::default(),
            queues: HashMap::new(),
            flights: flights.clone(),
            reached: Reached::default(),
            outward: None,
            lines: Lines::new(control)?,
            runner: Runner::new(ranks.context.host().queue()?),
            recorder: recorder.clone(),
            sizes: None,
            spins: None,
            refused: None,
            left: false,
            told: false,
            record: None,
            ended: None,
        })
    }

    /// Tells ranks that still wait that this rank has closed the group, and runs no more.
    pub(crate) fn leave(&mut self) {
        self.left = true;
        self.lines.leave();
        if let Some(far) = &mut self.far {
            far.close();
        }
    }

    /// Before this rank leaves: compares what the others came for, where no wait has done so, and gives a mismatch that no
    /// operation of this rank has told.
    pub(crate) fn settle(&mut self, group: &Ranks, patience: Duration) -> Result<()> {
        self.lines.compare_last(group, patience)?;
        let error = group.failure().filter(|_| !self.told);
        let mismatch =
            |error: &Error| matches!(error, Error::Peer(fault) if fault.kind == PeerFaultKind::Mismatch);
        error.filter(mismatch).map_or(Ok(()), Err)
    }

    /// After a panic: the operation is over, as far as others can see.
    pub(crate) fn give_up(&mut self) {
        self.end(State::Failed);
        self.lines.finish(0);
    }

    /// Runs an operation, with all that comes before and after it.
    pub(crate) fn run(
        &mut self,
        group: &Arc<Collectives>,
        operation: &mut Operation,
        time: (Instant, Deadline),
        thread: Thread,
    ) -> Result<()> {
        let ranks = &group.ranks;
        let ready = self.prepare(ranks, thread);
        ready.map_err(|error| on_gpu(ranks, operation.chained().and_then(|job| job.gpu()), error))?;
        if operation.extra.is_none() {
            return self.next(ranks, operation, time);
        }
        if let Some(job) = operation.chained().cloned() {
            return self.run_chain(group, operation, &*job, time, thread);
        }
        operation.pack(self.runner.queue())?;
        self.sizes_first(ranks, operation, time)?;
        self.next(ranks, operation, time)?;
        operation.unpack(self.runner.queue())
    }

    /// Before each operation.
    #[inline(always)]
    fn prepare(&mut self, group: &Ranks, thread: Thread) -> Result<()> {
        if let Some(error) = group.failure() {
            self.told = true;
            return Err(error);
        }
        if self.left {
            return Err(closed());
        }
        let spins = match self.spins {
            Some(spins) => spins,
            None => self.begin()?,
        };
        self.lines.set_spin(spins[thread as usize]);
        group.memory.sweep();
        Ok(())
    }

    /// Before an operation whose parts have sizes that the others must be told: tells them.
    fn sizes_first(
        &mut self,
        group: &Ranks,
        operation: &mut Operation,
        time: (Instant, Deadline),
    ) -> Result<()> {
        if !operation.has_sizes_to_exchange() {
            return Ok(());
        }
        let agreed = self.agree_on_sizes(group, operation, time);
        // The others may believe that it goes on: then they must hear that it does not.
        if let Err(error) = &agreed
            && group.failure().is_none()
        {
            self.refused = Some(error.clone()).filter(is_interrupt).map(Stop::Own);
            let _ = self.next(group, operation, (time.0, Deadline::at(time.0)));
        }
        agreed
    }

    /// Meets the other ranks for an operation on tensors of a GPU and queues its steps: on the caller's queue, or on the
    /// group's own behind a mark. Returns when they are queued. How it ends is told to `completion`, an error that is
    /// found here too.
    pub(super) fn queue(
        &mut self,
        group: &Arc<Collectives>,
        mut operation: Operation,
        time: (Instant, Deadline),
        thread: Thread,
        mut on: On<'_>,
        completion: Completion,
    ) -> Result<()> {
        let ranks = &group.ranks;
        let ready = self.prepare(ranks, thread).and_then(|()| self.sizes_first(ranks, &mut operation, time));
        if let Err(error) = ready {
            let error = on_gpu(ranks, operation.gpu(), error);
            completion.finish(Err(error.clone()), None);
            return Err(error);
        }
        let (number, path) = self.enter(&operation, time.0);
        let shape = operation.shape(self.lines.me, self.lines.world).0;
        let mut met = Met { operation: &operation, shape, path, peers: Vec::new(), signalled: false };
        let mut queued = Queued::default();
        let performed = self.perform_queued(ranks, &mut met, &mut on, time, &mut queued);
        let peers = std::mem::take(&mut met.peers);
        let shape = met.shape;
        let error = match performed {
            Ok(()) => {
                self.lines.finish(queued.staged.unwrap_or(1));
                let now = self.recorder.nanos(Instant::now());
                if queued.staged.is_none() {
                    self.record.iter_mut().for_each(|record| self.recorder.queued(record, now));
                }
                None
            }
            Err(stop) => {
                let stop = match self.queues_late(ranks, queued.plan.as_deref(), &shape, stop) {
                    Stop::Own(error) => Stop::Own(driver_failed(ranks, operation.gpu(), error)),
                    stop => stop,
                };
                let error = on_gpu(ranks, operation.gpu(), self.stopped(ranks, &operation, stop, time));
                // Behind the verdict, so that nobody takes it for success.
                self.say_done(number, &mut on, operation.gpu(), &mut queued);
                Some(error)
            }
        };
        let failed = |error: Option<Error>| error.map_or(Ok(()), Err);
        let (lines, board) = (&self.lines, &self.board);
        let Words { done, left, alone } = match &queued.plan {
            Some(plan) => self.words(plan)?,
            // Only this rank's queue works on its tensors.
            None if queued.begun => {
                Words { done: vec![], left: Left { me: lines.me, words: vec![] }, alone: true }
            }
            None => {
                // The ranks have not met, so nobody works.
                completion.finish(failed(error.clone()), None);
                return failed(error);
            }
        };
        completion.queued(&queued.mark, number);
        let direct = queued.plan.is_some();
        if direct {
            self.flights.went(Way::new(&operation, number, &shape, queued.waited, ranks.shares_process()));
        }
        self.flights.add(Flight {
            number,
            start: time.0,
            deadline: time.1,
            late: operation.late,
            done,
            left,
            shape,
            board: board.clone(),
            stop: lines.stop().clone(),
            mark: queued.mark,
            by_mark: alone || operation.unpacks(),
            direct,
            error: error.clone().map(|error| (error, Instant::now())),
            operation,
            peers,
            ending: Ending { record: self.record.take(), completion, group: group.clone() },
        });
        failed(error)
    }

    /// The same on the group's own queue; waits for the end.
    pub(super) fn queue_and_wait(
        &mut self,
        group: &Arc<Collectives>,
        operation: Operation,
        time: (Instant, Deadline),
        thread: Thread,
    ) -> Result<()> {
        let (work, completion) = Work::queued(operation.kind.name(), &self.flights);
        let queued = self.queue(group, operation, time, thread, On::Own(&[]), completion);
        self.flights.wait_for(&work, queued)
    }

    /// The group's own queue on a GPU, made where it is not there yet.
    pub(super) fn queue_on(&mut self, group: &Ranks, device: &DeviceId) -> Result<&mut dyn Queue> {
        if !self.queues.contains_key(device) {
            let queue = group.context.device(device)?.queue()?;
            self.queues.insert(device.clone(), queue);
        }
        let queue = self.queues.get_mut(device).ok_or_else(|| Error::bug("a queue has gone"))?;
        Ok(&mut **queue)
    }

    /// The words of the board that tell how far an operation is.
    fn words(&self, plan: &Plan) -> Result<Words> {
        let (lines, board, number) = (&self.lines, &self.board, self.lines.number);
        let flags = |places: Vec<usize>, of: fn(&Board, usize, u32) -> Result<Flag>| {
            places.into_iter().map(|place| Ok((place, of(board, place, number)?))).collect::<Result<Vec<_>>>()
        };
        let (enders, alone) = queued::enders(plan, lines);
        Ok(Words {
            left: Left { me: lines.me, words: flags(enders.clone(), Board::left)? },
            done: flags(enders, Board::done)?,
            alone,
        })
    }

    /// Where this thread has waited in a queue's place, until the deadline: for a rank that may itself wait for another. The
    /// board knows whose queue it was.
    fn queues_late(&self, ranks: &Ranks, plan: Option<&Plan>, shape: &Shape, stop: Stop) -> Stop {
        let (Stop::TimedOut(_), Some(plan)) = (&stop, plan) else { return stop };
        match self.words(plan) {
            Ok(words) => {
                let note = flight::missing(ranks, (&self.board, shape, self.lines.number), &words.done, None);
                if note.ranks.is_empty() { stop } else { Stop::QueuesLate(note) }
            }
            Err(_) => stop,
        }
    }

    fn perform_queued(
        &mut self,
        group: &Ranks,
        met: &mut Met<'_>,
        on: &mut On<'_>,
        (start, deadline): (Instant, Deadline),
        queued: &mut Queued,
    ) -> Result<(), Stop> {
        self.late(start, deadline)?;
        self.flights.admit(self.lines.number, deadline)?;
        self.flights.untold().map_or(Ok(()), |error| Err(Stop::Untold(error)))?;
        self.board.take()?;
        self.board.renew(self.lines.me, self.lines.number)?;
        self.meet(group, met, deadline)?;
        if met.path == Path::Direct {
            let plan = self.runner.plan(met);
            let (says, now) = (queued::says(&plan), self.recorder.nanos(Instant::now()));
            queued.plan = Some(plan);
            self.record.iter_mut().for_each(|record| self.recorder.met(record, says, now));
        }
        match on {
            On::Queue(queue) => self.put(group, met, (&mut **queue, &[]), deadline, queued),
            On::Own(after) => {
                let Some(device) = met.operation.gpu() else {
                    return Err(Error::bug("an operation without a GPU is queued").into());
                };
                let mut own = match self.queues.remove(device) {
                    Some(queue) => queue,
                    None => group.context.device(device)?.queue()?,
                };
                let put = self.put(group, met, (&mut *own, after), deadline, queued);
                self.queues.insert(device.clone(), own);
                put
            }
        }
    }

    /// After an operation that could not be queued, or only in part: others may wait for this rank's word.
    #[cold]
    fn say_done(&mut self, number: u32, on: &mut On<'_>, device: Option<&DeviceId>, queued: &mut Queued) {
        let me = self.lines.me;
        let (Ok(word), Ok(left)) = (self.board.done(me, number), self.board.left(me, number)) else { return };
        if !queued.begun {
            word.store(number);
            return left.store(number);
        }
        // Behind what was queued of it.
        let queue: Option<&mut dyn Queue> = match on {
            On::Queue(queue) => Some(&mut **queue),
            On::Own(_) => match device.and_then(|device| self.queues.get_mut(device)) {
                Some(queue) => Some(&mut **queue),
                None => None,
            },
        };
        let said = queue.and_then(|queue| {
            queue.signal(&word, number).ok()?;
            queue.mark().ok()
        });
        match said {
            Some(mark) => queued.mark = Some(mark),
            None => word.store(number),
        }
    }

    /// Puts all steps on the queue, and a mark behind them.
    fn put(
        &mut self,
        group: &Ranks,
        met: &Met<'_>,
        (queue, after): (&mut dyn Queue, &[Mark]),
        deadline: Deadline,
        queued: &mut Queued,
    ) -> Result<(), Stop> {
        let stage = match &queued.plan {
            Some(_) => None,
            None => Some(Stage::new(group, met.operation, self.lines.me)?),
        };
        let (lines, operation) = (&self.lines, met.operation);
        lines.point(operation.kind, 1);
        queued.begun = true;
        for mark in after {
            queue.follow(mark, lines.stop(), queued::after_hosts(deadline))?;
        }
        if let Some(stage) = stage {
            return self.put_staged(group, met, &stage, queue, deadline, queued);
        }
        let Some(plan) = queued.plan.clone() else {
            return Err(Error::bug("an operation is queued without a plan").into());
        };
        queue.begin(Some(lines.stop()))?;
        operation.pack(queue)?;
        let by_thread = group.shares_process();
        queued.waited =
            queued::queue(lines, (&self.board, &self.glances), met, &plan, queue, (deadline, by_thread))?;
        operation.unpack(queue)?;
        queued.mark = Some(queue.mark()?);
        Ok(())
    }

    /// Whoever waited for an operation whose time is over has gone.
    fn late(&mut self, start: Instant, deadline: Deadline) -> Result<(), Stop> {
        if deadline.instant() > start {
            return Ok(());
        }
        match self.refused.take() {
            Some(stop) => Err(stop),
            None => Err(interrupt::check().map_or_else(Stop::Own, |()| Stop::TimedOut(Vec::new()))),
        }
    }

    /// Begins the next operation of the group; gives its number and the path that its size means.
    fn enter(&mut self, operation: &Operation, start: Instant) -> (u32, Path) {
        let number = self.lines.turn_page();
        let header = operation.header(number);
        self.lines.enter(header.to_bytes(), operation.ahead(self.lines.world), start);
        let path = operation.shape(self.lines.me, self.lines.world).1;
        let entry = operation.entry(&header, path, self.recorder.nanos(start));
        self.record = Some(self.recorder.begin(entry));
        (number, path)
    }

    /// Before the first operation: takes this rank's slot, and sees how much room there is.
    fn begin(&mut self) -> Result<[Duration; 2]> {
        let control = &self.lines.control;
        let slot = control.map().slot(self.lines.me);
        control.region().commit(slot..slot + SLOT)?;
        let room = Room::new(control);
        let spins = [Thread::Caller, Thread::Worker].map(|thread| room.spin(thread));
        self.runner.set_room(room, self.lines.world);
        Ok(*self.spins.insert(spins))
    }

    /// The next operation of the group.
    pub(super) fn next(
        &mut self,
        group: &Ranks,
        operation: &Operation,
        time: (Instant, Deadline),
    ) -> Result<()> {
        match self.far {
            None => self.next_near(group, operation, operation, time),
            Some(_) => self.next_far(group, operation, time),
        }
    }

    /// The next operation of this host. It may be a part of another one, which the caller called.
    #[inline(always)]
    pub(super) fn next_near(
        &mut self,
        group: &Ranks,
        called: &Operation,
        operation: &Operation,
        (start, deadline): (Instant, Deadline),
    ) -> Result<()> {
        let number = self.lines.turn_page();
        let header = called.header(number);
        self.lines.enter(header.to_bytes(), operation.ahead(self.lines.world), start);
        let (shape, path) = operation.shape(self.lines.me, self.lines.world);
        let entry = called.entry(&header, path, self.recorder.nanos(start));
        self.record = Some(self.recorder.begin(entry));
        let mut met = Met { operation, shape, path, peers: Vec::new(), signalled: false };
        let performed = match deadline.instant() <= start {
            true => self.late(start, deadline).map(|()| 0),
            false if !self.flights.is_quiet() => self.behind_flights(group, &mut met, deadline),
            false => self
                .meet(group, &mut met, deadline)
                .and_then(|()| self.runner.run(&mut self.lines, &met, deadline)),
        };
        // Errors are large: they are not moved about where there is none.
        match performed {
            Ok(ticks) => {
                self.lines.finish(ticks);
                self.end(State::Done);
                Ok(())
            }
            Err(stop) => Err(self.stopped(group, called, stop, (start, deadline))),
        }
    }

    /// Runs an operation on the host while others are queued, or have failed unheard.
    #[cold]
    fn behind_flights(&mut self, group: &Ranks, met: &mut Met<'_>, deadline: Deadline) -> Result<u32, Stop> {
        self.flights.admit(self.lines.number, deadline)?;
        self.flights.untold().map_or(Ok(()), |error| Err(Stop::Untold(error)))?;
        self.meet(group, met, deadline)?;
        self.runner.run(&mut self.lines, met, deadline)
    }

    /// Ends an operation that cannot go on.
    #[cold]
    fn stopped(
        &mut self,
        group: &Ranks,
        operation: &Operation,
        stop: Stop,
        time: (Instant, Deadline),
    ) -> Error {
        let stop = if self.tells { self.tells_others(group, operation, stop) } else { stop };
        let state = match &stop {
            Stop::TimedOut(_) | Stop::QueuesLate(_) => State::TimedOut,
            Stop::Far(refusal) if refusal.late => State::TimedOut,
            Stop::Aborted if self.lines.why() == Some(Why::FarLate) => State::TimedOut,
            Stop::Aborted if group.control.failure().is_none() => State::Cancelled,
            _ => State::Failed,
        };
        let number = self.lines.number;
        // Messages say it, where this is a mismatch.
        *group.failing.lock().unwrap_or_else(PoisonError::into_inner) = Some((number, operation.rest()));
        let error = self.lines.stopped(group, &operation.header(number), stop, time, operation.late);
        self.told = group.control.failure().is_some();
        self.end(state);
        error
    }

    /// Ends the record of the operation that runs.
    fn end(&mut self, state: State) {
        if let Some(record) = self.record.take() {
            let now = self.recorder.nanos(Instant::now());
            self.recorder.end(&record, state, now);
            self.ended = Some((record, state, now));
        }
    }

    /// The operation that has just ended decides which way others take: this one.
    pub(super) fn went(&mut self, detour: Detour) {
        if let Some((record, state, now)) = &mut self.ended {
            self.recorder.went(record, detour, (*state, *now));
        }
    }

    /// The next operation is not begun, for this reason, if its time is over.
    pub(super) fn refuse_next(&mut self, stop: Stop) {
        self.refused = Some(stop);
    }
}
