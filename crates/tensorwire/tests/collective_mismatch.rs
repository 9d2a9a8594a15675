//! Ranks that do not call the same: everybody gets an error that names both sides, and nobody hangs.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod model;
mod ranks;
mod trouble;

use std::time::Instant;

use ranks::{LONG, describe};
use tensorwire::collective::{Call, Path};
use tensorwire::{Dtype, Error, Group, ReduceOp};
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
    (|g| g.all_reduce(&zeros(F, 10), SUM), |g| g.all_reduce(&zeros(F, 10), ReduceOp::Max), "(SUM)", "(MAX)"),
    (
        |g| g.all_reduce(&zeros(F, 10), ReduceOp::PremulSum(1.5)),
        |g| g.all_reduce(&zeros(F, 10), ReduceOp::PremulSum(1.25)),
        "(PREMUL_SUM",
        "factor",
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
        "100 float32",
        "through staged",
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
        "all_gather",
        "other sizes of parts",
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
        "reduce_scatter",
        "other sizes of parts",
    ),
    (
        |g| g.all_reduce_multi(&list(F, &[10, 10]), SUM),
        |g| g.all_reduce_multi(&list(F, &[10]), SUM),
        "10 float32",
        "number of tensors",
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

/// Every rank hears of it, at once or at its next operation.
fn expect_mismatch(errors: &[(usize, Error)], odd: usize, (one, other): (&str, &str)) {
    for (rank, error) in errors {
        let text = describe(error);
        assert!(text.starts_with("Mismatch"), "rank {rank}: {text}");
        assert!(
            text.contains(one) && text.contains(other),
            "rank {rank}: {one:?} and {other:?} are not in {text}"
        );
        assert!(text.contains(&format!("rank {odd} (host ")) && text.contains(", pid "), "{text}");
        let named = (0..3).filter(|rank| text.contains(&format!("rank {rank} (host "))).count();
        assert!(named >= 2, "both sides are named in {text}");
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
