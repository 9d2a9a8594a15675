//! An operation in flight under loom: `Work` and the state of a started receive, the files that run, over loom's locks and
//! atomics. A wait that sleeps through the end shows as a deadlock. An error that nobody hears of, or a message that is lost,
//! is a failed assertion.
//!
//! What stands around them is small and made here: the hook that a wait asks between its slices, the list of errors that
//! nobody was told, and the engine that a receive is withdrawn from.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p tensorwire-device --release --test loom_work`

#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::panic, dead_code, unreachable_pub)]

#[path = "../../tensorwire/src/error.rs"]
mod error;

/// The slices of a wait. loom has no clock: the first slice has passed when it begins, the second one never ends.
mod interrupt {
    use std::time::Instant;

    use tensorwire_device::Deadline;

    use crate::error::Result;

    pub(crate) struct Pace(bool);

    impl Pace {
        pub(crate) fn since(_: Instant) -> Self {
            Self(true)
        }

        pub(crate) fn until(&self, deadline: Deadline) -> Deadline {
            if self.0 { Deadline::at(Instant::now()) } else { deadline }
        }

        pub(crate) fn look(&mut self, _: Instant) -> Result<()> {
            self.0 = false;
            Ok(())
        }
    }
}

mod shm {
    pub(crate) mod control {
        use crate::error::Error;

        #[derive(Debug, Clone, Copy)]
        pub(crate) struct Why;

        impl Why {
            pub(crate) fn tell(self, error: Error) -> Error {
                error
            }
        }
    }
}

#[path = "../../tensorwire/src/collective/p2p/started.rs"]
mod started;
#[path = "../../tensorwire/src/collective/work.rs"]
mod work;

mod collective {
    pub(crate) use crate::work;
}

/// The errors of queued operations that nobody was told.
mod flight {
    use loom::sync::Mutex;

    use crate::error::Error;

    #[derive(Debug)]
    pub(crate) struct Flights(Mutex<(u64, Vec<u64>)>);

    impl Flights {
        pub(crate) fn new() -> Self {
            Self(Mutex::new((0, Vec::new())))
        }

        /// A wait for a queued operation looks again and again.
        pub(crate) fn look(&self) {
            loom::thread::yield_now();
        }

        pub(crate) fn unasked(&self, _: &str, _: Error) -> u64 {
            let mut state = self.0.lock().unwrap();
            state.0 += 1;
            let number = state.0;
            state.1.push(number);
            number
        }

        pub(crate) fn unheard(&self, what: &str, error: Error, number: Option<u64>) {
            if number.is_none() {
                self.unasked(what, error);
            }
        }

        pub(crate) fn heard(&self, number: u64) {
            self.0.lock().unwrap().1.retain(|other| *other != number);
        }

        /// How many the next call would tell.
        pub(crate) fn untold(&self) -> usize {
            self.0.lock().unwrap().1.len()
        }
    }
}

mod operation {
    /// A message, of which this is all that matters here.
    #[derive(Debug)]
    pub(crate) struct Arrival {
        pub(crate) from: usize,
    }
}

/// Where messages lie that go to the next receive.
mod engine {
    use loom::sync::Mutex;

    use crate::started::Started;
    use crate::work::call_all;

    pub(crate) struct Engine {
        pub(crate) put_back: Mutex<usize>,
    }

    impl Engine {
        pub(crate) fn withdraw(&self, started: &Started) -> bool {
            let callbacks = {
                let mut put_back = self.put_back.lock().unwrap();
                if started.take_back().is_none() {
                    return false;
                }
                *put_back += 1;
                started.left()
            };
            call_all(callbacks);
            true
        }

        pub(crate) fn alone<T>(&self, work: impl FnOnce() -> T) -> T {
            let _alone = self.put_back.lock().unwrap();
            work()
        }
    }
}

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use engine::Engine;
use error::Error;
use flight::Flights;
use loom::sync::Notify;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use operation::Arrival;
use started::Started;
use tensorwire_device::{Abort, Caching, Deadline, Dtype, Flag, Layout, Mark, Queue, ReduceOp, View};
use work::{Completion, Withdraw as _, Work};

/// Every way in which the threads of `body` can meet, with at most `preemptions` switches that nobody asked for.
fn check(preemptions: Option<usize>, body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.check(body);
}

fn failed() -> error::Result<()> {
    Err(Error::Aborted("as a test wants it".into()))
}

/// Each waits a slice, lets go of the lock to ask its hook, and sleeps. The end comes at any moment of that.
#[test]
fn no_wait_sleeps_through_the_end() {
    check(Some(3), || {
        let (work, completion) = Work::pending("a test");
        let waiters = [work.clone(), work].map(|work| thread::spawn(move || work.wait()));
        completion.finish(Ok(()), Some(Duration::ZERO));
        for waiter in waiters {
            waiter.join().unwrap().unwrap();
        }
    });
}

/// Whoever runs the operation is gone.
#[test]
fn a_work_that_is_thrown_away_ends() {
    check(None, || {
        let (work, completion) = Work::pending("a test");
        let waiter = thread::spawn(move || work.wait());
        drop(completion);
        assert!(matches!(waiter.join().unwrap(), Err(Error::Aborted(_))));
    });
}

#[test]
fn a_callback_is_called_once() {
    check(None, || {
        let (work, completion) = Work::pending("a test");
        let called = Arc::new(AtomicUsize::new(0));
        let other = thread::spawn({
            let (work, called) = (work.clone(), called.clone());
            move || {
                work.on_done(move |result| {
                    assert!(result.is_ok());
                    called.fetch_add(1, Ordering::Relaxed);
                });
            }
        });
        completion.finish(Ok(()), None);
        other.join().unwrap();
        assert_eq!(called.load(Ordering::Relaxed), 1);
        assert!(work.is_done() && !work.has_failed());
    });
}

/// A task that sleeps until it is woken.
struct Sleeper(Notify);

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.0.notify();
    }
}

#[test]
fn a_task_that_awaits_it_is_woken() {
    check(None, || {
        let (mut work, completion) = Work::pending("a test");
        let runtime = thread::spawn(move || {
            let sleeper = Arc::new(Sleeper(Notify::new()));
            let waker = Waker::from(sleeper.clone());
            loop {
                match Pin::new(&mut work).poll(&mut Context::from_waker(&waker)) {
                    Poll::Ready(result) => break result,
                    Poll::Pending => sleeper.0.wait(),
                }
            }
        });
        completion.finish(Ok(()), None);
        runtime.join().unwrap().unwrap();
    });
}

/// A queue that follows marks, and does nothing else.
#[derive(Debug)]
struct Follower;

impl Queue for Follower {
    fn follow(&mut self, mark: &Mark, _: &Abort, _: Deadline) -> tensorwire_device::Result<()> {
        assert!(mark.is_passed()?);
        Ok(())
    }

    fn mark(&mut self) -> tensorwire_device::Result<Mark> {
        Ok(Mark::passed())
    }

    fn copy(&mut self, _: View<'_>, _: View<'_>, _: Caching) -> tensorwire_device::Result<()> {
        unreachable!()
    }

    fn copy_strided(
        &mut self,
        _: (View<'_>, &Layout),
        _: (View<'_>, &Layout),
    ) -> tensorwire_device::Result<()> {
        unreachable!()
    }

    fn reduce(
        &mut self,
        _: ReduceOp,
        _: Dtype,
        _: &[View<'_>],
        _: &[View<'_>],
        _: Caching,
    ) -> tensorwire_device::Result<()> {
        unreachable!()
    }

    fn signal(&mut self, _: &Flag, _: u32) -> tensorwire_device::Result<()> {
        unreachable!()
    }

    fn wait(&mut self, _: &Flag, _: u32, _: &Abort, _: Deadline) -> tensorwire_device::Result<()> {
        unreachable!()
    }

    fn finish(&mut self, _: &Abort, _: Deadline) -> tensorwire_device::Result<()> {
        unreachable!()
    }
}

/// A queue that follows a work goes on when the steps are queued, or when they never will be. So does a callback.
#[test]
fn who_waits_for_the_steps_goes_on() {
    for queued in [true, false] {
        check(Some(3), move || {
            let flights = Arc::new(Flights::new());
            let (work, completion) = Work::queued("a test", &flights);
            let called = Arc::new(AtomicUsize::new(0));
            let follower = thread::spawn({
                let (work, called) = (work.clone(), called.clone());
                move || {
                    work.on_queued(move || {
                        called.fetch_add(1, Ordering::Relaxed);
                    });
                    work.wait_on(&mut Follower)
                }
            });
            if queued {
                completion.queued(&Some(Mark::passed()), 1);
            }
            completion.finish(if queued { Ok(()) } else { failed() }, None);
            assert_eq!(follower.join().unwrap().is_ok(), queued);
            assert_eq!((called.load(Ordering::Relaxed), work.has_failed()), (1, !queued));
        });
    }
}

/// Threads that have to do with a queued operation that fails; gives how many errors the next call would tell.
fn errors(mine: impl FnOnce(Work), others: impl FnOnce(Work) + Send + 'static) -> usize {
    let flights = Arc::new(Flights::new());
    let (work, completion) = Work::queued("a test", &flights);
    let other = thread::spawn({
        let work = work.clone();
        move || others(work)
    });
    let end = thread::spawn(move || Completion::finish(completion, failed(), None));
    mine(work);
    other.join().unwrap();
    end.join().unwrap();
    flights.untold()
}

/// All handles go while the operation fails: exactly one error is told, whether it was to be told early or not.
#[test]
fn an_error_that_nobody_asked_for_is_told_once() {
    check(Some(2), || assert_eq!(errors(drop, drop), 1));
    check(Some(2), || {
        let both = |work: Work| work.leave_unattended();
        assert_eq!(errors(both, both), 1);
    });
}

/// Somebody asks after all: nobody else is told.
#[test]
fn an_error_that_somebody_asked_for_is_not_told_again() {
    check(Some(2), || {
        let ask = |work: Work| assert!(work.wait().is_err());
        assert_eq!(errors(|work| work.leave_unattended(), ask), 0);
    });
}

/// A receive, and the engine that has its message.
fn receive() -> (Arc<Engine>, Arc<Started>, Work, Completion) {
    let engine = Arc::new(Engine { put_back: loom::sync::Mutex::new(0) });
    let started = Started::new(&engine);
    let (work, completion) = Work::receive("recv", started.clone());
    (engine, started, work, completion)
}

/// The message comes.
fn arrive(engine: &Engine, started: &Started, completion: Completion) {
    engine.alone(|| started.arrived(Arrival { from: 1 }));
    completion.finish(Ok(()), None);
}

/// One thread asks for the result, another one withdraws: the message is told or put back, and never both or neither.
#[test]
fn a_receive_is_told_or_withdrawn() {
    check(Some(3), || {
        let (engine, started, work, completion) = receive();
        let asks = thread::spawn({
            let work = work.clone();
            move || work.wait()
        });
        let withdraws = thread::spawn({
            let work = work.clone();
            move || work.withdraw()
        });
        arrive(&engine, &started, completion);
        let (told, withdrawn) = (asks.join().unwrap(), withdraws.join().unwrap());
        assert_eq!(told.is_err(), withdrawn, "{told:?}");
        drop(work);
        assert_eq!(*engine.put_back.lock().unwrap(), usize::from(withdrawn));
        assert!(started.is_settled());
    });
}

/// The last handles go while the message comes. It is put back, or had not come when they went.
#[test]
fn a_receive_goes_with_its_last_handle() {
    check(Some(3), || {
        let (engine, started, work, completion) = receive();
        let settled = Arc::new(AtomicUsize::new(0));
        let other = thread::spawn({
            let (work, settled) = (work.clone(), settled.clone());
            move || {
                work.on_settled(move || {
                    settled.fetch_add(1, Ordering::Relaxed);
                });
                drop(work);
            }
        });
        let end = thread::spawn({
            let (engine, started) = (engine.clone(), started.clone());
            move || arrive(&engine, &started, completion)
        });
        drop(work);
        other.join().unwrap();
        end.join().unwrap();
        assert!(started.is_settled());
        assert_eq!(settled.load(Ordering::Relaxed), 1);
        assert!(*engine.put_back.lock().unwrap() <= 1);
    });
}
