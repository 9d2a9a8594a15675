//! Owners: how a holder meets one for the first time, and asks it for memory.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tensorwire_device::flag::LINE;
use tensorwire_device::secret::Secret;
use tensorwire_device::sync::AtomicBool;
use tensorwire_device::words::Words;
use tensorwire_device::{Deadline, Handle, Span};

use super::book::{BOOK_BYTES, Book, ROW_BYTES, Row};
use super::domain::{checked_bell, exactly};
use super::holder::{DYING, Lender, ring};
use super::points::{LINES, Theirs};
use super::{Inner, Token};
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::{self, Asked};
use crate::share::{LenderId, Patience, PeerConnection, Reason, Trouble, Whom};

/// The owner of a token.
pub(super) fn lender(inner: &Inner, token: &Token, deadline: Deadline) -> Result<Arc<Lender>> {
    let known = inner.holding().lender(&token.issuer);
    if let Some(lender) = known {
        return Ok(lender);
    }
    let id = LenderId::new(token.issuer.owner, &token.issuer.address);
    let begin = Instant::now();
    loop {
        let mut holding = inner.holding();
        if let Some(lender) = holding.lender(&token.issuer) {
            return Ok(lender);
        }
        // One thread says hello. The others wait for it, each as long as it likes.
        if holding.meeting.insert(id) {
            break;
        }
        drop(holding);
        if deadline.passed() {
            let missing = format!(
                "process {} does not answer other threads of this process; is it stopped?",
                token.issuer.pid
            );
            return Err(Error::timed_out(format!("redeeming {token:?}"), begin.elapsed(), missing));
        }
        interrupt::sleep(Duration::from_micros(100))?;
    }
    let met = meet(inner, id, token, deadline);
    let mut holding = inner.holding();
    holding.meeting.remove(&id);
    let met = Arc::new(met?);
    holding.add(&met);
    drop(holding);
    // So that the thread hears of its death.
    ring(&inner.bell);
    Ok(met)
}

fn meet(inner: &Inner, id: LenderId, token: &Token, deadline: Deadline) -> Result<Lender> {
    let issuer = &token.issuer;
    let who = format!("process {}", issuer.pid);
    let begin = Instant::now();
    let blame = |kind, text: String| Error::peer(kind, who.clone(), None, text);
    let secret = Secret::from_bytes(issuer.secret);
    let whom =
        Whom { identity: issuer.owner, address: &issuer.address, domain: issuer.domain, secret: &secret };
    let asked = Asked::default();
    let sensible = || asked.goes_on();
    let patience = Patience { deadline, sensible: &sensible };
    let reached = inner.share.reach(&whom, patience).or_else(|trouble| match trouble {
        // One that dies closes its connections before its socket: it is asked again, and then gone.
        Trouble::Unreachable(_) => {
            std::thread::sleep(DYING.min(deadline.remaining().unwrap_or_default()));
            inner.share.reach(&whom, patience)
        }
        other => Err(other),
    });
    asked.end()?;
    let connection = reached.map_err(|trouble| match trouble {
        Trouble::Slow => Error::timed_out(
            format!("redeeming {token:?}"),
            begin.elapsed(),
            format!("{who} does not answer at its private socket; is it stopped?"),
        ),
        Trouble::Unreachable(tensorwire_device::Error::Io { source, .. })
            if source.kind() == ErrorKind::ConnectionRefused =>
        {
            let text = "it granted this memory and has ended, or it is in another network namespace (see \
                        TENSORWIRE_SOCKET_DIR): the token cannot be redeemed";
            blame(PeerFaultKind::Died, text.into())
        }
        Trouble::Unreachable(error) => {
            blame(PeerFaultKind::Refused, format!("the token cannot be redeemed: {error}"))
        }
        Trouble::Nonsense(text) => blame(PeerFaultKind::Refused, text),
        trouble => failed(None, trouble, begin, &who),
    })?;
    let lines = inner.points.region().export()?;
    let beside: Vec<_> = lines.fds().chain([inner.bell.as_fd()]).collect();
    let asked = Asked::default();
    let sensible = || asked.goes_on();
    let patience = Patience { deadline, sensible: &sensible };
    let greeted = connection.greet((issuer.domain, &secret), &[], &beside, patience);
    asked.end()?;
    let (_, fds) = greeted.map_err(|trouble| failed(Some(&connection), trouble, begin, &who))?;
    let [book, row, lines, bell] = exactly(fds)?;
    let book = inner.share.import(Handle::Memfd { fd: book, len: BOOK_BYTES })?;
    let row = inner.share.import(Handle::Memfd { fd: row, len: ROW_BYTES })?;
    let points = Theirs::of(inner.share.import(Handle::Memfd { fd: lines, len: LINES * LINE })?)?;
    let book = Book(Words::new(&Span::whole(book))?);
    if !book.is_one() {
        return Err(blame(PeerFaultKind::Misbehaved, "its book is none".into()));
    }
    Ok(Lender {
        id,
        address: issuer.address.clone(),
        pid: issuer.pid,
        connection: Some(connection),
        forgot: Mutex::new(book.asked_to_forget()),
        book,
        row: Row(Words::new(&Span::whole(row))?),
        points,
        bell: Arc::new(checked_bell(bell)?),
        abort: inner.points.abort()?,
        ended: AtomicBool::new(false),
        waits: Mutex::default(),
        order: Mutex::default(),
    })
}

/// Asks an owner for the memory of a grant that this process holds.
pub(super) fn fetch(lender: &Lender, token: &Token, deadline: Deadline) -> Result<Handle> {
    let Some(connection) = &lender.connection else {
        return Err(Error::bug("memory of this process that it does not know"));
    };
    let begin = Instant::now();
    let secret = Secret::from_bytes(token.issuer.secret);
    let asked = Asked::default();
    let sensible = || asked.goes_on();
    let patience = Patience { deadline, sensible: &sensible };
    let got = connection.memory((token.issuer.domain, &secret), token.memory.number, &token.pass(), patience);
    asked.end()?;
    got.map_err(|trouble| failed(Some(connection), trouble, begin, &format!("process {}", lender.pid)))
}

/// Why an owner could not be asked.
fn failed(connection: Option<&PeerConnection>, trouble: Trouble, begin: Instant, who: &str) -> Error {
    let blame = |kind, text: String| Error::peer(kind, who, None, text);
    match trouble {
        Trouble::Slow => Error::timed_out(
            "redeeming a token",
            begin.elapsed(),
            format!("{who} does not answer; is it stopped?"),
        ),
        Trouble::Refused(Reason::Closed, _) => left(who),
        Trouble::Refused(_, why) => blame(PeerFaultKind::Failed, format!("its memory cannot be had: {why}")),
        Trouble::Closed(Some(why)) => {
            blame(PeerFaultKind::Failed, format!("the token cannot be redeemed: {why}"))
        }
        Trouble::Closed(None) => closed(connection, who),
        Trouble::Unreachable(error) => {
            blame(PeerFaultKind::Refused, format!("the token cannot be redeemed: {error}"))
        }
        Trouble::Nonsense(what) => blame(PeerFaultKind::Misbehaved, format!("its answer is wrong: {what}")),
        Trouble::Lost(error) | Trouble::Ours(error) => error,
    }
}

/// Why an owner has closed its connection. One that dies does so a little before it is dead.
fn closed(connection: Option<&PeerConnection>, who: &str) -> Error {
    let ended = || connection.is_some_and(|connection| connection.peer().has_ended());
    let soon = Deadline::after(DYING);
    while !ended() && !soon.passed() {
        std::thread::sleep(Duration::from_millis(1));
    }
    if ended() {
        Error::peer(
            PeerFaultKind::Died,
            who,
            None,
            "while a token was redeemed, and nobody else can redeem it now; views that were redeemed stay valid",
        )
    } else {
        left(who)
    }
}

fn left(who: &str) -> Error {
    Error::peer(PeerFaultKind::Left, who, None, "it has closed its context, and its grants with it")
}
