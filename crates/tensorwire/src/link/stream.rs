//! Messages over a stream of bytes between two hosts, in one direction. See [`frame`] for what goes over it.
//!
//! What the stream holds on its way, it holds: a sender that finds no room in it waits, as it does at a full ring.

use tensorwire_device::fd::Received;
use tensorwire_device::{Caching, Queue, View};

use super::frame::{self, GIVEN_UP, HEAD, Head, PIECE, PIECE_HEAD, WHOLE};
use super::{Fault, Header, Inlet, Landing, Linked, Outlet, Standing};

/// What carries the bytes: a connection by TCP, or UCX. No call waits.
pub(super) trait Carrier: std::fmt::Debug + Send {
    /// Sends `head`, `body` and `tail`, as much as there is room for now: gives how many bytes of all together. The last of them
    /// may still be here: see [`flush`](Self::flush).
    fn send(&mut self, head: &[u8], body: Option<View<'_>>, tail: &[u8]) -> Linked<usize>;

    /// Sends what was taken and did not fit. Gives whether nothing is left.
    fn flush(&mut self) -> Linked<bool>;

    /// Receives into memory, at most as much as it holds.
    fn recv(&mut self, into: View<'_>) -> Linked<Received>;

    /// The same for private bytes.
    fn recv_bytes(&mut self, into: &mut [u8]) -> Linked<Received>;

    /// Has the sender's bell rung when there is room.
    fn arm_for_room(&self);

    /// Has the receiver's bell rung when something has come.
    fn arm_for_bytes(&self);
}

/// What is put or taken before others have their turn.
const TURN: usize = 4 << 20;
/// What a read of a head may bring along of the payload: a small message comes with one call of the system.
const AHEAD: usize = 4096;
/// What is sent in the place of the rest of a piece whose message was given up.
const FILLING: [u8; 4096] = [0; 4096];

/// The sender's end.
#[derive(Debug)]
pub(super) struct StreamOutlet {
    line: Box<dyn Carrier>,
    /// Heads that are not sent yet, and how much of them is.
    heads: Vec<u8>,
    sent: usize,
    /// Whether a message was begun, and its end is not among the heads and not sent.
    begun: bool,
    /// Its bytes behind the piece.
    rest: usize,
    /// Bytes of the piece that was begun.
    piece: usize,
    /// Bytes of a piece whose message was given up.
    owed: usize,
}

impl StreamOutlet {
    pub(super) fn new(line: Box<dyn Carrier>) -> Self {
        Self { line, heads: Vec::new(), sent: 0, begun: false, rest: 0, piece: 0, owed: 0 }
    }

    /// Sends heads, `body`, and `tail` behind it. Gives how much of `body`. What is left of `tail` then is a head.
    fn push(&mut self, body: Option<View<'_>>, tail: &[u8]) -> Linked<usize> {
        let heads = &self.heads[self.sent..];
        let (waiting, len) = (heads.len(), body.map_or(0, View::len));
        if waiting + len == 0 {
            return Ok(0);
        }
        let sent = self.line.send(heads, body, tail)?;
        self.sent += sent.min(waiting);
        if self.sent == self.heads.len() {
            self.heads.clear();
            self.sent = 0;
        }
        let put = sent.saturating_sub(waiting).min(len);
        if put == len {
            self.heads.extend(&tail[sent.saturating_sub(waiting + len)..]);
        }
        Ok(put)
    }
}

impl Outlet for StreamOutlet {
    fn begin(&mut self, header: Header) -> Linked<bool> {
        if !self.settle()? {
            return Ok(false);
        }
        // It goes with the first piece.
        self.heads.extend(Head::Message(header).to_bytes());
        (self.begun, self.rest) = (true, header.follow() as usize);
        Ok(true)
    }

    fn put(&mut self, _queue: &mut dyn Queue, rest: View<'_>, _caching: Caching) -> Linked<usize> {
        let mut done = 0;
        while done < rest.len().min(TURN) {
            if self.piece == 0 {
                self.piece = self.rest.min(PIECE);
                self.rest -= self.piece;
                self.heads.extend(frame::piece(self.piece));
            }
            let len = self.piece.min(rest.len() - done);
            let tail = if self.rest == 0 && len == self.piece { &frame::piece(WHOLE)[..] } else { &[] };
            let put = self.push(Some(rest.slice(done..done + len)?), tail)?;
            self.piece -= put;
            done += put;
            if put < len {
                break;
            }
            // The end was behind it.
            self.begun = self.rest > 0 || self.piece > 0;
        }
        if self.begun && self.rest == 0 && self.piece == 0 {
            // It has no bytes.
            self.begun = false;
            self.heads.extend(frame::piece(WHOLE));
        }
        Ok(done)
    }

    fn settle(&mut self) -> Linked<bool> {
        while self.owed > 0 {
            // The head of the piece is before its bytes.
            self.push(None, &[])?;
            if !self.heads.is_empty() {
                return Ok(false);
            }
            let filling = &FILLING[..self.owed.min(FILLING.len())];
            match self.line.send(filling, None, &[])? {
                0 => return Ok(false),
                sent => self.owed -= sent,
            }
            if self.owed == 0 {
                self.heads.extend(frame::piece(GIVEN_UP));
            }
        }
        self.push(None, &[])?;
        Ok(self.heads.is_empty() && self.line.flush()?)
    }

    fn give_up(&mut self) -> Linked<bool> {
        let unsent = self.heads.len() - self.sent;
        self.owed = std::mem::take(&mut self.piece);
        self.rest = 0;
        let ended = !std::mem::replace(&mut self.begun, false);
        if ended && unsent < PIECE_HEAD {
            // A part of its end is on its way.
            self.settle()?;
            return Ok(false);
        }
        // Neither an end need come nor a piece of which not even the head is on its way: heads are sent before what is behind them.
        if (ended || self.owed > 0) && unsent >= PIECE_HEAD {
            self.heads.truncate(self.heads.len() - PIECE_HEAD);
            self.owed = 0;
        }
        if self.owed == 0 {
            self.heads.extend(frame::piece(GIVEN_UP));
        }
        // What cannot be sent now follows before the next message.
        self.settle()?;
        Ok(true)
    }

    fn arm(&self) {
        self.line.arm_for_room();
    }

    fn close(&mut self) {
        // A message that was begun has been given up by now. Whoever does not read loses the farewell.
        if self.settle().is_ok_and(|settled| settled) {
            self.heads.extend(Head::Goodbye.to_bytes());
            let _ = self.settle();
        }
    }
}

/// The receiver's end.
#[derive(Debug)]
pub(super) struct StreamInlet {
    line: Box<dyn Carrier>,
    /// What has come: heads, and bytes of payloads that came with them. How much of it was taken, and where it ends.
    ahead: Box<[u8]>,
    taken: usize,
    end: usize,
    number: u64,
    /// Bytes of the message behind the piece, and of the piece.
    rest: u64,
    piece: usize,
    standing: Standing,
}

impl StreamInlet {
    pub(super) fn new(line: Box<dyn Carrier>) -> Self {
        Self {
            line,
            ahead: vec![0; AHEAD].into_boxed_slice(),
            taken: 0,
            end: 0,
            number: 0,
            rest: 0,
            piece: 0,
            standing: Standing::Open,
        }
    }

    /// The next bytes of a head, if they are there.
    fn head<const N: usize>(&mut self) -> Linked<Option<[u8; N]>> {
        loop {
            if let Some(head) = self.ahead[self.taken..self.end].first_chunk::<N>() {
                let head = *head;
                self.taken += N;
                return Ok(Some(head));
            }
            // What is left of a head moves to the front.
            self.ahead.copy_within(self.taken..self.end, 0);
            (self.taken, self.end) = (0, self.end - self.taken);
            match self.line.recv_bytes(&mut self.ahead[self.end..])? {
                Received::Bytes(got) => self.end += got,
                Received::Nothing => return Ok(None),
                Received::End => return Err(ended()),
            }
        }
    }
}

impl Inlet for StreamInlet {
    fn begin(&mut self) -> Linked<Option<Header>> {
        if self.standing == Standing::Closed {
            return Ok(None);
        }
        let Some(head) = self.head::<HEAD>()? else { return Ok(None) };
        match Head::from_bytes(&head) {
            Some(Head::Message(header)) if header.number == self.number => {
                self.number += 1;
                self.rest = header.follow();
                Ok(Some(header))
            }
            Some(Head::Goodbye) => {
                self.standing = Standing::Closed;
                Ok(None)
            }
            _ => Err(Fault::Nonsense),
        }
    }

    fn take(&mut self, _queue: &mut dyn Queue, mut into: Landing<'_>, most: usize) -> Linked<usize> {
        let mut done = 0;
        // Behind the last byte there is the end, too.
        while (done < most.min(TURN) || self.piece == 0) && self.standing == Standing::Open {
            if self.piece == 0 {
                let Some(head) = self.head::<PIECE_HEAD>()? else { break };
                match frame::piece_of(&head, self.rest) {
                    Some(GIVEN_UP) => self.standing = Standing::GivenUp,
                    Some(WHOLE) => self.standing = Standing::Whole,
                    Some(len) => {
                        self.piece = len;
                        self.rest -= len as u64;
                    }
                    None => return Err(Fault::Nonsense),
                }
                continue;
            }
            let len = self.piece.min(most - done);
            let ahead = &self.ahead[self.taken..self.end];
            let got = if ahead.is_empty() {
                let received = match &mut into {
                    Landing::Place(view, _) => self.line.recv(view.slice(done..done + len)?)?,
                    Landing::Keep(bytes) => append(&mut *self.line, bytes, len)?,
                    Landing::Drop => {
                        let mut nowhere = [0; 1 << 16];
                        let len = len.min(nowhere.len());
                        self.line.recv_bytes(&mut nowhere[..len])?
                    }
                };
                match received {
                    Received::Bytes(got) => got,
                    Received::Nothing => break,
                    Received::End => return Err(ended()),
                }
            } else {
                let ahead = &ahead[..len.min(ahead.len())];
                match &mut into {
                    Landing::Place(view, _) => {
                        view.slice(done..done + ahead.len())?.to_span().write(0, ahead)?;
                    }
                    Landing::Keep(bytes) => bytes.extend_from_slice(ahead),
                    Landing::Drop => {}
                }
                self.taken += ahead.len();
                ahead.len()
            };
            self.piece -= got;
            done += got;
        }
        Ok(done)
    }

    fn end(&mut self) {
        self.standing = Standing::Open;
    }

    fn standing(&self) -> Standing {
        self.standing
    }

    fn arm(&self) {
        self.line.arm_for_bytes();
    }
}

/// Receives at most `len` bytes behind those that are there.
fn append(line: &mut dyn Carrier, bytes: &mut Vec<u8>, len: usize) -> Linked<Received> {
    let had = bytes.len();
    bytes.resize(had + len, 0);
    let received = line.recv_bytes(&mut bytes[had..]);
    let got = if let Ok(Received::Bytes(got)) = received { got } else { 0 };
    bytes.truncate(had + got);
    received
}

fn ended() -> Fault {
    Fault::Lost("the connection ended without a farewell; did its process end?".into())
}
