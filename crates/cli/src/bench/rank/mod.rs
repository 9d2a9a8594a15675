//! A rank of tensorwire that takes orders.

mod gpu;
mod job;
mod sparse;

use std::io::{BufRead, Write};
use std::time::Instant;

use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use tensorwire::{Group, Result};

use super::binding;
use super::device::BenchDevice;
use super::order::{Answer, Case, Order, TensorMemory};
use crate::exit::{Failure, Status};
use gpu::RankGpu;
use job::Job;

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
}

pub(crate) fn execute(args: Args) -> Result<Status, Failure> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|errno| Failure::failed(errno.to_string()))?;
    // It may have died before the line above.
    if getppid().is_none_or(|parent| parent.as_raw_pid() != args.parent) {
        return Err(Failure::failed("the bench is gone"));
    }
    let rank = std::env::var("RANK").ok().and_then(|rank| rank.parse().ok());
    // Before the group: its threads belong to the same core.
    binding::bind(&args.cpus, rank.ok_or_else(|| Failure::failed("RANK is not set"))?)?;
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
            kept = Some((order.case, Job::new(&group, order.case, gpu.as_ref())?));
        }
        if let Some((_, job)) = &mut kept {
            say(&carry_out(&group, job, &order, gpu.as_mut())?.to_string())?;
        }
    }
    // Nobody leaves while another still needs it.
    group.barrier().wait()?;
    Ok(Status::Success)
}

/// Only the call itself is timed; before it, inputs are written anew and all ranks meet; after it, results are checked.
///
/// On GPUs this is done for the calls that are not timed alone. There each rank's small writes run on the GPU like a kernel,
/// and ranks that share one would be timed with what it takes to change from one process to another.
fn carry_out(group: &Group, job: &mut Job, order: &Order, mut gpu: Option<&mut RankGpu>) -> Result<Answer> {
    let mut nanos = Vec::with_capacity(order.iterations);
    let mut wrong = 0;
    for number in 0..order.warmup + order.iterations {
        let iteration = order.first + number;
        let checked = order.case.memory != TensorMemory::Pool || number < order.warmup;
        if checked {
            job.prepare(iteration)?;
        }
        if !order.case.op.is_alone() {
            group.barrier().wait()?;
        }
        let start = Instant::now();
        job.call(gpu.as_deref_mut())?;
        let time = start.elapsed() / job.pieces();
        if checked {
            wrong += job.wrong(iteration)?;
        }
        if number >= order.warmup {
            nanos.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        }
    }
    Ok(Answer::Done { wrong, path: job.path(), nanos })
}

fn say(line: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let written = writeln!(out, "{line}").and_then(|()| out.flush());
    written.map_err(|error| Failure::failed(format!("answering the bench: {error}")))
}
