//! The real futex between processes: another run of this test binary maps the same lines.

#![allow(clippy::unwrap_used)] // test helpers

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::*;
use crate::device::Device;
use crate::fd::Fd;
use crate::handle::Handle;
use crate::host::Host;

const ROLE: &str = "TENSORWIRE_TEST_FLAG_ROLE";
const TURNS: u32 = 3000;
/// The counter wraps on the way.
const START: u32 = u32::MAX - TURNS / 2;
const BYTES: usize = 3 * LINE;

struct Lines {
    ping: Flag,
    pong: Flag,
    abort: Abort,
    region: Arc<dyn Region>,
}

impl Lines {
    fn of(region: Arc<dyn Region>) -> Self {
        let line = |index: usize| Span::new(region.clone(), index * LINE..(index + 1) * LINE).unwrap();
        let flag = |index: usize| Flag::new(&line(index), Writer::Host).unwrap();
        Self { ping: flag(0), pong: flag(1), abort: Abort::new(&line(2)).unwrap(), region: region.clone() }
    }

    fn new() -> Self {
        let lines = Self::of(Host.alloc(BYTES).unwrap());
        lines.ping.signal(START);
        lines.pong.signal(START);
        lines
    }

    /// Another process with these lines as its input.
    fn start(&self, role: &str) -> Killed {
        let Handle::Memfd { fd, .. } = self.region.export().unwrap() else { unreachable!() };
        let fd = rustix::io::fcntl_dupfd_cloexec(&fd, 0).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "flag::stress::other_process", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, role).stdin(Stdio::from(fd)).stdout(Stdio::null());
        Killed(command.spawn().unwrap())
    }

    /// How many sleep on `ping`, by the count in memory.
    fn sleepers(&self) -> u32 {
        let mut word = [0; 4];
        self.region.read(4, &mut word).unwrap();
        u32::from_le_bytes(word)
    }

    fn ping(&self, seed: u32) {
        let mut naps = Naps(seed);
        for step in 1..=TURNS {
            naps.maybe();
            self.ping.signal(START.wrapping_add(step));
            self.pong.wait(START.wrapping_add(step), &self.abort, soon()).unwrap();
        }
    }

    fn pong(&self, seed: u32) {
        let mut naps = Naps(seed);
        for step in 1..=TURNS {
            self.ping.wait(START.wrapping_add(step), &self.abort, soon()).unwrap();
            naps.maybe();
            self.pong.signal(START.wrapping_add(step));
        }
    }
}

/// A process that does not outlive its test.
struct Killed(Child);

impl Killed {
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    fn succeed(&mut self) {
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Naps around the length of a spin, so that the writer meets waiters that spin, that sleep, and that are
/// between the two.
struct Naps(u32);

impl Naps {
    fn maybe(&mut self) {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        match self.0 >> 29 {
            0 => std::thread::sleep(Duration::from_micros(u64::from(self.0 >> 8) % 120)),
            1 | 2 => {
                let until = std::time::Instant::now() + Duration::from_micros(u64::from(self.0 >> 8) % 60);
                while std::time::Instant::now() < until {
                    std::hint::spin_loop();
                }
            }
            _ => {}
        }
    }
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

#[test]
fn other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let fd = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 3).unwrap();
    let lines = Lines::of(Host.import(Handle::Memfd { fd: Fd::new(fd), len: BYTES }).unwrap());
    match role.as_str() {
        "pong" => lines.pong(1),
        "pong without waitv" => futex::without_waitv(|| lines.pong(2)),
        "sleep" => lines.ping.wait(START.wrapping_add(1), &lines.abort, soon()).unwrap(),
        other => panic!("no role {other}"),
    }
}

#[test]
fn ping_pong_between_processes() {
    for role in ["pong", "pong without waitv"] {
        let lines = Lines::new();
        let mut other = lines.start(role);
        lines.ping(3);
        other.succeed();
        assert_eq!(lines.sleepers(), 0);

        let lines = Lines::new();
        let mut other = lines.start(role);
        futex::without_waitv(|| lines.ping(4));
        other.succeed();
        assert_eq!(lines.sleepers(), 0);
    }
}

/// Sleepers that were killed stay counted; nobody else is disturbed.
#[test]
fn killed_sleepers_disturb_nobody() {
    let lines = Lines::new();
    let mut sleepers: Vec<_> = (0..3).map(|_| lines.start("sleep")).collect();
    let deadline = soon();
    while lines.sleepers() < 3 {
        assert!(!deadline.passed(), "{} sleep", lines.sleepers());
        std::thread::sleep(Duration::from_millis(1));
    }
    sleepers[0].kill();
    sleepers[1].kill();
    lines.ping.signal(START.wrapping_add(1));
    sleepers[2].succeed();
    assert_eq!(lines.sleepers(), 2);

    lines.ping.signal(START);
    let mut other = lines.start("pong");
    lines.ping(5);
    other.succeed();
    assert_eq!(lines.sleepers(), 2);
}
