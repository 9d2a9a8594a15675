//! Ranks that are killed or stopped at every numbered step of every operation: the others hear of it, nobody hangs, and
//! nothing is left behind.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::exit)]

mod ranks;

use std::io::{BufRead, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use ranks::{LONG, Process, Rank, Ranks, await_parent, context, describe, on_threads, outcome, say};
use rustix::process::{Signal, getpid, kill_process};
use tensorwire::collective::{Path, hooks};
use tensorwire::device::host;
use tensorwire::store::{Store, TcpServer, TcpStore};
use tensorwire::{Deadline, Dtype, Group, ReduceOp, Result, Span, Sparse, Tensor};

const SUM: ReduceOp = ReduceOp::Sum;
/// The rank that dies, of three.
const VICTIM: usize = 2;

fn ints(count: usize) -> Tensor {
    Tensor::flat(Span::whole(host::private(count * 4).unwrap()), Dtype::I32).unwrap()
}

fn shared(group: &Group, count: usize) -> Tensor {
    Tensor::flat(group.alloc(count * 4).unwrap(), Dtype::I32).unwrap()
}

/// Keys that are on all ranks, on some, and on one.
fn sparse(group: &Group, count: usize) -> Sparse {
    let keys: Vec<i64> = (0..count as i64).map(|index| index * (group.rank() as i64 + 1)).collect();
    Sparse::new(Tensor::private(&keys).unwrap(), ints(count), &[3 * count as u64]).unwrap()
}

fn list(count: usize, here: bool) -> Vec<Tensor> {
    if here { (0..3).map(|_| ints(count)).collect() } else { Vec::new() }
}

type Run = Box<dyn Fn(&Group) -> Result<()> + Send + Sync>;

/// Every collective through every path; staged ones in several rounds.
fn cases() -> Vec<(String, Run)> {
    let mut cases: Vec<(String, Run)> = Vec::new();
    let mut add = |name: String, run: Run| cases.push((name, run));
    for (path, count, exchanged) in
        [(Path::Inline, 2, 2), (Path::OneShot, 500, 500), (Path::Staged, 150_000, 70_000)]
    {
        add(
            format!("all_reduce {path}"),
            Box::new(move |g| g.all_reduce(&ints(count), SUM).via(path).wait()),
        );
        add(
            format!("all_gather {path}"),
            Box::new(move |g| g.all_gather_into(&ints(3 * exchanged), &ints(exchanged)).via(path).wait()),
        );
        add(
            format!("reduce_scatter {path}"),
            Box::new(move |g| {
                g.reduce_scatter_from(&ints(exchanged), &ints(3 * exchanged), SUM).via(path).wait()
            }),
        );
        add(
            format!("all_to_all {path}"),
            Box::new(move |g| g.all_to_all_into(&ints(3 * exchanged), &ints(3 * exchanged)).via(path).wait()),
        );
        for root in [0, VICTIM] {
            add(
                format!("reduce to {root} {path}"),
                Box::new(move |g| g.reduce(&ints(count), SUM, root).via(path).wait()),
            );
            add(
                format!("broadcast from {root} {path}"),
                Box::new(move |g| g.broadcast(&ints(exchanged), root).via(path).wait()),
            );
            add(
                format!("gather to {root} {path}"),
                Box::new(move |g| {
                    g.gather(&list(exchanged, g.rank() == root), &ints(exchanged), root).via(path).wait()
                }),
            );
            add(
                format!("scatter from {root} {path}"),
                Box::new(move |g| {
                    g.scatter(&ints(exchanged), &list(exchanged, g.rank() == root), root).via(path).wait()
                }),
            );
        }
    }
    add("uneven all_to_all".into(), Box::new(|g| g.all_to_all(&list(9, true), &list(9, true)).wait()));
    add("barrier".into(), Box::new(|g| g.barrier().wait()));
    add(
        "all_reduce_sparse by key".into(),
        Box::new(|g| g.all_reduce_sparse(&sparse(g, 4000), SUM).dense(false).wait().map(drop)),
    );
    add(
        "all_reduce_sparse dense".into(),
        Box::new(|g| g.all_reduce_sparse(&sparse(g, 500), SUM).dense(true).wait().map(drop)),
    );
    add("symmetric".into(), Box::new(|g| g.symmetric(&g.alloc(5000)?).wait().map(drop)));
    add("all_gather_fds".into(), Box::new(|g| g.all_gather_fds(std::io::stderr()).wait().map(drop)));
    for root in [0, VICTIM] {
        add(
            format!("broadcast_fds from {root}"),
            Box::new(move |g| {
                let (out, err) = (std::io::stdout(), std::io::stderr());
                g.broadcast_fds(&[out.as_fd(), err.as_fd()], root).wait().map(drop)
            }),
        );
    }
    add(
        "all_reduce direct".into(),
        Box::new(|g| g.all_reduce(&shared(g, 5000), SUM).via(Path::Direct).wait()),
    );
    add(
        "broadcast direct".into(),
        Box::new(|g| g.broadcast(&shared(g, 5000), VICTIM).via(Path::Direct).wait()),
    );
    add(
        "all_gather direct".into(),
        Box::new(|g| g.all_gather_into(&ints(15000), &shared(g, 5000)).via(Path::Direct).wait()),
    );
    cases
}

/// Counts the points that a rank passes, and does something at one of them.
fn at_point(place: usize, number: usize, act: impl Fn() + Send + Sync + 'static) -> Arc<AtomicUsize> {
    let passed = Arc::new(AtomicUsize::new(0));
    let count = passed.clone();
    hooks::set(move |point| {
        if point.place == place && count.fetch_add(1, Ordering::SeqCst) == number {
            act();
        }
    });
    passed
}

fn now() -> u128 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos()
}

fn die() {
    say(&now().to_string());
    kill_process(getpid(), Signal::KILL).unwrap();
    std::thread::sleep(LONG);
}

/// A process that is told what to do when it is needed: it takes part in a group as the rank that dies.
fn victim(rank: &Rank) {
    let mut line = String::new();
    if std::io::stdin().lock().read_line(&mut line).unwrap() == 0 {
        return;
    }
    let words: Vec<usize> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
    let group = form(rank.store.clone(), &ranks::context(), words[0], VICTIM);
    group.barrier().wait().unwrap();
    at_point(VICTIM, words[2], die);
    let end = cases()[words[1]].1(&group);
    panic!("it should have died: {end:?}");
}

fn form(store: Arc<dyn Store>, context: &Arc<tensorwire::Context>, kill: usize, rank: usize) -> Group {
    let builder = Group::builder().context(context).timeout(LONG).name(format!("kill {kill}"));
    builder.from_store(store, rank, 3).unwrap()
}

fn entries(path: &str) -> usize {
    std::fs::read_dir(path).unwrap().count()
}

/// Descriptors, pieces of our memory that are mapped, and threads of this process.
fn usage() -> (usize, usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ours = maps.lines().filter(|line| line.contains("memfd:")).count();
    (entries("/proc/self/fd"), ours, entries("/proc/self/task"))
}

/// What is in use is no more than before, once everything has calmed down.
fn nothing_is_left(before: (usize, usize, usize)) {
    let end = Instant::now() + LONG;
    loop {
        let now = usage();
        if now.0 <= before.0 && now.1 <= before.1 && now.2 <= before.2 {
            return;
        }
        assert!(Instant::now() < end, "before: {before:?} descriptors, mappings, threads; now: {now:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Tests that count what this process uses, or set hooks, take turns.
static TURN: Mutex<()> = Mutex::new(());

/// Kills a rank at every point of the cases whose number is `of` modulo `parts`.
fn kill_everywhere(test: &str, of: usize, parts: usize) {
    if let Some(rank) = Rank::of_this_process() {
        return victim(&rank);
    }
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let server = TcpServer::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr();
    let store = || Arc::new(TcpStore::connect("127.0.0.1", address.port(), LONG).unwrap()) as Arc<dyn Store>;
    let before = usage();
    // A dry run says how many points there are.
    let cases = cases();
    let passed = at_point(VICTIM, usize::MAX, || {});
    let points: Vec<Vec<usize>> = on_threads(3, |rank| {
        let group = form(store(), &context(), 0, rank);
        let points = cases.iter().map(|(_, run)| {
            group.barrier().wait().unwrap();
            let start = passed.load(Ordering::SeqCst);
            run(&group).unwrap();
            let points = passed.load(Ordering::SeqCst) - start;
            group.barrier().wait().unwrap();
            points
        });
        points.collect()
    });
    hooks::clear();
    let chosen = |index: &usize| index % parts == of;
    let kills: Vec<(usize, usize)> = (0..cases.len())
        .filter(chosen)
        .flat_map(|case| (0..points[VICTIM][case]).map(move |point| (case, point)))
        .collect();
    let start = |_: usize| Process::start(test, VICTIM, 3, &server, |_, command| command);
    let mut waiting: std::collections::VecDeque<Process> = (0..3).map(start).collect();
    let mut times = Vec::new();
    let contexts = [context(), context()];
    let stores = [store(), store()];
    for (number, &(case, point)) in kills.iter().enumerate() {
        let mut victim = waiting.pop_front().unwrap();
        if number + 3 < kills.len() {
            waiting.push_back(start(number));
        }
        let (name, run) = &cases[case];
        writeln!(victim.child.stdin.as_mut().unwrap(), "{} {case} {point}", number + 1).unwrap();
        let heard = on_threads(2, |rank| {
            let group = form(stores[rank].clone(), &contexts[rank], number + 1, rank);
            group.barrier().wait().unwrap();
            let first = run(&group);
            let error = first.and_then(|()| group.barrier().wait()).unwrap_err();
            let at = now();
            (describe(&error), at)
        });
        let died: u128 = victim.hear().parse().unwrap();
        for (rank, (text, at)) in heard.into_iter().enumerate() {
            let wanted = format!("Died {VICTIM} | rank {VICTIM} (host ");
            assert!(text.starts_with(&wanted), "{name}, killed at point {point}; rank {rank}: {text}");
            assert!(text.contains(&format!("pid {})", victim.pid())), "{text}");
            times.push(Duration::from_nanos(at.saturating_sub(died) as u64));
        }
        assert!(!victim.finish().success());
    }
    drop((waiting, contexts, stores));
    times.sort_unstable();
    let (middle, longest) = (times[times.len() / 2], times[times.len() - 1]);
    println!(
        "{test}: {} kills; from a kill to an error: median {middle:?}, longest {longest:?}",
        kills.len()
    );
    drop(server);
    nothing_is_left((before.0, before.1, before.2));
}

#[test]
fn killed_at_every_step_1() {
    kill_everywhere("killed_at_every_step_1", 0, 3);
}

#[test]
fn killed_at_every_step_2() {
    kill_everywhere("killed_at_every_step_2", 1, 3);
}

#[test]
fn killed_at_every_step_3() {
    kill_everywhere("killed_at_every_step_3", 2, 3);
}

/// In the middle of something large, in private memory and in the group's own.
#[test]
fn killed_in_a_large_operation() {
    let large = 256 << 18;
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        for direct in [false, true] {
            let data = if direct { shared(&group, large) } else { ints(large) };
            group.barrier().wait().unwrap();
            if rank.rank == 1 && direct == std::env::var_os("DIRECT").is_some() {
                at_point(1, if direct { 3 } else { 700 }, die);
            }
            if let Err(error) = group.all_reduce(&data, SUM).wait() {
                say(&format!("{} {}", now(), describe(&error)));
                await_parent();
                return;
            }
        }
        panic!("nobody died");
    }
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for direct in [false, true] {
        let Ranks { mut ranks, server: _server } =
            Ranks::start_with("killed_in_a_large_operation", 3, |_, mut command| {
                if direct {
                    command.env("DIRECT", "1");
                }
                command
            });
        let died: u128 = ranks[1].hear().parse().unwrap();
        for rank in [0, 2] {
            let text = ranks[rank].hear();
            let (at, text) = text.split_once(' ').unwrap();
            let time = Duration::from_nanos(at.parse::<u128>().unwrap().saturating_sub(died) as u64);
            println!("direct: {direct}; rank {rank} heard {time:?} after the kill: {text}");
            assert!(text.starts_with("Died 1 | "), "{text}");
        }
        ranks.remove(1);
        ranks.into_iter().for_each(Process::expect_success);
    }
}

/// What ranks of the stop tests do: `number` is the point at which rank 1 stops itself.
fn stop_body(rank: &Rank, direct: bool) {
    let number: usize = std::env::var("POINT").unwrap().parse().unwrap();
    let group = rank.group();
    let data = if direct { shared(&group, 5000) } else { ints(150_000) };
    group.barrier().wait().unwrap();
    let stopped = at_point(1, if rank.rank == 1 { number } else { usize::MAX }, || {
        say("stops");
        kill_process(getpid(), Signal::STOP).unwrap();
        // A thread may go on for a moment after it has stopped its process.
        std::thread::sleep(Duration::from_millis(50));
    });
    let start = Instant::now();
    let path = if direct { Path::Direct } else { Path::Staged };
    let time = if rank.rank == 1 { LONG } else { Duration::from_millis(300) };
    let end = group.all_reduce(&data, SUM).via(path).deadline(Deadline::after(time)).wait();
    let took = start.elapsed();
    // From here on the memory is this rank's alone.
    let mark = vec![rank.rank as u8 + 1; data.byte_len()];
    data.span().write(0, &mark).unwrap();
    say(&format!("{} {}", took.as_millis(), outcome(&end)));
    if rank.rank == 1 {
        say(&format!("passed {}", stopped.load(Ordering::SeqCst)));
        say(&outcome(&group.barrier().deadline(Deadline::after(Duration::from_millis(500))).wait()));
    }
    await_parent();
    assert!(data.span().to_vec().unwrap() == mark, "somebody wrote here after the end");
    say("untouched");
}

/// Waits until a process has stopped; it may have said so too early.
fn await_stop(pid: u32) {
    let end = Instant::now() + LONG;
    let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    while !state().contains(") T ") {
        assert!(Instant::now() < end, "{}", state());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn stop_everywhere(test: &str, points: impl Iterator<Item = usize>) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut broken = 0;
    for point in points {
        let Ranks { mut ranks, server: _server } = Ranks::start_with(test, 3, |_, mut command| {
            command.env("POINT", point.to_string());
            command
        });
        let pid = ranks[1].pid();
        let heard: Vec<String> = [0, 2].map(|rank| ranks[rank].hear()).into();
        let mut theirs = ranks[1].hear();
        let stops = theirs == "stops";
        if stops {
            await_stop(pid);
            ranks[1].signal(Signal::CONT);
            theirs = ranks[1].hear();
        }
        let passed = ranks[1].hear();
        let next = ranks[1].hear();
        println!("{test}: stopped at {point}: others {heard:?}; rank 1: {theirs}; {passed}; then {next}");
        if !stops {
            // There is no such point.
            ranks.clear();
            break;
        }
        for text in &heard {
            let (took, text) = text.split_once(' ').unwrap();
            // Whoever did not need rank 1 any more has its result.
            if text == "ok" {
                continue;
            }
            broken += 1;
            assert!(text.starts_with("Stuck 1 | rank 1 (host "), "{text}");
            assert!(text.contains(&format!("pid {pid})")) && text.contains("shrink()"), "{text}");
            let took: u64 = took.parse().unwrap();
            assert!(took >= 300, "{took} ms");
            assert!(!theirs.contains(" ok") && next.starts_with("Stuck 1 | "), "{theirs}; {next}");
        }
        for rank in &mut ranks {
            rank.let_go();
            assert_eq!(rank.hear(), "untouched", "rank {}", rank.rank);
        }
        ranks.into_iter().for_each(Process::expect_success);
    }
    assert!(broken > 0);
}

#[test]
fn stopped_in_an_operation() {
    if let Some(rank) = Rank::of_this_process() {
        return stop_body(&rank, false);
    }
    stop_everywhere("stopped_in_an_operation", [0, 2, 3, 7, 11].into_iter());
}

#[test]
fn stopped_in_a_direct_operation() {
    if let Some(rank) = Rank::of_this_process() {
        return stop_body(&rank, true);
    }
    stop_everywhere("stopped_in_a_direct_operation", 0..20);
}
