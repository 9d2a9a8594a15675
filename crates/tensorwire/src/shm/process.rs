//! A process as /proc shows it: whether it computes, sleeps, is stopped or has ended. Only this file reads
//! /proc/PID/stat.

use std::io;
use std::time::Duration;

/// How long [`look`] watches processes that seem to sleep. A clock tick is 10 ms.
const LOOK: Duration = Duration::from_millis(60);

/// How a rank's process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Process {
    /// On a processor, or waiting for one.
    Running,
    /// Waiting for something.
    Sleeping,
    /// Inside the kernel, where no signal reaches it: it waits for a disk, a network file system or a driver.
    Blocked,
    /// Stopped by a signal.
    Stopped,
    /// Stopped by a debugger.
    Traced,
    /// It has ended.
    Gone,
    /// It cannot be seen from here.
    Unknown,
}

impl Process {
    /// In a word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Sleeping => "sleeping",
            Self::Blocked => "blocked",
            Self::Stopped => "stopped",
            Self::Traced => "traced",
            Self::Gone => "gone",
            Self::Unknown => "unknown",
        }
    }

    /// Whether the process is stopped, held by a debugger, or gone.
    pub const fn is_halted(self) -> bool {
        matches!(self, Self::Stopped | Self::Traced | Self::Gone)
    }

    /// What it does, said of one rank that is in no operation of ours, or of several. Nothing of a process that is
    /// halted or out of sight.
    pub(crate) const fn outside(self, many: bool) -> Option<&'static str> {
        Some(match (self, many) {
            (Self::Running, false) => "computes outside of tensorwire",
            (Self::Running, true) => "compute outside of tensorwire",
            (Self::Sleeping, false) => "sleeps outside of tensorwire",
            (Self::Sleeping, true) => "sleep outside of tensorwire",
            (Self::Blocked, false) => "waits for a disk or a driver, outside of tensorwire",
            (Self::Blocked, true) => "wait for a disk or a driver, outside of tensorwire",
            _ => return None,
        })
    }
}

/// What /proc/PID/stat says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stat {
    pub(crate) process: Process,
    pub(crate) parent: u32,
    /// Clock ticks on processors, of all threads.
    pub(crate) ticks: u64,
    /// When it started, in clock ticks since boot.
    pub(crate) started: u64,
}

impl Stat {
    /// Of a process by its pid, of "self", or of a thread ("812/task/813").
    pub(crate) fn read(pid: &str) -> io::Result<Self> {
        let stat = std::fs::read(format!("/proc/{pid}/stat"))?;
        Self::parse(&stat).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no such stat is known"))
    }

    fn parse(stat: &[u8]) -> Option<Self> {
        // The command may hold anything, brackets too; fields are counted after its closing one.
        let end = stat.iter().rposition(|byte| *byte == b')')?;
        let fields: Vec<&str> =
            std::str::from_utf8(&stat[end + 1..]).ok()?.split_ascii_whitespace().collect();
        let number = |field: usize| fields.get(field)?.parse().ok();
        let threads: u64 = number(17)?;
        let process = match *fields.first()? {
            "R" => Process::Running,
            "D" => Process::Blocked,
            "T" => Process::Stopped,
            "t" => Process::Traced,
            // A zombie has ended, and only its parent has not looked yet; unless it has threads that go on.
            "Z" | "X" | "x" if threads <= 1 => Process::Gone,
            _ => Process::Sleeping,
        };
        let ticks: u64 = number(11)?;
        let parent = fields.get(1)?.parse().ok()?;
        Some(Self { process, parent, ticks: ticks.saturating_add(number(12)?), started: number(19)? })
    }
}

/// How a process is at this moment; none if it cannot be seen.
pub(crate) fn state(pid: u32) -> Option<Process> {
    Stat::read(&pid.to_string()).ok().map(|stat| stat.process)
}

/// How processes are. One that sleeps now may compute in another thread, or most of the time: those are watched for a
/// moment, all together. So this is for paths where nobody waits for a microsecond.
pub(crate) fn look(pids: &[u32]) -> Vec<Process> {
    let first: Vec<Option<Stat>> = pids.iter().map(|&pid| glance(pid)).collect();
    if first.iter().flatten().any(|stat| stat.process == Process::Sleeping) {
        std::thread::sleep(LOOK);
    }
    let again = |(&pid, first): (&u32, Option<Stat>)| match first {
        Some(first) if first.process == Process::Sleeping => match glance(pid) {
            // A process that computes is on a processor for more than a tick of this time.
            Some(second) if second.ticks > first.ticks.saturating_add(1) => Process::Running,
            Some(second) => second.process,
            None => Process::Gone,
        },
        Some(first) => first.process,
        None => Process::Gone,
    };
    pids.iter().zip(first).map(again).collect()
}

/// A command that shows the stacks of a process.
pub(crate) fn stacks(pid: u32) -> String {
    let is_python = |name: &str| name.starts_with("python") || name.starts_with("pypy");
    let program = std::fs::read_link(format!("/proc/{pid}/exe")).ok();
    let program = program.as_deref().and_then(|path| path.file_name()?.to_str());
    match program.map_or_else(|| is_python(&name(pid)), is_python) {
        true => format!("py-spy dump --pid {pid}"),
        false => format!("eu-stack -p {pid}"),
    }
}

/// The name of a process, or nothing; without what would play tricks on a terminal.
pub(crate) fn name(pid: u32) -> String {
    let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    String::from_utf8_lossy(&name)
        .trim()
        .chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// The process, running if any of its threads is.
pub(crate) fn glance(pid: u32) -> Option<Stat> {
    let stat = Stat::read(&pid.to_string()).ok()?;
    if stat.process != Process::Sleeping {
        return Some(stat);
    }
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut threads = threads.filter_map(|thread| thread.file_name().into_string().ok());
    let running = threads.any(|thread| {
        Stat::read(&format!("{pid}/task/{thread}")).is_ok_and(|stat| stat.process == Process::Running)
    });
    Some(Stat { process: if running { Process::Running } else { Process::Sleeping }, ..stat })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "812 (a) b (c)) S 7 812 7 34816 812 4194304 1 2 3 4 50 6 0 0 20 0 3 0 9000 1 1";

    #[test]
    fn a_name_may_hold_anything() {
        let wanted = Stat { process: Process::Sleeping, parent: 7, ticks: 56, started: 9000 };
        assert_eq!(Stat::parse(STAT.as_bytes()), Some(wanted));
        let mut bytes = STAT.as_bytes().to_vec();
        bytes[5] = 0xff;
        assert_eq!(Stat::parse(&bytes), Some(wanted));
        for len in 0..STAT.len() - 8 {
            assert_eq!(Stat::parse(&bytes[..len]).filter(|stat| *stat == wanted), None, "{len}");
        }
    }

    #[test]
    fn a_zombie_with_threads_goes_on() {
        let zombie = STAT.replace(") S", ") Z");
        let process = |text: &str| Stat::parse(text.as_bytes()).map(|stat| stat.process);
        assert_eq!(process(&zombie), Some(Process::Sleeping));
        assert_eq!(process(&zombie.replace(" 0 3 0 9000", " 0 1 0 9000")), Some(Process::Gone));
        assert_eq!(process(&STAT.replace(") S", ") D")), Some(Process::Blocked));
    }

    #[test]
    fn a_process_that_computes_is_told_from_one_that_sleeps() {
        let mut spins = std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let mut sleeps = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let pids = [spins.id(), sleeps.id(), ended.id()];
        // Right after its start the second is still busy.
        let wanted = [Process::Running, Process::Sleeping, Process::Gone];
        let end = std::time::Instant::now() + Duration::from_secs(60);
        while look(&pids) != wanted {
            assert!(std::time::Instant::now() < end, "{:?}", look(&pids));
        }
        assert_eq!(stacks(sleeps.id()), format!("eu-stack -p {}", sleeps.id()));
        for child in [&mut spins, &mut sleeps] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
