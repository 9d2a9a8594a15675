//! Groups that span hosts. The leader of each host talks with the hub, over a trunk that all groups of the two processes share
//! (see [`crate::link::trunk`]). The hub is rank 0.
//!
//! What they say is a kind (u8) and a body:
//!
//! | kind | body | meaning |
//! |---|---|---|
//! | FAIL | code, note | the group has failed; the hub passes it on |
//! | ARRIVE | count | all ranks of the sender's host have come to barrier `count` |
//! | RELEASE | count | all hosts have |
//! | ADDRESS | rank, text | where a rank of the sender's host is reached; the hub passes it on. All come before the first RELEASE |
//! | GONE | rank | a rank of the sender's host has closed the group; the hub passes it on |
//! | REFUSE | number, refusal | the sender's host cannot go on in an operation |
//! | ASK | number | the hub asks who has not come to an operation |
//! | ABSENT | number, ranks | those of the sender's host |
//! | VERDICT | number, refusal | the hub has decided: no host goes on in the operation |
//!
//! Several hosts may refuse an operation at once, for different reasons. The word of the hub decides, so that all ranks get the same
//! error. Where time was over somewhere, it first asks all hosts who has not come: their watchers know, whatever their ranks do. If
//! one does not answer soon ([`AGREE`]), it decides without it. Of several refusals one for another reason counts, and then that of
//! the first host.
//!
//! A leader that closes the group parts. A trunk that ends before that means that the leader died. A leader that says nothing
//! for the configured time counts as dead, too. A connection alone proves nothing: a forked worker, or a host that lost its
//! power, keeps it open.

use std::collections::VecDeque;
use std::time::Instant;

use tensorwire_device::secret::Id;

use crate::error::Result;
use crate::link::trunk::{End, Number, Trunks};
use crate::shm::control::{Cause, Control, Failure, Note};
use crate::shm::decided::{self, AGREE, Refusal};
use crate::wire::{Reader, Writer};

const FAIL: u8 = 2;
const ARRIVE: u8 = 4;
const RELEASE: u8 = 5;
const ADDRESS: u8 = 6;
const GONE: u8 = 7;
const REFUSE: u8 = 8;
const VERDICT: u8 = 9;
const ASK: u8 = 10;
const ABSENT: u8 = 11;

/// Of so many operations the hub knows what it has decided.
const REMEMBERED: usize = 64;

/// What a leader shares with others of its group.
#[derive(Debug)]
pub(crate) struct Star {
    group: Id,
    hub: bool,
    links: Vec<Link>,
    /// Whether the failure of this group has been told to the others.
    told: bool,
    /// The barrier that this host's ranks have come to.
    arrived: u32,
    /// The barrier that all have come to.
    released: u32,
    /// A leader that has closed the group.
    left: Option<usize>,
    /// Whether the addresses of this host's ranks have been told.
    introduced: bool,
    /// Ranks of this host that have closed the group, as the others were told.
    gone: Vec<usize>,
    /// At the hub: operations that hosts have refused, and what was decided about the last ones.
    trials: Vec<Trial>,
    decided: VecDeque<(u32, Refusal)>,
}

/// An operation that hosts have refused.
#[derive(Debug)]
struct Trial {
    number: u32,
    since: Instant,
    /// By the leader of the host.
    refusals: Vec<(usize, Refusal)>,
    /// Who has not come, as each host knows it, by its leader.
    absent: Vec<(usize, Note)>,
}

impl Trial {
    /// What holds for all.
    fn outcome(self) -> Option<Refusal> {
        let best = self.refusals.into_iter().min_by_key(|(leader, refusal)| (refusal.late, *leader));
        let (_, mut refusal) = best?;
        let mut absent: Vec<usize> = self.absent.iter().flat_map(|(_, note)| &note.ranks).copied().collect();
        absent.sort_unstable();
        // Who waited for just these knows more of them.
        if refusal.late && !absent.is_empty() && absent != refusal.note.ranks {
            let names: Vec<&str> = self.absent.iter().map(|(_, note)| &*note.text).collect();
            let names: Vec<&str> = names.into_iter().filter(|text| !text.is_empty()).collect();
            let have = if absent.len() == 1 { "has" } else { "have" };
            let text = format!("{} {have} not come to it", names.join(", "));
            refusal.note = Note { ranks: absent, text };
        }
        Some(refusal)
    }
}

/// The way to one other leader.
#[derive(Debug)]
pub(crate) struct Link {
    trunk: Number,
    rank: usize,
    arrived: u32,
    open: bool,
}

impl Link {
    pub(super) fn new(trunk: Number, rank: usize) -> Self {
        Self { trunk, rank, arrived: 0, open: true }
    }
}

impl Star {
    pub(crate) fn new(group: Id, hub: bool, links: Vec<Link>) -> Self {
        Self {
            group,
            hub,
            links,
            told: false,
            arrived: 0,
            released: 0,
            left: None,
            introduced: false,
            gone: Vec::new(),
            trials: Vec::new(),
            decided: VecDeque::new(),
        }
    }

    /// This host cannot go on in an operation.
    pub(super) fn refuse(
        &mut self,
        number: u32,
        refusal: Refusal,
        control: &Control,
        (trunks, now): (&mut Trunks, Instant),
    ) {
        if self.hub {
            let own = control.ranks().first().copied().unwrap_or(0);
            self.weigh((own, number, refusal), control, (trunks, now));
        } else {
            self.tell(trunks, &words(REFUSE, number, &refusal));
        }
    }

    /// What is due: operations of this host that its ranks have given up before their leader came, and decisions.
    pub(super) fn judge(&mut self, control: &Control, (trunks, now): (&mut Trunks, Instant)) {
        if let Some((number, refusal)) = control.decided.given_up(control) {
            self.refuse(number, refusal, control, (trunks, now));
        }
        self.decide(control, (trunks, now));
    }

    /// When the hub decides, if nothing more is said.
    pub(super) fn due(&self) -> Option<Instant> {
        self.trials.iter().map(|trial| trial.since + AGREE).min()
    }

    /// A host (by its leader) has refused an operation.
    fn weigh(
        &mut self,
        (leader, number, refusal): (usize, u32, Refusal),
        control: &Control,
        (trunks, now): (&mut Trunks, Instant),
    ) {
        if self.decided.iter().any(|(known, _)| *known == number) {
            return;
        }
        let known = self.trials.iter().position(|trial| trial.number == number);
        let at = known.unwrap_or_else(|| {
            let own = control.ranks().first().copied().unwrap_or(0);
            let absent = vec![(own, decided::absent(control, number))];
            self.trials.push(Trial { number, since: now, refusals: Vec::new(), absent });
            if refusal.late {
                self.tell(trunks, &frame(ASK, |body| body.u32(number)));
            }
            self.trials.len() - 1
        });
        self.trials[at].refusals.push((leader, refusal));
        self.decide(control, (trunks, now));
    }

    fn decide(&mut self, control: &Control, (trunks, now): (&mut Trunks, Instant)) {
        let hosts = 1 + self.links.iter().filter(|link| link.open).count();
        let is_due = |trial: &Trial| {
            let knows = trial.refusals.iter().any(|(_, refusal)| !refusal.late);
            knows || trial.absent.len() >= hosts || now.saturating_duration_since(trial.since) >= AGREE
        };
        while let Some(at) = self.trials.iter().position(is_due) {
            let trial = self.trials.swap_remove(at);
            let number = trial.number;
            let Some(refusal) = trial.outcome() else { continue };
            self.tell(trunks, &words(VERDICT, number, &refusal));
            trunks.flush();
            control.decided.put(number, refusal.clone(), control);
            self.decided.push_back((number, refusal));
            self.decided.drain(..self.decided.len().saturating_sub(REMEMBERED));
        }
    }

    /// All ranks of this host have come to barrier `count`.
    pub(super) fn arrive(&mut self, count: u32, control: &Control, trunks: &mut Trunks) {
        self.arrived = count;
        // All ranks of this host have written down where they are reached.
        if !std::mem::replace(&mut self.introduced, true) {
            for &rank in control.ranks() {
                let address = control.address(rank);
                self.tell(trunks, &frame(ADDRESS, |body| body.u32(rank as u32).bytes(address.as_bytes())));
            }
        }
        if self.hub {
            self.release(control, trunks);
        } else {
            self.tell(trunks, &frame(ARRIVE, |body| body.u32(count)));
        }
        self.check_left(control);
    }

    /// Leaders whose hosts have not come to the barrier that this host waits in.
    pub(super) fn absent(&self) -> Vec<usize> {
        let late = |link: &&Link| self.hub && link.arrived != self.arrived;
        self.links.iter().filter(late).map(|link| link.rank).collect()
    }

    fn tell_failure(&mut self, control: &Control, trunks: &mut Trunks) {
        if let Some(failure) = control.failure().filter(|_| !self.told) {
            self.told = true;
            let words = control.words_of(failure.rank);
            let note = match (failure.cause, words) {
                (Cause::Died | Cause::Left, Some(words)) => words.line(failure.cause),
                _ => control.note(failure),
            };
            self.tell(trunks, &frame(FAIL, |body| body.u32(failure.to_code()).bytes(note.as_bytes())));
        }
    }

    /// Tells whether the group has failed, and which ranks of this host have closed it since the last time. Why a rank leaves
    /// comes first, or the others would think that its leaving is the reason. It failed the group before it closed it, so
    /// whoever has seen that it closed sees the failure, too.
    pub(super) fn tell_news(&mut self, control: &Control, trunks: &mut Trunks) {
        let places = 0..control.ranks().len();
        let closed = places.filter(|&place| control.has_closed(place)).map(|place| control.ranks()[place]);
        let new: Vec<usize> = closed.filter(|rank| !self.gone.contains(rank)).collect();
        self.tell_failure(control, trunks);
        for rank in new {
            self.gone.push(rank);
            self.tell(trunks, &frame(GONE, |body| body.u32(rank as u32)));
        }
    }

    /// The hub passes on what a leader says of a rank of its host.
    fn pass_on(&self, from: usize, frame: &[u8], trunks: &mut Trunks) {
        let others = self.links.iter().enumerate();
        let others = others.filter(|(index, link)| self.hub && *index != from && link.open);
        others.for_each(|(_, link)| trunks.say(link.trunk, self.group, frame));
    }

    /// A leader has said something.
    pub(super) fn hear(&mut self, trunk: Number, bytes: &[u8], control: &Control, trunks: &mut Trunks) {
        let Some(index) = self.index_of(trunk) else { return };
        if let Err(error) = self.handle(index, bytes, control, (trunks, Instant::now())) {
            let rank = self.links[index].rank;
            tracing::error!("rank {rank} on another host sent nonsense ({error}); it is not heard any more");
            self.lost(index, Cause::Misbehaved, control);
        }
    }

    /// A leader has closed the group.
    pub(super) fn parted(&mut self, trunk: Number, control: &Control) {
        if let Some(index) = self.index_of(trunk) {
            self.links[index].open = false;
            self.left = Some(self.links[index].rank);
            self.check_left(control);
        }
    }

    /// The trunk to a leader is gone.
    pub(super) fn ended(&mut self, trunk: Number, end: End, control: &Control) {
        let cause = match end {
            End::Lost => Cause::Died,
            End::Silent => Cause::Silent,
            End::Nonsense => Cause::Misbehaved,
        };
        if let Some(index) = self.index_of(trunk) {
            self.lost(index, cause, control);
        }
    }

    fn index_of(&self, trunk: Number) -> Option<usize> {
        self.links.iter().position(|link| link.trunk == trunk && link.open)
    }

    fn handle(
        &mut self,
        index: usize,
        bytes: &[u8],
        control: &Control,
        (trunks, now): (&mut Trunks, Instant),
    ) -> Result<()> {
        let mut body = Reader::new(bytes);
        match body.u8()? {
            FAIL => {
                let failure = Failure::from_code(body.u32()?);
                let note = body.text()?;
                control.fail(failure, &note);
                // Before anything else that this leader says is passed on.
                self.tell_failure(control, trunks);
            }
            ARRIVE if self.hub => {
                self.links[index].arrived = body.u32()?;
                self.release(control, trunks);
            }
            RELEASE if !self.hub => {
                self.released = body.u32()?;
                control.release().signal(self.released);
            }
            ADDRESS => {
                let (rank, address) = (body.u32()?, body.text()?);
                if control.has_place(rank as usize) {
                    return Err(crate::wire::bad("the address of a rank of this host"));
                }
                control.set_address(rank as usize, &address)?;
                self.pass_on(index, bytes, trunks);
            }
            GONE => {
                let rank = body.u32()?;
                control.far_left(rank as usize)?;
                self.pass_on(index, bytes, trunks);
            }
            kind @ (REFUSE | VERDICT) if self.hub == (kind == REFUSE) => {
                let (number, refusal) = (body.u32()?, body.bytes()?);
                let refusal = Refusal::from_bytes(refusal, control.world());
                let refusal = refusal.ok_or_else(|| crate::wire::bad("a refusal that is none"))?;
                if kind == VERDICT {
                    control.decided.put(number, refusal, control);
                } else if let Some((_, decided)) = self.decided.iter().find(|(known, _)| *known == number) {
                    // It may have been told before that host could keep it.
                    let link = &self.links[index];
                    trunks.say(link.trunk, self.group, &words(VERDICT, number, decided));
                } else {
                    let rank = self.links[index].rank;
                    self.weigh((rank, number, refusal), control, (trunks, now));
                }
            }
            ASK if !self.hub => {
                let number = body.u32()?;
                let Note { ranks, text } = decided::absent(control, number);
                let note = Note::write(&ranks, &text);
                self.tell(trunks, &frame(ABSENT, |body| body.u32(number).bytes(note.as_bytes())));
            }
            ABSENT if self.hub => {
                let (number, note) = (body.u32()?, Note::read(&body.text()?));
                if note.ranks.iter().any(|&rank| rank >= control.world()) {
                    return Err(crate::wire::bad("a rank that is none"));
                }
                let rank = self.links[index].rank;
                if let Some(trial) = self.trials.iter_mut().find(|trial| trial.number == number)
                    && !trial.absent.iter().any(|(other, _)| *other == rank)
                {
                    trial.absent.push((rank, note));
                }
                self.decide(control, (trunks, now));
            }
            _ => return Err(crate::wire::bad("an unknown kind")),
        }
        Ok(())
    }

    /// The hub lets everybody go once all hosts have come to the same barrier.
    fn release(&mut self, control: &Control, trunks: &mut Trunks) {
        let all = self.links.iter().all(|link| link.arrived == self.arrived);
        if all && self.arrived != self.released {
            self.released = self.arrived;
            self.tell(trunks, &frame(RELEASE, |body| body.u32(self.released)));
            trunks.flush();
            control.release().signal(self.released);
        }
    }

    /// A barrier that a host has left cannot end.
    fn check_left(&self, control: &Control) {
        if let Some(rank) = self.left.filter(|_| self.arrived != self.released) {
            control.fail(Failure { cause: Cause::Left, rank }, "");
        }
    }

    fn lost(&mut self, index: usize, cause: Cause, control: &Control) {
        self.links[index].open = false;
        control.fail(Failure { cause, rank: self.links[index].rank }, "");
    }

    fn tell(&self, trunks: &mut Trunks, frame: &[u8]) {
        for link in self.links.iter().filter(|link| link.open) {
            trunks.say(link.trunk, self.group, frame);
        }
    }
}

fn frame(kind: u8, body: impl FnOnce(Writer) -> Writer) -> Vec<u8> {
    body(Writer::new().u8(kind)).finish()
}

fn words(kind: u8, number: u32, refusal: &Refusal) -> Vec<u8> {
    frame(kind, |body| body.u32(number).bytes(&refusal.to_bytes()))
}

/// What arrives is understood or refused.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz(data: &[u8]) {
    let mut body = Reader::new(data);
    if body.u8().is_ok_and(|kind| kind == FAIL) {
        let _ = body.u32().map(|code| Failure::from_code(code).to_code());
    }
    let _ = body.text();
}

#[cfg(test)]
mod tests;
