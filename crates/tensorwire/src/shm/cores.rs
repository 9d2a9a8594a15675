//! Whether each rank of a host has a core of its own. If ranks share a core, a wait that spins takes the core from
//! the rank that it waits for. A wait that sleeps is better there.

use std::time::Duration;

use super::control::Control;

/// How long a wait looks before it sleeps, where nobody needs the core that it looks on. Some times what it costs to be
/// woken, which is 100 us and more on virtual machines whose core has gone to sleep: where one late rank puts the others to
/// sleep, these are late themselves the next time, and so it goes on.
const SPARE: Duration = Duration::from_micros(500);
/// And where every rank has a core, but none is left for others who may compute meanwhile.
const ALONE: Duration = Duration::from_micros(50);
/// And where ranks share cores.
const CROWDED: Duration = Duration::from_micros(1);

/// The cores that this process may run on, one hexadecimal digit for four of them, the lowest first.
pub(super) fn allowed() -> String {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return String::new() };
    let mut text = String::new();
    for first in (0..rustix::thread::CpuSet::MAX_CPU).step_by(4) {
        let bits = (0..4).filter(|bit| set.is_set(first + bit)).fold(0u32, |bits, bit| bits | 1 << bit);
        text.push(char::from_digit(bits, 16).unwrap_or('0'));
    }
    text.truncate(text.trim_end_matches('0').len());
    text
}

/// What kind of thread waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Thread {
    /// A thread that called an operation and does nothing else meanwhile.
    Caller,
    /// A thread of the library: the rank may compute meanwhile.
    Worker,
}

/// What a group finds on its host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    ranks: usize,
    /// Cores of all ranks together, and of this one.
    cores: usize,
    own: usize,
}

impl Room {
    /// Looks. All ranks have said by now where they may run.
    pub(crate) fn new(control: &Control) -> Self {
        let ranks = control.ranks().len();
        let masks: Vec<String> = (0..ranks).map(|place| control.card(place, 5)).collect();
        let cores = distinct(&masks);
        // A limit on processor time counts for all ranks together, as far as this one can see.
        let own = count(&allowed());
        let limit = std::thread::available_parallelism().map_or(own, Into::into);
        let limit = if limit < own { limit } else { cores };
        Self { ranks, cores: cores.min(limit), own }
    }

    /// How long a wait of the group shall look before it sleeps, on a thread of the library or on its caller's.
    pub(crate) fn spin(self, thread: Thread) -> Duration {
        // The core of a rank that is bound to it is nobody else's.
        let bound = self.own == 1 && thread == Thread::Caller;
        match self.cores {
            cores if cores < self.ranks => CROWDED,
            cores if cores / 2 >= self.ranks || bound => SPARE,
            _ => ALONE,
        }
    }

    /// How many threads of a rank may work at once, up to `most`: each rank has so many cores, and so has this one.
    pub(crate) fn threads(self, most: usize) -> usize {
        (self.cores / self.ranks.max(1)).min(self.own).clamp(1, most.max(1))
    }
}

fn digits(mask: &str) -> impl Iterator<Item = u32> + '_ {
    mask.chars().map(|digit| digit.to_digit(16).unwrap_or(0))
}

fn count(mask: &str) -> usize {
    digits(mask).map(|bits| bits.count_ones() as usize).sum()
}

/// How many cores are in any of the masks.
fn distinct(masks: &[String]) -> usize {
    let mut all: Vec<u32> = Vec::new();
    for mask in masks {
        for (index, bits) in digits(mask).enumerate() {
            match all.get_mut(index) {
                Some(seen) => *seen |= bits,
                None => all.push(bits),
            }
        }
    }
    all.into_iter().map(|bits| bits.count_ones() as usize).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_have_a_core_each() {
        let threads = |ranks, cores, own| Room { ranks, cores, own }.threads(2);
        assert_eq!(threads(4, 16, 16), 2);
        assert_eq!(threads(8, 16, 16), 2);
        assert_eq!(threads(9, 16, 16), 1);
        assert_eq!(threads(4, 4, 16), 1);
        // Bound to one core each, or only this rank is.
        assert_eq!(threads(4, 4, 1), 1);
        assert_eq!(threads(4, 16, 1), 1);
        assert_eq!(threads(4, 0, 0), 1);
        assert_eq!(Room { ranks: 1, cores: 16, own: 16 }.threads(1), 1);
        assert_eq!(Room { ranks: 2, cores: 16, own: 16 }.threads(4), 4);
    }

    #[test]
    fn waits_are_long_where_nobody_needs_the_core() {
        let spin = |ranks, cores, own| {
            [Thread::Caller, Thread::Worker].map(|thread| Room { ranks, cores, own }.spin(thread))
        };
        assert_eq!(spin(8, 16, 16), [SPARE, SPARE]);
        assert_eq!(spin(9, 16, 16), [ALONE, ALONE]);
        assert_eq!(spin(16, 16, 16), [ALONE, ALONE]);
        assert_eq!(spin(17, 16, 16), [CROWDED, CROWDED]);
        // Bound to a core each, and all to the same one.
        assert_eq!(spin(8, 8, 1), [SPARE, ALONE]);
        assert_eq!(spin(2, 1, 1), [CROWDED, CROWDED]);
    }

    #[test]
    fn cores_are_counted_once() {
        assert_eq!(count("f01"), 5);
        assert_eq!(distinct(&["f".into(), "f01".into(), String::new(), "2".into()]), 5);
        assert!(count(&allowed()) >= 1);
    }
}
