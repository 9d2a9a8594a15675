//! Leases, as users of a context meet them; see [`crate::lease`].

use std::sync::PoisonError;
use std::time::Duration;

use tensorwire_device::fd::Fd;
use tensorwire_device::pool::Pool;
use tensorwire_device::{Abort, Deadline, DeviceId, Queue, Span};

use super::Context;
use crate::error::{Error, Result};
use crate::lease::{Lease, Leases, Loan, Stats, Terms, Token};

impl Context {
    /// Lends memory of this process, or memory that was lent to it, to whoever redeems the lease's token. The data is ready.
    pub fn grant(&self, span: &Span, terms: &Terms) -> Result<Lease> {
        self.leases()?.grant(span, terms, None)
    }

    /// The same for data that is ready when a queue has come so far: whoever redeems it waits for that, on its own queue
    /// where it has one. Nobody waits here.
    pub fn grant_after(&self, span: &Span, terms: &Terms, queue: &mut dyn Queue) -> Result<Lease> {
        self.leases()?.grant(span, terms, Some(queue))
    }

    /// Maps the memory of a token and counts it as held until the last user of the loan's span is gone. Waits until the data
    /// is ready.
    pub fn redeem(&self, token: &Token, deadline: Deadline) -> Result<Loan> {
        self.leases()?.redeem(token, None, deadline)
    }

    /// The same, but the queue waits for the data: what is queued on it from now on finds it ready.
    pub fn redeem_on(&self, token: &Token, queue: &mut dyn Queue, deadline: Deadline) -> Result<Loan> {
        self.leases()?.redeem(token, Some((queue, None)), deadline)
    }

    /// The same. What is queued behind a wait for the data looks at `abort`, which ends it.
    pub(crate) fn redeem_by(
        &self,
        token: &Token,
        queue: &mut dyn Queue,
        abort: &Abort,
        deadline: Deadline,
    ) -> Result<Loan> {
        self.leases()?.redeem(token, Some((queue, Some(abort))), deadline)
    }

    /// Whether a token of this process is over: redeemed as often as its terms say, and let go by all, or expired.
    pub(crate) fn is_over(&self, token: &Token) -> bool {
        self.leases.get().is_none_or(|leases| leases.is_over(token))
    }

    /// The file of a token whose memory somebody else maps
    /// ([`Host::adopt_file`](tensorwire_device::host::Host::adopt_file)), which uses the token up. Nothing is mapped here: it has no
    /// seals, and its maker could cut it short. From now on the kernel counts the processes that have it.
    pub fn redeem_file(&self, token: &Token, deadline: Deadline) -> Result<Fd> {
        self.leases()?.redeem_file(token, deadline)
    }

    /// Uses a token up without its memory: for one that is not wanted, or whose memory cannot be had here. Otherwise its
    /// owner waits for it until it expires.
    pub fn discard(&self, token: &Token, deadline: Deadline) -> Result<()> {
        self.leases()?.discard(token, deadline)
    }

    /// Gives a token longer: `lifetime` from now. For its owner.
    pub fn renew(&self, token: &Token, lifetime: Duration) -> Result<()> {
        self.leases()?.renew(token, lifetime)
    }

    /// Lets go of all memory that was granted and that nobody needs any more, and asks holders to unmap what they do not
    /// use; gives the bytes that were let go here.
    pub fn collect(&self) -> Result<usize> {
        Ok(self.leases()?.collect())
    }

    /// What this process has granted.
    pub fn lease_stats(&self) -> Result<Stats> {
        Ok(self.leases()?.stats())
    }

    /// What is still held or awaited of this process's grants, and by whom; nothing if all is well.
    pub fn outstanding(&self) -> Option<String> {
        if !self.is_ours() {
            return None;
        }
        self.leases.get().and_then(Leases::outstanding)
    }

    /// A caching allocator on a device, whose blocks can be lent: the one of this context. When the device is short of memory,
    /// what was lent and is not needed any more is collected first.
    pub fn pool(&self, id: &DeviceId) -> Result<Pool> {
        let device = self.device(id)?;
        let collect = self.leases()?.collector();
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        let pool = pools.entry(id.clone()).or_insert_with(|| {
            let pool = Pool::new(device);
            pool.on_pressure(Box::new(move |_| collect()));
            pool
        });
        Ok(pool.clone())
    }

    fn leases(&self) -> Result<&Leases> {
        self.birth.check("the context")?;
        if let Some(leases) = self.leases.get() {
            return Ok(leases);
        }
        // What failed is tried again: the process may have been out of descriptors.
        let _alone = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.leases.get().is_none() {
            let started = Leases::start(&self.share, self.watcher.address(), self.config.timeout)?;
            let _ = self.leases.set(started);
        }
        self.leases.get().ok_or_else(|| Error::Bug("leases that have not started".into()))
    }
}
