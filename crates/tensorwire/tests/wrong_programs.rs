//! Programs with one mistake, in worlds of 2, 4 and 8 processes: who is named, and what is said of it. The same programs
//! as in tests/python/wrong_programs.py, written in Rust.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::exit)]

mod ranks;

use std::time::Duration;

use ranks::{Process, Rank, Ranks, await_parent, say};
use rustix::process::Signal;
use tensorwire::{Deadline, Dtype, Group, ReduceOp, Result, Span, Tensor};

/// The rank that makes the mistake.
const WRONG: usize = 1;
const WORLDS: [usize; 3] = [2, 4, 8];
const F: Dtype = Dtype::F32;
const SUM: ReduceOp = ReduceOp::Sum;
/// The time that must be up.
const SHORT: Duration = Duration::from_secs(1);

fn zeros(dtype: Dtype, count: usize) -> Tensor {
    let region = tensorwire::device::host::private(dtype.size() * count).unwrap();
    Tensor::flat(Span::whole(region), dtype).unwrap()
}

/// What a rank says of a result: the ranks that the error is about, and its text.
fn seen(result: Result<()>) -> String {
    match result {
        Ok(()) => "nothing is wrong".into(),
        Err(error) => {
            let kind = if error.is_timeout() { "TimedOut" } else { "Other" };
            format!("{kind} {:?} | {error}", error.ranks())
        }
    }
}

/// Starts the ranks of a test in each of the worlds, and gives them to `judge`. In a process that is a rank, runs `program`
/// behind a barrier instead.
fn each_world(test: &str, program: fn(Group, bool), judge: impl Fn(usize, Vec<Process>)) {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        group.barrier().wait().unwrap();
        program(group, rank.rank == WRONG);
        return;
    }
    for world in WORLDS {
        let Ranks { ranks, server: _server } = Ranks::start(test, world);
        judge(world, ranks);
    }
}

fn others(ranks: &mut [Process]) -> impl Iterator<Item = &mut Process> {
    ranks.iter_mut().filter(|rank| rank.rank != WRONG)
}

/// All ranks name both sides; who is right is known where more than two vote.
fn disagree(test: &str, program: fn(Group, bool), right: &str, wrong: &str) {
    each_world(test, program, |world, mut ranks| {
        for rank in &mut ranks {
            let text = rank.hear();
            println!("{test} at {world}, rank {}: {text}", rank.rank);
            let named = if world == 2 { "Other [] | " } else { "Other [1] | " };
            assert!(text.starts_with(named), "{text}");
            assert!(text.contains(right) && text.contains(wrong), "{text}");
            let own = if rank.rank == WRONG { wrong } else { right };
            let (_, mine) = text.split_once("this rank").unwrap_or_else(|| panic!("{text}"));
            assert!(mine.contains(own), "{text}");
        }
    });
}

#[test]
fn another_operation() {
    let program = |group: Group, wrong: bool| {
        let x = zeros(F, 1000);
        let call = if wrong { group.broadcast(&x, 0) } else { group.all_reduce(&x, SUM) };
        say(&seen(call.wait()));
    };
    disagree("another_operation", program, "all_reduce", "broadcast");
}

#[test]
fn another_op() {
    let program = |group: Group, wrong: bool| {
        let op = if wrong { ReduceOp::Max } else { SUM };
        say(&seen(group.all_reduce(&zeros(F, 1000), op).wait()));
    };
    disagree("another_op", program, "SUM", "MAX");
}

#[test]
fn another_size() {
    let program = |group: Group, wrong: bool| {
        let x = zeros(F, if wrong { 1000 } else { 999 });
        say(&seen(group.all_reduce(&x, SUM).wait()));
    };
    disagree("another_size", program, "999 float32", "1000 float32");
}

#[test]
fn another_type() {
    let program = |group: Group, wrong: bool| {
        let x = zeros(if wrong { Dtype::F64 } else { F }, 1000);
        say(&seen(group.all_reduce(&x, SUM).wait()));
    };
    disagree("another_type", program, "1000 float32", "1000 float64");
}

/// The last operation before the end: whoever does not notice in it has to notice in close.
#[test]
fn another_root() {
    let program = |group: Group, _: bool| {
        let rank = group.rank();
        let last = group.broadcast(&zeros(F, 1000), rank).wait();
        say(&seen(last.and_then(|()| group.close())));
    };
    each_world("another_root", program, |world, mut ranks| {
        let texts: Vec<String> = ranks.iter_mut().map(Process::hear).collect();
        println!("another_root at {world}: {texts:#?}");
        assert!(texts.iter().any(|text| text.starts_with("Other ")), "{texts:#?}");
        for (rank, text) in texts.iter().enumerate() {
            let own = format!("from rank {rank}");
            assert!(text.starts_with("nothing") || text.contains(&own), "{rank}: {text}");
        }
    });
}

/// An error that names who did not come, and whose time was up.
fn is_time_out(text: &str, pid: u32, doing: &str) {
    assert!(text.starts_with("TimedOut [1] | "), "{text}");
    assert!(text.contains("rank 1 (host ") && text.contains(&format!("pid {pid})")), "{text}");
    assert!(text.contains(doing), "{text}");
    assert!(text.contains("the time-out was given with the call"), "{text}");
}

#[test]
fn asleep() {
    let program = |group: Group, wrong: bool| {
        if wrong {
            await_parent();
        }
        let call = group.all_reduce(&zeros(F, 10), SUM);
        let call = if wrong { call } else { call.deadline(Deadline::after(SHORT)) };
        say(&seen(call.wait()));
    };
    each_world("asleep", program, |world, mut ranks| {
        let pid = ranks[WRONG].pid();
        for rank in others(&mut ranks) {
            let text = rank.hear();
            println!("asleep at {world}, rank {}: {text}", rank.rank);
            is_time_out(&text, pid, "barrier #1");
        }
        // The effect, with its cause.
        ranks[WRONG].let_go();
        let text = ranks[WRONG].hear();
        println!("asleep at {world}, the late rank: {text}");
        assert!(text.contains("all_reduce #2") && text.contains("timed out"), "{text}");
    });
}

/// It waits for a message that nobody sends.
#[test]
fn receiving() {
    let program = |group: Group, wrong: bool| {
        if wrong {
            say(&seen(group.recv(&zeros(F, 10), 0).wait().map(drop)));
        } else {
            let soon = Deadline::after(SHORT);
            say(&seen(group.all_reduce(&zeros(F, 10), SUM).deadline(soon).wait()));
            await_parent();
        }
    };
    each_world("receiving", program, |world, mut ranks| {
        let pid = ranks[WRONG].pid();
        for rank in others(&mut ranks) {
            let text = rank.hear();
            println!("receiving at {world}, rank {}: {text}", rank.rank);
            is_time_out(&text, pid, "recv");
        }
    });
}

#[test]
fn stopped() {
    let program = |group: Group, wrong: bool| {
        say("ready");
        await_parent();
        if wrong {
            return;
        }
        let soon = Deadline::after(SHORT);
        say(&seen(group.all_reduce(&zeros(F, 10), SUM).deadline(soon).wait()));
    };
    each_world("stopped", program, |world, mut ranks| {
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
        let pid = ranks[WRONG].pid();
        ranks[WRONG].signal(Signal::STOP);
        let is_stopped = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            stat.rsplit_once(") ").unwrap().1.starts_with('T')
        };
        while !is_stopped() {
            std::thread::yield_now();
        }
        others(&mut ranks).for_each(Process::let_go);
        for rank in others(&mut ranks) {
            let text = rank.hear();
            println!("stopped at {world}, rank {}: {text}", rank.rank);
            is_time_out(&text, pid, "stopped (SIGSTOP)");
        }
        ranks[WRONG].signal(Signal::CONT);
    });
}

/// The others name the rank that ended and say how.
fn ends(test: &str, program: fn(Group, bool), how: &str) {
    each_world(test, program, |world, mut ranks| {
        let pid = ranks[WRONG].pid();
        for rank in others(&mut ranks) {
            let text = rank.hear();
            println!("{test} at {world}, rank {}: {text}", rank.rank);
            assert!(text.starts_with("Other [1] | rank 1 (host "), "{text}");
            assert!(text.contains(&format!("pid {pid})")) && text.contains(how), "{text}");
        }
    });
}

fn waits(group: &Group) {
    say(&seen(group.all_reduce(&zeros(F, 10), SUM).wait()));
}

/// A library hears that its thread unwinds, not what was said.
#[test]
fn panicking() {
    let program = |group: Group, wrong: bool| match wrong {
        true => panic!("the loss is not a number"),
        false => waits(&group),
    };
    ends("panicking", program, ") panicked");
}

#[test]
fn exiting() {
    let program = |group: Group, wrong: bool| match wrong {
        true => std::process::exit(3),
        false => waits(&group),
    };
    ends("exiting", program, "exited with 3");
}

#[test]
fn returning() {
    let program = |group: Group, wrong: bool| match wrong {
        true => std::process::exit(0),
        false => waits(&group),
    };
    ends("returning", program, "left");
}

#[test]
fn killed() {
    let program = |group: Group, wrong: bool| match wrong {
        true => rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap(),
        false => waits(&group),
    };
    ends("killed", program, "was killed by SIGKILL");
}
