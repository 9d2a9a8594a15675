//! Signal and wait on a queue.

use std::time::Duration;

use tensorwire_device::flag::{LINE, Writer};
use tensorwire_device::{Abort, Caching, Deadline, DeviceId, Error, Flag, Span};

use super::Subject;
use crate::process::soon;

/// Flags live in host memory, whatever the device.
pub(super) fn lines(count: usize) -> Vec<Span> {
    use tensorwire_device::Device;
    let span = Span::whole(tensorwire_device::host::Host.alloc(count * LINE).unwrap());
    (0..count).map(|index| span.slice(index * LINE..(index + 1) * LINE).unwrap()).collect()
}

pub fn a_signal_ends_a_wait_of_another_thread(subject: &Subject) {
    let lines = lines(3);
    let flag = |index: usize| Flag::new(&lines[index], Writer::Host).unwrap();
    let (ping, pong, abort) = (flag(0), flag(1), Abort::new(&lines[2]).unwrap());
    let data = subject.span(&[0; 4096]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut queue = subject.device.queue().unwrap();
            let (mut source, mut seen) = ([0; 4096], [0; 4096]);
            for turn in 1..=200u32 {
                queue.wait(&ping, turn, &abort, soon()).unwrap();
                queue.finish(&abort, soon()).unwrap();
                data.read(0, &mut seen).unwrap();
                assert!(seen.iter().all(|&byte| byte == turn as u8), "turn {turn}");
                source.fill(!(turn as u8));
                queue.copy(data.view(), subject.span(&source).view(), Caching::Keep).unwrap();
                queue.signal(&pong, turn).unwrap();
            }
        });
        let mut queue = subject.device.queue().unwrap();
        let mut seen = [0; 4096];
        for turn in 1..=200u32 {
            queue.copy(data.view(), subject.span(&[turn as u8; 4096]).view(), Caching::Keep).unwrap();
            queue.signal(&ping, turn).unwrap();
            queue.wait(&pong, turn, &abort, soon()).unwrap();
            queue.finish(&abort, soon()).unwrap();
            data.read(0, &mut seen).unwrap();
            assert!(seen.iter().all(|&byte| byte == !(turn as u8)), "turn {turn}");
        }
    });
}

pub fn a_deadline_ends_a_wait(subject: &Subject) {
    for writer in [Writer::Host, Writer::Device] {
        for timeout in [Duration::ZERO, Duration::from_millis(1), Duration::from_millis(30)] {
            // Of its own: a wait that was queued on a device and has ended without a signal leaves them set.
            let lines = lines(2);
            let (flag, abort) = (Flag::new(&lines[0], writer).unwrap(), Abort::new(&lines[1]).unwrap());
            let mut queue = subject.device.queue().unwrap();
            let deadline = Deadline::after(timeout);
            let ended = queue.wait(&flag, 1, &abort, deadline).and_then(|()| queue.finish(&abort, deadline));
            assert!(matches!(ended, Err(Error::TimedOut)), "{ended:?}");
            assert!(deadline.passed());
            // What is there already needs no time.
            queue.wait(&flag, 0, &Abort::local(), deadline).unwrap();
        }
    }
    let abort = Abort::new(&lines(1)[0]).unwrap();
    assert!(matches!(abort.wait(Deadline::after(Duration::from_millis(1))), Err(Error::TimedOut)));
    // The longest time-out is no overflow.
    assert!(Deadline::after(Duration::MAX).remaining() > Some(Duration::from_secs(3_000_000_000)));
}

pub fn an_abort_ends_a_wait(subject: &Subject) {
    for writer in [Writer::Host, Writer::Device] {
        let lines = lines(2);
        let (flag, abort) = (Flag::new(&lines[0], writer).unwrap(), Abort::new(&lines[1]).unwrap());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let mut queue = subject.device.queue().unwrap();
                let forever = Deadline::after(Duration::MAX);
                queue.wait(&flag, 1, &abort, forever).and_then(|()| queue.finish(&abort, forever))
            });
            let watcher = scope.spawn(|| abort.wait(soon()));
            std::thread::sleep(Duration::from_millis(5));
            assert_eq!(abort.set(42), 42);
            assert!(matches!(waiter.join().unwrap(), Err(Error::Aborted)));
            assert!(matches!(watcher.join().unwrap(), Ok(42)));
        });
        // The first code stays. What arrives later still counts, unless it may not be what it seems: a device's flags
        // are advanced to let go who waits for them.
        assert_eq!((abort.set(7), abort.code(), abort.is_set()), (42, Some(42), true));
        flag.signal(1);
        let late = subject.device.queue().unwrap().wait(&flag, 1, &abort, soon());
        let counts = subject.device.id() == DeviceId::Host;
        assert!(if counts { late.is_ok() } else { matches!(late, Err(Error::Aborted)) }, "{late:?}");
    }
}

/// Some are there before, the others come one by one, in another order.
pub fn a_wait_for_several_flags_ends_with_the_last(subject: &Subject) {
    let lines = lines(8);
    let abort = Abort::new(&lines[7]).unwrap();
    let flags: Vec<_> = lines[..7].iter().map(|line| Flag::new(line, Writer::Host).unwrap()).collect();
    let (src, dst) = (subject.span(&[0; 4096]), subject.span(&[0; 4096]));
    for turn in 1..=50u32 {
        let (first, last) = (turn as usize % 7, (turn as usize + 6) % 7);
        flags[first].signal(turn);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The data is written behind all signals but one.
                for step in 1..6 {
                    flags[(first + step) % 7].signal(turn);
                }
                src.write(0, &[turn as u8; 4096]).unwrap();
                flags[last].signal(turn);
            });
            let mut queue = subject.device.queue().unwrap();
            let all: Vec<_> = flags.iter().map(|flag| (flag, turn)).collect();
            queue.wait_all(&all, &abort, soon()).unwrap();
            queue.copy(dst.view(), src.view(), Caching::Keep).unwrap();
            queue.finish(&abort, soon()).unwrap();
            assert!(dst.to_vec().unwrap() == [turn as u8; 4096], "turn {turn}");
            // All are there: nothing is waited for.
            queue.wait_all(&all, &Abort::local(), Deadline::after(Duration::ZERO)).unwrap();
            queue.wait_all(&[], &Abort::local(), Deadline::after(Duration::ZERO)).unwrap();
        });
    }
}

/// Also if only one is missing. Of two abort words, the second is not the wait's to set.
pub fn a_deadline_ends_a_wait_for_several_flags(subject: &Subject) {
    for missing in 0..3 {
        let lines = lines(5);
        let flags: Vec<_> = lines[..3].iter().map(|line| Flag::new(line, Writer::Host).unwrap()).collect();
        let [verdict, group] = [&lines[3], &lines[4]].map(|line| Abort::new(line).unwrap());
        flags.iter().enumerate().filter(|(i, _)| *i != missing).for_each(|(_, flag)| flag.signal(1));
        let all: Vec<_> = flags.iter().map(|flag| (flag, 1)).collect();
        let mut queue = subject.device.queue().unwrap();
        let (abort, deadline) = (verdict.or(&group), Deadline::after(Duration::from_millis(10)));
        let ended = queue.wait_all(&all, &abort, deadline).and_then(|()| queue.finish(&abort, soon()));
        assert!(matches!(ended, Err(Error::TimedOut)), "{ended:?}");
        assert!(verdict.code().is_none_or(|code| code == Abort::LATE) && !group.is_set());
    }
}

pub fn a_flag_needs_its_own_aligned_line(_: &Subject) {
    let span = Span::whole(lines(2)[0].region().clone());
    for range in [0..63, 1..65, 32..96, 64..64] {
        let part = span.slice(range.clone()).unwrap();
        let error = Flag::new(&part, Writer::Host).unwrap_err();
        assert!(
            matches!(error, Error::Misuse(_)) && error.to_string().contains("64 bytes"),
            "{range:?}: {error}"
        );
        assert!(Abort::new(&part).is_err());
    }
    assert!(Flag::new(&span.slice(64..128).unwrap(), Writer::Host).is_ok());
}
