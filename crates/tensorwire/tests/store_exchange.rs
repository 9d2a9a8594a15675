//! Exchanges over a store: what they cost, how they are interrupted, any order of time-outs, and ranks that are processes.
//! What they do over each kind of store is in the conformance suite.

#![allow(clippy::unwrap_used, clippy::panic)]

mod ranks;

use std::cell::Cell;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use ranks::{LONG, Rank, Ranks, context, on_threads};
use tensorwire::store::wire::{Decoder, Frame, PROBE};
use tensorwire::store::{
    FileStore, Limits, MemoryStore, Reply, Request, Store, StoreExchange, TcpServer, TcpStore,
};
use tensorwire::{Deadline, Error, Group, Result, interrupt};

fn long() -> Deadline {
    Deadline::after(LONG)
}

// Costs

/// A store that counts its calls. Its clones count together.
#[derive(Debug)]
struct Counting {
    below: Arc<dyn Store>,
    /// What was called, and the first key.
    calls: Arc<Mutex<Vec<(&'static str, String)>>>,
}

impl Counting {
    fn new(below: Arc<dyn Store>) -> Self {
        Self { below, calls: Arc::default() }
    }

    fn take(&self) -> Vec<(&'static str, String)> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }
}

impl Store for Counting {
    fn call(&self, request: Request, deadline: Deadline) -> Result<Reply> {
        let first = |keys: &[String]| keys.first().cloned().unwrap_or_default();
        let call = match &request {
            Request::Set(key, _) => ("set", key.clone()),
            Request::Delete(key) => ("delete", key.clone()),
            Request::Wait(keys) => ("wait", first(keys)),
            Request::MultiGet(keys) => ("multi_get", first(keys)),
            _ => ("another", String::new()),
        };
        self.calls.lock().unwrap().push(call);
        self.below.call(request, deadline)
    }

    fn timeout(&self) -> Duration {
        self.below.timeout()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.below.set_timeout(timeout);
    }

    fn clone_store(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(Self { below: self.below.clone_store()?, calls: self.calls.clone() }))
    }
}

#[test]
fn three_requests_for_each_of_256_ranks() {
    const WORLD: usize = 256;
    let memory = MemoryStore::new();
    on_threads(WORLD, |rank| {
        let store = Arc::new(Counting::new(memory.clone_store().unwrap()));
        let exchange = StoreExchange::new(store.clone(), "cost", rank, WORLD).unwrap();
        let names = || store.take().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        let values = exchange.all_gather(&(rank as u16).to_le_bytes(), long()).unwrap();
        assert!(values.iter().enumerate().all(|(rank, value)| *value == (rank as u16).to_le_bytes()));
        assert_eq!(names(), ["set", "multi_get"]);
        exchange.barrier(long()).unwrap();
        assert_eq!(names(), ["set", "wait", "delete"]);
        exchange.all_gather(b"", long()).unwrap();
        assert_eq!(names(), ["set", "multi_get", "delete"]);
    });
    assert_eq!((&memory as &dyn Store).num_keys().unwrap(), WORLD as u64);
}

#[test]
fn a_split_asks_for_all_ranks_at_once() {
    const WORLD: usize = 8;
    let store = Arc::new(Counting::new(Arc::new(MemoryStore::new())));
    let groups = on_threads(WORLD, |rank| {
        let builder = Group::builder().context(&context()).timeout(LONG);
        builder.from_store(store.clone(), rank, WORLD).unwrap()
    });
    store.take();
    for split in 0..3 {
        on_threads(WORLD, |rank| assert!(groups[rank].split(None, 0).unwrap().is_none()));
        let calls = store.take();
        let of_split = calls.iter().filter(|(_, key)| key.starts_with("tensorwire/world/split/"));
        assert_eq!(of_split.count(), if split == 0 { 2 * WORLD } else { 3 * WORLD }, "{calls:?}");
    }
}

/// A proxy that counts the operations that clients send to a server.
struct Proxy {
    port: u16,
    operations: Arc<AtomicUsize>,
}

impl Proxy {
    fn start(server: &TcpServer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (behind, operations) = (server.local_addr(), Arc::new(AtomicUsize::new(0)));
        let counter = operations.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(std::io::Result::ok) {
                let server = TcpStream::connect(behind).unwrap();
                for stream in [&client, &server] {
                    stream.set_nodelay(true).unwrap();
                }
                let (mut replies, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
                thread::spawn(move || std::io::copy(&mut replies, &mut back));
                let counter = counter.clone();
                thread::spawn(move || forward(client, &server, &counter));
            }
        });
        Self { port, operations }
    }

    fn take(&self) -> usize {
        self.operations.swap(0, Ordering::SeqCst)
    }
}

fn forward(mut client: TcpStream, mut server: &TcpStream, operations: &AtomicUsize) {
    let (mut decoder, mut bytes, mut chunk) = (Decoder::default(), Vec::new(), vec![0; 64 << 10]);
    while let Ok(len @ 1..) = client.read(&mut chunk) {
        bytes.extend_from_slice(&chunk[..len]);
        while let Some((frame, used)) = decoder.next(&bytes, &Limits::default()).unwrap() {
            bytes.drain(..used);
            let counts = match &frame {
                // How a new connection learns whose server it is.
                Frame::Operation { request: Request::Check(keys), .. } => *keys != [PROBE],
                Frame::Operation { .. } => true,
                _ => false,
            };
            operations.fetch_add(usize::from(counts), Ordering::SeqCst);
        }
        if server.write_all(&chunk[..len]).is_err() {
            break;
        }
    }
    let _ = server.shutdown(Shutdown::Both);
}

#[test]
fn three_operations_for_each_rank_over_tcp() {
    const WORLD: usize = 32;
    let server = TcpServer::bind("127.0.0.1:0").unwrap();
    let proxy = Proxy::start(&server);
    let exchanges: Vec<_> = (0..WORLD)
        .map(|rank| {
            let store = TcpStore::connect("127.0.0.1", proxy.port, LONG).unwrap();
            StoreExchange::new(Arc::new(store), "cost", rank, WORLD).unwrap()
        })
        .collect();
    assert_eq!(proxy.take(), 0);
    on_threads(WORLD, |rank| exchanges[rank].barrier(long()).unwrap());
    assert_eq!(proxy.take(), 2 * WORLD);
    on_threads(WORLD, |rank| exchanges[rank].all_gather(&[7; 100], long()).unwrap());
    assert_eq!(proxy.take(), 3 * WORLD);
    on_threads(WORLD, |rank| exchanges[rank].barrier(long()).unwrap());
    assert_eq!(proxy.take(), 3 * WORLD);
}

/// Our client asks servers of torch in more steps. How many depends on how long it waits; here it is the last to come.
#[test]
fn the_last_rank_at_a_server_of_torch() {
    let server = TcpServer::bind("127.0.0.1:0").unwrap();
    let proxy = Proxy::start(&server);
    let first = TcpStore::connect("127.0.0.1", server.local_addr().port(), LONG).unwrap();
    let last = TcpStore::connect_as_torch("127.0.0.1", proxy.port, LONG).unwrap();
    let (looks, first) = (first.clone_store().unwrap(), Arc::new(first));
    let first = StoreExchange::new(first, "cost", 0, 2).unwrap();
    let last = StoreExchange::new(Arc::new(last), "cost", 1, 2).unwrap();
    type Call = fn(&StoreExchange) -> Result<()>;
    let gather: Call = |exchange| exchange.all_gather(b"value", long()).map(drop);
    let barrier: Call = |exchange| exchange.barrier(long());
    // Set, check and get, then one to remove the key of the round before.
    for (round, (call, operations)) in [(gather, 3), (gather, 4), (barrier, 3)].into_iter().enumerate() {
        thread::scope(|scope| {
            scope.spawn(|| call(&first).unwrap());
            looks.wait(&[&format!("cost/{round}/0")]).unwrap();
            call(&last).unwrap();
        });
        assert_eq!(proxy.take(), operations, "round {round}");
    }
}

#[test]
fn a_value_that_is_too_long_is_refused() {
    let server = TcpServer::bind("127.0.0.1:0").unwrap();
    let store = TcpStore::connect("127.0.0.1", server.local_addr().port(), LONG).unwrap();
    let exchange = StoreExchange::new(Arc::new(store), "large", 0, 1).unwrap();
    let error = exchange.all_gather(&vec![0; 8 << 20], long()).unwrap_err();
    assert!(matches!(&error, Error::Misuse(text) if text.contains("bytes in a value")), "{error}");
    let most = vec![1; (8 << 20) - 1];
    assert!(exchange.all_gather(&most, long()).unwrap() == [most]);
    assert!(StoreExchange::new(Arc::new(MemoryStore::new()), "x", 2, 2).is_err());
}

#[test]
fn what_others_wrote_is_no_value() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    store.set("x/0/1", b"something").unwrap();
    let error = StoreExchange::new(store, "x", 0, 2).unwrap().all_gather(b"", long()).unwrap_err();
    assert!(error.to_string().contains("\"x/0/1\""), "{error}");
}

// Interruptions

/// Runs `body` with a hook that ends the first wait that asks it.
fn interrupted<T>(body: impl FnOnce() -> T) -> T {
    let over = Cell::new(false);
    let look = move || match over.replace(true) {
        false => Err(Error::Interrupted("enough".into())),
        true => Ok(()),
    };
    interrupt::with_interrupt(Rc::new(look), body)
}

/// It is as if the time were up: the round is over, and the next one works.
fn interrupt_over(open: &(dyn Fn() -> Arc<dyn Store> + Sync)) {
    let [first, second] = [0, 1].map(|rank| StoreExchange::new(open(), "x", rank, 2).unwrap());
    for round in [0, 2] {
        let error = interrupted(|| first.all_gather(&[round], long())).unwrap_err();
        assert!(matches!(&error, Error::Interrupted(text) if text == "enough"), "{error}");
        assert_eq!(second.all_gather(&[7], long()).unwrap(), [[round], [7]]);
        let error = interrupted(|| second.barrier(long())).unwrap_err();
        assert!(matches!(error, Error::Interrupted(_)), "{error}");
        first.barrier(long()).unwrap();
    }
    thread::scope(|scope| {
        scope.spawn(|| first.barrier(long()).unwrap());
        second.barrier(long()).unwrap();
    });
    assert_eq!(open().list_keys().unwrap(), ["x/4/0", "x/4/1"]);
}

#[test]
fn waits_can_be_interrupted() {
    let memory = MemoryStore::new();
    interrupt_over(&|| memory.clone_store().unwrap());
    let server = TcpServer::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().port();
    interrupt_over(&|| Arc::new(TcpStore::connect("127.0.0.1", port, LONG).unwrap()));
    let server = TcpServer::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().port();
    interrupt_over(&|| Arc::new(TcpStore::connect_as_torch("127.0.0.1", port, LONG).unwrap()));
    let path = std::env::temp_dir().join(format!("tensorwire-exchange-{}", std::process::id()));
    interrupt_over(&|| Arc::new(FileStore::open(&path).unwrap()));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn the_wait_for_a_turn_can_be_interrupted() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let exchange = StoreExchange::new(store.clone(), "x", 0, 2).unwrap();
    thread::scope(|scope| {
        let inside = scope.spawn(|| exchange.barrier(long()));
        store.wait(&["x/0/0"]).unwrap();
        assert!(matches!(interrupted(|| exchange.barrier(long())), Err(Error::Interrupted(_))));
        store.set("x/0/1", b"").unwrap();
        inside.join().unwrap().unwrap();
    });
}

// Any values, any order of time-outs

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Ranks that have patience get every rank's value in the order of ranks, whoever gives up when. At the end the
    /// store has the keys of the last round.
    #[test]
    fn all_ranks_get_all_values(
        rounds in (1..=5_usize).prop_flat_map(|world| {
            let call = (prop::collection::vec(any::<u8>(), 0..20), any::<bool>());
            prop::collection::vec(prop::collection::vec(call, world), 1..8)
        })
    ) {
        let world = rounds[0].len();
        let memory = MemoryStore::new();
        on_threads(world, |rank| {
            let exchange = StoreExchange::new(memory.clone_store().unwrap(), "any", rank, world).unwrap();
            for round in &rounds {
                let (value, patient) = &round[rank];
                let now = Deadline::after(Duration::ZERO);
                match exchange.all_gather(value, if *patient { long() } else { now }) {
                    Ok(values) => assert!(values.iter().eq(round.iter().map(|(value, _)| value))),
                    Err(error) => assert!(error.is_timeout() && !patient && !error.ranks().is_empty(), "{error}"),
                }
            }
            exchange.barrier(long()).unwrap();
        });
        let last: Vec<String> = (0..world).map(|rank| format!("any/{}/{rank}", rounds.len())).collect();
        assert_eq!((&memory as &dyn Store).list_keys().unwrap(), last);
    }
}

// Processes

/// Several rounds; to the last one the third rank does not come.
fn as_process(rank: &Rank) {
    let exchange = StoreExchange::new(rank.store.clone(), "processes", rank.rank, rank.world).unwrap();
    for round in 0..20 {
        let value = |rank: usize| vec![rank as u8; round * 100 * rank];
        let all: Vec<_> = (0..rank.world).map(value).collect();
        assert!(exchange.all_gather(&value(rank.rank), long()).unwrap() == all);
        exchange.barrier(long()).unwrap();
    }
    if rank.rank != 2 {
        let error = exchange.barrier(Deadline::after(Duration::from_millis(300))).unwrap_err();
        assert!(error.is_timeout() && error.ranks().contains(&2), "{error}");
    }
    exchange.close(long()).unwrap();
}

#[test]
fn processes_over_tcp() {
    if let Some(rank) = Rank::of_this_process() {
        return as_process(&rank);
    }
    let Ranks { ranks, server } = Ranks::start("processes_over_tcp", 3);
    ranks.into_iter().for_each(ranks::Process::expect_success);
    let store = TcpStore::connect("127.0.0.1", server.local_addr().port(), LONG).unwrap();
    assert_eq!((&store as &dyn Store).num_keys().unwrap(), 0);
}

#[test]
fn processes_over_a_file() {
    if let Some(rank) = Rank::of_this_process() {
        return as_process(&rank);
    }
    let path = std::env::temp_dir().join(format!("tensorwire-exchange-ranks-{}", std::process::id()));
    let adapt = |_: usize, mut command: std::process::Command| {
        command.env(ranks::FILE, &path);
        command
    };
    let Ranks { ranks, server: _server } = Ranks::start_with("processes_over_a_file", 3, adapt);
    ranks.into_iter().for_each(ranks::Process::expect_success);
    let store = FileStore::open(&path).unwrap();
    assert_eq!((&store as &dyn Store).num_keys().unwrap(), 0);
    std::fs::remove_file(path).unwrap();
}
