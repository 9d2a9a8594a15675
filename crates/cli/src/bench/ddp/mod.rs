//! `tensorwire bench ddp`: what a training step of DistributedDataParallel costs, and how much of it is communication.
//!
//! A step is forward and backward of a plain model. First it is done without communication and then with it, again and
//! again; the difference of the two medians is what DDP adds, its own copies of gradients with it. Then it is done with
//! a hook that notes when all-reduces are under way: that is communication, whether computation goes on meanwhile or not.
//! A hook costs something itself, so steps that are timed as such have none.

mod report;

use std::time::{Duration, Instant};

use tensorwire::{Config, Dtype, ReduceOp};

use super::binding::{self, Bind};
use super::crew::{Crew, Outcome};
use super::machine::Machine;
use super::op::Op;
use super::order::{Case, Memory, Order};
use super::sizes::{self, Sizes};
use super::torch::{self, Backend};
use crate::exit::{Failure, Status};
use crate::latency::Latency;
use crate::printer::Printer;
use report::Row;

/// How often everybody has a turn.
const ROUNDS: usize = 3;
/// Steps, or pairs of them, in a turn: fewer say nothing, more no more.
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
  step           its time, with DDP
  alone          the same step without communication (no_sync)
  extra          step less alone: all that DDP adds, also its own copies of
                 gradients to and from its buckets, which no backend touches
  communication  how long at least one bucket's all-reduce was under way, from
                 its call until its future was complete, also while computation
                 went on and while other ranks were not there yet
  ratio          Gloo's extra, or communication, over this one's
Times are medians of the slowest rank's. Communication is seen in further steps,
with a hook that divides and reduces as DDP does, the same for both backends;
--json has the time of those (watched_step_us) and how much of it came after the
call for the last bucket (tail_us): waiting for buckets, and DDP's copies back.
`shared` moves gradients to shared memory in a hook, which is in both figures.

Ranks are Python ($PYTHON, or python3) with torch and tensorwire, and compute
with one thread each; they are not bound to cores unless --bind says so, as
torchrun does not bind them either.

Exit codes: 0 success, 1 a rank failed or a result was wrong, 2 wrong usage.")]
pub(crate) struct Args {
    /// How many ranks
    #[arg(short = 'n', long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=1024))]
    ranks: u32,
    /// Bytes of the model's parameters, which are float32
    #[arg(long, value_name = "BYTES", default_value = "96M", value_parser = sizes::parse)]
    size: Sizes,
    /// How long each library has, half of it with the hook
    #[arg(long, default_value_t = 10.0)]
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
    /// Without Gloo
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
    let progress = printer.progress(2 * (ROUNDS + 1) + 1);
    progress.set_message("starting ranks");
    let start = |backend| torch::start(backend, args.ranks, args.bind.cores(backend != Backend::Gloo, &cpus));
    let mut crews = vec![start(Backend::Tensorwire).map_err(Failure::failed)?];
    if !args.alone {
        match start(Backend::Gloo) {
            Ok(crew) => crews.push(crew),
            Err(why) if config.strict => return Err(Failure::failed(format!("gloo is left out: {why}"))),
            Err(why) => printer.note(&format!("gloo is left out: {why}")),
        }
    }
    let mut turns = [false, true].map(|watched| turns(args, bytes, watched, &crews));
    for (phase, turns) in turns.iter_mut().enumerate() {
        for round in 0..=ROUNDS {
            progress.inc(1);
            let kind = if phase == 0 { "steps" } else { "communication" };
            progress.set_message(match round {
                0 => format!("{kind}, warming up"),
                _ => format!("{kind}, round {round}"),
            });
            for turn in turns.iter_mut() {
                match round {
                    0 => turn.probe(&mut crews, length / 2)?,
                    _ => turn.round(&mut crews)?,
                }
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

/// Everybody who has a turn.
fn turns(args: &Args, bytes: usize, watched: bool, crews: &[Crew]) -> Vec<Turn> {
    let op = Op::Step { view: args.bucket_view, watched };
    let case = |memory| Case { op, bytes, dtype: Dtype::F32, reduce: ReduceOp::Avg, memory, path: None };
    // Iterations of a pair of steps, or of a watched one.
    let figures = if watched { 3 } else { 2 };
    let turn = |crew, memory| Turn::new(crew, case(memory), figures);
    let mut turns = vec![turn(0, Memory::Private), turn(0, Memory::Shared)];
    turns.extend(crews.get(1).map(|_| turn(1, Memory::Private)));
    turns
}

/// One library with one kind of memory.
#[derive(Debug)]
struct Turn {
    crew: usize,
    case: Case,
    /// What each figure was, one for each iteration of a step.
    figures: Vec<Latency>,
    /// Steps in a round.
    steps: usize,
    /// Iterations so far.
    next: usize,
    wrong: u64,
}

impl Turn {
    fn new(crew: usize, case: Case, figures: usize) -> Self {
        let figures = (0..figures).map(|_| Latency::default()).collect();
        Self { crew, case, figures, steps: FEWEST, next: 0, wrong: 0 }
    }

    /// Makes the model, warms up, and finds out how many steps fit the time.
    fn probe(&mut self, crews: &mut [Crew], length: Duration) -> Result<(), Failure> {
        self.round(crews)?;
        let begun = Instant::now();
        self.round(crews)?;
        let step = begun.elapsed().as_secs_f64() / FEWEST as f64;
        let fit = length.as_secs_f64() / ROUNDS as f64 / step.max(1e-9);
        self.steps = (fit as usize).clamp(FEWEST, MOST);
        self.figures.fill_with(Latency::default);
        Ok(())
    }

    fn round(&mut self, crews: &mut [Crew]) -> Result<(), Failure> {
        let iterations = self.figures.len() * self.steps;
        let order = Order { case: self.case, warmup: 0, iterations, first: self.next };
        self.next += order.iterations;
        match crews[self.crew].carry_out(&order).map_err(Failure::failed)? {
            Outcome::No(why) => Err(Failure::failed(why)),
            Outcome::Done { wrong, nanos, .. } => {
                self.wrong += wrong;
                let kinds = self.figures.len();
                for iteration in 0..order.iterations {
                    let slowest = nanos.iter().filter_map(|rank| rank.get(iteration)).max();
                    self.figures[iteration % kinds].add(Duration::from_nanos(slowest.copied().unwrap_or(0)));
                }
                Ok(())
            }
        }
    }

    fn median(&mut self, figure: usize) -> f64 {
        let [median] = self.figures[figure].quantiles([0.5]);
        median
    }
}

fn rows(args: &Args, bytes: usize, crews: &[Crew], [pairs, watched]: [Vec<Turn>; 2]) -> Vec<Row> {
    let row = |(mut pair, mut watched): (Turn, Turn)| {
        let (alone_us, step_us) = (pair.median(0), pair.median(1));
        Row {
            op: "ddp",
            ranks: args.ranks,
            bytes,
            bucket_view: args.bucket_view,
            memory: pair.case.memory.name(),
            steps: pair.figures[0].count(),
            alone_us,
            step_us,
            // Noise may be more than what there is to see.
            extra_us: (step_us - alone_us).max(0.0),
            extra_ratio: None,
            watched_steps: watched.figures[0].count(),
            watched_step_us: watched.median(0),
            communication_us: watched.median(1),
            communication_ratio: None,
            tail_us: watched.median(2),
            wrong: pair.wrong + watched.wrong,
            peer: crews[pair.crew].peer,
            bound: crews[pair.crew].bound,
        }
    };
    let mut rows: Vec<Row> = pairs.into_iter().zip(watched).map(row).collect();
    let gloo = rows.iter().find(|row| row.peer == Backend::Gloo.name());
    let gloo = gloo.map(|row| (row.extra_us, row.communication_us));
    let ratio = |gloo: f64, ours: f64| Some(gloo / ours).filter(|ratio| ratio.is_finite());
    if let Some((extra, communication)) = gloo {
        for row in &mut rows {
            row.extra_ratio = ratio(extra, row.extra_us);
            row.communication_ratio = ratio(communication, row.communication_us);
        }
    }
    rows
}
