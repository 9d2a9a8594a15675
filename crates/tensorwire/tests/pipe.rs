//! Pipes: messages of tensors between two processes, as threads and as processes, on one host and on two.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod messages;
mod ranks;

use std::sync::Arc;
use std::time::Duration;

use messages::fill;
use ranks::random::Random;
use ranks::{LONG, are_threads, spans_hosts};
use tensorwire::pipe::{Channel, Incoming, Listener, Message, Pipe};
use tensorwire::{Context, Deadline, Dtype, Error, Group, PeerFaultKind, Span, Tensor};

fn by() -> Deadline {
    Deadline::after(LONG)
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_millis(200))
}

/// A pipe between the two ranks of a group: rank 0 listens.
fn pipe(group: &Group) -> Pipe {
    pipe_with(group, [&Channel::ALL, &Channel::ALL])
}

/// The channels that the bodies below are run with, and the first that a large tensor takes of them: all, and some.
const SETS: [(&[Channel], Channel); 4] = [
    (&Channel::ALL, Channel::Share),
    (&[Channel::Basic, Channel::Ring], Channel::Ring),
    (&[Channel::Share, Channel::Ring], Channel::Share),
    (&[Channel::Wire], Channel::Wire),
];
const ALL: usize = 0;
const RING: usize = 1;
const SHARE: usize = 2;
const WIRE: usize = 3;

/// The same, with the channels of a set.
fn pipe_of<const SET: usize>(group: &Group) -> Pipe {
    let pipe = pipe_with(group, [SETS[SET].0; 2]);
    let line = format!("sent, host to host: {}", for_large::<SET>(group));
    assert!(pipe.explain().contains(&line), "{}", pipe.explain());
    pipe
}

/// By which channel a large tensor goes that can be shared.
fn for_large<const SET: usize>(group: &Group) -> Channel {
    match spans_hosts(group) {
        true => Channel::Wire,
        false if SET == ALL && are_threads() => Channel::Xth,
        false => SETS[SET].1,
    }
}

/// Whether a large tensor that can be shared is lent.
fn lends<const SET: usize>(group: &Group) -> bool {
    [Channel::Share, Channel::Xth].contains(&for_large::<SET>(group))
}

/// Makes the tests of a body: on all placements with all channels, and with each set.
macro_rules! on_channels {
    ($name:ident, $by:ident, $body:ident) => {
        on_hosts!($name, 2, $body::<ALL>);

        mod $by {
            use super::*;

            #[test]
            fn by_ring() {
                ranks::as_threads(2, $body::<RING>);
            }

            #[test]
            fn by_ring_in_processes() {
                let test = concat!(stringify!($by), "::by_ring_in_processes");
                ranks::as_processes(test, 2, $body::<RING>);
            }

            #[test]
            fn by_share() {
                ranks::as_threads(2, $body::<SHARE>);
            }

            #[test]
            fn by_wire() {
                ranks::as_threads_on(ranks::Placement::Apart, 2, $body::<WIRE>);
            }
        }
    };
}

/// The same, with these channels of each rank.
fn pipe_with(group: &Group, channels: [&[Channel]; 2]) -> Pipe {
    let context = group.context();
    if group.rank() == 1 {
        let address = String::from_utf8(group.store().pop_by("address", by()).unwrap()).unwrap();
        return Pipe::connect_with(context, &address, channels[1], by()).unwrap();
    }
    let listener = match context.config().key.is_some() {
        true => Listener::at_with(context, "tcp://127.0.0.1:0", channels[0]),
        false => Listener::at_with(context, "tcp://127.0.0.1:0/open", channels[0]),
    };
    let listener = listener.unwrap();
    group.store().push("address", listener.address().as_bytes()).unwrap();
    listener.accept(by()).unwrap()
}

/// Memory of the host that can be shared.
fn shareable(context: &Context, bytes: &[u8]) -> Span {
    let span = Span::whole(context.host().alloc(bytes.len()).unwrap()).slice(0..bytes.len()).unwrap();
    span.write(0, bytes).unwrap();
    span
}

fn private(bytes: &[u8]) -> Span {
    Tensor::private(bytes).unwrap().span().clone()
}

/// The bytes of its elements, in their order.
fn elements(tensor: &Tensor) -> Vec<u8> {
    let (layout, mut bytes) = (tensor.layout(), tensor.span().to_vec().unwrap());
    if layout.is_contiguous() {
        bytes.truncate(tensor.byte_len());
        return bytes;
    }
    let mut all = Vec::new();
    for index in 0..tensor.len() {
        let (mut rest, mut at) = (index, layout.origin() as isize);
        for (size, stride) in layout.shape().iter().zip(layout.strides()).rev() {
            at += (rest % size) as isize * stride * layout.item() as isize;
            rest /= size;
        }
        all.extend_from_slice(&bytes[at as usize..][..layout.item()]);
    }
    all
}

/// Whether a message is the other one: metadata, payloads and the elements of its tensors.
fn assert_alike(got: &Message, wanted: &Message) {
    assert_eq!(got.metadata(), wanted.metadata());
    assert_eq!(got.payloads().len(), wanted.payloads().len());
    for (got, wanted) in got.payloads().iter().zip(wanted.payloads()) {
        assert!(elements(got) == elements(wanted));
    }
    assert_eq!(got.tensors().len(), wanted.tensors().len());
    for (index, (got, wanted)) in got.tensors().iter().zip(wanted.tensors()).enumerate() {
        assert_eq!((got.dtype(), got.layout().shape()), (wanted.dtype(), wanted.layout().shape()));
        assert!(elements(got) == elements(wanted), "tensor {index}, {:?}", wanted.layout());
    }
}

/// A message that only its number decides, so that both ranks can make it.
fn random_message(context: &Context, number: u64) -> Message {
    let mut random = Random(number);
    let metadata = fill([0, 5, 300, 600, 20_000][random.below(5)], number);
    let mut message = Message::new().with_metadata(metadata);
    for index in 0..random.below(3) {
        let len = [0, 1, 100, 5_000, 200_000][random.below(5)];
        message = message.with_payload(&fill(len, number << 8 | index as u64)).unwrap();
    }
    let mut tensors: Vec<Tensor> = Vec::new();
    for index in 0..random.below(5) {
        let tensor = match tensors.len().min(random.below(4)) {
            // A part of one that is there already: the two share memory.
            1.. => {
                let old = &tensors[random.below(tensors.len())];
                let start = random.below(old.len() + 1);
                match old.layout().is_contiguous() {
                    true => old.part(start, random.below(old.len() - start + 1)).unwrap(),
                    false => old.clone(),
                }
            }
            0 => random_tensor(context, &mut random, number << 8 | index as u64),
        };
        message = message.with_tensor(&tensor);
        tensors.push(tensor);
    }
    message
}

fn random_tensor(context: &Context, random: &mut Random, key: u64) -> Tensor {
    let dtype = [Dtype::U8, Dtype::F32, Dtype::I64, Dtype::Bf16][random.below(4)];
    let rows = [1, 2, 7, 100, 1000][random.below(5)];
    let columns = [1, 3, 16, 700][random.below(4)];
    let len = rows * columns * dtype.size();
    let memory = |bytes: &[u8]| match bytes.len() % 2 {
        0 => shareable(context, bytes),
        _ => private(bytes),
    };
    let count = rows * columns;
    match random.below(4) {
        0 => Tensor::contiguous(memory(&fill(len, key)), dtype, &[rows, columns]),
        1 => Tensor::strided(memory(&fill(len, key)), dtype, &[columns, rows], &[1, columns as isize]),
        // With gaps.
        2 => Tensor::strided(private(&fill(2 * len, key)), dtype, &[count], &[2]),
        // One element many times.
        _ => Tensor::strided(private(&fill(len, key)), dtype, &[3, columns], &[0, 1]),
    }
    .unwrap()
}

/// Messages of every kind, there and back.
fn of_all_kinds<const SET: usize>(group: &Group) {
    let (pipe, context) = (pipe_of::<SET>(group), group.context().clone());
    let large = fill(3 << 20, 1);
    let (shared, own) = (shareable(&context, &large), private(&large));
    let matrix = |span: &Span| Tensor::contiguous(span.clone(), Dtype::F32, &[768, 1024]).unwrap();
    let flat = Tensor::flat(shared.clone(), Dtype::F32).unwrap();
    let all = [
        Message::new(),
        Message::new().with_metadata(b"a"),
        Message::new().with_metadata(fill(100_000, 2)),
        Message::new().with_payload(b"").unwrap().with_payload(b"two").unwrap().with_payload(&large).unwrap(),
        Message::new().with_tensor(&Tensor::private(&[1_u8, 2, 3]).unwrap()),
        Message::new().with_tensor(&Tensor::contiguous(private(&[7; 4]), Dtype::F32, &[]).unwrap()),
        Message::new().with_tensor(&Tensor::contiguous(private(&[]), Dtype::I64, &[3, 0, 2]).unwrap()),
        Message::new().with_tensor(&matrix(&shared)).with_tensor(&matrix(&own)),
        // Columns, every second element, one element many times, and parts of one memory.
        Message::new()
            .with_tensor(&Tensor::strided(own.clone(), Dtype::F32, &[1024, 768], &[1, 1024]).unwrap())
            .with_tensor(&Tensor::strided(own.clone(), Dtype::F32, &[1000], &[2]).unwrap())
            .with_tensor(&Tensor::strided(own, Dtype::F32, &[5, 2], &[0, 1]).unwrap())
            .with_tensor(&flat.part(10, 500_000).unwrap())
            .with_tensor(&flat.part(0, 20).unwrap())
            .with_tensor(&flat.part(300_000, 400_000).unwrap()),
        (0..300).fold(Message::new(), |message, index| {
            message.with_tensor(&Tensor::private(&[index; 40]).unwrap())
        }),
    ];
    for message in &all {
        let arrived = if group.rank() == 0 {
            pipe.send(message).wait().unwrap();
            pipe.recv().wait().unwrap().unwrap()
        } else {
            let arrived = pipe.recv().wait().unwrap().unwrap();
            pipe.send(&arrived).wait().unwrap();
            arrived
        };
        assert_alike(&arrived, message);
    }
    pipe.check().unwrap();
    group.barrier().wait().unwrap();
}

on_channels!(all_kinds, all_kinds_by_channel, of_all_kinds);

/// Tensors of one memory are of one memory at the reader, too: they were sent once.
fn sent_once<const SET: usize>(group: &Group) {
    let pipe = pipe_of::<SET>(group);
    if group.rank() == 0 {
        let all = Tensor::flat(shareable(group.context(), &fill(2 << 20, 1)), Dtype::U8).unwrap();
        let other = Tensor::private(&[5_u8; 100]).unwrap();
        let (front, back) = (all.part(0, 1_500_000).unwrap(), all.part(1_000_000, 1_000_000).unwrap());
        pipe.send(&Message::new().with_tensor(&front).with_tensor(&other).with_tensor(&back)).wait().unwrap();
    } else {
        let message = pipe.recv().wait().unwrap().unwrap();
        let [front, other, back] = message.tensors() else { panic!("{message:?}") };
        front.part(1_000_000, 1).unwrap().write(&[77_u8]).unwrap();
        assert_eq!(back.part(0, 1).unwrap().to_vec::<u8>().unwrap(), [77]);
        assert_eq!(other.to_vec::<u8>().unwrap(), [5; 100]);
    }
    group.barrier().wait().unwrap();
}

on_channels!(views_are_sent_once, views_are_sent_once_by_channel, sent_once);

/// The reader says where tensors go.
fn placed<const SET: usize>(group: &Group) {
    let (pipe, context) = (pipe_of::<SET>(group), group.context().clone());
    let (small, large) = (fill(120, 1), fill(2 << 20, 2));
    if group.rank() == 0 {
        let message = Message::new().with_metadata(b"where").with_payload(&small).unwrap();
        let tensor = |span: Span| Tensor::contiguous(span, Dtype::F32, &[512, 1024]).unwrap();
        let message = message
            .with_tensor(&Tensor::contiguous(private(&small), Dtype::F32, &[5, 6]).unwrap())
            .with_tensor(&tensor(shareable(&context, &large)))
            .with_tensor(&tensor(private(&large)))
            .with_tensor(&tensor(shareable(&context, &large)));
        pipe.send(&message).wait().unwrap();
        pipe.send(&message).wait().unwrap();
        return group.barrier().wait().unwrap();
    }
    let mut incoming = pipe.next().wait().unwrap().unwrap();
    assert_eq!(incoming.metadata(), b"where");
    assert_eq!(incoming.payloads().collect::<Vec<_>>(), [120]);
    let parts: Vec<_> = incoming.tensors().iter().map(|part| (part.dtype, part.shape.clone())).collect();
    let big = (Dtype::F32, vec![512, 1024]);
    assert_eq!(parts, [(Dtype::F32, vec![5, 6]), big.clone(), big.clone(), big]);
    let channels: Vec<_> = incoming.tensors().iter().map(|part| part.channel).collect();
    let lent = for_large::<SET>(group);
    let rest = match lent {
        // A thread gets any memory of another one.
        Channel::Xth => lent,
        _ if spans_hosts(group) => Channel::Wire,
        _ => Channel::Ring,
    };
    assert_eq!(channels, [Channel::Basic, lent, rest, lent]);
    // Every second element of one, the columns of another, and a place that is exact.
    let gaps = Tensor::strided(private(&[9; 240]), Dtype::F32, &[5, 6], &[12, 2]).unwrap();
    let columns = Tensor::strided(private(&[9; 2 << 20]), Dtype::F32, &[512, 1024], &[1, 512]).unwrap();
    let exact = Tensor::contiguous(private(&[9; 2 << 20]), Dtype::F32, &[512, 1024]).unwrap();
    incoming.place(0, &gaps).unwrap();
    incoming.place(1, &columns).unwrap();
    incoming.place(2, &exact).unwrap();
    // What cannot be is refused, and what was said before counts.
    let flat = Tensor::contiguous(private(&[9; 120]), Dtype::F32, &[30]).unwrap();
    let repeated = Tensor::strided(private(&[9; 120]), Dtype::F32, &[5, 6], &[0, 1]).unwrap();
    for (index, wrong) in [(0, &flat), (0, &repeated), (4, &gaps), (1, &gaps)] {
        assert!(matches!(incoming.place(index, wrong), Err(Error::Misuse(_))));
    }
    assert!(matches!(incoming.view(0), Err(Error::Unsupported { .. })));
    assert_eq!(incoming.view(3).is_ok(), lends::<SET>(group));
    let message = incoming.read().wait().unwrap();
    assert!(matches!(incoming.read().wait(), Err(Error::Misuse(_))));
    drop(incoming);
    assert_eq!(elements(&gaps), small);
    assert!(gaps.span().to_vec().unwrap()[4..8] == [9; 4]);
    assert!(elements(&columns) == large && elements(&exact) == large);
    let wanted = [&small, &large, &large, &large];
    assert!(message.tensors().iter().zip(wanted).all(|(tensor, wanted)| elements(tensor) == *wanted));
    drop(message);
    // All of it is dropped unread, and the sender goes on.
    drop(pipe.next().wait().unwrap().unwrap());
    group.barrier().wait().unwrap();
}

on_channels!(places, places_by_channel, placed);

/// Random messages in both directions, many in flight: each comes whole and in its order.
fn in_order<const SET: usize>(group: &Group) {
    let (pipe, context) = (pipe_of::<SET>(group), group.context().clone());
    let (mine, yours) = (group.rank() as u64, 1 - group.rank() as u64);
    const COUNT: u64 = 80;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(mine);
            let mut works = Vec::new();
            for number in 0..COUNT {
                let message = random_message(&context, number << 1 | mine);
                match random.below(3) {
                    0 => pipe.send(&message).wait().unwrap(),
                    1 => works.push(pipe.send(&message).start().unwrap()),
                    _ => works.push(pipe.send(&message).delivered().start().unwrap()),
                }
            }
            works.iter().for_each(|work| work.wait().unwrap());
        });
        let mut random = Random(100 + mine);
        for number in 0..COUNT {
            let wanted = random_message(&context, number << 1 | yours);
            let mut incoming = pipe.next().wait().unwrap().unwrap();
            assert_eq!(incoming.tensors().len(), wanted.tensors().len());
            for index in 0..wanted.tensors().len() {
                choose_target(&context, &mut incoming, index, &mut random);
            }
            assert_alike(&incoming.read().wait().unwrap(), &wanted);
        }
    });
    group.barrier().wait().unwrap();
    pipe.check().unwrap();
}

on_channels!(in_order_both_ways, in_order_both_ways_by_channel, in_order);

/// Some tensors come into one of the reader's, some are looked at, some come into new memory.
fn choose_target(context: &Context, incoming: &mut Incoming, index: usize, random: &mut Random) {
    let part = incoming.tensors()[index].clone();
    let count = part.shape.iter().product::<usize>();
    match random.below(3) {
        0 => {
            let bytes = vec![0xee; count * part.dtype.size()];
            let span = if random.below(2) == 0 { private(&bytes) } else { shareable(context, &bytes) };
            incoming.place(index, &Tensor::contiguous(span, part.dtype, &part.shape).unwrap()).unwrap();
        }
        1 if [Channel::Share, Channel::Xth].contains(&part.channel) => incoming.view(index).unwrap(),
        _ => {}
    }
}

/// Threads share a pipe: each message is whole, and those of one thread stay in order.
fn by_threads<const SET: usize>(group: &Group) {
    let (pipe, context) = (pipe_of::<SET>(group), group.context().clone());
    const THREADS: u64 = 4;
    const EACH: u64 = 25;
    std::thread::scope(|scope| {
        if group.rank() == 0 {
            for thread in 0..THREADS {
                let (pipe, context) = (&pipe, &context);
                scope.spawn(move || {
                    for turn in 0..EACH {
                        let message = random_message(context, thread << 8 | turn);
                        let name = (thread << 8 | turn).to_le_bytes();
                        let message = message.with_metadata(name);
                        pipe.send(&message).wait().unwrap();
                    }
                });
            }
            return;
        }
        let readers: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    let mut got: Vec<u64> = Vec::new();
                    for _ in 0..EACH {
                        let message = pipe.recv().wait().unwrap().unwrap();
                        let number = u64::from_le_bytes(message.metadata().try_into().unwrap());
                        let wanted = random_message(&context, number).with_metadata(message.metadata());
                        assert_alike(&message, &wanted);
                        got.push(number);
                    }
                    got
                })
            })
            .collect();
        let mut all = Vec::new();
        for reader in readers {
            let got = reader.join().unwrap();
            for thread in 0..THREADS {
                let of_one: Vec<_> = got.iter().filter(|number| *number >> 8 == thread).collect();
                assert!(of_one.is_sorted(), "{of_one:?}");
            }
            all.extend(got);
        }
        all.sort_unstable();
        let wanted: Vec<_> =
            (0..THREADS).flat_map(|thread| (0..EACH).map(move |turn| thread << 8 | turn)).collect();
        assert_eq!(all, wanted);
    });
    group.barrier().wait().unwrap();
}

on_channels!(threads_share_a_pipe, threads_share_a_pipe_by_channel, by_threads);

/// A send is over when its tensors may be changed, and with `delivered` when the reader has them.
fn over<const SET: usize>(group: &Group) {
    let (pipe, context) = (pipe_of::<SET>(group), group.context().clone());
    let small = Message::new().with_tensor(&Tensor::private(&[1_u8; 10]).unwrap());
    let shared = Tensor::flat(shareable(&context, &fill(2 << 20, 1)), Dtype::U8).unwrap();
    let large = Message::new().with_tensor(&shared);
    if group.rank() == 0 {
        // What is small waits for nobody.
        pipe.send(&small).wait().unwrap();
        let delivered = pipe.send(&small).delivered().start().unwrap();
        let lent = pipe.send(&large).start().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert!(!delivered.is_done());
        group.barrier().wait().unwrap();
        delivered.wait().unwrap();
        lent.wait().unwrap();
        // A view holds its send open.
        let viewed = pipe.send(&large).start().unwrap();
        group.barrier().wait().unwrap();
        assert_eq!(viewed.is_done(), !lends::<SET>(group));
        group.barrier().wait().unwrap();
        viewed.wait().unwrap();
        // One that nobody reads.
        for message in [&small, &large] {
            let error = pipe.send(message).delivered().wait().unwrap_err();
            assert!(error.to_string().contains("dropped the message without reading it"), "{error}");
        }
        pipe.send(&large).wait().unwrap();
    } else {
        group.barrier().wait().unwrap();
        for _ in 0..3 {
            pipe.recv().wait().unwrap().unwrap();
        }
        let mut incoming = pipe.next().wait().unwrap().unwrap();
        if lends::<SET>(group) {
            incoming.view(0).unwrap();
        }
        let message = incoming.read().wait().unwrap();
        drop(incoming);
        std::thread::sleep(Duration::from_millis(50));
        group.barrier().wait().unwrap();
        assert!(elements(&message.tensors()[0]) == fill(2 << 20, 1));
        group.barrier().wait().unwrap();
        drop(message);
        for _ in 0..3 {
            drop(pipe.next().wait().unwrap().unwrap());
        }
    }
    group.barrier().wait().unwrap();
}

on_channels!(when_it_is_over, when_it_is_over_by_channel, over);

/// A wait that ends in vain loses nothing, and a send that does is withdrawn; the pipe lives on.
fn in_vain<const SET: usize>(group: &Group) {
    let (pipe, context) = (pipe_of::<SET>(group), group.context().clone());
    let far = spans_hosts(group);
    let bytes = fill(32 << 20, 1);
    let shared = Tensor::flat(shareable(&context, &bytes), Dtype::U8).unwrap();
    let own = Tensor::flat(private(&bytes), Dtype::U8).unwrap();
    let metadata = fill(1 << 20, 3);
    if group.rank() == 1 {
        let error = pipe.next().deadline(soon()).wait().unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("the other end"), "{error}");
    }
    group.barrier().wait().unwrap();
    if group.rank() == 0 {
        for tensor in [&shared, &own] {
            let error = pipe.send(&Message::new().with_tensor(tensor)).deadline(soon()).wait().unwrap_err();
            assert!(error.is_timeout(), "{error}");
        }
        let begun = pipe.send(&Message::new().with_metadata(&metadata[..])).deadline(soon()).start().unwrap();
        let started = pipe.send(&Message::new().with_tensor(&own)).deadline(soon()).start().unwrap();
        // Between hosts some of it may have been taken unasked.
        let begun = begun.wait().map_err(|error| assert!(error.is_timeout(), "{error}"));
        assert!(far || begun.is_err());
        assert!(started.wait().unwrap_err().is_timeout());
        group.barrier().wait().unwrap();
        pipe.send(&Message::new().with_metadata(b"after").with_tensor(&shared).with_tensor(&own))
            .wait()
            .unwrap();
    } else {
        group.barrier().wait().unwrap();
        // Their tensors were taken back, or all of them: of a message whose head has not gone nobody hears.
        let mut heard = 0;
        let message = loop {
            heard += 1;
            assert!(heard <= 5);
            match pipe.recv().wait() {
                Ok(message) if message.as_ref().unwrap().metadata() == b"after" => break message.unwrap(),
                Ok(message) => assert_eq!(message.unwrap().metadata(), metadata),
                Err(error) => assert!(error.to_string().contains("taken the message back"), "{error}"),
            }
        };
        assert!(message.tensors().iter().all(|tensor| elements(tensor) == bytes));
    }
    pipe.check().unwrap();
    group.barrier().wait().unwrap();
}

on_channels!(deadlines, deadlines_by_channel, in_vain);

/// A read that ends in vain goes on later.
fn read_again<const SET: usize>(group: &Group) {
    let (pipe, bytes) = (pipe_of::<SET>(group), fill(32 << 20, 1));
    let own = Tensor::flat(private(&bytes), Dtype::U8).unwrap();
    if group.rank() == 0 {
        let head = Message::new().with_tensor(&own).with_payload(&bytes).unwrap();
        pipe.send(&head).wait().unwrap();
    } else {
        let mut incoming = pipe.next().wait().unwrap().unwrap();
        let mut turns = 0;
        let message = loop {
            match incoming
                .read()
                .deadline(Deadline::after(Duration::from_micros(100 << turns.min(14))))
                .wait()
            {
                Ok(message) => break message,
                Err(error) => assert!(error.is_timeout(), "{error}"),
            }
            turns += 1;
        };
        assert!(elements(&message.tensors()[0]) == bytes && elements(&message.payloads()[0]) == bytes);
    }
    group.barrier().wait().unwrap();
}

on_channels!(a_read_goes_on, a_read_goes_on_by_channel, read_again);

/// One end says that it sends no more; the other still does.
fn half<const SET: usize>(group: &Group) {
    let pipe = pipe_of::<SET>(group);
    let message = Message::new().with_metadata(b"one");
    if group.rank() == 0 {
        pipe.send(&message).wait().unwrap();
        pipe.finish().unwrap();
        pipe.finish().unwrap();
        let error = pipe.send(&message).wait().unwrap_err();
        assert!(matches!(error, Error::Misuse(_)), "{error}");
        assert_eq!(pipe.recv().wait().unwrap().unwrap().metadata(), b"one");
        assert!(pipe.recv().wait().unwrap().is_none());
    } else {
        assert_eq!(pipe.recv().wait().unwrap().unwrap().metadata(), b"one");
        assert!(pipe.recv().wait().unwrap().is_none());
        // It stays so.
        assert!(pipe.recv().deadline(by()).wait().unwrap().is_none());
        pipe.send(&message).wait().unwrap();
        pipe.close().unwrap();
    }
    group.barrier().wait().unwrap();
}

on_channels!(half_closed, half_closed_by_channel, half);

/// Closing a pipe whose messages are not taken says so; what is not taken is lost, and the other end hears it.
fn closed<const SET: usize>(group: &Group) {
    let pipe = pipe_of::<SET>(group);
    let own = Tensor::private(&fill(32 << 20, 1)).unwrap();
    if group.rank() == 0 {
        let work = pipe.send(&Message::new().with_tensor(&own)).start().unwrap();
        group.barrier().wait().unwrap();
        let error = pipe.clone().close().unwrap_err();
        assert!(error.to_string().contains("while 1 of its messages"), "{error}");
        assert!(work.wait().is_err());
        for error in [
            pipe.send(&Message::new()).wait().unwrap_err(),
            pipe.recv().wait().unwrap_err(),
            pipe.check().unwrap_err(),
        ] {
            assert!(error.to_string().contains("pipe"), "{error}");
        }
        group.barrier().wait().unwrap();
    } else {
        let mut incoming = pipe.next().wait().unwrap().unwrap();
        group.barrier().wait().unwrap();
        group.barrier().wait().unwrap();
        let error = incoming.read().wait().unwrap_err();
        assert!(
            error.to_string().contains("the listener") || error.to_string().contains("the other end"),
            "{error}"
        );
        drop(incoming);
        assert!(pipe.recv().wait().unwrap().is_none());
        let error = pipe.send(&Message::new()).wait().unwrap_err();
        assert!(matches!(&error, Error::Peer(fault) if fault.kind == PeerFaultKind::Left), "{error}");
    }
    group.barrier().wait().unwrap();
}

on_channels!(closed_early, closed_early_by_channel, closed);

/// Each end has channels of its own: what both have is used, and explained.
fn restricted(group: &Group) {
    use Channel::{Basic, Ring, Share, Wire};
    let far = spans_hosts(group);
    let bytes = fill(2 << 20, 1);
    let shared = Tensor::flat(shareable(group.context(), &bytes), Dtype::U8).unwrap();
    let message = Message::new().with_tensor(&shared);
    for (channels, expected) in [
        ([&[Basic, Ring, Wire][..], &[Share, Wire, Ring]], Some(if far { Wire } else { Ring })),
        ([&[Share, Ring], &[Share]], (!far).then_some(Share)),
        ([&[Wire], &[Wire]], far.then_some(Wire)),
        ([&[Share], &[Ring]], None),
    ] {
        let pipe = pipe_with(group, channels);
        let text = pipe.explain();
        let name = expected.map_or("none", Channel::name);
        assert!(text.contains(&format!("sent, host to host: {name}\n")), "{text}");
        match (group.rank(), expected) {
            (0, Some(_)) => pipe.send(&message).wait().unwrap(),
            (0, None) => {
                let error = pipe.send(&message).wait().unwrap_err();
                assert!(matches!(&error, Error::Unsupported { .. }), "{error}");
                assert!(error.to_string().contains("a channel that both ends have"), "{error}");
            }
            (_, Some(channel)) => {
                let mut incoming = pipe.next().wait().unwrap().unwrap();
                assert_eq!(incoming.tensors()[0].channel, channel);
                assert!(elements(&incoming.read().wait().unwrap().tensors()[0]) == bytes);
            }
            (_, None) => {}
        }
        // What is small always goes.
        match group.rank() {
            0 => pipe.send(&Message::new().with_tensor(&shared.part(0, 100).unwrap())).wait().unwrap(),
            _ => assert_eq!(pipe.recv().wait().unwrap().unwrap().tensors()[0].len(), 100),
        }
        group.barrier().wait().unwrap();
    }
}

on_hosts!(channels_of_each_end, 2, restricted);

/// Many pipes, one after the other and at once: nothing of them stays.
fn nothing_stays(group: &Group) {
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let turn = |count: usize| {
        let pipes: Vec<_> = (0..count).map(|_| pipe(group)).collect();
        let shared = Tensor::flat(shareable(group.context(), &fill(2 << 20, 1)), Dtype::U8).unwrap();
        for pipe in &pipes {
            match group.rank() {
                0 => pipe.send(&Message::new().with_tensor(&shared)).wait().unwrap(),
                _ => assert_eq!(pipe.recv().wait().unwrap().unwrap().tensors()[0].len(), 2 << 20),
            }
        }
        drop(pipes);
        group.barrier().wait().unwrap();
    };
    turn(2);
    let before = descriptors();
    let stats = |context: &Context| context.lease_stats().unwrap().granted;
    for _ in 0..10 {
        turn(3);
    }
    settles(|| descriptors() <= before);
    settles(|| stats(group.context()) == (0, 0));
    group.barrier().wait().unwrap();
}

#[test]
fn nothing_of_them_stays() {
    ranks::as_processes("nothing_of_them_stays", 2, nothing_stays);
}

/// Waits until something is true, which takes a moment.
fn settles(what: impl Fn() -> bool) {
    let end = std::time::Instant::now() + LONG;
    while !what() {
        assert!(std::time::Instant::now() < end, "it does not settle");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A pipe in one process, between two contexts.
#[test]
fn two_contexts() {
    let (one, two) = (ranks::context(), ranks::context());
    let listener = Listener::local(&one).unwrap();
    assert!(matches!(Pipe::connect(&one, listener.address(), by()), Err(Error::Misuse(_))));
    assert!(listener.accept(soon()).unwrap_err().to_string().contains("nobody has connected"));
    let address = listener.address().to_owned();
    let there: Arc<Context> = two.clone();
    let other = std::thread::spawn(move || Pipe::connect(&there, &address, by()).unwrap());
    let here = listener.accept(by()).unwrap();
    let there = other.join().unwrap();
    // Pipes outlive their listener.
    drop(listener);
    let shared = Tensor::flat(shareable(&one, &fill(2 << 20, 1)), Dtype::U8).unwrap();
    let sent = here.send(&Message::new().with_tensor(&shared)).delivered().start().unwrap();
    assert!(elements(&there.recv().wait().unwrap().unwrap().tensors()[0]) == elements(&shared));
    sent.wait().unwrap();
    assert_eq!(here.peer().pid, std::process::id());
    drop(here);
    assert!(there.recv().wait().unwrap().is_none());
}

/// A message of each way that bytes take, which only its number decides.
fn of_way(context: &Context, number: usize) -> Message {
    let key = number as u64;
    let message = Message::new().with_metadata((number as u32).to_le_bytes());
    let own = |len| Tensor::private(&fill(len, key)).unwrap();
    let shared = || Tensor::flat(shareable(context, &fill(2 << 20, key)), Dtype::U8).unwrap();
    match number % 6 {
        0 => message,
        1 => message.with_payload(&fill(5_000, key)).unwrap(),
        2 => message.with_tensor(&shared()),
        3 => message.with_tensor(&own(3 << 20)).with_tensor(&own(100_000)),
        4 => message.with_tensor(&own(300_000)).with_tensor(&shared()).with_tensor(&own(10)),
        // Its description does not fit the head.
        _ => (0..100).fold(message, |message, _| message.with_tensor(&own(20))),
    }
}

/// The number of a message of the function above.
fn number_of(message: &Message) -> usize {
    u32::from_le_bytes(message.metadata().try_into().unwrap()) as usize
}

/// Started receives get their messages in their order, in whatever order they are waited for.
fn started(group: &Group) {
    let (pipe, context) = (pipe(group), group.context().clone());
    const COUNT: usize = 18;
    if group.rank() == 0 {
        group.barrier().wait().unwrap();
        let sent: Vec<_> =
            (0..COUNT).map(|number| pipe.send(&of_way(&context, number)).start().unwrap()).collect();
        sent.iter().for_each(|send| send.wait().unwrap());
        for number in 0..COUNT {
            pipe.send(&of_way(&context, number)).delivered().wait().unwrap();
        }
        pipe.finish().unwrap();
    } else {
        let receives: Vec<_> = (0..COUNT).map(|_| pipe.recv().start().unwrap()).collect();
        assert!(!receives[0].is_done());
        assert!(receives[3].wait_by(soon()).unwrap_err().is_timeout());
        group.barrier().wait().unwrap();
        for number in (0..COUNT).map(|index| index * 7 % COUNT) {
            let message = receives[number].wait().unwrap().unwrap();
            assert_alike(&message, &of_way(&context, number));
            assert!(receives[number].is_done());
            assert!(matches!(receives[number].wait(), Err(Error::Misuse(_))));
        }
        // Some wait, some were started; a description, and then its bytes.
        for number in 0..COUNT {
            let message = match number % 3 {
                0 => pipe.recv().start().unwrap().wait().unwrap().unwrap(),
                1 => {
                    let next = pipe.next().start().unwrap();
                    let mut incoming = next.wait().unwrap().unwrap();
                    incoming.read().start().unwrap().wait().unwrap()
                }
                _ => {
                    // It goes on when nobody has its description any more.
                    let read = pipe.next().wait().unwrap().unwrap().read().start().unwrap();
                    read.wait().unwrap()
                }
            };
            assert_alike(&message, &of_way(&context, number));
        }
        // All hear of the end, whoever comes first.
        let last = [pipe.recv().start().unwrap(), pipe.recv().start().unwrap()];
        assert!(pipe.next().wait().unwrap().is_none());
        assert!(last.iter().all(|last| last.wait().unwrap().is_none()));
        assert!(pipe.recv().start().unwrap().wait().unwrap().is_none());
    }
    group.barrier().wait().unwrap();
}

on_hosts!(receives_are_started, 2, started);

/// A receive that is dropped or cancelled loses no message, wherever it is.
fn given_up(group: &Group) {
    let (pipe, context) = (pipe(group), group.context().clone());
    const COUNT: usize = 120;
    if group.rank() == 0 {
        let sent: Vec<_> = (0..COUNT)
            .map(|number| pipe.send(&of_way(&context, number)).delivered().start().unwrap())
            .collect();
        sent.iter().for_each(|send| send.wait().unwrap());
        group.barrier().wait().unwrap();
        return;
    }
    let mut random = Random(5);
    let (mut next, mut vain) = (0, 0);
    while next < COUNT {
        let most = 1 << random.below(12);
        let wait = Deadline::after(Duration::from_micros(random.below(most) as u64));
        let message = match random.below(4) {
            // A time-out of its own.
            0 => match pipe.recv().deadline(wait).wait() {
                Ok(message) => message,
                Err(error) => {
                    assert!(error.is_timeout(), "{error}");
                    None
                }
            },
            1 => {
                let receive = pipe.recv().start().unwrap();
                match receive.wait_by(wait) {
                    Ok(message) => message,
                    Err(error) => {
                        assert!(error.is_timeout(), "{error}");
                        assert!(receive.cancel() && !receive.cancel());
                        assert!(matches!(receive.wait(), Err(Error::Aborted(_))));
                        None
                    }
                }
            }
            2 => {
                // The first is given up, and the second has its message then.
                let [first, second] = [(); 2].map(|()| pipe.recv().start().unwrap());
                match random.below(2) {
                    0 => std::thread::sleep(wait.remaining().unwrap_or_default()),
                    _ => while !first.is_done() {},
                }
                drop(first);
                // A later one may have come there already.
                let message = second.wait().unwrap().unwrap();
                if number_of(&message) != next {
                    assert_eq!(number_of(&message), next + 1);
                    let before = pipe.recv().wait().unwrap().unwrap();
                    assert_alike(&before, &of_way(&context, next));
                    next += 1;
                }
                Some(message)
            }
            _ => {
                // The description goes on, and the read of it is given up.
                let mut incoming = pipe.next().wait().unwrap().unwrap();
                assert_eq!(incoming.metadata(), (next as u32).to_le_bytes());
                let read = incoming.read().start().unwrap();
                assert!(incoming.read().wait().is_err_and(|error| matches!(error, Error::Misuse(_))));
                std::thread::sleep(wait.remaining().unwrap_or_default());
                drop(read);
                Some(incoming.read().wait().unwrap())
            }
        };
        match message {
            Some(message) => {
                assert_alike(&message, &of_way(&context, next));
                next += 1;
            }
            None => vain += 1,
        }
        if vain > 100 * COUNT {
            panic!("all in vain");
        }
    }
    group.barrier().wait().unwrap();
}

on_hosts!(receives_are_given_up, 2, given_up);

/// A send that is cancelled does not come; its reader hears that where it knows of it, and the pipe lives on.
fn cancelled(group: &Group) {
    let (pipe, context) = (pipe(group), group.context().clone());
    let bytes = fill(32 << 20, 1);
    let shared = Tensor::flat(shareable(&context, &bytes), Dtype::U8).unwrap();
    let own = Tensor::flat(private(&bytes), Dtype::U8).unwrap();
    if group.rank() == 0 {
        pipe.send(&Message::new()).delivered().wait().unwrap();
        // Nobody reads them, and then somebody does while they are cancelled.
        for turn in 0..6 {
            for tensor in [&own, &shared] {
                let send = pipe.send(&Message::new().with_tensor(tensor)).start().unwrap();
                if turn > 0 {
                    group.barrier().wait().unwrap();
                    std::thread::sleep(Duration::from_micros(300 << turn));
                }
                match send.cancel() {
                    true => assert!(matches!(send.wait(), Err(Error::Aborted(_)))),
                    false => send.wait().unwrap(),
                }
                assert!(turn > 0 || send.wait().is_err());
                // It is over, so this may be.
                tensor.part(0, 1).unwrap().write(&bytes[..1]).unwrap();
            }
            if turn == 0 {
                group.barrier().wait().unwrap();
            }
        }
        // One that goes on when it is dropped.
        drop(pipe.send(&Message::new().with_metadata(b"dropped").with_tensor(&own)).start().unwrap());
        let sent = pipe.send(&Message::new().with_metadata(b"after").with_tensor(&own)).start().unwrap();
        sent.wait().unwrap();
        assert!(!sent.cancel());
        sent.wait().unwrap();
    } else {
        pipe.recv().wait().unwrap().unwrap();
        let mut taken_back = 0;
        let mut expect = |message: tensorwire::Result<Option<Message>>| match message {
            Ok(message) => assert!(elements(&message.unwrap().tensors()[0]) == bytes),
            Err(error) => {
                assert!(error.to_string().contains("taken the message back"), "{error}");
                taken_back += 1;
            }
        };
        // Their descriptions had gone.
        group.barrier().wait().unwrap();
        for _ in 0..2 {
            expect(pipe.recv().wait());
        }
        for _ in 0..10 {
            group.barrier().wait().unwrap();
            expect(pipe.recv().wait());
        }
        assert!(taken_back >= 2, "{taken_back}");
        for text in [&b"dropped"[..], b"after"] {
            let message = pipe.recv().wait().unwrap().unwrap();
            assert_eq!(message.metadata(), text);
            assert!(elements(&message.tensors()[0]) == bytes);
        }
    }
    pipe.check().unwrap();
    group.barrier().wait().unwrap();
}

on_hosts!(sends_are_cancelled, 2, cancelled);

/// Wakes a thread.
struct Unpark(std::thread::Thread);

impl std::task::Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future to its end on this thread.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let waker = std::task::Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = std::task::Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(value) => return value,
            std::task::Poll::Pending => std::thread::park_timeout(LONG),
        }
    }
}

/// Calls are awaited without a runtime, and end callbacks.
fn awaited(group: &Group) {
    let (pipe, context) = (pipe(group), group.context().clone());
    const COUNT: usize = 12;
    if group.rank() == 0 {
        block_on(async {
            for number in 0..COUNT {
                pipe.send(&of_way(&context, number)).start().unwrap().await.unwrap();
            }
            assert_eq!(pipe.recv().start().unwrap().await.unwrap().unwrap().metadata(), b"thanks");
        });
        // A chain of callbacks is answered.
        for number in 0..COUNT {
            pipe.send(&of_way(&context, number)).wait().unwrap();
        }
    } else {
        block_on(async {
            for number in 0..COUNT {
                let message = match number % 2 {
                    0 => pipe.recv().start().unwrap().await.unwrap().unwrap(),
                    _ => {
                        let mut incoming = pipe.next().start().unwrap().await.unwrap().unwrap();
                        incoming.read().start().unwrap().await.unwrap()
                    }
                };
                assert_alike(&message, &of_way(&context, number));
            }
            // One that is given up by who awaits it.
            let mut vain = pipe.recv().start().unwrap();
            let waker = std::task::Waker::noop();
            for _ in 0..3 {
                let poll = std::pin::Pin::new(&mut vain).poll(&mut std::task::Context::from_waker(waker));
                assert!(poll.is_pending());
            }
            let thanks = Message::new().with_metadata(b"thanks");
            drop(vain);
            pipe.send(&thanks).start().unwrap().await.unwrap();
        });
        let (all, got) = std::sync::mpsc::channel();
        receive_on(&pipe, COUNT, all);
        for number in 0..COUNT {
            assert_alike(&got.recv_timeout(LONG).unwrap(), &of_way(&context, number));
        }
    }
    group.barrier().wait().unwrap();
}

/// Receives messages by callbacks, each of which starts the next receive.
fn receive_on(pipe: &Pipe, left: usize, all: std::sync::mpsc::Sender<Message>) {
    let own = pipe.clone();
    pipe.recv().start().unwrap().on_done(move |message| {
        all.send(message.unwrap().unwrap()).unwrap();
        if left > 1 {
            receive_on(&own, left - 1, all);
        }
    });
}

on_hosts!(calls_are_awaited, 2, awaited);

/// The most memory that this process has had since it was last asked.
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// What is dropped unread is not gathered, and what nobody has asked for is not either, while an end waits for an answer.
fn bounded(group: &Group) {
    let pipe = pipe(group);
    const LEN: usize = 8 << 20;
    const COUNT: usize = 16;
    let own = Tensor::flat(private(&fill(LEN, 1)), Dtype::U8).unwrap();
    let large = Message::new().with_tensor(&own);
    let word = Message::new().with_metadata(b"word");
    if group.rank() == 0 {
        for _ in 0..COUNT {
            pipe.send(&large).wait().unwrap();
        }
        let sent: Vec<_> = (0..COUNT).map(|_| pipe.send(&large).start().unwrap()).collect();
        group.barrier().wait().unwrap();
        // The other end waits until it hears of this, with all of that in its way.
        std::thread::sleep(Duration::from_millis(300));
        assert!(sent.iter().all(|sent| !sent.is_done()));
        assert_eq!(pipe.recv().wait().unwrap().unwrap().metadata(), b"word");
        sent.iter().for_each(|sent| sent.wait().unwrap());
    } else {
        peak();
        let before = peak();
        for _ in 0..COUNT {
            drop(pipe.next().wait().unwrap().unwrap());
        }
        let dropped = peak();
        assert!(dropped < before + LEN, "{before} {dropped}");
        group.barrier().wait().unwrap();
        pipe.send(&word).delivered().wait().unwrap();
        let waited = peak();
        assert!(waited < before + LEN, "{before} {waited}");
        for _ in 0..COUNT {
            assert!(elements(&pipe.recv().wait().unwrap().unwrap().tensors()[0]) == fill(LEN, 1));
        }
    }
    group.barrier().wait().unwrap();
}

#[test]
fn memory_is_bounded() {
    ranks::as_processes("memory_is_bounded", 2, bounded);
}

#[test]
fn memory_is_bounded_between_hosts() {
    ranks::as_processes_on(ranks::Placement::Apart, "memory_is_bounded_between_hosts", 2, bounded);
}

/// A sender waits before it is far ahead of its reader; what waits keeps its order, ends in time and can be cancelled.
fn ahead(group: &Group) {
    let pipe = pipe(group);
    const LEN: usize = 200_000;
    const COUNT: usize = 400;
    let message = |number: usize| {
        let message = Message::new().with_metadata((number as u32).to_le_bytes());
        message.with_tensor(&Tensor::private(&fill(LEN, number as u64)).unwrap())
    };
    let word = Message::new().with_metadata(b"word");
    if group.rank() == 0 {
        let sends: Vec<_> = (0..COUNT).map(|number| pipe.send(&message(number)).start().unwrap()).collect();
        group.barrier().wait().unwrap();
        // The other end waits for an answer, and takes what stands before it, but no more than a window of it.
        let gone = || sends.iter().filter(|send| send.is_done()).count();
        settles(|| gone() >= 20);
        std::thread::sleep(Duration::from_millis(200));
        assert!(gone() < COUNT / 2, "{}", gone());
        assert!(sends[gone() + 10..].iter().all(|send| !send.is_done()));
        assert_eq!(pipe.recv().wait().unwrap().unwrap().metadata(), b"word");
        // Behind all of them: too late, given up, and cancelled in the middle.
        let error = pipe.send(&word).deadline(soon()).wait().unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("has not taken messages"), "{error}");
        let error = pipe.send(&word).deadline(soon()).start().unwrap().wait().unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("has not taken messages"), "{error}");
        assert!(sends[COUNT - 100].cancel() && sends[COUNT - 1].cancel());
        group.barrier().wait().unwrap();
        for (number, send) in sends.iter().enumerate() {
            match send.wait() {
                Ok(()) => assert!(number != COUNT - 100 && number != COUNT - 1),
                Err(error) => assert!(number == COUNT - 100 || number == COUNT - 1, "{number}: {error}"),
            }
        }
        pipe.send(&word).delivered().wait().unwrap();
    } else {
        peak();
        let before = peak();
        group.barrier().wait().unwrap();
        pipe.send(&word).delivered().wait().unwrap();
        let waited = peak();
        assert!(waited < before + (32 << 20), "{before} {waited}");
        group.barrier().wait().unwrap();
        for number in (0..COUNT - 1).filter(|number| *number != COUNT - 100) {
            match number % 7 {
                0 => {
                    let incoming = pipe.next().wait().unwrap().unwrap();
                    assert_eq!(incoming.metadata(), (number as u32).to_le_bytes());
                }
                _ => assert_alike(&pipe.recv().wait().unwrap().unwrap(), &message(number)),
            }
        }
        assert_alike(&pipe.recv().wait().unwrap().unwrap(), &word);
    }
    group.barrier().wait().unwrap();
}

#[test]
fn a_sender_is_not_far_ahead() {
    ranks::as_processes("a_sender_is_not_far_ahead", 2, ahead);
}

#[test]
fn a_sender_is_not_far_ahead_of_another_host() {
    ranks::as_processes_on(ranks::Placement::Sealed, "a_sender_is_not_far_ahead_of_another_host", 2, ahead);
}
