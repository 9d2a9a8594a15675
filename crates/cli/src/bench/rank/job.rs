//! One operation with its tensors.

use std::hint::black_box;

use tensorwire::collective::{Path, Tensor};
use tensorwire::device::host;
use tensorwire::{Error, Group, Result, Span};

use crate::bench::op::Op;
use crate::bench::order::{Case, TensorMemory};
use crate::bench::path;
use crate::bench::pattern::{Tile, phase};

const ROOT: usize = 0;
const TAG: u64 = 7;

/// One operation, ready to be called again and again.
#[derive(Debug)]
pub(super) struct Job {
    group: Group,
    case: Case,
    /// What this rank brings; where the operation works in place, also the result.
    input: Tensor,
    output: Tensor,
    /// One part for each rank of the input or output, where the operation wants them so and this rank has them.
    parts: Vec<Tensor>,
    plain: Tile,
    reduced: Tile,
    path: Option<Path>,
    /// For what is checked.
    room: Vec<u8>,
    /// What memcpy copies.
    copied: (Vec<u8>, Vec<u8>),
}

impl Job {
    pub(super) fn new(group: &Group, case: Case) -> Result<Self> {
        let Case { op, bytes, dtype, reduce, memory, .. } = case;
        let world = group.world();
        let is_root = group.rank() == ROOT;
        let part = bytes / world;
        let (input, output) = match op {
            Op::AllReduce | Op::Reduce | Op::Broadcast | Op::SendRecv => (bytes, 0),
            Op::AllGather => (part, bytes),
            Op::Gather => (part, if is_root { bytes } else { 0 }),
            Op::Scatter => (if is_root { bytes } else { 0 }, part),
            Op::ReduceScatter => (bytes, part),
            Op::AllToAll => (bytes, bytes),
            Op::Barrier | Op::Memcpy | Op::MemcpyAlone | Op::Step { .. } => (0, 0),
        };
        let tensor = |len| -> Result<Tensor> {
            let span = match memory {
                TensorMemory::Shared if len > 0 => group.alloc(len)?,
                _ => Span::whole(host::private(len)?),
            };
            Tensor::flat(span, dtype)
        };
        let (input, output) = (tensor(input)?, tensor(output)?);
        let whole = match op {
            Op::Gather => output.span(),
            _ => input.span(),
        };
        let parts = match op {
            Op::Gather | Op::Scatter if is_root => (0..world)
                .map(|rank| Tensor::flat(whole.slice(rank * part..(rank + 1) * part)?, dtype))
                .collect::<Result<_>>()?,
            _ => Vec::new(),
        };
        let plain = Tile::plain(dtype);
        let reduced = match op.reduces() {
            true => Tile::reduced(dtype, reduce, world, group.context().host())?,
            false => Tile::plain(dtype),
        };
        let copies = if matches!(op, Op::Memcpy | Op::MemcpyAlone) { bytes } else { 0 };
        let copied = (vec![1; copies], vec![0; copies]);
        Ok(Self {
            group: group.clone(),
            case,
            input,
            output,
            parts,
            plain,
            reduced,
            path: case.path,
            room: Vec::new(),
            copied,
        })
    }

    /// Writes the inputs of an iteration.
    pub(super) fn prepare(&mut self, iteration: usize) -> Result<()> {
        match self.case.op {
            Op::Scatter => {
                for (rank, part) in self.parts.iter().enumerate() {
                    self.plain.write(part.span(), phase(rank, iteration))?;
                }
            }
            Op::Memcpy | Op::MemcpyAlone => self.copied.0.fill(iteration as u8),
            _ => self.plain.write(self.input.span(), phase(self.group.rank(), iteration))?,
        }
        Ok(())
    }

    /// What is timed.
    pub(super) fn call(&mut self) -> Result<()> {
        let Self { group, input, output, parts, .. } = self;
        let (rank, reduce) = (group.rank(), self.case.reduce);
        let call = match self.case.op {
            Op::AllReduce => group.all_reduce(input, reduce),
            Op::Reduce => group.reduce(input, reduce, ROOT),
            Op::Broadcast => group.broadcast(input, ROOT),
            Op::AllGather => group.all_gather_into(output, input),
            Op::Gather => group.gather(parts, input, ROOT),
            Op::Scatter => group.scatter(output, parts, ROOT),
            Op::ReduceScatter => group.reduce_scatter_from(output, input, reduce),
            Op::AllToAll => group.all_to_all_into(output, input),
            // Even ranks send to the next one; in an odd world the last has nobody.
            Op::SendRecv if rank % 2 == 1 => return group.recv(input, rank - 1).tag(TAG).wait(),
            Op::SendRecv if rank + 1 < group.world() => return group.send(input, rank + 1).tag(TAG).wait(),
            Op::SendRecv => return Ok(()),
            Op::Barrier => return group.barrier().wait(),
            Op::Step { .. } => return Err(Error::misuse("steps are for torch")),
            Op::MemcpyAlone if rank != ROOT => return Ok(()),
            Op::MemcpyAlone => {
                self.copy();
                return Ok(());
            }
            // Until all are done: ranks that share a core copy one after the other.
            Op::Memcpy => {
                self.copy();
                return self.group.barrier().wait();
            }
        };
        match self.case.path {
            Some(path) => call.via(path).wait(),
            None => call.wait(),
        }
    }

    fn copy(&mut self) {
        self.copied.1.copy_from_slice(black_box(&self.copied.0));
        black_box(&self.copied.1);
    }

    /// How many elements of this rank's results are not what they must be.
    pub(super) fn wrong(&mut self, iteration: usize) -> Result<u64> {
        let Self { group, case, input, output, plain, reduced, room, .. } = self;
        let (rank, world) = (group.rank(), group.world());
        let (input, output) = (input.span(), output.span());
        let part = case.bytes / world;
        // By how many elements the part of this rank is inside of the whole.
        let mine = rank * part / case.dtype.size();
        let mut of_parts = |start: usize| -> Result<u64> {
            let mut wrong = 0;
            for other in 0..world {
                let span = output.slice(other * part..(other + 1) * part)?;
                wrong += plain.wrong(&span, phase(other, iteration) + start, room)?;
            }
            Ok(wrong)
        };
        match case.op {
            Op::AllReduce => reduced.wrong(input, phase(0, iteration), room),
            Op::Reduce if rank == ROOT => reduced.wrong(input, phase(0, iteration), room),
            // The others' must be left as they were.
            Op::Reduce => plain.wrong(input, phase(rank, iteration), room),
            Op::Broadcast => plain.wrong(input, phase(ROOT, iteration), room),
            Op::AllGather => of_parts(0),
            Op::Gather if rank == ROOT => of_parts(0),
            Op::Scatter => plain.wrong(output, phase(rank, iteration), room),
            Op::ReduceScatter => reduced.wrong(output, phase(0, iteration) + mine, room),
            Op::AllToAll => of_parts(mine),
            Op::SendRecv if rank % 2 == 1 => plain.wrong(input, phase(rank - 1, iteration), room),
            Op::Gather | Op::SendRecv | Op::Barrier => Ok(0),
            Op::Memcpy | Op::MemcpyAlone | Op::Step { .. } => Ok(0),
        }
    }

    /// The way that the last call took, as the group's record has it. Only rank 0 looks: it is the same on all.
    pub(super) fn path(&mut self) -> String {
        if self.path.is_none() && self.group.rank() == ROOT {
            self.path = path::recorded(std::process::id(), self.case.op);
        }
        path::shown(self.path.filter(|_| self.group.rank() == ROOT))
    }
}
