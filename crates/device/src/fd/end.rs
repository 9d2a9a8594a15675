//! How a process has ended, as everybody can see it who holds its pidfd.
//!
//! The parent of a process gets its status by waiting for it. Until then /proc shows the status of the process, which is a
//! zombie. After that the kernel tells it by the pidfd (since Linux 6.15).

use std::fmt;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::ioctl;

use super::{Fd, has_ended};

/// How a process has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// By itself, with this status.
    Exited(u8),
    /// By this signal.
    Killed(u8),
}

impl End {
    /// From a status as `wait` gives it.
    pub const fn from_status(status: i32) -> Self {
        match status & 0x7f {
            0 => Self::Exited((status >> 8) as u8),
            signal => Self::Killed(signal as u8),
        }
    }

    /// A status as `wait` gives it.
    pub const fn status(self) -> i32 {
        match self {
            Self::Exited(code) => (code as i32) << 8,
            Self::Killed(signal) => (signal & 0x7f) as i32,
        }
    }
}

/// A clause without its subject: "exited with 3", "was killed by SIGKILL".
impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Exited(code) => write!(f, "exited with {code}"),
            Self::Killed(signal) => match SIGNALS.get(usize::from(signal).wrapping_sub(1)) {
                Some(name) => write!(f, "was killed by SIG{name}"),
                None => write!(f, "was killed by signal {signal}"),
            },
        }
    }
}

/// The names of signals, from 1.
const SIGNALS: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
    "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
    "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];

/// How the process behind a pidfd has ended; nothing if it has not, or if that cannot be told.
pub fn end_of(pidfd: &Fd) -> Option<End> {
    if !has_ended(pidfd) {
        return None;
    }
    // A process that is just being reaped is in neither place for a moment.
    for _ in 0..LOOKS {
        if let Some(status) = of_zombie(pidfd).or_else(|| of_reaped(pidfd)) {
            return Some(End::from_status(status));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

const LOOKS: usize = 2;

/// The status of a process that nobody has waited for yet.
fn of_zombie(pidfd: &Fd) -> Option<i32> {
    let pid = pid_of(pidfd)?;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Its number may have gone to another process meanwhile.
    if pid_of(pidfd) != Some(pid) {
        return None;
    }
    // The command may hold spaces and brackets; fields are counted after its closing one. The last is the status.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ended = matches!(*fields.first()?, "Z" | "X");
    fields.get(49).filter(|_| ended)?.parse().ok()
}

/// The number of a process in the namespace of /proc, as long as it has one.
fn pid_of(pidfd: &Fd) -> Option<u32> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_fd().as_raw_fd())).ok()?;
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    pid.trim().parse().ok().filter(|&pid| pid > 0)
}

/// `struct pidfd_info` of the kernel, as far as every version of it has it.
#[repr(C)]
#[derive(Debug, Default)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    ids: [u32; 11],
    exit_code: i32,
}

/// `PIDFD_INFO_EXIT`: the status is wanted, and is there.
const EXIT: u64 = 1 << 3;

/// The status of a process that was waited for.
fn of_reaped(pidfd: &Fd) -> Option<i32> {
    const GET_INFO: ioctl::Opcode = ioctl::opcode::read_write::<PidfdInfo>(0xff, 11);
    let mut info = PidfdInfo { mask: EXIT, ..PidfdInfo::default() };
    // SAFETY: the opcode carries the size of the struct, and the kernel writes no more than that; any bits are valid in it.
    let asked = unsafe { ioctl::ioctl(pidfd, ioctl::Updater::<GET_INFO, PidfdInfo>::new(&mut info)) };
    (asked.is_ok() && info.mask & EXIT != 0).then_some(info.exit_code)
}
