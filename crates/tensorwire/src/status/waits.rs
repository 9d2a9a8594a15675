//! Who waits for whom, as sentences. These are pure functions of what was read from the ranks.

use std::collections::BTreeMap;
use std::time::Duration;

use tensorwire_device::flag::reached;

use super::{Doing, GroupReport, Process, RankReport, Record, Standing, State};
use crate::shm::kind::Kind;
use crate::shm::sentence::{DESCRIBED, all_of, described, lasting, other_work, queues_of, since, span};

/// Some ranks (by place) that are in one operation, and those that they wait for.
struct Wait {
    waiting: Vec<usize>,
    operation: String,
    /// How long the one that came first has been there.
    longest: Option<Duration>,
    missing: Vec<usize>,
}

/// Some ranks (by place) that have queued operations which stand in the same way.
struct OnQueues<'a> {
    having: Vec<usize>,
    /// The first of them.
    operation: &'a Record,
    /// How many more there are.
    more: usize,
    standing: &'a Standing,
}

/// Fills in who waits for whom, and says it.
pub(super) fn settle(group: &mut GroupReport, now: u64) {
    let mut waits = collectives(&group.ranks, now);
    waits.extend(barriers(&group.ranks));
    let mut summary: Vec<String> = Vec::new();
    if let Some(failure) = &group.failure {
        summary.push(format!("the group has failed: {failure}"));
    }
    for wait in &waits {
        summary.push(sentence(&group.ranks, wait, now));
        let missing: Vec<usize> =
            wait.missing.iter().filter_map(|&place| group.ranks.get(place)?.rank).collect();
        for &place in &wait.waiting {
            if let Some(rank) = group.ranks.get_mut(place) {
                rank.waits_for.extend(&missing);
            }
        }
    }
    for place in 0..group.ranks.len() {
        summary.extend(messages(&mut group.ranks, place, now));
    }
    let (waiting, others) = queues(&group.ranks, now);
    wait_on_queues(&mut group.ranks);
    summary.extend(waiting);
    if summary.is_empty() {
        summary.push(quiet(&group.ranks));
    }
    summary.extend(others);
    let here = group.ranks.len();
    if group.world > here {
        summary.push(format!("{} more ranks are on other hosts; ask there", group.world - here));
    }
    group.summary = summary;
}

/// Ranks inside collectives wait for those that are not so far.
fn collectives(ranks: &[RankReport], now: u64) -> Vec<Wait> {
    let mut inside: BTreeMap<u64, Vec<(usize, &Record)>> = BTreeMap::new();
    for (place, rank) in ranks.iter().enumerate() {
        let Doing::In(records) = &rank.doing else { continue };
        // Of several, the first is the one that it is really in.
        let current = records.iter().filter(|record| !record.is_message()).min_by_key(|record| record.number);
        if let Some(record) = current {
            inside.entry(record.number).or_default().push((place, record));
        }
    }
    let mut waits = Vec::new();
    for (number, here) in inside {
        let mut waiting: Vec<usize> = here.iter().map(|(place, _)| *place).collect();
        let inside = (number as u32).wrapping_mul(2).wrapping_add(1);
        let absent = |rank: &RankReport| !reached(rank.position, inside);
        let mut missing: Vec<usize> = places(ranks, absent);
        if missing.is_empty() {
            // All have come, so the operation goes on, unless somebody in it does not.
            let halted = |place: &usize| ranks[*place].process.is_halted();
            (missing, waiting) = waiting.into_iter().partition(halted);
            // What the board says of it is more.
            if missing.is_empty() && here.iter().all(|(_, record)| record.state == State::Met) {
                continue;
            }
        }
        let titles: Vec<String> = here.iter().map(|(_, record)| record.title()).collect();
        let mut operation = titles.first().cloned().unwrap_or_default();
        if titles.iter().any(|title| *title != operation) {
            operation = format!("operation #{number} (not the same one on all ranks)");
        }
        if !waiting.is_empty() {
            let longest = here.iter().map(|(_, record)| since(record.begun, now)).max();
            waits.push(Wait { waiting, operation, longest, missing });
        }
    }
    waits
}

/// Ranks in a barrier wait for those that have not come to it.
fn barriers(ranks: &[RankReport]) -> Vec<Wait> {
    let mut inside: BTreeMap<Option<u32>, Vec<usize>> = BTreeMap::new();
    for (place, rank) in ranks.iter().enumerate() {
        if let Doing::Barrier(count) = rank.doing {
            inside.entry(count).or_default().push(place);
        }
    }
    let Some((count, mut waiting)) = inside.pop_first() else { return Vec::new() };
    let mut missing = places(ranks, |rank| rank.doing != Doing::Barrier(count));
    if missing.is_empty() {
        (missing, waiting) = waiting.into_iter().partition(|&place| ranks[place].process.is_halted());
    }
    let operation = count.map_or("the forming of the group".into(), |count| format!("barrier #{count}"));
    if waiting.is_empty() { Vec::new() } else { vec![Wait { waiting, operation, longest: None, missing }] }
}

fn places(ranks: &[RankReport], is: impl Fn(&RankReport) -> bool) -> Vec<usize> {
    ranks.iter().enumerate().filter(|(_, rank)| is(rank)).map(|(place, _)| place).collect()
}

/// Sentences about what is queued: first about what waits for a queue, then about all else.
fn queues(ranks: &[RankReport], now: u64) -> (Vec<String>, Vec<String>) {
    let mut queued: BTreeMap<u64, OnQueues<'_>> = BTreeMap::new();
    for (place, rank) in ranks.iter().enumerate() {
        for one in &rank.queued {
            let (operation, standing) = (&one.record, &one.standing);
            let new = || OnQueues { having: Vec::new(), operation, more: 0, standing };
            queued.entry(one.record.number).or_insert_with(new).having.push(place);
        }
    }
    let mut all: Vec<OnQueues<'_>> = Vec::new();
    for one in queued.into_values() {
        let like = |other: &&mut OnQueues<'_>| other.standing == one.standing && other.having == one.having;
        match all.iter_mut().find(like) {
            Some(other) => other.more += 1,
            None => all.push(one),
        }
    }
    let (mut waiting, mut others) = (Vec::new(), Vec::new());
    for one in &all {
        let waits = matches!(one.standing, Standing::Queued(missing) if !missing.is_empty());
        let said = if waits { &mut waiting } else { &mut others };
        said.push(of_queues(ranks, one, now));
    }
    for said in [&mut waiting, &mut others] {
        if let Some(more) = said.len().checked_sub(DESCRIBED).filter(|&more| more > 0) {
            said.truncate(DESCRIBED);
            said.push(format!("{more} more operations are queued"));
        }
    }
    (waiting, others)
}

fn of_queues(ranks: &[RankReport], one: &OnQueues<'_>, now: u64) -> String {
    let OnQueues { having, operation, more, standing } = one;
    let time = operation.left_at().map(|at| lasting(since(at, now))).unwrap_or_default();
    let (mut title, mut are) = (operation.title(), "is");
    if *more > 0 {
        let plural = if *more > 1 { "s" } else { "" };
        (title, are) = (format!("{title} and {more} more operation{plural}"), "are");
    }
    let which = if *more > 0 { "the first" } else { "it" };
    let ago = operation.left_at().map(|at| format!("; {which} was queued {} ago", span(since(at, now))));
    let ago = ago.unwrap_or_default();
    let of = |places: &[usize]| {
        let plural = if places.len() == 1 { "" } else { "s" };
        format!("the queue{plural} of {}", list(ranks, places))
    };
    let at = |numbers: &[usize]| places(ranks, |rank| rank.rank.is_some_and(|rank| numbers.contains(&rank)));
    match standing {
        Standing::Queued(missing) if missing.is_empty() => {
            format!("{title} {are} queued on {}{time}", list(ranks, having))
        }
        Standing::Queued(missing) => {
            let missing = at(missing);
            let waiting: Vec<usize> =
                having.iter().copied().filter(|place| !missing.contains(place)).collect();
            if waiting.is_empty() {
                return format!("{title} {are} queued{time}; other work is before it on {}", of(&missing));
            }
            let said: Vec<String> =
                missing.iter().take(DESCRIBED).map(|&place| described(&ranks[place], now)).collect();
            let verb = if waiting.len() == 1 { "waits" } else { "wait" };
            // A host that has not queued its part, or not all of it, is described, and that is why.
            let number = operation.number;
            let has_queued = |&place: &usize| {
                let mut all = ranks[place].queued.iter().map(|one| &one.record);
                all.any(|record| record.number == number && record.state == State::Queued)
            };
            let why = match missing.iter().all(has_queued) {
                true => format!("; {}", other_work(missing.len() > 1)),
                false => String::new(),
            };
            format!("{} {verb} in {title} for {}{why}", of(&waiting), queues_of(&said, missing.len()))
        }
        Standing::Running(workers) if workers.is_empty() => {
            format!("{title} {are} running on {}{ago}", of(having))
        }
        Standing::Running(workers) => {
            let (whose, whom) = (of(&at(workers)), list(ranks, having));
            format!("{title} {are} running on {whose}, for {whom}{ago}")
        }
        Standing::Done => {
            let verb = if having.len() == 1 { "has" } else { "have" };
            format!("{title} {are} done on all queues; {} {verb} not seen it yet", list(ranks, having))
        }
    }
}

/// Queues that have come to an operation wait for those that have not.
fn wait_on_queues(ranks: &mut [RankReport]) {
    for rank in ranks {
        for one in &rank.queued {
            let Standing::Queued(missing) = &one.standing else { continue };
            // One that has not come itself does not wait in this operation.
            if rank.rank.is_some_and(|me| missing.contains(&me)) {
                continue;
            }
            let new = missing.iter().filter(|other| !rank.waits_for.contains(other)).copied();
            let new: Vec<usize> = new.collect();
            rank.waits_for.extend(new);
        }
    }
}

/// What a rank's messages wait for. One that the other side takes part in is under way and waits for nobody.
fn messages(ranks: &mut [RankReport], place: usize, now: u64) -> Vec<String> {
    let Doing::In(records) = &ranks[place].doing else { return Vec::new() };
    let me = ranks[place].rank;
    let mut sentences = Vec::new();
    let mut waits_for = Vec::new();
    for record in records.iter().filter(|record| record.is_message()) {
        let from = if record.kind == Kind::Recv { "a message from" } else { "room at" };
        let begin =
            format!("rank {} waits in {} (tag {}) for {from}", me.unwrap_or(0), record.title(), record.tag);
        let answers = |theirs: &Record| {
            let opposite = theirs.is_message() && theirs.kind != record.kind && theirs.tag == record.tag;
            opposite && (theirs.peer.is_none() || theirs.peer == me)
        };
        let takes_part = |other: &RankReport| {
            let under_way = matches!(&other.doing, Doing::In(theirs) if theirs.iter().any(answers));
            under_way && !other.process.is_halted()
        };
        let Some(peer) = record.peer else {
            if !ranks.iter().any(takes_part) {
                sentences.push(format!("{begin} any rank"));
            }
            continue;
        };
        let Some(other) = ranks.iter().find(|rank| rank.rank == Some(peer)) else {
            sentences.push(format!("{begin} rank {peer}, which is on another host"));
            waits_for.push(peer);
            continue;
        };
        if !takes_part(other) {
            sentences.push(format!("{begin} {}", described(other, now)));
            if !waits_for.contains(&peer) {
                waits_for.push(peer);
            }
        }
    }
    // Many may be posted ahead; the oldest say enough.
    if let Some(more) = sentences.len().checked_sub(DESCRIBED).filter(|&more| more > 0) {
        sentences.truncate(DESCRIBED);
        sentences.push(format!("rank {} waits in {more} more messages", me.unwrap_or(0)));
    }
    ranks[place].waits_for.extend(waits_for);
    sentences
}

fn sentence(ranks: &[RankReport], wait: &Wait, now: u64) -> String {
    let who = list(ranks, &wait.waiting);
    let one = wait.waiting.len() == 1;
    if wait.missing.is_empty() {
        let verb = if one { "is" } else { "are" };
        let time = wait.longest.map(lasting).unwrap_or_default();
        return format!("{who} {verb} in {}{time}; all ranks of this host have come to it", wait.operation);
    }
    let verb = if one { "waits" } else { "wait" };
    let described: Vec<String> =
        wait.missing.iter().take(DESCRIBED).map(|&place| described(&ranks[place], now)).collect();
    format!("{who} {verb} in {} for {}", wait.operation, all_of(&described, wait.missing.len()))
}

/// What there is to say when nobody waits.
fn quiet(ranks: &[RankReport]) -> String {
    let left = places(ranks, |rank| rank.doing == Doing::Left);
    let joining = places(ranks, |rank| rank.doing == Doing::Joining);
    let halted: Vec<usize> = places(ranks, |rank| rank.process.is_halted() && rank.doing != Doing::Left);
    let mut parts = Vec::new();
    if !joining.is_empty() {
        parts.push(format!("{} of {} ranks have not joined yet", joining.len(), ranks.len()));
    }
    if !left.is_empty() {
        let verb = if left.len() == 1 { "has" } else { "have" };
        parts.push(format!("{} {verb} closed the group", list(ranks, &left)));
    }
    for place in halted.into_iter().take(DESCRIBED) {
        parts.push(format!("rank {} is {}", ranks[place].rank.unwrap_or(0), ranks[place].process.name()));
    }
    for process in [Process::Running, Process::Sleeping, Process::Blocked] {
        let is_idle = |rank: &RankReport| rank.doing == Doing::Idle && rank.elsewhere.is_none();
        let idle = places(ranks, |rank| is_idle(rank) && rank.process == process);
        let stacks = idle.first().and_then(|&place| ranks[place].stacks.as_deref());
        if let (Some(does), Some(stacks)) = (process.outside(idle.len() > 1), stacks) {
            parts.push(format!("{} {does} (to see where: {stacks})", list(ranks, &idle)));
        }
    }
    let rest = if parts.is_empty() { String::new() } else { format!("; {}", parts.join("; ")) };
    format!("no rank waits for another{rest}")
}

/// "rank 3", "ranks 0, 1 and 3", "ranks 0 to 6".
fn list(ranks: &[RankReport], places: &[usize]) -> String {
    let mut numbers: Vec<usize> = places.iter().filter_map(|&place| ranks.get(place)?.rank).collect();
    numbers.sort_unstable();
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let mut words: Vec<String> = Vec::new();
    for (first, last) in runs {
        match last - first {
            0..3 => words.extend((first..=last).map(|number| number.to_string())),
            _ => words.push(format!("{first} to {last}")),
        }
    }
    let plural = if places.len() == 1 { "rank" } else { "ranks" };
    match words.split_last() {
        Some((last, [])) => format!("{plural} {last}"),
        Some((last, rest)) => format!("{plural} {} and {last}", rest.join(", ")),
        None => "nobody".into(),
    }
}
