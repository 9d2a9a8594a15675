//! Receiving a message, in two steps: what it is, and where its tensors go.
//!
//! A receive of a description asks the group for the next head. The group has the order: who asks first gets the first. A receive that
//! is given up gives its head back, so that the next one gets it, also if that waits already; what has come of the message besides is
//! *parked* under its number. The head of the end is given back by everybody who gets it, so that all hear of it.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tensorwire_device::subregion::keeping;
use tensorwire_device::{Caching, Deadline, DeviceId, Dtype, Layout, Span};

use super::channel::{self, Channel, Kind};
use super::descriptor::{self, Begins, Body, Descriptor, HEAD, begins, rest_of, tag};
use super::pending::{How, Outcome, Pending, now, over};
use super::send::DROPPED;
use super::{End, HEADS, Message, bytes, step};
use crate::collective::p2p::Taken;
use crate::collective::{Tensor, Work};
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::is_interrupt;
use crate::lease::Token;

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
    /// Bytes of its message that have come unasked.
    cost: u64,
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
            Ok(held) => Ok(Some(Self { end: end.clone(), head, held: Some(held), cost: 0 })),
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
            (Begins::Message(serial, len, cost), first) => {
                claim.cost = cost;
                (serial, len, first)
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
        now(whole(end.clone(), end.by(deadline), How::Wait))?.tell()
    }

    /// Starts it and returns at once. Receives get their messages in the order in which they were started, however they are waited for.
    pub fn start(self) -> Result<Pending<Option<Message>>> {
        let Next { end, deadline } = self.0;
        Pending::start("recv", whole(end.clone(), end.by(deadline), How::Start))
    }
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
async fn whole(end: Arc<End>, by: Deadline, how: How) -> Result<Option<Whole>> {
    let Some(described) = describe(end, HEADS, by, how).await? else { return Ok(None) };
    match read(described.open.clone(), by, how).await {
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
    New,
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
#[derive(Debug, Clone)]
struct Arrived {
    span: Span,
    /// Whether it is memory of the sender.
    lent: bool,
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
        let arrived = vec![None; descriptor.blocks.len()];
        let mut inside = vec![Vec::new(); descriptor.blocks.len()];
        for (index, part) in descriptor.tensors.iter().enumerate() {
            if let Some(inside) = inside.get_mut(part.block) {
                inside.push(index);
            }
        }
        let basket = Basket { targets, arrived, beside: None, asked: false };
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
        if tensor.span().device() != DeviceId::Host {
            return Err(Error::Unsupported {
                what: "a place in memory of a GPU for a tensor of a pipe".into(),
                need: "a channel that brings it there".into(),
                have: "channels for memory of the host".into(),
            });
        }
        self.0.aim(index, Target::Into(tensor.clone()))
    }

    /// Has a tensor of the message be the memory that the sender lends, without a copy. It must not be changed by either until it
    /// is dropped, and until then the send is not over. Fails for a tensor that is not lent: [`Part::channel`] says
    /// how it comes.
    pub fn view(&mut self, index: usize) -> Result<()> {
        match self.part(index)?.channel {
            Channel::Share => self.0.aim(index, Target::View),
            channel => Err(Error::Unsupported {
                what: format!("a view of tensor {index} of the message"),
                need: "memory that its sender lends: of one host, shareable, and at least 1 MiB".into(),
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
        read_out(self.0, by, how).await
    }

    /// Reads the payloads and tensors. May be called again after a time-out, and goes on then.
    pub fn read(&mut self) -> Read<'_> {
        Read { incoming: self, deadline: None }
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
    arrived: Vec<Option<Arrived>>,
    beside: Option<(Span, Vec<usize>)>,
    asked: bool,
    handed_over: bool,
}

/// The payloads and the tensors of a message.
type Built = (Vec<Tensor>, Vec<Tensor>);

/// Reads a message: what follows its description by this thread or as works, and the rest, which takes time, by the hand of the pipe.
async fn read(open: Arc<Open>, by: Deadline, how: How) -> Result<(Reading, Built)> {
    let mut reading = Reading::begin(&open)?;
    reading.ask(by, how)?;
    let mut coming = Vec::new();
    for number in 0..reading.arrived.len() {
        if reading.arrived[number].is_some()
            || !matches!(reading.descriptor.blocks[number].body, Body::Follows)
        {
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
                reading.arrived[number] = Some(Arrived { span: place, lent: false });
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
        reading.arrived[number] = Some(Arrived { span: place, lent: false });
    }
    if how == How::Wait || !reading.takes_long() {
        let built = reading.finish(by)?;
        return Ok((reading, built));
    }
    let hand = reading.end.hand.clone();
    let errand = hand.run(move || {
        let built = reading.finish(by);
        (reading, built)
    })?;
    let (reading, built) = errand.await?;
    Ok((reading, built?))
}

impl Reading {
    fn begin(open: &Arc<Open>) -> Result<Self> {
        let mut content = open.content();
        match std::mem::replace(&mut *content, Content::Reading) {
            Content::Here(Basket { targets, arrived, beside, asked }) => Ok(Self {
                open: open.clone(),
                end: open.end.clone(),
                serial: open.serial,
                descriptor: open.descriptor.clone(),
                inside: open.inside.clone(),
                targets,
                arrived,
                beside,
                asked,
                handed_over: false,
            }),
            Content::Reading => Err(being_read()),
            other => {
                *content = other;
                Err(was_read())
            }
        }
    }

    /// Tells the sender that it may send what follows, if it waits for that.
    fn ask(&mut self, by: Deadline, how: How) -> Result<()> {
        if !self.asked && self.descriptor.waits() {
            let word = Tensor::private(&[0_u8])?;
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
        let lent = self.descriptor.blocks.iter().any(|block| matches!(block.body, Body::Lent(_)));
        lent || (0..self.targets.len()).any(|index| {
            let number = self.descriptor.tensors[index].block;
            matches!(self.targets[index], Target::Into(_)) && self.exact_place(number).is_none()
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
            let lent = arrived.lent;
            self.arrived[number] = Some(arrived);
            // The first tensor copies it, and what is lent is let go.
            let new = |index: &usize| matches!(self.targets[*index], Target::New);
            if lent
                && self.inside[number].iter().all(new)
                && let Some(&first) = self.inside[number].first()
            {
                self.tensor(first)?;
            }
        }
        let payloads = self.arrived.iter().take(self.descriptor.payloads).flatten();
        let payloads = payloads.map(|block| bytes(&block.span)).collect::<Result<_>>()?;
        let tensors = (0..self.targets.len()).map(|index| self.tensor(index)).collect::<Result<_>>()?;
        Ok((payloads, tensors))
    }

    /// It is over: the reader has the message.
    fn hand_over(mut self, (payloads, tensors): Built) -> Result<Message> {
        self.handed_over = true;
        *self.open.content() = Content::Read;
        // What was copied is let go before the sender hears that all is here.
        drop(std::mem::take(&mut self.arrived));
        step("read: before its word");
        if self.descriptor.answered {
            self.end.tell(tag(self.serial, descriptor::Part::Delivered), &Tensor::private(&[0_u8])?);
        }
        let makers = self.open.parts.iter().map(|part| part.maker).collect();
        Ok(Message { metadata: self.descriptor.metadata.clone(), payloads, tensors, makers })
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
        match self.exact_place(number) {
            Some(tensor) => Ok(tensor.span().slice(0..len)?),
            None => self.memory(len),
        }
    }

    /// Gets a block that does not follow.
    fn block(&mut self, number: usize, by: Deadline) -> Result<Arrived> {
        let here = |span| Ok(Arrived { span, lent: false });
        let block = &self.descriptor.blocks[number];
        match &block.body {
            Body::Here(_) => {
                let len = block.len;
                let (all, starts) = self.beside()?;
                here(all.slice(starts[number]..starts[number] + len)?)
            }
            Body::Follows => Err(Error::bug("a block that follows was not received")),
            Body::Lent(token) => {
                let token = Token::from_bytes(token)?;
                let loan = self.end.context().redeem(&token, by).map_err(|error| match &error {
                    Error::Peer(fault) if fault.kind == PeerFaultKind::Refused => self.taken_back(),
                    _ => self.end.during(READING, error),
                })?;
                let span = loan.into_span();
                let told =
                    LetGo { end: self.end.clone(), tag: tag(self.serial, descriptor::Part::LetGo(number)) };
                let range = span.offset()..span.offset() + span.len();
                let region = keeping(span.region().clone(), range, Box::new(told))?;
                Ok(Arrived { span: Span::whole(region), lent: true })
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

    /// The place of a tensor that is all of a block, in its order: its bytes go there at once.
    fn exact_place(&self, number: usize) -> Option<&Tensor> {
        let block = &self.descriptor.blocks[number];
        let &[index] = &self.inside[number][..] else { return None };
        let (part, Target::Into(tensor)) = (&self.descriptor.tensors[index], &self.targets[index]) else {
            return None;
        };
        let alike = part.layout.is_contiguous() && tensor.layout().is_contiguous();
        (alike && tensor.byte_len() == block.len).then_some(tensor)
    }

    /// New memory.
    fn memory(&self, len: usize) -> Result<Span> {
        let region = match len {
            POOLED.. => self.end.context().pool(&DeviceId::Host)?.alloc(len)?,
            _ => tensorwire_device::host::private(len)?,
        };
        Ok(Span::whole(region).slice(0..len)?)
    }

    /// A tensor, from the block that has come.
    fn tensor(&mut self, index: usize) -> Result<Tensor> {
        let (number, dtype) = (self.descriptor.tensors[index].block, self.descriptor.tensors[index].dtype);
        let layout = self.descriptor.tensors[index].layout.clone();
        let arrived = self.arrived.get(number).cloned().flatten();
        let Arrived { span, lent } = arrived.ok_or_else(|| Error::bug("a tensor without its block"))?;
        match &self.targets[index] {
            Target::Into(place) => {
                let same = Arc::ptr_eq(span.region(), place.span().region())
                    && span.offset() == place.span().offset();
                if !same && !place.is_empty() {
                    self.copy((place.span(), place.layout()), (&span, &layout))?;
                }
                Ok(place.clone())
            }
            Target::New if lent => {
                let own = self.memory(span.len())?;
                self.end.context().copy(|queue| Ok(queue.copy(own.view(), span.view(), Caching::Keep)?))?;
                // Others that share the block share this, and a view stays one.
                if !self.has_view(number) {
                    self.arrived[number] = Some(Arrived { span: own.clone(), lent: false });
                }
                part_of(&own, dtype, &layout)
            }
            Target::New | Target::View => part_of(&span, dtype, &layout),
        }
    }

    fn has_view(&self, number: usize) -> bool {
        self.inside[number].iter().any(|&index| matches!(self.targets[index], Target::View))
    }

    fn copy(&self, (to, as_to): (&Span, &Layout), (from, as_from): (&Span, &Layout)) -> Result<()> {
        self.end.context().copy(|queue| {
            if !as_to.is_contiguous() || !as_from.is_contiguous() {
                return Ok(queue.copy_strided((to.view(), as_to), (from.view(), as_from))?);
            }
            let ((to_low, to_high), (from_low, from_high)) = (as_to.extent()?, as_from.extent()?);
            let (to, from) = (to.slice(to_low..to_high)?, from.slice(from_low..from_high)?);
            Ok(queue.copy(to.view(), from.view(), Caching::Keep)?)
        })
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if !self.handed_over {
            let (targets, arrived) = (std::mem::take(&mut self.targets), std::mem::take(&mut self.arrived));
            let basket = Basket { targets, arrived, beside: self.beside.take(), asked: self.asked };
            *self.open.content() = Content::Here(basket);
        }
    }
}

impl Open {
    /// Nobody reads it: has what comes be dropped, and says so.
    fn discard(&self, basket: &Basket) -> Result<()> {
        let (end, serial) = (&self.end, self.serial);
        end.group.check()?;
        let (word, mut result) = (Tensor::private(&[0_u8])?, Ok(()));
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
                Body::Follows => {
                    let none = Tensor::private::<u8>(&[])?;
                    let tag = tag(serial, descriptor::Part::Block(number));
                    end.group.recv(&none, end.other()).tag(tag).discard()?;
                }
                Body::Lent(token) => {
                    // It fails where the sender has taken it back, and does not matter then.
                    let by = Deadline::after(PATIENCE.min(end.group.timeout()));
                    let used = Token::from_bytes(token).and_then(|token| end.context().discard(&token, by));
                    result = result.and(used);
                    end.tell(tag(serial, descriptor::Part::LetGo(number)), &word);
                }
            }
        }
        if self.descriptor.answered {
            end.tell(tag(serial, descriptor::Part::Delivered), &Tensor::private(&[DROPPED])?);
        }
        result
    }
}

/// Refuses what the other end can say, but not of this pipe: memory is lent by itself, on one host, where both have the channel.
fn expected(end: &End, descriptor: &Descriptor) -> Result<()> {
    let pair = (Kind::Host, Kind::Host);
    let shares = channel::choose(pair, end.near, &end.theirs, &end.ours).channel == Some(Channel::Share);
    for block in &descriptor.blocks {
        let Body::Lent(token) = &block.body else { continue };
        let token = Token::from_bytes(token)?;
        if !shares || token.owner() != end.peer().identity || *token.device() != DeviceId::Host {
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
}

impl Read<'_> {
    /// Sets when it must be over at the latest. Otherwise the time-out of the configuration counts.
    pub fn deadline(mut self, deadline: Deadline) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Reads it.
    pub fn wait(self) -> Result<Message> {
        let open = &self.incoming.0;
        now(read_out(open.clone(), open.end.by(self.deadline), How::Wait))?.tell()
    }

    /// Starts to read it and returns at once. Do not touch the places of its tensors until that is over. It goes on if you drop the
    /// [`Incoming`].
    pub fn start(self) -> Result<Pending<Message>> {
        let open = &self.incoming.0;
        Pending::start("read", read_out(open.clone(), open.end.by(self.deadline), How::Start))
    }
}

/// A message that was read. Until it is told, the next read gives it.
pub(super) struct ReadOut {
    open: Arc<Open>,
    message: Option<Message>,
}

async fn read_out(open: Arc<Open>, by: Deadline, how: How) -> Result<ReadOut> {
    let whole = match &mut *open.content() {
        content @ Content::Whole(_) => Some(std::mem::replace(content, Content::Read)),
        _ => None,
    };
    let message = match whole {
        Some(Content::Whole(message)) => message,
        _ => {
            let (reading, built) = read(open.clone(), by, how).await?;
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

/// Tells the sender that its memory is let go. The loan is given back before.
struct LetGo {
    end: Arc<End>,
    tag: u64,
}

impl Drop for LetGo {
    fn drop(&mut self) {
        match Tensor::private(&[0_u8]) {
            Ok(word) => self.end.tell(self.tag, &word),
            Err(error) => tracing::warn!(%error, "a sender is not told that its memory is let go"),
        }
    }
}
