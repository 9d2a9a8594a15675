//! `tensorwire run`: signals, and that nothing survives it, however it ends.
#![allow(clippy::unwrap_used, reason = "tests, which clippy does not see")]

mod tool;

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use tool::{ended, eventually, signal, tensorwire, try_signal, with_variable};

/// A run whose processes can all be found by a variable of their own.
struct Marked {
    child: Child,
    mark: String,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    _sweep: Sweep,
}

/// A test that fails leaves no process behind either.
struct Sweep(String);

impl Drop for Sweep {
    fn drop(&mut self) {
        for pid in with_variable(&self.0) {
            try_signal(pid, "KILL");
        }
    }
}

impl Marked {
    fn start(options: &[&str], script: &str) -> Self {
        let unique = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap();
        let mut command = tensorwire(&["run"]);
        command.args(options).args(["--", "sh", "-c", script]);
        command.env("MARK_OF_TEST", unique.trim()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mark = format!("MARK_OF_TEST={}", unique.trim());
        Self { child, _sweep: Sweep(mark.clone()), mark, lines }
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Waits until the ranks have printed this many lines.
    fn await_lines(&mut self, count: usize) {
        for _ in 0..count {
            self.lines.next().unwrap().unwrap();
        }
    }

    fn keeper(&self) -> i32 {
        let named = |pid: &i32| {
            std::fs::read_to_string(format!("/proc/{pid}/comm"))
                .is_ok_and(|name| name.trim() == "rank-keeper")
        };
        with_variable(&self.mark).into_iter().find(named).unwrap()
    }

    fn await_nobody(&self) {
        eventually("every process is gone", || {
            with_variable(&self.mark).iter().all(|pid| *pid == self.pid())
        });
    }
}

/// A daemon as they are made: forked twice, in a session of its own, deaf to signals.
const DAEMON: &str = "(setsid sh -c 'trap \"\" TERM HUP INT; while :; do sleep 1; done' >/dev/null 2>&1 &); ";
const FOREVER: &str = "trap '' TERM HUP INT; echo up; while :; do sleep 1; done";

#[test]
fn nothing_survives_kill_9_of_the_run() {
    let mut run = Marked::start(&["-n", "3"], &format!("{DAEMON}{FOREVER}"));
    run.await_lines(3);
    assert!(with_variable(&run.mark).len() >= 8, "run, keeper, ranks and daemons");
    signal(run.pid(), "KILL");
    run.child.wait().unwrap();
    eventually("every process is gone", || with_variable(&run.mark).is_empty());
}

#[test]
fn nothing_survives_kill_9_of_the_keeper() {
    let mut run = Marked::start(&["-n", "3"], &format!("{DAEMON}{FOREVER}"));
    run.await_lines(3);
    signal(run.keeper(), "KILL");
    run.await_nobody();
    let ended = ended(run.child);
    assert_eq!(ended.code, Some(128 + 9));
    assert!(ended.err.contains("keeper"), "{}", ended.err);
}

#[test]
fn ranks_die_when_run_and_keeper_are_killed_at_once() {
    let mut run = Marked::start(&["-n", "3"], FOREVER);
    run.await_lines(3);
    let (outer, keeper) = (run.pid(), run.keeper());
    signal(outer, "KILL");
    signal(keeper, "KILL");
    run.child.wait().unwrap();
    // Their `sleep 1` ends by itself.
    eventually("every process is gone", || with_variable(&run.mark).is_empty());
}

#[test]
fn a_stuck_reader_does_not_protect_the_ranks() {
    let mut run = Marked::start(&["-n", "2"], &format!("yes & {FOREVER}"));
    run.await_lines(2);
    // Nobody reads any more: the keeper's output is stuck.
    signal(run.pid(), "KILL");
    run.child.wait().unwrap();
    eventually("every process is gone", || with_variable(&run.mark).is_empty());
}

#[test]
fn what_a_rank_leaves_behind_is_ended() {
    let mut run = Marked::start(&["-n", "2", "--grace", "0.2"], &format!("{DAEMON}echo up"));
    run.await_lines(2);
    run.await_nobody();
    let ended = ended(run.child);
    assert_eq!(ended.code, Some(0));
    assert!(ended.err.contains("left running"), "{}", ended.err);
}

#[test]
fn signals_reach_every_rank() {
    for (name, number) in [("INT", 2), ("TERM", 15), ("HUP", 1), ("QUIT", 3)] {
        let script = format!("trap 'echo got; exit 0' {name}; echo up; while :; do sleep 0.05; done");
        let mut run = Marked::start(&["-n", "2"], &script);
        run.await_lines(2);
        signal(run.pid(), name);
        run.await_lines(2);
        let polite = ended(run.child);
        assert_eq!(polite.code, Some(0), "all ranks ended well: {}", polite.err);
        let mut run = Marked::start(&["-n", "2"], "echo up; exec sleep 1000");
        run.await_lines(2);
        signal(run.pid(), name);
        run.await_nobody();
        let killed = ended(run.child);
        assert_eq!(killed.code, Some(128 + number), "{}", killed.err);
        assert!(killed.err.contains(&format!("stopped by SIG{name}")), "{}", killed.err);
        assert!(!killed.err.contains("failed first"), "{}", killed.err);
    }
}

#[test]
fn user_signals_pass_without_ending_anything() {
    let script = "trap 'echo got; exit 0' USR1; echo up; while :; do sleep 0.05; done";
    let mut run = Marked::start(&["-n", "2"], script);
    run.await_lines(2);
    signal(run.pid(), "USR1");
    run.await_lines(2);
    assert_eq!(ended(run.child).code, Some(0));
}

#[test]
fn a_second_interrupt_kills_at_once() {
    let mut run = Marked::start(&["-n", "2", "--grace", "1000"], FOREVER);
    run.await_lines(2);
    signal(run.pid(), "INT");
    // Two that arrive together count as one, so it is repeated as an impatient user would.
    eventually("the run ends", || {
        try_signal(run.pid(), "INT");
        run.child.try_wait().unwrap().is_some()
    });
    run.await_nobody();
    assert_eq!(ended(run.child).code, Some(128 + 2));
}

#[test]
fn the_grace_time_ends_ranks_that_ignore_a_signal() {
    let mut run = Marked::start(&["-n", "2", "--grace", "0.3"], FOREVER);
    run.await_lines(2);
    signal(run.pid(), "TERM");
    run.await_nobody();
    let ended = ended(run.child);
    assert_eq!(ended.code, Some(128 + 15));
    assert!(ended.err.contains("killed ranks 0, 1"), "{}", ended.err);
}

#[test]
fn stop_and_continue_reach_the_ranks() {
    let mut run = Marked::start(&["-n", "1"], "echo $$; exec sleep 1000");
    let line = run.lines.next().unwrap().unwrap();
    let rank: i32 = line.trim_start_matches("[rank 0] ").parse().unwrap();
    let state = |pid: i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(')').next().and_then(|rest| rest.trim().chars().next())
    };
    signal(run.pid(), "TSTP");
    eventually("the rank is stopped", || state(rank) == Some('T'));
    eventually("the run is stopped", || state(run.pid()) == Some('T'));
    signal(run.pid(), "CONT");
    eventually("the rank goes on", || state(rank) == Some('S'));
    signal(run.pid(), "TERM");
    assert_eq!(ended(run.child).code, Some(128 + 15));
}
