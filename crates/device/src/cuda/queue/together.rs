//! Reductions by kernels that wait for those of other ranks.

use super::{By, CudaQueue, Kept, Local, Stop, refused};
use crate::cuda::driver::Stream;
use crate::cuda::kernels::{self, Gate, Gated, MOST_GATES, MeetingArguments, Together};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::meeting::Meeting;
use crate::op::ReduceOp;
use crate::span::View;
use crate::sync::Ordering;

/// What a kernel needs to meet those of other ranks: its arguments, the abort words, and what lives until it is done.
struct Met {
    arguments: MeetingArguments,
    stops: Vec<Stop>,
    kept: Vec<Kept>,
}

impl CudaQueue {
    /// See [`Queue::reduce_together`](crate::Queue::reduce_together).
    pub(super) fn together(
        &mut self,
        op: ReduceOp,
        dtype: Dtype,
        (inputs, outputs): (&[View<'_>], &[View<'_>]),
        meeting: &Meeting<'_>,
    ) -> Result<()> {
        let len = op.check_views(dtype, inputs, outputs)?;
        let gpu = self.gpu().clone();
        let _entered = gpu.enter()?;
        let captured = self.is_recorded()?;
        // What is reached for the first time may have to be registered, which must not disturb the graph.
        let _relaxed = captured.then(|| gpu.driver.relaxed());
        let (from, mut kept) = self.reach_all(inputs)?;
        let (into, also) = self.reach_all(outputs)?;
        kept.extend(also);
        op.check_apart(&from, &into, len, |input| input as usize, |output| output as usize)?;
        let Met { arguments, stops, kept: of_meeting } = self.met_at(meeting)?;
        kept.extend(of_meeting);
        let reduce = kernels::reduce(op, dtype, &from, &into, len, gpu.facts.processors)?;
        let calls = kernels::together(reduce, arguments, (meeting.blocks, meeting.largest))?;
        let queue = |stream: Stream| -> Result<()> {
            match &calls {
                // SAFETY: all views have `len` bytes in regions that are kept, and so are the words; outputs are apart from
                // each other and are exactly an input or apart from it; the kernels take these arguments.
                Together::Fused(call) => unsafe { self.raw(call, stream) },
                Together::Between { meet, reduce } => {
                    let mut reduce = kernels::Call { arguments: reduce.arguments, ..*reduce };
                    // One read of the GPU's own memory for each block; and nothing that a replay would not look at again.
                    *reduce.arguments.gate() = Gate::new([arguments.stop(), 0], (MOST_GATES, 0));
                    // SAFETY: as above.
                    unsafe {
                        self.raw(meet, stream)?;
                        if len > 0 {
                            self.raw(&reduce, stream)?;
                        }
                        self.raw(meet, stream)
                    }
                }
            }
        };
        self.join(captured, kept, queue)?;
        if !captured {
            self.stop_by(stops);
        }
        Ok(())
    }

    /// See [`Queue::meet`](crate::Queue::meet).
    pub(super) fn meet_once(&mut self, meeting: &Meeting<'_>) -> Result<()> {
        let gpu = self.gpu().clone();
        let _entered = gpu.enter()?;
        let captured = self.is_recorded()?;
        let _relaxed = captured.then(|| gpu.driver.relaxed());
        let Met { arguments, stops, kept } = self.met_at(meeting)?;
        let own = self.reach(meeting.words[meeting.rank], By::Kernel)?.1;
        let call = kernels::meet(arguments);
        // SAFETY: the words are kept; the kernel takes these arguments.
        self.join(captured, kept, |stream| unsafe { self.raw(&call, stream) })?;
        if !captured {
            self.stop_by(stops);
        }
        self.met = Some((arguments.stop(), own));
        Ok(())
    }

    /// Whether what is queued goes into a graph.
    fn is_recorded(&self) -> Result<bool> {
        // SAFETY: the stream lives.
        Ok(self.recording.get() || unsafe { self.gpu().driver.is_capturing(self.stream()) }?)
    }

    /// What a kernel needs to meet those of other ranks.
    fn met_at(&self, meeting: &Meeting<'_>) -> Result<Met> {
        meeting.check()?;
        let (words, mut kept) = self.reach_all(meeting.words)?;
        let (failure, of_failure) = self
            .reach_word(meeting.failure.memory().ok_or_else(|| refused("a word that tells of failures"))?)?;
        kept.push(of_failure);
        let stops = self.stops_of(meeting.abort, Local::Refused)?;
        let mut abort = [0; 2];
        for (place, stop) in abort.iter_mut().zip(&stops) {
            *place = stop.word;
        }
        // The other ranks count on this one once it has come: nothing else may keep it from its part.
        if self.stops.iter().any(|known| !abort.contains(&known.word)) {
            return Err(Error::misuse(
                "a meeting with other ranks behind a wait with other abort words; begin another piece of work in between",
            ));
        }
        kept.extend(stops.iter().map(|stop| stop.kept.clone()));
        Ok(Met { arguments: MeetingArguments::new(meeting, abort, failure, &words)?, stops, kept })
    }

    /// Queues kernels that meet those of other ranks.
    fn join(&self, captured: bool, kept: Vec<Kept>, queue: impl FnOnce(Stream) -> Result<()>) -> Result<()> {
        self.gpu().meetings.fetch_add(1, Ordering::Relaxed);
        if captured {
            // A mark would become a part of the graph.
            self.recorded.borrow_mut().extend(kept);
            return queue(self.stream());
        }
        self.submit(kept, queue)
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// The kernel takes these arguments. All memory that they name is there until it is done.
    unsafe fn raw<A>(&self, call: &kernels::Call<A>, stream: Stream) -> Result<()> {
        let function = self.gpu().function(call.entry)?;
        // SAFETY: the caller's promise.
        unsafe { self.gpu().driver.launch(function, call.grid, &call.arguments, stream) }
    }
}
