//! Sleeping on words of shared memory: futexes, or a condition variable under loom.

#[cfg(not(loom))]
mod imp {
    use std::time::Duration;

    use rustix::io::Errno;
    use rustix::thread::futex::{self, Flags, Wait, WaitFlags, WaitvFlags};
    use rustix::time::{ClockId, Timespec, clock_gettime};

    use crate::sync::{AtomicBool, AtomicU32, Ordering};

    /// Sleeps while `word` is `seen` and all of `aborts` (two at most) are zero; at most `left`, and it may return
    /// early.
    pub(crate) fn sleep(word: &AtomicU32, seen: u32, aborts: &[&AtomicU32], left: Duration) {
        match aborts {
            [] => sleep_on_one(word, seen, left),
            aborts if WAITV.is_here() => sleep_on_all(word, seen, aborts, left),
            // Words that nobody wakes us for are looked at every few milliseconds.
            _ => sleep_on_one(word, seen, left.min(SLICE)),
        }
    }

    /// Wakes all who sleep on the word.
    pub(crate) fn wake_all(word: &AtomicU32) {
        // No process-private futexes: the word may be mapped by several processes. Waking cannot fail on a word
        // that exists.
        let _ = futex::wake(word, Flags::empty(), i32::MAX as u32);
    }

    /// A short rest between two looks at a word that nobody wakes us for.
    pub(crate) fn nap() {
        std::thread::sleep(Duration::from_micros(20));
    }

    /// Between two looks at the abort word on kernels before 5.16.
    const SLICE: Duration = Duration::from_millis(5);

    static WAITV: Waitv = Waitv(AtomicBool::new(true));

    /// Whether the kernel lets this process sleep on several words at once; a test turns it off.
    pub(super) struct Waitv(pub(super) AtomicBool);

    impl Waitv {
        pub(super) fn is_here(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }

        /// Whether the call did its work: it slept, or saw that there is something to look at. One that is not there
        /// (NOSYS) or that a sandbox forbids (PERM, ACCES) is not made again. Other failures, such as a kernel short of
        /// memory, may be over the next time.
        pub(super) fn has_slept(&self, result: rustix::io::Result<usize>) -> bool {
            match result {
                // Woken, changed, timed out or interrupted.
                Ok(_) | Err(Errno::AGAIN | Errno::TIMEDOUT | Errno::INTR) => true,
                Err(error @ (Errno::NOSYS | Errno::PERM | Errno::ACCESS)) => {
                    if self.0.swap(false, Ordering::Relaxed) {
                        tracing::info!(
                            "futex_waitv failed with {error} (it needs Linux 5.16): an abort is seen within {SLICE:?}"
                        );
                    }
                    false
                }
                Err(error) => {
                    tracing::debug!("futex_waitv failed with {error}; this wait looks every {SLICE:?}");
                    false
                }
            }
        }
    }

    fn sleep_on_one(word: &AtomicU32, seen: u32, left: Duration) {
        // Every way in which it returns (woken, changed, timed out, interrupted) means: look again.
        let _ = futex::wait(word, Flags::empty(), seen, Some(&timespec(left)));
    }

    fn sleep_on_all(word: &AtomicU32, seen: u32, aborts: &[&AtomicU32], left: Duration) {
        let on = |word: &AtomicU32, value: u32| {
            let mut wait = Wait::new();
            wait.val = value.into();
            wait.uaddr = (word as *const AtomicU32).cast_mut().cast::<core::ffi::c_void>().into();
            wait.flags = WaitFlags::SIZE_U32;
            wait
        };
        let until = timespec(monotonic_now().saturating_add(left));
        let mut words = [on(word, seen); 3];
        let others = words.iter_mut().skip(1).zip(aborts);
        let count = 1 + others.map(|(wait, abort)| *wait = on(abort, 0)).count();
        let result = futex::waitv(&words[..count], WaitvFlags::empty(), Some(&until), ClockId::Monotonic);
        // Whatever failed: never spin on it.
        if !WAITV.has_slept(result) {
            sleep_on_one(word, seen, left.min(SLICE));
        }
    }

    fn monotonic_now() -> Duration {
        let now = clock_gettime(ClockId::Monotonic);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    }

    fn timespec(duration: Duration) -> Timespec {
        Timespec {
            tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX / 2),
            tv_nsec: duration.subsec_nanos().into(),
        }
    }

    /// Runs `body` as on a kernel without futex_waitv.
    #[cfg(test)]
    pub(crate) fn without_waitv(body: impl FnOnce()) {
        WAITV.0.store(false, Ordering::Relaxed);
        body();
        WAITV.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(loom)]
mod imp {
    use std::time::Duration;

    use loom::sync::{Condvar, Mutex};

    use crate::sync::{AtomicU32, Ordering};

    loom::lazy_static! {
        /// The kernel: one lock under which words are compared, one place where all sleep.
        static ref KERNEL: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
    }

    pub(crate) fn sleep(word: &AtomicU32, seen: u32, aborts: &[&AtomicU32], _left: Duration) {
        let guard = KERNEL.0.lock().unwrap();
        let changed = word.load(Ordering::SeqCst) != seen;
        if !changed && aborts.iter().all(|abort| abort.load(Ordering::SeqCst) == 0) {
            drop(KERNEL.1.wait(guard).unwrap());
        }
    }

    pub(crate) fn wake_all(_word: &AtomicU32) {
        let _guard = KERNEL.0.lock().unwrap();
        KERNEL.1.notify_all();
    }

    pub(crate) fn nap() {
        loom::thread::yield_now();
    }
}

#[cfg(all(test, not(loom)))]
pub(crate) use imp::without_waitv;
pub(crate) use imp::{nap, sleep, wake_all};

#[cfg(all(test, not(loom)))]
mod tests {
    use rustix::io::Errno;

    use super::imp::Waitv;
    use crate::sync::AtomicBool;

    #[test]
    fn only_a_lasting_refusal_turns_waitv_off() {
        let waitv = Waitv(AtomicBool::new(true));
        for slept in [Ok(0), Err(Errno::AGAIN), Err(Errno::TIMEDOUT), Err(Errno::INTR)] {
            assert!(waitv.has_slept(slept), "{slept:?}");
        }
        for passing in [Errno::NOMEM, Errno::FAULT, Errno::INVAL] {
            assert!(!waitv.has_slept(Err(passing)) && waitv.is_here(), "{passing}");
        }
        for lasting in [Errno::NOSYS, Errno::PERM, Errno::ACCESS] {
            let waitv = Waitv(AtomicBool::new(true));
            assert!(!waitv.has_slept(Err(lasting)) && !waitv.is_here(), "{lasting}");
        }
    }
}
