//! Streams of bytes by UCX, beside a connection by TCP that has proved who is at the other end.
//!
//! The connection carries what is small and must be trusted: where the receiver is reached, under which name it takes the bytes,
//! which of both the sender chose, and how many bytes the receiver has taken. Its end is the end of the stream. UCX carries the bytes, in
//! *chunks*: each is an active message, whose head says which stream it belongs to and in which place, with a proof of both.
//!
//! UCX reads and writes memory of its own only: blocks that are registered with the network's devices once and used again and again.
//! Whoever wants to send fills one, and whoever receives empties one. So a message that is given up leaves no memory in danger.
//!
//! One thread for each context, the *engine's*, makes all calls on UCX. The threads of the ranks leave it orders.

use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use tensorwire_device::fd::{Fd, Received, Stream};
use tensorwire_device::fork::Birth;
use tensorwire_device::host::{self, Host};
use tensorwire_device::secret::{Id, Secret};
use tensorwire_device::ucx::{Body, Event, Ucx, Worker, python_folders};
use tensorwire_device::{Bell, Caching, Deadline, Device, Queue, Span, View};

use super::frame::PIECE;
use super::office::TcpCarrier;
use super::stream::Carrier;
use super::{Fault, Linked};
use crate::config::{Config, LinkKind};
use crate::error::{Error, Result};

/// Bytes of a block: a piece of a message with what stands before and behind it.
const BLOCK: usize = PIECE + 4096;
/// Chunks up to this length have memory of their own: a block for each of many small ones would be a lot.
const SMALL: usize = 256 << 10;
/// What a chunk costs besides its bytes.
const COST: u64 = 128;
/// What a receiver takes unasked, with the costs.
const WINDOW: u64 = 4 * BLOCK as u64;
/// A sender that has less room waits for more.
const ROOM: u64 = 64 << 10;
/// After how much a receiver says that it has taken so much.
const TOLD: u64 = WINDOW / 8;
/// Blocks that are kept for the next use.
const KEPT: usize = 64;
/// What UCX has on its way when the connection ends has so long to come.
const GRACE: Duration = Duration::from_secs(1);
/// How often the thread looks for what has come before it sleeps.
const LOOKS: u32 = 200;
/// How long the end of the engine waits for what is still to go.
const LAST: Duration = Duration::from_secs(2);
/// The head of a chunk: the stream's name, its place there, and the proof.
const HEAD: usize = 16 + 8 + 32;
/// The longest address of a worker.
const LONGEST: usize = 32 << 10;

/// What a sender says that has chosen.
const BY_UCX: u8 = b'u';
const BY_TCP: u8 = b't';

/// What a context has once for UCX. Dropping it ends the thread, behind what is still to go.
#[derive(Debug)]
pub(crate) struct Engine {
    shared: Arc<Shared>,
    /// Where others reach its worker.
    address: Vec<u8>,
    about: String,
    /// Whether nothing but UCX will do.
    forced: bool,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// Wakes the thread.
    wake: Fd,
    birth: Birth,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    orders: Vec<Order>,
    /// Whether the thread sleeps, and is to be woken.
    asleep: bool,
    lanes: HashMap<Id, Arc<Lane>>,
    free: Vec<Block>,
    /// Why nothing goes any more.
    failed: Option<String>,
    stop: bool,
}

/// What the thread is to do.
#[derive(Debug)]
enum Order {
    Connect(Arc<Sender>, Vec<u8>),
    Send(Arc<Sender>, [u8; HEAD], Chunk),
    End(Arc<Sender>),
    Unregister(u64),
}

/// Memory that UCX uses, and its number there once it is registered.
#[derive(Debug)]
struct Block {
    span: Span,
    number: Option<u64>,
}

#[derive(Debug)]
enum Chunk {
    Small(Vec<u8>),
    Large(Block, usize),
}

impl Chunk {
    fn len(&self) -> usize {
        match self {
            Self::Small(bytes) => bytes.len(),
            Self::Large(_, len) => *len,
        }
    }
}

/// The sender's end of a stream, as the thread knows it.
#[derive(Debug)]
struct Sender {
    bell: Bell,
    /// The connection beside it, by whose end the other side hears that nothing more comes.
    control: Arc<Stream>,
    /// Why nothing goes any more.
    lost: Mutex<Option<String>>,
}

/// The receiver's end of a stream, as the thread knows it.
#[derive(Debug)]
pub(super) struct Lane {
    name: Id,
    proof: Secret,
    bell: Bell,
    state: Mutex<Coming>,
}

#[derive(Debug, Default)]
struct Coming {
    /// Chunks that are here or on their way, by their places, and what they cost.
    chunks: BTreeMap<u64, Option<Chunk>>,
    held: u64,
    /// The place of the next one that is taken.
    next: u64,
    armed: bool,
    /// What the other side did, or what has happened here.
    fault: Option<Trouble>,
}

#[derive(Debug, Clone)]
enum Trouble {
    Nonsense,
    Lost(String),
}

impl From<Trouble> for Fault {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Nonsense => Self::Nonsense,
            Trouble::Lost(why) => Self::Lost(why),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The engine that the configuration asks for, or why messages go by TCP.
pub(crate) fn choose(config: &Config, sealed: bool) -> Result<std::result::Result<Engine, String>> {
    match config.link {
        LinkKind::Tcp => Ok(Err("TENSORWIRE_LINK=tcp".into())),
        LinkKind::Auto if sealed => Ok(Err(SEALED_BY_UCX.into())),
        // Nobody has measured it with such a device: who wants it says so.
        LinkKind::Auto if has_rdma() => {
            Ok(Err("it has not been measured with RDMA yet; TENSORWIRE_LINK=ucx takes it".into()))
        }
        LinkKind::Auto => Ok(Err("there is no RDMA device here".into())),
        LinkKind::Ucx if sealed => Err(Error::misuse(format!("TENSORWIRE_LINK=ucx: {SEALED_BY_UCX}"))),
        LinkKind::Ucx => Engine::start(true).map(Ok),
    }
}

const SEALED_BY_UCX: &str = "UCX does not seal what it carries, and the job has a key; with TENSORWIRE_SEAL=control tensors go open, and by UCX";

/// Whether this machine has an RDMA device.
pub(crate) fn has_rdma() -> bool {
    std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some())
}

/// Where the library is looked for besides the system's folders: in the active environment of Python or conda, and where the Python
/// package has found it.
fn folders() -> Vec<PathBuf> {
    let from = |name| std::env::var_os(name).map(PathBuf::from);
    let python = from("VIRTUAL_ENV").or_else(|| from("CONDA_PREFIX"));
    let mut folders = lock(&FOUND).clone();
    folders.extend(python.iter().flat_map(|environment| python_folders(environment)));
    folders.extend(from("CONDA_PREFIX").map(|environment| environment.join("lib")));
    folders
}

/// Folders that somebody else has found: see [`look_in`].
static FOUND: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Has libucp looked for in a folder, too, behind the system's: for those who know where a package has put it.
pub fn look_in(folder: &Path) {
    lock(&FOUND).push(folder.to_path_buf());
}

/// The library, where there is one.
pub(super) fn library() -> Result<&'static Ucx> {
    Ok(Ucx::load(&folders())?)
}

/// The version of libucp that messages between hosts would use, and where it was found. Loads it.
pub fn about() -> Result<(String, String)> {
    let ucx = library()?;
    Ok((ucx.version(), ucx.place().to_owned()))
}

impl Engine {
    /// Loads the library and begins to listen.
    pub(crate) fn start(forced: bool) -> Result<Self> {
        Self::start_with(library()?, forced)
    }

    /// The same with a given library.
    pub(crate) fn start_with(ucx: &'static Ucx, forced: bool) -> Result<Self> {
        let worker = Worker::new(ucx, BLOCK)?;
        let address = worker.address()?;
        if address.len() > LONGEST {
            return Err(Error::Bug(format!("an address of UCX of {} bytes", address.len())));
        }
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = rustix::event::eventfd(0, flags).map_err(|e| Error::io("starting UCX", e))?;
        let shared = Arc::new(Shared { wake: Fd::new(wake), birth: Birth::now(), state: Mutex::default() });
        let own = shared.clone();
        let builder = std::thread::Builder::new().name("tensorwire-ucx".into());
        let run = move || {
            Driver {
                shared: own,
                worker,
                ways: HashMap::new(),
                users: HashMap::new(),
                calls: HashMap::new(),
                next: 0,
            }
            .run()
        };
        let thread = builder.spawn(run).map_err(|e| Error::io("starting the thread of UCX", e))?;
        let about = format!("UCX {}", ucx.version());
        Ok(Self { shared, address, about, forced, thread: Some(thread) })
    }

    /// "UCX 1.18.0".
    pub(crate) fn about(&self) -> &str {
        &self.about
    }

    /// Whether nothing but UCX will do.
    pub(crate) fn is_forced(&self) -> bool {
        self.forced
    }

    /// Whether streams can be made by it, or their makers must hear why not. One that has failed is left alone where TCP will do.
    pub(super) fn is_of_use(&self) -> bool {
        self.forced || lock(&self.shared.state).failed.is_none()
    }

    /// A stream to take in, and what is said of it to the other side, which may choose TCP all the same.
    pub(super) fn offer(&self, secret: &Secret, bell: &Bell) -> Result<(OpenLane, Vec<u8>)> {
        let name = Id::random()?;
        let proof = secret.derive("stream by UCX", &[&name.0]);
        let lane = Arc::new(Lane { name, proof, bell: bell.clone(), state: Mutex::default() });
        {
            let mut state = lock(&self.shared.state);
            if let Some(why) = &state.failed {
                return Err(Error::device(format!("UCX has failed in this process: {why}")));
            }
            state.lanes.insert(name, lane.clone());
        }
        let len = name.0.len() + self.address.len();
        let said = [&(len as u16).to_le_bytes()[..], &name.0, &self.address].concat();
        Ok((OpenLane { shared: self.shared.clone(), lane }, said))
    }

    /// The end here of a stream that was offered.
    pub(super) fn take_in(self: &Arc<Self>, control: TcpCarrier, lane: OpenLane) -> Result<UcxInput> {
        Ok(UcxInput {
            engine: self.clone(),
            control,
            lane,
            chosen: None,
            current: None,
            taken: 0,
            untold: 0,
            telling: Vec::new(),
            ended: None,
            queue: Host.queue()?,
        })
    }

    /// Takes up a stream that another process has offered in these words, without their length.
    pub(super) fn take_up(
        self: &Arc<Self>,
        mut control: TcpCarrier,
        offer: &[u8],
        secret: &Secret,
        bell: &Bell,
    ) -> Linked<UcxOutput> {
        let Some((name, address)) = offer.split_first_chunk::<16>() else { return Err(Fault::Nonsense) };
        let name = Id(*name);
        let proof = secret.derive("stream by UCX", &[&name.0]);
        // It fits: nothing was sent before but the handshake.
        control.send(&[BY_UCX], None, &[])?;
        let sender = Arc::new(Sender {
            bell: bell.clone(),
            control: control.stream().clone(),
            lost: Mutex::default(),
        });
        self.shared.order(Order::Connect(sender.clone(), address.to_vec()))?;
        let queue = Host.queue()?;
        Ok(UcxOutput {
            engine: self.clone(),
            control,
            sender,
            name,
            proof,
            number: 0,
            room: WINDOW,
            told: Vec::new(),
            queue,
        })
    }
}

/// What a sender says on a connection that was offered UCX and that it uses by itself.
pub(super) const DECLINED: [u8; 1] = [BY_TCP];

impl Drop for Engine {
    fn drop(&mut self) {
        // In a forked child the thread does not exist, and the lock may be held for ever.
        if !self.shared.birth.is_ours() {
            std::mem::forget(self.thread.take());
            return;
        }
        lock(&self.shared.state).stop = true;
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn order(&self, order: Order) -> Linked<()> {
        self.birth.check("UCX")?;
        let asleep = {
            let mut state = lock(&self.state);
            if let Some(why) = &state.failed {
                return Err(Fault::Lost(why.clone()));
            }
            state.orders.push(order);
            std::mem::replace(&mut state.asleep, false)
        };
        if asleep {
            self.wake();
        }
        Ok(())
    }

    /// Memory for a chunk. It is registered when it is first used.
    fn block(&self) -> Result<Block> {
        if let Some(block) = lock(&self.state).free.pop() {
            return Ok(block);
        }
        Ok(Block { span: Span::whole(host::private(BLOCK)?), number: None })
    }

    /// Takes a block back.
    fn give(&self, block: Block) {
        let mut state = lock(&self.state);
        if state.free.len() < KEPT {
            state.free.push(block);
        } else if let Some(number) = block.number {
            state.orders.push(Order::Unregister(number));
        }
    }
}

/// What stands before a chunk.
fn head_of(name: Id, number: u64, proof: &Secret) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..16].copy_from_slice(&name.0);
    head[16..24].copy_from_slice(&number.to_le_bytes());
    head[24..].copy_from_slice(&proof.prove("chunk", &[&number.to_le_bytes()]));
    head
}

/// The sender's end of a stream.
#[derive(Debug)]
pub(super) struct UcxOutput {
    engine: Arc<Engine>,
    control: TcpCarrier,
    sender: Arc<Sender>,
    name: Id,
    proof: Secret,
    /// How many chunks were sent.
    number: u64,
    /// What the receiver takes now.
    room: u64,
    /// A part of a number that it has told.
    told: Vec<u8>,
    queue: Box<dyn Queue>,
}

impl UcxOutput {
    /// Hears what the receiver has taken.
    fn hear(&mut self) -> Linked<()> {
        let mut bytes = [0; 64];
        loop {
            match self.control.recv_bytes(&mut bytes)? {
                Received::Nothing => return Ok(()),
                Received::End => return Err(Fault::Lost("the other side has ended the connection".into())),
                Received::Bytes(count) => self.told.extend(&bytes[..count]),
            }
            while let Some((number, rest)) = self.told.split_first_chunk::<4>() {
                self.room += u64::from(u32::from_le_bytes(*number));
                self.told = rest.to_vec();
            }
            if self.room > WINDOW {
                return Err(Fault::Nonsense);
            }
        }
    }

    /// How many bytes of a chunk there is room for, if that is worth a chunk.
    fn fits(&self, len: usize) -> usize {
        let most = self.room.saturating_sub(COST).min(BLOCK as u64) as usize;
        if most >= len || most as u64 >= ROOM { len.min(most) } else { 0 }
    }
}

impl Carrier for UcxOutput {
    fn send(&mut self, head: &[u8], body: Option<View<'_>>, tail: &[u8]) -> Linked<usize> {
        self.flush()?;
        self.hear()?;
        let middle = body.map_or(0, View::len);
        let len = self.fits(head.len() + middle + tail.len());
        if len == 0 {
            return Ok(0);
        }
        // What goes of each part.
        let of_head = head.len().min(len);
        let of_body = middle.min(len - of_head);
        let of_tail = len - of_head - of_body;
        let body = body.map(|body| body.slice(0..of_body)).transpose()?;
        let chunk = if len <= SMALL {
            let mut bytes = Vec::with_capacity(len);
            bytes.extend(&head[..of_head]);
            if let Some(body) = body {
                bytes.resize(of_head + of_body, 0);
                body.to_span().read(0, &mut bytes[of_head..])?;
            }
            bytes.extend(&tail[..of_tail]);
            Chunk::Small(bytes)
        } else {
            let block = self.engine.shared.block()?;
            block.span.write(0, &head[..of_head])?;
            if let Some(body) = body {
                let into = block.span.view().slice(of_head..of_head + of_body)?;
                self.queue.copy(into, body, Caching::Keep)?;
            }
            block.span.write(of_head + of_body, &tail[..of_tail])?;
            Chunk::Large(block, len)
        };
        let head = head_of(self.name, self.number, &self.proof);
        self.engine.shared.order(Order::Send(self.sender.clone(), head, chunk))?;
        self.number += 1;
        self.room -= len as u64 + COST;
        Ok(len)
    }

    /// What was taken is the engine's: it goes, whatever the sender does.
    fn flush(&mut self) -> Linked<bool> {
        match &*lock(&self.sender.lost) {
            Some(why) => Err(Fault::Lost(why.clone())),
            None => Ok(true),
        }
    }

    fn recv(&mut self, _: View<'_>) -> Linked<Received> {
        Err(Fault::Ours(Error::Bug("a stream that is sent to is read".into())))
    }

    fn recv_bytes(&mut self, _: &mut [u8]) -> Linked<Received> {
        Err(Fault::Ours(Error::Bug("a stream that is sent to is read".into())))
    }

    fn arm_for_room(&self) {
        if self.room >= ROOM + COST || lock(&self.sender.lost).is_some() {
            self.sender.bell.ring();
        } else {
            self.control.arm_for_bytes();
        }
    }

    fn arm_for_bytes(&self) {}
}

impl Drop for UcxOutput {
    fn drop(&mut self) {
        let _ = self.engine.shared.order(Order::End(self.sender.clone()));
    }
}

/// A stream that the thread knows, until this is dropped.
#[derive(Debug)]
pub(super) struct OpenLane {
    shared: Arc<Shared>,
    lane: Arc<Lane>,
}

impl Deref for OpenLane {
    type Target = Lane;

    fn deref(&self) -> &Lane {
        &self.lane
    }
}

impl Drop for OpenLane {
    fn drop(&mut self) {
        if !self.shared.birth.is_ours() {
            return;
        }
        lock(&self.shared.state).lanes.remove(&self.lane.name);
        let chunks = std::mem::take(&mut lock(&self.lane.state).chunks);
        for chunk in chunks.into_values().flatten() {
            if let Chunk::Large(block, _) = chunk {
                self.shared.give(block);
            }
        }
    }
}

/// The receiver's end of a stream.
#[derive(Debug)]
pub(super) struct UcxInput {
    engine: Arc<Engine>,
    control: TcpCarrier,
    lane: OpenLane,
    /// What the sender has chosen.
    chosen: Option<u8>,
    /// The chunk that is being taken, and how much of it was.
    current: Option<Chunk>,
    taken: usize,
    /// What was taken and the sender does not know, and what is being told.
    untold: u64,
    telling: Vec<u8>,
    /// Since when the connection has ended, and how.
    ended: Option<(Instant, Option<String>)>,
    queue: Box<dyn Queue>,
}

impl UcxInput {
    /// Hears what the sender chose: whether it comes by TCP, once that is known.
    fn is_by_tcp(&mut self) -> Linked<Option<bool>> {
        if self.chosen.is_none() {
            let mut chosen = [0];
            match self.control.recv_bytes(&mut chosen)? {
                Received::Bytes(_) => self.chosen = Some(chosen[0]),
                Received::Nothing => {}
                Received::End => return Err(Fault::Lost("the connection ended before it was used".into())),
            }
        }
        match self.chosen {
            None => Ok(None),
            Some(BY_UCX) => Ok(Some(false)),
            Some(BY_TCP) if !self.engine.forced => Ok(Some(true)),
            Some(BY_TCP) => Err(Fault::Unfit(
                "it sends by TCP, and TENSORWIRE_LINK=ucx is set here: all ranks need the same setting"
                    .into(),
            )),
            Some(_) => Err(Fault::Nonsense),
        }
    }

    /// Has the next chunk at hand, if it is there.
    fn open(&mut self) -> Linked<Received> {
        self.tell()?;
        if self.current.is_some() {
            return Ok(Received::Bytes(0));
        }
        let next = {
            let mut coming = lock(&self.lane.state);
            if let Some(trouble) = &coming.fault {
                return Err(trouble.clone().into());
            }
            let next = coming.next;
            let chunk = coming.chunks.get_mut(&next).and_then(Option::take);
            if chunk.is_some() {
                coming.chunks.remove(&next);
                coming.next += 1;
            }
            chunk
        };
        match next {
            Some(chunk) => (self.current, self.taken) = (Some(chunk), 0),
            None => return self.listen(),
        }
        Ok(Received::Bytes(0))
    }

    /// Nothing is here. Looks whether the connection has ended, which may overtake what UCX carries.
    fn listen(&mut self) -> Linked<Received> {
        if self.ended.is_none() {
            let mut nothing = [0];
            let why = match self.control.recv_bytes(&mut nothing) {
                Ok(Received::Nothing) => return Ok(Received::Nothing),
                Ok(Received::Bytes(_)) => return Err(Fault::Nonsense),
                Ok(Received::End) => None,
                Err(Fault::Lost(why)) => Some(why),
                Err(fault) => return Err(fault),
            };
            self.ended = Some((Instant::now(), why));
        }
        match &self.ended {
            Some((since, why)) if since.elapsed() >= GRACE => match why {
                Some(why) => Err(Fault::Lost(why.clone())),
                None => Ok(Received::End),
            },
            _ => Ok(Received::Nothing),
        }
    }

    /// So many bytes of the chunk were taken.
    fn advance(&mut self, count: usize) -> Linked<()> {
        self.taken += count;
        let Some(chunk) = self.current.take_if(|chunk| chunk.len() == self.taken) else { return Ok(()) };
        let cost = self.taken as u64 + COST;
        {
            let mut coming = lock(&self.lane.state);
            coming.held = coming.held.saturating_sub(cost);
        }
        if let Chunk::Large(block, _) = chunk {
            self.engine.shared.give(block);
        }
        self.untold += cost;
        self.tell()
    }

    /// Tells the sender what was taken, if that is worth it.
    fn tell(&mut self) -> Linked<()> {
        if self.untold >= TOLD {
            self.telling.extend((self.untold as u32).to_le_bytes());
            self.untold = 0;
        }
        if self.telling.is_empty() || self.ended.is_some() {
            return Ok(());
        }
        match self.control.send(&self.telling, None, &[]) {
            Ok(sent) => drop(self.telling.drain(..sent)),
            // A sender that has ended needs no room. What it sent may still come.
            Err(Fault::Lost(why)) => self.ended = Some((Instant::now(), Some(why))),
            Err(fault) => return Err(fault),
        }
        Ok(())
    }
}

impl Carrier for UcxInput {
    fn send(&mut self, _: &[u8], _: Option<View<'_>>, _: &[u8]) -> Linked<usize> {
        Err(Fault::Ours(Error::Bug("a stream that is read is sent to".into())))
    }

    fn flush(&mut self) -> Linked<bool> {
        Ok(true)
    }

    fn recv(&mut self, into: View<'_>) -> Linked<Received> {
        match self.is_by_tcp()? {
            None => return Ok(Received::Nothing),
            Some(true) => return self.control.recv(into),
            Some(false) => {}
        }
        let opened = self.open()?;
        let len = match &self.current {
            None => return Ok(opened),
            Some(Chunk::Small(bytes)) => {
                let rest = &bytes[self.taken..];
                let rest = &rest[..rest.len().min(into.len())];
                into.to_span().write(0, rest)?;
                rest.len()
            }
            Some(Chunk::Large(block, len)) => {
                let len = (len - self.taken).min(into.len());
                let from = block.span.view().slice(self.taken..self.taken + len)?;
                self.queue.copy(into.slice(0..len)?, from, Caching::Keep)?;
                len
            }
        };
        self.advance(len)?;
        Ok(if len == 0 { Received::Nothing } else { Received::Bytes(len) })
    }

    fn recv_bytes(&mut self, into: &mut [u8]) -> Linked<Received> {
        match self.is_by_tcp()? {
            None => return Ok(Received::Nothing),
            Some(true) => return self.control.recv_bytes(into),
            Some(false) => {}
        }
        let opened = self.open()?;
        let len = match &self.current {
            None => return Ok(opened),
            Some(Chunk::Small(bytes)) => {
                let rest = &bytes[self.taken..];
                let len = rest.len().min(into.len());
                into[..len].copy_from_slice(&rest[..len]);
                len
            }
            Some(Chunk::Large(block, len)) => {
                let len = (len - self.taken).min(into.len());
                block.span.read(self.taken, &mut into[..len])?;
                len
            }
        };
        self.advance(len)?;
        Ok(if len == 0 { Received::Nothing } else { Received::Bytes(len) })
    }

    fn arm_for_room(&self) {}

    fn arm_for_bytes(&self) {
        let ready = {
            let mut coming = lock(&self.lane.state);
            coming.armed = true;
            let next = coming.next;
            coming.fault.is_some() || coming.chunks.get(&next).is_some_and(Option::is_some)
        };
        if ready {
            self.lane.bell.ring();
        }
        // An end is heard once. Whoever sleeps looks again in time.
        if self.ended.is_none() {
            self.control.arm_for_bytes();
        }
    }
}

impl Drop for UcxInput {
    fn drop(&mut self) {
        if let Some(Chunk::Large(block, _)) = self.current.take()
            && self.engine.shared.birth.is_ours()
        {
            self.engine.shared.give(block);
        }
    }
}

/// What the thread has for itself.
struct Driver {
    shared: Arc<Shared>,
    worker: Worker,
    /// Endpoints by the address of the worker at their ends, with the number of streams that use them.
    ways: HashMap<Vec<u8>, (u64, usize)>,
    /// Who uses an endpoint: found by the address of the stream's state, which stays.
    users: HashMap<usize, (Weak<Sender>, Vec<u8>, u64)>,
    /// Calls that are under way.
    calls: HashMap<u64, Call>,
    next: u64,
}

/// What a call of UCX is for.
enum Call {
    /// Bytes go.
    Send(Arc<Sender>),
    /// So many bytes come for a place in a stream.
    Fetch(Arc<Lane>, u64, usize),
    /// A way to another worker ends.
    Close,
}

impl Driver {
    fn run(mut self) {
        let mut idle = 0;
        loop {
            let (orders, stop) = {
                let mut state = lock(&self.shared.state);
                (std::mem::take(&mut state.orders), state.stop)
            };
            idle = if orders.is_empty() { idle + 1 } else { 0 };
            orders.into_iter().for_each(|order| self.obey(order));
            if stop {
                return self.finish();
            }
            if self.step() {
                idle = 0;
            }
            if idle >= LOOKS {
                if let Err(error) = self.sleep() {
                    return self.fail(&error.to_string());
                }
                idle = 0;
            }
        }
    }

    /// Goes on with what is under way; gives whether anything happened.
    fn step(&mut self) -> bool {
        let moved = self.worker.progress();
        let events = self.worker.events();
        let any = moved || !events.is_empty();
        events.into_iter().for_each(|event| self.hear(event));
        any
    }

    /// Sleeps until there is something to do.
    fn sleep(&mut self) -> Result<()> {
        {
            let mut state = lock(&self.shared.state);
            if !state.orders.is_empty() || state.stop {
                return Ok(());
            }
            state.asleep = true;
        }
        if self.worker.arm()? {
            // UCX looks after its connections now and then.
            let tick = Timespec { tv_sec: 1, tv_nsec: 0 };
            let tick = (!self.ways.is_empty()).then_some(&tick);
            let mut fds = [
                PollFd::from_borrowed_fd(self.worker.fd(), PollFlags::IN),
                PollFd::new(&self.shared.wake, PollFlags::IN),
            ];
            match poll(&mut fds, tick) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Error::io("waiting for UCX", error)),
            }
        }
        lock(&self.shared.state).asleep = false;
        let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        Ok(())
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Connect(sender, address) => match self.endpoint(&address) {
                Ok(endpoint) => {
                    let user = (Arc::downgrade(&sender), address, endpoint);
                    self.users.insert(key_of(&sender), user);
                }
                Err(error) => lose(&sender, &error.to_string()),
            },
            Order::Send(sender, head, chunk) => {
                if let Err(error) = self.send(&sender, &head, chunk) {
                    lose(&sender, &error.to_string());
                }
            }
            Order::End(sender) => {
                let Some((_, address, endpoint)) = self.users.remove(&key_of(&sender)) else { return };
                let Some((current, count)) = self.ways.get_mut(&address) else { return };
                if *current != endpoint {
                    return;
                }
                *count -= 1;
                if *count == 0 {
                    self.ways.remove(&address);
                    let token = self.call(Call::Close);
                    self.worker.disconnect(endpoint, false, token);
                }
            }
            Order::Unregister(number) => self.worker.unregister(number),
        }
    }

    /// The endpoint to a worker, with one user more.
    fn endpoint(&mut self, address: &[u8]) -> Result<u64> {
        if let Some((endpoint, count)) = self.ways.get_mut(address) {
            *count += 1;
            return Ok(*endpoint);
        }
        let endpoint = self.worker.connect(address)?;
        self.ways.insert(address.to_vec(), (endpoint, 1));
        Ok(endpoint)
    }

    fn send(&mut self, sender: &Arc<Sender>, head: &[u8], chunk: Chunk) -> Result<()> {
        let Some((_, _, endpoint)) = self.users.get(&key_of(sender)) else {
            // It is lost already.
            if let Chunk::Large(block, _) = chunk {
                self.shared.give(block);
            }
            return Ok(());
        };
        let endpoint = *endpoint;
        let body = match chunk {
            Chunk::Small(bytes) => Body::Bytes(bytes),
            Chunk::Large(block, len) => {
                let block = self.registered(block)?;
                Body::Part(block.span.slice(0..len)?, block.number.unwrap_or_default())
            }
        };
        let token = self.call(Call::Send(sender.clone()));
        self.worker.send(endpoint, head, body, token).inspect_err(|_| {
            self.calls.remove(&token);
        })?;
        Ok(())
    }

    fn registered(&mut self, mut block: Block) -> Result<Block> {
        if block.number.is_none() {
            block.number = Some(self.worker.register(block.span.clone())?);
        }
        Ok(block)
    }

    fn call(&mut self, call: Call) -> u64 {
        self.next += 1;
        self.calls.insert(self.next, call);
        self.next
    }

    fn hear(&mut self, event: Event) {
        match event {
            Event::Came { head, bytes } => {
                if let Some((lane, number)) = self.lane_of(&head, bytes.len())
                    && claim(&lane, number, bytes.len())
                {
                    bring(&lane, number, Chunk::Small(bytes));
                }
            }
            Event::Offered { head, offer, len } => {
                let Some((lane, number)) =
                    self.lane_of(&head, len).filter(|(lane, number)| claim(lane, *number, len))
                else {
                    return self.worker.refuse(offer);
                };
                if let Err(error) = self.fetch(&lane, number, offer, len) {
                    self.worker.refuse(offer);
                    trouble(&lane, Trouble::Lost(error.to_string()));
                }
            }
            Event::Done { token, result, body } => {
                let chunk = |len| match body {
                    Some(Body::Part(span, number)) => {
                        let span = Span::whole(span.region().clone());
                        Some(Chunk::Large(Block { span, number: Some(number) }, len))
                    }
                    Some(Body::Bytes(bytes)) => Some(Chunk::Small(bytes)),
                    None => None,
                };
                let left = match (self.calls.remove(&token), result) {
                    (Some(Call::Fetch(lane, number, len)), Ok(())) => {
                        return chunk(len).into_iter().for_each(|chunk| bring(&lane, number, chunk));
                    }
                    (Some(Call::Fetch(lane, ..)), Err(why)) => {
                        trouble(&lane, Trouble::Lost(why));
                        chunk(0)
                    }
                    (Some(Call::Send(sender)), Err(why)) => {
                        lose(&sender, &why);
                        chunk(0)
                    }
                    (Some(Call::Send(_) | Call::Close) | None, _) => chunk(0),
                };
                if let Some(Chunk::Large(block, _)) = left {
                    self.shared.give(block);
                }
            }
            Event::Lost { endpoint, why } => {
                // The next stream to that worker makes a new one.
                self.ways.retain(|_, (of, _)| *of != endpoint);
                for (sender, ..) in self.users.values().filter(|(_, _, of)| *of == endpoint) {
                    if let Some(sender) = sender.upgrade() {
                        lose(&sender, &why);
                    }
                }
                let token = self.call(Call::Close);
                self.worker.disconnect(endpoint, true, token);
            }
        }
    }

    fn fetch(&mut self, lane: &Arc<Lane>, number: u64, offer: u64, len: usize) -> Result<()> {
        let body = if len <= SMALL {
            Body::Bytes(vec![0; len])
        } else {
            let block = self.shared.block()?;
            let block = self.registered(block)?;
            Body::Part(block.span.slice(0..len)?, block.number.unwrap_or_default())
        };
        let token = self.call(Call::Fetch(lane.clone(), number, len));
        Ok(self.worker.receive(offer, body, token)?)
    }

    /// The stream that a chunk belongs to, and its place there. What has no right proof is dropped.
    fn lane_of(&self, head: &[u8], len: usize) -> Option<(Arc<Lane>, u64)> {
        let (name, rest) = head.split_first_chunk::<16>()?;
        let (number, proof) = rest.split_first_chunk::<8>()?;
        let proof: &[u8; 32] = proof.try_into().ok()?;
        let lane = lock(&self.shared.state).lanes.get(&Id(*name)).cloned()?;
        let proved = lane.proof.proves("chunk", &[number], proof) && len > 0;
        proved.then(|| (lane, u64::from_le_bytes(*number)))
    }

    /// Lets what was ordered go, and what is under way end.
    fn finish(mut self) {
        for (endpoint, _) in std::mem::take(&mut self.ways).into_values() {
            let token = self.call(Call::Close);
            self.worker.disconnect(endpoint, false, token);
        }
        let deadline = Deadline::after(LAST);
        while self.worker.under_way() > 0 && !deadline.passed() {
            if !self.step() {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        self.fail("the process closes its connections");
    }

    /// Nothing goes and nothing comes any more.
    fn fail(mut self, why: &str) {
        let (lanes, orders) = {
            let mut state = lock(&self.shared.state);
            state.failed = Some(why.into());
            (std::mem::take(&mut state.lanes), std::mem::take(&mut state.orders))
        };
        for order in orders {
            if let Order::Connect(sender, _) | Order::Send(sender, ..) = order {
                lose(&sender, why);
            }
        }
        for lane in lanes.into_values() {
            trouble(&lane, Trouble::Lost(why.into()));
        }
        for (sender, ..) in std::mem::take(&mut self.users).into_values() {
            if let Some(sender) = sender.upgrade() {
                lose(&sender, why);
            }
        }
    }
}

fn key_of(sender: &Arc<Sender>) -> usize {
    Arc::as_ptr(sender).addr()
}

/// Nothing more goes on a stream.
fn lose(sender: &Sender, why: &str) {
    lock(&sender.lost).get_or_insert_with(|| why.into());
    let _ = rustix::net::shutdown(&*sender.control, rustix::net::Shutdown::Write);
    sender.bell.ring();
}

/// Nothing more comes on a stream.
fn trouble(lane: &Lane, what: Trouble) {
    lock(&lane.state).fault.get_or_insert(what);
    lane.bell.ring();
}

/// Takes a place in a stream for a chunk: false if it is none that may come.
fn claim(lane: &Lane, number: u64, len: usize) -> bool {
    let cost = len as u64 + COST;
    let mut coming = lock(&lane.state);
    // What comes twice is dropped.
    if number < coming.next || coming.chunks.contains_key(&number) {
        return false;
    }
    if len > BLOCK || coming.held + cost > WINDOW || number - coming.next > WINDOW / COST {
        coming.fault = Some(Trouble::Nonsense);
        drop(coming);
        lane.bell.ring();
        return false;
    }
    coming.held += cost;
    coming.chunks.insert(number, None);
    true
}

/// A chunk is here.
fn bring(lane: &Lane, number: u64, chunk: Chunk) {
    let mut coming = lock(&lane.state);
    let is_next = number == coming.next;
    coming.chunks.insert(number, Some(chunk));
    let ring = is_next && std::mem::replace(&mut coming.armed, false);
    drop(coming);
    if ring {
        lane.bell.ring();
    }
}

/// What tests of links do as a stranger would.
#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;
    use crate::link::Branch;

    /// Where a branch's worker is reached.
    pub(in crate::link) fn address_of(branch: &Branch) -> Vec<u8> {
        branch.engine().unwrap().address.clone()
    }

    /// Heads of the first chunks of streams that are open there.
    pub(in crate::link) fn right_heads_for(branch: &Branch) -> Vec<Vec<u8>> {
        let lanes = lock(&branch.engine().unwrap().shared.state).lanes.clone();
        lanes.values().map(|lane| head_of(lane.name, 0, &lane.proof).to_vec()).collect()
    }

    /// Heads of chunks that are not right, for a stream that is open there.
    pub(in crate::link) fn heads_for(branch: &Branch) -> Vec<Vec<u8>> {
        let lanes: Vec<Arc<Lane>> =
            lock(&branch.engine().unwrap().shared.state).lanes.values().cloned().collect();
        let mut heads = vec![Vec::new(), vec![0; HEAD], vec![1; HEAD - 1], vec![2; 200]];
        for lane in lanes {
            let right = head_of(lane.name, 0, &lane.proof);
            heads.push(right[..HEAD - 1].to_vec());
            heads.push([&right[..], &[0]].concat());
            for at in 0..HEAD {
                let mut wrong = right;
                wrong[at] ^= 1;
                heads.push(wrong.to_vec());
            }
        }
        heads
    }
}
