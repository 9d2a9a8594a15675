//! Operations that are queued and not over: what a rank knows of each until its end.
//!
//! The steps of such an operation are on a device's queue, and its caller has gone on. Here the rank keeps what the steps
//! need, looks at the board for the end, and sees to deadlines. A thread looks every now and then; a caller who waits for an
//! operation looks all the time.
//!
//! # The end
//!
//! An operation is over for a rank when the queues of all ranks that work in it have said so on the board (*done*). If it was
//! cancelled, kernels behind a wait write nothing, but a kernel that had begun before may still write. The word *done* says
//! nothing then: where the wait of a queue for it was ended, it was set in the worker's place. So the queue of each worker sets
//! another word when it has passed the operation (*left*), which no queue waits for. A worker whose steps were not all queued
//! sets it on its host, when its queue has passed those that were. A rank that hears of the cancellation waits for that word, and until its
//! own queue has passed the operation, before it lets go of memory. If that takes longer than a second, the group is broken.
//! The memory stays held until the word comes or the process of the worker ends.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use tensorwire_device::gpu::background;
use tensorwire_device::sync::{AtomicBool, AtomicUsize, Ordering, fence};
use tensorwire_device::{Abort, Deadline, Flag, Mark};

use super::Collectives;
use super::board::{Board, MOST};
use super::cancel::{LEAVE, cancel, cancelled, on_gpu};
use super::explain::Way;
use super::operation::Operation;
use super::plan::Shape;
use super::runner::Reach;
use super::staged::{Overlap, own_queue};
use super::untold;
use super::work::{Completion, Work};
use crate::error::{Error, Result};
use crate::interrupt::{self, Pace, is_interrupt};
use crate::ranks::Ranks;
use crate::shm::control::{Cause, Note, Why};
use crate::shm::member::Member;
use crate::shm::process::Process;
use crate::shm::record::{Begun, State};
use crate::shm::sentence::{not_done, other_work};

/// How often the thread looks.
const LOOK: Duration = Duration::from_micros(500);
/// How long it goes on looking after the last one: the next one soon follows.
const RESTLESS: Duration = Duration::from_millis(100);
/// How long it stays without an operation.
const LINGER: Duration = Duration::from_secs(2);
/// How long it rests between looks at memory that waits for a rank which does not answer.
const LIMBO: Duration = Duration::from_millis(20);

/// The operations of one rank in one group that are queued.
#[derive(Default)]
pub(crate) struct Flights {
    state: Mutex<FlightsState>,
    changed: Condvar,
    /// How many are not over, and of how many failed ones somebody is told just now; looked at without the lock.
    count: AtomicUsize,
    told: AtomicUsize,
    /// Whether there is an error that nobody has been told.
    failed: AtomicBool,
}

#[derive(Default)]
struct FlightsState {
    /// In the order of their numbers.
    flying: VecDeque<Flight>,
    /// Threads that tell somebody how an operation has failed, which is not among `flying` any more.
    telling: Vec<ThreadId>,
    /// What is over for its caller, but not for its memory.
    limbo: Vec<Held>,
    /// Whether the thread is there, and whether it rests until somebody wakes it.
    watched: bool,
    rests: bool,
    /// With their numbers in the list of what the process says at its end.
    untold: Vec<(u64, Error)>,
    /// How the last one was queued.
    way: Option<Way>,
    /// What went on at once in the last operation through memory of the host.
    overlap: Option<Overlap>,
}

/// One of them.
pub(super) struct Flight {
    pub(super) number: u32,
    pub(super) start: Instant,
    pub(super) deadline: Deadline,
    pub(super) late: Why,
    /// Whose queues say on the board when they are done with memory of this rank, this rank's own among them, and where.
    pub(super) done: Vec<(usize, Flag)>,
    pub(super) left: Left,
    /// What the operation was planned from, and where queues say how far they are.
    pub(super) shape: Shape,
    pub(super) board: Arc<Board>,
    /// The operation's word, with the group's beside it.
    pub(super) stop: Abort,
    /// Behind this rank's steps; nothing if none were queued.
    pub(super) mark: Option<Mark>,
    /// Whether the mark tells the end, too: this rank works and says so to nobody, or spreads results behind the plan.
    pub(super) by_mark: bool,
    /// Whether it goes straight between tensors. Otherwise only this rank's own queue is awaited.
    pub(super) direct: bool,
    /// Why it does not go well, and since when this rank knows.
    pub(super) error: Option<(Error, Instant)>,
    /// What the steps use, until they are done.
    pub(super) operation: Operation,
    pub(super) peers: Vec<Reach>,
    pub(super) ending: Ending,
}

/// Where those whose queues are in `done` say that they have left, this rank's own word among them.
pub(super) struct Left {
    pub(super) me: usize,
    pub(super) words: Vec<(usize, Flag)>,
}

impl Left {
    /// Others who have not left.
    fn stuck(&self, number: u32) -> Vec<usize> {
        let mut late = late(&self.words, number);
        late.retain(|&place| place != self.me);
        late
    }

    /// The queue of this rank touches nothing any more.
    fn say(&self, number: u32) {
        self.words.iter().filter(|(place, _)| *place == self.me).for_each(|(_, word)| word.store(number));
    }
}

/// What the end of an operation is told to. It keeps the group alive.
pub(super) struct Ending {
    pub(super) record: Option<Begun>,
    pub(super) completion: Completion,
    pub(super) group: Arc<Collectives>,
}

/// Memory that somebody may still write, though its operation has ended.
struct Held {
    number: u32,
    left: Left,
    mark: Option<Mark>,
    /// The processes of those who have not said that they have left, and this one.
    workers: Vec<Member>,
    me: Member,
    _memory: (Operation, Vec<Reach>),
}

/// How an operation stands.
enum Look {
    Flying,
    Over(Result<()>),
    /// For its caller. Somebody may still write.
    Limbo(Error),
}

/// The places of those who have not set their word.
fn late(words: &[(usize, Flag)], number: u32) -> Vec<usize> {
    words.iter().filter(|(_, flag)| !flag.reached(number)).map(|(place, _)| *place).collect()
}

/// Whose queue has not come as far as needed.
pub(super) fn missing(
    ranks: &Ranks,
    (board, shape, number): (&Board, &Shape, u32),
    done: &[(usize, Flag)],
    mark: Option<&Mark>,
) -> Note {
    // The ranks whose queues have to come before somebody works.
    let come = |&place: &usize| board.arrived(place, number).is_ok_and(|flag| flag.reached(number));
    let arrive = (0..shape.world).filter(|&place| shape.arrives(place));
    let absent: Vec<usize> = arrive.filter(|place| !come(place)).collect();
    let mut busy = late(done, number);
    if absent.is_empty() && busy.is_empty() {
        if is_passed(mark) {
            let text = "a queue has waited too long for another one, and no host saw for which".into();
            return Note { ranks: Vec::new(), text };
        }
        // It works, and says so to nobody.
        busy.push(ranks.control.me());
    }
    let come = absent.is_empty();
    let places = if come { busy } else { absent };
    let many = places.len() > 1;
    let why = if come { not_done(many) } else { other_work(many) };
    let rank = |&place: &usize| ranks.control.ranks().get(place).copied().unwrap_or(place);
    let text = format!("it waited for {}; {why}", ranks.described_queues(&places));
    Note { ranks: places.iter().map(rank).collect(), text }
}

fn unasked(what: &str, error: &Error) -> String {
    format!(
        "{what} failed after it was queued, and nobody asked how it ended; its results may be stale: {error}"
    )
}

/// Whether the device is done. A mark that cannot be asked now is not passed: somebody's memory would go too early. Deadlines
/// see to it that nobody waits for ever.
fn is_passed(mark: Option<&Mark>) -> bool {
    mark.is_none_or(Mark::is_over)
}

impl Held {
    fn is_free(&self) -> bool {
        let passed = is_passed(self.mark.as_ref());
        if passed {
            self.left.say(self.number);
        }
        let gone = || self.workers.iter().all(|worker| worker.process(&self.me) == Process::Gone);
        passed && (self.left.stuck(self.number).is_empty() || gone())
    }
}

impl Flight {
    /// "all_reduce #3 of group "world""
    fn doing(&self) -> String {
        let Self { number, operation, ending, .. } = self;
        format!("{} #{number} of group {:?}", operation.kind, ending.group.ranks.name)
    }

    fn look(&mut self) -> Look {
        if self.error.is_none()
            && !self.stop.is_set()
            && !self.deadline.passed()
            && self.done.iter().any(|(_, flag)| !flag.reached(self.number))
        {
            return Look::Flying;
        }
        let group = self.ending.group.clone();
        let ranks = &group.ranks;
        if self.error.is_none() {
            let done =
                late(&self.done, self.number).is_empty() && (!self.by_mark || is_passed(self.mark.as_ref()));
            fence(Ordering::SeqCst);
            // A queue has waited too long. It cannot say more.
            let gave_up = self.stop.code() == Some(Abort::LATE);
            let error = if self.stop.is_set() && !gave_up {
                ranks
                    .failure()
                    .unwrap_or_else(|| cancelled(ranks, (self.number, &self.stop), &self.doing(), self.start))
            } else if done && !gave_up {
                self.left.say(self.number);
                return Look::Over(Ok(()));
            } else if gave_up || self.deadline.passed() {
                let of = (&*self.board, &self.shape, self.number);
                let note = match self.direct {
                    true => missing(ranks, of, &self.done, self.mark.as_ref()),
                    false => own_queue(ranks),
                };
                cancel(ranks, (self.number, &self.stop), self.late, (&self.doing(), self.start), &note)
            } else {
                return Look::Flying;
            };
            let error = on_gpu(ranks, self.operation.gpu(), error);
            self.error = Some((error, Instant::now()));
        }
        let Some((error, since)) = &self.error else { return Look::Flying };
        // A process that has ended runs nothing any more.
        let mut stuck = self.left.stuck(self.number);
        stuck.retain(|&place| !ranks.is_gone(place));
        let passed = is_passed(self.mark.as_ref());
        if passed {
            self.left.say(self.number);
        }
        if stuck.is_empty() && passed {
            return Look::Over(Err(error.clone()));
        }
        if since.elapsed() <= LEAVE {
            return Look::Flying;
        }
        let place = stuck.first().copied().unwrap_or(ranks.control.me());
        let rank = ranks.control.ranks().get(place).copied().unwrap_or(ranks.rank);
        // Another rank may have found it out before.
        let mut broken = ranks.failure().unwrap_or_else(|| ranks.fail(Cause::Stuck, rank, ""));
        let text = format!(
            "; the tensors of {} may still be written by the queue of {}",
            self.doing(),
            ranks.who(place)
        );
        broken.say_also(&text);
        Look::Limbo(broken)
    }

    /// When the last kernel of those who work for this rank ended, itself among them. Nothing if one of them has not said so, and
    /// where this rank's queue has done more behind the plan.
    fn stamped(&self) -> Option<u64> {
        if !self.direct || self.operation.unpacks() {
            return None;
        }
        let own = self.by_mark.then_some(self.left.me);
        let places = self.done.iter().map(|(place, _)| *place).chain(own);
        let ended = places.map(|place| self.board.stamped(place, self.number));
        ended.collect::<Option<Vec<_>>>()?.into_iter().max()
    }

    /// What may still be written, for later, and what can be told now.
    fn held(self) -> (Held, Ending) {
        let ranks = &self.ending.group.ranks;
        let member = |place: &usize| ranks.members.get(*ranks.control.ranks().get(*place)?).cloned();
        let workers = self.left.stuck(self.number).iter().filter_map(member).collect();
        let held = Held {
            number: self.number,
            workers,
            me: ranks.members[ranks.rank].clone(),
            left: self.left,
            mark: self.mark,
            _memory: (self.operation, self.peers),
        };
        (held, self.ending)
    }
}

impl Flights {
    /// Whether any is not over, or has failed unheard.
    #[inline]
    pub(super) fn is_quiet(&self) -> bool {
        let quiet = |count: &AtomicUsize| count.load(Ordering::Acquire) == 0;
        quiet(&self.count) && quiet(&self.told) && !self.failed.load(Ordering::Acquire)
    }

    /// An error of an operation that nobody was told, to be told now.
    pub(super) fn untold(&self) -> Option<Error> {
        if !self.failed.swap(false, Ordering::AcqRel) {
            return None;
        }
        // One error is enough for a call.
        let (number, mut error) = std::mem::take(&mut self.lock().untold).into_iter().next()?;
        untold::told(number);
        error.say_also("; nobody had asked how that operation ended");
        Some(error)
    }

    /// Nobody has asked how an operation has failed: the next call tells it. Gives the number of the error among those that
    /// nobody was told.
    pub(super) fn unasked(&self, what: &str, error: Error) -> u64 {
        let number = untold::note(unasked(what, &error));
        self.lock().untold.push((number, error));
        self.failed.store(true, Ordering::Release);
        number
    }

    /// Nobody can ask any more: it is logged, unless somebody was told. `number` is that of `unasked`, if it was called.
    pub(super) fn unheard(&self, what: &str, error: Error, number: Option<u64>) {
        let is_untold = |number: u64| self.lock().untold.iter().any(|(other, _)| *other == number);
        if number.is_none_or(is_untold) {
            tracing::error!("{}", unasked(what, &error));
        }
        if number.is_none() {
            self.unasked(what, error);
        }
    }

    /// Somebody has asked for an error after all.
    pub(super) fn heard(&self, number: u64) {
        untold::told(number);
        let mut state = self.lock();
        state.untold.retain(|(other, _)| *other != number);
        self.failed.store(!state.untold.is_empty(), Ordering::Release);
    }

    /// Before operation `number` begins: waits until words of the board are free for it, and those that failed are over.
    pub(super) fn admit(&self, number: u32, deadline: Deadline) -> Result<()> {
        let start = Instant::now();
        let mut pace = Pace::since(start);
        loop {
            self.look();
            let state = self.lock();
            let far = |flight: &Flight| number.wrapping_sub(flight.number) as usize >= MOST;
            let failed = |flight: &Flight| flight.error.is_some();
            // A callback that is told may come here itself.
            let me = std::thread::current().id();
            let told = state.telling.iter().all(|thread| *thread == me);
            if told && !state.flying.front().is_some_and(far) && !state.flying.iter().any(failed) {
                return Ok(());
            }
            drop(state);
            let now = Instant::now();
            if deadline.instant() <= now {
                let text =
                    format!("{MOST} operations are queued before it, and the first of them is not over");
                return Err(Error::timed_out("waiting for queued operations", start.elapsed(), text));
            }
            pace.look(now)?;
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Waits for an operation that was queued with a result, and gives how it ended. What is over was told by the work; until
    /// then it works on the caller's memory.
    pub(super) fn wait_for(&self, work: &Work, queued: Result<()>) -> Result<()> {
        match work.wait() {
            Err(error) if is_interrupt(&error) => {
                if let Some(number) = work.number() {
                    self.interrupt(number, &error);
                }
                let _ = interrupt::without(|| work.wait());
                Err(error)
            }
            ended => both(queued, ended),
        }
    }

    /// The caller of an operation does not want to wait for it any more: cancels it for all ranks.
    pub(super) fn interrupt(&self, number: u32, error: &Error) {
        let mut state = self.lock();
        let Some(flight) = state.flying.iter_mut().find(|flight| flight.number == number) else { return };
        let group = flight.ending.group.clone();
        let note = Note { ranks: Vec::new(), text: error.to_string() };
        let told = cancel(
            &group.ranks,
            (flight.number, &flight.stop),
            Why::Failed,
            (&flight.doing(), flight.start),
            &note,
        );
        flight.error.get_or_insert((told, Instant::now()));
    }

    /// Notes how an operation was queued.
    pub(super) fn went(&self, way: Way) {
        let mut state = self.lock();
        state.way = Some(way.after(state.way.as_ref()));
    }

    /// What went on at once in an operation through memory of the host.
    pub(super) fn overlapped(&self, overlap: Overlap) {
        self.lock().overlap = Some(overlap);
    }

    /// How operations were queued, as a few lines.
    pub(crate) fn explain(&self, me: usize) -> String {
        let state = self.lock();
        let way = state.way.as_ref().map(|way| way.explain(me)).unwrap_or_default();
        way + &state.overlap.as_ref().map(Overlap::explain).unwrap_or_default()
    }

    /// Takes an operation whose steps are queued.
    pub(super) fn add(self: &Arc<Self>, flight: Flight) {
        let mut state = self.lock();
        self.count.fetch_add(1, Ordering::AcqRel);
        state.flying.push_back(flight);
        if !state.watched {
            let flights = self.clone();
            let thread = std::thread::Builder::new().name("tensorwire-flights".into());
            match thread.spawn(move || flights.watch()) {
                Ok(_) => state.watched = true,
                Err(error) => tracing::warn!("starting the thread that watches queued operations: {error}"),
            }
        }
        // A thread that looks anyway is not woken: that costs more than all else here.
        if state.rests {
            self.changed.notify_all();
        }
    }

    /// Looks at all of them, and ends those that are over.
    pub(super) fn look(&self) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut state = self.lock();
        let (mut over, mut told) = (Vec::new(), Vec::new());
        let mut at = 0;
        while let Some(flight) = state.flying.get_mut(at) {
            let look = flight.look();
            if matches!(look, Look::Flying) {
                at += 1;
                continue;
            }
            let Some(flight) = state.flying.remove(at) else { break };
            match look {
                Look::Over(result) => over.push((flight, result)),
                Look::Limbo(error) => {
                    let (start, (held, ending)) = (flight.start, flight.held());
                    state.limbo.push(held);
                    told.push((start, ending, Err(error), None));
                }
                Look::Flying => {}
            }
        }
        let me = std::thread::current().id();
        let failed = told.len() + over.iter().filter(|(_, result)| result.is_err()).count();
        state.telling.extend(std::iter::repeat_n(me, failed));
        self.told.fetch_add(failed, Ordering::AcqRel);
        drop(state);
        // Without a lock: what goes here may be the caller's, and the last handle on the group.
        for (flight, result) in over {
            let ended = if result.is_ok() { flight.stamped() } else { None };
            let Flight { start, operation, peers, mark, ending, .. } = flight;
            if catch_unwind(AssertUnwindSafe(|| drop((operation, peers, mark)))).is_err() {
                tracing::error!("something that an operation held has panicked when it was dropped");
            }
            told.push((start, ending, result, ended));
        }
        for (start, ending, result, ended) in told {
            let failed = result.is_err();
            self.end(start, ending, result, ended);
            if failed {
                let telling = &mut self.lock().telling;
                telling.iter().position(|thread| *thread == me).map(|at| telling.swap_remove(at));
                self.told.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    fn end(&self, start: Instant, ending: Ending, result: Result<()>, ended: Option<u64>) {
        let Ending { record, completion, group } = ending;
        if let Some(record) = &record {
            let state = match &result {
                Ok(()) => State::Done,
                Err(error) if error.is_timeout() => State::TimedOut,
                Err(_) => State::Failed,
            };
            let recorder = &group.ranks.recorder;
            // It was before this host has seen it, whatever two clocks say that were compared a while ago.
            let now = recorder.nanos(Instant::now());
            recorder.end(record, state, ended.map_or(now, |ended| ended.min(now)));
        }
        self.count.fetch_sub(1, Ordering::AcqRel);
        drop(group);
        completion.finish(result, Some(start.elapsed()));
    }

    /// Waits until none is left, and it is known of those that failed whether anybody asks. Each ends by its deadline; who is
    /// told has a second.
    pub(super) fn drain(&self) {
        let mut none_since = None;
        loop {
            self.look();
            if self.count.load(Ordering::Acquire) == 0 {
                let since = *none_since.get_or_insert_with(Instant::now);
                if self.all_told() || since.elapsed() > LEAVE {
                    return;
                }
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Whether nobody is being told that an operation has failed. A callback that is told may ask itself.
    fn all_told(&self) -> bool {
        let me = std::thread::current().id();
        self.lock().telling.iter().all(|thread| *thread == me)
    }

    fn lock(&self) -> MutexGuard<'_, FlightsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The life of the thread.
    fn watch(&self) {
        background();
        let mut busy = Instant::now();
        loop {
            self.look();
            let mut state = self.lock();
            let free: Vec<Held> = state.limbo.extract_if(.., |held| held.is_free()).collect();
            if !state.flying.is_empty() {
                busy = Instant::now();
            }
            state.rests = busy.elapsed() > RESTLESS;
            let pause = match (state.rests, state.limbo.is_empty()) {
                (false, _) => LOOK,
                (true, false) => LIMBO,
                (true, true) => LINGER,
            };
            let (mut state, waited) =
                self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner);
            let idle =
                waited.timed_out() && pause == LINGER && state.flying.is_empty() && state.limbo.is_empty();
            if idle {
                state.watched = false;
                return;
            }
            drop(state);
            drop(free);
        }
    }
}

impl fmt::Debug for Flights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Flights({})", self.count.load(Ordering::Relaxed))
    }
}

/// How an operation ended that was queued with a result. The later error says more: the group may have broken meanwhile.
pub(super) fn both(queued: Result<()>, ended: Result<()>) -> Result<()> {
    match (queued, ended) {
        (Err(error), Err(_)) if is_interrupt(&error) => Err(error),
        (_, Err(error)) => Err(error),
        (queued, Ok(())) => queued,
    }
}
