//! One measurement.

use serde::Serialize;

use super::crew::Crew;
use super::fair::Side;
use super::keys::{Keys, WIDTH};
use super::op::Op;
use super::order::{Case, TensorMemory};
use crate::latency::Latency;

/// One measurement, as `--json` prints it.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    pub(super) op: &'static str,
    pub(super) ranks: usize,
    pub(super) bytes: usize,
    pub(super) dtype: &'static str,
    pub(super) device: &'static str,
    pub(super) memory: &'static str,
    pub(super) path: String,
    pub(super) median_us: f64,
    pub(super) p99_us: f64,
    pub(super) algbw_gbs: f64,
    pub(super) busbw_gbs: f64,
    pub(super) wrong: u64,
    pub(super) peer: &'static str,
    /// What was called: `torch`, or the library itself.
    pub(super) through: &'static str,
    /// Whether each rank had a core.
    pub(super) bound: bool,
    /// A peer's time over ours.
    pub(super) ratio: Option<f64>,
    /// Whether it is the fastest of several peers, where the best of them is asked for.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) best: bool,
    /// What our time cannot be below, where that was measured from parts (`floor`).
    pub(super) floor_us: Option<f64>,
    /// Of sparse tensors: the share of the rows that each rank has, and how they lie.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) sparse: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) keys: Option<&'static str>,
    /// Of ranks on several hosts: how many hosts there were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) hosts: Option<u32>,
    /// What one must know to read the ratio: how the two differ in more than the library.
    pub(super) caveats: Vec<String>,
}

impl Row {
    /// Of the slowest rank's time in each iteration.
    pub(super) fn new(
        crew: &Crew,
        case: &Case,
        ranks: usize,
        (wrong, path): (u64, String),
        mut latency: Latency,
    ) -> Self {
        let [median_us, p99_us] = latency.quantiles([0.5, 0.99]);
        let (algbw_gbs, busbw_gbs) = bandwidth(case, ranks, median_us);
        let keys = if let Op::AllReduceSparse(keys) = case.op { Some(keys) } else { None };
        Self {
            op: if case.op == Op::MemcpyAlone { Op::Memcpy.name() } else { case.op.name() },
            ranks,
            bytes: case.bytes,
            dtype: case.dtype.name(),
            device: if case.memory == TensorMemory::Pool { "cuda" } else { "host" },
            memory: memory(case.memory, crew.side()),
            path,
            median_us,
            p99_us,
            algbw_gbs,
            busbw_gbs,
            wrong,
            peer: crew.peer,
            through: crew.side().through(),
            bound: crew.bound,
            ratio: None,
            best: false,
            floor_us: None,
            sparse: keys.map(Keys::share),
            keys: keys.map(|keys| keys.spread.name()),
            hosts: None,
            caveats: Vec::new(),
        }
    }
}

/// Where the tensors of a side are.
fn memory(wanted: TensorMemory, side: Side) -> &'static str {
    match wanted {
        // Through torch, tensors of a GPU are torch's own.
        TensorMemory::Pool if side.torch => "torch",
        // Others have no memory of their own to give.
        wanted => if side.is_ours() { wanted } else { TensorMemory::Private }.name(),
    }
}

/// GB/s of the size, and of the busiest link; of memcpy, of what all ranks copy.
fn bandwidth(case: &Case, ranks: usize, micros: f64) -> (f64, f64) {
    if micros <= 0.0 {
        return (0.0, 0.0);
    }
    let rate = case.bytes as f64 / micros / 1e3;
    match case.op {
        Op::Memcpy | Op::MemcpyAlone => (rate * ranks as f64, rate * ranks as f64),
        // Of what a rank brings: its rows, and a key for each.
        Op::AllReduceSparse(keys) => {
            let row = (WIDTH * case.dtype.size()) as f64;
            let rate = rate * keys.share() * (row + 8.0) / row;
            (rate, rate)
        }
        op => (rate, rate * op.bus_factor(ranks)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::OURS;

    #[test]
    fn memory_is_named_by_who_allocates_it() {
        let side = |library, torch| Side { library, torch, bound: false };
        let named = |wanted| {
            [side(OURS, false), side(OURS, true), side("gloo", true)].map(|side| memory(wanted, side))
        };
        assert_eq!(named(TensorMemory::Pool), ["pool", "torch", "torch"]);
        assert_eq!(named(TensorMemory::Shared), ["shared", "shared", "private"]);
        assert_eq!(named(TensorMemory::Private), ["private"; 3]);
    }
}
