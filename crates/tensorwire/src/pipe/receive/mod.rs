//! Receiving a message, in two steps: what it is, and where its tensors go.
//!
//! A receive of a description asks the group for the next head. The group has the order: who asks first gets the first. A receive that
//! is given up gives its head back, so that the next one gets it, also if that waits already; what has come of the message besides is
//! *parked* under its number. The head of the end is given back by everybody who gets it, so that all hear of it.

mod describe;
mod open;
mod place;
mod read;
mod whole;

use std::fmt;
use std::sync::Arc;

use tensorwire_device::{Deadline, DeviceId, Dtype};

pub use self::describe::Next;
pub(super) use self::describe::describe;
use self::open::Open;
pub(super) use self::open::Parked;
pub use self::read::Read;
pub(super) use self::read::Reading;
use self::read::{Order, ReadOut, read_out};
pub use self::whole::Recv;
use super::channel::{self, Channel, Place};
use super::pending::How;
use super::send::reasons;
use crate::collective::Tensor;
use crate::error::{Error, Result};

/// A tensor of a message, as the description says.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Part {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
    /// How its bytes come.
    pub channel: Channel,
    #[doc(hidden)]
    pub maker: u8,
}

/// Where a tensor goes.
#[derive(Debug, Clone)]
enum Target {
    /// As it was sent.
    New,
    /// New memory of a device.
    On(DeviceId),
    Into(Tensor),
    View,
}

/// A message whose description is here. Say where its tensors go, and [`read`](Self::read) it. If you drop it unread, its bytes are
/// dropped as they come, and large ones are not sent.
pub struct Incoming(Arc<Open>);

impl Incoming {
    /// The bytes that came with the description.
    pub fn metadata(&self) -> &[u8] {
        &self.0.descriptor.metadata
    }

    /// The sizes of the payloads.
    pub fn payloads(&self) -> impl ExactSizeIterator<Item = usize> {
        self.0.descriptor.blocks[..self.0.descriptor.payloads].iter().map(|block| block.len)
    }

    /// What its tensors are.
    pub fn tensors(&self) -> &[Part] {
        &self.0.parts
    }

    /// Has a tensor of the message come into this one, which has its type and shape.
    pub fn place(&mut self, index: usize, tensor: &Tensor) -> Result<()> {
        let part = self.part(index)?;
        if (tensor.dtype(), tensor.layout().shape()) != (part.dtype, &part.shape[..]) {
            return Err(Error::misuse(format!(
                "tensor {index} of the message is {} of shape {:?}, and its place {} of shape {:?}",
                part.dtype,
                part.shape,
                tensor.dtype(),
                tensor.layout().shape()
            )));
        }
        if tensor.overlaps_itself() {
            return Err(Error::misuse("a place for a tensor with elements that are the same memory"));
        }
        self.comes_to(index, &tensor.span().device())?;
        self.0.aim(index, Target::Into(tensor.clone()))
    }

    /// Has a tensor of the message come into new memory of a device. Otherwise it comes as it was sent: one of the host to the host,
    /// one of a GPU to that GPU, or to another one where this process does not have it, or to the host where it has none.
    pub fn bring_to(&mut self, index: usize, device: &DeviceId) -> Result<()> {
        self.part(index)?;
        self.comes_to(index, device)?;
        self.0.end.context().device(device)?;
        self.0.aim(index, Target::On(device.clone()))
    }

    /// Whether a channel of the two ends brings it there.
    fn comes_to(&self, index: usize, device: &DeviceId) -> Result<()> {
        let Open { end, descriptor, .. } = &*self.0;
        let from = Place::of(&descriptor.blocks[descriptor.tensors[index].block].from);
        let pair = (from, Place::of(device));
        if pair == (Place::Host, Place::Host) {
            return Ok(());
        }
        let choice = channel::choose(pair, end.near, &end.theirs, &end.ours);
        choice.channel.map(drop).ok_or_else(|| Error::Unsupported {
            what: format!("tensor {index} of the message on {device}"),
            need: "a channel that both ends have".into(),
            have: format!("none ({})", reasons(&choice)),
        })
    }

    /// Has a tensor of the message be the memory that the sender lends, without a copy. It must not be changed by either until it
    /// is dropped, and until then the send is not over. Fails for a tensor that is not lent: [`Part::channel`] says
    /// how it comes.
    pub fn view(&mut self, index: usize) -> Result<()> {
        match self.part(index)?.channel {
            channel if channel.lends() => self.0.aim(index, Target::View),
            channel => Err(Error::Unsupported {
                what: format!("a view of tensor {index} of the message"),
                need: "memory that its sender lends: of one host, shareable, and on the host at least 1 MiB"
                    .into(),
                have: format!("a tensor that comes by {channel}"),
            }),
        }
    }

    fn part(&self, index: usize) -> Result<&Part> {
        let most = self.0.parts.len();
        self.0
            .parts
            .get(index)
            .ok_or_else(|| Error::misuse(format!("tensor {index} of a message that has {most}")))
    }

    /// The number of the message.
    pub(super) fn serial(&self) -> u64 {
        self.0.serial
    }

    /// Takes the first bytes of the metadata away, which were for us.
    pub(super) fn strip(&mut self, len: usize) -> Result<()> {
        let open = Arc::get_mut(&mut self.0).ok_or_else(|| Error::bug("a new message has two owners"))?;
        Arc::make_mut(&mut open.descriptor).metadata.drain(..len);
        Ok(())
    }

    /// Reads all of it, or starts to.
    pub(super) async fn read_out(self, by: Deadline, how: How) -> Result<ReadOut> {
        read_out(self.0, by, how, Order::default()).await
    }

    /// Reads the payloads and tensors. May be called again after a time-out, and goes on then.
    pub fn read(&mut self) -> Read<'_> {
        Read { incoming: self, deadline: None, after: Vec::new() }
    }
}

impl fmt::Debug for Incoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Incoming({} payloads, {:?})", self.0.descriptor.payloads, self.0.parts)
    }
}
