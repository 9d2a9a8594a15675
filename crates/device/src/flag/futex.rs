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
            aborts if HAS_WAITV.load(Ordering::Relaxed) => sleep_on_all(word, seen, aborts, left),
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

    /// Whether the kernel can sleep on several words at once; a test turns it off.
    static HAS_WAITV: AtomicBool = AtomicBool::new(true);

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
        match result {
            // Woken, changed, timed out or interrupted: look again.
            Ok(_) | Err(Errno::AGAIN | Errno::TIMEDOUT | Errno::INTR) => {}
            // Not there (NOSYS), forbidden by a sandbox (PERM, ACCES), or whatever else: never spin on it.
            Err(error) => {
                if HAS_WAITV.swap(false, Ordering::Relaxed) {
                    tracing::info!(
                        "futex_waitv failed with {error} (it needs Linux 5.16): an abort is seen within {SLICE:?}"
                    );
                }
                sleep_on_one(word, seen, left.min(SLICE));
            }
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
        HAS_WAITV.store(false, Ordering::Relaxed);
        body();
        HAS_WAITV.store(true, Ordering::Relaxed);
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
