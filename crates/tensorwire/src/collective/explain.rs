//! The switch-over points in words.

use std::fmt::Write;

use super::tuning::Tuning;
use crate::shm::kind::{Detour, Kind, Path};

/// What users call; the others are parts of these, or have no choice.
const KINDS: [(Kind, bool); 8] = [
    (Kind::AllReduce, false),
    (Kind::Reduce, false),
    (Kind::Broadcast, false),
    (Kind::AllGather, false),
    (Kind::Gather, false),
    (Kind::Scatter, true),
    (Kind::ReduceScatter, true),
    (Kind::AllToAll, true),
];

/// No operation is larger.
const LARGEST: usize = 1 << 40;

/// A table for people: which sizes take which path, in a group of `world` ranks on one host.
pub fn explain(world: usize) -> String {
    let tuning = Tuning::new(world);
    let mut text = format!("Paths of {world} ranks on one host, by the bytes that each rank gives,\n");
    text.push_str("or that each gets from each (scatter, reduce_scatter, all_to_all):\n\n");
    let _ = writeln!(text, "{:<16}{:>14}{:>14}{:>14}{:>14}", "", "inline", "one-shot", "staged", "direct");
    for (kind, lanes) in KINDS {
        let parts = if lanes { world } else { 1 };
        let path = |bytes| tuning.path(kind, bytes, parts);
        let tiny = last(|bytes| path(bytes) == Path::Inline);
        let small = last(|bytes| matches!(path(bytes), Path::Inline | Path::OneShot));
        let up_to = |last: Option<usize>, before: Option<usize>| match last {
            last if last == before => "-".to_owned(),
            Some(LARGEST) => "larger".to_owned(),
            Some(last) => format!("to {}", size(last)),
            None => "-".to_owned(),
        };
        let staged = if small == Some(LARGEST) { "-" } else { "larger" };
        let (inline, shot) = (up_to(tiny, None), up_to(small, tiny));
        let direct = format!("from {}", size(tuning.direct));
        let _ = writeln!(text, "{:<16}{inline:>14}{shot:>14}{staged:>14}{direct:>14}", kind.name());
    }
    let (reduce, window) = (size(tuning.reduce_window), size(tuning.window));
    text.push_str("\ninline: in the cache line of the flag. one-shot: all at once through slots.\n");
    let _ = writeln!(text, "staged: through slots in rounds, {reduce} of a reduction, {window} of others.");
    text.push_str("direct: straight between memory of Group::alloc, where all ranks have such.\n");
    text.push_str("An operation that could be direct and is not records why (see status --last):\n");
    for why in Detour::ALL {
        let _ = writeln!(text, "  {}: {}", why.name(), why.reason());
    }
    let bypass = size(tuning.bypass);
    let _ = writeln!(text, "Results of {bypass} and more, over all ranks, are written past the caches.");
    text
}

/// The last size of which it holds; none if it does not hold of one byte.
fn last(holds: impl Fn(usize) -> bool) -> Option<usize> {
    let (mut low, mut high) = (1, LARGEST + 1);
    if !holds(low) {
        return None;
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if holds(middle) { low = middle } else { high = middle }
    }
    Some(low)
}

fn size(bytes: usize) -> String {
    match bytes {
        bytes if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        bytes if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_what_the_tuning_does() {
        for world in [1, 2, 8, 100] {
            let text = explain(world);
            let point = size(Tuning::new(world).one_shot);
            let line = text.lines().find(|line| line.starts_with("all_reduce")).unwrap();
            assert!(line.contains(&format!("to {point}")), "{text}");
            assert!(text.lines().all(|line| line.len() <= 80), "{text}");
        }
    }

    #[test]
    fn the_last_size_is_found() {
        assert_eq!(last(|bytes| bytes <= 32), Some(32));
        assert_eq!(last(|_| true), Some(LARGEST));
        assert_eq!(last(|_| false), None);
    }
}
