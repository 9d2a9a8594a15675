//! The holder's side: owners that were asked before, and loans.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tensorwire_device::fd::{Address, Fd};
use tensorwire_device::secret::Id;
use tensorwire_device::sync::{AtomicBool, Ordering};
use tensorwire_device::{Abort, Deadline, Flag, Mark, Queue, Region};

use super::book::{Book, Refusal, Row};
use super::points::{Lent, Points, Theirs};
use super::token::{Issuer, Token};
use crate::error::{Error, PeerFaultKind, Result};
use crate::share::{LenderId, PeerConnection};

/// How long a process may take to die that has begun to.
pub(super) const DYING: Duration = Duration::from_millis(200);

/// An owner whose grants this process redeems; one of them is this process itself.
#[derive(Debug)]
pub(super) struct Lender {
    pub(super) id: LenderId,
    pub(super) address: Address,
    pub(super) pid: u32,
    /// Nothing for this process itself.
    pub(super) connection: Option<Arc<PeerConnection>>,
    pub(super) book: Book,
    pub(super) row: Row,
    pub(super) points: Theirs,
    pub(super) bell: Arc<Fd>,
    /// Ends waits for it, when it has died.
    pub(super) abort: Lent,
    pub(super) ended: AtomicBool,
    /// The waits of queues for it that may not be over.
    pub(super) waits: Mutex<Vec<QueueWait>>,
    /// Releases of several queues are noted one after the other.
    pub(super) order: Mutex<()>,
    /// How often it had asked to unmap what is not used.
    pub(super) forgot: Mutex<u64>,
}

/// A wait of a queue. It has an abort word of its own: if it is late, that is no end for the other waits for this owner.
#[derive(Debug)]
pub(super) struct QueueWait {
    /// Nothing only when this is dropped.
    abort: Option<Lent>,
    /// Behind the wait, once it is queued. Until it is passed, nobody else gets the word.
    behind: Arc<OnceLock<Mark>>,
}

impl QueueWait {
    fn is_over(&self) -> bool {
        self.behind.get().is_some_and(Mark::is_over)
    }
}

impl Drop for QueueWait {
    fn drop(&mut self) {
        // Better lost than given to somebody else while a queue looks at it.
        if !self.is_over() {
            std::mem::forget(self.abort.take());
        }
    }
}

impl Lender {
    /// Has a queue wait for a flag. Where the queue looks at as many abort words as it can, this thread waits.
    pub(super) fn wait_on(
        &self,
        points: &Arc<Points>,
        queue: &mut dyn Queue,
        (flag, value): (&Flag, u32),
        deadline: Deadline,
    ) -> Result<()> {
        let Some((abort, behind)) = self.abort_of_its_own(points, queue) else {
            return Ok(flag.wait(value, &self.abort, deadline)?);
        };
        let waited = queue.wait(flag, value, &abort, deadline);
        // A wait that has no mark behind it keeps its word.
        if let Ok(mark) = queue.mark() {
            let _ = behind.set(mark);
        }
        Ok(waited?)
    }

    fn abort_of_its_own(
        &self,
        points: &Arc<Points>,
        queue: &mut dyn Queue,
    ) -> Option<(Abort, Arc<OnceLock<Mark>>)> {
        let mut waits = self.waits();
        waits.retain(|wait| !wait.is_over());
        if !queue.heeds_another() {
            return None;
        }
        let abort = points.abort().ok()?;
        // The thread that finds the owner gone says so first, and then looks at the waits.
        if self.ended.load(Ordering::Acquire) {
            abort.set(1);
        }
        let own = (*abort).clone();
        let behind = Arc::new(OnceLock::new());
        waits.push(QueueWait { abort: Some(abort), behind: behind.clone() });
        Some((own, behind))
    }

    /// It has gone: ends all waits for it.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.abort.set(1);
        for abort in self.waits().iter().filter_map(|wait| wait.abort.as_ref()) {
            abort.set(1);
        }
    }

    fn waits(&self) -> MutexGuard<'_, Vec<QueueWait>> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses to go on with one that is gone.
    pub(super) fn check(&self) -> Result<()> {
        let ended = || self.connection.as_ref().is_some_and(|connection| connection.peer().has_ended());
        let lost = self.ended.load(Ordering::Relaxed) && !self.book.is_over();
        // One that dies closes its connections a little before it is dead.
        let soon = Deadline::after(DYING);
        while lost && !ended() && !soon.passed() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if ended() {
            return Err(self.blame(
                PeerFaultKind::Died,
                "it granted this memory, and nobody else can redeem the token now; views that were redeemed stay valid",
            ));
        }
        if self.book.is_over() {
            return Err(self.blame(PeerFaultKind::Left, "it has closed its context, and its grants with it"));
        }
        if lost {
            let text = "it has closed the connection to this process, and counts its loans no more: redeem the token again";
            return Err(self.blame(PeerFaultKind::Failed, text));
        }
        Ok(())
    }

    /// Whether its process has ended, or it has closed its context, or the connection: then it counts no loans of this
    /// process any more, and is met anew.
    pub(super) fn is_gone(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| {
            connection.peer().has_ended() || self.book.is_over() || connection.is_closed()
        })
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
        let hold = Hold { lender: self.clone(), slot, generation, over: AtomicBool::new(false) };
        // What is mapped already is found by its number, which is only what the token says.
        if self.book.check(slot) != token.check() {
            hold.take_back();
            return Err(self.blame(PeerFaultKind::Refused, "the token is forged: it does not fit its grant"));
        }
        Ok(hold)
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

/// Everything that was redeemed.
#[derive(Debug, Default)]
pub(super) struct Holding {
    /// By their identities. A token may claim any of them, so several may have the same.
    lenders: HashMap<Id, Vec<Arc<Lender>>>,
    /// Lenders that a thread is meeting for the first time.
    pub(super) meeting: HashSet<LenderId>,
    /// Memory that was released, and that queues of this process may still work on.
    busy: Vec<(Flag, u32, Arc<dyn Region>)>,
}

/// From how many on memory that queues are done with is looked for.
const MANY: usize = 256;

impl Holding {
    /// Keeps memory mapped until a queue has come so far. Gives what queues are done with. The
    /// caller drops that when it holds no lock.
    #[must_use]
    pub(super) fn keep_until(
        &mut self,
        flag: Flag,
        value: u32,
        root: &Arc<dyn Region>,
    ) -> Vec<Arc<dyn Region>> {
        self.busy.push((flag, value, root.clone()));
        let many = self.busy.len() >= MANY && self.busy.len().is_power_of_two();
        if many { self.done() } else { Vec::new() }
    }

    /// What queues are done with. The caller drops it when it holds no lock.
    #[must_use]
    pub(super) fn done(&mut self) -> Vec<Arc<dyn Region>> {
        self.busy.extract_if(.., |(flag, value, _)| flag.reached(*value)).map(|(.., region)| region).collect()
    }

    /// All lenders.
    pub(super) fn lenders(&self) -> impl Iterator<Item = &Arc<Lender>> {
        self.lenders.values().flatten()
    }

    /// The one that issued a token, if it was met before.
    pub(super) fn lender(&self, issuer: &Issuer) -> Option<Arc<Lender>> {
        let known = self.lenders.get(&issuer.owner)?;
        known.iter().find(|lender| lender.address == issuer.address).cloned()
    }

    pub(super) fn add(&mut self, lender: &Arc<Lender>) {
        self.lenders.entry(lender.id.identity).or_default().push(lender.clone());
    }

    pub(super) fn remove(&mut self, gone: &Arc<Lender>) {
        if let Some(lenders) = self.lenders.get_mut(&gone.id.identity) {
            lenders.retain(|lender| !Arc::ptr_eq(lender, gone));
        }
        self.lenders.retain(|_, lenders| !lenders.is_empty());
    }

    /// The lenders that are there, and whether they need their memory back.
    pub(super) fn standing(&self) -> HashMap<Id, bool> {
        self.lenders().map(|lender| (lender.id.identity, lender.forgets())).collect()
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
