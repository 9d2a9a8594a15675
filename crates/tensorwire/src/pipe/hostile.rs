//! Ends that speak the protocol of groups as they should, and lie in that of pipes. The other end gets an error, and tells the liar
//! where nothing that follows could be understood. It never waits longer than its deadline.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorwire_device::{Deadline, DeviceId, Dtype, Layout, Span};

use super::descriptor::{Block, Body, Descriptor, HEAD, Part, TensorPart, head_of, tag};
use super::{Listener, Message, Pipe};
use crate::collective::Tensor;
use crate::context::Context;
use crate::error::{Error, PeerFaultKind, Result};
use crate::lease::Terms;

const LONG: Duration = Duration::from_secs(60);

fn by() -> Deadline {
    Deadline::after(LONG)
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_millis(100))
}

fn context(host: Option<&str>) -> Arc<Context> {
    let (host, heartbeat) = (host.map(str::to_owned), Duration::from_secs(30));
    Context::new(crate::Config { host, heartbeat, ..crate::Config::default() }).unwrap()
}

/// A liar, and the other end.
fn ends(far: bool) -> (Pipe, Pipe) {
    let (here, there) = (context(far.then_some("here")), context(far.then_some("there")));
    let listener = Listener::local(&here).unwrap();
    let address = listener.address().to_owned();
    let other = std::thread::spawn(move || Pipe::connect(&there, &address, by()).unwrap());
    let pipe = listener.accept(by()).unwrap();
    (pipe, other.join().unwrap())
}

/// Says anything.
fn say(liar: &Pipe, tag: u64, words: &[u8]) {
    let (group, other) = (&liar.0.group, liar.0.other());
    group.send(&Tensor::private(words).unwrap(), other).tag(tag).deadline(by()).wait().unwrap();
}

/// Sends these bytes as a descriptor.
fn describe(liar: &Pipe, serial: u64, descriptor: &[u8]) {
    let (head, rest) = head_of(serial, descriptor, 0, 0);
    say(liar, 0, &head);
    if !rest.is_empty() {
        say(liar, tag(serial, Part::Rest), rest);
    }
}

/// A message of one tensor of bytes.
fn one(len: usize, body: Body) -> Descriptor {
    let layout = Layout::contiguous(&[len], 1).unwrap();
    Descriptor {
        answered: false,
        metadata: Vec::new(),
        payloads: 0,
        blocks: vec![Block { len, from: DeviceId::Host, body }],
        tensors: vec![TensorPart { dtype: Dtype::U8, maker: 0, block: 0, layout }],
    }
}

/// A message of the liar goes through.
fn goes_on(liar: &Pipe, reader: &Pipe) {
    liar.send(&Message::new().with_metadata(b"true")).wait().unwrap();
    assert_eq!(reader.recv().deadline(by()).wait().unwrap().unwrap().metadata(), b"true");
    reader.send(&Message::new()).wait().unwrap();
    assert!(liar.recv().deadline(by()).wait().unwrap().is_some());
}

/// The other end has found it out: both of them hear that, from now on.
fn is_found_out(liar: &Pipe, reader: &Pipe, what: &str) {
    let error = reader.next().deadline(by()).wait().unwrap_err();
    let Error::Peer(fault) = &error else { panic!("{what}: {error}") };
    assert_eq!(fault.kind, PeerFaultKind::Misbehaved, "{what}: {error}");
    assert!(reader.check().is_err() && reader.send(&Message::new()).wait().is_err(), "{what}");
    let end = Instant::now() + LONG;
    while liar.check().is_ok() {
        assert!(Instant::now() < end, "{what}: it is not told");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn heads() {
    let head = |change: &dyn Fn(&mut [u8; HEAD])| {
        let mut head = head_of(0, &one(3, Body::Here(vec![1, 2, 3])).to_bytes().unwrap(), 0, 0).0;
        change(&mut head);
        head
    };
    let long = u32::try_from((4 << 20) + 1).unwrap().to_le_bytes();
    let heads = [
        ("of an unknown kind", head(&|head| head[4] = 3)),
        ("of nothing but ones", [0xff; HEAD]),
        ("longer than any", head(&|head| head[..4].copy_from_slice(&long))),
        ("with a number that none has", head(&|head| head[15] = 0x80)),
        ("that is cut", head(&|head| head[0] -= 1)),
        ("with more behind it", head(&|head| head[0] += 1)),
    ];
    for (index, (what, head)) in heads.iter().enumerate() {
        let (liar, reader) = ends(index % 2 == 1);
        say(&liar, 0, head);
        is_found_out(&liar, &reader, what);
    }
    for words in [&[][..], &[1], &[0; HEAD + 1]] {
        let (liar, reader) = ends(false);
        say(&liar, 0, words);
        is_found_out(&liar, &reader, "of another size");
    }
}

#[test]
fn descriptors() {
    let refused = |what: &str, change: &dyn Fn(&mut Descriptor)| {
        let mut descriptor = one(24, Body::Here(vec![7; 24]));
        change(&mut descriptor);
        let (liar, reader) = ends(false);
        describe(&liar, 0, &descriptor.to_bytes().unwrap());
        is_found_out(&liar, &reader, what);
    };
    let layout =
        |shape: &[usize], strides: &[isize], origin| Layout::with_origin(shape, strides, 1, origin).unwrap();
    refused("a shape", &|it| it.tensors[0].layout = layout(&[25], &[1], 0));
    refused("a stride", &|it| it.tensors[0].layout = layout(&[3], &[12], 0));
    refused("a stride backwards", &|it| it.tensors[0].layout = layout(&[3], &[-12], 24));
    refused("an origin", &|it| it.tensors[0].layout = layout(&[24], &[1], 1));
    refused("a block", &|it| it.tensors[0].block = 1);
    refused("a length", &|it| it.blocks[0].len = 23);
    refused("more memory than it shows", &|it| {
        it.blocks[0] = Block { len: 1 << 40, from: DeviceId::Host, body: Body::Follows }
    });
    refused("the count of payloads", &|it| it.payloads = 2);
    // What is lent is its own, and only on its host.
    let stranger = context(None);
    let lent = |context: &Arc<Context>| {
        let span = Span::whole(context.host().alloc(1 << 20).unwrap()).slice(0..1 << 20).unwrap();
        context.grant(&span, &Terms::default()).unwrap()
    };
    let others = lent(&stranger);
    refused("memory of somebody else", &|it| *it = one(1 << 20, Body::Lent(others.token().to_bytes())));
    refused("memory of the host as that of a GPU", &|it| {
        *it = one(1 << 20, Body::OnGpu(others.token().to_bytes()));
    });
    refused("the same, with the name of a GPU", &|it| {
        *it = one(1 << 20, Body::OnGpu(others.token().to_bytes()));
        it.blocks[0].from = DeviceId::Gpu([1; 16]);
    });
    refused("a payload of a GPU", &|it| {
        let from = DeviceId::Gpu([1; 16]);
        it.blocks.insert(0, Block { len: 1, from, body: Body::Here(vec![1]) });
        (it.payloads, it.tensors[0].block) = (1, 1);
    });
    let (liar, reader) = ends(true);
    let own = lent(liar.0.context());
    describe(&liar, 0, &one(1 << 20, Body::Lent(own.token().to_bytes())).to_bytes().unwrap());
    is_found_out(&liar, &reader, "memory of another host");
}

/// What does not come, or comes otherwise than it was said, costs its message.
#[test]
fn parts() {
    for far in [false, true] {
        let (liar, reader) = ends(far);
        let next = |by: Deadline| reader.next().deadline(by).wait();
        // Half a description: the rest is awaited until somebody says that it does not come.
        let long = Descriptor { metadata: vec![1; 3000], ..one(3, Body::Here(vec![1, 2, 3])) };
        let long = long.to_bytes().unwrap();
        say(&liar, 0, &head_of(1, &long, 0, 0).0);
        for _ in 0..2 {
            assert!(next(soon()).unwrap_err().is_timeout());
        }
        say(&liar, tag(1, Part::Rest), &[]);
        goes_on(&liar, &reader);
        say(&liar, 0, &head_of(2, &long, 0, 0).0);
        say(&liar, tag(2, Part::Rest), &[1; 100]);
        goes_on(&liar, &reader);

        // A block of another size; and one that no memory holds.
        for (serial, words) in [(3, &[][..]), (4, &[1; 5]), (5, &[1; 9000])] {
            describe(&liar, serial, &one(8000, Body::Follows).to_bytes().unwrap());
            say(&liar, tag(serial, Part::Block(0)), words);
            let mut incoming = next(by()).unwrap().unwrap();
            let error = incoming.read().deadline(by()).wait().unwrap_err();
            assert!(error.to_string().contains("taken the message back"), "{error}");
        }
        goes_on(&liar, &reader);
        for (serial, len) in [(6, 1 << 45), (7, 1 << 60), (8, isize::MAX as usize)] {
            describe(&liar, serial, &one(len, Body::Follows).to_bytes().unwrap());
            let mut incoming = next(by()).unwrap().unwrap();
            let error = incoming.read().deadline(by()).wait().unwrap_err();
            assert!(!error.is_timeout() && !matches!(error, Error::Bug(_)), "{error}");
            drop(incoming);
        }
        goes_on(&liar, &reader);

        // Memory that is not lent any more.
        if !far {
            let context = liar.0.context();
            let span = Span::whole(context.host().alloc(1 << 20).unwrap()).slice(0..1 << 20).unwrap();
            let lease = context.grant(&span, &Terms::default()).unwrap();
            let token = lease.token().clone();
            context.discard(&token, by()).unwrap();
            drop(lease);
            describe(&liar, 9, &one(1 << 20, Body::Lent(token.to_bytes())).to_bytes().unwrap());
            let error = next(by()).unwrap().unwrap().read().deadline(by()).wait().unwrap_err();
            assert!(error.to_string().contains("taken the message back"), "{error}");
            goes_on(&liar, &reader);
        }

        // Half a description of somebody who leaves.
        say(&liar, 0, &head_of(10, &long, 0, 0).0);
        liar.close().unwrap();
        let error = next(by()).unwrap_err();
        assert!(matches!(&error, Error::Peer(fault) if fault.kind == PeerFaultKind::Left), "{error}");
    }
}

/// A reader that answers nonsense.
#[test]
fn answers() {
    let (liar, sender) = ends(false);
    for (serial, words) in [(0, &[][..]), (1, &[0, 0])] {
        say(&liar, tag(serial, Part::Delivered), words);
        let error = sender.send(&Message::new()).delivered().deadline(by()).wait().unwrap_err();
        assert!(!error.is_timeout(), "{error}");
        assert!(liar.recv().wait().unwrap().is_some());
    }
    goes_on(&sender, &liar);
}

/// Somebody who may connect, and then says nonsense, does not keep others out.
#[test]
fn hellos() -> Result<()> {
    use super::channel::Hello;
    let here = context(None);
    let listener = Listener::local(&here)?;
    let good = Hello::new(&super::Channel::ALL, None).padded();
    let changed = |at: usize, byte: u8| {
        let mut bad = good;
        bad[at] = byte;
        bad
    };
    // Of an unknown kind; with no GPU, and with more than it names.
    let mut many = changed(4, 2);
    let none = many;
    many[5] = 33;
    for hello in [&changed(4, 7)[..], &none, &many, &good[..10], &[]] {
        let (there, address, hello) = (context(None), listener.address().to_owned(), hello.to_vec());
        let liar = std::thread::spawn(move || {
            super::listener::connect_as(&there, &address, by(), |group, by| {
                let hello = Tensor::private(&hello)?;
                group.send(&hello, 0).tag(super::HELLO).deadline(by).wait()?;
                let theirs = Tensor::private(&[0_u8; Hello::PADDED])?;
                group.recv(&theirs, 0).tag(super::HELLO).deadline(by).wait()
            })
        });
        let end = Instant::now() + LONG;
        loop {
            let error = listener.accept(soon()).unwrap_err();
            if error.to_string().contains("the last that tried has not") {
                break;
            }
            assert!(Instant::now() < end, "{error}");
        }
        liar.join().unwrap()?;
    }
    let (there, address) = (context(None), listener.address().to_owned());
    let other = std::thread::spawn(move || Pipe::connect(&there, &address, by()));
    goes_on(&other.join().unwrap()?, &listener.accept(by())?);
    Ok(())
}
