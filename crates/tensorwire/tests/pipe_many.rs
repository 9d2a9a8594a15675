//! Hundreds of pipes at once: what each of them takes of its process, and that nothing of it stays.
#![allow(clippy::unwrap_used, clippy::panic)]

mod ranks;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ranks::{LONG, Rank, Ranks, context, say};
use tensorwire::pipe::{Listener, Message, Pending, Pipe};
use tensorwire::{Context, Deadline, Dtype, Span, Tensor};

const ADDRESS: &str = "TEST_OF_PIPES_ADDRESS";
/// Processes that connect, and how many pipes each has.
const PROCESSES: usize = 3;
const EACH: usize = 100;
const LARGE: usize = 1 << 20;

fn by() -> Deadline {
    Deadline::after(LONG)
}

/// What pipes take of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Taken {
    descriptors: usize,
    threads: usize,
    mappings: usize,
}

/// A listener keeps up to so many connections with its own store, with two descriptors each in its process, and has so many
/// threads while others connect.
const SLACK: usize = 40;

impl Taken {
    fn now() -> Self {
        let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        // Shared memory: stacks and the heap come and go as the allocator likes.
        let mappings = maps.lines().filter(|line| line.contains("memfd")).count();
        Self { descriptors: count("/proc/self/fd"), threads: count("/proc/self/task"), mappings }
    }
}

fn context_of(host: Option<&str>) -> Arc<Context> {
    host.map_or_else(context, ranks::context_on)
}

/// Whoever connects: many pipes, on each of them messages both ways.
fn other_end() {
    let host = std::env::var("TEST_OF_PIPES_HOST").ok();
    let (context, far) = (context_of(host.as_deref()), host.is_some());
    let address = std::env::var(ADDRESS).unwrap();
    let connect = || Pipe::connect(&context, &address, by()).unwrap();
    let first = connect();
    echo(&first).wait().unwrap();
    let before = Taken::now();
    say("warm");
    // The listener has looked, too.
    echo(&first).wait().unwrap();
    let pipes: Vec<Pipe> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..4).map(|_| scope.spawn(|| (0..EACH / 4).map(|_| connect()).collect::<Vec<_>>())).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    take(before, EACH, far);
    // The listener takes them in another order.
    let sent: Vec<_> = pipes.iter().map(echo).collect();
    sent.iter().for_each(|sent| sent.wait().unwrap());
    take(before, EACH, far);
    // The listener closes all of them, and the first at last.
    for pipe in pipes.iter().chain([&first]) {
        assert!(pipe.recv().deadline(by()).wait().unwrap().is_none());
    }
    drop(pipes);
    settles(before);
}

fn echo(pipe: &Pipe) -> Pending<()> {
    let message = pipe.recv().deadline(by()).wait().unwrap().unwrap();
    let echo = Message::new()
        .with_metadata(message.metadata())
        .with_tensor(&message.tensors()[0].part(0, 10).unwrap());
    pipe.send(&echo).deadline(by()).start().unwrap()
}

/// Waits until the process has this, but for what does not grow with the pipes.
fn settles(wanted: Taken) {
    let end = Instant::now() + LONG;
    let close = |now: usize, wanted: usize| now.abs_diff(wanted) <= SLACK;
    loop {
        let now = Taken::now();
        if close(now.descriptors, wanted.descriptors)
            && close(now.threads, wanted.threads)
            && close(now.mappings, wanted.mappings)
        {
            return;
        }
        assert!(Instant::now() < end, "{now:?} does not become {wanted:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Pipes that are at rest take what docs/pipes.md says.
fn take(before: Taken, pipes: usize, far: bool) {
    let docs = include_str!("../../../docs/pipes.md");
    let place = if far { "| two hosts |" } else { "| one host |" };
    let row = docs.lines().find(|line| line.starts_with(place)).unwrap();
    let each = |cell| pipes * row.split('|').nth(cell).unwrap().trim().parse::<usize>().unwrap();
    settles(Taken {
        descriptors: before.descriptors + each(2),
        mappings: before.mappings + each(3),
        threads: before.threads + each(4),
    });
}

fn many(test: &str, host: Option<&str>) {
    if Rank::of_this_process().is_some() {
        return other_end();
    }
    // They count what the process has.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let context = context_of(host.map(|_| "here"));
    let listener = Listener::local(&context).unwrap();
    let mut others = Ranks::start_with(test, PROCESSES, |_, mut command| {
        command.env(ADDRESS, listener.address());
        host.map(|host| command.env("TEST_OF_PIPES_HOST", host));
        command
    });
    let span = Span::whole(context.host().alloc(LARGE).unwrap()).slice(0..LARGE).unwrap();
    let lent = Tensor::flat(span, Dtype::U8).unwrap();
    let message = |number: usize| Message::new().with_metadata(number.to_le_bytes()).with_tensor(&lent);
    let echoed = |pipes: &[Pipe]| {
        let send =
            |(number, pipe): (usize, &Pipe)| pipe.send(&message(number)).deadline(by()).start().unwrap();
        let sent: Vec<_> = pipes.iter().enumerate().map(send).collect();
        for (number, pipe) in pipes.iter().enumerate() {
            let echo = pipe.recv().deadline(by()).wait().unwrap().unwrap();
            assert_eq!(echo.metadata(), number.to_le_bytes());
            assert_eq!(echo.tensors()[0].len(), 10);
        }
        sent.iter().for_each(|sent| sent.wait().unwrap());
    };
    let accept = |count: usize| (0..count).map(|_| listener.accept(by()).unwrap()).collect::<Vec<_>>();
    let first = accept(PROCESSES);
    echoed(&first);
    for other in &mut others.ranks {
        assert_eq!(other.hear(), "warm");
    }
    let before = Taken::now();
    echoed(&first);
    let pipes = accept(PROCESSES * EACH);
    take(before, pipes.len(), host.is_some());
    echoed(&pipes);
    // Threads that carried what was started go again, and the pipes stay.
    take(before, pipes.len(), host.is_some());
    drop(pipes);
    settles(before);
    drop(first);
    ranks::all_succeed(others.ranks);
}

#[test]
fn on_one_host() {
    many("on_one_host", None);
}

#[test]
fn on_two_hosts() {
    many("on_two_hosts", Some("elsewhere"));
}
