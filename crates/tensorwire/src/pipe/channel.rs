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

/// What one end can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hello {
    /// The channels that it has, as bits.
    channels: u32,
    /// Whether it may have a GPU. Which ones it can open is not asked before there is a tensor for them: to ask is to start the driver.
    gpu: bool,
}

impl Hello {
    pub(super) fn new(channels: &[Channel], gpu: bool) -> Self {
        Self { channels: channels.iter().fold(0, |bits, channel| bits | channel.bit()), gpu }
    }

    /// Bytes that it travels in: room for what later releases add.
    pub(super) const PADDED: usize = 64;

    pub(super) fn padded(&self) -> [u8; Self::PADDED] {
        let mut padded = [0; Self::PADDED];
        self.to_bytes().into_iter().zip(&mut padded).for_each(|(byte, to)| *to = byte);
        padded
    }

    fn to_bytes(&self) -> Vec<u8> {
        Writer::new().u32(self.channels).u8(self.gpu.into()).finish()
    }

    /// What a later release adds behind it is passed over; channels that are not known here are not chosen.
    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader::new(bytes);
        let (channels, gpu) = (from.u32()?, from.u8()?);
        if gpu > 1 {
            return Err(bad("a hello that no pipe of ours sends"));
        }
        Ok(Self { channels, gpu: gpu == 1 })
    }

    /// Without a channel: for memory that it cannot carry.
    pub(super) fn without(&self, channel: Channel) -> Self {
        Self { channels: self.channels & !channel.bit(), ..self.clone() }
    }

    /// Whether it may have a GPU.
    pub(super) fn has_gpu(&self) -> bool {
        self.gpu
    }

    fn has(&self, channel: Channel) -> bool {
        self.channels & channel.bit() != 0
    }
}

/// What is chosen for tensors of one kind of device that come to another, and why the channels in front of it are not.
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
pub(super) fn choose((from, to): (Kind, Kind), near: bool, sender: &Hello, reader: &Hello) -> Choice {
    let mut rejected = Vec::new();
    for channel in Channel::ALL.into_iter().skip(1) {
        let on_gpu = from == Kind::Gpu || to == Kind::Gpu;
        let why = match channel {
            Channel::Share | Channel::Ring | Channel::Wire if on_gpu => Some(FOR_HOST),
            Channel::GpuShare if from == Kind::Host => Some(FOR_SENT),
            Channel::GpuBasic if !on_gpu => Some(FOR_GPU),
            Channel::Share | Channel::Ring | Channel::GpuShare if !near => {
                Some("the two are on different hosts")
            }
            Channel::Wire if near => Some("the two are on one host"),
            Channel::GpuShare if !reader.gpu => Some("the reader has no GPU"),
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

/// The choice for each two kinds of devices that the ends have, with what is chosen for memory that cannot be lent.
fn choices(
    near: bool,
    sender: &Hello,
    reader: &Hello,
) -> impl Iterator<Item = ((Kind, Kind), Choice, Option<Channel>)> {
    let kinds = |hello: &Hello| {
        let gpu = hello.gpu;
        Kind::ALL.into_iter().filter(move |kind| *kind == Kind::Host || gpu)
    };
    let to = kinds(reader);
    let pairs = kinds(sender).flat_map(move |from| to.clone().map(move |to| (from, to)));
    pairs.map(move |pair| {
        let choice = choose(pair, near, sender, reader);
        let lent = choice.channel.filter(|channel| channel.lends());
        let rest = lent.and_then(|lent| choose(pair, near, &sender.without(lent), reader).channel);
        (pair, choice, rest)
    })
}

/// All that may be chosen for what one end sends, in a line.
pub(super) fn names(near: bool, sender: &Hello, reader: &Hello) -> String {
    let all = choices(near, sender, reader);
    let mut all: Vec<_> = all.flat_map(|(_, choice, rest)| choice.channel.into_iter().chain(rest)).collect();
    all.sort_unstable();
    all.dedup();
    all.into_iter().map(Channel::name).collect::<Vec<_>>().join(", ")
}

/// The choice for each two kinds of devices that the ends have, as lines for people.
pub(super) fn explain(near: bool, ours: &Hello, theirs: &Hello) -> String {
    let mut text = String::new();
    for (words, sender, reader) in [("sent", ours, theirs), ("received", theirs, ours)] {
        for ((from, to), choice, rest) in choices(near, sender, reader) {
            let name = choice.channel.map_or("none", Channel::name);
            let rest = rest.map(|rest| format!("; {rest} for what cannot be lent")).unwrap_or_default();
            text.push_str(&format!("  {words}, {} to {}: {name}{rest}\n", from.name(), to.name()));
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

    fn any_hello() -> impl Strategy<Value = Hello> {
        (any::<u32>(), any::<bool>()).prop_map(|(channels, gpu)| Hello { channels, gpu })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Any two ends agree on a channel that both have, or every channel has a reason.
        #[test]
        fn two_ends_agree_or_explain(ours in any_hello(), theirs in any_hello(), near in any::<bool>(), from in 0..2_u8, to in 0..2_u8) {
            let pair = (Kind::from_byte(from).unwrap(), Kind::from_byte(to).unwrap());
            let seen = |hello: &Hello| Hello::from_bytes(&hello.to_bytes()).unwrap();
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
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..12)) {
            drop(Hello::from_bytes(&bytes));
        }
    }

    #[test]
    fn each_pair_has_its_channel() {
        use Channel::{GpuBasic, GpuShare, Ring, Share, Wire};
        use Kind::{Gpu, Host};
        let all = Hello::new(&Channel::ALL, true);
        let of = |pair, near| choose(pair, near, &all, &all).channel.unwrap();
        assert_eq!([of((Host, Host), true), of((Host, Host), false)], [Share, Wire]);
        assert_eq!([of((Gpu, Gpu), true), of((Gpu, Gpu), false)], [GpuShare, GpuBasic]);
        assert_eq!([of((Gpu, Host), true), of((Host, Gpu), true)], [GpuShare, GpuBasic]);
        // If one side lacks a channel, the next common one is taken.
        let few = Hello::new(&[Ring, Wire], false);
        assert_eq!(choose((Host, Host), true, &all, &few).channel, Some(Ring));
        assert_eq!(choose((Host, Host), false, &few, &all).channel, Some(Wire));
        // A reader without a GPU can open none of the sender's.
        let blind = Hello::new(&Channel::ALL, false);
        let choice = choose((Gpu, Host), true, &all, &blind);
        assert_eq!(choice.channel, Some(GpuBasic));
        assert!(choice.rejected.contains(&(GpuShare, "the reader has no GPU")), "{choice:?}");
        assert_eq!(choose((Host, Gpu), true, &blind, &all).channel, Some(GpuBasic));
        let text = explain(true, &all, &all);
        assert!(text.contains("sent, GPU to host: gpu_share; gpu_basic for what cannot be lent\n"), "{text}");
        let none = choose((Gpu, Host), true, &all, &few);
        assert_eq!(none.channel, None);
        let text = explain(true, &all, &few);
        assert!(
            text.contains("sent, host to host: ring\n    not share: the reader does not have it"),
            "{text}"
        );
    }
}
