//! What an all-reduce of symmetric memory takes by work of all ranks that waits for each other, from the call to the end of the
//! queue on the slowest rank, after a barrier on the host; beside `Group::all_reduce` on the same memory; and how long a replay
//! of a captured one takes. Rank 0 prints one line of JSON for each figure.
//!
//! `tensorwire run -n 2 -- target/release/deps/fused-... [host]`: all ranks have their memory on the first GPU, or on the host.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use std::time::{Duration, Instant};

use tensorwire::device::cuda::{Gpu, Graph};
use tensorwire::device::{Abort, Device, Queue};
use tensorwire::symmetric::Mover;
use tensorwire::{Deadline, DeviceId, Dtype, Error, Group, ReduceOp, Span, Symmetric, Tensor};

/// Calls that are timed, and those before them that are not.
const ROUNDS: usize = 300;
const BEFORE: usize = 30;
/// The same of large memory of the host, which takes milliseconds.
const FEW: usize = 10;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(10))
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let group = Group::from_env().unwrap();
    let start = Instant::now();
    let (place, served) = match words.first().map(String::as_str) {
        Some("host") => (DeviceId::Host, true),
        _ => {
            let gpu = Gpu::open(0).unwrap();
            (gpu.id(), gpu.is_served())
        }
    };
    if group.rank() == 0 {
        let opened = start.elapsed().as_secs_f64() * 1e3;
        let what = format!("a device is open, with MPS: {served}");
        println!("{}", serde_json::json!({ "what": what, "ms": opened, "ranks": group.world() }));
    }
    for (size, bytes) in
        [("8 B", 8), ("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("16 MiB", 16 << 20), ("128 MiB", 128 << 20)]
    {
        for dtype in [Dtype::Bf16, Dtype::F32] {
            measure(&group, &place, (size, bytes), dtype);
        }
    }
    group.barrier().wait().unwrap();
}

fn measure(group: &Group, place: &DeviceId, (size, bytes): (&str, usize), dtype: Dtype) {
    let span = Span::new(group.context().pool(place).unwrap().alloc(bytes).unwrap(), 0..bytes).unwrap();
    span.write(0, &vec![0; bytes]).unwrap();
    let handle = group.symmetric(&span).wait().unwrap();
    if group.rank() == 0 && bytes == 8 && dtype == Dtype::F32 {
        println!("{}", serde_json::json!({ "what": handle.explain() }));
    }
    let mut queue = group.context().device(place).unwrap().queue().unwrap();
    let tensor = Tensor::flat(span, dtype).unwrap();
    let space = |bytes: usize| {
        Span::new(group.context().pool(place).unwrap().alloc(bytes).unwrap(), 0..bytes).unwrap()
    };
    let (whole, parts) = (space(bytes), space(bytes * group.world()));
    let sum = ReduceOp::Sum;
    let count = if *place == DeviceId::Host && bytes >= 16 << 20 { FEW } else { ROUNDS };

    let together = |queue: &mut dyn Queue| handle.all_reduce_on(queue, sum, dtype, 0..bytes, 0, soon());
    let by_group = |queue: &mut dyn Queue| group.all_reduce(&tensor, sum).on(queue)?.wait();
    // In turn, so that all of them see the same machine.
    for turn in 0..2 {
        let figure = |what: &str, rounds: Result<Vec<f64>, Error>| {
            print(group, &format!("{what}, {size} of {dtype}"), turn, rounds);
        };
        figure(
            "all_reduce_on",
            rounds(group, &handle, count, |_| {
                together(&mut *queue)?;
                finish(&mut *queue)
            }),
        );
        figure("Group::all_reduce", rounds(group, &handle, count, |_| by_group(&mut *queue)));
        figure(
            "one_shot_on",
            rounds(group, &handle, count, |_| {
                handle.one_shot_on(&mut *queue, (sum, dtype), 0..bytes, &whole, 0, soon())?;
                finish(&mut *queue)
            }),
        );
        for by in [Mover::Kernels, Mover::Engines] {
            figure(
                &format!("all_gather_on by {by:?}"),
                rounds(group, &handle, count, |_| {
                    handle.all_gather_on(&mut *queue, 0..bytes, Some(&parts), by, 0, soon())?;
                    finish(&mut *queue)
                }),
            );
        }
        // Many at once: what each of them takes where nobody waits on the host.
        figure(
            "all_reduce_on, 20 in a row",
            rounds(group, &handle, count, |_| {
                (0..20).try_for_each(|_| together(&mut *queue))?;
                finish(&mut *queue)
            })
            .map(|all| all.into_iter().map(|us| us / 20.0).collect()),
        );
        if *place != DeviceId::Host {
            let gpu = Gpu::open(0).unwrap();
            let graph = gpu.record(|queue| together(queue));
            let replayed = graph.and_then(|mut graph: Graph| {
                rounds(group, &handle, count, |_| {
                    graph.launch()?;
                    Ok(graph.finish(soon())?)
                })
            });
            figure("all_reduce_on, replayed", replayed);
        }
    }
    if let Err(error) = handle.check() {
        println!(
            "{}",
            serde_json::json!({ "what": "failed", "rank": group.rank(), "error": error.to_string() })
        );
    }
    group.barrier().wait().unwrap();
}

fn finish(queue: &mut dyn Queue) -> Result<(), Error> {
    Ok(queue.finish(&Abort::local(), soon())?)
}

/// Microseconds of each round on the slowest rank, sorted. All ranks go through all rounds, whatever happens.
fn rounds(
    group: &Group,
    handle: &Symmetric,
    count: usize,
    mut call: impl FnMut(usize) -> Result<(), Error>,
) -> Result<Vec<f64>, Error> {
    let mut times = Vec::with_capacity(count);
    let mut failed = None;
    let before = BEFORE.min(count);
    for round in 0..before + count {
        if failed.is_none() {
            failed = handle.barrier(0, soon()).err();
        }
        let start = Instant::now();
        if failed.is_none() {
            failed = call(round).err();
        }
        if round >= before {
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    let worst = Tensor::private(&times)?;
    group.all_reduce(&worst, ReduceOp::Max).wait()?;
    let mut times = worst.to_vec::<f64>()?;
    times.sort_by(f64::total_cmp);
    failed.map_or(Ok(times), Err)
}

fn print(group: &Group, what: &str, turn: usize, rounds: Result<Vec<f64>, Error>) {
    let line = match rounds {
        Ok(_) if group.rank() != 0 => return,
        Ok(all) => serde_json::json!({
            "what": what, "ranks": group.world(), "turn": turn, "least_us": all[0], "median_us": all[all.len() / 2],
            "p90_us": all[all.len() * 9 / 10], "rounds": all.len(),
        }),
        Err(error) => serde_json::json!({ "what": what, "rank": group.rank(), "failed": error.to_string() }),
    };
    println!("{line}");
}
