//! Forked children of a rank: they keep nothing of ours alive, cannot use the group, and do not disturb it.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::exit)]

#[path = "ranks/fork.rs"]
mod forks;
mod ranks;

use std::time::{Duration, Instant};

use forks::{code_of, fork};
use ranks::{Rank, Ranks, await_parent, describe, on_threads, outcome, say};
use rustix::process::{Pid, Signal, kill_process};
use tensorwire::{Context, Group};

fn forked(result: &tensorwire::Result<()>) -> bool {
    matches!(result, Err(error) if describe(error).starts_with("Misuse | ") && error.to_string().contains("parent process"))
}

#[test]
fn a_child_cannot_use_the_group_and_does_not_disturb_it() {
    if let Some(rank) = Rank::of_this_process() {
        let mut group = Some(rank.group());
        let child = fork(|| {
            let mine = group.take().unwrap();
            let refused = [
                mine.barrier().wait(),
                mine.check(),
                mine.split(Some(0), 0).map(drop),
                mine.subgroup(&[0, 1]).map(drop),
                mine.context().import(mine.context().host().alloc(64).unwrap().export().unwrap()).map(drop),
            ];
            mine.abort("a child must not");
            assert_eq!(mine.world(), 2);
            drop(mine);
            refused.iter().position(|result| !forked(result)).map_or(0, |index| 1 + index as i32)
        });
        assert_eq!(code_of(child), 0, "the number of a call that was not refused");
        let group = group.unwrap();
        group.barrier().wait().unwrap();
        group.subgroup(&[1, 0]).unwrap().barrier().wait().unwrap();
        return;
    }
    for rank in Ranks::start("a_child_cannot_use_the_group_and_does_not_disturb_it", 2).ranks {
        rank.expect_success();
    }
}

#[test]
fn what_a_child_is_told() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let child = fork(|| {
            say(&outcome(&group.barrier().wait()));
            0
        });
        assert_eq!(code_of(child), 0);
        return;
    }
    let mut ranks = Ranks::start("what_a_child_is_told", 1);
    let heard = ranks.ranks[0].hear();
    assert_eq!(heard, "Misuse | the group belongs to the parent process; a forked child must make its own");
    ranks.ranks.remove(0).expect_success();
}

/// A child that makes a context of its own can do everything with it, while the parents go on.
#[test]
fn children_form_a_group_of_their_own() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let child = fork(|| {
            let builder = Group::builder().timeout(ranks::LONG).name("children");
            let ours = builder.from_store(rank.store.clone(), rank.rank, rank.world).unwrap();
            assert_eq!(ours.members()[ours.rank()].pid, std::process::id());
            assert_eq!(ours.hosts(), [[0, 1]]);
            ours.barrier().wait().unwrap();
            ours.subgroup(&[1, 0]).unwrap().barrier().wait().unwrap();
            assert!(forked(&group.barrier().wait()));
            0
        });
        group.barrier().wait().unwrap();
        assert_eq!(code_of(child), 0);
        group.barrier().wait().unwrap();
        return;
    }
    for rank in Ranks::start("children_form_a_group_of_their_own", 2).ranks {
        rank.expect_success();
    }
}

/// Rank 0 serves the store itself; a child that drops its copy of the group must not stop it.
#[test]
fn a_child_does_not_stop_the_parents_store() {
    if let Some(rank) = Rank::of_this_process() {
        let port = std::env::var("TEST_STORE_PORT").unwrap();
        let url = format!("tcp://127.0.0.1:{port}");
        let builder = Group::builder().timeout(ranks::LONG);
        let mut group = Some(builder.from_url(&url, Some(rank.rank), Some(2)).unwrap());
        let child = fork(|| {
            drop(group.take());
            0
        });
        assert_eq!(code_of(child), 0);
        let group = group.unwrap();
        group.barrier().wait().unwrap();
        // This needs the store.
        group.subgroup(&[1, 0]).unwrap().barrier().wait().unwrap();
        group.barrier().wait().unwrap();
        return;
    }
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ranks = Ranks::start_with("a_child_does_not_stop_the_parents_store", 2, |_, mut command| {
        command.env("TEST_STORE_PORT", free.to_string());
        command
    });
    for rank in ranks.ranks {
        rank.expect_success();
    }
}

/// A worker that outlives its rank keeps neither a socket nor a pidfd alive by which the rank would look alive; on one
/// host and between hosts.
#[test]
fn a_rank_with_a_live_worker_is_seen_to_die() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        if rank.rank == 0 {
            let worker = fork(|| {
                std::thread::sleep(Duration::from_secs(600));
                0
            });
            say(&worker.to_string());
            return await_parent();
        }
        say("waits");
        say(&outcome(&group.barrier().wait()));
        return;
    }
    for labels in [["", "", ""], ["a", "a", "b"], ["a", "b", "b"]] {
        let Ranks { mut ranks, server: _server } =
            Ranks::start_with("a_rank_with_a_live_worker_is_seen_to_die", 3, |rank, mut command| {
                // A heartbeat so long that it cannot be what tells.
                command.env("TENSORWIRE_HOST", labels[rank]).env("TENSORWIRE_HEARTBEAT", "100");
                command
            });
        let worker = Pid::from_raw(ranks[0].hear().parse().unwrap()).unwrap();
        assert_eq!((ranks[1].hear(), ranks[2].hear()), ("waits".into(), "waits".into()));
        let pid = ranks[0].pid();
        let since = Instant::now();
        ranks[0].kill();
        for rank in &mut ranks[1..] {
            let heard = rank.hear();
            println!("{labels:?}, rank {}: {:?}: {heard}", rank.rank, since.elapsed());
            assert!(heard.starts_with("Died 0 |") && heard.contains(&format!("pid {pid})")), "{heard}");
        }
        // Nobody has waited for it: its parent is dead, and init reaps it later.
        assert!(kill_process(worker, Signal::KILL).is_ok(), "the worker was alive all the time");
    }
}

/// Threads of several contexts fork while groups form and end: nothing hangs, nothing is closed that is not ours.
#[test]
fn forks_while_groups_form() {
    if let Some(rank) = Rank::of_this_process() {
        let context = Context::from_env().unwrap();
        on_threads(2, |thread| {
            if thread == 0 {
                for round in 0..20 {
                    let builder =
                        Group::builder().context(&context).timeout(ranks::LONG).name(format!("{round}"));
                    let group = builder.from_store(rank.store.clone(), rank.rank, rank.world).unwrap();
                    group.barrier().wait().unwrap();
                }
            } else {
                for _ in 0..20 {
                    assert_eq!(code_of(fork(|| 0)), 0);
                }
            }
        });
        return;
    }
    for rank in Ranks::start("forks_while_groups_form", 2).ranks {
        rank.expect_success();
    }
}
