//! What an exchange does over every kind of store.

use std::thread;

use tensorwire::store::StoreExchange;
use tensorwire::{Error, PeerFaultKind};

use super::{Open, long, short};

fn exchange(open: Open<'_>, name: &str, rank: usize, world: usize) -> StoreExchange {
    StoreExchange::new(open(), name, rank, world).unwrap()
}

/// Runs `body` for each rank of an exchange, each in a thread.
fn on_ranks<T: Send>(
    open: Open<'_>,
    (name, world): (&str, usize),
    body: impl Fn(usize, &StoreExchange) -> T + Sync,
) -> Vec<T> {
    let body = &body;
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| scope.spawn(move || body(rank, &exchange(open, name, rank, world))))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// What is in the store.
fn keys(open: Open<'_>) -> Vec<String> {
    open().list_keys().unwrap()
}

/// 0 bytes, a few, and many.
fn value(round: usize, rank: usize) -> Vec<u8> {
    vec![(round * 16 + rank) as u8; (rank + round) % 3 * 40_000 + rank * round]
}

pub(crate) fn exchange_of_many_rounds(open: Open<'_>) {
    on_ranks(open, ("many", 4), |rank, exchange| {
        for round in 0..6 {
            let all: Vec<_> = (0..4).map(|rank| value(round, rank)).collect();
            assert!(exchange.all_gather(&value(round, rank), long()).unwrap() == all, "round {round}");
            exchange.barrier(long()).unwrap();
        }
        assert_eq!(exchange.all_gather(b"", long()).unwrap(), [b""; 4]);
    });
    // Those of the last round.
    assert_eq!(keys(open), ["many/12/0", "many/12/1", "many/12/2", "many/12/3"]);
    on_ranks(open, ("closed", 3), |rank, exchange| {
        exchange.barrier(long()).unwrap();
        exchange.all_gather(&[rank as u8], long()).unwrap();
        exchange.close(long()).unwrap();
        exchange.close(long()).unwrap();
        assert!(matches!(exchange.barrier(long()), Err(Error::Misuse(_))));
    });
    assert_eq!(keys(open).len(), 4, "{:?}", keys(open));
}

pub(crate) fn exchange_with_a_late_rank(open: Open<'_>) {
    on_ranks(open, ("late", 3), |rank, exchange| {
        for round in 0..3 {
            if rank == round {
                let others = (0..3).filter(|other| *other != rank);
                let others: Vec<String> = others.map(|other| format!("late/{round}/{other}")).collect();
                let others: Vec<&str> = others.iter().map(String::as_str).collect();
                open().wait_by(&others, long()).unwrap();
            }
            match round {
                1 => exchange.barrier(long()).unwrap(),
                _ => assert_eq!(exchange.all_gather(&[rank as u8], long()).unwrap(), [[0], [1], [2]]),
            }
        }
    });
}

pub(crate) fn exchange_without_some_ranks(open: Open<'_>) {
    let third = exchange(open, "lonely", 2, 4);
    let error = third.all_gather(b"2", short()).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert_eq!(error.ranks(), [0, 1, 3]);
    assert!(error.to_string().contains("ranks 0, 1, 3 have not come"), "{error}");
    let first = exchange(open, "lonely", 0, 4);
    assert_eq!(first.barrier(short()).unwrap_err().ranks(), [1, 3]);
    let fourth = exchange(open, "lonely", 3, 4);
    let error = fourth.barrier(short()).unwrap_err();
    assert_eq!(error.ranks(), [1]);
    let text = r#"in round 0 of exchange "lonely": rank 1 has not come"#;
    assert!(error.to_string().contains(text), "{error}");
    // It completes the round.
    exchange(open, "lonely", 1, 4).barrier(long()).unwrap();
}

/// The rule of rounds: a rank whose time is up has been there, and goes on with the next round. What nobody reads any more
/// goes away all the same.
pub(crate) fn exchange_after_time_outs(open: Open<'_>) {
    let [first, second, third] = [0, 1, 2].map(|rank| exchange(open, "again", rank, 3));
    for round in 0..2 {
        assert_eq!(first.all_gather(&[round], short()).unwrap_err().ranks(), [1, 2]);
    }
    assert_eq!(second.all_gather(&[10], short()).unwrap_err().ranks(), [2]);
    // The third comes late to round 0, and finds what both gave. Others are still to come to round 1: nothing goes away.
    assert_eq!(third.all_gather(&[20], long()).unwrap(), [[0], [10], [20]]);
    assert_eq!(second.all_gather(&[11], short()).unwrap_err().ranks(), [2]);
    assert_eq!(keys(open).len(), 5, "{:?}", keys(open));
    // Now round 1 is complete: the third removes its key of round 0. The other two are in no later round yet.
    assert_eq!(third.all_gather(&[21], long()).unwrap(), [[1], [11], [21]]);
    assert_eq!(keys(open), ["again/0/0", "again/0/1", "again/1/0", "again/1/1", "again/1/2"]);
    // All meet in round 2, and then only that is left.
    thread::scope(|scope| {
        for exchange in [&first, &second, &third] {
            scope.spawn(|| assert_eq!(exchange.all_gather(b"2", long()).unwrap(), [b"2"; 3]));
        }
    });
    assert_eq!(keys(open), ["again/2/0", "again/2/1", "again/2/2"]);
    // A rank that gives up before it closes leaves nothing either.
    assert!(second.barrier(short()).unwrap_err().is_timeout());
    for exchange in [first, second, third] {
        assert!(!keys(open).is_empty());
        exchange.close(long()).unwrap();
    }
    assert_eq!(keys(open), Vec::<String>::new());
}

/// Their names are alike: the keys of one begin as those of another.
pub(crate) fn exchanges_at_once(open: Open<'_>) {
    let names = ["at", "at/0", "at/0/1", "another"];
    thread::scope(|scope| {
        for name in names {
            scope.spawn(move || {
                on_ranks(open, (name, 2), |rank, exchange| {
                    for round in 0..5 {
                        let value = |rank| format!("{name} {round} {rank}").into_bytes();
                        assert_eq!(exchange.all_gather(&value(rank), long()).unwrap(), [value(0), value(1)]);
                    }
                    if name != "another" {
                        exchange.close(long()).unwrap();
                    }
                })
            });
        }
    });
    assert_eq!(keys(open), ["another/4/0", "another/4/1"]);
}

/// All have come, so a barrier is passed. Those who want values cannot have them.
pub(crate) fn exchange_of_different_calls(open: Open<'_>) {
    let gathered = on_ranks(open, ("mixed", 3), |rank, exchange| {
        if rank != 1 {
            return exchange.all_gather(b"v", long()).map(drop);
        }
        exchange.barrier(long())
    });
    assert!(gathered[1].is_ok());
    for rank in [0, 2] {
        let Err(Error::Peer(fault)) = &gathered[rank] else { panic!("{:?}", gathered[rank]) };
        assert_eq!((fault.kind, fault.rank), (PeerFaultKind::Mismatch, Some(1)), "{fault}");
        assert!(fault.detail.contains("barrier was called by rank 1, all_gather by ranks 0, 2"), "{fault}");
    }
}

/// Which threads of two ranks meet is not known. But each round has one value of each rank, and all ranks get the same.
pub(crate) fn exchange_of_threads(open: Open<'_>) {
    let got = on_ranks(open, ("turns", 2), |rank, exchange| {
        let mut got: Vec<Vec<Vec<u8>>> = thread::scope(|scope| {
            let threads: Vec<_> = (0..3)
                .map(|thread| {
                    scope.spawn(move || {
                        let value = |n: usize| format!("{rank} {thread} {n}").into_bytes();
                        let rounds = (0..4).map(|n| exchange.all_gather(&value(n), long()).unwrap());
                        rounds.collect::<Vec<_>>()
                    })
                })
                .collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        got.sort();
        got
    });
    assert_eq!(got[0], got[1]);
    assert_eq!(got[0].len(), 12);
    assert_eq!(keys(open), ["turns/11/0", "turns/11/1"]);
    // A thread that does not get its turn in time has not come to its round. Then the ranks meet again.
    let [first, second] = [0, 1].map(|rank| exchange(open, "turn", rank, 2));
    thread::scope(|scope| {
        let inside = scope.spawn(|| first.barrier(long()));
        open().wait_by(&["turn/0/0"], long()).unwrap();
        let error = first.barrier(short()).unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("another thread"), "{error}");
        second.barrier(long()).unwrap();
        inside.join().unwrap().unwrap();
        assert_eq!(second.barrier(short()).unwrap_err().ranks(), [0]);
        scope.spawn(|| first.barrier(long()).unwrap());
        second.barrier(long()).unwrap();
    });
    assert_eq!(keys(open), ["turn/2/0", "turn/2/1", "turns/11/0", "turns/11/1"]);
}
