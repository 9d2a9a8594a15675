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
//!
//! A leader that closes the group parts. A trunk that ends before that means that the leader died. A leader that says nothing
//! for the configured time counts as dead, too. A connection alone proves nothing: a forked worker, or a host that lost its
//! power, keeps it open.

use tensorwire_device::secret::Id;

use crate::error::Result;
use crate::link::trunk::{End, Number, Trunks};
use crate::shm::control::{Cause, Control, Failure};
use crate::wire::{Reader, Writer};

const FAIL: u8 = 2;
const ARRIVE: u8 = 4;
const RELEASE: u8 = 5;
const ADDRESS: u8 = 6;
const GONE: u8 = 7;

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
        if let Err(error) = self.handle(index, bytes, control, trunks) {
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

    fn handle(&mut self, index: usize, bytes: &[u8], control: &Control, trunks: &mut Trunks) -> Result<()> {
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
