//! The engine against a model that is too simple to be wrong: it keeps all waiting requests in one list and tries
//! every one of them after every change.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::*;

#[derive(Default)]
struct Model {
    values: BTreeMap<String, Vec<u8>>,
    queues: BTreeMap<String, VecDeque<Vec<u8>>>,
    waiting: Vec<(Token, Request)>,
}

impl Model {
    fn exists(&self, key: &str) -> bool {
        self.values.contains_key(key) || self.queues.get(key).is_some_and(|queue| !queue.is_empty())
    }

    /// The answer, if there is one now.
    fn attempt(&mut self, request: &Request) -> Option<Answer> {
        let reply = match request.clone() {
            Request::Set(key, value) => {
                self.values.insert(key, value);
                Reply::Done
            }
            Request::MultiSet(pairs) => {
                self.values.extend(pairs);
                Reply::Done
            }
            Request::CompareSet { key, expected, desired } => {
                let current = self.values.get(&key);
                if current.map_or(expected.is_empty(), |current| *current == expected) {
                    self.values.insert(key.clone(), desired);
                }
                Reply::Value(self.values.get(&key).cloned().unwrap_or_default())
            }
            Request::Get(key) => Reply::Value(self.values.get(&key)?.clone()),
            Request::Add(key, delta) => {
                let text = self
                    .values
                    .get(&key)
                    .map_or("0".into(), |value| String::from_utf8_lossy(value).into_owned());
                let Some(sum) = text.parse::<i64>().ok().and_then(|n| n.checked_add(delta)) else {
                    return Some(Err(String::new()));
                };
                self.values.insert(key, sum.to_string().into_bytes());
                Reply::Number(sum)
            }
            Request::Check(keys) => Reply::Truth(keys.iter().all(|key| self.exists(key))),
            Request::Wait(keys) => keys.iter().all(|key| self.exists(key)).then_some(Reply::Done)?,
            Request::NumKeys => Reply::Number(self.values.len() as i64),
            Request::Delete(key) => Reply::Truth(self.values.remove(&key).is_some()),
            Request::Append(key, value) => {
                self.values.entry(key).or_default().extend(value);
                Reply::Done
            }
            Request::MultiGet(keys) => {
                Reply::Values(keys.iter().map(|key| self.values.get(key).cloned()).collect::<Option<_>>()?)
            }
            Request::Push(key, value) => {
                self.queues.entry(key).or_default().push_back(value);
                Reply::Done
            }
            Request::Pop { key, wait } => match self.queues.get_mut(&key).and_then(VecDeque::pop_front) {
                Some(value) => Reply::Value(value),
                None if wait => return None,
                None => Reply::Nothing,
            },
            Request::QueueLen(key) => Reply::Number(self.queues.get(&key).map_or(0, VecDeque::len) as i64),
            Request::ListKeys => Reply::Keys(self.values.keys().cloned().collect()),
            Request::Barrier { .. } => return None,
        };
        Some(Ok(reply))
    }

    fn apply(&mut self, token: Token, request: Request) -> (Option<Answer>, Vec<(Token, Answer)>) {
        let mut released = Vec::new();
        let answer = match &request {
            Request::Barrier { key, world } => self.enter(token, key, *world, &mut released),
            _ => self.attempt(&request),
        };
        if answer.is_none() {
            self.waiting.push((token, request));
            return (None, released);
        }
        for (token, request) in std::mem::take(&mut self.waiting) {
            match self.attempt(&request) {
                Some(answer) => released.push((token, answer)),
                None => self.waiting.push((token, request)),
            }
        }
        (answer, released)
    }

    fn enter(
        &mut self,
        _: Token,
        key: &str,
        world: u64,
        released: &mut Vec<(Token, Answer)>,
    ) -> Option<Answer> {
        let here = |(_, request): &(Token, Request)| matches!(request, Request::Barrier { key: other, .. } if other == key);
        let inside: Vec<Token> =
            self.waiting.iter().filter(|waiting| here(waiting)).map(|(token, _)| *token).collect();
        if (inside.len() as u64) + 1 < world {
            return None;
        }
        self.waiting.retain(|waiting| !here(waiting));
        released.extend(inside.into_iter().map(|token| (token, Ok(Reply::Done))));
        Some(Ok(Reply::Done))
    }
}

#[derive(Debug, Clone)]
enum Act {
    Ask(Request),
    /// Cancels one of the requests so far.
    Cancel(usize),
}

fn act() -> impl Strategy<Value = Act> {
    let key = || prop::sample::select(vec!["a", "b", "c", "d"]).prop_map(str::to_owned);
    // A request that waits for several keys and a queue among them has no place in line that a simple model could know.
    let queue = || prop::sample::select(vec!["p", "q"]).prop_map(str::to_owned);
    let value = || {
        prop::sample::select(vec!["", "1", "-7", "x", "9223372036854775807"])
            .prop_map(|v| v.as_bytes().to_vec())
    };
    let keys = || prop::collection::vec(key(), 0..4);
    let request = prop_oneof![
        (key(), value()).prop_map(|(k, v)| Request::Set(k, v)),
        (key(), value(), value()).prop_map(|(key, expected, desired)| Request::CompareSet {
            key,
            expected,
            desired
        }),
        key().prop_map(Request::Get),
        (key(), -3_i64..4).prop_map(|(k, n)| Request::Add(k, n)),
        keys().prop_map(Request::Check),
        keys().prop_map(Request::Wait),
        queue().prop_map(|q| Request::Wait(vec![q])),
        Just(Request::NumKeys),
        key().prop_map(Request::Delete),
        (key(), value()).prop_map(|(k, v)| Request::Append(k, v)),
        keys().prop_map(Request::MultiGet),
        prop::collection::vec((key(), value()), 0..4).prop_map(Request::MultiSet),
        (queue(), value()).prop_map(|(k, v)| Request::Push(k, v)),
        (queue(), any::<bool>()).prop_map(|(key, wait)| Request::Pop { key, wait }),
        queue().prop_map(Request::QueueLen),
        Just(Request::ListKeys),
        queue().prop_map(|key| Request::Barrier { world: if key == "p" { 2 } else { 3 }, key }),
    ];
    prop_oneof![8 => request.prop_map(Act::Ask), 1 => (0..200_usize).prop_map(Act::Cancel)]
}

/// Refusals are compared by being refusals, keys without their order.
fn plain(answer: Answer) -> Option<Reply> {
    match answer {
        Ok(Reply::Keys(mut keys)) => {
            keys.sort();
            Some(Reply::Keys(keys))
        }
        other => other.ok(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn does_what_the_model_does(acts in prop::collection::vec(act(), 0..120)) {
        let mut engine = Engine::new(Limits::none());
        let mut model = Model::default();
        for (token, act) in acts.into_iter().enumerate() {
            let token = token as Token;
            match act {
                Act::Cancel(which) => {
                    let before = model.waiting.len();
                    model.waiting.retain(|(other, _)| *other != which as Token);
                    prop_assert_eq!(engine.cancel(which as Token), before != model.waiting.len());
                }
                Act::Ask(request) => {
                    let mut released = Vec::new();
                    let answer = engine.apply(token, request.clone(), &mut released);
                    let (expected, mut also) = model.apply(token, request);
                    prop_assert_eq!(answer.map(plain), expected.map(plain));
                    let mut released: Vec<_> = released.into_iter().map(|(t, a)| (t, plain(a))).collect();
                    released.sort_by_key(|(token, _)| *token);
                    also.sort_by_key(|(token, _)| *token);
                    prop_assert_eq!(released, also.into_iter().map(|(t, a)| (t, plain(a))).collect::<Vec<_>>());
                }
            }
            let bytes: usize = model.values.iter().map(|(k, v)| k.len() + v.len()).sum();
            let queued: usize = model.queues.iter().flat_map(|(k, q)| q.iter().map(|v| k.len() + v.len())).sum();
            prop_assert_eq!(engine.bytes, bytes + queued);
            prop_assert_eq!(engine.parked.len(), model.waiting.len());
            let listed: usize = engine.watchers.values().map(Vec::len).sum();
            let inside: usize = engine.barriers.values().map(|gathering| gathering.inside.len()).sum();
            prop_assert_eq!(listed + inside, model.waiting.len());
        }
    }
}

#[test]
fn a_reply_has_a_limit_too() {
    let mut engine = Engine::new(Limits { request: 100, ..Limits::none() });
    let mut released = Vec::new();
    let set = |key: &str, len| Request::Set(key.into(), vec![0; len]);
    assert_eq!(engine.apply(0, set("a", 60), &mut released), Some(Ok(Reply::Done)));
    let twice = Request::MultiGet(vec!["a".into(), "a".into()]);
    assert!(matches!(engine.apply(1, twice, &mut released), Some(Err(_))));
    let both = Request::MultiGet(vec!["a".into(), "b".into()]);
    assert_eq!(engine.apply(2, both, &mut released), None);
    assert_eq!(engine.apply(3, set("b", 60), &mut released), Some(Ok(Reply::Done)));
    assert!(matches!(released.as_slice(), [(2, Err(_))]));
}
