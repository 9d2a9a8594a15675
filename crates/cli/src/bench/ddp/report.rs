//! How steps are shown.

use serde::Serialize;

use crate::bench::crew::Crew;
use crate::bench::sheet::below;
use crate::bench::sizes;
use crate::exit::Failure;
use crate::latency::figure;
use crate::machine::Machine;
use crate::printer::{Printer, Tone, WIDTH, wrap};

/// What one library needed, as `--json` prints it.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) op: &'static str,
    pub(super) ranks: u32,
    pub(super) bytes: usize,
    pub(super) bucket_view: bool,
    pub(super) memory: &'static str,
    /// How many steps of each kind were measured.
    pub(super) steps: usize,
    /// Without DDP's work.
    pub(super) alone_us: f64,
    /// With it, but nothing is communicated.
    pub(super) empty_us: f64,
    pub(super) step_us: f64,
    /// What DDP adds: step less alone. Noise may be more than what there is to see, here and below.
    pub(super) extra_us: f64,
    /// Gloo's over this one's, as all ratios; nothing where one of them is not above zero.
    pub(super) extra_ratio: Option<f64>,
    /// What communication adds: step less empty.
    pub(super) communication_us: f64,
    pub(super) communication_ratio: Option<f64>,
    pub(super) wrong: u64,
    pub(super) peer: &'static str,
    pub(super) bound: bool,
    /// What one must know to read the ratios.
    pub(super) caveats: Vec<String>,
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
    let titles =
        ["step", "alone", "empty", "extra", "ratio", "communication", "ratio", "wrong"].map(str::to_owned);
    printer.line("")?;
    printer.line(&printer.tint(Tone::Quiet, &line("library, in ms", titles)))?;
    for row in rows {
        let name = if row.memory == "shared" { format!("{} shared", row.peer) } else { row.peer.to_owned() };
        let millis = |micros: f64| figure(micros / 1e3);
        let times =
            |ratio: Option<f64>| ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{}x", figure(ratio)));
        let cells = [
            millis(row.step_us),
            millis(row.alone_us),
            millis(row.empty_us),
            millis(row.extra_us),
            times(row.extra_ratio),
            millis(row.communication_us),
            times(row.communication_ratio),
            row.wrong.to_string(),
        ];
        let line = line(&name, cells);
        printer.line(&if row.wrong > 0 { printer.tint(Tone::Bad, &line) } else { line })?;
    }
    let caveats = rows.first().map(|row| &row.caveats[..]).unwrap_or_default();
    Ok(below(caveats, printer).iter().try_for_each(|line| printer.line(line))?)
}

fn line(name: &str, cells: [String; 8]) -> String {
    let [step, alone, empty, extra, extra_ratio, communication, ratio, wrong] = cells;
    let times = format!("{name:<17}  {step:>5}  {alone:>5}  {empty:>5}");
    format!("{times}  {extra:>5} {extra_ratio:>5}  {communication:>13} {ratio:>5}  {wrong:>5}")
}
