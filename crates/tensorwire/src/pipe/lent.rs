//! Memory of the sender that the reader gets: lent to another process, or handed to another thread.

use std::sync::Arc;

use tensorwire_device::{Deadline, Queue, Span};

use super::End;
use super::desk::{Handed, Ticket};
use crate::error::Result;
use crate::lease::{Lease, Loan};

/// As the sender has it.
#[derive(Debug, Clone)]
pub(super) enum Lent {
    Lease(Arc<Lease>),
    Handed(Arc<Ticket>),
}

impl Lent {
    /// What the reader hears, to get it.
    pub(super) fn token(&self) -> Vec<u8> {
        match self {
            Self::Lease(lease) => lease.token().to_bytes(),
            Self::Handed(ticket) => ticket.token().to_vec(),
        }
    }

    /// Whether the reader has it.
    pub(super) fn is_held(&self) -> bool {
        match self {
            Self::Lease(lease) => !lease.holders().is_empty(),
            Self::Handed(ticket) => ticket.is_held(),
        }
    }

    /// Waits until queues of the reader have done what they do with it.
    pub(super) fn wait(&self, doing: &str, by: Deadline) -> Result<()> {
        match self {
            Self::Lease(lease) => lease.wait(by),
            Self::Handed(ticket) => ticket.wait(doing, by),
        }
    }

    /// Nobody gets it from now on. Who has it holds it.
    pub(super) fn discard(&self, end: &End) {
        match self {
            Self::Lease(lease) if lease.holders().is_empty() => {
                let by = Deadline::after(end.group.timeout());
                if let Err(error) = end.context().discard(lease.token(), by) {
                    tracing::debug!(%error, "what a message would have lent expires");
                }
            }
            Self::Lease(_) => {}
            Self::Handed(ticket) => ticket.take_back(),
        }
    }
}

/// As the reader has it.
#[derive(Debug)]
pub(super) enum Loaned {
    Loan(Loan),
    Handed(Handed),
}

impl Loaned {
    /// The memory. Its clones hold it.
    pub(super) fn span(&self) -> &Span {
        match self {
            Self::Loan(loan) => loan.span(),
            Self::Handed(handed) => handed.span(),
        }
    }

    /// Notes that what is on a queue so far uses it.
    pub(super) fn used_by(&self, queue: &mut dyn Queue) -> Result<()> {
        match self {
            Self::Loan(loan) => loan.used_by(queue),
            Self::Handed(handed) => handed.used_by(queue),
        }
    }

    /// Lets it go behind what is on a queue so far.
    pub(super) fn release_after(self, queue: &mut dyn Queue) -> Result<()> {
        match self {
            Self::Loan(loan) => loan.release_after(queue),
            Self::Handed(handed) => handed.used_by(queue),
        }
    }
}
