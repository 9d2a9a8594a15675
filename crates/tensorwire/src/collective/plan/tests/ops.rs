//! Operations as all ranks agree on them, and what they should give: a plain model, without steps.

use proptest::prelude::*;

use crate::collective::plan::shape::PAYLOAD;
use crate::collective::plan::{Counts, LINE, Plan, Shape, Step, Who, Workers};
use crate::shm::kind::{Kind, Path};

/// One operation of a group.
#[derive(Debug, Clone)]
pub(super) struct Op {
    pub(super) kind: Kind,
    pub(super) path: Path,
    pub(super) root: usize,
    /// From each rank to each.
    pub(super) counts: Counts,
    pub(super) tensors: usize,
    pub(super) window: usize,
    pub(super) bypass: bool,
    pub(super) announced: bool,
    /// Whether input and output are the same memory, as far as the kind allows it.
    pub(super) in_place: bool,
    /// Who works in the direct path, and with that whether it is queued.
    pub(super) workers: Workers,
    /// A bit for each rank: on which of its streams a queued operation is.
    pub(super) streams: u32,
    /// A bit for each rank: whether its tensors lie on a GPU, where those of others lie on the host.
    pub(super) apart: u32,
}

/// Ranks and the operations that they call, one after the other.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) world: usize,
    pub(super) half: usize,
    /// The number of the first operation.
    pub(super) first: u32,
    pub(super) ops: Vec<Op>,
}

/// One byte: where it came from, or what it was reduced from.
///
/// A reduction stands for the ordered list of its inputs (by a hash of the list), so two of them are equal only if they
/// have the same inputs in the same order and were rounded in the same places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Value {
    /// Never written, or not to be looked at any more.
    Junk,
    /// What an operation's header says.
    Header(u32),
    /// Byte of what a rank gave to an operation (by index).
    Input {
        op: u16,
        rank: u16,
        at: u32,
    },
    Reduced(u64),
}

impl Value {
    pub(super) fn reduced(list: impl Iterator<Item = Self>) -> Self {
        let mix = |hash: u64, word: u64| {
            let hash = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            hash ^ hash >> 29
        };
        Self::Reduced(list.fold(1, |hash, value| match value {
            Self::Junk => mix(hash, 1),
            Self::Header(number) => mix(mix(hash, 2), u64::from(number)),
            Self::Input { op, rank, at } => {
                mix(mix(hash, 3), u64::from(op) << 48 | u64::from(rank) << 32 | u64::from(at))
            }
            Self::Reduced(other) => mix(mix(hash, 4), other),
        }))
    }
}

impl Op {
    /// An operation of equal or other parts, with nothing special.
    pub(super) fn new(kind: Kind, path: Path, counts: Counts) -> Self {
        Self {
            kind,
            path,
            root: 0,
            counts,
            tensors: 1,
            window: LINE,
            bypass: false,
            announced: false,
            in_place: false,
            workers: Workers::All,
            streams: 0,
            apart: 0,
        }
    }

    /// Whether a rank announces itself though ranks with tensors on the host do not, or before they do.
    pub(super) fn is_apart(&self, rank: usize) -> bool {
        let may = self.path != Path::Direct && self.kind != Kind::Barrier && !self.kind.tells_numbers();
        may && self.apart >> (rank % 32) & 1 != 0
    }

    /// How many ticks more one rank has than another.
    pub(super) fn ahead(&self, of: usize, than: usize) -> i32 {
        let announces = |rank| i32::from(self.announced || self.is_apart(rank));
        announces(of) - announces(than)
    }

    pub(super) fn shape(&self, me: usize, case: &Case) -> Shape {
        Shape {
            kind: self.kind,
            me,
            world: case.world,
            root: self.root,
            counts: self.counts.clone(),
            tensors: self.tensors,
            window: self.window,
            half: case.half,
            inline: self.path == Path::Inline,
            bypass: self.bypass,
            announced: self.announced || self.is_apart(me),
            told: 0,
            workers: self.workers.clone(),
            launch: LAUNCH,
        }
    }

    pub(super) fn is_queued(&self) -> bool {
        self.path == Path::Direct && self.workers != Workers::All
    }

    pub(super) fn stream(&self, rank: usize) -> usize {
        (self.streams >> (rank % 32) & 1) as usize
    }

    pub(super) fn plan(&self, me: usize, case: &Case) -> Plan {
        let mut plan = Plan::new(&self.shape(me, case), self.path);
        // It waits for all before it decides on the way.
        if self.is_apart(me) {
            plan.steps.insert(1, Step::Wait(Who::All, 1));
        }
        plan
    }

    fn bytes(&self, from: usize, to: usize, world: usize) -> usize {
        self.counts.of(self.kind, from, to, world)
    }

    /// Bytes that a rank gives.
    pub(super) fn input(&self, rank: usize, world: usize) -> usize {
        let all = |world: usize| (0..world).map(|to| self.bytes(rank, to, world)).sum();
        match self.kind {
            Kind::AllReduce | Kind::Reduce => self.bytes(0, 0, world) * self.tensors,
            Kind::Broadcast if rank == self.root => self.bytes(rank, 0, world),
            Kind::AllGather | Kind::Gather => self.bytes(rank, 0, world),
            kind if kind.tells_numbers() => self.bytes(rank, 0, world),
            Kind::Scatter if rank == self.root => all(world),
            Kind::ReduceScatter | Kind::AllToAll => all(world),
            _ => 0,
        }
    }

    /// What a rank should get, byte by byte.
    pub(super) fn expected(&self, index: usize, rank: usize, world: usize) -> Vec<Value> {
        let value =
            |from: usize, at: usize| Value::Input { op: index as u16, rank: from as u16, at: at as u32 };
        let run = |from: usize, start: usize, len: usize| (start..start + len).map(move |at| value(from, at));
        let before =
            |from: usize, to: usize| (0..to).map(|other| self.bytes(from, other, world)).sum::<usize>();
        let bytes = self.bytes(self.root, rank, world);
        match self.kind {
            Kind::Reduce if rank != self.root => Vec::new(),
            Kind::AllReduce | Kind::Reduce => (0..bytes)
                .map(|at| {
                    let tensors =
                        |from: usize| (0..self.tensors).map(move |tensor| value(from, tensor * bytes + at));
                    Value::reduced((0..world).flat_map(tensors))
                })
                .collect(),
            Kind::Broadcast if rank == self.root => Vec::new(),
            Kind::Broadcast => run(self.root, 0, bytes).collect(),
            Kind::Gather if rank != self.root => Vec::new(),
            kind if kind.tells_numbers() || matches!(kind, Kind::Gather | Kind::AllGather) => {
                (0..world).flat_map(|from| run(from, 0, self.bytes(from, rank, world))).collect()
            }
            Kind::Scatter => run(self.root, before(self.root, rank), bytes).collect(),
            Kind::ReduceScatter => (0..bytes)
                .map(|at| Value::reduced((0..world).map(|from| value(from, before(from, rank) + at))))
                .collect(),
            Kind::AllToAll => (0..world)
                .flat_map(|from| run(from, before(from, rank), self.bytes(from, rank, world)))
                .collect(),
            _ => Vec::new(),
        }
    }

    /// Where the input begins in the output, or the output in the input (less than 0), if they are the same memory.
    pub(super) fn shared(&self, rank: usize, world: usize) -> Option<isize> {
        let before = |len: &dyn Fn(usize) -> usize| (0..rank).map(len).sum::<usize>() as isize;
        match self.kind {
            _ if !self.in_place => None,
            Kind::AllReduce => Some(0),
            Kind::Reduce if rank == self.root => Some(0),
            Kind::AllGather => Some(before(&|from| self.bytes(from, rank, world))),
            Kind::Gather if rank == self.root => Some(before(&|from| self.bytes(from, rank, world))),
            Kind::Scatter if rank == self.root => Some(-before(&|to| self.bytes(rank, to, world))),
            Kind::ReduceScatter => Some(-before(&|to| self.bytes(rank, to, world))),
            _ => None,
        }
    }

    /// Makes the path one that can carry it, as callers of plans do.
    fn fit(mut self, case: &Case) -> Self {
        let lanes = matches!(self.kind, Kind::Scatter | Kind::ReduceScatter | Kind::AllToAll);
        let parts = if lanes { case.world } else { self.tensors };
        let largest = match &self.counts {
            Counts::Even(bytes) => *bytes,
            Counts::PerRank(all) | Counts::Matrix(all) => all.iter().copied().max().unwrap_or(0),
        };
        let reduces = matches!(self.kind, Kind::AllReduce | Kind::Reduce);
        self.path = match self.path {
            Path::Inline if largest * parts > PAYLOAD => Path::OneShot,
            path => path,
        };
        self.path = match self.path {
            Path::OneShot if reduces && largest * parts > case.half => Path::Staged,
            path => path,
        };
        self
    }
}

/// Bytes of a call on a queue: few, so that there are several.
pub(super) const LAUNCH: usize = 8 * LINE;

pub(super) const KINDS: [Kind; 14] = [
    Kind::AllReduce,
    Kind::Reduce,
    Kind::Broadcast,
    Kind::AllGather,
    Kind::Gather,
    Kind::Scatter,
    Kind::ReduceScatter,
    Kind::AllToAll,
    Kind::Barrier,
    Kind::Sizes,
    Kind::Keys,
    Kind::Symmetric,
    Kind::AllGatherFds,
    Kind::BroadcastFds,
];

/// Sizes from nothing to many rounds.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![
        0..=4usize,
        0..=32usize,
        0..=200usize,
        0..=900usize,
        (0..=8usize).prop_map(|lines| lines * LINE)
    ]
}

fn counts(kind: Kind, world: usize) -> BoxedStrategy<Counts> {
    let even = || size().prop_map(Counts::Even);
    let list = |n: usize| proptest::collection::vec(prop_oneof![0..=3usize, size()], n);
    match kind {
        Kind::AllGather | Kind::Gather | Kind::Scatter | Kind::ReduceScatter => {
            prop_oneof![even(), list(world).prop_map(|all| Counts::PerRank(all.into_iter().collect()))]
                .boxed()
        }
        Kind::AllToAll => {
            // Smaller ones where there are many.
            let matrix = list(world * world).prop_map(move |all| {
                Counts::Matrix(all.into_iter().map(|bytes| bytes % (3000 / world)).collect())
            });
            prop_oneof![even(), matrix].boxed()
        }
        Kind::Sizes => Just(Counts::Even(8 * world)).boxed(),
        Kind::Barrier => Just(Counts::Even(0)).boxed(),
        _ => even().boxed(),
    }
}

/// All ranks, or any ranks on any of three devices.
fn workers(world: usize) -> impl Strategy<Value = Workers> {
    let devices = proptest::collection::vec(0..3usize, world);
    prop_oneof![
        Just(Workers::All),
        Just(Workers::by_device(&vec![0; world])),
        devices.prop_map(|devices| Workers::by_device(&devices))
    ]
}

fn op(world: usize) -> impl Strategy<Value = Op> {
    let kind = proptest::sample::select(&KINDS[..]);
    kind.prop_flat_map(move |kind| {
        let queued = Just(Path::Direct);
        let path = prop_oneof![4 => proptest::sample::select(Path::ALL), 2 => queued];
        let tensors = if kind == Kind::AllReduce { 1..=3usize } else { 1..=1 };
        let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<u32>());
        let apart = prop_oneof![2 => Just(0u32), 1 => any::<u32>()];
        let way = (path, workers(world), apart);
        (way, 0..world, counts(kind, world), tensors, 1..=5usize, flags).prop_map(move |fields| {
            let ((path, workers, apart), root, counts, tensors, window, flags) = fields;
            let (bypass, announced, in_place, streams) = flags;
            let window = window * LINE;
            let op = Op::new(kind, path, counts);
            Op { root, tensors, window, bypass, announced, in_place, workers, streams, apart, ..op }
        })
    })
}

/// Any sequence of operations, also across the numbers at which counters wrap.
pub(super) fn case(most: usize) -> impl Strategy<Value = Case> {
    let world = prop_oneof![1..=4usize, 1..=most];
    world.prop_flat_map(|world| {
        let ops = proptest::collection::vec(op(world), 1..=7);
        let first = prop_oneof![Just(1u32), 2040..2050u32, 4090..4100u32, any::<u32>()];
        (world.max(4)..=world.max(4) + 4, first, ops).prop_map(move |(lines, first, ops)| {
            let mut case = Case { world, half: lines * LINE, first, ops: Vec::new() };
            case.ops = ops.into_iter().map(|op| op.fit(&case)).collect();
            case
        })
    })
}
