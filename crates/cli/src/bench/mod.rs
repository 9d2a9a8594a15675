//! `tensorwire bench`: measures the collectives on this machine with ranks that it starts itself.
//!
//! This process only gives orders and adds up the answers. The ranks are processes of their own, ours and those of
//! every library that we compare with. We are called as each of them is, and have the same cores (`start`, `fair`).
//! An order (`order`) is one operation at one size, to be done a number of times. Libraries take turns (`measure`).

mod binding;
mod crew;
mod ddp;
mod device;
mod fair;
mod floor;
mod gpus;
pub(crate) mod keys;
mod lease;
mod measure;
pub(crate) mod op;
mod order;
mod page;
mod parts;
pub(crate) mod path;
mod pattern;
mod peers;
mod pipe;
mod placement;
mod rank;
mod row;
mod run;
mod score;
mod sheet;
pub(crate) mod sizes;
mod spawn;
mod start;
mod table;
mod torch;

use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use tensorwire::collective::Path;
use tensorwire::{Dtype, ReduceOp};

use crate::exit::{Failure, Status};
use crate::printer::Printer;
use binding::Bind;
use device::BenchDevice;
use keys::Spread;
use op::Op;
use order::TensorMemory;
use peers::Peer;
use sizes::Sizes;

pub(crate) use parts::{RANK as PARTS_RANK, RankArgs as PartsRankArgs, execute_rank as execute_parts_rank};
pub(crate) use peers::{PEER, PeerArgs, become_peer};
pub(crate) use pipe::{OTHER as PIPE_OTHER, OtherArgs as PipeOtherArgs, execute_other as execute_pipe_other};
pub(crate) use rank::{Args as RankArgs, execute as execute_rank};

/// What a rank of the bench is started as.
pub(crate) const RANK: &str = "__bench";

/// What we are called beside our peers.
const OURS: &str = "tensorwire";

/// Measure collectives on this machine, with ranks of its own
#[derive(clap::Args, Debug)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
#[command(after_help = "\
Examples:
  tensorwire bench                             all operations at a few sizes
  tensorwire bench all-reduce -n 8             one operation, 8 B to 128 MiB
  tensorwire bench all-reduce --memory shared --sizes 64K,1M,16M
  tensorwire bench --against gloo,mpi --html figures.html
  tensorwire bench --against best              beside the fastest MPI
  tensorwire bench all-reduce --sparse 0.01 --keys zipf --against gloo
  tensorwire bench reduce-scatter --dtype bfloat16 --op max --json
  tensorwire bench all-reduce --against gloo --through native
  tensorwire bench send-recv --hosts 2 --against socket,gloo
  tensorwire bench all-reduce --hosts 2 -n 4 --against gloo
  tensorwire bench --explain                   which path for which size
  tensorwire bench parts                       what collectives stand on
  tensorwire bench all-reduce --device cuda    tensors of GPUs
  tensorwire bench --device cuda               queues and kernels of a GPU
  tensorwire bench ddp                         a training step beside Gloo
  tensorwire bench lease                       a tensor for another process
  tensorwire bench pipe                        messages between two processes

Operations: all-reduce, reduce, broadcast, all-gather, gather, scatter,
reduce-scatter, all-to-all, send-recv (even ranks send to the next), barrier.
A size is what each rank has. Some operations have a part for each rank (gather,
scatter, all-gather, reduce-scatter, all-to-all). Their size is all parts
together.

Each call is timed alone. Before it, the ranks write new inputs and meet in a
barrier. After it, every rank checks its result. The columns:
  time, p99  median and 99th percentile of the slowest rank's time
  algbw      size / time, in GB/s
  busbw      the load of the busiest link, as nccl-tests counts it, in GB/s
  wrong      the number of wrong elements
  ratio      the peer's time over ours
  floor      of an all-reduce on one shared GPU: what the reduction takes one
             rank alone, and two signals from queue to queue

On GPUs, ranks take them in turn. A call is timed until its work on the GPU is
done. Inputs are written and results are checked in calls that are not timed:
writing would have the GPU change from process to process before each call,
which takes it longer than a small operation. Without an operation or another of
these options, `parts` is measured.

With --hosts 2 or more, ranks are in blocks on hosts. These hosts are labels on
this machine, and ranks of different hosts talk over TCP on loopback, or by UCX
with --link ucx (messages alone: collectives go by TCP). Gloo knows no labels: its
ranks talk over TCP anyway. In send-recv ranks of the lower half then send to the upper half, so that each
message goes to another host. --against socket is a bare loop: two processes
that write and read the same bytes over one connection. --against ucx is such a
loop of active messages by UCX, to see --link ucx beside. --against sealed is
tensorwire with a key: what goes to other hosts is sealed. Before each message its
two ranks meet: the receiver tells the sender that it waits, and its time
begins. So the time of a small message is that of two, there and back.

A comparison is fair by default. Beside Gloo, tensorwire is called through torch
as Gloo is, by the same Python program, and nobody is bound to a core. Beside
a library of MPI, which is called from C, tensorwire is called from Rust, and rank
N of both is bound to the same core. With both kinds, tensorwire is measured both
ways. --through and --bind change this. What then differs stands below the
ratios, in `caveats` of --json, and in the page.

Gloo runs in $PYTHON, or python3, with torch and tensorwire. A command that pip
installed takes its own Python. Open MPI (mpi), Intel MPI (impi) and MPICH (mpich)
are taken from scripts/peers, from the Python environment or from PATH, and need
a C compiler. --against best runs all three and shows the fastest of them in each
row. Below the tables stands in how many rows tensorwire is ahead. A peer that
cannot run is left out with the reason. With TENSORWIRE_STRICT=1 this is an
error.

Exit codes: 0 success, 1 a rank failed or a result was wrong, 2 wrong usage.")]
pub(crate) struct Args {
    #[command(subcommand)]
    parts: Option<Part>,
    #[command(flatten)]
    chosen: Chosen,
}

#[derive(Subcommand, Debug)]
enum Part {
    Parts(parts::Args),
    Ddp(ddp::Args),
    Lease(lease::Args),
    Pipe(pipe::Args),
}

/// How tensorwire is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Through {
    /// Straight from a program in Rust
    Native,
    /// Through torch.distributed, as the backend of its Python package
    Torch,
}

/// What is to be measured.
/// What carries messages between hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum BenchLink {
    Tcp,
    Ucx,
}

impl BenchLink {
    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Ucx => "ucx",
        }
    }
}

#[derive(clap::Args, Debug)]
struct Chosen {
    /// The operation [default: all of them, at a few sizes]
    #[arg(value_name = "OP", value_parser = asked_op)]
    operation: Option<Op>,
    /// How many ranks [default: one for each core, from 2 to 8]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1024))]
    ranks: Option<u32>,
    /// On how many hosts the ranks are, as labels: what goes between them goes over TCP
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    hosts: u32,
    /// What carries messages between hosts: tcp or ucx [default: as TENSORWIRE_LINK says]
    #[arg(long, value_enum, hide_possible_values = true, value_name = "tcp|ucx")]
    link: Option<BenchLink>,
    /// A list (1K,1M) or a range (8..1M). A range doubles the size in each step; 8..1Mx4 takes it times 4
    #[arg(long, value_name = "8..128M", value_parser = sizes::parse)]
    sizes: Option<Sizes>,
    /// The elements' type, as torch names it
    #[arg(long, default_value = "float32")]
    dtype: Dtype,
    /// How elements are combined: sum, product, min, max, avg, band, bor, bxor
    #[arg(long, value_name = "OP", default_value = "sum", value_parser = order::reduce_op)]
    op: ReduceOp,
    /// All-reduce of sparse tensors: what share of the rows each rank has. A row has 64 elements; a size is that of the dense tensor
    #[arg(long, value_name = "0.01")]
    sparse: Option<f64>,
    /// Which rows ranks have with --sparse: all alike, or popular ones
    #[arg(
        long,
        value_enum,
        default_value = "uniform",
        hide_possible_values = true,
        value_name = "uniform|zipf"
    )]
    keys: Spread,
    /// The memory of our tensors. Peers always have private memory
    #[arg(
        long,
        value_enum,
        default_value = "private",
        hide_possible_values = true,
        value_name = "private|shared"
    )]
    memory: TensorMemory,
    /// Force a path: inline, one-shot, staged or direct
    #[arg(long, value_name = "NAME")]
    path: Option<Path>,
    /// How tensorwire is called: from Rust, or as a backend of torch [default: as the peer is, else native]
    #[arg(long, value_enum, hide_possible_values = true, value_name = "native|torch")]
    through: Option<Through>,
    /// Whose ranks are bound to a core each [default: all that are not called through torch]
    #[arg(long, value_enum, hide_possible_values = true, value_name = "all|ours|none")]
    bind: Option<Bind>,
    /// Where tensors live: host, cuda or cuda:N (all ranks on GPU N)
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: BenchDevice,
    /// How long each size is measured
    #[arg(long, default_value_t = 0.25)]
    seconds: f64,
    /// Libraries to compare with, in the same run: gloo, mpi, impi, mpich, best (of MPI), socket, sealed
    #[arg(long, value_name = "PEERS", value_enum, value_delimiter = ',', hide_possible_values = true)]
    against: Vec<Peer>,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
    /// Also write a page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print which sizes take which path, and measure nothing
    #[arg(long)]
    explain: bool,
}

pub(crate) fn execute(args: Args, printer: &Printer) -> Result<Status, Failure> {
    match args.parts {
        Some(Part::Parts(args)) => parts::execute(&args, printer),
        Some(Part::Ddp(args)) => ddp::execute(&args, printer),
        Some(Part::Lease(args)) => lease::execute(&args, printer),
        Some(Part::Pipe(args)) => pipe::execute(&args, printer),
        None if args.chosen.device.is_gpu() && !args.chosen.has_collectives() => {
            parts_of_gpu(&args.chosen, printer)
        }
        None => run::execute(args.chosen, printer),
    }
}

impl Chosen {
    /// Whether something is given that only collectives have.
    fn has_collectives(&self) -> bool {
        self.operation.is_some()
            || self.hosts > 1
            || self.link.is_some()
            || self.sizes.is_some()
            || self.dtype != Dtype::F32
            || self.op != ReduceOp::Sum
            || self.memory != TensorMemory::Private
            || self.path.is_some()
            || self.sparse.is_some()
            || self.through.is_some()
            || self.bind.is_some()
            || !self.against.is_empty()
            || self.html.is_some()
            || self.explain
    }
}

/// What a GPU does below the collectives.
fn parts_of_gpu(chosen: &Chosen, printer: &Printer) -> Result<Status, Failure> {
    let device = chosen.device;
    device.check()?;
    printer.note(&format!("as bench parts --device {device}; with an operation, collectives are measured"));
    let (ranks, seconds, json) = (chosen.ranks.unwrap_or(2), chosen.seconds, chosen.json);
    parts::execute(&parts::Args { ranks, device, seconds, json }, printer)
}

/// How long something is measured.
fn length(seconds: f64) -> Result<Duration, Failure> {
    let length = Duration::try_from_secs_f64(seconds).ok().filter(|length| !length.is_zero());
    length.ok_or_else(|| Failure::usage("--seconds needs a number above 0"))
}

pub(crate) fn asked_op(name: &str) -> Result<Op, String> {
    let op: Op = name.parse()?;
    // The others have no name for users.
    if Op::ALL.contains(&op) { Ok(op) } else { Err(format!("{op} is measured beside every operation")) }
}
