//! What the hosts of a group have decided about an operation that cannot go on.
//!
//! A host that cannot go on says so to the hub, whose word decides for all (see [`crate::watch::star`]). The watcher of each host
//! puts that word into the verdicts of the host's two parts of the operation. It ends all waits there, as the verdict of a rank of
//! this host does.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tensorwire_device::flag::reached;

use crate::shm::control::{Control, Desk, Note, Verdict, Why};
use crate::shm::sentence::DESCRIBED;

/// How long the hub waits for what hosts know of their ranks.
pub(crate) const AGREE: Duration = Duration::from_millis(400);
/// A host that refuses an operation gets the answer within this time, if its leader and the hub can run.
pub(crate) const DECIDE: Duration = Duration::from_millis(1200);

/// The longest refusal: its numbers and a note.
const LONGEST: usize = 1024;
/// Of so many operations that this host has not come to it is kept what was decided. Of others it hears when it asks.
const MOST: usize = 256;

/// Why a host cannot go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// Whether its time was over. It has waited for ranks, and of those of other hosts it knows little.
    pub(crate) late: bool,
    /// The rank that says it.
    pub(crate) rank: usize,
    /// The ranks that it is about, and the reason.
    pub(crate) note: Note,
    /// Whose time was over.
    pub(crate) by: String,
}

impl Refusal {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let note = Note::write(&self.note.ranks, &self.note.text);
        let by: String = self.by.chars().take(LONGEST / 8).collect();
        let mut bytes = vec![self.late.into()];
        bytes.extend((self.rank as u32).to_le_bytes());
        bytes.extend((by.len() as u16).to_le_bytes());
        bytes.extend(by.as_bytes());
        bytes.extend(note.as_bytes());
        bytes.truncate(LONGEST);
        bytes
    }

    /// Nothing, if no leader of ours wrote it.
    pub(crate) fn from_bytes(bytes: &[u8], world: usize) -> Option<Self> {
        let ([late], rest) = bytes.split_first_chunk()?;
        let (rank, rest) = rest.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let (by, note) = rest.split_at_checked(u16::from_le_bytes(*len).into())?;
        let rank = u32::from_le_bytes(*rank) as usize;
        let note = Note::read(&String::from_utf8_lossy(note));
        let by = String::from_utf8_lossy(by).into_owned();
        let fits = bytes.len() <= LONGEST && rank < world && note.ranks.iter().all(|&rank| rank < world);
        fits.then_some(Self { late: *late != 0, rank, note, by })
    }
}

/// The numbers that the two parts of an operation have on each host.
pub(crate) fn parts(number: u32) -> [u32; 2] {
    let second = number.wrapping_mul(2);
    [second.wrapping_sub(1), second]
}

/// The ranks of this host that have not come to an operation, and their names.
pub(crate) fn absent(control: &Control, number: u32) -> Note {
    let [first, _] = parts(number);
    let inside = first.wrapping_mul(2).wrapping_add(1);
    let map = control.map();
    let come = |place: &usize| {
        control.flag(map.desk(*place) + Desk::WHERE).is_ok_and(|place| reached(place.load(), inside))
    };
    let places: Vec<usize> = (0..control.ranks().len()).filter(|place| !come(place)).collect();
    let names: Vec<String> = places.iter().take(DESCRIBED).map(|&place| name(control, place)).collect();
    Note { ranks: places.iter().map(|&place| control.ranks()[place]).collect(), text: names.join(", ") }
}

fn name(control: &Control, place: usize) -> String {
    let [rank, pid, host] = [0, 2, 3].map(|line| control.card(place, line));
    format!("rank {rank} (host {host}, pid {pid})")
}

/// See the module. In the leader's process.
#[derive(Debug, Default)]
pub(crate) struct Decided(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The operation that the leader has come to, and whether it has all that comes of other hosts.
    number: u32,
    has_all: bool,
    /// What was decided of later ones.
    later: Vec<(u32, Refusal)>,
    /// The last operation that this host has given up before its leader came.
    told: Option<u32>,
}

impl Decided {
    /// The leader comes to an operation. While it does, nobody sets verdicts: no rank of its host can be so far ahead that their
    /// words are used again.
    pub(crate) fn come(&self, number: u32, control: &Control) {
        let mut state = self.lock();
        (state.number, state.has_all) = (number, false);
        for (of, refusal) in std::mem::take(&mut state.later) {
            state.put(of, refusal, control);
        }
    }

    /// All that comes of other hosts in the operation has come: this host finishes it, whatever they do.
    pub(crate) fn has_all(&self) {
        self.lock().has_all = true;
    }

    /// What was decided about an operation has come.
    pub(crate) fn put(&self, number: u32, refusal: Refusal, control: &Control) {
        self.lock().put(number, refusal, control);
    }

    /// An operation that ranks of this host have given up before their leader has come to it, and why: once.
    pub(crate) fn given_up(&self, control: &Control) -> Option<(u32, Refusal)> {
        let mut state = self.lock();
        let next = state.number.wrapping_add(1);
        if state.told == Some(next) {
            return None;
        }
        let given_up = |part| Some((part, Verdict::from_code(control.verdict(part).ok()?.code()?)?));
        let (part, Verdict { why, place }) = parts(next).into_iter().find_map(given_up)?;
        let rank = *control.ranks().get(place)?;
        state.told = Some(next);
        let (note, late) = (Note::read(&control.reason(place, part)), why.is_timeout());
        let by = match late {
            true => {
                format!("{} was the first to give up, and the time-out {}", name(control, place), why.whose())
            }
            false => String::new(),
        };
        Some((next, Refusal { late, rank, note, by }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn put(&mut self, number: u32, refusal: Refusal, control: &Control) {
        match number.wrapping_sub(self.number) as i32 {
            // Other ranks may have come to the next one before their leader.
            0 if !self.has_all => {}
            1 => {}
            2.. if self.later.len() < MOST => return self.later.push((number, refusal)),
            _ => return,
        }
        let Refusal { late, rank, mut note, by } = refusal;
        if !by.is_empty() {
            note.text = format!("{}; {by}", note.text);
        }
        let why = if late { Why::FarLate } else { Why::Far };
        if !late {
            note.ranks = vec![rank];
        }
        for part in parts(number) {
            control.write_far_reason(part, &Note::write(&note.ranks, &note.text));
            match control.verdict(part) {
                Ok(verdict) => _ = verdict.set(Verdict { why, place: control.ranks().len() }.to_code()),
                Err(error) => tracing::error!("an operation is not ended: {error}"),
            }
        }
    }
}

/// What arrives is understood or refused.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz(data: &[u8]) {
    if let Some(refusal) = Refusal::from_bytes(data, 9) {
        assert!(refusal.to_bytes().len() <= LONGEST);
    }
}
