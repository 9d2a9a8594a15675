//! Calls over pipes, as threads and as processes, on one host and on two: answers, failures, deadlines, calls that are given up, many
//! at a time, and an end that dies.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod messages;
mod ranks;

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use messages::fill;
use ranks::{LONG, Rank, Ranks, context, say, spans_hosts};
use tensorwire::pipe::rpc::{Call, Rpc, Service};
use tensorwire::pipe::{Channel, Listener, Message, Pending, Pipe};
use tensorwire::{Context, Deadline, Dtype, Error, Group, PeerFaultKind, Span, Tensor, interrupt};

const ADDRESS: &str = "TEST_OF_PIPES_ADDRESS";
const LARGE: usize = 3 << 20;

fn by() -> Deadline {
    Deadline::after(LONG)
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_millis(200))
}

/// A pipe between the two ranks of a group: rank 0 listens.
fn pipe(group: &Group) -> Pipe {
    let context = group.context();
    if group.rank() == 1 {
        let address = String::from_utf8(group.store().pop_by("address", by()).unwrap()).unwrap();
        return Pipe::connect(context, &address, by()).unwrap();
    }
    let listener = match context.config().key.is_some() {
        true => Listener::at(context, "tcp://127.0.0.1:0"),
        false => Listener::at(context, "tcp://127.0.0.1:0/open"),
    };
    let listener = listener.unwrap();
    group.store().push("address", listener.address().as_bytes()).unwrap();
    listener.accept(by()).unwrap()
}

/// Rank 0 answers calls until rank 1 is done with its own.
fn between(group: &Group, service: Service, caller: impl FnOnce(&Rpc)) {
    match group.rank() {
        0 => Rpc::over(pipe(group), service).unwrap().wait(by()).unwrap(),
        _ => caller(&Rpc::over(pipe(group), Service::new()).unwrap()),
    }
}

fn shareable(context: &Context, bytes: &[u8]) -> Tensor {
    let span = Span::whole(context.host().alloc(bytes.len()).unwrap()).slice(0..bytes.len()).unwrap();
    span.write(0, bytes).unwrap();
    Tensor::flat(span, Dtype::U8).unwrap()
}

fn text(bytes: impl Into<Vec<u8>>) -> Message {
    Message::new().with_metadata(bytes)
}

fn said(message: &Message) -> &str {
    std::str::from_utf8(message.metadata()).unwrap()
}

fn call(rpc: &Rpc, name: &str, argument: &str) -> Result<String, Error> {
    rpc.call(name, &text(argument)).deadline(by()).wait().map(|answer| said(&answer).to_owned())
}

fn start(rpc: &Rpc, name: &str, argument: &str) -> Pending<Message> {
    rpc.call(name, &text(argument)).deadline(by()).start().unwrap()
}

/// Something that handlers wait for, and say.
#[derive(Default)]
struct Gate(Mutex<HashMap<String, usize>>, Condvar);

impl Gate {
    fn add(&self, what: &str) {
        *self.0.lock().unwrap().entry(what.into()).or_default() += 1;
        self.1.notify_all();
    }

    fn count(&self, what: &str) -> usize {
        self.0.lock().unwrap().get(what).copied().unwrap_or_default()
    }

    fn await_count(&self, what: &str, count: usize) {
        let so = |counts: &mut HashMap<String, usize>| counts.get(what).is_none_or(|&now| now < count);
        let (_counts, waited) = self.1.wait_timeout_while(self.0.lock().unwrap(), LONG, so).unwrap();
        assert!(!waited.timed_out(), "{what} {count}");
    }
}

fn number(call: &Call) -> usize {
    std::str::from_utf8(call.metadata()).unwrap().parse().unwrap()
}

/// A service that holds calls until it is told, and says what has become of them.
fn gated() -> Service {
    let gate = Arc::new(Gate::default());
    let [hold, open, count, until] = [(); 4].map(|()| gate.clone());
    Service::new()
        // Until "open", or until nobody wants the answer.
        .with("hold", move |call| {
            hold.add("begun");
            while call.is_wanted() && hold.count("open") == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            hold.add(if call.is_wanted() { "opened" } else { "given up" });
            Ok(text(call.metadata()))
        })
        .with("open", move |_| {
            open.add("open");
            Ok(Message::new())
        })
        .with("count", move |call| {
            let what = String::from_utf8(call.metadata().to_vec())?;
            Ok(text(count.count(&what).to_string()))
        })
        // Until something has happened so often.
        .with("until", move |call| {
            let argument = String::from_utf8(call.metadata().to_vec())?;
            let (what, count) = argument.split_once(':').ok_or("no colon")?;
            until.await_count(what, count.parse()?);
            Ok(Message::new())
        })
}

/// The other end sends it all back: what is small, what is lent, what goes through the ring, and nothing.
fn there_and_back(group: &Group) {
    let echo = |mut call: Call| {
        let message = call.read()?;
        assert_eq!(call.name(), "echo");
        Ok(message)
    };
    // Both ends call and are called at the same time.
    let rpc = Rpc::over(pipe(group), Service::new().with("echo", echo)).unwrap();
    let context = group.context();
    let large = fill(LARGE, group.rank() as u64);
    let all = [
        Message::new(),
        text("a"),
        text(fill(100_000, 2)),
        Message::new().with_payload(b"").unwrap().with_payload(&large).unwrap(),
        Message::new().with_tensor(&Tensor::private(&[1_u8, 2, 3]).unwrap()),
        text("b").with_tensor(&Tensor::private(&large).unwrap()).with_tensor(&shareable(context, &large)),
    ];
    let bytes = |message: &Message| {
        let both = message.payloads().iter().chain(message.tensors());
        both.map(|tensor| tensor.to_vec::<u8>().unwrap()).collect::<Vec<_>>()
    };
    let alike = |answer: Message, message: &Message| {
        assert_eq!(answer.metadata(), message.metadata());
        assert!(bytes(&answer) == bytes(message));
    };
    for message in &all {
        alike(rpc.call("echo", message).deadline(by()).wait().unwrap(), message);
        alike(rpc.call("echo", message).deadline(by()).start().unwrap().wait().unwrap(), message);
    }
    // All of them in flight.
    let calls = all.each_ref().map(|message| rpc.call("echo", message).deadline(by()).start().unwrap());
    for (call, message) in calls.iter().zip(&all).rev() {
        alike(call.wait().unwrap(), message);
    }
    group.barrier().wait().unwrap();
    assert_eq!(context.lease_stats().unwrap().granted, (0, 0));
    group.barrier().wait().unwrap();
}

on_hosts!(messages_there_and_back, 2, there_and_back);

/// The handler fails, panics, is not there, or gives an answer that cannot be sent. The other end hears which, and the pipe goes on.
fn failures(group: &Group) {
    let service = Service::new()
        .with("divide", |call| {
            let number: usize = std::str::from_utf8(call.metadata())?.parse()?;
            Ok(text(100_usize.checked_div(number).ok_or("division by zero")?.to_string()))
        })
        .with("panics", |_| panic!("this test wants it"))
        .with("too much", |_| Ok(text(vec![0; 1 << 20])))
        .with("waits for too much", |call| {
            let large = Message::new().with_tensor(&Tensor::private(&[0_u8; LARGE])?);
            drop(call.call_back("nothing", &large).wait()?);
            Ok(Message::new())
        });
    between(group, service, |rpc| {
        let fails = |name: &str, argument: &str, texts: &[&str]| {
            let error = call(rpc, name, argument).unwrap_err();
            assert!(matches!(&error, Error::Peer(fault) if fault.kind == PeerFaultKind::Failed), "{error:?}");
            let (said, pid) = (error.to_string(), rpc.peer().pid.to_string());
            assert!(texts.iter().all(|text| said.contains(text)) && said.contains(&pid), "{said}");
        };
        assert_eq!(call(rpc, "divide", "5").unwrap(), "20");
        fails("divide", "0", &["failed in \"divide\": division by zero"]);
        fails("divide", "a", &["failed in \"divide\": invalid digit"]);
        fails("panics", "", &["failed in \"panics\": it panicked"]);
        fails("too much", "", &["failed in \"too much\"", "bytes of metadata"]);
        fails("add", "", &["has no \"add\"", "\"divide\", \"panics\", \"too much\""]);
        fails("waits for too much", "", &["has no \"nothing\": nothing can be called there"]);
        let error = call(rpc, &"a".repeat(257), "").unwrap_err();
        assert!(matches!(error, Error::Misuse(_)), "{error}");
        let error = rpc.call("divide", &text(vec![0; 1 << 20])).wait().unwrap_err();
        assert!(matches!(error, Error::Misuse(_)), "{error}");
        // Large tensors that nobody reads.
        let large = Message::new().with_tensor(&Tensor::private(&fill(LARGE, 1)).unwrap());
        let large = large.with_tensor(&shareable(group.context(), &fill(LARGE, 1)));
        assert!(rpc.call("add", &large).deadline(by()).wait().unwrap_err().to_string().contains("has no"));
        assert_eq!(call(rpc, "divide", "4").unwrap(), "25");
        assert_eq!(group.context().lease_stats().unwrap().granted, (0, 0));
    });
}

on_hosts!(failures_come_back, 2, failures);

/// Hundreds of calls at once, started and waited for by threads: each gets its own answer.
fn hundreds(group: &Group) {
    let running = Arc::new(AtomicUsize::new(0));
    let service = Service::new().threads(4).with("square", move |mut call| {
        assert!(running.fetch_add(1, Ordering::SeqCst) < 4);
        let number = number(&call);
        let tensor = call.read()?.tensors()[0].to_vec::<u64>()?;
        running.fetch_sub(1, Ordering::SeqCst);
        assert_eq!(tensor[0], number as u64);
        Ok(text((number * number).to_string()).with_tensor(&Tensor::private(&vec![number as u64; number])?))
    });
    let message = |number: u64| {
        // Some need the reader's word.
        let len = if number % 50 == 7 { 50_000 } else { 1 + number as usize % 3 };
        text(number.to_string()).with_tensor(&Tensor::private(&vec![number; len]).unwrap())
    };
    let check = |number: u64, answer: Message| {
        assert_eq!(said(&answer), (number * number).to_string());
        assert_eq!(answer.tensors()[0].to_vec::<u64>().unwrap(), vec![number; number as usize]);
    };
    between(group, service, |rpc| {
        let calls: Vec<_> = (0..500)
            .map(|number| rpc.call("square", &message(number)).deadline(by()).start().unwrap())
            .collect();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    for number in (0..100).map(|number| number * 4 + thread) {
                        check(number, rpc.call("square", &message(number)).deadline(by()).wait().unwrap());
                    }
                });
            }
        });
        for (number, call) in calls.iter().enumerate().rev() {
            check(number as u64, call.wait().unwrap());
        }
    });
}

on_hosts!(hundreds_in_flight, 2, hundreds);

/// With one thread, calls run one after the other, as they were made.
fn in_order(group: &Group) {
    let (seen, at_once) = (Arc::new(Mutex::new(Vec::new())), AtomicBool::new(false));
    let list = seen.clone();
    let service = Service::new()
        .threads(1)
        .with("add", move |call| {
            assert!(!at_once.swap(true, Ordering::SeqCst));
            seen.lock().unwrap().push(number(&call));
            at_once.store(false, Ordering::SeqCst);
            Ok(Message::new())
        })
        .with("list", move |_| Ok(text(format!("{:?}", list.lock().unwrap()))));
    between(group, service, |rpc| {
        let calls: Vec<_> = (0..300).map(|number| start(rpc, "add", &number.to_string())).collect();
        assert_eq!(call(rpc, "list", "").unwrap(), format!("{:?}", (0..300).collect::<Vec<_>>()));
        calls.iter().for_each(|call| drop(call.wait().unwrap()));
    });
}

on_hosts!(calls_in_order, 2, in_order);

/// A call that is too late is an error that says so. The handler hears it, and the pipe goes on.
fn late(group: &Group) {
    between(group, gated(), |rpc| {
        let error = rpc.call("hold", &text("")).deadline(soon()).wait().unwrap_err();
        let said = error.to_string();
        assert!(error.is_timeout() && said.contains("calling \"hold\""), "{said}");
        assert!(said.contains("the other end"), "{said}");
        call(rpc, "until", "given up:1").unwrap();
        let started = rpc.call("hold", &text("")).deadline(soon()).start().unwrap();
        assert!(started.wait().unwrap_err().is_timeout());
        call(rpc, "until", "given up:2").unwrap();
        // A large one, of which the rest has not gone.
        let large = text("").with_tensor(&Tensor::private(&fill(LARGE, 1)).unwrap());
        assert!(rpc.call("hold", &large).deadline(soon()).wait().unwrap_err().is_timeout());
        call(rpc, "until", "given up:3").unwrap();
        call(rpc, "open", "").unwrap();
        assert_eq!(call(rpc, "hold", "again").unwrap(), "again");
        assert_eq!(call(rpc, "count", "opened").unwrap(), "1");
    });
}

on_hosts!(late_calls, 2, late);

/// Calls are cancelled, dropped, and interrupted. Their handlers hear it, those that wait for a thread do not begin.
fn given_up(group: &Group) {
    between(group, gated().threads(2), |rpc| {
        // The second thread is for the words of this test.
        let held = start(rpc, "hold", "first");
        call(rpc, "until", "begun:1").unwrap();
        assert!(!held.is_done() && held.cancel() && !held.cancel());
        assert!(matches!(held.wait().unwrap_err(), Error::Aborted(_)));
        call(rpc, "until", "given up:1").unwrap();

        let held = start(rpc, "hold", "second");
        call(rpc, "until", "begun:2").unwrap();
        drop(held);
        call(rpc, "until", "given up:2").unwrap();

        let stop = Rc::new(|| Err(Error::Interrupted("enough".into())));
        let message = text("third");
        let waited = interrupt::with_interrupt(stop, || rpc.call("hold", &message).wait());
        assert!(matches!(waited, Err(Error::Interrupted(_))), "{waited:?}");

        call(rpc, "open", "").unwrap();
        assert_eq!(call(rpc, "hold", "fourth").unwrap(), "fourth");
        assert_eq!(call(rpc, "count", "opened").unwrap(), "1");
    });
}

on_hosts!(calls_that_are_given_up, 2, given_up);

/// A call that nobody wants any more when it has a thread does not begin.
fn given_up_in_line(group: &Group) {
    between(group, gated().threads(1), |rpc| {
        let held = start(rpc, "hold", "");
        let opens = start(rpc, "open", "");
        assert!(opens.cancel());
        // Its word is there before this one is answered.
        assert!(held.cancel());
        assert_eq!(call(rpc, "count", "open").unwrap(), "0");
        call(rpc, "open", "").unwrap();
        assert_eq!(call(rpc, "count", "open").unwrap(), "1");
    });
}

on_ranks!(calls_that_are_given_up_in_line, 2, given_up_in_line);

/// A handler calls back, and its own call waits for that; waits of a handler end when nobody wants its answer.
fn back(group: &Group) {
    let gate = Arc::new(Gate::default());
    let (own, count) = (gate.clone(), gate.clone());
    let service = Service::new()
        .with("twice", |call| {
            let half = call.call_back("half", &text(call.metadata())).wait()?;
            Ok(text(format!("{} and {}", said(&half), call.peer().pid)))
        })
        .with("for ever", move |call| {
            let waited = call.call_back("hold", &Message::new()).wait();
            own.add(if waited.is_err() && !call.is_wanted() { "ended" } else { "wrong" });
            Ok(Message::new())
        })
        .with("ended", move |_| {
            count.await_count("ended", 1);
            Ok(Message::new())
        });
    let far = spans_hosts(group);
    match group.rank() {
        0 => Rpc::over(pipe(group), service).unwrap().wait(by()).unwrap(),
        _ => {
            let half = |call: Call| Ok(text(format!("half of {}", number(&call))));
            let rpc = Rpc::over(pipe(group), gated().with("half", half)).unwrap();
            let me = std::process::id();
            assert_eq!(call(&rpc, "twice", "7").unwrap(), format!("half of 7 and {me}"));
            assert!(!far || rpc.explain().contains("network"));
            let held = start(&rpc, "for ever", "");
            held.wait_by(soon()).unwrap_err();
            assert!(held.cancel());
            call(&rpc, "ended", "").unwrap();
        }
    }
}

on_hosts!(calls_back, 2, back);

/// A handler looks at the caller's memory, and the caller says where the answer goes.
fn places(group: &Group) {
    let (large, turned) = (fill(LARGE, 1), fill(LARGE, 1).into_iter().rev().collect::<Vec<_>>());
    let service = Service::new().with("turn", |mut call| {
        let incoming = call.incoming();
        let lent = [Channel::Share, Channel::Xth].contains(&incoming.tensors()[0].channel);
        if lent {
            incoming.view(0)?;
        }
        let mut bytes = call.read()?.tensors()[0].to_vec::<u8>()?;
        bytes.reverse();
        Ok(text(if lent { "seen" } else { "copied" }).with_tensor(&Tensor::private(&bytes)?))
    });
    between(group, service, |rpc| {
        let message = Message::new().with_tensor(&shareable(group.context(), &large));
        let mut answer = rpc.call("turn", &message).deadline(by()).describe().unwrap();
        assert_eq!(answer.metadata(), if spans_hosts(group) { &b"copied"[..] } else { b"seen" });
        let place = Tensor::private(&vec![0_u8; LARGE]).unwrap();
        answer.place(0, &place).unwrap();
        answer.read().deadline(by()).wait().unwrap();
        assert!(place.to_vec::<u8>().unwrap() == turned);
    });
}

on_hosts!(places_and_views, 2, places);

/// One end has as many calls as it takes. The next is refused, and it goes on when there are fewer.
fn too_many(group: &Group) {
    between(group, gated().threads(2), |rpc| {
        let held: Vec<_> = (0..1024).map(|_| start(rpc, "hold", "")).collect();
        let error = call(rpc, "hold", "").unwrap_err().to_string();
        assert!(error.contains("does not take \"hold\" now: 1024 of your calls"), "{error}");
        drop(held);
        // Words that they are not wanted stand before this.
        while call(rpc, "open", "").is_err() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(call(rpc, "hold", "again").unwrap(), "again");
    });
}

on_ranks!(too_many_calls, 2, too_many);

/// An end that is closed lets all calls fail, and the other end too.
fn closed(group: &Group) {
    let rpc = Rpc::over(pipe(group), gated()).unwrap();
    let held = start(&rpc, "hold", "");
    call(&rpc, "until", "begun:1").unwrap();
    group.barrier().wait().unwrap();
    if group.rank() == 1 {
        rpc.close().unwrap();
        held.wait().unwrap_err();
        group.barrier().wait().unwrap();
        return;
    }
    let error = held.wait().unwrap_err();
    assert!(matches!(&error, Error::Peer(fault) if fault.kind == PeerFaultKind::Left), "{error}");
    assert!(error.to_string().contains("\"hold\" was called"), "{error}");
    rpc.wait(by()).unwrap();
    assert!(rpc.call("count", &text("begun")).deadline(by()).wait().is_err());
    group.barrier().wait().unwrap();
}

on_hosts!(ends_that_are_closed, 2, closed);

/// The other end uses its pipe for messages that are no calls.
fn no_calls(group: &Group) {
    let pipe = pipe(group);
    if group.rank() == 0 {
        pipe.send(&text("hello")).wait().unwrap();
        assert!(pipe.recv().deadline(by()).wait().is_err());
    } else {
        let error = Rpc::over(pipe, Service::new()).and_then(|rpc| rpc.wait(by())).unwrap_err();
        assert!(matches!(&error, Error::Peer(fault) if fault.kind == PeerFaultKind::Misbehaved), "{error}");
        assert!(error.to_string().contains("both ends of the pipe must use rpc"), "{error}");
    }
    group.barrier().wait().unwrap();
}

on_hosts!(messages_that_are_no_calls, 2, no_calls);

/// The serving process is killed: all calls that wait fail, by the call's name, the host and the pid.
fn killed(test: &str, host: Option<&str>) {
    if Rank::of_this_process().is_some() {
        let context = Context::from_env().unwrap();
        let pipe = Pipe::connect(&context, &std::env::var(ADDRESS).unwrap(), by()).unwrap();
        let rpc = Rpc::over(
            pipe,
            gated().threads(200).with("say", |_| {
                say("called");
                Ok(Message::new())
            }),
        );
        // It is killed meanwhile.
        rpc.unwrap().wait(by()).unwrap();
        return;
    }
    let context = host.map_or_else(context, |_| ranks::context_on("here"));
    let listener = Listener::local(&context).unwrap();
    let mut ranks = Ranks::start_with(test, 1, |_, mut command| {
        command.env(ADDRESS, listener.address());
        host.map(|host| command.env("TENSORWIRE_HOST", host).env("TENSORWIRE_HEARTBEAT", "30"));
        command
    });
    let rpc = Rpc::over(listener.accept(by()).unwrap(), Service::new()).unwrap();
    let calls: Vec<_> = (0..100).map(|_| start(&rpc, "hold", "")).collect();
    let large = text("").with_tensor(&Tensor::private(&fill(LARGE, 1)).unwrap());
    std::thread::scope(|scope| {
        let waits: Vec<_> = [text(""), large]
            .map(|message| {
                let rpc = &rpc;
                scope.spawn(move || rpc.call("hold", &message).deadline(by()).wait().unwrap_err())
            })
            .into_iter()
            .collect();
        call(&rpc, "say", "").unwrap();
        assert_eq!(ranks.ranks[0].hear(), "called");
        let pid = ranks.ranks[0].pid().to_string();
        ranks.ranks[0].kill();
        let started = calls.iter().map(|call| call.wait().unwrap_err());
        for error in waits.into_iter().map(|wait| wait.join().unwrap()).chain(started) {
            let said = error.to_string();
            assert!(matches!(&error, Error::Peer(fault) if fault.kind == PeerFaultKind::Died), "{said}");
            assert!(said.contains(&pid) && said.contains("\"hold\" was called"), "{said}");
        }
    });
    rpc.wait(by()).unwrap_err();
    assert!(call(&rpc, "hold", "").is_err());
}

#[test]
fn killed_on_one_host() {
    killed("killed_on_one_host", None);
}

#[test]
fn killed_on_another_host() {
    killed("killed_on_another_host", Some("elsewhere"));
}
