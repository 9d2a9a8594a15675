//! `tensorwire doctor`: what this machine offers and what is off, each with its reason.
//!
//! Doctor tries out what can be tried. It asks for a version or a file only where a try would need a driver.

mod gpu;
mod hardware;
mod limits;
mod python;
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

Python is asked for its version, for the package, for torch, and whether a group
of one rank can be made with the backend. This takes the time of an import of
torch, and a minute at most. Which Python: see tensorwire run --help.

Marks:
  ok    it works
  --    a fact
  warn  it may cause trouble
  off   it is not there, and tensorwire will choose nothing that needs it
  FAIL  tensorwire cannot work like this

Exit codes: 0 processes can share host memory here; 1 they cannot, or a
TENSORWIRE_ variable is wrong; 2 wrong usage.")]
pub(crate) struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn execute(args: Args, printer: &Printer) -> Result<Status, Failure> {
    // Everything else is there at once.
    let progress = printer.progress(1);
    progress.set_message("asking Python about torch");
    let report = Report::new(vec![
        Section { name: "Sharing host memory", findings: sharing::probe() },
        Section { name: "Surroundings", findings: surroundings::probe() },
        Section { name: "Limits", findings: limits::probe() },
        Section { name: "Processors and memory", findings: hardware::probe() },
        Section { name: "GPUs and networks", findings: gpu::probe() },
        Section { name: "Python", findings: python::probe() },
        Section { name: "Variables", findings: variables::probe() },
    ]);
    progress.finish_and_clear();
    if args.json {
        printer.json(&report)?
    } else {
        report.print(printer)?
    }
    Ok(if report.works { Status::Success } else { Status::Failure })
}
