//! From or to a GPU by way of memory of the host: a queue copies it there, and that is lent, or goes through the ring or over the link.

use tensorwire_device::DeviceId;

use super::{Channel, FOR_GPU, Offer, Offered, Pair, Way, share};
use crate::error::Result;
use crate::pipe::send::{Parcel, stage};

pub(super) struct GpuBasic;

impl Way for GpuBasic {
    fn channel(&self) -> Channel {
        Channel::GpuBasic
    }

    fn viable(&self, pair: &Pair<'_>) -> std::result::Result<(), &'static str> {
        if pair.of_host() { Err(FOR_GPU) } else { Ok(()) }
    }

    fn offer(&self, parcel: &mut Parcel, block: &mut Offer<'_>) -> Result<Offered> {
        if block.span.device() == DeviceId::Host {
            return Ok(Offered::NotFor(FOR_GPU));
        }
        let copy = stage(&parcel.end().clone(), block.span, block.lanes)?;
        if let Ok(Some(body)) = share::copy_of_gpu(parcel, block, &copy) {
            return Ok(Offered::Goes(body));
        }
        parcel.staged_on(block.lanes.marks()?);
        parcel.follows(block.number, &copy).map(Offered::Goes)
    }
}
