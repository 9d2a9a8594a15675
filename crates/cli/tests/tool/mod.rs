//! Runs the real binary and looks at what it leaves behind.
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::unwrap_used, reason = "tests, which clippy does not see")]

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Generous: the machine may be busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The command with no variable that would change what it prints.
pub(crate) fn tensorwire(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensorwire"));
    command.args(args).env("OMP_NUM_THREADS", "1").stdin(Stdio::null());
    let ours = std::env::vars().map(|(name, _)| name).filter(|name| name.starts_with("TENSORWIRE_"));
    ours.for_each(|name| {
        command.env_remove(name);
    });
    command
}

/// What it printed and how it ended.
pub(crate) fn finished(args: &[&str]) -> Ended {
    tensorwire(args).output().unwrap().into()
}

pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    }
}

/// A folder that goes when the test does.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        let number: u64 = std::fs::read_to_string("/proc/sys/kernel/random/uuid")
            .unwrap()
            .bytes()
            .fold(0, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        let path = std::env::temp_dir().join(format!("tensorwire-test-{number:x}"));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A file that can be executed. Another process writes it: a child that another test starts meanwhile would hold it
    /// open for a moment, and a file that is open for writing cannot be executed.
    pub(crate) fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.join(name);
        let write = Command::new("sh")
            .args(["-c", "printf %s \"$2\" > \"$1\" && chmod +x \"$1\"", "sh"])
            .arg(&path)
            .arg(text)
            .status();
        assert!(write.is_ok_and(|status| status.success()));
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Waits until the condition holds, or fails the test.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for a child, which must end in time.
pub(crate) fn ended(mut child: Child) -> Ended {
    let mut status = None;
    eventually("the command ends", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    let read = |pipe: Option<&mut dyn Read>| {
        let mut bytes = Vec::new();
        pipe.map(|pipe| pipe.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let out = read(child.stdout.as_mut().map(|pipe| pipe as &mut dyn Read));
    let err = read(child.stderr.as_mut().map(|pipe| pipe as &mut dyn Read));
    Ended { code: status.unwrap().code(), out, err }
}

/// The processes whose environment has this variable, ended ones not counted.
pub(crate) fn with_variable(variable: &str) -> Vec<i32> {
    let pids = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &i32| {
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes())
    })
    .collect()
}

/// Sends a signal by its name. A system call: not every machine has a program for it.
pub(crate) fn signal(pid: i32, name: &str) {
    assert!(try_signal(pid, name), "{pid} is gone");
}

/// The same to a process that may have ended; gives whether it was there.
pub(crate) fn try_signal(pid: i32, name: &str) -> bool {
    let signal = match name {
        "HUP" => Signal::HUP,
        "INT" => Signal::INT,
        "QUIT" => Signal::QUIT,
        "KILL" => Signal::KILL,
        "TERM" => Signal::TERM,
        "STOP" => Signal::STOP,
        "TSTP" => Signal::TSTP,
        "CONT" => Signal::CONT,
        "USR1" => Signal::USR1,
        other => unreachable!("no test sends {other}"),
    };
    kill_process(Pid::from_raw(pid).unwrap(), signal).is_ok()
}
