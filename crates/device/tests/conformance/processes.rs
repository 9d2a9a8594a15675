//! Memory and flags between two processes. Whoever made a region may die; the region stays.

use std::sync::Arc;

use tensorwire_device::fd::Connection;
use tensorwire_device::flag::{LINE, Writer};
use tensorwire_device::host::Host;
use tensorwire_device::{Abort, Device, Error, Flag, Handle, Region, Span};

use super::{Subject, bytes_of, noise};
use crate::process::{Child, Home, call_home, command, readable, sleep_until_killed, soon};

const LEN: usize = 100_000;

/// What the other process does.
pub fn child(role: &str, subject: &Subject) {
    let home = call_home().unwrap();
    match role {
        "answers" => {
            let region = receive(&*subject.device, &home);
            assert!(bytes_of(&region) == noise(LEN, 1));
            region.write(0, &noise(LEN, 2)).unwrap();
            tell(&home);
            // The parent writes, then says so.
            assert_eq!(home.recv(soon()).unwrap().0, b"now");
            assert!(bytes_of(&region) == noise(LEN, 3));
        }
        "makes" => {
            let region = subject.filled(&noise(LEN, 4));
            send(&home, &region);
            sleep_until_killed();
        }
        "pongs" => {
            let Flags { ping, pong, abort } = Flags::of(&receive(&Host, &home));
            let mut queue = subject.device.queue().unwrap();
            for turn in 1..=1000 {
                queue.wait(&ping, turn, &abort, soon()).unwrap();
                queue.signal(&pong, turn).unwrap();
            }
            queue.finish(&abort, soon()).unwrap();
        }
        "sleeps" => {
            let Flags { ping, abort, .. } = Flags::of(&receive(&Host, &home));
            tell(&home);
            let mut queue = subject.device.queue().unwrap();
            let ended = queue.wait(&ping, 1, &abort, soon()).and_then(|()| queue.finish(&abort, soon()));
            assert!(matches!(ended, Err(Error::Aborted)), "{ended:?}");
            assert_eq!(abort.code(), Some(9));
        }
        other => panic!("no role {other}"),
    }
}

pub fn two_processes_see_each_others_writes(subject: &Subject) {
    let (mut child, connection) = start("answers");
    let region = subject.filled(&noise(LEN, 1));
    send(&connection, &region);
    heard(&connection);
    assert!(bytes_of(&region) == noise(LEN, 2));
    region.write(0, &noise(LEN, 3)).unwrap();
    connection.send(b"now", &[], soon()).unwrap();
    child.succeed();
}

pub fn memory_outlives_its_maker(subject: &Subject) {
    let (mut child, connection) = start("makes");
    let region = receive(&*subject.device, &connection);
    child.kill();
    readable(&connection.peer().pidfd);
    assert!(connection.peer().has_ended());
    assert!(bytes_of(&region) == noise(LEN, 4));
    region.write(LEN - 1, &[1]).unwrap();
    let again = subject.device.import(region.export().unwrap()).unwrap();
    assert_eq!(bytes_of(&again)[LEN - 1], 1);
}

pub fn a_signal_crosses_processes(_: &Subject) {
    let (mut child, connection) = start("pongs");
    let region = Host.alloc(3 * LINE).unwrap();
    send(&connection, &region);
    let Flags { ping, pong, abort } = Flags::of(&region);
    for turn in 1..=1000 {
        ping.signal(turn);
        pong.wait(turn, &abort, soon()).unwrap();
    }
    child.succeed();
}

pub fn an_abort_crosses_processes(_: &Subject) {
    let region = Host.alloc(3 * LINE).unwrap();
    let mut sleepers: Vec<_> = (0..3)
        .map(|_| {
            let (child, connection) = start("sleeps");
            send(&connection, &region);
            heard(&connection);
            (child, connection)
        })
        .collect();
    Flags::of(&region).abort.set(9);
    sleepers.iter_mut().for_each(|(child, _)| child.succeed());
}

/// Two flags and an abort word, one line each.
struct Flags {
    ping: Flag,
    pong: Flag,
    abort: Abort,
}

impl Flags {
    fn of(region: &Arc<dyn Region>) -> Self {
        let line = |index: usize| Span::new(region.clone(), index * LINE..(index + 1) * LINE).unwrap();
        let flag = |index: usize, writer| Flag::new(&line(index), writer).unwrap();
        // The answer may come from a device, which wakes nobody.
        Self {
            ping: flag(0, Writer::Host),
            pong: flag(1, Writer::Device),
            abort: Abort::new(&line(2)).unwrap(),
        }
    }
}

fn start(role: &str) -> (Child, Connection) {
    let home = Home::open();
    let child = Child::start(home.invite(&mut command(role)));
    let connection = home.answer().unwrap();
    assert_eq!(connection.peer().pid, child.pid());
    (child, connection)
}

fn send(connection: &Connection, region: &Arc<dyn Region>) {
    let handle = region.export().unwrap();
    let fds: Vec<_> = handle.fds().collect();
    connection.send(&handle.encode(), &fds, soon()).unwrap();
}

fn receive(device: &dyn Device, connection: &Connection) -> Arc<dyn Region> {
    let (bytes, fds) = connection.recv(soon()).unwrap();
    device.import(Handle::decode(&bytes, fds).unwrap()).unwrap()
}

fn tell(connection: &Connection) {
    connection.send(b"told", &[], soon()).unwrap();
}

fn heard(connection: &Connection) {
    assert_eq!(connection.recv(soon()).unwrap().0, b"told");
}
