//! One send or receive, and the work that is told how it ended.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use tensorwire_device::{Deadline, Device, DeviceId, Dtype, Layout, Queue, Span};

use super::ring::Header;
use crate::collective::tensor::Tensor;
use crate::collective::work::Completion;
use crate::error::{Error, Result};
use crate::shm::record::Begun;

/// Where the end of an operation is told: to who hears of it, and in its record.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) to: Hearer,
    pub(super) record: Option<Begun>,
    /// When the operation began.
    pub(super) since: Option<Instant>,
}

impl From<Hearer> for Report {
    fn from(to: Hearer) -> Self {
        Self { to, record: None, since: None }
    }
}

/// Who hears how an operation ended, and from whom a message came.
#[derive(Debug)]
pub(super) enum Hearer {
    /// The thread that waits for it.
    Waiter(u64),
    /// A work, which tells the source beside its result if it was not known before.
    Work(Completion, Option<Arc<OnceLock<usize>>>),
}

impl Ticket {
    /// Has the operation that a thread waits for end now.
    pub(super) fn hasten(&mut self, number: u64, now: Instant) {
        if matches!(self.report.to, Hearer::Waiter(other) if other == number) {
            self.deadline = self.deadline.min(Deadline::at(now));
        }
    }
}

/// An operation that is over: who hears of it, and the other rank's place.
pub(super) type Ended = (Report, Result<usize>);

/// When an operation began and when it must end, and who hears of it.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) since: Instant,
    pub(super) deadline: Deadline,
    pub(super) report: Report,
}

/// A message to be sent.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) tag: u64,
    pub(super) dtype: Dtype,
    /// Its payload, without gaps.
    pub(super) payload: Span,
    pub(super) begun: bool,
    /// How much of the payload is in the ring.
    pub(super) put: usize,
    pub(super) ticket: Ticket,
}

impl Sending {
    pub(super) fn new(
        tensor: &Tensor,
        tag: u64,
        ticket: Ticket,
        (host, queue): (&dyn Device, &mut dyn Queue),
    ) -> Result<Self> {
        let payload = match packed(tensor, host)? {
            PayloadMemory::Plain(span) => span,
            PayloadMemory::Scratch(scratch, layout) => {
                queue.copy_strided((scratch.view(), &layout), (tensor.span().view(), tensor.layout()))?;
                scratch
            }
        };
        Ok(Self { tag, dtype: tensor.dtype(), payload, begun: false, put: 0, ticket })
    }
}

/// A message that is wanted.
#[derive(Debug)]
pub(super) struct Receiving {
    pub(super) tag: u64,
    /// The place of the sender, or any.
    pub(super) from: Option<usize>,
    pub(super) dtype: Dtype,
    /// Where it goes, without gaps.
    pub(super) into: Span,
    /// The tensor behind it and the layout of `into`, if the tensor has gaps.
    unpack: Option<(Tensor, Layout)>,
    pub(super) ticket: Ticket,
}

impl Receiving {
    pub(super) fn new(
        tensor: &Tensor,
        from: Option<usize>,
        tag: u64,
        ticket: Ticket,
        host: &dyn Device,
    ) -> Result<Self> {
        if tensor.overlaps_itself() {
            let layout = tensor.layout();
            return Err(Error::misuse(format!(
                "a tensor of shape {:?} and strides {:?} cannot be received into: some of its elements are the same memory",
                layout.shape(),
                layout.strides()
            )));
        }
        let (into, unpack) = match packed(tensor, host)? {
            PayloadMemory::Plain(span) => (span, None),
            PayloadMemory::Scratch(span, layout) => (span, Some((tensor.clone(), layout))),
        };
        Ok(Self { tag, from, dtype: tensor.dtype(), into, unpack, ticket })
    }

    /// Whether it takes messages of this rank.
    pub(super) fn takes(&self, place: usize) -> bool {
        self.from.is_none_or(|from| from == place)
    }

    /// Why a message does not fit, with both sides' view.
    pub(super) fn misfit(&self, header: &Header) -> Option<String> {
        let bytes = self.into.len();
        (header.bytes != bytes as u64 || header.dtype != self.dtype).then(|| {
            let theirs = describe(header.bytes, header.dtype);
            let ours = describe(bytes as u64, self.dtype);
            let tag = self.tag;
            format!(
                "it sent {theirs} with tag {tag}, and this rank receives into {ours}; the message is dropped. Both must be alike"
            )
        })
    }

    /// Everything is there.
    pub(super) fn unpack(&self, queue: &mut dyn Queue) -> Result<()> {
        if let Some((tensor, layout)) = &self.unpack {
            queue.copy_strided((tensor.span().view(), tensor.layout()), (self.into.view(), layout))?;
        }
        Ok(())
    }
}

fn describe(bytes: u64, dtype: Dtype) -> String {
    format!("{} {dtype} ({bytes} bytes)", bytes / dtype.size() as u64)
}

enum PayloadMemory {
    Plain(Span),
    Scratch(Span, Layout),
}

/// The elements of a tensor in one piece: where they are, or memory with room for them.
fn packed(tensor: &Tensor, host: &dyn Device) -> Result<PayloadMemory> {
    let device = tensor.span().device();
    if device != DeviceId::Host {
        return Err(Error::Unsupported {
            what: format!("a message from or into memory of {device}"),
            need: "memory of the host".into(),
            have: device.to_string(),
        });
    }
    let bytes = tensor.byte_len();
    if tensor.layout().is_contiguous() {
        return Ok(PayloadMemory::Plain(tensor.span().slice(0..bytes)?));
    }
    let layout = Layout::contiguous(tensor.layout().shape(), tensor.dtype().size())?;
    Ok(PayloadMemory::Scratch(Span::whole(host.alloc(bytes)?), layout))
}
