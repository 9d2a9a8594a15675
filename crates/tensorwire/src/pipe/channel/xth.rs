//! Both ends are in one process: the reader gets the sender's memory of the host, shareable or not, and copies it once or looks at it.

use tensorwire_device::Deadline;

use super::{Channel, FOR_HOST, FOR_ONE_PROCESS, Offer, Offered, Pair, Way};
use crate::error::Result;
use crate::pipe::desk;
use crate::pipe::lent::{Lent, Loaned};
use crate::pipe::receive::Reading;
use crate::pipe::send::{LARGE, Parcel};

pub(super) struct Xth;

impl Way for Xth {
    fn channel(&self) -> Channel {
        Channel::Xth
    }

    fn viable(&self, pair: &Pair<'_>) -> std::result::Result<(), &'static str> {
        match pair.of_host() {
            true => in_one_process(pair),
            false => Err(FOR_HOST),
        }
    }

    fn offer(&self, parcel: &mut Parcel, block: &mut Offer<'_>) -> Result<Offered> {
        // What is not large does not wait for its reader, and nobody gets a view of a payload.
        if block.span.len() < LARGE || block.is_payload {
            return Ok(Offered::NotFor("xth is for tensors of 1 MiB and more"));
        }
        let ticket = desk::put(block.span, Vec::new())?;
        Ok(Offered::Goes(parcel.lends(block, Lent::Handed(ticket.into()))))
    }

    fn take(&self, _: &mut Reading, token: &[u8], _: Deadline) -> Result<Loaned> {
        desk::take(token).map(Loaned::Handed)
    }
}

/// Whether memory can be handed from thread to thread.
pub(super) fn in_one_process(pair: &Pair<'_>) -> std::result::Result<(), &'static str> {
    match pair.near && pair.sender.is_beside(pair.reader) {
        true => Ok(()),
        false => Err(FOR_ONE_PROCESS),
    }
}
