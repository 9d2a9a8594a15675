//! The processes below this one: who they are, and how to end them all.
//!
//! Only direct children are signalled. Their numbers cannot be reused before we reap them, so no other process is
//! ever hit. When a child dies, its own children become ours. So signalling again and again reaches all
//! descendants.

use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, wait};

use crate::run::outcome::Outcome;

/// How long killed processes may take to be gone; only one inside a broken driver takes longer.
pub(crate) const LAST_WORDS: Duration = Duration::from_secs(10);

/// Makes every orphan below this process its child.
pub(crate) fn adopt_orphans() -> Result<(), Errno> {
    set_child_subreaper(Some(getpid()))
}

/// The children of this process that have not ended.
pub(crate) fn children() -> Vec<Pid> {
    let us = getpid().as_raw_pid();
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    numbers.filter(|pid| parent_of(*pid) == Some(us)).filter_map(Pid::from_raw).collect()
}

/// Reaps every child that has ended.
pub(crate) fn reap() -> Vec<(Pid, Outcome)> {
    let mut ended = Vec::new();
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) => ended.extend(Outcome::of(status).map(|outcome| (pid, outcome))),
            Err(Errno::INTR) => {}
            Ok(None) | Err(_) => return ended,
        }
    }
}

/// Kills everything below this process but `spared`. Gives those that could not be killed.
pub(crate) fn kill_all(spared: &[Pid]) -> Vec<Pid> {
    let deadline = Instant::now() + LAST_WORDS;
    loop {
        reap();
        let mut left = children();
        left.retain(|pid| !spared.contains(pid));
        if left.is_empty() || Instant::now() > deadline {
            return left;
        }
        for pid in left {
            // A process that may not be killed is reported at the end.
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Processes in words.
pub(crate) fn list(pids: &[Pid]) -> String {
    let pids: Vec<String> = pids.iter().map(|pid| format!("pid {}", pid.as_raw_pid())).collect();
    pids.join(", ")
}

/// The fourth field of /proc/PID/stat, unless the third says that it has ended. The second, a name in
/// parentheses, may contain anything.
fn parent_of(pid: i32) -> Option<i32> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let mut fields = std::str::from_utf8(&stat[end + 1..]).ok()?.split_whitespace();
    let running = !matches!(fields.next()?, "Z" | "X");
    fields.next()?.parse().ok().filter(|_| running)
}
