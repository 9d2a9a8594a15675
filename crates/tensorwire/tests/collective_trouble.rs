//! What happens when ranks do not call the same, come late, or are slow: everybody gets an error that names who and
//! what, nobody hangs, no result is wrong, and the group goes on where it can.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod model;
mod ranks;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use model::op::{Op, What, any_op};
use model::{Dice, Model, private};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use ranks::{LONG, context, describe, on_threads};
use tensorwire::collective::{Call, Path, hooks};
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Deadline, Dtype, Error, Group, ReduceOp, Result, Tensor, Work};

/// Hooks belong to the whole process, and time-outs are best seen alone: these tests take turns.
fn turn() -> Turn {
    static TURN: Mutex<()> = Mutex::new(());
    Turn { _guard: TURN.lock().unwrap_or_else(PoisonError::into_inner) }
}

struct Turn {
    _guard: MutexGuard<'static, ()>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        hooks::clear();
    }
}

/// Runs a body on the ranks of a new group, as threads.
fn with_group<T: Send>(world: usize, body: impl Fn(&Group) -> T + Sync) -> Vec<T> {
    let store = Arc::new(MemoryStore::new()) as Arc<dyn Store>;
    on_threads(world, |rank| {
        let builder = Group::builder().context(&context()).timeout(LONG);
        let group = builder.from_store(store.clone(), rank, world).unwrap();
        body(&group)
    })
}

/// The numbers of a rank: rank * 1000, rank * 1000 + 1, ...
fn numbers(rank: usize, count: usize) -> Vec<i32> {
    (0..count).map(|index| (rank * 1000 + index) as i32).collect()
}

fn tensor(values: &[i32]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Tensor::flat(private(&bytes), Dtype::I32).unwrap()
}

fn shared(group: &Group, values: &[i32]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let span = group.alloc(bytes.len()).unwrap();
    span.write(0, &bytes).unwrap();
    Tensor::flat(span, Dtype::I32).unwrap()
}

fn values(tensor: &Tensor) -> Vec<i32> {
    let bytes = tensor.span().to_vec().unwrap();
    bytes.chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect()
}

fn sums(world: usize, count: usize) -> Vec<i32> {
    (0..count).map(|index| (0..world).map(|rank| (rank * 1000 + index) as i32).sum()).collect()
}

fn soon(millis: u64) -> Deadline {
    Deadline::after(Duration::from_millis(millis))
}

/// Whether the group works.
fn works(group: &Group) {
    for count in [1, 3000, 300_000] {
        let tensor = tensor(&numbers(group.rank(), count));
        group.all_reduce(&tensor, ReduceOp::Sum).wait().unwrap();
        assert!(values(&tensor) == sums(group.world(), count), "all_reduce of {count} after trouble");
    }
    group.barrier().wait().unwrap();
}

// ---- Ranks that do not call the same.

/// Zeros of a type; memory that lives as long as the test.
fn zeros(dtype: Dtype, count: usize) -> Tensor {
    Tensor::flat(private(&vec![0; count * dtype.size()]), dtype).unwrap()
}

fn list(dtype: Dtype, counts: &[usize]) -> Vec<Tensor> {
    counts.iter().map(|&count| zeros(dtype, count)).collect()
}

type Make = for<'a> fn(&'a Group) -> Call<'a>;

const F: Dtype = Dtype::F32;
const SUM: ReduceOp = ReduceOp::Sum;

/// What all but one call, what that one calls, and what both texts must say.
const PAIRS: [(Make, Make, &str, &str); 27] = [
    (
        |g| g.all_reduce(&zeros(F, 10), SUM),
        |g| g.broadcast(&zeros(F, 10), 0),
        "all_reduce of 10 float32 (SUM)",
        "broadcast of 10 float32 from rank 0",
    ),
    (
        |g| g.all_reduce(&zeros(F, 10), SUM),
        |g| g.all_reduce(&zeros(Dtype::I32, 10), SUM),
        "10 float32",
        "10 int32",
    ),
    (|g| g.all_reduce(&zeros(F, 10), SUM), |g| g.all_reduce(&zeros(F, 11), SUM), "10 float32", "11 float32"),
    (|g| g.all_reduce(&zeros(F, 0), SUM), |g| g.all_reduce(&zeros(F, 1), SUM), "0 float32", "1 float32"),
    (
        |g| g.all_reduce(&zeros(F, 2), SUM),
        |g| g.all_reduce(&zeros(F, 700_000), SUM),
        "2 float32",
        "700000 float32",
    ),
    (
        |g| g.all_reduce(&zeros(F, 700_000), SUM),
        |g| g.all_reduce(&zeros(F, 2), SUM),
        "700000 float32",
        "2 float32",
    ),
    (
        |g| g.all_reduce(&zeros(F, 300_000), SUM),
        |g| g.all_reduce(&zeros(F, 300_001), SUM),
        "300000 float32",
        "300001 float32",
    ),
    (|g| g.all_reduce(&zeros(F, 10), SUM), |g| g.all_reduce(&zeros(F, 10), ReduceOp::Max), "(SUM)", "(MAX)"),
    (
        |g| g.all_reduce(&zeros(F, 10), ReduceOp::PremulSum(1.5)),
        |g| g.all_reduce(&zeros(F, 10), ReduceOp::PremulSum(1.25)),
        "(PREMUL_SUM",
        "factor",
    ),
    (|g| g.broadcast(&zeros(F, 10), 0), |g| g.broadcast(&zeros(F, 10), 2), "from rank 0", "from rank 2"),
    (
        |g| g.broadcast(&zeros(F, 900_000), 0),
        |g| g.broadcast(&zeros(F, 900_000), 1),
        "from rank 0",
        "from rank 1",
    ),
    (|g| g.reduce(&zeros(F, 10), SUM, 0), |g| g.reduce(&zeros(F, 10), SUM, 1), "to rank 0", "to rank 1"),
    (
        |g| g.reduce(&zeros(F, 99_000), SUM, 0),
        |g| g.reduce(&zeros(F, 99_000), SUM, 2),
        "to rank 0",
        "to rank 2",
    ),
    (
        |g| g.gather(&list(F, if g.rank() == 0 { &[5; 3] } else { &[] }), &zeros(F, 5), 0),
        |g| g.gather(&list(F, if g.rank() == 2 { &[5; 3] } else { &[] }), &zeros(F, 5), 2),
        "to rank 0",
        "to rank 2",
    ),
    (
        |g| g.scatter(&zeros(F, 5), &list(F, if g.rank() == 0 { &[5; 3] } else { &[] }), 0),
        |g| g.scatter(&zeros(F, 5), &list(F, if g.rank() == 1 { &[5; 3] } else { &[] }), 1),
        "from rank 0",
        "from rank 1",
    ),
    (
        |g| g.gather(&list(F, if g.rank() == 0 { &[5; 3] } else { &[] }), &zeros(F, 5), 0),
        |g| g.gather(&list(F, if g.rank() == 0 { &[6; 3] } else { &[] }), &zeros(F, 6), 0),
        "5 float32",
        "6 float32",
    ),
    (
        |g| g.all_reduce(&zeros(F, 100), SUM),
        |g| g.all_reduce(&zeros(F, 100), SUM).via(Path::Staged),
        "100 float32",
        "through staged",
    ),
    (
        |g| g.all_gather_into(&zeros(F, 30), &zeros(F, 10)),
        |g| g.all_to_all_into(&zeros(F, 30), &zeros(F, 30)),
        "all_gather",
        "all_to_all",
    ),
    (
        |g| g.all_gather(&list(F, &[3, 2, 3]), &zeros(F, [3, 2, 3][g.rank()])),
        |g| g.all_gather(&list(F, &[2, 2, 4]), &zeros(F, [2, 2, 4][g.rank()])),
        "all_gather",
        "other sizes of parts",
    ),
    (
        |g| g.all_gather(&list(F, &[3, 2, 3]), &zeros(F, [3, 2, 3][g.rank()])),
        |g| g.all_gather(&list(F, &[3, 2, 4]), &zeros(F, [3, 2, 4][g.rank()])),
        "8 float32",
        "9 float32",
    ),
    (
        |g| g.reduce_scatter(&zeros(F, [3, 2, 3][g.rank()]), &list(F, &[3, 2, 3]), SUM),
        |g| g.reduce_scatter(&zeros(F, [2, 2, 4][g.rank()]), &list(F, &[2, 2, 4]), SUM),
        "reduce_scatter",
        "other sizes of parts",
    ),
    (
        |g| g.all_reduce_multi(&list(F, &[10, 10]), SUM),
        |g| g.all_reduce_multi(&list(F, &[10]), SUM),
        "10 float32",
        "number of tensors",
    ),
    (
        |g| g.all_to_all(&list(F, &[2, 2, 2]), &list(F, &[2, 2, 2])),
        |g| g.all_to_all_into(&zeros(F, 6), &zeros(F, 6)),
        "all_to_all",
        "2 float32",
    ),
    (
        |g| g.all_to_all(&list(F, &[2, 2, 2]), &list(F, &[2, 2, 2])),
        |g| g.all_to_all(&list(Dtype::I32, &[2, 2, 2]), &list(Dtype::I32, &[2, 2, 2])),
        "float32",
        "int32",
    ),
    (
        |g| g.all_to_all(&list(F, &[2, 2, 2]), &list(F, &[2, 2, 2])),
        |g| g.all_reduce(&zeros(F, 2), SUM),
        "all_to_all",
        "all_reduce",
    ),
    (
        |g| g.reduce_scatter_from(&zeros(F, 99_000), &zeros(F, 297_000), SUM),
        |g| g.all_reduce(&zeros(F, 297_000), SUM),
        "reduce_scatter of 99000",
        "all_reduce of 297000",
    ),
    (
        |g| g.broadcast(&zeros(F, 10), 0),
        |g| g.gather(&list(F, if g.rank() == 0 { &[5; 3] } else { &[] }), &zeros(F, 5), 0),
        "broadcast",
        "gather",
    ),
];

/// Every rank hears of it, at once or at its next operation.
fn expect_mismatch(errors: &[(usize, Error)], odd: usize, (one, other): (&str, &str)) {
    for (rank, error) in errors {
        let text = describe(error);
        assert!(text.starts_with("Mismatch"), "rank {rank}: {text}");
        assert!(
            text.contains(one) && text.contains(other),
            "rank {rank}: {one:?} and {other:?} are not in {text}"
        );
        assert!(text.contains(&format!("rank {odd} (host ")) && text.contains(", pid "), "{text}");
        let named = (0..3).filter(|rank| text.contains(&format!("rank {rank} (host "))).count();
        assert!(named >= 2, "both sides are named in {text}");
    }
}

#[test]
fn other_operations_are_told_to_all() {
    let _turn = turn();
    for (index, (normal, other, one, two)) in PAIRS.into_iter().enumerate() {
        for odd in [index % 3, (index + 1) % 3] {
            let since = Instant::now();
            let errors = with_group(3, |group| {
                let make = if group.rank() == odd { other } else { normal };
                let first = make(group).wait();
                let error = first.and_then(|()| group.barrier().wait()).unwrap_err();
                // It stays so.
                assert!(matches!(group.check(), Err(Error::Peer(_))));
                assert_eq!(describe(&group.barrier().wait().unwrap_err()), describe(&error));
                (group.rank(), error)
            });
            expect_mismatch(&errors, odd, (one, two));
            assert!(since.elapsed() < LONG / 2, "pair {index} took {:?}", since.elapsed());
        }
    }
}

#[test]
fn a_barrier_against_a_collective_and_another_order() {
    let _turn = turn();
    for odd in 0..3 {
        let errors = with_group(3, |group| {
            let odd = group.rank() == odd;
            let all = || group.all_reduce(&zeros(F, 10), SUM).wait();
            let first = if odd { group.barrier().wait() } else { all() };
            (group.rank(), first.and_then(|()| group.barrier().wait()).unwrap_err())
        });
        expect_mismatch(&errors, odd, ("barrier", "all_reduce of 10 float32"));
        let errors = with_group(3, |group| {
            let broadcast = || group.broadcast(&zeros(F, 10), 1).wait();
            let gather = || {
                let outputs = list(F, if group.rank() == 1 { &[10; 3] } else { &[] });
                group.gather(&outputs, &zeros(F, 10), 1).wait()
            };
            let both = if group.rank() == odd {
                gather().and_then(|()| broadcast())
            } else {
                broadcast().and_then(|()| gather())
            };
            (group.rank(), both.and_then(|()| group.barrier().wait()).unwrap_err())
        });
        expect_mismatch(&errors, odd, ("broadcast of 10", "gather of 10"));
    }
}

/// What one rank gives must be what another has room for. Only all_to_all has such sizes.
#[test]
fn parts_that_do_not_fit() {
    let _turn = turn();
    let errors = with_group(3, |group| {
        let mut room = vec![4; 3];
        if group.rank() == 1 {
            room[2] = 5;
        }
        let error = group.all_to_all(&list(F, &room), &list(F, &[4; 3])).wait().unwrap_err();
        let text = describe(&error);
        works(group);
        text
    });
    for (rank, text) in errors.iter().enumerate() {
        assert!(
            text.contains("rank 2 (host ") && text.contains("gives 4 float32 elements to rank 1 (host "),
            "{text}"
        );
        assert!(text.contains("room for 5"), "{text}");
        assert_eq!(text.starts_with("Misuse"), rank == 1, "{text}");
    }
}

// ---- Ranks that come late.

/// Holds a rank at a point until it is let go.
struct Gate {
    /// Whether somebody was held, and how many must say that it may go on.
    state: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl Gate {
    fn new(keys: usize) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new((false, keys)), changed: Condvar::new() })
    }

    /// Holds whoever is at the point, the first time.
    fn hold_at(self: &Arc<Self>, place: usize, number: u32, step: usize) {
        let gate = self.clone();
        hooks::set(move |point| {
            if (point.place, point.number, point.step) == (place, number, step) && !gate.is_held() {
                let mut state = gate.state.lock().unwrap();
                state.0 = true;
                gate.changed.notify_all();
                while state.1 > 0 {
                    state = gate.changed.wait_timeout(state, LONG).unwrap().0;
                }
            }
        });
    }

    fn is_held(&self) -> bool {
        self.state.lock().unwrap().0
    }

    fn wait_until_held(&self) {
        let mut state = self.state.lock().unwrap();
        while !state.0 {
            state = self.changed.wait_timeout(state, LONG).unwrap().0;
        }
    }

    /// One of those who hold it lets go.
    fn open(&self) {
        let mut state = self.state.lock().unwrap();
        state.1 = state.1.saturating_sub(1);
        self.changed.notify_all();
    }
}

#[test]
fn a_time_out_says_who_is_where() {
    let _turn = turn();
    let gate = Gate::new(2);
    gate.hold_at(2, 6, 1);
    let texts = with_group(3, |group| {
        (0..5).for_each(|_| group.barrier().wait().unwrap());
        let data = tensor(&numbers(group.rank(), 8));
        let text = if group.rank() == 2 {
            group.broadcast(&data, 0).wait().unwrap();
            group.all_reduce(&tensor(&numbers(2, 8)), SUM).deadline(soon(60_000)).wait().unwrap_err()
        } else {
            group.broadcast(&data, 0).wait().unwrap();
            gate.wait_until_held();
            let error =
                group.all_reduce(&tensor(&numbers(0, 8)), SUM).deadline(soon(100)).wait().unwrap_err();
            gate.open();
            error
        };
        assert_eq!(values(&data), numbers(0, 8));
        works(group);
        describe(&text)
    });
    for (rank, text) in texts.iter().enumerate() {
        println!("{text}");
        assert!(text.starts_with("TimedOut | timed out after "), "rank {rank}: {text}");
        assert!(text.contains("all_reduce #7"), "rank {rank}: {text}");
        let pid = std::process::id();
        assert!(
            text.contains("rank 2 (host ")
                && text.contains(&format!(", pid {pid}) is still in broadcast #6")),
            "rank {rank}: {text}"
        );
    }
}

/// A rank is held before each step of an operation in turn, while the others, who may have finished it, go on and time out
/// in the next ones: what it then gets is right, and the group goes on.
fn held_at_every_step(what: &str, make: impl Fn(&Group) -> (Tensor, Vec<i32>, Result<()>) + Sync) {
    let steps = Arc::new(Mutex::new(Vec::new()));
    let seen = steps.clone();
    hooks::set(move |point| {
        if (point.place, point.number) == (2, 2) {
            seen.lock().unwrap().push(point.step);
        }
    });
    with_group(3, |group| {
        group.barrier().wait().unwrap();
        let (result, wanted, end) = make(group);
        end.unwrap();
        assert!(values(&result) == wanted);
    });
    let steps = steps.lock().unwrap().clone();
    println!("{what}: {} steps", steps.len());
    for step in steps {
        let gate = Gate::new(2);
        gate.hold_at(2, 2, step);
        let finished = AtomicUsize::new(0);
        with_group(3, |group| {
            let held = group.rank() == 2;
            group.barrier().wait().unwrap();
            let opener = (group.rank() == 0).then(|| {
                // Who needs the held rank waits for it; then it is let go soon.
                let gate = gate.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(150));
                    gate.open();
                    gate.open();
                })
            });
            let (result, wanted, end) = make(group);
            end.unwrap();
            finished.fetch_add(1, Ordering::SeqCst);
            // Either it is held by now, or there is no such step.
            while !held && !gate.is_held() && finished.load(Ordering::SeqCst) < 3 {
                std::thread::sleep(Duration::from_micros(200));
            }
            // Every line and both halves of the slots are used again.
            for (index, count) in [3, 3000, 3, 300_000, 3, 3000].into_iter().enumerate() {
                let mine = tensor(&vec![-7; count]);
                let deadline = if held { Deadline::after(LONG) } else { soon(15) };
                match group.all_reduce(&mine, SUM).deadline(deadline).wait() {
                    Ok(()) => assert!(values(&mine) == vec![-21; count], "operation {index}"),
                    Err(error) => assert!(error.is_timeout(), "operation {index}: {error}"),
                }
            }
            gate.open();
            assert!(values(&result) == wanted, "rank {} of {what}, held at step {step}", group.rank());
            works(group);
            if let Some(opener) = opener {
                opener.join().unwrap();
            }
        });
        assert!(gate.is_held());
    }
}

#[test]
fn held_in_broadcast() {
    let _turn = turn();
    for (count, path) in [(8, Path::Inline), (500, Path::OneShot), (90_000, Path::Staged)] {
        held_at_every_step("broadcast", |group| {
            let data = tensor(&numbers(group.rank(), count));
            let end = group.broadcast(&data, 0).via(path).wait();
            (data, numbers(0, count), end)
        });
    }
}

#[test]
fn held_in_gather() {
    let _turn = turn();
    for (count, path) in [(2, Path::Inline), (500, Path::OneShot), (90_000, Path::Staged)] {
        held_at_every_step("gather", |group| {
            let root = group.rank() == 2;
            let outputs: Vec<Tensor> =
                if root { (0..3).map(|_| tensor(&vec![0; count])).collect() } else { Vec::new() };
            let input = tensor(&numbers(group.rank(), count));
            let end = group.gather(&outputs, &input, 2).via(path).wait();
            if root {
                (outputs[1].clone(), numbers(1, count), end)
            } else {
                (input, numbers(group.rank(), count), end)
            }
        });
    }
}

#[test]
fn held_in_all_reduce() {
    let _turn = turn();
    for (count, path) in [(8, Path::Inline), (500, Path::OneShot), (150_000, Path::Staged)] {
        held_at_every_step("all_reduce", |group| {
            let data = tensor(&numbers(group.rank(), count));
            let end = group.all_reduce(&data, SUM).via(path).wait();
            (data, sums(3, count), end)
        });
    }
}

#[test]
fn held_in_a_direct_operation() {
    let _turn = turn();
    held_at_every_step("all_reduce", |group| {
        let data = shared(group, &numbers(group.rank(), 5000));
        let end = group.all_reduce(&data, SUM).via(Path::Direct).wait();
        (data, sums(3, 5000), end)
    });
    held_at_every_step("broadcast", |group| {
        let data = shared(group, &numbers(group.rank(), 5000));
        let end = group.broadcast(&data, 0).via(Path::Direct).wait();
        (data, numbers(0, 5000), end)
    });
}

/// Who had finished keeps its result; the others and the late one get the error; then all goes on.
#[test]
fn who_had_finished_keeps_its_result() {
    let _turn = turn();
    let over = AtomicUsize::new(0);
    let ends = with_group(3, |group| {
        group.barrier().wait().unwrap();
        let rank = group.rank();
        let outputs: Vec<Tensor> = if rank == 0 { list(Dtype::I32, &[500; 3]) } else { Vec::new() };
        let input = tensor(&numbers(rank, 500));
        while rank == 2 && over.load(Ordering::SeqCst) < 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let end =
            group.gather(&outputs, &input, 0).deadline(soon(if rank == 0 { 100 } else { 30_000 })).wait();
        over.fetch_add(1, Ordering::SeqCst);
        works(group);
        ranks::outcome(&end)
    });
    assert!(ends[0].starts_with("TimedOut") && ends[0].contains("rank 2 (host "), "{}", ends[0]);
    assert_eq!(ends[1], "ok");
    assert!(ends[2].starts_with("TimedOut") && ends[2].contains("rank 0 (host "), "{}", ends[2]);
}

/// A rank that comes for the first time gets what others have finished without it, though they have given up more since.
#[test]
fn who_has_never_come() {
    let _turn = turn();
    let over = AtomicUsize::new(0);
    with_group(3, |group| {
        let rank = group.rank();
        while rank == 2 && over.load(Ordering::SeqCst) < 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let time = || if rank == 2 { Deadline::after(LONG) } else { soon(20) };
        assert!(group.barrier().deadline(time()).wait().unwrap_err().is_timeout());
        let data = tensor(&numbers(rank, 500));
        group.reduce(&data, SUM, 2).deadline(time()).wait().unwrap();
        // All that follows goes where the data of the reduce lies.
        let mut late = 0;
        for _ in 0..6 {
            let end = group.all_reduce(&tensor(&vec![-7; 500]), SUM).deadline(time()).wait();
            late += usize::from(end.is_err_and(|error| error.is_timeout()));
        }
        over.fetch_add(1, Ordering::SeqCst);
        assert_eq!(late, 6);
        assert!(values(&data) == if rank == 2 { sums(3, 500) } else { numbers(rank, 500) });
        works(group);
    });
}

/// Started operations time out, too, and those behind them run.
#[test]
fn started_operations_time_out() {
    let _turn = turn();
    let over = AtomicUsize::new(0);
    with_group(3, |group| {
        group.barrier().wait().unwrap();
        let rank = group.rank();
        if rank == 2 {
            while over.load(Ordering::SeqCst) < 2 {
                std::thread::sleep(Duration::from_millis(1));
            }
            for _ in 0..4 {
                let error = group.all_reduce(&tensor(&[1]), SUM).wait().unwrap_err();
                assert!(error.is_timeout(), "{error}");
            }
        } else {
            let works: Vec<Work> = (0..4)
                .map(|_| group.all_reduce(&tensor(&[1]), SUM).deadline(soon(60)).start().unwrap())
                .collect();
            for (index, work) in works.iter().enumerate() {
                let error = work.wait().unwrap_err();
                assert!(error.is_timeout(), "{error}");
                assert!(work.is_done() && work.error().is_some_and(|error| error.is_timeout()));
                if index == 0 {
                    assert!(error.to_string().contains("rank 2 (host "), "{error}");
                }
            }
            over.fetch_add(1, Ordering::SeqCst);
        }
        let data = tensor(&numbers(rank, 100));
        group.all_reduce(&data, SUM).start().unwrap().wait().unwrap();
        assert_eq!(values(&data), sums(3, 100));
        works(group);
    });
}

/// One rank sits out many operations in a row, comes, gets the same errors, and is with the others again.
fn far_behind(behind: usize) {
    let _turn = turn();
    let over = AtomicUsize::new(0);
    let kinds = |group: &Group, index: usize| -> Result<()> {
        let time = if group.rank() == 2 { soon(60_000) } else { soon(8) };
        let data = tensor(&numbers(group.rank(), [2, 700, 90_000][index % 3]));
        match index % 5 {
            0 => group.all_reduce(&data, SUM).deadline(time).wait(),
            1 => group.barrier().deadline(time).wait(),
            2 => {
                group.all_gather_into(&tensor(&vec![0; values(&data).len() * 3]), &data).deadline(time).wait()
            }
            3 => group.broadcast(&data, 2).deadline(time).wait(),
            _ => group.reduce(&data, SUM, index % 2).deadline(time).wait(),
        }
    };
    with_group(3, |group| {
        (0..3).for_each(|_| works(group));
        while group.rank() == 2 && over.load(Ordering::SeqCst) < 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        for index in 0..behind {
            match kinds(group, index) {
                Ok(()) if index % 5 == 4 => {}
                Ok(()) => panic!("rank {}: operation {index} of {behind} cannot have worked", group.rank()),
                Err(error) => assert!(
                    error.is_timeout(),
                    "rank {}: operation {index} of {behind}: {error}",
                    group.rank()
                ),
            }
        }
        over.fetch_add(1, Ordering::SeqCst);
        works(group);
    });
}

#[test]
fn one_rank_is_30_operations_behind() {
    (1..=6).chain([29, 30]).for_each(far_behind);
}

/// There is an end to it: what happened in so many operations could not be told to the late one. All hear of that.
#[test]
fn one_rank_is_too_far_behind() {
    let _turn = turn();
    let over = AtomicUsize::new(0);
    let errors = with_group(3, |group| {
        (0..3).for_each(|_| works(group));
        if group.rank() == 2 {
            while over.load(Ordering::SeqCst) < 2 {
                std::thread::sleep(Duration::from_millis(1));
            }
            return describe(&group.barrier().wait().unwrap_err());
        }
        let error = (0..100).find_map(|_| {
            let error = group.all_reduce(&tensor(&[1; 100]), SUM).deadline(soon(3)).wait().unwrap_err();
            (!error.is_timeout()).then_some(error)
        });
        over.fetch_add(1, Ordering::SeqCst);
        describe(&error.unwrap())
    });
    for text in errors {
        assert!(text.starts_with("Stuck 2 | rank 2 (host ") && text.contains("shrink()"), "{text}");
    }
}

/// Ranks come at random times and have little patience: whatever works is right, everything else is a time-out.
#[test]
fn impatience() {
    let _turn = turn();
    for (seed, world) in [(1, 2), (2, 3), (3, 4), (4, 3)] {
        let (model, mut runner) = (Model::default(), TestRunner::deterministic());
        let small = any_op().prop_filter("small", |op| op.bytes < 100_000 && op.what != What::Barrier);
        let mut ops = Vec::new();
        for _ in 0..50 {
            ops.push(Op {
                seed: ops.len() as u64 * 1000 + seed,
                ..small.new_tree(&mut runner).unwrap().current()
            });
        }
        let ends = with_group(world, |group| {
            let mut dice = Dice::new(seed * 100 + group.rank() as u64);
            let (mut good, mut late, mut running) = (0, 0, Vec::new());
            for op in &ops {
                if dice.below(4) == 0 {
                    std::thread::sleep(Duration::from_millis(dice.below(30) as u64));
                }
                let patience = Some(Duration::from_millis(1 + dice.below(40) as u64));
                running.push(Op { patience, ..op.clone() }.begin(group, &model).unwrap());
                if !op.start {
                    for running in running.drain(..) {
                        match running.finish().unwrap() {
                            true => good += 1,
                            false => late += 1,
                        }
                    }
                }
            }
            for running in running {
                let _ = running.finish().unwrap();
            }
            works(group);
            (good, late)
        });
        println!("world {world}: good and late by rank: {ends:?}");
    }
}

// ---- Ranks that are slow.

/// Every step of every rank may be late for a moment.
#[test]
fn delays_at_any_step() {
    let _turn = turn();
    let dice = Mutex::new(Dice::new(99));
    hooks::set(move |_| {
        let late = dice.lock().unwrap().below(30) == 0;
        if late {
            std::thread::sleep(Duration::from_micros(1500));
        }
    });
    let mut runner = TestRunner::deterministic();
    let medium = any_op().prop_filter("medium", |op| op.bytes < 600_000);
    for world in [2, 3, 5] {
        let ops: Vec<Op> = (0..40).map(|_| medium.new_tree(&mut runner).unwrap().current()).collect();
        let model = Model::default();
        with_group(world, |group| {
            let mut running = Vec::new();
            for op in &ops {
                let now = op.begin(group, &model).unwrap();
                if op.start { running.push(now) } else { assert!(now.finish().unwrap()) }
            }
            running.into_iter().for_each(|running| assert!(running.finish().unwrap()));
        });
    }
}

// ---- Works.

/// What callbacks have said, when so many have: they come a moment after those who wait are told.
fn called_in_order<T: Clone>(order: &Mutex<Vec<T>>, count: usize) -> Vec<T> {
    let end = Instant::now() + LONG;
    while order.lock().unwrap().len() < count && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    order.lock().unwrap().clone()
}

#[test]
fn callbacks_and_patience() {
    let _turn = turn();
    let gate = Gate::new(1);
    gate.hold_at(1, 1, 0);
    with_group(2, |group| {
        let order = Arc::new(Mutex::new(Vec::new()));
        if group.rank() == 1 {
            let data = tensor(&numbers(1, 10));
            group.all_reduce(&data, SUM).wait().unwrap();
            group.barrier().wait().unwrap();
            return;
        }
        let data = tensor(&numbers(0, 10));
        let work = group.all_reduce(&data, SUM).start().unwrap();
        for index in 0..3 {
            let order = order.clone();
            work.on_done(move |result| order.lock().unwrap().push((index, result.is_ok())));
        }
        gate.wait_until_held();
        // Patience ends; the operation does not.
        let since = Instant::now();
        let error = work.wait_by(soon(30)).unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("all_reduce"), "{error}");
        assert!(since.elapsed() >= Duration::from_millis(30));
        assert!(!work.is_done() && work.error().is_none() && order.lock().unwrap().is_empty());
        let clone = work.clone();
        gate.open();
        clone.wait().unwrap();
        assert_eq!(values(&data), sums(2, 10));
        assert!(work.is_done() && work.error().is_none());
        work.wait_by(soon(0)).unwrap();
        group.barrier().wait().unwrap();
        assert_eq!(called_in_order(&order, 3), [(0, true), (1, true), (2, true)]);
        // After the end, a callback is called at once, here.
        let called = Arc::new(AtomicBool::new(false));
        let seen = called.clone();
        work.on_done(move |_| seen.store(true, Ordering::SeqCst));
        assert!(called.load(Ordering::SeqCst));
    });
}

/// A callback that panics is the caller's mistake, and harms nobody else's work.
#[test]
fn a_callback_that_panics() {
    let _turn = turn();
    with_group(2, |group| {
        let first = group.all_reduce(&tensor(&[1]), SUM).start().unwrap();
        first.on_done(|_| panic!("a test wants this panic"));
        let works: Vec<Work> =
            (0..5).map(|_| group.all_reduce(&tensor(&[1]), SUM).start().unwrap()).collect();
        for work in works {
            work.wait_by(Deadline::after(LONG)).unwrap();
        }
        group.barrier().deadline(Deadline::after(LONG)).wait().unwrap();
    });
}

/// All handles may go while operations are in flight: those are finished, and then the group is closed.
#[test]
fn handles_that_are_dropped() {
    let _turn = turn();
    let done = Arc::new(AtomicUsize::new(0));
    let tensors = Mutex::new(Vec::new());
    with_group(3, |group| {
        for step in 0..20 {
            let data = tensor(&numbers(group.rank(), 1000 * (step % 3) + 1));
            let work = group.all_reduce(&data, SUM).start().unwrap();
            let done = done.clone();
            work.on_done(move |result| {
                if result.is_ok() {
                    done.fetch_add(1, Ordering::SeqCst);
                }
            });
            tensors.lock().unwrap().push(data);
        }
    });
    let end = Instant::now() + LONG;
    while done.load(Ordering::SeqCst) < 60 {
        assert!(Instant::now() < end, "only {} of 60 ended well", done.load(Ordering::SeqCst));
        std::thread::sleep(Duration::from_millis(2));
    }
    for data in tensors.lock().unwrap().iter() {
        assert!(values(data) == sums(3, data.len()));
    }
}

/// What is started first runs first, whichever thread waits for it; a call that is waited for comes behind.
#[test]
fn first_come_first_served() {
    let _turn = turn();
    let orders = with_group(2, |group| {
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut works = Vec::new();
        for index in 0..30 {
            let data = tensor(&[index; 50]);
            let work = group.broadcast(&data, index as usize % 2).start().unwrap();
            let order = order.clone();
            work.on_done(move |_| order.lock().unwrap().push(index));
            works.push((work, data, index));
        }
        let last = tensor(&[1]);
        group.all_reduce(&last, SUM).wait().unwrap();
        assert_eq!(values(&last), [2]);
        std::thread::scope(|scope| {
            for (work, data, index) in works.into_iter().rev() {
                scope.spawn(move || {
                    work.wait().unwrap();
                    assert_eq!(values(&data), [index; 50]);
                });
            }
        });
        group.barrier().wait().unwrap();
        called_in_order(&order, 30)
    });
    for order in orders {
        assert_eq!(order, (0..30).collect::<Vec<_>>());
    }
}

/// A call with little time behind one with much does not wait longer than its own time, and never touches memory.
#[test]
fn a_short_deadline_behind_a_long_one() {
    let _turn = turn();
    let gate = Gate::new(1);
    gate.hold_at(1, 1, 0);
    with_group(2, |group| {
        let (first, second) = (tensor(&numbers(group.rank(), 10)), tensor(&numbers(group.rank(), 10)));
        if group.rank() == 0 {
            let work = group.all_reduce(&first, SUM).start().unwrap();
            gate.wait_until_held();
            let error = group.broadcast(&second, 1).deadline(soon(50)).wait().unwrap_err();
            assert!(error.is_timeout(), "{error}");
            assert!(!work.is_done(), "it should not have waited for the first");
            gate.open();
            work.wait().unwrap();
        } else {
            group.all_reduce(&first, SUM).wait().unwrap();
            // It has its own time, but the other side gave up. One that could finish alone may have done so.
            match group.broadcast(&second, 1).wait() {
                Ok(()) => {}
                Err(error) => assert!(error.is_timeout(), "{error}"),
            }
        }
        assert_eq!(values(&first), sums(2, 10));
        works(group);
        assert_eq!(values(&second), numbers(group.rank(), 10));
    });
}
