//! Where kernels write when they ended.

use super::holds::Kept;
use super::{By, CudaQueue};
use crate::cuda::driver::Address;
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::span::Span;

/// A place for the time at which the last kernel ended.
pub(super) struct Stamp {
    /// Where it is, and what is to be added to the GPU's time.
    pub(super) place: (Address, u64),
    pub(super) kept: Kept,
}

impl CudaQueue {
    /// See [`Queue::stamp`](crate::Queue::stamp).
    pub(super) fn stamp_at(&mut self, at: &Span) -> Result<()> {
        let view = at.view();
        if view.device() != DeviceId::Host || view.len() != 8 || !view.addr().is_multiple_of(8) {
            return Err(Error::misuse("a time is eight bytes of host memory, at a multiple of eight"));
        }
        let gpu = self.gpu().clone();
        let _entered = gpu.enter()?;
        self.stamp = match gpu.clock_offset() {
            Some(offset) => {
                let (address, kept) = self.reach(view, By::Kernel)?;
                Some(Stamp { place: (address, offset), kept })
            }
            None => None,
        };
        Ok(())
    }
}
