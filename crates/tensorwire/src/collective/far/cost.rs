//! What an operation on several hosts does, from numbers alone: the parts that a rank would have are made and counted. Their memory
//! is reserved and never touched, but for small floats, which are widened.

use tensorwire_device::host::{Host, private};
use tensorwire_device::{Device, Dtype, ReduceOp, Span};

use super::Room;
use super::parts::{Layout, Parts, Traffic};
use super::wire::RIDES;
use crate::collective::buffer::Buffer;
use crate::collective::operation::Operation;
use crate::collective::plan::{Counts, Part, Plan, Step};
use crate::error::{Error, Result};
use crate::shm::kind::{Kind, Path};

/// What an operation of a group on several hosts does. All hosts have as many ranks, and rank 0 is the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostsPlan {
    /// What ranks of a host bring to their leader: the rank that does most.
    pub collect: NearCost,
    /// What leaders give each other: the first one, which is that of the root.
    pub exchange: ExchangeCost,
    /// What a leader gives to the ranks of its host: the rank that does most.
    pub spread: NearCost,
}

/// An operation of one host, as one rank does it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct NearCost {
    /// Its kind.
    pub kind: Kind,
    /// Its path; nothing where nothing moves.
    pub path: Option<Path>,
    /// Signals to other ranks.
    pub signals: usize,
    /// Waits for other ranks.
    pub waits: usize,
    /// Bytes that are copied.
    pub copied: usize,
    /// Bytes that are read to be reduced.
    pub read: usize,
    /// Bytes of results that are written.
    pub written: usize,
}

/// What a leader does with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExchangeCost {
    /// Other leaders.
    pub peers: usize,
    /// How often one waits for the other: what is given at once, and results.
    pub steps: usize,
    /// Messages that it sends, and that come.
    pub messages_sent: usize,
    /// See `messages_sent`.
    pub messages_received: usize,
    /// Bytes of tensors that it sends, and the most of them to one leader.
    pub sent: usize,
    /// See `sent`.
    pub sent_to_one: usize,
    /// Bytes of tensors that come.
    pub received: usize,
    /// Pieces in which a result is made.
    pub pieces: usize,
    /// Bytes that are read to be reduced.
    pub read: usize,
    /// Bytes of results that are written.
    pub written: usize,
}

/// What an operation does. `bytes` is what each rank has; where it has a part for each rank, all of them together.
pub fn hosts_plan(kind: Kind, hosts: usize, ranks: usize, bytes: usize, dtype: Dtype) -> Result<HostsPlan> {
    let world = hosts.checked_mul(ranks).filter(|world| *world > 0 && hosts > 1);
    let world = world.ok_or_else(|| Error::misuse("a plan of hosts needs two hosts or more, and ranks"))?;
    let all: Vec<Vec<usize>> = (0..hosts).map(|host| (host * ranks..(host + 1) * ranks).collect()).collect();
    let operation = |rank| operation(kind, (rank, world), bytes, dtype);
    let (room, mut queue) = (Room::default(), Host.queue()?);
    let mut parts = |rank: usize| -> Result<Parts> {
        room.clear();
        Parts::new(Layout { hosts: &all, rank }, &operation(rank)?, &room, &mut *queue)
    };
    // The leader of the root's host, another rank there, the leader of the last host, and another rank there.
    let mut seen: Vec<usize> = vec![0, ranks - 1, world - ranks, world - 1];
    seen.dedup();
    let first = parts(0)?;
    let exchange = ExchangeCost::of(hosts - 1, &first.traffic);
    let place = |rank: usize| (rank % ranks, ranks);
    let (mut collect, mut spread) =
        (NearCost::of(&first.collect, place(0)), NearCost::of(&first.spread, place(0)));
    for rank in seen.into_iter().skip(1) {
        let other = parts(rank)?;
        collect = collect.or(NearCost::of(&other.collect, place(rank)));
        spread = spread.or(NearCost::of(&other.spread, place(rank)));
    }
    Ok(HostsPlan { collect, exchange, spread })
}

fn operation(kind: Kind, (rank, world): (usize, usize), bytes: usize, dtype: Dtype) -> Result<Operation> {
    let part = bytes / world / dtype.size() * dtype.size();
    let whole = bytes / dtype.size() * dtype.size();
    let memory =
        |bytes: usize| -> Result<Buffer> { Ok(Buffer::one(Span::whole(private(bytes)?).slice(0..bytes)?)) };
    let mut operation = Operation::new(kind, dtype);
    operation.op = ReduceOp::Sum;
    let root = rank == 0;
    let (input, output, count) = match kind {
        Kind::Barrier => (0, 0, 0),
        Kind::AllReduce | Kind::Reduce | Kind::Broadcast => (whole, whole, whole),
        Kind::AllGather => (part, part * world, part),
        Kind::Gather => (part, if root { part * world } else { 0 }, part),
        Kind::Scatter => (if root { part * world } else { 0 }, part, part),
        Kind::ReduceScatter => (part * world, part, part),
        Kind::AllToAll => (part * world, part * world, part),
        kind => return Err(Error::misuse(format!("{kind} is no operation of several hosts"))),
    };
    operation.input = memory(input)?;
    operation.output = match kind {
        Kind::AllReduce | Kind::Reduce | Kind::Broadcast => operation.input.clone(),
        _ => memory(output)?,
    };
    operation.counts = Counts::Even(count);
    operation.check(world)?;
    Ok(operation)
}

impl NearCost {
    fn of(operation: &Operation, (me, world): (usize, usize)) -> Self {
        let (shape, path) = operation.shape(me, world);
        let plan = Plan::new(&shape, path);
        let moves = operation.kind != Kind::Barrier && world > 1;
        let (kind, path) = (operation.kind, moves.then_some(path));
        let (signals, waits, copied, read, written) = (0, 0, 0, 0, 0);
        let mut cost = Self { kind, path, signals, waits, copied, read, written };
        let sum = |parts: &[Part]| parts.iter().map(|part| part.len).sum::<usize>();
        for step in plan.steps.iter().filter(|_| world > 1) {
            match step {
                Step::Copy { into, .. } => cost.copied += into.len,
                Step::Reduce { inputs, outputs, .. } => {
                    cost.read += sum(plan.parts(inputs));
                    cost.written += sum(plan.parts(outputs));
                }
                Step::Signal(_) => cost.signals += 1,
                Step::Wait(..) => cost.waits += 1,
            }
        }
        cost
    }

    /// Of two ranks, the one that moves more.
    fn or(self, other: Self) -> Self {
        let moved = |cost: &Self| (2 * cost.copied + cost.read + cost.written, cost.waits);
        if moved(&other) > moved(&self) { other } else { self }
    }
}

impl ExchangeCost {
    fn of(peers: usize, traffic: &Traffic) -> Self {
        let mut sent = vec![0; peers + 1];
        let mut messages = vec![0; peers + 1];
        let given = traffic.given.iter().filter(|(_, bytes)| bytes.len() > 0);
        for (host, bytes) in given {
            // The first one rides with what the ranks came for, if it is small.
            messages[*host] += usize::from(messages[*host] > 0 || bytes.len() > RIDES);
            sent[*host] += bytes.len();
        }
        let (mut pieces, mut read, mut written) = (0, 0, 0);
        if let Some(reduction) = &traffic.reduction {
            (pieces, read, written) = reduction.bytes(peers + 1);
            for host in &reduction.to {
                messages[*host] += pieces;
                sent[*host] += written;
            }
        }
        let wanted = traffic.wanted.iter().filter(|wanted| wanted.bytes.len() > RIDES).count();
        Self {
            peers,
            steps: 1 + usize::from(traffic.wanted.iter().any(|wanted| wanted.made)),
            messages_sent: peers + messages.iter().sum::<usize>(),
            messages_received: peers + wanted,
            sent: sent.iter().sum(),
            sent_to_one: sent.iter().copied().max().unwrap_or(0),
            received: traffic.wanted.iter().map(|wanted| wanted.bytes.len()).sum(),
            pieces,
            read,
            written,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const B: usize = 64 << 20;

    fn plan(kind: Kind, hosts: usize, ranks: usize, bytes: usize) -> HostsPlan {
        hosts_plan(kind, hosts, ranks, bytes, Dtype::F32).unwrap()
    }

    /// The table of docs/algorithms.md: what a leader sends.
    #[test]
    fn leaders_send_what_the_docs_say() {
        for (hosts, ranks) in [(2, 1), (2, 3), (5, 2), (16, 8)] {
            let (h, n) = (hosts, hosts * ranks);
            let part = B / n / 4 * 4;
            let sent = |kind| plan(kind, hosts, ranks, B).exchange.sent;
            assert_eq!(sent(Kind::Barrier), 0);
            assert_eq!(sent(Kind::Broadcast), (h - 1) * B);
            assert_eq!(sent(Kind::AllGather), (h - 1) * ranks * part);
            assert_eq!(sent(Kind::Gather), 0);
            assert_eq!(sent(Kind::Scatter), (h - 1) * ranks * part);
            assert_eq!(sent(Kind::AllToAll), (h - 1) * ranks * ranks * part);
            assert_eq!(sent(Kind::Reduce), 0);
            assert_eq!(sent(Kind::ReduceScatter), (h - 1) * ranks * part);
            // Its share, up to a cache line of each.
            let most = 2 * (B - B / h) + 2 * h * 256;
            assert!(
                (most - 4 * h * 256..=most).contains(&sent(Kind::AllReduce)),
                "{h}: {}",
                sent(Kind::AllReduce)
            );
            let small = plan(Kind::AllReduce, hosts, ranks, 1024).exchange;
            assert_eq!((small.sent, small.messages_sent, small.steps), ((h - 1) * 1024, h - 1, 1));
        }
    }

    #[test]
    fn a_host_of_one_rank_only_exchanges() {
        let HostsPlan { collect, exchange, spread } = plan(Kind::AllReduce, 2, 1, B);
        assert_eq!((collect.copied, collect.waits, spread.copied, spread.waits), (0, 0, 0, 0));
        assert_eq!((exchange.sent, exchange.received, exchange.steps), (B, B, 2));
        assert_eq!((exchange.read, exchange.written, exchange.pieces), (B, B / 2, 128));
    }

    #[test]
    fn what_has_no_plan_is_refused() {
        for (kind, hosts, ranks) in [(Kind::AllReduce, 1, 2), (Kind::AllReduce, 2, 0), (Kind::Send, 2, 2)] {
            assert!(hosts_plan(kind, hosts, ranks, 64, Dtype::F32).is_err());
        }
    }
}
