//! Signals between the ranks of a handle: counters in the [books](super::book).
//!
//! A rank that sends on a channel raises its own counter in the other rank's book. The other rank waits until that counter has
//! reached the number of the signals that it has waited for. So signals are never lost, however many come before they
//! are waited for. Each handle of each group has its own book, and each channel its own lines: they never meet.
//!
//! Signals of one channel to one rank keep the order of their calls, on whatever queues they are: a queue follows the one that
//! had the signal before. Waits need no order: each waits for a number of its own.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tensorwire_device::flag::Writer;
use tensorwire_device::meeting::{self, Failure};
use tensorwire_device::sync::{AtomicBool, Ordering};
use tensorwire_device::{Abort, Deadline, DeviceId, Flag, Mark, Queue};

use super::book::{Book, CHANNELS, OwnBook};
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::{self, Pace};
use crate::ranks::Ranks;
use crate::shm::cores::{Room, Thread};

/// How often a thread that waits looks whether the other rank is still there.
const LOOK: Duration = Duration::from_millis(50);

/// The signals of one handle.
#[derive(Debug)]
pub(super) struct Signals {
    own: OwnBook,
    /// The books of all ranks, this one's too.
    books: Vec<Book>,
    /// The word of this handle, which all ranks share, with the group's beside it.
    abort: Abort,
    /// Whether devices send signals: they wake nobody.
    writer: Writer,
    /// Whether queues of this rank do, because its memory is a device's.
    by_queue: bool,
    /// How long a thread looks before it sleeps.
    spin: Duration,
    /// For each channel and rank: what was sent there, and how many signals from there were waited for.
    sent: Vec<Mutex<Sent>>,
    awaited: Vec<Mutex<u32>>,
    /// For each channel: to how many ranks this one has said that it is in a barrier.
    announced: Vec<Mutex<usize>>,
    /// Waits of queues that may not be over.
    queued: Mutex<Vec<Queued>>,
    /// When work was queued last that meets that of the others, for each channel.
    met: Mutex<[Option<Instant>; meeting::CHANNELS]>,
    /// Whether somebody has heard that a wait of a queue was not in time.
    told: AtomicBool,
}

/// What is said with every error of a handle's own.
const UNUSABLE: &str = "this handle cannot be used any more; all ranks make a new one";

#[derive(Debug, Default)]
struct Sent {
    count: u32,
    /// Behind the last signal, where a queue has it.
    mark: Option<Mark>,
}

/// A wait that is on a queue.
#[derive(Debug, Clone, Copy)]
struct Queued {
    from: usize,
    channel: usize,
    value: u32,
    since: Instant,
    deadline: Deadline,
}

impl Signals {
    /// `places` are those of the memory of all ranks.
    pub(super) fn new(ranks: &Ranks, own: OwnBook, books: Vec<Book>, places: &[&DeviceId]) -> Result<Self> {
        let is_device = |place: &&DeviceId| **place != DeviceId::Host;
        let lines = CHANNELS * ranks.world();
        let first = books.first().unwrap_or(&own.book);
        Ok(Self {
            abort: first.abort()?.or(&ranks.control.abort),
            own,
            books,
            writer: if places.iter().any(is_device) { Writer::Device } else { Writer::Host },
            spin: Room::new(&ranks.control).spin(Thread::Caller),
            by_queue: places.get(ranks.rank).is_some_and(is_device),
            sent: (0..lines).map(|_| Mutex::default()).collect(),
            awaited: (0..lines).map(|_| Mutex::default()).collect(),
            announced: (0..CHANNELS).map(|_| Mutex::default()).collect(),
            queued: Mutex::default(),
            met: Mutex::default(),
            told: AtomicBool::new(false),
        })
    }

    /// Sends a signal, by this thread or by a queue.
    pub(super) fn put(
        &self,
        ranks: &Ranks,
        (to, channel): (usize, usize),
        queue: Option<&mut dyn Queue>,
        deadline: Deadline,
    ) -> Result<()> {
        self.check(ranks, to, channel)?;
        let flag = self.books[to].signal(channel, ranks.rank, self.writer)?;
        let sent = &self.sent[channel * ranks.world() + to];
        let Some(queue) = self.on_device(ranks, queue, deadline)? else {
            loop {
                let mut sent = lock(sent);
                let Some(mark) = sent.pending(&flag) else {
                    sent.count = sent.count.wrapping_add(1);
                    flag.signal(sent.count);
                    return Ok(());
                };
                drop(sent);
                let what = || format!("a signal to {}, behind one that a queue has", ranks.who(to));
                self.passed(ranks, &mark, deadline, what)?;
            }
        };
        let mut sent = lock(sent);
        if let Some(mark) = sent.pending(&flag) {
            queue.follow(&mark, &self.abort, deadline)?;
        }
        let value = sent.count.wrapping_add(1);
        queue.signal(&flag, value)?;
        sent.count = value;
        sent.mark = Some(queue.mark()?);
        Ok(())
    }

    /// Tells all other ranks that this one is here, and waits for them. What a barrier that was not in time has told them counts
    /// for the next one on its channel.
    pub(super) fn meet(
        &self,
        ranks: &Ranks,
        channel: usize,
        mut queue: Option<&mut dyn Queue>,
        deadline: Deadline,
    ) -> Result<()> {
        self.check(ranks, ranks.rank, channel)?;
        let others: Vec<usize> = (0..ranks.world()).filter(|&rank| rank != ranks.rank).collect();
        let Ok(mut announced) = self.announced[channel].try_lock() else {
            return Err(busy(format!("is in a barrier on channel {channel}")));
        };
        while let Some(&to) = others.get(*announced) {
            self.put(
                ranks,
                (to, channel),
                queue.as_mut().map(|queue| &mut **queue as &mut dyn Queue),
                deadline,
            )?;
            *announced += 1;
        }
        self.wait(ranks, (&others, channel), queue, deadline)?;
        *announced = 0;
        Ok(())
    }

    /// Waits for the next signal of each of these ranks, on this thread or on a queue.
    pub(super) fn wait(
        &self,
        ranks: &Ranks,
        (from, channel): (&[usize], usize),
        queue: Option<&mut dyn Queue>,
        deadline: Deadline,
    ) -> Result<()> {
        let mut waits = Vec::with_capacity(from.len());
        for &rank in from {
            self.check(ranks, rank, channel)?;
            let mut flag = self.own.book.signal(channel, rank, self.writer)?;
            flag.set_spin(self.spin);
            let Ok(count) = self.awaited[channel * ranks.world() + rank].try_lock() else {
                return Err(busy(format!("waits for a signal of rank {rank} on channel {channel}")));
            };
            let value = count.wrapping_add(1);
            waits.push((rank, flag, count, value));
        }
        let queue = self.on_device(ranks, queue, deadline)?;
        let queued = match queue {
            // A rank that is a thread of this process may put the signal on a queue later, behind the wait.
            Some(queue) if !ranks.shares_process() => {
                for (rank, flag, _, value) in &waits {
                    self.check_there(ranks, *rank, || !flag.reached(*value))?;
                }
                let list: Vec<(&Flag, u32)> =
                    waits.iter().map(|(_, flag, _, value)| (flag, *value)).collect();
                queue.try_wait_all(&list, &self.abort, deadline)?
            }
            _ => false,
        };
        if queued {
            let since = Instant::now();
            let queued =
                |&(from, .., value): &(usize, _, _, u32)| Queued { from, channel, value, since, deadline };
            lock(&self.queued).extend(waits.iter().map(queued));
        } else {
            let start = Instant::now();
            for (rank, flag, _, value) in &waits {
                self.by_thread(ranks, (*rank, channel), flag, *value, (start, deadline))?;
            }
        }
        for (.., mut count, value) in waits {
            *count = value;
        }
        Ok(())
    }

    /// What is queued is done, and nothing else will be: tells the other ranks that this one has dropped its handle. Gives
    /// whether that could be said.
    pub(super) fn leave(&self, me: usize) -> bool {
        let passed = |sent: &Mutex<Sent>| {
            let mut sent = lock(sent);
            let passed = sent.mark.as_ref().is_none_or(Mark::is_over);
            if passed {
                sent.mark = None;
            }
            passed
        };
        let all = self.sent.iter().all(passed) && lock(&self.queued).iter().all(|wait| self.is_over(wait));
        if all {
            self.books.iter().for_each(|book| {
                if let Ok(flag) = book.left(me) {
                    flag.store(1);
                }
            });
            self.own.leave();
        }
        all
    }

    /// Whether no rank has a handle any more: all have dropped theirs, or got none, or have ended.
    pub(super) fn all_left(&self, ended: impl Fn(usize) -> bool) -> bool {
        let says = |book: &Book, rank| book.left(rank).is_ok_and(|flag| flag.load() != 0);
        let left = |rank, book| says(&self.own.book, rank) || says(book, rank) || ended(rank);
        self.books.iter().enumerate().all(|(rank, book)| left(rank, book))
    }

    /// Refuses what a rank has to come to that has dropped its handle, unless it came before: `lacks` is asked then.
    pub(super) fn check_there(&self, ranks: &Ranks, rank: usize, lacks: impl Fn() -> bool) -> Result<()> {
        // Its queues were done when it said so.
        let dropped = self.own.book.left(rank)?.load() != 0;
        if dropped && lacks() {
            let detail = "it has dropped its handle on this symmetric memory, and comes to nothing more";
            return Err(Error::peer(PeerFaultKind::Left, ranks.who(rank), Some(rank), detail));
        }
        Ok(())
    }

    /// What ends meetings of this rank's work, and where is written how one has failed.
    pub(super) fn ends(&self) -> Result<(&Abort, Flag)> {
        Ok((&self.abort, self.own.book.failure()?))
    }

    /// Refuses calls of a handle that cannot be used any more.
    pub(super) fn check_usable(&self, ranks: &Ranks) -> Result<()> {
        ranks.check()?;
        match self.failure(ranks) {
            Some(error) => {
                self.told.store(true, Ordering::Release);
                Err(error)
            }
            None => Ok(()),
        }
    }

    /// The wait of a queue that was not in time, or the work that met nobody, if there is one.
    pub(super) fn failure(&self, ranks: &Ranks) -> Option<Error> {
        let met = self.own.book.failure().ok().and_then(|flag| Failure::of(flag.load()));
        if let Some(failure) = met {
            return Some(self.unmet(ranks, failure));
        }
        let mut queued = lock(&self.queued);
        if self.abort.code() != Some(Abort::LATE) {
            queued.retain(|wait| !self.is_over(wait));
            return None;
        }
        // Whoever ended the wait has set the counters that were missing, so that they do not tell which these were.
        queued.retain(|wait| wait.deadline.passed());
        let mut from: Vec<usize> = queued.iter().map(|wait| wait.from).collect();
        from.sort_unstable();
        from.dedup();
        let (after, whom) = match queued.first() {
            Some(wait) => {
                let whom = format!("it waited for {} on channel {}", ranks.described(&from), wait.channel);
                (wait.since.elapsed(), whom)
            }
            None => Default::default(),
        };
        drop(queued);
        let doing = match from.is_empty() {
            true => format!(
                "the queue of another rank of group {:?} waiting for a signal; its own error says whose",
                ranks.name
            ),
            false => format!("a queue waiting for a signal in group {:?}", ranks.name),
        };
        let error = Error::timed_out(doing, after, whom).about(from);
        Some(error.adding(UNUSABLE))
    }

    /// What has become of work that met nobody.
    fn unmet(&self, ranks: &Ranks, failure: Failure) -> Error {
        if !failure.late {
            let who = ranks.who(failure.by);
            let ended = || {
                Error::Aborted(format!(
                    "while queues of all ranks worked together: {who} gave up; {UNUSABLE}"
                ))
            };
            return ranks.failure().unwrap_or_else(ended).adding(UNUSABLE);
        }
        let doing =
            format!("work of all ranks together on channel {} of group {:?}", failure.channel, ranks.name);
        let whom = ranks.described(&[failure.awaited]);
        let whom = match failure.by == ranks.rank {
            true => format!("it waited for {whom}"),
            false => format!("{} waited for {whom}", ranks.who(failure.by)),
        };
        let after =
            lock(&self.met).get(failure.channel).copied().flatten().map_or(Duration::ZERO, |at| at.elapsed());
        Error::timed_out(doing, after, whom).about([failure.awaited]).adding(UNUSABLE)
    }

    /// Work that meets that of the others is queued now.
    pub(super) fn meets(&self, channel: usize) {
        if let Some(at) = lock(&self.met).get_mut(channel) {
            *at = Some(Instant::now());
        }
    }

    /// Whether a call has given that error.
    pub(super) fn is_told(&self) -> bool {
        self.told.load(Ordering::Acquire)
    }

    fn check(&self, ranks: &Ranks, rank: usize, channel: usize) -> Result<()> {
        ranks.check()?;
        if rank >= ranks.world() {
            return Err(Error::misuse(format!("there is no rank {rank} in a group of {}", ranks.world())));
        }
        if channel >= CHANNELS {
            return Err(Error::misuse(format!(
                "there is no channel {channel}; there are 0 to {}",
                CHANNELS - 1
            )));
        }
        self.check_usable(ranks)
    }

    /// The queue, where it signals and waits itself. Where this rank's memory is the host's, this thread does it as soon as the
    /// queue has come so far.
    fn on_device<'q>(
        &self,
        ranks: &Ranks,
        queue: Option<&'q mut dyn Queue>,
        deadline: Deadline,
    ) -> Result<Option<&'q mut dyn Queue>> {
        let Some(queue) = queue else { return Ok(None) };
        if self.by_queue {
            return Ok(Some(queue));
        }
        let mark = queue.mark()?;
        self.passed(ranks, &mark, deadline, || "a queue that comes before a signal".into())?;
        Ok(None)
    }

    fn passed(
        &self,
        ranks: &Ranks,
        mark: &Mark,
        deadline: Deadline,
        what: impl Fn() -> String,
    ) -> Result<()> {
        let start = Instant::now();
        match interrupt::in_slices(deadline, |slice| mark.wait(&self.abort, slice))? {
            Err(tensorwire_device::Error::TimedOut) => {
                Err(Error::timed_out(what(), start.elapsed(), "the queue has not come so far"))
            }
            Err(tensorwire_device::Error::Aborted) => Err(self.aborted(ranks)),
            other => Ok(other?),
        }
    }

    fn by_thread(
        &self,
        ranks: &Ranks,
        (from, channel): (usize, usize),
        flag: &Flag,
        value: u32,
        (start, deadline): (Instant, Deadline),
    ) -> Result<()> {
        let mut pace = Pace::since(start);
        loop {
            let slice = pace.until(deadline).min(Deadline::after(LOOK));
            match flag.wait(value, &self.abort, slice) {
                Err(tensorwire_device::Error::TimedOut) if slice < deadline => pace.look(Instant::now())?,
                Err(tensorwire_device::Error::TimedOut) => {
                    let doing =
                        format!("waiting for a signal on channel {channel} of group {:?}", ranks.name);
                    let missing = format!("it waited for {}", ranks.described(&[from]));
                    return Err(Error::timed_out(doing, start.elapsed(), missing).about([from]));
                }
                Err(tensorwire_device::Error::Aborted) => return Err(self.aborted(ranks)),
                other => return Ok(other?),
            }
            // A rank that has closed the group signals no more. What it sent before is there.
            if ranks.control.has_left(from) && !flag.reached(value) {
                let detail = format!("it has closed the group, and has sent no signal on channel {channel}");
                return Err(Error::peer(PeerFaultKind::Left, ranks.who(from), Some(from), detail));
            }
        }
    }

    fn aborted(&self, ranks: &Ranks) -> Error {
        let error = ranks.failure().or_else(|| self.failure(ranks));
        error.unwrap_or_else(|| Error::Aborted("while waiting for a signal".into()))
    }

    fn is_over(&self, wait: &Queued) -> bool {
        let flag = self.own.book.signal(wait.channel, wait.from, self.writer);
        flag.is_ok_and(|flag| flag.reached(wait.value))
    }
}

impl Sent {
    /// What is to be passed before the next signal: a queue may still have the one before.
    fn pending(&self, flag: &Flag) -> Option<Mark> {
        self.mark.clone().filter(|_| !flag.reached(self.count))
    }
}

#[cold]
fn busy(what: String) -> Error {
    Error::misuse(format!("another thread {what}; each thread needs a channel of its own"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
