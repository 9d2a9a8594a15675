//! What the ranks of a control region do, read from its bytes. It trusts nothing in there, because other processes wrote
//! it. `tensorwire status` reads a region from outside in this way, and a rank reads its own when it has waited too long.

use super::control::{Control, Desk, FAR, Map, RECORDS};
use super::member::Member;
use super::process::Process;
use super::record::{self, Record, State};
use super::standing::QueuedOperation;
use super::traffic::{self, PipeEnd};

/// Memory that can be read and must not be trusted.
pub(crate) trait UntrustedMemory {
    /// Copies bytes out; gives whether they were there.
    fn read(&self, at: usize, into: &mut [u8]) -> bool;

    /// Bytes.
    fn len(&self) -> usize;
}

/// Memory that is here.
#[cfg(any(test, fuzzing))]
pub(crate) struct Bytes<'a>(pub(crate) &'a [u8]);

#[cfg(any(test, fuzzing))]
impl UntrustedMemory for Bytes<'_> {
    fn read(&self, at: usize, into: &mut [u8]) -> bool {
        let from = at.checked_add(into.len()).and_then(|end| self.0.get(at..end));
        from.map(|from| into.copy_from_slice(from)).is_some()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// One rank of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankReport {
    /// Its number in the group; none while it is still joining.
    pub rank: Option<usize>,
    /// The name of its host.
    pub host: String,
    /// Its pid as it sees itself.
    pub pid: u32,
    /// Its process.
    pub process: Process,
    /// What its host does.
    pub doing: Doing,
    /// Its operations that are queued and not over, the oldest first. Its host does not wait for them, but for one whose
    /// state is [`State::Met`]: that one its host puts on the queue, and it may have to wait in the place of the queue.
    pub queued: Vec<QueuedOperation>,
    /// Whom it waits for, by rank: its host in an operation, or its queue in one that is queued.
    pub waits_for: Vec<usize>,
    /// The operation of another group that it is in, in words; only if it is in none of this group.
    pub elsewhere: Option<String>,
    /// A command that shows where its process is. Only of a rank that computes or sleeps outside of tensorwire.
    pub stacks: Option<String>,
    /// Its last operations, the newest at the end.
    pub records: Vec<Record>,
    /// What goes through the pipe whose end it is, if the group is a pipe.
    pub pipe: Option<PipeEnd>,
    /// How far it is in the group's sequence: 2 k + 1 inside operation k, 2 k + 2 after it, counting around.
    pub(crate) position: u32,
}

/// What a rank does.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Doing {
    /// It has not joined yet.
    Joining,
    /// It is in these operations; the oldest is the first.
    In(Vec<Record>),
    /// It has come to a barrier that is not over; its number, or none while the group forms.
    Barrier(Option<u32>),
    /// It is in none.
    Idle,
    /// It has closed the group.
    Left,
}

impl RankReport {
    /// "rank 3 (host a, pid 812)".
    pub fn who(&self) -> String {
        match self.rank {
            Some(rank) => format!("rank {rank} (host {}, pid {})", self.host, self.pid),
            None => "a rank that is still joining".into(),
        }
    }

    /// The operation that it is in, else the oldest that is queued, else the one that it was in last.
    pub fn operation(&self) -> Option<&Record> {
        match (&self.doing, self.queued.first()) {
            (Doing::In(records), _) => records.first(),
            (Doing::Idle, Some(queued)) => Some(&queued.record),
            _ => self.records.last(),
        }
    }
}

impl UntrustedMemory for Control {
    fn read(&self, at: usize, into: &mut [u8]) -> bool {
        match record::read_quietly(self, at, into.len()) {
            Ok(bytes) => {
                into.copy_from_slice(&bytes);
                true
            }
            Err(_) => false,
        }
    }

    fn len(&self) -> usize {
        self.region().len()
    }
}

/// The rank at a place of this host, as the ranks of its group see it.
pub(crate) fn of_rank(control: &Control, members: &[Member], place: usize) -> RankReport {
    let (map, ranks) = (control.map(), control.ranks());
    let me = ranks.get(control.me()).and_then(|&rank| members.get(rank));
    let process = match (ranks.get(place).and_then(|&rank| members.get(rank)), me) {
        (Some(there), Some(me)) => there.process(me),
        _ => Process::Unknown,
    };
    read_rank(control, map, place, Card::read(control, map, place), &mut |_| process)
}

/// Reads what a rank does; `process` tells of a pid, as its owner sees it.
pub(crate) fn read_rank(
    memory: &dyn UntrustedMemory,
    map: Map,
    place: usize,
    card: Option<Card>,
    process: &mut dyn FnMut(u32) -> Process,
) -> RankReport {
    let mut ring = vec![0; RECORDS];
    let records = match memory.read(map.records(place), &mut ring) {
        true => record::parse(&ring),
        false => Vec::new(),
    };
    let position = word(memory, map.desk(place) + Desk::WHERE);
    let Some(card) = card else {
        let (rank, host, pid, process) = (None, String::new(), 0, Process::Unknown);
        let (doing, queued) = (Doing::Joining, Vec::new());
        let (waits_for, elsewhere, stacks, pipe) = (Vec::new(), None, None, None);
        return RankReport {
            rank,
            host,
            pid,
            process,
            doing,
            queued,
            waits_for,
            elsewhere,
            stacks,
            records,
            pipe,
            position,
        };
    };
    let running: Vec<_> = records
        .iter()
        .filter(|record| matches!(record.state, State::Running | State::Met))
        .cloned()
        .collect();
    let ahead = word(memory, map.arrive(place)).wrapping_sub(word(memory, map.release()));
    let doing = if word(memory, map.left(place)) != 0 {
        Doing::Left
    } else if !running.is_empty() {
        Doing::In(running)
    } else if (1..FAR / 2).contains(&ahead) {
        // The first one is a part of forming the group.
        Doing::Barrier(Some(word(memory, map.arrive(place)).wrapping_sub(1)).filter(|&count| count != 0))
    } else {
        Doing::Idle
    };
    RankReport {
        rank: Some(card.rank),
        host: card.host,
        pid: card.pid,
        process: process(card.pid),
        doing,
        queued: Vec::new(),
        waits_for: Vec::new(),
        elsewhere: None,
        stacks: None,
        records,
        pipe: traffic::read(memory, map, place),
        position,
    }
}

/// Who a rank is, as it wrote it to its desk.
pub(crate) struct Card {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) pid: u32,
    pub(crate) host: String,
    pub(crate) group: String,
}

impl Card {
    pub(crate) fn read(memory: &dyn UntrustedMemory, map: Map, place: usize) -> Option<Self> {
        let mut bytes = [0; Desk::CARD_LEN];
        if !memory.read(map.desk(place) + Desk::CARD, &mut bytes) {
            return None;
        }
        let text = text(&bytes);
        let mut lines = text.split('\n');
        let (rank, world, pid) = (lines.next()?, lines.next()?, lines.next()?);
        Some(Self {
            rank: rank.parse().ok()?,
            world: world.parse().ok()?,
            pid: pid.parse().ok()?,
            host: printable(lines.next()?),
            group: printable(lines.next()?),
        })
    }
}

/// The value of a flag.
pub(crate) fn word(memory: &dyn UntrustedMemory, at: usize) -> u32 {
    let mut bytes = [0; 4];
    if memory.read(at, &mut bytes) { u32::from_le_bytes(bytes) } else { 0 }
}

/// Text up to the first zero.
pub(crate) fn text(bytes: &[u8]) -> String {
    let len = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    printable(&String::from_utf8_lossy(&bytes[..len]))
}

/// Without what would play tricks on a terminal; lines stay lines.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect()
}
