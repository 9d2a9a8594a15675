//! The GPU of a rank: memory of its pool, and the one queue that all operations are put on.

use std::sync::Arc;
use std::time::Duration;

use tensorwire::device::flag::LINE;
use tensorwire::device::pool::Pool;
use tensorwire::device::{Abort, Caching, Queue};
use tensorwire::{Deadline, Dtype, Group, ReduceOp, Result, Span};

use crate::bench::device::BenchDevice;
use crate::bench::parts::{Pair, hand_over, take_over};

/// How long the GPU may take for what is not an operation of the group.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where a rank works on a GPU.
#[derive(Debug)]
pub(super) struct RankGpu {
    pool: Pool,
    queue: Box<dyn Queue>,
}

impl RankGpu {
    /// The GPU of this rank: ranks take GPUs in turn. Nothing on the host.
    pub(super) fn open(group: &Group, device: BenchDevice) -> Result<Option<Self>> {
        if !device.is_gpu() {
            return Ok(None);
        }
        let context = group.context();
        let gpus = device.gpus(context.access()?)?;
        let Some(gpu) = gpus.get(group.rank() % gpus.len().max(1)) else { return Ok(None) };
        Ok(Some(Self { pool: context.pool(&gpu.id)?, queue: context.device(&gpu.id)?.queue()? }))
    }

    pub(super) fn alloc(&self, bytes: usize) -> Result<Span> {
        // A pool's pieces may be larger.
        Ok(Span::whole(self.pool.alloc(bytes)?).slice(0..bytes)?)
    }

    pub(super) fn queue(&mut self) -> &mut dyn Queue {
        &mut *self.queue
    }

    /// Copies on this GPU, and waits for it.
    pub(super) fn copy(&mut self, into: &Span, from: &Span) -> Result<()> {
        self.queue.begin(None)?;
        self.queue.copy(into.view(), from.view(), Caching::Keep)?;
        self.finish()
    }

    /// Reduces tensors of this rank in place, all with the same result, and waits for it.
    pub(super) fn reduce(&mut self, op: ReduceOp, dtype: Dtype, all: &[Span]) -> Result<()> {
        let views: Vec<_> = all.iter().map(Span::view).collect();
        self.queue.begin(None)?;
        self.queue.reduce(op, dtype, &views, &views, Caching::Keep)?;
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        Ok(self.queue.finish(&Abort::local(), Deadline::after(PATIENCE))?)
    }

    /// A side of the queues of ranks 0 and 1, which signal each other; other ranks have none.
    pub(super) fn pair(&self, group: &Group) -> Result<Option<Pair>> {
        const NAME: &str = "hop";
        let flags = match group.rank() {
            0 => {
                let flags = group.context().host().alloc(4 * LINE)?;
                hand_over(group, &flags, NAME)?;
                flags
            }
            1 => take_over(group, NAME)?,
            _ => return Ok(None),
        };
        Pair::new(self.pool.device(), &flags as &Arc<_>, group.rank()).map(Some)
    }
}
