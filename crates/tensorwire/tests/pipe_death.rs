//! One end of a pipe is killed, or stopped for a while, at each of its numbered steps, on one host and on two. The other end
//! hears it or goes on; nobody hangs, and nothing stays lent. A connection that is given up keeps nobody out.
#![allow(clippy::unwrap_used, clippy::panic)]

mod messages;
mod ranks;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use messages::fill;
use ranks::{LONG, Process, Rank, Ranks, await_parent, context, context_on, say};
use rustix::process::{Signal, getpid, kill_process};
use tensorwire::device::threads::{self, Settings};
use tensorwire::pipe::{Listener, Message, Pipe, hooks};
use tensorwire::{Context, Deadline, DeviceId, Dtype, Error, PeerFaultKind, Span, Tensor};

const ADDRESS: &str = "TEST_OF_PIPES_ADDRESS";
const STEP: &str = "TEST_OF_PIPES_STEP";
const SIGNAL: &str = "TEST_OF_PIPES_SIGNAL";
const LARGE: usize = 2 << 20;
/// Messages that one end sends.
const COUNT: usize = 2;

fn by() -> Deadline {
    Deadline::after(LONG)
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_millis(200))
}

/// Gives this process a GPU, which is a thread.
fn with_gpu() {
    let _ = threads::install(Settings::default());
}

/// One with everything: a rest of the description, what is beside it, what is lent, of the host and of a GPU, and what follows.
fn message(context: &Context) -> Message {
    let span = Span::whole(context.host().alloc(LARGE).unwrap()).slice(0..LARGE).unwrap();
    span.write(0, &fill(LARGE, 1)).unwrap();
    let pool = context.pool(&DeviceId::Gpu(threads::uuid(0))).unwrap();
    let on_gpu = Span::whole(pool.alloc(LARGE).unwrap()).slice(0..LARGE).unwrap();
    on_gpu.write(0, &fill(LARGE, 5)).unwrap();
    Message::new()
        .with_metadata(fill(2000, 2))
        .with_payload(&fill(100, 3))
        .unwrap()
        .with_tensor(&Tensor::flat(span, Dtype::U8).unwrap())
        .with_tensor(&Tensor::private(&fill(LARGE, 4)).unwrap())
        .with_tensor(&Tensor::flat(on_gpu, Dtype::U8).unwrap())
}

fn check(message: &Message) {
    assert!(message.metadata() == fill(2000, 2));
    let bytes = |tensor: &Tensor| tensor.to_vec::<u8>().unwrap();
    assert!(bytes(&message.payloads()[0]) == fill(100, 3));
    assert!(bytes(&message.tensors()[0]) == fill(LARGE, 1) && bytes(&message.tensors()[1]) == fill(LARGE, 4));
    assert!(bytes(&message.tensors()[2]) == fill(LARGE, 5));
    assert_eq!(message.tensors()[2].span().device(), DeviceId::Gpu(threads::uuid(0)));
}

/// Receives until the end. A wait that is over too soon is counted, and nothing is lost by it.
fn receive(pipe: &Pipe, waits: &AtomicUsize) -> Result<usize, Error> {
    let mut got = 0;
    loop {
        let mut incoming = match again(waits, || pipe.next().deadline(soon()).wait())? {
            Some(incoming) => incoming,
            None => return Ok(got),
        };
        check(&again(waits, || incoming.read().deadline(soon()).wait())?);
        got += 1;
    }
}

/// Sends some, and the end.
fn send(context: &Context, pipe: &Pipe, waits: &AtomicUsize) -> Result<usize, Error> {
    let message = message(context);
    for _ in 0..COUNT {
        again(waits, || pipe.send(&message).delivered().deadline(soon()).wait())?;
    }
    pipe.finish()?;
    // The other end has left when it has all.
    pipe.recv().deadline(by()).wait().map(|_| COUNT)
}

fn again<T>(waits: &AtomicUsize, mut wait: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    loop {
        match wait() {
            Err(error) if error.is_timeout() => drop(waits.fetch_add(1, Ordering::SeqCst)),
            other => return other,
        }
    }
}

/// What the process does that is killed or stopped.
fn victim() {
    with_gpu();
    let context = Context::from_env().unwrap();
    let (step, stops) = (std::env::var(STEP).unwrap(), std::env::var(SIGNAL).unwrap() == "stop");
    let (met, own) = (AtomicBool::new(false), step.clone());
    hooks::set(move |at| {
        if at == own && !met.swap(true, Ordering::SeqCst) {
            say("is there");
            kill_process(getpid(), if stops { Signal::STOP } else { Signal::KILL }).unwrap();
        }
    });
    if step.starts_with("listen") {
        let listener = Listener::local(&context).unwrap();
        say(listener.address());
        // Whoever connects may give a connection up and make another one, whatever this end knows of it.
        while receive_all(&listener.accept(by()).unwrap()) == 0 {}
    } else {
        let pipe = Pipe::connect(&context, &std::env::var(ADDRESS).unwrap(), by()).unwrap();
        if step.starts_with("send") {
            let message = message(&context);
            for _ in 0..COUNT {
                pipe.send(&message).delivered().deadline(by()).wait().unwrap();
            }
            pipe.finish().unwrap();
        } else {
            receive_all(&pipe);
        }
    }
    say("done");
    await_parent();
}

/// Receives until the other end sends no more, or has left; gives how many messages there were.
fn receive_all(pipe: &Pipe) -> usize {
    let mut got = 0;
    loop {
        match pipe.recv().deadline(by()).wait() {
            Ok(Some(message)) => {
                check(&message);
                got += 1;
            }
            Ok(None) => return got,
            Err(error) => assert!(error.to_string().contains("taken the message back"), "{error}"),
        }
    }
}

fn accept(listener: &Listener) -> Pipe {
    listener.accept(by()).unwrap()
}

/// What the other process does meanwhile, as one that sends or as one that receives.
fn survive(context: &Context, step: &str, pipe: &Pipe, waits: &AtomicUsize) -> Result<usize, Error> {
    match step.starts_with("send") {
        true => receive(pipe, waits),
        false => send(context, pipe, waits),
    }
}

fn settles(what: impl Fn() -> bool) {
    let end = Instant::now() + LONG;
    while !what() {
        assert!(Instant::now() < end, "it does not settle");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn at_each_step(test: &str, host: Option<&str>, stops: bool) {
    if Rank::of_this_process().is_some() {
        return victim();
    }
    with_gpu();
    for step in hooks::STEPS {
        let context = host.map_or_else(context, |_| context_on("here"));
        let listener = Listener::local(&context).unwrap();
        let mut ranks = Ranks::start_with(test, 1, |_, mut command| {
            command.env(ADDRESS, listener.address()).env(STEP, step);
            command.env(SIGNAL, if stops { "stop" } else { "kill" });
            host.map(|host| command.env("TENSORWIRE_HOST", host).env("TENSORWIRE_HEARTBEAT", "30"));
            command
        });
        let victim = &mut ranks.ranks[0];
        match stops {
            true => stopped(&context, &listener, step, victim),
            false => killed(&context, &listener, step, victim),
        }
        settles(|| context.lease_stats().unwrap().granted == (0, 0));
        // Others can connect.
        drop(ranks);
        let address = listener.address().to_owned();
        let other = std::thread::spawn(move || Pipe::connect(&ranks::context(), &address, by()).unwrap());
        while accept(&listener).peer().pid != std::process::id() {}
        drop(other.join().unwrap());
    }
}

/// It is killed: that is what everybody hears who has a pipe with it.
fn killed(context: &Arc<Context>, listener: &Listener, step: &str, victim: &mut Process) {
    let pid = victim.pid();
    let says_so = |error: &Error| {
        let text = error.to_string();
        assert!(matches!(error, Error::Peer(fault) if fault.kind == PeerFaultKind::Died), "{step}: {text}");
        assert!(text.contains(&pid.to_string()), "{step}: {text}");
    };
    let pipe = if step.starts_with("listen") {
        let address = victim.hear();
        match Pipe::connect(context, &address, by()) {
            Ok(pipe) => Some(pipe),
            Err(error) => {
                assert!(!error.is_timeout(), "{step}: {error}");
                None
            }
        }
    } else if step.starts_with("connect") {
        assert_eq!(victim.hear(), "is there");
        // It may have been formed by the listener before.
        listener.accept(soon()).map_err(|error| assert!(error.is_timeout(), "{step}: {error}")).ok()
    } else {
        Some(accept(listener))
    };
    if let Some(pipe) = pipe {
        says_so(&survive(context, step, &pipe, &AtomicUsize::new(0)).unwrap_err());
        says_so(&pipe.check().unwrap_err());
        says_so(&pipe.send(&Message::new()).wait().unwrap_err());
        says_so(&pipe.recv().wait().unwrap_err());
    }
}

/// It is stopped, and goes on when somebody has waited in vain.
fn stopped(context: &Arc<Context>, listener: &Listener, step: &str, victim: &mut Process) {
    let waits = AtomicUsize::new(0);
    let address = step.starts_with("listen").then(|| victim.hear());
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let survivor = scope.spawn(|| {
            let pipe = match &address {
                Some(address) => again(&waits, || Pipe::connect(context, address, soon())).unwrap(),
                None => again(&waits, || listener.accept(soon())).unwrap(),
            };
            let result = survive(context, step, &pipe, &waits);
            over.store(true, Ordering::SeqCst);
            result
        });
        assert_eq!(victim.hear(), "is there");
        let before = waits.load(Ordering::SeqCst);
        settles(|| waits.load(Ordering::SeqCst) > before || over.load(Ordering::SeqCst));
        victim.signal(Signal::CONT);
        assert_eq!(survivor.join().unwrap().unwrap(), COUNT, "{step}");
    });
    assert_eq!(victim.hear(), "done");
}

#[test]
fn killed_on_one_host() {
    at_each_step("killed_on_one_host", None, false);
}

#[test]
fn killed_on_another_host() {
    at_each_step("killed_on_another_host", Some("elsewhere"), false);
}

#[test]
fn stopped_on_one_host() {
    at_each_step("stopped_on_one_host", None, true);
}

#[test]
fn stopped_on_another_host() {
    at_each_step("stopped_on_another_host", Some("elsewhere"), true);
}

/// Who gives a connection up says so, also to a listener that does not answer then: it has 16 places, and keeps none of them for
/// those who do not come.
#[test]
fn connections_that_are_given_up_keep_nobody_out() {
    const PLACES: usize = 16;
    const IMPATIENT: &str = "impatient";
    if Rank::of_this_process().is_some() {
        let context = Context::from_env().unwrap();
        let listener = Listener::local(&context).unwrap();
        say(listener.address());
        // Whoever gave up in the last moment has left.
        while !matches!(listener.accept(by()).unwrap().recv().deadline(by()).wait(), Ok(Some(_))) {}
        return say("served");
    }
    for step in ["connect: before its word", "connect: behind its word"] {
        let mut ranks = Ranks::start("connections_that_are_given_up_keep_nobody_out", 1);
        let address = ranks.ranks[0].hear();
        // All are there before the listener is stopped, and go on behind that.
        let (there, stopped) = (Arc::new(Barrier::new(PLACES + 1)), Arc::new(Barrier::new(PLACES + 1)));
        let barriers = (there.clone(), stopped.clone());
        hooks::set(move |at| {
            if at == step && std::thread::current().name() == Some(IMPATIENT) {
                barriers.0.wait();
                barriers.1.wait();
            }
        });
        std::thread::scope(|scope| {
            let connect = || {
                let error = Pipe::connect(&context(), &address, soon()).unwrap_err();
                assert!(error.is_timeout(), "{error}");
            };
            let given_up: Vec<_> = (0..PLACES)
                .map(|_| {
                    std::thread::Builder::new().name(IMPATIENT.into()).spawn_scoped(scope, connect).unwrap()
                })
                .collect();
            there.wait();
            ranks.ranks[0].signal(Signal::STOP);
            stopped.wait();
            given_up.into_iter().for_each(|thread| thread.join().unwrap());
        });
        hooks::set(|_| {});
        ranks.ranks[0].signal(Signal::CONT);
        // It waits half a minute and more for who has left its word.
        let pipe = Pipe::connect(&context(), &address, Deadline::after(LONG / 4)).unwrap();
        pipe.send(&Message::new()).deadline(by()).wait().unwrap();
        assert_eq!(ranks.ranks[0].hear(), "served");
        drop(pipe);
        ranks::all_succeed(ranks.ranks);
    }
}
