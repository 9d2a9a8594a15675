//! A process on its way to become a rank of another library: it is bound to its core first, as our ranks are.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::Signal;

use crate::bench::binding;
use crate::bench::spawn::end_with_parent;
use crate::exit::{Failure, Status};

/// A rank of another library before it becomes its program
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The bench if it starts this process itself; otherwise 0
    parent: i32,
    /// The cores of ranks 0, 1, ...
    #[arg(long, value_delimiter = ',')]
    cpus: Vec<String>,
    #[arg(required = true, last = true)]
    program: Vec<OsString>,
}

pub(crate) fn execute(args: Args) -> Result<Status, Failure> {
    let (program, rest) = args.program.split_first().ok_or_else(|| Failure::usage("no program"))?;
    // mpirun tells its ranks to end when it is asked to; it cannot when it is killed.
    end_with_parent((args.parent != 0).then_some(args.parent), Signal::TERM)?;
    let cpus: Vec<usize> = args.cpus.iter().filter_map(|cpu| cpu.parse().ok()).collect();
    if !cpus.is_empty() {
        let rank = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK"]
            .into_iter()
            .find_map(|name| std::env::var(name).ok());
        let rank = rank.and_then(|rank| rank.parse().ok());
        binding::bind(&cpus, rank.ok_or_else(|| Failure::failed("no variable tells the rank"))?)?;
    }
    let error = Command::new(program).args(rest).exec();
    Err(Failure::failed(format!("{} cannot be started: {error}", program.display())))
}
