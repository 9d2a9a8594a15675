//! Groups that span hosts. The leader of each host has one TCP connection to the hub. The hub is rank 0.
//!
//! Frames are a length (u32), a kind (u8) and a body:
//!
//! | kind | body | meaning |
//! |---|---|---|
//! | BEAT | | the sender's watcher is alive |
//! | FAIL | code, note | the group has failed; the hub passes it on |
//! | LEAVE | | the sender has closed the group; the connection ends |
//! | ARRIVE | count | all ranks of the sender's host have come to barrier `count` |
//! | RELEASE | count | all hosts have |
//! | ADDRESS | rank, text | where a rank of the sender's host is reached; the hub passes it on. All come before the first RELEASE |
//! | GONE | rank | a rank of the sender's host has closed the group; the hub passes it on |
//!
//! A connection that ends without LEAVE means that the leader died. A leader that says nothing for the configured
//! time counts as dead, too. A connection alone proves nothing: a forked worker, or a host that lost its power,
//! keeps it open.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tensorwire_device::Deadline;
use tensorwire_device::fd::{Received, Stream};
use tensorwire_device::secret::Id;

use crate::error::{Error, Result};
use crate::interrupt;
use crate::link::Fault;
use crate::link::line::TcpLine;
use crate::link::meet::{self, Domain, Stranger};
use crate::shm::control::{Cause, Control, Failure};
use crate::wire::{Reader, Writer};

const BEAT: u8 = 1;
const FAIL: u8 = 2;
const LEAVE: u8 = 3;
const ARRIVE: u8 = 4;
const RELEASE: u8 = 5;
const ADDRESS: u8 = 6;
const GONE: u8 = 7;

/// The longest frame after the handshake.
const MAX_BODY: usize = 4096;
/// A leader that does not read for so long that this much is waiting is as good as silent.
const MAX_WAITING: usize = 1 << 20;

/// A leader's connections to other hosts.
#[derive(Debug)]
pub(crate) struct Star {
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
    last_beat: Option<Instant>,
}

/// The connection to one other leader.
#[derive(Debug)]
pub(crate) struct Link {
    line: TcpLine,
    rank: usize,
    input: Vec<u8>,
    output: VecDeque<u8>,
    /// When the last bytes came. Nothing while its leader has said nothing: until all leaders have come, the hub is busy with
    /// them.
    heard: Option<Instant>,
    arrived: u32,
    open: bool,
}

impl Star {
    pub(crate) fn new(hub: bool, links: Vec<Link>) -> Self {
        Self {
            hub,
            links,
            told: false,
            arrived: 0,
            released: 0,
            left: None,
            introduced: false,
            gone: Vec::new(),
            last_beat: None,
        }
    }

    pub(super) fn sources(&self) -> impl Iterator<Item = Arc<Stream>> {
        self.links.iter().filter(|link| link.open).map(|link| link.line.stream().clone())
    }

    /// All ranks of this host have come to barrier `count`.
    pub(super) fn arrive(&mut self, count: u32, control: &Control) {
        self.arrived = count;
        // All ranks of this host have written down where they are reached.
        if !std::mem::replace(&mut self.introduced, true) {
            for &rank in control.ranks() {
                let address = control.address(rank);
                self.tell(&frame(ADDRESS, |body| body.u32(rank as u32).bytes(address.as_bytes())));
            }
        }
        if self.hub {
            self.release(control);
        } else {
            self.tell(&frame(ARRIVE, |body| body.u32(count)));
        }
        self.check_left(control);
    }

    /// Leaders whose hosts have not come to the barrier that this host waits in.
    pub(super) fn absent(&self) -> Vec<usize> {
        let late = |link: &&Link| self.hub && link.arrived != self.arrived;
        self.links.iter().filter(late).map(|link| link.rank).collect()
    }

    pub(super) fn leave(&mut self, control: Option<&Control>) {
        if let Some(control) = control {
            self.tell_news(control);
        }
        // What the others have just said of their ranks is passed on before.
        for index in 0..self.links.len() {
            while let Some((kind, body)) = self.links[index].next_frame(Instant::now()) {
                match (kind, control) {
                    (ENDED | 0, _) => break,
                    (FAIL | GONE, Some(control)) => self.handle(index, kind, &body, control),
                    _ => {}
                }
            }
        }
        self.tell(&frame(LEAVE, |body| body));
        for link in &mut self.links {
            link.flush();
            // Closing with unread bytes resets the connection, and the farewell might be lost with it.
            while link.next_frame(Instant::now()).is_some_and(|(kind, _)| kind != ENDED && kind != 0) {}
        }
    }

    /// Reads, tells, beats, and notices silence.
    pub(super) fn look_after(&mut self, control: &Control, patience: Duration, now: Instant) {
        for index in 0..self.links.len() {
            while let Some((kind, body)) = self.links[index].next_frame(now) {
                self.handle(index, kind, &body, control);
            }
        }
        for index in 0..self.links.len() {
            let link = &mut self.links[index];
            let silent = link.heard.is_some_and(|heard| now.saturating_duration_since(heard) > patience);
            if link.open && (silent || link.output.len() > MAX_WAITING) {
                link.open = false;
                self.lost(index, Cause::Silent, control);
            }
        }
        self.tell_news(control);
        let pause = (patience / 5).min(Duration::from_millis(500));
        if self.last_beat.is_none_or(|last| now.saturating_duration_since(last) >= pause) {
            self.last_beat = Some(now);
            self.tell(&frame(BEAT, |body| body));
        }
        for link in &mut self.links {
            link.flush();
        }
    }

    fn tell_failure(&mut self, control: &Control) {
        if let Some(failure) = control.failure().filter(|_| !self.told) {
            self.told = true;
            let words = control.words_of(failure.rank);
            let note = match (failure.cause, words) {
                (Cause::Died | Cause::Left, Some(words)) => words.line(failure.cause),
                _ => control.note(failure),
            };
            self.tell(&frame(FAIL, |body| body.u32(failure.to_code()).bytes(note.as_bytes())));
        }
    }

    /// Tells whether the group has failed, and which ranks of this host have closed it since the last time. Why a rank leaves
    /// comes first, or the others would think that its leaving is the reason. It failed the group before it closed it, so
    /// whoever has seen that it closed sees the failure, too.
    fn tell_news(&mut self, control: &Control) {
        let places = 0..control.ranks().len();
        let closed = places.filter(|&place| control.has_closed(place)).map(|place| control.ranks()[place]);
        let new: Vec<usize> = closed.filter(|rank| !self.gone.contains(rank)).collect();
        self.tell_failure(control);
        for rank in new {
            self.gone.push(rank);
            self.tell(&frame(GONE, |body| body.u32(rank as u32)));
        }
    }

    /// The hub passes on what a leader says of a rank of its host.
    fn pass_on(&mut self, from: usize, frame: &[u8]) {
        let others =
            self.links.iter_mut().enumerate().filter(|(index, link)| self.hub && *index != from && link.open);
        others.for_each(|(_, link)| link.output.extend(frame));
    }

    fn handle(&mut self, index: usize, kind: u8, body: &[u8], control: &Control) {
        let mut body = Reader::new(body);
        let rank = self.links[index].rank;
        let understood: Result<()> = (|| {
            match kind {
                BEAT => {}
                FAIL => {
                    let failure = Failure::from_code(body.u32()?);
                    let note = body.text()?;
                    control.fail(failure, &note);
                    // Before anything else that this leader says is passed on.
                    self.tell_failure(control);
                }
                LEAVE => {
                    self.links[index].open = false;
                    self.left = Some(rank);
                    self.check_left(control);
                }
                ARRIVE if self.hub => {
                    self.links[index].arrived = body.u32()?;
                    self.release(control);
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
                    self.pass_on(index, &frame(ADDRESS, |body| body.u32(rank).bytes(address.as_bytes())));
                }
                GONE => {
                    let rank = body.u32()?;
                    control.far_left(rank as usize)?;
                    self.pass_on(index, &frame(GONE, |body| body.u32(rank)));
                }
                ENDED => {
                    self.links[index].open = false;
                    self.lost(index, Cause::Died, control);
                }
                _ => return Err(crate::wire::bad("an unknown kind")),
            }
            Ok(())
        })();
        if let Err(error) = understood {
            tracing::error!("rank {rank} on another host sent nonsense ({error}); its connection is closed");
            self.links[index].open = false;
            self.lost(index, Cause::Misbehaved, control);
        }
    }

    /// The hub lets everybody go once all hosts have come to the same barrier.
    fn release(&mut self, control: &Control) {
        let all = self.links.iter().all(|link| link.arrived == self.arrived);
        if all && self.arrived != self.released {
            self.released = self.arrived;
            self.tell(&frame(RELEASE, |body| body.u32(self.released)));
            for link in &mut self.links {
                link.flush();
            }
            control.release().signal(self.released);
        }
    }

    /// A barrier that a host has left cannot end.
    fn check_left(&self, control: &Control) {
        if let Some(rank) = self.left.filter(|_| self.arrived != self.released) {
            control.fail(Failure { cause: Cause::Left, rank }, "");
        }
    }

    fn lost(&self, index: usize, cause: Cause, control: &Control) {
        control.fail(Failure { cause, rank: self.links[index].rank }, "");
    }

    fn tell(&mut self, frame: &[u8]) {
        for link in self.links.iter_mut().filter(|link| link.open) {
            link.output.extend(frame);
        }
    }
}

/// Not on the wire: what `next_frame` gives when the other side is gone.
const ENDED: u8 = 255;

impl Link {
    fn new(line: TcpLine, rank: usize) -> Self {
        let (input, output) = (Vec::new(), VecDeque::new());
        Self { line, rank, input, output, heard: None, arrived: 0, open: true }
    }

    /// The next whole frame that has arrived.
    fn next_frame(&mut self, now: Instant) -> Option<(u8, Vec<u8>)> {
        loop {
            if !self.open {
                return None;
            }
            if let Some(frame) = take_frame(&mut self.input) {
                return Some(frame);
            }
            let mut bytes = [0; 4096];
            match self.line.recv_bytes(&mut bytes) {
                Ok(Received::Bytes(count)) => {
                    self.heard = Some(now);
                    self.input.extend(&bytes[..count]);
                }
                Ok(Received::Nothing) => return None,
                // As what nobody of ours sends.
                Err(Fault::Unsealed) => return Some((0, Vec::new())),
                Ok(Received::End) | Err(_) => return Some((ENDED, Vec::new())),
            }
        }
    }

    fn flush(&mut self) {
        while self.open && !self.output.is_empty() {
            let (head, _) = self.output.as_slices();
            match self.line.send(head, None, &[]) {
                Ok(count @ 1..) => drop(self.output.drain(..count)),
                // The next beat tries again; the read side notices an end.
                _ => return,
            }
        }
        let _ = self.line.flush();
    }
}

/// Takes a whole frame, if there is one; kind 0 stands for bytes that are none.
fn take_frame(input: &mut Vec<u8>) -> Option<(u8, Vec<u8>)> {
    let len = u32::from_le_bytes(*input.first_chunk::<4>()?) as usize;
    if len == 0 || len > MAX_BODY {
        return Some((0, Vec::new()));
    }
    let frame = input.get(4..4 + len)?.to_vec();
    input.drain(..4 + len);
    Some((frame[0], frame[1..].to_vec()))
}

/// Every frame moves on and is no longer than agreed.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz_link(data: &[u8]) {
    let mut input = data.to_vec();
    while let Some((kind, body)) = take_frame(&mut input) {
        assert!(body.len() < MAX_BODY);
        let mut body = Reader::new(&body);
        if kind == FAIL {
            let _ = body.u32().map(|code| Failure::from_code(code).to_code());
        }
        if kind == FAIL || kind == ADDRESS {
            let _ = body.text();
        }
        if kind == 0 {
            return;
        }
    }
}

fn frame(kind: u8, body: impl FnOnce(Writer) -> Writer) -> Vec<u8> {
    let body = body(Writer::new().u8(kind)).finish();
    Writer::new().bytes(&body).finish()
}

/// What both sides of forming a star need.
pub(crate) struct Meeting<'a> {
    pub(crate) domain: Domain,
    pub(crate) timeout: Duration,
    /// Fails when waiting has no sense any more.
    pub(crate) interrupted: &'a dyn Fn() -> Result<()>,
}

/// The hub's side of forming a star: accepts one connection from each of `leaders` (identity and rank).
pub(crate) fn gather(
    meeting: &Meeting<'_>,
    listener: &TcpListener,
    leaders: &[(Id, usize)],
    deadline: Deadline,
) -> Result<Vec<Link>> {
    let fail = |e: std::io::Error| Error::io("accepting connections of other hosts", e);
    listener.set_nonblocking(true).map_err(fail)?;
    let mut strangers: Vec<Stranger> = Vec::new();
    let mut links: Vec<Link> = Vec::new();
    while links.len() < leaders.len() {
        if deadline.passed() {
            let absent = leaders.iter().filter(|(_, rank)| links.iter().all(|link| link.rank != *rank));
            let absent: Vec<String> = absent.map(|(_, rank)| rank.to_string()).collect();
            let text = format!("the leaders of other hosts, ranks {}, have not connected", absent.join(", "));
            return Err(Error::timed_out("connecting the hosts of a group", meeting.timeout, text));
        }
        (meeting.interrupted)()?;
        let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
        fds.extend(strangers.iter().map(|stranger| PollFd::new(stranger.socket(), PollFlags::IN)));
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 25_000_000 }));
        interrupt::check()?;
        while let Ok((socket, _)) = listener.accept() {
            if strangers.len() < 1024 {
                strangers.extend(Stranger::new(socket));
            }
        }
        for mut stranger in std::mem::take(&mut strangers) {
            let domain = &meeting.domain;
            let terms_of = |asked| (asked == domain.id).then_some((domain.secret, domain.sealed));
            let rank_of = |who: Id| leaders.iter().find(|(id, _)| *id == who).map(|(_, rank)| *rank);
            let line = match stranger.step(domain.identity, &terms_of) {
                Ok(None) => {
                    strangers.extend((!stranger.is_late()).then_some(stranger));
                    continue;
                }
                Ok(Some((_, who))) => stranger.into_line().map(|line| (rank_of(who), line)),
                Err(error) => Err(error),
            };
            match line {
                Ok((rank, line)) => links.extend(rank.map(|rank| Link::new(line, rank))),
                Err(error) => tracing::warn!("a process of another host tried to connect: {error}"),
            }
        }
    }
    Ok(links)
}

/// A spoke's side: connects to the hub at one of its addresses.
pub(crate) fn reach(
    meeting: &Meeting<'_>,
    addresses: &[SocketAddr],
    hub: (Id, usize),
    deadline: Deadline,
) -> Result<Link> {
    let mut reasons: Vec<String> = vec![String::new(); addresses.len()];
    loop {
        for (address, reason) in addresses.iter().zip(&mut reasons) {
            match meet::reach(&meeting.domain, address, hub.0, deadline) {
                Ok(line) => return Ok(Link::new(line, hub.1)),
                Err(error) if interrupt::is_interrupt(&error) => return Err(error),
                // An attempt that ends with the deadline says less than one before it.
                Err(error) if error.is_timeout() && !reason.is_empty() => {}
                Err(error) => *reason = format!("{address}: {error}"),
            }
        }
        let pause = Duration::from_millis(100);
        if deadline.remaining().is_none_or(|left| left < pause) {
            let text = format!(
                "rank {} on another host could not be reached ({}); set TENSORWIRE_ADDRESS there to an address that \
                 this host reaches",
                hub.1,
                reasons.join("; ")
            );
            return Err(Error::timed_out("connecting the hosts of a group", meeting.timeout, text));
        }
        (meeting.interrupted)()?;
        interrupt::sleep(pause)?;
    }
}

#[cfg(test)]
mod tests;
