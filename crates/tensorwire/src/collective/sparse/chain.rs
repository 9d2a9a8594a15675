//! Several exchanges as one operation.
//!
//! Each exchange has a number of its own, as every operation of a group, so all ranks must go through as many of them,
//! also where one rank fails in between. The rule: an exchange that fails on some rank is followed by one that is *refused*
//! ([`Why::is_before`]), and the chain ends there for all.
//!
//! - A rank that cannot go on before an exchange enters that exchange and cancels it, with the reason.
//! - A rank in whose eyes an exchange has failed refuses the next one, unless the failed one was the last, or was itself
//!   refused. Ranks that had finished the failed one are in the next, or come to it, and hear the reason there.
//! - The first verdict of an exchange counts for all ranks. So all see the same one as refused. Nobody finishes an exchange
//!   that a rank refuses: every exchange of a chain needs all ranks.

use std::time::Instant;

use tensorwire_device::{Deadline, Dtype};

use super::super::exec::Executor;
use super::super::lines::Stop;
use super::super::operation::Operation;
use crate::error::{Error, Result};
use crate::ranks::Ranks;
use crate::shm::control::Why;
use crate::shm::kind::Kind;

/// One rank's way through a chain.
pub(super) struct Chain<'a> {
    pub(super) executor: &'a mut Executor,
    pub(super) ranks: &'a Ranks,
    late: Why,
    /// When the first exchange began; later ones begin when they do.
    start: Option<Instant>,
    deadline: Deadline,
    /// How many exchanges come; nothing until that is known.
    left: Option<usize>,
    /// Whether the last exchange failed.
    failed: bool,
}

impl<'a> Chain<'a> {
    pub(super) fn new(
        executor: &'a mut Executor,
        ranks: &'a Ranks,
        late: Why,
        (start, deadline): (Instant, Deadline),
    ) -> Self {
        Self { executor, ranks, late, start: Some(start), deadline, left: None, failed: false }
    }

    /// So many exchanges come from here on.
    pub(super) fn expect(&mut self, left: usize) {
        self.left = Some(left);
    }

    /// The next exchange.
    pub(super) fn exchange(&mut self, mut operation: Operation) -> Result<()> {
        operation.late = self.late;
        operation.check(self.executor.lines.world)?;
        let start = self.start.take().unwrap_or_else(Instant::now);
        self.run(&operation, (start, self.deadline))
    }

    /// Ends the chain for all ranks after an error of this one; gives the error.
    pub(super) fn end(mut self, error: Error) -> Error {
        if !self.failed && self.left != Some(0) {
            self.refuse(Stop::Own(error.clone()));
        }
        while self.left != Some(0)
            && self.ranks.failure().is_none()
            && !self.executor.lines.why().is_some_and(Why::is_before)
        {
            self.refuse(Stop::Before(error.clone()));
        }
        error
    }

    /// Enters the next exchange and cancels it. Nobody looks at what it would have been.
    fn refuse(&mut self, stop: Stop) {
        let mut operation = Operation::new(Kind::Sizes, Dtype::I64);
        operation.late = self.late;
        self.executor.refuse_next(stop);
        let now = Instant::now();
        let _ = self.run(&operation, (now, Deadline::at(now)));
    }

    fn run(&mut self, operation: &Operation, time: (Instant, Deadline)) -> Result<()> {
        if let Some(left) = &mut self.left {
            *left = left.saturating_sub(1);
        }
        let ended = self.executor.next(self.ranks, operation, time);
        self.failed = ended.is_err();
        ended
    }
}
