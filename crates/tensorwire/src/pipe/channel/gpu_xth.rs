//! Both ends are in one process, and the memory is a GPU's: it is handed over with the points of the sender's queues behind which it is
//! ready, and comes back with those of the reader's queues behind which it is free. Queues wait for these, and no thread does. The
//! reader's GPU may be the same or another one.

use tensorwire_device::Deadline;

use super::xth::in_one_process;
use super::{Channel, FOR_SENT, Offer, Offered, Pair, Place, Way};
use crate::error::Result;
use crate::pipe::convert;
use crate::pipe::desk;
use crate::pipe::lent::{Lent, Loaned};
use crate::pipe::receive::Reading;
use crate::pipe::send::Parcel;

pub(super) struct GpuXth;

impl Way for GpuXth {
    fn channel(&self) -> Channel {
        Channel::GpuXth
    }

    fn viable(&self, pair: &Pair<'_>) -> std::result::Result<(), &'static str> {
        match pair.from {
            Place::Host => Err(FOR_SENT),
            Place::Gpu(_) => in_one_process(pair),
        }
    }

    fn offer(&self, parcel: &mut Parcel, block: &mut Offer<'_>) -> Result<Offered> {
        let ready = convert::of(&block.span.device()).ready(block.span, block.lanes)?;
        let ticket = desk::put(block.span, ready)?;
        Ok(Offered::Goes(parcel.lends(block, Lent::Handed(ticket.into()))))
    }

    fn take(&self, reading: &mut Reading, token: &[u8], _: Deadline) -> Result<Loaned> {
        let handed = desk::take(token)?;
        reading.begin_behind(handed.ready())?;
        Ok(Loaned::Handed(handed))
    }
}
