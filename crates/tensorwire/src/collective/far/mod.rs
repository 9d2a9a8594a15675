//! Collectives of a group on several hosts.
//!
//! An operation has three parts. The ranks of each host *collect* at their leader what other hosts need: an operation of that
//! host. The leaders exchange it ([`wire`]). Then each leader *spreads* what has come: one more operation of its host. Both
//! operations of a host are those that a group on one host has, with its plans, its meeting and its verdicts. They say in
//! their headers what the caller called, so that ranks of a host see a mismatch as they always do.
//!
//! Numbers: every operation takes two on every host, whatever happens. A rank for which it cannot go on enters the second part
//! and cancels it. So all ranks of a host hear why, and the next operation has the same number everywhere. Its leader tells the
//! other hosts, whose leaders do the same there. docs/algorithms.md has the parts of each kind, and the order of reductions.

mod cost;
mod parts;
mod wide;
mod wire;

use std::cell::{Cell, OnceCell};
use std::time::{Duration, Instant};

use tensorwire_device::flag::LINE;
use tensorwire_device::host::private;
use tensorwire_device::{Abort, Caching, Deadline, Queue, Span};

use super::buffer::Buffer;
use super::cancel::cancelled;
use super::exec::Executor;
use super::lines::Stop;
use super::operation::Operation;
use crate::error::{Error, Result};
use crate::interrupt::{Pace, is_interrupt};
use crate::ranks::Ranks;
use crate::shm::control::{Cause, Note, Verdict, Why};
use crate::shm::decided::{DECIDE, Refusal};
use crate::shm::header::Header;
use crate::shm::kind::Kind;
use crate::shm::mismatch::{Seen, note};
pub use cost::{ExchangeCost, HostsPlan, NearCost, hosts_plan};
use parts::{Layout, Parts, Traffic};
use wire::{Until, Wire};

/// How much longer than its leader a rank waits: the leader knows better what is missing.
const GRACE: Duration = Duration::from_millis(100);
/// How long a leader looks for bytes at most before it sleeps. Another host takes longer to answer than a rank of this one, and two
/// leaders of one machine may have the same core.
const SPIN: Duration = Duration::from_micros(100);
/// A leader that was away for so long first hears whether the operation that it comes to is over already. What others have sent
/// before they gave up may be all that it needs.
const AWAY: Duration = Duration::from_millis(10);
/// How often a rank that waits for the decision looks whether the group has failed.
const LOOK: Duration = Duration::from_millis(10);
/// How long a host that has found a mismatch waits for others, so that the error can name all.
const GATHER: Duration = Duration::from_secs(1);

/// What a rank of a group on several hosts has beside the operations of its host.
#[derive(Debug)]
pub(super) struct Far {
    /// The leader's way to other leaders.
    wire: Option<Wire>,
    room: Room,
    /// How many operations there were, and when the last one ended.
    number: u32,
    ended: Option<Instant>,
}

impl Far {
    /// Nothing where all ranks are on one host.
    pub(super) fn open(ranks: &Ranks) -> Result<Option<Box<Self>>> {
        if ranks.hosts.len() == 1 {
            return Ok(None);
        }
        let wire = if ranks.control.leads() { Some(Wire::open(ranks)?) } else { None };
        Ok(Some(Box::new(Self { wire, room: Room::default(), number: 0, ended: None })))
    }

    /// This rank has closed the group.
    pub(super) fn close(&mut self) {
        if let Some(wire) = &mut self.wire {
            wire.close();
        }
    }
}

/// Refuses what only ranks of one host can do, before anything is begun.
pub(super) fn check(ranks: &Ranks, operation: &Operation) -> Result<()> {
    let what = match operation {
        _ if operation.gpu().is_some() => "tensors of GPUs in a collective".to_owned(),
        _ if operation.chained().is_some() || operation.kind.tells_numbers() => {
            format!("{} of group {:?}", operation.kind, ranks.name)
        }
        Operation { path: Some(path), .. } => format!("the {path} path for {}", operation.kind),
        _ => return Ok(()),
    };
    Err(Error::Unsupported {
        what,
        need: "all ranks on one host".into(),
        have: format!("{} hosts", ranks.hosts.len()),
    })
}

/// Memory of this process alone that operations use one after the other: pages that are there already cost nothing.
#[derive(Debug, Default)]
struct Room {
    kept: OnceCell<Span>,
    used: Cell<usize>,
}

impl Room {
    /// Bytes that are kept.
    const KEPT: usize = 16 << 20;

    /// Memory for the operation that runs. What does not fit is new, and given back behind it.
    fn take(&self, bytes: usize) -> Result<Span> {
        let start = self.used.get();
        let end = start + bytes.next_multiple_of(LINE);
        if end > Self::KEPT {
            return Ok(Span::whole(private(bytes)?).slice(0..bytes)?);
        }
        let kept = match self.kept.get() {
            Some(kept) => kept,
            None => {
                let kept = Span::whole(private(Self::KEPT)?);
                self.kept.get_or_init(|| kept)
            }
        };
        self.used.set(end);
        Ok(kept.slice(start..start + bytes)?)
    }

    /// The operation is over.
    fn clear(&self) {
        self.used.set(0);
    }
}

impl Executor {
    /// The next operation of a group on several hosts.
    #[cold]
    pub(super) fn next_far(
        &mut self,
        group: &Ranks,
        operation: &Operation,
        time: (Instant, Deadline),
    ) -> Result<()> {
        let Some(mut far) = self.far.take() else {
            return Err(Error::bug("an operation has lost its hosts"));
        };
        let ended = self.through(group, &mut far, operation, time);
        far.ended = Some(Instant::now());
        self.far = Some(far);
        ended
    }

    fn through(
        &mut self,
        group: &Ranks,
        far: &mut Far,
        operation: &Operation,
        (start, deadline): (Instant, Deadline),
    ) -> Result<()> {
        far.number = far.number.wrapping_add(1);
        far.room.clear();
        if far.wire.is_some() {
            if far.ended.is_none_or(|ended| start.saturating_duration_since(ended) > AWAY) {
                group.context.watcher().hear();
            }
            group.control.decided.come(far.number, &group.control);
        }
        let layout = Layout { hosts: &group.hosts, rank: group.rank };
        let parts = operation
            .check_sizes(group, group.rank, group.world())
            .and_then(|()| Parts::new(layout, operation, &far.room, self.runner.queue()));
        let (collected, parts) = match parts {
            Ok(parts) => (self.near(group, operation, &parts.collect, (start, deadline)), Some(parts)),
            Err(error) => (Err(self.refuse(group, operation, start, Stop::Own(error))), None),
        };
        let collected =
            collected.and_then(|()| parts.ok_or_else(|| Error::bug("an operation has lost its parts")));
        if let Some(failure) = group.failure() {
            return Err(collected.err().filter(is_interrupt).unwrap_or(failure));
        }
        let mut parts = match (collected, &mut far.wire) {
            (Ok(parts), _) => parts,
            (Err(error), wire) => {
                if let Some(wire) = wire {
                    let refusal = refusal_of(group, &error, operation);
                    give_up(group, (wire, far.number), refusal);
                }
                let stop = if self.hears(group, &error) { None } else { Some(Stop::Before(error.clone())) };
                return Err(match stop {
                    Some(stop) => {
                        self.refuse(group, operation, start, stop);
                        group.failure().filter(|_| !is_interrupt(&error)).unwrap_or(error)
                    }
                    None => self.refuse(group, operation, start, Stop::Aborted),
                });
            }
        };
        let mut until = Deadline::at(deadline.instant().checked_add(GRACE).unwrap_or(deadline.instant()));
        if let Some(wire) = &mut far.wire {
            let number = far.number;
            if let Err(stop) = self.exchange(group, (wire, number), operation, &mut parts, (start, deadline))
            {
                let error = self.end_exchange(group, (wire, number), operation, start, stop);
                return Err(error);
            }
            group.control.decided.has_all();
            // What was begun in time is finished, and the others wait as long.
            until = Deadline::at(until.instant().max(Instant::now()));
        }
        self.tells = far.wire.is_none();
        let spread = self.near(group, operation, &parts.spread, (start, until));
        self.tells = false;
        spread?;
        parts.finish(self.runner.queue())
    }

    /// Has the leaders of all hosts give each other what was collected.
    fn exchange(
        &mut self,
        group: &Ranks,
        (wire, number): (&mut Wire, u32),
        operation: &Operation,
        parts: &mut Parts,
        (_, deadline): (Instant, Deadline),
    ) -> Result<(), Stop> {
        let header = operation.header(self.lines.number).to_bytes();
        let Traffic { given, wanted, reduction } = &mut parts.traffic;
        wire.begin(number, header, std::mem::take(given)).map_err(Stop::Own)?;
        std::mem::take(wanted).into_iter().for_each(|wanted| wire.want(wanted));
        let spin = self.lines.spin().unwrap_or_default().min(SPIN);
        let mut until =
            Until { stop: self.lines.next_stop(), deadline, spin, pace: Pace::since(Instant::now()) };
        if let Some(reduction) = reduction {
            for index in 0..reduction.pieces() {
                wire.run(group, &mut until, |wire| wire.has_piece(index))?;
                // Where the result takes the place of what was sent, that has to be gone.
                if !reduction.apart {
                    wire.run(group, &mut until, Wire::has_sent)?;
                }
                let made = reduction.make(index, self.runner.queue()).map_err(Stop::Own)?;
                wire.made(index + 1);
                reduction.to.iter().for_each(|host| wire.give_made(*host, Buffer::one(made.clone())));
            }
        }
        wire.run(group, &mut until, Wire::is_over)
    }

    /// The exchange has failed: tells the other hosts and the ranks of this one.
    #[cold]
    fn end_exchange(
        &mut self,
        group: &Ranks,
        (wire, number): (&mut Wire, u32),
        operation: &Operation,
        start: Instant,
        stop: Stop,
    ) -> Error {
        if matches!(stop, Stop::Elsewhere) {
            return self.differ(group, wire, operation);
        }
        let spread = self.lines.number.wrapping_add(1);
        let doing = format!("{} #{spread} of group {:?}", operation.kind, group.name);
        let (own, stop) = match stop {
            // A rank of this host has given up the second part, or the group has failed.
            Stop::Aborted => {
                if let Some(failure) = group.failure() {
                    return failure;
                }
                let error = cancelled(group, (spread, self.lines.next_stop()), &doing, start);
                (refusal_of(group, &error, operation), Stop::Before(error))
            }
            Stop::QueuesLate(note) => {
                let own = Refusal { late: true, rank: group.rank, note, by: gave_up(group, operation) };
                (own.clone(), Stop::Far(own))
            }
            Stop::Own(error) => (refusal_of(group, &error, operation), Stop::Own(error)),
            other => (refusal_of(group, &Error::bug(format!("{other:?}")), operation), other),
        };
        let heard = match &stop {
            Stop::Own(error) => Some(error.clone()),
            Stop::Far(_) => Some(Error::timed_out(&doing, start.elapsed(), "")),
            _ => None,
        };
        give_up(group, (wire, number), own);
        let stop = match heard {
            Some(error) if self.hears(group, &error) => Stop::Aborted,
            _ => stop,
        };
        let error = match &stop {
            Stop::Own(error) => Some(error.clone()),
            _ => None,
        };
        let told = self.refuse(group, operation, start, stop);
        match error {
            Some(error) if group.failure().is_none() || is_interrupt(&error) => error,
            _ => told,
        }
    }

    /// Behind an error of this operation that other hosts may see in another way: waits until it is decided what it means to all.
    /// The verdict of the second part says it. Gives false for what is this rank's own, or if nobody decides in time.
    fn hears(&self, group: &Ranks, error: &Error) -> bool {
        if !matches!(error, Error::TimedOut { .. } | Error::Peer(_)) {
            return false;
        }
        self.decided(group, self.lines.next_stop())
    }

    /// Waits until the verdict is there.
    fn decided(&self, group: &Ranks, verdict: &Abort) -> bool {
        let end = Deadline::after(DECIDE);
        while verdict.code().is_none() && group.failure().is_none() && !end.passed() {
            let _ = verdict.wait(Deadline::after(LOOK).min(end));
        }
        verdict.code().is_some()
    }

    /// A rank gives up the second part of an operation, in which it waits for its leader. That one may wait in the first part, or may
    /// not have come: so the verdict of the first part says it, too, and the watcher tells other hosts. If time was over, it is then
    /// decided for all what that means.
    #[cold]
    pub(super) fn tells_others(&self, group: &Ranks, called: &Operation, stop: Stop) -> Stop {
        let (why, note) = match &stop {
            Stop::TimedOut(absent) => {
                let ranks = absent.iter().map(|&place| self.lines.rank_at(place)).collect();
                (called.late, Note { ranks, text: format!("it waited for {}", group.described(absent)) })
            }
            Stop::Own(error) => {
                let why = if error.is_timeout() { called.late } else { Why::Failed };
                (why, Note { ranks: error.ranks().to_vec(), text: error.to_string() })
            }
            _ => return stop,
        };
        let first = self.lines.number.wrapping_sub(1);
        group.control.write_reason(first, &Note::write(&note.ranks, &note.text));
        if let Ok(verdict) = group.control.verdict(first) {
            verdict.set(Verdict { why, place: group.control.me() }.to_code());
        }
        match stop {
            Stop::TimedOut(_) if self.decided(group, self.lines.stop()) => Stop::Aborted,
            stop => stop,
        }
    }

    /// Ranks of another host came for something else: fails the group.
    #[cold]
    fn differ(&mut self, group: &Ranks, wire: &mut Wire, operation: &Operation) -> Error {
        let number = self.lines.number;
        let calls = wire.calls(group, Deadline::after(GATHER));
        // Of another host only the leader's call is known. Those of this host are in their lines, where they have come.
        let of_leader = |(ranks, call): (&Vec<usize>, &Option<_>)| {
            Some((*ranks.first()?, Header::from_bytes(call.as_ref()?)?))
        };
        let far = group.hosts.iter().zip(&calls).filter(|(ranks, _)| !ranks.contains(&group.rank));
        let near = group.control.ranks().iter().enumerate();
        let near = near.filter_map(|(place, &rank)| Some((rank, group.control.header(place, number)?)));
        let mut known: Vec<(usize, Header)> = far.filter_map(of_leader).chain(near).collect();
        known.sort_unstable_by_key(|(rank, _)| *rank);
        let seen = |(rank, call)| Seen { rank, call: Some(call), before: None, after: None, left: false };
        let seen: Vec<Seen> = known.into_iter().map(seen).collect();
        let rest = (number, operation.rest());
        *group.failing.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(rest);
        group.fail(Cause::Mismatch, group.rank, &note(number, &seen))
    }

    /// The next operation of this host, a part of what was called. The way of one host is not built into this one again.
    #[inline(never)]
    fn near(
        &mut self,
        group: &Ranks,
        called: &Operation,
        part: &Operation,
        time: (Instant, Deadline),
    ) -> Result<()> {
        self.next_near(group, called, part, time)
    }

    /// Enters the next operation of this host and cancels it. Gives the error that all of its ranks get.
    fn refuse(&mut self, group: &Ranks, operation: &Operation, start: Instant, stop: Stop) -> Error {
        self.refuse_next(stop);
        let mut nothing = Operation::new(Kind::Barrier, operation.dtype);
        nothing.late = operation.late;
        match self.near(group, operation, &nothing, (start, Deadline::at(start))) {
            Err(error) => error,
            Ok(()) => Error::bug("an operation went on that was refused"),
        }
    }
}

/// An operation does not go on here: the hub hears why, and decides for all.
fn give_up(group: &Ranks, (wire, number): (&mut Wire, u32), refusal: Refusal) {
    wire.give_up(number);
    group.context.watcher().refuse(group.id, number, refusal);
}

fn member(group: &Ranks, rank: usize) -> String {
    group.members.get(rank).map_or_else(|| format!("rank {rank}"), ToString::to_string)
}

/// What other hosts are told of an error.
fn refusal_of(group: &Ranks, error: &Error, operation: &Operation) -> Refusal {
    let Error::TimedOut { missing, ranks, .. } = error else {
        let text = match error {
            Error::Peer(fault) => format!("{}: {}", fault.who, fault.detail),
            other => other.to_string(),
        };
        let note = Note { ranks: error.ranks().to_vec(), text };
        return Refusal { late: false, rank: group.rank, note, by: String::new() };
    };
    // Who was the first to give up, where it was another rank of this host.
    let other = missing.find(GAVE_UP).and_then(|end| missing[..end].rfind("; "));
    let own = missing.rfind("; the time-out ");
    let (text, by) = match (other, own) {
        (Some(at), _) => (&missing[..at], missing[at + 2..].to_owned()),
        (None, at) => (&missing[..at.unwrap_or(missing.len())], gave_up(group, operation)),
    };
    let note = Note { ranks: ranks.clone(), text: text.to_owned() };
    Refusal { late: true, rank: group.rank, note, by }
}

const GAVE_UP: &str = " was the first to give up";

/// This rank's time is over.
fn gave_up(group: &Ranks, operation: &Operation) -> String {
    format!("{}{GAVE_UP}, and the time-out {}", member(group, group.rank), operation.late.whose())
}

/// Copies the bytes of one buffer to another.
fn copy(from: &Buffer, into: &Buffer, queue: &mut dyn Queue) -> Result<()> {
    let (mut done, len) = (0, from.len().min(into.len()));
    while done < len {
        let (src, dst) = (from.run(done, len - done)?, into.run(done, len - done)?);
        let run = src.len().min(dst.len());
        let (src, dst) = (src.slice(0..run)?, dst.slice(0..run)?);
        if !dst.is_same(src) {
            queue.copy(dst, src, Caching::Keep)?;
        }
        done += run.max(1);
    }
    Ok(())
}
