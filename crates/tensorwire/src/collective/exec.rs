//! One rank's part of the operations of a group, one after the other.
//!
//! An operation has two halves. The ranks *meet* on their progress lines ([`lines`]): each says what it came for and what
//! memory it offers, and all agree on the way. Then the steps of the plan are run ([`runner`]).
//!
//! [`lines`]: super::lines
//! [`runner`]: super::runner

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tensorwire_device::{Deadline, Dtype, Queue, Span};

use super::buffer::Buffer;
use super::lines::{Lines, Stop};
use super::operation::Operation;
use super::plan::Counts;
use super::runner::{Met, Runner};
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::{self, is_interrupt};
use crate::ranks::{Ranks, closed};
use crate::shm::control::{Control, SLOT};
use crate::shm::cores::{Room, Thread};
use crate::shm::kind::{Detour, Kind, Path};
use crate::shm::record::{Begun, Recorder, State};

/// What one rank needs to run operations.
#[derive(Debug)]
pub(crate) struct Executor {
    lines: Lines,
    runner: Runner,
    recorder: Arc<Recorder>,
    /// Where the sizes of uneven parts are exchanged.
    sizes: Option<Span>,
    /// How long waits look before they sleep, on their caller's thread and on ours; nothing until this rank's slot is there.
    spins: Option<[Duration; 2]>,
    /// Why the next operation is not begun: the same as for the one before.
    interrupted: Option<Error>,
    /// Whether this rank has left the group.
    left: bool,
    /// Whether an operation of this rank has ended with the failure of the group.
    told: bool,
    /// The record of the operation that runs.
    record: Option<Begun>,
}

impl Executor {
    pub(crate) fn new(
        control: &Arc<Control>,
        recorder: &Arc<Recorder>,
        queue: Box<dyn Queue>,
    ) -> Result<Self> {
        Ok(Self {
            lines: Lines::new(control)?,
            runner: Runner::new(queue),
            recorder: recorder.clone(),
            sizes: None,
            spins: None,
            interrupted: None,
            left: false,
            told: false,
            record: None,
        })
    }

    /// Says to who still waits that this rank has closed the group, and runs no more.
    pub(crate) fn leave(&mut self) {
        self.left = true;
        self.lines.leave();
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
        group: &Ranks,
        operation: &mut Operation,
        time: (Instant, Deadline),
        thread: Thread,
    ) -> Result<()> {
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
        if operation.extra.is_none() {
            return self.next(group, operation, time);
        }
        operation.pack(self.runner.queue())?;
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
        operation.unpack(self.runner.queue())
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
            let region = tensorwire_device::host::private(row + row * self.lines.world)?;
            self.sizes = Some(Span::whole(region));
        }
        let Some(sizes) = self.sizes.clone() else { return Ok(()) };
        let bytes: Vec<u8> = uneven.given.iter().flat_map(|&bytes| (bytes as u64).to_le_bytes()).collect();
        sizes.write(0, &bytes)?;
        let mut exchange = Operation::new(Kind::Sizes, Dtype::I64);
        exchange.late = operation.late;
        exchange.counts = Counts::Even(row);
        exchange.input = Buffer::of([sizes.slice(0..row)?]);
        exchange.output = Buffer::of([sizes.slice(row..sizes.len())?]);
        self.next(group, &exchange, time)?;
        let mut all = vec![0; row * self.lines.world];
        sizes.read(row, &mut all)?;
        let words = all.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        operation.counts =
            Counts::Matrix(words.map(|word| usize::try_from(word).unwrap_or(usize::MAX)).collect());
        // All ranks know all sizes now: all refuse a path that is too small for them, or none.
        operation.check(self.lines.world)
    }

    /// The next operation of the group.
    fn next(
        &mut self,
        group: &Ranks,
        operation: &Operation,
        (start, deadline): (Instant, Deadline),
    ) -> Result<()> {
        let number = self.lines.turn_page();
        let header = operation.header(number);
        self.lines.enter(header.to_bytes(), start);
        let (shape, path) = operation.shape(self.lines.me, self.lines.world);
        let entry = operation.entry(&header, path, self.recorder.nanos(start));
        self.record = Some(self.recorder.begin(entry));
        let mut met = Met { operation, shape, path, peers: Vec::new(), signalled: false };
        // Whoever waited for an operation whose time is over has gone.
        let performed = match deadline.instant() <= start {
            true => match self.interrupted.take().map_or_else(interrupt::check, Err) {
                Err(error) => Err(Stop::Own(error)),
                Ok(()) => Err(Stop::TimedOut(Vec::new())),
            },
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
            Err(stop) => Err(self.stopped(group, operation, stop, (start, deadline))),
        }
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
        let state = match &stop {
            Stop::TimedOut(_) => State::TimedOut,
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
        if let Some(record) = &self.record {
            self.recorder.end(record, state, self.recorder.nanos(Instant::now()));
        }
        self.record = None;
    }

    /// Meets the other ranks, and agrees with them on the way. Where the size leaves no choice, the first step of the plan is
    /// the meeting.
    fn meet(&mut self, group: &Ranks, met: &mut Met<'_>, deadline: Deadline) -> Result<(), Stop> {
        let operation = met.operation;
        let lines = &mut self.lines;
        lines.point(operation.kind, 0);
        lines.join(deadline)?;
        lines.say_header(lines.number)?;
        operation.check_sizes(group, lines.me, lines.world)?;
        if met.shape.announced {
            let offer = operation.offer(group, lines.me);
            lines.control.region().write(lines.payload_at(lines.me), &offer.to_bytes())?;
            let reached = match offer.refused {
                Some(why) => Err((lines.me, why)),
                None => {
                    lines.signal(self.runner.queue(), 1)?;
                    lines.wait_all(self.runner.queue(), 1, deadline)?;
                    met.signalled = true;
                    lines.accept(group, &met.shape, deadline)?
                }
            };
            match reached {
                Ok(reached) => {
                    (met.path, met.peers) = (Path::Direct, reached);
                    self.record.iter_mut().for_each(|record| self.recorder.via(record, met.path));
                }
                Err((place, why)) => {
                    let own = if place == lines.me { why } else { Detour::Other };
                    self.record.iter_mut().for_each(|record| self.recorder.not_direct(record, own));
                    not_direct(group, operation, place, why)?;
                }
            }
        }
        Ok(())
    }
}

/// Refuses to go another way than straight between tensors, where the caller or strict mode asks for that.
fn not_direct(group: &Ranks, operation: &Operation, place: usize, why: Detour) -> Result<()> {
    let asked = match (operation.path, group.context.config().strict) {
        (Some(Path::Direct), _) => "it was asked for",
        // What we made for the caller, the caller cannot make better.
        (None, true) if !operation.made_here => "TENSORWIRE_STRICT is set",
        _ => return Ok(()),
    };
    Err(Error::Unsupported {
        what: format!("the direct path for {} ({asked})", operation.kind),
        need: "tensors in memory that alloc() of a group or context gave, on every rank".into(),
        have: format!("of {}: {}", group.who(place), why.reason()),
    })
}
