//! Rows of an output, each made of rows of inputs.

use std::io::ErrorKind;
use std::sync::Arc;

use super::{By, CudaQueue};
use crate::cuda::driver::Address;
use crate::cuda::kernels::{self, PlacedRows};
use crate::cuda::queue::Kept;
use crate::cuda::region::Mapped;
use crate::device::Region;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::op::ReduceOp;
use crate::rows::RowPlan;
use crate::span::{Span, View};

impl CudaQueue {
    /// See [`Queue::reduce_rows`](crate::Queue::reduce_rows). The plan goes to the GPU's memory, with an address for each row
    /// that it names.
    pub(super) fn by_rows(
        &self,
        what: (ReduceOp, Dtype, usize),
        inputs: &[View<'_>],
        plan: &RowPlan,
        output: View<'_>,
    ) -> Result<()> {
        let Some(row) = plan.row(what, inputs, output)? else { return Ok(()) };
        let gpu = self.gpu();
        let _entered = gpu.enter()?;
        let (from, kept) = self.reach_all(inputs)?;
        let (into, also) = self.reach(output, By::Kernel)?;
        let (bytes, lowest) = placed(plan, &from, row)?;
        let place: Arc<dyn Region> = Arc::new(Mapped::alloc(gpu, bytes.len())?);
        Span::whole(place.clone()).write(0, &bytes)?;
        let sources = place.addr() as Address;
        let ends = sources + (plan.sources().len() * size_of::<Address>()) as Address;
        let plan_there = PlacedRows { ends, sources, lowest };
        let call = kernels::reduce_rows(what, &plan_there, into, (plan.len(), row), gpu.facts.processors)?;
        let plan_kept = Kept::Region { _region: place };
        // SAFETY: the plan names rows that lie inside the inputs, and makes as many as the output has (`RowPlan::row`). It is
        // written, and it is kept with the others until the work is done. The output is apart from the inputs. The kernel takes
        // these arguments.
        unsafe { self.launch(kept.into_iter().chain([also, plan_kept]), call) }
    }
}

/// The addresses of all rows that the plan names, and behind them its ends, as the kernel reads them; and every bit that is
/// set in one of the addresses.
fn placed(plan: &RowPlan, inputs: &[Address], row: usize) -> Result<(Vec<u8>, Address)> {
    let len = size_of_val(plan.ends()) + plan.sources().len() * size_of::<Address>();
    let mut bytes = Vec::new();
    let short = |_| Error::io(format!("planning {} rows", plan.len()), ErrorKind::OutOfMemory);
    bytes.try_reserve_exact(len).map_err(short)?;
    let mut lowest = 0;
    for &(input, at) in plan.sources() {
        let address = inputs[input as usize] + u64::from(at) * row as Address;
        lowest |= address;
        bytes.extend_from_slice(&address.to_ne_bytes());
    }
    bytes.extend(plan.ends().iter().flat_map(|end| end.to_ne_bytes()));
    Ok((bytes, lowest))
}
