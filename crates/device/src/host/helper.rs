//! A thread that takes a part of large copies and reductions off a queue's caller.
//!
//! There is one task at a time, in a cell, and a word that says whose the cell is:
//!
//! | word | the cell is |
//! |---|---|
//! | `FREE` | the caller's |
//! | `OFFERED` | of whoever changes the word next |
//! | `TAKEN` | the helper's, until it frees it |
//!
//! The caller offers a part, does its own, and takes back what the helper has not begun by then. So it never waits for a
//! thread to wake up or to be given a core, only for the end of a copy that is under way.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use super::copy::copy;
use super::reduce::Instructions;
use crate::device::Caching;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::op::ReduceOp;
use crate::sync::{AtomicBool, AtomicU32, Ordering, spin_loop};

const FREE: u32 = 0;
const OFFERED: u32 = 1;
const TAKEN: u32 = 2;

/// How long a helper looks for its next task before it sleeps: operations come one soon after the other.
const LOOK: Duration = Duration::from_micros(50);

/// What to do with bytes.
#[derive(Debug, Clone, Copy)]
pub(super) enum What {
    Copy,
    Reduce(ReduceOp, Dtype),
}

/// Bytes of memory and what to do with them. All pointers are to `len` bytes.
#[derive(Debug)]
pub(super) struct Task<'a> {
    pub(super) what: What,
    pub(super) from: &'a [*const u8],
    pub(super) into: &'a [*mut u8],
    pub(super) len: usize,
    pub(super) caching: Caching,
}

impl Task<'_> {
    /// # Safety
    /// All pointers are valid for `len` bytes: of whole elements, for reads and for writes; outputs are apart from each
    /// other, and exactly an input or apart from it. A copy has one of each, apart from each other.
    #[inline]
    pub(super) unsafe fn run(&self, instructions: Instructions) -> Result<()> {
        match (self.what, self.from, self.into) {
            // SAFETY: the caller's promise.
            (What::Copy, [from, ..], [into, ..]) => unsafe {
                match self.caching {
                    Caching::Keep => copy(*into, *from, self.len),
                    Caching::Bypass | Caching::Give => instructions.copy_past_caches(*into, *from, self.len),
                }
                Ok(())
            },
            (What::Copy, ..) => Ok(()),
            // SAFETY: the caller's promise.
            (What::Reduce(op, dtype), from, into) => unsafe {
                instructions.reduce(op, dtype, from, into, self.len / dtype.size(), self.caching)
            },
        }
    }
}

/// A helper thread, seen by the queue that it helps. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Helper {
    shared: Arc<Shared>,
    thread: Thread,
}

impl Helper {
    pub(super) fn start() -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            word: Apart(AtomicU32::new(FREE)),
            over: Apart(AtomicBool::new(false)),
            cell: UnsafeCell::new(Cell {
                what: What::Copy,
                from: Vec::new(),
                into: Vec::new(),
                len: 0,
                caching: Caching::Keep,
                result: Ok(()),
            }),
        });
        let own = shared.clone();
        let thread = thread::Builder::new().name("tensorwire-help".into()).spawn(move || own.help())?;
        Ok(Self { thread: thread.thread().clone(), shared })
    }

    /// Offers the part of a task behind its first `start` bytes, `len` of them.
    ///
    /// # Safety
    /// As for [`Task::run`], until [`Self::settle`] has returned. Nothing is offered already.
    pub(super) unsafe fn offer(&self, task: &Task<'_>, start: usize, len: usize) {
        // SAFETY: nothing is offered, so the word is free and the cell this thread's.
        let cell = unsafe { &mut *self.shared.cell.get() };
        cell.from.clear();
        cell.from.extend(task.from.iter().map(|from| from.wrapping_add(start)));
        cell.into.clear();
        cell.into.extend(task.into.iter().map(|into| into.wrapping_add(start)));
        (cell.what, cell.len, cell.caching) = (task.what, len, task.caching);
        self.shared.word.0.store(OFFERED, Ordering::Release);
        // Costs little if it is awake.
        self.thread.unpark();
    }

    /// Sees to it that what was offered is done: by the helper, or here if it has not begun.
    pub(super) fn settle(&self) -> Result<()> {
        let word = &self.shared.word.0;
        let back = word.compare_exchange(OFFERED, FREE, Ordering::Acquire, Ordering::Relaxed);
        if back.is_ok() {
            // SAFETY: the word says that the cell is this thread's; the task was offered with the promise that it may run.
            return unsafe { (*self.shared.cell.get()).task().run(Instructions::best()) };
        }
        // Ends with the copy that the helper is in the middle of: no other process and no lock has a say in it.
        let mut looks = 0u32;
        while word.load(Ordering::Acquire) != FREE {
            looks = looks.saturating_add(1);
            if looks < 20_000 { spin_loop() } else { thread::yield_now() }
        }
        // SAFETY: the word is free, so the cell is this thread's.
        let cell = unsafe { &mut *self.shared.cell.get() };
        std::mem::replace(&mut cell.result, Ok(()))
    }
}

impl Drop for Helper {
    /// Does not wait for its end: in a forked child there is no such thread.
    fn drop(&mut self) {
        self.shared.over.0.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// What the two threads have in common. The helper looks at the word all the time: it has lines of its own.
struct Shared {
    cell: UnsafeCell<Cell>,
    word: Apart<AtomicU32>,
    over: Apart<AtomicBool>,
}

/// Two cache lines for one value: processors fetch them in pairs.
#[repr(align(128))]
struct Apart<T>(T);

// SAFETY: the cell is touched only by whom the word names, and the word is handed on with release and acquire. Whoever
// offers a task promises that its pointers may be used by either thread.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shared")
    }
}

/// A task that is offered, and how it ended. Its lists keep their memory.
struct Cell {
    what: What,
    from: Vec<*const u8>,
    into: Vec<*mut u8>,
    len: usize,
    caching: Caching,
    result: Result<()>,
}

impl Cell {
    fn task(&self) -> Task<'_> {
        let Self { what, from, into, len, caching, .. } = self;
        Task { what: *what, from, into, len: *len, caching: *caching }
    }
}

impl Shared {
    /// The helper thread.
    fn help(&self) {
        let instructions = Instructions::best();
        let mut since = Instant::now();
        loop {
            if self.take(instructions) {
                since = Instant::now();
                continue;
            }
            if self.over.0.load(Ordering::Acquire) {
                return;
            }
            for _ in 0..100 {
                if self.word.0.load(Ordering::Relaxed) == OFFERED {
                    break;
                }
                spin_loop();
            }
            if since.elapsed() > LOOK {
                thread::park();
                since = Instant::now();
            }
        }
    }

    /// Does what is offered, if anything is.
    fn take(&self, instructions: Instructions) -> bool {
        if self.word.0.compare_exchange(OFFERED, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return false;
        }
        // Frees the cell whatever happens: the caller waits for it.
        let _done = Done(&self.word.0);
        // SAFETY: the word says that the cell is this thread's, until `_done` is dropped.
        let cell = unsafe { &mut *self.cell.get() };
        cell.result = Err(Error::bug("a thread that helped with a copy has ended"));
        // SAFETY: who offered the task promised it.
        cell.result = unsafe { cell.task().run(instructions) };
        true
    }
}

struct Done<'a>(&'a AtomicU32);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(FREE, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn copy<'a>(from: &'a [*const u8], into: &'a [*mut u8], len: usize) -> Task<'a> {
        Task { what: What::Copy, from, into, len, caching: Caching::Keep }
    }

    /// Whether awake or asleep; nobody takes anything back here.
    #[test]
    fn a_helper_does_what_is_offered() {
        let helper = Helper::start().unwrap();
        for round in 0..20u8 {
            let (from, mut into) = (vec![round; 5000], vec![255; 5000]);
            // SAFETY: both live until the helper is through with them, which is awaited below.
            unsafe { helper.offer(&copy(&[from.as_ptr()], &[into.as_mut_ptr()], 5000), 1000, 3000) };
            let begin = Instant::now();
            while helper.shared.word.0.load(Ordering::Acquire) != FREE {
                assert!(begin.elapsed() < Duration::from_secs(60));
                thread::sleep(Duration::from_micros(10));
            }
            helper.settle().unwrap();
            let expected = [vec![255; 1000], vec![round; 3000], vec![255; 1000]].concat();
            assert!(into == expected, "{round}");
            thread::sleep(LOOK * u32::from(round % 3) * 2);
        }
    }

    #[test]
    fn what_is_taken_back_is_done_all_the_same() {
        let helper = Helper::start().unwrap();
        for round in 0..2000u32 {
            let (from, mut into) = (vec![round as u8; 300], vec![255; 300]);
            // SAFETY: both live until it is settled.
            unsafe { helper.offer(&copy(&[from.as_ptr()], &[into.as_mut_ptr()], 300), 0, 300) };
            helper.settle().unwrap();
            assert!(into == from, "{round}");
        }
        helper.settle().unwrap();
    }

    /// An error is told once, and the next task is not its heir.
    #[test]
    fn an_error_comes_back() {
        let helper = Helper::start().unwrap();
        for _ in 0..200 {
            let what = What::Reduce(ReduceOp::Sum, Dtype::F32);
            let task = Task { what, from: &[], into: &[], len: 4, caching: Caching::Keep };
            // SAFETY: there is no pointer.
            unsafe { helper.offer(&task, 0, 4) };
            helper.settle().unwrap_err();
            helper.settle().unwrap();
        }
    }
}
