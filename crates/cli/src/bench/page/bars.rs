//! One size, or none: a bar for each library.

use std::fmt::Write;

use super::super::row::Row;
use super::Library;
use crate::bench::sizes;
use crate::html::escape;
use crate::units;

/// How much longer than the longest median the track is: room for what goes on to the 99th percentile.
const ROOM: f64 = 1.3;

pub(super) fn write(libraries: &[Library], rows: &[&Row]) -> String {
    let longest = rows.iter().map(|row| row.median_us).fold(1e-9, f64::max) * ROOM;
    let share = |micros: f64| (micros / longest * 100.0).clamp(0.0, 100.0);
    let size = rows.iter().map(|row| row.bytes).find(|bytes| *bytes > 0);
    let of_size = size.map_or_else(String::new, |bytes| format!(", {}", sizes::show(bytes)));
    let mut page =
        format!("<p class=\"note\">Time of one call{of_size}; the pale part goes on to p99.</p>\n");
    page.push_str("<div class=\"bars\">\n");
    for (index, library) in libraries.iter().enumerate() {
        let Some(row) = rows.iter().find(|row| library.made(row)) else { continue };
        let (median, p99) = (share(row.median_us), share(row.p99_us));
        let rate = if row.bytes > 0 { format!(", {}", units::rate(row.busbw_gbs)) } else { String::new() };
        let _ = writeln!(
            page,
            "<div class=\"bar c{index}\"><span class=\"who\">{}</span><span class=\"track\">\
             <i class=\"tail\" style=\"width: {p99:.2}%\"></i><i style=\"width: {median:.2}%\"></i></span>\
             <span class=\"value\">{} <small>p99 {}{rate}</small></span></div>",
            escape(&library.about),
            units::time(row.median_us),
            units::time(row.p99_us)
        );
    }
    page.push_str("</div>\n");
    page
}
