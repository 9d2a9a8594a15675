//! The waits of a queue that an abort word ends.

use crate::flag::{Abort, Flag};

/// Flags, each with its value; none where the word belongs to all of a piece of work.
#[derive(Debug, Clone, Default)]
pub(crate) struct Awaited(Vec<(Flag, u32)>);

impl Awaited {
    pub(crate) fn new(flags: Vec<(Flag, u32)>) -> Self {
        Self(flags)
    }

    /// Whether the waits have ended by signals, so that nobody needs the word any more. Whoever ends a wait in the place of its
    /// signal sets the word before.
    pub(crate) fn are_over(&self, abort: &Abort) -> bool {
        !self.0.is_empty() && self.0.iter().all(|(flag, value)| flag.reached(*value)) && !abort.is_set()
    }

    /// Adds what the same word ends. What belongs to all of the work stays so.
    pub(crate) fn join(&mut self, more: Self) {
        if self.0.is_empty() || more.0.is_empty() {
            self.0.clear();
        } else {
            self.0.extend(more.0);
        }
    }
}
