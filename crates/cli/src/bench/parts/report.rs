//! One measurement, and the table of all.

use std::io;

use serde::{Deserialize, Serialize};

use super::super::device::BenchDevice;
use crate::latency::{Latency, figure};
use crate::printer::{Printer, Tone, table};

/// One measurement, as it crosses from rank 0 and as `--json` prints it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Row {
    bench: String,
    what: String,
    ranks: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<usize>,
    p50_us: f64,
    p99_us: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    gb_per_s: Option<f64>,
    /// The rate as a share of memcpy's at the same size.
    #[serde(skip_serializing_if = "Option::is_none")]
    of_memcpy: Option<f64>,
    /// Waits of both kinds, where a GPU's streams wait: those of streams, and those of the calling thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_waits: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    caller_waits: Option<u64>,
}

impl Row {
    pub(super) fn new(bench: &str, what: impl Into<String>, ranks: usize, mut latency: Latency) -> Self {
        let [p50_us, p99_us] = latency.quantiles([0.5, 0.99]);
        let (bench, what) = (bench.into(), what.into());
        Self {
            bench,
            what,
            ranks,
            bytes: None,
            p50_us,
            p99_us,
            gb_per_s: None,
            of_memcpy: None,
            stream_waits: None,
            caller_waits: None,
        }
    }

    /// With so many waits of streams and of the calling thread.
    pub(super) fn waiting(mut self, (streams, caller): (u64, u64)) -> Self {
        (self.stream_waits, self.caller_waits) = (Some(streams), Some(caller));
        self
    }

    /// Of a size, moving so many bytes in each call.
    pub(super) fn moving(mut self, size: usize, moved: usize) -> Self {
        self.bytes = Some(size);
        self.gb_per_s = Some(moved as f64 / self.p50_us / 1e3);
        self
    }

    pub(super) fn beside(mut self, memcpy: &Self) -> Self {
        self.of_memcpy = self.gb_per_s.zip(memcpy.gb_per_s).map(|(ours, theirs)| ours / theirs);
        self
    }

    pub(super) fn title(&self) -> String {
        match self.bytes {
            Some(bytes) => format!("{}, {}", self.what, size(bytes)),
            None => self.what.clone(),
        }
    }
}

pub(super) fn print(rows: &[Row], ranks: u32, device: BenchDevice, printer: &Printer) -> io::Result<()> {
    let cells = |row: &Row| {
        vec![
            row.what.clone(),
            row.bytes.map(size).unwrap_or_default(),
            figure(row.p50_us),
            figure(row.p99_us),
            row.gb_per_s.map(figure).unwrap_or_default(),
            row.of_memcpy.map(|share| format!("{:.0}%", share * 100.0)).unwrap_or_default(),
        ]
    };
    let head = [
        &*match device {
            BenchDevice::Host => format!("{ranks} ranks"),
            gpu => format!("{ranks} ranks, {gpu}"),
        },
        "size",
        "p50 us",
        "p99 us",
        "GB/s",
        "of memcpy",
    ];
    let lines = table(&head, &rows.iter().map(cells).collect::<Vec<_>>());
    printer.line(&printer.tint(Tone::Heading, &lines[0]))?;
    let mut section = None;
    for (row, line) in rows.iter().zip(&lines[1..]) {
        if section.is_some_and(|section| section != row.bench) {
            printer.line("")?;
        }
        section = Some(row.bench.as_str());
        printer.line(line)?;
    }
    if let Some(waits) = rows.iter().find_map(waits) {
        printer.line("")?;
        printer.line(&waits)?;
    }
    Ok(())
}

/// Which streams and threads waited, in words.
fn waits(row: &Row) -> Option<String> {
    let (streams, caller) = row.stream_waits.zip(row.caller_waits)?;
    Some(match caller {
        0 => format!("all {streams} waits were the stream's"),
        caller => format!("{streams} waits were the stream's, {caller} the calling thread's"),
    })
}

fn size(bytes: usize) -> String {
    match bytes {
        bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        bytes if bytes >= 1 << 10 => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waited_is_said_where_it_is_known() {
        let row = |waits| Row::new("queues", "signal", 2, Latency::default()).waiting(waits);
        assert_eq!(waits(&Row::new("queues", "signal", 2, Latency::default())), None);
        assert_eq!(waits(&row((7, 0))).unwrap(), "all 7 waits were the stream's");
        assert_eq!(waits(&row((7, 2))).unwrap(), "7 waits were the stream's, 2 the calling thread's");
        let line = serde_json::to_string(&row((0, 9))).unwrap();
        assert_eq!(serde_json::from_str::<Row>(&line).unwrap().caller_waits, Some(9), "{line}");
    }
}
