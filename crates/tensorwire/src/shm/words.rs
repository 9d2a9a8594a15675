//! Last words: how a rank ended, for those who needed it.
//!
//! Three things are known of a rank that is gone, and all of them stay in the control region:
//!
//! - what it said itself: the exception or panic that ends it. The rank writes it before it closes the group or ends;
//! - how its process ended. The first rank that sees it writes it there;
//! - its last operation, in its records. If that timed out, whom it waited for, in its note.
//!
//! Readers trust none of it: it has a fixed length, and control characters are replaced.

use std::time::Duration;

use tensorwire_device::fd::End;
use tensorwire_device::flag::LINE;
use tensorwire_device::{Abort, Deadline};

use super::control::{Cause, Control, Map, NOTE, Note, RECORDS, Verdict, WORDS};
use super::record::{self, Record, State};
use super::sentence::{title, whom};
use super::view::{UntrustedMemory, text, word};
use crate::error::{Error, PeerFaultKind};

/// What is known of a rank that is gone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Words {
    /// "raised ValueError: ...", or nothing.
    said: String,
    end: Option<End>,
    /// Whether it has closed the group.
    closed: bool,
    /// " in all_reduce #3", " after barrier #1", or nothing.
    at: String,
    /// Its last operation, if that has timed out, and the ranks that it waited for.
    timed_out: Option<(String, Vec<usize>)>,
}

/// Of a status in its word: it was told.
const TOLD: u32 = 1 << 16;

/// Where in the line of that word a process says that it is about to end.
const ENDING_AT: usize = 8;

/// How long the status of a process that is about to end is waited for. The end of an interpreter takes a while.
const ENDS_IN: Duration = Duration::from_secs(5);

impl Words {
    /// Of the rank at a place. Takes any bytes.
    pub(crate) fn read(memory: &dyn UntrustedMemory, map: Map, place: usize) -> Self {
        let mut said = [0; WORDS - LINE];
        let said = match memory.read(map.words(place) + LINE, &mut said) {
            true => text(&said).replace('\n', " "),
            false => String::new(),
        };
        let status = word(memory, map.words(place));
        let end = (status & TOLD != 0).then(|| End::from_status((status & 0xffff) as i32));
        let mut ring = vec![0; RECORDS];
        let records = match memory.read(map.records(place), &mut ring) {
            true => record::parse(&ring),
            false => Vec::new(),
        };
        let inside = records.iter().find(|record| matches!(record.state, State::Running | State::Met));
        let at = match (inside, records.last()) {
            (Some(record), _) => format!(" in {}", title(record)),
            (None, Some(record)) if record.state == State::Queued => {
                format!(" after it had queued {}", title(record))
            }
            (None, Some(record)) => format!(" after {}", title(record)),
            (None, None) => String::new(),
        };
        let late = records.last().and_then(|last| Some((last.title(), missed(memory, map, place, last)?)));
        Self { said, end, closed: word(memory, map.left(place)) != 0, at, timed_out: late }
    }

    /// The error that its death means to rank `me`.
    pub(crate) fn died(&self, who: String, rank: usize, me: usize) -> Error {
        self.error(PeerFaultKind::Died, who, rank, (me, ""))
    }

    /// The error that its leaving means to rank `me`. `closed` is what to say if it has closed the group.
    pub(crate) fn left(&self, who: String, rank: usize, me: usize, closed: &str) -> Error {
        self.error(PeerFaultKind::Left, who, rank, (me, closed))
    }

    fn error(&self, kind: PeerFaultKind, who: String, rank: usize, (me, closed): (usize, &str)) -> Error {
        let (did, detail) = self.clause(kind, me, closed);
        Error::peer(kind, who, Some(rank), detail).having(did)
    }

    /// What it did, as a clause, and what else is known.
    fn clause(&self, kind: PeerFaultKind, me: usize, closed: &str) -> (String, String) {
        let died = kind == PeerFaultKind::Died;
        let detail = match self.end {
            _ if !died && self.closed => closed.to_owned(),
            _ if !died => "its process exited with 0 without closing the group".into(),
            Some(end) => format!("it {end}"),
            None => "its process has ended".into(),
        };
        match (&self.timed_out, &self.end) {
            // What a time-out raises says less than the sentence about it.
            _ if !self.said.is_empty() && !self.is_about_time() => (self.said.clone(), String::new()),
            (Some((operation, ranks)), _) => {
                let waiting = match whom(ranks, me) {
                    nobody if nobody.is_empty() => String::new(),
                    whom => format!(" waiting for {whom}"),
                };
                let verb = if died { "ended" } else { "left" };
                (format!("{verb} after {operation} timed out{waiting}"), detail)
            }
            // One that closed the group on its way out says less than the status it had.
            (None, Some(end)) if died || *end != End::Exited(0) => {
                (format!("{end}{}", self.at), String::new())
            }
            _ => (String::new(), detail),
        }
    }

    fn is_about_time(&self) -> bool {
        self.timed_out.is_some() && self.said.starts_with("raised TimeoutError")
    }

    /// The same for ranks of other hosts, in one line.
    pub(crate) fn line(&self, cause: Cause) -> String {
        let kind = if cause == Cause::Died { PeerFaultKind::Died } else { PeerFaultKind::Left };
        let (did, detail) = self.clause(kind, usize::MAX, "it has closed the group");
        match (did.is_empty(), detail.is_empty()) {
            // The kind of the fault says enough.
            (true, _) => String::new(),
            (false, true) => did,
            (false, false) => format!("{did}: {detail}"),
        }
    }
}

/// The ranks that an operation of a rank waited for, if it timed out.
fn missed(memory: &dyn UntrustedMemory, map: Map, place: usize, record: &Record) -> Option<Vec<usize>> {
    let verdict = || {
        let verdict = Verdict::from_code(word(memory, map.verdict(record.number as u32)));
        let Verdict { why, place } = verdict.filter(|verdict| verdict.place < map.ranks())?;
        why.is_timeout().then_some(place)
    };
    let place = match record.state {
        State::TimedOut if record.is_message() => return Some(record.peer.into_iter().collect()),
        // One that was queued is said to be timed out, whoever was the first to give up.
        State::TimedOut if record.queued.is_some() => verdict().unwrap_or(place),
        State::TimedOut => place,
        // A receive that was withdrawn.
        State::Cancelled if record.is_message() => return None,
        // Another rank was the first to give up.
        State::Cancelled => verdict()?,
        _ => return None,
    };
    let mut note = [0; NOTE];
    memory.read(map.note(place), &mut note).then(|| Note::read(&text(&note)).ranks)
}

/// The error of a rank of another host that is gone: what its host has told, or what is said where it told nothing.
pub(super) fn told(kind: PeerFaultKind, who: String, rank: usize, note: &str, silence: &str) -> Error {
    match note.is_empty() {
        true => Error::peer(kind, who, Some(rank), silence),
        false => Error::peer(kind, who, Some(rank), "").having(note),
    }
}

impl Control {
    /// Says why this rank ends: a clause such as "raised ValueError: ...". What was said before counts.
    pub(crate) fn say(&self, words: &str) {
        let at = self.map().words(self.me()) + LINE;
        let mut first = [0];
        if self.region().read(at, &mut first).is_err() || first != [0] {
            return;
        }
        let mut bytes = String::new();
        for c in words.chars().map(|c| if c.is_control() { ' ' } else { c }) {
            if bytes.len() + c.len_utf8() >= WORDS - LINE {
                break;
            }
            bytes.push(c);
        }
        if let Err(error) = self.region().write(at, bytes.as_bytes()) {
            tracing::warn!("writing the last words of this rank: {error}");
        }
    }

    /// Says that this process is about to end.
    pub(crate) fn ends(&self) {
        if let Err(error) = self.region().write(self.map().words(self.me()) + ENDING_AT, &[1]) {
            tracing::warn!("saying that this process is about to end: {error}");
        }
    }

    /// If the rank at a place has said that it is about to end, waits until it is known how, but not for long, and not
    /// where others want this rank to go on.
    pub(crate) fn await_end(&self, place: usize, deadline: Deadline, stop: &Abort) {
        let mut ending = [0];
        let at = self.map().words(place);
        if self.region().read(at + ENDING_AT, &mut ending).is_err() || ending == [0] {
            return;
        }
        let deadline = deadline.min(Deadline::after(ENDS_IN));
        while word(self, at) & TOLD == 0 && !deadline.passed() && !stop.is_set() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Writes down how the process of a rank has ended, unless somebody has.
    pub(crate) fn saw_end(&self, rank: usize, end: End) {
        let Some(place) = self.ranks().iter().position(|&other| other == rank) else { return };
        let word = self.line(self.map().words(place)).and_then(|line| Ok(Abort::new(&line)?));
        match word {
            Ok(word) => _ = word.set(TOLD | end.status() as u32 & 0xffff),
            Err(error) => tracing::warn!("writing down how rank {rank} ended: {error}"),
        }
    }
}
