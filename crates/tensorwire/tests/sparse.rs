//! All-reduce of sparse tensors: against a plain dictionary, bit by bit against dense ones, and what goes wrong.

#![allow(clippy::unwrap_used)]

mod ranks;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use ranks::random::Random;
use ranks::{LONG, as_processes, as_threads, context, describe, on_threads};
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Deadline, Dtype, Element, Error, Group, PeerFaultKind, ReduceOp, Sparse, Tensor};

const SUM: ReduceOp = ReduceOp::Sum;

fn tensor<T: Element>(keys: &[i64], rows: &[T], shape: &[u64]) -> Sparse {
    let width = rows.len().checked_div(keys.len()).unwrap_or(1);
    wide(keys, rows, shape, width)
}

fn wide<T: Element>(keys: &[i64], rows: &[T], shape: &[u64], width: usize) -> Sparse {
    let flat = Tensor::private(rows).unwrap();
    let rows = Tensor::contiguous(flat.span().clone(), T::DTYPE, &[keys.len(), width]).unwrap();
    Sparse::new(Tensor::private(keys).unwrap(), rows, shape).unwrap()
}

fn keys(result: &Sparse) -> Vec<i64> {
    result.keys().to_vec().unwrap()
}

/// A group of threads; `body` gives what each rank found.
fn group_of<T: Send>(world: usize, body: impl Fn(&Group) -> T + Sync) -> Vec<T> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    on_threads(world, |rank| {
        let builder = Group::builder().context(&context()).timeout(LONG);
        body(&builder.from_store(store.clone(), rank, world).unwrap())
    })
}

fn plain(group: &Group) {
    let (me, world) = (group.rank() as i64, group.world() as i64);
    for dense in [None, Some(true), Some(false)] {
        let call = |tensor: &Sparse, op| {
            let call = group.all_reduce_sparse(tensor, op);
            dense.map_or(call, |dense| group.all_reduce_sparse(tensor, op).dense(dense)).wait()
        };
        // Every rank has its own key, and all have key 100.
        let mine = tensor(&[me, 100], &[me as f32, 1.0, 10.0, me as f32], &[200]);
        let sum = call(&mine, SUM).unwrap();
        let mut expected: Vec<f32> = (0..world).flat_map(|rank| [rank as f32, 1.0]).collect();
        expected.extend([10.0 * world as f32, (0..world).sum::<i64>() as f32]);
        assert_eq!(keys(&sum), (0..world).chain([100]).collect::<Vec<_>>());
        assert_eq!(sum.rows().to_vec::<f32>().unwrap(), expected);
        assert_eq!((sum.shape(), sum.width(), sum.len()), (&[200][..], 2, world as usize + 1));
        assert_eq!(mine.rows().to_vec::<f32>().unwrap(), [me as f32, 1.0, 10.0, me as f32]);

        // An average is one of all ranks; a maximum only of those that have the key.
        let average = call(&mine, ReduceOp::Avg).unwrap();
        let halves: Vec<f32> = expected.iter().map(|value| value / world as f32).collect();
        assert_eq!(average.rows().to_vec::<f32>().unwrap(), halves);
        let most = call(&tensor(&[me, 100], &[-5i32, me as i32], &[200]), ReduceOp::Max).unwrap();
        assert_eq!(
            most.rows().to_vec::<i32>().unwrap(),
            (0..world).map(|_| -5).chain([world as i32 - 1]).collect::<Vec<_>>()
        );

        // No keys on some ranks, and on all.
        let some: &[i64] = if me == 0 { &[3] } else { &[] };
        let one = call(&wide(some, &vec![7u8; some.len() * 3], &[2, 2], 3), SUM).unwrap();
        assert_eq!((keys(&one), one.rows().to_vec::<u8>().unwrap()), (vec![3], vec![7, 7, 7]));
        let none = call(&wide::<f64>(&[], &[], &[1 << 20], 4), SUM).unwrap();
        assert_eq!((none.len(), none.rows().layout().shape()), (0, &[0, 4][..]));
    }
}

#[test]
fn plain_threads_3() {
    as_threads(3, plain);
}

#[test]
fn plain_threads_1() {
    as_threads(1, plain);
}

#[test]
fn plain_processes() {
    as_processes("plain_processes", 3, plain);
}

/// What the ranks have, drawn at random: 0 to 4 sparse dimensions, keys of each rank, and 0 to 3 dimensions of a row.
fn inputs() -> impl Strategy<Value = (Vec<u64>, Vec<Vec<i64>>, Vec<usize>)> {
    let sizes = prop_oneof![
        (1u64..600).prop_map(|size| vec![size]),
        prop::collection::vec(1u64..=5, 0..=4),
        prop::collection::vec(0u64..=9, 2..=3),
    ];
    let dims = prop_oneof![
        prop::sample::select(vec![0usize, 1, 2, 3, 16, 33]).prop_map(|width| vec![width]),
        prop::collection::vec(1usize..=4, 0..=3),
        prop::collection::vec(0usize..=3, 2..=3),
    ];
    (sizes, 1usize..=5, dims).prop_flat_map(|(shape, world, dims)| {
        let size = shape.iter().product::<u64>();
        let some = prop::collection::btree_set(0..size.max(1) as i64, 0..=(size as usize).min(300));
        let keys = some.prop_map(|keys| keys.into_iter().collect::<Vec<i64>>());
        (Just(shape), prop::collection::vec(keys, world), Just(dims))
    })
}

/// Integers of all ranks, as a dictionary has it.
#[test]
fn as_a_dictionary_does() {
    let mut runner = TestRunner::new(Config { cases: 96, ..Config::default() });
    let ops = prop::sample::select(vec![SUM, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max]);
    let dense = prop::sample::select(vec![None, Some(true), Some(false)]);
    runner
        .run(&(inputs(), ops, dense, any::<u64>()), |((shape, lists, dims), op, dense, seed)| {
            let width = dims.iter().product::<usize>();
            let mut random = Random(seed);
            let values: Vec<Vec<i64>> = lists
                .iter()
                .map(|keys| (0..keys.len() * width).map(|_| random.next() as i64).collect())
                .collect();
            let mut model: BTreeMap<i64, Vec<i64>> = BTreeMap::new();
            for (keys, rows) in lists.iter().zip(&values) {
                for (index, key) in keys.iter().enumerate() {
                    let row = &rows[index * width..(index + 1) * width];
                    model
                        .entry(*key)
                        .and_modify(|sum| sum.iter_mut().zip(row).for_each(|(a, &b)| *a = apply(op, *a, b)))
                        .or_insert_with(|| row.to_vec());
                }
            }
            for result in group_of(lists.len(), |group| {
                let (keys, values) = (&lists[group.rank()], &values[group.rank()]);
                let flat = Tensor::private(values).unwrap();
                let rows = Tensor::contiguous(flat.span().clone(), Dtype::I64, &rows_of(keys.len(), &dims));
                let keys = Tensor::private(keys).unwrap();
                let mine = Sparse::new(keys, rows.unwrap(), &shape).unwrap();
                let call = group.all_reduce_sparse(&mine, op);
                match dense {
                    Some(dense) => call.dense(dense).wait().unwrap(),
                    None => call.wait().unwrap(),
                }
            }) {
                prop_assert_eq!(result.shape(), &shape[..]);
                prop_assert_eq!(result.rows().layout().shape(), &rows_of(model.len(), &dims)[..]);
                prop_assert_eq!(keys(&result), model.keys().copied().collect::<Vec<_>>());
                prop_assert_eq!(
                    result.rows().to_vec::<i64>().unwrap(),
                    model.values().flatten().copied().collect::<Vec<_>>()
                );
            }
            Ok(())
        })
        .unwrap();
}

/// The shape of so many rows.
fn rows_of(count: usize, dims: &[usize]) -> Vec<usize> {
    [count].into_iter().chain(dims.iter().copied()).collect()
}

fn apply(op: ReduceOp, a: i64, b: i64) -> i64 {
    match op {
        ReduceOp::Product => a.wrapping_mul(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        _ => a.wrapping_add(b),
    }
}

/// Every type and reduction: by key and dense have the bits of a dense all_reduce.
#[test]
fn bits_of_a_dense_one() {
    const SIZE: usize = 90;
    const WIDTH: usize = 7;
    for world in [2usize, 5] {
        group_of(world, |group| {
            for dtype in Dtype::ALL {
                for op in ReduceOp::ALL.into_iter().filter(|op| op.check(dtype).is_ok()) {
                    let Some(identity) = op.identity(dtype) else {
                        let refused = sparse_of(group, dtype, SIZE, WIDTH).0;
                        assert!(group.all_reduce_sparse(&refused, op).dense(false).wait().is_ok());
                        let error = group.all_reduce_sparse(&refused, op).dense(true).wait().unwrap_err();
                        assert!(matches!(error, Error::Unsupported { .. } | Error::Peer(_)), "{error}");
                        continue;
                    };
                    let (mine, dense) = sparse_of(group, dtype, SIZE, WIDTH);
                    let span = group.alloc(SIZE * WIDTH * dtype.size()).unwrap();
                    let bytes: Vec<u8> = dense
                        .iter()
                        .flat_map(|row| row.clone().unwrap_or_else(|| identity.repeat(WIDTH)))
                        .collect();
                    span.write(0, &bytes).unwrap();
                    group.all_reduce(&Tensor::flat(span.clone(), dtype).unwrap(), op).wait().unwrap();
                    let expected = span.to_vec().unwrap();
                    for way in [false, true] {
                        let result = group.all_reduce_sparse(&mine, op).dense(way).wait().unwrap();
                        let rows = result.rows().span().to_vec().unwrap();
                        let row = WIDTH * dtype.size();
                        for (index, key) in keys(&result).into_iter().enumerate() {
                            let (got, want) =
                                (&rows[index * row..][..row], &expected[key as usize * row..][..row]);
                            assert_eq!(got, want, "{op} of {dtype} at {key}, dense: {way}");
                        }
                    }
                }
            }
        });
    }
}

/// Elements without NaN: which one a NaN is, is not promised. Gives the rows by key, too.
fn sparse_of(group: &Group, dtype: Dtype, size: usize, width: usize) -> (Sparse, Vec<Option<Vec<u8>>>) {
    let mut random = Random(group.rank() as u64 * 77 + u64::from(dtype as u8));
    let row = |random: &mut Random| -> Vec<u8> {
        (0..width)
            .flat_map(|_| {
                let bits = random.next();
                let sign = bits & 1 != 0;
                let small = (bits >> 8) % 100;
                let value = if sign { -(small as f32) } else { small as f32 } / 8.0;
                match dtype {
                    Dtype::Bool => vec![(bits & 1) as u8],
                    Dtype::F16 | Dtype::Complex32 => {
                        let part = |bits: u64| ((bits & 0x83ff) as u16 | 0x3400).to_ne_bytes();
                        let parts = if dtype == Dtype::F16 { 1 } else { 2 };
                        (0..parts).flat_map(|part_of| part(bits >> (16 * part_of))).collect()
                    }
                    Dtype::Bf16 => ((value.to_bits() >> 16) as u16).to_ne_bytes().to_vec(),
                    Dtype::F32 => value.to_ne_bytes().to_vec(),
                    Dtype::F64 => f64::from(value).to_ne_bytes().to_vec(),
                    Dtype::Complex64 => [value, value / 3.0].map(f32::to_ne_bytes).concat(),
                    Dtype::Complex128 => {
                        [value, value / 3.0].map(|part| f64::from(part).to_ne_bytes()).concat()
                    }
                    // Small numbers of any sign, and no NaN.
                    Dtype::F8E8M0Fnu => vec![(bits % 200) as u8],
                    _ if dtype.is_float() => vec![(bits & 0xb7) as u8 | u8::from(bits & 0x37 == 0)],
                    _ => bits.to_ne_bytes()[..dtype.size()].to_vec(),
                }
            })
            .collect()
    };
    let rows: Vec<Option<Vec<u8>>> =
        (0..size).map(|_| random.next().is_multiple_of(3).then(|| row(&mut random))).collect();
    let keys: Vec<i64> = (0..size).filter(|&key| rows[key].is_some()).map(|key| key as i64).collect();
    let bytes: Vec<u8> = rows.iter().flatten().flatten().copied().collect();
    let flat = Tensor::private(&bytes).unwrap();
    let values = Tensor::contiguous(flat.span().clone(), dtype, &[keys.len(), width]).unwrap();
    (Sparse::new(Tensor::private(&keys).unwrap(), values, &[size as u64]).unwrap(), rows)
}

/// What is large goes through slots in many rounds, and straight between results.
#[test]
fn many_keys() {
    group_of(3, |group| {
        let (me, world) = (group.rank() as i64, group.world() as i64);
        let count = 60_000i64;
        let own: Vec<i64> = (0..count).map(|index| index * (me + 2)).collect();
        let rows: Vec<f32> = own.iter().flat_map(|&key| [key as f32, 1.0, 0.5, me as f32]).collect();
        let size = (count * (world + 2)) as u64;
        let result = group.all_reduce_sparse(&tensor(&own, &rows, &[size]), SUM).wait().unwrap();
        let rows = result.rows().to_vec::<f32>().unwrap();
        let has = |rank: i64, key: i64| key % (rank + 2) == 0 && key / (rank + 2) < count;
        let all = keys(&result);
        assert_eq!(all, (0..size as i64).filter(|&key| (0..world).any(|r| has(r, key))).collect::<Vec<_>>());
        for (index, &key) in all.iter().enumerate() {
            let ranks = (0..world).filter(|&rank| has(rank, key)).count() as f32;
            let sum = (0..world).filter(|&rank| has(rank, key)).fold(0.0, |sum, _| sum + key as f32);
            let last = (0..world).filter(|&rank| has(rank, key)).sum::<i64>() as f32;
            assert_eq!(rows[index * 4..][..4], [sum, ranks, ranks * 0.5, last], "key {key}");
        }
    });
}

/// When bytes say that dense is cheaper it is dense, and that is told.
#[test]
fn dense_where_that_is_cheaper() {
    group_of(2, |group| {
        let all: Vec<i64> = (0..1000).collect();
        let full = tensor(&all, &vec![1.0f32; 1000], &[1000]);
        group.all_reduce_sparse(&full, SUM).wait().unwrap();
        let text = group.explain();
        assert!(text.contains("went dense: with so many keys"), "{text}");
    });
    group_of(2, |group| {
        let few = tensor(&[1, 2, 3], &[1.0f32; 3], &[1000]);
        let result = group.all_reduce_sparse(&few, SUM).wait().unwrap();
        assert_eq!(result.rows().to_vec::<f32>().unwrap(), [2.0; 3]);
        assert!(!group.explain().contains("dense"), "{}", group.explain());
    });
}

/// Operations that were started run in their order, with others between them.
#[test]
fn among_other_operations() {
    group_of(3, |group| {
        let (me, world) = (group.rank() as i64, group.world());
        let mut works = Vec::new();
        for round in 0..10i64 {
            let mine = tensor(&[me + round, 50], &[1i64, round], &[100]);
            works.push(group.all_reduce_sparse(&mine, SUM).start().unwrap());
            let dense = Tensor::private(&[round]).unwrap();
            group.all_reduce(&dense, SUM).wait().unwrap();
            assert_eq!(dense.to_vec::<i64>().unwrap(), [round * world as i64]);
        }
        for (round, work) in works.iter().enumerate() {
            let result = work.wait().unwrap();
            assert_eq!(result.rows().to_vec::<i64>().unwrap()[world], (round * world) as i64);
            assert!(work.result().unwrap().is_ok() && work.work().is_done());
        }
    });
}

/// Keys that are not as promised: every rank gets an error that names the rank, and the group goes on.
#[test]
fn bad_keys_are_told_to_all() {
    let cases: [(&[i64], &[u64], &str); 5] = [
        (&[3, 3], &[10], "key 3 at 1 is there twice"),
        (&[5, 3], &[10], "key 3 at 1 is less than the one before"),
        (&[5, 10], &[10], "key 10 at 1 is not from 0 to 9"),
        (&[-1, 5], &[10], "key -1 at 0 is not from 0 to 9"),
        (&[0, 1], &[1 << 40, 1 << 40], "has more keys than 2^63"),
    ];
    for (bad, shape, text) in cases {
        for error in group_of(3, |group| {
            let good = tensor(&[1, 2], &[1.0f32, 2.0], shape);
            let mine = if group.rank() == 1 { tensor(bad, &[1.0f32, 2.0], shape) } else { good };
            let error = group.all_reduce_sparse(&mine, SUM).wait().unwrap_err();
            let again = Tensor::private(&[1i32]).unwrap();
            group.all_reduce(&again, SUM).wait().unwrap();
            assert_eq!(again.to_vec::<i32>().unwrap(), [3]);
            (group.rank(), error)
        }) {
            let (rank, error) = error;
            assert!(error.to_string().contains(text), "{error}");
            let everybody = shape.len() > 1;
            match &error {
                Error::Misuse(_) => assert!(rank == 1 || everybody, "{error}"),
                Error::Peer(fault) => {
                    assert_eq!(fault.kind, PeerFaultKind::Failed);
                    assert!(fault.rank == Some(1) || everybody, "{error}");
                }
                other => unreachable!("{other}"),
            }
        }
    }
}

/// What a caller makes of a result needs memory, too: one rank that has none ends the operation on all ranks, also where the
/// last exchange is all that is left. What finishes it finds the rows.
#[test]
fn what_is_made_of_a_result_is_readied_before_the_end() {
    for dense in [false, true] {
        for error in group_of(3, |group| {
            let mine = tensor(&[group.rank() as i64, 7], &[1i32, 2], &[10]);
            let call = || group.all_reduce_sparse(&mine, SUM).dense(dense);
            let short = || Err(Error::io("memory for starts", std::io::ErrorKind::OutOfMemory));
            let error = call().prepared(move |_| short()).wait().map(|_| ()).unwrap_err();
            assert!(error.to_string().contains("memory for starts"), "{error}");
            let finished = Arc::new(AtomicU64::new(0));
            let readied = |is_short: bool| {
                let finished = finished.clone();
                move |result: &Sparse| -> Result<Box<dyn FnOnce() -> Result<(), Error>>, Error> {
                    assert_eq!(keys(result), [0, 1, 2, 7]);
                    if is_short {
                        return short();
                    }
                    let (rows, finished) = (result.rows().clone(), finished.clone());
                    Ok(Box::new(move || {
                        assert_eq!(rows.to_vec::<i32>()?, [1, 1, 1, 6]);
                        finished.fetch_add(1, Ordering::AcqRel);
                        Ok(())
                    }))
                }
            };
            let one_is_short = readied(group.rank() == 1);
            let error = call().prepared(one_is_short).start().unwrap().wait().unwrap_err();
            assert_eq!(finished.load(Ordering::Acquire), 0, "no rank has gone on");
            assert_eq!(call().prepared(readied(false)).start().unwrap().wait().unwrap().len(), 4);
            assert_eq!(finished.load(Ordering::Acquire), 1, "before anybody hears that it is over");
            call().prepared(readied(false)).wait().unwrap();
            assert_eq!(finished.load(Ordering::Acquire), 2);
            (group.rank(), error)
        }) {
            let (rank, error) = error;
            assert!(error.to_string().contains("memory for starts"), "{error}");
            match &error {
                Error::Io { .. } => assert_eq!(rank, 1, "{error}"),
                Error::Peer(fault) => {
                    assert_eq!((fault.kind, fault.rank), (PeerFaultKind::Failed, Some(1)), "{error}");
                }
                other => unreachable!("{other}"),
            }
        }
    }
}

type Run = fn(&Group) -> Result<Sparse, Error>;

/// Shapes, types and reductions that differ name the ranks.
#[test]
fn what_must_agree() {
    let all: [Run; 5] = [
        |g| g.all_reduce_sparse(&tensor(&[1], &[1.0f32], &[if g.rank() == 1 { 9 } else { 10 }]), SUM).wait(),
        |g| {
            g.all_reduce_sparse(&wide(&[1], &vec![1i32; 1 + g.rank() / 2], &[10], 1 + g.rank() / 2), SUM)
                .wait()
        },
        |g| {
            let shape: &[u64] = if g.rank() == 0 { &[2, 5] } else { &[10] };
            g.all_reduce_sparse(&tensor(&[1], &[1i32], shape), SUM).wait()
        },
        |g| {
            let op = if g.rank() == 2 { ReduceOp::Max } else { SUM };
            g.all_reduce_sparse(&tensor(&[1], &[1i32], &[10]), op).wait()
        },
        |g| match g.rank() {
            0 => g
                .all_reduce(&Tensor::private(&[1i32]).unwrap(), SUM)
                .wait()
                .map(|()| tensor(&[1], &[1i32], &[10])),
            _ => g.all_reduce_sparse(&tensor(&[1], &[1i32], &[10]), SUM).wait(),
        },
    ];
    for (case, (call, odd)) in all.into_iter().zip([1, 2, 0, 2, 0]).enumerate() {
        for error in group_of(3, |group| call(group).unwrap_err()) {
            let Error::Peer(fault) = &error else { unreachable!("case {case}: {error}") };
            assert_eq!(
                (fault.kind, fault.rank),
                (PeerFaultKind::Mismatch, Some(odd)),
                "case {case}: {error}"
            );
        }
    }
}

/// A rank that does not come: one deadline for all exchanges, and the next operation works.
#[test]
fn a_late_rank() {
    let come = AtomicU64::new(0);
    for (rank, error) in group_of(3, |group| {
        let mine = tensor(&[group.rank() as i64], &[1.0f32], &[10]);
        if group.rank() == 2 {
            while come.load(Ordering::Acquire) < 2 {
                std::thread::yield_now();
            }
        }
        let deadline = Deadline::after(Duration::from_millis(if group.rank() == 2 { 30_000 } else { 50 }));
        let error = group.all_reduce_sparse(&mine, SUM).deadline(deadline).wait().unwrap_err();
        come.fetch_add(1, Ordering::AcqRel);
        let result = group.all_reduce_sparse(&mine, SUM).wait().unwrap();
        assert_eq!(keys(&result), [0, 1, 2]);
        (group.rank(), error)
    }) {
        assert!(error.is_timeout() && error.ranks() == [2], "rank {rank}: {}", describe(&error));
    }
}

/// What cannot be used at all is refused where it is made.
#[test]
fn refused_at_once() {
    let keys = Tensor::private(&[1i64, 2]).unwrap();
    let three = Tensor::private(&[1.0f32; 3]).unwrap();
    assert!(Sparse::new(keys.clone(), three.clone(), &[10]).is_err());
    assert!(Sparse::new(three.clone(), three, &[10]).is_err());
    let narrow = Tensor::private(&[1i32, 2]).unwrap();
    assert!(Sparse::new(narrow, keys.clone(), &[10]).is_err());
    assert!(Sparse::new(keys.clone(), keys, &[10]).is_ok());
    group_of(1, |group| {
        let ints = tensor(&[1], &[1i32], &[10]);
        let error = group.all_reduce_sparse(&ints, ReduceOp::Avg).wait().unwrap_err();
        assert!(matches!(error, Error::Misuse(_)), "{error}");
    });
}

/// A work that is kept keeps the result, not what was reduced.
#[test]
fn a_work_lets_go_of_its_input() {
    group_of(2, |group| {
        let mine = tensor(&[1, 2], &[1.0f32, 2.0], &[10]);
        let region = Arc::downgrade(mine.rows().span().region());
        let work = group.all_reduce_sparse(&mine, SUM).start().unwrap();
        drop(mine);
        assert_eq!(work.wait().unwrap().len(), 2);
        assert!(region.upgrade().is_none());
        assert_eq!(work.wait().unwrap().len(), 2);
    });
}
