//! Streams of bytes by UCX, beside a connection by TCP that has proved who is at the other end.
//!
//! The connection carries what is small and must be trusted: where the receiver is reached, under which name it takes the bytes,
//! that the sender takes it up, and how many bytes the receiver has taken. Its end is the end of the stream. UCX carries the bytes, in
//! *chunks*: each is an active message, whose head says which stream it belongs to and in which place, with a proof of both.
//!
//! UCX reads and writes memory of its own only: blocks that are registered with the network's devices once and used again and again.
//! Whoever wants to send fills one, and whoever receives empties one. So a message that is given up leaves no memory in danger.
//!
//! One thread for each context, the *engine's*, makes all calls on UCX. The threads of the ranks leave it orders.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | where the library is found, the engine, and what its thread and those of the ranks share |
//! | `output.rs`, `input.rs` | the ends of a stream |
//! | `driver.rs` | the thread |

mod driver;
mod input;
mod output;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::event::EventfdFlags;
use tensorwire_device::fd::{Fd, Stream};
use tensorwire_device::fork::Birth;
use tensorwire_device::host;
use tensorwire_device::secret::{Id, Secret};
use tensorwire_device::ucx::{Ucx, Worker, python_folders};
use tensorwire_device::{Bell, Span};

use self::driver::Driver;
use self::input::{OpenLane, UcxInput};
use self::output::UcxOutput;
use super::frame::PIECE;
use super::office::TcpCarrier;
use super::stream::Carrier;
use super::{Fault, Linked};
use crate::config::{Config, Environments, LinkKind};
use crate::error::{Error, Result};

/// Bytes of a block: a piece of a message with what stands before and behind it.
const BLOCK: usize = PIECE + 4096;
/// Chunks up to this length have memory of their own: a block for each of many small ones would be a lot.
const SMALL: usize = 256 << 10;
/// What a chunk costs besides its bytes.
const COST: u64 = 128;
/// What a receiver takes unasked, with the costs.
const WINDOW: u64 = 4 * BLOCK as u64;
/// Blocks that are kept for the next use.
const KEPT: usize = 64;
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
        LinkKind::Ucx => Engine::start().map(Ok),
    }
}

const SEALED_BY_UCX: &str = "UCX does not seal what it carries, and the job has a key; with TENSORWIRE_SEAL=control tensors go open, and by UCX";

/// Whether this machine has an RDMA device.
pub(crate) fn has_rdma() -> bool {
    std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some())
}

/// Where the library is looked for besides the system's folders: where the Python package has found it, and in the active environment of
/// Python or conda.
fn folders() -> Vec<PathBuf> {
    let Environments { python, conda } = Environments::active();
    let mut folders = lock(&FOUND).clone();
    folders.extend(python.iter().flat_map(|environment| python_folders(environment)));
    folders.extend(conda.map(|environment| environment.join("lib")));
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
    fn start() -> Result<Self> {
        Self::start_with(library()?)
    }

    /// The same with a given library.
    pub(super) fn start_with(ucx: &'static Ucx) -> Result<Self> {
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
        let run = move || Driver::new(own, worker).run();
        let thread = builder.spawn(run).map_err(|e| Error::io("starting the thread of UCX", e))?;
        let about = format!("UCX {}", ucx.version());
        Ok(Self { shared, address, about, thread: Some(thread) })
    }

    /// "UCX 1.18.0".
    pub(crate) fn about(&self) -> &str {
        &self.about
    }

    /// A stream to take in, and what is said of it to the other side.
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
        UcxInput::new(self.clone(), control, lane)
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
        Ok(UcxOutput::new(self.clone(), control, sender, (name, proof))?)
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
