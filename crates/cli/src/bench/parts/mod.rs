//! `tensorwire bench parts`: the parts that collectives are made of, each measured by itself. They are the store,
//! memory and flags that processes share, a barrier, and the reduce kernels.

mod kernels;
mod queues;
mod rank;
mod report;
mod shared;

use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use tensorwire::Deadline;
use tensorwire::store::TcpServer;

use super::device::BenchDevice;
use super::spawn::Processes;
use crate::exit::{Failure, Status};
use crate::printer::Printer;
use crate::run::variables;
use crate::this_program;
pub(super) use queues::{BATCH, Pair};
pub(crate) use rank::{Args as RankArgs, execute as execute_rank};
use report::Row;
pub(super) use shared::{hand_over, take_over};

/// What a rank is started as.
pub(crate) const RANK: &str = "__bench-parts";

/// Measure what the collectives are made of
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire bench parts            two ranks, about ten seconds
  tensorwire bench parts -n 8       eight ranks
  tensorwire bench parts --json > figures.jsonl
  tensorwire bench parts --device cuda    queues and kernels of the first GPU

The command measures the store (round trips of rank 0), memory and flags between
ranks 0 and 1, a barrier of all ranks, and the reduce kernels beside memcpy.
GB/s count the bytes that are read and written; for put and message they count
the bytes that arrive. p50 and p99 are of single calls; for a flag they are of
batches of 100.

On a GPU, calls are queued in batches, and signals go from queue to queue. Ranks
share the GPU. With MPS (nvidia-cuda-mps-control -d) they run at the same time.
Where a stream may not wait, the calling thread waits instead; both are counted.

Exit codes: 0 success, 1 a rank failed, 2 wrong usage.")]
pub(crate) struct Args {
    /// How many ranks
    #[arg(short = 'n', long = "ranks", value_name = "N", default_value_t = 2)]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=1024))]
    pub(super) ranks: u32,
    /// Whose queues and kernels: host, cuda, or cuda:N
    #[arg(long, value_name = "DEVICE", default_value_t)]
    pub(super) device: BenchDevice,
    /// How long each measurement takes
    #[arg(long, default_value_t = 0.3)]
    pub(super) seconds: f64,
    /// Print JSON lines
    #[arg(long)]
    pub(super) json: bool,
}

pub(crate) fn execute(args: &Args, printer: &Printer) -> Result<Status, Failure> {
    let length = super::length(args.seconds)?;
    let store = TcpServer::bind((Ipv4Addr::LOCALHOST, 0))?;
    let run = variables::Run { world: args.ranks, port: store.local_addr().port(), id: "bench".into() };
    // Said once, and not by each rank.
    args.device.check()?;
    let (mut ranks, results) = start(&run, length, args.device)?;
    let progress = printer.progress(rank::measurements(args.device));
    let mut rows = Vec::new();
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
    if let Some(failure) = ranks.failure(Deadline::after(rank::PATIENCE)) {
        return Err(Failure::failed(failure));
    }
    if !args.json {
        report::print(&rows, args.ranks, args.device, printer)?;
    }
    Ok(Status::Success)
}

/// The ranks, and what rank 0 prints, line by line; read by a thread that ends with the pipe.
fn start(
    run: &variables::Run,
    length: Duration,
    device: BenchDevice,
) -> Result<(Processes, Receiver<String>), Failure> {
    let mut ranks = Processes::default();
    let (sender, receiver) = channel();
    for rank in 0..run.world {
        let mut command = this_program::command();
        command.arg(RANK).arg(std::process::id().to_string()).arg(length.as_secs_f64().to_string());
        command.arg(device.to_string());
        command.envs(variables::of_rank(run, rank)).stdin(Stdio::null());
        command.stdout(if rank == 0 { Stdio::piped() } else { Stdio::null() });
        let child = ranks.start(format!("rank {rank}"), &mut command)?;
        if let Some(out) = child.stdout.take() {
            let sender = sender.clone();
            std::thread::spawn(move || {
                let lines = BufReader::new(out).lines().map_while(Result::ok);
                // Nobody may be listening any more.
                lines.map(|line| sender.send(line)).take_while(Result::is_ok).for_each(drop);
            });
        }
    }
    Ok((ranks, receiver))
}
