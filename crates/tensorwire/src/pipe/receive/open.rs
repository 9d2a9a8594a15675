//! What has come of a message whose description is here, until it is read, dropped, or given back.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tensorwire_device::{Deadline, DeviceId, Mark, Span};

use super::{Part, Target};
use crate::collective::Tensor;
use crate::error::{Error, Result};
use crate::lease::Token;
use crate::pipe::channel::{self, Channel, Place};
use crate::pipe::descriptor::{self, Body, Descriptor, tag};
use crate::pipe::lent::Loaned;
use crate::pipe::send::DROPPED;
use crate::pipe::{End, Message, step};

/// How long a message that is dropped waits for a lender that does not answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// A message that is to be read, as its `Incoming` has it and each read of it. When none is left, what was not read is dropped.
pub(super) struct Open {
    pub(super) end: Arc<End>,
    pub(super) serial: u64,
    pub(super) descriptor: Arc<Descriptor>,
    pub(super) parts: Arc<Vec<Part>>,
    /// Which tensors are in each block.
    pub(super) inside: Arc<Vec<Vec<usize>>>,
    pub(super) content: Mutex<Content>,
}

#[derive(Debug)]
pub(super) enum Content {
    Here(Basket),
    /// A read of it is under way.
    Reading,
    /// It was read, and nobody was told.
    Whole(Message),
    Read,
}

/// What has come of a message, and where its tensors go.
#[derive(Debug)]
pub(super) struct Basket {
    pub(super) targets: Vec<Target>,
    /// What has come of its blocks.
    pub(super) arrived: Vec<Option<Arrived>>,
    /// Its small blocks, one after the other, and where each begins.
    pub(super) beside: Option<(Span, Vec<usize>)>,
    /// Whether the sender knows that it may send what follows.
    pub(super) asked: bool,
    /// Whether lent memory of GPUs follows by way of the host.
    pub(super) around: bool,
    /// Behind copies that may not be made yet.
    pub(super) marks: Vec<Mark>,
}

/// A message that was described, and given back before it was read.
pub(in crate::pipe) struct Parked {
    pub(super) serial: u64,
    descriptor: Arc<Descriptor>,
    parts: Arc<Vec<Part>>,
    inside: Arc<Vec<Vec<usize>>>,
    basket: Basket,
}

/// A block that is here.
#[derive(Debug, Default)]
pub(super) struct Arrived {
    /// Where it has come; nothing once it was copied and let go.
    pub(super) source: Option<Source>,
    /// Its copies, each on another device.
    pub(super) copies: Vec<Span>,
}

/// Memory that has come: of this process, or of the sender. The loan is given back before the sender hears of that.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) loan: Option<Loaned>,
    pub(super) span: Span,
    /// The same for those who look at it: it keeps the end, and what tells the sender that the last of them is gone.
    pub(super) view: Option<Span>,
    pub(super) let_go: Option<Arc<LetGo>>,
}

impl Arrived {
    /// In memory of this process.
    pub(super) fn here(span: Span) -> Self {
        Self { source: Some(Source { loan: None, span, view: None, let_go: None }), copies: Vec::new() }
    }

    pub(super) fn is_lent(&self) -> bool {
        self.source.as_ref().is_some_and(|source| source.loan.is_some())
    }
}

impl Open {
    pub(super) fn new(end: &Arc<End>, serial: u64, descriptor: &[u8]) -> Result<Self> {
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

    pub(super) fn again(end: &Arc<End>, parked: Parked) -> Self {
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
    pub(super) fn park(&self) {
        let content = std::mem::replace(&mut *self.content(), Content::Read);
        if let Content::Here(basket) = content {
            let Self { serial, descriptor, parts, inside, .. } = self;
            let (descriptor, parts, inside) = (descriptor.clone(), parts.clone(), inside.clone());
            let parked = Parked { serial: *serial, descriptor, parts, inside, basket };
            self.end.parked.lock().unwrap_or_else(PoisonError::into_inner).push(parked);
        }
    }

    pub(super) fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes where a tensor goes.
    pub(super) fn aim(&self, index: usize, target: Target) -> Result<()> {
        match &mut *self.content() {
            Content::Here(basket) => basket.targets[index] = target,
            Content::Reading => return Err(being_read()),
            Content::Whole(_) | Content::Read => return Err(was_read()),
        }
        Ok(())
    }
}

pub(super) fn being_read() -> Error {
    Error::misuse("this message is being read")
}

pub(super) fn was_read() -> Error {
    Error::misuse("this message has been read")
}

impl fmt::Debug for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Open({} payloads, {:?})", self.descriptor.payloads, self.parts)
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
                // Its sender hears that nobody takes it.
                Body::Handed(_) => end.tell(tag(serial, descriptor::Part::LetGo(number)), &word),
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

/// Refuses what the other end can say, but not of this pipe: memory is lent by itself, on one host, where both have the channel; and handed
/// over in one process.
fn expected(end: &End, descriptor: &Descriptor) -> Result<()> {
    let goes_by = |from, to, channel| {
        let mut viable = channel::viable((from, to), end.near, &end.theirs, &end.ours);
        viable.any(|way| way.channel() == channel)
    };
    for block in &descriptor.blocks {
        let (from, any) = match block.from {
            DeviceId::Host => (Place::Host, Place::Host),
            _ => (Place::of(&block.from), Place::ANY_GPU),
        };
        let expected = match &block.body {
            // A copy of memory of a GPU is memory of the host.
            Body::Lent(_) => goes_by(Place::Host, Place::Host, Channel::Share),
            Body::OnGpu(_) => goes_by(from, any, Channel::GpuShare),
            Body::Handed(_) => goes_by(from, any, block.channel(end.streaming())),
            Body::Here(_) | Body::Follows => continue,
        };
        let own = match &block.body {
            Body::Lent(token) | Body::OnGpu(token) => {
                Token::from_bytes(token)?.owner() == end.peer().identity
            }
            _ => true,
        };
        if !expected || !own {
            return Err(crate::wire::bad("memory that the other end cannot lend"));
        }
    }
    Ok(())
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

/// Tells the sender that its memory is let go. The loan is given back before. It does not keep the end, which may keep this with a
/// message that was given back: with the end, the sender hears that this end has left.
#[derive(Debug)]
pub(super) struct LetGo {
    pub(super) end: Weak<End>,
    pub(super) tag: u64,
    /// 0, or `QUEUED`.
    pub(super) word: u8,
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
