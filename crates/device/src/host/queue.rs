//! The host's queue: work is done at once, on the caller's thread, and if the caller wishes on others beside it.

use super::copy::copy;
use super::give::{Giving, Way};
use crate::deadline::Deadline;
use crate::device::{Caching, Mark, Queue};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::flag::LINE;
use crate::flag::{Abort, Flag};
use crate::host::helper::{Helper, Task, What};
use crate::host::reduce::{Instructions, Pointers};
use crate::layout::{self, Dim, Layout};
#[cfg(not(loom))]
use crate::meeting::Meeting;
#[cfg(not(loom))]
use crate::meeting::here::MeetingHere;
use crate::op::ReduceOp;
use crate::rows::RowPlan;
use crate::span::{View, overlap};

/// Results shorter than this stay in the caches whatever the caller asks for.
const BYPASS: usize = 4096;

/// Runs everything when it is called, so nothing is ever pending.
#[derive(Debug)]
pub(super) struct HostQueue {
    instructions: Instructions,
    /// For results of up to [`NARROW`] bytes.
    narrow: Instructions,
    /// How many threads share large work, and those of them that are not the caller's, once they were needed.
    threads: usize,
    helpers: Vec<Helper>,
    /// How results are written that others read: of copies, and of reductions.
    copied: Giving,
    reduced: Giving,
}

impl HostQueue {
    /// With the best instructions that are here.
    pub(super) fn new() -> Self {
        let (instructions, narrow) = (Instructions::best(), Instructions::narrow());
        let (copied, reduced) = (Giving::new(), Giving::new());
        Self { instructions, narrow, threads: 1, helpers: Vec::new(), copied, reduced }
    }

    /// Whether work that reads and writes so many bytes is shared.
    #[inline]
    fn is_shared(&self, bytes: usize) -> bool {
        self.threads > 1 && bytes >= SHARED
    }

    /// Does a task whose result others read: the first bytes for a trial, and what is left as is known then.
    ///
    /// # Safety
    /// As for [`Task::run`].
    #[cold]
    unsafe fn give(&mut self, (piece, caching): (usize, Caching), task: &Task<'_>) -> Result<()> {
        let giving = match task.what {
            What::Copy => &mut self.copied,
            What::Reduce(..) => &mut self.reduced,
        };
        let trials = giving.of(task.len);
        let tried = Task { len: piece, caching, ..*task };
        // SAFETY: the first part of what the caller vouches for: whole lines, so whole elements.
        trials.watch((piece, caching), || unsafe { tried.run(self.instructions) })?;
        let caching = trials.known();
        let (mut from, mut into) = (Pointers::new(), Pointers::new());
        from.extend(task.from.iter().map(|from| from.wrapping_add(piece)));
        into.extend(task.into.iter().map(|into| into.wrapping_add(piece)));
        let len = task.len - piece;
        let rest = Task { what: task.what, from: &from, into: &into, len, caching };
        // SAFETY: what is left of what the caller vouches for.
        unsafe {
            match self.is_shared(len.saturating_mul(from.len() + into.len())) {
                true => self.together(&rest),
                false => rest.run(self.instructions),
            }
        }
    }

    /// Does a task together with the helpers.
    ///
    /// # Safety
    /// As for [`Task::run`].
    #[cold]
    unsafe fn together(&mut self, task: &Task<'_>) -> Result<()> {
        while self.helpers.len() + 1 < self.threads {
            match Helper::start() {
                Ok(helper) => self.helpers.push(helper),
                Err(error) => {
                    let fewer = self.helpers.len() + 1;
                    tracing::warn!("large copies are done by {fewer} threads, not {}: {error}", self.threads);
                    self.threads = fewer;
                }
            }
        }
        // The caller has the first part; parts begin at the distance of whole lines.
        let part = (task.len / self.threads).next_multiple_of(LINE);
        let helped = Helped(&self.helpers[..self.threads - 1]);
        let mut start = part.min(task.len);
        let own = Task { len: start, ..*task };
        for (index, helper) in helped.0.iter().enumerate() {
            let last = index + 1 == helped.0.len();
            let len = if last { task.len - start } else { part.min(task.len - start) };
            if len > 0 {
                // SAFETY: a part of what the caller vouches for, apart from the others; `helped` settles it before
                // this function returns or unwinds.
                unsafe { helper.offer(task, start, len) };
            }
            start += len;
        }
        // SAFETY: the first part of what the caller vouches for.
        let done = unsafe { own.run(self.instructions) };
        done.and(helped.settle())
    }
}

/// Helpers that may have a part: memory must not go before they are through with it.
struct Helped<'a>(&'a [Helper]);

impl Helped<'_> {
    /// Waits for all of them, also where one has failed.
    fn settle(&self) -> Result<()> {
        let mut result = Ok(());
        for helper in self.0 {
            result = result.and(helper.settle());
        }
        result
    }
}

impl Drop for Helped<'_> {
    fn drop(&mut self) {
        let _ = self.settle();
    }
}

impl Queue for HostQueue {
    fn copy(&mut self, dst: View<'_>, src: View<'_>, caching: Caching) -> Result<()> {
        if dst.len() != src.len() {
            return Err(Error::misuse(format!("copying {} bytes into {}", src.len(), dst.len())));
        }
        let (into, from) = (reach(dst)?, reach(src)?);
        if overlap(into, from, src.len()) {
            return Err(Error::misuse("copying between spans that overlap"));
        }
        let (from, into) = (from as *const u8, into as *mut u8);
        let caching = match way(caching, &mut self.copied, src.len()) {
            Way::Known(caching) => caching,
            Way::Trial(piece, way) => {
                let task = Task { what: What::Copy, from: &[from], into: &[into], len: src.len(), caching };
                // SAFETY: as below.
                return unsafe { self.give((piece, way), &task) };
            }
        };
        if self.is_shared(src.len().saturating_mul(2)) {
            let task = Task { what: What::Copy, from: &[from], into: &[into], len: src.len(), caching };
            // SAFETY: as below.
            return unsafe { self.together(&task) };
        }
        // SAFETY: spans lie inside their regions, which are alive and valid host memory (`reach`), of equal length
        // and apart from each other.
        unsafe {
            match caching {
                Caching::Keep => copy(into, from, src.len()),
                Caching::Bypass | Caching::Give => self.instructions.copy_past_caches(into, from, src.len()),
            }
        }
        Ok(())
    }

    fn copy_strided(&mut self, dst: (View<'_>, &Layout), src: (View<'_>, &Layout)) -> Result<()> {
        let ((dst, to), (src, of)) = (dst, src);
        layout::check_copy((to, dst.len()), (of, src.len()))?;
        let (into, from) = (reach(dst)?, reach(src)?);
        if into < from + src.len() && from < into + dst.len() && !dst.is_empty() && !src.is_empty() {
            return Err(Error::misuse("copying between spans that overlap"));
        }
        if to.count() > 0 {
            let dims = layout::joined(to, of);
            // SAFETY: `fits` saw that every index of either layout stays inside its span, which lies inside its
            // region; the spans are apart from each other.
            unsafe {
                walk(&dims, (into + to.origin()) as *mut u8, (from + of.origin()) as *const u8, to.item())
            };
        }
        Ok(())
    }

    fn reduce(
        &mut self,
        op: ReduceOp,
        dtype: Dtype,
        inputs: &[View<'_>],
        outputs: &[View<'_>],
        caching: Caching,
    ) -> Result<()> {
        let len = op.check_views(dtype, inputs, outputs)?;
        let (mut from, mut into) = (Pointers::new(), Pointers::new());
        let from = reach_all(inputs, &mut from, |addr| addr as *const u8)?;
        let into = reach_all(outputs, &mut into, |addr| addr as *mut u8)?;
        op.check_apart(from, into, len, |input| input.addr(), |output| output.addr())?;
        let caching = match way(caching, &mut self.reduced, len) {
            Way::Known(caching) => caching,
            Way::Trial(piece, way) => {
                let task = Task { what: What::Reduce(op, dtype), from, into, len, caching };
                // SAFETY: as below.
                return unsafe { self.give((piece, way), &task) };
            }
        };
        if self.is_shared(len.saturating_mul(from.len() + into.len())) {
            let task = Task { what: What::Reduce(op, dtype), from, into, len, caching };
            // SAFETY: as below.
            return unsafe { self.together(&task) };
        }
        // SAFETY: all spans have `len` bytes inside live host regions; outputs are apart from each other and are
        // either exactly an input or apart from it.
        unsafe {
            let count = len / dtype.size();
            let instructions = if len <= NARROW { self.narrow } else { self.instructions };
            instructions.reduce(op, dtype, from, into, count, caching)
        }
    }

    fn reduce_rows(
        &mut self,
        op: ReduceOp,
        dtype: Dtype,
        of: usize,
        inputs: &[View<'_>],
        plan: &RowPlan,
        output: View<'_>,
    ) -> Result<()> {
        let Some(bytes) = plan.row((op, dtype, of), inputs, output)? else { return Ok(()) };
        let mut from = Pointers::new();
        let from = reach_all(inputs, &mut from, |addr| addr as *const u8)?;
        let into = reach(output)? as *mut u8;
        let instructions = if bytes <= NARROW { self.narrow } else { self.instructions };
        // SAFETY: all spans lie inside live host regions, with as many rows as the plan says or makes, and the output is apart
        // from the inputs.
        unsafe { instructions.reduce_rows((op, dtype, of), from, plan, into, bytes / dtype.size()) }
    }

    #[cfg(not(loom))]
    fn reduce_together(
        &mut self,
        op: ReduceOp,
        dtype: Dtype,
        inputs: &[View<'_>],
        outputs: &[View<'_>],
        meeting: &Meeting<'_>,
    ) -> Result<()> {
        // Nobody is kept waiting by what cannot be done.
        op.check_views(dtype, inputs, outputs)?;
        inputs.iter().chain(outputs).try_for_each(|&view| reach(view).map(drop))?;
        let here = MeetingHere::new(meeting, |view| reach(view).map(|_| view.to_span()))?;
        here.hold(meeting.goes_on, || self.reduce(op, dtype, inputs, outputs, Caching::Keep))
    }

    #[cfg(not(loom))]
    fn meet(&mut self, meeting: &Meeting<'_>) -> Result<()> {
        MeetingHere::new(meeting, |view| reach(view).map(|_| view.to_span()))?.once(meeting.goes_on)
    }

    fn signal(&mut self, flag: &Flag, value: u32) -> Result<()> {
        flag.signal(value);
        Ok(())
    }

    fn wait(&mut self, flag: &Flag, value: u32, abort: &Abort, deadline: Deadline) -> Result<()> {
        flag.wait(value, abort, deadline)
    }

    fn mark(&mut self) -> Result<Mark> {
        Ok(Mark::passed())
    }

    fn follow(&mut self, mark: &Mark, abort: &Abort, deadline: Deadline) -> Result<()> {
        mark.wait(abort, deadline)
    }

    fn share(&mut self, threads: usize) {
        self.threads = threads.max(1);
    }

    fn finish(&mut self, _abort: &Abort, _deadline: Deadline) -> Result<()> {
        Ok(())
    }
}

/// Work on fewer bytes is done before another thread has seen it.
const SHARED: usize = 128 << 10;

/// Bytes up to which the widest registers are not worth waking.
const NARROW: usize = 256;

/// How a result of so many bytes is written.
#[inline]
fn way(caching: Caching, giving: &mut Giving, len: usize) -> Way {
    match caching {
        Caching::Bypass if len < BYPASS => Way::Known(Caching::Keep),
        Caching::Give => giving.way(len),
        caching => Way::Known(caching),
    }
}

/// The address of a view in host memory.
#[inline]
fn reach(view: View<'_>) -> Result<usize> {
    view.host_addr().ok_or_else(|| out_of_reach(view))
}

/// Pointers to all of them.
#[inline]
fn reach_all<'a, T: Copy>(
    views: &[View<'_>],
    room: &'a mut Pointers<T>,
    pointer: impl Fn(usize) -> T,
) -> Result<&'a [T]> {
    let mut lost = None;
    let pointers = views.iter().map(|&view| {
        let addr = view.host_addr();
        if addr.is_none() {
            lost = Some(view);
        }
        pointer(addr.unwrap_or_default())
    });
    room.extend(pointers);
    match lost {
        None => Ok(room),
        Some(view) => Err(out_of_reach(view)),
    }
}

#[cold]
fn out_of_reach(view: View<'_>) -> Error {
    Error::misuse(format!("the host's queue cannot reach memory of {}", view.device()))
}

/// Copies element by element, or run by run where the innermost dimension has no gaps.
///
/// # Safety
/// Every index of `dims` from `into` and `from` is valid memory; the two sides are apart.
unsafe fn walk(dims: &[Dim], into: *mut u8, from: *const u8, item: usize) {
    match dims {
        // SAFETY: one element on each side, by the caller's promise.
        [] => unsafe { copy(into, from, item) },
        [run] if run.into == item as isize && run.from == item as isize => {
            // SAFETY: `size` elements without gaps on each side, by the caller's promise.
            unsafe { copy(into, from, run.size * item) }
        }
        // SAFETY: the caller's promise; `Layout` knows no other sizes.
        [run] => unsafe {
            match item {
                1 => scatter::<u8>(run, into, from),
                2 => scatter::<u16>(run, into, from),
                4 => scatter::<u32>(run, into, from),
                8 => scatter::<u64>(run, into, from),
                _ => scatter::<[u64; 2]>(run, into, from),
            }
        },
        [outer, inner @ ..] => {
            for index in 0..outer.size as isize {
                // SAFETY: the index is inside the dimension, so the promise holds for what remains.
                unsafe {
                    walk(inner, into.offset(index * outer.into), from.offset(index * outer.from), item)
                };
            }
        }
    }
}

/// Copies one dimension element by element.
///
/// # Safety
/// As for [`walk`], with elements of the size of `T`.
unsafe fn scatter<T: Copy>(run: &Dim, into: *mut u8, from: *const u8) {
    for index in 0..run.size as isize {
        // SAFETY: the index is inside the dimension; nothing is said about alignment.
        unsafe {
            let element = from.offset(index * run.from).cast::<T>().read_unaligned();
            into.offset(index * run.into).cast::<T>().write_unaligned(element);
        }
    }
}
