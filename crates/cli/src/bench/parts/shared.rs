//! Memory and flags that two processes share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorwire::device::fd::{self, Address, Handshake, HandshakeStep, Listener};
use tensorwire::device::flag::{LINE, Writer};
use tensorwire::device::secret::{Secret, digest};
use tensorwire::device::{Abort, Flag, Handle, Region};
use tensorwire::{Deadline, Error, Group, Result, Span};

use super::rank::{Bench, PATIENCE};
use super::report::Row;
use crate::latency::Latency;

const PUTS: [usize; 4] = [4 << 10, 64 << 10, 1 << 20, 16 << 20];
const MESSAGES: [usize; 3] = [64, 64 << 10, 1 << 20];
const PAGE: usize = 4096;
/// Flags in the first page, what rank 0 puts behind it, then what rank 1 puts.
const LARGEST: usize = PUTS[3];
const REGION: usize = PAGE + 2 * LARGEST;

pub(super) const MEASUREMENTS: usize = 1 + PUTS.len() + MESSAGES.len();

/// Rank 0 measures, rank 1 answers.
pub(super) fn measure(bench: &Bench) -> Result<()> {
    let context = bench.group.context();
    match bench.group.rank() {
        0 => {
            let region = context.host().alloc(REGION)?;
            hand_over(&bench.group, &region, "shared")?;
            let mut pair = Pair::new(&region, 0)?;
            bench.print(&Row::new("shared", "flag, one way", 2, pair.ping(bench)?))?;
            for size in PUTS {
                let bytes = vec![1; size];
                let latency = bench.repeat(|| Ok(pair.mine.write(0, &bytes)?))?;
                bench.print(&Row::new("shared", "put into shared memory", 2, latency).moving(size, size))?;
            }
            for size in MESSAGES {
                let latency = pair.exchange(bench, size)?;
                bench.print(
                    &Row::new("shared", "message (put, signal, read)", 2, latency).moving(size, size),
                )?;
            }
        }
        1 => {
            let mut pair = Pair::new(&take_over(&bench.group, "shared")?, 1)?;
            pair.answer(0)?;
            for size in MESSAGES {
                pair.answer(size)?;
            }
        }
        _ => {}
    }
    bench.group.barrier().wait()
}

/// One side of two processes that take turns.
struct Pair {
    ours: Flag,
    theirs: Flag,
    /// Rank 0 tells by it that the next turn is the last.
    over: Flag,
    abort: Abort,
    mine: Span,
    other: Span,
    turn: u32,
}

impl Pair {
    fn new(region: &Arc<dyn Region>, rank: usize) -> Result<Self> {
        let line = |index: usize| Span::new(region.clone(), index * LINE..(index + 1) * LINE);
        let flag = |index| Flag::new(&line(index)?, Writer::Host);
        let half =
            |rank: usize| Span::new(region.clone(), PAGE + rank * LARGEST..PAGE + (rank + 1) * LARGEST);
        Ok(Self {
            ours: flag(rank)?,
            theirs: flag(1 - rank)?,
            over: flag(2)?,
            abort: Abort::new(&line(3)?)?,
            mine: half(rank)?,
            other: half(1 - rank)?,
            turn: 0,
        })
    }

    fn wait(&self, turn: u32) -> Result<()> {
        Ok(self.theirs.wait(turn, &self.abort, Deadline::after(PATIENCE))?)
    }

    /// Half of the time from a signal to its answer, over batches: one alone is shorter than a look at the clock.
    fn ping(&mut self, bench: &Bench) -> Result<Latency> {
        const BATCH: u32 = 100;
        let mut latency = Latency::default();
        let batches = bench.repeat(|| {
            let start = Instant::now();
            for _ in 0..BATCH {
                self.turn += 1;
                self.ours.signal(self.turn);
                self.wait(self.turn)?;
            }
            latency.add(start.elapsed() / (2 * BATCH));
            Ok(())
        });
        batches?;
        self.finish()?;
        Ok(latency)
    }

    /// Half of the time for a message there and one of the same size back.
    fn exchange(&mut self, bench: &Bench, size: usize) -> Result<Latency> {
        let mut bytes = vec![1; size];
        let mut latency = Latency::default();
        let trips = bench.repeat(|| {
            let start = Instant::now();
            self.mine.write(0, &bytes)?;
            self.turn += 1;
            self.ours.signal(self.turn);
            self.wait(self.turn)?;
            self.other.read(0, &mut bytes)?;
            latency.add(start.elapsed() / 2);
            Ok(())
        });
        trips?;
        self.finish()?;
        Ok(latency)
    }

    /// The last turn of a measurement.
    fn finish(&mut self) -> Result<()> {
        self.turn += 1;
        self.over.signal(self.turn);
        self.ours.signal(self.turn);
        self.wait(self.turn)
    }

    /// Answers every turn with what it brought, until the last one.
    fn answer(&mut self, size: usize) -> Result<()> {
        let mut bytes = vec![0; size];
        loop {
            self.turn += 1;
            self.wait(self.turn)?;
            self.other.read(0, &mut bytes)?;
            self.mine.write(0, &bytes)?;
            let over = self.over.load() == self.turn;
            self.ours.signal(self.turn);
            if over {
                return Ok(());
            }
        }
    }
}

/// Lets the other rank fetch the region, by its name, over a private connection.
pub(in crate::bench) fn hand_over(group: &Group, region: &Arc<dyn Region>, name: &str) -> Result<()> {
    let context = group.context();
    let listener = Listener::bind(context.config().socket_dir.as_deref())?;
    let secret = Secret::random()?;
    group.store().set(&format!("bench secret {name}"), &secret.to_bytes())?;
    group.store().set(&format!("bench address {name}"), &listener.address().to_bytes())?;
    let deadline = Deadline::after(PATIENCE);
    let secret_of = |id| (id == digest(b"bench")).then_some(secret);
    let mut open: Vec<Handshake> = Vec::new();
    while !deadline.passed() {
        open.extend(Handshake::accept(&listener)?);
        for handshake in std::mem::take(&mut open) {
            match handshake.step(context.identity(), &secret_of)? {
                HandshakeStep::More(handshake) => open.push(handshake),
                HandshakeStep::Done(_, connection) => {
                    let handle = region.export()?;
                    let fds: Vec<_> = handle.fds().collect();
                    return Ok(connection.send(&handle.encode(), &fds, deadline)?);
                }
            }
        }
        group.check()?;
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(Error::timed_out("handing memory to the other rank", PATIENCE, "it did not come"))
}

pub(in crate::bench) fn take_over(group: &Group, name: &str) -> Result<Arc<dyn Region>> {
    let context = group.context();
    let address = Address::from_bytes(&group.store().get(&format!("bench address {name}"))?)?;
    let secret = group.store().get(&format!("bench secret {name}"))?;
    let secret = secret.try_into().map_err(|_| Error::misuse("the secret is not 32 bytes long"))?;
    let deadline = Deadline::after(PATIENCE);
    let secret = Secret::from_bytes(secret);
    let connection = fd::connect(&address, digest(b"bench"), context.identity(), &secret, deadline)?;
    let (bytes, fds) = connection.recv(deadline)?;
    context.import_from(connection.peer().identity, Handle::decode(&bytes, fds)?)
}
