//! Ranks that are killed at numbered steps of operations on tensors of GPUs, on the host and on their queues, with more
//! operations behind: the others hear who died, their queues are free, they go on in a smaller group, and nothing is left.
//! The GPUs are threads. TEST_FULL=1 kills at every step; otherwise each run takes some of them, spread over all.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod gpus;
mod ranks;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gpus::{SUM, copies, gpu, nothing_is_left, queue, settings, tensor, usage, variable, works};
use ranks::{LONG, Process, Rank, Ranks, await_parent, describe, outcome, say};
use rustix::process::{Signal, getpid, kill_process};
use rustix::time::{ClockId, clock_gettime};
use tensorwire::collective::hooks;
use tensorwire::device::threads::{Settings, hook};
use tensorwire::device::{Abort, Caching, Flag, Layout, Mark, Queue, View};
use tensorwire::{Deadline, Dtype, Error, Group, ReduceOp, Sparse, Tensor, Work};

/// One kill.
#[derive(Debug, Clone, Copy)]
struct Kill {
    /// On its queue, or on the host.
    on_queue: bool,
    /// Before which command, or at which point.
    at: usize,
    /// The first rank, which works for those of its GPU, or the last.
    first: bool,
}

impl Kill {
    fn write(kills: &[Self]) -> String {
        let one = |kill: &Self| format!("{} {} {}", u8::from(kill.on_queue), kill.at, u8::from(kill.first));
        kills.iter().map(one).collect::<Vec<_>>().join(",")
    }

    fn read(text: &str) -> Vec<Self> {
        let one = |text: &str| {
            let words: Vec<usize> = text.split(' ').map(|word| word.parse().unwrap()).collect();
            Self { on_queue: words[0] == 1, at: words[1], first: words[2] == 1 }
        };
        text.split(',').map(one).collect()
    }
}

/// Kills from here on are no steps but times: so many microseconds after the operations begin.
const TIMED: usize = 1 << 20;

fn die() {
    say(&format!("dies {}", nanos()));
    kill_process(getpid(), Signal::KILL).unwrap();
    std::thread::sleep(LONG);
}

/// The clock that all processes share.
fn nanos() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Counts points of operations or commands, and does something before one of them.
fn at_step(on_queue: bool, at: usize, act: impl Fn() + Send + Sync + 'static) -> Arc<AtomicUsize> {
    let passed = Arc::new(AtomicUsize::new(0));
    let count = passed.clone();
    let step = move || {
        if count.fetch_add(1, Ordering::SeqCst) == at {
            act();
        }
    };
    match on_queue {
        true => hook::set(move |_| step()),
        false => hooks::set(move |_| step()),
    }
    passed
}

/// Rows on a GPU, whose keys are on all ranks, on some, and on one.
fn sparse(group: &Group, number: usize, count: usize) -> Sparse {
    let keys: Vec<i64> = (0..count as i64).map(|index| index * (group.rank() as i64 + 1)).collect();
    let rows = tensor(group, &gpu(number), &vec![1i32; count]);
    let size = (group.world() * count) as u64;
    Sparse::new(Tensor::private(&keys).unwrap(), rows, &[size]).unwrap()
}

/// Several operations, one behind the other, on two queues of the caller and on one of the group. Gives all errors.
fn burst(group: &Group, number: usize, queues: &mut [Box<dyn Queue>; 2], round: usize) -> Vec<Error> {
    let (world, device) = (group.world(), gpu(number));
    let ints = |count: usize| tensor(group, &device, &vec![1i32; count]);
    let (mut works, mut errors): (Vec<Work>, Vec<Error>) = (Vec::new(), Vec::new());
    for step in 0..5 {
        let wide = ints(2 * 100 * world);
        let layout = Layout::with_origin(&[100 * world], &[2], 4, 4).unwrap();
        let columns = Tensor::new(wide.span().clone(), Dtype::I32, layout).unwrap();
        // In one of them the last rank has its tensor on the host, and all go through memory of the host.
        let is_last = group.rank() + 1 == world;
        let mixed = if is_last { Tensor::private(&vec![1i32; 3000]).unwrap() } else { ints(3000) };
        let call = match (round + step) % 6 {
            0 => group.all_reduce(&ints(3000), SUM),
            1 => group.broadcast(&ints(700), world - 1),
            2 => group.all_gather_into(&columns, &ints(100)),
            3 => group.reduce_scatter_from(&ints(50), &ints(50 * world), SUM),
            4 => group.all_reduce(&mixed, SUM),
            _ => group.all_to_all_into(&ints(30 * world), &ints(30 * world)),
        };
        let [first, second] = queues;
        let begun = match step {
            0 | 3 => call.on(&mut **first),
            1 => call.on(&mut **second),
            2 => call.after(&mut **first).and_then(|call| call.start()).and_then(|work| {
                work.wait_on(&mut **second)?;
                Ok(work)
            }),
            _ => call.start(),
        };
        match begun {
            Ok(work) => works.push(work),
            Err(error) => {
                errors.push(error);
                break;
            }
        }
    }
    errors.extend(works.iter().filter_map(|work| work.wait().err()));
    errors
}

/// Two all-reduces of sparse tensors, one behind the other, each behind a queue of the caller: by key, and dense. Gives all
/// errors.
fn two_sparse(group: &Group, number: usize, queues: &mut [Box<dyn Queue>; 2], round: usize) -> Vec<Error> {
    let (mut begun, mut errors) = (Vec::new(), Vec::new());
    let tensor = sparse(group, number, 40);
    for (step, queue) in queues.iter_mut().enumerate() {
        let call = group.all_reduce_sparse(&tensor, SUM).dense((round + step).is_multiple_of(2));
        match call.after(&mut **queue).and_then(|call| call.start()) {
            Ok(work) => begun.push(work),
            Err(error) => {
                errors.push(error);
                break;
            }
        }
    }
    let (world, count) = (group.world() as i64, 40);
    let has = |rank: i64, key: i64| key % (rank + 1) == 0 && key / (rank + 1) < count;
    let sums = (0..world * count).map(|key| (0..world).filter(|&rank| has(rank, key)).count() as i32);
    let sums: Vec<i32> = sums.filter(|&sum| sum > 0).collect();
    for work in begun {
        match work.wait() {
            Ok(result) => assert_eq!(result.rows().to_vec::<i32>().unwrap(), sums),
            Err(error) => errors.push(error),
        }
    }
    assert_eq!(tensor.rows().to_vec::<i32>().unwrap(), [1; 40], "what was given stays as it is");
    errors
}

/// Begins operations on the GPU of a number, in the round of a number, waits for their ends, and gives their errors.
type Operations = fn(&Group, usize, &mut [Box<dyn Queue>; 2], usize) -> Vec<Error>;

/// What ranks are at when one of them dies or is late.
struct Busy {
    work: Operations,
    /// How many points a rank of so many passes at most, and how many commands. Ranks that are late see that it holds.
    most: fn(usize) -> [usize; 2],
    /// On a real GPU, where processes take long to start, one of so many points has a kill.
    real: usize,
}

const BURST: Busy = Busy { work: burst, most: |world| [40 + 3 * world, 48], real: 1 };
const SPARSE: Busy = Busy { work: two_sparse, most: |world| [72 + 8 * world, 24], real: 4 };

/// Rank after rank dies, and those who are left go on.
fn survive(rank: &Rank, busy: &Busy, gpus: usize) {
    let kills = Kill::read(&variable("KILLS"));
    let mut group = rank.group();
    // Ranks change with the group; the GPU stays.
    let number = rank.rank % gpus;
    let mut queues = [0, 1].map(|_| queue(&group, &gpu(number)));
    // When the death of each was told, and when the queues were free.
    let mut times = Vec::new();
    for (round, kill) in kills.into_iter().enumerate() {
        let before = usage();
        works(&group, &gpu(number));
        let victim = if kill.first { 0 } else { group.world() - 1 };
        let mut passed = None;
        if group.rank() == victim && kill.at >= TIMED {
            let moment = Duration::from_micros((kill.at - TIMED) as u64);
            passed = Some(Arc::default());
            std::thread::spawn(move || {
                std::thread::sleep(moment);
                die();
            });
        } else if group.rank() == victim {
            passed = Some(at_step(kill.on_queue, kill.at, die));
        }
        let mut errors = (busy.work)(&group, number, &mut queues, round);
        if let Some(passed) = passed {
            assert!(errors.is_empty(), "{errors:?}");
            say(&format!("{kill:?} comes behind {} steps", passed.load(Ordering::SeqCst)));
            die();
        }
        // MPS may end the work of all with one process.
        let served = group.context().device(&gpu(number)).unwrap().is_served();
        for error in &errors {
            let says = error.to_string().contains("MPS serves the GPU");
            let has_host = group.rank() + 1 == group.world();
            assert!(says == served || has_host && !says, "{kill:?}: {error}");
        }
        if errors.is_empty() {
            errors.push(group.barrier().wait().unwrap_err());
        }
        let told = nanos();
        let member = &group.members()[victim];
        for error in &errors {
            let text = describe(error);
            assert!(text.starts_with(&format!("Died {victim} | rank {victim} (host ")), "{kill:?}: {text}");
            assert!(text.contains(&format!("pid {}", member.pid)), "{kill:?}: {text}");
        }
        queues.iter_mut().for_each(|queue| copies(&group, &gpu(number), &mut **queue));
        times.push(format!("{told} {}", nanos()));
        let next = group.shrink().unwrap();
        drop(std::mem::replace(&mut group, next));
        works(&group, &gpu(number));
        nothing_is_left(&group, before);
        group.barrier().wait().unwrap();
    }
    say(&format!("survived {}", times.join(",")));
    await_parent();
}

/// What follows a word that a rank says, among other things.
fn said(rank: &mut Process, word: &str) -> String {
    loop {
        if let Some(rest) = rank.hear().strip_prefix(word) {
            return rest.trim_start().to_owned();
        }
    }
}

/// With a real GPU, its free memory is as before, when all have ended.
fn kill_all(test: &str, world: usize, settings: &Settings, kills: &[Kill], seed: Option<u64>) {
    let Some((nvml, id)) = gpus::nvml() else { return kill_in_groups(test, world, settings, kills, seed) };
    let free = || nvml.free_memory(&id).unwrap();
    let before = free();
    kill_in_groups(test, world, settings, kills, seed);
    // The driver frees what a dead process had a little later.
    let end = Instant::now() + LONG;
    while free() < before && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("free by NVML: {before} bytes before, {} after", free());
    assert!(free() >= before, "{} bytes of {before} free ones are missing", before - free());
}

/// Where a real GPU is, figures are a row for benches/.
fn print_row(test: &str, world: usize, figures: &str) {
    if gpus::is_real() {
        println!(r#"{{"test":"{test}","ranks":{world},{figures}}}"#);
    }
}

/// `seed`: what the kills were drawn with, if they were.
fn kill_in_groups(test: &str, world: usize, settings: &Settings, kills: &[Kill], seed: Option<u64>) {
    let mut longest = [0; 2];
    for kills in kills.chunks(world - 1) {
        let variables = [("KILLS", Kill::write(kills))];
        let Ranks { ranks, server: _server } = gpus::start(test, world, settings, &variables);
        let (mut alive, mut dead, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        for mut rank in ranks {
            let status = rank.finish();
            match std::os::unix::process::ExitStatusExt::signal(&status) {
                Some(9) => dead.push(rank),
                _ if status.success() => alive.push(rank),
                _ => ends.push(rank),
            }
        }
        if let Some(rank) = ends.into_iter().next() {
            Process::expect_success(rank);
        }
        assert_eq!(alive.len(), world - kills.len());
        let mut deaths: Vec<u64> = dead.iter_mut().map(|rank| said(rank, "dies").parse().unwrap()).collect();
        deaths.sort_unstable();
        for rank in &mut alive {
            for (times, death) in said(rank, "survived").split(',').zip(&deaths) {
                let times = times.split(' ').map(|time| time.parse::<u64>().unwrap().saturating_sub(*death));
                longest.iter_mut().zip(times).for_each(|(longest, time)| *longest = time.max(*longest));
            }
        }
    }
    let [told, free] = longest.map(Duration::from_nanos);
    println!(
        "{} deaths among {world}, {settings}: named within {told:?}, queues free within {free:?}",
        kills.len()
    );
    // What law 3 and the deadlines of queues promise.
    let (deaths, told, free) = (kills.len(), told.as_secs_f64(), free.as_secs_f64());
    let seed = seed.map(|seed| format!(r#","seed":{seed}"#)).unwrap_or_default();
    print_row(test, world, &format!(r#""deaths":{deaths},"named_s":{told},"free_s":{free}{seed}"#));
}

/// Every step, or one of so many.
fn some(spread: usize) -> usize {
    // scripts/test exports it empty.
    if std::env::var("TEST_FULL").is_ok_and(|full| !full.is_empty()) { 1 } else { spread }
}

impl Busy {
    /// One of so many points that operations pass on the host or on queues.
    fn kills(&self, world: usize, on_queue: bool, spread: usize) -> Vec<Kill> {
        let (step, most) = (some(spread), (self.most)(world)[usize::from(on_queue)]);
        (0..most)
            .step_by(step)
            .enumerate()
            .map(|(index, at)| Kill { on_queue, at: (at + index % step).min(most), first: index % 2 == 0 })
            .collect()
    }
}

fn killed(test: &str, busy: &Busy, world: usize, settings: &Settings, gpus: usize, spread: usize) {
    if let Some(rank) = Rank::of_this_process() {
        return survive(&rank, busy, gpus);
    }
    if gpus::is_real() {
        // Commands of a real queue cannot be counted.
        for world in [2, 4, 8] {
            kill_all(test, world, settings, &busy.kills(world, false, busy.real), None);
        }
        return;
    }
    for on_queue in [false, true] {
        kill_all(test, world, settings, &busy.kills(world, on_queue, spread), None);
    }
}

/// How late a rank is.
const LATE: Duration = Duration::from_millis(30);

/// The first or the last rank is late at a step: everybody waits for it, and nothing else happens.
fn slowed(rank: &Rank, busy: &Busy, gpus: usize, spread: usize) {
    let group = rank.group();
    let number = rank.rank % gpus;
    let mut queues = [0, 1].map(|_| queue(&group, &gpu(number)));
    let ways: &[bool] = if gpus::is_real() { &[false] } else { &[false, true] };
    let all = ways.iter().flat_map(|&on_queue| busy.kills(group.world(), on_queue, spread));
    let (mut lates, mut longest) = (0, Duration::ZERO);
    for (round, kill) in all.enumerate() {
        let victim = if kill.first { 0 } else { group.world() - 1 };
        let passed =
            (group.rank() == victim).then(|| at_step(kill.on_queue, kill.at, || std::thread::sleep(LATE)));
        let start = Instant::now();
        let errors = (busy.work)(&group, number, &mut queues, round);
        (lates, longest) = (lates + 1, longest.max(start.elapsed()));
        assert!(errors.is_empty(), "{kill:?}: {errors:?}");
        hook::clear();
        hooks::clear();
        if let Some(passed) = passed {
            let (passed, most) =
                (passed.load(Ordering::SeqCst), (busy.most)(group.world())[usize::from(kill.on_queue)]);
            assert!(
                passed <= most,
                "{kill:?}: {passed} steps are more than {most}, so that some have no kill"
            );
        }
        works(&group, &gpu(number));
    }
    say(&format!("slowed {lates} {}", longest.as_secs_f64()));
    group.close().unwrap();
}

fn late_with(test: &str, busy: &Busy, worlds: &[usize]) {
    if let Some(rank) = Rank::of_this_process() {
        let gpus = if rank.world > 4 && !gpus::is_real() { 2 } else { 1 };
        return slowed(&rank, busy, gpus, variable("SPREAD").parse().unwrap());
    }
    let worlds: &[usize] = if gpus::is_real() { &[2, 4, 8] } else { worlds };
    for (index, settings) in gpus::all_settings().iter().enumerate() {
        for &world in worlds.iter().filter(|&&world| gpus::is_real() || world % 3 == index) {
            let spread = if gpus::is_real() { 1 } else { some(4) };
            let said = gpus::run_and_hear(test, world, settings, &[("SPREAD", spread.to_string())]);
            let words =
                said.iter().flatten().filter_map(|said| said.strip_prefix("slowed ")?.split_once(' '));
            let times: Vec<_> =
                words.map(|(lates, longest)| (lates, longest.parse::<f64>().unwrap())).collect();
            assert_eq!(times.len(), world, "{said:?}");
            let longest = times.iter().map(|(_, longest)| *longest).fold(0.0, f64::max);
            let (lates, late) = (times[0].0, LATE.as_secs_f64());
            println!(
                "{lates} lates of {late} s among {world}, {settings}: the longest round took {longest} s"
            );
            print_row(test, world, &format!(r#""lates":{lates},"late_s":{late},"longest_s":{longest}"#));
        }
    }
}

#[test]
fn late_at_steps() {
    late_with("late_at_steps", &BURST, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
}

#[test]
fn late_at_steps_of_sparse_tensors() {
    late_with("late_at_steps_of_sparse_tensors", &SPARSE, &[1, 2, 3, 6, 8]);
}

/// At any moment: TEST_KILLS of them, from the seed TEST_SEED.
fn killed_any_time(name: &str, settings: &Settings) {
    if let Some(rank) = Rank::of_this_process() {
        return survive(&rank, &BURST, 1);
    }
    let number = |name: &str, otherwise: u64| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
    };
    let clock = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(1, |time| time.subsec_nanos().into());
    let (kills, seed) = (number("TEST_KILLS", 8), number("TEST_SEED", clock));
    println!("TEST_SEED={seed} TEST_KILLS={kills}");
    let mut random = ranks::random::Random(seed);
    let one = |_| Kill { on_queue: false, at: TIMED + random.below(3000), first: random.below(2) == 0 };
    let kills: Vec<Kill> = (0..kills).map(one).collect();
    kill_all(name, if gpus::is_real() { 8 } else { 6 }, settings, &kills, Some(seed));
}

#[test]
fn killed_at_random() {
    killed_any_time("killed_at_random", &settings()[0]);
}

#[test]
fn killed_at_random_with_one_hardware_queue() {
    killed_any_time("killed_at_random_with_one_hardware_queue", &settings()[1]);
}

/// A queue whose driver has failed.
#[derive(Debug)]
struct Broken;

impl Broken {
    fn failed<T>() -> tensorwire::device::Result<T> {
        let name = "CUDA_ERROR_MPS_CLIENT_TERMINATED".into();
        Err(tensorwire::device::Error::Device { call: "cuEventRecord", code: Some(809), name })
    }
}

impl Queue for Broken {
    fn copy(&mut self, _: View<'_>, _: View<'_>, _: Caching) -> tensorwire::device::Result<()> {
        Self::failed()
    }
    fn copy_strided(
        &mut self,
        _: (View<'_>, &Layout),
        _: (View<'_>, &Layout),
    ) -> tensorwire::device::Result<()> {
        Self::failed()
    }
    fn reduce(
        &mut self,
        _: ReduceOp,
        _: Dtype,
        _: &[View<'_>],
        _: &[View<'_>],
        _: Caching,
    ) -> tensorwire::device::Result<()> {
        Self::failed()
    }
    fn signal(&mut self, _: &Flag, _: u32) -> tensorwire::device::Result<()> {
        Self::failed()
    }
    fn wait(&mut self, _: &Flag, _: u32, _: &Abort, _: Deadline) -> tensorwire::device::Result<()> {
        Self::failed()
    }
    fn mark(&mut self) -> tensorwire::device::Result<Mark> {
        Self::failed()
    }
    fn follow(&mut self, _: &Mark, _: &Abort, _: Deadline) -> tensorwire::device::Result<()> {
        Self::failed()
    }
    fn finish(&mut self, _: &Abort, _: Deadline) -> tensorwire::device::Result<()> {
        Self::failed()
    }
}

/// The driver of a GPU that MPS serves tells of a death before the watcher does: the error names who died all the same.
#[test]
fn named_where_the_driver_is_first() {
    let name = "named_where_the_driver_is_first";
    let Some(rank) = Rank::of_this_process() else {
        let Ranks { ranks, server: _server } = gpus::start(name, 3, &settings()[2], &[]);
        for mut rank in ranks {
            let status = rank.finish();
            let signal = std::os::unix::process::ExitStatusExt::signal(&status);
            assert_eq!(signal, (rank.rank == 1).then_some(9), "{}", rank.take_errors());
        }
        return;
    };
    let group = rank.group();
    works(&group, &gpu(0));
    if group.rank() == 1 {
        rank.store.get_by("failed", Deadline::after(LONG)).unwrap();
        std::thread::sleep(Duration::from_millis(30));
        return die();
    }
    let ones = tensor(&group, &gpu(0), &[1i32; 3000]);
    if group.rank() == 0 {
        rank.store.set("failed", b"1").unwrap();
        let text = describe(&group.all_reduce(&ones, SUM).after(&mut Broken).unwrap_err());
        assert!(text.starts_with("Died 1 | rank 1 (host ") && text.contains("MPS serves"), "{text}");
        let call = group.all_reduce_sparse(&sparse(&group, 0, 10), SUM);
        let text = describe(&call.after(&mut Broken).unwrap_err());
        assert!(text.starts_with("Died 1 | rank 1 (host ") && text.contains("MPS serves"), "{text}");
    }
    // In the operation itself, for whoever comes to it before the death is known.
    let text =
        describe(&group.all_reduce(&ones, SUM).on(&mut Broken).and_then(|work| work.wait()).unwrap_err());
    assert!(text.starts_with("Died 1 | rank 1 (host ") && text.contains("MPS serves"), "{text}");
    await_parent();
}

/// Where MPS serves a real GPU, nobody can count on the GPU after a death. The dead rank is named all the same, and so is MPS;
/// or the driver says that the work was ended, before it is known why.
#[test]
fn named_under_mps() {
    let name = "named_under_mps";
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let mut queues = [0, 1].map(|_| queue(&group, &gpu(0)));
        works(&group, &gpu(0));
        if group.rank() == 1 {
            let moment = Duration::from_micros(variable("MOMENT").parse().unwrap());
            std::thread::spawn(move || {
                std::thread::sleep(moment);
                die();
            });
        }
        for round in 0.. {
            let errors = burst(&group, 0, &mut queues, round);
            let Some(error) = errors.first() else { continue };
            let text = describe(error);
            say(&format!("hears {} {text}", nanos()));
            let served = group.context().device(&gpu(0)).unwrap().is_served();
            // The last rank may have had its tensor on the host.
            let says = text.contains("MPS serves");
            let fits = says == served || group.rank() + 1 == group.world() && !says;
            let told = text.starts_with("Died 1 | rank 1 (host ") && fits;
            assert!(told || served && text.contains("CUDA_ERROR_"), "{text}");
            // Whatever the driver does at the end of a process that it has given up.
            kill_process(getpid(), Signal::TERM).unwrap();
        }
    }
    let mut random = ranks::random::Random(7);
    for world in [2, 4] {
        let mut longest = 0;
        let deaths = 3;
        for _ in 0..deaths {
            let variables = [("MOMENT", random.below(3000).to_string())];
            let Ranks { mut ranks, server: _server } = gpus::start(name, world, &settings()[2], &variables);
            let death = said(&mut ranks[1], "dies").parse::<u64>().unwrap();
            for mut rank in ranks {
                if rank.rank != 1 {
                    let heard = said(&mut rank, "hears");
                    println!("rank {}: {heard}", rank.rank);
                    let (at, _) = heard.split_once(' ').unwrap();
                    longest = longest.max(at.parse::<u64>().unwrap().saturating_sub(death));
                }
                let status = rank.finish();
                let signal = std::os::unix::process::ExitStatusExt::signal(&status);
                assert_eq!(signal, Some(if rank.rank == 1 { 9 } else { 15 }), "{}", rank.take_errors());
            }
        }
        let longest = Duration::from_nanos(longest);
        println!("{deaths} deaths among {world} under MPS: named within {longest:?}");
        print_row(name, world, &format!(r#""deaths":{deaths},"named_s":{}"#, longest.as_secs_f64()));
    }
}

#[test]
fn killed_at_steps() {
    killed("killed_at_steps", &BURST, 6, &settings()[0], 1, 3);
}

#[test]
fn killed_at_steps_of_two_gpus() {
    killed("killed_at_steps_of_two_gpus", &BURST, 6, &settings()[0], 2, 5);
}

#[test]
fn killed_at_steps_with_one_hardware_queue() {
    killed("killed_at_steps_with_one_hardware_queue", &BURST, 5, &settings()[1], 1, 5);
}

#[test]
fn killed_at_steps_under_mps() {
    killed("killed_at_steps_under_mps", &BURST, 5, &settings()[2], 2, 5);
}

#[test]
fn killed_of_eight() {
    killed("killed_of_eight", &BURST, 8, &settings()[0], 1, 10);
}

#[test]
fn killed_of_nine() {
    killed("killed_of_nine", &BURST, 9, &settings()[0], 2, 20);
}

#[test]
fn killed_at_steps_of_sparse_tensors() {
    killed("killed_at_steps_of_sparse_tensors", &SPARSE, 4, &settings()[0], 1, 5);
}

#[test]
fn killed_at_steps_of_sparse_tensors_of_two_gpus() {
    killed("killed_at_steps_of_sparse_tensors_of_two_gpus", &SPARSE, 6, &settings()[0], 2, 7);
}

#[test]
fn killed_at_steps_of_sparse_tensors_with_one_hardware_queue() {
    killed("killed_at_steps_of_sparse_tensors_with_one_hardware_queue", &SPARSE, 3, &settings()[1], 1, 7);
}

#[test]
fn killed_at_steps_of_sparse_tensors_under_mps() {
    killed("killed_at_steps_of_sparse_tensors_under_mps", &SPARSE, 4, &settings()[2], 2, 7);
}

/// What the ranks do whose last, or first, stops itself at a step.
fn stop(rank: &Rank) {
    let (on_queue, at) = (variable("ON_QUEUE") == "1", variable("POINT").parse().unwrap());
    let group = rank.group();
    let victim = if variable("FIRST") == "1" { 0 } else { group.world() - 1 };
    let device = gpu(0);
    works(&group, &device);
    let mut own = queue(&group, &device);
    let ones = tensor(&group, &device, &[1i32; 3000]);
    let is_victim = group.rank() == victim;
    if is_victim {
        at_step(on_queue, at, || {
            say("stops");
            kill_process(getpid(), Signal::STOP).unwrap();
            // A thread may go on for a moment after it has stopped its process.
            std::thread::sleep(Duration::from_millis(50));
        });
    }
    // Where many are at it, each has its turn later.
    let patience = Duration::from_millis(1500 + 250 * group.world() as u64);
    let start = Instant::now();
    let deadline = Deadline::after(if is_victim { LONG } else { patience });
    let begun = group.all_reduce(&ones, SUM).deadline(deadline).on(&mut *own);
    let where_it_failed = if begun.is_ok() { "queue" } else { "call" };
    let end = begun.and_then(|work| work.wait());
    if !is_victim {
        say(&start.elapsed().saturating_sub(patience).as_secs_f64().to_string());
    }
    say(&format!("{where_it_failed} {}", outcome(&end)));
    if !is_victim {
        copies(&group, &device, &mut *own);
    }
    await_parent();
}

/// Waits until a process has stopped; it may have said so too early.
fn await_stop(pid: u32) {
    let end = Instant::now() + LONG;
    let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    while !state().contains(") T ") {
        assert!(Instant::now() < end, "{}", state());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn stopped(test: &str, world: usize, settings: &Settings, points: &[(bool, bool, usize)]) {
    // How many have stopped, and how long behind its deadline somebody has heard of it.
    let (mut count, mut longest) = (0, 0.0f64);
    for &(first, on_queue, at) in points {
        let yes = |yes: bool| u8::from(yes).to_string();
        let variables = [("FIRST", yes(first)), ("ON_QUEUE", yes(on_queue)), ("POINT", at.to_string())];
        let Ranks { mut ranks, server: _server } = gpus::start(test, world, settings, &variables);
        let victim = if first { 0 } else { world - 1 };
        let others = (0..world).filter(|&rank| rank != victim);
        let heard = others.map(|rank| (ranks[rank].hear().parse::<f64>().unwrap(), ranks[rank].hear()));
        let (behind, heard): (Vec<f64>, Vec<String>) = heard.unzip();
        let mut theirs = ranks[victim].hear();
        let stops = theirs == "stops";
        if stops {
            await_stop(ranks[victim].pid());
            ranks[victim].signal(Signal::CONT);
            theirs = ranks[victim].hear();
            (count, longest) = (count + 1, behind.into_iter().fold(longest, f64::max));
        }
        let what = if on_queue { "command" } else { "point" };
        println!("{settings}: rank {victim} of {world} at {what} {at}: others {heard:?}; itself {theirs}");
        for text in heard.iter().filter(|text| !text.ends_with(" ok")) {
            assert!(stops, "{text}");
            // One that works for nobody holds up nobody's memory: its queue was late, and that is all.
            if !first && text.contains("TimedOut | ") {
                assert!(text.contains(&format!("it waited for the queue of rank {victim} (host ")), "{text}");
                continue;
            }
            assert!(text.contains(&format!("Stuck {victim} | rank {victim} (host ")), "{text}");
            assert!(text.contains("shrink()"), "{text}");
            assert!(!text.contains("before its first operation"), "{text}");
            if text.starts_with("queue ") {
                let wanted = format!("may still be written by the queue of rank {victim} ");
                assert!(text.contains(&wanted), "{text}");
            }
        }
        // Nobody was there to give up.
        assert!((stops && world > 1) || theirs.ends_with(" ok"), "{theirs}");
    }
    print_row(test, world, &format!(r#""stops":{count},"behind_deadline_s":{longest}"#));
}

/// Each stop is one in another world, in turn: `world` is that of the first one.
fn stopped_with(test: &str, world: usize, settings: &Settings, step: usize) {
    if let Some(rank) = Rank::of_this_process() {
        return stop(&rank);
    }
    let step = if gpus::is_real() { 1 } else { some(step) };
    let mut points = Vec::new();
    for first in [true, false] {
        points.extend((0..7).map(|at| (first, false, at)));
        // Commands of a real queue cannot be counted.
        let commands = if gpus::is_real() { 0 } else { 5 };
        points.extend((0..commands).map(|at| (first, true, at)));
    }
    let points: Vec<_> = points.into_iter().step_by(step).collect();
    if gpus::is_real() {
        return [2, 4, 8].into_iter().for_each(|world| stopped(test, world, settings, &points));
    }
    let worlds = (1..=9).cycle().skip(world - 1);
    for (point, world) in points.into_iter().zip(worlds) {
        stopped(test, world, settings, &[point]);
    }
}

/// A queue that is only late: the operation times out, the error says whose queue it was, and the next one works. The last
/// rank is held before its first command until the others have given up.
fn late(rank: &Rank) {
    let first = rank.group();
    let (device, last) = (gpu(0), first.world() - 1);
    let all: Vec<usize> = (0..first.world()).collect();
    for round in 0..5 {
        let group = first.subgroup(&all).unwrap();
        works(&group, &device);
        let (gone, stuck) = (format!("gone {round}"), format!("stuck {round}"));
        let mut own = queue(&group, &device);
        let ones = tensor(&group, &device, &[1i32; 3000]);
        let is_last = group.rank() == last;
        if is_last && gpus::is_real() {
            // Something that is queued before holds the queue.
            let held = gpus::hold(&group, &mut *own);
            let store = rank.store.clone();
            std::thread::spawn(move || {
                store.get_by(&gone, Deadline::after(LONG)).unwrap();
                held.signal(1);
            });
        } else if is_last {
            let (store, open) = (rank.store.clone(), Arc::new(AtomicBool::new(false)));
            let opened = open.clone();
            std::thread::spawn(move || {
                store.get_by(&gone, Deadline::after(LONG)).unwrap();
                open.store(true, Ordering::SeqCst);
            });
            // All commands: one of an operation before may not have run yet.
            hook::set(move |_| {
                let end = Instant::now() + LONG;
                while !opened.load(Ordering::SeqCst) && Instant::now() < end {
                    std::thread::sleep(Duration::from_micros(100));
                }
            });
            // For a stream without work, the host would signal.
            let other = tensor(&group, &device, &[0i32; 3000]);
            own.copy(other.span().view(), ones.span().view(), Default::default()).unwrap();
        }
        let time = if is_last { LONG } else { Duration::from_secs(1) };
        let begun = group.all_reduce(&ones, SUM).deadline(Deadline::after(time)).on(&mut *own);
        let text = describe(&begun.and_then(|work| work.wait()).unwrap_err());
        hook::clear();
        println!("rank {}: {text}", group.rank());
        let broke = text.starts_with("Stuck ");
        if !broke {
            assert!(text.starts_with("TimedOut | "), "{text}");
            assert!(text.contains(&format!("it waited for the queue of rank {last} (host ")), "{text}");
            assert!(text.contains("; other work is before it on that queue"), "{text}");
            assert!(text.contains("time-out was given with the call"), "{text}");
        }
        if is_last {
            rank.store.set(&stuck, if broke { b"1" } else { b"0" }).unwrap();
        } else {
            rank.store.set(&format!("gone {round}"), b"1").unwrap();
        }
        copies(&group, &device, &mut *own);
        // On a busy machine it may be held for more than a second, and that breaks the group.
        if rank.store.get_by(&stuck, Deadline::after(LONG)).unwrap() == b"0" {
            return works(&group, &device);
        }
    }
    panic!("the queue was held for more than a second, five times");
}

#[test]
fn late_queues() {
    if let Some(rank) = Rank::of_this_process() {
        return late(&rank);
    }
    for (settings, world) in gpus::all_settings().iter().zip([4, 2, 3]) {
        gpus::run("late_queues", world, settings, &[]);
    }
}

#[test]
fn stopped_at_steps() {
    stopped_with("stopped_at_steps", 1, &settings()[0], 2);
}

#[test]
fn stopped_at_steps_with_one_hardware_queue() {
    stopped_with("stopped_at_steps_with_one_hardware_queue", 4, &settings()[1], 5);
}

#[test]
fn stopped_at_steps_under_mps() {
    stopped_with("stopped_at_steps_under_mps", 8, &settings()[2], 5);
}

/// The worker is stopped before its queue begins. The other rank hears that the group is broken and lets go of its tensor, which
/// the worker's queue may still write.
fn hold_on(rank: &Rank) {
    let group = rank.group();
    let device = gpu(0);
    works(&group, &device);
    let pool = group.context().pool(&device).unwrap();
    pool.trim();
    let (before, mut own) = (usage(), queue(&group, &device));
    // So large that it has an allocation of its own.
    let ones = tensor(&group, &device, &vec![1i32; 6 << 18]);
    let works_for_all = group.rank() == 0;
    if works_for_all {
        at_step(true, 0, || {
            say("stops");
            kill_process(getpid(), Signal::STOP).unwrap();
            std::thread::sleep(Duration::from_millis(50));
        });
    }
    let time = if works_for_all { LONG } else { Duration::from_secs(1) };
    let begun = group.all_reduce(&ones, SUM).deadline(Deadline::after(time)).on(&mut *own);
    let text = describe(&begun.and_then(|work| work.wait()).unwrap_err());
    if works_for_all {
        return await_parent();
    }
    assert!(
        text.starts_with("Stuck 0 | ") && text.contains("may still be written by the queue of"),
        "{text}"
    );
    drop(ones);
    // Long enough for whoever lets it go too early.
    for _ in 0..20 {
        pool.trim();
        assert!(usage()[0].1 > before[0].1, "the memory has gone: {:?}, {before:?} before", usage());
        std::thread::sleep(Duration::from_millis(5));
    }
    say("held");
    nothing_is_left(&group, before);
    say("free");
    await_parent();
}

#[test]
fn memory_is_held_until_its_worker_has_left_or_ended() {
    let name = "memory_is_held_until_its_worker_has_left_or_ended";
    if let Some(rank) = Rank::of_this_process() {
        return hold_on(&rank);
    }
    for ends in [false, true] {
        let Ranks { mut ranks, server: _server } = gpus::start(name, 2, &settings()[0], &[]);
        assert_eq!(ranks[0].hear(), "stops");
        await_stop(ranks[0].pid());
        assert_eq!(ranks[1].hear(), "held");
        match ends {
            true => ranks[0].kill(),
            false => ranks[0].signal(Signal::CONT),
        }
        assert_eq!(ranks[1].hear(), "free");
        let mut ranks = ranks.into_iter();
        let mut first = ranks.next().unwrap();
        assert_eq!(first.finish().success(), !ends, "{}", first.take_errors());
        ranks.for_each(Process::expect_success);
    }
}
