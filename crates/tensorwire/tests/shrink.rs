//! `Group::shrink`: after a failure the survivors go on in a group of their own.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::exit)]

mod ranks;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ranks::{
    LONG, Process, Rank, Ranks, await_parent, context, context_on, describe, on_threads, outcome, say,
};
use rustix::process::Signal;
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Deadline, Dtype, Error, Group, ReduceOp, Result, Tensor};

fn soon() -> Deadline {
    Deadline::after(LONG)
}

/// The new group in one line, after it has shown that it works.
fn tried(group: &Result<Group>) -> String {
    let group = match group {
        Ok(group) => group,
        Err(error) => return describe(error),
    };
    let pids: Vec<String> = group.members().iter().map(|member| member.pid.to_string()).collect();
    let works = group.barrier().wait().and_then(|()| group.check());
    format!("{} {} {} [{}]", group.name(), group.rank(), outcome(&works), pids.join(" "))
}

/// Uses a new group in every way.
fn use_all(group: &Group) {
    group.barrier().wait().unwrap();
    let all: Vec<usize> = (0..group.world()).rev().collect();
    group.subgroup(&all).unwrap().barrier().wait().unwrap();
    let half = group.split(Some((group.rank() % 2) as u64), 0).unwrap().unwrap();
    half.barrier().wait().unwrap();
    let span = group.alloc(64).unwrap();
    let (number, _) = group.memory_number(&span).unwrap();
    group.barrier().wait().unwrap();
    for peer in 0..group.world() {
        group.memory_of_peer(peer, number, soon()).unwrap().write(group.rank(), &[1]).unwrap();
    }
    group.barrier().wait().unwrap();
    assert!(span.to_vec().unwrap()[..group.world()].iter().all(|&byte| byte == 1));
    for bytes in [8, 1 << 18] {
        let tensor = Tensor::flat(group.alloc(bytes).unwrap(), Dtype::U8).unwrap();
        tensor.span().write(0, &vec![group.rank() as u8 + 1; bytes]).unwrap();
        group.all_reduce(&tensor, ReduceOp::Sum).wait().unwrap();
        let sum = (1..=group.world() as u8).sum::<u8>();
        assert!(tensor.span().to_vec().unwrap().iter().all(|&byte| byte == sum), "{bytes} bytes");
    }
    group.barrier().wait().unwrap();
}

on_ranks!(without_a_failure_all_go_on, 4, |group| {
    let kept = group.alloc(64).unwrap();
    kept.write(0, &[group.rank() as u8]).unwrap();
    let next = group.shrink().unwrap();
    assert_eq!((next.rank(), next.world()), (group.rank(), 4));
    assert_eq!(next.name(), "world/shrink #1");
    assert_eq!(next.timeout(), group.timeout());
    // Memory of the old group is memory of the new one.
    let (number, offset) = next.memory_number(&kept).unwrap();
    assert_eq!((number, offset), (1, 0));
    // Every rank has come out of shrink.
    next.barrier().wait().unwrap();
    for peer in 0..4 {
        let there = next.memory_of_peer(peer, number, soon()).unwrap();
        assert_eq!(there.to_vec().unwrap()[0], peer as u8);
    }
    use_all(&next);
    // The old one is as it was, and can be shrunk again.
    group.barrier().wait().unwrap();
    let again = group.shrink().unwrap();
    assert_eq!(again.name(), "world/shrink #2");
    again.barrier().wait().unwrap();
    let deeper = next.shrink().unwrap();
    assert_eq!(deeper.name(), "world/shrink #1/shrink #1");
    use_all(&deeper);
});

on_ranks!(after_an_abort, 3, |group| {
    if group.rank() == 1 {
        group.abort("enough");
    }
    let error = group.barrier().wait().unwrap_err().to_string();
    let next = group.shrink().unwrap();
    use_all(&next);
    assert_eq!(group.check().unwrap_err().to_string(), error);
    next.barrier().wait().unwrap();
});

on_ranks!(a_world_of_one, 1, |group| {
    let next = group.shrink().unwrap();
    use_all(&next);
    use_all(&next.shrink().unwrap());
});

on_ranks!(only_so_often, 2, |group| {
    for number in 1..=32 {
        assert_eq!(group.shrink().unwrap().name(), format!("world/shrink #{number}"));
    }
    let error = group.shrink().unwrap_err();
    assert!(describe(&error).starts_with("Misuse | "), "{error}");
});

/// Ranks that leave, as threads: one after the other until one is left.
#[test]
fn those_who_have_left() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    on_threads(4, |rank| {
        let builder = Group::builder().context(&context()).timeout(LONG);
        let mut group = builder.from_store(store.clone(), rank, 4).unwrap();
        let mut order = vec![0, 1, 2, 3];
        for leaver in [2, 0, 3] {
            if rank == leaver {
                return group.close().unwrap();
            }
            order.retain(|&other| other != leaver);
            group = group.shrink().unwrap();
            assert_eq!(group.world(), order.len());
            assert_eq!(order[group.rank()], rank);
            use_all(&group);
        }
        assert_eq!((rank, group.name()), (1, "world/shrink #1/shrink #1/shrink #1"));
    });
}

#[test]
fn only_on_one_host() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    on_threads(2, |rank| {
        let builder = Group::builder().context(&context_on(&rank.to_string())).timeout(LONG);
        let group = builder.from_store(store.clone(), rank, 2).unwrap();
        let error = group.shrink().unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        println!("{error}");
        group.barrier().wait().unwrap();
    });
}

#[test]
fn one_thread_at_a_time() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let groups = on_threads(2, |rank| {
        Group::builder().context(&context()).timeout(LONG).from_store(store.clone(), rank, 2).unwrap()
    });
    let ends = on_threads(2, |_| {
        groups[0].shrink_within(Duration::from_secs(3600), Deadline::after(Duration::from_millis(500)))
    });
    let mut ends: Vec<String> = ends.iter().map(outcome).collect();
    ends.sort();
    assert!(ends[0].starts_with("Misuse | another thread"), "{ends:?}");
    assert!(ends[1].starts_with("TimedOut | ") && ends[1].contains("has not come"), "{ends:?}");
    assert_eq!(ends[1].matches("the time-out was given with the call").count(), 1, "{ends:?}");
    println!("{}", ends[1]);
    // Who has timed out may come again.
    on_threads(2, |rank| groups[rank].shrink().unwrap().barrier().wait().unwrap());
}

/// A rank that does not come is left out when the grace is over, and hears of it.
#[test]
fn who_comes_too_late_is_told() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let groups = on_threads(4, |rank| {
        Group::builder().context(&context()).timeout(LONG).from_store(store.clone(), rank, 4).unwrap()
    });
    let rest = on_threads(3, |rank| {
        let next = groups[rank + 1].shrink_within(Duration::from_millis(300), soon()).unwrap();
        assert_eq!((next.rank(), next.world()), (rank, 3));
        next
    });
    for _ in 0..2 {
        let error = groups[0].shrink().unwrap_err();
        println!("{error}");
        assert!(describe(&error).starts_with("Left 1 | "), "{error}");
        for rank in 1..4 {
            assert!(error.to_string().contains(&groups[0].members()[rank].to_string()), "{error}");
        }
        assert!(error.to_string().contains("\"world/shrink #1\""), "{error}");
    }
    on_threads(3, |rank| use_all(&rest[rank]));
}

/// Starts ranks that wait in a barrier for the victims; kills those; gives what the others say of their new group.
fn kill(test: &str, world: usize, victims: &[usize]) -> Vec<String> {
    let Ranks { mut ranks, server: _server } = Ranks::start(test, world);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    let mut dying: Vec<Process> = Vec::new();
    for &victim in victims.iter().rev() {
        dying.push(ranks.remove(victim));
    }
    let since = Instant::now();
    for process in &mut dying {
        process.kill();
    }
    let pids: Vec<String> = ranks.iter().map(|rank| rank.pid().to_string()).collect();
    let mut said = Vec::new();
    for (place, rank) in ranks.iter_mut().enumerate() {
        let heard = rank.hear();
        println!("{test}: rank {} after {:?}: {heard}", rank.rank, since.elapsed());
        assert_eq!(heard, format!("world/shrink #1 {place} ok [{}]", pids.join(" ")));
        said.push(heard);
    }
    for rank in ranks {
        rank.expect_success();
    }
    said
}

/// A rank whose group fails and who shrinks it.
fn survive(rank: &Rank, victims: &[usize]) {
    let group = rank.group();
    group.barrier().wait().unwrap();
    say("ready");
    if victims.contains(&rank.rank) {
        return await_parent();
    }
    let error = group.barrier().wait().unwrap_err();
    let next = group.shrink();
    say(&tried(&next));
    let next = next.unwrap();
    use_all(&next);
    assert_eq!(group.check().unwrap_err().to_string(), error.to_string());
    assert!(describe(&error).starts_with("Died "), "{error}");
    next.barrier().wait().unwrap();
}

#[test]
fn one_of_four_is_killed() {
    match Rank::of_this_process() {
        Some(rank) => survive(&rank, &[2]),
        None => _ = kill("one_of_four_is_killed", 4, &[2]),
    }
}

#[test]
fn rank_0_is_killed() {
    match Rank::of_this_process() {
        Some(rank) => survive(&rank, &[0]),
        None => _ = kill("rank_0_is_killed", 4, &[0]),
    }
}

#[test]
fn two_are_killed_at_once() {
    match Rank::of_this_process() {
        Some(rank) => survive(&rank, &[0, 3]),
        None => _ = kill("two_are_killed_at_once", 5, &[0, 3]),
    }
}

#[test]
fn all_but_one_are_killed() {
    match Rank::of_this_process() {
        Some(rank) => survive(&rank, &[0, 2]),
        None => _ = kill("all_but_one_are_killed", 3, &[0, 2]),
    }
}

#[test]
fn two_shrink_to_one() {
    match Rank::of_this_process() {
        Some(rank) => survive(&rank, &[0]),
        None => _ = kill("two_shrink_to_one", 2, &[0]),
    }
}

/// The store is served by rank 0, as with `from_url`, and dies with it.
#[test]
fn the_store_dies_with_rank_0() {
    if let Some(rank) = Rank::of_this_process() {
        let url = format!("tcp://127.0.0.1:{}", std::env::var("TEST_STORE_PORT").unwrap());
        let builder = Group::builder().timeout(LONG);
        let group = builder.from_url(&url, Some(rank.rank), Some(rank.world)).unwrap();
        group.barrier().wait().unwrap();
        say("ready");
        if rank.rank == 0 {
            return await_parent();
        }
        group.barrier().wait().unwrap_err();
        let next = group.shrink().unwrap();
        use_all(&next);
        return say(&tried(&Ok(next)));
    }
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let Ranks { mut ranks, server: _server } =
        Ranks::start_with("the_store_dies_with_rank_0", 3, |_, mut command| {
            command.env("TEST_STORE_PORT", free.to_string());
            command
        });
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    ranks.remove(0).kill();
    for rank in &mut ranks {
        let heard = rank.hear();
        assert!(heard.contains(" ok ["), "{heard}");
    }
}

/// One after the other is killed, and each time the rest shrink the group that came of the last time.
#[test]
fn shrinks_in_a_row() {
    if let Some(rank) = Rank::of_this_process() {
        let mut group = rank.group();
        loop {
            use_all(&group);
            say(&format!("{} {}", group.rank(), group.world()));
            if group.world() == 1 {
                return;
            }
            while group.check().is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
            group = group.shrink().unwrap();
        }
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("shrinks_in_a_row", 4);
    for victim in [1, 0, 1] {
        let world = ranks.len();
        for (place, rank) in ranks.iter_mut().enumerate() {
            assert_eq!(rank.hear(), format!("{place} {world}"));
        }
        ranks.remove(victim).kill();
    }
    assert_eq!(ranks[0].hear(), "0 1");
    assert_eq!(ranks[0].rank, 2);
}

/// A rank that is stopped is left out, and told when it goes on.
#[test]
fn a_stopped_rank() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        group.barrier().wait().unwrap();
        say("ready");
        if rank.rank == 0 {
            await_parent();
            say(&outcome(&group.shrink()));
            say(&outcome(&group.shrink()));
            return;
        }
        let error = group.barrier().deadline(Deadline::after(Duration::from_secs(1))).wait().unwrap_err();
        assert!(error.is_timeout(), "{error}");
        let next = group.shrink_within(Duration::from_secs(1), soon());
        say(&tried(&next));
        await_parent();
        use_all(&next.unwrap());
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("a_stopped_rank", 3);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    ranks[0].signal(Signal::STOP);
    let (one, two) = (ranks[1].pid(), ranks[2].pid());
    for place in [0, 1] {
        let heard = ranks[place + 1].hear();
        assert_eq!(heard, format!("world/shrink #1 {place} ok [{one} {two}]"));
    }
    ranks[0].signal(Signal::CONT);
    ranks[0].let_go();
    let heard = ranks[0].hear();
    println!("{heard}");
    assert!(heard.starts_with("Left 1 | rank 1 (host "), "{heard}");
    assert!(heard.contains(&format!("pid {one})")) && heard.contains(&format!("pid {two})")), "{heard}");
    assert_eq!(ranks[0].hear(), heard);
    for rank in &mut ranks {
        rank.let_go();
    }
    for rank in ranks {
        rank.expect_success();
    }
}

/// The one whose turn it is to decide is stopped when it has come: the next one decides without it.
#[test]
fn a_stopped_decider() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        group.barrier().wait().unwrap();
        say("ready");
        await_parent();
        if rank.rank == 3 {
            return std::thread::sleep(LONG);
        }
        let start = Instant::now();
        let next = group.shrink_within(Duration::from_secs(2), soon());
        say(&tried(&next));
        println!("{:?}", start.elapsed());
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("a_stopped_decider", 4);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    // It waits for rank 3, which does not come, when it is stopped.
    ranks[0].let_go();
    std::thread::sleep(Duration::from_millis(300));
    ranks[0].signal(Signal::STOP);
    let (one, two) = (ranks[1].pid(), ranks[2].pid());
    for rank in &mut ranks[1..] {
        rank.let_go();
    }
    let heard: Vec<String> = (1..3).map(|rank| ranks[rank].hear()).collect();
    ranks[0].signal(Signal::CONT);
    println!("{heard:?}");
    for (place, heard) in heard.iter().enumerate() {
        assert_eq!(*heard, format!("world/shrink #1 {place} ok [{one} {two}]"));
    }
    let heard = ranks[0].hear();
    assert!(heard.starts_with("Left 1 | "), "{heard}");
}

/// Kills at random moments of a shrink, of the one that decides or of another: the rest always end up in one group.
#[test]
fn kills_in_the_middle() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        group.barrier().wait().unwrap();
        say("ready");
        if rank.rank == 0 {
            return await_parent();
        }
        group.barrier().wait().unwrap_err();
        say("shrinks");
        let mut group = group;
        loop {
            let next = group.shrink();
            let Ok(next) = next else { return say(&tried(&next)) };
            // The second death may have come when the new group was there already.
            match next.barrier().deadline(Deadline::after(Duration::from_secs(30))).wait() {
                Ok(()) if next.world() == 2 => return say(&tried(&Ok(next))),
                // The barrier was over before the kill.
                Ok(()) => while next.check().is_ok() {},
                Err(_) => {}
            }
            group = next;
        }
    }
    let mut names: BTreeMap<String, usize> = BTreeMap::new();
    for round in 0..ROUNDS {
        let Ranks { mut ranks, server: _server } = Ranks::start("kills_in_the_middle", 4);
        for rank in &mut ranks {
            assert_eq!(rank.hear(), "ready");
        }
        ranks.remove(0).kill();
        // Rank 1 decides, unless it dies before that.
        let victim = if round % 3 == 2 { 1 } else { 0 };
        let mut dying = ranks.remove(victim);
        assert_eq!(dying.hear(), "shrinks");
        let random = u64::from_le_bytes(tensorwire::device::Id::random().unwrap().0[..8].try_into().unwrap());
        std::thread::sleep(Duration::from_micros(random % 5_000 * (round % 4)));
        dying.kill();
        for rank in &mut ranks {
            assert_eq!(rank.hear(), "shrinks");
        }
        let pids: Vec<String> = ranks.iter().map(|rank| rank.pid().to_string()).collect();
        let heard: Vec<String> = ranks.iter_mut().map(Process::hear).collect();
        println!("round {round}, killed {}: {heard:?}", dying.rank);
        let name = heard[0].split(" 0 ok").next().unwrap().to_owned();
        for (place, heard) in heard.iter().enumerate() {
            assert_eq!(*heard, format!("{name} {place} ok [{}]", pids.join(" ")), "round {round}");
        }
        *names.entry(name).or_default() += 1;
        for rank in ranks {
            rank.expect_success();
        }
    }
    println!("{names:?}");
}

const ROUNDS: u64 = 12;

/// One rank has no descriptors left: nobody goes on in a group that it is not in, and later all do.
#[test]
fn a_rank_that_cannot_form_the_new_group() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        group.barrier().wait().unwrap();
        let victim: usize = std::env::var("TEST_VICTIM").unwrap().parse().unwrap();
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let set = |current| {
            let limit = rustix::process::Rlimit { current, ..limit };
            rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
        };
        if rank.rank == victim {
            // Descriptors are given out from below, and none of these is free.
            let highest = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
            set(Some(highest.saturating_sub(1).max(4)));
        }
        // If it is the decider, it does not come so far as to decide; the others would wait for the grace.
        let deadline = if victim == 0 { Deadline::after(Duration::from_secs(2)) } else { soon() };
        say(&outcome(&group.shrink_within(LONG, deadline)));
        set(limit.current);
        group.barrier().wait().unwrap();
        let next = group.shrink_within(LONG, soon());
        say(&tried(&next));
        return use_all(&next.unwrap());
    }
    for victim in [0, 1] {
        let Ranks { mut ranks, server: _server } =
            Ranks::start_with("a_rank_that_cannot_form_the_new_group", 3, |_, mut command| {
                command.env("TEST_VICTIM", victim.to_string());
                command
            });
        for rank in &mut ranks {
            let heard = rank.hear();
            println!("victim {victim}, rank {}: {heard}", rank.rank);
            let wanted = match rank.rank == victim {
                true => "Io | ",
                false if victim == 0 => "TimedOut | ",
                false => "",
            };
            assert!(heard.starts_with(wanted) && heard != "ok", "{heard}");
        }
        for (place, rank) in ranks.iter_mut().enumerate() {
            let heard = rank.hear();
            let number = if victim == 0 { 1 } else { 2 };
            assert!(heard.starts_with(&format!("world/shrink #{number} {place} ok ")), "{heard}");
        }
        for rank in ranks {
            rank.expect_success();
        }
    }
}

/// Everything of a shrink goes with its groups: descriptors, mappings, threads.
#[test]
fn nothing_is_left() {
    let Some(rank) = Rank::of_this_process() else {
        for rank in Ranks::start("nothing_is_left", 3).ranks {
            rank.expect_success();
        }
        return;
    };
    let count = |dir: &str| std::fs::read_dir(dir).unwrap().count();
    let maps = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains("memfd:tensorwire")).count()
    };
    let usage = || (count("/proc/self/fd"), count("/proc/self/task"), maps());
    let calm = || {
        let (mut last, mut same) = (usage(), 0);
        while same < 30 {
            std::thread::sleep(Duration::from_millis(10));
            let now = usage();
            same = if now == last { same + 1 } else { 0 };
            last = now;
        }
        last
    };
    let group = rank.group();
    drop(group.shrink().unwrap());
    group.barrier().wait().unwrap();
    let before = calm();
    group.barrier().wait().unwrap();
    for _ in 0..5 {
        let next = group.shrink().unwrap();
        next.barrier().wait().unwrap();
        drop(next.shrink().unwrap());
    }
    group.barrier().wait().unwrap();
    assert_eq!(calm(), before);
    group.barrier().wait().unwrap();
}

/// A forked child may not.
#[test]
fn a_forked_child() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        // SAFETY: the child runs a call that returns at once, and leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = outcome(&group.shrink()).contains("parent process");
            // SAFETY: ends the child without the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!refused)) }
        }
        let mut status = 0;
        // SAFETY: `status` is a valid place for the result.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        return use_all(&group.shrink().unwrap());
    }
    for rank in Ranks::start("a_forked_child", 2).ranks {
        rank.expect_success();
    }
}

/// Ranks in different network namespaces have no loopback in common; they meet in a file beside their sockets.
#[test]
fn in_other_network_namespaces() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        group.barrier().wait().unwrap();
        say("ready");
        if rank.rank == 0 {
            return await_parent();
        }
        group.barrier().wait().unwrap_err();
        let next = group.shrink();
        say(&tried(&next));
        use_all(&next.unwrap());
        return;
    }
    let probe = std::process::Command::new("unshare").args(["--net", "true"]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        return ranks::skip("unshare --net is not permitted");
    }
    let id = tensorwire::device::Id::random().unwrap();
    let dir = std::env::temp_dir().join(format!("tensorwire-shrink-{id}"));
    std::fs::create_dir(&dir).unwrap();
    let Ranks { mut ranks, server: _server } =
        Ranks::start_with("in_other_network_namespaces", 4, |rank, command| {
            let mut wrapped = if rank == 1 {
                command
            } else {
                let mut wrapped = std::process::Command::new("unshare");
                wrapped.arg("--net").arg(command.get_program()).args(command.get_args());
                wrapped.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
                wrapped
            };
            wrapped.env(ranks::FILE, dir.join("store")).env("TENSORWIRE_SOCKET_DIR", &dir);
            wrapped
        });
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    ranks.remove(0).kill();
    for (place, rank) in ranks.iter_mut().enumerate() {
        let heard = rank.hear();
        assert!(heard.starts_with(&format!("world/shrink #1 {place} ok [")), "{heard}");
    }
    for rank in ranks {
        rank.expect_success();
    }
    // The store of the killed group, and the socket of the killed rank.
    let left: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
    std::fs::remove_dir_all(&dir).unwrap();
}
