//! Open MPI: a C program that is compiled for the run, its ranks started by mpirun.

use std::process::{Command, Stdio};

use super::folder::Folder;
use super::{PATIENCE, PEER, wrapped};
use crate::bench::crew::{Crew, Pipes};
use crate::bench::spawn::Processes;
use crate::this_program;

const WORKER: &str = include_str!("mpi.c");

pub(super) fn start(ranks: u32, cpus: &[usize]) -> Result<Crew, String> {
    is_open_mpi()?;
    // Only until all ranks are up: then it goes, and a bench that is killed leaves nothing behind.
    let folder = Folder::new("mpi")?;
    let source = folder.write("worker.c", WORKER)?;
    let program = folder.path().join("worker");
    let compiled = Command::new("mpicc").arg("-O2").arg("-o").arg(&program).arg(&source).output();
    let compiled = compiled.map_err(|error| format!("mpicc cannot be started: {error}"))?;
    if !compiled.status.success() {
        let said = String::from_utf8_lossy(&compiled.stderr);
        let first = said.lines().next().unwrap_or("it says nothing");
        return Err(format!("mpicc could not compile its program: {first}"));
    }
    let mut pipes = Vec::new();
    for rank in 0..ranks {
        let orders = folder.pipe(&format!("orders-{rank}"))?;
        let answers = folder.pipe(&format!("answers-{rank}"))?;
        pipes.push(Pipes { orders, answers });
    }
    let mut command = wrapped(&[], "mpirun");
    if rustix::process::geteuid().is_root() {
        command.arg("--allow-run-as-root");
    }
    // Its own binding would differ from ours: each rank binds itself.
    command.args(["--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()]);
    let this = this_program::words().map_err(|error| format!("this program: {error}"))?;
    let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
    command.args(this).args([PEER, "0", &format!("--cpus={}", cpus.join(",")), "--"]);
    command.arg(&program).arg(folder.path()).stdin(Stdio::null()).stdout(Stdio::null());
    let mut processes = Processes::default();
    processes
        .start("mpirun".into(), &mut command)
        .map_err(|failure| failure.text().unwrap_or_default().to_owned())?;
    let mut crew = Crew::gather("mpi", processes, pipes, PATIENCE)?;
    crew.bound = !cpus.is_empty();
    Ok(crew)
}

fn is_open_mpi() -> Result<(), String> {
    let version = Command::new("mpirun").arg("--version").stdin(Stdio::null()).output();
    let version = version.map_err(|error| format!("mpirun cannot be started: {error}"))?;
    let text = String::from_utf8_lossy(&version.stdout);
    match text.lines().next() {
        Some(line) if line.contains("Open MPI") => Ok(()),
        line => Err(format!("mpirun is not Open MPI's: it calls itself {:?}", line.unwrap_or(""))),
    }
}
