//! Signals and waits by words in memory of the GPU, between the streams of two processes: to measure them. Nothing else
//! uses such words, because no store of the processor lets a stream go that waits for one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{CudaQueue, DRAIN, Kept};
use crate::cuda::driver::Address;
use crate::cuda::point::CudaPoint;
use crate::deadline::Deadline;
use crate::device::Region;
use crate::error::{Error, Result};
use crate::flag::LINE;

/// Rounds whose end is looked for together. Two lots are queued at a time: less than a stream takes before its caller has to
/// wait.
const LOT: u32 = 64;

impl CudaQueue {
    /// Signals by one word and waits for the other, `LOT` times in each lot; gives how long a round of each lot took, but
    /// for the first. `words` are two lines that are zero, shared with the process that does the same on the other
    /// `side`, 0 or 1. After an error they are worth nothing.
    pub(in crate::cuda) fn exchange(
        mut self,
        words: &Arc<dyn Region>,
        side: usize,
        lots: u32,
        deadline: Deadline,
    ) -> Result<Vec<Duration>> {
        if words.device() != self.device()
            || words.len() < 2 * LINE
            || !words.addr().is_multiple_of(4)
            || side > 1
        {
            return Err(Error::misuse(
                "an exchange needs two lines of the GPU's own memory, and is side 0 or 1",
            ));
        }
        let gpu = self.gpu().clone();
        let _entered = gpu.enter()?;
        let word = |side: usize| (words.addr() + side * LINE) as Address;
        let (ours, theirs) = (word(side), word(1 - side));
        let rescue = Self::new(gpu.clone())?;
        let keep = || [Kept::Region { _region: words.clone() }];
        let exchanged = self.rounds(words, (ours, theirs), side == 0, lots, deadline);
        if exchanged.is_err() {
            // What waits is let go in the other's place. Where not even that runs, the words stay until the process ends.
            let all = lots.wrapping_mul(LOT);
            // SAFETY: a word of a region that is kept until the work is done.
            let _ = rescue.submit(keep(), |stream| unsafe { gpu.driver.write_value(stream, theirs, all) });
            let until = Deadline::after(DRAIN);
            let _ = self.drain(|| until.passed().then_some(Error::TimedOut));
        }
        exchanged
    }

    fn rounds(
        &mut self,
        words: &Arc<dyn Region>,
        (ours, theirs): (Address, Address),
        begins: bool,
        lots: u32,
        deadline: Deadline,
    ) -> Result<Vec<Duration>> {
        let mut times = Vec::new();
        let mut before: Option<Arc<CudaPoint>> = None;
        let mut ended: Option<Instant> = None;
        for lot in 0..lots {
            let driver = self.gpu().driver;
            self.submit([Kept::Region { _region: words.clone() }], |stream| {
                for turn in 1..=LOT {
                    let turn = lot.wrapping_mul(LOT).wrapping_add(turn);
                    // SAFETY: words of a region that is kept until the work is done.
                    unsafe {
                        if begins {
                            driver.write_value(stream, ours, turn)?;
                            driver.wait_value(stream, theirs, turn)?;
                        } else {
                            driver.wait_value(stream, theirs, turn)?;
                            driver.write_value(stream, ours, turn)?;
                        }
                    }
                }
                Ok(())
            })?;
            // This lot is queued: the one before it may end, and no stream has to stop between them.
            if let Some(point) = before {
                await_lot(&point, deadline)?;
                let now = Instant::now();
                times.extend(ended.map(|ended| (now - ended) / LOT));
                ended = Some(now);
            }
            before = Some(self.holds.lock().mark()?);
        }
        if let Some(point) = before {
            await_lot(&point, deadline)?;
            times.extend(ended.map(|ended| ended.elapsed() / LOT));
        }
        self.drain(|| deadline.passed().then_some(Error::TimedOut))?;
        Ok(times)
    }
}

/// Looks without rest, so that the time is right.
fn await_lot(point: &CudaPoint, deadline: Deadline) -> Result<()> {
    while !point.is_done()? {
        if deadline.passed() {
            return Err(Error::TimedOut);
        }
    }
    Ok(())
}
