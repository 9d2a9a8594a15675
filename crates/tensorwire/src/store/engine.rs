//! The store itself, without sockets, files, threads or a clock. Requests go in and answers come out: at once, or
//! when a later request makes them possible.

use std::collections::{HashMap, VecDeque};

use super::{Limits, Reply, Request};

/// Names a caller that may have to wait. Whoever drives the engine gives them out, one for each parked request.
pub(super) type Token = u64;

/// What a request gives, or why it was refused.
pub(super) type Answer = Result<Reply, String>;

/// The state of one store.
#[derive(Debug)]
pub(super) struct Engine {
    values: HashMap<String, Vec<u8>>,
    queues: HashMap<String, VecDeque<Vec<u8>>>,
    barriers: HashMap<String, Gathering>,
    parked: HashMap<Token, Parked>,
    /// The requests to look at again when something appears under a key. A parked request is listed under exactly one of
    /// its missing keys, so that nobody is woken in vain.
    watchers: HashMap<String, Vec<Token>>,
    limits: Limits,
    /// Values and queued values.
    entries: usize,
    bytes: usize,
}

/// A barrier that some, but not all callers have reached.
#[derive(Debug)]
struct Gathering {
    world: u64,
    inside: Vec<Token>,
}

#[derive(Debug)]
struct Parked {
    request: Request,
    /// Which of its keys it is listed under.
    at: usize,
}

/// Why a waiting request has no reply yet.
enum Obstacle {
    Missing(usize),
    Refused(String),
}

impl Engine {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            values: HashMap::new(),
            queues: HashMap::new(),
            barriers: HashMap::new(),
            parked: HashMap::new(),
            watchers: HashMap::new(),
            limits,
            entries: 0,
            bytes: 0,
        }
    }

    /// Executes a request, or parks it under the caller's token and gives `None`. Answers to requests parked
    /// earlier that this one makes possible are added to `released`.
    pub(super) fn apply(
        &mut self,
        token: Token,
        request: Request,
        released: &mut Vec<(Token, Answer)>,
    ) -> Option<Answer> {
        let answer = match request {
            Request::Get(_) | Request::Wait(_) | Request::MultiGet(_) | Request::Pop { wait: true, .. } => {
                match self.attempt(&request, 0) {
                    Ok(reply) => Ok(reply),
                    Err(Obstacle::Refused(why)) => Err(why),
                    Err(Obstacle::Missing(at)) => {
                        self.park(token, Parked { request, at });
                        return None;
                    }
                }
            }
            Request::Barrier { key, world } => return self.enter(token, key, world, released),
            Request::Set(key, value) => self.put(vec![(key, value)], released),
            Request::MultiSet(pairs) => self.put(pairs, released),
            Request::CompareSet { key, expected, desired } => {
                self.compare_set(key, expected, desired, released)
            }
            Request::Add(key, delta) => self.add(key, delta, released),
            Request::Append(key, more) => self.append(key, &more, released),
            Request::Push(key, value) => self.push(key, value, released),
            Request::Pop { key, wait: false } => Ok(self.pop(&key).map_or(Reply::Nothing, Reply::Value)),
            Request::QueueLen(key) => Ok(Reply::Number(self.queue_len(&key) as i64)),
            Request::Check(keys) => Ok(Reply::Truth(keys.iter().all(|key| self.exists(key)))),
            Request::NumKeys => Ok(Reply::Number(self.values.len() as i64)),
            Request::ListKeys => Ok(Reply::Keys(self.values.keys().cloned().collect())),
            Request::Delete(key) => Ok(Reply::Truth(self.delete(&key))),
        };
        Some(answer)
    }

    /// Forgets a parked request. Gives whether there was one; a barrier counts one caller less.
    pub(super) fn cancel(&mut self, token: Token) -> bool {
        let Some(parked) = self.parked.remove(&token) else { return false };
        if let Request::Barrier { key, .. } = &parked.request {
            if let Some(gathering) = self.barriers.get_mut(key) {
                gathering.inside.retain(|other| *other != token);
                if gathering.inside.is_empty() {
                    self.barriers.remove(key);
                }
            }
            return true;
        }
        let key = &keys_of(&parked.request)[parked.at];
        if let Some(tokens) = self.watchers.get_mut(key) {
            tokens.retain(|other| *other != token);
            if tokens.is_empty() {
                self.watchers.remove(key);
            }
        }
        true
    }

    /// The value of a key, if it has one.
    pub(super) fn value(&self, key: &str) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    /// All keys that have values.
    pub(super) fn keys(&self) -> impl ExactSizeIterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    /// How many values a queue holds.
    pub(super) fn queue_len(&self, key: &str) -> usize {
        self.queues.get(key).map_or(0, VecDeque::len)
    }

    /// What a waiting request lacks now, in words.
    pub(super) fn lacks(&self, request: &Request) -> String {
        match request {
            Request::Barrier { key, world } => {
                let inside = self.barriers.get(key).map_or(0, |gathering| gathering.inside.len());
                format!("{inside} of {world} are inside")
            }
            Request::Wait(keys) => super::name_missing(&self.without(keys, Self::exists)),
            Request::Get(_) | Request::MultiGet(_) => super::name_missing(
                &self.without(keys_of(request), |engine, key| engine.values.contains_key(key)),
            ),
            _ => String::new(),
        }
    }

    fn without(&self, keys: &[String], has: impl Fn(&Self, &str) -> bool) -> Vec<String> {
        keys.iter().filter(|key| !has(self, key)).cloned().collect()
    }

    /// Whether there is a value, or something in a queue.
    fn exists(&self, key: &str) -> bool {
        self.values.contains_key(key) || self.queues.contains_key(key)
    }

    /// The reply to a request that may have to wait. The search for a missing key starts at `from` and goes round,
    /// so that keys which appear in order cost one look each.
    fn attempt(&mut self, request: &Request, from: usize) -> Result<Reply, Obstacle> {
        match request {
            Request::Pop { key, .. } => self.pop(key).map(Reply::Value).ok_or(Obstacle::Missing(0)),
            Request::Get(key) => {
                self.values.get(key).map(|value| Reply::Value(value.clone())).ok_or(Obstacle::Missing(0))
            }
            Request::MultiGet(keys) => {
                let size = |key: &String| self.values.get(key).map(Vec::len);
                let mut total = 0_usize;
                for at in around(keys.len(), from) {
                    total = total.saturating_add(size(&keys[at]).ok_or(Obstacle::Missing(at))?);
                }
                if total > self.limits.request {
                    let why = format!(
                        "the values asked for have {total} bytes, at most {} fit into a reply",
                        self.limits.request
                    );
                    return Err(Obstacle::Refused(why));
                }
                Ok(Reply::Values(keys.iter().filter_map(|key| self.values.get(key).cloned()).collect()))
            }
            _ => {
                let keys = keys_of(request);
                match around(keys.len(), from).find(|at| !self.exists(&keys[*at])) {
                    Some(at) => Err(Obstacle::Missing(at)),
                    None => Ok(Reply::Done),
                }
            }
        }
    }

    fn park(&mut self, token: Token, parked: Parked) {
        let key = &keys_of(&parked.request)[parked.at];
        match self.watchers.get_mut(key) {
            Some(tokens) => tokens.push(token),
            None => {
                self.watchers.insert(key.clone(), vec![token]);
            }
        }
        self.parked.insert(token, parked);
    }

    /// Looks again at those who watch a key, oldest first.
    fn wake(&mut self, key: &str, released: &mut Vec<(Token, Answer)>) {
        if self.watchers.is_empty() {
            return;
        }
        for token in self.watchers.remove(key).unwrap_or_default() {
            let Some(parked) = self.parked.remove(&token) else { continue };
            match self.attempt(&parked.request, parked.at) {
                Ok(reply) => released.push((token, Ok(reply))),
                Err(Obstacle::Refused(why)) => released.push((token, Err(why))),
                Err(Obstacle::Missing(at)) => self.park(token, Parked { at, ..parked }),
            }
        }
    }

    /// Sets all pairs, or none if they do not fit.
    fn put(&mut self, pairs: Vec<(String, Vec<u8>)>, released: &mut Vec<(Token, Answer)>) -> Answer {
        let bytes = pairs.iter().map(|(key, value)| key.len() + value.len()).sum();
        let replaced = match pairs.as_slice() {
            [(key, _)] => self.values.get(key).map_or((0, 0), |old| (1, key.len() + old.len())),
            _ => (0, 0),
        };
        self.room((pairs.len(), bytes), replaced)?;
        let mut fresh = Vec::new();
        for (key, value) in pairs {
            self.bytes += value.len();
            if let Some(old) = self.values.get_mut(&key) {
                self.bytes -= old.len();
                *old = value;
                continue;
            }
            self.bytes += key.len();
            self.entries += 1;
            if !self.watchers.is_empty() && self.watchers.contains_key(&key) {
                fresh.push(key.clone());
            }
            self.values.insert(key, value);
        }
        for key in fresh {
            self.wake(&key, released);
        }
        Ok(Reply::Done)
    }

    fn compare_set(
        &mut self,
        key: String,
        expected: Vec<u8>,
        desired: Vec<u8>,
        released: &mut Vec<(Token, Answer)>,
    ) -> Answer {
        match self.values.get(&key) {
            Some(current) if *current != expected => Ok(Reply::Value(current.clone())),
            None if !expected.is_empty() => Ok(Reply::Value(Vec::new())),
            _ => self.put(vec![(key, desired.clone())], released).map(|_| Reply::Value(desired)),
        }
    }

    fn add(&mut self, key: String, delta: i64, released: &mut Vec<(Token, Answer)>) -> Answer {
        let sum = plus(&key, self.value(&key), delta)?;
        self.put(vec![(key, sum.to_string().into_bytes())], released).map(|_| Reply::Number(sum))
    }

    fn append(&mut self, key: String, more: &[u8], released: &mut Vec<(Token, Answer)>) -> Answer {
        let len = self.values.get(&key).map_or(0, Vec::len) + more.len();
        if len > self.limits.value {
            return Err(format!(
                "the value of {key:?} would have {len} bytes, at most {} are taken",
                self.limits.value
            ));
        }
        if let Some(value) = self.values.get_mut(&key) {
            if self.bytes + more.len() > self.limits.bytes {
                return Err(full(&self.limits));
            }
            self.bytes += more.len();
            value.extend_from_slice(more);
            return Ok(Reply::Done);
        }
        self.put(vec![(key, more.to_vec())], released)
    }

    fn push(&mut self, key: String, value: Vec<u8>, released: &mut Vec<(Token, Answer)>) -> Answer {
        self.room((1, key.len() + value.len()), (0, 0))?;
        self.bytes += key.len() + value.len();
        self.entries += 1;
        if let Some(queue) = self.queues.get_mut(&key) {
            queue.push_back(value);
            return Ok(Reply::Done);
        }
        // Nobody can be waiting for a queue that held something already.
        self.queues.insert(key.clone(), VecDeque::from([value]));
        self.wake(&key, released);
        Ok(Reply::Done)
    }

    fn pop(&mut self, key: &str) -> Option<Vec<u8>> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front()?;
        if queue.is_empty() {
            self.queues.remove(key);
        }
        self.entries -= 1;
        self.bytes -= key.len() + value.len();
        Some(value)
    }

    fn delete(&mut self, key: &str) -> bool {
        let Some(value) = self.values.remove(key) else { return false };
        self.entries -= 1;
        self.bytes -= key.len() + value.len();
        true
    }

    fn enter(
        &mut self,
        token: Token,
        key: String,
        world: u64,
        released: &mut Vec<(Token, Answer)>,
    ) -> Option<Answer> {
        if world == 0 {
            return Some(Err(format!("barrier {key:?}: a world of 0 callers cannot meet")));
        }
        let gathering =
            self.barriers.entry(key.clone()).or_insert_with(|| Gathering { world, inside: Vec::new() });
        if gathering.world != world {
            let why = format!(
                "barrier {key:?}: this caller says {world} callers, those inside say {}",
                gathering.world
            );
            return Some(Err(why));
        }
        if gathering.inside.len() as u64 + 1 < world {
            gathering.inside.push(token);
            self.parked.insert(token, Parked { request: Request::Barrier { key, world }, at: 0 });
            return None;
        }
        let inside = self.barriers.remove(&key).map(|gathering| gathering.inside).unwrap_or_default();
        for other in inside {
            self.parked.remove(&other);
            released.push((other, Ok(Reply::Done)));
        }
        Some(Ok(Reply::Done))
    }

    /// Refuses what would not fit; `replaced` is what goes away for it.
    fn room(&self, added: (usize, usize), replaced: (usize, usize)) -> Result<(), String> {
        let entries = self.entries.saturating_add(added.0) - replaced.0;
        let bytes = self.bytes.saturating_add(added.1) - replaced.1;
        if entries > self.limits.keys || bytes > self.limits.bytes { Err(full(&self.limits)) } else { Ok(()) }
    }
}

/// A counter's next value, by the rules that all kinds share.
pub(super) fn plus(key: &str, value: Option<&[u8]>, delta: i64) -> Result<i64, String> {
    let Some(value) = value else { return Ok(delta) };
    let number = std::str::from_utf8(value).ok().and_then(|text| text.trim().parse::<i64>().ok());
    let number = number.ok_or_else(|| format!("add to {key:?}: its value is not a number"))?;
    number.checked_add(delta).ok_or_else(|| format!("add to {key:?}: {number} + {delta} leaves 64 bits"))
}

fn full(limits: &Limits) -> String {
    format!("the store is full: it takes {} keys and {} bytes", limits.keys, limits.bytes)
}

fn keys_of(request: &Request) -> &[String] {
    match request {
        Request::Get(key) | Request::Pop { key, .. } => std::slice::from_ref(key),
        Request::Wait(keys) | Request::MultiGet(keys) => keys,
        _ => &[],
    }
}

fn around(len: usize, from: usize) -> impl Iterator<Item = usize> {
    (from..len).chain(0..from)
}

#[cfg(test)]
mod tests;
