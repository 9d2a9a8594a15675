//! The table that comes first: how many times ours a peer's time is, of every operation and size.

use std::fmt::Write;

use super::super::fair::{self, Side};
use super::super::row::Row;
use super::{Library, caveats};
use crate::bench::sizes;
use crate::html::escape;
use crate::units;

/// A table for each peer; without peers, one of times.
pub(super) fn write(libraries: &[Library], rows: &[&Row]) -> String {
    let mut page = String::from("<section id=\"summary\">\n");
    let of =
        |library: &Library| -> Vec<&Row> { rows.iter().copied().filter(|row| library.made(row)).collect() };
    let peers: Vec<&Library> = libraries.iter().filter(|library| !library.side.is_ours()).collect();
    let sides: Vec<Side> = libraries.iter().map(|library| library.side).collect();
    for peer in &peers {
        let ours = fair::opponent(&sides, peer.side);
        let ours = ours.and_then(|ours| libraries.iter().find(|library| library.side == ours));
        let (Some(ours), theirs) = (ours, of(peer)) else { continue };
        if theirs.is_empty() {
            continue;
        }
        let (name, other) = (ours.side.library, peer.side.library);
        let _ = writeln!(
            page,
            "<h2>{other}’s time over {name}’s</h2>\n<p class=\"note\">Above 1, {name} is faster. {}; {}.</p>",
            escape(&ours.about),
            escape(&peer.about)
        );
        // Before the table: it may be longer than a screen.
        page.push_str(&caveats(&theirs));
        page.push_str(&ratios(&of(ours), &theirs, [name, other]));
    }
    for library in libraries.iter().filter(|_| peers.is_empty()) {
        let _ = writeln!(page, "<h2>Time of one call <small>{}</small></h2>", escape(&library.about));
        page.push_str(&times(&of(library)));
    }
    page.push_str("</section>\n");
    page
}

fn ratios(ours: &[&Row], theirs: &[&Row], names: [&str; 2]) -> String {
    let ratio = |row: &Row| {
        let class = match row.ratio {
            Some(ratio) if ratio >= 1.05 => "faster",
            Some(ratio) if ratio < 0.95 => "slower",
            _ => "level",
        };
        let text = row.ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{}×", units::times(ratio)));
        format!(" class=\"{class}\">{text}")
    };
    let base = |row: &Row| ours.iter().find(|base| base.op == row.op && base.bytes == row.bytes);
    let time = |row: &Row| format!(">{}", units::time(row.median_us));
    let our_time = |row: &Row| base(row).map_or_else(empty, |base| time(base));
    if is_one(theirs) {
        return list(theirs, &[(names[0], &our_time), (names[1], &time), ("ratio", &ratio)]);
    }
    grid(theirs, &|row| {
        let both = base(row).map_or_else(String::new, |base| {
            format!(" title=\"{} and {}\"", units::time(row.median_us), units::time(base.median_us))
        });
        format!("{both}{}", ratio(row))
    })
}

fn times(rows: &[&Row]) -> String {
    let time = |row: &Row| format!(">{}", units::time(row.median_us));
    let p99 = |row: &Row| format!(">{}", units::time(row.p99_us));
    let rate = |row: &Row| match row.bytes {
        0 => empty(),
        _ => format!(">{}", units::rate(row.busbw_gbs)),
    };
    if is_one(rows) {
        return list(rows, &[("median", &time), ("p99", &p99), ("bus bandwidth", &rate)]);
    }
    grid(rows, &|row| format!(" title=\"p99 {}\"{}", units::time(row.p99_us), time(row)))
}

/// Whether there is only one operation.
fn is_one(rows: &[&Row]) -> bool {
    rows.windows(2).all(|pair| pair[0].op == pair[1].op)
}

fn empty() -> String {
    ">–".to_owned()
}

/// What a cell is made of, as it is written after `<td`.
type Cell<'a> = &'a dyn Fn(&Row) -> String;

/// One operation: a line for each size, a column for each of several figures.
fn list(rows: &[&Row], columns: &[(&str, Cell<'_>)]) -> String {
    let heads: String = columns.iter().map(|(name, _)| format!("<th>{name}</th>")).collect();
    let op = rows.first().map_or("", |row| row.op);
    let line = |row: &&Row| {
        let cells: String = columns.iter().map(|(_, cell)| format!("<td{}</td>", cell(row))).collect();
        let size = if row.bytes == 0 { "–".to_owned() } else { sizes::show(row.bytes) };
        format!("<tr><th>{size}</th>{cells}</tr>\n")
    };
    let lines: String = rows.iter().map(line).collect();
    format!("{OPEN}<th>{op}</th>{heads}</tr></thead>\n<tbody>\n{lines}{CLOSE}")
}

const OPEN: &str = "<div class=\"wide\"><table class=\"summary\">\n<thead><tr>";
const CLOSE: &str = "</tbody></table></div>\n";

/// Operations by sizes; whichever there are more of has the lines.
fn grid(rows: &[&Row], cell: Cell<'_>) -> String {
    let mut ops: Vec<&str> = rows.iter().map(|row| row.op).collect();
    ops.dedup();
    let columns = columns(rows);
    let find = |op: &str, size: usize| {
        rows.iter().find(|row| row.op == op && row.bytes > 0 && nearest(&columns, row.bytes) == Some(size))
    };
    let shown = |op: &str, size: usize| find(op, size).map_or_else(empty, |row| cell(row));
    let mut table = format!("{OPEN}<th></th>");
    let sized = |op: &&str| rows.iter().any(|row| row.op == *op && row.bytes > 0);
    let (with_size, without): (Vec<&str>, Vec<&str>) = ops.iter().partition(|op| sized(op));
    if columns.len() > ops.len() {
        with_size.iter().for_each(|op| {
            let _ = write!(table, "<th>{op}</th>");
        });
        table.push_str("</tr></thead>\n<tbody>\n");
        for size in &columns {
            let cells: String = with_size.iter().map(|op| format!("<td{}</td>", shown(op, *size))).collect();
            let _ = writeln!(table, "<tr><th>{}</th>{cells}</tr>", sizes::show(*size));
        }
    } else {
        columns.iter().for_each(|size| {
            let _ = write!(table, "<th>{}</th>", sizes::show(*size));
        });
        table.push_str("</tr></thead>\n<tbody>\n");
        for op in &with_size {
            let cells: String = columns.iter().map(|size| format!("<td{}</td>", shown(op, *size))).collect();
            let _ = writeln!(table, "<tr><th>{op}</th>{cells}</tr>");
        }
    }
    // What has no size has one figure for all of them.
    let wide = if columns.len() > ops.len() { with_size.len() } else { columns.len() }.max(1);
    for op in &without {
        let figure = rows.iter().find(|row| row.op == *op).map_or_else(empty, |row| cell(row));
        let _ = writeln!(table, "<tr><th>{op}</th><td colspan=\"{wide}\"{figure}</td></tr>");
    }
    table + CLOSE
}

/// The sizes of the operation that has most of them. Those of operations with parts are rounded to whole parts.
fn columns(rows: &[&Row]) -> Vec<usize> {
    let mut best: Vec<usize> = Vec::new();
    for of_op in rows.chunk_by(|one, next| one.op == next.op) {
        let mut sizes: Vec<usize> = of_op.iter().map(|row| row.bytes).filter(|bytes| *bytes > 0).collect();
        sizes.sort_unstable();
        sizes.dedup();
        if sizes.len() > best.len() {
            best = sizes;
        }
    }
    best
}

/// The column of a size.
fn nearest(columns: &[usize], bytes: usize) -> Option<usize> {
    let far = |size: usize| (size as f64 / bytes as f64).ln().abs();
    columns.iter().copied().min_by(|one, two| far(*one).total_cmp(&far(*two)))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{libraries, row};
    use super::*;

    /// With three ranks, parts make 1024 bytes 1020.
    #[test]
    fn sizes_that_were_rounded_share_a_column() {
        let all = [
            row("gloo", "all-reduce", 1024, 5.0),
            row("gloo", "all-reduce", 1 << 20, 5.0),
            row("gloo", "gather", 1020, 5.0),
            row("gloo", "gather", 1_048_572, 5.0),
            row("gloo", "barrier", 0, 5.0),
        ];
        let html = grid(&all.iter().collect::<Vec<_>>(), &|row| format!(">{}", row.bytes));
        for line in [
            "<tr><th></th><th>1 KiB</th><th>1 MiB</th></tr>",
            "<tr><th>gather</th><td>1020</td><td>1048572</td></tr>",
            "<tr><th>barrier</th><td colspan=\"2\">0</td></tr>",
        ] {
            assert!(html.contains(line), "{line} is missing in\n{html}");
        }
    }

    #[test]
    fn without_peers_times_come_first() {
        let ours = row("tensorwire", "all-reduce", 1024, 15_190.0);
        let html = write(&libraries()[..1], &[&ours]);
        assert!(html.contains("Time of one call") && html.contains(">15.2 ms</td>"), "{html}");
    }
}
