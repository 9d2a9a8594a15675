//! Deaths of ranks that are real processes: the others hear of it at once, and of whom.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::exit)]

mod ranks;

use std::time::{Duration, Instant};

use ranks::{Process, Rank, Ranks, await_parent, outcome, say};
use rustix::process::Signal;
use tensorwire::{Error, Group};

/// A rank that waits in a barrier which can only fail, and says what it got; then what later calls get.
fn survive(group: &Group) {
    say("waits");
    say(&outcome(&group.barrier().wait()));
    say(&outcome(&group.barrier().wait()));
    say(&outcome(&group.check()));
    say(&outcome(&group.split(Some(0), 0)));
    let all: Vec<usize> = (0..group.world()).collect();
    say(&outcome(&group.subgroup(&all)));
    await_parent();
}

/// The victim says "ready" and stays out of the barrier.
fn body(rank: &Rank, victim: usize) {
    let group = rank.group();
    if rank.rank == victim {
        say("ready");
        await_parent();
        std::process::exit(0);
    }
    survive(&group);
}

fn expect_death(
    survivors: &mut [Process],
    victim: usize,
    (pid, did): (u32, &str),
    since: Instant,
) -> Duration {
    let mut slowest = Duration::ZERO;
    for rank in survivors.iter_mut() {
        let heard = rank.hear();
        slowest = slowest.max(since.elapsed());
        // A good status means that it has left.
        let kind = if did.starts_with("left") { "Left" } else { "Died" };
        let wanted = format!("{kind} {victim} | rank {victim} (host ");
        assert!(heard.starts_with(&wanted), "rank {}: {heard}", rank.rank);
        assert!(heard.contains(&format!("pid {pid}) {did}")), "{heard}");
        // Everything later fails with the same.
        for _ in 0..4 {
            assert_eq!(rank.hear(), heard);
        }
    }
    slowest
}

/// Ends the victim in some way while all others wait for it.
fn end_of(test: &str, world: usize, victim: usize, did: &str, end: impl FnOnce(&mut Process)) {
    let Ranks { mut ranks, server: _server } = Ranks::start(test, world);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), if rank.rank == victim { "ready" } else { "waits" });
    }
    let mut dying = ranks.remove(victim);
    let pid = dying.pid();
    let since = Instant::now();
    end(&mut dying);
    let slowest = expect_death(&mut ranks, victim, (pid, did), since);
    println!("{test}: from the kill of rank {victim} to the last of {} errors {slowest:?}", world - 1);
    for rank in ranks {
        rank.expect_success();
    }
}

#[test]
fn kill_of_the_leader() {
    if let Some(rank) = Rank::of_this_process() {
        return body(&rank, 0);
    }
    end_of("kill_of_the_leader", 4, 0, "was killed by SIGKILL", Process::kill);
}

#[test]
fn kill_of_another_rank() {
    if let Some(rank) = Rank::of_this_process() {
        return body(&rank, 2);
    }
    end_of("kill_of_another_rank", 4, 2, "was killed by SIGKILL", Process::kill);
}

#[test]
fn a_crash() {
    if let Some(rank) = Rank::of_this_process() {
        return body(&rank, 1);
    }
    end_of("a_crash", 3, 1, "was killed by SIGILL", |rank| rank.signal(Signal::ILL));
}

#[test]
fn an_abort_of_the_process() {
    if let Some(rank) = Rank::of_this_process() {
        return body(&rank, 1);
    }
    end_of("an_abort_of_the_process", 3, 1, "was killed by SIGABRT", |rank| rank.signal(Signal::ABORT));
}

/// An end that looks like a good one, but without closing the group.
#[test]
fn exit_without_closing() {
    if let Some(rank) = Rank::of_this_process() {
        return body(&rank, 0);
    }
    let did = "left: its process exited with 0 without closing the group";
    end_of("exit_without_closing", 3, 0, did, |rank| assert!(rank.finish().success()));
}

#[test]
fn a_stopped_rank_of_this_host_is_not_dead() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        say("formed");
        if rank.rank == 0 {
            let error = group
                .barrier()
                .deadline(tensorwire::Deadline::after(Duration::from_secs(3)))
                .wait()
                .unwrap_err();
            say(&outcome::<()>(&Err(error)));
        } else {
            await_parent();
            // It comes to a barrier that rank 0 has given up.
            assert!(group.barrier().wait().unwrap_err().is_timeout());
        }
        group.barrier().wait().unwrap();
        return;
    }
    // Beats are for other hosts; here even a short one must not count.
    let Ranks { mut ranks, server: _server } =
        Ranks::start_with("a_stopped_rank_of_this_host_is_not_dead", 2, |_, mut command| {
            command.env("TENSORWIRE_HEARTBEAT", "1");
            command
        });
    assert_eq!(ranks[1].hear(), "formed");
    ranks[1].signal(Signal::STOP);
    assert_eq!(ranks[0].hear(), "formed");
    let heard = ranks[0].hear();
    ranks[1].signal(Signal::CONT);
    ranks[1].let_go();
    assert!(heard.starts_with("TimedOut"), "{heard}");
    assert!(
        heard.contains("it waited for rank 1 (host ")
            && heard.contains("), which is stopped (SIGSTOP) before its first operation"),
        "{heard}"
    );
    for rank in ranks {
        rank.expect_success();
    }
}

/// The rest are told by threads that only wait for the group to break.
#[test]
fn a_pending_split_and_subgroup_end() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        if rank.rank == 2 {
            say("ready");
            return await_parent();
        }
        std::thread::scope(|scope| {
            let split = scope.spawn(|| group.split(Some(1), 0).map(drop));
            let sub = scope.spawn(|| group.subgroup(&[2, 1, 0]).map(drop));
            say("waits");
            say(&outcome(&split.join().unwrap()));
            say(&outcome(&sub.join().unwrap()));
        });
        return await_parent();
    }
    let Ranks { mut ranks, server } = Ranks::start("a_pending_split_and_subgroup_end", 3);
    for rank in &mut ranks {
        rank.hear();
    }
    let port = server.local_addr().port();
    let store = tensorwire::store::TcpStore::connect("127.0.0.1", port, ranks::LONG).unwrap();
    let store: &dyn tensorwire::store::Store = &store;
    store.wait(&["tensorwire/world/split/0/0", "tensorwire/world/split/0/1"]).unwrap();
    let mut dying = ranks.remove(2);
    let since = Instant::now();
    dying.kill();
    for rank in &mut ranks {
        for what in ["split", "subgroup"] {
            let heard = rank.hear();
            println!("{what} of rank {}: {:?}: {heard}", rank.rank, since.elapsed());
            assert!(heard.starts_with("Died"), "{heard}");
            assert!(heard.contains(&format!("pid {})", dying.pid())), "{heard}");
        }
    }
    for rank in ranks {
        rank.expect_success();
    }
}

#[test]
fn sub_groups_break_with_their_members_only() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let pair = group.subgroup(if rank.rank < 2 { &[0, 1] } else { &[2, 3] }).unwrap();
        let odd = group.split(Some((rank.rank % 2) as u64), 0).unwrap().unwrap();
        group.barrier().wait().unwrap();
        say("ready");
        await_parent();
        // The parent has killed rank 3 and it is reaped.
        while group.check().is_ok() {
            std::thread::yield_now();
        }
        say(&outcome(&group.barrier().wait()));
        say(&outcome(&pair.barrier().wait()));
        // 0 and 2 go on; 1 has lost 3.
        say(&outcome(&odd.barrier().wait()));
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("sub_groups_break_with_their_members_only", 4);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    let mut dying = ranks.remove(3);
    let pid = dying.pid();
    dying.kill();
    for rank in &mut ranks {
        rank.let_go();
    }
    for rank in &mut ranks {
        let (whole, pair, odd) = (rank.hear(), rank.hear(), rank.hear());
        let died = |at: usize| format!("Died {at} | rank {at} (host ");
        assert!(whole.starts_with(&died(3)) && whole.contains(&format!("pid {pid})")), "{whole}");
        let alive = |text: &str| assert_eq!(text, "ok", "rank {}", rank.rank);
        match rank.rank {
            0 => (alive(&pair), alive(&odd)).0,
            1 => {
                alive(&pair);
                assert!(odd.starts_with(&died(1)) && odd.contains(&format!("pid {pid})")), "{odd}");
            }
            _ => {
                alive(&odd);
                assert!(pair.starts_with(&died(1)) && pair.contains(&format!("pid {pid})")), "{pair}");
            }
        }
    }
    for rank in ranks {
        rank.expect_success();
    }
}

/// A rank killed at some moment while eight form a group, again and again: nobody hangs, and nobody is told
/// something else than a death or, from one that had formed it already, success.
#[test]
fn kills_at_any_moment_of_forming() {
    if let Some(rank) = Rank::of_this_process() {
        say("starts");
        let group = rank.try_group(Duration::from_secs(4));
        say(&outcome(&group));
        // In a group that has formed the death comes now.
        if let Ok(group) = group {
            say(&outcome(&group.barrier().wait()));
        }
        return;
    }
    for (round, victim) in [0, 1, 2, 0, 1, 2].into_iter().enumerate() {
        let Ranks { mut ranks, server: _server } = Ranks::start("kills_at_any_moment_of_forming", 3);
        for rank in &mut ranks {
            assert_eq!(rank.hear(), "starts");
        }
        let mut dying = ranks.remove(victim);
        let since = Instant::now();
        // Forming takes a few milliseconds; each round is a bit later in it.
        while since.elapsed() < Duration::from_millis(3 * round as u64) {
            std::hint::spin_loop();
        }
        dying.kill();
        let pid = dying.pid();
        for rank in &mut ranks {
            let mut heard = rank.hear();
            if heard == "ok" {
                heard = rank.hear();
            }
            println!("round {round}, rank {}: {:?}: {heard}", rank.rank, since.elapsed());
            let named =
                heard.starts_with(&format!("Died {victim} |")) && heard.contains(&format!("pid {pid})"));
            // It died before it could hand in its card, so nobody knows who it was.
            let unknown =
                heard.starts_with("TimedOut") && heard.contains(&format!("rank {victim} is missing"));
            // The barrier was over before the kill.
            assert!(named || unknown || heard == "ok", "{heard}");
        }
    }
}

/// Everything that a dead rank held is gone: no process, no socket, no file.
#[test]
fn a_kill_leaves_no_socket() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        say("ready");
        await_parent();
        drop(group);
        return;
    }
    let dir = std::env::temp_dir().join(format!("tensorwire-sockets-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let with_dir = |_, mut command: std::process::Command| {
        command.env("TENSORWIRE_SOCKET_DIR", &dir);
        command
    };
    let count = || std::fs::read_dir(&dir).unwrap().count();
    for swept in [0, 1] {
        let Ranks { mut ranks, server: _server } = Ranks::start_with("a_kill_leaves_no_socket", 2, with_dir);
        for rank in &mut ranks {
            assert_eq!(rank.hear(), "ready");
        }
        // The file of the one that was killed in the last round has been swept.
        assert_eq!(count(), 2, "round {swept}");
        ranks.remove(0).kill();
        ranks.remove(0).expect_success();
        assert_eq!(count(), 1);
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn the_error_is_of_the_kind_that_it_says() {
    let error = Error::peer(
        tensorwire::PeerFaultKind::Died,
        "rank 1 (host a, pid 7)",
        Some(1),
        "its process has ended",
    );
    assert_eq!(error.to_string(), "rank 1 (host a, pid 7) died: its process has ended");
}
