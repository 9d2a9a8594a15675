//! What goes through a pipe, as its ends say it in the control region of their group: each end writes how many messages it has sent and
//! taken, and since when some of those wait that it has sent. `tensorwire status` reads it from outside.
//!
//! | bytes of a rank's lines | what |
//! |---|---|
//! | 0..8 | 0: no pipe; 1: the other end is here, too; 2: it is on another host |
//! | 8..40 | messages sent and their bytes, messages taken and their bytes |
//! | 64..256 | text: channels of what this end sends, pid and host of the other end, each on a line |
//! | 256..768 | entries of a message's number, from 1, and when it was sent |
//!
//! Not every message has an entry, so that few suffice for many that wait: the more wait already, the further apart they are.

use std::sync::{Arc, Mutex, PoisonError};

use tensorwire_device::Region;
use tensorwire_device::flag::LINE;

use super::control::{Control, Desk, Map};
use super::record::now;
use super::view::{UntrustedMemory, text};

/// Bytes of a rank's lines.
pub(crate) const TRAFFIC: usize = 12 * LINE;
const COUNTS: usize = 8;
const TEXT: usize = LINE;
const TEXT_LEN: usize = 3 * LINE;
const ENTRIES: usize = TEXT + TEXT_LEN;
const ENTRY: usize = 16;
const MOST: u64 = ((TRAFFIC - ENTRIES) / ENTRY) as u64;
/// So many that wait have an entry each, and so many more in each doubling of those that wait.
const DENSE: u64 = 4;

const HERE: u64 = 1;
const APART: u64 = 2;

/// Where an end writes.
#[derive(Debug)]
pub(crate) struct Traffic {
    region: Arc<dyn Region>,
    /// The lines of this end, and of the other one if it is here.
    own: usize,
    other: Option<usize>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    counts: Counts,
    entries: u64,
}

/// Messages sent and their bytes, messages taken and their bytes.
type Counts = [u64; 4];
const SENT: usize = 0;
const TAKEN: usize = 2;

impl Traffic {
    /// Says that the group is a pipe, which channels this end sends by, and who is at the other end.
    pub(crate) fn open(control: &Control, channels: &str, (pid, host): (u32, &str)) -> crate::Result<Self> {
        let place = |place: usize| control.map().desk(place) + Desk::TRAFFIC;
        let other = control.ranks().len().checked_sub(2).map(|_| place(1 - control.me()));
        let (region, own) = (control.region().clone(), place(control.me()));
        let mut words = format!("{channels}\n{pid}\n{host}").into_bytes();
        words.resize(TEXT_LEN, 0);
        region.write(own + TEXT, &words)?;
        region.write(own, &if other.is_some() { HERE } else { APART }.to_le_bytes())?;
        Ok(Self { region, own, other, state: Mutex::default() })
    }

    /// This end has sent a message.
    pub(crate) fn sent(&self, bytes: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        add(&mut state.counts, SENT, bytes);
        let number = state.counts[SENT];
        let taken =
            self.other.and_then(|other| counts(|at, into| self.region.read(other + at, into).is_ok()));
        if let Some(taken) = taken.map(|counts| counts[TAKEN])
            && number.is_multiple_of((number.saturating_sub(taken) / DENSE).next_power_of_two())
        {
            let entry = [number.to_le_bytes(), now().to_le_bytes()].concat();
            let at = ENTRIES + (state.entries % MOST) as usize * ENTRY;
            state.entries += 1;
            self.write(at, &entry);
        }
        self.tell(&state.counts);
    }

    /// This end has taken a message.
    pub(crate) fn took(&self, bytes: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        add(&mut state.counts, TAKEN, bytes);
        self.tell(&state.counts);
    }

    fn tell(&self, counts: &Counts) {
        self.write(COUNTS, &counts.map(u64::to_le_bytes).concat());
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        if let Err(error) = self.region.write(self.own + at, bytes) {
            tracing::debug!(%error, "what goes through a pipe is not written down");
        }
    }
}

fn add(counts: &mut Counts, at: usize, bytes: u64) {
    counts[at] += 1;
    counts[at + 1] = counts[at + 1].wrapping_add(bytes);
}

fn counts(read: impl FnOnce(usize, &mut [u8]) -> bool) -> Option<Counts> {
    let mut bytes = [0; 32];
    if !read(COUNTS, &mut bytes) {
        return None;
    }
    let word = |at: usize| bytes.get(at * 8..)?.first_chunk().copied().map(u64::from_le_bytes);
    Some([0, 1, 2, 3].map(|at| word(at).unwrap_or_default()))
}

/// One end of a pipe.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PipeEnd {
    /// The pid of the other end as it sees itself.
    pub peer_pid: u32,
    /// The host of the other end.
    pub peer_host: String,
    /// Which channels tensors take that this end sends, the first choices in front.
    pub channels: String,
    /// Messages that this end has sent, and their bytes.
    pub sent: (u64, u64),
    /// Messages that this end has taken, and their bytes.
    pub taken: (u64, u64),
    /// Messages that this end has sent and that the other end has not taken, and their bytes. None where the other end is on another host.
    pub waiting: Option<(u64, u64)>,
    /// When the oldest of those was sent, in nanoseconds of CLOCK_MONOTONIC. If more than four wait, it may be that of one sent soon after.
    pub oldest: Option<u64>,
}

/// The end of the rank at a place, if the group is a pipe.
pub(crate) fn read(memory: &dyn UntrustedMemory, map: Map, place: usize) -> Option<PipeEnd> {
    let lines = |place: usize| map.desk(place) + Desk::TRAFFIC;
    let own = lines(place);
    let mut kind = [0; 8];
    let is_here = match memory.read(own, &mut kind).then(|| u64::from_le_bytes(kind))? {
        HERE => true,
        APART => false,
        _ => return None,
    };
    let counts_at = |lines: usize| counts(|at, into| memory.read(lines + at, into));
    let [sent, sent_bytes, taken, taken_bytes] = counts_at(own)?;
    let mut words = [0; TEXT_LEN];
    let words = memory.read(own + TEXT, &mut words).then(|| text(&words))?;
    let mut words = words.lines().map(str::to_owned);
    let mut end = PipeEnd {
        channels: words.next()?,
        peer_pid: words.next()?.parse().ok()?,
        peer_host: words.next()?,
        sent: (sent, sent_bytes),
        taken: (taken, taken_bytes),
        waiting: None,
        oldest: None,
    };
    if is_here && map.ranks() == 2 {
        let [_, _, taken, bytes] = counts_at(lines(1 - place))?;
        let waiting = (sent.saturating_sub(taken), sent_bytes.saturating_sub(bytes));
        end.waiting = Some(if waiting.0 == 0 { (0, 0) } else { waiting });
        end.oldest = if waiting.0 == 0 { None } else { since(memory, own, (taken, sent)) };
    }
    Some(end)
}

/// When the first of these messages was sent: the entry of it or of the next that has one, or else of the one before.
fn since(memory: &dyn UntrustedMemory, own: usize, (taken, sent): (u64, u64)) -> Option<u64> {
    let mut bytes = [0; TRAFFIC - ENTRIES];
    if !memory.read(own + ENTRIES, &mut bytes) {
        return None;
    }
    let word = |entry: &[u8], at: usize| entry.get(at..)?.first_chunk().copied().map(u64::from_le_bytes);
    let entries = bytes.chunks_exact(ENTRY).filter_map(|entry| Some((word(entry, 0)?, word(entry, 8)?)));
    let entries: Vec<_> = entries.filter(|(number, _)| (1..=sent).contains(number)).collect();
    let waits = entries.iter().filter(|(number, _)| *number > taken).min();
    waits.or_else(|| entries.iter().max()).map(|(_, at)| *at)
}

#[cfg(test)]
mod tests {
    use tensorwire_device::host::Host;

    use super::*;

    fn ends() -> [Control; 2] {
        let memory = Control::alloc(&Host, 2, 2).unwrap();
        [0, 1].map(|rank| Control::open(memory.clone(), vec![0, 1], (rank, 2)).unwrap())
    }

    fn seen(control: &Control, place: usize) -> Option<PipeEnd> {
        read(control, control.map(), place)
    }

    #[test]
    fn what_waits_is_seen() {
        let controls = ends();
        assert_eq!(seen(&controls[0], 0), None);
        let open = |place: usize| Traffic::open(&controls[place], "share, ring", (7, "node")).unwrap();
        let (sender, reader) = (open(0), open(1));
        let begin = now();
        for _ in 0..3 {
            sender.sent(100);
        }
        let end = seen(&controls[0], 0).unwrap();
        assert_eq!((end.channels.as_str(), end.peer_pid, end.peer_host.as_str()), ("share, ring", 7, "node"));
        assert_eq!((end.sent, end.taken, end.waiting), ((3, 300), (0, 0), Some((3, 300))));
        assert!((begin..=now()).contains(&end.oldest.unwrap()));
        assert_eq!(seen(&controls[0], 1).unwrap().waiting, Some((0, 0)));
        // The next is the oldest then.
        reader.took(100);
        let next = seen(&controls[0], 0).unwrap();
        assert_eq!(next.waiting, Some((2, 200)));
        assert!(next.oldest > end.oldest);
        reader.took(100);
        reader.took(100);
        let none = seen(&controls[1], 0).unwrap();
        assert_eq!((none.waiting, none.oldest), (Some((0, 0)), None));
        assert_eq!(seen(&controls[1], 1).unwrap().taken, (3, 300));
    }

    /// However many wait, the oldest is found while nothing is taken, and something close to it later.
    #[test]
    fn many_wait() {
        let controls = ends();
        let open = |place: usize| Traffic::open(&controls[place], "ring", (7, "node")).unwrap();
        let (sender, reader) = (open(0), open(1));
        sender.sent(1);
        let first = seen(&controls[0], 0).unwrap().oldest.unwrap();
        for number in 2..=20_000_u64 {
            sender.sent(1);
            if number.is_power_of_two() {
                assert_eq!(seen(&controls[0], 0).unwrap().oldest, Some(first), "{number}");
            }
        }
        let mut before = first;
        for _ in 1..20_000 {
            reader.took(1);
            let oldest = seen(&controls[0], 0).unwrap().oldest.unwrap();
            assert!(before <= oldest);
            before = oldest;
        }
    }

    #[test]
    fn on_two_hosts_nobody_knows_what_waits() {
        let memory = Control::alloc(&Host, 1, 2).unwrap();
        let control = Control::open(memory, vec![1], (1, 2)).unwrap();
        let traffic = Traffic::open(&control, "wire", (7, "far")).unwrap();
        traffic.sent(5);
        let end = seen(&control, 0).unwrap();
        assert_eq!((end.sent, end.waiting, end.oldest), ((1, 5), None, None));
    }
}
