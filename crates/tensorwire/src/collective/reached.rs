//! What a rank knows of its own memory on GPUs: whether the ranks that work have reached it. Those who work map memory of others
//! behind the meeting, and may fail. A rank says in its offer whether its memory was reached before, by the same GPUs. If all
//! say so, nobody asks. Otherwise those who work say whether they have it, and all wait for their word before any step is queued.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::offer::Offer;
use crate::shm::kind::Detour;

/// Which GPU each rank has its tensors on, as a number that differs where the GPUs differ, nearly always. Never zero.
pub(super) fn layout(gpus: &[[u8; 16]]) -> u16 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in gpus.iter().flatten() {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    }
    ((hash ^ hash >> 16 ^ hash >> 32 ^ hash >> 48) as u16).max(1)
}

/// How long memory that could not be reached is not offered again: the first time, and at most. It doubles each time.
const RESTS: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));
/// What was known of more memory than that is forgotten.
const MOST: usize = 4096;

/// Own memory that was offered, by its number.
#[derive(Debug, Default)]
pub(super) struct Reached(HashMap<u64, Known>);

#[derive(Debug, Clone, Copy)]
enum Known {
    /// All who work have reached it, from these GPUs.
    From(u16),
    /// Somebody could not. It is not offered until then, and after the next time not for so long.
    Not(Instant, Duration),
}

impl Reached {
    /// Says in an offer what is known. Memory that could not be reached a moment ago is not offered.
    pub(super) fn note(&self, offer: &mut Offer) {
        let known = |at: Option<(u64, u64)>| at.and_then(|(id, _)| self.0.get(&id).copied());
        let now = Instant::now();
        for at in [offer.input, offer.output] {
            if let Some(Known::Not(again, _)) = known(at)
                && now < again
            {
                *offer = Offer { refused: Some(Detour::Unshareable), ..Offer::default() };
                return;
            }
        }
        let from = |at| if let Some(Known::From(layout)) = known(at) { layout } else { 0 };
        offer.reached = [from(offer.input), from(offer.output)];
    }

    /// All who work have reached what was offered and is needed.
    pub(super) fn confirm(&mut self, offer: &Offer, needed: [bool; 2], layout: u16) {
        for (at, needed) in [offer.input, offer.output].into_iter().zip(needed) {
            if let Some((id, _)) = at.filter(|_| needed) {
                self.room();
                self.0.insert(id, Known::From(layout));
            }
        }
    }

    /// Somebody could not.
    pub(super) fn refuse(&mut self, offer: &Offer) {
        for (id, _) in [offer.input, offer.output].into_iter().flatten() {
            let rest = match self.0.get(&id) {
                Some(Known::Not(_, rest)) => (*rest * 2).min(RESTS.1),
                _ => RESTS.0,
            };
            self.room();
            self.0.insert(id, Known::Not(Instant::now() + rest, rest));
        }
    }

    fn room(&mut self) {
        if self.0.len() >= MOST {
            self.0.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(id: u64) -> Offer {
        Offer { input: Some((id, 0)), output: Some((id + 1, 0)), ..Offer::default() }
    }

    #[test]
    fn memory_is_known_once_it_was_reached() {
        let (mut reached, here) = (Reached::default(), layout(&[[1; 16], [2; 16]]));
        let noted = |reached: &Reached| {
            let mut offer = offer(4);
            reached.note(&mut offer);
            offer.reached
        };
        assert_eq!(noted(&reached), [0, 0]);
        reached.confirm(&offer(4), [true, false], here);
        assert_eq!(noted(&reached), [here, 0]);
        reached.confirm(&offer(4), [true, true], here);
        assert_eq!(noted(&reached), [here, here]);
        assert_ne!(here, layout(&[[2; 16], [1; 16]]));
    }

    #[test]
    fn memory_that_was_not_reached_rests() {
        let mut reached = Reached::default();
        reached.refuse(&offer(4));
        let mut again = offer(4);
        reached.note(&mut again);
        assert_eq!(again, Offer { refused: Some(Detour::Unshareable), ..Offer::default() });
        let mut other = offer(6);
        reached.note(&mut other);
        assert_eq!(other, offer(6));
        // It is tried again when the time is over, and rests for longer if that is in vain, too.
        reached.refuse(&offer(4));
        let Some(Known::Not(_, rest)) = reached.0.get(&4) else { panic!("it is not known") };
        assert_eq!(*rest, 2 * RESTS.0);
        reached.0.insert(4, Known::Not(Instant::now(), RESTS.1));
        reached.0.insert(5, Known::Not(Instant::now(), RESTS.1));
        let mut later = offer(4);
        reached.note(&mut later);
        assert_eq!(later, offer(4));
    }
}
