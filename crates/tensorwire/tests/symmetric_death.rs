//! A rank is killed at every numbered step of the rendezvous of symmetric memory, and of the work of all ranks together on it: the
//! others hear who died, make new handles without it, and nothing stays mapped or allocated.
//!
//! The GPUs are threads. With TEST_GPU=1 all ranks share the first GPU, the steps are those of the rendezvous, and the memory that
//! is free on the GPU is compared as NVML sees it.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod gpus;
mod ranks;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gpus::{gpu, is_real, nothing_is_left, nvml, queue, settings, span, usage, variable};
use ranks::{LONG, Rank, Ranks, describe, say};
use rustix::process::{Signal, getpid, kill_process};
use tensorwire::collective::hooks;
use tensorwire::device::threads::{Settings, hook};
use tensorwire::device::{Abort, Queue};
use tensorwire::symmetric::Mover;
use tensorwire::{Deadline, Dtype, Group, ReduceOp, Result, Span, Symmetric};

const WORLD: usize = 3;
/// The rank that dies. One of the others has the memory that this one writes to first.
const VICTIM: usize = 1;
/// Larger than what shares an allocation with others.
const BYTES: usize = 3 << 20;
/// What small allocations of a pool share.
const LOST: usize = 2 << 20;

fn soon() -> Deadline {
    Deadline::after(LONG)
}

/// Where the rank dies: at a point of the rendezvous, or before a command of its queue.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Where {
    Host(usize),
    Queue(usize),
    Nowhere,
}

impl Where {
    fn read(text: &str) -> Self {
        let number = |text: &str| text.parse().unwrap();
        match text.split_at(1) {
            ("h", at) => Self::Host(number(at)),
            ("q", at) => Self::Queue(number(at)),
            _ => Self::Nowhere,
        }
    }

    fn write(self) -> String {
        match self {
            Self::Host(at) => format!("h{at}"),
            Self::Queue(at) => format!("q{at}"),
            Self::Nowhere => "-".into(),
        }
    }
}

/// Counts steps, and dies at one of them.
fn count(dies_at: Option<usize>) -> (Arc<AtomicUsize>, impl Fn() + Send + Sync + 'static) {
    let passed = Arc::new(AtomicUsize::new(0));
    let count = passed.clone();
    let step = move || {
        if count.fetch_add(1, Ordering::SeqCst) == dies_at.unwrap_or(usize::MAX) {
            kill_process(getpid(), Signal::KILL).unwrap();
            std::thread::sleep(LONG);
        }
    };
    (passed, step)
}

/// Handles, and what queues do on them together; refused where kernels take turns.
fn all_of_it(group: &Group, memory: &Span, output: &Span, queue: &mut dyn Queue) -> Result<Symmetric> {
    let handle = group.symmetric(memory).wait()?;
    if handle.explain().contains("cannot work together") {
        return Ok(handle);
    }
    queue.begin(None)?;
    for bytes in [4096, BYTES] {
        handle.all_reduce_on(queue, ReduceOp::Sum, Dtype::U8, 0..bytes, 0, soon())?;
    }
    handle.all_gather_on(
        queue,
        0..4096,
        Some(&output.slice(0..4096 * group.world())?),
        Mover::Kernels,
        0,
        soon(),
    )?;
    handle.broadcast_on(queue, 0, 0..4096, Mover::Engines, 0, soon())?;
    let finished = queue.finish(&Abort::local(), soon());
    handle.check()?;
    finished?;
    Ok(handle)
}

fn body(group: Group) {
    let place = gpu(0);
    let dies = Where::read(&variable("TEST_DIES"));
    let before = usage();
    let mine = group.rank() == VICTIM;
    let memory = span(&group, &place, BYTES);
    let output = span(&group, &place, 4096 * WORLD);
    memory.write(0, &[1; BYTES]).unwrap();
    let mut own = queue(&group, &place);
    group.barrier().wait().unwrap();

    let at = |wanted: fn(Where) -> Option<usize>| mine.then(|| wanted(dies)).flatten();
    let (points, step) = count(at(|dies| if let Where::Host(at) = dies { Some(at) } else { None }));
    hooks::set(move |_| step());
    let (commands, step) = count(at(|dies| if let Where::Queue(at) = dies { Some(at) } else { None }));
    hook::set(move |_| step());
    let ended = all_of_it(&group, &memory, &output, &mut *own);
    hooks::clear();
    hook::clear();
    if dies == Where::Nowhere {
        let handle = ended.unwrap();
        say(&format!("{} {}", points.load(Ordering::SeqCst), commands.load(Ordering::SeqCst)));
        return handle.barrier(0, soon()).unwrap();
    }
    assert!(!mine, "nobody dies {dies:?}");
    // The rank may have died behind all that this one has to wait for.
    let error = match ended {
        Err(error) => error,
        Ok(handle) => handle.barrier(0, soon()).unwrap_err(),
    };
    assert_eq!(error.ranks(), [VICTIM], "{dies:?}: {}", describe(&error));
    let _ = own.finish(&Abort::local(), soon());
    own.begin(None).unwrap();

    let next = group.shrink().unwrap();
    memory.write(0, &[1; BYTES]).unwrap();
    let handle = all_of_it(&next, &memory, &output, &mut *own).unwrap();
    if !handle.explain().contains("cannot work together") {
        // Twice: what was summed is summed again.
        let sum = (next.world() * next.world()) as u8;
        assert!(memory.to_vec().unwrap()[..4096].iter().all(|&byte| byte == sum), "{dies:?}");
    }
    handle.barrier(0, soon()).unwrap();
    drop((handle, memory, output, own));
    drop(group);
    next.barrier().wait().unwrap();
    // A kernel that nobody here knows of may still write to the pad of a group that has failed: nobody gets that memory again. The
    // allocation with this rank's own stays, and the others keep their mappings of it.
    let before = before.map(|(allocations, bytes)| (allocations + next.world(), bytes + LOST));
    nothing_is_left(&next, before);
    next.barrier().wait().unwrap();
}

fn start(dies: Where) -> Ranks {
    let mps = Settings { mps: true, ..settings()[2].clone() };
    gpus::start("killed_at_every_step_real", WORLD, &mps, &[("TEST_DIES", dies.write())])
}

#[test]
fn killed_at_every_step_real() {
    if let Some(rank) = Rank::of_this_process() {
        return body(rank.group());
    }
    // How many steps there are.
    let Ranks { ranks, server: _server } = start(Where::Nowhere);
    let mut steps = (0, 0);
    for (number, mut rank) in ranks.into_iter().enumerate() {
        let said = rank.hear();
        rank.end_well();
        if number == VICTIM {
            let (points, commands) = said.split_once(' ').unwrap();
            steps = (points.parse::<usize>().unwrap(), commands.parse::<usize>().unwrap());
        }
    }
    assert!(steps.0 > 5 && (is_real() || steps.1 > 5), "{steps:?}");
    let free = || nvml().map(|(nvml, id)| nvml.free_memory(&id).unwrap());
    let before = free();
    let on_host = (0..steps.0).map(Where::Host);
    let on_queue = (0..if is_real() { 0 } else { steps.1 }).map(Where::Queue);
    for dies in on_host.chain(on_queue) {
        let Ranks { ranks, server: _server } = start(dies);
        for (number, mut rank) in ranks.into_iter().enumerate() {
            // Whoever is dropped is killed, and the victim does that itself.
            if number != VICTIM {
                rank.end_well();
            }
        }
    }
    println!("killed at {} points and before {} commands", steps.0, steps.1);
    // The driver needs a moment for the last of the dead.
    let end = Instant::now() + LONG;
    while free() < before {
        assert!(Instant::now() < end, "{:?} bytes are free, {before:?} before", free());
        std::thread::sleep(Duration::from_millis(20));
    }
}
