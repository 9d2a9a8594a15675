//! The way that an operation took, as its group recorded it; and the ways that there are, as `--explain` gives them.

use serde::Serialize;
use tensorwire::collective::{Detour, Kind, Path, PathRange, path_ranges};
use tensorwire::status;

use super::device::BenchDevice;
use super::op::Op;

/// The path of the last operation of a kind by rank 0, which must be the process `pid`.
pub(super) fn recorded(pid: u32, op: Op) -> Option<String> {
    let kind = kind(op)?;
    let report = status::of(pid, &status::Options::default()).ok()?;
    let ranks = report.groups().flat_map(|group| &group.ranks);
    let records = ranks.filter(|rank| rank.rank == Some(0)).flat_map(|rank| &rank.records);
    let record = records.rev().find(|record| record.kind == kind)?;
    // What its first exchange took says nothing of the rest.
    if let Op::AllReduceSparse(_) = op {
        return Some(if record.detour == Some(Detour::Dense) { "dense" } else { "by-key" }.to_owned());
    }
    Some(record.path?.to_string())
}

/// As tables show it.
pub(super) fn shown(path: Option<String>) -> String {
    path.unwrap_or_else(|| "-".to_owned())
}

/// The paths of one kind of operation, as `--explain --json` prints them.
#[derive(Debug, Serialize)]
pub(super) struct RangesLine {
    op: &'static str,
    ranks: usize,
    device: &'static str,
    /// What a size is: all that a rank gives, or what each rank gets from each.
    bytes_of: &'static str,
    paths: Vec<RangeLine>,
}

#[derive(Debug, Serialize)]
struct RangeLine {
    path: &'static str,
    from: usize,
    /// None: all larger ones.
    to: Option<usize>,
    /// What it takes besides the size.
    #[serde(skip_serializing_if = "Option::is_none")]
    needs: Option<&'static str>,
    /// Why an operation of this size is not direct, as records and errors name it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    not_direct: Vec<NotDirect>,
}

#[derive(Debug, Serialize)]
struct NotDirect {
    why: &'static str,
    /// Of the rank whose tensor is the cause.
    reason: &'static str,
}

/// All reasons. A dense all-reduce in place of a sparse one is no way around the direct path.
fn not_direct() -> Vec<NotDirect> {
    let detours = Detour::ALL.iter().filter(|why| **why != Detour::Dense);
    detours.map(|why| NotDirect { why: why.name(), reason: why.reason() }).collect()
}

/// `--explain` on a GPU.
pub(super) const ON_GPUS: &str = "\
Tensors of GPUs take the direct path at every size: the ranks meet on the host,
and then the queue of one rank on each GPU copies and reduces for all that
share it. Memory must be such that others can map it: of the pool, of
cudaMalloc, or virtual memory made to be exported. Torch's memory is, as
long as its allocator does not use cudaMallocAsync. If some ranks have
their tensors on the host, or in memory that cannot be shared, all ranks go
through memory of the host and record why (see status --last). With
TENSORWIRE_STRICT the call fails and says why.";

pub(super) fn ranges(ranks: usize, device: BenchDevice) -> Vec<RangesLine> {
    let range = |range: PathRange| {
        let direct = range.path == Path::Direct;
        RangeLine {
            path: range.path.name(),
            from: range.from,
            to: range.to,
            needs: direct.then_some("tensors of all ranks in memory of alloc()"),
            not_direct: if direct { not_direct() } else { Vec::new() },
        }
    };
    let on_gpu = || RangeLine {
        path: Path::Direct.name(),
        from: 1,
        to: None,
        needs: Some("tensors of all ranks in memory of GPUs that others can map"),
        not_direct: not_direct(),
    };
    let line = |all: tensorwire::collective::PathRanges| RangesLine {
        op: all.kind.name(),
        ranks,
        bytes_of: if all.for_each_rank { "pair" } else { "rank" },
        device: device.kind(),
        paths: match device {
            BenchDevice::Host => all.ranges.into_iter().map(range).collect(),
            _ => vec![on_gpu()],
        },
    };
    path_ranges(ranks).into_iter().map(line).collect()
}

/// What groups call it.
pub(crate) fn kind(op: Op) -> Option<Kind> {
    Some(match op {
        Op::AllReduce => Kind::AllReduce,
        Op::Reduce => Kind::Reduce,
        Op::Broadcast => Kind::Broadcast,
        Op::AllGather => Kind::AllGather,
        Op::Gather => Kind::Gather,
        Op::Scatter => Kind::Scatter,
        Op::ReduceScatter => Kind::ReduceScatter,
        Op::AllToAll => Kind::AllToAll,
        Op::SendRecv => Kind::Send,
        Op::Barrier => Kind::Barrier,
        Op::AllReduceSparse(_) => Kind::Keys,
        Op::Memcpy | Op::MemcpyAlone | Op::ReduceAlone | Op::Hop | Op::Step { .. } => return None,
    })
}
