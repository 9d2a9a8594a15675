//! Whether an operation can go straight between the ranks' own memory: each rank says in its progress line where its
//! tensors are, and all see the same answers.

use tensorwire_device::{Deadline, Span};

use super::buffer::Buffer;
use super::exec::{Executor, Reach, Stop};
use super::operation::Operation;
use super::plan::{PAYLOAD, Shape};
use crate::error::Result;
use crate::ranks::Ranks;
use crate::shm::kind::Kind;

/// Where a rank's tensors are, as others can reach them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Offer {
    /// Whether all that others need of this rank can be reached.
    pub(super) accepts: bool,
    /// The number of a region and where in it the tensor begins; nothing where nobody needs it.
    input: Option<(u64, u64)>,
    output: Option<(u64, u64)>,
}

impl Offer {
    const ACCEPTS: u64 = 1;
    const INPUT: u64 = 2;
    const OUTPUT: u64 = 4;

    pub(super) fn to_bytes(self) -> [u8; PAYLOAD] {
        let mut flags = 0;
        flags |= if self.accepts { Self::ACCEPTS } else { 0 };
        flags |= if self.input.is_some() { Self::INPUT } else { 0 };
        flags |= if self.output.is_some() { Self::OUTPUT } else { 0 };
        let (input, output) = (self.input.unwrap_or_default(), self.output.unwrap_or_default());
        let mut bytes = [0; PAYLOAD];
        let words = [input.0 << 8 | flags, input.1, output.0, output.1];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: &[u8; PAYLOAD]) -> Self {
        let mut words = bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        let mut next = || words.next().unwrap_or(0);
        let (head, input_at, output, output_at) = (next(), next(), next(), next());
        let has = |flag: u64| head & flag != 0;
        Self {
            accepts: has(Self::ACCEPTS),
            input: has(Self::INPUT).then_some((head >> 8, input_at)),
            output: has(Self::OUTPUT).then_some((output, output_at)),
        }
    }
}

impl Operation {
    /// What this rank offers.
    pub(super) fn offer(&self, group: &Ranks, me: usize) -> Offer {
        let gives = match self.kind {
            Kind::Broadcast | Kind::Scatter => me == self.root,
            Kind::Gather => me != self.root,
            _ => true,
        };
        let is_reached = match self.kind {
            Kind::AllReduce => true,
            Kind::Reduce => me == self.root,
            _ => false,
        };
        let find = |needed: bool, buffer: &Buffer| match buffer {
            _ if !needed => Some(None),
            Buffer::Empty => Some(None),
            Buffer::One(span) => group.memory.find(span).map(|(id, at)| Some((id, at as u64))),
            Buffer::Many(..) => None,
        };
        match (find(gives, &self.input), find(is_reached, &self.output)) {
            (Some(input), Some(output)) => Offer { accepts: true, input, output },
            _ => Offer::default(),
        }
    }
}

impl Executor {
    /// Maps what all ranks offer, if all do.
    pub(super) fn accept(
        &mut self,
        group: &Ranks,
        shape: &Shape,
        deadline: Deadline,
    ) -> Result<Option<Vec<Reach>>, Stop> {
        let mut offers = Vec::with_capacity(self.world);
        for place in 0..self.world {
            let mut bytes = [0; PAYLOAD];
            self.control.region().read(self.payload_at(place), &mut bytes)?;
            offers.push(Offer::from_bytes(&bytes));
        }
        if offers.iter().any(|offer| !offer.accepts) {
            return Ok(None);
        }
        let mut peers = Vec::with_capacity(self.world);
        for (place, offer) in offers.into_iter().enumerate() {
            let reach = |at: Option<(u64, u64)>, len: usize| -> Result<Buffer> {
                let Some((id, at)) = at.filter(|_| place != self.me) else { return Ok(Buffer::Empty) };
                let region = group.memory.peer(place, id, self.stop(), deadline)?;
                let at = usize::try_from(at).unwrap_or(usize::MAX);
                Ok(Buffer::One(Span::new(region, at..at.saturating_add(len))?))
            };
            let input = reach(offer.input, shape.all_given(place))?;
            let output = reach(offer.output, shape.whole())?;
            peers.push(Reach { input, output });
        }
        Ok(Some(peers))
    }
}
