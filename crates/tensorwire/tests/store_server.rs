//! The TCP store where things go wrong: half requests, nonsense, silence, death, crowds.

#![allow(clippy::unwrap_used, clippy::panic)] // clippy.toml allows them in tests, but not in what tests call

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use tensorwire::store::wire::{self, Frame};
use tensorwire::store::{Dialect, Limits, Request, Store, TcpServer, TcpStore};
use tensorwire::{Deadline, Error, PeerFaultKind};

const LONG: Duration = Duration::from_secs(60);
const HOST: &str = "127.0.0.1";

fn server() -> TcpServer {
    TcpServer::bind((HOST, 0)).unwrap()
}

fn client(server: &TcpServer) -> TcpStore {
    TcpStore::connect(HOST, server.local_addr().port(), LONG).unwrap()
}

/// A client by hand.
struct Raw(TcpStream);

impl Raw {
    fn silent(server: &TcpServer) -> Self {
        let stream = TcpStream::connect(server.local_addr()).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        Self(stream)
    }

    fn new(server: &TcpServer) -> Self {
        let mut raw = Self::silent(server);
        raw.send(&bytes(&Frame::Validate(wire::MAGIC)));
        raw
    }

    fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    fn ask(&mut self, request: Request) {
        self.send(&plain(request));
    }

    fn read(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Nothing came before the reply to this.
    fn is_in_step(&mut self) {
        self.send(&bytes(&Frame::Ping(0xABCD_EF01)));
        assert_eq!(self.read(4), 0xABCD_EF01_u32.to_le_bytes());
    }

    fn is_closed(&mut self) {
        // The end, or a reset where bytes were left unread.
        let mut byte = [0];
        assert!(matches!(self.0.read(&mut byte), Ok(0) | Err(_)));
    }
}

fn bytes(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::encode(frame, &mut bytes);
    bytes
}

fn plain(request: Request) -> Vec<u8> {
    bytes(&Frame::Operation { strict: false, request })
}

fn key(name: &str) -> String {
    format!("/{name}")
}

#[test]
fn a_half_sent_request_stalls_nobody() {
    let server = server();
    let store = client(&server);
    let pairs = vec![(key("a"), b"1".to_vec()), (key("b"), vec![7; 100_000])];
    let request = plain(Request::MultiSet(pairs));
    let mut halves: Vec<Raw> = (0..20).map(|_| Raw::new(&server)).collect();
    for (n, half) in halves.iter_mut().enumerate() {
        half.send(&request[..request.len() * n / 20]);
    }
    store.set("other", b"1").unwrap();
    assert!(!store.check(&["a"]).unwrap(), "half of a multi_set was executed");
    for (n, half) in halves.iter_mut().enumerate() {
        half.send(&request[request.len() * n / 20..]);
        half.is_in_step();
    }
    assert_eq!(store.multi_get(&["a", "b"]).unwrap(), [b"1".to_vec(), vec![7; 100_000]]);
}

#[test]
fn requests_may_come_byte_by_byte_or_all_at_once() {
    let server = server();
    let mut all = bytes(&Frame::Validate(wire::MAGIC));
    all.extend(plain(Request::Set(key("k"), b"value".to_vec())));
    all.extend(plain(Request::MultiSet(vec![(key("x"), b"1".to_vec()), (key("y"), b"".to_vec())])));
    all.extend(plain(Request::Get(key("k"))));
    all.extend(plain(Request::Add(key("x"), 41)));
    all.extend(plain(Request::MultiGet(vec![key("x"), key("none"), key("y")])));
    all.extend(plain(Request::Delete(key("k"))));
    all.extend(plain(Request::NumKeys));
    all.extend(plain(Request::Barrier { key: key("b"), world: 1 }));
    let mut expected = Vec::new();
    wire::put_bytes(&mut expected, b"value");
    wire::put_word(&mut expected, 42);
    [&b"42"[..], b"", b""].iter().for_each(|value| wire::put_bytes(&mut expected, value));
    wire::put_word(&mut expected, 1);
    wire::put_word(&mut expected, 2);
    expected.push(0);
    for step in [1, 3, 1000] {
        let mut raw = Raw::silent(&server);
        for piece in all.chunks(step) {
            raw.send(piece);
        }
        assert_eq!(raw.read(expected.len()), expected, "in pieces of {step}");
        raw.is_in_step();
    }
}

#[test]
fn nonsense_closes_that_one_connection() {
    let server = server();
    let store = client(&server);
    let mut waiting = Raw::new(&server);
    waiting.ask(Request::Wait(vec![key("later")]));
    let word = |n: u64| n.to_le_bytes().to_vec();
    let not_utf8 = [&[3][..], &word(2), &[0xFF, 0xFE]].concat();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("an unknown code", vec![19]),
        ("a code far away", vec![255]),
        ("strict twice", vec![64, 64]),
        ("a long key", [&[3][..], &word(8193)].concat()),
        ("an absurd key", [&[3][..], &word(u64::MAX)].concat()),
        ("a long value", [&[1][..], &word(1), b"k", &word((8 << 20) + 1)].concat()),
        ("an absurd value", [&[9][..], &word(1), b"k", &word(u64::MAX - 7)].concat()),
        ("many keys", [&[6][..], &word(131_073)].concat()),
        ("a negative count", [&[11][..], &word(-1_i64 as u64)].concat()),
        ("no UTF-8", not_utf8),
        ("another magic number", bytes(&Frame::Validate(1))),
    ];
    for (name, nonsense) in &cases {
        let mut raw = Raw::new(&server);
        raw.is_in_step();
        raw.send(nonsense);
        raw.is_closed();
        assert_eq!(store.add("alive", 0).unwrap(), 0, "after {name}");
    }
    for greeting in [&b"GET / HTTP/1.1\r\n\r\n"[..], &plain(Request::NumKeys), &bytes(&Frame::Validate(7))] {
        let mut raw = Raw::silent(&server);
        raw.send(greeting);
        raw.is_closed();
    }
    // What torch's server does when a counter is not a number, so does ours.
    store.set("text", b"abc").unwrap();
    let mut raw = Raw::new(&server);
    raw.ask(Request::Add(key("text"), 1));
    raw.is_closed();
    store.set("later", b"").unwrap();
    assert_eq!(waiting.read(1), [0]);
    waiting.is_in_step();
}

#[test]
fn nobody_is_woken_in_vain() {
    let server = server();
    let store = client(&server);
    let mut raw = Raw::new(&server);
    raw.ask(Request::Wait(vec![key("queue")]));
    store.push("queue", b"1").unwrap();
    assert_eq!(raw.read(1), [0]);
    store.push("queue", b"2").unwrap();
    raw.is_in_step();
    raw.ask(Request::Pop { key: key("queue"), wait: false });
    assert_eq!(raw.read(17), [&2_u64.to_le_bytes()[..], &1_u64.to_le_bytes(), b"1"].concat());
    // A cancelled wait stays cancelled.
    raw.ask(Request::Wait(vec![key("x"), key("y")]));
    store.set("x", b"").unwrap();
    raw.send(&bytes(&Frame::CancelWait));
    assert_eq!(raw.read(1), [1]);
    store.set("y", b"").unwrap();
    raw.is_in_step();
    // A missing GET of a foreign client gives nothing at once.
    raw.ask(Request::Get(key("none")));
    assert_eq!(raw.read(8), [0; 8]);
    // Several waits at once, which torch's clients do not have.
    raw.ask(Request::Wait(vec![key("m")]));
    raw.ask(Request::Wait(vec![key("n")]));
    raw.is_in_step();
    store.multi_set(&[("m", b""), ("n", b"")]).unwrap();
    assert_eq!(raw.read(2), [0, 0]);
    raw.is_in_step();
}

#[test]
fn who_disconnects_is_not_in_the_barrier() {
    let server = server();
    let store = client(&server);
    let mut raw = Raw::new(&server);
    raw.ask(Request::Barrier { key: key("meet"), world: 2 });
    raw.is_in_step();
    raw.0.shutdown(Shutdown::Both).unwrap();
    // The server learns of it a moment later; from then on an arrival waits for another one.
    let deadline = Deadline::after(LONG);
    while store.barrier_by("meet", 2, Deadline::after(Duration::from_millis(20))).is_ok() {
        assert!(!deadline.passed());
    }
    let error = store.barrier_by("meet", 2, Deadline::after(Duration::from_millis(20))).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    let mut raw = Raw::new(&server);
    raw.ask(Request::Barrier { key: key("meet"), world: 2 });
    raw.is_in_step();
    let error = store.barrier_by("meet", 3, Deadline::after(LONG)).unwrap_err();
    assert!(error.to_string().contains("those inside say 2"), "{error}");
}

#[test]
fn a_client_that_does_not_read_stops_nobody() {
    let server = server();
    let store = client(&server);
    store.set("large", &vec![5; 1 << 20]).unwrap();
    let mut slow = Raw::new(&server);
    const REQUESTS: usize = 100;
    slow.send(&plain(Request::Get(key("large"))).repeat(REQUESTS));
    slow.ask(Request::Add(key("after"), 1));
    // The others go on, and the requests of the slow one wait until it reads.
    for _ in 0..50 {
        store.set("other", b"1").unwrap();
    }
    assert_eq!(store.add("after", 0).unwrap(), 0);
    for _ in 0..REQUESTS {
        assert_eq!(slow.read(8), (1_u64 << 20).to_le_bytes());
        assert!(slow.read(1 << 20).iter().all(|byte| *byte == 5));
    }
    assert_eq!(slow.read(8), 1_u64.to_le_bytes());
    slow.is_in_step();
}

#[test]
fn limits_are_kept() {
    let mut limits = Limits::default();
    (limits.bytes, limits.keys, limits.connections, limits.buffered) = (1000, 5, 3, 1 << 20);
    let server = TcpServer::adopt(TcpListener::bind((HOST, 0)).unwrap(), limits).unwrap();
    let store = client(&server);
    let error = store.set("k", &[0; 2000]).unwrap_err();
    assert!(error.to_string().contains("full"), "{error}");
    (0..5).for_each(|n| store.set(&format!("k{n}"), b"1").unwrap());
    assert!(store.set("k5", b"1").unwrap_err().to_string().contains("full"));
    store.set("k4", b"2").unwrap();
    store.delete("k0").unwrap();
    store.push("q", b"1").unwrap();
    assert!(store.push("q", b"2").is_err());
    let big = store.set("k", &vec![0; (8 << 20) + 1]).unwrap_err();
    assert!(matches!(big, Error::Misuse(_)), "{big}");
    assert!(store.get(&"k".repeat(8192)).is_err());
    // Unfinished requests of all clients together.
    let mut hog = Raw::new(&server);
    let _ = hog.0.write_all(&plain(Request::Set(key("hog"), vec![0; 7 << 20]))[..6 << 20]);
    hog.is_closed();
    let crowd: Vec<Raw> = (0..2)
        .map(|_| {
            let mut raw = Raw::new(&server);
            raw.is_in_step();
            raw
        })
        .collect();
    Raw::silent(&server).is_closed();
    drop(crowd);
    assert_eq!(store.num_keys().unwrap(), 4);
}

#[test]
fn a_deadline_holds_whatever_the_server_does() {
    // It accepts and says nothing.
    let mute = TcpListener::bind((HOST, 0)).unwrap();
    let port = mute.local_addr().unwrap().port();
    let started = Instant::now();
    let error = TcpStore::connect(HOST, port, Duration::from_millis(300)).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert!(started.elapsed() >= Duration::from_millis(300));
    // It answers the greeting only, once as a server of ours and once as one of torch.
    for ready in [0_u8, 1] {
        let listener = TcpListener::bind((HOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            let mut held = Vec::new();
            while let Ok((mut stream, _)) = listener.accept() {
                let greeting = bytes(&Frame::Validate(wire::MAGIC)).len() + 5;
                let mut ping = vec![0; greeting];
                stream.read_exact(&mut ping).unwrap();
                let nonce: Vec<u8> = ping[greeting - 4..].to_vec();
                stream.write_all(&[&nonce[..], &[ready]].concat()).unwrap();
                held.push(stream);
            }
        });
        let store = TcpStore::connect(HOST, port, LONG).unwrap();
        assert_eq!(store.dialect().unwrap(), if ready == 0 { Dialect::Strict } else { Dialect::Torch });
        store.set_timeout(Duration::from_millis(200));
        let asks: [fn(&TcpStore) -> tensorwire::Result<()>; 5] = [
            |store| store.wait(&["key"]),
            |store| store.get("key").map(drop),
            |store| store.set("key", b"1"),
            |store| store.pop("key").map(drop),
            |store| store.barrier("key", 2),
        ];
        for ask in asks {
            let error = ask(&store).unwrap_err();
            assert!(error.is_timeout(), "{error}");
        }
    }
}

#[test]
fn a_server_that_ends_is_named_and_found_again() {
    let server = server();
    let address = server.local_addr();
    let store = TcpStore::connect(HOST, address.port(), LONG).unwrap();
    let waiting = thread::spawn(move || (store.get("never"), store));
    // Nobody can see from outside that it waits.
    thread::sleep(Duration::from_millis(500));
    drop(server);
    let (result, store) = waiting.join().unwrap();
    let error = result.unwrap_err();
    let Error::Peer(fault) = &error else { panic!("{error}") };
    assert_eq!(fault.kind, PeerFaultKind::Left);
    assert!(error.to_string().contains(&format!("{HOST}:{}", address.port())), "{error}");
    store.set_timeout(Duration::from_millis(200));
    let error = store.set("key", b"1").unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("refused"), "{error}");
    // Another server at the same place: the client connects again by itself.
    let _server = TcpServer::bind(address).unwrap();
    store.set_timeout(LONG);
    store.set("key", b"2").unwrap();
    assert_eq!(store.get("key").unwrap(), b"2");
}

#[test]
fn a_client_may_come_before_its_server() {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let early =
        thread::spawn(move || TcpStore::connect("localhost", address.port(), LONG).unwrap().add("n", 1));
    thread::sleep(Duration::from_millis(100));
    let _server = TcpServer::bind(address).unwrap();
    assert_eq!(early.join().unwrap().unwrap(), 1);
}

#[test]
fn a_stranger_is_told_from_a_store() {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let stranger = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"220 mail.example.org ESMTP\r\n").unwrap();
        let _ = stream.read(&mut [0; 64]);
    });
    let error = TcpStore::connect(HOST, port, LONG).unwrap_err();
    assert!(error.to_string().contains("is it a TCPStore server?"), "{error}");
    stranger.join().unwrap();
}

#[test]
fn a_thousand_clients_at_once() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
    // Both ends are in this process.
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let clients = 1000.min((files.saturating_sub(200) / 2) as usize);
    let server = server();
    let port = server.local_addr().port();
    thread::scope(|scope| {
        for rank in 0..clients {
            let member = move || {
                let store = TcpStore::connect(HOST, port, LONG).unwrap();
                store.set(&format!("rank{rank}"), rank.to_string().as_bytes()).unwrap();
                store.add("arrived", 1).unwrap();
                let next = (rank + 1) % clients;
                assert_eq!(store.get(&format!("rank{next}")).unwrap(), next.to_string().as_bytes());
                if store.add("arrived", 0).unwrap() == clients as i64 {
                    store.set("all here", b"1").unwrap();
                }
                store.wait(&["all here", &format!("rank{rank}")]).unwrap();
                store.barrier("done", clients as u64).unwrap();
            };
            thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, member).unwrap();
        }
    });
    assert_eq!(client(&server).num_keys().unwrap(), clients as u64 + 2);
}
