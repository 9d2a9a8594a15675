//! `tensorwire status`: how the groups and leases of a process stand, seen from outside.

mod json;
mod table;

use std::path::PathBuf;

use tensorwire::status::{self, Options};

use crate::exit::{Failure, Status};
use crate::printer::Printer;

/// Show what the ranks of a job do, and who waits for whom
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire status 812             its groups, with all ranks of the host
  tensorwire status 812 --job       also the other groups of those ranks
  tensorwire status 812 --last 20   also the last 20 operations of its ranks,
                                    and why large ones were not direct
  tensorwire status 812 --json      one JSON object for each group and rank,
                                    and for each process that lends memory

This works while ranks are stuck or stopped, because it opens their memory
through /proc. Where that is not allowed, it asks ranks of the same user over
their private sockets. If TENSORWIRE_SOCKET_DIR is set for the job, set it here,
too.

Exit codes: 0 shown; 1 nothing to show, with the reason; 2 wrong usage.")]
pub(crate) struct Args {
    /// A process of the job: any rank
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: u32,
    /// Also show the other groups of those ranks, their ranks, and so on
    #[arg(long)]
    job: bool,
    /// Print JSON lines, one for each group and rank
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
    let report = status::of(args.pid, &options)?;
    if report.groups.is_empty() && report.leases.is_empty() {
        return Err(Failure::failed(report.remarks.join("; ")));
    }
    let now = status::now();
    if args.json {
        for group in &report.groups {
            for rank in &group.ranks {
                printer.json(&json::RankLine::new(group, rank, args.last, now))?;
            }
        }
        for lease in &report.leases {
            printer.json(&json::Lease::new(lease))?;
        }
        return Ok(Status::Success);
    }
    for (index, group) in report.groups.iter().enumerate() {
        if index > 0 {
            printer.line("")?;
        }
        table::print(group, printer, now)?;
        let here: Vec<_> = group.ranks.iter().filter(|rank| rank.pid == args.pid).collect();
        let listed = if args.job || here.is_empty() { group.ranks.iter().collect() } else { here };
        for rank in listed.into_iter().filter(|_| args.last > 0) {
            table::print_last(rank, args.last, printer, now)?;
        }
    }
    if !report.leases.is_empty() {
        if !report.groups.is_empty() {
            printer.line("")?;
        }
        table::print_leases(&report.leases, args.pid, printer)?;
    }
    Ok(Status::Success)
}

fn socket_dir() -> Result<Option<PathBuf>, Failure> {
    Ok(tensorwire::Config::from_env()?.socket_dir)
}
