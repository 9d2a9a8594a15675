//! Memory of `Group::alloc`: peers map it on demand, and nothing stays when it is freed.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::exit)]

#[allow(unreachable_pub)]
#[path = "lease_peer/limits.rs"]
mod limits;
mod ranks;

use std::sync::Arc;
use std::time::{Duration, Instant};

use limits::{fill_descriptors_but, limit};
use ranks::{LONG, Rank, Ranks, await_parent, context, describe, on_threads, outcome, say};
use rustix::process::{Resource, Signal};
use tensorwire::collective::Path;
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Config, Context, Deadline, Dtype, Group, ReduceOp, Span, Tensor};

fn soon() -> Deadline {
    Deadline::after(LONG)
}

fn count(path: &str) -> usize {
    std::fs::read_dir(path).unwrap().count()
}

/// How many pieces of our memory this process has mapped.
fn maps() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:tensorwire")).count()
}

/// Descriptors and mappings.
fn usage() -> (usize, usize) {
    (count("/proc/self/fd"), maps())
}

/// Repeats a question until the answer is right; a thread that goes may take a moment.
fn settles<T: PartialEq + std::fmt::Debug>(mut ask: impl FnMut() -> T, wanted: T) {
    let end = Instant::now() + LONG;
    while ask() != wanted {
        assert!(Instant::now() < end, "{:?} instead of {wanted:?}", ask());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What is in use once nothing changes any more: watchers close what peers have closed a moment later.
fn calm() -> (usize, usize) {
    let (mut last, mut same) = (usage(), 0);
    while same < 30 {
        std::thread::sleep(Duration::from_millis(10));
        let now = usage();
        same = if now == last { same + 1 } else { 0 };
        last = now;
    }
    last
}

fn byte_at(span: &Span, offset: usize) -> u8 {
    let mut byte = [0];
    span.read(offset, &mut byte).unwrap();
    byte[0]
}

on_ranks!(peers_reach_memory_of_each_other, 3, |group| {
    let (me, world) = (group.rank(), group.world());
    let small = group.alloc(100).unwrap();
    let large = group.alloc(1 << 20).unwrap();
    let none = group.alloc(0).unwrap();
    assert_eq!((small.len(), large.len(), none.len()), (100, 1 << 20, 0));
    assert_eq!(group.memory_number(&small), Some((1, 0)));
    assert_eq!(group.memory_number(&large), Some((2, 0)));
    assert_eq!(group.memory_number(&large.slice(7..7).unwrap()), Some((2, 7)));
    assert_eq!(group.memory_number(&none), Some((3, 0)));
    // Other memory has no number.
    let private = Span::whole(tensorwire::device::host::private(100).unwrap());
    assert_eq!(group.memory_number(&private), None);
    small.write(0, &[me as u8; 100]).unwrap();
    group.barrier().wait().unwrap();
    for peer in 0..world {
        let there = group.memory_of_peer(peer, 1, soon()).unwrap();
        assert_eq!(there.to_vec().unwrap(), [peer as u8; 100]);
        let there = group.memory_of_peer(peer, 2, soon()).unwrap();
        there.write(me, &[100 + me as u8]).unwrap();
        assert_eq!(group.memory_of_peer(peer, 3, soon()).unwrap().len(), 0);
    }
    group.barrier().wait().unwrap();
    for peer in 0..world {
        assert_eq!(byte_at(&large, peer), 100 + peer as u8);
    }
    // What was mapped once is not mapped again.
    let other = (me + 1) % world;
    let once = group.memory_of_peer(other, 2, soon()).unwrap();
    assert_eq!(once.region().addr(), group.memory_of_peer(other, 2, soon()).unwrap().region().addr());
    group.barrier().wait().unwrap();
});

on_ranks!(what_is_not_there_is_an_error, 2, |group| {
    let other = 1 - group.rank();
    for place in [group.rank(), other] {
        let error = group.memory_of_peer(place, 1, soon()).unwrap_err();
        assert!(describe(&error).starts_with(&format!("Misbehaved {place} | ")), "{error}");
        assert!(error.to_string().contains("it has no memory #1"), "{error}");
        assert!(error.to_string().contains(&group.members()[place].to_string()), "{error}");
    }
    assert!(describe(&group.memory_of_peer(2, 1, soon()).unwrap_err()).starts_with("Misuse | "));
    assert!(outcome(&group.alloc(usize::MAX)).starts_with("Misuse | "));
    group.barrier().wait().unwrap();
});

on_ranks!(freed_memory_is_given_up, 3, |group| {
    let mapped = || group.context().mapped().0;
    group.barrier().wait().unwrap();
    let before = mapped();
    // One of many, then so many at once that the owner does not name them all, then one more.
    let mut spans: Vec<Option<Span>> = (0..20).map(|_| Some(group.alloc(4096).unwrap())).collect();
    group.barrier().wait().unwrap();
    let reach = |ids: std::ops::RangeInclusive<u64>| {
        for place in (0..3).filter(|place| *place != group.rank()) {
            for id in ids.clone() {
                group.memory_of_peer(place, id, soon()).unwrap();
            }
        }
    };
    reach(1..=20);
    assert_eq!(mapped(), before + 40);
    let held = group.memory_of_peer((group.rank() + 1) % 3, 3, soon()).unwrap();
    for (gone, left) in [(0..1, 38), (1..4, 33), (4..18, 1)] {
        group.barrier().wait().unwrap();
        for span in &mut spans[gone.clone()] {
            *span = None;
        }
        // The owner notices on its own, with a few operations; its peers with their next one.
        for _ in 0..3 {
            group.sweep_memory();
        }
        group.barrier().wait().unwrap();
        group.sweep_memory();
        assert_eq!(mapped(), before + left, "{gone:?}");
    }
    // What somebody still uses lives on.
    held.write(0, &[1]).unwrap();
    drop(held);
    assert_eq!(mapped(), before);
    assert_eq!(group.memory_number(spans[18].as_ref().unwrap()), Some((19, 0)));
    reach(19..=20);
    assert_eq!(mapped(), before + 4);
    group.barrier().wait().unwrap();
    drop(spans);
    // An allocation notices too, and its number is a new one.
    let last = group.alloc(64).unwrap();
    assert_eq!(group.memory_number(&last), Some((21, 0)));
    group.barrier().wait().unwrap();
    reach(21..=21);
    assert_eq!(mapped(), before + 2);
    group.barrier().wait().unwrap();
});

// Memory that comes and goes all the time, as with an allocator that does not cache.
on_ranks!(nothing_piles_up, 2, |group| {
    let (me, other) = (group.rank(), 1 - group.rank());
    for round in 1..=50u8 {
        let span = group.alloc(4096).unwrap();
        span.write(0, &[round + me as u8]).unwrap();
        group.barrier().wait().unwrap();
        let there = group.memory_of_peer(other, round.into(), soon()).unwrap();
        assert_eq!(byte_at(&there, 0), round + other as u8);
        assert!(group.context().mapped().0 <= 3, "{:?}", group.context().mapped());
        group.barrier().wait().unwrap();
    }
    group.sweep_memory();
    group.barrier().wait().unwrap();
    group.sweep_memory();
    assert!(group.context().mapped().0 <= 1);
});

// No thread of the owner but the watcher takes part.
on_ranks!(the_owner_may_compute, 2, |group| {
    let span = group.alloc(4096).unwrap();
    group.barrier().wait().unwrap();
    if group.rank() == 0 {
        let end = Instant::now() + LONG;
        while byte_at(&span, 9) != 1 {
            assert!(Instant::now() < end, "nobody came");
            std::hint::spin_loop();
        }
    } else {
        group.memory_of_peer(0, 1, soon()).unwrap().write(9, &[1]).unwrap();
    }
    group.barrier().wait().unwrap();
});

on_ranks!(threads_of_a_rank, 2, |group| {
    let spans: Vec<Span> = on_threads(8, |_| group.alloc(64).unwrap());
    for span in &spans {
        let (number, _) = group.memory_number(span).unwrap();
        span.write(0, &[number as u8]).unwrap();
    }
    group.barrier().wait().unwrap();
    let before = group.context().mapped().0;
    on_threads(8, |thread| {
        for id in (1..=8).map(|id| (id + thread as u64) % 8 + 1) {
            let there = group.memory_of_peer(1 - group.rank(), id, soon()).unwrap();
            assert_eq!(byte_at(&there, 0), id as u8);
        }
    });
    assert_eq!(group.context().mapped().0, before + 8);
    group.barrier().wait().unwrap();
});

/// A closed group leaves neither mappings nor descriptors; what the user holds lives until it is dropped.
#[test]
fn closing_leaves_nothing() {
    let Some(rank) = Rank::of_this_process() else {
        for rank in Ranks::start("closing_leaves_nothing", 3).ranks {
            rank.expect_success();
        }
        return;
    };
    let context = Context::new(Config::default()).unwrap();
    let round = |round: usize| {
        let builder = Group::builder().context(&context).timeout(LONG).name(format!("{round}"));
        let group = builder.from_store(rank.store.clone(), rank.rank, rank.world).unwrap();
        let mine: Vec<Span> = (0..5).map(|_| group.alloc(8192).unwrap()).collect();
        group.barrier().wait().unwrap();
        for peer in 0..rank.world {
            // Numbers go on: no other memory of the process ever has the same.
            for id in 1..=5 {
                let there = group.memory_of_peer(peer, 5 * round as u64 + id, soon()).unwrap();
                there.write(rank.rank, &[7]).unwrap();
            }
        }
        group.barrier().wait().unwrap();
        drop(group);
        assert_eq!(byte_at(&mine[3], rank.rank), 7);
    };
    round(0);
    settles(|| context.mapped().0, 0);
    let before = calm();
    for number in 1..6 {
        round(number);
    }
    settles(usage, before);
    assert_eq!(context.mapped(), (0, 0));
}

/// A rank that has no descriptor to spare for a moment asks again.
#[test]
fn short_of_descriptors_for_a_moment() {
    let Some(rank) = Rank::of_this_process() else {
        for rank in Ranks::start("short_of_descriptors_for_a_moment", 2).ranks {
            rank.expect_success();
        }
        return;
    };
    let group = rank.group();
    let _spans: Vec<Span> = (0..2).map(|_| group.alloc(64).unwrap()).collect();
    group.barrier().wait().unwrap();
    // The connection is there already.
    group.memory_of_peer(1 - rank.rank, 1, soon()).unwrap();
    group.barrier().wait().unwrap();
    if rank.rank == 0 {
        // A request of the other rank that is still being answered would give its descriptors back.
        calm();
        let files = fill_descriptors_but(0);
        let begin = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(300));
                limit(Resource::Nofile, None);
                drop(files);
            });
            group.memory_of_peer(1, 2, soon()).unwrap();
            assert!(begin.elapsed() >= Duration::from_millis(300), "it had descriptors");
        });
    }
    group.barrier().wait().unwrap();
}

/// A rank that has closed a group hands out no memory in it, and keeps none of it, whoever has a handle still.
#[test]
fn a_handle_of_a_closed_group_keeps_nothing() {
    let Some(rank) = Rank::of_this_process() else {
        for rank in Ranks::start("a_handle_of_a_closed_group_keeps_nothing", 2).ranks {
            rank.expect_success();
        }
        return;
    };
    let context = Context::new(Config::default()).unwrap();
    let group = Group::builder().context(&context).timeout(LONG);
    let group = group.from_store(rank.store.clone(), rank.rank, rank.world).unwrap();
    let (before, mapped) = (calm(), context.mapped().0);
    let span = group.alloc(8192).unwrap();
    group.barrier().wait().unwrap();
    drop(group.memory_of_peer(1 - rank.rank, 1, soon()).unwrap());
    group.barrier().wait().unwrap();
    assert_eq!(context.mapped().0, mapped + 1);
    drop(span);
    let handle = group.clone();
    group.close().unwrap();
    settles(|| context.mapped().0, mapped);
    // What the group itself has may be gone too.
    settles(|| usage().0 <= before.0 && usage().1 <= before.1, true);
    drop(handle);
}

/// An owner that is stopped, goes on, closes the group, and another one that is killed.
#[test]
fn owners_that_do_not_answer() {
    if let Some(rank) = Rank::of_this_process() {
        let mut group = Some(rank.group());
        let spans: Vec<Span> = (0..2).map(|_| group.as_ref().unwrap().alloc(64).unwrap()).collect();
        group.as_ref().unwrap().barrier().wait().unwrap();
        say("ready");
        match rank.rank {
            0 => {
                let ask = |place, id, wait| {
                    let group = group.as_ref().unwrap();
                    let deadline = Deadline::after(Duration::from_secs(wait));
                    say(&outcome(&group.memory_of_peer(place, id, deadline)));
                };
                let hear = || std::io::stdin().read_line(&mut String::new()).unwrap();
                hear();
                ask(1, 1, 1);
                hear();
                ask(1, 1, 60);
                hear();
                while !outcome(&group.as_ref().unwrap().memory_of_peer(1, 2, soon())).starts_with("Left 1") {}
                ask(1, 2, 60);
                hear();
                ask(2, 1, 60);
            }
            1 => {
                await_parent();
                group.take();
                say("closed");
                std::thread::sleep(LONG);
            }
            _ => await_parent(),
        }
        drop(spans);
        return;
    }
    use std::io::Write;
    let Ranks { mut ranks, server: _server } = Ranks::start("owners_that_do_not_answer", 3);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    let (pid, dying) = (ranks[1].pid(), ranks[2].pid());
    let mut go = ranks[0].child.stdin.take().unwrap();
    ranks[1].signal(Signal::STOP);
    writeln!(go).unwrap();
    let heard = ranks[0].hear();
    println!("{heard}");
    assert!(
        heard.starts_with("TimedOut | ") && heard.contains(&format!("pid {pid}): it does not answer")),
        "{heard}"
    );
    ranks[1].signal(Signal::CONT);
    writeln!(go).unwrap();
    assert_eq!(ranks[0].hear(), "ok");
    ranks[1].let_go();
    assert_eq!(ranks[1].hear(), "closed");
    writeln!(go).unwrap();
    let heard = ranks[0].hear();
    println!("{heard}");
    assert!(heard.starts_with("Left 1 | ") && heard.contains("closed the group"), "{heard}");
    ranks[2].kill();
    writeln!(go).unwrap();
    let heard = ranks[0].hear();
    println!("{heard}");
    assert!(heard.starts_with("Died 2 | ") && heard.contains(&format!("pid {dying})")), "{heard}");
    drop(go);
    ranks.remove(0).expect_success();
}

/// Kills at any moment of a request: the one who asks gets an answer or hears of the death.
#[test]
fn an_owner_killed_while_it_is_asked() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let _span = group.alloc(1 << 16).unwrap();
        group.barrier().wait().unwrap();
        say("ready");
        if rank.rank == 1 {
            return await_parent();
        }
        loop {
            // Another number each time, so that nothing is cached: a death is heard of in the middle.
            match group.memory_of_peer(1, 2, soon()) {
                Err(error) if describe(&error).starts_with("Misbehaved 1") => {}
                other => return say(&outcome(&other)),
            }
        }
    }
    for round in 0..8 {
        let Ranks { mut ranks, server: _server } = Ranks::start("an_owner_killed_while_it_is_asked", 2);
        assert_eq!(ranks[1].hear(), "ready");
        assert_eq!(ranks[0].hear(), "ready");
        std::thread::sleep(Duration::from_micros(337 * round));
        ranks[1].kill();
        let heard = ranks[0].hear();
        assert!(heard.starts_with("Died 1 | "), "{heard}");
        ranks.remove(0).expect_success();
    }
}

/// Forked children can neither allocate nor map, and do not disturb what the parent shares.
#[test]
fn forked_children() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let mut span = Some(group.alloc(64).unwrap());
        group.barrier().wait().unwrap();
        // SAFETY: the child runs calls that return at once, and leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            span.take();
            group.sweep_memory();
            let refused = |text: String| text.starts_with("Misuse | ") && text.contains("parent process");
            let alloc = refused(outcome(&group.alloc(64)));
            let map = refused(outcome(&group.memory_of_peer(1 - rank.rank, 1, soon())));
            // SAFETY: ends the child without the parent's exit handlers.
            unsafe { libc::_exit(if alloc && map { 0 } else { 1 }) }
        }
        let mut status = 0;
        // SAFETY: `status` is a valid place for the result.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        group.barrier().wait().unwrap();
        group.memory_of_peer(1 - rank.rank, 1, soon()).unwrap().write(0, &[3]).unwrap();
        group.barrier().wait().unwrap();
        assert_eq!(byte_at(span.as_ref().unwrap(), 0), 3);
        return;
    }
    for rank in Ranks::start("forked_children", 2).ranks {
        rank.expect_success();
    }
}

fn crosswise(rank: &Rank) {
    let group = rank.group();
    let span = group.alloc(4096).unwrap();
    group.barrier().wait().unwrap();
    for peer in 0..rank.world {
        let there = group.memory_of_peer(peer, 1, soon()).unwrap();
        there.write(rank.rank, &[50]).unwrap();
    }
    group.barrier().wait().unwrap();
    assert!((0..rank.world).all(|peer| byte_at(&span, peer) == 50));
}

/// Starts ranks behind `wrapper`, if that is permitted.
fn behind(test: &str, wrapper: &[&str], vars: &[(&str, &str)]) {
    let mut probe = std::process::Command::new(wrapper[0]);
    if !probe.args(&wrapper[1..]).arg("true").output().is_ok_and(|output| output.status.success()) {
        return ranks::skip(&format!("{wrapper:?} is not permitted"));
    }
    let ranks = Ranks::start_with(test, 3, |rank, command| {
        let mut wrapped = if rank == 1 {
            command
        } else {
            let mut wrapped = std::process::Command::new(wrapper[0]);
            wrapped.args(&wrapper[1..]).arg(command.get_program()).args(command.get_args());
            wrapped.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
            wrapped
        };
        wrapped.envs(vars.iter().copied());
        wrapped
    });
    for rank in ranks.ranks {
        rank.expect_success();
    }
}

#[test]
fn in_other_pid_namespaces() {
    if let Some(rank) = Rank::of_this_process() {
        return crosswise(&rank);
    }
    let wrapper = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    behind("in_other_pid_namespaces", &wrapper, &[]);
}

#[test]
fn in_other_network_namespaces_with_a_socket_directory() {
    if let Some(rank) = Rank::of_this_process() {
        return crosswise(&rank);
    }
    let id = tensorwire::device::Id::random().unwrap();
    let dir = std::env::temp_dir().join(format!("tensorwire-memory-{id}"));
    std::fs::create_dir(&dir).unwrap();
    let file = dir.join("store");
    let vars = [(ranks::FILE, file.to_str().unwrap()), ("TENSORWIRE_SOCKET_DIR", dir.to_str().unwrap())];
    behind("in_other_network_namespaces_with_a_socket_directory", &["unshare", "--net"], &vars);
    std::fs::remove_dir_all(&dir).unwrap();
}

/// Groups do not meet: memory has one number in all of them, and each lends what was used in it only.
#[test]
fn groups_are_separate() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    on_threads(2, |rank| {
        let context = context();
        let [one, two] = ["one", "two"].map(|name| {
            let builder = Group::builder().context(&context).timeout(LONG).name(name);
            builder.from_store(store.clone(), rank, 2).unwrap()
        });
        let span = one.alloc(64).unwrap();
        assert_eq!(one.memory_number(&span), Some((1, 0)));
        one.barrier().wait().unwrap();
        one.memory_of_peer(1 - rank, 1, soon()).unwrap();
        two.memory_of_peer(1 - rank, 1, soon()).unwrap_err();
        two.barrier().wait().unwrap();
        let other = two.alloc(64).unwrap();
        assert_eq!(two.memory_number(&other), Some((2, 0)));
        two.barrier().wait().unwrap();
        two.memory_of_peer(1 - rank, 2, soon()).unwrap();
        two.memory_of_peer(1 - rank, 1, soon()).unwrap_err();
        one.memory_of_peer(1 - rank, 2, soon()).unwrap_err();
        two.barrier().wait().unwrap();
        assert_eq!(two.memory_number(&span), Some((1, 0)));
        two.barrier().wait().unwrap();
        two.memory_of_peer(1 - rank, 1, soon()).unwrap();
        two.barrier().wait().unwrap();
    });
}

fn all_reduce_direct(group: &Group, span: &Span) {
    let tensor = Tensor::flat(span.clone(), Dtype::I32).unwrap();
    tensor.write(&vec![1i32; tensor.len()]).unwrap();
    group.all_reduce(&tensor, ReduceOp::Sum).via(Path::Direct).wait().unwrap();
    let mut sums = vec![0i32; tensor.len()];
    tensor.read(&mut sums).unwrap();
    assert!(sums.iter().all(|&sum| sum == group.world() as i32));
}

// Memory of one group, or of the context, in another group and in a part of it; when it is gone, nobody has it mapped, also
// where a group that knew of it is not used any more.
on_ranks!(memory_is_known_in_all_groups, 3, |group| {
    let context = group.context().clone();
    let mapped = || context.mapped().0;
    let builder = Group::builder().context(&context).timeout(LONG).name("second");
    let second = builder.from_store(group.store().clone(), group.rank(), 3).unwrap();
    let part = group.subgroup(&[2, 1, 0]).unwrap();
    second.barrier().wait().unwrap();
    part.barrier().wait().unwrap();
    let before = mapped();
    let spans = [group.alloc(4096).unwrap(), context.alloc(1 << 20).unwrap()];
    for group in [group, &second, &part] {
        for span in &spans {
            all_reduce_direct(group, span);
            // A part of it, at another place.
            all_reduce_direct(group, &span.slice(1024..4096).unwrap());
        }
    }
    // Mapped once, however many groups use it.
    assert_eq!(mapped(), before + 4);
    group.barrier().wait().unwrap();
    drop(spans);
    for _ in 0..3 {
        second.sweep_memory();
    }
    second.barrier().wait().unwrap();
    second.sweep_memory();
    assert_eq!(mapped(), before);
    // What a peer has lent is not lent on.
    let own = context.alloc(64).unwrap();
    let (number, _) = group.memory_number(&own).unwrap();
    group.barrier().wait().unwrap();
    let theirs = group.memory_of_peer((group.rank() + 1) % 3, number, soon()).unwrap();
    assert_eq!(second.memory_number(&theirs), None);
    group.barrier().wait().unwrap();
});

/// What an operation pays for the look-up and the sweep; printed, not judged.
#[test]
fn costs() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    on_threads(2, |rank| {
        let group =
            Group::builder().context(&context()).timeout(LONG).from_store(store.clone(), rank, 2).unwrap();
        let mut spans = Vec::new();
        for regions in [0, 4, 100] {
            while spans.len() < regions {
                spans.push(group.alloc(64).unwrap());
            }
            let span = spans.last().cloned();
            let span = span.unwrap_or_else(|| Span::whole(tensorwire::device::host::private(64).unwrap()));
            group.barrier().wait().unwrap();
            if rank == 0 && regions > 0 {
                group.memory_of_peer(1, 1, soon()).unwrap();
            }
            group.barrier().wait().unwrap();
            if rank == 0 {
                let time = |what: &str, call: &dyn Fn()| {
                    let start = Instant::now();
                    (0..100_000).for_each(|_| call());
                    println!("{regions} regions: {what} {:.1} ns", start.elapsed().as_nanos() as f64 / 1e5);
                };
                time("find", &|| _ = std::hint::black_box(group.memory_number(&span)));
                time("sweep", &|| group.sweep_memory());
                if regions > 0 {
                    time("peer", &|| _ = std::hint::black_box(group.memory_of_peer(1, 1, soon())));
                    let start = Instant::now();
                    group.memory_of_peer(1, regions as u64, soon()).unwrap();
                    println!("{regions} regions: first mapping {:?}", start.elapsed());
                }
            }
            group.barrier().wait().unwrap();
        }
    });
}
