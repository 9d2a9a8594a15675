//! Memory of a GPU is lent, whoever allocated it: the reader's queue copies it once, or the reader looks at it.

use tensorwire_device::Deadline;

use super::share::terms;
use super::{APART, Channel, FOR_SENT, Offer, Offered, Pair, Place, Way};
use crate::error::{Error, Result};
use crate::lease::Token;
use crate::pipe::lent::{Lent, Loaned};
use crate::pipe::receive::Reading;
use crate::pipe::send::{Parcel, cannot_have};

pub(super) struct GpuShare;

impl Way for GpuShare {
    fn channel(&self) -> Channel {
        Channel::GpuShare
    }

    fn viable(&self, pair: &Pair<'_>) -> std::result::Result<(), &'static str> {
        match pair.from {
            Place::Host => Err(FOR_SENT),
            _ if !pair.near => Err(APART),
            _ if !pair.reader.has_gpu() => Err("the reader has no GPU"),
            Place::Gpu(gpu) if !pair.reader.may_open(gpu) => Err("the reader does not have that GPU"),
            Place::Gpu(_) => Ok(()),
        }
    }

    fn offer(&self, parcel: &mut Parcel, block: &mut Offer<'_>) -> Result<Offered> {
        let (end, gpu) = (parcel.end().clone(), block.span.device());
        if end.gpus().unknown.contains(&gpu) {
            return Ok(Offered::Cannot(cannot_have(&gpu)));
        }
        let granted = match block.lanes.is_behind(&gpu) {
            true => end.context().grant_after(block.span, &terms(), block.lanes.of(&gpu)?),
            false => end.context().grant(block.span, &terms()),
        };
        match granted {
            Ok(lease) => Ok(Offered::Goes(parcel.lends(block, Lent::Lease(lease.into())))),
            Err(Error::Unsupported { have, .. }) => {
                Ok(Offered::Cannot(format!("memory of {gpu} cannot be lent: {have}")))
            }
            Err(error) => Err(error),
        }
    }

    fn take(&self, reading: &mut Reading, token: &[u8], by: Deadline) -> Result<Loaned> {
        reading.redeem(&Token::from_bytes(token)?, by).map(Loaned::Loan)
    }
}
