//! One page with all figures, which needs nothing but a browser.

mod bars;
mod figures;
mod plot;
mod summary;

use std::fmt::Write;

use super::fair::Side;
use super::row::Row;
use crate::html::{document, escape, facts};
use crate::machine::Machine;
use plot::{Plot, Unit};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// What the page says beside the figures.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) machine: Machine,
    pub(super) ranks: u32,
    pub(super) command: String,
    pub(super) date: String,
    /// In the order of their lines, ours first.
    pub(super) libraries: Vec<Library>,
    /// What memcpy reaches, in words.
    pub(super) memcpy: String,
    /// What all measurements of one of ours have in common.
    pub(super) settings: Vec<String>,
}

/// A library as it was called.
#[derive(Debug, Clone)]
pub(super) struct Library {
    pub(super) side: Side,
    /// In words, with its version.
    pub(super) about: String,
}

impl Library {
    fn made(&self, row: &Row) -> bool {
        row.peer == self.side.library && row.through == self.side.through()
    }
}

/// The page of these measurements.
pub(super) fn write(header: &Header, rows: &[Row]) -> String {
    let measured: Vec<&Row> = rows.iter().filter(|row| row.peer != "memcpy").collect();
    let mut ops: Vec<&str> = measured.iter().map(|row| row.op).collect();
    ops.dedup();
    let mut body = format!(
        "<header>\n<h1>Collectives <small>{} ranks on {}</small></h1>\n</header>\n",
        header.ranks,
        escape(&header.machine.host)
    );
    body.push_str(&summary::write(&header.libraries, &measured));
    body.push_str(&about(header));
    if ops.len() > 1 {
        let links: Vec<String> = ops.iter().map(|op| format!("<a href=\"#{op}\">{op}</a>")).collect();
        let _ = writeln!(body, "<nav>{}</nav>", links.concat());
    }
    for op in ops {
        let of_op: Vec<&Row> = measured.iter().copied().filter(|row| row.op == op).collect();
        section(&mut body, &header.libraries, op, &of_op);
    }
    let _ = write!(body, "<script>\n{SCRIPT}</script>\n");
    document("tensorwire: collectives", STYLE, &body)
}

/// Where, when and how.
fn about(header: &Header) -> String {
    let Machine { host, processor, cores, memory_gib, kernel } = &header.machine;
    let memory = memory_gib.map_or_else(String::new, |gib| format!("{gib} GiB"));
    let settings = header.settings.join(" — ");
    let list = facts(&[
        ("Date", &header.date),
        ("Host", host),
        ("Processor", &format!("{processor}, {cores} cores")),
        ("Memory", &memory),
        ("Kernel", &format!("Linux {kernel}")),
        ("Version", &format!("tensorwire {}", env!("CARGO_PKG_VERSION"))),
        ("Measured", &settings),
        ("memcpy", &header.memcpy),
        ("Command", &header.command),
    ]);
    format!(
        "<section id=\"about\">\n<h2>What was measured</h2>\n{list}<p class=\"note\">A time is the median over \
         iterations of the slowest rank’s time; a band reaches to the 99th percentile. Inputs are written anew before \
         every call, all ranks meet in a barrier, and results are checked after it; none of this is timed. Bus \
         bandwidth is counted as nccl-tests does.</p>\n</section>\n"
    )
}

fn section(page: &mut String, libraries: &[Library], op: &str, rows: &[&Row]) {
    let _ = writeln!(page, "<section id=\"{op}\">\n<h2>{op}</h2>");
    let mut sizes: Vec<usize> = rows.iter().map(|row| row.bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    // A line needs two points; one size is better shown by bars.
    if sizes.len() > 1 {
        legend(page, libraries, rows);
        page.push_str("<div class=\"plots\">\n");
        for unit in [Unit::Time, Unit::Rate] {
            let mut plot = Plot::new(unit);
            for (index, library) in libraries.iter().enumerate() {
                let of_library = rows.iter().filter(|row| library.made(row));
                plot.line(index, of_library.map(|row| plot::Point::of(row, unit)).collect());
            }
            page.push_str(&plot.svg());
        }
        page.push_str("</div>\n");
    } else {
        page.push_str(&bars::write(libraries, rows));
    }
    let table = figures::write(libraries, rows);
    let _ = writeln!(
        page,
        "<details><summary>Figures</summary>\n<div class=\"wide\">\n{table}</div></details>\n</section>"
    );
}

fn legend(page: &mut String, libraries: &[Library], rows: &[&Row]) {
    page.push_str("<ul class=\"legend\">");
    for (index, library) in libraries.iter().enumerate() {
        if rows.iter().any(|row| library.made(row)) {
            let (about, key) = (escape(&library.about), plot::key(index));
            let _ = write!(page, "<li class=\"c{index}\"><svg viewBox=\"0 0 26 10\">{key}</svg>{about}</li>");
        }
    }
    page.push_str("</ul>\n");
}

/// The caveats of some rows, each once.
fn caveats(rows: &[&Row]) -> String {
    let mut said: Vec<&str> = Vec::new();
    for caveat in rows.iter().flat_map(|row| &row.caveats) {
        if !said.contains(&caveat.as_str()) {
            said.push(caveat);
        }
    }
    said.iter().map(|caveat| format!("<p class=\"caveat\">{}</p>\n", escape(caveat))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::OURS;
    use super::*;

    pub(super) fn row(peer: &'static str, op: &'static str, bytes: usize, median_us: f64) -> Row {
        Row {
            op,
            ranks: 2,
            bytes,
            dtype: "float32",
            device: "host",
            memory: "private",
            path: "staged".into(),
            median_us,
            p99_us: median_us * 3.0,
            algbw_gbs: bytes as f64 / median_us / 1e3,
            busbw_gbs: bytes as f64 / median_us / 1e3,
            wrong: 0,
            peer,
            through: "torch",
            bound: false,
            best: false,
            ratio: (peer != OURS).then_some(9.7),
            floor_us: None,
            sparse: None,
            keys: None,
            hosts: None,
            caveats: Vec::new(),
        }
    }

    pub(super) fn libraries() -> Vec<Library> {
        let library = |library, about: &str| Library {
            side: Side { library, torch: true, bound: false },
            about: about.to_owned(),
        };
        vec![library(OURS, "tensorwire 0.1.0 through torch 2.15"), library("gloo", "Gloo of torch 2.15")]
    }

    fn page(rows: &[Row]) -> String {
        let header = Header {
            machine: Machine { host: "box<7>".into(), ..Machine::default() },
            ranks: 2,
            command: "tensorwire bench --against gloo".into(),
            date: "2026-11-16 15:20 UTC".into(),
            libraries: libraries(),
            memcpy: "7 GB/s".into(),
            settings: vec!["2 ranks".into()],
        };
        write(&header, rows)
    }

    fn some() -> Vec<Row> {
        let sizes = (3..28).map(|power| 1 << power);
        let mut rows: Vec<Row> = sizes
            .flat_map(|bytes| {
                let time = 20.0 + bytes as f64 / 1e4;
                [row(OURS, "all-reduce", bytes, time), row("gloo", "all-reduce", bytes, time * 9.7)]
            })
            .collect();
        rows.extend([row(OURS, "barrier", 0, 0.7), row("gloo", "barrier", 0, 15_190.0)]);
        rows
    }

    #[test]
    fn ratios_come_first_and_the_command_once() {
        let html = page(&some());
        let first = html.find("<table").unwrap();
        let at = |text: &str| html.find(text).unwrap();
        assert!(at("id=\"summary\"") < first && first < at("<svg") && first < at("id=\"about\""));
        assert!(html[first..].contains("9.70×"));
        assert_eq!(html.matches("tensorwire bench").count(), 1);
        assert!(html.contains("box&lt;7&gt;") && !html.contains("http"));
    }

    #[test]
    fn times_and_rates_have_units_that_suit_them() {
        let html = page(&some());
        for text in ["700 ns", "15.2 ms", "MB/s", "GB/s"] {
            assert!(html.contains(text), "{text}");
        }
        assert!(!html.contains("15190") && !html.contains("0.00 GB/s"));
    }

    #[test]
    fn one_size_is_no_empty_plot() {
        let html = page(&[row(OURS, "all-reduce", 1024, 2.0), row("gloo", "all-reduce", 1024, 8.0)]);
        assert!(!html.contains("class=\"plot\"") && html.matches("class=\"bar ").count() == 2, "{html}");
    }

    #[test]
    fn a_caveat_stands_below_the_ratios_and_below_the_figures() {
        let mut rows = some();
        rows.iter_mut()
            .filter(|row| row.peer == "gloo")
            .for_each(|row| row.caveats = vec!["Not <fair>.".into()]);
        let html = page(&rows);
        let caveat = "<p class=\"caveat\">Not &lt;fair&gt;.</p>";
        // The summary, and the figures of both operations.
        assert_eq!(html.matches(caveat).count(), 3);
        assert!(html.find(caveat).unwrap() < html.find("id=\"about\"").unwrap());
    }
}
