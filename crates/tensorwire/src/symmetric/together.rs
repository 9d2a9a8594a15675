//! Work of all ranks' queues that waits for each other while it runs.
//!
//! The work of a rank begins when the work of all ranks has begun, and it ends when all of them are done: see [`meeting`]. Whether
//! that can be is decided at the rendezvous, for all ranks alike.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tensorwire_device::fork::PerProcess;
use tensorwire_device::gpu::MOST_REDUCED;
use tensorwire_device::meeting::{self, Meeting};
use tensorwire_device::secret::Id;
use tensorwire_device::{DeviceId, Dtype, Queue, ReduceOp, Span, View};

use super::signals::Signals;
use crate::error::{Error, Result};
use crate::interrupt::Asked;
use crate::ranks::Ranks;

/// Handles of a process on one GPU that may have kernels which wait, each on all of its channels.
const HANDLES: usize = 2;

/// What keeps the work of a rank from meeting that of the others. As a number it travels to the other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Hindrance {
    None = 1,
    /// The rank does not reach the memory of all others.
    Reach = 2,
    /// Some ranks have their memory on the host, and some on GPUs.
    Mixed = 3,
    /// Processes that share a GPU take turns, unless a server does their work.
    Turns = 4,
    /// Ranks of one process on one GPU: their queues may share a hardware queue.
    Process = 5,
    Many = 6,
    /// As many handles of its process on this GPU as there is room for may work already.
    Handles = 7,
}

/// How many handles of each context of this process may have kernels that wait, on each GPU.
static AT_WORK: PerProcess<Mutex<HashMap<(Id, DeviceId), usize>>> = PerProcess::new(Mutex::default);

/// One of them, until it is dropped. Graphs are replayed at any time, so it counts as long as the handle is there.
#[derive(Debug)]
pub(super) struct AtWork((Id, DeviceId));

impl AtWork {
    /// Takes a place on a GPU, if one is free.
    fn take(context: Id, gpu: &DeviceId) -> Option<Self> {
        let place = (context, gpu.clone());
        let mut all = AT_WORK.get().lock().unwrap_or_else(PoisonError::into_inner);
        let count = all.entry(place.clone()).or_default();
        if *count >= HANDLES {
            return None;
        }
        *count += 1;
        Some(Self(place))
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        let mut all = AT_WORK.get().lock().unwrap_or_else(PoisonError::into_inner);
        // In a forked child it was never counted.
        if let Some(count) = all.get_mut(&self.0) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.0);
            }
        }
    }
}

impl Hindrance {
    /// Of this rank, with memory at these places; and the place among the handles on its GPU that it has taken.
    pub(super) fn of(ranks: &Ranks, places: &[&DeviceId], reaches_all: bool) -> (Self, Option<AtWork>) {
        let hindrance = Self::without_others(ranks, places, reaches_all);
        match places.get(ranks.rank) {
            Some(gpu) if hindrance == Self::None && **gpu != DeviceId::Host => {
                match AtWork::take(ranks.context.share().identity(), gpu) {
                    None => (Self::Handles, None),
                    taken => (Self::None, taken),
                }
            }
            _ => (hindrance, None),
        }
    }

    /// The same without a look at other handles.
    fn without_others(ranks: &Ranks, places: &[&DeviceId], reaches_all: bool) -> Self {
        let Some(home) = places.get(ranks.rank) else { return Self::Reach };
        let beside = places.iter().filter(|place| *place == home).count();
        if places.len() > MOST_REDUCED {
            return Self::Many;
        }
        if places.iter().any(|place| (**place == DeviceId::Host) != (**home == DeviceId::Host)) {
            return Self::Mixed;
        }
        if !reaches_all {
            return Self::Reach;
        }
        if **home == DeviceId::Host || beside == 1 {
            return Self::None;
        }
        if ranks.shares_process() {
            return Self::Process;
        }
        let served = ranks.context.device(home).is_ok_and(|device| device.is_served());
        if served { Self::None } else { Self::Turns }
    }

    fn from_number(number: u8) -> Self {
        let all =
            [Self::None, Self::Reach, Self::Mixed, Self::Turns, Self::Process, Self::Many, Self::Handles];
        all.into_iter().find(|hindrance| *hindrance as u8 == number).unwrap_or(Self::Reach)
    }

    fn reason(self) -> &'static str {
        match self {
            Self::None => "nothing",
            Self::Reach => "it does not reach the memory of all others",
            Self::Mixed => "some ranks have their memory on the host, and some on GPUs",
            Self::Turns => "it shares its GPU with other ranks without MPS, so that their kernels take turns",
            Self::Process => {
                "it is a thread of a process that has other ranks on the same GPU, whose streams may share a hardware queue"
            }
            Self::Many => "there are more ranks than one kernel reduces of",
            Self::Handles => {
                "its process has two handles on that GPU whose kernels may wait, and a third has no room; drop one of them, and make this one anew"
            }
        }
    }
}

/// One call.
pub(super) struct Round<'a> {
    pub(super) ranks: &'a Ranks,
    pub(super) signals: &'a Signals,
    pub(super) channel: usize,
    pub(super) timeout: Duration,
}

/// What a handle needs for it.
#[derive(Debug)]
pub(super) struct Together {
    /// The words of all ranks.
    words: Vec<Span>,
    /// How many blocks of a kernel may wait.
    blocks: usize,
    /// The first rank that cannot.
    hindered: Option<(usize, Hindrance)>,
    /// Where all can: this handle's place on its GPU.
    _at_work: Option<AtWork>,
}

impl Together {
    /// `known` is what all ranks have said; `blocks` is how many of each rank's run at the same time.
    pub(super) fn new(
        words: Vec<Span>,
        known: &[u8],
        at_work: Option<AtWork>,
        places: &[&DeviceId],
        blocks: &[u64],
    ) -> Self {
        let hindered = known.iter().enumerate().map(|(rank, &number)| (rank, Hindrance::from_number(number)));
        let hindered = hindered.into_iter().find(|(_, hindrance)| *hindrance != Hindrance::None);
        let beside = |place: &&DeviceId| places.iter().filter(|other| *other == place).count();
        let most = places.iter().map(beside).max().unwrap_or(1).max(1);
        let least = blocks.iter().copied().min().unwrap_or(1);
        let each = usize::try_from(least).unwrap_or(usize::MAX) / (most * meeting::CHANNELS * HANDLES);
        let _at_work = at_work.filter(|_| hindered.is_none());
        Self { words, blocks: each.clamp(1, meeting::BLOCKS), hindered, _at_work }
    }

    /// Refuses what cannot be, before anybody waits for it.
    pub(super) fn check(&self, round: &Round<'_>, what: &str) -> Result<()> {
        if let Some((rank, hindrance)) = self.hindered {
            return Err(Error::Unsupported {
                what: format!("{what} by work of all ranks that waits for each other"),
                need:
                    "kernels of all ranks that run at the same time; call the operation of the group instead"
                        .into(),
                have: format!("{}: {}", round.ranks.who(rank), hindrance.reason()),
            });
        }
        if round.channel >= meeting::CHANNELS {
            return Err(Error::misuse(format!(
                "there is no channel {} for work of all ranks; there are 0 to {}",
                round.channel,
                meeting::CHANNELS - 1
            )));
        }
        (0..round.ranks.world()).try_for_each(|rank| round.signals.check_there(round.ranks, rank, || true))
    }

    /// One reduction that meets those of the other ranks. No rank has more than `largest` bytes.
    pub(super) fn reduce(
        &self,
        round: &Round<'_>,
        queue: &mut dyn Queue,
        (op, dtype): (ReduceOp, Dtype),
        (inputs, outputs): (&[View<'_>], &[View<'_>]),
        largest: usize,
    ) -> Result<()> {
        self.meet(round, largest, |meeting| {
            // What was queued before has its own words: the others count on this rank's part once it has come.
            queue.begin(Some(meeting.abort))?;
            Ok(queue.reduce_together(op, dtype, inputs, outputs, meeting)?)
        })
    }

    /// Any work between two meetings: it begins when all ranks have come, and ends when all have done theirs. Where it is bound, it
    /// writes nothing if the first meeting fails.
    pub(super) fn between(
        &self,
        round: &Round<'_>,
        queue: &mut dyn Queue,
        bound: bool,
        work: impl FnOnce(&mut dyn Queue) -> Result<()>,
    ) -> Result<()> {
        self.meet(round, 0, |meeting| {
            queue.begin(Some(meeting.abort))?;
            queue.meet(meeting)?;
            if !bound {
                queue.begin(None)?;
            }
            work(queue)?;
            if !bound {
                queue.begin(Some(meeting.abort))?;
            }
            Ok(queue.meet(meeting)?)
        })
    }

    fn meet(
        &self,
        round: &Round<'_>,
        largest: usize,
        work: impl FnOnce(&Meeting<'_>) -> Result<()>,
    ) -> Result<()> {
        let words: Vec<View<'_>> = self.words.iter().map(Span::view).collect();
        let (abort, failure) = round.signals.ends()?;
        round.signals.meets(round.channel);
        let asked = Asked::default();
        work(&Meeting {
            words: &words,
            rank: round.ranks.rank,
            channel: round.channel,
            blocks: self.blocks,
            largest,
            abort,
            failure: &failure,
            timeout: round.timeout,
            goes_on: &|| asked.goes_on(),
        })
        // The caller's thread took part, and the handle knows how it ended.
        .map_err(|error| {
            let why = asked.end().and_then(|()| round.signals.check_usable(round.ranks));
            why.err().unwrap_or(error)
        })
    }

    /// Gives up the words of all ranks but this one's, when the handle goes.
    pub(super) fn take(&mut self, rank: usize) -> Option<Span> {
        let mut words = std::mem::take(&mut self.words);
        (rank < words.len()).then(|| words.swap_remove(rank))
    }

    /// Whether it can be, in one line.
    pub(super) fn explain(&self, ranks: &Ranks) -> String {
        match self.hindered {
            None => {
                format!("queues can work together: up to {} blocks of each rank's kernels wait", self.blocks)
            }
            Some((rank, hindrance)) => {
                format!("queues cannot work together: {}: {}", ranks.who(rank), hindrance.reason())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hindrances_travel_as_numbers() {
        for number in 1..=7 {
            assert_eq!(Hindrance::from_number(number) as u8, number);
        }
        assert_eq!(Hindrance::from_number(0), Hindrance::Reach);
    }

    #[test]
    fn room_is_left_for_all() {
        let gpu = DeviceId::Gpu([1; 16]);
        let blocks = |ranks: usize| {
            Together::new(Vec::new(), &vec![1; ranks], None, &vec![&gpu; ranks], &vec![396; ranks]).blocks
        };
        assert_eq!([blocks(2), blocks(4), blocks(8)], [24, 12, 6]);
        assert_eq!(Together::new(Vec::new(), &[1], None, &[&DeviceId::Host], &[1]).blocks, 1);
        let some = Together::new(Vec::new(), &[1, 4], None, &[&gpu, &gpu], &[396, 396]);
        assert_eq!(some.hindered, Some((1, Hindrance::Turns)));
    }
}
