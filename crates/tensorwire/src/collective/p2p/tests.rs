#![allow(clippy::unwrap_used)] // test helpers

use std::time::{Duration, Instant};

use tensorwire_device::flag::LINE;
use tensorwire_device::host::Host;
use tensorwire_device::sync::{AtomicBool, Ordering::SeqCst};
use tensorwire_device::{Caching, Device, Dtype, Span};

use super::incoming::Incoming;
use super::operation::{Arrival, Hearer, Receiving, Ticket};
use super::peers::{Peers, Way};
use super::state::State;
use super::*;
use crate::collective::Tensor;
use crate::collective::work::Withdraw;
use crate::context::Context;
use crate::link::{Header, Outlet};
use crate::shm::control::Control;

fn controls(n: usize) -> Vec<Arc<Control>> {
    let region = Control::alloc(&Host, n, n).unwrap();
    (0..n).map(|rank| Arc::new(Control::open(region.clone(), (0..n).collect(), (rank, n)).unwrap())).collect()
}

fn engines(n: usize) -> Vec<Arc<Engine>> {
    controls(n).iter().map(engine).collect()
}

fn engine(control: &Arc<Control>) -> Arc<Engine> {
    let context = Context::new(crate::Config::default()).unwrap();
    let rest = (&Arc::default(), Duration::from_secs(60));
    Arc::new(Engine::new(peers(control), &context, rest).unwrap())
}

fn peers(control: &Arc<Control>) -> Peers {
    Peers::new(control, &[], None)
}

/// The way from one rank to another, as the first has it.
fn outlet(control: &Arc<Control>, to: usize) -> Box<dyn Outlet> {
    match peers(control).way_to(to).unwrap() {
        Way::Open(way) => way,
        Way::Dialing(_) => unreachable!(),
    }
}

fn span(bytes: &[u8]) -> Span {
    let span = Span::whole(Host.alloc(bytes.len()).unwrap());
    span.write(0, bytes).unwrap();
    span
}

fn tensor(bytes: &[u8]) -> Tensor {
    Tensor::flat(span(bytes), Dtype::U8).unwrap()
}

fn later() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn header(number: u64, bytes: usize) -> Header {
    Header { tag: 5, bytes: bytes as u64, number, dtype: Dtype::U8, lent: 0 }
}

/// A peer that breaks its ring loses that pair, and nobody else does.
#[test]
fn nonsense_breaks_one_pair() {
    let controls = controls(3);
    let engine = |place: usize| engine(&controls[place]);
    let (mine, other) = (engine(0), engine(2));
    let at = controls[1].map().ring(1, 0);
    controls[1].region().commit(at..at + LINE).unwrap();
    controls[1].flag(at).unwrap().store(12345);
    let error = mine.recv(&tensor(&[0; 4]), Some(1), 1, later()).unwrap_err();
    assert!(error.to_string().starts_with("rank 1 misbehaved"), "{error}");
    other.send(&tensor(&[3; 4]), 0, 1, later()).unwrap();
    let into = tensor(&[0; 4]);
    assert_eq!(mine.recv(&into, None, 1, later()).unwrap(), 2);
    assert_eq!(into.span().to_vec().unwrap(), [3; 4]);
}

/// Messages that came too early are kept until they are received, and no longer.
#[test]
fn kept_messages_are_given_out_and_freed() {
    let engines = engines(2);
    for tag in 0..10 {
        engines[0].send(&tensor(&[tag as u8; 100]), 1, tag, later()).unwrap();
    }
    let into = tensor(&[0; 100]);
    for (received, tag) in [9, 0, 8, 1, 7, 2, 6, 3, 5, 4].into_iter().enumerate() {
        engines[1].recv(&into, Some(0), tag, later()).unwrap();
        assert_eq!(into.span().to_vec().unwrap(), [tag as u8; 100]);
        let left = 9 - received;
        assert_eq!(engines[1].kept(), (left, 100 * left));
    }
    // Nobody asks for what a ring holds, so nobody keeps it.
    engines[0].send(&tensor(&[1; 100]), 1, 1, later()).unwrap();
    assert_eq!(engines[1].kept(), (0, 0));
    engines[1].recv(&into, Some(0), 1, later()).unwrap();
    // One that is dropped because it does not fit is not kept either.
    engines[0].send(&tensor(&[1; 99]), 1, 1, later()).unwrap();
    engines[1].recv(&into, Some(0), 1, later()).unwrap_err();
    assert_eq!(engines[1].kept(), (0, 0));
    // What is left at the end is freed by closing.
    engines[0].send(&tensor(&[1; 100]), 0, 1, later()).unwrap();
    assert_eq!(engines[0].kept(), (1, 100));
    engines[0].close();
    assert_eq!(engines[0].kept(), (0, 0));
}

/// A message that is half here when its receive comes.
#[test]
fn a_receive_for_a_message_on_its_way() {
    let engines = engines(2);
    let bytes: Vec<u8> = (0..3 << 20).map(|index| (index % 251) as u8).collect();
    let work = engines[0].start_send(&tensor(&bytes), 1, 1, Course::Own(None), later()).unwrap();
    // Nothing with this tag comes: what is in the ring is kept, and the rest follows as long as somebody listens.
    let nothing = engines[1].recv(&tensor(&[0]), Some(0), 2, Deadline::after(Duration::ZERO));
    assert!(nothing.unwrap_err().is_timeout());
    let into = tensor(&vec![0; bytes.len()]);
    engines[1].recv(&into, Some(0), 1, later()).unwrap();
    assert!(into.span().to_vec().unwrap() == bytes);
    work.wait().unwrap();
    engines.iter().for_each(|engine| engine.close());
}

/// A message of which a part is there when its receive is withdrawn: the first that waits behind it gets all of it, also
/// when that one is withdrawn in turn. Without one it is kept. Nothing more is written to where it was wanted before.
#[test]
fn a_message_on_its_way_is_handed_on() {
    let controls = controls(2);
    let engine = engine(&controls[1]);
    let mut queue = Host.queue().unwrap();
    let mut producer = outlet(&controls[0], 1);
    let bytes: Vec<u8> = (0..1 << 20).map(|index| (index % 251) as u8).collect();
    let from = span(&bytes);
    let start = |tensor: &Tensor| engine.start_recv(tensor, 0, 5, None, later()).unwrap();
    for (number, all) in [false, true].into_iter().enumerate() {
        assert!(producer.begin(header(number as u64, bytes.len())).unwrap());
        let mut put = producer.put(&mut *queue, from.view(), Caching::Keep).unwrap();
        assert!(put < bytes.len());
        let tensors: Vec<Tensor> = (0..3).map(|_| tensor(&vec![255; bytes.len()])).collect();
        // Takes what is in the ring before it returns.
        let mut works: Vec<Work> = tensors.iter().map(start).collect();
        let last = works.pop().unwrap();
        drop(works);
        assert!(!last.is_over());
        assert_eq!(engine.kept(), (0, 0));
        let given_up: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.span().to_vec().unwrap()).collect();
        assert!(given_up.iter().all(|given_up| given_up[..put] == bytes[..put]));
        let (work, into) = if all {
            drop(last);
            assert_eq!(engine.kept(), (1, put));
            let into = tensor(&vec![255; bytes.len()]);
            (start(&into), into)
        } else {
            (last, tensors[2].clone())
        };
        while put < bytes.len() {
            let rest = from.view().slice(put..bytes.len()).unwrap();
            put += producer.put(&mut *queue, rest, Caching::Keep).unwrap();
            std::thread::yield_now();
        }
        work.wait().unwrap();
        assert!(into.span().to_vec().unwrap() == bytes);
        for (tensor, given_up) in tensors.iter().zip(given_up).take(if all { 3 } else { 2 }) {
            assert!(tensor.span().to_vec().unwrap() == given_up);
        }
        assert_eq!(engine.kept(), (0, 0));
    }
    engine.close();
}

/// A message whose receive was given up goes to the first receive that it fits. It fails none: without such a one it is kept,
/// and those that wait get their own messages.
#[test]
fn a_message_handed_on_fails_no_other_receive() {
    for whole in [false, true] {
        let controls = controls(2);
        let engine = engine(&controls[1]);
        let mut queue = Host.queue().unwrap();
        let mut producer = outlet(&controls[0], 1);
        let long: Vec<u8> = (0..1 << 20).map(|index| (index % 251) as u8).collect();
        let first = if whole { &long[..1000] } else { &long[..] };
        let from = span(first);
        assert!(producer.begin(header(0, first.len())).unwrap());
        let mut put = producer.put(&mut *queue, from.view(), Caching::Keep).unwrap();
        assert_eq!(put == first.len(), whole);
        let start = |tensor: &Tensor| engine.start_recv(tensor, 0, 5, None, later()).unwrap();
        let (own, other, same) =
            (tensor(&vec![0; first.len()]), tensor(&[0; 8]), tensor(&vec![0; first.len()]));
        let (one, two, three) = (start(&own), start(&other), start(&same));
        assert_eq!(one.is_over(), whole);
        // The one between is of another size: it is passed over.
        drop(one);
        assert_eq!((engine.kept().0, two.is_over(), three.is_over()), (0, false, whole));
        drop(three);
        assert_eq!((engine.kept(), two.is_over()), ((1, put), false));
        while put < first.len() {
            let rest = from.view().slice(put..first.len()).unwrap();
            put += producer.put(&mut *queue, rest, Caching::Keep).unwrap();
            std::thread::yield_now();
        }
        // Its own message comes, beside the one that is kept.
        while !producer.begin(header(1, 8)).unwrap() {
            std::thread::yield_now();
        }
        assert_eq!(producer.put(&mut *queue, span(&[9; 8]).view(), Caching::Keep).unwrap(), 8);
        two.wait().unwrap();
        assert_eq!(other.span().to_vec().unwrap(), [9; 8]);
        assert_eq!(engine.kept(), (1, first.len()));
        engine.recv(&same, Some(0), 5, later()).unwrap();
        assert!(same.span().to_vec().unwrap() == first);
        assert_eq!(engine.kept(), (0, 0));
        engine.close();
    }
}

/// The last reference to a tensor is not dropped under the lock, however its operation ends: the caller's code may run then.
#[test]
fn memory_outlives_the_lock() {
    type End = fn(&mut State, &Started);
    let ends: [(End, bool); 3] = [
        (|state, _| state.close(), false),
        (|state, started| assert!(state.withdraw(started).is_some_and(|calls| calls.is_empty())), false),
        (|state, _| assert!(state.progress()), true),
    ];
    for (end, late) in ends {
        for gaps in [false, true] {
            for send in [false, true] {
                let engine = engines(1).remove(0);
                let mut state = State::new(Arc::new(peers(&controls(2)[1])), Arc::new(Host)).unwrap();
                let started = Started::new(&engine);
                let (_work, completion) = Work::pending("a test");
                let hearer = Hearer::Work(completion, (!send).then(|| started.clone()));
                let how = (if late { Deadline::after(Duration::ZERO) } else { later() }, hearer);
                // More than a ring has room for.
                let span = span(&vec![0; 4 << 20]);
                let region = Arc::downgrade(span.region());
                let tensor = match gaps {
                    true => Tensor::strided(span.clone(), Dtype::U8, &[2 << 20], &[2]).unwrap(),
                    false => Tensor::flat(span.clone(), Dtype::U8).unwrap(),
                };
                match send {
                    true => drop(state.send((&tensor, None), 0, 5, how).unwrap()),
                    false => state.receive((&tensor, None), Some(0), 5, how).unwrap(),
                }
                drop((tensor, span));
                // A send with gaps has a copy.
                let own = !(send && gaps);
                assert_eq!(region.strong_count() > 0, own);
                // A send is not withdrawn.
                match send && !late {
                    true => state.close(),
                    false => end(&mut state, &started),
                }
                assert_eq!(region.strong_count() > 0, own, "gaps {gaps}, send {send}, late {late}");
                assert_eq!(state.finished().len(), 1);
                assert_eq!(region.strong_count(), 0);
            }
        }
    }
}

/// A receive that waits in vain says what is there instead.
#[test]
fn what_waits_beside_a_late_receive() {
    let controls = controls(2);
    let (peers, mut incoming) = (peers(&controls[1]), Incoming::new(2));
    let (mut queue, mut ended) = (Host.queue().unwrap(), Vec::new());
    let (since, deadline) = (Instant::now(), Deadline::at(Instant::now()));
    for tag in [5, 6] {
        let ticket =
            Ticket { since, deadline, to: Hearer::Waiter(tag), record: None, copied: None, number: 0 };
        let receive = Receiving::new(&tensor(&[0; 8]), None, (Some(0), tag), ticket, &Host).unwrap();
        incoming.post(receive, &peers, &mut *queue, &mut ended);
    }
    incoming.bring((0, header(0, 9), true), Ok(vec![1; 9]), &peers, &mut *queue, &mut ended);
    assert!(ended.is_empty());
    incoming.expire(Instant::now(), &peers, &mut ended);
    let errors: Vec<String> = ended.iter().map(|ended| ended.1.as_ref().unwrap_err().to_string()).collect();
    let misfit = "not sent a message with tag 5 that fits; one of another size or type waits, because its receive was given up";
    assert!(errors[0].contains(misfit), "{errors:?}");
    assert!(
        errors[1].contains("not sent a message with tag 6; 1 message with another tag waits"),
        "{errors:?}"
    );
}

/// A receive is settled when its message was copied out of its tensor, and not before.
#[test]
fn a_tensor_is_in_use_until_its_message_was_copied() {
    let engine = engines(1).remove(0);
    let started = Started::new(&engine);
    let (sender, called) = std::sync::mpsc::channel();
    let settle = |number| {
        let sender = sender.clone();
        started.on_settled(Box::new(move || sender.send(number).unwrap())).is_none()
    };
    assert!(settle(1));
    started.arrived(Arrival { from: 0, header: header(0, 8), payload: span(&[7; 8]), unload: None });
    let arrival = started.take_back().unwrap();
    // The copy is made now.
    assert!(!started.is_settled() && settle(2));
    assert!(!started.claim() && !started.is_settled());
    assert!(!started.withdraw() && started.take_back().is_none());
    drop(arrival);
    assert_eq!(called.try_iter().count(), 0);
    started.left().into_iter().for_each(|callback| callback());
    assert!(started.is_settled() && !settle(3) && !started.claim());
    assert_eq!(called.try_iter().collect::<Vec<_>>(), [1, 2]);
}

/// A program that hears that a receive was withdrawn may write to its tensor: its message was copied before.
#[test]
fn nobody_hears_of_a_withdrawal_before_the_copy() {
    let engine = engines(1).remove(0);
    let started = Started::new(&engine);
    started.arrived(Arrival { from: 0, header: header(0, 8), payload: span(&[7; 8]), unload: None });
    let (begun, copied) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        engine.alone(|| {
            assert!(started.take_back().is_some());
            scope.spawn(|| {
                begun.store(true, SeqCst);
                assert!(!started.claim());
                assert!(copied.load(SeqCst));
            });
            while !begun.load(SeqCst) {
                std::thread::yield_now();
            }
            // Time to go wrong in.
            (0..1000).for_each(|_| std::thread::yield_now());
            copied.store(true, SeqCst);
            assert!(started.left().is_empty());
        });
    });
}

/// Receives are matched in the order in which they were posted, whether they name a rank or not.
#[test]
fn posted_receives_have_an_order() {
    let engines = engines(2);
    let tensors: Vec<Tensor> = (0..4).map(|_| tensor(&[0; 1])).collect();
    let from = [Some(0), None, Some(0), None];
    let works: Vec<Work> = tensors
        .iter()
        .zip(from)
        .map(|(tensor, from)| match from {
            Some(from) => engines[1].start_recv(tensor, from, 1, None, later()).unwrap(),
            None => engines[1].start_recv_any(tensor, 1, None, later()).unwrap().work().clone(),
        })
        .collect();
    for byte in 1..=4 {
        engines[0].send(&tensor(&[byte]), 1, 1, later()).unwrap();
    }
    works.iter().for_each(|work| work.wait().unwrap());
    let got: Vec<u8> = tensors.iter().flat_map(|tensor| tensor.span().to_vec().unwrap()).collect();
    assert_eq!(got, [1, 2, 3, 4]);
    engines.iter().for_each(|engine| engine.close());
}

/// Shared memory is taken for the rings that are used, and not before.
#[test]
fn only_rings_in_use_cost_memory() {
    let controls = controls(4);
    let engine = |place: usize| engine(&controls[place]);
    let blocks = || {
        let tensorwire_device::Handle::Memfd { fd, .. } = controls[0].region().export().unwrap() else {
            return 0;
        };
        rustix::fs::fstat(&fd).unwrap().st_blocks as usize * 512
    };
    let engines: Vec<_> = (0..4).map(engine).collect();
    let before = blocks();
    engines[0].send(&tensor(&[1]), 1, 1, later()).unwrap();
    assert_eq!(blocks() - before, controls[0].map().ring_len());
    engines[1].recv(&tensor(&[1]), None, 1, later()).unwrap();
    // A page for each rank that was listened to.
    assert!(blocks() - before <= controls[0].map().ring_len() + 2 * 4096);
}

/// What nobody wants is dropped as it comes, whatever its size, and is not gathered before.
#[test]
fn a_message_that_is_dropped_is_not_gathered() {
    let engines = engines(2);
    let bytes: Vec<u8> = (0..3 << 20).map(|index| (index % 251) as u8).collect();
    let (large, small) = (tensor(&bytes), tensor(&[7; 9]));
    let into = tensor(&[0; 9]);
    let mut most = 0;
    for half_here in [false, true] {
        let work = engines[0].start_send(&large, 1, 1, Course::Own(None), later()).unwrap();
        let next = engines[0].start_send(&small, 1, 1, Course::Own(None), later()).unwrap();
        if half_here {
            // What is in the ring is kept, because somebody listens.
            let nothing = engines[1].recv(&into, Some(0), 2, Deadline::after(Duration::ZERO));
            assert!(nothing.unwrap_err().is_timeout());
            assert!(engines[1].kept().1 > 0);
        }
        engines[1].discard(0, 1).unwrap();
        while !work.is_done() {
            most = most.max(engines[1].kept().1);
            std::thread::yield_now();
        }
        // The next one is whole.
        engines[1].recv(&into, Some(0), 1, later()).unwrap();
        assert_eq!(into.span().to_vec().unwrap(), [7; 9]);
        assert_eq!(engines[1].kept(), (0, 0));
        next.wait().unwrap();
    }
    assert!(most < 100, "{most}");
    // One that is here already.
    engines[0].send(&small, 1, 3, later()).unwrap();
    engines[0].send(&small, 1, 4, later()).unwrap();
    engines[1].recv(&into, Some(0), 4, later()).unwrap();
    assert_eq!(engines[1].kept(), (1, 9));
    engines[1].discard(0, 3).unwrap();
    assert_eq!(engines[1].kept(), (0, 0));
}

/// A message that was received and is given back is there for the next receive, before a later one.
#[test]
fn a_message_that_is_given_back() {
    let engines = engines(2);
    for number in 0..2 {
        engines[0].send(&tensor(&[number; 10]), 1, 1, later()).unwrap();
    }
    let (first, into) = (tensor(&[9; 10]), tensor(&[9; 10]));
    let taken = engines[1].recv_kept(&first, 0, 1, later()).unwrap();
    assert_eq!(first.span().to_vec().unwrap(), [0; 10]);
    taken.give_back();
    for number in 0..2 {
        engines[1].recv(&into, Some(0), 1, later()).unwrap();
        assert_eq!(into.span().to_vec().unwrap(), [number; 10]);
    }
    // A receive that waits gets it.
    engines[0].send(&tensor(&[3; 10]), 1, 1, later()).unwrap();
    let taken = engines[1].recv_kept(&first, 0, 1, later()).unwrap();
    let waits = engines[1].start_recv(&into, 0, 1, None, later()).unwrap();
    taken.give_back();
    waits.wait().unwrap();
    assert_eq!(into.span().to_vec().unwrap(), [3; 10]);
}

/// A started send is withdrawn: the receiver gets the next one.
#[test]
fn a_send_that_is_revoked() {
    let engines = engines(2);
    let large = tensor(&vec![1; 8 << 20]);
    let one = engines[0].start_revocable(&large, 1, 1, later()).unwrap();
    let two = engines[0].start_revocable(&large, 1, 1, later()).unwrap();
    // One that has begun, and one that has not.
    for send in [&two, &one] {
        send.revoke();
        assert!(send.work.wait().unwrap_err().is_timeout());
    }
    let small = engines[0].start_revocable(&tensor(&[2; 9]), 1, 1, later()).unwrap();
    let into = tensor(&[0; 9]);
    engines[1].recv(&into, Some(0), 1, later()).unwrap();
    // It is too late.
    small.work.wait().unwrap();
    small.revoke();
    small.work.wait().unwrap();
    assert_eq!(into.span().to_vec().unwrap(), [2; 9]);
}
