//! Reads a control region from outside. It trusts nothing in there, because another process wrote it.

use std::fs::File;
use std::os::unix::fs::FileExt;

use tensorwire_device::flag::LINE;

use super::{GroupReport, Process, RankReport};
use crate::shm::control::{Cause, Failure, Map, NOTE, error_of};
use crate::shm::standing;
use crate::shm::view::{Card, UntrustedMemory, read_rank, text, word};
use crate::shm::words::Words;

/// The most ranks of a host that are believed in.
const MAX_RANKS: usize = 1 << 14;

/// Whether a file is a control region of ours.
pub(super) fn is_control(file: &File) -> bool {
    let mut head = [0; LINE];
    file.read_exact_at(&mut head, 0).is_ok() && Map::of_head(&head).is_some()
}

/// The pids of the ranks, as they see themselves.
pub(super) fn pids(memory: &dyn UntrustedMemory) -> Vec<u32> {
    let Some(map) = map(memory) else { return Vec::new() };
    (0..map.ranks()).filter_map(|place| Some(Card::read(memory, map, place)?.pid)).collect()
}

/// Reads everything but who waits for whom; nothing if it is no control region. `process` tells of a pid, as its owner
/// sees it.
pub(super) fn read(
    memory: &dyn UntrustedMemory,
    process: &mut dyn FnMut(u32) -> Process,
) -> Option<GroupReport> {
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
    standing::fill(memory, map, &mut group.ranks);
    let code = word(memory, map.abort());
    group.failure = (code != 0).then(|| failure(memory, map, Failure::from_code(code), &group.ranks));
    Some(group)
}

/// The layout, if the memory is large enough for it.
fn map(memory: &dyn UntrustedMemory) -> Option<Map> {
    let mut head = [0; LINE];
    let map = memory.read(0, &mut head).then(|| Map::of_head(&head)).flatten()?;
    (map.ranks() <= MAX_RANKS && map.desk(map.ranks()) <= memory.len()).then_some(map)
}

/// Why the group has failed, in words.
fn failure(memory: &dyn UntrustedMemory, map: Map, failure: Failure, ranks: &[RankReport]) -> String {
    let place = ranks.iter().position(|other| other.rank == Some(failure.rank));
    let mut note = [0; NOTE];
    memory.read(map.note(place.unwrap_or(map.ranks())), &mut note);
    let words = place.map(|place| Words::read(memory, map, place));
    let error = error_of(failure, &text(&note), words.as_ref(), &[], usize::MAX);
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
