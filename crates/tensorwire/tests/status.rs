//! How groups look from outside: through /proc, and by asking over private sockets.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::exit)]

mod ranks;

use std::time::{Duration, Instant};

use ranks::{LONG, Process, Rank, Ranks, await_parent, say};
use rustix::process::Signal;
use tensorwire::collective::{Kind, Path};
use tensorwire::device::fd::{Inquiry, listeners};
use tensorwire::status::{self, Doing, GroupReport, Options, Process as Alive, Report, State};
use tensorwire::{Deadline, Dtype, ReduceOp, Span, Tensor};

fn tensor(count: usize) -> Tensor {
    let span = Span::whole(tensorwire::device::host::private(4 * count).unwrap());
    Tensor::flat(span, Dtype::F32).unwrap()
}

fn options(job: bool, sockets_only: bool) -> Options {
    let mut options = Options::default();
    options.job = job;
    options.sockets_only = sockets_only;
    options
}

fn look(pid: u32, sockets_only: bool) -> Report {
    status::of(pid, &options(false, sockets_only)).unwrap()
}

/// The one group of a process, once it looks as wanted.
fn group_when(pid: u32, sockets_only: bool, wanted: impl Fn(&GroupReport) -> bool) -> GroupReport {
    let end = Instant::now() + LONG;
    loop {
        let report = look(pid, sockets_only);
        if let [group] = report.groups().collect::<Vec<_>>()[..]
            && wanted(group)
        {
            return group.clone();
        }
        assert!(Instant::now() < end, "it never looked as wanted: {report:#?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Both ways must show the same.
fn both_ways(pid: u32, wanted: impl Fn(&GroupReport) -> bool) -> GroupReport {
    let told = group_when(pid, true, &wanted);
    let seen = group_when(pid, false, &wanted);
    let who = |group: &GroupReport| {
        let ranks = group.ranks.iter();
        ranks
            .map(|rank| (rank.rank, rank.pid, rank.host.clone(), rank.process.is_halted()))
            .collect::<Vec<_>>()
    };
    assert_eq!(who(&told), who(&seen));
    assert_eq!(told.ranks.iter().map(|rank| rank.records.len()).collect::<Vec<_>>(), {
        seen.ranks.iter().map(|rank| rank.records.len()).collect::<Vec<_>>()
    });
    seen
}

/// Lets all ranks go on to their end, which must be a good one.
fn all_end(mut ranks: Vec<Process>) {
    ranks.iter_mut().for_each(Process::let_go);
    ranks.into_iter().for_each(Process::expect_success);
}

fn waiting(group: &GroupReport, rank: usize) -> bool {
    matches!(group.ranks[rank].doing, Doing::In(_))
}

#[test]
fn a_stopped_rank_is_named() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        group.broadcast(&tensor(10), 0).wait().unwrap();
        say("ready");
        if rank.rank == 3 {
            await_parent();
        }
        group.all_reduce(&tensor(1000), ReduceOp::Sum).wait().unwrap();
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("a_stopped_rank_is_named", 4);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    ranks[3].signal(Signal::STOP);
    for asked in [0, 3] {
        let group = both_ways(ranks[asked].pid(), |group| {
            (0..3).all(|rank| waiting(group, rank)) && group.ranks[3].process == Alive::Stopped
        });
        assert_eq!((group.name.as_str(), group.world, group.ranks.len()), ("world", 4, 4));
        let [sentence] = &group.summary[..] else { panic!("{:?}", group.summary) };
        let wanted = "ranks 0, 1 and 2 wait in all_reduce #2 for rank 3 (host ";
        assert!(sentence.starts_with(wanted), "{sentence}");
        let wanted = format!("pid {}), which is stopped (SIGSTOP) after broadcast #1, done ", ranks[3].pid());
        assert!(sentence.contains(&wanted), "{sentence}");
        assert_eq!(group.ranks[1].waits_for, [3]);
        let record = group.ranks[1].operation().unwrap();
        assert_eq!((record.kind, record.number, record.bytes), (Kind::AllReduce, 2, 4000));
        assert_eq!((record.state, record.op, record.dtype), (State::Running, Some("SUM"), Some(Dtype::F32)));
        assert_eq!((record.path, record.took), (Some(Path::OneShot), None));
    }
    ranks[3].signal(Signal::CONT);
    all_end(ranks);
}

/// Stopped inside of an operation that the others are in, too.
#[test]
fn a_rank_that_is_stopped_inside_is_named() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        say("ready");
        if rank.rank == 0 {
            await_parent();
        }
        group.barrier().wait().unwrap();
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("a_rank_that_is_stopped_inside_is_named", 2);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    group_when(ranks[1].pid(), false, |group| waiting(group, 1));
    ranks[1].signal(Signal::STOP);
    ranks[0].let_go();
    // Rank 1 had come, so rank 0 goes through and leaves; rank 1 stays inside, and nobody is left to be asked.
    let group = group_when(ranks[1].pid(), false, |group| {
        group.ranks[1].process == Alive::Stopped && group.ranks[0].doing == Doing::Left
    });
    assert_eq!(group.ranks[1].operation().unwrap().title(), "barrier #1");
    ranks[1].signal(Signal::CONT);
    all_end(ranks);
}

#[test]
fn messages_are_shown() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let values = tensor(100);
        match rank.rank {
            0 => group.send(&values, 1).tag(3).wait().unwrap(),
            _ => group.recv(&values, 0).tag(3).wait().unwrap(),
        }
        say("ready");
        if rank.rank == 0 {
            await_parent();
            group.send(&values, 1).tag(7).wait().unwrap();
        } else {
            group.recv(&values, 0).tag(7).wait().unwrap();
        }
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("messages_are_shown", 2);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    let sleeps = |group: &GroupReport| group.ranks[0].process == Alive::Sleeping;
    let group = both_ways(ranks[0].pid(), |group| waiting(group, 1) && sleeps(group));
    let wanted = format!("rank 1 waits in recv #2 (tag 7) for a message from {}, ", group.ranks[0].who());
    assert!(group.summary[0].starts_with(&wanted), "{:?}", group.summary);
    let wanted = "which sleeps outside of tensorwire after send #1 to rank 1, done ";
    assert!(group.summary[0].contains(wanted), "{:?}", group.summary);
    assert_eq!(group.ranks[0].stacks, Some(format!("eu-stack -p {}", ranks[0].pid())));
    assert_eq!(group.ranks[1].stacks, None);
    assert_eq!(group.ranks[1].waits_for, [0]);
    let [first, second] = &group.ranks[1].records[..] else { panic!("{:?}", group.ranks[1].records) };
    assert_eq!((first.kind, first.tag, first.bytes, first.peer), (Kind::Recv, 3, 400, Some(0)));
    assert_eq!((first.state, second.state, second.took), (State::Done, State::Running, None));
    all_end(ranks);
}

/// Rank 3 waits for 0, which waits for 1, which is stopped; 2 waits for room at 3; 4 waits for anyone.
#[test]
fn ranks_stuck_in_messages_are_named() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let (small, large) = (tensor(100), tensor(1 << 20));
        say("ready");
        match rank.rank {
            0 => {
                group.recv(&small, 1).tag(7).wait().unwrap();
                group.send(&small, 3).tag(9).wait().unwrap();
            }
            1 => {
                await_parent();
                group.send(&small, 0).tag(7).wait().unwrap();
            }
            2 => {
                group.send(&large, 3).tag(8).wait().unwrap();
                group.send(&small, 4).tag(10).wait().unwrap();
            }
            3 => {
                group.recv(&small, 0).tag(9).start().unwrap().wait().unwrap();
                group.recv(&large, 2).tag(8).wait().unwrap();
            }
            _ => assert_eq!(group.recv_any(&small).tag(10).wait().unwrap(), 2),
        }
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("ranks_stuck_in_messages_are_named", 5);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    ranks[1].signal(Signal::STOP);
    let pid = ranks[1].pid();
    for asked in [0, 1] {
        let group = both_ways(ranks[asked].pid(), |group| {
            [0, 2, 3, 4].iter().all(|&rank| waiting(group, rank)) && group.ranks[1].process == Alive::Stopped
        });
        let who = |rank: usize| group.ranks[rank].who();
        let [first, second, third, fourth] = &group.summary[..] else { panic!("{:?}", group.summary) };
        let wanted = format!("rank 0 waits in recv #1 (tag 7) for a message from {}, ", who(1));
        assert!(first.starts_with(&wanted) && who(1).contains(&format!("pid {pid})")), "{first}");
        assert!(first.ends_with("which is stopped (SIGSTOP) before its first operation"), "{first}");
        let wanted =
            format!("rank 2 waits in send #1 (tag 8) for room at {}, which is still in recv #1", who(3));
        assert!(second.starts_with(&wanted), "{second}");
        let wanted = format!(
            "rank 3 waits in recv #1 (tag 9) for a message from {}, which is still in recv #1",
            who(0)
        );
        assert!(third.starts_with(&wanted), "{third}");
        assert_eq!(fourth, "rank 4 waits in recv #1 (tag 10) for a message from any rank");
        let waits: Vec<&[usize]> = group.ranks.iter().map(|rank| &rank.waits_for[..]).collect();
        assert_eq!(waits, [&[1][..], &[], &[3], &[0], &[]]);
    }
    ranks[1].signal(Signal::CONT);
    all_end(ranks);
}

/// How a message ended, as its record tells: number, kind, tag, peer, bytes and state.
fn ends(group: &GroupReport, rank: usize) -> Vec<(u64, Kind, u64, Option<usize>, u64, State)> {
    let records = group.ranks[rank].records.iter().filter(|record| record.is_message());
    records
        .map(|record| {
            assert_eq!(record.dtype, Some(Dtype::F32));
            assert_eq!(record.took.is_some(), record.state != State::Running);
            (record.number, record.kind, record.tag, record.peer, record.bytes, record.state)
        })
        .collect()
}

#[test]
fn ends_of_messages_are_recorded() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let (small, large) = (tensor(10), tensor(1 << 20));
        let soon = || Deadline::after(Duration::from_millis(50));
        if rank.rank == 0 {
            assert!(group.recv(&small, 1).tag(1).deadline(soon()).wait().unwrap_err().is_timeout());
            group.recv(&small, 1).tag(2).wait().unwrap_err();
            group.recv(&small, 1).tag(3).start().unwrap().wait().unwrap();
            assert_eq!(group.recv_any(&small).tag(4).wait().unwrap(), 1);
            group.barrier().wait().unwrap();
        } else {
            group.send(&tensor(9), 0).tag(2).wait().unwrap();
            group.send(&small, 0).tag(3).wait().unwrap();
            group.send(&small, 0).tag(4).start().unwrap().wait().unwrap();
            // Nobody takes anything from here on.
            group.barrier().wait().unwrap();
            assert!(group.send(&large, 0).tag(5).deadline(soon()).wait().unwrap_err().is_timeout());
            // What is left of it is in the way until the other one listens.
            assert!(group.send(&small, 0).tag(6).deadline(soon()).wait().unwrap_err().is_timeout());
        }
        say("ready");
        await_parent();
        if rank.rank == 0 {
            let work = group.recv(&small, 1).tag(7).start().unwrap();
            drop(group);
            say(&ranks::outcome(&work.wait()));
        }
        std::thread::sleep(LONG);
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("ends_of_messages_are_recorded", 2);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    let idle = |group: &GroupReport| group.ranks.iter().all(|rank| rank.doing == Doing::Idle);
    let group = both_ways(ranks[0].pid(), idle);
    let (recv, send) = (Kind::Recv, Kind::Send);
    let mut received = vec![
        (1, recv, 1, Some(1), 40, State::TimedOut),
        (2, recv, 2, Some(1), 40, State::Failed),
        (3, recv, 3, Some(1), 40, State::Done),
        (4, recv, 4, None, 40, State::Done),
    ];
    assert_eq!(ends(&group, 0), received);
    let sent = [
        (1, send, 2, Some(0), 36, State::Done),
        (2, send, 3, Some(0), 40, State::Done),
        (3, send, 4, Some(0), 40, State::Done),
        (4, send, 5, Some(0), 4 << 20, State::TimedOut),
        (5, send, 6, Some(0), 40, State::TimedOut),
    ];
    assert_eq!(ends(&group, 1), sent);
    // What is pending when a rank closes the group does not look as if it went on.
    ranks[0].let_go();
    assert!(ranks[0].hear().starts_with("Aborted | "));
    let group = both_ways(ranks[1].pid(), |group| group.ranks[0].doing == Doing::Left);
    received.push((5, recv, 7, Some(1), 40, State::Failed));
    assert_eq!(ends(&group, 0), received);
    ranks.iter_mut().for_each(Process::kill);
}

#[test]
fn a_killed_rank_is_named() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        group.barrier().wait().unwrap();
        say("ready");
        if rank.rank != 1 {
            say(&ranks::outcome(&group.all_reduce(&tensor(5), ReduceOp::Max).wait()));
        }
        await_parent();
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("a_killed_rank_is_named", 3);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    let dead = ranks[1].pid();
    // An operation that begins after the death is refused and leaves no record: both must be inside before it.
    group_when(ranks[0].pid(), false, |group| waiting(group, 0) && waiting(group, 2));
    ranks[1].kill();
    assert!(ranks[0].hear().starts_with("Died 1"));
    // Also by its own pid: the others know of it.
    for pid in [ranks[0].pid(), ranks[2].pid(), dead] {
        let group = both_ways(pid, |group| group.failure.is_some() && group.ranks[1].process == Alive::Gone);
        let wanted = format!("pid {dead}) was killed by SIGKILL");
        assert!(group.failure.as_deref().unwrap().contains(&wanted), "{:?}", group.failure);
        assert!(group.summary[0].starts_with("the group has failed: rank 1 (host "), "{:?}", group.summary);
        let last = group.ranks[0].records.last().unwrap();
        assert_eq!((last.title().as_str(), last.state), ("all_reduce #2", State::Failed));
    }
}

#[test]
fn idle_and_finished() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let values = tensor(1 << 20);
        for _ in 0..5 {
            group.all_reduce(&values, ReduceOp::Sum).wait().unwrap();
        }
        say("idle");
        await_parent();
        drop(group);
        say("closed");
        std::thread::sleep(LONG);
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("idle_and_finished", 2);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "idle"));
    let pid = ranks[1].pid();
    let sleeps = |rank: &status::RankReport| rank.process == Alive::Sleeping;
    let rests = |rank: &status::RankReport| rank.doing == Doing::Idle && sleeps(rank);
    let group = both_ways(pid, |group| group.ranks.iter().all(rests));
    let stacks = format!("(to see where: eu-stack -p {})", ranks[0].pid());
    let wanted = format!("no rank waits for another; ranks 0 and 1 sleep outside of tensorwire {stacks}");
    assert_eq!(group.summary, [wanted]);
    for rank in &group.ranks {
        assert_eq!(rank.records.iter().map(|record| record.number).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        let done =
            |record: &status::Record| record.state == State::Done && record.took > Some(Duration::ZERO);
        assert!(rank.records.iter().all(done), "{:?}", rank.records);
        assert_eq!((rank.records[0].path, rank.records[0].bytes), (Some(Path::Staged), 4 << 20));
    }
    ranks[0].let_go();
    assert_eq!(ranks[0].hear(), "closed");
    let group = both_ways(pid, |group| group.ranks[0].doing == Doing::Left && sleeps(&group.ranks[1]));
    let rest = format!("rank 1 sleeps outside of tensorwire (to see where: eu-stack -p {pid})");
    let wanted = format!("no rank waits for another; rank 0 has closed the group; {rest}");
    assert_eq!(group.summary, [wanted]);
    // One that has closed its groups, and is still there.
    let report = look(ranks[0].pid(), false);
    assert!(report.jobs.is_empty());
    assert!(report.remarks[0].contains("is in no group"), "{:?}", report.remarks);
    // One that is not.
    let pid = ranks[0].pid();
    ranks[0].kill();
    ranks[1].kill();
    let report = look(pid, false);
    assert!(report.jobs.is_empty());
    assert_eq!(report.remarks[0], format!("there is no process {pid}"));
}

#[test]
fn a_process_without_groups() {
    if Rank::of_this_process().is_some() {
        say("ready");
        return await_parent();
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("a_process_without_groups", 1);
    assert_eq!(ranks[0].hear(), "ready");
    let report = look(ranks[0].pid(), false);
    assert!(report.jobs.is_empty() && report.remarks[0].contains("is in no group"), "{report:?}");
    let report = look(ranks[0].pid(), true);
    assert!(report.jobs.is_empty() && !report.remarks.is_empty(), "{report:?}");
}

/// It is neither absent nor does it sleep outside: it waits in another group, which need not be asked for.
#[test]
fn a_rank_that_waits_in_another_group_is_not_outside() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let pair = (rank.rank > 0).then(|| group.subgroup(&[1, 2]).unwrap());
        say("ready");
        match rank.rank {
            1 => pair.unwrap().barrier().wait().unwrap(),
            2 => {
                await_parent();
                pair.unwrap().barrier().wait().unwrap();
            }
            _ => {}
        }
        group.all_reduce(&tensor(10), ReduceOp::Sum).wait().unwrap();
        return;
    }
    let Ranks { mut ranks, server: _server } =
        Ranks::start("a_rank_that_waits_in_another_group_is_not_outside", 3);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    let group = both_ways(ranks[0].pid(), |group| waiting(group, 0) && group.ranks[1].elsewhere.is_some());
    let elsewhere = group.ranks[1].elsewhere.as_deref().unwrap();
    assert!(elsewhere.starts_with("barrier #1 of group \"world/"), "{elsewhere}");
    assert_eq!((&group.ranks[1].stacks, &group.ranks[2].elsewhere), (&None, &None));
    let wanted = format!("{}, which is in {elsewhere} (before its first operation)", group.ranks[1].who());
    assert!(group.summary[0].contains(&wanted), "{:?}", group.summary);
    all_end(ranks);
}

#[test]
fn all_groups_of_a_job() {
    if let Some(rank) = Rank::of_this_process() {
        let world = rank.group();
        let pair = match rank.rank {
            0 => None,
            _ => Some(world.subgroup(&[1, 2]).unwrap()),
        };
        say("ready");
        if rank.rank == 1 {
            pair.as_ref().unwrap().barrier().wait().unwrap();
        }
        await_parent();
        if rank.rank == 2 {
            pair.as_ref().unwrap().barrier().wait().unwrap();
        }
        world.barrier().wait().unwrap();
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("all_groups_of_a_job", 3);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    group_when_named(ranks[1].pid(), "world/ranks");
    for sockets_only in [false, true] {
        let of = |rank: usize, job: bool| {
            let report = status::of(ranks[rank].pid(), &options(job, sockets_only)).unwrap();
            report.groups().map(|group| (group.name.clone(), group.world)).collect::<Vec<_>>()
        };
        assert_eq!(of(0, false), [("world".to_owned(), 3)]);
        assert_eq!(of(0, true).len(), 2);
        let both = of(1, false);
        assert_eq!((both.len(), both[0].clone(), both[1].1), (2, ("world".to_owned(), 3), 2));
        assert_eq!(of(1, true), both);
    }
    all_end(ranks);
}

/// Waits until somebody waits in the group of that name.
fn group_when_named(pid: u32, name: &str) {
    let end = Instant::now() + LONG;
    let waits = |group: &GroupReport| {
        group.name.starts_with(name) && group.summary[0].contains("waits in barrier #1")
    };
    while !look(pid, false).groups().any(waits) {
        assert!(Instant::now() < end, "{:#?}", look(pid, false));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Who asks and does not listen takes nothing from others: neither from the group, nor, for long, from who asks next.
#[test]
fn those_who_ask_and_do_not_listen() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        for _ in 0..3000 {
            group.barrier().wait().unwrap();
        }
        say("ready");
        await_parent();
        for _ in 0..100 {
            group.barrier().wait().unwrap();
        }
        say("went on");
        say(&ranks::outcome(&group.split(Some(1), 0)));
        std::thread::sleep(LONG);
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("those_who_ask_and_do_not_listen", 2);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    let pid = ranks[0].pid();
    let ask = |address| Inquiry::ask(address, Deadline::after(LONG));
    let addresses = listeners(None);
    let mine =
        addresses.iter().find(|address| ask(address).is_ok_and(|inquiry| inquiry.pid() == pid)).unwrap();
    let deaf: Vec<Inquiry> = (0..20).map(|_| ask(mine).unwrap()).collect();
    ranks.iter_mut().for_each(Process::let_go);
    for rank in &mut ranks {
        assert_eq!((rank.hear(), rank.hear()), ("went on".to_owned(), "ok".to_owned()));
    }
    let refused = deaf.iter().filter(|inquiry| {
        let end = Instant::now() + LONG;
        loop {
            match inquiry.try_recv() {
                Ok(Some(frame)) => return frame.len() == 5,
                Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(1)),
                other => panic!("{other:?}"),
            }
        }
    });
    assert!(refused.count() >= 16);
    drop(deaf);
    let group = group_when(pid, true, |group| group.ranks[0].records.len() > 2000);
    assert_eq!(group.ranks[0].records.last().map(|record| record.number), Some(3100));
    assert_eq!(group.ranks[0].records.len(), 2048);
}
