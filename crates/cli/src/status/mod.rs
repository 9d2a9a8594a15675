//! `tensorwire status`: how the groups and leases of a process stand, seen from outside.

mod jobs;
mod json;
mod table;

use std::io;
use std::path::PathBuf;

use tensorwire::status::{self, Options, Report};

use crate::exit::{Failure, Status};
use crate::printer::Printer;

/// Show what the ranks of a job do, and who waits for whom
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire status                 the jobs of this user; one alone is shown
  tensorwire status 812             the groups of a launcher's ranks, or of one
                                    rank, with all ranks of the host
  tensorwire status 812 --job       also the other groups of those ranks
  tensorwire status 812 --last 20   also the last 20 operations of its ranks,
                                    and why large ones were not direct
  tensorwire status 812 --json      one JSON object for each group and rank,
                                    and for each process that lends memory
  tensorwire status --json          one JSON object for each job

PID is a rank, or any process above ranks: `tensorwire run`, torchrun, srun's
step, a shell. A rank that is in no operation computes or sleeps outside of
tensorwire. For such a rank, a command is named that shows its stacks: py-spy
for Python (pip install py-spy), eu-stack (elfutils) for other programs.

A pipe has a row for each end: with whom it is connected, how many messages
that it has sent are not taken there, and since when the oldest waits. Of a pipe
to another host this is not known.

An operation on a GPU is queued until the queues of all ranks have come to it,
and then running. The hosts of these ranks are idle, or in other operations.

This works while ranks are stuck or stopped, because it opens their memory
through /proc. Where that is not allowed, it asks ranks of the same user over
their private sockets. If TENSORWIRE_SOCKET_DIR is set for the job, set it here,
too.

Exit codes: 0 shown; 1 nothing to show, with the reason; 2 wrong usage.")]
pub(crate) struct Args {
    /// A process of the job: its launcher or any rank [default: list all jobs]
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,
    /// Also show the other groups of those ranks, their ranks, and so on
    #[arg(long)]
    job: bool,
    /// Print JSON lines, one for each group and rank; without PID, for each job
    #[arg(long)]
    json: bool,
    /// Also list the last N operations of PID's ranks (with --job, of all ranks)
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    last: usize,
    /// Ask private sockets even where /proc shows everything
    #[arg(long, hide = true)]
    sockets_only: bool,
}

pub(crate) fn execute(args: Args, printer: &Printer) -> Result<Status, Failure> {
    let mut options = Options::default();
    options.job = args.job;
    options.sockets_only = args.sockets_only;
    options.socket_dir = socket_dir()?;
    let report = match args.pid {
        Some(pid) => status::of(pid, &options)?,
        None => status::of_this_user(&options)?,
    };
    if report.jobs.is_empty() && report.leases.is_empty() {
        return Err(nothing(&args, &report));
    }
    let now = status::now();
    match (args.pid, &report.jobs[..]) {
        (None, jobs) if args.json => jobs::print_json(jobs, printer)?,
        (_, _) if args.json => print_json(&report, args.last, printer, now)?,
        (None, jobs @ [_, _, ..]) => jobs::print(jobs, printer)?,
        _ => print(&args, &report, printer, now)?,
    }
    Ok(Status::Success)
}

/// Why there is nothing to show, and what to do.
fn nothing(args: &Args, report: &Report) -> Failure {
    let what_to_do = match args.pid {
        Some(_) => "tensorwire status without a pid lists the jobs of this user",
        None => {
            "to see a job of another user, give a pid of it as root; for one in another container, ask in there"
        }
    };
    Failure::failed(format!("{}; {what_to_do}", report.remarks.join("; ")))
}

fn print_json(report: &Report, last: usize, printer: &Printer, now: u64) -> io::Result<()> {
    for group in report.groups() {
        for rank in &group.ranks {
            printer.json(&json::RankLine::new(group, rank, last, now))?;
        }
    }
    report.leases.iter().try_for_each(|lease| printer.json(&json::Lease::new(lease)))
}

fn print(args: &Args, report: &Report, printer: &Printer, now: u64) -> io::Result<()> {
    let mut between = "";
    for job in &report.jobs {
        // A user who has given the pid of a rank knows which job it is.
        if args.pid.is_none_or(|pid| !job.pids.contains(&pid)) {
            jobs::head(job, &report.jobs, printer, between)?;
            between = "\n";
        }
        let (pipes, groups): (Vec<_>, Vec<_>) = job.groups.iter().partition(|group| group.is_pipe());
        if !pipes.is_empty() {
            printer.bytes(between.as_bytes())?;
            between = "\n";
            table::print_pipes(&pipes, printer, now)?;
        }
        for group in groups {
            printer.bytes(between.as_bytes())?;
            between = "\n";
            table::print(group, printer, now)?;
        }
        for group in job.groups.iter().filter(|_| args.last > 0) {
            let here: Vec<_> = group.ranks.iter().filter(|rank| Some(rank.pid) == args.pid).collect();
            let listed = if args.job || here.is_empty() { group.ranks.iter().collect() } else { here };
            for rank in listed {
                table::print_last(rank, args.last, printer, now)?;
            }
        }
    }
    if !report.leases.is_empty() {
        printer.bytes(between.as_bytes())?;
        table::print_leases(&report.leases, args.pid, printer)?;
    }
    Ok(())
}

fn socket_dir() -> Result<Option<PathBuf>, Failure> {
    Ok(tensorwire::Config::from_env()?.socket_dir)
}
