//! `tensorwire plan`: what a collective between hosts does, and how long it may take. Nothing is run.

use serde::Serialize;
use tensorwire::Dtype;
use tensorwire::collective::{ExchangeCost, HostsPlan, NearCost, hosts_plan};

use crate::bench::op::Op;
use crate::bench::{asked_op, path, sizes};
use crate::exit::{Failure, Status};
use crate::printer::{Printer, Tone, WIDTH, wrap};
use crate::units;

/// Show what a collective between hosts does, and predict its time
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire plan --hosts 512 --ranks-per-host 8 --bytes 64M
  tensorwire plan broadcast --hosts 4 --bytes 1G --link 1.2 --latency 50
  tensorwire plan --hosts 16 --bytes 1K --json

This runs nothing. It makes the plans that ranks of such a group would have, and
counts. A size is what each rank has. Some operations have a part for each rank
(gather, scatter, all-gather, reduce-scatter, all-to-all). Their size is all
parts together.

An operation has three parts. The ranks of a host bring to their leader what
other hosts need, the leaders exchange it, and each leader gives its host the
result. The rows show the rank that does most. In the exchange that is the
leader of the first host, whose first rank is the root.

The time is that of a simple model, and no more than a hint. In a host, each
wait takes 0.5 us. Bytes are read and written at the speed of --memory. Between
hosts, a step takes the latency, and a message 3 us of the leader. Bytes take
the time of the link, or of the reduction if that is longer. The three parts
follow each other.

Exit codes: 0 success, 2 wrong usage.")]
pub(crate) struct Args {
    /// The operation
    #[arg(value_name = "OP", default_value = "all-reduce", value_parser = asked_op)]
    operation: Op,
    /// How many hosts there are
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=4096))]
    hosts: u32,
    /// How many ranks each host has
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    ranks_per_host: u32,
    /// What each rank has
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = sizes::size)]
    bytes: usize,
    /// The elements' type, as torch names it
    #[arg(long, default_value = "float32")]
    dtype: Dtype,
    /// What a link carries in each direction, in GB/s
    #[arg(long, value_name = "GB/s", default_value_t = 12.5)]
    link: f64,
    /// How long a byte takes to another host, in microseconds
    #[arg(long, value_name = "US", default_value_t = 20.0)]
    latency: f64,
    /// How fast a rank copies memory, in GB/s
    #[arg(long, value_name = "GB/s", default_value_t = 8.0)]
    memory: f64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Microseconds of a wait inside a host, and of a message at its leader.
const WAIT: f64 = 0.5;
const MESSAGE: f64 = 3.0;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Line {
    op: &'static str,
    hosts: u32,
    ranks_per_host: u32,
    bytes: usize,
    dtype: String,
    collect: Near,
    exchange: Exchange,
    spread: Near,
    model: Model,
    predicted_us: f64,
}

#[derive(Debug, Serialize)]
struct Near {
    op: &'static str,
    path: Option<&'static str>,
    signals: usize,
    waits: usize,
    bytes_copied: usize,
    bytes_reduced: usize,
    bytes_written: usize,
    predicted_us: f64,
}

#[derive(Debug, Serialize)]
struct Exchange {
    peers: usize,
    steps: usize,
    messages_sent: usize,
    messages_received: usize,
    bytes_sent: usize,
    bytes_sent_to_one: usize,
    bytes_received: usize,
    pieces: usize,
    bytes_reduced: usize,
    bytes_written: usize,
    predicted_us: f64,
}

/// See `Args`.
#[derive(Debug, Clone, Copy, Serialize)]
struct Model {
    link_gbs: f64,
    latency_us: f64,
    memory_gbs: f64,
}

impl Model {
    /// Microseconds to read and write so many bytes.
    fn touch(self, bytes: usize) -> f64 {
        // A copy reads and writes.
        bytes as f64 / 2.0 / self.memory_gbs / 1e3
    }

    fn near(self, cost: &NearCost) -> Near {
        let touched = 2 * cost.copied + cost.read + cost.written;
        Near {
            op: cost.kind.name(),
            path: cost.path.map(|path| path.name()),
            signals: cost.signals,
            waits: cost.waits,
            bytes_copied: cost.copied,
            bytes_reduced: cost.read,
            bytes_written: cost.written,
            predicted_us: cost.waits as f64 * WAIT + self.touch(touched),
        }
    }

    fn exchange(self, cost: &ExchangeCost) -> Exchange {
        let wire = cost.sent.max(cost.received) as f64 / self.link_gbs / 1e3;
        let messages = (cost.messages_sent + cost.messages_received) as f64 * MESSAGE;
        let work = wire.max(self.touch(cost.read + cost.written));
        Exchange {
            peers: cost.peers,
            steps: cost.steps,
            messages_sent: cost.messages_sent,
            messages_received: cost.messages_received,
            bytes_sent: cost.sent,
            bytes_sent_to_one: cost.sent_to_one,
            bytes_received: cost.received,
            pieces: cost.pieces,
            bytes_reduced: cost.read,
            bytes_written: cost.written,
            predicted_us: cost.steps as f64 * self.latency_us + messages + work,
        }
    }
}

pub(crate) fn execute(args: Args, printer: &Printer) -> Result<Status, Failure> {
    for (name, value) in [("link", args.link), ("memory", args.memory)] {
        if !(value.is_finite() && value > 0.0) {
            return Err(Failure::usage(format!("--{name} needs a number above 0")));
        }
    }
    if !(args.latency.is_finite() && args.latency >= 0.0) {
        return Err(Failure::usage("--latency needs a number of 0 or more"));
    }
    let kind = path::kind(args.operation).filter(|_| args.operation != Op::SendRecv);
    let kind = kind.ok_or_else(|| Failure::usage("send-recv is a message and has no plan"))?;
    let world = args.hosts as usize * args.ranks_per_host as usize;
    let bytes = args.operation.fit(args.bytes, args.dtype.size(), world);
    let (hosts, ranks) = (args.hosts as usize, args.ranks_per_host as usize);
    let plan = hosts_plan(kind, hosts, ranks, bytes, args.dtype).map_err(Failure::usage)?;
    let model = Model { link_gbs: args.link, latency_us: args.latency, memory_gbs: args.memory };
    let HostsPlan { collect, exchange, spread, .. } = plan;
    let (collect, exchange, spread) = (model.near(&collect), model.exchange(&exchange), model.near(&spread));
    let line = Line {
        op: args.operation.name(),
        hosts: args.hosts,
        ranks_per_host: args.ranks_per_host,
        bytes,
        dtype: args.dtype.to_string(),
        predicted_us: collect.predicted_us + exchange.predicted_us + spread.predicted_us,
        collect,
        exchange,
        spread,
        model,
    };
    match args.json {
        true => printer.json(&line)?,
        false => show(&line, printer)?,
    }
    Ok(Status::Success)
}

fn show(line: &Line, printer: &Printer) -> Result<(), Failure> {
    let Line { op, hosts, ranks_per_host: ranks, bytes, dtype, exchange, .. } = line;
    let ranks = if *ranks == 1 { "1 rank".to_owned() } else { format!("{ranks} ranks") };
    printer.line(&format!("{op} of {}, {dtype}, {hosts} hosts of {ranks}\n", sizes::show(*bytes)))?;
    let row = |cells: [&str; 6]| {
        let [part, how, waits, copied, reduced, time] = cells;
        format!("{part:<9} {how:<24} {waits:>6} {copied:>11} {reduced:>11} {time:>10}")
    };
    let head = row(["part", "how", "waits", "copied", "reduced", "time"]);
    printer.line(&printer.tint(Tone::Heading, &head))?;
    let near = |name: &str, near: &Near| {
        let how = match near.path {
            Some(path) => format!("{}, {path}", near.op),
            None if near.waits == 0 => "nothing".into(),
            None => near.op.to_owned(),
        };
        let (copied, reduced) = (sizes::show(near.bytes_copied), sizes::show(near.bytes_reduced));
        row([name, &how, &near.waits.to_string(), &copied, &reduced, &units::time(near.predicted_us)])
    };
    printer.line(&near("collect", &line.collect))?;
    let how = format!("{} other leaders", exchange.peers);
    let (steps, reduced) = (exchange.steps.to_string(), sizes::show(exchange.bytes_reduced));
    printer.line(&row(["exchange", &how, &steps, "-", &reduced, &units::time(exchange.predicted_us)]))?;
    printer.line(&near("spread", &line.spread))?;
    printer.line(&row(["all", "", "", "", "", &units::time(line.predicted_us)]))?;
    let [sent, to_one, received] =
        [exchange.bytes_sent, exchange.bytes_sent_to_one, exchange.bytes_received].map(sizes::show);
    let pieces = match exchange.pieces {
        0 => String::new(),
        1 => " It makes a result in one piece.".to_owned(),
        pieces => format!(" It makes a result in {pieces} pieces."),
    };
    let text = format!(
        "The first leader sends {sent} in {} messages, at most {to_one} to one other, and gets {received} in {}.{pieces}",
        exchange.messages_sent, exchange.messages_received
    );
    let Model { link_gbs, latency_us, memory_gbs } = line.model;
    let model = format!(
        "Times are predicted, for links of {link_gbs} GB/s and {latency_us} us, and memory of {memory_gbs} GB/s."
    );
    for text in ["", &text, &model] {
        wrap(text, WIDTH).iter().try_for_each(|line| printer.line(line))?;
    }
    Ok(())
}
