//! The thread that serves holders, hears of releases and deaths, and lets memory go.
//!
//! It is not the watcher: dropping memory may take long, and may need locks of its maker (Python's, say).
//!
//! | frame | bytes | beside it |
//! |---|---|---|
//! | hello, of the holder | `H`, version | its lines, its bell |
//! | welcome | `W` | the book, a row, the lines, the bell |
//! | request | `M`, slot, generation | |
//! | answer | `m`, slot, generation, how many descriptors, a handle | the first of its descriptors |
//! | answer, after it | `f` | more of them |
//! | answer | `n`, slot, generation, why not | |
//! | the last one | `x`, why | |
//!
//! A holder asks again only when it has the answer to what it asked before.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use tensorwire_device::fd::{Connection, Fd, MAX_FDS};
use tensorwire_device::flag::LINE;
use tensorwire_device::host::Host;
use tensorwire_device::sync::{AtomicBool, Ordering};
use tensorwire_device::words::Words;
use tensorwire_device::{Deadline, Device, Handle, Span};

use super::Inner;
use super::book::{BOOK_BYTES, Book, ROW_BYTES, Row};
use super::holder::{Lender, Line, root};
use super::owner::Holder;
use super::points::{LINES, Theirs};
use super::token::Token;
use crate::context::Context;
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::Asked;
use crate::wire::{PROTOCOL, Reader, Writer};

/// The longest sleep. Tokens that live longer are granted without waking the thread: it sees them in time.
pub(super) const NAP: Duration = Duration::from_secs(60);

/// How often devices are looked at that are not done with what was released.
const SETTLE: Duration = Duration::from_millis(1);

/// How long a holder may take to make room for what it asked for.
const SEND: Duration = Duration::from_millis(200);

/// How long a process may take to die that has begun to.
const DYING: Duration = Duration::from_millis(200);

/// How long a peer may take to say hello.
const HELLO: Duration = Duration::from_secs(10);

/// One who has proved to know a token.
struct Client {
    connection: Connection,
    /// Once it has said hello.
    holder: Option<Arc<Holder>>,
    since: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Bell,
    /// The socket of a client.
    Client(usize),
    /// The process of a client.
    Process(usize),
    /// The process of a lender.
    Lender(usize),
}

/// The life of the thread.
pub(super) fn run(inner: &Arc<Inner>, mailbox: &Receiver<Connection>) {
    let mut clients: Vec<Client> = Vec::new();
    while !inner.stop.load(Ordering::Acquire) {
        let lenders: Vec<Arc<Lender>> = inner.holding().lenders.values().cloned().collect();
        let ready = wait(inner, &clients, &lenders);
        if ready.contains(&Source::Bell) {
            let _ = rustix::io::read(&*inner.bell, &mut [0; 8]);
        }
        inner.book.hear();
        let now = Instant::now();
        while let Ok(connection) = mailbox.try_recv() {
            clients.push(Client { connection, holder: None, since: now });
        }
        for (index, lender) in lenders.iter().enumerate() {
            if ready.contains(&Source::Lender(index)) || (lender.pidfd.is_some() && lender.book.is_over()) {
                lender.ended.store(true, Ordering::Relaxed);
                lender.abort.set(1);
            }
        }
        let mut index = 0;
        clients.retain_mut(|client| {
            let (socket, process) = (Source::Client(index), Source::Process(index));
            index += 1;
            let stays = !ready.contains(&process)
                && (!ready.contains(&socket) || hear(inner, client))
                && (client.holder.is_some() || client.since + HELLO > now);
            if !stays && let Some(holder) = &client.holder {
                tracing::debug!(pid = holder.pid, "a holder is gone, and its loans are over");
                inner.owner().remove_holder(holder);
            }
            stays
        });
        inner.look(now);
        // Lenders that are gone are forgotten here once their mappings are.
        for lender in lenders.iter().filter(|lender| lender.ended.load(Ordering::Relaxed)) {
            inner.forget(lender);
        }
    }
    inner.close();
}

/// Sleeps until something is ready or due.
fn wait(inner: &Inner, clients: &[Client], lenders: &[Arc<Lender>]) -> Vec<Source> {
    let mut sources: Vec<(Source, BorrowedFd<'_>)> = vec![(Source::Bell, inner.bell.as_fd())];
    for (index, client) in clients.iter().enumerate() {
        sources.push((Source::Client(index), client.connection.as_fd()));
        sources.push((Source::Process(index), client.connection.peer().pidfd.as_fd()));
    }
    for (index, lender) in lenders.iter().enumerate() {
        if let Some(pidfd) = lender.pidfd.as_ref().filter(|_| !lender.ended.load(Ordering::Relaxed)) {
            sources.push((Source::Lender(index), pidfd.as_fd()));
        }
    }
    let now = Instant::now();
    let (due, settling) = inner.owner().next();
    let hello =
        clients.iter().filter(|client| client.holder.is_none()).map(|client| client.since + HELLO).min();
    let due = [due, settling.then(|| now + SETTLE), inner.holding().next(), hello];
    let due = due.into_iter().flatten().fold(now + NAP, Instant::min);
    let left = due.saturating_duration_since(now);
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    let mut fds: Vec<PollFd<'_>> =
        sources.iter().map(|(_, fd)| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    match poll(&mut fds, Some(&left)) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Vec::new(),
        Err(error) => {
            tracing::error!("the lease thread cannot poll: {error}");
            std::thread::sleep(Duration::from_millis(100));
            return Vec::new();
        }
    }
    let ready = fds.iter().zip(&sources).filter(|(fd, _)| !fd.revents().is_empty());
    ready.map(|(_, (source, _))| *source).collect()
}

/// Answers one request; gives whether there may be another.
fn hear(inner: &Arc<Inner>, client: &mut Client) -> bool {
    match serve(inner, client) {
        Ok(more) => more,
        Err(error) => {
            tracing::warn!("process {} loses its connection: {error}", client.connection.peer().pid);
            let last = Writer::new().u8(b'x').bytes(error.to_string().as_bytes()).finish();
            let _ = client.connection.send(&last, &[], Deadline::after(Duration::ZERO));
            false
        }
    }
}

fn serve(inner: &Arc<Inner>, client: &mut Client) -> Result<bool> {
    let now = Deadline::after(Duration::ZERO);
    let Some((frame, fds)) = client.connection.try_recv()? else { return Ok(true) };
    if frame.is_empty() {
        return Ok(false);
    }
    let mut reader = Reader::new(&frame);
    match (reader.u8()?, &client.holder) {
        (b'H', None) => {
            let version = reader.u32()?;
            reader.end()?;
            if version != PROTOCOL {
                return Err(Error::misuse(format!("it speaks version {version}, this process {PROTOCOL}")));
            }
            let [lines, bell] = exactly(fds)?;
            let row = Host.reserve(ROW_BYTES)?;
            let holder = Arc::new(Holder {
                identity: client.connection.peer().identity,
                pid: client.connection.peer().pid,
                row: Row(Words::new(&Span::whole(row.clone()))?),
                region: row.clone(),
                points: Theirs::of(Host.import(Handle::Memfd { fd: lines, len: LINES * LINE })?)?,
                bell: Arc::new(checked_bell(bell)?),
                gone: AtomicBool::new(false),
            });
            let handles = [inner.book_region.export()?, row.export()?, inner.points.region().export()?];
            let fds: Vec<_> = handles.iter().flat_map(Handle::fds).chain([inner.bell.as_fd()]).collect();
            // It is counted before it can redeem anything.
            inner.owner().add_holder(holder.clone())?;
            client.holder = Some(holder);
            client.connection.send(b"W", &fds, now)?;
        }
        (b'M', Some(_)) => {
            let (slot, generation) = (reader.u32()?, reader.u32()?);
            reader.end()?;
            let span = inner.owner().memory(slot, generation);
            let sent = span.map(|span| {
                let handle = root(span.region()).export()?;
                // As many as fit beside a frame, and the rest beside frames of their own.
                let fds: Vec<_> = handle.fds().collect();
                let (first, rest) = fds.split_at(fds.len().min(MAX_FDS));
                let frame = Writer::new().u8(b'm').u32(slot).u32(generation).u32(fds.len() as u32);
                let soon = Deadline::after(SEND);
                client.connection.send(&frame.fixed(&handle.encode()).finish(), first, soon)?;
                rest.chunks(MAX_FDS).try_for_each(|fds| client.connection.send(b"f", fds, soon))
            });
            // One that cannot have this memory keeps its loans of other memory.
            let why = match sent {
                Some(Ok(())) => return Ok(true),
                Some(Err(error)) => error.to_string(),
                None => "the grant is over".into(),
            };
            let no = Writer::new().u8(b'n').u32(slot).u32(generation).bytes(why.as_bytes());
            client.connection.send(&no.finish(), &[], now)?;
        }
        (kind, _) => return Err(Error::misuse(format!("a frame of kind {kind} at the wrong time"))),
    }
    Ok(true)
}

/// Meets an owner for the first time.
pub(super) fn meet(context: &Context, inner: &Inner, token: &Token, deadline: Deadline) -> Result<Lender> {
    let domain = &token.domain;
    let who = format!("process {}", domain.pid);
    let begin = Instant::now();
    let blame = |kind, text: String| Error::peer(kind, who.clone(), None, text);
    let secret = tensorwire_device::Secret::from_bytes(domain.secret);
    let asked = Asked::default();
    let sensible = || asked.goes_on();
    let connect = || {
        let (address, identity) = (&domain.address, inner.identity);
        tensorwire_device::fd::connect_while(address, domain.name, identity, &secret, deadline, &sensible)
    };
    let connected = connect().or_else(|error| match error {
        // One that dies closes its connections before its socket: it is asked again, and then gone.
        tensorwire_device::Error::Refused(_) | tensorwire_device::Error::Io { .. } => {
            std::thread::sleep(DYING.min(deadline.remaining().unwrap_or_default()));
            connect()
        }
        other => Err(other),
    });
    asked.end()?;
    let connection = connected.map_err(|error| match error {
        tensorwire_device::Error::TimedOut => Error::timed_out(
            format!("redeeming {token:?}"),
            begin.elapsed(),
            format!("{who} does not answer at its private socket; is it stopped?"),
        ),
        tensorwire_device::Error::Io { source, .. } if source.kind() == ErrorKind::ConnectionRefused => {
            let text = "it granted this memory and has ended, or it is in another network namespace (see \
                        TENSORWIRE_SOCKET_DIR): the token cannot be redeemed";
            blame(PeerFaultKind::Died, text.into())
        }
        error => blame(PeerFaultKind::Refused, format!("the token cannot be redeemed: {error}")),
    })?;
    if connection.peer().identity != domain.owner {
        return Err(blame(PeerFaultKind::Refused, "another process answered at its private socket".into()));
    }
    let pidfd = Arc::new(tensorwire_device::fd::dup(connection.peer().pidfd.as_fd())?);
    let lines = inner.points.region().export()?;
    let fds: Vec<_> = lines.fds().chain([inner.bell.as_fd()]).collect();
    let hello = Writer::new().u8(b'H').u32(PROTOCOL).finish();
    let (frame, fds) = match connection.send(&hello, &fds, deadline) {
        Ok(()) => answer(&connection, deadline, &who)?,
        Err(error) => return Err(unsent(&connection, error, &who)),
    };
    if frame != b"W" {
        return Err(blame(PeerFaultKind::Misbehaved, "its welcome is wrong".into()));
    }
    let [book, row, lines, bell] = exactly(fds)?;
    let book = context.import(Handle::Memfd { fd: book, len: BOOK_BYTES })?;
    let row = context.import(Handle::Memfd { fd: row, len: ROW_BYTES })?;
    let points = Theirs::of(context.import(Handle::Memfd { fd: lines, len: LINES * LINE })?)?;
    let book = Book(Words::new(&Span::whole(book))?);
    if !book.is_one() {
        return Err(blame(PeerFaultKind::Misbehaved, "its book is none".into()));
    }
    Ok(Lender {
        identity: domain.owner,
        pid: domain.pid,
        pidfd: Some(pidfd),
        line: Some(Mutex::new(Line { connection, owed: false })),
        forgot: Mutex::new(book.asked_to_forget()),
        book,
        row: Row(Words::new(&Span::whole(row))?),
        points,
        bell: Arc::new(checked_bell(bell)?),
        abort: inner.points.abort()?,
        ended: AtomicBool::new(false),
        order: Mutex::default(),
    })
}

/// Asks an owner for the memory of a grant that this process holds.
pub(super) fn fetch(lender: &Lender, token: &Token, deadline: Deadline) -> Result<Handle> {
    let who = format!("process {}", lender.pid);
    let Some(line) = &lender.line else {
        return Err(Error::misuse("memory of this process that it does not know"));
    };
    let mut line = turn(line, deadline, &who)?;
    if line.owed
        && let Err(error) = next(&mut line, deadline, &who)
        && line.owed
    {
        return Err(error);
    }
    let asked = Writer::new().u32(token.slot).u32(token.generation).finish();
    let sent = line.connection.send(&[b"M", &asked[..]].concat(), &[], deadline);
    sent.map_err(|error| unsent(&line.connection, error, &who))?;
    line.owed = true;
    // What is left of answers that were given up is not taken for this one.
    let (kind, rest, mut fds) = loop {
        let (frame, fds) = next(&mut line, deadline, &who)?;
        if let Some(rest) = frame.get(1..).and_then(|rest| rest.strip_prefix(&asked[..])) {
            break (frame[0], rest.to_vec(), fds);
        }
        if deadline.passed() {
            let missing = format!("{who} has answered only to what was asked before");
            return Err(Error::timed_out("redeeming a token", Duration::ZERO, missing));
        }
    };
    let mut reader = Reader::new(&rest);
    if kind == b'n' {
        let why = reader.text().unwrap_or_default();
        return Err(lender.blame(PeerFaultKind::Failed, &format!("its memory cannot be had: {why}")));
    }
    let count = reader.u32()? as usize;
    while fds.len() < count {
        let (more, with) = answer(&line.connection, deadline, &who)?;
        if more != b"f" || with.is_empty() {
            return Err(lender.blame(PeerFaultKind::Misbehaved, "its answer is none"));
        }
        fds.extend(with);
    }
    Ok(Handle::decode(rest.get(4..).unwrap_or_default(), fds)?)
}

/// The next frame. If it does not come in time, the answer is still owed.
fn next(line: &mut Line, deadline: Deadline, who: &str) -> Result<(Vec<u8>, Vec<Fd>)> {
    let heard = answer(&line.connection, deadline, who);
    line.owed = heard.as_ref().is_err_and(Error::is_timeout);
    heard
}

/// The line, when the threads before this one have their answers.
fn turn<'a>(line: &'a Mutex<Line>, deadline: Deadline, who: &str) -> Result<MutexGuard<'a, Line>> {
    let begin = Instant::now();
    loop {
        match line.try_lock() {
            Ok(line) => return Ok(line),
            Err(TryLockError::Poisoned(line)) => return Ok(line.into_inner()),
            Err(TryLockError::WouldBlock) if deadline.passed() => {
                let missing = format!("{who} does not answer other threads of this process; is it stopped?");
                return Err(Error::timed_out("redeeming a token", begin.elapsed(), missing));
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(20)),
        }
    }
}

/// What an owner answers, as long as it lives.
fn answer(connection: &Connection, deadline: Deadline, who: &str) -> Result<(Vec<u8>, Vec<Fd>)> {
    let begin = Instant::now();
    let asked = Asked::default();
    let heard = connection.recv_while(deadline, &|| !connection.peer().has_ended() && asked.goes_on());
    asked.end()?;
    match heard {
        Ok((frame, _)) if frame.first() == Some(&b'x') => {
            let why = Reader::new(&frame[1..]).text().unwrap_or_default();
            Err(Error::peer(PeerFaultKind::Failed, who, None, format!("the token cannot be redeemed: {why}")))
        }
        Ok((frame, fds)) if !frame.is_empty() => Ok((frame, fds)),
        Err(tensorwire_device::Error::TimedOut) if !connection.peer().has_ended() => Err(Error::timed_out(
            "redeeming a token",
            begin.elapsed(),
            format!("{who} does not answer; is it stopped?"),
        )),
        Ok(_) => Err(closed(connection, who)),
        Err(_) if connection.peer().has_ended() => Err(closed(connection, who)),
        Err(error) => Err(error.into()),
    }
}

/// Why an owner has closed its connection. One that dies does so a little before it is dead.
fn closed(connection: &Connection, who: &str) -> Error {
    let soon = Deadline::after(DYING);
    while !connection.peer().has_ended() && !soon.passed() {
        std::thread::sleep(Duration::from_millis(1));
    }
    if connection.peer().has_ended() {
        return Error::peer(PeerFaultKind::Died, who, None, "while a token was redeemed");
    }
    Error::peer(PeerFaultKind::Left, who, None, "it has closed its context, and its grants with it")
}

/// Why nothing could be sent to an owner.
fn unsent(connection: &Connection, error: tensorwire_device::Error, who: &str) -> Error {
    match error {
        tensorwire_device::Error::Io { source, .. }
            if matches!(source.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) =>
        {
            closed(connection, who)
        }
        tensorwire_device::Error::TimedOut => {
            let missing = format!("{who} does not take what is sent to it; is it stopped?");
            Error::timed_out("redeeming a token", Duration::ZERO, missing)
        }
        error => error.into(),
    }
}

fn exactly<const N: usize>(fds: Vec<Fd>) -> Result<[Fd; N]> {
    let count = fds.len();
    fds.try_into().map_err(|_| Error::misuse(format!("{count} descriptors instead of {N}")))
}

/// Writing to it must never wait.
fn checked_bell(fd: Fd) -> Result<Fd> {
    let flags = rustix::fs::fcntl_getfl(&fd).map_err(|e| Error::io("looking at a bell", e))?;
    if flags.contains(OFlags::NONBLOCK) { Ok(fd) } else { Err(Error::misuse("a bell that may block")) }
}
