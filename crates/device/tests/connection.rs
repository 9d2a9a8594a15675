//! Private connections: who is let in, who is not and why, and what a peer's death looks like.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic)]

mod process;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use process::{
    Child, GROUP, Home, TempDir, call_home, command, command_under, finish, readable, skip,
    sleep_until_killed, soon,
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use tensorwire_device::fd::{self, Address, Connection, Fd, Handshake, HandshakeStep, MAX_FDS, MAX_MESSAGE};
use tensorwire_device::{Deadline, Error, Id, Secret};

/// What the other process does.
#[test]
fn child() {
    let Some(role) = process::role() else { return };
    match role.as_str() {
        "stays" => {
            let home = call_home().unwrap();
            home.send(b"here", &[], soon()).unwrap();
            sleep_until_killed();
        }
        "echoes" => {
            let home = call_home().unwrap();
            let (bytes, fds) = home.recv(soon()).unwrap();
            let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
            home.send(&bytes, &fds, soon()).unwrap();
        }
        "is refused" => {
            let error = call_home().unwrap_err();
            // The other side may have closed before our first word.
            assert!(matches!(error, Error::Refused(_) | Error::Io { .. }), "{error:?}");
        }
        "is refused for its secret" => {
            let error = call_home().unwrap_err();
            assert!(error.to_string().contains("does not know the group's secret"), "{error}");
        }
        "is refused for its uid" => {
            let error = call_home().unwrap_err().to_string();
            assert!(error.contains("runs as uid 0, this one as uid 65533"), "{error}");
        }
        "is refused for the overflow uid" => {
            let error = call_home().unwrap_err().to_string();
            assert!(error.contains("map the user") || error.contains("must be the same user"), "{error}");
        }
        "cannot connect" => {
            let error = call_home().unwrap_err().to_string();
            assert!(
                error.contains("network namespace") && error.contains("TENSORWIRE_SOCKET_DIR"),
                "{error}"
            );
        }
        "has no descriptors" => receive_without_descriptors(&call_home().unwrap()),
        "knocks" => assert!(Raw::connect(&process::home_address()).recv().is_empty()),
        other => panic!("no role {other}"),
    }
}

// ---- let in ----

#[test]
fn two_threads_of_one_process() {
    let home = Home::open();
    let caller = Id::random().unwrap();
    std::thread::scope(|scope| {
        let calling = scope
            .spawn(|| fd::connect(home.listener.address(), GROUP, caller, &home.secret, soon()).unwrap());
        let answered = home.answer().unwrap();
        let called = calling.join().unwrap();
        assert_eq!((answered.peer().identity, called.peer().identity), (caller, home.identity));
        assert_eq!((answered.peer().pid, called.peer().pid), (std::process::id(), std::process::id()));
        assert!(!answered.peer().has_ended() && !called.peer().has_ended());

        // Messages keep their order and their bounds, and the longest passes.
        assert!(called.try_recv().unwrap().is_none());
        let long = vec![5; MAX_MESSAGE];
        for message in [&b"a"[..], &long, b"bc"] {
            answered.send(message, &[], soon()).unwrap();
        }
        for message in [&b"a"[..], &long, b"bc"] {
            assert!(called.recv(soon()).unwrap().0 == message);
        }
        for wrong in [&[][..], &vec![0; MAX_MESSAGE + 1]] {
            assert!(matches!(answered.send(wrong, &[], soon()), Err(Error::Misuse(_))));
        }
        let now = Deadline::after(Duration::from_millis(1));
        assert!(matches!(called.recv(now), Err(Error::TimedOut)));

        // The most descriptors, and one more.
        let many = vec![home.listener.as_fd(); MAX_FDS + 1];
        assert!(matches!(answered.send(b"x", &many, soon()), Err(Error::Misuse(_))));
        answered.send(b"x", &many[1..], soon()).unwrap();
        assert_eq!(called.recv(soon()).unwrap().1.len(), MAX_FDS);

        // The end.
        drop(answered);
        assert_eq!(called.recv(soon()).unwrap().0, []);
        assert!(called.send(b"x", &[], soon()).is_err());
    });
}

/// Nobody reads: a send ends by its deadline, and not by a signal.
#[test]
fn a_full_connection_ends_by_the_deadline() {
    let (called, answered) = pair();
    let deadline = Deadline::after(Duration::from_millis(50));
    let mut sent = 0;
    let error = loop {
        match called.send(&[1; 60_000], &[], deadline) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::TimedOut), "{error:?}");
    for _ in 0..sent {
        assert_eq!(answered.recv(soon()).unwrap().0.len(), 60_000);
    }
    assert!(answered.try_recv().unwrap().is_none());
}

#[test]
fn two_processes_exchange_messages_and_descriptors() {
    for dir in [None, Some(TempDir::new())] {
        let home = Home::open_in(dir.as_ref().map(TempDir::path));
        let mut child = Child::start(home.invite(&mut command("echoes")));
        let connection = home.answer().unwrap();
        assert_eq!(connection.peer().pid, child.pid());
        let (reader, writer) = std::io::pipe().unwrap();
        connection.send(b"hello", &[writer.as_fd()], soon()).unwrap();
        let (bytes, fds) = connection.recv(soon()).unwrap();
        assert_eq!((bytes.as_slice(), fds.len()), (&b"hello"[..], 1));
        drop(writer);
        rustix::io::write(&fds[0], b"through two processes").unwrap();
        drop(fds);
        child.succeed();
        // All writers are gone, so the pipe ends.
        assert_eq!(std::io::read_to_string(reader).unwrap(), "through two processes");
        readable(&connection.peer().pidfd);
        assert!(connection.peer().has_ended());
    }
}

#[test]
fn a_killed_peer_is_seen_at_once() {
    let home = Home::open();
    let mut child = Child::start(home.invite(&mut command("stays")));
    let connection = home.answer().unwrap();
    assert_eq!(connection.recv(soon()).unwrap().0, b"here");
    assert!(!connection.peer().has_ended());
    child.kill();
    readable(&connection.peer().pidfd);
    assert!(connection.peer().has_ended());
    assert_eq!(connection.recv(soon()).unwrap().0, []);
}

#[test]
fn two_hundred_at_once() {
    let home = Home::open();
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..200)
            .map(|_| {
                let call = || {
                    let me = Id::random().unwrap();
                    let connection =
                        fd::connect(home.listener.address(), GROUP, me, &home.secret, soon()).unwrap();
                    connection.send(&me.0, &[], soon()).unwrap();
                    connection
                };
                std::thread::Builder::new().stack_size(256 * 1024).spawn_scoped(scope, call).unwrap()
            })
            .collect();
        // All in one loop, as the watcher does it.
        let (mut open, mut done): (Vec<Handshake>, Vec<Connection>) = (Vec::new(), Vec::new());
        let secret_of = |group| (group == GROUP).then_some(home.secret);
        while done.len() < 200 {
            assert!(!soon().passed());
            while let Some(handshake) = Handshake::accept(&home.listener).unwrap() {
                open.push(handshake);
            }
            for handshake in std::mem::take(&mut open) {
                match handshake.step(home.identity, &secret_of).unwrap() {
                    HandshakeStep::More(more) => open.push(more),
                    HandshakeStep::Done(group, connection) => {
                        assert_eq!(group, GROUP);
                        done.push(connection);
                    }
                }
            }
            std::thread::yield_now();
        }
        for connection in &done {
            assert_eq!(connection.recv(soon()).unwrap().0, connection.peer().identity.0);
        }
        let mut identities: Vec<_> = done.iter().map(|connection| connection.peer().identity).collect();
        identities.sort();
        identities.dedup();
        assert_eq!(identities.len(), 200);
        drop(calls);
    });
}

// ---- not let in ----

#[test]
fn a_wrong_secret_is_refused_on_both_sides() {
    let home = Home::open();
    // The caller hears first, because it sees the listener's proof.
    let other = Secret::random().unwrap();
    let mut child = Child::start(home.invite_with(&mut command("is refused for its secret"), &other));
    let error = home.answer().unwrap_err();
    assert!(matches!(error, Error::Refused(_)) && error.to_string().contains("closed"), "{error}");
    child.succeed();

    // A caller that goes on all the same, with a proof of its own making.
    let raw = Raw::connect(home.listener.address());
    raw.send(&hello(1, 1, GROUP), &[own_pidfd().as_fd()]);
    let calling = home.next_caller();
    let secret_of = |group| (group == GROUP).then_some(home.secret);
    let HandshakeStep::More(calling) = calling.step(home.identity, &secret_of).unwrap() else {
        panic!("let in")
    };
    assert_eq!(raw.recv().len(), 6 + 52 + 32);
    raw.send(&[&b"twfd\x01\x03"[..], &[9; 32]].concat(), &[]);
    let error = finish(calling, home.identity, &secret_of).unwrap_err();
    assert!(error.to_string().contains("does not know the group's secret"), "{error}");
}

/// The listener's own proof, sent back, proves nothing.
#[test]
fn a_reflected_proof_is_refused() {
    let home = Home::open();
    let raw = Raw::connect(home.listener.address());
    raw.send(&hello(1, 1, GROUP), &[own_pidfd().as_fd()]);
    let secret_of = |group| (group == GROUP).then_some(home.secret);
    let step = home.next_caller().step(home.identity, &secret_of).unwrap();
    let HandshakeStep::More(calling) = step else { panic!("let in") };
    let welcome = raw.recv();
    raw.send(&[&b"twfd\x01\x03"[..], &welcome[6 + 52..]].concat(), &[]);
    assert!(matches!(finish(calling, home.identity, &secret_of), Err(Error::Refused(_))));
}

#[test]
fn an_unknown_group_is_refused() {
    let home = Home::open();
    std::thread::scope(|scope| {
        let unknown = Id([8; 16]);
        let address = home.listener.address();
        let calling = scope
            .spawn(move || fd::connect(address, unknown, Id([1; 16]), &home.secret, soon()).unwrap_err());
        let error = home.answer().unwrap_err().to_string();
        assert!(error.contains("no group") && error.contains(&unknown.to_string()), "{error}");
        let error = calling.join().unwrap().to_string();
        assert!(error.contains("does not know this group"), "{error}");
    });
}

/// Every frame that is not exactly right ends that one connection; the next caller is served.
#[test]
fn odd_frames_are_refused() {
    let home = Home::open();
    let me = own_pidfd();
    let right = hello(1, 1, GROUP);
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"x".to_vec(), "cut short"),
        (right[..5].to_vec(), "cut short"),
        (right[..6].to_vec(), "wrong kind or length"),
        (right[..right.len() - 1].to_vec(), "wrong kind or length"),
        ([&right[..], &[0]].concat(), "wrong kind or length"),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "does not speak"),
        (hello(2, 1, GROUP), "speaks version 2, this one 1"),
        (hello(1, 3, GROUP), "wrong kind or length"),
        (vec![0xff; MAX_MESSAGE], "does not speak"),
        (vec![b't'; MAX_MESSAGE + 1], "longer than agreed"),
    ];
    for (bytes, reason) in cases {
        let raw = Raw::connect(home.listener.address());
        raw.send(&bytes, &[me.as_fd()]);
        let error = home.answer().unwrap_err();
        assert!(matches!(error, Error::Refused(_)), "{error:?}");
        assert!(error.to_string().contains(reason), "{} bytes: {error}", bytes.len());
        assert!(raw.recv().is_empty(), "closed");
    }
    // Gone before it said a word.
    drop(Raw::connect(home.listener.address()));
    assert!(home.answer().unwrap_err().to_string().contains("closed"));
    let mut child = Child::start(home.invite(&mut command("stays")));
    home.answer().unwrap();
    child.kill();
}

#[test]
fn odd_descriptors_are_refused() {
    let home = Home::open();
    let (me, (pipe, _writer)) = (own_pidfd(), std::io::pipe().unwrap());
    let cases = [
        vec![],
        vec![pipe.as_fd()],
        vec![home.listener.as_fd()],
        vec![me.as_fd(), me.as_fd()],
        vec![me.as_fd(), pipe.as_fd()],
        vec![me.as_fd(); MAX_FDS + 1],
    ];
    for fds in cases {
        let raw = Raw::connect(home.listener.address());
        raw.send(&hello(1, 1, GROUP), &fds);
        let error = home.answer().unwrap_err();
        assert!(matches!(error, Error::Refused(_)), "{} descriptors: {error:?}", fds.len());
    }
}

/// A pidfd of somebody else would tell of the wrong death.
#[test]
fn a_pidfd_of_another_process_is_refused() {
    let home = Home::open();
    let mut other = Command::new("sleep").arg("60").spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&other);
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    let told = |error: Error| {
        let text = error.to_string();
        let both = [std::process::id(), other.id()].map(|pid| format!("process {pid}"));
        assert!(matches!(error, Error::Refused(_)) && both.iter().all(|one| text.contains(one)), "{text}");
    };

    let raw = Raw::connect(home.listener.address());
    raw.send(&hello(1, 1, GROUP), &[pidfd.as_fd()]);
    told(home.answer().unwrap_err());
    let received = Fd::new(pidfd);
    told(fd::check_pidfd(&received, std::process::id()).unwrap_err());
    // It is its own, the peer is not known, or it has ended.
    fd::check_pidfd(&received, other.id()).unwrap();
    fd::check_pidfd(&received, 0).unwrap();
    other.kill().unwrap();
    other.wait().unwrap();
    fd::check_pidfd(&received, std::process::id()).unwrap();
}

#[test]
fn a_silent_caller_blocks_nobody() {
    let home = Home::open();
    let secret_of = |group| (group == GROUP).then_some(home.secret);
    let _silent = Raw::connect(home.listener.address());
    let silent = home.next_caller();
    let HandshakeStep::More(silent) = silent.step(home.identity, &secret_of).unwrap() else {
        panic!("let in")
    };
    let mut child = Child::start(home.invite(&mut command("echoes")));
    let connection = home.answer().unwrap();
    connection.send(b"x", &[], soon()).unwrap();
    assert_eq!(connection.recv(soon()).unwrap().0, b"x");
    child.succeed();
    assert!(matches!(silent.step(home.identity, &secret_of), Ok(HandshakeStep::More(_))));
}

/// A listener that never answers costs a caller its deadline, no more; one that answers nonsense is refused.
#[test]
fn odd_listeners_are_refused() {
    let home = Home::open();
    let call = |deadline| fd::connect(home.listener.address(), GROUP, Id([1; 16]), &home.secret, deadline);
    let error = call(Deadline::after(Duration::from_millis(20))).unwrap_err();
    assert!(matches!(error, Error::TimedOut), "{error:?}");

    let welcome =
        [&b"twfd\x01\x02"[..], &GROUP.0, &[2; 16], &7u32.to_le_bytes(), &[3; 16], &[4; 32]].concat();
    let mut elsewhere = welcome.clone();
    elsewhere[6] ^= 1;
    for (answer, reason) in [
        (b"?".to_vec(), "cut short"),
        (welcome, "does not know the group's secret"),
        (elsewhere, "another group"),
        (hello(1, 1, GROUP), "wrong kind or length"),
    ] {
        let dir = TempDir::new();
        let path = dir.path().join("odd");
        let odd = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::bind(&odd, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&odd, 1).unwrap();
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                let raw = Raw(rustix::net::accept(&odd).unwrap());
                raw.recv();
                raw.send(&answer, &[own_pidfd().as_fd()]);
                raw.recv();
            });
            fd::connect(&Address::Path(path), GROUP, Id([1; 16]), &home.secret, soon()).unwrap_err()
        });
        assert!(matches!(error, Error::Refused(_)) && error.to_string().contains(reason), "{error}");
    }
}

/// This process has no descriptor left for what arrives: an error that says so, and nothing leaks.
#[test]
fn no_descriptor_left() {
    let home = Home::open();
    let mut child = Child::start(home.invite(&mut command("has no descriptors")));
    let connection = home.answer().unwrap();
    let fds = vec![home.listener.as_fd(); 20];
    connection.send(b"many", &fds, soon()).unwrap();
    connection.send(b"one", &fds[..1], soon()).unwrap();
    child.succeed();
}

fn receive_without_descriptors(home: &Connection) {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count() - 1;
    let before = open();
    let room = rustix::process::Rlimit {
        current: Some(before as u64 + 5),
        ..rustix::process::getrlimit(rustix::process::Resource::Nofile)
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, room).unwrap();
    let error = home.recv(soon()).unwrap_err();
    assert!(error.to_string().contains("ulimit -n"), "{error}");
    assert_eq!(open(), before, "those that fitted are closed");
    assert_eq!(home.recv(soon()).unwrap().1.len(), 1);
}

// ---- users and namespaces ----

#[test]
fn another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can start a process of another user");
    }
    // Nobody else may look into a build folder of root's, so the child runs a copy.
    let dir = TempDir::open_to_all();
    let copy = dir.path().join("test");
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let home = Home::open();
    let wrapper = ["/bin/sh", "-c", "shift; exec \"$TW_COPY\" \"$@\"", "sh"];
    let elsewhere = |role| {
        let mut other = command_under(&wrapper, role);
        other.env("TW_COPY", &copy).current_dir("/").uid(65533).gid(65533);
        other
    };
    let mut child = Child::start(home.invite(&mut elsewhere("is refused for its uid")));
    // It sees our uid first and says nothing; we see its uid and do not even listen.
    child.succeed();
    assert!(Handshake::accept(&home.listener).unwrap().is_none());

    // One that does not look at our uid.
    let mut child = Child::start(home.invite(&mut elsewhere("knocks")));
    readable(&home.listener);
    assert!(Handshake::accept(&home.listener).unwrap().is_none());
    child.succeed();
}

#[test]
fn the_overflow_uid_is_refused() {
    let Some(wrapper) = namespaces(&["--user"]) else { return };
    let home = Home::open();
    let mut child =
        Child::start(home.invite(&mut command_under(&wrapper, "is refused for the overflow uid")));
    let error = home.answer().unwrap_err();
    assert!(matches!(error, Error::Refused(_)), "{error:?}");
    child.succeed();
}

#[test]
fn death_is_seen_across_pid_namespaces() {
    for flags in [
        &["--pid", "--fork", "--kill-child"][..],
        &["--user", "--map-root-user", "--pid", "--fork", "--kill-child"],
    ] {
        let Some(wrapper) = namespaces(flags) else { continue };
        let home = Home::open();
        let mut child = Child::start(home.invite(&mut command_under(&wrapper, "stays")));
        let connection = home.answer().unwrap();
        assert_eq!(connection.recv(soon()).unwrap().0, b"here");
        // It is the first process of its namespace.
        assert_eq!(connection.peer().pid, 1);
        assert!(!connection.peer().has_ended());
        child.kill();
        readable(&connection.peer().pidfd);
        assert!(connection.peer().has_ended());
    }
}

#[test]
fn another_network_namespace_needs_a_socket_directory() {
    for flags in [&["--net"][..], &["--user", "--map-root-user", "--net"]] {
        let Some(wrapper) = namespaces(flags) else { continue };
        let home = Home::open();
        Child::start(home.invite(&mut command_under(&wrapper, "cannot connect"))).succeed();
        assert!(Handshake::accept(&home.listener).unwrap().is_none());

        let dir = TempDir::new();
        let home = Home::open_in(Some(dir.path()));
        let mut child = Child::start(home.invite(&mut command_under(&wrapper, "echoes")));
        let connection = home.answer().unwrap();
        connection.send(b"x", &[], soon()).unwrap();
        assert_eq!(connection.recv(soon()).unwrap().0, b"x");
        child.succeed();
    }
}

#[test]
fn addresses_from_frames() {
    for text in ["@name", "/a/path", "@", "/"] {
        let address: Address = text.parse().unwrap();
        assert_eq!((address.to_string().as_str(), address.to_bytes()), (text, text.as_bytes().to_vec()));
    }
    for wrong in [&b""[..], b"name", b"@\xff", b"\0name"] {
        assert!(matches!(Address::from_bytes(wrong), Err(Error::Refused(_))));
    }
    let odd = [&b"/a\0b"[..], &[b'/'; 5000], &[b'@'; 5000], b"@", b"@a\0b", b"/\xff\xff"];
    for address in odd.map(|bytes| Address::from_bytes(bytes).unwrap()) {
        let error =
            fd::connect(&address, GROUP, Id([1; 16]), &Secret::from_bytes([0; 32]), soon()).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error:?}");
    }
}

/// Descriptors must be usable as what they are.
#[test]
fn a_second_descriptor_is_the_same_file() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let first = Fd::new(OwnedFd::from(writer));
    let second = first.try_clone().unwrap();
    drop(first);
    rustix::io::write(&second, b"x").unwrap();
    drop(second);
    assert_eq!(std::io::read_to_string(&mut reader).unwrap(), "x");
}

// ---- tools ----

fn pair() -> (Connection, Connection) {
    let home = Home::open();
    std::thread::scope(|scope| {
        let call = || fd::connect(home.listener.address(), GROUP, Id([1; 16]), &home.secret, soon()).unwrap();
        let calling = scope.spawn(call);
        let answered = home.answer().unwrap();
        (calling.join().unwrap(), answered)
    })
}

/// A caller that does not keep to the protocol.
struct Raw(OwnedFd);

impl Raw {
    fn connect(address: &Address) -> Self {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        let place = match address {
            Address::Abstract(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap(),
            Address::Path(path) => SocketAddrUnix::new(path.as_path()).unwrap(),
        };
        rustix::net::connect(&socket, &place).unwrap();
        Self(socket)
    }

    fn send(&self, bytes: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
        sendmsg(&self.0, &[std::io::IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
    }

    /// One message without its descriptors; empty at the end.
    fn recv(&self) -> Vec<u8> {
        readable(&self.0);
        let mut bytes = vec![0; 1000];
        match rustix::net::recv(&self.0, &mut bytes[..], rustix::net::RecvFlags::empty()) {
            Ok((count, _)) => bytes.truncate(count),
            Err(rustix::io::Errno::CONNRESET) => bytes.clear(),
            Err(error) => panic!("{error}"),
        }
        bytes
    }
}

fn hello(version: u8, kind: u8, group: Id) -> Vec<u8> {
    [&b"twfd"[..], &[version, kind], &group.0, &[2; 16], &1234u32.to_le_bytes(), &[3; 16]].concat()
}

fn own_pidfd() -> OwnedFd {
    let flags = rustix::process::PidfdFlags::empty();
    rustix::process::pidfd_open(rustix::process::getpid(), flags).unwrap()
}

/// `unshare` with these flags, or nothing and a printed reason where that is not permitted.
fn namespaces(flags: &'static [&'static str]) -> Option<Vec<&'static str>> {
    let wrapper = [&["unshare"], flags].concat();
    match Command::new(wrapper[0]).args(&wrapper[1..]).arg("true").output() {
        Ok(output) if output.status.success() => Some(wrapper),
        Ok(output) => {
            skip(format_args!("{}: {}", wrapper.join(" "), String::from_utf8_lossy(&output.stderr).trim()));
            None
        }
        Err(error) => {
            skip(format_args!("unshare: {error}"));
            None
        }
    }
}
