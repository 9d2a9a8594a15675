//! All-reduce of sparse tensors whose rows lie on GPUs: bit by bit what the host gives. The GPUs are threads
//! (`tensorwire::device::threads`); with TEST_GPU=1 all ranks share the first real GPU. Each body as threads and as processes.

#![allow(clippy::unwrap_used)]

mod ranks;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

use ranks::random::Random;
use ranks::{LONG, context, describe, on_threads};
use tensorwire::device::threads::{Settings, install, uuid};
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{DeviceId, Dtype, Error, Group, ReduceOp, Result, Span, Sparse, Tensor};

/// The GPU of a rank: so many are dealt in turn.
fn gpu_of(group: &Group, gpus: usize) -> DeviceId {
    if std::env::var_os("TEST_GPU").is_some() {
        return group.context().access().unwrap().gpus().unwrap()[0].id.clone();
    }
    // Thread ranks share the process, and whoever is first has installed them.
    let _ = install(Settings { gpus: 2, ..Settings::default() });
    DeviceId::Gpu(uuid(group.rank() % gpus))
}

fn room(group: &Group, device: &DeviceId, bytes: usize) -> Span {
    let pool = group.context().pool(device).unwrap();
    Span::whole(pool.alloc(bytes).unwrap()).slice(0..bytes).unwrap()
}

/// The same tensor in other memory.
fn moved(group: &Group, device: &DeviceId, tensor: &Tensor) -> Tensor {
    let span = room(group, device, tensor.byte_len());
    span.write(0, &tensor.span().to_vec().unwrap()[..tensor.byte_len()]).unwrap();
    Tensor::contiguous(span, tensor.dtype(), tensor.layout().shape()).unwrap()
}

/// Some rows of this rank, on the host.
fn on_host(group: &Group, dtype: Dtype, size: u64, width: usize, seed: u64) -> Sparse {
    let mut random = Random(seed * 100 + group.rank() as u64 + 1);
    let keys: Vec<i64> = (0..size as i64).filter(|_| random.below(3) == 0).collect();
    rows_of(group, dtype, &keys, size, width, &mut random)
}

/// Rows of these keys, on the host.
fn rows_of(
    group: &Group,
    dtype: Dtype,
    keys: &[i64],
    size: u64,
    width: usize,
    random: &mut Random,
) -> Sparse {
    // Small numbers of all types; bools are 0 or 1.
    let mask = if dtype == Dtype::Bool { 1 } else { 0x3f };
    let bytes: Vec<u8> =
        (0..keys.len() * width * dtype.size()).map(|_| random.below(256) as u8 & mask).collect();
    let span = room(group, &DeviceId::Host, bytes.len());
    span.write(0, &bytes).unwrap();
    let rows = Tensor::contiguous(span, dtype, &[keys.len(), width]).unwrap();
    Sparse::new(Tensor::private(keys).unwrap(), rows, &[size]).unwrap()
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    tensor.span().to_vec().unwrap()[..tensor.byte_len()].to_vec()
}

/// Every type and operation, by key and dense, with keys on either side.
fn like_the_host(group: &Group, gpus: usize) {
    let gpu = gpu_of(group, gpus);
    let mut seed = 0;
    for dtype in Dtype::ALL {
        for op in ReduceOp::ALL.into_iter().filter(|op| op.check(dtype).is_ok()) {
            for (size, width, dense) in [(40, 3, Some(false)), (17, 16, None), (33, 5, Some(true))] {
                seed += 1;
                if dense == Some(true) && op.identity(dtype).is_none() {
                    continue;
                }
                let host = on_host(group, dtype, size, width, seed);
                let reduced = |tensor: &Sparse| {
                    let call = group.all_reduce_sparse(tensor, op);
                    dense
                        .map_or(call, |dense| group.all_reduce_sparse(tensor, op).dense(dense))
                        .wait()
                        .unwrap()
                };
                let expected = reduced(&host);
                let rows = moved(group, &gpu, host.rows());
                for keys in [host.keys().clone(), moved(group, &gpu, host.keys())] {
                    let got = reduced(&Sparse::new(keys.clone(), rows.clone(), host.shape()).unwrap());
                    let what = format!("{op} of {dtype}, dense {dense:?}");
                    assert_eq!(bytes(got.keys()), bytes(expected.keys()), "{what}");
                    assert_eq!(bytes(got.rows()), bytes(expected.rows()), "{what}");
                    assert_eq!(got.rows().span().device(), gpu);
                    assert_eq!(got.keys().span().device() == gpu, keys.span().device() == gpu, "{what}");
                }
                assert_eq!(bytes(&rows), bytes(host.rows()), "the input stays as it is");
            }
        }
    }
}

/// Started, in memory of the caller's, behind what is on a queue, between other operations.
fn started(group: &Group, gpus: usize) {
    let gpu = gpu_of(group, gpus);
    let mut queue = group.context().device(&gpu).unwrap().queue().unwrap();
    let flat = Tensor::flat(room(group, &gpu, 4000), Dtype::F32).unwrap();
    flat.write(&[1.0f32; 1000]).unwrap();
    for round in 0..6u64 {
        let host = on_host(group, Dtype::F32, 500, 32, round);
        let expected = group.all_reduce_sparse(&host, ReduceOp::Sum).wait().unwrap();
        let rows = moved(group, &gpu, host.rows());
        let late =
            Tensor::contiguous(room(group, &gpu, rows.byte_len()), Dtype::F32, &[host.len(), 32]).unwrap();
        queue.copy(late.span().view(), rows.span().view(), Default::default()).unwrap();
        let tensor = Sparse::new(host.keys().clone(), late, host.shape()).unwrap();
        let asked = Arc::new(AtomicUsize::new(0));
        let (context, there, count) = (group.context().clone(), gpu.clone(), asked.clone());
        let memory = move |rows: usize| -> Result<Tensor> {
            count.store(rows, Ordering::SeqCst);
            let bytes = rows * 32 * 4;
            let span = Span::whole(context.pool(&there)?.alloc(bytes)?).slice(0..bytes)?;
            Tensor::contiguous(span, Dtype::F32, &[rows, 32])
        };
        let before = group.all_reduce(&flat, ReduceOp::Avg).start().unwrap();
        let call = group.all_reduce_sparse(&tensor, ReduceOp::Sum).dense(round % 2 == 0).rows_in(memory);
        let work = call.after(&mut *queue).unwrap().start().unwrap();
        let behind = group.all_reduce(&flat, ReduceOp::Avg).start().unwrap();
        let got = work.wait().unwrap();
        before.wait().unwrap();
        behind.wait().unwrap();
        assert_eq!(asked.load(Ordering::SeqCst), expected.len());
        assert_eq!(bytes(got.rows()), bytes(expected.rows()), "round {round}");
        assert!(flat.to_vec::<f32>().unwrap() == [1.0; 1000]);
    }
}

/// One rank cannot go on: all hear of it, and the group works as before.
fn troubled(group: &Group, gpus: usize) {
    let gpu = gpu_of(group, gpus);
    let last = group.world() - 1;
    let host = on_host(group, Dtype::F32, 50, 4, 9);
    let rows = moved(group, &gpu, host.rows());
    let good = Sparse::new(host.keys().clone(), rows.clone(), host.shape()).unwrap();
    let expected = group.all_reduce_sparse(&good, ReduceOp::Sum).wait().unwrap();
    for trouble in 0..4 {
        let call = group.all_reduce_sparse(&good, ReduceOp::Sum).dense(trouble == 3);
        let ended = match trouble {
            // Keys that do not ascend; no memory for the result; memory of another shape.
            0 if group.rank() == last => {
                let keys: Vec<i64> = (0..host.len() as i64).rev().collect();
                let bad = Sparse::new(Tensor::private(&keys).unwrap(), rows.clone(), host.shape()).unwrap();
                group.all_reduce_sparse(&bad, ReduceOp::Sum).dense(false).wait()
            }
            1 | 3 if group.rank() == last => {
                call.rows_in(|_| Err(Error::io("memory for rows", std::io::ErrorKind::OutOfMemory))).wait()
            }
            2 if group.rank() == last => {
                let flat = moved(group, &DeviceId::Host, &rows);
                call.rows_in(move |_| Ok(flat.clone())).wait()
            }
            _ => call.wait(),
        };
        let (kind, why) = [
            ("Misuse", "less than the one before"),
            ("Io", "memory for rows: out of memory"),
            ("Misuse", "rows of a sparse result, of shape"),
            ("Io", "memory for rows: out of memory"),
        ][trouble];
        let kind = if group.rank() == last { kind.into() } else { format!("Failed {last} | rank {last} ") };
        let text = describe(&ended.map(|result| result.len()).unwrap_err());
        assert!(text.starts_with(&kind) && text.contains(why), "trouble {trouble}: {text}");
        let again = group.all_reduce_sparse(&good, ReduceOp::Sum).wait().unwrap();
        assert_eq!(bytes(again.rows()), bytes(expected.rows()), "after trouble {trouble}");
    }
    // Rows on a GPU here, and on the host there.
    let tensor = if group.rank() == last { &host } else { &good };
    let error = group.all_reduce_sparse(tensor, ReduceOp::Sum).wait().unwrap_err().to_string();
    assert!(error.contains("on a GPU"), "{error}");
}

/// Random worlds, shapes, densities and reductions: what the host gives.
#[test]
fn random() {
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().subsec_nanos().into();
    let seed = std::env::var("TEST_SEED").map_or(clock, |seed| seed.parse().unwrap());
    println!("TEST_SEED={seed}");
    let mut dice = Random(seed);
    for case in 0..40 {
        let (world, gpus) = (1 + dice.below(5), 1 + dice.below(2));
        let (shape, dims) = shapes(&mut dice);
        let (size, width) = (shape.iter().product::<u64>(), dims.iter().product());
        let dtype = [Dtype::F32, Dtype::Bf16, Dtype::I8, Dtype::F64, Dtype::Bool][dice.below(5)];
        let op = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Product, ReduceOp::Min][dice.below(4)];
        let dense = [None, Some(true), Some(false)][dice.below(3)];
        // One key in so many; some ranks have none.
        let rare: Vec<usize> = (0..world).map(|_| [1, 2, 5, 50, usize::MAX][dice.below(5)]).collect();
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        on_threads(world, |rank| {
            let builder = Group::builder().context(&context()).timeout(LONG);
            let group = builder.from_store(store.clone(), rank, world).unwrap();
            let mut random = Random(seed ^ (case * 10 + rank as u64 + 1));
            let keys: Vec<i64> = (0..size as i64).filter(|_| random.below(rare[rank]) == 0).collect();
            let flat = rows_of(&group, dtype, &keys, size, width, &mut random);
            let rows: Vec<usize> = [keys.len()].into_iter().chain(dims.iter().copied()).collect();
            let rows = Tensor::contiguous(flat.rows().span().clone(), dtype, &rows).unwrap();
            let host = Sparse::new(flat.keys().clone(), rows, &shape).unwrap();
            let gpu = gpu_of(&group, gpus);
            let keys = match random.below(2) {
                0 => host.keys().clone(),
                _ => moved(&group, &gpu, host.keys()),
            };
            let there = Sparse::new(keys, moved(&group, &gpu, host.rows()), host.shape()).unwrap();
            let [expected, got] = [&host, &there].map(|tensor| {
                let call = group.all_reduce_sparse(tensor, op);
                dense.map_or(call, |dense| group.all_reduce_sparse(tensor, op).dense(dense)).wait().unwrap()
            });
            let what = format!("case {case}: {shape:?} {dims:?}");
            assert_eq!(bytes(got.keys()), bytes(expected.keys()), "{what}");
            assert_eq!(bytes(got.rows()), bytes(expected.rows()), "{what}");
            assert_eq!(got.shape(), shape, "{what}");
            assert_eq!(got.rows().layout().shape()[1..], dims, "{what}");
        });
    }
}

/// 0 to 4 sparse dimensions and 0 to 3 dense ones; or one of each that is larger.
fn shapes(dice: &mut Random) -> (Vec<u64>, Vec<usize>) {
    if dice.below(3) == 0 {
        return (vec![1 + dice.below(700) as u64], vec![[0, 1, 2, 3, 16, 33][dice.below(6)]]);
    }
    // Sometimes there is no element in a dimension.
    let mut size = |most: usize| if dice.below(20) == 0 { 0 } else { 1 + dice.below(most) };
    let (sparse, dense) = (size(5) % 5, size(4) % 4);
    ((0..sparse).map(|_| size(5) as u64).collect(), (0..dense).map(|_| size(4)).collect())
}

/// More keys than a list of rows is made for at once, and one rank that has no memory from the start.
fn large(group: &Group, gpus: usize) {
    let gpu = gpu_of(group, gpus);
    let me = group.rank() as i64;
    let size = (2 << 20) + 100;
    let keys: Vec<i64> = (0..size).filter(|key| key % 1000 == me || *key == (1 << 20) + 7).collect();
    let host = rows_of(group, Dtype::I8, &keys, size as u64, 1, &mut Random(me as u64 + 1));
    let there = Sparse::new(host.keys().clone(), moved(group, &gpu, host.rows()), host.shape()).unwrap();
    let by_key = group.all_reduce_sparse(&host, ReduceOp::Sum).dense(false).wait().unwrap();
    for tensor in [&host, &there] {
        let dense = group.all_reduce_sparse(tensor, ReduceOp::Sum).dense(true).wait().unwrap();
        assert_eq!(bytes(dense.keys()), bytes(by_key.keys()));
        assert_eq!(bytes(dense.rows()), bytes(by_key.rows()));
        let why = (me == 0).then(|| Error::io("coalescing a tensor", std::io::ErrorKind::OutOfMemory));
        let error =
            group.all_reduce_sparse(tensor, ReduceOp::Sum).refused(why).wait().unwrap_err().to_string();
        assert!(error.contains("coalescing a tensor") && error.contains("memory"), "{error}");
    }
}

/// A body as threads of one process, with one or two GPUs, and as processes.
macro_rules! each_way {
    ($($body:ident: $threads:ident $two:ident $processes:ident)*) => {$(
        #[test]
        fn $threads() {
            ranks::as_threads(3, |group| $body(group, 1));
        }

        #[test]
        fn $two() {
            ranks::as_threads(4, |group| $body(group, 2));
        }

        #[test]
        fn $processes() {
            ranks::as_processes(stringify!($processes), 3, |group| $body(group, 1));
        }
    )*};
}

each_way! {
    like_the_host: like_the_host_threads like_the_host_on_two_gpus like_the_host_processes
    started: started_threads started_on_two_gpus started_processes
    troubled: troubled_threads troubled_on_two_gpus troubled_processes
    large: large_threads large_on_two_gpus large_processes
}
