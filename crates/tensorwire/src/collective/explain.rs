//! The switch-over points in words, and how operations were queued.

use std::fmt::Write;

use tensorwire_device::DeviceId;

use super::operation::Operation;
use super::plan::{Shape, Workers};
use super::tuning::Tuning;
use crate::shm::kind::{Detour, Kind, Path};
use crate::shm::mismatch::list;

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

/// The sizes that take a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathRange {
    /// The path. The direct one is taken only if all ranks have their tensors in memory of `alloc`.
    pub path: Path,
    /// The first size, in bytes.
    pub from: usize,
    /// The last size; none: all larger ones.
    pub to: Option<usize>,
}

/// Which sizes of a kind of operation take which path.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathRanges {
    /// The kind.
    pub kind: Kind,
    /// Whether a size is what each rank gets from each, and not what each rank gives.
    pub for_each_rank: bool,
    /// The paths, the direct one last.
    pub ranges: Vec<PathRange>,
}

/// Which sizes take which path, in a group of `world` ranks on one host.
pub fn path_ranges(world: usize) -> Vec<PathRanges> {
    let tuning = Tuning::new(world);
    let of = |(kind, for_each_rank)| {
        let parts = if for_each_rank { world } else { 1 };
        let path = |bytes| tuning.path(kind, bytes, parts);
        let inline = last(|bytes| path(bytes) == Path::Inline).unwrap_or(0);
        let one_shot = last(|bytes| matches!(path(bytes), Path::Inline | Path::OneShot)).unwrap_or(0);
        let range =
            |path, from: usize, to: usize| PathRange { path, from, to: (to != LARGEST).then_some(to) };
        let ranges = [
            range(Path::Inline, 1, inline),
            range(Path::OneShot, inline + 1, one_shot),
            range(Path::Staged, one_shot + 1, LARGEST),
            range(Path::Direct, tuning.direct, LARGEST),
        ];
        let is_some = |range: &PathRange| range.from <= range.to.unwrap_or(LARGEST);
        PathRanges { kind, for_each_rank, ranges: ranges.into_iter().filter(is_some).collect() }
    };
    KINDS.into_iter().map(of).collect()
}

/// A table for people: which sizes take which path, in a group of `world` ranks on one host.
pub fn explain(world: usize) -> String {
    let tuning = Tuning::new(world);
    let mut text = format!("Paths of {world} ranks on one host, by the bytes that each rank gives,\n");
    text.push_str("or that each gets from each (scatter, reduce_scatter, all_to_all):\n\n");
    let _ = writeln!(text, "{:<16}{:>14}{:>14}{:>14}{:>14}", "", "inline", "one-shot", "staged", "direct");
    for PathRanges { kind, ranges, .. } in path_ranges(world) {
        let _ = write!(text, "{:<16}", kind.name());
        for path in [Path::Inline, Path::OneShot, Path::Staged, Path::Direct] {
            let cell = match ranges.iter().find(|range| range.path == path) {
                Some(range) if path == Path::Direct => format!("from {}", size(range.from)),
                Some(PathRange { to: Some(to), .. }) => format!("to {}", size(*to)),
                Some(_) => "larger".into(),
                None => "-".into(),
            };
            let _ = write!(text, "{cell:>14}");
        }
        text.push('\n');
    }
    let (reduce, window) = (size(tuning.reduce_window), size(tuning.window));
    text.push_str("\ninline: in the cache line of the flag. one-shot: all at once through slots.\n");
    let _ = writeln!(text, "staged: through slots in rounds, {reduce} of a reduction, {window} of others.");
    text.push_str("direct: straight between memory of Group::alloc, where all ranks have such.\n");
    text.push_str("An operation that could be direct and is not records why (see status --last):\n");
    for why in Detour::ALL.iter().filter(|why| **why != Detour::Dense) {
        let (name, reason) = (why.name(), why.reason());
        // A long reason has a line of its own: the table fits 80 columns.
        let fits = name.len() + reason.len() <= 76;
        let _ = writeln!(text, "  {name}:{}{reason}", if fits { " " } else { "\n    " });
    }
    let bypass = size(tuning.bypass);
    let _ = writeln!(text, "Results of {bypass} and more, over all ranks, are written past the caches.");
    text
}

/// How operations of a rank were queued; the last one stands for all.
#[derive(Debug, Clone)]
pub(super) struct Way {
    kind: Kind,
    number: u32,
    bytes: usize,
    gpu: Option<DeviceId>,
    world: usize,
    workers: Workers,
    /// Whether ranks are threads of one process.
    threads: bool,
    /// How many operations were queued, and in how many of them the calling thread waited in place of its queue.
    count: u64,
    waited: u64,
}

impl Way {
    pub(super) fn new(
        operation: &Operation,
        number: u32,
        shape: &Shape,
        waited: bool,
        threads: bool,
    ) -> Self {
        Self {
            kind: operation.kind,
            number,
            bytes: operation.input.len().max(operation.output.len()),
            gpu: operation.gpu().cloned(),
            world: shape.world,
            workers: shape.workers.clone(),
            threads,
            count: 1,
            waited: waited.into(),
        }
    }

    /// Counts on.
    pub(super) fn after(mut self, before: Option<&Self>) -> Self {
        self.count += before.map_or(0, |before| before.count);
        self.waited += before.map_or(0, |before| before.waited);
        self
    }

    /// Lines for people, as rank `me` sees it.
    pub(super) fn explain(&self, me: usize) -> String {
        let Self { kind, number, bytes, .. } = self;
        let mut text = format!("  {kind} #{number} ({bytes} bytes) went direct, on a queue");
        for (index, worker) in self.workers.each(self.world).into_iter().enumerate() {
            let served: Vec<usize> =
                (0..self.world).filter(|&rank| self.workers.of(rank) == worker).collect();
            let works = if index == 0 { ": rank" } else { "; rank" };
            let _ = match &self.gpu {
                // Only the GPU of this rank is known here.
                Some(gpu) if served.contains(&me) => {
                    write!(text, "{works} {worker} works for {} on {gpu}", list(&served))
                }
                _ => write!(text, "{works} {worker} works for {}", list(&served)),
            };
        }
        text.push('\n');
        if self.waited > 0 {
            let why = match self.threads {
                true => "ranks are threads of one process",
                false => {
                    "the device cannot hold so many waits (it has few hardware queues, or MPS serves it)"
                }
            };
            let _ = writeln!(
                text,
                "  the calling thread waited in place of its queue in {} of {} queued operations: {why}",
                self.waited, self.count
            );
        }
        text
    }
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
    fn ranges_follow_each_other() {
        for world in [1, 2, 8, 100] {
            for PathRanges { kind, ranges, .. } in path_ranges(world) {
                let (direct, others) = ranges.split_last().unwrap();
                assert_eq!((direct.path, direct.to), (Path::Direct, None));
                assert_eq!(others[0].from, 1, "{kind}");
                let follows = |pair: &[PathRange]| pair[0].to.map(|to| to + 1) == Some(pair[1].from);
                assert!(others.windows(2).all(follows), "{kind}: {others:?}");
                assert_eq!(others.last().unwrap().to, None, "{kind}");
            }
        }
    }

    #[test]
    fn the_last_size_is_found() {
        assert_eq!(last(|bytes| bytes <= 32), Some(32));
        assert_eq!(last(|_| true), Some(LARGEST));
        assert_eq!(last(|_| false), None);
    }
}
