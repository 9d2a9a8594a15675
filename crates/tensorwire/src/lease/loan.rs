//! What a holder of lent memory has.

use std::sync::{Arc, PoisonError};

use tensorwire_device::{Deadline, Queue, Span};

use super::Inner;
use super::holder::Hold;
use super::points::Theirs;
use crate::error::Result;
use crate::share::root;

/// Memory of another process, counted as held until the last user of its span is gone, queues among them.
#[derive(Debug)]
#[must_use = "dropping it releases the memory"]
pub struct Loan {
    pub(super) inner: Arc<Inner>,
    pub(super) span: Span,
    pub(super) hold: Arc<Hold>,
}

impl Loan {
    /// The memory. Its clones hold the loan.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// The memory, which holds the loan from now on.
    pub fn into_span(self) -> Span {
        self.span
    }

    /// The owner's pid as it sees itself.
    pub fn pid(&self) -> u32 {
        self.hold.lender.pid
    }

    /// Releases it now, for what is queued on `queue` so far: the owner waits until the queue has come to this point, and this
    /// process must not queue anything more on the memory. Nobody waits here.
    pub fn release_after(self, queue: &mut dyn Queue) -> Result<()> {
        let noted = self.used_by(queue);
        self.hold.release(|_| noted)
    }

    /// Notes that what is queued on `queue` so far uses it: when the last user of the span is gone, the owner waits for that,
    /// too, and until then it stays mapped here. Nobody waits here.
    pub fn used_by(&self, queue: &mut dyn Queue) -> Result<()> {
        self.inner.birth.check("a loan")?;
        let Hold { lender, slot, generation, .. } = &*self.hold;
        let _order = lender.order.lock().unwrap_or_else(PoisonError::into_inner);
        // One point stands for all: what other queues have released before has to be done, too.
        let earlier = lender.row.point(*slot, *generation);
        let mine = Theirs::of(self.inner.points.region().clone())?;
        if let Some(flag) = mine.flag(earlier).filter(|flag| !flag.reached(earlier.value)) {
            let deadline = Deadline::after(self.inner.timeout);
            lender.wait_on(&self.inner.points, queue, (&flag, earlier.value), deadline)?;
        }
        let point = self.inner.point_on(queue)?;
        lender.row.set_point(*slot, *generation, point);
        // Memory of this process itself is kept by its owner's side.
        if let Some(flag) = mine.flag(point).filter(|_| lender.connection.is_some()) {
            let done = self.inner.holding().keep_until(flag, point.value, root(self.span.region()));
            drop(done);
        }
        Ok(())
    }
}
