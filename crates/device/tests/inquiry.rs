//! Questions of processes that belong to no group.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::time::Duration;

use tensorwire_device::Deadline;
use tensorwire_device::fd::{self, Handshake, HandshakeStep, Inquiry, Listener, listeners};
use tensorwire_device::secret::{Id, Secret};

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn accepted(listener: &Listener) -> Handshake {
    loop {
        match Handshake::accept(listener).unwrap() {
            Some(handshake) => return handshake,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn received(inquiry: &Inquiry) -> Vec<u8> {
    loop {
        match inquiry.try_recv().unwrap() {
            Some(bytes) => return bytes,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

#[test]
fn a_question_is_told_from_a_handshake() {
    let listener = Listener::bind(None).unwrap();
    let asking = Inquiry::ask(listener.address(), soon()).unwrap();
    assert_eq!(asking.pid(), std::process::id());
    let question = accepted(&listener).inquiry().unwrap();
    assert_eq!(question.pid(), std::process::id());
    assert!(asking.try_recv().unwrap().is_none());
    assert!(question.try_send(b"one").unwrap() && question.try_send(b"two").unwrap());
    // What was sent arrives, though the other end is closed.
    drop(question);
    assert_eq!((received(&asking), received(&asking)), (b"one".to_vec(), b"two".to_vec()));
    assert_eq!(received(&asking), b"");
}

#[test]
fn a_handshake_goes_on_as_ever() {
    let listener = Listener::bind(None).unwrap();
    let (group, me) = (Id::random().unwrap(), Id::random().unwrap());
    let secret = Secret::random().unwrap();
    let address = listener.address().clone();
    let caller = std::thread::spawn(move || fd::connect(&address, group, me, &secret, soon()).unwrap());
    let mut handshake = accepted(&listener);
    let connection = loop {
        handshake = match handshake.inquiry() {
            Ok(_) => panic!("a handshake is no question"),
            Err(handshake) => handshake,
        };
        match handshake.step(me, &|_| Some(secret)).unwrap() {
            HandshakeStep::More(more) => handshake = more,
            HandshakeStep::Done(_, connection) => break connection,
        }
    };
    assert_eq!(connection.peer().identity, me);
    drop(caller.join().unwrap());
}

#[test]
fn one_who_does_not_listen_fills_only_its_own_buffer() {
    let listener = Listener::bind(None).unwrap();
    let _deaf = Inquiry::ask(listener.address(), soon()).unwrap();
    let question = accepted(&listener).inquiry().unwrap();
    let sent = (0..10_000).take_while(|_| question.try_send(&[7; 30_000]).unwrap()).count();
    assert!(sent < 10_000);
}

#[test]
fn sockets_are_found() {
    let listener = Listener::bind(None).unwrap();
    assert!(listeners(None).contains(listener.address()));
    let folder = std::env::temp_dir().join(format!("tensorwire-test-{}", Id::random().unwrap()));
    std::fs::create_dir(&folder).unwrap();
    let filed = Listener::bind(Some(&folder)).unwrap();
    std::fs::write(folder.join("tensorwire-no-socket"), "").unwrap();
    let found: Vec<_> =
        listeners(Some(&folder)).into_iter().filter(|address| address == filed.address()).collect();
    assert_eq!(found.len(), 1);
    assert!(!listeners(Some(&folder)).iter().any(|address| address.to_string().ends_with("no-socket")));
    drop(filed);
    std::fs::remove_dir_all(&folder).unwrap();
}
