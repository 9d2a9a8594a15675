//! Every collective, against what it should give; each body as threads and as processes.

#![allow(clippy::unwrap_used)]

mod ranks;

use tensorwire::collective::Path;
use tensorwire::device::Layout;
use tensorwire::{Dtype, Group, ReduceOp, Span, Tensor};

fn ints(values: &[i32]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let span = Span::whole(tensorwire::device::host::private(bytes.len()).unwrap());
    span.write(0, &bytes).unwrap();
    Tensor::flat(span, Dtype::I32).unwrap()
}

fn values(tensor: &Tensor) -> Vec<i32> {
    let bytes = tensor.span().to_vec().unwrap();
    bytes.chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect()
}

const SIZES: [usize; 7] = [0, 1, 8, 9, 1000, 5000, 100_003];

fn everything(group: &Group) {
    let (me, world) = (group.rank() as i32, group.world() as i32);
    let mine = |rank: i32, count: usize| (0..count as i32).map(|i| rank * 1000 + i).collect::<Vec<_>>();
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
        group.barrier().wait().unwrap();
    }
    for count in [8, 1000, 100_003] {
        let shared = |values: &[i32]| {
            let span = group.alloc(values.len() * 4).unwrap();
            span.write(0, &values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>()).unwrap();
            Tensor::flat(span, Dtype::I32).unwrap()
        };
        let tensor = shared(&mine(me, count));
        group.all_reduce(&tensor, ReduceOp::Max).via(Path::Direct).wait().unwrap();
        assert!(values(&tensor) == mine(world - 1, count));
        let (input, output) = (shared(&mine(me, count)), ints(&vec![0; count * world as usize]));
        group.all_gather_into(&output, &input).via(Path::Direct).wait().unwrap();
        let all: Vec<i32> = (0..world).flat_map(|rank| mine(rank, count)).collect();
        assert!(values(&output) == all, "direct all_gather of {count}");
    }
    for path in [Path::Inline, Path::OneShot, Path::Staged] {
        let tensor = ints(&mine(me, 8));
        group.all_reduce(&tensor, ReduceOp::Max).via(path).wait().unwrap();
        assert!(values(&tensor) == mine(world - 1, 8));
    }
    let works: Vec<_> = (0..20)
        .map(|step| {
            let tensor = ints(&mine(me + step, 100));
            (group.all_reduce(&tensor, ReduceOp::Max).start().unwrap(), tensor, step)
        })
        .collect();
    for (work, tensor, step) in works {
        work.wait().unwrap();
        assert!(values(&tensor) == mine(world - 1 + step, 100));
    }
}

on_ranks!(one, 1, everything);
on_ranks!(two, 2, everything);
on_ranks!(three, 3, everything);
on_ranks!(five, 5, everything);
