//! The flight recorder. It keeps the last operations of each rank in the group's control region. The other ranks
//! and `tensorwire status` can read them there while this rank is stuck.
//!
//! A ring of [`LENGTH`] records of one line each. Little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | serial: 1 for the first record of this rank; decides the place in the ring |
//! | 8..16 | number of the operation, counted by its kind's own rules |
//! | 16..24 | bytes |
//! | 24..32 | of a message: its tag; of others: when it was queued, see below |
//! | 32..40 | when it began: nanoseconds of CLOCK_MONOTONIC |
//! | 40..44 | root or peer; all ones: none |
//! | 44..48 | kind, dtype, reduce op, nothing; 0: none |
//! | 48..56 | a check over all of the above, but not over times |
//! | 56..64 | what changes: state (3 bits), path (3 bits; 0: none), the serial's lap (10 bits), why it does not go straight between tensors (3 bits; 0: it does, or is too small), nanoseconds that it took (45 bits) |
//!
//! Collectives have no tag. In its place those that are queued have their times ([`Times`]): the serial's lap (10 bits),
//! which words of the board the rank's queue sets (2 bits), and when all ranks had met and when the steps were queued,
//! since the beginning (26 bits each; 0: not yet). A time is a number of 21 bits and how far it is shifted to the left (5
//! bits): up to 2 ms to a nanosecond, longer ones to a millionth.
//!
//! `begin` writes a line. `via`, `not_direct` and `end` write only its last word, `met` and `queued` also the times. A
//! reader in another process may see a line that is half written. Then the check or the lap does not fit, and the reader
//! takes the record, or its times, as absent.

use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use tensorwire_device::clock::monotonic as now;
use tensorwire_device::flag::LINE;
use tensorwire_device::sync::{AtomicU64, Ordering};
use tensorwire_device::{Dtype, ReduceOp};

use crate::error::{Error, Result};
use crate::shm::control::{Control, RECORDS};
use crate::shm::kind::{Detour, Kind, Path};

/// How many operations are remembered.
pub(crate) const LENGTH: usize = RECORDS / LINE;

/// What is known of an operation when it begins.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    /// Which one of its kind of counting: collectives together, messages by themselves.
    pub(crate) number: u64,
    pub(crate) kind: Kind,
    pub(crate) dtype: Option<Dtype>,
    pub(crate) op: Option<ReduceOp>,
    pub(crate) root_or_peer: Option<usize>,
    pub(crate) tag: u64,
    pub(crate) bytes: u64,
    /// Where it is known already; see [`Recorder::via`].
    pub(crate) path: Option<Path>,
    /// As [`now`] gives it.
    pub(crate) now: u64,
}

/// How an operation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// It has begun and not ended.
    Running,
    /// It ended well.
    Done,
    /// It ended with an error.
    Failed,
    /// Its deadline passed on this rank.
    TimedOut,
    /// Another rank cancelled it, or this rank withdrew it.
    Cancelled,
    /// All ranks have come, and its steps are being put on a device's queue.
    Met,
    /// Its steps are on a device's queue, and it is not over.
    Queued,
}

impl State {
    /// Its name, for people and programs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::TimedOut => "timed out",
            Self::Cancelled => "cancelled",
            Self::Met => "met",
            Self::Queued => "queued",
        }
    }

    /// Whether it has ended, well or not.
    pub const fn is_over(self) -> bool {
        !matches!(self, Self::Running | Self::Met | Self::Queued)
    }

    fn from_code(code: u64) -> Option<Self> {
        let all = [
            Self::Running,
            Self::Done,
            Self::Failed,
            Self::TimedOut,
            Self::Cancelled,
            Self::Met,
            Self::Queued,
        ];
        all.get(code as usize).copied()
    }
}

/// A record as it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// Which record of its rank, from 1.
    pub serial: u64,
    /// Which collective of the group, or which message of the rank.
    pub number: u64,
    /// What is done.
    pub kind: Kind,
    /// The type of the elements.
    pub dtype: Option<Dtype>,
    /// The name of the reduction.
    pub op: Option<&'static str>,
    /// The root of a collective, or the rank at the other end of a message.
    pub peer: Option<usize>,
    /// The tag of a message; 0 of others.
    pub tag: u64,
    /// Bytes of this rank's tensors.
    pub bytes: u64,
    /// The path that was taken.
    pub path: Option<Path>,
    /// Why the operation did not take the direct path, if it was large enough for that.
    pub detour: Option<Detour>,
    /// How it stands.
    pub state: State,
    /// When it began, in nanoseconds of CLOCK_MONOTONIC.
    pub begun: u64,
    /// Of an operation that is queued: when all ranks had come to it, since it began.
    pub met: Option<Duration>,
    /// When its steps were on a device's queue, since it began.
    pub queued: Option<Duration>,
    /// How long it took, if it is over. Of a queued one: until the last kernel of those who worked ended, by their GPUs' clocks;
    /// until the host saw the end where no kernel has said so.
    pub took: Option<Duration>,
    /// What the rank's queue says on the board, once all ranks have met.
    pub(crate) says: Option<Says>,
}

/// Which words of the board a rank's queue sets in an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Says {
    pub(crate) arrived: bool,
    pub(crate) done: bool,
}

impl Record {
    /// Whether it is a message between two ranks, and not an operation of all.
    pub fn is_message(&self) -> bool {
        is_message(self.kind)
    }

    /// Kind and number, as in "all_reduce #42".
    pub fn title(&self) -> String {
        format!("{} #{}", self.kind, self.number)
    }

    /// How many elements its tensors have, if the type is known.
    pub fn elements(&self) -> Option<u64> {
        self.bytes.checked_div(self.dtype?.size() as u64)
    }

    /// When the host went on, by the clock of `begun`: it ended, or is queued.
    pub(crate) fn left_at(&self) -> Option<u64> {
        let queued = self.queued.filter(|_| self.state == State::Queued);
        self.took.or(queued).map(|time| self.begun.saturating_add(nanos(time)))
    }

    /// When it ended, by the clock of `begun`.
    pub fn ended(&self) -> Option<u64> {
        self.took.map(|took| self.begun.saturating_add(nanos(took)))
    }
}

/// Writes the records of this rank.
#[derive(Debug)]
pub(crate) struct Recorder {
    control: Arc<Control>,
    at: usize,
    last: AtomicU64,
    /// The same moment by both clocks.
    origin: (Instant, u64),
}

/// A record that has begun.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Begun {
    serial: u64,
    at: u64,
    path: Option<Path>,
    detour: Option<Detour>,
    times: Times,
}

/// When an operation met and was queued, in nanoseconds since it began; 0: not yet.
#[derive(Debug, Clone, Copy, Default)]
struct Times {
    met: u64,
    queued: u64,
    says: Option<Says>,
}

impl Times {
    fn to_word(self, serial: u64) -> u64 {
        let Some(Says { arrived, done }) = self.says else { return 0 };
        lap(serial)
            | u64::from(arrived) << 10
            | u64::from(done) << 11
            | short(self.met) << 12
            | short(self.queued) << 38
    }

    /// Nothing from a word that belongs to another record.
    fn from_word(word: u64, serial: u64) -> Self {
        let met = long(word >> 12 & SHORT);
        if met == 0 || word & LAP != lap(serial) {
            return Self::default();
        }
        let says = Says { arrived: word >> 10 & 1 != 0, done: word >> 11 & 1 != 0 };
        Self { met, queued: long(word >> 38 & SHORT), says: Some(says) }
    }
}

/// A number in 26 bits: 21 of it, and how far they are shifted.
fn short(number: u64) -> u64 {
    let shift = (u64::BITS - number.leading_zeros()).saturating_sub(21);
    if shift > 31 { SHORT } else { u64::from(shift) << 21 | number >> shift }
}

fn long(short: u64) -> u64 {
    (short & ((1 << 21) - 1)) << (short >> 21 & 31)
}

impl Recorder {
    /// Takes the memory for this rank's records.
    pub(crate) fn new(control: &Arc<Control>) -> Result<Self> {
        let at = control.map().records(control.me());
        control.region().commit(at..at + RECORDS)?;
        Ok(Self { control: control.clone(), at, last: AtomicU64::new(0), origin: (Instant::now(), now()) })
    }

    /// A moment as [`now`] would have given it.
    pub(crate) fn nanos(&self, at: Instant) -> u64 {
        let (instant, nanos) = self.origin;
        let since = at.saturating_duration_since(instant);
        nanos
            .wrapping_add(since.as_secs().wrapping_mul(1_000_000_000))
            .wrapping_add(since.subsec_nanos().into())
    }

    /// Records that an operation begins. Any thread may call it.
    pub(crate) fn begin(&self, entry: Entry) -> Begun {
        let serial = self.last.fetch_add(1, Ordering::Relaxed).wrapping_add(1).max(1);
        self.write(self.place(serial), &encode(serial, &entry));
        Begun { serial, at: entry.now, path: entry.path, detour: None, times: Times::default() }
    }

    /// Records which path it takes.
    pub(crate) fn via(&self, begun: &mut Begun, path: Path) {
        begun.path = Some(path);
        self.change(begun, State::Running, 0);
    }

    /// Records why it does not take the direct path.
    pub(crate) fn not_direct(&self, begun: &mut Begun, detour: Detour) {
        begun.detour = Some(detour);
        self.change(begun, State::Running, 0);
    }

    /// Records that all ranks have come to an operation that is queued now, and what this rank's queue will say on the
    /// board; `now` as [`now`] gives it.
    pub(crate) fn met(&self, begun: &mut Begun, says: Says, now: u64) {
        begun.times.says = Some(says);
        begun.times.met = now.saturating_sub(begun.at).max(1);
        self.change_with_times(begun, State::Met);
    }

    /// Records that it is queued.
    pub(crate) fn queued(&self, begun: &mut Begun, now: u64) {
        begun.times.queued = now.saturating_sub(begun.at).max(1);
        self.change_with_times(begun, State::Queued);
    }

    /// Records how it ended; `now` as [`now`] gives it.
    pub(crate) fn end(&self, begun: &Begun, state: State, now: u64) {
        self.change(begun, state, now.saturating_sub(begun.at));
    }

    /// Records of an operation that has ended how others went on from it.
    pub(crate) fn went(&self, begun: &mut Begun, detour: Detour, (state, now): (State, u64)) {
        begun.detour = Some(detour);
        self.end(begun, state, now);
    }

    fn change(&self, begun: &Begun, state: State, nanos: u64) {
        if let Some(place) = self.still_at(begun) {
            self.write(place + END, &end_word(state, begun, nanos).to_le_bytes());
        }
    }

    fn change_with_times(&self, begun: &Begun, state: State) {
        if let Some(place) = self.still_at(begun) {
            self.write(place + TAG, &begun.times.to_word(begun.serial).to_le_bytes());
            self.write(place + END, &end_word(state, begun, 0).to_le_bytes());
        }
    }

    /// Where a record is, if it is. Others may have gone round the whole ring meanwhile.
    fn still_at(&self, begun: &Begun) -> Option<usize> {
        let place = self.place(begun.serial);
        let mut serial = [0; 8];
        let there = self.control.region().read(place, &mut serial).is_ok();
        (there && u64::from_le_bytes(serial) == begun.serial).then_some(place)
    }

    /// This rank's last records, the newest at the end.
    pub(crate) fn last(&self, count: usize) -> Vec<Record> {
        let mut ring = vec![0; RECORDS];
        let mut records = match self.control.region().read(self.at, &mut ring) {
            Ok(()) => parse(&ring),
            Err(_) => Vec::new(),
        };
        records.split_off(records.len().saturating_sub(count))
    }

    /// Where in the region.
    fn place(&self, serial: u64) -> usize {
        self.at + slot(serial) * LINE
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        // It lies inside the region, which was checked when the group was formed.
        let _ = self.control.region().write(at, bytes);
    }
}

/// The records of any rank of this host, by its place among them; none where it has made no record.
#[cfg(test)]
pub(crate) fn records_of(control: &Control, place: usize) -> Vec<Record> {
    let at = control.map().records(place);
    read_quietly(control, at, RECORDS).map(|ring| parse(&ring)).unwrap_or_default()
}

/// Reads from the control region without touching its memory: what nobody has committed reads as zeros and stays so.
pub(crate) fn read_quietly(control: &Control, at: usize, len: usize) -> Result<Vec<u8>> {
    let handle = control.region().export()?;
    let Some(fd) = handle.fd() else { return Err(Error::bug("a control region without a descriptor")) };
    let mut bytes = vec![0; len];
    let mut done = 0;
    while done < len {
        match rustix::io::pread(fd, &mut bytes[done..], (at + done) as u64) {
            Ok(0) => {
                return Err(Error::bug(format!("{len} bytes at {at} are outside of a control region")));
            }
            Ok(count) => done += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::io("reading a control region", error)),
        }
    }
    Ok(bytes)
}

/// The records in the bytes of a ring, the newest at the end. Takes any bytes.
pub(crate) fn parse(ring: &[u8]) -> Vec<Record> {
    let lines = ring.as_chunks::<LINE>().0.iter().take(LENGTH).enumerate();
    let mut records: Vec<Record> = lines
        .filter_map(|(index, line)| decode(line).filter(|record| slot(record.serial) == index))
        .collect();
    records.sort_unstable_by_key(|record| record.serial);
    records
}

const TAG: usize = 24;
const CHECK: usize = 48;
const END: usize = 56;
const NOBODY: u32 = u32::MAX;
const LAP: u64 = (1 << 10) - 1;
const LONGEST: u64 = (1 << 45) - 1;
const SHORT: u64 = (1 << 26) - 1;

fn slot(serial: u64) -> usize {
    (serial.wrapping_sub(1) % LENGTH as u64) as usize
}

fn encode(serial: u64, entry: &Entry) -> [u8; LINE] {
    let peer = entry.root_or_peer.map_or(NOBODY, |peer| peer.try_into().unwrap_or(NOBODY));
    let kinds = [
        entry.kind.code(),
        entry.dtype.map_or(0, |dtype| dtype as u8 + 1),
        entry.op.map_or(0, code_of_op),
        0,
    ];
    let last = u64::from(peer) | u64::from(u32::from_le_bytes(kinds)) << 32;
    let tag = if is_message(entry.kind) { entry.tag } else { 0 };
    let words = [serial, entry.number, entry.bytes, tag, entry.now, last];
    let begun = Begun { serial, at: entry.now, path: entry.path, detour: None, times: Times::default() };
    let words = words.into_iter().chain([check(&words), end_word(State::Running, &begun, 0)]);
    let mut line = [0; LINE];
    for (to, word) in line.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
    line
}

fn decode(line: &[u8; LINE]) -> Option<Record> {
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| line[at + index]));
    let mut words: [u64; 6] = std::array::from_fn(|index| word(8 * index));
    let [serial, number, bytes, mut tag, begun, last] = words;
    let end = word(END);
    let peer = last as u32;
    let [kind, dtype, op, _] = ((last >> 32) as u32).to_le_bytes();
    let kind = Kind::from_code(kind)?;
    let mut times = Times::default();
    if !is_message(kind) {
        times = Times::from_word(tag, serial);
        (tag, words[TAG / 8]) = (0, 0);
    }
    if serial == 0 || word(CHECK) != check(&words) || end >> 6 & LAP != lap(serial) {
        return None;
    }
    let state = State::from_code(end & 7)?;
    let time = |nanos: u64| (nanos != 0).then(|| Duration::from_nanos(nanos));
    Some(Record {
        serial,
        number,
        kind,
        dtype: dtype.checked_sub(1).and_then(|code| Dtype::try_from(code).ok()),
        op: OPS.get(usize::from(op).wrapping_sub(1)).copied(),
        peer: (peer != NOBODY).then_some(peer as usize),
        tag,
        bytes,
        path: Path::from_code((end >> 3 & 7) as u8),
        detour: Detour::from_code((end >> 16 & 7) as u8),
        state,
        begun,
        met: time(times.met),
        queued: time(times.queued),
        took: state.is_over().then(|| Duration::from_nanos(end >> 19)),
        says: times.says,
    })
}

fn is_message(kind: Kind) -> bool {
    matches!(kind, Kind::Send | Kind::Recv)
}

/// Not against malice: against lines of which a part is old.
fn check(words: &[u64; 6]) -> u64 {
    words.iter().fold(0x7477_7265_636f_7264, |sum: u64, word| {
        (sum.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    })
}

fn lap(serial: u64) -> u64 {
    (serial / LENGTH as u64) & LAP
}

fn end_word(state: State, begun: &Begun, nanos: u64) -> u64 {
    let path = u64::from(begun.path.map_or(0, Path::code)) & 7;
    let detour = u64::from(begun.detour.map_or(0, Detour::code)) & 7;
    state as u64 | path << 3 | lap(begun.serial) << 6 | detour << 16 | nanos.min(LONGEST) << 19
}

/// The names of reductions by their code, from 1.
const OPS: [&str; 9] = ["SUM", "PRODUCT", "MIN", "MAX", "AVG", "PREMUL_SUM", "BAND", "BOR", "BXOR"];

fn code_of_op(op: ReduceOp) -> u8 {
    match op {
        ReduceOp::Sum => 1,
        ReduceOp::Product => 2,
        ReduceOp::Min => 3,
        ReduceOp::Max => 4,
        ReduceOp::Avg => 5,
        ReduceOp::PremulSum(_) => 6,
        ReduceOp::Band => 7,
        ReduceOp::Bor => 8,
        ReduceOp::Bxor => 9,
        _ => 0,
    }
}

pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
