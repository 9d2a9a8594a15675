//! Granting: an owner lends memory.

use std::time::Duration;

use tensorwire_device::{Abort, Caching, Deadline, Queue, Span};

use super::book::Point;
use super::holder::ring;
use super::{Lease, Leases, MAX_NOTE, Terms, Token, at, thread};
use crate::error::{Error, Result};

impl Leases {
    /// Lends memory. With a queue, the data is ready when that has come so far.
    pub(crate) fn grant(
        &self,
        span: &Span,
        terms: &Terms,
        mut queue: Option<&mut dyn Queue>,
    ) -> Result<Lease> {
        let inner = &self.0;
        inner.share.expect();
        if terms.note.len() > MAX_NOTE {
            return Err(Error::misuse(format!("a note of {} bytes: at most {MAX_NOTE}", terms.note.len())));
        }
        let mut copy = None;
        let (memory, offset) = match inner.share.name(span) {
            Err(Error::Unsupported { have, .. }) if terms.copy => {
                tracing::info!("{} bytes are copied to be lent: {have}", span.len());
                inner.owner().count_copy(span);
                let queue = queue.as_mut().map(|queue| &mut **queue as &mut dyn Queue);
                let span = copy.insert(self.copy_of(span, queue)?);
                inner.share.name(span)?
            }
            named => named?,
        };
        let span = copy.as_ref().unwrap_or(span);
        let ready = match queue {
            Some(queue) => inner.point_on(queue)?,
            None => Point::default(),
        };
        at("grant: before it is noted");
        let (slot, generation) = inner.owner().grant(span.clone(), memory.number, terms)?;
        at("grant: noted");
        let token = Token {
            issuer: inner.issuer.clone(),
            slot,
            generation,
            key: inner.key_of(slot, generation),
            memory,
            offset,
            len: span.len(),
            ready,
            note: terms.note.clone(),
        };
        inner.book.set_check(slot as usize, token.check());
        if terms.lifetime < thread::NAP {
            ring(&inner.bell);
        }
        Ok(Lease { inner: inner.clone(), token, is_copy: copy.is_some() })
    }

    /// A copy in memory of the same device that can be lent, made on the queue or else now.
    fn copy_of(&self, span: &Span, queue: Option<&mut dyn Queue>) -> Result<Span> {
        let device = self.0.share.devices().open(&span.device())?;
        let copy = Span::whole(device.take(span.len())?);
        match queue {
            Some(queue) => queue.copy(copy.view(), span.view(), Caching::Keep)?,
            None => {
                let mut queue = device.queue()?;
                queue.copy(copy.view(), span.view(), Caching::Keep)?;
                queue.finish(&Abort::local(), Deadline::after(self.0.timeout))?;
            }
        }
        Ok(copy)
    }

    /// Gives a token longer.
    pub(crate) fn renew(&self, token: &Token, lifetime: Duration) -> Result<()> {
        let inner = &self.0;
        if token.issuer.owner != inner.issuer.owner {
            return Err(Error::misuse(format!(
                "only its owner renews a token: process {}",
                token.issuer.pid
            )));
        }
        if !inner.owner().renew(token.slot, token.generation, lifetime) {
            return Err(Error::misuse(format!("{token:?} is over, or has expired")));
        }
        ring(&inner.bell);
        Ok(())
    }
}
