//! A child of a real fork keeps nothing of its parent's and can make its own.
//!
//! Tests run as threads of one process, which is no place to fork; each body runs in a process of its own.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic)]

mod process;

use std::cell::Cell;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Stdio;
use std::sync::Mutex;

use process::{Child, GROUP, Home, call_home, command, readable, sleep_until_killed, soon};
use tensorwire_device::fd::{self, Address, Connection, Fd, Handshake, Listener};
use tensorwire_device::fork::{Birth, PerProcess, in_child};
use tensorwire_device::host::Host;
use tensorwire_device::{Abort, Device, Error, Flag, Id, Span};

#[test]
fn child() {
    let Some(role) = process::role() else { return };
    match role.as_str() {
        "descriptors" => descriptors(),
        "uses" => uses(),
        "own" => own(),
        "dies" => dies(),
        "spawns" => spawns(),
        "locked" => locked(),
        other => panic!("no role {other}"),
    }
}

#[test]
fn registered_descriptors_are_closed_and_no_other() {
    Child::start(&mut command("descriptors")).succeed();
}

fn descriptors() {
    assert!(!in_child() && Birth::now().check("x").is_ok());
    let birth = Birth::now();
    let ours: Vec<Fd> = (0..70).map(|_| null()).collect();
    let numbers: Vec<RawFd> = ours.iter().map(|fd| fd.as_fd().as_raw_fd()).collect();
    let other = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let dropped = null();
    drop(dropped);
    // High numbers are in another word of the bitmap, and a dropped one is not in it.
    let high = Fd::new(rustix::io::fcntl_dupfd_cloexec(&other, 1000).unwrap());
    // What the child takes out of its copy of the cell stays in the parent's.
    let ours = Cell::new(Some((ours, high)));

    fork(|| {
        assert!(in_child() && !birth.is_ours() && Birth::now().is_ours());
        assert!(matches!(birth.check("x"), Err(Error::Forked("x"))));
        let (ours, high) = ours.take().unwrap();
        assert!(numbers.iter().all(|&number| !is_open(number)) && !is_open(high.as_fd().as_raw_fd()));
        assert!(is_open(other.as_raw_fd()) && is_open(0) && is_open(2));
        assert!(ours.iter().all(|fd| !fd.is_ours()));

        // Somebody else opens files and gets the same numbers; our destructors leave them alone.
        let theirs: Vec<_> = numbers.iter().map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        let reused: Vec<RawFd> = theirs.iter().map(|file| file.as_raw_fd()).collect();
        assert!(reused.iter().any(|number| numbers.contains(number)));
        drop((ours, high));
        assert!(reused.iter().all(|&number| is_open(number)));
    });
    assert!(!in_child() && birth.is_ours() && numbers.iter().all(|&number| is_open(number)));
}

#[test]
fn what_the_parent_made_is_refused_in_the_child() {
    Child::start(&mut command("uses")).succeed();
}

fn uses() {
    let dir = std::env::temp_dir();
    let listener = Listener::bind(Some(&dir)).unwrap();
    let (near, far) = pair(&Home::open());
    let region = Host.alloc(4096).unwrap();
    region.write(0, b"shared").unwrap();
    let (span, flag, abort) = (Span::whole(region.clone()), Flag::local(), Abort::local());
    let Address::Path(path) = listener.address().clone() else { panic!("a path") };
    let ours = Cell::new(Some((near, region, span, listener)));

    fork(|| {
        let (near, region, span, listener) = ours.take().unwrap();
        // Numbers of ours may mean other files by now; these would swallow what we send.
        let _theirs: Vec<_> = (0..50).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        assert!(matches!(near.send(b"x", &[], soon()), Err(Error::Forked(_))));
        assert!(matches!(near.recv(soon()), Err(Error::Forked(_))));
        assert!(matches!(near.try_recv(), Err(Error::Forked(_))));
        assert!(matches!(Handshake::accept(&listener), Err(Error::Forked(_))));
        assert!(matches!(region.export(), Err(Error::Forked(_))));
        assert!(!near.peer().has_ended());
        // The memory itself is inherited; nothing is lost by letting it be read and written.
        assert_eq!(span.to_vec().unwrap()[..6], *b"shared");
        span.write(0, b"SHARED").unwrap();
        flag.signal(1);
        flag.wait(1, &abort, soon()).unwrap();
        drop((near, region, span, listener));
        assert!(path.exists(), "the parent's socket file is the parent's");
    });
    let (near, region, span, listener) = ours.take().unwrap();
    // The parent has it all, and its mapping was not taken away.
    assert!(path.exists() && Handshake::accept(&listener).unwrap().is_none());
    assert_eq!(span.to_vec().unwrap()[..6], *b"SHARED");
    near.send(b"still here", &[], soon()).unwrap();
    assert_eq!(far.recv(soon()).unwrap().0, b"still here");
    region.export().unwrap();
    drop(listener);
    assert!(!path.exists());
}

#[test]
fn a_child_makes_its_own() {
    Child::start(&mut command("own")).succeed();
}

fn own() {
    let _parents = pair(&Home::open());
    let body = || {
        let made = null();
        let number = made.as_fd().as_raw_fd();
        assert!(made.is_ours() && is_open(number));
        drop(made);
        assert!(!is_open(number), "a child's own descriptor is closed when dropped");

        let dir = std::env::temp_dir();
        let home = Home::open_in(Some(&dir));
        let Address::Path(path) = home.listener.address().clone() else { panic!("a path") };
        let (near, far) = pair(&home);
        assert_eq!(near.peer().pid, std::process::id());
        near.send(b"x", &[], soon()).unwrap();
        assert_eq!(far.recv(soon()).unwrap().0, b"x");
        let region = Host.alloc(10).unwrap();
        Host.import(region.export().unwrap()).unwrap();
        drop(home);
        assert!(!path.exists());
        (near, far)
    };
    fork(|| {
        let mine = body();
        // And a grandchild.
        fork(|| {
            assert!(matches!(mine.0.send(b"x", &[], soon()), Err(Error::Forked(_))));
            body();
        });
        mine.0.send(b"y", &[], soon()).unwrap();
        assert_eq!(mine.1.recv(soon()).unwrap().0, b"y");
    });
}

/// The parent dies, its forked worker lives on: the peer sees the death all the same.
#[test]
fn a_living_child_does_not_hide_the_death_of_its_parent() {
    let home = Home::open();
    let (reader, mut writer) = std::io::pipe().unwrap();
    let mut dying = command("dies");
    dying.stdin(Stdio::from(reader));
    let mut child = Child::start(home.invite(&mut dying));
    drop(dying); // and our copy of the reader
    let connection = home.answer().unwrap();
    assert_eq!(connection.recv(soon()).unwrap().0, b"forked");
    assert!(!connection.peer().has_ended());
    child.kill();
    readable(&connection.peer().pidfd);
    assert!(connection.peer().has_ended());
    assert_eq!(connection.recv(soon()).unwrap().0, [], "the connection ended");
    // Somebody still holds the reader: the worker. It ends when the writer is gone.
    writer.write_all(b"alive").unwrap();
}

fn dies() {
    let home = call_home().unwrap();
    // SAFETY: the child goes on in this thread alone and only reads until the end of its input.
    if unsafe { libc::fork() } == 0 {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        // SAFETY: ends the process without running anybody's destructors.
        unsafe { libc::_exit(0) };
    }
    home.send(b"forked", &[], soon()).unwrap();
    sleep_until_killed();
}

/// Starting a program forks too, on some paths; the parent must not take itself for the child.
#[test]
fn a_child_has_statics_of_its_own() {
    Child::start(&mut command("locked")).succeed();
}

fn locked() {
    static COUNT: PerProcess<Mutex<u32>> = PerProcess::new(Mutex::default);
    let all: Vec<usize> = std::thread::scope(|scope| {
        let threads = [(); 8].map(|()| scope.spawn(|| std::ptr::from_ref(COUNT.get()) as usize));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(all.iter().all(|it| *it == all[0]), "one for all threads");
    let mut count = COUNT.get().lock().unwrap();
    *count = 7;
    // The parent has it locked, and nobody will ever unlock the child's copy.
    fork(|| {
        let mut count = COUNT.get().try_lock().unwrap();
        assert_eq!(*count, 0);
        *count = 8;
    });
    assert_eq!(*count, 7);
}

#[test]
fn starting_a_program_changes_nothing() {
    Child::start(&mut command("spawns")).succeed();
}

fn spawns() {
    use std::os::unix::process::CommandExt;
    let (near, far) = pair(&Home::open());
    let mut program = std::process::Command::new("true");
    // SAFETY: does nothing, but makes std fork instead of spawn.
    unsafe { program.pre_exec(|| Ok(())) };
    assert!(program.status().unwrap().success());
    assert!(std::process::Command::new("true").status().unwrap().success());
    assert!(!in_child());
    near.send(b"x", &[], soon()).unwrap();
    assert_eq!(far.recv(soon()).unwrap().0, b"x");
}

/// Runs `body` in a forked child and waits for it.
fn fork(body: impl FnOnce()) {
    // SAFETY: the only other thread of this process waits for this one and holds no lock of ours; the child ends
    // below without returning to anything that it shares with it.
    match unsafe { libc::fork() } {
        0 => {
            let held = catch_unwind(AssertUnwindSafe(body)).is_ok();
            // SAFETY: ends the process without running anybody's destructors.
            unsafe { libc::_exit(if held { 0 } else { 1 }) }
        }
        child => {
            assert!(child > 0);
            let mut status = 0;
            // SAFETY: waits for the child just made and writes one integer.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "the forked child failed");
        }
    }
}

fn null() -> Fd {
    Fd::new(std::fs::File::open("/dev/null").unwrap().into())
}

fn is_open(number: RawFd) -> bool {
    // SAFETY: only asks for the flags of a number, which may be closed; the owner is never dropped.
    let fd = std::mem::ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
    rustix::io::fcntl_getfd(&*fd).is_ok()
}

fn pair(home: &Home) -> (Connection, Connection) {
    std::thread::scope(|scope| {
        let calling = scope.spawn(|| {
            fd::connect(home.listener.address(), GROUP, Id([1; 16]), &home.secret, soon()).unwrap()
        });
        let answered = home.answer().unwrap();
        (calling.join().unwrap(), answered)
    })
}
