//! Whether an operation can go straight between the ranks' own memory. Each rank says in its progress line where
//! its tensors are, or why the others cannot reach them. All ranks see the same answers and so decide the same.

use tensorwire_device::{Deadline, DeviceId, Queue, Span};

use super::buffer::Buffer;
use super::lines::{Lines, Stop};
use super::operation::Operation;
use super::plan::{PAYLOAD, Shape, Workers};
use super::reached::layout;
use super::runner::Reach;
use crate::error::{Error, PeerFaultKind, Result};
use crate::ranks::{MEND, Ranks, SHORT_MEND};
use crate::shm::kind::{Detour, Kind};

/// Where a rank's tensors are, as others can reach them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Offer {
    /// Why not all that others need of this rank can be reached.
    pub(super) refused: Option<Detour>,
    /// The number of a region and where in it the tensor begins; nothing where nobody needs it.
    pub(super) input: Option<(u64, u64)>,
    pub(super) output: Option<(u64, u64)>,
    /// Which of the rank's GPUs they live on, where they do.
    pub(super) device: u8,
    /// From which GPUs all who work have reached the two before, see [`layout`].
    pub(super) reached: [u16; 2],
}

impl Offer {
    const INPUT: u64 = 1;
    const OUTPUT: u64 = 2;
    /// Where the reason for a refusal is.
    const REFUSED: u32 = 4;
    /// How many bits a place in a region has; above them is from where it was reached.
    const PLACE: u32 = 48;
    const PLACES: u64 = (1 << Self::PLACE) - 1;

    pub(super) fn to_bytes(self) -> [u8; PAYLOAD] {
        let mut flags = 0;
        flags |= u64::from(self.refused.map_or(0, Detour::code)) << Self::REFUSED;
        flags |= if self.input.is_some() { Self::INPUT } else { 0 };
        flags |= if self.output.is_some() { Self::OUTPUT } else { 0 };
        let (input, output) = (self.input.unwrap_or_default(), self.output.unwrap_or_default());
        let mut bytes = [0; PAYLOAD];
        let [before, after] = self.reached.map(|layout| u64::from(layout) << Self::PLACE);
        let input_at = input.1 & Self::PLACES | before;
        let output_at = output.1 & Self::PLACES | after;
        let words = [input.0 << 8 | flags, input_at, output.0 << 8 | u64::from(self.device), output_at];
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
            input: has(Self::INPUT).then_some((head >> 8, input_at & Self::PLACES)),
            output: has(Self::OUTPUT).then_some((output >> 8, output_at & Self::PLACES)),
            device: output as u8,
            reached: [input_at, output_at].map(|word| (word >> Self::PLACE) as u16),
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
            (Ok(input), Ok(output)) => Offer { refused: None, input, output, device, reached: [0; 2] },
            (Err(why), _) | (_, Err(why)) => Offer { refused: Some(why), ..Offer::default() },
        })
    }
}

/// What the ranks have agreed on, each from the offers of all.
pub(super) enum Accepted {
    /// It goes straight between the ranks' memory: what this rank needs of each. On GPUs also from which GPUs all was reached.
    Direct(Vec<Reach>, u16),
    /// The memory of this rank, by place, cannot be used.
    Not(usize, Detour),
}

/// Why a rank that works cannot use the memory of another, by place.
type OutOfReach = (usize, Error);

impl Lines {
    /// Maps what this rank needs of what all offer, and says in the shape who works. If a rank offers nothing, or those who work
    /// cannot reach its memory, gives its place and the reason instead.
    pub(super) fn accept(
        &mut self,
        group: &Ranks,
        queue: &mut dyn Queue,
        shape: &mut Shape,
        queued: bool,
        deadline: Deadline,
    ) -> Result<Accepted, Stop> {
        let mut offers = Vec::with_capacity(self.world);
        for place in 0..self.world {
            let mut bytes = [0; PAYLOAD];
            self.control.region().read(self.payload_at(place), &mut bytes)?;
            offers.push(Offer::from_bytes(&bytes));
        }
        let refusal = offers.iter().enumerate().find_map(|(place, offer)| Some((place, offer.refused?)));
        if let Some((place, why)) = refusal {
            return Ok(Accepted::Not(place, why));
        }
        if !queued {
            let peers = self.map(group, shape, &offers, None, deadline)?;
            return Ok(Accepted::Direct(peers.map_err(|(_, error)| error)?, 0));
        }
        let gpus: Vec<[u8; 16]> = offers
            .iter()
            .enumerate()
            .map(|(place, offer)| self.control.gpu_at(place, offer.device))
            .collect::<Result<_>>()?;
        let layout = layout(&gpus);
        shape.workers = workers(&gpus);
        let all = shape.workers.each(self.world);
        let peers = match all.contains(&self.me) {
            true => self.map(group, shape, &offers, Some(&gpus), deadline)?,
            false => Ok(Vec::new()),
        };
        let known = |(place, offer): (usize, &Offer)| {
            let needed = [shape.all_given(place) > 0, shape.all_taken(place) > 0];
            let places = [offer.input, offer.output].into_iter().zip(needed).zip(offer.reached);
            places.into_iter().all(|((at, needed), from)| at.is_none() || !needed || from == layout)
        };
        if self.world == 1 || offers.iter().enumerate().all(known) {
            return Ok(Accepted::Direct(peers.map_err(|(_, error)| error)?, layout));
        }
        if all.contains(&self.me) {
            let place = peers.as_ref().map_or_else(|(place, _)| *place as u64 + 1, |_| 0);
            let told = u64::from(self.number) << 32 | place;
            self.control.region().write(self.told_at(self.me), &told.to_le_bytes())?;
            self.signal(queue, TOLD)?;
        }
        // Of several, the first in place counts for all ranks.
        let mut refused = None;
        for place in all {
            if place != self.me {
                self.wait_for(queue, place, TOLD, deadline)?;
            }
            let mut told = [0; 8];
            self.control.region().read(self.told_at(place), &mut told)?;
            let told = u64::from_le_bytes(told);
            if (told >> 32) as u32 != self.number {
                return Err(Error::bug("a rank that works has not said what it reaches").into());
            }
            refused = refused.or((told as u32 as usize).checked_sub(1));
        }
        match (refused, peers) {
            (None, Ok(peers)) => Ok(Accepted::Direct(peers, layout)),
            (Some(refused), peers) => {
                if let Err((place, error)) = &peers {
                    let who = group.who(*place);
                    tracing::info!("an operation on GPUs goes through memory of the host: of {who}: {error}");
                }
                shape.told = 1;
                Ok(Accepted::Not(refused.min(self.world - 1), Detour::Unshareable))
            }
            (None, Err(_)) => Err(Error::bug("memory is out of reach, and nobody was told").into()),
        }
    }

    /// Maps what this rank needs of what all offer; with the GPUs of all ranks, where the operation is queued. What cannot be
    /// reached for a reason of the driver or the machine, and not of a rank, is told apart.
    fn map(
        &self,
        group: &Ranks,
        shape: &Shape,
        offers: &[Offer],
        gpus: Option<&[[u8; 16]]>,
        deadline: Deadline,
    ) -> Result<Result<Vec<Reach>, OutOfReach>, Stop> {
        let mend = if gpus.is_some() { SHORT_MEND } else { MEND };
        let mut peers = Vec::with_capacity(self.world);
        for (place, offer) in offers.iter().enumerate() {
            let reach = |at: Option<(u64, u64)>, len: usize| -> Result<Buffer> {
                let Some((id, at)) = at.filter(|_| place != self.me && len > 0) else {
                    return Ok(Buffer::Empty);
                };
                let region = group.memory.peer_within(place, id, self.stop(), deadline, mend)?;
                let at = usize::try_from(at).unwrap_or(usize::MAX);
                let there = Span::new(region, at..at.saturating_add(len)).map_err(|_| {
                    let (who, rank) = (group.who(place), group.control.ranks().get(place).copied());
                    Error::peer(PeerFaultKind::Misbehaved, who, rank, "it offers what is not in its memory")
                })?;
                Ok(Buffer::One(there))
            };
            let all = || -> Result<Reach> {
                if let Some(gpus) = gpus {
                    self.open_peer(group, place, gpus)?;
                }
                let (given, taken) = (shape.all_given(place), shape.all_taken(place));
                let input = reach(offer.input, given)?;
                let output = match offer.input == offer.output && given == taken {
                    true => input.clone(),
                    false => reach(offer.output, taken)?,
                };
                Ok(Reach { input, output })
            };
            match all() {
                Ok(reach) => peers.push(reach),
                Err(error) if is_out_of_reach(&error) => return Ok(Err((place, error))),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Ok(peers))
    }

    /// Has this rank's GPU reach that of another rank.
    fn open_peer(&self, group: &Ranks, place: usize, gpus: &[[u8; 16]]) -> Result<()> {
        let (Some(&from), Some(&to)) = (gpus.get(self.me), gpus.get(place)) else { return Ok(()) };
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
}

/// The tick at which those who work have said whether they reach all memory (`Desk::TOLD`).
const TOLD: u32 = 2;

/// Whether the reason is one of the driver or of the machine, here or where the memory is.
fn is_out_of_reach(error: &Error) -> bool {
    match error {
        Error::Unsupported { .. } | Error::Device { .. } | Error::Io { .. } => true,
        Error::Peer(fault) => fault.kind == PeerFaultKind::Refused,
        _ => false,
    }
}

/// On each GPU one rank works for all.
fn workers(gpus: &[[u8; 16]]) -> Workers {
    let first = |gpu: &[u8; 16]| gpus.iter().position(|other| other == gpu).unwrap_or(0);
    Workers::by_device(&gpus.iter().map(first).collect::<Vec<usize>>())
}
