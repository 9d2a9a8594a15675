#![allow(clippy::unwrap_used)] // test helpers

use std::time::Duration;

use super::*;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

#[test]
fn counts_around() {
    assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
    assert!(reached(3, u32::MAX - 3) && !reached(u32::MAX - 3, 3));
}

#[test]
fn a_wait_ends_by_deadline_and_by_abort() {
    let (flag, abort) = (Flag::local(), Abort::local());
    assert!(matches!(flag.wait(1, &abort, Deadline::after(Duration::from_millis(1))), Err(Error::TimedOut)));
    abort.set(7);
    assert!(matches!(flag.wait(1, &abort, soon()), Err(Error::Aborted)));
    assert_eq!((abort.set(9), abort.code()), (7, Some(7)));
    flag.signal(1);
    assert!(flag.wait(1, &abort, soon()).is_ok());
}

/// Two threads hand a counter to and fro, with naps of random length so that both sleep and spin are met.
fn ping_pong(writer: Writer) {
    let (mut ping, mut pong, abort) = (Flag::local(), Flag::local(), Abort::local());
    (ping.writer, pong.writer) = (writer, writer);
    let start = u32::MAX - 50;
    for flag in [&ping, &pong] {
        flag.signal(start);
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for step in 1..=2000u32 {
                ping.wait(start.wrapping_add(step), &abort, soon()).unwrap();
                nap(step);
                pong.signal(start.wrapping_add(step));
            }
        });
        for step in 1..=2000u32 {
            nap(step.wrapping_mul(7));
            ping.signal(start.wrapping_add(step));
            pong.wait(start.wrapping_add(step), &abort, soon()).unwrap();
        }
    });
}

fn nap(step: u32) {
    if step.is_multiple_of(5) {
        std::thread::sleep(Duration::from_micros(u64::from(step % 97)));
    }
}

#[test]
fn ping_pong_between_threads() {
    ping_pong(Writer::Host);
    ping_pong(Writer::Device);
    futex::without_waitv(|| ping_pong(Writer::Host));
}

#[test]
fn an_abort_wakes_every_sleeper() {
    let body = || {
        for _ in 0..50 {
            let (flag, abort) = (Flag::local(), Abort::local());
            std::thread::scope(|scope| {
                let waiters: Vec<_> = (0..4).map(|_| scope.spawn(|| flag.wait(1, &abort, soon()))).collect();
                std::thread::sleep(Duration::from_micros(200));
                abort.set(1);
                for waiter in waiters {
                    assert!(matches!(waiter.join().unwrap(), Err(Error::Aborted)));
                }
            });
        }
    };
    body();
    futex::without_waitv(body);
}
