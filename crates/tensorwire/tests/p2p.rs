//! Messages between ranks: send, receive and receive from any rank, as threads and as processes, on one host and on several.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod messages;
mod ranks;

use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use messages::{bytes_of, empty, fill, tensor};
use ranks::{LONG, Placement, Rank, Ranks, await_parent, describe, outcome, say, spans_hosts};
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Deadline, Dtype, Group, ReduceOp, Tensor};

/// More than any ring holds.
const LARGE: usize = 1 << 20;

/// More than goes to a rank that has not asked for it: than any ring holds, and between hosts than a receiver takes unasked
/// (4 MiB).
fn too_large(group: &Group) -> usize {
    if spans_hosts(group) { 32 << 20 } else { LARGE }
}

/// Waits until so many messages of a rank on another host are here, none of them with the tag 999. On one host a message is
/// there when it was sent.
fn await_arrival(group: &Group, from: usize, count: usize) {
    let wanted = match count {
        1 => "; 1 message with another tag waits".to_owned(),
        _ => format!("; {count} messages with other tags wait"),
    };
    let end = Instant::now() + LONG;
    while spans_hosts(group) {
        let error = group.recv(&empty(group, 1), from).tag(999).deadline(soon()).wait().unwrap_err();
        if error.to_string().contains(&wanted) {
            return;
        }
        assert!(error.is_timeout() && Instant::now() < end, "{error}");
    }
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_millis(200))
}

fn like_the_model(group: &Group) {
    messages::like_the_model(group, 0..6);
}

on_links!(model_of_1, 1, like_the_model);
on_links!(model_of_2, 2, like_the_model);
on_links!(model_of_3, 3, like_the_model);
on_links!(model_of_4, 4, like_the_model);
on_links!(model_of_5, 5, like_the_model);

/// Threads of two ranks, each with a tag of its own, blocking and not, in both directions.
fn threads_talk(group: &Group) {
    let other = 1 - group.rank();
    std::thread::scope(|scope| {
        for tag in 0..6 {
            scope.spawn(move || {
                for turn in 0..30usize {
                    let len = [8, 3000, 300_000][(turn + tag as usize) % 3];
                    let mine = tensor(group, &fill(len, tag << 8 | group.rank() as u64), Dtype::U8);
                    let into = empty(group, len);
                    if tag % 2 == 0 {
                        let sent = group.send(&mine, other).tag(tag).start().unwrap();
                        group.recv(&into, other).tag(tag).wait().unwrap();
                        sent.wait().unwrap();
                    } else if group.rank() == 0 {
                        group.send(&mine, other).tag(tag).wait().unwrap();
                        group.recv(&into, other).tag(tag).wait().unwrap();
                    } else {
                        group.recv(&into, other).tag(tag).wait().unwrap();
                        group.send(&mine, other).tag(tag).wait().unwrap();
                    }
                    assert!(bytes_of(&into) == fill(len, tag << 8 | other as u64));
                }
            });
        }
    });
    group.barrier().wait().unwrap();
}

on_links!(many_threads, 2, threads_talk);

/// More ranks than cores, each with its neighbours, with naps so that all of them sleep at times.
fn a_circle(group: &Group) {
    let (me, world) = (group.rank(), group.world());
    let (next, last) = ((me + 1) % world, (me + world - 1) % world);
    for turn in 0..20u64 {
        if (turn as usize + me).is_multiple_of(7) {
            std::thread::sleep(Duration::from_millis(3));
        }
        let mine = tensor(group, &fill(100, turn << 8 | me as u64), Dtype::U8);
        let into = empty(group, 100);
        group.send(&mine, next).tag(turn).wait().unwrap();
        group.recv(&into, last).tag(turn).wait().unwrap();
        assert!(bytes_of(&into) == fill(100, turn << 8 | last as u64));
    }
    group.barrier().wait().unwrap();
}

on_links!(circle, 6, a_circle);

/// Both ranks send a large tensor and then receive one.
fn across(group: &Group) {
    let (me, other, len) = (group.rank(), 1 - group.rank(), 64 << 20);
    let mine = tensor(group, &fill(len, me as u64), Dtype::U8);
    let into = empty(group, len);
    let sent = group.send(&mine, other).tag(1).start().unwrap();
    group.recv(&into, other).tag(1).wait().unwrap();
    sent.wait().unwrap();
    assert!(bytes_of(&into) == fill(len, other as u64));
    group.barrier().wait().unwrap();
}

on_links!(both_directions, 2, across);

/// Receives from any rank: none is left out, those of one rank stay in order, and ranks take turns.
fn anyone(group: &Group) {
    let world = group.world();
    if group.rank() > 0 {
        for turn in 0..20u64 {
            let mine = tensor(group, &turn.to_le_bytes(), Dtype::U64);
            group.send(&mine, 0).tag(5).wait().unwrap();
        }
    }
    group.barrier().wait().unwrap();
    if group.rank() == 0 {
        (1..world).for_each(|from| await_arrival(group, from, 20));
        let mut turns = vec![0u64; world];
        let into = tensor(group, &[0; 8], Dtype::U64);
        let sources: Vec<usize> = (0..20 * (world - 1))
            .map(|index| {
                let from = match index % 2 {
                    0 => group.recv_any(&into).tag(5).wait().unwrap(),
                    _ => group.recv_any(&into).tag(5).start().unwrap().wait().unwrap(),
                };
                assert_eq!(bytes_of(&into), turns[from].to_le_bytes());
                turns[from] += 1;
                from
            })
            .collect();
        assert_eq!(turns[1..], vec![20; world - 1]);
        for round in sources.chunks(world - 1) {
            let mut round = round.to_vec();
            round.sort_unstable();
            assert_eq!(round, (1..world).collect::<Vec<_>>(), "{sources:?}");
        }
        let error = group.recv_any(&into).tag(5).deadline(soon()).wait().unwrap_err();
        assert!(error.to_string().contains("recv from any rank with tag 5: no rank has sent"), "{error}");
    }
    group.barrier().wait().unwrap();
}

on_links!(any_source, 4, anyone);

/// A rank that talks to itself.
fn alone(group: &Group) {
    let me = group.rank();
    // Sent before it is received, however large.
    let mine = tensor(group, &fill(LARGE, 1), Dtype::U8);
    group.send(&mine, me).tag(1).wait().unwrap();
    let into = empty(group, LARGE);
    group.recv(&into, me).tag(1).wait().unwrap();
    assert!(bytes_of(&into) == bytes_of(&mine));
    // Received before it is sent, and into the tensor that is sent.
    let work = group.recv_any(&mine).tag(2).start().unwrap();
    assert!(!work.work().is_done());
    group.send(&mine, me).tag(2).start().unwrap().wait().unwrap();
    assert_eq!((work.wait().unwrap(), work.source()), (me, Some(me)));
    assert!(bytes_of(&into) == bytes_of(&mine));
    let error = group.recv(&into, me).tag(3).deadline(soon()).wait().unwrap_err();
    assert!(error.is_timeout(), "{error}");
    group.barrier().wait().unwrap();
}

on_links!(myself, 2, alone);

/// Tensors without elements, and with strides.
fn shapes(group: &Group) {
    let span = |bytes: &[u8]| tensor(group, bytes, Dtype::U8).span().clone();
    if group.rank() == 0 {
        let nothing = Tensor::contiguous(span(&[]), Dtype::F32, &[3, 0, 2]).unwrap();
        group.send(&nothing, 1).tag(1).wait().unwrap();
        group.send(&nothing, 1).tag(1).start().unwrap().wait().unwrap();
        // The columns of a matrix, backwards along one side is not needed: last dimension first.
        let matrix = span(&[1, 2, 3, 4, 5, 6]);
        group
            .send(&Tensor::strided(matrix.clone(), Dtype::U8, &[3, 2], &[1, 3]).unwrap(), 1)
            .tag(2)
            .wait()
            .unwrap();
        // One element many times may be sent, but not received into.
        group.send(&Tensor::strided(matrix, Dtype::U8, &[4], &[0]).unwrap(), 1).tag(3).wait().unwrap();
    } else {
        let nothing = Tensor::flat(span(&[]), Dtype::F32).unwrap();
        group.recv(&nothing, 0).tag(1).wait().unwrap();
        assert_eq!(group.recv_any(&nothing).tag(1).wait().unwrap(), 0);
        let into = span(&[0; 12]);
        group.recv(&Tensor::strided(into.clone(), Dtype::U8, &[6], &[2]).unwrap(), 0).tag(2).wait().unwrap();
        assert_eq!(into.to_vec().unwrap(), [1, 0, 4, 0, 2, 0, 5, 0, 3, 0, 6, 0]);
        let one = Tensor::strided(into.clone(), Dtype::U8, &[4], &[0]).unwrap();
        assert_eq!(&describe(&group.recv(&one, 0).tag(3).wait().unwrap_err())[..6], "Misuse");
        let into = empty(group, 4);
        group.recv(&into, 0).tag(3).wait().unwrap();
        assert_eq!(bytes_of(&into), [1; 4]);
    }
    let error = group.send(&empty(group, 1), 9).wait().unwrap_err();
    assert_eq!(describe(&error), "Misuse | there is no rank 9 in a world of 2");
    group.barrier().wait().unwrap();
}

on_links!(layouts, 2, shapes);

/// Messages that do not fit: an error where they are received, naming both sides, and nothing else suffers.
fn misfits(group: &Group) {
    let large = 4 * LARGE;
    if group.rank() == 0 {
        group.send(&tensor(group, &[1; 12], Dtype::F32), 1).tag(7).wait().unwrap();
        group.send(&tensor(group, &[2; 12], Dtype::I32), 1).tag(7).wait().unwrap();
        group.send(&empty(group, large), 1).tag(7).wait().unwrap();
        group.send(&tensor(group, &[3; 8], Dtype::U8), 1).tag(7).wait().unwrap();
    } else {
        let into = tensor(group, &[9; 8], Dtype::F32);
        let error = describe(&group.recv(&into, 0).tag(7).wait().unwrap_err());
        assert!(error.starts_with("Mismatch 0 | rank 0 (host "), "{error}");
        let text = "called something else: it sent 3 float32 (12 bytes) with tag 7, and this rank receives into 2 float32 (8 bytes)";
        assert!(error.contains(text), "{error}");
        let other = tensor(group, &[9; 12], Dtype::F32);
        let error = describe(&group.recv(&other, 0).tag(7).start().unwrap().wait().unwrap_err());
        assert!(error.contains("it sent 3 int32 (12 bytes)"), "{error}");
        assert!(
            describe(&group.recv_any(&into).tag(7).wait().unwrap_err()).contains("it sent 4194304 uint8")
        );
        assert_eq!((bytes_of(&into), bytes_of(&other)), (vec![9; 8], vec![9; 12]));
        let into = empty(group, 8);
        group.recv(&into, 0).tag(7).wait().unwrap();
        assert_eq!(bytes_of(&into), [3; 8]);
    }
    group.barrier().wait().unwrap();
}

on_links!(misfit, 2, misfits);

/// A large message that fits nobody, and a receiver that does nothing afterwards: its sender goes on all the same.
fn dropped(group: &Group) {
    if group.rank() == 0 {
        group.send(&empty(group, 4 * LARGE), 1).tag(7).wait().unwrap();
    } else {
        group.recv(&empty(group, 8), 0).tag(7).wait().unwrap_err();
    }
    group.barrier().wait().unwrap();
}

on_links!(dropped_message, 2, dropped);

/// Receives that time out say what is missing and what is there.
fn late_receives(group: &Group) {
    let into = empty(group, 4);
    if group.rank() == 1 {
        for tag in [1, 2] {
            group.send(&into, 0).tag(tag).wait().unwrap();
        }
    }
    group.barrier().wait().unwrap();
    if group.rank() == 0 {
        await_arrival(group, 1, 2);
        let error = group.recv(&into, 1).tag(7).deadline(soon()).wait().unwrap_err();
        let pid = group.members()[1].pid;
        let host = &group.members()[1].host;
        let text = error.to_string();
        let mut begin = format!("recv from rank 1 with tag 7: rank 1 (host {host}, pid {pid})");
        // What a rank does is known on its own host.
        begin.push_str(if spans_hosts(group) { "" } else { ", which " });
        let end = " has not sent a message with tag 7; 2 messages with other tags wait; the time-out was given with the call";
        assert!(error.is_timeout() && text.contains(&begin) && text.ends_with(end), "{error}");
        let work = group.recv(&into, 1).tag(7).deadline(soon()).start().unwrap();
        let error = work.wait().unwrap_err();
        assert!(error.is_timeout() && error.to_string().ends_with(end), "{error}");
        // What waits is still there, and the group is well.
        group.recv(&into, 1).tag(2).wait().unwrap();
        let error = group.recv(&into, 1).tag(7).deadline(soon()).start().unwrap().wait().unwrap_err();
        assert!(error.to_string().contains("1 message with another tag waits"), "{error}");
        group.recv(&into, 1).tag(1).wait().unwrap();
        let error = group.recv_any(&into).tag(1).deadline(soon()).wait().unwrap_err();
        assert!(!error.to_string().contains("other tag"), "{error}");
    }
    group.barrier().wait().unwrap();
    // A receive that has timed out does not take a later message.
    if group.rank() == 1 {
        group.send(&into, 0).tag(7).wait().unwrap();
    } else {
        group.recv(&into, 1).tag(7).wait().unwrap();
    }
    group.barrier().wait().unwrap();
}

on_links!(late_recv, 2, late_receives);

/// A send that times out is withdrawn, also where a part of it has gone: its message is never seen, and those behind it come.
fn late_sends(group: &Group) {
    let (me, large) = (group.rank(), empty(group, too_large(group)));
    let small = tensor(group, &[me as u8; 4], Dtype::U8);
    let into = empty(group, 4);
    let names = |text: &str, tag: u64| {
        let (host, pid) = (&group.members()[1].host, group.members()[1].pid);
        let begin = format!("send to rank 1 with tag {tag}: rank 1 (host {host}, pid {pid})");
        assert!(text.starts_with("TimedOut | ") && text.contains(&begin), "{text}");
    };
    // The way is open, so that deadlines are about messages.
    match me {
        0 => group.send(&small, 1).tag(8).wait().unwrap(),
        1 => group.recv(&into, 0).tag(8).wait().unwrap(),
        _ => {}
    }
    group.barrier().wait().unwrap();
    if me == 0 {
        let first = group.send(&large, 1).tag(1).start().unwrap();
        let tries = [
            outcome(&group.send(&small, 1).tag(2).deadline(soon()).wait()),
            outcome(&group.send(&small, 1).tag(2).deadline(soon()).start().unwrap().wait()),
        ];
        for text in tries.iter().filter(|text| *text != "ok") {
            names(text, 2);
            assert!(text.contains("has not made room for it; the message is withdrawn"), "{text}");
        }
        let passed = tries.iter().filter(|text| *text == "ok").count();
        // In a ring messages are behind each other. Between hosts a small one may pass a large one.
        assert!(passed == 0 || spans_hosts(group), "{tries:?}");
        group.store().set("passed", &[passed as u8]).unwrap();
        group.barrier().wait().unwrap();
        first.wait().unwrap();
        group.send(&small, 1).tag(3).wait().unwrap();
        group.barrier().wait().unwrap();

        let text = outcome(&group.send(&large, 1).tag(4).deadline(soon()).wait());
        names(&text, 4);
        assert!(!text.contains("no longer possible"), "{text}");
        let behind = [(&small, 4), (&large, 5), (&small, 5)]
            .map(|(tensor, tag)| group.send(tensor, 1).tag(tag).start().unwrap());
        group.barrier().wait().unwrap();
        behind.iter().for_each(|work| work.wait().unwrap());
    } else if me == 1 {
        group.barrier().wait().unwrap();
        group.recv(&large, 0).tag(1).wait().unwrap();
        group.recv(&into, 0).tag(3).wait().unwrap();
        for _ in 0..group.store().get("passed").unwrap()[0] {
            group.recv(&into, 0).tag(2).wait().unwrap();
        }
        let error = group.recv(&into, 0).tag(2).deadline(soon()).wait().unwrap_err();
        assert!(error.is_timeout() && !error.to_string().contains("wait"), "{error}");
        group.barrier().wait().unwrap();

        group.barrier().wait().unwrap();
        // The large one with this tag was given up.
        group.recv(&into, 0).tag(4).wait().unwrap();
        group.recv(&large, 0).tag(5).wait().unwrap();
        group.recv(&into, 0).tag(5).wait().unwrap();
        for tag in [4, 5] {
            let error = group.recv(&large, 0).tag(tag).deadline(soon()).wait().unwrap_err();
            assert!(error.is_timeout() && !error.to_string().contains("that fits"), "{error}");
        }
    } else {
        (0..3).for_each(|_| group.barrier().wait().unwrap());
    }
    // All pairs go on, in both directions.
    for from in 0..3 {
        for to in (0..3).filter(|&to| to != from) {
            if me == from {
                group.send(&small, to).tag(9).wait().unwrap();
            } else if me == to {
                group.recv(&into, from).tag(9).wait().unwrap();
                assert_eq!(bytes_of(&into), [from as u8; 4]);
            }
        }
    }
    group.barrier().wait().unwrap();
}

on_links!(late_send, 3, late_sends);

/// A receive that times out in the middle of a message: the next one gets it whole. The message is larger than what one look
/// takes, and the deadline has passed by the second.
fn half_received(group: &Group) {
    let len = 8 * LARGE;
    if group.rank() == 0 {
        let into = empty(group, len);
        group.barrier().wait().unwrap();
        let error = group.recv(&into, 1).tag(1).deadline(Deadline::after(Duration::ZERO)).wait().unwrap_err();
        let text = error.to_string();
        assert!(error.is_timeout() && text.contains("rank 1 (host "), "{error}");
        let only = text.contains(" has sent only ")
            && text.contains("of 8388608 bytes of it; the next receive gets the message");
        // Of another host nothing may be here yet.
        let nothing = spans_hosts(group) && text.contains(" has not sent a message with tag 1");
        assert!(only || nothing, "{error}");
        // What lies behind it is not held up by it.
        group.recv(&into, 1).tag(2).wait().unwrap();
        assert!(bytes_of(&into) == fill(len, 2));
        assert_eq!(group.recv_any(&into).tag(1).wait().unwrap(), 1);
        assert!(bytes_of(&into) == fill(len, 1));
    } else {
        let tensors = [1, 2].map(|tag| (tag, tensor(group, &fill(len, tag), Dtype::U8)));
        let works = tensors.map(|(tag, tensor)| group.send(&tensor, 0).tag(tag).start().unwrap());
        group.barrier().wait().unwrap();
        works.iter().for_each(|work| work.wait().unwrap());
    }
    group.barrier().wait().unwrap();
}

on_links!(half_a_message, 2, half_received);

/// Who waits for a rank that closes the group hears of it; what it sent before still comes.
fn leaves(group: &Group) {
    let mine = empty(group, 4);
    match group.rank() {
        0 => {
            group.send(&mine, 1).tag(1).wait().unwrap();
            group.recv(&mine, 1).tag(9).wait().unwrap();
        }
        1 => {
            group.send(&mine, 0).tag(9).wait().unwrap();
            let pending = group.recv(&mine, 0).tag(2).start().unwrap();
            let error = describe(&group.recv(&empty(group, 4), 0).tag(3).wait().unwrap_err());
            assert!(error.starts_with("Left 0 | rank 0 (host "), "{error}");
            assert!(
                error.contains("left: it has closed the group, and a message from it has not come"),
                "{error}"
            );
            assert_eq!(describe(&pending.wait().unwrap_err()), error);
            group.recv(&mine, 0).tag(1).wait().unwrap();
            let error = describe(&group.send(&mine, 0).tag(1).wait().unwrap_err());
            assert!(
                error.contains("left: it has closed the group, and receives nothing any more"),
                "{error}"
            );
            // The other one is still there.
            assert_eq!(group.recv_any(&mine).tag(4).wait().unwrap(), 2);
            group.send(&mine, 2).tag(4).wait().unwrap();
            let error = describe(&group.recv_any(&mine).tag(4).wait().unwrap_err());
            assert!(error.starts_with("Left "), "{error}");
        }
        _ => {
            group.send(&mine, 1).tag(4).wait().unwrap();
            group.recv(&mine, 1).tag(4).wait().unwrap();
        }
    }
}

on_links!(left, 3, leaves);

/// A receive that fails leaves the rest of a large message to the thread in the background, also where that thread is
/// there already and sleeps: nobody calls anything else that could wake it.
fn rest_of_a_misfit(group: &Group) {
    if group.rank() == 0 {
        group.send(&empty(group, 4), 1).tag(1).wait().unwrap();
        group.send(&empty(group, LARGE), 1).tag(2).wait().unwrap();
        group.store().set("sent", b"").unwrap();
    } else {
        group.recv(&empty(group, 4), 0).tag(1).start().unwrap().wait().unwrap();
        let error = outcome(&group.recv(&empty(group, 4), 0).tag(2).wait());
        assert!(error != "ok", "{error}");
        group.store().get("sent").unwrap();
    }
}

on_links!(rest_of_misfit, 2, rest_of_a_misfit);

/// Closing a group ends messages that other threads wait for with handles of their own. Collectives that were started are
/// finished; behind them the rank leaves, though there are handles. Every later call fails.
fn closes(group: &Group) {
    let sum = Tensor::private(&[1i32; 100]).unwrap();
    // Between hosts there are no collectives yet that can be started.
    let near = !spans_hosts(group);
    if group.rank() == 0 {
        let started = near.then(|| group.all_reduce(&sum, ReduceOp::Sum).start().unwrap());
        let (large, small) = (empty(group, too_large(group)), [(); 3].map(|()| empty(group, 4)));
        let ready = Barrier::new(4);
        std::thread::scope(|scope| {
            let waiters = [
                scope.spawn(|| {
                    ready.wait();
                    group.recv(&small[0], 1).tag(3).wait()
                }),
                scope.spawn(|| {
                    ready.wait();
                    group.recv_any(&small[1]).tag(4).wait().map(|_| ())
                }),
                scope.spawn(|| {
                    ready.wait();
                    group.send(&large, 1).tag(5).wait()
                }),
            ];
            let work = group.recv(&small[2], 1).tag(6).start().unwrap();
            ready.wait();
            std::thread::sleep(Duration::from_millis(50));
            group.clone().close().unwrap();
            for ended in waiters.map(|waiter| waiter.join().unwrap()).into_iter().chain([work.wait()]) {
                assert!(outcome(&ended).contains("given up: its group is being closed"), "{ended:?}");
            }
        });
        group.store().set("closed", b"").unwrap();
        started.iter().for_each(|work| work.wait().unwrap());
        let mine = empty(group, 4);
        let mut later = vec![
            group.barrier().wait(),
            group.send(&mine, 1).tag(7).wait(),
            group.recv(&mine, 1).tag(7).start().map(|_| ()),
            group.recv_any(&mine).tag(7).start().map(|_| ()),
            group.check(),
            group.alloc(8).map(|_| ()),
            group.subgroup(&[0]).map(|_| ()),
            group.split(Some(1), 0).map(|_| ()),
        ];
        if near {
            later.extend([
                group.all_reduce(&mine, ReduceOp::Sum).start().map(|_| ()),
                group.shrink().map(|_| ()),
            ]);
        }
        for ended in later {
            assert!(outcome(&ended).contains("the group was closed on this rank"), "{ended:?}");
        }
        group.clone().close().unwrap();
        group.abort("nobody hears this");
        group.store().get("seen").unwrap();
    } else {
        group.store().get("closed").unwrap();
        if near {
            group.all_reduce(&sum, ReduceOp::Sum).wait().unwrap();
        }
        let error = describe(&group.barrier().wait().unwrap_err());
        assert!(error.starts_with("Left "), "{error}");
        group.store().set("seen", b"").unwrap();
    }
    assert_eq!(sum.to_vec::<i32>().unwrap(), [if near { 2 } else { 1 }; 100]);
}

on_links!(close, 2, closes);

/// An abort ends all that is pending, with the reason.
fn aborted(group: &Group) {
    let into = empty(group, too_large(group));
    if group.rank() == 0 {
        let works =
            [group.recv(&into, 1).tag(1).start().unwrap(), group.send(&into, 1).tag(2).start().unwrap()];
        std::thread::scope(|scope| {
            let waiters = [
                scope.spawn(|| group.recv(&empty(group, 4), 1).tag(3).wait()),
                scope.spawn(|| group.recv_any(&empty(group, 4)).tag(4).wait().map(|_| ())),
                scope.spawn(|| group.send(&empty(group, too_large(group)), 1).tag(5).wait()),
            ];
            std::thread::sleep(Duration::from_millis(50));
            group.abort("enough");
            for waiter in waiters {
                assert_eq!(
                    outcome(&waiter.join().unwrap()),
                    "Aborted | aborted: this rank called abort(): enough"
                );
            }
        });
        for work in works {
            assert_eq!(
                describe(&work.wait().unwrap_err()),
                "Aborted | aborted: this rank called abort(): enough"
            );
        }
    } else {
        // Nothing of rank 0 is taken meanwhile.
        let error = describe(&group.recv(&into, 1).tag(1).wait().unwrap_err());
        assert!(error.starts_with("Aborted | aborted: rank 0 (host "), "{error}");
        assert_eq!(describe(&group.send(&into, 0).tag(1).start().unwrap_err()), error);
    }
}

on_links!(abort, 2, aborted);

/// Callbacks may send and receive; they run without a lock of the group.
fn callbacks(group: &Group) {
    let other = 1 - group.rank();
    let (sender, results) = channel();
    let into = empty(group, 4);
    let work = group.recv(&into, other).tag(1).start().unwrap();
    work.on_done({
        let (group, sender) = (group.clone(), sender);
        move |result| {
            let answer = group.send(&empty(&group, 4), 1 - group.rank()).tag(2).wait();
            sender.send((result.clone(), answer)).unwrap();
        }
    });
    group.send(&tensor(group, &[7; 4], Dtype::U8), other).tag(1).wait().unwrap();
    group.recv(&empty(group, 4), other).tag(2).wait().unwrap();
    let (result, answer) = results.recv_timeout(LONG).unwrap();
    result.unwrap();
    answer.unwrap();
    assert_eq!(bytes_of(&into), [7; 4]);
    group.barrier().wait().unwrap();
}

on_links!(callback, 2, callbacks);

/// The thread that waits for a message hears for all. A callback that it is made to run may wait for a message in turn.
fn callback_of_the_listener(group: &Group) {
    let other = 1 - group.rank();
    let pause = || std::thread::sleep(Duration::from_millis(100));
    if group.rank() == 1 {
        for tag in [1, 2, 3] {
            // The other rank sleeps by now, most likely.
            pause();
            group.send(&empty(group, 4), other).tag(tag).wait().unwrap();
        }
    } else {
        let work = group.recv(&empty(group, 4), other).tag(1).start().unwrap();
        let (sender, result) = channel();
        let handle = group.clone();
        work.on_done(move |_| {
            sender.send(handle.recv(&empty(&handle, 4), other).tag(2).wait()).unwrap();
        });
        group.recv(&empty(group, 4), other).tag(3).wait().unwrap();
        result.recv_timeout(LONG).unwrap().unwrap();
    }
    group.barrier().wait().unwrap();
}

on_links!(callback_of_who_listens, 2, callback_of_the_listener);

/// A group that is dropped ends what is pending; the last handle may even be in a callback.
fn drops_in_a_callback(_: &str, hosts: Placement) {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    ranks::on_threads(2, |rank| {
        let builder = Group::builder().context(&hosts.context(rank)).timeout(LONG);
        let group = builder.from_store(store.clone(), rank, 2).unwrap();
        let (one, two) = (empty(&group, 4), empty(&group, LARGE));
        let pending = group.recv(&empty(&group, 4), 1 - rank).tag(9).start().unwrap();
        let work = group.recv(&one, 1 - rank).tag(1).start().unwrap();
        let sent = group.send(&two, 1 - rank).tag(5).start().unwrap();
        group.send(&one, 1 - rank).tag(1).wait().unwrap();
        group.barrier().wait().unwrap();
        let handle = group.clone();
        work.on_done(move |_| drop(handle));
        drop(group);
        work.wait().unwrap();
        let ended = [describe(&pending.wait().unwrap_err()), outcome(&sent.wait())];
        let known = |text: &String| text == "ok" || text.contains("given up") || text.contains("closed");
        assert!(ended.iter().all(known), "{ended:?}");
    });
}

in_places!(dropped_in_a_callback, drops_in_a_callback, together Together, apart Apart, ucx Ucx);

/// A rank is killed in the middle of a message of which the other one has a part: it is stopped once its ring is full,
/// so that it cannot send the rest, and killed once the receiver has taken what was there. From another host less than all
/// has come before the receiver asked for it.
fn killed_in_the_middle(test: &str, hosts: Placement) {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let large = empty(&group, 32 << 20);
        match rank.rank {
            0 => {
                let work = group.recv(&empty(&group, 4), 1).tag(3).start().unwrap();
                say("ready");
                say(&outcome(&group.recv(&large, 1).tag(1).wait()));
                say(&outcome(&work.wait()));
                say(&outcome(&group.send(&large, 2).tag(1).wait()));
            }
            1 => {
                let _work = group.send(&large, 2).tag(1).start().unwrap();
                say("ready");
                await_parent();
            }
            _ => {
                say("ready");
                await_parent();
                // What is in the ring is taken before this returns.
                let work = group.recv(&large, 1).tag(1).start().unwrap();
                say(if work.is_done() { "has all of it" } else { "has a part" });
                say(&outcome(&work.wait()));
            }
        }
        return;
    }
    let Ranks { mut ranks, server: _server } =
        Ranks::start_with(test, 3, |rank, command| hosts.command(rank, command));
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    ranks[1].signal(rustix::process::Signal::STOP);
    let (stat, end) = (format!("/proc/{}/stat", ranks[1].pid()), Instant::now() + LONG);
    while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
        assert!(Instant::now() < end, "it does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
    ranks[2].let_go();
    assert_eq!(ranks[2].hear(), "has a part");
    let since = Instant::now();
    ranks[1].kill();
    for (rank, count) in [(2, 1), (0, 3)] {
        for _ in 0..count {
            let heard = ranks[rank].hear();
            assert!(heard.starts_with("Died 1 | rank 1 (host "), "{heard}");
        }
    }
    println!("from the kill to the last error {:?}", since.elapsed());
    ranks.remove(1);
    for rank in ranks {
        rank.expect_success();
    }
}

in_places!(kill_in_the_middle_of_a_message, killed_in_the_middle, together Together, apart Apart, pairs Pairs, ucx Ucx);

/// Descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Groups that come and go with messages that nobody received leave nothing behind.
fn leaves_nothing_behind(_: &str, hosts: Placement) {
    let round = || {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        ranks::on_threads(2, |rank| {
            let builder = Group::builder().context(&hosts.context(rank)).timeout(LONG);
            let group = builder.from_store(store.clone(), rank, 2).unwrap();
            for tag in 0..20 {
                drop(group.send(&empty(&group, 1000), 1 - rank).tag(tag).start().unwrap());
            }
            drop(group.send(&empty(&group, LARGE), 1 - rank).tag(99).start().unwrap());
            group.recv(&empty(&group, 1000), 1 - rank).tag(19).wait().unwrap();
            drop(group.recv(&empty(&group, 1000), 1 - rank).tag(1000).start().unwrap());
            group.barrier().wait().unwrap();
        });
    };
    round();
    // Other tests of this process open and close descriptors too: look until they are quiet.
    let (before, end) = (descriptors(), Instant::now() + LONG);
    for _ in 0..5 {
        round();
    }
    while descriptors() > before && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(descriptors() <= before, "{} descriptors, {before} before", descriptors());
}

in_places!(nothing_is_left_behind, leaves_nothing_behind, together Together, apart Apart, ucx Ucx);

/// Prints latency and bandwidth of two processes: `cargo test --release --test p2p speed -- --ignored --nocapture`.
#[test]
#[ignore = "measures"]
fn speed() {
    let Some(rank) = Rank::of_this_process() else {
        let Ranks { mut ranks, server: _server } = Ranks::start_with("speed", 2, |_, mut command| {
            command.arg("--ignored");
            command
        });
        for _ in 0..5 {
            println!("{}", ranks[0].hear());
        }
        ranks.into_iter().for_each(ranks::Process::expect_success);
        return;
    };
    let (group, me) = (rank.group(), rank.rank);
    for (len, rounds) in [(8, 20000), (1024, 20000), (64 << 10, 2000), (1 << 20, 300), (64 << 20, 8)] {
        let (mine, into) = (tensor(&group, &vec![1; len], Dtype::U8), empty(&group, len));
        let mut times = Vec::new();
        for _ in 0..rounds {
            let since = Instant::now();
            if me == 0 {
                group.send(&mine, 1).tag(1).wait().unwrap();
                group.recv(&into, 1).tag(1).wait().unwrap();
            } else {
                group.recv(&into, 0).tag(1).wait().unwrap();
                group.send(&mine, 0).tag(1).wait().unwrap();
            }
            times.push(since.elapsed().as_secs_f64() / 2.0);
        }
        times.sort_by(f64::total_cmp);
        // On a busy machine the fastest tenth says more than the median.
        let [fast, median, p99] = [10, 50, 99].map(|part| times[(rounds * part / 100).min(rounds - 1)]);
        if me == 0 {
            let text = [fast, median]
                .map(|time| format!("{:.2} us ({:.2} GB/s)", time * 1e6, len as f64 / time / 1e9));
            let [fast, median] = text;
            say(&format!("{len} bytes one way: p10 {fast}, median {median}, p99 {:.2} us", p99 * 1e6));
        }
    }
    group.barrier().wait().unwrap();
}
