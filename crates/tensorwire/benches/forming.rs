//! How long a large world needs to meet at the store: our own server on loopback, and a thread with a connection for each
//! rank. Ranks do what they do when a group forms, but for private sockets, shared memory and the star of the hosts. The
//! hosts are made up. The time is that from the first rank that begins to the last one that knows the map of all hosts.
//!
//! `cargo bench -p tensorwire --bench forming -- RANKS PER_HOST`
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use tensorwire::group::rehearsal::World;
use tensorwire::store::{Reply, Request, Store, TcpServer, TcpStore};
use tensorwire::{Config, Context, Deadline, Result};

const LONG: Duration = Duration::from_secs(120);

/// A store that counts its calls.
#[derive(Debug)]
struct Counting {
    below: TcpStore,
    calls: AtomicUsize,
}

impl Store for Counting {
    fn call(&self, request: Request, deadline: Deadline) -> Result<Reply> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.below.call(request, deadline)
    }

    fn timeout(&self) -> Duration {
        self.below.timeout()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.below.set_timeout(timeout);
    }

    fn clone_store(&self) -> Result<Arc<dyn Store>> {
        self.below.clone_store()
    }
}

fn main() {
    let numbers: Vec<usize> = std::env::args().filter_map(|arg| arg.parse().ok()).collect();
    let worlds = match numbers[..] {
        [ranks, per_host] => vec![(ranks, per_host)],
        _ => vec![(64, 8), (512, 8), (4096, 8)],
    };
    for (ranks, per_host) in worlds {
        measure(World { ranks, per_host, timeout: LONG });
    }
}

fn measure(world: World) {
    let server = TcpServer::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().port();
    let context = Context::new(Config::default()).unwrap();
    let (ready, done) = (Barrier::new(world.ranks + 1), Barrier::new(world.ranks + 1));
    let run = |rank: usize| {
        let below = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
        let store = Arc::new(Counting { below, calls: AtomicUsize::new(0) });
        ready.wait();
        let formed = world.form(&context, store.clone(), rank).unwrap();
        let (calls, id) = (store.calls.load(Ordering::Relaxed), formed.id().unwrap());
        done.wait();
        let begin = Instant::now();
        if rank == 0 {
            formed.tidy().unwrap();
        }
        (calls, id, formed.hosts.len(), begin.elapsed())
    };
    let run = &run;
    let (took, ends) = thread::scope(|scope| {
        let spawn = |rank| {
            let thread = thread::Builder::new().stack_size(256 << 10);
            thread.spawn_scoped(scope, move || run(rank)).unwrap()
        };
        let threads: Vec<_> = (0..world.ranks).map(spawn).collect();
        ready.wait();
        let begin = Instant::now();
        done.wait();
        let took = begin.elapsed();
        (took, threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>())
    });
    assert!(ends.iter().all(|end| (end.1, end.2) == (ends[0].1, ends[0].2)));
    let most = |of: &dyn Fn(usize) -> bool| {
        ends.iter().enumerate().filter(|(rank, _)| of(*rank)).map(|(_, end)| end.0).max().unwrap_or(0)
    };
    println!(
        r#"{{"bench":"forming","ranks":{},"hosts":{},"seconds":{:.2},"tidy_seconds":{:.2},"requests":{},"most_of_a_rank":{},"most_of_a_leader":{},"of_rank_0":{}}}"#,
        world.ranks,
        ends[0].2,
        took.as_secs_f64(),
        ends[0].3.as_secs_f64(),
        ends.iter().map(|end| end.0).sum::<usize>(),
        most(&|rank| rank % world.per_host != 0),
        most(&|rank| rank > 0 && rank % world.per_host == 0),
        ends[0].0,
    );
}
