//! What all_gather and barrier over a store cost: a `StoreExchange` beside a loop that waits for each peer and reads its
//! value. Ranks are threads with a connection each; our own server runs on loopback. The time of a round is that of
//! its slowest rank.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use tensorwire::Deadline;
use tensorwire::store::{Store, StoreExchange, TcpServer, TcpStore};

const BYTES: usize = 64;
/// How often the ways take turns, so that what else the machine does hits all alike.
const TURNS: usize = 3;
const LONG: Duration = Duration::from_secs(120);

/// What one rank does in one round.
type Round<'a> = Box<dyn FnMut(usize) + Send + 'a>;

/// An operation, how it is done, its requests in a round of so many ranks, and how many rounds a turn has.
struct Way {
    op: &'static str,
    way: &'static str,
    requests: fn(usize) -> usize,
    rounds: fn(usize) -> usize,
    make: fn(Arc<dyn Store>, &str, usize, usize) -> Round<'static>,
}

const WAYS: [Way; 4] = [
    Way { op: "all_gather", way: "exchange", requests: |_| 3, rounds: few, make: gather },
    Way {
        op: "all_gather",
        way: "loop",
        requests: |ranks| 2 * ranks - 1,
        rounds: fewer,
        make: gather_in_a_loop,
    },
    Way { op: "barrier", way: "exchange", requests: |_| 3, rounds: few, make: barrier },
    Way { op: "barrier", way: "loop", requests: |ranks| ranks, rounds: fewer, make: barrier_in_a_loop },
];

fn main() {
    for ranks in [2, 16, 64, 256] {
        let server = TcpServer::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().port();
        let stores: Vec<Arc<dyn Store>> = (0..ranks)
            .map(|_| Arc::new(TcpStore::connect("127.0.0.1", port, LONG).unwrap()) as Arc<dyn Store>)
            .collect();
        let mut times = WAYS.map(|_| Vec::new());
        for turn in 0..TURNS {
            for (way, times) in WAYS.iter().zip(&mut times) {
                let name = format!("{} {} {turn}", way.op, way.way);
                times.extend(measure(&stores, &name, way));
            }
        }
        for (way, times) in WAYS.iter().zip(&mut times) {
            times.sort_by(f64::total_cmp);
            let at = |part: f64| times[((times.len() - 1) as f64 * part).round() as usize];
            println!(
                r#"{{"bench":"exchange","op":"{}","way":"{}","ranks":{ranks},"bytes":{},"requests":{},"rounds":{},"p50_us":{:.1},"p99_us":{:.1}}}"#,
                way.op,
                way.way,
                if way.op == "barrier" { 0 } else { BYTES },
                (way.requests)(ranks),
                times.len(),
                at(0.5),
                at(0.99)
            );
        }
    }
}

fn few(ranks: usize) -> usize {
    if ranks > 64 { 15 } else { 50 }
}

fn fewer(ranks: usize) -> usize {
    (1000 / ranks).clamp(2, 50)
}

/// The times of the slowest ranks, in microseconds.
fn measure(stores: &[Arc<dyn Store>], name: &str, way: &Way) -> Vec<f64> {
    let (ranks, rounds) = (stores.len(), (way.rounds)(stores.len()));
    let start = Barrier::new(ranks);
    let of_ranks: Vec<Vec<f64>> = std::thread::scope(|scope| {
        let threads: Vec<_> = stores
            .iter()
            .enumerate()
            .map(|(rank, store)| {
                let start = &start;
                scope.spawn(move || {
                    let mut once = (way.make)(store.clone(), name, rank, ranks);
                    // The first round is not measured.
                    let times = (0..=rounds).map(|round| {
                        start.wait();
                        let begin = Instant::now();
                        once(round);
                        begin.elapsed().as_secs_f64() * 1e6
                    });
                    times.skip(1).collect()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    (0..rounds).map(|round| of_ranks.iter().map(|times| times[round]).fold(0.0, f64::max)).collect()
}

fn gather(store: Arc<dyn Store>, name: &str, rank: usize, ranks: usize) -> Round<'static> {
    let exchange = StoreExchange::new(store, name, rank, ranks).unwrap();
    Box::new(move |_| {
        let values = exchange.all_gather(&[rank as u8; BYTES], Deadline::after(LONG)).unwrap();
        assert_eq!(values.len(), ranks);
    })
}

fn barrier(store: Arc<dyn Store>, name: &str, rank: usize, ranks: usize) -> Round<'static> {
    let exchange = StoreExchange::new(store, name, rank, ranks).unwrap();
    Box::new(move |_| exchange.barrier(Deadline::after(LONG)).unwrap())
}

fn gather_in_a_loop(store: Arc<dyn Store>, name: &str, rank: usize, ranks: usize) -> Round<'static> {
    let name = name.to_owned();
    Box::new(move |round| {
        store.set(&format!("{name}/{round}/{rank}"), &[rank as u8; BYTES]).unwrap();
        for peer in (0..ranks).filter(|peer| *peer != rank) {
            let key = format!("{name}/{round}/{peer}");
            store.wait(&[&key]).unwrap();
            assert_eq!(store.get(&key).unwrap().len(), BYTES);
        }
    })
}

fn barrier_in_a_loop(store: Arc<dyn Store>, name: &str, rank: usize, ranks: usize) -> Round<'static> {
    let name = name.to_owned();
    Box::new(move |round| {
        store.set(&format!("{name}/{round}/{rank}"), b"").unwrap();
        for peer in (0..ranks).filter(|peer| *peer != rank) {
            store.wait(&[&format!("{name}/{round}/{peer}")]).unwrap();
        }
    })
}
