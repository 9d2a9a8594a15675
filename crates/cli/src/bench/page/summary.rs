//! The table that comes first: how many times ours a peer's time is, of every operation and size.

use std::fmt::Write;

use super::super::fair::{self, Side};
use super::super::row::Row;
use super::{Library, caveats};
use crate::bench::sizes;
use crate::html::escape;
use crate::latency::figure;
use crate::units;

/// A table for each peer; without peers, one of times.
pub(super) fn write(libraries: &[Library], rows: &[&Row]) -> String {
    let mut page = String::from("<section id=\"summary\">\n");
    let peers: Vec<&Library> = libraries.iter().filter(|library| !library.side.is_ours()).collect();
    let sides: Vec<Side> = libraries.iter().map(|library| library.side).collect();
    for peer in &peers {
        let of_peer: Vec<&Row> = rows.iter().copied().filter(|row| peer.made(row)).collect();
        let ours = fair::opponent(&sides, peer.side)
            .and_then(|ours| libraries.iter().find(|library| library.side == ours));
        let (Some(ours), false) = (ours, of_peer.is_empty()) else { continue };
        let _ = writeln!(
            page,
            "<h2>{} beside {}</h2>\n<p class=\"note\">Its time over that of {}: above 1, {} is faster.</p>",
            escape(&peer.about),
            ours.side.library,
            escape(&ours.about),
            ours.side.library
        );
        let cell = |row: &Row| {
            let base =
                rows.iter().find(|base| ours.made(base) && base.op == row.op && base.bytes == row.bytes);
            let title = base.map_or_else(String::new, |base| {
                format!("{} and {}", units::time(row.median_us), units::time(base.median_us))
            });
            let class = match row.ratio {
                Some(ratio) if ratio >= 1.05 => "faster",
                Some(ratio) if ratio < 0.95 => "slower",
                _ => "level",
            };
            let text = row.ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{}×", figure(ratio)));
            format!(" class=\"{class}\" title=\"{title}\">{text}")
        };
        page.push_str(&grid(&of_peer, &cell));
        page.push_str(&caveats(&of_peer));
    }
    if peers.is_empty() {
        for library in libraries {
            let of_library: Vec<&Row> = rows.iter().copied().filter(|row| library.made(row)).collect();
            let _ = writeln!(page, "<h2>Time of one call <small>{}</small></h2>", escape(&library.about));
            page.push_str(&grid(&of_library, &|row| {
                format!(" title=\"p99 {}\">{}", units::time(row.p99_us), units::time(row.median_us))
            }));
        }
    }
    page.push_str("</section>\n");
    page
}

/// Operations by sizes; whichever there are more of has the lines. A cell is written after `<td`.
fn grid(rows: &[&Row], cell: &dyn Fn(&Row) -> String) -> String {
    let mut ops: Vec<&str> = rows.iter().map(|row| row.op).collect();
    ops.dedup();
    let columns = columns(rows);
    let find = |op: &str, size: usize| {
        rows.iter().find(|row| row.op == op && row.bytes > 0 && nearest(&columns, row.bytes) == Some(size))
    };
    let empty = || ">–".to_owned();
    let shown = |op: &str, size: usize| find(op, size).map_or_else(empty, |row| cell(row));
    let mut table = String::from("<div class=\"wide\"><table class=\"summary\">\n<thead><tr><th></th>");
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
    table.push_str("</tbody></table></div>\n");
    table
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
