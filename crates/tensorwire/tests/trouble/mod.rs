//! What the tests of trouble share: groups of threads, tensors of known numbers, and a gate that holds a rank at a step.
//! A file that uses it also has `mod model` and `mod ranks`.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tensorwire::collective::hooks;
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Deadline, Dtype, Error, Group, ReduceOp, Tensor};

use crate::model::private;
use crate::ranks::{LONG, context, on_threads};

/// Hooks belong to the whole process, and time-outs are best seen alone: these tests take turns.
pub fn turn() -> Turn {
    static TURN: Mutex<()> = Mutex::new(());
    Turn { _guard: TURN.lock().unwrap_or_else(PoisonError::into_inner) }
}

pub struct Turn {
    _guard: MutexGuard<'static, ()>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        hooks::clear();
    }
}

/// Runs a body on the ranks of a new group, as threads.
pub fn with_group<T: Send>(world: usize, body: impl Fn(&Group) -> T + Sync) -> Vec<T> {
    let store = Arc::new(MemoryStore::new()) as Arc<dyn Store>;
    on_threads(world, |rank| {
        let builder = Group::builder().context(&context()).timeout(LONG);
        let group = builder.from_store(store.clone(), rank, world).unwrap();
        body(&group)
    })
}

/// The numbers of a rank: rank * 1000, rank * 1000 + 1, ...
pub fn numbers(rank: usize, count: usize) -> Vec<i32> {
    (0..count).map(|index| (rank * 1000 + index) as i32).collect()
}

pub fn tensor(values: &[i32]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Tensor::flat(private(&bytes), Dtype::I32).unwrap()
}

pub fn shared(group: &Group, values: &[i32]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let span = group.alloc(bytes.len()).unwrap();
    span.write(0, &bytes).unwrap();
    Tensor::flat(span, Dtype::I32).unwrap()
}

pub fn values(tensor: &Tensor) -> Vec<i32> {
    let bytes = tensor.span().to_vec().unwrap();
    bytes.chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect()
}

pub fn sums(world: usize, count: usize) -> Vec<i32> {
    (0..count).map(|index| (0..world).map(|rank| (rank * 1000 + index) as i32).sum()).collect()
}

pub fn soon(millis: u64) -> Deadline {
    Deadline::after(Duration::from_millis(millis))
}

/// Whether the group works.
pub fn works(group: &Group) {
    for count in [1, 3000, 300_000] {
        let tensor = tensor(&numbers(group.rank(), count));
        group.all_reduce(&tensor, ReduceOp::Sum).wait().unwrap();
        assert!(values(&tensor) == sums(group.world(), count), "all_reduce of {count} after trouble");
    }
    group.barrier().wait().unwrap();
}

/// Zeros of a type; memory that lives as long as the test.
pub fn zeros(dtype: Dtype, count: usize) -> Tensor {
    Tensor::flat(private(&vec![0; count * dtype.size()]), dtype).unwrap()
}

pub fn list(dtype: Dtype, counts: &[usize]) -> Vec<Tensor> {
    counts.iter().map(|&count| zeros(dtype, count)).collect()
}

pub const SUM: ReduceOp = ReduceOp::Sum;

/// Holds a rank at a point until it is let go.
pub struct Gate {
    /// Whether somebody was held, and how many must say that it may go on.
    state: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl Gate {
    pub fn new(keys: usize) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new((false, keys)), changed: Condvar::new() })
    }

    /// Holds whoever is at the point, the first time.
    pub fn hold_at(self: &Arc<Self>, place: usize, number: u32, step: usize) {
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

    pub fn is_held(&self) -> bool {
        self.state.lock().unwrap().0
    }

    pub fn wait_until_held(&self) {
        let mut state = self.state.lock().unwrap();
        while !state.0 {
            state = self.changed.wait_timeout(state, LONG).unwrap().0;
        }
    }

    /// One of those who hold it lets go.
    pub fn open(&self) {
        let mut state = self.state.lock().unwrap();
        state.1 = state.1.saturating_sub(1);
        self.changed.notify_all();
    }
}

/// One rank sleeps at one point of an operation for longer than the deadline of some ranks, at each point in turn: whoever gives
/// up, and whoever finishes, all ranks agree on what comes next. `attempt` runs the operation, the first time with a deadline on
/// one rank; `works` is what all ranks do with what the second try gave them. Gives how many points there are. A file that uses this has no other tests in its process
/// at the same time: hooks belong to all.
pub fn late_at_every_step<T>(
    world: usize,
    name: &str,
    attempt: impl Fn(&Group, Option<Deadline>) -> Result<T, Error> + Sync,
    works: impl Fn(&T) + Sync,
) -> usize {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let passed = Arc::new(AtomicUsize::new(0));
    let mut step = 0;
    loop {
        let (count, wanted) = (passed.clone(), step);
        count.store(0, Ordering::SeqCst);
        let victim = step % world;
        let (gone, awaited) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(usize::MAX)));
        let (leaving, waiting) = (gone.clone(), awaited.clone());
        hooks::set(move |point| {
            if point.place == victim && count.fetch_add(1, Ordering::SeqCst) == wanted {
                // Until somebody has given up, which is soon; nobody does where this rank is not needed any more, so that
                // another has finished.
                let (start, before) = (Instant::now(), hooks::given_up());
                waiting.store(leaving.load(Ordering::SeqCst), Ordering::SeqCst);
                let late = || leaving.load(Ordering::SeqCst) > 0 || hooks::given_up() > before;
                while !late() && start.elapsed() < LONG {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let name = format!("{name} {step}");
        on_threads(world, |rank| {
            let builder = Group::builder().context(&context()).timeout(LONG).name(&name);
            let group = builder.from_store(store.clone(), rank, world).unwrap();
            // One of the others is in a hurry.
            let hurry = rank == (victim + 1) % world;
            let end = attempt(&group, hurry.then(|| soon(60)));
            gone.fetch_add(1, Ordering::SeqCst);
            if let Err(error) = &end {
                // It is a time-out for every rank, also for one that had finished what timed out.
                assert!(error.is_timeout(), "{name}, rank {rank}: {error}");
            }
            // The same operation goes well now, and others do.
            let again = attempt(&group, None);
            works(again.as_ref().unwrap_or_else(|error| unreachable!("{name}, rank {rank}: {error}")));
            let ones = Tensor::private(&[1i64]).unwrap();
            group.all_reduce(&ones, SUM).wait().unwrap();
            assert_eq!(ones.to_vec::<i64>().unwrap(), [world as i64], "{name}");
            drop((end, again));
            group.close().unwrap();
        });
        hooks::clear();
        // Behind the last point nobody slept. On a busy machine somebody may have been late all the same.
        if awaited.load(Ordering::SeqCst) == usize::MAX {
            return step;
        }
        step += 1;
    }
}
