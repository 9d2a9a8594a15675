//! The client of a TCP store.

mod connection;
mod reach;
mod strict;
mod torch;

use std::io::{self, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tensorwire_device::Deadline;

use self::connection::Connection;
use self::reach::Refusal;
pub(crate) use self::reach::{connect_by, resolve};
pub use super::wire::Dialect;
use super::wire::{self, Frame};
use super::{Limits, Patience, Reply, Request, Store};
use crate::error::{Error, PeerFaultKind, Result};

/// How long after its deadline a call may still hear that the server has cancelled its wait, and what is missing: a server on a busy
/// machine takes a moment for that.
const GRACE: Duration = Duration::from_secs(2);
/// Connections that are kept for the next call.
const IDLE: usize = 4;

/// A client of a [`TcpServer`](super::TcpServer), or of torch's TCPStore.
///
/// Threads may share it. A call that finds every connection in use opens one more. After a failure the next call
/// connects again. Whatever the server does, a call ends at most two seconds after its deadline.
///
/// With a server of torch some things are weaker. `multi_set` of more than a packet is not atomic there. `pop` asks
/// again and again. A barrier is made of counters, so it does not meet torch's own `barrier`.
#[derive(Debug)]
pub struct TcpStore {
    host: String,
    port: u16,
    /// The dialect to speak whatever the server understands.
    forced: Option<Dialect>,
    /// What it means that nobody listens.
    refusal: Refusal,
    idle: Mutex<Vec<Connection>>,
    patience: Patience,
}

impl TcpStore {
    /// Connects, and tries again until `timeout` is over. `timeout` also becomes the store's time-out.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        Self::open(host, port, timeout, None, Refusal::NotYet)
    }

    /// The same, but it speaks torch's dialect to every server. This is for measuring and testing.
    pub fn connect_as_torch(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        Self::open(host, port, timeout, Some(Dialect::Torch), Refusal::NotYet)
    }

    /// The same for a server that has been there before: if nobody listens any more, now or later, that is final.
    pub(crate) fn connect_near(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        Self::open(host, port, timeout, None, Refusal::Final)
    }

    /// The dialect that is spoken with the server, as it was found the last time.
    pub fn dialect(&self) -> Result<Dialect> {
        let connection = self.connection(Deadline::after(self.timeout()))?;
        let dialect = self.forced.unwrap_or(connection.dialect());
        self.keep(connection);
        Ok(dialect)
    }

    fn open(
        host: &str,
        port: u16,
        timeout: Duration,
        forced: Option<Dialect>,
        refusal: Refusal,
    ) -> Result<Self> {
        let store = Self {
            host: host.into(),
            port,
            forced,
            refusal,
            idle: Mutex::default(),
            patience: Patience::new(timeout),
        };
        let connection = reach::connect(&store.host, port, Deadline::after(timeout), refusal)?;
        if connection.dialect() == Dialect::Torch && forced.is_none() {
            tracing::info!(
                host,
                port,
                "the store's server is not tensorwire's: waits poll, pop asks again, barriers are made of counters"
            );
        }
        store.keep(connection);
        Ok(store)
    }

    /// Leaves a request with the server and does not wait for what comes of it. So it also reaches a server that does not answer now: of
    /// a process that is stopped, the system takes it. The request must be one that has no reply in torch's dialect.
    pub(crate) fn leave(&self, request: Request, deadline: Deadline) -> Result<()> {
        let request = request.map_keys(|key| format!("/{key}"));
        fits(&request)?;
        let mut bytes = Vec::new();
        wire::encode(&Frame::Validate(wire::MAGIC), &mut bytes);
        wire::encode(&Frame::Operation { strict: false, request }, &mut bytes);
        let left = |error| {
            Error::io(format!("leaving word at the store server at {}:{}", self.host, self.port), error)
        };
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for address in resolve(&self.host, self.port, deadline)?.map_err(left)? {
            match connect_by(&address, deadline)? {
                Ok(mut stream) => {
                    stream.set_write_timeout(Some(GRACE)).map_err(left)?;
                    return stream.write_all(&bytes).map_err(left);
                }
                Err(error) => last = error,
            }
        }
        Err(left(last))
    }

    /// An idle connection that still works, or a new one.
    fn connection(&self, deadline: Deadline) -> Result<Connection> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            match idle {
                Some(connection) if connection.is_usable() => return Ok(connection),
                Some(_) => {
                    tracing::debug!(host = self.host, port = self.port, "a connection to the store was lost")
                }
                None => return reach::connect(&self.host, self.port, deadline, self.refusal),
            }
        }
    }

    fn keep(&self, connection: Connection) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if connection.is_in_step() && idle.len() < IDLE {
            idle.push(connection);
        }
    }

    fn execute(&self, connection: &mut Connection, request: Request, deadline: Deadline) -> Result<Reply> {
        match self.forced.unwrap_or(connection.dialect()) {
            Dialect::Strict => strict::execute(connection, request, deadline),
            Dialect::Torch => torch::Foreign::new(self, connection).execute(request, deadline),
        }
    }
}

impl Store for TcpStore {
    fn call(&self, request: Request, deadline: Deadline) -> Result<Reply> {
        let started = Instant::now();
        let request = request.map_keys(|key| format!("/{key}"));
        fits(&request)?;
        let purpose = super::purpose(&request);
        let mut connection = self.connection(at_least(deadline))?;
        let result = self.execute(&mut connection, request, deadline);
        self.keep(connection);
        match result {
            Ok(reply) => Ok(user_view(reply)),
            // The connection knows what it was reading; only here it is known what for, and for how long.
            Err(Error::TimedOut { doing, missing, .. }) => {
                let missing = if missing.is_empty() { doing } else { missing };
                Err(Error::timed_out(purpose, started.elapsed(), missing))
            }
            Err(Error::Peer(mut fault)) if fault.kind == PeerFaultKind::Left => {
                fault.detail = format!("{} (while {purpose})", fault.detail);
                Err(Error::Peer(fault))
            }
            Err(other) => Err(other),
        }
    }

    fn timeout(&self) -> Duration {
        self.patience.get()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.patience.set(timeout);
    }

    fn clone_store(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(Self::open(&self.host, self.port, self.timeout(), self.forced, self.refusal)?))
    }
}

/// Has the system ask a silent peer whether it lives: after 15 seconds, then every 5, and give up after 45.
pub(super) fn keep_alive(stream: &TcpStream) {
    use rustix::net::sockopt;
    let set = sockopt::set_socket_keepalive(stream, true)
        .and_then(|()| sockopt::set_tcp_keepidle(stream, Duration::from_secs(15)))
        .and_then(|()| sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5)))
        .and_then(|()| sockopt::set_tcp_keepcnt(stream, 6))
        .and_then(|()| sockopt::set_tcp_user_timeout(stream, 45_000));
    if let Err(error) = set {
        tracing::debug!(%error, "keep-alive is not to be had; a silent peer is noticed by deadlines only");
    }
}

/// The deadline, but with time enough to ask at all.
fn at_least(deadline: Deadline) -> Deadline {
    Ord::max(deadline, Deadline::after(GRACE))
}

/// Keys as the user knows them: torch's own ones have no slash before them.
fn user_view(reply: Reply) -> Reply {
    match reply {
        Reply::Keys(keys) => {
            Reply::Keys(keys.iter().filter_map(|key| key.strip_prefix('/')).map(str::to_owned).collect())
        }
        other => other,
    }
}

/// Refuses here what every server refuses by closing the connection.
fn fits(request: &Request) -> Result<()> {
    let limits = Limits::torch();
    let (mut longest_key, mut longest_value, mut keys) = (0, 0, 1);
    let mut key = |key: &String| longest_key = longest_key.max(key.len());
    let mut value = |value: &Vec<u8>| longest_value = longest_value.max(value.len());
    match request {
        Request::Set(k, v) | Request::Append(k, v) | Request::Push(k, v) => {
            key(k);
            value(v);
        }
        Request::CompareSet { key: k, expected, desired } => {
            key(k);
            value(expected);
            value(desired);
        }
        Request::Check(all) | Request::Wait(all) | Request::MultiGet(all) => {
            all.iter().for_each(key);
            keys = all.len();
        }
        Request::MultiSet(pairs) => {
            pairs.iter().for_each(|(k, v)| {
                key(k);
                value(v);
            });
            keys = pairs.len();
        }
        Request::Get(k)
        | Request::Add(k, _)
        | Request::Delete(k)
        | Request::QueueLen(k)
        | Request::Pop { key: k, .. }
        | Request::Barrier { key: k, .. } => key(k),
        Request::NumKeys | Request::ListKeys => {}
    }
    for (what, size, most) in [
        ("bytes in a key", longest_key, limits.key),
        ("bytes in a value", longest_value, limits.value),
        ("keys in a request", keys, limits.keys_per_request),
    ] {
        if size > most {
            return Err(Error::misuse(format!("{size} {what}: a TCP store takes at most {most}")));
        }
    }
    Ok(())
}
