//! The asking side: the one connection to another process, over which all threads ask for its memory in turn.
//!
//! A request is sent only when the answer to the one before has arrived, whether anybody still waits for it or not: so an
//! answer that comes late is never taken for another, and a process that does not answer has one request to answer.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tensorwire_device::fd::{self, Address, Connection, Fd, Peer};
use tensorwire_device::secret::{Id, Secret, digest};
use tensorwire_device::sync::{AtomicBool, Ordering};
use tensorwire_device::{Deadline, Handle};

use super::frames::{self, Answer, Nonsense, Question, Reason};
use crate::error::Error;

/// The name of a process that lends memory: who it is, and where it was reached. Only the two together are proved, because a token may
/// name anybody's identity beside any address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LenderId {
    pub(crate) identity: Id,
    pub(super) address: Id,
}

impl LenderId {
    pub(crate) fn new(identity: Id, address: &Address) -> Self {
        Self { identity, address: digest(&address.to_bytes()) }
    }

    /// One that a caller names, and answers for.
    pub(crate) fn told(identity: Id) -> Self {
        Self { identity, address: Id([0; 16]) }
    }
}

/// The process that is asked, and what gives the right to ask it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Whom<'a> {
    pub(crate) identity: Id,
    pub(crate) address: &'a Address,
    pub(crate) domain: Id,
    pub(crate) secret: &'a Secret,
}

impl Whom<'_> {
    pub(crate) fn lender(&self) -> LenderId {
        LenderId::new(self.identity, self.address)
    }
}

/// How long somebody waits, and what says that there is no sense in it any more.
#[derive(Clone, Copy)]
pub(crate) struct Patience<'a> {
    pub(crate) deadline: Deadline,
    pub(crate) sensible: &'a dyn Fn() -> bool,
}

/// Why nothing was got.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// It has not answered in time, or nobody wants to wait any more.
    Slow,
    /// The connection could not be made.
    Unreachable(tensorwire_device::Error),
    /// The connection was closed: the process is going, or has said why.
    Closed(Option<String>),
    /// It will not, or cannot.
    Refused(Reason, String),
    /// It broke the protocol.
    Nonsense(String),
    /// Its answer is lost, or it was not asked: this process had no descriptor left. It can be asked again.
    Lost(Error),
    /// Something of this process is in the way.
    Ours(Error),
}

/// The connection to another process. It lives as long as somebody needs memory of that process.
#[derive(Debug)]
pub(crate) struct PeerConnection {
    me: Id,
    lender: LenderId,
    connection: Connection,
    line: Mutex<RequestLine>,
    broken: AtomicBool,
}

/// What threads take turns with.
#[derive(Debug, Default)]
struct RequestLine {
    /// The last number of a request.
    last: u64,
    /// Whether the answer to it is still to come.
    owed: bool,
    /// What has come of it.
    half: Option<Answer>,
    /// How many answers were lost since the last whole one. Of each, the rest may still come.
    lost: usize,
}

impl PeerConnection {
    /// Connects to a process.
    pub(super) fn connect(me: Id, whom: &Whom<'_>, patience: Patience<'_>) -> Result<Self, Trouble> {
        let Patience { deadline, sensible } = patience;
        let connection = fd::connect_while(whom.address, whom.domain, me, whom.secret, deadline, sensible);
        let connection = connection.map_err(|error| match error {
            tensorwire_device::Error::TimedOut => Trouble::Slow,
            error if is_full(&error) => Trouble::Lost(error.into()),
            error @ (tensorwire_device::Error::Io { .. } | tensorwire_device::Error::Refused(_)) => {
                Trouble::Unreachable(error)
            }
            other => Trouble::Ours(other.into()),
        })?;
        if connection.peer().identity != whom.identity {
            return Err(Trouble::Nonsense("another process answered at its private socket".into()));
        }
        let (line, broken) = (Mutex::default(), AtomicBool::new(false));
        Ok(Self { me, lender: whom.lender(), connection, line, broken })
    }

    /// The process at the other end.
    pub(crate) fn peer(&self) -> &Peer {
        self.connection.peer()
    }

    /// Readable, or hung up, when the other side has said or done something.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    /// Whether the other side has closed it. It cannot be used any more then.
    pub(crate) fn is_closed(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.socket(), PollFlags::empty())];
        let hung_up = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0);
        if hung_up {
            self.broken.store(true, Ordering::Relaxed);
        }
        hung_up
    }

    /// Whether it cannot be used any more.
    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Asks for memory by its number in a domain. `pass` gives the right to it where the domain wants more than its secret.
    pub(crate) fn memory(
        &self,
        domain: (Id, &Secret),
        number: u64,
        pass: &[u8],
        patience: Patience<'_>,
    ) -> Result<Handle, Trouble> {
        let (body, fds) = self.ask(domain, Question::Memory(number, pass), &[], patience)?;
        Handle::decode(&body, fds).map_err(|error| Trouble::Nonsense(error.to_string()))
    }

    /// Asks for descriptors by their number in a domain. There must be so many. The other side keeps them until it hears
    /// that they were taken.
    pub(crate) fn descriptors(
        &self,
        domain: (Id, &Secret),
        number: u64,
        count: usize,
        patience: Patience<'_>,
    ) -> Result<Vec<Fd>, Trouble> {
        let (body, fds) = self.ask(domain, Question::Descriptors(number), &[], patience)?;
        if !body.is_empty() || fds.len() != count {
            self.broken.store(true, Ordering::Relaxed);
            return Err(Trouble::Nonsense(format!("{} descriptors, and not {count}", fds.len())));
        }
        Ok(fds)
    }

    /// Says that descriptors were taken.
    pub(crate) fn taken(
        &self,
        domain: (Id, &Secret),
        number: u64,
        patience: Patience<'_>,
    ) -> Result<(), Trouble> {
        self.ask(domain, Question::Taken(number), &[], patience).map(drop)
    }

    /// Makes this process known in a domain; gives what the other side answers.
    pub(crate) fn greet(
        &self,
        domain: (Id, &Secret),
        hello: &[u8],
        beside: &[BorrowedFd<'_>],
        patience: Patience<'_>,
    ) -> Result<(Vec<u8>, Vec<Fd>), Trouble> {
        self.ask(domain, Question::Hello(hello), beside, patience)
    }

    fn ask(
        &self,
        domain: (Id, &Secret),
        question: Question<'_>,
        beside: &[BorrowedFd<'_>],
        patience: Patience<'_>,
    ) -> Result<(Vec<u8>, Vec<Fd>), Trouble> {
        let mut line = self.turn(patience)?;
        let answered = self.converse(&mut line, domain, question, beside, patience);
        if matches!(answered, Err(Trouble::Closed(_) | Trouble::Nonsense(_))) {
            self.broken.store(true, Ordering::Relaxed);
        }
        let answer = answered?;
        answer.result.map(|body| (body, answer.fds)).map_err(|(reason, why)| Trouble::Refused(reason, why))
    }

    fn converse(
        &self,
        line: &mut RequestLine,
        domain: (Id, &Secret),
        question: Question<'_>,
        beside: &[BorrowedFd<'_>],
        patience: Patience<'_>,
    ) -> Result<Answer, Trouble> {
        if line.owed {
            self.hear(line, patience)?;
        }
        line.last += 1;
        let frame = frames::request(line.last, domain, (self.me, self.lender.identity), question);
        self.connection.send(&frame, beside, patience.deadline).map_err(|error| self.closed(error))?;
        line.owed = true;
        self.hear(line, patience)
    }

    /// The answer that is owed.
    fn hear(&self, line: &mut RequestLine, patience: Patience<'_>) -> Result<Answer, Trouble> {
        let mut stale = 0;
        loop {
            let sensible = || !self.peer().has_ended() && (patience.sensible)();
            let heard = self.connection.recv_while(patience.deadline, &sensible);
            let (frame, fds) = heard.map_err(|error| {
                // What does not come in time is still owed. What cannot be taken, for want of descriptors, is lost.
                if !matches!(error, tensorwire_device::Error::TimedOut) {
                    (line.owed, line.half) = (false, None);
                    line.lost += 1;
                }
                self.closed(error)
            })?;
            // The rest of an answer whose beginning was lost.
            if line.half.is_none() && frames::serial_of(&frame).is_some_and(|serial| serial < line.last) {
                stale += 1;
                if stale > frames::MOST * line.lost {
                    return Err(Trouble::Nonsense("answers to what nobody asks any more".into()));
                }
                if patience.deadline.passed() || !(patience.sensible)() {
                    return Err(Trouble::Slow);
                }
                continue;
            }
            if frame.is_empty() {
                return Err(Trouble::Closed(None));
            }
            let answer = Answer::read(line.half.take(), &frame, fds).map_err(|nonsense| match nonsense {
                Nonsense::Closed(why) => Trouble::Closed(Some(why)),
                Nonsense::Frame(what) => Trouble::Nonsense(what),
            })?;
            if !answer.is_whole() {
                line.half = Some(answer);
                continue;
            }
            (line.owed, line.lost) = (false, 0);
            if answer.serial != line.last {
                return Err(Trouble::Nonsense("an answer to nothing that was asked".into()));
            }
            return Ok(answer);
        }
    }

    /// What an error of the connection means.
    fn closed(&self, error: tensorwire_device::Error) -> Trouble {
        match error {
            tensorwire_device::Error::TimedOut if self.peer().has_ended() => Trouble::Closed(None),
            tensorwire_device::Error::TimedOut => Trouble::Slow,
            error if is_full(&error) => Trouble::Lost(error.into()),
            tensorwire_device::Error::Io { .. } => Trouble::Closed(None),
            tensorwire_device::Error::Refused(why) => Trouble::Nonsense(why),
            other => Trouble::Ours(other.into()),
        }
    }

    /// The line, when the threads before this one have their answers.
    fn turn(&self, patience: Patience<'_>) -> Result<MutexGuard<'_, RequestLine>, Trouble> {
        let mut looks: u32 = 0;
        loop {
            match self.line.try_lock() {
                Ok(line) => return Ok(line),
                Err(TryLockError::Poisoned(line)) => return Ok(line.into_inner()),
                Err(TryLockError::WouldBlock) if patience.deadline.passed() => return Err(Trouble::Slow),
                // It is asked from time to time: it may be a hook of the caller's.
                Err(TryLockError::WouldBlock) if looks % 1024 == 1023 && !(patience.sensible)() => {
                    return Err(Trouble::Slow);
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(20)),
            }
            looks = looks.wrapping_add(1);
        }
    }
}

/// Whether this process, or the machine, has all descriptors that it may have.
fn is_full(error: &tensorwire_device::Error) -> bool {
    let tensorwire_device::Error::Io { source, .. } = error else { return false };
    matches!(Errno::from_io_error(source), Some(Errno::MFILE | Errno::NFILE))
}
