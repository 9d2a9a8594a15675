//! Ranks as JSON.

use std::time::Duration;

use serde::Serialize;
use tensorwire::status::{
    Doing, GroupReport, LeaseReport, PipeEnd, QueuedOperation, RankReport, Record, Standing,
};

/// One rank of one group.
#[derive(Debug, Serialize)]
pub(super) struct RankLine<'a> {
    group: &'a str,
    world: usize,
    rank: Option<usize>,
    host: &'a str,
    pid: u32,
    process: &'static str,
    /// in, barrier, idle, left or joining.
    state: &'static str,
    /// The one that the rank is in, else the oldest that is queued, else the one that it was in last.
    operation: Option<Operation>,
    /// How many operations it is in; several where threads send and receive.
    running: usize,
    /// Those that are queued and not over, the oldest first.
    queued: Vec<Queued<'a>>,
    waits_for: &'a [usize],
    /// The operation of another group that it is in.
    elsewhere: Option<&'a str>,
    /// A command that shows where the process is, if that is outside of tensorwire.
    stacks: Option<&'a str>,
    /// What goes through the pipe whose end it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pipe: Option<Pipe<'a>>,
    failure: Option<&'a str>,
    summary: &'a [String],
    #[serde(skip_serializing_if = "Vec::is_empty")]
    last: Vec<Operation>,
}

/// One end of a pipe.
#[derive(Debug, Serialize)]
struct Pipe<'a> {
    peer_pid: u32,
    peer_host: &'a str,
    /// By which it sends.
    channels: Vec<&'a str>,
    sent: u64,
    sent_bytes: u64,
    taken: u64,
    taken_bytes: u64,
    /// What it has sent and the other end has not taken; null where that end is on another host.
    waiting: Option<u64>,
    waiting_bytes: Option<u64>,
    oldest_seconds: Option<f64>,
}

impl<'a> Pipe<'a> {
    fn new(end: &'a PipeEnd, now: u64) -> Self {
        let ago = |then: u64| Duration::from_nanos(now.saturating_sub(then)).as_secs_f64();
        Self {
            peer_pid: end.peer_pid,
            peer_host: &end.peer_host,
            channels: end.channels.split(", ").filter(|name| !name.is_empty()).collect(),
            sent: end.sent.0,
            sent_bytes: end.sent.1,
            taken: end.taken.0,
            taken_bytes: end.taken.1,
            waiting: end.waiting.map(|waiting| waiting.0),
            waiting_bytes: end.waiting.map(|waiting| waiting.1),
            oldest_seconds: end.oldest.map(ago),
        }
    }
}

/// What one process lends.
#[derive(Debug, Serialize)]
pub(super) struct Lease<'a> {
    lends: u32,
    closed: bool,
    granted: u64,
    granted_bytes: u64,
    waiting: u64,
    waiting_bytes: u64,
    expired: u64,
    expired_bytes: u64,
    holders: u64,
    pids: &'a [u32],
}

impl<'a> Lease<'a> {
    pub(super) fn new(report: &'a LeaseReport) -> Self {
        Self {
            lends: report.owner,
            closed: report.closed,
            granted: report.granted.0,
            granted_bytes: report.granted.1,
            waiting: report.waiting.0,
            waiting_bytes: report.waiting.1,
            expired: report.expired.0,
            expired_bytes: report.expired.1,
            holders: report.holders,
            pids: &report.pids,
        }
    }
}

/// An operation on a queue.
#[derive(Debug, Serialize)]
struct Queued<'a> {
    #[serde(flatten)]
    operation: Operation,
    /// queued, running, or done.
    standing: &'static str,
    /// The ranks whose queues have not come to it.
    waits_for: &'a [usize],
    /// The ranks whose queues work, once all have come.
    works: &'a [usize],
}

impl<'a> Queued<'a> {
    fn new(queued: &'a QueuedOperation, now: u64) -> Self {
        let (waits_for, works): (&[usize], &[usize]) = match &queued.standing {
            Standing::Queued(missing) => (missing, &[]),
            Standing::Running(works) => (&[], works),
            _ => (&[], &[]),
        };
        let operation = Operation::new(&queued.record, now);
        Self { operation, standing: queued.standing.name(), waits_for, works }
    }
}

#[derive(Debug, Serialize)]
struct Operation {
    kind: &'static str,
    /// Which collective of the group, or which message of the rank.
    number: u64,
    state: &'static str,
    dtype: Option<&'static str>,
    op: Option<&'static str>,
    /// The root, or the other end of a message.
    peer: Option<usize>,
    tag: Option<u64>,
    elements: Option<u64>,
    bytes: u64,
    path: Option<&'static str>,
    /// Why it is not the direct one, where that would have been the choice.
    not_direct: Option<&'static str>,
    began_seconds_ago: f64,
    /// Of one that is queued, since it began: all ranks had come, and its steps were queued.
    met_us: Option<f64>,
    queued_us: Option<f64>,
    took_us: Option<f64>,
}

impl<'a> RankLine<'a> {
    pub(super) fn new(group: &'a GroupReport, rank: &'a RankReport, last: usize, now: u64) -> Self {
        let skipped = rank.records.len().saturating_sub(last);
        Self {
            group: &group.name,
            world: group.world,
            rank: rank.rank,
            host: &rank.host,
            pid: rank.pid,
            process: rank.process.name(),
            state: state(&rank.doing),
            operation: rank.operation().map(|record| Operation::new(record, now)),
            running: if let Doing::In(records) = &rank.doing { records.len() } else { 0 },
            queued: rank.queued.iter().map(|queued| Queued::new(queued, now)).collect(),
            waits_for: &rank.waits_for,
            elsewhere: rank.elsewhere.as_deref(),
            stacks: rank.stacks.as_deref(),
            pipe: rank.pipe.as_ref().map(|end| Pipe::new(end, now)),
            failure: group.failure.as_deref(),
            summary: &group.summary,
            last: rank.records.iter().skip(skipped).map(|record| Operation::new(record, now)).collect(),
        }
    }
}

impl Operation {
    fn new(record: &Record, now: u64) -> Self {
        let micros = |time: Duration| time.as_nanos() as f64 / 1000.0;
        Self {
            kind: record.kind.name(),
            number: record.number,
            state: record.state.name(),
            dtype: record.dtype.map(|dtype| dtype.name()),
            op: record.op,
            peer: record.peer,
            tag: record.is_message().then_some(record.tag),
            elements: record.elements(),
            bytes: record.bytes,
            path: record.path.map(|path| path.name()),
            not_direct: record.detour.map(|why| why.name()),
            began_seconds_ago: Duration::from_nanos(now.saturating_sub(record.begun)).as_secs_f64(),
            met_us: record.met.map(micros),
            queued_us: record.queued.map(micros),
            took_us: record.took.map(micros),
        }
    }
}

fn state(doing: &Doing) -> &'static str {
    match doing {
        Doing::In(_) => "in",
        Doing::Barrier(_) => "barrier",
        Doing::Idle => "idle",
        Doing::Left => "left",
        _ => "joining",
    }
}
