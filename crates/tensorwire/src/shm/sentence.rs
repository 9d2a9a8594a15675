//! Sentences about a rank that others wait for. `tensorwire status` and the errors of time-outs say the same.

use std::time::Duration;

use super::control::Control;
use super::kind::Kind;
use super::member::Member;
use super::process::Process;
use super::record::{self, Record};
use super::view::{self, Doing, RankReport};

/// How many of those that others wait for are described one by one.
pub(crate) const DESCRIBED: usize = 4;

/// The ranks at these places of this host, and why they do not come.
pub(crate) fn missing(control: &Control, members: &[Member], places: &[usize]) -> String {
    all_of(&each(control, members, places), places.len())
}

/// The same where their queues do not come.
pub(crate) fn missing_queues(control: &Control, members: &[Member], places: &[usize]) -> String {
    queues_of(&each(control, members, places), places.len())
}

fn each(control: &Control, members: &[Member], places: &[usize]) -> Vec<String> {
    let ranks = places.iter().take(DESCRIBED).map(|&place| view::of_rank(control, members, place));
    ranks.map(|rank| described(&rank, record::now())).collect()
}

/// Descriptions of some of so many ranks.
pub(crate) fn all_of(described: &[String], count: usize) -> String {
    let more = match count.saturating_sub(described.len()) {
        0 => String::new(),
        more => format!("; and for {more} more"),
    };
    format!("{}{more}", described.join("; and for "))
}

/// The queues of some of so many ranks, which are described.
pub(crate) fn queues_of(described: &[String], count: usize) -> String {
    let queues: Vec<String> = described.iter().map(|rank| format!("the queue of {rank}")).collect();
    all_of(&queues, count)
}

/// Why a queue does not come to an operation that its host has queued; of one, or of several.
pub(crate) fn other_work(many: bool) -> &'static str {
    if many { "other work is before it on these queues" } else { "other work is before it on that queue" }
}

/// Why an operation is not over although all queues have come to it.
pub(crate) fn not_done(many: bool) -> &'static str {
    match many {
        true => "all queues have come to it, and these have not done their parts",
        false => "all queues have come to it, and this one has not done its part",
    }
}

/// Who it is, and why it does not come.
pub(crate) fn described(rank: &RankReport, now: u64) -> String {
    let who = rank.who();
    let stopped = match rank.process {
        Process::Stopped => Some("which is stopped (SIGSTOP)"),
        Process::Traced => Some("which is stopped by a debugger"),
        Process::Gone if rank.doing != Doing::Left => Some("whose process has ended"),
        _ => None,
    };
    let place = match &rank.doing {
        Doing::Left => return format!("{who}, which has closed the group"),
        Doing::Joining => return who,
        Doing::Barrier(Some(count)) => format!("in barrier #{count}"),
        Doing::Barrier(None) => "in the forming of the group".into(),
        Doing::In(records) => match records.first() {
            Some(record) => format!("in {}{}", title(record), lasting(since(record.begun, now))),
            None => String::new(),
        },
        Doing::Idle => match rank.records.last().and_then(|last| Some((last, last.left_at()?))) {
            Some((last, left)) => {
                format!("after {}, {} {} ago", title(last), last.state.name(), span(since(left, now)))
            }
            None => "before its first operation".into(),
        },
    };
    match (stopped, &rank.doing, rank.process.outside(false)) {
        (Some(stopped), ..) => format!("{who}, {stopped} {place}"),
        (None, Doing::Idle, _) if rank.elsewhere.is_some() => {
            format!("{who}, which is in {} ({place})", rank.elsewhere.as_deref().unwrap_or_default())
        }
        (None, Doing::Idle, Some(does)) => {
            let see = rank.stacks.as_ref().map(|stacks| format!(" (to see where: {stacks})"));
            format!("{who}, which {does} {place}{}", see.unwrap_or_default())
        }
        (None, Doing::Idle, None) => {
            format!("{who}, which has not come ({place}; its process cannot be seen from here)")
        }
        (None, ..) => format!("{who}, which is still {place}"),
    }
}

/// "all_reduce #42", "recv #3 from rank 0".
pub(crate) fn title(record: &Record) -> String {
    let way = match record.kind {
        Kind::Send => "to",
        Kind::Recv => "from",
        _ => return record.title(),
    };
    let whom = record.peer.map_or("any rank".into(), |peer| format!("rank {peer}"));
    format!("{} {way} {whom}", record.title())
}

/// "rank 1", "ranks 1 and 2", "you and rank 2"; whoever reads it is rank `me`.
pub(crate) fn whom(ranks: &[usize], me: usize) -> String {
    let others: Vec<String> = ranks.iter().filter(|&&rank| rank != me).map(ToString::to_string).collect();
    let listed = match others.as_slice() {
        [] => String::new(),
        [one] => format!("rank {one}"),
        [all @ .., last] if others.len() <= 4 => format!("ranks {} and {last}", all.join(", ")),
        _ => format!("{} ranks", others.len()),
    };
    match (ranks.contains(&me), listed.is_empty()) {
        (true, true) => "you".into(),
        (true, false) => format!("you and {listed}"),
        (false, _) => listed,
    }
}

pub(crate) fn since(then: u64, now: u64) -> Duration {
    Duration::from_nanos(now.saturating_sub(then))
}

/// " for 12 s", or nothing for what has only just begun.
pub(crate) fn lasting(time: Duration) -> String {
    if time < Duration::from_millis(1) { String::new() } else { format!(" for {}", span(time)) }
}

/// A time for people: two figures are enough.
pub(crate) fn span(time: Duration) -> String {
    let secs = time.as_secs();
    match time {
        _ if secs >= 86_400 => format!("{} d {} h", secs / 86_400, secs % 86_400 / 3600),
        _ if secs >= 3600 => format!("{} h {} min", secs / 3600, secs % 3600 / 60),
        _ if secs >= 60 => format!("{} min {} s", secs / 60, secs % 60),
        _ if secs >= 10 => format!("{secs} s"),
        _ if secs >= 1 => format!("{:.1} s", time.as_secs_f64()),
        _ if time.as_millis() >= 1 => format!("{} ms", time.as_millis()),
        _ if time.as_micros() >= 10 => format!("{} us", time.as_micros()),
        _ => format!("{:.1} us", time.as_nanos() as f64 / 1000.0),
    }
}
