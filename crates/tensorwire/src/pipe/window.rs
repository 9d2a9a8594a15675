//! How far a sender may be ahead of its reader.
//!
//! An end that waits for anything takes what the other end sends, and keeps what is not for it: the answer may stand behind that. So that
//! this has a bound, a sender counts the bytes of its messages that come unasked, and waits from [`WINDOW`] on until the reader has
//! taken some of them. The reader says so now and then, by the sum of all that it has taken. What is said in
//! answer to messages (that one was taken, is wanted, is let go, is delivered) is small and waits for nothing: so whoever waits for an
//! answer gets it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tensorwire_device::Deadline;

use super::End;
use super::pending::{How, over};
use crate::collective::{Completion, Tensor, Work};
use crate::error::{Error, Result};

/// Bytes that are on their way or wait for a reader.
const WINDOW: u64 = 8 << 20;
/// The reader says that it has taken so many.
const REPORT: u64 = WINDOW / 4;
/// The tag of that.
pub(super) const TAKEN: u64 = 2;

#[derive(Default)]
pub(super) struct Window(Mutex<State>);

#[derive(Default)]
struct State {
    /// Bytes of all messages that this end has sent, and how many of them the other end says to have taken.
    sent: u64,
    taken: u64,
    /// Messages that wait for room, in their order.
    line: VecDeque<Waiting>,
    tickets: u64,
    /// Those that have room and have not gone.
    granted: Vec<u64>,
    /// The one of the line that was told last, until its head has its place: the next is told then.
    unplaced: Option<u64>,
    /// Whether a thread tells one.
    telling: bool,
    /// The other direction: what this end has taken, and what it has said of that.
    here: u64,
    told: u64,
}

/// A message that waits for room.
struct Waiting {
    ticket: u64,
    cost: u64,
    completion: Completion,
    /// Its receive of what the reader says.
    report: Option<Work>,
}

impl State {
    fn has_room(&self, cost: u64) -> bool {
        // One alone may always go.
        let ahead = self.sent.saturating_sub(self.taken);
        ahead == 0 || ahead + cost <= WINDOW
    }

    fn grant(&mut self, ticket: u64, cost: u64) {
        self.sent += cost;
        self.granted.push(ticket);
    }

    /// Whether it had room; then it has none any more.
    fn revoke(&mut self, ticket: u64) -> bool {
        let at = self.granted.iter().position(|&granted| granted == ticket);
        at.map(|at| self.granted.swap_remove(at)).is_some()
    }

    fn remove(&mut self, ticket: u64) -> Option<Waiting> {
        let at = self.line.iter().position(|waiting| waiting.ticket == ticket)?;
        self.line.remove(at)
    }
}

impl Window {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets messages go for which there is room now, one after the other: whoever is told sends its head at once, or soon.
    fn let_go(&self) {
        loop {
            let mut state = self.lock();
            if state.telling || state.unplaced.is_some() {
                return;
            }
            let first = state.line.front().map(|first| (first.ticket, first.cost));
            let Some((ticket, cost)) = first.filter(|&(_, cost)| state.has_room(cost)) else { return };
            let Some(Waiting { completion, report, .. }) = state.line.pop_front() else { return };
            state.grant(ticket, cost);
            (state.unplaced, state.telling) = (Some(ticket), true);
            drop(state);
            drop(report);
            completion.finish(Ok(()), None);
            self.lock().telling = false;
        }
    }
}

/// Room for a message. If it is dropped before the message has gone, another one gets it.
pub(super) struct Room {
    end: Arc<End>,
    ticket: u64,
    cost: u64,
}

impl Room {
    /// Waits until there is room for a message, behind those that wait already.
    pub(super) async fn get(end: &Arc<End>, cost: u64, by: Deadline, how: How) -> Result<Self> {
        let (room, waits) = {
            let mut state = end.window.lock();
            state.tickets += 1;
            let room = Self { end: end.clone(), ticket: state.tickets, cost };
            if state.line.is_empty() && state.unplaced.is_none() && state.has_room(cost) {
                state.grant(room.ticket, cost);
                return Ok(room);
            }
            let (work, completion) = Work::pending("send");
            state.line.push_back(Waiting { ticket: room.ticket, cost, completion, report: None });
            (room, work)
        };
        listen(end, room.ticket, by)?;
        if how == How::Start {
            over(&waits).await;
        }
        waits.wait().map_err(|error| match error {
            Error::TimedOut { doing, after, ranks, .. } => {
                let missing =
                    "the other end has not taken messages that were sent before; this one is withdrawn";
                Error::TimedOut { doing, after, missing: missing.into(), ranks }
            }
            other => other,
        })?;
        Ok(room)
    }

    /// The head of the message has its place before all that comes later.
    pub(super) fn placed(&self) {
        let mut state = self.end.window.lock();
        if state.unplaced == Some(self.ticket) {
            state.unplaced = None;
            drop(state);
            self.end.window.let_go();
        }
    }

    /// The message has gone.
    pub(super) fn use_up(self) {
        self.end.window.lock().revoke(self.ticket);
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut state = self.end.window.lock();
        let waiting = state.remove(self.ticket);
        let granted = state.revoke(self.ticket);
        if granted {
            state.sent = state.sent.saturating_sub(self.cost);
        }
        if state.unplaced == Some(self.ticket) {
            state.unplaced = None;
        }
        drop(state);
        drop(waiting);
        self.end.window.let_go();
    }
}

/// Has a message that waits hear what the reader has taken. Its time is over with that of this receive.
fn listen(end: &Arc<End>, ticket: u64, by: Deadline) -> Result<()> {
    let word = Tensor::private(&[0_u8; 8])?;
    let report = end.group.recv(&word, end.other()).tag(TAKEN).deadline(by).start()?;
    let mut state = end.window.lock();
    let Some(waiting) = state.line.iter_mut().find(|waiting| waiting.ticket == ticket) else {
        drop(state);
        // Another message that waits gets what it would have heard.
        drop(report);
        return Ok(());
    };
    let before = waiting.report.replace(report.clone());
    drop(state);
    drop(before);
    let own = end.clone();
    report.on_done(move |result| own.window_moves(ticket, result.clone().map(|()| word), by));
    Ok(())
}

impl End {
    /// What a message that waits for room has heard.
    fn window_moves(self: &Arc<Self>, ticket: u64, word: Result<Tensor>, by: Deadline) {
        let word = word.and_then(|word| word.to_vec::<u8>());
        let (mut state, mut failed) = (self.window.lock(), None);
        match word {
            Ok(word) => {
                let sum = word.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
                state.taken = state.taken.max(sum).min(state.sent);
            }
            Err(error) => failed = state.remove(ticket).map(|waiting| (waiting, error)),
        }
        let waits = state.line.iter().any(|waiting| waiting.ticket == ticket);
        drop(state);
        self.window.let_go();
        if waits && let Err(error) = listen(self, ticket, by) {
            let mut state = self.window.lock();
            failed = state.remove(ticket).map(|waiting| (waiting, error));
        }
        if let Some((Waiting { completion, report, .. }, error)) = failed {
            drop(report);
            completion.finish(Err(error), None);
        }
    }

    /// This end has taken a message.
    pub(super) fn took(&self, cost: u64) {
        let report = {
            let mut state = self.window.lock();
            state.here = state.here.saturating_add(cost);
            (state.here - state.told >= REPORT).then(|| {
                state.told = state.here;
                state.here
            })
        };
        if let Some(sum) = report {
            match Tensor::private(&sum.to_le_bytes()) {
                Ok(word) => self.tell(TAKEN, &word),
                Err(error) => tracing::warn!(%error, "a sender is not told that its messages were taken"),
            }
        }
    }
}
