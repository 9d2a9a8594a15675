//! What an all-reduce on one GPU that all ranks share cannot be quicker than, from parts that are measured in the same
//! run. One rank works for all: it reads and writes every rank's tensor. So the floor is that reduction, by one rank on
//! memory of its own, and two signals from queue to queue: "my input is there", and "your result is there".

use std::time::Duration;

use super::crew::Crew;
use super::measure::{self, Missing};
use super::op::Op;
use super::order::Case;
use crate::exit::Failure;

/// What a signal takes from one rank's queue to another's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Floor {
    hop_us: f64,
}

/// More tensors than that are not one reduction.
const MOST: usize = 128;
const HOPS: f64 = 2.0;

impl Floor {
    /// Measures the signals; `case` is any of the run.
    pub(super) fn new(ours: &mut Crew, case: &Case, length: Duration) -> Result<Self, Failure> {
        let case = Case { op: Op::Hop, bytes: 0, path: None, ..*case };
        Ok(Self { hop_us: median(ours, &case, length)? })
    }

    /// The floor of a case, for the operations that have one.
    pub(super) fn of(
        self,
        ours: &mut Crew,
        case: &Case,
        ranks: usize,
        length: Duration,
    ) -> Result<Option<f64>, Failure> {
        if case.op != Op::AllReduce || ranks > MOST {
            return Ok(None);
        }
        let alone = Case { op: Op::ReduceAlone, path: None, ..*case };
        Ok(Some(median(ours, &alone, length)? + HOPS * self.hop_us))
    }

    /// In words.
    pub(super) fn text(self) -> String {
        format!("{} us for a signal from queue to queue", crate::latency::figure(self.hop_us))
    }
}

fn median(crew: &mut Crew, case: &Case, length: Duration) -> Result<f64, Failure> {
    match measure::case(&mut [crew], case, 1, length).pop() {
        Some(Ok(row)) => Ok(row.median_us),
        Some(Err(Missing::No(why) | Missing::Broken(why))) => Err(Failure::failed(why)),
        None => Ok(0.0),
    }
}
