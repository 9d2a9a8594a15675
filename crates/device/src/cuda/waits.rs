//! Waits that streams hold: how many there may be, and who ends them when nobody signals.
//!
//! A stream that waits holds one of the process's hardware queues, and every stream that shares it. So at most half of
//! them may wait; a wait above that is done by the caller's thread. While one is queued, a thread looks once a
//! millisecond whether its deadline has passed or one of its abort words is set. After the deadline it sets the first abort
//! word, so that nobody takes the release for a signal. The second one belongs to others, too, and is not the wait's to set.
//! Then it advances the flags in their writers' place.
//!
//! The driver is never called with the lock held: a call may block until a stream goes on, and only the thread that
//! needs the lock can make it go on.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::flag::{Abort, Flag};
use crate::gpu::background;

/// How often the thread looks while a wait is queued.
const LOOK: Duration = Duration::from_millis(1);
/// How long it goes on looking after the last one: the next one soon follows.
const RESTLESS: Duration = Duration::from_millis(100);
/// How long it stays without one.
const LINGER: Duration = Duration::from_secs(2);

/// How many hardware queues a process has, unless it was told otherwise.
const CONNECTIONS: usize = 8;

/// How a queue's waits ended, if one did not end well. Each queue has its own.
pub(super) type Failure = Arc<Mutex<Option<Error>>>;

/// All queued waits of a GPU.
#[derive(Debug)]
pub(super) struct Waits {
    state: Mutex<State>,
    changed: Condvar,
    /// How many streams may hold one.
    most: usize,
}

#[derive(Debug, Default)]
struct State {
    pending: Vec<Pending>,
    /// The number of the last one: so many were queued.
    last: u64,
    /// How many the callers' threads did.
    by_callers: u64,
    /// Whether the thread is there, and whether it rests until somebody wakes it.
    watched: bool,
    rests: bool,
    /// Whether calls are made that must not meet a wait.
    closed: bool,
    /// Whether such calls have waited so long that no other wait may come before them.
    wanted: bool,
}

#[derive(Debug)]
struct Pending {
    number: u64,
    stream: usize,
    /// All of them are waited for in one piece, each for its value.
    flags: Vec<(Flag, u32)>,
    abort: Abort,
    deadline: Deadline,
    failure: Failure,
}

impl Pending {
    /// Whether the stream goes on, as far as can be seen from here.
    fn is_over(&self) -> bool {
        self.flags.iter().all(|(flag, value)| flag.reached(*value))
    }

    /// Why it must end now.
    fn ends(&self) -> Option<Error> {
        self.abort.check(self.deadline).err()
    }

    /// Lets the stream go, and notes why. What is queued behind it finds an abort word that is set.
    fn release(&self, why: Error) {
        if !self.abort.is_set() {
            self.abort.set(Abort::LATE);
        }
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
        self.flags.iter().for_each(|(flag, value)| flag.force(*value));
    }
}

impl State {
    /// Moves those out that are over. They hold memory of others, and must not be dropped with the lock held.
    fn sort_out(&mut self, over: &mut Vec<Pending>) {
        over.extend(self.pending.extract_if(.., |pending| pending.is_over()));
    }
}

impl Waits {
    /// For a process with the GPU to itself, or for a client of MPS.
    pub(super) fn new(shared: bool) -> Self {
        // There one stream that waited froze all others, copies of ours among them.
        if shared {
            return Self::with(0);
        }
        let said = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok();
        Self::with(said.and_then(|text| text.trim().parse().ok()).unwrap_or(CONNECTIONS).clamp(1, 32) / 2)
    }

    fn with(most: usize) -> Self {
        if most == 0 {
            tracing::info!(
                "streams do not wait here (MPS, or CUDA_DEVICE_MAX_CONNECTIONS=1): the calling thread does"
            );
        }
        Self { state: Mutex::default(), changed: Condvar::new(), most }
    }

    /// Notes a wait that is about to be queued on a stream and calls `queue`; `false` if it must be done by the caller.
    pub(super) fn queue(
        self: &Arc<Self>,
        stream: usize,
        flags: Vec<(Flag, u32)>,
        (abort, deadline): (&Abort, Deadline),
        failure: &Failure,
        queue: impl FnOnce() -> Result<()>,
    ) -> Result<bool> {
        let mut over = Vec::new();
        let mut state = self.lock();
        state.sort_out(&mut over);
        let mut streams: Vec<usize> = state.pending.iter().map(|pending| pending.stream).collect();
        streams.sort_unstable();
        streams.dedup();
        if state.closed || state.wanted || (!streams.contains(&stream) && streams.len() >= self.most) {
            state.by_callers += 1;
            tracing::debug!(
                waiting = streams.len(),
                most = self.most,
                "a wait is done by the calling thread"
            );
            return Ok(false);
        }
        if !state.watched {
            self.watch()?;
            state.watched = true;
        }
        state.last += 1;
        let number = state.last;
        state.pending.push(Pending {
            number,
            stream,
            flags,
            abort: abort.clone(),
            deadline,
            failure: failure.clone(),
        });
        // A thread that looks anyway is not woken: that costs more than all else here.
        if state.rests {
            self.changed.notify_all();
        }
        drop(state);
        let queued = queue();
        if queued.is_err() {
            let mut state = self.lock();
            let _failed: Vec<_> = state.pending.extract_if(.., |pending| pending.number == number).collect();
            drop(state);
        }
        queued.map(|()| true)
    }

    /// How many waits were queued, and how many were left to the callers' threads.
    pub(super) fn sum(&self) -> (u64, u64) {
        let state = self.lock();
        (state.last, state.by_callers)
    }

    /// Ends the waits of a queue now, whoever would signal them. Two queues may share a stream.
    pub(super) fn release(&self, queue: &Failure, why: &Error) {
        let state = self.lock();
        let of_queue = |pending: &&Pending| Arc::ptr_eq(&pending.failure, queue) && !pending.is_over();
        state.pending.iter().filter(of_queue).for_each(|pending| pending.release(why.clone()));
    }

    /// Calls `work` while no stream waits, and lets none wait meanwhile; gives whether it was called.
    pub(super) fn while_none(&self, work: impl FnOnce()) -> bool {
        let mut over = Vec::new();
        let mut state = self.lock();
        state.sort_out(&mut over);
        if state.closed || !state.pending.is_empty() {
            return false;
        }
        state.closed = true;
        drop(state);
        // Opened again whatever happens.
        let _open = Open(self);
        work();
        true
    }

    /// Whether [`while_none`](Self::while_none) is wanted so much that no stream may begin to wait before.
    pub(super) fn want(&self, wanted: bool) {
        self.lock().wanted = wanted;
    }

    /// Whether a stream may wait.
    #[cfg(test)]
    pub(super) fn is_open(&self) -> bool {
        let state = self.lock();
        !state.closed && !state.wanted
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(self: &Arc<Self>) -> Result<()> {
        let waits = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("tensorwire-waits".into());
        thread
            .spawn(move || watch(&waits))
            .map_err(|e| Error::io("starting the thread that watches streams", e))?;
        Ok(())
    }
}

struct Open<'a>(&'a Waits);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        (state.closed, state.wanted) = (false, false);
    }
}

/// The life of the thread.
fn watch(waits: &Weak<Waits>) {
    background();
    let mut busy = Instant::now();
    while let Some(waits) = waits.upgrade() {
        let mut over = Vec::new();
        let mut state = waits.lock();
        state.sort_out(&mut over);
        for pending in &state.pending {
            if let Some(why) = pending.ends() {
                pending.release(why);
            }
        }
        if !over.is_empty() {
            drop(state);
            drop(over);
            state = waits.lock();
        }
        if !state.pending.is_empty() {
            busy = Instant::now();
        }
        state.rests = busy.elapsed() > RESTLESS;
        let pause = if state.rests { LINGER } else { LOOK };
        let (mut state, waited) =
            waits.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() && state.rests && state.pending.is_empty() {
            state.watched = false;
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(most: usize) -> (Arc<Waits>, Failure) {
        (Arc::new(Waits::with(most)), Failure::default())
    }

    fn one(flag: &Flag, value: u32) -> Vec<(Flag, u32)> {
        vec![(flag.clone(), value)]
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    #[test]
    fn a_deadline_and_an_abort_let_the_stream_go() {
        let (waits, failure) = waits(4);
        let late = Abort::local();
        let flag = Flag::local();
        let until = Deadline::after(Duration::from_millis(5));
        assert!(waits.queue(1, one(&flag, 3), (&late, until), &failure, || Ok(())).unwrap());
        flag.wait(3, &Abort::local(), soon()).unwrap();
        assert_eq!(late.code(), Some(Abort::LATE));
        assert!(matches!(*failure.lock().unwrap(), Some(Error::TimedOut)));

        let (flag, abort, failure) = (Flag::local(), Abort::local(), Failure::default());
        assert!(waits.queue(1, one(&flag, 1), (&abort, soon()), &failure, || Ok(())).unwrap());
        assert_eq!(flag.load(), 0);
        abort.set(7);
        flag.wait(1, &Abort::local(), soon()).unwrap();
        assert_eq!(abort.code(), Some(7), "the first code stays");
        assert!(matches!(*failure.lock().unwrap(), Some(Error::Aborted)));
    }

    /// The second abort word is the whole group's: one operation that is late does not end the others.
    #[test]
    fn a_deadline_sets_the_first_abort_word_only() {
        let (waits, failure) = waits(4);
        let (flag, verdict, group) = (Flag::local(), Abort::local(), Abort::local());
        let until = Deadline::after(Duration::from_millis(5));
        waits.queue(1, one(&flag, 1), (&verdict.or(&group), until), &failure, || Ok(())).unwrap();
        flag.wait(1, &Abort::local(), soon()).unwrap();
        assert_eq!((verdict.code(), group.code()), (Some(Abort::LATE), None));

        // Set by somebody else: nothing more is set.
        let (flag, verdict) = (Flag::local(), Abort::local());
        waits.queue(1, one(&flag, 1), (&verdict.or(&group), soon()), &failure, || Ok(())).unwrap();
        group.set(7);
        flag.wait(1, &Abort::local(), soon()).unwrap();
        assert_eq!((verdict.code(), group.code()), (None, Some(7)));
    }

    #[test]
    fn several_flags_are_one_wait() {
        let (waits, failure) = waits(1);
        let (flags, abort) = ([0; 3].map(|_| Flag::local()), Abort::local());
        let all = |value| flags.iter().map(|flag| (flag.clone(), value)).collect();
        assert!(waits.queue(1, all(1), (&abort, soon()), &failure, || Ok(())).unwrap());
        assert_eq!(waits.sum(), (1, 0));
        flags[..2].iter().for_each(|flag| flag.signal(1));
        assert!(!waits.while_none(|| panic!("one is missing")));
        flags[2].signal(1);
        assert!(waits.while_none(|| {}));
        // Whoever ends it advances all of them.
        assert!(waits.queue(1, all(2), (&abort, soon()), &failure, || Ok(())).unwrap());
        flags[1].signal(5);
        abort.set(3);
        flags[0].wait(2, &Abort::local(), soon()).unwrap();
        flags[2].wait(2, &Abort::local(), soon()).unwrap();
        assert_eq!(flags[1].load(), 5);
    }

    /// Streams that wait one after the other, so that always one does, do not keep others from their turn for ever.
    #[test]
    fn who_has_waited_long_comes_before_other_waits() {
        let (waits, failure) = waits(4);
        let (first, second, abort) = (Flag::local(), Flag::local(), Abort::local());
        let queue = |stream, flag: &Flag| {
            waits.queue(stream, one(flag, 1), (&abort, soon()), &failure, || Ok(())).unwrap()
        };
        assert!(queue(1, &first));
        waits.want(true);
        assert!(!waits.while_none(|| panic!("a stream waits")));
        assert!(!queue(2, &second) && !queue(1, &second), "the callers wait now");
        first.signal(1);
        assert!(!queue(2, &second), "the turn has not come yet");
        assert!(waits.while_none(|| {}));
        assert!(queue(2, &second));
        // Nobody wants it any more.
        waits.want(true);
        waits.want(false);
        assert!(queue(1, &second));
    }

    #[test]
    fn what_is_signalled_is_left_alone() {
        let (waits, failure) = waits(4);
        let (flag, abort) = (Flag::local(), Abort::local());
        let until = Deadline::after(Duration::from_millis(5));
        waits.queue(1, one(&flag, 1), (&abort, until), &failure, || Ok(())).unwrap();
        flag.signal(9);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!((flag.load(), abort.code()), (9, None));
        assert!(failure.lock().unwrap().is_none());
    }

    #[test]
    fn half_of_the_hardware_queues_may_wait() {
        let (waits, failure) = waits(2);
        let (flag, abort) = (Flag::local(), Abort::local());
        let queue =
            |stream| waits.queue(stream, one(&flag, 1), (&abort, soon()), &failure, || Ok(())).unwrap();
        // Several waits of one stream hold one hardware queue.
        assert_eq!([1, 1, 2, 2, 3].map(queue), [true, true, true, true, false]);
        assert_eq!(waits.sum(), (4, 1));
        assert!(!waits.while_none(|| panic!("a stream waits")));
        flag.signal(1);
        // While nobody may wait, the caller does.
        assert!(waits.while_none(|| assert!(!queue(1))));
        assert!(waits.queue(3, one(&flag, 2), (&abort, soon()), &failure, || Ok(())).unwrap());
        // Of another queue on the same stream: it is left alone.
        waits.release(&Failure::default(), &Error::Aborted);
        assert_eq!(flag.load(), 1);
        waits.release(&failure, &Error::Aborted);
        assert_eq!(flag.load(), 2);
    }

    #[test]
    fn what_cannot_be_queued_is_not_watched() {
        let (waits, failure) = waits(2);
        let failed = || Err(Error::TimedOut);
        let (flag, abort) = (Flag::local(), Abort::local());
        assert!(waits.queue(1, one(&flag, 1), (&abort, soon()), &failure, failed).is_err());
        assert!(waits.while_none(|| {}));
    }
}
