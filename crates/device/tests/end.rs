//! How a process has ended is seen by who is not its parent, before and after its parent has waited for it.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::process::{Child, Command};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use tensorwire_device::fd::{End, Fd, end_of, has_ended};

fn start(script: &str) -> (Child, Fd) {
    let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
    let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
    (child, Fd::new(pidfd))
}

fn check(script: &str, signal: Option<Signal>, end: End) {
    let (mut child, pidfd) = start(script);
    if let Some(signal) = signal {
        assert_eq!(end_of(&pidfd), None);
        kill_process(Pid::from_child(&child), signal).unwrap();
    }
    while !has_ended(&pidfd) {
        std::thread::yield_now();
    }
    assert_eq!(end_of(&pidfd), Some(end));
    child.wait().unwrap();
    // Kernels before 6.15 keep it from everybody but the parent.
    match end_of(&pidfd) {
        None => println!("skipped: this kernel does not tell how a process ended that was waited for"),
        told => assert_eq!(told, Some(end)),
    }
}

#[test]
fn exits() {
    check("exit 0", None, End::Exited(0));
    check("exit 3", None, End::Exited(3));
    check("exit 255", None, End::Exited(255));
}

#[test]
fn signals() {
    check("exec sleep 1000", Some(Signal::KILL), End::Killed(9));
    check("exec sleep 1000", Some(Signal::TERM), End::Killed(15));
}

#[test]
fn in_words() {
    assert_eq!(End::Exited(3).to_string(), "exited with 3");
    assert_eq!(End::Killed(9).to_string(), "was killed by SIGKILL");
    assert_eq!(End::Killed(31).to_string(), "was killed by SIGSYS");
    assert_eq!(End::Killed(40).to_string(), "was killed by signal 40");
    for end in [End::Exited(0), End::Exited(255), End::Killed(1), End::Killed(64)] {
        assert_eq!(End::from_status(end.status()), end);
    }
    // With a core dump.
    assert_eq!(End::from_status(0x80 | 11), End::Killed(11));
}
