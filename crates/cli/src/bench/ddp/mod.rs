//! `tensorwire bench ddp`: what a training step of DistributedDataParallel costs, and how much of it is communication.
//!
//! A step is forward and backward of a plain model. The bench repeats three kinds of steps in turn: without DDP's
//! work, with DDP's work in a group that communicates nothing, and with both. The third median less the first is
//! what DDP adds, with its own copies of gradients. The third less the second is what communication adds beside
//! computation that goes on at the same time.

mod report;

use std::time::{Duration, Instant};

use tensorwire::{Config, Dtype, ReduceOp};

use super::binding::{self, Bind};
use super::crew::{Crew, Outcome};
use super::device::BenchDevice;
use super::fair::caveats;
use super::op::Op;
use super::order::{Case, Order, TensorMemory};
use super::placement::Hosts;
use super::sizes::{self, Sizes};
use super::torch::{self, Backend};
use crate::exit::{Failure, Status};
use crate::latency::Latency;
use crate::machine::Machine;
use crate::printer::Printer;
use report::Row;

/// How often everybody has a turn.
const ROUNDS: usize = 3;
/// Kinds of steps: alone, empty, and as it is.
const KINDS: usize = 3;
/// Steps of each kind in a turn: fewer say nothing, more no more.
const FEWEST: usize = 2;
const MOST: usize = 200;

/// Measure a step of DDP and its communication, in Python with torch
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire bench ddp                   a model of 100 MB, 4 ranks, beside Gloo
  tensorwire bench ddp -n 8 --size 400M  a larger one
  tensorwire bench ddp --bucket-view --json

A step is forward and backward of linear layers, at torch's default bucket size.
The columns:
  step           the time of a step with DDP
  alone          the same without DDP's work (no_sync)
  empty          the same with DDP's work, in a group that communicates nothing
  extra          step less alone: all that DDP adds, with its own copies
  communication  step less empty: what the backend adds
  ratio          Gloo's extra (or communication) over that of this row
Times are medians of the slowest rank's time. Communication that hides behind
computation adds nothing. In rows with `shared`, a hook moves the gradients to
shared memory; that time counts as communication, too.

Ranks are Python programs ($PYTHON, or python3) with torch and tensorwire. Each
computes with one thread. torchrun does not bind ranks to cores, and neither
does this command unless --bind says so.

Exit codes: 0 success, 1 a rank failed or a result was wrong, 2 wrong usage.")]
pub(crate) struct Args {
    /// How many ranks
    #[arg(short = 'n', long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=1024))]
    ranks: u32,
    /// Bytes of the model's parameters, which are float32
    #[arg(long, value_name = "BYTES", default_value = "96M", value_parser = sizes::parse)]
    size: Sizes,
    /// How long each library is measured
    #[arg(long, default_value_t = 6.0)]
    seconds: f64,
    /// Let gradients be views of DDP's buckets (gradient_as_bucket_view)
    #[arg(long)]
    bucket_view: bool,
    /// Whose ranks are bound to a core each
    #[arg(
        long,
        value_enum,
        default_value = "none",
        hide_possible_values = true,
        value_name = "all|ours|none"
    )]
    bind: Bind,
    /// Leave Gloo out
    #[arg(long)]
    alone: bool,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

pub(crate) fn execute(args: &Args, printer: &Printer) -> Result<Status, Failure> {
    let config = Config::from_env().map_err(Failure::usage)?;
    let length = super::length(args.seconds)?;
    let [bytes] = args.size.0[..] else { return Err(Failure::usage("--size is one size")) };
    let cpus = binding::allowed()?;
    let progress = printer.progress(ROUNDS + 2);
    progress.set_message("starting ranks");
    let cores = |backend| args.bind.cores(backend != Backend::Gloo, &cpus);
    let start = |backend| torch::start(backend, Hosts::one(args.ranks), cores(backend), BenchDevice::Host);
    let mut crews = vec![start(Backend::Tensorwire).map_err(Failure::failed)?];
    if !args.alone {
        match start(Backend::Gloo) {
            Ok(crew) => crews.push(crew),
            Err(why) if config.strict => return Err(Failure::failed(format!("gloo is left out: {why}"))),
            Err(why) => printer.note(&format!("gloo is left out: {why}")),
        }
    }
    let op = Op::Step { view: args.bucket_view };
    let case = |memory| Case { op, bytes, dtype: Dtype::F32, reduce: ReduceOp::Avg, memory, path: None };
    let mut turns = vec![Turn::new(0, case(TensorMemory::Private)), Turn::new(0, case(TensorMemory::Shared))];
    turns.extend(crews.get(1).map(|_| Turn::new(1, case(TensorMemory::Private))));
    for round in 0..=ROUNDS {
        progress.inc(1);
        progress.set_message(if round == 0 { "warming up".into() } else { format!("round {round}") });
        for turn in &mut turns {
            match round {
                0 => turn.probe(&mut crews, length)?,
                _ => turn.round(&mut crews)?,
            }
        }
    }
    progress.finish_and_clear();
    let rows = rows(args, bytes, &crews, turns);
    report::print(&rows, &Machine::here(cpus.len()), &crews, args.json, printer)?;
    match rows.iter().map(|row| row.wrong).sum() {
        0 => Ok(Status::Success),
        wrong => Err(Failure::failed(format!("{wrong} gradients were wrong"))),
    }
}

/// One library with one kind of memory.
#[derive(Debug)]
struct Turn {
    crew: usize,
    case: Case,
    /// What each kind of step took.
    kinds: [Latency; KINDS],
    /// Steps of each kind in a round.
    steps: usize,
    /// Iterations so far.
    next: usize,
    wrong: u64,
}

impl Turn {
    fn new(crew: usize, case: Case) -> Self {
        Self { crew, case, kinds: Default::default(), steps: FEWEST, next: 0, wrong: 0 }
    }

    /// Makes the models, warms up, and finds out how many steps fit the time.
    fn probe(&mut self, crews: &mut [Crew], length: Duration) -> Result<(), Failure> {
        self.round(crews)?;
        let begun = Instant::now();
        self.round(crews)?;
        let step = begun.elapsed().as_secs_f64() / FEWEST as f64;
        let fit = length.as_secs_f64() / ROUNDS as f64 / step.max(1e-9);
        self.steps = (fit as usize).clamp(FEWEST, MOST);
        self.kinds = Default::default();
        Ok(())
    }

    fn round(&mut self, crews: &mut [Crew]) -> Result<(), Failure> {
        let order = Order { case: self.case, warmup: 0, iterations: KINDS * self.steps, first: self.next };
        self.next += order.iterations;
        match crews[self.crew].carry_out(&order).map_err(Failure::failed)? {
            Outcome::No(why) => Err(Failure::failed(why)),
            Outcome::Done { wrong, nanos, .. } => {
                self.wrong += wrong;
                for iteration in 0..order.iterations {
                    let slowest = nanos.iter().filter_map(|rank| rank.get(iteration)).max();
                    self.kinds[iteration % KINDS].add(Duration::from_nanos(slowest.copied().unwrap_or(0)));
                }
                Ok(())
            }
        }
    }
}

fn rows(args: &Args, bytes: usize, crews: &[Crew], turns: Vec<Turn>) -> Vec<Row> {
    let row = |mut turn: Turn| {
        let steps = turn.kinds[0].count();
        let [alone_us, empty_us, step_us] = turn.kinds.each_mut().map(|kind| kind.quantiles([0.5])[0]);
        Row {
            op: "ddp",
            ranks: args.ranks,
            bytes,
            bucket_view: args.bucket_view,
            memory: turn.case.memory.name(),
            steps,
            alone_us,
            empty_us,
            step_us,
            extra_us: step_us - alone_us,
            extra_ratio: None,
            communication_us: step_us - empty_us,
            communication_ratio: None,
            wrong: turn.wrong,
            peer: crews[turn.crew].peer,
            bound: crews[turn.crew].bound,
            caveats: Vec::new(),
        }
    };
    let mut rows: Vec<Row> = turns.into_iter().map(row).collect();
    let gloo = rows.iter().find(|row| row.peer == Backend::Gloo.name());
    if let Some((extra, communication)) = gloo.map(|row| (row.extra_us, row.communication_us)) {
        for row in &mut rows {
            row.extra_ratio = ratio(extra, row.extra_us);
            row.communication_ratio = ratio(communication, row.communication_us);
            if let ([ours, gloo], true) = (crews, row.peer == super::OURS) {
                // Shared memory is a kind of row here, which its name says.
                row.caveats = caveats(ours.side(), gloo.side(), TensorMemory::Private);
            }
        }
    }
    rows
}

/// Gloo's over ours: only where both can be seen above the noise.
fn ratio(gloo: f64, ours: f64) -> Option<f64> {
    (gloo > 0.0 && ours > 0.0).then(|| gloo / ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_noise_hides_has_no_ratio() {
        assert_eq!(ratio(3.0, 2.0), Some(1.5));
        for (gloo, ours) in [(-1.0, -2.0), (1.0, 0.0), (0.0, 1.0), (1.0, -2.0)] {
            assert_eq!(ratio(gloo, ours), None, "{gloo} over {ours}");
        }
    }
}
