//! Operations that the queues of all ranks do together, without a meeting on the host.
//!
//! Reductions read the memory of all ranks in one piece of work that meets that of the others. What only moves bytes is copies
//! between two meetings. A rank writes to the memory of others only in [`Symmetric::all_reduce_on`]: everything else is pulled
//! into the caller's own memory.

use std::ops::Range;
use std::time::Duration;

use tensorwire_device::{Caching, Deadline, Dtype, Queue, ReduceOp, Span, View};

use super::Symmetric;
use super::together::Round;
use crate::error::{Error, Result};

/// Bytes that the part of a rank is a multiple of: nobody writes to another one's line.
const PART: usize = 128;

/// Who copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mover {
    /// Kernels: all copies at once. They write nothing if a rank does not come.
    Kernels,
    /// The copy engines of the device, which leave its processors to kernels that compute at the same time. Engines look at no
    /// abort word: if a rank does not come, they copy what is there into the caller's own memory.
    Engines,
}

impl Symmetric {
    /// Reduces a part of the memory of all ranks, on each to the same result, in place: one piece of work on each rank's queue
    /// that waits for that of the others. It has the bits of [`Group::all_reduce`](crate::Group::all_reduce). All ranks call it
    /// with the same operation, type, bytes and channel. Each rank reduces a part, and writes it to all (*two-shot*).
    ///
    /// The ranks do not meet on the host, and no stream waits. So this is quick, and a device that records graphs can replay
    /// it; the handle must then live longer than the graph, on all ranks. But the work of all ranks must run at the same time: each rank
    /// has a GPU of its own, or a server runs the work of all processes (MPS). Otherwise it is refused with the reason, and
    /// [`Group::all_reduce`](crate::Group::all_reduce) is the way to go. With memory of the host, the calling thread does it.
    ///
    /// Work that is under way at the same time, on several queues, needs a channel for each queue: 0 to
    /// [`meeting::CHANNELS`](tensorwire_device::meeting::CHANNELS) - 1. All ranks queue such work in the same order.
    ///
    /// Nobody is there to hear it if a rank does not come before the deadline. Then the work ends on all ranks. A rank that waited
    /// for another from the beginning writes nothing, and neither does what is queued behind it. From then on every call of this
    /// handle gives the error, and [`check`](Self::check) does. So it is where a rank dies.
    ///
    /// All of this holds for the other operations here as well.
    pub fn all_reduce_on(
        &self,
        queue: &mut dyn Queue,
        op: ReduceOp,
        dtype: Dtype,
        bytes: Range<usize>,
        channel: usize,
        deadline: Deadline,
    ) -> Result<()> {
        let round = self.round(&op.to_string(), channel, deadline)?;
        whole_elements(op, dtype, &bytes)?;
        let (part, largest) = part(bytes.end - bytes.start, dtype.size(), self.world(), self.rank());
        // All of it must be there, and not only the part.
        let all = self.everywhere(&bytes)?;
        let views = slices(&all, &part)?;
        self.0.together.reduce(&round, queue, (op, dtype), (&views, &views), largest)
    }

    /// The same, but each rank reduces all of it, into `output`, which is apart from its symmetric memory (*one-shot*). It reads
    /// more and writes less: for small sizes.
    pub fn one_shot_on(
        &self,
        queue: &mut dyn Queue,
        (op, dtype): (ReduceOp, Dtype),
        bytes: Range<usize>,
        output: &Span,
        channel: usize,
        deadline: Deadline,
    ) -> Result<()> {
        let round = self.round(&op.to_string(), channel, deadline)?;
        whole_elements(op, dtype, &bytes)?;
        let views = self.everywhere(&bytes)?;
        as_long("one_shot", output, bytes.len())?;
        self.apart("one_shot", &bytes, output)?;
        self.0.together.reduce(&round, queue, (op, dtype), (&views, &[output.view()]), bytes.len())
    }

    /// Each rank gets its part of the reduction of `bytes` of all ranks: they are as many equal parts as there are ranks. `output`
    /// may be exactly this rank's part of its symmetric memory; otherwise it is apart from `bytes` there.
    ///
    /// Engines copy the parts of all ranks into memory of this rank first, which then reduces them by itself.
    pub fn reduce_scatter_on(
        &self,
        queue: &mut dyn Queue,
        (op, dtype): (ReduceOp, Dtype),
        (bytes, output): (Range<usize>, &Span),
        by: Mover,
        channel: usize,
        deadline: Deadline,
    ) -> Result<()> {
        let round = self.round("reduce_scatter", channel, deadline)?;
        whole_elements(op, dtype, &bytes)?;
        let parts = self.parts("reduce_scatter", &bytes)?;
        if !parts[self.rank()].len().is_multiple_of(dtype.size()) {
            return Err(Error::misuse(format!(
                "the parts of bytes {bytes:?} are not whole elements of {dtype}"
            )));
        }
        let (all, own) = (self.everywhere(&bytes)?, parts[self.rank()].clone());
        let views = slices(&all, &own)?;
        as_long("reduce_scatter", output, own.len())?;
        if !views[self.rank()].is_same(output.view()) {
            self.apart("reduce_scatter", &bytes, output)?;
        }
        if by == Mover::Kernels {
            return self.0.together.reduce(&round, queue, (op, dtype), (&views, &[output.view()]), own.len());
        }
        let pool = self.ranks().context.pool(&self.0.own.device())?;
        let taken: Vec<Span> = views
            .iter()
            .map(|view| Ok(Span::whole(pool.alloc(view.len().max(1))?).slice(0..view.len())?))
            .collect::<Result<_>>()?;
        let copies: Vec<_> = taken.iter().map(Span::view).zip(views).collect();
        self.0.together.between(&round, queue, false, |queue| move_all(queue, &copies, by))?;
        let inputs: Vec<_> = taken.iter().map(Span::view).collect();
        Ok(queue.reduce(op, dtype, &inputs, &[output.view()], Caching::Keep)?)
    }

    /// Each rank gets the bytes of all ranks, one after the other. With an `output`, each rank gives `bytes` of its symmetric
    /// memory; the output is apart from them, or its own part is exactly they. Without one, `bytes` are as many equal parts as there
    /// are ranks: each rank gives its part, and gets the others in place.
    pub fn all_gather_on(
        &self,
        queue: &mut dyn Queue,
        bytes: Range<usize>,
        output: Option<&Span>,
        by: Mover,
        channel: usize,
        deadline: Deadline,
    ) -> Result<()> {
        let round = self.round("all_gather", channel, deadline)?;
        let (all, me) = (self.everywhere(&bytes)?, self.rank());
        let mut copies = Vec::with_capacity(self.world());
        if let Some(output) = output {
            as_long("all_gather", output, bytes.len().saturating_mul(self.world()))?;
            let into = |rank: usize| output.view().slice(rank * bytes.len()..(rank + 1) * bytes.len());
            if !all[me].is_same(into(me)?) {
                self.apart("all_gather", &bytes, output)?;
            }
            for (rank, from) in all.iter().enumerate() {
                copies.push((into(rank)?, *from));
            }
        } else {
            for (rank, part) in self.parts("all_gather", &bytes)?.into_iter().enumerate() {
                copies.push((all[me].slice(part.clone())?, all[rank].slice(part)?));
            }
        }
        copies.retain(|(to, from)| !to.is_same(*from));
        self.0.together.between(&round, queue, by == Mover::Kernels, |queue| move_all(queue, &copies, by))
    }

    /// Each rank gets from each the part that is meant for it: `bytes` are as many equal parts as there are ranks, and so is
    /// `output`, which is apart from them.
    pub fn all_to_all_on(
        &self,
        queue: &mut dyn Queue,
        bytes: Range<usize>,
        output: &Span,
        by: Mover,
        channel: usize,
        deadline: Deadline,
    ) -> Result<()> {
        let round = self.round("all_to_all", channel, deadline)?;
        let (all, parts) = (self.everywhere(&bytes)?, self.parts("all_to_all", &bytes)?);
        as_long("all_to_all", output, bytes.len())?;
        self.apart("all_to_all", &bytes, output)?;
        let mine = slices(&all, &parts[self.rank()])?;
        let copies = parts
            .iter()
            .zip(mine)
            .map(|(part, from)| Ok((output.view().slice(part.clone())?, from)))
            .collect::<Result<Vec<_>>>()?;
        self.0.together.between(&round, queue, by == Mover::Kernels, |queue| move_all(queue, &copies, by))
    }

    /// Each rank gets these bytes of rank `root`, in place.
    pub fn broadcast_on(
        &self,
        queue: &mut dyn Queue,
        root: usize,
        bytes: Range<usize>,
        by: Mover,
        channel: usize,
        deadline: Deadline,
    ) -> Result<()> {
        let round = self.round("broadcast", channel, deadline)?;
        self.peer(root)?;
        let all = self.everywhere(&bytes)?;
        let copies = if root == self.rank() { Vec::new() } else { vec![(all[self.rank()], all[root])] };
        self.0.together.between(&round, queue, by == Mover::Kernels, |queue| move_all(queue, &copies, by))
    }

    fn round(&self, what: &str, channel: usize, deadline: Deadline) -> Result<Round<'_>> {
        let (ranks, signals) = (self.ranks(), self.signals()?);
        signals.check_usable(ranks)?;
        let timeout = deadline.remaining().ok_or_else(|| {
            Error::timed_out(
                format!("{what} of symmetric memory"),
                Duration::ZERO,
                "the deadline had passed before the call",
            )
        })?;
        let round = Round { ranks, signals, channel, timeout };
        self.0.together.check(&round, what)?;
        Ok(round)
    }

    /// These bytes of all ranks.
    fn everywhere(&self, bytes: &Range<usize>) -> Result<Vec<View<'_>>> {
        let buffers = self.0.peers.iter().filter_map(|peer| peer.buffer.as_ref());
        buffers.map(|buffer| Ok(buffer.view().slice(bytes.clone())?)).collect()
    }

    /// Where the part of each rank lies in these bytes.
    fn parts(&self, what: &str, bytes: &Range<usize>) -> Result<Vec<Range<usize>>> {
        let world = self.world();
        if !bytes.len().is_multiple_of(world) {
            return Err(Error::misuse(format!(
                "{what} divides bytes {bytes:?} into {world} equal parts, and there are {}",
                bytes.len()
            )));
        }
        let each = bytes.len() / world;
        Ok((0..world).map(|rank| rank * each..(rank + 1) * each).collect())
    }

    /// Refuses an output in bytes that other ranks read.
    fn apart(&self, what: &str, bytes: &Range<usize>, output: &Span) -> Result<()> {
        if self.0.own.slice(bytes.clone())?.touches(output) {
            return Err(Error::misuse(format!(
                "the output of {what} overlaps bytes {bytes:?} of the symmetric memory, which other ranks read meanwhile"
            )));
        }
        Ok(())
    }
}

/// Copies all of it. A queue gives a single copy that nothing stops to the device's engines.
fn move_all(queue: &mut dyn Queue, copies: &[(View<'_>, View<'_>)], by: Mover) -> Result<()> {
    match by {
        Mover::Kernels => Ok(queue.copy_all(copies, Caching::Keep)?),
        Mover::Engines => {
            copies.iter().try_for_each(|&(to, from)| Ok(queue.copy(to, from, Caching::Keep)?))
        }
    }
}

fn slices<'v>(views: &[View<'v>], part: &Range<usize>) -> Result<Vec<View<'v>>> {
    views.iter().map(|view| Ok(view.slice(part.clone())?)).collect()
}

fn whole_elements(op: ReduceOp, dtype: Dtype, bytes: &Range<usize>) -> Result<()> {
    op.check(dtype)?;
    if bytes.start > bytes.end || !bytes.len().is_multiple_of(dtype.size()) {
        return Err(Error::misuse(format!("bytes {bytes:?} are not whole elements of {dtype}")));
    }
    Ok(())
}

fn as_long(what: &str, output: &Span, bytes: usize) -> Result<()> {
    if output.len() == bytes {
        return Ok(());
    }
    Err(Error::misuse(format!("the output of {what} has {} bytes, and {bytes} come", output.len())))
}

/// The part of a rank, and the bytes of the largest one.
fn part(bytes: usize, size: usize, world: usize, rank: usize) -> (Range<usize>, usize) {
    let unit = PART.max(size);
    let each = bytes.div_ceil(world.max(1)).next_multiple_of(unit);
    let at = |rank: usize| rank.saturating_mul(each).min(bytes);
    (at(rank)..at(rank + 1), each.min(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_all_of_it() {
        for size in [1, 2, 4, 8, 16] {
            for count in [0, 1, 3, 31, 32, 33, 1000, 4096] {
                for world in 1..10 {
                    let bytes = count * size;
                    let mut end = 0;
                    for rank in 0..world {
                        let (range, largest) = part(bytes, size, world, rank);
                        assert!(range.start == end && range.len() <= largest && range.len() % size == 0);
                        end = range.end;
                    }
                    assert_eq!(end, bytes);
                }
            }
        }
    }
}
