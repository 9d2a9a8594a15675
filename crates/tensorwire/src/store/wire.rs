//! The frames of torch's TCPStore, without sockets: bytes to requests and back.
//!
//! A frame is an operation code and its fields. Integers are little-endian; keys and values are a u64 length and
//! bytes; operations on several keys start with a u64 count. Torch's clients put "/" before every key of a user.
//!
//! One code is ours. [`STRICT`] before a frame asks a tensorwire server to execute it by the rules of [`Request`]:
//! `get` waits, `pop` takes while it waits, a failed `compare_set` is seen. The server then begins every answer
//! with a status byte. A client asks for the key [`PROBE`] first. Only a server of tensorwire has it, so the client
//! learns whether it may use the code.

use super::{Limits, Reply, Request};

/// What the first frame of a connection must carry.
pub const MAGIC: u32 = 0x3C85_F7CE;
/// The code that comes before a strict frame.
pub const STRICT: u8 = 64;
/// A key that exists on tensorwire's servers only: `CHECK` finds it, nothing else does.
pub const PROBE: &str = "tensorwire/strict/1";

/// Status byte: it is done; the reply follows.
pub const STATUS_DONE: u8 = 0;
/// Status byte: the waiting request was cancelled.
pub const STATUS_CANCELED: u8 = 1;
/// Status byte of strict replies: it was refused; the reason follows.
pub const STATUS_REFUSED: u8 = 2;

/// What a server understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Dialect {
    /// Torch's operations only.
    Torch,
    /// Ours as well.
    Strict,
}

/// The operation codes.
pub mod code {
    #![allow(missing_docs)]
    pub const VALIDATE: u8 = 0;
    pub const SET: u8 = 1;
    pub const COMPARE_SET: u8 = 2;
    pub const GET: u8 = 3;
    pub const ADD: u8 = 4;
    pub const CHECK: u8 = 5;
    pub const WAIT: u8 = 6;
    pub const NUM_KEYS: u8 = 7;
    pub const DELETE: u8 = 8;
    pub const APPEND: u8 = 9;
    pub const MULTI_GET: u8 = 10;
    pub const MULTI_SET: u8 = 11;
    pub const CANCEL_WAIT: u8 = 12;
    pub const PING: u8 = 13;
    pub const QUEUE_PUSH: u8 = 14;
    pub const QUEUE_POP: u8 = 15;
    pub const QUEUE_LEN: u8 = 16;
    pub const LIST_KEYS: u8 = 17;
    pub const BARRIER: u8 = 18;
}

/// One frame of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Frame {
    /// The first frame of a connection, with its magic number.
    Validate(u32),
    /// Asks for the same number back.
    Ping(u32),
    /// Ends this connection's waits.
    CancelWait,
    /// An operation. Its keys are as on the wire.
    Operation {
        /// Whether it came behind [`STRICT`].
        strict: bool,
        /// The operation.
        request: Request,
    },
}

/// Finds and decodes frames in a stream of bytes. It remembers how far it has looked into a frame that is not
/// complete, so that a frame in many pieces costs no more than one in a single piece.
#[derive(Debug, Default)]
pub struct Decoder {
    scan: Option<Scan>,
}

impl Decoder {
    /// The first frame of `bytes` and its length, `None` if it is not complete. `bytes` must start where the last
    /// frame ended, and an incomplete frame must be shown again with more behind it. After an error the stream is lost.
    pub fn next(&mut self, bytes: &[u8], limits: &Limits) -> Result<Option<(Frame, usize)>, String> {
        let mut scan = match self.scan.take() {
            Some(scan) => scan,
            None => match Scan::start(bytes)? {
                Some(scan) => scan,
                None => return Ok(None),
            },
        };
        if scan.run(bytes, limits)? {
            let frame = bytes.get(..scan.at).and_then(|bytes| Fields { rest: bytes }.frame());
            return match frame {
                Some(frame) => Ok(Some((frame, scan.at))),
                None => Err("a key is not UTF-8".into()),
            };
        }
        self.scan = Some(scan);
        Ok(None)
    }
}

/// What a frame is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Key,
    Value,
    Word32,
    Word64,
}

/// The fields behind a code, and whether a count comes before them and they repeat.
fn layout(code: u8) -> Option<(bool, &'static [Field])> {
    use Field::{Key, Value, Word32, Word64};
    Some(match code {
        code::VALIDATE | code::PING => (false, &[Word32]),
        code::NUM_KEYS | code::CANCEL_WAIT | code::LIST_KEYS => (false, &[]),
        code::GET | code::DELETE | code::QUEUE_POP | code::QUEUE_LEN => (false, &[Key]),
        code::SET | code::APPEND | code::QUEUE_PUSH => (false, &[Key, Value]),
        code::COMPARE_SET => (false, &[Key, Value, Value]),
        code::ADD | code::BARRIER => (false, &[Key, Word64]),
        code::CHECK | code::WAIT | code::MULTI_GET => (true, &[Key]),
        code::MULTI_SET => (true, &[Key, Value]),
        _ => return None,
    })
}

/// How far into a frame the decoder has looked.
#[derive(Debug)]
struct Scan {
    /// Where the next field starts.
    at: usize,
    fields: &'static [Field],
    /// Which field is next.
    next: usize,
    /// How often the fields are still to come; `None` until the count has been read.
    rounds: Option<u64>,
}

impl Scan {
    fn start(bytes: &[u8]) -> Result<Option<Self>, String> {
        let (at, code) = match bytes {
            [STRICT, code, ..] => (2, *code),
            [] | [STRICT] => return Ok(None),
            [code, ..] => (1, *code),
        };
        let (counted, fields) = layout(code).ok_or_else(|| format!("unknown operation code {code}"))?;
        let rounds = if counted { None } else { Some(u64::from(!fields.is_empty())) };
        Ok(Some(Self { at, fields, next: 0, rounds }))
    }

    /// Goes on; gives whether the frame is complete.
    fn run(&mut self, bytes: &[u8], limits: &Limits) -> Result<bool, String> {
        loop {
            if self.at > limits.request {
                return Err(format!("a request of more than {} bytes", limits.request));
            }
            let Some(rounds) = self.rounds else {
                let Some(count) = word(bytes, self.at) else { return Ok(false) };
                if count > limits.keys_per_request as u64 {
                    return Err(format!(
                        "a request of {count} keys, at most {} are taken",
                        limits.keys_per_request
                    ));
                }
                self.at += 8;
                self.rounds = Some(count);
                continue;
            };
            if rounds == 0 {
                return Ok(true);
            }
            let Some(len) = self.field_len(bytes, limits)? else { return Ok(false) };
            if self.at + len > bytes.len() {
                // Known to be too long already, before its bytes come.
                let too_long = self.at + len > limits.request;
                return if too_long {
                    Err(format!("a request of more than {} bytes", limits.request))
                } else {
                    Ok(false)
                };
            }
            self.at += len;
            self.next += 1;
            if self.next == self.fields.len() {
                self.next = 0;
                self.rounds = Some(rounds - 1);
            }
        }
    }

    /// The length of the next field with its own length, if that is there.
    fn field_len(&self, bytes: &[u8], limits: &Limits) -> Result<Option<usize>, String> {
        let (what, most) = match self.fields[self.next] {
            Field::Word32 => return Ok(Some(4)),
            Field::Word64 => return Ok(Some(8)),
            Field::Key => ("key", limits.key),
            Field::Value => ("value", limits.value),
        };
        let Some(len) = word(bytes, self.at) else { return Ok(None) };
        match usize::try_from(len) {
            Ok(len) if len <= most => Ok(Some(8 + len)),
            _ => Err(format!("a {what} of {len} bytes, at most {most} are taken")),
        }
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

/// Takes the fields of a complete frame apart. `None` cannot come from a scanned frame, except for a key that is
/// not UTF-8.
struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    fn frame(mut self) -> Option<Frame> {
        let mut code = self.take(1)?[0];
        let strict = code == STRICT;
        if strict {
            code = self.take(1)?[0];
        }
        let request = match code {
            code::VALIDATE => return Some(Frame::Validate(self.word32()?)),
            code::PING => return Some(Frame::Ping(self.word32()?)),
            code::CANCEL_WAIT => return Some(Frame::CancelWait),
            code::SET => Request::Set(self.key()?, self.value()?),
            code::COMPARE_SET => {
                Request::CompareSet { key: self.key()?, expected: self.value()?, desired: self.value()? }
            }
            code::GET => Request::Get(self.key()?),
            code::ADD => Request::Add(self.key()?, self.word64()? as i64),
            code::CHECK => Request::Check(self.keys()?),
            code::WAIT => Request::Wait(self.keys()?),
            code::NUM_KEYS => Request::NumKeys,
            code::DELETE => Request::Delete(self.key()?),
            code::APPEND => Request::Append(self.key()?, self.value()?),
            code::MULTI_GET => Request::MultiGet(self.keys()?),
            code::MULTI_SET => {
                let count = self.word64()?;
                Request::MultiSet(
                    (0..count).map(|_| Some((self.key()?, self.value()?))).collect::<Option<_>>()?,
                )
            }
            code::QUEUE_PUSH => Request::Push(self.key()?, self.value()?),
            code::QUEUE_POP => Request::Pop { key: self.key()?, wait: strict },
            code::QUEUE_LEN => Request::QueueLen(self.key()?),
            code::LIST_KEYS => Request::ListKeys,
            code::BARRIER => {
                let (key, world) = (self.key()?, self.word64()? as i64);
                // Torch counts a world below 1 as met at once.
                let world = if strict { world.max(0) } else { world.max(1) };
                Request::Barrier { key, world: world.unsigned_abs() }
            }
            _ => return None,
        };
        Some(Frame::Operation { strict, request })
    }

    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(taken)
    }

    fn word32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn word64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn value(&mut self) -> Option<Vec<u8>> {
        let len = usize::try_from(self.word64()?).ok()?;
        Some(self.take(len)?.to_vec())
    }

    fn key(&mut self) -> Option<String> {
        let len = usize::try_from(self.word64()?).ok()?;
        std::str::from_utf8(self.take(len)?).ok().map(str::to_owned)
    }

    fn keys(&mut self) -> Option<Vec<String>> {
        let count = self.word64()?;
        (0..count).map(|_| self.key()).collect()
    }
}

/// Appends a frame to `out`. `Pop` without waiting has no strict form.
pub fn encode(frame: &Frame, out: &mut Vec<u8>) {
    let (strict, request) = match frame {
        Frame::Validate(magic) => return put_small(out, code::VALIDATE, *magic),
        Frame::Ping(nonce) => return put_small(out, code::PING, *nonce),
        Frame::CancelWait => return out.push(code::CANCEL_WAIT),
        Frame::Operation { strict, request } => (*strict, request),
    };
    if strict {
        out.push(STRICT);
    }
    match request {
        Request::Set(key, value) => put_pair(out, code::SET, key, value),
        Request::CompareSet { key, expected, desired } => {
            put_pair(out, code::COMPARE_SET, key, expected);
            put_bytes(out, desired);
        }
        Request::Get(key) => put_key(out, code::GET, key),
        Request::Add(key, delta) => {
            put_key(out, code::ADD, key);
            out.extend_from_slice(&delta.to_le_bytes());
        }
        Request::Check(keys) => put_keys(out, code::CHECK, keys),
        Request::Wait(keys) => put_keys(out, code::WAIT, keys),
        Request::NumKeys => out.push(code::NUM_KEYS),
        Request::Delete(key) => put_key(out, code::DELETE, key),
        Request::Append(key, value) => put_pair(out, code::APPEND, key, value),
        Request::MultiGet(keys) => put_keys(out, code::MULTI_GET, keys),
        Request::MultiSet(pairs) => {
            out.push(code::MULTI_SET);
            put_word(out, pairs.len() as u64);
            for (key, value) in pairs {
                put_bytes(out, key.as_bytes());
                put_bytes(out, value);
            }
        }
        Request::Push(key, value) => put_pair(out, code::QUEUE_PUSH, key, value),
        Request::Pop { key, .. } => put_key(out, code::QUEUE_POP, key),
        Request::QueueLen(key) => put_key(out, code::QUEUE_LEN, key),
        Request::ListKeys => out.push(code::LIST_KEYS),
        Request::Barrier { key, world } => {
            put_key(out, code::BARRIER, key);
            put_word(out, (*world).min(i64::MAX as u64));
        }
    }
}

/// Appends a length and bytes, as in replies too.
pub fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_word(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Appends a 64-bit number.
pub fn put_word(out: &mut Vec<u8>, word: u64) {
    out.extend_from_slice(&word.to_le_bytes());
}

fn put_small(out: &mut Vec<u8>, code: u8, word: u32) {
    out.push(code);
    out.extend_from_slice(&word.to_le_bytes());
}

fn put_key(out: &mut Vec<u8>, code: u8, key: &str) {
    out.push(code);
    put_bytes(out, key.as_bytes());
}

fn put_pair(out: &mut Vec<u8>, code: u8, key: &str, value: &[u8]) {
    put_key(out, code, key);
    put_bytes(out, value);
}

fn put_keys(out: &mut Vec<u8>, code: u8, keys: &[String]) {
    out.push(code);
    put_word(out, keys.len() as u64);
    for key in keys {
        put_bytes(out, key.as_bytes());
    }
}

/// Appends what a reply is made of, behind its status byte if it has one.
pub(super) fn put_reply(out: &mut Vec<u8>, reply: &Reply) {
    match reply {
        Reply::Done | Reply::Nothing => {}
        Reply::Value(value) => put_bytes(out, value),
        Reply::Number(number) => put_word(out, *number as u64),
        Reply::Truth(truth) => out.push(u8::from(!truth)),
        Reply::Values(values) => values.iter().for_each(|value| put_bytes(out, value)),
        Reply::Keys(keys) => {
            put_word(out, keys.len() as u64);
            keys.iter().for_each(|key| put_bytes(out, key.as_bytes()));
        }
    }
}

#[cfg(test)]
mod tests;
