//! Ranks that do not call the same: everybody gets an error that says who called what, and nobody hangs.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod model;
mod ranks;
mod trouble;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ranks::{LONG, describe};
use tensorwire::collective::{Call, Path};
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Deadline, Dtype, Error, Group, ReduceOp};
use trouble::{SUM, list, turn, with_group, works, zeros};

type Make = for<'a> fn(&'a Group) -> Call<'a>;

const F: Dtype = Dtype::F32;

/// What all but one call, what that one calls, and what both texts must say.
const PAIRS: [(Make, Make, &str, &str); 27] = [
    (
        |g| g.all_reduce(&zeros(F, 10), SUM),
        |g| g.broadcast(&zeros(F, 10), 0),
        "all_reduce of 10 float32 (SUM)",
        "broadcast of 10 float32 from rank 0",
    ),
    (
        |g| g.all_reduce(&zeros(F, 10), SUM),
        |g| g.all_reduce(&zeros(Dtype::I32, 10), SUM),
        "10 float32",
        "10 int32",
    ),
    (|g| g.all_reduce(&zeros(F, 10), SUM), |g| g.all_reduce(&zeros(F, 11), SUM), "10 float32", "11 float32"),
    (|g| g.all_reduce(&zeros(F, 0), SUM), |g| g.all_reduce(&zeros(F, 1), SUM), "0 float32", "1 float32"),
    (
        |g| g.all_reduce(&zeros(F, 2), SUM),
        |g| g.all_reduce(&zeros(F, 700_000), SUM),
        "2 float32",
        "700000 float32",
    ),
    (
        |g| g.all_reduce(&zeros(F, 700_000), SUM),
        |g| g.all_reduce(&zeros(F, 2), SUM),
        "700000 float32",
        "2 float32",
    ),
    (
        |g| g.all_reduce(&zeros(F, 300_000), SUM),
        |g| g.all_reduce(&zeros(F, 300_001), SUM),
        "300000 float32",
        "300001 float32",
    ),
    (|g| g.all_reduce(&zeros(F, 10), SUM), |g| g.all_reduce(&zeros(F, 10), ReduceOp::Max), ": SUM", ": MAX"),
    (
        |g| g.all_reduce(&zeros(F, 10), ReduceOp::PremulSum(1.5)),
        |g| g.all_reduce(&zeros(F, 10), ReduceOp::PremulSum(1.25)),
        ": one factor",
        ": another factor",
    ),
    (|g| g.broadcast(&zeros(F, 10), 0), |g| g.broadcast(&zeros(F, 10), 2), "from rank 0", "from rank 2"),
    (
        |g| g.broadcast(&zeros(F, 900_000), 0),
        |g| g.broadcast(&zeros(F, 900_000), 1),
        "from rank 0",
        "from rank 1",
    ),
    (|g| g.reduce(&zeros(F, 10), SUM, 0), |g| g.reduce(&zeros(F, 10), SUM, 1), "to rank 0", "to rank 1"),
    (
        |g| g.reduce(&zeros(F, 99_000), SUM, 0),
        |g| g.reduce(&zeros(F, 99_000), SUM, 2),
        "to rank 0",
        "to rank 2",
    ),
    (
        |g| g.gather(&list(F, if g.rank() == 0 { &[5; 3] } else { &[] }), &zeros(F, 5), 0),
        |g| g.gather(&list(F, if g.rank() == 2 { &[5; 3] } else { &[] }), &zeros(F, 5), 2),
        "to rank 0",
        "to rank 2",
    ),
    (
        |g| g.scatter(&zeros(F, 5), &list(F, if g.rank() == 0 { &[5; 3] } else { &[] }), 0),
        |g| g.scatter(&zeros(F, 5), &list(F, if g.rank() == 1 { &[5; 3] } else { &[] }), 1),
        "from rank 0",
        "from rank 1",
    ),
    (
        |g| g.gather(&list(F, if g.rank() == 0 { &[5; 3] } else { &[] }), &zeros(F, 5), 0),
        |g| g.gather(&list(F, if g.rank() == 0 { &[6; 3] } else { &[] }), &zeros(F, 6), 0),
        "5 float32",
        "6 float32",
    ),
    (
        |g| g.all_reduce(&zeros(F, 100), SUM),
        |g| g.all_reduce(&zeros(F, 100), SUM).via(Path::Staged),
        ": no path asked for",
        ": through staged",
    ),
    (
        |g| g.all_gather_into(&zeros(F, 30), &zeros(F, 10)),
        |g| g.all_to_all_into(&zeros(F, 30), &zeros(F, 30)),
        "all_gather",
        "all_to_all",
    ),
    (
        |g| g.all_gather(&list(F, &[3, 2, 3]), &zeros(F, [3, 2, 3][g.rank()])),
        |g| g.all_gather(&list(F, &[2, 2, 4]), &zeros(F, [2, 2, 4][g.rank()])),
        "all_gather #1, ",
        ": other sizes of parts",
    ),
    (
        |g| g.all_gather(&list(F, &[3, 2, 3]), &zeros(F, [3, 2, 3][g.rank()])),
        |g| g.all_gather(&list(F, &[3, 2, 4]), &zeros(F, [3, 2, 4][g.rank()])),
        "8 float32",
        "9 float32",
    ),
    (
        |g| g.reduce_scatter(&zeros(F, [3, 2, 3][g.rank()]), &list(F, &[3, 2, 3]), SUM),
        |g| g.reduce_scatter(&zeros(F, [2, 2, 4][g.rank()]), &list(F, &[2, 2, 4]), SUM),
        ": some sizes of parts",
        ": other sizes of parts",
    ),
    (
        |g| g.all_reduce_multi(&list(F, &[10, 10]), SUM),
        |g| g.all_reduce_multi(&list(F, &[10]), SUM),
        ": 2 tensors",
        ": 1 tensor",
    ),
    (
        |g| g.all_to_all(&list(F, &[2, 2, 2]), &list(F, &[2, 2, 2])),
        |g| g.all_to_all_into(&zeros(F, 6), &zeros(F, 6)),
        "all_to_all",
        "2 float32",
    ),
    (
        |g| g.all_to_all(&list(F, &[2, 2, 2]), &list(F, &[2, 2, 2])),
        |g| g.all_to_all(&list(Dtype::I32, &[2, 2, 2]), &list(Dtype::I32, &[2, 2, 2])),
        "float32",
        "int32",
    ),
    (
        |g| g.all_to_all(&list(F, &[2, 2, 2]), &list(F, &[2, 2, 2])),
        |g| g.all_reduce(&zeros(F, 2), SUM),
        "all_to_all",
        "all_reduce",
    ),
    (
        |g| g.reduce_scatter_from(&zeros(F, 99_000), &zeros(F, 297_000), SUM),
        |g| g.all_reduce(&zeros(F, 297_000), SUM),
        "reduce_scatter of 99000",
        "all_reduce of 297000",
    ),
    (
        |g| g.broadcast(&zeros(F, 10), 0),
        |g| g.gather(&list(F, if g.rank() == 0 { &[5; 3] } else { &[] }), &zeros(F, 5), 0),
        "broadcast",
        "gather",
    ),
];

/// What is the same in the errors of all ranks; the rest is what the rank itself called.
fn facts(rank: usize, error: &Error) -> String {
    let text = error.to_string();
    let (facts, own) = text.split_once("; this rank, ").unwrap_or_else(|| panic!("rank {rank}: {text}"));
    assert!(own.starts_with(&format!("{rank} of group \"")), "rank {rank}: {text}");
    facts.to_owned()
}

/// Every rank hears of it, at once or at its next operation.
fn expect_mismatch(errors: &[(usize, Error)], odd: usize, (one, other): (&str, &str)) {
    for (rank, error) in errors {
        let text = describe(error);
        assert!(text.starts_with(&format!("Mismatch {odd} | rank {odd} (host ")), "rank {rank}: {text}");
        assert!(text.contains(", pid ") && error.ranks() == [odd], "rank {rank}: {text}");
        let facts = facts(*rank, error);
        assert!(
            facts.contains(one) && facts.contains(other),
            "rank {rank}: {one:?} and {other:?} are not in {facts}"
        );
        assert!(facts.contains(&format!("; rank {odd}: ")), "rank {rank}: {facts}");
        assert_eq!(facts, self::facts(errors[0].0, &errors[0].1), "all ranks say the same");
    }
}

#[test]
fn other_operations_are_told_to_all() {
    let _turn = turn();
    for (index, (normal, other, one, two)) in PAIRS.into_iter().enumerate() {
        for odd in [index % 3, (index + 1) % 3] {
            let since = Instant::now();
            let errors = with_group(3, |group| {
                let make = if group.rank() == odd { other } else { normal };
                let first = make(group).wait();
                let error = first.and_then(|()| group.barrier().wait()).unwrap_err();
                // It stays so.
                assert!(matches!(group.check(), Err(Error::Peer(_))));
                assert_eq!(describe(&group.barrier().wait().unwrap_err()), describe(&error));
                (group.rank(), error)
            });
            expect_mismatch(&errors, odd, (one, two));
            assert!(since.elapsed() < LONG / 2, "pair {index} took {:?}", since.elapsed());
        }
    }
}

#[test]
fn a_barrier_against_a_collective_and_another_order() {
    let _turn = turn();
    for odd in 0..3 {
        let errors = with_group(3, |group| {
            let odd = group.rank() == odd;
            let all = || group.all_reduce(&zeros(F, 10), SUM).wait();
            let first = if odd { group.barrier().wait() } else { all() };
            (group.rank(), first.and_then(|()| group.barrier().wait()).unwrap_err())
        });
        expect_mismatch(&errors, odd, ("barrier", "all_reduce of 10 float32"));
        let errors = with_group(3, |group| {
            let broadcast = || group.broadcast(&zeros(F, 10), 1).wait();
            let gather = || {
                let outputs = list(F, if group.rank() == 1 { &[10; 3] } else { &[] });
                group.gather(&outputs, &zeros(F, 10), 1).wait()
            };
            let both = if group.rank() == odd {
                gather().and_then(|()| broadcast())
            } else {
                broadcast().and_then(|()| gather())
            };
            (group.rank(), both.and_then(|()| group.barrier().wait()).unwrap_err())
        });
        expect_mismatch(&errors, odd, ("broadcast of 10", "gather of 10"));
    }
}

/// What one rank gives must be what another has room for. Only all_to_all has such sizes.
#[test]
fn parts_that_do_not_fit() {
    let _turn = turn();
    let errors = with_group(3, |group| {
        let mut room = vec![4; 3];
        if group.rank() == 1 {
            room[2] = 5;
        }
        let error = group.all_to_all(&list(F, &room), &list(F, &[4; 3])).wait().unwrap_err();
        let text = describe(&error);
        works(group);
        text
    });
    for (rank, text) in errors.iter().enumerate() {
        assert!(
            text.contains("rank 2 (host ") && text.contains("gives 4 float32 elements to rank 1 (host "),
            "{text}"
        );
        assert!(text.contains("room for 5"), "{text}");
        assert_eq!(text.starts_with("Misuse"), rank == 1, "{text}");
    }
}

/// The error of a rank, wherever it comes: at once, or at its next operation.
fn error_of(group: &Group, first: Result<(), Error>) -> Error {
    first.and_then(|()| group.barrier().wait()).unwrap_err()
}

/// One rank has one element more than all others.
fn one_element_more(group: &Group) {
    let (rank, world) = (group.rank(), group.world());
    let count = if rank == 0 { 1000 } else { 999 };
    let error = error_of(group, group.all_reduce(&zeros(F, count), SUM).wait());
    let facts = facts(rank, &error);
    let both = match world {
        2 => "in all_reduce #1, rank 0: 1000 float32; rank 1: 999 float32; all ranks",
        4 => "in all_reduce #1, ranks 1, 2, 3: 999 float32; rank 0: 1000 float32; all ranks",
        _ => "in all_reduce #1, ranks 1-7: 999 float32; rank 0: 1000 float32; all ranks",
    };
    assert!(facts.contains(both), "rank {rank}: {error}");
    let own = format!(
        "; this rank, {rank} of group {:?}, called all_reduce of {count} float32 (SUM)",
        group.name()
    );
    assert!(error.to_string().ends_with(&own), "rank {rank}: {error}");
    let Error::Peer(fault) = &error else { panic!("{error}") };
    let members = group.members();
    // One against one: nobody can tell who is wrong.
    let (who, one) = match world {
        2 => (format!("{} and {}", members[0], members[1]), None),
        _ => (members[0].to_string(), Some(0)),
    };
    assert_eq!((&fault.who, fault.rank, error.ranks()), (&who, one, one.as_slice()), "{error}");
    let verb = if world == 2 { "called different things" } else { "called something else" };
    assert!(facts.starts_with(&format!("{who} {verb}: ")), "{error}");
}

on_ranks!(one_element_more_of_two, 2, one_element_more);
on_ranks!(one_element_more_of_four, 4, one_element_more);
on_ranks!(one_element_more_of_eight, 8, one_element_more);

on_ranks!(half_against_half, 4, |group| {
    let op = if group.rank() < 2 { ReduceOp::Sum } else { ReduceOp::Max };
    let error = error_of(group, group.all_reduce(&zeros(F, 10), op).wait());
    assert!(error.ranks().is_empty(), "{error}");
    let want =
        "the ranks called different things: in all_reduce #1, ranks 0, 1: SUM; ranks 2, 3: MAX; all ranks";
    assert!(facts(group.rank(), &error).starts_with(want), "{error}");
});

on_ranks!(a_minority_of_two, 8, |group| {
    let count = if [2, 5].contains(&group.rank()) { 3 } else { 4 };
    let error = error_of(group, group.all_reduce(&zeros(F, count), SUM).wait());
    assert_eq!(error.ranks(), [2, 5], "{error}");
    let want = "ranks 2, 5 called something else: in all_reduce #1, ranks 0, 1, 3, 4, 6, 7: 4 float32; ranks 2, 5: 3";
    assert!(facts(group.rank(), &error).starts_with(want), "{error}");
});

on_ranks!(everybody_as_root, 8, |group| {
    let error = error_of(group, group.broadcast(&zeros(F, 10), group.rank()).wait());
    assert!(error.ranks().is_empty(), "{error}");
    let facts = facts(group.rank(), &error);
    assert!(
        facts
            .starts_with("the ranks called different things: in broadcast #1, rank 0: from rank 0; rank 1: "),
        "{error}"
    );
    assert!(facts.contains("; rank 7: from rank 7; all ranks"), "{error}");
    assert!(
        error.to_string().contains(&format!(", called broadcast of 10 float32 from rank {}", group.rank())),
        "{error}"
    );
});

on_ranks!(other_sizes_of_parts, 4, |group| {
    let sizes: [usize; 4] = if group.rank() == 2 { [3, 2, 3, 0] } else { [2, 2, 4, 0] };
    let call = group.all_gather(&list(F, &sizes), &zeros(F, sizes[group.rank()]));
    let error = error_of(group, call.wait());
    assert_eq!(error.ranks(), [2], "{error}");
    let want =
        "in all_gather #1, ranks 0, 1, 3: some sizes of parts; rank 2: other sizes of parts; all ranks";
    assert!(facts(group.rank(), &error).contains(want), "{error}");
    let own = if group.rank() == 2 { "3, 2, 3, 0" } else { "2, 2, 4, 0" };
    let own = format!(", called all_gather of 8 float32 in parts of {own}");
    assert!(error.to_string().ends_with(&own), "{error}");
    // All later calls say the same.
    assert_eq!(group.check().unwrap_err().to_string(), error.to_string());
});

on_ranks!(one_call_too_many, 4, |group| {
    let one = |root| group.broadcast(&zeros(F, 10), root).wait();
    let odd = group.rank() == 3;
    // As root of a broadcast, rank 3 needs nobody: it may be one operation further when the others find it.
    let first = one(0).and_then(|()| if odd { one(3) } else { Ok(()) });
    let error = first.and_then(|()| group.barrier().wait()).unwrap_err();
    assert_eq!(error.ranks(), [3], "{error}");
    let want = "in operation #2, ranks 0, 1, 2: barrier; rank 3: broadcast of 10 float32 from rank 3; ";
    assert!(facts(group.rank(), &error).contains(want), "{error}");
    let own = if odd { ", called broadcast of 10 float32 from rank 3" } else { ", called barrier" };
    assert!(error.to_string().contains(own), "{error}");
});

on_ranks!(one_call_too_few, 4, |group| {
    let all = || group.all_reduce(&zeros(F, 10), SUM).wait();
    let mut ended = all();
    if group.rank() != 1 {
        ended = ended.and_then(|()| all());
    }
    let error = ended.and_then(|()| group.barrier().wait()).unwrap_err();
    assert_eq!(error.ranks(), [1], "{error}");
    let want = "in operation #2, ranks 0, 2, 3: all_reduce of 10 float32 (SUM); rank 1: barrier; \
                ranks 0, 2, 3 called the same as in #1; all ranks";
    assert!(facts(group.rank(), &error).contains(want), "{error}");
});

/// Two ranks differ, and the third comes when they have given up waiting for it.
#[test]
fn a_rank_that_has_not_come_is_said_to_be_missing() {
    let _turn = turn();
    let store = MemoryStore::new();
    let errors = with_group(3, |group| {
        let rank = group.rank();
        if rank == 2 {
            store.wait_by(&["0", "1"], Deadline::after(LONG)).unwrap();
        }
        let error = group.all_reduce(&zeros(F, 10 + rank), SUM).wait().unwrap_err();
        store.set(&rank.to_string(), b"").unwrap();
        (rank, error)
    });
    for (rank, error) in &errors {
        assert!(error.ranks().is_empty(), "{error}");
        let want =
            "in all_reduce #1, rank 0: 10 float32; rank 1: 11 float32; rank 2 has not come yet; all ranks";
        assert!(facts(*rank, error).contains(want), "{error}");
    }
    assert!(errors[2].1.to_string().ends_with(", had not come to #1"), "{}", errors[2].1);
}

/// Rank 2 calls something else, and would wait for rank 1 to say what that came for. The others are in the operation, and
/// their time is up before: rank 2 leaves it then, and is not called stuck.
#[test]
fn a_time_out_ends_the_gathering() {
    let _turn = turn();
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let (begin, over) = (std::sync::Barrier::new(4), std::sync::Barrier::new(4));
    let ends = ranks::on_threads(4, |rank| {
        let builder = Group::builder().context(&ranks::context()).timeout(LONG);
        let group = builder.from_store(store.clone(), rank, 4).unwrap();
        begin.wait();
        let soon = Deadline::after(Duration::from_secs(1));
        let end = match rank {
            1 => None,
            2 => Some(group.barrier().wait()),
            _ => Some(group.all_reduce(&zeros(F, 10), SUM).deadline(soon).wait()),
        };
        over.wait();
        end.map(|end| describe(&end.unwrap_err()))
    });
    println!("{ends:#?}");
    for end in ends.iter().flatten() {
        assert!(end.starts_with("Mismatch ") || end.starts_with("TimedOut"), "{end}");
    }
}
