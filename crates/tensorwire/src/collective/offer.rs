//! Whether an operation can go straight between the ranks' own memory: each rank says in its progress line where its
//! tensors are, and all see the same answers.

use tensorwire_device::Deadline;

use super::exec::{Executor, Reach, Stop};
use super::operation::Operation;
use super::plan::Shape;
use crate::error::Result;
use crate::group::Inner;

/// Where a rank's tensors are, as others can reach them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Offer {
    accepts: bool,
    input: Option<(u64, u64)>,
    output: Option<(u64, u64)>,
}

impl Offer {
    pub(super) fn accepts(&self) -> bool {
        self.accepts
    }

    pub(super) fn to_bytes(self) -> [u8; 32] {
        [0; 32]
    }
}

impl Operation {
    /// What this rank offers.
    pub(super) fn offer(&self, _group: &Inner) -> Offer {
        Offer::default()
    }

    /// Whether results that all ranks write bypass the caches.
    pub(super) fn bypass_direct(&self, _world: usize) -> bool {
        false
    }
}

impl Executor {
    /// Maps what all ranks offer, if all do.
    pub(super) fn accept(
        &mut self,
        _group: &Inner,
        _operation: &Operation,
        _shape: &Shape,
        _deadline: Deadline,
    ) -> Result<Option<Vec<Reach>>, Stop> {
        Ok(None)
    }
}
