//! The kinds of operations, the paths that they take through memory, and why an operation did not take the direct
//! path.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// Declares an enum whose values have a code for shared memory and a name for people.
macro_rules! coded {
    ($(#[$doc:meta])* $name:ident { $($(#[$item:meta])* $variant:ident = $code:literal $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$item])* $variant,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Its name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }

            /// Its code in shared memory; never 0.
            pub const fn code(self) -> u8 {
                match self {
                    $(Self::$variant => $code,)*
                }
            }

            /// The one with a code.
            pub const fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

coded! {
    /// What an operation does.
    Kind {
        /// Every rank gets the reduction of all.
        AllReduce = 1 "all_reduce",
        /// One rank gets the reduction of all.
        Reduce = 2 "reduce",
        /// Every rank gets what one has.
        Broadcast = 3 "broadcast",
        /// Every rank gets what each has.
        AllGather = 4 "all_gather",
        /// One rank gets what each has.
        Gather = 5 "gather",
        /// Every rank gets its part of what one has.
        Scatter = 6 "scatter",
        /// Every rank gets its part of the reduction of all.
        ReduceScatter = 7 "reduce_scatter",
        /// Every rank gets from each the part meant for it.
        AllToAll = 8 "all_to_all",
        /// Nobody goes on before all have come.
        Barrier = 9 "barrier",
        /// Every rank learns how much it gets from each: the first half of an uneven all_to_all.
        #[doc(hidden)]
        Sizes = 10 "all_to_all (sizes)",
        /// Every rank learns how many keys each has: the first exchange of an all-reduce of sparse tensors.
        Keys = 13 "all_reduce_sparse",
        /// Every rank reaches the memory of all.
        Symmetric = 14 "symmetric",
        /// Every rank gets a descriptor of each.
        AllGatherFds = 15 "all_gather_fds",
        /// Every rank gets descriptors of one.
        BroadcastFds = 16 "broadcast_fds",
        /// One rank sends to another.
        Send = 11 "send",
        /// One rank receives from another.
        Recv = 12 "recv",
    }
}

coded! {
    /// The way that an operation takes through memory; see docs/algorithms.md.
    Path {
        /// The payload travels in the cache line of the flag.
        Inline = 1 "inline",
        /// Every rank puts its input into its slot, and the ranks that need it read it there.
        OneShot = 2 "one-shot",
        /// Through slots, in rounds. Reductions have two phases: each rank reduces a part, then all collect the
        /// parts.
        Staged = 3 "staged",
        /// Straight between the ranks' own memory. The memory comes from [`Group::alloc`](crate::Group::alloc).
        Direct = 4 "direct",
    }
}

coded! {
    /// Why a large operation does not go straight between the ranks' own memory.
    Detour {
        /// This rank's tensor lies in memory that others cannot map.
        Private = 1 "private memory",
        /// This rank's tensor has gaps, and is packed first.
        Gaps = 2 "gaps",
        /// What this rank gives or gets lies in several places.
        Scattered = 3 "several places",
        /// Another rank refused; its own record says why.
        Other = 4 "another rank",
        /// Of an all-reduce of sparse tensors: a dense one took its place.
        Dense = 5 "dense",
        /// Some ranks have their tensors on GPUs, and others on the host.
        Mixed = 6 "GPU and host",
        /// This rank's tensor lies in memory of a GPU that a rank which works for others cannot reach: it cannot be given to other
        /// processes, or not be mapped there, or their GPU does not reach it.
        Unshareable = 7 "memory that cannot be shared",
    }
}

impl Kind {
    /// Whether it only tells every rank some numbers of each.
    pub(crate) const fn tells_numbers(self) -> bool {
        matches!(self, Self::Sizes | Self::Keys | Self::Symmetric | Self::AllGatherFds | Self::BroadcastFds)
    }

    /// Whether one rank has another part in it than all others.
    pub(crate) const fn is_rooted(self) -> bool {
        matches!(self, Self::Reduce | Self::Broadcast | Self::Gather | Self::Scatter | Self::BroadcastFds)
    }

    /// Whether it carries descriptors; they have no type.
    pub(crate) const fn is_of_fds(self) -> bool {
        matches!(self, Self::AllGatherFds | Self::BroadcastFds)
    }
}

impl Detour {
    /// The reason as a sentence about the rank's own memory.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Private => "its tensor is not in memory of alloc() of a group or context",
            Self::Gaps => "its tensor has gaps, and is packed first",
            Self::Scattered => "its tensors lie in several places",
            Self::Other => "the tensor of another rank cannot be reached",
            Self::Dense => "with so many keys, a dense all_reduce moves fewer bytes",
            Self::Mixed => "some ranks have their tensors on GPUs, and others on the host",
            Self::Unshareable => "its tensor is in memory of a GPU that other ranks cannot reach",
        }
    }
}

impl FromStr for Path {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.iter().copied().find(|path| path.name() == text).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|path| path.name()).collect();
            Error::misuse(format!("there is no path {text:?}; there are {}", names.join(", ")))
        })
    }
}
