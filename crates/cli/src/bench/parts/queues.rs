//! What crosses from the queue of one process to that of another: signals, and bytes put into memory of the other.

use std::sync::Arc;
use std::time::Instant;

use tensorwire::device::flag::{LINE, Writer};
use tensorwire::device::{Abort, Caching, Device, Flag, Queue, Region};
use tensorwire::{Deadline, Result, Span};

use super::rank::{Bench, PATIENCE};
use super::report::Row;
use super::shared::{hand_over, take_over};
use crate::latency::Latency;

const PUTS: [usize; 3] = [4 << 10, 1 << 20, 64 << 20];
/// Rounds, or copies, in one go.
pub(in crate::bench) const BATCH: u32 = 100;

pub(super) const MEASUREMENTS: usize = 3 + PUTS.len();

/// Rank 0 measures, rank 1 answers.
pub(super) fn measure(bench: &Bench) -> Result<()> {
    let (context, device) = (bench.group.context(), &bench.device);
    match bench.group.rank() {
        0 => {
            let flags = context.host().alloc(4 * LINE)?;
            hand_over(&bench.group, &flags, "flags")?;
            let mut pair = Pair::new(&**device, &flags, 0)?;
            let row = Row::new("queues", "signal and wait, one way", 2, pair.ping(bench)?);
            bench.print(&match bench.place.waits()? {
                Some(waits) => row.waiting(waits),
                None => row,
            })?;
            let theirs = take_over(&bench.group, "memory")?;
            let own = device.alloc(PUTS[2])?;
            let latency = bench.repeat(|| Ok(own.export().map(drop)?))?;
            bench.print(&Row::new("queues", "export", 1, latency))?;
            let latency = bench.repeat(|| Ok(device.import(theirs.export()?).map(drop)?))?;
            bench.print(&Row::new("queues", "import, map, unmap", 2, latency))?;
            let mine = Span::whole(device.alloc(PUTS[2])?);
            for size in PUTS {
                let (into, from) = (Span::new(theirs.clone(), 0..size)?, mine.slice(0..size)?);
                let latency = pair.puts(bench, &into, &from)?;
                bench.print(
                    &Row::new("queues", "put into the other's memory", 2, latency).moving(size, size),
                )?;
            }
        }
        1 => {
            let flags = take_over(&bench.group, "flags")?;
            Pair::new(&**device, &flags, 1)?.answer()?;
            let memory = device.alloc(PUTS[2])?;
            hand_over(&bench.group, &memory, "memory")?;
            bench.group.barrier().wait()?;
            return Ok(());
        }
        _ => {}
    }
    bench.group.barrier().wait()
}

/// One side of two queues that take turns.
#[derive(Debug)]
pub(in crate::bench) struct Pair {
    queue: Box<dyn Queue>,
    ours: Flag,
    theirs: Flag,
    /// Rank 0 tells by it which turn is the last.
    over: Flag,
    abort: Abort,
    turn: u32,
}

impl Pair {
    pub(in crate::bench) fn new(device: &dyn Device, flags: &Arc<dyn Region>, rank: usize) -> Result<Self> {
        let line = |index: usize| Span::new(flags.clone(), index * LINE..(index + 1) * LINE);
        let flag = |index| Flag::new(&line(index)?, Writer::Device);
        let (ours, theirs, over) = (flag(rank)?, flag(1 - rank)?, flag(2)?);
        Ok(Self { queue: device.queue()?, ours, theirs, over, abort: Abort::new(&line(3)?)?, turn: 0 })
    }

    /// Half of the time from a signal to its answer. All are queued ahead; the other side queues as many answers.
    fn ping(&mut self, bench: &Bench) -> Result<Latency> {
        let mut latency = Latency::default();
        bench.repeat(|| {
            let start = Instant::now();
            self.batch()?;
            latency.add(start.elapsed() / (2 * BATCH));
            Ok(())
        })?;
        self.over.signal(self.turn + BATCH);
        self.batch()?;
        self.finish()?;
        Ok(latency)
    }

    /// Queues signals that wait for answers, and waits for the last.
    pub(in crate::bench) fn batch(&mut self) -> Result<()> {
        for _ in 0..BATCH {
            self.turn += 1;
            self.queue.signal(&self.ours, self.turn)?;
            self.queue.wait(&self.theirs, self.turn, &self.abort, Deadline::after(PATIENCE))?;
        }
        Ok(self.theirs.wait(self.turn, &self.abort, Deadline::after(PATIENCE))?)
    }

    /// Answers a batch.
    pub(in crate::bench) fn answer_batch(&mut self) -> Result<()> {
        for _ in 0..BATCH {
            self.turn += 1;
            self.queue.wait(&self.theirs, self.turn, &self.abort, Deadline::after(PATIENCE))?;
            self.queue.signal(&self.ours, self.turn)?;
        }
        Ok(self.theirs.wait(self.turn, &self.abort, Deadline::after(PATIENCE))?)
    }

    /// Answers batch by batch, until the last one.
    fn answer(&mut self) -> Result<()> {
        loop {
            self.answer_batch()?;
            if self.over.load() == self.turn {
                return self.finish();
            }
        }
    }

    /// The time of one of many queued copies.
    fn puts(&mut self, bench: &Bench, into: &Span, from: &Span) -> Result<Latency> {
        let mut latency = Latency::default();
        bench.repeat(|| {
            let start = Instant::now();
            for _ in 0..BATCH {
                self.queue.copy(into.view(), from.view(), Caching::Keep)?;
            }
            self.finish()?;
            latency.add(start.elapsed() / BATCH);
            Ok(())
        })?;
        Ok(latency)
    }

    fn finish(&mut self) -> Result<()> {
        Ok(self.queue.finish(&self.abort, Deadline::after(PATIENCE))?)
    }
}
