//! How processes become a group: each rank learns from a store who the others are.
//!
//! Every process takes a ticket and hands in a card under it. Rank 0 reads the cards as they come, checks them, and
//! writes the verdict: the roster, or what is wrong. A rank that finds something wrong, or whose deadline passes,
//! may write the verdict, too. Only the first verdict counts. So all ranks hear the same, and no rank waits for a
//! group that cannot form.
//!
//! A rank makes a handful of requests, however many ranks there are. Only rank 0 makes some for each rank. A rank that waits
//! looks whether the processes that it can see in /proc are alive. It finds their cards by way of `near`. Rank 0 sees
//! those of its own machine, and so does every other rank.
//!
//! | key | who writes | what |
//! |---|---|---|
//! | `joined` | everyone, by adding 1 | tickets; stays for ever, so that latecomers are told |
//! | `card/T` | the holder of ticket T | its [`Card`] |
//! | `near/S` | everyone who sees the pids S, by adding 1 | how many they are |
//! | `near/S/N` | the one of them who came as number N | its [`Card`] again |
//! | `verdict` | the first who can, by compare-and-set | the [`Verdict`] |
//! | `asked` | everyone whose time is up, by adding 1 | the first looks who is missing, for all |
//! | `heard` | everyone who gives up, by adding 1 | lets the store's owner wait before it goes |

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tensorwire_device::Deadline;
use tensorwire_device::secret::{Id, Secret};

use crate::config::Seal;
use crate::error::{Error, PeerFaultKind, Result};
use crate::group::card::{Card, Roster, Verdict, Version};
use crate::group::notes::{Notes, kind_of};
use crate::group::report;
use crate::interrupt::{self, is_interrupt};
use crate::link::key::{Unproved, claimed};
use crate::shm::member::Member;
use crate::store::Store;

const JOINED: &str = "joined";
pub(crate) const VERDICT: &str = "verdict";
const ASKED: &str = "asked";
const HEARD: &str = "heard";

/// How often a rank that waits looks whether it still makes sense.
const SLICE: Duration = Duration::from_millis(250);
/// How long a rank whose time is up waits until another rank has found out who is missing.
const FINDING: Duration = Duration::from_secs(2);
/// Cards that are read with one request: a reply is far below what a server holds for its clients.
const CARDS: usize = 1024;
/// How much of what nobody has proved an error repeats.
const CLAIM: usize = 500;

/// How long a rank of a world waits before it asks the store again. In a large world it is longer: all ranks together ask
/// 2,000 times a second at most.
pub(crate) fn slice(least: Duration, world: usize) -> Duration {
    least.max(Duration::from_micros(500) * u32::try_from(world).unwrap_or(u32::MAX))
}

/// One process's part in a rendezvous.
pub(crate) struct Rendezvous<'a> {
    pub(crate) notes: &'a Notes,
    /// What this process seals between hosts.
    pub(crate) seal: Option<Seal>,
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
            hear(self.store());
            return Err(Error::misuse(text));
        }
        let verdict = self.take_part().inspect_err(|error| {
            // The others would wait for a rank that has gone.
            if is_interrupt(error) {
                interrupt::without(|| self.leave(error));
            }
        })?;
        let met = match verdict {
            Verdict::Formed { id, secret, members } => self.accept(id, secret, members),
            Verdict::Failed(error) => Err(error),
        };
        met.inspect_err(|_| hear(self.store()))
    }

    /// Hands in this rank's card and gives the verdict.
    fn take_part(&self) -> Result<Verdict> {
        let ticket = self.store().add(JOINED, 1).map_err(|e| self.lost_store(e))?;
        let ticket = usize::try_from(ticket).unwrap_or(usize::MAX);
        if ticket > self.world {
            return self.one_too_many();
        }
        self.hand_in(ticket).map_err(|e| self.lost_store(e))?;
        if self.me.rank == 0 { self.judge() } else { self.await_verdict() }
    }

    /// Hands in this rank's card, where rank 0 finds it, and where those find it who can see whether it is alive.
    fn hand_in(&self, ticket: usize) -> Result<()> {
        let (version, world, seal, member) = (Version::ours(), self.world, self.seal, self.me.clone());
        let card = Card { version, world, seal, member }.to_bytes();
        let Some(sight) = self.me.place.sight() else { return self.notes.set(&card_key(ticket), &card) };
        let number = self.store().add(&near_key(sight), 1)?;
        let (mine, near) = (card_key(ticket), near_card_key(sight, number));
        let (here, there) = (self.notes.seal(&mine, &card), self.notes.seal(&near, &card));
        self.store().multi_set(&[(&mine, &here), (&near, &there)])
    }

    /// Tells the others that this rank was interrupted; those who have met already look elsewhere.
    fn leave(&self, error: &Error) {
        let told = report::as_seen_by_others(error, self.me);
        let soon = self.store().timeout();
        self.store().set_timeout(soon.min(Duration::from_secs(1)));
        if let Ok(Verdict::Formed { .. }) = self.decide(Verdict::Failed(told.clone())) {
            report::tell(self.notes, &told);
        }
        hear(self.store());
        self.store().set_timeout(soon);
    }

    /// Rank 0 reads all cards and decides.
    fn judge(&self) -> Result<Verdict> {
        let mut seen = Seen::default();
        for ticket in 1..=self.world {
            let key = card_key(ticket);
            let bytes = match self.await_key(&key, &mut seen)? {
                Awaited::Value(bytes) => bytes,
                Awaited::Verdict(verdict) => return Ok(verdict),
            };
            match self.check(&key, &bytes, &seen.cards) {
                Ok(card) => seen.cards.push(card),
                Err(error) => return self.decide(Verdict::Failed(error)),
            }
        }
        seen.cards.sort_by_key(|card| card.member.rank);
        let members = seen.cards.into_iter().map(|card| card.member).collect();
        let secret = if self.notes.proofs().is_some() { None } else { Some(Secret::random()?) };
        self.decide(Verdict::Formed { id: Id::random()?, secret, members })
    }

    /// What is wrong with a card, beside those that are there.
    fn check(&self, key: &str, bytes: &[u8], others: &[Card]) -> Result<Card> {
        let (bytes, unproved) = match self.notes.proved(key, bytes) {
            Ok(bytes) => (bytes, None),
            Err(why) => (claimed(bytes), Some(why)),
        };
        let card = Card::from_bytes(bytes).map_err(|_| {
            if let Some(why) = unproved {
                return self.notes.refuse(key, &self.me.to_string(), why);
            }
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
        if let Some(why) = unproved {
            // It is so by its own words, which is enough to know where to look.
            let text = why.explain("its card", &me.to_string(), self.notes.proofs());
            return Err(Error::peer(kind_of(why), member.to_string(), Some(member.rank), text));
        }
        if card.world != self.world {
            let (theirs, ours) = (card.world, self.world);
            return Err(misfit(format!("{member} was told a world of {theirs}, {me} one of {ours}")));
        }
        if let (Some(theirs), Some(ours)) = (card.seal, self.seal)
            && theirs != ours
        {
            return Err(misfit(format!(
                "{member} has TENSORWIRE_SEAL={theirs}, {me} has {ours}; give all ranks the same"
            )));
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
            Awaited::Value(bytes) => self.read(&bytes),
            Awaited::Verdict(verdict) => Ok(verdict),
        }
    }

    /// Waits for a key, and meanwhile for a verdict, the death of those who are here, and the deadline.
    fn await_key(&self, key: &str, seen: &mut Seen) -> Result<Awaited> {
        loop {
            let crowd = if self.me.rank == 0 { 1 } else { self.world };
            let slice = self.deadline.min(Deadline::after(slice(SLICE, crowd)));
            match self.store().get_by(key, slice) {
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
                return self.give_up_waiting().map(Awaited::Verdict);
            } else {
                continue;
            };
            return self.decide(Verdict::Failed(trouble)).map(Awaited::Verdict);
        }
    }

    /// Reads the new cards of those whose processes this one can see, so that every rank notices the death of its
    /// neighbours, also that of rank 0.
    fn look_around(&self, seen: &mut Seen) -> Result<()> {
        let Some(sight) = self.me.place.sight() else { return Ok(()) };
        let lost = |error| self.lost_store(error);
        let count = self.store().get(&near_key(sight)).map_err(lost)?;
        let count = String::from_utf8_lossy(&count).parse().unwrap_or(0).min(self.world as i64);
        let news: Vec<i64> = (1..=count).filter(|number| !seen.read.contains(number)).collect();
        let keys: Vec<String> = news.iter().map(|&number| near_card_key(sight, number)).collect();
        for (index, bytes) in self.present(&keys).map_err(lost)? {
            seen.read.insert(news[index]);
            // What does not parse, or has no right proof, is for rank 0 to judge.
            let card = self.notes.proved(&keys[index], &bytes).ok().map(Card::from_bytes);
            seen.cards.extend(card.and_then(Result::ok).and_then(Result::ok));
        }
        Ok(())
    }

    /// Those of some keys that are there, by their places in the list, with their values. Mostly all of them are.
    fn present(&self, keys: &[String]) -> Result<Vec<(usize, Vec<u8>)>> {
        let mut found = Vec::new();
        for (part, keys) in keys.chunks(CARDS).enumerate() {
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let first = part * CARDS;
            if self.store().check(&keys)? {
                found.extend(
                    self.store().multi_get(&keys)?.into_iter().enumerate().map(|(n, v)| (first + n, v)),
                );
                continue;
            }
            for (n, key) in keys.iter().enumerate() {
                if self.store().check(&[key])? {
                    found.push((first + n, self.store().get(key)?));
                }
            }
        }
        Ok(found)
    }

    /// The verdict, if there is one already.
    fn verdict(&self) -> Result<Option<Verdict>> {
        if !self.store().check(&[VERDICT]).map_err(|e| self.lost_store(e))? {
            return Ok(None);
        }
        let bytes = self.store().get(VERDICT).map_err(|e| self.lost_store(e))?;
        self.read(&bytes).map(Some)
    }

    /// The verdict from what lies in the store.
    fn read(&self, bytes: &[u8]) -> Result<Verdict> {
        match self.notes.proved(VERDICT, bytes) {
            Ok(bytes) => Verdict::from_bytes(bytes),
            Err(why) => Err(self.unproved(why, claimed(bytes))),
        }
    }

    /// The error of a verdict that does not count. A failure that it tells of may say who has no key, or another.
    fn unproved(&self, why: Unproved, claimed: &[u8]) -> Error {
        let error = self.notes.refuse(VERDICT, &self.me.to_string(), why);
        match (error, Verdict::from_bytes(claimed)) {
            (Error::Peer(mut fault), Ok(Verdict::Failed(says))) if why != Unproved::Wrong => {
                let says: String = says.to_string().chars().take(CLAIM).collect();
                fault.detail.push_str(&format!(". It says, without proof: {says}"));
                Error::Peer(fault)
            }
            (error, _) => error,
        }
    }

    /// Writes the verdict, unless somebody has; gives the one that counts.
    fn decide(&self, verdict: Verdict) -> Result<Verdict> {
        let bytes = self.notes.seal(VERDICT, &verdict.to_bytes());
        let there = self.store().compare_set(VERDICT, &[], &bytes);
        match there {
            Ok(there) if there == bytes => Ok(verdict),
            Ok(there) => self.read(&there),
            // The store is gone with whoever served it; our own finding is as good as any.
            Err(_) if matches!(verdict, Verdict::Failed(..)) => Ok(verdict),
            Err(error) => Err(self.lost_store(error)),
        }
    }

    /// The time is up: one rank finds out who is missing, and the others hear it.
    fn give_up_waiting(&self) -> Result<Verdict> {
        let first = self.store().add(ASKED, 1).map_err(|e| self.lost_store(e))? == 1;
        if !first && let Ok(bytes) = self.store().get_by(VERDICT, Deadline::after(FINDING)) {
            return self.read(&bytes);
        }
        self.decide(Verdict::Failed(self.missing()))
    }

    /// Why the group is not complete when the time is up: cards that contradict each other, or ranks without one.
    fn missing(&self) -> Error {
        let handed_in = match self.handed_in() {
            Ok(cards) => cards,
            Err(error) => return self.lost_store(error),
        };
        let mut cards: Vec<Card> = Vec::new();
        for (key, bytes) in handed_in {
            match self.check(&key, &bytes, &cards) {
                Ok(card) => cards.push(card),
                Err(error) => return error,
            }
        }
        let here = |rank| cards.iter().any(|card| card.member.rank == rank);
        let absent: Vec<usize> = (0..self.world).filter(|&rank| !here(rank)).collect();
        let text = format!("{} missing; {} of {} are here", ranks(&absent), cards.len(), self.world);
        Error::timed_out("forming a group", self.timeout, text).about(absent)
    }

    /// All cards that have been handed in.
    fn handed_in(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let joined = usize::try_from(self.store().add(JOINED, 0)?).unwrap_or(0).min(self.world);
        let keys: Vec<String> = (1..=joined).map(card_key).collect();
        Ok(self.present(&keys)?.into_iter().map(|(index, card)| (keys[index].clone(), card)).collect())
    }

    /// This process comes when all places are taken: who took its place? If the group has not formed yet, it cannot
    /// any more, for nobody knows which of the two is the right one.
    fn one_too_many(&self) -> Result<Verdict> {
        match self.verdict()? {
            Some(Verdict::Formed { members, .. }) => {
                let other = members.get(self.me.rank);
                let error = other.map_or_else(|| misfit(self.no_place()), |other| twice(other, self.me));
                return Ok(Verdict::Failed(error));
            }
            Some(failed) => return Ok(failed),
            None => {}
        }
        let cards = self.handed_in().map_err(|e| self.lost_store(e))?;
        let cards = cards.iter().filter_map(|(key, bytes)| self.notes.proved(key, bytes).ok());
        let cards = cards.filter_map(|bytes| Card::from_bytes(bytes).ok().and_then(Result::ok));
        let members: Vec<Member> = cards.map(|card| card.member).collect();
        let other = members.iter().find(|other| other.rank == self.me.rank);
        let error = other.map_or_else(|| misfit(self.no_place()), |other| twice(other, self.me));
        self.decide(Verdict::Failed(error.clone())).map(|verdict| match verdict {
            Verdict::Formed { .. } => Verdict::Failed(error),
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
    fn accept(&self, id: Id, secret: Option<Secret>, members: Vec<Member>) -> Result<Roster> {
        let world = members.len();
        if world != self.world {
            let text =
                format!("the group has {world} ranks; this process was told a world of {}", self.world);
            return Err(Error::peer(PeerFaultKind::Incompatible, "rank 0", Some(0), text));
        }
        let mine = &members[self.me.rank];
        if mine.identity != self.me.identity {
            let text = format!("it has the place of rank {} that this process was given too", mine.rank);
            return Err(Error::peer(PeerFaultKind::Incompatible, mine.to_string(), Some(mine.rank), text));
        }
        let secret = match (secret, self.notes.proofs()) {
            (Some(secret), None) => secret,
            (None, Some(proofs)) => proofs.secret_of(id, members.iter().map(|member| member.identity)),
            _ => {
                let text = "its verdict has a secret where the job has a key, or none where it has not";
                return Err(Error::peer(PeerFaultKind::Misbehaved, "rank 0", Some(0), text));
            }
        };
        Ok(Roster { id, secret, members })
    }

    fn store(&self) -> &Arc<dyn Store> {
        &self.notes.store
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
    /// The numbers of those among the processes that it can see.
    read: HashSet<i64>,
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
pub(crate) fn spoil(notes: &Notes, error: &Error) {
    let _ = notes.set(VERDICT, &Verdict::Failed(error.clone()).to_bytes());
}

/// Removes what a group that has formed needs no more. Tickets stay, and the verdict becomes an answer to
/// latecomers: the secret does not stay in the store.
pub(crate) fn tidy(notes: &Notes, roster: &Roster, hosts: &[Vec<usize>]) -> Result<()> {
    let world = roster.members.len();
    let text = format!(
        "{world} ranks have formed it under this name already, {} leads it; give the new one another name or store (a file that an earlier run left may be removed)",
        roster.members[0]
    );
    notes.set(VERDICT, &Verdict::Failed(misfit(text)).to_bytes())?;
    let mut near: HashMap<Id, i64> = HashMap::new();
    roster.members.iter().filter_map(|member| member.place.sight()).for_each(|sight| {
        *near.entry(sight).or_default() += 1;
    });
    let of_sight =
        |(sight, count)| (1..=count).map(move |n| near_card_key(sight, n)).chain([near_key(sight)]);
    let cards = (1..=world).map(card_key).chain(near.into_iter().flat_map(of_sight));
    for key in cards.chain(super::same_host::keys(&roster.members, hosts)) {
        notes.store.delete(&key)?;
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

fn near_key(sight: Id) -> String {
    format!("near/{sight}")
}

fn near_card_key(sight: Id, number: i64) -> String {
    format!("near/{sight}/{number}")
}

/// Says that a group cannot be, because a rank was interrupted on its way there.
pub(crate) fn give_up(notes: &Notes, error: &Error, me: &Member) {
    let verdict = Verdict::Failed(report::as_seen_by_others(error, me));
    interrupt::without(|| forestall(notes, &verdict));
}

/// Says that a group cannot be, for a process that does not come so far as to meet the others.
pub(crate) fn refuse(notes: &Notes, text: String) {
    forestall(notes, &Verdict::Failed(misfit(text)));
}

fn forestall(notes: &Notes, verdict: &Verdict) {
    let _ = notes.store.compare_set(VERDICT, &[], &notes.seal(VERDICT, &verdict.to_bytes()));
}
