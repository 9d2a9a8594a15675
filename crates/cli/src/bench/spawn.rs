//! Processes that the bench starts, and what became of them.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use tensorwire::Deadline;

use crate::exit::Failure;
use crate::run::outcome::signal_name;

/// Has the kernel send this process a signal when its parent ends. Fails if the parent is not the one that is named: then the
/// bench has ended already.
pub(super) fn end_with_parent(parent: Option<i32>, signal: Signal) -> Result<(), Failure> {
    set_parent_process_death_signal(Some(signal)).map_err(|errno| Failure::failed(errno.to_string()))?;
    // It may have died before the line above.
    let now = getppid().map(|pid| pid.as_raw_pid());
    if parent.is_some_and(|parent| now != Some(parent)) {
        return Err(Failure::failed("the bench is gone"));
    }
    Ok(())
}

/// Processes of one kind; dropped early, they are killed.
#[derive(Debug, Default)]
pub(super) struct Processes(Vec<Process>);

#[derive(Debug)]
struct Process {
    /// What messages call it.
    name: String,
    child: Child,
    /// What it wrote to stderr.
    complaints: File,
}

impl Processes {
    /// Starts one more. Its stderr goes to memory and not to a pipe: nobody has to read it while it runs.
    pub(super) fn start(&mut self, name: String, command: &mut Command) -> Result<&mut Child, Failure> {
        let failed = |error: std::io::Error| Failure::failed(format!("{name} could not be started: {error}"));
        let complaints =
            memfd_create("complaints", MemfdFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
        let complaints = File::from(complaints);
        command.stderr(complaints.try_clone().map_err(failed)?);
        let child = command.spawn().map_err(failed)?;
        self.0.push(Process { name, child, complaints });
        let last = self.0.len() - 1;
        Ok(&mut self.0[last].child)
    }

    /// Whether any has ended.
    pub(super) fn any_ended(&mut self) -> bool {
        self.0.iter_mut().any(|process| matches!(process.child.try_wait(), Ok(Some(_))))
    }

    /// Waits until all have ended, at most until the deadline, and gives why the first of them failed, if one did: of
    /// several, one that was killed is the likelier cause.
    pub(super) fn failure(&mut self, deadline: Deadline) -> Option<String> {
        let mut failures = Vec::new();
        for (index, process) in self.0.iter_mut().enumerate() {
            let Some(status) = process.wait(deadline) else {
                failures.push((
                    2,
                    index,
                    format!("{} (pid {}) does not end", process.name, process.child.id()),
                ));
                continue;
            };
            if !status.success() {
                let killed = status.signal().is_some();
                failures.push((u8::from(!killed), index, process.describe(status)));
            }
        }
        failures.into_iter().min().map(|(_, _, text)| text)
    }
}

impl Process {
    fn wait(&mut self, deadline: Deadline) -> Option<ExitStatus> {
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if !deadline.passed() => std::thread::sleep(Duration::from_millis(2)),
                _ => return None,
            }
        }
    }

    fn describe(&mut self, status: ExitStatus) -> String {
        let said = self.said();
        let name = format!("{} (pid {})", self.name, self.child.id());
        match (status.signal(), said.trim_start_matches("error: ")) {
            (Some(signal), _) => format!("{name} was killed by {}", signal_name(signal)),
            (None, "") => format!("{name} failed: {status}"),
            (None, said) => format!("{name} failed: {said}"),
        }
    }

    fn said(&mut self) -> String {
        let mut bytes = Vec::new();
        // Without its words, its exit code must do.
        let _ = self.complaints.rewind().and_then(|()| self.complaints.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).trim().to_owned()
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for process in &mut self.0 {
            // No harm to a process that has been waited for: the library knows that it has ended.
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}
