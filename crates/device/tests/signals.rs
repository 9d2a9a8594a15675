//! Signals of a profiler, one every half millisecond and without SA_RESTART: no call fails or ends early, and
//! none starts over for ever.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic)]

mod process;

use std::time::Duration;

use process::{Child, GROUP, Home, command, soon};
use tensorwire_device::fd;
use tensorwire_device::host::Host;
use tensorwire_device::{Abort, Deadline, Device, Error, Flag, Id};

#[test]
fn nothing_is_disturbed_by_signals() {
    Child::start(&mut command("interrupted")).succeed();
}

#[test]
fn child() {
    if process::role().is_none() {
        return;
    }
    let before = interrupt_all_the_time();
    let short = || Deadline::after(Duration::from_millis(50));

    // Larger than what can be allocated between two signals.
    assert_eq!(Host.alloc(128 << 20).unwrap().len(), 128 << 20);

    let (flag, abort) = (Flag::local(), Abort::local());
    let deadline = short();
    assert!(matches!(flag.wait(1, &abort, deadline), Err(Error::TimedOut)) && deadline.passed());
    let deadline = short();
    assert!(matches!(abort.wait(deadline), Err(Error::TimedOut)) && deadline.passed());

    for _ in 0..100 {
        let home = Home::open();
        std::thread::scope(|scope| {
            let call =
                || fd::connect(home.listener.address(), GROUP, Id([1; 16]), &home.secret, soon()).unwrap();
            let calling = scope.spawn(call);
            let answered = home.answer().unwrap();
            let called = calling.join().unwrap();
            answered.send(b"x", &[], soon()).unwrap();
            assert_eq!(called.recv(soon()).unwrap().0, b"x");
        });
    }
    let home = Home::open();
    std::thread::scope(|scope| {
        let call = || fd::connect(home.listener.address(), GROUP, Id([1; 16]), &home.secret, soon()).unwrap();
        let calling = scope.spawn(call);
        let answered = home.answer().unwrap();
        let called = calling.join().unwrap();
        let deadline = short();
        assert!(matches!(called.recv(deadline), Err(Error::TimedOut)) && deadline.passed());
        drop(answered);
    });
    assert!(before() > 100, "only {} signals", before());
}

/// Starts the signals; gives a way to ask how many there were.
fn interrupt_all_the_time() -> impl Fn() -> usize {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn count(_: libc::c_int) {
        COUNT.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: all-zero is a valid sigaction (no flags, no mask); the handler only counts.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = count as *const () as usize;
        assert_eq!(libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()), 0);
    }
    let interval = libc::timeval { tv_sec: 0, tv_usec: 500 };
    let timer = libc::itimerval { it_interval: interval, it_value: interval };
    // The timer's signals go to any thread of the process that does not block them; send them to this one.
    // SAFETY: gives the id of this thread, and starts a timer of this process.
    let me = unsafe {
        assert_eq!(libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()), 0);
        libc::pthread_self()
    };
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_micros(500));
            // SAFETY: the thread that runs the test lives as long as the process.
            unsafe { libc::pthread_kill(me, libc::SIGALRM) };
        }
    });
    || COUNT.load(Ordering::Relaxed)
}
