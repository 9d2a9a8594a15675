//! The collectives of a group: what they take, what they refuse, and how they become operations.

use std::sync::Arc;

use tensorwire_device::{DeviceId, Dtype, Element, ReduceOp, Region};

use super::Group;
use crate::collective::call::Call;
use crate::collective::operation::{Operation, Uneven};
use crate::collective::plan::Counts;
use crate::collective::{Kind, Sparse, SparseCall, Tensor};
use crate::error::{Error, Result};

impl Group {
    /// Reduces a tensor over all ranks; every rank gets the result in its place.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Call<'_> {
        self.all_reduce_coalesced(std::slice::from_ref(tensor), op)
    }

    /// Reduces several tensors over all ranks, each for itself, in one operation.
    pub fn all_reduce_coalesced(&self, tensors: &[Tensor], op: ReduceOp) -> Call<'_> {
        Call::new(&self.0.collectives, || {
            let mut operation = Operation::new(Kind::AllReduce, dtype_of(tensors));
            operation.op = op;
            operation.in_place(tensors, &self.scratch())?;
            operation.counts = Counts::Even(operation.input.len());
            Ok(operation)
        })
    }

    /// Reduces all tensors of all ranks into one result. Every tensor gets this result. The order of the reduction
    /// is that of the ranks, and of the list inside a rank.
    pub fn all_reduce_multi(&self, tensors: &[Tensor], op: ReduceOp) -> Call<'_> {
        Call::new(&self.0.collectives, || {
            let mut operation = Operation::new(Kind::AllReduce, dtype_of(tensors));
            operation.op = op;
            let bytes = equal(Kind::AllReduce, tensors)?;
            operation.together(tensors, &self.scratch())?;
            operation.counts = Counts::Even(bytes);
            Ok(operation)
        })
    }

    /// Reduces a sparse tensor over all ranks; every rank gets the result, which is new. It has the keys that any rank has.
    ///
    /// Elements that a rank does not have take no part: a sum is that of the ranks that have a key, and so are a product, a
    /// minimum and a maximum. An average is divided by the number of all ranks. The ranks' tensors have the same shape and
    /// type, and as many keys as they have.
    ///
    /// The bits are those of a dense [`all_reduce`](Self::all_reduce) with such elements in place of absent ones as change
    /// no other (-0.0 for a sum). It *is* a dense one if that moves fewer bytes, and [`explain`](Self::explain) says so.
    pub fn all_reduce_sparse(&self, tensor: &Sparse, op: ReduceOp) -> SparseCall<'_> {
        SparseCall::new(&self.0.collectives, tensor, op)
    }

    /// Reduces a tensor over all ranks; rank `root` gets the result in its place, all others keep theirs.
    pub fn reduce(&self, tensor: &Tensor, op: ReduceOp, root: usize) -> Call<'_> {
        Call::new(&self.0.collectives, || {
            let mut operation = self.rooted(Kind::Reduce, tensor.dtype(), root)?;
            operation.op = op;
            let tensors = std::slice::from_ref(tensor);
            if self.rank() == root {
                operation.in_place(tensors, &self.scratch())?;
            } else {
                operation.inputs(tensors, &self.scratch())?;
            }
            operation.counts = Counts::Even(tensor.byte_len());
            Ok(operation)
        })
    }

    /// Every rank gets what rank `root` has in the tensor.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Call<'_> {
        self.broadcast_coalesced(std::slice::from_ref(tensor), root)
    }

    /// The same for several tensors in one operation.
    pub fn broadcast_coalesced(&self, tensors: &[Tensor], root: usize) -> Call<'_> {
        Call::new(&self.0.collectives, || {
            let mut operation = self.rooted(Kind::Broadcast, dtype_of(tensors), root)?;
            if self.rank() == root {
                operation.inputs(tensors, &self.scratch())?;
            } else {
                operation.outputs(tensors, &self.scratch())?;
            }
            operation.counts = Counts::Even(bytes_of(tensors));
            Ok(operation)
        })
    }

    /// Every rank gets the inputs of all ranks. `outputs` has one tensor for each rank, as large as that rank's
    /// input.
    pub fn all_gather(&self, outputs: &[Tensor], input: &Tensor) -> Call<'_> {
        Call::new(&self.0.collectives, || {
            self.one_for_each_rank(Kind::AllGather, outputs)?;
            let mut operation = Operation::new(Kind::AllGather, input.dtype());
            operation.inputs(std::slice::from_ref(input), &self.scratch())?;
            operation.outputs(outputs, &self.scratch())?;
            fits(Kind::AllGather, &outputs[self.rank()], input)?;
            operation.counts = counts(outputs);
            Ok(operation)
        })
    }

    /// Every rank gets the inputs of all ranks in one tensor, one after the other. All inputs have the same size.
    pub fn all_gather_into(&self, output: &Tensor, input: &Tensor) -> Call<'_> {
        Call::new(&self.0.collectives, || {
            self.whole_of(Kind::AllGather, output, input)?;
            let mut operation = Operation::new(Kind::AllGather, input.dtype());
            operation.inputs(std::slice::from_ref(input), &self.scratch())?;
            operation.outputs(std::slice::from_ref(output), &self.scratch())?;
            operation.counts = Counts::Even(input.byte_len());
            Ok(operation)
        })
    }

    /// Several tensors gathered in one operation: `outputs[i]` holds the `inputs[i]` of all ranks, one after the other.
    pub fn all_gather_coalesced(&self, outputs: &[Tensor], inputs: &[Tensor]) -> Call<'_> {
        Call::new(&self.0.collectives, || {
            let lists = lists(Kind::AllGather, outputs, inputs, self.world())?;
            let mut operation = Operation::new(Kind::AllGather, dtype_of(inputs));
            operation.inputs(inputs, &self.scratch())?;
            operation.outputs(&lists, &self.scratch())?;
            operation.counts = Counts::Even(operation.input.len());
            Ok(operation)
        })
    }

    /// Rank `root` gets the inputs of all ranks. All have the same size. `outputs` is empty on the other ranks.
    pub fn gather(&self, outputs: &[Tensor], input: &Tensor, root: usize) -> Call<'_> {
        Call::new(&self.0.collectives, || {
            let mut operation = self.rooted(Kind::Gather, input.dtype(), root)?;
            operation.inputs(std::slice::from_ref(input), &self.scratch())?;
            self.only_at_root(Kind::Gather, "outputs", outputs, root, input)?;
            operation.outputs(outputs, &self.scratch())?;
            operation.counts = Counts::Even(input.byte_len());
            Ok(operation)
        })
    }

    /// Every rank gets its part of what rank `root` has. All parts have the same size. `inputs` is empty on the
    /// other ranks.
    pub fn scatter(&self, output: &Tensor, inputs: &[Tensor], root: usize) -> Call<'_> {
        Call::new(&self.0.collectives, || {
            let mut operation = self.rooted(Kind::Scatter, output.dtype(), root)?;
            operation.outputs(std::slice::from_ref(output), &self.scratch())?;
            self.only_at_root(Kind::Scatter, "inputs", inputs, root, output)?;
            operation.inputs(inputs, &self.scratch())?;
            operation.counts = Counts::Even(output.byte_len());
            Ok(operation)
        })
    }

    /// Every rank gets its part of the reduction over all ranks. `inputs` has one tensor for each rank, as large as
    /// that rank's output.
    pub fn reduce_scatter(&self, output: &Tensor, inputs: &[Tensor], op: ReduceOp) -> Call<'_> {
        Call::new(&self.0.collectives, || {
            self.one_for_each_rank(Kind::ReduceScatter, inputs)?;
            let mut operation = Operation::new(Kind::ReduceScatter, output.dtype());
            operation.op = op;
            operation.inputs(inputs, &self.scratch())?;
            operation.outputs(std::slice::from_ref(output), &self.scratch())?;
            fits(Kind::ReduceScatter, output, &inputs[self.rank()])?;
            operation.counts = counts(inputs);
            Ok(operation)
        })
    }

    /// The same for parts of equal size that lie one after the other in one tensor.
    pub fn reduce_scatter_from(&self, output: &Tensor, input: &Tensor, op: ReduceOp) -> Call<'_> {
        Call::new(&self.0.collectives, || {
            self.whole_of(Kind::ReduceScatter, input, output)?;
            let mut operation = Operation::new(Kind::ReduceScatter, output.dtype());
            operation.op = op;
            operation.inputs(std::slice::from_ref(input), &self.scratch())?;
            operation.outputs(std::slice::from_ref(output), &self.scratch())?;
            operation.counts = Counts::Even(output.byte_len());
            Ok(operation)
        })
    }

    /// Several tensors in one operation: `outputs[i]` is this rank's part of the reduction of `inputs[i]`.
    pub fn reduce_scatter_coalesced(&self, outputs: &[Tensor], inputs: &[Tensor], op: ReduceOp) -> Call<'_> {
        Call::new(&self.0.collectives, || {
            let lists = lists(Kind::ReduceScatter, inputs, outputs, self.world())?;
            let mut operation = Operation::new(Kind::ReduceScatter, dtype_of(outputs));
            operation.op = op;
            operation.inputs(&lists, &self.scratch())?;
            operation.outputs(outputs, &self.scratch())?;
            operation.counts = Counts::Even(operation.output.len());
            Ok(operation)
        })
    }

    /// Every rank sends one part to each rank and gets one part from each: `inputs[j]` goes to rank `j`,
    /// `outputs[i]` comes from rank `i`. The parts may have different sizes, but sender and receiver must agree.
    pub fn all_to_all(&self, outputs: &[Tensor], inputs: &[Tensor]) -> Call<'_> {
        Call::new(&self.0.collectives, || {
            self.one_for_each_rank(Kind::AllToAll, outputs)?;
            self.one_for_each_rank(Kind::AllToAll, inputs)?;
            let mut operation = Operation::new(Kind::AllToAll, dtype_of(inputs));
            operation.inputs(inputs, &self.scratch())?;
            operation.outputs(outputs, &self.scratch())?;
            let bytes = |tensors: &[Tensor]| tensors.iter().map(Tensor::byte_len).collect::<Vec<_>>();
            operation.set_uneven(Uneven { given: bytes(inputs), taken: bytes(outputs) });
            Ok(operation)
        })
    }

    /// The same for parts of equal size that lie one after the other in one tensor.
    pub fn all_to_all_into(&self, output: &Tensor, input: &Tensor) -> Call<'_> {
        Call::new(&self.0.collectives, || {
            fits(Kind::AllToAll, output, input)?;
            let world = self.world();
            if !input.len().is_multiple_of(world) {
                let count = input.len();
                return Err(Error::misuse(format!(
                    "{count} elements cannot be cut into {world} equal parts"
                )));
            }
            let mut operation = Operation::new(Kind::AllToAll, input.dtype());
            operation.counts = Counts::Even(input.byte_len() / world);
            operation.inputs(std::slice::from_ref(input), &self.scratch())?;
            operation.outputs(std::slice::from_ref(output), &self.scratch())?;
            Ok(operation)
        })
    }

    /// A tensor of one dimension with these values, in memory that the other ranks of the host can reach.
    pub fn tensor<T: Element>(&self, values: &[T]) -> Result<Tensor> {
        let tensor = Tensor::flat(self.alloc(size_of_val(values))?, T::DTYPE)?;
        tensor.write(values)?;
        Ok(tensor)
    }

    /// Reduces a slice over all ranks, by way of private memory.
    pub fn all_reduce_slice<T: Element>(&self, values: &mut [T], op: ReduceOp) -> Result<()> {
        let tensor = Tensor::private(values)?;
        self.all_reduce(&tensor, op).on_memory_made_here().wait()?;
        tensor.read(values)
    }

    /// A barrier: it is over when every rank has called it. One that timed out is cancelled for all ranks, like any operation.
    pub fn barrier(&self) -> Call<'_> {
        Call::barrier(&self.0.collectives)
    }

    /// Refuses a tensor that is not as large as one part for each rank.
    fn whole_of(&self, kind: Kind, whole: &Tensor, part: &Tensor) -> Result<()> {
        let world = self.world();
        if Some(whole.len()) == part.len().checked_mul(world) && whole.dtype() == part.dtype() {
            return Ok(());
        }
        Err(Error::misuse(format!(
            "{kind} with tensors of {} {} and of {} {} elements; the one should be {world} times the other",
            whole.len(),
            whole.dtype(),
            part.len(),
            part.dtype()
        )))
    }

    fn rooted(&self, kind: Kind, dtype: Dtype, root: usize) -> Result<Operation> {
        if root >= self.world() {
            let world = self.world();
            return Err(Error::misuse(format!(
                "there is no rank {root} in a world of {world} to be the root"
            )));
        }
        let mut operation = Operation::new(kind, dtype);
        operation.root = root;
        Ok(operation)
    }

    fn one_for_each_rank(&self, kind: Kind, tensors: &[Tensor]) -> Result<()> {
        if tensors.len() == self.world() {
            return Ok(());
        }
        let (count, world) = (tensors.len(), self.world());
        Err(Error::misuse(format!(
            "{kind} in a world of {world} needs a list of {world} tensors, not {count}"
        )))
    }

    fn only_at_root(&self, kind: Kind, what: &str, list: &[Tensor], root: usize, own: &Tensor) -> Result<()> {
        if self.rank() != root {
            return match list {
                [] => Ok(()),
                _ => Err(Error::misuse(format!("{what} of {kind} are given at rank {root} only"))),
            };
        }
        self.one_for_each_rank(kind, list)?;
        list.iter().try_for_each(|tensor| fits(kind, tensor, own))
    }

    /// Memory for tensors that must be packed. On the host no other rank maps it: it does not live long enough to be worth
    /// that. On a GPU it comes from the pool, whose segments stay mapped.
    fn scratch(&self) -> impl Fn(&DeviceId, usize) -> Result<Arc<dyn Region>> + '_ {
        |device, bytes| match device {
            DeviceId::Host => Ok(tensorwire_device::host::private(bytes)?),
            gpu => Ok(self.context().pool(gpu)?.alloc(bytes)?),
        }
    }
}

fn dtype_of(tensors: &[Tensor]) -> Dtype {
    tensors.first().map_or(Dtype::U8, Tensor::dtype)
}

fn bytes_of(tensors: &[Tensor]) -> usize {
    tensors.iter().map(Tensor::byte_len).sum()
}

fn counts(parts: &[Tensor]) -> Counts {
    let first = parts.first().map_or(0, Tensor::byte_len);
    if parts.iter().all(|part| part.byte_len() == first) {
        return Counts::Even(first);
    }
    Counts::PerRank(parts.iter().map(Tensor::byte_len).collect())
}

/// Refuses a pair of tensors that should be equally large and are not.
fn fits(kind: Kind, one: &Tensor, other: &Tensor) -> Result<()> {
    if one.len() == other.len() && one.dtype() == other.dtype() {
        return Ok(());
    }
    Err(Error::misuse(format!(
        "{kind} with tensors of {} {} and of {} {} elements, which should be the same",
        one.len(),
        one.dtype(),
        other.len(),
        other.dtype()
    )))
}

fn equal(kind: Kind, tensors: &[Tensor]) -> Result<usize> {
    let Some(first) = tensors.first() else {
        return Err(Error::misuse(format!("{kind} of no tensors")));
    };
    tensors.iter().try_for_each(|tensor| fits(kind, first, tensor))?;
    Ok(first.byte_len())
}

/// The parts of `wholes`, which are `world` times as large as `parts`, by rank and then by tensor.
fn lists(kind: Kind, wholes: &[Tensor], parts: &[Tensor], world: usize) -> Result<Vec<Tensor>> {
    if wholes.len() != parts.len() {
        let (wholes, parts) = (wholes.len(), parts.len());
        return Err(Error::misuse(format!("{kind} with lists of {wholes} and {parts} tensors")));
    }
    let split = wholes.iter().map(|whole| whole.split(world)).collect::<Result<Vec<_>>>()?;
    for (pieces, part) in split.iter().zip(parts) {
        fits(kind, &pieces[0], part)?;
    }
    Ok((0..world).flat_map(|rank| split.iter().map(move |pieces| pieces[rank].clone())).collect())
}
