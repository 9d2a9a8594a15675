//! The owner's side of the connection to holders: a domain of [`crate::share`].
//!
//! A holder says hello once, with its lines and its bell, and is counted until its connection ends; it gets the book, a row of
//! its own, the owner's lines and bell. Then it asks for the memory of grants that it has redeemed, each with the
//! key that is in the grant's token.

use std::os::fd::AsFd;
use std::sync::{Arc, Weak};

use rustix::fs::OFlags;
use tensorwire_device::fd::{Fd, Peer, dup};
use tensorwire_device::flag::LINE;
use tensorwire_device::host::Host;
use tensorwire_device::sync::AtomicBool;
use tensorwire_device::words::Words;
use tensorwire_device::{Device, Handle, Region, Span};

use super::Inner;
use super::book::{ROW_BYTES, Row};
use super::holder::ring;
use super::owner::Holder;
use super::points::{LINES, Theirs};
use super::token::read_pass;
use crate::error::{Error, Result};
use crate::share::{Domain, Reason, Welcome};
use crate::wire;

impl Domain for Inner {
    fn memory(&self, number: u64, pass: &[u8]) -> Result<Arc<dyn Region>, (Reason, String)> {
        let over = || (Reason::Gone, "the grant is over".to_owned());
        let (slot, generation, key) = read_pass(pass).map_err(|error| (Reason::Failed, error.to_string()))?;
        if key != self.key_of(slot, generation) {
            return Err((Reason::Failed, "its key is not that of the grant".into()));
        }
        let (span, granted) = self.owner().memory(slot, generation).ok_or_else(over)?;
        let region = span.region().clone();
        drop(span);
        if granted != number {
            self.put_back(region, pass);
            return Err((Reason::Failed, "the grant is of other memory".into()));
        }
        Ok(region)
    }

    fn put_back(&self, region: Arc<dyn Region>, pass: &[u8]) {
        let mut owner = self.owner();
        let granted = read_pass(pass).ok().and_then(|(slot, generation, _)| owner.memory(slot, generation));
        // As long as this has the lock, the grant keeps it.
        if granted.is_some_and(|(span, _)| Arc::ptr_eq(span.region(), &region)) {
            drop(region);
            return;
        }
        // Its last user drops it, and that may take long or need a lock of its maker: not here.
        owner.discard(Span::whole(region));
        drop(owner);
        ring(&self.bell);
    }

    fn greet(&self, peer: &Peer, _hello: &[u8], fds: Vec<Fd>) -> Result<Welcome> {
        let [lines, bell] = exactly(fds)?;
        let row = Host.reserve(ROW_BYTES)?;
        let holder = Arc::new(Holder {
            identity: peer.identity,
            pid: peer.pid,
            row: Row(Words::new(&Span::whole(row.clone()))?),
            region: row.clone(),
            points: Theirs::of(Host.import(Handle::Memfd { fd: lines, len: LINES * LINE })?)?,
            bell: Arc::new(checked_bell(bell)?),
            gone: AtomicBool::new(false),
        });
        let mut fds = Vec::new();
        for region in [&self.book_region, &row, self.points.region()] {
            let Handle::Memfd { fd, .. } = region.export()? else {
                return Err(Error::Bug("a table of leases that is no memfd".into()));
            };
            fds.push(fd);
        }
        fds.push(dup(self.bell.as_fd())?);
        // It is counted before it can redeem anything.
        self.owner().add_holder(holder.clone())?;
        Ok(Welcome { body: Vec::new(), fds, guest: Box::new(Guest { inner: self.myself.clone(), holder }) })
    }
}

/// A holder, as long as it is connected.
struct Guest {
    inner: Weak<Inner>,
    holder: Arc<Holder>,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let Some(inner) = self.inner.upgrade() else { return };
        tracing::debug!(pid = self.holder.pid, "a holder is gone, and its loans are over");
        inner.owner().remove_holder(&self.holder);
        // Its thread drops what is free now.
        ring(&inner.bell);
    }
}

pub(super) fn exactly<const N: usize>(fds: Vec<Fd>) -> Result<[Fd; N]> {
    let count = fds.len();
    fds.try_into().map_err(|_| wire::bad(&format!("{count} descriptors instead of {N}")))
}

/// Writing to it must never wait.
pub(super) fn checked_bell(fd: Fd) -> Result<Fd> {
    let flags = rustix::fs::fcntl_getfl(&fd).map_err(|e| Error::io("looking at a bell", e))?;
    if flags.contains(OFlags::NONBLOCK) { Ok(fd) } else { Err(wire::bad("a bell that may block")) }
}
