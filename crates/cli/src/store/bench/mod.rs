//! `tensorwire store bench`: operations per second and their latency, ours and torch's server in one run.
//!
//! Each server is a process of its own, and the same client drives all of them. Two servers are measured in turns,
//! so that a slow moment of the machine hits both.

mod load;
mod server;
mod waiter;

use std::path::PathBuf;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;

use crate::exit::{Failure, Status};
use crate::latency::{Latency, figure};
use crate::printer::{Printer, Tone, table};
use load::Operation;
use server::Server;

/// Measure a store's operations per second and their latency
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire store bench
  tensorwire store bench --clients 1,16,1000 --seconds 1
  tensorwire store bench --against torch --python .venv/bin/python --json

A few threads drive all clients, and each thread has one operation in flight.
`wake` is the time from a set until another client's wait for that key returns.
With --against torch, both servers take turns, and the clients speak torch's
protocol to both. ops/s and ratio are medians over the rounds.

Exit codes: 0 success, 1 an operation failed or no server, 2 wrong usage.")]
pub(crate) struct Args {
    /// How many clients are connected, one measurement for each number
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', default_values_t = [1, 16, 1000])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=60000))]
    clients: Vec<u32>,
    /// How long each measurement takes
    #[arg(long, default_value_t = 0.2)]
    seconds: f64,
    /// How often each measurement is repeated
    #[arg(long, default_value_t = 7)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10000))]
    rounds: u32,
    /// At most this many threads drive the clients
    #[arg(long, default_value_t = 8)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Also measure another server in the same run
    #[arg(long, value_enum)]
    against: Option<Other>,
    /// A Python that has torch
    #[arg(long, default_value = "python3")]
    python: PathBuf,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

#[derive(clap::ValueEnum, Debug, Clone, Copy)]
enum Other {
    /// PyTorch's TCPStore (libuv)
    Torch,
    /// PyTorch's TCPStore (legacy, not libuv)
    TorchLegacy,
}

/// One line of the result.
#[derive(Debug, Serialize)]
struct Row {
    bench: &'static str,
    server: String,
    protocol: &'static str,
    op: Operation,
    clients: u32,
    threads: u32,
    ops_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    /// Ours as a multiple of the other server's operations per second: the median over the rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
}

pub(crate) fn execute(args: Args, printer: &Printer) -> Result<Status, Failure> {
    let length = Duration::try_from_secs_f64(args.seconds)
        .ok()
        .filter(|length| !length.is_zero())
        .ok_or_else(|| Failure::usage("--seconds needs a number above 0"))?;
    allow_many_connections();
    let mut servers = vec![Server::ours()?];
    if let Some(other) = args.against {
        servers.push(Server::torch(&args.python, matches!(other, Other::Torch))?);
    }
    let as_torch = servers.len() > 1;
    let protocol = if as_torch { "torch" } else { "tensorwire" };
    let steps = args.clients.len() * args.rounds as usize * servers.len() * Operation::ALL.len();
    let progress = printer.progress(steps);
    let mut rows = Vec::new();
    for &clients in &args.clients {
        progress.set_message(format!("connecting {clients} clients"));
        let connect = |server: &Server| load::Load::connect(server.port(), as_torch, clients, args.threads);
        let loads = servers.iter().map(connect).collect::<tensorwire::Result<Vec<_>>>()?;
        for op in Operation::ALL {
            let mut samples: Vec<Samples> = servers.iter().map(|_| Samples::default()).collect();
            for round in 0..args.rounds {
                // By turns, each first as often as the other.
                for turn in 0..servers.len() {
                    let index = (turn + round as usize) % servers.len();
                    progress.set_message(format!("{} {op}, {clients} clients", servers[index].name()));
                    samples[index].add(loads[index].run(op, round, length)?);
                    progress.inc(1);
                }
            }
            let ours = samples[0].rates.clone();
            for (index, (server, mut samples)) in servers.iter().zip(samples).enumerate() {
                let [p50_us, p99_us] = samples.latency.quantiles([0.5, 0.99]);
                let ratios = ours.iter().zip(&samples.rates).map(|(ours, its)| ours / its).collect();
                rows.push(Row {
                    bench: "store",
                    server: server.name().to_owned(),
                    protocol,
                    op,
                    clients,
                    threads: args.threads.min(clients),
                    ops_per_s: median(samples.rates),
                    p50_us,
                    p99_us,
                    ratio: (index > 0).then(|| median(ratios)),
                });
            }
        }
    }
    progress.finish_and_clear();
    print(&rows, args.json, printer)?;
    Ok(Status::Success)
}

/// What the rounds of one measurement gave.
#[derive(Debug, Default)]
struct Samples {
    latency: Latency,
    rates: Vec<f64>,
}

impl Samples {
    fn add(&mut self, (latency, elapsed): (Latency, Duration)) {
        self.rates.push(latency.count() as f64 / elapsed.as_secs_f64());
        self.latency.merge(latency);
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// As many descriptors as we may have; the servers inherit it.
fn allow_many_connections() {
    let limit = getrlimit(Resource::Nofile);
    // Where it is not allowed, connecting will say what is missing.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

fn print(rows: &[Row], json: bool, printer: &Printer) -> std::io::Result<()> {
    if json {
        return rows.iter().try_for_each(|row| printer.json(row));
    }
    let cells = |row: &Row| {
        let ratio = row.ratio.map(|ratio| format!("{ratio:.2}x")).unwrap_or_default();
        vec![
            format!("{} {}", row.op, row.server),
            row.clients.to_string(),
            figure(row.ops_per_s),
            figure(row.p50_us),
            figure(row.p99_us),
            ratio,
        ]
    };
    let head = ["operation", "clients", "ops/s", "p50 us", "p99 us", "ours/it"];
    let columns = if rows.iter().any(|row| row.ratio.is_some()) { 6 } else { 5 };
    let lines = table(&head[..columns], &rows.iter().map(cells).collect::<Vec<_>>());
    printer.line(&printer.tint(Tone::Heading, &lines[0]))?;
    lines[1..].iter().try_for_each(|line| printer.line(line))
}
