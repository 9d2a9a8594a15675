//! Calls to a server of torch: several exchanges each, arranged so that its faults do no harm.
//!
//! - Its GET of a missing key gives nothing, or ends the connection. So we always check first that the key exists.
//! - Its legacy server forgets to wake waiters after a compare-and-set. So a wait looks for itself now and then.
//! - Its libuv server keeps a waiter of a queue after the wait and sends it a stray byte later. This byte would be
//!   taken for a part of another reply. So a call that really waits uses a connection of its own.
//! - Its barrier lets everybody through when it is used again. So our barrier there is made of counters.
//! - Some of its requests have no reply. So we send a PING behind them, which has one. The caller then sees an
//!   error.

use std::time::{Duration, Instant};

use tensorwire_device::Deadline;

use super::super::wire::Frame;
use super::super::{Reply, Request, Store, barrier};
use super::connection::Connection;
use super::{TcpStore, at_least, reach, strict};
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::Pace;

/// After how long a wait looks for itself the first time, and how often at last.
const LOOKS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// The first pause between two attempts to pop, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));

/// A server of torch and a connection to it.
pub(super) struct Foreign<'a> {
    store: &'a TcpStore,
    connection: &'a mut Connection,
}

impl<'a> Foreign<'a> {
    pub(super) fn new(store: &'a TcpStore, connection: &'a mut Connection) -> Self {
        Self { store, connection }
    }

    pub(super) fn execute(mut self, request: Request, deadline: Deadline) -> Result<Reply> {
        let patience = at_least(deadline);
        let result = match request {
            Request::Set(..) | Request::Append(..) | Request::MultiSet(_) | Request::Push(..) => {
                self.confirmed(request, patience)
            }
            Request::CompareSet { key, expected, desired } => {
                self.compare_set(key, expected, desired, patience)
            }
            Request::Get(_) | Request::MultiGet(_) => self.get(request, deadline),
            Request::Wait(keys) => self.wait(keys, deadline).map(|()| Reply::Done),
            Request::Pop { key, wait: true } => self.pop(key, deadline),
            Request::Pop { wait: false, .. } => {
                self.connection.begin();
                try_pop(self.connection, request, patience)
            }
            Request::NumKeys => self.num_keys(patience),
            Request::Barrier { key, world } => {
                // Called through the store again, which adds the slash once more.
                let key = key.strip_prefix('/').unwrap_or(&key);
                barrier::by_counters(self.store as &dyn Store, key, world, deadline).map(|()| Reply::Done)
            }
            other => self.ask(other, patience),
        };
        result.map_err(explain)
    }

    /// One request, one reply.
    fn ask(&mut self, request: Request, deadline: Deadline) -> Result<Reply> {
        self.connection.begin();
        self.connection.push_request(false, request.clone());
        self.connection.send(deadline)?;
        let reply = self.connection.reply(&request, deadline)?;
        self.connection.end();
        Ok(reply)
    }

    /// A request without a reply, and a PING.
    fn confirmed(&mut self, request: Request, deadline: Deadline) -> Result<Reply> {
        self.connection.begin();
        self.connection.push_request(false, request);
        let nonce = std::process::id();
        self.connection.push(&Frame::Ping(nonce));
        self.connection.send(deadline)?;
        if self.connection.word32(deadline)? != nonce {
            return Err(self.connection.nonsense("a PING came back with another number"));
        }
        self.connection.end();
        Ok(Reply::Done)
    }

    /// The server gives `expected` where the key is missing. That is no success, and it can be told: a success
    /// gives `desired`. Only where both are the same the key must be looked for.
    fn compare_set(
        &mut self,
        key: String,
        expected: Vec<u8>,
        desired: Vec<u8>,
        deadline: Deadline,
    ) -> Result<Reply> {
        let same = expected == desired;
        let request = Request::CompareSet { key: key.clone(), expected: expected.clone(), desired };
        let reply = self.ask(request, deadline)?;
        if expected.is_empty() || reply != Reply::Value(expected) {
            return Ok(reply);
        }
        let missing = !same || self.ask(Request::Check(vec![key]), deadline)? == Reply::Truth(false);
        Ok(if missing { Reply::Value(Vec::new()) } else { reply })
    }

    fn get(&mut self, request: Request, deadline: Deadline) -> Result<Reply> {
        let keys = match &request {
            Request::Get(key) => vec![key.clone()],
            Request::MultiGet(keys) => keys.clone(),
            _ => Vec::new(),
        };
        loop {
            self.wait(keys.clone(), deadline)?;
            let reply = self.ask(request.clone(), at_least(deadline))?;
            let empty = match &reply {
                Reply::Value(value) => value.is_empty(),
                Reply::Values(values) => values.iter().any(Vec::is_empty),
                _ => false,
            };
            // An empty value may be one, or a key that was deleted after the wait.
            if !empty || self.check(&keys, at_least(deadline))? {
                return Ok(reply);
            }
        }
    }

    fn check(&mut self, keys: &[String], deadline: Deadline) -> Result<bool> {
        Ok(keys.is_empty() || self.ask(Request::Check(keys.to_vec()), deadline)? == Reply::Truth(true))
    }

    fn wait(&mut self, keys: Vec<String>, deadline: Deadline) -> Result<()> {
        let mut waiting: Option<Connection> = None;
        let mut look = LOOKS.0;
        loop {
            if self.check(&keys, at_least(deadline))? {
                return Ok(());
            }
            if deadline.passed() {
                self.connection.begin();
                let missing = strict::missing(self.connection, &Request::Wait(keys), at_least(deadline))?;
                self.connection.end();
                return Err(Error::timed_out("", Duration::ZERO, missing));
            }
            let waiter = match &mut waiting {
                Some(waiter) => waiter,
                None => {
                    let mut fresh =
                        reach::connect(&self.store.host, self.store.port, deadline, self.store.refusal)?;
                    fresh.push_request(false, Request::Wait(keys.clone()));
                    fresh.send(deadline)?;
                    waiting.insert(fresh)
                }
            };
            if waiter.byte_by(deadline.min(Deadline::after(look)))?.is_some() {
                waiting = None;
            }
            look = (look * 2).min(LOOKS.1);
        }
    }

    /// Several may wait for one value: who loses asks again.
    fn pop(&mut self, key: String, deadline: Deadline) -> Result<Reply> {
        let mut pace = Pace::since(Instant::now());
        let mut pause = PAUSES.0;
        loop {
            self.connection.begin();
            let reply =
                try_pop(self.connection, Request::Pop { key: key.clone(), wait: false }, at_least(deadline))?;
            if reply != Reply::Nothing {
                return Ok(reply);
            }
            let Some(left) = deadline.remaining() else {
                return Err(Error::timed_out("", Duration::ZERO, "nothing came in time"));
            };
            pace.look(Instant::now())?;
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Torch counts a key of its own, for its workers, if it is there.
    fn num_keys(&mut self, deadline: Deadline) -> Result<Reply> {
        let Reply::Number(all) = self.ask(Request::NumKeys, deadline)? else { return Ok(Reply::Number(0)) };
        let own = self.ask(Request::Check(vec!["init/".to_owned()]), deadline)? == Reply::Truth(true);
        Ok(Reply::Number(all - i64::from(own)))
    }
}

/// Pops without waiting; the same on all servers. The caller has begun the exchange.
pub(super) fn try_pop(connection: &mut Connection, request: Request, deadline: Deadline) -> Result<Reply> {
    connection.push_request(false, request.clone());
    connection.send(deadline)?;
    let reply = match connection.word(deadline)? as i64 {
        ..=0 => Reply::Nothing,
        _ => connection.reply(&request, deadline)?,
    };
    connection.end();
    Ok(reply)
}

/// A server of torch refuses by closing the connection, without a word.
fn explain(error: Error) -> Error {
    match error {
        Error::Peer(mut fault) if fault.kind == PeerFaultKind::Left => {
            fault.detail.push_str(
                ", or it refused the request: torch's servers close the connection when a counter is not a number, \
                 when something is too long, and the legacy one when asked for queues",
            );
            Error::Peer(fault)
        }
        other => other,
    }
}
