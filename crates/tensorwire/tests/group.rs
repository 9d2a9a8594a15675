//! Groups: forming, barriers, sub-groups, ends; each body as threads and as processes.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod ranks;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ranks::{LONG, Rank, Ranks, context, on_threads, outcome};
use tensorwire::store::{FileStore, MemoryStore, PrefixStore, Store, TcpServer, TcpStore};
use tensorwire::{Deadline, Error, Group, PeerFaultKind};

fn members(group: &Group) {
    assert_eq!(group.members().len(), group.world());
    assert_eq!(group.members()[group.rank()].pid, std::process::id());
    assert_eq!(group.hosts(), [(0..group.world()).collect::<Vec<_>>()]);
    for (rank, member) in group.members().iter().enumerate() {
        assert_eq!(member.rank, rank);
    }
    group.check().unwrap();
}

on_ranks!(a_world_of_one, 1, |group| {
    members(group);
    group.barrier().wait().unwrap();
});

on_ranks!(two_ranks_meet, 2, |group| {
    members(group);
    group.barrier().wait().unwrap();
});

on_ranks!(three_ranks_meet, 3, |group| {
    members(group);
    for _ in 0..200 {
        group.barrier().wait().unwrap();
    }
});

on_ranks!(eight_ranks_meet, 8, |group| {
    members(group);
    for _ in 0..20 {
        group.barrier().wait().unwrap();
    }
});

/// Forms a group of threads, each with its own client of a store.
fn meet(stores: Vec<Arc<dyn Store>>, name: &str) -> Vec<Group> {
    let world = stores.len();
    on_threads(world, |rank| {
        let builder = Group::builder().context(&context()).timeout(LONG).name(name);
        let group = builder.from_store(stores[rank].clone(), rank, world).unwrap();
        group.barrier().wait().unwrap();
        group
    })
}

#[test]
fn every_kind_of_store_will_do() {
    let dir = TempDir::new();
    let server = TcpServer::bind("127.0.0.1:0").unwrap();
    let memory: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let connect = || TcpStore::connect("127.0.0.1", server.local_addr().port(), LONG).unwrap();
    let as_torch = || TcpStore::connect_as_torch("127.0.0.1", server.local_addr().port(), LONG).unwrap();
    meet(vec![memory.clone(); 3], "memory");
    meet((0..3).map(|_| Arc::new(FileStore::open(dir.path("store")).unwrap()) as _).collect(), "file");
    meet((0..3).map(|_| Arc::new(connect()) as _).collect(), "tcp");
    meet((0..3).map(|_| Arc::new(as_torch()) as _).collect(), "torch's dialect");
    meet((0..3).map(|_| Arc::new(PrefixStore::new("mine", memory.clone())) as _).collect(), "prefix");
}

#[test]
fn names_keep_groups_apart_in_one_store() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let first = meet(vec![store.clone(); 2], "first");
    let second = meet(vec![store.clone(); 3], "second");
    assert_eq!(first[1].world(), 2);
    assert_eq!(second[1].world(), 3);
    drop(first);
    on_threads(3, |rank| second[rank].barrier().wait().unwrap());
    // What stays: the tickets, and the answer to latecomers. No card, no secret.
    let keys = store.list_keys().unwrap();
    let left: Vec<String> = ["first", "second"]
        .iter()
        .flat_map(|name| ["joined", "verdict"].map(|key| format!("tensorwire/{name}/{key}")))
        .collect();
    assert_eq!(keys, left);
}

#[test]
fn groups_of_one_context_do_not_meet() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let contexts: Vec<_> = (0..2).map(|_| context()).collect();
    let groups = on_threads(2, |rank| {
        ["a", "b", "c"].map(|name| {
            let builder = Group::builder().context(&contexts[rank]).timeout(LONG).name(name);
            builder.from_store(store.clone(), rank, 2).unwrap()
        })
    });
    groups[0][1].abort("only b");
    on_threads(2, |rank| {
        assert_eq!(outcome(&groups[rank][0].barrier().wait()), "ok");
        assert!(matches!(groups[rank][1].barrier().wait(), Err(Error::Aborted(_))));
        assert_eq!(outcome(&groups[rank][2].barrier().wait()), "ok");
    });
}

/// Fifty groups one after the other leave no descriptor, thread or mapping behind, and two keys each in the store.
#[test]
fn many_groups_leave_nothing() {
    let Some(rank) = Rank::of_this_process() else {
        for rank in Ranks::start("many_groups_leave_nothing", 2).ranks {
            rank.expect_success();
        }
        return;
    };
    let context = context();
    let form = |name: String| {
        let builder = Group::builder().context(&context).timeout(LONG).name(name);
        let group = builder.from_store(rank.store.clone(), rank.rank, rank.world).unwrap();
        let sub = group.subgroup(&[1, 0]).unwrap();
        let half = group.split(Some(rank.rank as u64), 0).unwrap().unwrap();
        assert_eq!(half.world(), 1);
        sub.barrier().wait().unwrap();
        group.barrier().wait().unwrap();
    };
    (0..3).for_each(|n| form(format!("warm {n}")));
    let before = footprint();
    (0..50).for_each(|n| form(format!("n {n}")));
    let end = std::time::Instant::now() + LONG;
    let grown = |(fds, threads, maps)| fds > before.0 || threads > before.1 || maps > before.2;
    while grown(footprint()) {
        assert!(std::time::Instant::now() < end, "before {before:?}, after {:?}", footprint());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(context.mapped(), (0, 0));
}

/// Descriptors, threads, and mappings of shared memory.
fn footprint() -> (usize, usize, usize) {
    let count = |dir: &str| std::fs::read_dir(dir).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let memfds = maps.lines().filter(|line| line.contains("memfd:")).count();
    (count("/proc/self/fd"), count("/proc/self/task"), memfds)
}

// Sub-groups

on_ranks!(overlapping_subgroups_in_any_order, 4, |group| {
    let lists: [&[usize]; 6] = [&[0, 1], &[1, 2, 3], &[3, 0], &[2, 0, 1], &[0, 1, 2, 3], &[0, 1]];
    let mine: Vec<&[usize]> = lists.into_iter().filter(|list| list.contains(&group.rank())).collect();
    // Threads, so that each rank can make them in its own order.
    let made = on_threads(mine.len(), |index| {
        let list = mine[(index + group.rank()) % mine.len()];
        let sub = group.subgroup(list).unwrap();
        assert_eq!(list[sub.rank()], group.rank());
        assert_eq!(sub.world(), list.len());
        assert_eq!(sub.members()[sub.rank()].pid, std::process::id());
        sub.barrier().wait().unwrap();
        sub
    });
    group.barrier().wait().unwrap();
    for sub in made {
        sub.check().unwrap();
    }
    group.barrier().wait().unwrap();
});

on_ranks!(the_same_list_twice_gives_two_groups, 2, |group| {
    let first = group.subgroup(&[1, 0]).unwrap();
    let second = group.subgroup(&[1, 0]).unwrap();
    assert_ne!(first.name(), second.name());
    assert_eq!(first.rank(), 1 - group.rank());
    if group.rank() == 0 {
        first.abort("the first only");
    }
    assert!(first.barrier().wait().is_err());
    second.barrier().wait().unwrap();
});

on_ranks!(subgroups_of_subgroups, 4, |group| {
    let half = group.subgroup(if group.rank() < 2 { &[0, 1] } else { &[2, 3] }).unwrap();
    let swapped = half.subgroup(&[1, 0]).unwrap();
    let alone = swapped.subgroup(&[swapped.rank()]).unwrap();
    assert_eq!((alone.world(), alone.rank()), (1, 0));
    assert_eq!(swapped.rank(), 1 - half.rank());
    alone.barrier().wait().unwrap();
    swapped.barrier().wait().unwrap();
    group.barrier().wait().unwrap();
});

on_ranks!(split_by_colour_and_key, 4, |group| {
    let rank = group.rank();
    // Backwards within the colour.
    let sub = group.split(Some((rank % 2) as u64), -(rank as i64)).unwrap().unwrap();
    assert_eq!(sub.world(), 2);
    assert_eq!(sub.rank(), 1 - rank / 2);
    sub.barrier().wait().unwrap();
    let some = group.split((rank != 1).then_some(u64::MAX), 0).unwrap();
    assert_eq!(some.as_ref().map(Group::world), (rank != 1).then_some(3));
    let all = group.split(Some(0), i64::MIN + rank as i64).unwrap().unwrap();
    assert_eq!(all.rank(), rank);
    assert!(group.split(None, 0).unwrap().is_none());
    for _ in 0..5 {
        group.split(Some(1), 0).unwrap().unwrap().barrier().wait().unwrap();
    }
    group.barrier().wait().unwrap();
    if rank == 0 {
        let store = PrefixStore::new("tensorwire/world", group.store().clone());
        let keys = store.list_keys().unwrap();
        let entries = keys.iter().filter(|key| key.starts_with("split/") && !key.contains("colour"));
        assert!(entries.count() <= 4, "{keys:?}");
    }
    group.barrier().wait().unwrap();
});

on_ranks!(wrong_lists_are_refused, 2, |group| {
    let wrong: [(&[usize], &str); 4] = [
        (&[0, 1, 0], "rank 0 is twice"),
        (&[0, 1, 2], "no rank 2 in a world of 2"),
        (&[1 - group.rank()], "is not in the list"),
        (&[], "is not in the list"),
    ];
    for (list, text) in wrong {
        let error = group.subgroup(list).unwrap_err();
        assert!(matches!(&error, Error::Misuse(why) if why.contains(text)), "{error}");
    }
    group.barrier().wait().unwrap();
});

#[test]
fn a_subgroup_that_one_rank_never_makes_times_out() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let errors = on_threads(2, |rank| {
        let builder = Group::builder().context(&context()).timeout(Duration::from_secs(1));
        let group = builder.from_store(store.clone(), rank, 2).unwrap();
        let result = (rank == 0).then(|| group.subgroup(&[0, 1]).map(drop));
        (group, result)
    });
    let error = errors[0].1.as_ref().unwrap().as_ref().unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert!(error.to_string().contains("rank 1 is missing"), "{error}");
}

#[test]
fn a_split_that_one_rank_never_calls_names_it() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let errors = on_threads(2, |rank| {
        let builder = Group::builder().context(&context()).timeout(Duration::from_secs(1));
        let group = builder.from_store(store.clone(), rank, 2).unwrap();
        let result = (rank == 0).then(|| group.split(Some(1), 0).map(drop));
        (group, result)
    });
    let error = errors[0].1.as_ref().unwrap().as_ref().unwrap_err();
    assert!(error.is_timeout(), "{error}");
    let member = errors[0].0.members()[1].to_string();
    assert!(error.to_string().contains(&member), "{error}");
}

// Ends

#[test]
fn every_order_of_closing_is_clean() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let mut groups: BTreeMap<usize, Group> =
            meet(vec![store.clone(); 3], "world").into_iter().enumerate().collect();
        for rank in order {
            groups.remove(&rank).unwrap().close().unwrap();
            for group in groups.values() {
                group.check().unwrap();
            }
        }
    }
}

#[test]
fn who_closes_while_others_wait_is_named() {
    for leaver in 0..3 {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let groups: Vec<_> = meet(vec![store.clone(); 3], "world")
            .into_iter()
            .map(|g| std::sync::Mutex::new(Some(g)))
            .collect();
        let who = groups[leaver].lock().unwrap().as_ref().unwrap().members()[leaver].to_string();
        let ends = on_threads(3, |rank| {
            let group = groups[rank].lock().unwrap().take().unwrap();
            if rank == leaver {
                group.close().unwrap();
                return None;
            }
            Some(group.barrier().wait().unwrap_err())
        });
        for error in ends.into_iter().flatten() {
            let Error::Peer(fault) = &error else { panic!("{error}") };
            assert_eq!((fault.kind, fault.rank), (PeerFaultKind::Left, Some(leaver)), "{error}");
            assert_eq!(fault.who, who);
        }
    }
}

#[test]
fn a_last_barrier_and_then_any_end_is_no_failure() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    for round in 0..100 {
        on_threads(3, |rank| {
            let builder = Group::builder().context(&context()).timeout(LONG).name(format!("{round}"));
            let group = builder.from_store(store.clone(), rank, 3).unwrap();
            assert_eq!(outcome(&group.barrier().wait()), "ok");
        });
    }
}

on_ranks!(abort_tells_everyone_once, 3, |group| {
    if group.rank() == 1 {
        group.abort("the data is bad");
        group.abort("another reason");
    }
    let error = group.barrier().wait().unwrap_err();
    let Error::Aborted(text) = &error else { panic!("{error}") };
    let by = if group.rank() == 1 { "this rank".to_owned() } else { group.members()[1].to_string() };
    assert_eq!(*text, format!("{by} called abort(): the data is bad"));
    if group.rank() == 2 {
        group.abort("a third");
    }
    assert_eq!(group.check().unwrap_err().to_string(), error.to_string());
    assert_eq!(group.subgroup(&[0, 1, 2]).unwrap_err().to_string(), error.to_string());
    assert_eq!(group.split(None, 0).unwrap_err().to_string(), error.to_string());
});

#[test]
fn abort_wakes_who_waits() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let groups = meet(vec![store.clone(); 3], "world");
    let long = "é".repeat(600);
    let ends = on_threads(4, |who| match who {
        // A handle of rank 2, from another thread, while rank 2 itself waits; nobody waits for rank 0.
        3 => {
            while groups[1]
                .barrier()
                .deadline(Deadline::after(Duration::from_millis(1)))
                .wait()
                .is_err_and(|e| e.is_timeout())
            {}
            None
        }
        0 => {
            groups[0].abort(&long);
            None
        }
        rank => Some(groups[rank].split(Some(0), 0).unwrap_err()),
    });
    for error in ends.into_iter().flatten() {
        assert!(matches!(&error, Error::Aborted(text) if text.contains("called abort(): éé")), "{error}");
    }
}

#[test]
fn a_barrier_that_timed_out_is_over_for_all_and_the_next_one_works() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let groups = meet(vec![store.clone(); 3], "world");
    let soon = || Deadline::after(Duration::from_millis(20));
    let first = groups[0].barrier().deadline(soon()).wait().unwrap_err();
    for rank in [1, 2] {
        assert!(first.to_string().contains(&groups[0].members()[rank].to_string()), "{first}");
    }
    for late in [1, 2] {
        let error = groups[late].barrier().wait().unwrap_err();
        assert!(error.is_timeout(), "{error}");
        let expected = format!("{} was the first to give up", groups[0].members()[0]);
        assert!(error.to_string().contains(&expected), "{error}");
    }
    on_threads(3, |rank| groups[rank].barrier().wait().unwrap());
    on_threads(3, |rank| groups[rank].barrier().wait().unwrap());
}

#[test]
fn threads_of_a_rank_take_turns_in_barriers() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let groups = meet(vec![store.clone(); 2], "world");
    on_threads(8, |thread| {
        for _ in 0..50 {
            groups[thread % 2].barrier().wait().unwrap();
        }
    });
    // A thread that has to wait for another one keeps its own deadline.
    on_threads(2, |thread| {
        if thread == 0 {
            let error = groups[0].barrier().deadline(Deadline::after(LONG)).wait().unwrap_err();
            assert!(!error.is_timeout() && error.to_string().contains("the other one is back"), "{error}");
        } else {
            let soon = Deadline::after(Duration::from_millis(10));
            let error = groups[0].barrier().deadline(soon).wait().unwrap_err();
            assert!(error.is_timeout(), "{error}");
            groups[0].abort("the other one is back");
        }
    });
}

#[test]
fn explain_names_every_path() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let groups = meet(vec![store.clone(); 2], "world");
    let text = groups[1].explain();
    assert!(text.starts_with("rank 1 of 2 in group \"world\"\n"), "{text}");
    assert!(text.contains(&format!("{}: shared memory", groups[0].members()[0])), "{text}");
    assert!(text.contains(&format!("{}: this process", groups[0].members()[1])), "{text}");
}

/// A folder that goes with the test.
struct TempDir(std::path::PathBuf);

impl TempDir {
    fn new() -> Self {
        let name = format!("tensorwire-group-{}", tensorwire::device::Id::random().unwrap());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.join(name)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
