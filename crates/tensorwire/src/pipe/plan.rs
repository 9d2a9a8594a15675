//! Which bytes of a message travel: its blocks, and where its tensors lie in them.
//!
//! Tensors that share memory are sent once, as one block that all of them lie in. A tensor with gaps is packed, unless the gaps are
//! sent anyway.

use std::ops::Range;
use std::sync::Arc;

use tensorwire_device::subregion::keeping;
use tensorwire_device::{Abort, Deadline, DeviceId, Layout, Region, Span};

use super::descriptor::TensorPart;
use super::lanes::Lanes;
use super::send::LARGE;
use crate::collective::Tensor;
use crate::context::Context;
use crate::error::Result;
use crate::share::{root, start_in};

/// The blocks of a message, and its tensors in them.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) blocks: Vec<Span>,
    pub(super) tensors: Vec<TensorPart>,
}

/// The bytes of an allocation that tensors without gaps touch.
struct Run {
    root: Arc<dyn Region>,
    bytes: Range<usize>,
    /// What keeps them: the allocation alone does not, if they are of a pool, or lent.
    keep: Vec<Span>,
    /// Its block, once it has one.
    block: Option<usize>,
}

impl Run {
    fn place(&self) -> (usize, usize, usize) {
        place(&self.root, self.bytes.start)
    }

    fn holds(&self, root: &Arc<dyn Region>, bytes: &Range<usize>) -> bool {
        Arc::ptr_eq(&self.root, root) && self.bytes.start <= bytes.start && bytes.end <= self.bytes.end
    }
}

impl Plan {
    /// Tensors of GPUs are packed on these queues.
    pub(super) fn of(
        context: &Context,
        payloads: &[Tensor],
        tensors: &[Tensor],
        lanes: &mut Lanes,
    ) -> Result<Self> {
        let mut runs = runs(tensors)?;
        let mut blocks: Vec<Span> = payloads.iter().map(|payload| payload.span().clone()).collect();
        let mut parts = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let (dtype, layout) = (tensor.dtype(), tensor.layout());
            let (root, bytes) = touched(tensor)?;
            // The last one that begins before it or with it: they do not overlap.
            let before = runs.partition_point(|run| run.place() <= place(root, bytes.start));
            let run = runs[..before].last_mut().filter(|run| !bytes.is_empty() && run.holds(root, &bytes));
            let (block, layout) = match run {
                Some(run) => {
                    let block = match run.block {
                        Some(block) => block,
                        None => {
                            let kept = Box::new(std::mem::take(&mut run.keep));
                            blocks.push(Span::whole(keeping(run.root.clone(), run.bytes.clone(), kept)?));
                            *run.block.insert(blocks.len() - 1)
                        }
                    };
                    let origin = start_in(root, tensor.span()) + layout.origin() - run.bytes.start;
                    (block, Layout::with_origin(layout.shape(), layout.strides(), layout.item(), origin)?)
                }
                None => {
                    blocks.push(packed(context, tensor, lanes)?);
                    (blocks.len() - 1, Layout::contiguous(layout.shape(), layout.item())?)
                }
            };
            parts.push(TensorPart { dtype, maker: 0, block, layout });
        }
        Ok(Self { blocks, tensors: parts })
    }
}

/// What tensors without gaps touch; those that share bytes are one.
fn runs(tensors: &[Tensor]) -> Result<Vec<Run>> {
    let mut runs: Vec<Run> = Vec::new();
    for tensor in tensors {
        let (root, bytes) = touched(tensor)?;
        if bytes.is_empty() || !fills(tensor, bytes.len())? {
            continue;
        }
        runs.push(Run { root: root.clone(), bytes, keep: vec![tensor.span().clone()], block: None });
    }
    runs.sort_by_key(Run::place);
    runs.dedup_by(|next, before| {
        let one = Arc::ptr_eq(&next.root, &before.root) && next.bytes.start < before.bytes.end;
        if one {
            before.bytes.end = before.bytes.end.max(next.bytes.end);
            before.keep.append(&mut next.keep);
        }
        one
    });
    Ok(runs)
}

/// Whether a tensor touches every one of its bytes from the first to the last, however often.
fn fills(tensor: &Tensor, bytes: usize) -> Result<bool> {
    let layout = tensor.layout();
    let dims = layout.shape().iter().zip(layout.strides()).filter(|(_, stride)| **stride != 0);
    let (shape, strides): (Vec<_>, Vec<_>) = dims.map(|(&size, &stride)| (size, stride)).unzip();
    let once = Layout::with_origin(&shape, &strides, layout.item(), layout.origin())?;
    let once = Tensor::new(tensor.span().clone(), tensor.dtype(), once)?;
    Ok(once.byte_len() == bytes && !once.overlaps_itself())
}

/// By allocation, then by where it begins.
fn place(root: &Arc<dyn Region>, start: usize) -> (usize, usize, usize) {
    (root.addr(), Arc::as_ptr(root).cast::<()>() as usize, start)
}

/// The allocation of a tensor, and which of its bytes it touches, gaps included.
fn touched(tensor: &Tensor) -> Result<(&Arc<dyn Region>, Range<usize>)> {
    let root = root(tensor.span().region());
    let (start, (low, high)) = (start_in(root, tensor.span()), tensor.layout().extent()?);
    Ok((root, start + low..start + high))
}

/// A copy without gaps; nothing for one without elements.
fn packed(context: &Context, tensor: &Tensor, lanes: &mut Lanes) -> Result<Span> {
    let (len, device) = (tensor.byte_len(), tensor.span().device());
    let copy = Span::whole(match len {
        _ if device != DeviceId::Host => context.pool(&device)?.alloc(len)?,
        // It is large enough to be lent.
        LARGE.. => context.pool(&device)?.alloc(len)?,
        _ => tensorwire_device::host::private(len)?,
    });
    let copy = copy.slice(0..len)?;
    if tensor.is_empty() {
        return Ok(copy);
    }
    let layout = Layout::contiguous(tensor.layout().shape(), tensor.dtype().size())?;
    let (to, from) = ((copy.view(), &layout), (tensor.span().view(), tensor.layout()));
    if device != DeviceId::Host {
        lanes.of(&device)?.copy_strided(to, from)?;
        return Ok(copy);
    }
    let mut queue = context.host().queue()?;
    queue.copy_strided(to, from)?;
    queue.finish(&Abort::local(), Deadline::after(context.config().timeout))?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use tensorwire_device::Dtype;

    use super::*;

    fn lanes(context: &Arc<Context>) -> Lanes {
        Lanes::new(context, &Arc::default(), true, &[])
    }

    fn at(span: &Span, shape: &[usize], strides: &[isize]) -> Tensor {
        Tensor::strided(span.clone(), Dtype::F32, shape, strides).unwrap()
    }

    #[test]
    fn views_of_one_memory_are_sent_once() {
        let context = Context::new(crate::Config::default()).unwrap();
        let memory = context.alloc(4096).unwrap();
        let part = |bytes: Range<usize>| memory.slice(bytes).unwrap();
        let tensors = [
            at(&part(64..128), &[4, 4], &[4, 1]),
            // Turned, and one that overlaps it.
            at(&part(64..128), &[4, 4], &[1, 4]),
            at(&part(120..160), &[10], &[1]),
            // With gaps, inside of what is sent.
            at(&part(64..128), &[4], &[4]),
            // With gaps, although some of its elements are the same memory.
            at(&part(512..1024), &[10, 3], &[2, 0]),
            // Elsewhere.
            at(&part(160..168), &[2], &[1]),
            // With gaps, outside.
            at(&part(1024..2048), &[4], &[64]),
            // Repeated.
            at(&part(2048..2052), &[100], &[0]),
            at(&part(0..0), &[0, 3], &[3, 1]),
        ];
        let plan = Plan::of(&context, &[], &tensors, &mut lanes(&context)).unwrap();
        let blocks: Vec<_> = plan.tensors.iter().map(|part| part.block).collect();
        assert_eq!(blocks, [0, 0, 0, 0, 1, 2, 3, 4, 5]);
        let lens: Vec<_> = plan.blocks.iter().map(Span::len).collect();
        assert_eq!(lens, [96, 120, 8, 16, 4, 0]);
        for (tensor, part) in tensors.iter().zip(&plan.tensors) {
            assert_eq!(part.layout.shape(), tensor.layout().shape());
            part.layout.fits(plan.blocks[part.block].len()).unwrap();
        }
        assert_eq!(plan.tensors[2].layout.origin(), 56);
        assert!(plan.tensors[6].layout.is_contiguous());
    }

    /// Whatever is sent, each tensor's elements are found where its part says.
    #[test]
    fn the_elements_are_where_the_plan_says() {
        let context = Context::new(crate::Config::default()).unwrap();
        let memory = context.alloc(1 << 12).unwrap();
        let numbers: Vec<u8> = (0..1024_u32).flat_map(u32::to_le_bytes).collect();
        memory.write(0, &numbers).unwrap();
        let mut random = 7_u64;
        let mut next = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % below
        };
        for _ in 0..200 {
            let tensors: Vec<_> = (0..1 + next(6))
                .map(|_| {
                    let (start, shape) = (next(600), [next(5), 1 + next(5)]);
                    let strides = [next(40) as isize, next(7) as isize];
                    at(&memory.slice(start * 4..4096).unwrap(), &shape, &strides)
                })
                .collect();
            let plan = Plan::of(&context, &[], &tensors, &mut lanes(&context)).unwrap();
            for (tensor, part) in tensors.iter().zip(&plan.tensors) {
                let block = &plan.blocks[part.block];
                let there = Tensor::new(block.clone(), Dtype::F32, part.layout.clone()).unwrap();
                let bytes = |tensor: &Tensor| {
                    packed(&context, tensor, &mut lanes(&context)).unwrap().to_vec().unwrap()
                };
                assert_eq!(bytes(tensor), bytes(&there));
            }
        }
    }
}
