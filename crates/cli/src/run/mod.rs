//! `tensorwire run`: starts ranks on this machine and leaves nothing behind.
//!
//! There are three kinds of processes: the one that the user started (here), the keeper, and the ranks.
//!
//! The keeper is the parent of all ranks and the subreaper of their descendants. So a process that a rank leaves
//! behind becomes a child of the keeper. The keeper holds the reading end of a pipe, and only the first process has
//! the other end. Signals come through this pipe. When the pipe ends, the first process is gone, however it went,
//! and the keeper kills everything below it.
//!
//! If the keeper itself is killed, the ranks die by their parent-death signal. All other processes become children of
//! the first process, which is a subreaper, too.

mod console;
mod descendants;
mod keeper;
pub(crate) mod outcome;
mod program;
mod rank;
mod torchrun;
pub(crate) mod variables;

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ExitStatus, Stdio};
use std::time::Duration;

use signal_hook::consts::{SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use crate::exit::{Failure, Status};
use crate::printer::Printer;
use crate::this_program;
pub(crate) use keeper::keep;
pub(crate) use rank::{Args as RankArgs, become_program};
pub(crate) use torchrun::explain;

/// The hidden subcommand of the keeper.
pub(crate) const KEEPER: &str = "__keep";
/// The hidden subcommand of a rank that has not yet become its program.
pub(crate) const RANK: &str = "__rank";

/// What is passed on to the ranks. SIGTSTP stops them and SIGCONT lets them go on.
const PASSED_ON: [i32; 8] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT];

/// Start ranks of a program on this machine
#[derive(clap::Args, Debug)]
#[command(
    long_about = "Start ranks of a program on this machine, with torchrun's variables and a store.\n\n\
        Each line of output begins with the rank that printed it. This command passes SIGINT, SIGTERM, \
        SIGHUP and SIGQUIT on to the ranks. They then have the grace time to end. A second SIGINT kills them \
        at once. When a rank fails, the others are stopped. No rank, and no process that a rank started, \
        outlives this command.",
    after_help = "\
Examples:
  tensorwire run -n 4 train.py --epochs 3
  tensorwire run -n 4 -m package.train
  tensorwire run -n 8 --log-dir logs ./simulate
  tensorwire run -n 2 --no-prefix sh -c 'echo rank $RANK of $WORLD_SIZE'

A program whose name ends in .py is run with Python, whatever its first line
says: $PYTHON, or the Python that this command was installed in, or that of
$VIRTUAL_ENV, or python3. With --no-python the file itself is executed. What
comes after the program belongs to the program.

torchrun's spellings are understood: --nproc-per-node, --nnodes 1, --node-rank
0, --master-addr localhost, --master-port, --max-restarts 0, --standalone, -m,
--no-python, with - or with _.

Exit codes:
  0        all ranks succeeded
  1        the ranks could not be run
  2        wrong usage
  126      the program cannot be executed
  127      the program was not found
  128 + N  signal N ended this command
  others   the exit code of the rank that failed first; 128 + N if signal N
           killed it

The stdin of the ranks is /dev/null. They get these variables: RANK, LOCAL_RANK,
WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, ROLE_RANK,
ROLE_WORLD_SIZE, ROLE_NAME, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID,
TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS,
TORCHELASTIC_USE_AGENT_STORE. Two more are set unless you set them:
TORCH_NCCL_ASYNC_ERROR_HANDLING=1, and OMP_NUM_THREADS=1 if N is above 1."
)]
pub(crate) struct Args {
    /// How many ranks: a number, auto, gpu or cpu
    #[arg(short = 'n', long = "nproc", value_name = "N", default_value = "2", value_parser = torchrun::ranks)]
    #[arg(visible_alias = "nproc-per-node", alias = "nproc_per_node", allow_negative_numbers = true)]
    nproc: u32,
    /// The port of the store; 0 takes a free one
    #[arg(long, alias = "master_port", value_name = "PORT", default_value_t = 0)]
    master_port: u16,
    /// Also write the output of rank I to DIR/rank-I.out and DIR/rank-I.err
    #[arg(long, alias = "log_dir", value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Print lines without their rank
    #[arg(long)]
    no_prefix: bool,
    /// How long ranks may take to stop before they are killed
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds, allow_negative_numbers = true)]
    grace: Duration,
    /// The program is a Python module, as with python -m
    #[arg(short = 'm', long, conflicts_with = "no_python")]
    module: bool,
    /// Execute the program itself, even if its name ends in .py
    #[arg(long, alias = "no_python")]
    no_python: bool,
    #[command(flatten)]
    torchrun: torchrun::Torchrun,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true)]
    program: Vec<OsString>,
}

pub(crate) fn execute(mut args: Args, printer: &Printer) -> Result<Status, Failure> {
    args.torchrun.check()?;
    args.program = program::words(args.program, args.module, args.no_python)?;
    let failed = |doing: &'static str| move |error| Failure::failed(format!("{doing}: {error}"));
    let mut signals = Signals::new(heeded().chain([SIGCHLD])).map_err(failed("handling signals"))?;
    // Of a shell that became this command by exec; they are not ours to end.
    let inherited = descendants::children();
    descendants::adopt_orphans().map_err(Into::into).map_err(failed("becoming a subreaper"))?;
    let mut keeper = start_keeper(&args).map_err(failed("starting the keeper of the ranks"))?;
    let ended = pass_on(&mut signals, &mut keeper).map_err(failed("waiting for the keeper of the ranks"))?;
    let survivors = descendants::kill_all(&inherited);
    if !survivors.is_empty() {
        printer.note(&format!("could not kill {}", descendants::list(&survivors)));
    }
    match (ended.code(), ended.signal()) {
        (Some(code), _) => Ok(Status::Program(u8::try_from(code).unwrap_or(1))),
        (None, signal) => Err(Failure::with(
            Status::Program(outcome::code_of_signal(signal.unwrap_or(0))),
            format!(
                "the keeper of the ranks (pid {}) was killed by {}; all ranks were killed",
                keeper.id(),
                outcome::signal_name(signal.unwrap_or(0))
            ),
        )),
    }
}

/// Those of the signals that we were not told to ignore, as `nohup` and `&` in a script do.
fn heeded() -> impl Iterator<Item = i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    PASSED_ON.into_iter().filter(move |signal| mask & 1 << (signal - 1) == 0)
}

fn start_keeper(args: &Args) -> std::io::Result<Child> {
    let mut command = this_program::command();
    if !this_program::is_interpreted() {
        // A name of its own: who kills "tensorwire" by name must not hit the one that cleans up.
        command.arg0("rank-keeper");
    }
    command.arg(KEEPER).stdin(Stdio::piped());
    command.arg(format!("--nproc={}", args.nproc)).arg(format!("--master-port={}", args.master_port));
    command.arg(format!("--grace={}", args.grace.as_secs_f64()));
    if let Some(dir) = &args.log_dir {
        command.arg("--log-dir").arg(dir);
    }
    if args.no_prefix {
        command.arg("--no-prefix");
    }
    command.arg("--").args(&args.program).spawn()
}

/// Passes signals on until the keeper has ended.
fn pass_on(signals: &mut Signals, keeper: &mut Child) -> std::io::Result<ExitStatus> {
    let mut pipe = keeper.stdin.take();
    for signal in signals.forever() {
        match signal {
            SIGCHLD => {
                if let Some(status) = keeper.try_wait()? {
                    return Ok(status);
                }
            }
            SIGTSTP => {
                send(&mut pipe, signal);
                signal_hook::low_level::emulate_default_handler(signal)?;
            }
            signal => send(&mut pipe, signal),
        }
    }
    keeper.wait()
}

fn send(pipe: &mut Option<ChildStdin>, signal: i32) {
    // A keeper that has just ended needs no signal.
    let _ = pipe.as_mut().map(|pipe| pipe.write_all(&[signal as u8]));
}

/// A time as an argument gives it.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let secs = text.parse().ok().and_then(|secs| Duration::try_from_secs_f64(secs).ok());
    secs.ok_or_else(|| "a number of seconds from 0 on is needed".to_string())
}
