//! An operation that cannot go on: how it is cancelled, how ranks leave it, and the error that all of them get.

use std::time::{Duration, Instant};

use tensorwire_device::flag::reached;
use tensorwire_device::sync::{Ordering, fence};
use tensorwire_device::{Abort, Deadline, DeviceId};

use super::lines::{END, Lines, Stop, value};
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::{self, Pace, is_interrupt};
use crate::ranks::Ranks;
use crate::shm::control::{Cause, Desk, Note, VERDICTS, Verdict, Why};
use crate::shm::header::Header;

/// How long a peer may take to leave an operation that was cancelled.
pub(super) const LEAVE: Duration = Duration::from_secs(1);

/// An error of an operation on a GPU. Where a server does the work of several processes there, the death of one is more than
/// the loss of a rank.
#[cold]
pub(super) fn on_gpu(group: &Ranks, gpu: Option<&DeviceId>, mut error: Error) -> Error {
    const SERVED: &str = "; MPS serves the GPU, and with that process it may have ended the work of all: if calls on the GPU fail \
                          from now on, start this process again";
    let died = matches!(&error, Error::Peer(fault) if fault.kind == PeerFaultKind::Died);
    let served = |gpu: &DeviceId| group.context.device(gpu).is_ok_and(|device| device.is_served());
    // The error may be that of an exchange which has said so.
    if died && gpu.is_some_and(served) && !error.to_string().contains(SERVED) {
        error.say_also(SERVED);
    }
    error
}

/// How long the driver's word about the end of another process's work may come before the watcher's about that process.
const HEAR: Duration = Duration::from_millis(500);

/// A driver has failed. Where a server does the work of several processes, the death of one may be why: waits for a moment until
/// it is known, so that the error names who died, and not a rank that lives.
#[cold]
pub(super) fn driver_failed(group: &Ranks, gpu: Option<&DeviceId>, error: Error) -> Error {
    let served = |gpu: &DeviceId| group.context.device(gpu).is_ok_and(|device| device.is_served());
    if !matches!(error, Error::Device { .. }) || !gpu.is_some_and(served) {
        return error;
    }
    let end = Instant::now() + HEAR;
    while group.failure().is_none() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    group.failure().map_or(error, |failure| on_gpu(group, gpu, failure))
}

/// Sets the verdict of an operation, unless another rank was faster. Gives the error of the rank that was first.
pub(super) fn cancel(
    group: &Ranks,
    (number, verdict): (u32, &Abort),
    why: Why,
    (doing, start): (&str, Instant),
    note: &Note,
) -> Error {
    // The note may say why the group has failed.
    if let Some(error) = group.failure() {
        return error;
    }
    let (control, me) = (&group.control, group.control.me());
    control.write_reason(number, &Note::write(&note.ranks, &note.text));
    let mine = Verdict { why, place: me }.to_code();
    let code = verdict.set(mine);
    #[cfg(feature = "hooks")]
    super::hooks::gives_up();
    // Of a queue that gave up nobody knows whose it is, but the time was over.
    if code == mine || code == Abort::LATE {
        let text = format!("{}; the time-out {}", note.text, why.whose());
        return Error::timed_out(doing, start.elapsed(), text).about(note.as_read().ranks);
    }
    cancelled(group, (number, verdict), doing, start)
}

/// The error of the rank that cancelled an operation.
pub(super) fn cancelled(
    group: &Ranks,
    (number, verdict): (u32, &Abort),
    doing: &str,
    start: Instant,
) -> Error {
    let Some(Verdict { why, place }) = verdict.code().and_then(Verdict::from_code) else {
        // No host was there to say more.
        if verdict.code() == Some(Abort::LATE) {
            return Error::timed_out(doing, start.elapsed(), "a queue waited in it for too long");
        }
        return Error::Aborted(format!("{doing} was given up"));
    };
    let Note { ranks, text: note } = Note::read(&group.control.reason(place, number));
    let who = group.who(place);
    if why.is_timeout() {
        let text = format!("{note}; {who} was the first to give up, and the time-out {}", why.whose());
        return Error::timed_out(doing, start.elapsed(), text).about(ranks);
    }
    if why == Why::FarLate {
        return Error::timed_out(doing, start.elapsed(), note).about(ranks);
    }
    if why == Why::Far {
        let rank = ranks.first().copied();
        let who = rank
            .and_then(|rank| group.members.get(rank))
            .map_or_else(|| "a rank".into(), ToString::to_string);
        let text = format!("it could not take part in {doing}: {note}");
        return Error::peer(PeerFaultKind::Failed, who, rank, text);
    }
    if why == Why::LateBefore {
        let text = format!("{who} had given up before: {note}");
        return Error::timed_out(doing, start.elapsed(), text).about(ranks);
    }
    let rank = group.control.ranks().get(place).copied();
    Error::peer(PeerFaultKind::Failed, who, rank, format!("it could not take part in {doing}: {note}"))
}

impl Lines {
    /// Ends the operation and gives the error that it means to this rank.
    pub(super) fn stopped(
        &mut self,
        group: &Ranks,
        header: &Header,
        stop: Stop,
        (start, deadline): (Instant, Deadline),
        late: Why,
    ) -> Error {
        let doing = format!("{} #{} of group {:?}", header.kind, header.number, group.name);
        let error = match stop {
            Stop::TimedOut(absent) => {
                let ranks: Vec<usize> = absent.iter().map(|&place| self.rank_at(place)).collect();
                let text = self.missing(group, &absent);
                self.cancel(group, late, &doing, &Note { ranks, text }, start)
            }
            Stop::QueuesLate(note) => self.cancel(group, late, &doing, &note, start),
            // What this rank met may only follow from the failure of the group.
            Stop::Own(error) => match group.failure().filter(|_| !is_interrupt(&error)) {
                Some(failure) => failure,
                None => {
                    let why = if error.is_timeout() { late } else { Why::Failed };
                    let note = Note { ranks: error.ranks().to_vec(), text: error.to_string() };
                    self.cancel(group, why, &doing, &note, start);
                    error
                }
            },
            // Its time is not over, even if that of the operation before was.
            Stop::Untold(error) => group.failure().unwrap_or_else(|| {
                let text = format!("an operation before it has failed there: {error}");
                let note = Note { ranks: error.ranks().to_vec(), text };
                self.cancel(group, Why::Failed, &doing, &note, start);
                error
            }),
            Stop::Before(error) => group.failure().unwrap_or_else(|| {
                let note = Note { ranks: error.ranks().to_vec(), text: error.to_string() };
                let why = if error.is_timeout() { Why::LateBefore } else { Why::Before };
                self.cancel(group, why, &doing, &note, start);
                error
            }),
            Stop::Far(refusal) => group.failure().unwrap_or_else(|| {
                let mut note = refusal.note;
                if !refusal.by.is_empty() {
                    note.text = format!("{}; {}", note.text, refusal.by);
                }
                let why = if refusal.late { Why::FarLate } else { Why::Far };
                if !refusal.late {
                    note.ranks = vec![refusal.rank];
                }
                self.cancel(group, why, &doing, &note, start);
                self.cancelled(group, &doing, start)
            }),
            Stop::Elsewhere => Error::bug("an operation goes on that other ranks did not come for"),
            Stop::Aborted => match group.failure() {
                Some(error) => error,
                None => self.cancelled(group, &doing, start),
            },
            Stop::Mismatch(number) => self.differ(group, number, deadline),
            Stop::Left(place) => {
                self.control.await_end(place, deadline, self.stop());
                self.fail(group, Cause::Left, place, "")
            }
            Stop::Behind(place) => self.fail(group, Cause::Stuck, place, ""),
        };
        self.leave_operation();
        // Once is enough: the others leave soon.
        if is_interrupt(&error) {
            let _ = interrupt::without(|| self.await_others(group));
            return error;
        }
        match self.await_others(group) {
            Ok(()) => error,
            Err(broken) => broken,
        }
    }

    fn cancel(&self, group: &Ranks, why: Why, doing: &str, note: &Note, start: Instant) -> Error {
        cancel(group, (self.number, self.stop()), why, (doing, start), note)
    }

    /// The error of an operation that another rank has cancelled.
    pub(super) fn cancelled(&self, group: &Ranks, doing: &str, start: Instant) -> Error {
        cancelled(group, (self.number, self.stop()), doing, start)
    }

    pub(super) fn rank_at(&self, place: usize) -> usize {
        self.control.ranks().get(place).copied().unwrap_or(place)
    }

    /// Fails the group for good.
    pub(super) fn fail(&self, group: &Ranks, cause: Cause, place: usize, note: &str) -> Error {
        let rank = self.control.ranks().get(place).copied().unwrap_or(group.rank);
        group.fail(cause, rank, note)
    }

    fn leave_operation(&mut self) {
        // Where others may still look at the line for what was in it before, they are told later: the verdict is enough
        // for ranks that wait in this operation.
        self.unsaid = true;
        if self.joined {
            self.say_left_of(self.number);
        }
        self.inside[self.me].store(self.number.wrapping_mul(2).wrapping_add(2));
        self.last = None;
    }

    /// Says that this rank has left the operation before this one, if it could not be said before.
    pub(super) fn say_left(&mut self) {
        if self.unsaid {
            self.say_left_of(self.number.wrapping_sub(1));
        }
    }

    /// With what it had come for: who finished that operation without this rank looks at it in the next one.
    fn say_left_of(&mut self, number: u32) {
        self.unsaid = false;
        if let Err(error) = self.say_header(number) {
            tracing::warn!("leaving an operation: {error}");
        }
        self.progress[self.me][number as usize % Desk::STEPS].signal(value(number, END));
    }

    /// Whether no other rank is inside the operation any more; gives them a second. For who owns memory that they write to, in a
    /// group that has failed.
    pub(super) fn others_are_out(&self, group: &Ranks) -> bool {
        let inside = self.number.wrapping_mul(2).wrapping_add(1);
        fence(Ordering::SeqCst);
        let start = Instant::now();
        let is_out = |place: usize| {
            while self.inside[place].load() == inside && !group.is_gone(place) {
                if start.elapsed() > LEAVE {
                    return false;
                }
                std::thread::sleep(Duration::from_micros(100));
            }
            true
        };
        (0..self.world).filter(|&place| place != self.me).all(is_out)
    }

    /// Waits until no rank is inside the operation any more. A rank that is inside may still read slots and memory of others.
    fn await_others(&self, group: &Ranks) -> Result<()> {
        let inside = self.number.wrapping_mul(2).wrapping_add(1);
        // A rank says that it is inside and then looks at the verdict (`Lines::signal`); this one has set the verdict and now
        // looks who is inside. With a fence on both sides, one of the two sees the other.
        fence(Ordering::SeqCst);
        let start = Instant::now();
        let mut pace = Pace::since(start);
        for place in (0..self.world).filter(|&place| place != self.me) {
            while self.inside[place].load() == inside {
                // That the group is broken says more than that time was over.
                if let Some(error) = group.failure() {
                    return Err(error);
                }
                let now = Instant::now();
                if now.saturating_duration_since(start) > LEAVE {
                    return Err(self.fail(group, Cause::Stuck, place, ""));
                }
                // Nobody knows any more when that rank has left the operation.
                pace.look(now).inspect_err(|_| _ = self.fail(group, Cause::Stuck, place, ""))?;
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(())
    }

    /// After a cancelled operation: waits until everybody has left the one before it too. A rank that was only slow may
    /// still read slots and lines there, which this rank is about to write.
    pub(super) fn await_late(&self, deadline: Deadline) -> Result<(), Stop> {
        let (left, mut pace) = (self.number.wrapping_sub(1).wrapping_mul(2), self.pace);
        let is_late = |place: &usize| {
            // A rank that has never come has yet to read what others have finished without it.
            let at = match self.inside[*place].load() {
                0 => 2,
                at => at,
            };
            !reached(at, left)
        };
        // Verdicts are kept for so many operations.
        let here = self.number.wrapping_mul(2);
        let is_far = |place: &usize| {
            let behind = here.wrapping_sub(self.inside[*place].load()) as i32;
            behind > VERDICTS as i32 - 2
        };
        loop {
            let others = (0..self.world).filter(|&place| place != self.me);
            let late: Vec<usize> = others.clone().filter(is_late).collect();
            if late.is_empty() {
                return Ok(());
            }
            if let Some(place) = others.clone().find(is_far) {
                return Err(Stop::Behind(place));
            }
            if self.stop().is_set() {
                return Err(Stop::Aborted);
            }
            let now = Instant::now();
            if deadline.instant() <= now {
                return Err(Stop::TimedOut(late));
            }
            pace.look(now).map_err(Stop::Own)?;
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Whom it waited for, and what they do.
    fn missing(&self, group: &Ranks, absent: &[usize]) -> String {
        match absent {
            [] => "its time was over before its turn came".into(),
            _ => format!("it waited for {}", group.described(absent)),
        }
    }
}
