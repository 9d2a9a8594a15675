//! Puts the steps of a plan on a device's queue. The ranks have met, so every step that others wait for is on its way.
//!
//! Signals and waits are words of the board: each rank's queue says that it has *arrived* at the operation, and whoever
//! works says that it is *done* ([`plan`](super::plan)).

use std::cell::Cell;
use std::time::{Duration, Instant};

use tensorwire_device::sync::spin_loop;
use tensorwire_device::{Deadline, Flag, Queue};

use super::board::Board;
use super::cancel::LEAVE;
use super::lines::{Lines, Stop};
use super::plan::{ARRIVED, DONE, Plan, Step, Who};
use super::runner::{Job, Met};
use crate::error::{Error, Result};
use crate::interrupt::Pace;
use crate::shm::record::Says;

/// Queues all steps. Where the ranks of a group are threads of one process, the calling thread does the waits. Gives whether
/// it did.
pub(super) fn queue(
    lines: &Lines,
    (board, glances): (&Board, &Glances),
    met: &Met<'_>,
    plan: &Plan,
    queue: &mut dyn Queue,
    (deadline, by_thread): (Deadline, bool),
) -> Result<bool, Stop> {
    let mut waited = false;
    let job = Job { number: lines.number, operation: met.operation, peers: &met.peers };
    let operation = met.operation;
    if works(plan) {
        queue.stamp(&board.stamp(lines.me, lines.number)?)?;
    }
    let small = operation.input.len().max(operation.output.len()).saturating_mul(lines.world) <= SMALL;
    let mut at = 0;
    while let Some(step) = plan.steps.get(at) {
        lines.point(met.operation.kind, at + 2);
        let run = plan.together(at);
        match step {
            Step::Copy { caching, .. } => {
                let mut copies = Vec::with_capacity(run.len());
                for step in &plan.steps[run.clone()] {
                    let Step::Copy { into, from, .. } = step else { continue };
                    job.copy(lines, into, from, |dst, src| {
                        copies.push((dst, src));
                        Ok(())
                    })?;
                }
                queue.copy_all(&copies, *caching)?;
            }
            Step::Reduce { inputs, outputs, caching } => {
                job.reduce(lines, queue, plan.parts(inputs), plan.parts(outputs), *caching)?;
            }
            Step::Signal(word) => queue.signal(&flag(board, lines.me, lines.number, *word)?, lines.number)?,
            Step::Wait(_, first) => {
                let mut flags = Vec::new();
                for step in &plan.steps[run.clone()] {
                    let Step::Wait(who, word) = step else { continue };
                    for place in places(*who, lines) {
                        flags.push((place, flag(board, place, lines.number, *word)?));
                    }
                }
                let arrived =
                    || board.arrived(lines.me, lines.number).is_ok_and(|word| word.reached(lines.number));
                // Nobody is done before this rank has arrived, and soon only with little.
                if *first == ARRIVED || (small && arrived()) {
                    glances.look(*first, &flags, lines.number);
                }
                waited |= wait(lines, queue, &flags, (deadline, by_thread))?;
            }
        }
        at = run.end.max(at + 1);
    }
    // Whoever hears that the operation was cancelled waits for this word: no queue does, so nobody else sets it.
    if says(plan).done {
        queue.signal(&board.left(lines.me, lines.number)?, lines.number)?;
    }
    lines.point(met.operation.kind, plan.steps.len() + 2);
    Ok(waited)
}

/// Whom a step waits for.
fn places(who: Who, lines: &Lines) -> impl Iterator<Item = usize> + use<> {
    let (me, range) = match who {
        Who::All => (lines.me, 0..lines.world),
        Who::One(place) => (usize::MAX, place..place + 1),
    };
    range.filter(move |&place| place != me)
}

fn flag(board: &Board, place: usize, number: u32, word: u32) -> Result<Flag> {
    match word {
        ARRIVED => board.arrived(place, number),
        DONE => board.done(place, number),
        _ => Err(Error::bug(format!("a queued plan with word {word}"))),
    }
}

/// Has the queue wait for words of the board. Where it cannot, this thread does; gives whether it did.
fn wait(
    lines: &Lines,
    queue: &mut dyn Queue,
    flags: &[(usize, Flag)],
    (deadline, by_thread): (Deadline, bool),
) -> Result<bool, Stop> {
    let number = lines.number;
    let list: Vec<(&Flag, u32)> = flags.iter().map(|(_, flag)| (flag, number)).collect();
    // A rank that is a thread of this process may queue what the wait needs later, behind the wait.
    if !by_thread && queue.try_wait_all(&list, lines.stop(), after_hosts(deadline))? {
        return Ok(false);
    }
    let mut pace = Pace::new();
    for (_, flag) in flags {
        let mut flag = flag.clone();
        lines.spin().into_iter().for_each(|spin| flag.set_spin(spin));
        loop {
            let slice = pace.until(deadline);
            match flag.wait(number, lines.stop(), slice) {
                Err(tensorwire_device::Error::TimedOut) if slice < deadline => {
                    pace.look(std::time::Instant::now()).map_err(Stop::Own)?;
                }
                Err(tensorwire_device::Error::TimedOut) => {
                    let late = flags.iter().filter(|(_, flag)| !flag.reached(number));
                    return Err(Stop::TimedOut(late.map(|(place, _)| *place).collect()));
                }
                other => break other?,
            }
        }
    }
    // A word may have been set in its owner's place, after the abort word was.
    if lines.stop().is_set() { Err(Stop::Aborted) } else { Ok(true) }
}

/// How long a host looks at words before it has the queue wait for them. A wait costs the device a microsecond or two for
/// each word. Where several processes share a device it costs more, because each of them has to get its turn. If the queues
/// are idle and the operation is small, all words come in less time than that takes.
const GLANCE: Duration = Duration::from_micros(30);
/// After so many looks in vain, only one operation in [`AGAIN`] is looked at: the queues are busy.
const VAIN: u32 = 4;
const AGAIN: u32 = 16;
/// Bytes of all ranks that a device works through in less than a glance.
const SMALL: usize = 16 << 20;

/// How looks at words went so far, for those that say *arrived* and for those that say *done*.
#[derive(Debug, Default)]
pub(super) struct Glances {
    arrived: Cell<u32>,
    done: Cell<u32>,
}

impl Glances {
    /// Looks for a while until the words are there. What is not there then, the queue waits for.
    fn look(&self, word: u32, flags: &[(usize, Flag)], number: u32) {
        let vain = if word == ARRIVED { &self.arrived } else { &self.done };
        let count = vain.get();
        if count >= VAIN && !count.is_multiple_of(AGAIN) {
            vain.set(count.wrapping_add(1));
            return;
        }
        let begin = Instant::now();
        while !flags.iter().all(|(_, flag)| flag.reached(number)) {
            if begin.elapsed() >= GLANCE {
                return vain.set(count.wrapping_add(1));
            }
            spin_loop();
        }
        vain.set(0);
    }
}

/// When a queue gives up by itself. Hosts do so before, because they can say whom they waited for; a queue cannot, and it sets
/// the words that are missing.
pub(super) fn after_hosts(deadline: Deadline) -> Deadline {
    deadline.instant().checked_add(LEAVE).map_or(deadline, Deadline::at)
}

/// Which words the queue of this rank sets.
pub(super) fn says(plan: &Plan) -> Says {
    let sets = |word: u32| plan.steps.iter().any(|step| matches!(step, Step::Signal(set) if *set == word));
    Says { arrived: sets(ARRIVED), done: sets(DONE) }
}

/// Whether a rank works in an operation, for itself or for others.
pub(super) fn works(plan: &Plan) -> bool {
    plan.steps.iter().any(|step| matches!(step, Step::Copy { .. } | Step::Reduce { .. }))
}

/// Whose word says that nobody uses memory of this rank any more: of those who work for it, and its own if it works for
/// others. The second is whether it works and tells nobody.
pub(super) fn enders(plan: &Plan, lines: &Lines) -> (Vec<usize>, bool) {
    let (mut places, mut says) = (Vec::new(), false);
    for step in &plan.steps {
        match step {
            Step::Wait(who, DONE) => places.extend(self::places(*who, lines)),
            Step::Signal(DONE) => says = true,
            _ => {}
        }
    }
    if says {
        places.push(lines.me);
    }
    (places, works(plan) && !says)
}
