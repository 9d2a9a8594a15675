//! `tensorwire status`, on real jobs. The ranks are this test binary, started again.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::exit)]

#[path = "../../tensorwire/tests/ranks/mod.rs"]
mod ranks;
mod tool;

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ranks::{LONG, Process, Rank, Ranks, await_parent, say};
use rustix::process::{DumpableBehavior, Signal, geteuid, set_dumpable_behavior};
use tensorwire::device::threads::{Settings, hook, install, uuid};
use tensorwire::pipe::{Listener, Message, Pipe};
use tensorwire::{Deadline, DeviceId, Dtype, ReduceOp, Span, Tensor};
use tool::{Ended, eventually, finished, tensorwire};

fn tensor(count: usize) -> Tensor {
    let span = Span::whole(tensorwire::device::host::private(4 * count).unwrap());
    Tensor::flat(span, Dtype::F32).unwrap()
}

/// Two operations of all ranks, and a third to which the last rank comes only when it is let go.
fn body(rank: &Rank) {
    let group = rank.group();
    group.broadcast(&tensor(10), 0).wait().unwrap();
    group.all_reduce(&tensor(1 << 20), ReduceOp::Sum).wait().unwrap();
    say("ready");
    if rank.rank + 1 == rank.world {
        await_parent();
    }
    group.all_gather_into(&tensor(10 * rank.world), &tensor(10)).wait().unwrap();
}

fn status(pid: u32, more: &[&str]) -> Ended {
    finished(&[&["status", &pid.to_string()], more].concat())
}

fn all_end(mut ranks: Vec<Process>) {
    ranks.iter_mut().for_each(Process::let_go);
    ranks.into_iter().for_each(Process::expect_success);
}

#[test]
fn a_stopped_rank_is_named() {
    if let Some(rank) = Rank::of_this_process() {
        return body(&rank);
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("a_stopped_rank_is_named", 3);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    ranks[2].signal(Signal::STOP);
    for more in [&[][..], &["--sockets-only"]] {
        let pid = ranks[2].pid();
        eventually("both wait", || status(pid, more).out.contains("ranks 0 and 1 wait in all_gather #3"));
        let ended = status(pid, more);
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
        let one_line = ended.out.split_whitespace().collect::<Vec<_>>().join(" ");
        let wanted = format!("pid {pid}), which is stopped (SIGSTOP) after all_reduce #2, done ");
        assert!(one_line.contains(&wanted), "{}", ended.out);
        assert!(one_line.contains("group \"world\": 3 ranks on host "), "{}", ended.out);
        assert!(one_line.contains(&format!("2 {pid} stopped after all_reduce #2")), "{}", ended.out);
        assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
        assert!(!ended.out.contains('\x1b'));
        println!("{}", ended.out);
    }
    let ended = status(ranks[0].pid(), &["--last", "2"]);
    let (_, last) = ended.out.split_once("last 2 operations of rank 0\n").unwrap();
    let lines: Vec<&str> = last.lines().collect();
    let [_, reduce, gather, why @ ..] = &lines[..] else { panic!("{}", ended.out) };
    let wanted = "all_reduce #2  1,048,576 float32, 4 MiB  SUM  staged";
    assert!(reduce.starts_with(wanted), "{reduce}");
    assert!(gather.starts_with("all_gather #3  30 float32, 120 B "), "{gather}");
    assert!(gather.starts_with("all_gather #3") && gather.contains("running"), "{gather}");
    let wanted = "not direct: 1 of these, the last is all_reduce #2: its tensor is not in memory of alloc()";
    assert!(why.join(" ").starts_with(wanted), "{why:?}");
    assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
    ranks[2].signal(Signal::CONT);
    all_end(ranks);
}

#[test]
fn json_has_one_line_for_each_rank() {
    if let Some(rank) = Rank::of_this_process() {
        return body(&rank);
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("json_has_one_line_for_each_rank", 3);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    let pid = ranks[1].pid();
    eventually("two wait", || status(pid, &[]).out.contains("ranks 0 and 1 wait"));
    let ended = status(pid, &["--json", "--last", "3"]);
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
    let lines: Vec<serde_json::Value> =
        ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    for (index, line) in lines.iter().enumerate() {
        assert_eq!((line["group"].as_str(), line["world"].as_u64()), (Some("world"), Some(3)));
        assert_eq!(line["rank"].as_u64(), Some(index as u64));
        assert_eq!(line["pid"].as_u64(), Some(ranks[index].pid().into()));
        assert!(line["failure"].is_null() && line["summary"].as_array().unwrap().len() == 1);
    }
    assert_eq!((lines[0]["state"].as_str(), lines[2]["state"].as_str()), (Some("in"), Some("idle")));
    assert_eq!(lines[0]["waits_for"], serde_json::json!([2]));
    let operation = &lines[0]["operation"];
    assert_eq!((operation["kind"].as_str(), operation["number"].as_u64()), (Some("all_gather"), Some(3)));
    assert_eq!((operation["state"].as_str(), operation["bytes"].as_u64()), (Some("running"), Some(120)));
    assert_eq!((operation["elements"].as_u64(), operation["dtype"].as_str()), (Some(30), Some("float32")));
    let stacks = format!("eu-stack -p {}", ranks[2].pid());
    assert_eq!((lines[0]["stacks"].as_str(), lines[2]["stacks"].as_str()), (None, Some(stacks.as_str())));
    assert!(operation["took_us"].is_null() && operation["began_seconds_ago"].as_f64().unwrap() > 0.0);
    let first = &lines[2]["last"][0];
    assert_eq!((first["kind"].as_str(), first["peer"].as_u64()), (Some("broadcast"), Some(0)));
    assert!(first["took_us"].as_f64().unwrap() > 0.0);
    all_end(ranks);
}

/// Ranks that let nobody look into them are asked. Root may look anyway, so it becomes somebody else.
#[test]
fn ranks_that_hide_are_asked() {
    if let Some(rank) = Rank::of_this_process() {
        set_dumpable_behavior(DumpableBehavior::NotDumpable).unwrap();
        return body(&rank);
    }
    const NOBODY_SPECIAL: u32 = 1000;
    let is_root = geteuid().is_root();
    let as_user = |mut command: Command| {
        if is_root {
            command.uid(NOBODY_SPECIAL).gid(NOBODY_SPECIAL);
        }
        command
    };
    if !as_user(tensorwire(&["--version"])).output().is_ok_and(|output| output.status.success()) {
        return ranks::skip("another user cannot start these programs");
    }
    let Ranks { mut ranks, server: _server } =
        Ranks::start_with("ranks_that_hide_are_asked", 2, |_, command| as_user(command));
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    let pid = ranks[1].pid();
    let ask = || Ended::from(as_user(tensorwire(&["status", &pid.to_string()])).output().unwrap());
    eventually("one waits", || ask().out.contains("rank 0 waits in all_gather #3 for rank 1 (host"));
    // The watchers of a stopped rank's neighbours answer for it.
    ranks[1].signal(Signal::STOP);
    let one_line = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" ");
    eventually("it is stopped", || {
        one_line(ask().out).contains("which is stopped (SIGSTOP) after all_reduce #2")
    });
    // Alone and stopped, nobody can tell.
    ranks[0].kill();
    let ended = ask();
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
    assert!(ended.err.contains("does not let us look into it"), "{}", ended.err);
    assert!(ended.err.contains("Permission denied"), "{}", ended.err);
}

#[test]
fn nothing_there_is_1_with_the_reason() {
    if Rank::of_this_process().is_some() {
        say("ready");
        return await_parent();
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("nothing_there_is_1_with_the_reason", 1);
    assert_eq!(ranks[0].hear(), "ready");
    let pid = ranks[0].pid();
    let ended = status(pid, &[]);
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
    assert!(ended.err.starts_with(&format!("error: process {pid} (")), "{}", ended.err);
    assert!(ended.err.contains(") is in no group, and no process runs below it: "), "{}", ended.err);
    let what_to_do = "; tensorwire status without a pid lists the jobs of this user\n";
    assert!(ended.err.ends_with(what_to_do), "{}", ended.err);
    ranks[0].kill();
    let ended = status(pid, &[]);
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
    assert!(ended.err.starts_with(&format!("error: there is no process {pid}; ")), "{}", ended.err);
    assert!(ended.err.ends_with(what_to_do), "{}", ended.err);
}

/// The rank below two shells, as launchers have it.
fn below_shells(_: usize, command: Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", "sh -c '\"$@\"; exit $?' \"$@\"; exit $?", "sh", "sh"]);
    shell.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell
}

#[test]
fn the_pid_of_a_launcher_shows_its_ranks() {
    if let Some(rank) = Rank::of_this_process() {
        say(&std::process::id().to_string());
        return body(&rank);
    }
    let Ranks { mut ranks, server: _server } =
        Ranks::start_with("the_pid_of_a_launcher_shows_its_ranks", 2, below_shells);
    let pids: Vec<u32> = ranks.iter_mut().map(|rank| rank.hear().parse().unwrap()).collect();
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    let (launcher, rank) = (ranks[0].pid(), pids[0]);
    assert_ne!(launcher, rank);
    for more in [&[][..], &["--sockets-only"]] {
        eventually("one waits", || status(launcher, more).out.contains("rank 0 waits in all_gather #3"));
        let ended = status(launcher, more);
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
        assert!(ended.out.starts_with("job "), "{}", ended.out);
        assert!(pids.iter().all(|pid| ended.out.contains(&format!("  {pid}  "))), "{}", ended.out);
        assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
        println!("{}", ended.out);
    }
    // Whoever gives a rank does not have to be told which job that is.
    assert!(status(rank, &[]).out.starts_with("group "));
    // Other tests of this process have ranks below it, too.
    let above = status(std::process::id(), &["--json"]);
    let of_ours = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["pid"] == rank;
    assert!(above.out.lines().any(of_ours), "{}", above.out);
    all_end(ranks);
}

#[test]
fn without_a_pid_jobs_are_listed() {
    if let Some(rank) = Rank::of_this_process() {
        return body(&rank);
    }
    let mut jobs: Vec<Ranks> =
        (1..3).map(|world| Ranks::start("without_a_pid_jobs_are_listed", world)).collect();
    for job in &mut jobs {
        job.ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    }
    let pids = |job: &Ranks| job.ranks.iter().map(Process::pid).collect::<Vec<_>>();
    let (alone, pair) = (pids(&jobs[0]), pids(&jobs[1]));
    eventually("one waits", || status(pair[0], &[]).out.contains("rank 0 waits in all_gather #3"));
    let rests = format!("rank 0 sleeps outside of tensorwire (to see where: eu-stack -p {})", alone[0]);
    eventually("the other one sleeps", || {
        status(alone[0], &[]).out.split_whitespace().collect::<Vec<_>>().join(" ").contains(&rests)
    });
    let ended = finished(&["status", "--json"]);
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
    let lines: Vec<serde_json::Value> =
        ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let line_of = |pids: &[u32]| {
        let found = lines.iter().find(|line| line["pids"] == serde_json::json!(pids));
        found.unwrap_or_else(|| panic!("{pids:?} are no job in {}", ended.out))
    };
    let line = line_of(&pair);
    assert_eq!(line["launcher"].as_u64(), Some(std::process::id().into()), "{line}");
    // The launcher of both would show both.
    assert_eq!(line["job"].as_u64(), Some(pair[0].into()), "{line}");
    assert_eq!(line["does"], "1 rank waits in all_gather #3", "{line}");
    assert!(line["command"].as_str().unwrap().contains("without_a_pid_jobs_are_listed"), "{line}");
    assert_eq!((&line["groups"][0]["name"], &line["groups"][0]["world"]), (&"world".into(), &2.into()));
    assert_eq!(line_of(&alone)["does"], "sleeps after all_reduce #2");
    let ended = finished(&["status"]);
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
    assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
    assert!(ended.out.contains(" jobs of this user\njob "), "{}", ended.out);
    assert!(ended.out.lines().any(|line| line.starts_with(&format!("{} ", pair[0]))), "{}", ended.out);
    println!("{}", ended.out);
    jobs.into_iter().for_each(|job| all_end(job.ranks));
}

#[test]
fn a_rank_that_computes_is_told_from_one_that_sleeps() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        say("ready");
        let parent = std::thread::spawn(await_parent);
        match rank.rank {
            1 => while !parent.is_finished() {},
            2 => parent.join().unwrap(),
            _ => {}
        }
        group.barrier().wait().unwrap();
        return;
    }
    let Ranks { mut ranks, server: _server } =
        Ranks::start("a_rank_that_computes_is_told_from_one_that_sleeps", 3);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    let [pid, computes, sleeps] = [0, 1, 2].map(|rank: usize| ranks[rank].pid());
    let wanted = [
        format!(
            "pid {computes}), which computes outside of tensorwire before its first operation (to see where: eu-stack -p {computes})"
        ),
        format!(
            "pid {sleeps}), which sleeps outside of tensorwire before its first operation (to see where: eu-stack -p {sleeps})"
        ),
    ];
    let mut said = String::new();
    eventually("both are told apart", || {
        said = status(pid, &[]).out.split_whitespace().collect::<Vec<_>>().join(" ");
        wanted.iter().all(|wanted| said.contains(wanted))
    });
    println!("{said}");
    all_end(ranks);
}

#[test]
fn a_killed_rank_is_said_once_the_group_has_failed() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        say("ready");
        let _ = group.barrier().wait();
        std::thread::sleep(LONG);
        return;
    }
    let Ranks { mut ranks, server: _server } =
        Ranks::start("a_killed_rank_is_said_once_the_group_has_failed", 2);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    std::thread::sleep(Duration::from_millis(10));
    ranks[1].kill();
    let pid = ranks[0].pid();
    eventually("it is said", || {
        let out = status(pid, &[]).out.split_whitespace().collect::<Vec<_>>().join(" ");
        out.contains("the group has failed: rank 1 (host") && out.contains("gone")
    });
}

#[test]
fn wrong_usage_is_2() {
    for args in [&["status", "0"][..], &["status", "me"], &["status", "1", "--last", "x"]] {
        let ended = finished(args);
        assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{args:?}");
    }
}

/// What a process lends is seen from outside, whether it is in a group or not.
#[test]
fn leases_are_shown() {
    let context = tensorwire::Context::new(tensorwire::Config::default()).unwrap();
    let span = context.alloc(3 << 20).unwrap();
    let kept = context.grant(&span, &tensorwire::Terms::default()).unwrap();
    drop(context.grant(&span, &tensorwire::Terms::default()).unwrap());
    let pid = std::process::id();
    let ended = status(pid, &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let one_line = ended.out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(one_line.contains("itself 2 (6 MiB) 1 (3 MiB) - nobody"), "{}", ended.out);
    assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
    println!("{}", ended.out);
    let json = status(pid, &["--json"]).out;
    let of_ours = |line: &&str| line.contains(&format!("\"lends\":{pid}"));
    let lines: Vec<serde_json::Value> =
        json.lines().filter(of_ours).map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.iter().any(|line| line["granted"] == 2 && line["waiting_bytes"] == 3 << 20), "{json}");
    drop(kept);
}

/// The last rank's stream is held, and no stream can wait: all hosts wait in their places, in the call.
fn held_body(rank: &Rank) {
    install(Settings { queues: 1, ..Settings::default() }).unwrap();
    let (group, gpu) = (rank.group(), DeviceId::Gpu(uuid(0)));
    let region = group.context().pool(&gpu).unwrap().alloc(4096).unwrap();
    let tensor = Tensor::flat(Span::whole(region).slice(0..4096).unwrap(), Dtype::F32).unwrap();
    let mut queue = group.context().device(&gpu).unwrap().queue().unwrap();
    let held = Arc::new(AtomicBool::new(rank.rank + 1 == rank.world));
    let holds = held.clone();
    hook::set(move |_| {
        while holds.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    std::thread::spawn(move || {
        await_parent();
        held.store(false, Ordering::Release);
    });
    say("ready");
    group.all_reduce(&tensor, ReduceOp::Sum).on(&mut *queue).unwrap().wait().unwrap();
}

#[test]
fn hosts_that_wait_for_queues_are_shown() {
    if let Some(rank) = Rank::of_this_process() {
        return held_body(&rank);
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("hosts_that_wait_for_queues_are_shown", 3);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    let (pid, late) = (ranks[1].pid(), ranks[2].pid());
    let mut out = String::new();
    eventually("one queue is missing", || {
        out = status(pid, &[]).out;
        let line = out.split_whitespace().collect::<Vec<_>>().join(" ");
        line.contains("the queues of ranks 0 and 1 wait in all_reduce #1 for the queue of rank 2 (host ")
            && line.contains(&format!("pid {late}), which is still in all_reduce #1"))
            && out.matches("all_reduce #1 met ").count() == 3
    });
    println!("{out}");
    assert_eq!(out.matches("all_reduce #1 met ").count(), 3, "{out}");
    let json = status(pid, &["--json"]).out;
    let line: serde_json::Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
    assert_eq!((&line["state"], &line["operation"]["state"]), (&"in".into(), &"met".into()), "{line}");
    assert_eq!(line["waits_for"], serde_json::json!([2]), "{line}");
    all_end(ranks);
}

/// An operation on a GPU that is over, and one that is queued. The stream of the last rank is held before its first command
/// of that, and the stream of rank 0, which works for all, before it reduces. The parent lets each of them go.
fn queued_body(rank: &Rank) {
    install(Settings::default()).unwrap();
    let (group, gpu) = (rank.group(), DeviceId::Gpu(uuid(0)));
    let region = group.context().pool(&gpu).unwrap().alloc(4096).unwrap();
    let tensor = Tensor::flat(Span::whole(region).slice(0..4096).unwrap(), Dtype::F32).unwrap();
    tensor.write(&[1.0f32; 1024]).unwrap();
    let mut queue = group.context().device(&gpu).unwrap().queue().unwrap();
    group.all_reduce(&tensor, ReduceOp::Sum).on(&mut *queue).unwrap().wait().unwrap();
    let held = Arc::new(AtomicBool::new(true));
    let (holds, works, last) = (held.clone(), rank.rank == 0, rank.rank + 1 == rank.world);
    hook::set(move |step| {
        while holds.load(Ordering::Acquire) && (last || works && step.kind == hook::Kind::Reduce) {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let work = group.all_reduce(&tensor, ReduceOp::Sum).on(&mut *queue).unwrap();
    say("ready");
    await_parent();
    held.store(false, Ordering::Release);
    work.wait().unwrap();
}

/// Hosts are idle while their queues wait. The rank whose queue has not come is named, and then the one that works.
#[test]
fn queued_operations_are_shown() {
    if let Some(rank) = Rank::of_this_process() {
        return queued_body(&rank);
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("queued_operations_are_shown", 3);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    let (pid, late) = (ranks[1].pid(), ranks[2].pid());
    let one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    for more in [&["--last", "2"][..], &["--sockets-only"]] {
        let mut out = String::new();
        eventually("one queue is missing", || {
            out = status(pid, more).out;
            one_line(&out)
                .contains("the queues of ranks 0 and 1 wait in all_reduce #2 for the queue of rank 2 (host ")
        });
        println!("{out}");
        let line = one_line(&out);
        assert!(line.contains(&format!("pid {late}), which ")), "{out}");
        assert!(line.contains(" outside of tensorwire after all_reduce #2, queued "), "{out}");
        assert!(line.contains("; other work is before it on that queue"), "{out}");
        assert!(line.contains("all_reduce #2 queued "), "{out}");
        assert!(out.lines().all(|line| line.chars().count() <= 80), "{out}");
        if more == ["--last", "2"] {
            assert!(line.contains("operation tensor op path met queued took ago"), "{out}");
        }
    }
    let json = status(pid, &["--json", "--last", "2"]).out;
    println!("{json}");
    let lines: Vec<serde_json::Value> =
        json.lines().take(3).map(|line| serde_json::from_str(line).unwrap()).collect();
    let line = &lines[1];
    assert_eq!((&line["state"], &line["waits_for"]), (&"idle".into(), &serde_json::json!([2])));
    let queued = &line["queued"][0];
    assert_eq!((&queued["kind"], &queued["number"]), (&"all_reduce".into(), &2.into()), "{queued}");
    assert_eq!((&queued["standing"], &queued["waits_for"]), (&"queued".into(), &serde_json::json!([2])));
    assert!(
        queued["met_us"].as_f64() < queued["queued_us"].as_f64() && queued["took_us"].is_null(),
        "{queued}"
    );
    let over = &line["last"][0];
    assert!(over["met_us"].as_f64().is_some_and(|met| met > 0.0), "{over}");
    assert!(over["queued_us"].as_f64() < over["took_us"].as_f64(), "{over}");
    assert_eq!(lines[2]["waits_for"], serde_json::json!([]));

    ranks[2].let_go();
    let mut out = String::new();
    eventually("all queues have come", || {
        out = status(pid, &[]).out;
        one_line(&out)
            .contains("all_reduce #2 is running on the queue of rank 0, for ranks 0, 1 and 2; it was queued ")
    });
    println!("{out}");
    assert!(out.contains("all_reduce #2 running"), "{out}");
    assert!(one_line(&out).contains("no rank waits for another"), "{out}");
    let json = status(pid, &["--json"]).out;
    let line: serde_json::Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
    assert_eq!(
        (&line["queued"][0]["standing"], &line["queued"][0]["works"]),
        (&"running".into(), &serde_json::json!([0]))
    );
    all_end(ranks);
}

/// A pipe whose reader does not receive, and whose other direction is empty.
#[test]
fn a_pipe_with_messages_that_wait() {
    if let Some(rank) = Rank::of_this_process() {
        return pipe_with_a_slow_reader(&rank);
    }
    for host in [None, Some("elsewhere")] {
        let ranks = Ranks::start_with("a_pipe_with_messages_that_wait", 2, |rank, mut command| {
            host.filter(|_| rank == 1).map(|host| command.env("TENSORWIRE_HOST", host));
            command
        });
        let Ranks { mut ranks, server: _server } = ranks;
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
        let [sender, reader] = [ranks[0].pid(), ranks[1].pid()];
        let shows = |more: &[&str]| {
            let ended = status(sender, more);
            assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
            println!("{}", ended.out);
            ended.out
        };
        let json = || -> Vec<serde_json::Value> {
            shows(&["--json"]).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        };
        let ends = json();
        let own = |ends: &[serde_json::Value]| {
            ends.iter().find(|end| end["pid"] == sender).unwrap()["pipe"].clone()
        };
        let end = own(&ends);
        assert_eq!((end["peer_pid"].as_u64(), end["sent"].as_u64()), (Some(reader.into()), Some(3)));
        assert_eq!(end["sent_bytes"].as_u64(), Some(3 * 4000 + 5));
        let out = shows(&[]);
        assert!(out.starts_with("pipes\n") && !out.contains("group "), "{out}");
        assert!(out.lines().all(|line| line.chars().count() <= 80), "{out}");
        let row = out.lines().find(|line| line.starts_with(&sender.to_string())).unwrap();
        if host.is_some() {
            assert!(
                row.contains(&format!("{reader} on elsewhere ")) && row.contains("  wire      ?"),
                "{out}"
            );
            assert_eq!((end["waiting"].as_u64(), ends.len()), (None, 1));
        } else {
            assert_eq!(end["channels"], serde_json::json!(["share", "ring"]));
            assert_eq!(
                (end["waiting"].as_u64(), end["waiting_bytes"].as_u64()),
                (Some(3), Some(3 * 4000 + 5))
            );
            assert!(end["oldest_seconds"].as_f64().unwrap() > 0.0);
            let asked = shows(&["--sockets-only"]);
            for out in [&out, &asked] {
                let row = |pid: u32| out.lines().find(|line| line.starts_with(&pid.to_string())).unwrap();
                let (here, there) = (row(sender), row(reader));
                assert!(here.contains(&format!("  {reader}  sleeping  ")), "{out}");
                assert!(here.contains("  share, ring  3, 11.7 KiB  "), "{out}");
                assert!(
                    there.contains(&format!("  {sender}  ")) && there.trim_end().ends_with("share, ring  -"),
                    "{out}"
                );
            }
        }
        // It takes one, and then the rest.
        for (left, bytes) in [(2, 8005), (0, 0)] {
            let [_, reading] = &mut ranks[..] else { panic!() };
            writeln!(reading.child.stdin.as_mut().unwrap()).unwrap();
            assert_eq!(reading.hear(), "took");
            if host.is_none() {
                let end = own(&json());
                assert_eq!(
                    (end["waiting"].as_u64(), end["waiting_bytes"].as_u64()),
                    (Some(left), Some(bytes))
                );
                assert_eq!(end["oldest_seconds"].is_null(), left == 0);
            }
        }
        all_end(ranks);
    }
}

fn pipe_with_a_slow_reader(rank: &Rank) {
    let (context, by) = (tensorwire::Context::from_env().unwrap(), Deadline::after(LONG));
    if rank.rank == 0 {
        let listener = Listener::local(&context).unwrap();
        rank.store.set("address", listener.address().as_bytes()).unwrap();
        let pipe = listener.accept(by).unwrap();
        let message = Message::new().with_tensor(&tensor(1000));
        for metadata in [&[][..], &[], &[1; 5]] {
            pipe.send(&message.clone().with_metadata(metadata)).wait().unwrap();
        }
        say("ready");
        await_parent();
    } else {
        let address = String::from_utf8(rank.store.get("address").unwrap()).unwrap();
        let pipe = Pipe::connect(&context, &address, by).unwrap();
        say("ready");
        for count in [1, 2] {
            std::io::stdin().read_line(&mut String::new()).unwrap();
            for _ in 0..count {
                pipe.recv().wait().unwrap().unwrap();
            }
            say("took");
        }
        await_parent();
    }
}
