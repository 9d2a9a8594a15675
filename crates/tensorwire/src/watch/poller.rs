//! The watcher thread's loop: waits for descriptors and timers, and does what they ask for.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tensorwire_device::fd::{End, Handshake, HandshakeStep, Listener, end_of};
use tensorwire_device::secret::Id;

use super::inquiry::{self, Answer};
use super::star::Star;
use super::{Shared, Watched};
use crate::link::trunk::Number;
use crate::shm::control::{Cause, Failure};

/// How long a stranger may take to prove that it belongs to a group.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Strangers at one time; more wait in the listener's backlog.
const MAX_HANDSHAKES: usize = 256;

/// How often groups that span hosts are looked after, if nothing happens: what ranks write into shared memory wakes nobody here.
/// Beats go at this pace, too.
const LOOK: Duration = Duration::from_millis(200);

/// What is waited for.
type Source = Arc<dyn AsFd>;

pub(super) struct Poller {
    shared: Arc<Shared>,
    listener: Listener,
    strangers: Vec<(Handshake, Instant)>,
    /// Processes that have asked how this one stands.
    answers: Vec<Answer>,
    /// After running out of descriptors, when to accept again.
    pause: Option<Instant>,
}

/// What a descriptor stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    Bell,
    Listener,
    Stranger(usize),
    Answer(usize),
    Process(Id, usize),
    Trunk(Number),
}

impl Token {
    /// What is waited for.
    fn event(self) -> PollFlags {
        match self {
            Self::Answer(_) => PollFlags::OUT,
            _ => PollFlags::IN,
        }
    }
}

impl Poller {
    pub(super) fn new(shared: Arc<Shared>, listener: Listener) -> Self {
        Self { shared, listener, strangers: Vec::new(), answers: Vec::new(), pause: None }
    }

    pub(super) fn run(mut self) {
        loop {
            let (watched, beat) = {
                let state = self.shared.lock();
                if state.stop {
                    return;
                }
                let trunks = state.trunks.streams();
                let trunks = trunks.map(|(number, stream)| (Token::Trunk(number), stream as Source));
                let watched: Vec<(Token, Source)> =
                    state.groups.iter().flat_map(processes).chain(trunks).collect();
                let now = Instant::now();
                let beat = (!state.trunks.is_empty()).then(|| now + LOOK);
                let stars = state.groups.values().filter_map(|watched| watched.star.as_ref());
                (watched, beat.map(|beat| stars.filter_map(Star::due).fold(beat, Instant::min)))
            };
            let ready = self.wait(&watched, beat);
            // Deaths first: a neighbour's connection that closes because it died is then known to be a death.
            for token in &ready {
                if let Token::Process(group, rank) = *token {
                    self.process_ended(group, rank);
                }
            }
            for token in &ready {
                match *token {
                    Token::Bell => {
                        let _ = rustix::io::read(&self.shared.bell, &mut [0; 8]);
                    }
                    Token::Listener => self.accept(),
                    _ => {}
                }
            }
            self.give_answers(&ready);
            self.hear_strangers(&ready);
            let mut state = self.shared.lock();
            for token in &ready {
                if let Token::Trunk(number) = *token {
                    state.listen(number, Instant::now());
                }
            }
            state.talk(self.shared.heartbeat, Instant::now());
        }
    }

    /// Sleeps until something is ready or due.
    fn wait(&mut self, watched: &[(Token, Source)], beat: Option<Instant>) -> Vec<Token> {
        let now = Instant::now();
        self.pause = self.pause.filter(|until| *until > now);
        let mut sources: Vec<(Token, BorrowedFd<'_>)> = vec![(Token::Bell, self.shared.bell.as_fd())];
        if self.pause.is_none() && self.has_room() {
            sources.push((Token::Listener, self.listener.as_fd()));
        }
        let strangers = self.strangers.iter().enumerate();
        sources.extend(strangers.map(|(index, (stranger, _))| (Token::Stranger(index), stranger.as_fd())));
        let answers = self.answers.iter().enumerate();
        sources.extend(answers.map(|(index, answer)| (Token::Answer(index), answer.as_fd())));
        sources.extend(watched.iter().map(|(token, fd)| (*token, fd.as_fd())));

        let due = self.strangers.iter().map(|(_, until)| *until).chain(self.pause);
        let due = due.chain(self.answers.iter().map(|answer| answer.until));
        let due = due.chain(beat).min();
        let left = due.map(|due| due.saturating_duration_since(now));
        let left =
            left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
        let mut fds: Vec<PollFd<'_>> =
            sources.iter().map(|(token, fd)| PollFd::from_borrowed_fd(*fd, token.event())).collect();
        match poll(&mut fds, left.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Vec::new(),
            Err(error) => {
                tracing::error!("the watcher cannot poll: {error}");
                std::thread::sleep(LOOK);
                return Vec::new();
            }
        }
        let ready = fds.iter().zip(&sources).filter(|(fd, _)| !fd.revents().is_empty());
        ready.map(|(_, (token, _))| *token).collect()
    }

    fn process_ended(&self, group: Id, rank: usize) {
        let mut state = self.shared.lock();
        let Some(watched) = state.groups.get_mut(&group) else { return };
        let at = watched.pidfds.iter().position(|(other, _)| *other == rank);
        let pidfd = at.map(|at| watched.pidfds.swap_remove(at).1);
        watched.ended.push(rank);
        let Some(control) = watched.control.clone() else { return };
        drop(state);
        let end = pidfd.and_then(|pidfd| end_of(&pidfd));
        if let Some(end) = end {
            control.saw_end(rank, end);
        }
        // One that closed the group before it ended owes nobody anything.
        if control.has_left(rank) {
            return;
        }
        let cause = if end == Some(End::Exited(0)) { Cause::Left } else { Cause::Died };
        control.fail(Failure { cause, rank }, "");
    }

    fn has_room(&self) -> bool {
        self.strangers.len() < MAX_HANDSHAKES
    }

    fn accept(&mut self) {
        while self.has_room() {
            match Handshake::accept(&self.listener) {
                Ok(Some(stranger)) => self.strangers.push((stranger, Instant::now() + HANDSHAKE)),
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!("{error}; accepting again in a second");
                    self.pause = Some(Instant::now() + Duration::from_secs(1));
                    return;
                }
            }
        }
    }

    fn hear_strangers(&mut self, ready: &[Token]) {
        let now = Instant::now();
        for (index, (stranger, until)) in std::mem::take(&mut self.strangers).into_iter().enumerate() {
            if !ready.contains(&Token::Stranger(index)) {
                if until > now {
                    self.strangers.push((stranger, until));
                }
                continue;
            }
            let stranger = match stranger.inquiry() {
                Err(stranger) => stranger,
                Ok(question) if self.answers.len() < inquiry::MAX_ANSWERS => {
                    let state = self.shared.lock();
                    let groups = state.groups.values().filter_map(|watched| watched.control.clone());
                    self.answers.push(Answer::new(question, groups));
                    continue;
                }
                Ok(question) => {
                    inquiry::refuse(&question);
                    continue;
                }
            };
            let secret_of = |domain| {
                let forming = self.shared.lock().groups.get(&domain).map(|watched| watched.secret);
                forming.or_else(|| self.shared.share.secret_of(domain))
            };
            match stranger.step(self.shared.identity, &secret_of) {
                Ok(HandshakeStep::More(stranger)) => self.strangers.push((stranger, until)),
                Ok(HandshakeStep::Done(group, connection)) => {
                    // While a group forms, its neighbours introduce themselves. Everybody else wants memory.
                    let state = self.shared.lock();
                    match state.groups.get(&group) {
                        Some(Watched { mailbox: Some(mailbox), .. }) => {
                            // If nobody listens any more, dropping it says so.
                            let _ = mailbox.send(connection);
                        }
                        _ => {
                            drop(state);
                            self.shared.share.accept(connection);
                        }
                    }
                }
                Err(error) => tracing::warn!("a process tried to connect: {error}"),
            }
        }
    }

    /// Goes on with answers that have room for more. A process that does not listen, or is gone, gets no more.
    fn give_answers(&mut self, ready: &[Token]) {
        let now = Instant::now();
        let mut index = 0;
        self.answers.retain_mut(|answer| {
            let has_room = ready.contains(&Token::Answer(index));
            index += 1;
            answer.until > now && (!has_room || matches!(answer.go_on(), Ok(false)))
        });
    }
}

/// The descriptors of the processes of one group.
fn processes((group, watched): (&Id, &Watched)) -> impl Iterator<Item = (Token, Source)> {
    let group = *group;
    watched.pidfds.iter().map(move |(rank, fd)| (Token::Process(group, *rank), fd.clone() as Source))
}
