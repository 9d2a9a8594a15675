//! `tensorwire bench`: measures this machine with ranks that it starts itself.
//!
//! Until there are collectives it measures what they stand on: the store, memory and flags that processes share,
//! and the reduce kernels.

mod kernels;
mod rank;
mod report;
mod shared;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::net::Ipv4Addr;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use tensorwire::Deadline;
use tensorwire::store::TcpServer;

use crate::exit::{Failure, Status};
use crate::printer::Printer;
use crate::run::outcome::signal_name;
use crate::run::{SELF, variables};
pub(crate) use rank::{Args as RankArgs, execute as execute_rank};
use report::Row;

/// What a rank of the bench is started as.
pub(crate) const RANK: &str = "__bench";

/// Measure this machine, with ranks that are started for it
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire bench                  two ranks, about ten seconds
  tensorwire bench -n 8             eight ranks
  tensorwire bench --json > figures.jsonl

Measured are the store (round trips of rank 0), memory and flags between ranks 0
and 1, a barrier of all ranks, and the reduce kernels beside memcpy. GB/s count
the bytes that are read and written, except for put and message, which count
what arrives. p50 and p99 are of single calls; of a flag, of batches of 100.

Exit codes: 0 success, 1 a rank failed, 2 wrong usage.")]
pub(crate) struct Args {
    /// How many ranks
    #[arg(short = 'n', long = "nproc", value_name = "N", default_value_t = 2)]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=1024))]
    nproc: u32,
    /// How long each measurement takes
    #[arg(long, default_value_t = 0.3)]
    seconds: f64,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

pub(crate) fn execute(args: Args, printer: &Printer) -> Result<Status, Failure> {
    let length = Duration::try_from_secs_f64(args.seconds)
        .ok()
        .filter(|length| !length.is_zero())
        .ok_or_else(|| Failure::usage("--seconds needs a number above 0"))?;
    let store = TcpServer::bind((Ipv4Addr::LOCALHOST, 0))?;
    let run = variables::Run { world: args.nproc, port: store.local_addr().port(), id: "bench".into() };
    let mut ranks = Ranks::start(&run, length)?;
    let progress = printer.progress(rank::MEASUREMENTS);
    let mut rows = Vec::new();
    let results = ranks.results()?;
    loop {
        let line = match results.recv_timeout(rank::PATIENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                let text = format!("rank 0 has measured nothing for {:?}; is it stopped?", rank::PATIENCE);
                return Err(Failure::failed(text));
            }
        };
        // What a rank that died was printing is told by its end.
        let Ok(row) = serde_json::from_str::<Row>(&line) else { break };
        progress.inc(1);
        progress.set_message(row.title());
        if args.json {
            printer.json(&row)?;
        }
        rows.push(row);
    }
    progress.finish_and_clear();
    ranks.join()?;
    if !args.json {
        report::print(&rows, args.nproc, printer)?;
    }
    Ok(Status::Success)
}

/// The ranks; dropped early, they are killed.
#[derive(Debug)]
struct Ranks(Vec<(Child, File)>);

impl Ranks {
    fn start(run: &variables::Run, length: Duration) -> Result<Self, Failure> {
        let mut ranks = Self(Vec::new());
        for rank in 0..run.world {
            let failed =
                |error: std::io::Error| Failure::failed(format!("rank {rank} could not be started: {error}"));
            // Memory and not a pipe: nobody has to read it while the rank runs.
            let complaints =
                memfd_create("complaints", MemfdFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
            let complaints = File::from(complaints);
            let out = if rank == 0 { Stdio::piped() } else { Stdio::null() };
            let mut command = Command::new(SELF);
            command.arg(RANK).arg(std::process::id().to_string()).arg(length.as_secs_f64().to_string());
            command.envs(variables::of_rank(run, rank)).stdin(Stdio::null()).stdout(out);
            command.stderr(complaints.try_clone().map_err(failed)?);
            ranks.0.push((command.spawn().map_err(failed)?, complaints));
        }
        Ok(ranks)
    }

    /// What rank 0 prints, line by line; read by a thread that ends with the pipe.
    fn results(&mut self) -> Result<Receiver<String>, Failure> {
        let out = self.0.first_mut().and_then(|(child, _)| child.stdout.take());
        let out = out.ok_or_else(|| Failure::failed("rank 0 has no output"))?;
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(out).lines().map_while(Result::ok);
            // Nobody may be listening any more.
            lines.map(|line| sender.send(line)).take_while(Result::is_ok).for_each(drop);
        });
        Ok(receiver)
    }

    /// Waits for all ranks, which have nothing to do any more. Of those that failed, one that was killed is the likelier
    /// cause.
    fn join(mut self) -> Result<(), Failure> {
        let deadline = Deadline::after(rank::PATIENCE);
        let mut failures = Vec::new();
        for (rank, (child, complaints)) in self.0.iter_mut().enumerate() {
            let failed = |error| Failure::failed(format!("waiting for rank {rank}: {error}"));
            let mut status = child.try_wait().map_err(failed)?;
            while status.is_none() && !deadline.passed() {
                std::thread::sleep(Duration::from_millis(2));
                status = child.try_wait().map_err(failed)?;
            }
            let Some(status) = status else {
                failures.push((false, rank, format!("rank {rank} (pid {}) does not end", child.id())));
                continue;
            };
            if status.success() {
                continue;
            }
            let mut said = String::new();
            // Without its words, its exit code must do.
            let _ = complaints.rewind().and_then(|()| complaints.read_to_string(&mut said));
            let said = said.trim().trim_start_matches("error: ");
            let text = match (status.signal(), said) {
                (Some(signal), _) => format!("rank {rank} was killed by {}", signal_name(signal)),
                (None, "") => format!("rank {rank} failed: {status}"),
                (None, said) => format!("rank {rank} failed: {said}"),
            };
            failures.push((status.signal().is_none(), rank, text));
        }
        match failures.into_iter().min() {
            Some((_, _, text)) => Err(Failure::failed(text)),
            None => Ok(()),
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for (child, _) in &mut self.0 {
            // No harm to one that has been waited for: the library knows that it has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
