//! Whether the ranks of a host have a core each: a wait that spins on a core which the awaited rank needs is worse than
//! one that sleeps.

use std::time::Duration;

use super::control::Control;

/// How long a wait looks before it sleeps, where every rank has a core. Longer would help nobody whose peer is on time,
/// and takes the core from others on a busy machine.
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

/// How long a wait of a group shall look before it sleeps. All ranks have said by now where they may run.
pub(crate) fn spin(control: &Control) -> Duration {
    let ranks = control.ranks().len();
    let masks: Vec<String> = (0..ranks).map(|place| control.card(place, 5)).collect();
    let cores = distinct(&masks);
    // A limit on processor time counts for all ranks together, as far as this one can see.
    let own = count(&allowed());
    let limit = std::thread::available_parallelism().map_or(own, Into::into);
    let limit = if limit < own { limit } else { cores };
    if cores.min(limit) < ranks { CROWDED } else { ALONE }
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
    fn cores_are_counted_once() {
        assert_eq!(count("f01"), 5);
        assert_eq!(distinct(&["f".into(), "f01".into(), String::new(), "2".into()]), 5);
        assert!(count(&allowed()) >= 1);
    }
}
