//! Waits that streams hold: how many there may be, and who ends them when nobody signals. As on a real GPU.
//!
//! At most half of the hardware queues may hold a wait; one above that is done by the caller's thread. While one is queued, a
//! thread looks once a millisecond whether its deadline has passed or its abort word is set, wherever in its hardware queue it
//! stands. To end a wait at its deadline, it sets the first abort word. Then it advances the flags in their writers' place.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::channel::{Stream, until};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::flag::{Abort, Flag};
use crate::sync::{AtomicBool, Condvar, Mutex, MutexGuard, Ordering, unpoisoned};

/// How often the thread looks while a wait is queued.
const LOOK: Duration = Duration::from_millis(1);
/// How long it stays without one.
const LINGER: Duration = Duration::from_millis(50);

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
    pending: Vec<Arc<Wait>>,
    /// How many were queued.
    by_streams: u64,
    /// How many the callers' threads did.
    by_callers: u64,
    /// Whether the thread is there.
    watched: bool,
}

/// A wait for flags, each with its value.
#[derive(Debug)]
pub(super) struct Wait {
    pub(super) stream: Arc<Stream>,
    pub(super) flags: Vec<(Flag, u32)>,
    pub(super) abort: Abort,
    pub(super) deadline: Deadline,
    /// Whether it was ended without a signal.
    pub(super) ended: AtomicBool,
}

impl Wait {
    /// Holds the hardware queue.
    pub(super) fn run(&self) {
        until(|| self.is_over());
    }

    fn is_over(&self) -> bool {
        self.ended.load(Ordering::Acquire) || self.flags.iter().all(|(flag, value)| flag.reached(*value))
    }

    /// Why it must end now.
    fn ends(&self) -> Option<Error> {
        self.abort.check(self.deadline).err()
    }

    /// Lets the stream go, and notes why. Nobody takes it for a signal, because an abort word is set before.
    fn release(&self, why: Error) {
        if !self.abort.is_set() {
            self.abort.set(Abort::LATE);
        }
        self.stream.fail(why);
        self.flags.iter().for_each(|(flag, value)| flag.force(*value));
        self.ended.store(true, Ordering::Release);
    }
}

impl Waits {
    pub(super) fn new(most: usize) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), most }
    }

    /// Notes a wait that is about to be queued and calls `queue`; `false` if the caller must wait.
    pub(super) fn queue(
        self: &Arc<Self>,
        wait: &Arc<Wait>,
        queue: impl FnOnce() -> Result<()>,
    ) -> Result<bool> {
        let mut state = self.lock();
        state.pending.retain(|pending| !pending.is_over());
        let mut streams: Vec<u64> = state.pending.iter().map(|pending| pending.stream.number).collect();
        streams.sort_unstable();
        streams.dedup();
        if !streams.contains(&wait.stream.number) && streams.len() >= self.most {
            state.by_callers += 1;
            return Ok(false);
        }
        if !state.watched {
            let waits = Arc::downgrade(self);
            std::thread::Builder::new()
                .name("test-gpu-waits".into())
                .spawn(move || watch(&waits))
                .map_err(|e| Error::io("starting the thread that watches streams", e))?;
            state.watched = true;
        }
        state.by_streams += 1;
        state.pending.push(wait.clone());
        self.changed.notify_all();
        drop(state);
        queue().inspect_err(|_| self.lock().pending.retain(|pending| !Arc::ptr_eq(pending, wait)))?;
        Ok(true)
    }

    /// How many waits were queued, and how many were left to the callers' threads.
    pub(super) fn sum(&self) -> (u64, u64) {
        let state = self.lock();
        (state.by_streams, state.by_callers)
    }

    /// Ends the waits of a stream now, whoever would signal them.
    pub(super) fn release(&self, stream: &Arc<Stream>, why: &Error) {
        let state = self.lock();
        let of_stream = |pending: &&Arc<Wait>| Arc::ptr_eq(&pending.stream, stream) && !pending.is_over();
        state.pending.iter().filter(of_stream).for_each(|pending| pending.release(why.clone()));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        unpoisoned(self.state.lock())
    }
}

/// The life of the thread.
fn watch(waits: &Weak<Waits>) {
    while let Some(waits) = waits.upgrade() {
        let mut state = waits.lock();
        state.pending.retain(|pending| !pending.is_over());
        for pending in &state.pending {
            if let Some(why) = pending.ends() {
                pending.release(why);
            }
        }
        let pause = if state.pending.is_empty() { LINGER } else { LOOK };
        let (mut state, waited) = unpoisoned(waits.changed.wait_timeout(state, pause));
        if waited.timed_out() && state.pending.is_empty() {
            state.watched = false;
            return;
        }
    }
}
