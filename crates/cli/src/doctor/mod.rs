//! `tensorwire doctor`: what this machine offers and what is off, each with its reason.
//!
//! What can be tried is tried; a version or a file is only asked where trying takes a driver.

mod gpu;
mod hardware;
mod limits;
mod report;
mod sharing;
mod surroundings;
mod variables;

use crate::exit::{Failure, Status};
use crate::printer::Printer;
pub(crate) use hardware::model as processor;
pub(crate) use report::bytes;
use report::{Report, Section};

/// Say what this machine offers, what is off, and why
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire doctor                 what works here, what does not, and why
  tensorwire doctor --json | jq .   the same for programs

Marks: ok works; -- a fact; warn may trouble you; off is not there, and nothing
that needs it will be chosen; FAIL tensorwire cannot work like this.

Exit codes: 0 host memory can be shared here; 1 something that this needs
failed, or a TENSORWIRE_ variable is wrong; 2 wrong usage.")]
pub(crate) struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn execute(args: Args, printer: &Printer) -> Result<Status, Failure> {
    let report = Report::new(vec![
        Section { name: "Sharing host memory", findings: sharing::probe() },
        Section { name: "Surroundings", findings: surroundings::probe() },
        Section { name: "Limits", findings: limits::probe() },
        Section { name: "Processors and memory", findings: hardware::probe() },
        Section { name: "GPUs and networks", findings: gpu::probe() },
        Section { name: "Variables", findings: variables::probe() },
    ]);
    if args.json {
        printer.json(&report)?
    } else {
        report.print(printer)?
    }
    Ok(if report.works { Status::Success } else { Status::Failure })
}
