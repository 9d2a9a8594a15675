//! What a GPU does: times of opening, allocating and sharing; bandwidths of copies and kernels; signals between processes.
//! One line of JSON for each figure. `cargo bench -p tensorwire-device --bench cuda`

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::print_stderr)]

#[path = "../tests/process/mod.rs"]
mod process;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorwire_device::cuda::{self, CudaProbe, Gpu, Primary};
use tensorwire_device::fd::Connection;
use tensorwire_device::flag::{LINE, Writer};
use tensorwire_device::gpu::Probe;
use tensorwire_device::host::Host;
use tensorwire_device::{
    Abort, Caching, Deadline, Device, Dtype, Flag, Handle, Layout, Queue, ReduceOp, Region, Span,
};

/// Bytes of the spans whose bandwidth is measured.
const LEN: usize = 64 << 20;
/// Rounds between two processes in one go.
const ROUNDS: u32 = 200;
/// Lots of rounds by flags in device memory, and how long one process may take for all of them.
const LOTS: (u32, Duration) = (100, Duration::from_secs(10));

fn main() {
    match process::role().as_deref() {
        None => {}
        Some("pong") => return pong(),
        Some(side) => return device_flags_of(side),
    }
    let (started, _) = timed(cuda::count);
    let (made, context) = timed(|| Primary::retain(0));
    let (opened, gpu) = timed(|| Gpu::open(0));
    let gpu = match gpu {
        Ok(gpu) => gpu,
        Err(error) => return println!("{}", serde_json::json!({ "skipped": error.to_string() })),
    };
    drop(context);
    let facts = gpu.facts();
    let version = cuda::driver_version().unwrap();
    let head = serde_json::json!({ "gpu": facts.name, "cuda": format!("{}.{}", version.0, version.1) });
    println!("{head}");
    say("load and start the driver", started.as_secs_f64() * 1e3, "ms");
    say("open the first GPU, with its context", (made + opened).as_secs_f64() * 1e3, "ms");
    say("of it, ours: all but the driver's context", opened.as_secs_f64() * 1e3, "ms");
    again(&gpu);
    sharing(&gpu);
    bandwidth(&gpu);
    gates(&gpu);
    lists(&gpu);
    signals(&gpu);
    let usage = gpu.usage();
    say("waits that streams were given", usage.stream_waits as f64, "");
    say("waits that the calling thread did", usage.caller_waits as f64, "");
    device_flags(&gpu);
}

fn say(what: &str, value: f64, unit: &str) {
    println!("{}", serde_json::json!({ "what": what, "value": (value * 1e4).round() / 1e4, "unit": unit }));
}

/// The median of so many calls, in seconds.
fn median(times: usize, mut call: impl FnMut() -> Duration) -> f64 {
    let mut all: Vec<f64> = (0..times).map(|_| call().as_secs_f64()).collect();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn timed<T>(call: impl FnOnce() -> T) -> (Duration, T) {
    let begin = Instant::now();
    let result = call();
    (begin.elapsed(), result)
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// Opening it again, when it is open; and what is asked lazily.
fn again(gpu: &Gpu) {
    say("open it again", median(5, || timed(|| Gpu::open(0).unwrap()).0) * 1e3, "ms");
    let (took, probe) = timed(|| CudaProbe::new().unwrap());
    say("the driver, once loaded", took.as_secs_f64() * 1e9, "ns");
    for (what, (took, access)) in
        [("fabric", timed(|| probe.fabric(&gpu.id()))), ("multicast", timed(|| probe.multicast(&gpu.id())))]
    {
        say(&format!("{what}, tried: {access:?}"), took.as_secs_f64() * 1e6, "us");
    }
}

fn sharing(gpu: &Gpu) {
    for (name, len) in [("2 MiB", 2 << 20), ("512 MiB", 512 << 20)] {
        let us = |seconds: f64| seconds * 1e6;
        say(&format!("allocate {name}, zeroed"), us(median(9, || timed(|| gpu.alloc(len).unwrap()).0)), "us");
        say(&format!("allocate {name}"), us(median(9, || timed(|| gpu.take(len).unwrap()).0)), "us");
        let region = gpu.take(len).unwrap();
        say(&format!("export {name}"), us(median(9, || timed(|| region.export().unwrap()).0)), "us");
        let import = || {
            let handle = region.export().unwrap();
            let (took, again) = timed(|| gpu.import(handle).unwrap());
            drop(again);
            took
        };
        say(&format!("import and map {name}"), us(median(9, import)), "us");
        let again = || {
            let again = gpu.import(region.export().unwrap()).unwrap();
            timed(|| drop(again)).0
        };
        say(&format!("unmap {name}"), us(median(9, again)), "us");
    }
    let plain = gpu.plain(64 << 20).unwrap();
    say("export memory of cudaMalloc", median(9, || timed(|| plain.export().unwrap()).0) * 1e6, "us");
}

/// Seconds that one of many queued calls takes on the device.
fn on_device(queue: &mut dyn Queue, abort: &Abort, mut call: impl FnMut(&mut dyn Queue)) -> f64 {
    let times = 40;
    (0..3).for_each(|_| call(queue));
    queue.finish(abort, soon()).unwrap();
    median(5, || {
        let begin = Instant::now();
        (0..times).for_each(|_| call(queue));
        queue.finish(abort, soon()).unwrap();
        begin.elapsed() / times
    })
}

fn bandwidth(gpu: &Gpu) {
    let abort = Abort::new(&Span::whole(Host.alloc(LINE).unwrap())).unwrap();
    let mut queue = gpu.queue().unwrap();
    // More than the cache holds.
    let spans: Vec<Span> = (0..12).map(|_| Span::whole(gpu.alloc(LEN).unwrap())).collect();
    let mut turn = 0;
    let mut next = move || {
        turn += 1;
        turn
    };
    let seconds = on_device(&mut *queue, &abort, |queue| {
        let at = next();
        queue.copy(spans[at % 12].view(), spans[(at + 6) % 12].view(), Caching::Keep).unwrap();
    });
    let copy = 2.0 * LEN as f64 / seconds / 1e12;
    say("copy 64 MiB, bytes read and written", copy, "TB/s");
    for (dtype, op, inputs, outputs) in [
        (Dtype::F32, ReduceOp::Sum, 2, 1),
        (Dtype::F32, ReduceOp::Sum, 4, 1),
        (Dtype::F32, ReduceOp::Sum, 8, 1),
        (Dtype::F32, ReduceOp::Sum, 2, 2),
        (Dtype::F32, ReduceOp::Sum, 4, 4),
        (Dtype::Bf16, ReduceOp::Sum, 2, 1),
        (Dtype::Bf16, ReduceOp::Sum, 4, 1),
        (Dtype::Bf16, ReduceOp::Sum, 8, 1),
        (Dtype::Bf16, ReduceOp::Sum, 4, 4),
        (Dtype::Bf16, ReduceOp::Max, 2, 1),
        (Dtype::F16, ReduceOp::Avg, 2, 1),
        (Dtype::I64, ReduceOp::Sum, 2, 1),
        (Dtype::F8E4M3Fn, ReduceOp::Sum, 2, 1),
    ] {
        let seconds = on_device(&mut *queue, &abort, |queue| {
            let at = next();
            let from: Vec<_> = (0..inputs).map(|i| spans[(at + i) % 12].view()).collect();
            let into: Vec<_> = (0..outputs).map(|i| spans[(at + i) % 12].view()).collect();
            queue.reduce(op, dtype, &from, &into, Caching::Keep).unwrap();
        });
        let rate = (inputs + outputs) as f64 * LEN as f64 / seconds / 1e12;
        let what = format!("{op} of {dtype}, {inputs} to {outputs}, 64 MiB");
        println!(
            "{}",
            serde_json::json!({ "what": what, "value": (rate * 1e3).round() / 1e3, "unit": "TB/s", "of copy": (rate / copy * 1e3).round() / 1e3 })
        );
    }
    let wide: Vec<Span> = (0..6).map(|_| Span::whole(gpu.alloc(2 * LEN).unwrap())).collect();
    for row in [16, 32, 64, 128, 256, 1024] {
        let rows = LEN / row;
        // Every second row of a matrix, packed.
        let of = Layout::new(&[rows, row / 4], &[(row / 2) as isize, 1], 4).unwrap();
        let to = Layout::contiguous(&[rows, row / 4], 4).unwrap();
        for unpack in [false, true] {
            let seconds = on_device(&mut *queue, &abort, |queue| {
                let at = next();
                let (packed, spread) = ((spans[at % 12].view(), &to), (wide[at % 6].view(), &of));
                let (into, from) = if unpack { (spread, packed) } else { (packed, spread) };
                queue.copy_strided(into, from).unwrap();
            });
            let rate = 2.0 * (rows * row) as f64 / seconds / 1e12;
            let what = format!("{} rows of {row} bytes, 64 MiB", if unpack { "unpack" } else { "pack" });
            println!(
                "{}",
                serde_json::json!({ "what": what, "value": (rate * 1e3).round() / 1e3, "unit": "TB/s", "of copy": (rate / copy * 1e3).round() / 1e3 })
            );
        }
    }
    let small = |len: usize| (spans[0].slice(0..len).unwrap(), spans[1].slice(0..len).unwrap());
    for len in [4, 4096, 65536] {
        let (a, b) = small(len);
        let seconds = on_device(&mut *queue, &abort, |queue| {
            queue
                .reduce(ReduceOp::Sum, Dtype::F32, &[a.view(), b.view()], &[a.view()], Caching::Keep)
                .unwrap();
        });
        say(&format!("SUM of float32, 2 to 1, {len} bytes, queued"), seconds * 1e6, "us");
        let alone = median(200, || {
            timed(|| {
                queue
                    .reduce(ReduceOp::Sum, Dtype::F32, &[a.view(), b.view()], &[a.view()], Caching::Keep)
                    .unwrap();
                queue.finish(&abort, soon()).unwrap();
            })
            .0
        });
        say(&format!("SUM of float32, 2 to 1, {len} bytes, and finish"), alone * 1e6, "us");
    }
    let (host, there) = (Span::whole(Host.alloc(LEN).unwrap()), spans[0].clone());
    for (what, to, from) in [("to the GPU", &there, &host), ("from the GPU", &host, &there)] {
        let seconds = on_device(&mut *queue, &abort, |queue| {
            queue.copy(to.view(), from.view(), Caching::Keep).unwrap()
        });
        say(&format!("64 MiB of registered host memory {what}"), LEN as f64 / seconds / 1e9, "GB/s");
    }
}

/// Seconds on the device for one of several calls that are queued behind a wait. The calls look at the wait's two abort words,
/// or at none. Nothing where streams do not wait.
fn behind_a_wait(gpu: &Gpu, gated: bool, mut call: impl FnMut(&mut dyn Queue)) -> Option<f64> {
    const TIMES: u32 = 20;
    let lines = Span::whole(Host.alloc(3 * LINE).unwrap());
    let line = |index: usize| lines.slice(index * LINE..(index + 1) * LINE).unwrap();
    let flag = Flag::new(&line(0), Writer::Host).unwrap();
    let (verdict, group) = (Abort::new(&line(1)).unwrap(), Abort::new(&line(2)).unwrap());
    let mut queue = gpu.queue().unwrap();
    let by_callers = gpu.usage().caller_waits;
    let mut turn = 0;
    let mut round = |calls: u32| -> Option<Duration> {
        turn += 1;
        let limit = Deadline::after(Duration::from_secs(1));
        queue
            .wait(&flag, turn, &verdict.or(&group), limit)
            .ok()
            .filter(|()| gpu.usage().caller_waits == by_callers)?;
        if !gated {
            queue.begin(None).unwrap();
        }
        (0..calls).for_each(|_| call(&mut *queue));
        let begin = Instant::now();
        flag.signal(turn);
        queue.finish(&group, soon()).unwrap();
        Some(begin.elapsed())
    };
    round(TIMES)?;
    // What does not grow with the number of calls is not theirs.
    let mut times = Vec::new();
    for _ in 0..9 {
        let (few, many) = (round(1)?, round(1 + TIMES)?);
        times.push(many.saturating_sub(few).as_secs_f64() / f64::from(TIMES));
    }
    times.sort_by(f64::total_cmp);
    Some(times[times.len() / 2])
}

/// What a look at the abort words costs a launch.
fn gates(gpu: &Gpu) {
    for (name, len) in [("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("128 MiB", 128 << 20)] {
        let spans = [0; 2].map(|_| Span::whole(gpu.alloc(len).unwrap()));
        let (from, into) = (spans[0].view(), spans[1].view());
        for gated in [false, true] {
            let what =
                format!("SUM of float32, 2 to 1, {name}, {}", if gated { "gated" } else { "not gated" });
            let seconds = behind_a_wait(gpu, gated, |queue| {
                queue.reduce(ReduceOp::Sum, Dtype::F32, &[from, into], &[into], Caching::Keep).unwrap();
            });
            match seconds {
                Some(seconds) => say(&what, seconds * 1e6, "us"),
                None => println!("{}", serde_json::json!({ "what": what, "skipped": "streams do not wait" })),
            }
        }
    }
}

/// Several copies in one call and one by one; several waits, too.
fn lists(gpu: &Gpu) {
    let abort = Abort::new(&Span::whole(Host.alloc(LINE).unwrap())).unwrap();
    let mut queue = gpu.queue().unwrap();
    let (from, into) = (Span::whole(gpu.alloc(LEN).unwrap()), Span::whole(gpu.alloc(LEN).unwrap()));
    for (count, len) in [(8, 8 << 10), (8, 8 << 20), (64, 1 << 10), (64, 1 << 20)] {
        let part = |span: &Span, i: usize| span.slice(i * len..(i + 1) * len).unwrap();
        let spans: Vec<_> = (0..count).map(|i| (part(&into, i), part(&from, i))).collect();
        let copies: Vec<_> = spans.iter().map(|(into, from)| (into.view(), from.view())).collect();
        let together =
            on_device(&mut *queue, &abort, |queue| queue.copy_all(&copies, Caching::Keep).unwrap());
        let apart = on_device(&mut *queue, &abort, |queue| {
            copies.iter().for_each(|&(into, from)| queue.copy(into, from, Caching::Keep).unwrap());
        });
        say(&format!("{count} copies of {len} bytes, in one call"), together * 1e6, "us");
        say(&format!("{count} copies of {len} bytes, one by one"), apart * 1e6, "us");
    }
    let lines = Span::whole(Host.alloc(8 * LINE).unwrap());
    let line = |index: usize| lines.slice(index * LINE..(index + 1) * LINE).unwrap();
    let flags: Vec<_> = (0..7).map(|index| Flag::new(&line(index), Writer::Host).unwrap()).collect();
    let abort = Abort::new(&line(7)).unwrap();
    for count in [1, 2, 4, 7] {
        let mut turn = flags[0].load();
        let by_callers = gpu.usage().caller_waits;
        let mut round = || {
            turn += 1;
            let all: Vec<_> = flags[..count].iter().map(|flag| (flag, turn)).collect();
            let all_flags = &flags;
            std::thread::scope(|scope| {
                let queued = gpu.usage();
                let queued = queued.stream_waits + queued.caller_waits;
                let signal = move || {
                    while gpu.usage().stream_waits + gpu.usage().caller_waits == queued {}
                    let begin = Instant::now();
                    all_flags.iter().for_each(|flag| flag.signal(turn));
                    begin
                };
                let signaller = scope.spawn(signal);
                queue.begin(None).unwrap();
                queue.wait_all(&all, &abort, soon()).unwrap();
                queue.finish(&abort, soon()).unwrap();
                signaller.join().unwrap().elapsed()
            })
        };
        let seconds = median(200, &mut round);
        let by = if gpu.usage().caller_waits == by_callers { "a stream" } else { "the calling thread" };
        say(&format!("{by} waits for {count} flags, from the signals to the end"), seconds * 1e6, "us");
    }
}

/// Two flags and an abort word.
fn flags(region: &Arc<dyn Region>) -> (Flag, Flag, Abort) {
    let line = |index: usize| Span::new(region.clone(), index * LINE..(index + 1) * LINE).unwrap();
    let flag = |index: usize| Flag::new(&line(index), Writer::Device).unwrap();
    (flag(0), flag(1), Abort::new(&line(2)).unwrap())
}

fn signals(gpu: &Gpu) {
    let home = process::Home::open();
    let mut child = process::Child::start(home.invite(&mut process::command("pong")));
    let connection = home.answer().unwrap();
    let region = Host.alloc(3 * LINE).unwrap();
    let handle = region.export().unwrap();
    let fds: Vec<_> = handle.fds().collect();
    connection.send(&handle.encode(), &fds, soon()).unwrap();
    let (ping, pong, abort) = flags(&region);
    let mut queue = gpu.queue().unwrap();
    let mut round = |turn: u32| {
        queue.signal(&ping, turn).unwrap();
        queue.wait(&pong, turn, &abort, soon()).unwrap();
    };
    let mut turn = 0;
    let seconds = median(9, || {
        let begin = Instant::now();
        for _ in 0..ROUNDS {
            turn += 1;
            round(turn);
        }
        while !pong.reached(turn) {}
        begin.elapsed() / ROUNDS
    });
    queue.finish(&abort, soon()).unwrap();
    say("signal and wait between two processes' queues, round trip, host flags", seconds * 1e6, "us");
    let seconds = median(2000, || {
        turn += 1;
        let begin = Instant::now();
        ping.signal(turn);
        pong.wait(turn, &abort, soon()).unwrap();
        begin.elapsed()
    });
    say("the host signals, a queue of another process answers, round trip", seconds * 1e6, "us");
    connection.send(b"over", &[], soon()).unwrap();
    child.succeed();
}

/// The other process: answers every signal, well ahead.
fn pong() {
    let home = process::call_home().unwrap();
    let (bytes, fds) = home.recv(soon()).unwrap();
    let region = Host.import(Handle::decode(&bytes, fds).unwrap()).unwrap();
    let (ping, pong, abort) = flags(&region);
    let gpu = Gpu::open(0).unwrap();
    let mut queue = gpu.queue().unwrap();
    for turn in 1..=9 * ROUNDS + 2000 {
        queue.wait(&ping, turn, &abort, soon()).unwrap();
        queue.signal(&pong, turn).unwrap();
        // Not more ahead than a stream holds.
        if turn > 256 {
            while !ping.reached(turn - 256) {
                std::thread::yield_now();
            }
        }
    }
    queue.finish(&abort, soon()).unwrap();
    assert_eq!(home.recv(soon()).unwrap().0, b"over");
}

/// Signals by flags in memory of the GPU. Two processes of their own exchange them: a stream that waits for such a flag for
/// ever may hold its process for ever, and must not hold this one.
fn device_flags(gpu: &Gpu) {
    let what = "signal and wait between two processes' queues, round trip, device flags";
    let words = gpu.alloc(2 * LINE).unwrap();
    let home = process::Home::open();
    let mut sides = ["0", "1"].map(|side| process::Child::start(home.invite(&mut process::command(side))));
    let until = Deadline::after(3 * LOTS.1);
    let exchanged = || -> Option<f64> {
        let connections = [home.answer().ok()?, home.answer().ok()?];
        for connection in &connections {
            let handle = words.export().ok()?;
            let fds: Vec<_> = handle.fds().collect();
            connection.send(&handle.encode(), &fds, until).ok()?;
        }
        // Both have opened the GPU and mapped the words before either begins.
        connections.iter().try_for_each(|side| said(side, until).map(drop))?;
        connections.iter().try_for_each(|side| side.send(b"go", &[], until).ok())?;
        let rounds: Vec<_> = connections.iter().map(|side| said(side, until)).collect::<Option<_>>()?;
        rounds.into_iter().filter_map(|round| round.parse().ok()).reduce(f64::max)
    };
    match exchanged() {
        Some(seconds) => {
            say(what, seconds * 1e6, "us");
            sides.iter_mut().for_each(process::Child::succeed);
        }
        None => {
            println!("{}", serde_json::json!({ "what": what, "skipped": "gave up" }));
            sides.into_iter().for_each(process::Child::abandon);
        }
    }
}

/// What the other process says, if it says something in time.
fn said(connection: &Connection, until: Deadline) -> Option<String> {
    let (bytes, _) = connection.recv(until).ok()?;
    String::from_utf8(bytes).ok().filter(|text| !text.is_empty())
}

/// One of the two processes.
fn device_flags_of(side: &str) {
    let home = process::call_home().unwrap();
    let (bytes, fds) = home.recv(soon()).unwrap();
    let gpu = Gpu::open(0).unwrap();
    let words = gpu.import(Handle::decode(&bytes, fds).unwrap()).unwrap();
    home.send(b"ready", &[], soon()).unwrap();
    said(&home, soon()).unwrap();
    let mut rounds =
        gpu.exchange(&words, side.parse().unwrap(), LOTS.0, Deadline::after(LOTS.1)).unwrap().into_iter();
    let seconds = median(rounds.len(), || rounds.next().unwrap());
    home.send(seconds.to_string().as_bytes(), &[], soon()).unwrap();
}
