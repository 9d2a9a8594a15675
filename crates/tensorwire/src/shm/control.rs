//! The control region of a group on one host. It is one memfd. The leader makes it and hands it to every rank of
//! the host, and each rank maps it.
//!
//! # The layout
//!
//! The region consists of lines of 64 bytes. `n` is the number of ranks on this host. A rank's *place* is its index
//! among them. [`Map`] knows where everything is.
//!
//! | what | lines | who writes |
//! |---|---|---|
//! | head: magic, protocol, n | 1 | the leader |
//! | the abort word | 1 | anyone, once, by compare-and-swap |
//! | verdicts: who cancelled an operation, by its number modulo [`VERDICTS`] | 128 | anyone, by compare-and-swap |
//! | board: how far a rank's queue is in an operation, by number modulo [`VERDICTS`], see [`Board`] | 384 n | that rank's queue |
//! | `release`: how many barriers are over | 1 | the leader's process |
//! | `arrive`: how many barriers each rank has come to | n | that rank |
//! | `left`: 1 once the rank has closed the group | n | that rank |
//! | notes: why a rank aborted; the last one is for ranks of other hosts | 8 (n+1) | that rank; the leader for the last |
//! | shrinks: who decided, and how it ended, see `shrink` | 2 [`SHRINKS`] | anyone, by compare-and-swap |
//! | rolls: who goes on, as a rank that decides says it, see `shrink` | n (1 + n/512) | that rank |
//! | words: how each rank ended, as any other saw it, and what it said of that, see `shm::words` | 8 n | anyone; that rank |
//! | desks: a rank's flags, see [`Desk`] | 32 n | that rank |
//! | reasons: why a rank cancelled operations, by their numbers modulo [`VERDICTS`] | 1024 n | that rank |
//! | records: each rank's last operations, see `shm::record` | 2048 n | that rank |
//! | slots: each rank's staging memory, see `collective` | n [`SLOT`] | that rank |
//! | rings: messages between each two ranks, see `collective::p2p` | n n [`Map::ring_len`] | both |
//! | directory: where each rank of the world is reached from other hosts, at the end of the region | 4 for each | that rank; the leader for ranks of other hosts; whoever hears that one has left |
//!
//! Memory of the board, of reasons, records, slots, rings and the directory is only reserved until its writer commits it.
//!
//! What comes before `release` is what queues of devices use: they write the board, and kernels read the verdicts and the
//! abort word. Each process maps these pages a second time ([`Control::front`]), because a driver that is told of a word
//! takes all of the region that the word lies in.
//!
//! A note is written before the abort word and read after it, so it needs no lock. A rank that closes the group
//! sets `left` and then moves its `arrive` (the leader also `release`) far ahead. A rank that waits for it wakes
//! up, sees `left`, and knows why.

use std::ops::Range;
use std::sync::Arc;

use tensorwire_device::flag::{LINE, Writer};
use tensorwire_device::{Abort, Bell, Device, DeviceId, Flag, Region, Span};

use crate::error::{Error, PeerFaultKind, Result};
use crate::shm::decided::Decided;
use crate::shm::member::Member;
use crate::shm::mismatch;
use crate::shm::traffic::TRAFFIC;
use crate::shm::words::{self, Words};
use crate::wire::PROTOCOL;

/// How far ahead of anything a counter jumps when its rank leaves.
pub(crate) const FAR: u32 = 1 << 30;
const MAGIC: [u8; 8] = *b"twcontrl";
pub(crate) const NOTE: usize = 8 * LINE;

/// Bytes of a rank's last words, and of the line before them.
pub(crate) const WORDS: usize = 8 * LINE;

/// How many operations may be under way or cancelled while a rank has not come to the first of them.
pub(crate) const VERDICTS: usize = 128;
/// How often a group may be shrunk.
pub(crate) const SHRINKS: usize = 32;
/// Lines of a desk.
const DESK: usize = Desk::TRAFFIC + TRAFFIC;
/// Bytes of a rank's records.
pub(crate) const RECORDS: usize = 2048 * LINE;
/// Bytes of a rank's staging memory: two halves that take turns.
pub(crate) const SLOT: usize = 2 * HALF;
/// Bytes of one half of a slot.
pub(crate) const HALF: usize = 1 << 20;
const PAGE: usize = 4096;
/// Bytes of an entry of the directory: a line that says whether the rank has closed the group, and an address as text.
const ENTRY: usize = 4 * LINE;
/// The longest address of a rank.
pub(crate) const ADDRESS: usize = ENTRY - LINE - 1;

/// Where everything is in the control region of `n` ranks; pure, so that others can read a region too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Map {
    n: usize,
}

impl Map {
    pub(crate) fn new(n: usize) -> Self {
        Self { n }
    }

    /// Reads the head of a region: how many ranks it is for, if it is one of ours.
    pub(crate) fn of_head(head: &[u8; LINE]) -> Option<Self> {
        let word = |at: usize| head.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
        let ours = head.starts_with(&MAGIC) && word(8)? == PROTOCOL;
        let n = word(12)? as usize;
        (ours && n > 0).then_some(Self { n })
    }

    fn head(self) -> Vec<u8> {
        [&MAGIC[..], &PROTOCOL.to_le_bytes(), &(self.n as u32).to_le_bytes()].concat()
    }

    /// How many ranks.
    pub(crate) fn ranks(self) -> usize {
        self.n
    }

    pub(crate) fn abort(self) -> usize {
        LINE
    }

    pub(crate) fn verdict(self, number: u32) -> usize {
        2 * LINE + (number as usize % VERDICTS) * LINE
    }

    /// Where a rank's queue says how far it is in an operation: the first of its [`Board`] lines.
    pub(crate) fn board(self, place: usize, number: u32) -> usize {
        let index = number as usize % VERDICTS * self.n + place;
        self.words_of_hosts() + index * Board::LEN
    }

    /// All lines of the board.
    pub(crate) fn board_lines(self) -> Range<usize> {
        self.words_of_hosts()..self.release()
    }

    /// The end of what is not written by queues, behind the verdicts.
    fn words_of_hosts(self) -> usize {
        ((2 + VERDICTS) * LINE).next_multiple_of(PAGE)
    }

    pub(crate) fn release(self) -> usize {
        (self.words_of_hosts() + VERDICTS * self.n * Board::LEN).next_multiple_of(PAGE)
    }

    pub(crate) fn arrive(self, place: usize) -> usize {
        self.release() + (1 + place) * LINE
    }

    pub(crate) fn left(self, place: usize) -> usize {
        self.release() + (1 + self.n + place) * LINE
    }

    /// Of a rank of this host, or (n) of all others.
    pub(crate) fn note(self, place: usize) -> usize {
        self.release() + (1 + 2 * self.n) * LINE + place * NOTE
    }

    /// Of shrink number `attempt`, from 1: the line of the decision; that of the outcome follows.
    pub(crate) fn shrink(self, attempt: u32) -> usize {
        self.note(self.n + 1) + (attempt.wrapping_sub(1) as usize % SHRINKS) * 2 * LINE
    }

    pub(crate) fn roll(self, place: usize) -> usize {
        self.shrink(1) + 2 * SHRINKS * LINE + place * self.roll_len()
    }

    /// Bytes of a roll: a line, and a bit for each rank.
    pub(crate) fn roll_len(self) -> usize {
        LINE + self.n.div_ceil(8).next_multiple_of(LINE)
    }

    /// How a rank ended (a line), and its last words.
    pub(crate) fn words(self, place: usize) -> usize {
        self.roll(self.n) + place * WORDS
    }

    pub(crate) fn desk(self, place: usize) -> usize {
        self.words(self.n) + place * DESK
    }

    /// Why a rank cancelled an operation, or (n) why other hosts did. It is kept as long as the verdict.
    pub(crate) fn reason(self, place: usize, number: u32) -> usize {
        let index = place * VERDICTS + number as usize % VERDICTS;
        self.desk(self.n).next_multiple_of(PAGE) + index * NOTE
    }

    /// Bytes that are there from the start.
    fn flags(self) -> [Range<usize>; 2] {
        [0..self.words_of_hosts(), self.release()..self.desk(self.n)]
    }

    pub(crate) fn records(self, place: usize) -> usize {
        self.reason(self.n + 1, 0) + place * RECORDS
    }

    pub(crate) fn slot(self, place: usize) -> usize {
        self.records(self.n) + place * SLOT
    }

    pub(crate) fn ring(self, from: usize, to: usize) -> usize {
        self.slot(self.n) + (from * self.n + to) * self.ring_len()
    }

    /// Bytes of the ring between two ranks, in one direction: less where there are many.
    pub(crate) fn ring_len(self) -> usize {
        ((16 << 20) / self.n).clamp(16 << 10, 256 << 10) / PAGE * PAGE
    }

    /// Bytes of the whole region.
    pub(crate) fn len(self) -> usize {
        self.ring(self.n, 0)
    }
}

/// The lines of one rank's desk, as offsets in it; the rank is the only one who writes there, except for `BELL`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Desk;

impl Desk {
    /// Progress in operations, by their number modulo [`Self::STEPS`].
    pub(crate) const PROGRESS: usize = 0;
    pub(crate) const STEPS: usize = 4;
    /// 2 k + 1 inside operation k, 2 k + 2 after it.
    pub(crate) const WHERE: usize = 4 * LINE;
    /// In the same line: in which operation on GPUs this rank last said whether it reaches all memory (4 bytes above), and the
    /// first place whose memory it does not reach, and one, or zero (4 bytes). All read it before they signal in the next one.
    pub(crate) const TOLD: usize = 4 * LINE + 16;
    /// Rung by others: a message has come, or room for one.
    pub(crate) const BELL: usize = 5 * LINE;
    /// How many of this rank's regions that others may have mapped are gone.
    pub(crate) const RELEASED: usize = 6 * LINE;
    /// How far this rank has come in `shrink`.
    pub(crate) const SHRINK: usize = 7 * LINE;
    /// Who this rank is, as text: rank, world, pid, host, name of the group and its cores, each on a line.
    pub(crate) const CARD: usize = 8 * LINE;
    pub(crate) const CARD_LEN: usize = 8 * LINE;
    /// The GPUs that this rank has used in the group, by UUID, in the order of their first use.
    pub(crate) const GPUS: usize = 16 * LINE;
    /// How many they may be.
    pub(crate) const MOST_GPUS: usize = 4 * LINE / 16;
    /// Of an end of a pipe: what goes through it, see `shm::traffic`.
    pub(crate) const TRAFFIC: usize = 20 * LINE;
}

/// The lines of the board of one rank in one operation, as offsets. Each is set to the number of the operation, by its queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Board;

impl Board {
    /// The queue has come to the operation: what was queued before is done.
    pub(crate) const ARRIVED: usize = 0;
    /// The queue has done its part for all whom it works for.
    pub(crate) const DONE: usize = LINE;
    /// Beside the word that says so: when the last kernel of the rank ended, in nanoseconds of CLOCK_MONOTONIC; 0: none has said so.
    pub(crate) const STAMP: Range<usize> = 8..16;
    /// The queue touches no memory of others any more. This counts after a cancellation: who ends the
    /// wait of a queue sets what the queue waited for, in the place of its writer.
    pub(crate) const LEFT: usize = 2 * LINE;
    const LEN: usize = 3 * LINE;
}

/// Why a group has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    Died,
    Aborted,
    Left,
    Silent,
    Misbehaved,
    Mismatch,
    Stuck,
}

/// A cause and the rank it concerns, as an abort word holds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) cause: Cause,
    pub(crate) rank: usize,
}

impl Failure {
    pub(crate) fn to_code(self) -> u32 {
        let cause = match self.cause {
            Cause::Died => 1,
            Cause::Aborted => 2,
            Cause::Left => 3,
            Cause::Silent => 4,
            Cause::Misbehaved => 5,
            Cause::Mismatch => 6,
            Cause::Stuck => 7,
        };
        cause << 24 | (self.rank as u32 & 0xff_ffff)
    }

    pub(crate) fn from_code(code: u32) -> Self {
        let cause = match code >> 24 {
            1 => Cause::Died,
            3 => Cause::Left,
            4 => Cause::Silent,
            5 => Cause::Misbehaved,
            6 => Cause::Mismatch,
            7 => Cause::Stuck,
            _ => Cause::Aborted,
        };
        Self { cause, rank: (code & 0xff_ffff) as usize }
    }
}

/// Who cancelled an operation, and why, as its verdict holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) why: Why,
    pub(crate) place: usize,
}

/// Why an operation was cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// The time that its caller gave it was over.
    CallTimedOut,
    /// It had none of its own, and that of the group was over.
    GroupTimedOut,
    /// The rank could not do its part.
    Failed,
    /// It is a part of another operation, which had failed on the rank before.
    Before,
    /// The same, where time was over.
    LateBefore,
    /// A rank of another host could not do its part. The note names it.
    Far,
    /// Time was over on another host. The note says whose.
    FarLate,
}

impl Why {
    /// Whether it is a part of another operation, which had failed before.
    pub(crate) fn is_before(self) -> bool {
        matches!(self, Self::Before | Self::LateBefore)
    }

    /// Whether time was over in this operation.
    pub(crate) fn is_timeout(self) -> bool {
        matches!(self, Self::CallTimedOut | Self::GroupTimedOut)
    }

    /// Whose time-out it was, as the end of a sentence about it.
    pub(crate) fn whose(self) -> &'static str {
        match self {
            Self::GroupTimedOut => "is that of the group (its timeout, or TENSORWIRE_TIMEOUT)",
            _ => "was given with the call",
        }
    }

    /// The error, which says whose time-out it was, if it was one.
    pub(crate) fn tell(self, error: Error) -> Error {
        error.adding(&format!("the time-out {}", self.whose()))
    }
}

impl Verdict {
    const PLACE_BITS: u32 = 24;

    pub(crate) fn to_code(self) -> u32 {
        let why = match self.why {
            Why::CallTimedOut => 1,
            Why::Failed => 2,
            Why::GroupTimedOut => 3,
            Why::Before => 4,
            Why::LateBefore => 5,
            Why::Far => 6,
            Why::FarLate => 7,
        };
        why << Self::PLACE_BITS | self.place as u32
    }

    pub(crate) fn from_code(code: u32) -> Option<Self> {
        let why = match code >> Self::PLACE_BITS {
            1 => Why::CallTimedOut,
            2 => Why::Failed,
            3 => Why::GroupTimedOut,
            4 => Why::Before,
            5 => Why::LateBefore,
            6 => Why::Far,
            7 => Why::FarLate,
            _ => return None,
        };
        Some(Self { why, place: (code & ((1 << Self::PLACE_BITS) - 1)) as usize })
    }
}

/// The mapped control region.
#[derive(Debug)]
pub(crate) struct Control {
    region: Arc<dyn Region>,
    map: Map,
    /// Ranks of this host in order; the first is the leader.
    ranks: Vec<usize>,
    me: usize,
    world: usize,
    /// The pages that queues of devices use, mapped a second time.
    front: Arc<dyn Region>,
    pub(crate) abort: Abort,
    release: Flag,
    arrive: Vec<Flag>,
    left: Vec<Flag>,
    bells: Vec<Bell>,
    /// What hosts have decided; at leaders only.
    pub(crate) decided: Decided,
}

impl Control {
    /// New memory for the most ranks that may join, of so many in all; the leader makes it.
    pub(crate) fn alloc(host: &dyn Device, most: usize, world: usize) -> Result<Arc<dyn Region>> {
        let map = Map::new(most);
        let region = host.reserve(map.len() + (world * ENTRY).next_multiple_of(PAGE))?;
        map.flags().into_iter().try_for_each(|range| region.commit(range))?;
        region.write(0, &map.head())?;
        Ok(region)
    }

    /// Looks at the region as rank `rank` of `ranks`. It may have room for more.
    pub(crate) fn open(
        region: Arc<dyn Region>,
        ranks: Vec<usize>,
        (rank, world): (usize, usize),
    ) -> Result<Self> {
        let misfit = || {
            let text = "handed round a control region that is not as agreed";
            Error::peer(PeerFaultKind::Misbehaved, "the leader of this host", ranks.first().copied(), text)
        };
        let n = ranks.len();
        let map = Map::new(n);
        let mut head = [0; LINE];
        if region.len() < map.len() || region.read(0, &mut head).is_err() {
            return Err(misfit());
        }
        if Map::of_head(&head).is_none_or(|made_for| made_for.n < n) {
            return Err(misfit());
        }
        let me = ranks.iter().position(|&other| other == rank).ok_or_else(misfit)?;
        // The leader has handed the region round by now, and says how many took it.
        if me == 0 {
            region.write(0, &map.head())?;
        }
        let line = |at: usize| Span::new(region.clone(), at..at + LINE);
        let flag = |at: usize| Ok(Flag::new(&line(at)?, Writer::Host)?);
        let front = region.window(0..map.release())?;
        Ok(Self {
            abort: Abort::new(&Span::new(front.clone(), map.abort()..map.abort() + LINE)?)?,
            front,
            release: flag(map.release())?,
            arrive: (0..n).map(|place| flag(map.arrive(place))).collect::<Result<_>>()?,
            left: (0..n).map(|place| flag(map.left(place))).collect::<Result<_>>()?,
            bells: (0..n)
                .map(|place| Ok(Bell::new(&line(map.desk(place) + Desk::BELL)?)?))
                .collect::<Result<_>>()?,
            decided: Decided::default(),
            map,
            region,
            ranks,
            me,
            world,
        })
    }

    /// Where everything is.
    pub(crate) fn map(&self) -> Map {
        self.map
    }

    /// The memory itself.
    pub(crate) fn region(&self) -> &Arc<dyn Region> {
        &self.region
    }

    /// One of its lines.
    pub(crate) fn line(&self, at: usize) -> Result<Span> {
        Ok(Span::new(self.region.clone(), at..at + LINE)?)
    }

    /// One of the lines that queues of devices use.
    pub(crate) fn front_line(&self, at: usize) -> Result<Span> {
        Ok(Span::new(self.front.clone(), at..at + LINE)?)
    }

    /// One of its lines, as a flag.
    pub(crate) fn flag(&self, at: usize) -> Result<Flag> {
        Ok(Flag::new(&self.line(at)?, Writer::Host)?)
    }

    /// The number of a GPU in the list of those that this rank uses, where it is added if it is new. For one thread at a time.
    pub(crate) fn gpu_index(&self, gpu: &DeviceId) -> Result<u8> {
        let DeviceId::Gpu(uuid) = gpu else { return Err(Error::bug(format!("{gpu} among the GPUs"))) };
        for index in 0..Desk::MOST_GPUS {
            let known = self.gpu_at(self.me, index as u8)?;
            if known == *uuid {
                return Ok(index as u8);
            }
            if known == [0; 16] {
                self.region.write(self.map.desk(self.me) + Desk::GPUS + index * 16, uuid)?;
                return Ok(index as u8);
            }
        }
        Err(Error::Unsupported {
            what: format!("another GPU in a group ({gpu})"),
            need: format!("at most {} GPUs of a rank in a group", Desk::MOST_GPUS),
            have: "more".into(),
        })
    }

    /// The UUID of a GPU in a rank's list; zeros where there is none.
    pub(crate) fn gpu_at(&self, place: usize, index: u8) -> Result<[u8; 16]> {
        let mut uuid = [0; 16];
        let index = usize::from(index) % Desk::MOST_GPUS;
        self.region.read(self.map.desk(place) + Desk::GPUS + index * 16, &mut uuid)?;
        Ok(uuid)
    }

    /// This rank's place among those of this host.
    pub(crate) fn me(&self) -> usize {
        self.me
    }

    /// A line of what a rank has said of itself.
    pub(crate) fn card(&self, place: usize, line: usize) -> String {
        let mut bytes = [0; Desk::CARD_LEN];
        if self.region.read(self.map.desk(place) + Desk::CARD, &mut bytes).is_err() {
            return String::new();
        }
        String::from_utf8_lossy(&bytes).lines().nth(line).unwrap_or_default().to_owned()
    }

    /// Says who this rank is, for those who look from outside.
    pub(crate) fn introduce(&self, member: &Member, world: usize, group: &str) -> Result<()> {
        let (rank, pid, host) = (member.rank, member.pid, &member.host);
        // Names may be long; the rest must fit.
        let cores = super::cores::allowed();
        let group: String = group.chars().filter(|c| !c.is_control()).take(60).collect();
        let host: String = host.chars().filter(|c| !c.is_control()).take(40).collect();
        let mut card = format!("{rank}\n{world}\n{pid}\n{host}\n{group}\n{cores}\n").into_bytes();
        card.truncate(Desk::CARD_LEN);
        Ok(self.region.write(self.map.desk(self.me) + Desk::CARD, &card)?)
    }

    /// Ranks of this host.
    pub(crate) fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// Whether this rank leads its host.
    pub(crate) fn leads(&self) -> bool {
        self.me == 0
    }

    pub(crate) fn release(&self) -> &Flag {
        &self.release
    }

    /// Whether barrier `count` is over, also if the leader has left since: then the counter is far ahead of the last
    /// barrier that it ended.
    pub(crate) fn is_over(&self, count: u32) -> bool {
        let ahead = self.release.load().wrapping_sub(count) as i32;
        (0..FAR as i32 / 2).contains(&ahead) || ahead >= FAR as i32
    }

    pub(crate) fn arrive(&self) -> &[Flag] {
        &self.arrive
    }

    /// Comes to barrier number `count`.
    pub(crate) fn come(&self, count: u32) {
        self.arrive[self.me].signal(count);
    }

    /// The lowest rank of this host that has closed the group.
    pub(crate) fn who_left(&self) -> Option<usize> {
        let place = self.left.iter().position(|flag| flag.load() != 0)?;
        Some(self.ranks[place])
    }

    /// Says that this rank has closed the group.
    pub(crate) fn leave(&self) {
        self.left[self.me].signal(1);
        let mine = &self.arrive[self.me];
        mine.signal(mine.load().wrapping_add(FAR));
        if self.leads() {
            self.release.signal(self.release.load().wrapping_add(FAR));
        }
        self.bells.iter().for_each(Bell::ring);
    }

    /// Writes down where a rank is reached from other hosts: this rank, or, in the leader's process, one of another host.
    pub(crate) fn set_address(&self, rank: usize, address: &str) -> Result<()> {
        let Some(at) = self.entry(rank).filter(|_| address.len() <= ADDRESS) else {
            return Err(Error::Bug(format!("no room for the address {address:?} of rank {rank}")));
        };
        self.region.commit(at..at + ENTRY)?;
        let bytes = [&[address.len() as u8], address.as_bytes()].concat();
        Ok(self.region.write(at + LINE, &bytes)?)
    }

    /// Where a rank is reached from other hosts; empty if nobody has said so.
    pub(crate) fn address(&self, rank: usize) -> String {
        let mut bytes = [0; ENTRY - LINE];
        let read = self.entry(rank).map(|at| self.region.read(at + LINE, &mut bytes));
        match read {
            Some(Ok(())) => {
                String::from_utf8_lossy(&bytes[1..=usize::from(bytes[0]).min(ADDRESS)]).into_owned()
            }
            _ => String::new(),
        }
    }

    /// Says that a rank of another host has closed the group.
    pub(crate) fn far_left(&self, rank: usize) -> Result<()> {
        if let Some(at) = self.entry(rank) {
            self.region.commit(at..at + ENTRY)?;
            self.flag(at)?.store(1);
            self.bells.iter().for_each(Bell::ring);
        }
        Ok(())
    }

    /// Whether a rank of another host has closed a group that has not failed, as far as this host has heard.
    pub(crate) fn is_far_gone(&self, rank: usize) -> bool {
        let flag = self.entry(rank).and_then(|at| self.flag(at).ok());
        flag.is_some_and(|flag| flag.load() != 0) && !self.abort.is_set()
    }

    /// Where the entry of a rank is in the directory. That lies at the end, because the leader makes it before it is known how
    /// many ranks share the host.
    fn entry(&self, rank: usize) -> Option<usize> {
        let directory =
            self.region.len().checked_sub(self.world.checked_mul(ENTRY)?.next_multiple_of(PAGE))?;
        (rank < self.world && directory >= self.map.len()).then(|| directory + rank * ENTRY)
    }

    /// The verdict of an operation.
    pub(crate) fn verdict(&self, number: u32) -> Result<Abort> {
        Ok(Abort::new(&self.front_line(self.map.verdict(number))?)?.or(&self.abort))
    }

    /// How many ranks the group has.
    pub(crate) fn world(&self) -> usize {
        self.world
    }

    /// What a rank of this host sleeps on while it waits for messages, or for room to send some.
    pub(crate) fn bell(&self, place: usize) -> &Bell {
        &self.bells[place]
    }

    /// Whether the rank at a place has closed a group that has not failed. All ranks close a group that has failed.
    pub(crate) fn is_gone(&self, place: usize) -> bool {
        self.left[place].load() != 0 && !self.abort.is_set()
    }

    /// Whether a rank is one of this host.
    pub(crate) fn has_place(&self, rank: usize) -> bool {
        self.ranks.contains(&rank)
    }

    /// Whether the rank at a place has closed the group.
    pub(crate) fn has_closed(&self, place: usize) -> bool {
        self.left.get(place).is_some_and(|left| left.load() != 0)
    }

    /// Whether a rank of this host has closed the group.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        let place = self.ranks.iter().position(|&other| other == rank);
        place.is_some_and(|place| self.left[place].load() != 0)
    }

    /// Fails the group on this host, unless it has failed already. The note is for `Cause::Aborted`.
    pub(crate) fn fail(&self, failure: Failure, note: &str) {
        if !self.abort.is_set() {
            let slot = self.note_of(failure.rank);
            // Ranks of this host write their own note; the leader writes that of other hosts.
            let mine = slot == self.me || (slot == self.ranks.len() && self.leads());
            if mine && !note.is_empty() {
                self.write_note(slot, note);
            }
            self.abort.set(failure.to_code());
        }
    }

    /// Why the group has failed, if it has.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.abort.code().map(Failure::from_code)
    }

    /// The error that the failure of the group is to a rank of it, if it has failed.
    pub(crate) fn error(&self, members: &[Member], me: usize) -> Option<Error> {
        let failure = self.failure()?;
        let words = self.words_of(failure.rank);
        Some(error_of(failure, &self.note(failure), words.as_ref(), members, me))
    }

    /// The last words of a rank of this host.
    pub(crate) fn words_of(&self, rank: usize) -> Option<Words> {
        let place = self.ranks.iter().position(|&other| other == rank)?;
        Some(Words::read(self, self.map, place))
    }

    /// The note that belongs to a failure.
    pub(crate) fn note(&self, failure: Failure) -> String {
        self.note_at_place(self.note_of(failure.rank))
    }

    /// The note of one rank.
    pub(crate) fn note_at_place(&self, place: usize) -> String {
        if place > self.ranks.len() { String::new() } else { self.read_note(self.note_at(place)) }
    }

    /// Why the rank at a place cancelled an operation. It may have cancelled later ones since.
    pub(crate) fn reason(&self, place: usize, number: u32) -> String {
        let reason = match place <= self.ranks.len() {
            true => self.read_note(self.map.reason(place, number)),
            false => String::new(),
        };
        let own = reason.strip_prefix(&format!("{number} "));
        own.map_or_else(|| self.note_at_place(place), str::to_owned)
    }

    /// Writes down why this rank cancels an operation.
    pub(crate) fn write_reason(&self, number: u32, note: &str) {
        self.write_reason_of(self.me, number, note);
        self.write_note(self.me, note);
    }

    /// Writes down why an operation was cancelled by other hosts; in the leader's process.
    pub(crate) fn write_far_reason(&self, number: u32, note: &str) {
        self.write_reason_of(self.ranks.len(), number, note);
    }

    fn write_reason_of(&self, place: usize, number: u32, note: &str) {
        let at = self.map.reason(place, number);
        match self.region.commit(at..at + NOTE) {
            Ok(()) => self.write_note_at(at, &format!("{number} {note}")),
            Err(error) => tracing::warn!("writing the reason of an abort: {error}"),
        }
    }

    fn read_note(&self, at: usize) -> String {
        let mut bytes = [0; NOTE];
        if self.region.read(at, &mut bytes).is_err() {
            return String::new();
        }
        let len = bytes.iter().position(|&byte| byte == 0).unwrap_or(NOTE);
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    }

    fn note_of(&self, rank: usize) -> usize {
        self.ranks.iter().position(|&other| other == rank).unwrap_or(self.ranks.len())
    }

    fn note_at(&self, slot: usize) -> usize {
        self.map.note(slot)
    }

    pub(crate) fn write_note(&self, slot: usize, note: &str) {
        self.write_note_at(self.note_at(slot), note);
    }

    fn write_note_at(&self, at: usize, note: &str) {
        let mut bytes = note.as_bytes().to_vec();
        bytes.truncate(NOTE - 1);
        bytes.push(0);
        if let Err(error) = self.region.write(at, &bytes) {
            tracing::warn!("writing the reason of an abort: {error}");
        }
    }
}

/// What a rank writes down for the others: a sentence, and the ranks that it is about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Note {
    pub(crate) ranks: Vec<usize>,
    pub(crate) text: String,
}

impl Note {
    /// As it stands in the region: "@0-3,7 text", or the text alone. Ranks that leave too little room for the text are left
    /// out.
    pub(crate) fn write(ranks: &[usize], text: &str) -> String {
        let mut list = String::new();
        let mut rest = ranks;
        while let [first, ..] = rest {
            let run = (0..rest.len()).take_while(|&step| Some(rest[step]) == first.checked_add(step)).count();
            let last = first + (run - 1);
            let next = if run > 1 { format!("{first}-{last},") } else { format!("{first},") };
            if list.len() + next.len() > NOTE / 4 {
                break;
            }
            list += &next;
            rest = &rest[run..];
        }
        if list.is_empty() { text.to_owned() } else { format!("@{} {text}", list.trim_end_matches(',')) }
    }

    /// Takes any text.
    pub(crate) fn read(note: &str) -> Self {
        let parts = note.strip_prefix('@').and_then(|rest| rest.split_once(' '));
        let parsed = parts.and_then(|(ranks, text)| {
            let mut all = Vec::new();
            for run in ranks.split(',') {
                let (first, last) = run.split_once('-').unwrap_or((run, run));
                let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
                // More than there can be: it is a text that only looks like ranks.
                if last < first || last >= MOST_RANKS || all.len() + (last - first) >= MOST_NAMED {
                    return None;
                }
                all.extend(first..=last);
            }
            Some(Self { ranks: all, text: text.to_owned() })
        });
        parsed.unwrap_or_else(|| Self { ranks: Vec::new(), text: note.to_owned() })
    }

    /// As the others will read it: every rank gets the same.
    pub(crate) fn as_read(&self) -> Self {
        Self::read(&Self::write(&self.ranks, &self.text))
    }
}

/// As many as an abort word can name.
const MOST_RANKS: usize = 1 << 24;
/// More ranks than a note of ours has, though its bytes may say so.
const MOST_NAMED: usize = 1 << 16;

/// The error that a failure means to a rank of the group.
pub(crate) fn error_of(
    failure: Failure,
    note: &str,
    words: Option<&Words>,
    members: &[Member],
    me: usize,
) -> Error {
    let rank = failure.rank;
    let who = members.get(rank).map_or_else(|| format!("rank {rank}"), ToString::to_string);
    match failure.cause {
        Cause::Died => match words {
            Some(words) => words.died(who, rank, me),
            None => words::told(PeerFaultKind::Died, who, rank, note, "its process has ended"),
        },
        Cause::Silent => {
            let text =
                "nothing has been heard of its host; the host, its network or all of its ranks are gone";
            Error::peer(PeerFaultKind::Died, who, Some(rank), text)
        }
        Cause::Misbehaved => {
            let text = "it sent bytes that are not as agreed";
            Error::peer(PeerFaultKind::Misbehaved, who, Some(rank), text)
        }
        Cause::Left => {
            let closed = "it has closed the group, and this operation needs all ranks";
            match words {
                Some(words) => words.left(who, rank, me, closed),
                None => words::told(PeerFaultKind::Left, who, rank, note, closed),
            }
        }
        Cause::Mismatch => mismatch::error(note, members),
        Cause::Stuck => {
            let text = "it does not leave an operation that was cancelled (is it stopped?); the group is broken, and \
                        shrink() makes a new one without it";
            Error::peer(PeerFaultKind::Stuck, who, Some(rank), text)
        }
        Cause::Aborted => {
            let by = if rank == me { "this rank".to_owned() } else { who };
            let why = if note.is_empty() { String::new() } else { format!(": {note}") };
            Error::Aborted(format!("{by} called abort(){why}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_come_back() {
        for (ranks, text) in
            [(vec![], "plain"), (vec![0], "one"), (vec![3, 12, 7], "several, with @ and spaces")]
        {
            let note = Note::read(&Note::write(&ranks, text));
            assert_eq!(note, Note { ranks, text: text.into() });
        }
        for text in ["@", "@1", "@x y", "@1,,2 z", "@2-1 z", "@0-99999999999 z", "@0-9999999,0-9999999 z", ""]
        {
            assert_eq!(Note::read(text), Note { ranks: vec![], text: text.into() });
        }
    }
}
