//! One operation with its tensors.

use std::hint::black_box;

use tensorwire::collective::Tensor;
use tensorwire::device::host;
use tensorwire::{Error, Group, Result, Span};

use super::gpu::RankGpu;
use super::sparse::SparseJob;
use crate::bench::op::Op;
use crate::bench::order::{Case, TensorMemory};
use crate::bench::parts::{BATCH, Pair};
use crate::bench::path;
use crate::bench::pattern::{Tile, phase};
use crate::bench::placement::Turn;

const ROOT: usize = 0;
const TAG: u64 = 7;
/// Of the tokens with which two ranks meet, and their bytes.
const MEETING: u64 = 8;
pub(super) const TOKEN: usize = 8;

/// One operation, ready to be called again and again.
#[derive(Debug)]
pub(super) struct Job {
    group: Group,
    case: Case,
    turn: Turn,
    /// What ranks of two hosts meet with before a message.
    token: Option<Tensor>,
    /// What this rank brings; where the operation works in place, also the result.
    input: Tensor,
    output: Tensor,
    /// One part for each rank of the input or output, where the operation wants them so and this rank has them.
    parts: Vec<Tensor>,
    plain: Tile,
    reduced: Tile,
    path: Option<String>,
    looked: bool,
    /// For what is checked.
    room: Vec<u8>,
    /// What memcpy copies on the host.
    copied: (Vec<u8>, Vec<u8>),
    /// What ranks 0 and 1 signal each other with.
    pair: Option<Pair>,
    sparse: Option<SparseJob>,
}

impl Job {
    pub(super) fn new(
        group: &Group,
        case: Case,
        (turn, far): (Turn, bool),
        gpu: Option<&RankGpu>,
    ) -> Result<Self> {
        let Case { op, bytes, dtype, reduce, memory, .. } = case;
        let world = group.world();
        let is_root = group.rank() == ROOT;
        let on_gpu = gpu.filter(|_| memory == TensorMemory::Pool);
        let part = bytes / world;
        let (input, output) = match op {
            Op::AllReduce | Op::Reduce | Op::Broadcast | Op::SendRecv => (bytes, 0),
            Op::AllGather => (part, bytes),
            Op::Gather => (part, if is_root { bytes } else { 0 }),
            Op::Scatter => (if is_root { bytes } else { 0 }, part),
            Op::ReduceScatter => (bytes, part),
            Op::AllToAll => (bytes, bytes),
            Op::Memcpy | Op::MemcpyAlone if on_gpu.is_some() => (bytes, bytes),
            Op::ReduceAlone if is_root => (bytes * world, 0),
            Op::ReduceAlone | Op::Hop => (0, 0),
            Op::Barrier | Op::Memcpy | Op::MemcpyAlone | Op::Step { .. } => (0, 0),
            Op::AllReduceSparse(_) => (0, 0),
        };
        let tensor = |len| -> Result<Tensor> {
            let span = match (memory, on_gpu) {
                (TensorMemory::Shared, _) if len > 0 => group.alloc(len)?,
                (_, Some(gpu)) => gpu.alloc(len)?,
                _ => Span::whole(host::private(len)?),
            };
            Tensor::flat(span, dtype)
        };
        let (input, output) = (tensor(input)?, tensor(output)?);
        let whole = match op {
            Op::Gather => output.span(),
            _ => input.span(),
        };
        let part = if op == Op::ReduceAlone { bytes } else { part };
        let parts = match op {
            Op::Gather | Op::Scatter | Op::ReduceAlone if is_root => (0..world)
                .map(|rank| Tensor::flat(whole.slice(rank * part..(rank + 1) * part)?, dtype))
                .collect::<Result<_>>()?,
            _ => Vec::new(),
        };
        let plain = Tile::plain(dtype);
        let reduced = match op.reduces() {
            true => Tile::reduced(dtype, reduce, world, group.context().host())?,
            false => Tile::plain(dtype),
        };
        let copies = if matches!(op, Op::Memcpy | Op::MemcpyAlone) && on_gpu.is_none() { bytes } else { 0 };
        let copied = (vec![1; copies], vec![0; copies]);
        let pair = match (op, on_gpu) {
            (Op::Hop, Some(gpu)) => gpu.pair(group)?,
            _ => None,
        };
        let token = match op {
            Op::SendRecv if far => Some(Tensor::private(&[0u8; TOKEN])?),
            _ => None,
        };
        let sparse = match op {
            Op::AllReduceSparse(keys) => Some(SparseJob::new(group, keys, bytes)?),
            _ => None,
        };
        Ok(Self {
            group: group.clone(),
            case,
            turn,
            token,
            input,
            output,
            parts,
            plain,
            reduced,
            path: case.path.map(|path| path.to_string()),
            looked: false,
            room: Vec::new(),
            copied,
            pair,
            sparse,
        })
    }

    /// Writes the inputs of an iteration.
    pub(super) fn prepare(&mut self, iteration: usize) -> Result<()> {
        if let Some(sparse) = &mut self.sparse {
            return sparse.prepare(self.group.rank(), iteration);
        }
        match self.case.op {
            Op::Scatter => {
                for (rank, part) in self.parts.iter().enumerate() {
                    self.plain.write(part.span(), phase(rank, iteration))?;
                }
            }
            Op::Memcpy | Op::MemcpyAlone => self.copied.0.fill(iteration as u8),
            // In place: later ones take what is there, which costs a kernel the same.
            Op::ReduceAlone if iteration > 0 => {}
            _ => self.plain.write(self.input.span(), phase(self.group.rank(), iteration))?,
        }
        Ok(())
    }

    /// All ranks meet. Before a message to another host, its two ranks do: the sender says that it is there, the receiver answers
    /// and goes on, and so the receiver is always timed from before the message was sent. A barrier between hosts may let the
    /// sender go long before the receiver. The message would be there when the receiver's time begins.
    pub(super) fn meet(&mut self) -> Result<()> {
        let Self { group, turn, token: Some(token), .. } = self else { return self.group.barrier().wait() };
        let send = |to: u32| group.send(token, to as usize).tag(MEETING).wait();
        let recv = |from: u32| group.recv(token, from as usize).tag(MEETING).wait();
        match *turn {
            Turn::Send(to) => send(to).and_then(|()| recv(to)),
            Turn::Recv(from) => recv(from).and_then(|()| send(from)),
            Turn::Rest => Ok(()),
        }
    }

    /// How many times what is measured happens in a call.
    pub(super) fn pieces(&self) -> u32 {
        // There and back.
        if self.case.op == Op::Hop { 2 * BATCH } else { 1 }
    }

    /// What is timed. On a GPU, it ends with the queue's work.
    pub(super) fn call(&mut self, gpu: Option<&mut RankGpu>) -> Result<()> {
        if let Some(sparse) = &mut self.sparse {
            return sparse.call(&self.group);
        }
        let gpu = gpu.filter(|_| self.case.memory == TensorMemory::Pool);
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
            Op::SendRecv => {
                return match self.turn {
                    Turn::Send(to) => group.send(input, to as usize).tag(TAG).wait(),
                    Turn::Recv(from) => group.recv(input, from as usize).tag(TAG).wait(),
                    Turn::Rest => Ok(()),
                };
            }
            Op::Barrier if gpu.is_none() => return group.barrier().wait(),
            Op::Barrier => group.barrier(),
            Op::AllReduceSparse(_) => return Err(Error::misuse("a sparse one has its own job")),
            Op::Step { .. } => return Err(Error::misuse("steps are for torch")),
            Op::MemcpyAlone | Op::ReduceAlone if rank != ROOT => return Ok(()),
            Op::MemcpyAlone => return self.copy(gpu),
            // Until all are done: ranks that share a core, or a GPU, copy one after the other.
            Op::Memcpy => {
                self.copy(gpu)?;
                return self.group.barrier().wait();
            }
            Op::ReduceAlone => {
                let all: Vec<Span> = parts.iter().map(|part| part.span().clone()).collect();
                return match gpu {
                    Some(gpu) => gpu.reduce(reduce, self.case.dtype, &all),
                    None => Err(Error::misuse("a reduction by one rank is measured on GPUs")),
                };
            }
            Op::Hop => {
                return match &mut self.pair {
                    Some(pair) if rank == ROOT => pair.batch(),
                    Some(pair) => pair.answer_batch(),
                    None => Ok(()),
                };
            }
        };
        match (gpu, self.case.path) {
            (Some(gpu), None) => call.on(gpu.queue())?.wait(),
            (Some(gpu), Some(path)) => call.via(path).on(gpu.queue())?.wait(),
            (None, Some(path)) => call.via(path).wait(),
            (None, None) => call.wait(),
        }
    }

    fn copy(&mut self, gpu: Option<&mut RankGpu>) -> Result<()> {
        if let Some(gpu) = gpu {
            return gpu.copy(self.output.span(), self.input.span());
        }
        self.copied.1.copy_from_slice(black_box(&self.copied.0));
        black_box(&self.copied.1);
        Ok(())
    }

    /// How many elements of this rank's results are not what they must be.
    pub(super) fn wrong(&mut self, iteration: usize) -> Result<u64> {
        if let Some(sparse) = &self.sparse {
            return sparse.wrong(self.group.world(), iteration);
        }
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
            Op::SendRecv => match self.turn {
                Turn::Recv(from) => plain.wrong(input, phase(from as usize, iteration), room),
                _ => Ok(0),
            },
            Op::Gather | Op::Barrier => Ok(0),
            Op::AllReduceSparse(_) => Ok(0),
            Op::Memcpy | Op::MemcpyAlone | Op::ReduceAlone | Op::Hop | Op::Step { .. } => Ok(0),
        }
    }

    /// The way that the first call took, as the group's record has it. Only rank 0 looks: it is the same on all. It looks once,
    /// because that takes milliseconds: whatever was in the caches is not there any more, and the next calls are slow.
    pub(super) fn path(&mut self) -> String {
        let looks = !std::mem::replace(&mut self.looked, true);
        if looks && self.path.is_none() && self.group.rank() == ROOT {
            self.path = path::recorded(std::process::id(), self.case.op);
        }
        path::shown(self.path.clone().filter(|_| self.group.rank() == ROOT))
    }
}
