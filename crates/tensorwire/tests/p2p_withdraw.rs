//! Receives that are withdrawn: by dropping their work, by asking for it, by a deadline. No message is lost, none comes twice,
//! and none overtakes another. As threads and as processes, on one host and on several.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod ranks;

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ranks::random::Random;
use ranks::{LONG, Placement, describe, outcome, spans_hosts};
use tensorwire::interrupt::with_interrupt;
use tensorwire::{Deadline, Dtype, Error, Group, RecvAny, ReduceOp, Span, Tensor, Work};

/// Small, within a ring, many times a ring, and large.
const SIZES: [usize; 4] = [8, 3000, 1 << 20, LARGE];
/// More than is taken at a time.
const LARGE: usize = 6 << 20;
/// What a receiver on another host takes unasked.
const UNASKED: usize = 4 << 20;

fn now() -> Deadline {
    Deadline::after(Duration::ZERO)
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_millis(200))
}

fn tensor(group: &Group, bytes: &[u8]) -> Tensor {
    let span = Span::whole(group.context().host().alloc(bytes.len()).unwrap());
    span.write(0, bytes).unwrap();
    Tensor::flat(span, Dtype::U8).unwrap()
}

/// What nobody sends.
fn blank(group: &Group, len: usize) -> Tensor {
    tensor(group, &vec![0xee; len])
}

fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    tensor.span().to_vec().unwrap()
}

/// The bytes of the message with this number.
fn message(len: usize, number: u64) -> Vec<u8> {
    let mut random = Random(number);
    // No part of a ring is a multiple of so many bytes.
    let block: Vec<u8> = (0..1021).map(|_| random.next() as u8).collect();
    let mut bytes = block.repeat(len.div_ceil(block.len()));
    bytes.truncate(len);
    let head = len.min(8);
    bytes[..head].copy_from_slice(&number.to_le_bytes()[..head]);
    bytes
}

/// Its number, if all of it is there.
fn number_of(tensor: &Tensor) -> u64 {
    let bytes = bytes_of(tensor);
    let number = u64::from_le_bytes(*bytes.first_chunk().unwrap());
    assert!(bytes == message(bytes.len(), number), "message {number} is not whole");
    number
}

impl Random {
    /// Passes a random, mostly short time.
    fn dally(&mut self) {
        let most = 1 << self.below(11);
        let until = Instant::now() + Duration::from_micros(self.below(most) as u64);
        while Instant::now() < until {
            std::thread::yield_now();
        }
    }
}

/// Waits for the end of an operation without being told how it ended.
fn await_end(work: &Work) {
    let (sender, over) = channel();
    work.on_over(move || sender.send(()).unwrap());
    over.recv_timeout(LONG).unwrap();
    assert!(work.is_over());
}

/// Waits until the message of a receive has begun to come into its tensor, or has come. On one host a receive takes what is
/// there when it starts.
fn await_begin(work: &Work, into: &Tensor) {
    let end = Instant::now() + LONG;
    let mut head = [0; 8];
    loop {
        let over = work.is_over();
        into.span().read(0, &mut head).unwrap();
        if over || head != [0xee; 8] {
            return;
        }
        assert!(Instant::now() < end, "no byte has come");
        std::thread::yield_now();
    }
}

/// A receive that is dropped before its message comes takes none.
fn before_it_comes(group: &Group) {
    for (tag, len) in SIZES.into_iter().enumerate().map(|(index, len)| (index as u64, len)) {
        if group.rank() == 0 {
            let (one, any, into) = (blank(group, len), blank(group, len), blank(group, len));
            drop(group.recv(&one, 1).tag(tag).start().unwrap());
            drop(group.recv_any(&any).tag(tag).start().unwrap());
            group.barrier().wait().unwrap();
            group.recv(&into, 1).tag(tag).wait().unwrap();
            assert_eq!(number_of(&into), tag);
            assert!(bytes_of(&one) == bytes_of(&any) && bytes_of(&one) == vec![0xee; len]);
        } else {
            group.barrier().wait().unwrap();
            group.send(&tensor(group, &message(len, tag)), 0).tag(tag).wait().unwrap();
        }
    }
    group.barrier().wait().unwrap();
}

on_hosts!(before, 2, before_it_comes);

/// A receive that is dropped while its message comes hands it on, and touches its tensor no more. Its sender goes on, though
/// this rank receives nothing meanwhile. Between hosts a sender may wait with what is more than a receiver takes unasked.
fn while_it_comes(group: &Group) {
    for (tag, len) in SIZES.into_iter().enumerate().map(|(index, len)| (index as u64, len)) {
        for any in [false, true] {
            if group.rank() == 0 {
                let first = blank(group, len);
                group.barrier().wait().unwrap();
                // Takes what is in the ring at once.
                let (work, recv_any) = match any {
                    false => (Some(group.recv(&first, 1).tag(tag).start().unwrap()), None),
                    true => (None, Some(group.recv_any(&first).tag(tag).start().unwrap())),
                };
                for work in work.iter().chain(recv_any.iter().map(RecvAny::work)) {
                    await_begin(work, &first);
                }
                drop((work, recv_any));
                let seen = bytes_of(&first);
                group.barrier().wait().unwrap();
                let into = blank(group, len);
                match any {
                    false => assert_eq!(group.recv_any(&into).tag(tag).wait().unwrap(), 1),
                    true => group.recv(&into, 1).tag(tag).wait().unwrap(),
                }
                assert_eq!(number_of(&into), tag);
                assert!(bytes_of(&first) == seen);
            } else {
                let work = group.send(&tensor(group, &message(len, tag)), 0).tag(tag).start().unwrap();
                group.barrier().wait().unwrap();
                let waits = spans_hosts(group) && len > UNASKED;
                if !waits {
                    work.wait().unwrap();
                }
                group.barrier().wait().unwrap();
                work.wait().unwrap();
            }
        }
    }
    group.barrier().wait().unwrap();
}

on_hosts!(coming, 2, while_it_comes);

/// Receives that have ended while nobody was told give their messages back, in the order in which they were sent, whatever
/// the order in which they are dropped. Tensors with gaps, too, and messages of a rank to itself.
fn after_it_came(group: &Group) {
    let (me, len) = (group.rank(), 3000);
    for from in [1, 0] {
        for reverse in [false, true] {
            let tag = 2 * from as u64 + u64::from(reverse);
            if me == 0 {
                let spans: Vec<Span> = (0..4).map(|_| blank(group, 2 * len).span().clone()).collect();
                let gaps = |span: &Span| Tensor::strided(span.clone(), Dtype::U8, &[len], &[2]).unwrap();
                let start = |span| group.recv(&gaps(span), from).tag(tag).start().unwrap();
                let mut works: Vec<Work> = spans.iter().map(start).collect();
                if from == 0 {
                    (0..4).for_each(|number| {
                        group.send(&tensor(group, &message(len, number)), 0).tag(tag).wait().unwrap();
                    });
                }
                works.iter().for_each(await_end);
                if reverse {
                    works.reverse();
                }
                drop(works);
                let into = blank(group, len);
                for number in 0..4 {
                    group.recv(&into, from).tag(tag).wait().unwrap();
                    assert_eq!(number_of(&into), number, "reverse {reverse}");
                }
                let error = group.recv(&into, from).tag(tag).deadline(now()).wait().unwrap_err();
                assert!(error.is_timeout(), "{error}");
            } else if from == 1 {
                for number in 0..4 {
                    group.send(&tensor(group, &message(len, number)), 0).tag(tag).wait().unwrap();
                }
            }
        }
    }
    group.barrier().wait().unwrap();
}

on_hosts!(after, 2, after_it_came);

/// A message of which somebody was told is received: it does not come again.
fn told(group: &Group) {
    type Look = fn(&Work);
    let looks: [Look; 4] = [
        |work| work.wait().unwrap(),
        |work| assert!(work.is_done()),
        |work| assert!(work.error().is_none()),
        |work| {
            let (sender, results) = channel();
            work.on_done(move |result| sender.send(result.clone()).unwrap());
            results.recv_timeout(LONG).unwrap().unwrap();
        },
    ];
    for (number, look) in looks.into_iter().enumerate() {
        if group.rank() == 0 {
            let into = blank(group, 8);
            let work = group.recv(&into, 1).start().unwrap();
            await_end(&work);
            assert!(!work.is_settled());
            look(&work);
            assert!(work.is_settled() && !work.withdraw());
            drop(work);
            assert_eq!(number_of(&into), number as u64);
        } else {
            group.send(&tensor(group, &message(8, number as u64)), 0).wait().unwrap();
        }
    }
    if group.rank() == 0 {
        let any = group.recv_any(&blank(group, 8)).start().unwrap();
        await_end(any.work());
        assert_eq!(any.source(), Some(1));
        drop(any);
        // It goes on without a handle.
        let into = blank(group, 8);
        let (sender, results) = channel();
        let work = group.recv(&into, 1).tag(1).start().unwrap();
        work.on_done(move |result| sender.send(result.clone()).unwrap());
        work.detach();
        group.barrier().wait().unwrap();
        results.recv_timeout(LONG).unwrap().unwrap();
        assert_eq!(number_of(&into), 6);
        for tag in [0, 1] {
            let error = group.recv(&into, 1).tag(tag).deadline(now()).wait().unwrap_err();
            assert!(error.is_timeout(), "{error}");
        }
    } else {
        group.send(&tensor(group, &message(8, 5)), 0).wait().unwrap();
        group.barrier().wait().unwrap();
        group.send(&tensor(group, &message(8, 6)), 0).tag(1).wait().unwrap();
    }
    group.barrier().wait().unwrap();
}

on_hosts!(somebody_was_told, 2, told);

/// Those that wait in line keep their places, and the first of them gets the message that is on its way.
fn in_line(group: &Group) {
    for (tag, len) in SIZES.into_iter().enumerate().map(|(index, len)| (index as u64, len)) {
        let send = |number| group.send(&tensor(group, &message(len, number)), 0).tag(tag).start().unwrap();
        if group.rank() == 0 {
            let tensors: Vec<Tensor> = (0..6).map(|_| blank(group, len)).collect();
            let start = |(index, into)| match index % 3 {
                2 => group.recv_any(into).tag(tag).start().unwrap().work().clone(),
                _ => group.recv(into, 1).tag(tag).start().unwrap(),
            };
            let mut works: Vec<Option<Work>> = tensors.iter().enumerate().map(start).map(Some).collect();
            (works[1], works[4]) = (None, None);
            group.barrier().wait().unwrap();
            for (number, index) in [0, 2, 3, 5].into_iter().enumerate() {
                works[index].as_ref().unwrap().wait().unwrap();
                assert_eq!(number_of(&tensors[index]), number as u64);
            }
            assert!([1, 4].iter().all(|&index: &usize| bytes_of(&tensors[index]) == vec![0xee; len]));
            group.barrier().wait().unwrap();
            // Messages are on their way.
            group.barrier().wait().unwrap();
            let first = group.recv(&tensors[0], 1).tag(tag).start().unwrap();
            let second = group.recv_any(&tensors[1]).tag(tag).start().unwrap();
            let third = group.recv(&tensors[2], 1).tag(tag).start().unwrap();
            drop(first);
            second.wait().unwrap();
            third.wait().unwrap();
            group.recv(&tensors[3], 1).tag(tag).wait().unwrap();
            // They are in order, unless the first had a whole one that nobody else waited for any more.
            let numbers: Vec<u64> = (1..4).map(|index| number_of(&tensors[index])).collect();
            let known = [[4, 5, 6], [5, 4, 6], [5, 6, 4]];
            assert!(known.iter().any(|known| numbers == known), "{numbers:?}");
        } else {
            group.barrier().wait().unwrap();
            (0..4).map(send).for_each(|work| work.wait().unwrap());
            group.barrier().wait().unwrap();
            let works: Vec<Work> = (4..7).map(send).collect();
            group.barrier().wait().unwrap();
            works.iter().for_each(|work| work.wait().unwrap());
        }
    }
    group.barrier().wait().unwrap();
}

on_hosts!(line, 2, in_line);

/// A deadline withdraws a receive in the middle of a message, too: the next in line gets it.
fn late_in_line(group: &Group) {
    let len = LARGE;
    if group.rank() == 0 {
        let (first, second) = (blank(group, len), blank(group, len));
        group.barrier().wait().unwrap();
        let late = group.recv(&first, 1).deadline(now()).start().unwrap();
        let next = group.recv(&second, 1).start().unwrap();
        let error = describe(&late.wait().unwrap_err());
        assert!(error.starts_with("TimedOut | timed out"), "{error}");
        let seen = bytes_of(&first);
        next.wait().unwrap();
        assert_eq!(number_of(&second), 7);
        assert!(bytes_of(&first) == seen);
    } else {
        let work = group.send(&tensor(group, &message(len, 7)), 0).start().unwrap();
        group.barrier().wait().unwrap();
        work.wait().unwrap();
    }
    group.barrier().wait().unwrap();
}

on_hosts!(late, 2, late_in_line);

/// The next in line may be of another size. Then the message waits for a receive that it fits.
fn misfit_in_line(group: &Group) {
    let len = LARGE;
    if group.rank() == 0 {
        let (first, second) = (blank(group, len), blank(group, 8));
        group.barrier().wait().unwrap();
        let work = group.recv(&first, 1).start().unwrap();
        await_begin(&work, &first);
        let next = group.recv(&second, 1).start().unwrap();
        drop(work);
        next.wait().unwrap();
        assert_eq!(number_of(&second), 2);
        group.recv(&first, 1).wait().unwrap();
        assert_eq!(number_of(&first), 1);
    } else {
        let sent = [(len, 1), (8, 2)].map(|(len, number)| tensor(group, &message(len, number)));
        let works = sent.map(|tensor| group.send(&tensor, 0).start().unwrap());
        group.barrier().wait().unwrap();
        works.iter().for_each(|work| work.wait().unwrap());
    }
    group.barrier().wait().unwrap();
}

on_hosts!(misfit, 2, misfit_in_line);

/// What is withdrawn by name: others who have the work, and its callbacks, hear of it. Nothing but receives is withdrawn.
fn by_name(group: &Group) {
    let text = "Aborted | aborted: recv with tag 4 was withdrawn; its message goes to the next receive that asks for it";
    let sum = Tensor::private(&[1i32; 100]).unwrap();
    // Between hosts there are no collectives yet that can be started.
    let near = !spans_hosts(group);
    if group.rank() == 0 {
        for over in [false, true] {
            let into = blank(group, 8);
            let work = group.recv(&into, 1).tag(4).start().unwrap();
            let (own, (sender, results)) = (work.clone(), channel());
            if over {
                group.barrier().wait().unwrap();
                await_end(&work);
            }
            assert!(work.withdraw() && !work.withdraw());
            work.on_done(move |result| sender.send(outcome(result)).unwrap());
            assert_eq!(results.recv_timeout(LONG).unwrap(), text);
            assert_eq!((describe(&own.wait().unwrap_err()), own.is_done()), (text.into(), true));
            assert_eq!(describe(&own.error().unwrap()), text);
            assert!(own.is_settled());
        }
        let any = group.recv_any(&blank(group, 8)).tag(5).start().unwrap();
        assert!(any.work().withdraw() && any.source().is_none());
        any.wait().unwrap_err();
        let into = blank(group, 8);
        group.recv(&into, 1).tag(4).wait().unwrap();
        assert_eq!(number_of(&into), 4);
        group.barrier().wait().unwrap();
        // A send and a collective go on when their works are dropped.
        let mut works = vec![group.send(&into, 1).start().unwrap()];
        if near {
            works.push(group.all_reduce(&sum, ReduceOp::Sum).start().unwrap());
        }
        assert!(works.iter().all(|work| !work.withdraw()));
        drop(works);
    } else {
        group.send(&tensor(group, &message(8, 4)), 0).tag(4).wait().unwrap();
        group.barrier().wait().unwrap();
        group.barrier().wait().unwrap();
        let into = blank(group, 8);
        group.recv(&into, 0).wait().unwrap();
        assert_eq!(number_of(&into), 4);
        if near {
            group.all_reduce(&sum, ReduceOp::Sum).wait().unwrap();
        }
    }
    group.barrier().wait().unwrap();
    assert_eq!(sum.to_vec::<i32>().unwrap(), [if near { 2 } else { 1 }; 100]);
}

on_hosts!(asked_for, 2, by_name);

/// A callback that panics harms nobody: neither who drops or ends the receive, nor the other callbacks.
fn panics(group: &Group) {
    if group.rank() == 0 {
        let (sender, called) = channel();
        let watch = |work: &Work, number: u32| {
            let sender = sender.clone();
            work.on_settled(|| panic!("a callback of the test"));
            work.on_settled(move || sender.send(number).unwrap());
        };
        // One that somebody is told of, one that is withdrawn after its end, one before.
        let told = group.recv(&blank(group, 8), 1).start().unwrap();
        watch(&told, 1);
        told.wait().unwrap();
        let over = group.recv(&blank(group, 8), 1).start().unwrap();
        watch(&over, 2);
        await_end(&over);
        drop(over);
        let pending = group.recv(&blank(group, 8), 1).tag(1).start().unwrap();
        watch(&pending, 3);
        drop(pending);
        // The thread in the background ends it: it gets what does not fit.
        let misfit = group.recv(&blank(group, 8), 1).tag(1).start().unwrap();
        watch(&misfit, 4);
        group.barrier().wait().unwrap();
        for number in 1..5 {
            assert_eq!(called.recv_timeout(LONG).unwrap(), number);
        }
        assert!(describe(&misfit.wait().unwrap_err()).starts_with("Mismatch 1 | "));
        // That thread is still there.
        let next = group.recv(&blank(group, 8), 1).tag(2).start().unwrap();
        group.barrier().wait().unwrap();
        await_end(&next);
        next.wait().unwrap();
    } else {
        for number in 0..2 {
            group.send(&tensor(group, &message(8, number)), 0).wait().unwrap();
        }
        group.barrier().wait().unwrap();
        group.send(&tensor(group, &message(9, 2)), 0).tag(1).wait().unwrap();
        group.barrier().wait().unwrap();
        group.send(&tensor(group, &message(8, 2)), 0).tag(2).wait().unwrap();
    }
    group.barrier().wait().unwrap();
}

on_hosts!(panicking, 2, panics);

/// A work that outlives its group, and one of a group that has failed.
fn outlives_its_group(_: &str, hosts: Placement) {
    use tensorwire::store::{MemoryStore, Store};
    let store: std::sync::Arc<dyn Store> = std::sync::Arc::new(MemoryStore::new());
    ranks::on_threads(2, |rank| {
        let builder = Group::builder().context(&hosts.context(rank)).timeout(LONG);
        let group = builder.from_store(store.clone(), rank, 2).unwrap();
        let into = blank(&group, 8);
        group.send(&tensor(&group, &message(8, 1)), 1 - rank).tag(1).wait().unwrap();
        let over = group.recv(&into, 1 - rank).tag(1).start().unwrap();
        await_end(&over);
        let pending = group.recv(&into, 1 - rank).tag(2).start().unwrap();
        group.send(&tensor(&group, &message(8, 3)), 1 - rank).tag(3).wait().unwrap();
        let unseen = group.recv(&blank(&group, 8), 1 - rank).tag(3).start().unwrap();
        await_end(&unseen);
        group.barrier().wait().unwrap();
        drop(group);
        assert!(!over.withdraw() && !pending.withdraw());
        // The other one may have closed it first.
        let ended = outcome(&pending.wait());
        assert!(ended.contains("is being closed") || ended.contains("has closed the group"), "{ended}");
        over.wait().unwrap();
        assert_eq!(number_of(&into), 1);
        // Nobody can be told any more: the tensor is free.
        let (sender, called) = channel();
        unseen.on_settled(move || sender.send(()).unwrap());
        assert!(!unseen.withdraw() && called.try_recv().is_err());
        drop(unseen);
        called.recv_timeout(LONG).unwrap();
    });
}

in_places!(after_the_group, outlives_its_group, together Together, apart Apart);

/// One receive at a time, given up again and again in all ways: the messages come in order, each once.
fn in_order(group: &Group) {
    const COUNT: u64 = 60;
    let other = 1 - group.rank();
    for (turn, len) in [8, 3000, 300_000, LARGE].into_iter().enumerate() {
        let (count, tag) = (if len == LARGE { 4 } else { COUNT }, turn as u64);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = Random(group.rank() as u64 + 10 * tag);
                for number in 0..count {
                    group.send(&tensor(group, &message(len, number)), other).tag(tag).wait().unwrap();
                    if random.below(4) == 0 {
                        random.dally();
                    }
                }
            });
            let mut random = Random(group.rank() as u64 + 10 * tag + 5);
            let mut expected = 0;
            while expected < count {
                // Each has a tensor of its own: what is withdrawn must not touch it afterwards.
                let into = blank(group, len);
                let got = match random.below(7) {
                    0 => group.recv(&into, other).tag(tag).deadline(now()).wait().is_ok(),
                    1 => {
                        let by = Deadline::after(Duration::from_micros(random.below(2000) as u64));
                        group.recv_any(&into).tag(tag).deadline(by).wait().is_ok()
                    }
                    2 => {
                        let work = group.recv(&into, other).tag(tag).start().unwrap();
                        random.dally();
                        !work.withdraw()
                    }
                    3 => {
                        let any = group.recv_any(&into).tag(tag).start().unwrap();
                        random.dally();
                        any.source().is_some()
                    }
                    4 => {
                        let enough = Rc::new(|| Err(Error::Interrupted("enough".into())));
                        with_interrupt(enough, || group.recv(&into, other).tag(tag).wait().is_ok())
                    }
                    5 => {
                        let works: Vec<Work> = (0..1 + random.below(4))
                            .map(|_| group.recv(&blank(group, len), other).tag(tag).start().unwrap())
                            .collect();
                        random.dally();
                        drop(works);
                        false
                    }
                    _ => {
                        let work = group.recv(&into, other).tag(tag).start().unwrap();
                        random.dally();
                        work.wait_by(Deadline::after(Duration::from_micros(random.below(300) as u64))).is_ok()
                    }
                };
                if got {
                    assert_eq!(number_of(&into), expected, "{len} bytes");
                    expected += 1;
                }
            }
        });
        let error = group.recv(&blank(group, len), other).tag(tag).deadline(now()).wait().unwrap_err();
        assert!(error.is_timeout(), "{error}");
        group.barrier().wait().unwrap();
    }
}

on_hosts!(order, 2, in_order);

/// Many receives at once on several threads, of one rank and of any, of which some are given up: each message comes once.
fn each_once(group: &Group) {
    const COUNT: u64 = 50;
    let (me, world) = (group.rank(), group.world());
    std::thread::scope(|scope| {
        for tag in 0..3u64 {
            let len = [8, 3000, 200_000][tag as usize];
            if me > 0 {
                scope.spawn(move || {
                    for number in 0..COUNT {
                        let own = tensor(group, &message(len, number << 8 | me as u64));
                        group.send(&own, 0).tag(tag).wait().unwrap();
                    }
                });
                continue;
            }
            scope.spawn(move || {
                let mut random = Random(tag);
                let mut flying: VecDeque<(Work, Tensor)> = VecDeque::new();
                let mut seen: Vec<Vec<u64>> = vec![Vec::new(); world];
                let all = COUNT as usize * (world - 1);
                while seen.iter().map(Vec::len).sum::<usize>() < all {
                    if flying.len() < 6 {
                        let into = blank(group, len);
                        let work = match random.below(world) {
                            0 => group.recv_any(&into).tag(tag).start().unwrap().work().clone(),
                            from => group.recv(&into, from).tag(tag).start().unwrap(),
                        };
                        flying.push_back((work, into));
                    }
                    if random.below(3) == 0 {
                        random.dally();
                    }
                    let index = random.below(flying.len());
                    let taken = match random.below(4) {
                        0 => {
                            let (work, into) = flying.swap_remove_back(index).unwrap();
                            (!work.withdraw()).then_some(into)
                        }
                        1 => {
                            flying.remove(index);
                            None
                        }
                        _ if flying[index].0.is_done() => flying.remove(index).map(|(_, into)| into),
                        _ => None,
                    };
                    if let Some(into) = taken {
                        let number = number_of(&into);
                        seen[(number & 0xff) as usize].push(number >> 8);
                    }
                }
                for numbers in &mut seen[1..] {
                    numbers.sort_unstable();
                    assert_eq!(*numbers, (0..COUNT).collect::<Vec<_>>());
                }
            });
        }
    });
    if me == 0 {
        for tag in 0..3 {
            let error = group.recv_any(&blank(group, 8)).tag(tag).deadline(soon()).wait().unwrap_err();
            assert!(error.to_string().contains("no rank has sent"), "{error}");
        }
    }
    group.barrier().wait().unwrap();
}

on_hosts!(once, 3, each_once);
