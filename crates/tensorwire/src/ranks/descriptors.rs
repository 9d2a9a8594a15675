//! Descriptors that a rank offers to other ranks of its host, until they have taken them.
//!
//! An offer has a number. The number travels in a message or in an exchange of all ranks. A rank that has heard of it asks for
//! it over the connection by which memory is shared ([`crate::share`]). So a rank holds what it sends, and none
//! that others send it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tensorwire_device::fd::Fd;
use tensorwire_device::secret::Id;

use super::memory::RankMemory;
use crate::error::Result;

/// What one rank offers in one group, and what it was told of.
#[derive(Default)]
pub(crate) struct Descriptors {
    offers: Mutex<Offers>,
    /// Numbers that a rank of this host (by place) has told, and that could not be taken yet.
    told: Mutex<HashMap<usize, VecDeque<u64>>>,
}

#[derive(Default)]
struct Offers {
    last: u64,
    by_number: HashMap<u64, Offer>,
    /// Nothing is offered any more.
    closed: bool,
}

struct Offer {
    fds: Vec<Arc<Fd>>,
    /// The one that may take it, and ends it by that; without one, all ranks may.
    to: Option<Id>,
}

impl Descriptors {
    /// Offers descriptors to one process, or to all; gives the number.
    pub(crate) fn offer(&self, fds: Vec<Arc<Fd>>, to: Option<Id>) -> u64 {
        let mut offers = self.offers();
        offers.last += 1;
        let number = offers.last;
        if !offers.closed {
            offers.by_number.insert(number, Offer { fds, to });
        }
        number
    }

    /// Nobody may take these any more.
    pub(crate) fn withdraw(&self, number: u64) {
        let gone = self.offers().by_number.remove(&number);
        // Behind the lock: closing a file may take time.
        drop(gone);
    }

    /// Nothing is offered any more.
    pub(super) fn close(&self) {
        let mut offers = self.offers();
        offers.closed = true;
        let gone = std::mem::take(&mut offers.by_number);
        drop(offers);
        drop(gone);
    }

    /// An offer, if it is there and this one may have it.
    pub(super) fn find(&self, number: u64, by: Id) -> Option<Vec<Arc<Fd>>> {
        let offers = self.offers();
        let offer = offers.by_number.get(&number).filter(|offer| offer.to.is_none_or(|to| to == by))?;
        Some(offer.fds.clone())
    }

    /// One has taken an offer.
    pub(super) fn taken(&self, number: u64, by: Id) {
        let mut offers = self.offers();
        let only = offers.by_number.get(&number).is_some_and(|offer| offer.to == Some(by));
        let gone = if only { offers.by_number.remove(&number) } else { None };
        drop(offers);
        drop(gone);
    }

    /// A number that was told before and could not be taken then.
    pub(crate) fn told(&self, place: usize) -> Option<u64> {
        self.told_by().get_mut(&place)?.pop_front()
    }

    /// A number that was told and cannot be taken now: the next one who asks gets it.
    pub(crate) fn tell_again(&self, place: usize, number: u64) {
        self.told_by().entry(place).or_default().push_front(number);
    }

    fn offers(&self) -> MutexGuard<'_, Offers> {
        self.offers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn told_by(&self) -> MutexGuard<'_, HashMap<usize, VecDeque<u64>>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Descriptors that all ranks may take, until it is dropped.
pub(crate) struct Offered<'a> {
    memory: &'a RankMemory,
    number: u64,
    fds: Vec<Arc<Fd>>,
}

impl<'a> Offered<'a> {
    pub(crate) fn to_all(memory: &'a RankMemory, fds: Vec<Fd>) -> Self {
        let fds: Vec<Arc<Fd>> = fds.into_iter().map(Arc::new).collect();
        Self { memory, number: memory.descriptors().offer(fds.clone(), None), fds }
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn fds(&self) -> &[Arc<Fd>] {
        &self.fds
    }
}

impl Drop for Offered<'_> {
    fn drop(&mut self) {
        self.memory.descriptors().withdraw(self.number);
    }
}

/// Second descriptors of the same files.
pub(crate) fn copies(fds: &[Arc<Fd>]) -> Result<Vec<Fd>> {
    Ok(fds.iter().map(|fd| fd.try_clone()).collect::<tensorwire_device::Result<_>>()?)
}
