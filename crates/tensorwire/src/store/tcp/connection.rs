//! One connection to a server: whole fields in and out, each by a deadline.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::RecvFlags;
use tensorwire_device::Deadline;
use tensorwire_device::fd::Fd;

use super::super::wire::{self, Dialect, Frame};
use super::super::{Reply, Request};
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt;

/// Bytes that one read may take.
const CHUNK: usize = 16 << 10;
/// A length above this is nonsense, whatever server says it.
const MOST: u64 = 1 << 34;
/// The longest sleep in one system call. Deadlines further away need no system call of their own.
const TICK: Duration = Duration::from_millis(500);

/// A connection. It is good for one exchange after the other, until one did not end as it should.
#[derive(Debug)]
pub(super) struct Connection {
    stream: Fd<TcpStream>,
    /// The server, as errors name it.
    who: String,
    dialect: Dialect,
    output: Vec<u8>,
    input: Vec<u8>,
    /// How much of `input` was taken.
    at: usize,
    read_tick: Duration,
    write_tick: Duration,
    /// Whether the next bytes will be those of the next reply.
    in_step: bool,
}

impl Connection {
    /// Introduces us on a fresh connection and learns what the server understands.
    pub(super) fn introduce(stream: TcpStream, who: String, deadline: Deadline) -> Result<Self> {
        let stream = Fd::new(stream);
        let doing = |e| Error::io("preparing a connection to the store", e);
        stream.set_nodelay(true).map_err(doing)?;
        stream.set_read_timeout(Some(TICK)).map_err(doing)?;
        stream.set_write_timeout(Some(TICK)).map_err(doing)?;
        super::keep_alive(&stream);
        let mut connection = Self {
            stream,
            who,
            dialect: Dialect::Torch,
            output: Vec::new(),
            input: Vec::new(),
            at: 0,
            read_tick: TICK,
            write_tick: TICK,
            in_step: false,
        };
        let nonce = std::process::id();
        // All in one segment: torch's server drops a client whose first frame comes in two.
        connection.push(&Frame::Validate(wire::MAGIC));
        connection.push(&Frame::Ping(nonce));
        connection.push_request(false, Request::Check(vec![wire::PROBE.to_owned()]));
        connection.send(deadline)?;
        let echo = connection.word32(deadline)?;
        let ready = connection.byte(deadline)?;
        if echo != nonce || ready > 1 {
            return Err(
                connection.nonsense("it answers a greeting with other bytes; is it a TCPStore server?")
            );
        }
        if ready == wire::STATUS_DONE {
            connection.dialect = Dialect::Strict;
        }
        connection.in_step = true;
        Ok(connection)
    }

    /// What the server understands.
    pub(super) fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Whether it can be used: the last exchange ended well, and nothing came since, not even the end.
    /// A connection that was made before a fork is the parent's.
    pub(super) fn is_usable(&self) -> bool {
        if !self.stream.is_ours() {
            return false;
        }
        let mut byte = [0_u8];
        let peeked = rustix::net::recv(&self.stream, &mut byte[..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        self.in_step && self.at == self.input.len() && matches!(peeked, Err(Errno::AGAIN))
    }

    /// Whether the last exchange ended well.
    pub(super) fn is_in_step(&self) -> bool {
        self.in_step
    }

    /// Marks the begin of an exchange.
    pub(super) fn begin(&mut self) {
        self.in_step = false;
    }

    /// Marks its good end.
    pub(super) fn end(&mut self) {
        self.in_step = self.at == self.input.len();
    }

    pub(super) fn push(&mut self, frame: &Frame) {
        wire::encode(frame, &mut self.output);
    }

    pub(super) fn push_request(&mut self, strict: bool, request: Request) {
        self.push(&Frame::Operation { strict, request });
    }

    /// Sends what was pushed.
    pub(super) fn send(&mut self, deadline: Deadline) -> Result<()> {
        let mut sent = 0;
        while sent < self.output.len() {
            let tick = tick(deadline).ok_or_else(|| self.late("sending a request"))?;
            if tick != self.write_tick {
                self.stream.set_write_timeout(Some(tick)).map_err(|e| self.broken(&e))?;
                self.write_tick = tick;
            }
            match (&*self.stream).write(&self.output[sent..]) {
                Ok(len) => sent += len,
                Err(error) if is_transient(&error) => interrupt::check()?,
                Err(error) => return Err(self.broken(&error)),
            }
        }
        self.output.clear();
        self.output.shrink_to(CHUNK);
        Ok(())
    }

    /// One byte, or `None` if it has not come by the deadline.
    pub(super) fn byte_by(&mut self, deadline: Deadline) -> Result<Option<u8>> {
        Ok(if self.fill(1, deadline)? { self.take(1).first().copied() } else { None })
    }

    pub(super) fn byte(&mut self, deadline: Deadline) -> Result<u8> {
        self.byte_by(deadline)?.ok_or_else(|| self.late("waiting for its reply"))
    }

    pub(super) fn word32(&mut self, deadline: Deadline) -> Result<u32> {
        let mut word = [0; 4];
        word.copy_from_slice(self.need(4, deadline)?);
        Ok(u32::from_le_bytes(word))
    }

    pub(super) fn word(&mut self, deadline: Deadline) -> Result<u64> {
        let mut word = [0; 8];
        word.copy_from_slice(self.need(8, deadline)?);
        Ok(u64::from_le_bytes(word))
    }

    pub(super) fn bytes(&mut self, deadline: Deadline) -> Result<Vec<u8>> {
        let len = self.word(deadline)?;
        if len > MOST {
            return Err(self.nonsense(&format!("it announces {len} bytes")));
        }
        Ok(self.need(len as usize, deadline)?.to_vec())
    }

    pub(super) fn text(&mut self, deadline: Deadline) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.bytes(deadline)?).into_owned())
    }

    /// What a request gives, behind the status byte if there is one.
    pub(super) fn reply(&mut self, request: &Request, deadline: Deadline) -> Result<Reply> {
        Ok(match request {
            Request::Get(_) | Request::CompareSet { .. } | Request::Pop { .. } => {
                Reply::Value(self.bytes(deadline)?)
            }
            Request::Add(..) | Request::NumKeys | Request::QueueLen(_) => {
                Reply::Number(self.word(deadline)? as i64)
            }
            Request::Delete(_) => Reply::Truth(self.word(deadline)? as i64 > 0),
            Request::Check(_) => Reply::Truth(self.byte(deadline)? == 0),
            Request::MultiGet(keys) => {
                Reply::Values(keys.iter().map(|_| self.bytes(deadline)).collect::<Result<_>>()?)
            }
            Request::ListKeys => {
                let count = self.word(deadline)?;
                Reply::Keys((0..count).map(|_| self.text(deadline)).collect::<Result<_>>()?)
            }
            _ => Reply::Done,
        })
    }

    /// An error: the server sent what nobody can understand.
    pub(super) fn nonsense(&self, detail: &str) -> Error {
        Error::peer(PeerFaultKind::Misbehaved, self.who.clone(), None, detail)
    }

    fn need(&mut self, len: usize, deadline: Deadline) -> Result<&[u8]> {
        if self.fill(len, deadline)? { Ok(self.take(len)) } else { Err(self.late("waiting for its reply")) }
    }

    fn take(&mut self, len: usize) -> &[u8] {
        let taken = &self.input[self.at..self.at + len];
        self.at += len;
        taken
    }

    /// Reads until `len` bytes are there; gives whether they came by the deadline. Memory grows with what has come,
    /// not with what was announced.
    fn fill(&mut self, len: usize, deadline: Deadline) -> Result<bool> {
        if self.at == self.input.len() {
            self.input.clear();
            self.input.shrink_to(CHUNK);
            self.at = 0;
        }
        while self.input.len() - self.at < len {
            let Some(tick) = tick(deadline) else { return Ok(false) };
            if tick != self.read_tick {
                self.stream.set_read_timeout(Some(tick)).map_err(|e| self.broken(&e))?;
                self.read_tick = tick;
            }
            let room = (len - (self.input.len() - self.at)).clamp(CHUNK, 1 << 20);
            let end = self.input.len();
            self.input.resize(end + room, 0);
            let read = (&*self.stream).read(&mut self.input[end..]);
            self.input.truncate(end + read.as_ref().map_or(0, |len| *len));
            match read {
                Ok(0) => return Err(self.gone("it closed the connection; did its process end?")),
                Ok(_) => {}
                Err(error) if is_transient(&error) => interrupt::check()?,
                Err(error) => return Err(self.broken(&error)),
            }
        }
        Ok(true)
    }

    fn late(&self, doing: &str) -> Error {
        Error::timed_out(format!("{doing} ({})", self.who), Duration::ZERO, "")
    }

    fn broken(&self, error: &io::Error) -> Error {
        self.gone(&format!("{error}; did its process end?"))
    }

    fn gone(&self, detail: &str) -> Error {
        Error::peer(PeerFaultKind::Left, self.who.clone(), None, detail)
    }
}

/// How long the next system call may sleep. Far deadlines give the same answer again and again, so that
/// the socket's time-out is changed only when the end is near. A thread whose caller wants to be asked asks after each.
fn tick(deadline: Deadline) -> Option<Duration> {
    let most = if interrupt::is_looked_for() { interrupt::SLICE } else { TICK };
    deadline.remaining().map(|left| left.min(most).max(Duration::from_millis(1)))
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}
