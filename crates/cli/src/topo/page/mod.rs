//! One page with the picture of the machine and its figures, which needs nothing but a browser.

mod tree;

use std::fmt::Write;

use tensorwire::device::gpu::Access;
use tensorwire::topology::{Link, Machine};

use super::measure::{Cell, Measured};
use super::report::{Report, gpu_name, nic_name};
use super::text::{about_nic, nvlinks};
use crate::doctor::bytes;
use crate::exit::Failure;
use crate::html::{document, escape, facts};
use crate::latency::figure;
use crate::units;

const STYLE: &str = include_str!("page.css");

/// The page of a report.
pub(super) fn write(report: &Report) -> Result<String, Failure> {
    fill(report).map_err(|_| Failure::failed("the page cannot be put together"))
}

fn fill(report: &Report) -> Result<String, std::fmt::Error> {
    let machine = &report.machine;
    let mut page = format!("<header>\n<h1>{}</h1>\n{}", escape(&machine.name), about(report));
    page.push_str("</header>\n");
    copies(&mut page, report.measured.as_ref())?;
    page.push_str("<section id=\"tree\">\n<h2>The tree</h2>\n");
    page.push_str("<p class=\"note\">NUMA nodes, PCI host bridges, switches, and what is below them.");
    page.push_str(if report.affinity.is_empty() {
        "</p>\n"
    } else {
        " A curve leads from a GPU to its NIC.</p>\n"
    });
    writeln!(page, "<div class=\"wide panel\">\n{}</div>\n</section>", tree::svg(report)?)?;
    if !machine.gpus.is_empty() {
        ways(&mut page, report)?;
        if machine.gpus.len() > 1 {
            peers(&mut page, machine)?;
        }
        gpus(&mut page, report)?;
    }
    nics(&mut page, machine)?;
    notes(&mut page, machine)?;
    Ok(document(&format!("tensorwire topo: {}", machine.name), STYLE, &page))
}

/// What the machine is, who asked and when. Of a saved machine, what the file knows.
fn about(report: &Report) -> String {
    let (machine, system) = (&report.machine, &report.system);
    let cores = if system.cores > 0 { format!(", {} cores", system.cores) } else { String::new() };
    let memory = match (system.memory_gib, machine.nodes.iter().map(|node| node.memory).sum()) {
        (Some(gib), _) => format!("{gib} GiB"),
        (None, 0) => String::new(),
        (None, all) => bytes(all),
    };
    let nodes = |node: &tensorwire::topology::Node| match node.cpus.as_str() {
        "" => format!("{}: no processors", node.number),
        cpus => format!("{}: CPUs {cpus}", node.number),
    };
    let mut models: Vec<(&str, usize)> = Vec::new();
    for gpu in &machine.gpus {
        match models.iter_mut().find(|(name, _)| *name == gpu.name) {
            Some((_, count)) => *count += 1,
            None => models.push((&gpu.name, 1)),
        }
    }
    let gpus: Vec<String> = models.iter().map(|(name, count)| format!("{count} × {name}")).collect();
    let known = |text: &str, shown: String| if text.is_empty() { String::new() } else { shown };
    facts(&[
        ("Date", &report.date),
        ("Host", &system.host),
        ("Processor", &known(&system.processor, format!("{}{cores}", system.processor))),
        ("NUMA nodes", &machine.nodes.iter().map(nodes).collect::<Vec<_>>().join("; ")),
        ("Memory", &memory),
        ("GPUs", &if gpus.is_empty() { "none was found".to_owned() } else { gpus.join(", ") }),
        ("Kernel", &known(&system.kernel, format!("Linux {}", system.kernel))),
        ("Version", &known(&report.tensorwire, format!("tensorwire {}", report.tensorwire))),
    ])
}

fn notes(page: &mut String, machine: &Machine) -> std::fmt::Result {
    if !machine.notes.is_empty() {
        page.push_str("<section id=\"notes\">\n<h2>Not asked, and why</h2>\n<ul class=\"note\">\n");
        for note in &machine.notes {
            writeln!(page, "<li>{}</li>", escape(note))?;
        }
        page.push_str("</ul>\n</section>\n");
    }
    Ok(())
}

/// What copies reach: two maps, or two figures where there is one place alone.
fn copies(page: &mut String, measured: Option<&Measured>) -> std::fmt::Result {
    page.push_str("<section id=\"measured\">\n<h2>What copies reach</h2>\n");
    match measured {
        None => page.push_str(
            "<p class=\"note\">Not measured: the file of this machine has no figures. \
             <code>tensorwire topo --measure --json</code> saves them.</p>\n",
        ),
        Some(measured) => match (&measured.places[..], measured.cells.first().and_then(|row| row.first())) {
            ([place], Some(cell)) => alone(page, measured, place, cell),
            _ => heat(page, measured)?,
        },
    }
    page.push_str("</section>\n");
    Ok(())
}

/// One place: the host of a machine without a GPU.
fn alone(page: &mut String, measured: &Measured, place: &str, cell: &Cell) {
    let size = bytes(measured.bytes as u64);
    let rate = cell.gbs.map_or_else(String::new, |gbs| format!("{}, {size} at a time", units::rate(gbs)));
    let time = cell.micros.map_or_else(String::new, units::time);
    let why = cell.why.as_ref().map_or_else(String::new, |why| format!("not measured: {why}"));
    page.push_str(&facts(&[
        (&format!("Inside {place} memory, by one thread"), &rate),
        ("Until a copy of 8 bytes is done", &time),
        ("Copies", &why),
    ]));
}

/// A square table: names for rows and columns, and what a cell is made of.
fn square(
    page: &mut String,
    names: &[String],
    mut cell: impl FnMut(usize, usize) -> String,
) -> std::fmt::Result {
    page.push_str("<div class=\"wide\"><table class=\"square\">\n<tr><th></th>");
    for name in names {
        write!(page, "<th>{}</th>", escape(name))?;
    }
    page.push_str("</tr>\n");
    for (row, name) in names.iter().enumerate() {
        write!(page, "<tr><th>{}</th>", escape(name))?;
        (0..names.len()).for_each(|column| page.push_str(&cell(row, column)));
        page.push_str("</tr>\n");
    }
    page.push_str("</table></div>\n");
    Ok(())
}

fn ways(page: &mut String, report: &Report) -> std::fmt::Result {
    page.push_str("<section id=\"ways\">\n<h2>Ways between them</h2>\n");
    let links = &report.ways.links;
    square(page, &report.ways.names, |row, column| {
        let link = &links[row][column];
        let class = if link.starts_with("NV") { "nv".into() } else { link.to_lowercase() };
        format!("<td class=\"way {class}\">{}</td>", escape(link))
    })?;
    page.push_str("<p class=\"note\">NV# over this many NVLinks");
    for word in [Link::Pix, Link::Pxb, Link::Phb, Link::Node, Link::Sys] {
        write!(page, "; {word} {}", word.meaning())?;
    }
    page.push_str("</p>\n</section>\n");
    Ok(())
}

fn peers(page: &mut String, machine: &Machine) -> std::fmt::Result {
    page.push_str("<section id=\"peers\">\n<h2>Peer access</h2>\n");
    let names: Vec<String> = (0..machine.gpus.len()).map(gpu_name).collect();
    square(page, &names, |row, column| match row == column {
        true => "<td class=\"way x\">X</td>".into(),
        false => access(&machine.peers[row][column]),
    })?;
    let mut reasons: Vec<&str> = machine.peers.iter().flatten().filter_map(Access::reason).collect();
    reasons.sort_unstable();
    reasons.dedup();
    for reason in reasons {
        writeln!(page, "<p class=\"note\">no: {}</p>", escape(reason))?;
    }
    page.push_str("</section>\n");
    Ok(())
}

/// A cell with an answer.
fn access(access: &Access) -> String {
    match access {
        Access::Yes => "<td class=\"yes\">yes</td>".into(),
        Access::No(reason) => format!("<td class=\"no\" title=\"{}\">no</td>", escape(reason)),
        _ => "<td title=\"nobody who was asked could say\">?</td>".into(),
    }
}

fn gpus(page: &mut String, report: &Report) -> std::fmt::Result {
    let machine = &report.machine;
    page.push_str("<section id=\"gpus\">\n<h2>GPUs</h2>\n<div class=\"wide\"><table class=\"list\">\n");
    page.push_str(
        "<tr><th></th><th>model</th><th>memory</th><th>compute</th><th>PCI</th><th>NUMA</th>\
        <th>NVLinks</th><th>fabric</th><th>handles</th><th>multicast</th><th>NIC</th></tr>\n",
    );
    let mut reasons: Vec<(&str, &str)> = Vec::new();
    for (index, gpu) in machine.gpus.iter().enumerate() {
        let compute = gpu.capability.map_or("?".into(), |(major, minor)| format!("{major}.{minor}"));
        let numa = gpu.numa.map_or("–".into(), |numa| numa.to_string());
        let fabric = gpu.fabric.as_ref().map_or("?".into(), |fabric| fabric.state.to_string());
        let choice = report.affinity.iter().find(|choice| choice.gpu == index);
        let nic = choice.map_or("–".into(), |choice| format!("{} ({})", nic_name(choice.nic), choice.link));
        let memory = if gpu.memory > 0 { bytes(gpu.memory) } else { "?".into() };
        let cells = [gpu.name.clone(), memory, compute, gpu.pci.address().unwrap_or("?").into(), numa];
        write!(
            page,
            "<tr title=\"{}\"><th>{}</th>",
            escape(gpu.uuid.as_deref().unwrap_or("no driver")),
            gpu_name(index)
        )?;
        for cell in cells.into_iter().chain([nvlinks(gpu), fabric]) {
            write!(page, "<td>{}</td>", escape(&cell))?;
        }
        let (handles, multicast) = (access(&gpu.fabric_access), access(&gpu.multicast));
        writeln!(page, "{handles}{multicast}<td>{}</td></tr>", escape(&nic))?;
        reasons.extend(gpu.fabric_access.reason().map(|reason| ("handles", reason)));
        reasons.extend(gpu.multicast.reason().map(|reason| ("multicast", reason)));
    }
    page.push_str("</table></div>\n");
    reasons.sort_unstable();
    reasons.dedup();
    for (what, reason) in reasons {
        writeln!(page, "<p class=\"note\">no {what}: {}</p>", escape(reason))?;
    }
    page.push_str("</section>\n");
    Ok(())
}

fn nics(page: &mut String, machine: &Machine) -> std::fmt::Result {
    if machine.nics.is_empty() {
        return Ok(());
    }
    page.push_str("<section id=\"nics\">\n<h2>NICs</h2>\n<dl>\n");
    for (index, nic) in machine.nics.iter().enumerate() {
        let why = nic.up.reason().map(|why| format!(" <span class=\"no\">{}</span>", escape(why)));
        writeln!(
            page,
            "<dt>{}</dt><dd>{}{}</dd>",
            nic_name(index),
            escape(&about_nic(nic)),
            why.unwrap_or_default()
        )?;
    }
    page.push_str("</dl>\n</section>\n");
    Ok(())
}

/// The two maps: the better a figure, the stronger its colour. By their logarithms: a machine has figures of very
/// different sizes.
fn heat(page: &mut String, measured: &Measured) -> std::fmt::Result {
    let size = bytes(measured.bytes as u64);
    page.push_str(
        "<p class=\"note\">From the place of a row to that of a column.</p>\n<div class=\"maps\">\n",
    );
    let rates = |cell: &Cell| cell.gbs;
    let times = |cell: &Cell| cell.micros;
    map(page, measured, &format!("GB/s copied, {size} at a time"), &rates, &|share| share)?;
    map(page, measured, "µs until a copy of 8 bytes is done", &times, &|share| 1.0 - share)?;
    page.push_str("</div>\n");
    let mut reasons: Vec<&str> =
        measured.cells.iter().flatten().filter_map(|cell| cell.why.as_deref()).collect();
    reasons.sort_unstable();
    reasons.dedup();
    for reason in reasons {
        writeln!(page, "<p class=\"note\">–: {}</p>", escape(reason))?;
    }
    Ok(())
}

fn map(
    page: &mut String,
    measured: &Measured,
    title: &str,
    of: &dyn Fn(&Cell) -> Option<f64>,
    heat: &dyn Fn(f64) -> f64,
) -> std::fmt::Result {
    let all: Vec<f64> = measured.cells.iter().flatten().filter_map(of).collect();
    let least = all.iter().copied().fold(f64::INFINITY, f64::min).max(1e-9);
    let most = all.iter().copied().fold(1e-9, f64::max);
    writeln!(page, "<figure>\n<figcaption>{}</figcaption>", escape(title))?;
    square(page, &measured.places, |row, column| {
        let cell = &measured.cells[row][column];
        let (from, to) = (escape(&measured.places[row]), escape(&measured.places[column]));
        match of(cell) {
            Some(value) => {
                let share =
                    if most > least { (value.max(least) / least).ln() / (most / least).ln() } else { 0.5 };
                let share = (heat(share) * 100.0).clamp(4.0, 100.0);
                let text = figure(value);
                format!(
                    "<td class=\"heat\" style=\"--heat: {share:.0}%\" title=\"{from} to {to}: {text}\">{text}</td>"
                )
            }
            None => {
                let why = escape(cell.why.as_deref().unwrap_or("not measured"));
                format!("<td class=\"no\" title=\"{from} to {to}: {why}\">–</td>")
            }
        }
    })?;
    page.push_str("</figure>\n");
    Ok(())
}
