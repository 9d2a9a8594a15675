//! Places in the GPU's memory where one block of a launch tells the others what it has read of the abort words. The kernels
//! have room for some of them, see `kernels/gate.cuh`.
//!
//! A stream that needs one has one for itself: its kernels run one after the other. Whoever finds none does without, and each
//! block reads the words.

use std::sync::{Mutex, PoisonError};

use super::driver::Address;
use super::kernels::{Gate, MOST_GATES};

/// The places of a GPU.
#[derive(Debug, Default)]
pub(super) struct Gates(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// So many were given out so far.
    used: u32,
    spare: Vec<GatePlace>,
}

/// A place, and how many launches it has seen.
#[derive(Debug)]
pub(super) struct GatePlace {
    number: u32,
    launches: u64,
}

impl Gates {
    /// One that nobody has.
    pub(super) fn take(&self) -> GatePlace {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(spare) = state.spare.pop() {
            return spare;
        }
        let number = state.used.min(MOST_GATES);
        state.used = number.saturating_add(1);
        GatePlace { number, launches: 0 }
    }

    /// For the next one, when all work of the last one is done.
    pub(super) fn give(&self, place: GatePlace) {
        // What is none is not kept.
        if place.number < MOST_GATES {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).spare.push(place);
        }
    }
}

impl GatePlace {
    /// For the next launch.
    pub(super) fn gate(&mut self, abort: [Address; 2]) -> Gate {
        self.launches += 1;
        Gate::new(abort, (self.number, self.launches))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_given_to_one_and_goes_on_counting() {
        let gates = Gates::default();
        let (mut first, second) = (gates.take(), gates.take());
        assert_ne!(first.number, second.number);
        first.gate([1, 0]);
        first.gate([1, 0]);
        let number = first.number;
        gates.give(first);
        let again = gates.take();
        assert_eq!((again.number, again.launches), (number, 2));
        // When there is none left, whoever comes does without.
        let all: Vec<_> = (0..MOST_GATES + 10).map(|_| gates.take()).collect();
        let none: Vec<_> = all.into_iter().filter(|place| place.number >= MOST_GATES).collect();
        assert_eq!(none.len(), 12);
        none.into_iter().for_each(|place| gates.give(place));
        assert_eq!(gates.take().number, MOST_GATES);
        gates.give(second);
        assert!(gates.take().number < MOST_GATES);
    }
}
