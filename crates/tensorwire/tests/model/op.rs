//! One operation as data: everybody knows from it what each rank gives and must get.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tensorwire::collective::{Call, Path};
use tensorwire::device::threads::uuid;
use tensorwire::{Deadline, DeviceId, Dtype, Error, Group, PeerFaultKind, ReduceOp, Span, Tensor, Work};

use super::{Dice, Lie, Mem, Model, READABLE, WRITABLE, ops_of, repeated};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    AllReduce,
    AllReduceCoalesced,
    AllReduceMulti,
    Reduce,
    Broadcast,
    BroadcastCoalesced,
    AllGather,
    AllGatherInto,
    AllGatherCoalesced,
    Gather,
    Scatter,
    ReduceScatter,
    ReduceScatterFrom,
    ReduceScatterCoalesced,
    AllToAll,
    AllToAllInto,
    Barrier,
}

pub const WHATS: [What; 17] = [
    What::AllReduce,
    What::AllReduceCoalesced,
    What::AllReduceMulti,
    What::Reduce,
    What::Broadcast,
    What::BroadcastCoalesced,
    What::AllGather,
    What::AllGatherInto,
    What::AllGatherCoalesced,
    What::Gather,
    What::Scatter,
    What::ReduceScatter,
    What::ReduceScatterFrom,
    What::ReduceScatterCoalesced,
    What::AllToAll,
    What::AllToAllInto,
    What::Barrier,
];

/// Which memory the tensors lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    Private,
    Shared,
    Mixed,
    /// Of the GPU of threads with this number.
    Gpu(usize),
}

#[derive(Debug, Clone)]
pub struct Op {
    pub what: What,
    pub dtype: Dtype,
    pub op: ReduceOp,
    /// Modulo the world.
    pub root: usize,
    pub bytes: usize,
    /// Elements more or less than `bytes` hold.
    pub off: isize,
    /// In a list.
    pub tensors: usize,
    pub memory: Memory,
    /// Whether all tensors are without gaps.
    pub dense: bool,
    /// Whether the output lies where the input does, where that is a choice.
    pub in_place: bool,
    pub via: Option<Path>,
    pub start: bool,
    pub seed: u64,
    /// Its own time-out; then it may time out.
    pub patience: Option<Duration>,
}

/// Sizes at which something changes: the payload of a line, the direct path, one shot (by world), windows, halves and
/// whole slots.
const SIZES: [usize; 22] = [
    0,
    1,
    4,
    8,
    16,
    32,
    64,
    200,
    1000,
    4096,
    7281,
    16 << 10,
    21845,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
    (2 << 20) + 4096,
    3 << 20,
];

/// Any operation; few of them large.
pub fn any_op() -> impl Strategy<Value = Op> {
    let size = prop_oneof![8 => 0..9usize, 7 => 9..16usize, 2 => 16..22usize];
    let path = prop_oneof![
        4 => Just(None),
        1 => Just(Some(Path::Inline)),
        1 => Just(Some(Path::OneShot)),
        1 => Just(Some(Path::Staged)),
        1 => Just(Some(Path::Direct)),
    ];
    let memory = prop_oneof![2 => Just(Memory::Private), 1 => Just(Memory::Shared), 1 => Just(Memory::Mixed)];
    let tensors = prop_oneof![8 => 1..5usize, 1 => 5..70usize];
    let which = (0..WHATS.len(), 0..Dtype::ALL.len(), any::<u8>(), 0..9usize);
    let how = (memory, any::<bool>(), any::<bool>(), path, any::<bool>(), any::<u64>());
    (which, size, -1..2isize, tensors, how).prop_map(
        |((what, dtype, op, root), size, off, tensors, (memory, dense, in_place, via, start, seed))| {
            let dtype = Dtype::ALL[dtype];
            let ops = ops_of(dtype);
            let op = ops[op as usize % ops.len()];
            let bytes = SIZES[size];
            Op {
                what: WHATS[what],
                dtype,
                op,
                root,
                bytes,
                off,
                tensors,
                memory,
                dense,
                in_place,
                via,
                start,
                seed,
                patience: None,
            }
        },
    )
}

/// Where an operation of one rank stands.
pub struct Running {
    label: String,
    mems: Vec<Mem>,
    /// Which elements of which memory become what.
    results: Vec<(usize, usize, Arc<Vec<u8>>)>,
    work: Result<Option<Work>, Error>,
    may_refuse: bool,
    may_time_out: bool,
}

impl Running {
    /// Waits for the end and compares all memory. Says whether it has not timed out.
    pub fn finish(mut self) -> Result<bool, String> {
        let end = match self.work {
            Ok(Some(work)) => work.wait(),
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        match end {
            Ok(()) => {
                for (mem, start, values) in &self.results {
                    self.mems[*mem].expect_part(*start, values);
                }
            }
            // Too large for the path that was asked for; then nothing may have changed.
            Err(Error::Misuse(_)) if self.may_refuse => {}
            Err(Error::Peer(fault)) if self.may_refuse && fault.kind == PeerFaultKind::Failed => {}
            // What is only read is as it was.
            Err(error) if self.may_time_out && error.is_timeout() => {
                let read_only = |index: &usize| self.results.iter().all(|(mem, ..)| mem != index);
                for index in (0..self.mems.len()).filter(read_only) {
                    self.mems[index]
                        .check()
                        .map_err(|text| format!("{}: tensor {index}: {text}", self.label))?;
                }
                return Ok(false);
            }
            Err(error) => return Err(format!("{}: {error}", self.label)),
        }
        for (index, mem) in self.mems.iter().enumerate() {
            mem.check().map_err(|text| format!("{}: tensor {index}: {text}", self.label))?;
        }
        Ok(true)
    }
}

impl Op {
    fn dice(&self, rank: usize, index: usize) -> Dice {
        Dice::new(self.seed ^ (rank as u64) << 40 ^ (index as u64) << 20)
    }

    /// Elements, where each of `parts` parts has as many.
    fn count(&self, parts: usize) -> usize {
        let size = self.dtype.size();
        let most = (4 << 20) / size / parts.max(1);
        (self.bytes / size).saturating_add_signed(self.off).min(most)
    }

    /// Elements of part `index` where parts are uneven; the same on all ranks.
    fn uneven(&self, index: usize, parts: usize) -> usize {
        let count = self.count(parts);
        let mut dice = Dice::new(self.seed ^ 0xabcd ^ (index as u64) << 8);
        dice.pick(&[count, count, count / 2, 0, count + 1, 1])
    }

    fn is_direct(&self) -> bool {
        self.via == Some(Path::Direct)
            && matches!(
                self.what,
                What::AllReduce
                    | What::Reduce
                    | What::Broadcast
                    | What::AllGatherInto
                    | What::ReduceScatterFrom
                    | What::AllToAllInto
            )
    }

    fn path(&self) -> Option<Path> {
        self.via.filter(|path| *path != Path::Direct || self.is_direct())
    }

    fn lie(&self, rank: usize, index: usize, of: &[Lie]) -> Lie {
        let mut dice = self.dice(rank, index);
        // Packing many elements takes long in tests that are not optimised.
        if self.dense || self.is_direct() || self.bytes / self.dtype.size() > 70_000 {
            return dice.pick(&[Lie::Flat, Lie::Crooked]);
        }
        dice.pick(of)
    }

    fn shared(&self, rank: usize, index: usize) -> bool {
        match self.memory {
            _ if self.is_direct() => true,
            Memory::Private | Memory::Gpu(_) => false,
            Memory::Shared => true,
            Memory::Mixed => self.dice(rank, index + 1000).below(2) == 0,
        }
    }

    /// What rank `rank` has in its tensor `index` that it only reads.
    fn given(&self, model: &Model, rank: usize, index: usize, count: usize, of: &[Lie]) -> Arc<Vec<u8>> {
        let name = self.dice(rank, index + 500).next();
        let values = model.values(name, count, self.dtype);
        match self.lie(rank, index, of) {
            Lie::Repeated => Arc::new(repeated(&values, self.dtype.size())),
            _ => values,
        }
    }

    fn mem(&self, group: &Group, index: usize, of: &[Lie], values: &[u8]) -> Mem {
        let rank = group.rank();
        if let Memory::Gpu(number) = self.memory {
            // With TEST_GPU=1 the first real GPU stands for all.
            let uuid = match std::env::var_os("TEST_GPU") {
                Some(_) => tensorwire::device::cuda::facts(0).unwrap().uuid,
                None => uuid(number),
            };
            let pool = group.context().pool(&DeviceId::Gpu(uuid)).unwrap();
            let alloc = |bytes: &[u8]| Span::new(pool.alloc(bytes.len()).unwrap(), 0..bytes.len()).unwrap();
            return Mem::within(alloc, self.dtype, self.lie(rank, index, of), values);
        }
        Mem::new(group, self.shared(rank, index), self.dtype, self.lie(rank, index, of), values)
    }

    /// Begins it on one rank.
    pub fn begin(&self, group: &Group, model: &Model) -> Result<Running, String> {
        self.begin_by(group, model, |call| self.begin_call(call))
    }

    /// The same, where `run` says how its call is run.
    pub fn begin_by(
        &self,
        group: &Group,
        model: &Model,
        run: impl FnOnce(Call<'_>) -> Result<Option<Work>, Error>,
    ) -> Result<Running, String> {
        let (me, world) = (group.rank(), group.world());
        let root = self.root % world;
        let mut mems: Vec<Mem> = Vec::new();
        let mut results: Vec<(usize, usize, Arc<Vec<u8>>)> = Vec::new();
        let ranks = 0..world;
        let size = self.dtype.size();
        let part = |bytes: &Arc<Vec<u8>>, at: usize, count: usize| -> Arc<Vec<u8>> {
            Arc::new(bytes[at * size..(at + count) * size].to_vec())
        };
        let dense = [Lie::Flat, Lie::Crooked];
        // Tensors that have nothing in them yet.
        let blank = |count: usize| vec![0xee; count * size];
        let tensors = |mems: &[Mem]| mems.iter().map(|mem| mem.tensor.clone()).collect::<Vec<Tensor>>();
        let sum = |key: usize, inputs: &[Arc<Vec<u8>>]| {
            if inputs.first().is_none_or(|input| input.is_empty()) {
                return Arc::new(Vec::new());
            }
            model.reduced((self.seed, key), self.dtype, self.op, inputs, group.hosts())
        };
        let call = match self.what {
            What::AllReduce | What::AllReduceCoalesced | What::AllReduceMulti => {
                let list = if self.what == What::AllReduce { 1 } else { self.tensors };
                let of = |index: usize| match self.what {
                    What::AllReduceCoalesced => self.uneven(index, list),
                    _ => self.count(list),
                };
                let given = |rank: usize, index: usize| self.given(model, rank, index, of(index), &WRITABLE);
                for index in 0..list {
                    mems.push(self.mem(group, index, &WRITABLE, &given(me, index)));
                }
                if self.what == What::AllReduceMulti {
                    let all: Vec<_> =
                        ranks.flat_map(|rank| (0..list).map(move |index| (rank, index))).collect();
                    let all: Vec<_> = all.into_iter().map(|(rank, index)| given(rank, index)).collect();
                    let all = sum(0, &all);
                    (0..list).for_each(|index| results.push((index, 0, all.clone())));
                } else {
                    for index in 0..list {
                        let all: Vec<_> = ranks.clone().map(|rank| given(rank, index)).collect();
                        results.push((index, 0, sum(index, &all)));
                    }
                }
                match self.what {
                    What::AllReduce => group.all_reduce(&mems[0].tensor, self.op),
                    What::AllReduceCoalesced => group.all_reduce_coalesced(&tensors(&mems), self.op),
                    _ => group.all_reduce_multi(&tensors(&mems), self.op),
                }
            }
            What::Reduce => {
                let of = |rank: usize| if rank == root { &WRITABLE[..] } else { &READABLE[..] };
                let given = |rank: usize| self.given(model, rank, 0, self.count(1), of(rank));
                mems.push(self.mem(group, 0, of(me), &given(me)));
                if me == root {
                    results.push((0, 0, sum(0, &ranks.map(given).collect::<Vec<_>>())));
                }
                group.reduce(&mems[0].tensor, self.op, root)
            }
            What::Broadcast | What::BroadcastCoalesced => {
                let list = if self.what == What::Broadcast { 1 } else { self.tensors };
                for index in 0..list {
                    let count = self.uneven(index, list);
                    let given = self.given(model, root, index, count, &READABLE);
                    if me == root {
                        mems.push(self.mem(group, index, &READABLE, &given));
                    } else {
                        mems.push(self.mem(group, index, &WRITABLE, &blank(count)));
                        results.push((index, 0, given));
                    }
                }
                match self.what {
                    What::Broadcast => group.broadcast(&mems[0].tensor, root),
                    _ => group.broadcast_coalesced(&tensors(&mems), root),
                }
            }
            What::AllGather => {
                let of = |rank: usize| self.uneven(rank, world);
                let given = |rank: usize| self.given(model, rank, 0, of(rank), &READABLE);
                for rank in ranks.clone() {
                    mems.push(self.mem(group, rank + 1, &WRITABLE, &blank(of(rank))));
                    results.push((rank, 0, given(rank)));
                }
                mems.push(self.mem(group, 0, &READABLE, &given(me)));
                group.all_gather(&tensors(&mems[..world]), &mems[world].tensor)
            }
            What::AllGatherInto => {
                let count = self.count(world);
                let given = |rank: usize| self.given(model, rank, 0, count, &READABLE);
                let mut whole = blank(count * world);
                if self.in_place {
                    let own = self.given(model, me, 0, count, &READABLE);
                    whole[me * count * size..(me + 1) * count * size].copy_from_slice(&own);
                }
                mems.push(self.mem(group, 1, &dense, &whole));
                for rank in ranks {
                    results.push((0, rank * count, given(rank)));
                }
                if self.in_place {
                    group.all_gather_into(&mems[0].tensor, &mems[0].part(me * count, count))
                } else {
                    mems.push(self.mem(group, 0, &READABLE, &given(me)));
                    group.all_gather_into(&mems[0].tensor, &mems[1].tensor)
                }
            }
            What::AllGatherCoalesced => {
                let list = self.tensors.min(9);
                let of = |index: usize| self.uneven(index, list * world);
                let given = |rank: usize, index: usize| self.given(model, rank, index, of(index), &READABLE);
                for index in 0..list {
                    mems.push(self.mem(group, 100 + index, &dense, &blank(of(index) * world)));
                    for rank in ranks.clone() {
                        results.push((index, rank * of(index), given(rank, index)));
                    }
                }
                for index in 0..list {
                    mems.push(self.mem(group, index, &READABLE, &given(me, index)));
                }
                group.all_gather_coalesced(&tensors(&mems[..list]), &tensors(&mems[list..]))
            }
            What::Gather => {
                let count = self.count(world);
                let given = |rank: usize| self.given(model, rank, 0, count, &READABLE);
                mems.push(self.mem(group, 0, &READABLE, &given(me)));
                if me == root {
                    for rank in ranks {
                        mems.push(self.mem(group, rank + 1, &WRITABLE, &blank(count)));
                        results.push((rank + 1, 0, given(rank)));
                    }
                }
                group.gather(&tensors(&mems[1..]), &mems[0].tensor, root)
            }
            What::Scatter => {
                let count = self.count(world);
                let given = |rank: usize| self.given(model, root, rank + 1, count, &READABLE);
                mems.push(self.mem(group, 0, &WRITABLE, &blank(count)));
                results.push((0, 0, given(me)));
                if me == root {
                    for rank in ranks {
                        mems.push(self.mem(group, rank + 1, &READABLE, &given(rank)));
                    }
                }
                group.scatter(&mems[0].tensor, &tensors(&mems[1..]), root)
            }
            What::ReduceScatter => {
                let of = |rank: usize| self.uneven(rank, world);
                let given = |from: usize, to: usize| self.given(model, from, to + 1, of(to), &READABLE);
                for to in ranks.clone() {
                    mems.push(self.mem(group, to + 1, &READABLE, &given(me, to)));
                }
                mems.push(self.mem(group, 0, &WRITABLE, &blank(of(me))));
                results.push((world, 0, sum(me, &ranks.map(|from| given(from, me)).collect::<Vec<_>>())));
                group.reduce_scatter(&mems[world].tensor, &tensors(&mems[..world]), self.op)
            }
            What::ReduceScatterFrom => {
                let count = self.count(world);
                let given = |rank: usize| self.given(model, rank, 0, count * world, &dense);
                mems.push(self.mem(group, 0, &dense, &given(me)));
                let parts: Vec<_> = ranks.map(|from| part(&given(from), me * count, count)).collect();
                let result = sum(me, &parts);
                if self.in_place {
                    results.push((0, me * count, result));
                    let own = mems[0].part(me * count, count);
                    group.reduce_scatter_from(&own, &mems[0].tensor, self.op)
                } else {
                    results.push((1, 0, result));
                    mems.push(self.mem(group, 1, &WRITABLE, &blank(count)));
                    group.reduce_scatter_from(&mems[1].tensor, &mems[0].tensor, self.op)
                }
            }
            What::ReduceScatterCoalesced => {
                let list = self.tensors.min(9);
                let of = |index: usize| self.uneven(index, list * world);
                let given =
                    |rank: usize, index: usize| self.given(model, rank, index, of(index) * world, &dense);
                for index in 0..list {
                    mems.push(self.mem(group, 100 + index, &WRITABLE, &blank(of(index))));
                    let parts: Vec<_> = ranks
                        .clone()
                        .map(|from| part(&given(from, index), me * of(index), of(index)))
                        .collect();
                    results.push((index, 0, sum(index * 100 + me, &parts)));
                }
                for index in 0..list {
                    mems.push(self.mem(group, index, &dense, &given(me, index)));
                }
                group.reduce_scatter_coalesced(&tensors(&mems[..list]), &tensors(&mems[list..]), self.op)
            }
            What::AllToAll => {
                let of = |from: usize, to: usize| self.uneven(from * 31 + to, world);
                let given = |from: usize, to: usize| self.given(model, from, to + 1, of(from, to), &READABLE);
                for from in ranks.clone() {
                    mems.push(self.mem(group, 100 + from, &WRITABLE, &blank(of(from, me))));
                    results.push((from, 0, given(from, me)));
                }
                for to in ranks {
                    mems.push(self.mem(group, to + 1, &READABLE, &given(me, to)));
                }
                group.all_to_all(&tensors(&mems[..world]), &tensors(&mems[world..]))
            }
            What::AllToAllInto => {
                let count = self.count(world);
                let given = |rank: usize| self.given(model, rank, 0, count * world, &dense);
                mems.push(self.mem(group, 0, &dense, &given(me)));
                mems.push(self.mem(group, 1, &dense, &blank(count * world)));
                for from in ranks {
                    results.push((1, from * count, part(&given(from), me * count, count)));
                }
                group.all_to_all_into(&mems[1].tensor, &mems[0].tensor)
            }
            What::Barrier => {
                let work = group.barrier().wait().map(|()| None);
                let label = "barrier".to_owned();
                return Ok(Running { label, mems, results, work, may_refuse: false, may_time_out: false });
            }
        };
        let label = format!("rank {me} of {world}, {:?} in {self:?}", call);
        let may_refuse = matches!(self.path(), Some(Path::Inline | Path::OneShot));
        let work = run(call);
        Ok(Running { label, mems, results, work, may_refuse, may_time_out: self.patience.is_some() })
    }

    /// Waits for its call or starts it, as it says.
    pub fn begin_call(&self, call: Call<'_>) -> Result<Option<Work>, Error> {
        let call = match self.path() {
            Some(path) => call.via(path),
            None => call,
        };
        match (self.start, self.patience) {
            (true, None) => call.start().map(Some),
            (true, Some(time)) => call.deadline(Deadline::after(time)).start().map(Some),
            (false, None) => call.wait().map(|()| None),
            (false, Some(time)) => call.deadline(Deadline::after(time)).wait().map(|()| None),
        }
    }
}
