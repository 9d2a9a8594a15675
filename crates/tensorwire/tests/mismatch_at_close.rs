//! Ranks that did not call the same as their last collective: closing the group says so.
//!
//! Some ranks need nobody in a collective, such as the root of a broadcast. They are done before they could see what the
//! others called, and see it in their next collective, or when they close the group.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod model;
mod ranks;
mod trouble;

use std::sync::Arc;

use ranks::{LONG, Ranks, await_parent, context, describe, on_threads, outcome, say};
use tensorwire::collective::Call;
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Deadline, Dtype, Error, Group};
use trouble::{SUM, list, turn, with_group, zeros};

const F: Dtype = Dtype::F32;

/// A collective with a root, of few or many bytes.
type Rooted = for<'a> fn(&'a Group, usize, usize) -> Call<'a>;

const ROOTED: [Rooted; 4] = [
    |g, root, count| g.broadcast(&zeros(F, count), root),
    |g, root, count| g.reduce(&zeros(F, count), SUM, root),
    |g, root, count| {
        let outputs = if g.rank() == root { vec![count; g.world()] } else { Vec::new() };
        g.gather(&list(F, &outputs), &zeros(F, count), root)
    },
    |g, root, count| {
        let inputs = if g.rank() == root { vec![count; g.world()] } else { Vec::new() };
        g.scatter(&zeros(F, count), &list(F, &inputs), root)
    },
];

/// Nobody goes on before all are here. Not a barrier of the group, which would find the mismatch.
fn meet(group: &Group, key: &str) {
    group.store().barrier_by(key, group.world() as u64, Deadline::after(LONG)).unwrap();
}

fn everybody_as_root(group: &Group) {
    let (rank, world) = (group.rank(), group.world());
    // As root, each rank needs nobody.
    group.broadcast(&zeros(F, 3), rank).wait().unwrap();
    meet(group, "called");
    let error = group.clone().close().unwrap_err();
    let text = describe(&error);
    assert!(text.starts_with("Mismatch ? | ") && error.ranks().is_empty(), "{text}");
    for other in 0..world.min(4) {
        assert!(text.contains(&format!("rank {other}: from rank {other}")), "{text}");
    }
    assert!(text.contains(&format!("; this rank, {rank} of group ")), "{text}");
    assert!(text.ends_with(&format!(", called broadcast of 3 float32 from rank {rank}")), "{text}");
    // It is closed all the same, and says it once.
    assert!(outcome(&group.check()).contains("the group was closed on this rank"));
    group.clone().close().unwrap();
}

on_ranks!(everybody_as_root_of_two, 2, everybody_as_root);
on_ranks!(everybody_as_root_of_four, 4, everybody_as_root);
on_ranks!(everybody_as_root_of_eight, 8, everybody_as_root);

/// One rank has another root than all others. All ranks hear of it, in the operation or when they close the group.
fn one_with_another_root(group: &Group) {
    let (rank, odd) = (group.rank(), group.world() - 1);
    for (index, call) in ROOTED.iter().enumerate() {
        let own = group.split(Some(0), 0).unwrap().unwrap();
        let root = if rank == odd { odd } else { 0 };
        let called = call(&own, root, 5).wait();
        meet(group, &format!("called {index}"));
        let told = called.is_err();
        let closed = own.close();
        let error = match called.and(closed.clone()) {
            Ok(()) => panic!("rank {rank} heard nothing of call {index}"),
            Err(error) => error,
        };
        assert!(closed.is_ok() || !told, "rank {rank} is told twice: {error}");
        let text = describe(&error);
        assert!(text.starts_with(&format!("Mismatch {odd} | rank {odd} (host ")), "{text}");
        assert_eq!(error.ranks(), [odd], "{text}");
        assert!(text.contains(&format!("rank {odd}: ")) && text.contains(&format!("rank {odd};")), "{text}");
    }
}

on_ranks!(one_of_four_with_another_root, 4, one_with_another_root);
on_ranks!(one_of_eight_with_another_root, 8, one_with_another_root);

// Where all ranks called the same, closing is no error: at once, and in any order.
on_ranks!(nothing_is_wrong, 4, |group| {
    let rank = group.rank();
    for first in 0..group.world() {
        for call in ROOTED {
            for count in [5, 300_000] {
                let own = group.split(Some(0), 0).unwrap().unwrap();
                call(&own, 2, count).wait().unwrap();
                let key = format!("closed by {}", own.name());
                if rank != first {
                    group.store().get_by(&key, Deadline::after(LONG)).unwrap();
                }
                own.close().unwrap();
                if rank == first {
                    group.store().set(&key, b"").unwrap();
                }
            }
        }
    }
});

// Whoever closed the group before the last rank came has heard nothing. The last one finds what the others left.
on_ranks!(the_last_one_finds_it, 4, |group| {
    let (rank, last) = (group.rank(), 3);
    if rank == last {
        let closed: Vec<String> = (0..last).map(|rank| format!("closed {rank}")).collect();
        let keys: Vec<&str> = closed.iter().map(String::as_str).collect();
        group.store().wait_by(&keys, Deadline::after(LONG)).unwrap();
        group.broadcast(&zeros(F, 3), last).wait().unwrap();
        let error = group.clone().close().unwrap_err();
        let text = describe(&error);
        assert!(text.starts_with("Mismatch 3 | rank 3 (host "), "{text}");
        assert!(text.contains("in broadcast #1, ranks 0, 1, 2: from rank 0; rank 3: from rank 3"), "{text}");
    } else {
        group.broadcast(&zeros(F, 3), 0).wait().unwrap();
        group.clone().close().unwrap();
        group.store().set(&format!("closed {rank}"), b"").unwrap();
    }
});

/// A rank that left before it came to the last collective is not waited for, and is no mismatch.
#[test]
fn a_rank_that_left_is_not_waited_for() {
    let _turn = turn();
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let ends = with_group(3, |group| {
        if group.rank() == 2 {
            group.clone().close().unwrap();
            store.set("left", b"").unwrap();
            return Ok(());
        }
        store.get_by("left", Deadline::after(LONG)).unwrap();
        // It needs nobody, and so it hears of nothing.
        group.broadcast(&zeros(F, 3), group.rank()).wait().unwrap();
        store.barrier_by("called", 2, Deadline::after(LONG)).unwrap();
        group.clone().close()
    });
    for error in [&ends[0], &ends[1]].map(|end| end.as_ref().unwrap_err()) {
        let text = error.to_string();
        assert!(
            text.contains("rank 0: from rank 0; rank 1: from rank 1; rank 2 has closed the group; "),
            "{text}"
        );
    }
    assert!(ends[2].is_ok());
}

/// A rank that does not come holds up nobody for long, and closing says nothing of it.
#[test]
fn a_rank_that_does_not_come_does_not_hold_up_the_others() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    on_threads(2, |rank| {
        let builder = Group::builder().context(&context()).timeout(LONG);
        let group = builder.from_store(store.clone(), rank, 2).unwrap();
        if rank == 0 {
            group.broadcast(&zeros(F, 3), 0).wait().unwrap();
            group.close().unwrap();
            store.set("closed", b"").unwrap();
        } else {
            store.get_by("closed", Deadline::after(LONG)).unwrap();
            // What the root left is there.
            group.broadcast(&zeros(F, 3), 0).wait().unwrap();
            group.close().unwrap();
        }
    });
}

/// A rank that was killed before it came to the last collective.
#[test]
fn a_dead_rank_does_not_hold_up_the_others() {
    if let Some(rank) = ranks::Rank::of_this_process() {
        let group = rank.group();
        if rank.rank == 1 {
            say("here");
            await_parent();
        }
        await_parent();
        // It may have heard of the death by now.
        let _ = group.broadcast(&zeros(F, 3), 0).wait();
        say(&outcome(&group.close()));
        return;
    }
    let mut ranks = Ranks::start("a_dead_rank_does_not_hold_up_the_others", 2);
    assert_eq!(ranks.ranks[1].hear(), "here");
    ranks.ranks[1].kill();
    ranks.ranks[0].let_go();
    assert_eq!(ranks.ranks[0].hear(), "ok");
}

/// Operations that were started are finished behind the close, and what they find then is told by their works.
#[test]
fn works_in_flight_are_finished_first() {
    let _turn = turn();
    let errors: Vec<Error> = with_group(4, |group| {
        let works: Vec<_> =
            (0..3).map(|_| group.broadcast(&zeros(F, 3), group.rank()).start().unwrap()).collect();
        let closed = group.clone().close();
        let ended = works.iter().fold(closed, |ended, work| ended.and(work.wait()));
        ended.unwrap_err()
    });
    for error in errors {
        assert!(
            describe(&error).starts_with("Mismatch ? | the ranks called different things: in broadcast #1, "),
            "{error}"
        );
    }
}
