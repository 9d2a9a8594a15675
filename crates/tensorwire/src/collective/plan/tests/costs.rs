//! The tables of docs/algorithms.md against the plans: signals, waits and bytes of each rank; and numbers that docs state
//! against the code that decides them.

use super::ops::{Case, Op};
use crate::collective::lines::END;
use crate::collective::plan::{ARRIVED, Counts, DONE, LINE, PAYLOAD, PartPlace, Plan, Step, Who, Workers};
use crate::collective::sparse::ranges::{MOST_SAMPLES, SAMPLES};
use crate::collective::tuning::Tuning;
use crate::config::Config;
use crate::shm::control::{HALF, VERDICTS};
use crate::shm::header::HEADER;
use crate::shm::kind::{Kind, Path};

/// What a rank does in one operation.
#[derive(Debug, Default, PartialEq, Eq)]
struct Cost {
    signals: usize,
    /// Waits for all and for one, without those that repeat one.
    waits: (usize, usize),
    /// Bytes copied to the slot (or line), and to the output.
    copied: (usize, usize),
    /// Bytes that reductions read and write.
    reduced: (usize, usize),
}

fn cost(plan: &Plan) -> Cost {
    let mut cost = Cost::default();
    let mut latest = None;
    for step in &plan.steps {
        match step {
            Step::Signal(_) => cost.signals += 1,
            Step::Wait(Who::One(_), _) => cost.waits.1 += 1,
            Step::Wait(Who::All, tick) => {
                cost.waits.0 += usize::from(latest < Some(*tick));
                latest = latest.max(Some(*tick));
            }
            Step::Copy { into, .. } if into.place == PartPlace::Output => cost.copied.1 += into.len,
            Step::Copy { into, .. } => cost.copied.0 += into.len,
            Step::Reduce { inputs, outputs, .. } => {
                cost.reduced.0 += plan.parts(inputs).iter().map(|part| part.len).sum::<usize>();
                cost.reduced.1 += plan.parts(outputs).iter().map(|part| part.len).sum::<usize>();
            }
        }
    }
    cost
}

/// What the tables say, for `b` bytes to or from each rank and `r` rounds.
fn table(kind: Kind, path: Path, n: usize, r: usize, b: usize, root: bool) -> Cost {
    let direct = |copied: usize, reduced| Cost { signals: 2, waits: (3, 0), copied: (0, copied), reduced };
    let rounds = r + usize::from(r.is_multiple_of(2));
    let cost = |signals, waits, copied, reduced| Cost { signals, waits, copied, reduced };
    // Small parts are put together, with the own one.
    let laned = if r == 1 && n * b <= 16 << 10 { n * b } else { n * b - b };
    match (path, kind, root) {
        (_, Kind::Barrier, _) => cost(1, (2, 0), (0, 0), (0, 0)),
        (Path::Direct, Kind::AllReduce, _) => direct(0, (b, b)),
        (Path::Direct, Kind::Reduce, _) => direct(0, (b, b / n)),
        (Path::Direct, Kind::Broadcast, true) | (Path::Direct, Kind::Gather, false) => direct(0, (0, 0)),
        (Path::Direct, Kind::Broadcast | Kind::Scatter, _) => direct(b, (0, 0)),
        (Path::Direct, Kind::ReduceScatter, _) => direct(0, (n * b, b)),
        (Path::Direct, _, _) => direct(n * b, (0, 0)),
        (Path::Staged, Kind::AllReduce | Kind::Reduce, _) => {
            let (signals, part) = (2 * r + usize::from(r.is_multiple_of(2)), b / n);
            match (kind, root) {
                (Kind::AllReduce, _) => {
                    cost(signals, (1 + r, r * (n - 1)), (b - part, b - part), (b, 2 * part))
                }
                (_, true) => cost(signals, (1 + r, r * (n - 1)), (b - part, b - part), (b, part)),
                (_, false) => cost(signals, (1 + r, 0), (b - part, 0), (b, part)),
            }
        }
        (_, Kind::AllReduce, _) => cost(1, (2, 0), (b, 0), (n * b, b)),
        (_, Kind::Reduce, true) => cost(1, (2, 0), (0, 0), (n * b, b)),
        (_, Kind::Reduce, false) => cost(1, (1, 0), (b, 0), (0, 0)),
        (_, Kind::Broadcast, true) => cost(rounds, (r, 0), (b, 0), (0, 0)),
        (_, Kind::Scatter, true) => cost(rounds, (r, 0), (laned, b), (0, 0)),
        (_, Kind::Broadcast | Kind::Scatter, false) => cost(rounds, (1, r), (0, b), (0, 0)),
        (_, Kind::Gather, true) => cost(rounds, (1 + r, 0), (0, n * b), (0, 0)),
        (_, Kind::Gather, false) => cost(rounds, (r.min(2), r.saturating_sub(2)), (b, 0), (0, 0)),
        (_, Kind::ReduceScatter, _) => cost(rounds, (1 + r, 0), (laned, 0), (n * b, b)),
        (_, Kind::AllToAll, _) => cost(rounds, (1 + r, 0), (laned, n * b), (0, 0)),
        _ => cost(rounds, (1 + r, 0), (b, n * b), (0, 0)),
    }
}

#[test]
fn plans_cost_what_is_written() {
    for &kind in Kind::ALL.iter().filter(|kind| !matches!(kind, Kind::Send | Kind::Recv)) {
        for (path, n, rounds) in Path::ALL
            .iter()
            .flat_map(|&path| (2..=5).map(move |n| (path, n)))
            .flat_map(|(path, n)| (1..=if path == Path::Staged { 5 } else { 1 }).map(move |r| (path, n, r)))
        {
            let window = n * LINE;
            let bytes = match path {
                _ if kind == Kind::Barrier => 0,
                Path::Inline => 32 / n,
                // A round of scatter is for all ranks together.
                Path::OneShot | Path::Staged if kind == Kind::Scatter => rounds * window / n,
                _ => rounds * window,
            };
            let (counts, root) = (Counts::Even(bytes), n - 1);
            let op = Op { root, window, ..Op::new(kind, path, counts) };
            let case = Case { world: n, half: 2 * n * window, first: 1, ops: Vec::new() };
            for me in [0, root] {
                let written = table(kind, path, n, rounds, bytes, me == root);
                assert_eq!(cost(&op.plan(me, &case)), written, "rank {me} of {n}, {rounds} rounds: {op:?}");
            }
        }
    }
}

/// What the tables say of queued plans: signals, words of ARRIVED and of DONE that are waited for; `b` bytes for each.
fn queued_table(kind: Kind, n: usize, b: usize, me: usize, root: usize, workers: &Workers) -> Queued {
    let (all, works) = (workers.each(n), workers.of(me) == me);
    let (w, s) = (all.len(), (0..n).filter(|&rank| workers.of(rank) == me).count());
    let serves_root = workers.of(root) == me;
    let both_ways = !matches!(kind, Kind::Broadcast | Kind::Scatter | Kind::Gather | Kind::Barrier);
    let words = match kind {
        _ if n == 1 => (0, 0, 0),
        Kind::Barrier => (1, n - 1, 0),
        Kind::Gather if serves_root => (1, n - 1, 0),
        Kind::Gather => (1, 0, 1),
        _ if w == 1 && works => (1, n - 1, 0),
        _ if w == 1 => (1, 0, 1),
        _ if both_ways && works => (2, n - 1, w - 1),
        _ if both_ways => (1, 0, w),
        // One way, from the root.
        _ if me == root && works => (1 + usize::from(s > 1), s - 1, w - 1),
        _ if me == root => (1, 0, w),
        _ if serves_root => (1, s - 1, 0),
        _ if works => (1, s, 0),
        _ => (1, 0, 1),
    };
    let (copied, reduced) = match kind {
        Kind::AllReduce if works => (0, (n * b / w, n * b / w)),
        Kind::Reduce if works => (0, (n * b / w, b / w)),
        Kind::ReduceScatter => (0, (n * s * b, s * b)),
        Kind::Broadcast => ((s - usize::from(serves_root)) * b, (0, 0)),
        Kind::Scatter => (s * b, (0, 0)),
        Kind::Gather => (if serves_root { n * b } else { 0 }, (0, 0)),
        Kind::AllGather | Kind::AllToAll => (s * n * b, (0, 0)),
        kind if kind.tells_numbers() => (s * n * b, (0, 0)),
        _ => (0, (0, 0)),
    };
    Queued { words, copied, reduced }
}

/// What a rank does in a queued operation.
#[derive(Debug, PartialEq, Eq)]
struct Queued {
    words: (usize, usize, usize),
    copied: usize,
    reduced: (usize, usize),
}

#[test]
fn queued_plans_cost_what_is_written() {
    for &kind in Kind::ALL.iter().filter(|kind| !matches!(kind, Kind::Send | Kind::Recv)) {
        for (n, devices, root) in (1..=6).flat_map(|n| (1..=3).map(move |d| (n, d.min(n), n - 1))) {
            // So that chunks are equal.
            let bytes = if kind == Kind::Barrier { 0 } else { 6 * LINE };
            let workers = Workers::by_device(&(0..n).map(|rank| rank % devices).collect::<Vec<_>>());
            let case = Case { world: n, half: LINE, first: 1, ops: Vec::new() };
            let op = |root| {
                let workers = workers.clone();
                Op { root, workers, ..Op::new(kind, Path::Direct, Counts::Even(bytes)) }
            };
            for (me, root) in (0..n).flat_map(|me| [(me, 0), (me, root)]) {
                let plan = op(root).plan(me, &case);
                let waits = |word: u32| {
                    let ranks = plan.steps.iter().map(|step| match *step {
                        Step::Wait(Who::All, target) if target == word => n - 1,
                        Step::Wait(Who::One(_), target) if target == word => 1,
                        _ => 0,
                    });
                    ranks.sum::<usize>()
                };
                let cost = cost(&plan);
                let words = (cost.signals, waits(ARRIVED), waits(DONE));
                let copied = cost.copied.0 + cost.copied.1;
                let does = Queued { words, copied, reduced: cost.reduced };
                let written = queued_table(kind, n, bytes, me, root, &workers);
                assert_eq!(does, written, "{kind:?}, rank {me} of {n}, root {root}: {workers:?}");
            }
        }
    }
}

/// Fails unless the file says all of this; how its lines are broken does not matter.
fn assert_says(file: &str, phrases: &[String]) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file);
    let text = std::fs::read_to_string(path).unwrap();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let missing: Vec<_> = phrases.iter().filter(|phrase| !text.contains(*phrase)).collect();
    assert!(missing.is_empty(), "{file} does not say what the code does. By the code it has: {missing:#?}");
}

fn kib(bytes: usize) -> String {
    assert!(bytes.is_multiple_of(1 << 10), "{bytes} is no whole number of KiB");
    if bytes.is_multiple_of(1 << 20) {
        format!("{} MiB", bytes >> 20)
    } else {
        format!("{} KiB", bytes >> 10)
    }
}

/// The plan of a rank of a group of `n`, with the numbers that groups have.
fn real(kind: Kind, path: Path, n: usize, me: usize, bytes: usize) -> Plan {
    let tuning = Tuning::new(n);
    let window = match (path, kind) {
        (Path::OneShot, _) => HALF,
        (_, Kind::AllReduce | Kind::Reduce) => tuning.reduce_window,
        _ => tuning.window,
    };
    let (counts, announced) = (Counts::Even(bytes), bytes >= tuning.direct);
    let op = Op { window, announced, ..Op::new(kind, path, counts) };
    op.plan(me, &Case { world: n, half: HALF, first: 1, ops: Vec::new() })
}

#[test]
fn algorithms_state_the_numbers_of_the_code() {
    let tuning = Tuning::new(4);
    let (least, most) = (Tuning::new(1 << 10).one_shot, Tuning::new(1).one_shot);
    let all = tuning.one_shot * 4 * 4;
    // Scatter puts the root's own part too where all parts together are small.
    let together =
        |bytes: usize| cost(&real(Kind::Scatter, Path::OneShot, 4, 0, bytes)).copied.0 == 4 * bytes;
    let small = (1..HALF / 4 / LINE).map(|lines| lines * LINE).take_while(|&bytes| together(bytes)).last();
    assert_eq!((1 << 20) - 1, END);
    assert_says(
        "docs/algorithms.md",
        &[
            format!("two halves ({} each)", kib(HALF)),
            format!("bytes 8 to {} say", 8 + HEADER),
            format!("bytes {} to {LINE} are a small", LINE - PAYLOAD),
            format!("fits into {PAYLOAD} bytes"),
            format!("reductions up to {} / n²", kib(all)),
            format!("(at least {}, at most {})", kib(least), kib(most)),
            format!("other kinds up to {} a part", kib(tuning.window)),
            format!("from {} on, if all", kib(tuning.direct)),
            format!("From {} on, ranks *announce*", kib(tuning.direct)),
            format!("`W` is the window ({}), or less", kib(tuning.reduce_window)),
            format!("`W` is the window ({}; one-shot", kib(tuning.window)),
            format!("at most {} together are put with one copy", kib(small.unwrap() * 4)),
            format!("the verdict (`k % {VERDICTS}`)"),
            format!("from {} of a rank's tensors on", kib(tuning.share)),
            format!("up to {} threads", ["no", "one", "two", "three", "four"][tuning.threads]),
            format!("at most {} together, so", kib(tuning.launch)),
            format!("({SAMPLES} for each rank of the group, at most {MOST_SAMPLES})"),
            "ticks of an operation | 2^20 - 2".into(),
            format!("{} GiB | rounds of {}", tuning.window >> 11, kib(tuning.window)),
        ],
    );
}

#[test]
fn the_design_tells_the_life_of_the_all_reduce_that_happens() {
    let (n, bytes) = (4, 1 << 20);
    assert_eq!(Tuning::new(n).path(Kind::AllReduce, bytes, 1), Path::Staged);
    let plan = real(Kind::AllReduce, Path::Staged, n, 0, bytes);
    let chunks: Vec<usize> = plan
        .steps
        .iter()
        .filter_map(|step| match step {
            Step::Reduce { outputs, .. } => Some(plan.parts(outputs)[0].len),
            _ => None,
        })
        .collect();
    let largest = *chunks.iter().max().unwrap();
    let rounds = ["no", "one", "two", "three", "four"][chunks.len()];
    assert_says(
        "docs/design.md",
        &[
            format!(
                "{rounds} rounds of at most {}, of which each rank reduces at most {}",
                kib(n * largest),
                kib(largest)
            ),
            format!("number in the sequence: {HEADER} bytes"),
        ],
    );
}

#[test]
fn docs_state_what_holds_unless_it_is_set() {
    let config = Config::default();
    assert!(config.settings().len() <= 15, "law 10 of docs/design.md");
    assert_says("docs/design.md", &["at most 15 variables".into()]);
    let unless = format!("({} s unless given)", config.timeout.as_secs());
    assert_says("python/tensorwire/lease.py", &[unless]);
}
