//! Clients that load a server: many connections, few threads, one operation in flight for each thread.

use std::fmt;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tensorwire::device::sync::{AtomicBool, Ordering};
use tensorwire::store::{Store, TcpStore};
use tensorwire::{Error, Result};

use super::waiter::Waiter;
use crate::latency::Latency;

/// How long any operation may take before the bench fails.
const PATIENCE: Duration = Duration::from_secs(30);
/// What is set: about what a rank tells of itself.
const VALUE: [u8; 64] = [7; 64];

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Operation {
    Set,
    Get,
    Add,
    Wake,
    Mixed,
}

impl Operation {
    pub(super) const ALL: [Self; 5] = [Self::Set, Self::Get, Self::Add, Self::Wake, Self::Mixed];
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Set => "set",
            Self::Get => "get",
            Self::Add => "add",
            Self::Wake => "wake",
            Self::Mixed => "mixed",
        })
    }
}

/// Connected clients, a share for each thread.
#[derive(Debug)]
pub(super) struct Load {
    shares: Vec<Vec<TcpStore>>,
    /// In torch's protocol only: our client waits there on a fresh connection, for reasons of its own, which
    /// must not count against the server.
    waiters: Vec<Waiter>,
    /// Distinguishes keys that are waited for from those of earlier loads.
    name: String,
}

impl Load {
    pub(super) fn connect(port: u16, as_torch: bool, clients: u32, threads: u32) -> Result<Self> {
        let connect = if as_torch { TcpStore::connect_as_torch } else { TcpStore::connect };
        let threads = threads.min(clients) as usize;
        let share = |thread: usize| -> Result<Vec<TcpStore>> {
            let count = (clients as usize - thread).div_ceil(threads);
            let client = |client| {
                let store = connect("127.0.0.1", port, PATIENCE)?;
                // Its own key is there from now on.
                store.set(&own_key(thread, client), &VALUE)?;
                Ok(store)
            };
            (0..count).map(client).collect()
        };
        let shares = thread::scope(|scope| {
            let shares: Vec<_> = (0..threads).map(|thread| scope.spawn(move || share(thread))).collect();
            shares
                .into_iter()
                .map(|share| share.join().unwrap_or_else(|_| Err(panicked())))
                .collect::<Result<_>>()
        })?;
        let waiters = if as_torch { threads } else { 0 };
        let waiters = (0..waiters).map(|_| Waiter::connect(port)).collect::<Result<_>>()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Self { shares, waiters, name: format!("wake/{}", now.as_nanos()) })
    }

    /// Runs one kind of operation on all threads for some time.
    pub(super) fn run(&self, op: Operation, round: u32, length: Duration) -> Result<(Latency, Duration)> {
        let start = Barrier::new(self.shares.len());
        // One for each pair of threads.
        let over: Vec<AtomicBool> = self.shares.iter().map(|_| AtomicBool::new(false)).collect();
        thread::scope(|scope| {
            let drive = |thread: usize| {
                let (start, over) = (&start, &over[thread / 2]);
                move || -> Result<(Latency, Duration)> {
                    start.wait();
                    let begun = Instant::now();
                    let latency = match op {
                        Operation::Wake => self.wake(thread, round, begun, length, over)?,
                        op => self.repeat(op, thread, begun, length)?,
                    };
                    Ok((latency, begun.elapsed()))
                }
            };
            let threads: Vec<_> = (0..self.shares.len()).map(|thread| scope.spawn(drive(thread))).collect();
            let mut total = (Latency::default(), Duration::ZERO);
            for thread in threads {
                let (latency, elapsed) = thread.join().map_err(|_| panicked())??;
                total.0.merge(latency);
                total.1 = total.1.max(elapsed);
            }
            Ok(total)
        })
    }

    fn repeat(&self, op: Operation, thread: usize, begun: Instant, length: Duration) -> Result<Latency> {
        let mut latency = Latency::default();
        let clients = &self.shares[thread];
        for turn in 0.. {
            if begun.elapsed() >= length {
                break;
            }
            let (client, key) = (&clients[turn % clients.len()], own_key(thread, turn % clients.len()));
            let op = match (op, turn / clients.len() % 3) {
                (Operation::Mixed, 0) => Operation::Set,
                (Operation::Mixed, 1) => Operation::Get,
                (Operation::Mixed, _) => Operation::Add,
                (op, _) => op,
            };
            let start = Instant::now();
            match op {
                Operation::Set => client.set(&key, &VALUE)?,
                Operation::Get => drop(client.get(&key)?),
                _ => drop(client.add("counter", 1)?),
            }
            latency.add(start.elapsed());
        }
        Ok(latency)
    }

    /// Two threads wake each other in turn; half a round trip is one wake-up. An odd thread out, and a single
    /// client, wait for what is there already.
    fn wake(
        &self,
        thread: usize,
        round: u32,
        begun: Instant,
        length: Duration,
        over: &AtomicBool,
    ) -> Result<Latency> {
        let mut latency = Latency::default();
        let clients = &self.shares[thread];
        let partner = thread ^ 1;
        let alone = partner >= self.shares.len();
        let leads = alone || thread < partner;
        for turn in 0.. {
            let client = &clients[turn % clients.len()];
            let key = |thread: usize| format!("{}/{round}/{thread}/{turn}", self.name);
            let awaited = key(if alone { thread } else { partner });
            let start = Instant::now();
            if leads {
                over.fetch_or(begun.elapsed() >= length, Ordering::Relaxed);
                client.set(&key(thread), &VALUE)?;
            }
            if leads && over.load(Ordering::Relaxed) {
                break;
            }
            match self.waiters.get(thread) {
                Some(waiter) => waiter.wait(&awaited)?,
                None => client.wait(&[&awaited])?,
            }
            if leads {
                latency.add(start.elapsed() / if alone { 1 } else { 2 });
            } else if over.load(Ordering::Relaxed) {
                break;
            } else {
                client.set(&key(thread), &VALUE)?;
            }
        }
        Ok(latency)
    }
}

fn panicked() -> Error {
    Error::misuse("a thread of the bench panicked")
}

fn own_key(thread: usize, client: usize) -> String {
    format!("client/{thread}/{client}")
}
