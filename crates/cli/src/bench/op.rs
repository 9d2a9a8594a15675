//! The operations that are measured: their names, and what their sizes mean.

use std::fmt;
use std::str::FromStr;

use super::keys::{Keys, WIDTH};

/// An operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    Gather,
    Scatter,
    ReduceScatter,
    AllToAll,
    SendRecv,
    Barrier,
    /// An all-reduce of sparse tensors. The size is that of the dense tensor.
    AllReduceSparse(Keys),
    /// No operation of a group: every rank copies memory of its own, until all have.
    Memcpy,
    /// The same by rank 0 alone.
    MemcpyAlone,
    /// Rank 0 reduces as many tensors of its own as there are ranks, and writes the result to all of them.
    ReduceAlone,
    /// A signal from the queue of rank 0 to that of rank 1, or back.
    Hop,
    /// A step of DDP. Iterations take turns: without DDP's work, with it but nothing communicated, and with all.
    Step {
        /// Gradients are views of DDP's buckets.
        view: bool,
    },
}

impl Op {
    /// What a user can ask for.
    pub(crate) const ALL: [Self; 10] = [
        Self::AllReduce,
        Self::Reduce,
        Self::Broadcast,
        Self::AllGather,
        Self::Gather,
        Self::Scatter,
        Self::ReduceScatter,
        Self::AllToAll,
        Self::SendRecv,
        Self::Barrier,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::Reduce => "reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all-gather",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllToAll => "all-to-all",
            Self::SendRecv => "send-recv",
            Self::Barrier => "barrier",
            Self::AllReduceSparse(_) => "all-reduce-sparse",
            Self::Memcpy => "memcpy",
            Self::MemcpyAlone => "memcpy-alone",
            Self::ReduceAlone => "reduce-alone",
            Self::Hop => "hop",
            Self::Step { view: false } => "step",
            Self::Step { view: true } => "step-view",
        }
    }

    /// What an order calls it.
    pub(super) fn word(self) -> String {
        match self {
            Self::AllReduceSparse(keys) => format!("{self}:{keys}"),
            _ => self.to_string(),
        }
    }

    /// Whether rank 0 alone does it, while the others are at rest.
    pub(super) fn is_alone(self) -> bool {
        matches!(self, Self::MemcpyAlone | Self::ReduceAlone)
    }

    /// Whether elements are combined.
    pub(super) fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::ReduceScatter)
    }

    /// Whether the size counts one part for each rank.
    pub(super) fn is_of_parts(self) -> bool {
        matches!(self, Self::AllGather | Self::Gather | Self::Scatter | Self::ReduceScatter | Self::AllToAll)
    }

    /// The size that is really measured: whole elements, at least one, in each part.
    pub(crate) fn fit(self, bytes: usize, element: usize, ranks: usize) -> usize {
        let unit = match self {
            Self::Barrier => return 0,
            Self::AllReduceSparse(_) => element * WIDTH,
            op if op.is_of_parts() => element * ranks,
            _ => element,
        };
        (bytes / unit).max(1) * unit
    }

    /// Bus bandwidth as a multiple of the algorithm's, as nccl-tests counts: the load of the busiest link if the
    /// operation were done with the fewest bytes.
    pub(super) fn bus_factor(self, ranks: usize) -> f64 {
        let others = (ranks as f64 - 1.0) / ranks as f64;
        match self {
            Self::AllReduce => 2.0 * others,
            op if op.is_of_parts() => others,
            _ => 1.0,
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Op {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if let Some(keys) = name.strip_prefix("all-reduce-sparse:") {
            return Ok(Self::AllReduceSparse(keys.parse()?));
        }
        let plain = name.to_ascii_lowercase().replace('_', "-");
        let known =
            Self::ALL.into_iter().chain([Self::Memcpy, Self::MemcpyAlone, Self::ReduceAlone, Self::Hop]);
        known.into_iter().find(|op| op.name() == plain).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("no operation is called {name:?}; the operations are {names}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_with_either_dash() {
        for op in Op::ALL {
            assert_eq!(op.name().parse(), Ok(op));
            assert_eq!(op.name().replace('-', "_").parse(), Ok(op));
        }
        assert!("all-reduced".parse::<Op>().unwrap_err().contains("reduce-scatter"));
    }

    #[test]
    fn sizes_become_whole_parts() {
        assert_eq!(Op::AllReduce.fit(1023, 4, 3), 1020);
        assert_eq!(Op::AllGather.fit(1024, 4, 3), 1020);
        assert_eq!(Op::AllGather.fit(8, 4, 8), 32);
        assert_eq!(Op::Barrier.fit(8, 4, 8), 0);
    }

    #[test]
    fn bus_bandwidth_is_that_of_the_links() {
        assert_eq!(Op::AllReduce.bus_factor(2), 1.0);
        assert_eq!(Op::AllReduce.bus_factor(4), 1.5);
        assert_eq!(Op::AllToAll.bus_factor(4), 0.75);
        assert_eq!(Op::Broadcast.bus_factor(4), 1.0);
    }
}
