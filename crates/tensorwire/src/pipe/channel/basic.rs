//! What is small goes beside the description: it takes nothing that waits for the reader.

use tensorwire_device::DeviceId;

use super::{Channel, FOR_HOST, Offer, Offered, Pair, Way};
use crate::error::Result;
use crate::pipe::descriptor::Body;
use crate::pipe::send::Parcel;

/// The largest block.
const SMALL: usize = 4 << 10;
/// How many bytes of them a message has.
const BESIDE: usize = 64 << 10;

pub(super) struct Basic;

impl Way for Basic {
    fn channel(&self) -> Channel {
        Channel::Basic
    }

    fn viable(&self, pair: &Pair<'_>) -> std::result::Result<(), &'static str> {
        if pair.of_host() { Ok(()) } else { Err(FOR_HOST) }
    }

    fn offer(&self, parcel: &mut Parcel, block: &mut Offer<'_>) -> Result<Offered> {
        let len = block.span.len();
        if len == 0 {
            return Ok(Offered::Goes(Body::Here(Vec::new())));
        }
        if block.span.device() != DeviceId::Host || len > SMALL || !parcel.fits_beside(len, BESIDE) {
            return Ok(Offered::NotFor("it is for what is small"));
        }
        Ok(Offered::Goes(Body::Here(block.span.to_vec()?)))
    }
}
