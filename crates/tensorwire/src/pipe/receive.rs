//! Receiving a message, in two steps: what it is, and where its tensors go.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use tensorwire_device::subregion::keeping;
use tensorwire_device::{Abort, Caching, Deadline, DeviceId, Dtype, Layout, Span};

use super::channel::{self, Channel, Kind};
use super::descriptor::{self, Begins, Body, Descriptor, HEAD, begins, rest_of, tag};
use super::send::DROPPED;
use super::{End, Message, bytes, settled};
use crate::collective::Tensor;
use crate::error::{Error, PeerFaultKind, Result};
use crate::lease::Token;

/// Threads of this end receive descriptions one at a time: so they come in order, and all hear of the last.
#[derive(Default)]
pub(super) struct Turns {
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Default)]
struct State {
    /// Whose turn it is.
    taken: Option<ThreadId>,
    /// A head whose description has not come whole: who is next goes on with it.
    begun: Option<Begun>,
    /// Whether the last head has come.
    ended: bool,
}

/// A head: the number of its message, the length of the description, and its first bytes.
type Begun = (u64, usize, Vec<u8>);

impl Turns {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for its turn; nothing behind the last message.
    fn take(&self, by: Deadline) -> Result<Option<Turn<'_>>> {
        let (begin, me) = (Instant::now(), std::thread::current().id());
        if self.lock().taken == Some(me) {
            return Err(Error::misuse(
                "a message of a pipe is received by a callback that runs while this thread waits for one: receive it elsewhere",
            ));
        }
        let mine = |state: &State| state.taken.is_none() || state.ended;
        let Some(mut state) = settled(&self.state, &self.over, by, mine)? else {
            let missing = "another thread of this process waits for it, too";
            return Err(Error::timed_out(RECEIVING, begin.elapsed(), missing));
        };
        if state.ended {
            return Ok(None);
        }
        state.taken = Some(me);
        Ok(Some(Turn { turns: self, begun: state.begun.take() }))
    }
}

const RECEIVING: &str = "receiving a message from the other end of a pipe";
const READING: &str = "reading a message from the other end of a pipe";

/// The turn of a thread.
struct Turn<'a> {
    turns: &'a Turns,
    begun: Option<Begun>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.lock();
        (state.taken, state.begun) = (None, self.begun.take());
        match state.ended {
            true => self.turns.over.notify_all(),
            false => self.turns.over.notify_one(),
        }
    }
}

/// How long a message that is dropped waits for a lender that does not answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// From here on new memory comes from the context's pool.
const POOLED: usize = 64 << 10;

/// A receive of the next description that has not begun.
#[derive(Debug)]
#[must_use = "nothing is received until it is waited for"]
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
        let (end, by) = (self.end, self.end.by(self.deadline));
        // In a forked child nobody gives the turn back.
        end.context().birth().check("the pipe")?;
        let Some(mut turn) = end.turns.take(by)? else { return Ok(None) };
        loop {
            let begun = match turn.begun.take() {
                Some(begun) => begun,
                None => match head(end, by)? {
                    Heard::Message(begun) => begun,
                    Heard::Last => {
                        end.turns.lock().ended = true;
                        return Ok(None);
                    }
                    Heard::Left => return Ok(None),
                },
            };
            match rest(end, &begun, by) {
                Ok(Some(descriptor)) => return Incoming::new(end, begun.0, &descriptor).map(Some),
                // It was taken back.
                Ok(None) => {}
                Err(error) => {
                    turn.begun = Some(begun);
                    return Err(end.during(RECEIVING, error));
                }
            }
        }
    }
}

/// What comes where a message begins.
enum Heard {
    Message(Begun),
    /// The other end sends no more.
    Last,
    /// It has closed the pipe.
    Left,
}

/// The next head.
fn head(end: &End, by: Deadline) -> Result<Heard> {
    let head = end.head(&[0; HEAD])?;
    match end.group.recv(&head, end.other()).deadline(by).wait() {
        Ok(()) => {}
        Err(Error::Peer(fault)) if fault.kind == PeerFaultKind::Left => return Ok(Heard::Left),
        Err(error) => return Err(end.during(RECEIVING, error)),
    }
    let mut bytes = [0; HEAD];
    head.read(&mut bytes)?;
    end.keep(head);
    match begins(&bytes).map_err(|error| end.misbehaved(&error))? {
        (Begins::Message(serial, len), first) => Ok(Heard::Message((serial, len, first.to_vec()))),
        (Begins::End, _) => Ok(Heard::Last),
    }
}

/// All of a descriptor; nothing if the message was taken back.
fn rest(end: &End, (serial, len, first): &Begun, by: Deadline) -> Result<Option<Vec<u8>>> {
    let mut all = first.clone();
    if rest_of(*len) > 0 {
        let rest = Tensor::private(&vec![0_u8; rest_of(*len)])?;
        let tag = tag(*serial, descriptor::Part::Rest);
        match end.group.recv(&rest, end.other()).tag(tag).deadline(by).wait() {
            Ok(()) => all.extend(rest.to_vec::<u8>()?),
            Err(error) if is_misfit(&error) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
    Ok(Some(all))
}

/// Whether what came was no such part: the sender has taken it back.
fn is_misfit(error: &Error) -> bool {
    matches!(error, Error::Peer(fault) if fault.kind == PeerFaultKind::Mismatch)
}

/// A receive of a whole message that has not begun.
#[derive(Debug)]
#[must_use = "nothing is received until it is waited for"]
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
    /// time is dropped.
    pub fn wait(self) -> Result<Option<Message>> {
        let deadline = self.0.end.by(self.0.deadline);
        match self.0.deadline(deadline).wait()? {
            Some(mut incoming) => incoming.read().deadline(deadline).wait().map(Some),
            None => Ok(None),
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
/// dropped as they come.
///
/// If you ask for the next message before you have read this one, the bytes of this one that stand before that are kept in memory
/// of this process.
pub struct Incoming {
    end: Arc<End>,
    serial: u64,
    descriptor: Descriptor,
    parts: Vec<Part>,
    targets: Vec<Target>,
    /// What has come of its blocks.
    arrived: Vec<Option<Arrived>>,
    /// Its small blocks, one after the other, and where each begins.
    beside: Option<(Span, Vec<usize>)>,
    /// Which tensors are in each block.
    inside: Vec<Vec<usize>>,
    read: bool,
}

/// A block that is here.
#[derive(Debug, Clone)]
struct Arrived {
    span: Span,
    /// Whether it is memory of the sender.
    lent: bool,
}

impl Incoming {
    fn new(end: &Arc<End>, serial: u64, descriptor: &[u8]) -> Result<Self> {
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
        Ok(Self {
            end: end.clone(),
            serial,
            descriptor,
            parts,
            targets,
            arrived,
            beside: None,
            inside,
            read: false,
        })
    }

    /// The bytes that came with the description.
    pub fn metadata(&self) -> &[u8] {
        &self.descriptor.metadata
    }

    /// The sizes of the payloads.
    pub fn payloads(&self) -> impl ExactSizeIterator<Item = usize> {
        self.descriptor.blocks[..self.descriptor.payloads].iter().map(|block| block.len)
    }

    /// What its tensors are.
    pub fn tensors(&self) -> &[Part] {
        &self.parts
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
        self.targets[index] = Target::Into(tensor.clone());
        Ok(())
    }

    /// Has a tensor of the message be the memory that the sender lends, without a copy. It must not be changed by either until it
    /// is dropped, and until then the send is not over. Fails for a tensor that is not lent: [`Part::channel`] says
    /// how it comes.
    pub fn view(&mut self, index: usize) -> Result<()> {
        match self.part(index)?.channel {
            Channel::Share => {
                self.targets[index] = Target::View;
                Ok(())
            }
            channel => Err(Error::Unsupported {
                what: format!("a view of tensor {index} of the message"),
                need: "memory that its sender lends: of one host, shareable, and at least 1 MiB".into(),
                have: format!("a tensor that comes by {channel}"),
            }),
        }
    }

    fn part(&self, index: usize) -> Result<&Part> {
        let most = self.parts.len();
        self.parts
            .get(index)
            .ok_or_else(|| Error::misuse(format!("tensor {index} of a message that has {most}")))
    }

    /// Reads the payloads and tensors. May be called again after a time-out, and goes on then.
    pub fn read(&mut self) -> Read<'_> {
        Read { incoming: self, deadline: None }
    }

    fn read_by(&mut self, by: Deadline) -> Result<Message> {
        if self.read {
            return Err(Error::misuse("this message has been read"));
        }
        for number in 0..self.arrived.len() {
            if self.arrived[number].is_none() {
                let arrived = self.block(number, by)?;
                self.arrived[number] = Some(arrived);
            }
        }
        let payloads = self.arrived.iter().take(self.descriptor.payloads).flatten();
        let payloads = payloads.map(|block| bytes(&block.span)).collect::<Result<_>>()?;
        let tensors = (0..self.parts.len()).map(|index| self.tensor(index)).collect::<Result<_>>()?;
        self.read = true;
        let lent = std::mem::take(&mut self.arrived);
        // What was copied is let go before the sender hears that all is here.
        drop(lent);
        if self.descriptor.answered {
            self.end.tell(tag(self.serial, descriptor::Part::Delivered), &Tensor::private(&[0_u8])?);
        }
        let makers = self.parts.iter().map(|part| part.maker).collect();
        Ok(Message { metadata: std::mem::take(&mut self.descriptor.metadata), payloads, tensors, makers })
    }

    /// Gets a block.
    fn block(&mut self, number: usize, by: Deadline) -> Result<Arrived> {
        let here = |span| Ok(Arrived { span, lent: false });
        let block = &self.descriptor.blocks[number];
        match &block.body {
            Body::Here(_) => {
                let len = block.len;
                let (all, starts) = self.beside()?;
                here(all.slice(starts[number]..starts[number] + len)?)
            }
            Body::Follows => {
                let place = match self.exact_place(number) {
                    Some(tensor) => tensor.span().slice(0..block.len)?,
                    None => self.memory(block.len)?,
                };
                let (end, tag) = (&self.end, tag(self.serial, descriptor::Part::Block(number)));
                let received = end.group.recv(&bytes(&place)?, end.other()).tag(tag).deadline(by).wait();
                received.map_err(|error| match is_misfit(&error) {
                    true => self.taken_back(),
                    false => end.during(READING, error),
                })?;
                here(place)
            }
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
                let mut queue = self.end.context().host().queue()?;
                queue.copy(own.view(), span.view(), Caching::Keep)?;
                queue.finish(&Abort::local(), self.end.by(None))?;
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
        let mut queue = self.end.context().host().queue()?;
        queue.copy_strided((to.view(), as_to), (from.view(), as_from))?;
        Ok(queue.finish(&Abort::local(), self.end.by(None))?)
    }

    /// Nobody reads it: drops what comes, and says so.
    fn discard(&self) -> Result<()> {
        let (end, serial) = (&self.end, self.serial);
        end.group.check()?;
        let (word, mut result) = (Tensor::private(&[0_u8])?, Ok(()));
        for (number, block) in self.descriptor.blocks.iter().enumerate() {
            if self.arrived.get(number).is_some_and(Option::is_some) {
                continue;
            }
            match &block.body {
                Body::Here(_) => {}
                // It fits no message with bytes, so it drops what comes.
                Body::Follows => {
                    let (none, tag) =
                        (Tensor::private::<u8>(&[])?, tag(serial, descriptor::Part::Block(number)));
                    let ever = Deadline::after(Duration::MAX);
                    end.group.recv(&none, end.other()).tag(tag).deadline(ever).start()?.detach();
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

impl Drop for Incoming {
    fn drop(&mut self) {
        if !self.read
            && let Err(error) = self.discard()
        {
            tracing::debug!(%error, "a message of a pipe that nobody has read");
        }
    }
}

impl fmt::Debug for Incoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Incoming({} payloads, {:?})", self.descriptor.payloads, self.parts)
    }
}

/// A read of a message that has not begun.
#[derive(Debug)]
#[must_use = "nothing is read until it is waited for"]
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
        let by = self.incoming.end.by(self.deadline);
        self.incoming.read_by(by)
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
