//! Which parts of which segments are free: numbers only, no memory.

use std::collections::{BTreeMap, BTreeSet};

/// A part of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ArenaPlace {
    /// The segment's number.
    pub(super) segment: usize,
    /// Where the part begins in it.
    pub(super) start: usize,
    /// Bytes.
    pub(super) size: usize,
}

/// Segments, and what is free in them. The smallest free part that is large enough is taken; neighbours that are free are
/// one part. Small and large blocks do not share segments, so that a small one does not keep a large one.
#[derive(Debug, Default)]
pub(super) struct Arena {
    segments: Vec<Segment>,
    /// Free parts by kind, size, segment and start.
    free: BTreeSet<(bool, usize, usize, usize)>,
    used: usize,
    blocks: usize,
}

#[derive(Debug)]
struct Segment {
    /// Nothing once it was freed.
    len: usize,
    small: bool,
    /// Free parts: start and size.
    free: BTreeMap<usize, usize>,
}

impl Arena {
    /// Adds a free segment and gives its number: that of a freed one, if there is any.
    pub(super) fn add(&mut self, len: usize, small: bool) -> usize {
        let number = self.segments.iter().position(|segment| segment.len == 0).unwrap_or(self.segments.len());
        let segment = Segment { len, small, free: BTreeMap::new() };
        match self.segments.get_mut(number) {
            Some(gone) => *gone = segment,
            None => self.segments.push(segment),
        }
        self.insert(number, 0, len);
        number
    }

    /// Takes a part of so many bytes.
    pub(super) fn take(&mut self, size: usize, small: bool) -> Option<ArenaPlace> {
        let &(_, free, segment, start) =
            self.free.range((small, size, 0, 0)..).next().filter(|free| free.0 == small)?;
        self.remove(segment, start, free);
        if free > size {
            self.insert(segment, start + size, free - size);
        }
        self.used += size;
        self.blocks += 1;
        Some(ArenaPlace { segment, start, size })
    }

    /// Gives a part back.
    pub(super) fn give(&mut self, place: ArenaPlace) {
        let Some(segment) = self.segments.get(place.segment) else { return };
        let (mut start, mut size) = (place.start, place.size);
        let before = segment.free.range(..start).next_back().map(|(&at, &len)| (at, len));
        let after = segment.free.get(&(start + size)).copied();
        if let Some((at, len)) = before.filter(|(at, len)| at + len == start) {
            self.remove(place.segment, at, len);
            (start, size) = (at, size + len);
        }
        if let Some(len) = after {
            self.remove(place.segment, place.start + place.size, len);
            size += len;
        }
        self.insert(place.segment, start, size);
        self.used -= place.size;
        self.blocks -= 1;
    }

    /// Takes all segments out that are free as a whole: their numbers and lengths.
    pub(super) fn drain(&mut self) -> Vec<(usize, usize)> {
        let whole = |segment: &Segment| segment.len > 0 && segment.free.get(&0) == Some(&segment.len);
        let numbers: Vec<usize> =
            (0..self.segments.len()).filter(|&number| whole(&self.segments[number])).collect();
        numbers
            .into_iter()
            .map(|number| {
                let len = self.segments[number].len;
                self.remove(number, 0, len);
                self.segments[number].len = 0;
                (number, len)
            })
            .collect()
    }

    /// Bytes and blocks in use.
    pub(super) fn used(&self) -> (usize, usize) {
        (self.used, self.blocks)
    }

    /// Bytes and segments.
    pub(super) fn held(&self) -> (usize, usize) {
        let there = self.segments.iter().filter(|segment| segment.len > 0);
        (there.clone().map(|segment| segment.len).sum(), there.count())
    }

    fn insert(&mut self, segment: usize, start: usize, size: usize) {
        if let Some(there) = self.segments.get_mut(segment) {
            there.free.insert(start, size);
            self.free.insert((there.small, size, segment, start));
        }
    }

    fn remove(&mut self, segment: usize, start: usize, size: usize) {
        if let Some(there) = self.segments.get_mut(segment) {
            there.free.remove(&start);
            self.free.remove(&(there.small, size, segment, start));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Add(usize, bool),
        Take(usize, bool),
        Give(usize),
        Drain,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            1 => (1..40_usize, any::<bool>()).prop_map(|(len, small)| Step::Add(len, small)),
            6 => (1..15_usize, any::<bool>()).prop_map(|(size, small)| Step::Take(size, small)),
            5 => any::<usize>().prop_map(Step::Give),
            1 => Just(Step::Drain),
        ];
        prop::collection::vec(step, 0..200)
    }

    proptest! {
        /// Held against a byte map: no byte is given out twice, none is lost, the best fit is taken.
        #[test]
        fn it_follows_the_model(steps in steps()) {
            let mut arena = Arena::default();
            // For each segment: whether it is for small blocks, and who has each byte.
            let mut model: Vec<(bool, Vec<bool>)> = Vec::new();
            let mut blocks: Vec<ArenaPlace> = Vec::new();
            for step in steps {
                match step {
                    Step::Add(len, small) => {
                        let number = arena.add(len, small);
                        prop_assert!(number == model.len() || model[number].1.is_empty());
                        model.resize(model.len().max(number + 1), (small, Vec::new()));
                        model[number] = (small, vec![false; len]);
                    }
                    Step::Take(size, small) => {
                        let runs = model.iter().filter(|(kind, _)| *kind == small);
                        let runs = runs.flat_map(|(_, bytes)| bytes.chunk_by(|a, b| a == b));
                        let best = runs.filter(|run| !run[0] && run.len() >= size).map(<[bool]>::len).min();
                        let place = arena.take(size, small);
                        prop_assert_eq!(place.is_some(), best.is_some());
                        if let Some(place) = place {
                            prop_assert_eq!(place.size, size);
                            let bytes = &mut model[place.segment].1;
                            let run = bytes[place.start..].iter().take_while(|taken| !**taken).count();
                            prop_assert_eq!(Some(run), best);
                            bytes[place.start..place.start + size].fill(true);
                            blocks.push(place);
                        }
                    }
                    Step::Give(which) if !blocks.is_empty() => {
                        let place = blocks.swap_remove(which % blocks.len());
                        model[place.segment].1[place.start..place.start + place.size].fill(false);
                        arena.give(place);
                    }
                    Step::Give(_) => {}
                    Step::Drain => {
                        for (number, len) in arena.drain() {
                            prop_assert!(model[number].1.len() == len && model[number].1.iter().all(|taken| !taken));
                            model[number].1.clear();
                        }
                        prop_assert!(model.iter().all(|(_, bytes)| bytes.is_empty() || bytes.contains(&true)));
                    }
                }
                let used: usize = blocks.iter().map(|place| place.size).sum();
                prop_assert_eq!(arena.used(), (used, blocks.len()));
                let there = model.iter().filter(|(_, bytes)| !bytes.is_empty());
                let held = there.clone().map(|(_, bytes)| bytes.len()).sum::<usize>();
                prop_assert_eq!(arena.held(), (held, there.count()));
            }
        }
    }
}
