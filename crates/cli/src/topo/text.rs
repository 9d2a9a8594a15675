//! The report for a terminal: tables, and under each the reason for every "no".

use std::io;

use tensorwire::device::gpu::{Access, Remote};
use tensorwire::topology::{Gpu, Link, Machine, Nic, Node};

use super::matrix::blocks;
use super::report::{Report, gpu_name, nic_name};
use crate::doctor::bytes;
use crate::latency::figure;
use crate::printer::{Printer, Tone, WIDTH, table, wrap};

pub(super) fn print(report: &Report, printer: &Printer) -> io::Result<()> {
    let out = Out { printer };
    let machine = &report.machine;
    out.labelled("", &machine.name, Some(Tone::Heading))?;
    if !report.system.processor.is_empty() {
        out.hanging("  ", &report.system.to_string())?;
    }
    for node in &machine.nodes {
        out.hanging("  ", &node_line(node, machine))?;
    }
    if machine.gpus.is_empty() {
        printer.line("\nNo GPU was found.")?;
    }
    ways(report, &out)?;
    peers(machine, &out)?;
    gpus(machine, &out)?;
    affinity(report, &out)?;
    nics(machine, &out)?;
    measured(report, &out)?;
    if !machine.notes.is_empty() {
        out.heading("Not asked, and why")?;
        for note in &machine.notes {
            out.hanging("  ", note)?;
        }
    }
    Ok(())
}

/// The number and size of a node, and the devices near it.
fn node_line(node: &Node, machine: &Machine) -> String {
    let of = |numa: Option<u32>| numa == Some(node.number) || machine.nodes.len() == 1;
    let gpus = machine.gpus.iter().enumerate().filter(|(_, gpu)| of(gpu.numa)).map(|(index, _)| index);
    let nics = machine.nics.iter().enumerate().filter(|(_, nic)| of(nic.numa)).map(|(index, _)| index);
    let mut parts = vec![match node.cpus.as_str() {
        "" => "no processors".into(),
        cpus => format!("CPUs {cpus}"),
    }];
    if node.memory > 0 {
        parts.push(bytes(node.memory));
    }
    parts.extend(several("GPU", &gpus.collect::<Vec<_>>()));
    parts.extend(several("NIC", &nics.collect::<Vec<_>>()));
    format!("NUMA node {}: {}", node.number, parts.join(", "))
}

fn ways(report: &Report, out: &Out<'_>) -> io::Result<()> {
    let (ways, count) = (&report.ways, report.machine.gpus.len());
    if count == 0 || ways.names.len() < 2 {
        return Ok(());
    }
    out.heading("Ways between them")?;
    out.lines(blocks(&ways.names, &ways.names, count, &ways.links))?;
    let words = [Link::Pix, Link::Pxb, Link::Phb, Link::Node, Link::Sys];
    let is_used = |word: &str| ways.links.iter().flatten().any(|link| link == word);
    let mut legend = vec!["X itself".to_owned()];
    if ways.links.iter().flatten().any(|link| link.starts_with("NV")) {
        legend.push(format!("NV# {}", Link::NvLink(0).meaning()));
    }
    legend.extend(
        words
            .into_iter()
            .filter(|word| is_used(&word.to_string()))
            .map(|word| format!("{word} {}", word.meaning())),
    );
    out.quiet("", &legend.join("; "))
}

fn peers(machine: &Machine, out: &Out<'_>) -> io::Result<()> {
    let count = machine.gpus.len();
    if count < 2 {
        return Ok(());
    }
    out.heading("Peer access: work on the GPU of a row reaches memory of the GPU of a column")?;
    let names: Vec<String> = (0..count).map(gpu_name).collect();
    let mut reasons = Reasons::default();
    let mut cells = Vec::new();
    for (from, row) in machine.peers.iter().enumerate() {
        let cell = |(to, access): (usize, &Access)| match from == to {
            true => "X".to_owned(),
            false => reasons.cell(access, || format!("{} to {}", gpu_name(from), gpu_name(to))),
        };
        cells.push(row.iter().enumerate().map(cell).collect());
    }
    out.lines(blocks(&names, &names, 0, &cells))?;
    reasons.print(out)
}

fn gpus(machine: &Machine, out: &Out<'_>) -> io::Result<()> {
    if machine.gpus.is_empty() {
        return Ok(());
    }
    out.heading("GPUs")?;
    // Without a driver to ask nobody knows what the process sees.
    let told = machine.gpus.iter().any(|gpu| gpu.ordinal.is_some());
    for (index, gpu) in machine.gpus.iter().enumerate() {
        let hidden = if told && gpu.ordinal.is_none() { ", hidden from this process" } else { "" };
        out.hanging(&format!("{:<8}", gpu_name(index)), &format!("{}{hidden}", about_gpu(gpu)))?;
    }
    out.heading("NVLink, fabric handles, multicast")?;
    let mut reasons = Reasons::default();
    let mut rows = Vec::new();
    for (index, gpu) in machine.gpus.iter().enumerate() {
        let name = gpu_name(index);
        let state = gpu.fabric.as_ref().map_or("not asked".into(), |fabric| fabric.state.to_string());
        let clique = gpu.fabric.as_ref().map_or(String::new(), |fabric| fabric.clique.to_string());
        let handles = reasons.cell(&gpu.fabric_access, || format!("{name} handles"));
        let multicast = reasons.cell(&gpu.multicast, || format!("{name} multicast"));
        rows.push(vec![name, nvlinks(gpu), state, clique, handles, multicast]);
    }
    out.lines(table(&["", "NVLinks", "fabric", "clique", "handles", "multicast"], &rows))?;
    reasons.print(out)
}

fn about_gpu(gpu: &Gpu) -> String {
    let mut parts = vec![gpu.name.clone()];
    if gpu.memory > 0 {
        parts.push(bytes(gpu.memory));
    }
    parts.extend(gpu.capability.map(|(major, minor)| format!("compute {major}.{minor}")));
    parts.extend(gpu.pci.address().map(str::to_owned));
    parts.extend(gpu.uuid.clone());
    parts.extend(gpu.ordinal.map(|ordinal| format!("ordinal {ordinal}")));
    parts.join(", ")
}

/// How many of its links are active, and where they go.
pub(super) fn nvlinks(gpu: &Gpu) -> String {
    let active = gpu.links.iter().filter(|link| link.active);
    match gpu.links.len() {
        0 => "none".into(),
        all => {
            let switched = active.clone().filter(|link| link.remote == Remote::Switch).count();
            let active = active.count();
            let to = if switched > 0 && switched == active { ", switch" } else { "" };
            format!("{active} of {all}{to}")
        }
    }
}

fn affinity(report: &Report, out: &Out<'_>) -> io::Result<()> {
    let machine = &report.machine;
    if machine.gpus.is_empty() {
        return Ok(());
    }
    out.heading("NIC of each GPU")?;
    if report.affinity.is_empty() {
        return out.quiet("", "none: no NIC is on a bus of this machine");
    }
    for choice in &report.affinity {
        let nic = &machine.nics[choice.nic];
        let mut text = format!("{} {} ({})", nic_name(choice.nic), nic.name, choice.link);
        if choice.configured {
            text.push_str(", as TENSORWIRE_NICS says");
        }
        if let Some(why) = nic.up.reason() {
            text.push_str(&format!(", which is down: {why}"));
        }
        out.hanging(&format!("{:<8}", gpu_name(choice.gpu)), &text)?;
        for passed in &choice.passed {
            let nearer = &machine.nics[*passed];
            let why = nearer.up.reason().unwrap_or_default();
            out.quiet("        ", &format!("not {} {}: {why}", nic_name(*passed), nearer.name))?;
        }
    }
    Ok(())
}

fn nics(machine: &Machine, out: &Out<'_>) -> io::Result<()> {
    if machine.nics.is_empty() {
        return Ok(());
    }
    out.heading("NICs")?;
    for (index, nic) in machine.nics.iter().enumerate() {
        out.hanging(&format!("{:<8}", nic_name(index)), &about_nic(nic))?;
        if let Some(why) = nic.up.reason() {
            out.quiet("        ", &format!("down: {why}"))?;
        }
        if nic.rdma.as_ref().is_some_and(|rdma| rdma.gid.is_none()) {
            out.quiet("        ", "no usable GID: its port has no address, so RDMA cannot use it")?;
        }
    }
    Ok(())
}

pub(super) fn about_nic(nic: &Nic) -> String {
    let mut parts = vec![nic.name.clone()];
    parts.extend(nic.interfaces.iter().filter(|interface| **interface != nic.name).cloned());
    parts.extend(nic.pci.address().map(str::to_owned));
    parts.push(match &nic.up {
        Access::Yes => nic.speed.map_or("up".into(), |speed| format!("{} Gb/s", figure_of(speed))),
        Access::No(_) => "down".into(),
        _ => "state unknown".into(),
    });
    if let Some(rdma) = &nic.rdma {
        parts.push(format!("{} port {}", rdma.layer, rdma.port));
        parts
            .extend(rdma.gid.as_ref().map(|gid| format!("GID {} {} ({})", gid.index, gid.address, gid.kind)));
    } else {
        parts.push("no RDMA".into());
    }
    parts.join(", ")
}

/// Megabits as gigabits.
fn figure_of(megabits: u32) -> String {
    let text = format!("{:.1}", f64::from(megabits) / 1e3);
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

fn measured(report: &Report, out: &Out<'_>) -> io::Result<()> {
    let Some(measured) = &report.measured else { return Ok(()) };
    let mut reasons = Reasons::default();
    out.heading(&format!("GB/s copied, {} at a time, from row to column", bytes(measured.bytes as u64)))?;
    let mut rates = Vec::new();
    for (from, row) in measured.cells.iter().enumerate() {
        let cell = |(to, cell): (usize, &super::measure::Cell)| match (cell.gbs, &cell.why) {
            (Some(gbs), _) => figure(gbs),
            (None, why) => {
                let access = why.clone().map_or(Access::Unknown, Access::No);
                reasons.cell(&access, || format!("{} to {}", measured.places[from], measured.places[to]))
            }
        };
        rates.push(row.iter().enumerate().map(cell).collect());
    }
    out.lines(blocks(&measured.places, &measured.places, 0, &rates))?;
    reasons.print(out)?;
    out.heading("Microseconds until a copy of 8 bytes is done")?;
    let micros = |cell: &super::measure::Cell| cell.micros.map_or("-".into(), figure);
    let times: Vec<Vec<String>> = measured.cells.iter().map(|row| row.iter().map(micros).collect()).collect();
    out.lines(blocks(&measured.places, &measured.places, 0, &times))
}

/// `GPU0`, `GPU0, GPU1`, `GPU0 to GPU7`.
fn several(word: &str, numbers: &[usize]) -> Option<String> {
    let (first, last) = (numbers.first()?, numbers.last()?);
    Some(match numbers.len() {
        1 | 2 => numbers.iter().map(|number| format!("{word}{number}")).collect::<Vec<_>>().join(", "),
        count if last - first + 1 == count => format!("{word}{first} to {word}{last}"),
        _ => format!("{word}s {}", numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
    })
}

/// Reasons by number, each with those it holds for.
#[derive(Debug, Default)]
struct Reasons {
    all: Vec<(String, Vec<String>)>,
    unknown: bool,
}

impl Reasons {
    /// What a cell says: yes, no with the number of its reason, or a question mark.
    fn cell(&mut self, access: &Access, who: impl FnOnce() -> String) -> String {
        let reason = match access {
            Access::Yes => return "yes".into(),
            Access::No(reason) => reason,
            _ => {
                self.unknown = true;
                return "?".into();
            }
        };
        let index = self.all.iter().position(|(known, _)| known == reason).unwrap_or_else(|| {
            self.all.push((reason.clone(), Vec::new()));
            self.all.len() - 1
        });
        self.all[index].1.push(who());
        format!("no {}", index + 1)
    }

    fn print(&self, out: &Out<'_>) -> io::Result<()> {
        for (index, (reason, who)) in self.all.iter().enumerate() {
            let who = match who.len() {
                0..=4 => who.join(", "),
                count => format!("{} and {} more", who[..3].join(", "), count - 3),
            };
            let number = format!("no {}: ", index + 1);
            out.quiet(&number, &format!("{reason} ({who})"))?;
        }
        if self.unknown {
            out.quiet("?: ", "nobody who was asked could say")?;
        }
        Ok(())
    }
}

/// Lines that fit a terminal.
struct Out<'a> {
    printer: &'a Printer,
}

impl Out<'_> {
    fn heading(&self, text: &str) -> io::Result<()> {
        self.printer.line(&format!("\n{}", self.printer.tint(Tone::Heading, text)))
    }

    fn lines(&self, lines: Vec<String>) -> io::Result<()> {
        lines.iter().try_for_each(|line| self.printer.line(&plain(line)))
    }

    /// Text after a label; further lines begin below the text.
    fn hanging(&self, label: &str, text: &str) -> io::Result<()> {
        self.labelled(label, text, None)
    }

    fn quiet(&self, label: &str, text: &str) -> io::Result<()> {
        self.labelled(label, text, Some(Tone::Quiet))
    }

    fn labelled(&self, label: &str, text: &str, tone: Option<Tone>) -> io::Result<()> {
        let indent = label.chars().count();
        for (index, line) in wrap(text, WIDTH.saturating_sub(indent).max(20)).iter().enumerate() {
            let line = match index {
                0 => format!("{label}{line}"),
                _ => format!("{:indent$}{line}", ""),
            };
            let line = plain(line.trim_end());
            self.printer.line(&tone.map_or(line.clone(), |tone| self.printer.tint(tone, &line)))?;
        }
        Ok(())
    }
}

/// A saved machine is somebody else's text: it shall not steer the terminal.
fn plain(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_are_said_shortly() {
        assert_eq!(several("GPU", &[]), None);
        assert_eq!(several("GPU", &[3]).unwrap(), "GPU3");
        assert_eq!(several("GPU", &[0, 2]).unwrap(), "GPU0, GPU2");
        assert_eq!(several("GPU", &[4, 5, 6]).unwrap(), "GPU4 to GPU6");
        assert_eq!(several("NIC", &[0, 1, 5]).unwrap(), "NICs 0, 1, 5");
    }

    #[test]
    fn text_does_not_steer_the_terminal() {
        assert_eq!(plain("a\x1b[2Jb\u{9b}1m"), "a?[2Jb?1m");
    }

    #[test]
    fn equal_reasons_are_one() {
        let mut reasons = Reasons::default();
        let no = |text: &str| Access::no(text);
        let cells: Vec<String> = [Access::Yes, no("a"), no("b"), no("a"), Access::Unknown]
            .iter()
            .map(|access| reasons.cell(access, || "x".into()))
            .collect();
        assert_eq!(cells, ["yes", "no 1", "no 2", "no 1", "?"]);
        assert_eq!(reasons.all.len(), 2);
    }
}
