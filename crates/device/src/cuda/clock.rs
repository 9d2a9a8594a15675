//! The GPU's clock, compared with that of the host: so that a kernel can say in the host's time when it ended.
//!
//! A kernel that does nothing writes its time to pinned memory. The host looks at its own clock before the launch and when the
//! time is there. The kernel's time was in between, and is taken for the middle. Of several tries the shortest counts. It takes some
//! microseconds, and the comparison is wrong by half of that at most. The clocks drift apart, so it is made again once a second.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::driver::{Driver, Function, Stream};
use super::kernels::{self, Gated};
use crate::clock::monotonic;
use crate::sync::{AtomicU64, Ordering, spin_loop};

/// Bytes of pinned memory that a comparison needs.
pub(super) const WORD: usize = 8;
/// How often clocks are compared again.
const AGAIN: Duration = Duration::from_secs(1);
/// How many tries the first comparison has, and a later one.
const TRIES: (usize, usize) = (8, 3);
/// How long an answer may take. Behind other work it says nothing.
const PATIENCE: Duration = Duration::from_micros(200);

/// The clock of a GPU.
#[derive(Debug)]
pub(super) struct Clock {
    stream: Stream,
    /// The copying kernel, which is launched without copies.
    kernel: Function,
    /// The address of the word.
    word: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// What is to be added to the GPU's time.
    offset: Option<u64>,
    /// When that was found out, or tried.
    since: Instant,
    /// Whether a launch has not answered yet.
    asked: bool,
}

impl Clock {
    /// Compares the clocks. The thread is in the context.
    ///
    /// # Safety
    /// Stream and kernel, by the name [`kernels::COPY`], live as long as this is used. The address is one of pinned memory, a
    /// multiple of eight, which nobody else uses, and which stays until the stream has no work.
    pub(super) unsafe fn new(driver: &Driver, stream: Stream, kernel: Function, word: usize) -> Self {
        let state = State { offset: None, since: Instant::now(), asked: false };
        let clock = Self { stream, kernel, word, state: Mutex::new(state) };
        clock.compare(driver, &mut clock.state.lock().unwrap_or_else(PoisonError::into_inner), TRIES.0);
        clock
    }

    /// What is to be added to the GPU's time now, if that is known. The thread is in the context.
    pub(super) fn offset(&self, driver: &Driver) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.offset.is_none() || state.since.elapsed() > AGAIN {
            self.compare(driver, &mut state, TRIES.1);
        }
        state.offset
    }

    fn compare(&self, driver: &Driver, state: &mut State, tries: usize) {
        state.since = Instant::now();
        // SAFETY: the promise of `new`; kernels write it as a whole.
        let word = unsafe { AtomicU64::from_ptr(self.word as *mut u64) };
        let Ok(place) = driver.seen_at(self.word) else { return };
        let mut best: Option<(u64, u64)> = None;
        for _ in 0..tries {
            if state.asked && word.load(Ordering::Acquire) == 0 {
                return;
            }
            word.store(0, Ordering::Release);
            let Ok(mut call) = kernels::copy(&[], 1) else { return };
            call.arguments.gate().stamp((place, 0));
            let before = monotonic();
            // SAFETY: the promise of `new`; the kernel takes these arguments.
            if unsafe { driver.launch(self.kernel, (1, 32), &call.arguments, self.stream) }.is_err() {
                return;
            }
            state.asked = true;
            let begin = Instant::now();
            let time = loop {
                match word.load(Ordering::Acquire) {
                    0 if begin.elapsed() > PATIENCE => return,
                    0 => spin_loop(),
                    time => break time,
                }
            };
            let took = monotonic().wrapping_sub(before);
            state.asked = false;
            if best.is_none_or(|(best, _)| took < best) {
                best = Some((took, before.wrapping_add(took / 2).wrapping_sub(time)));
                state.offset = best.map(|(_, offset)| offset);
            }
        }
    }
}
