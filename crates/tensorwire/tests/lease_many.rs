//! Memory that is sent very often, and very many leases at once: nothing grows, and slots are used again.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "lease_peer/mod.rs"]
mod lease_peer;
#[path = "../../device/tests/process/mod.rs"]
mod process;

use std::time::Instant;

use lease_peer::{Peer, byte, context, memory, settles, soon, usage_of};
use process::{Child, call_home, command};
use tensorwire::device::fd::Connection;
use tensorwire::{Context, Lease, Loan, Terms, Token};

/// Sends in `scripts/test`, and in the long test.
const SENDS: usize = 50_000;
const MANY_SENDS: usize = 1_000_000;
/// Tokens of one message, and messages that may be on their way.
const BATCH: usize = 100;
const AHEAD: usize = 8;
/// Leases at once in `scripts/test`, and in the long test.
const OUTSTANDING: usize = 10_000;
const MANY_OUTSTANDING: usize = 100_000;
/// The most there can be.
const MOST: usize = 1 << 18;
/// What a process may grow by: its allocator does not give everything back.
const NOISE: usize = 4 << 20;

/// What other processes do. Those that count what they have are processes of their own.
#[test]
fn child() {
    match process::role().as_deref() {
        Some("sends") => send(number()),
        Some("receives") => receive(&context(), &call_home().unwrap()),
        Some("lends many") => lend_many(number()),
        Some("holds many") => hold_many(&context(), &call_home().unwrap()),
        Some("lends all") => lend_all(),
        _ => {}
    }
}

/// How often, or how many: from who has started this process.
fn number() -> usize {
    std::env::var("TW_NUMBER").unwrap().parse().unwrap()
}

/// Has a process of its own do it, however long that takes; shows what it prints.
fn have_done(role: &str, number: usize) {
    let mut other = command(role);
    other.env("TW_NUMBER", number.to_string()).stdout(std::process::Stdio::inherit());
    let mut other = Child::start(&mut other);
    while std::path::Path::new(&format!("/proc/{}/exe", other.pid())).exists() {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    other.succeed();
}

#[test]
fn the_same_memory_is_sent_very_often() {
    have_done("sends", SENDS);
}

#[test]
#[ignore = "takes a minute"]
fn the_same_memory_is_sent_a_million_times() {
    have_done("sends", MANY_SENDS);
}

#[test]
fn many_leases_at_once() {
    have_done("lends many", OUTSTANDING);
}

#[test]
#[ignore = "takes a minute"]
fn very_many_leases_at_once() {
    have_done("lends many", MANY_OUTSTANDING);
}

#[test]
#[ignore = "takes half a minute"]
fn there_is_an_end_to_leases() {
    have_done("lends all", 0);
}

/// Bytes of memory that a process has.
fn resident(pid: &str) -> usize {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    text.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

type Has = ((usize, usize), usize);

fn has(pid: &str) -> Has {
    (usage_of(pid), resident(pid))
}

/// The same descriptors and mappings, and hardly more memory.
fn assert_no_growth(who: &str, before: Has, now: Has) {
    assert_eq!(now.0, before.0, "{who}");
    assert!(now.1 < before.1 + NOISE, "{who} grew from {} to {} bytes", before.1, now.1);
}

/// Sends the same memory so often to another process, which redeems and releases it each time.
fn send(times: usize) {
    let us = context();
    let Peer { child: mut them, connection } = Peer::start_as("receives");
    let pid = them.pid().to_string();
    let span = memory(&us, 1 << 20, 5);
    let (mut before, mut begin) = (None, Instant::now());
    let (mut sent, mut answered) = (0, 0);
    let warm = times / 10;
    while answered < times {
        while sent < times && sent < answered + AHEAD * BATCH {
            let count = BATCH.min(times - sent);
            let tokens = (0..count).map(|_| {
                let token = us.grant(&span, &Terms::default()).unwrap().token().to_bytes();
                [&(token.len() as u32).to_le_bytes()[..], &token].concat()
            });
            connection.send(&tokens.collect::<Vec<_>>().concat(), &[], soon()).unwrap();
            sent += count;
        }
        let (frame, _) = connection.recv(soon()).unwrap();
        answered += u32::from_le_bytes(frame.try_into().unwrap()) as usize;
        if answered >= warm && before.is_none() {
            before = Some((has("self"), has(&pid)));
            begin = Instant::now();
        }
    }
    let took = begin.elapsed();
    let (ours, theirs) = before.unwrap();
    assert_no_growth("the sender", ours, has("self"));
    assert_no_growth("the receiver", theirs, has(&pid));
    settles(|| us.lease_stats().unwrap().granted, (0, 0));
    println!("{times} sends, {:?} each", took / (times - warm) as u32);
    connection.send(b"end", &[], soon()).unwrap();
    them.succeed();
}

/// The tokens of a message.
fn tokens(mut frame: &[u8]) -> Vec<Token> {
    let mut tokens = Vec::new();
    while let Some((len, rest)) = frame.split_first_chunk::<4>() {
        let (token, rest) = rest.split_at(u32::from_le_bytes(*len) as usize);
        tokens.push(Token::from_bytes(token).unwrap());
        frame = rest;
    }
    tokens
}

fn receive(us: &Context, home: &Connection) {
    loop {
        let (frame, _) = home.recv(soon()).unwrap();
        if frame == b"end" {
            return;
        }
        let tokens = tokens(&frame);
        for token in &tokens {
            let loan = us.redeem(token, soon()).unwrap();
            assert_eq!(byte(loan.span()), 5);
        }
        home.send(&(tokens.len() as u32).to_le_bytes(), &[], soon()).unwrap();
    }
}

/// Puts things in an order that is always the same, and looks random.
fn shuffle<T>(things: &mut [T]) {
    let mut state = 88_172_645_463_325_252u64;
    for index in (1..things.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        things.swap(index, state as usize % (index + 1));
    }
}

/// Many leases, all held by another process, are dropped in random order by both; and once more, in the same slots.
fn lend_many(count: usize) {
    let us = context();
    let Peer { child: mut them, connection } = Peer::start_as("holds many");
    let pid = them.pid().to_string();
    let span = memory(&us, 4096, 5);
    let mut before = None;
    for _ in 0..2 {
        let terms = Terms::default();
        let mut leases: Vec<Lease> = (0..count).map(|_| us.grant(&span, &terms).unwrap()).collect();
        for some in leases.chunks(BATCH) {
            let tokens = some.iter().map(|lease| {
                let token = lease.token().to_bytes();
                [&(token.len() as u32).to_le_bytes()[..], &token].concat()
            });
            connection.send(&tokens.collect::<Vec<_>>().concat(), &[], soon()).unwrap();
        }
        connection.send(b"held?", &[], soon()).unwrap();
        assert_eq!(connection.recv(soon()).unwrap().0, b"yes");
        let stats = us.lease_stats().unwrap();
        assert_eq!((stats.granted.0, stats.redeemed.0), (count as u64, count as u64));
        if let Some((ours, theirs)) = before {
            assert_no_growth("the owner", ours, has("self"));
            assert_no_growth("the holder", theirs, has(&pid));
        }
        before = Some((has("self"), has(&pid)));
        // Half of them by the owner first, and the rest by the holder first.
        shuffle(&mut leases);
        leases.truncate(count / 2);
        connection.send(b"release", &[], soon()).unwrap();
        assert_eq!(connection.recv(soon()).unwrap().0, b"done");
        settles(|| us.lease_stats().unwrap().granted.0, leases.len() as u64);
        assert_eq!(us.lease_stats().unwrap().redeemed, (0, 0));
        drop(leases);
        assert_eq!(us.lease_stats().unwrap().granted, (0, 0));
    }
    connection.send(b"end", &[], soon()).unwrap();
    them.succeed();
}

fn hold_many(us: &Context, home: &Connection) {
    let mut loans: Vec<Loan> = Vec::new();
    loop {
        let (frame, _) = home.recv(soon()).unwrap();
        match &frame[..] {
            b"end" => return,
            b"held?" => home.send(b"yes", &[], soon()).unwrap(),
            b"release" => {
                shuffle(&mut loans);
                loans.clear();
                home.send(b"done", &[], soon()).unwrap();
            }
            frame => loans.extend(tokens(frame).iter().map(|token| us.redeem(token, soon()).unwrap())),
        }
    }
}

/// As many leases as there can be, and one more.
fn lend_all() {
    let us = context();
    let span = memory(&us, 1, 1);
    let terms = Terms::default().uses(0);
    let mut leases: Vec<Lease> = (0..MOST).map(|_| us.grant(&span, &terms).unwrap()).collect();
    let error = us.grant(&span, &terms).unwrap_err().to_string();
    assert!(error.contains("262144 grants are outstanding"), "{error}");
    drop(leases.pop());
    leases.push(us.grant(&span, &terms).unwrap());
    drop(leases);
    assert_eq!(us.lease_stats().unwrap().granted, (0, 0));
}
