//! All figures of an operation: a line for each size, a group of columns for each library.

use std::fmt::Write;

use super::super::row::Row;
use super::{Library, caveats};
use crate::bench::sizes;
use crate::html::escape;
use crate::units;

pub(super) fn write(libraries: &[Library], rows: &[&Row]) -> String {
    let there: Vec<&Library> =
        libraries.iter().filter(|library| rows.iter().any(|row| library.made(row))).collect();
    let has_sizes = rows.iter().any(|row| row.bytes > 0);
    // Without a size there is no bandwidth.
    let has_floor = rows.iter().any(|row| row.floor_us.is_some());
    let titles = |library: &Library| -> Vec<&str> {
        let mut titles = vec!["median", "p99"];
        if has_sizes {
            titles.push("bus bw");
        }
        match library.side.is_ours() {
            true if has_floor => titles.extend(["wrong", "path", "floor"]),
            true => titles.extend(["wrong", "path"]),
            false => titles.push("ratio"),
        }
        titles
    };
    let mut table = String::from("<table>\n<thead><tr><th></th>");
    for library in &there {
        let _ = write!(table, "<th colspan=\"{}\">{}</th>", titles(library).len(), escape(&library.about));
    }
    table.push_str("</tr>\n<tr><th>size</th>");
    for title in there.iter().flat_map(|library| titles(library)) {
        let _ = write!(table, "<th>{title}</th>");
    }
    table.push_str("</tr></thead>\n<tbody>\n");
    let mut all: Vec<usize> = rows.iter().map(|row| row.bytes).collect();
    all.sort_unstable();
    all.dedup();
    for bytes in all {
        let size = if bytes == 0 { "–".to_owned() } else { sizes::show(bytes) };
        let _ = write!(table, "<tr><th title=\"{bytes} bytes\">{size}</th>");
        for library in &there {
            match rows.iter().find(|row| row.bytes == bytes && library.made(row)) {
                Some(row) => cells(&mut table, library, row, (has_sizes, has_floor)),
                None => {
                    let _ = write!(table, "<td colspan=\"{}\">–</td>", titles(library).len());
                }
            }
        }
        table.push_str("</tr>\n");
    }
    table.push_str("</tbody></table>\n");
    table + &caveats(rows)
}

fn cells(table: &mut String, library: &Library, row: &Row, (has_sizes, has_floor): (bool, bool)) {
    let _ = write!(table, "<td>{}</td><td>{}</td>", units::time(row.median_us), units::time(row.p99_us));
    if has_sizes {
        let _ = write!(table, "<td>{}</td>", units::rate(row.busbw_gbs));
    }
    if library.side.is_ours() {
        let class = if row.wrong > 0 { " class=\"bad\"" } else { "" };
        let _ = write!(table, "<td{class}>{}</td><td>{}</td>", row.wrong, escape(&row.path));
        if has_floor {
            let _ = write!(table, "<td>{}</td>", row.floor_us.map_or_else(|| "–".to_owned(), units::time));
        }
    } else {
        let ratio = row.ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{}×", units::times(ratio)));
        let _ = write!(table, "<td>{ratio}</td>");
    }
}
