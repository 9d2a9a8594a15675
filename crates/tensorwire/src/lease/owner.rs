//! The owner's side: grants, who holds them, and when their memory is let go.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorwire_device::fd::Fd;
use tensorwire_device::secret::Id;
use tensorwire_device::sync::{AtomicBool, Ordering};
use tensorwire_device::{Region, Span};

use super::book::{AT_ONCE, Book, Counter, Point, Row, SLOTS, State, Tag};
use super::points::Theirs;
use super::terms::{Stats, Terms};
use crate::error::{Error, Result};

/// A process that redeems grants of this one; one of them is this process itself.
#[derive(Debug)]
pub(super) struct Holder {
    pub(super) identity: Id,
    pub(super) pid: u32,
    pub(super) row: Row,
    /// The memory of the row.
    pub(super) region: Arc<dyn Region>,
    pub(super) points: Theirs,
    /// Wakes its thread.
    pub(super) bell: Arc<Fd>,
    /// Its process has ended, or it has closed its context.
    pub(super) gone: AtomicBool,
}

impl Holder {
    /// What it has of a grant.
    fn of(&self, slot: usize, generation: u32) -> (u32, u32) {
        let held = self.row.held(slot);
        if held.generation == generation { (held.taken.into(), held.loans.into()) } else { (0, 0) }
    }

    /// Whether its device is done with a grant that it has released. With its process, its work is gone.
    fn is_done(&self, point: Point) -> bool {
        self.gone.load(Ordering::Relaxed) || self.points.reached(point)
    }
}

/// Who holds a grant.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HolderInfo {
    /// Its pid as it sees itself.
    pub pid: u32,
    /// Its identity.
    pub identity: Id,
    /// Loans that it has not released.
    pub loans: u32,
}

/// All grants of a process.
#[derive(Debug)]
pub(super) struct Owner {
    book: Book,
    region: Arc<dyn Region>,
    entries: Vec<Slot>,
    /// Slots without a grant, the last used at the end.
    free: Vec<u32>,
    holders: Arc<Vec<Arc<Holder>>>,
    /// When tokens expire.
    due: BTreeSet<(Instant, u32)>,
    /// Memory whose holders have released it, and whose devices may not be done with it.
    settling: Vec<Settling>,
    /// Memory to drop once the lock is free.
    garbage: Vec<Span>,
    /// Sums that are shown.
    sums: Sums,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    entry: Option<Entry>,
}

#[derive(Debug)]
struct Entry {
    span: Span,
    /// The number of the allocation that it lies in.
    number: u64,
    /// Redemptions for which the token keeps the memory.
    uses: u32,
    /// Redemptions of holders that are gone.
    taken: u32,
    since: Instant,
    expires: Option<Instant>,
    expired: bool,
    /// Whether the grant's owner has it still.
    owned: bool,
    /// Whether somebody here waits for its holders.
    watched: bool,
}

#[derive(Debug)]
struct Settling {
    span: Span,
    points: Vec<(Arc<Holder>, Point)>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    granted: (u64, u64),
    waiting: (u64, u64),
    expired: (u64, u64),
    copied: (u64, u64),
}

/// How a grant stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Standing {
    pub(super) taken: u32,
    pub(super) loans: u32,
    pub(super) uses: u32,
    pub(super) expired: bool,
}

impl Standing {
    /// Whether the token is waited for.
    fn awaited(self) -> bool {
        !self.expired && self.taken < self.uses
    }
}

impl Owner {
    pub(super) fn new(book: Book, region: Arc<dyn Region>, me: Arc<Holder>) -> Self {
        Self {
            book,
            region,
            entries: Vec::new(),
            free: Vec::new(),
            holders: Arc::new(vec![me]),
            due: BTreeSet::new(),
            settling: Vec::new(),
            garbage: Vec::new(),
            sums: Sums::default(),
        }
    }

    /// Grants memory of the allocation with this number; gives slot and generation.
    pub(super) fn grant(&mut self, span: Span, number: u64, terms: &Terms) -> Result<(u32, u32)> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = self.entries.len();
                if slot >= SLOTS {
                    return Err(Error::misuse(format!(
                        "{SLOTS} grants are outstanding: drop some, or let their tokens expire earlier"
                    )));
                }
                if slot.is_multiple_of(AT_ONCE) {
                    self.region.commit(Book::bytes_of(slot))?;
                    self.holders.iter().try_for_each(|holder| holder.region.commit(Row::bytes_of(slot)))?;
                }
                self.entries.push(Slot::default());
                slot as u32
            }
        };
        let now = Instant::now();
        let expires = now.checked_add(terms.lifetime).filter(|_| terms.lifetime < FOR_EVER);
        if let Some(expires) = expires {
            self.due.insert((expires, slot));
        }
        let place = &mut self.entries[slot as usize];
        // It cannot overflow: a slot whose generations are used up is never free.
        place.generation += 1;
        let generation = place.generation;
        add(&mut self.sums.granted, &span);
        place.entry = Some(Entry {
            span,
            number,
            uses: terms.uses.into(),
            taken: 0,
            since: now,
            expires,
            expired: false,
            owned: true,
            watched: false,
        });
        self.book.set_tag(slot as usize, Tag(generation, State::Open));
        self.show();
        Ok((slot, generation))
    }

    /// Memory was copied because it could not be shared.
    pub(super) fn count_copy(&mut self, span: &Span) {
        add(&mut self.sums.copied, span);
    }

    fn entry(&mut self, slot: u32, generation: u32) -> Option<&mut Entry> {
        let place = self.entries.get_mut(slot as usize)?;
        if place.generation == generation { place.entry.as_mut() } else { None }
    }

    /// The memory of a grant, and the number of the allocation that it lies in.
    pub(super) fn memory(&mut self, slot: u32, generation: u32) -> Option<(Span, u64)> {
        self.entry(slot, generation).map(|entry| (entry.span.clone(), entry.number))
    }

    /// Has memory dropped once the lock is free.
    pub(super) fn discard(&mut self, span: Span) {
        self.garbage.push(span);
    }

    /// How a grant stands; nothing once it is over.
    pub(super) fn standing(&mut self, slot: u32, generation: u32) -> Option<Standing> {
        let holders = self.holders.clone();
        let entry = self.entry(slot, generation)?;
        let all = holders.iter().map(|holder| holder.of(slot as usize, generation));
        let (taken, loans) = all.fold((0, 0), |sum, each| (sum.0 + each.0, sum.1 + each.1));
        Some(Standing { taken: taken + entry.taken, loans, uses: entry.uses, expired: entry.expired })
    }

    /// Who holds a grant.
    pub(super) fn holders_of(&self, slot: u32, generation: u32) -> Vec<HolderInfo> {
        let info = |holder: &Arc<Holder>| {
            let (_, loans) = holder.of(slot as usize, generation);
            (loans > 0).then_some(HolderInfo { pid: holder.pid, identity: holder.identity, loans })
        };
        self.holders.iter().filter_map(info).collect()
    }

    pub(super) fn holders(&self) -> &Arc<Vec<Arc<Holder>>> {
        &self.holders
    }

    /// The points after which the devices of holders are done with what they have released.
    pub(super) fn points(&self, slot: u32, generation: u32) -> Vec<(Arc<Holder>, Point)> {
        let point = |holder: &Arc<Holder>| {
            let point = holder.row.point(slot as usize, generation);
            (!holder.is_done(point)).then(|| (holder.clone(), point))
        };
        self.holders.iter().filter_map(point).collect()
    }

    /// Has holders tell of releases, or not.
    pub(super) fn watch(&mut self, slot: u32, generation: u32, watched: bool) {
        if let Some(entry) = self.entry(slot, generation) {
            entry.watched = watched;
            let tag = Tag(generation, entry.state());
            self.book.set_tag(slot as usize, tag);
        }
    }

    /// The owner has dropped the grant.
    pub(super) fn let_go(&mut self, slot: u32, generation: u32) {
        let Some(entry) = self.entry(slot, generation).filter(|entry| entry.owned) else { return };
        entry.owned = false;
        let bytes = entry.span.len() as u64;
        self.sums.waiting = (self.sums.waiting.0 + 1, self.sums.waiting.1 + bytes);
        self.try_free(slot);
        self.show();
    }

    /// Frees a grant that nobody needs: its owner has dropped it, its token is not waited for, and nobody holds it.
    fn try_free(&mut self, slot: u32) {
        let place = slot as usize;
        let Some(generation) = self.entries.get(place).map(|slot| slot.generation) else { return };
        let Some(entry) = self.entry(slot, generation).filter(|entry| !entry.owned) else { return };
        let state = entry.state();
        let book = self.book.clone();
        let look = || self.standing(slot, generation).map(|it| (it.awaited(), it.loans));
        if book.decide(place, generation, state, look) {
            self.free(slot, generation);
        }
    }

    fn free(&mut self, slot: u32, generation: u32) {
        let points = self.points(slot, generation);
        let Some(entry) = self.entries.get_mut(slot as usize).and_then(|place| place.entry.take()) else {
            return;
        };
        self.book.set_tag(slot as usize, Tag(generation, State::Free));
        if let Some(expires) = entry.expires {
            self.due.remove(&(expires, slot));
        }
        take(&mut self.sums.granted, &entry.span);
        if points.is_empty() {
            take(&mut self.sums.waiting, &entry.span);
            self.garbage.push(entry.span);
        } else {
            self.settling.push(Settling { span: entry.span, points });
        }
        // With the next generation a token of long ago would be good again: the slot is never used again.
        if generation != u32::MAX {
            self.free.push(slot);
        }
    }

    /// Looks at what holders have told of, and at devices that were not done.
    pub(super) fn sweep(&mut self) {
        for slot in self.book.dirty(self.entries.len()) {
            self.try_free(slot as u32);
        }
        let (sums, garbage) = (&mut self.sums, &mut self.garbage);
        self.settling.retain_mut(|settling| {
            settling.points.retain(|(holder, point)| !holder.is_done(*point));
            if settling.points.is_empty() {
                take(&mut sums.waiting, &settling.span);
                garbage.push(settling.span.clone());
            }
            !settling.points.is_empty()
        });
        self.show();
    }

    /// Looks at all grants, whatever was told.
    pub(super) fn sweep_all(&mut self) {
        for slot in 0..self.entries.len() {
            self.try_free(slot as u32);
        }
        self.sweep();
    }

    /// Ends tokens that have not been redeemed in time.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some((at, slot)) = self.due.first().copied().filter(|(at, _)| *at <= now) {
            self.due.remove(&(at, slot));
            let Some(generation) = self.entries.get(slot as usize).map(|slot| slot.generation) else {
                continue;
            };
            let Some(standing) = self.standing(slot, generation) else { continue };
            let Some(entry) = self.entry(slot, generation) else { continue };
            entry.expired = true;
            entry.expires = None;
            let (state, bytes, age) = (entry.state(), entry.span.len(), now.duration_since(entry.since));
            if standing.awaited() {
                self.sums.expired.0 += 1;
                self.sums.expired.1 += bytes as u64;
                tracing::warn!(
                    "a token of {bytes} bytes has expired after {age:.0?}: it was redeemed {} of {} times. Was the message \
                     lost? Terms::lifetime and renew() give it longer",
                    standing.taken,
                    standing.uses
                );
            }
            self.book.set_tag(slot as usize, Tag(generation, state));
            self.try_free(slot);
        }
        self.show();
    }

    /// Gives a token longer; `false` if it is over or has expired.
    pub(super) fn renew(&mut self, slot: u32, generation: u32, lifetime: Duration) -> bool {
        let Some(entry) = self.entry(slot, generation).filter(|entry| !entry.expired) else { return false };
        let was = entry.expires;
        entry.expires = Instant::now().checked_add(lifetime).filter(|_| lifetime < FOR_EVER);
        let now = entry.expires;
        if let Some(was) = was {
            self.due.remove(&(was, slot));
        }
        if let Some(now) = now {
            self.due.insert((now, slot));
        }
        true
    }

    /// When something has to be done, if nobody tells of anything.
    pub(super) fn next(&self) -> (Option<Instant>, bool) {
        (self.due.first().map(|(at, _)| *at), !self.settling.is_empty())
    }

    pub(super) fn add_holder(&mut self, holder: Arc<Holder>) -> Result<()> {
        // What is read must be there: the kernel looks for a page at the first touch, and kills who touches if there is none.
        let used = self.entries.len().max(1);
        (0..used).step_by(AT_ONCE).try_for_each(|slot| holder.region.commit(Row::bytes_of(slot)))?;
        Arc::make_mut(&mut self.holders).push(holder);
        self.show_holders();
        Ok(())
    }

    /// A holder is gone: its loans are over. What it has redeemed counts.
    pub(super) fn remove_holder(&mut self, holder: &Arc<Holder>) {
        holder.gone.store(true, Ordering::Relaxed);
        let before = self.holders.len();
        Arc::make_mut(&mut self.holders).retain(|other| !Arc::ptr_eq(other, holder));
        if self.holders.len() == before {
            return;
        }
        self.show_holders();
        for (slot, place) in self.entries.iter_mut().enumerate() {
            if let Some(entry) = &mut place.entry {
                entry.taken += holder.of(slot, place.generation).0;
            }
        }
        self.sweep_all();
    }

    /// The memory to drop. The caller drops it when it holds no lock.
    pub(super) fn take_garbage(&mut self) -> Vec<Span> {
        std::mem::take(&mut self.garbage)
    }

    pub(super) fn stats(&mut self) -> Stats {
        let mut redeemed = (0, 0);
        for slot in 0..self.entries.len() {
            let generation = self.entries[slot].generation;
            let held = self.holders.iter().any(|holder| holder.of(slot, generation).1 > 0);
            if let Some(entry) = self.entries[slot].entry.as_ref().filter(|_| held) {
                add(&mut redeemed, &entry.span);
            }
        }
        let Sums { granted, waiting, expired, copied } = self.sums;
        Stats { granted, redeemed, waiting, expired, copied, holders: self.holders.len() - 1 }
    }

    /// What others still hold or have not redeemed yet, and who, for a message; nothing if all is well.
    pub(super) fn outstanding(&mut self) -> Option<String> {
        let granted = self.sums.granted;
        let me = self.holders.first().map(|me| me.identity);
        let mut pids: Vec<u32> = Vec::new();
        let (mut redeemed, mut awaited) = ((0, 0), (0, 0));
        for slot in 0..self.entries.len() as u32 {
            let generation = self.entries[slot as usize].generation;
            let Some(standing) = self.standing(slot, generation) else { continue };
            let holders = self.holders_of(slot, generation);
            let others = holders.iter().filter(|holder| Some(holder.identity) != me);
            let before = pids.len();
            pids.extend(others.map(|holder| holder.pid));
            if let Some(entry) = self.entry(slot, generation).filter(|_| pids.len() > before) {
                add(&mut redeemed, &entry.span);
            }
            if let Some(entry) =
                self.entry(slot, generation).filter(|entry| !entry.owned && standing.awaited())
            {
                add(&mut awaited, &entry.span);
            }
        }
        pids.sort_unstable();
        pids.dedup();
        let mut parts = Vec::new();
        if redeemed.0 > 0 {
            let with: Vec<String> = pids.iter().map(u32::to_string).collect();
            parts.push(format!("{} bytes are held by process {}", redeemed.1, with.join(", ")));
        }
        if awaited.0 > 0 {
            parts.push(format!("tokens sent and not redeemed: {} ({} bytes)", awaited.0, awaited.1));
        }
        let text = || {
            let outstanding = redeemed.0 + awaited.0;
            format!("{outstanding} of {} grants are outstanding: {}", granted.0, parts.join("; "))
        };
        (!parts.is_empty()).then(text)
    }

    /// Everything is let go.
    pub(super) fn close(&mut self) {
        self.book.end();
        for slot in 0..self.entries.len() {
            let generation = self.entries[slot].generation;
            self.book.set_tag(slot, Tag(generation, State::Free));
            if let Some(entry) = self.entries[slot].entry.take() {
                self.garbage.push(entry.span);
            }
        }
        self.garbage.extend(std::mem::take(&mut self.settling).into_iter().map(|settling| settling.span));
        self.due.clear();
    }

    /// For other processes to see.
    fn show(&self) {
        let Sums { granted, waiting, expired, .. } = self.sums;
        for (counter, value) in [
            (Counter::Granted, granted.0),
            (Counter::GrantedBytes, granted.1),
            (Counter::Waiting, waiting.0),
            (Counter::WaitingBytes, waiting.1),
            (Counter::Expired, expired.0),
            (Counter::ExpiredBytes, expired.1),
        ] {
            self.book.count(counter, value);
        }
    }

    /// The same for the pids of the holders; this process itself is the first.
    fn show_holders(&self) {
        let pids: Vec<u32> = self.holders.iter().skip(1).map(|holder| holder.pid).collect();
        self.book.list(pids.into_iter());
    }
}

impl Entry {
    fn state(&self) -> State {
        match self {
            Self { expired: true, .. } => State::Expired,
            Self { owned: true, watched: false, .. } => State::Open,
            _ => State::Draining,
        }
    }
}

/// Longer than anybody waits.
const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

fn add(sum: &mut (u64, u64), span: &Span) {
    *sum = (sum.0 + 1, sum.1 + span.len() as u64);
}

fn take(sum: &mut (u64, u64), span: &Span) {
    *sum = (sum.0.saturating_sub(1), sum.1.saturating_sub(span.len() as u64));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A generation that came again would make a token of long ago good again.
    #[test]
    fn a_slot_whose_generations_are_used_up_is_never_used_again() {
        let context = crate::Context::new(crate::Config::default()).unwrap();
        let span = context.alloc(64).unwrap();
        let grant = || context.grant(&span, &Terms::default().uses(0)).unwrap();
        let first = grant();
        let leases = first.inner.clone();
        let slot = first.token().slot;
        drop(first);
        leases.owner().entries[slot as usize].generation = u32::MAX - 1;
        let last = grant();
        assert_eq!((last.token().slot, last.token().generation), (slot, u32::MAX));
        let soon = tensorwire_device::Deadline::after(Duration::from_secs(60));
        drop(context.redeem(last.token(), soon).unwrap());
        drop(last);
        let next = grant();
        assert_eq!((next.token().slot, next.token().generation), (slot + 1, 1));
    }
}
