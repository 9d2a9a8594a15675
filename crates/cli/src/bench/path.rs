//! The way that an operation took, as its group recorded it.

use tensorwire::collective::{Kind, Path};
use tensorwire::status;

use super::op::Op;

/// The path of the last operation of a kind by rank 0, which must be the process `pid`.
pub(super) fn recorded(pid: u32, op: Op) -> Option<Path> {
    let kind = kind(op)?;
    let report = status::of(pid, &status::Options::default()).ok()?;
    let ranks = report.groups().flat_map(|group| &group.ranks);
    let records = ranks.filter(|rank| rank.rank == Some(0)).flat_map(|rank| &rank.records);
    records.rev().find(|record| record.kind == kind)?.path
}

/// As tables show it.
pub(super) fn shown(path: Option<Path>) -> String {
    path.map_or_else(|| "-".to_owned(), |path| path.to_string())
}

fn kind(op: Op) -> Option<Kind> {
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
        Op::Memcpy | Op::MemcpyAlone | Op::Step { .. } => return None,
    })
}
