//! One page with all figures, which needs nothing but a browser.

mod plot;

use std::fmt::Write;
use std::time::SystemTime;

use super::row::Row;
use super::sizes;
use crate::html::escape;
use crate::latency::figure;
use plot::{Plot, Unit};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// What the page says above the figures.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) machine: String,
    pub(super) command: String,
    /// The libraries, in the order of their lines.
    pub(super) libraries: Vec<(&'static str, String)>,
    /// What memcpy reaches, in words.
    pub(super) memcpy: String,
    /// What all measurements have in common.
    pub(super) setting: String,
}

/// The page of these measurements.
pub(super) fn write(header: &Header, rows: &[Row]) -> String {
    let mut page = String::from("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    page.push_str("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n");
    page.push_str("<title>tensorwire bench</title>\n");
    let _ = write!(page, "<style>\n{STYLE}</style>\n</head>\n<body>\n");
    head(&mut page, header);
    let measured: Vec<&Row> = rows.iter().filter(|row| row.peer != "memcpy").collect();
    let mut ops: Vec<&str> = measured.iter().map(|row| row.op).collect();
    ops.dedup();
    if ops.len() > 1 {
        let links: Vec<String> = ops.iter().map(|op| format!("<a href=\"#{op}\">{op}</a>")).collect();
        let _ = writeln!(page, "<nav>{}</nav>", links.concat());
    }
    for op in ops {
        let of_op: Vec<&Row> = measured.iter().copied().filter(|row| row.op == op).collect();
        section(&mut page, header, op, &of_op);
    }
    let _ = write!(page, "<script>\n{SCRIPT}</script>\n</body>\n</html>\n");
    page
}

fn head(page: &mut String, header: &Header) {
    let facts = [
        ("Machine", &header.machine),
        ("Measured", &header.setting),
        ("memcpy", &header.memcpy),
        ("Command", &header.command),
        ("Date", &today()),
    ];
    page.push_str("<header>\n<h1>tensorwire bench</h1>\n<dl>\n");
    for (name, text) in facts {
        let _ = writeln!(page, "<dt>{name}</dt><dd>{}</dd>", escape(text));
    }
    page.push_str("</dl>\n<p class=\"note\">Median over iterations of the slowest rank’s time. Inputs are written \
        anew before every call, all ranks meet in a barrier, and results are checked after it, none of which is \
        timed. Bus bandwidth is counted as nccl-tests does. Every library has the same cores; rank by rank, \
        unless one is said not to be bound.</p>\n</header>\n");
}

fn section(page: &mut String, header: &Header, op: &str, rows: &[&Row]) {
    let ranks = rows.first().map_or(0, |row| row.ranks);
    let _ = writeln!(page, "<section id=\"{op}\">\n<h2>{op} <small>{ranks} ranks</small></h2>");
    let names: Vec<&str> = header.libraries.iter().map(|(name, _)| *name).collect();
    let has_sizes = rows.iter().any(|row| row.bytes > 0);
    if has_sizes {
        page.push_str("<ul class=\"legend\">");
        for (index, (name, about)) in header.libraries.iter().enumerate() {
            if rows.iter().any(|row| row.peer == *name) {
                let about = escape(about);
                let _ = write!(
                    page,
                    "<li class=\"c{index}\"><svg viewBox=\"0 0 26 10\">{}</svg>{about}</li>",
                    plot::key(index)
                );
            }
        }
        page.push_str("</ul>\n<div class=\"plots\">\n");
        for (title, unit) in [("Time of one call", Unit::Micros), ("Bus bandwidth", Unit::Rate)] {
            let mut plot = Plot::new(title, unit);
            for (index, name) in names.iter().enumerate() {
                let of_peer = rows.iter().filter(|row| row.peer == *name && row.bytes > 0);
                plot.line(index, of_peer.map(|row| plot::Point::of(row, unit)).collect());
            }
            page.push_str(&plot.svg());
        }
        page.push_str("</div>\n");
    }
    // A single line of figures needs no click.
    let open = if has_sizes { "" } else { " open" };
    let _ = writeln!(
        page,
        "<details{open}><summary>Figures</summary>\n<div class=\"wide\">\n{}</div></details>\n</section>",
        table(rows, &names)
    );
}

/// All figures of an operation: a line for each size, a group of columns for each library.
fn table(rows: &[&Row], names: &[&str]) -> String {
    let there: Vec<&str> =
        names.iter().copied().filter(|name| rows.iter().any(|row| row.peer == *name)).collect();
    let mut table = String::from("<table>\n<thead><tr><th></th>");
    let ours = *names.first().unwrap_or(&"");
    for name in &there {
        let _ = write!(table, "<th colspan=\"{}\">{name}</th>", if *name == ours { 6 } else { 4 });
    }
    table.push_str("</tr>\n<tr><th>size</th>");
    for name in &there {
        table.push_str("<th>median µs</th><th>p99 µs</th><th>busbw GB/s</th>");
        table.push_str(if *name == ours {
            "<th>algbw GB/s</th><th>wrong</th><th>path</th>"
        } else {
            "<th>ratio</th>"
        });
    }
    table.push_str("</tr></thead>\n<tbody>\n");
    let mut all: Vec<usize> = rows.iter().map(|row| row.bytes).collect();
    all.sort_unstable();
    all.dedup();
    for bytes in all {
        let size = if bytes == 0 { "–".to_owned() } else { sizes::show(bytes) };
        let _ = write!(table, "<tr><th title=\"{bytes} bytes\">{size}</th>");
        let find = |name: &str| rows.iter().find(|row| row.bytes == bytes && row.peer == name);
        let base = find(ours).map(|row| row.median_us);
        for name in &there {
            let Some(row) = find(name) else {
                let _ = write!(table, "<td colspan=\"{}\">–</td>", if *name == ours { 6 } else { 4 });
                continue;
            };
            for value in [row.median_us, row.p99_us, row.busbw_gbs] {
                let _ = write!(table, "<td>{}</td>", figure(value));
            }
            if *name == ours {
                let class = if row.wrong > 0 { " class=\"bad\"" } else { "" };
                let (algbw, wrong, path) = (figure(row.algbw_gbs), row.wrong, escape(&row.path));
                let _ = write!(table, "<td>{algbw}</td><td{class}>{wrong}</td><td>{path}</td>");
            } else {
                let ratio =
                    base.map_or_else(|| "–".to_owned(), |base| format!("{}×", figure(row.median_us / base)));
                let _ = write!(table, "<td>{ratio}</td>");
            }
        }
        table.push_str("</tr>\n");
    }
    table.push_str("</tbody></table>\n");
    table
}

/// The date of today, UTC: days since 1970 as the calendar counts them.
fn today() -> String {
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let (year, month, day) = date(seconds / 86_400);
    format!("{year}-{month:02}-{day:02}")
}

fn date(days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut year, mut left) = (1970, days);
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if left < length {
            break;
        }
        left -= length;
        month += 1;
    }
    (year, month, left + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(11_016), (2000, 2, 29));
        assert_eq!(date(20_454), (2026, 1, 1));
        assert_eq!(date(20_453), (2025, 12, 31));
    }
}
