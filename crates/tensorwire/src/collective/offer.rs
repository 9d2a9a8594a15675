//! Whether an operation can go straight between the ranks' own memory. Each rank says in its progress line where
//! its tensors are, or why the others cannot reach them. All ranks see the same answers and so decide the same.

use tensorwire_device::{Deadline, DeviceId, Span};

use super::buffer::Buffer;
use super::lines::{Lines, Stop};
use super::operation::Operation;
use super::plan::{PAYLOAD, Shape, Workers};
use super::runner::Reach;
use crate::error::{Error, PeerFaultKind, Result};
use crate::ranks::Ranks;
use crate::shm::kind::{Detour, Kind};

/// Where a rank's tensors are, as others can reach them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Offer {
    /// Why not all that others need of this rank can be reached.
    pub(super) refused: Option<Detour>,
    /// The number of a region and where in it the tensor begins; nothing where nobody needs it.
    input: Option<(u64, u64)>,
    output: Option<(u64, u64)>,
    /// Which of the rank's GPUs they live on, where they do.
    device: u8,
}

impl Offer {
    const INPUT: u64 = 1;
    const OUTPUT: u64 = 2;
    /// Where the reason for a refusal is.
    const REFUSED: u32 = 4;

    pub(super) fn to_bytes(self) -> [u8; PAYLOAD] {
        let mut flags = 0;
        flags |= u64::from(self.refused.map_or(0, Detour::code)) << Self::REFUSED;
        flags |= if self.input.is_some() { Self::INPUT } else { 0 };
        flags |= if self.output.is_some() { Self::OUTPUT } else { 0 };
        let (input, output) = (self.input.unwrap_or_default(), self.output.unwrap_or_default());
        let mut bytes = [0; PAYLOAD];
        let words = [input.0 << 8 | flags, input.1, output.0 << 8 | u64::from(self.device), output.1];
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
            // A rank that offers nothing and gives no reason has written nonsense. Its memory is not used.
            refused: Detour::from_code((head >> Self::REFUSED & 15) as u8),
            input: has(Self::INPUT).then_some((head >> 8, input_at)),
            output: has(Self::OUTPUT).then_some((output >> 8, output_at)),
            device: output as u8,
        }
    }
}

impl Operation {
    /// What this rank offers. An error says why its memory of a GPU cannot be reached.
    pub(super) fn offer(&self, group: &Ranks, me: usize, device: u8) -> Result<Offer> {
        // On a GPU one rank may work for all others, and needs what they give and where they get it.
        let queued = self.gpu().is_some();
        let gives = match self.kind {
            _ if queued => true,
            Kind::Broadcast | Kind::Scatter => me == self.root,
            Kind::Gather => me != self.root,
            _ => true,
        };
        let is_reached = match self.kind {
            _ if queued => true,
            Kind::AllReduce => true,
            Kind::Reduce => me == self.root,
            _ => false,
        };
        let find = |needed: bool, buffer: &Buffer| -> Result<Result<Option<(u64, u64)>, Detour>> {
            Ok(match buffer {
                _ if !needed => Ok(None),
                Buffer::Empty => Ok(None),
                Buffer::One(span) => match group.memory.find(span) {
                    Ok(Some((id, at))) => Ok(Some((id, at as u64))),
                    Ok(None) if self.is_packed_in(span) => Err(Detour::Gaps),
                    Ok(None) => Err(Detour::Private),
                    Err(error @ Error::Unsupported { .. }) if queued => {
                        tracing::info!("{} goes through memory of the host: {error}", self.kind);
                        Err(Detour::Unshareable)
                    }
                    Err(error) => return Err(error),
                },
                Buffer::Many(..) => Err(Detour::Scattered),
            })
        };
        let input = find(gives, &self.input)?;
        let output = match (&self.input, &self.output) {
            (Buffer::One(one), Buffer::One(other))
                if gives && is_reached && one.view().is_same(other.view()) =>
            {
                input
            }
            _ => find(is_reached, &self.output)?,
        };
        Ok(match (input, output) {
            (Ok(input), Ok(output)) => Offer { refused: None, input, output, device },
            (Err(why), _) | (_, Err(why)) => Offer { refused: Some(why), ..Offer::default() },
        })
    }
}

impl Lines {
    /// Maps what this rank needs of what all offer, and says in the shape who works. If a rank offers nothing, gives its place
    /// and the reason instead.
    pub(super) fn accept(
        &mut self,
        group: &Ranks,
        shape: &mut Shape,
        queued: bool,
        deadline: Deadline,
    ) -> Result<Result<Vec<Reach>, (usize, Detour)>, Stop> {
        let mut offers = Vec::with_capacity(self.world);
        for place in 0..self.world {
            let mut bytes = [0; PAYLOAD];
            self.control.region().read(self.payload_at(place), &mut bytes)?;
            offers.push(Offer::from_bytes(&bytes));
        }
        let refusal = offers.iter().enumerate().find_map(|(place, offer)| Some((place, offer.refused?)));
        if let Some(refusal) = refusal {
            return Ok(Err(refusal));
        }
        if queued {
            shape.workers = self.workers(&offers)?;
            if !shape.workers.each(self.world).contains(&self.me) {
                return Ok(Ok(Vec::new()));
            }
        }
        let mine = offers.get(self.me).map_or(0, |offer| offer.device);
        let mut peers = Vec::with_capacity(self.world);
        for (place, offer) in offers.into_iter().enumerate() {
            if queued {
                self.open_peer(group, place, mine, offer.device)?;
            }
            let reach = |at: Option<(u64, u64)>, len: usize| -> Result<Buffer> {
                let Some((id, at)) = at.filter(|_| place != self.me && len > 0) else {
                    return Ok(Buffer::Empty);
                };
                let region = group.memory.peer(place, id, self.stop(), deadline)?;
                let at = usize::try_from(at).unwrap_or(usize::MAX);
                let there = Span::new(region, at..at.saturating_add(len)).map_err(|_| {
                    let (who, rank) = (group.who(place), group.control.ranks().get(place).copied());
                    Error::peer(PeerFaultKind::Misbehaved, who, rank, "it offers what is not in its memory")
                })?;
                Ok(Buffer::One(there))
            };
            let (given, taken) = (shape.all_given(place), shape.all_taken(place));
            let input = reach(offer.input, given)?;
            let output = match offer.input == offer.output && given == taken {
                true => input.clone(),
                false => reach(offer.output, taken)?,
            };
            peers.push(Reach { input, output });
        }
        Ok(Ok(peers))
    }

    /// Has this rank's GPU reach that of another rank.
    fn open_peer(&self, group: &Ranks, place: usize, mine: u8, theirs: u8) -> Result<()> {
        let from = self.control.gpu_at(self.me, mine)?;
        let to = self.control.gpu_at(place, theirs)?;
        if from == to {
            return Ok(());
        }
        let access = group.context.access()?;
        let index = |uuid: [u8; 16]| access.index(&DeviceId::Gpu(uuid));
        let opened = access.open_peer(index(from)?, index(to)?)?;
        match opened.reason() {
            None => Ok(()),
            Some(reason) => Err(Error::Unsupported {
                what: format!(
                    "an operation on tensors of {} and of {}",
                    DeviceId::Gpu(from),
                    DeviceId::Gpu(to)
                ),
                need: format!("a GPU that reaches the memory of {}", group.who(place)),
                have: reason.to_owned(),
            }),
        }
    }

    /// On each GPU one rank works for all.
    fn workers(&self, offers: &[Offer]) -> Result<Workers> {
        let gpus: Vec<[u8; 16]> = offers
            .iter()
            .enumerate()
            .map(|(place, offer)| self.control.gpu_at(place, offer.device))
            .collect::<Result<_>>()?;
        let first = |gpu: &[u8; 16]| gpus.iter().position(|other| other == gpu).unwrap_or(0);
        Ok(Workers::by_device(&gpus.iter().map(first).collect::<Vec<usize>>()))
    }
}
