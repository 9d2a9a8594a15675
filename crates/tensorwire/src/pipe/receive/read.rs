//! Reading a message: what is lent is borrowed, what follows is asked for, and all of it is brought to its place. Dropped, a read gives
//! back what has come.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tensorwire_device::{Abort, Deadline, DeviceId, Mark, Queue, Span};

use super::describe::is_misfit;
use super::open::{Arrived, Basket, Content, Open, Source, being_read, was_read};
use super::{Incoming, Target};
use crate::collective::Tensor;
use crate::error::{Error, PeerFaultKind, Result};
use crate::pipe::channel::{self, Channel, Place};
use crate::pipe::descriptor::{self, Body, Descriptor, tag};
use crate::pipe::lanes::{self, Lanes};
use crate::pipe::pending::{How, Outcome, Pending, now, over};
use crate::pipe::send::{AROUND, BLIND, QUEUED};
use crate::pipe::{End, Message, bytes, step};

pub(super) const READING: &str = "reading a message from the other end of a pipe";

/// A read of a message that has not begun.
#[derive(Debug)]
#[must_use = "nothing is read until it is waited for or started"]
pub struct Read<'a> {
    pub(super) incoming: &'a mut Incoming,
    pub(super) deadline: Option<Deadline>,
    pub(super) after: Vec<Mark>,
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
pub(in crate::pipe) struct ReadOut {
    open: Arc<Open>,
    message: Option<Message>,
}

pub(super) async fn read_out(open: Arc<Open>, by: Deadline, how: How, order: Order) -> Result<ReadOut> {
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

/// In which order copies to GPUs are made with what queues of the caller do.
#[derive(Default)]
pub(super) struct Order {
    /// They are made behind these marks.
    after: Vec<Mark>,
    /// If nobody waits for them: where the marks behind them go.
    copied: Option<Copied>,
}

type Copied = Arc<Mutex<Vec<Mark>>>;

impl Order {
    /// Behind what is on a queue, and before all that comes.
    pub(super) fn of(queue: &mut dyn Queue) -> Result<(Self, Copied)> {
        let (after, copied) = (vec![queue.mark()?], Copied::default());
        Ok((Self { after, copied: Some(copied.clone()) }, copied))
    }
}

/// Has a queue wait for copies that were queued.
pub(super) fn follow(queue: &mut dyn Queue, copied: &Copied) -> Result<()> {
    let copied = copied.lock().unwrap_or_else(PoisonError::into_inner);
    let ever = Deadline::after(Duration::MAX);
    copied.iter().try_for_each(|mark| Ok(queue.follow(mark, &Abort::local(), ever)?))
}

/// A read of a message that is under way: it has what has come. Dropped, it gives that back.
pub(in crate::pipe) struct Reading {
    pub(super) open: Arc<Open>,
    pub(super) end: Arc<End>,
    pub(super) serial: u64,
    pub(super) descriptor: Arc<Descriptor>,
    pub(super) inside: Arc<Vec<Vec<usize>>>,
    pub(super) targets: Vec<Target>,
    /// On which device each tensor is when it is here.
    pub(super) homes: Vec<DeviceId>,
    pub(super) arrived: Vec<Option<Arrived>>,
    pub(super) beside: Option<(Span, Vec<usize>)>,
    pub(super) asked: bool,
    pub(super) around: bool,
    /// Whether that is because this process cannot open such a GPU.
    pub(super) blind: bool,
    pub(super) marks: Vec<Mark>,
    pub(super) copied: Option<Copied>,
    /// For copies from and to GPUs.
    pub(super) lanes: Lanes,
    /// Whether memory of the host is there when they are made.
    pub(super) landing: bool,
    pub(super) handed_over: bool,
}

/// The payloads and the tensors of a message.
pub(super) type Built = (Vec<Tensor>, Vec<Tensor>);

/// Reads a message: what follows its description by this thread or as works, and the rest, which takes time, by the hand of the pipe.
pub(super) async fn read(open: Arc<Open>, by: Deadline, how: How, order: Order) -> Result<(Reading, Built)> {
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
            Body::Here(_) | Body::Lent(_) | Body::Handed(_) => false,
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
            let loan = channel::way(Channel::GpuShare)?.take(self, token, by);
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
        let rest = end.theirs.without(Channel::GpuXth).without(Channel::GpuShare);
        let rest = channel::choose((Place::of(gpu), Place::Host), end.near, &rest, &end.ours).channel;
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
        let lent = blocks.any(|block| !matches!(block.body, Body::Here(_) | Body::Follows));
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
    pub(super) fn pass(&mut self, by: Deadline) -> Result<()> {
        self.marks.extend(self.lanes.marks()?);
        lanes::pass(&self.marks, READING, by)?;
        self.marks.clear();
        self.landing = false;
        Ok(())
    }

    /// It is over: the reader has the message.
    pub(super) fn hand_over(mut self, (payloads, tensors): Built) -> Result<Message> {
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
    pub(super) fn explained(&self, error: Error) -> Error {
        match is_misfit(&error) {
            true => self.taken_back(),
            false => self.end.during(READING, error),
        }
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
