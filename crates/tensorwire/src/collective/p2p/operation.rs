//! One send or receive, and the work that is told how it ended.

use std::sync::Arc;
use std::time::Instant;

use tensorwire_device::pool::Pool;
use tensorwire_device::{Deadline, Device, DeviceId, Dtype, Layout, Mark, Queue, Span, host};

use super::freight::{Parcel, Unload};
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
    /// Where it is, without gaps; or its token, if it is lent.
    pub(super) payload: Span,
    /// What is to be done until it is in its tensor: it is lent, or the tensor is on a GPU.
    pub(super) unload: Option<Box<Unload>>,
}

/// How an operation ended: with the message if it is a receive. It is moved often, and errors are large and rare.
pub(super) type End = Result<Option<Arrival>, Box<Error>>;

/// An operation that is over: who hears of it, how it ended, and what it leaves.
pub(super) type Ended = (Ticket, End, Leftovers);

/// What an operation leaves: its caller's memory, and a token that nobody will redeem. The end of the last reference to memory
/// may run any code of the caller, which may come back here: so it is dropped without a lock.
#[derive(Debug)]
pub(super) struct Leftovers(
    #[allow(dead_code)] Option<Span>,
    #[allow(dead_code)] Option<Gaps>,
    pub(super) Option<Vec<u8>>,
);

/// The tensor of a receive that has gaps or is on a GPU. Few receives have one, and all are moved often.
pub(super) type Gaps = Box<Apart>;

/// A tensor whose message comes into other memory first.
#[derive(Debug)]
pub(super) struct Apart {
    pub(super) tensor: Tensor,
    /// The layout of its elements without gaps.
    pub(super) packed: Layout,
    pub(super) gpu: Option<OnGpu>,
}

/// Of a tensor on a GPU: where memory of the host is, and what was queued before the receive.
pub(super) type OnGpu = (Pool, Option<Mark>);

/// When an operation began and when it must end, who hears of it, and its record.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) since: Instant,
    pub(super) deadline: Deadline,
    pub(super) to: Hearer,
    pub(super) record: Option<Begun>,
    /// Of a send from a GPU: behind its copy.
    pub(super) copied: Option<Mark>,
    /// By which a started send is withdrawn; 0 if it has none.
    pub(super) number: u64,
}

impl Ticket {
    /// Of an operation that begins now.
    pub(super) fn new(deadline: Deadline, to: Hearer) -> Self {
        Self { since: Instant::now(), deadline, to, record: None, copied: None, number: 0 }
    }
}

/// A message to be sent.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) tag: u64,
    pub(super) dtype: Dtype,
    /// Its payload, without gaps; or the token of it.
    pub(super) payload: Span,
    /// Bytes of the tensor, and whether they are lent.
    bytes: usize,
    pub(super) lent: bool,
    pub(super) begun: bool,
    /// How much of the payload is in the ring.
    pub(super) put: usize,
    pub(super) ticket: Ticket,
}

impl Sending {
    pub(super) fn new(
        tensor: &Tensor,
        parcel: Option<Parcel>,
        tag: u64,
        mut ticket: Ticket,
        (host, queue): (&dyn Device, &mut dyn Queue),
    ) -> Result<Self> {
        let (dtype, bytes) = (tensor.dtype(), tensor.byte_len());
        if let Some(Parcel { payload, lent, copied }) = parcel {
            ticket.copied = copied;
            return Ok(Self { tag, dtype, payload, bytes, lent, begun: false, put: 0, ticket });
        }
        let payload = match packed(tensor, host)? {
            PayloadMemory::Plain(span) => span,
            PayloadMemory::Scratch(scratch, layout) => {
                queue.copy_strided((scratch.view(), &layout), (tensor.span().view(), tensor.layout()))?;
                scratch
            }
        };
        Ok(Self { tag, dtype, payload, bytes, lent: false, begun: false, put: 0, ticket })
    }

    /// What stands before it.
    pub(super) fn header(&self, number: u64) -> Header {
        let lent = if self.lent { self.payload.len() as u32 } else { 0 };
        Header { tag: self.tag, bytes: self.bytes as u64, number, dtype: self.dtype, lent }
    }

    /// It is over.
    pub(super) fn end(self, result: Result<()>) -> Ended {
        let token = if self.lent && result.is_err() { self.payload.to_vec().ok() } else { None };
        (self.ticket, result.map(|()| None).map_err(Box::new), Leftovers(Some(self.payload), None, token))
    }
}

/// A message that is wanted.
#[derive(Debug)]
pub(super) struct Receiving {
    pub(super) tag: u64,
    /// The place of the sender, or any.
    pub(super) from: Option<usize>,
    pub(super) dtype: Dtype,
    pub(super) bytes: usize,
    /// Where it goes, without gaps. That of a tensor on a GPU is made when bytes come.
    pub(super) into: Span,
    /// The tensor behind it, if that is another one.
    apart: Option<Gaps>,
    /// How many were posted before it and with it; 0 if it was not posted yet.
    pub(super) order: u64,
    /// Whether the message is dropped as it comes, whatever its size and type.
    pub(super) drops: bool,
    pub(super) ticket: Ticket,
}

impl Receiving {
    pub(super) fn new(
        tensor: &Tensor,
        gpu: Option<OnGpu>,
        (from, tag): (Option<usize>, u64),
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
        let apart = |packed, gpu| Some(Box::new(Apart { tensor: tensor.clone(), packed, gpu }));
        let (into, apart) = match gpu {
            Some(gpu) => (Span::whole(host::private(0)?), apart(dense(tensor)?, Some(gpu))),
            None => match packed(tensor, host)? {
                PayloadMemory::Plain(span) => (span, None),
                PayloadMemory::Scratch(span, layout) => (span, apart(layout, None)),
            },
        };
        let (dtype, bytes) = (tensor.dtype(), tensor.byte_len());
        Ok(Self { tag, from, dtype, bytes, into, apart, order: 0, drops: false, ticket })
    }

    /// Has room for the bytes of a message.
    pub(super) fn open(&mut self) -> Result<()> {
        if let Some((pool, _)) = self.apart.as_ref().and_then(|apart| apart.gpu.as_ref())
            && self.into.len() != self.bytes
        {
            self.into = Span::whole(pool.alloc(self.bytes)?).slice(0..self.bytes)?;
        }
        Ok(())
    }

    /// Takes the first bytes of a message.
    pub(super) fn fill(&mut self, bytes: &[u8]) -> Result<()> {
        if self.drops {
            return Ok(());
        }
        self.open()?;
        Ok(self.into.write(0, bytes)?)
    }

    /// Whether it takes messages of this rank.
    pub(super) fn takes(&self, place: usize) -> bool {
        self.from.is_none_or(|from| from == place)
    }

    /// Whether a message has its bytes and its type.
    pub(super) fn fits(&self, header: &Header) -> bool {
        self.drops || (header.bytes == self.bytes as u64 && header.dtype == self.dtype)
    }

    /// Why a message does not fit, with both sides' view.
    pub(super) fn misfit(&self, header: &Header) -> Option<String> {
        (!self.fits(header)).then(|| {
            let bytes = self.bytes;
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
        match self.apart.as_deref() {
            None => {}
            Some(Apart { gpu: Some(_), .. }) => {
                let payload = self.into.clone();
                return self.hand_over(from, header, payload);
            }
            Some(apart) => {
                if let Err(error) = apart.unpack(&self.into, queue) {
                    return self.fail(error);
                }
            }
        }
        let arrival = Arrival { from, header, payload: self.into, unload: None };
        (self.ticket, Ok(Some(arrival)), Leftovers(None, self.apart, None))
    }

    /// The message is here, or its token, and is yet to be brought to the tensor.
    pub(super) fn hand_over(self, from: usize, header: Header, payload: Span) -> Ended {
        let unload = Unload { into: self.into, apart: self.apart, deadline: self.ticket.deadline };
        let arrival = Arrival { from, header, payload, unload: Some(Box::new(unload)) };
        (self.ticket, Ok(Some(arrival)), Leftovers(None, None, None))
    }

    /// It is over without a message.
    pub(super) fn fail(self, error: Error) -> Ended {
        (self.ticket, Err(Box::new(error)), Leftovers(Some(self.into), self.apart, None))
    }

    /// It is over, and the message that was for it is dropped.
    pub(super) fn refuse(self, error: Error, token: Option<Vec<u8>>) -> Ended {
        let (ticket, end, Leftovers(into, apart, _)) = self.fail(error);
        (ticket, end, Leftovers(into, apart, token))
    }
}

impl Apart {
    /// Brings a message of the host to a tensor of the host.
    pub(super) fn unpack(&self, from: &Span, queue: &mut dyn Queue) -> Result<()> {
        let into = (self.tensor.span().view(), self.tensor.layout());
        Ok(queue.copy_strided(into, (from.view(), &self.packed))?)
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
    if tensor.span().device() != DeviceId::Host {
        return match tensor.is_empty() {
            true => Ok(PayloadMemory::Plain(Span::whole(host::private(0)?))),
            false => Err(Error::bug("a message of a GPU that was not packed")),
        };
    }
    let bytes = tensor.byte_len();
    if tensor.layout().is_contiguous() {
        return Ok(PayloadMemory::Plain(tensor.span().slice(0..bytes)?));
    }
    Ok(PayloadMemory::Scratch(Span::whole(host.alloc(bytes)?), dense(tensor)?))
}

/// The layout of a tensor's elements without gaps.
pub(super) fn dense(tensor: &Tensor) -> Result<Layout> {
    Ok(Layout::contiguous(tensor.layout().shape(), tensor.dtype().size())?)
}
