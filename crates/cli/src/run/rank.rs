//! A rank between its start and its program: it asks to die with the keeper, then becomes the program.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::exit::{Failure, Status};
use crate::run::program::cannot_start;

/// A rank of `run` before it becomes its program
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    keeper: i32,
    #[arg(required = true, last = true)]
    program: Vec<OsString>,
}

/// Replaces this process by the program. Its stdin is a pipe on which the keeper hears why that failed; the
/// pipe closes by itself when it worked.
pub(crate) fn become_program(args: Args) -> Result<Status, Failure> {
    let (program, rest) = args.program.split_first().ok_or_else(|| Failure::usage("no program"))?;
    let io = |error: rustix::io::Errno| Failure::failed(format!("preparing a rank: {error}"));
    let report = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 3).map_err(io)?;
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(io)?;
    // The keeper may have died before the line above.
    if getppid().is_none_or(|parent| parent.as_raw_pid() != args.keeper) {
        return Err(Failure::failed("the keeper of the ranks is gone"));
    }
    let error = Command::new(program).args(rest).stdin(Stdio::null()).exec();
    let errno = error.raw_os_error().unwrap_or(0);
    let told = std::fs::File::from(report).write_all(&errno.to_ne_bytes());
    let failure = cannot_start(program, rustix::io::Errno::from_raw_os_error(errno));
    // The keeper says it once for all ranks.
    if told.is_ok() { Ok(failure.status()) } else { Err(failure) }
}
