//! How processes become a group: each rank learns from a store who the others are.
//!
//! Every process takes a ticket and hands in a card under it. Rank 0 reads the cards as they come, checks them, and
//! writes the verdict: the roster, or what is wrong. A rank that finds something wrong, or whose deadline passes,
//! may write the verdict, too. Only the first verdict counts. So all ranks hear the same, and no rank waits for a
//! group that cannot form.
//!
//! | key | who writes | what |
//! |---|---|---|
//! | `joined` | everyone, by adding 1 | tickets; stays for ever, so that latecomers are told |
//! | `card/T` | the holder of ticket T | its [`Card`] |
//! | `verdict` | the first who can, by compare-and-set | the [`Verdict`] |
//! | `heard` | everyone who gives up, by adding 1 | lets the store's owner wait before it goes |

use std::sync::Arc;
use std::time::Duration;

use tensorwire_device::Deadline;
use tensorwire_device::secret::{Id, Secret};

use crate::error::{Error, PeerFaultKind, Result};
use crate::group::card::{Card, Roster, Verdict, Version};
use crate::group::report;
use crate::interrupt::{self, is_interrupt};
use crate::shm::member::Member;
use crate::store::{PrefixStore, Store};

const JOINED: &str = "joined";
const VERDICT: &str = "verdict";
const HEARD: &str = "heard";

/// How often a rank that waits looks whether it still makes sense.
const SLICE: Duration = Duration::from_millis(250);

/// One process's part in a rendezvous.
pub(crate) struct Rendezvous<'a> {
    pub(crate) store: &'a Arc<dyn Store>,
    pub(crate) me: &'a Member,
    pub(crate) world: usize,
    pub(crate) timeout: Duration,
    pub(crate) deadline: Deadline,
    /// Fails when waiting has no sense any more, for reasons that the store does not know.
    pub(crate) sensible: &'a dyn Fn() -> Result<()>,
}

impl Rendezvous<'_> {
    /// Meets the others; gives the roster or the error that every rank gets.
    pub(crate) fn meet(&self) -> Result<Roster> {
        if self.me.rank >= self.world {
            let text = format!(
                "process {} on {} was started as rank {} of a world of {}; ranks count from 0",
                self.me.pid, self.me.host, self.me.rank, self.world
            );
            // The others would wait for a rank that cannot come.
            let _ = self.decide(Verdict::Failed(misfit(text.clone())));
            hear(self.store);
            return Err(Error::misuse(text));
        }
        let verdict = self.take_part().inspect_err(|error| {
            // The others would wait for a rank that has gone.
            if is_interrupt(error) {
                interrupt::without(|| self.leave(error));
            }
        })?;
        let met = match verdict {
            Verdict::Formed(roster) => self.accept(roster),
            Verdict::Failed(error) => Err(error),
        };
        met.inspect_err(|_| hear(self.store))
    }

    /// Hands in this rank's card and gives the verdict.
    fn take_part(&self) -> Result<Verdict> {
        let ticket = self.store.add(JOINED, 1).map_err(|e| self.lost_store(e))?;
        let ticket = usize::try_from(ticket).unwrap_or(usize::MAX);
        if ticket > self.world {
            return self.one_too_many();
        }
        let card = Card { version: Version::ours(), world: self.world, member: self.me.clone() };
        self.store.set(&card_key(ticket), &card.to_bytes()).map_err(|e| self.lost_store(e))?;
        if self.me.rank == 0 { self.judge() } else { self.await_verdict() }
    }

    /// Tells the others that this rank was interrupted; those who have met already look elsewhere.
    fn leave(&self, error: &Error) {
        let told = report::as_seen_by_others(error, self.me);
        let soon = self.store.timeout();
        self.store.set_timeout(soon.min(Duration::from_secs(1)));
        if let Ok(Verdict::Formed(_)) = self.decide(Verdict::Failed(told.clone())) {
            report::tell(self.store, &told);
        }
        hear(self.store);
        self.store.set_timeout(soon);
    }

    /// Rank 0 reads all cards and decides.
    fn judge(&self) -> Result<Verdict> {
        let mut seen = Seen::default();
        for ticket in 1..=self.world {
            let bytes = match self.await_key(&card_key(ticket), &mut seen)? {
                Awaited::Value(bytes) => bytes,
                Awaited::Verdict(verdict) => return Ok(verdict),
            };
            match self.check(&bytes, &seen.cards) {
                Ok(card) => seen.cards.push(card),
                Err(error) => return self.decide(Verdict::Failed(error)),
            }
        }
        seen.cards.sort_by_key(|card| card.member.rank);
        let members = seen.cards.into_iter().map(|card| card.member).collect();
        self.decide(Verdict::Formed(Roster { id: Id::random()?, secret: Secret::random()?, members }))
    }

    /// What is wrong with a card, beside those that are there.
    fn check(&self, bytes: &[u8], others: &[Card]) -> Result<Card> {
        let card = Card::from_bytes(bytes).map_err(|_| {
            let text = "something that is no card lies under the group's name in its store; give the group a name or \
                        a store of its own";
            Error::peer(PeerFaultKind::Misbehaved, "another user of the store", None, text)
        })?;
        let card = card.map_err(|theirs| {
            let ours = Version::ours();
            misfit(format!(
                "one process is of {theirs}, {} of {ours}; install the same version everywhere",
                self.me
            ))
        })?;
        let (member, me) = (&card.member, self.me);
        if card.world != self.world {
            let (theirs, ours) = (card.world, self.world);
            return Err(misfit(format!("{member} was told a world of {theirs}, {me} one of {ours}")));
        }
        if member.rank >= self.world {
            return Err(misfit(format!("{member} is outside of a world of {}", self.world)));
        }
        if let Some(other) = others.iter().map(|other| &other.member).find(|other| other.rank == member.rank)
        {
            return Err(twice(other, member));
        }
        if let Some(other) = others.iter().find(|other| other.member.identity == member.identity) {
            return Err(misfit(format!(
                "ranks {} and {} are one context; a second rank in one process needs a context of its own",
                other.member.rank, member.rank
            )));
        }
        Ok(card)
    }

    fn await_verdict(&self) -> Result<Verdict> {
        match self.await_key(VERDICT, &mut Seen::default())? {
            Awaited::Value(bytes) => Verdict::from_bytes(&bytes),
            Awaited::Verdict(verdict) => Ok(verdict),
        }
    }

    /// Waits for a key, and meanwhile for a verdict, the death of those who are here, and the deadline.
    fn await_key(&self, key: &str, seen: &mut Seen) -> Result<Awaited> {
        loop {
            let slice = self.deadline.min(Deadline::after(SLICE));
            match self.store.get_by(key, slice) {
                Ok(bytes) => return Ok(Awaited::Value(bytes)),
                Err(error) if error.is_timeout() => {}
                Err(error) => return Err(self.lost_store(error)),
            }
            interrupt::check()?;
            // This also tells whether the store is still there.
            if let Some(verdict) = self.verdict()? {
                return Ok(Awaited::Verdict(verdict));
            }
            if self.me.rank != 0 {
                self.look_around(seen)?;
            }
            let gone = seen.cards.iter().find(|card| card.member.is_gone(self.me));
            let trouble = if let Err(error) = (self.sensible)() {
                error
            } else if let Some(gone) = gone {
                gone.member.died("its process ended before all ranks had joined")
            } else if self.deadline.passed() {
                self.missing()
            } else {
                continue;
            };
            return self.decide(Verdict::Failed(trouble)).map(Awaited::Verdict);
        }
    }

    /// Reads a few more cards, so that every rank notices the death of its neighbours, also that of rank 0, and a
    /// large world does not overload the store.
    fn look_around(&self, seen: &mut Seen) -> Result<()> {
        for _ in 0..4 {
            let key = card_key(seen.read + 1);
            if seen.read >= self.world || !self.store.check(&[&key]).map_err(|e| self.lost_store(e))? {
                return Ok(());
            }
            seen.read += 1;
            // What does not parse is for rank 0 to judge.
            let bytes = self.store.get(&key).map_err(|e| self.lost_store(e))?;
            seen.cards.extend(Card::from_bytes(&bytes).ok().and_then(Result::ok));
        }
        Ok(())
    }

    /// The verdict, if there is one already.
    fn verdict(&self) -> Result<Option<Verdict>> {
        if !self.store.check(&[VERDICT]).map_err(|e| self.lost_store(e))? {
            return Ok(None);
        }
        let bytes = self.store.get(VERDICT).map_err(|e| self.lost_store(e))?;
        Verdict::from_bytes(&bytes).map(Some)
    }

    /// Writes the verdict, unless somebody has; gives the one that counts.
    fn decide(&self, verdict: Verdict) -> Result<Verdict> {
        let bytes = verdict.to_bytes();
        let there = self.store.compare_set(VERDICT, &[], &bytes);
        match there {
            Ok(there) if there == bytes => Ok(verdict),
            Ok(there) => Verdict::from_bytes(&there),
            // The store is gone with whoever served it; our own finding is as good as any.
            Err(_) if matches!(verdict, Verdict::Failed(..)) => Ok(verdict),
            Err(error) => Err(self.lost_store(error)),
        }
    }

    /// Why the group is not complete when the time is up: cards that contradict each other, or ranks without one.
    fn missing(&self) -> Error {
        let mut cards: Vec<Card> = Vec::new();
        for ticket in 1..=self.world {
            let key = card_key(ticket);
            match self.store.check(&[&key]) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(error) => return self.lost_store(error),
            }
            match self.store.get(&key).and_then(|bytes| self.check(&bytes, &cards)) {
                Ok(card) => cards.push(card),
                Err(error) => return error,
            }
        }
        let here = |rank| cards.iter().any(|card| card.member.rank == rank);
        let absent: Vec<usize> = (0..self.world).filter(|&rank| !here(rank)).collect();
        let text = format!("{} missing; {} of {} are here", ranks(&absent), cards.len(), self.world);
        Error::timed_out("forming a group", self.timeout, text).about(absent)
    }

    /// This process comes when all places are taken: who took its place? If the group has not formed yet, it cannot
    /// any more, for nobody knows which of the two is the right one.
    fn one_too_many(&self) -> Result<Verdict> {
        match self.verdict()? {
            Some(Verdict::Formed(roster)) => {
                let other = roster.members.get(self.me.rank);
                let error = other.map_or_else(|| misfit(self.no_place()), |other| twice(other, self.me));
                return Ok(Verdict::Failed(error));
            }
            Some(failed) => return Ok(failed),
            None => {}
        }
        let mut seen = Seen::default();
        while seen.read < self.world {
            let before = seen.read;
            self.look_around(&mut seen)?;
            if seen.read == before {
                break;
            }
        }
        let other = seen.cards.iter().map(|card| &card.member).find(|other| other.rank == self.me.rank);
        let error = other.map_or_else(|| misfit(self.no_place()), |other| twice(other, self.me));
        self.decide(Verdict::Failed(error.clone())).map(|verdict| match verdict {
            Verdict::Formed(_) => Verdict::Failed(error),
            failed => failed,
        })
    }

    fn no_place(&self) -> String {
        format!(
            "{} comes to a group of {} that {} processes have joined already; give each process a rank of its own, or \
             the group a new name or store",
            self.me, self.world, self.world
        )
    }

    /// Looks whether the roster fits to this process.
    fn accept(&self, roster: Roster) -> Result<Roster> {
        let world = roster.members.len();
        if world != self.world {
            let text =
                format!("the group has {world} ranks; this process was told a world of {}", self.world);
            return Err(Error::peer(PeerFaultKind::Incompatible, "rank 0", Some(0), text));
        }
        let ordered = roster.members.iter().enumerate().all(|(rank, member)| member.rank == rank);
        if !ordered {
            return Err(Error::peer(PeerFaultKind::Misbehaved, "rank 0", Some(0), "its roster has no order"));
        }
        let mine = &roster.members[self.me.rank];
        if mine.identity != self.me.identity {
            let text = format!("it has the place of rank {} that this process was given too", mine.rank);
            return Err(Error::peer(PeerFaultKind::Incompatible, mine.to_string(), Some(mine.rank), text));
        }
        Ok(roster)
    }

    fn lost_store(&self, error: Error) -> Error {
        match error {
            Error::TimedOut { doing, missing, .. } => {
                let text = format!("the store does not answer ({doing}: {missing})");
                let after = self.timeout.saturating_sub(self.deadline.remaining().unwrap_or_default());
                Error::timed_out("forming a group", after, text)
            }
            error => error,
        }
    }
}

/// The cards that a process has looked at.
#[derive(Default)]
struct Seen {
    cards: Vec<Card>,
    read: usize,
}

fn misfit(text: String) -> Error {
    Error::peer(PeerFaultKind::Incompatible, "the group", None, text)
}

fn twice(a: &Member, b: &Member) -> Error {
    let detail = format!(
        "{b} claims the same rank; give each process a rank of its own, or the group a new name or store"
    );
    Error::peer(PeerFaultKind::Incompatible, a.to_string(), Some(a.rank), detail)
}

/// Says that this process has given up and needs the store no more.
pub(crate) fn hear(store: &Arc<dyn Store>) {
    let _ = store.add(HEARD, 1);
}

/// Waits a moment until all others have given up too, also those who are still on their way; for the rank whose process
/// serves the store.
pub(crate) fn linger(store: &Arc<dyn Store>, world: usize, error: &Error) {
    let dead = matches!(error, Error::Peer(fault) if fault.kind == PeerFaultKind::Died);
    let until = Deadline::after(Duration::from_secs(2));
    while let (Ok(joined), Ok(heard)) = (store.add(JOINED, 0), store.add(HEARD, 0)) {
        // After a time-out nobody else is expected.
        let all = if error.is_timeout() || is_interrupt(error) { joined } else { joined.max(world as i64) };
        if heard >= all - i64::from(dead) || until.passed() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Takes the secret of a group that failed to form out of the store. Ranks that come later hear why it failed.
pub(crate) fn spoil(store: &Arc<dyn Store>, error: &Error) {
    let _ = store.set(VERDICT, &Verdict::Failed(error.clone()).to_bytes());
}

/// Removes what a group that has formed needs no more. Tickets stay, and the verdict becomes an answer to
/// latecomers: the secret does not stay in the store.
pub(crate) fn tidy(store: &Arc<dyn Store>, roster: &Roster, hosts: &[Vec<usize>]) -> Result<()> {
    let world = roster.members.len();
    let text = format!(
        "{world} ranks have formed it under this name already, {} leads it; give the new one another name or store (a file that an earlier run left may be removed)",
        roster.members[0]
    );
    store.set(VERDICT, &Verdict::Failed(misfit(text)).to_bytes())?;
    let cards = (1..=world).map(card_key);
    for key in cards.chain(super::same_host::keys(&roster.members, hosts)) {
        store.delete(&key)?;
    }
    Ok(())
}

/// "rank 3" or "ranks 1, 2 and 5 more", with the verb.
pub(crate) fn ranks(ranks: &[usize]) -> String {
    let shown: Vec<String> = ranks.iter().take(8).map(usize::to_string).collect();
    match ranks.len() {
        0 => "no rank is".into(),
        1 => format!("rank {} is", shown[0]),
        n if n > shown.len() => format!("ranks {} and {} more are", shown.join(", "), n - shown.len()),
        _ => format!("ranks {} are", shown.join(", ")),
    }
}

enum Awaited {
    Value(Vec<u8>),
    Verdict(Verdict),
}

fn card_key(ticket: usize) -> String {
    format!("card/{ticket}")
}

/// Says in a store that a group cannot be, because a rank was interrupted on its way there.
pub(crate) fn give_up(store: &Arc<dyn Store>, name: &str, error: &Error, me: &Member) {
    let store = PrefixStore::new(super::form::place_of(name), store.clone());
    let verdict = Verdict::Failed(report::as_seen_by_others(error, me));
    let _ = interrupt::without(|| store.compare_set(VERDICT, &[], &verdict.to_bytes()));
}

/// Says in a store that a group cannot be, for a process that does not come so far as to meet the others.
pub(crate) fn forestall(store: Arc<dyn Store>, name: &str, text: String) {
    let store = PrefixStore::new(super::form::place_of(name), store);
    let _ = store.compare_set(VERDICT, &[], &Verdict::Failed(misfit(text)).to_bytes());
}
