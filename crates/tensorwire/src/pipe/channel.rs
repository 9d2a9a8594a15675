//! By which channel a tensor goes: what both ends can do, as pure data, and the choice that both make from it alike.

use std::fmt;

use tensorwire_device::DeviceId;

use crate::error::Result;
use crate::wire::{Reader, Writer, bad};

/// A way for a tensor from one end of a pipe to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Channel {
    /// Beside the description of the message: what is small.
    Basic,
    /// Memory of the sender is lent. The reader copies it, or looks at it where it is.
    Share,
    /// Memory of a GPU of the sender is lent. The reader's queue copies it, or the reader looks at it where it is.
    GpuShare,
    /// Through a ring in shared memory.
    Ring,
    /// Over a connection between two hosts.
    Wire,
    /// From or to a GPU by way of memory of the host, which is lent, or goes through the ring or over the wire.
    GpuBasic,
}

impl Channel {
    /// All of them; those in front are chosen first.
    pub const ALL: [Self; 6] =
        [Self::Basic, Self::Share, Self::GpuShare, Self::Ring, Self::Wire, Self::GpuBasic];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Basic => "basic",
            Self::Share => "share",
            Self::GpuShare => "gpu_share",
            Self::Ring => "ring",
            Self::Wire => "wire",
            Self::GpuBasic => "gpu_basic",
        }
    }

    /// Whether the sender lends its memory.
    pub(super) fn lends(self) -> bool {
        matches!(self, Self::Share | Self::GpuShare)
    }

    fn bit(self) -> u32 {
        1 << self as u32
    }
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where a tensor is, or comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Host,
    Gpu,
}

impl Kind {
    pub(super) const ALL: [Self; 2] = [Self::Host, Self::Gpu];

    pub(super) fn to_byte(self) -> u8 {
        self as u8
    }

    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte)).copied()
    }

    pub(super) fn of(device: &DeviceId) -> Self {
        match device {
            DeviceId::Host => Self::Host,
            _ => Self::Gpu,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Gpu => "GPU",
        }
    }
}

/// A device of an end: the host, or a GPU by its UUID, or any that the end has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Place {
    Host,
    Gpu(Option<[u8; 16]>),
}

impl Place {
    pub(super) const ANY_GPU: Self = Self::Gpu(None);

    pub(super) fn of(device: &DeviceId) -> Self {
        match device {
            DeviceId::Host => Self::Host,
            DeviceId::Gpu(uuid) => Self::Gpu(Some(*uuid)),
            _ => Self::ANY_GPU,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Gpu(None) => f.write_str("GPU"),
            Self::Gpu(Some(uuid)) => DeviceId::Gpu(*uuid).fmt(f),
        }
    }
}

/// What one end can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hello {
    /// The channels that it has, as bits.
    channels: u32,
    /// The GPUs that it has. Nothing if it may have some and has not asked which: to ask is to start the driver, and not done before there
    /// is a tensor for them.
    gpus: Option<Vec<[u8; 16]>>,
}

const NO_GPU: u8 = 0;
const MAY_HAVE: u8 = 1;
const THESE: u8 = 2;

impl Hello {
    pub(super) fn new(channels: &[Channel], gpus: Option<Vec<DeviceId>>) -> Self {
        let uuid = |gpu: &DeviceId| match gpu {
            DeviceId::Gpu(uuid) => Some(*uuid),
            _ => None,
        };
        let gpus: Option<Vec<_>> = gpus.and_then(|gpus| gpus.iter().map(uuid).collect());
        let gpus = gpus.filter(|gpus| gpus.len() <= Self::MOST);
        Self { channels: channels.iter().fold(0, |bits, channel| bits | channel.bit()), gpus }
    }

    /// Bytes that it travels in: room for what later releases add.
    pub(super) const PADDED: usize = 1024;
    /// The most GPUs that it names.
    const MOST: usize = 32;

    pub(super) fn padded(&self) -> [u8; Self::PADDED] {
        let mut padded = [0; Self::PADDED];
        self.to_bytes().into_iter().zip(&mut padded).for_each(|(byte, to)| *to = byte);
        padded
    }

    fn to_bytes(&self) -> Vec<u8> {
        let out = Writer::new().u32(self.channels);
        match self.gpus.as_deref() {
            None => out.u8(MAY_HAVE).finish(),
            Some([]) => out.u8(NO_GPU).finish(),
            Some(gpus) => {
                let out = out.u8(THESE).u32(gpus.len() as u32);
                gpus.iter().fold(out, |out, uuid| out.fixed(uuid)).finish()
            }
        }
    }

    /// What a later release adds behind it is passed over; channels that are not known here are not chosen.
    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader::new(bytes);
        let channels = from.u32()?;
        let gpus = match from.u8()? {
            NO_GPU => Some(Vec::new()),
            MAY_HAVE => None,
            THESE => match from.count(16)? {
                count @ 1..=Self::MOST => Some((0..count).map(|_| from.array()).collect::<Result<_>>()?),
                _ => return Err(bad("more GPUs than an end names")),
            },
            _ => return Err(bad("a hello that no pipe of ours sends")),
        };
        Ok(Self { channels, gpus })
    }

    /// Without a channel: for memory that it cannot carry.
    pub(super) fn without(&self, channel: Channel) -> Self {
        Self { channels: self.channels & !channel.bit(), ..self.clone() }
    }

    /// Whether it may have a GPU.
    pub(super) fn has_gpu(&self) -> bool {
        self.gpus.as_ref().is_none_or(|gpus| !gpus.is_empty())
    }

    /// Whether it may have this one.
    fn may_open(&self, gpu: Option<[u8; 16]>) -> bool {
        let known = self.gpus.as_ref().zip(gpu);
        known.is_none_or(|(gpus, gpu)| gpus.contains(&gpu))
    }

    fn has(&self, channel: Channel) -> bool {
        self.channels & channel.bit() != 0
    }
}

/// What is chosen for tensors of one device that come to another, and why the channels in front of it are not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) channel: Option<Channel>,
    pub(super) rejected: Vec<(Channel, &'static str)>,
}

const FOR_HOST: &str = "it is for memory of the host";
const FOR_GPU: &str = "it is for memory of a GPU";
const FOR_SENT: &str = "it is for memory of a GPU that is sent";

/// Chooses for tensors that are too large to go beside the description. `near` says whether the two share a host. Both ends
/// choose alike: only what both have is used.
pub(super) fn choose((from, to): (Place, Place), near: bool, sender: &Hello, reader: &Hello) -> Choice {
    let mut rejected = Vec::new();
    for channel in Channel::ALL.into_iter().skip(1) {
        let on_gpu = from != Place::Host || to != Place::Host;
        let why = match channel {
            Channel::Share | Channel::Ring | Channel::Wire if on_gpu => Some(FOR_HOST),
            Channel::GpuShare if from == Place::Host => Some(FOR_SENT),
            Channel::GpuBasic if !on_gpu => Some(FOR_GPU),
            Channel::Share | Channel::Ring | Channel::GpuShare if !near => {
                Some("the two are on different hosts")
            }
            Channel::Wire if near => Some("the two are on one host"),
            Channel::GpuShare if !reader.has_gpu() => Some("the reader has no GPU"),
            Channel::GpuShare if matches!(from, Place::Gpu(gpu) if !reader.may_open(gpu)) => {
                Some("the reader does not have that GPU")
            }
            _ if !sender.has(channel) => Some("the sender does not have it"),
            _ if !reader.has(channel) => Some("the reader does not have it"),
            _ => None,
        };
        match why {
            None => return Choice { channel: Some(channel), rejected },
            Some(why) => rejected.push((channel, why)),
        }
    }
    Choice { channel: None, rejected }
}

/// What is chosen for a pair of devices, and for memory of it that cannot be lent.
type Chosen = (Choice, Option<Channel>);

/// The choice for each two devices that the ends have. GPUs of a sender that are treated alike are one.
fn choices(near: bool, sender: &Hello, reader: &Hello) -> Vec<((Place, Place), Chosen)> {
    let any = |hello: &Hello| hello.has_gpu().then_some(Place::ANY_GPU);
    let chosen = |pair: (Place, Place)| {
        let choice = choose(pair, near, sender, reader);
        let lent = choice.channel.filter(|channel| channel.lends());
        let rest = lent.and_then(|lent| choose(pair, near, &sender.without(lent), reader).channel);
        (choice, rest)
    };
    let gpus: Vec<Place> = sender.gpus.iter().flatten().map(|uuid| Place::Gpu(Some(*uuid))).collect();
    let mut all = Vec::new();
    for from in std::iter::once(Place::Host).chain(any(sender)) {
        for to in std::iter::once(Place::Host).chain(any(reader)) {
            let each: Vec<_> = match from {
                Place::Gpu(_) => gpus.iter().map(|gpu| ((*gpu, to), chosen((*gpu, to)))).collect(),
                Place::Host => Vec::new(),
            };
            match each.first() {
                Some((_, first)) if each.iter().any(|(_, other)| other != first) => all.extend(each),
                Some((_, first)) => all.push(((from, to), first.clone())),
                None => all.push(((from, to), chosen((from, to)))),
            }
        }
    }
    all
}

/// All that may be chosen for what one end sends, in a line.
pub(super) fn names(near: bool, sender: &Hello, reader: &Hello) -> String {
    let all = choices(near, sender, reader).into_iter();
    let mut all: Vec<_> =
        all.flat_map(|(_, (choice, rest))| choice.channel.into_iter().chain(rest)).collect();
    all.sort_unstable();
    all.dedup();
    all.into_iter().map(Channel::name).collect::<Vec<_>>().join(", ")
}

/// The choice for each two devices that the ends have, as lines for people.
pub(super) fn explain(near: bool, ours: &Hello, theirs: &Hello) -> String {
    let mut text = String::new();
    for (words, sender, reader) in [("sent", ours, theirs), ("received", theirs, ours)] {
        for ((from, to), (choice, rest)) in choices(near, sender, reader) {
            let name = choice.channel.map_or("none", Channel::name);
            let rest = rest.map(|rest| format!("; {rest} for what cannot be lent")).unwrap_or_default();
            text.push_str(&format!("  {words}, {from} to {to}: {name}{rest}\n"));
            let told = choice.rejected.iter().filter(|(_, why)| ![FOR_HOST, FOR_GPU, FOR_SENT].contains(why));
            told.for_each(|(channel, why)| text.push_str(&format!("    not {channel}: {why}\n")));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Of few GPUs, so that ends often have the same.
    fn any_hello() -> impl Strategy<Value = Hello> {
        let gpus = proptest::option::of(proptest::collection::btree_set(0..4_u8, 0..4));
        let gpus = gpus.prop_map(|gpus| gpus.map(|gpus| gpus.into_iter().map(|gpu| [gpu; 16]).collect()));
        (any::<u32>(), gpus).prop_map(|(channels, gpus)| Hello { channels, gpus })
    }

    fn any_place() -> impl Strategy<Value = Place> {
        let gpu = proptest::option::of(0..4_u8).prop_map(|gpu| Place::Gpu(gpu.map(|gpu| [gpu; 16])));
        prop_oneof![Just(Place::Host), gpu]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Any two ends agree on a channel that both have, or every channel has a reason. No GPU is lent to an end that does not have it.
        #[test]
        fn two_ends_agree_or_explain(
            ours in any_hello(),
            theirs in any_hello(),
            near in any::<bool>(),
            pair in (any_place(), any_place()),
        ) {
            let seen = |hello: &Hello| Hello::from_bytes(&hello.padded()).unwrap();
            let choice = choose(pair, near, &ours, &theirs);
            // What the other end computes from what it has heard.
            prop_assert_eq!(&choice, &choose(pair, near, &seen(&ours), &seen(&theirs)));
            match choice.channel {
                Some(channel) => {
                    prop_assert!(ours.has(channel) && theirs.has(channel));
                    prop_assert!(choice.rejected.iter().all(|(other, _)| *other < channel));
                }
                None => prop_assert_eq!(choice.rejected.len(), Channel::ALL.len() - 1),
            }
            if let (Some(Channel::GpuShare), Place::Gpu(Some(gpu)), Some(gpus)) = (choice.channel, pair.0, &theirs.gpus) {
                prop_assert!(gpus.contains(&gpu));
            }
            // People read the same of both ends, with the words turned round.
            let (here, there) = (explain(near, &ours, &theirs), explain(near, &theirs, &ours));
            let turned = |text: &str, word: &str| {
                let mut told = false;
                let lines = text.lines().filter(|line| {
                    told = if line.starts_with("    ") { told } else { line.starts_with(&format!("  {word},")) };
                    told
                });
                lines.map(|line| line.replace(&format!("  {word},"), "")).collect::<Vec<_>>()
            };
            prop_assert_eq!(turned(&here, "sent"), turned(&there, "received"));
            prop_assert_eq!(turned(&here, "received"), turned(&there, "sent"));
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            drop(Hello::from_bytes(&bytes));
        }
    }

    #[test]
    fn each_pair_has_its_channel() {
        use Channel::{GpuBasic, GpuShare, Ring, Share, Wire};
        use Place::Host;
        const GPU: Place = Place::ANY_GPU;
        let all = Hello::new(&Channel::ALL, None);
        let of = |pair, near| choose(pair, near, &all, &all).channel.unwrap();
        assert_eq!([of((Host, Host), true), of((Host, Host), false)], [Share, Wire]);
        assert_eq!([of((GPU, GPU), true), of((GPU, GPU), false)], [GpuShare, GpuBasic]);
        assert_eq!([of((GPU, Host), true), of((Host, GPU), true)], [GpuShare, GpuBasic]);
        // If one side lacks a channel, the next common one is taken.
        let few = Hello::new(&[Ring, Wire], Some(Vec::new()));
        assert_eq!(choose((Host, Host), true, &all, &few).channel, Some(Ring));
        assert_eq!(choose((Host, Host), false, &few, &all).channel, Some(Wire));
        // A reader without a GPU can open none of the sender's.
        let blind = Hello::new(&Channel::ALL, Some(Vec::new()));
        let choice = choose((GPU, Host), true, &all, &blind);
        assert_eq!(choice.channel, Some(GpuBasic));
        assert!(choice.rejected.contains(&(GpuShare, "the reader has no GPU")), "{choice:?}");
        assert_eq!(choose((Host, GPU), true, &blind, &all).channel, Some(GpuBasic));
        let text = explain(true, &all, &all);
        assert!(text.contains("sent, GPU to host: gpu_share; gpu_basic for what cannot be lent\n"), "{text}");
        let none = choose((GPU, Host), true, &all, &few);
        assert_eq!(none.channel, None);
        let text = explain(true, &all, &few);
        assert!(
            text.contains("sent, host to host: ring\n    not share: the reader does not have it"),
            "{text}"
        );
    }

    /// By their UUIDs: one that the reader has is lent to it, and another one is not.
    #[test]
    fn each_gpu_has_its_channel() {
        let [one, two] = [[1; 16], [2; 16]];
        let with = |gpus: &[[u8; 16]]| {
            Hello::new(&Channel::ALL, Some(gpus.iter().map(|uuid| DeviceId::Gpu(*uuid)).collect()))
        };
        let (both, first) = (with(&[one, two]), with(&[one]));
        let of = |gpu: [u8; 16]| choose((Place::Gpu(Some(gpu)), Place::Host), true, &both, &first);
        assert_eq!(of(one).channel, Some(Channel::GpuShare));
        assert_eq!(of(two).channel, Some(Channel::GpuBasic));
        assert!(of(two).rejected.contains(&(Channel::GpuShare, "the reader does not have that GPU")));
        // One that has not asked may have any.
        let any = Hello::new(&Channel::ALL, None);
        assert_eq!(
            choose((Place::Gpu(Some(two)), Place::Host), true, &both, &any).channel,
            Some(Channel::GpuShare)
        );
        let text = explain(true, &both, &first);
        let line =
            |gpu: [u8; 16], channel: &str| format!("  sent, {} to host: {channel}", DeviceId::Gpu(gpu));
        assert!(text.contains(&line(one, "gpu_share")) && text.contains(&line(two, "gpu_basic")), "{text}");
        assert!(text.contains("  received, GPU to host: gpu_share"), "{text}");
        // More than it names are as good as not known.
        let many: Vec<_> = (0..33).map(|number| [number; 16]).collect();
        assert_eq!(with(&many), any);
    }
}
