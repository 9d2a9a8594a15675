//! Pipes with tensors on GPUs: each channel and each pair of devices, as threads and as processes. The GPUs are threads
//! (`tensorwire::device::threads`); with TEST_GPU=1 both ends share the first real GPU.
#![allow(clippy::unwrap_used, clippy::panic)]

mod gpus;
mod messages;
mod ranks;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use gpus::{gpu, hold, is_real};
use messages::fill;
use ranks::random::Random;
use ranks::{LONG, Rank, Ranks, are_threads, spans_hosts};
use tensorwire::device::threads::{self, Call, Settings, VARIABLE, install, out_of_memory};
use tensorwire::device::{Abort, Queue};
use tensorwire::pipe::rpc::{Rpc, Service};
use tensorwire::pipe::{Channel, Listener, Message, Pending, Pipe, hooks};
use tensorwire::{Context, Deadline, DeviceId, Dtype, Error, Group, PeerFaultKind, Span, Tensor};

fn by() -> Deadline {
    Deadline::after(LONG)
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_millis(200))
}

/// The host and two GPUs.
fn devices() -> [DeviceId; 3] {
    // Ranks that are threads share the process, and whoever is first has installed them. Some tests have GPUs of their own.
    if !is_real() && std::env::var_os(VARIABLE).is_none() {
        let _ = install(Settings { gpus: 2, ..Settings::default() });
    }
    let second = if is_real() { gpu(0) } else { gpu(1) };
    [DeviceId::Host, gpu(0), second]
}

/// Channels that the bodies below are run with, and the first that a tensor of a GPU takes of them on one host.
const SETS: [(&[Channel], Channel); 4] = [
    (&Channel::ALL, Channel::GpuShare),
    (&[Channel::Basic, Channel::Ring, Channel::Wire, Channel::GpuBasic], Channel::GpuBasic),
    (&[Channel::Share, Channel::Ring, Channel::Wire, Channel::GpuBasic], Channel::GpuBasic),
    (
        &[Channel::Share, Channel::GpuShare, Channel::Ring, Channel::Wire, Channel::GpuBasic],
        Channel::GpuShare,
    ),
];
const ALL: usize = 0;
const RING: usize = 1;
const SHARE: usize = 2;
/// All but those of one process.
const LENT: usize = 3;

/// By which the reader may look at a tensor where it is.
const LOOKED_AT: [Channel; 4] = [Channel::Share, Channel::GpuShare, Channel::Xth, Channel::GpuXth];

/// A pipe between the two ranks of a group, with the channels of a set: rank 0 listens.
fn pipe_of<const SET: usize>(group: &Group) -> Pipe {
    devices();
    pipe_with(group, SETS[SET].0)
}

fn pipe_with(group: &Group, channels: &[Channel]) -> Pipe {
    let context = group.context();
    if group.rank() == 1 {
        let address = String::from_utf8(group.store().pop_by("address", by()).unwrap()).unwrap();
        return Pipe::connect_with(context, &address, channels, by()).unwrap();
    }
    let listener = match context.config().key.is_some() {
        true => Listener::at_with(context, "tcp://127.0.0.1:0", channels),
        false => Listener::at_with(context, "tcp://127.0.0.1:0/open", channels),
    };
    let listener = listener.unwrap();
    group.store().push("address", listener.address().as_bytes()).unwrap();
    listener.accept(by()).unwrap()
}

/// By which channel a tensor of a GPU goes.
fn of_gpus<const SET: usize>(group: &Group) -> Channel {
    match spans_hosts(group) {
        true => Channel::GpuBasic,
        false if SET == ALL && are_threads() => Channel::GpuXth,
        false => SETS[SET].1,
    }
}

/// Makes the tests of a body: on all placements with all channels, and with each set.
macro_rules! on_channels {
    ($name:ident, $by:ident, $body:ident) => {
        on_hosts!($name, 2, $body::<ALL>);

        mod $by {
            use super::*;

            #[test]
            fn by_loans() {
                ranks::as_threads(2, $body::<LENT>);
            }

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
            fn by_share_in_processes() {
                let test = concat!(stringify!($by), "::by_share_in_processes");
                ranks::as_processes(test, 2, $body::<SHARE>);
            }
        }
    };
}

/// Memory of a device with these bytes.
fn span_on(context: &Context, device: &DeviceId, bytes: &[u8]) -> Span {
    let span = Span::whole(context.pool(device).unwrap().alloc(bytes.len()).unwrap());
    let span = span.slice(0..bytes.len()).unwrap();
    span.write(0, bytes).unwrap();
    span
}

fn flat(context: &Context, device: &DeviceId, bytes: &[u8]) -> Tensor {
    Tensor::flat(span_on(context, device, bytes), Dtype::U8).unwrap()
}

/// The bytes of its elements, in their order.
fn elements(tensor: &Tensor) -> Vec<u8> {
    let (layout, bytes) = (tensor.layout(), tensor.span().to_vec().unwrap());
    let mut all = Vec::with_capacity(tensor.byte_len());
    if layout.is_contiguous() {
        all.extend_from_slice(&bytes[..tensor.byte_len()]);
        return all;
    }
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

fn assert_alike(got: &Message, wanted: &Message) {
    assert_eq!(got.metadata(), wanted.metadata());
    let payloads = |message: &Message| message.payloads().iter().map(elements).collect::<Vec<_>>();
    assert!(payloads(got) == payloads(wanted));
    assert_eq!(got.tensors().len(), wanted.tensors().len());
    for (index, (got, wanted)) in got.tensors().iter().zip(wanted.tensors()).enumerate() {
        assert_eq!((got.dtype(), got.layout().shape()), (wanted.dtype(), wanted.layout().shape()));
        assert!(elements(got) == elements(wanted), "tensor {index}, {:?}", wanted.layout());
    }
}

fn finish(queue: &mut dyn Queue) {
    queue.finish(&Abort::local(), by()).unwrap();
}

fn queue_of(context: &Context, device: &DeviceId) -> Box<dyn Queue> {
    context.device(device).unwrap().queue().unwrap()
}

/// Tensors of every kind, there and back: they come as they were sent.
fn of_all_kinds<const SET: usize>(group: &Group) {
    let (pipe, context) = (pipe_of::<SET>(group), group.context().clone());
    let [host, first, second] = devices();
    let large = fill(3 << 20, 1);
    let whole = span_on(&context, &first, &large);
    let matrix = |span: &Span| Tensor::contiguous(span.clone(), Dtype::F32, &[768, 1024]).unwrap();
    let strided = |shape: &[usize], strides: &[isize]| {
        Tensor::strided(whole.clone(), Dtype::F32, shape, strides).unwrap()
    };
    let parts = Tensor::flat(whole.clone(), Dtype::F32).unwrap();
    let sizes = [1, 0, 4, 5_000, 70_000, 300_000];
    let all = [
        Message::new().with_tensor(&matrix(&whole)),
        sizes.iter().enumerate().fold(Message::new().with_metadata(b"sizes"), |message, (key, &size)| {
            message.with_tensor(&flat(&context, &first, &fill(size, key as u64)))
        }),
        // Columns, every second element, one element many times, and parts of one memory.
        Message::new()
            .with_tensor(&strided(&[1024, 768], &[1, 1024]))
            .with_tensor(
                &Tensor::strided(span_on(&context, &first, &large), Dtype::F32, &[1000], &[2]).unwrap(),
            )
            .with_tensor(
                &Tensor::strided(span_on(&context, &second, &large), Dtype::F32, &[5, 2], &[0, 1]).unwrap(),
            )
            .with_tensor(&parts.part(10, 500_000).unwrap())
            .with_tensor(&parts.part(0, 20).unwrap())
            .with_tensor(&parts.part(300_000, 400_000).unwrap()),
        // Of the host and of both GPUs in one message.
        Message::new()
            .with_payload(&large)
            .unwrap()
            .with_tensor(&flat(&context, &host, &large))
            .with_tensor(&flat(&context, &first, &fill(100, 7)))
            .with_tensor(&Tensor::private(&fill(200_000, 8)).unwrap())
            .with_tensor(&flat(&context, &second, &large))
            .with_tensor(
                &Tensor::contiguous(span_on(&context, &second, &[]), Dtype::I64, &[3, 0, 2]).unwrap(),
            ),
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
        for (got, sent) in arrived.tensors().iter().zip(message.tensors()) {
            assert_eq!(got.span().device(), sent.span().device());
        }
    }
    pipe.check().unwrap();
    group.barrier().wait().unwrap();
    let text = pipe.explain();
    let line = format!("sent, GPU to GPU: {}", of_gpus::<SET>(group));
    assert!(text.contains(&line), "{text}");
    group.barrier().wait().unwrap();
}

on_channels!(all_kinds, all_kinds_by_channel, of_all_kinds);

/// Every pair of devices, in every way that a reader can say where a tensor goes.
fn each_pair<const SET: usize>(group: &Group) {
    let (pipe, context) = (pipe_of::<SET>(group), group.context().clone());
    for size in [40, 1 << 14, 2 << 20] {
        let bytes = fill(size, 3);
        for from in devices() {
            let sent =
                Tensor::contiguous(span_on(&context, &from, &bytes), Dtype::F32, &[2, size / 8]).unwrap();
            for to in devices() {
                let message = Message::new().with_tensor(&sent).with_tensor(&sent);
                for way in 0..6 {
                    if group.rank() == 0 {
                        pipe.send(&message).wait().unwrap();
                        continue;
                    }
                    let mut incoming = pipe.next().wait().unwrap().unwrap();
                    let channel = incoming.tensors()[0].channel;
                    assert!(from == DeviceId::Host || channel == of_gpus::<SET>(group), "{channel}");
                    let blank = || span_on(&context, &to, &vec![9; 2 * size]);
                    let place = match way {
                        // Exact, its columns, every second element.
                        0 => Tensor::contiguous(blank(), Dtype::F32, &[2, size / 8]).unwrap(),
                        1 => Tensor::strided(blank(), Dtype::F32, &[2, size / 8], &[1, 2]).unwrap(),
                        _ => Tensor::strided(blank(), Dtype::F32, &[2, size / 8], &[size as isize / 4, 2])
                            .unwrap(),
                    };
                    match way {
                        0..=2 => incoming.place(0, &place).unwrap(),
                        3 => incoming.bring_to(0, &to).unwrap(),
                        4 => incoming.bring_to(1, &to).unwrap(),
                        _ => {
                            let lends = LOOKED_AT.contains(&channel);
                            assert_eq!(incoming.view(0).is_ok(), lends);
                            incoming.bring_to(1, &to).unwrap();
                        }
                    }
                    let mut queue = queue_of(&context, &to);
                    let message = match way % 3 {
                        0 => incoming.read().wait().unwrap(),
                        1 => incoming.read().start().unwrap().wait().unwrap(),
                        _ => incoming.read().on(&mut *queue).unwrap(),
                    };
                    finish(&mut *queue);
                    drop(incoming);
                    let text = format!("{size} from {from} to {to}, way {way}");
                    assert!(message.tensors().iter().all(|tensor| elements(tensor) == bytes), "{text}");
                    let device = |index: usize| message.tensors()[index].span().device();
                    let where_to = match way {
                        0..=3 => [to.clone(), from.clone()],
                        _ => [from.clone(), to.clone()],
                    };
                    assert_eq!([device(0), device(1)], where_to, "{text}");
                    if way == 2 {
                        let gaps = place.span().to_vec().unwrap();
                        assert!(gaps.chunks(8).all(|pair| pair[4..] == [9; 4]), "{text}");
                    }
                }
            }
        }
    }
    group.barrier().wait().unwrap();
}

on_channels!(pairs_of_devices, pairs_of_devices_by_channel, each_pair);

/// A message that only its number decides, so that both ranks can make it.
fn random_message(context: &Context, number: u64) -> Message {
    let (mut random, devices) = (Random(number), devices());
    let mut message = Message::new().with_metadata(fill([0, 5, 600][random.below(3)], number));
    let mut tensors: Vec<Tensor> = Vec::new();
    for index in 0..random.below(5) as u64 {
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
            0 => {
                let device = &devices[random.below(3)];
                let (rows, columns) = ([1, 7, 1000][random.below(3)], [1, 16, 700][random.below(3)]);
                let memory = span_on(context, device, &fill(rows * columns * 8, number << 8 | index));
                match random.below(3) {
                    0 => Tensor::contiguous(memory, Dtype::F32, &[rows, columns]),
                    1 => Tensor::strided(memory, Dtype::F32, &[columns, rows], &[1, columns as isize]),
                    _ => Tensor::strided(memory, Dtype::F32, &[rows * columns], &[2]),
                }
                .unwrap()
            }
        };
        message = message.with_tensor(&tensor);
        tensors.push(tensor);
    }
    message
}

/// Random messages in both directions, many in flight: each comes whole and in its order.
fn in_order<const SET: usize>(group: &Group) {
    let (pipe, context) = (pipe_of::<SET>(group), group.context().clone());
    let (mine, yours) = (group.rank() as u64, 1 - group.rank() as u64);
    const COUNT: u64 = 60;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut random, mut works) = (Random(mine), Vec::new());
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
        let (mut random, devices) = (Random(100 + mine), devices());
        for number in 0..COUNT {
            let wanted = random_message(&context, number << 1 | yours);
            let mut incoming = pipe.next().wait().unwrap().unwrap();
            for index in 0..wanted.tensors().len() {
                let part = incoming.tensors()[index].clone();
                let (shape, device) = (&part.shape, &devices[random.below(3)]);
                let bytes = vec![0xee; shape.iter().product::<usize>() * 4];
                match random.below(4) {
                    0 => {
                        let place = Tensor::contiguous(span_on(&context, device, &bytes), Dtype::F32, shape);
                        incoming.place(index, &place.unwrap()).unwrap();
                    }
                    1 if LOOKED_AT.contains(&part.channel) => incoming.view(index).unwrap(),
                    2 => incoming.bring_to(index, device).unwrap(),
                    _ => {}
                }
            }
            let message = match random.below(3) {
                0 => incoming.read().wait().unwrap(),
                1 => incoming.read().start().unwrap().wait().unwrap(),
                _ => {
                    // Sometimes the queue of another GPU than those of the tensors.
                    let mut queue = queue_of(&context, &devices[1]);
                    let message = incoming.read().on(&mut *queue).unwrap();
                    finish(&mut *queue);
                    message
                }
            };
            assert_alike(&message, &wanted);
        }
    });
    group.barrier().wait().unwrap();
    pipe.check().unwrap();
}

on_channels!(in_order_both_ways, in_order_both_ways_by_channel, in_order);

/// A tensor is read behind what the sender has queued, and a place is written behind what the reader has.
fn in_the_order_of_queues<const SET: usize>(group: &Group) {
    let (pipe, context) = (pipe_of::<SET>(group), group.context().clone());
    let [_, device, _] = devices();
    let (old, new) = (vec![1_u8; 300_000], fill(300_000, 5));
    let mut queue = queue_of(&context, &device);
    if group.rank() == 0 {
        let (tensor, source) = (flat(&context, &device, &old), flat(&context, &device, &new));
        for started in [true, false] {
            tensor.write(&old).unwrap();
            let held = hold(group, &mut *queue);
            queue.copy(tensor.span().view(), source.span().view(), Default::default()).unwrap();
            let message = Message::new().with_tensor(&tensor);
            let send = pipe.send(&message).after(&mut *queue).unwrap();
            if started {
                let send = send.start().unwrap();
                assert!(send.wait_by(soon()).unwrap_err().is_timeout());
                held.signal(1);
                send.wait().unwrap();
            } else {
                std::thread::scope(|scope| {
                    let sent = scope.spawn(|| send.wait());
                    std::thread::sleep(Duration::from_millis(50));
                    held.signal(1);
                    sent.join().unwrap().unwrap();
                });
            }
            // The reader's copy is made.
            tensor.write(&old).unwrap();
            group.barrier().wait().unwrap();
        }
        // Now the reader's queue is what all wait for.
        tensor.write(&new).unwrap();
        let sent = pipe.send(&Message::new().with_tensor(&tensor)).start().unwrap();
        group.barrier().wait().unwrap();
        is_open(&sent, LOOKED_AT.contains(&of_gpus::<SET>(group)));
        group.barrier().wait().unwrap();
        sent.wait().unwrap();
    } else {
        for _ in 0..2 {
            assert!(elements(&pipe.recv().wait().unwrap().unwrap().tensors()[0]) == new);
            group.barrier().wait().unwrap();
        }
        let place = flat(&context, &device, &old);
        let copy = flat(&context, &device, &old);
        let held = hold(group, &mut *queue);
        queue.copy(copy.span().view(), place.span().view(), Default::default()).unwrap();
        let mut incoming = pipe.next().wait().unwrap().unwrap();
        incoming.place(0, &place).unwrap();
        let message = incoming.read().on(&mut *queue).unwrap();
        drop((incoming, message));
        std::thread::sleep(Duration::from_millis(50));
        group.barrier().wait().unwrap();
        assert!(elements(&place) == old);
        // The sender has seen that its send is open.
        group.barrier().wait().unwrap();
        held.signal(1);
        finish(&mut *queue);
        assert!(elements(&copy) == old && elements(&place) == new);
    }
    group.barrier().wait().unwrap();
}

on_channels!(queues_order_them, queues_order_them_by_channel, in_the_order_of_queues);

/// In one process no thread waits for a queue: the reader's copy is queued before the sender's data is ready, and the next thing that
/// the sender queues comes behind it.
fn handed_over(group: &Group) {
    let (pipe, context) = (pipe_of::<ALL>(group), group.context().clone());
    let [host, device, _] = devices();
    let (old, new) = (vec![1_u8; 3 << 20], fill(3 << 20, 5));
    // While a stream waits, a driver may refuse to open devices and to move memory at once: all of that comes before.
    let mut queue = queue_of(&context, &device);
    let (tensor, source) = (flat(&context, &device, &old), flat(&context, &device, &new));
    let sent = pipe.send(&Message::new().with_tensor(&source)).start().unwrap();
    drop(pipe.recv().wait().unwrap());
    sent.wait().unwrap();
    group.barrier().wait().unwrap();
    if group.rank() == 0 {
        let held = hold(group, &mut *queue);
        queue.copy(tensor.span().view(), source.span().view(), Default::default()).unwrap();
        let message = Message::new().with_tensor(&tensor);
        let sent = pipe.send(&message).after(&mut *queue).unwrap().start().unwrap();
        // The reader has queued its copies.
        group.barrier().wait().unwrap();
        assert!(!sent.is_done());
        held.signal(1);
        sent.wait().unwrap();
        tensor.write(&old).unwrap();
        group.barrier().wait().unwrap();
        // Memory of the host that cannot be shared is looked at where it is, and its send lasts as long.
        let own = Tensor::private(&new).unwrap();
        let sent = pipe.send(&Message::new().with_tensor(&own)).start().unwrap();
        let word = (own.span().region().addr() as u64).to_le_bytes();
        pipe.send(&Message::new().with_metadata(word)).wait().unwrap();
        group.barrier().wait().unwrap();
        assert!(!sent.is_done());
        group.barrier().wait().unwrap();
        sent.wait().unwrap();
        // What is not wanted comes back at once.
        pipe.send(&Message::new().with_tensor(&own).with_tensor(&tensor)).wait().unwrap();
        // What is taken back is not there any more.
        let late = pipe.send(&Message::new().with_tensor(&own).with_tensor(&tensor)).deadline(soon()).wait();
        assert!(late.unwrap_err().is_timeout());
    } else {
        let places = [&tensor, &source];
        let mut incoming = pipe.next().wait().unwrap().unwrap();
        assert_eq!(incoming.tensors()[0].channel, Channel::GpuXth);
        incoming.place(0, places[0]).unwrap();
        let message = incoming.read().on(&mut *queue).unwrap();
        queue.copy(places[1].span().view(), places[0].span().view(), Default::default()).unwrap();
        drop((incoming, message));
        group.barrier().wait().unwrap();
        finish(&mut *queue);
        group.barrier().wait().unwrap();
        assert!(places.iter().all(|place| elements(place) == new));
        let mut incoming = pipe.next().wait().unwrap().unwrap();
        assert_eq!(incoming.tensors()[0].channel, Channel::Xth);
        incoming.view(0).unwrap();
        let viewed = incoming.read().wait().unwrap();
        let word = pipe.recv().wait().unwrap().unwrap();
        let span = viewed.tensors()[0].span();
        assert_eq!(((span.region().addr() + span.offset()) as u64).to_le_bytes(), word.metadata());
        assert!(span.device() == host && elements(&viewed.tensors()[0]) == new);
        group.barrier().wait().unwrap();
        drop((incoming, viewed));
        group.barrier().wait().unwrap();
        drop(pipe.next().wait().unwrap().unwrap());
        let mut late = pipe.next().wait().unwrap().unwrap();
        group.barrier().wait().unwrap();
        let error = late.read().wait().unwrap_err();
        assert!(error.to_string().contains("taken the message back"), "{error}");
        return;
    }
    group.barrier().wait().unwrap();
}

#[test]
fn threads_hand_over() {
    ranks::as_threads(2, handed_over);
}

/// The tensor of a call is read behind what the caller has queued, and that of its answer behind what the handler has.
fn calls_in_the_order_of_queues<const SET: usize>(group: &Group) {
    let (pipe, context) = (pipe_of::<SET>(group), group.context().clone());
    let [_, device, _] = devices();
    let (old, new) = (vec![1_u8; 300_000], fill(300_000, 5));
    if group.rank() == 1 {
        let own = group.clone();
        let copies = Service::new().with("copy", move |mut call| {
            let message = call.read()?;
            let (from, copy) = (message.tensors()[0].span().clone(), flat(&context, &device, &old));
            let mut queue = queue_of(&context, &device);
            let held = hold(&own, &mut *queue);
            queue.copy(copy.span().view(), from.slice(0..copy.len())?.view(), Default::default())?;
            let answer = Message::new().with_tensor(&copy).after(&mut *queue)?;
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(20));
                held.signal(1);
                finish(&mut *queue);
            });
            Ok(answer)
        });
        Rpc::over(pipe, copies).unwrap().wait(by()).unwrap();
    } else {
        let rpc = Rpc::over(pipe, Service::new()).unwrap();
        let mut queue = queue_of(&context, &device);
        let (tensor, source) = (flat(&context, &device, &old), flat(&context, &device, &new));
        for started in [true, false] {
            tensor.write(&old).unwrap();
            let held = hold(group, &mut *queue);
            queue.copy(tensor.span().view(), source.span().view(), Default::default()).unwrap();
            let message = Message::new().with_tensor(&tensor).after(&mut *queue).unwrap();
            let call = rpc.call("copy", &message).deadline(by());
            let answer = if started {
                let call = call.start().unwrap();
                assert!(call.wait_by(soon()).unwrap_err().is_timeout());
                held.signal(1);
                call.wait().unwrap()
            } else {
                std::thread::scope(|scope| {
                    let answer = scope.spawn(|| call.wait());
                    std::thread::sleep(Duration::from_millis(50));
                    held.signal(1);
                    answer.join().unwrap().unwrap()
                })
            };
            assert_eq!(answer.tensors()[0].span().device(), device);
            assert!(elements(&answer.tensors()[0]) == new);
        }
        drop(rpc);
    }
    group.barrier().wait().unwrap();
}

on_channels!(
    calls_are_ordered_by_queues,
    calls_are_ordered_by_queues_by_channel,
    calls_in_the_order_of_queues
);

/// What is under way may be given up by either end, and the pipe lives on.
fn given_up<const SET: usize>(group: &Group) {
    let (pipe, context) = (pipe_of::<SET>(group), group.context().clone());
    let [_, device, _] = devices();
    let bytes = fill(2 << 20, 4);
    let tensor = flat(&context, &device, &bytes);
    let message = Message::new().with_tensor(&tensor).with_tensor(&Tensor::private(&bytes).unwrap());
    let word = Message::new().with_metadata(b"word");
    let lends = LOOKED_AT.contains(&of_gpus::<SET>(group));
    if group.rank() == 0 {
        // Nobody reads it in time, and it is cancelled.
        let error = pipe.send(&message).deadline(soon()).wait().unwrap_err();
        assert!(error.is_timeout(), "{error}");
        let send = pipe.send(&message).start().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!(send.cancel() && send.wait().is_err());
        group.barrier().wait().unwrap();
        // The queue that it waits for does not come so far, and somebody reads it.
        let mut queue = queue_of(&context, &device);
        for started in [false, true] {
            let held = hold(group, &mut *queue);
            let send = pipe.send(&message).after(&mut *queue).unwrap().deadline(soon());
            let result = if started { send.start().and_then(|send| send.wait()) } else { send.wait() };
            assert!(result.as_ref().is_err_and(Error::is_timeout), "{result:?}");
            held.signal(1);
            finish(&mut *queue);
            group.barrier().wait().unwrap();
        }
        // One that is dropped unread.
        let error = pipe.send(&message).delivered().wait().unwrap_err();
        assert!(error.to_string().contains("dropped the message without reading it"), "{error}");
        pipe.send(&word).wait().unwrap();
        // A read that is given up, and done again.
        let held = hold(group, &mut *queue);
        let send = pipe.send(&message).after(&mut *queue).unwrap().start().unwrap();
        group.barrier().wait().unwrap();
        held.signal(1);
        send.wait().unwrap();
        // A view holds its send open.
        let viewed = pipe.send(&message).start().unwrap();
        group.barrier().wait().unwrap();
        is_open(&viewed, lends);
        if lends {
            // The two are one memory.
            tensor.part(0, 1).unwrap().write(&[77_u8]).unwrap();
        }
        group.barrier().wait().unwrap();
        viewed.wait().unwrap();
    } else {
        group.barrier().wait().unwrap();
        let taken_back = |started: bool| {
            let mut incoming = pipe.next().wait().unwrap().unwrap();
            let read = incoming.read();
            let read = if started { read.start().and_then(|read| read.wait()) } else { read.wait() };
            match read {
                Err(error) => assert!(error.to_string().contains("taken the message back"), "{error}"),
                // It had borrowed all of it by then.
                Ok(message) => {
                    assert!(message.tensors().iter().all(|tensor| elements(tensor) == bytes));
                }
            }
        };
        for started in [false, true] {
            taken_back(started);
        }
        for started in [true, false] {
            taken_back(started);
            group.barrier().wait().unwrap();
        }
        drop(pipe.next().wait().unwrap().unwrap());
        assert_eq!(pipe.recv().wait().unwrap().unwrap().metadata(), b"word");
        let mut incoming = pipe.next().wait().unwrap().unwrap();
        for started in [false, true] {
            let read = incoming.read().deadline(soon());
            let read = if started { read.start().and_then(|read| read.wait()) } else { read.wait() };
            assert!(read.as_ref().is_err_and(Error::is_timeout), "{read:?}");
        }
        drop(incoming.read().start().unwrap());
        group.barrier().wait().unwrap();
        let message = incoming.read().wait().unwrap();
        assert!(message.tensors().iter().all(|tensor| elements(tensor) == bytes));
        let mut incoming = pipe.next().wait().unwrap().unwrap();
        assert_eq!(incoming.view(0).is_ok(), lends);
        let message = incoming.read().wait().unwrap();
        drop(incoming);
        group.barrier().wait().unwrap();
        group.barrier().wait().unwrap();
        assert_eq!(elements(&message.tensors()[0])[0], if lends { 77 } else { bytes[0] });
    }
    group.barrier().wait().unwrap();
    let granted = || context.lease_stats().unwrap().granted;
    settles(|| granted() == (0, 0));
    pipe.check().unwrap();
    group.barrier().wait().unwrap();
}

on_channels!(they_are_given_up, they_are_given_up_by_channel, given_up);

/// A send that waits for its reader is not over; another one is, soon.
fn is_open(send: &Pending<()>, waits: bool) {
    match waits {
        true => assert!(!send.is_done()),
        false => settles(|| send.is_done()),
    }
}

/// Waits until something is true, which takes a moment.
fn settles(what: impl Fn() -> bool) {
    let end = Instant::now() + LONG;
    while !what() {
        assert!(Instant::now() < end, "it does not settle");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a body as two processes, each with GPUs and variables of its own.
fn with(test: &str, gpus: [Option<Settings>; 2], variables: &[(&str, &str)], body: fn(&Group)) {
    if let Some(rank) = Rank::of_this_process() {
        return body(&rank.group());
    }
    if is_real() {
        return ranks::skip("it needs GPUs that differ");
    }
    let ranks = Ranks::start_with(test, 2, |rank, mut command| {
        command.envs(variables.iter().copied());
        if let Some(settings) = &gpus[rank] {
            command.env(VARIABLE, settings.to_string());
        }
        command
    });
    // The first that ends badly has often only heard of the trouble: all tell what they know.
    let mut ranks = ranks.ranks;
    ranks.iter_mut().for_each(ranks::Process::let_go);
    let ends = ranks.into_iter().map(|rank| catch_unwind(AssertUnwindSafe(|| rank.expect_success())));
    assert!(ends.filter(Result::is_err).count() == 0);
}

fn some(gpus: usize) -> Option<Settings> {
    Some(Settings { gpus, ..Settings::default() })
}

fn has_gpu(number: usize) -> bool {
    threads::gpu(number).is_ok()
}

/// Sends tensors of a GPU of this process, or receives them; both ends say what is in `explain`.
fn one_way(group: &Group, number: usize, text: [&str; 2]) {
    let (pipe, context, bytes) = (pipe_with(group, &Channel::ALL), group.context().clone(), fill(2 << 20, 6));
    if group.rank() == 0 {
        let device = gpu(number);
        let tensor = flat(&context, &device, &bytes);
        let message = Message::new().with_tensor(&tensor).with_tensor(&tensor.part(5, 100_000).unwrap());
        let small = Message::new().with_tensor(&flat(&context, &device, &bytes[..1000]));
        for message in [&message, &small, &message] {
            pipe.send(message).wait().unwrap();
            pipe.send(message).start().unwrap().wait().unwrap();
        }
    } else {
        for turn in 0..6 {
            let message = match turn % 2 {
                0 => pipe.recv().wait().unwrap().unwrap(),
                _ => pipe.recv().start().unwrap().wait().unwrap().unwrap(),
            };
            let tensor = &message.tensors()[0];
            let home = if has_gpu(0) { gpu(0) } else { DeviceId::Host };
            assert_eq!(tensor.span().device(), home);
            assert!(elements(tensor) == bytes[..tensor.len()]);
        }
    }
    let explained = pipe.explain();
    assert!(explained.contains(text[group.rank()]), "{explained}");
    settles(|| context.lease_stats().unwrap().granted == (0, 0));
    group.barrier().wait().unwrap();
}

/// A reader without a GPU gets them in memory of the host.
#[test]
fn a_reader_without_a_gpu() {
    with("a_reader_without_a_gpu", [some(1), None], &[], |group| {
        one_way(group, 0, ["not gpu_share: the reader has no GPU", "not gpu_share: the reader has no GPU"]);
    });
}

/// A reader that has another GPU than the sender's says so once, and gets them there.
#[test]
fn a_reader_with_another_gpu() {
    with("a_reader_with_another_gpu", [some(2), some(1)], &[], |group| {
        let sender = "by another way: 6 (the other end cannot have memory of gpu-";
        one_way(group, 1, [sender, "by another way: 1 (memory of gpu-"]);
    });
}

/// The same where both know their GPUs when they connect: so they agree on the way of each.
#[test]
fn gpus_that_are_known() {
    with("gpus_that_are_known", [some(2), some(1)], &[], |group| {
        assert!(!group.context().access().unwrap().gpus().unwrap().is_empty());
        let (there, apart) =
            (format!("{} to host: gpu_share", gpu(0)), format!("{} to host: gpu_basic", gpu(1)));
        for text in [there, apart, "not gpu_share: the reader does not have that GPU".into()] {
            one_way(group, 1, [&text, &text]);
        }
        let pipe = pipe_with(group, &Channel::ALL);
        assert!(!pipe.explain().contains("by another way"), "{}", pipe.explain());
        group.barrier().wait().unwrap();
    });
}

/// The sender's GPU does not let its memory out. The message goes by way of the host, with the reason.
fn without_exports(group: &Group) {
    if group.rank() == 0 {
        let refused = tensorwire::device::Error::Unsupported {
            what: "an export".into(),
            need: "memory that can be exported".into(),
            have: "memory of a test".into(),
        };
        threads::gpu(0).unwrap().fail(Call::Export, usize::MAX, refused);
    }
    one_way(group, 0, ["by another way: 6 (the other end cannot have", "memory of a test"]);
}

#[test]
fn exports_that_are_refused() {
    with("exports_that_are_refused", [some(1), some(1)], &[], without_exports);
}

#[test]
fn imports_that_are_refused() {
    with("imports_that_are_refused", [some(1), some(1)], &[], |group| {
        if group.rank() == 1 {
            threads::gpu(0).unwrap().fail(Call::Import, usize::MAX, out_of_memory());
        }
        one_way(group, 0, ["by another way: 6 (the other end cannot have", "OUT_OF_MEMORY"]);
    });
}

/// What would go around is refused in strict mode, and the pipe lives on.
#[test]
fn strict_mode() {
    with("strict_mode", [some(2), some(1)], &[("TENSORWIRE_STRICT", "1")], |group| {
        let (pipe, context) = (pipe_with(group, &Channel::ALL), group.context().clone());
        for number in [1, 0] {
            if group.rank() == 0 {
                let tensor = flat(&context, &gpu(number), &fill(100_000, 1));
                let sent = pipe.send(&Message::new().with_tensor(&tensor)).delivered().wait();
                assert_eq!(sent.is_ok(), number == 0, "{sent:?}");
                continue;
            }
            let read = pipe.next().wait().unwrap().unwrap().read().wait();
            match (number, read) {
                (1, Err(error)) => assert!(error.to_string().contains("in strict mode"), "{error}"),
                (0, Ok(message)) => assert!(elements(&message.tensors()[0]) == fill(100_000, 1)),
                (_, other) => panic!("{other:?}"),
            }
        }
        group.barrier().wait().unwrap();
    });
}

/// A view of what cannot be had here is refused, and the same message can be read otherwise.
#[test]
fn views_that_cannot_be() {
    with("views_that_cannot_be", [some(2), some(1)], &[], |group| {
        let (pipe, context) = (pipe_with(group, &Channel::ALL), group.context().clone());
        if group.rank() == 0 {
            let tensor = flat(&context, &gpu(1), &fill(100_000, 1));
            pipe.send(&Message::new().with_tensor(&tensor)).delivered().wait().unwrap();
        } else {
            let mut incoming = pipe.next().wait().unwrap().unwrap();
            incoming.view(0).unwrap();
            let error = incoming.read().wait().unwrap_err();
            assert!(error.to_string().contains("a view of a tensor on gpu-"), "{error}");
            assert!(matches!(
                incoming.bring_to(0, &gpu(1)),
                Err(Error::Unsupported { .. } | Error::Misuse(_))
            ));
            incoming.bring_to(0, &DeviceId::Host).unwrap();
            assert!(elements(&incoming.read().wait().unwrap().tensors()[0]) == fill(100_000, 1));
        }
        group.barrier().wait().unwrap();
    });
}

/// GPUs that do not reach each other: a tensor for the other one goes through memory of the host.
#[test]
fn gpus_that_are_apart() {
    let apart = || Some(Settings { gpus: 2, peers: false, ..Settings::default() });
    with("gpus_that_are_apart", [apart(), apart()], &[], |group| {
        let (pipe, context) = (pipe_with(group, &Channel::ALL), group.context().clone());
        let bytes = fill(300_000, 2);
        if group.rank() == 0 {
            pipe.send(&Message::new().with_tensor(&flat(&context, &gpu(0), &bytes))).wait().unwrap();
        } else {
            let mut incoming = pipe.next().wait().unwrap().unwrap();
            incoming.bring_to(0, &gpu(1)).unwrap();
            let message = incoming.read().wait().unwrap();
            assert_eq!(message.tensors()[0].span().device(), gpu(1));
            assert!(elements(&message.tensors()[0]) == bytes);
            let text = pipe.explain();
            assert!(text.contains("cannot reach"), "{text}");
        }
        group.barrier().wait().unwrap();
    });
}

/// A reader whose GPU has no memory left hears so, and may read the message when it has some, or elsewhere.
#[test]
fn memory_is_short() {
    with("memory_is_short", [some(1), some(1)], &[], |group| {
        let (pipe, context) = (pipe_with(group, &Channel::ALL), group.context().clone());
        let bytes = fill(5 << 20, 2);
        if group.rank() == 0 {
            for _ in 0..2 {
                pipe.send(&Message::new().with_tensor(&flat(&context, &gpu(0), &bytes))).wait().unwrap();
            }
        } else {
            for elsewhere in [false, true] {
                let mut incoming = pipe.next().wait().unwrap().unwrap();
                settles(|| context.pool(&gpu(0)).unwrap().trim() == 0);
                threads::gpu(0).unwrap().fail(Call::Alloc, usize::MAX, out_of_memory());
                for started in [false, true] {
                    let read = match started {
                        true => incoming.read().start().and_then(|read| read.wait()),
                        false => incoming.read().wait(),
                    };
                    let error = read.unwrap_err();
                    assert!(error.to_string().contains("OUT_OF_MEMORY"), "{error}");
                }
                match elsewhere {
                    true => incoming.bring_to(0, &DeviceId::Host).unwrap(),
                    false => threads::gpu(0).unwrap().heal(Call::Alloc),
                }
                let message = incoming.read().wait().unwrap();
                assert!(elements(&message.tensors()[0]) == bytes);
                threads::gpu(0).unwrap().heal(Call::Alloc);
            }
        }
        group.barrier().wait().unwrap();
    });
}

/// The two ends have no channel for GPUs in common.
fn without_channels(group: &Group) {
    let [_, device, _] = devices();
    let (pipe, context) =
        (pipe_with(group, &[Channel::Share, Channel::Ring, Channel::Wire]), group.context());
    if group.rank() == 0 {
        let error =
            pipe.send(&Message::new().with_tensor(&flat(context, &device, &[1; 8]))).wait().unwrap_err();
        assert!(matches!(&error, Error::Unsupported { .. }), "{error}");
        pipe.send(&Message::new().with_tensor(&Tensor::private(&[1_u8; 8]).unwrap())).wait().unwrap();
    } else {
        let mut incoming = pipe.next().wait().unwrap().unwrap();
        let place = flat(context, &device, &[0; 8]);
        for refused in [incoming.bring_to(0, &device), incoming.place(0, &place)] {
            assert!(matches!(&refused, Err(Error::Unsupported { .. })), "{refused:?}");
        }
        assert_eq!(elements(&incoming.read().wait().unwrap().tensors()[0]), [1; 8]);
    }
    group.barrier().wait().unwrap();
}

on_hosts!(no_channel_for_gpus, 2, without_channels);

/// Streams with one hardware queue, and under MPS, where they do not wait.
#[test]
fn in_order_in_all_settings() {
    if let Some(rank) = Rank::of_this_process() {
        return in_order::<ALL>(&rank.group());
    }
    for settings in gpus::all_settings() {
        gpus::run("in_order_in_all_settings", 2, &settings, &[]);
    }
}

/// Nothing of many messages stays: no lease, no memory of a GPU, no queue more.
fn nothing_stays(group: &Group) {
    let [_, device, _] = devices();
    let (context, bytes) = (group.context().clone(), fill(1 << 20, 1));
    let turn = || {
        let pipe = pipe_with(group, &Channel::ALL);
        for _ in 0..5 {
            match group.rank() {
                0 => pipe.send(&Message::new().with_tensor(&flat(&context, &device, &bytes))).wait().unwrap(),
                _ => assert!(elements(&pipe.recv().wait().unwrap().unwrap().tensors()[0]) == bytes),
            }
        }
        group.barrier().wait().unwrap();
    };
    turn();
    let before = gpus::usage();
    (0..5).for_each(|_| turn());
    settles(|| context.lease_stats().unwrap().granted == (0, 0));
    gpus::nothing_is_left(group, before);
    group.barrier().wait().unwrap();
}

#[test]
fn nothing_of_them_stays() {
    ranks::as_processes("nothing_of_them_stays", 2, nothing_stays);
}

/// A receive is given up when it has borrowed memory and the rest has not come; then its end is dropped. The sender hears that the end has
/// left, and has its memory back.
#[test]
fn what_was_given_up_goes_with_its_end() {
    with("what_was_given_up_goes_with_its_end", [some(1), some(1)], &[], |group| {
        let (pipe, context) = (pipe_with(group, &Channel::ALL), group.context().clone());
        if group.rank() == 0 {
            let bytes = fill(2 << 20, 2);
            let (on_gpu, own) = (flat(&context, &gpu(0), &bytes), Tensor::private(&bytes).unwrap());
            let store = group.store().clone();
            hooks::set(move |at| {
                if at == "send: behind the head" {
                    store.pop_by("dropped", by()).unwrap();
                }
            });
            let message = Message::new().with_tensor(&on_gpu).with_tensor(&own);
            let error = pipe.send(&message).deadline(by()).wait().unwrap_err();
            assert!(matches!(&error, Error::Peer(fault) if fault.kind == PeerFaultKind::Left), "{error}");
            settles(|| context.lease_stats().unwrap().granted == (0, 0));
        } else {
            let borrowed = Arc::new(AtomicBool::new(false));
            let own = borrowed.clone();
            hooks::set(move |at| own.store(at == "read: behind a block" || own.load(SeqCst), SeqCst));
            while !borrowed.load(SeqCst) {
                let error = pipe.recv().deadline(soon()).wait().unwrap_err();
                assert!(error.is_timeout(), "{error}");
            }
            drop(pipe);
            group.store().push("dropped", b"").unwrap();
        }
        group.barrier().wait().unwrap();
    });
}
