//! Sending a message.

use std::sync::Arc;

use tensorwire_device::sync::Ordering;
use tensorwire_device::{Caching, Deadline, DeviceId, Mark, Queue, Span};

use super::channel::{self, Channel, Kind, Offer, Offered, Place};
use super::convert;
use super::descriptor::{self, Block, Body, Descriptor, Part, head_of, tag};
use super::lanes::{self, Lanes};
use super::lent::Lent;
use super::pending::{How, Outcome, Pending, now, over};
use super::plan::Plan;
use super::window::Room;
use super::{End, HEADS, Heading, Message, bytes, step};
use crate::collective::Tensor;
use crate::collective::p2p::Revocable;
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::is_interrupt;

/// From here on memory is lent where it can be.
pub(super) const LARGE: usize = 1 << 20;

/// A message that is not sent yet: wait for its send, or start it.
#[derive(Debug)]
#[must_use = "a message goes nowhere until it is waited for or started"]
pub struct Send<'a> {
    end: &'a Arc<End>,
    message: &'a Message,
    deadline: Option<Deadline>,
    delivered: bool,
    /// What was queued before its tensors of GPUs are ready.
    after: Vec<Mark>,
}

impl<'a> Send<'a> {
    pub(super) fn new(end: &'a Arc<End>, message: &'a Message) -> Self {
        Self { end, message, deadline: None, delivered: false, after: Vec::new() }
    }

    /// Sets when it must be over at the latest. Otherwise the time-out of the configuration counts.
    pub fn deadline(mut self, deadline: Deadline) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Has it be over only when the reader has the message. If the reader drops it unread, that is an error.
    pub fn delivered(mut self) -> Self {
        self.delivered = true;
        self
    }

    /// The same as [`Message::after`], for this send of it.
    pub fn after(mut self, queue: &mut dyn Queue) -> Result<Self> {
        self.after.push(queue.mark()?);
        Ok(self)
    }

    /// Sends it now. A send that fails is withdrawn: the reader hears so, and the pipe goes on. What the reader has borrowed by then it
    /// keeps until it lets go; the error says so.
    pub fn wait(self) -> Result<()> {
        let by = self.end.by(self.deadline);
        let mut parcel = Parcel::pack(self.end, self.message, self.delivered, (HEADS, &self.after))?;
        now(parcel.send(by, How::Wait))
    }

    /// Starts it and returns at once. Do not change its tensors until it is over. It goes on if you drop it.
    pub fn start(self) -> Result<Pending<()>> {
        let (end, by) = (self.end, self.end.by(self.deadline));
        let mut parcel = Parcel::pack(end, self.message, self.delivered, (HEADS, &self.after))?;
        // Its tensors stay, whoever drops them.
        let message = self.message.clone();
        Pending::start("send", async move {
            let sent = parcel.send(by, How::Start).await;
            drop(message);
            sent
        })
    }
}

impl Outcome for () {
    type Told = ();
    const GOES_ON: bool = true;

    fn tell(self) -> Result<()> {
        Ok(())
    }

    fn again() -> Option<()> {
        Some(())
    }
}

/// A send that is not over.
struct Counted(Arc<End>);

impl Counted {
    fn new(end: Arc<End>) -> Self {
        end.sending.fetch_add(1, Ordering::AcqRel);
        Self(end)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.sending.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A message, ready to go. What has not gone when it is dropped is taken back.
pub(super) struct Parcel {
    end: Arc<End>,
    serial: u64,
    /// The tag of its head.
    lane: u64,
    head: Option<Tensor>,
    rest: Option<Tensor>,
    /// Blocks that follow, each with its number.
    follow: Vec<(usize, Tensor)>,
    /// Whether they go when the reader asks for them.
    waits: bool,
    /// How many bytes come to the reader unasked, and the room for them until they go.
    cost: u64,
    room: Option<Room>,
    /// All of its bytes.
    bytes: u64,
    /// Bytes of blocks that go beside the description.
    beside: usize,
    /// Blocks whose memory the reader gets, each with its number.
    lent: Vec<(usize, Lent, Span)>,
    /// Behind what is done with memory of GPUs before it is read.
    ready: Vec<Mark>,
    /// Behind copies of it in memory of the host, which follow.
    staged: Vec<Mark>,
    delivered: bool,
    /// Whether the reader may know of it.
    told: bool,
    /// Whether what does not fit the head is gone.
    rest_gone: bool,
    /// How many of the blocks that follow are gone.
    gone: usize,
    /// What is on its way: nothing for the head.
    going: Option<(Option<Part>, Revocable)>,
    over: bool,
    _counted: Counted,
}

impl Parcel {
    pub(super) fn pack(
        end: &Arc<End>,
        message: &Message,
        delivered: bool,
        (lane, after): (u64, &[Mark]),
    ) -> Result<Self> {
        end.group.check().map_err(|error| end.own(error))?;
        drop(Heading::begin(end)?);
        let Message { metadata, payloads, tensors, .. } = message;
        descriptor::check(metadata.len(), payloads.len(), tensors.len())?;
        let mut lanes = end.lanes(true, &[&message.after[..], after].concat());
        let plan = Plan::of(end.context(), payloads, tensors, &mut lanes)?;
        let serial = end.serial.fetch_add(1, Ordering::Relaxed);
        let mut parcel = Self {
            end: end.clone(),
            serial,
            lane,
            head: None,
            rest: None,
            follow: Vec::new(),
            waits: false,
            cost: 0,
            room: None,
            bytes: 0,
            beside: 0,
            lent: Vec::new(),
            ready: Vec::new(),
            staged: Vec::new(),
            delivered,
            told: false,
            rest_gone: false,
            gone: 0,
            going: None,
            over: false,
            _counted: Counted::new(end.clone()),
        };
        parcel.fill(end, message, plan, &mut lanes)?;
        Ok(parcel)
    }

    fn fill(&mut self, end: &Arc<End>, message: &Message, plan: Plan, lanes: &mut Lanes) -> Result<()> {
        let mut blocks = Vec::with_capacity(plan.blocks.len());
        for (number, span) in plan.blocks.iter().enumerate() {
            let is_payload = number < message.payloads.len();
            let body = self.offer(&mut Offer { number, span, is_payload, lanes })?;
            blocks.push(Block { len: span.len(), from: span.device(), body });
        }
        self.ready = lanes.marks()?;
        let mut tensors = plan.tensors;
        tensors.iter_mut().zip(&message.makers).for_each(|(part, &maker)| part.maker = maker);
        let descriptor = Descriptor {
            answered: self.delivered,
            metadata: message.metadata.clone(),
            payloads: message.payloads.len(),
            blocks,
            tensors,
        };
        self.waits = descriptor.waits();
        let follow = if self.waits { 0 } else { descriptor.follow() };
        self.bytes = descriptor.bytes();
        let descriptor = descriptor.to_bytes()?;
        let (head, rest) = head_of(self.serial, &descriptor, follow, self.bytes);
        self.cost = descriptor::cost(rest, follow);
        self.head = Some(end.head(&head)?);
        self.rest = if rest.is_empty() { None } else { Some(Tensor::private(rest)?) };
        Ok(())
    }

    /// By which channel a block goes: the first that takes it of those that both ends have.
    fn offer(&mut self, block: &mut Offer<'_>) -> Result<Body> {
        if let Offered::Goes(body) = channel::beside().offer(self, block)? {
            return Ok(body);
        }
        let (end, from) = (self.end.clone(), block.span.device());
        let to = if from == DeviceId::Host { Place::Host } else { Place::ANY_GPU };
        let (pair, mut around, mut not_for) = ((Place::of(&from), to), None, None);
        for way in channel::viable(pair, end.near, &end.ours, &end.theirs) {
            match way.offer(self, block)? {
                Offered::Goes(body) => {
                    around.iter().for_each(|why: &String| end.goes_around(why));
                    return Ok(body);
                }
                Offered::NotFor(why) => not_for = Some(why),
                Offered::Cannot(why) if end.context().config().strict => return Err(strictly(&why)),
                Offered::Cannot(why) => around = Some(why),
            }
        }
        let why = around.or(not_for.map(String::from));
        let all = || reasons(&channel::choose(pair, end.near, &end.ours, &end.theirs));
        Err(no_channel(Kind::of(&from), &why.unwrap_or_else(all)))
    }

    /// The end that sends it.
    pub(super) fn end(&self) -> &Arc<End> {
        &self.end
    }

    /// Whether so many bytes more may go beside the description; then they do.
    pub(super) fn fits_beside(&mut self, len: usize, most: usize) -> bool {
        let fits = self.beside + len <= most;
        self.beside += if fits { len } else { 0 };
        fits
    }

    /// The reader gets the memory of a block.
    pub(super) fn lends(&mut self, block: &mut Offer<'_>, lent: Lent) -> Body {
        let (token, gpu) = (lent.token(), block.span.device() != DeviceId::Host);
        let body = match &lent {
            Lent::Handed(_) => Body::Handed(token),
            Lent::Lease(_) if gpu => Body::OnGpu(token),
            Lent::Lease(_) => Body::Lent(token),
        };
        self.lent.push((block.number, lent, block.span.clone()));
        body
    }

    /// The bytes of a block follow.
    pub(super) fn follows(&mut self, number: usize, span: &Span) -> Result<Body> {
        self.follow.push((number, bytes(span)?));
        Ok(Body::Follows)
    }

    /// What follows is there behind these marks.
    pub(super) fn staged_on(&mut self, marks: Vec<Mark>) {
        self.staged = marks;
    }

    /// The reader cannot have memory of GPUs of this end: it follows by way of memory of the host.
    fn go_around(&mut self, blind: bool) -> Result<()> {
        let end = self.end.clone();
        let asked_for =
            |lent: &Lent, span: &Span| matches!(lent, Lent::Lease(_)) && span.device() != DeviceId::Host;
        let on_gpu = self.lent.extract_if(.., |(_, lent, span)| asked_for(lent, span));
        let on_gpu: Vec<_> = on_gpu.collect();
        // If anything fails from here on, the reader hears that these do not come.
        let first = self.follow.len();
        for (number, lent, span) in &on_gpu {
            lent.discard(&end);
            // Of several it is not known which.
            if blind && on_gpu.iter().all(|(.., other)| other.device() == span.device()) {
                end.gpus().unknown.insert(span.device());
            }
            self.follow.push((*number, bytes(span)?));
        }
        let pair = (Place::ANY_GPU, Place::Host);
        let rest = end.ours.without(Channel::GpuXth).without(Channel::GpuShare);
        let rest = channel::choose(pair, end.near, &rest, &end.theirs);
        for (at, (.., span)) in on_gpu.iter().enumerate() {
            let why = cannot_have(&span.device());
            if end.context().config().strict {
                return Err(strictly(&why));
            }
            if rest.channel != Some(Channel::GpuBasic) {
                return Err(no_channel(Kind::Gpu, &why));
            }
            end.goes_around(&why);
            let mut lanes = end.lanes(true, &self.ready);
            self.follow[first + at].1 = bytes(&stage(&end, span, &mut lanes)?)?;
            self.staged.extend(lanes.marks()?);
        }
        Ok(())
    }

    /// Waits until copies in memory of the host are made.
    async fn staged(&mut self, by: Deadline, how: How) -> Result<()> {
        let marks = std::mem::take(&mut self.staged);
        self.end.rest(how, move || lanes::pass(&marks, SENDING, by)).await
    }

    /// The number of the message.
    pub(super) fn serial(&self) -> u64 {
        self.serial
    }

    /// Sends all of it and waits for what the reader has to say.
    pub(super) async fn send(&mut self, by: Deadline, how: How) -> Result<()> {
        let sent = self.send_parts(by, how).await;
        self.over = sent.is_ok();
        sent.map_err(|error| self.explained(error))
    }

    async fn send_parts(&mut self, by: Deadline, how: How) -> Result<()> {
        let end = self.end.clone();
        step("send: before the head");
        if let Some(head) = self.head.take() {
            let heading = Heading::begin(&end)?;
            self.room = Some(Room::get(&end, self.cost, by, how).await?);
            let call = end.group.send(&head, end.other()).tag(self.lane).deadline(by);
            match how {
                How::Wait => {
                    let sent = call.wait();
                    drop(heading);
                    // One that is interrupted may be too late to be withdrawn.
                    self.told = sent.as_ref().err().is_some_and(is_interrupt);
                    sent?;
                    self.has_gone(None);
                }
                How::Start => {
                    let sending = call.start_revocable()?;
                    // It has its place before all that comes later.
                    drop(heading);
                    self.room.iter().for_each(Room::placed);
                    self.go(None, sending).await?;
                }
            }
            end.keep(head);
        }
        step("send: behind the head");
        if let Some(rest) = self.rest.clone() {
            self.send_part(Part::Rest, &rest, by, how).await?;
        }
        self.rest_gone = true;
        let asked = match self.waits {
            true => self.hear(Part::Go, by, how).await?,
            false => 0,
        };
        if asked == AROUND || asked == BLIND {
            self.go_around(asked == BLIND)?;
        }
        if asked != DROPPED {
            self.staged(by, how).await?;
            while let Some((number, block)) = self.follow.get(self.gone).cloned() {
                self.send_part(Part::Block(number), &block, by, how).await?;
            }
        }
        // What the reader does not want has not to go.
        self.gone = self.follow.len();
        step("send: behind the blocks");
        let answers: Vec<_> = self.answers().collect();
        for answer in answers {
            let word = self.hear(answer, by, how).await?;
            match answer {
                Part::Delivered if word == DROPPED => return Err(dropped(&end)),
                Part::LetGo(number) if word == QUEUED => self.is_done_with(number, by, how).await?,
                _ => {}
            }
            step("send: heard");
        }
        Ok(())
    }

    /// Sends a part behind the head.
    async fn send_part(&mut self, part: Part, bytes: &Tensor, by: Deadline, how: How) -> Result<()> {
        let (end, tag) = (self.end.clone(), tag(self.serial, part));
        let call = end.group.send(bytes, end.other()).tag(tag).deadline(by);
        match how {
            How::Wait => {
                call.wait()?;
                self.has_gone(Some(part));
                Ok(())
            }
            How::Start => {
                let sending = call.start_revocable()?;
                self.go(Some(part), sending).await
            }
        }
    }

    /// Rests until a part has gone.
    async fn go(&mut self, part: Option<Part>, sending: Revocable) -> Result<()> {
        let work = sending.work.clone();
        self.going = Some((part, sending));
        over(&work).await;
        self.going = None;
        work.wait()?;
        self.has_gone(part);
        Ok(())
    }

    fn has_gone(&mut self, part: Option<Part>) {
        match part {
            None => {
                self.told = true;
                self.room.take().into_iter().for_each(Room::use_up);
                // Answers are taken by those who wait for them.
                if self.lane == HEADS {
                    self.end.traffic.sent(self.bytes);
                }
            }
            Some(Part::Rest) => self.rest_gone = true,
            _ => self.gone += 1,
        }
    }

    /// Waits until queues of the reader have done what they do with a block that was let go.
    async fn is_done_with(&self, number: usize, by: Deadline, how: How) -> Result<()> {
        let lent = self.lent.iter().find(|(lent, ..)| *lent == number);
        let Some((_, lent, _)) = lent.cloned() else { return Ok(()) };
        self.end.rest(how, move || lent.wait(SENDING, by)).await
    }

    /// What the reader says of it.
    async fn hear(&self, part: Part, by: Deadline, how: How) -> Result<u8> {
        let word = Tensor::private(&[0_u8])?;
        self.end.receive(&word, tag(self.serial, part), by, how).await?;
        Ok(word.to_vec::<u8>()?.first().copied().unwrap_or_default())
    }

    /// Why it has failed, in the words of a pipe.
    fn explained(&self, error: Error) -> Error {
        match self.end.during(SENDING, error) {
            Error::TimedOut { doing, after, missing, ranks } => {
                let held = self.lent.iter().any(|(_, lent, _)| lent.is_held());
                let held = held.then_some( "; it still holds memory that the message lent: do not change the tensors until it lets go");
                let missing = format!("{missing}{}", held.unwrap_or_default());
                Error::TimedOut { doing, after, missing, ranks }
            }
            other => other,
        }
    }

    /// What the reader is to say of it.
    fn answers(&self) -> impl Iterator<Item = Part> {
        let lent = self.lent.iter().map(|(number, ..)| Part::LetGo(*number));
        lent.chain(self.delivered.then_some(Part::Delivered))
    }

    /// The parts that are not sent.
    fn unsent(&self) -> Vec<(Part, Tensor)> {
        let rest = self.rest.iter().filter(|_| !self.rest_gone).map(|rest| (Part::Rest, rest.clone()));
        let blocks =
            self.follow.iter().skip(self.gone).map(|(number, block)| (Part::Block(*number), block.clone()));
        rest.chain(blocks).collect()
    }
}

impl Parcel {
    /// It has failed or is not wanted any more: nobody waits for what does not come, and nobody redeems what was lent. Gives whether the
    /// reader may know of it.
    pub(super) fn withdraw(&mut self) -> bool {
        if std::mem::replace(&mut self.over, true) {
            return self.told;
        }
        if let Some((part, sending)) = self.going.take() {
            sending.revoke();
            // It was too late for that.
            if sending.work.is_over() && !sending.work.has_failed() {
                self.has_gone(part);
            }
        }
        if self.told {
            self.unsent().iter().for_each(|(part, bytes)| take_back(&self.end, self.serial, *part, bytes));
        }
        self.lent.drain(..).for_each(|(_, lent, _)| lent.discard(&self.end));
        self.told
    }
}

impl Drop for Parcel {
    fn drop(&mut self) {
        self.withdraw();
    }
}

const SENDING: &str = "sending a message to the other end of a pipe";

/// What a reader says of a message that it drops unread; otherwise it says 0.
pub(super) const DROPPED: u8 = 1;
/// What a reader says of a block that it has let go where its queues still copy it.
pub(super) const QUEUED: u8 = 3;
/// What a reader says when it asks for a message with memory of a GPU that it cannot have.
pub(super) const AROUND: u8 = 2;
/// The same where it can have no memory of that GPU.
pub(super) const BLIND: u8 = 4;

fn dropped(end: &End) -> Error {
    let text = "it has dropped the message without reading it";
    end.own(Error::peer(PeerFaultKind::Failed, end.peer().to_string(), Some(end.other()), text))
}

/// Tells the reader that a part does not come. What it hears is no such part: that would have bytes, and this has none.
fn take_back(end: &End, serial: u64, part: Part, bytes: &Tensor) {
    if end.group.check().is_ok()
        && let Ok(none) = bytes.part(0, 0)
    {
        end.tell(tag(serial, part), &none);
    }
}

/// Has a queue copy memory of a GPU to memory of the host.
pub(super) fn stage(end: &End, span: &Span, lanes: &mut Lanes) -> Result<Span> {
    let len = span.len();
    let copy = convert::of(&DeviceId::Host).allocate(end.context(), &DeviceId::Host, len, true)?;
    lanes.of(&span.device())?.copy(copy.view(), span.view(), Caching::Keep)?;
    Ok(copy)
}

pub(super) fn cannot_have(gpu: &DeviceId) -> String {
    format!("the other end cannot have memory of {gpu}")
}

pub(super) fn strictly(why: &str) -> Error {
    Error::Unsupported {
        what: "a tensor of a GPU by way of memory of the host, in strict mode".into(),
        need: "memory of a GPU that can be lent, and that the other end can open".into(),
        have: why.into(),
    }
}

pub(super) fn reasons(choice: &channel::Choice) -> String {
    let rejected: Vec<_> = choice.rejected.iter().map(|(channel, why)| format!("{channel}: {why}")).collect();
    rejected.join("; ")
}

fn no_channel(from: Kind, why: &str) -> Error {
    Error::Unsupported {
        what: format!("a pipe for this tensor in memory of a {}", from.name()),
        need: "a channel that both ends have".into(),
        have: format!("none ({why})"),
    }
}
