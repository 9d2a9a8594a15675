//! What every kind of store must do, written once.
//!
//! A case gets a function that opens one more client of one and the same, at first empty, store.

mod exchange;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tensorwire::store::Store;
use tensorwire::{Deadline, Error};

pub(crate) use exchange::*;

/// Opens another client of the store under test.
pub(crate) type Open<'a> = &'a (dyn Fn() -> Arc<dyn Store> + Sync);

/// What a case is called and what it does.
pub(crate) type Case = (&'static str, fn(Open<'_>));

macro_rules! cases {
    ($($case:ident),* $(,)?) => {
        /// All cases, for those who run them by hand.
        #[allow(dead_code)]
        pub(crate) const CASES: &[Case] = &[$((stringify!($case), $case)),*];

        /// Instantiates all cases for one kind. `$with` calls its argument with an `Open`.
        #[allow(unused_macros)]
        macro_rules! conformance {
            ($kind:ident, $with:path) => {
                mod $kind {
                    use super::*;
                    $(#[test] fn $case() { $with(&|open| store_conformance::$case(open)); })*
                }
            };
        }
    };
}

cases!(
    values,
    counters,
    compare_and_set,
    appends,
    many_keys,
    deletes,
    lists,
    queues,
    waits_end_when_keys_come,
    waits_end_when_values_are_pushed,
    waits_need_all_keys_at_once,
    time_outs_name_the_missing,
    zero_time_outs,
    zero_time_outs_of_queues,
    barrier_again_and_again,
    barrier_forgets_who_gives_up,
    racing_poppers,
    clones_do_not_block,
    odd_keys_and_values,
    threads_share_one_client,
    adds_from_many,
    exchange_of_many_rounds,
    exchange_with_a_late_rank,
    exchange_without_some_ranks,
    exchange_after_time_outs,
    exchanges_at_once,
    exchange_of_different_calls,
    exchange_of_threads,
);

const LONG: Duration = Duration::from_secs(60);

/// For what must not come: never for what has to come in this time, which a busy machine may take longer for.
fn short() -> Deadline {
    Deadline::after(Duration::from_millis(100))
}

fn long() -> Deadline {
    Deadline::after(LONG)
}

pub(crate) fn values(open: Open<'_>) {
    let (a, b) = (open(), open());
    a.set("key", b"1").unwrap();
    assert_eq!(b.get("key").unwrap(), b"1");
    b.set("key", b"").unwrap();
    assert_eq!(a.get("key").unwrap(), b"");
    assert!(a.check(&["key"]).unwrap());
    assert!(!a.check(&["key", "other"]).unwrap());
    assert!(a.check(&[]).unwrap());
    a.wait(&[]).unwrap();
    assert_eq!(a.multi_get(&[]).unwrap(), Vec::<Vec<u8>>::new());
}

pub(crate) fn counters(open: Open<'_>) {
    let store = open();
    assert_eq!(store.add("n", 5).unwrap(), 5);
    assert_eq!(store.add("n", -7).unwrap(), -2);
    assert_eq!(store.get("n").unwrap(), b"-2");
    store.set("n", b"41").unwrap();
    assert_eq!(store.add("n", 1).unwrap(), 42);
    store.set("text", b"abc").unwrap();
    let error = store.add("text", 1).unwrap_err();
    // A server of torch closes the connection instead, and our client says that this may be why.
    assert!(error.to_string().contains("not a number"), "{error}");
    // The store is as good as before.
    assert_eq!(store.get("text").unwrap(), b"abc");
    assert_eq!(store.add("n", 0).unwrap(), 42);
}

pub(crate) fn adds_from_many(open: Open<'_>) {
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let store = open();
                (0..25).for_each(|_| assert!(store.add("sum", 2).unwrap() > 0));
            });
        }
    });
    assert_eq!(open().add("sum", 0).unwrap(), 200);
}

pub(crate) fn compare_and_set(open: Open<'_>) {
    let store = open();
    assert_eq!(store.compare_set("k", b"x", b"y").unwrap(), b"", "a missing key is no success");
    assert!(!store.check(&["k"]).unwrap());
    assert_eq!(store.compare_set("k", b"x", b"x").unwrap(), b"");
    assert!(!store.check(&["k"]).unwrap());
    assert_eq!(store.compare_set("k", b"", b"one").unwrap(), b"one");
    assert_eq!(store.compare_set("k", b"", b"two").unwrap(), b"one");
    assert_eq!(store.compare_set("k", b"one", b"two").unwrap(), b"two");
    assert_eq!(store.compare_set("k", b"one", b"three").unwrap(), b"two");
    assert_eq!(store.compare_set("k", b"two", b"two").unwrap(), b"two");
    assert_eq!(store.get("k").unwrap(), b"two");
    // It wakes those who wait for the key.
    thread::scope(|scope| {
        let waiter = open();
        let waiting = scope.spawn(move || waiter.get_by("fresh", long()));
        store.compare_set("fresh", b"", b"here").unwrap();
        assert_eq!(waiting.join().unwrap().unwrap(), b"here");
    });
}

pub(crate) fn appends(open: Open<'_>) {
    let store = open();
    store.append("log", b"ab").unwrap();
    store.append("log", b"").unwrap();
    store.append("log", b"cd").unwrap();
    assert_eq!(store.get("log").unwrap(), b"abcd");
}

pub(crate) fn many_keys(open: Open<'_>) {
    let (a, b) = (open(), open());
    let names: Vec<String> = (0..300).map(|n| format!("many{n}")).collect();
    let values: Vec<Vec<u8>> = (0..300_usize).map(|n| vec![n as u8; n * 7]).collect();
    let pairs: Vec<(&str, &[u8])> =
        names.iter().map(String::as_str).zip(values.iter().map(Vec::as_slice)).collect();
    a.multi_set(&pairs).unwrap();
    let keys: Vec<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(b.multi_get(&keys).unwrap(), values);
    assert_eq!(b.num_keys().unwrap(), 300);
    // The same key twice.
    assert_eq!(b.multi_get(&["many1", "many1"]).unwrap(), [[1; 7], [1; 7]]);
    a.multi_set(&[("twice", b"1"), ("twice", b"2")]).unwrap();
    assert_eq!(b.get("twice").unwrap(), b"2");
    a.multi_set(&[]).unwrap();
}

pub(crate) fn deletes(open: Open<'_>) {
    let (a, b) = (open(), open());
    a.set("gone", b"1").unwrap();
    assert!(b.delete("gone").unwrap());
    assert!(!b.delete("gone").unwrap());
    assert!(!a.check(&["gone"]).unwrap());
    assert!(a.get_by("gone", short()).unwrap_err().is_timeout());
    a.set("gone", b"2").unwrap();
    assert_eq!(b.get("gone").unwrap(), b"2");
}

pub(crate) fn lists(open: Open<'_>) {
    let store = open();
    assert_eq!(store.num_keys().unwrap(), 0);
    assert_eq!(store.list_keys().unwrap(), [""; 0]);
    store.set("b", b"").unwrap();
    store.set("a/x", b"").unwrap();
    store.add("c", 1).unwrap();
    assert_eq!(store.list_keys().unwrap(), ["a/x", "b", "c"]);
    store.delete("b").unwrap();
    assert_eq!(store.list_keys().unwrap(), ["a/x", "c"]);
    assert_eq!(store.num_keys().unwrap(), 2);
}

pub(crate) fn queues(open: Open<'_>) {
    let (a, b) = (open(), open());
    assert_eq!(a.try_pop("q").unwrap(), None);
    assert_eq!(a.queue_len("q").unwrap(), 0);
    a.push("q", b"1").unwrap();
    a.push("q", b"").unwrap();
    a.push("q", b"3").unwrap();
    assert_eq!(b.queue_len("q").unwrap(), 3);
    assert!(b.check(&["q"]).unwrap(), "a queue that holds something exists");
    b.wait_by(&["q"], long()).unwrap();
    assert_eq!(b.pop("q").unwrap(), b"1");
    assert_eq!(a.pop("q").unwrap(), b"");
    assert_eq!(b.try_pop("q").unwrap().unwrap(), b"3");
    assert!(!b.check(&["q"]).unwrap());
    assert!(b.pop_by("q", short()).unwrap_err().is_timeout());
    // A value of the same name is another thing.
    a.set("q", b"value").unwrap();
    assert_eq!(b.try_pop("q").unwrap(), None);
    assert_eq!(b.get("q").unwrap(), b"value");
    // Nor is a queue listed or counted.
    a.push("unlisted", b"1").unwrap();
    assert_eq!(b.list_keys().unwrap(), ["q"]);
    assert_eq!(b.num_keys().unwrap(), 1);
}

pub(crate) fn waits_end_when_keys_come(open: Open<'_>) {
    type Act = fn(&dyn Store, &str);
    let acts: [(&str, Act); 5] = [
        ("set", |s, k| s.set(k, b"1").unwrap()),
        ("add", |s, k| assert_eq!(s.add(k, 1).unwrap(), 1)),
        ("append", |s, k| s.append(k, b"1").unwrap()),
        ("multi_set", |s, k| s.multi_set(&[(k, b"1")]).unwrap()),
        ("compare_set", |s, k| drop(s.compare_set(k, b"", b"1").unwrap())),
    ];
    let store = open();
    for (name, act) in acts {
        thread::scope(|scope| {
            let get = scope.spawn(|| open().get_by(name, long()));
            let wait = scope.spawn(|| open().wait_by(&[name, "set"], long()));
            let multi = scope.spawn(|| open().multi_get_by(&["set", name], long()));
            thread::sleep(Duration::from_millis(20));
            act(&*store, name);
            assert_eq!(get.join().unwrap().unwrap(), b"1");
            wait.join().unwrap().unwrap();
            assert_eq!(multi.join().unwrap().unwrap(), [b"1", b"1"]);
        });
    }
}

pub(crate) fn waits_end_when_values_are_pushed(open: Open<'_>) {
    let store = open();
    thread::scope(|scope| {
        let pop = scope.spawn(|| open().pop_by("pushed", long()));
        thread::sleep(Duration::from_millis(20));
        store.push("pushed", b"p").unwrap();
        assert_eq!(pop.join().unwrap().unwrap(), b"p");
    });
}

pub(crate) fn waits_need_all_keys_at_once(open: Open<'_>) {
    let store = open();
    store.set("x", b"1").unwrap();
    thread::scope(|scope| {
        let multi = scope.spawn(|| open().multi_get_by(&["x", "y"], long()));
        thread::sleep(Duration::from_millis(50));
        store.delete("x").unwrap();
        store.set("y", b"2").unwrap();
        thread::sleep(Duration::from_millis(50));
        assert!(!multi.is_finished());
        store.set("x", b"3").unwrap();
        assert_eq!(multi.join().unwrap().unwrap(), [b"3", b"2"]);
    });
}

pub(crate) fn time_outs_name_the_missing(open: Open<'_>) {
    let store = open();
    store.set("here", b"").unwrap();
    let error = store.wait_by(&["here", "away", "gone"], short()).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    let text = error.to_string();
    assert!(text.contains("away") && text.contains("gone") && !text.contains("here\""), "{text}");
    let names: Vec<String> = (0..20).map(|n| format!("n{n}")).collect();
    let keys: Vec<&str> = names.iter().map(String::as_str).collect();
    let text = store.multi_get_by(&keys, short()).unwrap_err().to_string();
    assert!(text.contains("n0") && text.contains("and 12 more"), "{text}");
    store.set_timeout(Duration::from_millis(50));
    assert_eq!(store.timeout(), Duration::from_millis(50));
    let Error::TimedOut { after, .. } = store.get("never").unwrap_err() else { panic!("no time-out") };
    assert!(after >= Duration::from_millis(50), "{after:?}");
    store.set_timeout(LONG);
    assert_eq!(store.get("here").unwrap(), b"");
}

fn now() -> Deadline {
    Deadline::after(Duration::ZERO)
}

pub(crate) fn zero_time_outs(open: Open<'_>) {
    let store = open();
    store.set("here", b"v").unwrap();
    assert_eq!(store.get_by("here", now()).unwrap(), b"v");
    store.wait_by(&["here"], now()).unwrap();
    assert!(store.get_by("away", now()).unwrap_err().is_timeout());
    assert_eq!(store.get("here").unwrap(), b"v");
}

pub(crate) fn zero_time_outs_of_queues(open: Open<'_>) {
    let store = open();
    store.push("q", b"p").unwrap();
    assert_eq!(store.pop_by("q", now()).unwrap(), b"p");
    assert!(store.pop_by("q", now()).unwrap_err().is_timeout());
}

pub(crate) fn barrier_again_and_again(open: Open<'_>) {
    const WORLD: u64 = 3;
    const ROUNDS: i64 = 4;
    thread::scope(|scope| {
        for _ in 0..WORLD {
            scope.spawn(|| {
                let store = open();
                for round in 1..=ROUNDS {
                    store.add("entered", 1).unwrap();
                    store.barrier_by("meet", WORLD, long()).unwrap();
                    assert!(
                        store.add("entered", 0).unwrap() >= round * WORLD as i64,
                        "went through too early"
                    );
                }
            });
        }
    });
    open().barrier_by("alone", 1, long()).unwrap();
    assert!(open().barrier_by("nobody", 0, short()).is_err());
}

pub(crate) fn barrier_forgets_who_gives_up(open: Open<'_>) {
    let store = open();
    let error = store.barrier_by("meet", 2, short()).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    // If the arrival above still counted, this one would go through alone.
    assert!(store.barrier_by("meet", 2, short()).unwrap_err().is_timeout());
    thread::scope(|scope| {
        let other = scope.spawn(|| open().barrier_by("meet", 2, long()));
        store.barrier_by("meet", 2, long()).unwrap();
        other.join().unwrap().unwrap();
    });
}

pub(crate) fn racing_poppers(open: Open<'_>) {
    const EACH: usize = 10;
    let store = open();
    let mut got: Vec<Vec<u8>> = thread::scope(|scope| {
        let poppers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let store = open();
                    (0..EACH).map(|_| store.pop_by("work", long()).unwrap()).collect::<Vec<_>>()
                })
            })
            .collect();
        for n in 0..4 * EACH {
            store.push("work", format!("{n:03}").as_bytes()).unwrap();
        }
        poppers.into_iter().flat_map(|popper| popper.join().unwrap()).collect()
    });
    got.sort();
    let all: Vec<Vec<u8>> = (0..4 * EACH).map(|n| format!("{n:03}").into_bytes()).collect();
    assert_eq!(got, all);
}

pub(crate) fn clones_do_not_block(open: Open<'_>) {
    let store = open();
    let clone = store.clone_store().unwrap();
    clone.set_timeout(LONG / 2);
    assert_ne!(store.timeout(), clone.timeout());
    thread::scope(|scope| {
        let waiting = scope.spawn(|| store.get_by("later", long()));
        thread::sleep(Duration::from_millis(20));
        clone.set_timeout(LONG);
        clone.set("other", b"1").unwrap();
        clone.set("later", b"2").unwrap();
        assert_eq!(waiting.join().unwrap().unwrap(), b"2");
    });
}

pub(crate) fn threads_share_one_client(open: Open<'_>) {
    let store = open();
    thread::scope(|scope| {
        let waiting: Vec<_> = (0..6)
            .map(|n| {
                scope.spawn({
                    let store = &store;
                    move || store.get_by(&format!("t{n}"), long())
                })
            })
            .collect();
        for n in 0..6 {
            store.set(&format!("t{n}"), b"1").unwrap();
        }
        waiting.into_iter().for_each(|waiting| assert_eq!(waiting.join().unwrap().unwrap(), b"1"));
    });
}

pub(crate) fn odd_keys_and_values(open: Open<'_>) {
    let store = open();
    let long = "k".repeat(4000);
    for key in ["", "/", "//", "a/b/c", "-", "-/x", "schlüssel", "with space\n", "init/", long.as_str()] {
        let value: Vec<u8> = (0..=255).collect();
        store.set(key, &value).unwrap();
        assert_eq!(store.get(key).unwrap(), value, "{key:?}");
        assert!(store.list_keys().unwrap().contains(&key.to_owned()), "{key:?}");
        assert!(store.delete(key).unwrap(), "{key:?}");
    }
    let large = vec![7; 5 << 20];
    store.set("large", &large).unwrap();
    assert!(store.get("large").unwrap() == large);
    assert!(store.multi_get(&["large", "large"]).unwrap() == [large.clone(), large]);
    assert!(store.get_by("absent", short()).is_err());
}
