//! How steps are shown.

use serde::Serialize;

use crate::bench::crew::Crew;
use crate::bench::machine::Machine;
use crate::bench::sizes;
use crate::exit::Failure;
use crate::latency::figure;
use crate::printer::{Printer, Tone, WIDTH, wrap};

/// What one library needed, as `--json` prints it.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) op: &'static str,
    pub(super) ranks: u32,
    pub(super) bytes: usize,
    pub(super) bucket_view: bool,
    pub(super) memory: &'static str,
    /// How many steps were measured, each with and without communication.
    pub(super) steps: usize,
    pub(super) alone_us: f64,
    pub(super) step_us: f64,
    pub(super) communication_us: f64,
    /// Gloo's communication over this one's.
    pub(super) ratio: Option<f64>,
    pub(super) wrong: u64,
    pub(super) peer: &'static str,
    pub(super) bound: bool,
}

pub(super) fn print(
    rows: &[Row],
    machine: &Machine,
    crews: &[Crew],
    json: bool,
    printer: &Printer,
) -> Result<(), Failure> {
    if json {
        return Ok(rows.iter().try_for_each(|row| printer.json(row))?);
    }
    let libraries: Vec<String> = crews.iter().map(Crew::title_of_library).collect();
    let setting = rows.first().map_or_else(String::new, |row| {
        let view = if row.bucket_view { ", gradients are views of buckets" } else { "" };
        format!("{} ranks, {} of float32 parameters{view}; ", row.ranks, sizes::show(row.bytes))
    });
    for text in [machine.to_string(), format!("{setting}{}", libraries.join(", "))] {
        wrap(&text, WIDTH).iter().try_for_each(|line| printer.line(line))?;
    }
    let titles = ["step ms", "alone ms", "communication ms", "ratio", "wrong"].map(str::to_owned);
    printer.line("")?;
    printer.line(&printer.tint(Tone::Quiet, &line("library", titles)))?;
    for row in rows {
        let name = if row.memory == "shared" { format!("{} shared", row.peer) } else { row.peer.to_owned() };
        let millis = |micros: f64| figure(micros / 1e3);
        let cells = [
            millis(row.step_us),
            millis(row.alone_us),
            millis(row.communication_us),
            row.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{}x", figure(ratio))),
            row.wrong.to_string(),
        ];
        let line = line(&name, cells);
        printer.line(&if row.wrong > 0 { printer.tint(Tone::Bad, &line) } else { line })?;
    }
    Ok(())
}

fn line(name: &str, cells: [String; 5]) -> String {
    let [step, alone, communication, ratio, wrong] = cells;
    format!("{name:<18}  {step:>8}  {alone:>8}  {communication:>16}  {ratio:>6}  {wrong:>5}")
}
