//! Bytes follow the description through a ring in shared memory.

use super::{APART, Channel, FOR_HOST, Offer, Offered, Pair, Way};
use crate::error::Result;
use crate::pipe::send::Parcel;

pub(super) struct Ring;

impl Way for Ring {
    fn channel(&self) -> Channel {
        Channel::Ring
    }

    fn viable(&self, pair: &Pair<'_>) -> std::result::Result<(), &'static str> {
        match () {
            () if !pair.of_host() => Err(FOR_HOST),
            () if !pair.near => Err(APART),
            () => Ok(()),
        }
    }

    fn offer(&self, parcel: &mut Parcel, block: &mut Offer<'_>) -> Result<Offered> {
        parcel.follows(block.number, block.span).map(Offered::Goes)
    }
}
