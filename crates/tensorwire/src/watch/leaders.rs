//! Other hosts: what is said on trunks finds its group, and the leaders of a group that forms find each other.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use tensorwire_device::Deadline;
use tensorwire_device::secret::{Id, digest};

use super::star::Link;
use super::{State, Watched, Watcher};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::link::line::TcpLine;
use crate::link::meet::{self, Domain};
use crate::link::trunk::{Number, Role, Trunks, What};
use crate::link::{Gate, Office, Sink};

/// How often a thread that waits for a leader looks whether it is interrupted.
const LOOK: Duration = Duration::from_millis(25);
/// How often it asks whether waiting still has sense, which is a question to the store; and between two attempts to reach a leader.
const PAUSE: Duration = Duration::from_millis(100);
/// What is kept for a group that forms is no more than this.
const MOST_EARLY: usize = 4 << 20;

/// A group that forms, as leaders of other hosts see it.
#[derive(Debug)]
pub(super) enum Forming {
    /// Nobody waits for leaders.
    Closed,
    /// The hub takes those that know the secret. The thread that forms the group hears who.
    Hub(Sender<(Id, Number)>),
    /// A leader has asked the hub. The thread that forms the group hears whether it may talk.
    Spoke(Sender<(Number, Answer)>),
}

/// What a leader hears that has asked the hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Joined,
    Refused,
    Lost,
}

/// What has come for a group that is not watched yet.
#[derive(Debug, Default)]
pub(super) struct Early {
    what: Vec<(Number, What)>,
    bytes: usize,
}

impl Watched {
    /// Brings something that has come on a trunk to where it belongs.
    fn bring(&mut self, trunk: Number, what: What, trunks: &mut Trunks) {
        match (&mut self.star, &self.control) {
            (Some(star), Some(control)) => match what {
                What::Said(_, bytes) => star.hear(trunk, &bytes, control, trunks),
                What::Parted(_) => star.parted(trunk, control),
                What::Ended(end, _) => star.ended(trunk, end, control),
                What::Asked(..) | What::Joined(..) | What::Refused(_) => {}
            },
            _ => self.early.keep(trunk, what),
        }
    }

    /// Brings what came before the group was watched.
    pub(super) fn catch_up(&mut self, trunks: &mut Trunks) {
        for (trunk, what) in std::mem::take(&mut self.early).what {
            self.bring(trunk, what, trunks);
        }
    }
}

impl Early {
    fn keep(&mut self, trunk: Number, what: What) {
        if let What::Said(_, bytes) = &what {
            self.bytes += bytes.len();
        }
        // No leader of ours says so much before the first barrier.
        if self.bytes <= MOST_EARLY {
            self.what.push((trunk, what));
        }
    }
}

impl State {
    /// Tells other hosts what has happened here, and notices their silence.
    pub(super) fn talk(&mut self, patience: Duration, now: Instant) {
        for watched in self.groups.values_mut() {
            if let Watched { star: Some(star), control: Some(control), .. } = watched {
                star.tell_news(control, &mut self.trunks);
                star.judge(control, (&mut self.trunks, now));
            }
        }
        while let Some((trunk, what)) = self.trunks.look_after(patience, now) {
            self.bring(trunk, what);
        }
        self.trunks.flush();
    }

    /// Reads what has come on a trunk.
    pub(super) fn listen(&mut self, trunk: Number, now: Instant) {
        while let Some(what) = self.trunks.hear(trunk, now) {
            self.bring(trunk, what);
        }
    }

    /// The same on all trunks.
    pub(super) fn listen_to_all(&mut self) {
        for trunk in self.trunks.numbers() {
            self.listen(trunk, Instant::now());
        }
    }

    fn bring(&mut self, trunk: Number, what: What) {
        let Self { groups, trunks, .. } = self;
        match what {
            What::Asked(group, proof) => {
                let Some(Watched { forming: Forming::Hub(heard), secret, .. }) = groups.get(&group) else {
                    return trunks.refuse(trunk, group);
                };
                if !trunks.proves(trunk, group, secret, Role::Asks, &proof) {
                    tracing::warn!(
                        "a process of another host asked for a group whose secret it does not know"
                    );
                    return trunks.refuse(trunk, group);
                }
                trunks.admit(trunk, group, secret);
                if let Some(peer) = trunks.peer(trunk) {
                    // If nobody waits any more, the group is about to be closed.
                    let _ = heard.send((peer, trunk));
                }
            }
            What::Joined(group, proof) => {
                let Some(watched) = groups.get(&group) else { return };
                let proved = trunks.proves(trunk, group, &watched.secret, Role::Answers, &proof);
                if proved {
                    trunks.joined(trunk, group);
                }
                watched.answer(trunk, if proved { Answer::Joined } else { Answer::Refused });
            }
            What::Refused(group) => {
                if let Some(watched) = groups.get(&group) {
                    watched.answer(trunk, Answer::Refused);
                }
            }
            What::Said(group, _) | What::Parted(group) => {
                if let Some(watched) = groups.get_mut(&group) {
                    watched.bring(trunk, what, trunks);
                }
            }
            What::Ended(end, in_groups) => {
                for group in in_groups {
                    let Some(watched) = groups.get_mut(&group) else { continue };
                    watched.answer(trunk, Answer::Lost);
                    watched.bring(trunk, What::Ended(end, Vec::new()), trunks);
                }
            }
        }
    }
}

impl Watched {
    fn answer(&self, trunk: Number, answer: Answer) {
        if let Forming::Spoke(heard) = &self.forming {
            let _ = heard.send((trunk, answer));
        }
    }
}

/// What both sides of forming a star need.
pub(crate) struct Meeting<'a> {
    pub(crate) watcher: &'a Watcher,
    pub(crate) office: &'a Arc<Office>,
    pub(crate) domain: Domain,
    pub(crate) timeout: Duration,
    /// Fails when waiting has no sense any more.
    pub(crate) interrupted: &'a dyn Fn() -> Result<()>,
}

/// A hub that lets leaders in, until it is dropped.
#[derive(Debug)]
pub(crate) struct Hub {
    _gate: Gate,
    heard: Receiver<(Id, Number)>,
}

impl Hub {
    /// From now on leaders can come.
    pub(crate) fn open(meeting: &Meeting<'_>) -> Result<Self> {
        let (to, heard) = channel();
        meeting.watcher.form(meeting.domain.id, Forming::Hub(to))?;
        let gate = Gate::open(meeting.office, trunk_domain(&meeting.domain), meeting.watcher.sink())?;
        Ok(Self { _gate: gate, heard })
    }

    /// Waits for each of `leaders` (identity and rank).
    pub(crate) fn gather(
        self,
        meeting: &Meeting<'_>,
        leaders: &[(Id, usize)],
        deadline: Deadline,
    ) -> Result<Vec<Link>> {
        let mut links: Vec<(usize, Number)> = Vec::new();
        while links.len() < leaders.len() {
            if deadline.passed() {
                let come = |rank: &usize| links.iter().any(|(other, _)| other == rank);
                let absent = leaders.iter().map(|(_, rank)| rank).filter(|rank| !come(rank));
                let absent: Vec<String> = absent.map(ToString::to_string).collect();
                let text =
                    format!("the leaders of other hosts, ranks {}, have not connected", absent.join(", "));
                return Err(Error::timed_out("connecting the hosts of a group", meeting.timeout, text));
            }
            let Some((who, trunk)) = hear(meeting, &self.heard)? else { continue };
            match leaders.iter().find(|(id, _)| *id == who) {
                // One whose connection broke before it heard the answer comes again.
                Some((_, rank)) => {
                    links.retain(|(other, _)| other != rank);
                    links.push((*rank, trunk));
                }
                None => {
                    tracing::warn!("a process of another host that leads no host of the group asked for it")
                }
            }
        }
        meeting.watcher.form(meeting.domain.id, Forming::Closed)?;
        Ok(links.into_iter().map(|(rank, trunk)| Link::new(trunk, rank)).collect())
    }
}

/// A spoke's side: reaches the hub at one of its addresses, or by a trunk that is there already.
pub(crate) fn reach(
    meeting: &Meeting<'_>,
    addresses: &[SocketAddr],
    hub: (Id, usize),
    deadline: Deadline,
) -> Result<Link> {
    let (to, heard) = channel();
    meeting.watcher.form(meeting.domain.id, Forming::Spoke(to))?;
    let mut reasons: Vec<String> = vec![String::new(); addresses.len()];
    loop {
        if let Some(trunk) = meeting.watcher.trunk_to(hub.0)?
            && join(meeting, &heard, trunk, deadline)? == Some(Answer::Joined)
        {
            return Ok(Link::new(trunk, hub.1));
        }
        for (address, reason) in addresses.iter().zip(&mut reasons) {
            let made = meet::reach(&trunk_domain(&meeting.domain), address, hub.0, deadline);
            let joined = made.and_then(|line| {
                let trunk = meeting.watcher.add_trunk(hub.0, line);
                Ok((trunk, join(meeting, &heard, trunk, deadline)?))
            });
            match joined {
                Ok((trunk, Some(Answer::Joined))) => return Ok(Link::new(trunk, hub.1)),
                Ok((_, Some(Answer::Refused))) => {
                    *reason = format!("{address}: it does not let this rank in")
                }
                Ok((_, Some(Answer::Lost))) => *reason = format!("{address}: it closed the connection"),
                Ok((_, None)) => {}
                Err(error) if interrupt::is_interrupt(&error) => return Err(error),
                // An attempt that ends with the deadline says less than one before it.
                Err(error) if error.is_timeout() && !reason.is_empty() => {}
                Err(error) => *reason = format!("{address}: {error}"),
            }
        }
        if deadline.remaining().is_none_or(|left| left < PAUSE) {
            let text = format!(
                "rank {} on another host could not be reached ({}); set TENSORWIRE_ADDRESS there to an address that \
                 this host reaches",
                hub.1,
                reasons.join("; ")
            );
            return Err(Error::timed_out("connecting the hosts of a group", meeting.timeout, text));
        }
        (meeting.interrupted)()?;
        interrupt::sleep(PAUSE)?;
    }
}

/// Asks the hub at the other end of a trunk. Gives nothing if it has not answered by the deadline.
fn join(
    meeting: &Meeting<'_>,
    heard: &Receiver<(Number, Answer)>,
    trunk: Number,
    deadline: Deadline,
) -> Result<Option<Answer>> {
    if !meeting.watcher.ask(trunk, &meeting.domain)? {
        return Ok(Some(Answer::Lost));
    }
    while !deadline.passed() {
        match hear(meeting, heard)? {
            Some((number, answer)) if number == trunk => return Ok(Some(answer)),
            _ => {}
        }
    }
    Ok(None)
}

/// What the watcher has to say, if it does so soon.
fn hear<T>(meeting: &Meeting<'_>, heard: &Receiver<T>) -> Result<Option<T>> {
    (meeting.interrupted)()?;
    let end = Instant::now() + PAUSE;
    while Instant::now() < end {
        match heard.recv_timeout(LOOK) {
            Ok(said) => return Ok(Some(said)),
            Err(RecvTimeoutError::Timeout) => interrupt::check()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::Aborted("the group was closed on this rank".into()));
            }
        }
    }
    Ok(None)
}

/// What the first group proves with whose leaders meet.
fn trunk_domain(group: &Domain) -> Domain {
    Domain {
        id: digest(&[b"trunk of ", &group.id.0[..]].concat()),
        secret: group.secret.derive("trunk", &[]),
        ..*group
    }
}

impl Watcher {
    /// What happens to leaders of other hosts that ask for a group, or have been asked.
    fn form(&self, group: Id, forming: Forming) -> Result<()> {
        let mut state = self.shared.lock();
        let watched = state.groups.get_mut(&group);
        watched.ok_or_else(|| Error::Aborted("the group was closed on this rank".into()))?.forming = forming;
        Ok(())
    }

    /// Takes charge of connections with processes of other hosts.
    fn sink(&self) -> Sink {
        let shared = self.shared.clone();
        Arc::new(move |peer, line| {
            shared.lock().trunks.add(peer, line, Instant::now());
            shared.ring();
        })
    }

    fn add_trunk(&self, peer: Id, line: TcpLine) -> Number {
        let number = self.shared.lock().trunks.add(peer, line, Instant::now());
        self.shared.ring();
        number
    }

    fn trunk_to(&self, peer: Id) -> Result<Option<Number>> {
        self.birth.check("the watcher")?;
        Ok(self.shared.lock().trunks.to(peer))
    }

    /// Wants to talk in a group. Gives false if the trunk is gone.
    fn ask(&self, trunk: Number, domain: &Domain) -> Result<bool> {
        self.birth.check("the watcher")?;
        let there = self.shared.lock().trunks.ask(trunk, domain.id, &domain.secret);
        self.shared.ring();
        Ok(there)
    }
}

#[cfg(test)]
mod tests;
