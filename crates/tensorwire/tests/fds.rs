//! Descriptors between ranks: send_fd, recv_fd, all_gather_fds and broadcast_fds, as threads and as processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

#[path = "lease_peer/limits.rs"]
#[allow(unreachable_pub)]
mod limits;
mod ranks;

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use limits::{fill_descriptors_but, limit};
use ranks::{LONG, Rank, Ranks, await_parent, context_on, describe, on_threads, outcome, say};
use rustix::fs::MemfdFlags;
use rustix::process::{Resource, Signal};
use tensorwire::device::fd::MAX_FDS;
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Config, Context, Deadline, Error, Group, PeerFaultKind, Result, interrupt};

fn soon() -> Deadline {
    Deadline::after(Duration::from_millis(200))
}

/// A file that can be told from all others by its name, with a text.
fn file(name: &str, text: &str) -> File {
    let file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).unwrap());
    rustix::io::write(&file, text.as_bytes()).unwrap();
    file
}

/// What a descriptor that was received leads to. It is closed by exec, and closed here.
fn text(fd: OwnedFd) -> String {
    assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    // All descriptors of a file have one position.
    let mut bytes = [0; 100];
    let len = File::from(fd).read_at(&mut bytes, 0).unwrap();
    String::from_utf8(bytes[..len].to_vec()).unwrap()
}

/// How many descriptors of files with this name the process has open.
fn open(name: &str) -> usize {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let links = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    links.filter(|link| link.to_str().is_some_and(|link| link.contains(&format!("memfd:{name} ")))).count()
}

/// Waits until nobody in this process has files with this name open: the other side says a moment later that it has taken one.
fn nothing_is_left(name: &str) {
    let end = Instant::now() + LONG;
    while open(name) > 0 {
        assert!(Instant::now() < end, "{} descriptors of {name} are left", open(name));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The name of files that belong to one test and one way of running it.
fn name(group: &Group, test: &str) -> String {
    format!("{test}-{}-{}", group.world(), group.members().iter().all(|m| m.pid == group.members()[0].pid))
}

fn all_of(fds: Result<Vec<OwnedFd>>) -> Vec<String> {
    fds.unwrap().into_iter().map(text).collect()
}

fn everybody_gets_everything(group: &Group) {
    let (me, world, name) = (group.rank(), group.world(), name(group, "everything"));
    for turn in 0..3 {
        let own = file(&name, &format!("{turn} of {me}"));
        let wanted: Vec<String> = (0..world).map(|rank| format!("{turn} of {rank}")).collect();
        assert_eq!(all_of(group.all_gather_fds(&own).wait()), wanted);
        for (root, count) in (0..world).zip([1, 0, 3, 7].into_iter().cycle()) {
            let files: Vec<File> = (0..count).map(|index| file(&name, &format!("{root} {index}"))).collect();
            let given: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
            let wanted: Vec<String> = (0..count).map(|index| format!("{root} {index}")).collect();
            assert_eq!(all_of(group.broadcast_fds(&given, root).wait()), wanted);
        }
    }
    // As many as go at once.
    let one = file(&name, "many");
    let many = vec![one.as_fd(); MAX_FDS];
    let got = group.broadcast_fds(if me == world - 1 { &many } else { &[] }, world - 1).wait().unwrap();
    assert_eq!(got.len(), MAX_FDS);
    drop((one, got));
    group.barrier().wait().unwrap();
    nothing_is_left(&name);
    group.barrier().wait().unwrap();
}

on_ranks!(everything_1, 1, everybody_gets_everything);
on_ranks!(everything_2, 2, everybody_gets_everything);
on_ranks!(everything_3, 3, everybody_gets_everything);
on_ranks!(everything_8, 8, everybody_gets_everything);

/// Many in a row to everybody, oneself too, before anybody receives: the order is kept for each sender.
fn messages_keep_their_order(group: &Group) {
    let (me, world, name) = (group.rank(), group.world(), name(group, "order"));
    for turn in 0..10 {
        for to in 0..world {
            group.send_fd(file(&name, &format!("{turn} from {me} to {to}")), to).wait().unwrap();
        }
    }
    for from in (0..world).rev() {
        for turn in 0..10 {
            let got = group.recv_fd(from).deadline(Deadline::after(LONG)).wait().unwrap();
            assert_eq!(text(got), format!("{turn} from {from} to {me}"));
        }
    }
    group.barrier().wait().unwrap();
    nothing_is_left(&name);
    group.barrier().wait().unwrap();
}

on_ranks!(order_1, 1, messages_keep_their_order);
on_ranks!(order_2, 2, messages_keep_their_order);
on_ranks!(order_3, 3, messages_keep_their_order);
on_ranks!(order_8, 8, messages_keep_their_order);

/// The other end of a pipe sees its end: nobody keeps a second descriptor of what was received and closed.
fn a_pipe_ends(group: &Group) {
    if group.rank() == 0 {
        let (mut read, write) = std::io::pipe().unwrap();
        group.send_fd(write, 1).wait().unwrap();
        let mut all = String::new();
        read.read_to_string(&mut all).unwrap();
        assert_eq!(all, "through a pipe");
    } else {
        let write = group.recv_fd(0).wait().unwrap();
        rustix::io::write(&write, b"through a pipe").unwrap();
    }
    group.barrier().wait().unwrap();
}

on_ranks!(pipe, 2, a_pipe_ends);

/// Two threads of a rank receive from the same one, and messages with tags go beside descriptors.
fn several_threads(group: &Group) {
    let (me, name) = (group.rank(), name(group, "threads"));
    let other = 1 - me;
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let name = &name;
            scope.spawn(move || {
                for _ in 0..20 {
                    group.send_fd(file(name, "x"), other).wait().unwrap();
                    assert_eq!(text(group.recv_fd(other).wait().unwrap()), "x");
                    let message = group.tensor(&[thread]).unwrap();
                    group.send(&message, other).tag(thread as u64).wait().unwrap();
                    group.recv(&message, other).tag(thread as u64).wait().unwrap();
                    assert_eq!(message.to_vec::<i32>().unwrap(), [thread]);
                }
            });
        }
    });
    group.barrier().wait().unwrap();
    nothing_is_left(&name);
    group.barrier().wait().unwrap();
}

on_ranks!(threads_of_ranks, 2, several_threads);

fn names(error: &Error, group: &Group, rank: usize) {
    let who = group.members()[rank].to_string();
    assert!(error.to_string().contains(&who) && error.ranks() == [rank], "{error}");
}

/// Whoever does not come is named by the deadline, and the next call works.
fn late_ranks_are_named(group: &Group) {
    let (me, name) = (group.rank(), name(group, "late"));
    if me == 0 {
        let error = group.recv_fd(1).deadline(soon()).wait().unwrap_err();
        assert!(error.is_timeout(), "{error}");
        names(&error, group, 1);
        let told = error.to_string();
        assert!(told.contains("recv_fd from rank 1") && told.contains("was given with the call"), "{told}");
        // A hook of the caller ends it, too.
        let end = Instant::now() + Duration::from_millis(60);
        let look = Rc::new(move || match Instant::now() < end {
            true => Ok(()),
            false => Err(Error::Interrupted("enough".into())),
        });
        let error = interrupt::with_interrupt(look, || group.recv_fd(1).wait().unwrap_err());
        assert!(matches!(error, Error::Interrupted(_)), "{error}");
    }
    group.barrier().wait().unwrap();
    if me == 1 {
        group.send_fd(file(&name, "late"), 0).wait().unwrap();
    } else if me == 0 {
        assert_eq!(text(group.recv_fd(1).wait().unwrap()), "late");
    }
    group.barrier().wait().unwrap();
    for broadcast in [false, true] {
        let own = file(&name, "own");
        let call = || match broadcast {
            true => group.broadcast_fds(&[own.as_fd()], 0),
            false => group.all_gather_fds(&own),
        };
        if me == 1 {
            // All others have given up.
            group.recv(&group.tensor(&[0u8]).unwrap(), 0).wait().unwrap();
            let error = call().wait().unwrap_err();
            assert!(error.is_timeout(), "{error}");
        } else {
            let error = call().deadline(soon()).wait().unwrap_err();
            assert!(error.is_timeout() && error.ranks().contains(&1), "{error}");
            assert!(error.to_string().contains(&group.members()[1].to_string()), "{error}");
            let kind = if broadcast { "broadcast_fds" } else { "all_gather_fds" };
            assert!(error.to_string().contains(kind), "{error}");
            if me == 0 {
                group.send(&group.tensor(&[0u8]).unwrap(), 1).wait().unwrap();
            }
        }
        drop(call().wait().unwrap());
    }
    group.barrier().wait().unwrap();
    nothing_is_left(&name);
    group.barrier().wait().unwrap();
}

on_ranks!(late_2, 2, late_ranks_are_named);
on_ranks!(late_3, 3, late_ranks_are_named);

/// Ranks that call different things hear of it.
fn different_calls(group: &Group) {
    let (me, null) = (group.rank(), File::open("/dev/null").unwrap());
    let error = match me {
        0 => group.all_gather_fds(&null).wait().unwrap_err(),
        _ => group.broadcast_fds(&[null.as_fd()], 1).wait().unwrap_err(),
    };
    let told = error.to_string();
    assert!(matches!(&error, Error::Peer(fault) if fault.kind == PeerFaultKind::Mismatch), "{error}");
    assert!(told.contains("all_gather_fds") && told.contains("broadcast_fds from rank 1"), "{told}");
}

on_ranks!(mismatch, 3, different_calls);

/// What one rank cannot give is an error on all; what has no meaning is refused.
fn refused_calls(group: &Group) {
    let (me, null) = (group.rank(), File::open("/dev/null").unwrap());
    let many = vec![null.as_fd(); MAX_FDS + 1];
    let error = group.broadcast_fds(&many, 1).wait().unwrap_err();
    match me {
        1 => assert!(matches!(&error, Error::Misuse(text) if text.contains("251")), "{error}"),
        _ => assert!(
            describe(&error).starts_with("Failed 1 | ") && error.to_string().contains("251"),
            "{error}"
        ),
    }
    for error in [
        group.broadcast_fds(&[], 9).wait().unwrap_err(),
        group.send_fd(&null, 9).wait().unwrap_err(),
        group.recv_fd(9).wait().unwrap_err(),
        group.send(&group.tensor(&[1u8]).unwrap(), 0).tag(u64::MAX).wait().unwrap_err(),
    ] {
        assert!(matches!(error, Error::Misuse(_)), "{error}");
    }
    assert_eq!(group.all_gather_fds(&null).wait().unwrap().len(), 2);
}

on_ranks!(refusals, 2, refused_calls);

#[test]
fn not_between_hosts() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    on_threads(3, |rank| {
        let builder = Group::builder().context(&context_on(["a", "b", "b"][rank])).timeout(LONG);
        let group = builder.from_store(store.clone(), rank, 3).unwrap();
        let null = File::open("/dev/null").unwrap();
        let far = |error: Error| assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        far(group.all_gather_fds(&null).wait().unwrap_err());
        far(group.broadcast_fds(&[], rank).wait().unwrap_err());
        if rank > 0 {
            far(group.send_fd(&null, 0).wait().unwrap_err());
            far(group.recv_fd(0).wait().unwrap_err());
            group.send_fd(&null, 3 - rank).wait().unwrap();
            group.recv_fd(3 - rank).wait().unwrap();
        }
        group.barrier().wait().unwrap();
    });
}

/// A rank that has closed the group is named, whether it sent before or not; what it sent is closed with the group.
fn closed_ranks_are_named(group: &Group) {
    let name = name(group, "closed");
    if group.rank() == 1 {
        group.send_fd(file(&name, "never taken"), 0).wait().unwrap();
        return group.clone().close().unwrap();
    }
    let end = Instant::now() + LONG;
    let left = |error: &Error| {
        assert!(Instant::now() < end, "{error}");
        matches!(error, Error::Peer(fault) if fault.kind == PeerFaultKind::Left && fault.rank == Some(1))
    };
    // Until it has left, it may be slow to answer.
    while !group.recv_fd(1).deadline(soon()).wait().is_err_and(|error| left(&error)) {}
    while !group.send_fd(file(&name, "for nobody"), 1).wait().is_err_and(|error| left(&error)) {}
    let error = group.all_gather_fds(file(&name, "for nobody")).wait().unwrap_err();
    assert!(left(&error), "{error}");
    nothing_is_left(&name);
}

on_ranks!(closed, 2, closed_ranks_are_named);

/// Kills rank 1 once it has said that it is where the test wants it; gives what rank 0 hears.
fn killed(test: &str, body: impl Fn(&Group, &dyn Fn())) {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        if rank.rank == 1 {
            body(&group, &|| {
                say("ready");
                std::thread::sleep(LONG);
            });
            return;
        }
        // Rank 1 is gone when the parent says so.
        await_parent();
        body(&group, &|| {});
        return;
    }
    let Ranks { mut ranks, server: _server } = Ranks::start(test, 2);
    assert_eq!(ranks[1].hear(), "ready");
    let pid = ranks[1].pid();
    ranks[1].kill();
    ranks[0].let_go();
    let heard = ranks[0].hear();
    println!("{test}: {heard}");
    assert!(heard.starts_with("Died 1 | rank 1 (host ") && heard.contains(&format!("pid {pid})")), "{heard}");
    ranks.remove(0).expect_success();
}

/// Says how a call ended; a process whose end is not seen yet may be slow to answer.
fn tell(call: impl Fn() -> Result<()>) {
    let end = Instant::now() + LONG;
    loop {
        match call() {
            Err(error) if error.is_timeout() && Instant::now() < end => {}
            other => return say(&outcome(&other)),
        }
    }
}

#[test]
fn killed_before_it_sends() {
    killed("killed_before_it_sends", |group, wait| {
        wait();
        tell(|| group.recv_fd(1).deadline(soon()).wait().map(drop));
    });
}

#[test]
fn killed_after_it_has_sent() {
    killed("killed_after_it_has_sent", |group, wait| {
        if group.rank() == 1 {
            group.send_fd(std::io::stderr(), 0).wait().unwrap();
        }
        wait();
        tell(|| group.recv_fd(1).deadline(soon()).wait().map(drop));
    });
}

#[test]
fn killed_before_it_receives() {
    killed("killed_before_it_receives", |group, wait| {
        wait();
        tell(|| {
            group
                .send_fd(std::io::stderr(), 1)
                .wait()
                .and_then(|()| group.all_gather_fds(std::io::stderr()).wait().map(drop))
        });
    });
}

/// A rank that is stopped after it has sent is named by the deadline, and loses nothing.
#[test]
fn stopped_after_it_has_sent() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        if rank.rank == 1 {
            group.send_fd(file("stopped", "later"), 0).wait().unwrap();
            say("sent");
        } else {
            await_parent();
            let error = group.recv_fd(1).deadline(soon()).wait().unwrap_err();
            assert!(error.is_timeout(), "{error}");
            names(&error, &group, 1);
            say(&error.to_string());
            assert_eq!(text(group.recv_fd(1).wait().unwrap()), "later");
        }
        return group.barrier().wait().unwrap();
    }
    let Ranks { mut ranks, server: _server } = Ranks::start("stopped_after_it_has_sent", 2);
    assert_eq!(ranks[1].hear(), "sent");
    ranks[1].signal(Signal::STOP);
    let state = || std::fs::read_to_string(format!("/proc/{}/stat", ranks[1].pid())).unwrap();
    while !state().contains(") T ") {
        std::thread::sleep(Duration::from_millis(1));
    }
    ranks[0].let_go();
    println!("{}", ranks[0].hear());
    ranks[1].signal(Signal::CONT);
    ranks.into_iter().for_each(ranks::Process::expect_success);
}

/// One rank has no descriptors left, or few: it says so, the others name it, and all go on when it has some.
#[test]
fn descriptors_run_out() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let own = File::open("/dev/null").unwrap();
        // The others have connected to rank 1: whether it can let them in is not what is tested.
        if rank.rank == 1 {
            [0, 2].iter().for_each(|to| group.send_fd(file("before", ""), *to).wait().unwrap());
            nothing_is_left("before");
        } else {
            group.recv_fd(1).wait().unwrap();
        }
        let (mut failed, mut few) = (true, 0);
        while failed {
            group.barrier().wait().unwrap();
            let taken = (rank.rank == 1).then(|| fill_descriptors_but(few));
            let end = group.all_gather_fds(&own).wait();
            limit(Resource::Nofile, None);
            drop(taken);
            failed = end.is_err();
            if let Err(error) = end {
                println!("all_gather_fds, {few} left, rank {}: {}", rank.rank, describe(&error));
                assert!(error.to_string().contains("ulimit -n"), "{error}");
                match rank.rank {
                    1 => assert!(matches!(error, Error::Io { .. }), "{}", describe(&error)),
                    _ => names(&error, &group, 1),
                }
            }
            few += 1;
        }
        assert!(few > 1, "it had descriptors");
        // The connections are there now, and all find room again.
        assert_eq!(group.all_gather_fds(&own).wait().unwrap().len(), 3);
        group.barrier().wait().unwrap();
        match rank.rank {
            0 => group.send_fd(file("run out", "later"), 1).wait().unwrap(),
            1 => {
                let taken = fill_descriptors_but(0);
                let error = group.recv_fd(0).wait().unwrap_err();
                limit(Resource::Nofile, None);
                drop(taken);
                println!("recv_fd: {}", describe(&error));
                assert!(matches!(error, Error::Io { .. }), "{}", describe(&error));
                assert!(error.to_string().contains("ulimit -n"), "{error}");
                assert_eq!(text(group.recv_fd(0).wait().unwrap()), "later");
            }
            _ => {}
        }
        return group.barrier().wait().unwrap();
    }
    Ranks::start("descriptors_run_out", 3).ranks.into_iter().for_each(ranks::Process::expect_success);
}

/// A group that is dropped closes what nobody took.
#[test]
fn a_group_keeps_nothing() {
    let context = Context::new(Config::default()).unwrap();
    let group = Group::builder().context(&context).from_store(Arc::new(MemoryStore::new()), 0, 1).unwrap();
    for _ in 0..10 {
        group.send_fd(file("never taken", "x"), 0).wait().unwrap();
    }
    assert_eq!(open("never taken"), 10);
    drop(group);
    assert_eq!(open("never taken"), 0);
}
