//! The tensorwire command: what was typed, what it means, and its exit code.
//!
//! One file or folder for each subcommand; [`printer`] is the only place that prints.
#![forbid(unsafe_code)]

mod bench;
mod completions;
mod doctor;
mod exit;
mod latency;
mod printer;
mod run;
mod store;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tensorwire::Config;
use tracing_subscriber::EnvFilter;

use crate::exit::{Failure, Status};
use crate::printer::Printer;

/// Runs the command with its arguments, the first of which is its own name.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let printer = Printer::new();
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => return usage(&error).into(),
    };
    let result = log(&cli.command).and_then(|()| cli.command.execute(&printer));
    match result {
        Ok(status) => status,
        Err(failure) => {
            if let Some(text) = failure.text() {
                printer.error(text);
            }
            failure.status()
        }
    }
    .into()
}

#[derive(Parser)]
#[command(name = "tensorwire", version, about = "Moves tensors between processes, GPUs and machines")]
#[command(after_help = "\
Examples:
  tensorwire bench                         measure this machine, no set-up needed
  tensorwire run -n 4 -- python train.py   start four ranks on this machine
  tensorwire doctor                        what this machine offers, and what is off
  tensorwire store serve --port 29500      a rendezvous store for other machines
  tensorwire completions bash              completions for your shell

Exit codes: 0 success, 1 failure, 2 wrong usage; `run` returns the exit code of
the rank that failed first. Colour is used on a terminal unless NO_COLOR is set.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::Args),
    Run(run::Args),
    Doctor(doctor::Args),
    Store(store::Args),
    Completions(completions::Args),
    /// The process that owns the ranks of `run`.
    #[command(name = run::KEEPER, hide = true)]
    Keeper(run::Args),
    /// A rank of `run` before it becomes its program.
    #[command(name = run::RANK, hide = true)]
    Rank(run::RankArgs),
    /// A rank of `bench`.
    #[command(name = bench::RANK, hide = true)]
    BenchRank(bench::RankArgs),
}

impl Command {
    fn execute(self, printer: &Printer) -> Result<Status, Failure> {
        match self {
            Self::Bench(args) => bench::execute(args, printer),
            Self::Run(args) => run::execute(args, printer),
            Self::Doctor(args) => doctor::execute(args, printer),
            Self::Store(args) => store::execute(args, printer),
            Self::Completions(args) => completions::execute(args, printer),
            Self::Keeper(args) => run::keep(args),
            Self::Rank(args) => run::become_program(args),
            Self::BenchRank(args) => bench::execute_rank(args),
        }
    }
}

/// Sends log events to stderr. `doctor` shows a wrong variable instead of failing by it, and a rank's own
/// program decides what it thinks of it.
fn log(command: &Command) -> Result<(), Failure> {
    let config = match (Config::from_env(), command) {
        (Ok(config), _) => config,
        (Err(_), Command::Doctor(_) | Command::Completions(_) | Command::Keeper(_) | Command::Rank(_)) => {
            Config::default()
        }
        (Err(error), _) => return Err(Failure::usage(error)),
    };
    let filter = EnvFilter::try_new(&config.log)
        .map_err(|error| Failure::usage(format!("TENSORWIRE_LOG={}: {error}", config.log)));
    let filter = match (filter, command) {
        (Ok(filter), _) => filter,
        (Err(_), Command::Doctor(_)) => EnvFilter::new("warn"),
        (Err(failure), _) => return Err(failure),
    };
    // A second call in one process keeps the first subscriber.
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).try_init();
    Ok(())
}

/// Prints what clap found wrong, or the help that was asked for.
fn usage(error: &clap::Error) -> Status {
    // Nowhere to report that the report could not be written.
    let _ = error.print();
    if error.use_stderr() { Status::Usage } else { Status::Success }
}
