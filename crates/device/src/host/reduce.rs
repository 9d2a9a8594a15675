//! Reduce kernels.
use crate::{Dtype, ReduceOp, Result};
pub(crate) unsafe fn reduce(
    _op: ReduceOp,
    _dtype: Dtype,
    _inputs: &[*const u8],
    _outputs: &[*mut u8],
    _count: usize,
) -> Result<()> {
    Ok(())
}
