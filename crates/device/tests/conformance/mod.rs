//! What every device must do, written once. A device's test file names the device and gets all of it:
//!
//! ```ignore
//! mod conformance;
//! mod process;
//! conformance::tests!(Some(Subject { device: Box::new(Host) }));
//!
//! #[test]
//! fn child() {
//!     if let (Some(role), Some(subject)) = (process::role(), subject()) {
//!         conformance::processes::child(&role, &subject);
//!     }
//! }
//! ```

#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)]

pub mod copy;
pub mod flags;
pub mod marks;
pub mod memory;
pub mod processes;
pub mod reduce;

use std::sync::Arc;

use tensorwire_device::{
    Abort, Caching, Deadline, Device, Dtype, Flag, Layout, Mark, Queue, ReduceOp, Region, Result, RowPlan,
    Span, View,
};

use crate::process::soon;

/// A device to be tested.
#[derive(Debug)]
pub struct Subject {
    pub device: Box<dyn Device>,
}

impl Subject {
    /// New memory with given bytes.
    fn filled(&self, bytes: &[u8]) -> Arc<dyn Region> {
        let region = self.device.alloc(bytes.len()).unwrap();
        region.write(0, bytes).unwrap();
        region
    }

    /// The same as a span.
    fn span(&self, bytes: &[u8]) -> Span {
        Span::whole(self.filled(bytes))
    }

    /// A queue on which everything is done when its call returns.
    fn queue(&self) -> Box<dyn Queue> {
        Box::new(Eager(self.device.queue().unwrap()))
    }
}

/// A queue that is finished after each call.
#[derive(Debug)]
struct Eager(Box<dyn Queue>);

impl Eager {
    fn done(&mut self) -> Result<()> {
        self.0.finish(&Abort::local(), soon())
    }
}

impl Queue for Eager {
    fn copy(&mut self, dst: View<'_>, src: View<'_>, caching: Caching) -> Result<()> {
        self.0.copy(dst, src, caching)?;
        self.done()
    }

    fn copy_strided(&mut self, dst: (View<'_>, &Layout), src: (View<'_>, &Layout)) -> Result<()> {
        self.0.copy_strided(dst, src)?;
        self.done()
    }

    fn reduce(
        &mut self,
        op: ReduceOp,
        dtype: Dtype,
        inputs: &[View<'_>],
        outputs: &[View<'_>],
        caching: Caching,
    ) -> Result<()> {
        self.0.reduce(op, dtype, inputs, outputs, caching)?;
        self.done()
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
        self.0.reduce_rows(op, dtype, of, inputs, plan, output)?;
        self.done()
    }

    fn signal(&mut self, flag: &Flag, value: u32) -> Result<()> {
        self.0.signal(flag, value)?;
        self.done()
    }

    fn wait(&mut self, flag: &Flag, value: u32, abort: &Abort, deadline: Deadline) -> Result<()> {
        self.0.wait(flag, value, abort, deadline)?;
        self.finish(abort, deadline)
    }

    fn wait_all(&mut self, flags: &[(&Flag, u32)], abort: &Abort, deadline: Deadline) -> Result<()> {
        self.0.wait_all(flags, abort, deadline)?;
        self.finish(abort, deadline)
    }

    fn copy_all(&mut self, copies: &[(View<'_>, View<'_>)], caching: Caching) -> Result<()> {
        self.0.copy_all(copies, caching)?;
        self.done()
    }

    fn begin(&mut self, abort: Option<&Abort>) -> Result<()> {
        self.0.begin(abort)
    }

    fn mark(&mut self) -> Result<Mark> {
        self.0.mark()
    }

    fn follow(&mut self, mark: &Mark, abort: &Abort, deadline: Deadline) -> Result<()> {
        self.0.follow(mark, abort, deadline)
    }

    fn finish(&mut self, abort: &Abort, deadline: Deadline) -> Result<()> {
        self.0.finish(abort, deadline)
    }
}

/// Bytes that repeat late, from a seed.
fn noise(len: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 11) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// All bytes of a region.
fn bytes_of(region: &Arc<dyn Region>) -> Vec<u8> {
    Span::whole(region.clone()).to_vec().unwrap()
}

/// One `#[test]` for everything that a device must do.
macro_rules! tests {
    ($subject:expr) => {
        /// The device, if it is here.
        fn subject() -> Option<$crate::conformance::Subject> {
            use $crate::conformance::Subject;
            $subject
        }

        $crate::conformance::tests! { @each memory:
            new_memory_is_zeroed_and_as_long_as_asked, impossible_lengths_are_refused,
            reads_and_writes_stay_inside, spans_stay_inside, an_import_is_the_same_memory,
            an_import_outlives_the_first_region, an_import_of_another_length_is_refused,
            empty_memory_may_be_shared, adopted_memory_is_kept_exactly_as_long_as_used,
            adopted_memory_is_shared_or_the_reason_is_given, impossible_memory_is_not_adopted
        }
        $crate::conformance::tests! { @each copy:
            copies_between_spans, copies_past_the_caches_from_and_to_any_place, unequal_or_overlapping_spans_are_refused,
            several_copies_in_one_call, a_wrong_copy_among_several_is_refused,
            strided_copies_follow_the_model, odd_layouts_are_refused, strides_of_size_one_may_be_anything
        }
        $crate::conformance::tests! { @each reduce:
            lengths_must_agree, overlap_is_refused, meaningless_pairs_are_refused_before_a_byte_moves,
            one_pass_to_several_outputs_and_in_place, results_past_the_caches_are_the_same_at_any_place,
            many_inputs_and_outputs, rows_are_reductions_of_rows, rows_that_do_not_fit_are_refused
        }
        $crate::conformance::tests! { @each flags:
            a_signal_ends_a_wait_of_another_thread, a_deadline_ends_a_wait, an_abort_ends_a_wait,
            a_wait_for_several_flags_ends_with_the_last, a_deadline_ends_a_wait_for_several_flags,
            a_flag_needs_its_own_aligned_line
        }
        $crate::conformance::tests! { @each marks:
            a_mark_is_behind_what_was_queued, another_queue_follows_a_mark,
            memory_is_kept_until_work_is_done,
            operations_with_their_own_abort_words_follow_each_other, work_says_when_it_ended
        }
        $crate::conformance::tests! { @each processes:
            two_processes_see_each_others_writes, memory_outlives_its_maker, a_signal_crosses_processes,
            an_abort_crosses_processes
        }
    };
    (@each $module:ident: $($name:ident),*) => {
        $(#[test] fn $name() {
            if let Some(subject) = subject() {
                $crate::conformance::$module::$name(&subject);
            }
        })*
    };
}
pub(crate) use tests;
