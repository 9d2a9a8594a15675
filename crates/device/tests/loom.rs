//! The flag protocol under loom: the code that runs, over loom's atomics, with a condition variable in place of
//! the futex. A lost wake-up shows as a deadlock, a missing acquire or release as a race on the payload.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p tensorwire-device --release --test loom`

#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use tensorwire_device::latch::Latch;
use tensorwire_device::{Abort, Bell, Deadline, Error, Flag};

/// loom has no clock; nothing here may end by its deadline.
fn never() -> Deadline {
    Deadline::after(Duration::MAX)
}

fn wait(flag: &Flag, target: u32, abort: &Abort) {
    flag.wait(target, abort, never()).unwrap();
}

/// Every way in which the threads of `body` can meet, with at most `preemptions` switches that nobody asked for.
fn check(preemptions: Option<usize>, body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.check(body);
}

#[test]
fn a_sleeper_is_woken() {
    check(None, || {
        let (flag, abort) = (Flag::local(), Abort::local());
        let waiter = thread::spawn({
            let (flag, abort) = (flag.clone(), abort.clone());
            move || wait(&flag, 1, &abort)
        });
        flag.signal(1);
        waiter.join().unwrap();
    });
}

#[test]
fn two_sleepers_are_woken() {
    check(Some(3), || {
        let (flag, abort) = (Flag::local(), Abort::local());
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let (flag, abort) = (flag.clone(), abort.clone());
                thread::spawn(move || wait(&flag, 1, &abort))
            })
            .collect();
        flag.signal(1);
        for waiter in waiters {
            waiter.join().unwrap();
        }
    });
}

#[test]
fn two_signals_one_after_the_other() {
    check(Some(4), || {
        let (flag, abort) = (Flag::local(), Abort::local());
        let waiter = thread::spawn({
            let (flag, abort) = (flag.clone(), abort.clone());
            move || {
                wait(&flag, 1, &abort);
                wait(&flag, 2, &abort);
            }
        });
        flag.signal(1);
        flag.signal(2);
        waiter.join().unwrap();
    });
}

/// The waiter wants only the second value, so a wake for the first must not make it miss the second.
#[test]
fn a_signal_that_is_not_enough() {
    check(Some(4), || {
        let (flag, abort) = (Flag::local(), Abort::local());
        flag.signal(u32::MAX);
        let waiter = thread::spawn({
            let (flag, abort) = (flag.clone(), abort.clone());
            move || wait(&flag, 1, &abort)
        });
        flag.signal(0);
        flag.signal(1);
        waiter.join().unwrap();
    });
}

#[test]
fn ping_and_pong() {
    check(Some(3), || {
        let (ping, pong, abort) = (Flag::local(), Flag::local(), Abort::local());
        let other = thread::spawn({
            let (ping, pong, abort) = (ping.clone(), pong.clone(), abort.clone());
            move || {
                wait(&ping, 1, &abort);
                pong.signal(1);
            }
        });
        ping.signal(1);
        wait(&pong, 1, &abort);
        other.join().unwrap();
    });
}

#[test]
fn an_abort_ends_a_wait() {
    check(None, || {
        let (flag, abort) = (Flag::local(), Abort::local());
        let waiter = thread::spawn({
            let (flag, abort) = (flag.clone(), abort.clone());
            move || flag.wait(1, &abort, never())
        });
        abort.set(5);
        assert!(matches!(waiter.join().unwrap(), Err(Error::Aborted)));
    });
}

#[test]
fn an_abort_ends_two_waits() {
    check(Some(3), || {
        let (flag, abort) = (Flag::local(), Abort::local());
        let waiter = thread::spawn({
            let (flag, abort) = (flag.clone(), abort.clone());
            move || flag.wait(1, &abort, never())
        });
        let watcher = thread::spawn({
            let abort = abort.clone();
            move || abort.wait(never())
        });
        abort.set(5);
        assert!(matches!(waiter.join().unwrap(), Err(Error::Aborted)));
        assert_eq!(watcher.join().unwrap().unwrap(), 5);
    });
}

/// Both at once: either outcome is right, and never a sleep for ever.
#[test]
fn an_abort_and_a_signal_race() {
    check(Some(3), || {
        let (flag, abort) = (Flag::local(), Abort::local());
        let waiter = thread::spawn({
            let (flag, abort) = (flag.clone(), abort.clone());
            move || flag.wait(1, &abort, never())
        });
        let aborter = thread::spawn({
            let abort = abort.clone();
            move || abort.set(5)
        });
        flag.signal(1);
        let ended = waiter.join().unwrap();
        assert!(matches!(ended, Ok(()) | Err(Error::Aborted)), "{ended:?}");
        aborter.join().unwrap();
    });
}

/// Only the first code counts, and whoever sets it hears which.
#[test]
fn two_aborts_race() {
    check(None, || {
        let abort = Abort::local();
        let other = thread::spawn({
            let abort = abort.clone();
            move || abort.set(5)
        });
        let mine = abort.set(6);
        assert_eq!(Some(mine), abort.code());
        assert_eq!(other.join().unwrap(), mine);
    });
}

/// Memory that loom watches: a read that is not ordered after the write is an error.
struct Payload(UnsafeCell<u32>);

// SAFETY: that accesses are ordered is exactly what loom checks.
unsafe impl Sync for Payload {}
// SAFETY: as above.
unsafe impl Send for Payload {}

impl Payload {
    fn new() -> Arc<Self> {
        Arc::new(Self(UnsafeCell::new(0)))
    }

    fn write(&self, value: u32) {
        // SAFETY: loom reports a concurrent access.
        self.0.with_mut(|cell| unsafe { *cell = value });
    }

    fn read(&self) -> u32 {
        // SAFETY: loom reports a concurrent access.
        self.0.with(|cell| unsafe { *cell })
    }
}

#[test]
fn what_was_written_before_a_signal_is_seen_after_the_wait() {
    check(None, || {
        let (flag, abort, payload) = (Flag::local(), Abort::local(), Payload::new());
        let waiter = thread::spawn({
            let (flag, abort, payload) = (flag.clone(), abort.clone(), payload.clone());
            move || {
                wait(&flag, 1, &abort);
                payload.read()
            }
        });
        payload.write(7);
        flag.signal(1);
        assert_eq!(waiter.join().unwrap(), 7);
    });
}

#[test]
fn what_was_written_before_an_abort_is_seen_by_who_sees_it() {
    check(None, || {
        let (abort, payload) = (Abort::local(), Payload::new());
        let watcher = thread::spawn({
            let (abort, payload) = (abort.clone(), payload.clone());
            move || {
                abort.wait(never()).unwrap();
                payload.read()
            }
        });
        payload.write(7);
        abort.set(1);
        assert_eq!(watcher.join().unwrap(), 7);
    });
}

/// A buffer goes to and fro: the second write of the payload must come after its read on the other side.
#[test]
fn a_payload_is_reused() {
    check(Some(3), || {
        let (full, empty, abort, payload) = (Flag::local(), Flag::local(), Abort::local(), Payload::new());
        let reader = thread::spawn({
            let (full, empty, abort, payload) = (full.clone(), empty.clone(), abort.clone(), payload.clone());
            move || {
                for turn in 1..=2 {
                    wait(&full, turn, &abort);
                    assert_eq!(payload.read(), turn);
                    empty.signal(turn);
                }
            }
        });
        for turn in 1..=2 {
            wait(&empty, turn - 1, &abort);
            payload.write(turn);
            full.signal(turn);
        }
        reader.join().unwrap();
    });
}

/// Sleeps on the bell until `ready`.
fn listen(bell: &Bell, abort: &Abort, ready: impl Fn() -> bool) {
    while !ready() {
        bell.sleep(abort, || (!ready()).then(never));
    }
}

#[test]
fn a_bell_wakes_its_owner() {
    check(None, || {
        let (bell, flag, abort) = (Bell::local(), Flag::local(), Abort::local());
        let owner = thread::spawn({
            let (bell, flag, abort) = (bell.clone(), flag.clone(), abort.clone());
            move || listen(&bell, &abort, || flag.reached(1))
        });
        flag.store(1);
        bell.ring();
        owner.join().unwrap();
    });
}

/// Two ringers, each with a counter of its own; the owner wants both.
#[test]
fn a_bell_with_two_ringers() {
    check(Some(3), || {
        let (bell, abort) = (Bell::local(), Abort::local());
        let flags = [Flag::local(), Flag::local()];
        let ringers = flags.clone().map(|flag| {
            let bell = bell.clone();
            thread::spawn(move || {
                flag.store(1);
                bell.ring();
            })
        });
        listen(&bell, &abort, || flags.iter().all(|flag| flag.reached(1)));
        for ringer in ringers {
            ringer.join().unwrap();
        }
    });
}

/// Two ranks that hand a counter to and fro, each with its own bell.
#[test]
fn two_bells() {
    check(Some(3), || {
        let (bells, flags, abort) =
            ([Bell::local(), Bell::local()], [Flag::local(), Flag::local()], Abort::local());
        let other = thread::spawn({
            let (bells, flags, abort) = (bells.clone(), flags.clone(), abort.clone());
            move || {
                listen(&bells[1], &abort, || flags[0].reached(1));
                flags[1].store(1);
                bells[0].ring();
            }
        });
        flags[0].store(1);
        bells[1].ring();
        listen(&bells[0], &abort, || flags[1].reached(1));
        other.join().unwrap();
    });
}

/// One thread of the owner sleeps; another one looks, in vain, for something that the sleeper did not look for. Who
/// stores it afterwards wakes the sleeper, which looks for both from then on.
#[test]
fn a_bell_and_a_late_look() {
    check(Some(2), || {
        let (bell, abort, flag) = (Bell::local(), Abort::local(), Flag::local());
        let wanted = Arc::new(loom::sync::Mutex::new(false));
        let sleeper = thread::spawn({
            let (bell, abort, flag, wanted) = (bell.clone(), abort.clone(), flag.clone(), wanted.clone());
            move || {
                let done = || *wanted.lock().unwrap() && flag.reached(1);
                listen(&bell, &abort, done);
            }
        });
        let poster = thread::spawn({
            let (bell, flag, wanted) = (bell.clone(), flag.clone(), wanted.clone());
            move || {
                let mut wanted = wanted.lock().unwrap();
                *wanted = true;
                // What the poster finds itself it tells the sleeper.
                if flag.reached(1) {
                    drop(wanted);
                    bell.ring();
                }
            }
        });
        flag.store(1);
        bell.ring();
        poster.join().unwrap();
        sleeper.join().unwrap();
    });
}

#[test]
fn an_abort_ends_the_sleep_on_a_bell() {
    check(None, || {
        let (bell, abort) = (Bell::local(), Abort::local());
        let owner = thread::spawn({
            let (bell, abort) = (bell.clone(), abort.clone());
            move || {
                while !abort.is_set() {
                    bell.sleep(&abort, || Some(never()));
                }
            }
        });
        abort.set(5);
        owner.join().unwrap();
    });
}

/// What ranks of a collective share: progress lines, slots of two halves, and where each rank is.
#[derive(Clone)]
struct Rank {
    lines: [Flag; 4],
    halves: [Arc<Payload>; 2],
    /// 2 k + 1 inside operation k, 2 k + 2 after it.
    inside: Flag,
}

/// The counter of an operation at a tick.
fn value(number: u32, tick: u32) -> u32 {
    number << 20 | tick
}

/// The tick of a rank that has left a cancelled operation.
const END: u32 = (1 << 20) - 1;

impl Rank {
    fn new() -> Self {
        Self {
            lines: std::array::from_fn(|_| Flag::local()),
            halves: std::array::from_fn(|_| Payload::new()),
            inside: Flag::local(),
        }
    }

    fn line(&self, number: u32) -> &Flag {
        &self.lines[number as usize % 4]
    }

    fn half(&self, number: u32) -> &Payload {
        &self.halves[number as usize % 2]
    }

    /// Waits until this rank has signalled the last tick of the operation before.
    fn wait_for_previous(&self, number: u32, abort: &Abort) {
        if number > 1 {
            wait(self.line(number - 1), value(number - 1, 1), abort);
        }
    }

    /// Fills the slot and says so.
    fn publish(&self, number: u32) {
        self.half(number).write(number);
        self.line(number).signal(value(number, 1));
    }

    /// Waits for what this rank has published, and reads it.
    fn take(&self, number: u32, abort: &Abort) {
        wait(self.line(number), value(number, 1), abort);
        assert_eq!(self.half(number).read(), number);
    }
}

/// Two threads, each with the group's abort word, itself and the other.
fn two_ranks(first: fn(&Abort, &Rank, &Rank), second: fn(&Abort, &Rank, &Rank)) {
    let (abort, one, two) = (Abort::local(), Rank::new(), Rank::new());
    let other = thread::spawn({
        let (abort, one, two) = (abort.clone(), one.clone(), two.clone());
        move || second(&abort, &two, &one)
    });
    first(&abort, &one, &two);
    other.join().unwrap();
}

/// Three operations of one round in which both ranks give and take: the third writes the half of the first again.
#[test]
fn operations_take_turns_with_the_halves_of_slots() {
    fn exchange(abort: &Abort, mine: &Rank, theirs: &Rank) {
        for number in 1..=3 {
            theirs.wait_for_previous(number, abort);
            mine.publish(number);
            theirs.take(number, abort);
        }
    }
    check(Some(3), || two_ranks(exchange, exchange));
}

fn give(abort: &Abort, mine: &Rank, theirs: &Rank) {
    for number in 1..=3 {
        theirs.wait_for_previous(number, abort);
        mine.publish(number);
    }
}

fn get(abort: &Abort, mine: &Rank, theirs: &Rank) {
    for number in 1..=3 {
        mine.line(number).signal(value(number, 1));
        theirs.wait_for_previous(number, abort);
        theirs.take(number, abort);
    }
}

/// Bytes go one way only: who gives runs ahead as far as it may, while the other still reads.
#[test]
fn who_gives_runs_ahead() {
    check(Some(3), || two_ranks(give, get));
}

/// The same without the wait for the operation before: loom finds the half overwritten before or while it is read.
#[test]
#[should_panic]
fn who_runs_too_far_ahead_is_seen() {
    fn give_at_once(_: &Abort, mine: &Rank, _: &Rank) {
        (1..=3).for_each(|number| mine.publish(number));
    }
    check(Some(3), || two_ranks(give_at_once, get));
}

/// One rank cancels and moves its counter to the end, while the other waits for it: that wait may end by either, and the
/// word says what it was.
#[test]
fn a_jump_is_not_taken_for_success() {
    check(None, || {
        let (group, verdict, line) = (Abort::local(), Abort::local(), Flag::local());
        let waiter = thread::spawn({
            let (stop, line) = (verdict.or(&group), line.clone());
            move || match line.wait(value(1, 1), &stop, never()) {
                Ok(()) => {
                    assert_eq!(line.load() & END, END);
                    assert!(stop.is_set(), "the counter has jumped, and nobody has cancelled");
                }
                Err(error) => assert!(matches!(error, Error::Aborted), "{error}"),
            }
        });
        verdict.set(9);
        line.signal(value(1, END));
        waiter.join().unwrap();
        assert_eq!((verdict.code(), group.code()), (Some(9), None));
    });
}

/// A rank publishes, gives up at once, leaves, and writes its slot again as soon as the other is not inside any more. The
/// other either sees that the operation was cancelled before it reads, or it is waited for.
#[test]
fn a_slot_is_not_read_after_its_operation_was_left() {
    check(Some(3), || {
        let (verdict, one, two) = (Abort::local(), Rank::new(), Rank::new());
        let other = thread::spawn({
            let (verdict, one, two) = (verdict.clone(), one.clone(), two.clone());
            move || {
                let perform = || {
                    two.line(1).signal(value(1, 1));
                    if verdict.is_set() || one.line(1).wait(value(1, 1), &verdict, never()).is_err() {
                        return None;
                    }
                    if one.line(1).load() & END == END {
                        assert!(verdict.is_set());
                        return None;
                    }
                    let read = one.half(1).read();
                    (!verdict.is_set()).then_some(read)
                };
                two.inside.store(3);
                let result = perform();
                two.line(1).signal(value(1, END));
                two.inside.store(4);
                result
            }
        });
        one.inside.store(3);
        one.publish(1);
        verdict.set(9);
        one.line(1).signal(value(1, END));
        one.inside.store(4);
        while two.inside.load() == 3 {
            thread::yield_now();
        }
        one.half(3).write(3);
        assert!(matches!(other.join().unwrap(), None | Some(1)));
    });
}

/// A value that is set at any moment of a wait is seen: nobody sleeps through it. loom's clock stands still, so a wake-up
/// that is lost is a deadlock, which it reports.
#[test]
fn a_latch_is_never_slept_through() {
    check(None, || {
        let latch = Arc::new(Latch::new());
        let waiter = {
            let latch = latch.clone();
            thread::spawn(move || latch.wait(never()))
        };
        let called = latch.on_set(Box::new(|value| assert_eq!(*value, 7)));
        assert!(called.is_none());
        for callback in latch.set(7) {
            callback(&7);
        }
        assert!(latch.set(8).is_empty());
        assert_eq!(waiter.join().unwrap(), Some(7));
        assert_eq!(latch.get(), Some(7));
    });
}
