//! What the ranks that stay read of one that is gone: how its process ended, what it said, and what it did last. All of it
//! with processes that really end.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::exit)]

mod ranks;

use ranks::{LONG, Process, Rank, Ranks, await_parent, outcome, say};
use rustix::process::Signal;
use tensorwire::{Deadline, Group, ReduceOp};

/// A barrier that all ranks come to; the sum of another operation is right.
fn begin(group: &Group) {
    group.barrier().wait().unwrap();
    let mut sum = [1];
    group.all_reduce_slice(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum, [group.world() as i32]);
}

/// Rank 0 waits for rank 1, and says what it hears; rank 1 does what `end` does.
fn wait_for(rank: &Rank, end: impl FnOnce(Group)) {
    let group = rank.group();
    begin(&group);
    say("ready");
    if rank.rank == 1 {
        return end(group);
    }
    say(&outcome(&group.all_reduce_slice(&mut [1], ReduceOp::Sum)));
    say(&outcome(&group.barrier().wait()));
    await_parent();
}

/// What rank 0 hears of the end of rank 1.
fn heard(test: &str, end: impl FnOnce(&mut Process)) -> String {
    let Ranks { mut ranks, server: _server } = Ranks::start(test, 2);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    end(&mut ranks[1]);
    let heard = ranks[0].hear();
    println!("{heard}");
    // Everything later fails with the same.
    assert_eq!(ranks[0].hear(), heard);
    heard.replace(&format!("pid {}", ranks[1].pid()), "pid P")
}

fn nodename() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn rank_1(kind: &str, did: &str) -> String {
    format!("{kind} 1 | rank 1 (host {}, pid P) {did}", nodename())
}

#[test]
fn a_kill() {
    if let Some(rank) = Rank::of_this_process() {
        return wait_for(&rank, |_group| await_parent());
    }
    let heard = heard("a_kill", Process::kill);
    assert_eq!(heard, rank_1("Died", "was killed by SIGKILL after all_reduce #2"));
}

#[test]
fn a_crash_in_an_operation() {
    if let Some(rank) = Rank::of_this_process() {
        return wait_for(&rank, |group| {
            let work = group.recv(&group.tensor(&[0u8]).unwrap(), 0).tag(9).start().unwrap();
            say("waits");
            drop(work.wait_by(Deadline::after(LONG)));
        });
    }
    let heard = heard("a_crash_in_an_operation", |rank| {
        assert_eq!(rank.hear(), "waits");
        rank.signal(Signal::ABORT);
    });
    assert_eq!(heard, rank_1("Died", "was killed by SIGABRT in recv #1 from rank 0"));
}

#[test]
fn an_exit_status() {
    if let Some(rank) = Rank::of_this_process() {
        return wait_for(&rank, |_group| std::process::exit(3));
    }
    let heard = heard("an_exit_status", |_| {});
    assert_eq!(heard, rank_1("Died", "exited with 3 after all_reduce #2"));
}

/// A rank that ends early with status 0 has left.
#[test]
fn an_exit_that_looks_well() {
    if let Some(rank) = Rank::of_this_process() {
        return wait_for(&rank, |_group| std::process::exit(0));
    }
    let heard = heard("an_exit_that_looks_well", |_| {});
    assert_eq!(heard, rank_1("Left", "left: its process exited with 0 without closing the group"));
}

#[test]
fn a_panic() {
    if let Some(rank) = Rank::of_this_process() {
        return wait_for(&rank, |_group| panic!("for a test"));
    }
    let heard = heard("a_panic", |_| {});
    assert_eq!(heard, rank_1("Left", "panicked"));
}

/// Of what a rank says, the first counts; control characters and the end of long words are left out.
#[test]
fn what_it_said() {
    if let Some(rank) = Rank::of_this_process() {
        return wait_for(&rank, |group| {
            let long = "ä".repeat(1000);
            group.context().last_words(&format!("raised ValueError: \u{1b}[31mred\nand {long}"));
            group.context().last_words("raised nothing");
            std::process::exit(1);
        });
    }
    let heard = heard("what_it_said", |_| {});
    let begin = rank_1("Died", "raised ValueError:  [31mred and ää");
    assert!(heard.starts_with(&begin) && heard.ends_with('ä') && heard.len() < 600, "{heard}");
}

/// Cause and effect after a time-out: the rank that slept reads what it did to the other.
#[test]
fn the_rank_that_slept() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        group.barrier().wait().unwrap();
        if rank.rank == 0 {
            let late = Deadline::after(std::time::Duration::from_millis(100));
            let error = group.all_reduce(&group.tensor(&[1]).unwrap(), ReduceOp::Sum).deadline(late).wait();
            say(&outcome(&error));
            std::process::exit(1);
        }
        say("slept");
        await_parent();
        // Rank 0 is gone, but this process may not have heard of it: what only waits for rank 0 ends when it has.
        group.recv(&group.tensor(&[0]).unwrap(), 0).wait().unwrap_err();
        say(&outcome(&group.all_reduce_slice(&mut [1], ReduceOp::Sum)));
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("the_rank_that_slept", 2);
    assert_eq!(ranks[1].hear(), "slept");
    assert!(ranks[0].hear().starts_with("TimedOut | "));
    assert!(!ranks[0].finish().success());
    ranks[1].let_go();
    let (heard, host, pid) = (ranks[1].hear(), nodename(), ranks[0].pid());
    let ended = "ended after all_reduce #2 timed out waiting for you: it exited with 1";
    assert_eq!(heard, format!("Died 0 | rank 0 (host {host}, pid {pid}) {ended}"));
}

/// The same for a rank that gives up because another one did, and for messages.
#[test]
fn others_that_gave_up() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        group.barrier().wait().unwrap();
        let tensor = group.tensor(&[1]).unwrap();
        let late = Deadline::after(std::time::Duration::from_millis(100));
        match rank.rank {
            0 => {
                say(&outcome(&group.recv(&tensor, 2).deadline(late).wait()));
                say("timed out");
            }
            1 => say("looks on"),
            _ => say("slept"),
        }
        await_parent();
        if rank.rank == 0 {
            std::process::exit(2);
        }
        say(&outcome(&group.all_reduce(&tensor, ReduceOp::Sum).wait()));
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("others_that_gave_up", 3);
    assert_eq!((ranks[1].hear().as_str(), ranks[2].hear().as_str()), ("looks on", "slept"));
    assert!(ranks[0].hear().starts_with("TimedOut | "));
    assert_eq!(ranks[0].hear(), "timed out");
    assert_eq!(ranks[0].finish().code(), Some(2));
    for (reader, whom) in [(1, "rank 2"), (2, "you")] {
        ranks[reader].let_go();
        let (heard, host, pid) = (ranks[reader].hear(), nodename(), ranks[0].pid());
        let ended = format!("ended after recv #1 timed out waiting for {whom}: it exited with 2");
        assert_eq!(heard, format!("Died 0 | rank 0 (host {host}, pid {pid}) {ended}"));
    }
}

/// A sub-group that forms hears of a death that its parent knows, though another rank has died before.
#[test]
fn a_sub_group_hears_of_deaths() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        begin(&group);
        say("ready");
        if rank.rank != 0 {
            return await_parent();
        }
        // Waits for rank 1, which will not come.
        say(&outcome(&group.subgroup(&[0, 1])));
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("a_sub_group_hears_of_deaths", 3);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    ranks[2].kill();
    ranks[1].kill();
    let (heard, pid) = (ranks[0].hear(), ranks[1].pid());
    // The first death may have been seen before it began; then the group has failed with that.
    let of_2 = heard.contains(&format!("pid {}) was killed by SIGKILL", ranks[2].pid()));
    assert!(of_2 || heard.contains(&format!("pid {pid}) was killed by SIGKILL")), "{heard}");
}

/// The same for a group that is made from a store of its own, as torch's are.
#[test]
fn a_group_within_another_hears_of_deaths() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        begin(&group);
        say("ready");
        if rank.rank == 1 {
            return await_parent();
        }
        let builder = Group::builder().context(group.context()).timeout(LONG * 10).name("within");
        say(&outcome(&builder.within(&group, &[0, 1]).from_store(rank.store.clone(), 0, 2)));
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("a_group_within_another_hears_of_deaths", 2);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    ranks[1].kill();
    let heard = ranks[0].hear().replace(&format!("pid {}", ranks[1].pid()), "pid P");
    assert_eq!(heard, rank_1("Died", "was killed by SIGKILL after all_reduce #2"));
}
