//! What every kind of way must do, written once; and what only one kind can meet.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tensorwire_device::flag::{LINE, Writer};
use tensorwire_device::host::Host;
use tensorwire_device::secret::{Id, Secret};
use tensorwire_device::ucx::{Body, Ucx, Worker};
use tensorwire_device::{Bell, Caching, Deadline, Device, Dtype, Flag, Queue, Region, Span};

use super::frame::{HEAD, Head, PIECE};
use super::meet::Domain;
use super::ring::{Consumer, HEADER, Producer, RingMemory};
use super::ucx::Engine;
use super::*;
use crate::config::{Config, LinkKind};

/// Bytes of a ring under test.
const RING: usize = 64 << 10;

/// Both ends of a way, and what keeps it alive.
struct Pair {
    outlet: Box<dyn Outlet>,
    inlet: Box<dyn Inlet>,
    queue: Box<dyn Queue>,
    _offices: Vec<Branch>,
}

fn span(bytes: &[u8]) -> Span {
    let span = Span::whole(Host.alloc(bytes.len().max(1)).unwrap());
    span.write(0, bytes).unwrap();
    span.slice(0..bytes.len()).unwrap()
}

fn ring_memory() -> [RingMemory; 2] {
    let region = Host.alloc(RING).unwrap();
    [0, 1].map(|_| RingMemory { region: region.clone(), at: 0, len: RING, bell: Bell::local() })
}

fn ring_at(start: u64) -> Pair {
    let [to, from] = ring_memory();
    let (mut outlet, mut inlet) = (Producer::open(to).unwrap(), Consumer::open(from).unwrap());
    outlet.start_at(start);
    inlet.start_at(start);
    let queue = Host.queue().unwrap();
    Pair { outlet: Box::new(outlet), inlet: Box::new(inlet), queue, _offices: Vec::new() }
}

fn ring() -> Pair {
    ring_at(0)
}

/// The shared counters have 32 bits.
fn ring_that_goes_around() -> Pair {
    ring_at((1 << 32) - 128)
}

fn domain(identity: u8, sealed: bool) -> Domain {
    Domain { id: Id([7; 16]), identity: Id([identity; 16]), secret: Secret::from_bytes([3; 32]), sealed }
}

fn office(identity: u8, sealed: bool) -> (Arc<Office>, Branch) {
    office_with(identity, sealed, LinkKind::Tcp)
}

fn office_with(identity: u8, sealed: bool, link: LinkKind) -> (Arc<Office>, Branch) {
    let office = Arc::new(Office::open(Id([identity; 16])).unwrap());
    let config = Config { link, ..Config::default() };
    let branch = Branch::open(&office, domain(identity, sealed), &Bell::local(), &config).unwrap();
    (office, branch)
}

/// An office with this engine, or without one.
fn office_of(identity: u8, engine: Option<Arc<Engine>>) -> (Arc<Office>, Branch) {
    let office = Arc::new(Office::open(Id([identity; 16])).unwrap());
    let engine = engine.ok_or_else(|| "the test has none".to_owned());
    let branch = Branch::with(&office, domain(identity, false), &Bell::local(), engine).unwrap();
    (office, branch)
}

/// libucp, where there is one.
fn library() -> Option<&'static Ucx> {
    ucx::library().inspect_err(|error| println!("skipped: {error}")).ok()
}

fn eventually<T>(what: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(60);
    std::iter::repeat_with(what)
        .take_while(|_| Instant::now() < end)
        .inspect(|_| std::thread::yield_now())
        .find_map(|found| found)
        .unwrap()
}

fn tcp() -> Pair {
    connected(false)
}

fn sealed_tcp() -> Pair {
    connected(true)
}

/// Nothing where there is no libucp.
fn by_ucx() -> Option<Pair> {
    library()?;
    Some(connected_by(office_with(1, false, LinkKind::Ucx), office_with(2, false, LinkKind::Ucx)))
}

fn connected(sealed: bool) -> Pair {
    connected_by(office(1, sealed), office(2, sealed))
}

fn connected_by((there, to): (Arc<Office>, Branch), (_, from): (Arc<Office>, Branch)) -> Pair {
    let dial = from.dial(Id([1; 16]), vec![([127, 0, 0, 1], there.port()).into()]).unwrap();
    let outlet = eventually(|| dial.take()).unwrap();
    let (who, inlet) = eventually(|| to.arrived().pop());
    assert_eq!(who, Id([2; 16]));
    Pair { outlet, inlet: inlet.unwrap(), queue: Host.queue().unwrap(), _offices: vec![to, from] }
}

fn header(number: u64, bytes: usize) -> Header {
    Header { tag: number ^ 5, bytes: bytes as u64, number, dtype: Dtype::U8, lent: 0 }
}

fn bytes(number: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251) as u8 ^ number as u8).collect()
}

/// Where a test wants a message: not all go to the same kind of place.
fn take(pair: &mut Pair, number: u64, got: &mut Vec<u8>, place: &Span, most: usize) -> usize {
    let had = got.len();
    let landing = match number % 2 {
        0 => Landing::Place(place.view().slice(had..had + most).unwrap(), Caching::Keep),
        _ => {
            got.reserve(most);
            Landing::Keep(got)
        }
    };
    let taken = pair.inlet.take(&mut *pair.queue, landing, most).unwrap();
    if number.is_multiple_of(2) {
        got.resize(had + taken, 0);
        place.read(had, &mut got[had..]).unwrap();
    }
    taken
}

/// Takes the next message whole, while the sender goes on with one of which `put` bytes are put.
fn receive(pair: &mut Pair, wanted: Header, rest: &Span, put: &mut usize) -> Vec<u8> {
    let Pair { outlet, inlet, queue, .. } = pair;
    let header = eventually(|| {
        let more = rest.view().slice(*put..rest.len()).unwrap();
        *put += outlet.put(&mut **queue, more, Caching::Keep).unwrap();
        outlet.settle().unwrap();
        inlet.begin().unwrap()
    });
    assert_eq!(header, wanted);
    let (mut got, place) = (Vec::new(), span(&vec![0; header.bytes as usize]));
    while pair.inlet.standing() != Standing::Whole {
        assert_eq!(pair.inlet.standing(), Standing::Open);
        let most = (header.bytes as usize - got.len()).min(300_000);
        take(pair, header.number, &mut got, &place, most);
        let more = rest.view().slice(*put..rest.len()).unwrap();
        *put += pair.outlet.put(&mut *pair.queue, more, Caching::Keep).unwrap();
        pair.outlet.settle().unwrap();
    }
    assert_eq!(got.len() as u64, header.bytes);
    pair.inlet.end();
    got
}

fn messages_of_all_sizes(mut pair: Pair) {
    let sizes = [
        0,
        1,
        31,
        32,
        33,
        96,
        1000,
        4095,
        4096,
        RING - 5 * LINE - HEADER,
        RING,
        3 * RING + 17,
        0,
        PIECE,
        3 * PIECE + 5,
        5,
    ];
    for (number, &size) in sizes.iter().enumerate() {
        let number = number as u64;
        let sent = bytes(number, size);
        assert!(pair.outlet.begin(header(number, size)).unwrap());
        let got = receive(&mut pair, header(number, size), &span(&sent), &mut 0);
        assert!(got == sent, "{size} bytes");
        assert_eq!(pair.inlet.begin().unwrap(), None);
    }
}

/// Small messages go until there is no room, and again when some were taken.
fn a_full_way(mut pair: Pair) {
    let payload = span(&[1; 40]);
    let (mut sent, mut received) = (0, 0);
    for _ in 0..2 {
        let mut withdrawn = false;
        'full: while pair.outlet.begin(header(sent, 40)).unwrap() {
            sent += 1;
            let mut put = 0;
            while put < 40 {
                let rest = payload.view().slice(put..40).unwrap();
                match pair.outlet.put(&mut *pair.queue, rest, Caching::Keep).unwrap() {
                    // The last one is on its way in part.
                    0 => {
                        withdrawn = pair.outlet.give_up().unwrap();
                        assert!(withdrawn);
                        sent -= 1;
                        break 'full;
                    }
                    more => put += more,
                }
            }
        }
        while received < sent {
            let _ = pair.outlet.settle();
            let Some(header) = eventually(|| pair.inlet.begin().unwrap().map(Some)) else { break };
            let mut got = 0;
            while pair.inlet.standing() == Standing::Open {
                got += pair.inlet.take(&mut *pair.queue, Landing::Drop, 40 - got).unwrap();
                pair.outlet.settle().unwrap();
            }
            assert_eq!((pair.inlet.standing(), got as u64), (Standing::Whole, header.bytes));
            pair.inlet.end();
            received += 1;
        }
        // What was given up, if anything was. It may come a moment after it has gone.
        while !pair.outlet.settle().unwrap() {}
        let header = match withdrawn {
            true => Some(eventually(|| pair.inlet.begin().unwrap())),
            false => pair.inlet.begin().unwrap(),
        };
        if let Some(header) = header {
            let mut got = 0;
            while pair.inlet.standing() == Standing::Open {
                got += pair.inlet.take(&mut *pair.queue, Landing::Drop, header.bytes as usize - got).unwrap();
            }
            assert_eq!(pair.inlet.standing(), Standing::GivenUp);
            pair.inlet.end();
            received += 1;
            sent += 1;
        }
    }
    assert!(sent > 500);
}

/// A message that is given up after any part of it was never sent, and the next one comes.
fn given_up_anywhere(mut pair: Pair) {
    let size = 3 * PIECE + 77;
    let payload = span(&bytes(0, size));
    let mut number = 0;
    for parts in [0, 1, 2, 3] {
        for taken in [0, 1, 1000, usize::MAX] {
            // Given up, perhaps before a byte has gone.
            assert!(pair.outlet.begin(header(number, size)).unwrap());
            let mut put = 0;
            for _ in 0..parts {
                let rest = payload.view().slice(put..size.min(put + 200_000)).unwrap();
                put += pair.outlet.put(&mut *pair.queue, rest, Caching::Keep).unwrap();
            }
            let (mut begun, mut got) = (None, 0);
            if taken > 0 {
                begun = pair.inlet.begin().unwrap();
                if begun.is_some() {
                    let most = taken.min(size);
                    got += pair.inlet.take(&mut *pair.queue, Landing::Drop, most).unwrap();
                }
            }
            pair.outlet.give_up().unwrap();
            if begun.is_none() {
                let header = eventually(|| {
                    pair.outlet.settle().unwrap();
                    pair.inlet.begin().unwrap()
                });
                assert_eq!(header.number, number);
            }
            eventually(|| {
                pair.outlet.settle().unwrap();
                got += pair.inlet.take(&mut *pair.queue, Landing::Drop, size - got).unwrap();
                (pair.inlet.standing() == Standing::GivenUp).then_some(())
            });
            pair.inlet.end();
            number += 1;
            // The next one is whole.
            let sent = bytes(number, 100_000);
            assert!(eventually(|| pair.outlet.begin(header(number, sent.len())).unwrap().then_some(true)));
            let got = receive(&mut pair, header(number, sent.len()), &span(&sent), &mut 0);
            assert!(got == sent);
            number += 1;
        }
    }
}

/// The receiver has taken all that was put, and has just said so, when the message is given up. It learns of that all the same,
/// also if the next message is there by then.
#[test]
fn given_up_where_the_receiver_is() {
    // With its header a whole number of lines.
    let (mut pair, put) = (ring(), (16 << 10) - HEADER);
    let payload = span(&bytes(0, put));
    assert!(pair.outlet.begin(header(0, 1 << 20)).unwrap());
    assert_eq!(pair.outlet.put(&mut *pair.queue, payload.view(), Caching::Keep).unwrap(), put);
    assert!(pair.inlet.begin().unwrap().is_some());
    // It says how far it is after a quarter of the ring: that is in the second part.
    let mut got = 0;
    for most in [put - 352, 352] {
        got += pair.inlet.take(&mut *pair.queue, Landing::Drop, most).unwrap();
    }
    assert_eq!(got, put);
    pair.outlet.give_up().unwrap();
    // The sender looks how far the receiver is: otherwise it would have no room.
    let sent = bytes(1, 60_000);
    assert!(pair.outlet.begin(header(1, sent.len())).unwrap());
    assert_eq!(pair.outlet.put(&mut *pair.queue, span(&sent).view(), Caching::Keep).unwrap(), sent.len());
    assert!(pair.outlet.begin(header(2, 0)).unwrap());
    pair.outlet.put(&mut *pair.queue, span(&[]).view(), Caching::Keep).unwrap();
    assert_eq!(pair.inlet.take(&mut *pair.queue, Landing::Drop, 1 << 19).unwrap(), 0);
    assert_eq!(pair.inlet.standing(), Standing::GivenUp);
    pair.inlet.end();
    assert_eq!(pair.inlet.begin().unwrap().unwrap().number, 1);
    let mut bytes = Vec::new();
    pair.inlet.take(&mut *pair.queue, Landing::Keep(&mut bytes), sent.len()).unwrap();
    assert!(bytes == sent);
    pair.inlet.end();
    assert_eq!(pair.inlet.begin().unwrap().unwrap().number, 2);
}

/// Several are given up before the receiver looks.
fn given_up_again_and_again(mut pair: Pair) {
    let payload = span(&bytes(0, 100));
    let mut begun = 0;
    for _ in 0..5 {
        if pair.outlet.begin(header(begun, 100)).unwrap() {
            begun += 1;
            let rest = payload.view().slice(0..50).unwrap();
            pair.outlet.put(&mut *pair.queue, rest, Caching::Keep).unwrap();
            pair.outlet.give_up().unwrap();
        }
    }
    assert!(begun > 0);
    for number in 0..begun {
        let header = eventually(|| {
            pair.outlet.settle().unwrap();
            pair.inlet.begin().unwrap()
        });
        assert_eq!(header.number, number);
        let mut got = 0;
        eventually(|| {
            pair.outlet.settle().unwrap();
            got += pair.inlet.take(&mut *pair.queue, Landing::Drop, 100 - got).unwrap();
            (pair.inlet.standing() == Standing::GivenUp).then_some(())
        });
        pair.inlet.end();
    }
    assert!(eventually(|| pair.outlet.begin(header(begun, 100)).unwrap().then_some(true)));
    let got = receive(&mut pair, header(begun, 100), &payload, &mut 0);
    assert!(got == bytes(0, 100));
}

/// Messages without bytes, until there is no room. The last one is given up, or it has gone.
fn given_up_without_bytes(mut pair: Pair) {
    let nothing = span(&[]);
    let mut sent = 0;
    let withdrawn = loop {
        if !pair.outlet.begin(header(sent, 0)).unwrap() {
            // Nothing of it has gone.
            break None;
        }
        assert_eq!(pair.outlet.put(&mut *pair.queue, nothing.view(), Caching::Keep).unwrap(), 0);
        if !pair.outlet.settle().unwrap() {
            break Some(pair.outlet.give_up().unwrap());
        }
        sent += 1;
    };
    let begun = sent + u64::from(withdrawn.is_some());
    for number in 0..begun {
        let header = eventually(|| {
            pair.outlet.settle().unwrap();
            pair.inlet.begin().unwrap()
        });
        assert_eq!((header.number, header.bytes), (number, 0));
        let standing = eventually(|| {
            pair.outlet.settle().unwrap();
            pair.inlet.take(&mut *pair.queue, Landing::Drop, 0).unwrap();
            Some(pair.inlet.standing()).filter(|standing| *standing != Standing::Open)
        });
        let last = number == sent && withdrawn == Some(true);
        assert_eq!(standing, if last { Standing::GivenUp } else { Standing::Whole });
        pair.inlet.end();
    }
    assert!(eventually(|| pair.outlet.begin(header(begun, 3)).unwrap().then_some(true)));
    let got = receive(&mut pair, header(begun, 3), &span(&[1, 2, 3]), &mut 0);
    assert_eq!(got, [1, 2, 3]);
}

macro_rules! conformance {
    ($($kind:ident),* : $cases:tt) => { $(conformance!(@ $kind $cases);)* };
    (@ $kind:ident { $($case:ident),* $(,)? }) => {
        mod $kind {
            $(#[test] fn $case() {
                if let Some(pair) = Option::from(super::$kind()) {
                    super::$case(pair);
                }
            })*
        }
    };
}

conformance!(ring, ring_that_goes_around, tcp, sealed_tcp, by_ucx: {
    messages_of_all_sizes,
    a_full_way,
    given_up_anywhere,
    given_up_again_and_again,
    given_up_without_bytes,
});

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(24) })]

    /// Messages of any sizes, some of them given up after any part, come in their order and whole.
    #[test]
    fn any_messages(
        kind in 0..4usize,
        messages in proptest::collection::vec((0..400_000usize, any::<Option<u16>>(), 1..200_000usize), 1..30),
    ) {
        let pair = [|| Some(ring()), || Some(tcp()), || Some(sealed_tcp()), by_ucx][kind]();
        let Some(mut pair) = pair else { return Ok(()) };
        let payloads: Vec<Vec<u8>> =
            messages.iter().enumerate().map(|(number, (len, ..))| bytes(number as u64, *len)).collect();
        let spans: Vec<Span> = payloads.iter().map(|bytes| span(bytes)).collect();
        let (mut sending, mut begun, mut put) = (0, false, 0);
        let mut got: Vec<(u64, Vec<u8>)> = Vec::new();
        let mut coming: Option<(Header, Vec<u8>, Span)> = None;
        let end = Instant::now() + Duration::from_secs(60);
        let whole = |number: usize| messages[number].1.is_none() || messages[number].0 == 0;
        let wanted: Vec<u64> = (0..messages.len()).filter(|&n| whole(n)).map(|n| n as u64).collect();
        while got.len() < wanted.len() || sending < messages.len() {
            prop_assert!(Instant::now() < end);
            if let Some((len, given_up, step)) = messages.get(sending) {
                if !begun {
                    begun = pair.outlet.begin(header(sending as u64, *len)).unwrap();
                }
                if begun {
                    // One that will be given up never goes whole.
                    let most = if whole(sending) { *len } else { *len - 1 };
                    let rest = spans[sending].view().slice(put..(put + step).min(most)).unwrap();
                    put += pair.outlet.put(&mut *pair.queue, rest, Caching::Keep).unwrap();
                    let enough = given_up.is_some_and(|after| put >= usize::from(after).min(*len / 2));
                    if !whole(sending) && enough && put < *len {
                        pair.outlet.give_up().unwrap();
                        (sending, begun, put) = (sending + 1, false, 0);
                    } else if put == *len && pair.outlet.settle().unwrap() {
                        (sending, begun, put) = (sending + 1, false, 0);
                    }
                }
            } else {
                pair.outlet.settle().unwrap();
            }
            if coming.is_none() {
                coming = pair.inlet.begin().unwrap().map(|header| (header, Vec::new(), span(&vec![0; header.bytes as usize])));
            }
            if let Some((header, bytes, place)) = &mut coming {
                let most = header.bytes as usize - bytes.len();
                take(&mut pair, header.number, bytes, place, most);
                let standing = pair.inlet.standing();
                if standing != Standing::Open {
                    pair.inlet.end();
                    if standing == Standing::Whole {
                        prop_assert_eq!(bytes.len() as u64, header.bytes);
                        got.push((header.number, std::mem::take(bytes)));
                    }
                    coming = None;
                }
            }
        }
        prop_assert_eq!(got.iter().map(|(number, _)| *number).collect::<Vec<_>>(), wanted);
        prop_assert!(got.iter().all(|(number, bytes)| *bytes == payloads[*number as usize]));
    }

    #[test]
    fn no_bytes_panic(data in proptest::collection::vec(any::<u8>(), 0..100)) {
        frame::fuzz(&data);
    }
}

fn is_nonsense<T>(result: Linked<T>) -> bool {
    matches!(result, Err(Fault::Nonsense))
}

/// What a bad peer may write into shared memory is an error, and never an access outside of the ring.
#[test]
fn nonsense_in_a_ring() {
    let flag = |region: &Arc<dyn Region>, line: usize| {
        Flag::new(&Span::new(region.clone(), line * LINE..(line + 1) * LINE).unwrap(), Writer::Host).unwrap()
    };
    let mut queue = Host.queue().unwrap();
    for value in [1 << 20, u32::MAX, 1 << 31] {
        let [to, from] = ring_memory();
        let region = to.region.clone();
        let mut inlet = Consumer::open(from).unwrap();
        flag(&region, 0).store(value);
        assert!(is_nonsense(inlet.begin()), "head {value}");
        let mut outlet = Producer::open(to).unwrap();
        flag(&region, 1).store(value);
        assert!(outlet.begin(header(0, 1 << 20)).unwrap());
        let payload = span(&[0; 1 << 20]);
        assert!(is_nonsense(outlet.put(&mut *queue, payload.view(), Caching::Keep)), "tail {value}");
        // A cut that lies outside of what was put.
        let [to, from] = ring_memory();
        let region = to.region.clone();
        let (mut outlet, mut inlet) = (Producer::open(to).unwrap(), Consumer::open(from).unwrap());
        assert!(outlet.begin(header(0, 1000)).unwrap());
        outlet.put(&mut *queue, span(&[0; 500]).view(), Caching::Keep).unwrap();
        assert!(inlet.begin().unwrap().is_some());
        flag(&region, 3).store(value);
        flag(&region, 2).store(1);
        assert!(is_nonsense(inlet.take(&mut *queue, Landing::Drop, 1000)), "cut {value}");
    }
    // Headers: another number, an unknown type, a part of an element, more than any memory.
    for words in [[0, 8, 1, 5], [0, 8, 0, 99], [0, 7, 0, 11], [0, u64::MAX, 0, 5]] {
        let [to, from] = ring_memory();
        let mut inlet = Consumer::open(from).unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
        to.region.write(5 * LINE, &bytes).unwrap();
        flag(&to.region, 0).store(64);
        assert!(is_nonsense(inlet.begin()), "{words:?}");
    }
}

/// A connection that a test writes to as a peer that has proved its secret.
fn wild(sealed: bool) -> (TcpStream, Box<dyn Inlet>, Vec<Branch>) {
    let ((there, to), (_, from)) = (office(1, sealed), office(2, sealed));
    let address = ([127, 0, 0, 1], there.port()).into();
    let deadline = Deadline::after(Duration::from_secs(60));
    let line = meet::reach(&domain(2, sealed), &address, Id([1; 16]), deadline).unwrap();
    let line = meet::await_in(line, deadline).unwrap().0;
    let socket: TcpStream = line.as_fd().try_clone_to_owned().unwrap().into();
    socket.set_nonblocking(false).unwrap();
    let inlet = eventually(|| to.arrived().pop()).1.unwrap();
    (socket, inlet, vec![to, from])
}

fn fault<T>(mut what: impl FnMut() -> Linked<T>) -> Fault {
    eventually(|| what().err())
}

/// Blocks that nobody has sealed.
#[test]
fn nonsense_over_a_sealed_connection() {
    let short: &[u8] = &[15, 0];
    for bytes in [short, &[0, 0, 1, 2], &[0xff; 70_000], &[20; 100], &Head::Goodbye.to_bytes()] {
        let (mut socket, mut inlet, _offices) = wild(true);
        socket.write_all(bytes).unwrap();
        socket.shutdown(Shutdown::Write).unwrap();
        let fault = fault(|| inlet.begin());
        assert!(matches!(fault, Fault::Unsealed | Fault::Lost(_)), "{fault:?}");
    }
}

/// A process that agreed to seal does not talk with one that did not.
#[test]
fn one_side_seals() {
    for (ours, theirs) in [(true, false), (false, true)] {
        let (there, _to) = office(1, theirs);
        let address = ([127, 0, 0, 1], there.port()).into();
        let deadline = Deadline::after(Duration::from_secs(1));
        let met = meet::reach(&domain(2, ours), &address, Id([1; 16]), deadline);
        assert!(met.and_then(|line| meet::await_in(line, deadline)).is_err());
    }
}

/// What a bad peer may send is an error, and the rest of the process goes on.
#[test]
fn nonsense_over_a_connection() {
    let right = Head::Message(header(0, 8)).to_bytes();
    let mut wrong: Vec<Vec<u8>> = (0..HEAD)
        .map(|at| {
            let mut head = right;
            head[at] ^= 0x10;
            head.to_vec()
        })
        .collect();
    wrong.push(Head::Message(header(1, 8)).to_bytes().to_vec());
    wrong.push(vec![0xff; 4096]);
    wrong.push(b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n".to_vec());
    for bytes in wrong {
        let (mut socket, mut inlet, _offices) = wild(false);
        socket.write_all(&bytes).unwrap();
        assert!(matches!(fault(|| inlet.begin()), Fault::Nonsense), "{bytes:?}");
    }
    for piece in [9_u32, u32::MAX, 1 << 31] {
        let (mut socket, mut inlet, _offices) = wild(false);
        let head = [&right[..], &piece.to_le_bytes(), &(!piece).to_le_bytes()].concat();
        socket.write_all(&head).unwrap();
        eventually(|| inlet.begin().unwrap());
        let mut queue = Host.queue().unwrap();
        assert!(matches!(fault(|| inlet.take(&mut *queue, Landing::Drop, 8)), Fault::Nonsense), "{piece}");
    }
}

/// An end in the middle of a message is none, and one behind a farewell is.
#[test]
fn ends_of_a_connection() {
    let whole = frame::piece(frame::WHOLE);
    let right = [&Head::Message(header(0, 8)).to_bytes()[..], &frame::piece(8), &[1; 8], &whole].concat();
    for len in 0..=right.len() {
        let (mut socket, mut inlet, _offices) = wild(false);
        socket.write_all(&right[..len]).unwrap();
        drop(socket);
        let mut queue = Host.queue().unwrap();
        let lost = if len < HEAD {
            fault(|| inlet.begin())
        } else {
            eventually(|| inlet.begin().unwrap());
            let mut rest = 8;
            eventually(|| match inlet.take(&mut *queue, Landing::Drop, rest) {
                Err(fault) => Some(fault),
                Ok(got) => {
                    rest -= got;
                    (inlet.standing() == Standing::Whole).then(|| {
                        inlet.end();
                        fault(|| inlet.begin())
                    })
                }
            })
        };
        assert!(matches!(lost, Fault::Lost(_)), "{len}: {lost:?}");
    }
    let Pair { mut outlet, mut inlet, .. } = tcp();
    outlet.close();
    drop(outlet);
    eventually(|| {
        assert_eq!(inlet.begin().unwrap(), None);
        (inlet.standing() == Standing::Closed).then_some(())
    });
}

/// Strangers that are silent, talk nonsense or do not know the secret come to nothing, and keep nobody from connecting.
#[test]
fn strangers_at_the_office() {
    let ((there, to), (_, from)) = (office(1, false), office(2, false));
    let address: std::net::SocketAddr = ([127, 0, 0, 1], there.port()).into();
    let nonsense: [&[u8]; 5] = [b"", &[0, 0], &[0xff; 100], b"GET / HTTP/1.1\r\n\r\n", &[6, 0, b't', b'w']];
    let strangers: Vec<TcpStream> = (0..20)
        .map(|at| {
            let mut stranger = TcpStream::connect(address).unwrap();
            stranger.write_all(nonsense[at % nonsense.len()]).unwrap();
            stranger
        })
        .collect();
    let soon = || Deadline::after(Duration::from_secs(60));
    let other = Domain { secret: Secret::from_bytes([4; 32]), ..domain(2, false) };
    let error = meet::reach(&other, &address, Id([1; 16]), soon()).unwrap_err();
    assert!(error.to_string().contains("does not know the group's secret"), "{error}");
    let error = meet::reach(&Domain { id: Id([8; 16]), ..domain(2, false) }, &address, Id([1; 16]), soon())
        .unwrap_err();
    assert!(error.to_string().contains("closed the connection"), "{error}");
    let error = meet::reach(&domain(2, false), &address, Id([9; 16]), soon()).unwrap_err();
    assert!(error.to_string().contains("is another process"), "{error}");
    let dial = from.dial(Id([1; 16]), vec![address]).unwrap();
    eventually(|| dial.take()).unwrap();
    eventually(|| to.arrived().pop()).1.unwrap();
    drop(strangers);
    // Nobody is let in any more.
    to.close();
    let error = meet::reach(&domain(2, false), &address, Id([1; 16]), soon()).unwrap_err();
    assert!(error.to_string().contains("closed the connection"), "{error}");
}

/// One message of a megabyte and a half, from one office to the other: its bytes, or why they do not come.
fn carried(from: &Branch, to: &Branch, port: u16) -> std::result::Result<Vec<u8>, String> {
    let payload = span(&bytes(0, 3 << 19));
    let dial = from.dial(Id([1; 16]), vec![([127, 0, 0, 1], port).into()]).unwrap();
    let mut outlet = eventually(|| dial.take())?;
    let mut inlet = eventually(|| to.arrived().pop()).1.map_err(|error| error.to_string())?;
    let words = |fault: Fault| format!("{fault:?}");
    let (mut queue, mut begun, mut put, mut header_of, mut got) =
        (Host.queue().unwrap(), false, 0, None, Vec::new());
    let end = Instant::now() + Duration::from_secs(60);
    while inlet.standing() == Standing::Open {
        if Instant::now() >= end {
            return Err("nothing comes".into());
        }
        if !begun {
            begun = outlet.begin(header(0, payload.len())).map_err(words)?;
        } else {
            let rest = payload.view().slice(put..payload.len()).unwrap();
            put += outlet.put(&mut *queue, rest, Caching::Keep).map_err(words)?;
            outlet.settle().map_err(words)?;
        }
        match header_of {
            None => header_of = inlet.begin().map_err(words)?,
            Some(_) => {
                let most = payload.len() - got.len();
                got.reserve(most);
                inlet.take(&mut *queue, Landing::Keep(&mut got), most).map_err(words)?;
            }
        }
    }
    Ok(got)
}

/// Where one side has no UCX, the error says who wanted it.
#[test]
fn one_side_has_ucx() {
    let Some(library) = library() else { return };
    let engine = || Some(Arc::new(Engine::start_with(library).unwrap()));
    for (ours, theirs, by) in [
        (engine(), engine(), Ok("UCX ")),
        (None, None, Ok("TCP to ")),
        (engine(), None, Err("it takes no messages by UCX, and TENSORWIRE_LINK=ucx is set here")),
        (None, engine(), Err("it sends by TCP, and TENSORWIRE_LINK=ucx is set here")),
    ] {
        let ((there, to), (_here, from)) = (office_of(1, theirs), office_of(2, ours));
        let carried = carried(&from, &to, there.port());
        match by {
            Ok(by) => {
                assert!(carried.unwrap() == bytes(0, 3 << 19));
                let way = from.way_to(Id([1; 16])).unwrap();
                assert!(way.starts_with(by), "{way}");
            }
            Err(why) => {
                let error = carried.unwrap_err();
                assert!(error.contains(why), "{error}");
            }
        }
    }
}

/// Each function of libucp fails, at the sender or at the receiver: the right bytes, or an error.
#[test]
fn ucx_fails_at_each_call() {
    let Some(library) = library() else { return };
    // Without progress nothing is seen. Who waits has a deadline.
    for call in Ucx::calls().iter().filter(|call| **call != "ucp_worker_progress") {
        for at_sender in [true, false] {
            let good = Arc::new(Engine::start_with(library).unwrap());
            let engine = match Engine::start_with(library.failing(call)) {
                Ok(engine) => Arc::new(engine),
                Err(error) => {
                    assert!(error.to_string().starts_with(call), "{call}: {error}");
                    continue;
                }
            };
            let (ours, theirs) = if at_sender { (engine, good) } else { (good, engine) };
            let ((there, to), (_here, from)) = (office_of(1, Some(theirs)), office_of(2, Some(ours)));
            match carried(&from, &to, there.port()) {
                Ok(got) => assert!(got == bytes(0, 3 << 19), "{call}"),
                Err(why) => assert!(
                    ["Lost", "UCX has failed", "takes no messages by UCX"]
                        .iter()
                        .any(|word| why.contains(word)),
                    "{call} {at_sender}: {why}"
                ),
            }
        }
    }
}

/// What strangers send to the worker is dropped, and what is sent twice, and messages go on.
#[test]
fn chunks_of_strangers() {
    let Some(library) = library() else { return };
    let Some(mut pair) = by_ucx() else { return };
    let address = ucx::tests::address_of(&pair._offices[0]);
    let mut stranger = Worker::new(library, 1 << 20).unwrap();
    let way = stranger.connect(&address).unwrap();
    let heads = ucx::tests::heads_for(&pair._offices[0]);
    assert!(!heads.is_empty());
    for (number, head) in heads.iter().enumerate() {
        for len in [0, 1, 5000, 2 << 20] {
            stranger.send(way, head, Body::Bytes(vec![7; len]), number as u64).unwrap();
        }
    }
    let all_go = |stranger: &mut Worker| {
        let end = Instant::now() + Duration::from_secs(60);
        while stranger.under_way() > 0 {
            assert!(Instant::now() < end);
            stranger.progress();
            stranger.events();
        }
    };
    all_go(&mut stranger);
    messages_go(&mut pair, 0);
    // Somebody has listened, and says again what was said.
    for head in ucx::tests::right_heads_for(&pair._offices[0]) {
        stranger.send(way, &head, Body::Bytes(vec![7; 5000]), 0).unwrap();
        stranger.send(way, &head, Body::Bytes(vec![7; 1 << 20]), 0).unwrap();
    }
    all_go(&mut stranger);
    messages_go(&mut pair, 2);
}

fn messages_go(pair: &mut Pair, from: u64) {
    for (number, size) in (from..).zip([5, PIECE + 7]) {
        let sent = bytes(number, size);
        assert!(pair.outlet.begin(header(number, size)).unwrap());
        assert!(receive(pair, header(number, size), &span(&sent), &mut 0) == sent);
    }
}

/// What was sent before the end comes, although the connection ends at once.
#[test]
fn the_end_does_not_overtake_what_was_sent() {
    let Some(Pair { mut outlet, mut inlet, mut queue, _offices }) = by_ucx() else { return };
    let payload = span(&bytes(0, 3 << 20));
    assert!(outlet.begin(header(0, payload.len())).unwrap());
    let mut put = 0;
    let end = Instant::now() + Duration::from_secs(60);
    while put < payload.len() {
        assert!(Instant::now() < end);
        put += outlet
            .put(&mut *queue, payload.view().slice(put..payload.len()).unwrap(), Caching::Keep)
            .unwrap();
    }
    outlet.close();
    drop(outlet);
    eventually(|| inlet.begin().unwrap());
    let mut got = Vec::with_capacity(payload.len());
    eventually(|| {
        let most = payload.len() - got.len();
        inlet.take(&mut *queue, Landing::Keep(&mut got), most).unwrap();
        (inlet.standing() == Standing::Whole).then_some(())
    });
    assert!(got == bytes(0, payload.len()));
    inlet.end();
    eventually(|| {
        assert_eq!(inlet.begin().unwrap(), None);
        (inlet.standing() == Standing::Closed).then_some(())
    });
}
