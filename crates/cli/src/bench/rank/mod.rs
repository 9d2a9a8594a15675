//! A rank of tensorwire that takes orders.

mod gpu;
mod job;
mod socket;
mod sparse;
mod ucx;

use std::io::{BufRead, Write};
use std::time::Instant;

use rustix::process::Signal;
use tensorwire::{Group, Result};

use super::binding;
use super::device::BenchDevice;
use super::order::{Answer, Case, Order, TensorMemory};
use super::placement::Turn;
use super::spawn::end_with_parent;
use crate::exit::{Failure, Status};
use gpu::RankGpu;
use job::Job;
pub(super) use socket::Line;
use socket::{Socket, SocketJob};

/// A rank of `bench`
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    parent: i32,
    /// The cores of ranks 0, 1, ...
    #[arg(value_delimiter = ',')]
    cpus: Vec<usize>,
    /// Where tensors live
    #[arg(long, default_value_t)]
    device: BenchDevice,
    /// What this rank does in send-recv
    #[arg(long)]
    turn: Turn,
    /// That is a message to another host
    #[arg(long)]
    far: bool,
    /// No group: a bare loop over a connection, to compare with
    #[arg(long)]
    socket: bool,
    /// The same by active messages of UCX
    #[arg(long)]
    ucx: bool,
}

pub(crate) fn execute(args: Args) -> Result<Status, Failure> {
    end_with_parent(Some(args.parent), Signal::KILL)?;
    let rank = std::env::var("RANK").ok().and_then(|rank| rank.parse().ok());
    // Before the group: its threads belong to the same core.
    let rank = rank.ok_or_else(|| Failure::failed("RANK is not set"))?;
    binding::bind(&args.cpus, rank)?;
    match args.socket || args.ucx {
        true => bare_loop(Socket::open(rank, args.turn, args.ucx)?, args.ucx),
        false => of_group(&args),
    }
}

fn of_group(args: &Args) -> Result<Status, Failure> {
    let group = Group::from_env()?;
    let mut gpu = RankGpu::open(&group, args.device)?;
    group.barrier().wait()?;
    let pid = std::process::id();
    say(&format!("ready {pid} tensorwire {}", env!("CARGO_PKG_VERSION")))?;
    let mut kept: Option<(Case, Job)> = None;
    for line in std::io::stdin().lock().lines() {
        let order: Order = line?.parse().map_err(Failure::failed)?;
        if kept.as_ref().is_none_or(|(case, _)| *case != order.case) {
            // Its memory is given back before the next one takes some.
            drop(kept.take());
            kept = Some((order.case, Job::new(&group, order.case, (args.turn, args.far), gpu.as_ref())?));
        }
        if let Some((_, job)) = &mut kept {
            say(&carry_out(&mut OnGroup { job, gpu: gpu.as_mut() }, &order)?.to_string())?;
        }
    }
    // Nobody leaves while another still needs it.
    group.barrier().wait()?;
    Ok(Status::Success)
}

/// The orders of a rank that has no group.
fn bare_loop(mut socket: Socket, by_ucx: bool) -> Result<Status, Failure> {
    socket.meet()?;
    let how = if by_ucx { "of active messages by UCX" } else { "over one TCP connection" };
    say(&format!("ready {} a bare loop {how}", std::process::id()))?;
    let mut lines = std::io::stdin().lock().lines();
    let mut next = lines.next().transpose()?;
    while let Some(line) = &next {
        let first: Order = line.parse().map_err(Failure::failed)?;
        let Some(mut job) = SocketJob::new(&mut socket, first.case) else {
            say(&Answer::No("a bare loop only sends and receives".into()).to_string())?;
            next = lines.next().transpose()?;
            continue;
        };
        // Its memory is the same as long as the case is.
        while let Some(line) = &next {
            let order: Order = line.parse().map_err(Failure::failed)?;
            if order.case != first.case {
                break;
            }
            say(&carry_out(&mut job, &order)?.to_string())?;
            next = lines.next().transpose()?;
        }
    }
    Ok(Status::Success)
}

/// What is measured again and again.
trait Work {
    /// Writes the inputs of an iteration.
    fn prepare(&mut self, iteration: usize) -> Result<(), Failure>;

    /// All ranks meet.
    fn meet(&mut self) -> Result<(), Failure>;

    /// What is timed.
    fn call(&mut self) -> Result<(), Failure>;

    /// How many times what is measured happens in a call.
    fn pieces(&self) -> u32 {
        1
    }

    /// How many elements of this rank's results are not what they must be.
    fn wrong(&mut self, iteration: usize) -> Result<u64, Failure>;

    /// The way that calls take.
    fn path(&mut self) -> String;
}

/// An operation of a group.
#[derive(Debug)]
struct OnGroup<'a> {
    job: &'a mut Job,
    gpu: Option<&'a mut RankGpu>,
}

impl Work for OnGroup<'_> {
    fn prepare(&mut self, iteration: usize) -> Result<(), Failure> {
        Ok(self.job.prepare(iteration)?)
    }

    fn meet(&mut self) -> Result<(), Failure> {
        Ok(self.job.meet()?)
    }

    fn call(&mut self) -> Result<(), Failure> {
        Ok(self.job.call(self.gpu.as_deref_mut())?)
    }

    fn pieces(&self) -> u32 {
        self.job.pieces()
    }

    fn wrong(&mut self, iteration: usize) -> Result<u64, Failure> {
        Ok(self.job.wrong(iteration)?)
    }

    fn path(&mut self) -> String {
        self.job.path()
    }
}

/// Only the call itself is timed; before it, inputs are written anew and all ranks meet; after it, results are checked.
///
/// On GPUs this is done for the calls that are not timed alone. There each rank's small writes run on the GPU like a kernel,
/// and ranks that share one would be timed with what it takes to change from one process to another.
fn carry_out(work: &mut impl Work, order: &Order) -> Result<Answer, Failure> {
    let mut nanos = Vec::with_capacity(order.iterations);
    let mut wrong = 0;
    for number in 0..order.warmup + order.iterations {
        let iteration = order.first + number;
        let checked = order.case.memory != TensorMemory::Pool || number < order.warmup;
        if checked {
            work.prepare(iteration)?;
        }
        if !order.case.op.is_alone() {
            work.meet()?;
        }
        let start = Instant::now();
        work.call()?;
        let time = start.elapsed() / work.pieces();
        if checked {
            wrong += work.wrong(iteration)?;
        }
        if number >= order.warmup {
            nanos.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        }
    }
    Ok(Answer::Done { wrong, path: work.path(), nanos })
}

fn say(line: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let written = writeln!(out, "{line}").and_then(|()| out.flush());
    written.map_err(|error| Failure::failed(format!("answering the bench: {error}")))
}
