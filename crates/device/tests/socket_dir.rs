//! The socket directory: its files are removed or swept, and nothing else in it is touched.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic)]

mod process;

use std::path::{Path, PathBuf};

use process::{Child, Home, TempDir, call_home, command, sleep_until_killed, soon};
use tensorwire_device::fd::{Address, Handshake, Listener};

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
        "listens here" => {
            let listener = Listener::bind(Some(Path::new("."))).unwrap();
            let received = Address::from_bytes(&listener.address().to_bytes()).unwrap();
            assert!(
                received == *listener.address()
                    && matches!(received, Address::Path(path) if path.is_absolute())
            );
        }
        "listens" => {
            let _listener = Listener::bind(Some(&socket_dir())).unwrap();
            let _home = call_home().unwrap();
            sleep_until_killed();
        }
        other => panic!("no role {other}"),
    }
}

const DIR: &str = "TENSORWIRE_TEST_DIR";

fn socket_dir() -> PathBuf {
    std::env::var_os(DIR).unwrap().into()
}

#[test]
fn socket_files_are_removed_or_swept() {
    let dir = TempDir::new();
    // The names of other people's files are none of our business.
    for name in ["notes", "tensorwire-notes", "tensorwire.notes"] {
        std::fs::write(dir.path().join(name), name).unwrap();
    }
    std::fs::create_dir(dir.path().join("tensorwire-dir")).unwrap();
    let home = Home::open_in(Some(dir.path()));
    assert_eq!(dir.sockets().len(), 1);
    drop(Listener::bind(Some(dir.path())).unwrap());
    assert_eq!(dir.sockets().len(), 1, "a dropped listener removes its file");

    let mut listening = command("listens");
    listening.env(DIR, dir.path());
    let mut child = Child::start(home.invite(&mut listening));
    home.answer().unwrap();
    assert_eq!(dir.sockets().len(), 2);
    child.kill();
    assert_eq!(dir.sockets().len(), 2, "kill -9 leaves the file");
    let next = Listener::bind(Some(dir.path())).unwrap();
    assert_eq!(dir.sockets().len(), 2, "the next bind sweeps it, and neither ours nor its own");
    drop(next);
    // The live one did not even notice, and still serves.
    assert!(Handshake::accept(&home.listener).unwrap().is_none());
    let mut child = Child::start(home.invite(&mut command("stays")));
    let connection = home.answer().unwrap();
    assert_eq!(connection.recv(soon()).unwrap().0, b"here");
    child.kill();
    drop(home);
    assert!(dir.sockets().is_empty());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 4, "nothing else was touched");
}

/// Ranks start at once, each sweeps, and none takes another's fresh socket away.
#[test]
fn many_binds_at_once_in_one_directory() {
    let dir = TempDir::new();
    let listeners: Vec<_> = std::thread::scope(|scope| {
        let bind = || (0..25).map(|_| Listener::bind(Some(dir.path())).unwrap()).collect::<Vec<_>>();
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(bind)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    for listener in &listeners {
        let Address::Path(path) = listener.address() else { panic!("a path") };
        assert!(path.exists(), "{} was swept", path.display());
    }
    assert_eq!(dir.sockets().len(), 200);
    drop(listeners);
    assert!(dir.sockets().is_empty());
}

#[test]
fn odd_socket_directories() {
    let missing = Listener::bind(Some(Path::new("/nonexistent/dir"))).unwrap_err();
    assert!(missing.to_string().contains("/nonexistent/dir"), "{missing}");
    let long = PathBuf::from("/tmp").join("x".repeat(100));
    assert!(Listener::bind(Some(&long)).unwrap_err().to_string().contains("socket"));
    // Others have another working directory.
    let dir = TempDir::new();
    Child::start(command("listens here").current_dir(dir.path())).succeed();
}
