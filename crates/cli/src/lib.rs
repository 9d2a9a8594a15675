//! The tensorwire command: what was typed, what it means, and its exit code.
//!
//! Each subcommand has its own file or folder. Only `printer` prints.
#![forbid(unsafe_code)]

mod bench;
mod completions;
mod doctor;
mod exit;
mod html;
mod latency;
mod machine;
mod plan;
mod printer;
mod python;
mod run;
mod status;
mod store;
mod this_program;
mod topo;
mod units;

use std::ffi::OsString;

use clap::{Parser, Subcommand};
use tensorwire::Config;
use tracing_subscriber::EnvFilter;

use crate::exit::{Failure, Status};
use crate::printer::Printer;

/// Runs the command inside another program, such as an interpreter: `again` is how that is started to be this
/// command, its first arguments included. Otherwise as [`run()`].
pub fn run_inside(again: Vec<OsString>, args: impl IntoIterator<Item = OsString>) -> u8 {
    this_program::set(again);
    run(args)
}

/// Runs the command with its arguments, the first of which is its own name. Gives its exit code.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    let printer = Printer::new();
    let args: Vec<OsString> = args.into_iter().collect();
    let is_run = args.get(1).is_some_and(|name| name == "run");
    this_program::set_arguments(args.iter().skip(1).cloned().collect());
    let is_part = args.get(1).is_some_and(|name| PARTS.iter().any(|part| name == part));
    let result = match is_part {
        true => Part::try_parse_from(args).map(Part::execute),
        false => Cli::try_parse_from(args).map(|cli| cli.command.execute(&printer)),
    };
    match result {
        Ok(Ok(status)) => status,
        Ok(Err(failure)) => report(&failure, &printer),
        Err(error) => match Some(&error).filter(|_| is_run).and_then(run::explain) {
            Some(failure) => report(&failure, &printer),
            None => usage(&error),
        },
    }
    .code()
}

fn report(failure: &Failure, printer: &Printer) -> Status {
    if let Some(text) = failure.text() {
        printer.error(text);
    }
    failure.status()
}

#[derive(Parser)]
#[command(name = "tensorwire", version, about = "Moves tensors between processes, GPUs and machines")]
#[command(max_term_width = 80)]
#[command(after_help = "\
Examples:
  tensorwire bench                        measure this machine, no set-up needed
  tensorwire run -n 4 train.py            start four ranks on this machine
  tensorwire plan --hosts 512             what a collective costs between hosts
  tensorwire doctor                       what works here, what does not, why
  tensorwire topo                         GPUs, NICs, and who reaches whom
  tensorwire status                       who waits for whom in running jobs
  tensorwire store serve --port 29500     a rendezvous store for other machines
  tensorwire completions bash             completions for your shell

Each command has more examples: tensorwire COMMAND --help.

Exit codes: 0 success, 1 failure, 2 wrong usage. `run` returns the exit code of
the rank that failed first. Output has colours on a terminal, unless NO_COLOR is
set.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::Args),
    Plan(plan::Args),
    Run(run::Args),
    Doctor(doctor::Args),
    Topo(topo::Args),
    Status(status::Args),
    Store(store::Args),
    Completions(completions::Args),
}

/// What tensorwire starts itself as. Not subcommands of [`Cli`], so that no completion offers them.
#[derive(Parser)]
enum Part {
    /// The process that owns the ranks of `run`
    #[command(name = run::KEEPER)]
    Keeper(run::Args),
    /// A rank of `run` before it becomes its program
    #[command(name = run::RANK)]
    Rank(run::RankArgs),
    /// A rank of `bench`
    #[command(name = bench::RANK)]
    BenchRank(bench::RankArgs),
    /// A rank of `bench parts`
    #[command(name = bench::PARTS_RANK)]
    BenchPartsRank(bench::PartsRankArgs),
    /// A rank of a library that `bench` compares with, before it becomes its program
    #[command(name = bench::PEER)]
    BenchPeer(bench::PeerArgs),
    /// The other end of a bench of pipes
    #[command(name = bench::PIPE_OTHER)]
    BenchPipe(bench::PipeOtherArgs),
}

/// The names of all of them.
const PARTS: [&str; 6] =
    [run::KEEPER, run::RANK, bench::RANK, bench::PARTS_RANK, bench::PEER, bench::PIPE_OTHER];

impl Command {
    fn execute(self, printer: &Printer) -> Result<Status, Failure> {
        log(matches!(self, Self::Doctor(_) | Self::Completions(_) | Self::Plan(_)))?;
        match self {
            Self::Bench(args) => bench::execute(args, printer),
            Self::Plan(args) => plan::execute(args, printer),
            Self::Run(args) => run::execute(args, printer),
            Self::Doctor(args) => doctor::execute(args, printer),
            Self::Topo(args) => topo::execute(args, printer),
            Self::Status(args) => status::execute(args, printer),
            Self::Store(args) => store::execute(args, printer),
            Self::Completions(args) => completions::execute(args, printer),
        }
    }
}

impl Part {
    fn execute(self) -> Result<Status, Failure> {
        match self {
            // Its program decides what it thinks of its variables.
            Self::Rank(args) => run::become_program(args),
            Self::Keeper(args) => log(true).and_then(|()| run::keep(args)),
            Self::BenchRank(args) => log(true).and_then(|()| bench::execute_rank(args)),
            Self::BenchPartsRank(args) => log(true).and_then(|()| bench::execute_parts_rank(args)),
            Self::BenchPeer(args) => bench::become_peer(args),
            Self::BenchPipe(args) => log(true).and_then(|()| bench::execute_pipe_other(&args)),
        }
    }
}

/// Sends log events to stderr. Where it is `lenient`, a wrong variable is left for others to complain about.
fn log(lenient: bool) -> Result<(), Failure> {
    let filter = Config::from_env().map_err(Failure::usage).and_then(|config| {
        EnvFilter::try_new(&config.log)
            .map_err(|error| Failure::usage(format!("TENSORWIRE_LOG={}: {error}", config.log)))
    });
    let filter = match filter {
        Err(failure) if !lenient => return Err(failure),
        filter => filter.unwrap_or_else(|_| EnvFilter::new(Config::default().log)),
    };
    // A second call in one process keeps the first subscriber.
    // Where nothing can be written (a full disk, a closed pipe), complaining about it would panic.
    let lines = tracing_subscriber::fmt().with_env_filter(filter).log_internal_errors(false);
    let lines = lines.with_writer(std::io::stderr);
    let _ = lines.with_ansi(printer::wants_color(&std::io::stderr())).try_init();
    Ok(())
}

/// Prints what clap found wrong, or the help that was asked for.
fn usage(error: &clap::Error) -> Status {
    // Nowhere to report that the report could not be written.
    let _ = error.print();
    if error.use_stderr() { Status::Usage } else { Status::Success }
}
