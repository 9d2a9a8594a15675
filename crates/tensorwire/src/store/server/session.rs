//! One client's side of the server, without its socket: bytes of requests go in, bytes of replies come out.

use super::super::engine::{Answer, Engine, Token};
use super::super::wire::{self, Decoder, Frame};
use super::super::{Limits, Reply, Request};

/// Replies that a client has not read yet before its next requests are left alone.
const HIGH_WATER: usize = 1 << 20;
/// What a buffer may keep for its next use.
const KEPT: usize = 64 << 10;
/// Waits that one connection may have at once. Torch's clients have one.
const PARKED: usize = 1024;

/// The protocol state of one connection.
#[derive(Debug)]
pub(super) struct Session {
    slot: u32,
    sequence: u32,
    validated: bool,
    /// Whether `input` may hold complete requests, left alone because of congestion.
    backlog: bool,
    decoder: Decoder,
    /// Bytes of requests not yet executed.
    input: Vec<u8>,
    /// Bytes of replies, of which the first `sent` are gone.
    output: Vec<u8>,
    sent: usize,
    parked: Vec<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    token: Token,
    strict: bool,
}

/// What all sessions of a server share.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) engine: Engine,
    pub(super) limits: Limits,
    /// Answers for waits of any session, to be delivered by whoever fed a session.
    pub(super) released: Vec<(Token, Answer)>,
}

impl Service {
    pub(super) fn new(limits: Limits) -> Self {
        Self { engine: Engine::new(limits.clone()), limits, released: Vec::new() }
    }
}

/// The slot of the session that a token belongs to.
pub(super) fn slot_of(token: Token) -> usize {
    (token >> 32) as usize
}

impl Session {
    pub(super) fn new(slot: u32) -> Self {
        Self {
            slot,
            sequence: 0,
            validated: false,
            backlog: false,
            decoder: Decoder::default(),
            input: Vec::new(),
            output: Vec::new(),
            sent: 0,
            parked: Vec::new(),
        }
    }

    /// Executes the requests that `bytes` complete. An error is the reason to close the connection.
    pub(super) fn feed(&mut self, bytes: &[u8], service: &mut Service) -> Result<(), String> {
        if self.input.is_empty() {
            let used = self.execute(bytes, service)?;
            self.input.extend_from_slice(&bytes[used..]);
            return Ok(());
        }
        let mut input = std::mem::take(&mut self.input);
        input.extend_from_slice(bytes);
        let used = self.execute(&input, service)?;
        input.drain(..used);
        if !input.is_empty() || input.capacity() <= KEPT {
            self.input = input;
        }
        Ok(())
    }

    /// Delivers the answer to a wait.
    pub(super) fn release(&mut self, token: Token, answer: Answer) -> Result<(), String> {
        let Some(at) = self.parked.iter().position(|waiting| waiting.token == token) else { return Ok(()) };
        let strict = self.parked.swap_remove(at).strict;
        self.reply(strict, false, answer)
    }

    /// Forgets the client's waits.
    pub(super) fn close(&mut self, service: &mut Service) {
        for waiting in self.parked.drain(..) {
            service.engine.cancel(waiting.token);
        }
    }

    /// Whether the client reads so slowly that its next requests have to wait.
    pub(super) fn is_congested(&self) -> bool {
        self.unsent().len() > HIGH_WATER
    }

    /// Whether requests were left alone because of that.
    pub(super) fn has_backlog(&self) -> bool {
        self.backlog
    }

    /// Whether the client has said that it speaks this protocol.
    pub(super) fn is_validated(&self) -> bool {
        self.validated
    }

    pub(super) fn unsent(&self) -> &[u8] {
        self.output.get(self.sent..).unwrap_or_default()
    }

    pub(super) fn sent(&mut self, len: usize) {
        self.sent += len;
        if self.sent >= self.output.len() {
            self.sent = 0;
            if self.output.capacity() > KEPT {
                self.output = Vec::new();
            }
            self.output.clear();
        }
    }

    /// Bytes held for this client.
    pub(super) fn held(&self) -> usize {
        self.input.len() + self.unsent().len()
    }

    /// Executes the complete frames of `bytes` and gives their length.
    fn execute(&mut self, bytes: &[u8], service: &mut Service) -> Result<usize, String> {
        let mut used = 0;
        self.backlog = false;
        loop {
            if self.is_congested() {
                self.backlog = true;
                return Ok(used);
            }
            let Some((frame, len)) = self.decoder.next(&bytes[used..], &service.limits)? else {
                return Ok(used);
            };
            used += len;
            self.frame(frame, service)?;
        }
    }

    fn frame(&mut self, frame: Frame, service: &mut Service) -> Result<(), String> {
        if !self.validated {
            self.validated = frame == Frame::Validate(wire::MAGIC);
            return if self.validated {
                Ok(())
            } else {
                Err("it does not start as a client of TCPStore does".into())
            };
        }
        // The reply of a strict wait has no fixed length, so nothing may come between.
        if self.parked.last().is_some_and(|waiting| waiting.strict) && frame != Frame::CancelWait {
            return Err("a strict request waits, and it sent another one".into());
        }
        match frame {
            Frame::Validate(wire::MAGIC) => Ok(()),
            Frame::Validate(_) => Err("a wrong magic number".into()),
            Frame::Ping(nonce) => {
                self.output.extend_from_slice(&nonce.to_le_bytes());
                Ok(())
            }
            Frame::CancelWait => {
                self.close(service);
                self.output.push(wire::STATUS_CANCELED);
                Ok(())
            }
            Frame::Operation { strict: false, request } => self.plain(request, service),
            Frame::Operation { strict: true, request } => self.strict(request, service),
        }
    }

    /// Executes a request as torch's server does.
    fn plain(&mut self, request: Request, service: &mut Service) -> Result<(), String> {
        let engine = &mut service.engine;
        match &request {
            Request::Get(key) => wire::put_bytes(&mut self.output, engine.value(key).unwrap_or_default()),
            Request::MultiGet(keys) => {
                let total =
                    keys.iter().map(|key| 8 + engine.value(key).map_or(0, <[u8]>::len)).sum::<usize>();
                fits(total, &service.limits)?;
                for key in keys {
                    wire::put_bytes(&mut self.output, engine.value(key).unwrap_or_default());
                }
            }
            Request::CompareSet { key, expected, .. }
                if !expected.is_empty() && engine.value(key).is_none() =>
            {
                wire::put_bytes(&mut self.output, expected);
            }
            Request::Check(keys) if matches!(keys.as_slice(), [key] if key == wire::PROBE) => {
                self.output.push(wire::STATUS_DONE);
            }
            Request::Pop { key, .. } => {
                wire::put_word(&mut self.output, engine.queue_len(key) as u64);
                if let Some(Ok(Reply::Value(value))) = engine.apply(0, request, &mut service.released) {
                    wire::put_bytes(&mut self.output, &value);
                }
            }
            Request::ListKeys => self.list(service)?,
            _ => return self.apply(false, request, service),
        }
        Ok(())
    }

    /// Executes a request by our own rules.
    fn strict(&mut self, request: Request, service: &mut Service) -> Result<(), String> {
        match request {
            Request::NumKeys => {
                let count = service.engine.keys().filter(|key| key.starts_with('/')).count();
                self.reply(true, false, Ok(Reply::Number(count as i64)))
            }
            Request::ListKeys => {
                self.output.push(wire::STATUS_DONE);
                self.list(service)
            }
            request => self.apply(true, request, service),
        }
    }

    fn apply(&mut self, strict: bool, request: Request, service: &mut Service) -> Result<(), String> {
        if self.parked.len() >= PARKED {
            return Err(format!("more than {PARKED} waits at once"));
        }
        let silent = matches!(
            request,
            Request::Set(..) | Request::Append(..) | Request::MultiSet(_) | Request::Push(..)
        );
        let deletes = matches!(request, Request::Delete(_));
        let token = u64::from(self.slot) << 32 | u64::from(self.sequence);
        match service.engine.apply(token, request, &mut service.released) {
            Some(Ok(Reply::Truth(there))) if deletes => {
                self.reply(strict, silent, Ok(Reply::Number(i64::from(there))))
            }
            Some(answer) => self.reply(strict, silent, answer),
            None => {
                self.sequence = self.sequence.wrapping_add(1);
                self.parked.push(Waiting { token, strict });
                Ok(())
            }
        }
    }

    /// Writes an answer. To a refusal torch's protocol knows one answer only: the connection ends.
    fn reply(&mut self, strict: bool, silent: bool, answer: Answer) -> Result<(), String> {
        match answer {
            Err(why) if strict => {
                self.output.push(wire::STATUS_REFUSED);
                wire::put_bytes(&mut self.output, why.as_bytes());
                return Ok(());
            }
            Err(why) => return Err(why),
            Ok(reply) => {
                if strict || (reply == Reply::Done && !silent) {
                    self.output.push(wire::STATUS_DONE);
                }
                wire::put_reply(&mut self.output, &reply);
            }
        }
        Ok(())
    }

    fn list(&mut self, service: &Service) -> Result<(), String> {
        let keys = service.engine.keys();
        wire::put_word(&mut self.output, keys.len() as u64);
        let before = self.output.len();
        for key in keys {
            wire::put_bytes(&mut self.output, key.as_bytes());
            fits(self.output.len() - before, &service.limits)?;
        }
        Ok(())
    }
}

fn fits(reply: usize, limits: &Limits) -> Result<(), String> {
    if reply <= limits.request {
        Ok(())
    } else {
        Err(format!("a reply of more than {} bytes", limits.request))
    }
}
