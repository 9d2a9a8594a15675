//! Sending a message.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tensorwire_device::sync::{AtomicUsize, Ordering};
use tensorwire_device::{Deadline, DeviceId, Span};

use super::channel::{self, Channel, Kind};
use super::descriptor::{self, Block, Body, Descriptor, Part, head_of, tag};
use super::plan::Plan;
use super::{End, Heading, Message, bytes};
use crate::collective::{Completion, Tensor, Work};
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::is_interrupt;
use crate::lease::{Lease, Terms};

/// The largest block that goes beside the description.
const SMALL: usize = 4 << 10;
/// How many bytes of them do.
const BESIDE: usize = 64 << 10;
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
}

impl<'a> Send<'a> {
    pub(super) fn new(end: &'a Arc<End>, message: &'a Message) -> Self {
        Self { end, message, deadline: None, delivered: false }
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

    /// Sends it now. A send that fails is withdrawn: the reader hears so, and the pipe goes on. What the reader has borrowed by then it
    /// keeps until it lets go; the error says so.
    pub fn wait(self) -> Result<()> {
        let (end, by) = (self.end, self.end.by(self.deadline));
        let mut parcel = Parcel::pack(end, self.message, self.delivered)?;
        let _counted = Counted::new(end.clone());
        parcel.send(end, by).map_err(|error| {
            parcel.take_back(end);
            parcel.explained(end, error)
        })
    }

    /// Starts it and returns at once. Do not change its tensors until the work is done. It goes on if you drop the work.
    pub fn start(self) -> Result<Work> {
        let (end, by) = (self.end, self.end.by(self.deadline));
        let parcel = Parcel::pack(end, self.message, self.delivered)?;
        InFlight::begin(end, parcel, self.message, by)
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

/// A message, ready to go.
struct Parcel {
    serial: u64,
    head: Option<Tensor>,
    rest: Option<Tensor>,
    /// Blocks that follow, each with its number.
    follow: Vec<(usize, Tensor)>,
    /// Blocks that are lent, each with its number.
    lent: Vec<(usize, Lease)>,
    delivered: bool,
    /// Whether the reader may know of it.
    told: bool,
    /// Whether what does not fit the head is gone.
    rest_gone: bool,
    /// How many of the blocks that follow are gone.
    gone: usize,
}

impl Parcel {
    fn pack(end: &Arc<End>, message: &Message, delivered: bool) -> Result<Self> {
        end.group.check().map_err(|error| end.own(error))?;
        drop(Heading::begin(end)?);
        let Message { metadata, payloads, tensors, .. } = message;
        descriptor::check(metadata.len(), payloads.len(), tensors.len())?;
        if let Some(tensor) = tensors.iter().find(|tensor| tensor.span().device() != DeviceId::Host) {
            let from = Kind::of(&tensor.span().device());
            let choice = channel::choose((from, Kind::Host), end.near, &end.ours, &end.theirs);
            return Err(no_channel(from, &reasons(&choice)));
        }
        let plan = Plan::of(end.context(), payloads, tensors)?;
        let serial = end.serial.fetch_add(1, Ordering::Relaxed);
        let mut parcel = Self {
            serial,
            head: None,
            rest: None,
            follow: Vec::new(),
            lent: Vec::new(),
            delivered,
            told: false,
            rest_gone: false,
            gone: 0,
        };
        parcel.fill(end, message, plan).inspect_err(|_| parcel.take_back(end))?;
        Ok(parcel)
    }

    fn fill(&mut self, end: &Arc<End>, message: &Message, plan: Plan) -> Result<()> {
        let mut beside = 0;
        let mut blocks = Vec::with_capacity(plan.blocks.len());
        for (number, span) in plan.blocks.iter().enumerate() {
            let (len, from) = (span.len(), Kind::of(&span.device()));
            let small = len <= SMALL && beside + len <= BESIDE;
            let is_payload = number < message.payloads.len();
            let body = if small || len == 0 {
                beside += len;
                Body::Here(span.to_vec()?)
            } else if let Some(lease) = lend(end, span, is_payload)? {
                let token = lease.token().to_bytes();
                self.lent.push((number, lease));
                Body::Lent(token)
            } else {
                self.follow.push((number, bytes(span)?));
                Body::Follows
            };
            blocks.push(Block { len, from, body });
        }
        let mut tensors = plan.tensors;
        tensors.iter_mut().zip(&message.makers).for_each(|(part, &maker)| part.maker = maker);
        let descriptor = Descriptor {
            answered: self.delivered,
            metadata: message.metadata.clone(),
            payloads: message.payloads.len(),
            blocks,
            tensors,
        };
        let descriptor = descriptor.to_bytes()?;
        let (head, rest) = head_of(self.serial, &descriptor);
        self.head = Some(end.head(&head)?);
        self.rest = if rest.is_empty() { None } else { Some(Tensor::private(rest)?) };
        Ok(())
    }

    /// Sends all of it and waits for what the reader has to say.
    fn send(&mut self, end: &Arc<End>, by: Deadline) -> Result<()> {
        let (group, other, serial) = (&end.group, end.other(), self.serial);
        if let Some(head) = self.head.take() {
            let heading = Heading::begin(end)?;
            let sent = group.send(&head, other).deadline(by).wait();
            drop(heading);
            // One that is interrupted may be too late to be withdrawn.
            self.told = sent.as_ref().err().is_none_or(is_interrupt);
            sent?;
            end.keep(head);
        }
        if let Some(rest) = &self.rest {
            group.send(rest, other).tag(tag(serial, Part::Rest)).deadline(by).wait()?;
        }
        self.rest_gone = true;
        for (number, block) in &self.follow {
            group.send(block, other).tag(tag(serial, Part::Block(*number))).deadline(by).wait()?;
            self.gone += 1;
        }
        let answers: Vec<_> = self.answers().collect();
        if answers.is_empty() {
            return Ok(());
        }
        let word = Tensor::private(&[0_u8])?;
        for answer in answers {
            group.recv(&word, other).tag(tag(serial, answer)).deadline(by).wait()?;
            self.heard(end, answer, &word)?;
        }
        Ok(())
    }

    /// Why it has failed, in the words of a pipe.
    fn explained(&self, end: &End, error: Error) -> Error {
        match end.during("sending a message to the other end of a pipe", error) {
            Error::TimedOut { doing, after, missing, ranks } => {
                let held = self.lent.iter().flat_map(|(_, lease)| lease.holders()).next();
                let held = held.map(|_| "; it still holds memory that the message lent: do not change the tensors until it lets go");
                let missing = format!("{missing}{}", held.unwrap_or_default());
                Error::TimedOut { doing, after, missing, ranks }
            }
            other => other,
        }
    }

    /// What the reader says of it.
    fn answers(&self) -> impl Iterator<Item = Part> {
        let lent = self.lent.iter().map(|(number, _)| Part::LetGo(*number));
        lent.chain(self.delivered.then_some(Part::Delivered))
    }

    fn heard(&self, end: &End, answer: Part, word: &Tensor) -> Result<()> {
        match (answer, word.to_vec::<u8>()?[..] == [DROPPED]) {
            (Part::Delivered, true) => Err(dropped(end)),
            _ => Ok(()),
        }
    }

    /// The parts that are not sent.
    fn unsent(&self) -> Vec<(Part, Tensor)> {
        let rest = self.rest.iter().filter(|_| !self.rest_gone).map(|rest| (Part::Rest, rest.clone()));
        let blocks =
            self.follow.iter().skip(self.gone).map(|(number, block)| (Part::Block(*number), block.clone()));
        rest.chain(blocks).collect()
    }

    /// It has failed: nobody waits for what does not come any more, and nobody redeems what was lent.
    fn take_back(&mut self, end: &End) {
        if self.told {
            self.unsent().iter().for_each(|(part, bytes)| take_back(end, self.serial, *part, bytes));
        }
        self.lent.drain(..).for_each(|(_, lease)| discard(end, &lease));
    }
}

/// What a reader says that has dropped a message unread; otherwise it says 0.
pub(super) const DROPPED: u8 = 1;

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

/// Nobody redeems it from now on. Who has redeemed it holds it.
fn discard(end: &End, lease: &Lease) {
    if lease.holders().is_empty()
        && let Err(error) = end.context().discard(lease.token(), Deadline::after(end.group.timeout()))
    {
        tracing::debug!(%error, "what a message would have lent expires");
    }
}

/// Lends a block, if that is its channel and it can be lent.
fn lend(end: &End, span: &Span, is_payload: bool) -> Result<Option<Lease>> {
    let pair = (Kind::Host, Kind::Host);
    let choice = channel::choose(pair, end.near, &end.ours, &end.theirs);
    // A payload was copied when the message was made: nobody asks for a view of that.
    if choice.channel == Some(Channel::Share) && span.len() >= LARGE && !is_payload {
        match end.context().grant(span, &Terms::default().lifetime(std::time::Duration::MAX)) {
            Ok(lease) => return Ok(Some(lease)),
            Err(Error::Unsupported { what, need, have }) => {
                if end.context().config().strict {
                    return Err(Error::Unsupported { what, need, have });
                }
                tracing::debug!("{} bytes go through the ring: they cannot be lent: {have}", span.len());
            }
            Err(error) => return Err(error),
        }
    }
    let rest = channel::choose(pair, end.near, &end.ours.without(Channel::Share), &end.theirs);
    match (rest.channel, choice.channel) {
        (Some(_), _) => Ok(None),
        (None, Some(Channel::Share)) => {
            Err(no_channel(Kind::Host, "share is for tensors of 1 MiB and more that can be shared"))
        }
        (None, _) => Err(no_channel(Kind::Host, &reasons(&choice))),
    }
}

fn reasons(choice: &channel::Choice) -> String {
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

/// A started send.
struct InFlight {
    end: Arc<End>,
    state: Mutex<State>,
    /// Parts that are not over.
    left: AtomicUsize,
}

struct State {
    completion: Option<Completion>,
    error: Option<Error>,
    /// Parts that did not go.
    stuck: Vec<(Part, Tensor)>,
    parcel: Parcel,
    /// What must not go before: receives are withdrawn when they are dropped.
    works: Vec<Work>,
    counted: Option<Counted>,
    _message: Message,
}

impl InFlight {
    fn begin(end: &Arc<End>, mut parcel: Parcel, message: &Message, by: Deadline) -> Result<Work> {
        let (group, other, serial) = (&end.group, end.other(), parcel.serial);
        let (work, completion) = Work::pending("send");
        let mut parts: Vec<(Work, After)> = Vec::new();
        let begun = (|| -> Result<()> {
            if let Some(head) = &parcel.head {
                let _heading = Heading::begin(end)?;
                parts.push((group.send(head, other).deadline(by).start()?, After::Head));
            }
            parcel.told = true;
            if let Some(rest) = &parcel.rest {
                let sent = group.send(rest, other).tag(tag(serial, Part::Rest)).deadline(by).start()?;
                parts.push((sent, After::Sent(Part::Rest, rest.clone())));
            }
            parcel.rest_gone = true;
            for (number, block) in &parcel.follow {
                let sent =
                    group.send(block, other).tag(tag(serial, Part::Block(*number))).deadline(by).start()?;
                parts.push((sent, After::Sent(Part::Block(*number), block.clone())));
                parcel.gone += 1;
            }
            for answer in parcel.answers() {
                let word = Tensor::private(&[0_u8])?;
                let heard = group.recv(&word, other).tag(tag(serial, answer)).deadline(by).start()?;
                parts.push((heard, After::Answer(answer, word)));
            }
            Ok(())
        })();
        // What has begun goes on, and the rest is taken back when that is over.
        let error = begun.err().map(|error| end.own(error));
        if let Some(error) = error.clone().filter(|_| parts.is_empty()) {
            parcel.take_back(end);
            return Err(error);
        }
        let works = parts.iter().map(|(work, _)| work.clone()).collect();
        let state = State {
            completion: Some(completion),
            error,
            stuck: parcel.unsent(),
            parcel,
            works,
            counted: Some(Counted::new(end.clone())),
            _message: message.clone(),
        };
        let flight = Arc::new(Self {
            end: end.clone(),
            state: Mutex::new(state),
            left: AtomicUsize::new(parts.len()),
        });
        for (work, after) in parts {
            let flight = flight.clone();
            work.on_done(move |result| flight.part_is_over(after, result));
        }
        Ok(work)
    }

    fn part_is_over(&self, after: After, result: &Result<()>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let result = match (result, &after) {
            (Ok(()), After::Answer(answer, word)) => state.parcel.heard(&self.end, *answer, word),
            (result, _) => result.clone().map_err(|error| state.parcel.explained(&self.end, error)),
        };
        if let Err(error) = result {
            match after {
                After::Head => state.parcel.told = false,
                After::Sent(part, bytes) => state.stuck.push((part, bytes)),
                After::Answer(..) => {}
            }
            state.error.get_or_insert(error);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let (completion, error) = (state.completion.take(), state.error.take());
        let (stuck, works) = (std::mem::take(&mut state.stuck), std::mem::take(&mut state.works));
        let counted = state.counted.take();
        let Parcel { serial, head, lent, told, .. } = &mut state.parcel;
        let (serial, told, head, lent) = (*serial, *told, head.take(), std::mem::take(lent));
        drop(state);
        match &error {
            None => head.into_iter().for_each(|head| self.end.keep(head)),
            Some(_) => lent.iter().for_each(|(_, lease)| discard(&self.end, lease)),
        }
        for (part, bytes) in stuck.iter().filter(|_| told) {
            take_back(&self.end, serial, *part, bytes);
        }
        drop((works, lent, counted));
        if let Some(completion) = completion {
            completion.finish(error.map_or(Ok(()), Err), None);
        }
    }
}

/// What a part of a started send was.
enum After {
    Head,
    Sent(Part, Tensor),
    Answer(Part, Tensor),
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InFlight({} parts)", self.left.load(Ordering::Relaxed))
    }
}
