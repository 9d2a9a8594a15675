//! Waits that their caller ends by a hook: every kind of wait answers, the others hear who was interrupted, and the group
//! works afterwards where a time-out would leave it working.

#![allow(clippy::unwrap_used, clippy::panic)]

mod gpus;
mod model;
mod ranks;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use model::private;
use ranks::{LONG, context, context_on, describe, on_threads};
use tensorwire::device::threads::{Settings, install};
use tensorwire::store::{FileStore, MemoryStore, PrefixStore, Store, TcpServer, TcpStore};
use tensorwire::{Dtype, Error, Group, PeerFaultKind, ReduceOp, Result, Sparse, Tensor, interrupt};

/// How long a wait goes on before its hook ends it.
const BEFORE: Duration = Duration::from_millis(120);

/// Runs `body` with a hook that fails after a while, once, as Python's signals do.
fn interrupted<T>(body: impl FnOnce() -> T) -> T {
    let (end, over) = (Instant::now() + BEFORE, Cell::new(false));
    let look = move || match Instant::now() >= end && !over.replace(Instant::now() >= end) {
        true => Err(Error::Interrupted("somebody pressed a key".into())),
        false => Ok(()),
    };
    interrupt::with_interrupt(Rc::new(look), body)
}

/// The same with a hook that never stops to fail.
fn refused<T>(body: impl FnOnce() -> T) -> T {
    let end = Instant::now() + BEFORE;
    let look = move || match Instant::now() >= end {
        true => Err(Error::Interrupted("somebody pressed a key".into())),
        false => Ok(()),
    };
    interrupt::with_interrupt(Rc::new(look), body)
}

#[track_caller]
fn is_ours<T>(result: Result<T>) {
    match result {
        Err(Error::Interrupted(text)) => assert_eq!(text, "somebody pressed a key"),
        Err(other) => panic!("another error: {}", describe(&other)),
        Ok(_) => panic!("not interrupted"),
    }
}

/// What others hear of a rank that was interrupted in a collective.
#[track_caller]
fn names<T: std::fmt::Debug>(result: Result<T>, rank: usize) {
    match result {
        Err(Error::Peer(fault)) => {
            assert_eq!((fault.kind, fault.rank), (PeerFaultKind::Failed, Some(rank)), "{fault}");
            assert!(fault.detail.contains("interrupted: somebody pressed a key"), "{fault}");
        }
        other => panic!("{other:?}"),
    }
}

fn with_group<T: Send>(world: usize, body: impl Fn(&Group) -> T + Sync) -> Vec<T> {
    let store = Arc::new(MemoryStore::new()) as Arc<dyn Store>;
    on_threads(world, |rank| {
        let builder = Group::builder().context(&context()).timeout(LONG);
        let group = builder.from_store(store.clone(), rank, world).unwrap();
        body(&group)
    })
}

fn tensor(values: &[i32]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Tensor::flat(private(&bytes), Dtype::I32).unwrap()
}

fn works(group: &Group) {
    let mut values = [1i32; 1000];
    group.all_reduce_slice(&mut values, ReduceOp::Sum).unwrap();
    assert!(values.iter().all(|&value| value == group.world() as i32));
    group.barrier().wait().unwrap();
}

#[test]
fn a_collective_is_cancelled_for_all() {
    for refuses in [false, true] {
        with_group(3, |group| {
            let own = tensor(&[1; 300_000]);
            match group.rank() {
                0 => {
                    let call = || group.all_reduce(&own, ReduceOp::Sum).wait();
                    is_ours(if refuses { refused(call) } else { interrupted(call) });
                }
                1 => names(group.all_reduce(&own, ReduceOp::Sum).wait(), 0),
                _ => {
                    std::thread::sleep(BEFORE * 2);
                    names(group.all_reduce(&own, ReduceOp::Sum).wait(), 0);
                }
            }
            works(group);
        });
    }
}

#[test]
fn every_collective_can_be_interrupted() {
    with_group(2, |group| {
        for kind in 0..4 {
            let run = || {
                let (one, two) = (tensor(&[1; 100]), tensor(&[1; 200]));
                match kind {
                    0 => group.barrier().wait(),
                    1 => group.broadcast(&one, 1).wait(),
                    2 => group.all_gather_into(&two, &one).wait(),
                    // Sizes are exchanged first.
                    _ => {
                        let parts = [tensor(&[1; 7]), tensor(&[1; 7])];
                        group.all_to_all(&[tensor(&[0; 7]), tensor(&[0; 7])], &parts).wait()
                    }
                }
            };
            match group.rank() {
                0 => is_ours(interrupted(run)),
                _ => {
                    std::thread::sleep(BEFORE * 2);
                    names(run(), 0);
                }
            }
            works(group);
        }
    });
}

#[test]
fn an_operation_in_line_is_cancelled_too() {
    with_group(2, |group| {
        let (first, second) = (tensor(&[1; 100]), tensor(&[1; 100]));
        match group.rank() {
            0 => {
                let work = group.all_reduce(&first, ReduceOp::Sum).start().unwrap();
                // Behind the first, which waits for the other rank.
                is_ours(interrupted(|| group.all_reduce(&second, ReduceOp::Sum).wait()));
                work.wait().unwrap();
            }
            _ => {
                std::thread::sleep(BEFORE * 2);
                group.all_reduce(&first, ReduceOp::Sum).wait().unwrap();
                names(group.all_reduce(&second, ReduceOp::Sum).wait(), 0);
            }
        }
        works(group);
        // The same while the worker is in it.
        match group.rank() {
            0 => {
                let work = group.all_reduce(&first, ReduceOp::Sum).start().unwrap();
                is_ours(interrupted(|| group.all_reduce(&second, ReduceOp::Sum).wait()));
                work.wait().unwrap();
            }
            _ => {
                group.all_reduce(&first, ReduceOp::Sum).wait().unwrap();
                std::thread::sleep(BEFORE * 3);
                names(group.all_reduce(&second, ReduceOp::Sum).wait(), 0);
            }
        }
        works(group);
    });
}

/// What comes behind a queue of a device waits for it on a thread, which must be asked, too.
#[test]
fn an_operation_behind_a_queue_is_cancelled_too() {
    // Whoever is first has installed them.
    let _ = install(Settings::default());
    for how in 0..3 {
        with_group(2, |group| {
            let device = gpus::gpu(0);
            let mut own = gpus::queue(group, &device);
            let flat = tensor(&[1; 100]);
            // Rows of the host, or of a GPU.
            let rows = if how == 1 { tensor(&[1; 3]) } else { gpus::tensor(group, &device, &[1i32; 3]) };
            let sparse = Sparse::new(Tensor::private(&[2i64, 5, 8]).unwrap(), rows, &[10]).unwrap();
            let held = (group.rank() == 0).then(|| gpus::hold(group, &mut *own));
            let mut call = || match how {
                0 => group.all_reduce(&flat, ReduceOp::Sum).after(&mut *own)?.wait(),
                _ => group.all_reduce_sparse(&sparse, ReduceOp::Sum).after(&mut *own)?.wait().map(drop),
            };
            match held {
                Some(held) => {
                    is_ours(interrupted(call));
                    held.signal(1);
                }
                None => names(call(), 0),
            }
            works(group);
        });
    }
}

#[test]
fn a_wait_for_work_returns_and_the_work_goes_on() {
    let gone = AtomicBool::new(false);
    with_group(2, |group| {
        let own = tensor(&[1; 100]);
        if group.rank() == 0 {
            let work = group.all_reduce(&own, ReduceOp::Sum).start().unwrap();
            assert_eq!((work.what(), work.duration()), ("all_reduce", None));
            is_ours(interrupted(|| work.wait()));
            assert!(!work.is_done());
            gone.store(true, Ordering::Release);
            work.wait().unwrap();
            assert!(work.duration().unwrap() >= BEFORE / 2, "{:?}", work.duration());
        } else {
            while !gone.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            group.all_reduce(&own, ReduceOp::Sum).wait().unwrap();
        }
        works(group);
    });
}

#[test]
fn time_in_line_does_not_count() {
    with_group(2, |group| {
        let (first, second) = (tensor(&[1; 100]), tensor(&[1; 100]));
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(500));
        }
        let works = [&first, &second].map(|own| group.all_reduce(own, ReduceOp::Sum).start().unwrap());
        works.iter().for_each(|work| work.wait().unwrap());
        if group.rank() == 0 {
            let [first, second] = works.map(|work| work.duration().unwrap());
            assert!(first > second, "{first:?} {second:?}");
        }
    });
}

#[test]
fn messages_are_withdrawn() {
    with_group(2, |group| {
        let own = tensor(&[group.rank() as i32 + 5; 100]);
        let large = tensor(&[3; 2 << 20]);
        if group.rank() == 0 {
            is_ours(interrupted(|| group.recv(&own, 1).tag(7).wait()));
            is_ours(refused(|| group.recv_any(&own).tag(7).wait()));
            let work = group.recv(&own, 1).tag(9).start().unwrap();
            is_ours(interrupted(|| work.wait()));
            assert_eq!(work.what(), "recv");
            works(group);
            work.wait().unwrap();
            assert!(work.duration().unwrap() >= BEFORE / 2);
            // What was withdrawn takes no message.
            group.recv(&own, 1).tag(7).wait().unwrap();
            assert_eq!(own.span().to_vec().unwrap()[..4], 6i32.to_le_bytes());
            // A message of which a part is there is taken back, too: as behind a time-out.
            is_ours(interrupted(|| group.send(&large, 1).tag(1).wait()));
            group.barrier().wait().unwrap();
            group.send(&own, 1).tag(1).wait().unwrap();
        } else {
            works(group);
            group.send(&own, 0).tag(9).wait().unwrap();
            group.send(&own, 0).tag(7).wait().unwrap();
            group.barrier().wait().unwrap();
            // It was never sent.
            group.recv(&own, 0).tag(1).wait().unwrap();
            assert_eq!(own.span().to_vec().unwrap()[..4], 6i32.to_le_bytes());
        }
        works(group);
    });
}

#[test]
fn a_hook_that_agrees_changes_nothing() {
    with_group(2, |group| {
        interrupt::with_interrupt(Rc::new(|| Ok(())), || {
            let large = tensor(&[3; 2 << 20]);
            if group.rank() == 0 {
                group.recv(&large, 1).tag(1).wait().unwrap();
            } else {
                std::thread::sleep(BEFORE);
                group.send(&large, 0).tag(1).wait().unwrap();
            }
            works(group);
        });
    });
}

#[test]
fn a_short_wait_asks_nobody() {
    with_group(2, |group| {
        let asked = Rc::new(Cell::new(0u32));
        let count = asked.clone();
        let look = move || {
            count.set(count.get() + 1);
            Ok(())
        };
        let start = Instant::now();
        interrupt::with_interrupt(Rc::new(look), || {
            for _ in 0..100 {
                group.barrier().wait().unwrap();
            }
        });
        // As often as slices of time have passed, at most.
        let most = start.elapsed().as_millis() / 20 + 1;
        assert!(u128::from(asked.get()) <= most, "{} in {:?}", asked.get(), start.elapsed());
    });
}

#[test]
fn stores_answer() {
    let path = std::env::temp_dir().join(format!("tensorwire-interrupt-{}", std::process::id()));
    let server = TcpServer::bind("127.0.0.1:0").unwrap();
    let second = TcpServer::bind("127.0.0.1:0").unwrap();
    let (port, other) = (server.local_addr().port(), second.local_addr().port());
    let stores: Vec<Arc<dyn Store>> = vec![
        Arc::new(MemoryStore::new()),
        Arc::new(PrefixStore::new("part", Arc::new(MemoryStore::new()))),
        Arc::new(FileStore::open(&path).unwrap()),
        Arc::new(TcpStore::connect("127.0.0.1", port, LONG).unwrap()),
        Arc::new(TcpStore::connect_as_torch("127.0.0.1", other, LONG).unwrap()),
    ];
    for store in stores {
        store.set_timeout(LONG);
        is_ours(interrupted(|| store.get("a")));
        is_ours(interrupted(|| store.wait(&["a", "b"])));
        is_ours(interrupted(|| store.multi_get(&["a", "b"])));
        is_ours(interrupted(|| store.pop("q")));
        is_ours(interrupted(|| store.barrier("b", 2)));
        // Nothing is left of them.
        store.push("q", b"1").unwrap();
        assert_eq!(store.queue_len("q").unwrap(), 1, "{store:?}");
        assert_eq!(store.pop("q").unwrap(), b"1");
        let other = store.clone_store().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| other.barrier("b", 2).unwrap());
            store.barrier("b", 2).unwrap();
        });
        store.set("a", b"2").unwrap();
        assert_eq!(store.get("a").unwrap(), b"2");
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn connecting_to_nobody_answers() {
    let server = TcpServer::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().port();
    drop(server);
    is_ours(interrupted(|| TcpStore::connect("127.0.0.1", port, LONG)));
    // Addresses for documentation: nobody answers there, or the network says so.
    is_ours(interrupted(|| TcpStore::connect("192.0.2.1", port, LONG)));
    is_ours(interrupted(|| TcpStore::connect("no-such-host.invalid", port, LONG)));
}

#[test]
fn a_group_that_forms_fails_for_all() {
    for who in 0..2 {
        let store = Arc::new(MemoryStore::new()) as Arc<dyn Store>;
        on_threads(2, |rank| {
            let builder = Group::builder().context(&context()).timeout(LONG);
            let form = || builder.from_store(store.clone(), rank, 3);
            if rank == who {
                is_ours(interrupted(form).map(|_| ()));
            } else {
                let error = form().unwrap_err();
                let text = describe(&error);
                assert!(text.starts_with(&format!("Left {who} |")), "{text}");
                assert!(text.contains("interrupted: somebody pressed a key"), "{text}");
            }
        });
    }
}

#[test]
fn the_one_who_serves_the_store_answers_too() {
    let port = {
        let server = TcpServer::bind("127.0.0.1:0").unwrap();
        server.local_addr().port()
    };
    let url = format!("tcp://127.0.0.1:{port}");
    on_threads(2, |rank| {
        let builder = Group::builder().context(&context()).timeout(LONG);
        let form = || builder.from_url(&url, Some(rank), Some(3));
        if rank == 0 {
            is_ours(interrupted(form).map(|_| ()));
        } else {
            let text = describe(&form().unwrap_err());
            assert!(text.starts_with("Left 0 |") && text.contains("interrupted"), "{text}");
        }
    });
}

#[test]
fn a_split_ends_for_all() {
    with_group(3, |group| match group.rank() {
        0 => is_ours(interrupted(|| group.split(Some(1), 0)).map(|_| ())),
        1 => {
            // The third rank comes when the first has gone: both want to form a group with it.
            let text = describe(&group.split(Some(1), 0).unwrap_err());
            assert!(text.contains("Left 0") && text.contains("interrupted"), "{text}");
        }
        _ => {
            std::thread::sleep(BEFORE * 3);
            let text = describe(&group.split(Some(1), 0).unwrap_err());
            assert!(text.contains("Left 0") && text.contains("interrupted"), "{text}");
        }
    });
}

#[test]
fn shrink_can_be_called_again() {
    with_group(2, |group| {
        if group.rank() == 0 {
            is_ours(interrupted(|| group.shrink()).map(|_| ()));
        } else {
            std::thread::sleep(BEFORE * 3);
        }
        works(&group.shrink().unwrap());
    });
}

#[test]
fn an_interrupted_barrier_across_hosts_is_over_for_all() {
    let store = Arc::new(MemoryStore::new()) as Arc<dyn Store>;
    let over = std::sync::Barrier::new(2);
    on_threads(2, |rank| {
        let builder = Group::builder().context(&context_on(&format!("host{rank}"))).timeout(LONG);
        let group = builder.from_store(store.clone(), rank, 2).unwrap();
        if rank == 0 {
            is_ours(interrupted(|| group.barrier().wait()));
            over.wait();
        } else {
            over.wait();
            let error = group.barrier().wait().unwrap_err();
            assert_eq!(error.ranks(), [0], "{error}");
            assert!(error.to_string().contains("interrupted: "), "{error}");
        }
        group.barrier().wait().unwrap();
    });
}
