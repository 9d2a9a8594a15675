//! Going on without lost ranks: the ranks that call `shrink` form a new group.
//!
//! The store of the group may be gone with rank 0. So the ranks agree in the control region. Each shrink of a group
//! is an attempt with a number, from 1. Each attempt has two words. Each word is set once, by compare-and-swap:
//!
//! - The *decision* names the rank that decided. Before this rank sets the word, it writes into its roll which
//!   ranks go on, and where the new group meets: at a store that this rank serves.
//! - The *outcome* says whether that group was formed. It was formed if all ranks on the roll say so. Otherwise it
//!   was formed for none of them, not even for ranks that had already formed it. So no rank goes on in a group that
//!   another rank has given up.
//!
//! A rank writes into its desk ([`Desk::SHRINK`]) how far it is: four times the attempt, plus the [`Stage`].
//!
//! The lowest rank that has come decides. It does so when each of the others has come, has left or is dead, or when
//! the grace is over. If this rank dies before, the next rank decides. If it is silent, the next rank decides
//! without it after one more grace, and so on. It does no harm if two ranks decide, because only the first one sets
//! the word.
//!
//! | bytes of a roll | what |
//! |---|---|
//! | 0..4 | the attempt |
//! | 4..8 | the port of the store, or 0 if it is a file |
//! | 8..24 | the name of the file |
//! | 64.. | a bit for each rank: whether it goes on |

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorwire_device::fd::Address;
use tensorwire_device::flag::LINE;
use tensorwire_device::secret::Id;
use tensorwire_device::{Abort, Deadline, Flag};

use crate::error::{Error, PeerFaultKind, Result};
use crate::group::{Group, Origin, launch};
use crate::interrupt::{Pace, is_interrupt};
use crate::ranks::Ranks;
use crate::shm::control::{Desk, SHRINKS, Why};
use crate::shm::member::Member;
use crate::store::{FileStore, Store, TcpServer, TcpStore};
use crate::wire::{Reader, Writer};

/// How long ranks that are alive are waited for, where the caller does not say.
const GRACE: Duration = Duration::from_secs(5);
/// How much longer a rank waits for the decision of another one.
const TURN: Duration = Duration::from_secs(1);
/// How often a rank that waits looks around.
const LOOK: Duration = Duration::from_millis(5);
/// How long a death may take to be seen after what follows from it.
const SEEN: Duration = Duration::from_secs(1);

/// How far a rank is in an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It has given up waiting for a decision.
    Withdrawn,
    /// It waits for a decision, or forms the new group.
    Came,
    /// It has formed the new group.
    Formed,
}

impl Stage {
    fn of(self, attempt: u32) -> u32 {
        let stage = match self {
            Self::Withdrawn => 0,
            Self::Came => 1,
            Self::Formed => 2,
        };
        attempt * 4 + stage
    }
}

/// How an attempt has ended, for all who are in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// The new group is there.
    Formed,
    /// A rank that was to be in the new group is lost, so the others try again.
    Again,
    /// It could not be formed, for another reason.
    Failed,
}

impl Outcome {
    fn to_code(self) -> u32 {
        match self {
            Self::Formed => 1,
            Self::Again => 2,
            Self::Failed => 3,
        }
    }

    fn from_code(code: u32) -> Self {
        match code {
            1 => Self::Formed,
            2 => Self::Again,
            _ => Self::Failed,
        }
    }
}

/// What a rank remembers of the shrinks of its group.
#[derive(Debug, Default)]
pub(super) struct Shrinks {
    /// How many attempts are over.
    over: u32,
    /// The store of one that failed: others may still hear there why.
    _server: Option<Arc<TcpServer>>,
}

impl Group {
    /// Makes a new group after a failure, of the ranks that can go on. These are the ranks that call this. They
    /// keep their order. Ranks that are dead, have closed the group, or do not call this within 5 seconds are left
    /// out. A rank that comes later gets an error that names the ranks of the new group. If all ranks come, all go
    /// on.
    ///
    /// The old group stays as it is. A rank that waits in one of its operations does not hear of the shrink;
    /// [`abort`](Self::abort) tells it. The new group can use memory of [`alloc`](Self::alloc), too. If more ranks
    /// are lost meanwhile, the rest try again. After an error this can be called again. All ranks must be on one
    /// host.
    pub fn shrink(&self) -> Result<Self> {
        let deadline = Deadline::after(self.timeout());
        self.shrink_until(GRACE, deadline).map_err(|error| Why::GroupTimedOut.tell(error))
    }

    /// The same until a deadline.
    pub fn shrink_by(&self, deadline: Deadline) -> Result<Self> {
        self.shrink_within(GRACE, deadline)
    }

    /// The same, but ranks that are alive have the time `grace` to come.
    pub fn shrink_within(&self, grace: Duration, deadline: Deadline) -> Result<Self> {
        self.shrink_until(grace, deadline).map_err(|error| Why::CallTimedOut.tell(error))
    }

    fn shrink_until(&self, grace: Duration, deadline: Deadline) -> Result<Self> {
        let inner = self.ranks();
        inner.check_open()?;
        if inner.hosts.len() > 1 {
            return Err(Error::Unsupported {
                what: format!("shrinking the group {:?}", inner.name),
                need: "all its ranks on one host".into(),
                have: format!("ranks on {} hosts; form a new group through a store", inner.hosts.len()),
            });
        }
        let Ok(mut shrinks) = self.0.shrinks.try_lock() else {
            return Err(Error::misuse("another thread of this rank is in shrink() of the same group"));
        };
        loop {
            let attempt = shrinks.over + 1;
            if attempt as usize > SHRINKS {
                let text = format!("the group {:?} has been shrunk {SHRINKS} times", inner.name);
                return Err(Error::misuse(format!("{text}; shrink the groups that came of it")));
            }
            let attempt = Attempt::new(inner, attempt, grace, deadline)?;
            // Nothing came of it, so this rank may be in the next one, whether it was to be in this one or not.
            if attempt.outcome.code().is_some_and(|code| Outcome::from_code(code) != Outcome::Formed) {
                shrinks.over = attempt.number;
                continue;
            }
            attempt.enter(Stage::Came);
            let decision = attempt.agree()?;
            shrinks._server = decision.origin.as_ref().and_then(|origin| origin.server.clone());
            let (outcome, formed) = attempt.form(&decision);
            shrinks.over = attempt.number;
            match (outcome, formed) {
                (Outcome::Formed, Ok(group)) => {
                    shrinks._server = None;
                    group.ranks().memory.inherit(&inner.memory);
                    return Ok(group);
                }
                (_, Err(error)) if is_interrupt(&error) => return Err(error),
                (Outcome::Again, formed) => {
                    tracing::info!("{}: a rank was lost meanwhile; trying again", attempt.name());
                    drop(formed);
                }
                (_, Err(error)) => return Err(error),
                (_, Ok(_)) => return Err(attempt.elsewhere()),
            }
        }
    }
}

/// One rank's part in an attempt.
struct Attempt<'a> {
    inner: &'a Ranks,
    number: u32,
    grace: Duration,
    deadline: Deadline,
    start: Instant,
    decision: Abort,
    outcome: Abort,
    /// How far each rank is.
    stages: Vec<Flag>,
}

/// What was decided.
struct Decision {
    /// The place of the rank that decided.
    by: usize,
    meeting: Meeting,
    /// The places of those who go on, in order.
    places: Vec<usize>,
    /// At who decided: the store, if it serves one.
    origin: Option<Origin>,
}

/// Where the new group meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meeting {
    Port(u16),
    /// In the folder of the private socket of the rank that decided: ranks may be in different network namespaces.
    File(Id),
}

impl<'a> Attempt<'a> {
    fn new(inner: &'a Ranks, number: u32, grace: Duration, deadline: Deadline) -> Result<Self> {
        let (control, map) = (&inner.control, inner.control.map());
        let stage = |place| control.flag(map.desk(place) + Desk::SHRINK);
        Ok(Self {
            inner,
            number,
            grace,
            deadline,
            start: Instant::now(),
            decision: Abort::new(&control.line(map.shrink(number))?)?,
            outcome: Abort::new(&control.line(map.shrink(number) + LINE)?)?,
            stages: (0..map.ranks()).map(stage).collect::<Result<_>>()?,
        })
    }

    /// What the new group is called.
    fn name(&self) -> String {
        format!("{}/shrink #{}", self.inner.name, self.number)
    }

    fn me(&self) -> usize {
        self.inner.control.me()
    }

    fn member(&self, place: usize) -> &Member {
        &self.inner.members[self.inner.control.ranks()[place]]
    }

    fn enter(&self, stage: Stage) {
        self.stages[self.me()].store(stage.of(self.number));
    }

    fn is_at(&self, place: usize, stage: Stage) -> bool {
        self.stages[place].load() == stage.of(self.number)
    }

    /// The places of ranks that are dead or have closed the group.
    fn gone(&self) -> Vec<usize> {
        let ended = self.inner.context.watcher().ended(self.inner.id);
        let ranks = self.inner.control.ranks().iter().enumerate();
        let gone = ranks.filter(|(_, rank)| ended.contains(rank) || self.inner.control.has_left(**rank));
        gone.map(|(place, _)| place).collect()
    }

    /// Waits for the decision, or makes it.
    fn agree(&self) -> Result<Decision> {
        let mut pace = Pace::since(self.start);
        let decision = loop {
            if let Some(by) = self.decision.code() {
                break self.read(by)?;
            }
            // Another thread may have closed the group: then this rank goes nowhere, and must not decide for others.
            self.inner.check_open().inspect_err(|_| self.enter(Stage::Withdrawn))?;
            let gone = self.gone();
            let came: Vec<usize> = (0..self.stages.len())
                .filter(|&place| self.is_at(place, Stage::Came) && !gone.contains(&place))
                .collect();
            // This rank's turn comes when those before it have had theirs.
            let before = came.iter().filter(|&&place| place < self.me()).count() as u32;
            let all = (0..self.stages.len()).all(|place| came.contains(&place) || gone.contains(&place));
            let patience =
                self.grace.saturating_mul(before + 1) + if before > 0 { TURN } else { Duration::ZERO };
            if (all && before == 0) || self.start.elapsed() >= patience {
                let with = came.into_iter().filter(|&place| place >= self.me()).collect();
                break self.decide(with).inspect_err(|_| self.enter(Stage::Withdrawn))?;
            }
            if self.deadline.passed() {
                self.enter(Stage::Withdrawn);
                return Err(self.timed_out(&came, &gone));
            }
            pace.look(Instant::now()).inspect_err(|_| self.enter(Stage::Withdrawn))?;
            let _ = self.decision.wait(self.deadline.min(Deadline::after(LOOK)));
        };
        match decision.places.contains(&self.me()) {
            true => Ok(decision),
            false => Err(self.left_out(decision.by, &decision.places)),
        }
    }

    /// Writes which ranks go on and where they meet, unless another rank has decided that.
    fn decide(&self, with: Vec<usize>) -> Result<Decision> {
        let (meeting, origin) = self.serve(&with)?;
        let (port, name) = match meeting {
            Meeting::Port(port) => (port, [0; 16]),
            Meeting::File(id) => (0, id.0),
        };
        let control = &self.inner.control;
        let head = Writer::new().u32(self.number).u32(port.into()).fixed(&name).finish();
        let mut bits = vec![0u8; control.map().roll_len() - LINE];
        for &place in &with {
            bits[place / 8] |= 1 << (place % 8);
        }
        let roll = control.map().roll(self.me());
        control.region().write(roll, &head)?;
        control.region().write(roll + LINE, &bits)?;
        let mine = self.me() as u32 + 1;
        match self.decision.set(mine) {
            code if code == mine => Ok(Decision { by: self.me(), meeting, places: with, origin }),
            code => self.read(code),
        }
    }

    /// A fresh store for the new group. The first rank that comes makes the file.
    fn serve(&self, with: &[usize]) -> Result<(Meeting, Option<Origin>)> {
        if let Address::Path(_) = self.member(self.me()).address {
            return Ok((Meeting::File(Id::random()?), None));
        }
        let server = TcpServer::bind("127.0.0.1:0")?;
        let port = server.local_addr().port();
        let (store, server) = (self.connect(port, with)?, Some(Arc::new(server)));
        let origin =
            Origin { store, server, lingers: false, once: false, _file: None, route: None, key: None };
        Ok((Meeting::Port(port), Some(origin)))
    }

    /// The store at a port of this host, as long as it makes sense to go there.
    fn connect(&self, port: u16, places: &[usize]) -> Result<Arc<dyn Store>> {
        loop {
            let left = self.deadline.remaining().unwrap_or_default();
            match TcpStore::connect_near("127.0.0.1", port, left.min(Duration::from_millis(500))) {
                Ok(store) => {
                    store.set_timeout(self.inner.timeout);
                    return Ok(Arc::new(store));
                }
                Err(error) if !error.is_timeout() || self.deadline.passed() => return Err(error),
                Err(_) => self.sensible(places)?,
            }
        }
    }

    /// The store in a file beside the private socket of the rank that decided.
    fn open(&self, by: &Member, id: Id, world: usize) -> Result<Origin> {
        let path = file_of(by, id)
            .ok_or_else(|| self.blame(by, PeerFaultKind::Misbehaved, "it named a file where it has none"))?;
        launch::in_file(FileStore::open(&path)?, path, world)
    }

    /// The decision of the rank that a code names.
    fn read(&self, code: u32) -> Result<Decision> {
        let control = &self.inner.control;
        let by = (code as usize).wrapping_sub(1);
        if by >= self.stages.len() {
            let (who, text) = ("a rank of the group", "nobody decides so; make a new group");
            return Err(Error::peer(PeerFaultKind::Misbehaved, who, None, text));
        }
        let bad = |text| self.blame(self.member(by), PeerFaultKind::Misbehaved, text);
        let mut roll = vec![0; control.map().roll_len()];
        control.region().read(control.map().roll(by), &mut roll)?;
        let mut reader = Reader::new(&roll);
        let (attempt, port, id) = (reader.u32()?, reader.u32()?, Id(reader.array()?));
        let bits = &roll[LINE..];
        let places: Vec<usize> =
            (0..self.stages.len()).filter(|place| bits[place / 8] & (1 << (place % 8)) != 0).collect();
        // It has decided again since: this rank is very late.
        if attempt != self.number {
            return Err(self.left_out(by, &[by]));
        }
        let meeting = match u16::try_from(port) {
            Ok(0) => Meeting::File(id),
            Ok(port) => Meeting::Port(port),
            Err(_) => return Err(bad("it named a port that cannot be")),
        };
        if places.first() != Some(&by) {
            return Err(bad("it decided who goes on and is not the first of them"));
        }
        Ok(Decision { by, meeting, places, origin: None })
    }

    /// Forms the new group with the others, and waits until all have, or somebody has not.
    fn form(&self, decision: &Decision) -> (Outcome, Result<Group>) {
        let mut formed = self.meet(decision);
        let outcome = match &formed {
            Ok(_) => {
                self.enter(Stage::Formed);
                self.await_outcome(&decision.places)
            }
            Err(error) if is_interrupt(error) => Ok(self.set(Outcome::Failed)),
            Err(error) => {
                let died = matches!(error, Error::Peer(fault) if fault.kind == PeerFaultKind::Died);
                let lost = if died { Ok(true) } else { self.loses_soon(&decision.places) };
                lost.map(|lost| self.set(if lost { Outcome::Again } else { Outcome::Failed }))
            }
        };
        // If the new group is there already, it loses this rank, which drops it.
        let outcome = outcome.unwrap_or_else(|error| {
            self.set(Outcome::Failed);
            formed = Err(error);
            Outcome::Failed
        });
        if outcome != Outcome::Formed
            && let Meeting::File(id) = decision.meeting
            && let Some(path) = file_of(self.member(decision.by), id)
        {
            let _ = std::fs::remove_file(path);
        }
        (outcome, formed)
    }

    fn meet(&self, decision: &Decision) -> Result<Group> {
        let by = self.member(decision.by);
        let origin = match (&decision.origin, decision.meeting) {
            (Some(origin), _) => origin.clone(),
            (None, Meeting::Port(port)) => Origin {
                store: self.connect(port, &decision.places)?,
                server: None,
                lingers: false,
                once: false,
                _file: None,
                route: None,
                key: None,
            },
            (None, Meeting::File(id)) => {
                self.sensible(&decision.places)?;
                self.open(by, id, decision.places.len())?
            }
        };
        let place = decision.places.iter().position(|&place| place == self.me()).unwrap_or(0);
        let time = (self.inner.timeout, self.deadline);
        let sensible = || self.sensible(&decision.places);
        let world = decision.places.len();
        super::form::form(&self.inner.context, origin, self.name(), (place, world), time, &sensible)
    }

    /// Fails when the new group cannot be formed any more.
    fn sensible(&self, places: &[usize]) -> Result<()> {
        if self.outcome.is_set() {
            return Err(self.elsewhere());
        }
        match self.lost(places) {
            Some(place) if self.inner.control.has_left(self.member(place).rank) => {
                let text = "it closed the old group while the new one was formed";
                Err(self.blame(self.member(place), PeerFaultKind::Left, text))
            }
            Some(place) if self.is_at(place, Stage::Withdrawn) => {
                let text = "it came to shrink(), but could not wait for the others";
                Err(self.blame(self.member(place), PeerFaultKind::Left, text))
            }
            Some(place) => Err(self.member(place).died("its process ended while the group shrank")),
            None => Ok(()),
        }
    }

    /// What a rank hears that could have formed the new group.
    fn elsewhere(&self) -> Error {
        let text = format!("another rank could not form the group {:?}, and knows why", self.name());
        Error::Aborted(format!("{text}; call shrink() again on all ranks that are to go on"))
    }

    /// The first of some ranks that will not form the new group.
    fn lost(&self, places: &[usize]) -> Option<usize> {
        let gone = self.gone();
        let lost = |place: &usize| {
            !self.is_at(*place, Stage::Formed)
                && (gone.contains(place) || self.is_at(*place, Stage::Withdrawn))
        };
        places.iter().copied().find(lost)
    }

    /// The same, with a moment for deaths that are not seen yet.
    fn loses_soon(&self, places: &[usize]) -> Result<bool> {
        let (until, mut pace) = (Deadline::after(SEEN), Pace::new());
        loop {
            if self.outcome.is_set() || until.passed() {
                return Ok(false);
            }
            if self.lost(places).is_some() || places.iter().any(|place| self.gone().contains(place)) {
                return Ok(true);
            }
            pace.look(Instant::now())?;
            std::thread::sleep(LOOK);
        }
    }

    fn await_outcome(&self, places: &[usize]) -> Result<Outcome> {
        let mut pace = Pace::new();
        loop {
            if let Some(code) = self.outcome.code() {
                return Ok(Outcome::from_code(code));
            }
            if places.iter().all(|&place| self.is_at(place, Stage::Formed)) {
                return Ok(self.set(Outcome::Formed));
            }
            if self.lost(places).is_some() {
                return Ok(self.set(Outcome::Again));
            }
            if self.deadline.passed() {
                return Ok(self.set(Outcome::Failed));
            }
            pace.look(Instant::now())?;
            let _ = self.outcome.wait(self.deadline.min(Deadline::after(LOOK)));
        }
    }

    /// Sets the outcome, unless it is set; gives the one that counts.
    fn set(&self, outcome: Outcome) -> Outcome {
        Outcome::from_code(self.outcome.set(outcome.to_code()))
    }

    fn timed_out(&self, came: &[usize], gone: &[usize]) -> Error {
        let absent = (0..self.stages.len()).filter(|place| !came.contains(place) && !gone.contains(place));
        let absent: Vec<&Member> = absent.map(|place| self.member(place)).collect();
        let names: Vec<String> = absent.iter().take(8).map(ToString::to_string).collect();
        let missing = match (names.len(), came.first()) {
            (0, Some(&first)) => format!("{} has not decided who goes on", self.member(first)),
            (1, _) => format!("{} has not come", names[0]),
            _ => format!("{} have not come", names.join(", ")),
        };
        let doing = format!("shrinking the group {:?}", self.inner.name);
        let ranks = absent.iter().map(|member| member.rank);
        Error::timed_out(doing, self.start.elapsed(), missing).about(ranks)
    }

    /// What a rank hears that the others went on without.
    fn left_out(&self, by: usize, places: &[usize]) -> Error {
        let others: Vec<&usize> = places.iter().filter(|&&place| place != by).collect();
        let names: Vec<String> =
            others.iter().take(8).map(|&&place| self.member(place).to_string()).collect();
        let with = match others.len() {
            0 => String::new(),
            n if n > names.len() => format!(" with {} and {} more", names.join(", "), n - names.len()),
            _ => format!(" with {}", names.join(", ")),
        };
        let text =
            format!("it has gone on{with} as group {:?} without this rank, which came too late", self.name());
        self.blame(self.member(by), PeerFaultKind::Left, &text)
    }

    fn blame(&self, who: &Member, kind: PeerFaultKind, text: &str) -> Error {
        Error::peer(kind, who.to_string(), Some(who.rank), text)
    }
}

/// The file of a store that a rank has made beside its private socket.
fn file_of(member: &Member, id: Id) -> Option<PathBuf> {
    match &member.address {
        Address::Path(socket) => Some(socket.parent()?.join(format!("tensorwire-shrink-{id}"))),
        Address::Abstract(_) => None,
    }
}
