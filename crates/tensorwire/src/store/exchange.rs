//! Values that the ranks of a group give each other, over a store alone.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tensorwire_device::Deadline;

use super::{Reply, Request, Store};
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::{Pace, is_interrupt};

/// Behind every value that is gathered. A barrier leaves nothing, so the two can be told apart.
const MARK: u8 = b'=';
/// How long after its deadline a call may ask who is missing. A store that is only slow shall be able to say it.
const GRACE: Duration = Duration::from_secs(2);

/// Gathers values of all ranks, and lets all ranks wait for each other, over a store alone.
///
/// Every rank has one, with the same store and name. All ranks make the same calls in the same order: the first calls
/// of all ranks are one round, the second calls are the next round, and so on. Threads of a rank take turns.
///
/// A call is a round, however it ends. When a rank's time is up, its value stays. Ranks that come later complete the
/// round with it. The next call of the rank is the next round, where it meets the others again.
///
/// A name is used once in a store, also after [`close`](Self::close). A process that starts again needs a new name.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use tensorwire::Deadline;
/// use tensorwire::store::{MemoryStore, StoreExchange};
///
/// # fn main() -> tensorwire::Result<()> {
/// let exchange = StoreExchange::new(Arc::new(MemoryStore::new()), "ports", 0, 1)?;
/// let deadline = Deadline::after(Duration::from_secs(60));
/// assert_eq!(exchange.all_gather(b"4711", deadline)?, [b"4711"]);
/// exchange.barrier(deadline)?;
/// exchange.close(deadline)
/// # }
/// ```
#[derive(Debug)]
pub struct StoreExchange {
    store: Arc<dyn Store>,
    name: String,
    rank: usize,
    world: usize,
    progress: Mutex<Progress>,
    /// Told when a turn ends.
    ended: Condvar,
}

/// How far this rank is.
#[derive(Debug, Default)]
struct Progress {
    /// The next round.
    next: u64,
    /// The rounds of threads that wait for their turn.
    waiting: BTreeSet<u64>,
    /// Whether a thread has its turn.
    busy: bool,
    /// The rounds whose keys of this rank may be in the store, the oldest first.
    left: VecDeque<u64>,
    closed: bool,
}

impl Progress {
    fn is_turn_of(&self, round: u64) -> bool {
        !self.busy && self.waiting.first() == Some(&round)
    }
}

impl StoreExchange {
    /// That of one rank of `world`.
    pub fn new(store: Arc<dyn Store>, name: &str, rank: usize, world: usize) -> Result<Self> {
        if rank >= world {
            return Err(Error::misuse(format!(
                "exchange {name:?}: there is no rank {rank} in a world of {world}"
            )));
        }
        let (progress, ended) = (Mutex::default(), Condvar::new());
        Ok(Self { store, name: name.to_owned(), rank, world, progress, ended })
    }

    /// Gives `value` to all ranks, and gets what each rank gave, in the order of the ranks.
    ///
    /// Values may differ in size, and may be empty. The longest has one byte less than the store takes. The time-out names
    /// the ranks that are missing. It is an error if another rank called [`barrier`](Self::barrier).
    pub fn all_gather(&self, value: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        self.turn(deadline)?.all_gather(value, deadline)
    }

    /// Waits until all ranks have come. The time-out names the ranks that are missing.
    pub fn barrier(&self, deadline: Deadline) -> Result<()> {
        self.turn(deadline)?.barrier(deadline)
    }

    /// Says that this rank makes no more calls, and waits for nobody. The last rank that says so removes what is left in the
    /// store. A store of a user that cannot list its keys keeps them.
    pub fn close(&self, deadline: Deadline) -> Result<()> {
        let mut progress = self.lock();
        if mem::replace(&mut progress.closed, true) {
            return Ok(());
        }
        let counter = format!("{}/closed", self.name);
        let turn = self.enter(progress, deadline);
        let counted = turn.and_then(|turn| {
            let closed = self.store.call(Request::Add(counter.clone(), 1), deadline);
            Ok((turn, super::number(closed?)?))
        });
        // It can be called again where the others have not heard of it.
        let (_turn, closed) = counted.inspect_err(|_| self.lock().closed = false)?;
        if closed < self.world as i64 {
            return Ok(());
        }
        let keys = self.list(deadline)?;
        for key in keys.into_iter().filter(|key| self.has_key(key)).chain([counter]) {
            self.store.call(Request::Delete(key), deadline)?;
        }
        Ok(())
    }

    /// Begins a round. It ends when the turn is dropped.
    pub(crate) fn turn(&self, deadline: Deadline) -> Result<Turn<'_>> {
        let progress = self.lock();
        if progress.closed {
            return Err(Error::misuse(format!("exchange {:?} was closed on this rank", self.name)));
        }
        self.enter(progress, deadline)
    }

    /// Takes the next round and waits for the threads of this rank that are in earlier ones. A thread that does not get its
    /// turn has not come to its round.
    fn enter<'a>(&'a self, mut progress: MutexGuard<'a, Progress>, deadline: Deadline) -> Result<Turn<'a>> {
        let started = Instant::now();
        let mut pace = Pace::since(started);
        let round = progress.next;
        progress.next += 1;
        progress.waiting.insert(round);
        let entered = loop {
            if progress.is_turn_of(round) {
                break Ok(());
            }
            let now = Instant::now();
            if deadline.instant() <= now {
                let doing = format!("waiting for a turn in exchange {:?}", self.name);
                let missing = "another thread of this rank is in it";
                break Err(Error::timed_out(doing, started.elapsed(), missing));
            }
            // The hook that is asked may take long.
            drop(progress);
            let looked = pace.look(now);
            progress = self.lock();
            if let Err(error) = looked {
                break Err(error);
            }
            if !progress.is_turn_of(round) {
                let left = pace.until(deadline).remaining().unwrap_or_default();
                progress = self.ended.wait_timeout(progress, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        };
        progress.waiting.remove(&round);
        match entered {
            Ok(()) => {
                progress.busy = true;
                Ok(Turn { exchange: self, round })
            }
            Err(error) => {
                // It may be the turn of the next one now.
                self.ended.notify_all();
                Err(error)
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The oldest round before this one whose key of this rank may be in the store.
    fn oldest_before(&self, round: u64) -> Option<u64> {
        self.lock().left.front().copied().filter(|oldest| *oldest < round)
    }

    fn key(&self, round: u64, rank: usize) -> String {
        format!("{}/{round}/{rank}", self.name)
    }

    fn keys(&self, round: u64) -> Vec<String> {
        (0..self.world).map(|rank| self.key(round, rank)).collect()
    }

    /// Whether it is the key of a round and a rank. Those of an exchange whose name begins with this one's are not.
    fn has_key(&self, key: &str) -> bool {
        let rest = key.strip_prefix(&self.name).and_then(|rest| rest.strip_prefix('/'));
        rest.and_then(|rest| rest.split_once('/'))
            .is_some_and(|(round, rank)| round.parse::<u64>().is_ok() && rank.parse::<usize>().is_ok())
    }

    fn list(&self, deadline: Deadline) -> Result<Vec<String>> {
        match self.store.call(Request::ListKeys, deadline)? {
            Reply::Keys(keys) => Ok(keys),
            other => Err(super::odd(&other)),
        }
    }

    /// The ranks that have not come to a round.
    fn missing(&self, round: u64, deadline: Deadline) -> Result<Vec<usize>> {
        let mut absent = Vec::new();
        match self.list(deadline) {
            Ok(there) => {
                let there: HashSet<String> = there.into_iter().collect();
                absent.extend((0..self.world).filter(|&rank| !there.contains(&self.key(round, rank))));
            }
            // A store of a user may not be able to list its keys.
            Err(Error::Unsupported { .. }) => {
                for rank in 0..self.world {
                    let asked = Request::Check(vec![self.key(round, rank)]);
                    if !super::truth(self.store.call(asked, deadline)?)? {
                        absent.push(rank);
                    }
                }
            }
            Err(error) => return Err(error),
        }
        Ok(absent)
    }

    /// Some ranks wait in a barrier, where others gather values. The fewer are to blame; at a tie nobody is.
    fn mismatch(&self, round: u64, waits: &[usize]) -> Error {
        let gathers: Vec<usize> = (0..self.world).filter(|rank| !waits.contains(rank)).collect();
        let minority: &[usize] = match waits.len().cmp(&gathers.len()) {
            std::cmp::Ordering::Less => waits,
            std::cmp::Ordering::Equal => &[],
            std::cmp::Ordering::Greater => &gathers,
        };
        let who = if minority.is_empty() { "the ranks".to_owned() } else { name_ranks(minority) };
        let detail = format!(
            "in round {round} of exchange {:?}, barrier was called by {}, all_gather by {}",
            self.name,
            name_ranks(waits),
            name_ranks(&gathers)
        );
        Error::peer(PeerFaultKind::Mismatch, who, minority.first().copied(), detail)
            .about(minority.iter().copied())
    }
}

/// A round of this rank. No other thread of the rank is in one.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    exchange: &'a StoreExchange,
    round: u64,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.exchange.lock().busy = false;
        self.exchange.ended.notify_all();
    }
}

impl Turn<'_> {
    /// Its number.
    pub(crate) fn round(&self) -> u64 {
        self.round
    }

    /// See [`StoreExchange::all_gather`].
    pub(crate) fn all_gather(self, value: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let (exchange, round) = (self.exchange, self.round);
        let marked = [value, &[MARK]].concat();
        let mut values = match self.meet(marked, Request::MultiGet, deadline)? {
            Reply::Values(values) if values.len() == exchange.world => values,
            other => return Err(super::odd(&other)),
        };
        let waits: Vec<usize> = (0..values.len()).filter(|&rank| values[rank].is_empty()).collect();
        if !waits.is_empty() {
            return Err(exchange.mismatch(round, &waits));
        }
        for (rank, value) in values.iter_mut().enumerate() {
            if value.pop() != Some(MARK) {
                let detail = format!(
                    "what lies under {:?} in the store is not from an exchange",
                    exchange.key(round, rank)
                );
                let who = "another user of the store";
                return Err(Error::peer(PeerFaultKind::Misbehaved, who, None, detail));
            }
        }
        Ok(values)
    }

    fn barrier(self, deadline: Deadline) -> Result<()> {
        super::done(self.meet(Vec::new(), Request::Wait, deadline)?)
    }

    /// Hands in this rank's value, waits for all others, and removes what nobody needs any more: three requests.
    fn meet(self, value: Vec<u8>, wait: fn(Vec<String>) -> Request, deadline: Deadline) -> Result<Reply> {
        let (exchange, round) = (self.exchange, self.round);
        let store = &exchange.store;
        let started = Instant::now();
        let await_all = |deadline| store.call(wait(exchange.keys(round)), deadline);
        exchange.lock().left.push_back(round);
        store.call(Request::Set(exchange.key(round, exchange.rank), value), deadline)?;
        let reply = match await_all(deadline) {
            Err(error) if error.is_timeout() => match exchange.missing(round, Deadline::after(GRACE)) {
                // The last one came just now.
                Ok(missing) if missing.is_empty() => await_all(Deadline::after(GRACE))?,
                Ok(missing) => {
                    let doing =
                        format!("waiting for all ranks in round {round} of exchange {:?}", exchange.name);
                    let verb = if missing.len() == 1 { "has" } else { "have" };
                    let text = format!("{} {verb} not come", name_ranks(&missing));
                    return Err(Error::timed_out(doing, started.elapsed(), text).about(missing));
                }
                Err(interrupt) if is_interrupt(&interrupt) => return Err(interrupt),
                // The store does not answer.
                Err(_) => return Err(error),
            },
            reply => reply?,
        };
        // All ranks have written their keys of this round. A rank does so only when its calls of earlier rounds have
        // returned, be it with an error: its threads take turns in the order of their rounds, and it never comes back to a
        // round. So nobody reads the keys of earlier rounds any more. This rank removes its own, also those of rounds in which its time was up.
        // Its key of this round stays: others may not have read it yet.
        while let Some(oldest) = exchange.oldest_before(round) {
            // The round is over for all ranks, and so it is for this one: what cannot be removed now goes in the next round.
            if store.call(Request::Delete(exchange.key(oldest, exchange.rank)), deadline).is_err() {
                break;
            }
            exchange.lock().left.pop_front();
        }
        Ok(reply)
    }
}

/// "rank 3", or "ranks 1, 2 and 5 more".
fn name_ranks(ranks: &[usize]) -> String {
    const NAMED: usize = 8;
    let named = ranks.iter().take(NAMED).map(usize::to_string).collect::<Vec<_>>().join(", ");
    match ranks.len() {
        1 => format!("rank {named}"),
        ..=NAMED => format!("ranks {named}"),
        more => format!("ranks {named} and {} more", more - NAMED),
    }
}
