//! Pipes when things go wrong: an end that is killed or stopped, addresses and keys that are not right, strangers at a listener.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "ranks/fork.rs"]
mod forks;
mod messages;
mod net;
mod ranks;

use std::sync::Arc;
use std::time::{Duration, Instant};

use forks::{code_of, fork};
use messages::fill;
use net::namespaces::{Family, Hosts, label};
use net::proxy::{Proxy, Way};
use ranks::random::Random;
use ranks::{LONG, Process, Rank, Ranks, context, context_on, describe, say};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use tensorwire::config::Key;
use tensorwire::lease::hooks;
use tensorwire::pipe::{Channel, Listener, Message, Pipe};
use tensorwire::store::{Store, TcpServer, TcpStore};
use tensorwire::{Config, Context, Deadline, Dtype, Error, PeerFaultKind, Span, Tensor};

const ADDRESS: &str = "TEST_OF_PIPES_ADDRESS";
const HOST: &str = "TENSORWIRE_HOST";
const LARGE: usize = 32 << 20;

fn by() -> Deadline {
    Deadline::after(LONG)
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_millis(300))
}

fn shareable(context: &Context) -> Tensor {
    shareable_bytes(context, &fill(LARGE, 1))
}

fn shareable_bytes(context: &Context, bytes: &[u8]) -> Tensor {
    let span = Span::whole(context.host().alloc(bytes.len()).unwrap()).slice(0..bytes.len()).unwrap();
    span.write(0, bytes).unwrap();
    Tensor::flat(span, Dtype::U8).unwrap()
}

/// What another process does with its end of a pipe.
fn other_end(pipe: &Pipe, role: &str) {
    match role {
        // It waits for a message, and says what it got.
        "reader" => loop {
            match pipe.recv().wait() {
                Ok(Some(message)) => say(&format!("got {}", message.tensors().len())),
                Ok(None) => return say("end"),
                Err(error) => say(&format!("error {error}")),
            }
        },
        // It has the descriptions of two messages and reads neither.
        "slow" => {
            let both = [pipe.next().wait().unwrap(), pipe.next().wait().unwrap()];
            say("has both");
            ranks::await_parent();
            drop(both);
        }
        // It looks at the sender's memory.
        "viewer" => {
            let mut incoming = pipe.next().wait().unwrap().unwrap();
            incoming.view(0).unwrap();
            let message = incoming.read().wait().unwrap();
            say(&format!("sees {}", message.tensors()[0].len()));
            ranks::await_parent();
        }
        // It sends and receives without an end.
        "busy" => {
            let context = context();
            let shared = shareable(&context);
            let own = Tensor::private(&fill(300_000, 1)).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| while pipe.recv().wait().is_ok() {});
                while pipe.send(&Message::new().with_tensor(&own).with_tensor(&shared)).wait().is_ok() {}
            });
        }
        "forks" => forks_with_pipes(pipe),
        "short" => short_of_memory(pipe),
        other => panic!("{other}"),
    }
}

/// Runs this process as the other end, if it is one.
fn is_other_end(role: &str) -> bool {
    if Rank::of_this_process().is_none() {
        return false;
    }
    let context = Context::from_env().unwrap();
    let pipe = Pipe::connect(&context, &std::env::var(ADDRESS).unwrap(), by()).unwrap();
    other_end(&pipe, role);
    true
}

/// Starts a process that is the other end of a pipe, and connects with it.
fn start(test: &str, listener: &Listener, host: Option<&str>) -> (Ranks, Pipe) {
    let ranks = Ranks::start_with(test, 1, |_, mut command| {
        command.env(ADDRESS, listener.address());
        // None of these is about beats, so none may be missed on a busy machine.
        host.map(|host| command.env(HOST, host).env("TENSORWIRE_HEARTBEAT", "30"));
        command
    });
    let pipe = listener.accept(by()).unwrap();
    assert_eq!(pipe.peer().pid, ranks.ranks[0].pid());
    (ranks, pipe)
}

fn settles(what: impl Fn() -> bool) {
    let end = Instant::now() + LONG;
    while !what() {
        assert!(Instant::now() < end, "it does not settle");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn nothing_is_granted(context: &Context) {
    settles(|| context.lease_stats().unwrap().granted == (0, 0));
}

/// The other end has died: every call says so, and names it.
fn all_say_that_it_died(pipe: &Pipe, pid: u32) {
    for error in [
        pipe.send(&Message::new()).wait().unwrap_err(),
        pipe.recv().wait().unwrap_err(),
        pipe.next().wait().unwrap_err(),
        pipe.check().unwrap_err(),
        pipe.finish().unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(matches!(&error, Error::Peer(fault) if fault.kind == PeerFaultKind::Died), "{text}");
        assert!(text.contains("the other end") && text.contains(&pid.to_string()), "{text}");
    }
}

fn on_both(test: &str, role: &str, body: impl Fn(&Arc<Context>, &Pipe, &mut Process)) {
    if is_other_end(role) {
        return;
    }
    for host in [None, Some("elsewhere")] {
        let context = host.map_or_else(context, |_| context_on("here"));
        let listener = Listener::local(&context).unwrap();
        let (mut ranks, pipe) = start(test, &listener, host);
        body(&context, &pipe, &mut ranks.ranks[0]);
        drop(pipe);
        nothing_is_granted(&context);
    }
}

#[test]
fn killed_while_this_end_waits() {
    on_both("killed_while_this_end_waits", "reader", |_, pipe, other| {
        std::thread::scope(|scope| {
            let waiting = [
                scope.spawn(|| pipe.recv().wait().unwrap_err()),
                scope.spawn(|| pipe.next().wait().unwrap_err()),
            ];
            std::thread::sleep(Duration::from_millis(50));
            other.kill();
            for waiting in waiting {
                let error = waiting.join().unwrap();
                assert!(matches!(&error, Error::Peer(fault) if fault.kind == PeerFaultKind::Died), "{error}");
            }
        });
        all_say_that_it_died(pipe, other.pid());
    });
}

#[test]
fn killed_with_messages_on_their_way() {
    on_both("killed_with_messages_on_their_way", "slow", |context, pipe, other| {
        let (shared, own) = (shareable(context), Tensor::private(&fill(LARGE, 1)).unwrap());
        let works = [&shared, &own]
            .map(|tensor| pipe.send(&Message::new().with_tensor(tensor)).delivered().start().unwrap());
        assert_eq!(other.hear(), "has both");
        other.kill();
        for work in works {
            let error = work.wait().unwrap_err();
            assert!(matches!(&error, Error::Peer(fault) if fault.kind == PeerFaultKind::Died), "{error}");
        }
        all_say_that_it_died(pipe, other.pid());
    });
}

#[test]
fn killed_while_it_looks_at_our_memory() {
    if is_other_end("viewer") {
        return;
    }
    let context = context();
    let listener = Listener::local(&context).unwrap();
    let (mut ranks, pipe) = start("killed_while_it_looks_at_our_memory", &listener, None);
    let work = pipe.send(&Message::new().with_tensor(&shareable(&context))).start().unwrap();
    assert_eq!(ranks.ranks[0].hear(), format!("sees {LARGE}"));
    let error = work.wait_by(soon()).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    ranks.ranks[0].kill();
    let error = work.wait().unwrap_err();
    assert!(matches!(&error, Error::Peer(fault) if fault.kind == PeerFaultKind::Died), "{error}");
    drop(pipe);
    nothing_is_granted(&context);
}

/// One that is stopped lets sends time out; when it goes on, so does the pipe.
#[test]
fn stopped_for_a_while() {
    on_both("stopped_for_a_while", "reader", |context, pipe, other| {
        let (shared, own) = (shareable(context), Tensor::private(&fill(LARGE, 1)).unwrap());
        pipe.send(&Message::new()).wait().unwrap();
        assert_eq!(other.hear(), "got 0");
        other.signal(Signal::STOP);
        for tensor in [&shared, &own] {
            let error = pipe
                .send(&Message::new().with_tensor(tensor))
                .delivered()
                .deadline(soon())
                .wait()
                .unwrap_err();
            assert!(error.is_timeout() && error.to_string().contains("the other end"), "{error}");
        }
        other.signal(Signal::CONT);
        pipe.send(&Message::new().with_tensor(&own).with_tensor(&shared)).delivered().wait().unwrap();
        loop {
            match other.hear() {
                text if text == "got 2" => break,
                text => assert!(text.contains("taken the message back"), "{text}"),
            }
        }
        pipe.finish().unwrap();
        assert_eq!(other.hear(), "end");
    });
}

/// Killed at random moments, also while it connects: the listener serves the next one, and nothing piles up.
#[test]
fn killed_at_any_moment() {
    if is_other_end("busy") {
        return;
    }
    let mut random = Random(7);
    for host in [None, Some("elsewhere")] {
        let context = host.map_or_else(context, |_| context_on("here"));
        let listener = Listener::local(&context).unwrap();
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let mut before = None;
        for round in 0..8 {
            let (mut ranks, pipe) = start("killed_at_any_moment", &listener, host);
            let own = Tensor::private(&fill(300_000, 1)).unwrap();
            let shared = shareable(&context);
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    loop {
                        match pipe.recv().wait() {
                            Ok(_) => {}
                            Err(error) => break error,
                        }
                    }
                });
                let writer = scope.spawn(|| {
                    loop {
                        if let Err(error) =
                            pipe.send(&Message::new().with_tensor(&own).with_tensor(&shared)).wait()
                        {
                            break error;
                        }
                    }
                });
                std::thread::sleep(Duration::from_millis(random.below(60) as u64));
                ranks.ranks[0].kill();
                for error in [reader.join().unwrap(), writer.join().unwrap()] {
                    let Error::Peer(fault) = &error else { panic!("{error}") };
                    assert_eq!(fault.kind, PeerFaultKind::Died, "round {round}: {error}");
                }
            });
            drop((pipe, ranks, shared));
            nothing_is_granted(&context);
            // The first ones warm up pools and threads.
            match before {
                None if round == 2 => before = Some(descriptors()),
                None => {}
                Some(before) => settles(|| descriptors() <= before),
            }
        }
    }
}

/// Processes that die while they connect do not keep others out.
#[test]
fn killed_while_it_connects() {
    if is_other_end("reader") {
        return;
    }
    let context = context();
    let listener = Listener::local(&context).unwrap();
    let mut random = Random(3);
    for _ in 0..12 {
        let mut ranks = Ranks::start_with("killed_while_it_connects", 1, |_, mut command| {
            command.env(ADDRESS, listener.address());
            command
        });
        std::thread::sleep(Duration::from_millis(random.below(30) as u64));
        ranks.ranks[0].kill();
    }
    // Some of them got in before they died.
    let end = Instant::now() + LONG;
    let address = listener.address().to_owned();
    let other = std::thread::spawn(move || Pipe::connect(&ranks::context(), &address, by()).unwrap());
    loop {
        let pipe = listener.accept(by()).unwrap();
        if pipe.peer().pid == std::process::id() {
            break;
        }
        assert!(Instant::now() < end);
    }
    drop(other.join().unwrap());
}

/// A context with a key, or without one.
fn with_key(key: Option<&str>) -> Arc<Context> {
    let mut config = Config::default();
    config.key = key.map(|words| Key::new(words).unwrap());
    Context::new(config).unwrap()
}

#[test]
fn addresses_that_are_not_right() {
    let (plain, keyed) =
        (with_key(None), with_key(Some("a key that nobody has guessed so far, and it is long")));
    let refused = |context: &Arc<Context>, address: &str, says: &str| {
        let error = Pipe::connect(context, address, soon()).unwrap_err();
        assert!(error.to_string().contains(says), "{address}: {error}");
    };
    refused(&plain, "7000", "is not the address of a pipe");
    refused(&plain, "tcp://127.0.0.1:7000", "set TENSORWIRE_KEY");
    // Who listens needs a key, or says that it needs none.
    for (context, address, says) in [
        (&plain, "tcp://127.0.0.1:0", "set TENSORWIRE_KEY in both"),
        (&keyed, "tcp://127.0.0.1:0/open", "leave out one of them"),
        (&plain, "udp://127.0.0.1:0", "is not the address of a pipe"),
    ] {
        let error = Listener::at(context, address).unwrap_err();
        assert!(matches!(&error, Error::Misuse(_)) && error.to_string().contains(says), "{error}");
    }
    // A port that is taken.
    let first = Listener::at(&plain, "tcp://127.0.0.1:0/open").unwrap();
    let error = Listener::at(&plain, first.address()).unwrap_err();
    assert!(error.to_string().contains("listening for pipes at 127.0.0.1"), "{error}");
    // Of a listener that is gone, and of another one at the same place.
    let listener = Listener::local(&plain).unwrap();
    let address = listener.address().to_owned();
    let (place, secret) = address.rsplit_once('/').unwrap();
    let other = format!("{place}/{}", secret.chars().rev().collect::<String>());
    refused(&with_key(None), &other, "was of an earlier listener");
    let error = Pipe::connect(&with_key(None), &other, soon()).unwrap_err().to_string();
    assert!(!error.contains(secret) && !format!("{listener:?}").contains(secret), "{error}");
    drop(listener);
    refused(&with_key(None), &address, "nobody listens there any more");
    // Another key, and none.
    let listener = Listener::at(&keyed, "tcp://127.0.0.1:0").unwrap();
    refused(
        &with_key(Some("another key that nobody has guessed, and it is long")),
        listener.address(),
        "TENSORWIRE_KEY",
    );
    refused(&plain, &format!("{}/open", listener.address()), "TENSORWIRE_KEY");
    // A store that is no listener, and one that speaks another version.
    let server = TcpServer::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://127.0.0.1:{}/open", server.local_addr().port());
    refused(&plain, &address, "connecting to the listener at");
    let store = TcpStore::connect("127.0.0.1", server.local_addr().port(), LONG).unwrap();
    let mut greeting = vec![0; 20];
    greeting[0] = 77;
    store.set("tensorwire/pipes/listener", &greeting).unwrap();
    refused(&plain, &address, "it speaks version 77 of pipes");
    store.set("tensorwire/pipes/listener", b"?").unwrap();
    assert!(Pipe::connect(&plain, &address, soon()).is_err());
}

/// Who reaches the port of a listener and may not connect, does not keep it from others.
#[test]
fn strangers_at_a_listener() {
    let context = with_key(None);
    let listener = Listener::local(&context).unwrap();
    let port = listener.address().rsplit_once('/').unwrap().0.rsplit_once(':').unwrap().1.parse().unwrap();
    let store = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
    for number in 0..200_u64 {
        let words = [fill(16, number), fill(32, number), fill(100, number), Vec::new()];
        store.push("tensorwire/pipes/hello", &words[number as usize % 4]).unwrap();
    }
    // More than a listener keeps.
    assert!(store.set("x", &vec![0; 1 << 20]).is_err());
    assert!(listener.accept(soon()).unwrap_err().to_string().contains("nobody has connected"));
    let address = listener.address().to_owned();
    let other = std::thread::spawn(move || Pipe::connect(&with_key(None), &address, by()).unwrap());
    let pipe = listener.accept(by()).unwrap();
    let other = other.join().unwrap();
    other.send(&Message::new().with_metadata(b"in")).wait().unwrap();
    assert_eq!(pipe.recv().wait().unwrap().unwrap().metadata(), b"in");
    // What both have written there is gone again.
    settles(|| store.list_keys().unwrap().len() <= 2);
}

/// Strict mode takes no other channel than the one that fits.
#[test]
fn strict_mode_refuses_private_memory() {
    let strict = || {
        let mut config = Config::default();
        config.strict = true;
        Context::new(config).unwrap()
    };
    let (one, two) = (strict(), strict());
    let listener = Listener::local(&one).unwrap();
    let address = listener.address().to_owned();
    // As two processes.
    let channels = [Channel::Share, Channel::Ring];
    let other = std::thread::spawn(move || Pipe::connect_with(&two, &address, &channels, by()).unwrap());
    let (pipe, other) = (listener.accept(by()).unwrap(), other.join().unwrap());
    let own = Tensor::private(&fill(LARGE, 1)).unwrap();
    let error = pipe.send(&Message::new().with_tensor(&own)).wait().unwrap_err();
    assert!(matches!(&error, Error::Unsupported { .. }), "{error}");
    // What has gaps is packed into memory that is lent, and a payload was copied anyway.
    let columns = Tensor::strided(own.span().clone(), Dtype::U8, &[1 << 20, 2], &[1, 1 << 21]).unwrap();
    let payload = fill(2 << 20, 2);
    let message = Message::new().with_tensor(&columns).with_payload(&payload).unwrap();
    let sent = pipe.send(&message).start().unwrap();
    let mut incoming = other.next().wait().unwrap().unwrap();
    assert_eq!(incoming.tensors()[0].channel, Channel::Share);
    let arrived = incoming.read().wait().unwrap();
    assert!(arrived.payloads()[0].to_vec::<u8>().unwrap() == payload);
    sent.wait().unwrap();
}

/// Two ends in this process, which lend as two processes do.
fn ends() -> (Arc<Context>, Listener, [Pipe; 2]) {
    let context = context();
    let listener = Listener::local(&context).unwrap();
    let address = listener.address().to_owned();
    let channels = [Channel::Basic, Channel::Share, Channel::Ring];
    let other =
        std::thread::spawn(move || Pipe::connect_with(&ranks::context(), &address, &channels, by()).unwrap());
    let pipe = listener.accept(by()).unwrap();
    (context, listener, [pipe, other.join().unwrap()])
}

/// A forked child can use neither pipes nor listeners, and what it drops disturbs nobody.
#[test]
fn forks() {
    on_both("forks", "forks", |context, pipe, other| {
        let far = other.hear() == "far";
        let own = Tensor::private(&fill(LARGE, 1)).unwrap();
        let lent = pipe.send(&Message::new().with_tensor(&shareable(context))).start().unwrap();
        // It waits until it is asked for.
        let unread = pipe.send(&Message::new().with_tensor(&own)).start().unwrap();
        assert_eq!(other.hear(), "has forked");
        // The view that the child has dropped is its parent's.
        assert_eq!(lent.is_done(), far);
        pipe.send(&Message::new().with_metadata(b"on")).wait().unwrap();
        lent.wait().unwrap();
        unread.wait().unwrap();
        assert_eq!(other.hear(), "end");
    });
}

fn forks_with_pipes(pipe: &Pipe) {
    let (context, listener, ours) = ends();
    let far = std::env::var_os(HOST).is_some();
    say(if far { "far" } else { "near" });
    let mut incoming = pipe.next().wait().unwrap().unwrap();
    if !far {
        incoming.view(0).unwrap();
    }
    let view = incoming.read().wait().unwrap();
    let unread = pipe.next().wait().unwrap().unwrap();
    // Somebody waits, and something is on its way.
    let started = ours[0].send(&Message::new().with_tensor(&shareable(&context))).start().unwrap();
    let mut all = Some((listener, ours, view, unread, started));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| pipe.recv().wait().unwrap().unwrap());
        let child = fork(|| {
            let (listener, ours, view, mut unread, started) = all.take().unwrap();
            let refused = |result: Result<(), Error>| matches!(&result, Err(Error::Misuse(text)) if text.contains("parent process"));
            let message = Message::new().with_metadata(b"not");
            let calls = [
                pipe.send(&message).wait(),
                pipe.send(&message).delivered().start().map(drop),
                ours[1].recv().wait().map(drop),
                ours[1].next().wait().map(drop),
                pipe.check(),
                pipe.finish(),
                unread.read().wait().map(drop),
                listener.accept(by()).map(drop),
                Pipe::connect(&context, listener.address(), by()).map(drop),
                Listener::local(&context).map(drop),
            ];
            // It has no pipe to close, but may say so.
            let _ = ours[1].clone().close();
            drop((listener, ours, view, unread, started));
            let allowed: Vec<_> = calls.into_iter().map(refused).collect();
            allowed.iter().position(|refused| !refused).map_or(0, |index| 1 + index as i32)
        });
        assert_eq!(code_of(child), 0, "the number of a call that was not refused");
        say("has forked");
        assert_eq!(waiting.join().unwrap().metadata(), b"on");
    });
    let (listener, ours, view, mut unread, started) = all.unwrap();
    assert!(view.tensors()[0].to_vec::<u8>().unwrap() == fill(LARGE, 1));
    drop(view);
    assert!(unread.read().wait().unwrap().tensors()[0].to_vec::<u8>().unwrap() == fill(LARGE, 1));
    assert_eq!(ours[1].recv().wait().unwrap().unwrap().tensors()[0].len(), LARGE);
    started.wait().unwrap();
    let address = listener.address().to_owned();
    let other = std::thread::spawn(move || Pipe::connect(&ranks::context(), &address, by()).unwrap());
    let pipe = listener.accept(by()).unwrap();
    other.join().unwrap().send(&Message::new()).wait().unwrap();
    assert!(pipe.recv().wait().unwrap().is_some());
    say("end");
    ranks::await_parent();
}

/// A reader without memory hears so, and may read again, or drop the message, which its sender hears then.
#[test]
fn a_reader_without_memory() {
    on_both("a_reader_without_memory", "short", |context, pipe, other| {
        for kind in 0..3 {
            // Each is larger than what the reader has kept of those before.
            let bytes = fill((kind + 1) * LARGE, 1);
            let message = match kind {
                0 => Message::new().with_tensor(&shareable_bytes(context, &bytes)),
                1 => Message::new().with_tensor(&Tensor::private(&bytes).unwrap()),
                _ => Message::new().with_payload(&bytes).unwrap(),
            };
            let error = pipe.send(&message).delivered().wait().unwrap_err();
            assert!(error.to_string().contains("dropped the message without reading it"), "{error}");
            pipe.send(&message).delivered().wait().unwrap();
        }
        pipe.finish().unwrap();
        assert_eq!(other.hear(), "end");
    });
}

fn short_of_memory(pipe: &Pipe) {
    let limit = getrlimit(Resource::As);
    let short = |body: &mut dyn FnMut()| {
        // Room for what is there, and not much more.
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
        let current = Some(pages * 4096 + (16 << 20));
        setrlimit(Resource::As, Rlimit { current, maximum: limit.maximum }).unwrap();
        body();
        setrlimit(Resource::As, limit).unwrap();
    };
    let says_so = |error: Error| {
        assert!(matches!(error, Error::Io { .. } | Error::Device { .. }), "{error:?}");
        assert!(error.to_string().contains("emory"), "{error}");
    };
    for kind in 0..3 {
        let mut incoming = Some(pipe.next().wait().unwrap().unwrap());
        short(&mut || {
            says_so(incoming.as_mut().unwrap().read().wait().unwrap_err());
            incoming = None;
        });
        let mut incoming = pipe.next().wait().unwrap().unwrap();
        short(&mut || says_so(incoming.read().wait().unwrap_err()));
        let message = incoming.read().wait().unwrap();
        let got = message.payloads().first().unwrap_or_else(|| &message.tensors()[0]);
        assert!(got.to_vec::<u8>().unwrap() == fill((kind + 1) * LARGE, 1));
    }
    assert!(pipe.recv().wait().unwrap().is_none());
    say("end");
    ranks::await_parent();
}

/// The sender takes its memory back while the reader is about to have it: either the reader hears that, or has it in time and
/// keeps it.
#[test]
fn memory_that_is_withdrawn() {
    let (context, _listener, [sender, reader]) = ends();
    let shared = shareable(&context);
    // Only one thread is held, of all that are in this process.
    const NAME: &str = "held reader";
    let step = Arc::new(std::sync::Mutex::new(""));
    let (held, gone) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    let (held, gone) = (Arc::new(held), Arc::new(gone));
    hooks::set({
        let (step, held, gone) = (step.clone(), held.clone(), gone.clone());
        move |at| {
            if std::thread::current().name() == Some(NAME) && at == *step.lock().unwrap() {
                held.wait();
                gone.wait();
            }
        }
    });
    for (at, in_time) in [
        ("redeem: before it is counted", false),
        ("redeem: counted", true),
        ("redeem: mapped", true),
        ("redeem: ready", true),
    ] {
        *step.lock().unwrap() = at;
        std::thread::scope(|scope| {
            let builder = std::thread::Builder::new().name(NAME.into());
            let read = builder.spawn_scoped(scope, || reader.recv().deadline(by()).wait());
            let sent = sender.send(&Message::new().with_tensor(&shared)).deadline(soon()).start().unwrap();
            held.wait();
            let error = sent.wait().unwrap_err();
            assert!(error.is_timeout(), "{at}: {error}");
            assert_eq!(error.to_string().contains("it still holds memory"), in_time, "{at}: {error}");
            *step.lock().unwrap() = "";
            gone.wait();
            match read.unwrap().join().unwrap() {
                Ok(message) => {
                    assert!(in_time, "{at}");
                    let got = message.unwrap().tensors()[0].to_vec::<u8>().unwrap();
                    assert!(got == fill(LARGE, 1), "{at}");
                }
                Err(error) => {
                    assert!(
                        !in_time && error.to_string().contains("taken the message back"),
                        "{at}: {error}"
                    );
                }
            }
        });
        nothing_is_granted(&context);
        sender.send(&Message::new()).wait().unwrap();
        assert!(reader.recv().wait().unwrap().is_some());
    }
    // One who looks at it keeps it, also when its sender is gone.
    let sent = sender.send(&Message::new().with_tensor(&shared)).start().unwrap();
    let mut incoming = reader.next().wait().unwrap().unwrap();
    incoming.view(0).unwrap();
    let message = incoming.read().wait().unwrap();
    assert!(sender.close().is_err() && sent.wait().is_err());
    drop((shared, sent));
    assert!(message.tensors()[0].to_vec::<u8>().unwrap() == fill(LARGE, 1));
    drop((message, incoming));
    nothing_is_granted(&context);
}

/// A connection between two hosts is cut, at its beginning or under a message: both ends hear it, and connect again.
#[test]
fn a_connection_that_is_cut() {
    if let Some(rank) = Rank::of_this_process() {
        return talk_while_it_is_cut(&rank);
    }
    for (way, at) in
        [(Way::There, 3), (Way::Back, 40), (Way::There, 900), (Way::Back, 500), (Way::There, 3_000_001)]
    {
        let Some(mut hosts) = Hosts::new(2, Family::V4) else { return };
        let proxy = hosts.proxy();
        Proxy::cut_at(&proxy, way, at);
        let ranks = Ranks::start_with("a_connection_that_is_cut", 2, |rank, command| {
            let mut command = hosts.command(rank, &command);
            command.env("TENSORWIRE_HEARTBEAT", "30");
            command
        });
        let mut ranks = ranks.ranks;
        proxy.await_hurt();
        for (rank, host) in [(0, 1), (1, 0)] {
            let heard = ranks[rank].hear();
            let while_made = at < 1000 && heard == "never";
            assert!(while_made || heard.contains(&label(host)), "{way:?} {at}: {heard}");
        }
        ranks::all_succeed(ranks);
    }
}

fn talk_while_it_is_cut(rank: &Rank) {
    let (context, own) = (Context::from_env().unwrap(), Tensor::private(&fill(3 << 20, 1)).unwrap());
    let message = Message::new().with_tensor(&own);
    let listener = (rank.rank == 0).then(|| {
        let listener = Listener::at(&context, "tcp://0.0.0.0:0/open").unwrap();
        let address = listener.address().replace("0.0.0.0", &std::env::var("TENSORWIRE_ADDRESS").unwrap());
        rank.store.set("address", address.as_bytes()).unwrap();
        listener
    });
    // One that is cut while it is made is made again.
    let open = || match &listener {
        Some(listener) => listener.accept(by()).unwrap(),
        None => {
            let address = String::from_utf8(rank.store.get("address").unwrap()).unwrap();
            loop {
                match Pipe::connect(&context, &address, by()) {
                    Ok(pipe) => return pipe,
                    Err(error) => assert!(!error.is_timeout(), "{error}"),
                }
            }
        }
    };
    let mut last = "never".to_owned();
    for _ in 0..4 {
        let pipe = open();
        let ended = std::thread::scope(|scope| {
            let sent = scope.spawn(|| {
                (0..5).try_for_each(|_| pipe.send(&message).delivered().deadline(by()).wait())?;
                pipe.finish()
            });
            let received = loop {
                match pipe.recv().deadline(by()).wait() {
                    Ok(Some(message)) => {
                        assert!(message.tensors()[0].to_vec::<u8>().unwrap() == fill(3 << 20, 1));
                    }
                    other => break other.map(drop),
                }
            };
            received.and(sent.join().unwrap())
        });
        match ended {
            Ok(()) => break,
            Err(error) => {
                assert!(!error.is_timeout(), "{error}");
                last = describe(&error);
            }
        }
    }
    say(&last);
    ranks::await_parent();
}
