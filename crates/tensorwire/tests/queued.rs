//! Collectives on tensors of GPUs, which queues do. The GPUs are threads (`tensorwire::device::threads`), so this runs
//! everywhere; with TEST_GPU=1 all ranks share the first real GPU. Each body as threads and as processes.

#![allow(clippy::unwrap_used)]

mod gpus;
mod ranks;

use std::time::Duration;

use ranks::LONG;
use tensorwire::device::threads::{Settings, install, uuid};
use tensorwire::device::{Abort, Caching, Layout, Queue};
use tensorwire::{Deadline, DeviceId, Dtype, Group, ReduceOp, Tensor, Terms, Token};

/// The GPU of a rank: there are two, and they are dealt in turn unless all share one.
#[derive(Clone, Copy)]
struct Gpus(usize);

impl Gpus {
    fn of(self, group: &Group) -> DeviceId {
        if std::env::var_os("TEST_GPU").is_some() {
            return group.context().access().unwrap().gpus().unwrap()[0].id.clone();
        }
        // Thread ranks share the process, and whoever is first has installed them.
        let _ = install(Settings { gpus: 2, ..Settings::default() });
        DeviceId::Gpu(uuid(group.rank() % self.0))
    }
}

fn on_gpu<T: tensorwire::Element>(group: &Group, gpu: &DeviceId, values: &[T]) -> Tensor {
    let pool = group.context().pool(gpu).unwrap();
    let bytes = size_of_val(values);
    let span = tensorwire::Span::whole(pool.alloc(bytes).unwrap()).slice(0..bytes).unwrap();
    let tensor = Tensor::flat(span, T::DTYPE).unwrap();
    tensor.write(values).unwrap();
    tensor
}

fn queue(group: &Group, gpu: &DeviceId) -> Box<dyn Queue> {
    group.context().device(gpu).unwrap().queue().unwrap()
}

const SIZES: [usize; 5] = [0, 1, 9, 1000, 100_003];

/// Every kind, waited for.
fn everything(group: &Group, gpus: Gpus) {
    let gpu = gpus.of(group);
    let (me, world) = (group.rank() as i32, group.world() as i32);
    let mine = |rank: i32, count: usize| (0..count as i32).map(|i| rank * 1000 + i).collect::<Vec<_>>();
    let ints = |values: &[i32]| on_gpu(group, &gpu, values);
    let values = |tensor: &Tensor| tensor.to_vec::<i32>().unwrap();
    for count in SIZES {
        let tensor = ints(&mine(me, count));
        group.all_reduce(&tensor, ReduceOp::Sum).wait().unwrap();
        let sum: Vec<i32> = (0..count as i32).map(|i| (0..world).map(|rank| rank * 1000 + i).sum()).collect();
        assert!(values(&tensor) == sum, "all_reduce of {count}");
        for root in [0, world as usize - 1] {
            let tensor = ints(&mine(me, count));
            group.reduce(&tensor, ReduceOp::Sum, root).wait().unwrap();
            let expected = if root == me as usize { sum.clone() } else { mine(me, count) };
            assert!(values(&tensor) == expected, "reduce of {count} to {root}");
            let tensor = ints(&mine(me, count));
            group.broadcast(&tensor, root).wait().unwrap();
            assert!(values(&tensor) == mine(root as i32, count), "broadcast of {count} from {root}");

            let input = ints(&mine(me, count));
            let list = |at: usize| if at == me as usize { world } else { 0 };
            let outputs: Vec<Tensor> = (0..list(root)).map(|_| ints(&vec![0; count])).collect();
            group.gather(&outputs, &input, root).wait().unwrap();
            for (rank, output) in outputs.iter().enumerate() {
                assert!(values(output) == mine(rank as i32, count), "gather of {count}");
            }
            let inputs: Vec<Tensor> = (0..list(root)).map(|to| ints(&mine(to * 7 + 1, count))).collect();
            let output = ints(&vec![0; count]);
            group.scatter(&output, &inputs, root).wait().unwrap();
            assert!(values(&output) == mine(me * 7 + 1, count), "scatter of {count}");
        }
        let input = ints(&mine(me, count));
        let output = ints(&vec![0; count * world as usize]);
        group.all_gather_into(&output, &input).wait().unwrap();
        let all: Vec<i32> = (0..world).flat_map(|rank| mine(rank, count)).collect();
        assert!(values(&output) == all, "all_gather of {count}");

        // The same into the odd columns of a tensor.
        let wide = ints(&vec![-1; 2 * count * world as usize]);
        let odd = [count * world as usize];
        let layout = Layout::with_origin(&odd, &[2], 4, if odd == [0] { 0 } else { 4 }).unwrap();
        let columns = Tensor::new(wide.span().clone(), Dtype::I32, layout).unwrap();
        group.all_gather_into(&columns, &input).wait().unwrap();
        let spread: Vec<i32> = all.iter().flat_map(|&value| [-1, value]).collect();
        assert!(values(&wide) == spread, "all_gather of {count} into columns");

        let input = ints(&(0..world).flat_map(|to| mine(me * 10 + to, count)).collect::<Vec<_>>());
        let output = ints(&vec![0; count]);
        group.reduce_scatter_from(&output, &input, ReduceOp::Sum).wait().unwrap();
        let expected: Vec<i32> =
            (0..count as i32).map(|i| (0..world).map(|from| (from * 10 + me) * 1000 + i).sum()).collect();
        assert!(values(&output) == expected, "reduce_scatter of {count}");
        let output = ints(&vec![0; count * world as usize]);
        group.all_to_all_into(&output, &input).wait().unwrap();
        let expected: Vec<i32> = (0..world).flat_map(|from| mine(from * 10 + me, count)).collect();
        assert!(values(&output) == expected, "all_to_all of {count}");

        // Uneven: rank i gives count / (i + j + 1) to rank j.
        let size = |from: i32, to: i32| count / (from + to + 1) as usize;
        let inputs: Vec<Tensor> = (0..world).map(|to| ints(&mine(me * 10 + to, size(me, to)))).collect();
        let outputs: Vec<Tensor> = (0..world).map(|from| ints(&vec![0; size(from, me)])).collect();
        group.all_to_all(&outputs, &inputs).wait().unwrap();
        for (from, output) in (0..world).zip(&outputs) {
            assert!(values(output) == mine(from * 10 + me, size(from, me)), "uneven all_to_all of {count}");
        }
        let tensors: Vec<Tensor> = (0..3).map(|index| ints(&mine(me * 3 + index, count))).collect();
        group.all_reduce_multi(&tensors, ReduceOp::Sum).wait().unwrap();
        let sum: Vec<i32> =
            (0..count as i32).map(|i| (0..world * 3).map(|rank| rank * 1000 + i).sum()).collect();
        assert!(tensors.iter().all(|tensor| values(tensor) == sum), "all_reduce of 3 x {count}");
        // One on the host in between.
        let host = Tensor::private(&mine(me, count)).unwrap();
        group.all_reduce(&host, ReduceOp::Max).wait().unwrap();
        assert!(values(&host) == mine(world - 1, count));
    }
}

fn everything_on_one(group: &Group) {
    everything(group, Gpus(1));
}

fn everything_on_two(group: &Group) {
    everything(group, Gpus(2));
}

on_ranks!(one, 1, everything_on_one);
on_ranks!(two, 2, everything_on_one);
on_ranks!(two_apart, 2, everything_on_two);
on_ranks!(three, 3, everything_on_one);
on_ranks!(five, 5, everything_on_two);

/// On queues of the caller and of the group, and on the host in between.
fn on_queues(group: &Group) {
    let gpu = Gpus(1).of(group);
    let (me, world) = (group.rank() as i64, group.world() as i64);
    let sum = |of: i64| (0..world).map(|rank| rank + of).sum::<i64>();
    let mut first = queue(group, &gpu);
    let mut second = queue(group, &gpu);
    let mut works = Vec::new();
    for round in 0..100 {
        let a = on_gpu(group, &gpu, &vec![me + round; 500]);
        let b = on_gpu(group, &gpu, &vec![me + round + 1; 700]);
        works.push((group.all_reduce(&a, ReduceOp::Sum).on(&mut *first).unwrap(), a, round));
        works.push((group.all_reduce(&b, ReduceOp::Sum).on(&mut *second).unwrap(), b, round + 1));
        if round % 7 == 0 {
            let host = Tensor::private(&[me]).unwrap();
            group.all_reduce(&host, ReduceOp::Sum).wait().unwrap();
            assert_eq!(host.to_vec::<i64>().unwrap(), [sum(0)]);
        }
        // What one operation gave is what the next one takes, on a queue of the group's own.
        let c = on_gpu(group, &gpu, &vec![me; 300]);
        drop(group.all_reduce(&c, ReduceOp::Sum).on(&mut *first).unwrap());
        let work = group.all_reduce(&c, ReduceOp::Max).after(&mut *first).unwrap().start().unwrap();
        work.wait_on(&mut *second).unwrap();
        group.all_reduce(&c, ReduceOp::Sum).on(&mut *second).unwrap().wait().unwrap();
        assert_eq!(c.to_vec::<i64>().unwrap(), vec![sum(0) * world; 300]);
        assert!(work.error().is_none());
    }
    for (work, tensor, of) in works {
        work.wait().unwrap();
        assert!(tensor.to_vec::<i64>().unwrap().iter().all(|&value| value == sum(of)), "round {of}");
    }
}

on_ranks!(queues_of_two, 2, on_queues);
on_ranks!(queues_of_four, 4, on_queues);

/// A barrier, which has no tensors, behind what a queue of one rank has to do: started, waited for, and too late.
fn barriers_behind_queues(group: &Group) {
    let gpu = Gpus(1).of(group);
    let me = group.rank();
    let mut queue = queue(group, &gpu);
    let token = Tensor::private(&[0i32]).unwrap();

    let held = (me == 0).then(|| gpus::hold(group, &mut *queue));
    let work = group.barrier().after(&mut *queue).unwrap().start().unwrap();
    let error = work.wait_by(Deadline::after(Duration::from_millis(50))).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    match (&held, me) {
        (Some(held), _) => {
            group.recv(&token, 1).wait().unwrap();
            held.signal(1);
        }
        (None, 1) => group.send(&token, 0).wait().unwrap(),
        _ => {}
    }
    work.wait().unwrap();

    let held = (me == 0).then(|| gpus::hold(group, &mut *queue));
    if let Some(held) = &held {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                group.recv(&token, 1).wait().unwrap();
                held.signal(1);
            });
            group.barrier().after(&mut *queue).unwrap().wait().unwrap();
            assert_eq!(held.load(), 1, "the barrier did not wait for the queue");
        });
    } else {
        if me == 1 {
            group.send(&token, 0).wait().unwrap();
        }
        group.barrier().wait().unwrap();
    }

    let held = (me == 0).then(|| gpus::hold(group, &mut *queue));
    let ended = match me {
        0 => {
            let late = Deadline::after(Duration::from_millis(50));
            group.barrier().deadline(late).after(&mut *queue).unwrap().wait()
        }
        _ => group.barrier().deadline(Deadline::after(LONG)).wait(),
    };
    let error = ended.unwrap_err();
    match me {
        0 => assert!(error.is_timeout() && error.to_string().contains("the queue of this rank"), "{error}"),
        _ => assert!(error.to_string().contains("rank 0"), "{error}"),
    }
    held.inspect(|held| held.signal(1));
    group.barrier().wait().unwrap();
}

on_ranks!(barriers, 3, barriers_behind_queues);

/// Two loans of one owner, each awaited by a queue of its own. One is late. The other one gets what was lent.
fn one_late_loan_is_no_end_for_others(group: &Group) {
    let gpu = Gpus(1).of(group);
    let context = group.context();
    let done = Tensor::private(&[0i32]).unwrap();
    if group.rank() == 0 {
        let mut queue = queue(group, &gpu);
        let lent = [5, 6].map(|value| on_gpu(group, &gpu, &vec![value; 5000]));
        let held = gpus::hold(group, &mut *queue);
        let leases =
            lent.map(|lent| context.grant_after(lent.span(), &Terms::default(), &mut *queue).unwrap());
        for lease in &leases {
            let token = lease.token().to_bytes();
            group.send(&Tensor::private(&[token.len() as i32]).unwrap(), 1).wait().unwrap();
            group.send(&Tensor::private(&token).unwrap(), 1).wait().unwrap();
        }
        group.recv(&done, 1).wait().unwrap();
        held.signal(1);
        group.barrier().wait().unwrap();
        return;
    }
    let tokens = [0, 1].map(|_| {
        let len = Tensor::private(&[0i32]).unwrap();
        group.recv(&len, 0).wait().unwrap();
        let bytes = Tensor::private(&vec![0u8; len.to_vec::<i32>().unwrap()[0] as usize]).unwrap();
        group.recv(&bytes, 0).wait().unwrap();
        Token::from_bytes(&bytes.to_vec::<u8>().unwrap()).unwrap()
    });
    let (mut late, mut patient) = (queue(group, &gpu), queue(group, &gpu));
    let got = on_gpu(group, &gpu, &vec![0i32; 5000]);
    let soon = Deadline::after(Duration::from_millis(50));
    let first = context.redeem_on(&tokens[0], &mut *late, soon);
    let ended = first.and_then(|loan| {
        late.copy(got.span().view(), loan.span().view(), Caching::Keep)?;
        Ok(late.finish(&Abort::local(), Deadline::after(LONG))?)
    });
    assert!(ended.is_err(), "the data was not ready");
    // From here on the thread may have to wait itself: it must not wait for the token.
    group.send(&done, 0).wait().unwrap();
    let second = context.redeem_on(&tokens[1], &mut *patient, Deadline::after(LONG)).unwrap();
    patient.copy(got.span().view(), second.span().view(), Caching::Keep).unwrap();
    patient.finish(&Abort::local(), Deadline::after(LONG)).unwrap();
    assert!(got.to_vec::<i32>().unwrap() == [6; 5000]);
    drop(second);
    group.barrier().wait().unwrap();
}

on_ranks!(loans, 2, one_late_loan_is_no_end_for_others);
