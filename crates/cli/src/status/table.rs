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
    let mut head = vec!["rank", "pid", "process", "operation", "for", "bytes", "path"];
    if !one_host {
        head.push("host");
    }
    let rows: Vec<Vec<String>> = group.ranks.iter().map(|rank| row(rank, !one_host, now)).collect();
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
        len => format!("last {len} operations of rank {which}"),
    };
    printer.line(&format!("\n{}", printer.tint(Tone::Heading, &title)))?;
    if records.is_empty() {
        return Ok(());
    }
    let rows: Vec<Vec<String>> = records.iter().map(|record| listed(record, now)).collect();
    let tones: Vec<Option<Tone>> = records.iter().map(|record| tone_of(record.state)).collect();
    lines(&["operation", "of", "bytes", "path", "state", "took", "began"], &rows, &tones, printer)?;
    for why in Detour::ALL {
        let of: Vec<&Record> = records.iter().filter(|record| record.detour == Some(*why)).collect();
        if let Some(last) = of.last() {
            let (count, title) = (of.len(), last.title());
            let text = format!("not direct: {count} of these, the last is {title}: {}", why.reason());
            for line in wrap(&text, WIDTH) {
                printer.line(&printer.tint(Tone::Quiet, &line))?;
            }
        }
    }
    Ok(())
}

/// Who lends how much to whom.
pub(super) fn print_leases(leases: &[LeaseReport], pid: u32, printer: &Printer) -> io::Result<()> {
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
        let owner = if report.owner == pid { "itself".into() } else { report.owner.to_string() };
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
            let more = if records.len() > 1 { format!(" (+{})", records.len() - 1) } else { String::new() };
            (last.map(title).unwrap_or_default() + &more, last.map(|record| ago(record.begun)))
        }
        Doing::Barrier(Some(count)) => (format!("barrier #{count}"), None),
        Doing::Barrier(None) => ("forming the group".into(), None),
        Doing::Left => ("closed the group".into(), None),
        Doing::Idle => match last.and_then(|record| Some((record, record.ended()?))) {
            Some((record, ended)) => (format!("idle after {}", title(record)), Some(ago(ended))),
            None => ("idle".into(), None),
        },
        _ => ("joining".into(), None),
    };
    let shown = last.filter(|_| matches!(rank.doing, Doing::In(_)));
    let mut cells = vec![
        rank.rank.map_or("?".into(), |rank| rank.to_string()),
        if rank.pid == 0 { String::new() } else { rank.pid.to_string() },
        rank.process.name().into(),
        operation,
        time.unwrap_or_default(),
        shown.map(|record| bytes(record.bytes)).unwrap_or_default(),
        shown.and_then(|record| record.path).map(|path| path.to_string()).unwrap_or_default(),
    ];
    if with_host {
        cells.push(rank.host.clone());
    }
    cells
}

fn listed(record: &Record, now: u64) -> Vec<String> {
    let of = [record.dtype.map(|dtype| dtype.name()), record.op];
    vec![
        title(record),
        of.into_iter().flatten().collect::<Vec<_>>().join(" "),
        bytes(record.bytes),
        record.path.map(|path| path.to_string()).unwrap_or_default(),
        record.state.name().into(),
        record.took.map(span).unwrap_or_default(),
        format!("{} ago", span(Duration::from_nanos(now.saturating_sub(record.begun)))),
    ]
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
        (Doing::Idle, _) => Some(Tone::Quiet),
        _ => None,
    }
}

fn tone_of(state: State) -> Option<Tone> {
    match state {
        State::Failed | State::TimedOut | State::Cancelled => Some(Tone::Bad),
        State::Running => Some(Tone::Warning),
        _ => None,
    }
}

/// Columns to the left, as wide as needed; what does not fit a terminal is cut from the widest.
fn lines(head: &[&str], rows: &[Vec<String>], tones: &[Option<Tone>], printer: &Printer) -> io::Result<()> {
    const GAP: usize = 2;
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain(head.get(column).map(|cell| cell.chars().count())).max().unwrap_or(0)
    };
    let mut widths: Vec<usize> = (0..head.len()).map(width).collect();
    while widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1) > WIDTH {
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

fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.into();
    }
    text.chars().take(width.saturating_sub(2)).chain("..".chars()).collect()
}

/// Bytes for people.
fn bytes(count: u64) -> String {
    crate::doctor::bytes(count)
}
