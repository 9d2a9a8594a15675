//! The holder's side: owners that were asked before, loans, and the memory that is mapped for them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tensorwire_device::fd::{Connection, Fd, has_ended};
use tensorwire_device::secret::Id;
use tensorwire_device::sync::{AtomicBool, Ordering};
use tensorwire_device::{Deadline, Flag, Region};

use super::book::{Book, Refusal, Row};
use super::points::{Lent, Theirs};
use super::token::{Memory, Token};
use crate::error::{Error, PeerFaultKind, Result};

/// How long memory stays mapped behind its last loan.
const LINGER: Duration = Duration::from_secs(2);

/// An owner whose grants this process redeems; one of them is this process itself.
#[derive(Debug)]
pub(super) struct Lender {
    pub(super) identity: Id,
    pub(super) pid: u32,
    /// Nothing for this process itself.
    pub(super) line: Option<Mutex<Line>>,
    pub(super) pidfd: Option<Arc<Fd>>,
    pub(super) book: Book,
    pub(super) row: Row,
    pub(super) points: Theirs,
    pub(super) bell: Arc<Fd>,
    /// Ends waits for it, when it has died.
    pub(super) abort: Lent,
    pub(super) ended: AtomicBool,
    /// Releases of several queues are noted one after the other.
    pub(super) order: Mutex<()>,
    /// How often it had asked to unmap what is not used.
    pub(super) forgot: Mutex<u64>,
}

/// The connection to an owner.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) connection: Connection,
    /// Whether the answer to the last request is still to come: who asked has not waited for it.
    pub(super) owed: bool,
}

impl Lender {
    /// Refuses to go on with one that is gone.
    pub(super) fn check(&self) -> Result<()> {
        let ended = self.pidfd.as_ref().is_some_and(|pidfd| has_ended(pidfd));
        if ended || self.ended.load(Ordering::Relaxed) {
            return Err(self.blame(
                PeerFaultKind::Died,
                "it granted this memory, and nobody else can redeem the token now; views that were redeemed stay valid",
            ));
        }
        if self.book.is_over() {
            return Err(self.blame(PeerFaultKind::Left, "it has closed its context, and its grants with it"));
        }
        Ok(())
    }

    pub(super) fn blame(&self, kind: PeerFaultKind, text: &str) -> Error {
        Error::peer(kind, format!("process {}", self.pid), None, text)
    }

    /// Counts a loan.
    pub(super) fn redeem(self: &Arc<Self>, token: &Token, deadline: Deadline) -> Result<Hold> {
        self.check()?;
        let (slot, generation) = (token.slot as usize, token.generation);
        let begin = Instant::now();
        loop {
            super::at("redeem: before it is counted");
            let refusal = match self.row.redeem(&self.book, slot, generation) {
                Ok(()) => break,
                Err((refusal, tell)) => {
                    if tell {
                        self.tell(slot);
                    }
                    refusal
                }
            };
            let reason = match refusal {
                Refusal::Over => {
                    "the token is over: its memory was redeemed and let go by all, or it has expired"
                }
                Refusal::Expired => "the token has expired (see Terms::lifetime and renew)",
                Refusal::TooMany => "this process has 65,535 loans of it that are not released",
                Refusal::Deciding if !deadline.passed() => {
                    self.check()?;
                    std::thread::sleep(Duration::from_micros(20));
                    continue;
                }
                Refusal::Deciding => {
                    let missing = format!("process {} does not decide; is it stopped?", self.pid);
                    return Err(Error::timed_out(format!("redeeming {token:?}"), begin.elapsed(), missing));
                }
            };
            return Err(self.blame(PeerFaultKind::Refused, reason));
        }
        super::at("redeem: counted");
        Ok(Hold { lender: self.clone(), slot, generation, over: AtomicBool::new(false) })
    }

    /// Tells the owner of a release.
    fn tell(&self, slot: usize) {
        if let Some(rung) = self.book.soil(slot) {
            super::at("release: before the bell");
            ring(&self.bell);
            self.book.rung(rung);
        }
    }
}

/// Wakes whoever polls it.
pub(super) fn ring(bell: &Fd) {
    // It cannot overflow: it is emptied. In a forked child it is closed, and there is nobody to wake.
    if bell.is_ours() {
        let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
    }
}

/// A loan that is counted, until it is dropped.
#[derive(Debug)]
pub(super) struct Hold {
    pub(super) lender: Arc<Lender>,
    pub(super) slot: usize,
    pub(super) generation: u32,
    over: AtomicBool,
}

impl Hold {
    /// Ends it, once. `point` is called before it does.
    pub(super) fn release(&self, point: impl FnOnce(&Row) -> Result<()>) -> Result<()> {
        if self.over.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let noted = point(&self.lender.row);
        super::at("release: before it is counted");
        if self.lender.row.release(&self.lender.book, self.slot, self.generation) {
            super::at("release: counted");
            self.lender.tell(self.slot);
        }
        noted
    }

    /// Takes it back: what it was for has failed, and the token is as good as before.
    pub(super) fn take_back(&self) {
        if self.over.swap(true, Ordering::AcqRel) {
            return;
        }
        if self.lender.row.take_back(&self.lender.book, self.slot, self.generation) {
            self.lender.tell(self.slot);
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // In a forked child the loan is the parent's.
        if self.lender.bell.is_ours() {
            let _ = self.release(|_| Ok(()));
        }
    }
}

/// Everything that was redeemed, and memory that is known by name.
#[derive(Debug, Default)]
pub(super) struct Holding {
    pub(super) lenders: HashMap<Id, Arc<Lender>>,
    /// Parts of allocations that are there: one, all of it, where it was mapped; of this process's own, what was granted.
    known: HashMap<Id, Vec<Known>>,
    /// Roots of imported memory by where they are kept: what is granted onward has the name that it came with.
    names: HashMap<usize, (Weak<dyn Region>, Memory)>,
    kept: HashMap<Id, Kept>,
    /// Memory that was released, and that queues of this process may still work on.
    busy: Vec<(Flag, u32, Arc<dyn Region>)>,
}

#[derive(Debug)]
struct Known {
    region: Weak<dyn Region>,
    /// Where it begins in the allocation.
    start: usize,
}

#[derive(Debug)]
struct Kept {
    region: Arc<dyn Region>,
    lender: Id,
    used: Instant,
}

/// From how many on names of what is gone are looked for.
const MANY: usize = 256;

impl Holding {
    /// The mapping of so many bytes of an allocation at an offset, and where they begin in it.
    pub(super) fn find(
        &mut self,
        memory: &Memory,
        offset: usize,
        len: usize,
        lender: Id,
    ) -> Option<(Arc<dyn Region>, usize)> {
        let inside = |known: &Known| {
            let start = offset.checked_sub(known.start)?;
            let region = known.region.upgrade().filter(|region| region.device() == memory.device)?;
            (start.checked_add(len)? <= region.len()).then_some((region, start))
        };
        let (region, start) = self.known.get(&memory.name)?.iter().rev().find_map(inside)?;
        if let Some(kept) = self.kept.get_mut(&memory.name) {
            (kept.used, kept.lender) = (Instant::now(), lender);
        }
        Some((region, start))
    }

    /// Notes memory of this process that is granted.
    pub(super) fn note_own(&mut self, memory: &Memory, root: &Arc<dyn Region>, start: usize) {
        self.tidy();
        let parts = self.known.entry(memory.name).or_default();
        // The same part may be granted again and again, each time as another region.
        parts.retain(|known| {
            known.region.upgrade().is_some_and(|it| (known.start, it.len()) != (start, root.len()))
        });
        parts.push(Known { region: Arc::downgrade(root), start });
    }

    /// Notes all of an allocation that was mapped, and keeps it for a while.
    pub(super) fn note_mapped(&mut self, memory: &Memory, root: &Arc<dyn Region>, lender: Id) {
        self.tidy();
        let region = Arc::downgrade(root);
        self.names.insert(address(root), (region.clone(), memory.clone()));
        self.known.insert(memory.name, vec![Known { region, start: 0 }]);
        let kept = Kept { region: root.clone(), lender, used: Instant::now() };
        self.kept.insert(memory.name, kept);
    }

    /// Keeps memory mapped until a queue has come so far.
    pub(super) fn keep_until(&mut self, flag: Flag, value: u32, root: &Arc<dyn Region>) {
        self.busy.push((flag, value, root.clone()));
        if self.busy.len() >= MANY && self.busy.len().is_power_of_two() {
            self.busy.retain(|(flag, value, _)| !flag.reached(*value));
        }
    }

    fn tidy(&mut self) {
        if self.known.len() >= MANY && self.known.len().is_power_of_two() {
            self.known.retain(|_, parts| parts.iter().any(|known| known.region.strong_count() > 0));
        }
        if self.names.len() >= MANY && self.names.len().is_power_of_two() {
            self.names.retain(|_, (region, _)| region.strong_count() > 0);
        }
    }

    /// The name that memory came with, if it is of another process.
    pub(super) fn name_of(&self, root: &Arc<dyn Region>) -> Option<Memory> {
        let (region, memory) = self.names.get(&address(root))?;
        (region.strong_count() > 0).then(|| memory.clone())
    }

    /// Gives up mappings that nobody has used for a while, and those of lenders that are gone or need their memory. What is
    /// given has to be dropped by who holds no lock.
    pub(super) fn give_up(&mut self, now: Instant) -> Vec<Arc<dyn Region>> {
        self.busy.retain(|(flag, value, _)| !flag.reached(*value));
        let forget: Vec<Id> =
            self.lenders.values().filter(|lender| lender.forgets()).map(|lender| lender.identity).collect();
        let idle = |kept: &Kept| Arc::strong_count(&kept.region) == 1;
        // What is in use is looked at again later.
        self.kept
            .values_mut()
            .filter(|kept| !idle(kept) && kept.used + LINGER <= now)
            .for_each(|kept| kept.used = now);
        // The driver may give the handle of memory whose maker has died to other memory.
        let let_go = |lender: &Id| forget.contains(lender) || !self.lenders.contains_key(lender);
        let gone: Vec<Id> = self
            .kept
            .iter()
            .filter(|(_, kept)| idle(kept) && (kept.used + LINGER <= now || let_go(&kept.lender)))
            .map(|(name, _)| *name)
            .collect();
        gone.iter().filter_map(|name| self.kept.remove(name)).map(|kept| kept.region).collect()
    }

    /// Gives up all mappings of a lender's memory that nobody uses, to be dropped by who holds no lock.
    pub(super) fn give_up_all(&mut self, lender: Id) -> Vec<Arc<dyn Region>> {
        self.busy.retain(|(flag, value, _)| !flag.reached(*value));
        let unused = |kept: &Kept| kept.lender == lender && Arc::strong_count(&kept.region) == 1;
        let gone: Vec<Id> =
            self.kept.iter().filter(|(_, kept)| unused(kept)).map(|(name, _)| *name).collect();
        gone.iter().filter_map(|name| self.kept.remove(name)).map(|kept| kept.region).collect()
    }

    /// When the next mapping may be given up.
    pub(super) fn next(&self) -> Option<Instant> {
        self.kept.values().map(|kept| kept.used + LINGER).min()
    }

    /// Forgets a lender that has died. Its loans stay valid.
    pub(super) fn remove(&mut self, identity: Id) -> Option<Arc<Lender>> {
        self.lenders.remove(&identity)
    }
}

impl Lender {
    /// Whether it has asked to unmap what is not used, or has died, since this was last asked.
    fn forgets(&self) -> bool {
        let mut forgot = self.forgot.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = self.book.asked_to_forget();
        let more = *forgot != asked;
        *forgot = asked;
        more || self.ended.load(Ordering::Relaxed)
    }
}

fn address(region: &Arc<dyn Region>) -> usize {
    Arc::as_ptr(region).cast::<()>() as usize
}

/// The region that a region is a part of, at last.
pub(super) fn root(region: &Arc<dyn Region>) -> &Arc<dyn Region> {
    let mut region = region;
    while let Some(whole) = region.whole() {
        region = whole;
    }
    region
}
