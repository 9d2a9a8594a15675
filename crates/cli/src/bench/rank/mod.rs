//! A rank of tensorwire that takes orders.

mod job;

use std::io::{BufRead, Write};
use std::time::Instant;

use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use tensorwire::{Group, Result};

use super::binding;
use super::op::Op;
use super::order::{Answer, Case, Order};
use crate::exit::{Failure, Status};
use job::Job;

/// A rank of `bench`
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    parent: i32,
    /// The cores of ranks 0, 1, ...
    #[arg(value_delimiter = ',')]
    cpus: Vec<usize>,
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
    group.barrier().wait()?;
    let pid = std::process::id();
    say(&format!("ready {pid} tensorwire {}", env!("CARGO_PKG_VERSION")))?;
    let mut kept: Option<(Case, Job)> = None;
    for line in std::io::stdin().lock().lines() {
        let order: Order = line?.parse().map_err(Failure::failed)?;
        if kept.as_ref().is_none_or(|(case, _)| *case != order.case) {
            // Its memory is given back before the next one takes some.
            drop(kept.take());
            kept = Some((order.case, Job::new(&group, order.case)?));
        }
        if let Some((_, job)) = &mut kept {
            say(&carry_out(&group, job, &order)?.to_string())?;
        }
    }
    // Nobody leaves while another still needs it.
    group.barrier().wait()?;
    Ok(Status::Success)
}

/// Only the call itself is timed; before it, inputs are written anew and all ranks meet; after it, results are checked.
fn carry_out(group: &Group, job: &mut Job, order: &Order) -> Result<Answer> {
    let mut nanos = Vec::with_capacity(order.iterations);
    let mut wrong = 0;
    for number in 0..order.warmup + order.iterations {
        let iteration = order.first + number;
        job.prepare(iteration)?;
        if order.case.op != Op::MemcpyAlone {
            group.barrier().wait()?;
        }
        let start = Instant::now();
        job.call()?;
        let time = start.elapsed();
        wrong += job.wrong(iteration)?;
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
