//! Gloo, as torch.distributed runs it: one Python process for each rank.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::process::Stdio;

use super::folder::Folder;
use super::{PATIENCE, wrapped};
use crate::bench::crew::{Crew, Pipes};
use crate::bench::spawn::Processes;

const WORKER: &str = include_str!("gloo.py");

pub(super) fn start(ranks: u32, cpus: &[usize]) -> Result<Crew, String> {
    let python = std::env::var_os("PYTHON").filter(|python| !python.is_empty());
    let python = python.unwrap_or_else(|| OsString::from("python3"));
    // Only until all have met: then it goes, and a bench that is killed leaves nothing behind.
    let folder = Folder::new("gloo")?;
    let script = folder.write("worker.py", WORKER)?;
    let mut processes = Processes::default();
    let mut pipes = Vec::new();
    for rank in 0..ranks {
        let mut command = wrapped(cpus, &python);
        command.arg(&script).arg(folder.path().join("store"));
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("OMP_NUM_THREADS", "1");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = processes.start(format!("gloo's rank {rank}"), &mut command);
        let child = child.map_err(|failure| failure.text().unwrap_or_default().to_owned())?;
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(format!("rank {rank} has no pipes"));
        };
        let (orders, answers) = (File::from(OwnedFd::from(orders)), File::from(OwnedFd::from(answers)));
        pipes.push(Pipes { orders, answers });
    }
    Crew::gather("gloo", processes, pipes, PATIENCE)
        .map_err(|why| format!("{why} (python is {}; PYTHON names another one)", python.display()))
}
