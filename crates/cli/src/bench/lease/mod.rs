//! `tensorwire bench lease`: what it takes to give a tensor to another Python process and to hear that it is done with it.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tensorwire::Deadline;

use super::binding;
use super::peers::Folder;
use super::sizes::{self, Sizes};
use super::spawn::Processes;
use crate::exit::{Failure, Status};
use crate::latency::figure;
use crate::machine::Machine;
use crate::printer::{Printer, Tone, WIDTH, table, wrap};

const WORKER: &str = include_str!("worker.py");

/// How often every way has a turn.
const ROUNDS: u32 = 3;

/// How long the processes may take to end once they have said all.
const GRACE: Duration = Duration::from_secs(60);

/// Measure giving a tensor to another process, in Python beside torch
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire bench lease           a tensor of 1 MB: CUDA where there is a GPU
  tensorwire bench lease --size 1G --json
  tensorwire bench lease --device cpu

In a round trip, one Python process gives a tensor to another one. The other
process opens it and drops it, and the first process hears of that. The ways:
  token        what tensorwire.share() gives goes through a pipe; the first
               process waits for the release
  pipe, queue  those of torch.multiprocessing, with install_reductions() and
               without it; the other process answers
ratio is torch's time through the same medium over this time. A token is
compared with torch's pipe. Python is $PYTHON, or python3, with torch and
tensorwire.

Exit codes: 0 success, 1 a process failed, 2 wrong usage.")]
pub(crate) struct Args {
    /// Bytes of the tensor
    #[arg(long, value_name = "BYTES", default_value = "1M", value_parser = sizes::parse)]
    size: Sizes,
    /// Where the tensor is [default: cuda where there is a GPU, else cpu]
    #[arg(long, value_name = "DEVICE", value_parser = ["cpu", "cuda"])]
    device: Option<String>,
    /// Round trips of each way in each of three turns
    #[arg(long, value_name = "N", default_value_t = 500)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rounds: u32,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

/// One way to give a tensor away, as the worker and `--json` print it.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    op: String,
    device: String,
    bytes: usize,
    library: String,
    medium: String,
    rounds: usize,
    median_us: f64,
    p99_us: f64,
    torch: String,
    /// torch's time over this one.
    #[serde(default)]
    ratio: Option<f64>,
}

pub(crate) fn execute(args: &Args, printer: &Printer) -> Result<Status, Failure> {
    let [bytes] = args.size.0[..] else { return Err(Failure::usage("--size is one size")) };
    let python = crate::python::python();
    let folder = Folder::new("lease").map_err(Failure::failed)?;
    let script = folder.write("worker.py", WORKER).map_err(Failure::failed)?;
    let mut command = Command::new(&python);
    command
        .arg(&script)
        .args([bytes.to_string(), ROUNDS.to_string(), args.rounds.to_string()])
        .args(&args.device);
    command.env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::null()).stdout(Stdio::piped());
    let progress = printer.progress(1);
    progress.set_message("round trips");
    let mut processes = Processes::default();
    let child = processes.start("the bench in Python".into(), &mut command)?;
    let mut said = String::new();
    if let Some(mut answers) = child.stdout.take() {
        answers.read_to_string(&mut said).map_err(|error| Failure::failed(error.to_string()))?;
    }
    progress.finish_and_clear();
    if let Some(why) = processes.failure(Deadline::after(GRACE)) {
        let text = format!("{why} (python is {}; PYTHON names another one)", python.display());
        return Err(Failure::failed(text));
    }
    let rows: Result<Vec<Row>, _> = said.lines().map(serde_json::from_str).collect();
    let mut rows =
        rows.map_err(|error| Failure::failed(format!("the bench in Python said {said:?}: {error}")))?;
    compare(&mut rows);
    print(&rows, args.json, printer)?;
    Ok(Status::Success)
}

/// Sets the ratios of our rows.
fn compare(rows: &mut [Row]) {
    let torchs = |medium: &str| if medium == "token" { "pipe".to_owned() } else { medium.to_owned() };
    let theirs: Vec<(String, f64)> = rows
        .iter()
        .filter(|row| row.library != super::OURS)
        .map(|row| (row.medium.clone(), row.median_us))
        .collect();
    for row in rows.iter_mut().filter(|row| row.library == super::OURS) {
        let medium = torchs(&row.medium);
        let other = theirs.iter().find(|(name, _)| *name == medium);
        row.ratio = other.map(|(_, micros)| micros / row.median_us).filter(|ratio| ratio.is_finite());
    }
}

fn print(rows: &[Row], json: bool, printer: &Printer) -> Result<(), Failure> {
    if json {
        return Ok(rows.iter().try_for_each(|row| printer.json(row))?);
    }
    let machine = Machine::here(binding::allowed()?.len());
    let setting = rows.first().map_or_else(String::new, |row| {
        format!("{} on {}, torch {}", sizes::show(row.bytes), row.device, row.torch)
    });
    for text in [machine.to_string(), setting] {
        wrap(&text, WIDTH).iter().try_for_each(|line| printer.line(line))?;
    }
    let cells = |row: &Row| {
        let ratio = row.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{}x", figure(ratio)));
        vec![format!("{} {}", row.library, row.medium), figure(row.median_us), figure(row.p99_us), ratio]
    };
    let cells: Vec<Vec<String>> = rows.iter().map(cells).collect();
    printer.line("")?;
    for (index, line) in table(&["round trip", "median us", "p99 us", "ratio"], &cells).iter().enumerate() {
        printer.line(&if index == 0 { printer.tint(Tone::Quiet, line) } else { line.clone() })?;
    }
    Ok(())
}
