//! Ranks as tables for people.

use std::io;
use std::time::Duration;

use tensorwire::collective::Detour;
use tensorwire::status::{Doing, GroupReport, LeaseReport, Process, RankReport, Record, State, span};

use crate::printer::{Printer, Tone, WIDTH, wrap};

/// A group: its ranks in a table, and who waits for whom below.
pub(super) fn print(group: &GroupReport, printer: &Printer, now: u64) -> io::Result<()> {
    let here = group.ranks.len();
    let hosts: Vec<&str> = group.ranks.iter().map(|rank| rank.host.as_str()).collect();
    let one_host = hosts.windows(2).all(|pair| pair[0] == pair[1]);
    let place = if one_host { format!(" on host {}", hosts.first().unwrap_or(&"")) } else { String::new() };
    let ranks = match group.world {
        world if world > here => format!("{here} of {world} ranks{place}"),
        1 => format!("1 rank{place}"),
        world => format!("{world} ranks{place}"),
    };
    for line in wrap(&format!("group {:?}: {ranks}", group.name), WIDTH) {
        printer.line(&printer.tint(Tone::Heading, &line))?;
    }
    let mut head = vec!["rank", "pid", "process", "operation", "for", "tensor"];
    if !one_host {
        head.push("host");
    }
    let mut rows: Vec<Vec<String>> = group.ranks.iter().map(|rank| row(rank, !one_host, now)).collect();
    let path = |rank: &RankReport| rank.operation().filter(|_| is_inside(rank))?.path;
    let paths: Vec<String> =
        group.ranks.iter().map(|rank| path(rank).map(|path| path.to_string()).unwrap_or_default()).collect();
    // It is worth a column, and not worth that others are cut: `--last` and `--json` have it, too.
    if total(&widths(&head, &rows)) + GAP + "one-shot".len() <= WIDTH
        && paths.iter().any(|path| !path.is_empty())
    {
        head.push("path");
        rows.iter_mut().zip(paths).for_each(|(row, path)| row.push(path));
    }
    let tones: Vec<Option<Tone>> = group.ranks.iter().map(tone).collect();
    lines(&head, &rows, &tones, printer)?;
    printer.line("")?;
    let tone = match &group.failure {
        Some(_) => Some(Tone::Bad),
        None if group.ranks.iter().any(|rank| !rank.waits_for.is_empty()) => Some(Tone::Warning),
        None => None,
    };
    for line in group.summary.iter().flat_map(|sentence| wrap(sentence, WIDTH)) {
        printer.line(&tone.map_or_else(|| line.clone(), |tone| printer.tint(tone, &line)))?;
    }
    Ok(())
}

/// The last operations of a rank, the newest at the end.
pub(super) fn print_last(rank: &RankReport, count: usize, printer: &Printer, now: u64) -> io::Result<()> {
    let records = &rank.records[rank.records.len().saturating_sub(count)..];
    let which = rank.rank.map_or("?".into(), |rank| rank.to_string());
    let title = match records.len() {
        0 => format!("rank {which} has recorded no operation"),
        1 => format!("last operation of rank {which}"),
        len => format!("last {len} operations of rank {which}"),
    };
    printer.line(&format!("\n{}", printer.tint(Tone::Heading, &title)))?;
    if records.is_empty() {
        return Ok(());
    }
    // Times of queued operations need room.
    let with_times = records.iter().any(|record| record.met.is_some());
    let head: &[&str] = match with_times {
        true => &["operation", "tensor", "op", "path", "met", "queued", "took", "ago"],
        false => &["operation", "tensor", "op", "path", "took", "ago"],
    };
    let rows: Vec<Vec<String>> = records.iter().map(|record| listed(record, with_times, now)).collect();
    let tones: Vec<Option<Tone>> = records.iter().map(|record| tone_of(record.state)).collect();
    lines(head, &rows, &tones, printer)?;
    for why in Detour::ALL {
        let of: Vec<&Record> = records.iter().filter(|record| record.detour == Some(*why)).collect();
        if let Some(last) = of.last() {
            let (count, title) = (of.len(), last.title());
            let went = if *why == Detour::Dense { "dense" } else { "not direct" };
            let text = format!("{went}: {count} of these, the last is {title}: {}", why.reason());
            for line in wrap(&text, WIDTH) {
                printer.line(&printer.tint(Tone::Quiet, &line))?;
            }
        }
    }
    Ok(())
}

/// Pipes, each end in a row: whom it talks with, what it does, and how much of what it has sent waits there.
pub(super) fn print_pipes(pipes: &[&GroupReport], printer: &Printer, now: u64) -> io::Result<()> {
    printer.line(&printer.tint(Tone::Heading, "pipes"))?;
    let ends = || pipes.iter().flat_map(|pipe| &pipe.ranks);
    let end = |rank: &RankReport| {
        // There is one other end, so its number says nothing.
        let mut alone = rank.clone();
        alone.records.iter_mut().for_each(|record| record.peer = None);
        if let Doing::In(records) = &mut alone.doing {
            records.iter_mut().for_each(|record| record.peer = None);
        }
        let mut cells = row(&alone, false, now);
        let time = std::mem::take(&mut cells[4]);
        let is_inside = matches!(rank.doing, Doing::In(_)) && !time.is_empty();
        let does = if is_inside { format!("{}, {time}", cells[3]) } else { cells[3].clone() };
        let pipe = rank.pipe.clone().unwrap_or_default();
        let peer = match pipe.peer_host == rank.host {
            true => pipe.peer_pid.to_string(),
            false => format!("{} on {}", pipe.peer_pid, pipe.peer_host),
        };
        let waiting = match pipe.waiting {
            Some((0, _)) => "-".into(),
            Some((count, size)) => format!("{count}, {}", bytes(size)),
            None => "?".into(),
        };
        let oldest = pipe.oldest.map(|then| span(Duration::from_nanos(now.saturating_sub(then))));
        let process = cells[2].clone();
        vec![rank.pid.to_string(), peer, process, does, pipe.channels, waiting, oldest.unwrap_or_default()]
    };
    let rows: Vec<Vec<String>> = ends().map(end).collect();
    let late = |rank: &RankReport| rank.pipe.as_ref().is_some_and(|pipe| pipe.oldest.is_some());
    let tones: Vec<_> =
        ends().map(|rank| if late(rank) { Some(Tone::Warning) } else { tone(rank) }).collect();
    lines(&["pid", "peer", "process", "operation", "sends by", "waiting", "oldest"], &rows, &tones, printer)?;
    for pipe in pipes.iter().filter(|pipe| pipe.failure.is_some()) {
        for line in pipe.summary.iter().flat_map(|sentence| wrap(sentence, WIDTH)) {
            printer.line(&printer.tint(Tone::Bad, &line))?;
        }
    }
    Ok(())
}

/// Who lends how much to whom.
pub(super) fn print_leases(leases: &[LeaseReport], pid: Option<u32>, printer: &Printer) -> io::Result<()> {
    printer.line(&printer.tint(Tone::Heading, "leases"))?;
    let sum = |(count, size): (u64, u64)| {
        if count == 0 { "-".into() } else { format!("{count} ({})", bytes(size)) }
    };
    let row = |report: &LeaseReport| {
        let mut pids: Vec<String> = report.pids.iter().map(u32::to_string).collect();
        if report.holders > pids.len() as u64 {
            pids.push(format!("and {} more", report.holders - pids.len() as u64));
        }
        let held = if pids.is_empty() { "nobody".into() } else { pids.join(", ") };
        let closed = if report.closed { " (closed)" } else { "" };
        let owner = if Some(report.owner) == pid { "itself".into() } else { report.owner.to_string() };
        vec![format!("{owner}{closed}"), sum(report.granted), sum(report.waiting), sum(report.expired), held]
    };
    let rows: Vec<Vec<String>> = leases.iter().map(row).collect();
    let tone = |report: &LeaseReport| {
        let (bad, waits) = (report.expired.0 > 0, report.waiting.0 > 0);
        if bad { Some(Tone::Bad) } else { waits.then_some(Tone::Warning) }
    };
    let tones: Vec<Option<Tone>> = leases.iter().map(tone).collect();
    lines(
        &["owner", "granted", "dropped, waiting", "expired", "processes that redeem"],
        &rows,
        &tones,
        printer,
    )
}

fn row(rank: &RankReport, with_host: bool, now: u64) -> Vec<String> {
    let ago = |then: u64| span(Duration::from_nanos(now.saturating_sub(then)));
    let last = rank.operation();
    let (operation, time) = match &rank.doing {
        Doing::In(records) => {
            // One that its host still puts on its queue is among those that it is in.
            let queued = rank.queued.iter().filter(|queued| queued.record.state == State::Queued).count();
            let more = match (records.len(), queued) {
                (0 | 1, 0) => String::new(),
                (0 | 1, queued) => format!(" (+{queued} queued)"),
                (running, queued) => format!(" (+{})", running - 1 + queued),
            };
            let met = if last.is_some_and(|record| record.state == State::Met) { " met" } else { "" };
            (last.map(title).unwrap_or_default() + met + &more, last.map(|record| ago(record.begun)))
        }
        Doing::Barrier(Some(count)) => (format!("barrier #{count}"), None),
        Doing::Barrier(None) => ("forming the group".into(), None),
        Doing::Left => ("closed the group".into(), None),
        Doing::Idle if !rank.queued.is_empty() => {
            let first = rank.queued.first();
            let more =
                if rank.queued.len() > 1 { format!(" (+{})", rank.queued.len() - 1) } else { String::new() };
            let stands =
                first.map(|first| format!("{} {}{more}", title(&first.record), first.standing.name()));
            (stands.unwrap_or_default(), first.map(|first| ago(first.record.begun)))
        }
        Doing::Idle => match last.and_then(|record| Some((record, record.ended()?))) {
            Some((record, ended)) => (format!("after {}", title(record)), Some(ago(ended))),
            None => ("none yet".into(), None),
        },
        _ => ("joining".into(), None),
    };
    let shown = last.filter(|_| is_inside(rank));
    let mut cells = vec![
        rank.rank.map_or("?".into(), |rank| rank.to_string()),
        if rank.pid == 0 { String::new() } else { rank.pid.to_string() },
        rank.process.name().into(),
        operation,
        time.unwrap_or_default(),
        shown.map(tensor).unwrap_or_default(),
    ];
    if with_host {
        cells.push(rank.host.clone());
    }
    cells
}

/// Whether it is in an operation, or has one on a queue.
fn is_inside(rank: &RankReport) -> bool {
    matches!(rank.doing, Doing::In(_)) || rank.doing == Doing::Idle && !rank.queued.is_empty()
}

fn listed(record: &Record, with_times: bool, now: u64) -> Vec<String> {
    let time = |time: Option<Duration>| time.map(span).unwrap_or_default();
    let took = time(record.took);
    let mut cells = vec![
        title(record),
        if with_times { elements(record) } else { tensor(record) },
        record.op.unwrap_or_default().into(),
        record.path.map(|path| path.to_string()).unwrap_or_default(),
    ];
    if with_times {
        cells.extend([time(record.met), time(record.queued)]);
    }
    cells.push(match record.state {
        State::Done => took,
        state if !state.is_over() => state.name().into(),
        state => format!("{}, {took}", state.name()),
    });
    cells.push(span(Duration::from_nanos(now.saturating_sub(record.begun))));
    cells
}

/// "1,000 float32".
fn elements(record: &Record) -> String {
    match (record.elements(), record.dtype) {
        (Some(count), Some(dtype)) => format!("{} {}", grouped(count), dtype.name()),
        _ => tensor(record),
    }
}

/// "1,000 float32, 3.9 KiB".
fn tensor(record: &Record) -> String {
    match (record.elements(), record.dtype) {
        (Some(count), Some(dtype)) => format!("{} {}, {}", grouped(count), dtype.name(), bytes(record.bytes)),
        _ if record.bytes == 0 => String::new(),
        _ => bytes(record.bytes),
    }
}

/// A number with a comma for each thousand.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// "all_reduce #42", "recv #7 from 3".
fn title(record: &Record) -> String {
    let way = match record.kind.name() {
        "send" => " to",
        "recv" => " from",
        _ => return record.title(),
    };
    record.peer.map_or_else(|| record.title(), |peer| format!("{}{way} {peer}", record.title()))
}

fn tone(rank: &RankReport) -> Option<Tone> {
    match (&rank.doing, rank.process) {
        (Doing::Left, _) => Some(Tone::Quiet),
        (_, Process::Gone | Process::Stopped | Process::Traced) => Some(Tone::Bad),
        (Doing::Idle, _) if rank.queued.is_empty() => Some(Tone::Quiet),
        _ => None,
    }
}

fn tone_of(state: State) -> Option<Tone> {
    match state {
        State::Failed | State::TimedOut | State::Cancelled => Some(Tone::Bad),
        state if !state.is_over() => Some(Tone::Warning),
        _ => None,
    }
}

/// Columns to the left, as wide as needed; what does not fit a terminal is cut from the widest.
pub(super) fn lines(
    head: &[&str],
    rows: &[Vec<String>],
    tones: &[Option<Tone>],
    printer: &Printer,
) -> io::Result<()> {
    let mut widths = widths(head, rows);
    while total(&widths) > WIDTH {
        match widths.iter_mut().max() {
            Some(widest) if *widest > 4 => *widest -= 1,
            _ => break,
        }
    }
    let line = |row: &mut dyn Iterator<Item = &str>| {
        let cells = row.zip(&widths).map(|(cell, &width)| format!("{:<width$}", cut(cell, width)));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    printer.line(&printer.tint(Tone::Quiet, &line(&mut head.iter().copied())))?;
    for (row, tone) in rows.iter().zip(tones) {
        let text = line(&mut row.iter().map(String::as_str));
        printer.line(&tone.map_or_else(|| text.clone(), |tone| printer.tint(tone, &text)))?;
    }
    Ok(())
}

/// Between two columns.
const GAP: usize = 2;

fn widths(head: &[&str], rows: &[Vec<String>]) -> Vec<usize> {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain(head.get(column).map(|cell| cell.chars().count())).max().unwrap_or(0)
    };
    (0..head.len()).map(width).collect()
}

fn total(widths: &[usize]) -> usize {
    widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1)
}

pub(super) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.into();
    }
    text.chars().take(width.saturating_sub(2)).chain("..".chars()).collect()
}

/// Bytes for people.
fn bytes(count: u64) -> String {
    crate::doctor::bytes(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_have_commas() {
        let numbers = [0, 999, 1000, 67_108_864].map(grouped);
        assert_eq!(numbers, ["0", "999", "1,000", "67,108,864"]);
    }
}
