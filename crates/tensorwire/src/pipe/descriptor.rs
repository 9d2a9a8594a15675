//! What stands before the payloads and tensors of a message, as pure data.
//!
//! A message is *blocks* of bytes, one for each payload and for the memory of its tensors, and a list of tensors that says what
//! lies where in them. Its descriptor goes in a *head* of a fixed size, which brings its first bytes, and a rest where it is
//! longer. Small blocks stand in it. Others follow it, each with a tag of its own, or are memory that is lent: then its token
//! stands in it.
//!
//! | bytes of a head | what |
//! |---|---|
//! | 0..4 | bytes of the descriptor |
//! | 4 | 1: a message; 2: the end, nothing follows |
//! | 5..8 | bytes of the message that come unasked |
//! | 8..16 | the number of the message |
//! | 16..24 | all bytes of its metadata, payloads and tensors, for those who look at a pipe |
//! | 24.. | the first bytes of the descriptor |

use tensorwire_device::{DeviceId, Dtype, Layout};

use super::channel::{Channel, Kind};
use crate::error::{Error, Result};
use crate::lease::Token;
use crate::wire::{Reader, Writer, bad};

/// Bytes of a head.
pub(super) const HEAD: usize = 512;
/// Bytes of a head before those of the descriptor.
const PREFIX: usize = 24;
/// The longest descriptor.
const LONGEST: usize = 4 << 20;
/// The longest metadata.
const METADATA: usize = 1 << 20;
/// The most payloads, and the most tensors.
const MOST: usize = 1 << 14;

/// What a head begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begins {
    Message(Message),
    /// Nothing: the other end sends no more.
    End,
}

/// What a head says of its message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) serial: u64,
    /// Bytes of its descriptor.
    pub(super) descriptor: usize,
    /// Bytes of it that come unasked.
    pub(super) cost: u64,
    /// All of its bytes, if its sender says what is so.
    pub(super) bytes: u64,
}

/// Cuts a descriptor into a head and what does not fit it. `follow` is what comes behind it unasked, `bytes` all of the message.
pub(super) fn head_of(serial: u64, descriptor: &[u8], follow: usize, bytes: u64) -> ([u8; HEAD], &[u8]) {
    let (first, rest) = descriptor.split_at(descriptor.len().min(HEAD - PREFIX));
    let mut head = [0; HEAD];
    head[..4].copy_from_slice(&(descriptor.len() as u32).to_le_bytes());
    head[4] = 1;
    head[5..8].copy_from_slice(&(cost(rest, follow) as u32).to_le_bytes()[..3]);
    head[8..16].copy_from_slice(&serial.to_le_bytes());
    head[16..24].copy_from_slice(&bytes.to_le_bytes());
    head[PREFIX..][..first.len()].copy_from_slice(first);
    (head, rest)
}

/// Bytes of a message that come unasked: less than 2^24.
pub(super) fn cost(rest: &[u8], follow: usize) -> u64 {
    (HEAD + rest.len() + follow) as u64
}

/// The head behind which nothing follows.
pub(super) fn last_head() -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[4] = 2;
    head
}

/// What a head begins, and the first bytes of its descriptor.
pub(super) fn begins(head: &[u8; HEAD]) -> Result<(Begins, &[u8])> {
    let word = |at: usize| head.get(at..)?.first_chunk().copied().map(u64::from_le_bytes);
    let [first, serial, bytes] = [0, 8, 16].map(|at| word(at).unwrap_or_default());
    let (descriptor, kind, cost) = (first as u32 as usize, (first >> 32) as u8, first >> 40);
    match kind {
        1 if descriptor <= LONGEST && serial < SERIALS => {
            let message = Message { serial, descriptor, cost, bytes };
            Ok((Begins::Message(message), &head[PREFIX..][..descriptor.min(HEAD - PREFIX)]))
        }
        2 => Ok((Begins::End, &[])),
        _ => Err(bad("a head that no pipe of ours sends")),
    }
}

/// Bytes of a descriptor that are not in its head.
pub(super) fn rest_of(len: usize) -> usize {
    len.saturating_sub(HEAD - PREFIX)
}

/// Numbers of messages are below this.
const SERIALS: u64 = 1 << 45;

/// What a part of a message is to the ring or the connection that it goes through: its tag. Heads have the tag 0, so that they
/// stay in order, but for those of answers: who has asked waits for its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// What does not fit the head.
    Rest,
    /// A block that follows.
    Block(usize),
    /// The other way: a block that was lent is let go.
    LetGo(usize),
    /// The other way: the reader has the message, or does not want it.
    Delivered,
    /// The other way: the sender may send what follows, or need not.
    Go,
    /// The other way: the head of the message that answers this one.
    Answer,
}

pub(super) fn tag(serial: u64, part: Part) -> u64 {
    let (kind, number) = match part {
        Part::Block(number) => (0, number),
        Part::LetGo(number) => (1, number),
        Part::Rest => (2, 0),
        Part::Delivered => (3, 0),
        Part::Go => (3, 1),
        Part::Answer => (3, 2),
    };
    (serial % SERIALS + 1) << 18 | kind << 16 | number as u64
}

/// How the bytes of a block come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Body {
    /// They are here.
    Here(Vec<u8>),
    /// They follow the descriptor.
    Follows,
    /// They are memory of the host that is lent: its token.
    Lent(Vec<u8>),
    /// They are memory of a GPU that is lent: its token. If the reader cannot open that GPU, it says so when it asks for what follows, and
    /// they follow.
    OnGpu(Vec<u8>),
    /// They are memory of this process, which another thread hands over: its number.
    Handed(Vec<u8>),
}

/// A block of bytes, as it travels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) len: usize,
    /// Where it was.
    pub(super) from: DeviceId,
    pub(super) body: Body,
}

impl Block {
    /// The channel that it comes by, where what follows from the host comes by `streaming`.
    pub(super) fn channel(&self, streaming: Channel) -> Channel {
        match (&self.body, Kind::of(&self.from)) {
            (Body::Here(_), _) => Channel::Basic,
            (Body::OnGpu(_), _) => Channel::GpuShare,
            (Body::Handed(_), Kind::Host) => Channel::Xth,
            (Body::Handed(_), Kind::Gpu) => Channel::GpuXth,
            (_, Kind::Gpu) => Channel::GpuBasic,
            (Body::Follows, Kind::Host) => streaming,
            (Body::Lent(_), Kind::Host) => Channel::Share,
        }
    }
}

/// A tensor in a block.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TensorPart {
    pub(super) dtype: Dtype,
    /// What made it, as the sender's program numbers that.
    pub(super) maker: u8,
    pub(super) block: usize,
    /// How it lies there.
    pub(super) layout: Layout,
}

/// See the module.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Descriptor {
    /// Whether the sender wants to hear that the reader has it.
    pub(super) answered: bool,
    pub(super) metadata: Vec<u8>,
    /// How many payloads there are: the first blocks.
    pub(super) payloads: usize,
    pub(super) blocks: Vec<Block>,
    pub(super) tensors: Vec<TensorPart>,
}

const HERE: u8 = 0;
const FOLLOWS: u8 = 1;
const LENT: u8 = 2;
const ON_GPU: u8 = 3;
const HANDED: u8 = 4;

/// Refuses what no descriptor holds, before anything is done for it.
pub(super) fn check(metadata: usize, payloads: usize, tensors: usize) -> Result<()> {
    let most = |what: &str, count, most| {
        Err(Error::misuse(format!(
            "a message with {count} {what}; {most} are possible: send several messages"
        )))
    };
    match () {
        () if metadata > METADATA => most("bytes of metadata", metadata, METADATA),
        () if payloads > MOST => most("payloads", payloads, MOST),
        () if tensors > MOST => most("tensors", tensors, MOST),
        () => Ok(()),
    }
}

/// A message of which more bytes follow waits with them until the reader asks for them. So what nobody has asked for is small.
pub(super) const UNASKED: usize = 256 << 10;

impl Descriptor {
    /// Whether what follows is sent when the reader asks for it, and not before.
    pub(super) fn waits(&self) -> bool {
        self.follow() > UNASKED || self.blocks.iter().any(|block| matches!(block.body, Body::OnGpu(_)))
    }

    /// How many bytes follow.
    pub(super) fn follow(&self) -> usize {
        let follow = self.blocks.iter().filter(|block| matches!(block.body, Body::Follows));
        follow.fold(0, |sum, block| sum.saturating_add(block.len))
    }

    /// All of its bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.blocks.iter().fold(self.metadata.len() as u64, |sum, block| sum.saturating_add(block.len as u64))
    }

    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        let Self { answered, metadata, payloads, blocks, tensors } = self;
        let out = Writer::new().u8((*answered).into()).bytes(metadata);
        let out = out.u32(*payloads as u32).u32(blocks.len() as u32);
        let out = blocks.iter().fold(out, |out, block| {
            let out = out.u64(block.len as u64).u8(Kind::of(&block.from).to_byte());
            let out = match &block.from {
                DeviceId::Gpu(uuid) => out.fixed(uuid),
                _ => out,
            };
            match &block.body {
                Body::Here(bytes) => out.u8(HERE).bytes(bytes),
                Body::Follows => out.u8(FOLLOWS),
                Body::Lent(token) => out.u8(LENT).bytes(token),
                Body::OnGpu(token) => out.u8(ON_GPU).bytes(token),
                Body::Handed(token) => out.u8(HANDED).bytes(token),
            }
        });
        let out = out.u32(tensors.len() as u32);
        let out = tensors.iter().fold(out, |out, part| {
            let strides: Vec<_> = part.layout.strides().iter().map(|&stride| stride as usize).collect();
            let out = out
                .u8(part.dtype as u8)
                .u8(part.maker)
                .u32(part.block as u32)
                .u64(part.layout.origin() as u64);
            out.numbers(part.layout.shape()).numbers(&strides)
        });
        let bytes = out.finish();
        match bytes.len() <= LONGEST {
            true => Ok(bytes),
            false => Err(Error::misuse(format!(
                "a message whose description takes {} bytes; {LONGEST} are possible: send fewer tensors at once",
                bytes.len()
            ))),
        }
    }

    /// Every tensor lies inside its block.
    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader::new(bytes);
        let (answered, metadata) = (from.u8()? != 0, from.bytes()?.to_vec());
        let (payloads, count) = (from.u32()? as usize, from.count(10)?);
        if payloads > count || payloads > MOST || count > 2 * MOST {
            return Err(bad("more payloads or blocks than a message has"));
        }
        let blocks = (0..count).map(|_| {
            let len = usize::try_from(from.u64()?).ok().filter(|&len| len <= isize::MAX as usize);
            let len = len.ok_or_else(|| bad("a block that no memory holds"))?;
            let device = match Kind::from_byte(from.u8()?) {
                Some(Kind::Host) => DeviceId::Host,
                Some(Kind::Gpu) => DeviceId::Gpu(from.array()?),
                None => return Err(bad("an unknown kind of device")),
            };
            let body = body(&mut from, len, &device)?;
            Ok(Block { len, from: device, body })
        });
        let blocks = blocks.collect::<Result<Vec<_>>>()?;
        let count = from.count(22)?;
        if count > MOST {
            return Err(bad("more tensors than a message has"));
        }
        let tensors = (0..count).map(|_| {
            let part = tensor(&mut from)?;
            let block = blocks[payloads..].get(part.block.wrapping_sub(payloads));
            let block = block.ok_or_else(|| bad("a tensor in a block that is not there"))?;
            part.layout.fits(block.len).map_err(|_| bad("a tensor that lies outside of its block"))?;
            Ok(part)
        });
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        from.end()?;
        covered(&blocks, payloads, &tensors)?;
        Ok(Self { answered, metadata, payloads, blocks, tensors })
    }
}

/// Every block is what its tensors touch, and no larger than all of them: nobody gets memory ready for what no tensor shows. A payload
/// is not lent, so that nobody gets a view that was not asked for.
fn covered(blocks: &[Block], payloads: usize, tensors: &[TensorPart]) -> Result<()> {
    let mut touched = vec![(usize::MAX, 0_usize, 0_usize); blocks.len()];
    for part in tensors {
        let (low, high) = part.layout.extent()?;
        let (first, end, sum) = &mut touched[part.block];
        let bytes = part.layout.count().saturating_mul(part.layout.item());
        (*first, *end, *sum) = ((*first).min(low), (*end).max(high), sum.saturating_add(bytes));
    }
    let fits = |(number, block): (usize, &Block)| match (number < payloads, touched[number]) {
        (true, _) => block.from == DeviceId::Host && !matches!(block.body, Body::Lent(_) | Body::Handed(_)),
        (false, (first, end, sum)) => first == 0 && end == block.len && block.len <= sum,
    };
    match blocks.iter().enumerate().all(fits) {
        true => Ok(()),
        false => Err(bad("a block that its tensors do not fill")),
    }
}

fn tensor(from: &mut Reader<'_>) -> Result<TensorPart> {
    let dtype = *Dtype::ALL.get(usize::from(from.u8()?)).ok_or_else(|| bad("an unknown type"))?;
    let (maker, block, origin) = (from.u8()?, from.u32()? as usize, from.u64()?);
    let (shape, strides) = (from.numbers()?, from.numbers()?);
    let layout = || {
        let origin = usize::try_from(origin).ok()?;
        let strides: Vec<_> = strides.iter().map(|&stride| stride as isize).collect();
        Layout::with_origin(&shape, &strides, dtype.size(), origin).ok()
    };
    let layout = layout().ok_or_else(|| bad("a tensor that no memory holds"))?;
    Ok(TensorPart { dtype, maker, block, layout })
}

fn body(from: &mut Reader<'_>, len: usize, device: &DeviceId) -> Result<Body> {
    match from.u8()? {
        HERE => {
            let here = from.bytes()?;
            match here.len() == len {
                true => Ok(Body::Here(here.to_vec())),
                false => Err(bad("a block of another size than it says")),
            }
        }
        FOLLOWS if len > 0 => Ok(Body::Follows),
        way @ (LENT | ON_GPU) => {
            let token = from.bytes()?;
            let lent = Token::from_bytes(token).map_err(|_| bad("a token that is none"))?;
            let here = if way == LENT { &DeviceId::Host } else { device };
            match lent.len() == len && lent.device() == here && (way == LENT || *here != DeviceId::Host) {
                true if way == LENT => Ok(Body::Lent(token.to_vec())),
                true => Ok(Body::OnGpu(token.to_vec())),
                false => Err(bad("lent memory of another size or device than it says")),
            }
        }
        HANDED => match from.bytes()? {
            token if token.len() == 16 && len > 0 => Ok(Body::Handed(token.to_vec())),
            _ => Err(bad("memory that is handed over without its number")),
        },
        _ => Err(bad("a block that comes in no way of ours")),
    }
}

/// Any bytes as a head and as a descriptor: what is understood comes out again as it was.
#[cfg(any(test, fuzzing))]
pub(super) fn fuzz(data: &[u8]) {
    if let Some(head) = data.first_chunk::<HEAD>()
        && let Ok((Begins::Message(message), first)) = begins(head)
    {
        assert_eq!(first.len() + rest_of(message.descriptor), message.descriptor);
    }
    if let Ok(descriptor) = Descriptor::from_bytes(data)
        && let Ok(bytes) = descriptor.to_bytes()
    {
        assert!(Descriptor::from_bytes(&bytes).is_ok_and(|again| again == descriptor));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn block(len: usize, body: Body) -> Block {
        Block { len, from: DeviceId::Host, body }
    }

    fn part(dtype: Dtype, block: usize, shape: &[usize]) -> TensorPart {
        TensorPart { dtype, maker: 0, block, layout: Layout::contiguous(shape, dtype.size()).unwrap() }
    }

    fn sample() -> Descriptor {
        let turned = Layout::with_origin(&[3, 2], &[1, 3], 4, 8).unwrap();
        Descriptor {
            answered: true,
            metadata: b"layer 3".to_vec(),
            payloads: 2,
            blocks: vec![
                block(3, Body::Here(vec![1, 2, 3])),
                block(1 << 40, Body::Follows),
                Block { len: 32, from: DeviceId::Gpu([7; 16]), body: Body::Follows },
                block(0, Body::Here(vec![])),
                block(8, Body::Here(vec![0; 8])),
            ],
            tensors: vec![
                part(Dtype::F32, 2, &[2, 3]),
                TensorPart { dtype: Dtype::F32, maker: 7, block: 2, layout: turned },
                part(Dtype::U8, 3, &[0, 9]),
                part(Dtype::F64, 4, &[]),
            ],
        }
    }

    #[test]
    fn descriptors_come_back() {
        let bytes = sample().to_bytes().unwrap();
        assert_eq!(Descriptor::from_bytes(&bytes).unwrap(), sample());
        for len in 0..bytes.len() {
            assert!(Descriptor::from_bytes(&bytes[..len]).is_err(), "{len}");
        }
        assert!(Descriptor::from_bytes(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn heads_bring_what_fits_them() {
        for len in [0, 1, HEAD - PREFIX, HEAD - PREFIX + 1, LONGEST] {
            let bytes = vec![7; len];
            let (head, rest) = head_of(5, &bytes, UNASKED, 7);
            let (begun, first) = begins(&head).unwrap();
            let unasked = (HEAD + rest.len() + UNASKED) as u64;
            let message = Message { serial: 5, descriptor: len, cost: unasked, bytes: 7 };
            assert_eq!((begun, first.len() + rest.len()), (Begins::Message(message), len));
            assert_eq!(rest.len(), rest_of(len));
        }
        assert_eq!(begins(&last_head()).unwrap().0, Begins::End);
        assert!(begins(&[0; HEAD]).is_err());
        assert!(begins(&[0xff; HEAD]).is_err());
        assert!(begins(&head_of(SERIALS, &[], 0, 0).0).is_err());
    }

    #[test]
    fn no_two_parts_have_a_tag() {
        let mut tags: Vec<u64> = [0, 1, SERIALS - 1]
            .into_iter()
            .flat_map(|serial| {
                let numbered =
                    [0, 2 * MOST - 1].into_iter().flat_map(|at| [Part::Block(at), Part::LetGo(at)]);
                numbered
                    .chain([Part::Rest, Part::Delivered, Part::Go, Part::Answer])
                    .map(move |part| tag(serial, part))
            })
            .chain([0, u64::MAX])
            .collect();
        let count = tags.len();
        tags.sort_unstable();
        tags.dedup();
        assert_eq!(tags.len(), count);
    }

    /// Shapes, strides and sizes lie.
    #[test]
    fn what_no_memory_holds_is_refused() {
        let refused = |change: &dyn Fn(&mut Descriptor)| {
            let mut descriptor = sample();
            change(&mut descriptor);
            assert!(Descriptor::from_bytes(&descriptor.to_bytes().unwrap()).is_err());
        };
        refused(&|it| it.tensors[0].layout = Layout::contiguous(&[17], 4).unwrap());
        refused(&|it| it.tensors[0].layout = Layout::with_origin(&[2], &[-1], 4, 1000).unwrap());
        refused(&|it| it.tensors[0].block = 5);
        refused(&|it| it.tensors[3].block = 0);
        refused(&|it| it.payloads = 6);
        refused(&|it| it.blocks[0].len = 4);
        // Larger than its tensors, before them, or without any.
        refused(&|it| it.blocks[2].len = 64);
        refused(&|it| it.tensors[0].layout = Layout::contiguous(&[1], 4).unwrap());
        refused(&|it| it.tensors[0].layout = Layout::with_origin(&[2], &[1], 4, 4).unwrap());
        refused(&|it| it.blocks.push(block(0, Body::Here(vec![]))));
        refused(&|it| it.blocks[1].len = usize::MAX);
        refused(&|it| it.blocks[3].body = Body::Follows);
        refused(&|it| it.blocks[0].body = Body::Lent(vec![1, 2]));
    }

    #[test]
    fn what_no_message_holds_is_refused() {
        check(METADATA, MOST, MOST).unwrap();
        for (metadata, payloads, tensors) in [(METADATA + 1, 0, 0), (0, MOST + 1, 0), (0, 0, MOST + 1)] {
            assert!(matches!(check(metadata, payloads, tensors), Err(Error::Misuse(_))));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..700)) {
            fuzz(&bytes);
        }

        /// One byte of a descriptor of ours is another.
        #[test]
        fn no_change_panics(at in 0..10_000_usize, with in 1..=255_u8) {
            let mut bytes = sample().to_bytes().unwrap();
            let at = at % bytes.len();
            bytes[at] ^= with;
            fuzz(&bytes);
        }
    }
}
