//! Memory of the host that can be shared is lent: the reader copies it once, or looks at it.

use tensorwire_device::{Deadline, Span};

use super::{APART, Channel, FOR_HOST, Offer, Offered, Pair, Place, Way, choose};
use crate::error::{Error, Result};
use crate::lease::{Lease, Terms, Token};
use crate::pipe::End;
use crate::pipe::descriptor::Body;
use crate::pipe::lent::{Lent, Loaned};
use crate::pipe::receive::Reading;
use crate::pipe::send::{LARGE, Parcel};

pub(super) struct Share;

impl Way for Share {
    fn channel(&self) -> Channel {
        Channel::Share
    }

    fn viable(&self, pair: &Pair<'_>) -> std::result::Result<(), &'static str> {
        match () {
            () if !pair.of_host() => Err(FOR_HOST),
            () if !pair.near => Err(APART),
            () => Ok(()),
        }
    }

    fn offer(&self, parcel: &mut Parcel, block: &mut Offer<'_>) -> Result<Offered> {
        // Nobody asks for a view of a payload, which was copied when the message was made.
        if block.span.len() < LARGE || block.is_payload {
            return Ok(Offered::NotFor("share is for tensors of 1 MiB and more that can be shared"));
        }
        let end = parcel.end().clone();
        match end.context().grant(block.span, &terms()) {
            Ok(lease) => Ok(Offered::Goes(parcel.lends(block, Lent::Lease(lease.into())))),
            Err(Error::Unsupported { what, need, have }) if end.context().config().strict => {
                Err(Error::Unsupported { what, need, have })
            }
            Err(Error::Unsupported { have, .. }) => {
                tracing::debug!("{} bytes take another way: they cannot be lent: {have}", block.span.len());
                Ok(Offered::NotFor("share is for tensors of 1 MiB and more that can be shared"))
            }
            Err(error) => Err(error),
        }
    }

    fn take(&self, reading: &mut Reading, token: &[u8], by: Deadline) -> Result<Loaned> {
        reading.redeem(&Token::from_bytes(token)?, by).map(Loaned::Loan)
    }
}

/// Lends a copy in memory of the host that a queue of a GPU makes, if the two ends have this channel.
pub(super) fn copy_of_gpu(parcel: &mut Parcel, block: &mut Offer<'_>, copy: &Span) -> Result<Option<Body>> {
    let end: std::sync::Arc<End> = parcel.end().clone();
    let choice = choose((Place::Host, Place::Host), end.near, &end.ours.without(Channel::Xth), &end.theirs);
    if choice.channel != Some(Channel::Share) || copy.len() < LARGE {
        return Ok(None);
    }
    let lease: Lease = end.context().grant_after(copy, &terms(), block.lanes.of(&block.span.device())?)?;
    let (number, is_payload) = (block.number, block.is_payload);
    let mut copied = Offer { number, span: copy, is_payload, lanes: &mut *block.lanes };
    Ok(Some(parcel.lends(&mut copied, Lent::Lease(lease.into()))))
}

/// It is there until the reader has let go.
pub(super) fn terms() -> Terms {
    Terms::default().lifetime(std::time::Duration::MAX)
}
