//! Bytes follow the description over the link between two hosts.

use super::{Channel, FOR_HOST, Offer, Offered, Pair, Way};
use crate::error::Result;
use crate::pipe::send::Parcel;

pub(super) struct Wire;

impl Way for Wire {
    fn channel(&self) -> Channel {
        Channel::Wire
    }

    fn viable(&self, pair: &Pair<'_>) -> std::result::Result<(), &'static str> {
        match () {
            () if !pair.of_host() => Err(FOR_HOST),
            () if pair.near => Err("the two are on one host"),
            () => Ok(()),
        }
    }

    fn offer(&self, parcel: &mut Parcel, block: &mut Offer<'_>) -> Result<Offered> {
        parcel.follows(block.number, block.span).map(Offered::Goes)
    }
}
