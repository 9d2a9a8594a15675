//! Receiving a message, in two steps: what it is, and where its tensors go.
//!
//! A receive of a description asks the group for the next head. The group has the order: who asks first gets the first. A receive that
//! is given up gives its head back, so that the next one gets it, also if that waits already; what has come of the message besides is
//! *parked* under its number. The head of the end is given back by everybody who gets it, so that all hear of it.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tensorwire_device::subregion::keeping;
use tensorwire_device::{Abort, Caching, Deadline, DeviceId, Dtype, Layout, Mark, Queue, Span};

use super::channel::{self, Channel, Kind};
use super::descriptor::{self, Begins, Body, Descriptor, HEAD, begins, rest_of, tag};
use super::lanes::{self, Lanes};
use super::pending::{How, Outcome, Pending, now, over};
use super::send::{AROUND, BLIND, DROPPED, QUEUED, reasons, strictly};
use super::{End, HEADS, Message, bytes, step};
use crate::collective::p2p::Taken;
use crate::collective::{Tensor, Work};
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::{Pace, is_interrupt};
use crate::lease::{Loan, Token};

const RECEIVING: &str = "receiving a message from the other end of a pipe";
const READING: &str = "reading a message from the other end of a pipe";

/// How long a message that is dropped waits for a lender that does not answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// From here on new memory comes from the context's pool.
const POOLED: usize = 64 << 10;

/// A receive of the next description that has not begun.
#[derive(Debug)]
#[must_use = "nothing is received until it is waited for or started"]
pub struct Next<'a> {
    end: &'a Arc<End>,
    deadline: Option<Deadline>,
}

impl<'a> Next<'a> {
    pub(super) fn new(end: &'a Arc<End>) -> Self {
        Self { end, deadline: None }
    }

    /// Sets when there must be one at the latest. Otherwise the time-out of the configuration counts.
    pub fn deadline(mut self, deadline: Deadline) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Waits for it. Gives nothing if the other end sends no more, or has closed the pipe. A time-out loses no message.
    pub fn wait(self) -> Result<Option<Incoming>> {
        now(describe(self.end.clone(), HEADS, self.end.by(self.deadline), How::Wait))?.tell()
    }

    /// Starts it and returns at once. Receives get their messages in the order in which they were started, however they are waited for.
    pub fn start(self) -> Result<Pending<Option<Incoming>>> {
        Pending::start("next", describe(self.end.clone(), HEADS, self.end.by(self.deadline), How::Start))
    }
}

/// A head that was received. Until it is kept, it is given back when this is dropped.
struct Claim {
    end: Arc<End>,
    head: Tensor,
    held: Option<Held>,
    /// Its tag.
    lane: u64,
    /// Bytes of its message that have come unasked, and all of them.
    cost: u64,
    bytes: u64,
}

enum Held {
    Taken(Taken),
    Work(Work),
}

impl Claim {
    /// Receives the next head; nothing if the other end has closed the pipe.
    async fn take(end: &Arc<End>, lane: u64, by: Deadline, how: How) -> Result<Option<Self>> {
        let head = end.head(&[0; HEAD])?;
        let call = end.group.recv(&head, end.other()).tag(lane).deadline(by);
        let held = match how {
            How::Wait => call.wait_kept().map(Held::Taken),
            How::Start => {
                let work = call.start()?;
                over(&work).await;
                // Somebody is told only of a failure: it can still be given back.
                match work.has_failed() {
                    true => work.wait().map(|()| Held::Work(work)),
                    false => Ok(Held::Work(work)),
                }
            }
        };
        match held {
            Ok(held) => Ok(Some(Self { end: end.clone(), head, held: Some(held), lane, cost: 0, bytes: 0 })),
            Err(Error::Peer(fault)) if fault.kind == PeerFaultKind::Left => Ok(None),
            // Heads have one size.
            Err(error) if is_misfit(&error) => Err(end.misbehaved(&error)),
            Err(error) => Err(end.during(RECEIVING, error)),
        }
    }

    /// Nobody else gets it any more.
    fn keep(mut self) -> Result<()> {
        if let Some(Held::Work(work)) = self.held.take() {
            work.wait().map_err(|error| self.end.own(error))?;
        }
        self.end.keep(self.head.clone());
        self.end.took(self.cost);
        if self.lane == HEADS {
            self.end.traffic.took(self.bytes);
        }
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        match self.held.take() {
            Some(Held::Taken(taken)) => taken.give_back(),
            Some(Held::Work(work)) => {
                work.withdraw();
            }
            None => {}
        }
    }
}

/// A message whose description is here. Until it is kept, it goes to the next receive when this is dropped.
pub(super) struct Described {
    claim: Option<Claim>,
    open: Arc<Open>,
}

impl Described {
    /// Nobody else gets it any more.
    pub(super) fn keep(mut self) -> Result<Incoming> {
        self.claim.take().map_or(Ok(()), Claim::keep)?;
        Ok(Incoming(self.open.clone()))
    }
}

impl Drop for Described {
    fn drop(&mut self) {
        // Before its head is there again.
        if self.claim.is_some() {
            self.open.park();
        }
    }
}

impl Outcome for Option<Described> {
    type Told = Option<Incoming>;
    const GOES_ON: bool = false;

    fn tell(self) -> Result<Option<Incoming>> {
        self.map(Described::keep).transpose()
    }
}

/// The description of the next message whose head has this tag; nothing if there is none any more.
pub(super) async fn describe(end: Arc<End>, lane: u64, by: Deadline, how: How) -> Result<Option<Described>> {
    // In a forked child nobody gives a head back.
    end.context().birth().check("the pipe")?;
    loop {
        let Some(mut claim) = Claim::take(&end, lane, by, how).await? else { return Ok(None) };
        step("receive: a head");
        let mut head = [0; HEAD];
        claim.head.read(&mut head)?;
        let (serial, len, first) = match begins(&head).map_err(|error| end.misbehaved(&error))? {
            (Begins::Message(message), first) => {
                (claim.cost, claim.bytes) = (message.cost, message.bytes);
                (message.serial, message.descriptor, first)
            }
            // It goes back: others hear of it, too.
            (Begins::End, _) => return Ok(None),
        };
        let open = match end.take_parked(serial) {
            Some(parked) => Open::again(&end, parked),
            None => {
                let rest = rest(&end, serial, len, by, how).await;
                match rest.map_err(|error| end.during(RECEIVING, error))? {
                    Some(rest) => Open::new(&end, serial, &[first, &rest].concat())?,
                    // It was taken back.
                    None => {
                        claim.keep()?;
                        continue;
                    }
                }
            }
        };
        return Ok(Some(Described { claim: Some(claim), open: Arc::new(open) }));
    }
}

/// What of a descriptor does not fit its head; nothing if the message was taken back.
async fn rest(end: &Arc<End>, serial: u64, len: usize, by: Deadline, how: How) -> Result<Option<Vec<u8>>> {
    if rest_of(len) == 0 {
        return Ok(Some(Vec::new()));
    }
    let rest = Tensor::private(&vec![0_u8; rest_of(len)])?;
    match end.receive(&rest, tag(serial, descriptor::Part::Rest), by, how).await {
        Ok(()) => Ok(Some(rest.to_vec::<u8>()?)),
        Err(error) if is_misfit(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

impl End {
    /// Receives a part of a message.
    pub(super) async fn receive(&self, into: &Tensor, tag: u64, by: Deadline, how: How) -> Result<()> {
        let call = self.group.recv(into, self.other()).tag(tag).deadline(by);
        match how {
            How::Wait => call.wait(),
            How::Start => {
                let work = call.start()?;
                over(&work).await;
                work.wait()
            }
        }
    }

    fn take_parked(&self, serial: u64) -> Option<Parked> {
        let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        let at = parked.iter().position(|parked| parked.serial == serial)?;
        Some(parked.swap_remove(at))
    }
}

/// Whether what came was no such part: the sender has taken it back.
fn is_misfit(error: &Error) -> bool {
    matches!(error, Error::Peer(fault) if fault.kind == PeerFaultKind::Mismatch)
}

/// A receive of a whole message that has not begun.
#[derive(Debug)]
#[must_use = "nothing is received until it is waited for or started"]
pub struct Recv<'a>(Next<'a>);

impl<'a> Recv<'a> {
    pub(super) fn new(end: &'a Arc<End>) -> Self {
        Self(Next::new(end))
    }

    /// Sets when it must be there at the latest. Otherwise the time-out of the configuration counts.
    pub fn deadline(self, deadline: Deadline) -> Self {
        Self(self.0.deadline(deadline))
    }

    /// Waits for it. Gives nothing if the other end sends no more, or has closed the pipe. A message that has not come whole in
    /// time is there for the next receive.
    pub fn wait(self) -> Result<Option<Message>> {
        let Next { end, deadline } = self.0;
        now(whole(end.clone(), end.by(deadline), How::Wait, Order::default()))?.tell()
    }

    /// The same, but does not wait for copies to GPUs: `queue` does. What is queued on it from now on finds the tensors.
    pub fn on(self, queue: &mut dyn Queue) -> Result<Option<Message>> {
        let Next { end, deadline } = self.0;
        let (order, copied) = Order::of(queue)?;
        let message = now(whole(end.clone(), end.by(deadline), How::Wait, order))?.tell()?;
        follow(queue, &copied).map(|()| message)
    }

    /// Starts it and returns at once. Receives get their messages in the order in which they were started, however they are waited for.
    pub fn start(self) -> Result<Pending<Option<Message>>> {
        let Next { end, deadline } = self.0;
        Pending::start("recv", whole(end.clone(), end.by(deadline), How::Start, Order::default()))
    }
}

/// In which order copies to GPUs are made with what queues of the caller do.
#[derive(Default)]
struct Order {
    /// They are made behind these marks.
    after: Vec<Mark>,
    /// If nobody waits for them: where the marks behind them go.
    copied: Option<Copied>,
}

type Copied = Arc<Mutex<Vec<Mark>>>;

impl Order {
    /// Behind what is on a queue, and before all that comes.
    fn of(queue: &mut dyn Queue) -> Result<(Self, Copied)> {
        let (after, copied) = (vec![queue.mark()?], Copied::default());
        Ok((Self { after, copied: Some(copied.clone()) }, copied))
    }
}

/// Has a queue wait for copies that were queued.
fn follow(queue: &mut dyn Queue, copied: &Copied) -> Result<()> {
    let copied = copied.lock().unwrap_or_else(PoisonError::into_inner);
    let ever = Deadline::after(Duration::MAX);
    copied.iter().try_for_each(|mark| Ok(queue.follow(mark, &Abort::local(), ever)?))
}

/// A message that is here. Until it is told, it goes to the next receive when this is dropped: the reading first, so that what has come
/// is parked.
struct Whole {
    reading: Reading,
    built: Built,
    described: Described,
}

impl Outcome for Option<Whole> {
    type Told = Option<Message>;
    const GOES_ON: bool = false;

    fn tell(self) -> Result<Option<Message>> {
        let Some(Whole { reading, built, described }) = self else { return Ok(None) };
        described.keep()?;
        reading.hand_over(built).map(Some)
    }
}

/// The next message, with its tensors in new memory.
async fn whole(end: Arc<End>, by: Deadline, how: How, order: Order) -> Result<Option<Whole>> {
    let Some(described) = describe(end, HEADS, by, how).await? else { return Ok(None) };
    match read(described.open.clone(), by, how, order).await {
        Ok((reading, built)) => Ok(Some(Whole { reading, built, described })),
        // The next receive goes on with it.
        Err(error) if error.is_timeout() || is_interrupt(&error) => Err(error),
        Err(error) => {
            drop(described.keep());
            Err(error)
        }
    }
}

/// A tensor of a message, as the description says.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Part {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
    /// How its bytes come.
    pub channel: Channel,
    #[doc(hidden)]
    pub maker: u8,
}

/// Where a tensor goes.
#[derive(Debug, Clone)]
enum Target {
    /// As it was sent.
    New,
    /// New memory of a device.
    On(DeviceId),
    Into(Tensor),
    View,
}

/// A message whose description is here. Say where its tensors go, and [`read`](Self::read) it. If you drop it unread, its bytes are
/// dropped as they come, and large ones are not sent.
pub struct Incoming(Arc<Open>);

/// A message that is to be read, as its [`Incoming`] has it and each read of it. When none is left, what was not read is dropped.
struct Open {
    end: Arc<End>,
    serial: u64,
    descriptor: Arc<Descriptor>,
    parts: Arc<Vec<Part>>,
    /// Which tensors are in each block.
    inside: Arc<Vec<Vec<usize>>>,
    content: Mutex<Content>,
}

#[derive(Debug)]
enum Content {
    Here(Basket),
    /// A read of it is under way.
    Reading,
    /// It was read, and nobody was told.
    Whole(Message),
    Read,
}

/// What has come of a message, and where its tensors go.
#[derive(Debug)]
struct Basket {
    targets: Vec<Target>,
    /// What has come of its blocks.
    arrived: Vec<Option<Arrived>>,
    /// Its small blocks, one after the other, and where each begins.
    beside: Option<(Span, Vec<usize>)>,
    /// Whether the sender knows that it may send what follows.
    asked: bool,
    /// Whether lent memory of GPUs follows by way of the host.
    around: bool,
    /// Behind copies that may not be made yet.
    marks: Vec<Mark>,
}

/// A message that was described, and given back before it was read.
pub(super) struct Parked {
    serial: u64,
    descriptor: Arc<Descriptor>,
    parts: Arc<Vec<Part>>,
    inside: Arc<Vec<Vec<usize>>>,
    basket: Basket,
}

/// A block that is here.
#[derive(Debug, Default)]
struct Arrived {
    /// Where it has come; nothing once it was copied and let go.
    source: Option<Source>,
    /// Its copies, each on another device.
    copies: Vec<Span>,
}

/// Memory that has come: of this process, or of the sender. The loan is given back before the sender hears of that.
#[derive(Debug)]
struct Source {
    loan: Option<Loan>,
    span: Span,
    /// The same for those who look at it: it keeps the end, and what tells the sender that the last of them is gone.
    view: Option<Span>,
    let_go: Option<Arc<LetGo>>,
}

impl Arrived {
    /// In memory of this process.
    fn here(span: Span) -> Self {
        Self { source: Some(Source { loan: None, span, view: None, let_go: None }), copies: Vec::new() }
    }

    fn is_lent(&self) -> bool {
        self.source.as_ref().is_some_and(|source| source.loan.is_some())
    }
}

impl Open {
    fn new(end: &Arc<End>, serial: u64, descriptor: &[u8]) -> Result<Self> {
        step("receive: a description");
        let descriptor = Descriptor::from_bytes(descriptor);
        let descriptor = descriptor
            .and_then(|it| expected(end, &it).map(|()| it))
            .map_err(|error| end.misbehaved(&error))?;
        let streaming = end.streaming();
        let part = |part: &descriptor::TensorPart| Part {
            dtype: part.dtype,
            shape: part.layout.shape().to_vec(),
            maker: part.maker,
            channel: descriptor.blocks.get(part.block).map_or(streaming, |block| block.channel(streaming)),
        };
        let parts: Vec<_> = descriptor.tensors.iter().map(part).collect();
        let targets = vec![Target::New; parts.len()];
        let arrived = descriptor.blocks.iter().map(|_| None).collect();
        let mut inside = vec![Vec::new(); descriptor.blocks.len()];
        for (index, part) in descriptor.tensors.iter().enumerate() {
            if let Some(inside) = inside.get_mut(part.block) {
                inside.push(index);
            }
        }
        let basket =
            Basket { targets, arrived, beside: None, asked: false, around: false, marks: Vec::new() };
        let (descriptor, parts, inside) = (Arc::new(descriptor), Arc::new(parts), Arc::new(inside));
        Ok(Self::again(end, Parked { serial, descriptor, parts, inside, basket }))
    }

    fn again(end: &Arc<End>, parked: Parked) -> Self {
        let Parked { serial, descriptor, parts, inside, basket } = parked;
        Self {
            end: end.clone(),
            serial,
            descriptor,
            parts,
            inside,
            content: Mutex::new(Content::Here(basket)),
        }
    }

    /// The next receive that gets its head goes on with what is here.
    fn park(&self) {
        let content = std::mem::replace(&mut *self.content(), Content::Read);
        if let Content::Here(basket) = content {
            let Self { serial, descriptor, parts, inside, .. } = self;
            let (descriptor, parts, inside) = (descriptor.clone(), parts.clone(), inside.clone());
            let parked = Parked { serial: *serial, descriptor, parts, inside, basket };
            self.end.parked.lock().unwrap_or_else(PoisonError::into_inner).push(parked);
        }
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes where a tensor goes.
    fn aim(&self, index: usize, target: Target) -> Result<()> {
        match &mut *self.content() {
            Content::Here(basket) => basket.targets[index] = target,
            Content::Reading => return Err(being_read()),
            Content::Whole(_) | Content::Read => return Err(was_read()),
        }
        Ok(())
    }
}

fn being_read() -> Error {
    Error::misuse("this message is being read")
}

fn was_read() -> Error {
    Error::misuse("this message has been read")
}

impl fmt::Debug for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Open({} payloads, {:?})", self.descriptor.payloads, self.parts)
    }
}

impl Incoming {
    /// The bytes that came with the description.
    pub fn metadata(&self) -> &[u8] {
        &self.0.descriptor.metadata
    }

    /// The sizes of the payloads.
    pub fn payloads(&self) -> impl ExactSizeIterator<Item = usize> {
        self.0.descriptor.blocks[..self.0.descriptor.payloads].iter().map(|block| block.len)
    }

    /// What its tensors are.
    pub fn tensors(&self) -> &[Part] {
        &self.0.parts
    }

    /// Has a tensor of the message come into this one, which has its type and shape.
    pub fn place(&mut self, index: usize, tensor: &Tensor) -> Result<()> {
        let part = self.part(index)?;
        if (tensor.dtype(), tensor.layout().shape()) != (part.dtype, &part.shape[..]) {
            return Err(Error::misuse(format!(
                "tensor {index} of the message is {} of shape {:?}, and its place {} of shape {:?}",
                part.dtype,
                part.shape,
                tensor.dtype(),
                tensor.layout().shape()
            )));
        }
        if tensor.overlaps_itself() {
            return Err(Error::misuse("a place for a tensor with elements that are the same memory"));
        }
        self.comes_to(index, &tensor.span().device())?;
        self.0.aim(index, Target::Into(tensor.clone()))
    }

    /// Has a tensor of the message come into new memory of a device. Otherwise it comes as it was sent: one of the host to the host,
    /// one of a GPU to that GPU, or to another one where this process does not have it, or to the host where it has none.
    pub fn bring_to(&mut self, index: usize, device: &DeviceId) -> Result<()> {
        self.part(index)?;
        self.comes_to(index, device)?;
        self.0.end.context().device(device)?;
        self.0.aim(index, Target::On(device.clone()))
    }

    /// Whether a channel of the two ends brings it there.
    fn comes_to(&self, index: usize, device: &DeviceId) -> Result<()> {
        let Open { end, descriptor, .. } = &*self.0;
        let from = Kind::of(&descriptor.blocks[descriptor.tensors[index].block].from);
        let pair = (from, Kind::of(device));
        if pair == (Kind::Host, Kind::Host) {
            return Ok(());
        }
        let choice = channel::choose(pair, end.near, &end.theirs, &end.ours);
        choice.channel.map(drop).ok_or_else(|| Error::Unsupported {
            what: format!("tensor {index} of the message on {device}"),
            need: "a channel that both ends have".into(),
            have: format!("none ({})", reasons(&choice)),
        })
    }

    /// Has a tensor of the message be the memory that the sender lends, without a copy. It must not be changed by either until it
    /// is dropped, and until then the send is not over. Fails for a tensor that is not lent: [`Part::channel`] says
    /// how it comes.
    pub fn view(&mut self, index: usize) -> Result<()> {
        match self.part(index)?.channel {
            channel if channel.lends() => self.0.aim(index, Target::View),
            channel => Err(Error::Unsupported {
                what: format!("a view of tensor {index} of the message"),
                need: "memory that its sender lends: of one host, shareable, and on the host at least 1 MiB"
                    .into(),
                have: format!("a tensor that comes by {channel}"),
            }),
        }
    }

    fn part(&self, index: usize) -> Result<&Part> {
        let most = self.0.parts.len();
        self.0
            .parts
            .get(index)
            .ok_or_else(|| Error::misuse(format!("tensor {index} of a message that has {most}")))
    }

    /// The number of the message.
    pub(super) fn serial(&self) -> u64 {
        self.0.serial
    }

    /// Takes the first bytes of the metadata away, which were for us.
    pub(super) fn strip(&mut self, len: usize) -> Result<()> {
        let open = Arc::get_mut(&mut self.0).ok_or_else(|| Error::bug("a new message has two owners"))?;
        Arc::make_mut(&mut open.descriptor).metadata.drain(..len);
        Ok(())
    }

    /// Reads all of it, or starts to.
    pub(super) async fn read_out(self, by: Deadline, how: How) -> Result<ReadOut> {
        read_out(self.0, by, how, Order::default()).await
    }

    /// Reads the payloads and tensors. May be called again after a time-out, and goes on then.
    pub fn read(&mut self) -> Read<'_> {
        Read { incoming: self, deadline: None, after: Vec::new() }
    }
}

/// A read of a message that is under way: it has what has come. Dropped, it gives that back.
struct Reading {
    open: Arc<Open>,
    end: Arc<End>,
    serial: u64,
    descriptor: Arc<Descriptor>,
    inside: Arc<Vec<Vec<usize>>>,
    targets: Vec<Target>,
    /// On which device each tensor is when it is here.
    homes: Vec<DeviceId>,
    arrived: Vec<Option<Arrived>>,
    beside: Option<(Span, Vec<usize>)>,
    asked: bool,
    around: bool,
    /// Whether that is because this process cannot open such a GPU.
    blind: bool,
    marks: Vec<Mark>,
    copied: Option<Copied>,
    /// For copies from and to GPUs.
    lanes: Lanes,
    /// Whether memory of the host is there when they are made.
    landing: bool,
    handed_over: bool,
}

/// The payloads and the tensors of a message.
type Built = (Vec<Tensor>, Vec<Tensor>);

/// Reads a message: what follows its description by this thread or as works, and the rest, which takes time, by the hand of the pipe.
async fn read(open: Arc<Open>, by: Deadline, how: How, order: Order) -> Result<(Reading, Built)> {
    let mut reading = Reading::begin(&open, order)?;
    if reading.has_gpus() {
        // To open a GPU takes time, and to ask for its memory.
        let (looked, result) = reading.busy(how, move |reading| reading.look(by)).await?;
        reading = looked;
        result?;
    }
    reading.ask(by, how)?;
    let mut coming = Vec::new();
    for number in 0..reading.arrived.len() {
        if reading.arrived[number].is_some() || !reading.follows(number) {
            continue;
        }
        let place = reading.room(number)?;
        let (end, tag) = (reading.end.clone(), tag(reading.serial, descriptor::Part::Block(number)));
        let tensor = bytes(&place)?;
        let call = end.group.recv(&tensor, end.other()).tag(tag).deadline(by);
        step("read: before a block");
        match how {
            How::Wait => {
                call.wait().map_err(|error| reading.explained(error))?;
                step("read: behind a block");
                reading.arrived[number] = Some(Arrived::here(place));
            }
            // All at once: what comes finds its place.
            How::Start => {
                coming.push((number, place, call.start().map_err(|error| reading.explained(error))?))
            }
        }
    }
    for (number, place, work) in coming {
        over(&work).await;
        work.wait().map_err(|error| reading.explained(error))?;
        reading.arrived[number] = Some(Arrived::here(place));
    }
    if !reading.takes_long() {
        let built = reading.finish(by)?;
        return Ok((reading, built));
    }
    let (reading, built) = reading.busy(how, move |reading| reading.finish(by)).await?;
    Ok((reading, built?))
}

impl Reading {
    fn begin(open: &Arc<Open>, order: Order) -> Result<Self> {
        let mut content = open.content();
        match std::mem::replace(&mut *content, Content::Reading) {
            Content::Here(Basket { targets, arrived, beside, asked, around, marks }) => Ok(Self {
                lanes: open.end.lanes(false, &[&order.after[..], &marks].concat()),
                open: open.clone(),
                end: open.end.clone(),
                serial: open.serial,
                descriptor: open.descriptor.clone(),
                inside: open.inside.clone(),
                homes: vec![DeviceId::Host; targets.len()],
                targets,
                arrived,
                beside,
                asked,
                around,
                blind: false,
                marks,
                copied: order.copied,
                landing: false,
                handed_over: false,
            }),
            Content::Reading => Err(being_read()),
            other => {
                *content = other;
                Err(was_read())
            }
        }
    }

    /// Does something that takes time: by this thread where it waits anyway, and else by the hand of the pipe.
    async fn busy<T: Send + 'static>(
        mut self,
        how: How,
        job: impl FnOnce(&mut Self) -> T + Send + 'static,
    ) -> Result<(Self, T)> {
        if how == How::Wait {
            let done = job(&mut self);
            return Ok((self, done));
        }
        let hand = self.end.hand.clone();
        let errand = hand.run(move || {
            let done = job(&mut self);
            (self, done)
        })?;
        errand.await
    }

    /// Whether a tensor comes from a GPU, or to one.
    fn has_gpus(&self) -> bool {
        let from = self.descriptor.blocks.iter().any(|block| block.from != DeviceId::Host);
        from || self.targets.iter().any(|target| match target {
            Target::On(device) => *device != DeviceId::Host,
            Target::Into(tensor) => tensor.span().device() != DeviceId::Host,
            Target::New | Target::View => false,
        })
    }

    /// Whether a block follows the description.
    fn follows(&self, number: usize) -> bool {
        match self.descriptor.blocks[number].body {
            Body::Follows => true,
            Body::OnGpu(_) => self.around,
            Body::Here(_) | Body::Lent(_) => false,
        }
    }

    /// Gets the memory of GPUs that is lent, and sees where tensors come.
    fn look(&mut self, by: Deadline) -> Result<()> {
        if !self.asked && !self.around {
            self.borrow_from_gpus(by)?;
        }
        let is_here = |index: &usize| self.follows(self.descriptor.tensors[*index].block);
        let viewed = |index: &usize| matches!(self.targets[*index], Target::View);
        if let Some(index) = (0..self.targets.len()).filter(viewed).find(is_here) {
            return Err(Error::Unsupported {
                what: format!("a view of tensor {index} of the message"),
                need: "memory of the sender that can be had here".into(),
                have: "a tensor that comes by way of memory of the host".into(),
            });
        }
        self.homes = (0..self.targets.len()).map(|index| self.home_of(index)).collect();
        Ok(())
    }

    /// If it cannot be had here, all of it comes by way of the host.
    fn borrow_from_gpus(&mut self, by: Deadline) -> Result<()> {
        let (descriptor, mut loans) = (self.descriptor.clone(), Vec::new());
        for (number, block) in descriptor.blocks.iter().enumerate() {
            let Body::OnGpu(token) = &block.body else { continue };
            if self.arrived[number].is_some() {
                continue;
            }
            step("read: before a block");
            if let Err(error) = self.end.context().device(&block.from) {
                self.blind = true;
                return self.go_around(&block.from, &error);
            }
            let loan = self.redeem(&Token::from_bytes(token)?, by);
            step("read: behind a block");
            match loan {
                Ok(loan) => loans.push((number, loan)),
                Err(error) if is_unavailable(&error) => return self.go_around(&block.from, &error),
                Err(error) => return Err(self.not_lent(error)),
            }
        }
        for (number, loan) in loans {
            self.arrived[number] = Some(self.lent(number, loan));
        }
        Ok(())
    }

    /// Has memory of GPUs come by way of the host, if that may be.
    fn go_around(&mut self, gpu: &DeviceId, error: &Error) -> Result<()> {
        let (end, strict) = (&self.end, self.end.context().config().strict);
        let rest = end.theirs.without(Channel::GpuShare);
        let rest = channel::choose((Kind::Gpu, Kind::Host), end.near, &rest, &end.ours).channel;
        let mut tensors = self.targets.iter().zip(&self.descriptor.tensors);
        let viewed = tensors.any(|(target, part)| {
            let body = &self.descriptor.blocks[part.block].body;
            matches!((target, body), (Target::View, Body::OnGpu(_)))
        });
        if strict || viewed || rest.is_none() {
            let what = if viewed { "a view of a tensor" } else { "a tensor" };
            return Err(Error::Unsupported {
                what: format!("{what} on {gpu}{}", if strict { ", in strict mode" } else { "" }),
                need: "memory of a GPU that can be lent, and a process that can open that GPU".into(),
                have: format!("some where that fails: {error}"),
            });
        }
        end.goes_around(&format!("memory of {gpu} that is lent cannot be had: {error}"));
        self.around = true;
        Ok(())
    }

    /// Tells the sender that it may send what follows, if it waits for that.
    fn ask(&mut self, by: Deadline, how: How) -> Result<()> {
        if !self.asked && self.descriptor.waits() {
            let word = Tensor::private(&[if self.blind {
                BLIND
            } else if self.around {
                AROUND
            } else {
                0_u8
            }])?;
            let call = self.end.group.send(&word, self.end.other());
            let call = call.tag(tag(self.serial, descriptor::Part::Go)).deadline(by);
            match how {
                How::Wait => call.wait().map_err(|error| self.end.during(READING, error))?,
                How::Start => self.end.tell(tag(self.serial, descriptor::Part::Go), &word),
            }
            self.asked = true;
        }
        Ok(())
    }

    /// Whether the lender is to be asked for something, or bytes are to be copied.
    fn takes_long(&self) -> bool {
        let mut blocks = self.descriptor.blocks.iter();
        let lent = blocks.any(|block| matches!(block.body, Body::Lent(_) | Body::OnGpu(_)));
        let gpu = |index: usize| self.homes[index] != DeviceId::Host;
        lent || (0..self.targets.len()).any(|index| {
            let number = self.descriptor.tensors[index].block;
            let into = matches!(self.targets[index], Target::Into(_));
            gpu(index) || (into && self.exact_place(number, &DeviceId::Host).is_none())
        })
    }

    /// Brings what does not follow, and makes the tensors.
    fn finish(&mut self, by: Deadline) -> Result<Built> {
        for number in 0..self.arrived.len() {
            if self.arrived[number].is_some() {
                continue;
            }
            step("read: before a block");
            let arrived = self.block(number, by)?;
            step("read: behind a block");
            let lent = arrived.is_lent();
            self.arrived[number] = Some(arrived);
            // What is lent is let go as soon as the host has copied it.
            let inside = self.inside.clone();
            let here = |&index: &usize| self.is_new(index) && self.homes[index] == DeviceId::Host;
            let on_host = self.descriptor.blocks[number].from == DeviceId::Host;
            if lent && on_host && !inside[number].is_empty() && inside[number].iter().all(here) {
                self.own(number, &DeviceId::Host, by)?;
                self.arrived[number].iter_mut().for_each(|arrived| arrived.source = None);
            }
        }
        let payloads = self.arrived.iter().take(self.descriptor.payloads).flatten();
        let payloads = payloads.filter_map(|block| block.source.as_ref());
        let payloads = payloads.map(|source| bytes(&source.span)).collect::<Result<_>>()?;
        let tensors = (0..self.targets.len()).map(|index| self.tensor(index, by)).collect::<Result<_>>()?;
        step("read: copies are queued");
        if self.copied.is_none() || self.landing {
            self.pass(by)?;
        }
        Ok((payloads, tensors))
    }

    /// Waits until the copies from and to GPUs are made.
    fn pass(&mut self, by: Deadline) -> Result<()> {
        self.marks.extend(self.lanes.marks()?);
        lanes::pass(&self.marks, READING, by)?;
        self.marks.clear();
        self.landing = false;
        Ok(())
    }

    /// It is over: the reader has the message.
    fn hand_over(mut self, (payloads, tensors): Built) -> Result<Message> {
        self.handed_over = true;
        *self.open.content() = Content::Read;
        if let Some(copied) = self.copied.clone() {
            self.marks.extend(self.lanes.marks()?);
            copied.lock().unwrap_or_else(PoisonError::into_inner).append(&mut self.marks);
        }
        self.release();
        // What was copied is let go before the sender hears that all is here.
        drop(std::mem::take(&mut self.arrived));
        step("read: before its word");
        if self.descriptor.answered {
            self.end.tell(tag(self.serial, descriptor::Part::Delivered), &Tensor::private(&[0_u8])?);
        }
        let makers = self.open.parts.iter().map(|part| part.maker).collect();
        let (metadata, after) = (self.descriptor.metadata.clone(), Vec::new());
        Ok(Message { metadata, payloads, tensors, makers, after })
    }

    /// Releases what is lent and was copied by queues, behind what they do. They may hold the memory for longer than that.
    fn release(&mut self) {
        let Self { arrived, lanes, copied, .. } = self;
        let sources = arrived.iter_mut().flatten().filter_map(|arrived| arrived.source.as_mut());
        for Source { loan, view, let_go, .. } in sources {
            let mut queues: Vec<_> = lanes.all().collect();
            let Some((last, others)) = queues.split_last_mut() else { return };
            let Some(loan) = loan.take() else { continue };
            let others = others.iter_mut().try_for_each(|queue| loan.used_by(*queue));
            let released = others.and_then(|()| match view {
                Some(_) => loan.used_by(*last),
                None => loan.release_after(*last),
            });
            // That of a view is shared with it.
            if let Some(let_go) = let_go.as_mut().and_then(Arc::get_mut).filter(|_| copied.is_some()) {
                let_go.word = QUEUED;
            }
            if let Err(error) = released {
                tracing::debug!(%error, "what a message has lent is released when queues let go of it");
            }
        }
    }

    /// Why a block has not come, in the words of a pipe.
    fn explained(&self, error: Error) -> Error {
        match is_misfit(&error) {
            true => self.taken_back(),
            false => self.end.during(READING, error),
        }
    }

    /// Where a block comes.
    fn room(&self, number: usize) -> Result<Span> {
        let len = self.descriptor.blocks[number].len;
        match self.exact_place(number, &DeviceId::Host) {
            Some(tensor) => Ok(tensor.span().slice(0..len)?),
            None => {
                let goes_on = self.inside[number].iter().any(|&index| self.homes[index] != DeviceId::Host);
                self.memory(&DeviceId::Host, len, goes_on)
            }
        }
    }

    /// Gets a block that does not follow.
    fn block(&mut self, number: usize, by: Deadline) -> Result<Arrived> {
        let block = &self.descriptor.blocks[number];
        match &block.body {
            Body::Here(_) => {
                let len = block.len;
                let (all, starts) = self.beside()?;
                Ok(Arrived::here(all.slice(starts[number]..starts[number] + len)?))
            }
            Body::Follows | Body::OnGpu(_) => Err(Error::bug("a block that should be here")),
            Body::Lent(token) => {
                let loan = self.redeem(&Token::from_bytes(token)?, by);
                Ok(self.lent(number, loan.map_err(|error| self.not_lent(error))?))
            }
        }
    }

    /// A block that the sender has lent.
    fn lent(&self, number: usize, loan: Loan) -> Arrived {
        let tag = tag(self.serial, descriptor::Part::LetGo(number));
        let let_go = Some(Arc::new(LetGo { end: Arc::downgrade(&self.end), tag, word: 0 }));
        let source = Source { span: loan.span().clone(), loan: Some(loan), view: None, let_go };
        Arrived { source: Some(source), copies: Vec::new() }
    }

    /// Why a block was not lent, in the words of a pipe.
    fn not_lent(&self, error: Error) -> Error {
        match &error {
            Error::Peer(fault) if fault.kind == PeerFaultKind::Refused => self.taken_back(),
            _ => self.end.during(READING, error),
        }
    }

    /// Gets what is lent, once its data is ready. So what is queued behind that waits for nobody else.
    fn redeem(&self, token: &Token, by: Deadline) -> Result<Loan> {
        let mut pace = Pace::new();
        loop {
            match self.end.context().redeem(token, pace.until(by)) {
                Err(error) if error.is_timeout() && !by.passed() => pace.look(Instant::now())?,
                other => return other,
            }
        }
    }

    fn taken_back(&self) -> Error {
        let text = "it has taken the message back while it was being read";
        let peer = self.end.peer().to_string();
        self.end.own(Error::peer(PeerFaultKind::Failed, peer, Some(self.end.other()), text))
    }

    /// All small blocks, in one piece of memory.
    fn beside(&mut self) -> Result<&(Span, Vec<usize>)> {
        if self.beside.is_none() {
            let (mut all, mut starts) = (Vec::new(), Vec::with_capacity(self.descriptor.blocks.len()));
            for block in &self.descriptor.blocks {
                starts.push(all.len());
                if let Body::Here(bytes) = &block.body {
                    all.extend_from_slice(bytes);
                    // What follows begins where any element may.
                    all.resize(all.len().next_multiple_of(16), 0);
                }
            }
            self.beside = Some((Tensor::private(&all)?.span().clone(), starts));
        }
        self.beside.as_ref().ok_or_else(|| Error::bug("a message without its small blocks"))
    }

    /// The place of a tensor on a device that is all of a block, in its order: its bytes go there at once.
    fn exact_place(&self, number: usize, device: &DeviceId) -> Option<&Tensor> {
        let block = &self.descriptor.blocks[number];
        let &[index] = &self.inside[number][..] else { return None };
        let (part, Target::Into(tensor)) = (&self.descriptor.tensors[index], &self.targets[index]) else {
            return None;
        };
        let alike = part.layout.is_contiguous() && tensor.layout().is_contiguous();
        (alike && tensor.byte_len() == block.len && tensor.span().device() == *device).then_some(tensor)
    }

    fn is_new(&self, index: usize) -> bool {
        matches!(self.targets[index], Target::New | Target::On(_))
    }

    /// See `homes`.
    fn home_of(&self, index: usize) -> DeviceId {
        let block = &self.descriptor.blocks[self.descriptor.tensors[index].block];
        match &self.targets[index] {
            Target::On(device) => device.clone(),
            Target::Into(tensor) => tensor.span().device(),
            Target::View => block.from.clone(),
            Target::New if block.from == DeviceId::Host || !self.end.ours.has_gpu() => DeviceId::Host,
            Target::New => {
                let context = self.end.context();
                let there = |gpu: &&DeviceId| context.device(gpu).is_ok();
                let all = context.access().and_then(|access| Ok(access.gpus()?)).unwrap_or_default();
                let home = std::iter::once(&block.from).chain(all.iter().map(|gpu| &gpu.id)).find(there);
                home.cloned().unwrap_or(DeviceId::Host)
            }
        }
    }

    /// New memory. What GPUs copy from or to is of a pool, which they reach.
    fn memory(&self, device: &DeviceId, len: usize, for_gpus: bool) -> Result<Span> {
        let region = match device {
            DeviceId::Host if len < POOLED && !for_gpus => tensorwire_device::host::private(len)?,
            _ => self.end.context().pool(device)?.alloc(len)?,
        };
        Ok(Span::whole(region).slice(0..len)?)
    }

    /// A copy of a block in memory of this process, made once for each device.
    fn own(&mut self, number: usize, device: &DeviceId, by: Deadline) -> Result<Span> {
        let arrived =
            self.arrived[number].as_ref().ok_or_else(|| Error::bug("a tensor without its block"))?;
        if let Some(copy) = arrived.copies.iter().find(|copy| copy.device() == *device) {
            return Ok(copy.clone());
        }
        let source =
            arrived.source.as_ref().ok_or_else(|| Error::bug("a block that was let go"))?.span.clone();
        let len = source.len();
        let by_gpus = *device != DeviceId::Host || source.device() != DeviceId::Host;
        // Only to memory that GPUs know is a copy from there queued.
        let place = self.exact_place(number, device).map(|place| place.span());
        let into =
            match place.filter(|place| !by_gpus || *device != DeviceId::Host || place.region().cacheable()) {
                Some(place) => place.slice(0..len)?,
                None => self.memory(device, len, by_gpus)?,
            };
        self.carry(&into, &source, by)?;
        self.arrived[number].iter_mut().for_each(|arrived| arrived.copies.push(into.clone()));
        Ok(into)
    }

    /// Copies from one device to another.
    fn carry(&mut self, into: &Span, from: &Span, by: Deadline) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        let copy = |queue: &mut dyn Queue, into: &Span, from: &Span| {
            Ok(queue.copy(into.view(), from.view(), Caching::Keep)?)
        };
        match (from.device(), into.device()) {
            (DeviceId::Host, DeviceId::Host) => self.end.context().copy(|queue| copy(queue, into, from)),
            (gpu, DeviceId::Host) => {
                self.landing = true;
                copy(self.lanes.of(&gpu)?, into, from)
            }
            (DeviceId::Host, gpu) if from.region().cacheable() => copy(self.lanes.of(&gpu)?, into, from),
            (DeviceId::Host, gpu) => {
                let known = self.memory(&DeviceId::Host, from.len(), true)?;
                self.end.context().copy(|queue| copy(queue, &known, from))?;
                copy(self.lanes.of(&gpu)?, into, &known)
            }
            (there, here) => {
                let Some(why) = self.end.context().why_unreachable(&here, &there)? else {
                    return copy(self.lanes.of(&here)?, into, from);
                };
                let why = format!("{here} cannot reach {there}: {why}");
                if self.end.context().config().strict {
                    return Err(strictly(&why));
                }
                self.end.goes_around(&why);
                let known = self.memory(&DeviceId::Host, from.len(), true)?;
                copy(self.lanes.of(&there)?, &known, from)?;
                self.pass(by)?;
                copy(self.lanes.of(&here)?, into, &known)
            }
        }
    }

    /// A tensor, from the block that has come.
    fn tensor(&mut self, index: usize, by: Deadline) -> Result<Tensor> {
        let (number, dtype) = (self.descriptor.tensors[index].block, self.descriptor.tensors[index].dtype);
        let layout = self.descriptor.tensors[index].layout.clone();
        let arrived =
            self.arrived[number].as_ref().ok_or_else(|| Error::bug("a tensor without its block"))?;
        let (source, lent) = (arrived.source.as_ref().map(|source| source.span.clone()), arrived.is_lent());
        if matches!(self.targets[index], Target::View) {
            return part_of(&self.viewed(number)?, dtype, &layout);
        }
        let home = self.homes[index].clone();
        let is_here = source.as_ref().is_some_and(|source| source.device() == home);
        let Target::Into(place) = self.targets[index].clone() else {
            let own = match source {
                Some(source) if is_here && !lent => source,
                _ => self.own(number, &home, by)?,
            };
            return part_of(&own, dtype, &layout);
        };
        if place.is_empty() {
            return Ok(place);
        }
        let span = match source {
            Some(source) if is_here => source,
            _ => self.own(number, &home, by)?,
        };
        if Arc::ptr_eq(span.region(), place.span().region()) && span.offset() == place.span().offset() {
            return Ok(place);
        }
        let (to, from) = ((place.span(), place.layout()), (&span, &layout));
        if home != DeviceId::Host {
            copy_between(self.lanes.of(&home)?, to, from)?;
            return Ok(place);
        }
        if self.landing {
            self.pass(by)?;
        }
        self.end.context().copy(|queue| copy_between(queue, to, from))?;
        Ok(place)
    }

    /// The sender's memory, which it gets back when the last user of this is gone, queues among them.
    fn viewed(&mut self, number: usize) -> Result<Span> {
        let source = self.arrived[number].as_mut().and_then(|arrived| arrived.source.as_mut());
        let source = source.ok_or_else(|| Error::bug("a view of a block that was let go"))?;
        if let Some(view) = &source.view {
            return Ok(view.clone());
        }
        let let_go = source.let_go.clone().ok_or_else(|| Error::bug("a view of a block that is not lent"))?;
        let range = source.span.offset()..source.span.offset() + source.span.len();
        // The end is there until the sender was told.
        let keep = Box::new((let_go, self.end.clone()));
        let view = Span::whole(keeping(source.span.region().clone(), range, keep)?);
        Ok(source.view.insert(view).clone())
    }
}

/// Whether memory that is lent cannot be had here, although both ends live.
fn is_unavailable(error: &Error) -> bool {
    match error {
        Error::Unsupported { .. } | Error::Device { .. } => true,
        Error::Peer(fault) => fault.kind == PeerFaultKind::Failed,
        _ => false,
    }
}

fn copy_between(
    queue: &mut dyn Queue,
    (to, as_to): (&Span, &Layout),
    (from, as_from): (&Span, &Layout),
) -> Result<()> {
    if !as_to.is_contiguous() || !as_from.is_contiguous() {
        return Ok(queue.copy_strided((to.view(), as_to), (from.view(), as_from))?);
    }
    let ((to_low, to_high), (from_low, from_high)) = (as_to.extent()?, as_from.extent()?);
    let (to, from) = (to.slice(to_low..to_high)?, from.slice(from_low..from_high)?);
    Ok(queue.copy(to.view(), from.view(), Caching::Keep)?)
}

impl Drop for Reading {
    fn drop(&mut self) {
        if !self.handed_over {
            let (targets, mut arrived) =
                (std::mem::take(&mut self.targets), std::mem::take(&mut self.arrived));
            // Nobody has seen the views. They keep the end, which may keep this.
            arrived
                .iter_mut()
                .flatten()
                .filter_map(|it| it.source.as_mut())
                .for_each(|source| source.view = None);
            let mut marks = std::mem::take(&mut self.marks);
            marks.extend(self.lanes.marks().unwrap_or_default());
            let (beside, asked, around) = (self.beside.take(), self.asked, self.around);
            let basket = Basket { targets, arrived, beside, asked, around, marks };
            *self.open.content() = Content::Here(basket);
        }
    }
}

impl Open {
    /// Nobody reads it: has what comes be dropped, and says so.
    fn discard(&self, basket: &Basket) -> Result<()> {
        let (end, serial) = (&self.end, self.serial);
        end.group.check()?;
        let (word, mut result, mut follows) = (Tensor::private(&[0_u8])?, Ok(()), Vec::new());
        let waits = self.descriptor.waits() && !basket.asked;
        if waits {
            end.tell(tag(serial, descriptor::Part::Go), &Tensor::private(&[DROPPED])?);
        }
        for (number, block) in self.descriptor.blocks.iter().enumerate() {
            if basket.arrived.get(number).is_some_and(Option::is_some) {
                continue;
            }
            match &block.body {
                Body::Here(_) => {}
                // The sender hears that it need not send it.
                Body::Follows if waits => {}
                Body::Follows => follows.push(number),
                Body::OnGpu(_) if basket.around && basket.asked => follows.push(number),
                Body::Lent(token) | Body::OnGpu(token) => {
                    // It fails where the sender has taken it back, and does not matter then.
                    let by = Deadline::after(PATIENCE.min(end.group.timeout()));
                    let used = Token::from_bytes(token).and_then(|token| end.context().discard(&token, by));
                    result = result.and(used);
                    end.tell(tag(serial, descriptor::Part::LetGo(number)), &word);
                }
            }
        }
        for number in follows {
            let none = Tensor::private::<u8>(&[])?;
            let tag = tag(serial, descriptor::Part::Block(number));
            end.group.recv(&none, end.other()).tag(tag).discard()?;
        }
        if self.descriptor.answered {
            end.tell(tag(serial, descriptor::Part::Delivered), &Tensor::private(&[DROPPED])?);
        }
        result
    }
}

/// Refuses what the other end can say, but not of this pipe: memory is lent by itself, on one host, where both have the channel.
fn expected(end: &End, descriptor: &Descriptor) -> Result<()> {
    let lends = |kind, channel| {
        channel::choose((kind, kind), end.near, &end.theirs, &end.ours).channel == Some(channel)
    };
    for block in &descriptor.blocks {
        let (token, lends) = match &block.body {
            Body::Lent(token) => (token, lends(Kind::Host, Channel::Share)),
            Body::OnGpu(token) => (token, lends(Kind::Gpu, Channel::GpuShare)),
            Body::Here(_) | Body::Follows => continue,
        };
        if !lends || Token::from_bytes(token)?.owner() != end.peer().identity {
            return Err(crate::wire::bad("memory that the other end cannot lend"));
        }
    }
    Ok(())
}

/// A tensor in a block: its span begins with its first byte, so that one without gaps is one.
fn part_of(block: &Span, dtype: Dtype, layout: &Layout) -> Result<Tensor> {
    let (low, high) = layout.extent()?;
    let layout = Layout::with_origin(layout.shape(), layout.strides(), layout.item(), layout.origin() - low)?;
    Tensor::new(block.slice(low..high)?, dtype, layout)
}

impl Drop for Open {
    fn drop(&mut self) {
        let content = std::mem::replace(&mut *self.content(), Content::Read);
        if let Content::Here(basket) = content
            && let Err(error) = self.discard(&basket)
        {
            tracing::debug!(%error, "a message of a pipe that nobody has read");
        }
    }
}

impl fmt::Debug for Incoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Incoming({} payloads, {:?})", self.0.descriptor.payloads, self.0.parts)
    }
}

/// A read of a message that has not begun.
#[derive(Debug)]
#[must_use = "nothing is read until it is waited for or started"]
pub struct Read<'a> {
    incoming: &'a mut Incoming,
    deadline: Option<Deadline>,
    after: Vec<Mark>,
}

impl Read<'_> {
    /// Sets when it must be over at the latest. Otherwise the time-out of the configuration counts.
    pub fn deadline(mut self, deadline: Deadline) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Has places on GPUs be written behind all that is on `queue` now. Call it once for each queue. Without it they must be free.
    pub fn after(mut self, queue: &mut dyn Queue) -> Result<Self> {
        self.after.push(queue.mark()?);
        Ok(self)
    }

    /// Reads it.
    pub fn wait(self) -> Result<Message> {
        let open = &self.incoming.0;
        let order = Order { after: self.after, copied: None };
        now(read_out(open.clone(), open.end.by(self.deadline), How::Wait, order))?.tell()
    }

    /// Reads it on a queue of a GPU: returns when the copies to GPUs are queued, behind all that is on `queue` now. What is queued on it
    /// from now on finds the tensors. Those of the host are there on return.
    ///
    /// This waits until the sender's data is ready, and so for what the sender's queue has to do before.
    pub fn on(self, queue: &mut dyn Queue) -> Result<Message> {
        let open = &self.incoming.0;
        let (mut order, copied) = Order::of(queue)?;
        order.after.extend(self.after);
        let message = now(read_out(open.clone(), open.end.by(self.deadline), How::Wait, order))?.tell()?;
        follow(queue, &copied).map(|()| message)
    }

    /// Starts to read it and returns at once. Do not touch the places of its tensors until that is over. It goes on if you drop the
    /// [`Incoming`].
    pub fn start(self) -> Result<Pending<Message>> {
        let open = &self.incoming.0;
        let order = Order { after: self.after, copied: None };
        Pending::start("read", read_out(open.clone(), open.end.by(self.deadline), How::Start, order))
    }
}

/// A message that was read. Until it is told, the next read gives it.
pub(super) struct ReadOut {
    open: Arc<Open>,
    message: Option<Message>,
}

async fn read_out(open: Arc<Open>, by: Deadline, how: How, order: Order) -> Result<ReadOut> {
    let whole = match &mut *open.content() {
        content @ Content::Whole(_) => Some(std::mem::replace(content, Content::Read)),
        _ => None,
    };
    let message = match whole {
        Some(Content::Whole(message)) => message,
        _ => {
            let (reading, built) = read(open.clone(), by, how, order).await?;
            reading.hand_over(built)?
        }
    };
    Ok(ReadOut { open, message: Some(message) })
}

impl Outcome for ReadOut {
    type Told = Message;
    const GOES_ON: bool = false;

    fn tell(mut self) -> Result<Message> {
        self.message.take().ok_or_else(|| Error::bug("a message that was read twice"))
    }
}

impl Drop for ReadOut {
    fn drop(&mut self) {
        if let Some(message) = self.message.take() {
            *self.open.content() = Content::Whole(message);
        }
    }
}

/// Tells the sender that its memory is let go. The loan is given back before. It does not keep the end, which may keep this with a
/// message that was given back: with the end, the sender hears that this end has left.
#[derive(Debug)]
struct LetGo {
    end: Weak<End>,
    tag: u64,
    /// 0, or [`QUEUED`].
    word: u8,
}

impl Drop for LetGo {
    fn drop(&mut self) {
        let Some(end) = self.end.upgrade() else { return };
        match Tensor::private(&[self.word]) {
            Ok(word) => end.tell(self.tag, &word),
            Err(error) => tracing::warn!(%error, "a sender is not told that its memory is let go"),
        }
    }
}
