//! Pipes: messages of tensors between two processes.
//!
//! A [`Listener`] has an address, which is handed over as a token is. Whoever has it connects, and both have a [`Pipe`]. A
//! [`Message`] is metadata, payloads of bytes and tensors. The reader first gets the description, and says where each tensor
//! goes; then the bytes follow.
//!
//! | You want | Look at |
//! |---|---|
//! | to be found | [`Listener::local`], [`Listener::at`], [`Listener::accept`] |
//! | to connect | [`Pipe::connect`] |
//! | to send | [`Pipe::send`] |
//! | to receive all of a message as it comes | [`Pipe::recv`] |
//! | to say where its tensors go | [`Pipe::next`], [`Incoming`] |
//! | to start any of these, and to await it | [`Pending`] |
//! | which way the bytes take, and why | [`Pipe::explain`], [`Channel`] |
//!
//! ```
//! use std::time::Duration;
//! use tensorwire::pipe::{Listener, Message, Pipe};
//! use tensorwire::{Context, Deadline, Tensor};
//!
//! fn main() -> tensorwire::Result<()> {
//!     let deadline = Deadline::after(Duration::from_secs(60));
//!     let trainer = Context::from_env()?;
//!     let listener = Listener::local(&trainer)?;
//!     let address = listener.address().to_owned(); // goes to the other process
//!
//!     let other = std::thread::spawn(move || -> tensorwire::Result<Vec<f32>> {
//!         let context = Context::from_env()?;
//!         let pipe = Pipe::connect(&context, &address, deadline)?;
//!         let message = pipe.recv().wait()?.expect("there is one");
//!         assert_eq!(message.metadata(), b"layer 3");
//!         message.tensors()[0].to_vec()
//!     });
//!     let pipe = listener.accept(deadline)?;
//!     let weights = Tensor::private(&[1.0_f32, 2.0, 3.0])?;
//!     pipe.send(&Message::new().with_metadata(b"layer 3").with_tensor(&weights)).wait()?;
//!     assert_eq!(other.join().expect("it does not panic")?, [1.0, 2.0, 3.0]);
//!     Ok(())
//! }
//! ```
//!
//! A pipe is a group of two ranks: the listener's process is rank 0, the other one rank 1. So what holds for groups holds here:
//! who shares a host is found out by a private connection, what goes between hosts is sealed where there is a key, every wait
//! has a deadline, and the death of a process ends them.

mod address;
mod channel;
mod convert;
mod descriptor;
mod desk;
mod hand;
#[cfg(feature = "hooks")]
#[doc(hidden)]
pub mod hooks;
#[cfg(test)]
mod hostile;
mod lanes;
mod lent;
mod listener;
mod pending;
mod plan;
mod receive;
pub mod rpc;
mod send;
mod window;

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tensorwire_device::sync::{AtomicU64, AtomicUsize, Ordering};
use tensorwire_device::{Deadline, DeviceId, Dtype, Mark, Queue, Span};

pub use self::channel::Channel;
use self::channel::Hello;
use self::descriptor::HEAD;
pub use self::listener::Listener;
pub use self::pending::Pending;
pub use self::receive::{Incoming, Next, Part, Read, Recv};
pub use self::send::Send;
use crate::collective::Tensor;
use crate::context::{Context, IdleQueues};
use crate::error::{Error, PeerFaultKind, Result};
use crate::group::{Group, Member};
use crate::interrupt::Pace;
use crate::shm::traffic::Traffic;

/// What is sent at once: metadata, payloads, and tensors in any mix.
#[derive(Debug, Clone, Default)]
pub struct Message {
    metadata: Vec<u8>,
    payloads: Vec<Tensor>,
    tensors: Vec<Tensor>,
    /// What made each.
    makers: Vec<u8>,
    /// What was queued before those of GPUs are ready.
    after: Vec<Mark>,
}

impl Message {
    /// One without anything.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same with bytes that come with the description: at most 1 MiB.
    #[must_use]
    pub fn with_metadata(mut self, metadata: impl Into<Vec<u8>>) -> Self {
        self.metadata = metadata.into();
        self
    }

    /// The same with one more payload of bytes, which are copied now.
    pub fn with_payload(mut self, bytes: &[u8]) -> Result<Self> {
        self.payloads.push(Tensor::private(bytes)?);
        Ok(self)
    }

    /// The same with one more tensor. It may be strided, empty, or share memory with others: that is sent once.
    #[must_use]
    pub fn with_tensor(self, tensor: &Tensor) -> Self {
        self.with_tensor_of(tensor, 0)
    }

    /// The same with a number that says what made it. It travels beside the tensor, for bindings of other languages: 0 says nothing.
    #[doc(hidden)]
    #[must_use]
    pub fn with_tensor_of(mut self, tensor: &Tensor, maker: u8) -> Self {
        self.tensors.push(tensor.clone());
        self.makers.push(maker);
        self
    }

    /// The same, whose tensors of GPUs are read behind all that is on `queue` now. Nobody waits for that here. Call it once for each queue.
    /// Without it they must be ready when the message is sent, as those of the host must be anyway.
    pub fn after(mut self, queue: &mut dyn Queue) -> Result<Self> {
        self.after.push(queue.mark()?);
        Ok(self)
    }

    /// Of each tensor, the number that says what made it.
    #[doc(hidden)]
    pub fn makers(&self) -> &[u8] {
        &self.makers
    }

    /// The bytes that came with the description.
    pub fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    /// The payloads, each a tensor of bytes.
    pub fn payloads(&self) -> &[Tensor] {
        &self.payloads
    }

    /// The tensors.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }
}

/// One end of a connection between two processes. Clones are the same end; it is closed when the last is dropped. Threads may
/// share it: each message is whole, and those of one thread stay in order.
#[derive(Clone)]
pub struct Pipe(Arc<End>);

/// What clones of a pipe share, and its messages and views.
pub(crate) struct End {
    group: Group,
    ours: Hello,
    theirs: Hello,
    /// Whether the two share memory.
    near: bool,
    /// Of the next message.
    serial: AtomicU64,
    /// Heads that no message uses.
    heads: Mutex<Vec<Tensor>>,
    /// What has come of messages whose heads were given back.
    parked: Mutex<Vec<receive::Parked>>,
    /// How far each direction is ahead of its reader.
    window: window::Window,
    /// What goes through it, for those who look from outside.
    traffic: Traffic,
    /// For copies from and to GPUs.
    queues: Arc<IdleQueues>,
    gpus: Mutex<Gpus>,
    /// For what started calls do that takes time.
    hand: Arc<hand::Hand>,
    sends: Mutex<Sends>,
    /// No head is on its way.
    passed: Condvar,
    /// Sends that are not over.
    sending: AtomicUsize,
}

/// What has become known of the GPUs of the two ends.
#[derive(Default)]
struct Gpus {
    /// Those of this end that the other one cannot open.
    unknown: HashSet<DeviceId>,
    /// How often tensors took a longer way than planned, by reason.
    around: BTreeMap<String, u64>,
}

/// What comes between the last message and the end of all.
#[derive(Default)]
struct Sends {
    /// Whether this end has said that it sends no more, or says so now.
    finished: bool,
    /// Heads on their way.
    heading: usize,
}

/// A head on its way: the end is not told before it.
struct Heading<'a>(&'a End);

impl<'a> Heading<'a> {
    fn begin(end: &'a End) -> Result<Self> {
        let mut sends = end.sends();
        if sends.finished {
            return Err(Error::misuse("this end of the pipe has said that it sends no more"));
        }
        sends.heading += 1;
        Ok(Self(end))
    }
}

impl Drop for Heading<'_> {
    fn drop(&mut self) {
        let mut sends = self.0.sends();
        sends.heading -= 1;
        // Nobody waits before the end is to be told, and to wake nobody costs a call of the kernel.
        if sends.heading == 0 && sends.finished {
            self.0.passed.notify_all();
        }
    }
}

/// Heads that are kept for the next messages.
const SPARE: usize = 8;

impl Pipe {
    /// Connects to a listener. Its address says where it is, and holds what it takes to get in.
    pub fn connect(context: &Arc<Context>, address: &str, deadline: Deadline) -> Result<Self> {
        Self::connect_with(context, address, &Channel::ALL, deadline)
    }

    /// The same with these channels and no others.
    pub fn connect_with(
        context: &Arc<Context>,
        address: &str,
        channels: &[Channel],
        deadline: Deadline,
    ) -> Result<Self> {
        listener::connect(context, address, channels, deadline)
    }

    /// Sends a message. When the send is over you may change its tensors.
    ///
    /// A message that is small does not wait for the reader. A large tensor in memory that can be shared is lent to a reader on
    /// the same host, so its send is over when the reader has copied it, or has let go of its view.
    pub fn send<'a>(&'a self, message: &'a Message) -> Send<'a> {
        Send::new(&self.0, message)
    }

    /// Receives the next message, or nothing if the other end sends no more. Its tensors are in new memory of the host.
    pub fn recv(&self) -> Recv<'_> {
        Recv::new(&self.0)
    }

    /// Receives the description of the next message, or nothing if the other end sends no more. What you get says where its
    /// tensors go.
    pub fn next(&self) -> Next<'_> {
        Next::new(&self.0)
    }

    /// Says that this end sends no more. It may receive all the same.
    pub fn finish(&self) -> Result<()> {
        self.0.finish(self.0.by(None))
    }

    /// Closes the pipe on this end, even while other handles live. What the other end has not taken of started sends is lost:
    /// then this is an error that says so. Calls of the other end that need this one fail.
    pub fn close(self) -> Result<()> {
        let pending = self.0.sending.load(Ordering::Acquire);
        self.0.group.clone().close().map_err(|error| self.0.own(error))?;
        match pending {
            0 => Ok(()),
            _ => Err(Error::Aborted(format!(
                "the pipe was closed while {pending} of its messages were being sent"
            ))),
        }
    }

    /// The process at the other end.
    pub fn peer(&self) -> &Member {
        self.0.peer()
    }

    /// Fails if the pipe has failed, or is closed.
    pub fn check(&self) -> Result<()> {
        self.0.group.check().map_err(|error| self.0.own(error))
    }

    /// Which channel tensors take between each two kinds of devices, and why not those in front of it.
    pub fn explain(&self) -> String {
        let End { near, ours, theirs, group, .. } = &*self.0;
        let (peer, place) = (self.peer(), if *near { "shared memory" } else { "network" });
        let all = group.explain();
        let reasons = all.lines().filter(|line| line.starts_with("  not shared with"));
        let reasons: String = reasons.map(|line| format!("{line}\n")).collect();
        let around = &self.0.gpus().around;
        let around: String =
            around.iter().map(|(reason, count)| format!("  by another way: {count} ({reason})\n")).collect();
        format!(
            "pipe with {} (host {}, pid {}): {place}\n{reasons}{}{around}",
            if group.rank() == 0 { "the process that connected" } else { "the listener" },
            peer.host,
            peer.pid,
            channel::explain(*near, ours, theirs)
        )
    }
}

impl fmt::Debug for Pipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pipe({})", self.peer())
    }
}

impl fmt::Debug for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "End({})", self.peer())
    }
}

impl End {
    /// A group of two is a pipe when both have said what they can do.
    fn open(group: Group, channels: &[Channel], deadline: Deadline) -> Result<Pipe> {
        let (me, other) = (group.rank(), 1 - group.rank());
        let ours = Hello::new(channels, group.context().known_gpus());
        let (mine, yours) = (Tensor::private(&ours.padded())?, Tensor::private(&[0_u8; Hello::PADDED])?);
        // What is small waits for nobody. Nothing is started: that would take a thread.
        group.send(&mine, other).tag(HELLO).deadline(deadline).wait()?;
        group.recv(&yours, other).tag(HELLO).deadline(deadline).wait()?;
        let theirs = Hello::from_bytes(&yours.to_vec()?)?;
        let near = group.hosts().iter().any(|ranks| ranks.contains(&me) && ranks.contains(&other));
        let (peer, channels) = (&group.members()[other], channel::names(near, &ours, &theirs));
        let traffic = Traffic::open(&group.ranks().control, &channels, (peer.pid, &peer.host))?;
        let pipe = Pipe(Arc::new(Self {
            group,
            traffic,
            ours,
            theirs,
            near,
            serial: AtomicU64::new(0),
            heads: Mutex::default(),
            parked: Mutex::default(),
            window: window::Window::default(),
            queues: Arc::default(),
            gpus: Mutex::default(),
            hand: Arc::default(),
            sends: Mutex::default(),
            passed: Condvar::new(),
            sending: AtomicUsize::new(0),
        }));
        tracing::info!("{}", pipe.explain().trim_end());
        Ok(pipe)
    }

    fn context(&self) -> &Arc<Context> {
        self.group.context()
    }

    fn other(&self) -> usize {
        1 - self.group.rank()
    }

    fn peer(&self) -> &Member {
        &self.group.members()[self.other()]
    }

    /// When a call ends at the latest.
    fn by(&self, deadline: Option<Deadline>) -> Deadline {
        deadline.unwrap_or_else(|| Deadline::after(self.group.timeout()))
    }

    /// What bytes that follow come by.
    fn streaming(&self) -> Channel {
        if self.near { Channel::Ring } else { Channel::Wire }
    }

    fn finish(&self, deadline: Deadline) -> Result<()> {
        if std::mem::replace(&mut self.sends().finished, true) {
            return Ok(());
        }
        let last = || {
            let begin = Instant::now();
            if settled(&self.sends, &self.passed, deadline, |sends| sends.heading == 0)?.is_none() {
                let missing = "messages of other threads are on their way";
                return Err(Error::timed_out("saying that a pipe sends no more", begin.elapsed(), missing));
            }
            let head = self.head(&descriptor::last_head())?;
            self.group.send(&head, self.other()).deadline(deadline).wait().map_err(|error| self.own(error))
        };
        last().inspect_err(|_| self.sends().finished = false)
    }

    fn sends(&self) -> MutexGuard<'_, Sends> {
        self.sends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn gpus(&self) -> MutexGuard<'_, Gpus> {
        self.gpus.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes why a tensor of a GPU takes another way than the first of its channels.
    fn goes_around(&self, reason: &str) {
        let first = {
            let mut gpus = self.gpus();
            let count = gpus.around.entry(reason.to_owned()).or_default();
            *count += 1;
            *count == 1
        };
        if first {
            tracing::info!("tensors of a pipe take another way: {reason}");
        }
    }

    /// Does something that takes time: by this thread where it waits anyway, and else by the hand of the pipe.
    async fn rest(
        &self,
        how: pending::How,
        job: impl FnOnce() -> Result<()> + std::marker::Send + 'static,
    ) -> Result<()> {
        match how {
            pending::How::Wait => job(),
            pending::How::Start => self.hand.run(job)?.await?,
        }
    }

    /// Queues for one message, behind these marks.
    fn lanes(&self, sends: bool, after: &[Mark]) -> lanes::Lanes {
        lanes::Lanes::new(self.context(), &self.queues, sends, after)
    }

    /// A tensor that holds a head.
    fn head(&self, bytes: &[u8; HEAD]) -> Result<Tensor> {
        let spare = self.heads().pop();
        let head = spare.map_or_else(|| Tensor::private(&[0_u8; HEAD]), Ok)?;
        head.write(bytes)?;
        Ok(head)
    }

    /// Nothing uses it any more.
    fn keep(&self, head: Tensor) {
        let mut heads = self.heads();
        if heads.len() < SPARE {
            heads.push(head);
        }
    }

    fn heads(&self) -> MutexGuard<'_, Vec<Tensor>> {
        self.heads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says something about a message to the other end, which may not listen any more.
    fn tell(&self, tag: u64, word: &Tensor) {
        // A reader that takes nothing for long hears it later all the same.
        let ever = Deadline::after(Duration::MAX);
        if let Err(error) = self.group.send(word, self.other()).tag(tag).deadline(ever).start() {
            tracing::debug!(%error, "the other end of a pipe is not told");
        }
    }

    /// An error of the group, in the words of a pipe.
    fn own(&self, error: Error) -> Error {
        let (me, other) = (format!("rank {}", self.group.rank()), format!("rank {}", self.other()));
        let said = |text: &str| {
            let text = text.replace(&other, "the other end").replace(&me, "this end");
            without_tags(&text.replace("the group", "the pipe"))
        };
        match error {
            Error::Peer(mut fault) => {
                (fault.who, fault.detail) = (said(&fault.who), said(&fault.detail));
                fault.did = said(&fault.did);
                Error::Peer(fault)
            }
            Error::TimedOut { doing, after, missing, ranks } => {
                Error::TimedOut { doing: said(&doing), after, missing: said(&missing), ranks }
            }
            Error::Aborted(text) => Error::Aborted(said(&text)),
            Error::Misuse(text) => Error::Misuse(said(&text)),
            other => other,
        }
    }

    /// The same where the group knows less than what is being done.
    fn during(&self, doing: &str, error: Error) -> Error {
        match self.own(error) {
            Error::TimedOut { after, missing, ranks, .. } => {
                Error::TimedOut { doing: doing.into(), after, missing, ranks }
            }
            other => other,
        }
    }

    /// The other end sends what no pipe of ours does: nothing that follows can be understood.
    fn misbehaved(&self, error: &Error) -> Error {
        let text = match error {
            Error::Peer(fault) => fault.detail.clone(),
            other => other.to_string(),
        };
        self.group.abort(&format!("{} {text}", self.peer()));
        let peer = self.peer().to_string();
        self.own(Error::peer(PeerFaultKind::Misbehaved, peer, Some(self.other()), text))
    }
}

/// Waits until something is so; nothing if it is not in time.
fn settled<'a, S>(
    lock: &'a Mutex<S>,
    turn: &Condvar,
    by: Deadline,
    so: impl Fn(&S) -> bool,
) -> Result<Option<MutexGuard<'a, S>>> {
    let mut pace = Pace::new();
    loop {
        let state = lock.lock().unwrap_or_else(PoisonError::into_inner);
        if so(&state) {
            return Ok(Some(state));
        }
        if by.passed() {
            return Ok(None);
        }
        let left = pace.until(by).remaining().unwrap_or_default();
        drop(turn.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner));
        pace.look(Instant::now())?;
    }
}

/// A text about messages of a group: users of pipes know no tags.
fn without_tags(text: &str) -> String {
    let mut parts = text.split(" with tag ");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let rest = part.trim_start_matches(|letter: char| letter.is_ascii_digit());
        if rest.len() == part.len() {
            plain.push_str(" with tag ");
        }
        plain.push_str(rest);
    }
    plain
}

/// Any bytes as what the other end of a pipe says, and as an address.
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub fn fuzz(data: &[u8]) {
    descriptor::fuzz(data);
    let _ = Hello::from_bytes(data);
    if let Ok(text) = std::str::from_utf8(data) {
        address::fuzz(text);
    }
}

/// A step where tests may stop, delay or kill the process.
fn step(_step: &'static str) {
    #[cfg(feature = "hooks")]
    hooks::at(_step);
}

/// The tag of heads.
const HEADS: u64 = 0;
/// The tag of what both ends can do. [`window::TAKEN`] is 2, and parts of messages have larger ones.
const HELLO: u64 = 1;

/// Bytes as a tensor of bytes.
fn bytes(span: &Span) -> Result<Tensor> {
    Tensor::flat(span.clone(), Dtype::U8)
}

#[cfg(test)]
mod tests {
    #[test]
    fn corpus() {
        crate::store::fuzz::tests::replay("pipe_messages", super::fuzz);
    }

    #[test]
    fn texts_without_tags() {
        let text = "no message with tag 262147, and none with tag 0; one with tag a waits";
        assert_eq!(super::without_tags(text), "no message, and none; one with tag a waits");
        assert_eq!(super::without_tags("nothing"), "nothing");
    }
}
