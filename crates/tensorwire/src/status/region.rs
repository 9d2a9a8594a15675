//! Reads a control region from outside. It trusts nothing in there, because another process wrote it.

use std::fs::File;
use std::os::unix::fs::FileExt;

use tensorwire_device::flag::LINE;

use super::{Doing, GroupReport, Process, RankReport};
use crate::shm::control::{Cause, Desk, FAR, Failure, Map, NOTE, RECORDS, error_of};
use crate::shm::record::{self, State};

/// The most ranks of a host that are believed in.
const MAX_RANKS: usize = 1 << 14;

/// Memory that can be read and must not be trusted.
pub(super) trait Memory {
    /// Copies bytes out; gives whether they were there.
    fn read(&self, at: usize, into: &mut [u8]) -> bool;

    /// Bytes.
    fn len(&self) -> usize;
}

/// Memory that is here.
#[cfg(any(test, fuzzing))]
pub(super) struct Bytes<'a>(pub(super) &'a [u8]);

#[cfg(any(test, fuzzing))]
impl Memory for Bytes<'_> {
    fn read(&self, at: usize, into: &mut [u8]) -> bool {
        let from = at.checked_add(into.len()).and_then(|end| self.0.get(at..end));
        from.map(|from| into.copy_from_slice(from)).is_some()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// Whether a file is a control region of ours.
pub(super) fn is_control(file: &File) -> bool {
    let mut head = [0; LINE];
    file.read_exact_at(&mut head, 0).is_ok() && Map::of_head(&head).is_some()
}

/// The pids of the ranks, as they see themselves.
pub(super) fn pids(memory: &dyn Memory) -> Vec<u32> {
    let Some(map) = map(memory) else { return Vec::new() };
    (0..map.ranks()).filter_map(|place| Some(Card::read(memory, map, place)?.pid)).collect()
}

/// Reads everything but who waits for whom; nothing if it is no control region. `process` tells of a pid, as its owner
/// sees it.
pub(super) fn read(memory: &dyn Memory, process: &mut dyn FnMut(u32) -> Process) -> Option<GroupReport> {
    let map = map(memory)?;
    let mut group =
        GroupReport { name: String::new(), world: 0, ranks: Vec::new(), failure: None, summary: Vec::new() };
    for place in 0..map.ranks() {
        let card = Card::read(memory, map, place);
        if let Some(card) = &card
            && group.world == 0
        {
            (group.name, group.world) = (card.group.clone(), card.world);
        }
        group.ranks.push(read_rank(memory, map, place, card, process));
    }
    let code = word(memory, map.abort());
    group.failure = (code != 0).then(|| failure(memory, map, Failure::from_code(code), &group.ranks));
    Some(group)
}

/// The layout, if the memory is large enough for it.
fn map(memory: &dyn Memory) -> Option<Map> {
    let mut head = [0; LINE];
    let map = memory.read(0, &mut head).then(|| Map::of_head(&head)).flatten()?;
    (map.ranks() <= MAX_RANKS && map.desk(map.ranks()) <= memory.len()).then_some(map)
}

fn read_rank(
    memory: &dyn Memory,
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
        let doing = Doing::Joining;
        let (waits_for, elsewhere, stacks) = (Vec::new(), None, None);
        return RankReport {
            rank,
            host,
            pid,
            process,
            doing,
            waits_for,
            elsewhere,
            stacks,
            records,
            position,
        };
    };
    let running: Vec<_> = records.iter().filter(|record| record.state == State::Running).cloned().collect();
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
        waits_for: Vec::new(),
        elsewhere: None,
        stacks: None,
        records,
        position,
    }
}

/// Why the group has failed, in words.
fn failure(memory: &dyn Memory, map: Map, failure: Failure, ranks: &[RankReport]) -> String {
    let place = ranks.iter().position(|other| other.rank == Some(failure.rank));
    let mut note = [0; NOTE];
    memory.read(map.note(place.unwrap_or(map.ranks())), &mut note);
    let error = error_of(failure, &text(&note), &[], usize::MAX);
    // The sentence begins with the rank that it is about, which is one that the others know better.
    let about = match (failure.cause, error.ranks()) {
        (Cause::Mismatch, [rank]) => Some(*rank),
        (Cause::Mismatch, _) => None,
        _ => Some(failure.rank),
    };
    let about = ranks.iter().find(|other| about.is_some() && other.rank == about);
    match about.and_then(|rank| Some((rank.rank?, rank.who()))) {
        Some((rank, who)) => error.to_string().replacen(&format!("rank {rank}"), &who, 1),
        None => error.to_string(),
    }
}

/// Who a rank is, as it wrote it to its desk.
struct Card {
    rank: usize,
    world: usize,
    pid: u32,
    host: String,
    group: String,
}

impl Card {
    fn read(memory: &dyn Memory, map: Map, place: usize) -> Option<Self> {
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
fn word(memory: &dyn Memory, at: usize) -> u32 {
    let mut bytes = [0; 4];
    if memory.read(at, &mut bytes) { u32::from_le_bytes(bytes) } else { 0 }
}

/// Text up to the first zero.
fn text(bytes: &[u8]) -> String {
    let len = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    printable(&String::from_utf8_lossy(&bytes[..len]))
}

/// Without what would play tricks on a terminal; lines stay lines.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect()
}
