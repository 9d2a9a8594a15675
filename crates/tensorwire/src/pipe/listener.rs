//! How the two ends of a pipe meet: the listener keeps a store, those who connect leave a word in it, and both form a group there.

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tensorwire_device::Deadline;
use tensorwire_device::secret::Id;

use super::address::{Address, Admits};
use super::{Channel, End, Pipe, settled, step};
use crate::config::Key;
use crate::context::Context;
use crate::error::{Error, PeerFaultKind, Result};
use crate::group::{self, Group, Member};
use crate::interrupt;
use crate::link::key::{self, Proofs};
use crate::store::{Limits, Store, TcpServer, TcpStore};
use crate::wire::{Reader, Writer};

/// Version of what a listener and a process that connects tell each other.
const VERSION: u32 = 2;
/// Where the listener says who it is, and where others leave their words.
const GREETING: &str = "tensorwire/pipes/listener";
const HELLO: &str = "tensorwire/pipes/hello";
/// How many connections are made at a time.
const AT_A_TIME: usize = 16;
/// How many wait for [`Listener::accept`]; more wait in the store.
const WAITING: usize = 256;
/// How long a process that has left its word may take to connect.
const PATIENCE: Duration = Duration::from_secs(60);
/// How many that have connected are remembered.
const SEEN: usize = 1024;
/// How long the listener's thread waits after an error.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a process that has given up tries to say so.
const LAST_WORD: Duration = Duration::from_secs(1);
/// Longer than any wait of the listener's thread.
const FAR: Duration = Duration::from_secs(3600);

/// Where pipes of this process begin. It takes connections while it lives. Pipes outlive it.
pub struct Listener {
    hall: Arc<Hall>,
    server: Option<TcpServer>,
    thread: Option<JoinHandle<()>>,
    text: String,
}

/// What the threads of a listener share.
struct Hall {
    context: Arc<Context>,
    address: Address,
    key: Option<Key>,
    channels: Vec<Channel>,
    state: Mutex<State>,
    turn: Condvar,
}

#[derive(Default)]
struct State {
    ready: VecDeque<Pipe>,
    /// Connections that are being made.
    forming: Vec<Id>,
    /// Why the last one has failed that did.
    failed: Option<Error>,
    /// Who was here, the last of them: nobody connects twice with a word.
    seen: VecDeque<Id>,
    closed: bool,
}

impl Hall {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener {
    /// One for processes of this machine. Only a process that is given the whole address can connect.
    pub fn local(context: &Arc<Context>) -> Result<Self> {
        let secret: String = [Id::random()?, Id::random()?].iter().map(Id::to_string).collect();
        Self::open(
            context,
            Address { host: "127.0.0.1".into(), port: 0, admits: Admits::Holders(secret) },
            &Channel::ALL,
        )
    }

    /// One that other machines reach: `tcp://0.0.0.0:7000`, or with port 0 for one that is free. Who connects needs the key of the
    /// job (`TENSORWIRE_KEY`). Without a key it takes the word `open` in the address, `tcp://0.0.0.0:7000/open`: then anybody
    /// who reaches the port can connect, and nothing is sealed.
    pub fn at(context: &Arc<Context>, address: &str) -> Result<Self> {
        Self::at_with(context, address, &Channel::ALL)
    }

    /// The same with these channels and no others.
    pub fn at_with(context: &Arc<Context>, address: &str, channels: &[Channel]) -> Result<Self> {
        let address = Address::parse(address)?;
        match &address.admits {
            Admits::Job if context.config().key.is_none() => {
                return Err(Error::misuse(format!(
                    "a listener at {address} without a key: set TENSORWIRE_KEY in both processes, or say {address}/open to let \
                     anybody in who reaches the port"
                )));
            }
            Admits::Anybody if context.config().key.is_some() => {
                return Err(Error::misuse(format!(
                    "{address} says that anybody may connect, and this process has a key (TENSORWIRE_KEY): leave out one of them"
                )));
            }
            Admits::Anybody => {
                tracing::warn!("{address}: anybody who reaches this port can connect, and nothing is sealed")
            }
            Admits::Job | Admits::Holders(_) => {}
        }
        Self::open(context, address, channels)
    }

    fn open(context: &Arc<Context>, mut address: Address, channels: &[Channel]) -> Result<Self> {
        context.birth().check("the context")?;
        let place = format!("{}:{}", address.host, address.port);
        let socket = TcpListener::bind((address.host.as_str(), address.port))
            .map_err(|error| Error::io(format!("listening for pipes at {place}"), error))?;
        let server = TcpServer::adopt(socket, limits())?;
        address.port = server.local_addr().port();
        let key = address.key(context.config().key.as_ref())?;
        let store = own_store(&address, PATIENCE)?;
        let hall = Arc::new(Hall {
            context: context.clone(),
            key,
            channels: channels.to_vec(),
            state: Mutex::default(),
            turn: Condvar::new(),
            address,
        });
        let store: Arc<dyn Store> = Arc::new(store);
        let greeting = Writer::new().u32(VERSION).fixed(&context.identity().0).finish();
        store.set(GREETING, &key::seal(hall.proofs().as_ref(), GREETING, &greeting))?;
        let text = hall.address.to_string();
        let thread = std::thread::Builder::new()
            .name("tensorwire-listen".into())
            .spawn({
                let hall = hall.clone();
                move || hall.serve(&store)
            })
            .map_err(|error| Error::io("starting the thread of a listener", error))?;
        Ok(Self { hall, server: Some(server), thread: Some(thread), text })
    }

    /// What a process needs to connect. It may hold a secret: hand it over as you would a password. Where the listener is at all
    /// addresses of its machine (`0.0.0.0`), others put the name of that machine in their place.
    pub fn address(&self) -> &str {
        &self.text
    }

    /// The next process that connects.
    pub fn accept(&self, deadline: Deadline) -> Result<Pipe> {
        let (begin, hall) = (Instant::now(), &self.hall);
        hall.context.birth().check("the listener")?;
        let found = settled(&hall.state, &hall.turn, deadline, |state| !state.ready.is_empty())?;
        if let Some(pipe) = found.and_then(|mut state| state.ready.pop_front()) {
            hall.turn.notify_all();
            return Ok(pipe);
        }
        let state = hall.lock();
        let mut missing = "nobody has connected".to_owned();
        if !state.forming.is_empty() {
            missing.push_str(&format!("; {} are about to", state.forming.len()));
        }
        if let Some(failed) = &state.failed {
            missing.push_str(&format!("; the last that tried has not: {failed}"));
        }
        Err(Error::timed_out("waiting for a process to connect a pipe", begin.elapsed(), missing))
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener({}:{})", self.hall.address.host, self.hall.address.port)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // A forked child has neither the threads nor the sockets.
        if !self.hall.context.is_ours() {
            std::mem::forget((self.server.take(), self.thread.take()));
            return;
        }
        let mut state = self.hall.lock();
        state.closed = true;
        // Pipes that nobody has taken are closed.
        let untaken = std::mem::take(&mut state.ready);
        drop(state);
        drop(untaken);
        self.hall.turn.notify_all();
        // The thread waits for what is in the store, which fails now.
        drop(self.server.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of a listener had panicked");
        }
    }
}

impl Hall {
    /// Takes the words that are left in the store, and makes a connection with each who left one.
    fn serve(self: &Arc<Self>, store: &Arc<dyn Store>) {
        let mut warned = false;
        loop {
            let mut state = self.lock();
            while !state.closed
                && (state.forming.len() >= AT_A_TIME || state.forming.len() + state.ready.len() >= WAITING)
            {
                state = self.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.closed {
                return;
            }
            drop(state);
            match store.pop_by(HELLO, Deadline::after(FAR)) {
                Ok(word) => match self.proved(&word) {
                    Ok((id, way)) => self.meet(store.clone(), id, way),
                    // Anybody on this machine can leave words there.
                    Err(error) if !std::mem::replace(&mut warned, true) => {
                        tracing::warn!(%error, "a word of somebody who may not connect; later ones are passed over in silence");
                    }
                    Err(_) => {}
                },
                Err(error) if error.is_timeout() => {}
                Err(error) => {
                    let mut state = self.lock();
                    if state.closed {
                        return;
                    }
                    tracing::warn!(%error, "a listener is cut off for a moment");
                    state.failed = Some(error);
                    drop(self.turn.wait_timeout(state, PAUSE).unwrap_or_else(PoisonError::into_inner));
                }
            }
        }
    }

    fn proofs(&self) -> Option<Proofs> {
        proofs(&self.context, self.key.as_ref())
    }

    /// Who left a word, and the address by which it reaches this process. A connection with it is being made from now on.
    fn proved(&self, word: &[u8]) -> Result<(Id, IpAddr)> {
        let proofs = self.proofs();
        let id = key::open(proofs.as_ref(), HELLO, word).map_err(|why| {
            let text = why.explain("its word", "this listener", proofs.as_ref());
            Error::peer(PeerFaultKind::Refused, "somebody", None, text)
        })?;
        let mut word = Reader::new(id);
        let (id, way) = (Id(word.array()?), IpAddr::V6(Ipv6Addr::from(word.array::<16>()?)).to_canonical());
        word.end()?;
        let mut state = self.lock();
        if state.seen.contains(&id) {
            return Err(crate::wire::bad("a word that was left before"));
        }
        if state.seen.len() >= SEEN {
            state.seen.pop_front();
        }
        state.seen.push_back(id);
        state.forming.push(id);
        Ok((id, way))
    }

    /// Makes a connection, beside others.
    fn meet(self: &Arc<Self>, store: Arc<dyn Store>, id: Id, way: IpAddr) {
        let hall = self.clone();
        let met = std::thread::Builder::new().name("tensorwire-meet".into()).spawn(move || {
            let pipe = hall.form(&store, id, way);
            let mut state = hall.lock();
            state.forming.retain(|other| *other != id);
            let late = match pipe {
                Ok(pipe) if !state.closed => {
                    state.ready.push_back(pipe);
                    None
                }
                Ok(pipe) => Some(pipe),
                Err(error) => {
                    tracing::warn!(%error, "a process that wanted to connect a pipe has not");
                    state.failed = Some(error);
                    None
                }
            };
            drop(state);
            drop(late);
            hall.turn.notify_all();
        });
        if let Err(error) = met {
            self.lock().forming.retain(|other| *other != id);
            tracing::error!(%error, "no thread for a process that wants to connect a pipe");
        }
    }

    fn form(&self, store: &Arc<dyn Store>, id: Id, way: IpAddr) -> Result<Pipe> {
        let patience = self.context.config().timeout.min(PATIENCE);
        step("listen: somebody is there");
        let at = (store.clone_store()?, way, self.address.port);
        let by = Deadline::after(patience);
        let group = form(&self.context, at, self.key.clone(), (id, 0), by);
        let pipe = group.and_then(|group| End::open(group, &self.channels, by));
        step("listen: formed");
        if let Err(error) = self.tidy(store.as_ref(), id) {
            tracing::debug!(%error, "what a pipe leaves in its listener's store stays there");
        }
        pipe
    }

    /// Removes what a connection has left in the store: both have read all of it, or do not come together any more. So is what earlier
    /// ones have left that were given up: the word of that may come late.
    fn tidy(&self, store: &dyn Store, id: Id) -> Result<()> {
        let over: HashSet<String> = {
            let state = self.lock();
            let over = |seen: &&Id| **seen == id || !state.forming.contains(seen);
            state.seen.iter().filter(over).map(|seen| name_of(*seen)).collect()
        };
        for key in store.list_keys()? {
            if key.split('/').nth(1).is_some_and(|name| over.contains(name)) {
                store.delete(&key)?;
            }
        }
        Ok(())
    }
}

/// Connects to the listener at an address.
pub(super) fn connect(
    context: &Arc<Context>,
    address: &str,
    channels: &[Channel],
    deadline: Deadline,
) -> Result<Pipe> {
    connect_as(context, address, deadline, |group, deadline| End::open(group, channels, deadline))
}

/// The same; what is done with the group that comes of it is the caller's.
pub(super) fn connect_as<T>(
    context: &Arc<Context>,
    address: &str,
    deadline: Deadline,
    open: impl FnOnce(Group, Deadline) -> Result<T>,
) -> Result<T> {
    context.birth().check("the context")?;
    let address = Address::parse(address)?;
    if matches!(address.admits, Admits::Job) && context.config().key.is_none() {
        return Err(Error::misuse(format!(
            "{address} takes who has the key of the job, and this process has none: set TENSORWIRE_KEY"
        )));
    }
    let key = address.key(context.config().key.as_ref())?;
    let begin = Instant::now();
    let left = deadline.remaining().unwrap_or_default();
    let host = reached(&address);
    let place = format!("{}:{}", address.host, address.port);
    let gone = |error: Error| match error {
        error if error.is_timeout() => Error::timed_out(
            format!("connecting to the listener at {place}"),
            begin.elapsed(),
            error.to_string(),
        ),
        other => other,
    };
    let store = match (&address.admits, host.as_str()) {
        // It was there when it gave its address away.
        (Admits::Holders(_), "127.0.0.1") => TcpStore::connect_near(&host, address.port, left),
        _ => TcpStore::connect(&host, address.port, left),
    };
    let client = Arc::new(store.map_err(gone)?);
    let store: Arc<dyn Store> = client.clone();
    let proofs = proofs(context, key.as_ref());
    let greeting = store.get_by(GREETING, deadline).map_err(gone)?;
    let fault = |kind, text: String| Error::peer(kind, format!("the listener at {place}"), None, text);
    let greeting = key::open(proofs.as_ref(), GREETING, &greeting).map_err(|why| {
        let text = match address.admits {
            // Whoever listens there now does not know the secret; or one of the two has no key, or another one.
            Admits::Holders(_) => {
                "the address is not its own: that was of an earlier listener, or the two have not the same \
                                   TENSORWIRE_KEY"
                    .to_owned()
            }
            Admits::Job | Admits::Anybody => why.explain("its greeting", "this process", proofs.as_ref()),
        };
        fault(PeerFaultKind::Incompatible, text)
    })?;
    let mut greeting = Reader::new(greeting);
    let (version, identity) = (greeting.u32()?, greeting.array().map(Id)?);
    if version != VERSION {
        let text = format!("it speaks version {version} of pipes, and this process version {VERSION}");
        return Err(fault(PeerFaultKind::Incompatible, text));
    }
    if identity == context.identity() {
        return Err(Error::misuse(
            "both ends of a pipe in one process: connect from another one (in Rust, another context will do: Context::from_env)",
        ));
    }
    // How it is reached from here: the listener does not know, if it is at all addresses of its machine.
    let found = crate::link::address::resolve(&host, address.port)?;
    let way = found.first().map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), SocketAddr::ip);
    let id = Id::random()?;
    let way_in_ipv6 = match way {
        IpAddr::V4(way) => way.to_ipv6_mapped(),
        IpAddr::V6(way) => way,
    };
    let word = Writer::new().fixed(&id.0).fixed(&way_in_ipv6.octets()).finish();
    step("connect: before its word");
    let pushed = store.push(HELLO, &key::seal(proofs.as_ref(), HELLO, &word));
    step("connect: behind its word");
    let group =
        pushed.and_then(|()| form(context, (store, way, address.port), key.clone(), (id, 1), deadline));
    // The listener keeps a place for it, and may not have answered.
    let group = group.inspect_err(|error| give_up(context, &client, key.as_ref(), id, error));
    let pipe = group.and_then(|group| open(group, deadline)).map_err(gone)?;
    step("connect: formed");
    Ok(pipe)
}

/// Has the listener hear that this process does not come any more, also if it hears that later.
fn give_up(context: &Context, client: &TcpStore, key: Option<&Key>, id: Id, error: &Error) {
    let (identity, config) = (context.identity(), context.config());
    let told = Member::this_process(1, identity, context.watcher().address(), config).and_then(
        |Member { host, pid, .. }| {
            let who = format!("the process that wanted to connect (host {host}, pid {pid})");
            let told = Error::peer(PeerFaultKind::Left, who, Some(1), format!("it has given up: {error}"));
            let told = group::telling(&name_of(id), key.or(config.key.as_ref()), &told);
            interrupt::without(|| client.leave(told, Deadline::after(LAST_WORD)))
        },
    );
    if let Err(error) = told {
        tracing::debug!(%error, "a listener is not told that a connection is given up");
    }
}

/// Both ends form a group.
fn form(
    context: &Arc<Context>,
    (store, way, port): (Arc<dyn Store>, IpAddr, u16),
    key: Option<Key>,
    (id, rank): (Id, usize),
    deadline: Deadline,
) -> Result<Group> {
    let builder = Group::builder().context(context).name(name_of(id));
    builder.of_two((store, &way.to_string(), port), key, rank, deadline)
}

fn name_of(id: Id) -> String {
    format!("pipe {id}")
}

/// What shows that a word is of somebody who may connect.
fn proofs(context: &Context, own: Option<&Key>) -> Option<Proofs> {
    own.or(context.config().key.as_ref()).map(|key| Proofs::new(key.secret(), "pipes"))
}

/// The store of a listener of this process.
fn own_store(address: &Address, timeout: Duration) -> Result<TcpStore> {
    TcpStore::connect_near(&reached(address), address.port, timeout)
}

/// What others may leave in the store of a listener: little, for anybody who reaches its port can.
fn limits() -> Limits {
    let all = Limits::default();
    Limits {
        value: 64 << 10,
        keys_per_request: 4096,
        request: 1 << 20,
        keys: 64 << 10,
        bytes: 16 << 20,
        buffered: 16 << 20,
        connections: all.connections.min(1024),
        ..all
    }
}

/// The host by which this process reaches a listener that may be at all addresses of its machine.
fn reached(address: &Address) -> String {
    match address.host.as_str() {
        "0.0.0.0" => "127.0.0.1".into(),
        "::" => "::1".into(),
        host => host.into(),
    }
}
