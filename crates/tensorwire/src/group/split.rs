//! Sub-groups: of a list of ranks, or by colour.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::PoisonError;
use std::time::Duration;

use tensorwire_device::Deadline;
use tensorwire_device::secret::digest;

use super::form::form;
use super::notes::{Notes, kind_of};
use super::{Group, Inner, rendezvous};
use crate::error::{Error, Result};
use crate::interrupt::{self, is_interrupt};
use crate::link::key;
use crate::shm::control::{Cause, Failure, Why};
use crate::wire::{Reader, Writer};

/// How long after the end of a process's connections its death is seen at the latest.
const MOMENT: Duration = Duration::from_secs(1);

impl Group {
    /// Makes a group of some of these ranks, in the given order. Those ranks call it with the same list. The others
    /// need not call it. Sub-groups may overlap and may be made in any order.
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Self> {
        self.check()?;
        let me = self.rank();
        let mut seen = vec![false; self.world()];
        for &rank in ranks {
            match seen.get_mut(rank) {
                Some(seen) if !*seen => *seen = true,
                Some(_) => return Err(Error::misuse(format!("rank {rank} is twice in the list {ranks:?}"))),
                None => {
                    let world = self.world();
                    return Err(Error::misuse(format!("there is no rank {rank} in a world of {world}")));
                }
            }
        }
        let Some(place) = ranks.iter().position(|&rank| rank == me) else {
            return Err(Error::misuse(format!("rank {me} is not in the list {ranks:?}")));
        };
        let list: Vec<u8> = ranks.iter().flat_map(|&rank| (rank as u64).to_le_bytes()).collect();
        let kind = format!("ranks {}", digest(&list));
        self.make(&kind, place, ranks)
    }

    /// Splits the group by colour. All ranks call it, in the same order as other splits. Each rank gets the group
    /// of the ranks with its colour, ordered by `key` and then by rank. A rank with the colour `None` gets no
    /// group.
    pub fn split(&self, colour: Option<u64>, key: i64) -> Result<Option<Self>> {
        self.check()?;
        let (inner, me) = (&self.0, self.rank());
        let deadline = Deadline::after(self.timeout());
        let mine =
            Writer::new().u8(colour.is_some().into()).u64(colour.unwrap_or(0)).u64(key as u64).finish();
        let turn = inner.splits.turn(deadline)?;
        let number = turn.round();
        let mine = key::seal(inner.proofs.as_ref(), &wish_of(number, me), &mine);
        let entries = self.while_alive(|| turn.all_gather(&mine, deadline)).map_err(|error| {
            // Others may have read what this rank wants, and wait for it in the new group.
            if let (true, Some(colour)) = (is_interrupt(&error), colour) {
                let name = format!("{}/{} #0", self.name(), split_of(number, colour));
                let notes = Notes::new(inner.origin.store.clone(), &name, inner.origin.key(self.context()));
                rendezvous::give_up(&notes, &error, &self.members()[me]);
            }
            self.without_all(error)
        })?;
        let mut same = Vec::new();
        for (rank, bytes) in entries.iter().enumerate() {
            let bytes = key::open(inner.proofs.as_ref(), &wish_of(number, rank), bytes).map_err(|why| {
                let (who, reader) = (self.members()[rank].to_string(), self.members()[me].to_string());
                let text = why.explain("what it said in split()", &reader, inner.proofs.as_ref());
                Error::peer(kind_of(why), who, Some(rank), text)
            })?;
            let mut reader = Reader::new(bytes);
            let theirs = (reader.u8()? != 0).then_some(reader.u64()?);
            let order = reader.u64()? as i64;
            if theirs.is_some() && theirs == colour {
                same.push((order, rank));
            }
        }
        let Some(colour) = colour else { return Ok(None) };
        same.sort_unstable();
        let ranks: Vec<usize> = same.into_iter().map(|(_, rank)| rank).collect();
        let place = ranks.iter().position(|&rank| rank == me).unwrap_or(0);
        self.make(&split_of(number, colour), place, &ranks).map(Some)
    }

    fn make(&self, kind: &str, place: usize, ranks: &[usize]) -> Result<Self> {
        let inner = self.ranks();
        let name = format!("{}/{kind} #{}", inner.name, self.0.count(kind));
        let time = (inner.timeout, Deadline::after(inner.timeout));
        let formed = self.form_of(ranks, |sensible| {
            form(&inner.context, self.0.origin.clone(), name, (place, ranks.len()), time, sensible)
        });
        formed.map_err(|error| Why::GroupTimedOut.tell(error))
    }

    /// Forms a group of some of these ranks. A death that this group knows of ends it.
    pub(super) fn form_of(
        &self,
        ranks: &[usize],
        form: impl FnOnce(&dyn Fn() -> Result<()>) -> Result<Self>,
    ) -> Result<Self> {
        let sensible = || self.await_is_sensible(ranks);
        form(&sensible).map_err(|error| {
            // A rank that died may have taken the store with it. The store is gone a moment before the death is seen.
            let store_failed = match &error {
                Error::Io { .. } => true,
                Error::Peer(fault) => fault.rank.is_none(),
                _ => false,
            };
            let until = Deadline::after(if store_failed { MOMENT } else { Duration::ZERO });
            loop {
                match sensible() {
                    Err(death) if store_failed => return death,
                    _ if until.passed() => return error,
                    _ => std::thread::sleep(Duration::from_millis(5)),
                }
            }
        })
    }

    /// Fails if these ranks cannot form a group any more: one of them has died or is stuck, or this group was aborted. What
    /// another rank did does not matter to them.
    fn await_is_sensible(&self, ranks: &[usize]) -> Result<()> {
        let inner = self.ranks();
        if inner.check_open().is_err() {
            return Ok(());
        }
        match inner.control.failure() {
            // What the ranks called in this group says nothing of the next one.
            Some(Failure { cause: Cause::Mismatch, .. }) | None => {}
            Some(Failure { cause: Cause::Aborted, .. }) => return self.check(),
            Some(Failure { rank, .. }) if ranks.contains(&rank) => return self.check(),
            Some(_) => {}
        }
        // The group has failed with the first of several deaths.
        let ended = inner.context.watcher().ended(inner.id);
        match ended.iter().find(|rank| ranks.contains(rank)) {
            Some(&rank) => Err(inner.died(rank)),
            None => Ok(()),
        }
    }

    /// Waits for other ranks, as long as the group is alive.
    fn while_alive<T>(&self, wait: impl FnOnce() -> Result<T>) -> Result<T> {
        let failure = Rc::new(RefCell::new(None));
        let (group, seen) = (self.clone(), failure.clone());
        let look = move || {
            let failure = group.ranks().failure();
            seen.replace(failure.clone());
            failure.map_or(Ok(()), Err)
        };
        let waited = interrupt::with_another(look, wait);
        waited.map_err(|error| failure.take().unwrap_or(error))
    }

    /// The error of a split to which some ranks did not come, with what these ranks do.
    fn without_all(&self, error: Error) -> Error {
        if !error.is_timeout() || error.ranks().is_empty() {
            return error;
        }
        let place_of = |rank: &usize| self.ranks().place_of(*rank);
        let near: Vec<usize> = error.ranks().iter().filter_map(place_of).collect();
        let near = (!near.is_empty()).then(|| format!("it waited for {}", self.ranks().described(&near)));
        let far = error.ranks().iter().filter(|rank| place_of(rank).is_none()).take(8);
        let far = far.map(|&rank| format!("{} has not called split()", self.members()[rank]));
        let missing = near.into_iter().chain(far).collect::<Vec<_>>().join("; ");
        let ranks = error.ranks().iter().copied();
        Why::GroupTimedOut.tell(Error::timed_out("splitting a group", self.timeout(), missing).about(ranks))
    }
}

impl Inner {
    /// How often something has been asked for before.
    fn count(&self, kind: &str) -> u64 {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let count = made.entry(kind.to_owned()).or_insert(0);
        *count += 1;
        *count - 1
    }
}

/// Under which name a rank proves what it wants of a split.
fn wish_of(number: u64, rank: usize) -> String {
    format!("split/{number}/{rank}")
}

/// What the groups of a split are called.
fn split_of(number: u64, colour: u64) -> String {
    format!("split {number} colour {colour}")
}
