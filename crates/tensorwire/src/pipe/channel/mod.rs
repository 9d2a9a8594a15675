//! By which channel a block of bytes goes: what each of them is for, and the choice that both ends make alike from what they can do.
//!
//! Each channel is a file here: what it is for, what the sender does with a block, and how the reader gets it.

mod basic;
mod gpu_basic;
mod gpu_share;
mod gpu_xth;
mod hello;
mod ring;
mod share;
mod wire;
mod xth;

use std::fmt;

use tensorwire_device::{Deadline, DeviceId, Span};

pub(in crate::pipe) use self::hello::Hello;
use super::descriptor::Body;
use super::lanes::Lanes;
use super::lent::Loaned;
use super::receive::Reading;
use super::send::Parcel;
use crate::error::{Error, Result};

/// A way for a tensor from one end of a pipe to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Channel {
    /// Beside the description of the message: what is small.
    Basic,
    /// Both ends are in one process: the reader gets the sender's memory, and copies it, or looks at it where it is.
    Xth,
    /// The same for memory of a GPU. Queues of the two wait for each other, and nobody on the host does.
    GpuXth,
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
    pub const ALL: [Self; 8] = [
        Self::Basic,
        Self::Xth,
        Self::GpuXth,
        Self::Share,
        Self::GpuShare,
        Self::Ring,
        Self::Wire,
        Self::GpuBasic,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Basic => "basic",
            Self::Xth => "xth",
            Self::GpuXth => "gpu_xth",
            Self::Share => "share",
            Self::GpuShare => "gpu_share",
            Self::Ring => "ring",
            Self::Wire => "wire",
            Self::GpuBasic => "gpu_basic",
        }
    }

    /// Whether the reader gets memory of the sender, and may look at it.
    pub(in crate::pipe) fn lends(self) -> bool {
        matches!(self, Self::Xth | Self::GpuXth | Self::Share | Self::GpuShare)
    }

    /// Whether there is memory of the right devices that cannot go by it.
    fn refuses_some(self) -> bool {
        matches!(self, Self::Share | Self::GpuShare)
    }

    /// What it is in a hello. Never changes.
    fn bit(self) -> u32 {
        1 << match self {
            Self::Basic => 0,
            Self::Share => 1,
            Self::GpuShare => 2,
            Self::Ring => 3,
            Self::Wire => 4,
            Self::GpuBasic => 5,
            Self::Xth => 6,
            Self::GpuXth => 7,
        }
    }
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where a tensor is, or comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::pipe) enum Kind {
    Host,
    Gpu,
}

impl Kind {
    pub(in crate::pipe) const ALL: [Self; 2] = [Self::Host, Self::Gpu];

    pub(in crate::pipe) fn to_byte(self) -> u8 {
        self as u8
    }

    pub(in crate::pipe) fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte)).copied()
    }

    pub(in crate::pipe) fn of(device: &DeviceId) -> Self {
        match device {
            DeviceId::Host => Self::Host,
            _ => Self::Gpu,
        }
    }

    pub(in crate::pipe) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Gpu => "GPU",
        }
    }
}

/// A device of an end: the host, or a GPU by its UUID, or any that the end has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::pipe) enum Place {
    Host,
    Gpu(Option<[u8; 16]>),
}

impl Place {
    pub(in crate::pipe) const ANY_GPU: Self = Self::Gpu(None);

    pub(in crate::pipe) fn of(device: &DeviceId) -> Self {
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

/// A block on its way from a device of one end to a device of the other.
pub(in crate::pipe) struct Pair<'a> {
    from: Place,
    to: Place,
    /// Whether the two ends share a host.
    near: bool,
    sender: &'a Hello,
    reader: &'a Hello,
}

impl Pair<'_> {
    fn of_host(&self) -> bool {
        self.from == Place::Host && self.to == Place::Host
    }
}

/// A channel: a file of its own for each.
pub(in crate::pipe) trait Way: Sync {
    fn channel(&self) -> Channel;

    /// Why blocks do not go by it from one device to another, if so. Both ends ask, and hear the same.
    fn viable(&self, pair: &Pair<'_>) -> std::result::Result<(), &'static str>;

    /// The sender's part: what is done with a block, and how its bytes come then.
    fn offer(&self, parcel: &mut Parcel, block: &mut Offer<'_>) -> Result<Offered>;

    /// The reader's part, where the block is memory of the sender: gets it.
    fn take(&self, _reading: &mut Reading, _token: &[u8], _by: Deadline) -> Result<Loaned> {
        Err(Error::bug("memory that is lent by a channel that does not lend"))
    }
}

/// A block that is to go.
pub(in crate::pipe) struct Offer<'a> {
    /// Its number in the message.
    pub(in crate::pipe) number: usize,
    pub(in crate::pipe) span: &'a Span,
    /// Whether it is a payload, of which nobody gets a view: it was copied when the message was made.
    pub(in crate::pipe) is_payload: bool,
    pub(in crate::pipe) lanes: &'a mut Lanes,
}

/// What a channel says of a block.
pub(in crate::pipe) enum Offered {
    /// It goes by it, and so come its bytes.
    Goes(Body),
    /// It is for other blocks: the next channel takes it, as the two ends have agreed.
    NotFor(&'static str),
    /// It should go by it and cannot.
    Cannot(String),
}

/// In the order in which they are chosen.
static WAYS: [&dyn Way; 8] = [
    &basic::Basic,
    &xth::Xth,
    &gpu_xth::GpuXth,
    &share::Share,
    &gpu_share::GpuShare,
    &ring::Ring,
    &wire::Wire,
    &gpu_basic::GpuBasic,
];

/// What is small goes beside the description: nobody asks for that, and no two ends agree on it.
pub(in crate::pipe) fn beside() -> &'static dyn Way {
    WAYS[0]
}

/// Those that are chosen.
fn ways() -> impl Iterator<Item = &'static dyn Way> {
    WAYS.into_iter().skip(1)
}

/// The file of a channel.
pub(in crate::pipe) fn way(channel: Channel) -> Result<&'static dyn Way> {
    WAYS.into_iter()
        .find(|way| way.channel() == channel)
        .ok_or_else(|| Error::bug("a channel without a file"))
}

/// What is chosen for tensors of one device that come to another, and why the channels in front of it are not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::pipe) struct Choice {
    pub(in crate::pipe) channel: Option<Channel>,
    pub(in crate::pipe) rejected: Vec<(Channel, &'static str)>,
}

const FOR_HOST: &str = "it is for memory of the host";
const FOR_GPU: &str = "it is for memory of a GPU";
const FOR_SENT: &str = "it is for memory of a GPU that is sent";
const FOR_ONE_PROCESS: &str = "the two are different processes";
const APART: &str = "the two are on different hosts";

/// Nothing if blocks go by a way, or why they do not.
fn rejected(way: &dyn Way, pair: &Pair<'_>) -> Option<&'static str> {
    way.viable(pair).err().or_else(|| match way.channel() {
        channel if !pair.sender.has(channel) => Some("the sender does not have it"),
        channel if !pair.reader.has(channel) => Some("the reader does not have it"),
        _ => None,
    })
}

/// All that a block may go by, the first first.
pub(in crate::pipe) fn viable<'a>(
    (from, to): (Place, Place),
    near: bool,
    sender: &'a Hello,
    reader: &'a Hello,
) -> impl Iterator<Item = &'static dyn Way> + 'a {
    let pair = Pair { from, to, near, sender, reader };
    ways().filter(move |way| rejected(*way, &pair).is_none())
}

/// Chooses for tensors that are too large to go beside the description. `near` says whether the two share a host. Both ends
/// choose alike: only what both have is used.
pub(in crate::pipe) fn choose(
    (from, to): (Place, Place),
    near: bool,
    sender: &Hello,
    reader: &Hello,
) -> Choice {
    let (pair, mut all) = (Pair { from, to, near, sender, reader }, Vec::new());
    for way in ways() {
        match rejected(way, &pair) {
            None => return Choice { channel: Some(way.channel()), rejected: all },
            Some(why) => all.push((way.channel(), why)),
        }
    }
    Choice { channel: None, rejected: all }
}

/// What is chosen for a pair of devices, and for memory of it that cannot be lent.
type Chosen = (Choice, Option<Channel>);

/// The choice for each two devices that the ends have. GPUs of a sender that are treated alike are one.
fn choices(near: bool, sender: &Hello, reader: &Hello) -> Vec<((Place, Place), Chosen)> {
    let any = |hello: &Hello| hello.has_gpu().then_some(Place::ANY_GPU);
    let chosen = |pair: (Place, Place)| {
        let choice = choose(pair, near, sender, reader);
        let lent = choice.channel.filter(|channel| channel.refuses_some());
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
pub(in crate::pipe) fn names(near: bool, sender: &Hello, reader: &Hello) -> String {
    let all = choices(near, sender, reader).into_iter();
    let mut all: Vec<_> =
        all.flat_map(|(_, (choice, rest))| choice.channel.into_iter().chain(rest)).collect();
    all.sort_unstable();
    all.dedup();
    all.into_iter().map(Channel::name).collect::<Vec<_>>().join(", ")
}

/// Reasons that everybody sees without being told.
const PLAIN: [&str; 4] = [FOR_HOST, FOR_GPU, FOR_SENT, FOR_ONE_PROCESS];

/// The choice for each two devices that the ends have, as lines for people.
pub(in crate::pipe) fn explain(near: bool, ours: &Hello, theirs: &Hello) -> String {
    let mut text = String::new();
    for (words, sender, reader) in [("sent", ours, theirs), ("received", theirs, ours)] {
        for ((from, to), (choice, rest)) in choices(near, sender, reader) {
            let name = choice.channel.map_or("none", Channel::name);
            let rest = rest.map(|rest| format!("; {rest} for what cannot be lent")).unwrap_or_default();
            text.push_str(&format!("  {words}, {from} to {to}: {name}{rest}\n"));
            let told = choice.rejected.iter().filter(|(_, why)| !PLAIN.contains(why));
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
        let process = proptest::option::of((1..3_u8).prop_map(|process| [process; 16]));
        let all = (any::<u32>(), gpus, process);
        all.prop_map(|(channels, gpus, process)| Hello { channels, gpus, process })
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
            if let Some(Channel::Xth | Channel::GpuXth) = choice.channel {
                prop_assert!(near && ours.process.is_some() && ours.process == theirs.process);
            }
            // What the sender tries is what they agree on, and each of it is what both have.
            let mut tried = viable(pair, near, &ours, &theirs).map(Way::channel);
            prop_assert_eq!(tried.next(), choice.channel);
            prop_assert!(tried.all(|channel| ours.has(channel) && theirs.has(channel)));
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

    /// An end in a process of its own.
    fn alone(channels: &[Channel], gpus: Option<Vec<DeviceId>>) -> Hello {
        Hello { process: None, ..Hello::new(channels, gpus) }
    }

    #[test]
    fn each_pair_has_its_channel() {
        use Channel::{GpuBasic, GpuShare, GpuXth, Ring, Share, Wire, Xth};
        use Place::Host;
        const GPU: Place = Place::ANY_GPU;
        let all = alone(&Channel::ALL, None);
        let of = |pair, near| choose(pair, near, &all, &all).channel.unwrap();
        assert_eq!([of((Host, Host), true), of((Host, Host), false)], [Share, Wire]);
        assert_eq!([of((GPU, GPU), true), of((GPU, GPU), false)], [GpuShare, GpuBasic]);
        assert_eq!([of((GPU, Host), true), of((Host, GPU), true)], [GpuShare, GpuBasic]);
        // If one side lacks a channel, the next common one is taken.
        let few = alone(&[Ring, Wire], Some(Vec::new()));
        assert_eq!(choose((Host, Host), true, &all, &few).channel, Some(Ring));
        assert_eq!(choose((Host, Host), false, &few, &all).channel, Some(Wire));
        // A reader without a GPU can open none of the sender's.
        let blind = alone(&Channel::ALL, Some(Vec::new()));
        let choice = choose((GPU, Host), true, &all, &blind);
        assert_eq!(choice.channel, Some(GpuBasic));
        assert!(choice.rejected.contains(&(GpuShare, "the reader has no GPU")), "{choice:?}");
        assert_eq!(choose((Host, GPU), true, &blind, &all).channel, Some(GpuBasic));
        let text = explain(true, &all, &all);
        assert!(text.contains("sent, GPU to host: gpu_share; gpu_basic for what cannot be lent\n"), "{text}");
        // Threads hand over what they have, and ends on different hosts do not, even if one lies.
        let here = Hello::new(&Channel::ALL, None);
        let of = |pair, near| choose(pair, near, &here, &here).channel.unwrap();
        assert_eq!(
            [of((Host, Host), true), of((GPU, Host), true), of((Host, GPU), true)],
            [Xth, GpuXth, GpuBasic]
        );
        assert_eq!([of((Host, Host), false), of((GPU, GPU), false)], [Wire, GpuBasic]);
        assert_eq!(choose((Host, Host), true, &here, &all).channel, Some(Share));
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
            alone(&Channel::ALL, Some(gpus.iter().map(|uuid| DeviceId::Gpu(*uuid)).collect()))
        };
        let (both, first) = (with(&[one, two]), with(&[one]));
        let of = |gpu: [u8; 16]| choose((Place::Gpu(Some(gpu)), Place::Host), true, &both, &first);
        assert_eq!(of(one).channel, Some(Channel::GpuShare));
        assert_eq!(of(two).channel, Some(Channel::GpuBasic));
        assert!(of(two).rejected.contains(&(Channel::GpuShare, "the reader does not have that GPU")));
        // One that has not asked may have any.
        let any = alone(&Channel::ALL, None);
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
