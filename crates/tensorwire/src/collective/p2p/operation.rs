//! One send or receive, and the work that is told how it ended.

use std::sync::Arc;
use std::time::Instant;

use tensorwire_device::{Deadline, Device, DeviceId, Dtype, Layout, Queue, Span};

use super::started::Started;
use crate::collective::tensor::Tensor;
use crate::collective::work::Completion;
use crate::error::{Error, Result};
use crate::link::Header;
use crate::shm::record::Begun;

/// Who hears how an operation ended, and which message it was.
#[derive(Debug)]
pub(super) enum Hearer {
    /// The thread that waits for it.
    Waiter(u64),
    /// A work, and what is known of it if it is a receive.
    Work(Completion, Option<Arc<Started>>),
}

impl Hearer {
    /// Whether a thread waits for it by this number.
    pub(super) fn is_waiter(&self, number: u64) -> bool {
        matches!(self, Self::Waiter(own) if *own == number)
    }

    /// Whether it is the work of this receive.
    pub(super) fn is_work(&self, started: &Started) -> bool {
        matches!(self, Self::Work(_, Some(own)) if std::ptr::eq(&**own, started))
    }
}

/// A message that was received.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) from: usize,
    pub(super) header: Header,
    /// Where it is, without gaps.
    pub(super) payload: Span,
}

/// How an operation ended: with the message if it is a receive. It is moved often, and errors are large and rare.
pub(super) type End = Result<Option<Arrival>, Box<Error>>;

/// An operation that is over: who hears of it, how it ended, and what it had of its caller's memory.
pub(super) type Ended = (Ticket, End, Memory);

/// Memory that an operation needs no more. The end of its last reference may run any code of the caller, which may come
/// back here: so it is dropped without a lock.
#[derive(Debug)]
pub(super) struct Memory(#[allow(dead_code)] Option<Span>, #[allow(dead_code)] Option<Gaps>);

/// The tensor of a receive that has gaps, and the layout of its elements without them. Few receives have one, and all are
/// moved often.
type Gaps = Box<(Tensor, Layout)>;

/// When an operation began and when it must end, who hears of it, and its record.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) since: Instant,
    pub(super) deadline: Deadline,
    pub(super) to: Hearer,
    pub(super) record: Option<Begun>,
}

impl Ticket {
    /// Of an operation that begins now.
    pub(super) fn new(deadline: Deadline, to: Hearer) -> Self {
        Self { since: Instant::now(), deadline, to, record: None }
    }
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

    /// It is over.
    pub(super) fn end(self, result: Result<()>) -> Ended {
        (self.ticket, result.map(|()| None).map_err(Box::new), Memory(Some(self.payload), None))
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
    unpack: Option<Gaps>,
    /// How many were posted before it and with it; 0 if it was not posted yet.
    pub(super) order: u64,
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
            PayloadMemory::Scratch(span, layout) => (span, Some(Box::new((tensor.clone(), layout)))),
        };
        Ok(Self { tag, from, dtype: tensor.dtype(), into, unpack, order: 0, ticket })
    }

    /// Whether it takes messages of this rank.
    pub(super) fn takes(&self, place: usize) -> bool {
        self.from.is_none_or(|from| from == place)
    }

    /// Whether a message has its bytes and its type.
    pub(super) fn fits(&self, header: &Header) -> bool {
        header.bytes == self.into.len() as u64 && header.dtype == self.dtype
    }

    /// Why a message does not fit, with both sides' view.
    pub(super) fn misfit(&self, header: &Header) -> Option<String> {
        (!self.fits(header)).then(|| {
            let bytes = self.into.len();
            let theirs = describe(header.bytes, header.dtype);
            let ours = describe(bytes as u64, self.dtype);
            let tag = self.tag;
            format!(
                "it sent {theirs} with tag {tag}, and this rank receives into {ours}; the message is dropped. Both must be alike"
            )
        })
    }

    /// The first bytes of the payload, which have come.
    pub(super) fn begun(&self, len: usize) -> Result<Vec<u8>> {
        copied(&self.into, len)
    }

    /// Everything is there.
    pub(super) fn finish(self, from: usize, header: Header, queue: &mut dyn Queue) -> Ended {
        if let Some((tensor, layout)) = self.unpack.as_deref() {
            let into = (tensor.span().view(), tensor.layout());
            if let Err(error) = queue.copy_strided(into, (self.into.view(), layout)) {
                return self.fail(error.into());
            }
        }
        let arrival = Arrival { from, header, payload: self.into };
        (self.ticket, Ok(Some(arrival)), Memory(None, self.unpack))
    }

    /// It is over without a message.
    pub(super) fn fail(self, error: Error) -> Ended {
        (self.ticket, Err(Box::new(error)), Memory(Some(self.into), self.unpack))
    }
}

/// A copy of the first bytes of a payload.
pub(super) fn copied(payload: &Span, len: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let refused = |error| Error::device(format!("keeping a message of {} bytes: {error}", payload.len()));
    bytes.try_reserve_exact(len).map_err(refused)?;
    bytes.resize(len, 0);
    payload.read(0, &mut bytes)?;
    Ok(bytes)
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
