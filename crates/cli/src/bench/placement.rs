//! A run on several hosts: which rank is where, who sends to whom, and what is refused. These hosts are labels: all ranks are on
//! this machine, and those of different labels talk over TCP on loopback.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use super::Chosen;
use super::op::Op;
use super::order::TensorMemory;
use super::peers::Peer;
use crate::exit::Failure;

/// How many ranks there are, in blocks on how many hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hosts {
    pub(super) ranks: u32,
    pub(super) hosts: u32,
}

impl Hosts {
    /// All ranks on this host.
    pub(super) fn one(ranks: u32) -> Self {
        Self { ranks, hosts: 1 }
    }

    pub(super) fn are_many(self) -> bool {
        self.hosts > 1
    }

    /// What makes a rank one of its host; nothing where there is only this one.
    pub(super) fn variable(self, rank: u32) -> Option<(&'static str, String)> {
        self.are_many().then(|| ("TENSORWIRE_HOST", format!("bench-{}", self.host_of(rank))))
    }

    /// Blocks differ by one rank at most.
    fn host_of(self, rank: u32) -> u64 {
        u64::from(rank) * u64::from(self.hosts) / u64::from(self.ranks)
    }

    /// What a rank does in send-recv. On one host, even ranks send to the next one. On several, ranks of the lower half send to the
    /// upper half, so that each message goes to another host. In an odd world one rank has nobody.
    pub(super) fn turn(self, rank: u32) -> Turn {
        let away = if self.are_many() { self.ranks.div_ceil(2) } else { 1 };
        let sends = if self.are_many() { rank < self.ranks / 2 } else { rank.is_multiple_of(2) };
        match (sends, rank.checked_sub(away)) {
            (true, _) if rank + away < self.ranks => Turn::Send(rank + away),
            (false, Some(from)) => Turn::Recv(from),
            _ => Turn::Rest,
        }
    }

    /// The ranks in words.
    pub(super) fn title(self) -> String {
        let Self { ranks, hosts } = self;
        if self.are_many() { format!("{ranks} ranks on {hosts} hosts") } else { format!("{ranks} ranks") }
    }

    /// `--explain`.
    pub(super) fn explain(self) -> String {
        let mut text = format!("{}:\n\n", self.title());
        for host in 0..u64::from(self.hosts) {
            let on_host = |rank: &u32| self.host_of(*rank) == host;
            let (first, last) = ((0..self.ranks).find(on_host), (0..self.ranks).rfind(on_host));
            match (first, last) {
                (Some(first), Some(last)) if first < last => {
                    text += &format!("host {host}: ranks {first} to {last}\n");
                }
                (first, _) => text += &format!("host {host}: rank {}\n", first.unwrap_or(0)),
            }
        }
        text + BETWEEN_HOSTS
    }

    /// `--explain --json`.
    pub(super) fn lines(self) -> impl Iterator<Item = WayLine> {
        (0..self.ranks).filter_map(move |from| match self.turn(from) {
            Turn::Send(to) => Some(WayLine {
                op: Op::SendRecv.name(),
                ranks: self.ranks,
                hosts: self.hosts,
                from,
                to,
                hosts_of_both: [self.host_of(from), self.host_of(to)],
                way: "tcp",
            }),
            _ => None,
        })
    }
}

const BETWEEN_HOSTS: &str = "
Bytes for another host go over TCP at every size: from the tensor to the
socket, and from the socket to the tensor, with no copy between. With a key
(TENSORWIRE_KEY) they are sealed, which takes a copy on each side. Here the
hosts are labels on one machine, so the connections are on loopback.
In send-recv ranks of the lower half send to the upper half: each message
goes to another host. Each rank has one connection to each rank that it sends
to. Between ranks of one host, a message goes through a ring in shared memory.
In a collective the ranks of each host bring to its first rank what other hosts
need. The first ranks of all hosts exchange it, and give their hosts the result.
Where a host has one rank, there is only the exchange.";

/// A message between hosts, as `--explain --json` prints it.
#[derive(Debug, Serialize)]
pub(super) struct WayLine {
    op: &'static str,
    ranks: u32,
    hosts: u32,
    from: u32,
    to: u32,
    hosts_of_both: [u64; 2],
    way: &'static str,
}

/// What a rank does in send-recv.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    Send(u32),
    Recv(u32),
    Rest,
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Send(to) => write!(f, "send:{to}"),
            Self::Recv(from) => write!(f, "recv:{from}"),
            Self::Rest => f.write_str("rest"),
        }
    }
}

impl FromStr for Turn {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rank = |text: &str| text.parse().map_err(|_| format!("{text:?} is no rank"));
        match text.split_once(':') {
            Some(("send", to)) => rank(to).map(Self::Send),
            Some(("recv", from)) => rank(from).map(Self::Recv),
            _ => Ok(Self::Rest),
        }
    }
}

/// Refuses what cannot be measured between hosts.
pub(super) fn check(chosen: &Chosen, hosts: Hosts) -> Result<(), Failure> {
    let against = |peer| chosen.against.contains(&peer);
    if !hosts.are_many() {
        if chosen.link.is_some() {
            return Err(Failure::usage("--link is for messages between hosts: add --hosts 2"));
        }
        let far = [Peer::Socket, Peer::Ucx, Peer::Sealed].into_iter().find(|peer| against(*peer));
        return far.map_or(Ok(()), |peer| {
            let name = peer.name();
            Err(Failure::usage(format!("--against {name} is for messages between hosts: add --hosts 2")))
        });
    }
    let why = match chosen {
        _ if hosts.hosts > hosts.ranks => {
            format!("-n {}: each host needs a rank", hosts.ranks)
        }
        Chosen { device, .. } if device.is_gpu() => {
            format!("--device {device}: messages and collectives of GPUs are not measured yet")
        }
        Chosen { memory: TensorMemory::Shared, .. } => {
            "--memory shared: other hosts do not reach memory of the group".into()
        }
        Chosen { path: Some(_), .. } => "--path: what goes between hosts has one path".into(),
        Chosen { sparse: Some(_), .. } => "--sparse: sparse tensors are reduced on one host".into(),
        Chosen { against, .. } if against.iter().any(|peer| peer.is_mpi()) => {
            "libraries of MPI: they know no labels and would send through shared memory".into()
        }
        _ => return Ok(()),
    };
    Err(Failure::usage(format!("--hosts {} cannot be used with {why}", hosts.hosts)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_sends_and_who_receives_agree() {
        for (ranks, hosts) in [(2, 1), (3, 1), (8, 1), (2, 2), (3, 2), (4, 2), (5, 2), (5, 4), (7, 3), (8, 8)]
        {
            let layout = Hosts { ranks, hosts };
            let mut pairs = 0;
            for rank in 0..ranks {
                assert_eq!(layout.turn(rank).to_string().parse(), Ok(layout.turn(rank)));
                match layout.turn(rank) {
                    Turn::Send(to) => assert_eq!(layout.turn(to), Turn::Recv(rank), "{layout:?}"),
                    Turn::Recv(from) => {
                        assert_eq!(layout.turn(from), Turn::Send(rank), "{layout:?}");
                        assert_eq!(layout.host_of(from) != layout.host_of(rank), hosts > 1, "{layout:?}");
                        pairs += 1;
                    }
                    Turn::Rest => {}
                }
            }
            assert_eq!(pairs, ranks / 2, "{layout:?}");
        }
    }

    #[test]
    fn blocks_differ_by_one_rank_at_most() {
        let blocks = |ranks, hosts| -> Vec<u64> {
            (0..ranks).map(|rank| Hosts { ranks, hosts }.host_of(rank)).collect()
        };
        assert_eq!(blocks(4, 2), [0, 0, 1, 1]);
        assert_eq!(blocks(5, 2), [0, 0, 0, 1, 1]);
        assert_eq!(blocks(5, 3), [0, 0, 1, 1, 2]);
    }
}
