//! How processes become a group: by way of a store, each rank learns who the others are.
//!
//! Every process takes a ticket and hands in a card under it. Rank 0 reads the cards as they come, checks them,
//! and writes the verdict: the roster, or what is wrong. Anyone who finds that something is wrong, or whose
//! deadline passes, may write the verdict too; the first one counts. So all ranks hear the same, and nobody waits
//! for a group that cannot be.
//!
//! | key | who writes | what |
//! |---|---|---|
//! | `joined` | everyone, by adding 1 | tickets; stays for ever, so that latecomers are told |
//! | `card/T` | the holder of ticket T | its [`Card`] |
//! | `verdict` | the first who can, by compare-and-set | the [`Verdict`] |
//! | `heard` | everyone who has read a bad verdict, by adding 1 | lets the store's owner wait before it goes |

use std::sync::Arc;
use std::time::Duration;

use tensorwire_device::Deadline;
use tensorwire_device::secret::{Id, Secret};

use crate::error::{Error, PeerFaultKind, Result};
use crate::group::member::{Card, Fault, Member, Roster, Verdict, Version};
use crate::store::Store;

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
            let _ = self.decide(Verdict::Failed(Fault::Incompatible, text.clone()));
            return Err(Error::misuse(text));
        }
        let ticket = self.store.add(JOINED, 1).map_err(|e| self.lost_store(e))?;
        let ticket = usize::try_from(ticket).unwrap_or(usize::MAX);
        if ticket > self.world {
            return Err(self.too_late());
        }
        let card = Card { version: Version::ours(), world: self.world, member: self.me.clone() };
        self.store.set(&card_key(ticket), &card.to_bytes()).map_err(|e| self.lost_store(e))?;
        let verdict = if self.me.rank == 0 { self.judge()? } else { self.await_verdict()? };
        match verdict {
            Verdict::Formed(roster) => self.accept(roster),
            Verdict::Failed(fault, text) => {
                let _ = self.store.add(HEARD, 1);
                Err(self.failure(fault, text))
            }
        }
    }

    /// Rank 0 reads all cards and decides.
    fn judge(&self) -> Result<Verdict> {
        let mut cards: Vec<Card> = Vec::new();
        for ticket in 1..=self.world {
            let bytes = match self.await_key(&card_key(ticket), &cards)? {
                Awaited::Value(bytes) => bytes,
                Awaited::Verdict(verdict) => return Ok(verdict),
            };
            match self.check(Card::from_bytes(&bytes)?, &cards) {
                Ok(card) => cards.push(card),
                Err(text) => return self.decide(Verdict::Failed(Fault::Incompatible, text)),
            }
        }
        cards.sort_by_key(|card| card.member.rank);
        let members = cards.into_iter().map(|card| card.member).collect();
        self.decide(Verdict::Formed(Roster { id: Id::random()?, secret: Secret::random()?, members }))
    }

    /// What is wrong with a card, beside those that are there.
    fn check(&self, card: Result<Card, Version>, others: &[Card]) -> Result<Card, String> {
        let card = card.map_err(|theirs| {
            format!(
                "one process is of {theirs}, {} of {}; install the same version everywhere",
                self.me,
                Version::ours()
            )
        })?;
        if card.world != self.world {
            return Err(format!(
                "{} was told a world of {}, {} one of {}",
                card.member, card.world, self.me, self.world
            ));
        }
        if let Some(other) = others.iter().find(|other| other.member.rank == card.member.rank) {
            return Err(format!(
                "two processes claim rank {}: pid {} on {} and pid {} on {}",
                card.member.rank, other.member.pid, other.member.host, card.member.pid, card.member.host
            ));
        }
        Ok(card)
    }

    fn await_verdict(&self) -> Result<Verdict> {
        match self.await_key(VERDICT, &[])? {
            Awaited::Value(bytes) => Verdict::from_bytes(&bytes),
            Awaited::Verdict(verdict) => Ok(verdict),
        }
    }

    /// Waits for a key, and meanwhile for a verdict, the death of those who are here, and the deadline.
    fn await_key(&self, key: &str, here: &[Card]) -> Result<Awaited> {
        loop {
            let slice = self.deadline.min(Deadline::after(SLICE));
            match self.store.get_by(key, slice) {
                Ok(bytes) => return Ok(Awaited::Value(bytes)),
                Err(error) if error.is_timeout() => {}
                Err(error) => return Err(self.lost_store(error)),
            }
            if key != VERDICT
                && let Some(verdict) = self.verdict()?
            {
                return Ok(Awaited::Verdict(verdict));
            }
            if let Err(error) = (self.sensible)() {
                return self.decide(Verdict::Failed(Fault::Died, error.to_string())).map(Awaited::Verdict);
            }
            if let Some(gone) = here.iter().find(|card| card.member.is_gone(self.me)) {
                let text = format!("{} died: its process ended before all ranks had joined", gone.member);
                return self.decide(Verdict::Failed(Fault::Died, text)).map(Awaited::Verdict);
            }
            if self.deadline.passed() {
                let missing = self.missing();
                return self.decide(Verdict::Failed(Fault::Missing, missing)).map(Awaited::Verdict);
            }
        }
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

    /// Which ranks have not handed in a card.
    fn missing(&self) -> String {
        let mut here = vec![false; self.world];
        for ticket in 1..=self.world {
            let key = card_key(ticket);
            if !self.store.check(&[&key]).unwrap_or(false) {
                continue;
            }
            let card = self.store.get(&key).and_then(|bytes| Card::from_bytes(&bytes));
            if let Ok(Ok(card)) = card
                && let Some(seen) = here.get_mut(card.member.rank)
            {
                *seen = true;
            }
        }
        let count = here.iter().filter(|seen| **seen).count();
        let absent: Vec<usize> = (0..self.world).filter(|&rank| !here[rank]).collect();
        format!("{} missing; {count} of {} are here", ranks(&absent), self.world)
    }

    /// A process that comes when all places are taken.
    fn too_late(&self) -> Error {
        let who = match self.verdict() {
            Ok(Some(Verdict::Formed(roster))) => roster.members.get(self.me.rank).map(ToString::to_string),
            _ => None,
        };
        let who = who.unwrap_or_else(|| "the group".into());
        Error::peer(
            PeerFaultKind::Incompatible,
            who,
            Some(self.me.rank),
            format!(
                "{} processes have joined this group of {} already, and this one wanted to be rank {} too; \
                 give each process a rank of its own, or the group a new name or store",
                self.world, self.world, self.me.rank
            ),
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

    fn failure(&self, fault: Fault, text: String) -> Error {
        match fault {
            Fault::Missing => Error::timed_out("forming a group", self.timeout, text),
            Fault::Incompatible => Error::peer(PeerFaultKind::Incompatible, "the group", None, text),
            Fault::Died => Error::peer(PeerFaultKind::Died, "a rank", None, text),
            Fault::Other => Error::peer(PeerFaultKind::Misbehaved, "the group", None, text),
        }
    }

    fn lost_store(&self, error: Error) -> Error {
        match error {
            Error::TimedOut { .. } => {
                Error::timed_out("forming a group", self.timeout, "the store does not answer")
            }
            error => error,
        }
    }
}

/// Waits until everybody who took a ticket has heard a bad verdict; for the rank whose process serves the store.
pub(crate) fn linger(store: &Arc<dyn Store>) {
    let until = Deadline::after(Duration::from_secs(2));
    while let (Ok(joined), Ok(heard)) = (store.add(JOINED, 0), store.add(HEARD, 0)) {
        if heard >= joined || until.passed() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Removes what a group that has formed needs no more. Tickets stay, and the verdict becomes an answer to
/// latecomers: the secret does not stay in the store.
pub(crate) fn tidy(store: &Arc<dyn Store>, roster: &Roster, leaders: &[usize]) -> Result<()> {
    let world = roster.members.len();
    let text = format!(
        "a group of {world} ranks has formed under this name already; {} leads it",
        roster.members[0]
    );
    store.set(VERDICT, &Verdict::Failed(Fault::Incompatible, text).to_bytes())?;
    let cards = (1..=world).map(card_key);
    for key in cards.chain(leaders.iter().flat_map(|&leader| super::host::keys(leader))) {
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
