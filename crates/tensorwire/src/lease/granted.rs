//! What the owner of granted memory has.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tensorwire_device::{Deadline, Queue};

use super::holder::ring;
use super::owner::{HolderInfo, Owner};
use super::token::Token;
use super::{Inner, SPIN};
use crate::error::{Error, Result};
use crate::interrupt;

/// Memory that is granted to other processes. Dropping it ends the owner's interest: the memory is let go when the token's
/// uses have taken place, or it has expired, and all holders have released it.
#[derive(Debug)]
#[must_use = "dropping it ends the owner's interest in the memory"]
pub struct Lease {
    pub(super) inner: Arc<Inner>,
    pub(super) token: Token,
    pub(super) is_copy: bool,
}

impl Lease {
    /// What goes to whoever may redeem it.
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// Whether it is a copy that is lent, see [`Terms::copy`](super::Terms::copy).
    pub fn is_copy(&self) -> bool {
        self.is_copy
    }

    /// Who holds it now.
    pub fn holders(&self) -> Vec<HolderInfo> {
        // In a forked child nobody knows, and the lock may be held for ever.
        if !self.inner.birth.is_ours() {
            return Vec::new();
        }
        self.inner.owner().holders_of(self.token.slot, self.token.generation)
    }

    /// Gives the token longer: `lifetime` from now; an error if it has expired.
    pub fn renew(&self, lifetime: Duration) -> Result<()> {
        self.inner.birth.check("a lease")?;
        let renewed = self.inner.owner().renew(self.token.slot, self.token.generation, lifetime);
        ring(&self.inner.bell);
        if renewed { Ok(()) } else { Err(Error::misuse(format!("{:?} has expired", self.token))) }
    }

    /// Waits until it was redeemed as often as its terms say (or has expired), all loans are released, and the devices of
    /// their holders are done with it.
    pub fn wait(&self, deadline: Deadline) -> Result<()> {
        self.wait_released(deadline)?;
        let (slot, generation) = (self.token.slot, self.token.generation);
        let begin = Instant::now();
        let mut pace = interrupt::Pace::since(begin);
        loop {
            let points = self.inner.owner().points(slot, generation);
            let Some((holder, _)) = points.first() else { return Ok(()) };
            if deadline.passed() {
                let missing = format!("the device of process {}, which has released it", holder.pid);
                return Err(self.late(begin, missing));
            }
            if begin.elapsed() > SPIN {
                std::thread::sleep(Duration::from_micros(50));
            }
            pace.look(Instant::now())?;
        }
    }

    /// Waits until all loans are released, and has the queue wait for the devices of their holders: what is queued on it from
    /// now on may write to the memory.
    pub fn reclaim(&self, queue: &mut dyn Queue, deadline: Deadline) -> Result<()> {
        self.wait_released(deadline)?;
        let (slot, generation) = (self.token.slot, self.token.generation);
        let points = self.inner.owner().points(slot, generation);
        for (holder, point) in points {
            if let Some(flag) = holder.points.flag(point) {
                self.inner.me.wait_on(&self.inner.points, queue, (&flag, point.value), deadline)?;
            }
        }
        Ok(())
    }

    fn wait_released(&self, deadline: Deadline) -> Result<()> {
        self.inner.birth.check("a lease")?;
        let (slot, generation) = (self.token.slot, self.token.generation);
        let over = |owner: &mut Owner| {
            let standing = owner.standing(slot, generation);
            standing.is_none_or(|it| it.loans == 0 && (it.expired || it.taken >= it.uses))
        };
        let begin = Instant::now();
        while begin.elapsed() < SPIN {
            if over(&mut self.inner.owner()) {
                return Ok(());
            }
            std::thread::yield_now();
        }
        let mut owner = self.inner.owner();
        owner.watch(slot, generation, true);
        let mut asked = Instant::now();
        let result = loop {
            if over(&mut owner) {
                break Ok(());
            }
            let Some(left) = deadline.remaining() else { break Err(None) };
            if asked.elapsed() > interrupt::SLICE {
                asked = Instant::now();
                // Without the lock: the hook may wait for others.
                drop(owner);
                let go_on = interrupt::check();
                owner = self.inner.owner();
                match go_on {
                    Ok(()) => continue,
                    Err(error) => break Err(Some(error)),
                }
            }
            // A redemption tells nobody; a release does.
            let left = left.min(Duration::from_millis(20));
            owner = self.inner.released.wait_timeout(owner, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        owner.watch(slot, generation, false);
        let holders = owner.holders_of(slot, generation);
        drop(owner);
        result.map_err(|error| {
            if let Some(error) = error {
                return error;
            }
            let missing = match holders.first() {
                Some(holder) => format!("process {} holds it ({} loans)", holder.pid, holder.loans),
                None => "nobody has redeemed it".into(),
            };
            self.late(begin, missing)
        })
    }

    fn late(&self, begin: Instant, missing: String) -> Error {
        Error::timed_out(format!("waiting for the holders of {:?}", self.token), begin.elapsed(), missing)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // In a forked child it is the parent's.
        if !self.inner.birth.is_ours() {
            return;
        }
        let mut owner = self.inner.owner();
        owner.let_go(self.token.slot, self.token.generation);
        let garbage = owner.take_garbage();
        let (_, settling) = owner.next();
        drop(owner);
        drop(garbage);
        if settling {
            // A holder's device is not done with what was released: the thread looks at it from now on.
            ring(&self.inner.bell);
        }
    }
}
